"""Installs what a lab, and the tests beside it, need from Debian's own packages.

Owns: one apt-get call. Must not: start or configure any service; the lab uses only the programs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab_conf import LabError
from lab_daemons import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "strace")
TOOLS = ("strace",)
"""For the tests that record what the checkpoint store does, or have its file system fail."""

SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL_S = 600
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """The programs of Slurm, of munge, and the tests' own, that are not here."""
    return [name for name in (*PROGRAMS, *TOOLS) if shutil.which(name, path=SEARCH) is None]


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian's packages start their service on installation unless policy-rc.d says no (101); only if we may add it."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def apt_get(*words: str) -> None:
    """Runs apt-get without questions; its last line becomes the error."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    argv = ["apt-get", "-q", "-y", *words]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise LabError(f"{' '.join(argv)} failed with {done.returncode}: {lines[-1]}")


def install(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Installs the packages unless all is there already."""
    lacking = missing() if packages == PACKAGES else list(packages)
    if not lacking:
        return {"installed": [], "present": [*PROGRAMS, *TOOLS]}
    if shutil.which("apt-get") is None:
        raise LabError(f"no apt-get here; install {', '.join(packages)} by your system's own means")
    if os.geteuid() != 0:
        raise LabError(f"not root; as root: apt-get install {' '.join(packages)}")
    with _no_service_starts():
        apt_get("update")
        apt_get("install", "--no-install-recommends", *packages)
    return {"installed": list(packages)}
