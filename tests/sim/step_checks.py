"""What must hold for a step of several supervisors: who is told, who leaves with whom, and what a lost coordinator leaves behind.

Judges by what the simulated world really is: which processes live, which links are cut, which commands have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.options import NET
from tests.sim.violation import Violation

if TYPE_CHECKING:
    from tests.sim.relay_shell import Heir, RelayShell
    from tests.sim.shell import Machine, Shell
    from tests.sim.trainer import Process
    from tests.sim.world import World

NOTICED_MS = 5_000
"""A supervisor that is lost is noticed within this time."""

RELEASED_MS = 6_600
"""Whoever was parked for it is released soon after: a parked rank is looked at once a second."""

AT_ONCE_MS = 300
ASKED_MS = 200

UNHEARD_MS = 6_500
"""After so long without a word of a task its ranks are no longer waited for."""

KNOWN_MS = 1_200
ENDED_MS = 20_000
"""Nobody is waited for longer: not a task that was killed, nor a save that its ranks' end has cut off."""

BYE_MS = 3_000
KILLED_MS = 200
STALE = 76


class StepChecks:
    """The checkers of one run that look at all supervisors."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.exit_code: int | None = None

    def broken(self, rule: str, text: str) -> None:
        """A rule is broken."""
        raise Violation(rule, f"{text} (at {self.world.now} ms)")

    @property
    def coordinator(self) -> Shell:
        """Task 0's supervisor."""
        return self.world.shells[0]

    # --- losses -------------------------------------------------------------------------------------------------------

    def died(self, shell: Shell) -> None:
        """A supervisor was killed: the others have to notice it."""
        if shell.task:
            self.world.at(ENDED_MS, self._has_ended, shell)
        late_ms = 1_600 if self.world.options.has("link_delay") else 100
        self.world.at(NOTICED_MS + late_ms, self._is_noticed, (shell, self.world.now))

    def _is_noticed(self, arguments: tuple[Shell, int]) -> None:
        world = self.world
        shell, since_ms = arguments
        if shell.task:
            boss: Any = self.coordinator
            if self._was_there(boss, since_ms) and boss.state.phase.name != "DONE" and boss.stay_until_ms is None:
                task = boss.state.tasks.get(shell.task)
                if task is not None and not task.gone and not world.links.is_cut(shell.task, since_ms - 6 * NOTICED_MS):
                    self.broken("noticed", f"task {shell.task} is dead for {NOTICED_MS} ms, and taken for alive")
            return
        for relay in world.shells[1:]:
            if self._was_there(relay, since_ms) and relay.state is not None and relay.state.joined and relay.heir is None:
                if not world.links.is_cut(relay.task, since_ms - NOTICED_MS):
                    self.broken("noticed", f"the coordinator is dead for {NOTICED_MS} ms, and task {relay.task} has not noticed")

    def _has_ended(self, shell: Shell) -> None:
        """A task that was killed has ended training, as any rank's end does, unless it is on its way out."""
        boss, since_ms = self.world.supervisor, self.world.now - ENDED_MS
        if not self._was_there(boss, since_ms) or boss.stay_until_ms is not None or boss.state.tasks.get(shell.task) is None:
            return
        if len(boss.state.tasks) < self.world.options.tasks - 1:
            return  # A task that has never come is waited for.
        if boss.state.codes.get(shell.task) == 0:
            return  # Its command had come to its end before, and it had said so.
        checks = boss.state.phase.name in ("VERIFYING", "COMMITTING")  # What has been written is not thrown away for it.
        if boss.state.notice is None and boss.state.restarts == 0 and not checks:
            self.broken("dead task", f"task {shell.task} is dead since {shell.dead_ms}, and training is not over")

    def _was_there(self, shell: Shell, since_ms: int) -> bool:
        return not (shell.over or shell.stopped or shell.woke_ms > since_ms)

    def is_unheard(self, process: Process) -> bool:
        """Whether the coordinator cannot hear of this rank."""
        shell = process.command.shell
        if shell.task == 0:
            return False
        heir = getattr(shell, "heir", None)  # It passes no words on.
        return heir is not None or shell.over or shell.stopped or self.world.links.is_cut(shell.task)

    def lost_tasks(self, current: Any) -> None:
        """A round does not wait for ranks of a task that is not there."""
        world, boss = self.world, self.coordinator
        if boss.stopped:
            return
        for member in current.members:
            shell = world.shells[member.who.task]
            if shell.dead_ms is None:
                continue
            since_ms = max(shell.dead_ms, boss.woke_ms, current.began_ms)
            if world.now - since_ms > UNHEARD_MS:
                self.broken(
                    "lost task", f"round {current.number} waits for task {shell.task}, dead for {world.now - since_ms} ms"
                )

    def gone(self, before: Any, after: Any) -> None:
        """The coordinator takes tasks for gone: it must not have been able to hear them."""
        options, world = self.world.options, self.world
        for task in after.tasks:
            known = before.tasks.get(task.number)
            if not task.gone or known is None or known.gone:
                continue
            shell = world.shells[task.number]
            hindered = options.link_loss_percent > 5 or world.links.is_cut(task.number, world.now - 2 * NOTICED_MS)
            hindered = hindered or shell.stopped or shell.woke_ms > world.now - 2 * NOTICED_MS or shell.over
            hindered = hindered or getattr(shell, "heir", None) is not None  # It says so, and passes no words on.
            if not hindered:
                self.broken("gone", f"task {task.number} is taken for gone, and it is there")

    def told_exit(self, event: Any) -> None:
        """A report says that a command has ended: it must be the one that runs in this start."""
        command = self.world.shells[event.task].command
        restart = self.world.supervisor.state.restarts
        if command is None or command.restart != restart or command.code != event.code:
            self.broken(
                "exit code", f"the command of task {event.task} is said to have ended with {event.code} in start {restart}"
            )

    def shared(self, boss: Any, checked: Any) -> None:
        """A task has checked its share: it has heard all that it passed on."""
        current = boss.state.round
        if current is not None and current.number == checked.round and "has not heard" in checked.problem:
            self.broken("share", checked.problem)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def parked(self, process: Process) -> Machine | None:
        """A rank is parked; which machine holds it. None: judged here already."""
        world = self.world
        boss, shell = self.coordinator, process.command.shell
        assert process.parked_ms is not None
        if shell.stopped or process.command is not shell.command:
            return None  # It lets go by itself after 10 s, or is being killed to make way for the next start.
        heir = getattr(shell, "heir", None)
        if heir is not None:
            machine: Machine = heir
            return machine
        held_ms = world.now - max(process.parked_ms, process.stopped_ms, shell.woke_ms)
        away_ms = boss.dead_ms
        if away_ms is not None and min(held_ms, world.now - away_ms) > RELEASED_MS and not process.stopped:
            self.broken("parked", f"rank {process.rank} is held for {held_ms} ms, and the coordinator is dead since {away_ms}")
        if boss.over or boss.stopped or world.links.is_cut(shell.task, world.now - NOTICED_MS):
            return None
        current = world.supervisor.state.round
        if current is not None and world.supervisor.state.phase.name in ("AGREEING", "SAVING"):
            self.lost_tasks(current)
        return world.supervisor

    def took_over(self, shell: RelayShell) -> None:
        """A task decides for itself from here on: what its ranks do now is no longer the coordinator's."""
        boss, now, options = self.coordinator, self.world.now, self.world.options
        hindered = boss.over or boss.stopped or boss.woke_ms > now - 2 * NOTICED_MS or options.link_loss_percent
        if not hindered and not options.has("link_delay") and not self.world.links.is_cut(shell.task, now - 2 * NOTICED_MS):
            self.broken("lost", f"task {shell.task} takes the coordinator for lost, and it is there")
        for process in shell.command.processes if shell.command is not None else ():
            process.silenced = True
            if process.parked_ms is not None:
                # Released from a round it may stop at once by itself, at the very same step, where it does so at all.
                within_ms = RELEASED_MS - NOTICED_MS if options.every_steps else AT_ONCE_MS
                self.world.at(within_ms, self._is_released, (process, process.parked_ms, shell))

    def _is_released(self, arguments: tuple[Process, int, RelayShell]) -> None:
        process, parked_ms, shell = arguments
        hindered = process.stopped or shell.stopped or any(self.world.options.has(fault) for fault in NET)
        if process.alive and not hindered and process.parked_ms == parked_ms and not shell.over and shell.heir is not None:
            if shell.woke_ms < self.world.now - NOTICED_MS and process.stopped_ms < self.world.now - NOTICED_MS:
                self.broken("parked", f"rank {process.rank} is parked since {parked_ms}, and its task has lost the coordinator")

    # --- heirs --------------------------------------------------------------------------------------------------------

    def heir_does(self, heir: Heir, command: Any) -> None:
        """What an heir may ask for."""
        name = type(command).__name__
        word = type(getattr(command, "word", None)).__name__
        if name in ("Verify", "Commit", "Prune", "DropPartial", "StartCommand", "Announce", "Meet"):
            self.broken("heir", f"task {heir.task} is an heir, and asks for {name}")
        if word in ("Prepare", "SaveAt", "Go"):
            self.broken("heir", f"task {heir.task} is an heir, and says {word}")
        ends = name in ("AskCommand", "EndCommand") or word == "Leave"
        heir.told = heir.told or ends
        if ends and heir.state.notice is None:
            self.broken("heir", f"task {heir.task} ends its training without a notice")

    def followed(self, heir: Heir) -> None:
        """A task follows the coordinator again."""
        if heir.told:
            self.broken("heir", f"task {heir.task} follows again, and has told its ranks to leave")
        self.world.at(KNOWN_MS, self._is_known, heir.shell)

    def _is_known(self, shell: RelayShell) -> None:
        """The coordinator knows the ranks of a task that follows it again."""
        boss, world = self.world.supervisor, self.world
        hindered = (
            boss.over or boss.stopped or shell.over or shell.stopped or shell.heir is not None or world.options.link_loss_percent
        )
        if (
            hindered
            or world.links.is_cut(shell.task, world.now - KNOWN_MS)
            or max(boss.woke_ms, shell.woke_ms) > world.now - KNOWN_MS
        ):
            return
        if boss.state.phase.name == "DONE" or world.options.has("link_delay") or shell.command is None:
            return
        known = {(rank.who.rank, rank.who.pid) for rank in boss.state.ranks if rank.who.task == shell.task}
        for process in shell.command.processes:
            newest = process.who.generation == boss.state.generation
            if process.alive and process.protocol is not None and newest and (process.rank, process.who.pid) not in known:
                self.broken("known", f"rank {process.rank} has been let in, and the coordinator has not heard of it")

    def heir_left(self, heir: Heir, code: int) -> None:
        """An heir leaves."""
        slurm, options, command = self.world.slurm, self.world.options, heir.shell.command
        told = command is not None and any(process.left_n is not None for process in command.processes)
        may = options.requeue == "auto" and heir.policy.can_look and slurm.batch and slurm.requeue_flag
        if options.story == "preempt_cancel":
            may = False  # The end of a grace that Slurm does not requeue after.
        if told and may and not (slurm.requeued or slurm.trouble or slurm.cancelled_ms is not None):
            self.broken("lost", f"task {heir.task} leaves with {code}, its ranks were told to, and the job was not requeued")
        self._takes_command_along(heir.shell)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def starts_again(self, restart: int) -> None:
        """All commands are to be started again: one of the start before has failed by itself."""
        world = self.world
        failed = any(
            command.restart == restart - 1 and command.code not in (None, 0) and not command.killed for command in world.commands
        )
        lost = world.options.has("link_reset") or any(shell.dead_ms is not None for shell in world.shells) or world.last_word_lost
        masked = [process for command in world.commands if command.code == 0 for process in command.processes]
        hidden = [process for process in masked if process.raised]
        if not failed and not lost and not hidden and not world.supervisor.stalled:
            self.broken("start", f"start {restart} is asked for, and nothing of start {restart - 1} has failed")

    def started(self, shell: RelayShell) -> None:
        """A task has started its command."""
        command, boss = shell.command, self.world.supervisor
        if command is not None and not boss.over and command.restart > boss.state.restarts:
            self.broken("start", f"task {shell.task} begins start {command.restart}, and start {boss.state.restarts} is wanted")

    def relay_asks(self, shell: RelayShell) -> None:
        """A task asks its command to end: the coordinator has, and only once."""
        command, boss = shell.command, self.world.supervisor.state
        if command is None or command.asked_ms is not None or boss.leaving is None or boss.leaving.asked_ms is None:
            self.broken("asked", f"task {shell.task} asks its command to end, and that is not wanted")

    def relay_ends(self, shell: RelayShell) -> None:
        """A task kills its command: where the coordinator had asked its own to end, so has the task."""
        world, command = self.world, shell.command
        boss, options = world.supervisor, world.options
        leaving, stand = boss.state.leaving, shell.state.stand
        if command is None or leaving is None or leaving.asked_ms is None or stand.code is not None or not stand.end:
            return
        since_ms = world.now - 2 * NOTICED_MS
        hindered = options.link_loss_percent or options.has("link_delay") or world.links.is_cut(shell.task, since_ms)
        hindered = hindered or boss.stopped or max(boss.woke_ms, shell.woke_ms) > since_ms or boss.dead_ms is not None
        if not hindered and command.asked_ms is None and command.began_ms < leaving.asked_ms < world.now - ASKED_MS:
            self.broken("asked", f"task {shell.task} kills its command, and has not asked it to end")

    def relay_left(self, shell: RelayShell, code: int) -> None:
        """A task leaves as it was told to."""
        boss = self.world.supervisor
        if shell.command is None and code == STALE and boss.dead_ms is not None:
            return  # Nothing ran here, and nobody is there to say what to resume from.
        said = boss.checks.exit
        if (
            shell.command is None
            and code == STALE
            and not boss.over
            and self.world.links.is_cut(shell.task, self.world.now - NOTICED_MS)
        ):
            return
        if said is None or said[0] != code:
            self.broken("leaves alone", f"task {shell.task} leaves with {code}, and the coordinator with {said}")
        self._takes_command_along(shell)

    def _takes_command_along(self, shell: Shell) -> None:
        command = shell.command
        if command is not None and command.code is None and not command.killed:
            self.broken("left alone", f"task {shell.task} leaves while its command runs")

    def said_bye(self, task: int) -> None:
        """A task has said goodbye."""
        command, options = self.world.shells[task].command, self.world.options
        if command is not None and command.code is None and not options.has("unkillable"):
            self.broken("bye", f"task {task} says goodbye, and its command runs")

    def coordinator_left(self) -> None:
        """The coordinator leaves last."""
        world = self.world
        hindered = world.options.link_loss_percent or world.options.has("link_delay") or world.options.has("unkillable")
        for relay in world.shells[1:]:
            told: Any = relay
            if hindered or relay.over or relay.stopped or relay.woke_ms > world.now - BYE_MS or told.heir is not None:
                continue
            joined = told.state is not None and told.state.joined and told.state.stood_ms < world.now - BYE_MS
            if joined and not world.links.is_cut(relay.task, world.now - 2 * NOTICED_MS):
                self.broken("left behind", f"the coordinator leaves, and task {relay.task} is there and has not been told")

    def relay_killed(self, shell: RelayShell) -> None:
        """SIGKILL of the step has come, and this task was still there."""
        boss, world = self.world.supervisor, self.world
        if (
            shell.heir is not None
            or shell.stopped
            or shell.state is None
            or not shell.state.joined
            or boss.stay_until_ms is None
            or boss.dead_ms is not None
        ):
            return
        left_ms = world.now - (boss.stay_until_ms - BYE_MS)
        hindered = (
            world.links.is_cut(shell.task, world.now - left_ms)
            or world.options.link_loss_percent
            or world.options.has("link_delay")
        )
        if left_ms > BYE_MS and not hindered and shell.woke_ms < world.now - left_ms and not world.options.has("unkillable"):
            self.broken("leaves alone", f"the coordinator has left {left_ms} ms ago, and task {shell.task} has not heard of it")

    # --- the end ------------------------------------------------------------------------------------------------------

    def final(self) -> None:
        """At the end of a run: nobody follows a coordinator that is not there, and the job comes back."""
        world, options = self.world, self.world.options
        if options.tasks == 1:
            return
        boss = world.supervisor
        codes = [command.code for command in world.commands]
        if None not in codes and world.now - world.ended_ms > ENDED_MS and not boss.over and boss.state.phase.name == "RUNNING":
            if boss.state.notice is None and boss.woke_ms < world.ended_ms and not boss.stopped and len(codes) == options.tasks:
                self.broken("no end", f"all commands have ended at {world.ended_ms}, and the coordinator waits")
        for shell in world.shells[1:]:
            relay: Any = shell
            if relay.over or relay.state is None or not relay.state.joined or relay.stopped:
                continue
            boss_over = self.coordinator.over and self.coordinator.dead_ms is None
            if boss_over and relay.heir is None and world.now > (world.supervisor.stay_until_ms or world.now) + NOTICED_MS:
                self.broken("no end", f"task {relay.task} is still there, and the coordinator is not")
