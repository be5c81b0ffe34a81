"""`ckptctl timeline`: what each attempt of a job spent its time with, and what the run comes to.

Owns its command line, where a JOB leads to, and whether the newest attempt is seen to live. Changes nothing and asks no Slurm: it
works on a copy of the journals as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_supervisor import store
from ckpt_supervisor.ctl.words import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    columns_given,
    complain,
    could_not_look,
    out,
    out_json,
    there_is,
    width_of,
)

if TYPE_CHECKING:
    from ckpt_supervisor.view import story
    from ckpt_supervisor.view.facts import Run
    from ckpt_supervisor.view.timeline import Looks

LAST_MAX = 1_000

MORE = """\
One bar for each attempt, all on one scale; their characters are explained below them. Steps "+N" are kept, steps that were lost
have to be done again. Letters below a bar: N notice, R restart in place, H hang, O out of memory, T another task lost, A asked.
"""
EPILOG = """\
exit status: 0 drawn; 1 no journal of such a job; 2 wrong usage; 3 could not look

examples:
  ckptctl timeline                          all jobs of ./checkpoints (or $CKPT_SUPERVISE_DIR)
  ckptctl timeline 4711                     one job; 100 for all elements of an array, 100_3 for one of them
  ckptctl timeline --dir $SCRATCH/run7 --last 10
  ckptctl timeline 4711 --json | jq '.totals.goodput'
"""


def add(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command line of `timeline`."""
    made = kinds.add_parser(
        "timeline",
        parents=[common],
        help="what each attempt spent its time with, and what was lost",
        description=MORE,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("job", nargs="?", metavar="JOB", help="4711, 100_3, 100 for a whole array (default: all jobs of DIR)")
    made.add_argument("--last", type=_last, metavar="N", help="draw only so many of the newest attempts (default: 40)")
    made.set_defaults(run=run)


def _last(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= LAST_MAX and len(text) < 9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LAST_MAX}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Read and draw; the exit status."""
    found = _places(arguments)
    if isinstance(found, int):
        return found
    worst, is_first = EXIT_OK, True
    from ckpt_supervisor.view import run_record, story, timeline

    for directory, job, step_id in found:
        read = runs_of(directory, job, step_id, "timeline", story.Wanted(words=False))
        if isinstance(read, int):
            worst = max(worst, read)
            continue
        for one in read:
            if arguments.json:
                out_json(run_record.record(one))
                continue
            if not is_first:
                out("")
            is_first = False
            for line in timeline.block(one, looks_of(arguments), arguments.last or timeline.SHOWN_MAX):
                out(line)
    return worst


def looks_of(arguments: argparse.Namespace) -> Looks:
    """What this stdout can show."""
    from ckpt_supervisor.view.timeline import WIDTH_DEFAULT, WIDTH_MAX, Looks

    is_terminal = sys.stdout.isatty()
    width = width_of(sys.stdout.fileno()) if is_terminal else columns_given() or WIDTH_DEFAULT
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return Looks(min(width, WIDTH_MAX), is_terminal and arguments.colour, unicode)


def _places(arguments: argparse.Namespace) -> list[tuple[Path, str, str]] | int:
    """Directory, job and step of each run that is asked for; an exit status after a complaint."""
    from ckpt_supervisor.ctl import status
    from ckpt_supervisor.watches import places

    if arguments.job is None:
        absent = there_is(arguments.dir)
        return [(arguments.dir, "", "")] if absent is None else absent
    job = arguments.job
    if arguments.asked_dir is None and job.isdecimal() and not places.homes(arguments.environ, job):
        array = places.elements(arguments.environ, job)
        homes = [home for element in array for home in places.homes(arguments.environ, element)]
        if homes:
            return [(home.dir, home.job, home.step_id) for home in homes]
    found = status.homes(arguments, "timeline")
    if isinstance(found, int):
        return found
    return [(home.dir, home.job, home.step_id) for home in found]


def runs_of(
    directory: Path, job: str, step_id: str, command: str, wanted: story.Wanted, seen: story.Seen = None
) -> list[Run] | int:
    """The runs of a directory's journals; an exit status after a complaint. `seen`: what is known of the newest start's life."""
    from ckpt_supervisor.view import story

    absent = there_is(directory)
    if absent is not None:
        return absent
    try:
        whole = story.read(directory, job, step_id, alive=seen or alive(directory), wanted=wanted)
    except FileNotFoundError:
        complain(f"{command}: no journals in {directory}")
        return EXIT_NOT_FOUND
    except OSError as error:
        return could_not_look(directory, error)
    if not whole.attempts:
        named = f" of job {job}" if job else ""
        complain(f"{command}: {directory} has no journal{named}" + (f" step {step_id}" if step_id else ""))
        return EXIT_NOT_FOUND
    return story.runs(whole)


def alive(directory: Path) -> tuple[int, bool] | None:
    """Which start holds the directory, and whether its process lives; None where that cannot be seen from here."""
    try:
        holder = store.read_holder(directory)
        if holder is None or not store.can_be_seen(holder):
            return None
        return holder.epoch, store.is_alive(holder)
    except OSError:
        return None
