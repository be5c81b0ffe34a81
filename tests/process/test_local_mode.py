"""The whole thing on one machine without Slurm: real supervisor, real trainer, real signals and real files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor.linux.procfs import descendants

from tests.support.lasting import lasting, let_go
from tests.support.run import SUPERVISE, Run, environment, eventually, is_alive, supervised, toy, trained

if TYPE_CHECKING:
    from collections.abc import Sequence

FOREVER = ("--steps", 1_000_000)
TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def in_mid_save(run: Run, number: int = 1) -> None:
    """Wait until the trainer's save number n is running."""
    eventually(lambda: len(re.findall(r"^saving", run.out, re.MULTILINE)) >= number, f"save number {number}{run.story()}")


def said_in_order(run: Run, *words: str) -> None:
    """These words begin lines of stdout, in this order."""
    places = [run.said(f"^{word}").start() for word in words]
    assert places == sorted(places), run.story()


@pytest.mark.parametrize("number", TOLD, ids=lambda number: number.name)
def test_a_signal_saves_verifies_commits_and_leaves_with_75(tmp_path: Path, number: signal.Signals) -> None:
    """No step is lost or done twice: the checkpoint holds the last step that was done, and the next start goes on after it."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(10)
        run.signal(number)
        assert run.code() == 75, run.story()
        done = run.toy_steps()[-1]
        assert run.intact() == [done]
        assert str((run.dir / "latest").readlink()) == f"step-{done:09d}"
        (line,) = run.err.splitlines()
        assert line.startswith(f"ckpt-supervise: {number.name}; step {done} is committed; there is no Slurm")
        assert line.endswith("start the same command again to go on from there")
        assert run.event("signal")["signal"] == number.name
        assert run.event("exit")["code"] == 75
    with trained(tmp_path, "--steps", done + 5) as run:
        assert run.code() == 0, run.story()
        assert run.said(rf"^ready pid \d+ at {done} ")
        assert run.toy_steps() == list(range(1, done + 6))
        assert run.event("command_started", resume_step=done)["resume_from"] == str(run.dir / f"step-{done:09d}")


def test_signals_of_the_users_own_choice_are_obeyed(tmp_path: Path) -> None:
    """`--notice-signal RTMIN+1 --save-signal WINCH,URG`, as a site's Slurm may send them; what is not named means nothing."""
    options = ["--notice-signal", "RTMIN+1", "--save-signal", "WINCH,URG"]
    with trained(tmp_path, *FOREVER, options=options) as run:
        run.reached(3)
        run.signal(signal.SIGUSR1, signal.SIGUSR2)
        run.signal(signal.SIGWINCH)
        first = run.event("commit")["step"]
        run.reached(first + 3)
        run.signal(signal.SIGRTMIN + 1)
        assert run.code() == 75, run.story()
        assert [event["signal"] for event in run.events("signal")] == ["SIGWINCH", "SIGRTMIN+1"]
        assert run.intact() == [first, run.toy_steps()[-1]]


def test_training_leaves_through_finally_and_atexit_after_the_commit(tmp_path: Path) -> None:
    """`Preempted` goes through the trainer's own code, and only once the checkpoint is committed."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(3)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        said_in_order(run, "saving", "saved", "preempted", "exit")
        preempted_ms = int(run.said(r"^preempted .* t (\d+)$")[1])
        committed = run.event("commit")
        assert preempted_ms >= wall_ms(committed) - 1
        assert run.event("command_exited")["code"] == 0


def wall_ms(event: dict[str, object]) -> int:
    """When an event was."""
    return int(datetime.fromisoformat(str(event["ts"]).replace("Z", "+00:00")).timestamp() * 1000)


def test_usr2_saves_and_training_goes_on(tmp_path: Path) -> None:
    """Twice in one run; the run then ends by itself with 0 and every step was done once."""
    steps = 600  # So many that the second signal does not come too late, whoever is held up between the two.
    with trained(tmp_path, "--steps", steps) as run:
        run.reached(5)
        run.signal(signal.SIGUSR2)
        first = run.event("commit")["step"]
        run.reached(first + 5)
        run.signal(signal.SIGUSR2)
        assert run.code() == 0, run.story()
        second = run.event("commit")["step"]
        assert run.intact() == [first, second]
        assert run.toy_steps() == list(range(1, steps + 1))
        assert [event["kind"] for event in run.events("round_begun")] == ["save and go on"] * 2
        assert run.err == ""


def test_three_signals_in_one_save_are_one_save_one_commit_and_one_leaving(tmp_path: Path) -> None:
    """Slurm sends TERM up to three times, with CONT and its warning between (field case 34): only the deadline may change."""
    with trained(tmp_path, *FOREVER, "--save-ms", 5_000) as run:
        run.reached(3)
        run.signal(signal.SIGTERM)
        in_mid_save(run)
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1):
            run.signal(number)
            if number != signal.SIGCONT:
                eventually(lambda n=number: run.events("signal", signal=n.name), f"{number.name} is noted")
        assert run.code() == 75, run.story()
        assert len(re.findall(r"^saving", run.out, re.MULTILINE)) == 1
        assert [len(run.events(name)) for name in ("round_begun", "commit", "leaving", "exit")] == [1, 1, 1, 1]
        assert run.intact() == [run.toy_steps()[-1]]


def test_a_notice_during_a_periodic_save_uses_it_or_takes_a_new_one_never_two_at_a_time(tmp_path: Path) -> None:
    """The save that is running is finished and committed; the step that training stops at is committed too (field case 35)."""
    with trained(tmp_path, *FOREVER, "--save-ms", 600, options=["--every-steps", 20]) as run:
        run.reached(20)
        in_mid_save(run)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.events("commit")[0]["step"] == 20
        assert run.intact()[-1] == run.toy_steps()[-1]
        words = [line.split()[0] for line in run.out.splitlines() if line.startswith(("saving", "saved"))]
        assert words == ["saving", "saved"] * (len(words) // 2)


def test_a_second_ctrl_c_in_the_save_ends_at_once(tmp_path: Path) -> None:
    """A person who presses it twice does not wait for the rest of the save; nothing half is left to resume from: 76."""
    with trained(tmp_path, *FOREVER, "--save-ms", 600_000, options=["--grace", "1h"]) as run:
        run.reached(3)
        run.signal(signal.SIGINT)
        run.event("rank_saving")
        trainer = run.toy_pid()
        run.signal(signal.SIGINT)
        assert run.code() == 76, run.story()
        assert "a second ctrl-C ended the save" in run.err
        assert run.steps() == []
        assert not is_alive(trainer)


def test_a_second_ctrl_c_after_the_commit_waits_no_longer_for_training_to_end(tmp_path: Path) -> None:
    """The checkpoint is there already: 75, and the trainer that lingers is ended."""
    with trained(tmp_path, *FOREVER, "--hang-at-exit", options=["--leave-timeout", "10m", "--grace", "1h"]) as run:
        run.reached(3)
        run.signal(signal.SIGINT)
        run.said("^preempted")
        trainer = run.toy_pid()
        run.signal(signal.SIGINT)
        assert run.code() == 75, run.story()
        assert not is_alive(trainer)


def test_training_that_lingers_or_ignores_the_end_is_ended_after_its_time(tmp_path: Path) -> None:
    """It hangs in its own clean-up, or goes on training after `Preempted`: the checkpoint is committed, so 75, in time."""
    for knob in ("--hang-at-exit", "--ignore-leave"):
        with trained(tmp_path / knob, *FOREVER, knob, options=["--leave-timeout", "1s", "--grace", "1h"]) as run:
            run.reached(3)
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            assert run.intact() == [run.event("commit")["step"]]
            assert run.event("command_exited")["code"] in (143, 137)  # Asked with SIGTERM, then killed.


def test_whatever_status_training_leaves_with_it_was_interrupted(tmp_path: Path) -> None:
    """Told to leave, it exits with 3: the checkpoint is committed, so 75 all the same."""
    with trained(tmp_path, *FOREVER, "--exit-code-after-leave", 3) as run:
        run.reached(3)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.event("command_exited", code=3)["level"] == "info"


EXITS = [
    (["sh", "-c", "exit 0"], 0),
    (["sh", "-c", "exit 1"], 1),
    (["sh", "-c", "exit 77"], 77),
    (["sh", "-c", "kill -SEGV $$"], 139),
    (["sh", "-c", "kill -KILL $$"], 137),
    (["/etc/passwd"], 126),
    (["/"], 126),
    (["no-such-command-here"], 127),
    (["/no/such/command"], 127),
]


@pytest.mark.parametrize(("command", "code"), EXITS, ids=[str(code) + command[0].replace("/", "_") for command, code in EXITS])
def test_the_commands_own_status_is_passed_on(tmp_path: Path, command: Sequence[str], code: int) -> None:
    """128 + n for a death by signal n, 126 and 127 as from a shell; nothing is saved, and a failure is told in one line."""
    with supervised(tmp_path, command) as run:
        assert run.code() == code, run.story()
        assert run.event("exit")["code"] == code
        assert (run.err == "") == (code == 0)
        assert len(run.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("knobs", "code"), [((), 0), (("--exit-code", 1), 1), (("--exit-code", 77), 77), (("--end-signal", "SEGV"), 139)]
)
def test_a_trainers_own_end_is_its_own(tmp_path: Path, knobs: Sequence[object], code: int) -> None:
    """Training that attached, ended its loop and exits: its status, no save, no word of an interruption."""
    with trained(tmp_path, "--steps", 5, *knobs) as run:
        assert run.code() == code, run.story()
        assert run.steps() == []
        assert run.events("round_begun") == []
        assert run.event("rank_hello")


def test_a_notice_after_the_loops_end_is_no_interruption(tmp_path: Path) -> None:
    """Training is over and writes its last files: it ends by itself with its own status, and is not killed for a notice."""
    script = "import ckpt_client as c, signal, sys\nfor i in c.steps(3, save=lambda d, n: [], load=print): pass\n"
    script += "print('over', flush=True)\nsys.stdin.read()\nprint('written', flush=True)\nsys.exit(9)\n"
    argv = [*SUPERVISE, "--dir", str(tmp_path / "ckpt"), "--", sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"over\n"
            run = Run(process, tmp_path / "ckpt", tmp_path)
            eventually(lambda: run.events("rank_finished"), "rank_finished")
            process.send_signal(signal.SIGTERM)
            eventually(lambda: run.events("leaving"), "the notice is in force")
            process.stdin.close()
            assert process.stdout.readline() == b"written\n"
            assert process.wait(60) == 9
        finally:
            process.kill()


def test_a_requeue_by_exit_status_leaves_with_that_status(tmp_path: Path) -> None:
    """`--requeue exit:85` asks the caller in the way that a site with RequeueExit understands."""
    with trained(tmp_path, *FOREVER, options=["--requeue", "exit:85"]) as run:
        run.reached(3)
        run.signal(signal.SIGTERM)
        assert run.code() == 85, run.story()
        assert "exit 85 asks Slurm to requeue" in run.err


def test_a_shell_between_does_not_keep_anything_from_working(tmp_path: Path) -> None:
    """`bash -c "python ...; true"`: the trainer attaches and saves, and the shell's own status hides nothing (field case 16)."""
    words = " ".join(toy("--log", tmp_path / "toy.log", *FOREVER))
    with supervised(tmp_path, ["bash", "-c", f"{words}; true"]) as run:
        run.reached(5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.intact() == [run.toy_steps()[-1]]


def test_the_death_of_a_shell_between_orphans_nobody(tmp_path: Path) -> None:
    """Python below a shell that was killed comes back to the supervisor, which ends it: nothing outlives the run."""
    words = " ".join(toy("--log", tmp_path / "toy.log", *FOREVER))
    with supervised(tmp_path, ["bash", "-c", f"{words}; true"]) as run:
        trainer = run.toy_pid()
        os.kill(run.event("command_started")["command_pid"], signal.SIGKILL)
        assert run.code() == 137, run.story()
        assert not is_alive(trainer)


def test_a_broadcast_to_every_process_reaches_only_the_supervisor(tmp_path: Path) -> None:
    """As with proctrack/linuxproc: TERM and USR1 go to the trainer and its children too, without handlers, and nothing dies."""
    script = "import subprocess, sys\nchild = subprocess.Popen(['sleep', '600'])\nprint('child', child.pid, flush=True)\n"
    script += "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    _, program, *words = toy("--log", tmp_path / "toy.log", *FOREVER, "--save-ms", 5_000)
    with supervised(tmp_path, [sys.executable, "-c", script, program, *words]) as run:
        run.reached(5)
        below = descendants(run.pid)
        assert len(below) == 3, below  # The guard is one of them.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            for pid in (run.pid, *below):
                os.kill(pid, number)
        assert run.code() == 75, run.story()
        assert run.intact() == [run.toy_steps()[-1]]
        eventually(lambda: not is_alive(run.event("command_started")["guard_pid"]), "the guard has ended")
        assert [pid for pid in below if is_alive(pid)] == []


def test_a_supervisor_that_is_killed_takes_the_command_with_it_and_leaves_a_whole_journal(tmp_path: Path) -> None:
    """No orphan trains on, the journal ends in a whole line, and the next start resumes (field case 55)."""
    with trained(tmp_path, *FOREVER, options=["--every-steps", 10]) as run:
        run.event("commit", step=20)
        trainer = run.toy_pid()
        run.signal(signal.SIGKILL)
        assert run.code() == -signal.SIGKILL
        eventually(lambda: not is_alive(trainer), "the trainer has ended")
        (first,) = run.journals()
        before = first.read_bytes()
        assert before.endswith(b"\n")
        assert {"command_started", "rank_hello", "round_begun", "commit"} <= {event["event"] for event in run.events()}
        newest = run.intact()[-1]
    with lasting(tmp_path, "--steps", newest + 40) as run:
        assert let_go(run, lambda: not list(run.dir.glob(".partial-*")), "what is half is swept") == 0, run.story()
        assert run.said(rf"^ready pid \d+ at {newest} ")
        assert run.journals()[0] == first
        assert len(run.journals()) == 2
        assert first.read_bytes() == before, "the journal of the first start was touched (field case 53)"
        assert list(run.dir.glob(".partial-*")) == []


def broken_pipe() -> int:
    """The write end of a pipe that nobody reads any longer."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def test_broken_stdout_and_stderr_never_stop_a_save(tmp_path: Path) -> None:
    """The terminal or the log's reader is gone: saved, committed, 75."""
    write_end = broken_pipe()
    quiet = ["sh", "-c", 'exec "$@" > out 2>&1', "sh", *toy("--log", tmp_path / "toy.log", *FOREVER)]
    try:
        with supervised(tmp_path, quiet, "--every-steps", 10, outputs=(write_end, write_end)) as run:
            run.event("commit", step=10)
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            assert run.intact()[-1] == run.toy_steps()[-1]
    finally:
        os.close(write_end)


def test_only_the_process_that_attached_is_a_rank(tmp_path: Path) -> None:
    """A forked child that lives on, as a loader's worker does, says no word, saves nothing, and its end is not the rank's."""
    script = "import os, signal, sys, ckpt_client as c\n"
    script += "def save(d, n): (d / str(os.getpid())).write_text('x')\n"
    script += "hook = c.attach(save, print)\nchild = os.fork()\n"
    script += "n = 0\nimport threading\nwait = threading.Event()\n"
    script += "while True:\n    n += 1\n    wait.wait(0.01)\n    hook.step(n)\n"
    script += "    if n == 20: print('ready pid', os.getpid(), 'at', 0, flush=True)\n"
    script += "    if n == 40 and not child: os._exit(5)\n"
    with supervised(tmp_path, [sys.executable, "-c", script]) as run:
        trainers = [int(line.split()[2]) for line in eventually(lambda: two_lines(run), "both processes train")]
        rank = run.event("rank_hello")["rank_pid"]
        (child,) = [pid for pid in trainers if pid != rank]
        eventually(lambda: not is_alive(child), "the child has ended")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        (step,) = run.intact()
        assert [path.name for path in (run.dir / f"step-{step:09d}").iterdir() if path.name.isdigit()] == [str(rank)]
        assert len(run.events("rank_hello")) == 1


def two_lines(run: Run) -> list[str]:
    """The `ready` lines once there are two."""
    lines = [line for line in run.out.splitlines() if line.startswith("ready")]
    return lines if len(lines) == 2 else []


def test_nothing_of_a_run_is_left_but_its_directory(tmp_path: Path) -> None:
    """No socket, no process, no state file; and the command finds the environment it is promised."""
    place = tmp_path / "tmp"
    place.mkdir()
    script = (
        "import os; print(*[f'{k}={v}' for k, v in sorted(os.environ.items()) if k.startswith('CKPT_')], sep='\\n', flush=True)"
    )
    with supervised(tmp_path, [sys.executable, "-c", script], env={"TMPDIR": str(place), "HOME": str(place)}) as run:
        assert run.code() == 0, run.story()
        given = dict(line.split("=", 1) for line in run.out.splitlines())
        assert given["CKPT_SUPERVISE_SOCKET"].startswith(f"ipc://{place}/")
        assert given["CKPT_SUPERVISE_RESUME_FROM"] == ""
        assert (given["CKPT_SUPERVISE_PID"], given["CKPT_SUPERVISE_RESTART"]) == (str(run.pid), "0")
        assert given["CKPT_SUPERVISE_DIR"] == str(run.dir)
    assert list(place.iterdir()) == []
