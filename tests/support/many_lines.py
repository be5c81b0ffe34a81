"""Journals of a long run, as large as one likes: for figures of what reads them, and to try damage on.

    python -m tests.support.many_lines DIR [--lines N] [--tasks N] [--attempts N] [--seed N]

Owns a made-up story, in the journal's own words and file names: a week of one job, an attempt after the other, each ended by
another cause. `write` returns what it has told, so that a reader of it can be checked. Must not be taken for how long a
supervisor takes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from ckpt_supervisor.adapters.journal import Who, file_name

JOB = "4711"
BEGIN_S = int(datetime(2026, 1, 5, 8, 0, 0, tzinfo=timezone.utc).timestamp())
STEP_MS = 1_000
SAVE_EVERY_MS = 600_000
PROGRESS_EVERY_MS = 10_000
MEMORY_EVERY_MS = 60_000
QUEUED_MS = (20_000, 900_000)
NOTICE_MS = 120_000

CAUSES = (
    "preempted", "end of the time limit ahead", "node failure", "cancelled", "training failed", "training hung",
    "preempted late", "lost", "asked to leave", "out of memory",
)  # fmt: skip
"""In turn. `preempted late`: its last save was given up. `lost`: cut in the middle of a line. The last attempt has finished."""

_encode = msgspec.json.Encoder().encode


class Told(NamedTuple):
    """What the journals of one attempt say.

    `reached` and `kept`: finished steps when it ended, and those that a checkpoint holds. `known`: the last step that a line
    tells of, less than `reached` where it was lost without a word.
    """

    epoch: int
    cause: str
    began_ms: int
    ended_ms: int
    resumed: int
    reached: int
    known: int
    kept: int
    lost_steps: int
    code: int | None


class Line(NamedTuple):
    """One line to be. `at_ms` counts from the attempt's begin."""

    at_ms: float
    task: int
    event: str
    level: str
    fields: dict[str, Any]


class World(NamedTuple):
    """What does not change over the attempts."""

    tasks: int
    random: random.Random
    skewed: Mapping[int, int]
    """By how many ms a task's clock is ahead."""
    job: str = JOB


def write(directory: Path, lines: int = 1_000_000, tasks: int = 64, attempts: int = 50, seed: int = 7, **more: Any) -> list[Told]:
    """Journals of about so many lines in DIR/journal. `more`: `skewed`, `job`, `first_epoch`, `begin_s`."""
    place = directory / "journal"
    place.mkdir(parents=True, exist_ok=True)
    world = World(tasks, random.Random(seed), more.get("skewed", {}), more.get("job", JOB))
    length_ms = _length_for(lines / attempts, tasks)
    told: list[Told] = []
    now_ms, kept = more.get("begin_s", BEGIN_S) * 1_000, -1
    for number in range(attempts):
        cause = "finished" if number == attempts - 1 else CAUSES[number % len(CAUSES)]
        attempt = Attempt(world, more.get("first_epoch", 1) + number, number, now_ms, kept)
        told.append(attempt.run(length_ms, cause))
        attempt.write(place)
        kept = told[-1].kept
        now_ms = told[-1].ended_ms + world.random.randrange(*QUEUED_MS)
    return told


def _length_for(lines: float, tasks: int) -> int:
    """For how long an attempt has to train to tell of itself in so many lines."""
    start, a_round, a_minute = 3 * tasks + 10, 3.2 * tasks + 20, tasks + MEMORY_EVERY_MS / PROGRESS_EVERY_MS
    per_ms = a_round / SAVE_EVERY_MS + a_minute / MEMORY_EVERY_MS
    return max(20_000, int((lines - start - a_round - 4 * tasks) / per_ms))


class Attempt:
    """One start: its lines are gathered, and written in the order of time."""

    def __init__(self, world: World, epoch: int, number: int, began_ms: int, resumed: int) -> None:
        self.world, self.epoch, self.number, self.began_ms, self.resumed = world, epoch, number, began_ms, resumed
        self.lines: list[Line] = []
        self.round = 0
        self.kept = resumed
        self.dead = ""
        """The node that has gone: its tasks say nothing from then on."""

    def say(self, at_ms: float, event: str, level: str = "info", task: int = 0, **fields: Any) -> None:
        """One line more."""
        self.lines.append(Line(at_ms, task, event, level, fields))

    def run(self, length_ms: int, cause: str) -> Told:
        """The whole attempt."""
        ready_ms = self.start()
        end_ms = ready_ms + length_ms
        for at in range(ready_ms + SAVE_EVERY_MS, end_ms - 10_000, SAVE_EVERY_MS):
            self.save(at, "periodic", self.steps_at(at, ready_ms))
        for at in range(ready_ms + PROGRESS_EVERY_MS, end_ms, PROGRESS_EVERY_MS):
            step = self.steps_at(at, ready_ms)
            self.say(at, "progress", "debug", step=step, ahead=step + 1, per_step_ms=STEP_MS, phase="")
        for at in range(MEMORY_EVERY_MS, end_ms, MEMORY_EVERY_MS):
            for task in range(self.world.tasks):
                used = 40_000_000_000 + self.world.random.randrange(10**9)
                fields = {"tree_bytes": used, "used_bytes": used + 10**9, "limit_bytes": 64_000_000_000, "limit_of": "job"}
                self.say(at + task * 7, "memory", "debug", task, **fields)
        reached = max(0, self.resumed) + length_ms // STEP_MS
        over_ms, code = self.end(end_ms, cause, reached)
        ended_ms = self.began_ms + over_ms
        base = max(0, self.resumed)
        lost = reached - max(0, self.kept)
        known = max(line.fields["step"] for line in self.lines if line.event in ("progress", "agreed", "rank_failed"))
        return Told(self.epoch, cause, self.began_ms, ended_ms, base, reached, known, self.kept, lost, code)

    def steps_at(self, at_ms: int, ready_ms: int) -> int:
        """How many are finished then."""
        return max(0, self.resumed) + (at_ms - ready_ms) // STEP_MS

    def start(self) -> int:
        """Until all ranks train; when that is."""
        tasks, chance = self.world.tasks, self.world.random
        path = f"/scratch/run7/step-{self.resumed:09d}" if self.resumed >= 0 else ""
        common = {"resume_from": path, "resume_step": self.resumed, "restart": 0, "dir": "/scratch/run7"}
        if path:
            text = f"from step {self.resumed}, the newest intact checkpoint"
            self.say(40, "resuming", text=text)
        for task in range(tasks):
            begin = 100 if not task else 400 + chance.random() * 600
            if task:
                more = {"of_task": task, "host_of_task": host(task), "task_pid": 900 + task}
                self.say(begin - 2 - chance.random() * 3, "task_joined", **more)
            command = ["python", "train.py", "--config", "large.toml"]
            self.say(
                begin, "command_started", task=task, command=command, command_pid=1_000 + task, guard_pid=999 + task, **common
            )
            hello = {"rank": task, "rank_pid": 2_000 + task, "world_size": tasks, "generation": 0, "sharded": True}
            met = 8_000 + chance.random() * 4_000
            if task:
                self.say(met, "rank_hello", task=task, **hello)
                hello["of_task"] = task
            self.say(met + chance.random() * 3, "rank_hello", **hello)
        look = {"state": "RUNNING", "reason": "None", "restarts": self.number, "end_s": None, "preempt_s": None}
        self.say(300, "look", why="start", **look, requeue=True, batch=True)
        self.say(310, "interval", every_ms=SAVE_EVERY_MS, why="asked for", cost_ms=None, mtbi_ms=None)
        return 15_000

    def save(self, at_ms: float, kind: str, step: int, given_up: str = "") -> float:
        """One round; when it is over."""
        self.round += 1
        tasks, chance, number = self.world.tasks, self.world.random, self.round
        ranks = list(range(tasks))
        self.say(at_ms, "round_begun", round=number, kind=kind, ranks=ranks, save_left_ms=900_000, tries=1)
        self.phase(at_ms, "RUNNING", "AGREEING")
        self.say(at_ms + 1, "rank_requested", round=number, after_ms=0, ranks=ranks)
        self.say(at_ms + 20, "rank_agreed", round=number, after_ms=20, entered=[step, 0], ranks=ranks)
        self.say(at_ms + 21, "agreed", round=number, step=step, safe_point=0)
        go_ms = at_ms + 500 + chance.random() * 600
        for rank in ranks:
            at = go_ms - 1 - chance.random() * 400
            self.say(at, "rank_arrived", round=number, rank=rank, after_ms=int(at - at_ms))
        if given_up:
            reason = f"rank {tasks - 1}: {given_up}"
            over = at_ms + 30_000
            self.say(over - 1, "rank_late", "warning", round=number, rank=tasks - 1, after_ms=29_999, reason=given_up)
            table = {str(rank): "arrived" for rank in ranks[:64]}
            self.say(
                over, "round_given_up", "warning",
                round=number, step=step, took_ms=30_000, ranks=table, reason=reason, in_a_row=1,
            )  # fmt: skip
            return over
        self.say(go_ms, "go", round=number, after_ms=int(go_ms - at_ms))
        self.phase(go_ms, "AGREEING", "SAVING")
        self.say(go_ms + 4, "rank_saving", round=number, after_ms=int(go_ms + 4 - at_ms), ranks=ranks)
        written_ms = go_ms
        for rank in ranks:
            save_ms = int(3_000 + chance.random() * 2_000)
            at = go_ms + save_ms
            written_ms = max(written_ms, at)
            fields = {"after_ms": int(at - at_ms), "save_ms": save_ms, "files": 2, "bytes": 1_700_000_000}
            self.say(at, "rank_written", round=number, rank=rank, **fields)
        return self.commit(at_ms, go_ms, written_ms, step)

    def commit(self, at_ms: float, go_ms: float, written_ms: float, step: int) -> float:
        """The second half of a round."""
        tasks, chance, number = self.world.tasks, self.world.random, self.round
        ranks, over = list(range(tasks)), written_ms
        self.phase(written_ms, "SAVING", "VERIFYING")
        for task in range(tasks):
            at = written_ms + 400 + chance.random() * 500
            over = max(over, at)
            fields = {"round": number, "mode": "full", "problem": "", "bytes": 1_700_000_000}
            if task:
                self.say(at, "verified", task=task, **fields)
                fields["of_task"] = task
            self.say(at + chance.random() * 2, "verified", **fields)
        over += 30
        self.say(over - 10, "rank_verified", "debug", round=number, after_ms=int(over - 10 - at_ms), ranks=ranks)
        times = {"save_ms": int(written_ms - go_ms), "hold_ms": int(written_ms - go_ms), "verify_ms": int(over - written_ms)}
        self.say(over, "commit", round=number, step=step, result="committed", reason="", **times)
        self.say(over, "rank_committed", "debug", round=number, after_ms=int(over - at_ms), ranks=ranks)
        self.say(over + 1, "round_committed", round=number, step=step, took_ms=int(over - at_ms))
        self.phase(over + 2, "VERIFYING", "RUNNING")
        self.say(over + 60, "pruned", removed=[f"step-{max(0, step - 1_800):09d}"], problems=[])
        self.kept = step
        return over + 60

    def phase(self, at_ms: float, before: str, after: str) -> None:
        """A phase of the machine."""
        self.say(at_ms, "phase", "debug", before=before, after=after)

    def end(self, at_ms: int, cause: str, reached: int) -> tuple[int, int | None]:
        """How it ends: when, and with which code."""
        if cause == "lost":
            return at_ms, None
        self.say(at_ms - 1, "progress", "debug", step=reached, ahead=reached, per_step_ms=STEP_MS, phase="")
        if cause == "finished":
            self.save(at_ms, "save and leave", reached)
            for rank in range(self.world.tasks):
                self.say(at_ms + 20_000, "rank_finished", rank=rank)
            return self.exit(at_ms + 21_000, 0, "training has ended by itself")
        if cause in ("training failed", "out of memory", "node failure"):
            return self.fail(at_ms, cause, reached)
        if cause == "training hung":
            text = "training stands still: no rank has finished a step for 10m"
            ranks = list(range(self.world.tasks))
            self.say(at_ms, "hang_suspected", "warning", kind="no progress", ranks=ranks[:9], text=text, stood_ms=1, limit_ms=1)
            self.say(at_ms + 1, "stalled", "warning", ranks=ranks[:9], kind="no progress", text=text)
            self.say(at_ms + 2, "notice", by="hang", cause=cause, **_shares(30_000))
            return self.leave(at_ms + 5_000, cause, fresh=False)
        if cause == "asked to leave":
            self.say(
                at_ms - 5, "control_asked", request="1", what="leave", who="ann", from_host="login1", protect=False, requeue=""
            )
            self.say(at_ms - 4, "asked", what="leave_after_save", every_ms=None, requeue="", by="ann")
        else:
            name = "SIGUSR1" if cause.startswith("end") else "SIGTERM"
            self.say(at_ms, "signal", signal=name, meaning="save and leave")
            for task in range(1, self.world.tasks):
                self.say(at_ms + self.world.random.random() * 5, "signal", task=task, signal=name, meaning="save and leave")
        real = "preempted" if cause == "preempted late" else cause
        self.say(at_ms + 40, "notice", by="SIGTERM", cause=real, **_shares(NOTICE_MS))
        late = cause == "preempted late"
        over = self.save(at_ms + 50, "save and leave", reached, "it was not ready in time" if late else "")
        return self.leave(over, real, fresh=not late)

    def fail(self, at_ms: int, cause: str, reached: int) -> tuple[int, int | None]:
        """The command dies, or a node."""
        rank = self.world.tasks - 1
        if cause == "node failure":
            self.dead = host(rank) if host(rank) != host(0) else ""
            more = {"of_task": rank, "host_of_task": host(rank), "task_pid": 900 + rank}
            self.say(at_ms + 30_000, "task_gone", "warning", **more)
            self.say(at_ms + 30_100, "notice", by="NODE_FAIL", cause=cause, **_shares(30_000))
            return self.leave(at_ms + 31_000, cause, fresh=False)
        if cause == "out of memory":
            text = "the kernel has killed a process of this job for lack of memory"
            self.say(at_ms - 2, "oom_kill", "warning", rank, kills=1, limit_of="job", limit_bytes=64_000_000_000, text=text)
        else:
            self.say(at_ms - 2, "rank_failed", "warning", rank=rank, reason="ValueError: loss is nan", step=reached)
        for task in range(self.world.tasks):
            self.say(at_ms + task, "rank_gone", rank=task, rank_pid=2_000 + task, how="its process has ended", **of_task(task))
        code = 137 if cause == "out of memory" else 1
        self.say(at_ms + 70, "command_exited", "warning", code=code)
        return self.exit(at_ms + 200, code, f"training failed with {code}")

    def leave(self, at_ms: float, cause: str, fresh: bool) -> tuple[int, int | None]:
        """The way out: ranks leave, and the job is requeued."""
        tasks = self.world.tasks
        outcome = "fresh" if fresh else "stale"
        self.say(at_ms, "leaving", "info" if fresh else "warning", outcome=outcome, step=self.kept, reason="")
        self.say(at_ms + 50, "rank_left", went_on=False, ranks=list(range(tasks)))
        for task in range(tasks):
            if host(task) != self.dead:
                self.say(at_ms + 90 + task, "command_exited", task=task, code=0)
        code = 143 if cause == "cancelled" else 75 if fresh else 76
        if code != 143:
            self.say(at_ms + 300, "requeue_called")
            self.say(at_ms + 420, "requeue", result="accepted", reason="")
        return self.exit(at_ms + 900, code, f"{cause}; step {self.kept} is committed")

    def exit(self, at_ms: float, code: int, line: str) -> tuple[int, int | None]:
        """The last word of every task."""
        self.say(at_ms, "exit", code=code, line=line)
        for task in range(1, self.world.tasks):
            if host(task) == self.dead:
                continue
            self.say(at_ms + 1 + task * 0.2, "exit", task=task, code=code, line="the coordinator's status")
        return int(at_ms) + 1 + self.world.tasks, code

    def write(self, place: Path) -> None:
        """All lines, in one file for each task."""
        heads, buffers = {}, {task: bytearray() for task in range(self.world.tasks)}
        for task in range(self.world.tasks):
            who = {"job": self.world.job, "attempt": self.number, "step_id": "0", "epoch": self.epoch, "task": task}
            heads[task] = {**who, "host": host(task), "pid": 900 + task, "v": 1}
        stamp = _Stamps()
        for line in sorted(self.lines, key=lambda line: line.at_ms):
            at_us = int((self.began_ms + line.at_ms + self.world.skewed.get(line.task, 0)) * 1_000)
            own = {"ts": stamp.text(at_us), "mono_ms": 5_000_000 + int(line.at_ms), "event": line.event, "level": line.level}
            buffers[line.task] += _encode({**own, **heads[line.task], **line.fields})
            buffers[line.task] += b"\n"
        is_lost = not any(line.event in ("exit", "rank_finished") for line in self.lines)
        for task, data in buffers.items():
            if is_lost and not task:
                del data[-40:]  # Its host has lost power while it was writing.
            name = file_name(Who(self.world.job, self.number, "0", self.epoch, task))
            (place / name).write_bytes(data)


class _Stamps:
    """Instants as the journal writes them; the seconds' text is kept, as many lines share it."""

    def __init__(self) -> None:
        self._second, self._text = -1, ""

    def text(self, at_us: int) -> str:
        second, rest = divmod(at_us, 1_000_000)
        if second != self._second:
            self._second = second
            self._text = datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._text}.{rest:06d}Z"


def host(task: int) -> str:
    """Four tasks a node."""
    return f"node{task // 4 + 1:03d}"


def of_task(task: int) -> dict[str, int]:
    """As a line of the coordinator's names another task."""
    return {"of_task": task} if task else {}


def _shares(left_ms: int) -> dict[str, int]:
    shares = {"save": 0.6, "verify": 0.7, "leave": 0.8, "out": 0.9}
    return {"left_ms": left_ms, **{f"{name}_left_ms": int(left_ms * share) for name, share in shares.items()}}


def main() -> None:
    """Write them where the command line says."""
    parser = argparse.ArgumentParser(prog="many_lines", description="write journals of a long run")
    parser.add_argument("directory", type=Path)
    for name, default in (("lines", 1_000_000), ("tasks", 64), ("attempts", 50), ("seed", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for one in write(given.directory, given.lines, given.tasks, given.attempts, given.seed):
        print(one)


if __name__ == "__main__":
    main()
