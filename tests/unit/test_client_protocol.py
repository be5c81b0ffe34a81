"""The rules of docs/protocol.md on the rank's side, with both threads played by the test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from ckpt_client import protocol, wire
from ckpt_client.protocol import GO_ON, LEAVE, NEVER, WAIT, Decision, Rank, Step
from ckpt_client.wire import Position, Who

ME = Who(0, 0, 100)


def rank_at(n: int, **more: int) -> Rank:
    """A rank whose training thread has stored that it goes on after step n."""
    rank = Rank(ME, 0, **more)
    rank.entered = n
    return rank


def save_at(number: int, n: int, k: int = 0, then: str = "go_on") -> wire.SaveAt:
    """An order to save at (n, k)."""
    return wire.SaveAt(number, Position(n, k), "/nowhere", "leave" if then == "leave" else "go_on", 1000)


def boundary(rank: Rank, n: int, now_ms: int = 0) -> Decision:
    """The boundary after step n, as the hook does it: store, then ask only if something is asked for."""
    rank.entered = n
    if n >= rank.due or rank.hold > rank.done:
        return rank.at_boundary(Position(n, 0), now_ms)
    return GO_ON


def hear(rank: Rank, *words: wire.ToRank, now_ms: int = 0) -> list[wire.FromRank]:
    """Let the listener hear these; what it answers."""
    for word in words:
        rank.hear(word, now_ms)
    return rank.take_outbox()


def saved_in_round_one(then: str = "go_on") -> Rank:
    """A rank that has saved step 5 in round 1."""
    rank = rank_at(4)
    order = save_at(1, 5, then=then)
    hear(rank, wire.Prepare(1), order, wire.Go(1))
    assert boundary(rank, 5) == Decision(Step.SAVE, order)
    rank.save_began(order)
    rank.save_ended(order, (), 3)
    rank.take_outbox()
    return rank


def test_an_answer_counts_a_boundary_that_was_passed_before_prepare_came() -> None:
    """Prepare after the store: the answer is where the training thread is going, not where it was."""
    rank = rank_at(4)
    assert boundary(rank, 5) is GO_ON
    assert hear(rank, wire.Prepare(1)) == [wire.Ack(ME, 1, Position(6, 0))]


def test_the_hold_is_set_before_entered_is_read() -> None:
    """Rule 2, the other order: while the listener reads `entered`, a boundary that comes now sees the hold already."""
    seen: list[Decision] = []

    class Racing(Rank):
        __slots__ = ()

        def position(self) -> Position:
            if not seen:
                seen.append(GO_ON)
                seen[0] = boundary(self, 5)
            return super().position()

    rank = Racing(ME, 0)
    assert hear(rank, wire.Prepare(1))[0] == wire.Ack(ME, 1, Position(6, 0))
    assert seen == [WAIT]


def test_two_ranks_reach_the_agreed_step_exactly_wherever_prepare_finds_them() -> None:
    """T is the largest position that any rank has entered, so every rank has it still before it, whatever the order of events."""
    for passed in itertools.product(range(5), repeat=2):
        ranks = [rank_at(0), rank_at(0)]
        acks = []
        for rank, last in zip(ranks, passed, strict=True):
            for n in range(1, last + 1):
                assert boundary(rank, n) is GO_ON
            (ack,) = hear(rank, wire.Prepare(1))
            assert isinstance(ack, wire.Ack)
            acks.append(ack.entered)
        at = max(acks)
        for rank, last in zip(ranks, passed, strict=True):
            hear(rank, wire.SaveAt(1, at, "/nowhere", "go_on", 1000))
            for n in range(last + 1, at.n):
                assert boundary(rank, n) is GO_ON
            assert boundary(rank, at.n) is WAIT
            assert hear(rank) == [wire.Arrived(ME, 1, at)]


def test_a_rank_runs_on_to_the_step_waits_there_and_saves_when_go_comes() -> None:
    """Rules 3 and 4."""
    rank = rank_at(4)
    order = save_at(1, 6)
    assert hear(rank, wire.Prepare(1), order) == [wire.Ack(ME, 1, Position(5, 0)), wire.Ack(ME, 1, Position(5, 0))]
    assert boundary(rank, 5) is GO_ON
    assert boundary(rank, 6) is WAIT
    assert hear(rank, wire.Go(1)) == [wire.Arrived(ME, 1, Position(6, 0))]
    assert boundary(rank, 6) == Decision(Step.SAVE, order)
    rank.save_began(order)
    rank.save_ended(order, (), 7)
    assert hear(rank) == [wire.Saving(ME, 1), wire.Saved(ME, 1, 6, (), 7)]
    assert boundary(rank, 6) is GO_ON


def test_a_rank_without_an_agreed_step_waits_for_it() -> None:
    """Between Prepare and SaveAt a boundary parks: running on could pass the step."""
    rank = rank_at(4)
    hear(rank, wire.Prepare(1))
    assert boundary(rank, 5) is WAIT
    hear(rank, save_at(1, 6))
    assert boundary(rank, 5) is GO_ON


def test_a_rank_beyond_the_step_says_failed_and_goes_on() -> None:
    """Rule 3: it saves only at exactly the agreed position."""
    rank = rank_at(4)
    hear(rank, wire.Prepare(1), save_at(1, 5))
    assert boundary(rank, 6) is GO_ON
    (word,) = hear(rank)
    assert isinstance(word, wire.Failed)
    assert "(6, 0), beyond the agreed (5, 0)" in word.reason
    assert boundary(rank, 7) is GO_ON


@pytest.mark.parametrize("again", [wire.Prepare(1), save_at(1, 5), wire.Go(1)], ids=["Prepare", "SaveAt", "Go"])
def test_words_of_a_round_that_is_over_are_answered_and_never_obeyed(again: wire.ToRank) -> None:
    """Rule 5: what was said at the end of the round is said again, and training goes on."""
    saved = saved_in_round_one()
    assert hear(saved, again) == [wire.Saved(ME, 1, 5, (), 3)]
    assert boundary(saved, 6) is GO_ON

    failed = rank_at(4)
    hear(failed, wire.Prepare(1), wire.Abort(1, "somebody failed"))
    (word,) = hear(failed, again)
    assert isinstance(word, wire.Failed)
    assert boundary(failed, 5) is GO_ON

    finished = rank_at(4)
    finished.finish()
    assert hear(finished) == [wire.Finished(ME, 0)]
    assert hear(finished, again) == [wire.Finished(ME, 1)]


def test_saved_carries_the_round_and_step_that_the_save_began_with() -> None:
    """Rule 5: a newer round that comes during a save does not change what is reported, and is served after it."""
    rank = rank_at(4)
    first = save_at(1, 5)
    hear(rank, wire.Prepare(1), first, wire.Go(1))
    boundary(rank, 5)
    rank.save_began(first)
    assert hear(rank, wire.Prepare(2))[-1] == wire.Ack(ME, 2, Position(6, 0))
    rank.save_ended(first, (), 1)
    assert hear(rank) == [wire.Saved(ME, 1, 5, (), 1)]
    assert boundary(rank, 5) is WAIT
    hear(rank, save_at(2, 6), wire.Go(2))
    assert boundary(rank, 5) is GO_ON
    assert boundary(rank, 6).step is Step.SAVE


@pytest.mark.parametrize(("word", "decision"), [(wire.Leave(1), LEAVE), (wire.Abort(1, "not all saved"), GO_ON)])
def test_in_a_leave_round_a_rank_stays_parked_after_its_save(word: wire.ToRank, decision: Decision) -> None:
    """Rule 6: no step is run after the one that was saved, until Leave or Abort."""
    rank = saved_in_round_one("leave")
    assert rank.at_boundary(Position(5, 0), 0) is WAIT
    hear(rank, word)
    assert rank.at_boundary(Position(5, 0), 0) is decision


def test_abort_during_a_save_releases_the_rank_after_it() -> None:
    """Rule 4: the round that was given up does not hold a rank whose save ends later, even in a leave round."""
    rank = rank_at(4)
    order = save_at(1, 5, then="leave")
    hear(rank, wire.Prepare(1), order, wire.Go(1))
    boundary(rank, 5)
    rank.save_began(order)
    hear(rank, wire.Abort(1, "late"))
    rank.save_ended(order, (), 1)
    assert rank.at_boundary(Position(5, 0), 0) is GO_ON


def test_a_go_on_round_that_turns_into_a_leave_round_keeps_the_rank_parked() -> None:
    """The newest SaveAt of the same round says what comes after the save."""
    rank = rank_at(4)
    order = save_at(1, 5)
    hear(rank, wire.Prepare(1), order, wire.Go(1))
    boundary(rank, 5)
    rank.save_began(order)
    assert hear(rank, save_at(1, 5, then="leave"))[-1] == wire.Saving(ME, 1)
    rank.save_ended(order, (), 1)
    assert rank.at_boundary(Position(5, 0), 0) is WAIT


def test_a_failed_save_is_said_with_its_reason_and_training_goes_on() -> None:
    """Rule 3; the reason is cut so that it always fits."""
    rank = rank_at(4)
    order = save_at(1, 5)
    hear(rank, wire.Prepare(1), order, wire.Go(1))
    boundary(rank, 5)
    rank.save_began(order)
    rank.save_failed(order, "OSError: " + "x" * 1000)
    word = hear(rank)[-1]
    assert isinstance(word, wire.Failed)
    assert len(word.reason) == wire.REASON_CHARS_MAX
    assert boundary(rank, 5) is GO_ON


def park(rank: Rank) -> None:
    """Park it at step 5 in round 1, at time 0."""
    hear(rank, wire.Prepare(1), save_at(1, 5))
    assert boundary(rank, 5) is WAIT


def test_a_parked_rank_repeats_its_last_word_every_second() -> None:
    """Rule 7."""
    rank = rank_at(4)
    park(rank)
    rank.take_outbox()
    said = []
    for now in range(0, 5001, 100):
        rank.tick(now)
        said += [(now, word) for word in rank.take_outbox()]
    assert said == [(now, wire.Arrived(ME, 1, Position(5, 0))) for now in (1000, 2000, 3000, 4000, 5000)]
    assert rank.quiet_ms(5000) == 1000
    assert rank.quiet_ms(5900) == 100


def test_a_rank_that_saves_says_so_every_second() -> None:
    """A long save must not look like a dead rank."""
    rank = rank_at(4)
    order = save_at(1, 5)
    hear(rank, wire.Prepare(1), order, wire.Go(1))
    boundary(rank, 5)
    rank.save_began(order)
    rank.take_outbox()
    for now in (1000, 2000):
        rank.tick(now)
        assert rank.take_outbox() == [wire.Saving(ME, 1)]


def test_after_ten_silent_seconds_a_parked_rank_fails_the_round_and_never_parks_for_it_again() -> None:
    """Rule 7: training is not held by a supervisor that says nothing."""
    rank = rank_at(4)
    park(rank)
    assert rank.at_boundary(Position(5, 0), protocol.SILENCE_MS - 1) is WAIT
    hear(rank, wire.Wait(1), now_ms=9_999)
    assert rank.at_boundary(Position(5, 0), 15_000) is WAIT
    rank.take_outbox()
    assert rank.at_boundary(Position(5, 0), 19_999) is GO_ON
    (word,) = hear(rank)
    assert isinstance(word, wire.Failed)
    assert word.round == 1
    assert boundary(rank, 6) is GO_ON
    assert isinstance(hear(rank, wire.Prepare(1))[0], wire.Failed)
    assert boundary(rank, 7) is GO_ON
    assert hear(rank, wire.Prepare(2)) == [wire.Ack(ME, 2, Position(8, 0))]


def test_silence_counts_from_parking() -> None:
    """A supervisor that had nothing to say before is not silent."""
    rank = rank_at(4)
    hear(rank, wire.Prepare(1), now_ms=0)
    rank.entered = 5
    assert rank.at_boundary(Position(5, 0), 60_000) is WAIT
    assert rank.at_boundary(Position(5, 0), 69_999) is WAIT
    assert rank.at_boundary(Position(5, 0), 70_000) is GO_ON


@pytest.mark.parametrize(
    "state", [park, lambda rank: hear(rank, wire.Prepare(1)), lambda _rank: None], ids=["parked", "asked", "training"]
)
def test_a_dead_supervisor_holds_nobody(state: Callable[[Rank], object]) -> None:
    """Rule 7: at its death training goes on, and own stops end too."""
    rank = Rank(ME, 0)
    hear(rank, wire.Welcome(1, 0, 5, "", 0))
    rank.entered = 4
    state(rank)
    rank.supervisor_died()
    assert [boundary(rank, n) for n in range(5, 12)] == [GO_ON] * 7
    assert rank.due == NEVER


def test_numbers_beyond_any_count_of_steps_cost_one_stop() -> None:
    """A user's own number may be a count of tokens: passing NEVER is a boundary like any other, and only once."""
    rank = Rank(ME, 0)
    hear(rank, wire.Welcome(1, 0, 0, "", 0))
    assert rank.at_boundary(Position(NEVER, 0), 0) is GO_ON
    assert rank.due > NEVER
    assert boundary(rank, NEVER + 1) is GO_ON
    rank.supervisor_died()
    assert rank.at_boundary(Position(NEVER + 2, 0), 0) is GO_ON
    assert rank.due > NEVER + 2


def test_leave_ends_training_at_the_next_boundary_and_is_said_again_when_asked_again() -> None:
    """Left may be lost: a repeated Leave is answered."""
    rank = saved_in_round_one("leave")
    hear(rank, wire.Leave(1))
    assert boundary(rank, 5) is LEAVE
    rank.left()
    assert hear(rank) == [wire.Left(ME, 1, again=False)]
    assert hear(rank, wire.Leave(1)) == [wire.Left(ME, 1, again=False)]
    assert boundary(rank, 6) is LEAVE
    rank.left()
    assert hear(rank) == [wire.Left(ME, 1, again=True)]


def test_a_rank_that_left_never_says_finished() -> None:
    """Finished means that training came to its end by itself, and the exit code is judged by it."""
    rank = saved_in_round_one("leave")
    hear(rank, wire.Leave(1))
    boundary(rank, 5)
    rank.left()
    rank.take_outbox()
    rank.finish()
    assert hear(rank) == []
    assert hear(rank, wire.Prepare(2)) == []


def test_a_finished_rank_answers_leave_with_finished() -> None:
    """Rule 9: there is nothing left that it could leave."""
    rank = rank_at(4)
    rank.finish()
    rank.take_outbox()
    assert hear(rank, wire.Leave(3)) == [wire.Finished(ME, 3)]


def stops(rank: Rank, last: int) -> list[int]:
    """The steps at which the rank stops by itself; the coordinator releases it each time."""
    found = []
    for n in range(rank.position().n, last + 1):
        if boundary(rank, n) is WAIT:
            assert hear(rank) == [wire.Arrived(ME, 0, Position(n, 0))]
            found.append(n)
            hear(rank, wire.Abort(0, ""))
            assert rank.at_boundary(Position(n, 0), 0) is GO_ON
    return found


@pytest.mark.parametrize(
    ("start", "done_steps", "expected"),
    [
        (0, 0, [5, 10]),  # steps(), fresh: never at 0.
        (1, 0, [5, 10]),  # attach(), fresh.
        (5, 5, [10]),  # steps(), resumed at 5: that checkpoint is there.
        (5, 4, [5, 10]),  # attach(), resumed at 4: its first boundary is a multiple.
        (6, 5, [10]),  # attach(), resumed at 5.
        (7, 7, [10]),
    ],
)
def test_a_rank_stops_by_itself_at_the_multiples_that_are_not_saved_yet(start: int, done_steps: int, expected: list[int]) -> None:
    """Rule 12, and section "Numbers": never at 0, never at the step resumed from."""
    rank = Rank(ME, start, done_steps=done_steps)
    hear(rank, wire.Welcome(1, 0, 5, "", 0))
    assert stops(rank, 12) == expected


def test_own_numbers_that_jump_over_a_multiple_stop_at_the_next_one_they_hit() -> None:
    """`hook.step(n)` with n = 4, 8, 12: with every_steps 6 the first multiple that is hit is 12."""
    rank = Rank(ME, 0)
    hear(rank, wire.Welcome(1, 0, 6, "", 0))
    assert [boundary(rank, n) for n in (4, 8, 12)] == [GO_ON, GO_ON, WAIT]


def test_an_own_stop_becomes_a_round_at_that_step() -> None:
    """Rule 12: SaveAt and Go follow Arrived without Prepare."""
    rank = Rank(ME, 0)
    hear(rank, wire.Welcome(1, 0, 5, "", 0))
    assert boundary(rank, 5) is WAIT
    order = save_at(1, 5)
    hear(rank, order)
    assert rank.at_boundary(Position(5, 0), 0) is WAIT
    assert hear(rank, wire.Go(1)) == [wire.Arrived(ME, 1, Position(5, 0))]
    assert rank.at_boundary(Position(5, 0), 0) == Decision(Step.SAVE, order)
    rank.save_began(order)
    rank.save_ended(order, (), 1)
    rank.take_outbox()
    assert rank.at_boundary(Position(5, 0), 0) is GO_ON
    assert stops(rank, 12) == [10]


def test_a_silent_supervisor_does_not_hold_an_own_stop() -> None:
    """Rule 7 for stops without a round."""
    rank = Rank(ME, 0, silence_ms=100)
    hear(rank, wire.Welcome(1, 0, 5, "", 0))
    assert boundary(rank, 5, 0) is WAIT
    assert rank.at_boundary(Position(5, 0), 100) is GO_ON
    assert boundary(rank, 6) is GO_ON


def test_a_welcome_closes_the_rounds_before_it() -> None:
    """A rank that attaches late takes no part in rounds that were asked for before."""
    rank = rank_at(4)
    hear(rank, wire.Welcome(1, 7, 0, "", 0))
    assert isinstance(hear(rank, wire.Prepare(7))[0], wire.Failed)
    assert hear(rank, wire.Prepare(8)) == [wire.Ack(ME, 8, Position(5, 0))]


def test_an_older_prepare_after_a_newer_one_changes_nothing() -> None:
    """Words may come late and in any order; round numbers only rise."""
    rank = rank_at(4)
    hear(rank, wire.Prepare(2))
    assert hear(rank, wire.Prepare(1), save_at(1, 5)) == []
    assert rank.hold == 2


def test_words_that_cannot_be_sent_are_dropped_oldest_first() -> None:
    """The outbox has a bound, as any word may be lost."""
    rank = rank_at(4)
    for _ in range(protocol.OUTBOX_MAX + 5):
        hear_only = wire.Prepare(1)
        rank.hear(hear_only, 0)
    assert len(rank.outbox) == protocol.OUTBOX_MAX


def test_numbers_of_other_kinds_become_plain_integers() -> None:
    """A user's n may be a numpy integer, which the encoder would refuse."""

    class Number(int):
        """An integer of another type."""

    rank = rank_at(Number(4))
    (ack,) = hear(rank, wire.Prepare(1))
    assert isinstance(ack, wire.Ack)
    assert type(ack.entered.n) is int
    assert dataclasses.is_dataclass(Decision)


def test_the_time_left_for_a_save_is_counted_from_when_the_order_came() -> None:
    """The last rank may arrive seconds later: what a save bounds itself by must not lie behind the round's deadline."""
    rank = rank_at(4)
    hear(rank, wire.Prepare(1), save_at(1, 5), now_ms=100)
    assert boundary(rank, 5, now_ms=150) is WAIT
    hear(rank, wire.Go(1), now_ms=700)
    decision = boundary(rank, 5, now_ms=700)
    assert decision.order is not None
    assert decision.order.left_ms == 1_000 - 600
