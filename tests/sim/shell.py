"""The simulated shell of the supervisor: feeds the real machine, carries its commands out, arms its one timer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_client import wire

from tests.sim.command import Command
from tests.sim.options import LOCAL

if TYPE_CHECKING:
    from tests.sim.world import World

MEANINGS = {"SIGTERM": "LEAVE", "SIGUSR1": "NOTICE", "SIGUSR2": "SAVE", "SIGINT": "INTERRUPT"}


class Supervisor:
    """The machine and its state."""

    def __init__(self, world: World) -> None:
        self.world = world
        options, core = world.options, world.code.core
        self.core = core
        local = options.story in LOCAL
        self.policy = core.policy.Policy(
            directory="/d",
            slurm=not local,
            can_look=not local and not options.has("cannot_look"),
            requeue=options.requeue,
            requeue_exit=85,
            start_restarts=options.start_restarts,
            kill_wait_ms=options.kill_wait_ms,
            every_steps=options.every_steps,
            every_ms=options.every_ms,
            save_timeout_ms=options.save_timeout_ms,
            restarts=options.restarts,
            resume_step=options.resume_step,
            resume_from=f"/d/{options.resume_step}" if options.resume_step >= 0 else "",
        )
        self.state: Any = None
        self.armed_ms: int | None = None
        self.view: dict[str, Any] | None = None
        self.view_seen_ms = -1
        self.others_until_ms = 0
        if options.has("others"):
            self.others_until_ms = options.story_ms + world.rng.choice((500, 4_000, 30_000))

    def begin(self) -> None:
        """The first state and its commands."""
        self.state, commands = self.core.machine.start(self.policy, self.world.now)
        for command in commands:
            self._do(command)
        self._arm()

    def feed(self, event: Any) -> None:
        """One event."""
        world = self.world
        if world.over:
            return
        before = self.state
        after, commands = self.core.machine.step(self.policy, before, event, world.now)
        if world.options.pure and self.core.machine.step(self.policy, before, event, world.now) != (after, commands):
            world.checks.broken("purity", f"{event} gives two results")
        self.state = after
        kind = type(event).__name__
        if kind != "Tick" or commands or after.phase is not before.phase:
            world.trace(f"{before.phase.name} {event} -> {after.phase.name}")
        world.checks.step(before, event, after, commands)
        for command in commands:
            world.trace(f"    {command}")
            self._do(command)
        self._arm()

    # --- the timer ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline_ms = self.core.machine.next_deadline(self.policy, self.state)
        if deadline_ms is None or self.world.over:
            return
        if self.armed_ms is None or deadline_ms < self.armed_ms:
            self.armed_ms = deadline_ms
            self.world.at(max(0, deadline_ms - self.world.now), self._fire, deadline_ms)

    def _fire(self, armed_ms: int) -> None:
        if armed_ms != self.armed_ms or self.world.over:
            return
        self.armed_ms = None
        deadline_ms = self.core.machine.next_deadline(self.policy, self.state)
        if deadline_ms is not None and deadline_ms <= self.world.now:
            before = self.state
            self.feed(self.core.events.Tick())
            self.world.checks.ticked(before, self.state, deadline_ms)
        self._arm()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def hear(self, frame: bytes) -> None:
        """A frame of a rank."""
        word = wire.decode_from_rank(frame)
        if isinstance(word, wire.Hello):
            self.world.checks.hello.add(word.who.pid)
        self.feed(word)

    def signal(self, name: str) -> None:
        """A signal to the supervisor."""
        meaning = self.core.events.Meaning[MEANINGS[name]]
        self.world.checks.signalled(name)
        self.feed(self.core.events.SignalCame(name, meaning))

    def looked(self, view: Any, why: str, seen_ms: int) -> None:
        """A look is over."""
        if isinstance(view, self.core.views.JobView):
            self.view, self.view_seen_ms = view, seen_ms
        self.feed(self.core.events.Looked(view, why))

    def rank_gone(self, pid: int, how: str) -> None:
        """A pidfd is ready."""
        if pid in self.world.checks.hello:
            self.feed(self.core.events.RankGone(pid, how))

    def command_exited(self, arguments: tuple[Command, int]) -> None:
        """The command's pidfd is ready."""
        command, code = arguments
        if command is self.world.command:
            self.feed(self.core.events.CommandExited(code))

    def verified(self, command: Any, problem: str) -> None:
        """A verification is over."""
        if not problem:
            self.world.checks.verified.add(command.round)
        self.feed(self.core.events.Verified(command.round, "full" if command.full else "structure", problem, 0))

    def committed(self, command: Any, result: str, reason: str) -> None:
        """A commit is over."""
        events = self.core.events
        if result in ("COMMITTED", "ALREADY_THERE"):
            self.world.checks.told_committed(command)
        self.feed(events.Committed(command.round, command.step, events.CommitResult[result], reason))

    def requeue_returned(self, result: str) -> None:
        """scontrol requeue has returned."""
        self.world.checks.requeue_returned(result)
        self.feed(self.core.events.RequeueReturned(self.core.events.RequeueResult[result], "said so"))

    def kill(self, _: None) -> None:
        """SIGKILL of the step."""
        if not self.world.over:
            self.world.trace("SIGKILL")
            self.world.checks.killed()
            self.world.over = True

    def resume_step(self) -> int:
        """Step that a command started now resumes from."""
        return self.state.resume_step if self.state is not None else self.world.options.resume_step

    # --- what goes out --------------------------------------------------------------------------------------------------

    def _do(self, command: Any) -> None:
        world = self.world
        match type(command).__name__:
            case "Say":
                world.net.to_rank(world.processes[command.pid], command.word)
            case "LookUp":
                world.slurm.look(command.why)
            case "Verify":
                world.disk.verify(command)
            case "Commit":
                world.disk.commit(command)
            case "DropPartial":
                world.disk.drop(command.partial)
            case "Prune":
                pass  # See Checks.step.
            case "StartCommand":
                world.at(world.rng.randrange(50), self._start, command.restart)
            case "EndCommand":
                world.command.kill()
            case "Meet":
                world.at(world.rng.randrange(1, 30), self._met)
            case "CallRequeue":
                world.slurm.requeue()
            case "Exit":
                world.checks.exited(command.code, command.line)
                world.over = True
            case name:
                world.checks.broken("command", f"unknown command {name}")

    def _start(self, restart: int) -> None:
        if not self.world.over:
            self.world.command = Command(self.world, restart, self.resume_step())

    def _met(self) -> None:
        self.feed(self.core.events.Met(self.world.now >= self.others_until_ms, "step 1 saves"))
