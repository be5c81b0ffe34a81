"""`ckptctl why`: one interruption in a few lines: cause, time given, decision, who was late, what was lost, what to change.

Owns these lines and their JSON. Must not read anything, ask Slurm, or decide: the numbers are the journal's, and Slurm's words
are shown as they were found (ctl/slurm_words.py).
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from ckpt_supervisor.view import causes
from ckpt_supervisor.view.advice import advice
from ckpt_supervisor.view.amounts import counted, instant, iso, number, span_text
from ckpt_supervisor.view.facts import Attempt, Round, Run, Word
from ckpt_supervisor.view.plain import harmless
from ckpt_supervisor.view.totals import is_least, label, reached_is_least

TITLE = 10
TEXT_MAX = 1_000
"""Characters of one sentence in a terminal, which are wrapped."""

NAMES_MAX = 8
RANKS_MAX = 3
QUIET_MS = 1_000
"""Ranks that are less apart than this are not late."""


class Said(msgspec.Struct, frozen=True):
    """What Slurm itself has left behind about this attempt. `cause`: what follows from it, in our words; "" for nothing."""

    lines: tuple[str, ...] = ()
    cause: str = ""
    source: str = ""
    note: str = ""
    """What there is to say of the search itself."""


def chosen(run: Run, asked: str = "") -> Attempt | None:
    """The attempt that is asked for (`2`, `0#3`), or the last interruption; the newest one if there was none."""
    found = fitting(run, asked) if asked else [*run.attempts]
    interrupted = [one for one in found if one.cause not in (causes.RUNNING, causes.FINISHED)]
    return (interrupted or found)[-1] if found else None


def fitting(run: Run, asked: str) -> list[Attempt]:
    """The attempts that this names: more than one where several have the number, as without Slurm."""
    return [one for one in run.attempts if asked in (label(one, run), str(one.attempt), f"{one.attempt}#{one.epoch}")]


def others(run: Run, asked: str, one: Attempt) -> str:
    """That the name fits more attempts than the one that is told, and how they are named; "" if it does not."""
    names = [label(each, run) for each in fitting(run, asked)] if asked else []
    if len(names) < 2:
        return ""
    named = ", ".join(names) if len(names) <= NAMES_MAX else f"{', '.join(names[:2])} ... {names[-1]}"
    other = next(name for name in reversed(names) if name != label(one, run))
    return f"--attempt {asked} is {named}: this is {label(one, run)}; for another one say --attempt {other}"


def lines(one: Attempt, run: Run, said: Said, width: int | None) -> list[str]:
    """The attempt in lines, wrapped for a terminal."""
    head = f"job {one.job} attempt {label(one, run)}: {told_cause(one, said)}; {instant(one.ended_ns)} UTC"
    after = run.attempts[-1]
    if after is not one:
        head += f"; {_after(after, run)}"
    told = _wrapped("", head, width, 0)
    for title, text in facts(one, run, said):
        told += _wrapped(title, text, width, TITLE)
    return told


def _after(last: Attempt, run: Run) -> str:
    how = last.cause or ("at it now" if last.is_running else "without a last word so far")
    return f"since then: attempt {label(last, run)} {how}" if how != causes.FINISHED else "it has finished since"


def facts(one: Attempt, run: Run, said: Said) -> list[tuple[str, str]]:
    """Titles and sentences."""
    if one.cause == causes.RUNNING:
        return [("", "no attempt of it was interrupted so far"), *_found(one, run, said)]
    found = [
        ("notice", _time_given(one)),
        ("decided", _decided(one)),
        ("late", _late(one)),
        ("lost", _lost(one)),
        ("change", _change(one, run, said)),
    ]
    return found + _found(one, run, said)


def _change(one: Attempt, run: Run, said: Said) -> str:
    if one.cause in causes.BY_A_PERSON and run.attempts[-1] is not one and not one.requeue.startswith("refused"):
        return "nothing: a person ended it, and it was started again"
    return advice(one, said.cause, label(one, run)) or "nothing"


def _found(one: Attempt, run: Run, said: Said) -> list[tuple[str, str]]:
    """Slurm's words, and what is incomplete."""
    slurms = [("Slurm" if place == 0 else "", line) for place, line in enumerate(said.lines)]
    return slurms + [("note", note) for note in dict.fromkeys((*one.notes, *run.notes))]


def told_cause(one: Attempt, said: Said) -> str:
    """The cause, with Slurm's word for it where the journal has none."""
    detail = f" ({one.detail})" if one.detail else ""
    if causes.is_untold(one) and said.cause not in ("", "requeued"):
        return f"{one.cause}; Slurm says: {said.cause}{detail}"
    if not one.cause:
        return "at it now" if one.is_running else "no last word: still at it, or lost"
    back = {"accepted": ", requeued", "already pending": ", requeued", "resubmitted": ", resubmitted"}.get(one.requeue, "")
    return f"{one.cause}{detail}{back}"


def _time_given(one: Attempt) -> str:
    notice = one.notice
    if notice is None and not one.is_told:
        return f"not known: {causes.HEADLESS}"
    if notice is None:
        return "none: nobody had announced its end"
    if notice.cause in (causes.FAILED, causes.HUNG):
        return f"none: {notice.cause}, at {instant(notice.at_ns)}"
    known = f" first taken for: {notice.first_cause};" if notice.first_cause not in ("", "not known") else ""
    left = "it is not known how long it had" if notice.left_ms is None else f"{span_text(notice.left_ms)} until the kill"
    out = "" if one.out_ms is None else f"; it was out after {span_text(one.out_ms)}"
    asked = "asked by " if notice.cause == "asked to leave" else ""
    return f"{asked}{notice.by} at {instant(notice.at_ns)};{known} {left}{out}"


def _decided(one: Attempt) -> str:
    if not one.is_told and not one.outcome:
        return f"not known: {causes.HEADLESS}"
    last = last_save(one)
    notice = one.notice
    shares = []
    if notice is not None and notice.cause not in (causes.FAILED, causes.HUNG):  # Nobody presses after those.
        named = (("to save", notice.save_left_ms), ("to verify", notice.verify_left_ms), ("to leave", notice.leave_left_ms))
        shares = [f"{word} {span_text(max(0, left))}" for word, left in named if left is not None]
    of_time = f" (time {', '.join(shares)})" if shares else ""
    if one.reason.startswith("no save was begun"):
        return f"{one.reason}{of_time}"
    if last is None:
        return (one.line or ("nothing: there was no time to" if one.cause else "nothing yet")) + of_time
    before = _saves_before(one)
    took = f"; a save takes {before}" if before else ""
    step = "" if last.step is None else f" at step {number(last.step)}"
    if last.committed:
        parts = (("agree", last.agree_ms), ("arrive", last.arrive_ms), ("write", last.write_ms), ("verify", last.verify_ms))
        spent = ", ".join(f"{name} {span_text(ms)}" for name, ms in parts if ms is not None)
        return f"a save{of_time}{took}; committed{step}{f': {spent}' if spent else ''}"
    if last.reason:
        length = "" if last.end_ns is None else f" after {span_text((last.end_ns - last.begin_ns) / 1e6)}"
        return f"a save{of_time}{took}; given up{step}{length}: {last.reason}"
    return f"a save{of_time}{took}; it was cut off{step}"


def last_save(one: Attempt) -> Round | None:
    """The save that was tried at the end: one that began or still ran after the notice, or that was cut off."""
    if not one.rounds:
        return None
    last = one.rounds[-1]
    if last.end_ns is None:
        return None if one.cause == causes.RUNNING else last
    if one.notice is not None and last.end_ns >= one.notice.at_ns:
        return last
    return None


def _saves_before(one: Attempt) -> str:
    seen = [round_.write_ms for round_ in one.rounds[:-1] if round_.committed and round_.write_ms is not None][-5:]
    seen = seen or list(one.seen_saves_ms)
    if not seen:
        return ""
    return f"{span_text(min(seen))} (the shortest of the last {len(seen)})" if len(seen) > 1 else span_text(seen[0])


def _late(one: Attempt) -> str:
    last = last_save(one)
    if not one.is_told:
        return "not known"
    if last is None:
        if one.cause in (causes.FAILED, causes.HUNG, causes.OUT_OF_MEMORY):
            marked = _marked(one)
            return f"no save ran; {marked}" if marked and marked not in _decided(one) else "no save ran"
        return "no save ran at its end"
    problems = [word for word in last.words if word.problem]
    if problems:
        named = "; ".join(f"rank {word.rank}: {word.problem}" for word in problems[:RANKS_MAX])
        more = f"; and {len(problems) - RANKS_MAX} more" if len(problems) > RANKS_MAX else ""
        return named + more
    if not last.words:
        return "not told: no word of a rank is in the journal"
    return slowest(last.words) or "nobody"


def _marked(one: Attempt) -> str:
    return next((text for _, kind, text in reversed(one.marks) if kind in ("hang", "oom")), "")


def slowest(words: Sequence[Word]) -> str:
    """Who came last, and who wrote longest, where that is apart from the others; "" for nobody."""
    found = []
    for name, key in (("came last", "arrived_ms"), ("had written last", "written_ms")):
        times = sorted((getattr(word, key), word.rank) for word in words if getattr(word, key) is not None)
        if len(times) < 2:
            continue
        middle = statistics.median(ms for ms, _ in times)
        last_ms, rank = times[-1]
        if last_ms - middle >= QUIET_MS:
            found.append(f"rank {rank} {name}, {span_text(last_ms - middle)} after most")
    missing = [word.rank for word in words if word.written_ms is None]
    if missing and len(missing) < len(words):
        found.append(f"rank {', '.join(map(str, missing[:RANKS_MAX]))} had not written")
    return "; ".join(found)


def _lost(one: Attempt) -> str:
    stands = "there is no checkpoint" if one.is_told else "which checkpoint stands is not known either"
    stands = stands if one.kept is None else f"step {number(one.kept)} stands"
    if one.fell_to is not None:
        stands += f", but the next start {f'went on from step {number(one.fell_to)}' if one.fell_to else 'began from scratch'}"
    if one.lost_steps is None and not one.is_told:
        return f"not known: {causes.HEADLESS}; {stands}"
    if one.lost_steps is None:
        return f"not known: nobody has told how far it had come; {stands}"
    spent = f", {span_text(one.lost_ms)} of time" if one.lost_ms else ""
    least = is_least(one)
    if not one.lost_steps:
        after = " that is known of, and any step after its last word is lost as well" if least else ""
        return f"nothing{after}; {stands}"
    known = " at least" if reached_is_least(one) else ""
    reached = "" if one.reached is None else f" (it had come to step {number(one.reached)}{known})"
    return f"{'at least ' if least else ''}{counted(one.lost_steps, 'step')}{spent}{reached}; {stands}"


def _wrapped(title: str, text: str, width: int | None, indent: int) -> list[str]:
    safe = harmless(text, TEXT_MAX if width else 2 * TEXT_MAX)
    room = 1_000_000 if width is None else max(20, width - indent - 3)
    parts = textwrap.wrap(safe, room, break_on_hyphens=False) or [""]
    if not indent:
        return [part if place == 0 else f"  {part}" for place, part in enumerate(parts)]
    return [f"  {title if place == 0 else '':<{indent}}{part}" for place, part in enumerate(parts)]


def record(one: Attempt, run: Run, said: Said) -> dict[str, Any]:
    """For scripts; every key is always there."""
    notice = one.notice
    told = dict(facts(one, run, Said(cause=said.cause)))
    return {
        "job": one.job,
        "dir": run.directory,
        "step_id": one.step_id,
        "attempt": one.attempt,
        "label": label(one, run),
        "epoch": one.epoch,
        "cause": one.cause or None,
        "detail": one.detail,
        "code": one.code,
        "line": one.line,
        "ended_at": iso(one.ended_ns),
        "notice_at": None if notice is None else iso(notice.at_ns),
        "notice_by": None if notice is None else notice.by,
        "left_ms": None if notice is None else notice.left_ms,
        "out_ms": one.out_ms,
        "outcome": one.outcome or None,
        "requeue": one.requeue or None,
        "decided": told.get("decided", ""),
        "late": told.get("late", ""),
        "late_ranks": late_ranks(one),
        "lost_steps": one.lost_steps,
        "lost_is_least": is_least(one),
        "lost_ms": one.lost_ms,
        "reached_step": one.reached,
        "committed_step": one.kept,
        "change": told.get("change", ""),
        "slurm": list(said.lines),
        "slurm_cause": said.cause or None,
        "notes": [*one.notes, *run.notes],
    }


def late_ranks(one: Attempt) -> list[int]:
    """Ranks that failed, were late or were gone in the last save."""
    last = last_save(one)
    return [] if last is None else [word.rank for word in last.words if word.problem]
