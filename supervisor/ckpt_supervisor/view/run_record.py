"""A run as JSON, for `ckptctl timeline --json`.

Owns the keys: every one is always there, null for what is not known. Instants in RFC 3339, times in ms.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ckpt_supervisor.view.amounts import iso
from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.totals import gained, is_least, label, totals


def record(run: Run) -> dict[str, Any]:
    """One run for scripts."""
    sums = totals(run)
    return {
        "dir": run.directory,
        "jobs": list(run.jobs),
        "totals": msgspec.to_builtins(sums),
        "attempts": [_record(one, run) for one in run.attempts],
        "notes": list(run.notes),
    }


def _record(one: Attempt, run: Run) -> dict[str, Any]:
    notice = one.notice
    told = None if notice is None else {**msgspec.to_builtins(notice), "at": iso(notice.at_ns)}
    if told is not None:
        del told["at_ns"]
    return {
        "label": label(one, run),
        "job": one.job,
        "attempt": one.attempt,
        "epoch": one.epoch,
        "step_id": one.step_id,
        "host": one.host or None,
        "hosts": list(one.hosts),
        "world_size": one.world_size,
        "tasks": one.tasks,
        "began_at": iso(one.began_ns),
        "last_word_at": iso(one.ended_ns),
        "is_running": one.is_running,
        "cause": one.cause or None,
        "detail": one.detail,
        "code": one.code,
        "line": one.line,
        "notice": told,
        "outcome": one.outcome or None,
        "reason": one.reason,
        "requeue": one.requeue or None,
        "restarts": one.restarts,
        "resume_step": one.resume_step if one.resume_step >= 0 else None,
        "reached_step": one.reached,
        "reached_is_exact": one.is_exact,
        "committed_step": one.kept,
        "gained_steps": gained(one),
        "lost_steps": one.lost_steps,
        "lost_is_least": is_least(one),
        "lost_ms": one.lost_ms,
        "saves": one.saves,
        "failed_saves": one.failed_saves,
        "hold_ms": one.hold_ms,
        "out_ms": one.out_ms,
        "spans": [{"kind": span.kind, "begin_at": iso(span.begin_ns), "end_at": iso(span.end_ns)} for span in one.spans],
        "marks": [{"at": iso(at_ns), "kind": kind, "text": text} for at_ns, kind, text in one.marks],
        "notes": list(one.notes),
    }
