"""The command of --resubmit as a real process: what it finds, how long it may take, and what of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.config import read_options
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.processes import resubmit, shell_command
from ckpt_supervisor.start.startup import Job

from tests.support.run import environment, eventually, is_alive
from tests.support.tasks_stage import task_env

UNUSED: Any = None


class Stage:
    """A launch whose command of --resubmit is this one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.claims = Claims()

    def run(self, command: str, timeout_s: float = 30.0, env: Mapping[str, str] | None = None) -> resubmit.Answer:
        """Run it once."""
        options = read_options(["--dir", str(self.directory / "ckpt"), "--resubmit", command, "--", "t"], {})
        base = environment({"PATH": os.environ["PATH"], "OUT": str(self.directory), **(env or {})})
        job = Job("77_3", 1, "0", 0, None)
        launch = Launch(options, base, job, 1, UNUSED, UNUSED, self.claims, UNUSED)
        return resubmit.run(launch, "Slurm refused the requeue", timeout_s)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage on which nothing is waited for in the end."""
    made = Stage(tmp_path)
    yield made
    assert made.claims.claimed() == frozenset()


def test_it_finds_the_job_the_directory_and_the_reason(stage: Stage) -> None:
    """In its environment; the beginning of what it prints, on both outputs, is the answer."""
    told = stage.run('echo "$CKPT_SUPERVISE_JOB|$CKPT_SUPERVISE_DIR|$CKPT_SUPERVISE_REASON"; echo more >&2')
    assert told == (True, f"77_3|{stage.directory / 'ckpt'}|Slurm refused the requeue\\nmore")


def test_what_slurm_says_of_the_step_is_not_handed_on(stage: Stage) -> None:
    """sbatch would give it to the new job, whose first start would take itself for a task of a step, and for a restart."""
    more = {"SLURM_LOCALID": "1", "CKPT_SUPERVISE_SOCKET": "ipc://x", "PATH": os.environ["PATH"]}
    step = task_env(3, 8, SLURM_RESTART_COUNT="4", SLURM_SRUN_COMM_PORT="7", **more)
    told = stage.run("env | grep -E '^(SLURM|CKPT)_' | cut -d= -f1 | sort | tr '\\n' ' '", env=step)
    assert [name for name in told.said.split() if name != "CKPT_SUPERVISE_STATE"] == [
        "CKPT_SUPERVISE_DIR", "CKPT_SUPERVISE_JOB", "CKPT_SUPERVISE_REASON", "SLURM_JOB_ID", "SLURM_NTASKS",
    ]  # fmt: skip
    new = {"CKPT_SUPERVISE_DIR": "d", "CKPT_SUPERVISE_JOB": "77", "CKPT_SUPERVISE_REASON": "r"}
    assert read_options(["--", "t"], new).dir == Path("d").absolute(), "a supervisor in the new job takes no offence at them"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo sbatch: error: invalid account; exit 1", "it ended with 1: sbatch: error: invalid account"),
        ("exit 9", "it ended with 9"),
        ("kill -KILL $$", "it ended with 137"),
        ("no-such-command-at-all 2>/dev/null", "it ended with 127"),
    ],
)
def test_what_fails_is_told_with_its_status_and_its_words(stage: Stage, command: str, said: str) -> None:
    """Anything but 0 means that the job has not been brought back."""
    assert stage.run(command) == (False, said)


def test_what_takes_too_long_is_killed_with_everything_below_it(stage: Stage) -> None:
    """A controller that does not answer must not hold up the end of the step, nor leave anything behind."""
    told = stage.run('echo began; sleep 1000 & echo $! > "$OUT/pid"; wait', timeout_s=5.0)
    assert not told.accepted
    assert re.fullmatch(r"it did not end within [\d.]+ s and was killed: began", told.said)
    pid = int((stage.directory / "pid").read_text())
    eventually(lambda: not is_alive(pid), "the end of what it had started")


def test_its_own_end_counts_and_not_that_of_what_it_leaves_behind(stage: Stage) -> None:
    """Something in the background that holds its output open."""
    told = stage.run('sleep 1000 & echo $! > "$OUT/pid"; echo done', timeout_s=60.0)
    try:
        assert told == (True, "done")
    finally:
        os.kill(int((stage.directory / "pid").read_text()), signal.SIGKILL)


def test_a_flood_of_output_is_cut_and_does_not_block_it(stage: Stage) -> None:
    """The first 300 characters, as one line, whatever is in it."""
    words = f"{sys.executable} -c \"import sys; sys.stdout.buffer.write(b'\\x1b[31m\\xff' + b'x' * 5_000_000)\""
    told = stage.run(words)
    assert told.accepted
    assert len(told.said) == shell_command.TEXT_CHARS_MAX
    assert told.said.isprintable()


def test_a_flood_without_an_end_is_killed_when_its_time_is_over(stage: Stage) -> None:
    """There is always something to read: its time is looked at all the same."""
    told = stage.run("exec yes", timeout_s=1.0)
    assert re.match(r"it did not end within [\d.]+ s and was killed", told.said)


def test_what_it_starts_is_not_ended_by_a_broadcast_either(stage: Stage) -> None:
    """sbatch below a shell: dash gives its children an empty signal mask."""
    told = stage.run("/bin/sh -c 'kill -TERM $$; kill -USR1 $$; echo submitted'; exit $?")
    assert told == (True, "submitted")


def test_a_broadcast_to_the_step_does_not_end_it(stage: Stage) -> None:
    """As scontrol it is a process of the step: with proctrack/linuxproc it gets the SIGTERM too."""
    assert stage.run("kill -TERM $$; kill -USR1 $$; kill -INT $$; echo submitted") == (True, "submitted")


def test_the_end_of_training_is_not_its_end(stage: Stage) -> None:
    """sbatch is below the shell, and at work for us: what is left of training is killed while it is, and it goes on."""
    os.mkfifo(stage.directory / "answer")
    answer = os.open(stage.directory / "answer", os.O_RDWR)  # Neither end is waited for, whoever has died.
    answers: list[resubmit.Answer] = []
    sbatch = 'sh -c \'echo $$ > "$OUT/new"; mv "$OUT/new" "$OUT/pid"; exec head -n 1 "$OUT/answer"\'; true'
    thread = threading.Thread(target=lambda: answers.append(stage.run(sbatch, timeout_s=120.0)))
    with subprocess.Popen(["sleep", "600"]) as training:
        thread.start()
        try:
            pid = eventually(lambda: written(stage.directory / "pid"), "the child of the shell")
            hit = children.end_all(signal.SIGKILL, stage.claims, lambda one: one not in (pid, training.pid))
            assert hit == [training.pid]
            assert pid not in children.descendants(stage.claims)
        finally:
            training.kill()
            os.write(answer, b"Submitted batch job 78\n")
            thread.join(60)
            os.close(answer)
    assert answers == [(True, "Submitted batch job 78")]


def written(path: Path) -> int:
    """The number in this file; 0 while it is not there."""
    return int(path.read_text()) if path.exists() else 0
