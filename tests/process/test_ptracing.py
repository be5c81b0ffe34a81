"""Stopping real processes to read who sent a SIGTERM, and having them take it or lose it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.linux.ptracing import Outcome, Sender, Tracer, Wish

from tests.support.proc_stage import BOUND_S, mask_of, until
from tests.support.shield_stage import HANDLER, TRACER, Processes, lives, stopped

ROUNDS = 200


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that are ended with the test."""
    made = Processes()
    yield made
    made.end()


class Asked:
    """Says the same wish each time, and remembers who the senders were."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.senders: list[int | None] = []

    def __call__(self, sender: Sender | None) -> Wish:
        """What `settle` calls."""
        self.senders.append(None if sender is None else sender.pid)
        return self.wish


def settle(tracer: Tracer, pid: int, decide: Callable[[Sender | None], Wish]) -> Outcome:
    """What comes of it in the end: on a busy machine it may not stand within STOP_S, and is settled again, as the shield does."""
    outcomes: list[Outcome] = []

    def is_over() -> bool:
        outcomes.append(tracer.settle(pid, decide))
        return outcomes[-1] != "not now"

    until(is_over, "it stands")
    return outcomes[-1]


def test_a_delivered_signal_ends_the_process_as_if_it_had_never_been_blocked(processes: Processes) -> None:
    """The status is -15, and the sender's pid was read before."""
    process = processes.start()
    process.terminate()
    asked = Asked("deliver")
    assert settle(Tracer(), process.pid, asked) == "delivered"
    assert process.wait(BOUND_S) == -signal.SIGTERM
    assert asked.senders == [os.getpid()]


def test_the_processs_own_handler_takes_it(processes: Processes) -> None:
    """A handler is run, not passed over."""
    process = processes.python(HANDLER)
    process.terminate()
    assert settle(Tracer(), process.pid, Asked("deliver")) == "delivered"
    assert process.wait(BOUND_S) == 7


def test_a_handler_sees_the_sender_that_there_was(processes: Processes) -> None:
    """torch's loader workers end with 0 when SIGTERM is from their parent (si_pid), and die of any other."""
    script = """
        import ctypes, os, signal
        @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p)
        def handler(number, info, context):
            os._exit(0 if info[4] == os.getppid() else 3)
        libc = ctypes.CDLL(None)
        class Action(ctypes.Structure):  # As glibc has it.
            _fields_ = [
                ("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p),
            ]
        action = Action(ctypes.cast(handler, ctypes.c_void_p), (ctypes.c_ulong * 16)(), 4, None)  # SA_SIGINFO
        assert libc.sigaction(signal.SIGTERM, ctypes.byref(action), None) == 0
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    process = processes.python(script)
    process.terminate()
    assert settle(Tracer(), process.pid, Asked("deliver")) == "delivered"
    assert process.wait(BOUND_S) == 0


def test_an_absorbed_signal_never_came_and_the_next_one_is_seen_anew(processes: Processes) -> None:
    """It stays blocked, nothing is pending, and a later SIGTERM tells its own sender."""
    process, other = processes.start(), processes.sender()
    tracer, asked = Tracer(), Asked("absorb")
    other.send(signal.SIGTERM, process.pid)
    assert settle(tracer, process.pid, asked) == "absorbed"
    assert signal.SIGTERM in mask_of(process.pid)
    assert not procfs.is_pending(process.pid, signal.SIGTERM)
    process.terminate()
    assert procfs.term_is_stuck(process.pid)
    assert settle(tracer, process.pid, asked) == "absorbed"
    assert asked.senders == [other.pid, os.getpid()]
    assert lives(process.pid)


def test_other_pending_signals_are_neither_lost_nor_taken_for_sigterm(processes: Processes) -> None:
    """What else is blocked and pending stays so, and stands before or after SIGTERM in the queue."""
    process = processes.python(
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); print(1, flush=True); signal.pause()"
    )
    numbers = (signal.SIGUSR1, signal.SIGRTMIN + 3, signal.SIGHUP)
    for number in numbers:
        process.send_signal(number)
    process.terminate()
    process.send_signal(signal.SIGUSR2)
    asked = Asked("absorb")
    assert settle(Tracer(), process.pid, asked) == "absorbed"
    assert asked.senders == [os.getpid()]
    assert mask_of(process.pid, "ShdPnd") == {*numbers, signal.SIGUSR2}
    assert lives(process.pid)


def test_a_process_without_a_pending_sigterm_is_left_as_it_is(processes: Processes) -> None:
    """The caller is told that there is none, and whatever it wishes is not done."""
    process = processes.start()
    asked = Asked("deliver")
    assert settle(Tracer(), process.pid, asked) == "left"
    assert asked.senders == [None]
    assert signal.SIGTERM in mask_of(process.pid)


def test_work_goes_on_unharmed_however_often_it_is_stopped(processes: Processes) -> None:
    """A broadcast is absorbed in the middle of reading, writing, sleeping and waiting: nothing is lost, nothing fails."""
    script = """
        import hashlib, os, select, sys, threading, time
        print("ready", flush=True)
        digest, left = hashlib.sha256(), 8 << 20
        while left:
            select.select([0], [], [], 5)
            piece = os.read(0, min(left, 40_000))
            digest.update(piece)
            left -= len(piece)
            threading.Event().wait(0.001)
        print(digest.hexdigest(), flush=True)
    """
    process = processes.python(script)
    assert process.stdin is not None
    assert process.stdout is not None
    content = os.urandom(8 << 20)
    os.set_blocking(process.stdin.fileno(), False)
    tracer, sent, absorbed = Tracer(), 0, 0
    while sent < len(content):
        with contextlib.suppress(BlockingIOError):
            sent += os.write(process.stdin.fileno(), content[sent : sent + 65_536])
        if absorbed < ROUNDS:
            os.kill(process.pid, signal.SIGTERM)
            absorbed += settle(tracer, process.pid, Asked("absorb")) == "absorbed"
        tracer.finish()
    assert process.stdout.readline().decode().strip() == hashlib.sha256(content).hexdigest()
    assert process.wait(BOUND_S) == 0
    assert absorbed > ROUNDS // 2
    tracer.finish()
    assert not tracer.is_busy


def test_a_stopped_process_stays_stopped(processes: Processes) -> None:
    """Looking at it does not set it going."""
    process = processes.start()
    stopped(process)
    process.terminate()
    tracer = Tracer()
    assert settle(tracer, process.pid, Asked("leave")) == "left"
    until(lambda: procfs.state_of(process.pid) == "stopped", "it stands again")
    process.send_signal(signal.SIGCONT)
    until(lambda: procfs.state_of(process.pid) == "running", "it goes on")
    assert settle(tracer, process.pid, Asked("deliver")) == "delivered"
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_whom_somebody_else_traces_is_refused(processes: Processes) -> None:
    """A debugger was there before. The process is as it was."""
    process = processes.start()
    processes.python(TRACER, str(process.pid))
    process.terminate()
    tracer = Tracer()
    assert tracer.settle(process.pid, Asked("deliver")) == "refused"
    assert not tracer.is_busy
    assert procfs.term_is_stuck(process.pid)


def test_the_dead_and_the_gone_are_gone(processes: Processes) -> None:
    """A zombie stays its parent's to wait for."""
    process = processes.start()
    process.kill()
    until(lambda: procfs.state_of(process.pid) == "zombie", "it has died")
    tracer = Tracer()
    assert tracer.settle(process.pid, Asked("deliver")) == "gone"
    assert process.wait(BOUND_S) == -signal.SIGKILL
    assert tracer.settle(process.pid, Asked("deliver")) == "gone"
    assert not tracer.is_busy


def test_one_that_is_killed_while_it_stands_is_left_to_its_parent(processes: Processes) -> None:
    """Its tracer has to wait for it first, or its parent never could."""
    shell = processes.start("sh", "-c", "sleep 1000 & echo $!; wait $!; echo $?")
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    until(lambda: procfs.name_of(pid) == "sleep", "it runs")

    def killed(sender: Sender | None) -> Wish:
        os.kill(pid, signal.SIGKILL)
        return "deliver"

    os.kill(pid, signal.SIGTERM)
    tracer = Tracer()
    assert settle(tracer, pid, killed) in ("gone", "refused", "delivered")
    until(lambda: tracer.finish() is None and not tracer.is_busy, "it is let go")
    assert shell.stdout.readline() == b"137\n"


def test_a_child_of_ours_that_is_killed_while_it_stands_keeps_its_status(processes: Processes) -> None:
    """Whoever waits for it in this process sees how it ended."""
    process = processes.start()

    def killed(sender: Sender | None) -> Wish:
        os.kill(process.pid, signal.SIGKILL)  # Popen would wait for it first, and take the stop for an end.
        return "absorb"

    process.terminate()
    tracer = Tracer()
    settle(tracer, process.pid, killed)
    until(lambda: tracer.finish() is None and not tracer.is_busy, "it is let go")
    assert process.wait(BOUND_S) == -signal.SIGKILL


def test_uninterruptible_sleep_holds_nobody_up_and_ends_as_it_would(processes: Processes, tmp_path: Path) -> None:
    """It does not stand in time, stays seized, and is let go as soon as it does."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # posix_spawn's caller sleeps uninterruptibly until the child has opened its files: a FIFO, which waits for a writer.
    script = """
        import os, sys
        print("ready", flush=True)
        pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
        os.waitpid(pid, 0)
        print("done", flush=True)
        sys.stdin.read()
    """
    process = processes.python(script, str(fifo))
    assert process.stdout is not None
    # With its child: it may also wait for a page of a file for a moment.
    until(lambda: procfs.descendants(process.pid) and procfs.state_of(process.pid) == "uninterruptible", "it sleeps")
    process.terminate()
    tracer = Tracer()
    assert tracer.settle(process.pid, Asked("deliver")) == "not now"
    assert tracer.is_busy
    tracer.finish()
    assert tracer.is_busy
    with fifo.open("wb"):
        until(lambda: tracer.finish() is None and not tracer.is_busy, "it is let go")
        assert process.stdout.readline() == b"done\n"
    assert settle(tracer, process.pid, Asked("deliver")) == "delivered"
    assert process.wait(BOUND_S) == -signal.SIGTERM
