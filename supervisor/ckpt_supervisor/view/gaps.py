"""What is missing between the starts of a run: whole starts, and how long the next one was waited for.

Owns what the numbers of epochs and attempts say of starts whose journals are not there, and the time in the queue. Pure. Must not
alarm: an epoch may have been taken by something that never wrote a journal, and who prunes journals takes the oldest ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ckpt_supervisor.view.facts import Attempt, Span

NOTES_MAX = 5
"""So many gaps are named."""

COUNT_MAX = 1_000_000
Gap = tuple[int, int]
"""First and last epoch that no journal is of."""


def gaps_of(epochs: Iterable[int]) -> tuple[Gap, ...]:
    """Between the epochs that are there. Those before the first one are none: journals are pruned from the oldest on."""
    there = sorted(set(epochs))
    return tuple((before + 1, after - 1) for before, after in itertools.pairwise(there) if after - before > 1)


def within(gaps: Iterable[Gap], attempts: Sequence[Attempt]) -> tuple[Gap, ...]:
    """Those between the first and the last of these starts."""
    if not attempts:
        return ()
    return tuple(gap for gap in gaps if attempts[0].epoch < gap[0] and gap[1] < attempts[-1].epoch)


def count(gaps: Iterable[Gap]) -> int:
    """How many starts that are."""
    return min(COUNT_MAX, sum(last - first + 1 for first, last in gaps))


def notes(gaps: Sequence[Gap], attempts: Sequence[Attempt]) -> list[str]:
    """What is to be said of them, and of numbers that no start of a job has."""
    said = [_note(gap, attempts) for gap in gaps[:NOTES_MAX]]
    if len(gaps) > NOTES_MAX:
        said.append(f"incomplete: {len(gaps) - NOTES_MAX} more gaps like these")
    softly = []
    for before, after in _neighbours(attempts):
        first, last = before.attempt + 1, after.attempt - 1
        if first <= last and not is_between(gaps, before, after):
            softly.append(f"no journal of attempt{_numbers(first, last)} of job {after.job}: {_perhaps(first, last)}")
    return said + softly[:NOTES_MAX]


def _note(gap: Gap, attempts: Sequence[Attempt]) -> str:
    around = [(before, after) for before, after in _neighbours(attempts) if is_between((gap,), before, after)]
    numbers = [_numbers(before.attempt + 1, after.attempt - 1) for before, after in around if after.attempt - before.attempt > 1]
    named = f" (attempt{numbers[0]})" if len(around) == 1 and numbers else ""
    return f"incomplete: no journal of start{_numbers(*gap)}{named}: {_perhaps(*gap)}; what was done and lost there is in no sum"


def _perhaps(first: int, last: int) -> str:
    return "it never wrote one, or it is missing" if first == last else "they never wrote one, or they are missing"


def _numbers(first: int, last: int) -> str:
    return f" {first}" if first == last else f"s {first} to {last}"


def _neighbours(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """Starts of one job that follow each other."""
    newest: dict[tuple[str, str], Attempt] = {}
    found = []
    for one in attempts:
        key = (one.job, one.step_id)
        if key in newest:
            found.append((newest[key], one))
        newest[key] = one
    return found


def is_between(gaps: Iterable[Gap], before: Attempt, after: Attempt) -> bool:
    """Whether starts are missing between these two."""
    return any(before.epoch < first and last < after.epoch for first, last in gaps)


def resumed_newer(before: Attempt, after: Attempt) -> str:
    """That a start goes on from a step of which no journal before it tells; "" if it does not."""
    kept = -1 if before.kept is None else before.kept
    if after.epoch != before.epoch + 1 or not before.is_told or after.resume_step <= kept:
        return ""
    known = f"step {kept} is the newest one that the start before it has told of" if kept >= 0 else "none was told of before"
    return f"it went on from step {after.resume_step}, but {known}: lines or a journal are missing, or it was copied there"


class Queues:
    """The time between starts of one job, as a piece before the later one's own ones."""

    def __init__(self) -> None:
        self._newest: Attempt | None = None
        self._latest_ns: int | None = None
        """The latest end so far, by whatever clock."""
        self._is_behind = False
        """The clock of the newest one is behind that of a start before it."""

    def take(self, attempt: Attempt, gaps: Sequence[Gap]) -> None:
        """The next start."""
        before, self._newest = self._newest, attempt
        was_behind, self._is_behind = self._is_behind, False
        latest_ns = self._latest_ns
        if attempt.ended_ns is not None:
            self._latest_ns = max(latest_ns or attempt.ended_ns, attempt.ended_ns)
        if before is None or before.ended_ns is None or attempt.began_ns is None:
            return
        if attempt.began_ns < before.ended_ns:
            self._is_behind = True
            self._apart(before, attempt, (before.ended_ns - attempt.began_ns) / 1e9)
            return
        self._is_behind = was_behind and latest_ns is not None and attempt.began_ns < latest_ns
        if is_between(gaps, before, attempt) or (was_behind and not self._is_behind):
            return  # Somebody may have trained meanwhile; or its end was told by another clock than this begin.
        attempt.spans = (Span("queued", before.ended_ns, attempt.began_ns), *attempt.spans)

    @staticmethod
    def _apart(before: Attempt, attempt: Attempt, apart_s: float) -> None:
        """It is not known whose clock was wrong: no time in the queue is made of either."""
        if apart_s < 1:
            return
        hosts = f"{before.host or '?'} and {attempt.host or '?'}"
        note = f"it began {apart_s:.0f} s before the start before it had ended: the clocks of {hosts} differ"
        attempt.notes = (*attempt.notes, note)
        first = before.spans[0] if before.spans else None
        if first is not None and first.kind == "queued" and (first.end_ns - first.begin_ns) / 1e9 >= apart_s:
            before.spans = before.spans[1:]
