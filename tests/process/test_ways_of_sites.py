"""What differs from site to site and from start to start: signals, names of devices, directories named after the time."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.run import eventually, supervised, toy, trained

FOREVER = ("--steps", 1_000_000)


@pytest.mark.parametrize("devices", ["GPU-6d7a3f21-11c4", "MIG-0ddba11", "0,3", ""])
def test_the_names_of_devices_are_passed_on_and_never_kept(tmp_path: Path, devices: str) -> None:
    """A requeued job is given other ones (field case 137): nothing of this start's is in what the next one reads."""
    show = "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['ROCR_VISIBLE_DEVICES']], flush=True)"
    env = {"CUDA_VISIBLE_DEVICES": devices, "ROCR_VISIBLE_DEVICES": devices}
    command = ["sh", "-c", f'{sys.executable} -c "{show}" && exec "$@"', "sh"]
    with supervised(tmp_path, [*command, *toy("--steps", 25)], "--every-steps", 10, env=env) as run:
        assert run.code() == 0, run.story()
        assert f"{[devices, devices]}\n" in run.out
        assert run.intact() == [10, 20]
        kept = [path for path in run.dir.rglob("*") if path.is_file() and not path.is_symlink()]
        assert len(kept) >= 5, "two checkpoints with their manifests, and a journal"
        names = [b"VISIBLE_DEVICES", *([devices.encode()] if "-" in devices else [])]
        # The journal has the command line as it was given, which is a person's own.
        assert [path for path in kept if path.suffix != ".jsonl" and any(name in path.read_bytes() for name in names)] == []
        assert all(devices not in str(event) for event in run.events()) or "-" not in devices


SIGNALS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN + 1]


def name_of(number: int) -> str:
    """As it is written in an option."""
    return "RTMIN+1" if number == signal.SIGRTMIN + 1 else signal.Signals(number).name.removeprefix("SIG")


@pytest.mark.parametrize("number", SIGNALS, ids=name_of)
def test_any_signal_of_a_site_can_mean_save_and_leave(tmp_path: Path, number: int) -> None:
    """As --notice-signal (field case 148); the trainer below neither sees it nor dies of it."""
    save = "USR1" if number == signal.SIGUSR2 else "USR2"
    with trained(tmp_path, *FOREVER, options=["--notice-signal", name_of(number), "--save-signal", save]) as run:
        run.reached(3)
        run.signal(number)
        assert run.code() == 75, run.story()
        assert run.intact() == [run.toy_steps()[-1]]


@pytest.mark.parametrize("number", [n for n in SIGNALS if n not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)], ids=name_of)
def test_any_signal_that_does_not_mean_the_end_can_mean_save_and_go_on(tmp_path: Path, number: int) -> None:
    """As --save-signal (field case 148)."""
    notice = "USR2" if number == signal.SIGUSR1 else "USR1"
    with trained(tmp_path, *FOREVER, options=["--save-signal", name_of(number), "--notice-signal", notice]) as run:
        run.reached(3)
        run.signal(number)
        step = run.event("commit")["step"]
        run.reached(step + 2)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.intact()[0] == step


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_signal_that_always_means_the_end_is_refused_as_one_to_go_on_after(tmp_path: Path, name: str) -> None:
    """Never a save at which the site's kill is then waited for."""
    with supervised(tmp_path, ["true"], "--save-signal", name) as run:
        assert run.code() == 2, run.story()
        assert "--save-signal" in run.err
        assert name in run.err


def test_a_run_directory_named_after_the_time_is_found_again(tmp_path: Path) -> None:
    """The trainer makes a new one in each start (field case 58): what it saves there is copied to DIR, which stays the same."""
    log = tmp_path / "toy.log"
    # The clock, for what matters: a new name in each start.
    script = f'd="runs/$(ls runs 2>/dev/null | wc -l)-$$"; mkdir -p "$d"; exec "$@" --save-elsewhere "$d" --log {log}'
    begin = ["sh", "-c", script, "sh", *toy()]
    with supervised(tmp_path, [*begin, *map(str, FOREVER)], "--resume-arg=--resume-from") as run:
        run.reached(5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        (step,) = run.intact()
    with supervised(tmp_path, [*begin, "--steps", str(step + 4)], "--resume-arg=--resume-from") as run:
        assert run.code() == 0, run.story()
        place = run.dir / f"step-{step:09d}"
        assert place.is_absolute()
        assert run.said(rf"^resume-arg {re.escape(str(place))} rank 0")
        assert run.said(rf"^ready pid \d+ at {step} ")
        assert len(list((tmp_path / "runs").iterdir())) == 2
    assert run.toy_steps() == list(range(1, step + 5))


def test_a_relative_directory_is_one_place_wherever_the_command_goes(tmp_path: Path) -> None:
    """What the command is given is absolute, so that it may change its directory first (field case 58)."""
    show = 'cd / && echo "at $CKPT_SUPERVISE_DIR."'
    with supervised(tmp_path, ["sh", "-c", show], directory=Path("ckpt")) as run:
        assert run.code() == 0, run.story()
        assert f"at {tmp_path / 'ckpt'}." in run.out


def test_a_trainer_that_saves_elsewhere_and_says_nothing_is_told_so(tmp_path: Path) -> None:
    """Its own file outside of DIR is none of ours: the exit names what is missing, and is not 75 (field case 58)."""
    mine = tmp_path / "own.pt"
    code = (
        f"import pathlib, signal; pathlib.Path({str(mine)!r}).write_text('weights'); print('saved', flush=True); signal.pause()"
    )
    with supervised(tmp_path, [sys.executable, "-c", code]) as run:
        run.said("^saved")
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
        line = eventually(lambda: run.events("exit"), "the exit")[-1]["line"]
        assert "no rank had attached yet" in line
        assert "needs --adopt PATTERN" in line
        assert "there is no checkpoint" in line
        assert os.fspath(mine) not in line
