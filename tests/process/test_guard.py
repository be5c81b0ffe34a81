"""The guard as a real process: who ends when it, the supervisor or both are killed, what it tells, and what it does not hold."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from ckpt_supervisor.adapters import guard, guard_process
from ckpt_supervisor.linux import procfs

from tests.support.proc_stage import Stage, mask_of, until
from tests.support.shield_stage import lives

SUPERVISOR = """
    import json, os, select, signal, sys
    from ckpt_supervisor.adapters import children
    def say(value): print(json.dumps(value), flush=True)
    claims = children.Claims()
    children.become_subreaper()
    def start(*argv, **how): return children.start(argv, dict(os.environ), {signal.SIGTERM}, claims, own_group=False, **how)
    def next_news(child):
        while not (news := child.take()): select.select([child.fileno()], [], [], 20)
        what = lambda one: getattr(one, "returncode", getattr(one, "number", 0))
        return [(type(one).__name__, getattr(one, "pid", 0), what(one)) for one in news]
"""

UNRULY = """
    import os, signal, subprocess, sys, time
    def daemon(*argv, env=None):
        between = os.fork()
        if between == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvpe(argv[0], argv, os.environ if env is None else env)
            os._exit(0)
        os.waitpid(between, 0)
    daemon("sleep", "998")
    daemon("/bin/sleep", "998", env={})
    subprocess.Popen(["setsid", "sleep", "998"])
    subprocess.Popen(["bash", "-c", "trap '' TERM INT HUP USR1 USR2; sleep 998 & wait; sleep 998"])
    os.kill(subprocess.Popen(["sleep", "998"]).pid, signal.SIGSTOP)
    time.sleep(998)
"""


STANDARD = set(range(1, 32))


def gone(pids: list[int]) -> bool:
    """Whether nobody of these runs any more."""
    return all(procfs.state_of(pid) in ("zombie", "gone") for pid in pids)


@pytest.fixture
def unruly(tmp_path: Path) -> str:
    """A command that leaves daemons, a scrubbed environment, a stopped one and one that ignores signals; 7 processes with it."""
    path = tmp_path / "unruly.py"
    path.write_text(textwrap.dedent(UNRULY))
    return str(path)


STARTED = (
    SUPERVISOR
    + """
    child = start(sys.executable, sys.argv[1])
    while len(pids := children.descendants(claims)) != 7 or "stopped" not in map(children.state_of, pids):
        select.select([], [], [], 0.01)
    say([child.guard_pid, child.pid, pids])
"""
)


def test_a_supervisor_that_is_killed_takes_everybody_below_it_along(unruly: str) -> None:
    """Double-forked, with sessions of their own, without our environment, stopped, ignoring signals: nobody outlives it."""
    with Stage(STARTED + "    sys.stdin.readline()\n", unruly) as stage:
        guard_pid, _, pids = stage.said()
        stage.process.kill()
        until(lambda: gone([guard_pid, *pids]), "all of them are gone")


def test_a_supervisor_that_is_killed_with_its_process_group_takes_everybody_along(unruly: str) -> None:
    """As proctrack/pgid ends a step: the guard is not in that group."""
    with Stage(STARTED + "    sys.stdin.readline()\n", unruly, wrapper=("setsid",)) as stage:
        guard_pid, _, pids = stage.said()
        assert os.getpgid(guard_pid) == guard_pid
        os.killpg(os.getpgid(stage.pid), signal.SIGKILL)
        until(lambda: gone([guard_pid, *pids]), "all of them are gone")


def test_a_guard_that_is_killed_takes_the_command_along_and_the_rest_comes_back(unruly: str) -> None:
    """The supervisor hears of both, and what is left is below it."""
    script = STARTED + "    say(next_news(child))\n    say(children.end_all(signal.SIGKILL, claims))\n    say(child.close())\n"
    with Stage(script, unruly) as stage:
        guard_pid, command, pids = stage.said()
        os.kill(guard_pid, signal.SIGKILL)
        assert stage.said() == [["Ended", command, -signal.SIGKILL], ["Lost", 0, 0]]
        assert set(stage.said()) == set(pids) - {command}
        stage.said()
        until(lambda: gone(pids), "all of them are gone")


def test_closing_the_guard_leaves_nobody(unruly: str) -> None:
    """Once it says so, even without a kill before."""
    with Stage(STARTED + "    say(child.close(60))\n    say(children.descendants())\n", unruly) as stage:
        guard_pid, _, pids = stage.said()
        assert stage.said() is True
        assert stage.said() == []
        assert gone([guard_pid, *pids])


def test_a_signal_to_everybody_is_told_with_its_sender() -> None:
    """The guard has all signals blocked and dies of none; nobody sends to it alone."""
    script = SUPERVISOR + "    child = start('sleep', '998')\n    say(child.guard_pid)\n    say(next_news(child))\n"
    script += "    sys.stdin.readline()\n"
    with Stage(script) as stage:
        guard_pid = stage.said()
        os.kill(guard_pid, signal.SIGUSR1)
        assert stage.said() == [["Broadcast", 0, signal.SIGUSR1]]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT):
            os.kill(guard_pid, number)
        assert lives(guard_pid)
        assert mask_of(guard_pid) >= {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}


def test_the_guard_holds_neither_files_nor_directory_nor_terminal(tmp_path: Path) -> None:
    """A pipe that the command closes is closed; the file system below its directory can be unmounted."""
    script = (
        SUPERVISOR
        + """
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    os.chdir(sys.argv[1])
    child = start("sh", "-c", f"exec {write_end}>&-; sleep 998", score="321")
    os.close(write_end)
    say(os.read(read_end, 1).decode())
    guard = child.guard_pid
    for _ in range(9000):  # The end of the pipe is seen while the guard is still closing; /dev/null comes after that.
        try:
            fds = sorted(os.readlink(f"/proc/{guard}/fd/{n}").split(":")[0] for n in os.listdir(f"/proc/{guard}/fd"))
        except FileNotFoundError:
            fds = []
        if fds[:3] == ["/dev/null"] * 3:
            break
        select.select([], [], [], 0.005)
    say([fds, os.readlink(f"/proc/{guard}/cwd"), os.getsid(guard) == guard])
    say([os.readlink(f"/proc/{child.pid}/cwd"), os.getsid(child.pid) == os.getsid(0), os.getpgid(child.pid) == os.getpgrp()])
    say(open(f"/proc/{child.pid}/oom_score_adj").read().strip())
    say(open(f"/proc/{guard}/cmdline").read())
    """
    )
    with Stage(script, str(tmp_path)) as stage:
        assert stage.said() == ""
        assert stage.said() == [["/dev/null"] * 3 + ["anon_inode", "pipe", "pipe"], "/", True]
        assert stage.said() == [str(tmp_path), True, True]
        assert stage.said() == "321"
        line = stage.said()
        assert "ckpt_supervis" not in line.replace(str(Path.cwd()), "")


def test_signals_that_were_ignored_or_blocked_before_us_are_so_in_the_command() -> None:
    """nohup's SIGHUP, a background job's SIGINT; SIGPIPE, which Python ignores for itself, has its default action."""
    script = (
        SUPERVISOR
        + """
    from ckpt_supervisor.adapters.guard import Early
    from ckpt_supervisor.adapters.signals import SignalInbox
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with Early(claims, mask, {}) as early, SignalInbox() as inbox:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask - inbox.handled)
        for _ in range(2):  # The second one's guard is begun when we have handlers.
            child = start("sleep", "998", early=early)
            say(child.pid)
            sys.stdin.readline()
            child.close()
    """
    )
    with Stage(script) as stage:
        for _ in range(2):
            pid = stage.said()
            assert mask_of(pid, "SigIgn") & STANDARD == {signal.SIGHUP, signal.SIGINT}
            assert mask_of(pid) == {signal.SIGWINCH, signal.SIGTERM}
            assert mask_of(pid, "SigCgt") == set()
            stage.say()


def test_many_ends_while_the_supervisor_is_stopped_do_not_hold_the_guard_up(tmp_path: Path) -> None:
    """Its pipe is full by then; the command's own end is told all the same."""
    script = (
        SUPERVISOR
        + """
    many = "for i in $(seq 300); do (true &); done; exit 9"
    child = start("bash", "-c", f"until [ -e {sys.argv[1]} ]; do sleep 0.01; done; {many}")
    import fcntl
    fcntl.fcntl(child.fileno(), 1031, 4096)  # F_SETPIPE_SZ: a hundred ends fill it.
    say([child.guard_pid, child.pid])
    sys.stdin.readline()
    while child.status() is None: select.select([child.fileno()], [], [], 20)
    say(child.status())
    """
    )
    with Stage(script, str(tmp_path / "go")) as stage:
        guard_pid, pid = stage.said()
        (tmp_path / "go").touch()
        until(lambda: procfs.state_of(pid) == "gone", "it has ended and was reaped")
        assert lives(guard_pid)
        stage.say()
        assert stage.said() == 9


def test_without_lists_of_children_the_guard_looks_at_every_process() -> None:
    """Kernels without CONFIG_PROC_CHILDREN."""
    script = "import json, subprocess\nfrom ckpt_supervisor.adapters import guard_process as g\n"
    script += "c = [subprocess.Popen(['sleep', '998']) for _ in range(2)]\n"
    script += "r = g.contents\ng.contents = lambda path: None if path.endswith('children') else r(path)\n"
    script += "print(json.dumps(sorted(g.children()) == sorted(one.pid for one in c)), flush=True)\n"
    with Stage(script) as stage:
        assert stage.said() is True


def test_a_guard_whose_supervisor_has_nothing_to_start_ends() -> None:
    """An early one, when the options turn out to be wrong."""
    script = SUPERVISOR + "    from ckpt_supervisor.adapters.guard import Guard\n    g = Guard.begin(claims)\n"
    script += "    say([g.pid, g.close(60)])\n"
    with Stage(script) as stage:
        pid, closed = stage.said()
        assert closed
        assert procfs.state_of(pid) == "gone"


def test_frames_of_any_size_go_through_the_pipe() -> None:
    """An environment may be larger than a pipe; a frame that is cut is none."""
    read_end, write_end = os.pipe()
    order = ([b"x"], [(b"A", b"b" * 10_000)], [], [], False, None, "")
    os.write(write_end, guard_process.framed(order))
    assert guard_process.read_frame(read_end) == order
    os.write(write_end, guard_process.framed(order)[:-1])
    os.close(write_end)
    assert guard_process.read_frame(read_end) is None
    os.close(read_end)
    assert "ckpt" not in guard.BOOT
