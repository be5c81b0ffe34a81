"""The lab's daemons: their command lines, starting them, and finding them again.

Owns: munged, slurmctld and one slurmd per node, each with a pid file ROOT/run/NAME.pid.
Must not: believe a pid file. A process counts as a daemon of this lab only when its start time is the
recorded one and its command line names the program and this lab's own file: then nothing that
another Slurm, or a reused pid, started can be ended by mistake.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import lab_proc
from lab_conf import Lab, LabError

LOG_LINES = 12
START_S = 30
EMPTY_S = 10
"""Bound on two moments of a start in which there is a file or a process that says nothing yet."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sbatch", "sinfo")


def program(name: str, chroot: str | None) -> str:
    """The program's path, inside the chroot if there is one."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    if chroot is None:
        found = shutil.which(name, path=os.environ.get("PATH", "") + ":" + path)
        if found is None:
            raise LabError(f"{name} is not installed; as root: python3 deploy/lab/lab.py install")
        return found
    for directory in path.split(":"):
        if os.access(f"{chroot}{directory}/{name}", os.X_OK):
            return f"{directory}/{name}"
    raise LabError(f"{name} is not in {chroot}; make the chroot anew: lab.py make-chroot --other {chroot}")


def inside(chroot: str | None, argv: list[str]) -> list[str]:
    """The command line that runs argv in the chroot, if there is one."""
    return argv if chroot is None else ["chroot", chroot, *argv]


def environment(lab: Lab) -> dict[str, str]:
    """What the daemons see: nothing of the caller's."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "SLURM_CONF": lab.conf, "LC_ALL": "C.UTF-8"}


def slurm_version(chroot: str | None) -> str:
    """For example 22.05.8, from `slurmctld -V`: "slurm-wlm 22.05.8"."""
    argv = inside(chroot, [program("slurmctld", chroot), "-V"])
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.split()[-1]


def client(lab: Lab, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands against this lab; its own version's, since 22.05 cannot talk to 24.11."""
    words = inside(lab.chroot, [program(argv[0], lab.chroot), *argv[1:]])
    return subprocess.run(words, env=environment(lab), capture_output=True, text=True, timeout=timeout_s, check=False, cwd="/")


def names(lab: Lab) -> list[str]:
    """In the order of starting."""
    return ["munged", "slurmctld", *(f"slurmd.{node}" for node in lab.nodes)]


def _argv(lab: Lab, name: str) -> list[str]:
    root = lab.root
    if name == "munged":
        files = [f"--key-file={root}/munge/key", f"--pid-file={root}/munge/pid", f"--seed-file={root}/munge/seed"]
        # --force: a directory that is not open to all is fine, since a lab's jobs may all be root's.
        words = [program("munged", lab.chroot), "--foreground", "--force", f"--socket={lab.munge_socket}", *files]
        return [*words, f"--log-file={root}/munged.log", "--num-threads=2"]
    if name == "slurmctld":
        return [program("slurmctld", lab.chroot), "-D", "-f", lab.conf]
    return [program("slurmd", lab.chroot), "-D", "-N", name.partition(".")[2], "-f", lab.conf]


def log_tail(lab: Lab, name: str) -> str:
    """The last lines of a daemon's log and of what it printed, for an error message."""
    lines: list[str] = []
    for path in (Path(lab.root, f"{name}.log"), Path(lab.root, f"{name}.out")):
        try:
            lines += path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        except OSError:
            continue
    return "\n".join(f"  {line}" for line in lines) or "  (no log)"


def _is_empty(file: Path) -> bool:
    try:
        return file.stat().st_size == 0
    except OSError:
        return False


def find(lab: Lab, name: str) -> lab_proc.Process | None:
    """The running daemon of that name, or None."""
    file = Path(lab.root, "run", f"{name}.pid")
    # Whoever starts the daemon may have been stopped between making this file and writing it.
    lab_proc.wait_until(lambda: not _is_empty(file), EMPTY_S)
    try:
        pid, _, _, start = lab_proc.parse_stat(file.read_text())
    except (OSError, ValueError, IndexError):
        return None
    process = lab_proc.Process(pid, start)
    # In the middle of an exec a live process has no command line for a moment (seen on a slow machine).
    lab_proc.wait_until(lambda: any(lab_proc.command_line(pid)) or not lab_proc.alive(process), EMPTY_S)
    ours = set(_own_words(lab, name)) <= set(lab_proc.command_line(pid))
    return process if ours and lab_proc.alive(process) else None


def _own_words(lab: Lab, name: str) -> list[str]:
    if name == "munged":
        return [f"--key-file={lab.root}/munge/key"]
    if name == "slurmctld":
        return ["-f", lab.conf]
    return ["-N", name.partition(".")[2], "-f", lab.conf]


def start(lab: Lab, name: str) -> lab_proc.Process:
    """Starts a daemon in a session of its own; it writes its pid file itself, before it becomes the daemon.

    So there is no moment in which it runs and `down` could not find it, even if this process is killed here.
    """
    if find(lab, name) is not None:
        raise LabError(f"{name} already runs in {lab.root}")
    pid_file = f"{lab.root}/run/{name}.pid"
    note_then_exec = 'IFS= read -r stat </proc/$$/stat && printf "%s\\n" "$stat" >"$1" && shift && exec "$@"'
    argv = ["/bin/sh", "-c", note_then_exec, "sh", pid_file, *inside(lab.chroot, _argv(lab, name))]
    with Path(lab.root, f"{name}.out").open("ab") as out:
        child = subprocess.Popen(
            argv,
            env=environment(lab),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=lab.root if lab.chroot is None else "/",
        )
    started: list[lab_proc.Process] = []

    def settled() -> bool:
        started.extend(filter(None, [find(lab, name)]))
        return bool(started) or child.poll() is not None

    if not lab_proc.wait_until(settled, START_S):
        child.kill()
        raise LabError(f"{name} did not start within {START_S} s:\n{log_tail(lab, name)}")
    if not started:
        raise LabError(f"{name} ended at once with {child.returncode}:\n{log_tail(lab, name)}")
    child.returncode = 0  # it is meant to outlive this process; keeps Popen from warning about it
    return started[0]


def stop(lab: Lab, name: str, timeout_s: float = 5) -> None:
    """SIGTERM, then SIGKILL after the time-out; a stopped (SIGSTOP) one is continued so that it can obey."""
    process = find(lab, name)
    if process is None:
        return
    lab_proc.send(process, signal.SIGCONT)
    left = lab_proc.end([process], signal.SIGTERM, timeout_s)
    if lab_proc.end(left, signal.SIGKILL, 30):
        raise LabError(f"{name} (pid {process.pid}) does not end, not even of SIGKILL")
