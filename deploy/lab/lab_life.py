"""A lab's life once it is up: status, down, the death and return of its daemons and nodes.

Owns: reading lab.json, and ending what it describes.
Must not: keep anything in memory that `down` needs. Whoever brought the lab up may be gone; the
directory alone is enough.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import lab_cgroup
import lab_daemons
import lab_proc
from lab_conf import Lab, LabError

UP_S = 90


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


def _node_states(lab: Lab) -> dict[str, str]:
    try:
        answer = lab_daemons.client(lab, "sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", timeout_s=30)
    except subprocess.TimeoutExpired:
        return {}
    return {node: state for node, _, state in (line.partition(" ") for line in answer.stdout.splitlines())}


def await_nodes(lab: Lab, nodes: list[str]) -> None:
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

    if not lab_proc.wait_until(none_left, 60):
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
            await_nodes(lab, [node for node in lab.nodes if lab_daemons.find(lab, f"slurmd.{node}") is not None])
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


def node_cut(root: str, nodes: str) -> dict[str, Any]:
    """Nodes (with commas between) that Slurm loses though they live: slurmds and slurmstepds end, their tasks run on."""
    lab = load(root)
    names = [_known_node(lab, node) for node in nodes.split(",")]
    daemons = [process for node in names if (process := lab_daemons.find(lab, f"slurmd.{node}")) is not None]
    lab_proc.end([*daemons, *lab_proc.stepds([lab.node_log(node) for node in names])], signal.SIGKILL, 5)
    answer = lab_daemons.client(lab, "scontrol", "update", f"NodeName={nodes}", "State=DOWN", "Reason=lab")
    if answer.returncode != 0:
        raise LabError(f"{nodes} are cut off, but slurmctld was not told: {answer.stderr.strip()}")
    return {"nodes": names, "state": "DOWN"}


def node_start(root: str, node: str) -> dict[str, Any]:
    """The node's return: its slurmd again, then State=RESUME, then wait until it can be used."""
    lab = load(root)
    if lab_daemons.find(lab, f"slurmd.{_known_node(lab, node)}") is None:
        lab_daemons.start(lab, f"slurmd.{node}")
    lab_daemons.client(lab, "scontrol", "update", f"NodeName={node}", "State=RESUME")
    await_nodes(lab, [node])
    return {"node": node, "state": "UP"}
