"""What comes neither from a rank nor from Slurm: the history that was read, the owner's wishes, a hang that was found.

Drawn from a source of its own, so that the other faults of a seed stay as they are. In half of the swarm's runs only: the others
show that nothing of it is needed.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from tests.sim.options import LOCAL, Options

if TYPE_CHECKING:
    from tests.sim.world import World


def drawn(options: Options) -> random.Random | None:
    """The source of this run's; None if it has none."""
    rng = random.Random(f"outside of {options.seed}")
    return rng if options.mode == "swarm" and rng.random() < 0.5 else None


def policy(options: Options, plain: Any) -> Any:
    """The options of this run that these events meet."""
    rng = drawn(options)
    if rng is None:
        return plain
    return dataclasses.replace(
        plain,
        lingers=rng.random() < 0.3,
        every_auto=plain.every_ms is None and rng.random() < 0.3,
        on_hang=rng.choice(("warn", "restart")),
        max_timeouts=rng.choice((None, 5)),
        max_crashes=rng.choice((0, 3)),
    )


def schedule(world: World) -> None:
    """Tell the coordinator at moments of their own."""
    options, events = world.options, world.code.core.events
    rng = drawn(options)
    if rng is None:
        return
    rng.random()
    span_ms = options.story_ms + 4_000
    seen_ms = tuple(max(1, options.save_ms // 2) for _ in range(rng.randrange(4)))
    history = world.code.core.history.History(
        saves_ms=seen_ms, holds_ms=seen_ms, interruptions=rng.randrange(9), ran_ms=rng.randrange(10**9), stalled=rng.randrange(9)
    )
    history = dataclasses.replace(history, crashes=random.Random(f"crashes of {options.seed}").randrange(6))
    found: list[Any] = [events.Recalled(history)]
    if rng.random() < 0.3:
        found.append(events.Asked("every", rng.choice((700, 3_000, None))))
    if rng.random() < 0.2:
        found.append(events.Stalled(rng.randrange(options.tasks), (0,), "no progress", "no step for 1 s"))
    if rng.random() < 0.1 and options.story not in LOCAL:
        found.append(events.Asked("leave_after_save", requeue=True))
    for event in found:
        world.at(rng.randrange(span_ms), world.supervisor.outside, event)
