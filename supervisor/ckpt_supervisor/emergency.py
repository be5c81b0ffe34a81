"""After a fault of our own: what is left to do without the machine.

Owns the last line of defence. A training that nobody interrupts goes on unsupervised, since a fault of ours must not end it; a
job that is being interrupted is brought back, by the same rules as always: never after a scancel, and not before the answer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import zmq

from ckpt_supervisor.adapters.children import Child, send
from ckpt_supervisor.adapters.signals import SignalInbox
from ckpt_supervisor.adapters.slurm import Scontrol
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core import comeback
from ckpt_supervisor.core.policy import EXIT_CANCELLED, EXIT_INTERRUPTED, EXIT_STALE, Cause, Policy, read
from ckpt_supervisor.core.state import State
from ckpt_supervisor.core.views import JobView
from ckpt_supervisor.linux import procfs

EXIT_SOFTWARE = 70
"""EX_SOFTWARE of sysexits.h: a fault of the supervisor's own, and nothing to bring back."""

SWEEP_MS = 500

LOOK_TIMEOUT_S = 12.0
REQUEUE_TIMEOUT_S = 15.0
PAUSES_MS = (300, 1_000, 3_000, 5_000, 10_000)
TERM_MS = 3_000
STAY_MS = 900_000
"""With no answer from Slurm: until the kill, or this long (docs/slurm.md, section 2)."""


def outlive(child: Child | None, inbox: SignalInbox, *, calm: bool = True) -> int | None:
    """Wait for the command's own end: its status. None: a signal came that asks to leave, or there is no command.

    `calm`: no such signal has come yet; those that are pending below us are none of a notice.
    """
    if child is None:
        return None
    poller = zmq.Poller()
    poller.register(child.fileno(), zmq.POLLIN)
    poller.register(inbox.fileno(), zmq.POLLIN)
    stuck: set[int] = set()
    while (code := child.status()) is None:
        poller.poll(SWEEP_MS)
        if {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP} & set(inbox.drain()):
            return None
        if calm:
            stuck = _complete_terminations(child, stuck)
    return code


def _complete_terminations(child: Child, stuck: set[int]) -> set[int]:
    """What is left of the shield: SIGKILL for whoever has been stuck with a SIGTERM for two looks; those who are stuck now.

    Its parent waits for it, and nobody else would end it. No notice is in force here.
    """
    now = {pid for pid in procfs.descendants(child.guard_pid) if procfs.term_is_stuck(pid)}
    for pid in now & stuck:
        send(pid, signal.SIGKILL)
    return now


def stay(child: Child | None, inbox: SignalInbox) -> int:
    """Wait for the command's own end, whatever signals come; its status. For a task whose coordinator decides for it.

    Without a command there is no training to be spared: the step cannot become whole, and this end says so at once.
    """
    calm = True
    while child is not None:
        code = outlive(child, inbox, calm=calm)
        if code is not None:
            return code
        calm = False
    return EXIT_SOFTWARE


def bring_back(scontrol: Scontrol | None, policy: Policy, state: State, inbox: SignalInbox, now_ms: Callable[[], int]) -> int:
    """Have the job requeued if that is right; the exit status."""
    code = EXIT_INTERRUPTED if state.leaving is not None and state.leaving.fresh else EXIT_STALE
    if scontrol is None or policy.requeue != "auto":
        return EXIT_SOFTWARE if not policy.slurm else code
    barred = comeback.barred(policy, state)
    if barred:
        say(f"not requeued after the error: {barred}")
        return code
    for pause_ms in PAUSES_MS:
        view = scontrol.show_job(LOOK_TIMEOUT_S)
        if isinstance(view, JobView):
            cause = read(view, policy, now_ms(), None).cause
            if cause is Cause.CANCELLED:
                return EXIT_CANCELLED
            answer = scontrol.requeue(REQUEUE_TIMEOUT_S) if cause is not Cause.REQUEUED else None
            if answer is None or answer.kind in ("accepted", "pending"):
                say("the job is requeued after the error")
                _wait(inbox, TERM_MS)
                return code
            if answer.kind == "refused":
                say(f"Slurm refused the requeue after the error ({answer.reason})")
                return code
        _wait(inbox, pause_ms)
    _wait(inbox, STAY_MS, for_signal=False)
    return code


def _wait(inbox: SignalInbox, time_ms: int, for_signal: bool = True) -> None:
    """Until a SIGTERM comes, where it is waited for, or the time is over."""
    poller = zmq.Poller()
    poller.register(inbox.fileno(), zmq.POLLIN)
    end_s = time.monotonic() + time_ms / 1_000
    while (left_s := end_s - time.monotonic()) > 0:
        poller.poll(int(left_s * 1_000) + 1)
        if signal.SIGTERM in inbox.drain() and for_signal:
            return
