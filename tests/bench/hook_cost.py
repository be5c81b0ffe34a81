"""What a step costs the trainer when nothing is asked of it, in empty Python method calls.

Owns the two trainers that are measured, which run under a supervisor that answers Hello and then is silent. Must not count the
loop that the calls are made from: its cost is measured in the same round and taken off both sides of the ratio.
Run as a script it is such a trainer: `hook_cost.py attach|steps ROUNDS CALLS FILE`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ckpt_client as ckpt
from ckpt_client.hook import Hook, idle_rank

from tests.bench.figure import ROOT, Row
from tests.support.fake_supervisor import FakeSupervisor

TRAINERS = 5
"""Where code and objects happen to lie in memory changes a ratio by some percent, for the life of a process."""

ROUNDS = 300
CALLS = 5_000
BAR_CALLS = 2.5

Lap = Callable[[], None]


class Empty:
    """What a call costs that does nothing."""

    __slots__ = ()

    def step(self, n: int) -> None:
        """Nothing."""


def measure() -> list[Row]:
    """Both ways to write the loop, attached; and the hook without a supervisor."""
    attached = [_trainer("attach") for _ in range(TRAINERS)]
    loops = _trainer("steps")
    hook = [ratio(laps, "hook", statistics.median) for laps in attached]
    least = [ratio(laps, "hook", min) for laps in attached]
    alone = statistics.median(ratio(laps, "alone", statistics.median) for laps in attached)
    empty = statistics.median(beyond(laps, "empty", "loop", statistics.median) for laps in attached)
    how = (
        f"medians of {ROUNDS} rounds of {CALLS:,} calls in {TRAINERS} trainers: {_all(hook)}, minima {_all(least)}; "
        f"an empty call {empty:.0f} ns, the loop around it not counted"
    )
    return [
        Row("hook.step(), nothing asked", statistics.median(hook), "empty calls", BAR_CALLS, how),
        Row("  without a supervisor", alone, "empty calls", None, "the same rounds"),
        Row(
            "  steps() beyond `for i in range`",
            beyond(loops, "steps", "range", statistics.median),
            "ns a step",
            None,
            "attached",
        ),
    ]


def beyond(laps: dict[str, list[float]], arm: str, baseline: str, of: Callable[[list[float]], float]) -> float:
    """What a call takes beyond what stands around it."""
    return of(laps[arm]) - of(laps[baseline])


def ratio(laps: dict[str, list[float]], arm: str, of: Callable[[list[float]], float]) -> float:
    """The same in empty calls."""
    return beyond(laps, arm, "loop", of) / beyond(laps, "empty", "loop", of)


def _all(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _trainer(kind: str) -> dict[str, list[float]]:
    """What one attached trainer measured: nanoseconds a call, by arm and round."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as store, FakeSupervisor(Path(store)) as supervisor:
        report = f"{store}/laps.json"  # Not through the pipe, which is read at the end only.
        child = supervisor.start(
            kind, str(ROUNDS), str(CALLS), report, script=("-m", "tests.bench.hook_cost"), PYTHONPATH=str(ROOT)
        )
        supervisor.attached(child)
        supervisor.ended(child)
        laps: dict[str, list[float]] = json.loads(Path(report).read_text())
    return laps


# --- the trainers ------------------------------------------------------------------------------------------------------
#
# Each loop is a function of its own: since 3.11 Python keeps what it has learned about a call in the code of the caller, and
# arms that shared one would spoil it for each other.


def _loop(calls: int) -> Lap:
    def lap() -> None:
        for _ in range(calls):
            pass

    return lap


def _empty(thing: Empty, calls: int) -> Lap:
    def lap() -> None:
        for n in range(calls):
            thing.step(n)

    return lap


def _hook(hook: Hook, calls: int) -> Lap:
    def lap() -> None:
        for n in range(calls):
            hook.step(n)

    return lap


def _alone(hook: Hook, calls: int) -> Lap:
    def lap() -> None:
        for n in range(calls):
            hook.step(n)

    return lap


def _range(numbers: Iterator[int], calls: int) -> Lap:
    """The next so many of a loop that goes on from lap to lap, with what a trainer's `for` does."""

    def lap() -> None:
        left = calls
        for _ in numbers:
            left -= 1
            if not left:
                return

    return lap


def _steps(numbers: Iterator[int], calls: int) -> Lap:
    def lap() -> None:
        left = calls
        for _ in numbers:
            left -= 1
            if not left:
                return

    return lap


def _no_save(_directory: Path, _step: int) -> None:
    raise AssertionError("nobody asks this trainer to save")


def arms_of(hook: Hook, calls: int) -> dict[str, Lap]:
    """An attached hook, and what it is compared with."""
    return {"loop": _loop(calls), "empty": _empty(Empty(), calls), "hook": _hook(hook, calls)}


def measured(arms: dict[str, Lap], rounds: int, calls: int) -> dict[str, list[float]]:
    """Nanoseconds a call, by arm and round: every arm once in each round."""
    laps: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, lap in arms.items():
            began = time.thread_time_ns()  # Not the clock on the wall: others may have the core for a while.
            lap()
            laps[name].append((time.thread_time_ns() - began) / calls)
    return laps


def _arms(kind: str, rounds: int, calls: int) -> dict[str, Lap]:
    if kind == "attach":
        return {**arms_of(ckpt.attach(_no_save), calls), "alone": _alone(Hook(idle_rank(), None), calls)}
    enough = (rounds + 1) * calls
    return {
        "range": _range(iter(range(enough)), calls),
        "steps": _steps(iter(ckpt.steps(enough, save=_no_save, load=print)), calls),
    }


def main() -> None:
    """Be a trainer."""
    kind, rounds, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    Path(sys.argv[4]).write_text(json.dumps(measured(_arms(kind, rounds, calls), rounds, calls)))


if __name__ == "__main__":
    main()
