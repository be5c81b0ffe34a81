"""Programs that save by themselves, unchanged (--adopt, --pass-signal): the seed recipe's, a Megatron-like, a Trainer-like.

Owns: row S7 of the store's must-hold table, without Slurm; field cases 69 and 75. tests/slurm/test_adopt.py has the same as jobs.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ckpt_supervisor import store

from tests.support.run import Run, eventually, is_alive, supervised

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs.py"

PATTERNS = {"seed": "step_*.pt", "megatron": "iter_*,latest_checkpointed_iteration.txt", "trainer": "checkpoint-*"}


START_S = 120
"""A program imports torch first: a busy machine takes a minute for it."""


def program(
    files: Path, kind: str, *words: object, options: tuple[object, ...] = (), where: Path | None = None, **more: Any
) -> AbstractContextManager[Run]:
    """One of the stand-ins below a supervisor; it writes into the checkpoint directory itself unless told otherwise."""
    place = files / "ckpt" if where is None else where
    command = [sys.executable, str(PROGRAMS), kind, "--where", str(place), *map(str, words)]
    pattern = PATTERNS[kind] if where is None else f"{where}/{PATTERNS[kind]}"
    return supervised(files, command, "--adopt", pattern, *options, **more)


def steps(run: Run) -> list[int]:
    """The steps that this start of the program has done."""
    return [int(n) for n in re.findall(r"^step (\d+)$", run.out, re.MULTILINE)]


def saves(run: Run) -> list[int]:
    """The steps that it has saved."""
    return [int(n) for n in re.findall(r"^saved (\d+)$", run.out, re.MULTILINE)]


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_a_program_that_saves_at_a_signal_is_interrupted_adopted_and_resumed(tmp_path: Path, kind: str) -> None:
    """The signal is handed on once, what it then writes is verified and committed, and the next start resumes right there."""
    options = ("--pass-signal", "TERM", "--resume-arg=--resume-from")
    # Slow steps: the signal is to come between two of the program's own saves, whenever it is this test's turn.
    with program(tmp_path, kind, "--save-ms", 300, "--every", 15, "--step-ms", 200, options=options) as run:
        run.said(r"^step 16$", START_S)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        last = saves(run)[-1]
        assert last == steps(run)[-1] > 15
        assert run.intact()[-1] == last
        assert f"step {last} is committed" in run.err
        passed = run.event("signal_passed")
        assert (passed["signal"], passed["by_slurm"], len(passed["pids"])) == ("SIGTERM", False, 1)
        assert run.out.count("Received signal") + run.out.count("noted") == 1
        manifest = store.read_manifest(run.dir / f"step-{last:09d}")
        assert (manifest.verified, manifest.cause, manifest.step) == ("full", "adopted", last)
    with program(tmp_path, kind, "--steps", last + 12, options=options) as again:
        assert again.code(START_S) == 0, again.story()
        found = again.said(r"^resumed (\d+) from (.+)$")
        assert int(found[1]) == last
        assert found[2].startswith(str(again.dir / f"step-{last:09d}"))
        assert steps(again) == list(range(last + 1, last + 13))
        assert again.intact()[-1] == saves(again)[-1]


def test_the_seed_recipe_with_keep_three_is_kept_as_if_we_had_written_it(tmp_path: Path) -> None:
    """Row S7: what rank 0 writes becomes a checkpoint while it runs; the program's own clean-up takes none of ours."""
    with program(
        tmp_path, "seed", "--every", 50, "--step-ms", 100, "--steps", 260, options=("--keep", 3), where=tmp_path / "own"
    ) as run:
        first = run.event("adopted", bound_s=START_S)["steps"]
        assert first
        assert first[-1] in run.steps(), "and the next one perhaps, by now"
        assert run.code(120) == 0, run.story()
        assert saves(run)[-1] == 250
        assert run.intact()[-1] == 250
        assert len(run.intact()) == 3, "what the last look made too many has gone before the end"
        assert sorted(path.name for path in (tmp_path / "own").glob("step_*.pt")) == [
            "step_000150.pt",
            "step_000200.pt",
            "step_000250.pt",
        ]
        assert (run.dir / "latest").readlink().name == "step-000000250"


def test_a_damaged_newest_file_is_neither_adopted_nor_left_where_the_program_would_take_it(tmp_path: Path) -> None:
    """Field cases 67 and 69: the one before it is resumed from, the line says why, and nothing is deleted."""
    with program(tmp_path, "trainer", "--steps", 35) as run:
        assert run.code(START_S) == 0, run.story()
        assert run.intact() == [10, 20, 30]
    newest = tmp_path / "ckpt" / "checkpoint-40"
    newest.mkdir()
    for name in ("pytorch_model.bin", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        data = (tmp_path / "ckpt" / "checkpoint-30" / name).read_bytes()
        (newest / name).write_bytes(data.replace(b'"global_step": 30', b'"global_step": 40'))
    with program(tmp_path, "trainer", "--steps", 45) as again:
        assert again.code(START_S) == 0, again.story()
        assert int(again.said(r"^resumed (\d+) from")[1]) == 30
        assert steps(again) == list(range(31, 46))
        assert again.warned(r"checkpoint-40 is not whole \(.*optimizer.*\): put aside as \.damaged-checkpoint-40")
        assert (again.dir / ".damaged-checkpoint-40" / "scheduler.pt").exists()
        assert again.intact()[-1] == 40


def test_what_an_attempt_could_not_keep_any_more_the_next_start_keeps(tmp_path: Path) -> None:
    """The file is whole on the disk, the supervisor was killed before it saw it: it is adopted before anything is chosen."""
    options = ("--pass-signal", "TERM", "--resume-arg=--resume-from")
    with program(tmp_path, "seed", "--every", 15, options=options) as run:
        run.said(r"^saved 15$", START_S)
        pid = int(run.said(r"^ready (\d+)$")[1])
        run.process.kill()
        run.process.wait()
        eventually(lambda: not is_alive(pid), "the guard has ended the program")
        last = saves(run)[-1]
    with program(tmp_path, "seed", "--every", 15, "--steps", last + 25, options=options) as again:
        assert again.code(START_S) == 0, again.story()
        resumed, kept, file = again.said(r"^resumed (\d+) from .*step-(\d{9})/step_(\d{6})\.pt$").groups()
        assert int(resumed) == int(kept) == int(file)
        assert int(resumed) in (last, last + 15), "the last whole file; it was killed before it could say so, at the latest"


def test_the_copy_does_not_change_with_the_programs_own_file(tmp_path: Path) -> None:
    """Field case 75: it writes over its file in place later on; the committed checkpoint stays as it was."""
    with program(tmp_path, "seed", "--steps", 12) as run:
        assert run.code(START_S) == 0, run.story()
    own = tmp_path / "ckpt" / "step_000010.pt"
    own.write_bytes(bytes(own.stat().st_size))
    assert run.intact() == [10]


def test_a_program_that_writes_nothing_at_its_signal_leaves_the_older_one(tmp_path: Path) -> None:
    """76: nothing new, and the line says so; what it wrote before stands."""
    with program(tmp_path, "trainer", "--steps", 12) as run:
        assert run.code(START_S) == 0, run.story()
    never = ("--every", 1_000_000, "--signal", "USR1")
    with program(tmp_path, "trainer", *never, options=("--pass-signal", "TERM")) as again:
        again.said(r"^step 15$", START_S)
        again.signal(signal.SIGTERM)
        assert again.code() == 76, again.story()
        assert "this save did not make it (the program has written nothing new); step-000000010 stands" in again.err


def test_a_program_below_a_shell_gets_the_signal_and_the_shell_does_not(tmp_path: Path) -> None:
    """A shell with a trap waits for its child before it acts: who saves is found below it."""
    inner = f"trap 'echo trapped' TERM; {sys.executable} {PROGRAMS} megatron --where {tmp_path / 'ckpt'} --every 1000000; true"
    with supervised(tmp_path, ["bash", "-c", inner], "--adopt", "iter_*", "--pass-signal", "TERM") as run:
        run.said(r"^step 5$", START_S)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert "noted 15" in run.out
        assert run.intact()[-1] == saves(run)[-1]


def test_the_signal_that_the_program_saves_at_is_a_notice_for_the_supervisor_too(tmp_path: Path) -> None:
    """`sbatch --signal=QUIT@90` for a program that saves at QUIT: one that reaches the supervisor alone must not end it."""
    with program(tmp_path, "trainer", "--signal", "QUIT", "--every", 1_000_000, options=("--pass-signal", "QUIT")) as run:
        run.said(r"^step 5$", START_S)
        run.signal(signal.SIGQUIT)
        assert run.code() == 75, run.story()
        assert run.intact()[-1] == saves(run)[-1]


LEAVES_A_HELPER = """
import os, signal, subprocess, sys, threading
stays = "import signal, threading; signal.signal(15, lambda *_: None); print('helper up', flush=True); threading.Event().wait(60)"
subprocess.Popen([sys.executable, "-c", stays], start_new_session=True)
def save(number, _):
    open(sys.argv[1] + "/step_5.bin", "wb").write(b"state")
    if sys.argv[2] == "raised":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(143)
signal.signal(15, save)
print("ready", flush=True)
while True:
    threading.Event().wait(0.05)
"""


@pytest.mark.parametrize("how", ["raised", "status"])
def test_a_helper_that_outlives_a_program_that_has_saved_does_not_hold_its_end(tmp_path: Path, how: str) -> None:
    """It left by its signal, or with that status, as well-behaved programs do: it is over then, and its files are looked at."""
    command = [sys.executable, "-c", LEAVES_A_HELPER, str(tmp_path), how]
    options = ("--adopt", f"{tmp_path}/step_*.bin", "--pass-signal", "TERM", "--grace", "15s")
    with supervised(tmp_path, command, *options) as run:
        run.said(r"^ready$")
        run.said(r"^helper up$")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.intact() == [5]


def test_a_program_that_is_too_slow_is_ended_and_its_files_wait_for_the_next_start(tmp_path: Path) -> None:
    """The kill comes at the end of the grace: the way out does not depend on the program."""
    options = ("--pass-signal", "TERM", "--grace", "8s")
    with program(tmp_path, "trainer", "--save-ms", 60_000, "--every", 1_000_000, options=options) as run:
        run.said(r"^step 5$", START_S)
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
        assert run.intact() == []
        assert "had not ended in its time after SIGTERM" in run.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--pass-signal", "TERM"], "--pass-signal: say with --adopt which files the command writes"),
        (["--adopt", "step.pt"], "has no wildcard where the step is"),
        (["--adopt", "*/step_*.pt"], "only the last part of the path may have a wildcard"),
        (["--adopt", "step_*.pt", "--pass-signal", "NONE"], "'NONE' is not a signal"),
        (["--adopt", "step_*.pt", "--pass-signal", "USR2"], "name the same signal"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    """Exit 2, and nothing is started."""
    with supervised(tmp_path, ["true"], *words) as run:
        assert run.code() == 2
        assert line in run.err
        eventually(lambda: not (tmp_path / "ckpt").exists(), "no directory")
