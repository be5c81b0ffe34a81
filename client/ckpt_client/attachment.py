"""A training process that is attached to its supervisor: what happens at a boundary where something is asked of it.

Owns the lock that the two threads share, parking, and the call of the save, always on the training thread. Must not know
positions of phases (place.py) nor what is saved. Training is never made worse: whatever a save raises ends up as one word.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_client import shield, stacks, wire
from ckpt_client.channel import Line, Listener, now_ms
from ckpt_client.files import SaveError, one_line
from ckpt_client.progress import Pace
from ckpt_client.protocol import NEVER, Rank, Step
from ckpt_client.wire import NO_ROUND, Position, SavedFile

PARK_SECONDS = 1.0
"""A parked thread looks again at least this often; a change is told to it at once."""

Saver = Callable[[wire.SaveAt], tuple[SavedFile, ...]]
"""Writes this rank's files of one round."""


class Preempted(SystemExit):
    """The job is being interrupted and the state is saved: end now, in good order.

    A SystemExit with code 0, so that `finally` blocks and `atexit` functions run and nothing is printed.
    """

    def __init__(self) -> None:
        super().__init__(0)


class Attachment:
    """One attached process: its rank, its listener, its save. `begin` makes it live."""

    def __init__(self, rank: Rank, line: Line, saver: Saver) -> None:
        self.rank = rank
        self._saver = saver
        # Reentrant: a loop that the garbage collector ends in the listener's thread says Finished from there.
        self._changed = threading.Condition()
        self._listener = Listener(line, rank, self._changed)
        self._said_left = 0
        self._over = False
        self._closed = False
        self._pid = os.getpid()

    def begin(self, progress_ms: int = 0) -> None:
        """Start listening. From here on the process answers for itself until it ends.

        `progress_ms`: how often it says where training is; 0 for never.
        """
        shield.settle()
        shield.outlive_launcher()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)
        # A child of multiprocessing by fork or forkserver leaves by os._exit, past atexit, but not past this.
        multiprocessing: Any = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:
            multiprocessing.Finalize(None, self.close, exitpriority=0)
        if progress_ms:
            self._listener.tell_progress(Pace(self.rank, progress_ms, stacks.stand_by()))
        self._listener.start()

    def boundary(self, here: Position) -> None:
        """The slow path of a boundary: park, save, go on, or raise Preempted. `rank.entered` is stored already (rule 1)."""
        while not self._over:
            with self._changed:
                decision = self.rank.at_boundary(here, now_ms())
                while decision.step is Step.WAIT:
                    self._listener.ring()  # There may be something to say, and to repeat from now on.
                    self._changed.wait(PARK_SECONDS)
                    decision = self.rank.at_boundary(here, now_ms())
                if decision.step is Step.LEAVE:
                    self._leave()
                self._listener.ring()
            if decision.order is None:
                return
            self._save(decision.order)

    def finish(self) -> None:
        """The training loop is over. The listener stays, to answer so (rule 9)."""
        if self._over:
            return
        self._over = True
        with self._changed:
            self.rank.finish()
            self._listener.ring()
        self._listener.flush()

    def close(self) -> None:
        """The process ends. May be called again: by atexit, and by multiprocessing where that is imported."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        # Dying of an uncaught exception is no end of training, although the loop is over: the job must not be taken for one that
        # failed by itself while a notice is in force.
        died = _fatal()
        if isinstance(died, Exception | KeyboardInterrupt):
            with self._changed:
                self.rank.died(one_line(died))
            self._over = True
        self.finish()
        self._listener.close()

    def _leave(self) -> None:
        # Twice at most: the second one says that the first was ignored, a third would say nothing new.
        if self._said_left < 2:
            self._said_left += 1
            self.rank.left()
        self._listener.ring()
        raise Preempted

    def _save(self, order: wire.SaveAt) -> None:
        with self._changed:
            self.rank.save_began(order)
            self._listener.ring()
        began_ms = now_ms()
        failed = ""
        try:
            files = self._attempt(order, began_ms)
        except SaveError as error:
            failed = str(error) or "SaveError"
        except BaseException as error:
            failed = one_line(error)  # KeyboardInterrupt and the like go on up, but the round must not wait for them.
            raise
        finally:
            with self._changed:
                if failed:
                    self.rank.save_failed(order, failed)
                else:
                    self.rank.save_ended(order, files, now_ms() - began_ms)
                self._listener.ring()

    def _attempt(self, order: wire.SaveAt, began_ms: int) -> tuple[SavedFile, ...]:
        """Call the save. The one place where whatever a save may raise becomes a SaveError."""
        try:
            Path(order.directory).mkdir(parents=True, exist_ok=True)
            files = self._saver(order)
            saved = wire.Saved(self.rank.who, order.round, order.at.n, files, now_ms() - began_ms)
            if len(files) > wire.FILES_MAX or len(wire.encode(saved)) > wire.FRAME_BYTES_MAX - 64:
                raise SaveError(f"{len(files)} files are too many to be reported")
        except SaveError:
            self._tell_why(order)
            raise
        # Broad on purpose: the save is foreign code, and training is never made worse by it (docs/protocol.md).
        except Exception as error:
            self._tell_why(order)
            raise SaveError(one_line(error)) from error
        return files

    def _tell_why(self, order: wire.SaveAt) -> None:
        """The trace, for whoever wrote the save. Not where the round was given up meanwhile, for another rank's sake.

        What it wrote was removed under it then: that no such file is there says nothing, and buries what has happened.
        """
        if order.round > self.rank.done:
            _print_trace()

    def _forked(self) -> None:
        """In a forked child: silent for ever. The lock may be held by a thread that does not exist here, so it is replaced."""
        self._over = True
        self._changed = threading.Condition()
        self._listener.forked()
        self.rank.hold = NO_ROUND
        self.rank.due = NEVER


def _fatal() -> object:
    """The exception that ends this process, None where it ends in good order."""
    raised = sys.exc_info()[1]
    if raised is not None:
        # multiprocessing calls from a `finally`, on the exception's way up; torch's mp.spawn hands it on and exits with a status.
        return raised.__context__ if isinstance(raised, SystemExit) and raised.code else raised
    # The interpreter has set it by now, and for SystemExit it does not. Consoles, test runners and C code set it as well, for
    # what they have printed and survived: what ended the program went through its outermost frame.
    last = getattr(sys, "last_value", None)
    trace = getattr(sys, "last_traceback", None) or getattr(last, "__traceback__", None)
    if trace is None or trace.tb_frame.f_back is not None:
        return None
    programs = [vars(sys.modules[name]) for name in ("__main__", "runpy") if name in sys.modules]
    return last if any(trace.tb_frame.f_globals is names for names in programs) else None


def _print_trace() -> None:
    """The trace of what a save raised. A closed stderr is no reason to end a training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        traceback.print_exc()


def gil_is_off() -> bool:
    """Whether two threads may see each other's writes out of order: rule 1 relies on the GIL."""
    enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return enabled is not None and not enabled()
