"""How a job stands right now, from what its journals, the process table and Slurm say of it.

Pure. Owns the words: starting, training, saving, leaving, ending, waiting, finished, cancelled, failed, interrupted, lost,
refused, unknown. Must not guess: where nobody can say whether a start still lives, that is what is said. The newest start counts,
whatever became of those before it, and a job that Slurm calls COMPLETING has not ended (field case 66).
"""

from __future__ import annotations

import msgspec

from ckpt_supervisor.start.holding import ENDED, WAITING
from ckpt_supervisor.view.attempts import Attempt

GONE = "GONE"
"""Slurm does not know the job any more."""

EXIT_CANCELLED = 143

CRASHED = "training failed"
"""The cause of a notice that nobody sent (core/policy.py)."""


class Outside(msgspec.Struct, frozen=True):
    """What was seen besides the journals. `alive`: whether the process of the newest start is; None: cannot be seen from here."""

    alive: bool | None = None
    slurm: str = ""
    """The job's state, GONE, or "" where Slurm could not be asked."""
    problem: str = ""
    """Why it could not."""
    end_ms: int | None = None
    """End of its time, epoch milliseconds."""


class Standing(msgspec.Struct, frozen=True):
    """One word, and a sentence that says what it rests on."""

    word: str
    text: str

    @property
    def listens(self) -> bool:
        """Whether somebody is there to obey a request, or may be."""
        return self.word in ("starting", "training", "saving", "leaving", "unknown")


def standing(last: Attempt, outside: Outside) -> Standing:
    """How the job stands whose newest start this is."""
    return _over(last, outside) if last.code is not None else _without_last_word(last, outside)


def _without_last_word(last: Attempt, outside: Outside) -> Standing:
    state = outside.slurm
    if outside.alive or (outside.alive is None and state in ("RUNNING", "STOPPED", "SUSPENDED")):
        return _at_work(last, outside)
    if state in WAITING:
        return Standing("waiting", f"Slurm says {state}; the last start was ended without a last word")
    if state == "COMPLETING":
        return Standing("ending", "Slurm says COMPLETING: the job's last processes are being ended")
    if outside.alive is None and state not in ENDED | {GONE}:
        asked = f"Slurm says {state}" if state else "there is no scontrol here"
        if outside.problem:
            asked = f"Slurm could not be asked ({outside.problem})"
        return Standing("unknown", f"its process is on {last.host or 'another host'} and cannot be seen from here, and {asked}")
    how = {GONE: "; Slurm does not know the job any more", "": ""}.get(state, f"; Slurm says {state}")
    return Standing("lost", f"it has ended without a last word, killed or with its node{how}")


def _at_work(last: Attempt, outside: Outside) -> Standing:
    held = f"; Slurm says {outside.slurm}" if outside.slurm in ("STOPPED", "SUSPENDED") else ""
    if last.round is not None:
        return Standing("saving", f"{_stage(last)}{_for_notice(last)}{held}")
    if last.left or last.in_notice:
        return Standing("leaving", f"{last.notice or 'told to leave'}{held}")
    if not last.attached:
        return Standing("starting", f"no rank has attached yet{held}")
    return Standing("training", held.removeprefix("; "))


def _for_notice(last: Attempt) -> str:
    return f", to leave ({last.notice})" if last.in_notice else ""


def _stage(last: Attempt) -> str:
    current = last.round
    assert current is not None
    counts = current.of > 1 and current.stage in ("begun", "rank_saving", "rank_written")
    so_far = f" ({current.ranks} of {current.of} ranks)" if counts else ""
    words = {
        "begun": "ranks agree on a step",
        "agreed": "ranks run on to the step that was agreed",
        "go": "ranks write",
        "rank_saving": "ranks write",
        "rank_written": "ranks have written",
        "verified": "verified, being committed",
    }
    return f"{words.get(current.stage, current.stage)}{so_far}"


def _over(last: Attempt, outside: Outside) -> Standing:
    state = outside.slurm
    said = f"status {last.code}: {last.line}" if last.line else f"status {last.code}"
    if state in WAITING:
        return Standing("waiting", f"Slurm says {state}; the last start ended with {said}")
    if state == "COMPLETING":
        return Standing("ending", f"Slurm says COMPLETING, so the job has not ended yet; the last start ended with {said}")
    if last.refused and not last.left:
        return Standing("refused", last.refused)
    if last.code == 0:
        return Standing("finished", last.line or "training came to its end")
    if last.code == EXIT_CANCELLED and (last.left or last.notice == "cancelled"):
        return Standing("cancelled", last.line or "by a person")
    if not last.left:
        return Standing("failed", last.line or f"training ended with status {last.code}")
    if state == "" and last.requeue in ("accepted", "already pending"):
        return Standing("waiting", f"requeued, and not started again as far as its journal tells: {last.line}")
    if state == "RUNNING":
        return Standing("starting", f"Slurm says RUNNING, and the next start has not written anything yet; the last one: {said}")
    if last.requeue in ("accepted", "already pending") and state in ENDED | {GONE}:
        said = "Slurm does not know it any more" if state == GONE else f"Slurm says {state}"
        word = "cancelled" if state == "CANCELLED" else "interrupted"
        return Standing(word, f"{said}: it does not come back; the last start had ended with: {end_of(last)}")
    how = f"; Slurm says {state}" if state not in ("", GONE) else ""
    return Standing("interrupted", f"{last.line or said}{how}")


def end_of(attempt: Attempt) -> str:
    """How a start has ended, in a few words; "" if it has written no last word."""
    if attempt.code is None:
        return ""
    if attempt.left:
        cause = attempt.notice or "interrupted"
        saved = f"step {attempt.committed} saved" if attempt.left == "fresh" and attempt.committed >= 0 else "saved"
        what = saved if attempt.left == "fresh" else "this save did not make it"
        back = ", requeued" if attempt.requeue in ("accepted", "already pending") else ""
        if cause == CRASHED:
            return f"{CRASHED} with status {attempt.code}{back}"
        return f"{cause}, {what}{back}"
    if attempt.refused:
        return "not started"
    return "training ended" if attempt.code == 0 else f"training failed with status {attempt.code}"


def ways_of(attempts: list[Attempt]) -> dict[str, int]:
    """How often a start of this job has ended in which way; the newest without a last word is not counted."""
    counts = dict.fromkeys(("time_limit", "failed", "interrupted", "lost"), 0)
    for number, attempt in enumerate(attempts):
        if attempt.code is None:
            counts["lost"] += number < len(attempts) - 1
        elif attempt.left and attempt.notice == CRASHED:
            counts["failed"] += 1  # Requeued within --max-crashes: nobody interrupted it.
        elif attempt.left:
            limit = attempt.notice in ("end of the time limit ahead", "time limit reached")
            counts["time_limit" if limit else "interrupted"] += 1
        elif attempt.code != 0 and not attempt.refused:
            counts["failed"] += 1
    return counts
