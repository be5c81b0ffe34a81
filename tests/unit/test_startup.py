"""Which job this is, and the command's line with the resume argument."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest
from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.config import read_options
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.policies import policy_of
from ckpt_supervisor.start.earlier import last_failure
from ckpt_supervisor.start.startup import Job, command_line, explicit_value, job_of

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
    """The argument is there once, in the form the user chose; whose value it is has been decided before (field case 99)."""
    assert command_line(command.split(), "--resume-from", PATH) == expected.split()


def test_nothing_is_appended_on_the_first_run() -> None:
    """With no checkpoint, or no --resume-arg, the command is what the user wrote (field case 59)."""
    command = ["python", "t.py", "--resume-from", "own start", "--x", ""]
    assert command_line(command, "--resume-from", "") == command
    assert command_line(command, "", PATH) == command
    assert command_line(command, "", "") == command


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("python t.py", None),
        ("python t.py --resume-from old --lr 3", "old"),
        ("python t.py --resume-from=old", "old"),
        ("python t.py --resume-from a --resume-from=b", "b"),
        ("python t.py --resume-from=a --resume-from b", "b"),
        ("python t.py --resume-from", None),
        ("python t.py --resume-from --lr 3", None),
        ("python t.py --resume-from=", None),
        ("python t.py --resume-from-file x", None),
    ],
)
def test_the_commands_own_value_is_the_last_one_it_gives(command: str, value: str | None) -> None:
    """As argparse reads it; a flag without a value names nothing (field case 99)."""
    assert explicit_value(command.split(), "--resume-from") == value
    assert explicit_value(command.split(), "") is None


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


def test_a_step_has_as_many_supervisors_as_srun_has_tasks() -> None:
    """A batch script speaks of the whole job's tasks, and is alone."""
    assert job_in({}).tasks == 1
    assert job_in(SRUN).tasks == 1
    assert job_in({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}).tasks == 1
    assert job_in({**SRUN, "SLURM_NTASKS": "4"}).tasks == 4


def heir_turn(task: int, **env: str) -> int:
    """How long the supervisor of this task waits for its turn when the coordinator is lost."""
    job = job_in({**SRUN, "SLURM_PROCID": str(task), "SLURM_NTASKS": "256", **env})
    options = read_options(["--", "x"], {})
    launch = Launch(options, {}, job, 1, None, None, None, None)  # type: ignore[arg-type]
    return dataclasses.replace(policy_of(launch, can_look=True), heir=task).heir_waits_ms


def test_heirs_take_turns_by_node() -> None:
    """With a node of 64 tasks lost the first one of the next node waits a second, not 64; without nodes one for each task."""
    assert heir_turn(64, SLURM_NODEID="1", SLURM_LOCALID="0") == 1_000
    assert heir_turn(65, SLURM_NODEID="1", SLURM_LOCALID="1") == 1_300
    assert heir_turn(3, SLURM_NODEID="0", SLURM_LOCALID="3") == 900
    assert heir_turn(3) == 3_000


def test_why_the_attempt_before_could_not_save_is_in_the_coordinators_journal(tmp_path: Path) -> None:
    """The other tasks' journals of the same epoch decide nothing."""
    (tmp_path / "journal").mkdir()
    lines = [{"event": "notice", "cause": "preempted"}, {"event": "leaving", "outcome": "stale", "reason": "disk full"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "journal" / "77-0-3-1-0.jsonl").write_text(text)
    (tmp_path / "journal" / "77-0-3-1-1.jsonl").write_text('{"event": "coordinator_lost"}\n')
    assert "could not save (preempted): disk full" in last_failure(tmp_path, "77", 2)
