"""Row 7 of hangs: real processes that stand still, each in its own way; named rightly, with their stacks in the journal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_supervisor.watches import standing

from tests.support.run import Run, supervised
from tests.support.tasks_stage import KILL_WAIT, step_of

TRAINER = Path(__file__).resolve().parents[1] / "support" / "toy_hang.py"
FLOOR = ("--hang-floor", "9s")
"""From 7 s on a rank stands still: not from less, as on a busy machine anybody may stand for some seconds."""


@contextmanager
def standing_still(files: Path, how: str, *options: str, ranks: int = 1, **env: str) -> Iterator[Run]:
    """A supervised trainer that will stand still."""
    command = [sys.executable, str(TRAINER), how]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(TRAINER), how]
    with supervised(files, command, *FLOOR, *options, env=env) as run:
        yield run


def hang_of(run: Run) -> dict[str, Any]:
    """The hang that was told, with what holds for each: numbers, a line on stderr, one word to the machine."""
    told = run.event("hang_suspected", bound_s=150)  # Two ranks that import torch at once may take a minute for it.
    assert told["stood_ms"] >= told["limit_ms"] >= told["floor_ms"] // 2
    assert run.warned(r"training seems to hang: no progress for .*; the stacks are in the journal")
    assert run.event("stalled")["kind"] == told["kind"]
    return told


def stacks_of(run: Run) -> dict[int, tuple[str, str]]:
    """By rank: who has told its stacks, and they."""
    run.event("stalled")  # It comes after them.
    return {line["rank"]: (line["by"], line["text"]) for line in run.events("stack")}


def without_py_spy(files: Path) -> dict[str, str]:
    """A PATH on which py-spy is one that may not look, as in most containers."""
    return py_spy(files, "echo 'Error: Permission denied' >&2; exit 1")


def py_spy(files: Path, words: str) -> dict[str, str]:
    """A PATH with this in the place of py-spy."""
    place = files / "bin"
    place.mkdir()
    script = place / "py-spy"
    script.write_text(f"#!/bin/sh\n{words}\n")
    script.chmod(0o755)
    return {"PATH": f"{place}:{os.environ['PATH']}"}


def test_a_trainer_that_waits_for_ever_makes_no_progress_while_its_listener_answers(tmp_path: Path) -> None:
    """Named so, with the line of Python that it stands in."""
    with standing_still(tmp_path, "wait", **without_py_spy(tmp_path)) as run:
        told = hang_of(run)
        assert (told["kind"], told["ranks"]) == (standing.NO_PROGRESS, [0])
        assert "rank 0 at step 40 answers, and makes no progress: its main thread waits" in told["text"]
        by, text = stacks_of(run)[0]
        assert by == "faulthandler"
        assert text.startswith("Current thread")
        assert "toy_hang.py" in text.split("Thread 0x")[0]
        assert "in stand" in text


def test_a_loop_in_python_is_told_from_a_wait(tmp_path: Path) -> None:
    """The listener answers, and the main thread has a CPU."""
    with standing_still(tmp_path, "loop", **without_py_spy(tmp_path)) as run:
        told = hang_of(run)
        assert told["kind"] == standing.NO_PROGRESS
        assert "its main thread computes" in told["text"]
        assert "in lost_in_python" in stacks_of(run)[0][1]


def test_c_code_that_keeps_the_interpreter_is_named_and_its_stack_is_told_all_the_same(tmp_path: Path) -> None:
    """The listener is silent, the process lives and uses a CPU; faulthandler's handler is C."""
    with standing_still(tmp_path, "gil", **without_py_spy(tmp_path)) as run:
        told = hang_of(run)
        assert told["kind"] == standing.IN_C
        assert "C code has the interpreter" in told["text"]
        assert "computes" in told["text"]
        by, text = stacks_of(run)[0]
        assert (by, "in lost_in_c" in text) == ("faulthandler", True)


def test_a_stopped_trainer_is_named_told_once_and_found_to_go_on(tmp_path: Path) -> None:
    """SIGSTOP: the kernel says where its threads are. After SIGCONT the hang is over, and training has lost nothing."""
    with standing_still(tmp_path, "never", **without_py_spy(tmp_path)) as run:
        run.said(r"^step 45 ")
        pid = run.toy_pid()
        os.kill(pid, signal.SIGSTOP)
        told = hang_of(run)
        assert told["kind"] == standing.STOPPED
        assert "rank 0" in told["text"]
        assert "is stopped (SIGSTOP)" in told["text"]
        by, text = stacks_of(run)[0]
        assert (by, f"thread {pid} " in text, "state T" in text) == ("the kernel", True, True)
        os.kill(pid, signal.SIGCONT)
        over = run.event("hang_over")
        assert (over["rank"], over["rank_pid"]) == (0, pid)
        assert len(run.events("hang_suspected")) == 1
        reached = over["step"]
        run.said(rf"^step {reached + 20} ")


def test_a_deadlocked_collective_names_both_ranks_and_shows_who_is_not_in_it(tmp_path: Path) -> None:
    """gloo, two ranks, one of them elsewhere: no progress of either; the stacks tell the difference."""
    with standing_still(tmp_path, "collective", ranks=2, **without_py_spy(tmp_path)) as run:
        told = hang_of(run)
        assert (told["kind"], told["ranks"]) == (standing.NO_PROGRESS, [0, 1])
        stacks = stacks_of(run)
        assert "all_reduce" in stacks[0][1]
        assert "all_reduce" not in stacks[1][1]
        assert "in lost_in_a_collective" in stacks[1][1]
        assert len(run.events("hang_suspected")) == 1


def test_a_stopped_rank_is_named_as_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    """Both make no progress; the kind of the hang is what rank 1 is in, and it comes first."""
    with standing_still(tmp_path, "collective", ranks=2, **without_py_spy(tmp_path)) as run:
        run.said(r"^step 39 rank 1", bound_s=150)
        pid = next(line["rank_pid"] for line in run.events("rank_hello") if line["rank"] == 1)
        os.kill(pid, signal.SIGSTOP)
        told = hang_of(run)
        assert (told["kind"], told["ranks"]) == (standing.STOPPED, [0, 1])
        assert [(way["rank"], way["kind"]) for way in told["ways"]] == [(1, standing.STOPPED), (0, standing.NO_PROGRESS)]


def test_py_spy_tells_the_stacks_where_it_can(tmp_path: Path) -> None:
    """It is asked for the process, and not to stop it; nothing is sent to the process then."""
    spy = py_spy(tmp_path, """test "$1 $2 $3" = "dump --nonblocking --pid" && echo "Thread $4 (active): 'MainThread'" """)
    with standing_still(tmp_path, "wait", **spy) as run:
        hang_of(run)
        assert stacks_of(run) == {0: ("py-spy", f"Thread {run.toy_pid()} (active): 'MainThread'\n")}


def test_a_rank_of_another_task_is_judged_there_and_told_where_all_comes_together(tmp_path: Path) -> None:
    """Task 1's supervisor has the stacks in its journal; the coordinator's machine is told, and task 0's stderr says it."""
    with step_of(tmp_path, 2, options=(*KILL_WAIT, *FLOOR), env=without_py_spy(tmp_path)) as step:
        step.trained(least=200)
        os.kill(step.pid(1), signal.SIGSTOP)
        told = step.event("stalled", task=0, of_task=1)
        assert (told["kind"], told["ranks"]) == (standing.STOPPED, [1])
        assert step[0].warned(r"task 1: training seems to hang: .*rank 1 .* is stopped \(SIGSTOP\)")
        assert [line["task"] for line in step.events("hang_suspected")] == [1]
        assert [(line["task"], line["rank"]) for line in step.events("stack")] == [(1, 1)]
        os.kill(step.pid(1), signal.SIGCONT)
        step.event("hang_over", task=1)


def test_nobody_looks_out_where_the_floor_is_off(tmp_path: Path) -> None:
    """The trainer is not asked for its progress either."""
    with supervised(tmp_path, [sys.executable, str(TRAINER), "wait"], "--hang-floor", "off") as run:
        run.said(r"^step 39 ")
        environment = Path(f"/proc/{run.toy_pid()}/environ").read_bytes().split(b"\0")
        assert b"CKPT_SUPERVISE_PROGRESS=0" in environment


def test_a_hang_restarts_the_command_in_place_where_that_is_wanted(tmp_path: Path) -> None:
    """--on-hang restart: the next start is as good as new, and its own hang is told again."""
    with standing_still(tmp_path, "wait", "--on-hang", "restart", "--restarts", "1", **without_py_spy(tmp_path)) as run:
        hang_of(run)
        run.event("command_started", restart=1)
        assert run.event("rank_hello", bound_s=90)
