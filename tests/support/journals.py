"""Journals of made-up starts, line by line, in the journal's own form and names.

Owns the shape of a line and some turns of a run that tests tell often. Must not know what a reader makes of them.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpt_supervisor.adapters.journal import Who, file_name

BEGIN_S = int(datetime(2026, 1, 5, 8, 0, 0, tzinfo=timezone.utc).timestamp())


class Start:
    """One task's journal of one start; instants in seconds since BEGIN_S. `ahead_s`: its wall clock is set so far ahead."""

    def __init__(self, directory: Path, epoch: int = 1, attempt: int = 0, task: int = 0, **more: Any) -> None:
        self.job = more.get("job", "4711")
        self.step_id = more.get("step_id", "0")
        self.who = Who(self.job, attempt, self.step_id, epoch, task)
        self.host = more.get("host", f"node{task}")
        self.ahead_s = more.get("ahead_s", 0)
        self.path = directory / "journal" / file_name(self.who)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def say(self, at_s: float, event: str, level: str = "info", **fields: Any) -> Start:
        """One line more."""
        when = datetime.fromtimestamp(BEGIN_S + at_s + self.ahead_s, timezone.utc)
        ts = when.isoformat(timespec="microseconds").replace("+00:00", "Z")
        stamp = {"ts": ts, "mono_ms": round(1_000_000 + at_s * 1_000), "event": event, "level": level}
        line = {**stamp, **self.who._asdict(), "host": self.host, "pid": 900 + self.who.task, "v": 1, **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        return self

    def begin(self, at_s: float, resume: int = -1, ranks: int = 1, restart: int = 0) -> Start:
        """The command starts, and a second later its ranks attach."""
        resume_from = "" if resume < 0 else f"/ckpt/step-{resume:09d}"
        self.say(at_s, "command_started", command=["python"], resume_from=resume_from, resume_step=resume, restart=restart)
        for rank in range(ranks):
            self.say(at_s + 1, "rank_hello", rank=rank, rank_pid=5000 + rank, world_size=ranks, generation=0, sharded=False)
        return self

    def save(self, at_s: float, number: int, step: int, kind: str = "periodic", ranks: int = 1) -> Start:
        """A save of 2 s that is committed half a second later."""
        self.say(at_s, "round_begun", round=number, kind=kind, ranks=list(range(ranks)), save_left_ms=60_000, tries=1)
        if kind != "periodic":
            for rank in range(ranks):
                self.say(at_s, "rank_agreed", round=number, rank=rank, after_ms=5, entered=[step, 0])
            self.say(at_s, "agreed", round=number, step=step, safe_point=0)
        for rank in range(ranks):
            self.say(at_s + 0.1, "rank_arrived", round=number, rank=rank, after_ms=100)
        self.say(at_s + 0.1, "go", round=number, after_ms=100)
        for rank in range(ranks):
            self.say(at_s + 2.1, "rank_written", round=number, rank=rank, after_ms=2_100, save_ms=2_000, files=1, bytes=1_000)
        self.say(at_s + 2.1, "phase", "debug", before="SAVING", after="VERIFYING")
        self.say(at_s + 2.5, "verified", round=number, mode="full", problem="", bytes=1_000 * ranks)
        times = {"save_ms": 2_000, "hold_ms": 2_100, "verify_ms": 500}
        self.say(at_s + 2.6, "commit", round=number, step=step, result="committed", reason="", **times)
        self.say(at_s + 2.6, "round_committed", round=number, step=step, took_ms=2_600)
        after = "LEAVING" if kind == "save and leave" else "RUNNING"
        return self.say(at_s + 2.6, "phase", "debug", before="COMMITTING", after=after)

    def notice(self, at_s: float, cause: str, by: str = "SIGTERM", left_s: float = 30) -> Start:
        """A notice with so much time left."""
        left_ms = round(left_s * 1_000)
        shares = {"save_left_ms": left_ms - 6_000, "verify_left_ms": left_ms - 4_000, "leave_left_ms": left_ms - 2_000}
        self.say(at_s, "signal", signal=by, meaning="save and leave")
        return self.say(at_s, "notice", by=by, cause=cause, left_ms=left_ms, **shares, out_left_ms=left_ms - 1_000)

    def leave(self, at_s: float, outcome: str, code: int, line: str = "left", reason: str = "", requeue: str = "") -> Start:
        """The way out."""
        self.say(at_s, "leaving", outcome=outcome, step=-1, reason=reason)
        if requeue:
            self.say(at_s, "requeue_called")
            self.say(at_s + 0.1, "requeue", result=requeue, reason="")
        self.say(at_s + 0.5, "command_exited", code=0)
        return self.exit(at_s + 0.6, code, line)

    def exit(self, at_s: float, code: int, line: str = "left") -> Start:
        """The last word."""
        return self.say(at_s, "exit", code=code, line=line)

    def ended(self, at_s: float, code: int) -> Start:
        """Training ends by itself with this status, and so does the start."""
        self.say(at_s, "command_exited", "info" if code == 0 else "warning", code=code)
        line = "training has ended by itself" if code == 0 else f"training failed by itself with status {code}"
        return self.exit(at_s + 0.1, code, line)


def preempted(directory: Path, epoch: int = 1, attempt: int = 0, at_s: float = 0, resume: int = -1, **more: Any) -> Start:
    """A start of 100 s, a step a second, saved at its step 50, preempted after 90 steps, saved and requeued."""
    base = max(0, resume)
    start = Start(directory, epoch, attempt, **more).begin(at_s, resume)
    start.save(at_s + 51, 1, base + 50).notice(at_s + 91, "preempted")
    start.save(at_s + 91, 2, base + 90, "save and leave")
    return start.leave(at_s + 93.6, "fresh", 75, f"preempted; step {base + 90} is committed", requeue="accepted")
