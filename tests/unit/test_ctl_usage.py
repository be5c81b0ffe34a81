"""Usage errors of both commands: one line that names what was probably meant, and 2; nothing is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import cli
from ckpt_supervisor.config import UsageError, read_options
from ckpt_supervisor.ctl import main as ctl

from tests.support.ctl_stage import caller, committed


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls ckptctl in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor job.sh", "doctor: what is 'job.sh'? Did you mean --script job.sh?"),
        ("ls runs/7", "ls: what is 'runs/7'? Did you mean --dir runs/7?"),
        ("log 4711", "log: what is '4711'? Did you mean --job 4711?"),
        ("ls 100", "ls: what is '100'? see ckptctl ls --help"),
        ("ls --dirr x", "ls: there is no option '--dirr'; did you mean --dir?"),
        ("status --bogus", "status: there is no option '--bogus'; see ckptctl status --help"),
        ("--dirr x ls", "there is no option '--dirr' before the command; did you mean --dir?"),
        ("--bogus ls", "there is no option '--bogus' before the command; a command has options, and they follow it"),
        ("--dir x", "say a command, such as ckptctl ls --dir DIR; ckptctl --help lists them"),
        ("lss", "there is no command 'lss'; did you mean ls?"),
        ("frobnicate", "there is no command 'frobnicate'; ckptctl --help lists them"),
        ("", "say a command, such as ckptctl ls; ckptctl --help lists them"),
        ("prune --keep", "prune: argument --keep: expected one argument; see ckptctl prune --help"),
    ],
)
def test_a_wrong_word_is_told_in_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command, and the word that comes closest; no usage of everything above it."""
    with pytest.raises(SystemExit) as caught:
        ctl.main(words.split())
    told = capsys.readouterr()
    assert (caught.value.code, told.out, told.err) == (2, "", f"ckptctl: {said}\n")


@pytest.mark.parametrize("before", [("--dir", "here"), ("--dir=here",), ("--json", "--dir", "here")], ids=" ".join)
def test_the_directory_may_be_said_before_the_command(call: Any, tmp_path: Path, before: tuple[str, ...]) -> None:
    """As with git -C: both places mean the same."""
    (tmp_path / "here").mkdir()
    committed(tmp_path / "here", 5)
    told = call(*before, "latest")
    assert told.code == 0
    assert "step-000000005" in told.out
    assert call("--dir", "missing", "ls", "--dir", "here").code == 0


def test_a_directory_that_is_missing_is_named_as_one_and_says_how_to_name_another(call: Any) -> None:
    """The default is a bare word."""
    assert call("ls").err == "ckptctl: no directory ./checkpoints: say --dir DIR if the checkpoints are somewhere else\n"
    assert call("ls", "--dir", "../x").err.startswith("ckptctl: no directory ../x: ")


def test_both_commands_tell_their_version(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The same one: they are of one distribution."""
    told = call("--version")
    assert told.code == 0
    name, version = told.out.split()
    assert (name, cli.main(["--version"])) == ("ckptctl", 0)
    assert capsys.readouterr().out == f"ckpt-supervise {version}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ever", "10m"], ["unknown option '--ever': did you mean --every?"]),
        (["--ever=10m"], ["unknown option '--ever=10m': did you mean --every?"]),
        (["--resume-args=--from"], ["unknown option '--resume-args=--from': did you mean --resume-arg?"]),
        (["--bogus", "1"], ["unknown option '--bogus': see ckpt-supervise --help", "unknown word before -- '1': see "]),
        (["--lingr", "--keep", "0"], ["unknown option '--lingr': did you mean --linger?", "--keep: 0 is less than 1"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_option_that_is_misspelt_is_told_once_with_what_was_meant(words: list[str], said: list[str]) -> None:
    """And not once more for its value."""
    with pytest.raises(UsageError) as caught:
        read_options([*words, "--", "true"], {})
    problems = caught.value.problems
    assert len(problems) == len(said)
    assert all(problem.startswith(text) for problem, text in zip(problems, said, strict=True))
