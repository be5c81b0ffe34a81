"""`ckptctl drill` without Slurm: every path on a toy trainer, and trainers that it has to find wanting (issue: row 9)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.drill.plan import NAMES
from ckpt_supervisor.linux import procfs

from tests.support.run import committed, environment, eventually, toy

CTL = (sys.executable, "-m", "ckpt_supervisor.ctl")
ENDLESS = ("--steps", 1_000_000, "--step-ms", 20)
SHORT = ("--kill-wait", "20s", "--grace", "20s", "--warning", "20s")
"""Shorter than on sites, and enough for a save where eight drills and other tests share two processors."""

OFTEN = "--every-steps 200 --lead 5s"
BOUND_S = 150

SCRATCH = """
import os, pathlib, time, ckpt_client
def save(directory, step):
    (pathlib.Path(directory) / "state").write_text(str(step))
hook = ckpt_client.attach(save=save)
for n in range(1, 100_000):
    time.sleep(2 if os.environ.get("CKPT_SUPERVISE_RESUME_FROM") else 1)
    hook.step(n)
"""
"""Takes nothing from the checkpoint that it is given. It is slower then: a late look is not to find it as far as it was."""


@contextlib.contextmanager
def drilled(place: Path, *words: object, command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """A running drill in this directory; killed on the way out."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "err").open("w") as err:
        process = subprocess.Popen(
            [*CTL, "drill", *map(str, words), "--", *command],
            cwd=place,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def verdicts(process: subprocess.Popen[str], place: Path) -> dict[str, dict[str, Any]]:
    """What it came to, by path."""
    said, _ = process.communicate(timeout=BOUND_S)
    found = {line["path"]: line for line in map(json.loads, said.splitlines())}
    assert found, (place / "err").read_text()
    return found


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with its size and time of change."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))}


def left_running(place: Path) -> list[str]:
    """Processes that have anything to do with this directory."""
    words = {pid: " ".join(procfs.words(pid)) for pid in procfs.of_user(os.getuid()) if pid != os.getpid()}
    return [line for line in words.values() if str(place) in line]


def test_nothing_is_left_running_by_a_command_that_empties_the_environment(tmp_path: Path) -> None:
    """A helper in a session of its own, with no variables: found by its parents, as slurmstepd finds it by its cgroup."""
    helper = f"env -i setsid sh -c 'sleep 3600; : {tmp_path}' & exec {shlex.join(toy(*ENDLESS, '--log', tmp_path / 'log'))}"
    words = (*SHORT, "--path", "nodeloss", "--options", OFTEN, "--json")
    with drilled(tmp_path, *words, command=["sh", "-c", helper]) as process:
        assert verdicts(process, tmp_path)["nodeloss"]["passed"]
    assert left_running(tmp_path) == []


def test_a_trainer_of_slow_steps_that_begins_from_scratch_does_not_pass(tmp_path: Path) -> None:
    """The first look at the next start comes before its first step is over, when it still says what it was given."""
    (tmp_path / "train.py").write_text(SCRATCH)
    words = (*SHORT, "--path", "nograce", "--options", OFTEN, "--json")
    with drilled(tmp_path, *words, command=[sys.executable, "train.py"]) as process:
        found = verdicts(process, tmp_path)["nograce"]
    told = re.fullmatch(r"was handed step (\d+) to go on from, and began at step (\d+) at the latest", found["why"])
    assert told is not None, found
    assert not found["passed"]
    assert 2 <= int(told[2]) < int(told[1]), "two, unless the listener was stopped for longer than a step"


def test_every_path_passes_on_the_toy_and_nothing_else_is_touched(tmp_path: Path) -> None:
    """All eight, side by side: PASS, the bar's figures are there, and the user's own checkpoints are as they were."""
    committed(tmp_path / "checkpoints", 7)
    before = tree(tmp_path / "checkpoints")
    words = (*SHORT, "--side-by-side", 8, "--options", OFTEN, "--json")
    with drilled(tmp_path, *words, command=toy(*ENDLESS, "--log", tmp_path / "log")) as process:
        found = verdicts(process, tmp_path)
        assert {name: line["why"] for name, line in found.items() if not line["passed"]} == {}
        assert tuple(found) == NAMES
        assert process.returncode == 0
    for name in ("warning", "grace", "nograce", "limit"):
        line = found[name]
        assert line["lost_steps"] == 0
        assert line["requeued"]
        assert line["code"] == 75
        assert line["resumed_step"] == line["saved_step"] >= 2
        assert all(isinstance(line[f"{share}_ms"], int) for share in ("agree", "save", "verify", "commit", "leave"))
    assert found["cancel"]["code"] == 143
    assert not found["cancel"]["requeued"]
    assert found["hang"]["code"] == 76
    assert tree(tmp_path / "checkpoints") == before
    assert list(tmp_path.glob(".ckpt-drill-*")) == []
    assert left_running(tmp_path) == []


def test_a_crash_is_rehearsed_as_the_options_say(tmp_path: Path) -> None:
    """--restarts starts it again in place; without it the job ends with the trainer's code and a start by hand resumes."""
    words = (*SHORT, "--path", "crash", "--json", "--options")
    command = toy(*ENDLESS)
    with (
        drilled(tmp_path / "a", *words, "--every 1h --restarts 1", command=command) as in_place,
        drilled(tmp_path / "b", *words, "--every 1h", command=command) as ended,
    ):
        place, by_hand = verdicts(in_place, tmp_path / "a")["crash"], verdicts(ended, tmp_path / "b")["crash"]
    assert (place["passed"], place["code"]) == (True, None), place
    assert (by_hand["passed"], by_hand["code"], by_hand["requeued"]) == (True, 137, False), by_hand


def test_a_save_that_is_too_slow_for_the_site_is_found(tmp_path: Path) -> None:
    """Saving takes longer than KillWait: FAIL, with both numbers and what to do; nothing was begun that could not end."""
    words = ("--kill-wait", "6s", "--path", "nograce,cancel", "--side-by-side", 2, "--options", OFTEN, "--json")
    with drilled(tmp_path, *words, command=toy(*ENDLESS, "--save-ms", 8_000)) as process:
        found = verdicts(process, tmp_path)
        assert process.returncode == 1
    line = found["nograce"]
    assert not line["passed"]
    assert "not saved" in line["why"]
    assert line["needs_ms"] >= 8_000 > line["given_ms"] == 6_000
    assert f"a save takes {line['needs_ms'] / 1000:.1f} s" in line["advice"]
    assert "6.0 s" in line["advice"]
    assert line["lost_steps"] >= 0
    assert line["resumed_step"] >= 2
    assert found["cancel"]["passed"]
    assert any("a save takes" in note for note in found["cancel"]["notes"])


def test_trainers_that_ignore_requests_are_found(tmp_path: Path) -> None:
    """One that never attaches, one that never comes to a step boundary, one that goes on after it was told to leave."""
    words = ("--kill-wait", "8s", "--path", "nograce", "--json")
    deaf = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with (
        drilled(tmp_path / "a", *words, "--start-timeout", "3s", command=deaf) as never,
        drilled(tmp_path / "b", *words, "--start-timeout", "20s", command=toy("--step-ms", 600_000)) as stuck,
        drilled(tmp_path / "c", *words, "--kill-wait", "25s", command=toy(*ENDLESS, "--ignore-leave")) as stubborn,
    ):
        runs = zip((never, stuck, stubborn), ("a", "b", "c"), strict=True)
        found = [(verdicts(process, tmp_path / place)["nograce"], process.returncode) for process, place in runs]
    assert [(line["passed"], code) for line, code in found] == [(False, 1)] * 3
    assert "a rank to attach" in found[0][0]["why"]
    assert "ckpt.steps()" in found[0][0]["advice"]
    assert "step boundary" in found[1][0]["why"]
    assert "safe_point()" in found[1][0]["advice"]
    assert "after it was told to leave, and was ended" in found[2][0]["why"]
    assert "Preempted" in found[2][0]["advice"]


def test_a_trainer_that_begins_from_scratch_every_time_is_found(tmp_path: Path) -> None:
    """It saves well, and loads nothing: the next start is at a step before the checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, threading, ckpt_client as ckpt\n"
        "pause = 0.3 if os.environ.get('CKPT_SUPERVISE_RESUME_FROM') else 0.1  # A late look does not find it as far again.\n"
        "def save(directory, step):\n    (directory / 'x').write_text(str(step))\n"
        "hook = ckpt.attach(save=save)\n"
        "for n in range(1, 10**6):\n    threading.Event().wait(pause)\n    hook.step(n)\n"
    )
    words = (*SHORT, "--path", "nograce", "--json")
    with drilled(tmp_path, *words, command=[sys.executable, str(script)]) as process:
        line = verdicts(process, tmp_path)["nograce"]
    assert not line["passed"]
    assert "began at step" in line["why"]
    assert "ckpt.resume()" in line["advice"]


def test_a_command_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    """What it printed last stands in the reason."""
    command = [sys.executable, "-c", "raise SystemExit('no such data set')"]
    with drilled(tmp_path, "--path", "warning", "--json", command=command) as process:
        line = verdicts(process, tmp_path)["warning"]
    assert not line["passed"]
    assert "no such data set" in line["why"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(tmp_path: Path, number: int) -> None:
    """No process, no scratch directory, 130."""
    with drilled(tmp_path, "--path", "warning", "--start-timeout", "100s", command=toy("--step-ms", 600_000)) as process:
        eventually(lambda: "step boundary" in (tmp_path / "err").read_text(), "the trainer has attached")
        (root,) = tmp_path.glob(".ckpt-drill-*")
        assert left_running(root)
        process.send_signal(number)
        process.communicate(timeout=BOUND_S)
        assert process.returncode == 130
    assert not root.exists()
    assert left_running(root) == []


def test_files_are_kept_when_asked_for(tmp_path: Path) -> None:
    """--keep-files leaves checkpoints, journal and output where it said, and the scratch place may be chosen."""
    (tmp_path / "place").mkdir()
    words = (*SHORT, "--path", "nodeloss", "--keep-files", "--scratch", tmp_path / "place", "--options", OFTEN)
    began = time.time()
    with drilled(tmp_path, *words, command=toy(*ENDLESS)) as process:
        said, _ = process.communicate(timeout=BOUND_S)
        assert process.returncode == 0, said
    (root,) = (tmp_path / "place").glob(".ckpt-drill-*")
    assert list((root / "nodeloss" / "checkpoints").glob("step-*"))
    assert (root / "nodeloss" / "output").stat().st_mtime >= began - 1
    assert "nodeloss  PASS" in said
