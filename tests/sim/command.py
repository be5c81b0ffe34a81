"""The simulated command of one task: `python`, or a torchrun that starts its workers again, with the ranks below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.trainer import Gate, Process

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.world import World

ELASTIC_RESTARTS = 1
RESTARTS_APART = 10_000


class Command:
    """All processes that one task's supervisor started."""

    def __init__(self, world: World, shell: Shell, restart: int, resume_step: int) -> None:
        self.world = world
        self.shell = shell
        self.options = world.options
        self.restart = restart
        self.began_ms = world.now
        self.resume_step = resume_step
        self.elastic = 0
        self.code: int | None = None
        self.asked_ms: int | None = None
        """When it was sent SIGTERM."""
        self.killed = False
        self.processes: list[Process] = []
        self._start()

    def _start(self) -> None:
        generation = self.restart * RESTARTS_APART + self.elastic
        ranks = self.world.ranks_of(self.shell.task)
        self.processes = [Process(self.world, self, rank, generation, self._hooked(rank)) for rank in ranks]

    def _hooked(self, rank: int) -> bool:
        if self.options.has("alone"):
            return rank == 0
        return not (self.options.has("missing_rank") and rank == self.options.ranks - 1)

    def late_ms(self, rank: int) -> int:
        """How much later than the others this rank attaches."""
        if self.options.has("late_rank") and rank == self.options.ranks - 1:
            return self.world.rng.choice((500, 3_000, 12_000))
        return 0

    def gate(self, key: Any) -> Gate:
        """The collective of this name: of all ranks of this generation, whatever task they are of."""
        return self.world.gates[self.processes[0].who.generation, key]

    # --- ends -------------------------------------------------------------------------------------------------------

    def ended(self, process: Process, code: int) -> None:
        """A process has ended by itself."""
        self._bury(process, code)
        if code:
            self._failed(code)
        elif not any(other.alive for other in self.processes):
            self._exit(0)

    def crash(self, process: Process, code: int) -> None:
        """A process is killed."""
        if process.alive and self.code is None:
            if self.options.has("masked") and self.options.seed % 4:
                process.raises()
            self._bury(process, code)
            self._failed(code)

    def fail(self, code: int) -> None:
        """The command ends, whatever its processes do."""
        if self.code is None:
            for process in self.processes:
                if code == 0 and self.options.seed % 3 == 0:
                    process.raises()
                if process.alive:
                    self._bury(process, code)
            self._exit(code)

    def kill(self) -> None:
        """EndCommand: SIGKILL of everything."""
        self.killed = True
        if self.options.has("unkillable"):
            self.world.at(30_000, self.fail, 137)
        else:
            self.world.at(self.world.rng.choice((1, 20, 60)), self.fail, 137)

    def ask(self) -> None:
        """AskCommand: SIGTERM to everything."""
        self.asked_ms = self.world.now
        if self.options.has("ignores_term"):
            return
        for process in self.processes:
            delay_ms = self.world.rng.choice((1, 20, 200)) + (
                self.world.rng.randrange(6_000) if self.options.has("slow_term") else 0
            )
            self.world.at(delay_ms, self._takes_term, process)

    def _takes_term(self, process: Process) -> None:
        if process.stopped and process.alive:
            process.hold(self._takes_term, process)
        elif process.alive and self.code is None:
            self._bury(process, 143)
        if self.code is None and not any(other.alive for other in self.processes):
            self._exit(143)

    @property
    def pid(self) -> int:
        """Its process where that is known to be a rank itself: no shell and no launcher between."""
        between = len(self.processes) > 1 or self.options.seed % 2 or self.options.has("masked") or self.options.has("elastic")
        return 0 if between else self.processes[0].who.pid

    def orphaned(self) -> None:
        """Its supervisor has died, and the kernel kills it with it."""
        self.code = 137 if self.code is None else self.code
        self.world.ended_ms = self.world.now
        for process in self.processes:
            process.alive = False

    def _bury(self, process: Process, code: int) -> None:
        process.alive = False
        self.world.at(self.world.rng.randrange(4), self.shell.rank_gone, process, f"exit {code}")

    def _failed(self, code: int) -> None:
        """torchrun ends the others when one fails, and may start them all again; a shell would end at once."""
        if self.code is not None:
            return
        delay_ms = self.world.rng.choice((0, 300, 3_000)) if self.options.ranks > 1 else 0
        self.world.at(delay_ms, self._after_failure, (code, self.elastic))

    def _after_failure(self, arguments: tuple[int, int]) -> None:
        code, elastic = arguments
        if self.code is not None or elastic != self.elastic:
            return
        for process in self.processes:
            if process.alive:
                self._bury(process, 143)
        leaving = any(process.left_n is not None for process in self.processes) or self.asked_ms is not None
        if self.options.has("elastic") and self.elastic < ELASTIC_RESTARTS and not leaving:
            self._start_again(None)
            for command in self.world.commands:
                if command is not self:  # The launchers of all nodes start their workers again together.
                    self.world.at(self.world.rng.randrange(500), command._start_again, None)
        else:
            self._exit(0 if self.options.has("masked") else code)

    def _start_again(self, _: None) -> None:
        if self.code is not None or self.elastic >= ELASTIC_RESTARTS:
            return
        for process in self.processes:
            if process.alive:
                self._bury(process, 143)
        self.elastic += 1
        self.resume_step = self.world.supervisor.resume_step()
        self._start()

    def _exit(self, code: int) -> None:
        self.code = code
        self.world.ended_ms = self.world.now
        self.world.at(self.world.rng.randrange(5), self.shell.command_exited, (self, code))
