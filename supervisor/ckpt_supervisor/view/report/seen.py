"""What has become of the checkpoints that a run has committed, by a look at names and sizes.

Owns the five states that the report draws. Must not read a byte of a checkpoint: the report of a long run is made in
seconds, on a login node. What was pruned is not damaged: only the newest commit of all is never pruned, so only its absence
is bad news.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.view.facts import Run
from ckpt_supervisor.view.report.words import counted

FULL = "full"
STRUCTURE = "structure"
REMOVED = "removed"
BAD = "damaged or missing"
UNSEEN = "not looked at"
_BESIDE = {"damaged": "put aside as damaged", "failed": "set aside, as training fails from it"}
STATES = (FULL, STRUCTURE, REMOVED, BAD, UNSEEN)


class Seen(msgspec.Struct, frozen=True):
    """One checkpoint. `text`: what is wrong with it, or what is known."""

    step: int
    state: str
    text: str


def look(directory: Path, run: Run) -> tuple[dict[int, Seen], tuple[str, ...]]:
    """What there is of each step that was committed, and of each that lies there; and notes. Raises nothing."""
    modes = {commit.step: commit.mode for one in run.attempts for commit in one.commits}
    try:
        candidates = store.scan(directory)
        beside = {one.step: _BESIDE[one.kind] for one in store.leftovers(directory) if one.kind in _BESIDE}
    except OSError as error:
        text = f"{directory} cannot be looked at: {error.strerror or error}"
        seen = {step: Seen(step, UNSEEN, text) for step in modes}
        return seen, (f"what has become of the checkpoints is not known: {text}",)
    there = {candidate.step: _judged(candidate) for candidate in candidates}
    newest = max((*modes, *there), default=-1)
    gone = {step: _gone(step, newest, beside.get(step, "")) for step in modes if step not in there}
    bad = [one for one in (*there.values(), *gone.values()) if one.state == BAD]
    notes = (_warned(bad),) if bad else ()
    return {**there, **gone}, notes


def _judged(candidate: store.Candidate) -> Seen:
    problem = candidate.problem
    if problem is not None:
        state = UNSEEN if problem.verdict is store.Verdict.UNKNOWN else BAD
        return Seen(candidate.step, state, str(problem))
    if candidate.manifest is None:
        return Seen(candidate.step, UNSEEN, "its manifest could not be read")
    if candidate.manifest.verified == "full":
        return Seen(candidate.step, FULL, "whole by names and sizes; every byte was read back before it was committed")
    return Seen(candidate.step, STRUCTURE, "whole by names and sizes; only its structure was checked before it was committed")


def _gone(step: int, newest: int, beside: str) -> Seen:
    if beside:
        return Seen(step, BAD, beside)
    if step == newest:
        return Seen(step, BAD, "missing: it is the newest one that was committed, and is not there")
    return Seen(step, REMOVED, "pruned, as a rule")


def _warned(bad: list[Seen]) -> str:
    newest = max(bad, key=lambda one: one.step)
    return (
        f"{counted(len(bad), 'checkpoint')} of this directory {'is' if len(bad) == 1 else 'are'} damaged or missing now; "
        f"the newest of them is step {newest.step:,} ({newest.text})"
    )
