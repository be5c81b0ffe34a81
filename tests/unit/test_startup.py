"""Which job this is, the command's line with the resume argument, and the warnings at the start."""

from __future__ import annotations

import socket

import pytest
from ckpt_supervisor.slurm import SlurmEnv
from ckpt_supervisor.startup import Job, command_line, job_of, job_warnings, warnings

PATH = "/ckpt/step-000000009"
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def job_in(env: dict[str, str]) -> Job:
    """The job that this environment tells of."""
    return job_of(SlurmEnv.from_environ(env))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python t.py", f"python t.py --resume-from {PATH}"),
        ("python t.py --lr 3", f"python t.py --lr 3 --resume-from {PATH}"),
        ("python t.py --resume-from old --lr 3", f"python t.py --resume-from {PATH} --lr 3"),
        ("python t.py --resume-from=old --lr 3", f"python t.py --resume-from={PATH} --lr 3"),
        ("python t.py --resume-from", f"python t.py --resume-from {PATH}"),
        ("python t.py --resume-from --lr 3", f"python t.py --resume-from {PATH} --lr 3"),
        ("python t.py --resume-from a --resume-from=b", f"python t.py --resume-from {PATH} --resume-from={PATH}"),
        ("python t.py --resume-from-file x", f"python t.py --resume-from-file x --resume-from {PATH}"),
    ],
)
def test_the_path_is_appended_or_takes_the_place_of_the_users_own(command: str, expected: str) -> None:
    """The argument is there once, in the form the user chose, and a value of the user's never wins over the newest one."""
    assert command_line(command.split(), "--resume-from", PATH) == expected.split()


def test_nothing_is_appended_on_the_first_run() -> None:
    """With no checkpoint, or no --resume-arg, the command is what the user wrote (field case 59)."""
    command = ["python", "t.py", "--resume-from", "own start", "--x", ""]
    assert command_line(command, "--resume-from", "") == command
    assert command_line(command, "", PATH) == command
    assert command_line(command, "", "") == command


def test_a_resume_argument_of_any_form_is_taken() -> None:
    """What --resume-arg holds is a word, not a pattern."""
    assert command_line(["t", "ckpt.path=old"], "ckpt.path", PATH) == ["t", f"ckpt.path={PATH}"]
    assert command_line(["t", "ckptXpath=old"], "ckpt.path", PATH) == ["t", "ckptXpath=old", "ckpt.path", PATH]


def test_without_slurm_the_job_is_named_after_this_host() -> None:
    """Local runs on one machine are one job, attempt 0; environment variables that look like Slurm's need a job id."""
    assert job_in({"PATH": "/bin"}) == Job(f"local-{socket.gethostname()}", 0, "local", 0, None)


def test_under_srun_the_job_is_what_requeue_and_show_job_want() -> None:
    """Name, attempt and step come from Slurm's variables; an array element is named by array and index, never by its bare id."""
    job = job_in({**SRUN, "SLURM_RESTART_COUNT": "2"})
    assert (job.name, job.attempt, job.step_id, job.task) == ("77", 2, "3", 0)
    element = job_in({**SRUN, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"})
    assert element.name == "70_7"


def test_warnings_come_with_what_to_do_about_them() -> None:
    """Not under srun, and no scontrol: each is one line with the way out. Neither is said without Slurm."""
    assert warnings(job_in(SRUN), scontrol_found=True) == []
    assert warnings(job_in({}), scontrol_found=False) == []
    (no_srun,) = warnings(job_in({"SLURM_JOB_ID": "77"}), scontrol_found=True)
    assert "not started by srun" in no_srun
    assert "srun ckpt-supervise -- ..." in no_srun
    (no_scontrol,) = warnings(job_in(SRUN), scontrol_found=False)
    assert "scontrol was not found" in no_scontrol
    assert "--requeue exit:N" in no_scontrol
    (no_watch,) = warnings(job_in(SRUN), scontrol_found=True, watched=False)
    assert "--lead off" in no_watch
    assert "--signal=USR1@90" in no_watch
    assert len(warnings(job_in({"SLURM_JOB_ID": "77"}), scontrol_found=False, watched=False)) == 3


def test_a_job_that_cannot_come_back_is_told_about_at_the_start() -> None:
    """No batch job, or Requeue=0: said once, before hours of training; not if the user does not want a requeue anyway."""
    assert job_warnings(requeue=True, batch=True, wants_requeue=True) == []
    (no_batch,) = job_warnings(requeue=True, batch=False, wants_requeue=True)
    assert "no batch job" in no_batch
    (no_requeue,) = job_warnings(requeue=False, batch=True, wants_requeue=True)
    assert "submit it with --requeue" in no_requeue
    assert job_warnings(requeue=False, batch=False, wants_requeue=False) == []


def test_a_step_has_as_many_supervisors_as_srun_has_tasks() -> None:
    """A batch script speaks of the whole job's tasks, and is alone."""
    assert job_in({}).tasks == 1
    assert job_in(SRUN).tasks == 1
    assert job_in({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}).tasks == 1
    assert job_in({**SRUN, "SLURM_NTASKS": "4"}).tasks == 4
