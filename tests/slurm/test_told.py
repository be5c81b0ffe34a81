"""--on-event and --metrics-file in a job that Slurm preempts: it is marked as preempted before it is ended, and comes back.

Owns: the recipe of docs/notifications.md on a real Slurm. Must not: test which events are told (tests/unit/test_notify.py).
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor.watches.notify import NO_TIME

from tests.support.run import eventually
from tests.support.slurm_checks import BOTH, check_no_step_lost, check_out_before_the_kill, check_requeued, check_saved
from tests.support.slurm_stage import TRAPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

MARK = Path(__file__).resolve().parents[2] / "deploy" / "notify" / "mark_preempted.py"


def untold(run: Run) -> set[str]:
    """What there was no time for on a busy node. A command that was ended by a signal is none of that."""
    failed = {line["of_event"] for line in run.events("event_command_failed") if "did not end within" in line["reason"]}
    dropped = [line["events"] for line in run.events("event_command_dropped") if line["reason"] == NO_TIME]
    return failed.union(*dropped)


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_preempted_job_is_marked_so_and_runs_again(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Slurm's TERM to every process of the step ends no command of --on-event, and none delays the way out beyond the kill."""
    stage = new_stage(proctrack=proctrack, cred_expire=60)  # Its second run begins when the first has been looked at.
    state = stage.lab.root / "tracking"
    command = f"{sys.executable} {MARK} --state {state}; echo $CKPT_SUPERVISE_EVENT >> {state}/told"
    options = f"--on-event {shlex.quote(command)} --metrics-file {state}/"
    state.mkdir(mode=0o777)
    state.chmod(0o777)
    run = stage.submit("-p", "low", supervise=options, script=TRAPPED)
    stage.started()
    run.preempt()
    check_requeued(run)
    step = check_saved(run)
    check_out_before_the_kill(run)
    told, missed = (state / "told").read_text().split(), untold(run)
    expected = ["command_started", "commit", "leaving", "requeue", "exit"]
    assert missed < {*expected, "notice"}
    assert "command_started" not in missed, "there was time for that"
    # A command that did not end in time may have come as far as its last word.
    assert [name for name in told if name not in {"notice", *missed}] == [name for name in expected if name not in missed]
    # Of notices more than one: the cause is known when Slurm has been asked.
    assert {"notice", "leaving", "exit"} - missed <= {*told}
    assert json.loads((state / "run-state.json").read_text())["state"] == "preempted"
    assert "ckpt_supervise_exit_code" in next(state.glob("*.prom")).read_text()
    stage.lab.release_requeued(run.jobid)
    check_no_step_lost(run, step)
    marked = lambda: json.loads((state / "run-state.json").read_text())  # noqa: E731
    eventually(lambda: marked()["state"] == "running", "running again")
    assert [entry["state"] for entry in marked()["history"]] == ["running", "stopping", "preempted", "running"]
