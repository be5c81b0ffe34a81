"""The shield on real processes: a termination inside the tree is completed, one from outside never is."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from ckpt_supervisor import procfs
from ckpt_supervisor.shield import SETTLED_MS, Shield, next_sweep_ms

from tests.support.proc_stage import BOUND_S, Stage, blocked, until


def lives(pid: int) -> bool:
    """Whether it has not ended. On a busy machine it may just be waiting for a page."""
    return procfs.state_of(pid) in ("running", "uninterruptible")


class Processes:
    """Starts processes with SIGTERM blocked, and ends them."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *argv: str, shielded: bool = True) -> subprocess.Popen[bytes]:
        """One process."""
        with blocked(*((signal.SIGTERM,) if shielded else ())):
            self.started.append(subprocess.Popen(argv or ("sleep", "1000")))
        return self.started[-1]

    def end(self) -> None:
        """All of them."""
        for process in self.started:
            process.kill()
            process.wait(BOUND_S)


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that are ended with the test."""
    made = Processes()
    yield made
    made.end()


def test_a_stuck_termination_is_completed_after_two_looks(processes: Processes) -> None:
    """Nothing happens at the first look, nor before SETTLED_MS have passed; then the process is ended, and told."""
    shield = Shield()
    process = processes.start()
    other = processes.start()
    pids = [process.pid, other.pid]
    process.terminate()
    assert shield.sweep(pids, 1_000, quiet=True) == []
    assert shield.is_waiting(1_000)
    assert shield.sweep(pids, 1_000 + SETTLED_MS - 1, quiet=True) == []
    assert lives(process.pid)
    assert not shield.is_waiting(1_000 + SETTLED_MS)
    assert shield.sweep(pids, 1_000 + SETTLED_MS, quiet=True) == [process.pid]
    assert process.wait(BOUND_S) == -signal.SIGKILL
    assert lives(other.pid)
    assert shield.sweep(pids, 5_000, quiet=True) == []


def test_a_signal_to_the_supervisor_in_between_spares_the_process_for_good(processes: Processes) -> None:
    """The broadcast reaches descendants a moment before us: what was pending then stays, also long after the notice is over."""
    shield = Shield()
    process = processes.start()
    process.terminate()
    assert shield.sweep([process.pid], 0, quiet=True) == []
    assert shield.sweep([process.pid], 100, quiet=False) == []
    for now_ms in range(1_000, 20_000, 1_000):
        assert shield.sweep([process.pid], now_ms, quiet=True) == []
    assert lives(process.pid)


def test_a_process_spared_once_is_not_forgotten_when_a_walk_misses_it(processes: Processes) -> None:
    """The kernel's list of children is not exact while processes come and go; a gap in it must not end anybody."""
    shield = Shield()
    process = processes.start()
    process.terminate()
    shield.sweep([process.pid], 0, quiet=False)
    shield.sweep([], 1_000, quiet=True)
    for now_ms in (2_000, 4_000, 6_000):
        assert shield.sweep([process.pid], now_ms, quiet=True) == []


def test_another_process_is_completed_while_a_spared_one_lives(processes: Processes) -> None:
    """After a notice the shield works on for everybody who was not hit by it."""
    shield = Shield()
    hit, later = processes.start(), processes.start()
    pids = [hit.pid, later.pid]
    hit.terminate()
    shield.sweep(pids, 0, quiet=False)
    later.terminate()
    shield.sweep(pids, 1_000, quiet=True)
    assert shield.sweep(pids, 2_000, quiet=True) == [later.pid]
    assert later.wait(BOUND_S) == -signal.SIGKILL
    assert lives(hit.pid)


def test_looks_count_from_anew_after_a_gap(processes: Processes) -> None:
    """A process that one look did not show as stuck has to show it twice more."""
    shield = Shield()
    process = processes.start()
    process.terminate()
    shield.sweep([process.pid], 0, quiet=True)
    shield.sweep([], 200, quiet=True)
    assert shield.sweep([process.pid], 400, quiet=True) == []
    assert shield.sweep([process.pid], 800, quiet=True) == [process.pid]


def test_a_stopped_process_without_the_shield_is_left_alone(processes: Processes) -> None:
    """Its SIGTERM is pending but not blocked: it dies of it by itself when it goes on."""
    shield = Shield()
    process = processes.start(shielded=False)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: procfs.state_of(process.pid) == "stopped", "it is stopped")
    process.terminate()
    for now_ms in (0, 500, 1_000):
        assert shield.sweep([process.pid], now_ms, quiet=True) == []
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_the_dead_and_the_gone_are_nobody(processes: Processes) -> None:
    """A zombie with a SIGTERM pending, and a pid that is not there, are passed over."""
    shield = Shield()
    process = processes.start()
    process.terminate()
    shield.sweep([process.pid], 0, quiet=True)
    process.kill()
    until(lambda: procfs.state_of(process.pid) == "zombie", "it has died")
    assert shield.sweep([process.pid], 1_000, quiet=True) == []
    process.wait(BOUND_S)
    assert shield.sweep([process.pid], 2_000, quiet=True) == []


def test_large_trees_are_looked_at_less_often() -> None:
    """A look never takes more than 0.2 % of the time."""
    assert next_sweep_ms(100) == SETTLED_MS
    assert next_sweep_ms(4_000) == 2_000


SUPERVISED = """
    import json, os, select, signal, sys, textwrap, time
    from ckpt_supervisor import children
    from ckpt_supervisor.shield import SETTLED_MS, Shield
    from ckpt_supervisor.signals import SignalInbox
    claims = children.Claims()
    children.become_subreaper()
    with SignalInbox() as inbox:
        argv = [sys.executable, "-c", textwrap.dedent(sys.argv[1])]
        child = children.start(argv, dict(os.environ), {signal.SIGTERM, signal.SIGUSR1}, claims, own_group=True)
        shield, quiet, ended = Shield(), True, 0
        at = time.monotonic()
        while child.status() is None:
            select.select([inbox.fileno(), child.pidfd], [], [], max(0, at - time.monotonic()))
            quiet = quiet and not set(inbox.drain()) - {signal.SIGCHLD}
            if time.monotonic() >= at:
                now_ms = time.monotonic_ns() // 1_000_000
                ended += len(shield.sweep(children.descendants(claims), now_ms, quiet=quiet))
                quiet, at = True, time.monotonic() + SETTLED_MS / 1_000
        print(json.dumps(["ended", child.status(), ended]), flush=True)
"""


def test_terminate_returns_in_time_under_the_shield() -> None:
    """`Popen.terminate()` and `wait()`, and leaving a `Pool`, take 1.5 s at most in a supervised process."""
    trainer = """
        import json, multiprocessing, subprocess, time
        started = time.monotonic()
        process = subprocess.Popen(["sleep", "1000"])
        process.terminate()
        process.wait()
        first = time.monotonic() - started
        started = time.monotonic()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        print(json.dumps([first, time.monotonic() - started, process.returncode]), flush=True)
    """
    with Stage(SUPERVISED, trainer) as stage:
        first, pool, returncode = stage.said()
        assert returncode == -signal.SIGKILL
        assert 0.3 < first <= 1.5
        assert pool <= 1.5
        assert stage.said()[:2] == ["ended", 0]


def test_a_broadcast_of_the_notice_ends_nobody() -> None:
    """SIGTERM to every process of the step, the supervisor last and late: the workers live on, then and later."""
    trainer = """
        import json, os, subprocess, sys, time
        workers = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
        print(json.dumps([worker.pid for worker in workers]), flush=True)
        sys.stdin.readline()
        print(json.dumps([worker.poll() for worker in workers]), flush=True)
        for worker in workers: worker.kill()
    """
    with Stage(SUPERVISED, trainer) as stage:
        workers = stage.said()
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        # The order of slurmstepd, with all the time that a first look may fall into.
        time_ns = time.monotonic_ns()
        until(lambda: time.monotonic_ns() - time_ns > 0.25 * SETTLED_MS * 1_000_000, "the supervisor is late")
        os.kill(stage.pid, signal.SIGTERM)
        sweeps_ns = time.monotonic_ns()
        until(lambda: time.monotonic_ns() - sweeps_ns > 5 * SETTLED_MS * 1_000_000, "five more looks")
        assert all(lives(pid) for pid in workers)
        stage.say()
        assert stage.said() == [None, None, None]
        assert stage.said() == ["ended", 0, 0]
