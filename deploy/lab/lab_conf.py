"""The lab's configuration: what was asked for, and the text of its slurm.conf and cgroup.conf.

Owns: the dataclass of everything that defines a lab, and every line of the configuration files.
Must not: open files, start processes, look at the machine. Text from values, so that a reader can
see in one place what kind of Slurm the tests ran on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

NODES_MAX = 32
ROOT_CHARS_MAX = 60  # slurmstepd's socket is ROOT/spool/NODE/NODE_JOB.STEP and a Unix socket's path has 107 bytes


class LabError(Exception):
    """One line for the person at the terminal; the lab could not do what was asked."""


@dataclasses.dataclass(frozen=True)
class Lab:
    """Everything that defines one lab; written to ROOT/lab.json before the first daemon starts."""

    root: str
    chroot: str | None
    prefix: str
    node_count: int
    cpus: int
    hostname: str
    slurm_version: str
    proctrack: str  # cgroup, linuxproc or pgid: what is used, never "auto"
    cgroup: str  # v1, v2 or none: what this machine offers
    systemd: bool
    kill_wait: int
    grace: int
    cred_expire: int
    first_job_id: int
    port_base: int
    user_signal: bool
    job_requeue: bool
    requeue_exit: int | None
    backfill: bool
    extra: str = ""  # more lines of slurm.conf, apart by semicolons

    @property
    def nodes(self) -> list[str]:
        """x1, x2, ..., in that order."""
        return [f"{self.prefix}{index}" for index in range(1, self.node_count + 1)]

    @property
    def ctld_port(self) -> int:
        """slurmctld's port."""
        return self.port_base

    def node_port(self, node: str) -> int:
        """The port of this node's slurmd."""
        return self.port_base + 1 + self.nodes.index(node)

    @property
    def ports(self) -> list[int]:
        """All ports of the lab: slurmctld, then the nodes."""
        return [self.port_base + offset for offset in range(self.node_count + 1)]

    @property
    def conf(self) -> str:
        """For SLURM_CONF."""
        return f"{self.root}/slurm.conf"

    @property
    def munge_socket(self) -> str:
        """The lab's own munged."""
        return f"{self.root}/munge/s"

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor, for comparing."""
        major, minor = self.slurm_version.split(".")[:2]
        return int(major), int(minor)

    def node_log(self, node: str) -> str:
        """Written by the node's slurmd and by every slurmstepd that it starts."""
        return f"{self.root}/slurmd.{node}.log"

    def report(self) -> dict[str, Any]:
        """The JSON line that `up` prints: the fields, and what can be derived from them."""
        derived = {
            "conf": self.conf,
            "nodes": self.nodes,
            "ports": self.ports,
            "slurmctld_log": f"{self.root}/slurmctld.log",
            "jobcomp": f"{self.root}/jobcomp.txt",
        }
        return dataclasses.asdict(self) | derived

    @classmethod
    def from_report(cls, report: dict[str, Any]) -> Lab:
        """The lab back from its JSON."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in report.items() if name in names})


def _user_signal_lines(lab: Lab) -> list[str]:
    """preempt_send_user_signal moved between the versions (docs/slurm.md section 1)."""
    if not lab.user_signal:
        return []
    if lab.version >= (23, 2):
        return ["PreemptParameters=send_user_signal"]
    return ["SlurmctldParameters=preempt_send_user_signal"]


def slurm_conf(lab: Lab) -> str:
    """The whole slurm.conf. Everything it names lies under ROOT, so nothing of the machine's own Slurm is used."""
    root = lab.root
    lines = [
        f"ClusterName=lab{lab.prefix}",
        f"SlurmctldHost={lab.hostname}(127.0.0.1)",
        f"SlurmctldPort={lab.ctld_port}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # cred_expire also decides how long a requeued job waits: that many seconds plus one (docs/slurm.md section 6).
        f"AuthInfo=socket={lab.munge_socket},cred_expire={lab.cred_expire}",
        "MpiDefault=none",
        f"ProctrackType=proctrack/{lab.proctrack}",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"JobRequeue={int(lab.job_requeue)}",
        f"KillWait={lab.kill_wait}",
        "MinJobAge=300",
        "ReturnToService=2",
        f"FirstJobId={lab.first_job_id}",
        f"SchedulerType=sched/{'backfill' if lab.backfill else 'builtin'}",
        # Only how soon the scheduler looks, not what it decides: a test need not wait for its rounds of 3 s and more.
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
        "SlurmdParameters=config_overrides",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/slurmctld.pid",
        f"SlurmdPidFile={root}/slurmd.%n.pid",
        f"SlurmctldLogFile={root}/slurmctld.log",
        f"SlurmdLogFile={root}/slurmd.%n.log",
        "SlurmctldDebug=debug2",  # names every requeue call and who made it
        "SlurmdDebug=debug",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={root}/jobcomp.txt",
    ]
    lines += _user_signal_lines(lab)
    if lab.requeue_exit is not None:
        lines.append(f"RequeueExit={lab.requeue_exit}")
    lines += [line.strip() for line in lab.extra.split(";") if line.strip()]
    return "\n".join(lines + _node_lines(lab)) + "\n"


def _node_lines(lab: Lab) -> list[str]:
    lines = []
    for node in lab.nodes:
        address = f"NodeHostname={lab.hostname} NodeAddr=127.0.0.1 Port={lab.node_port(node)}"
        shape = f"CPUs={lab.cpus} Sockets=1 CoresPerSocket={lab.cpus} ThreadsPerCore=1 RealMemory=4000"
        lines.append(f"NodeName={node} {address} {shape}")
    nodes = ",".join(lab.nodes)
    return [
        *lines,
        f"PartitionName=low  Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={lab.grace}",
        f"PartitionName=low0 Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0",
        f"PartitionName=lowc Nodes={nodes} PriorityTier=1 PreemptMode=CANCEL GraceTime={lab.grace}",
        f"PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF",
    ]


def cgroup_conf(lab: Lab) -> str:
    """cgroup.conf for what the machine has; read by slurmd only when a cgroup plugin is in use."""
    if lab.cgroup == "v2":
        # Without systemd nobody is there to make the scope for slurmstepd, and slurmd fails unless told to do it itself.
        return "CgroupPlugin=cgroup/v2\n" + ("" if lab.systemd else "IgnoreSystemd=yes\n")
    return "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
