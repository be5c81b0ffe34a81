"""What the demo runs: commands, the supervised run beside it, a throwaway Slurm; and how it waits for facts.

Owns processes and their end: whatever is started here ends with the demo, also after an error, ctrl-C or SIGTERM. Every
command gets a session of its own, so that ctrl-C reaches the demo alone and things end in order. Must not know the story that
demo.py tells.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

LAB = Path(__file__).resolve().parent.parent / "lab" / "lab.py"
# A job that was requeued comes back after cred-expire + 1 s; Slurm's own default is 120 s.
LAB_OPTIONS = ("--nodes", "1", "--grace", "60", "--kill-wait", "10", "--cred-expire", "5")
WAIT_S = 240.0
INSTALL_S = 900.0
LOOK_S = 0.1


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


def run(
    argv: list[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    cwd: Path | None = None,
    capture: bool = False,
    bound_s: float = WAIT_S,
) -> str:
    """Run a command to its end; its output if `capture`. Raises DemoError when it fails or takes too long."""
    pipe = subprocess.PIPE if capture else None
    try:
        # subprocess.run kills the command when anything is raised in here.
        done = subprocess.run(
            argv,
            env=env,
            input=stdin,
            cwd=cwd,
            stdout=pipe,
            stderr=pipe,
            text=True,
            timeout=bound_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DemoError(str(error)) from error
    if done.returncode != 0:
        raise DemoError(f"{shlex.join(argv)} ended with {done.returncode}: {(done.stderr or '').strip()}")
    return done.stdout or ""


@contextlib.contextmanager
def started(argv: list[str], env: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command beside the demo that adds to `output` and never outlives it. A killed supervisor takes its command along."""
    with output.open("ab") as file:
        process = subprocess.Popen(argv, env=env, stdout=file, stderr=file, cwd=output.parent, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(fact: Callable[[], bool], what: str, over: Callable[[], bool]) -> None:
    """Wait for a fact within a bound. Raises DemoError, also when the run is over without it."""
    end = time.monotonic() + WAIT_S
    pause = threading.Event()
    while True:
        was_over = over()  # Asked first, so that what was done right before the end is seen.
        if fact():
            return
        if was_over:
            raise DemoError(f"the run was over before {what}")
        if time.monotonic() > end:
            raise DemoError(f"waited {WAIT_S:.0f} s for {what}")
        pause.wait(LOOK_S)


# --- Slurm ----------------------------------------------------------------------------------------------------------------


def why_no_slurm(say: Callable[[str], None]) -> str:
    """Why there is no throwaway Slurm to be had here, "" if there is. Installs it where it can."""
    if os.geteuid() != 0:
        return "a throwaway Slurm needs root"
    if shutil.which("slurmctld", path=f"/usr/sbin:{os.environ.get('PATH', '')}") is None:
        say("installing Slurm with apt-get, which takes a minute; no service of it is started")
    try:
        run([sys.executable, str(LAB), "install"], capture=True, bound_s=INSTALL_S)
    except DemoError as error:
        return f"Slurm cannot be installed here: {error}"
    return ""


@contextlib.contextmanager
def slurm_lab(root: Path) -> Iterator[str]:
    """A throwaway Slurm of one node, and the path of its slurm.conf. It goes down whatever happens."""
    try:
        with undisturbed():  # Half a lab would be harder to take down than a whole one.
            run([sys.executable, str(LAB), "up", "--root", str(root), *LAB_OPTIONS], capture=True)
        line = run([sys.executable, str(LAB), "env", "--root", str(root)], capture=True)
        yield shlex.split(line)[1].removeprefix("SLURM_CONF=")
    finally:
        if (root / "lab.json").exists():
            with undisturbed():
                run([sys.executable, str(LAB), "down", "--root", str(root)], capture=True)


class Job:
    """One job in the lab, seen with Slurm's own commands."""

    def __init__(self, env: Mapping[str, str], cwd: Path) -> None:
        """`env` names the lab's slurm.conf."""
        self._env = env
        self._cwd = cwd
        self.number = ""

    def submit(self, script: str, *options: str) -> str:
        """sbatch; the new job's number, which is this one's if it is the first."""
        number = self._slurm("sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n")
        self.number = self.number or number
        return number

    def field(self, name: str) -> str:
        """One field of `scontrol show job`."""
        for word in self._slurm("scontrol", "show", "job", self.number).split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return ""

    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.field("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING")

    def restarts(self) -> int:
        """How often it was requeued."""
        return int(self.field("Restarts") or 0)

    def _slurm(self, *words: str, stdin: str = "") -> str:
        return run(list(words), env=self._env, stdin=stdin, cwd=self._cwd, capture=True).strip()


# --- ctrl-C -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off ctrl-C and SIGTERM until the block is over."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        os.kill(os.getpid(), came[0])


def exit_on_sigterm() -> None:
    """Have SIGTERM end the demo as ctrl-C does: through every `finally`."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
