"""Another task's supervisor: what it passes on, what it does as it is told, and how it decides once nobody tells it."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest
from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile
from ckpt_supervisor.core import between, machine, relay, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.policy import EXIT_STALE, Policy
from ckpt_supervisor.core.state import Phase, State
from msgspec.structs import replace

from tests.support.core_story import IN_SLURM, view, who

STEP = dataclasses.replace(IN_SLURM, tasks=3, every_steps=5)
EPOCH = STEP.epoch
TASK = 2
RANK = who(4, task=TASK)
OTHER = who(5, task=TASK)
STAND = between.Stand(EPOCH, restart=0, resume_from="/ckpt/step-000000005", resume_step=5, committed_step=5)

C = TypeVar("C")


def hello(rank: wire.Who) -> wire.Hello:
    """The first word of this rank."""
    return wire.Hello(rank, wire.VERSION, 6, 0, False)


def saved(rank: wire.Who, number: int) -> wire.Saved:
    """What it says of its save."""
    return wire.Saved(rank, number, 7, (SavedFile(f"rank-{rank.rank}-{number}", 1_000, "ab"),), 40)


class Task:
    """One relay, and the heir that it may become."""

    def __init__(self, *, joined: bool = True) -> None:
        """`joined`: the coordinator has answered, the command runs, and two ranks have attached."""
        self.now = 1_000
        self.policy: Policy = STEP
        self.state = relay.start(TASK, EPOCH, "node2", 502, self.now)
        self.heir: State | None = None
        self.feed(ev.Tick())
        if joined:
            self.feed(STAND)
            for rank in (RANK, OTHER):
                self.feed(hello(rank))

    def feed(self, event: relay.Event, after_ms: int = 10) -> tuple[do.RelayCommand, ...]:
        """One event."""
        self.now += after_ms
        self.state, commands = relay.step(self.policy, self.state, event, self.now)
        return commands

    def wait(self, ms: int, *, stand: between.Stand | None = None) -> list[do.RelayCommand]:
        """Let so much time pass, with a Tick at each deadline; `stand` is heard every second."""
        end, found = self.now + ms, list[do.RelayCommand]()
        heard_ms = self.now
        while True:
            deadline_ms = relay.next_deadline(self.state)
            if stand is not None and self.now >= heard_ms + 1_000:
                heard_ms = self.now
                found += self.feed(stand, 0)
            if deadline_ms is None or deadline_ms > end:
                break
            found += self.feed(ev.Tick(), max(0, deadline_ms - self.now))
        return found + list(self.feed(ev.Tick(), end - self.now))

    def lose(self) -> tuple[do.Command, ...]:
        """The coordinator is not heard any more; what is done at once."""
        (_,) = [command for command in self.wait(relay.GONE_MS + 500) if isinstance(command, do.TakeOver)]
        return self.inherit()

    def inherit(self) -> tuple[do.Command, ...]:
        """The machine takes over."""
        self.policy = relay.heir_policy(self.policy, self.state)
        self.heir, commands = relay.inherit(self.policy, self.state, self.now)
        return commands

    def decides(self, event: ev.Event, after_ms: int = 10) -> tuple[do.Command, ...]:
        """One event of the heir."""
        assert self.heir is not None
        self.now += after_ms
        self.heir, commands = machine.step(self.policy, self.heir, event, self.now)
        return commands


def only(found: tuple[object, ...] | list[object], kind: type[C]) -> list[C]:
    """The commands of this kind."""
    return [command for command in found if isinstance(command, kind)]


def reports(found: tuple[object, ...] | list[object]) -> list[between.Report]:
    """The reports among them."""
    return [command.word for command in only(found, do.SendUp) if isinstance(command.word, between.Report)]


# --- following --------------------------------------------------------------------------------------------------------


def test_it_says_every_second_where_its_task_stands() -> None:
    """From its first moment on, whether or not it is answered."""
    task = Task(joined=False)
    assert 4 <= len(reports(task.wait(5_000))) <= 6
    assert relay.next_deadline(task.state) is not None


def test_the_command_is_started_once_the_coordinator_has_chosen_what_to_resume_from() -> None:
    """And not again, however often it is said."""
    task = Task(joined=False)
    assert not only(task.feed(between.Stand(EPOCH)), do.StartCommand)
    assert only(task.feed(STAND), do.StartCommand) == [do.StartCommand(0)]
    assert not only(task.feed(STAND), do.StartCommand)


def test_a_coordinator_of_another_attempt_is_not_believed() -> None:
    """Its epoch is another one: whatever it says was meant for others."""
    task = Task()
    before = task.state
    assert task.feed(between.Stand(EPOCH - 1, restart=3, end="over", code=0)) == ()
    assert (task.state.stand, task.state.heard_ms) == (before.stand, before.heard_ms)


def test_words_of_ranks_go_up_and_words_to_them_go_down() -> None:
    """As they are."""
    task = Task()
    word = wire.Ack(RANK, 3, Position(7, 0))
    assert only(task.feed(word), do.PassUp) == [do.PassUp(word)]
    go = wire.Go(3, "leave")
    assert only(task.feed(between.Tell((RANK.pid, OTHER.pid), go)), do.Say) == [do.Say(RANK.pid, go), do.Say(OTHER.pid, go)]


def test_a_signal_and_the_end_of_a_rank_or_of_the_command_are_told_at_once() -> None:
    """And again in every report, since a frame may be lost."""
    task = Task()
    said = reports(task.feed(ev.SignalCame("SIGTERM", ev.Meaning.LEAVE, TASK)))
    assert said[-1].signals == (("SIGTERM", "LEAVE", 1),)
    assert reports(task.feed(ev.RankGone(RANK, "killed")))[-1].gone == ((RANK, "killed"),)
    told = reports(task.feed(ev.CommandExited(77, why="the kernel killed it")))[-1]
    assert (told.code, told.why) == (77, "the kernel killed it")
    assert ev.CommandExited(77, TASK, why="the kernel killed it") in tasks.unfold(STEP, machine.start(STEP, 0)[0], told)
    last = reports(task.wait(1_500))[-1]
    assert (last.signals, last.gone, last.code, last.restart) == ((("SIGTERM", "LEAVE", 1),), ((RANK, "killed"),), 77, 0)


def test_a_restart_in_place_waits_until_the_old_command_is_over() -> None:
    """It is ended first; what it has left behind is forgotten."""
    task = Task()
    again = between.Stand(EPOCH, restart=1)
    assert only(task.feed(again), do.EndCommand)
    assert not only(task.feed(again), do.StartCommand)
    assert only(task.feed(ev.CommandExited(137)), do.StartCommand) == [do.StartCommand(1)]
    assert (task.state.code, task.state.hellos, task.state.gone) == (None, (), ())


def test_it_stays_when_its_command_ends_and_leaves_with_the_status_of_the_step() -> None:
    """All tasks of a step leave together."""
    task = Task()
    assert not only(task.feed(ev.CommandExited(0)), do.Exit)
    assert not only(task.wait(5_000, stand=STAND), do.Exit)
    last = task.feed(between.Stand(EPOCH, restart=0, code=75))
    assert [leaves.code for leaves in only(last, do.Exit)] == [75]
    assert reports(last)[-1].bye
    assert task.feed(ev.Tick()) == ()
    assert relay.next_deadline(task.state) is None


def test_it_does_not_say_goodbye_while_its_command_runs() -> None:
    """It ends it first, and waits for that for two seconds."""
    task = Task()
    first = task.feed(between.Stand(EPOCH, restart=0, code=75))
    assert only(first, do.EndCommand)
    assert not only(first, do.Exit)
    assert not any(said.bye for said in reports(first))
    assert only(task.feed(ev.CommandExited(137)), do.Exit)
    stuck = Task()
    stuck.feed(between.Stand(EPOCH, restart=0, code=75))
    assert only(stuck.wait(relay.REAP_MS + 100), do.Exit)


# --- files ------------------------------------------------------------------------------------------------------------


def test_it_verifies_what_its_own_ranks_said_they_had_written() -> None:
    """And says what it found, again if it is asked again."""
    task = Task()
    task.feed(saved(OTHER, 3))
    task.feed(saved(RANK, 3))
    check = between.Check(3, "/ckpt/.partial", (RANK.pid, OTHER.pid), True)
    (verify,) = only(task.feed(check), do.Verify)
    assert [(rank, file.path) for rank, file in verify.files] == [(4, "rank-4-3"), (5, "rank-5-3")]
    assert not only(task.feed(check), do.Verify)
    found = (between.CheckedFile("rank-4-3", 1_000, "ab", 4),)
    (answer,) = only(task.feed(ev.Verified(3, "full", "", 2_000, TASK, found)), do.SendUp)
    assert answer.word == between.Checked(TASK, 3, "", 2_000, found, "full")
    assert only(task.feed(check), do.SendUp) == [answer]


def test_the_next_rounds_files_are_verified_anew() -> None:
    """An older answer is not given for them."""
    task = Task()
    task.feed(saved(RANK, 3))
    task.feed(between.Check(3, "/ckpt/a", (RANK.pid,), True))
    task.feed(ev.Verified(3, "full", "", 1, TASK))
    task.feed(saved(RANK, 4))
    (verify,) = only(task.feed(between.Check(4, "/ckpt/b", (RANK.pid,), False)), do.Verify)
    assert (verify.round, verify.full, verify.files[0][1].path) == (4, False, "rank-4-4")


def test_a_word_of_an_older_round_does_not_replace_those_of_the_newest() -> None:
    """Every word may come again, and late."""
    task = Task()
    task.feed(saved(RANK, 4))
    task.feed(saved(OTHER, 3))
    task.feed(saved(OTHER, 4))
    assert only(task.feed(between.Check(4, "/ckpt/b", (RANK.pid, OTHER.pid), True)), do.Verify)


def test_what_it_has_not_heard_of_it_cannot_verify() -> None:
    """It says so, rather than finding nothing wrong."""
    task = Task()
    task.feed(saved(RANK, 3))
    (answer,) = only(task.feed(between.Check(3, "/ckpt/a", (RANK.pid, OTHER.pid), True)), do.SendUp)
    assert isinstance(answer.word, between.Checked)
    assert answer.word.problem == "task 2 has not heard what 1 of its ranks wrote"


# --- the coordinator is lost ------------------------------------------------------------------------------------------


def test_a_coordinator_that_is_not_heard_is_lost_within_five_seconds() -> None:
    """And one that is heard is not."""
    task = Task()
    assert not only(task.wait(20_000, stand=STAND), do.TakeOver)
    lost_ms = task.now
    assert only(task.wait(5_000), do.TakeOver)
    assert task.state.lost
    assert task.now - lost_ms <= 5_000


def test_a_closed_connection_is_noticed_sooner() -> None:
    """Whose process has ended says no word any more."""
    task = Task()
    task.feed(ev.TaskCut(0))
    assert only(task.wait(relay.CUT_MS + 100), do.TakeOver)


def test_a_relay_that_was_stopped_itself_does_not_take_the_coordinator_for_lost() -> None:
    """Nobody could be heard meanwhile."""
    task = Task()
    assert not only(task.feed(ev.Tick(), 20_000), do.TakeOver)


def test_where_nothing_runs_yet_there_is_nothing_to_take_over() -> None:
    """Nobody is left to say what to resume from."""
    task = Task(joined=False)
    task.feed(between.Stand(EPOCH))
    assert [leaves.code for leaves in only(task.wait(6_000), do.Exit)] == [EXIT_STALE]


def test_everybody_who_is_parked_is_released_at_once() -> None:
    """From the newest round, and from a stop of its own."""
    task = Task()
    task.feed(between.Tell((RANK.pid,), wire.Go(7, "leave")))
    said = only(task.lose(), do.Say)
    assert {(say.pid, say.word.round) for say in said if isinstance(say.word, wire.Abort)} == {
        (rank.pid, number) for rank in (RANK, OTHER) for number in (7, wire.NO_ROUND)
    }


def test_without_a_notice_training_goes_on_unsaved() -> None:
    """Nobody is asked to save or to leave; a rank that stops by itself is let go."""
    task = Task()
    task.lose()
    assert task.heir is not None
    found: list[do.Command] = []
    for _ in range(20):
        found += task.decides(ev.Tick(), 1_000)
    assert not only(found, do.EndCommand)
    assert not only(found, do.Say)
    assert not only(task.decides(ev.SignalCame("SIGUSR2", ev.Meaning.SAVE)), do.Say)
    stop = wire.Arrived(RANK, wire.NO_ROUND, Position(10, 0))
    assert [say.word.round for say in only(task.decides(stop), do.Say) if isinstance(say.word, wire.Abort)] == [0]
    (welcome,) = [say.word for say in only(task.decides(hello(who(4, 1, task=TASK))), do.Say)]
    assert isinstance(welcome, wire.Welcome)
    assert welcome.every_steps == 5, "should the coordinator come back, this rank stops with the others"


def test_a_notice_of_the_coordinators_is_in_force_and_its_time_goes_on() -> None:
    """Training is told to leave, and the kill does not move away because somebody was lost."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, committed_step=5, left_ms=12_000))
    stood_ms = task.now
    commands = task.lose()
    assert task.heir is not None
    assert task.heir.notice is not None
    assert task.heir.notice.kill_at_ms == stood_ms + 12_000
    assert [say.pid for say in only(commands, do.Say) if isinstance(say.word, wire.Leave)] == [RANK.pid, OTHER.pid]


def test_a_signal_that_the_coordinator_may_not_have_seen_is_in_force_since_it_came() -> None:
    """It was lost in the same moment."""
    task = Task()
    task.feed(ev.SignalCame("SIGTERM", ev.Meaning.LEAVE, TASK))
    came_ms = task.now
    task.lose()
    assert task.heir is not None
    assert task.heir.notice is not None
    assert task.heir.notice.first_ms == came_ms
    assert task.heir.notice.kill_at_ms == came_ms + STAND.kill_wait_ms


def test_a_signal_that_the_coordinator_took_for_a_rehearsal_is_none_for_the_heir() -> None:
    """It said afterwards, for long enough, that there was no notice."""
    task = Task()
    task.feed(ev.SignalCame("SIGUSR1", ev.Meaning.NOTICE, TASK))
    task.wait(10_000, stand=STAND)
    task.lose()
    assert task.heir is not None
    assert task.heir.notice is None


def test_heirs_look_one_after_the_other_and_only_one_of_them_requeues() -> None:
    """The look of the next one shows what the first has done."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, left_ms=60_000, kill_wait_ms=60_000))
    (look,) = only(task.lose(), do.LookUp)
    assert look.after_ms == TASK * 1_000
    for rank in (RANK, OTHER):
        task.decides(wire.Left(rank, 1, again=False))
    first = task.decides(ev.CommandExited(0), 2_000)
    assert not only(first, do.CallRequeue)
    taken = view(task.now, "COMPLETING", "None", restarts=1, end_in_ms=None)
    found = list(task.decides(ev.Looked(taken, "test")))
    for _ in range(10):
        found += task.decides(ev.Tick(), 1_000)
    assert not only(found, do.CallRequeue)
    assert [leaves.code for leaves in only(found, do.Exit)] == [EXIT_STALE]


def test_an_heir_requeues_when_nobody_has() -> None:
    """After its look, in its turn."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, left_ms=60_000, kill_wait_ms=60_000))
    task.lose()
    task.decides(ev.CommandExited(0), 500)
    runs = view(task.now, preempted_in_ms=0, end_in_ms=50_000)
    assert only(task.decides(ev.Looked(runs, "test"), 1_600), do.CallRequeue)


def test_a_look_that_was_made_before_the_command_had_ended_is_made_again() -> None:
    """The requeue comes after a look of its own; one that still waits its turn is as good."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, left_ms=60_000, kill_wait_ms=60_000))
    task.lose()
    task.decides(ev.CommandExited(0), 2_000)
    runs = view(task.now, preempted_in_ms=0, end_in_ms=50_000)
    assert only(task.decides(ev.Looked(runs, "test")), do.LookUp) == [do.LookUp("a signal came during the look", 2_000)]


def test_a_save_that_the_coordinator_had_committed_is_fresh_for_the_heir_too() -> None:
    """It says so in its last line, and in its status."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, committed_step=7, fresh=True, left_ms=60_000, kill_wait_ms=60_000))
    task.lose()
    assert task.heir is not None
    assert task.heir.leaving is not None
    assert task.heir.leaving.fresh


def test_a_command_that_has_ended_as_it_was_told_to_is_no_end_of_training() -> None:
    """The coordinator was on its way out, and is lost before the requeue: the heir goes on from there."""
    task = Task()
    task.feed(between.Stand(EPOCH, restart=0, committed_step=7, fresh=True, left_ms=60_000, kill_wait_ms=60_000))
    task.feed(ev.CommandExited(0))
    assert not only(task.lose(), do.Exit)
    assert task.heir is not None
    assert task.heir.phase in (Phase.LEAVING, Phase.REQUEUEING)


def test_the_own_end_of_training_without_a_notice_is_its_exit_status() -> None:
    """As without a coordinator."""
    task = Task()
    task.feed(ev.CommandExited(77))
    assert [leaves.code for leaves in only(task.lose(), do.Exit)] == [77]


# --- it is heard again ------------------------------------------------------------------------------------------------


def test_a_coordinator_that_is_heard_again_is_told_who_has_attached_meanwhile() -> None:
    """Those ranks were let in by the heir, and will not say Hello again."""
    task = Task()
    task.lose()
    assert task.heir is not None
    assert relay.may_follow_again(task.heir)
    again = [passed.word for passed in only(task.feed(STAND), do.PassUp)]
    assert again == [hello(RANK), hello(OTHER)]
    assert not task.state.lost
    assert not only(task.feed(STAND), do.PassUp)


@pytest.mark.parametrize("event", [ev.SignalCame("SIGTERM", ev.Meaning.LEAVE, TASK), ev.CommandExited(1)])
def test_what_was_decided_without_the_coordinator_is_not_taken_back(event: ev.Event) -> None:
    """Ranks were told to leave, or training is over."""
    task = Task()
    task.lose()
    task.decides(event)
    assert task.heir is not None
    assert not relay.may_follow_again(task.heir)


def test_an_heir_does_not_ask_again_what_was_asked_already() -> None:
    """The second SIGTERM would cut short what the command does at the first; that it is killed in its time stays."""
    task = Task()
    task.feed(replace(STAND, left_ms=60_000))
    assert only(task.feed(replace(STAND, left_ms=60_000, ask="it has to leave")), do.AskCommand)
    found = list(task.lose())
    for _ in range(60):
        found += task.decides(ev.Tick(), 1_000)
    assert only(found, do.AskCommand) == []
    assert only(found, do.EndCommand)
