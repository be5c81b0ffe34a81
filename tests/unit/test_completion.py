"""ckptctl completion: what a real bash completes with the scripts, and that each word of them is understood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import config
from ckpt_supervisor.ctl import completion
from ckpt_supervisor.ctl import main as ctl

from tests.support.ctl_stage import caller

COMPLETE = r"""
source "$1"
complete -p "$2"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_shtab_${1//-/_}
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def scripts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> dict[str, Path]:
    """The script for each of the two commands, in a file."""
    call = caller(capsys)
    made = {}
    for program in completion.PROGRAMS:
        told = call("completion", "bash", "--for", program)
        assert (told.code, told.err) == (0, "")
        made[program] = tmp_path / f"{program}.bash"
        made[program].write_text(told.out)
    return made


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words, once it has said that it knows the command."""
    bash = ["bash", "--norc", "-c", COMPLETE, "bash", str(script), *words]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=60, check=False, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    said, *offered = done.stdout.splitlines()
    assert said.startswith("complete ")
    assert said.endswith(f" {words[0]}")
    return [word for word in offered if word]


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, Path]) -> None:
    """As somebody types them; a directory where one is wanted, and a file behind `--`."""
    place = scripts["ckptctl"].parent
    (place / "runs").mkdir()
    (place / "train.py").touch()
    ctl_script, own_script = scripts["ckptctl"], scripts["ckpt-supervise"]
    assert completed(ctl_script, "ckptctl", "pr") == ["prune"]
    assert set(completed(ctl_script, "ckptctl", "prune", "--ke")) == {"--keep", "--keep-every"}
    assert completed(ctl_script, "ckptctl", "log", "--level", "wa") == ["warning"]
    assert completed(ctl_script, "ckptctl", "log", "--event", "hang_s") == ["hang_suspected"]
    assert completed(ctl_script, "ckptctl", "ls", "--dir", "ru") == ["runs"]
    assert completed(ctl_script, "ckptctl", "verify", "tr") == ["train.py"]
    assert completed(ctl_script, "ckptctl", "completion", "") == list(completion.SHELLS)
    assert completed(own_script, "ckpt-supervise", "--on-h") == ["--on-hang"]
    assert set(completed(own_script, "ckpt-supervise", "--on-hang", "re")) == {"restart", "requeue"}
    assert completed(own_script, "ckpt-supervise", "--dir", "ru") == ["runs"]
    assert completed(own_script, "ckpt-supervise", "--keep", "3", "--", "tr") == ["train.py"]


def test_every_command_is_completed(capsys: pytest.CaptureFixture[str], scripts: dict[str, Path]) -> None:
    """What `ckptctl --help` lists, and every option of the table."""
    with pytest.raises(SystemExit):
        ctl.main(["--help"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ") and line[4:5].isalpha()}
    assert set(completed(scripts["ckptctl"], "ckptctl", "")) == listed - {"COMMAND"}
    options = {f"--{spec.name}" for spec in config.SPECS}
    assert options <= set(completed(scripts["ckpt-supervise"], "ckpt-supervise", "--"))


def test_the_words_that_are_offered_are_taken() -> None:
    """For each option of ckpt-supervise whose values are offered."""
    specs = {spec.name: spec for spec in config.SPECS}
    for name, words in completion.VALUES.items():
        for word in words:
            specs[name].read(word)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_has_a_script_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """zsh and tcsh by what names the commands; no directory is asked for."""
    call: Any = caller(capsys)
    for program in completion.PROGRAMS:
        told = call("completion", shell, "--for", program)
        assert told.code == 0
        assert program in told.out
    with pytest.raises(SystemExit) as ended:
        ctl.main(["completion", "dos"])
    assert ended.value.code == 2


def test_shtab_is_imported_for_this_command_only() -> None:
    """No other one waits for it."""
    ls = "from ckpt_supervisor.ctl.main import main; main(['ls', '--dir', '/nowhere'])"
    words = f"import sys; {ls}; print('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
