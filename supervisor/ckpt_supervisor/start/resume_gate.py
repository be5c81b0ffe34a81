"""What the command resumes from: the newest checkpoint that is whole, and when something else than that.

Owns the choice and the words for it. Must not change a checkpoint (but for marking one as read in full), nor follow `latest`, nor
decide twice: the coordinator's choice is that of all ranks. May block for as long as a checkpoint takes to be read: it runs in a
lane. Three things stand before the newest: the user's own explicit value, unless this very job has committed something since
(field case 99); a checkpoint that training has failed from again and again, which is set aside under another name as long as
there is one to fall back to (field case 125); and damage, which is passed over by name, never by starting from zero (field case
82).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.config import Options
from ckpt_supervisor.start import earlier, startup

LINES_MAX = 20
"""Most checkpoints that are named as passed over."""

REASON_CHARS_MAX = 120
"""torch's word on weights that do not fit names each of them."""

SEEN_LATE_S = (0.1, 0.4, 1.0, 1.5)
"""Pauses before a checkpoint that `latest` names and the listing lacks is looked for once more."""

LOOK_AGAIN_S = (0.5, 1.0, 1.5)
"""Pauses, for all checkpoints together, before one that could not be looked at is looked at once more."""

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """What the command resumes from (path "" for nothing), what to tell, and why it may not start ("" if it may)."""

    path: str
    step: int
    lines: tuple[str, ...]
    """What was passed over, and why."""
    refusal: str = ""
    damaged: frozenset[int] = frozenset()
    """Steps that were passed over: they do not count as checkpoints to keep, and are not pruned."""
    several: bool = False
    """It holds files of more ranks than rank 0."""
    notes: tuple[str, ...] = ()
    """What was chosen."""
    warnings: tuple[str, ...] = ()


NOTHING = Resume("", -1, ())


def choose(options: Options, job: str, epoch: int, progress: Progress | None) -> Resume:
    """What to resume from, with a word for each newer one. Only damaged ones: a refusal, not a start from zero."""
    back = _brought_back(options.dir, epoch)
    gate = _Gate(options, job, epoch, progress)
    value = startup.explicit_value(options.command, options.resume_arg)
    resume = gate.told(gate.newest() if value is None else gate.explicit(value))
    return dataclasses.replace(resume, warnings=(*back, *resume.warnings, *_still_aside(options.dir, resume)))


def _brought_back(directory: Path, epoch: int) -> tuple[str, ...]:
    """A whole checkpoint whose removal was cut off, and that is needed after all, has its name again before the choice."""
    said = []
    try:
        going = [name for name in store.list_names(directory) if store.parse_trash(name) is not None]
        for name in sorted(going, key=lambda name: store.parse_trash(name) or (), reverse=True):
            if not store.check_epoch(directory, epoch):
                break
            fate, why = store.settled(directory, directory / name)
            if fate == "back":
                said.append(f"{name} {why}")
    except OSError as error:
        said.append(f"what was on its way out could not be looked at: {error}")
    return tuple(said)


class _Gate:
    """One choice: what has been found out for it so far."""

    def __init__(self, options: Options, job: str, epoch: int, progress: Progress | None) -> None:
        self._options = options
        self._job = job
        self._epoch = epoch
        self._progress = progress
        self._starts: list[earlier.Start] = []
        self._more = earlier.starts(options.dir, epoch)
        self._as_named = False
        """The command's own value is taken."""
        self._failed: dict[int, tuple[store.Candidate, tuple[earlier.Start, ...]]] = {}
        """Checkpoints that are passed over because training fails from them, and the starts that did."""
        self._answered: dict[int, int] | None = None
        """Failures that do not count any more, by step: up to this epoch."""

    # --- the two ways -------------------------------------------------------------------------------------------------

    def newest(self) -> Resume:
        """The newest intact checkpoint that training has not failed from again and again."""
        lines: list[str] = []
        named = self._named_by_latest(lines)
        choice = self._look(self._is_trusted, named)
        back = self._given_back(lines) if choice.chosen is None and not choice.unknown else frozenset()
        if choice.chosen is None and (self._failed or back):
            lines += [self._tried_again(step) for step in self._failed]
            choice = self._look(lambda candidate: candidate.step in self._failed or candidate.step in back, named)
        elif choice.chosen is not None:
            lines += [self._fallen_back(step, choice.chosen) for step in self._failed]
        lines += _passed_over(choice)
        if choice.chosen is not None:
            return self._taken(choice.chosen, choice, lines)
        return self._nothing(choice, lines)

    def explicit(self, value: str) -> Resume:
        """What the command itself names, unless this very job has committed something since it began from there."""
        arg = self._options.resume_arg
        step = _step_in(self._options.dir, value)
        own = self._look(lambda candidate: self._is_own(candidate, -1 if step is None else step) and self._is_trusted(candidate))
        lines = _passed_over(own)
        if own.chosen is not None:
            lines += [self._fallen_back(failed, own.chosen) for failed in self._failed]
            note = f"{arg} {value} gives way to {own.chosen.path.name}, which this job has committed since"
            return dataclasses.replace(self._taken(own.chosen, own, lines), notes=(note,))
        self._as_named = True
        intact = " intact" if own.passed_over or self._failed else ""
        note = f"{arg} {value} is taken as the command says, as job {self._job} has committed nothing{intact} beyond it"
        if step is None:
            return Resume("", -1, tuple(lines), damaged=_steps_of(own), notes=(note,))
        choice = self._look(lambda candidate: candidate.step == step, step)
        if choice.chosen is not None:
            return dataclasses.replace(self._taken(choice.chosen, choice, lines), notes=(note,))
        why = choice.reason
        if choice.passed_over:
            report = choice.passed_over[0][1]
            why = f"{report.verdict.value}: {report.reason}"
        refusal = f"{arg} names {value}, which is not intact ({why}), so nothing is started: name another one, or leave {arg} out"
        return Resume("", -1, tuple(lines), refusal, damaged=_steps_of(choice))

    # --- what is told ---------------------------------------------------------------------------------------------------

    def told(self, resume: Resume) -> Resume:
        """The same with a word on where the start before began, so that a run without progress is seen (field case 100)."""
        before = next(self._earlier(), None)
        if resume.refusal or (not resume.path and (before is None or before.resume_step < 0)):
            return resume
        what = "the attempt before" if before is None or before.epoch != self._epoch else "the start before"
        note, warnings = f"resuming from step {resume.step}" if resume.path else "starting from scratch", resume.warnings
        if before is not None:
            began = f"at step {before.resume_step}" if before.resume_step >= 0 else "from scratch"
            note += f" ({what} began {began})"
            if resume.step <= before.resume_step and before.code != 0 and not self._as_named and not self._failed:
                warnings = (*warnings, f"no progress since {what}: it began {began} and left nothing newer that is intact")
        return dataclasses.replace(resume, notes=(*resume.notes, note) if resume.path else resume.notes, warnings=warnings)

    def _fallen_back(self, step: int, chosen: store.Candidate) -> str:
        """It is set aside, and what is told of that."""
        why = f"{self._failures(step)}: going on from {chosen.path.name} instead"
        return f"passed over {store.step_name(step)}: {why}; {self._set_aside(step, chosen, why)}"

    def _tried_again(self, step: int) -> str:
        return f"{store.step_name(step)}: {self._failures(step)}: with no other intact one to fall back to it is tried again"

    def _failures(self, step: int) -> str:
        _, failed = self._failed[step]
        why = _short(failed[0].reason) or f"status {failed[0].code}"
        return f"training has failed {len(failed)} times in a row right after resuming from it (the last time: {why})"

    # --- setting aside --------------------------------------------------------------------------------------------------

    def _set_aside(self, step: int, chosen: store.Candidate, text: str) -> str:
        """Rename it, so that it is in nobody's way and is not lost; what became of it, in words."""
        candidate, starts = self._failed[step]
        again = "is left as it is; --resume-tries 0 has it tried again"
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        told = tuple(store.FailedStart(start.epoch, start.code, start.reason) for start in starts)
        try:
            why_not = self._why_not_aside(candidate)
            if why_not:
                return f"it {why_not} and {again}"
            became = store.set_aside(candidate, store.WhyFailed(step=step, epoch=self._epoch, at=at, text=text, starts=told))
            problem = store.lead_past(self._options.dir, step, chosen.path.name)
        except OSError as error:
            return f"it could not be set aside ({error}) and {again}"
        latest = f" (latest could not be mended: {problem})" if problem else ""
        return f"it is set aside as {became.name}{latest}, and ckptctl repair --restore {step} gives it its name back"

    def _why_not_aside(self, candidate: store.Candidate) -> str:
        """Why this one keeps its name, "" if it does not. Raises OSError."""
        directory, every, manifest = self._options.dir, self._options.keep_every, candidate.manifest
        reasons = (
            (manifest is None or candidate.problem is not None, "is not intact"),
            (manifest is not None and manifest.adopted is not msgspec.UNSET, "is a copy of what the program itself has there"),
            (candidate.step in store.kept_steps(directory), "is protected"),
            (every > 0 and candidate.step % max(1, every) == 0, "is a milestone"),
            (not store.check_epoch(directory, self._epoch), "belongs to another run now"),
        )
        return next((reason for is_so, reason in reasons if is_so), "")

    def _given_back(self, lines: list[str]) -> frozenset[int]:
        """Nothing is left that training does not fail from: those that were set aside are no worse, and newer."""
        back = set()
        try:
            for one in store.all_set_aside(self._options.dir):
                if not store.check_epoch(self._options.dir, self._epoch):
                    break
                try:
                    path = store.give_back(one)
                except FileExistsError as error:
                    lines.append(f"{one.path.name} stays set aside: {error.strerror}")
                    continue
                back.add(one.step)
                lines.append(f"{path.name}, set aside earlier, has its name back: no other intact one is left to fall back to")
        except OSError as error:
            lines.append(f"what was set aside could not be looked at: {error}")
        return frozenset(back)

    # --- looking --------------------------------------------------------------------------------------------------------

    def _look(self, wanted: Callable[[store.Candidate], bool], named: int | None = None) -> store.Choice:
        search = store.Search(wanted, named, LOOK_AGAIN_S)
        return store.newest_intact(
            self._options.dir,
            mode=self._options.verify_mode,
            progress=self._progress,
            search=search,
            cache="fresh" if self._options.verify == "readback" else "leave",
        )

    def _named_by_latest(self, lines: list[str]) -> int | None:
        """The step that `latest` names if the listing does not show it and it is there all the same; `latest` decides nothing."""
        directory = self._options.dir
        named = store.latest_step(directory)
        if named is None or named <= max(_listed(directory), default=-1):
            return None
        if store.is_there_late(directory, named, SEEN_LATE_S):
            return named
        lines.append(f"latest names {store.step_name(named)}, which is not there, also not after {sum(SEEN_LATE_S):.0f} s")
        return None

    def _is_own(self, candidate: store.Candidate, beyond: int) -> bool:
        return candidate.manifest is not None and candidate.manifest.job == self._job and candidate.step > beyond

    def _is_trusted(self, candidate: store.Candidate) -> bool:
        tries = self._options.resume_tries
        if not tries:
            return True
        failed = earlier.failed_from(self._earlier(), self._epoch, candidate.step, tries, self._answered_for(candidate.step))
        if failed:
            self._failed[candidate.step] = (candidate, failed)
        return not failed

    def _answered_for(self, step: int) -> int:
        """Up to which epoch failures from this step do not count: it was set aside for them, and put back since."""
        if self._answered is None:
            try:
                self._answered = store.answered_for(self._options.dir)
            except OSError:
                self._answered = {}
        return self._answered.get(step, -1)

    def _earlier(self) -> Iterator[earlier.Start]:
        """Earlier starts, newest first. Journals are read as far back as somebody asks, each once."""
        place = 0
        while True:
            if place == len(self._starts):
                start = next(self._more, None)
                if start is None:
                    return
                self._starts.append(start)
            yield self._starts[place]
            place += 1

    # --- what comes of it -------------------------------------------------------------------------------------------------

    def _taken(self, chosen: store.Candidate, choice: store.Choice, lines: list[str]) -> Resume:
        manifest = chosen.manifest
        if manifest is not None and manifest.verified == "structure":
            # It has just been read in full: from now on it counts toward --keep.
            problem = store.promote(self._options.dir, chosen, self._epoch)
            if problem:
                lines.append(f"{chosen.path.name} could not be marked as fully verified: {problem}")
        several = manifest is not None and len(manifest.ranks) > 1
        damaged = _steps_of(choice) | (self._failed.keys() - {chosen.step})
        path = chosen.path if manifest is None else store.resume_path(chosen.path, manifest)
        return Resume(str(path), chosen.step, tuple(lines), damaged=frozenset(damaged), several=several)

    def _nothing(self, choice: store.Choice, lines: list[str]) -> Resume:
        """Nothing is intact: from scratch only if there is no trace of a checkpoint, or if the user says so."""
        directory = self._options.dir
        aside = _put_aside(directory, self._options.adopt)
        lines += [f"put aside earlier as {_as_what(name)}: {name}" for name in aside[:LINES_MAX]]
        if self._options.allow_restart_from_scratch:
            if choice.passed_over or aside or choice.unknown:
                lines.append("starting from scratch although nothing is intact, as --allow-restart-from-scratch says")
            return Resume("", -1, tuple(lines), damaged=_steps_of(choice))
        if choice.unknown:
            why = f"{directory} cannot be looked at, so nothing is started: {choice.reason}"
            return Resume("", -1, tuple(lines), why)
        count = len(choice.passed_over) + len(aside)
        if count:
            refusal = (
                f"{directory} holds {count} checkpoint{'s' if count > 1 else ''} and none is intact; to start from scratch all "
                "the same, say --allow-restart-from-scratch"
            )
            return Resume("", -1, tuple(lines), refusal)
        if lines:
            lines.append(f"{directory} holds no other trace of a checkpoint: starting from scratch")
        return Resume("", -1, tuple(lines))


def _passed_over(choice: store.Choice) -> list[str]:
    lines = [
        f"passed over {candidate.path.name}: {report.verdict.value}: {report.reason}"
        for candidate, report in choice.passed_over[:LINES_MAX]
    ]
    if len(choice.passed_over) > LINES_MAX:
        lines.append(f"passed over {len(choice.passed_over) - LINES_MAX} more")
    if choice.unknown:
        lines.append(f"could not look at everything: {choice.reason}")
    return lines


def _steps_of(choice: store.Choice) -> frozenset[int]:
    return frozenset(candidate.step for candidate, _ in choice.passed_over)


def _listed(directory: Path) -> list[int]:
    try:
        return [step for step in map(store.parse_step, store.list_names(directory)) if step is not None]
    except OSError:
        return []


def _put_aside(directory: Path, patterns: Sequence[str]) -> list[str]:
    """What was renamed as damaged (by a commit of the same step, by `ckptctl repair`, or a program's own), or since training
    failed from it. Newest step first."""
    try:
        own = store.put_aside_names(directory, patterns)
        names = store.list_names(directory)
        found = [(parts, name) for name in names if (parts := store.parse_damaged(name) or store.parse_failed(name)) is not None]
    except OSError:
        return []
    return [*(name for _, name in sorted(found, reverse=True)), *own]


def _still_aside(directory: Path, resume: Resume) -> tuple[str, ...]:
    """What was set aside by an earlier start, and nobody has decided on: a word at every start, or it is forgotten."""
    try:
        names = [one.path.name for one in store.all_set_aside(directory)]
    except OSError:
        return ()
    names = [name for name in names if not any(name in line for line in (*resume.lines, resume.refusal))]
    steps = [parts[0] for parts in map(store.parse_failed, names) if parts is not None]
    if not steps:
        return ()
    told = f"step {steps[0]} is" if len(steps) == 1 else f"steps {', '.join(map(str, steps[:LINES_MAX]))} are"
    back = f"ckptctl repair --restore {steps[0]} gives it its name back, once training can load it"
    return (f"{told} still set aside, as training fails from {'it' if len(steps) == 1 else 'them'} ({names[0]}); {back}",)


def _short(reason: str) -> str:
    """As much of what a rank said as a line can take; the record of what is set aside has more."""
    words = " ".join(reason.split())
    return words if len(words) <= REASON_CHARS_MAX else words[: REASON_CHARS_MAX - 1] + "…"


def _as_what(name: str) -> str:
    return "damaged" if store.parse_failed(name) is None else "one that training fails from"


def _step_in(directory: Path, value: str) -> int | None:
    """The step of a committed checkpoint of this directory that a value of the command names, by whatever path.

    What was adopted is resumed from by the program's own file in it (`store.resume_path`).
    """
    path, root = Path(os.path.realpath(value)), Path(os.path.realpath(directory))
    place = path if path.parent == root else path.parent
    return store.parse_step(place.name) if place.parent == root else None
