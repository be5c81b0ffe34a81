"""The simulated shell of a supervisor that runs the machine: task 0's, and that of an heir.

Feeds the real machine, carries its commands out, arms its one timer. Owns what a process is to the simulator: it can be stopped
and killed, and what comes in meanwhile waits or is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_client import wire

from tests.sim import outside
from tests.sim.checks import Checks
from tests.sim.command import Command
from tests.sim.options import LOCAL

if TYPE_CHECKING:
    from tests.sim.trainer import Process
    from tests.sim.world import World

MEANINGS = {"SIGTERM": "LEAVE", "SIGUSR1": "NOTICE", "SIGUSR2": "SAVE", "SIGINT": "INTERRUPT"}
BYE_MS = 3_000
SAY_EXIT_MS = 200


def policy(world: World) -> Any:
    """The options of this run's supervisors."""
    options = world.options
    local = options.story in LOCAL
    plain = world.code.core.policy.Policy(
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
        tasks=options.tasks,
        resume_step=options.resume_step,
        resume_from=f"/d/{options.resume_step}" if options.resume_step >= 0 else "",
    )
    return outside.policy(options, plain)


class Shell:
    """One supervisor as a process."""

    def __init__(self, world: World, task: int) -> None:
        self.world = world
        self.core = world.code.core
        self.task = task
        self.policy = policy(world)
        self.command: Command | None = None
        self.over = False
        self.dead_ms: int | None = None
        """When it was killed, alone."""
        self.stopped = False
        self.woke_ms = 0
        self._held: list[tuple[Callable[..., Any], Any]] = []

    def held(self, call: Callable[..., Any], argument: Any) -> bool:
        """Whether this waits, or is lost, because the process is stopped or over."""
        if self.over or self.world.over:
            return True
        if self.stopped:
            self._held.append((call, argument))
        return self.stopped

    def freeze(self, stopped: bool) -> None:
        """SIGSTOP or SIGCONT."""
        if self.over:
            return
        self.stopped = stopped
        self.woke_ms = self.world.now
        if not stopped:
            held, self._held = self._held, []
            if self.world.rng.random() < 0.5:
                held.sort(key=lambda item: item[0].__name__ != "_fire")  # Its deadline has passed as well.
            for call, argument in held:
                self.world.at(0, call, argument)

    def die(self) -> None:
        """SIGKILL of this supervisor alone: what runs below it dies with it, and nobody says a word."""
        self.dead_ms = self.world.now
        if self.command is not None:
            self.command.orphaned()
        self.leave()
        self.world.checks.step_checks.died(self)
        self.world.links.closed(self.task)

    def leave(self) -> None:
        """It is over."""
        self.over = True
        self.world.left()


class Machine:
    """The machine, its state, its timer and its commands, in some task's process."""

    def __init__(self, world: World, shell: Shell, its_policy: Any) -> None:
        self.world = world
        self.shell = shell
        self.task = shell.task
        self.core = world.code.core
        self.policy = its_policy
        self.state: Any = None
        self.armed_ms: int | None = None
        self.view: dict[str, Any] | None = None
        self.view_seen_ms = -1
        self.dropped = False
        self.checks: Checks = None  # type: ignore[assignment]  # Set by whoever owns it.
        self.said: dict[int, tuple[Any, dict[int, list[int]]]] = {}

    @property
    def gone(self) -> bool:
        """Nothing reaches it any more."""
        return self.dropped or self.shell.over or self.world.over

    def feed(self, event: Any) -> None:
        """One event."""
        world = self.world
        if self.gone:
            return
        before = self.state
        after, commands = self.core.machine.step(self.policy, before, event, world.now)
        if world.options.pure and self.core.machine.step(self.policy, before, event, world.now) != (after, commands):
            self.checks.broken("purity", f"{event} gives two results")
        self.took(before, event, after, commands)
        self._arm()

    def hear_words(self, words: tuple[Any, ...]) -> None:
        """Many words of ranks that have come together, and then what is due."""
        for word in words:
            if self.gone:
                return
            if isinstance(word, wire.Hello):
                self.world.checks.hello.add((word.who.task, word.who.pid))
            before = self.state
            after, commands = self.core.machine.hear(self.policy, before, word, self.world.now)
            self.took(before, word, after, commands)
        self.feed(self.core.events.Tick())

    def took(self, before: Any, event: Any, after: Any, commands: tuple[Any, ...]) -> None:
        """Judge one step and carry its commands out."""
        self.state = after
        if self.world.is_traced:
            kind = type(event).__name__
            if kind != "Tick" or commands or after.phase is not before.phase:
                self.world.trace(f"[{self.task}] {before.phase.name} {event} -> {after.phase.name}")
        self.checks.step(before, event, after, commands)
        for command in commands:
            if self.world.is_traced:
                self.world.trace(f"    {command}")
            self.do(command)
        self._flush()

    # --- the timer ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline_ms = self.core.machine.next_deadline(self.policy, self.state)
        if deadline_ms is None or self.gone:
            return
        if self.armed_ms is None or deadline_ms < self.armed_ms:
            self.armed_ms = deadline_ms
            self.world.at(max(0, deadline_ms - self.world.now), self._fire, deadline_ms)

    def _fire(self, armed_ms: int) -> None:
        if armed_ms != self.armed_ms or self.dropped or self.shell.held(self._fire, armed_ms):
            return
        self.armed_ms = None
        deadline_ms = self.core.machine.next_deadline(self.policy, self.state)
        if deadline_ms is not None and deadline_ms <= self.world.now:
            before = self.state
            self.feed(self.core.events.Tick())
            self.checks.ticked(before, self.state, deadline_ms)
        self._arm()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def looked(self, view: Any, why: str, seen_ms: int) -> None:
        """A look is over."""
        self._looked((view, why, seen_ms))

    def _looked(self, arguments: tuple[Any, str, int]) -> None:
        if self.dropped or self.shell.held(self._looked, arguments):
            return
        view, why, seen_ms = arguments
        if isinstance(view, self.core.views.JobView):
            self.view, self.view_seen_ms = view, seen_ms
        self.feed(self.core.events.Looked(view, why))

    def requeue_returned(self, result: str) -> None:
        """scontrol requeue has returned."""
        if self.dropped or self.shell.held(self.requeue_returned, result):
            return
        self.checks.requeue_returned(result)
        self.feed(self.core.events.RequeueReturned(self.core.events.RequeueResult[result], "said so"))

    def resume_step(self) -> int:
        """Step that a command started now resumes from."""
        step: int = self.state.resume_step if self.state is not None else self.world.options.resume_step
        return step

    # --- what goes out --------------------------------------------------------------------------------------------------

    def do(self, command: Any) -> None:
        """Carry one command out."""
        world = self.world
        match type(command).__name__:
            case "Say" if command.task != self.task:
                self.say_far(command)
            case "Say":
                world.net.to_rank(world.processes[command.task, command.pid], command.word)
            case "LookUp":
                self.checks.asked()
                if command.after_ms:
                    world.at(command.after_ms, self._look, command.why)
                else:
                    world.slurm.look(command.why, self)
            case "AskCommand":
                if self.shell.command is not None:
                    self.shell.command.ask()
            case "EndCommand":
                if self.shell.command is not None:
                    self.shell.command.kill()
            case "CallRequeue":
                world.slurm.requeue(self)
            case "Exit":
                self.checks.exited(command.code, command.line)
                self.exit(command.code)
            case _:
                self.do_more(command)

    def _look(self, why: str) -> None:
        if not self.gone:
            self.world.slurm.look(why, self)

    def say_far(self, command: Any) -> None:
        """A word to a rank of another task."""
        self.checks.broken("say", f"a word to a rank of task {command.task}")

    def do_more(self, command: Any) -> None:
        """Carry out what only the coordinator can be asked for."""
        self.checks.broken("command", f"{command} is asked for by task {self.task}")

    def exit(self, code: int) -> None:
        """The last command."""
        raise NotImplementedError

    def _flush(self) -> None:
        pass


class Supervisor(Shell, Machine):
    """Task 0's supervisor: the coordinator."""

    def __init__(self, world: World) -> None:
        Shell.__init__(self, world, 0)
        Machine.__init__(self, world, self, self.policy)
        self.checks = world.checks
        self.byes: set[int] = set()
        self.stay_until_ms: int | None = None
        self.stalled = False
        """A hang was found."""
        self.found: dict[int, list[Any]] = {}
        """What was found of each round's files, for its manifest."""
        self.others_until_ms = 0
        if world.options.has("others"):
            self.others_until_ms = world.options.story_ms + world.rng.choice((500, 4_000, 30_000))

    def begin(self) -> None:
        """The first state and its commands."""
        self.state, commands = self.core.machine.start(self.policy, self.world.now)
        for command in commands:
            self.do(command)
        self._arm()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def hear(self, frame: bytes) -> None:
        """A frame of a rank of its own."""
        if self.held(self.hear, frame):
            return
        word = wire.decode_from_rank(frame)
        if isinstance(word, wire.Hello):
            self.world.checks.hello.add((0, word.who.pid))
        self.feed(word)

    def hear_task(self, frame: bytes) -> None:
        """A frame of another task's supervisor."""
        if self.held(self.hear_task, frame):
            return
        word = self.core.between.decode_up(frame)
        match type(word).__name__:
            case "Report":
                if word.bye:
                    self.byes.add(word.task)
                    self.world.checks.step_checks.said_bye(word.task)
                for event in self.core.tasks.unfold(self.policy, self.state, word):
                    self.checks.told(event)
                    self.feed(event)
            case "Heard":
                self.hear_words(word.words)
            case _:
                self.world.checks.step_checks.shared(self, word)
                self.found.setdefault(word.round, []).extend(word.files)
                self.feed(
                    self.core.events.Verified(word.round, word.verified, word.problem, word.bytes_read, word.task, word.files)
                )

    def task_cut(self, task: int) -> None:
        """A task's connection was closed."""
        if not self.held(self.task_cut, task):
            self.feed(self.core.events.TaskCut(task))

    def signal(self, name: str) -> None:
        """A signal to the supervisor."""
        if self.held(self.signal, name):
            return
        self.world.checks.reached(name)
        event = self.core.events.SignalCame(name, self.core.events.Meaning[MEANINGS[name]])
        _, is_fresh = self.core.tasks.is_fresh(self.policy, self.state, event, self.world.now)
        self.checks.signalled(name, is_fresh)
        self.feed(event)

    def outside(self, event: Any) -> None:
        """What outside.py has drawn."""
        if not self.held(self.outside, event):
            self.stalled |= isinstance(event, self.core.events.Stalled)
            self.feed(event)

    def rank_gone(self, process: Process, how: str = "") -> None:
        """A pidfd is ready."""
        if (0, process.who.pid) in self.world.checks.hello and not self.held(self.rank_gone, process):
            self.feed(self.core.events.RankGone(process.who, how or "its process has ended"))

    def command_exited(self, arguments: tuple[Command, int]) -> None:
        """The command's pidfd is ready."""
        command, code = arguments
        if command is self.command and not self.held(self.command_exited, arguments):
            self.feed(self.core.events.CommandExited(code, pid=command.pid))

    def verified(self, command: Any, problem: str, files: tuple[Any, ...]) -> None:
        """A verification is over."""
        self._verified((command, problem, files))

    def _verified(self, arguments: tuple[Any, str, tuple[Any, ...]]) -> None:
        if self.held(self._verified, arguments):
            return
        command, problem, files = arguments
        self.found.setdefault(command.round, []).extend(files)
        self.feed(self.core.events.Verified(command.round, "full" if command.full else "structure", problem, 0))

    def committed(self, command: Any, result: str, reason: str) -> None:
        """A commit is over."""
        self._committed((command, result, reason))

    def _committed(self, arguments: tuple[Any, str, str]) -> None:
        if self.held(self._committed, arguments):
            return
        command, result, reason = arguments
        events = self.core.events
        if result in ("COMMITTED", "ALREADY_THERE"):
            self.checks.told_committed(command)
        self.feed(events.Committed(command.round, command.step, events.CommitResult[result], reason))

    def kill(self, _: None) -> None:
        """SIGKILL of the step."""
        if not self.over and not self.world.over:
            self.world.trace("SIGKILL")
            if self.stay_until_ms is None:
                self.checks.killed()
            self.leave()

    # --- what goes out --------------------------------------------------------------------------------------------------

    def say_far(self, command: Any) -> None:
        """A word to a rank of another task, gathered by word and task."""
        _, tasks = self.said.setdefault(id(command.word), (command.word, {}))
        tasks.setdefault(command.task, []).append(command.pid)

    def _flush(self) -> None:
        if self.said:
            said, self.said = self.said, {}
            for word, tasks in said.values():
                for task, pids in tasks.items():
                    self._send(task, self.core.between.Tell(tuple(pids), word))

    def _send(self, task: int, word: Any) -> None:
        self.world.links.down(task, self.core.between.encode(word))

    def do_more(self, command: Any) -> None:
        """Carry out what only the coordinator can be asked for."""
        world = self.world
        match type(command).__name__:
            case "Announce":
                tasks = command.tasks if command.tasks is not None else [task.number for task in self.state.tasks]
                for task in tasks:
                    self._send(task, command.stand)
            case "TurnAway":
                self._send(command.task, self.core.between.Turned(command.reason))
            case "Verify":
                world.disk.verify(command, self)
                self._check(command)
            case "CheckAgain":
                self._check(command)
            case "Commit":
                self.checks.disk.commits(command, self.found.get(command.round, []))
                world.disk.commit(command)
            case "DropPartial":
                world.disk.drop(command.partial)
            case "Prune":
                pass  # See Checks.step.
            case "StartCommand":
                self.world.checks.step_checks.starts_again(command.restart)
                if self.command is not None and self.command.code is None:
                    self.command.kill()  # Another task's has failed.
                world.at(world.rng.randrange(50), self._start, command.restart)
            case "Meet":
                world.at(world.rng.randrange(1, 30), self._met, None)
            case name:
                self.checks.broken("command", f"unknown command {name}")

    def _check(self, command: Any) -> None:
        for share in command.shares:
            self._send(share.task, self.core.between.Check(command.round, command.partial, share.pids, command.full))

    def _start(self, restart: int) -> None:
        if self.held(self._start, restart):
            return
        if self.policy.tasks == 1:
            self.command = Command(self.world, self, restart, self.resume_step())
            return
        step = self.state.committed_step if self.state.committed_here else self.policy.resume_step
        path = f"/d/{step}" if step >= 0 else ""
        self.policy = dataclasses.replace(self.policy, resume_step=step, resume_from=path)
        self.state = self.core.machine.resumed(self.state, path, step)
        self.command = Command(self.world, self, restart, step)
        self.feed(self.core.events.Tick())

    def _met(self, _: None) -> None:
        if not self.held(self._met, None):
            self.feed(self.core.events.Met(self.world.now >= self.others_until_ms, "step 1 saves"))

    # --- the exit -------------------------------------------------------------------------------------------------------

    def exit(self, _code: int) -> None:
        """Leave, with all others that are there."""
        if self.policy.tasks == 1:
            self.leave()
            return
        if self.command is not None and self.command.code is None:
            self.command.kill()
        self.stay_until_ms = self.world.now + BYE_MS
        self.see_off(None)

    def see_off(self, _: None) -> None:
        """Say the exit status again until everybody has said goodbye."""
        if self.held(self.see_off, None):
            return
        assert self.stay_until_ms is not None
        waiting = [task.number for task in self.state.tasks if not task.gone and task.number not in self.byes]
        if not waiting or self.world.now >= self.stay_until_ms:
            self.world.checks.step_checks.coordinator_left()
            self.leave()
            return
        stand = self.core.tasks.stand(self.policy, self.state, self.world.now)
        for task in waiting:
            self._send(task, stand)
        self.world.at(SAY_EXIT_MS, self.see_off, None)
