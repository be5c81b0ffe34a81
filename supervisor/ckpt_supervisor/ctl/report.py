"""`ckptctl report`: what happened to a run as one page for a browser, or as JSON.

Owns its command line and where the page goes. Must not overwrite what is no report of ours, and must not leave half of one:
the page is written beside its place and renamed. What is on it is view/report.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    complain,
    could_not_look,
    out,
    out_json,
    there_is,
)
from ckpt_supervisor.text import one_line, size_text

if TYPE_CHECKING:
    from ckpt_supervisor.view.facts import Run

DEFAULT = "report.html"
STDOUT = "-"
TELL_S = 1.5
TELL_LOG_S = 10.0
"""Where something takes longer than this a line on stderr says what goes on: on a terminal, and elsewhere."""

MODE = 0o666

EPILOG = """\
The page opens offline and sends nothing. It shows steps and checkpoints over time, what each attempt spent its time with,
saves and their parts, late ranks, and memory, each with its numbers in a table.

exit status:
  0 written; 1 no journal of such a job, or FILE is something else; 2 wrong usage; 3 could not look or write; 130 ctrl-C

examples:
  ckptctl report                                   all jobs of ./checkpoints, as report.html
  ckptctl report 4711 -o 4711.html                 one job
  ckptctl report --dir $SCRATCH/run7 -o - | ssh desk 'cat > run7.html'
  ckptctl report --json | jq '.attempts[].cause'   the facts instead
"""


def add(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command line of `report`."""
    report = kinds.add_parser(
        "report",
        parents=[common],
        help="what happened to a run, as one page for a browser",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = "4711, 100_3 for an element of an array (default: all jobs of DIR)"
    report.add_argument("job", nargs="?", metavar="JOB", help=job)
    where = f"where the page goes; {STDOUT} for standard output (default: {DEFAULT})"
    report.add_argument("-o", "--output", metavar="FILE", default=DEFAULT, help=where)
    report.add_argument("--force", action="store_true", help="overwrite FILE even if it is no report")
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read, draw, write; the exit status."""
    if arguments.output == "":
        complain("report: -o takes a name, not an empty one")
        return EXIT_USAGE
    found = _where(arguments)
    if isinstance(found, int):
        return found
    directory, job, step_id = found
    place = _Place(arguments.output, arguments.force)
    if not arguments.json:
        refusal = place.refusal()
        if refusal:
            complain(f"report: {refusal}")
            return EXIT_NOT_FOUND
    try:
        read = _read(directory, job, step_id)
        return read if isinstance(read, int) else _made(arguments, directory, read, place)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _where(arguments: argparse.Namespace) -> tuple[Path, str, str] | int:
    """The directory, the job and the step, "" for all; an exit status after a complaint."""
    if arguments.job is None:
        absent = there_is(arguments.dir)
        return (arguments.dir, "", "") if absent is None else absent
    from ckpt_supervisor.ctl import status

    homes = status.homes(arguments, "report")
    if isinstance(homes, int):
        return homes
    places = sorted({home.dir for home in homes})
    if len(places) > 1:
        complain(f"report: steps of job {arguments.job} have several directories; say --dir with one of them:")
        for place in places:
            complain(f"  {place}")
        return EXIT_USAGE
    absent = there_is(places[0])
    step_id = homes[0].step_id if len(homes) == 1 else ""
    return (places[0], homes[0].job, step_id) if absent is None else absent


def _read(directory: Path, job: str, step_id: str) -> Run | int:
    """The run; an exit status after a complaint."""
    from ckpt_supervisor.ctl.timeline import alive
    from ckpt_supervisor.view import story

    try:
        with _telling(f"reading the journals of {directory}"):
            found: Run | None = story.read(directory, job, step_id, alive=alive(directory))
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError as error:
        return could_not_look(directory, error)
    if found is not None and found.attempts:
        return found
    complain(f"report: no journal{f' of job {job}' if job else ''} in {directory}")
    return EXIT_NOT_FOUND


def _made(arguments: argparse.Namespace, directory: Path, found: Run, place: _Place) -> int:
    from ckpt_supervisor.view import report

    with _telling(f"looking at the checkpoints of {directory}"):
        seen, notes = report.look(directory, found)
    if arguments.json:
        out_json(report.record(found, seen, notes))
        return EXIT_OK
    pieces = report.html(found, seen, notes, time.time_ns())
    try:
        with _telling("drawing"):
            size = place.write(pieces)
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(f"report: {place.name} cannot be written: {error.strerror or error}")
        return EXIT_UNKNOWN
    if not place.is_stdout:
        out(f"{one_line(place.name)}: {size_text(size)}, open it in a browser")
    return EXIT_OK


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Say on stderr what goes on, once, if it takes long."""
    pause_s = TELL_S if sys.stderr.isatty() else TELL_LOG_S
    timer = threading.Timer(pause_s, complain, (f"report: {what}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Place:
    """Where the page goes."""

    def __init__(self, name: str, is_forced: bool) -> None:
        self.name = name
        self.is_stdout = name == STDOUT
        self._is_forced = is_forced
        self._path = Path(name)

    def refusal(self) -> str:
        """Why nothing is written there, "" if it may be."""
        if self.is_stdout:
            return ""
        try:
            mode = self._path.stat().st_mode
        except FileNotFoundError:
            parent = self._path.parent
            return "" if parent.is_dir() else f"there is no directory {parent}"
        except OSError as error:
            return f"{self.name} cannot be looked at: {error.strerror}"
        if stat.S_ISDIR(mode):
            return f"{self.name} is a directory"
        if not stat.S_ISREG(mode) or self._is_forced or _is_ours(self._path):
            return ""
        return f"{self.name} is there and is no report of ckptctl; --force overwrites it"

    def write(self, pieces: Iterable[str]) -> int:
        """Its bytes. Raises OSError; what was there before is there still then."""
        chunks = (piece.encode("utf-8", "replace") for piece in pieces)
        if self.is_stdout:
            sys.stdout.flush()
            return _put(sys.stdout.buffer, chunks)
        if self._path.exists() and not self._path.is_file():  # /dev/null, a FIFO: nothing to be renamed
            with self._path.open("wb") as stream:
                return _put(stream, chunks)
        target = Path(os.path.realpath(self._path))  # A link stays one; what it leads to is replaced.
        beside = target.with_name(f".{target.name[:100]}.{os.getpid()}.new")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
        is_whole = False
        try:
            with os.fdopen(fd, "wb") as stream:
                size = _put(stream, chunks)
                os.fsync(stream.fileno())
            beside.replace(target)
            is_whole = True
        finally:
            if not is_whole:  # A full disk, or ctrl-C.
                with contextlib.suppress(OSError):
                    beside.unlink()
        return size


def _put(stream: Any, chunks: Iterator[bytes]) -> int:
    size = 0
    for chunk in chunks:
        stream.write(chunk)
        size += len(chunk)
    stream.flush()
    return size


def _is_ours(path: Path) -> bool:
    """Whether it is a report that may be replaced; what cannot be read is not."""
    from ckpt_supervisor.view.report import MARK, MARK_BYTES_MAX

    try:
        with path.open("rb") as stream:
            return MARK.encode() in stream.read(MARK_BYTES_MAX)
    except OSError:
        return False
