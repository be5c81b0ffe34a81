"""Stops a process below us for less than a millisecond, reads who sent its SIGTERM, and has it take or lose that signal.

Owns every ptrace request, and every tracee until it is let go. Must not decide what becomes of a signal: the caller does, once it
knows the sender. Never raises for what a process or the kernel does; where ptrace(2) is refused (Yama, seccomp, gVisor, a
debugger that was there before), that is the answer.

All calls come from one and the same thread: a tracee belongs to the thread that seized it. If that ends, also by SIGKILL, the
kernel lets every tracee go on. A tracee can only be let go while it stands: one that does not stop in time, in uninterruptible
sleep or for want of a core, stays seized until a later `settle` goes on with it, or `finish` lets it go.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Collection
from typing import Literal

from ckpt_supervisor.linux import procfs

STOP_S = 0.02
"""So long is waited for one process to stand; on an idle machine it takes 0.1 ms."""

YIELDS_MAX = 50
POLL_S = 0.000_2
STOPS_MAX = 16
"""Stops for other signals that arrive at the same moment, before the one that is looked for."""

PEEKED_MAX = 32
QUEUE_MAX = 1_024
"""Most pending signals of one queue that are gone through; real-time signals may pile up."""

_CONT, _DETACH = 7, 17
_SEIZE, _INTERRUPT, _PEEKSIGINFO, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x4209, 0x420A, 0x420B
_PEEK_SHARED = 1
_WALL = 0x4000_0000
_SIGINFO_BYTES = 128
_PID_AT = 16 if ctypes.sizeof(ctypes.c_void_p) == 8 else 12
_TERM_BIT = 1 << (signal.SIGTERM - 1)

Wish = Literal["deliver", "absorb", "leave"]
"""The process takes its SIGTERM as it would without us; or it never came; or all stays as it is."""

Outcome = Literal["delivered", "absorbed", "left", "not now", "refused", "gone"]
"""`not now`: it did not stand in time, look again later. `refused`: ptrace is not for us, here or with this process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """Who sent the pending SIGTERM, as its receiver's pid namespace has it. 0: the kernel, or somebody outside of that."""

    pid: int


class _PeekArguments(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("count", ctypes.c_int32))


class Tracer:
    """`settle` one process after the other, and again where it was not yet time; `finish` the others while `is_busy`."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._libc_ptrace = libc.ptrace
        self._libc_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._libc_ptrace.restype = ctypes.c_long
        self._late: dict[int, int | None] = {}
        """Seized and not let go yet; with the mask that it is to have again, where it has another one."""
        self._dropped: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a process is still seized."""
        return bool(self._late)

    def has(self, pid: int) -> bool:
        """Whether this process is seized, so that it is seen as stopped by a tracer."""
        return pid in self._late

    def is_losing(self, pid: int) -> bool:
        """Whether this process is to lose its SIGTERM, which is not blocked there meanwhile, and was not seen to."""
        return self._late.get(pid) is not None

    def deliver_instead(self, pid: int) -> None:
        """If it is, it takes that SIGTERM, or the next one, after all."""
        if self.is_losing(pid):
            self._late[pid] = None

    def dropped(self) -> set[int]:
        """From whom `finish` has kept a SIGTERM since this was last asked: absorbed, later than `settle` could say so."""
        dropped, self._dropped = self._dropped, set()
        return dropped

    def has_come(self) -> bool:
        """Whether one of those that did not stand in time does by now, or has died."""
        return any(_stop_of(pid) is not None for pid in self._late)

    def settle(self, pid: int, decide: Callable[[Sender | None], Wish]) -> Outcome:
        """Stop the main thread, let `decide` say what becomes of its SIGTERM, and let it go. None: no SIGTERM is pending.

        Call it for a process of one's own tree that has SIGTERM blocked.
        """
        if pid in self._late:
            mask = self._late.pop(pid)
            return self._seized(pid, decide) if mask is None else self._absorbed(pid, mask)
        error = self._ptrace(_SEIZE, pid)
        if error == 0:
            error = self._ptrace(_INTERRUPT, pid)
            return self._seized(pid, decide) if error == 0 else self._let_go(pid, 0, "gone")
        if error == errno.ESRCH or procfs.state_of(pid) in ("zombie", "gone"):
            return "gone"
        return "refused"

    def finish(self, kept: Collection[int] = ()) -> None:
        """Let go those that did not stand in time, if they do now, but for those `kept` for another `settle`. Never waits."""
        for pid, mask in list(self._late.items()):
            stop = None if pid in kept else _stop_of(pid)
            if stop is None:
                continue
            del self._late[pid]
            if stop < 0:
                self._bury(pid)
                continue
            signal_given = _to_inject(stop)
            if mask is not None:
                self._set_mask(pid, mask)
                if signal_given == signal.SIGTERM:
                    self._dropped.add(pid)
                    signal_given = 0
            self._let_go(pid, signal_given, "left")

    def _seized(self, pid: int, decide: Callable[[Sender | None], Wish]) -> Outcome:
        stop = self._standing(pid)
        if stop is None:
            self._late[pid] = None
            return "not now"
        if stop < 0:
            self._bury(pid)
            return "gone"
        mask = self._mask(pid)
        sender = self._sender(pid)
        if mask is None or isinstance(sender, int):  # A kernel that knows seizing and nothing of this.
            return self._let_go(pid, _to_inject(stop), "refused")
        wish = decide(sender)
        if wish == "leave" or sender is None:
            return self._let_go(pid, _to_inject(stop), "left")
        if not self._set_mask(pid, mask & ~_TERM_BIT):
            return self._let_go(pid, _to_inject(stop), "refused")
        if wish == "absorb":
            return self._absorb(pid, mask, stop)
        return self._let_go(pid, _to_inject(stop), "delivered")

    def _absorb(self, pid: int, mask: int, stop: int) -> Outcome:
        """SIGTERM is no longer blocked: have it come, stop at that, drop it, and block it again."""
        if self._ptrace(_CONT, pid, data=_to_inject(stop)):
            return self._let_go(pid, 0, "gone")
        return self._absorbed(pid, mask)

    def _absorbed(self, pid: int, mask: int) -> Outcome:
        for _ in range(STOPS_MAX):
            stop = self._standing(pid)
            if stop is None:
                break
            if stop < 0:
                self._bury(pid)
                return "gone"
            if _to_inject(stop) == signal.SIGTERM:
                self._set_mask(pid, mask)
                return self._let_go(pid, 0, "absorbed")
            if self._ptrace(_CONT, pid, data=_to_inject(stop)):
                break
        self._ptrace(_INTERRUPT, pid)  # If somebody else in the process has taken the signal, it would not stop by itself.
        self._late[pid] = mask
        return "not now"

    def _standing(self, pid: int) -> int | None:
        """Its stop, once it stands; negative when it has died; None when neither is so within STOP_S."""
        give_up = time.monotonic() + STOP_S
        polls = 0
        while True:
            stop = _stop_of(pid)
            if stop is not None or time.monotonic() > give_up:
                return stop
            # The kernel has no descriptor for this. Most stand after a moment, sooner than a timer would wake us.
            if polls < YIELDS_MAX:
                os.sched_yield()
            else:
                select.select((), (), (), POLL_S)
            polls += 1

    def _mask(self, pid: int) -> int | None:
        mask = ctypes.c_uint64()
        return None if self._ptrace(_GETSIGMASK, pid, 8, ctypes.addressof(mask)) else mask.value

    def _set_mask(self, pid: int, mask: int) -> bool:
        """Of this thread alone. Each thread looks again at what is pending for it when it goes on (kernel/ptrace.c)."""
        value = ctypes.c_uint64(mask)
        return self._ptrace(_SETSIGMASK, pid, 8, ctypes.addressof(value)) == 0

    def _sender(self, pid: int) -> Sender | int | None:
        """Who sent the SIGTERM that is taken first: the thread's own before the process's. None: there is none. int: an error."""
        buffer = ctypes.create_string_buffer(_SIGINFO_BYTES * PEEKED_MAX)
        for flags in (0, _PEEK_SHARED):
            for offset in range(0, QUEUE_MAX, PEEKED_MAX):
                wanted = _PeekArguments(offset, flags, PEEKED_MAX)
                ctypes.set_errno(0)
                count = self._libc_ptrace(_PEEKSIGINFO, pid, ctypes.addressof(wanted), ctypes.addressof(buffer))
                if count < 0:
                    return ctypes.get_errno() or errno.EIO
                for index in range(count):
                    at = index * _SIGINFO_BYTES
                    number, _errno, code = struct.unpack_from("iii", buffer, at)
                    if number == signal.SIGTERM:
                        # Positive codes are the kernel's own (sigaction(2)): there is no sender then.
                        return Sender(struct.unpack_from("i", buffer, at + _PID_AT)[0] if code <= 0 else 0)
                if count < PEEKED_MAX:
                    break
        return None

    def _let_go(self, pid: int, signal_given: int, outcome: Outcome) -> Outcome:
        if self._ptrace(_DETACH, pid, data=signal_given):
            # It was killed while it stood, or does not stand. Dead, it is ours until it is waited for.
            if procfs.state_of(pid) in ("zombie", "gone"):
                self._bury(pid)
                return "gone"
            self._late[pid] = None
        return outcome

    def _bury(self, pid: int) -> None:
        """It has died: wait for it, so that its parent may. A child of our own stays for whoever waits for it here."""
        seen = procfs.stat(pid)
        if seen is None or seen.parent == os.getpid():
            return
        try:
            os.waitpid(pid, os.WNOHANG | _WALL)
        except ChildProcessError:
            return

    def _ptrace(self, request: int, pid: int, address: int = 0, data: int = 0) -> int:
        """0, or the error."""
        ctypes.set_errno(0)
        if self._libc_ptrace(request, pid, address, data) != -1:
            return 0
        return ctypes.get_errno() or errno.EIO


def _stop_of(pid: int) -> int | None:
    """How it stands: a signal number, with an event above its low byte; -1: it has died; None: it runs. Leaves all as it is."""
    try:
        seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        return -1
    if seen is None:
        return None
    return seen.si_status if seen.si_code in (os.CLD_TRAPPED, os.CLD_STOPPED) else -1


def _to_inject(stop: int) -> int:
    """The signal that it is just about to take, which it must not lose; 0 at stops that are about no signal."""
    return 0 if stop >> 8 else stop & 0x7F
