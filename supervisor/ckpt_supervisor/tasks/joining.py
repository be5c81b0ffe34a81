"""How the supervisors of one step meet: task 0 lets itself be found, the others find it.

Owns the waits of this meeting and what is said while it lasts. Must not decide what the step does: a relay begins with the
coordinator's first word, and a signal that comes before that is kept for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import time

import zmq

from ckpt_supervisor.adapters import rendezvous
from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.links import Hub, NoLink, Spoke, reachable
from ckpt_supervisor.adapters.rendezvous import Invitation, NotYet
from ckpt_supervisor.adapters.signals import SignalInbox
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.config import Options
from ckpt_supervisor.core import between
from ckpt_supervisor.start.startup import Job

LOOK_AGAIN_MS = (20, 50, 100, 200)
"""Pauses between looks for the coordinator's file; the last one goes on."""

PROBE_S = 2.0
"""An address that does not answer by then is not the way to it."""

ANSWER_MS = 3_000
"""A coordinator that lives answers within this; an old file of one that does not is looked past."""

SAY_AGAIN_MS = 200
"""The first report is repeated this often: what is sent before the connection stands is lost."""

SIGNALLED_MS = 30_000
"""Whoever was told to leave waits this long for a coordinator, or KillWait if that was given, and not for the whole of
--join-timeout: it may have left already."""

LEAVING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

TELL_AFTER_MS = 10_000
"""Whoever has waited this long says for what."""


class NotJoined(Exception):
    """The coordinator was not found; the message says what was looked for and what to do."""


class Concluded(Exception):
    """The step was over before this task came."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(line)
        self.code = code


class Interrupted(Exception):
    """A signal came that asks to leave, and no coordinator was found to ask."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """A task's supervisor that has heard the coordinator."""

    spoke: Spoke
    invitation: Invitation
    epoch: int
    heard: tuple[between.Down, ...]
    signals: tuple[int, ...]
    """What came meanwhile."""

    @property
    def start(self) -> between.Stand | None:
        """What the command is to be started from, if that is known already and nothing else is wanted."""
        for word in self.heard:
            if isinstance(word, between.Stand) and word.restart >= 0 and not word.end and word.code is None:
                return word
        return None


def open_hub(stack: contextlib.ExitStack, options: Options, job: Job, epoch: int) -> Hub:
    """Let the other tasks in, and have them find this one. Raises NoLink, ValueError or OSError."""
    hub = stack.enter_context(Hub(options.interface))
    path = rendezvous.publish(options.dir, hub.invite(job.name, job.attempt, job.step_id, epoch))
    stack.callback(rendezvous.withdraw, path)
    return hub


def join(stack: contextlib.ExitStack, options: Options, job: Job, inbox: SignalInbox) -> Joined:
    """Find the coordinator and hear from it. Raises NotJoined, Interrupted, or Concluded."""
    waiting = _Waiting(options, job, inbox)
    # One name for all tries: a coordinator that was slow may read the first report when the second connection is there already.
    me = secrets.token_hex(8)
    while True:
        invitation = waiting.find()
        endpoint = reachable(invitation, PROBE_S)
        if endpoint is None:
            waiting.pause(f"{invitation.host} (process {invitation.pid}) does not answer at {', '.join(invitation.addresses)}")
            continue
        with contextlib.ExitStack() as undo:
            try:
                spoke = undo.enter_context(Spoke(invitation, job.task, me))
                spoke.connect(endpoint)
            except (NoLink, ValueError) as error:
                raise NotJoined(str(error)) from error
            heard = _greet(spoke, job.task, invitation.epoch, waiting)
            if heard:
                stack.push(undo.pop_all())
                return Joined(spoke, invitation, invitation.epoch, heard, tuple(waiting.signals))
        waiting.pause(f"no answer of task 0's supervisor at {endpoint}")


class _Waiting:
    """The bounded wait, and what it has seen last."""

    def __init__(self, options: Options, job: Job, inbox: SignalInbox) -> None:
        self._options = options
        self._job = job
        self.inbox = inbox
        self._began_ms = now_ms()
        self._told = False
        self._looks = 0
        self._signalled_ms: int | None = None
        self.signals: list[int] = []

    def find(self) -> Invitation:
        """Look until there is an invitation."""
        job, directory = self._job, self._options.dir
        key = (job.name, job.attempt, job.step_id)
        while True:
            end = rendezvous.concluded(directory, key, "" if job.slurm is None else job.slurm.srun)
            if end is not None:
                raise Concluded(end.code, f"task 0's supervisor has left before task {job.task} came: {end.line}")
            found = rendezvous.find(directory, job.name, job.attempt, job.step_id)
            if isinstance(found, Invitation):
                return found
            self.pause(found.reason if isinstance(found, NotYet) else f"refused: {found.reason}")

    def pause(self, reason: str) -> None:
        """Wait a little. Raises NotJoined when it has taken too long."""
        waited_ms = now_ms() - self._began_ms
        if self._signalled_ms is None and (LEAVING | set(self._options.notice_signals)) & set(self.signals):
            self._signalled_ms = now_ms()
        stays_ms = 0 if self.signals.count(signal.SIGINT) > 1 else self._options.kill_wait_ms or SIGNALLED_MS
        if self._signalled_ms is not None and now_ms() - self._signalled_ms >= stays_ms:
            raise Interrupted(f"task {self._job.task} was interrupted before it had found task 0's supervisor ({reason})")
        where = f"{self._options.dir}{os.sep}{rendezvous.DIRECTORY}"
        if waited_ms >= self._options.join_timeout_ms:
            raise NotJoined(
                f"task {self._job.task} has not found task 0's supervisor through {where} within {waited_ms // 1000} s "
                f"({reason}): --dir has to be on a file system that all nodes of the job share, and this one may be a directory "
                "of this node's own; every task has to run ckpt-supervise; if task 0 has refused to start, its own line says why"
            )
        if waited_ms >= TELL_AFTER_MS and not self._told:
            self._told = True
            say(f"task {self._job.task} is waiting for task 0's supervisor to be found through {where} ({reason})")
        pause_ms = LOOK_AGAIN_MS[min(self._looks, len(LOOK_AGAIN_MS) - 1)]
        self._looks += 1
        end_ms = now_ms() + pause_ms
        poller = zmq.Poller()
        poller.register(self.inbox.fileno(), zmq.POLLIN)
        while (left_ms := end_ms - now_ms()) > 0:
            if poller.poll(left_ms):
                self.signals += self.inbox.drain()


def _greet(spoke: Spoke, task: int, epoch: int, waiting: _Waiting) -> tuple[between.Down, ...]:
    """Report until there is an answer; nothing when there is none."""
    poller, inbox = zmq.Poller(), waiting.inbox
    poller.register(spoke.socket, zmq.POLLIN)
    poller.register(inbox.fileno(), zmq.POLLIN)
    report = between.Report(task, between.VERSION, epoch, os.uname().nodename, os.getpid())
    end_ms, next_ms = now_ms() + ANSWER_MS, now_ms()
    while (now := now_ms()) < end_ms:
        if now >= next_ms:
            next_ms = now + SAY_AGAIN_MS
            spoke.send(report)
        ready = dict(poller.poll(max(1, min(next_ms, end_ms) - now)))
        if inbox.fileno() in ready:
            waiting.signals += inbox.drain()
        heard = tuple(word for word in spoke.receive() if not isinstance(word, Garbage))
        if heard:
            return heard
    return ()


def now_ms() -> int:
    """Monotonic clock in whole milliseconds."""
    return time.monotonic_ns() // 1_000_000
