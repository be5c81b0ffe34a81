"""What a run comes to: how much of its time was progress, what was lost, and what the saves and the way out took.

Owns these sums and their meaning. Pure. Must not draw. What cannot be known is None, never 0.

goodput: training that a checkpoint holds (or that came to its end by itself), as a share of the time that the job had its nodes.
What an attempt that is still at it has trained since its last commit is neither lost nor kept: it is left out of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from ckpt_supervisor.view import causes, gaps
from ckpt_supervisor.view.facts import KINDS, Attempt, Run
from ckpt_supervisor.view.pieces import milliseconds

_MS = 1_000_000


class Totals(msgspec.Struct, frozen=True):
    """Of one run. Times in ms, without units of days."""

    attempts: int
    saves: int
    failed_saves: int
    interruptions: int
    """Ends that were neither good nor asked for by a person."""
    ended: dict[str, int]
    """How often an attempt has ended for which cause."""
    allocated_ms: int
    """From each attempt's first word to its last one."""
    kinds_ms: dict[str, int]
    """What this time, and that in the queue, was spent with."""
    goodput: float | None
    pending_ms: int
    """Trained since the last commit by an attempt that is still at it."""
    steps: int | None
    """Steps that are committed, or done by training that has come to its end, since the first attempt's begin."""
    lost_steps: int | None
    lost_is_least: bool
    """How far an attempt had come is known only to the last word of it."""
    lost_ms: int
    hold_ms: int
    """For how long saves held training."""
    out_ms: int | None
    """Median of notice to exit."""
    out_ms_most: int | None
    left_out: int
    """Starts of which there is no journal, or not the coordinator's: what they did and lost is in no sum."""
    queued_ms: int | None
    """In the queue between attempts; before the first one nobody has written it down."""
    mtbi_ms: int | None
    """Mean time between interruptions, of time that was trained."""


def totals(run: Run) -> Totals:
    """The sums over all attempts."""
    attempts = run.attempts
    spent = {kind: sum(milliseconds(one.spans, kind) for one in attempts) for kind in KINDS}
    allocated_ms = sum(allocated(one) for one in attempts)
    pending_ms = sum(pending(one) for one in attempts)
    ended = [one.cause for one in attempts if one.cause]
    interruptions = sum(cause not in causes.NO_INTERRUPTION for cause in ended)
    outs = [one.out_ms for one in attempts if one.out_ms is not None]
    ran_ms = sum(spent[kind] for kind in ("training", "saving", "verifying", "lost"))
    untold = [one for one in attempts if not one.is_told]
    counted_ms = allocated_ms - pending_ms - sum(allocated(one) - pending(one) for one in untold)
    trained_ms = spent["training"] - pending_ms - sum(milliseconds(one.spans, "training") - pending(one) for one in untold)
    lost = [one.lost_steps for one in attempts if one.lost_steps is not None]
    is_queue_known = any(span.kind == "queued" for one in attempts for span in one.spans)
    return Totals(
        attempts=len(attempts),
        saves=sum(one.saves for one in attempts),
        failed_saves=sum(one.failed_saves for one in attempts),
        interruptions=interruptions,
        ended={cause: ended.count(cause) for cause in dict.fromkeys(ended)},
        allocated_ms=allocated_ms,
        kinds_ms=spent,
        goodput=max(0.0, trained_ms / counted_ms) if counted_ms > 0 else None,
        pending_ms=pending_ms,
        steps=_steps(attempts),
        lost_steps=sum(lost) if lost else None,
        lost_is_least=any(is_least(one) for one in attempts),
        lost_ms=spent["lost"],
        hold_ms=sum(one.hold_ms for one in attempts),
        out_ms=round(statistics.median(outs)) if outs else None,
        out_ms_most=max(outs, default=None),
        left_out=gaps.count(run.gaps) + len(untold),
        queued_ms=spent["queued"] if is_queue_known else None,
        mtbi_ms=ran_ms // interruptions if interruptions else None,
    )


def allocated(attempt: Attempt) -> int:
    """How long it had its nodes, as far as its journal tells."""
    if attempt.began_ns is None or attempt.ended_ns is None:
        return 0
    return max(0, attempt.ended_ns - attempt.began_ns) // _MS


def pending(attempt: Attempt) -> int:
    """What it has trained since its last commit, if it is still at it."""
    if attempt.code is not None or attempt.is_running is False:
        return 0
    since_ns = max((one.at_ns for one in attempt.commits), default=attempt.began_ns or 0)
    spans = (span for span in attempt.spans if span.kind == "training" and span.end_ns > since_ns)
    return sum(span.end_ns - max(span.begin_ns, since_ns) for span in spans) // _MS


def gained(attempt: Attempt) -> int | None:
    """Steps that it has brought: committed, or up to its good end, and not to be done again by the next one."""
    if attempt.reached is None and attempt.kept is None:
        return None
    base = max(0, attempt.resume_step)
    until = attempt.kept if attempt.cause != causes.FINISHED else max(attempt.reached or 0, attempt.kept or 0)
    until = 0 if until is None else until
    return max(0, (until if attempt.fell_to is None else min(until, attempt.fell_to)) - base)


def label(one: Attempt, run: Run) -> str:
    """Which attempt it is, in the words that `ckptctl why --attempt` takes."""
    same = [other for other in run.attempts if (other.job, other.attempt) == (one.job, one.attempt)]
    if len(same) == 1:
        return str(one.attempt)
    return f"{one.attempt}#{one.epoch}"


def is_least(attempt: Attempt) -> bool:
    """Its lost steps may be more: nobody has told how far it had come, at its end or before a restart in place."""
    return reached_is_least(attempt) or attempt.lost_before_is_least


def reached_is_least(attempt: Attempt) -> bool:
    """It may have come further than is known."""
    ended = attempt.code is not None or attempt.is_running is False
    return ended and attempt.reached is not None and not attempt.is_exact and attempt.cause != causes.FINISHED


def _steps(attempts: Iterable[Attempt]) -> int | None:
    """What each has brought, less what a later one that went on from an older checkpoint has to do again."""
    total: int | None = None
    stands: dict[tuple[str, str], int] = {}
    for one in attempts:
        count = gained(one)
        if count is None:
            continue
        key, base = (one.job, one.step_id), max(0, one.resume_step)
        total = (total or 0) + count - max(0, stands.get(key, base) - base)
        stands[key] = base + count
    return total
