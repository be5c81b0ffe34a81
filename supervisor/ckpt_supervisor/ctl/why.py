"""`ckptctl why`: why a job was interrupted the last time, and what came of it.

Owns its command line, and who is asked besides the journals: the job's output and sacct, both within bounds and never required.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ckpt_supervisor.ctl.words import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNKNOWN, columns_given, complain, out, out_json, width_of

if TYPE_CHECKING:
    from ckpt_supervisor.view.facts import Run

ASK_TIMEOUT_S = 5.0

MORE = """\
Cause, time given, what was decided on which numbers, which rank was late, what was lost, and what could be changed. What Slurm
says in the job's output and by sacct is shown where it is there.
"""
EPILOG = """\
exit status: 0 told; 1 no journal of such a job, or no such attempt; 2 wrong usage; 3 could not look

examples:
  ckptctl why                               the last interruption of the newest job of ./checkpoints
  ckptctl why 4711                          of this job; 100_3 for an element of an array
  ckptctl why 4711 --attempt 2              another one, as ckptctl timeline names it
  ckptctl why 4711 --output slurm-4711.out  look for Slurm's own words there
  ckptctl why 4711 --json | jq .lost_steps
"""


def add(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command line of `why`."""
    made = kinds.add_parser(
        "why",
        parents=[common],
        help="why a job was interrupted, what was decided, and what was lost",
        description=MORE,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("job", nargs="?", metavar="JOB", help="4711, 100_3, 4711.0 for one step (default: the newest job of DIR)")
    made.add_argument("--attempt", default="", metavar="N", help="this attempt (default: the last one that was interrupted)")
    made.add_argument("--output", default="", metavar="FILE", help="the job's output (default: what scontrol names)")
    made.add_argument("--no-slurm", action="store_true", help="look at the journals only")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, ask, tell; the exit status."""
    from ckpt_supervisor.ctl import status
    from ckpt_supervisor.ctl.timeline import runs_of
    from ckpt_supervisor.view import story

    homes = status.homes(arguments, "why")
    if isinstance(homes, int):
        return homes
    worst = EXIT_OK
    for place, home in enumerate(homes):
        runs = runs_of(home.dir, home.job, home.step_id, "why", story.Wanted())
        over = None if isinstance(runs, int) or arguments.no_slurm else _seen_over(arguments, runs[-1])
        if over is not None:
            runs = runs_of(home.dir, home.job, home.step_id, "why", story.Wanted(), over)
        if isinstance(runs, int):
            worst = max(worst, runs)
            continue
        if place and not arguments.json:
            out("")
        worst = max(worst, _tell(arguments, runs[-1]))
    return worst


def _seen_over(arguments: argparse.Namespace, told: Run) -> tuple[int, bool] | None:
    """The newest start, where Slurm says that it is over although its journal does not; None where it does not say so."""
    from ckpt_supervisor.watches import places

    last = told.attempts[-1]
    if last.cause or last.code is not None or not places.is_number(last.job):
        return None
    from ckpt_supervisor.adapters.slurm import Scontrol, locate
    from ckpt_supervisor.core.policy import runs
    from ckpt_supervisor.core.views import NoView

    path = locate(arguments.environ.get("PATH"))
    view = None if path is None else Scontrol(path, last.job, arguments.environ).show_job(ASK_TIMEOUT_S)
    if view is None or (isinstance(view, NoView) and not view.definite):
        return None
    is_over = isinstance(view, NoView) or not runs(view) or view.restarts > last.attempt
    return (last.epoch, False) if is_over else None


def _tell(arguments: argparse.Namespace, told: Run) -> int:
    from ckpt_supervisor.view import why
    from ckpt_supervisor.view.totals import label

    one = why.chosen(told, arguments.attempt)
    if one is None:
        known = ", ".join(label(each, told) for each in told.attempts[-10:])
        complain(f"why: there is no attempt {arguments.attempt} of job {told.attempts[-1].job}: its newest are {known}")
        return EXIT_NOT_FOUND
    others = why.others(told, arguments.attempt, one)
    if others:
        complain(f"why: {others}")
    said, problem = why.Said(), ""
    if not arguments.no_slurm:
        from ckpt_supervisor.ctl import slurm_words

        until_ns = slurm_words.until_of(one, told)
        said, problem = slurm_words.said_of(one, until_ns, arguments.output, arguments.environ)
        if problem and not os.path.lexists(arguments.output):
            problem = f"there is no file {arguments.output}"
    for words in (problem, said.note):
        if words:
            complain(f"why: {words}")
    if arguments.json:
        out_json(why.record(one, told, said))
    else:
        width = width_of(sys.stdout.fileno()) if sys.stdout.isatty() else columns_given() or None
        for line in why.lines(one, told, said, width):
            out(line)
    return EXIT_UNKNOWN if problem else EXIT_OK
