"""One simulated training process: its training thread, its listener, and the real client protocol between them.

The training thread is a generator that yields how long it is busy, or what it waits for. The hook's fast path (store `entered`,
then test `hold > done`) is played here with a gap in between, into which the listener's two halves (set hold, read entered) may
fall: that pair of orders is what the whole agreement stands on (docs/protocol.md, rules 1 and 2).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_client import wire
from ckpt_client.wire import Position, Who

if TYPE_CHECKING:
    from tests.sim.command import Command
    from tests.sim.world import World

PARK = "park"
FOREVER = "forever"
TICK_MS = 500
HELLO_MS = 1_000
WELCOME_TRIES = 5
COLLECTIVE_SAVE_MS = 5_000
"""Time-out of a collective save: below any round's deadline that matters here."""


class Gate:
    """A collective: nobody goes on before all are here."""

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.waiting: list[tuple[Process, int]] = []


def racy(protocol: types.ModuleType) -> type:
    """The client's Rank, with the training thread let loose between the listener's two halves."""

    class Racy(protocol.Rank):  # type: ignore[name-defined, misc]
        """Rank whose reading of `entered` is a point where the other thread may run."""

        process: Process

        def position(self) -> Position:
            value: Position = super().position()
            self.process.race()
            return value

    return Racy


class Process:
    """A training process below the supervisor."""

    def __init__(self, world: World, command: Command, rank: int, generation: int, hooked: bool) -> None:
        self.world = world
        self.options = world.options
        self.command = command
        self.rank = rank
        self.hooked = hooked
        self.who = Who(rank, generation, world.new_pid())
        self.protocol: Any = world.rank_type(self.who, 0)
        self.protocol.process = self
        self.n = 0
        self.alive = True
        self.stopped = False
        self.hung = False
        self.saving = False
        self.silenced = False
        self.parked_ms: int | None = None
        self.left_n: int | None = None
        self._held: list[tuple[Any, ...]] = []
        self._token = 0
        self._ticking = False
        self._listening = False
        self._fast = False
        self._thread = self._life()
        world.at(0, self.go, 0)

    # --- threads ------------------------------------------------------------------------------------------------------

    def go(self, token: int) -> None:
        """Let the training thread run until it is busy or waits."""
        if not self.alive or token != self._token:
            return
        if self.stopped:
            self._held.append((self.go, token))
            return
        self._token += 1
        token = self._token
        what = next(self._thread, None)
        if isinstance(what, int):
            self.world.at(what, self.go, token)
        elif what == PARK:
            self._tick_soon()
            self.world.at(1_000, self.go, token)
        elif isinstance(what, Gate):
            what.waiting.append((self, token))
        elif isinstance(what, tuple):
            gate, limit_ms = what
            gate.waiting.append((self, token))
            self.world.at(limit_ms, self.go, token)
        elif what is None:
            self.command.ended(self, self.code)

    def hear(self, frame: bytes) -> None:
        """The listener thread: one frame from the supervisor."""
        if not self.alive:
            return
        if self.stopped:
            self._held.append((self.hear, frame))
            return
        word = wire.decode_to_rank(frame)
        self.world.trace(f"r{self.rank} hears {word}")
        self._listening = True
        self.protocol.hear(word, self.world.now)
        self._listening = False
        self._flush()
        if self.parked_ms is not None:
            self.world.at(self.world.rng.randrange(2), self.go, self._token)

    def race(self) -> None:
        """The listener stands between its two halves; the lock-free half of the training thread may run meanwhile."""
        while self._listening and self._fast and self.alive and not self.stopped and self.world.rng.random() < 0.6:
            self.go(self._token)

    def stop(self, stopped: bool) -> None:
        """SIGSTOP or SIGCONT."""
        self.stopped = stopped
        if not stopped:
            held, self._held = self._held, []
            for call, argument in held:
                self.world.at(0, call, argument)

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.world.at(TICK_MS, self._tick, None)

    def _tick(self, _: None) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append((self._tick, None))
            return
        self.protocol.tick(self.world.now)
        self._flush()
        self._ticking = False
        if self.parked_ms is not None or self.saving:
            self._tick_soon()

    def _flush(self) -> None:
        for word in self.protocol.take_outbox():
            self.world.net.to_supervisor(self, word)

    # --- the training thread -------------------------------------------------------------------------------------------

    def _life(self) -> Iterator[Any]:
        options, rng = self.options, self.world.rng
        self.code = 0
        yield options.start_ms + rng.randrange(20) + self.command.late_ms(self.rank)
        start = self.command.resume_step
        if self.hooked:
            yield from self._attach()
            if isinstance(self.protocol.welcome, wire.Welcome):
                start = self.protocol.welcome.resume_step
        self.n = max(0, start)
        if self.hooked and not isinstance(self.protocol.entered, Position):
            self.protocol.entered = self.n - 1  # From attach to the first boundary: the start itself.
        stop = self.n + options.steps
        if options.has("ends_early") and self.rank == options.ranks - 1:
            stop = self.n + max(1, options.steps // 2) if options.steps < 1_000 else self.n + 10
        left = False
        while self.n < stop and not left:
            yield self._step_ms()
            if self.hung:
                yield FOREVER
            if options.collective:
                yield from self._meet(("step", self.n))
            self.n += 1
            self.world.checks.stepped(self)
            k = 0
            if options.phase_every and self.n % options.phase_every == 0:
                k, left = yield from self._phase(last=self.n == stop)
            if not left:
                entered = None if self.n == stop and "last_raises" not in self.world.code.hook_faults else self.n
                left = yield from self._boundary(Position(self.n, k), entered)
        if self.hooked and not left:
            self.protocol.finish()
            self._flush()
        if left:
            yield rng.choice((0, 5, 50)) + (rng.randrange(6_000) if options.has("slow_exit") else 0)
            self.code = 1 if options.has("exit_code") else 0
        else:
            yield rng.choice((0, 20, 300))

    def _attach(self) -> Iterator[Any]:
        for _ in range(WELCOME_TRIES):
            hello = wire.Hello(self.who, wire.VERSION, self.options.ranks, self.rank, self.options.sharded)
            self.world.net.to_supervisor(self, hello)
            for _ in range(20):
                if self.protocol.welcome is not None:
                    return
                yield HELLO_MS // 20

    def _step_ms(self) -> int:
        options, rng = self.options, self.world.rng
        step_ms = max(1, options.step_ms + rng.randrange(-options.step_ms // 5, options.step_ms // 5 + 1))
        if options.has("slow_rank") and self.rank == 0 and rng.random() < 0.1:
            step_ms += rng.choice((2_000, 9_000))
        return step_ms

    def _phase(self, last: bool) -> Iterator[Any]:
        """An evaluation: of all ranks, with safe points as positions of their own, or of rank 0 alone (rule 8)."""
        options, n = self.options, self.n
        alone = options.phase_alone
        if alone and self.rank:
            return 0, False
        left = yield from self._boundary(Position(n, 0), Position(n, 0) if alone else Position(n, 1))
        for k in range(1, options.safe_points + 1):
            if left:
                return k, True
            yield options.step_ms
            if options.collective and not alone:
                yield from self._meet(("phase", n, k))
            left = yield from self._boundary(Position(n, 0 if alone else k), Position(n, 0) if alone else Position(n, k + 1))
        yield options.step_ms
        if options.collective and not alone and not left:
            yield from self._meet(("phase", n, "end"))
        return (0 if alone else options.safe_points + 1), left

    def _boundary(self, here: Position, entered: int | Position | None) -> Iterator[Any]:
        """The hook: store `entered`, test `hold > done`. True when the loop has to end."""
        if not self.hooked:
            return False
        protocol, gap_ms = self.protocol, self.options.gap_ms
        if gap_ms:
            self._fast = True
            yield gap_ms // 2
        if entered is not None:
            protocol.entered = entered
        if gap_ms:
            yield gap_ms - gap_ms // 2
            self._fast = False
        if protocol.hold > protocol.done or here.n >= protocol.due:
            if self._listening:
                yield 0  # The listener holds the lock.
            return (yield from self._slow(here))
        return False

    def _slow(self, here: Position) -> Iterator[Any]:
        protocol, step = self.protocol, self.world.code.protocol.Step
        while True:
            decision = protocol.at_boundary(here, self.world.now)
            if decision.step is step.WAIT:
                if self.parked_ms is None:
                    self.parked_ms = self.world.now
                    self.world.trace(f"r{self.rank} parks at {tuple(here)}")
                self._flush()
                yield PARK
                self.world.checks.parked(self)
                continue
            if self.parked_ms is not None and decision.step is step.GO_ON:
                self.world.trace(f"r{self.rank} goes on at {tuple(here)}")
                if self.world.now - protocol.heard_ms >= self.world.code.protocol.SILENCE_MS:
                    self.silenced = True
            self.parked_ms = None
            if decision.step is step.SAVE:
                yield from self._save(decision.order)
                continue
            if decision.step is step.LEAVE:
                protocol.left()
                self._flush()
                if self.left_n is None:
                    self.left_n = self.n
                    self.world.trace(f"r{self.rank} is Preempted at {self.n}")
                return not self.options.has("ignores_leave")
            self._flush()
            return False

    def _save(self, order: wire.SaveAt) -> Iterator[Any]:
        options, rng, disk = self.options, self.world.rng, self.world.disk
        began_ms = self.world.now
        self.saving = True
        self.protocol.save_began(order)
        self._flush()
        self._tick_soon()
        self.world.checks.save_began(self, order)
        disk.begin(order.directory, self)
        save_ms = max(1, options.save_ms + rng.randrange(-options.save_ms // 4, options.save_ms // 4 + 1))
        if options.has("slow_save"):
            save_ms += rng.choice((0, 2_000, 20_000))
        yield save_ms // 2
        if options.has("torn_exit") and rng.random() < 0.5:
            self.command.crash(self, 137)
            yield FOREVER
        if options.has("hung_save") and rng.random() < 0.5:
            yield FOREVER
        yield save_ms - save_ms // 2
        problem = ""
        if options.sharded and not (yield from self._meet(("save", order.round), COLLECTIVE_SAVE_MS)):
            problem = "the other ranks did not come in time"
        elif options.has("save_raises") and rng.random() < 0.5:
            problem = "the save raised"
        elif options.has("full_disk"):
            problem = "No space left on device"
        self.saving = False
        if problem:
            self.protocol.save_failed(order, problem)
        else:
            self.protocol.save_ended(order, disk.end(order.directory, self), self.world.now - began_ms)
        self._flush()

    def _meet(self, key: tuple[Any, ...], limit_ms: int | None = None) -> Iterator[Any]:
        """A collective of all ranks. False when it timed out."""
        gate = self.command.gate(key)
        gate.here.add(self.rank)
        if len(gate.here) == self.options.ranks:
            for process, token in gate.waiting:
                self.world.at(0, process.go, token)
            return True
        yield gate if limit_ms is None else (gate, limit_ms)
        return len(gate.here) == self.options.ranks
