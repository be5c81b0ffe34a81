"""A run that was interrupted three times ends with the same bits as one that was not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ckpt_client import wire

from tests.support.fake_supervisor import TOY, FakeSupervisor
from tests.support.run import has_ended

STEPS = 200
STEP_MS = "100"
"""All of them take twenty seconds: an interruption that comes late is not to find the training at its end."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
BOUND_S = 120


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    """A supervisor whose store is the test's directory."""
    with FakeSupervisor(tmp_path) as fake:
        yield fake


ABORTS_MAX = 3


def reference(out: Path, *words: str) -> dict[str, torch.Tensor]:
    """The final weights of an uninterrupted, unsupervised run."""
    command = [sys.executable, *words, "--step-ms", "0", "--out", str(out)]
    for _ in range(ABORTS_MAX):
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0:
            break
    weights: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return weights


def same(ours: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same bits."""
    found = torch.load(ours, weights_only=True)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def interrupted(supervisor: FakeSupervisor, log: Path, ranks: int) -> int:
    """Wait until every rank has attached and has done some steps, then preempt. The step that was saved."""
    before = len([w for w in supervisor.heard if isinstance(w, wire.Left)])
    supervisor.wait(lambda: len(supervisor.rank_pids()) == ranks, BOUND_S)
    resumed = 0 if supervisor.resume is None else int(supervisor.resume.name[5:])
    supervisor.wait(lambda: f"step {resumed + 4} " in (log.read_text() if log.exists() else ""), BOUND_S)
    pids = supervisor.rank_pids()
    committed = supervisor.commit(supervisor.save(pids, "leave"))
    for pid in pids:
        supervisor.say(pid, wire.Leave(supervisor.rounds))
    supervisor.wait(lambda: len([w for w in supervisor.heard if isinstance(w, wire.Left)]) == before + ranks)
    return int(committed.name[5:])


@pytest.mark.timeout(300)
def test_one_rank_continues_bit_for_bit_after_three_interruptions(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Weights, AdamW, schedule, dropout and the random numbers of Python, numpy and torch are all restored."""
    log, out = tmp_path / "log", tmp_path / "out.pt"
    knobs = ("--steps", str(STEPS), "--log", str(log), "--out", str(out))
    saved = []
    for _ in range(3):
        child = supervisor.start(*knobs, "--step-ms", STEP_MS)
        saved.append(interrupted(supervisor, log, 1))
        assert child.wait(BOUND_S) == 0
    assert 0 < saved[0] < saved[1] < saved[2] < STEPS
    last = supervisor.start(*knobs, "--step-ms", "0")
    supervisor.wait(lambda: last.poll() == 0, BOUND_S)
    assert same(out, reference(tmp_path / "ref.pt", str(TOY), "--steps", str(STEPS)))


@pytest.mark.timeout(300)
def test_two_ranks_of_ddp_continue_bit_for_bit_after_three_interruptions(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Under torchrun, with one all_reduce a step that checks that the ranks are at the same step."""
    log, out = tmp_path / "log", tmp_path / "out.pt"
    knobs = ("--steps", str(STEPS), "--ranks-collective", "--words", str(log), "--out", str(out))
    for number in range(3):
        child = supervisor.start(*knobs, "--step-ms", STEP_MS, script=(*TORCHRUN, TOY))
        step = interrupted(supervisor, log, 2)
        ended_well(supervisor, child)
        assert sorted(path.name for path in supervisor.resume.iterdir()) == ["rank-00000.pt", "rank-00001.pt", "state.pt"]  # type: ignore[union-attr]
        assert number < step < STEPS
    ended_well(supervisor, supervisor.start(*knobs, "--step-ms", "0", script=(*TORCHRUN, TOY)))
    assert same(out, reference(tmp_path / "ref.pt", *TORCHRUN, str(TOY), "--steps", str(STEPS), "--ranks-collective"))


def ended_well(supervisor: FakeSupervisor, child: subprocess.Popen[str]) -> None:
    """Wait for an end with 0, or by that fault of torch's, when all that counts had been done."""
    supervisor.wait(lambda: child.poll() is not None, BOUND_S)
    said = child.communicate()[0]
    assert has_ended(child.returncode, said), said[-4_000:]
