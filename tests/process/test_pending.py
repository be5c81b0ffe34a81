"""Which real processes have a SIGTERM stuck, and when it is worth looking."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.linux.pending import Watch

from tests.support.proc_stage import BOUND_S, until
from tests.support.shield_stage import Processes, stopped


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that are ended with the test."""
    made = Processes()
    yield made
    made.end()


def stuck(watch: Watch) -> list[int]:
    """Pids of those that are."""
    return [one.who[0] for one in watch.look()]


def open_on(pid: int) -> list[str]:
    """The files of that process that this one holds open: other descriptors come and go with other tests."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # That of this look.
            found.append(str(descriptor.readlink()))
    return sorted(one for one in found if one.startswith(f"/proc/{pid}/"))


def test_only_a_pending_and_blocked_sigterm_is_stuck(processes: Processes) -> None:
    """Neither one who has nothing, nor one with another signal pending, nor one who is stopped and would die of it."""
    idle, hit, other, free = processes.start(), processes.start(), processes.start(), processes.start(shielded=False)
    with Watch(lambda: [idle.pid, hit.pid, other.pid, free.pid]) as watch:
        assert stuck(watch) == []
        assert len(watch) == 4
        hit.terminate()
        stopped(other)
        stopped(free)
        other.send_signal(signal.SIGINT)  # Pending, as it is stopped.
        free.terminate()
        (one,) = watch.look()
        assert (one.who[0], one.is_running) == (hit.pid, True)
        other.terminate()
        assert [(one.who[0], one.is_running) for one in watch.look()] == [(hit.pid, True), (other.pid, False)]


def test_the_dead_and_the_gone_are_nobody(processes: Processes) -> None:
    """A zombie with a SIGTERM pending is passed over; once it is waited for, it is forgotten, and its pid remembered as ours."""
    process = processes.start()
    with Watch(lambda: [process.pid]) as watch:
        process.terminate()
        assert stuck(watch) == [process.pid]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert stuck(watch) == []
        process.wait(BOUND_S)
        assert stuck(watch) == []
        assert len(watch) == 0
        assert watch.knew(process.pid)
        assert not watch.knew(os.getpid())


def test_the_count_of_queued_signals_tells_of_each_that_is_pending(processes: Processes) -> None:
    """It goes up with a SIGTERM that is blocked, and down when its process has died. Others of this user may come in between."""
    with Watch(list) as watch:

        def tells() -> bool:
            process = processes.start()
            counts = [watch.queued()]
            process.terminate()
            counts.append(watch.queued())
            process.kill()
            process.wait(BOUND_S)
            counts.append(watch.queued())
            before = counts[0]
            assert before is not None
            return counts == [before, before + 1, before]

        until(tells, "it goes up and down by one")


def test_new_processes_are_seen_at_the_next_look(processes: Processes) -> None:
    """Without having been known before their SIGTERM."""
    pids: list[int] = []
    with Watch(lambda: pids) as watch:
        assert stuck(watch) == []
        process = processes.start()
        pids.append(process.pid)
        process.terminate()
        assert stuck(watch) == [process.pid]


def test_only_so_many_files_stay_open(processes: Processes) -> None:
    """Beyond that each look opens them; nobody is overlooked."""
    process = processes.start()
    with Watch(lambda: [process.pid], files_max=0) as watch:
        assert stuck(watch) == []
        process.terminate()
        assert stuck(watch) == [process.pid]
        assert open_on(process.pid) == []
        process.kill()
        process.wait(BOUND_S)
        until(lambda: stuck(watch) == [] and len(watch) == 0, "it is gone")


def test_all_files_are_closed(processes: Processes) -> None:
    """After the block there are as many as before."""
    process = processes.start()
    before = open_on(os.getpid())
    with Watch(lambda: [process.pid]) as watch:
        watch.queued()
        watch.look()
        assert open_on(process.pid) == [f"/proc/{process.pid}/status"]
        assert len(open_on(os.getpid())) == len(before) + 1
    assert open_on(process.pid) == []
    assert open_on(os.getpid()) == before
