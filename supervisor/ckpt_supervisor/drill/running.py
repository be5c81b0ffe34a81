"""`ckptctl drill --job JOB`: the rehearsal on a job of the user's that runs already, with `scancel --signal` (field case 26).

Owns the question whether that is harmless, and what has to come of it: no end is in sight, so the step is saved and training goes
on. Never sends the signal where it would be taken for the warning of a limit that is near. Changes nothing but the checkpoint
that training writes.
"""

from __future__ import annotations

import argparse
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ckpt_supervisor import store
from ckpt_supervisor.adapters.slurm import Scontrol, locate
from ckpt_supervisor.core.views import JobView
from ckpt_supervisor.ctl.words import EXIT_NOT_FOUND, EXIT_USAGE, complain
from ckpt_supervisor.drill import facts as read
from ckpt_supervisor.drill.facts import Line
from ckpt_supervisor.drill.verdict import Result
from ckpt_supervisor.view.log import Tail, journals
from ckpt_supervisor.watches import places

CALL_S = 30.0
LOOK_S = 0.3
NEAR_MS = 900_000
"""A job that ends within this (`--notice-horizon` is 10 minutes) would take the signal for the warning, and leave."""


def run(arguments: argparse.Namespace, wait_ms: int) -> Result | int:
    """Rehearse; the result, or an exit status after a complaint."""
    try:
        job, step_id = places.parse_job(arguments.job)
    except ValueError as error:
        complain(f"drill: --job: {error}")
        return EXIT_USAGE
    env: Mapping[str, str] = arguments.environ
    tool = locate(env.get("PATH"))
    if tool is None:
        complain("drill: --job needs scontrol and scancel, and scontrol cannot be found on PATH")
        return EXIT_USAGE
    scontrol = Scontrol(tool, job, env)
    view = scontrol.show_job(CALL_S)
    why = _why_not(view) if isinstance(view, JobView) else f"Slurm says of job {job}: {view.reason}"
    home = home_of(arguments, job, step_id)
    if not why and home is None:
        why = f"where job {job} has its checkpoints is not known here: say --dir DIR"
    elif not why and home is not None and not home.step_id:
        why = f"which step of job {job} is supervised is not known: say --job {job}.STEP, as other steps may die of the signal"
    elif not why and home is not None and not home.step_id.isdecimal():
        why = f"the supervisor of job {job} was not started by srun: no signal of Slurm's comes to it (`srun ckpt-supervise`)"
    if why or home is None or not isinstance(view, JobView):
        complain(f"drill: {why}")
        return EXIT_NOT_FOUND
    return _rehearse(scontrol, home, env, wait_ms)


def _why_not(view: JobView) -> str:
    """Why it is left alone, "" if it may be disturbed."""
    if view.state != "RUNNING" or view.preempt_ms is not None:
        return f"the job is not just running: it is {view.state}{' and being preempted' if view.preempt_ms else ''}"
    if view.end_ms is not None and view.end_ms - view.looked_ms < NEAR_MS:
        minutes = max(0, view.end_ms - view.looked_ms) // 60_000
        return (
            f"its time limit is in {minutes} min: the signal would be taken for the warning of it, and the job would leave; "
            "`ckptctl save JOB` saves without that"
        )
    return ""


def home_of(arguments: argparse.Namespace, job: str, step_id: str) -> places.Home | None:
    """The supervised step and its directory: the signal is for that step alone, as the default action of USR1 ends all others."""
    if not arguments.asked_dir:
        homes = places.homes(arguments.environ, job, step_id)
        return homes[0] if homes else None
    directory = Path(arguments.dir)
    try:
        holder = store.read_holder(directory)
    except OSError:
        holder = None
    is_its = holder is not None and holder.job == job
    return places.Home(job, step_id or (holder.step_id if is_its and holder is not None else ""), directory)


class _Watch:
    """What is new in the journals of this job."""

    def __init__(self, directory: Path, job: str) -> None:
        self._directory = directory
        self._job = job
        self._tails: dict[Path, Tail] = {}
        self.lines: list[Line] = []
        self.read()
        self.lines.clear()

    def read(self) -> list[Line]:
        """Everything since it was made."""
        try:
            found = journals(self._directory)
        except OSError:
            return self.lines
        for path in found:
            if path.name.startswith(f"{self._job}-"):
                self.lines += self._tails.setdefault(path, Tail(path)).lines()
        return self.lines


def _rehearse(scontrol: Scontrol, home: places.Home, env: Mapping[str, str], wait_ms: int) -> Result:
    job, step_id, directory = home
    watch = _Watch(directory, job)
    target = f"{job}.{step_id}"
    began = time.monotonic()
    complain(f"drill: scancel --signal=USR1 {target}; watching {directory}")
    done = subprocess.run(
        ("scancel", "--signal=USR1", target),
        env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return Result("running", False, f"scancel: {done.stderr.strip()}")
    pause = threading.Event()
    while time.monotonic() - began < wait_ms / 1000 and not _is_over(watch.read()):
        pause.wait(LOOK_S)
    view = scontrol.show_job(CALL_S)
    took_s = round(time.monotonic() - began, 1)
    return judge(watch.read(), view if isinstance(view, JobView) else None, took_s)


def _is_over(lines: list[Line]) -> bool:
    """The save has stood or failed, and it is known that no end is in sight; or the job leaves."""
    saved = next(read.commits(lines), None) or read.first(lines, "round_given_up")
    return read.first(lines, "exit") is not None or (saved is not None and read.first(lines, "notice_over") is not None)


def judge(lines: list[Line], view: JobView | None, took_s: float) -> Result:
    """Saved, and training goes on: nothing else is a PASS."""
    times = read.of_interruption(lines)
    left = read.first(lines, "leaving") or read.first(lines, "exit")
    if read.first(lines, "signal") is None:
        passed, why = False, "the signal has not come to the supervisor: is the job started with `srun ckpt-supervise`?"
    elif left is not None:
        passed, why = False, f"the job leaves: {left.get('reason') or left.get('line', '')}"
    elif times.step is None:
        passed, why = False, f"not saved: {times.given_up or 'no step boundary came in time (--start-timeout)'}"
    elif view is None or view.state != "RUNNING":
        passed, why = False, f"saved, but the job is {'not known any more' if view is None else view.state}"
    else:
        passed, why = True, f"step {times.step} was saved, and training goes on"
    return Result(
        path="running",
        passed=passed,
        why=why,
        **{f"{share}_ms": getattr(times, f"{share}_ms") for share in read.SHARES},
        saved_step=times.step,
        took_s=took_s,
    )
