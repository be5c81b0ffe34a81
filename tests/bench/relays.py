"""The supervisors of all tasks of one step but the coordinator, played by one process: `relays.py DIR TASKS RANKS ROUNDS`.

Owns a socket a task, with the options of links.Spoke (which has a context of its own, and so a thread), and the 8 ranks of the
coordinator's own task. Each is as quick as it can be: what is measured is the coordinator, and these share its cores. They find
it as tasks/joining.py does, report every second, answer Prepare with one frame for all ranks of a task, and then say that one
rank has failed, which ends the round. Must not decide what is slow: it prints one JSON object with the times of all rounds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
from ckpt_client import wire
from ckpt_client.wire import Position, Who
from ckpt_supervisor.adapters import links
from ckpt_supervisor.adapters.invitation import Invitation
from ckpt_supervisor.adapters.journal import read_lines
from ckpt_supervisor.adapters.rendezvous import find
from ckpt_supervisor.core import between
from ckpt_supervisor.core.tasks import BEAT_MS

from tests.bench.started import cpu_seconds
from tests.support.run import eventually

JOB, STEP = "4242", "0"
FIRST_PID = 10_000_000
"""Of the ranks that are played: no process has such a number."""

BOUND_S = 30.0
CALM_S = 0.4
"""A journal that has not grown for so long is up to date: its thread is not at work any more."""

NOTICE, SAVE = signal.SIGUSR1, signal.SIGUSR2


@dataclasses.dataclass(slots=True)
class Task:
    """One task's supervisor; of the coordinator's own task one rank."""

    number: int
    socket: zmq.Socket[bytes]
    ranks: tuple[Who, ...]
    next_beat: float
    signals: tuple[tuple[str, str, int], ...] = ()


class Round(NamedTuple):
    """What one took, in milliseconds."""

    asked: float
    """From the signal until the last rank's Prepare is here."""
    told: float
    """Until its SaveAt is."""
    cpu: float
    """Of the coordinator in that time, all threads."""
    crowd_cpu: float


class Crowd:
    """All of them."""

    def __init__(self, directory: Path, tasks: int, ranks: int) -> None:
        self.directory = directory
        self.world = tasks * ranks
        self.reached: dict[type, int] = {}
        """How many ranks have been told such a word since the last `forget`."""
        self.memory_mb: list[float] = []
        """The coordinator's, before anybody came, with all connected, with all attached, and after each round."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 2 * (tasks + ranks))
        self._epoll = select.epoll()
        self._by_fd: dict[int, Task] = {}
        self._tasks: list[Task] = []
        self._of_task = ranks

    # --- getting there ----------------------------------------------------------------------------------------------------

    def meet(self, tasks: int) -> None:
        """Connect them all, and have all their ranks attach."""
        invitation = eventually(lambda: _invited(self.directory), "the coordinator's invitation", BOUND_S)
        endpoint = links.reachable(invitation, BOUND_S)
        assert endpoint is not None
        self.pid, self._epoch = invitation.pid, invitation.epoch
        self._note_memory()
        now = time.monotonic()
        for number in range(1, tasks):
            first = number * self._of_task
            whos = tuple(Who(rank, 0, FIRST_PID + rank, number) for rank in range(first, first + self._of_task))
            # Their beats are spread over the second, as relay.start has it.
            self._add(Task(number, self._spoke(invitation, number, endpoint), whos, now + 1 + number * 37 % BEAT_MS / 1_000))
        for task in self._tasks:
            self._say(task, self._report(task))
        self.pump(lambda: self.reached.get(between.Stand, 0) >= tasks - 1, "a Stand for each task")
        self._note_memory()
        for rank in range(self._of_task):
            self._add(Task(0, self._rank(FIRST_PID + rank), (Who(rank, 0, FIRST_PID + rank),), float("inf")))
        for task in self._tasks:
            hellos = tuple(wire.Hello(who, wire.VERSION, self.world, who.rank % self._of_task, False) for who in task.ranks)
            self._say_of_ranks(task, hellos)
        self.pump(lambda: self.reached.get(wire.Welcome, 0) == self.world, "a Welcome for each rank")
        self._note_memory()

    def _note_memory(self) -> None:
        self.memory_mb.append(memory_mb(self.pid, "VmRSS"))

    def _spoke(self, invitation: Invitation, task: int, endpoint: str) -> zmq.Socket[bytes]:
        """As links.Spoke has it."""
        socket = self._context.socket(zmq.DEALER)
        links._tune(socket)
        socket.set(zmq.ROUTING_ID, b"task-%d-x" % task)
        socket.set(zmq.SNDHWM, links.WAITING_MAX)
        socket.set(zmq.RECONNECT_IVL, links.RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, links.RECONNECT_MS_MAX)
        socket.set(zmq.CURVE_SERVERKEY, invitation.server_key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, invitation.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, invitation.client_secret.encode())
        socket.connect(endpoint)
        return socket

    def _rank(self, pid: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTING_ID, str(pid).encode())
        socket.connect((self.directory / "socket").read_text().strip())
        return socket

    def _add(self, task: Task) -> None:
        self._tasks.append(task)
        fd = task.socket.FD
        self._by_fd[fd] = task
        self._epoll.register(fd, select.EPOLLIN)

    # --- what is said -----------------------------------------------------------------------------------------------------

    def _report(self, task: Task) -> between.Report:
        return between.Report(task.number, between.VERSION, self._epoch, "node", 1, task.signals, restart=0)

    def _say(self, task: Task, word: between.Up) -> None:
        task.socket.send(between.encode(word))
        self._hear(task)  # Sending may have taken the mark that something is here.

    def _say_of_ranks(self, task: Task, words: tuple[wire.FromRank, ...]) -> None:
        if task.number:
            self._say(task, between.Heard(task.number, words))
            return
        for word in words:
            task.socket.send(wire.encode(word))
        self._hear(task)

    def _hear(self, task: Task) -> None:
        """Everything that is here for this task. Words to its ranks are counted by rank."""
        while True:
            try:
                frame = task.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            said = between.decode_down(frame) if task.number else between.Tell((0,), wire.decode_to_rank(frame))
            word, pids = (said.word, said.pids) if isinstance(said, between.Tell) else (said, (0,))
            count = len(pids)
            self.reached[type(word)] = self.reached.get(type(word), 0) + count
            if isinstance(word, wire.Prepare):
                self._round = word.round
                asked = task.ranks if count == len(task.ranks) else tuple(who for who in task.ranks if who.pid in pids)
                self._say_of_ranks(task, tuple(wire.Ack(who, word.round, Position(1_000, 0)) for who in asked))

    def pump(self, enough: Callable[[], bool], what: str) -> None:
        """Hear and answer until it is enough."""
        end = time.monotonic() + BOUND_S
        while not enough():
            now = time.monotonic()
            if now > end:
                told = {kind.__name__: count for kind, count in self.reached.items()}
                raise AssertionError(f"not within {BOUND_S:g} s: {what}; {told}; {self._given_up()}")
            self._beat(now)
            for fd, _ in self._epoll.poll(0.02):
                self._hear(self._by_fd[fd])

    def _given_up(self) -> list[str]:
        """What the coordinator's journal says of it."""
        lines = [line for path in (self.directory / "journal").glob("*.jsonl") for line in read_lines(path)]
        return [line["reason"] for line in lines if line["event"] == "round_given_up"]

    def _beat(self, now: float) -> None:
        for task in self._tasks:
            if now >= task.next_beat:
                task.next_beat = now + BEAT_MS / 1_000
                self._say(task, self._report(task))

    def calm(self) -> None:
        """Until the coordinator has nothing to do but to hear reports."""
        journal = self.directory / "journal"
        seen, since = 0, 0.0

        def is_calm() -> bool:
            nonlocal seen, since
            size, now = sum(path.stat().st_size for path in journal.glob("*.jsonl")), time.monotonic()
            if size != seen:
                seen, since = size, now
            return seen > 0 and now - since >= CALM_S

        self.pump(is_calm, "a journal that is up to date")

    # --- what is measured -------------------------------------------------------------------------------------------------

    def rounds(self, count: int) -> Iterator[Round]:
        """One round after the other."""
        for _ in range(count):
            self.calm()
            yield self._round_of(SAVE)
            self._say_of_ranks(self._tasks[0], (wire.Failed(self._tasks[0].ranks[0], self._round, "enough"),))
            self.pump(lambda: self.reached.get(wire.Abort, 0) >= self.world, "an Abort for each rank")
            self._note_memory()

    def broadcast(self) -> Round:
        """The same for a notice that reaches every task, as Slurm's signals do: all of them report it at once."""
        self.calm()
        return self._round_of(NOTICE, everywhere=True)

    def _round_of(self, number: signal.Signals, *, everywhere: bool = False) -> Round:
        self.reached = {}
        its_cpu, our_cpu, began = cpu_seconds(self.pid), time.process_time(), time.monotonic()
        os.kill(self.pid, number)
        if everywhere:
            for task in self._tasks:
                if task.number:
                    task.signals = ((number.name, "NOTICE", 1),)
                    self._say(task, self._report(task))
        self.pump(lambda: self.reached.get(wire.Prepare, 0) >= self.world, "a Prepare for each rank")
        asked = time.monotonic()
        self.pump(lambda: self.reached.get(wire.SaveAt, 0) >= self.world, "a SaveAt for each rank")
        told = time.monotonic()
        its_cpu, our_cpu = cpu_seconds(self.pid) - its_cpu, time.process_time() - our_cpu
        return Round(*(1e3 * seconds for seconds in (asked - began, told - began, its_cpu, our_cpu)))


def _invited(directory: Path) -> Invitation | None:
    found = find(directory, JOB, 0, STEP)
    return found if isinstance(found, Invitation) else None


def memory_mb(pid: int, name: str) -> float:
    """A line of /proc/PID/status in MB: VmRSS, or VmHWM for the most that it was."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError(f"process {pid} has no memory: it is gone")


def main() -> None:
    """Be the crowd, and say what it took."""
    directory, tasks, ranks, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(directory, tasks, ranks)
    began = time.monotonic()
    crowd.meet(tasks)
    met_ms = (time.monotonic() - began) * 1e3
    took = list(crowd.rounds(rounds))
    peak_mb = memory_mb(crowd.pid, "VmHWM")
    everywhere = crowd.broadcast()
    report = {"met_ms": met_ms, "rounds": took, "everywhere": everywhere, "memory_mb": crowd.memory_mb, "peak_mb": peak_mb}
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # Thousands of sockets take their time to close, and nobody is there to hear it.


if __name__ == "__main__":
    main()
