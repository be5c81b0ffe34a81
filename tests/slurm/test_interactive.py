"""By hand, in a shell on a node: a plain supervisor there, which says that nothing requeues it.

Owns: field case 149 under Slurm (`srun --pty bash`; test_doctor.py has submitit).
A notice of Slurm's does not come that far: it goes to the task, which is the shell (seen here; docs/slurm.md).
Must not: leave a shell behind; the lab ends with all of its jobs.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import subprocess
import threading
from typing import TYPE_CHECKING

from tests.support.slurm_stage import SUPERVISE, Run, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.slurm_stage import Stage


@contextlib.contextmanager
def shell(stage: Stage, run: Run) -> Iterator[int]:
    """A shell that a person has on a node by `srun --pty bash`; yields the terminal to type into."""
    ours, theirs = pty.openpty()
    env = stage.lab.env(CKPT_SUPERVISE_STATE=str(stage.lab.root / "states"), PS1="$ ")
    words = stage.lab.argv("srun", "-p", "low", "-w", run.node, "--pty", "bash", "--norc")
    run.out.touch()
    process = subprocess.Popen(words, env=env, cwd=stage.lab.root, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = threading.Thread(target=show, args=(ours, run.out))
    reader.start()
    try:
        type_in(ours, 'echo "job is $SLURM_JOB_ID."')
        found = wait_for(lambda: re.search(r"^job is (\d+)\.", run.output(), re.MULTILINE), "the shell's answer")
        run.jobid = int(found[1])
        yield ours
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        os.close(ours)


def show(terminal: int, path: Path) -> None:
    """Keep what the terminal shows, until nobody has its other end any more."""
    with path.open("ab", buffering=0) as out:
        while True:
            try:
                shown = os.read(terminal, 65_536)
            except OSError:  # EIO: that is how Linux says it.
                return
            out.write(shown)


def type_in(terminal: int, line: str) -> None:
    """A line at the prompt."""
    os.write(terminal, f"{line}\n".encode())


def test_in_a_shell_on_a_node_it_is_a_plain_supervisor_that_nothing_requeues(new_stage: Callable[..., Stage]) -> None:
    """Field case 149: a short run ends with its own status; ctrl-C saves, and it goes on from there."""
    stage = new_stage(nodes=1, proctrack="cgroup", grace=4)
    root = stage.lab.root
    run = Run(stage.lab, 0, stage.lab.nodes[0], root / "pty.out", root / "pty", root / "pty.log")
    stage.runs.append(run)

    def trains(steps: int) -> str:
        toy = toy_words(f"--steps {steps} --step-ms 20 --log", str(run.log))
        return f"{shlex.join([SUPERVISE, '--dir', str(run.dir), '--', *toy])}; echo rc=$?."

    with shell(stage, run) as terminal:
        type_in(terminal, trains(3))
        run.wait_line("rc=0.")
        type_in(terminal, trains(1_000_000))
        run.wait_event("command_started", 2)
        run.wait_steps(10)
        assert "not started by srun" not in run.output()
        os.write(terminal, b"\x03")
        line = run.wait_event("exit", 2)["line"]
        run.wait_line("rc=75.")
        (step,) = run.committed()
        type_in(terminal, trains(step + 3))
        run.wait_line("rc=0.", 2)
    assert "this is no batch job, so Slurm cannot requeue it" in run.output()
    assert "SIGINT" in line
    assert "start the same command again" in line
    assert run.events("command_started")[-1]["resume_step"] == step
    assert run.steps()[-1] == step + 3
    assert run.requeue_calls() == []
