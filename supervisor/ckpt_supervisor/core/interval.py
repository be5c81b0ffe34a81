"""How often to save by time.

Pure. Owns the interval: what --every says, what the owner has asked for since (`ckptctl save --every`), or, with `auto`, what
costs least by the measured cost of a save and the observed time between interruptions. Must not decide when a save begins, which
is turns.py's.

The choice is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006), which is
Young's sqrt(2 C M) of 1974 with its next terms: C is the time that a save holds training, M the mean time between interruptions.
A wrong M costs little: twice or half of it changes the interval by 1.4 and what is lost by about 6 %. So M begins with a guess
(--mtbi) that counts like one interruption that was seen, and what the run has really seen takes over from it.
"""

from __future__ import annotations

import dataclasses
import math

from msgspec.structs import replace

from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Interval, State

FIRST_COST_MS = 10_000
"""Taken for the cost of a save until one was measured."""

LEAST_MS = 30_000
"""Never more often than this."""

LEAST_COSTS = 10
"""And never so often that saves take more than a tenth of the time."""

SAME_PERCENT = 5
"""An interval that would change by less stays as it is."""


def with_next(policy: Policy, state: State, now_ms: int) -> State:
    """The state in which the next save by time is due an interval from now; none without --every."""
    interval = chosen(policy, state, now_ms)
    before = state.interval
    if interval is not None and before is not None and interval.why == before.why:
        if abs(interval.every_ms - before.every_ms) * 100 < SAME_PERCENT * before.every_ms:
            interval = before
    next_ms = None if interval is None else now_ms + interval.every_ms
    return replace(state, interval=interval, next_save_ms=next_ms)


def chosen(policy: Policy, state: State, now_ms: int) -> Interval | None:
    """The interval that is right by now, and what it rests on; None for none."""
    if state.asked_every_ms is not None:
        return Interval(state.asked_every_ms, "asked for")
    if not (policy.every_auto or state.asked_auto):
        return None if policy.every_ms is None else Interval(policy.every_ms, "--every")
    holds_ms = state.holds_ms or state.history.holds_ms or state.history.saves_ms
    cost_ms = sum(holds_ms) // len(holds_ms) if holds_ms else FIRST_COST_MS
    ran_ms = state.history.ran_ms + max(0, now_ms - state.began_ms)
    mtbi_ms = (policy.mtbi_ms + ran_ms) // (1 + state.history.interruptions)
    why = "auto" if holds_ms else "auto, no save measured yet"
    return dataclasses.replace(Interval(daly_ms(cost_ms, mtbi_ms), why), cost_ms=cost_ms, mtbi_ms=mtbi_ms)


def daly_ms(cost_ms: int, mtbi_ms: int) -> int:
    """Daly's interval between the end of one save and the begin of the next, in ms, within the bounds above."""
    cost, mean = max(1, cost_ms), max(1, mtbi_ms)
    if cost < 2 * mean:
        ratio = cost / (2 * mean)
        best = math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    else:
        best = float(mean)
    return max(LEAST_MS, LEAST_COSTS * cost_ms, round(best))
