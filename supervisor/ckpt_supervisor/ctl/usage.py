"""What `ckptctl` says to a command line that it cannot read: one line, with the word that was probably meant.

Owns the wording of usage errors and the options that may stand before the command. Must not know what any command does: what
options one takes is asked of its parser.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ckpt_supervisor.ctl.words import EXIT_USAGE
from ckpt_supervisor.text import one_line

BEFORE = ("--dir", "--json", "--version", "--help", "-h")
"""Options that may stand before the command."""

TEXTS = ("--options", "--sbatch-args", "--preempt-with")
"""Options whose value is options itself: argparse would take `--options --linger` for two of its own."""

COMMAND_COLUMNS = 14
"""The longest command, and as many columns as it is set in."""

SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash", ".job")


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, without its usage; --help has that."""

    def error(self, message: str) -> NoReturn:
        """End with 2."""
        command = self.prog.removeprefix("ckptctl").strip()
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown is not None:
            known = re.findall(r"[a-z]+", unknown[2])
            message = f"there is no command {unknown[1]!r}{meant(unknown[1], known) or '; ckptctl --help lists them'}"
        elif message.endswith("required: COMMAND"):
            message = "say a command, such as ckptctl ls; ckptctl --help lists them"
        elif command:
            message = f"{command}: {message}; see ckptctl {command} --help"
        self.exit(EXIT_USAGE, f"ckptctl: {one_line(message)}\n")


class Help(argparse.RawDescriptionHelpFormatter):
    """--help with every command and its words on one line: argparse forgets by how much it sets commands in."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = COMMAND_COLUMNS


def hoisted(words: Sequence[str]) -> list[str]:
    """The words with --dir and --json behind the command, also where they were written before it, and options' texts joined."""
    before: list[str] = []
    words = _joined(words)
    rest = list(words)
    while rest and (rest[0] in ("--dir", "--json") or rest[0].startswith("--dir=")):
        count = 2 if rest[0] == "--dir" else 1
        before, rest = before + rest[:count], rest[count:]
    if not rest or rest[0].startswith("-"):
        return list(words)
    return [rest[0], *before, *rest[1:]]


def _joined(words: Sequence[str]) -> list[str]:
    """The words with the text of --options and its like in one word with its name, up to `--`."""
    end = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:end]:
        if found and found[-1] in TEXTS:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return [*found, *words[end:]]


def misplaced(words: Sequence[str]) -> str:
    """What to say of an option before the command, once those that may stand there are behind it; "" for none."""
    first = words[0].partition("=")[0] if words else ""
    if not first.startswith("-") or first in BEFORE[2:]:
        return ""
    if first in BEFORE:
        return "say a command, such as ckptctl ls --dir DIR; ckptctl --help lists them"
    return (
        f"there is no option {first!r} before the command{meant(first, BEFORE) or '; a command has options, and they follow it'}"
    )


def version_of(words: Sequence[str]) -> str:
    """What to print for --version; "" if that was not asked for."""
    if list(words[:1]) != ["--version"]:
        return ""
    from importlib.metadata import version

    return f"ckptctl {version('ckpt-supervise')}"


def stray(command: str, words: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser], directory: Path) -> str:
    """What to say of words that a command has no use for. `directory`: where journals may tell whether one is a job's name."""
    options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", parsers[command].format_usage()) if command in parsers else []
    word = words[0]
    see = f"see ckptctl {command} --help"
    if word.startswith("-"):
        hint = meant(word.partition("=")[0], options)
        return f"{command}: there is no option {word!r}{hint or f'; {see}'}"
    option = ""
    if "--script" in options and word.endswith(SCRIPTS):
        option = "--script"
    elif "--job" in options and (word.split("_")[0].split(".")[0].isdecimal() or _has_journal(directory, word)):
        option = "--job"
    elif "--dir" in options and not word.isdecimal():
        option = "--dir"
    return f"{command}: what is {word!r}?" + (f" Did you mean {option} {word}?" if option else f" {see}")


def _has_journal(directory: Path, job: str) -> bool:
    from ckpt_supervisor.view.reading import files

    try:
        return any(file.job == job for file in files(directory))
    except OSError:
        return False


def meant(word: str, known: Iterable[str]) -> str:
    """ "; did you mean --every?" where one of the known words is close; "" otherwise."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
