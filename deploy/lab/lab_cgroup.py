"""What the machine's cgroups can do, and sweeping what a lab's jobs left in them.

Owns: detection of cgroup v1, v2 or none, and removal of cgroups named after this lab's nodes.
Must not: touch a cgroup that does not carry one of the lab's node names (two labs with equal node
names share cgroups, docs/slurm.md section 5, hence the random prefix).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOUNT = Path("/sys/fs/cgroup")
DIRS_MAX = 20_000


def _makes_cgroups(where: str) -> bool:
    probe = Path(where, f"slurm_lab_probe_{os.getpid()}")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def detect() -> str:
    """Gives v2 (unified at /sys/fs/cgroup), v1 (a freezer hierarchy, which proctrack/cgroup needs) or none.

    A container may mount cgroups that it cannot write to; that is none.
    """
    with Path("/proc/self/mounts").open(encoding="utf-8", errors="replace") as file:
        mounts = [line.split()[1:4] for line in file]
    for where, kind, _ in mounts:
        if kind == "cgroup2" and where == str(MOUNT) and _makes_cgroups(where):
            return "v2"
    for where, kind, options in mounts:
        if kind == "cgroup" and "freezer" in options.split(",") and _makes_cgroups(where):
            return "v1"
    return "none"


def has_systemd() -> bool:
    """True where systemd runs (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def prepare(kind: str, *, systemd: bool) -> None:
    """On cgroup v2 slurmd makes its scope below system.slice, which without systemd nobody has made (22.05.8)."""
    if kind == "v2" and not systemd:
        (MOUNT / "system.slice").mkdir(exist_ok=True)


def _trees(nodes: Iterable[str]) -> list[Path]:
    """The top directory of each of these nodes in every hierarchy: slurm_NODE (v1), NODE_slurmstepd.scope (v2)."""
    names = [f"slurm_{node}" for node in nodes] + [f"{node}_slurmstepd.scope" for node in nodes]
    parents = [MOUNT, MOUNT / "system.slice", *MOUNT.glob("*/")]
    found = {parent / name for parent in parents for name in names if (parent / name).is_dir()}
    return sorted(found)


def thaw(nodes: Iterable[str]) -> None:
    """A frozen task does not die of SIGKILL until it is thawed (cgroup v1 freezer)."""
    for tree in _trees(nodes):
        for state in list(tree.rglob("freezer.state"))[:DIRS_MAX]:
            try:
                state.write_text("THAWED")
            except OSError:
                continue  # the root of a hierarchy, or gone meanwhile


def sweep(nodes: Iterable[str]) -> list[Path]:
    """Removes the empty cgroups of these nodes, leaves first, and gives back what could not be removed."""
    left = []
    for tree in _trees(nodes):
        for where, _, _ in list(os.walk(tree, topdown=False))[:DIRS_MAX]:
            try:
                Path(where).rmdir()
            except OSError:
                left.append(Path(where))
    return left
