"""Death, silence, forks and the end of the process: nothing of the client may hold a training or outlive it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_client import channel, wire
from ckpt_client.wire import Who

from tests.support import fake_supervisor
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.run import has_ended

FAST = ("--no-torch", "--steps", "1000000", "--step-ms", "1")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    """A supervisor whose store is the test's directory."""
    with FakeSupervisor(tmp_path) as fake:
        yield fake


def last_step(log: Path) -> int:
    """The last step that a log has."""
    return max((int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("step ")), default=0)


BOUND_S = 60
AT_ONCE_S = 5
"""What takes milliseconds, on a machine where anybody may be stopped for some seconds; who waits in vain waits twice as long."""


def until(true: object, seconds: float = BOUND_S) -> None:
    """Wait for a fact that no descriptor tells of, with a bound."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        select.select([], [], [], 0.005)


def test_a_parked_rank_goes_on_after_the_silence_and_fails_the_round(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Rule 7, with a silence of 4 s in place of 10 s; not less, as this test may be silent itself where the machine is busy."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--silence-ms", "4000", "--log", str(log))
    (pid,) = supervisor.attached(child)
    until(lambda: log.exists() and last_step(log) > 1)
    order = supervisor.agree([pid])
    supervisor.expect(wire.Arrived, pid, lambda w: w.round == order.round)
    supervisor.silent = True
    failed = supervisor.expect(wire.Failed, pid)
    assert failed.round == order.round
    until(lambda: last_step(log) > order.at.n + 5)


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_a_parked_rank_sleeps(supervisor: FakeSupervisor) -> None:
    """Its two threads must not keep each other awake while they wait."""
    child = supervisor.start(*FAST)
    (pid,) = supervisor.attached(child)
    order = supervisor.agree([pid])
    supervisor.expect(wire.Arrived, pid, lambda w: w.round == order.round)
    before, seen, began = switches(pid), len(supervisor.heard), time.monotonic()
    supervisor.wait(lambda: len(supervisor.heard) == seen + 2)
    # A second apart, or more where we were stopped meanwhile: it has gone on repeating its word.
    assert (switches(pid) - before) / max(2, time.monotonic() - began) < 50


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_parked_rank_goes_on_at_once_when_its_supervisor_dies(tmp_path: Path, how: signal.Signals) -> None:
    """It does not wait out the ten seconds, and ends by itself in good order later."""
    log, out = tmp_path / "log", tmp_path / "out"
    # Its steps take some seconds: it is not to be at their end before the other one comes to ask.
    knobs = ("--no-torch", "--steps", "3000", "--step-ms", "1", "--log", str(log), "--out", str(out))
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_supervisor", str(tmp_path), *knobs], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    said, pid, step = parent.stdout.readline().split()
    assert said == b"parked"
    child = os.pidfd_open(int(pid))
    assert last_step(log) == int(step)
    killed = time.monotonic()
    parent.send_signal(how)
    until(lambda: last_step(log) > int(step))
    assert time.monotonic() - killed < AT_ONCE_S
    assert select.select([child], [], [], BOUND_S)[0]
    assert out.exists()
    parent.communicate()
    end, left = ends(log)
    assert left - end < AT_ONCE_S * 1_000


def ends(log: Path) -> tuple[int, int]:
    """When training ended and when the process did its last thing, in ms."""
    said = {line.split()[0]: int(line.split()[-1]) for line in log.read_text().splitlines()}
    return said["end"], said["exit"]


@pytest.mark.parametrize("state", ["listening", "closed", "stopped"])
def test_a_process_ends_within_a_second_whatever_its_supervisor_does(tmp_path: Path, state: str) -> None:
    """The context of zmq must not wait for words that nobody takes (field case 140)."""
    log = tmp_path / "log"
    # Where it is asked for something it has to be in its loop by then, also if this test is late.
    knobs = ("--steps", "1", "--step-ms", "4000") if state == "stopped" else ("--steps", "3", "--step-ms", "300")
    with FakeSupervisor(tmp_path) as supervisor:
        child = supervisor.start("--no-torch", *knobs, "--log", str(log))
        (pid,) = supervisor.attached(child)
        if state == "closed":
            supervisor.router.close(linger=0)
        elif state == "stopped":
            supervisor.say(pid, wire.Prepare(1))  # Somebody has asked, and then takes no word any more.
        if state == "listening":
            supervisor.wait(lambda: child.poll() is not None)
            assert supervisor.expect(wire.Finished, pid)
        elif state == "stopped":
            # At the end of the loop it is parked for a step that never comes; silence is what releases it there.
            supervisor.expect(wire.Ack, pid)
            supervisor.say(pid, wire.Abort(1, ""))
        child.wait(BOUND_S)
        assert child.returncode == 0
    end, left = ends(log)
    assert left - end < AT_ONCE_S * 1_000


def test_a_supervisor_that_does_not_answer_is_waited_for_within_a_bound(tmp_path: Path) -> None:
    """Hello is repeated until then."""
    with FakeSupervisor(tmp_path) as supervisor:
        line = channel.open_line(supervisor.endpoint, os.getpid(), 0)
        hello = wire.Hello(Who(0, 0, os.getpid()), wire.VERSION, 1, 0, sharded=False)
        began = time.monotonic()
        assert channel.greet(line, hello, 3300) is None
        assert 3.2 < time.monotonic() - began < 3.3 + AT_ONCE_S
        line.close(0)
        supervisor.silent = True
        supervisor.wait(lambda: len(supervisor.heard) >= 2)
        while supervisor.router.poll(200):
            supervisor.listen(0)
        # Seven in that time, or fewer if we were stopped in it.
        assert supervisor.heard == [hello] * min(7, len(supervisor.heard))


def test_a_rank_whose_supervisor_is_gone_before_hello_trains_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    """It does not wait out the ten seconds: the closed socket, or the pidfd, tells."""
    with FakeSupervisor(tmp_path) as supervisor:
        first = supervisor.start(*FAST)
        supervisor.attached(first)
        supervisor.preempt(first)
        supervisor.silent = True
        second = supervisor.start("--no-torch", "--steps", "1000", "--step-ms", "0")
        supervisor.attached(second)
        closed = time.monotonic()
        supervisor.router.close(linger=0)
        assert second.wait(BOUND_S) == 0
        assert time.monotonic() - closed < channel.HELLO_MAX_MS / 1000 * 0.9
        printed = second.communicate()[0]
    assert "is gone: rank 0 trains on without supervision" in printed
    assert f"at {int(supervisor.resume.name[5:])} " in printed  # type: ignore[union-attr]


FORKING = """
import os, sys
import ckpt_client as ckpt

def save(directory, step):
    (directory / str(os.getpid())).write_text("x")

hook = ckpt.attach(save)
loop = ckpt.steps(3, save=save, load=print)     # A second one is plain, and says so once.
children = []
for how in range(3):
    pid = os.fork()
    if pid == 0:
        for n in range(1000):
            hook.step(n)
            with hook.phase("eval"):
                hook.safe_point()
        if how == 0:
            hook.close()
        if how == 1:
            os._exit(0)
        list(ckpt.steps(3, save=save, load=print))
        sys.exit(0)
    children.append(pid)
print("forked", *children, flush=True)
for n in range(1, 1 << 40):
    hook.step(n)
"""


def test_forked_children_are_silent_and_end_by_themselves(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Sockets and listener belong to the process that attached: exactly one save, by it (field case 23)."""
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    # From 3.12 on Python warns of every fork in a process with threads.
    child = supervisor.start(script=(script,), PYTHONWARNINGS="ignore::DeprecationWarning")
    (pid,) = supervisor.attached(child)
    assert child.stdout is not None
    told = child.stdout.readline()
    assert "only the first steps() or attach() of a process is supervised" in told
    said, *forked = child.stdout.readline().split()
    assert said == "forked"
    until(lambda: all(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] == "Z" for one in forked))
    saved = supervisor.save([pid])
    assert [file.path for file in saved[0].files] == [str(pid)]
    assert {word.who.pid for word in supervisor.heard} == {pid}
    supervisor.preempt(child)
    assert child.stdout.read() == ""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_workers_are_silent_and_every_process_keeps_the_shield(
    supervisor: FakeSupervisor, tmp_path: Path, method: str
) -> None:
    """SIGTERM stays blocked in the trainer and in what it starts, so Slurm's broadcast kills none (docs/slurm.md, section 4)."""
    log = tmp_path / "log"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        child = supervisor.start("--workers", "2", "--start-method", method, "--steps", "1000000", "--log", str(log))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    (pid,) = supervisor.attached(child)
    until(lambda: last_step(log) > 3, 120)
    family = {pid, *descendants(pid)}
    assert len(family) >= 3
    trackers = {one for one in family if b"resource_tracker" in Path(f"/proc/{one}/cmdline").read_bytes()}
    # The tracker unblocks it in itself, but has it ignored first.
    for one in family - trackers:
        assert blocked(one, signal.SIGTERM), one
    for one in family:
        os.kill(one, signal.SIGTERM)
    last = last_step(log)
    supervisor.wait(lambda: last_step(log) > last + 20)
    supervisor.preempt(child)
    said = child.communicate()[0]
    assert has_ended(child.returncode, said), said[-4_000:]
    assert {word.who.pid for word in supervisor.heard} == {pid}


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def blocked(pid: int, number: signal.Signals) -> bool:
    """Whether the main thread of a process has this signal blocked."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_that_the_supervisor_passes_on_does_what_it_would_do_without_us(
    supervisor: FakeSupervisor, tmp_path: Path
) -> None:
    """--pass-signal TERM: SIGTERM is not the supervisor's then, and ends a trainer that has no handler for it."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--log", str(log), CKPT_SUPERVISE_SHIELD="10 12")
    supervisor.attached(child)
    until(lambda: log.exists() and last_step(log) > 1)
    child.terminate()
    assert child.wait(BOUND_S) == -signal.SIGTERM


def test_the_listener_leaves_signals_to_the_main_thread(supervisor: FakeSupervisor) -> None:
    """ctrl-C reaches the main thread at once, and the round that it interrupts is failed with the reason."""
    child = supervisor.start("--no-torch", "--step-ms", "1", "--steps", "1000000", "--hang-save")
    (pid,) = supervisor.attached(child)
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
    listener = next(task for task in tasks if b"ckpt" in (task / "comm").read_bytes() or blocked_task(task))
    assert blocked_task(listener)
    order = supervisor.agree([pid])
    supervisor.say(pid, wire.Go(order.round))
    supervisor.expect(wire.Saving, pid)
    child.send_signal(signal.SIGINT)
    assert supervisor.expect(wire.Failed, pid).reason == "KeyboardInterrupt"
    assert child.wait(BOUND_S) == -signal.SIGINT or child.returncode == 1


def blocked_task(task: Path) -> bool:
    """Whether a thread has SIGINT blocked."""
    status = (task / "status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_the_toy_is_where_the_tests_think() -> None:
    """The script that all these tests run."""
    assert fake_supervisor.TOY.exists()
