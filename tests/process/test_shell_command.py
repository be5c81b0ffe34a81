"""The command of --on-event as a real process: what it gets, what it inherits, and that nothing it does can harm."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.adapters.journal import LINE_BYTES_MAX
from ckpt_supervisor.adapters.slurm import SHIELDED
from ckpt_supervisor.processes import shell_command
from ckpt_supervisor.processes.shell_command import TEXT_CHARS_MAX, Way

from tests.support.run import environment, eventually, is_alive


class Stage:
    """Runs commands as the lane does: in a thread with all signals blocked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.claims = Claims()

    def run(
        self,
        command: str,
        line: str = "{}",
        env: Mapping[str, str] | None = None,
        give_up: Callable[[], float] | None = None,
    ) -> str:
        """What went wrong."""
        base = environment({"PATH": os.environ["PATH"], "OUT": str(self.directory), **(env or {})})
        way = Way(command, base, self.claims, shell_command.signals(SHIELDED, (signal.SIGRTMIN + 3,)))
        end = time.monotonic() + 60
        problems: list[str] = []

        def work() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            problems.append(shell_command.run(way, give_up or (lambda: end), line).problem)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(120)
        return problems[0]

    def text(self, name: str) -> str:
        """What the command has written there."""
        return (self.directory / name).read_text()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage on which nothing is waited for in the end."""
    made = Stage(tmp_path)
    yield made
    assert made.claims.claimed() == frozenset()


@pytest.mark.parametrize("size", [2, 1_000, LINE_BYTES_MAX], ids=["short", "usual", "longest"])
def test_it_gets_the_line_on_its_standard_input(stage: Stage, size: int) -> None:
    """All of it, with its end, though a pipe would not hold the longest."""
    line = json.dumps({"x": "y" * (size - 9)}) if size > 9 else "{}"
    assert stage.run('cat > "$OUT/got"', line) == ""
    assert stage.text("got") == f"{line}\n"


def test_one_that_does_not_read_it_holds_up_nobody(stage: Stage) -> None:
    """No pipe to be filled, and none to be broken."""
    assert stage.run("exit 0", "x" * LINE_BYTES_MAX) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo curl: no route; exit 7", "it ended with 7: curl: no route"),
        ("kill -KILL $$", "it ended with 137"),
        ("/no/such/command 2>/dev/null", "it ended with 127"),
        ("printf '\\033[31mred'; exit 1", "it ended with 1: \\x1b[31mred"),
    ],
)
def test_what_fails_is_told_with_its_status_and_its_words(stage: Stage, command: str, said: str) -> None:
    """Whatever is in them."""
    assert stage.run(command) == said


def test_one_that_hangs_is_killed_with_everything_below_it(stage: Stage) -> None:
    """A webhook that does not answer; also one that ignores what could be ignored."""
    ends: list[float] = []

    def give_up() -> float:
        """So long after it has begun, however late that is."""
        if not ends and (stage.directory / "pid").exists():
            ends.append(time.monotonic() + 2.0)
        return ends[0] if ends else time.monotonic() + 60

    hangs = 'trap "" TERM INT HUP; echo began; sleep 1000 & echo $! > "$OUT/new"; mv "$OUT/new" "$OUT/pid"; wait'
    began = time.monotonic()
    problem = stage.run(hangs, give_up=give_up)
    told = re.fullmatch(r"it did not end within (\d+\.\d) s and was killed: began", problem)
    assert told is not None, problem
    assert 2.0 <= float(told[1]) <= time.monotonic() - began + 0.05, "it is rounded"
    pid = int(stage.text("pid"))
    eventually(lambda: not is_alive(pid), "the end of what it had started")


def test_time_may_become_less_while_it_runs(stage: Stage) -> None:
    """The end of the run is decided meanwhile."""
    marks = stage.directory / "began"
    problem = stage.run(f'touch "{marks}"; sleep 1000', give_up=lambda: 0.0 if marks.exists() else time.monotonic() + 60)
    assert "and was killed" in problem


def test_what_it_leaves_in_the_background_ends_with_it(stage: Stage) -> None:
    """Its own end counts, not that of its output; and nothing of it is below the supervisor afterwards."""
    assert stage.run('sleep 1000 & echo $! > "$OUT/pid"; exec 1>&2') == ""
    pid = int(stage.text("pid"))
    eventually(lambda: not is_alive(pid), "the end of what it had left behind")


def test_what_job_control_leaves_in_a_group_of_its_own_ends_with_it(stage: Stage) -> None:
    """bash with `set -m`: each job has a group of its own, in the same session; when it ends, and when its time is over."""
    job = 'bash -c \'set -m; sleep 1000 & echo $! > "$OUT/new"; mv "$OUT/new" "$OUT/pid"; eval "$0"\''
    assert stage.run(f"{job} true") == ""
    first = int(stage.text("pid"))
    eventually(lambda: not is_alive(first), "the end of what it had left behind")
    (stage.directory / "pid").unlink()
    until = time.monotonic() + 60
    assert "and was killed" in stage.run(f"{job} wait", give_up=lambda: 0.0 if (stage.directory / "pid").exists() else until)
    second = int(stage.text("pid"))
    eventually(lambda: not is_alive(second), "the end of its job")


def test_one_that_forks_all_the_time_ends_at_its_time(stage: Stage) -> None:
    """All of its session goes at once."""
    fork = 'i=0; while [ $i -lt 200 ]; do sleep 1000 & i=$((i+1)); done; echo $! > "$OUT/pid"; wait'
    before = {*children.descendants()}
    assert "and was killed" in stage.run(
        fork, give_up=lambda: 0.0 if (stage.directory / "pid").exists() else time.monotonic() + 60
    )
    eventually(lambda: not [pid for pid in {*children.descendants()} - before if is_alive(pid)], "the end of all of them")


def test_an_endless_flood_of_output_neither_blocks_it_nor_is_kept(stage: Stage) -> None:
    """It is read and dropped until its time is over; the first words are told."""
    marks = stage.directory / "began"
    problem = stage.run(f'touch "{marks}"; exec yes', give_up=lambda: 0.0 if marks.exists() else time.monotonic() + 60)
    assert "and was killed" in problem
    assert len(problem) < TEXT_CHARS_MAX + 100


def test_a_finite_flood_is_read_to_its_end(stage: Stage) -> None:
    """5 MB, more than any pipe holds."""
    code = "import sys; sys.stdout.buffer.write(b'x' * 5_000_000)"
    assert stage.run(f'"{sys.executable}" -c "{code}"') == ""


def test_a_broadcast_to_the_step_does_not_end_it_and_its_own_signals_work(stage: Stage) -> None:
    """TERM, USR1, a notice signal of the user's: nor anybody below the shell, where dash unblocks them. Others come."""
    assert stage.run(f"kill -TERM $$; kill -USR1 $$; kill -INT $$; kill -{int(signal.SIGRTMIN) + 3} $$; exit 0") == ""
    assert stage.run("kill -ALRM $$; exit 0") == "it ended with 142"
    assert stage.run('true; grep -E "Sig(Blk|Ign)" /proc/self/status > "$OUT/mask"; true') == ""
    blocked, ignored = (int(line.split()[1], 16) for line in stage.text("mask").splitlines())
    deaf = {number for number in range(1, 65) if (blocked | ignored) >> (number - 1) & 1} - {32, 33}  # The C library's own.
    assert deaf == {int(number) for number in {*SHIELDED, signal.SIGRTMIN + 3}}


def test_it_holds_no_descriptor_of_ours(stage: Stage) -> None:
    """A socket or a journal that it kept open would outlive the supervisor."""
    with (stage.directory / "ours").open("w"):
        assert stage.run('ls -l /proc/self/fd > "$OUT/fds"') == ""
    assert "/ours" not in stage.text("fds")


def test_the_end_of_training_is_not_its_end(stage: Stage) -> None:
    """What is below it is at work for us: the ranks are killed meanwhile, and it goes on."""
    os.mkfifo(stage.directory / "answer")
    problems: list[str] = []
    command = 'sh -c \'echo $$ > "$OUT/new"; mv "$OUT/new" "$OUT/pid"; exec cat "$OUT/answer"\'; true'
    thread = threading.Thread(target=lambda: problems.append(stage.run(command)))
    thread.start()
    try:
        pid = eventually(lambda: (stage.directory / "pid").exists() and int(stage.text("pid")), "the child of the shell")
        assert pid not in children.descendants(stage.claims)
        assert children.end_all(signal.SIGKILL, stage.claims, lambda one: one != pid) == []
    finally:
        (stage.directory / "answer").write_text("done")
        thread.join(60)
    assert problems == [""]
