"""`ckptctl status`: gathers what journals, checkpoints, the process table and Slurm say of a job.

Owns where a JOB leads to, and who is asked. Changes nothing. How a job stands is judged by job_standing.py and drawn by
view/status.py. Without Slurm, and without a state directory, what DIR holds is enough.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.ctl.job_standing import GONE, Outside, Standing, end_of, standing, ways_of
from ckpt_supervisor.ctl.words import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    complain,
    could_not_look,
    look_of,
    out,
    out_json,
    shown,
    there_is,
)
from ckpt_supervisor.tasks.meeting import state_directory
from ckpt_supervisor.view import status as view
from ckpt_supervisor.view.attempts import Attempt, Told, jobs, told
from ckpt_supervisor.watches import places
from ckpt_supervisor.watches.places import Home

ASK_TIMEOUT_S = 8.0
NOTES_SHOWN = 5
ELEMENTS_SHOWN = 10


class Job(msgspec.Struct, frozen=True):
    """One step of a job, and how it stands."""

    home: Home
    starts: list[Attempt]
    outside: Outside
    standing: Standing
    holder: store.Holder | None
    notes: tuple[str, ...] = ()
    """What is incomplete."""
    is_newest_told: bool = True
    """Nothing newer could not be read."""

    @property
    def name(self) -> str:
        """For people."""
        step = self.home.step_id
        return f"job {self.home.job}" + (f" step {step}" if step not in ("", "local") else "")


def status(arguments: argparse.Namespace) -> int:
    """How one job stands, all of its steps."""
    found = homes(arguments, "status")
    if isinstance(found, int):
        return found
    worst = EXIT_OK
    for number, home in enumerate(found):
        job = gathered(arguments, home)
        if isinstance(job, int):
            worst = max(worst, job)
            continue
        look = look_of(arguments)
        shown = shown_as(job)
        if not job.is_newest_told:
            worst = max(worst, EXIT_UNKNOWN)
        if arguments.json:
            out_json(view.record(shown, look.now))
            continue
        if number:
            out("")
        for line in view.block(shown, look, (sys.stdout.encoding or "").lower().startswith("utf")):
            out(line)
    return worst


def homes(arguments: argparse.Namespace, command: str) -> list[Home] | int:
    """The steps that the argument JOB names, or the newest job of DIR; an exit status after a complaint."""
    text = arguments.job
    if text is None:
        return _newest_of(arguments.dir)
    try:
        job, step_id = places.parse_job(text)
    except ValueError as error:
        complain(f"{command}: {error}")
        return EXIT_USAGE
    if arguments.asked_dir is not None:
        return [Home(job, step_id, arguments.dir)]
    found = places.homes(arguments.environ, job, step_id)
    if found:
        return found
    try:
        if job in jobs(arguments.dir):
            return [Home(job, step_id, arguments.dir)]
    except OSError as error:
        # It was never said that the job is there: only if it cannot be found out this is worth a word.
        complain(f"{arguments.dir} cannot be looked at: {error.strerror or error}")
    array = places.elements(arguments.environ, job)
    if array:
        complain(
            f"{command}: job {job} is an array: say {array[-1]}"
            + (f", or another of its {len(array)} elements" if array[1:] else "")
        )
        return EXIT_USAGE
    complain(
        f"no job {text} is known in {state_directory(arguments.environ)}, nor has {shown(arguments.dir)} a journal of it; "
        "say --dir DIR if its checkpoints are somewhere else"
    )
    return EXIT_NOT_FOUND


def _newest_of(directory: Path) -> list[Home] | int:
    absent = there_is(directory)
    if absent is not None:
        return absent
    try:
        holder = store.read_holder(directory)
        names = jobs(directory)
    except OSError as error:
        return could_not_look(directory, error)
    if holder is not None and (holder.job in names or not names):
        return [Home(holder.job, "", directory)]
    if not names:
        complain(f"no job has ever trained in {directory}: it holds neither a journal nor a holder")
        return EXIT_NOT_FOUND
    return [Home(names[0], "", directory)]


def gathered(arguments: argparse.Namespace, home: Home) -> Job | int:
    """Everything that is known of this step; an exit status after a complaint."""
    absent = there_is(home.dir)
    if absent is not None:
        return absent
    try:
        found = told(home.dir, home.job, home.step_id)
        starts = found.starts
        holder = store.read_holder(home.dir)
    except OSError as error:
        return could_not_look(home.dir, error)
    is_holder = holder is not None and holder.job == home.job and home.step_id in ("", holder.step_id)
    if is_holder and holder is not None and (not starts or starts[-1].epoch < holder.epoch):
        # It has just started, or its journal cannot be written.
        starts.append(Attempt(holder.epoch, holder.job, holder.attempt, holder.step_id, host=holder.host, pid=holder.pid))
        found = found._replace(is_newest_told=True)
    if not starts:
        return _none(home, found)
    last = starts[-1]
    outside = _outside(arguments, home, last, holder)
    return Job(
        Home(home.job, home.step_id or last.step_id, home.dir), starts, outside, standing(last, outside), holder,
        tuple(found.notes), found.is_newest_told,
    )  # fmt: skip


def _none(home: Home, found: Told) -> int:
    """Say why no start of it is known; the exit status."""
    for note in found.notes[:NOTES_SHOWN]:
        complain(note)
    if found.notes:
        return EXIT_UNKNOWN
    try:
        elements = [job for job in jobs(home.dir) if job.startswith(f"{home.job}_")] if home.job.isdecimal() else []
    except OSError as error:
        return could_not_look(home.dir, error)
    if elements:
        elements.sort(key=lambda name: (len(name), name))
        more = len(elements) - ELEMENTS_SHOWN
        named = ", ".join(elements[:ELEMENTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        complain(f"job {home.job} is an array: say one of its elements: {named}")
        return EXIT_USAGE
    complain(f"{home.dir} has no journal of job {home.job}" + (f" step {home.step_id}" if home.step_id else ""))
    return EXIT_NOT_FOUND


def _outside(arguments: argparse.Namespace, home: Home, last: Attempt, holder: store.Holder | None) -> Outside:
    alive: bool | None = None
    if holder is not None and holder.epoch == last.epoch and store.can_be_seen(holder):
        alive = store.is_alive(holder)
    elif holder is not None and holder.epoch > last.epoch:
        alive = False  # Another one holds the directory: whatever still runs of this one, its saves count no more.
    if not places.is_number(home.job):
        return Outside(alive, problem="it is no job of Slurm's")
    from ckpt_supervisor.adapters.slurm import Scontrol, locate
    from ckpt_supervisor.core.views import NoView

    path = locate(arguments.environ.get("PATH"))
    if path is None:
        return Outside(alive)
    view_of = Scontrol(path, home.job, arguments.environ).show_job(ASK_TIMEOUT_S)
    if isinstance(view_of, NoView):
        return Outside(alive, GONE) if view_of.definite else Outside(alive, problem=view_of.reason)
    return Outside(alive, view_of.state, end_ms=view_of.end_ms)


def shown_as(job: Job) -> view.Status:
    """The job as it is drawn."""
    last, row, problem = job.starts[-1], None, ""
    try:
        newest = next((one for one in store.scan(job.home.dir) if one.problem is None), None)
        if newest is not None:
            from ckpt_supervisor.view.checkpoints import Row

            row = Row("checkpoint", newest.step, str(newest.path.absolute()), newest.manifest)
    except OSError as error:
        problem = f"cannot be looked at: {error.strerror or error}"
    end_s = last.end_s if job.outside.end_ms is None else job.outside.end_ms / 1000
    ends = [end_of(one) for one in job.starts]
    ends = [end or ("lost: no last word" if number < len(ends) - 1 else "") for number, end in enumerate(ends)]
    return view.Status(
        job=job.home.job,
        step_id=job.home.step_id,
        dir=str(job.home.dir.absolute()),
        word=job.standing.word,
        text=job.standing.text,
        starts=tuple(job.starts),
        ends=tuple(ends),
        ways=ways_of(job.starts),
        checkpoint=row,
        checkpoint_problem=problem,
        end=None if end_s is None else _instant(end_s),
        slurm=job.outside.slurm,
        lives=last.code is None and job.standing.listens,
        notes=job.notes,
    )


def _instant(end_s: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(end_s, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None


def unknown_is(job: Job) -> int:
    """The exit status of a question that only a job at work could answer."""
    return EXIT_UNKNOWN if job.standing.word == "unknown" else EXIT_NOT_FOUND
