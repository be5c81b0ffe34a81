"""What whole starts leave behind for the next ones to count on: attempts, budgets, and how long saves took."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from ckpt_supervisor import store
from ckpt_supervisor.core.history import History
from ckpt_supervisor.start import history

from tests.support.run import Run, supervised, toy
from tests.support.tasks_stage import JOB, KILL_WAIT, task_env

FOREVER = ("--steps", 1_000_000, "--step-ms", 20)
CRASH = """
import ckpt_client as ckpt, pathlib, time
def save(directory, step):
    (directory / "step.txt").write_text(str(step))
    return directory / "step.txt"
for i in ckpt.steps(20, save=save, load=lambda directory: None):
    while i == 7 and not pathlib.Path("ckpt/step-000000005").exists(): time.sleep(0.01)
    assert i < 7, "a bad batch"
"""


@contextlib.contextmanager
def attempt(files: Path, number: int, command: Sequence[str], *options: object, **env: str) -> Iterator[Run]:
    """One attempt of the job, without a Slurm to ask."""
    told = task_env(0, 1, **{"SLURM_RESTART_COUNT": str(number), "CKPT_SUPERVISE_STATE": str(files / "state"), **env})
    with supervised(files, command, *KILL_WAIT, *options, env=told) as run:
        yield run


def came_to(files: Path, epoch: int = 99) -> History:
    """What all these attempts came to."""
    return history.read(files / "ckpt", JOB, epoch)


def test_three_preemptions_within_seconds_of_the_start_cost_nothing(tmp_path: Path) -> None:
    """Row 4: before a rank attaches, with a save that fails, and right after a save. No budget is used, nothing is distrusted."""
    with attempt(tmp_path, 0, [sys.executable, "-c", "import time; time.sleep(600)"]) as run:
        run.event("command_started")
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
    with attempt(tmp_path, 1, toy(*FOREVER)) as run:
        run.event("rank_hello")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
    newest = run.steps()[-1]
    for number in (2, 3, 4):
        with attempt(tmp_path, number, toy(*FOREVER, "--fail-save")) as run:
            run.event("rank_hello")
            run.signal(signal.SIGTERM)
            assert run.code() in (75, 76), run.story()  # 75: before its first step there is nothing new to save.
            assert run.event("command_started")["resume_step"] == newest
            assert "passed over" not in run.err
    found = came_to(tmp_path)
    assert (found.timeouts, found.crashes, found.stalled, found.interruptions) == (0, 0, 0, 5)
    assert store.all_set_aside(tmp_path / "ckpt") == ()


def test_a_crash_at_the_same_step_in_every_run_is_no_progress_from_the_second_one_on(tmp_path: Path) -> None:
    """Row 3: the first one has saved step 5; those after it resume there, get to step 7, and commit nothing."""
    for number in range(4):
        with attempt(tmp_path, number, [sys.executable, "-c", CRASH], "--every-steps", "5") as run:
            assert run.code() == 1, run.story()
            assert run.steps() == [5]
        assert came_to(tmp_path).stalled == number
    assert came_to(tmp_path).interruptions == 0, "a failure is no interruption"


def test_how_long_saves_took_is_known_to_the_next_start_by_the_journal_or_the_manifests(tmp_path: Path) -> None:
    """From the commits of the journal, newest first; where journals are gone, from the checkpoints themselves."""
    with attempt(tmp_path, 0, toy("--steps", 60, "--save-ms", 30), "--every-steps", "20") as run:
        assert run.code() == 0, run.story()
    told = [(line["save_ms"], line["hold_ms"]) for line in run.events("commit")][::-1]
    found = came_to(tmp_path)
    assert (found.saves_ms, found.holds_ms) == (tuple(save for save, _ in told), tuple(hold for _, hold in told))
    assert all(hold >= save >= 30 for save, hold in told), told
    for path in run.journals():
        path.unlink()
    assert came_to(tmp_path).saves_ms == found.saves_ms


def test_a_killed_attempt_is_an_interruption_and_the_next_one_resumes(tmp_path: Path) -> None:
    """Field case 55: nobody had a word to say; the newest periodic checkpoint is passed on, and no job starts from scratch."""
    with attempt(tmp_path, 0, toy(*FOREVER), "--every-steps", "5") as run:
        run.event("round_committed")
        run.signal(signal.SIGKILL)
        run.process.wait()
    newest = run.steps()[-1]
    assert came_to(tmp_path).interruptions == 1
    assert came_to(tmp_path).stalled == 0
    with attempt(tmp_path, 1, toy("--steps", newest + 2)) as run:
        assert run.code() == 0, run.story()
        assert run.event("command_started")["resume_step"] == newest


def test_a_job_that_comes_back_after_a_month_on_another_node_resumes(tmp_path: Path) -> None:
    """Field case 51: held, and released when somebody saw it. Nothing depends on when the restart happens, and the mark of the
    attempt before, whose node nobody can look at any more, does not keep it out."""
    with attempt(tmp_path, 0, toy(*FOREVER)) as run:
        run.event("rank_hello")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
    newest, place = run.steps()[-1], tmp_path / "ckpt"
    holder = store.read_holder(place)
    assert holder is not None
    elsewhere = msgspec.structs.replace(holder, host="a-node-that-is-gone", pid_namespace=1)
    (place / store.ATTEMPT).write_bytes(msgspec.json.encode(elsewhere))
    for path in [place, *place.rglob("*")]:
        os.utime(path, (1, 1), follow_symlinks=False)
    with attempt(tmp_path, 1, toy("--steps", newest + 2)) as run:
        assert run.code() == 0, run.story()
        assert run.event("command_started")["resume_step"] == newest


def test_a_restart_count_that_is_no_number_is_0_and_decides_nothing(tmp_path: Path) -> None:
    """Field case 54: unset, empty, "0" and "abc" mean the first run; the directory says what there is to resume from."""
    newest = -1
    for count in ("", "0", "abc", "-1", "1e3"):
        with attempt(tmp_path, 0, toy(*FOREVER), SLURM_RESTART_COUNT=count) as run:
            assert run.event("command_started")["resume_step"] == newest
            run.event("rank_hello", attempt=0)
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            newest = run.steps()[-1]
    assert came_to(tmp_path).interruptions == 5
