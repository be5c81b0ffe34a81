"""One start as its coordinator's journal tells of it: an Attempt, put together line by line.

Owns what each event means for time spent, steps reached and steps lost. Pure. Must not know other starts (story.py puts those
side by side), nor name the cause (causes.py). Why lost steps are counted here: a restart in place loses steps inside one attempt,
and the journal tells at each point how far training had come.
"""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.view.facts import PROGRESS_MAX, Attempt, Notice
from ckpt_supervisor.view.instants import Instants
from ckpt_supervisor.view.pieces import Pieces, milliseconds
from ckpt_supervisor.view.told_notice import BY_SLURM, REQUEUED, told_again
from ckpt_supervisor.view.told_rounds import STANDS, WORDS, Rounds
from ckpt_supervisor.view.told_steps import Steps, thinned
from ckpt_supervisor.view.told_waves import Waves
from ckpt_supervisor.view.values import number, text

RELAYED = "the coordinator's status"
"""The last line of a relay that was told how to end."""

MARKS_MAX = 200
HOSTS_MAX = 4_096

_MS = 1_000_000
_MARKS = {
    "hang_suspected": ("hang", "text"),
    "stalled": ("hang", "text"),
    "oom_kill": ("oom", "text"),
    "task_gone": ("task", "host_of_task"),
    "coordinator_lost": ("task", "reason"),
    "rank_went_back": ("warning", "text"),
    "memory_near_limit": ("warning", "text"),
    "passed_over": ("warning", "text"),
    "warning": ("warning", "text"),
    "taken_over": ("warning", "text"),
    "journal_anew": ("warning", "text"),
    "asked": ("asked", "what"),
}
EVENTS = frozenset(
    {
        "command_started", "command_not_started", "command_exited", "status_masked", "refused", "exit", "recalled", "interval",
        "rank_hello", "rank_finished", "rank_failed", "rank_left", "progress", "hang_over", "resuming",
        "signal", "notice", "notice_over", "look", "round_begun", "round_turned", "agreed", "go", "phase", "verified", "commit",
        "round_committed", "round_given_up", "adopted", "leaving", "requeue_called", "requeue", "resubmit", "task_joined",
        "killed", "guard_lost", "command_ended", "memory", "rank_gone", *_MARKS,
    }
)  # fmt: skip
"""What is read of a coordinator's journal."""


class Telling:
    """One start. `take` has its lines in order; `told` ends it."""

    def __init__(self, attempt: Attempt, ahead_ns: int = 0) -> None:
        self.attempt = attempt
        self.instants = Instants(ahead_ns)
        self.rounds = Rounds()
        self.pieces = Pieces()
        self.steps = Steps()
        self._waves = Waves()
        self.failures: list[str] = []
        """What is known of how training failed, newest last."""
        self.hung = ""
        self.oom = ""
        self.signals: list[str] = []
        self.masked = ""
        self.refusal = ""
        self.command_code: int | None = None
        self.is_called = False
        """The requeue was called: what Slurm says from here on is of its making."""
        self.tasks = {0}
        self.loads: list[tuple[int, int, int, int]] = []
        """(instant, task, bytes of its tree, limit): memory lines."""
        self._hosts: dict[str, None] = {}
        self._marks: list[tuple[int, str, str]] = []
        self.notice: Notice | None = None
        """The notice in force, or the one that ended it."""
        self.has_told = False
        """It is known what its command was started from."""
        self._has_started = False
        self._has_left = False
        self._newest = -1
        self._last_ns: int | None = None

    def take(self, line: dict[str, Any]) -> None:
        """One line more."""
        at_ns = self.instants.at(line)
        if at_ns is None:
            return
        event = text(line.get("event"))
        self._last_ns = at_ns
        if self.attempt.began_ns is None:
            self.attempt.began_ns = at_ns
            self.attempt.host = text(line.get("host"))
            self.pieces.turn("starting", at_ns)
        if event == "rank_gone":
            self._waves.gone(line)
        if event in WORDS and line.get("round") is not None:
            return  # A rank's part of a round; those that are wanted are read later.
        if event in _MARKS:
            kind, key = _MARKS[event]
            self._mark(at_ns, kind, text(line.get(key)) or event.replace("_", " "))
        for take in (_OFTEN[event],) if event in _OFTEN else _ALL:
            take(self, event, line, at_ns)

    def _mark(self, at_ns: int, kind: str, words: str) -> None:
        if len(self._marks) < MARKS_MAX:
            self._marks.append((at_ns, kind, words))

    def _take_command(self, event: str, line: dict[str, Any], at_ns: int) -> None:
        attempt = self.attempt
        match event:
            case "command_started":
                self._start(line, at_ns)
            case "command_not_started":
                self.failures.append(text(line.get("reason")))
                self.command_code = number(line.get("code"))
            case "command_exited" if line.get("of_task") is None:
                self.command_code = number(line.get("code"))
                self.pieces.turn("leaving", at_ns)
            case "status_masked":
                self.masked = text(line.get("reason"))
            case "refused":
                self.refusal = text(line.get("text")) or "no reason was told"
            case "recalled":
                saves = line.get("saves_ms")
                seen = [number(one) for one in saves] if isinstance(saves, list) else []
                attempt.seen_saves_ms = tuple(one for one in seen if one is not None)[:5]
            case "interval":
                attempt.every_ms, attempt.every_why = number(line.get("every_ms")), text(line.get("why"))
            case "oom_kill":
                self.oom = text(line.get("text")) or "the kernel has killed a process for lack of memory"
            case "stalled" | "hang_suspected":
                self.hung = text(line.get("kind")) or self.hung
            case "task_joined":
                of_task, host = number(line.get("of_task")), text(line.get("host_of_task"))
                if of_task is not None and len(self.tasks) < HOSTS_MAX:
                    self.tasks.add(of_task)
                    self._hosts[host] = None
            case "memory":
                self.load(line, at_ns, 0)
            case _:
                pass

    def load(self, line: dict[str, Any], at_ns: int, task: int) -> None:
        """A line of how much memory a task's processes hold."""
        tree, limit = number(line.get("tree_bytes")), number(line.get("limit_bytes"))
        if tree is not None and tree >= 0:
            self.loads.append((at_ns, task, tree, limit or 0))

    def _start(self, line: dict[str, Any], at_ns: int) -> None:
        attempt, step = self.attempt, number(line.get("resume_step"))
        self.has_told = self.has_told or (step is not None and not self._has_started)
        step = -1 if step is None else step
        restart = number(line.get("restart")) or 0
        self._waves = Waves()
        if self._has_started and restart:
            self._again("started again in place", step, at_ns)
            self._newest = step
            self.command_code, self.masked = None, ""
        elif not self._has_started:
            attempt.resume_step, attempt.resume_from = step, text(line.get("resume_from"))
            self._newest = step
        self._has_started = True
        self.steps.start()
        self.pieces.turn("starting", at_ns)

    def _again(self, how: str, step: int, at_ns: int) -> None:
        """Training begins again at this step: what was done after it is lost, and what was said of the failure is over."""
        self.attempt.restarts += 1
        self._mark(at_ns, "restart", f"{how} from {'the beginning' if step < 0 else f'step {step}'}")
        if self.steps.reached is not None and not self.steps.is_exact:
            self.attempt.lost_before_is_least = True
        self._lose(step, at_ns)
        self.failures, self.oom, self.hung = [], "", ""

    def _hello(self, line: dict[str, Any], at_ns: int) -> None:
        self.attempt.world_size = max(self.attempt.world_size, min(number(line.get("world_size")) or 0, 1 << 24))
        if self._waves.hello(line):
            # One that its launcher has started again goes on from the newest checkpoint, as our own restarts do.
            if not self._waves.ended_well:
                self._again("its launcher has started it again", self._newest, at_ns)
            self._waves.begin()
            self.steps.start()
            self.pieces.again("leaving", "starting")
        elif self.pieces.kind != "starting":
            return
        self.pieces.turn("training", at_ns)
        self.steps.reach(at_ns, max(0, self._newest))

    def _take_step(self, event: str, line: dict[str, Any], at_ns: int) -> None:
        match event:
            case "rank_hello":
                self._hello(line, at_ns)
            case "rank_finished" if line.get("round") is None:
                self._waves.finished()
                if self.pieces.kind == "training":
                    self.pieces.turn("leaving", at_ns)
            case "rank_failed":
                self._fail(line, at_ns)
            case "rank_left":
                self._has_left = True
            case "progress":
                # `ahead` is what the foremost rank has finished: steps that have to be done again, all the same.
                steps = [one for one in (number(line.get("step")), number(line.get("ahead"))) if one is not None and one >= 0]
                if steps:
                    self.steps.reach(at_ns, max(steps))
            case "hang_suspected":
                self.steps.hang(at_ns, line)
            case "hang_over":
                self.steps.hung_ns = None
                # The step that the rank is at: those before it are finished.
                self.steps.reach(at_ns, (number(line.get("step")) or 0) - 1)
            case _:
                pass

    def _fail(self, line: dict[str, Any], at_ns: int) -> None:
        step = number(line.get("step"))
        where = f" after step {step}" if step is not None and step >= 0 else ""
        self._waves.failed()
        self.failures.append(f"rank {line.get('rank')}{where}: {text(line.get('reason'))}")
        self.steps.die(at_ns, step)

    def _lose(self, step: int, until_ns: int) -> None:
        for since_ns in (self.steps.hung_ns, self.steps.lose(step)):
            if since_ns is not None:
                self.pieces.lose(since_ns, until_ns)

    def _take_round(self, event: str, line: dict[str, Any], at_ns: int) -> None:
        before = self.rounds.open
        if event == "commit" and before is not None and before.written_ns is not None:
            self._hold(line, before.written_ns)
        self.rounds.take(event, line, at_ns)
        if event == "go" and before is not None:
            self.steps.reach(at_ns, before.step)
        if event in ("round_given_up", "round_committed") and self.pieces.kind == "saving":
            self.pieces.turn("training", at_ns)
        match event:
            case "go" if before is not None and self.pieces.kind == "training":
                self.pieces.turn("saving", at_ns)
            case "phase" if line.get("after") == "VERIFYING" and self.pieces.kind == "saving":
                is_last = before is not None and before.is_last
                self.pieces.turn("verifying" if is_last else "training", at_ns)
            case "phase" if line.get("after") in ("LEAVING", "REQUEUEING"):
                self.pieces.turn("leaving", at_ns)
            case "phase" if line.get("after") == "RUNNING" and self.pieces.kind in ("saving", "verifying"):
                self.pieces.turn("training", at_ns)
            case "round_committed" | "round_given_up" if before is not None:
                self.steps.stood(before.go_ns, number(line.get("step")))
            case "commit" if line.get("result") in STANDS:
                step = number(line.get("step"))
                self._newest = max(self._newest, -1 if step is None else step)
                if before is not None:
                    self.steps.stood(before.go_ns, step)
            case "adopted":
                self._adopt(line, at_ns)
            case _:
                pass

    def _hold(self, line: dict[str, Any], written_ns: int) -> None:
        """Training stood already before the save began: from the first rank that had come to the agreed step."""
        hold_ms, save_ms = number(line.get("hold_ms")), number(line.get("save_ms"))
        if hold_ms is not None and save_ms is not None and hold_ms > save_ms >= 0:
            self.pieces.hold(written_ns - hold_ms * _MS, written_ns)

    def _adopt(self, line: dict[str, Any], at_ns: int) -> None:
        steps = line.get("steps")
        found = [one for one in map(number, steps) if one is not None and one >= 0] if isinstance(steps, list) else []
        if found:
            self._newest = max(self._newest, *found)
            self.rounds.adopted(max(found), at_ns)
            self.steps.reach(at_ns, max(found))
            if not self.attempt.world_size:
                self.pieces.rename("starting", "training")  # A program without the line in its loop: nobody says when it began.

    def _take_end(self, event: str, line: dict[str, Any], at_ns: int) -> None:
        attempt = self.attempt
        match event:
            case "signal" if len(self.signals) < MARKS_MAX:
                self.signals.append(text(line.get("signal")))
            case "notice":
                self._notice(line, at_ns)
            case "notice_over":
                self._mark(at_ns, "notice", "no end in sight: training goes on")
                self.notice = None
            case "leaving":
                attempt.outcome, attempt.reason = text(line.get("outcome")), text(line.get("reason"))
                self.pieces.turn("leaving", at_ns)
            case "requeue_called":
                self.is_called = True
            case "requeue":
                result, reason = text(line.get("result")), text(line.get("reason"))
                attempt.requeue = f"{result}: {reason}" if reason and result == "refused" else result
                self._mark(at_ns, "requeue", attempt.requeue)
            case "resubmit":
                attempt.requeue = "resubmitted" if line.get("accepted") is True else f"refused: {text(line.get('reason'))}"
                self._mark(at_ns, "requeue", attempt.requeue)
            case "exit":
                attempt.code, attempt.line = number(line.get("code")), text(line.get("line"))
            case _:
                pass

    def _notice(self, line: dict[str, Any], at_ns: int) -> None:
        """One word more of the notice. What Slurm says once the requeue was called is of the requeue's making."""
        if self.is_called:
            return
        before, cause = self.notice, text(line.get("cause"))
        if before is not None and cause == REQUEUED and before.cause in BY_SLURM:
            self.attempt.requeue = self.attempt.requeue or "already pending"
        self.notice = told_again(before, line, at_ns)
        if before is None or self.notice.cause != before.cause:
            self._mark(at_ns, "notice", f"{self.notice.cause} ({text(line.get('by'))})")

    def inherit(self, heir: Telling, is_all: bool) -> None:
        """Take over what another task's journal tells of the end, where the coordinator's does not (`is_all`: there is none)."""
        own, other = self.attempt, heir.attempt
        if is_all and not own.is_told and not self.pieces.kind:
            self.pieces, own.resume_step, own.resume_from = heir.pieces, other.resume_step, other.resume_from
            self.has_told, own.world_size = heir.has_told, other.world_size
        if self.notice is None and heir.notice is not None:
            self.notice = heir.notice
            self._marks += heir._marks
            self.pieces.turn("leaving", heir.notice.at_ns)
        own.outcome, own.reason = own.outcome or other.outcome, own.reason or other.reason
        own.requeue = own.requeue or other.requeue
        if own.code is None and other.code is not None:
            own.code, own.line = other.code, "" if other.line == RELAYED else other.line
        if is_all or own.began_ns is None:
            own.host = own.host or other.host
            times = [one for one in (own.began_ns, other.began_ns) if one is not None]
            own.began_ns = min(times, default=None)
            if own.began_ns is not None and not self.pieces.kind:
                self.pieces.turn("starting", own.began_ns)
        if heir._last_ns is not None and (self._last_ns is None or heir._last_ns > self._last_ns):
            self._last_ns = heir._last_ns

    @property
    def needs_reasons(self) -> bool:
        """Training has failed by itself, or it ended without a word: other tasks may know more."""
        if self.failures or self.oom or self.refusal:
            return False
        cause = "" if self.notice is None else self.notice.cause
        return self.attempt.code is None or (self.attempt.code != 0 and cause in ("", "training failed"))

    def reason(self, line: dict[str, Any], task: int) -> None:
        """What another task's journal tells of the failure."""
        if line.get("event") == "oom_kill":
            host = text(line.get("host"))
            self.oom = self.oom or f"task {task}{f' on {host}' if host else ''}: {text(line.get('text'))}"
        else:
            self.failures.append(f"task {task}: the process between supervisor and command was killed")

    def told(self) -> Attempt:
        """The attempt as far as its own journal tells; cause, queue and what later starts say of it come on top."""
        attempt = self.attempt
        attempt.notice = self.notice
        attempt.ended_ns = self._last_ns
        attempt.marks = tuple(self._marks)
        attempt.commits, attempt.rounds = self.rounds.commits(), self.rounds.rounds()
        attempt.saves, attempt.failed_saves, attempt.hold_ms = self.rounds.saves, self.rounds.failed, self.rounds.hold_ms
        attempt.kept = self._newest if self._newest >= 0 and attempt.is_told else None
        attempt.tasks_told = len(self.tasks)
        attempt.hosts = tuple(host for host in {attempt.host: None, **self._hosts} if host)
        attempt.reached = self.steps.reached
        is_parked = self._is_parked(attempt.reached)
        attempt.is_exact = is_parked or self.steps.is_exact
        attempt.progress = thinned(self.steps.series, PROGRESS_MAX)
        if attempt.notice is not None and attempt.code is not None and self._last_ns is not None:
            attempt.out_ms = (self._last_ns - attempt.notice.at_ns) // _MS
        return attempt

    def _is_parked(self, reached: int | None) -> bool:
        """All ranks stood at the last save's step, and none has run on: one that lives on after it may do a step more."""
        if self.attempt.outcome == "fresh":
            return self._newest == reached
        last = self.attempt.rounds[-1] if self.attempt.rounds else None
        stood = last is not None and last.kind == "save and leave" and last.arrive_ms is not None and last.step == reached
        return stood and not self._has_left

    def lost_from(self, base: int, is_all_kept: bool) -> None:
        """`base`: the step that the run goes on from; `is_all_kept`: nothing of the last start is to be done again."""
        attempt = self.attempt
        if self._last_ns is None:
            return
        if not is_all_kept:
            self._lose(base, self._last_ns)
        is_known = attempt.is_told and (attempt.reached is not None or not self._has_started)
        attempt.lost_steps = self.steps.lost if is_known else None
        attempt.spans = self.pieces.spans(self._last_ns)
        attempt.lost_ms = milliseconds(attempt.spans, "lost")


_ALL = (Telling._take_command, Telling._take_step, Telling._take_round, Telling._take_end)
_OFTEN = {"progress": Telling._take_step, "memory": Telling._take_command, "verified": Telling._take_round}
"""By far most lines are of these: only who has a use for one is asked."""
