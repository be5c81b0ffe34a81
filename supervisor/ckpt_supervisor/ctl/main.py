"""`ckptctl`: looks at checkpoints and journals, and puts a directory in order.

Owns the command line of the inspection tool and its environment. What the commands do is in look.py (changes nothing),
log.py, change.py, repair.py and others; what is shown comes from view/ and store/.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_supervisor.ctl import examples, usage
from ckpt_supervisor.ctl.words import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNKNOWN, EXIT_USAGE, complain, out

THREADS_MAX = 64
THREADS_DEFAULT_MAX = 4
"""A login node is for everybody."""

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write to standard output may say, on a disk that is full or broken."""

KEEP_DEFAULT = 3

EPILOG = """\
STEP is 1200, step-000001200, or the path of a checkpoint.

exit status:
  0  found, intact, done
  1  nothing found, not intact, or refused
  2  wrong usage; nothing was touched
  3  could not look: a disk that does not answer is never taken for "nothing there"
  130  ended by ctrl-C

examples:
  ckptctl ls                                  the checkpoints of ./checkpoints (or $CKPT_SUPERVISE_DIR)
  ckptctl latest --dir $SCRATCH/run7          path of the newest intact one
  ckptctl verify                              check every byte of the newest one
  ckptctl verify --deep model.safetensors     a file or directory that somebody else wrote
  ckptctl keep 1200                           never prune that one
  ckptctl prune --keep 2 --dry-run            what would go, and why the others stay
  ckptctl repair --dry-run                    what is out of order
  ckptctl log --since 2h --event commit       what was committed in the last two hours
  ckptctl log --follow                        watch
  ckptctl timeline                            what each attempt spent its time with, and what was lost
  ckptctl why 4711                            why it was interrupted the last time, and what to change
  ckptctl report 4711 -o 4711.html            the same as one page for a browser
  ckptctl doctor --script job.sh              what is wrong with it, before it is submitted
  ckptctl drill -- python train.py            rehearse every kind of interruption, without Slurm
  ckptctl status 4711                         what a job does, its attempts, its newest checkpoint
  ckptctl save 4711 --wait                    have it save now, and wait for the commit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    environ = os.environ
    has_colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    try:
        _open_streams()
        code = _run(usage.hoisted(sys.argv[1:] if argv is None else argv), environ, has_colour)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader went away (`| head`): that is no fault. Python would complain again when it flushes at exit.
        _drop_output()
        return EXIT_OK
    except KeyboardInterrupt:
        _end_line(has_colour)
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            raise
        _drop_output()
        complain(f"the output cannot be written: {error.strerror}")
        return EXIT_UNKNOWN


def _run(words: list[str], environ: Mapping[str, str], has_colour: bool) -> int:
    """Read the words and do what they say; the exit status."""
    version = usage.version_of(words)
    if version:
        out(version)
        return EXIT_OK
    parser, commands = _parser(words[0] if words else "")
    problem = usage.misplaced(words)
    if problem:
        parser.error(problem)
    arguments, strays = parser.parse_known_args(words)
    directory = Path(arguments.dir or environ.get("CKPT_SUPERVISE_DIR") or "checkpoints")
    if strays:
        parser.error(usage.stray(words[0], strays, commands, directory))
    arguments.environ, arguments.asked_dir, arguments.dir = environ, arguments.dir, directory
    arguments.colour = has_colour
    problem = _take_retention(arguments, environ.get("CKPT_SUPERVISE_KEEP", ""), environ.get("CKPT_SUPERVISE_KEEP_EVERY", ""))
    if problem:
        complain(problem)
        return EXIT_USAGE
    run: Callable[[argparse.Namespace], int] = arguments.run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # A path that is no UTF-8 is printed byte for byte.
    return run(arguments)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_line(has_colour: bool) -> None:
    """After ctrl-C, which may have come in the middle of a coloured line: a terminal would stay as that was."""
    try:
        if has_colour and sys.stdout.isatty():
            sys.stdout.write("\x1b[0m\n")
        sys.stdout.flush()
    except OSError:  # Nobody reads any more.
        _drop_output()


def _open_streams() -> None:
    """What was closed before us (`>&-`) is a place where all is lost, not the next file that is opened."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _take_retention(arguments: argparse.Namespace, keep: str, keep_every: str) -> str:
    """Fill in what ckpt-supervise takes from the same variables; what is wrong with them, "" if nothing."""
    for name, text, default in (("keep", keep, KEEP_DEFAULT), ("keep_every", keep_every, 0)):
        if getattr(arguments, name, 0) is not None:
            continue  # given, or not an option of this command
        try:
            setattr(arguments, name, _count(text) if text else default)
        except argparse.ArgumentTypeError as error:
            return f"CKPT_SUPERVISE_{name.upper()}: {error}"
    return ""


def _count(text: str) -> int:
    """A whole number above 0: with 0 kept the only good one would go (field case 93)."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _step(text: str) -> int:
    """1200 or step-000001200."""
    from ckpt_supervisor.store import parse_step

    step = parse_step(text)
    if step is None and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r} is no step (1200, step-000001200)")
    return int(text) if step is None else step


def _threads(text: str) -> int:
    return min(THREADS_MAX, _count(text))


def _parser(asked: str = "") -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The command line, and the parser of each command; of the one that is `asked` for alone, where that is known to be enough.

    Each command's module is imported with its parser: all of them together take longer than the first line of a log may.
    """
    made = usage.Parser(
        prog="ckptctl",
        description="Look at the checkpoints and journals of supervised training runs, and put them in order.",
        epilog=EPILOG,
        formatter_class=usage.Help,
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", metavar="DIR", help="checkpoint directory (default: $CKPT_SUPERVISE_DIR, else ./checkpoints)")
    common.add_argument("--json", action="store_true", help="one JSON value a line")
    every = argparse.ArgumentParser(add_help=False)
    milestones = "multiples of STEPS are milestones (default: $CKPT_SUPERVISE_KEEP_EVERY)"
    every.add_argument("--keep-every", type=_count, metavar="STEPS", help=milestones)
    reading = argparse.ArgumentParser(add_help=False)
    threads = min(THREADS_DEFAULT_MAX, len(os.sched_getaffinity(0)))
    reading.add_argument("--threads", type=_threads, default=threads, metavar="N", help=f"threads that read (here: {threads})")
    changing = argparse.ArgumentParser(add_help=False)
    changing.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    changing.add_argument(
        "--holder-is-gone", action="store_true", help="the job that DIR/attempt names on another host is over; I have looked"
    )
    kinds = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shared = _Shared(common, every, reading, changing)
    for add in (ADDS[asked],) if asked in ADDS else dict.fromkeys(ADDS.values()):
        add(kinds, shared)
    if asked not in ADDS:
        from ckpt_supervisor.ctl import completion

        completion.add(kinds, made)
    examples.add(kinds.choices)
    return made, kinds.choices


class _Shared(NamedTuple):
    """Options that several commands take."""

    common: argparse.ArgumentParser
    every: argparse.ArgumentParser
    reading: argparse.ArgumentParser
    changing: argparse.ArgumentParser


Add = Callable[[Any, _Shared], None]


def _ls(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import look

    what = "list the checkpoints, newest first; looks at names and sizes only"
    ls = kinds.add_parser("ls", parents=[shared.common, shared.every], help=what)
    ls.add_argument("--all", action="store_true", help="also what was put aside, partials and trash")
    ls.set_defaults(run=look.ls)


def _latest(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import look

    what = "print the path of the newest intact checkpoint"
    latest = kinds.add_parser("latest", parents=[shared.common, shared.reading], help=what)
    latest.add_argument("--quick", action="store_true", help="look at sizes and structure only")
    latest.set_defaults(run=look.latest)


def _show(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import look

    what = "what one checkpoint holds, who wrote it and why"
    show = kinds.add_parser("show", parents=[shared.common, shared.every], help=what)
    show.add_argument("step", metavar="STEP", help="1200, step-000001200, or a path")
    show.add_argument("--files", type=_count, default=10, metavar="N", help="name so many files (default: 10)")
    show.set_defaults(run=look.show)


def _verify(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import look

    verify = kinds.add_parser("verify", parents=[shared.common, shared.reading], help="check checkpoints, ours or anybody's")
    verify.add_argument("path", nargs="*", metavar="STEP|PATH", help="steps, or files and directories (default: the newest one)")
    verify.add_argument("--all", action="store_true", help="check all checkpoints of the directory")
    deep = "digests, and also the checksums inside files and what the files say of each other"
    verify.add_argument("--deep", action="store_true", help=deep)
    verify.add_argument("--quick", action="store_true", help="look at sizes and structure only")
    verify.set_defaults(run=look.verify)


def _keep(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import change

    what = "protect a checkpoint from being pruned, or release it"
    keep = kinds.add_parser("keep", parents=[shared.common, shared.reading], help=what)
    keep.add_argument("step", metavar="STEP", help="1200, step-000001200, or a path")
    keep.add_argument("--release", action="store_true", help="protect it no longer")
    keep.set_defaults(run=change.keep)


def _prune(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import change

    what = "remove old checkpoints; never the newest intact one"
    prune = kinds.add_parser("prune", parents=[shared.common, shared.every, shared.reading, shared.changing], help=what)
    how_many = f"how many of the newest to keep (default: $CKPT_SUPERVISE_KEEP, else {KEEP_DEFAULT})"
    prune.add_argument("--keep", type=_count, metavar="N", help=how_many)
    prune.set_defaults(run=change.prune)


def _repair(kinds: Any, shared: _Shared) -> None:
    from ckpt_supervisor.ctl import repair as repair_command

    what = "mend `latest`, put damaged ones aside, sweep partials; deletes no checkpoint"
    repair = kinds.add_parser("repair", parents=[shared.common, shared.reading, shared.changing], help=what)
    foreign = "also put aside what has no usable manifest or holds files that it does not list"
    repair.add_argument("--quarantine-foreign", action="store_true", help=foreign)
    back = "only this: give a checkpoint that was set aside (.failed-..., not .damaged-...) its name back"
    repair.add_argument("--restore", type=_step, metavar="STEP", help=back)
    repair.set_defaults(run=repair_command.repair)


def _of_module(module: str, function: str) -> Add:
    """A command whose options its own module adds."""

    def add(kinds: Any, shared: _Shared) -> None:
        getattr(importlib.import_module(f"ckpt_supervisor.ctl.{module}"), function)(kinds, shared.common)

    return add


_control = _of_module("control", "add_control")

ADDS: Mapping[str, Add] = {
    "ls": _ls,
    "latest": _latest,
    "show": _show,
    "verify": _verify,
    "keep": _keep,
    "prune": _prune,
    "repair": _repair,
    "log": _of_module("log", "add_log"),
    "timeline": _of_module("timeline", "add"),
    "why": _of_module("why", "add"),
    "report": _of_module("report", "add"),
    "save": _control,
    "status": _control,
    "doctor": _of_module("doctor", "add_doctor"),
    "drill": _of_module("drill", "add"),
}
"""By command, in the order of --help; `completion` needs them all, and comes last."""
