"""What earlier attempts came to: how they ended, whether they got anywhere, how long they trained and their saves took.

Owns that reading of the journals of a directory, and of the manifests where journals are gone. Must not decide anything: the core
does (core/history.py has the words). Attempts are counted here and never taken from SLURM_RESTART_COUNT, which is unset at first
and counts restarts of every kind (field case 54): an attempt is one start of task 0's supervisor, one journal. What is not
written down did not happen as far as this module knows, so a journal that is gone uses up no budget.

A run that --resubmit carries on has another job's number. It is the same run to every budget: else a job that crashes again and
again would come back for ever under new numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ckpt_supervisor import store
from ckpt_supervisor.core.history import SAVES_MAX, History
from ckpt_supervisor.core.policy import EXIT_CANCELLED, Cause
from ckpt_supervisor.core.state import Kind
from ckpt_supervisor.start import earlier

HAD_TIME_MS = 60_000
"""An attempt that trained for so long before it was interrupted had its time (core/comeback.py)."""

MANIFESTS_MAX = 10
"""So many manifests are read where no journal tells how long a save took."""

OF_THE_LIMIT = frozenset({Cause.LIMIT_AHEAD.value, Cause.TIME_LIMIT.value})
BY_ITSELF = frozenset({Cause.CRASHED.value, Cause.HUNG.value})
"""Training has failed, or stood still, by itself."""

BY_A_PERSON = frozenset({Cause.CANCELLED.value, Cause.ASKED.value})

STANDS = ("committed", "already there")
"""Words of the journal for a commit that stands; only the first one is of a save."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One start of task 0's supervisor, as its journal shows it; `take` has it line by line."""

    job: str
    epoch: int
    is_whole: bool = True
    """Nothing of its journal was left out."""
    resume_step: int = -1
    """What its first command resumed from."""
    started_ms: int | None = None
    """When its first command started, and its first rank attached; by the clock of this journal, as the next ones."""
    attached_ms: int | None = None
    stopped_ms: int | None = None
    """When training was stopped: the first word of the notice, or the command's own end."""
    last_ms: int | None = None
    """Its last line."""
    cause: str = ""
    """The last cause of the notice in force; "" if there was none. Not what the requeue itself has made of it."""
    is_called: bool = False
    """The requeue was called: what Slurm says from here on is of its making."""
    requeue: str = ""
    """What the requeue came to, in the words of the journal."""
    is_resubmitted: bool = False
    newest: int = -1
    """The highest step that it committed or adopted."""
    failed: bool = False
    """Training has failed while nobody had asked it to end."""
    code: int | None = None
    """Exit status of the attempt; None if it was cut off."""
    saves: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """How long its newest saves took, and held training, in order."""
    tried_ms: int = 0
    """How long a last save had been running that was given up."""
    go_ms: int | None = None
    is_last_save: bool = False
    recalled: dict[str, int] = dataclasses.field(default_factory=dict)
    """What had come before it, as it was read at its own start: `timeouts`, `crashes` and `stalled`."""

    @property
    def ended_by_the_limit(self) -> bool:
        """Its time limit has ended it."""
        return self.cause in OF_THE_LIMIT and self.code not in (0, EXIT_CANCELLED)

    @property
    def crashed(self) -> bool:
        """Training has failed by itself, and the job came back for that: by Slurm, or by --resubmit where Slurm refused."""
        return self.cause == Cause.CRASHED.value and (self.requeue != "refused" or self.is_resubmitted)

    @property
    def was_interrupted(self) -> bool:
        """A notice has ended it, or it was lost; an end that a person asked for is neither."""
        if self.started_ms is None:
            return False
        return self.code is None if not self.cause else self.code != 0 and self.cause not in BY_A_PERSON

    @property
    def trained_ms(self) -> int:
        """From its first rank's attaching (its start, where none did) to the notice or its end, as far as it is written down."""
        began_ms = self.started_ms if self.attached_ms is None else self.attached_ms
        until_ms = self.last_ms if self.stopped_ms is None else self.stopped_ms
        return 0 if began_ms is None or until_ms is None else max(0, until_ms - began_ms)

    @property
    def had_time(self) -> bool:
        """It could have got further: a rank trained for a while, training failed or hung by itself, or all its time was over."""
        if self.failed or self.cause in BY_ITSELF or self.cause in OF_THE_LIMIT:
            return True
        return self.attached_ms is not None and self.trained_ms >= HAD_TIME_MS

    def got_further(self, next_step: int) -> bool:
        """Whether it has committed something newer than it resumed from, or come to a good end.

        `next_step`: what came after it began there. It decides where the journal is too long to have been read as a whole.
        """
        return self.newest > self.resume_step or self.code == 0 or (not self.is_whole and next_step > self.resume_step)

    def take(self, line: dict[str, Any]) -> None:
        """One line more."""
        at_ms = _int(line.get("mono_ms"))
        self.last_ms = self.last_ms if at_ms is None else at_ms
        match line.get("event"):
            case "command_started":
                self._start(line, at_ms)
            case "rank_hello":
                self.attached_ms = at_ms if self.attached_ms is None else self.attached_ms
            case "notice" if not self.is_called:
                # Told again when its cause is known better: its time counts from the first word of it.
                self.stopped_ms = at_ms if self.stopped_ms is None else self.stopped_ms
                self.cause = str(line.get("cause"))
            case "notice_over":
                self.cause, self.stopped_ms = "", None
            case "command_exited" if not self.cause:
                self.failed = self.failed or line.get("code") != 0
                self.stopped_ms = at_ms
            case "status_masked":
                self.failed = True
            case "round_begun":
                self.is_last_save, self.go_ms = line.get("kind") == Kind.LEAVE.value, None
            case "round_turned":
                self.is_last_save = line.get("kind") == Kind.LEAVE.value
            case "go":
                self.go_ms = at_ms
            case "round_given_up" if self.is_last_save and self.go_ms is not None and at_ms is not None:
                self.tried_ms = max(self.tried_ms, at_ms - self.go_ms)
            case "commit" if line.get("result") in STANDS:
                self._commit(line)
            case "adopted":
                steps = line.get("steps")
                self.newest = max((self.newest, *filter(_is_int, steps if isinstance(steps, list) else ())))
            case "requeue_called":
                self.is_called = True
            case "requeue":
                self.requeue = str(line.get("result"))
            case "resubmit":
                self.is_resubmitted = line.get("accepted") is True
            case "exit":
                self.code = _int(line.get("code"))
            case "recalled":
                counts = {name: _int(line.get(name)) for name in ("timeouts", "crashes", "stalled")}
                self.recalled = {name: count for name, count in counts.items() if count is not None}
            case _:
                pass

    def _start(self, line: dict[str, Any], at_ms: int | None) -> None:
        if self.started_ms is None:
            step = _int(line.get("resume_step"))
            self.started_ms, self.resume_step = at_ms, -1 if step is None else step
        elif not self.cause:
            self.stopped_ms = None  # Started again in place: it trains on.

    def _commit(self, line: dict[str, Any]) -> None:
        step, save_ms, hold_ms = (_int(line.get(name)) for name in ("step", "save_ms", "hold_ms"))
        self.newest = self.newest if step is None else max(self.newest, step)
        if save_ms is not None and save_ms > 0 and line.get("result") == STANDS[0]:
            self.saves = [*self.saves, (save_ms, save_ms if hold_ms is None else hold_ms)][-SAVES_MAX:]


def read(directory: Path, job: str, epoch: int) -> History:
    """What came before the start of this epoch, by the journals of the newest `earlier.STARTS_BACK_MAX` starts.

    Where there are more, the oldest of these says what the budgets had come to by then. Raises nothing that a disk can cause.
    """
    found = [one for one in earlier.journals(directory) if one[0] < epoch]
    attempts = list(_attempts(found[: earlier.STARTS_BACK_MAX]))
    own = list(_of_one_run(attempts, job))
    is_all = len(found) <= earlier.STARTS_BACK_MAX
    saves = [save for attempt in attempts for save in reversed(attempt.saves)][:SAVES_MAX] or _by_manifests(directory)
    return History(
        timeouts=_counted(own, "timeouts", [attempt.ended_by_the_limit for attempt in own], is_all),
        crashes=_counted(own, "crashes", [attempt.crashed for attempt in own], is_all),
        stalled=_stalled(own, max(_steps(directory), default=-1), is_all),
        saves_ms=tuple(save_ms for save_ms, _ in saves),
        holds_ms=tuple(hold_ms for _, hold_ms in saves),
        tried_ms=max((attempt.tried_ms for attempt in attempts[:SAVES_MAX]), default=0),
        interruptions=sum(attempt.was_interrupted for attempt in attempts),
        ran_ms=sum(attempt.trained_ms for attempt in attempts),
    )


def _counted(own: Sequence[Attempt], name: str, counts: Sequence[bool], is_all: bool) -> int:
    """How many of these count, and, if there were older ones (not `is_all`), how many of those did."""
    known = [place for place, attempt in enumerate(own) if name in attempt.recalled]
    if is_all or not known:
        return sum(counts)
    return max(sum(counts), own[known[-1]].recalled[name] + sum(counts[: known[-1] + 1]))


def _attempts(journals: Sequence[tuple[int, str, Path]]) -> Iterator[Attempt]:
    """Newest first."""
    for number, job, path in journals:
        try:
            lines, is_whole = earlier.read(path)
        except OSError:
            continue
        yield told_by(lines, job, number, is_whole)


def told_by(lines: Iterable[dict[str, Any]], job: str, epoch: int, is_whole: bool = True) -> Attempt:
    """What one journal shows of its attempt."""
    attempt = Attempt(job, epoch, is_whole)
    for line in lines:
        attempt.take(line)
    return attempt


def _of_one_run(attempts: Sequence[Attempt], job: str) -> Iterator[Attempt]:
    """Those of this job, and of jobs that it carries on, since they were resubmitted right before it."""
    jobs, is_next = {job}, True
    for attempt in attempts:
        if attempt.is_resubmitted and is_next:
            jobs.add(attempt.job)
        is_next = attempt.job in jobs
        if is_next:
            yield attempt


def _stalled(attempts: Sequence[Attempt], newest: int, is_all: bool = True) -> int:
    """How many in a row; `newest` is the highest step in the directory now, `is_all`: there are no older ones than these."""
    count, next_step = 0, newest
    for attempt in attempts:
        if attempt.got_further(next_step):
            return count
        count += attempt.had_time
        next_step = next_step if attempt.started_ms is None else attempt.resume_step
    return count if is_all or not attempts else count + attempts[-1].recalled.get("stalled", 0)


def _steps(directory: Path) -> list[int]:
    """The steps whose names are there, newest first."""
    try:
        names = store.list_names(directory)
    except OSError:
        return []
    return sorted((step for step in map(store.parse_step, names) if step is not None), reverse=True)


def _by_manifests(directory: Path) -> list[tuple[int, int]]:
    """Saves as the newest manifests tell of them. How long training was held they do not say: at least as long."""
    found = []
    for step in _steps(directory)[:MANIFESTS_MAX]:
        try:
            manifest = store.read_manifest(directory / store.step_name(step))
        except store.ManifestError:
            continue
        if manifest.save_ms > 0:
            found.append((manifest.epoch, step, manifest.save_ms))
    return [(save_ms, save_ms) for _, _, save_ms in sorted(found, reverse=True)][:SAVES_MAX]


def _int(value: object) -> int | None:
    return value if _is_int(value) else None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
