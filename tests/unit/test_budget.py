"""The shares of the time until the kill: always in order, never in the past, never more than there is."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from ckpt_supervisor.core.budget import OUT_MARGIN_MS, Budget, cut
from hypothesis import given, settings

DAY_MS = 86_400_000
instants = st.integers(0, 10**12)
spans = st.one_of(st.integers(-DAY_MS, DAY_MS), st.integers(-50, 3_000))


def shares(budget: Budget) -> tuple[int, ...]:
    """save by, verify by, leave by, out by."""
    return dataclasses.astuple(budget)


@settings(deadline=None, max_examples=300)
@given(instants, spans)
def test_deadlines_are_in_order_and_never_in_the_past(now_ms: int, left_ms: int) -> None:
    """save <= verify <= leave <= out, none before now, none after a kill that lies ahead."""
    found = shares(cut(now_ms, now_ms + left_ms))
    assert list(found) == sorted(found)
    assert found[0] >= now_ms
    assert found[-1] <= max(now_ms, now_ms + left_ms)


@settings(deadline=None, max_examples=300)
@given(instants, st.integers(1, DAY_MS))
def test_the_save_gets_the_largest_share(now_ms: int, left_ms: int) -> None:
    """The longer the time, the more of it: from a seventh of very little to nearly all."""
    save_by_ms, verify_by_ms, leave_by_ms, out_by_ms = shares(cut(now_ms, now_ms + left_ms))
    rest_ms = [verify_by_ms - save_by_ms, leave_by_ms - verify_by_ms, out_by_ms - leave_by_ms]
    assert save_by_ms - now_ms >= left_ms // 7
    if left_ms >= 4_000:
        assert save_by_ms - now_ms >= max(rest_ms)
    if left_ms >= 120_000:
        assert save_by_ms - now_ms >= left_ms * 8 // 10


@settings(deadline=None, max_examples=300)
@given(instants, st.integers(1, DAY_MS), st.integers(0, 10_000))
def test_a_kill_that_comes_nearer_brings_every_deadline_nearer(now_ms: int, left_ms: int, less_ms: int) -> None:
    """A second notice only shortens."""
    later = shares(cut(now_ms, now_ms + left_ms))
    nearer = shares(cut(now_ms, now_ms + max(0, left_ms - less_ms)))
    # A share is rounded down on its own: by one ms each.
    assert all(near <= late + 3 for near, late in zip(nearer, later, strict=True))


@pytest.mark.parametrize("left_ms", [0, -1, -60_000])
def test_a_kill_that_is_due_or_past_leaves_no_time_but_nothing_negative(left_ms: int) -> None:
    """After OverTimeLimit the EndTime lies in the past while the job runs on."""
    assert shares(cut(1_000, 1_000 + left_ms)) == (1_000, 1_000, 1_000, 1_000)


@pytest.mark.parametrize("left_ms", range(1, 40))
def test_tiny_times_are_shared_too(left_ms: int) -> None:
    """Down to a millisecond: the order holds, and the way out is not after the kill."""
    found = shares(cut(7, 7 + left_ms))
    assert list(found) == sorted(found)
    assert 7 <= found[0] <= found[-1] <= 7 + left_ms


@pytest.mark.parametrize(
    ("left_ms", "save_ms", "verify_ms", "leave_ms", "requeue_ms"),
    [
        (6_000, 3_580, 720, 300, 900),  # KillWait of the tests.
        (30_000, 21_400, 3_600, 1_500, 3_000),  # KillWait of most sites: all the time that some jobs get.
        (60_000, 47_300, 7_200, 2_000, 3_000),
        (3_600_000, 3_600_000 - 500 - 3_000 - 2_000 - 10_000, 10_000, 2_000, 3_000),  # Caps: what comes after takes no hour.
    ],
)  # fmt: skip
def test_usual_times_are_cut_like_this(left_ms: int, save_ms: int, verify_ms: int, leave_ms: int, requeue_ms: int) -> None:
    """The figures of the docs, so that a change of them is seen."""
    budget = cut(0, left_ms)
    assert budget.save_by_ms == save_ms
    assert budget.verify_by_ms - budget.save_by_ms == verify_ms
    assert budget.leave_by_ms - budget.verify_by_ms == leave_ms
    assert budget.out_by_ms - budget.leave_by_ms == requeue_ms
    assert left_ms - budget.out_by_ms == OUT_MARGIN_MS


def test_the_time_for_the_requeue_is_kept_whatever_the_others_take() -> None:
    """What comes last brings the job back, so its share is a fixed part of what is left, cut first."""
    for left_ms in (400, 1_000, 5_000, 30_000, 10**7):
        budget = cut(0, left_ms)
        assert budget.out_by_ms - budget.leave_by_ms >= min(600, left_ms // 4)


def test_what_verification_has_taken_before_is_what_it_gets() -> None:
    """A measured 6 ms do not cost the save 3.6 s of 30; 12 s get a quarter and a second more, never above a quarter of all."""
    assert cut(0, 30_000, 6).verify_by_ms - cut(0, 30_000, 6).save_by_ms == 500
    assert cut(0, 120_000, 12_000).verify_by_ms - cut(0, 120_000, 12_000).save_by_ms == 16_000
    assert cut(0, 20_000, 60_000).verify_by_ms - cut(0, 20_000, 60_000).save_by_ms == 5_000


def test_a_job_that_others_end_or_requeue_leaves_the_share_of_the_requeue_to_the_save() -> None:
    """KillWait of 6 s, and a save of 4.2 s: it fits after scancel."""
    assert cut(0, 6_000, 6, requeues=False).save_by_ms == 6_000 - 500 - 300 - 300 - 500
    assert cut(0, 6_000, 6).save_by_ms == cut(0, 6_000, 6, requeues=False).save_by_ms - 600
