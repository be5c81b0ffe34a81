"""The simulated world: one heap of (time, order, action), one source of randomness, whole milliseconds.

Owns the clock, the network and the order of things. `run(seed)` draws a run and plays it to its end; it raises Violation with the
seed and the options when a rule was broken.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_client import wire

from tests.sim.checks import Checks
from tests.sim.code import Code
from tests.sim.command import Command
from tests.sim.disk import Disk
from tests.sim.links import Links
from tests.sim.options import TASK_FAULTS, Options, draw, spread
from tests.sim.relay_shell import RelayShell
from tests.sim.shell import Supervisor
from tests.sim.slurm import Slurm
from tests.sim.story import Story
from tests.sim.trainer import Gate, Process, racy
from tests.sim.violation import Violation

EVENTS_MAX = 200_000
LIMIT_MS = 130_000
"""A run is over this long after its story began."""

FIRST_PID = 1_000
LATE_MS = 200

AFTER_SPREAD = ("step_ms", "collective", "link_loss_percent")
"""What a test fixes although the spread over tasks draws it."""


class Network:
    """Frames between ranks and supervisor: lost, repeated, late and out of order, when those faults are on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.last_ms: dict[tuple[int, int, bool], int] = {}
        self.cut: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def to_supervisor(self, process: Process, word: wire.FromRank) -> None:
        """A word of a rank."""
        self._send(process, True, process.command.shell.hear, word)

    def to_rank(self, process: Process, word: wire.ToRank) -> None:
        """A word of the supervisor."""
        self._send(process, False, process.hear, word)

    def _send(self, process: Process, up: bool, call: Callable[[bytes], None], word: wire.FromRank | wire.ToRank) -> None:
        world, frame = self.world, wire.encode(word)
        options, rng, now = world.options, world.rng, world.now
        delay_ms = rng.randrange(2)
        is_last = isinstance(word, wire.Failed) and word.round == wire.NO_ROUND
        times = 1
        if options.mode != "calm" and now < options.heals_ms:
            if options.loss_percent and rng.randrange(100) < options.loss_percent or self.is_cut(process, up):
                world.last_word_lost |= is_last
                return
            if options.has("repeat") and rng.random() < 0.2:
                times = 2
            if options.has("delay") and rng.random() < 0.2:
                delay_ms += rng.choice((5, 60, 1_500))
        at_ms = now + delay_ms
        world.last_word_lost |= delay_ms > LATE_MS and is_last
        if not options.has("reorder"):
            at_ms = max(at_ms, self.last_ms.get((process.task, process.who.pid, up), 0))
            self.last_ms[process.task, process.who.pid, up] = at_ms
        for _ in range(times):
            world.at(at_ms - now, call, frame)
            at_ms += rng.choice((1, 40, 1_200)) if options.has("reorder") else 0

    def is_cut(self, process: Process, up: bool = True) -> bool:
        """One-way or full partition of one rank for a while."""
        options, rng, now = self.world.options, self.world.rng, self.world.now
        if not options.has("partition"):
            return False
        name = (process.task, process.who.pid)
        if name not in self.cut:
            begin_ms = rng.randrange(options.story_ms + 2_000)
            if options.mode == "lossy":
                begin_ms = max(begin_ms, options.start_ms + 1_500)  # All attach.
            end_ms = begin_ms + rng.choice((500, 4_000, 14_000, 40_000)) if rng.random() < 0.6 else begin_ms
            self.cut[name] = (begin_ms, end_ms, rng.random() < 0.5)
        begin_ms, end_ms, both = self.cut[name]
        return begin_ms <= now < end_ms and (both or up)


class World:
    """One run."""

    def __init__(self, options: Options, rng: random.Random, code: Code, trace: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.rng = rng
        self.code = code
        self.now = 0
        self.over = False
        self.ended_ms = 0
        """When the newest end of a command was."""
        self.rank_type = racy(code.protocol)
        self._heap: list[tuple[int, int, Callable[[Any], None], tuple[Any, ...]]] = []
        self._order = 0
        self._pids: dict[int, int] = defaultdict(lambda: FIRST_PID)
        self._trace = trace
        self.is_traced = trace is not None
        self.processes: dict[tuple[int, int], Process] = {}
        """By task and process number: those of two nodes may be equal."""
        self.gates: dict[tuple[int, Any], Gate] = defaultdict(Gate)
        self.checks = Checks(self)
        self.last_word_lost = False
        """A rank's word that its training is over was lost, or comes late."""
        self.net = Network(self)
        self.disk = Disk(self, options.resume_step)
        self.slurm = Slurm(self)
        self.supervisor = Supervisor(self)
        self.supervisor.command = Command(self, self.supervisor, 0, options.resume_step)
        self.shells: list[Supervisor | RelayShell] = [self.supervisor]
        self.shells += [RelayShell(self, task) for task in range(1, options.tasks)]
        self.links = Links(self)
        self.story = Story(self)
        self.supervisor.begin()

    def at(self, delay_ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Do this after a delay; what is due at the same moment happens in the order it was asked for."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_ms, self._order, call, arguments))

    def trace(self, text: str) -> None:
        """One line of the trace, when it is wanted."""
        if self._trace is not None:
            self._trace(f"{self.now:>7} {text}")

    def new_pid(self, process: Process) -> int:
        """A process number that was never used."""
        self._pids[process.task] += 1
        pid = self._pids[process.task]
        self.processes[process.task, pid] = process
        return pid

    def process(self, who: wire.Who) -> Process:
        """The process of this identity."""
        return self.processes[who.task, who.pid]

    @property
    def commands(self) -> list[Command]:
        """The tasks' commands, as far as they have been started."""
        return [shell.command for shell in self.shells if shell.command is not None]

    def ranks(self) -> list[Process]:
        """The processes of all commands."""
        return [process for command in self.commands for process in command.processes]

    def ranks_of(self, task: int) -> range:
        """The ranks below this task: in blocks, as launchers number them."""
        ranks, tasks = self.options.ranks, self.options.tasks
        return range(ranks * task // tasks, ranks * (task + 1) // tasks)

    def one_of(self, things: list[Any]) -> Any:
        """One of these; nothing is drawn where there is no choice."""
        return things[0] if len(things) == 1 else self.rng.choice(things)

    def left(self) -> None:
        """A supervisor is over."""
        self.over = all(shell.over for shell in self.shells)

    def run(self) -> None:
        """Play everything to the end."""
        heap, limit_ms = self._heap, self.options.story_ms + LIMIT_MS
        for _ in range(EVENTS_MAX * self.options.tasks):
            if self.over or not heap:
                break
            at_ms, _order, call, arguments = heapq.heappop(heap)
            if at_ms > limit_ms:
                break
            self.now = at_ms
            call(*arguments)
        else:
            raise Violation("run away", f"{EVENTS_MAX} events and no end")
        self.checks.final()


def run(
    seed: int,
    code: Code,
    trace: Callable[[str], None] | None = None,
    ranks_max: int = 16,
    where: Mapping[str, Any] | None = None,
) -> World:
    """Draw and play one run. Raises Violation when a rule is broken. `where` fixes some of what is drawn, and adds faults."""
    rng = random.Random(seed)
    fixed = dict(where or {})
    options = draw(seed, rng, ranks_max, fixed.pop("mode", ""), fixed.pop("story", ""), fixed.pop("faults", frozenset()))
    wanted = frozenset(name for name in options.faults if name in TASK_FAULTS)
    options = dataclasses.replace(options, **{name: value for name, value in fixed.items() if name not in ("tasks", "ranks")})
    options = spread(options, ranks_max, wanted, fixed.get("tasks"), fixed.get("ranks"))
    options = dataclasses.replace(options, **{name: value for name, value in fixed.items() if name in AFTER_SPREAD})
    if trace is not None:
        trace(options.text())
    try:
        world = World(options, rng, code, trace)
        world.run()
    except Violation as violation:
        raise Violation(violation.rule, f"{violation.text}\n  make sim SEED={seed}\n  {options.text()}") from violation
    except AssertionError as error:
        raise Violation("assertion", f"{error!r} in the code\n  make sim SEED={seed}\n  {options.text()}") from error
    return world
