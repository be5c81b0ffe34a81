"""The owner's own way of bringing a job back where Slurm does not requeue it: the command of --resubmit.

Owns the bounded run of that command. Must not decide when it is due (core/leaving.py). It runs in a session of its own, so that
all of it can be ended when its time is over, with the signals blocked that a broadcast to the step would kill it by, as scontrol
is (slurm.py). Its environment is the supervisor's without what Slurm says of the step and of restarts: sbatch would hand that on
to the new job, whose first start would take itself for the fourth one.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_supervisor.children import Claims
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.slurm import SHIELDED
from ckpt_supervisor.text import one_line

TIMEOUT_S = 15.0
TEXT_CHARS_MAX = 300
READ_BYTES_MAX = 65_536
"""Most that is kept of its output; the rest is read and dropped."""

READS_MAX = 100

POLL_MS = 20
REAP_S = 1.0
"""One that was killed may take this long to end; it is then left to whoever reaps orphans."""

OF_THE_STEP = re.compile(
    r"SLURM_(STEP.*|SRUN_.*|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|LAUNCH_.*|CPU_BIND.*|RESTART_COUNT|STEPID)|"
    r"CKPT_SUPERVISE_(SOCKET|RESUME_FROM|PID|PIDNS|RESTART|SHIELD|TAG)"
)
"""Not handed on."""


class Answer(NamedTuple):
    """What came of it: `said` is the beginning of what it printed, or why it failed."""

    accepted: bool
    said: str


def run(launch: Launch, reason: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run the command once, with `sh -c`. Accepted if it ends with 0 in time. Blocks; may run in any thread."""
    options = launch.options
    env = environment(launch.env, str(options.dir), launch.job.name, reason)
    give_up = time.monotonic() + timeout_s
    try:
        child = _start(options.resubmit, env, launch.claims)
    except OSError as error:
        return Answer(False, f"sh cannot be started: {error.strerror}")
    try:
        said, status, in_time = _watch(child, give_up)
    finally:
        launch.claims.release(child.pid)
    text = one_line(said.decode(errors="replace").strip())[:TEXT_CHARS_MAX]
    told = f": {text}" if text else ""
    if not in_time:
        return Answer(False, f"it did not end within {timeout_s:g} s and was killed{told}")
    if status is None:
        return Answer(False, f"its exit status was lost{told}")
    if status != 0:
        return Answer(False, f"it ended with {status if status > 0 else 128 - status}{told}")
    return Answer(True, text)


def environment(env: Mapping[str, str], directory: str, job: str, reason: str) -> dict[str, str]:
    """What the command finds."""
    kept = {key: value for key, value in env.items() if not OF_THE_STEP.fullmatch(key)}
    return {**kept, "CKPT_SUPERVISE_DIR": directory, "CKPT_SUPERVISE_JOB": job, "CKPT_SUPERVISE_REASON": reason}


def _start(command: str, env: Mapping[str, str], claims: Claims) -> subprocess.Popen[bytes]:
    before = signal.pthread_sigmask(signal.SIG_SETMASK, SHIELDED)  # A lane has all blocked: no SIGALRM, no SIGPIPE below it.
    try:
        with claims.forking() as claim:
            child = subprocess.Popen(
                # dash starts its children with no signal blocked; what is ignored stays so below it.
                ("/bin/sh", "-c", f"trap '' {' '.join(str(int(one)) for one in sorted(SHIELDED))}\n{command}"),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            claim(child.pid)
            claims.set_apart(child.pid)  # sbatch is below it: training's end is not to be its end.
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _watch(child: subprocess.Popen[bytes], give_up: float) -> tuple[bytes, int | None, bool]:
    """What it prints until it ends, its status (None: lost, or it did not even die), and whether it ended in time.

    Its end counts, not that of its output, which something that it left in the background may hold open. Not Popen.wait: that
    takes a status lost to another waiter for 0.
    """
    assert child.stdout is not None
    kept = bytearray()
    with child.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN)
        in_time, is_open, until = True, True, give_up
        while True:
            gone, status = _waited(child)
            is_open = is_open and _read(pipe.fileno(), kept)
            if gone:
                break
            if time.monotonic() >= until:
                if not in_time:
                    break
                in_time, until = False, give_up + REAP_S
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            if is_open:
                poll.poll(POLL_MS)
            else:
                select.select((), (), (), POLL_MS / 1000)
    child.returncode = status if status is not None else -signal.SIGKILL  # Keeps Popen from waiting for it once more.
    return bytes(kept), status, in_time


def _read(fd: int, kept: bytearray) -> bool:
    """Take what is there; False once there will be no more."""
    for _ in range(READS_MAX):  # One that prints without an end is looked at again, for its time.
        try:
            chunk = os.read(fd, READ_BYTES_MAX)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        kept += chunk[: max(0, READ_BYTES_MAX - len(kept))]
    return True


def _waited(child: subprocess.Popen[bytes]) -> tuple[bool, int | None]:
    """Whether it is gone, and its exit status unless somebody else took it."""
    try:
        ended, status = os.waitpid(child.pid, os.WNOHANG)
    except ChildProcessError:
        return True, None
    return (True, os.waitstatus_to_exitcode(status)) if ended else (False, None)
