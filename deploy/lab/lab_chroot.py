"""The other Debian's Slurm in a chroot, so that one machine can test both versions.

Owns: one debootstrap tree and every mount below it. The tree sees the machine's /proc, /sys, /dev, /tmp,
this repository and the Python behind its virtual environment, all at their own paths, so that a job
inside runs the same code as outside.
Must not: delete a tree while anything is mounted below it (the mounts are the machine's own directories),
or touch a tree that it did not make.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lab_daemons
import lab_install
from lab_conf import LabError

MARK = ".slurm-lab-chroot.json"
MAKE_S = 1200
OTHER = {"bookworm": "trixie", "trixie": "bookworm"}
# Slurm, and the shared libraries that a Python from outside is linked with (they come with Debian's own python3).
PACKAGES = "munge,slurmctld,slurmd,slurm-client,python3,procps"
REPOSITORY = Path(__file__).resolve().parents[2]


def _mounts_below(root: str) -> list[str]:
    """Mount points below root, deepest and latest first (mountinfo, proc(5); blanks are \\040)."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        if point.startswith(root + "/"):
            points.append(point)
    return points[::-1]


def _users(root: str) -> list[int]:
    """Processes that live inside the chroot."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = str((entry / "root").readlink()) == root
        except OSError:
            continue  # ended meanwhile
        if inside:
            found.append(int(entry.name))
    return found


def _call(*argv: str, timeout_s: float = 60) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise LabError(f"{' '.join(argv)} failed with {done.returncode}: {lines[-1]}")
    return done.stdout


def _codename() -> str:
    text = Path("/etc/os-release").read_text(errors="replace")
    found = re.search(r'^VERSION_CODENAME="?(\w+)"?$', text, re.MULTILINE)
    return found[1] if found else "unknown"


def _mirror() -> list[str]:
    """The Debian archive that apt uses here; none of its own means debootstrap's default."""
    listing = _call("apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)")
    return [words[0] for line in listing.splitlines() if (words := line.split())[1:] == ["Debian"]][:1]


def _bootstrap(root: str, suite: str) -> None:
    if shutil.which("debootstrap", path=lab_install.SEARCH) is None:
        lab_install.install(("debootstrap",))
    path = Path(root)
    if path.exists() and any(path.iterdir()):
        raise LabError(f"{root} is not empty and was not made by make-chroot")
    path.mkdir(parents=True, exist_ok=True)
    try:
        argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root]
        _call(*argv, *_mirror(), timeout_s=MAKE_S)
    except (LabError, subprocess.TimeoutExpired) as error:
        log = path / "debootstrap" / "debootstrap.log"
        tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
        for point in _mounts_below(root):
            _call("umount", point)
        shutil.rmtree(root)
        raise LabError("\n  ".join([str(error), *tail])) from error
    (path / MARK).write_text(json.dumps({"suite": suite}) + "\n")


def _python_homes() -> list[str]:
    """Where the Pythons live that this program and the repository's virtual environment run on."""
    homes = [sys.base_prefix]
    config = REPOSITORY / ".venv" / "pyvenv.cfg"
    if config.exists() and (found := re.search(r"^home\s*=\s*(.+?)\s*$", config.read_text(), re.MULTILINE)):
        homes.append(str(Path(found[1]).resolve().parent))
    # Debian's own /usr cannot be shown inside: it would hide the other release.
    return [home for home in homes if home not in ("/usr", "/")]


def _show(root: str, directory: str, *, recursive: bool = False) -> None:
    """Bind-mounts a directory at the same path inside, private: neither side's later mounts reach the other."""
    target = root + directory
    if os.path.ismount(target):
        return
    Path(target).mkdir(parents=True, exist_ok=True)
    _call("mount", "--rbind" if recursive else "--bind", directory, target)
    _call("mount", "--make-rprivate", target)


def make(root: str, suite: str | None, share: list[str]) -> dict[str, Any]:
    """Builds the tree if it is not there, mounts what is not mounted, and says what is inside."""
    if os.geteuid() != 0:
        raise LabError("make-chroot needs root")
    suite = suite or OTHER.get(_codename())
    if suite is None:
        raise LabError(f"this is Debian {_codename()}, no bookworm or trixie; say which one you want: --suite")
    if not Path(root, MARK).exists():
        _bootstrap(root, suite)
    for directory in ("/proc", "/sys", "/dev"):
        _show(root, directory, recursive=True)
    shown = [str(Path(path).resolve()) for path in ["/tmp", str(REPOSITORY), *_python_homes(), *share]]
    for directory in dict.fromkeys(shown):
        _show(root, directory)
    for name in ("hosts", "hostname", "resolv.conf"):  # slurmctld must find its own host name
        if (file := Path("/etc", name)).exists():
            Path(root, "etc", name).write_bytes(file.read_bytes())
    python = REPOSITORY / ".venv" / "bin" / "python"
    works = subprocess.run(["chroot", root, str(python), "-c", "import ssl, ctypes"], capture_output=True, check=False)
    return {
        "chroot": root,
        "suite": json.loads(Path(root, MARK).read_text())["suite"],
        "slurm_version": lab_daemons.slurm_version(root),
        "shared": list(dict.fromkeys(shown)),
        "venv_python_runs_inside": works.returncode == 0,
    }


def drop(root: str, *, delete: bool) -> dict[str, Any]:
    """Unmounts everything below the tree; with delete, removes the tree."""
    if not Path(root, MARK).exists():
        raise LabError(f"{root} was not made by make-chroot")
    users = _users(root)
    if users:
        raise LabError(f"still in use by processes {users[:10]}; first bring the lab in it down")
    unmounted = _mounts_below(root)
    for point in unmounted:
        _call("umount", point)
    if delete:
        if _mounts_below(root):
            raise LabError(f"not deleted: something is still mounted below {root}")
        shutil.rmtree(root)
    return {"chroot": root, "unmounted": unmounted, "deleted": delete}
