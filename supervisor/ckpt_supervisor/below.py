"""The processes below this supervisor, as the loop has them: the command, the ranks, and what came back to it as an orphan.

Owns their descriptors in the loop's poller, what their ends mean, and the shield's looks at them (docs/slurm.md, section 4). Must
not decide whether anything is to be ended: it ends all when it is told to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from ckpt_client.wire import Who

from ckpt_supervisor import children
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.handover import Handover
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.shield import SETTLED_MS, Shield, next_sweep_ms
from ckpt_supervisor.signals import signal_name

SWEEP_MS = 1_000
"""The shield looks at the command's processes this often; half a millisecond of CPU a look is half of what we may cost."""

ENDED_MAX = 1_000
"""Most ranks whose ends are remembered; torchrun may start its workers again and again."""


class Below:
    """The command and everything below it. `feed` takes the events of its ends, `log` the journal's lines."""

    def __init__(
        self, launch: Launch, poller: zmq.Poller, feed: Callable[[ev.Event], None], log: Callable[[Entry], None], now_ms: int
    ) -> None:
        self._launch = launch
        self._poller = poller
        self._feed = feed
        self._log = log
        self.child: children.Child | None = None
        self._dropped: children.Child | None = None
        """A command that was ended for the next start and is not reaped yet; what waits for that."""
        self._then: Callable[[], None] = _nothing
        self._rank_fds: dict[Who | int, int] = {}
        """Of ranks; and, below a shell that has died of the broadcast, by pid of what lives on without being attached."""
        self._ended_pids: list[int] = []
        self._orphaned: int | None = None
        """Status of a command that has died of the notice's own broadcast while ranks below it live on."""
        self._rank_codes: list[int] = []
        self._shield = Shield()
        number = launch.options.pass_signal
        self.handover = None if number is None else Handover(number, launch.claims, launch.env)
        self._signalled = False
        self._sweep_at_ms = now_ms + SWEEP_MS  # Not at once: the claims are locked while the journal's library is imported.

    def started(self, child: children.Child) -> None:
        """The command runs."""
        self.child = child
        self._poller.register(child.pidfd, zmq.POLLIN)
        if self.handover is not None and self._launch.job.slurm is not None:
            self.handover.stand_by()

    def watch(self, who: Who) -> None:
        """Learn of this rank's end by its pidfd. A pid of another namespace is not ours to watch: its silence will tell."""
        if who in self._rank_fds or not children.is_descendant(who.pid):
            return
        fd = children.pidfd(who.pid)
        if fd is not None:
            self._rank_fds[who] = fd
            self._poller.register(fd, zmq.POLLIN)

    def ended(self, ready: Mapping[Any, int]) -> None:
        """See which of these descriptors tell of an end."""
        for who, fd in list(self._rank_fds.items()):
            if fd in ready:
                self._poller.unregister(fd)
                os.close(fd)
                del self._rank_fds[who]
                self._ended_pids = [*self._ended_pids, _pid(who)][-ENDED_MAX:]
                if isinstance(who, Who):
                    self._feed(ev.RankGone(who, "its process has ended"))
        if self._orphaned is not None and not self._rank_fds:
            self.reap()
            code, self._orphaned = max(self._rank_codes, default=self._orphaned), None
            self._feed(ev.CommandExited(code))
        dropped = self._dropped
        if dropped is not None and dropped.pidfd in ready and dropped.status() is not None:
            self._poller.unregister(dropped.pidfd)
            dropped.close()
            self._dropped = None
            self._then()
        child = self.child
        if child is None or child.pidfd not in ready:
            return
        status = child.status()
        if status is not None:
            self._poller.unregister(child.pidfd)
            child.close()
            self.child = None
            self._command_ended(status, child)

    def _command_ended(self, code: int, child: children.Child) -> None:
        """A shell between that clears its signal mask (dash) dies of Slurm's broadcast: then it is over when its ranks are."""
        options = self._launch.options
        broadcast = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *options.notice_signals, *options.save_signals}
        broadcast.add(options.pass_signal or signal.SIGTERM)
        # By the signal itself: a program that leaves with the status of one has come to its own end, whatever it leaves behind.
        if code - 128 in broadcast and child.returncode == 128 - code:
            self._watch_program(child.pid)
        if code - 128 in broadcast and self._rank_fds:
            pids = sorted(map(_pid, self._rank_fds))
            self._log(Entry("command_orphaned", "warning", {"code": code, "rank_pids": pids}))
            self._orphaned, self._rank_codes = code, []
        else:
            self._feed(ev.CommandExited(code))

    def reap(self) -> None:
        """Collect orphans. A rank's own status stands for that of a command that has died before it."""
        for pid, returncode in children.reap_orphans(self._launch.claims).items():
            if self._orphaned is not None and (pid in self._ended_pids or pid in map(_pid, self._rank_fds)):
                self._rank_codes.append(children.exit_code(returncode))

    def _watch_program(self, command: int) -> None:
        """A program that saves by itself attaches nowhere: below a dead shell it is whoever catches the signal that it saves at.

        Unless the command was the program itself, and has died of that signal once it had saved.
        """
        if self.handover is None or command in self.handover.told:
            return
        known = set(map(_pid, self._rank_fds))
        for pid in self.handover.program(None):
            fd = None if pid in known else children.pidfd(pid)
            if fd is not None:
                self._rank_fds[pid] = fd
                self._poller.register(fd, zmq.POLLIN)

    def hand_on(self, now_ms: int) -> bool:
        """Give the program the signal that it saves at, when it is time to; whether it turned out to have it already."""
        handover = self.handover
        if handover is None or handover.due_ms is None or now_ms < handover.due_ms:
            return False
        number = self._launch.options.pass_signal
        assert number is not None
        pids, by_slurm = handover.hand_on(None if self.child is None else self.child.pid)
        self._log(Entry("signal_passed", "info", {"signal": signal_name(number), "pids": pids, "by_slurm": by_slurm}))
        return by_slurm

    def signalled(self) -> None:
        """A signal came: what the same broadcast left pending below us is to be known as such, and at once."""
        self._signalled = True
        self._sweep_at_ms = 0

    @property
    def sweep_at_ms(self) -> int | None:
        """When `sweep` has something to do; None when nothing runs."""
        return None if self.child is None and self._orphaned is None else self._sweep_at_ms

    def sweep(self, now_ms: int, *, quiet: bool) -> None:
        """Complete terminations that the shield holds up; not `quiet`: a notice is in force, only note what is from outside."""
        if self.sweep_at_ms is None or now_ms < self._sweep_at_ms:
            return
        quiet = quiet and not self._signalled
        self._signalled = False
        # CPU of this thread: on a busy machine, or while another thread imports, the clock on the wall says seconds.
        began_us = time.thread_time_ns() // 1_000
        for pid in self._shield.sweep(children.descendants(self._launch.claims), now_ms, quiet=quiet):
            self._log(Entry("termination_completed", "info", {"pid": pid}))
        cost_us = time.thread_time_ns() // 1_000 - began_us
        pause_ms = SETTLED_MS if self._shield.is_waiting(now_ms) else max(SWEEP_MS, next_sweep_ms(cost_us))
        self._sweep_at_ms = now_ms + pause_ms

    def end(self) -> None:
        """End every process below us, but not a scontrol that is just at work for us."""
        if self.handover is not None:
            self.handover.end()
        killed = children.end_all(signal.SIGKILL, self._launch.claims)
        if killed:
            self._log(Entry("killed", "info", {"pids": killed}))
        children.reap_orphans(self._launch.claims)

    def end_for_restart(self, then: Callable[[], None]) -> None:
        """End everything, and call `then` when the command that still ran is over: two of them share no GPU.

        That end is not told, as it is not the next one's.
        """
        self.end()
        self._orphaned = None
        if self.child is None:
            then()
        else:
            self._dropped, self._then, self.child = self.child, then, None

    def end_command(self, *, runs: bool) -> None:
        """End the command. `runs`: its end is waited for, even if it has not been started yet."""
        self.end()
        self._orphaned = None
        if self.child is None and runs:
            self._feed(ev.CommandExited(128 + signal.SIGKILL))


def _pid(who: Who | int) -> int:
    return who if isinstance(who, int) else who.pid


def _nothing() -> None:
    return None
