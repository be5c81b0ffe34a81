"""Hands the signal of --pass-signal on to a program that saves by itself, once.

Owns the question whom it is for, and whether Slurm has given it to them already. Must not decide when.

Slurm's own signals reach every process of the step directly (docs/slurm.md, section 4), and a handler that saves must not be
entered twice: in the usual recipe the second save would write over the first one in the middle. What the guard was sent as well
was sent to everybody, and is not handed on. On proctrack/pgid a signal goes to the process group, which the guard has left: there
a `sleep` with all signals blocked stands by in it, and has it pending.

Whoever catches the signal gets it, the topmost such process of each branch only: torchrun tells its workers by itself, and loader
workers are no one's to end. Shells are passed through: a trap waits for the shell's own child.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess

from ckpt_supervisor.adapters import children
from ckpt_supervisor.linux import procfs

SETTLED_MS = 200
"""A broadcast reaches the processes of a step one after the other; this long after it all have it."""

CALM_MS = 5_000
"""A signal that has led to no notice for this long is none of the next one's."""

PR_SET_PDEATHSIG = 1

END_S = 0.2
"""A killed `sleep` is gone within a millisecond; on a machine that hangs it is not waited for."""

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})


class Handover:
    """`ask` when the signal is to be handed on, `hand_on` at `due_ms`; `came_to_all` whenever the guard has got it.

    Once in all: whoever asks a second time (an heir, after the coordinator that was lost had asked) is not obeyed.
    """

    def __init__(self, number: int, claims: children.Claims) -> None:
        self._number = number
        self._claims = claims
        self._is_asked = False
        self._to_all_ms: int | None = None
        self._witness: subprocess.Popen[bytes] | None = None
        self._calm_ms = 0
        self.told: frozenset[int] = frozenset()
        """Who has got the signal from us."""
        self.due_ms: int | None = None
        """When `hand_on` has something to do."""

    def stand_by(self) -> None:
        """Start the process that shows what was sent to our process group. Without a `sleep` the guard alone tells."""
        self.end()
        libc = ctypes.CDLL(None)
        every = set(signal.valid_signals())

        def prepare() -> None:  # All that it needs is there before the fork.
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_BLOCK, every)

        null = subprocess.DEVNULL
        try:
            with self._claims.forking() as claim:
                argv = ["sleep", "infinity"]
                self._witness = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, preexec_fn=prepare)  # noqa: PLW1509 - see prepare
                claim(self._witness.pid)
        except (OSError, subprocess.SubprocessError):
            self._witness = None

    def end(self) -> None:
        """The witness is not needed any more; it is no process of the program's that was left behind."""
        witness, self._witness = self._witness, None
        if witness is not None:
            witness.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                witness.wait(END_S)
            self._claims.release(witness.pid)

    def came_to_all(self, number: int, now_ms: int) -> None:
        """Every process of the step was sent this signal."""
        if number == self._number:
            self._to_all_ms = now_ms

    def calm(self, now_ms: int) -> None:
        """No notice is in force: what was sent to all a while ago belonged to something that is over, such as a rehearsal."""
        if self.due_ms is not None or now_ms < self._calm_ms + CALM_MS:
            return
        self._calm_ms = now_ms
        if self._to_all_ms is not None and now_ms > self._to_all_ms + CALM_MS:
            self._to_all_ms = None
        if self._has_witnessed():
            self.stand_by()

    def ask(self, now_ms: int) -> None:
        """Hand the signal on as soon as a broadcast of it would have reached everybody."""
        if not self._is_asked:
            self._is_asked = True
            self.due_ms = now_ms + SETTLED_MS

    def hand_on(self, command: int | None) -> tuple[list[int], bool]:
        """Send it, unless everybody has it: the processes that got it from us, and whether Slurm has sent it to all.

        `command`: its pid, which gets the signal when nobody below catches it; None when it is over.
        """
        self.due_ms = None
        if self._to_all_ms is not None or self._has_witnessed():
            return [], True
        pids = self.program(command)
        if not pids and command is not None:
            pids = [command]
        told = [pid for pid in pids if children.send(pid, self._number)]
        self.told = frozenset(told)
        return told, False

    def _has_witnessed(self) -> bool:
        return self._witness is not None and procfs.is_pending(self._witness.pid, self._number)

    def program(self, command: int | None) -> list[int]:
        """The processes that save at the signal: those that catch it."""
        below = children.descendants(self._claims)
        return topmost(below if command is None else [command, *below], self._number)


def topmost(pids: list[int], number: int) -> list[int]:
    """Of these processes, parents first, those that catch the signal and have nobody above them who does; shells do not count."""
    chosen: list[int] = []
    below: set[int] = set()
    for pid in dict.fromkeys(pids):
        seen = procfs.stat(pid)
        if seen is None or seen.state in ("zombie", "gone"):
            continue
        if seen.parent in below:
            below.add(pid)
        elif procfs.catches(pid, number) and procfs.name_of(pid) not in SHELLS:
            chosen.append(pid)
            below.add(pid)
    return chosen
