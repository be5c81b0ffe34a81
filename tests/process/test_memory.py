"""Memory that comes to an end under a real supervisor: told in time, and a kill by the kernel is named.

In a real cgroup where one can be made (root, and a hierarchy that is mounted to be written to), else in what limit there is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from ckpt_supervisor.linux import cgroups
from ckpt_supervisor.watches.memory import nearest

from tests.support.kernel_memory import real_cgroup, within
from tests.support.run import Run, supervised

MIB = 1 << 20

HOLDS = """
import signal, sys
signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
held = b"x" * (int(sys.argv[1]) << 20)
print("holds", flush=True)
while True:
    signal.pause()
"""
"""Until it gets SIGALRM."""

GROWS = """
import os, pathlib, threading
journal, pause = pathlib.Path(os.environ["CKPT_SUPERVISE_DIR"], "journal"), threading.Event()
while not any('"recalled"' in path.read_text() for path in journal.glob("*")):
    pause.wait(0.02)
print("grows", flush=True)
held = [b"x" * (8 << 20) for _ in range(100_000)]
"""
"""Not before the supervisor counts: on a busy machine its loop may begin when all of this is over."""

LAUNCHES = """
import subprocess, sys
sys.exit(1 if subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode == -9 else 0)
"""
"""As torchrun: a worker that is killed makes it leave with 1."""


def python(code: str, *words: object) -> list[str]:
    """A command line."""
    return [sys.executable, "-c", code, *map(str, words)]


def check_warning(run: Run) -> None:
    """One line on stderr and one in the journal, with the limit, the use and the process that has it."""
    event = run.event("memory_near_limit")
    pid = run.event("command_started")["command_pid"]
    assert 0 < event["used_bytes"] <= event["limit_bytes"]
    (one,) = [one for one in event["processes"] if one["pid"] == pid]
    assert one["mb"] >= 64
    assert one["name"].startswith("python")
    assert len(event["processes"]) <= 5
    assert event["text"] in run.warned(r"memory: .* in use .*").string
    assert f"of {event['limit_of']} in use" in event["text"]


def test_who_uses_the_memory_is_told_before_it_is_used_up(tmp_path: Path) -> None:
    """A command that holds 128 MB of a limit of 512, told from 25 % on; where no cgroup can be made, of what there is.

    Nobody else there has so much that it is told before the command holds half of it.
    """
    with real_cgroup(512 * MIB) as place:
        warn = 1 if place is None else 25
        reading = nearest(warn)
        assert reading is not None, "every machine has some memory"
        with supervised(tmp_path, python(HOLDS, 128), "--memory-warn", warn, prefix=within(place)) as run:
            run.said("holds")
            if place is not None or reading.mille >= 10:
                check_warning(run)
            if place is not None:
                event = run.event("memory_near_limit")
                assert event["limit_of"].endswith(place.name)
                assert event["limit_bytes"] == 512 * MIB
            os.kill(run.event("command_started")["command_pid"], signal.SIGALRM)
            assert run.code() == 0, run.story()


def check_named(run: Run, place: Path, code: int, words: str) -> None:
    """The status is the command's own, and the reason is said and kept."""
    assert run.code() == code, run.story()
    why = run.event("command_exited", code=code)["why"]
    assert words in why
    assert f"limit 256.0 MiB of /{place.name}, 1 oom kill" in why
    assert why in run.err, run.story()


@pytest.mark.parametrize("launched", [False, True], ids=["command", "launcher"])
def test_a_command_that_the_kernel_kills_has_that_as_its_reason(tmp_path: Path, launched: bool) -> None:
    """It grows beyond the limit: not a crash with 137, nor, below a launcher, with 1. The supervisor lives and says so."""
    command = python(LAUNCHES, GROWS) if launched else python(GROWS)
    with real_cgroup(256 * MIB) as place:
        if place is None:
            # Nobody may fill a whole machine for a test: the counts that it goes by are there, and are those of nobody.
            assert cgroups.levels() or cgroups.node_kills() is not None
            return
        with supervised(tmp_path, command, prefix=within(place)) as run:
            words = "since its start the kernel has killed" if launched else "the kernel killed a process of this run"
            check_named(run, place, 1 if launched else 137, words)


def test_a_kill_while_the_command_lives_on_is_told_when_it_happens(tmp_path: Path) -> None:
    """A worker of several is killed and its launcher waits for another one: the journal has it, with the limit."""
    waits = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {GROWS!r}]).returncode, flush=True)\n{HOLDS}"
    with real_cgroup(256 * MIB) as place:
        if place is None:
            assert cgroups.levels() or cgroups.node_kills() is not None
            return
        with supervised(tmp_path, python(waits, 1), prefix=within(place)) as run:
            run.said("^-9$")
            event = run.event("oom_kill")
            assert event["kills"] == 1
            assert event["limit_of"].endswith(place.name)
            assert event["limit_bytes"] == 256 * MIB
            os.kill(run.event("command_started")["command_pid"], signal.SIGALRM)
            assert run.code() == 0, run.story()
            assert "why" not in run.event("command_exited")


def test_a_plain_kill_is_not_blamed_on_the_kernel(tmp_path: Path) -> None:
    """kill -9 by a person: 137 and no reason."""
    with supervised(tmp_path, python(HOLDS, 1)) as run:
        run.said("holds")
        os.kill(run.event("command_started")["command_pid"], signal.SIGKILL)
        assert run.code() == 137, run.story()
        assert "why" not in run.event("command_exited")
        assert "lack of memory" not in run.err
