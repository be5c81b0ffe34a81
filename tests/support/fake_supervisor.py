"""A supervisor for tests of the client: the real socket and the real words, but it does only what a test tells it to.

Owns one ROUTER and the trainers it starts. Commits by renaming, with no check at all. Run as a script it brings one trainer to
the point where it is parked, and stays there to be killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq
from ckpt_client import wire

TOY = Path(__file__).with_name("toy.py")
BOUND_SECONDS = 90
"""Several ranks that import torch at once on a busy machine take most of it."""

Word = TypeVar("Word", bound=wire.FromRank)


class FakeSupervisor:
    """Hears all words into `heard`. Answers Hello with `welcome` and anything repeated with Wait, unless told to be silent."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.heard: list[wire.FromRank] = []
        self.heard_ms: list[int] = []
        self.silent = False
        self.welcome: wire.Welcome | wire.Refused = wire.Welcome(wire.VERSION, 0, 0, "", 0)
        self.resume: Path | None = None
        self.children: list[subprocess.Popen[str]] = []
        self.rounds = 0

    def __enter__(self) -> FakeSupervisor:
        self.sockets = tempfile.mkdtemp(prefix="ckpt-fake-")  # Not the test's directory: a socket's path may have 107 bytes.
        self.endpoint = f"ipc://{self.sockets}/s"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(self.endpoint)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        for child in self.children:
            # All of its session: torchrun's workers would outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if child.stdout is not None and not child.stdout.closed:
                child.communicate()
        self.close()

    def close(self) -> None:
        """Close the socket, as death would."""
        self.router.close(linger=0)
        self.context.term()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def environment(self, rank: int = 0, world: int = 1, **more: str) -> dict[str, str]:
        """What a trainer finds in its environment."""
        return {
            **os.environ,
            "CKPT_SUPERVISE_SOCKET": self.endpoint,
            "CKPT_SUPERVISE_PID": str(os.getpid()),
            "CKPT_SUPERVISE_DIR": str(self.store),
            "CKPT_SUPERVISE_RESTART": "0",
            "CKPT_SUPERVISE_RESUME_FROM": "" if self.resume is None else str(self.resume),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            **more,
        }

    def start(
        self, *words: str, rank: int = 0, world: int = 1, script: tuple[str | Path, ...] = (TOY,), **more: str
    ) -> subprocess.Popen[str]:
        """Start a trainer."""
        child = subprocess.Popen(
            [sys.executable, *map(str, script), *words],
            env=self.environment(rank, world, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def say(self, pid: int, word: wire.ToRank) -> None:
        """Say one word to one rank."""
        self.router.send_multipart([str(pid).encode(), wire.encode(word)])

    def listen(self, timeout_ms: int) -> None:
        """Take the words that come within this time."""
        if not self.router.poll(timeout_ms):
            return
        sender, frame = self.router.recv_multipart()
        word = wire.decode_from_rank(frame)
        assert sender == str(word.who.pid).encode()
        self.heard.append(word)
        self.heard_ms.append(time.monotonic_ns() // 1_000_000)
        if self.silent:
            return
        match word:
            case wire.Hello():
                self.say(word.who.pid, self.welcome)
            case wire.Arrived() | wire.Ack() | wire.Saved():
                self.say(word.who.pid, wire.Wait(word.round))
            case wire.Saving() | wire.Failed() | wire.Finished() | wire.Left():
                pass

    def wait(self, true: Callable[[], object], seconds: float = BOUND_SECONDS) -> None:
        """Listen until something is true."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s; heard {self.heard}, {self.ended_how()}")
            self.listen(20)

    def ended_how(self) -> str:
        """The exit codes and last words of the trainers that have ended."""
        told = ""
        for child in self.children:
            if child.poll() is not None and child.stdout is not None and not child.stdout.closed:
                told += f"{child.args} ended with {child.returncode}: {child.communicate()[0][-2000:]}\n"
        return told

    def expect(self, kind: type[Word], pid: int, where: Callable[[Word], bool] = lambda _word: True, *, after: int = 0) -> Word:
        """Listen until this rank has said such a word, among those heard after `after` others."""

        def found() -> list[Word]:
            return [w for w in self.heard[after:] if isinstance(w, kind) and w.who.pid == pid and where(w)]

        self.wait(found)
        return found()[0]

    def attached(self, *children: subprocess.Popen[str]) -> list[int]:
        """Wait for the Hello of each; their pids."""
        for child in children:
            self.expect(wire.Hello, child.pid)
        return [child.pid for child in children]

    def under_way(self, *children: subprocess.Popen[str]) -> list[int]:
        """Wait until each has gone past its start; their pids. Costs rounds that are given up."""
        pids = self.attached(*children)
        for pid in pids:
            while self.agree([pid]).at.n <= self.welcome_step():
                self.say(pid, wire.Abort(self.rounds, "not under way yet"))
            self.say(pid, wire.Abort(self.rounds, "under way"))
        return pids

    def welcome_step(self) -> int:
        """The step that trainers are told to resume from."""
        return self.welcome.resume_step if isinstance(self.welcome, wire.Welcome) else 0

    def agree(self, pids: list[int], then: str = "go_on") -> wire.SaveAt:
        """Prepare a new round and fix its step: the largest position of all."""
        self.rounds += 1
        number = self.rounds
        for pid in pids:
            self.say(pid, wire.Prepare(number))
        at = max(self.expect(wire.Ack, pid, lambda w: w.round == number).entered for pid in pids)
        directory = self.store / f".partial-step-{at.n}-1-{number}"
        order = wire.SaveAt(number, at, str(directory), "leave" if then == "leave" else "go_on", 20_000)
        for pid in pids:
            self.say(pid, order)
        return order

    def save(self, pids: list[int], then: str = "go_on") -> list[wire.Saved]:
        """A whole round, up to every rank's Saved."""
        order = self.agree(pids, then)
        for pid in pids:
            self.expect(wire.Arrived, pid, lambda w: w.round == order.round)
        for pid in pids:
            self.say(pid, wire.Go(order.round))
        return [self.expect(wire.Saved, pid, lambda w: w.round == order.round) for pid in pids]

    def commit(self, saved: list[wire.Saved]) -> Path:
        """Rename the round's directory to the name of a committed checkpoint."""
        assert len({word.n for word in saved}) == 1
        partial = next(self.store.glob(f".partial-step-*-{saved[0].round}"))
        committed = self.store / f"step-{saved[0].n:09d}"
        if committed.exists():
            shutil.rmtree(partial)  # What is there is whole, and stays.
        else:
            partial.rename(committed)
        self.resume = committed
        self.welcome = wire.Welcome(wire.VERSION, self.rounds, 0, str(committed), saved[0].n)
        return committed

    def preempt(self, *children: subprocess.Popen[str]) -> Path:
        """Save, commit, let them leave and wait for their end."""
        pids = [child.pid for child in children] if not self.rank_pids(children) else self.rank_pids(children)
        committed = self.commit(self.save(pids, "leave"))
        for pid in pids:
            self.say(pid, wire.Leave(self.rounds))
        self.ended(*children)
        return committed

    def ended(self, *children: subprocess.Popen[str]) -> None:
        """Wait for the end of these trainers."""
        self.wait(lambda: all(child.poll() is not None for child in children))

    def rank_pids(self, _children: object = None) -> list[int]:
        """The ranks that have said Hello and not left, in order of rank."""
        live: dict[int, int] = {}
        for word in self.heard:  # In order: the system may give the pid of one that has left to a later one.
            if isinstance(word, wire.Hello):
                live[word.who.rank] = word.who.pid
            elif isinstance(word, wire.Left | wire.Finished) and live.get(word.who.rank) == word.who.pid:
                del live[word.who.rank]
        return [live[rank] for rank in sorted(live)]


def main() -> None:
    """Park one trainer, say so, and wait to be killed."""
    with FakeSupervisor(Path(sys.argv[1])) as supervisor, contextlib.suppress(BrokenPipeError):
        child = supervisor.start(*sys.argv[2:])
        pids = supervisor.attached(child)
        order = supervisor.agree(pids)
        supervisor.expect(wire.Arrived, child.pid, lambda w: w.round == order.round)
        os.write(1, f"parked {child.pid} {order.at.n}\n".encode())
        supervisor.wait(lambda: False, 3600)


if __name__ == "__main__":
    main()
