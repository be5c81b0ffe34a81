"""The job scripts in deploy/templates for several nodes, but for what a lab has not: GPUs, and nodes with addresses.

Owns: that such a job trains on all its ranks, is saved and requeued when preempted, and goes on.
Must not: need torch in the training itself; what the scripts have to give it is its environment.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_every_step_once, check_ranks, check_step_requeued
from tests.support.slurm_stage import BIN, TOY, Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage

BESIDE_LABS = 36
"""The scripts' port is 20000 + job id % 10000, where labs have their ports, too: of every 40 none has the last seven."""

TEMPLATES = Path(__file__).resolve().parents[2] / "deploy" / "templates"
FIRST_NODE = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
TRAIN = """
import os, sys
sys.path.insert(0, os.path.dirname({toy!r}))
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 1024 and int(os.environ["WORLD_SIZE"]) == {ranks}
assert int(os.environ["LOCAL_RANK"]) == int(os.environ["RANK"]) % 2
sys.argv[1:] = "--no-torch --steps 100000 --step-ms 20 --log {log}".split()
import toy
sys.exit(toy.main())
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["several-nodes-torchrun", "one-task-per-rank"])
def test_a_template_for_several_nodes_saves_and_goes_on(new_stage: Callable[..., Stage], name: str) -> None:
    """Two nodes with two ranks each: preempted, one checkpoint of all four ranks, and on from there."""
    first_job_id = 40 * random.randrange(250, 200_000) + BESIDE_LABS
    stage = new_stage(nodes=2, proctrack="cgroup", grace=30, first_job_id=first_job_id)
    root = stage.lab.root
    log = root / "toy.log"
    (root / "train.py").write_text(TRAIN.format(toy=TOY, ranks=4, log=log))
    text = (TEMPLATES / f"{name}.sbatch").read_text()
    text = re.sub(r"(?m)^#SBATCH --(gpus|cpus)-per-.*\n", "", text)
    text = re.sub(r"--nodes=4|--ntasks-per-node=8|--nproc-per-node 8", lambda size: f"{size[0][:-1]}2", text)
    assert text.count(FIRST_NODE) == 1
    text = text.replace(FIRST_NODE, f"{FIRST_NODE} >{root}/first; echo 127.0.0.1")
    env = stage.lab.env(SCRATCH=str(root), CKPT_SUPERVISE_STATE=str(root / "states"), PATH=f"{BIN}:{os.environ['PATH']}")
    jobid = stage.lab.sbatch(text, "-p", "low", output=root / "job.out", env=env, cwd=root)
    run = Run(stage.lab, jobid, stage.lab.nodes[0], root / "job.out", root / "checkpoints" / str(jobid), log, stage.lab.nodes)
    stage.runs.append(run)
    for rank in range(4):
        run.wait_steps(3, rank, timeout=90)
    assert (root / "first").read_text().split() == [stage.lab.nodes_of(jobid)[0]]
    run.preempt()
    check_step_requeued(run, range(4 if name == "one-task-per-rank" else 2))
    check_ranks(run, range(4))
    for rank in range(4):
        run.wait_steps(run.committed()[-1] + 1, rank, timeout=90)
    check_every_step_once(run, range(4))
