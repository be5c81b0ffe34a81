"""Whether a step costs a trainer more when 7 other ranks are attached to its supervisor.

Owns both conditions, in turns in one process: rank 0 measures, the other ranks attach, rank 0 measures again, and they end. So
where code lies in memory, and how fast the machine is just now, are the same on both sides. The supervisor is a real one.
Run as a script it is the trainer: `hook_crowded.py FILE`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import ckpt_client as ckpt

from tests.bench.figure import ROOT, Row
from tests.bench.hook_cost import arms_of, beyond, measured, ratio
from tests.support.run import supervised

RANKS = 8
TURNS = 16
ROUNDS = 40
CALLS = 5_000
BAR = 1.1
"""1.0, and the noise of a shared machine."""


def measure() -> list[Row]:
    """The ratio of each turn, and of all turns the median."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
        report = Path(place) / "laps.json"
        command = [sys.executable, "-m", "tests.bench.hook_crowded", str(report)]
        with supervised(Path(place), command, env={"PYTHONPATH": str(ROOT)}) as run:
            code = run.code()
            hellos = len(run.events("rank_hello"))
        if code != 0 or hellos != 1 + TURNS * (RANKS - 1):
            raise AssertionError(f"exit status {code}, {hellos} ranks:{run.story()}")
        turns = json.loads(report.read_text())
    ratios = [ratio(many, "hook", statistics.median) / ratio(one, "hook", statistics.median) for one, many in turns]
    one, many = (statistics.median(beyond(turn[side], "hook", "loop", statistics.median) for turn in turns) for side in (0, 1))
    how = (
        f"median of {TURNS} turns, each in empty calls of its own: {min(ratios):.2f} to {max(ratios):.2f}; "
        f"hook.step() takes {one:.1f} ns with one rank attached and {many:.1f} with {RANKS}"
    )
    return [Row(f"hook.step() with {RANKS} ranks attached, of that with one", statistics.median(ratios), "", BAR, how)]


# --- the trainer ----------------------------------------------------------------------------------------------------------


class Others:
    """Ranks 1 to 7, forked by a process that has no threads: rank 0 has some once it is attached."""

    def __init__(self) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(ours[1])
            os.close(theirs[0])
            _serve(ours[0], theirs[1])
        os.close(ours[0])
        os.close(theirs[1])
        self._say, self._hear = ours[1], theirs[0]

    def attach(self) -> None:
        """All of them, until each is attached."""
        self._do(b"+")

    def end(self) -> None:
        """All of them."""
        self._do(b"-")

    def close(self) -> None:
        """No more of this."""
        os.close(self._say)
        os.waitpid(self._pid, 0)

    def _do(self, word: bytes) -> None:
        os.write(self._say, word)
        if os.read(self._hear, 1) != word:
            raise AssertionError("the other ranks have gone")


def _serve(hear: int, say: int) -> None:
    pids: list[int] = []
    while word := os.read(hear, 1):
        if word == b"+":
            attached, done = os.pipe()
            pids = [_rank(rank, done) for rank in range(1, RANKS)]
            for _ in pids:
                os.read(attached, 1)
            os.close(attached)
            os.close(done)
        else:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.write(say, word)
    os._exit(0)


def _rank(rank: int, done: int) -> int:
    pid = os.fork()
    if pid == 0:
        _be_rank(rank)
        ckpt.attach(_no_save)
        os.write(done, b".")
        while True:
            signal.pause()
    return pid


def _be_rank(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))


def _no_save(_directory: Path, _step: int) -> None:
    raise AssertionError("nobody asks this trainer to save")


def main() -> None:
    """Be rank 0."""
    others = Others()
    _be_rank(0)
    hook = ckpt.attach(_no_save)
    arms = arms_of(hook, CALLS)
    measured(arms, ROUNDS, CALLS)
    turns = []
    for _ in range(TURNS):
        one = measured(arms, ROUNDS, CALLS)
        others.attach()
        many = measured(arms, ROUNDS, CALLS)
        others.end()
        turns.append((one, many))
    others.close()
    hook.close()
    Path(sys.argv[1]).write_text(json.dumps(turns))


if __name__ == "__main__":
    main()
