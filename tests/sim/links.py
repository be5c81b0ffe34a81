"""The simulated network between the supervisors of one step: whole frames, in order, that may be late or lost.

As ZeroMQ over TCP gives it: what is sent on one connection comes in its order or not at all; a connection that is cut loses what
was under way, or keeps it until it is up again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.world import World

LOSSY_CLEAR_MS = 4_000
"""A cut that heals is over this long before the notice."""


class Links:
    """One connection between task 0 and each other task."""

    def __init__(self, world: World) -> None:
        self.world = world
        options, rng = world.options, world.rng
        self._last_ms: dict[tuple[int, bool], int] = {}
        self.cuts: dict[int, tuple[int, int, bool]] = {}
        """By task: from when, until when, and whether what is sent meanwhile comes afterwards."""
        if options.has("link_cut"):
            for task in range(1, options.tasks):
                if rng.random() < 0.6:
                    begin_ms = rng.randrange(options.story_ms + 3_000)
                    end_ms = begin_ms + rng.choice((700, 3_000, 7_000, 30_000))
                    if options.mode == "lossy":
                        end_ms = min(end_ms, options.story_ms - LOSSY_CLEAR_MS)
                    if end_ms > begin_ms:
                        self.cuts[task] = (begin_ms, end_ms, rng.random() < 0.5)

        if options.has("link_reset"):
            until_ms = options.story_ms + (-LOSSY_CLEAR_MS if options.mode == "lossy" else 3_000)
            for task in range(1, options.tasks):
                if rng.random() < 0.6 and until_ms > 0:
                    world.at(rng.randrange(until_ms), self._reset, task)

    def _reset(self, task: int) -> None:
        """The connection is closed, and made again within a second; what was under way is lost."""
        world = self.world
        if task in self.cuts or world.shells[task].over or world.supervisor.over:
            return
        self.cuts[task] = (world.now, world.now + world.rng.choice((20, 150, 1_000)), False)
        world.at(1, world.supervisor.task_cut, task)
        world.at(1, world.shells[task].task_cut, 0)

    def closed(self, task: int) -> None:
        """A supervisor has died: its connections are closed, after what was under way."""
        world = self.world
        for other in range(1, len(world.shells)) if task == 0 else (task,):
            at_ms = max(world.now + 1, self._last_ms.get((other, task != 0), 0))
            call = world.supervisor.task_cut if task else world.shells[other].task_cut
            world.at(at_ms - world.now, call, task)

    def up(self, task: int, frame: bytes) -> None:
        """A frame to the coordinator."""
        self._send(task, True, self.world.supervisor.hear_task, frame)

    def down(self, task: int, frame: bytes) -> None:
        """A frame of the coordinator."""
        self._send(task, False, self.world.shells[task].hear_coordinator, frame)

    def is_cut(self, task: int, since_ms: int | None = None) -> bool:
        """Whether this task is cut off now, or was at any time since then."""
        cut = self.cuts.get(task)
        now = self.world.now
        return cut is not None and cut[0] <= now and (now if since_ms is None else since_ms) < cut[1]

    def _send(self, task: int, up: bool, call: Callable[[bytes], None], frame: bytes) -> None:
        world = self.world
        options, rng, now = world.options, world.rng, world.now
        at_ms = now + rng.randrange(2)
        if self.is_cut(task):
            _begin_ms, end_ms, keeps = self.cuts[task]
            if not keeps:
                return
            at_ms = end_ms + rng.randrange(300)
        if now < options.heals_ms:
            if options.link_loss_percent and rng.randrange(100) < options.link_loss_percent:
                return
            if options.has("link_delay") and rng.random() < 0.2:
                at_ms += rng.choice((5, 60, 1_500))
        at_ms = max(at_ms, self._last_ms.get((task, up), 0))
        self._last_ms[task, up] = at_ms
        world.at(at_ms - now, call, frame)
