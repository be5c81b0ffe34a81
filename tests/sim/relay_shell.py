"""The simulated shell of every other task's supervisor: it follows the coordinator, and decides alone once that is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ckpt_client import wire

from tests.sim.checks import Checks
from tests.sim.command import Command
from tests.sim.shell import MEANINGS, Machine, Shell

if TYPE_CHECKING:
    from tests.sim.trainer import Process
    from tests.sim.world import World


NOT_THE_MACHINES = ("Stand", "Tell", "Check", "Turned", "Verified", "TaskCut")
"""What only a relay takes."""


class Heir(Machine):
    """The machine in a task whose coordinator is lost."""

    def __init__(self, world: World, shell: RelayShell, its_policy: Any) -> None:
        super().__init__(world, shell, its_policy)
        self.checks = Checks(world, self)
        self.told = False
        """Its ranks were told to leave, or their command was ended."""

    def take_over(self, relay_state: Any) -> None:
        """The first state, and what to do at once."""
        world, relay = self.world, self.core.relay
        self.state, commands = relay.inherit(self.policy, relay_state, world.now)
        if world.options.pure and relay.inherit(self.policy, relay_state, world.now) != (self.state, commands):
            self.checks.broken("purity", "inherit gives two results")
        self.checks.inherited(commands)
        for command in commands:
            if world.is_traced:
                world.trace(f"    {command}")
            self.do(command)
        self._arm()

    def do(self, command: Any) -> None:
        """Carry one command out."""
        self.world.checks.step_checks.heir_does(self, command)
        super().do(command)

    def exit(self, code: int) -> None:
        """Leave, and take the command along."""
        command = self.shell.command
        if command is not None and command.code is None and not command.killed:
            command.kill()
        self.world.checks.step_checks.heir_left(self, code)
        self.shell.leave()


class RelayShell(Shell):
    """The supervisor of a task other than 0."""

    def __init__(self, world: World, task: int) -> None:
        super().__init__(world, task)
        self.state: Any = None
        self.heir: Heir | None = None
        self.armed_ms: int | None = None
        self.words: list[Any] = []
        self.exit: int | None = None
        self.lost_ms: int | None = None
        options = world.options
        last = task == options.tasks - 1
        self.never = last and options.has("never_task")
        late_ms = world.rng.choice((500, 3_000, 8_000)) if last and options.has("late_task") else 0
        if not self.never:
            world.at(late_ms + world.rng.randrange(30), self._begin, None)

    def _begin(self, _: None) -> None:
        if self.held(self._begin, None):
            return
        self.state = self.core.relay.start(self.task, self.policy.epoch, f"node{self.task}", 500 + self.task, self.world.now)
        self.feed(self.core.events.Tick())

    def feed(self, event: Any) -> None:
        """One event: of the relay, and of the heir if there is one (tasks/others.py does the same)."""
        world, relay, heir = self.world, self.core.relay, self.heir
        if self.over or world.over or self.state is None:
            return
        kind = type(event).__name__
        if heir is not None and kind == "Stand" and not relay.may_follow_again(heir.state):
            return  # What was decided without the coordinator is not taken back.
        before = self.state
        after, commands = relay.step(self.policy, before, event, world.now)
        if world.options.pure and relay.step(self.policy, before, event, world.now) != (after, commands):
            world.checks.broken("purity", f"{event} gives two results")
        if world.is_traced and (kind != "Tick" or len(commands) > 1):
            world.trace(f"[{self.task}] relay{' (heir)' if heir else ''} {event}")
        self.state = after
        if before.lost and not after.lost and heir is not None:
            world.trace(f"[{self.task}] follows again")
            heir.dropped, self.heir = True, None
            world.checks.step_checks.followed(heir)
        elif before.lost:
            commands = tuple(command for command in commands if type(command).__name__ == "SendUp")
        self._do_all(commands)
        # The event that made it an heir is among what that has inherited.
        if heir is not None and self.heir is not None and kind not in NOT_THE_MACHINES:
            if kind == "SignalCame":
                self.heir.checks.signalled(event.name)
            self.heir.feed(event)
        self._arm()

    def _do_all(self, commands: tuple[Any, ...]) -> None:
        for command in commands:
            if self.world.is_traced and type(command).__name__ not in ("PassUp", "SendUp"):
                self.world.trace(f"    [{self.task}] {command}")
            self._do(command)

    def _do(self, command: Any) -> None:
        world = self.world
        match type(command).__name__:
            case "Say":
                world.net.to_rank(world.processes[self.task, command.pid], command.word)
            case "PassUp":
                if not self.words:
                    world.at(0, self._pass_up, None)
                self.words.append(command.word)
            case "SendUp":
                self._pass_up(None)
                world.links.up(self.task, self.core.between.encode(command.word))
            case "Verify":
                world.disk.verify(command, self)
            case "StartCommand":
                assert self.state.stand is not None
                self.command = Command(world, self, command.restart, self.state.stand.resume_step)
                world.checks.step_checks.started(self)
            case "AskCommand":
                world.checks.step_checks.relay_asks(self)
                if self.command is not None:
                    self.command.ask()
            case "EndCommand":
                world.checks.step_checks.relay_ends(self)
                if self.command is not None:
                    self.command.kill()
            case "TakeOver":
                self.take_over(command.reason)
            case "Exit":
                self.exit = command.code
                world.checks.step_checks.relay_left(self, command.code)
                self.leave()
            case name:
                world.checks.broken("command", f"unknown command {name}")

    def _pass_up(self, _: None) -> None:
        words, self.words = self.words, []
        if words and not self.over:
            self.world.links.up(self.task, self.core.between.encode(self.core.between.Heard(self.task, tuple(words))))

    def take_over(self, reason: str) -> None:
        """The coordinator is lost."""
        self.world.trace(f"[{self.task}] takes over: {reason}")
        self.lost_ms = self.world.now
        self.world.checks.step_checks.took_over(self)
        self.heir = Heir(self.world, self, self.core.relay.heir_policy(self.policy, self.state))
        self.heir.take_over(self.state)

    # --- the timer ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline_ms = self.core.relay.next_deadline(self.state)
        if deadline_ms is None or self.over or self.world.over:
            return
        if self.armed_ms is None or deadline_ms < self.armed_ms:
            self.armed_ms = deadline_ms
            self.world.at(max(0, deadline_ms - self.world.now), self._fire, deadline_ms)

    def _fire(self, armed_ms: int) -> None:
        if armed_ms != self.armed_ms or self.held(self._fire, armed_ms):
            return
        self.armed_ms = None
        deadline_ms = self.core.relay.next_deadline(self.state)
        if deadline_ms is not None and deadline_ms <= self.world.now:
            self.feed(self.core.events.Tick())
            after_ms = self.core.relay.next_deadline(self.state)
            if after_ms is not None and after_ms <= self.world.now:
                self.world.checks.broken("busy loop", f"task {self.task}: the next deadline after a Tick is {after_ms}")
        self._arm()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def hear(self, frame: bytes) -> None:
        """A frame of a rank of this task."""
        if self.held(self.hear, frame):
            return
        word = self.core.between.stamped(wire.decode_from_rank(frame), self.task)
        if isinstance(word, wire.Hello):
            self.world.checks.hello.add((self.task, word.who.pid))
        self.feed(word)

    def hear_coordinator(self, frame: bytes) -> None:
        """A frame of the coordinator."""
        if not self.held(self.hear_coordinator, frame):
            self.feed(self.core.between.decode_down(frame))

    def task_cut(self, task: int) -> None:
        """The coordinator's connection was closed."""
        if not self.held(self.task_cut, task):
            self.feed(self.core.events.TaskCut(task))

    def signal(self, name: str) -> None:
        """A signal to this supervisor."""
        if self.held(self.signal, name):
            return
        self.world.checks.reached(name)
        self.feed(self.core.events.SignalCame(name, self.core.events.Meaning[MEANINGS[name]], self.task))

    def rank_gone(self, process: Process, how: str = "") -> None:
        """A pidfd is ready."""
        if (self.task, process.who.pid) in self.world.checks.hello and not self.held(self.rank_gone, process):
            who = msgspec.structs.replace(process.who, task=self.task)
            self.feed(self.core.events.RankGone(who, how or "its process has ended"))

    def command_exited(self, arguments: tuple[Command, int]) -> None:
        """The command's pidfd is ready."""
        command, code = arguments
        if command is self.command and not self.held(self.command_exited, arguments):
            self.feed(self.core.events.CommandExited(code, pid=command.pid))

    def verified(self, command: Any, problem: str, files: tuple[Any, ...]) -> None:
        """A verification is over."""
        self._verified((command, problem, files))

    def _verified(self, arguments: tuple[Any, str, tuple[Any, ...]]) -> None:
        if not self.held(self._verified, arguments):
            command, problem, files = arguments
            mode = "full" if command.full else "structure"
            self.feed(self.core.events.Verified(command.round, mode, problem, 0, self.task, files))

    def kill(self, _: None) -> None:
        """SIGKILL of the step."""
        if not self.over and not self.world.over:
            if self.heir is not None:
                self.heir.checks.killed()
            self.world.checks.step_checks.relay_killed(self)
            self.leave()
