"""Torch below a local supervisor: bit-identical weights after interruptions, torchrun, loaders, and torch's own file format."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor.linux.procfs import descendants

from tests.support.run import TOY, Run, eventually, has_ended, is_alive, supervised

if TYPE_CHECKING:
    from collections.abc import Sequence

TORCHRUN = Path(sys.executable).with_name("torchrun")
SHARES = {"OMP_NUM_THREADS": "1"}
STEPS = 60
TORCH_S = 150
"""Until ranks train, on a machine that has other things to do: torch alone takes its time to be imported."""

pytestmark = pytest.mark.timeout(900)


def torch_toy(place: Path, *words: object) -> list[str]:
    """The toy with torch, as `python` runs it."""
    log, out = place / "toy.log", place / "out.pt"
    return [sys.executable, str(TOY), "--log", str(log), "--out", str(out), *map(str, words)]


def as_shell(argv: Sequence[str]) -> list[str]:
    """The same inside of a shell that stays."""
    return ["bash", "-c", " ".join(argv) + "; exit $?"]


def as_torchrun(argv: Sequence[str]) -> list[str]:
    """The same as two ranks of DDP over gloo, their steps checked to be in lock-step by every one of them."""
    return [str(TORCHRUN), "--standalone", "--nproc-per-node", "2", "--", *argv[1:], "--ranks-collective"]


WAYS = {"python": list, "bash": as_shell, "torchrun": as_torchrun}


def trained(place: Path, way: str, *words: object, options: Sequence[object] = ()) -> object:
    """A supervised start in this way."""
    place.mkdir(parents=True, exist_ok=True)
    return supervised(place, WAYS[way](torch_toy(place, *words)), *options, env=SHARES)


def trains(run: Run, n: int) -> None:
    """Wait until step n is done."""
    ended = lambda: run.process.poll() is not None  # noqa: E731 - one word for the line below
    eventually(lambda: max(run.toy_steps(), default=0) >= n, f"step {n}{run.story()}", TORCH_S, ended)


def interrupted_at(run: Run, n: int, number: signal.Signals) -> int:
    """Signal once the training has reached step n; the step that is committed."""
    trains(run, n)
    run.signal(number)
    assert run.code(120) == 75, run.story()
    return run.intact()[-1]


@pytest.mark.parametrize("way", ["python", "torchrun"])
def test_weights_after_three_interruptions_are_bit_identical(tmp_path: Path, way: str) -> None:
    """Model, AdamW, schedule, random numbers of Python, numpy and torch: the same bytes as a run of one piece (rows 17, 18)."""
    with trained(tmp_path / "whole", way, "--steps", STEPS) as run:
        assert has_ended(run.code(120), run.err), run.story()
    at = 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        with trained(tmp_path / "cut", way, "--steps", STEPS, "--step-ms", 200) as run:
            at = interrupted_at(run, at + 5, number)
            assert at < STEPS - 10, "too late to be an interruption"
    with trained(tmp_path / "cut", way, "--steps", STEPS) as run:
        assert has_ended(run.code(120), run.err), run.story()
        assert re.search(rf"^ready pid \d+ at {at} rank 0 ", run.out, re.MULTILINE)
    done = sorted(run.toy_steps())
    ranks = 2 if way == "torchrun" else 1
    assert done == sorted(list(range(1, STEPS + 1)) * ranks)
    assert (tmp_path / "cut" / "out.pt").read_bytes() == (tmp_path / "whole" / "out.pt").read_bytes()
    names = {path.name for path in (run.dir / f"step-{at:09d}").iterdir()}
    assert names == {"manifest.json", "state.pt", *(f"rank-{rank:05d}.pt" for rank in range(ranks))}


@pytest.mark.parametrize("way", ["bash"])
def test_every_usual_way_to_start_training_attaches_and_is_saved(tmp_path: Path, way: str) -> None:
    """`bash -c` as well; python and torchrun are above (row 18)."""
    with trained(tmp_path, way, "--steps", 1_000_000) as run:
        step = interrupted_at(run, 5, signal.SIGTERM)
        assert step == run.toy_steps()[-1]


def test_loader_workers_survive_a_broadcast_and_the_save(tmp_path: Path) -> None:
    """TERM to every process, as with proctrack/linuxproc: torch's workers do not die of it, and all are gone afterwards."""
    with trained(tmp_path, "python", "--steps", 1_000_000, "--workers", 2, "--save-ms", 3_000) as run:
        trains(run, 5)
        below = descendants(run.pid)
        assert len(below) >= 3, below
        for pid in (run.pid, *below):
            os.kill(pid, signal.SIGTERM)
        assert run.code(120) == 75, run.story()
        assert run.intact() == [run.toy_steps()[-1]]
        assert len(run.events("rank_hello")) == 1
        eventually(lambda: not is_alive(run.event("command_started")["guard_pid"]), "the guard has ended")
        assert [pid for pid in below if is_alive(pid)] == []


def test_a_torch_file_that_is_cut_off_is_never_committed(tmp_path: Path) -> None:
    """torch.save's own format tells by its directory and checksums: 76, nothing is there to resume from."""
    with trained(tmp_path, "python", "--steps", 1_000_000, "--mode", "own", "--short-file") as run:
        trains(run, 5)
        run.signal(signal.SIGTERM)
        assert run.code(120) == 76, run.story()
        assert run.steps() == []
        assert "verification" in run.events("round_given_up")[-1]["reason"]
        assert "toy-00000.pt" in run.events("verified")[-1]["problem"]


def test_one_of_several_ranks_without_torch_distributed_saves_nothing_alone(tmp_path: Path) -> None:
    """Each rank's state is its own then: a checkpoint of rank 0 alone would let no other rank start again (rule 10)."""
    script = (
        "import ckpt_client as ckpt, time\n"
        "class Thing:\n"
        "    def state_dict(self): return {'x': 1}\n"
        "    def load_state_dict(self, state): pass\n"
        "for i in ckpt.steps(10**6, thing=Thing()): time.sleep(0.02)\n"
    )
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    with supervised(tmp_path, [sys.executable, "-c", script], "--grace", "8s", env=env) as run:
        assert run.event("rank_hello", TORCH_S)["sharded"] is True
        run.signal(signal.SIGTERM)
        assert run.code() == 76
        assert "1 of 2 ranks are not there: 1" in run.err
        assert run.steps() == []
