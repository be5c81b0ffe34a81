"""Launchers between the supervisor and the training on real Slurm: torchrun with a save that outlasts its own clock, wrappers,
and a further srun.

Owns: rows 3 and 4 of the issue and field cases 4, 5, 7, 16, 27, 61 and 119 where Slurm itself sends the signals.
Must not: repeat what tests/process/test_launchers.py sees without Slurm. Everything that only waits, waits side by side.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import BOTH, check_no_step_lost, check_ranks, check_requeued, check_saved, check_step_requeued
from tests.support.slurm_stage import BIN, OWN_TOY, PYTHON, TOY, TRAPPED, free_port, toy_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

WORDS = ["--steps", "100000", "--step-ms", "20", "--log", "{log}"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--"]
STAND_IN = [sys.executable, str(TOY).replace("toy.py", "launchers.py")]
START_S = 90
LONG_SAVE_S = 45
pytestmark = pytest.mark.timeout(300)
GRACE_S = 90


def check_all_saved(run: Run, ranks: int) -> int:
    """One checkpoint of all ranks, at the step that each of them stopped after; its step."""
    check_ranks(run, range(ranks))
    (step,) = run.committed(attempt=0)
    assert [stopped_after(run, rank) for rank in range(ranks)] == [step] * ranks
    return step


def stopped_after(run: Run, rank: int) -> int:
    """The last step that this rank did before it left for the first time; the job may have come back already."""
    own = [word for word in run.words() if word[-3] == str(rank)]
    left = [word[0] for word in own].index("preempted")
    return [int(word[1]) for word in own[:left] if word[0] == "step"][-1]


def check_goes_on_after(run: Run, step: int) -> None:
    """The job's second run resumes from it. Not by the output: conda run may keep that until the end."""
    assert run.wait_event("command_started", attempt=1)["resume_step"] == step


def test_torchrun_is_left_alone_while_its_workers_save_for_longer_than_it_would_wait(new_stage: Callable[..., Stage]) -> None:
    """Row 4, field case 4: a save of 45 s in a grace of 90 s; torchrun would have killed its workers after 30 s."""
    stages = [new_stage(nodes=1, proctrack=proctrack, grace=GRACE_S) for proctrack in BOTH]
    runs = []
    for stage in stages:
        knobs = ["--no-torch", *WORDS, "--save-ms", str(LONG_SAVE_S * 1000)]
        runs.append(stage.submit("-p", "low", command=[*TORCHRUN, OWN_TOY, *knobs], script=TRAPPED))
    for run in runs:
        for rank in range(2):
            run.wait_steps(3, rank, timeout=START_S)
    for run in runs:
        run.preempt()
    for run in runs:
        check_requeued(run, timeout=GRACE_S)
        check_all_saved(run, 2)
        assert all(written["save_ms"] >= LONG_SAVE_S * 1000 for written in run.events("rank_written"))
        assert "closing signal" not in run.output()  # torchrun's word when it ends its workers


@pytest.mark.parametrize("proctrack", BOTH)
def test_wrappers_keep_nothing_from_being_saved(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 3: shells that stay, one that clears the signal mask, timeout, conda run, a sweep agent, mpirun; all at once."""
    stage = new_stage(nodes=6, proctrack=proctrack)
    toy = toy_words(*WORDS)
    shell = f"{shlex.join(toy)}; echo ended with $?"
    one = [
        ["bash", "-c", shell],
        ["sh", "-c", f'env OF=env timeout 10m {shlex.join(toy)}; exit "$?"'],
        [*STAND_IN, "conda", *toy],
        [*STAND_IN, "conda-captures", *toy],
        [*STAND_IN, "agent", *toy],
    ]
    runs = [stage.submit("-p", "low", command=words, script=TRAPPED) for words in one]
    many = stage.submit("-p", "low", command=[*STAND_IN, "mpirun", "4", *toy], script=TRAPPED)
    stage.started(runs)
    stage.started([many], ranks=4)
    for run in stage.runs:
        run.preempt()
    for run in stage.runs:
        check_requeued(run)
    for run in runs:
        check_goes_on_after(run, check_saved(run))
    check_goes_on_after(many, check_all_saved(many, 4))


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_warning_signal_reaches_every_process_below_a_launcher(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Field case 5: USR1, of which programs die by default, to torchrun, a shell and their workers, shortly before the limit."""
    stage = new_stage(nodes=2, proctrack=proctrack)
    torchrun = stage.submit("-p", "low", "-t", "5", command=[*TORCHRUN, TOY, "--no-torch", *WORDS], script=TRAPPED)
    shell = ["bash", "-c", f"{shlex.join(toy_words(*WORDS))}; true"]
    wrapped = stage.submit("-p", "low", "-t", "5", command=shell, script=TRAPPED)
    stage.started([wrapped])
    for rank in range(2):
        torchrun.wait_steps(3, rank, timeout=START_S)
    for run in stage.runs:
        run.cancel("--signal=USR1")
    for run in stage.runs:
        check_requeued(run)
    check_saved(wrapped)
    check_all_saved(torchrun, 2)


def test_ranks_of_an_inner_step_are_saved_where_slurm_signals_only_the_supervisor(new_stage: Callable[..., Stage]) -> None:
    """Field case 27: `srun --overlap -n2` inside the supervised step, on cgroup: its tasks attach over the same socket."""
    stage = new_stage(nodes=1, proctrack="cgroup")
    inner = ["srun", "--overlap", "-n2", *toy_words(*WORDS)]
    run = stage.submit("-p", "low", "-n2", srun="srun -n1", command=inner, script=TRAPPED)
    stage.started(ranks=2)
    run.preempt()
    check_requeued(run)
    step = check_all_saved(run, 2)
    for rank in range(2):
        check_no_step_lost(run, step, rank)


def test_an_inner_srun_that_slurm_signals_ends_its_step_and_the_older_checkpoint_stands(new_stage: Callable[..., Stage]) -> None:
    """The same on linuxproc: srun takes even a blocked SIGTERM and soon kills its tasks; requeued, nothing half left."""
    stage = new_stage(nodes=1, proctrack="linuxproc")
    # From the second one on no save can be over before srun has ended its tasks.
    inner = ["srun", "--overlap", "-n2", PYTHON, OWN_TOY, "--no-torch", *WORDS, "--faults-from", "2", "--save-ms", "30000"]
    run = stage.submit("-p", "low", "-n2", srun="srun -n1", supervise="--every-steps 50", command=inner, script=TRAPPED)
    stage.started(ranks=2)
    run.wait_event("commit")
    run.preempt()
    check_requeued(run, code=76)
    assert [entry for entry in run.events("warning", attempt=0) if "the command starts a further srun" in entry["text"]]
    check_ranks(run, range(2))
    check_goes_on_after(run, run.committed(attempt=0)[-1])


def test_a_torchrun_that_waits_for_another_nodes_at_the_end_holds_nobody_up(new_stage: Callable[..., Stage]) -> None:
    """Field case 61: one rank hangs on its way out, and the other node's agent would wait 300 s for that in its exit barrier."""
    stage = new_stage(nodes=2, proctrack="linuxproc")
    endpoint = f"127.0.0.1:{free_port()}"
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    words = [OWN_TOY, "--no-torch", *WORDS, "--faulty-rank", "1", "--hang-at-exit"]
    command = [str(BIN / "torchrun"), *rendezvous, "--rdzv-id", "lab", "--", *words]
    run = stage.submit("--ntasks-per-node=1", "-p", "low", command=command, script=TRAPPED, nodes=2)
    for rank in range(2):
        run.wait_steps(3, rank, timeout=START_S)
    run.preempt()
    check_step_requeued(run, range(2))
    check_all_saved(run, 2)
