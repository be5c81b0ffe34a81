"""Signals at random moments, to every process of the step, while helpers come and go: nobody dies of them, nothing hangs.

Owns: row 5 of the issue "Shield and teardown". A round is one broadcast: USR2, which asks for a save, or at the end of a step the
USR1 or TERM that it saves and leaves at.
Must not: look at how helpers end without a notice (tests/process does). CKPT_TEST_STORMS_5 is the number of rounds.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import step_processes
from tests.support.slurm_stage import pause, wait_for
from tests.support.step_processes import StepId, unruly_toy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

ROUNDS = int(os.environ.get("CKPT_TEST_STORMS_5", "24"))
SEED = 5
ROUNDS_OF_A_STEP = 4
KINDS = (("linuxproc", "rough", "USR1"), ("linuxproc", "gentle", "TERM"), ("pgid", "rough", "USR1"))
"""Process tracking, how helpers end, and what the step leaves at. A SIGTERM to a process that holds one already is lost: whoever
waits for a helper that it has ended in the very moment of Slurm's TERM waits in vain (docs/slurm.md, section 6)."""

LOOP = 'for i in $(seq 0 {last}); do\n  echo "begin $i"\n  {run}\n  echo "step $i rc=$?"\ndone\n'
GONE_WITHIN_S = 5.0


def storm(run: Run, leaves_at: str, seed: object, rounds: int) -> None:
    """So many broadcasts; at the end of each step one that it leaves at, and then nobody of it is there any more."""
    chance = random.Random(str(seed))
    left, number = rounds, 0
    while left > 0:
        wait_for(lambda number=number: f"begin {number}" in run.lines(), f"step {number}")
        attached = run.wait_event("rank_hello", number + 1)
        assert attached["step_id"] == str(number)
        here = min(left, ROUNDS_OF_A_STEP)
        for _ in range(here - 1):
            pause(chance.choice((0.0, 0.02, 0.1, 0.4, 0.8)) * chance.random())
            run.cancel("--signal=USR2")
        pause(chance.uniform(0, 1))
        run.cancel(f"--signal={leaves_at}")
        wait_for(lambda number=number: re.search(rf"^step {number} rc=", run.output(), re.MULTILINE), f"the end of step {number}")
        step_processes.gone_after(StepId(run.jobid, 0, number), GONE_WITHIN_S, f"step {number}")
        left, number = left - here, number + 1


def check_storm(run: Run, steps: int) -> None:
    """Every step has saved what it had done, and left with 75; no helper has died of a signal, none has hung."""
    assert re.findall(r"^step \d+ rc=(\d+)$", run.output(), re.MULTILINE) == ["75"] * steps
    told = [" ".join(word) for word in run.words() if word[0] in ("early", "hang")]
    assert told == []
    done = run.steps()
    assert done == list(range(1, len(done) + 1))
    assert max(int(word[1]) for word in run.words() if word[0] == "helpers") > 0
    assert run.newest() == done[-1]
    run.verify()


@pytest.mark.timeout(180 + 8 * ROUNDS)
def test_nobody_dies_and_nothing_hangs_however_signals_rain(new_stage: Callable[..., Stage]) -> None:
    """Row 5: storms on linuxproc, where they reach every process, and on pgid: 0 early deaths, 0 survivors, 0 hangs."""
    each = -(-ROUNDS // len(KINDS))
    steps = -(-each // ROUNDS_OF_A_STEP)
    options = "--requeue never --keep 500 --notice-horizon 24h"  # A notice that comes long before the end counts, too.
    how = {"supervise": options, "script": LOOP.replace("{last}", str(steps - 1))}
    runs = []
    for proctrack, churn, _ in KINDS:
        stage = new_stage(nodes=1, proctrack=proctrack)
        runs.append(stage.submit("-p", "low", "-t", "60", command=unruly_toy(f"--churn {churn} --save-ms 60"), **how))
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
        storms = [
            pool.submit(storm, run, leaves_at, (SEED, number), each)
            for number, (run, (_, _, leaves_at)) in enumerate(zip(runs, KINDS, strict=True))
        ]
        for result in storms:
            result.result()
    for run in runs:
        check_storm(run, steps)
        run.wait_state("COMPLETED")
