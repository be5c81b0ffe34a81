"""One simulated training process: its training thread, its listener, and the real client protocol between them.

The training thread is a generator that yields how long it is busy, or what it waits for. The hook's fast path (store `entered`,
then test `hold > done`) is played here with a gap in between, into which the listener's two halves (set hold, read entered) may
fall: that pair of orders is what the whole agreement stands on (docs/protocol.md, rules 1 and 2).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from ckpt_client import wire
from ckpt_client.place import Place
from ckpt_client.wire import Position, Who

if TYPE_CHECKING:
    from tests.sim.command import Command
    from tests.sim.world import World

PARK = "park"
FOREVER = "forever"
TICK_MS = 500
HELLO_TURN_MS = 25
HELLO_EVERY_MS = 500
HELLO_MAX_MS = 10_000
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
        self.task = command.shell.task
        self.who = Who(rank, generation, world.new_pid(self))
        self.protocol: Any = None
        self.place: Any = None
        self.n = 0
        self.code = 0
        self._answer: wire.ToRank | None = None
        self.alive = True
        self.stopped = False
        self.stopped_ms = 0
        self.hung = False
        self.raised = False
        self.saving = False
        self.silenced = False
        self.parked_ms: int | None = None
        self.parked_at: Position | None = None
        self.left_n: int | None = None
        self.times_left = 0
        self.stop = 1 << 40
        self.next_at = Position(-1, 0)
        """The next boundary, as it was when it went on from the last one."""
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
        if self.protocol is None:
            if isinstance(word, wire.Welcome | wire.Refused):
                self._answer = word
            return
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

    def is_beyond(self, at: Position) -> bool:
        """Whether it has gone on from there for good. (In a phase of its own a rank passes the same position several times.)"""
        return self.next_at > at

    def _went_on(self) -> None:
        self.next_at = self.protocol.position()

    def freeze(self, stopped: bool) -> None:
        """SIGSTOP or SIGCONT."""
        self.stopped = stopped
        self.stopped_ms = self.world.now
        if not stopped:
            held, self._held = self._held, []
            for call, argument in held:
                self.world.at(0, call, argument)

    def raises(self) -> None:
        """An exception that nobody catches: its last word, if it can speak at all."""
        if self.alive and not self.stopped and self.protocol is not None:
            self.raised = True
            self.protocol.died("RuntimeError: boom")
            self._flush()

    def hold(self, call: Callable[..., None], argument: Any) -> None:
        """What comes while it is stopped."""
        self._held.append((call, argument))

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
            self.world.checks.said(self, word)
            self.world.net.to_supervisor(self, word)

    # --- the training thread -------------------------------------------------------------------------------------------

    def _life(self) -> Iterator[Any]:
        options, rng = self.options, self.world.rng
        yield options.start_ms + rng.randrange(20) + self.command.late_ms(self.rank)
        self.n = max(0, self.command.resume_step)
        if self.hooked:
            yield from self._attach()
        stop = self.n + options.steps
        if options.has("ends_early") and self.rank == options.ranks - 1:
            stop = self.n + min(10, options.steps // 2 + 1)
        self.stop = stop
        left = yield from self._loop(stop)
        if self.protocol is not None:
            self.protocol.finish()
            self._flush()
        if left:
            yield rng.choice((0, 5, 50)) + (rng.randrange(6_000) if options.has("slow_exit") else 0)
            self.code = 1 if options.has("exit_code") else 0
        else:
            yield rng.choice((0, 20, 300)) + (self.task * 900 if options.has("uneven_end") else 0)

    def _attach(self) -> Iterator[Any]:
        """Say Hello until Welcome, as the client does. Without one training runs on by itself."""
        hello = wire.Hello(self.who, wire.VERSION, self.options.ranks, self.rank, self.options.sharded)
        for turn in range(HELLO_MAX_MS // HELLO_TURN_MS):
            if turn % (HELLO_EVERY_MS // HELLO_TURN_MS) == 0:
                self.world.net.to_supervisor(self, hello)
            yield HELLO_TURN_MS
            if self._answer is not None:
                break
        if not isinstance(self._answer, wire.Welcome):
            self.hooked = False
            return
        self.n = max(0, self._answer.resume_step)
        self.protocol = self.world.rank_type(self.who, self.n + self.options.attach_api, done_steps=self.n)
        self.protocol.process = self
        self.protocol.hear(self._answer, self.world.now)
        self._flush()
        self.place = Place(self.protocol)
        yield self.world.rng.randrange(50)  # Loading.

    def _loop(self, stop: int) -> Iterator[Any]:
        """`steps()`, where a boundary comes before each step, or a loop with `hook.step(n)` after it. True when told to leave."""
        options, api = self.options, self.options.attach_api
        for n in range(self.n, stop):
            if not api and (yield from self._boundary(lambda n=n: self._store(n))):
                return True
            yield from self._work(("step", n))
            self.n = n + 1
            if api and (yield from self._boundary(lambda n=n: self._store(n + 1))):
                return True
            if options.phase_every and self.n % options.phase_every == 0 and (yield from self._phase(self.n == stop)):
                return True
        if api:
            return False
        return (yield from self._boundary(lambda: self._store(stop, last="last_raises" not in self.world.code.hook_faults)))

    def _store(self, n: int, last: bool = False) -> Position:
        """The hook's store. At the end of the loop `entered` stays at n (rule 9)."""
        here = self.place.at(n)
        self.protocol.entered = here if last else n
        return here

    def _work(self, key: tuple[Any, ...], alone: bool = False) -> Iterator[Any]:
        """One step or one interval of a phase, with a collective in the middle where ranks are coupled."""
        step_ms = self._step_ms()
        yield step_ms // 2
        if self.hung:
            yield FOREVER
        if self.options.collective and not alone:
            yield from self._meet(key)
        yield step_ms - step_ms // 2

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
            return False
        self.next_at = Position(n, 0)  # Entering takes back what hook.step(n) said.
        still = "safe_points" in self.world.code.hook_faults
        if (yield from self._boundary(lambda: self.place.enter(n, alone=alone or still))):
            return True
        for k in range(options.safe_points):
            yield from self._work(("phase", n, k), alone=alone)
            if (yield from self._boundary(self._safe_point)):
                return True
        yield from self._work(("phase", n, "end"), alone=alone)
        return (yield from self._boundary(lambda: self.place.leave(last=last and not options.attach_api)))

    def _safe_point(self) -> Position | None:
        return self.place.safe_point()

    def _boundary(self, store: Callable[[], Position | None]) -> Iterator[Any]:
        """The hook: store `entered`, then test `hold > done`. True when the loop has to end."""
        if self.protocol is None:
            return False
        gap_ms = self.options.gap_ms
        if gap_ms:
            self._fast = True
            yield gap_ms // 2
        here = store()
        if gap_ms:
            yield gap_ms - gap_ms // 2
            self._fast = False
        if here is not None and (self.protocol.hold > self.protocol.done or here.n >= self.protocol.due):
            if self._listening:
                yield 0  # The listener holds the lock.
            return (yield from self._slow(here))
        self._went_on()
        return False

    def _slow(self, here: Position) -> Iterator[Any]:
        protocol, step = self.protocol, self.world.code.protocol.Step
        while True:
            decision = protocol.at_boundary(here, self.world.now)
            if decision.step is step.WAIT:
                self.parked_at = here
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
            self.parked_ms = self.parked_at = None
            if decision.step is step.SAVE:
                yield from self._save(decision.order)
                continue
            if decision.step is step.LEAVE:
                if self.times_left < 2:
                    protocol.left()
                self.times_left += 1
                self._flush()
                if self.left_n is None:
                    self.left_n = self.n
                    self.world.trace(f"r{self.rank} is Preempted at {self.n}")
                return not self.options.has("ignores_leave")
            self._flush()
            self._went_on()
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
            if options.has("stale_save") and rng.random() < 0.5:
                order = msgspec.structs.replace(order, at=Position(max(0, order.at.n - 1), 0))
            self.protocol.save_ended(order, disk.end(order.directory, self, order.at.n), self.world.now - began_ms)
            self.world.checks.saved(self, order, self.protocol.saved)
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
