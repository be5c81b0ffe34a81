#!/usr/bin/env python3
"""Marks a run as preempted rather than crashed, in a small JSON file, for dashboards and scripts that look.

For `ckpt-supervise --on-event`: takes one line of the journal on standard input (docs/journal.md) and replaces the state file.
Standard library only, so that any Python runs it. Must not fail for a line that it does not know, and never leaves half a file.

    ckpt-supervise --on-event 'python3 mark_preempted.py' ...                          # DIR/run-state.json
    ckpt-supervise --on-event 'python3 mark_preempted.py --state /tracking/run7' ...   # /tracking/run7/run-state.json

The file: {"state", "since", "job", "attempt", "step", "reason", "preemptions", "history": [{"at", "state", "reason"}, ...]}.
States: running, stopping (a notice has come), preempted (it comes back, or waits for whoever starts it again), finished,
cancelled, failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

STATE = "run-state.json"
LINE_BYTES_MAX = 1_000_000
HISTORY_MAX = 100

INTERRUPTED = (75, 76)
CANCELLED = 143
CRASHED = "training failed"


def state_of(event: dict[str, Any], before: str) -> tuple[str, str] | None:
    """The state after this event and why, or None where it changes nothing."""
    name = event.get("event")
    if name == "command_started":
        return "running", f"from step {event['resume_step']}" if event.get("resume_step", -1) >= 0 else "from the beginning"
    if name == "notice":  # Also told again when the cause or the time changes, even after the requeue.
        cause = str(event.get("cause", ""))
        if cause == CRASHED:
            return "failed", cause  # It may be requeued for that, and is no preemption all the same.
        return None if before == "preempted" else ("stopping", cause)
    if name == "notice_over":
        return "running", str(event.get("reason", ""))
    if name == "requeue" and event.get("result") in ("accepted", "already pending"):
        return ("failed", f"{CRASHED}; requeued") if before == "failed" else ("preempted", "requeued")
    if name == "refused":
        return "failed", str(event.get("text", ""))
    if name == "exit":
        return _ended(event, before)
    return None


def _ended(event: dict[str, Any], before: str) -> tuple[str, str]:
    """What an exit status means: docs/exit-codes.md. A site's own status of `--requeue exit:N` comes after a notice as well."""
    code, line = event.get("code"), str(event.get("line", ""))
    if code == 0:
        return "finished", line
    if code == CANCELLED:
        return "cancelled", line
    if code in INTERRUPTED or before in ("stopping", "preempted"):
        return "preempted", line
    return "failed", line or f"status {code}"


def record(path: Path, event: dict[str, Any]) -> None:
    """Bring the state file up to date, at once or not at all."""
    known = _known(path)
    found = state_of(event, str(known.get("state", "")))
    step = _step(event)
    if found is None and step is None:
        return
    state, reason = found or (str(known.get("state", "running")), str(known.get("reason", "")))
    history = known.get("history")
    history = history if isinstance(history, list) else []
    is_new = state != known.get("state")
    preemptions = int(known.get("preemptions", 0)) + (1 if is_new and state == "preempted" else 0)
    if is_new:
        history = [*history, {"at": event.get("ts"), "state": state, "reason": reason}][-HISTORY_MAX:]
    _replace(
        path,
        {
            "state": state,
            "since": event.get("ts") if is_new else known.get("since"),
            "job": event.get("job"),
            "attempt": event.get("attempt"),
            "step": known.get("step") if step is None else step,
            "reason": reason,
            "preemptions": preemptions,
            "history": history,
        },
    )


def _step(event: dict[str, Any]) -> int | None:
    """The step of the checkpoint that stands, where the event tells."""
    step = event.get("step") if event.get("event") in ("commit", "leaving") else None
    return step if isinstance(step, int) and step >= 0 and event.get("result", "committed") != "failed" else None


def _known(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LINE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _replace(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(fd, "w") as file:  # noqa: PTH123 - a descriptor.
            json.dump(content, file, indent=2)
            file.write("\n")
        Path(made).chmod(0o644)
        Path(made).replace(path)
    except OSError:
        Path(made).unlink()
        raise


def main() -> int:
    """One event; the exit status tells the supervisor's journal whether it went well."""
    parser = argparse.ArgumentParser(description="Mark a run as preempted rather than crashed.")
    parser.add_argument("--state", metavar="DIR", default=os.environ.get("CKPT_SUPERVISE_DIR", "."), help="where the file is")
    arguments = parser.parse_args()
    try:
        event = json.loads(sys.stdin.buffer.read(LINE_BYTES_MAX))
    except ValueError as error:
        sys.stderr.write(f"mark_preempted: no line of a journal on standard input: {error}\n")
        return 1
    try:
        record(Path(arguments.state) / STATE, event if isinstance(event, dict) else {})
    except OSError as error:
        sys.stderr.write(f"mark_preempted: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
