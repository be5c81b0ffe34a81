"""Rounds as the coordinator runs them: periodic ones, who takes part, who is refused, what ends a round (docs/protocol.md)."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from ckpt_client import wire
from ckpt_client.wire import Position
from ckpt_supervisor.core import between, machine, rounds
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.state import Kind, Phase

from tests.support.core_story import FILE, IN_SLURM, LOCAL, Story, none_of, the, who

EVERY_5 = dataclasses.replace(LOCAL, every_steps=5)
EVERY_MINUTE = dataclasses.replace(LOCAL, every_ms=60_000)


def stop(story: Story, n: int) -> None:
    """All ranks stop by themselves after step n."""
    for rank in story.state.ranks:
        story.feed(wire.Arrived(rank.who, wire.NO_ROUND, Position(n, 0)))


def words(found: tuple[do.Command, ...] | list[do.Command], pid: int) -> list[str]:
    """Names of the words that this process was told."""
    return [type(say.word).__name__ for say in found if isinstance(say, do.Say) and say.pid == pid]


# --- rule 12: periodic rounds ---------------------------------------------------------------------------------------------


def test_ranks_that_stop_by_themselves_save_at_that_step_without_prepare() -> None:
    """Rule 12: SaveAt follows the first stop, Go the last arrival; training goes on after the commit."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    assert story.round.kind is Kind.PERIODIC
    assert story.told(wire.Prepare) == []
    (order,) = set(story.told(wire.SaveAt))
    assert (order.at, order.then, order.directory) == (Position(5, 0), "go_on", "/ckpt/.partial-step-000000005-4-1")
    story.agree(5)
    assert story.told(wire.Go) == [wire.Go(1, "go_on")] * 2
    story.write(5)
    found = story.commit(5)
    assert words(found, 100) == words(found, 101) == ["Abort"]
    assert the(found, do.Prune)
    assert story.state.phase is Phase.RUNNING
    assert the(story.all, do.Commit).cause == "periodic"
    assert none_of(story.all, do.EndCommand, do.Exit)


def test_a_rank_that_waits_at_its_stop_hears_that_it_is_heard() -> None:
    """Rule 7 lets go after ten silent seconds: a repeated Arrived is answered while the round waits for others."""
    story = Story(EVERY_5, ranks=2)
    story.feed(wire.Arrived(who(0), wire.NO_ROUND, Position(5, 0)))
    found = story.feed(wire.Arrived(who(0), wire.NO_ROUND, Position(5, 0)))
    assert words(found, 100) == ["Wait"]


def test_the_next_own_stop_waits_for_the_checkpoint_before_it_and_is_then_served() -> None:
    """One round at a time: a stop during verification begins its round after the commit."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    story.agree(5)
    story.write(5)
    stop(story, 10)
    assert story.round.number == 1
    found = story.commit(5)
    assert story.round.number == 2
    assert {say.word.at for say in found if isinstance(say, do.Say) and isinstance(say.word, wire.SaveAt)} == {Position(10, 0)}


def test_an_own_stop_is_let_go_rather_than_hold_training_for_a_slow_verification() -> None:
    """A periodic save may be skipped; the ranks are released and the verification goes on."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    story.agree(5)
    story.write(5)
    stop(story, 10)
    found = story.wait(machine.OWN_STOP_MS)
    assert words(found, 100) == words(found, 101) == ["Abort"]
    assert all(say.word.round == wire.NO_ROUND for say in found if isinstance(say, do.Say) and isinstance(say.word, wire.Abort))
    story.commit(5)
    assert story.state.phase is Phase.RUNNING


def test_a_stop_whose_round_is_over_is_released() -> None:
    """An echo of the stop that was saved: the word that released the rank may have been lost."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    story.save(5)
    found = story.feed(wire.Arrived(who(0), wire.NO_ROUND, Position(5, 0)))
    assert found == (do.Say(100, wire.Abort(wire.NO_ROUND, "this round is over")),)
    assert story.state.phase is Phase.RUNNING


def test_saves_by_time_begin_when_due_and_count_from_the_last_one() -> None:
    """--every 1m: asked for with Prepare, and the next one a minute after this one is over."""
    story = Story(EVERY_MINUTE, ranks=1)
    began_ms = story.now
    story.wait(60_000)
    assert story.round.kind is Kind.PERIODIC
    assert story.told(wire.Prepare) == [wire.Prepare(1)]
    story.wait(5_000)
    story.save(7)
    over_ms = story.now
    assert story.deadline == over_ms + 60_000
    story.wait(59_999)
    assert story.state.round is None
    story.wait(1)
    assert story.round.number == 2
    assert began_ms + 60_000 <= over_ms


def test_a_save_by_time_that_is_due_during_a_round_does_not_begin_another() -> None:
    """One round at a time: the save signal's round stands in for it."""
    story = Story(EVERY_MINUTE, ranks=1)
    story.wait(55_000)
    story.signal("SIGUSR2")
    story.wait(10_000)
    assert story.round.number == 1
    assert story.round.kind is Kind.SAVE
    story.save(7)
    assert story.state.phase is Phase.RUNNING


def test_a_save_by_time_without_ranks_is_put_off_and_not_spun_on() -> None:
    """Nobody has attached: nothing is asked for, and the next one is a minute away."""
    story = Story(EVERY_MINUTE)
    story.wait(60_000)
    assert story.state.round is None
    assert story.deadline == story.now + 60_000


def test_a_failed_periodic_save_lets_training_go_on() -> None:
    """Promise 4: everybody is released at once, the directory removed, and nothing ends."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    story.agree(5)
    found = story.feed(wire.Failed(who(1), 1, "disk full"))
    assert words(found, 100) == words(found, 101) == ["Abort"]
    assert the(found, do.DropPartial).partial == "/ckpt/.partial-step-000000005-4-1"
    assert story.state.phase is Phase.RUNNING
    assert story.state.committed_step == -1


@pytest.mark.parametrize("arrived", [0, 1])
def test_a_notice_before_go_turns_the_periodic_round_into_a_leave_round(arrived: int) -> None:
    """Rule 12: the same round and T; those on their way hear SaveAt again, and Go says what comes after to all."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    number, at = story.round.number, story.round.at
    for rank in range(arrived):
        story.feed(wire.Arrived(who(rank), number, Position(5, 0)))
    story.signal()
    assert (story.round.number, story.round.at, story.round.kind) == (number, at, Kind.LEAVE)
    assert story.told(wire.SaveAt, 101)[-1].then == "leave"
    story.agree(5)
    assert story.told(wire.Go) == [wire.Go(number, "leave")] * 2
    story.write(5)
    found = story.commit(5)
    assert words(found, 100) == words(found, 101) == ["Leave"]
    assert len(story.asked(do.Commit)) == 1


def test_a_notice_after_go_lets_the_round_finish_and_a_leave_round_follows() -> None:
    """Rule 12, field case 35: the running save is finished and used; then one more, so that no step is lost."""
    story = Story(EVERY_5, ranks=2)
    stop(story, 5)
    story.agree(5)
    story.signal()
    assert story.round.kind is Kind.PERIODIC
    story.write(5)
    found = story.commit(5)
    assert {"Prepare", "Abort"} <= set(words(found, 100))
    assert (story.round.number, story.round.kind) == (2, Kind.LEAVE)
    story.save(6)
    assert [commit.step for commit in story.asked(do.Commit)] == [5, 6]
    assert story.state.leaving is not None
    assert story.state.leaving.fresh


def test_without_time_for_another_save_the_periodic_checkpoint_is_the_last_one() -> None:
    """A leave round follows only if time allows; what was committed under this notice counts as fresh."""
    story = Story(dataclasses.replace(EVERY_5, grace_ms=20_000), ranks=1)
    stop(story, 5)
    story.agree(5)
    story.signal()
    story.write(5, save_ms=10_000, after_ms=10_000)
    story.commit(5)
    assert story.state.leaving is not None
    assert story.state.leaving.fresh
    assert len(story.asked(do.Commit)) == 1


def test_a_round_that_took_too_long_is_not_followed_by_one_without_time() -> None:
    """The check of a periodic save outlives the time of the last save: its own reason is told, not that of an empty round."""
    story = Story(dataclasses.replace(EVERY_5, grace_ms=10_000), ranks=1)
    stop(story, 5)
    story.agree(5)
    story.write(5)
    story.signal()
    story.wait(9_000)
    assert story.state.newest_round == 1
    assert story.state.leaving is not None
    assert story.state.leaving.reason == "the verification was not over in its time"


def test_a_rehearsal_during_a_periodic_save_leaves_no_round_behind() -> None:
    """The stop that was saved is over, also where a notice came and went meanwhile."""
    story = Story(dataclasses.replace(IN_SLURM, every_steps=5, lead_ms=30_000), ranks=1)
    stop(story, 5)
    story.agree(5)
    story.signal("SIGUSR1")
    story.write(5)
    while story.state.notice is not None:
        story.look()
        story.wait(300)
    story.commit(5)
    assert story.state.phase is Phase.RUNNING
    assert story.state.newest_round == 1


# --- rule 10: who takes part ------------------------------------------------------------------------------------------------


def test_missing_ranks_are_waited_for_two_seconds_and_then_named() -> None:
    """Rule 10: two of four are not there, so the round fails, and is not saved by half."""
    story = Story(LOCAL)
    story.hello(0, 4)
    story.hello(2, 4)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(7, 0)))
    story.feed(wire.Ack(who(2), 1, Position(7, 0)))
    story.wait(rounds.MISSING_MS - 21)
    assert story.state.phase is Phase.AGREEING
    story.wait(1)
    assert story.state.phase is Phase.RUNNING
    assert story.state.given_up is not None
    assert story.state.given_up.reason == "2 of 4 ranks are not there: 1, 3"
    assert story.told(wire.SaveAt) == []


def test_a_rank_that_attaches_while_it_is_waited_for_takes_part() -> None:
    """It is asked at once, and the round is whole."""
    story = Story(LOCAL)
    story.hello(0, 2)
    story.signal("SIGUSR2")
    found = story.hello(1, 2)
    assert words(found, 101) == ["Welcome", "Prepare"]
    assert the([say for say in found if isinstance(say, do.Say) and isinstance(say.word, wire.Welcome)], do.Say).word == (
        wire.Welcome(wire.VERSION, 0, 0, "", -1)
    )
    story.save()
    assert the(story.all, do.Commit).ranks == (0, 1)


@pytest.mark.parametrize(("sharded", "saves"), [(False, True), (True, False)])
def test_rank_0_alone_saves_if_nobody_else_ever_attached_and_its_state_is_not_sharded(*, sharded: bool, saves: bool) -> None:
    """Rule 10: `if rank == 0:` around the hook."""
    story = Story(LOCAL)
    story.hello(0, 4, sharded=sharded)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(7, 0)))
    story.wait(rounds.MISSING_MS)
    assert (story.state.phase is Phase.SAVING) is saves
    if saves:
        story.save()
        assert (the(story.all, do.Commit).ranks, the(story.all, do.Commit).world_size) == ((0,), 4)


def test_rank_0_alone_is_waited_for_once_only() -> None:
    """Two seconds the first time; later rounds begin at once."""
    story = Story(LOCAL)
    story.hello(0, 4)
    story.signal("SIGUSR2")
    story.wait(rounds.MISSING_MS)
    story.save(7)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 2, Position(9, 0)))
    assert story.state.phase is Phase.SAVING


@pytest.mark.parametrize("rank", [1, 2])
def test_another_rank_alone_saves_nothing(rank: int) -> None:
    """Only rank 0 may stand for all."""
    story = Story(LOCAL)
    story.hello(rank, 3)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(rank), 1, Position(7, 0)))
    story.wait(rounds.MISSING_MS)
    assert story.state.phase is Phase.RUNNING
    assert story.told(wire.SaveAt) == []


@pytest.mark.parametrize(("world", "whole"), [(2, True), (3, False)])
def test_a_rank_of_a_larger_world_that_comes_before_t_is_fixed_belongs_to_the_round(world: int, *, whole: bool) -> None:
    """Rank 0 said that it is alone, and is not: what it would have saved by itself were no whole checkpoint."""
    story = Story(LOCAL, ranks=1)
    story.signal("SIGUSR2")
    found = story.hello(1, world)
    assert words(found, 101) == ["Welcome", "Prepare"]
    story.feed(wire.Ack(who(0), 1, Position(7, 0)))
    assert story.told(wire.SaveAt) == []
    story.feed(wire.Ack(who(1), 1, Position(7, 0)))
    assert (story.state.phase is Phase.SAVING) is whole
    if not whole:
        story.wait(rounds.MISSING_MS)
        assert story.state.given_up is not None
        assert story.state.given_up.reason == "1 of 3 ranks are not there: 2"


def test_nothing_is_written_for_the_very_step_that_was_resumed_from() -> None:
    """Rule 10: that checkpoint counts, and is there already."""
    story = Story(dataclasses.replace(LOCAL, resume_step=7, resume_from="/ckpt/step-000000007"), ranks=2)
    story.signal()
    story.agree(7)
    assert story.told(wire.Go) == []
    assert none_of(story.all, do.Verify, do.Commit)
    story.end(0)
    assert story.exit.code == 75
    assert "step 7 is committed" in story.exit.line


# --- rules 3 to 5 -----------------------------------------------------------------------------------------------------------


def test_t_is_the_largest_position_and_never_moves() -> None:
    """Rule 3: later answers, larger or smaller, change nothing."""
    story = Story(LOCAL, ranks=2)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(7, 2)))
    story.feed(wire.Ack(who(1), 1, Position(7, 0)))
    assert {order.at for order in story.told(wire.SaveAt)} == {Position(7, 2)}
    for at in (Position(9, 0), Position(1, 0)):
        story.feed(wire.Ack(who(1), 1, at))
    assert story.round.at == Position(7, 2)


@pytest.mark.parametrize("at", [Position(6, 0), Position(7, 1), Position(8, 0)])
def test_a_rank_that_stands_elsewhere_than_at_t_fails_the_round(at: Position) -> None:
    """Rule 3: exactly T, also for safe points, or no checkpoint."""
    story = Story(LOCAL, ranks=1)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(7, 0)))
    story.feed(wire.Arrived(who(0), 1, at))
    assert story.state.phase is Phase.RUNNING
    assert story.told(wire.Go) == []


@pytest.mark.parametrize("n", [6, 8])
def test_a_save_of_another_step_is_not_committed(n: int) -> None:
    """Rule 5: the n that the save began with is T's, of every rank."""
    story = Story(LOCAL, ranks=2)
    story.signal("SIGUSR2")
    story.agree(7)
    story.feed(wire.Saved(who(0), 1, 7, (FILE,), 5))
    story.feed(wire.Saved(who(1), 1, n, (FILE,), 5))
    assert none_of(story.all, do.Verify)
    assert story.state.phase is Phase.RUNNING


def test_a_word_of_a_rank_that_is_no_member_completes_nothing() -> None:
    """A Saved from rank 1 in a world of 1 once counted as complete."""
    story = Story(LOCAL, ranks=1)
    story.signal("SIGUSR2")
    story.agree(7)
    for stranger in (who(1), who(0, pid=999), who(0, generation=1)):
        story.feed(wire.Saved(stranger, 1, 7, (FILE,), 5))
        story.feed(wire.Failed(stranger, 1, "no"))
    assert story.state.phase is Phase.SAVING
    assert none_of(story.all, do.Verify)


# --- rules 9 and 11 -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_left_its_loop_ends_the_round_at_once() -> None:
    """Rule 9: there is nothing left to save, so nobody is waited for; and the training is let end by itself with its status."""
    story = Story(LOCAL, ranks=2)
    story.signal()
    story.feed(wire.Ack(who(0), 1, Position(7, 0)))
    story.feed(wire.Finished(who(1), 1))
    assert story.told(wire.Abort, 100)
    assert story.told(wire.Leave) == []
    story.feed(wire.Finished(who(0), wire.NO_ROUND))
    story.feed(ev.CommandExited(0))
    assert story.exit == do.Exit(0, "training ended by itself")


def test_no_round_waits_for_ranks_that_will_not_come_back() -> None:
    """Rule 9: with one rank finished a later round is given up when it begins, not two seconds later."""
    story = Story(LOCAL, ranks=2)
    story.feed(wire.Finished(who(1), wire.NO_ROUND))
    story.signal("SIGUSR2")
    assert story.state.phase is Phase.RUNNING
    assert story.told(wire.SaveAt) == []


def test_a_second_live_process_of_the_same_rank_is_refused_and_named() -> None:
    """Rule 11: it trains on unsupervised, and its words are nobody's."""
    story = Story(LOCAL, ranks=1)
    found = story.hello(0, 1, pid=777)
    (word,) = [say.word for say in found if isinstance(say, do.Say)]
    assert isinstance(word, wire.Refused)
    assert "rank 0 is taken by the live process 100" in word.reason
    assert story.feed(wire.Ack(who(0, pid=777), 1, Position(7, 0))) == ()
    story.feed(wire.Failed(who(0), wire.NO_ROUND, "boom", 7))  # The end of a process in another pid namespace is not seen.
    assert isinstance(the(story.hello(0, 1, pid=777), do.Say).word, wire.Welcome)
    assert isinstance(the(story.hello(0, 1, pid=778), do.Say).word, wire.Refused)
    story.feed(ev.RankGone(who(0, pid=777), "its process has ended"))
    assert isinstance(the(story.hello(0, 1, pid=778), do.Say).word, wire.Welcome)


def test_a_new_generation_fails_the_running_round_and_takes_the_place_of_the_old_one() -> None:
    """Rule 11: torchrun has started its workers again; words of the older ones are dropped."""
    story = Story(LOCAL, ranks=2)
    story.signal("SIGUSR2")
    story.agree(7)
    story.hello(0, 2, generation=1)
    assert story.state.phase is Phase.RUNNING
    assert story.state.given_up is not None
    assert "started again (generation 1)" in story.state.given_up.reason
    assert [rank.who for rank in story.state.ranks] == [who(0, 1)]
    assert story.feed(wire.Arrived(who(1), 1, Position(7, 0))) == ()
    assert isinstance(the(story.hello(1, 2, generation=0), do.Say).word, wire.Refused)


def test_a_new_generation_resumes_from_the_newest_checkpoint_of_this_run() -> None:
    """Chosen once per generation, the same for all its ranks."""
    story = Story(LOCAL, ranks=1)
    story.signal("SIGUSR2")
    story.save(7)
    for rank in (0, 1):
        welcome = the(story.hello(rank, 2, generation=1), do.Say).word
        assert isinstance(welcome, wire.Welcome)
        assert (welcome.resume_from, welcome.resume_step) == ("/ckpt/step-000000007", 7)
        story.state = msgspec.structs.replace(story.state, committed_step=9)


def test_another_version_of_the_protocol_is_refused_by_name() -> None:
    """Both sides have to be of the same release: the refusal says so."""
    story = Story(LOCAL)
    found = story.feed(wire.Hello(who(0), wire.VERSION + 1, 1, 0, sharded=False))
    word = the(found, do.Say).word
    assert isinstance(word, wire.Refused)
    assert f"version {wire.VERSION + 1}" in word.reason


def test_a_command_that_is_started_again_saves_at_its_own_stops_again() -> None:
    """It begins before the last step that was agreed on: those stops are new ones, and ranks of the old start are gone."""
    story = Story(dataclasses.replace(EVERY_5, restarts=1), ranks=1)
    stop(story, 5)
    story.save(5)
    stop(story, 10)
    story.feed(wire.Failed(who(0), 2, "disk full"))
    story.feed(ev.CommandExited(1))
    assert isinstance(the(story.hello(0, 1, pid=200), do.Say).word, wire.Welcome)
    story.feed(wire.Arrived(who(0, pid=200), wire.NO_ROUND, Position(10, 0)))
    assert story.round.at == Position(10, 0)


def test_rank_0_alone_makes_no_checkpoint_where_an_earlier_one_holds_more_ranks() -> None:
    """The others are late: their files are in what this run resumes from, so that it cannot be whole without them (rule 10)."""
    story = Story(dataclasses.replace(LOCAL, resume_step=7, resume_from="/ckpt/step-000000007"))
    story.state = machine.resumed(story.state, "/ckpt/step-000000007", 7, several=True)
    story.hello(0, 3)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(9, 0)))
    story.wait(3_000)
    assert story.asked(do.Verify) == story.told(wire.SaveAt) == []
    assert story.state.given_up is not None
    assert "2 of 3 ranks are not there: 1, 2" in story.state.given_up.reason


def test_rank_0_alone_makes_no_checkpoint_while_other_tasks_have_not_joined() -> None:
    """Their ranks are only late, not left out on purpose."""
    story = Story(dataclasses.replace(LOCAL, tasks=2))
    story.hello(0, 2)
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 1, Position(9, 0)))
    story.wait(3_000)
    assert story.told(wire.SaveAt) == []
    story.feed(between.Report(1, between.VERSION, LOCAL.epoch, "n1", 4711))
    story.signal("SIGUSR2")
    story.feed(wire.Ack(who(0), 2, Position(12, 0)))
    for _ in range(3):
        story.feed(between.Report(1, between.VERSION, LOCAL.epoch, "n1", 4711), 900)
        story.wait(10)
    assert story.told(wire.SaveAt), "all tasks are there, and only rank 0 has attached: that is how it is meant"
