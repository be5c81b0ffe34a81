"""Stand-ins for launchers that cannot be installed everywhere: conda run, nsys, mpirun, mp.spawn, a sweep agent, a mere parent.

    python launchers.py KIND [RANKS] COMMAND...

Each does what the real one does at the place that matters: whose child the command is, in which session, who waits for it and how
its status comes out. None of them relays a signal, and none has a handler.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

LATE_S = 2.0
"""An nsys-like parent writes its report for so long after its child has ended."""

PR_SET_PDEATHSIG = 1
POLL_S = 0.1
TRIALS = 2
_never = threading.Event()


def conda(command: list[str]) -> int:
    """`conda run`: a temporary shell script that activates the environment and runs the command, as a child whose output passes
    through; its status is conda's."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", prefix="conda-") as script:
        script.write('export CONDA_PREFIX=/opt/conda\n"$@"\n')
        script.flush()
        return status_of(subprocess.run(["/bin/bash", script.name, *command], check=False).returncode)


def conda_captures(command: list[str]) -> int:
    """The same as `conda run` is without --no-capture-output: everything is shown at the end."""
    done = subprocess.run(["/bin/bash", "-c", '"$@"; exit $?', "bash", *command], capture_output=True, check=False)
    os.write(1, done.stdout)
    return status_of(done.returncode)


def nsys(command: list[str]) -> int:
    """`nsys profile`: ends late, as it writes its report when the program is over."""
    status = status_of(subprocess.run(command, check=False).returncode)
    _never.wait(LATE_S)
    return status


def agent(command: list[str]) -> int:
    """A sweep agent: trials one after the other, each in a session of its own, polled; 0 whatever became of them."""
    for _ in range(TRIALS):
        with subprocess.Popen(command, start_new_session=True) as trial:
            while trial.poll() is None:
                _never.wait(POLL_S)
    return 0


def mpirun(command: list[str], ranks: int) -> int:
    """`mpirun -n N`: ranks in sessions of their own that know their place by Open MPI's variables alone; the worst status."""
    started = []
    for rank in range(ranks):
        # RANK alone is for the toy's words; without WORLD_SIZE it is no place in a training.
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(ranks), "RANK": str(rank)}
        started.append(subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True))
    return max(status_of(process.wait()) for process in started)


def spawn(command: list[str], *, imports_client: bool) -> int:
    """`torch.multiprocessing.spawn` in a script that has the ranks as its children, which get SIGINT when it dies; their status.

    Python's resource tracker has unblocked SIGTERM in it by then. A script that is the training as well has imported our client.
    """
    if imports_client:
        importlib.import_module("ckpt_client")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=spawned, args=(rank, command[1:])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(status_of(process.exitcode or 0) for process in ranks)


def spawned(rank: int, argv: list[str]) -> None:
    """One of its ranks: runs the script in this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def plain(command: list[str]) -> int:
    """A launcher that relays nothing: a parent that waits."""
    return status_of(subprocess.run(command, check=False).returncode)


def status_of(returncode: int) -> int:
    """As a shell says it: 128 + n for a death by signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def main() -> int:
    """Run one of them."""
    kind, *command = sys.argv[1:]
    if kind == "mpirun":
        return mpirun(command[1:], int(command[0]))
    if kind in ("spawn", "spawn-apart"):
        return spawn(command, imports_client=kind == "spawn")
    one = {"conda": conda, "conda-captures": conda_captures, "nsys": nsys, "agent": agent, "plain": plain}
    return one[kind](command)


if __name__ == "__main__":
    sys.exit(main())
