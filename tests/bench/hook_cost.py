"""What a step costs the trainer when nothing is asked of it, in empty Python method calls.

Owns the two trainers that are measured, which run under a supervisor that answers Hello and then is silent. Must not count the
loop that the calls are made from: its cost is measured in the same round and taken off both sides of the ratio.
Run as a script it is such a trainer: `hook_cost.py attach|steps ROUNDS CALLS` prints one JSON line.
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

ROUNDS = 300
CALLS = 20_000
BAR_CALLS = 2.5

Lap = Callable[[], None]


class Empty:
    """What a call costs that does nothing."""

    __slots__ = ()

    def step(self, n: int) -> None:
        """Nothing."""


def measure() -> list[Row]:
    """Both ways to write the loop, attached; and the hook without a supervisor."""
    attached, steps = _trainer("attach"), _trainer("steps")
    hook, alone = _ratios(attached, "hook"), _ratios(attached, "alone")
    step = [steps["steps"][at] - steps["range"][at] for at in range(ROUNDS)]
    empty = _net(attached, "empty")
    how = f"median of {ROUNDS} rounds of {CALLS:,} calls; of minima {_of_minima(attached, 'hook'):.2f}; empty call {min(empty):.0f} ns"
    return [
        Row("hook.step(), nothing asked", statistics.median(hook), "empty calls", BAR_CALLS, how),
        Row("hook.step() without a supervisor", statistics.median(alone), "empty calls", None, "the same rounds"),
        Row("steps() beyond `for i in range`", statistics.median(step), "ns a step", None, f"minimum {min(step):.0f} ns; attached"),
    ]


def _net(laps: dict[str, list[float]], arm: str) -> list[float]:
    """Time of a call in each round, without the loop it stands in."""
    return [taken - loop for taken, loop in zip(laps[arm], laps["loop"], strict=True)]


def _ratios(laps: dict[str, list[float]], arm: str) -> list[float]:
    return [taken / empty for taken, empty in zip(_net(laps, arm), _net(laps, "empty"), strict=True)]


def _of_minima(laps: dict[str, list[float]], arm: str) -> float:
    return (min(laps[arm]) - min(laps["loop"])) / (min(laps["empty"]) - min(laps["loop"]))


def _trainer(kind: str) -> dict[str, list[float]]:
    """What one attached trainer measured: nanoseconds a call, by arm and round."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as store, FakeSupervisor(Path(store)) as supervisor:
        child = supervisor.start(kind, str(ROUNDS), str(CALLS), script=("-m", "tests.bench.hook_cost"), PYTHONPATH=str(ROOT))
        supervisor.attached(child)
        supervisor.ended(child)
        assert child.stdout is not None
        laps: dict[str, list[float]] = json.loads(child.stdout.read().splitlines()[-1])
    return laps


# --- the trainers ------------------------------------------------------------------------------------------------------


def _loop(calls: int) -> Lap:
    def lap() -> None:
        for _ in range(calls):
            pass

    return lap


def _calls(call: Callable[[int], None], calls: int) -> Lap:
    def lap() -> None:
        for n in range(calls):
            call(n)

    return lap


def _indices(numbers: Iterator[int], calls: int) -> Lap:
    """The next so many of a loop that goes on from lap to lap, with what a trainer's `for` does."""

    def lap() -> None:
        left = calls
        for _ in numbers:
            left -= 1
            if not left:
                return

    return lap


def _no_save(_directory: Path, _step: int) -> None:
    raise AssertionError("nobody asks this trainer to save")


def _arms(kind: str, rounds: int, calls: int) -> dict[str, Lap]:
    if kind == "attach":
        hook, alone = ckpt.attach(_no_save), Hook(idle_rank(), None)
        methods = {"empty": Empty().step, "hook": hook.step, "alone": alone.step}
        return {"loop": _loop(calls), **{name: _calls(method, calls) for name, method in methods.items()}}
    enough = (rounds + 1) * calls
    return {
        "range": _indices(iter(range(enough)), calls),
        "steps": _indices(iter(ckpt.steps(enough, save=_no_save, load=print)), calls),
    }


def main() -> None:
    """Be a trainer: every arm once in each round."""
    kind, rounds, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arms = _arms(kind, rounds, calls)
    laps: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, lap in arms.items():
            began = time.perf_counter_ns()
            lap()
            laps[name].append((time.perf_counter_ns() - began) / calls)
    sys.stdout.write(json.dumps(laps) + "\n")


if __name__ == "__main__":
    main()
