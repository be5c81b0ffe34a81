"""What all commands of `ckptctl` share: exit statuses, where a STEP or PATH leads, how words come out, ctrl-C.

Owns the form of the command line's answers. Must not know any single command. The environment is not read here: main.py
puts it into the arguments.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_supervisor.text import one_line

if TYPE_CHECKING:
    from ckpt_supervisor.view.checkpoints import Look
    from ckpt_supervisor.view.progress import Bar

EXIT_OK = 0
EXIT_NOT_FOUND = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
EXIT_INTERRUPTED = 130

WIDTH_MIN = 40

_STEP = re.compile(r"[0-9]{1,18}")


class Place(msgspec.Struct, frozen=True):
    """Where a STEP or PATH leads: the checkpoint directory, the checkpoint, and its step if its name tells one."""

    root: Path
    path: Path
    step: int | None


def locate(text: str, directory: Path) -> Place | None:
    """`1200`, `step-000001200`, or a path, also one inside `directory`; None if it is none of these."""
    from ckpt_supervisor import store  # Here: `log` does without it.

    if _STEP.fullmatch(text):
        return Place(directory, directory / store.step_name(int(text)), int(text))
    text = text.rstrip("/") or text  # `step-000000030/`, as a shell completes it
    path = Path(text)
    if not text or (not os.path.lexists(path) and "/" not in text):
        path = directory / text
        if not text or (not os.path.lexists(path) and store.parse_step(text) is None):
            return None
    whole = Path(os.path.realpath(path))  # such as DIR/latest
    return Place(whole.parent, whole, store.parse_step(whole.name))


def located(arguments: argparse.Namespace, command: str) -> Place | int:
    """The place of the argument STEP, or an exit status after a complaint."""
    place = locate(arguments.step, arguments.dir)
    return not_located(command, arguments.step, arguments.dir) if place is None else place


def not_located(command: str, text: str, directory: Path) -> int:
    """Complain about a STEP or PATH that leads nowhere; the exit status."""
    try:
        if text:
            is_there(directory / text)
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EINVAL):
            return could_not_look(directory, error)
    complain(f"{command}: {text!r} is neither a step (1200, step-000001200) nor a path that is there")
    return EXIT_USAGE


def is_there(path: Path) -> bool:
    """Unlike os.path.lexists, which takes every error for "not there". Raises OSError."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    return True


def there_is(directory: Path) -> int | None:
    """None for a directory that is there; else an exit status after a complaint."""
    try:
        if directory.is_dir():
            os.scandir(directory).close()
            return None
        os.lstat(directory)
    except FileNotFoundError:
        complain(f"no directory {shown(directory)}: say --dir DIR if the checkpoints are somewhere else")
        return EXIT_NOT_FOUND
    except OSError as error:
        return could_not_look(directory, error)
    complain(f"no directory, but something else: {directory}")
    return EXIT_NOT_FOUND


def shown(directory: Path) -> Path | str:
    """A directory as it is named in a sentence, where `checkpoints` alone would be read as a word."""
    is_bare = not directory.is_absolute() and directory.parts[:1] not in (("..",), ())
    return f"./{directory}" if is_bare else directory


def could_not_look(directory: Path, error: OSError) -> int:
    """Say so; the exit status for it."""
    complain(f"{directory} cannot be looked at: {error.strerror or error}")
    return EXIT_UNKNOWN


def complain(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"ckptctl: {one_line(line)}\n")


def out(line: str) -> None:
    """One line on stdout."""
    try:
        sys.stdout.write(line + "\n")
    except UnicodeEncodeError:  # a locale without that letter
        sys.stdout.write(line.encode("ascii", "backslashreplace").decode() + "\n")


def out_json(value: dict[str, Any]) -> None:
    """One JSON value on a line."""
    out(json.dumps(value))


def look_of(arguments: argparse.Namespace) -> Look:
    """How to draw on this stdout."""
    from ckpt_supervisor.view.checkpoints import Look

    is_terminal = sys.stdout.isatty()
    width = width_of(sys.stdout.fileno()) if is_terminal else columns_given() or None
    return Look(width, is_terminal and arguments.colour, datetime.now(timezone.utc))


def width_of(fd: int) -> int:
    """Columns of a terminal, or as many as COLUMNS says; 80 if neither does."""
    columns = columns_given()
    try:
        columns = columns or os.get_terminal_size(fd).columns
    except OSError:
        columns = 0
    return max(WIDTH_MIN, columns or 80)


def columns_given() -> int:
    """What COLUMNS says, within reason; 0 where it says nothing and standard output is no terminal."""
    import shutil

    columns = shutil.get_terminal_size((0, 0)).columns
    return max(WIDTH_MIN, columns) if columns else 0


def bar_of(name: str) -> Bar:
    """A progress bar on stderr, or its lines where that is no terminal."""
    from ckpt_supervisor.view.progress import Bar

    return Bar(sys.stderr, one_line(name), width_of(sys.stderr.fileno()) if sys.stderr.isatty() else None)


class Interrupt:
    """Set by ctrl-C, so that threads that read end before the process does."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Whether ctrl-C was pressed."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Pause; a signal handler that sets a threading.Event could wait for a lock that its own thread holds."""
        threading.Event().wait(timeout)
        return self._is_set

    def take(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler: the first ctrl-C asks for an end, the second one is Python's own."""
        self._is_set = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """While a long look runs, ctrl-C ends it in order. The caller asks `is_set()` and returns EXIT_INTERRUPTED."""
    stop = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, stop.take)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
