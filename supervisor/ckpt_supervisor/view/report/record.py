"""The facts behind the report as JSON (docs/schemas/ckptctl-report.json).

Owns what it has beyond `ckptctl timeline --json`, whose keys view/run_record.py owns: the saves, the points of the lines, and
what has become of the checkpoints. Must not leave out what the page shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckpt_supervisor.view import run_record
from ckpt_supervisor.view.amounts import iso
from ckpt_supervisor.view.facts import Attempt, Commit, Round, Run
from ckpt_supervisor.view.report.seen import Seen


def record(run: Run, seen: Mapping[int, Seen], notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """One value."""
    base = run_record.record(run)
    attempts = [{**told, **_more(one)} for told, one in zip(base["attempts"], run.attempts, strict=True)]
    checkpoints = [msgspec.to_builtins(seen[step]) for step in sorted(seen)]
    return {**base, "attempts": attempts, "checkpoints": checkpoints, "notes": [*notes, *run.notes]}


def _more(one: Attempt) -> dict[str, Any]:
    return {
        "commits": [_commit(commit) for commit in one.commits],
        "rounds": [_round(item) for item in one.rounds],
        "progress": [{"at": iso(at_ns), "step": step} for at_ns, step in one.progress],
        "memory": [{"at": iso(at_ns), "bytes": held, "limit_bytes": limit or None} for at_ns, held, limit in one.memory],
    }


def _commit(commit: Commit) -> dict[str, Any]:
    told = msgspec.to_builtins(commit)
    del told["at_ns"]
    return {"at": iso(commit.at_ns), **told, "kind": commit.kind or None, "mode": commit.mode or None}


def _round(item: Round) -> dict[str, Any]:
    told = msgspec.to_builtins(item)
    del told["begin_ns"], told["end_ns"]
    return {"begin_at": iso(item.begin_ns), "end_at": iso(item.end_ns), **told, "kind": item.kind or None}
