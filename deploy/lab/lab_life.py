"""A lab's life: up, down, status, the death and return of a node.

Owns: the order of things, the directory's contents, and lab.json in it.
Must not: keep anything in memory that `down` needs. Whoever brought the lab up may be gone; the
directory alone is enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import string
import subprocess
from pathlib import Path
from typing import Any

import lab_cgroup
import lab_daemons
import lab_ports
import lab_proc
from lab_conf import NODES_MAX, ROOT_CHARS_MAX, Lab, LabError, cgroup_conf, slurm_conf

UP_S = 40
CRED_EXPIRE_MIN = 5  # slurm.conf(5), AuthInfo
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
    backfill: bool = True
    cpus: int = 2
    chroot: str | None = None


def load(root: str) -> Lab:
    """The lab that lab.json in this directory describes."""
    path = Path(root, "lab.json")
    try:
        return Lab.from_report(json.loads(path.read_text()))
    except FileNotFoundError:
        raise LabError(f"no lab in {root}") from None
    except (OSError, ValueError, TypeError) as error:
        raise LabError(f"{path} is not of this version of the lab ({error}); if nothing of it runs, delete {root}") from error


def running(lab: Lab) -> list[str]:
    """The names of the lab's daemons that run."""
    return [name for name in lab_daemons.names(lab) if lab_daemons.find(lab, name) is not None]


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


def _proctrack(wanted: str) -> str:
    if wanted in ("linuxproc", "pgid") or lab_cgroup.detect() != "none":
        return "cgroup" if wanted == "auto" else wanted
    if wanted == "auto":
        return "linuxproc"
    raise LabError("proctrack/cgroup cannot work here: no writable cgroups are mounted (try --proctrack auto)")


def _define(wish: Wish, port_base: int) -> Lab:
    letters = "".join(random.choices(string.ascii_lowercase, k=3))
    return Lab(
        root=wish.root,
        chroot=wish.chroot,
        prefix=wish.prefix or f"n{letters}",
        node_count=wish.nodes,
        cpus=wish.cpus,
        hostname=socket.gethostname().split(".")[0],
        slurm_version=lab_daemons.slurm_version(wish.chroot),
        proctrack=_proctrack(wish.proctrack),
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


def _node_states(lab: Lab) -> dict[str, str]:
    try:
        answer = lab_daemons.client(lab, "sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", timeout_s=15)
    except subprocess.TimeoutExpired:
        return {}
    return {node: state for node, _, state in (line.partition(" ") for line in answer.stdout.splitlines())}


def _await_nodes(lab: Lab, nodes: list[str]) -> None:
    """Waits until these nodes are usable, and says whose log to read when they are not."""

    def settled() -> bool:
        dead = [name for name in lab_daemons.names(lab) if lab_daemons.find(lab, name) is None]
        watched = {"munged", "slurmctld", *(f"slurmd.{node}" for node in nodes)}
        for name in dead:
            if name in watched:
                raise LabError(f"{name} has ended:\n{lab_daemons.log_tail(lab, name)}")
        states = _node_states(lab)
        return all(states.get(node) in ("idle", "mixed", "allocated") for node in nodes)

    if not lab_proc.wait_until(settled, UP_S):
        states = _node_states(lab)
        tails = "\n".join(lab_daemons.log_tail(lab, name) for name in ("slurmctld", f"slurmd.{nodes[0]}"))
        raise LabError(f"nodes are not idle after {UP_S} s: {states or 'slurmctld does not answer'}\n{tails}")


def _seen_from_chroot(lab: Lab) -> None:
    if lab.chroot is not None and not Path(f"{lab.chroot}{lab.conf}").exists():
        raise LabError(f"{lab.root} cannot be seen from inside {lab.chroot}; make-chroot shares /tmp: use a root there")


def up(wish: Wish) -> dict[str, Any]:
    """Brings a lab up; on any failure everything that was started is ended again."""
    wrong = _wrong(wish)
    if wrong:
        raise LabError("; ".join(wrong))
    for name in lab_daemons.PROGRAMS:
        lab_daemons.program(name, wish.chroot)
    _claim(wish.root)
    with lab_ports.reserved(wish.nodes + 1, wish.port_base) as port_base, contextlib.ExitStack() as on_failure:
        lab = _define(wish, port_base)
        _lay_out(lab)
        on_failure.callback(down, wish.root)  # also after ctrl-C: nothing of a half-made lab may stay
        _seen_from_chroot(lab)
        lab_cgroup.prepare(lab.cgroup, systemd=lab.systemd)
        for name in lab_daemons.names(lab):
            lab_daemons.start(lab, name)
            if name == "munged" and not lab_proc.wait_until(Path(lab.munge_socket).exists, 10):
                raise LabError(f"munged made no socket within 10 s:\n{lab_daemons.log_tail(lab, name)}")
        _await_nodes(lab, lab.nodes)
        on_failure.pop_all()
    return lab.report()


def _kill_jobs(lab: Lab, nodes: list[str]) -> None:
    """SIGKILLs the slurmstepds of these nodes and every process of their jobs, until none is left."""
    logs = [lab.node_log(node) for node in nodes]
    lab_cgroup.thaw(nodes)
    left: list[lab_proc.Process] = []

    def none_left() -> bool:
        nonlocal left
        steps = lab_proc.stepds(logs)
        left = [*steps, *(p for p in lab_proc.tasks(nodes, steps) if p not in steps)]
        for process in left:
            lab_proc.send(process, signal.SIGKILL)
        return not left

    if not lab_proc.wait_until(none_left, 20):
        raise LabError(f"processes of the lab's jobs do not end: {sorted(p.pid for p in left)}")


def down(root: str) -> dict[str, Any]:
    """Ends the lab's daemons, jobs and cgroups. Logs, jobcomp.txt and lab.json stay for whoever wants to look."""
    lab = load(root)
    stopped = running(lab)
    # slurmds first, at once: from here on no new slurmstepd can appear.
    slurmds = [p for node in lab.nodes if (p := lab_daemons.find(lab, f"slurmd.{node}")) is not None]
    lab_proc.end(slurmds, signal.SIGKILL, 5)
    _kill_jobs(lab, lab.nodes)
    lab_daemons.stop(lab, "slurmctld", 3)
    lab_daemons.stop(lab, "munged", 3)
    left = running(lab)
    if left:
        raise LabError(f"still running: {', '.join(left)}")
    lab_cgroup.sweep(lab.nodes)
    shutil.rmtree(Path(lab.root, "run"), ignore_errors=True)
    return {"root": lab.root, "stopped": stopped}


def status(root: str) -> dict[str, Any]:
    """What `up` said, and what of it runs now."""
    lab = load(root)
    names = running(lab)
    nodes = _node_states(lab) if "slurmctld" in names else {}
    daemons = {name: name in names for name in lab_daemons.names(lab)}
    steps = [p.pid for p in lab_proc.stepds([lab.node_log(node) for node in lab.nodes])]
    return lab.report() | {"up": bool(names), "daemons": daemons, "states": nodes, "slurmstepds": steps}


def daemon(root: str, name: str, action: str) -> dict[str, Any]:
    """What can happen to a daemon: frozen, continued, dead at once, started again."""
    lab = load(root)
    if name not in lab_daemons.names(lab):
        raise LabError(f"no daemon {name}; there are {', '.join(lab_daemons.names(lab))}")
    process = lab_daemons.find(lab, name)
    if action == "start":
        process = lab_daemons.start(lab, name)
        if name == "slurmctld":
            _await_nodes(lab, [node for node in lab.nodes if lab_daemons.find(lab, f"slurmd.{node}") is not None])
    elif process is None:
        raise LabError(f"{name} does not run")
    elif action == "kill":
        lab_proc.end([process], signal.SIGKILL, 5)
    else:
        lab_proc.send(process, signal.SIGSTOP if action == "stop" else signal.SIGCONT)
    return {"daemon": name, "action": action, "pid": process.pid}


def _known_node(lab: Lab, node: str) -> str:
    if node not in lab.nodes:
        raise LabError(f"no node {node}; the lab's nodes are {', '.join(lab.nodes)}")
    return node


def node_kill(root: str, node: str) -> dict[str, Any]:
    """A node's sudden death: its slurmd, slurmstepds and tasks by SIGKILL, then the controller is told."""
    lab = load(root)
    daemon = lab_daemons.find(lab, f"slurmd.{_known_node(lab, node)}")
    if daemon is not None:
        lab_proc.end([daemon], signal.SIGKILL, 5)
    _kill_jobs(lab, [node])
    answer = lab_daemons.client(lab, "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lab")
    if answer.returncode != 0:
        raise LabError(f"{node} is dead, but slurmctld was not told: {answer.stderr.strip()}")
    lab_cgroup.sweep([node])
    return {"node": node, "state": "DOWN"}


def node_start(root: str, node: str) -> dict[str, Any]:
    """The node's return: its slurmd again, then State=RESUME, then wait until it can be used."""
    lab = load(root)
    if lab_daemons.find(lab, f"slurmd.{_known_node(lab, node)}") is None:
        lab_daemons.start(lab, f"slurmd.{node}")
    lab_daemons.client(lab, "scontrol", "update", f"NodeName={node}", "State=RESUME")
    _await_nodes(lab, [node])
    return {"node": node, "state": "UP"}
