"""The kernel's numbers of memory: versions 1 and 2, containers, what is missing; on directories that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_supervisor.linux import cgroups
from ckpt_supervisor.linux.cgroups import Level, Node

from tests.support.kernel_memory import Kernel, kernel, limited

GB = 10**9
STEP = {1: "/slurm/uid_0/job_5/step_0/task_0", 2: "/system.slice/n1_slurmstepd.scope/job_5/step_0/user/task_0"}
both = pytest.mark.parametrize("version", [1, 2])


@pytest.fixture
def step(tmp_path: Path, version: int) -> Kernel:
    """In a step of Slurm."""
    return kernel(tmp_path / "a kernel", version, STEP[version])


@both
def test_a_step_is_in_its_task_and_all_above(step: Kernel) -> None:
    """Our own cgroup first, each with its name, whatever else is mounted; a blank in the path of the mount is written \\040."""
    found = cgroups.levels(step.proc)
    names = [STEP[step.version].rsplit("/", up)[0] or "/" for up in range(len(step.names))]
    assert [level.name for level in found] == names
    assert [Path(level.path) for level in found] == [step.place(name) for name in step.names]


@both
def test_limits_and_use_are_read_at_each_level(step: Kernel) -> None:
    """No limit is None; what is cached and idle does not count; shared memory is in the statistics."""
    limited(step, step.names[1], 4 * GB, 3 * GB, cached=GB, shared=7)
    own, above, *_ = cgroups.levels(step.proc)
    assert cgroups.limit_of(own) is None or cgroups.limit_of(own) == 9_223_372_036_854_771_712
    assert cgroups.limit_of(above) == 4 * GB
    assert cgroups.used_of(above) == 2 * GB
    assert cgroups.used_of(above, enough=4 * GB) == 3 * GB, "below what matters the statistics are not read"
    assert cgroups.shared_of(above) == 7


@both
def test_kills_and_hits_are_counted(step: Kernel) -> None:
    """Of the process's own cgroup, and of the one whose limit could not be kept."""
    step.kills(step.names[0], 2)
    step.hits(step.names[2], 3)
    levels = cgroups.levels(step.proc)
    assert cgroups.kills_of(levels[0]) == 2
    assert cgroups.hits_of(levels[2]) == 3


def test_version_1_counts_hits_of_memory_and_swap_as_well(tmp_path: Path) -> None:
    """Where no swap is allowed both limits are the same, and the one of both is tried first."""
    made = kernel(tmp_path, 1, "/a")
    made.put("a", memory__memsw__failcnt=2)
    made.hits("a", 1)
    assert cgroups.hits_of(cgroups.levels(made.proc)[0]) == 3


@both
def test_a_container_may_have_its_own_cgroup_at_the_top(tmp_path: Path, version: int) -> None:
    """Without a cgroup namespace the name is the host's, and the mount begins there."""
    made = kernel(tmp_path, version, "/docker/abc/inner", mounted="/docker/abc")
    found = cgroups.levels(made.proc)
    assert [Path(level.path) for level in found] == [made.root / "cgroup" / "inner", made.root / "cgroup"]
    assert [level.name for level in found] == ["/docker/abc/inner", "/docker/abc"]


@both
@pytest.mark.parametrize("name", ["/elsewhere", "/../../other", "/gone/meanwhile"])
def test_a_cgroup_that_cannot_be_seen_leaves_those_above(tmp_path: Path, version: int, name: str) -> None:
    """Moved out of the namespace, or the mount shows another part: what is there counts, and nothing is followed upwards."""
    made = kernel(tmp_path, version, "/")
    (made.root / "proc" / "self" / "cgroup").write_text(f"4:memory:{name}\n" if version == 1 else f"0::{name}\n")
    assert [Path(level.path) for level in cgroups.levels(made.proc)] == [made.root / "cgroup"]


def test_version_2_without_the_controller_at_our_own_cgroup_counts_from_the_next_one(tmp_path: Path) -> None:
    """A cgroup has memory's files only where those above have switched it on for it."""
    made = kernel(tmp_path, 2, "/a/b")
    for file in made.place("a/b").iterdir():
        file.unlink()
    assert [level.name for level in cgroups.levels(made.proc)] == ["/a", "/"]


def test_version_1_above_one_that_does_not_count_what_is_below(tmp_path: Path) -> None:
    """Before Linux 5.11 there was memory.use_hierarchy 0."""
    made = kernel(tmp_path, 1, "/a/b")
    made.put("a", memory__use_hierarchy=0)
    assert [level.name for level in cgroups.levels(made.proc)] == ["/a/b"]


def test_version_2_before_events_were_counted_apart(tmp_path: Path) -> None:
    """Without memory.events.local, before Linux 5.3, those of memory.events stand in."""
    made = kernel(tmp_path, 2, "/a")
    made.place("a").joinpath("memory.events.local").unlink()
    made.kills("a", 1)
    made.put("a", memory__events="oom 4\noom_kill 1")
    assert cgroups.hits_of(cgroups.levels(made.proc)[0]) == 4


def test_nothing_to_be_read_is_none(tmp_path: Path) -> None:
    """No /proc, no hierarchy, files that have gone: never 0, never an error."""
    assert cgroups.levels(str(tmp_path)) == ()
    assert cgroups.node(str(tmp_path)) is None
    assert cgroups.node_kills(str(tmp_path)) is None
    gone = Level(str(tmp_path / "gone"), "/gone", 2)
    assert (cgroups.limit_of(gone), cgroups.used_of(gone), cgroups.kills_of(gone), cgroups.hits_of(gone)) == (None,) * 4
    assert cgroups.shared_of(gone) == 0


def test_the_node_has_its_total_and_what_is_available(tmp_path: Path) -> None:
    """In bytes, from kB."""
    made = kernel(tmp_path, 2, "/")
    made.node(1_000, 250, shared=3, kills=8)
    assert cgroups.node(made.proc) == Node(1_024_000, 256_000, 3_072)
    assert cgroups.node_kills(made.proc) == 8


def test_the_readers_understand_the_kernel_that_runs_here() -> None:
    """Whatever this machine has: the node has memory, and each cgroup that shows itself can be read."""
    node = cgroups.node()
    assert node is not None
    assert node.total > 64 << 20
    assert 0 < node.available <= node.total
    assert (cgroups.node_kills() or 0) >= 0
    for level in cgroups.levels():
        assert Path(level.path).is_dir()
        assert (cgroups.used_of(level) or 0) >= 0
        assert (cgroups.limit_of(level) or 1) > 0
