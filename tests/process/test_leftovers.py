"""What a dead supervisor has left running is found and ended, and nothing else: real processes with real environments.

The look runs in a process of its own, beside those that it is about: what is below the one that looks is never a leftover.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.start.leftovers import GONE_MS, WITHIN_MS, Ended, Tag

from tests.support.proc_stage import end_below, until
from tests.support.run import environment, is_alive, supervised

JOB = str(7_000_000 + os.getpid())
"""No other process of these tests has the same: what one leaves behind on purpose would be a leftover for the other too."""

BUSY_MS = 4_000
"""So long a process may stand on a busy machine, beside what it does."""

SLURM = {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}

LOOK = """
import json, os, sys, time
from pathlib import Path
from ckpt_supervisor.start import leftovers
from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.start.startup import job_of
began = time.monotonic()
found = leftovers.end(job_of(SlurmEnv.from_environ(os.environ)), Path(sys.argv[1]), os.environ)
told = []
leftovers.tell(found, lambda entry, at: told.append([entry.event, entry.fields["pids"]]))
ms = (time.monotonic() - began) * 1000
pids = {"ended": sorted(found.ended), "stuck": sorted(found.stuck)}
print(json.dumps({**pids, "segments": list(found.segments), "told": told, "ms": ms}))
"""

FAMILY = """
import os, signal, subprocess, sys
sleep = ["sleep", "600"]
found = {"itself": os.getpid()}
found["child"] = subprocess.Popen(sleep).pid
found["without its environment"] = subprocess.Popen(sleep, env={}).pid
found["in a session of its own"] = subprocess.Popen(sleep, start_new_session=True).pid
found["stopped"] = subprocess.Popen(sleep).pid
os.kill(found["stopped"], signal.SIGSTOP)
deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; print(1, flush=True); signal.pause()"
deaf = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
deaf.stdout.readline()
found["deaf"] = deaf.pid
read, write = os.pipe()
if not os.fork():
    os.setsid()
    if pid := os.fork():
        os.write(write, b"%d" % pid)
        os._exit(0)
    os.execvp("sleep", sleep)
os.wait()
found["daemon"] = int(os.read(read, 20))
print(found, flush=True)
signal.pause()
"""

LOOP = """
import os, time
print("loops", flush=True)
end = time.monotonic() + 20
for _ in range(100_000):
    if os.fork() or time.monotonic() > end:
        os._exit(0)
    if {own}:
        os.setsid()
"""


def identity(pid: int) -> tuple[int, int]:
    """Its pid and when it started."""
    seen = procfs.stat(pid)
    assert seen is not None
    return pid, seen.started


@pytest.fixture
def dead() -> tuple[int, int]:
    """A process that there was: pid and start."""
    with subprocess.Popen(["sleep", "600"]) as process:
        who = identity(process.pid)
        process.kill()
    return who


def tag(who: tuple[int, int], job: str = JOB) -> str:
    """As a supervisor writes it."""
    return f"{job}.0.1.0.{who[0]}.{who[1]}"


@contextlib.contextmanager
def left(script: str, marks: dict[str, str], *words: str) -> Iterator[str]:
    """A process with these marks, and what it has said in its first line; it and all with the same marks are ended."""
    marks = marks | {"LEFT_BY_TEST": f"{os.getpid()}-{time.monotonic_ns()}"}
    argv = [sys.executable, "-c", script, *words]
    with subprocess.Popen(argv, env=environment(marks), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            end_below(process.pid)
            process.kill()
            for other in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if other.environ().get("LEFT_BY_TEST") == marks["LEFT_BY_TEST"]:
                        other.kill()


def look(directory: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What a start of this job in this directory finds, and how long that takes."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(directory)],
        env=environment(SLURM if env is None else env),
        capture_output=True,
        check=True,
    )
    return {**json.loads(done.stdout), "err": done.stderr.decode()}


SHARES = """
import mmap, os, signal, sys
fd = os.open("/dev/shm/" + sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
keep = mmap.mmap(fd, 4096)
print(os.getpid(), flush=True)
signal.pause()
"""

WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("77.0.3.1.4711.99", Tag("77", "0", 3, 1, 4711, 99)),
        ("100_3.batch.1.0.2.5", Tag("100_3", "batch", 1, 0, 2, 5)),
        ("local-n1.example.org.local.12.0.3.4", Tag("local-n1.example.org", "local", 12, 0, 3, 4)),
        ("", None), ("77.0.3", None), ("77.0.3.1.x.99", None), (".0.3.1.4711.99", None), ("77.0.3.1.-1.99", None),
        ("77.0.3.1.4711.99999999999999999999", None), ("77.0.3.1.\u0664.99", None),
    ],
)  # fmt: skip
def test_a_tag_is_read_from_the_right(text: str, expected: Tag | None) -> None:
    """Jobs may hold dots and underscores; what is no tag is none."""
    assert Tag.parse(text) == expected


def test_all_that_a_dead_supervisor_has_left_is_ended(tmp_path: Path, dead: tuple[int, int]) -> None:
    """Children, daemons, sessions, the stopped and the deaf, and those whose environment is gone (field case 132)."""
    marks = SLURM | {"CKPT_SUPERVISE_TAG": tag(dead), "CKPT_SUPERVISE_DIR": "/elsewhere"}
    with left(FAMILY, marks) as line:
        family = eval(line, {})  # noqa: S307 - our own script's.
        assert all(map(is_alive, family.values()))
        found = look(tmp_path)
        assert [name for name, pid in family.items() if is_alive(pid)] == []
        assert found["ended"] == sorted(family.values())
        assert found["told"] == [["leftovers_ended", found["ended"]]]
        assert f"{len(family)} processes were left here" in found["err"]
        assert found["ms"] < WITHIN_MS + BUSY_MS
        assert look(tmp_path)["told"] == []


def test_their_shared_memory_goes_with_them(tmp_path: Path, dead: tuple[int, int]) -> None:
    """A loader's batches would fill the memory of the node until it is booted again."""
    name = f"psm_{secrets.token_hex(4)}"
    with left(SHARES, SLURM | {"CKPT_SUPERVISE_TAG": tag(dead)}, name) as line:
        found = look(tmp_path)
        assert found["ended"] == [int(line)]
        assert found["segments"] == [name]
        assert not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("own", [False, True])
def test_one_that_forks_on_and_on_is_caught(tmp_path: Path, dead: tuple[int, int], own: bool) -> None:
    """Each lives for half a millisecond, in one session or in a new one each time; it would go on for 20 s."""
    with left(LOOP.format(own=own), SLURM | {"CKPT_SUPERVISE_TAG": tag(dead)}) as line:
        assert line == "loops\n"
        found = look(tmp_path)
        assert found["ended"]
        assert found["ms"] < WITHIN_MS + BUSY_MS
        assert look(tmp_path)["ended"] == []


def test_those_of_another_job_in_our_directory_are_ended_too(tmp_path: Path, dead: tuple[int, int]) -> None:
    """They would write where we write. Also by a link to it, and without Slurm, where all runs of a host have one name."""
    place = tmp_path / "ckpt"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    other = SLURM | {"SLURM_JOB_ID": "5"}
    local = {"CKPT_SUPERVISE_TAG": tag(dead, f"local-{socket.gethostname()}"), "CKPT_SUPERVISE_DIR": str(place)}
    with left(WAITS, other | {"CKPT_SUPERVISE_TAG": tag(dead, "5"), "CKPT_SUPERVISE_DIR": str(place)}) as line:
        assert look(tmp_path / "link")["ended"] == [int(line)]
    with left(WAITS, local) as line:
        assert look(tmp_path / "other", {})["ended"] == []
        assert look(place, {})["ended"] == [int(line)]


@pytest.mark.parametrize(
    "case", ["alive", "no tag", "no such tag", "other job", "other local run", "submitted", "ours too", "unknown start"]
)
def test_whatever_is_not_proven_to_be_one_is_left_alone(tmp_path: Path, dead: tuple[int, int], case: str) -> None:
    """A living supervisor's, another job's, and a job that a supervised program has submitted with its whole environment."""
    directory = {"CKPT_SUPERVISE_DIR": str(tmp_path)}
    elsewhere = {"CKPT_SUPERVISE_DIR": "/elsewhere"}
    host = socket.gethostname()
    marks, env = {
        "alive": (SLURM | directory | {"CKPT_SUPERVISE_TAG": tag(identity(os.getpid()))}, SLURM),
        "no tag": (SLURM | directory, SLURM),
        "no such tag": (SLURM | directory | {"CKPT_SUPERVISE_TAG": f"{JOB}.0.1"}, SLURM),
        "other job": (SLURM | {"SLURM_JOB_ID": "5"} | elsewhere | {"CKPT_SUPERVISE_TAG": tag(dead, "5")}, SLURM),
        "other local run": (elsewhere | {"CKPT_SUPERVISE_TAG": tag(dead, f"local-{host}")}, {}),
        "submitted": (SLURM | {"SLURM_JOB_ID": "5"} | directory | {"CKPT_SUPERVISE_TAG": tag(dead)}, SLURM),
        "ours too": (SLURM | directory | {"CKPT_SUPERVISE_TAG": tag(dead)}, SLURM | {"CKPT_SUPERVISE_TAG": tag(dead)}),
        "unknown start": (SLURM | directory | {"CKPT_SUPERVISE_TAG": tag((dead[0], 0))}, SLURM),
    }[case]
    with left(WAITS, marks) as line:
        assert look(tmp_path, env)["told"] == []
        assert is_alive(int(line))


def test_what_runs_below_a_living_supervisor_is_its_own_business(tmp_path: Path, dead: tuple[int, int]) -> None:
    """A step in a step: the inner supervisor is dead, the outer one lives and has what was left."""
    outer = f"""
import os, subprocess, sys
from ckpt_supervisor.linux import procfs
me = f"{JOB}.0.1.0.{{os.getpid()}}.{{procfs.stat(os.getpid()).started}}"
mine = subprocess.Popen(["sleep", "600"], env=os.environ | {{"CKPT_SUPERVISE_TAG": me}})
its = subprocess.Popen(["sleep", "600"], env=os.environ | {{"CKPT_SUPERVISE_TAG": sys.argv[1]}})
print(os.getpid(), mine.pid, its.pid, flush=True)
mine.wait()
"""
    with left(outer, SLURM, tag(dead)) as line:
        outer_pid, mine, its = map(int, line.split())
        assert look(tmp_path)["ended"] == []
        assert is_alive(its)
        os.kill(mine, signal.SIGKILL)
        until(lambda: not is_alive(outer_pid), "the outer one leaves")
        assert look(tmp_path)["ended"] == [its]


def test_one_that_cannot_be_ended_is_named_and_does_not_hold_us(tmp_path: Path, dead: tuple[int, int]) -> None:
    """A tracer that keeps it on its way out stands for a driver in which it hangs."""
    holder = """
import ctypes, os, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
held = subprocess.Popen(["sleep", "600"], env=os.environ | {"CKPT_SUPERVISE_TAG": sys.argv[1]})
assert libc.ptrace(0x4206, held.pid, 0, 0x40) == 0, ctypes.get_errno()  # PTRACE_SEIZE, PTRACE_O_TRACEEXIT
print(held.pid, flush=True)
signal.pause()
"""
    with left(holder, SLURM, tag(dead)) as line:
        found = look(tmp_path)
        assert found["stuck"] == [int(line)]
        assert found["told"] == [["leftovers_stuck", [int(line)]]]
        assert GONE_MS <= found["ms"] < WITHIN_MS + BUSY_MS
        assert f"on their behalf ({line.strip()} sleep)" in found["err"]


def test_many_are_counted_and_some_named() -> None:
    """The line stays readable."""
    texts = dict(Ended(dict.fromkeys(range(10, 20), "python"), {7: "python"}).lines())
    assert "10 processes were left" in texts["leftovers_ended"]
    assert "14 python, ...)" in texts["leftovers_ended"]
    assert texts["leftovers_stuck"].startswith("1 process of an earlier start cannot be ended")


def test_a_second_start_ends_them_before_the_command_runs(tmp_path: Path, dead: tuple[int, int]) -> None:
    """The command finds nobody. The first start, which is to be quick, has not even looked."""
    with contextlib.ExitStack() as stack:
        place = tmp_path / "ckpt"
        local = tag(dead, f"local-{socket.gethostname()}")
        line = stack.enter_context(left(WAITS, {"CKPT_SUPERVISE_TAG": local, "CKPT_SUPERVISE_DIR": str(place)}))
        pid = int(line)
        words = ["sh", "-c", f"grep State /proc/{pid}/status || echo nobody"]
        with supervised(tmp_path, words) as first:
            assert first.code() == 0
        assert re.search(r"State:\s+[RSD] ", first.out), first.out
        assert is_alive(pid)
        with supervised(tmp_path, words) as second:
            assert second.code() == 0
        assert not re.search(r"State:\s+[RSD] ", second.out), second.out
        assert second.event("leftovers_ended")["pids"] == [pid]
        assert "1 process was left here by an earlier start" in second.err
