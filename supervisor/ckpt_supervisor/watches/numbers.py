"""The numbers that --metrics-file and --metrics-port show, gathered from the journal's lines as they pass.

Owns what is counted. Stores numbers in the loop's thread and does nothing else there; whoever shows them (exposition.py) reads
them in a thread of its own. Must not know how they are shown, nor be asked by anybody who decides something.
"""

from __future__ import annotations

import bisect
from typing import Any

from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import Phase

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)

NAMES_MAX = 100
"""Most different values of one label; what comes later counts as "other"."""


class Durations:
    """A histogram."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, ms: object) -> None:
        """One more, if it is known."""
        if isinstance(ms, int) and not isinstance(ms, bool) and ms >= 0:
            self.counts[bisect.bisect_left(BUCKETS_S, ms / 1_000)] += 1
            self.sum_s += ms / 1_000

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many were not above them, as Prometheus counts."""
        total, found = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), tuple(self.counts), strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Counts:
    """A counter with one label."""

    def __init__(self, *names: str) -> None:
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: object, count: int = 1) -> None:
        """One more of this name."""
        key = str(name)[:NAMES_MAX]
        if key not in self._counts and len(self._counts) >= NAMES_MAX:
            key = "other"
        self._counts[key] = self._counts.get(key, 0) + count

    @property
    def items(self) -> list[tuple[str, int]]:
        """A copy: they are added to in another thread."""
        return list(self._counts.items())


class Numbers:
    """Everything that is shown of one supervisor. None: not known."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.step_s: float | None = None
        self.committed_step: int | None = None
        self.resume_step: int | None = None
        self.committed_at_s: float | None = None
        self.started_at_s: float | None = None
        self.checkpoint_bytes: int | None = None
        self.kill_mono_ms: int | None = None
        """When Slurm kills, on the monotonic clock, while a notice is in force."""
        self.phase = Phase.RUNNING.name
        """"" for a task that follows task 0: it decides nothing, and saves are told of there."""
        self.saves = Counts("committed", "given up")
        self.save, self.hold, self.verify = Durations(), Durations(), Durations()
        self.notices = Counts()
        self.requeues = Counts()
        self.event_commands = Counts("failed", "dropped")
        self.lines = Counts("debug", "info", "warning", "error")
        self.restarts = 0
        self.hangs = 0
        self.oom_kills = 0
        self.tree_bytes: int | None = None
        self.limit: tuple[str, int, int] | None = None
        """Whose limit is nearest, how much of it is used, and the limit."""
        self.exit_code: int | None = None
        self._bytes: tuple[object, int] = (None, 0)
        self._cause: object = None

    def take(self, entry: Entry, at: Stamp) -> None:
        """Learn from a line."""
        self.lines.add(entry.level)
        fields = entry.fields
        match entry.event:
            case "progress":
                self.step = fields["step"]
                if fields["per_step_ms"] is not None:
                    self.step_s = fields["per_step_ms"] / 1_000
            case "memory":
                self.tree_bytes = fields["tree_bytes"]
                if fields["limit_bytes"]:
                    self.limit = (fields["limit_of"], fields["used_bytes"], fields["limit_bytes"])
            case "command_started":
                self._started(fields, at)
            case "notice" | "notice_over":
                self._noticed(entry, at)
            case "verified" | "commit" | "round_given_up" | "adopted":
                self._saved(entry, at)
            case _:
                self._other(entry)

    def _started(self, fields: dict[str, Any], at: Stamp) -> None:
        self.started_at_s = at.wall_ns / 1e9
        self.restarts = max(self.restarts, fields["restart"])
        self.resume_step = fields["resume_step"] if fields["resume_step"] >= 0 else None
        self.step = self.resume_step

    def _noticed(self, entry: Entry, at: Stamp) -> None:
        if entry.event == "notice_over":
            self.kill_mono_ms, self._cause = None, None
            return
        self.kill_mono_ms = at.mono_ms + entry.fields["left_ms"]
        if entry.fields["cause"] != self._cause:
            self._cause = entry.fields["cause"]
            self.notices.add(self._cause)

    def _saved(self, entry: Entry, at: Stamp) -> None:
        fields = entry.fields
        if entry.event == "verified":
            number, known = self._bytes
            self._bytes = (fields["round"], fields["bytes"] + (known if number == fields["round"] else 0))
        elif entry.event == "round_given_up":
            self.saves.add("given up")
        elif entry.event == "adopted":
            if fields["steps"]:
                self.committed_step, self.committed_at_s = max(fields["steps"]), at.wall_ns / 1e9
                self.saves.add("adopted", len(fields["steps"]))
        elif fields["result"] in ("committed", "already there"):
            self.saves.add("committed")
            self.committed_step, self.committed_at_s = fields["step"], at.wall_ns / 1e9
            self.step = max(self.step or 0, fields["step"])
            self.save.add(fields.get("save_ms"))
            self.hold.add(fields.get("hold_ms"))
            self.verify.add(fields.get("verify_ms"))
            if self._bytes[0] == fields["round"]:
                self.checkpoint_bytes = self._bytes[1]

    def _other(self, entry: Entry) -> None:
        fields = entry.fields
        match entry.event:
            case "phase":
                self.phase = fields["after"]
            case "requeue":
                self.requeues.add(fields["result"])
            case "hang_suspected":
                self.hangs += 1
            case "stalled" if "of_task" in fields:
                self.hangs += 1  # Of this task's own ranks `hang_suspected` has told.
            case "oom_kill":
                self.oom_kills = max(self.oom_kills, fields["kills"])
            case "event_command_failed":
                self.event_commands.add("failed")
            case "event_command_dropped":
                self.event_commands.add("dropped", fields["dropped"])
            case "exit":
                self.exit_code = fields["code"]
            case _:
                pass
