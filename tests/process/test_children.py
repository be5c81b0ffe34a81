"""The command as a real process: what it finds, what is known of its end, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.children import Child, Claims, NotStarted
from ckpt_supervisor.linux import procfs

from tests.support.proc_stage import BOUND_S, Stage, end_below, mask_of, python_env, until

SHIELDED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


@contextlib.contextmanager
def running(*argv: str, env: dict[str, str] | None = None, own_group: bool = False) -> Iterator[Child]:
    """A command that was started; killed at the end if it still runs."""
    started = children.start(argv, env or dict(os.environ), SHIELDED, Claims(), own_group=own_group)
    assert isinstance(started, Child), started
    with started:
        try:
            yield started
        finally:
            end_below(started.pid)
            started.send(signal.SIGKILL)
            end_of(started)


def end_of(child: Child) -> int:
    """Its exit status, once its guard says that it has ended."""
    while (status := child.status()) is None:
        readable, _, _ = select.select([child.fileno()], [], [], BOUND_S)
        assert readable
    return status


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that children inherit."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    yield read_end, write_end
    os.close(read_end)
    with contextlib.suppress(OSError):
        os.close(write_end)


def line_from(fd: int) -> str:
    """One line, within the bound."""
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], BOUND_S)
        assert readable
        chunk = os.read(fd, 1)
        assert chunk, line
        line += chunk
    return line.decode().strip()


@pytest.mark.parametrize(
    ("script", "code", "returncode"),
    [
        ("exit 0", 0, 0), ("exit 1", 1, 1), ("exit 77", 77, 77), ("exit 255", 255, 255),
        ("kill -SEGV $$", 139, -11), ("kill -KILL $$", 137, -9),
    ],
)  # fmt: skip
def test_the_exit_status_is_the_commands_own(script: str, code: int, returncode: int) -> None:
    """128 + n for a death by signal n; nothing is lost or mistaken (field case 63)."""
    with running("sh", "-c", script) as child:
        assert end_of(child) == code
        assert child.returncode == returncode
        assert child.status() == code
        assert not child.send(signal.SIGTERM)
        assert procfs.state_of(child.pid) == "gone"


@pytest.mark.parametrize(
    ("name", "content", "mode", "code"),
    [
        (None, "", 0, 127), ("plain", "hello", 0o644, 126), ("no_interpreter", "#!/does/not/exist\n", 0o755, 127),
        ("no_format", "\x7fELF but no more", 0o755, 126),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_started_is_told_as_data(
    tmp_path: Path, name: str | None, content: str, mode: int, code: int
) -> None:
    """127 when it is not found, 126 when it cannot be run, and a reason; a claim is left on nobody."""
    path = tmp_path / (name or "missing")
    if name is not None:
        path.write_text(content)
        path.chmod(mode)
    claims = Claims()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    started = children.start([str(path)], dict(os.environ), SHIELDED, claims, own_group=False)
    assert isinstance(started, NotStarted)
    assert started.code == code
    assert str(path) in started.reason
    assert claims.claimed() == frozenset()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_name_is_looked_up_on_the_commands_own_path(tmp_path: Path) -> None:
    """PATH of the environment given counts, not ours; a directory is not a command."""
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nexit 5\n")
    tool.chmod(0o755)
    with running("tool", env={"PATH": f"/nowhere:{tmp_path}:/bin:/usr/bin"}) as child:
        assert end_of(child) == 5
    started = children.start([str(tmp_path)], {}, SHIELDED, Claims(), own_group=False)
    assert isinstance(started, NotStarted)
    assert started.code == 126


def test_the_mask_is_blocked_below_and_as_it_was_above(pipe: tuple[int, int]) -> None:
    """The signals are blocked in the command and in all below it, through bash and through exec; in us nothing has changed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    script = f'bash -c \'python3 -c "print(open(\\"/proc/self/status\\").read())" | grep SigBlk >&{pipe[1]}; true\'; true'
    with running("bash", "-c", script) as child:
        line = line_from(pipe[0])
        assert end_of(child) == 0
    bits = int(line.split()[1], 16)
    assert {number for number in range(1, 65) if bits >> (number - 1) & 1} == SHIELDED
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_shielded_command_lives_through_the_notices_broadcast() -> None:
    """SIGTERM, SIGUSR1 and SIGUSR2 to it and below it end nobody (field case 3)."""
    with running("bash", "-c", "sleep 1000 & wait") as child:
        until(lambda: procfs.children(child.pid), "bash has started sleep")
        sleeper = procfs.descendants(child.pid)[0]
        for pid in (child.pid, sleeper):
            for number in SHIELDED:
                os.kill(pid, number)
        until(lambda: mask_of(sleeper, "ShdPnd") >= SHIELDED, "the signals are pending")
        assert procfs.state_of(sleeper) in ("running", "uninterruptible")
        assert child.status() is None


def test_our_handlers_are_not_the_commands(pipe: tuple[int, int]) -> None:
    """The command starts with default actions; what we ignore of Python's own accord (SIGPIPE) is restored."""
    previous = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        with running("bash", "-c", f"exec cat /proc/self/status >&{pipe[1]}") as child:
            while not (line := line_from(pipe[0])).startswith("SigCgt:"):
                pass
            assert int(line.split()[1], 16) == 0
            assert end_of(child) == 0
        with running("sh", "-c", "kill -PIPE $$; exit 0") as child:
            assert end_of(child) == 128 + signal.SIGPIPE
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_descriptors_directory_and_environment_are_inherited(pipe: tuple[int, int]) -> None:
    """An inheritable descriptor (as PMI's) arrives, the environment is exactly the given one, the directory is ours."""
    with running("/bin/bash", "-c", f"echo $PWD $ONLY >&{pipe[1]}", env={"ONLY": "this", "PATH": "/bin"}) as child:
        assert line_from(pipe[0]) == f"{Path.cwd()} this"
        assert end_of(child) == 0


@pytest.mark.parametrize("own_group", [True, False])
def test_the_command_has_a_group_of_its_own_if_wanted(own_group: bool) -> None:
    """In local mode ctrl-C is to reach us only; under proctrack/pgid the group must stay the step's."""
    with running("sleep", "1000", own_group=own_group) as child:
        assert (os.getpgid(child.pid) == child.pid) is own_group
        assert (os.getpgid(child.pid) == os.getpgrp()) is not own_group
        assert not child.shares_terminal


ON_A_TERMINAL = """
    import json, os, select, signal
    from ckpt_supervisor.adapters import children
    from ckpt_supervisor.adapters.signals import SignalInbox
    with SignalInbox() as inbox:
        argv = ["sh", "-c", "echo ready >&2; read word; echo got $word >&2; exit 9"]
        child = children.start(argv, dict(os.environ), {signal.SIGTERM}, children.Claims(), own_group=True)
        came = []
        while child.status() is None:
            select.select([inbox.fileno(), child.fileno()], [], [])
            came += inbox.drain()
        came += inbox.drain()
    print(json.dumps([child.status(), sorted(came), child.shares_terminal]), flush=True)
    child.close()
"""


def test_the_command_can_read_from_the_terminal_and_ctrl_c_does_not_end_it() -> None:
    """With a terminal on stdin the command stays in the foreground group, so that it is not stopped when it reads; SIGINT, which
    the terminal sends to that whole group, is blocked in it and reaches us."""
    outer, inner = pty.openpty()
    argv = ["setsid", "-c", sys.executable, "-c", textwrap.dedent(ON_A_TERMINAL)]
    process = subprocess.Popen(argv, stdin=inner, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=python_env())
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == b"ready\n"
        os.write(outer, b"\x03")
        os.write(outer, b"hello\n")
        assert process.stderr.readline() == b"got hello\n"
        out, _ = process.communicate(timeout=BOUND_S)
        assert out == b"[9, [2], true]\n"
    finally:
        process.kill()
        process.wait(BOUND_S)
        os.close(outer)
        os.close(inner)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_command_dies_with_its_supervisor(stopped: bool) -> None:
    """SIGKILL of the supervisor ends the command, also a stopped one and one that blocks signals: no orphan outlives the job."""
    script = """
        import json, os, signal, sys
        from ckpt_supervisor.adapters import children
        made = children.start(["sleep", "1000"], dict(os.environ), {signal.SIGTERM}, children.Claims(), own_group=True)
        print(json.dumps(made.pid), flush=True)
        sys.stdin.readline()
    """
    with Stage(script) as stage:
        pid = stage.said()
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: procfs.state_of(pid) == "stopped", "it is stopped")
        assert procfs.state_of(pid) != "gone"
        stage.process.kill()
        until(lambda: procfs.state_of(pid) in ("zombie", "gone"), "the command has died")


def test_a_pidfd_tells_the_end_of_any_process() -> None:
    """Not only of a child; of a process that is gone there is none."""
    with running("sh", "-c", "sleep 1000 & echo; wait") as child:
        until(lambda: procfs.children(child.pid), "it has a child")
        sleeper = procfs.descendants(child.pid)[0]
        fd = children.pidfd(sleeper)
        assert fd is not None
        assert select.select([fd], [], [], 0)[0] == []
        os.kill(sleeper, signal.SIGKILL)
        assert select.select([fd], [], [], BOUND_S)[0] == [fd]
        os.close(fd)
        until(lambda: procfs.state_of(sleeper) == "gone", "its parent has reaped it")
        assert children.pidfd(sleeper) is None


def test_states_are_told_apart() -> None:
    """Running, stopped, zombie, gone."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        until(lambda: children.state_of(child.pid) == "running", "it runs")
        child.send_signal(signal.SIGSTOP)
        until(lambda: children.state_of(child.pid) == "stopped", "it is stopped")
        child.kill()
        until(lambda: children.state_of(child.pid) == "zombie", "it has died")
        assert "zombie" in procfs.describe(child.pid)
        child.wait(BOUND_S)
        assert children.state_of(child.pid) == "gone"
        assert procfs.describe(child.pid) == f"{child.pid} (gone)"


def test_the_walk_finds_all_generations_and_children_of_threads() -> None:
    """Children of every thread count, and what psutil finds by looking at everything is the same."""
    script = """
        import json, subprocess, sys, threading
        made = []
        def make():
            made.append(subprocess.Popen(["sh", "-c", "sleep 1000 & wait"]))
            sys.stdin.readline()
        threading.Thread(target=make, daemon=True).start()
        made.append(subprocess.Popen(["sleep", "1000"]))
        while len(made) < 2:
            pass
        print(json.dumps([one.pid for one in made]), flush=True)
        threading.Event().wait()
    """
    with Stage(script) as stage:
        pids = stage.said()
        until(lambda: len(procfs.descendants(stage.pid)) == 3, "the shell has started its sleep")
        found = procfs.descendants(stage.pid)
        assert set(pids) < set(found)
        assert set(found) == set(procfs.by_psutil(stage.pid, recursive=True))
        assert found[:2] == procfs.children(stage.pid)
        assert children.is_descendant(found[2])
        assert children.is_descendant(stage.pid)
        assert not children.is_descendant(1)
        assert not children.is_descendant(os.getpid())
        assert not children.is_descendant(os.getppid())
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert procfs.descendants(found[2]) == []


SUBREAPER = """
    import json, os, select, signal, subprocess, sys, threading
    from ckpt_supervisor.adapters import children
    from ckpt_supervisor.linux import procfs
    from ckpt_supervisor.adapters.signals import SignalInbox
    def say(value): print(json.dumps(value), flush=True)
    def wait_for(fact):
        while not fact(): select.select([], [], [], 0.01)
    claims = children.Claims()
    def start(*argv): return children.start(argv, dict(os.environ), {signal.SIGTERM}, claims, own_group=True)
    def states(): return [procfs.state_of(pid) for pid in children.descendants(claims)]
    def names(): return [procfs.name_of(pid) for pid in children.descendants(claims)]
"""


def test_orphans_come_back_to_the_guard_which_says_how_they_have_ended() -> None:
    """A process whose parent died is its to reap; the exit status is the orphan's own."""
    script = (
        SUBREAPER
        + """
    assert children.become_subreaper()
    child = start("sh", "-c", "exec 3<&0; (read x <&3; exit 5) & exit 3")
    wait_for(lambda: child.status() is not None)
    (orphan,) = children.descendants(claims)
    say([child.status(), orphan, [(news.pid == child.pid, news.returncode) for news in child.take()]])
    news = []
    wait_for(lambda: news.extend(child.take()) or news)
    say([(one.pid, one.returncode) for one in news])
    say([procfs.state_of(orphan), children.descendants(claims), children.reap_orphans(claims)])
    say(child.close(60))
    """
    )
    with Stage(script) as stage:
        status, orphan, news = stage.said()
        assert (status, news) == (3, [[True, 3]])
        stage.say()
        assert stage.said() == [[orphan, 5]]
        assert stage.said() == ["gone", [], {}]
        assert stage.said() is True
        assert stage.ends() == 0


def test_orphans_come_back_to_us_when_there_is_no_guard() -> None:
    """Those of our own calls, and everybody's once the guard is gone."""
    script = (
        SUBREAPER
        + """
    children.become_subreaper()
    process = subprocess.Popen(["sh", "-c", "(exit 5) & exit 3"])
    process.wait()
    found = {}
    wait_for(lambda: found.update(children.reap_orphans(claims)) or found)
    say(list(found.values()))
    """
    )
    with Stage(script) as stage:
        assert stage.said() == [5]


def test_reaping_orphans_never_takes_the_status_of_a_worker_threads_child() -> None:
    """Children that threads start and wait for keep their exit status, while the loop reaps as fast as it can."""
    script = (
        SUBREAPER
        + """
    children.become_subreaper()
    wrong = []
    def work():
        for number in range(150):
            with claims.forking() as claim:
                process = subprocess.Popen(["sh", "-c", f"exit {number % 100 + 1}"])
                claim(process.pid)
            if process.wait() != number % 100 + 1:
                wrong.append(process.returncode)
            claims.release(process.pid)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads: thread.start()
    orphans = {}
    while any(thread.is_alive() for thread in threads):
        orphans.update(children.reap_orphans(claims))
    say([wrong, len(orphans)])
    """
    )
    with Stage(script) as stage:
        assert stage.said(120) == [[], 0]


def test_end_all_ends_stopped_ones_and_grandchildren_and_leaves_us_and_our_errands() -> None:
    """Every process below us is ended, however deep, whether stopped, in a session of its own or an orphan; a call of our own
    that is under way and we ourselves are not."""
    script = (
        SUBREAPER
        + """
    children.become_subreaper()
    tree = "sleep 999 & setsid sleep 999 & (sleep 999 & sleep 999 & wait) & sh -c 'kill -STOP $$' & (setsid sleep 999 &) ; wait"
    child = start("bash", "-c", tree)
    with claims.forking() as claim:
        errand = subprocess.Popen(["sleep", "1000"])
        claim(errand.pid)
    # Five are `sleep` by now, so that nobody of these forks any more, and nobody is left who was there only to fork.
    wait_for(lambda: names().count("sleep") == 5 and len(states()) == 8 and "stopped" in states())
    below = children.descendants(claims)
    hit = children.end_all(signal.SIGKILL, claims)
    wait_for(lambda: all(procfs.state_of(pid) in ("zombie", "gone") for pid in below))
    wait_for(lambda: child.status() is not None)  # The guard has told it.
    lives = procfs.state_of(errand.pid) not in ("zombie", "gone")
    say([sorted(hit) == sorted(below), lives, errand.pid in hit, child.status()])
    say(child.close(60) and children.descendants() == [errand.pid])
    say(children.end_all(signal.SIGTERM) == [errand.pid])
    say(errand.wait())
    """
    )
    with Stage(script) as stage:
        assert stage.said() == [True, True, False, 137]
        assert stage.said() is True
        assert stage.said() is True
        assert stage.said() == -signal.SIGTERM


def test_end_all_wakes_a_stopped_process_for_a_signal_that_it_can_take() -> None:
    """SIGCONT follows the signal: a stopped grandchild dies of SIGUSR2 although it could not run, while its parent lives."""
    script = (
        SUBREAPER
        + """
    child = start("bash", "-c", "trap : USR2; sh -c 'kill -STOP $$'; exit $?")
    wait_for(lambda: "stopped" in states())
    children.end_all(signal.SIGUSR2, claims)
    wait_for(lambda: child.status() is not None)
    say(child.status())
    """
    )
    with Stage(script) as stage:
        assert stage.said() == 128 + signal.SIGUSR2


def test_a_tree_that_forks_while_it_is_ended_is_ended() -> None:
    """Processes that come up between two looks are found by the next look: after one call nobody runs any more."""
    script = (
        SUBREAPER
        + """
    children.become_subreaper()
    bomb = "for i in 1 2 3 4; do (while :; do sleep 999 & read -t 0.002 y; done) & done; wait"
    child = start("bash", "-c", bomb)
    wait_for(lambda: len(children.descendants(claims)) > 60)  # Without the guard, which is not to be hit.
    hit = children.end_all(signal.SIGKILL, claims)
    wait_for(lambda: set(states()) <= {"zombie", "gone"})
    wait_for(lambda: child.status() is not None and not children.descendants(claims))
    say([child.status(), len(hit) > 60])
    child.close()
    """
    )
    with Stage(script) as stage:
        assert stage.said() == [137, True]
