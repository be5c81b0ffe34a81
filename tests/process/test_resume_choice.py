"""What whole starts resume from: the user's own word, a checkpoint that training fails from, and one that a node sees late."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.adapters.journal import read_lines

from tests.support.run import Run, committed, eventually, supervised, trained
from tests.support.tasks_stage import KILL_WAIT, task_env

FOREVER = ("--steps", 1_000_000)
ARG = "--resume-arg=--resume-from"

LOADER = """
import ckpt_client as ckpt, os, signal, sys, time
bad, how = sys.argv[1], sys.argv[2]
def save(directory, step):
    (directory / "step.txt").write_text(str(step))
    return directory / "step.txt"
def load(directory):
    if directory.name in bad.split(","):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("Weights only load failed")
for i in ckpt.steps(205, save=save, load=load):
    time.sleep(0.002)
"""


@contextmanager
def loading(files: Path, bad: str, *options: object, how: str = "raise") -> Iterator[Run]:
    """A start of a training that cannot load these checkpoints."""
    with supervised(files, [sys.executable, "-c", LOADER, bad, how], *options) as run:
        yield run


def resumed(run: Run) -> list[int]:
    """The steps that the starts of this supervisor resumed from."""
    return [line["resume_step"] for line in run.events("command_started")]


def test_a_load_that_fails_is_no_proof_of_damage_until_it_has_failed_three_times(tmp_path: Path) -> None:
    """Field case 125: three starts change nothing; the fourth goes one back, sets it aside, says why, and deletes nothing."""
    for step in (100, 200):
        committed(tmp_path / "ckpt", step)
    for _ in range(3):
        with loading(tmp_path, "step-000000200") as run:
            assert run.code() == 1, run.story()
            assert resumed(run) == [200]
            assert run.steps() == run.intact() == [100, 200]
            assert "passed over" not in run.err
    with loading(tmp_path, "step-000000200", "--every-steps", 50) as run:
        assert run.code() == 0, run.story()
        assert resumed(run) == [100]
        assert "passed over step-000000200: training has failed 3 times in a row right after resuming from it" in run.err
        assert "Weights only load failed" in run.err
        assert "going on from step-000000100 instead" in run.err
        assert run.event("passed_over")["text"] in run.err
        assert run.intact() == [100, 150, 200], "that step is saved anew"
        assert "ckptctl repair --restore 200" in run.err
        (aside,) = store.all_set_aside(run.dir)
        assert aside.why is not None
        assert [start.reason for start in aside.why.starts] == ["RuntimeError: Weights only load failed"] * 3
        assert store.verify_checkpoint(aside.path).verdict is store.Verdict.INTACT


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_restarts_in_place_fall_back_too(tmp_path: Path, how: str) -> None:
    """The fourth start of one supervisor; whether the load raises or the process is killed in it."""
    for step in (100, 200):
        committed(tmp_path / "ckpt", step)
    with loading(tmp_path, "step-000000200", "--restarts", 5, how=how) as run:
        assert run.code() == 0, run.story()
        assert resumed(run) == [200, 200, 200, 100]
        assert "passed over step-000000200: training has failed 3 times in a row" in run.err


def test_the_only_checkpoint_is_tried_again_and_nothing_starts_from_zero(tmp_path: Path) -> None:
    """Field cases 82 and 125: said once it is a habit; the run ends with the command's own status."""
    committed(tmp_path / "ckpt", 200)
    with loading(tmp_path, "step-000000200", "--restarts", 4) as run:
        assert run.code() == 1, run.story()
        assert resumed(run) == [200] * 5
        assert "with no other intact one to fall back to it is tried again" in run.err
        assert run.intact() == [200]


def test_training_that_fails_after_some_steps_keeps_its_newest_checkpoint(tmp_path: Path) -> None:
    """A failure of its own, at a step beyond the one resumed from, says nothing against the checkpoint."""
    for step in (100, 200):
        committed(tmp_path / "ckpt", step)
    script = LOADER.replace("time.sleep(0.002)", "assert i < 203, 'a bad batch'")
    with supervised(tmp_path, [sys.executable, "-c", script, "none", ""], "--restarts", 4) as run:
        assert run.code() == 1, run.story()
        assert resumed(run) == [200] * 2, "the same step and status once more: no accident"
        assert run.events("rank_failed")[-1]["step"] == 203
        assert "passed over" not in run.err


def test_the_start_step_grows_from_attempt_to_attempt_and_is_told(tmp_path: Path) -> None:
    """Field case 100: three interruptions in a row; a start without progress is warned of."""
    steps = []
    for _ in range(3):
        with trained(tmp_path, *FOREVER) as run:
            run.reached((steps[-1] if steps else 0) + 3)
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            steps.append(run.event("commit")["step"])
    began = ["from scratch", f"at step {steps[0]}"]
    with trained(tmp_path, *FOREVER) as run:
        run.event("rank_hello")
        told = [line["text"] for path in run.journals() for line in read_lines(path) if line["event"] == "resuming"]
        assert told[:2] == [f"resuming from step {steps[n]} (the attempt before began {began[n]})" for n in (0, 1)]
        assert steps == sorted(set(steps))
        assert "no progress" not in run.err
        run.process.kill()
        run.process.wait()
    with trained(tmp_path, *FOREVER) as run:
        run.event("rank_hello")
        assert f"no progress since the attempt before: it began at step {steps[-1]}" in run.err
        assert "no progress" in run.event("warning")["text"]


def test_the_commands_own_choice_is_honoured_until_this_job_has_committed(tmp_path: Path) -> None:
    """Field case 99: the first start takes it, whatever is there; the next one its own newer commit; never both."""
    committed(tmp_path / "ckpt", 500)
    own = ("--resume-from", "/data/start.pt")
    with trained(tmp_path, *FOREVER, *own, options=[ARG]) as run:
        assert run.said(r"^resume-arg /data/start.pt ")
        assert run.said(r"^ready pid \d+ at 0 ")
        run.reached(3)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert "--resume-from /data/start.pt is taken as the command says" in run.event("resuming")["text"]
        step = run.event("commit")["step"]
        assert step < 500
    with trained(tmp_path, *FOREVER, *own, options=[ARG]) as run:
        assert run.said(rf"^resume-arg {run.dir}/step-{step:09d} ")
        assert run.said(rf"^ready pid \d+ at {step} ")
        assert f"gives way to step-{step:09d}, which this job has committed since" in run.err
        command = run.event("command_started")["command"]
        assert command.count("--resume-from") == 1
        assert "/data/start.pt" not in command


def test_an_older_checkpoint_of_the_directory_may_be_named(tmp_path: Path) -> None:
    """The user asked for step 100, and the ranks are told that one, not 200; damaged, nothing is started."""
    for step in (100, 200):
        committed(tmp_path / "ckpt", step)
    own = ("--resume-from", tmp_path / "ckpt" / "step-000000100")
    with trained(tmp_path, "--steps", 105, *own, options=[ARG]) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 100 ")
    (tmp_path / "ckpt" / "step-000000100" / "toy-00000.json").write_text("{}")
    with trained(tmp_path, "--steps", 105, *own, options=[ARG]) as run:
        assert run.code() == 76, run.story()
        assert "step-000000100, which is not intact" in run.err
        assert run.events("command_started") == []


def test_with_only_one_that_was_put_aside_nothing_is_started(tmp_path: Path) -> None:
    """Field case 82: what `ckptctl repair` has renamed is a trace of a run that was further than step 0."""
    path = committed(tmp_path / "ckpt", 100)
    path.rename(path.with_name(".damaged-step-000000100-1-0"))
    with trained(tmp_path, "--steps", 5) as run:
        assert run.code() == 76, run.story()
        assert "put aside earlier as damaged: .damaged-step-000000100-1-0" in run.err
        assert "put aside" in run.event("passed_over")["text"]
        assert "none is intact" in run.event("refused")["text"]
    with trained(tmp_path, "--steps", 5, options=["--allow-restart-from-scratch"]) as run:
        assert run.code() == 0, run.story()


SHIM = """
import errno, os, sys
if "ckpt_supervisor.cli" in sys.orig_argv:
    scandir, listdir, opened, lstat = os.scandir, os.listdir, os.open, os.lstat

    class Late:
        def __init__(self, entries): self.entries = entries
        def __enter__(self): return (entry for entry in self.entries if "step-" not in entry.name)
        def __exit__(self, *_): self.entries.close()

    def seen(path):
        if isinstance(path, (str, os.PathLike)) and "step-" in os.fspath(path).rpartition("/")[2]:
            raise FileNotFoundError(errno.ENOENT, "not seen yet", os.fspath(path))
        return path

    os.scandir = lambda path=".": Late(scandir(path))
    os.listdir = lambda path=".": [name for name in listdir(path) if "step-" not in name]
    os.open = lambda path, *more, **how: opened(seen(path), *more, **how)
    os.lstat = lambda path, **how: lstat(seen(path), **how)
"""


def test_a_task_that_sees_a_checkpoint_late_resumes_from_it_with_the_others(tmp_path: Path) -> None:
    """Field case 104: rank 2's node shows no step-300 yet: it is the coordinator's choice all the same, in the same words."""
    place = tmp_path / "ckpt"
    committed(place, 200)
    path = committed(place, 300)
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(textwrap.dedent(SHIM))
    runs = []
    try:
        for task in range(3):
            shim = {"PYTHONPATH": str(tmp_path / "shim")} if task == 2 else {}
            env = task_env(task, 3, CKPT_SUPERVISE_STATE=str(tmp_path / "state"), **shim)
            command = [sys.executable, "-c", "import sys, time; print('resume', *sys.argv[1:], flush=True); time.sleep(600)"]
            stage = supervised(tmp_path / f"task-{task}", command, *KILL_WAIT, ARG, env=env, directory=place)
            runs.append((stage, stage.__enter__()))
        for _, run in runs:
            assert run.said(r"^resume (.*)$")[1] == f"--resume-from {path}"
    finally:
        for stage, _ in runs:
            stage.__exit__(None, None, None)


def test_files_of_a_rank_that_are_not_seen_here_are_not_committed(tmp_path: Path) -> None:
    """Field case 80: a save that writes to a directory of each node: half a set is never a checkpoint, and the rank is named."""
    script = (
        "import ckpt_client as ckpt, os, time\n"
        "rank = int(os.environ['SLURM_PROCID'])\n"
        "def save(directory, step):\n"
        "    (directory / f'{rank}.bin').write_bytes(bytes(100))\n"
        "    return directory / f'{rank}.bin'\n"
        "loop = ckpt.steps(10**6, save=save, load=print)\n"
        # Both have attached before either does a step: rank 0 alone, two seconds later, is a save by itself.
        "began = os.environ['CKPT_SUPERVISE_DIR'] + '/../began-'\n"
        "os.close(os.open(began + str(rank), os.O_CREAT | os.O_WRONLY))\n"
        "while not all(os.access(began + str(task), os.F_OK) for task in range(2)): time.sleep(0.02)\n"
        "for i in loop: time.sleep(0.02)\n"
    )
    real, private = tmp_path / "ckpt", tmp_path / "node-1"
    private.mkdir()
    # Rank 1's node has a disk of its own where the partial directories are: its files are there, and whole.
    shim = SHIM_NODE.format(real=str(real), private=str(private))
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(shim)
    runs = []
    try:
        for task in range(2):
            more = {"PYTHONPATH": str(tmp_path / "shim")} if task == 1 else {}
            env = task_env(task, 2, CKPT_SUPERVISE_STATE=str(tmp_path / "state"), **more)
            options = (*KILL_WAIT, "--every-steps", 20)
            stage = supervised(tmp_path / f"task-{task}", [sys.executable, "-c", script], *options, env=env, directory=real)
            runs.append((stage, stage.__enter__()))
        coordinator = runs[0][1]
        # Where one rank begins long after the other, their first save is given up for that.
        told = lambda: [e for e in coordinator.events("round_given_up") if "ranks are not there" not in e["reason"]]  # noqa: E731
        given_up = eventually(told, "a save is given up")[0]
        assert "1.bin" in given_up["reason"]
        assert coordinator.steps() == []
        assert all(run.process.poll() is None for _, run in runs), "training goes on"
    finally:
        for stage, _ in runs:
            stage.__exit__(None, None, None)


SHIM_NODE = """
import builtins, os
real, private = {real!r} + "/.partial", {private!r} + "/.partial"

def there(path):
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    return private + text[len(real):] if isinstance(text, str) and text.startswith(real) else path

def moved(call):
    return lambda path=".", *more, **how: call(there(path), *more, **how)

for name in ("open", "mkdir", "stat", "lstat", "scandir", "listdir", "readlink", "unlink"):
    setattr(os, name, moved(getattr(os, name)))
builtins.open = moved(builtins.open)
import io
io.open = builtins.open
"""


def test_without_a_resume_argument_the_command_is_left_alone(tmp_path: Path) -> None:
    """Without --resume-arg the command is the user's alone, whatever it says."""
    committed(tmp_path / "ckpt", 100)
    with trained(tmp_path, "--steps", 105, "--resume-from", "mine") as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^resume-arg mine ")
        assert run.said(r"^ready pid \d+ at 100 ")
