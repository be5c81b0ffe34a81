"""Labs for the tests in this directory, and everything about a failed test's jobs in its report.

Owns: whether real Slurm can be had here (if not, the tests are skipped with the reason; with CI=true in the environment that is
a failure), one throwaway Slurm for each test that asks, and its end.
Must not: share a lab between tests. One is up in half a second, and down with everything that its jobs left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import CHROOT_VARIABLE, Lab
from tests.support.slurm_stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"
FAST = {"kill_wait": 6, "grace": 15, "cred_expire": 5}
"""KillWait and GraceTime of most tests; and a requeued job comes back by itself after 6 s (docs/slurm.md section 6)."""


def _why_not() -> str:
    """Why there can be no lab here, or ""."""
    if os.geteuid() != 0:
        return "a throwaway Slurm needs root"
    if os.environ.get(CHROOT_VARIABLE):
        return ""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    return f"not installed: {', '.join(lacking)} (python deploy/lab/lab.py install)" if lacking else ""


@pytest.fixture(scope="session", autouse=True)
def slurm() -> None:
    """Slurm is here, or the test ends here."""
    reason = _why_not()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"no Slurm to test with: {reason}")
    if reason:
        pytest.skip(reason)


class Stages:
    """Makes stages; all of them end together."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.made: list[Stage] = []

    def __call__(self, nodes: int = 1, proctrack: str = "auto", **options: object) -> Stage:
        """Bring a lab up; the options are those of Lab.up."""
        root = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
        root.chmod(0o755)
        self.stack.callback(shutil.rmtree, root, ignore_errors=True)
        lab = self.stack.enter_context(Lab.up(root, nodes=nodes, proctrack=proctrack, **{**FAST, **options}))
        self.stack.callback(_no_more_slurmctld, lab)
        self.made.append(Stage(lab))
        return self.made[-1]


def _no_more_slurmctld(lab: Lab) -> None:
    """With the nodes gone an orderly end of slurmctld takes 3 s, and nobody needs its state any more."""
    with contextlib.suppress(AssertionError):  # a test may have killed it already
        lab.controller_kill()


@pytest.fixture
def new_stage(slurm: None) -> Iterator[Callable[..., Stage]]:
    """A new lab for this test, with as many nodes as it needs."""
    with contextlib.ExitStack() as stack:
        yield Stages(stack)


@pytest.fixture(scope="module")
def new_module_stage(slurm: None) -> Iterator[Callable[..., Stage]]:
    """A new lab for the tests of one module."""
    with contextlib.ExitStack() as stack:
        yield Stages(stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure without its jobs' output and journals says nothing: add them."""
    report = yield
    if report.failed and report.when != "teardown":
        for stages in getattr(item, "funcargs", {}).values():
            for stage in stages.made if isinstance(stages, Stages) else ():
                report.sections.append((f"lab {stage.lab.root}", _explained(stage)))
    return report


def _explained(stage: Stage) -> str:
    """What the stage can tell; what hinders it is worth knowing too."""
    try:
        return stage.explain()
    except (OSError, AssertionError, ValueError) as error:
        return f"cannot be explained: {error!r}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that wait for time limits take longest: they begin first, beside all others."""
    first = ("test_limits.py", "test_inspection.py")  # They wait for Slurm the longest, while the other worker works.
    items.sort(key=lambda item: 0 if item.path.name in first else 1)
