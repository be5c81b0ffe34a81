"""Training that has come to its end is not trained again when its job is requeued all the same; nothing else is stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.config import Options, read_options
from ckpt_supervisor.start import finished
from ckpt_supervisor.start.startup import Job, job_of

from tests.support.run import Run, supervised, toy
from tests.support.tasks_stage import JOB, KILL_WAIT, task_env

COMMAND = toy("--steps", 4)


def options_of(directory: Path, *more: str, command: list[str] | None = None) -> Options:
    """Options of a run in this directory."""
    return read_options(["--dir", str(directory), *more, "--", *(command or COMMAND)], {})


def job(attempt: int = 0, **more: str) -> Job:
    """Job 77, step 0, in this attempt, unless told otherwise."""
    return job_of(SlurmEnv.from_environ(task_env(0, 1, **{"SLURM_RESTART_COUNT": str(attempt), **more})))


def write(directory: Path, step: int | None = 4, attempt: int = 0, **more: str) -> None:
    """As at the end of a run of that job, good if there is a step."""
    directory.mkdir(exist_ok=True)
    finished.note(lambda work: work(), options_of(directory), job(attempt, **more), 3, step)


def test_the_record_says_which_training_it_was_and_where_it_ended(tmp_path: Path) -> None:
    """Whole in one step, readable by a script; the command's own digest tells it from another one."""
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    said = json.loads(path.read_text())
    assert path.name == "done.json"
    assert said.pop("ended_at").endswith("Z")
    digest = finished.digest(COMMAND)
    assert said == {"format": 1, "job": JOB, "attempt": 0, "step_id": "0", "epoch": 3, "step": 4, "command": digest}


def test_only_the_same_step_of_the_same_job_with_the_same_command_is_not_started(tmp_path: Path) -> None:
    """In a later attempt. More steps may be wanted by anybody else, and by whoever says so."""
    write(tmp_path, attempt=1)
    line = finished.word(options_of(tmp_path), job(2))
    assert "this job's training came to its end at" in line
    assert "(attempt 1, step 4); not started again; --train-again starts it all the same" in line
    others = (job(2, SLURM_JOB_ID="78"), job(2, SLURM_STEP_ID="1"), job_of(None))
    assert [finished.word(options_of(tmp_path), other) for other in others] == ["", "", ""]
    assert finished.word(options_of(tmp_path), job(2)) == line, "they leave the record as it is"


@pytest.mark.parametrize("how", ["--train-again", "another command", "the same attempt", "no number"])
def test_a_step_that_is_trained_again_loses_its_record(tmp_path: Path, how: str) -> None:
    """Its next interruption is no end. A restart count that is no number decides nothing (field case 54)."""
    write(tmp_path, attempt=1)
    command = toy("--steps", 9) if how == "another command" else None
    more = ("--train-again",) if how == "--train-again" else ()
    now = {"the same attempt": job(1), "no number": job(SLURM_RESTART_COUNT="abc")}.get(how, job(2))
    assert finished.word(options_of(tmp_path, *more, command=command), now) == ""
    assert not (tmp_path / "done.json").exists()


def test_the_end_of_another_run_replaces_the_record_or_takes_it_away(tmp_path: Path) -> None:
    """A good end replaces it; another job that has trained on and was interrupted removes it, this one's next step does not."""
    write(tmp_path)
    write(tmp_path, None, SLURM_STEP_ID="1")
    assert finished.word(options_of(tmp_path), job(1)) != ""
    write(tmp_path, 9, SLURM_JOB_ID="78")
    found = finished.read(tmp_path)
    assert found is not None
    assert (found.job, found.step) == ("78", 9)
    write(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    finished.note(lambda work: work(), options_of(tmp_path), job_of(None), 3, 4)
    assert list(tmp_path.iterdir()) == [], "without Slurm nobody starts anything by himself"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\0" * 99, b'{"format": 1}', b'{"format": 2}', b"[" * 9_999, b"\xff"])
def test_a_record_that_cannot_be_read_stops_nothing(tmp_path: Path, content: bytes) -> None:
    """Training too much costs time; not training would cost the run."""
    (tmp_path / "done.json").write_bytes(content)
    assert finished.word(options_of(tmp_path), job(5)) == ""


def test_a_record_that_is_a_link_or_no_file_is_not_followed(tmp_path: Path) -> None:
    """Nor does one that cannot be written stop anything."""
    write(tmp_path / "other")
    (tmp_path / "done.json").symlink_to(tmp_path / "other" / "done.json")
    assert finished.read(tmp_path) is None
    (tmp_path / "done.json").unlink()
    (tmp_path / "done.json").mkdir()
    assert finished.read(tmp_path) is None
    write(tmp_path)
    assert finished.read(tmp_path) is None


# --- whole starts --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def start(files: Path, attempt: int, *options: str, command: list[str] | None = None, **more: str) -> Iterator[Run]:
    """A start of the job's step 0 in this attempt."""
    env = task_env(0, 1, SLURM_RESTART_COUNT=str(attempt), CKPT_SUPERVISE_STATE=str(files / "state"), **more)
    with supervised(files, command or COMMAND, *KILL_WAIT, *options, env=env) as run:
        yield run


def test_a_requeued_job_that_is_done_starts_nothing_and_ends_with_0(tmp_path: Path) -> None:
    """One line; no command, no journal, and nobody takes the directory. With --train-again it trains."""
    place = tmp_path / "ckpt"
    write(place)
    with start(tmp_path, 1) as run:
        assert run.code() == 0, run.story()
        assert run.err.count("\n") == 1
        assert "this job's training came to its end" in run.err
        assert [path.name for path in place.iterdir()] == ["done.json"]
        assert run.out == ""
    with start(tmp_path, 2, "--train-again") as run:
        assert run.code() == 0, run.story()
        assert len(run.events("command_started")) == 1


def test_all_tasks_of_a_step_that_is_done_end_with_0(tmp_path: Path) -> None:
    """Task 0 decides, and leaves word for those that come later or are waiting for it already."""
    place = tmp_path / "ckpt"
    write(place)
    with contextlib.ExitStack() as stack:
        runs = []
        for task in (2, 1, 0):
            env = {"SLURM_RESTART_COUNT": "1", "CKPT_SUPERVISE_STATE": str(tmp_path / "state")}
            env |= {"SLURM_SRUN_COMM_HOST": "node1", "SLURM_SRUN_COMM_PORT": "4711"}
            run = supervised(tmp_path / str(task), COMMAND, *KILL_WAIT, env=task_env(task, 3, **env), directory=place)
            runs.append(stack.enter_context(run))
        assert [run.code() for run in runs] == [0, 0, 0], [run.err for run in runs]
        assert all("this job's training came to its end" in run.err for run in runs)
        assert not any(run.events("command_started") for run in runs)


LAST_WORDS = """
import ckpt_client as ckpt, pathlib, sys, time
for i in ckpt.steps(3, save=print, load=print): pass
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)
"""


def test_the_record_is_written_only_after_an_end_that_nobody_has_asked_for(tmp_path: Path) -> None:
    """Field case 65: not after an interruption, nor a failure, nor an end with 0 while a notice is in force."""
    done = tmp_path / "ckpt" / "done.json"
    with start(tmp_path, 0, command=toy("--steps", 1_000_000, "--log", tmp_path / "log")) as run:
        run.event("rank_hello")
        run.signal(signal.SIGTERM)
        assert run.code() in (75, 76), run.story()
        assert not done.exists()
    with start(tmp_path, 1, command=[sys.executable, "-c", "raise SystemExit(3)"]) as run:
        assert run.code() == 3, run.story()
        assert not done.exists()
    go = tmp_path / "go"
    with start(tmp_path, 2, command=[sys.executable, "-c", LAST_WORDS, str(go)]) as run:
        run.event("rank_finished")
        run.signal(signal.SIGTERM)
        run.event("notice")
        go.touch()
        assert run.code() == 0, run.story()
        assert not done.exists()
    with start(tmp_path, 3) as run:
        assert run.code() == 0, run.story()
    found = finished.read(tmp_path / "ckpt")
    assert found is not None
    assert (found.job, found.attempt, found.step_id) == (JOB, 3, "0")
    with start(tmp_path, 4) as run:
        assert run.code() == 0, run.story()
        assert run.events("command_started") == []
