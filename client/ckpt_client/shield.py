"""The training process's side of the shield: the notice's signals stay blocked here and in all that is started from here.

Owns the signal mask of this process from `import ckpt_client` on, and stands between it and whoever would open it:
`multiprocessing.resource_tracker` above all, which unblocks SIGTERM in the thread that first uses spawn, forkserver or shared
memory (docs/slurm.md, section 4; docs/decisions/0010). Must not end anybody, nor touch a handler that is somebody's. Must do
nothing without a supervisor: with SIGTERM blocked a training of its own could not be ended by anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import types
from collections.abc import Iterable, Mapping

from ckpt_client import above

NOTICES = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""The notice's signals where the supervisor does not say which (CKPT_SUPERVISE_SHIELD): they are the supervisor's."""

TERMINAL = frozenset({signal.SIGINT, signal.SIGHUP})
"""Blocked by the supervisor where the command shares its terminal. The tracker would let ctrl-C in again."""

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2

STATUS_BYTES_MAX = 16_384

_kept: set[int] = set()
"""What stays blocked in this process."""

_found_open: set[int] = set()
"""What a shell between had let in again (dash clears the mask, bash does not): threads that ran already may take it."""

_is_settled = False

_ask_kernel = signal.pthread_sigmask


def stand_early(environment: Mapping[str, str]) -> None:
    """The same as `stand`, on import: before training code makes its first worker, and its libraries their first threads.

    Only where the supervisor's socket is and it stands above us: a job that is submitted from a supervised one inherits its
    environment, and may run on the same node. In another pid namespace, a container's, the socket alone has to tell.
    """
    path = environment.get("CKPT_SUPERVISE_SOCKET", "").removeprefix("ipc://")
    if not path or not os.access(path, os.F_OK):
        return
    theirs = environment.get("CKPT_SUPERVISE_PIDNS", "")
    if theirs and theirs == above.pid_namespace() and not above.is_ancestor(above.supervisor_pid(environment)):
        return
    stand(environment)


def stand(environment: Mapping[str, str]) -> None:
    """Block what the supervisor wants blocked, in this thread, and have it stay so. May be called again."""
    before = _ask_kernel(signal.SIG_BLOCK, ())
    for number in _named(environment.get("CKPT_SUPERVISE_SHIELD")):
        if number in before:
            _kept.add(number)
        # Whoever has a handler of their own, and has let the signal in for it, keeps it (field case 13).
        elif signal.getsignal(number) in (signal.SIG_DFL, _nothing):
            _kept.add(number)
            _found_open.add(number)
    _kept.update(TERMINAL & before)
    _ask_kernel(signal.SIG_BLOCK, _kept - TERMINAL)
    vars(signal)["pthread_sigmask"] = _pthread_sigmask


def settle() -> None:
    """In the training process proper, once it is attached: what reaches it all the same does nothing.

    Not for SIGTERM where the mask is in order: whoever started this process may end it, and then the supervisor lets it in here.
    Not in the children either, for the same reason: they have the mask alone.
    """
    global _is_settled  # noqa: PLW0603 - of this process, as the mask is.
    _is_settled = True
    for number in _kept - TERMINAL:
        if number != signal.SIGTERM or (number in _found_open and _some_thread_takes(number)):
            _take_default(number)
    os.register_at_fork(after_in_child=_forked)


def outlive_launcher() -> None:
    """Live on when the process that started this one dies of a notice: torch's mp.spawn has its ranks interrupted then.

    The supervisor's own SIGKILL at the death of its guard stays: that is the end of the step (prctl(2), PR_SET_PDEATHSIG).
    """
    libc = ctypes.CDLL(None)
    at_death = ctypes.c_int(0)
    libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(at_death), 0, 0, 0)
    if at_death.value not in (0, signal.SIGKILL):
        libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _named(text: str | None) -> set[int]:
    if text is None:
        return set(NOTICES)
    return {int(word) for word in text.split() if word.isascii() and word.isdigit()} & signal.valid_signals()


def _pthread_sigmask(how: int, mask: Iterable[int]) -> set[int | signal.Signals]:
    """In place of signal.pthread_sigmask: lets in what is asked for, without what is kept out.

    By the function and not by a switch in the tracker: copies of it come with other packages (multiprocess, loky), each Python
    has it a little different, and other libraries let signals in as well.
    """
    asked = set(mask)
    if how == signal.SIG_UNBLOCK:
        _kept.difference_update({number for number in asked & _kept if _is_theirs(number)})
        mask = asked - _kept
    elif how == signal.SIG_SETMASK:
        mask = asked | _kept
    before: set[int | signal.Signals] = _ask_kernel(how, mask)
    return before


def _is_theirs(number: int) -> bool:
    """Whether training code lets in a signal that it has a handler of its own for (field case 13); a tracker never does.

    Not once it is attached: a library's handler that raises would end the training instead of the save.
    """
    if _is_settled:
        return False
    asks: types.FrameType | None = sys._getframe()
    while asks is not None and asks.f_globals.get("__name__") == __name__:
        asks = asks.f_back
    if asks is not None and "resource_tracker" in str(asks.f_globals.get("__name__")):
        return False
    return signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None, _nothing)


def _some_thread_takes(number: int) -> bool:
    """Whether a thread of this process has the signal unblocked. True also where that is not to be seen."""
    try:
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - pathlib is not worth its import here.
            fd = os.open(f"/proc/self/task/{thread}/status", os.O_RDONLY | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as status:
                mask = status.read(STATUS_BYTES_MAX).partition(b"SigBlk:")[2].split()[0]
            if not int(mask, 16) >> (number - 1) & 1:
                return True
    except (OSError, IndexError, ValueError):
        return True
    return False


def _take_default(number: int) -> None:
    """Put a handler that does nothing in the place of the default action. signal() works in the main thread only."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)  # C code that was never made for EINTR goes on reading.


def _forked() -> None:
    """In a forked child: its parent may end it. It has the mask, as all below us."""
    for number in _kept:
        if signal.getsignal(number) is _nothing:
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)


def _nothing(_number: int, _frame: object) -> None:
    """Handler for the supervisor's signals where they arrive although they are blocked in the training thread."""
