"""The processes below this supervisor, as the loop has them: the command, the ranks, and what came back to it as an orphan.

Owns their descriptors in the loop's poller, what their ends mean, and the shield's looks at them (docs/slurm.md, section 4). Must
not decide whether anything is to be ended: it ends all when it is told to.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from ckpt_client.wire import Who

from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.shield import Shield
from ckpt_supervisor.adapters.signals import signal_name
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.linux.oom_kills import Kills
from ckpt_supervisor.linux.segments import Segment, segments_of
from ckpt_supervisor.processes import ending
from ckpt_supervisor.processes.handover import Handover

FIRST_SWEEP_MS = 100
"""When the shield looks for the first time; after that it says itself when."""

PART_S = 0.2
"""A guard that was let go has this long to end with what is left; it goes on without us."""

OUT_S = 2.0
"""The same at our own end, where nobody is to be left; within milliseconds, unless somebody sleeps uninterruptibly."""

RESTART_S = 3.0
"""Before the next start in place: a process with a GPU takes a moment to let it go."""

OVERDUE_MS = 1_000
"""The guard's word of the command's end comes within a millisecond."""

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
        self._held: children.Child | None = None
        """The command that runs, or ran last: its guard still has what is left below it."""
        self._end_fd: int | None = None
        """The command's pidfd, beside its guard's word."""
        self.overdue_ms: int | None = None
        """When that word is overdue."""
        self._is_woken = False
        self._then: Callable[[], None] | None = None
        """What waits for the end of a command that was ended for the next start."""
        self._rank_fds: dict[Who | int, int] = {}
        """Of ranks; and, below a shell that has died of the broadcast, by pid of what lives on without being attached."""
        self._ended_pids: list[int] = []
        self._orphaned: int | None = None
        """Status of a command that has died of the notice's own broadcast while ranks below it live on."""
        self._segments: frozenset[Segment] = frozenset()
        """Shared memory of those that were killed: nobody else removes it."""
        self._codes: dict[int, int] = {}
        """Exit statuses of orphans, by pid, since then."""
        number = launch.options.pass_signal
        # Where SIGTERM is not blocked below us nothing holds a termination up; one that is pending is the program's own affair.
        self._shield = None if number == signal.SIGTERM else Shield(self._below_guard)
        self.handover = None if number is None else Handover(number, launch.claims)
        self._kills = Kills()
        self._has_ended = False
        """We have sent SIGKILL to what runs."""
        self._signalled = False
        self._pressed_ms = -1
        self._sweep_at_ms = now_ms + FIRST_SWEEP_MS

    def started(self, child: children.Child) -> None:
        """The command runs."""
        self._let_go()
        self.child = self._held = child
        self._is_woken = self._has_ended = False
        self._kills.mark()
        self._poller.register(child.fileno(), zmq.POLLIN)
        self._end_fd = children.pidfd(child.pid)
        if self._end_fd is not None:
            self._poller.register(self._end_fd, zmq.POLLIN)
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
        # First: what the guard says may start the next command, whose descriptors may have the same numbers.
        if self._end_fd is not None and self._end_fd in ready:
            self._stop_watching()
            self.overdue_ms = _now_ms() + OVERDUE_MS
        held = self._held
        if held is not None and held.fileno() in ready:
            self._hear(held)
        self._wake_guard()
        if self._orphaned is not None and not self._rank_fds:
            self._last_ranks_ended(self._orphaned)

    def _stop_watching(self) -> None:
        fd, self._end_fd = self._end_fd, None
        self.overdue_ms = None
        if fd is not None:
            self._poller.unregister(fd)
            os.close(fd)

    def _wake_guard(self) -> None:
        """The command is over and its guard has not said so: somebody has stopped it. If waking it does not help, it is lost."""
        held = self._held
        if self.overdue_ms is None or held is None or _now_ms() < self.overdue_ms:
            return
        if held.status() is not None or procfs.state_of(held.pid) not in ("zombie", "gone"):
            self.overdue_ms = None  # It is told with the next look.
            return
        children.send(held.guard_pid, signal.SIGKILL if self._is_woken else signal.SIGCONT)
        self._is_woken, self.overdue_ms = True, _now_ms() + OVERDUE_MS

    def _hear(self, held: children.Child) -> None:
        """What the guard tells."""
        for news in held.take():
            if isinstance(news, children.Broadcast):
                self._broadcast(news)
            elif isinstance(news, children.Lost):
                self._guard_lost(held)
            elif news.pid != held.pid:
                if self._orphaned is not None:
                    self._codes[news.pid] = children.exit_code(news.returncode)
            elif self._then is not None:
                self._dropped_ended()
            else:
                self.child = None
                self._command_ended(children.exit_code(news.returncode), held)

    def _broadcast(self, news: children.Broadcast) -> None:
        self.signalled()
        if self.handover is not None:
            self.handover.came_to_all(news.number, _now_ms())

    def _guard_lost(self, held: children.Child) -> None:
        """The command has died with it. What it leaves behind comes back to us, and is ended: nobody watches over it any more."""
        self._log(Entry("guard_lost", "error", {"guard_pid": held.guard_pid}))
        if held is not self._held:
            return  # It was that of an earlier start, and what was below it has been ended.
        self._let_go()
        self.end()

    def _let_go(self, wait_s: float = PART_S) -> None:
        """Part from the guard, which ends what may be left below it."""
        held, self._held = self._held, None
        self._stop_watching()
        if held is not None:
            self._poller.unregister(held.fileno())
            held.close(wait_s)

    def _dropped_ended(self) -> None:
        then, self._then = self._then, None
        self._let_go(RESTART_S)
        if then is not None:
            then()

    def _last_ranks_ended(self, code: int) -> None:
        """Their own statuses stand for that of a command that has died before them."""
        held, end_s = self._held, time.monotonic() + PART_S
        while held is not None and not self._codes.keys() & set(self._ended_pids) and time.monotonic() < end_s:
            children.readable(held.fileno(), 0.01)  # The guard may be about to say so.
            self._hear(held)
            held = self._held
        self.reap()
        self._orphaned = None
        code = max((self._codes[pid] for pid in self._ended_pids if pid in self._codes), default=code)
        self._feed(ev.CommandExited(code, why=self._why(code)))

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
            self._orphaned = code
            self._codes.clear()
        else:
            self._feed(ev.CommandExited(code, pid=child.pid, why=self._why(code)))

    def _why(self, code: int) -> str:
        """What the kernel knows of it beyond the status."""
        return self._kills.why(code, "step" if self._launch.job.slurm is not None else "run", is_killed=self._has_ended)

    def reap(self) -> None:
        """Collect orphans, if the guard is gone or has never been there."""
        for pid, returncode in children.reap_orphans(self._launch.claims).items():
            self._codes[pid] = children.exit_code(returncode)

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

    def _below_guard(self) -> list[int]:
        """Without asking the claims, which may be locked for as long as an exec of ours takes."""
        held = self._held
        return children.descendants(self._launch.claims) if held is None else procfs.descendants(held.guard_pid)

    def hand_on(self, now_ms: int, *, calm: bool) -> bool:
        """Give the program the signal that it saves at, when it is time to; whether it turned out to have it already."""
        handover = self.handover
        if handover is not None and calm:
            handover.calm(now_ms)
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
        if self._shield is not None:
            self._shield.hurry()
        self._sweep_at_ms = 0

    @property
    def times_ms(self) -> list[int | None]:
        """When there is something to do without anything coming in."""
        return [self.sweep_at_ms, self.overdue_ms, None if self.handover is None else self.handover.due_ms]

    @property
    def sweep_at_ms(self) -> int | None:
        """When `sweep` has something to do; None when nothing runs."""
        runs = self.child is not None or self._orphaned is not None
        return self._sweep_at_ms if runs and self._shield is not None else None

    def sweep(self, now_ms: int, *, quiet: bool) -> None:
        """Complete terminations that the shield holds up; not `quiet`: a notice is in force, what is from outside is its."""
        if self._shield is None or self.sweep_at_ms is None or now_ms < self._sweep_at_ms:
            return
        quiet = quiet and not self._signalled
        self._signalled = False
        for done in self._shield.sweep(now_ms, quiet):
            self._log(Entry("termination_completed", "info", dataclasses.asdict(done)))
        self._sweep_at_ms = self._shield.next_ms(now_ms)

    def press(self, notice_ms: int) -> None:
        """The ranks are late for the save: nobody of them is to wait for somebody whose end the shield holds up.

        Once for each notice, which has come at that instant.
        """
        if self._shield is None or notice_ms == self._pressed_ms:
            return
        self._pressed_ms = notice_ms
        for done in self._shield.press({_pid(who) for who in self._rank_fds}):
            self._log(Entry("termination_completed", "info", dataclasses.asdict(done)))

    def end(self) -> None:
        """End every process below us, but not a scontrol that is just at work for us, nor the guard."""
        self._segments |= segments_of(ending.alive(self._launch.claims))
        self._has_ended = True
        killed = ending.kill(self._launch.claims)
        if killed:
            self._log(Entry("killed", "info", {"pids": killed}))
        children.reap_orphans(self._launch.claims)

    @property
    def _tree(self) -> ending.Tree:
        return ending.Tree(self._held, self._launch.claims, self._shield)

    def ask_command(self) -> None:
        """SIGTERM to everybody below us: the last word before they are killed."""
        self._log(Entry("terminated", "info", {"pids": ending.ask(self._tree)}))

    def finish(self, ask_ms: int) -> None:
        """At our own end nobody of the step is left. `ask_ms`: how long whoever the command has left behind may take."""
        if self.handover is not None:
            self.handover.end()
        left = ending.finish(self._tree, ask_ms / 1_000, self._segments)
        if left.asked:
            self._log(Entry("left_behind", "info", {"processes": list(left.asked), "killed": list(left.killed)}))
        if left.segments:
            self._log(Entry("segments_removed", "info", {"segments": list(left.segments)}))
        if left.stuck:
            self._log(Entry("stuck", "error", {"processes": list(left.stuck)}))
            say(f"cannot be ended, not even by SIGKILL (uninterruptible sleep?): {', '.join(left.stuck)}")
        self._let_go(OUT_S)

    def end_for_restart(self, then: Callable[[], None]) -> None:
        """End everything, and call `then` when the command that still ran is over: two of them share no GPU.

        That end is not told, as it is not the next one's.
        """
        self.end()
        self._orphaned = None
        self._then = then
        if self.child is None:
            self._dropped_ended()
        self.child = None

    def end_before_start(self) -> None:
        """End what is left of a command that is over, and wait for it within a bound: two of them share no GPU."""
        self.end()
        self._let_go(RESTART_S)

    def end_command(self, *, runs: bool) -> None:
        """End the command. `runs`: its end is waited for, even if it has not been started yet."""
        self.end()
        self._orphaned = None
        if self.child is None and runs:
            self._feed(ev.CommandExited(128 + signal.SIGKILL))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _pid(who: Who | int) -> int:
    return who if isinstance(who, int) else who.pid
