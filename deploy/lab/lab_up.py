"""Bringing a lab up.

Owns: what may be asked for, the directory's layout, and the order in which daemons start.
Must not: leave anything running when it fails, or use a directory, a port or a cgroup that is not the lab's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import socket
import string
import sys
from pathlib import Path
from typing import Any

import lab_cgroup
import lab_daemons
import lab_ports
import lab_proc
from lab_conf import NODES_MAX, ROOT_CHARS_MAX, Lab, LabError, cgroup_conf, slurm_conf
from lab_life import await_nodes, down, load, running

CRED_EXPIRE_MIN = 5  # slurm.conf(5), AuthInfo
MUNGED_S = 30
OWN_DIRS = ("munge", "run", "spool", "state")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the command line asked for; None means "choose"."""

    root: str
    nodes: int = 4
    prefix: str | None = None
    proctrack: str = "cgroup"
    kill_wait: int = 6
    grace: int = 15
    cred_expire: int = 120
    first_job_id: int | None = None
    port_base: int | None = None
    user_signal: bool = False
    job_requeue: bool = True
    requeue_exit: int | None = None
    extra: str = ""
    backfill: bool = True
    cpus: int = 2
    chroot: str | None = None


def _wrong(wish: Wish) -> list[str]:
    """Everything that is wrong with the wish, so that all of it can be said at once."""
    wrong = []
    if os.geteuid() != 0:
        wrong.append("a lab needs root (slurmd starts jobs as their users)")
    if not 1 <= wish.nodes <= NODES_MAX:
        wrong.append(f"--nodes must be 1 to {NODES_MAX}, not {wish.nodes}")
    if wish.prefix is not None and not re.fullmatch(r"[a-z][a-z0-9]{0,7}(?<![0-9])", wish.prefix):
        wrong.append(f"--prefix must be at most 8 lower-case letters or digits and end in a letter, not {wish.prefix!r}")
    if len(wish.root) > ROOT_CHARS_MAX:
        wrong.append(f"--root {wish.root} has more than {ROOT_CHARS_MAX} characters (Slurm's sockets lie below it)")
    if re.search(r"[\s#,%=]", wish.root):
        wrong.append(f"--root {wish.root!r} has a character that slurm.conf cannot hold")
    if wish.cred_expire < CRED_EXPIRE_MIN:
        wrong.append(f"--cred-expire must be at least {CRED_EXPIRE_MIN}")
    if wish.chroot is not None and not Path(wish.chroot, "proc", "self").exists():
        wrong.append(f"{wish.chroot} is no mounted chroot; first: lab.py make-chroot --other {wish.chroot}")
    return wrong


def _define(wish: Wish, port_base: int) -> Lab:
    letters = "".join(random.choices(string.ascii_lowercase, k=5))  # Labs whose names collide would end each other's tasks.
    return Lab(
        root=wish.root,
        chroot=wish.chroot,
        prefix=wish.prefix or f"n{letters}",
        node_count=wish.nodes,
        cpus=wish.cpus,
        hostname=socket.gethostname().split(".")[0],
        slurm_version=lab_daemons.slurm_version(wish.chroot),
        proctrack=wish.proctrack,
        cgroup=lab_cgroup.detect(),
        systemd=lab_cgroup.has_systemd() and wish.chroot is None,
        kill_wait=wish.kill_wait,
        grace=wish.grace,
        cred_expire=wish.cred_expire,
        first_job_id=wish.first_job_id or random.randrange(10_000, 9_000_000),
        port_base=port_base,
        user_signal=wish.user_signal,
        job_requeue=wish.job_requeue,
        requeue_exit=wish.requeue_exit,
        extra=wish.extra,
        backfill=wish.backfill,
    )


def _claim(root: str) -> None:
    """Makes the directory ours: empty, or left over from a lab that has ended."""
    path = Path(root)
    if (path / "lab.json").exists():
        old = load(root)
        names = running(old)
        if names:
            raise LabError(f"a lab already runs in {root} ({', '.join(names)}); first: lab.py down --root {root}")
        for name in OWN_DIRS:
            shutil.rmtree(path / name, ignore_errors=True)
        for pattern in ("*.log", "*.out", "*.pid", "slurm.conf", "cgroup.conf", "jobcomp.txt", "lab.json"):
            for file in path.glob(pattern):
                file.unlink()
    elif path.exists() and any(path.iterdir()):
        raise LabError(f"{root} is not empty and holds no lab")
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


def _lay_out(lab: Lab) -> None:
    root = Path(lab.root)
    for name in OWN_DIRS:
        (root / name).mkdir(mode=0o755)
    for node in lab.nodes:
        (root / "spool" / node).mkdir(mode=0o755)
    with open(root / "munge" / "key", "xb", opener=lambda path, flags: os.open(path, flags, 0o400)) as key:
        key.write(os.urandom(1024))
    (root / "slurm.conf").write_text(slurm_conf(lab))
    (root / "cgroup.conf").write_text(cgroup_conf(lab))
    (root / "jobcomp.txt").touch()
    (root / "lab.json").write_text(json.dumps(lab.report()) + "\n")


def _seen_from_chroot(lab: Lab) -> None:
    if lab.chroot is not None and not Path(f"{lab.chroot}{lab.conf}").exists():
        raise LabError(f"{lab.root} cannot be seen from inside {lab.chroot}; make-chroot shares /tmp: use a root there")


def _bring_up(wish: Wish) -> dict[str, Any]:
    """Brings a lab up; on any failure everything that was started is ended again."""
    if wish.proctrack == "cgroup" and lab_cgroup.detect() == "none":
        raise LabError("proctrack/cgroup cannot work here: no writable cgroups are mounted (try --proctrack auto)")
    _claim(wish.root)
    with lab_ports.reserved(wish.nodes + 1, wish.port_base) as port_base, contextlib.ExitStack() as on_failure:
        lab = _define(wish, port_base)
        _lay_out(lab)
        on_failure.callback(down, wish.root)  # also after ctrl-C: nothing of a half-made lab may stay
        _seen_from_chroot(lab)
        lab_cgroup.prepare(lab.cgroup, systemd=lab.systemd)
        for name in lab_daemons.names(lab):
            lab_daemons.start(lab, name)
            if name == "munged" and not lab_proc.wait_until(Path(lab.munge_socket).exists, MUNGED_S):
                raise LabError(f"munged made no socket within {MUNGED_S} s:\n{lab_daemons.log_tail(lab, name)}")
        await_nodes(lab, lab.nodes)
        on_failure.pop_all()
    return lab.report()


def up(wish: Wish) -> dict[str, Any]:
    """Brings a lab up. Only with proctrack "auto" may it be another kind than asked for first, and then it says so."""
    wrong = _wrong(wish)
    if wrong:
        raise LabError("; ".join(wrong))
    for name in lab_daemons.PROGRAMS:
        lab_daemons.program(name, wish.chroot)
    if wish.proctrack != "auto":
        return _bring_up(wish)
    try:
        return _bring_up(dataclasses.replace(wish, proctrack="cgroup"))
    except LabError as error:
        print(f"lab: with proctrack/cgroup: {error}\nlab: now with proctrack/linuxproc", file=sys.stderr)
        return _bring_up(dataclasses.replace(wish, proctrack="linuxproc"))
