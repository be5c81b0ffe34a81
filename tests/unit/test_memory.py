"""When the memory watch tells, which limit it tells of, and who uses the memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.watches.memory import (
    AGAIN_MS,
    EVERY_MS,
    LEVELS_LOOKS,
    RESULT_MS,
    Alarm,
    Memory,
    heaviest,
    nearest,
    tree_bytes,
)

from tests.support.kernel_memory import kernel, limited
from tests.support.run import eventually

GB = 10**9
MINUTE = AGAIN_MS


def test_it_rings_at_the_mark_and_not_again_while_it_stays_there() -> None:
    """90 %: not below, once above, for hours."""
    alarm = Alarm(90)
    assert [alarm.rings(mille, at) for at, mille in enumerate((100, 899, 900, 930, 949))] == [False, False, True, False, False]
    assert not any(alarm.rings(949, at * MINUTE) for at in range(1, 200))


def test_it_rings_again_once_it_has_fallen_and_risen_or_grown() -> None:
    """Up and down just at the mark is no falling; 5 % of the limit more is growing."""
    alarm = Alarm(90)
    assert alarm.rings(900, 0)
    assert not alarm.rings(890, MINUTE)
    assert not alarm.rings(905, 2 * MINUTE)
    assert alarm.rings(950, 3 * MINUTE), "grown"
    assert not alarm.rings(879, 4 * MINUTE)
    assert alarm.rings(901, 5 * MINUTE), "fallen and risen"


def test_it_rings_once_a_minute_at_most_and_forgets_nothing_meanwhile() -> None:
    """What comes within the minute is told at its end, if it is still so."""
    alarm = Alarm(50)
    assert alarm.rings(500, 0)
    assert not alarm.rings(999, MINUTE - 1)
    assert alarm.rings(999, MINUTE)
    assert not alarm.rings(100, MINUTE + 1)
    assert not alarm.rings(999, MINUTE + 2)
    assert alarm.rings(999, 2 * MINUTE)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_that_is_nearest_counts(tmp_path: Path, version: int) -> None:
    """Of the task's own cgroup, the step's, the job's and the node: in proportion, without what is only cached."""
    made = kernel(tmp_path, version, "/job/step/task")
    made.node(32_000_000, 16_000_000, shared=1)
    node = nearest(90, made.proc)
    assert node is not None
    assert (node.of, node.mille, node.shared()) == ("the node", 500, 1024)
    limited(made, "job/step", 10 * GB, 8 * GB, cached=7 * GB)
    again = nearest(10, made.proc)
    assert again is not None
    assert again.of == "the node", "of the step's 10 GB only one is really in use"
    limited(made, "job", 10 * GB, 9 * GB, cached=GB // 2, shared=5)
    job = nearest(50, made.proc)
    assert job is not None
    assert (job.of, job.limit, job.used, job.mille, job.shared()) == ("/job", 10 * GB, 8_500_000_000, 850, 5)


def test_a_limit_beyond_the_node_is_none(tmp_path: Path) -> None:
    """Nor is one of 0, which nobody can have."""
    made = kernel(tmp_path, 2, "/job")
    limited(made, "job", 10**15, 9 * 10**14)
    limited(made, "", 0, 5)
    found = nearest(90, made.proc)
    assert found is not None
    assert found.of == "the node"
    assert nearest(90, str(tmp_path / "nothing")) is None


USES = """
import mmap, sys
own, fd = b"x" * (int(sys.argv[1]) << 20), int(sys.argv[2])
shared = mmap.mmap(fd, 60 << 20)
assert len(shared[::4096]) == 15 << 10
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_heaviest_come_first_and_shared_memory_counts_with_nobody() -> None:
    """Two processes with 30 and 10 MB of their own and the same 60 MB shared, which is in neither."""
    fd = os.memfd_create("shared")
    os.write(fd, b"x" * (60 << 20))
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        pids = []
        for own in (10, 30):
            argv = [sys.executable, "-c", USES, str(own), str(fd)]
            process = stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,)),
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            pids.append(process.pid)
        found = [one for one in heaviest(children.Claims()) if one.pid in pids]
    assert [one.pid for one in found] == pids[::-1]
    assert 30 << 20 < found[0].used < 60 << 20
    assert 10 << 20 < found[1].used < 40 << 20
    assert found[0].name.startswith("python")


def test_a_look_is_due_every_few_seconds_and_one_at_a_time() -> None:
    """The next one is not due before the last has come back, however slow the kernel is."""
    with Lanes(("watch",)) as lanes:
        watch = Memory(90, children.Claims(), lanes, lambda _: None, 1_000)
        assert watch.times_ms == (1_000 + EVERY_MS,)
        watch.look(2_000)
        assert watch.times_ms == (1_000 + EVERY_MS,)
        watch.look(7_000)
        assert watch.times_ms == (7_000 + RESULT_MS,), "its result does not wake the loop: it is fetched"
        watch.look(7_000 + RESULT_MS)
        lanes.post("watch", "something that wakes", lambda: None, lambda _: None)
        assert children.readable(lanes.fileno(), 60.0)
        lanes.deliver()
        assert watch.times_ms == (7_000 + EVERY_MS,)


def test_each_minute_it_is_written_down_how_much_is_used() -> None:
    """In one look of twelve: all processes below us, and the nearest limit; also with --memory-warn off. Not a look more."""
    entries: list[Entry] = []
    with Lanes(("watch",)) as lanes, subprocess.Popen([sys.executable, "-c", "input(1)"], stdin=subprocess.PIPE) as process:
        claims = children.Claims()
        eventually(lambda: tree_bytes(claims) > 1 << 20, "the child's memory")
        watch = Memory(None, claims, lanes, entries.append, 0)
        now = 0
        for _ in range(LEVELS_LOOKS + 1):
            now += EVERY_MS
            watch.look(now)
            eventually(lambda: lanes.has_results, "the look's result")
            lanes.deliver()
        process.communicate(b"\n")
    written = [entry for entry in entries if entry.event == "memory"]  # A neighbour below our cgroup may be killed meanwhile.
    assert [entry.level for entry in written] == ["debug"] * 2
    fields = written[0].fields
    assert 1 << 20 < fields["tree_bytes"] < 1 << 30
    assert 0 < fields["used_bytes"] < fields["limit_bytes"]
    assert fields["limit_of"]


def test_processes_that_are_gone_count_nothing(tmp_path: Path) -> None:
    """Nor those whose numbers cannot be read."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (tmp_path / str(process.pid)).mkdir()
        (tmp_path / str(process.pid) / "statm").write_text("10 8 3 1 0 1 0\n")
        assert tree_bytes(children.Claims(), str(tmp_path)) == 5 * os.sysconf("SC_PAGE_SIZE")
        (tmp_path / str(process.pid) / "statm").write_text("")
        assert tree_bytes(children.Claims(), str(tmp_path)) == tree_bytes(children.Claims(), str(tmp_path / "x")) == 0
        process.communicate(b"\n")


def test_psutil_is_not_imported_before_there_is_something_to_tell() -> None:
    """It takes its time and its memory, and most runs never need it."""
    code = "import sys, ckpt_supervisor.watches.memory as m; m.nearest(90); print('psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
