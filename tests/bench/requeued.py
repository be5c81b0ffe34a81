"""From a preemption's notice to the accepted requeue, for a checkpoint of 256 MB, without what the trainer's own save takes.

Owns the addition: every part is read from one journal, whose times are of one clock. On real Slurm where a throwaway one can
be had (root and Slurm's programs); elsewhere without a requeue, to the supervisor's exit. Must not take off anything but the
save. So the trainer that counts is a light one: the supervisor gives training up to a second to end before it requeues, and with
torch loaded Python's own end takes half a second and more. That one is measured beside it, with its end as a part of its own.
Run as a script it is the light trainer: `requeued.py LOG`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ckpt_client as ckpt

from tests.bench.figure import ROOT, Row, pause
from tests.support.lab import Lab
from tests.support.run import TOY, supervised
from tests.support.slurm_stage import Stage

SAVE_MB = 256
PART_BYTES = 8_000_000
STEP_S = 0.02
STEPS_BEFORE = 5
BAR_MS = 500.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SBIN = "/usr/sbin:/usr/bin:/sbin:/bin"
LIGHT = [sys.executable, "-m", "tests.bench.requeued"]
TORCH = [sys.executable, str(TOY), "--mode", "steps", "--steps", "1000000", "--step-ms", "20", "--ballast-mb", "244", "--log"]
TRIES = {"light": (LIGHT, 4), "torch": (TORCH, 2)}
"""How often each is preempted. 244 MiB of tensor are 256 million bytes."""

Line = dict[str, Any]


def measure() -> list[Row]:
    """Several preemptions, one after the other; the median of what they take, and of each part."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]
    if os.geteuid() == 0 and not lacking:
        where, end, journals = "real Slurm, signal to `requeue` accepted", "requeue", _preempted()
    else:
        where, end, journals = "no Slurm here: signal to the supervisor's exit", "exit", _interrupted()
    tries = {name: [_parts(lines, end) for lines in journals[name]] for name in TRIES}
    light, torch = _median(tries["light"]), _median(tries["torch"])
    totals = ", ".join(str(sum(parts.values())) for parts in tries["light"])
    ms, total_ms, own_end_ms = sum(light.values()), sum(torch.values()), torch.pop("trainer's end")
    how = f"its end {own_end_ms} makes it {total_ms}; {_told(torch)}; the save {_save_ms(journals['torch'])} ms"
    return [
        Row(
            "notice to requeue, 256 MB, beyond the save",
            ms,
            "ms",
            BAR_MS,
            f"{where}; of {totals}: {_told(light)}; the save {_save_ms(journals['light'])} ms",
        ),
        Row("  with torch, beyond its save and end", sum(torch.values()), "ms", None, how),
    ]


def _parts(lines: Sequence[Line], end: str) -> dict[str, int]:
    """Where the time goes, in order. The trainer's way to its next boundary is in `agree`: part of that is its own step."""
    at = {line["event"]: line["mono_ms"] for line in reversed(lines)}  # The first of each name.
    # Training is waited for until its end, and a second at most before a requeue.
    ended = next(line["mono_ms"] for line in lines if line["event"] == "phase" and line["before"] == "LEAVING")
    parts = {
        "agree": at["go"] - at["signal"],
        "words": at["rank_written"] - at["go"] - _save_ms([lines]),
        "verify": at["verified"] - at["rank_written"],
        "commit": at["commit"] - at["verified"],
        "leave": at["rank_left"] - at["commit"],
        "trainer's end": ended - at["rank_left"],
    }
    if end == "requeue":
        return {**parts, "look": at["requeue_called"] - ended, "requeue": at["requeue"] - at["requeue_called"]}
    return {**parts, "exit": at["exit"] - ended}


def _save_ms(journals: Sequence[Sequence[Line]]) -> int:
    saves = [line["save_ms"] for lines in journals for line in lines if line["event"] == "rank_written"]
    return int(statistics.median(saves))


def _median(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    """The parts of the run that took the median time in all: parts of different runs do not add up."""
    return sorted(parts, key=lambda part: sum(part.values()))[len(parts) // 2]


def _told(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {ms}" for name, ms in parts.items())


def _preempted() -> dict[str, list[list[Line]]]:
    """The journals of jobs that were preempted, from the notice on; each job has a node and a directory of its own."""
    found: dict[str, list[list[Line]]] = {name: [] for name in TRIES}
    with _stage() as stage:
        for name, (command, tries) in TRIES.items():
            for _ in range(tries):
                run = stage.submit("-p", "low", command=[*command, "{log}"], env={"PYTHONPATH": str(ROOT)})
                run.wait_steps(STEPS_BEFORE)
                run.preempt()
                answer = run.wait_event("requeue")
                if answer["result"] not in ("accepted", "pending"):
                    raise AssertionError(f"requeue: {answer}")
                found[name].append(_from_the_signal(run.journal()))
                run.cancel()
                shutil.rmtree(run.dir, ignore_errors=True)
    return found


def _from_the_signal(lines: list[Line]) -> list[Line]:
    began = next(at for at, line in enumerate(lines) if line["event"] == "signal")
    return lines[began:]


@contextlib.contextmanager
def _stage() -> Iterator[Stage]:
    root = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # Slurm's sockets want a short path.
    root.chmod(0o755)
    try:
        with Lab.up(root, nodes=sum(tries for _, tries in TRIES.values()), proctrack="auto", kill_wait=10, grace=60) as lab:
            try:
                yield Stage(lab)
            finally:
                lab.cancel_all()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _interrupted() -> dict[str, list[list[Line]]]:
    """The same without Slurm."""
    found: dict[str, list[list[Line]]] = {name: [] for name in TRIES}
    for name, (command, tries) in TRIES.items():
        for _ in range(tries):
            with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as place:
                files = Path(place)
                with supervised(files, [*command, str(files / "toy.log")], env={"PYTHONPATH": str(ROOT)}) as run:
                    run.reached(STEPS_BEFORE)
                    run.signal(signal.SIGTERM)
                    run.code()
                found[name].append(_from_the_signal(run.events()))
    return found


# --- the light trainer ---------------------------------------------------------------------------------------------------


def save(directory: Path, _step: int) -> Path:
    """256 MB, on the disk when it returns, as what steps() writes before leaving."""
    path = directory / "state.bin"
    part = os.urandom(PART_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(SAVE_MB * 1_000_000 // PART_BYTES):
            file.write(part)
        os.fsync(file.fileno())
    return path


def main() -> None:
    """Train until told to leave."""
    hook = ckpt.attach(save)
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for n in itertools.count(1):
        pause(STEP_S)
        os.write(log, f"step {n} rank 0 t {time.time_ns() // 1_000_000}\n".encode())
        hook.step(n)


if __name__ == "__main__":
    main()
