"""A throwaway Slurm of several nodes on one machine, for tests and demonstrations.

    python3 deploy/lab/lab.py up --root /tmp/lab1 --nodes 4
    eval "$(python3 deploy/lab/lab.py env --root /tmp/lab1)"
    sbatch -p low job.sh
    python3 deploy/lab/lab.py down --root /tmp/lab1

Owns: the command line. Must not: touch a Slurm, a munged or a cgroup that it did not start: everything
lies below --root, with a munge key, ports, node names and job ids of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab_chroot
import lab_install
import lab_life
import lab_up
from lab_conf import LabError

if TYPE_CHECKING:
    from collections.abc import Callable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.py", description="a throwaway Slurm on one machine")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_up(commands.add_parser("up", help="bring a lab up; prints one JSON line"))
    for name, text in (("down", "end it"), ("status", "what runs"), ("env", "the export line for a shell")):
        commands.add_parser(name, help=text).add_argument("--root", required=True)
    for name, text in (
        ("node-kill", "SIGKILL all of a node"),
        ("node-cut", "have Slurm lose nodes (N1,N2) whose tasks run on"),
        ("node-start", "bring the node back"),
    ):
        node = commands.add_parser(name, help=text)
        node.add_argument("--root", required=True)
        node.add_argument("node")
    daemon = commands.add_parser("daemon", help="stop (SIGSTOP), continue, kill (SIGKILL) or start one daemon")
    daemon.add_argument("--root", required=True)
    daemon.add_argument("name", help="munged, slurmctld or slurmd.NODE")
    daemon.add_argument("action", choices=("stop", "cont", "kill", "start"))
    commands.add_parser("install", help="apt-get install what a lab needs, if missing")
    make = commands.add_parser("make-chroot", help="the other Debian's Slurm in a chroot (about 2 minutes)")
    make.add_argument("--other", required=True, metavar="ROOT")
    make.add_argument("--share", action="append", default=[], metavar="DIR", help="one more directory to show inside")
    make.add_argument("--suite", help="Debian release (default: trixie on bookworm, bookworm on trixie)")
    drop = commands.add_parser("drop-chroot", help="unmount what make-chroot mounted")
    drop.add_argument("root", metavar="ROOT")
    drop.add_argument("--delete", action="store_true", help="delete the tree as well")
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    default = lab_up.Wish(root="")
    up.add_argument("--root", required=True, help="directory of the lab; new, empty, or of a lab that has ended")
    up.add_argument("--nodes", type=int, default=default.nodes)
    up.add_argument("--prefix", help="nodes are PREFIX1, PREFIX2, ... (default: random)")
    up.add_argument("--proctrack", choices=("cgroup", "linuxproc", "pgid", "auto"), default=default.proctrack)
    up.add_argument("--kill-wait", type=int, default=default.kill_wait, metavar="S", help="KillWait")
    up.add_argument("--grace", type=int, default=default.grace, metavar="S", help="GraceTime of low and lowc")
    up.add_argument("--cred-expire", type=int, default=default.cred_expire, metavar="S",
                    help="AuthInfo cred_expire: a requeued job waits this long plus 1 s (at least 5, default 120)")  # fmt: skip
    up.add_argument("--first-job-id", type=int, metavar="N", help="FirstJobId (default: random)")
    up.add_argument("--port-base", type=int, metavar="P", help="slurmctld's port; P+1.. are the nodes' (default: free)")
    up.add_argument("--user-signal", action="store_true", help="preempt_send_user_signal")
    up.add_argument("--no-job-requeue", dest="job_requeue", action="store_false", help="JobRequeue=0")
    up.add_argument("--requeue-exit", type=int, metavar="N", help="RequeueExit")
    up.add_argument("--extra", default=default.extra, metavar="LINES", help="more for slurm.conf: 'WaitTime=30;KillOnBadExit=1'")
    up.add_argument(
        "--no-backfill",
        dest="backfill",
        action="store_false",
        help="SchedulerType=sched/builtin: a job without a limit keeps TimeLimit=UNLIMITED, EndTime=Unknown",
    )
    up.add_argument("--cpus", type=int, default=default.cpus, help="CPUs of each node")
    up.add_argument("--chroot", metavar="ROOT", help="run the daemons in this chroot (see make-chroot)")


def _root(text: str) -> str:
    """Resolved, because the same directory must be the same lab, and a mount point is named by its real path."""
    return str(Path(text).resolve())


def _up(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(lab_up.Wish)}
    chroot = None if arguments.chroot is None else _root(arguments.chroot)
    return lab_up.up(lab_up.Wish(**given | {"root": _root(arguments.root), "chroot": chroot}))


def _env(arguments: argparse.Namespace) -> None:
    print(f"export SLURM_CONF={shlex.quote(lab_life.load(_root(arguments.root)).conf)}")


COMMANDS: dict[str, Callable[[argparse.Namespace], dict[str, Any] | None]] = {
    "up": _up,
    "down": lambda given: lab_life.down(_root(given.root)),
    "status": lambda given: lab_life.status(_root(given.root)),
    "env": _env,
    "daemon": lambda given: lab_life.daemon(_root(given.root), given.name, given.action),
    "node-kill": lambda given: lab_life.node_kill(_root(given.root), given.node),
    "node-cut": lambda given: lab_life.node_cut(_root(given.root), given.node),
    "node-start": lambda given: lab_life.node_start(_root(given.root), given.node),
    "install": lambda _: lab_install.install(),
    "make-chroot": lambda given: lab_chroot.make(_root(given.other), given.suite, given.share),
    "drop-chroot": lambda given: lab_chroot.drop(_root(given.root), delete=given.delete),
}


def main() -> int:
    """Runs one command; 0 and a JSON line, or 1 and a line on stderr."""
    arguments = _parser().parse_args()
    try:
        answer = COMMANDS[arguments.command](arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except subprocess.SubprocessError as error:
        print(f"lab: {arguments.command}: {error}", file=sys.stderr)
        return 1
    if answer is not None:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
