"""Asks Slurm what the rules want to know, and /proc for the sruns of a job on this node.

Owns the questions and the texts' way into facts. Must not judge. Every call has a bound and blocks for it at most; what could not
be asked is None, or a NoView that says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from ckpt_supervisor.adapters.slurm import Scontrol, locate
from ckpt_supervisor.adapters.slurm_text import Partition, find_record, parse_partition
from ckpt_supervisor.core.views import NoView
from ckpt_supervisor.doctor import script
from ckpt_supervisor.doctor.facts import JobFacts, Script, Srun
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.start.holding import ENDED

ASK_TIMEOUT_S = 8.0
SCRIPT_BYTES_MAX = 1 << 20
SRUNS_MAX = 64
_JOB = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_HOST = re.compile(r"\bNodeHostName=(\S+)")


def job(scontrol: Scontrol, name: str) -> JobFacts | NoView:
    """What `scontrol show job` says."""
    text = scontrol.ask(("show", "job", name), ASK_TIMEOUT_S)
    if isinstance(text, NoView):
        return text
    record = find_record(text, name)
    if record is None:
        return NoView(f"scontrol printed no record of job {name}", definite=False)
    flags = {key: None if key not in record else record[key] == "1" for key in ("Requeue", "BatchFlag")}
    nodes = re.match(r"\d{1,9}", record.get("NumNodes", ""))
    return JobFacts(
        name,
        requeue=flags["Requeue"],
        batch=flags["BatchFlag"],
        unlimited=record.get("TimeLimit") in ("UNLIMITED", "365-00:00:00"),
        partition=record.get("Partition", ""),
        nodes=int(nodes[0]) if nodes else None,
        node_list=record.get("NodeList", "").replace("(null)", ""),
    )


def partition(scontrol: Scontrol, name: str) -> Partition | None:
    """One partition; the site's default one for ""."""
    if name.startswith("-") or "," in name:
        return None  # Of several, nobody knows which one it will be.
    text = scontrol.ask(("show", "partition", "-o", *((name,) if name else ())), ASK_TIMEOUT_S)
    if isinstance(text, NoView):
        return None
    if name:
        return parse_partition(text)
    return next((parse_partition(line) for line in text.splitlines() if " Default=YES " in line), None)


def batch_script(scontrol: Scontrol, name: str) -> Script | NoView:
    """The script of a batch job, which Slurm shows to its owner. The exit status says nothing (docs/slurm.md, section 6)."""
    text = scontrol.ask(("write", "batch_script", name, "-"), ASK_TIMEOUT_S)
    if isinstance(text, NoView):
        return text
    if not text.startswith("#!"):
        return NoView(" ".join(text.split())[:200] or "Slurm does not show it", definite=True)
    return script.parse(text, f"the script of job {name}")


def spooled_script(spool: str, nodename: str, job_id: int) -> Script | None:
    """The script as slurmd has put it on the batch host; None where it is not to be seen. Costs no call to Slurm."""
    if not spool or ("%n" in spool and not nodename):
        return None
    place = Path(spool.replace("%n", nodename).replace("%h", os.uname().nodename)) / f"job{job_id:05d}" / "slurm_script"
    try:
        with place.open("rb") as file:
            text = file.read(SCRIPT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return None
    return script.parse(text, "the job script")


def one_machine(scontrol: Scontrol, nodes: str) -> bool | None:
    """Whether all of these nodes are one host, as in a lab or on a workstation with Slurm; None: could not look."""
    if not nodes or nodes.startswith("("):
        return None
    text = scontrol.ask(("show", "node", "-o", nodes), ASK_TIMEOUT_S)
    if isinstance(text, NoView):
        return None
    hosts = set(_HOST.findall(text))
    return len(hosts) == 1 if hosts else None


def is_alive(env: Mapping[str, str], name: str) -> tuple[bool | None, str]:
    """Whether a job may still be at work, and who says so."""
    path = locate(env.get("PATH"))
    if path is None or not _JOB.fullmatch(name):
        return None, "Slurm cannot be asked about it from here"
    view = Scontrol(path, name, env).show_job(ASK_TIMEOUT_S)
    if isinstance(view, NoView):
        return (False, "Slurm does not know it any more") if view.definite else (None, view.reason)
    return view.state not in ENDED, f"Slurm says {view.state}"


def sruns(job_id: str) -> list[tuple[int, Srun]]:
    """The job's srun processes on this node, of this user. Each has a child that watches it, which is left out."""
    found = dict(_sruns(job_id))
    seen = {pid: procfs.stat(pid) for pid in found}
    return [(pid, srun) for pid, srun in found.items() if (stat := seen[pid]) is not None and stat.parent not in found][
        :SRUNS_MAX
    ]


def environ_of(running: list[tuple[int, Srun]]) -> dict[str, str]:
    """The environment that the batch script had, as the first of its sruns shows it; empty where none is to be seen."""
    return procfs.environ(running[0][0]) if running else {}


def _sruns(job_id: str) -> Iterator[tuple[int, Srun]]:
    for pid in procfs.of_user(os.geteuid()):
        words = procfs.words(pid)
        if words and PurePath(words[0]).name == "srun" and (env := procfs.environ(pid)).get("SLURM_JOB_ID") == job_id:
            yield pid, script.running(words[:-1], pid, env)


def other_owner(env: Mapping[str, str], command: tuple[str, ...] = ()) -> str:
    """Another tool in this job that requeues by itself (field cases 13 and 149)."""
    if env.get("SUBMITIT_EXECUTOR") or any("submitit" in word for word in command):
        return "submitit"
    return ""
