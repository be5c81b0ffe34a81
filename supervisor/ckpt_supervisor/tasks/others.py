"""The two ends of a step of several tasks, as the loop has them: `Coordinating` in task 0's supervisor, `Following` in each other
one.

Owns what such a supervisor has beside the loop of one task: its link, what it gathers for it, and, in a relay, the relay's state.
Must not decide: the core does; nor carry out commands that any supervisor has: app.py does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import msgspec
import zmq
from ckpt_client import wire

from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.adapters.links import WORDS_PER_TURN_MAX, Hub, reachable
from ckpt_supervisor.core import between, relay, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.describe_relay import describe
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import State
from ckpt_supervisor.lines import Lines
from ckpt_supervisor.start.resume_gate import Resume
from ckpt_supervisor.tasks.joining import Joined
from ckpt_supervisor.tasks.peers import LINGER_MS, ToCoordinator, ToTasks, see_off

JOINING_MS = 30_000
"""So soon after the start tasks that have not joined yet may still come, and are waited for to hear the end."""

REACH_MS = 5_000
REACH_S = 2.0
"""While the coordinator is lost it is looked for this often, for so long."""


class Coordinating:
    """Task 0's end: the hub, and what goes out to the other tasks."""

    def __init__(self, hub: Hub, lines: Lines) -> None:
        self._hub = hub
        self._lines = lines
        self._to_tasks = ToTasks(hub)
        self.is_behind = False
        """More has come than was taken in in the last turn."""
        self.on_hangs: Callable[[between.Busy | between.Stuck], None] = lambda _: None
        """Takes what is not the machine's."""

    def register(self, poller: zmq.Poller) -> None:
        """Have the loop woken by what comes."""
        poller.register(self._hub.socket, zmq.POLLIN)
        poller.register(self._hub.zap_socket, zmq.POLLIN)
        poller.register(self._hub.closings.socket, zmq.POLLIN)

    def closed(self) -> list[ev.TaskCut]:
        """Connections that were closed."""
        return [ev.TaskCut(task) for task in self._hub.closed()]

    def receive(self) -> Iterator[between.Report | between.Heard | between.Checked]:
        """What the other tasks say. Who may connect is answered here too."""
        for denied in (*self._hub.answer_zap(), *self._hub.strangers()):
            self._lines.garbage(denied)
        count = 0
        for word in self._hub.receive():
            count += 1
            if isinstance(word, Garbage):
                self._lines.garbage(word)
            elif isinstance(word, between.Busy | between.Stuck):
                self.on_hangs(word)
            else:
                yield word
        self.is_behind = count >= WORDS_PER_TURN_MAX

    def say(self, command: do.Say) -> None:
        """A word to a rank of another task."""
        self._to_tasks.say(command)

    def tell(self, command: do.Announce | do.TurnAway, state: State) -> None:
        """A word to the other supervisors."""
        match command:
            case do.Announce(stand=stand, tasks=some):
                self._hub.broadcast([task.number for task in state.tasks] if some is None else some, stand)
            case do.TurnAway(task=task, reason=reason):
                self._hub.send(task, between.Turned(reason))

    def have_checked(self, command: do.Verify | do.CheckAgain) -> None:
        """Have each task verify its share."""
        for share in command.shares:
            self._hub.send(share.task, between.Check(command.round, command.partial, share.pids, command.full))

    def excuse(self, word: between.Excused, numbers: Iterable[int]) -> None:
        """Tell these tasks what ranks of the job are busy with."""
        self._hub.broadcast(numbers, word)

    def flush(self) -> None:
        """Send what was gathered in this turn."""
        self._to_tasks.flush()

    def part(self, policy: Policy, state: State, code: int, now_ms: int) -> None:
        """Have all tasks leave with this status; bounded."""
        self.flush()
        gone = {task.number for task in state.tasks if task.gone or task.bye}
        poller = zmq.Poller()
        self.register(poller)
        stand = msgspec.structs.replace(tasks.stand(policy, state, now_ms), code=code)
        young = now_ms - state.began_ms < JOINING_MS
        there = frozenset(range(1, policy.tasks)) if young else frozenset(task.number for task in state.tasks)
        late = see_off(self._hub, poller, stand, there - gone)
        if late:
            self._lines.log(Entry("tasks_stay", "warning", {"of_tasks": sorted(late)}))


class Following:
    """Another task's end: the way to the coordinator, and the relay's state."""

    def __init__(self, joined: Joined, task: int, lines: Lines, now_ms: int) -> None:
        self._reach_at_ms: int | None = None
        self._joined = joined
        self._task = task
        self._lines = lines
        self._up = ToCoordinator(joined.spoke, task)
        self.on_hangs: Callable[[between.Excused], None] = lambda _: None
        """Takes what is not the relay's."""
        self.relay = relay.start(task, joined.epoch, os.uname().nodename, os.getpid(), now_ms)

    def register(self, poller: zmq.Poller) -> None:
        """Have the loop woken by what comes."""
        poller.register(self._joined.spoke.socket, zmq.POLLIN)
        poller.register(self._joined.spoke.closings.socket, zmq.POLLIN)

    def closed(self) -> list[ev.TaskCut]:
        """Whether the connection was closed."""
        return [ev.TaskCut(0)] if self._joined.spoke.closed() else []

    @property
    def is_lost(self) -> bool:
        """The coordinator is not heard: the machine decides here, for this task."""
        return self.relay.lost

    @property
    def is_calm(self) -> bool:
        """The coordinator knows of no notice."""
        return self.relay.stand is None or self.relay.stand.left_ms is None

    @property
    def resume(self) -> Resume:
        """What the coordinator has chosen."""
        stand = self.relay.stand
        return Resume("", -1, ()) if stand is None else Resume(stand.resume_from, stand.resume_step, ())

    def started(self, stand: between.Stand) -> None:
        """The command runs already, as this word wants it."""
        self.relay = relay.started(self.relay, stand)

    def early(self) -> tuple[tuple[int, ...], tuple[ev.FromCoordinator, ...]]:
        """Signals and words that came before the loop began."""
        return self._joined.signals, tuple(word for word in self._joined.heard if not isinstance(word, between.Excused))

    def receive(self) -> Iterator[ev.FromCoordinator]:
        """What the coordinator says."""
        for word in self._joined.spoke.receive():
            if isinstance(word, Garbage):
                self._lines.garbage(word)
            elif isinstance(word, between.Excused):
                self.on_hangs(word)
            else:
                yield word

    def stamped(self, word: wire.FromRank) -> wire.FromRank:
        """A word of a rank of this task, as the coordinator knows it."""
        return between.stamped(word, self._task)

    def step(self, policy: Policy, heir: State, event: ev.Event | ev.FromCoordinator, now_ms: int) -> tuple[do.RelayCommand, ...]:
        """One event; what is to be carried out. While the coordinator is lost that is to go on reporting, and no more."""
        before = self.relay
        if not isinstance(event, relay.Event):
            return ()
        if before.lost and isinstance(event, between.Stand) and not relay.may_follow_again(heir):
            return ()
        self.relay, commands = relay.step(policy, before, event, now_ms)
        if before.lost and self.relay.lost:
            return tuple(command for command in commands if isinstance(command, do.SendUp))
        for entry in describe(event, before, self.relay, commands):
            self._lines.log(entry)
        return commands

    def say(self, command: do.PassUp | do.SendUp) -> None:
        """A word to the coordinator."""
        match command:
            case do.PassUp(word=word):
                self._up.pass_up(word)
            case do.SendUp(word=word):
                self._up.send(word)

    def tell(self, word: between.Busy | between.Stuck) -> None:
        """What the watch on hangs has to say to the coordinator's."""
        self._up.send(word)

    @property
    def reach_at_ms(self) -> int | None:
        """When `reach` has something to do; None while the coordinator is heard."""
        return self._reach_at_ms if self.is_lost else None

    def reach(self, lanes: Lanes, now_ms: int) -> None:
        """A connection that libzmq has given up, or that somebody else has answered, is only made anew when it is asked for."""
        if not self.is_lost:
            self._reach_at_ms = None
        elif self._reach_at_ms is None:
            self._reach_at_ms = now_ms + REACH_MS
        elif now_ms >= self._reach_at_ms:
            self._reach_at_ms = now_ms + REACH_MS
            joined = self._joined
            lanes.post("meeting", "reaching task 0", lambda: reachable(joined.invitation, REACH_S), self._reached)

    def _reached(self, endpoint: object) -> None:
        if isinstance(endpoint, str) and self.is_lost:
            self._joined.spoke.connect(endpoint)

    def flush(self) -> None:
        """Send what was gathered in this turn."""
        self._up.flush()

    def abandon(self) -> None:
        """Leave after a fault of our own, with the training still running: silence is to tell, no end of this task."""
        state = self.relay
        self._up.send(between.Report(state.task, between.VERSION, state.epoch, state.host, state.pid, state.signals, bye=True))
        self.part()

    def part(self) -> None:
        """Leave: the last words get a moment to go out."""
        self._up.flush()
        self._joined.spoke.close(LINGER_MS)
