"""DataLoader's workers and other helpers of a training below a local supervisor: nobody dies early, nobody holds its parent up.

`CKPT_TEST_CELLS=all` runs every cell of the table; otherwise a few that have each value of it once.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_supervisor.linux.procfs import descendants

from tests.support.run import TORCH_ABORTED, TOY, Run, environment, eventually, has_ended, is_alive, supervised

SHARES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
EPOCH_STEPS = 20
TRIES = 3
LATER_S = 10.0
"""What a termination may take more than without us, on a busy machine of two cores. One that is not completed takes for ever."""

METHODS = ("fork", "forkserver", "spawn")
ALL_CELLS = [*itertools.product(METHODS, (2, 8), (False, True))]
SOME_CELLS = [("fork", 8, True), ("forkserver", 2, True), ("spawn", 2, False)]
CELLS = ALL_CELLS if os.environ.get("CKPT_TEST_CELLS") == "all" else SOME_CELLS
NOTICES = {"fork": (signal.SIGTERM,), "forkserver": (signal.SIGUSR1, signal.SIGTERM), "spawn": (signal.SIGUSR1,)}
pytestmark = pytest.mark.timeout(400)


def broadcast(pid: int, *numbers: int) -> list[int]:
    """Signal every process of a step, the deepest first and the supervisor last, as proctrack/linuxproc does. All but it."""
    below = descendants(pid)
    for number in numbers:
        for one in (*reversed(below), pid):
            try:
                os.kill(one, number)
            except ProcessLookupError:
                continue  # Something short-lived of the supervisor's own.
    return below


def toy(place: Path, cell: tuple[str, int, bool], steps: int) -> list[str]:
    """A training with torch whose batches come from workers, over epochs that end soon."""
    method, workers, persistent = cell
    words = ["--steps", steps, "--step-ms", 20, "--workers", workers, "--start-method", method, "--epoch-steps", EPOCH_STEPS]
    more = ["--persistent"] if persistent else []
    return [sys.executable, str(TOY), "--log", str(place / "toy.log"), *map(str, words), *more]


def started(run: Run) -> int:
    """Where the trainer began, as it says."""
    return int(run.said(r"^ready pid \d+ at (\d+) ", 120)[1])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}-{'persistent' if cell[2] else 'passing'}")
def test_a_broadcast_in_mid_epoch_loses_no_step_and_no_worker(tmp_path: Path, cell: tuple[str, int, bool]) -> None:
    """Saved at the interrupted step, none "exited unexpectedly", nobody is left, and the next run goes on to the end (row 1)."""
    with supervised(tmp_path, toy(tmp_path, cell, 1_000_000), env=SHARES) as run:
        started(run)
        at = 5 if not cell[2] else EPOCH_STEPS + 5  # Persistent workers are in their second epoch then.
        eventually(lambda: max(run.toy_steps(), default=0) >= at, f"step {at}", 200)
        below = broadcast(run.pid, *NOTICES[cell[0]])
        assert len(below) >= 1 + cell[1], below
        assert run.code(120) == 75, run.story()
        last = run.toy_steps()[-1]
        assert run.intact() == [last], run.story()
        assert "unexpectedly" not in run.err + run.out
        assert "Traceback" not in run.err
        eventually(lambda: not is_alive(run.event("command_started")["guard_pid"]), "the guard has ended")
        assert [pid for pid in below if is_alive(pid)] == []
    with supervised(tmp_path, toy(tmp_path, cell, last + 10), env=SHARES) as run:
        assert started(run) == last
        assert has_ended(run.code(120), run.err), run.story()
    assert run.toy_steps() == list(range(1, last + 11))


ENDINGS = """
import json, multiprocessing, subprocess, sys, time
import ckpt_client as ckpt

class Samples:
    def __len__(self): return 1 << 20
    def __getitem__(self, index): return float(index)

def timed(ending):
    began = time.monotonic()
    ending()
    return time.monotonic() - began

def pool_exit(context):
    with context.Pool(2) as pool:
        pool.map(abs, [1, 2, 3, 4])
        began = time.monotonic()
    return time.monotonic() - began

def process_terminate(context):
    process = context.Process(target=time.sleep, args=(1000,))
    process.start()
    ready = context.Event()
    second = context.Process(target=ready.set)
    second.start()
    ready.wait(60)
    second.join()
    return timed(lambda: (process.terminate(), process.join()))

def popen_terminate(context):
    process = subprocess.Popen(["sleep", "1000"])
    return timed(lambda: (process.terminate(), process.wait()))

def loader_shutdown(context, persistent=False):
    from torch.utils.data import DataLoader
    loader = DataLoader(Samples(), batch_size=2, num_workers=2, multiprocessing_context=context, persistent_workers=persistent)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    return timed(batches._shutdown_workers)

if __name__ == "__main__":
    hook = ckpt.attach(lambda directory, step: [])
    context = multiprocessing.get_context(sys.argv[1])
    endings = (pool_exit, process_terminate, popen_terminate, loader_shutdown)
    print(json.dumps({ending.__name__: round(ending(context), 3) for ending in endings}), flush=True)
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_termination_without_a_notice_takes_hardly_longer_than_without_us(tmp_path: Path, method: str) -> None:
    """Leaving a Pool, ending a process, a command and a loader's workers: the same script alone and supervised (row 2)."""
    script = tmp_path / "endings.py"
    script.write_text(ENDINGS)
    argv = [sys.executable, str(script), method]
    alone = subprocess.run(argv, env=environment(SHARES), capture_output=True, text=True, timeout=120, check=False)
    assert alone.returncode == 0, alone.stderr
    for number in range(TRIES):
        with supervised(tmp_path / str(number), argv, env=SHARES) as run:
            code = run.code(120)
            if code != 0 and TORCH_ABORTED in run.err and number + 1 < TRIES:
                continue
            assert code == 0, run.story()
            took = json.loads(run.said(r"^\{.*\}$")[0])
            break
    without = json.loads(alone.stdout)
    later = {name: round(seconds - without[name], 3) for name, seconds in took.items()}
    assert {name: seconds for name, seconds in later.items() if seconds > LATER_S} == {}, (without, took)
    assert not re.search("unexpectedly|Traceback", run.err)
