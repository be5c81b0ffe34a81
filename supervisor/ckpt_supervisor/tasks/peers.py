"""The step's other supervisors, as the loop speaks to them: what goes out is gathered for one turn, what comes in is sorted.

Owns the gathering (one frame a task and turn, where a word to each rank would be thousands) and the exit together. Must not
decide anything: it moves words between adapters/links.py and the core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import zmq
from ckpt_client import wire

from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.core import between
from ckpt_supervisor.core import commands as do

WORDS_A_FRAME_MAX = 64
FILES_A_FRAME_MAX = 10_000
"""A rank's word may be 4 MiB long, a frame twice that: words of many files are not put together."""

STAY_MS = 3_000
"""Tasks that have not said goodbye by then are not waited for."""

SAY_AGAIN_MS = 200
"""The exit status is repeated this often."""

LINGER_MS = 500
"""Last words get this long to leave."""


class Hub(Protocol):
    """What is needed of links.Hub."""

    def send(self, task: int, word: between.Down) -> None:
        """One word to one task."""

    def broadcast(self, tasks: Iterable[int], word: between.Down) -> None:
        """One word to these tasks."""

    def receive(self) -> Iterator[between.Up | Garbage]:
        """The words that are here."""

    def answer_zap(self) -> list[Garbage]:
        """Let in who may come."""

    def closed(self) -> list[int]:
        """Tasks whose connections were closed."""

    def close(self, linger_ms: int) -> None:
        """Close, after what was sent is out."""


class Spoke(Protocol):
    """What is needed of links.Spoke."""

    def send(self, word: between.Up) -> None:
        """One word to the coordinator."""

    def close(self, linger_ms: int) -> None:
        """Close, after what was sent is out."""


class ToTasks:
    """What the coordinator says to ranks of other tasks, gathered by word and task until `flush`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: dict[object, tuple[wire.ToRank, dict[int, list[int]]]] = {}

    def say(self, command: do.Say) -> None:
        """One word to one rank. Words that are one object go out together; of "you are heard" all do, as it overtakes nothing."""
        word = command.word
        key = word if isinstance(word, wire.Wait) else id(word)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = (word, {})
        pids = waiting[1].get(command.task)
        if pids is None:
            waiting[1][command.task] = [command.pid]
        else:
            pids.append(command.pid)

    def flush(self) -> None:
        """Send what was gathered."""
        waiting, self._waiting = self._waiting, {}
        for word, tasks in waiting.values():
            for task, pids in tasks.items():
                self._hub.send(task, between.Tell(tuple(pids), word))


class ToCoordinator:
    """What a relay's ranks say, gathered until `flush`."""

    def __init__(self, spoke: Spoke, task: int) -> None:
        self._spoke = spoke
        self._task = task
        self._words: list[wire.FromRank] = []
        self._files = 0

    def pass_up(self, word: wire.FromRank) -> None:
        """One word of a rank."""
        files = len(word.files) if isinstance(word, wire.Saved) else 0
        if self._files + files > FILES_A_FRAME_MAX:
            self.flush()
        self._words.append(word)
        self._files += files
        if len(self._words) >= WORDS_A_FRAME_MAX:
            self.flush()

    def send(self, word: between.Up) -> None:
        """A word of this supervisor, after those of its ranks."""
        self.flush()
        if isinstance(word, between.Checked) and len(between.encode(word)) > between.FRAME_BYTES_MAX:
            problem = f"{len(word.files)} files of one task are too many to be reported"
            word = msgspec.structs.replace(word, problem=problem, files=())
        self._spoke.send(word)

    def flush(self) -> None:
        """Send what was gathered."""
        if self._words:
            words, self._words, self._files = self._words, [], 0
            heard = between.Heard(self._task, tuple(words))
            if len(words) > 1 and len(between.encode(heard)) > between.FRAME_BYTES_MAX:
                for word in words:
                    self._spoke.send(between.Heard(self._task, (word,)))
            else:
                self._spoke.send(heard)


def see_off(hub: Hub, poller: zmq.Poller, stand: between.Stand, tasks: frozenset[int]) -> frozenset[int]:
    """Tell these tasks the exit status until each has said goodbye, within a bound; who has not.

    `poller` tells of the hub's sockets. A task that has not joined yet is let in to hear it: nobody else will be there for it.
    """
    end_ms, next_ms = _now_ms() + STAY_MS, 0
    while tasks and (now := _now_ms()) < end_ms:
        if now >= next_ms:
            next_ms = now + SAY_AGAIN_MS
            hub.broadcast(tasks, stand)
        poller.poll(max(1, min(next_ms, end_ms) - now))
        tasks -= frozenset(hub.closed())  # Gone without a word.
        hub.answer_zap()
        for word in hub.receive():
            if isinstance(word, between.Report):
                hub.send(word.task, stand)
                tasks -= {word.task} if word.bye else frozenset()
    hub.close(LINGER_MS)
    return tasks


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
