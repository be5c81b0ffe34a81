"""What the journal of one attempt says about an interruption, read into times and steps.

Pure: journal lines are arguments. Owns the knowledge of which event ends which share of the time. Must not judge (verdict.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

Line = dict[str, Any]

STANDS = ("committed", "already there")
SHARES = ("agree", "save", "verify", "commit", "leave")


NOT_FOUND = "not found out"
"""How the note of a hang begins that was waited for in vain."""


class Times(msgspec.Struct, frozen=True):
    """How long each share of one last save took, in ms; None from the one on that was not finished."""

    agree_ms: int | None = None
    """From the signal until all ranks stand at the boundary of one step."""
    save_ms: int | None = None
    verify_ms: int | None = None
    commit_ms: int | None = None
    leave_ms: int | None = None
    """From the commit until the supervisor is gone: training ends, the job is requeued."""
    entered: int | None = None
    """The step that training had finished, or was at, when it was asked."""
    step: int | None = None
    """What was committed."""
    given_up: str = ""
    failed_in: str = ""
    """The share in which it was given up, or killed; "" if it was not."""

    @property
    def known_ms(self) -> int:
        """All that was finished."""
        return sum(getattr(self, f"{share}_ms") or 0 for share in SHARES)


class Probe(msgspec.Struct, frozen=True):
    """A save that was asked for beforehand, with no end in sight: where training was, when, and what the save cost."""

    step: int
    mono_ms: int
    times: Times

    @property
    def save_ms(self) -> int:
        """From all ranks being there to the commit."""
        return sum(getattr(self.times, f"{share}_ms") or 0 for share in ("save", "verify", "commit"))


class Facts(msgspec.Struct, frozen=True):
    """Everything that a rehearsal of one path has seen."""

    path: str
    problem: str = ""
    """Why it came to no end: what was waited for in vain."""
    given_ms: int | None = None
    """What the site gives, from the signal to SIGKILL."""
    before: tuple[Line, ...] = ()
    """The journal of the attempt that was interrupted, from the interruption on."""
    probes: tuple[Probe, ...] = ()
    newest: int | None = None
    """The newest intact checkpoint after it, every byte read; None if there is none."""
    code: int | None = None
    killed: bool = False
    """It was still there when its time was over."""
    requeued: bool = False
    revived: bool = False
    """It asked for the requeue of a job that was cancelled."""
    unsaved_ms: int | None = None
    """How long training had run since the newest commit when a rank was struck, or everything killed."""
    after: tuple[Line, ...] = ()
    """The journal of what came next, be it in the same attempt or in the next one."""
    took_s: float = 0.0
    notes: tuple[str, ...] = ()


def last(lines: Iterable[Line], event: str, **fields: object) -> Line | None:
    """The newest such line."""
    found = None
    for line in lines:
        if line.get("event") == event and fields.items() <= line.items():
            found = line
    return found


def first(lines: Iterable[Line], event: str, **fields: object) -> Line | None:
    """The oldest such line."""
    return next((line for line in lines if line.get("event") == event and fields.items() <= line.items()), None)


def commits(lines: Iterable[Line]) -> Iterator[Line]:
    """Commits that stand, oldest first."""
    return (line for line in lines if line.get("event") == "commit" and line.get("result") in STANDS)


def probe_of(lines: Sequence[Line], commit: Line) -> Probe:
    """The save that came to this commit."""
    number = commit["round"]
    mine = [line for line in lines if line.get("round") == number]
    return Probe(int(commit["step"]), int(commit["mono_ms"]), _times(mine, int(mine[0]["mono_ms"]), None))


def of_interruption(lines: Sequence[Line]) -> Times:
    """The last save after an interruption. `lines` begin with it."""
    place = next((number for number, line in enumerate(lines) if line.get("event") in ("signal", "notice")), None)
    if place is None:
        return Times()
    began = int(lines[place]["mono_ms"])
    numbers = [line["round"] for line in lines[place:] if isinstance(line.get("round"), int)]
    done = [line["round"] for line in commits(lines[place:])]
    if not numbers:
        return Times(given_up=str((last(lines, "leaving") or {}).get("reason", "")), failed_in="agree")
    number = done[-1] if done else numbers[-1]
    return _times([line for line in lines if line.get("round") == number], began, last(lines, "exit"))


def _times(mine: Sequence[Line], began: int, exit_line: Line | None) -> Times:
    """Of one round, whose lines these are. What was over before it `began` took no time of it."""
    commit = next(commits(mine), None)
    marks = [
        first(mine, "go"),
        _written(mine),
        first(mine, "verified", problem=""),
        commit,
        exit_line if commit is not None else None,
    ]
    at, spent = began, []
    for mark in marks:
        if mark is None:
            break
        spent.append(max(0, int(mark["mono_ms"]) - at))
        at = max(at, int(mark["mono_ms"]))
    shares = dict(zip([f"{share}_ms" for share in SHARES], spent, strict=False))
    entered = [line["entered"][0] for line in mine if line.get("event") == "rank_agreed" and line.get("entered")]
    given_up = last(mine, "round_given_up") or {}
    return Times(
        **shares,
        entered=max(entered, default=None),
        step=None if commit is None else int(commit["step"]),
        given_up=str(given_up.get("reason", "")),
        failed_in=SHARES[len(spent)] if commit is None else "",
    )


def _written(mine: Sequence[Line]) -> Line | None:
    """The last rank's word that its files are written; None while one of them is still at it."""
    saving = {str(line.get("rank")) for line in mine if line.get("event") == "rank_saving"}
    written = [line for line in mine if line.get("event") == "rank_written"]
    if not written or saving - {str(line.get("rank")) for line in written}:
        return None
    return written[-1]


def step_ms(probes: Sequence[Probe]) -> float | None:
    """How long a step takes: the time between two saves, without the saves; None if it cannot be told."""
    steps = sum(after.step - before.step for before, after in itertools.pairwise(probes))
    if steps <= 0:
        return None
    return max(0, sum(after.mono_ms - after.save_ms - before.mono_ms for before, after in itertools.pairwise(probes))) / steps


def went_on(lines: Sequence[Line]) -> bool:
    """Whether a rank has said that it trains on although it was told to leave."""
    return any(line.get("event") == "rank_left" and line.get("went_on") for line in lines)


def overstayed_ms(lines: Sequence[Line]) -> int | None:
    """After what time training was ended that was told to leave after a save and had not ended by itself; None if it was not."""
    told = first(lines, "leaving", outcome="fresh")
    ended = first(lines, "command_asked") or first(lines, "command_ended")
    return None if told is None or ended is None else int(ended["mono_ms"]) - int(told["mono_ms"])


def resumed(lines: Sequence[Line]) -> int | None:
    """The step that the command was started from; None if it was not started again, -1 for none."""
    line = first(lines, "command_started")
    return None if line is None else int(line.get("resume_step", -1))


def first_step(lines: Sequence[Line]) -> int | None:
    """The first step that training is known to have been at after it was started."""
    entered = (line["entered"][0] for line in lines if line.get("event") == "rank_agreed" and line.get("entered"))
    return next(entered, None)


def timed(seen: Facts, took_s: float) -> Facts:
    """The same, with how long it took."""
    return replace(seen, took_s=round(took_s, 1))
