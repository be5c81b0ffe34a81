"""`ckptctl completion`: a script that completes commands, options and file names in a shell.

Owns which words stand for files and directories, and which values an option of ckpt-supervise is known to take. The scripts are
shtab's. Looks at nothing but the parsers of the two commands: what is completed cannot differ from what is understood.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator
from typing import Any

from ckpt_supervisor.ctl.words import EXIT_OK, out

SHELLS = ("bash", "zsh", "tcsh")
PROGRAMS = ("ckptctl", "ckpt-supervise")

FILES = frozenset({"FILE", "PATH", "STEP", "STEP|PATH"})
"""What stands for a file in --help. Any may be a path; a STEP is a directory of DIR."""

DIRECTORIES = frozenset({"DIR", "PLACE"})

VALUES: dict[str, tuple[str, ...]] = {
    "every": ("auto", "off"),
    "lead": ("auto", "off"),
    "requeue": ("auto", "never"),
    "verify": ("full", "structure", "readback"),
    "on-hang": ("warn", "restart", "requeue"),
    "notice-signal": ("USR1", "USR2"),
    "save-signal": ("USR2", "USR1"),
    "pass-signal": ("TERM", "USR1", "USR2"),
}
"""Words of options of ckpt-supervise; others, as times and numbers, are taken as well."""

HELP = "print a script that completes commands and options in a shell"
EPILOG = """\
examples:
  source <(ckptctl completion bash)                         in this shell; or at the end of ~/.bashrc
  source <(ckptctl completion bash --for ckpt-supervise)
  ckptctl completion zsh > ~/.zfunc/_ckptctl                with ~/.zfunc in fpath, before compinit
  ckptctl completion tcsh > ~/.ckptctl.tcsh                 and in ~/.tcshrc: source ~/.ckptctl.tcsh
"""


def add(kinds: Any, whole: argparse.ArgumentParser) -> None:
    """The command line. `whole`: the parser of ckptctl, of which this command is a part."""
    made = kinds.add_parser(
        "completion", help=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, description=HELP + "."
    )
    made.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or tcsh")
    made.add_argument("--for", dest="program", choices=PROGRAMS, default=PROGRAMS[0], help="for which command (default: ckptctl)")
    made.set_defaults(run=functools.partial(run, whole), dir=None, json=False)


def run(whole: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print the script."""
    out(script(whole if arguments.program == PROGRAMS[0] else _of_the_supervisor(), arguments.shell))
    return EXIT_OK


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one command. Marks the parser's arguments: it is of no other use afterwards."""
    import shtab

    from ckpt_supervisor.event_names import EVENTS

    for action in _actions(parser):
        kind = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY if action.metavar in DIRECTORIES else None
        if kind is not None:
            action.complete = kind  # type: ignore[attr-defined]
        if "--event" in action.option_strings:
            action.choices = sorted(EVENTS)
    text = str(shtab.complete(parser, shell)).rstrip("\n")
    if shell == "zsh":
        text = text.replace("_arguments -C -s ", "_arguments -C -s -S ")  # Behind `--` there are no options.
    name = re.search(r"^complete .*-F (\w+) ", text, re.MULTILINE) if shell == "bash" else None
    # Where nothing else fits it is a file, such as the script behind `--`.
    return text if name is None else f"{text}\ncomplete -o bashdefault -o default -F {name[1]} {parser.prog}"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _of_the_supervisor() -> argparse.ArgumentParser:
    """The parser behind its --help, with the words that its options take, and a command behind them."""
    from ckpt_supervisor import config

    parser = config.parser()
    for action in _actions(parser):
        values = [VALUES[name[2:]] for name in action.option_strings if name[2:] in VALUES]
        if values:
            action.choices = values[0]
    parser.add_argument("command", nargs="*", metavar="FILE", help="the training command, after --")
    return parser
