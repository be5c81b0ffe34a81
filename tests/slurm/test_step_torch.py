"""Real torch in steps of several tasks: DDP with one task for each rank, and FSDP2 below a torchrun on each node.

Owns: rows 1 (with DDP) and 2 of the issue "One job, many supervisors, many ranks".
Must not: run more torch processes than it needs. Each takes seconds of CPU to start.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_every_step_once, check_step_requeued
from tests.support.slurm_stage import BIN, PYTHON, TRAPPED, free_port, toy_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

SHARDED = str(Path(__file__).resolve().parents[1] / "support" / "toy_sharded.py")
FROM_SLURM = 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$0" "$@"'
START_S = 120
pytestmark = pytest.mark.timeout(400)


def manifest(run: Run) -> dict[str, object]:
    """That of the newest checkpoint."""
    found: dict[str, object] = json.loads((run.dir / f"step-{run.newest():09d}" / "manifest.json").read_text())
    return found


def digests(run: Run, what: str) -> list[tuple[int, str]]:
    """What rank 0 has said of the whole weights and optimizer state: steps done, and the digest, in order."""
    return [(int(n), digest) for n, digest in re.findall(rf"^{what} (\d+) (\w+) rank 0 ", run.log.read_text(), re.MULTILINE)]


def test_ddp_with_a_task_for_each_rank_goes_on_where_it_was(new_stage: Callable[..., Stage]) -> None:
    """Row 1: `srun -N4 -n4`, DDP over gloo with a collective in every step: preempted, one step, no step lost."""
    stage = new_stage(nodes=4, proctrack="linuxproc")
    command = ["bash", "-c", FROM_SLURM, *toy_words("--torch --ranks-collective --steps 100000 --step-ms 50 --log {log}")]
    script = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1\n{TRAPPED}"
    run = stage.submit("-n4", "-p", "low", command=command, script=script, nodes=4)
    for rank in range(4):
        run.wait_steps(3, rank, timeout=START_S)
    run.preempt()
    check_step_requeued(run, range(4))
    (step,) = run.committed()
    assert manifest(run)["ranks"] == [0, 1, 2, 3]
    names = {path.name for path in (run.dir / f"step-{step:09d}").iterdir()}
    assert names == {"manifest.json", "state.pt", *(f"rank-{rank:05d}.pt" for rank in range(4))}
    for rank in range(4):
        run.wait_steps(step + 2, rank, timeout=START_S)
    check_every_step_once(run, range(4))
    run.verify()


def test_sharded_state_below_a_torchrun_on_each_node_resumes_on_any_number_of_ranks(new_stage: Callable[..., Stage]) -> None:
    """Row 2: two nodes with two ranks each, FSDP2 and DCP: preempted, resumed on 4 ranks, preempted, resumed on 2."""
    stage = new_stage(nodes=2, proctrack="cgroup", grace=30)
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    torchrun = [PYTHON, str(BIN / "torchrun"), *rendezvous, "--rdzv-id", "lab", "--local-addr", "127.0.0.1"]
    command = [*torchrun, SHARDED, "--steps", "100000", "--step-ms", "100", "--words", "{log}"]
    script = f"export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 PET_NPROC_PER_NODE=$((SLURM_RESTART_COUNT < 2 ? 2 : 1))\n{TRAPPED}"
    run = stage.submit("--ntasks-per-node=1", "-p", "low", command=command, script=script, nodes=2)
    for attempt in range(2):
        run.wait_event("rank_hello", 4, timeout=START_S, attempt=attempt, task=0)
        before = len(digests(run, "step"))
        run.lab.wait_job(run.jobid, lambda _, before=before: len(digests(run, "step")) > before + 2, START_S, "steps")
        run.preempt()
        for task in range(2):
            assert run.wait_event("exit", attempt=attempt, task=task)["code"] == 75
        done, saved = digests(run, "step")[-1][0], manifest(run)
        assert (saved["ranks"], saved["step"]) == ([0, 1, 2, 3], done)
        names = {path.name for path in (run.dir / f"step-{run.newest():09d}").iterdir()}
        assert {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))} <= names
    run.wait_event("rank_hello", 2, timeout=START_S, attempt=2, task=0)
    assert {entry["world_size"] for entry in run.events("rank_hello", attempt=2)} == {2}
    newest = run.newest()
    run.lab.wait_job(run.jobid, lambda _: digests(run, "step")[-1][0] > newest + 1, START_S, "steps")
    assert digests(run, "start")[1:] == [(n, digest) for n, digest in digests(run, "step") if n in run.committed()]
    numbers = [n for n, _ in digests(run, "step")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [call.error for call in run.requeue_calls()] == [None, None]
    run.verify()
