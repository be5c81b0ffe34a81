"""A kill for lack of memory is named, with the limit that was too small; other kills are not blamed on the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_supervisor.linux.oom_kills import Kills, Struck, memory_text

from tests.support.kernel_memory import Kernel, kernel, limited

both = pytest.mark.parametrize("version", [1, 2])
JOB, STEP, TASK = "slurm/job_5", "slurm/job_5/step_0", "slurm/job_5/step_0/task_0"
GIB = 1 << 30


@pytest.fixture
def step(tmp_path: Path, version: int) -> Kernel:
    """A step with 4 GiB in a job with 6."""
    made = kernel(tmp_path, version, f"/{TASK}")
    limited(made, STEP, 4 * GIB, 0)
    limited(made, JOB, 6 * GIB, 0)
    return made


def marked(made: Kernel) -> Kills:
    """As at the command's start."""
    kills = Kills(made.proc)
    kills.mark()
    return kills


@both
def test_a_kill_is_named_with_the_limit_that_was_reached(step: Kernel) -> None:
    """The count of our own cgroup moves, and that of the limit above it."""
    step.kills(TASK, 3)
    step.hits(JOB, 7)
    kills = marked(step)
    assert kills.struck() is None, "what was before the start is not this one's"
    step.kills(TASK, 4)
    step.hits(STEP, 1)
    assert kills.struck() == Struck(1, f"/{STEP}", 4 * GIB)
    assert kills.why(137, "step", is_killed=False) == (
        f"the kernel killed a process of this step for lack of memory (limit 4.0 GiB of /{STEP}, 1 oom kill)"
    )


@both
def test_a_rank_killed_below_a_launcher_counts_as_well(step: Kernel) -> None:
    """torchrun leaves with 1 when one of its workers was killed; a command that ended well needs no reason."""
    kills = marked(step)
    step.kills(TASK, 2)
    step.hits(STEP, 1)
    why = (
        f"since its start the kernel has killed processes of this step for lack of memory (limit 4.0 GiB of /{STEP}, 2 oom kills)"
    )
    assert kills.why(1, "step", is_killed=False) == why
    assert kills.why(137, "step", is_killed=True) == why, "the SIGKILL may be our own"
    assert kills.why(0, "step", is_killed=False) == ""


@both
def test_without_a_limit_reached_it_was_the_node(step: Kernel) -> None:
    """The kernel counts in the victim's cgroup also when it is the node that is short."""
    kills = marked(step)
    step.kills(TASK, 1)
    assert "no limit that can be seen from here" in kills.why(137, "step", is_killed=False)


@both
def test_a_limit_that_was_reached_a_moment_before_the_count_is_found(step: Kernel) -> None:
    """The command is started first; the kernel counts the hit, we count, and the kill comes last."""
    step.hits(STEP, 1)
    kills = marked(step)
    step.kills(TASK, 1)
    assert kills.struck() == Struck(1, f"/{STEP}", 4 * GIB)


def test_version_1_may_count_no_hits_and_its_peak_stands_in(tmp_path: Path) -> None:
    """Linux 6.18 with a limit of memory and swap together: both counts of hits stay 0."""
    made = kernel(tmp_path, 1, f"/{TASK}")
    limited(made, STEP, 4 * GIB, 0)
    made.put(TASK, memory__max_usage_in_bytes=4 * GIB - 90_000)
    made.put(STEP, memory__max_usage_in_bytes=4 * GIB - 90_000)
    kills = marked(made)
    made.kills(TASK, 1)
    assert kills.struck() == Struck(1, f"/{STEP}", 4 * GIB)


@both
def test_a_kill_in_another_step_or_of_another_kind_is_not_ours(step: Kernel) -> None:
    """kill -9, a sibling's oom kill, and the node's count that others have moved."""
    kills = marked(step)
    step.kills(JOB, 5, hits=5)
    step.node(32_000_000, 30_000_000, kills=5)
    assert kills.struck() is None
    assert kills.why(137, "step", is_killed=False) == ""


def test_where_no_cgroup_counts_the_node_does_and_it_is_probable_only(tmp_path: Path) -> None:
    """Then the count says that somebody was killed, and SIGKILL that it may have been this one."""
    made = kernel(tmp_path, 2, "/")
    for file in (tmp_path / "cgroup").iterdir():
        file.unlink()
    kills = marked(made)
    assert kills.why(137, "run", is_killed=False) == ""
    made.node(32_000_000, 30_000_000, kills=1)
    assert kills.why(137, "run", is_killed=False).startswith("probably the kernel killed it for lack of memory")
    assert kills.why(1, "run", is_killed=False) == kills.why(137, "run", is_killed=True) == ""
    assert kills.struck() == Struck(1, is_ours=False)


def test_where_nothing_is_counted_nothing_is_said(tmp_path: Path) -> None:
    """A /proc that is not there."""
    kills = Kills(str(tmp_path))
    kills.mark()
    assert kills.why(137, "run", is_killed=False) == ""


@both
def test_a_new_start_counts_from_zero(step: Kernel) -> None:
    """A start in place after a kill: the next failure has a reason of its own."""
    kills = marked(step)
    step.kills(TASK, 1, hits=1)
    assert kills.struck() is not None
    kills.mark()
    assert kills.struck() is None


def test_memory_is_written_as_slurm_counts_it() -> None:
    """--mem=4G is 4 GiB."""
    assert [memory_text(n) for n in (4 * GIB, 3 << 40, 300 << 20, 5_000)] == ["4.0 GiB", "3.0 TiB", "300.0 MiB", "4 KiB"]
