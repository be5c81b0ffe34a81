"""What must hold: safety after every event, and at the end of a run what it should have come to.

Judges by what the simulated world really is (files, job record, steps run), never by what the machine believes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.sim.disk_checks import DiskChecks
from tests.sim.end_checks import EndChecks
from tests.sim.options import LINK, LOCAL, NET
from tests.sim.step_checks import StepChecks
from tests.sim.violation import Violation

if TYPE_CHECKING:
    from ckpt_client import wire

    from tests.sim.shell import Machine
    from tests.sim.trainer import Process
    from tests.sim.world import World

PARKED_IDLE_MS = 12_000
"""Rule 7 lets go after 10 s; the hook wakes once a second."""

ABORT_MS = 600
SAID_AGAIN_MS = 6_000
FEW_LOST = 2
"""Percent of words."""

MUTE_MS = 15_000
MUTE_SAVING_MS = 60_000
SLACK_MS = 3_000
TURNED_MS = 12_000
"""A notice that turns out to be a rehearsal gives the round its time anew, when the look has come."""

TERM_WAIT_MS = 3_000
MIN_NOTICE_MS = 1_500
"""With less time between the first notice and the kill nobody is asked to be out before it."""

HOPELESS_MS = 6_000
HINDER = (*LINK, "stopped_task", "stopped_coordinator", "dead_coordinator", "dead_task", "late_task")
"""What keeps words from coming from one supervisor to another."""

KILLED = 137
TURN_MS = 1_000
"""Heirs look one after the other."""

HEIR_NEEDS_MS = 5_000
LATE_WORD = ("link_cut", "stopped_task", "stopped_coordinator")
"""A signal may be told of so late that it is taken for another one."""

VERIFY_FAULTS = ("verify_slow", "verify_hang", "commit_slow", "commit_hang")


class Checks:
    """The checkers of one run."""

    def __init__(self, world: World, machine: Machine | None = None) -> None:
        self.world = world
        self.of = machine
        self.hello: set[tuple[int, int]] = set()
        """Task and process number of whoever has said Hello."""
        self.disk = DiskChecks(world)
        self.at: dict[int, Any] = {}
        self.committed_at: list[tuple[int, int, str]] = []
        """(step, round, kind) in the order in which the supervisor was told."""
        self.busy_since: dict[int, int] = {}
        self.saved_generation = 0
        self.hopeless: dict[int, int] = {}
        self.gave_up = False
        self.idle_since = 0
        self.notice_ms: int | None = None
        self.notice_n: int | None = None
        self.last_leave_signal_ms = -1
        self.term_ms = -1
        self.reached_term_ms = -1
        self.turn_ms = 0
        self.call_ms: int | None = None
        self.calling = False
        self.accepted_ms: int | None = None
        self.ended_by_us = False
        self.exit: tuple[int, str] | None = None
        self.was_killed = False
        self.ticks = (0, 0)
        self.step_checks = StepChecks(world)
        self.ends = EndChecks(self)

    @property
    def machine(self) -> Machine:
        """Whose checks these are."""
        return self.of or self.world.supervisor

    def broken(self, rule: str, text: str) -> None:
        """A rule is broken."""
        raise Violation(rule, f"{text} (at {self.world.now} ms)")

    # --- the machine --------------------------------------------------------------------------------------------------

    def step(self, before: Any, event: Any, after: Any, commands: tuple[Any, ...]) -> None:
        """After every step."""
        options = self.world.options
        if len(commands) > 4 * options.ranks + 12:
            self.broken("bounded", f"{len(commands)} commands in one step")
        self._phases(before, after)
        if options.tasks > 1 and self.of is None:
            if after.tasks is not before.tasks:
                self.step_checks.gone(before, after)
            sent, late = self.world.slurm.signals, any(options.has(fault) for fault in LATE_WORD)
            if after.notice is not None and after.notice.signals > max(1, sent) and not late:
                self.broken("signals", f"{after.notice.signals} signals are counted, and {sent} were sent")
        if after.notice is not None and before.notice is None:
            self.notice_n = self._least(before)
        self.ends.step(before, after, commands)
        kind = type(event).__name__
        names = [type(command).__name__ for command in commands]
        for command, name in zip(commands, names, strict=True):
            if name == "Say" and (command.task, command.pid) not in self.world.checks.hello:
                self.broken("say", f"a word to process {command.pid}, which never said Hello")
            elif name == "Commit" and not self.disk.intact[command.round].issuperset(command.ranks):
                self.broken("commit", f"round {command.round} is committed and was not found intact by the tasks of its ranks")
            elif name in ("Verify", "Commit"):
                self.busy_since[command.round] = self.world.now
            elif name in ("AskCommand", "EndCommand"):
                self.ended_by_us |= name == "EndCommand"
                self.ends.command(name, after)
            elif name == "CallRequeue":
                self._requeue(before, event)
            elif name == "Prune" and after.phase.name not in ("RUNNING", "LEAVING"):
                if after.round is not None and after.phase.name in ("VERIFYING", "COMMITTING"):
                    self.broken("prune", "pruned while a round was running")
        if names.count("Exit") > 1 or (before.phase.name == "DONE" and commands):
            self.broken("exit", "something is asked for after Exit")
        if kind in ("Verified", "Committed"):
            self.busy_since.pop(event.round, None)

    def _phases(self, before: Any, after: Any) -> None:
        if after.phase.value < before.phase.value and (before.phase.name in ("LEAVING", "REQUEUEING", "DONE")):
            self.broken("phases", f"{before.phase.name} -> {after.phase.name}")
        if before.round is not None and after.round is not None and before.round.number == after.round.number:
            if after.phase.value < before.phase.value:
                self.broken("phases", f"{before.phase.name} -> {after.phase.name} in round {after.round.number}")
        if after.round is not None and after.round.at is not None and before.round is not None:
            if before.round.number == after.round.number and before.round.at is None:
                self._fixed(after.round)
        if before.round is not None and after.round is not None and after.round.go and not before.round.go:
            self._gone(after.round)
        if after.round is not None:
            at = self.at.setdefault(after.round.number, after.round.at)
            if at is None:
                self.at[after.round.number] = after.round.at
            elif after.round.at != at:
                self.broken("T", f"T of round {after.round.number} moved from {at} to {after.round.at}")
            if before.round is not None and after.round.number < before.round.number:
                self.broken("rounds", f"round {before.round.number} -> {after.round.number}")
        if before.round is not None and before.round is not after.round and after.round is None:
            self.gave_up = self.gave_up or not before.round.committed
        if after.phase.name != "RUNNING":
            self.idle_since = self.world.now
        elif before.phase.name != "RUNNING":
            self.idle_since = self.world.now

    def _fixed(self, current: Any) -> None:
        """T was fixed from the answers to Prepare: no member may have gone on from it, or be unable to come to it."""
        for member in current.members:
            process = self.world.process(member.who)
            if not process.alive or process.silenced or process.protocol is None:
                continue
            if process.is_beyond(current.at):
                self.broken("T", f"rank {process.rank} is on its way to {tuple(process.next_at)}, and T is {tuple(current.at)}")
            if process.protocol.hold < current.number:
                self.broken("T", f"T of round {current.number} is fixed, and rank {process.rank} has not heard of it")
            if current.at.n > process.stop and not (self.world.options.attach_api or self.world.options.has("ends_early")):
                self.broken("T", f"T is {tuple(current.at)}, and rank {process.rank} ends at {process.stop}")

    def _gone(self, current: Any) -> None:
        """Go was said: every member has to stand at T."""
        for member in current.members:
            process = self.world.process(member.who)
            if process.alive and not process.silenced and process.parked_at != current.at:
                self.broken("go", f"Go is said, and rank {process.rank} does not stand at {tuple(current.at)}")

    def said(self, process: Process, word: wire.FromRank) -> None:
        """A word of a rank, before it is sent."""
        name = type(word).__name__
        if name == "Failed" and self.world.options.mode == "calm":
            self.broken("calm", f"rank {process.rank} failed: {word.reason}")

    def ticked(self, before: Any, after: Any, deadline_ms: int) -> None:
        """After a Tick at the deadline: it must have changed something, or the loop spins."""
        if before == after:
            self.broken("busy loop", f"a Tick at the deadline {deadline_ms} changes nothing in {after.phase.name}")
        moment, count = self.ticks
        self.ticks = (self.world.now, count + 1 if moment == self.world.now else 1)
        if self.ticks[1] > 10:
            self.broken("busy loop", f"{self.ticks[1]} ticks at the same moment in {after.phase.name}")

    def signalled(self, name: str, is_fresh: bool = True) -> None:
        """A signal is handed to the machine. Not `is_fresh`: it is that of a broadcast which another task has told of before."""
        now = self.world.now
        if name == "SIGUSR2":
            return
        if is_fresh:
            self.last_leave_signal_ms = now
        if name == "SIGTERM":
            self.term_ms = now
        if self.notice_ms is None:
            self.notice_ms = now

    def reached(self, name: str) -> None:
        """A signal has reached a supervisor, whichever."""
        if name == "SIGTERM":
            self.reached_term_ms = self.world.now

    def told(self, event: Any) -> None:
        """An event that another task's report has unfolded into."""
        kind = type(event).__name__
        if kind == "CommandExited":
            self.step_checks.told_exit(event)
        elif kind == "SignalCame" and event.meaning.name != "SAVE":
            if self.notice_ms is None:
                self.notice_ms = self.world.now

    def asked(self) -> None:
        """A look is asked for: an heir has to wait its turn."""
        self.turn_ms = self.world.now + self.machine.task * TURN_MS

    def inherited(self, commands: tuple[Any, ...]) -> None:
        """The first state of an heir, and what it asks for at once."""
        state = self.machine.state
        self.ends.step(state, state, commands)
        for command in commands:
            if type(command).__name__ in ("AskCommand", "EndCommand"):
                self.ended_by_us |= type(command).__name__ == "EndCommand"
                self.ends.command(type(command).__name__, state)
        self.idle_since = self.world.now
        if self.machine.state.notice is not None:
            self.notice_ms = self.world.now

    def _needs_ms(self) -> int:
        """How much time before the kill has to be enough."""
        heir = self.machine.task
        return MIN_NOTICE_MS if heir == 0 else heir * TURN_MS + HEIR_NEEDS_MS

    def _least(self, before: Any) -> int | None:
        """The least step that a living rank has finished, or the T of the round that runs."""
        steps = [process.n for process in self.world.ranks() if process.alive and process.hooked]
        current = before.round
        if current is not None and current.at is not None:
            steps.append(current.at.n)
        return min(steps, default=None)

    # --- the requeue --------------------------------------------------------------------------------------------------

    def _requeue(self, before: Any, event: Any) -> None:
        world, supervisor = self.world, self.machine
        view = supervisor.view
        if type(event).__name__ != "Looked" or view is None or event.view is not view:
            self.broken("look", "requeue is called without a look right before it")
        if self.of is not None and supervisor.view_seen_ms < self.turn_ms:
            self.broken("turn", f"task {supervisor.task} has looked at {supervisor.view_seen_ms}, its turn is at {self.turn_ms}")
        if supervisor.view_seen_ms < self.last_leave_signal_ms:
            self.broken("look", "requeue is called on a look older than the last signal")
        assert view is not None
        if view.restarts > world.options.start_restarts:
            self.broken("requeue", "requeue is called although the job was seen to be requeued")
        if self._seen_cancelled():
            self.broken("scancel", "requeue is called although the job was seen to be cancelled")
        if self.calling or self.accepted_ms is not None:
            self.broken("requeue", "requeue is called twice")
        if not any(world.options.has(fault) for fault in VERIFY_FAULTS) and self._far():
            if self.busy_since or before.round is not None:
                self.broken("order", "requeue is called before the checkpoint is committed")
        self.calling = True
        self.call_ms = world.now

    def _far(self) -> bool:
        """Whether the kill, as far as it is decided, is not near."""
        kill_ms = self.world.slurm.kill_ms
        return kill_ms is None or kill_ms - self.world.now > 6_000

    def requeue_accepted(self) -> None:
        """The controller has carried a requeue of ours out."""
        if self.world.slurm.accepted > 1:
            self.broken("requeue", "two requeues were accepted")

    def requeue_returned(self, result: str) -> None:
        """The answer of scontrol."""
        self.calling = False
        if result in ("ACCEPTED", "PENDING"):
            self.accepted_ms = self.world.now

    # --- the disk -----------------------------------------------------------------------------------------------------

    def told_committed(self, command: Any) -> None:
        """The supervisor is told that a step is committed."""
        current = self.machine.state.round
        kind = current.kind.name if current is not None and current.number == command.round else "LATE"
        self.committed_at.append((command.step, command.round, kind))

    # --- the ranks ----------------------------------------------------------------------------------------------------

    def save_began(self, process: Process, order: wire.SaveAt) -> None:
        """A rank begins to save: it must stand where it was agreed, with everybody's Go."""
        self.saved_generation = process.who.generation
        if process.n != order.at.n:
            self.broken("save", f"rank {process.rank} saves step {process.n}, agreed was {order.at.n}")
        current = self.machine.state.round
        if current is not None and current.number == order.round and not current.go:
            self.broken("save", f"rank {process.rank} saves before Go")

    def saved(self, process: Process, order: wire.SaveAt, word: wire.Saved) -> None:
        """A rank has saved."""
        if word.round != order.round:
            self.broken("saved", f"rank {process.rank} says it saved in round {word.round}, and did in round {order.round}")

    def parked(self, process: Process) -> None:
        """A rank is parked: is it held for nothing?"""
        world = self.world
        if world.options.tasks > 1:
            machine = self.step_checks.parked(process)
            if machine is None:
                return
            if machine.checks is not self:
                machine.checks.held(process)
                return
        self.held(process)

    def held(self, process: Process) -> None:
        """A rank is parked that hears this machine."""
        world, state = self.world, self.machine.state
        options, now = world.options, world.now
        assert process.parked_ms is not None
        if state.phase.name == "RUNNING":
            held_ms = now - max(process.parked_ms, self.idle_since, process.stopped_ms, self.machine.shell.woke_ms)
            limit_ms = self._idle_limit_ms()
            if held_ms > limit_ms:
                self.broken("parked", f"rank {process.rank} is held for {held_ms} ms while no round is running")
            return
        current = state.round
        if current is None or state.phase.name not in ("AGREEING", "SAVING"):
            return
        held_ms = now - max(process.parked_ms, current.began_ms, current.go_ms, self.machine.shell.woke_ms)
        if held_ms > options.save_timeout_ms + TURNED_MS and current.kind.name != "LEAVE":
            self.broken("parked", f"rank {process.rank} is held for {held_ms} ms in round {current.number}")
        self._is_hopeless(current)
        mute_ms = self._mute_ms(current)
        saving = any(other.saving for other in world.ranks() if other.alive)
        saving = saving or any(member.stage.name == "SAVING" for member in current.members)  # Its Saved may be lost.
        if min(held_ms, mute_ms) > (MUTE_SAVING_MS if saving else MUTE_MS) + SLACK_MS:
            self.broken("mute", f"rank {process.rank} is held for {held_ms} ms by a rank that is mute for {mute_ms} ms")

    def _idle_limit_ms(self) -> int:
        """How long a rank may stay parked without a round: Abort comes at once, and a lost one is said again within a second."""
        options = self.world.options
        hindered = any(options.has(fault) for fault in HINDER)
        if not hindered and not any(options.has(fault) for fault in NET):
            return ABORT_MS
        if hindered or options.has("partition") or options.loss_percent > FEW_LOST:
            return PARKED_IDLE_MS
        return SAID_AGAIN_MS

    def _is_hopeless(self, current: Any) -> None:
        """A member that has gone on from T will not come back to it: the round has to be given up soon."""
        world, now = self.world, self.world.now
        if current.at is None or current.go or world.options.loss_percent:
            return
        for member in current.members:
            process = world.process(member.who)
            unheard = process.stopped or world.net.is_cut(process) or self.step_checks.is_unheard(process)
            if process.alive and not unheard and process.protocol is not None and process.is_beyond(current.at):
                since_ms = self.hopeless.setdefault(current.number, now)
                if now - since_ms > HOPELESS_MS:
                    self.broken(
                        "hopeless",
                        f"rank {process.rank} is on its way to {tuple(process.next_at)}, and waited for at {current.at}",
                    )
                return
        self.hopeless.pop(current.number, None)

    def _mute_ms(self, current: Any) -> int:
        """For how long a rank has been stopped whose word the round waits for."""
        stages = ("ARRIVED", "SAVING") if current.go else ("REQUESTED", "AGREED")
        waited = [self.world.process(member.who) for member in current.members if member.stage.name in stages]
        stopped = [process for process in waited if process.stopped]
        return max((self.world.now - process.stopped_ms for process in stopped), default=0)

    # --- the end ------------------------------------------------------------------------------------------------------

    def killed(self) -> None:
        """SIGKILL of the step has come before the supervisor was out."""
        world = self.world
        self.was_killed = True
        told = self.notice_ms is not None and world.now - max(self.notice_ms, self.machine.shell.woke_ms) >= self._needs_ms()
        woken = self.machine.shell.woke_ms > max(0, world.now - world.options.kill_wait_ms)
        told = told and not self.machine.shell.stopped and not woken  # It could not know when its time began.
        state = self.machine.state
        stays = world.slurm.trouble and state.phase.name == "REQUEUEING"
        # Nothing tells of the end of a step alone, where the job's end explains the signal as well.
        stays = stays or (world.options.has("step_ends") and (world.slurm.requeued or world.slurm.preempt_ms is not None))
        # With looks that failed it cannot know of a later scancel.
        stays = stays or (world.slurm.failed and state.notice is not None and state.notice.kill_at_ms > world.now)
        if told and not stays and not world.options.has("unkillable"):
            self.broken("late", f"task {self.machine.task} is killed in {state.phase.name} before it was out")

    def exited(self, code: int, line: str) -> None:
        """The supervisor leaves."""
        self.exit = (code, line)
        world, state = self.world, self.machine.state
        slurm, options = world.slurm, world.options
        command = self.machine.shell.command
        own_code = None if command is None else command.code
        if options.tasks == 1 and own_code is None and not self.ended_by_us:
            self.broken("left alone", f"exit {code} while the command runs and was not ended")
        interrupted = state.leaving is not None
        if not interrupted:
            alone = options.tasks == 1 or self.of is not None
            codes = {own_code} if alone else {command.code for command in world.commands}
            codes = self.ends.codes(codes)
            if options.has("link_reset") or any(shell.dead_ms is not None for shell in world.shells):
                codes.add(KILLED)
            if code not in codes:
                self.broken("status", f"exit {code}, the command ended with {own_code}")
            return
        self.ends.interrupted(code)
        if code == 143 and line.startswith("cancelled"):
            if slurm.cancelled_ms is None and options.story != "preempt_cancel" and not options.has("refused"):
                self.broken("status", "took the job for cancelled, and nobody cancelled it")
        elif code in (75, 76, 85) and not slurm.requeued and self._seen_cancelled():
            self.broken("status", f"exit {code} of a cancelled job")
        fresh = re.search(r"step (\d+) is committed", line)
        if fresh:
            self._fresh(int(fresh.group(1)))
        if code == 75 and not fresh or code == 76 and fresh:
            self.broken("status", f"exit {code}: {line}")
        self._comes_back(code)

    def _seen_cancelled(self) -> bool:
        """Whether the last look shows a cancelled job.

        A scancel in the very second of the notice of a --no-requeue job looks like the end of its grace: the one doubt that is
        not taken for a scancel, as nobody can revive such a job (docs/slurm.md, section 3).
        """
        supervisor, cancelled_ms = self.machine, self.world.slurm.cancelled_ms
        view = supervisor.view
        if view is None or cancelled_ms is None or supervisor.view_seen_ms <= cancelled_ms or view.state == "RUNNING":
            return False
        return view.requeue or view.preempt_ms != view.end_ms

    def _comes_back(self, code: int) -> None:
        """A job that Slurm interrupts comes back, and nobody leaves before it does."""
        world = self.world
        slurm, options, policy = world.slurm, world.options, self.machine.policy
        if code not in (75, 76) or not policy.can_look or options.requeue != "auto" or slurm.cancelled_ms is not None:
            return
        stayed = world.now >= self.machine.state.notice.kill_at_ms + world.code.core.leaving.STAY_MS
        if slurm.batch and slurm.requeue_flag and not slurm.requeued and not slurm.denied and not stayed:
            self.broken("lost", "left, and the job was not requeued")
        term_ms = world.checks.reached_term_ms if options.tasks > 1 else self.term_ms
        if self.accepted_ms is None or slurm.term_due_ms is None or term_ms >= slurm.term_due_ms or options.has("storm"):
            return
        if world.supervisor.stalled and term_ms >= self.accepted_ms:
            return  # Its own requeue of a hang, and the story's signal in the same moment: nobody can tell the two apart.
        kills_ms = [self.machine.state.notice.kill_at_ms, slurm.kill_ms or world.now + TERM_WAIT_MS]
        near = any(0 <= kill_ms - world.now < MIN_NOTICE_MS for kill_ms in kills_ms)
        if world.now < self.accepted_ms + TERM_WAIT_MS and not near:
            self.broken("early", "left before the SIGTERM of its requeue had come")

    def _fresh(self, step: int) -> None:
        world, options = self.world, self.world.options
        if not self.disk.is_whole(step):
            self.broken("fresh", f"step {step} is said to be committed, and is not whole on the disk")
        if (
            self.of is None
            and self.notice_n is not None
            and step < self.notice_n
            and not options.has("elastic")
            and not options.restarts
        ):
            self.broken("fresh", f"step {step} is said to be fresh, and all ranks stood at {self.notice_n} when the notice came")
        last = self.committed_at[-1] if self.committed_at else None
        if last is None or last[0] != step or last[2] != "LEAVE":
            return
        for process in world.ranks():
            n = process.n if process.left_n is None else process.left_n
            member = process.rank in world.disk.committed[step].ranks and process.who.generation == self.saved_generation
            if member and n > step and not process.silenced:
                self.broken("lost steps", f"rank {process.rank} ran to step {n} after step {step} was saved to leave")

    def final(self) -> None:
        """At the end of a run."""
        from tests.sim import liveness

        liveness.final(self)


def is_local(world: World) -> bool:
    """Whether this run has no Slurm."""
    return world.options.story in LOCAL
