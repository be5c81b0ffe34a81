"""Real runs without Slurm, looked back at: `ckptctl timeline` and `ckptctl why` name the cause, and lose what the trainer lost.

Owns: starts of the toy that end in different ways, and what the toy itself has counted. Must not: know how a journal is read.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ckpt_supervisor.adapters.journal import read_lines

from tests.support.run import SUPERVISE, environment, eventually, toy

CTL = (sys.executable, "-m", "ckpt_supervisor.ctl")
BOUND_S = 60


RAISES = """\
import sys, time
import ckpt_client as ckpt
log = open(sys.argv[1], "a", buffering=1)
def save(place, step):
    (place / "state").write_text(str(step))
for index in ckpt.steps(100, save=save, load=lambda place: None):
    if index == 37:
        raise ValueError("loss is nan")
    time.sleep(0.01)
    print("step", index + 1, file=log)
"""


class Runs:
    """Starts in one directory, one after the other, and the toy's own log of all of them."""

    def __init__(self, place: Path) -> None:
        self.dir = place / "ckpt"
        self.log = place / "toy.log"
        self.starts = 0

    def start(self, *options: str, toy_words: tuple[object, ...] = ()) -> subprocess.Popen[bytes]:
        """A supervised toy with a save of every 10 steps."""
        self.starts += 1
        words = toy("--steps", 100_000, "--step-ms", 20, "--log", self.log, *toy_words)
        argv = [*SUPERVISE, "--dir", str(self.dir), "--every-steps", "10", *options, "--", *words]
        return subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def steps(self) -> list[int]:
        """Every step that the toy has done, in order, of all starts."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("step ")]

    def wait(self, event: str, least: int = 1, **fields: object) -> None:
        """Until the newest start's journal has so many of these lines."""

        def found() -> bool:
            paths = sorted((self.dir / "journal").glob(f"*-{self.starts}-0.jsonl"))
            lines = [line for path in paths for line in read_lines(path)]
            same = [line for line in lines if line["event"] == event and all(line.get(k) == v for k, v in fields.items())]
            return len(same) >= least

        eventually(found, f"{least} lines {event} of start {self.starts}")

    def asked(self, *words: str) -> dict[str, Any]:
        """What ckptctl says, as JSON."""
        argv = [*CTL, *words, "--dir", str(self.dir), "--json"]
        asked = subprocess.run(argv, env=environment(), capture_output=True, check=False, timeout=BOUND_S)
        assert asked.returncode == 0, asked.stderr
        found: dict[str, Any] = json.loads(asked.stdout)
        return found


def repeated(steps: list[int]) -> int:
    """How many steps were done again."""
    return len(steps) - len(set(steps))


def test_a_signal_a_kill_and_a_crash_are_named_and_lose_what_the_toy_lost(tmp_path: Path) -> None:
    """Three starts; the steps that the toy has done twice are those that are told as lost, or the least of them."""
    runs = Runs(tmp_path)
    first = runs.start()
    runs.wait("commit", 2)
    first.send_signal(signal.SIGTERM)
    assert first.wait(BOUND_S) == 75
    second = runs.start()
    runs.wait("commit", 2)
    eventually(lambda: runs.steps()[-1] % 10 > 4, "some steps after the last save")
    second.kill()
    second.wait(BOUND_S)
    last = runs.start(toy_words=("--steps", runs.steps()[-1] + 30, "--exit-code", "3"))
    assert last.wait(BOUND_S) == 3
    attempts = runs.asked("timeline")["attempts"]
    assert [one["cause"] for one in attempts] == ["signal", "lost without a word", "training failed"]
    assert attempts[0]["lost_steps"] == 0
    assert attempts[1]["lost_steps"] <= repeated(runs.steps()), "it is told as far as a line tells of it"
    assert attempts[1]["lost_is_least"]
    assert attempts[2]["lost_steps"] <= runs.steps()[-1] % 10
    why = runs.asked("why", "--no-slurm")
    assert (why["cause"], why["code"]) == ("training failed", 3)
    assert runs.asked("why", "--no-slurm", "--attempt", "0#2")["cause"] == "lost without a word"


def test_a_run_that_is_at_it_is_told_as_that(tmp_path: Path) -> None:
    """Its process is seen: nothing is lost, and nothing is to be explained."""
    runs = Runs(tmp_path)
    child = runs.start()
    try:
        runs.wait("commit")
        (one,) = runs.asked("timeline")["attempts"]
        assert (one["is_running"], one["cause"], one["lost_steps"]) == (True, None, 0)
        assert runs.asked("why", "--no-slurm")["change"] == ""
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(BOUND_S) == 75


def test_steps_lost_by_an_exception_are_those_that_the_trainer_did_again(tmp_path: Path) -> None:
    """It raises after 37 steps, once more after a restart in place, and is not started a third time: 7 and 7 are lost."""
    runs = Runs(tmp_path)
    program = tmp_path / "raises.py"
    program.write_text(RAISES)
    argv = [*SUPERVISE, "--dir", str(runs.dir), "--every-steps", "10", "--restarts", "3", "--", sys.executable, str(program)]
    ended = subprocess.run([*argv, str(runs.log)], env=environment(), capture_output=True, check=False, timeout=BOUND_S)
    assert ended.returncode == 1, ended.stderr
    (one,) = runs.asked("timeline")["attempts"]
    assert (one["cause"], one["restarts"], one["reached_step"]) == ("training failed", 1, runs.steps()[-1])
    assert one["lost_steps"] == repeated(runs.steps()) + runs.steps()[-1] % 10 == 14
    assert one["reached_is_exact"]
    assert "loss is nan" in runs.asked("why", "--no-slurm")["detail"]
