"""--help of every command: its examples are there, and are what the command understands."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from ckpt_supervisor import config
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.ctl import usage
from ckpt_supervisor.ctl.completion import SHELLS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES_MIN = 2
WIDTH_MAX = 130


def commands() -> dict[str, argparse.ArgumentParser]:
    """Name and parser of each command."""
    return dict(ctl._parser()[1])


def called(text: str, program: str = "ckptctl") -> list[list[str]]:
    """The words of each call in these lines, without what follows it: a comment, a pipe, a file."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"(?:^|[ (\"]){program} (.*)", line)
        if match:
            words = re.split(r" {2,}| [|>#]|\)", match[1])[0]
            found.append(shlex.split(words.replace("$SCRATCH", "/scratch")))
    return found


def understood(words: list[str]) -> argparse.Namespace:
    """As main() reads them. Raises SystemExit."""
    parser, _ = ctl._parser()
    arguments, strays = parser.parse_known_args(usage.hoisted(words))
    assert strays == [], words
    return arguments


@pytest.mark.parametrize("command", sorted(commands()))
def test_every_command_has_examples_that_it_understands(command: str) -> None:
    """Two at the least, each of this command, none wider than a wide terminal; the rest of the help is formatted."""
    epilog = commands()[command].epilog or ""
    _, head, examples = epilog.partition("examples:\n")
    assert head, command
    calls = called(examples)
    assert len(calls) >= EXAMPLES_MIN
    for words in calls:
        assert words[0] == command
        understood(words)
    text = commands()[command].format_help()
    assert examples.rstrip() in text
    assert max(map(len, epilog.splitlines())) <= WIDTH_MAX


def test_the_help_of_the_whole_has_examples_that_are_understood() -> None:
    """Of every command that people need in their first week."""
    calls = called(ctl.EPILOG.partition("examples:\n")[2])
    for words in calls:
        understood(words)
    known = {"ls", "latest", "verify", "prune", "log", "timeline", "why", "report", "status", "save", "doctor", "drill"}
    assert {words[0] for words in calls} >= known


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name)
def test_a_document_says_nothing_that_is_not_understood(path: Path) -> None:
    """Every call of ckptctl in its blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    for words in [call for block in blocks for call in called(block)]:
        understood([word for word in words if word != "…"])


def test_the_examples_of_ckpt_supervise_are_understood(tmp_path: Path) -> None:
    """Options and a command, read as its own."""
    calls = called(config.EPILOG.partition("examples:\n")[2], "ckpt-supervise")
    assert len(calls) >= EXAMPLES_MIN
    for words in calls:
        read = config.read_options([word.replace("/scratch", str(tmp_path)) for word in words], {})
        assert read.command == ("python", "train.py")


def test_completion_says_how_it_is_installed() -> None:
    """For each shell."""
    text = commands()["completion"].format_help()
    assert all(f"ckptctl completion {shell}" in text for shell in SHELLS)


def test_the_text_of_an_option_may_be_one_option_itself() -> None:
    """As the README writes it; not beyond `--`, and what is missing is still missing."""
    read = understood(
        ["drill", "--cluster", "--sbatch-args", "--gpus=1", "--options", "--linger", "--", "train", "--options", "-x"]
    )
    assert (read.sbatch_args, read.options, read.command) == ("--gpus=1", "--linger", ["train", "--options", "-x"])
    with pytest.raises(SystemExit):
        understood(["drill", "--options", "--", "true"])
