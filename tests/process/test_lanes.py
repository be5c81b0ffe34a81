"""Worker lanes: slow work holds up neither the loop nor other lanes, faults come back as data, hanging work keeps nobody."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ckpt_supervisor.adapters.lanes import RESULTS_PER_TURN_MAX, Broken, Lanes

BOUND_S = 30


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    """Two lanes."""
    with Lanes(("disk", "slurm")) as made:
        yield made
    made._write_end.close()  # no thread of a test is at work any longer


def deliver_until(lanes: Lanes, done: Callable[[], bool]) -> int:
    """Poll and deliver as the loop does, until it is done; how many turns it took."""
    end = time.monotonic() + BOUND_S
    turns = 0
    while not done():
        left_s = end - time.monotonic()
        assert left_s > 0, "not delivered"
        readable, _, _ = select.select([lanes.fileno()], [], [], left_s)
        assert readable, "nothing became readable"
        lanes.deliver()
        turns += 1
    return turns


def test_work_runs_outside_of_the_loops_thread_and_its_result_comes_back_into_it(lanes: Lanes) -> None:
    """`work` runs in the lane's thread, `done` in the one that delivers."""
    seen: list[tuple[int, int]] = []
    lanes.post("disk", "w", threading.get_ident, lambda ident: seen.append((ident, threading.get_ident())))
    deliver_until(lanes, lambda: bool(seen))
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == threading.get_ident()


def test_each_lane_keeps_its_order_and_waits_for_no_other(lanes: Lanes) -> None:
    """While the disk hangs, Slurm is asked; what was posted to the disk comes in its order once it answers."""
    gate = threading.Event()
    seen: list[Any] = []
    lanes.post("disk", "slow", gate.wait, lambda _: seen.append("slow"))
    lanes.post("disk", "after", lambda: "after", seen.append)
    lanes.post("slurm", "other", lambda: "other", seen.append)
    deliver_until(lanes, lambda: len(seen) == 1)
    assert seen == ["other"]
    gate.set()
    deliver_until(lanes, lambda: len(seen) == 3)
    assert seen == ["other", "slow", "after"]


def test_a_fault_comes_back_as_data_and_the_lane_goes_on(lanes: Lanes) -> None:
    """An exception in the work ends neither the lane nor the loop."""
    seen: list[Any] = []
    lanes.post("disk", "dividing", lambda: 1 / 0, seen.append)
    lanes.post("disk", "after", lambda: "after", seen.append)
    deliver_until(lanes, lambda: len(seen) == 2)
    broken, after = seen
    assert isinstance(broken, Broken)
    assert broken.what == "dividing"
    assert isinstance(broken.error, ZeroDivisionError)
    assert after == "after"


def test_many_results_come_in_bounded_turns_and_none_is_forgotten(lanes: Lanes) -> None:
    """A flood of results keeps signals waiting for one bounded turn only; what is left makes the lane readable again."""
    seen: list[int] = []
    count = 12 * RESULTS_PER_TURN_MAX
    for number in range(count):
        lanes.post("disk", "w", lambda n=number: n, seen.append)
    most = 0

    def done() -> bool:
        nonlocal most
        before, done.seen = done.seen, len(seen)  # type: ignore[attr-defined]
        most = max(most, len(seen) - before)
        return len(seen) == count

    done.seen = 0  # type: ignore[attr-defined]
    assert deliver_until(lanes, done) >= 12
    assert most <= RESULTS_PER_TURN_MAX
    assert seen == list(range(count))


def test_a_result_may_post_the_next_piece_of_work(lanes: Lanes) -> None:
    """That is how verify leads to commit."""
    seen: list[str] = []

    def verified(word: str) -> None:
        seen.append(word)
        lanes.post("disk", "commit", lambda: "committed", seen.append)

    lanes.post("disk", "verify", lambda: "verified", verified)
    deliver_until(lanes, lambda: len(seen) == 2)
    assert seen == ["verified", "committed"]


def test_signals_are_left_to_the_main_thread(lanes: Lanes) -> None:
    """A lane's thread has every signal blocked, so that none of its calls is interrupted and what it starts is shielded."""
    seen: list[set[signal.Signals]] = []
    lanes.post("disk", "w", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), seen.append)
    deliver_until(lanes, lambda: bool(seen))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP} <= seen[0]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_results_that_come_after_the_end_hurt_nobody() -> None:
    """The loop is gone, the work comes back all the same: no exception in its thread (warnings are errors here)."""
    gate, over = threading.Event(), threading.Event()
    with Lanes(("disk",)) as lanes:
        lanes.post("disk", "late", gate.wait, lambda _: None)
    gate.set()
    lanes.post("disk", "marker", over.set, lambda _: None)
    assert over.wait(BOUND_S)
    lanes._write_end.close()


HANGING = """
import os, sys
from ckpt_supervisor.adapters.lanes import Lanes
with Lanes(("disk",)) as lanes:
    lanes.post("disk", "hang", lambda: (print("hanging", flush=True), os.read(0, 1)), print)
    os.read(int(sys.argv[1]), 1)
sys.exit(75)
"""


def test_work_that_hangs_never_keeps_the_process_from_ending() -> None:
    """A dead file system has a thread in a system call; the process leaves with its own status all the same."""
    go_read, go_write = os.pipe()
    argv = [sys.executable, "-c", HANGING, str(go_read)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[go_read]) as process:
        try:
            os.close(go_read)
            assert process.stdout is not None
            assert process.stdout.readline() == b"hanging\n"
            os.write(go_write, b"x")
            assert process.wait(BOUND_S) == 75
        finally:
            os.close(go_write)
            process.kill()
