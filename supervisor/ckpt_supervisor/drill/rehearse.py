"""One path from start to end: wait until training is at work, disturb it, look what it does, and whether it comes back.

Owns the order and the bounds. Every wait is for a fact in the journal or of the job, with a bound, and is told of. What
"disturb" comes to is the ground's (local.py, cluster.py); what the facts are worth is verdict.py's.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol, TypeVar

from ckpt_supervisor import store
from ckpt_supervisor.drill import facts as read
from ckpt_supervisor.drill.facts import Facts, Line, Probe
from ckpt_supervisor.drill.plan import Plan, limit_for
from ckpt_supervisor.view.log import Tail, journals, moment

PACE_S = 0.5
FIRST_PACE_S = 1.5
HANG_MS_MAX = 120_000
"""A --hang-floor that is longer is not waited for."""

HANG_SLACK_MS = 60_000
PROBES_LEAST = 2
PROBES_MAX = 20
STEPS_LEAST = 2
"""Before it is disturbed training has done so many steps: a checkpoint of the first one could not be told from a new start."""

T = TypeVar("T")


class NotSeenError(Exception):
    """What was waited for did not come; the message says what."""


class NotStartedError(Exception):
    """The ground could not even begin; the message says why."""


class StoppedError(Exception):
    """The user has had enough."""


class Ground(Protocol):
    """Where a path is rehearsed. All calls return soon; `tick` is made often, and is where time passes for the job."""

    directory: Path
    look_s: float
    queue_ms: int
    """How long a job may wait for its start."""
    slack_ms: int
    """How much later than its bounds everything may be over."""
    notes: tuple[str, ...]
    """What is to be told of how it was rehearsed."""

    def start(self, limit_ms: int | None) -> None:
        """The first attempt, or the next one; a limit only where it is to be reached."""

    def tick(self) -> None:
        """Do what is due by now."""

    def is_running(self) -> bool:
        """Whether the present attempt has begun."""

    def is_over(self) -> bool:
        """Whether the present attempt has ended."""

    def ask_save(self) -> None:
        """The signal that means: save and go on."""

    def disturb(self, path: str) -> int | None:
        """Interrupt the job in this way; the time from now to SIGKILL in ms, None if there is no kill."""

    def strike(self, line: Line, number: int) -> None:
        """A signal to the rank whose rank_hello this is."""

    def lose(self) -> None:
        """SIGKILL of everything."""

    def outcome(self) -> tuple[int | None, bool | None, bool]:
        """Exit status, whether it was killed for being late (None for either: the journal has to tell), and whether the job
        comes back."""

    def tail(self) -> str:
        """The last words of its output."""

    def end(self) -> None:
        """Leave nothing of it running."""


class Rehearsal:
    """One path on one ground. `tell` is told what is being waited for; `stopped` says whether to give up."""

    def __init__(self, path: str, plan: Plan, ground: Ground, tell: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        self.path = path
        self.plan = plan
        self.ground = ground
        self._tell = tell
        self._stopped = stopped
        self._pause = threading.Event()
        self._tails: dict[Path, Tail] = {}
        self._lines: list[Line] = []
        """Of all attempts, in the order in which they were read."""
        self._probes: list[Probe] = []
        """Of the first start."""
        self._notes: tuple[str, ...] = ()
        self._start_ms = 0
        """How long the first start took until training had done its first steps."""

    def run(self) -> Facts:
        """Rehearse it; never longer than its bounds. Raises StoppedError."""
        began = time.monotonic()
        try:
            seen = self._run()
        except (NotSeenError, NotStartedError) as error:
            seen = Facts(self.path, str(error), before=tuple(self._lines), probes=tuple(self._probes), newest=self._newest())
        finally:
            self.ground.end()
        return read.timed(seen, time.monotonic() - began)

    def _run(self) -> Facts:
        self._tell("starting")
        self.ground.start(None)
        hello = self._at_work(0, PROBES_LEAST)
        if self.path == "limit":
            return self._limit()
        if self.path in ("crash", "nodeloss"):
            return self._struck(hello)
        unsaved_ms, mark = None, len(self._lines)
        if self.path == "hang":
            unsaved_ms = self._strike(hello)
            self._notes = self._found_out()
            if self.ground.is_over():
                return self._interrupted(mark, None, unsaved_ms, wait_ms=0)
        mark = len(self._lines)
        given_ms = self.ground.disturb("nograce" if self.path == "hang" else self.path)
        return self._interrupted(mark, given_ms, unsaved_ms)

    def _found_out(self) -> tuple[str, ...]:
        """Whether the supervisor notices a rank that stands still, where its limit is not too long to wait for."""
        floor_ms = self.plan.options.hang_floor_ms
        if floor_ms is None or floor_ms > HANG_MS_MAX:
            return ("whether it is found out was not waited for (--hang-floor)",)
        began, mark = time.monotonic(), len(self._lines)
        try:
            self._until(lambda: read.first(self._lines[mark:], "stalled"), "the hang to be found out", floor_ms + HANG_SLACK_MS)
            note = f"found out after {time.monotonic() - began:.0f} s"
            if self.plan.options.on_hang != "warn":
                done = f"--on-hang {self.plan.options.on_hang}"
                self._until(lambda: self.ground.is_over() or self._again(mark), done, self.plan.start_ms)
                if not self.ground.is_over():
                    self._at_work(mark, 1)
        except NotSeenError as error:
            note = f"{read.NOT_FOUND}: {error}"
        return (note,)

    def _limit(self) -> Facts:
        """The first attempt has shown how long a start takes; the second one gets a limit that fits."""
        save_ms = max((probe.save_ms for probe in self._probes), default=0)
        limit_ms = limit_for(self.plan, self._start_ms, save_ms)
        self.ground.lose()
        self._until(
            self.ground.is_over, "the first attempt, which was to show how long a start takes, to end", self.ground.slack_ms
        )
        mark = self._read()
        self.ground.start(limit_ms)
        self._hello(mark)
        given_ms = None if self.plan.lead_ms is None else self.plan.lead_ms + self.plan.kill_wait_ms
        return self._interrupted(mark, given_ms, None, wait_ms=limit_ms + self.plan.kill_wait_ms)

    def _struck(self, hello: Line) -> Facts:
        mark = len(self._lines)
        if self.path == "nodeloss":
            unsaved_ms = self._unsaved_ms()
            self.ground.lose()
            return self._interrupted(mark, None, unsaved_ms, wait_ms=0)
        unsaved_ms = self._strike(hello)
        self._until(
            lambda: self.ground.is_over() or self._again(mark),
            "the training to be started again in place, or to end",
            self.plan.start_ms,
        )
        if self.ground.is_over():
            return self._interrupted(mark, None, unsaved_ms, wait_ms=0)
        self._at_work(mark, 1)
        newest = self._resumable(mark)
        lines = tuple(self._lines[mark:])
        return Facts(
            self.path, before=lines, after=lines, probes=tuple(self._probes), newest=newest, unsaved_ms=unsaved_ms, requeued=False
        )

    def _again(self, mark: int) -> bool:
        return read.first(self._lines[mark:], "command_started") is not None

    def _resumable(self, mark: int) -> int | None:
        """Of a restart in place: the newest checkpoint that stood when the command was started again."""
        place = next(number for number, line in enumerate(self._lines) if number >= mark and line["event"] == "command_started")
        return max((int(line["step"]) for line in read.commits(self._lines[:place])), default=None)

    def _strike(self, hello: Line) -> int:
        self.ground.strike(hello, signal.SIGKILL if self.path == "crash" else signal.SIGSTOP)
        return self._unsaved_ms()

    def _unsaved_ms(self) -> int:
        """Since the newest commit. By the wall clock, since the journal may be another machine's."""
        newest = list(read.commits(self._lines))[-1]
        stamp = moment(str(newest["ts"]))
        return 0 if stamp is None else max(0, round((datetime.now(timezone.utc) - stamp).total_seconds() * 1000))

    def _interrupted(self, mark: int, given_ms: int | None, unsaved_ms: int | None, wait_ms: int | None = None) -> Facts:
        """Wait for the end of this attempt, and see what the next one does."""
        bound_ms = (given_ms or 0) if wait_ms is None else wait_ms
        self._until(self.ground.is_over, "the supervisor to save and leave", bound_ms + self.ground.slack_ms)
        self._read()
        code, killed, requeued = self.ground.outcome()
        before = tuple(self._lines[mark:])
        exit_line = read.last(before, "exit")
        if code is None and exit_line is not None:
            code = int(exit_line["code"])
        newest = self._newest()
        if unsaved_ms is None and self._probes:
            unsaved_ms = self._unsaved_ms()
        after: tuple[Line, ...] = ()
        if self.path != "cancel" and newest is not None:
            # A job that was not requeued is started again by hand, as its owner would do.
            self._tell("starting it again")
            again = len(self._lines)
            self.ground.start(None)
            self._at_work(again, 1)
            after = tuple(self._lines[again:])
        return Facts(
            self.path,
            given_ms=given_ms,
            before=before,
            probes=tuple(self._probes),
            newest=newest,
            code=code,
            killed=(exit_line is None and self.path != "nodeloss") if killed is None else killed,
            requeued=requeued,
            revived=self.path == "cancel" and read.first(before, "requeue_called") is not None,
            unsaved_ms=unsaved_ms,
            after=after,
            notes=(*self._notes, *self.ground.notes),
        )

    def _at_work(self, mark: int, probes: int) -> Line:
        """Until training of this start has attached, and has saved so many times when it was asked to."""
        began = time.monotonic()
        hello = self._hello(mark)
        if self.plan.options.adopt:
            return self._adopted(mark, hello)
        for done in range(1, PROBES_MAX + 1):
            if done > 1 or probes == 1:
                # Until its first step is over, a trainer is taken to be where it was told to go on from. The first start trains
                # for longer than the next one: a trainer that begins from scratch is not to have come as far by then.
                self._train(PACE_S if probes == 1 else FIRST_PACE_S)
            at = len(self._lines)
            self.ground.ask_save()
            commit = self._saved(at)
            if probes > 1:
                self._probes.append(read.probe_of(self._lines[at:], commit))
            if done >= probes and (probes == 1 or int(commit["step"]) >= STEPS_LEAST):
                break
        self._start_ms = self._start_ms or round((time.monotonic() - began) * 1000)
        return hello

    def _train(self, pace_s: float) -> None:
        """Let it train for a moment: with nothing but saves the time of a step cannot be told."""
        end = time.monotonic() + pace_s
        while time.monotonic() < end and not self._stopped():
            self.ground.tick()
            self._pause.wait(self.ground.look_s)

    def _saved(self, at: int) -> Line:
        def stands() -> Line | None:
            return next(read.commits(self._lines[at:]), None)

        def over() -> str:
            line = read.last(self._lines[at:], "round_given_up")
            return "" if line is None else f"a save was asked for, with no end in sight, and failed: {line.get('reason', '')}"

        return self._until(stands, "a step boundary, and a first save there", self.plan.start_ms, over)

    def _hello(self, mark: int) -> Line:
        """A rank that has attached; of a program that saves by itself none will."""
        adopts = bool(self.plan.options.adopt)
        event = "command_started" if adopts else "rank_hello"
        what = "the command to start" if adopts else "a rank to attach"
        self._until(self.ground.is_running, "the job to start", self.ground.queue_ms)

        def there() -> Line | None:
            # A rank on the node of task 0 is the one that can be struck.
            lines = self._lines[mark:]
            return next((line for line in lines if line["event"] == event and "of_task" not in line), None)

        return self._until(there, what, self.plan.start_ms)

    def _adopted(self, mark: int, hello: Line) -> Line:
        what = "a checkpoint of the program's own that --adopt finds"
        self._until(lambda: read.last(self._lines[mark:], "adopted", problem=""), what, self.plan.start_ms)
        return hello

    def _until(self, look: Callable[[], T | None], what: str, bound_ms: int, over: Callable[[], str] | None = None) -> T:
        """What `look` finds; raises NotSeenError when it does not, or cannot any more."""
        self._tell(f"waiting for {what}")
        end = time.monotonic() + bound_ms / 1000
        is_end = look == self.ground.is_over
        while True:
            if self._stopped():
                raise StoppedError
            self.ground.tick()
            was_over = self.ground.is_over()  # Asked first: what was written right before the end is read.
            self._read()
            found = look()
            if found:
                return found
            reason = over() if over is not None else ""
            if reason:
                raise NotSeenError(reason)
            if was_over and not is_end:
                code = self.ground.outcome()[0]
                status = "" if code is None else f" with {code}"
                raise NotSeenError(f"it ended{status} before {what}: {self.ground.tail()}")
            if time.monotonic() >= end:
                raise NotSeenError(f"waited {bound_ms / 1000:.0f} s for {what}, in vain")
            self._pause.wait(self.ground.look_s)

    def _read(self) -> int:
        """Take in what the journals say now; how many lines there are."""
        try:
            found = journals(self.ground.directory)
        except OSError:
            return len(self._lines)
        for path in found:
            tail = self._tails.setdefault(path, Tail(path))
            self._lines += tail.lines()
        return len(self._lines)

    def _newest(self) -> int | None:
        """The newest checkpoint that is whole, every byte read."""
        try:
            choice = store.newest_intact(self.ground.directory, "full")
        except OSError:
            return None
        return None if choice.chosen is None else choice.chosen.step
