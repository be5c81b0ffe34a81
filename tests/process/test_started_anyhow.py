"""However the supervisor is started, the command runs to its end, with its own status, and finds what it would without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.proc_stage import BOUND_S, Stage
from tests.support.run import SUPERVISE, environment

HERE = Path(__file__).resolve().parents[2]


def supervise(directory: Path, *command: str) -> list[str]:
    """The words of one supervised command."""
    return [*SUPERVISE, "--dir", str(directory / "ckpt"), "--", *command]


def shell(words: list[str], redirections: str = "") -> str:
    """As a line of a shell."""
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    return f"{quoted} {redirections}"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_are_closed_in_the_command_and_nothing_takes_their_place(tmp_path: Path, closed: str) -> None:
    """As `nohup … <&- >&- 2>&- &` and daemons start it."""
    report = tmp_path / "fds"
    command = ["sh", "-c", f"for n in 0 1 2; do [ -e /proc/$$/fd/$n ] && echo $n >> {report}; done; sleep 0.2; exit 3"]
    line = shell(supervise(tmp_path, *command), closed)
    done = subprocess.run(["sh", "-c", line], env=environment(), timeout=BOUND_S, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 3
    open_ones = set(report.read_text().split()) if report.exists() else set()
    assert open_ones == {"0", "1", "2"} - {{"<": "0", ">": "1", "2": "2"}[word[0]] for word in closed.split()}


def test_a_starter_that_ignores_sigchld_is_no_obstacle(tmp_path: Path) -> None:
    """The kernel collects children by itself then, unless it is told otherwise; the command still finds it ignored."""
    script = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    for command, code in ((["sh", "-c", "exit 3"], 3), (["/nonesuch"], 127), (["grep", "SigIgn", "/proc/self/status"], 0)):
        argv = [sys.executable, "-c", script, *supervise(tmp_path, *command)]
        done = subprocess.run(argv, env=environment(), timeout=BOUND_S, check=False, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        if code == 0:
            assert int(done.stdout.split()[1], 16) >> (signal.SIGCHLD - 1) & 1


def test_no_locale_is_made_up_for_the_command(tmp_path: Path) -> None:
    """Python sets LC_CTYPE for itself where there is none (PEP 538)."""
    env = {"PATH": os.environ["PATH"], **{key: value for key, value in environment().items() if key == "PYTHONPATH"}}
    done = subprocess.run(supervise(tmp_path, "env"), env=env, timeout=BOUND_S, check=True, capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if not line.startswith("CKPT_SUPERVISE_")] == [
        f"{key}={value}" for key, value in env.items()
    ]


def test_a_guard_that_was_stopped_is_woken_when_the_command_is_over(tmp_path: Path) -> None:
    """Its word is overdue then. The command's parent is the guard."""
    argv = supervise(tmp_path, "sh", "-c", "kill -STOP $PPID; exit 3")
    done = subprocess.run(argv, env=environment(), timeout=BOUND_S, check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr


def test_as_pid_1_of_a_container_it_knows_who_is_below(tmp_path: Path) -> None:
    """Everything there descends from it, and whoever is a rank is watched."""
    script = "import os, subprocess, sys\nfrom ckpt_supervisor.adapters import children\np = subprocess.Popen(['sleep', '998'])\n"
    script += "print([os.getpid(), children.is_descendant(p.pid)]); p.kill(); p.wait()"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script]
    done = subprocess.run(argv, env=environment(), timeout=BOUND_S, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[1, True]"
    argv = ["unshare", "--pid", "--fork", "--mount-proc", *supervise(tmp_path, "sh", "-c", "setsid sleep 998 & exit 4")]
    assert subprocess.run(argv, env=environment(), timeout=BOUND_S, check=False).returncode == 4


def test_a_process_with_more_files_than_select_knows_can_start_a_command() -> None:
    """The coordinator of a thousand tasks, at a restart in place."""
    script = """
        import os, resource
        from ckpt_supervisor.adapters import children
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        child = children.start(["sh", "-c", "exit 5"], dict(os.environ), set(), children.Claims(), own_group=False)
        while child.status() is None: children.readable(child.fileno(), 20)
        print([child.status(), child.close()], flush=True)
    """
    with Stage(script.replace("print(", "import json; print(json.dumps(").replace(", flush", "), flush")) as stage:
        assert stage.said() == [5, True]


def test_a_command_that_is_over_at_once_is_seen_to_be_over(tmp_path: Path) -> None:
    """Its end may come before anybody looks for it."""
    for code in (0, 1, 2, 3) * 3:
        argv = supervise(tmp_path, "sh", "-c", f"exit {code}")
        assert subprocess.run(argv, env=environment(), timeout=BOUND_S, check=False).returncode == code
