"""What goes wrong around a save: each is named in the journal, the older checkpoint stands, and the supervisor is out in time."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lasting import lasting, let_go
from tests.support.run import Run, committed, eventually, is_alive, supervised, trained

if TYPE_CHECKING:
    from collections.abc import Sequence

FOREVER = ("--steps", 1_000_000)
GRACE_S = 12.0
IN_TIME = ["--grace", f"{GRACE_S}s", "--leave-timeout", "300ms"]
"""The way out is short, so that a loaded machine has seconds to spare before the grace is over."""

LONG = ["--grace", "5m"]
"""Who waits this out has not left at once, however slow the machine is."""


def is_in_time(run: Run) -> bool:
    """Whether the last word came within the grace, by the supervisor's own clock: whoever looks may be late himself."""
    return bool(run.event("exit")["mono_ms"] - run.events("signal")[0]["mono_ms"] < GRACE_S * 1_000)


def older_checkpoint(place: Path) -> int:
    """The step of a checkpoint from an earlier run."""
    committed(place / "ckpt", 100)
    return 100


def leaves_stale_in_time(run: Run, older: int) -> dict[str, object]:
    """The notice is given; 76 within the grace, the older one stands, nothing half is left. Returns the given-up round."""
    run.signal(signal.SIGTERM)
    assert run.code() == 76, run.story()
    assert is_in_time(run), run.story()
    assert run.intact() == run.steps() == [older]
    assert str((run.dir / "latest").readlink()) == f"step-{older:09d}"
    assert f"step-{older:09d} stands" in run.err
    assert run.events("leaving")[-1]["outcome"] == "stale"
    given_up = run.events("round_given_up")[-1]
    assert str(given_up["reason"]) in run.err
    return given_up


FAULTS = [
    ("--kill-self-in-save", "rank_gone", "its process has ended", 1),
    ("--fail-save", "rank_failed", "No space left on device", 2),
    ("--hang-save", "rank_late", "the time for the save is over", 1),
    ("--stop-self-in-save", "rank_late", "the time for the save is over", 1),
]


@pytest.mark.parametrize(("knob", "event", "reason", "tries"), FAULTS, ids=[fault[0].strip("-") for fault in FAULTS])
def test_a_save_that_does_not_come_to_its_end_is_named(tmp_path: Path, knob: str, event: str, reason: str, tries: int) -> None:
    """The rank dies, raises, hangs or is stopped in the middle of writing (row 12); what raises is tried once more."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER, knob, options=IN_TIME) as run:
        run.reached(older + 5)
        given_up = leaves_stale_in_time(run, older)
        assert reason in str(given_up["reason"])
        named = run.events(event)[-1]
        assert (named["rank"], named["level"]) == (0, "warning")
        assert len(run.events("round_begun")) == tries
        assert not is_alive(run.toy_pid())
    assert_next_start_is_clean(tmp_path, older)


def assert_next_start_is_clean(place: Path, older: int) -> None:
    """The next start resumes from the older one and sweeps what the last one left."""
    with lasting(place, "--steps", older + 40) as run:
        assert let_go(run, lambda: not list(run.dir.glob(".partial-*")), "they are swept") == 0, run.story()
        assert run.events("command_started")[-1]["resume_step"] == older
        assert list(run.dir.glob(".partial-*")) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_trainer_that_somebody_ends_or_stops_in_mid_save_is_named(tmp_path: Path, number: signal.Signals) -> None:
    """From outside, while the file grows: gone, or late; its pid is in the journal, and nothing of it is left."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER, "--save-ms", 60_000, options=IN_TIME) as run:
        run.reached(older + 5)
        trainer = run.toy_pid()
        run.signal(signal.SIGTERM)
        run.event("rank_saving")
        os.kill(trainer, number)
        assert run.code() == 76, run.story()
        assert is_in_time(run), run.story()
        assert run.intact() == run.steps() == [older]
        event = run.events("rank_gone" if number == signal.SIGKILL else "rank_late", level="warning")[-1]
        assert event["rank"] == 0
        assert f"pid {trainer}" in str(run.events("round_given_up")[-1]["reason"])
        assert not is_alive(trainer)


def test_a_trainer_that_is_stopped_before_the_notice_holds_nobody(tmp_path: Path) -> None:
    """It answers no word at all: out in time, the older one stands, and it is ended although it cannot run."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER, options=IN_TIME) as run:
        run.reached(older + 5)
        os.kill(run.toy_pid(), signal.SIGSTOP)
        leaves_stale_in_time(run, older)
        assert not is_alive(run.toy_pid())


def test_a_trainer_that_died_before_the_notice_ends_the_run_with_its_own_status(tmp_path: Path) -> None:
    """No notice was in force: 137, and what was committed before stands."""
    with trained(tmp_path, *FOREVER, options=["--every-steps", 5]) as run:
        run.event("commit", step=5)
        os.kill(run.toy_pid(), signal.SIGKILL)
        assert run.code() == 137, run.story()
        # Which ones those are depends on how many saves there were until it was killed, and --keep is 3.
        committed_here = [event["step"] for event in run.events("commit", result="committed")]
        assert set(committed_here[-3:]) <= set(run.intact()), run.story()
        *before, last = run.err.splitlines()
        assert last == "ckpt-supervise: training failed by itself with status 137"
        died = " gone: |the command ended with status 137"
        assert all(re.search(rf"a save was given up.*({died})", line) for line in before)  # A periodic save it died in.


@pytest.mark.parametrize("delay_ms", [0, 10, 50, 200])
def test_a_notice_in_the_first_moments_leaves_at_once(tmp_path: Path, delay_ms: int) -> None:
    """From the moment that signals are handled on: nothing is lost, nothing outlives it, the older one stands (field case 22)."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER, "--startup-ms", 600_000, options=LONG) as run:
        eventually(lambda: catches_term(run.pid), "the supervisor handles signals", look_s=0.001)
        until = time.monotonic() + delay_ms / 1000
        eventually(lambda: time.monotonic() >= until, "the delay is over", look_s=0.001)
        leaves_at_once(run, older)
    assert_next_start_is_clean(tmp_path, older)


def test_a_notice_while_the_trainer_still_imports_leaves_at_once(tmp_path: Path) -> None:
    """No rank has attached: the budget is not waited out, the older one stands and is named, the import is ended (row 11)."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER, "--startup-ms", 600_000, options=LONG) as run:
        started = run.event("command_started")["command_pid"]
        leaves_at_once(run, older)
        assert f"no rank had attached yet); step-{older:09d} stands" in run.err
        assert not is_alive(started)


def leaves_at_once(run: Run, older: int) -> None:
    """A notice is given: 76 long before the grace is over."""
    run.signal(signal.SIGTERM)
    assert run.code() == 76, run.story()
    assert run.intact() == [older]
    assert "this save did not make it" in run.err
    assert "there is no checkpoint" not in run.err


def catches_term(pid: int) -> bool:
    """Whether this process has a handler for SIGTERM."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_command_that_never_attaches_is_ended_on_a_notice(tmp_path: Path) -> None:
    """Nobody can save: it and its children are told to end at once, 76, and the message says that there is no checkpoint."""
    with supervised(tmp_path, ["sh", "-c", "sleep 600 & echo child $!; wait"], *LONG) as run:
        child = int(run.said(r"^child (\d+)")[1])
        run.signal(signal.SIGUSR1)
        assert run.code() == 76, run.story()
        assert not is_alive(child)
        assert "no rank had attached yet); there is no checkpoint" in run.err
        assert run.event("command_asked")["why"] == "no rank had attached yet"


def test_a_periodic_save_that_fails_leaves_training_running(tmp_path: Path) -> None:
    """Every save raises: every step is done, the run ends with 0, each failure is in the journal, no half file stays."""
    with lasting(tmp_path, "--steps", 35, "--fail-save", options=["--every-steps", 10]) as run:
        assert let_go(run, lambda: not list(run.dir.glob(".partial-*")), "the halves are gone") == 0, run.story()
        assert run.toy_steps() == list(range(1, 36))
        assert [event["step"] for event in run.events("round_given_up")] == [10, 20, 30]
        assert all("No space left" in event["reason"] for event in run.events("rank_failed"))
        assert run.steps() == []
        assert list(run.dir.glob(".partial-*")) == []


def test_a_periodic_save_that_hangs_is_given_up_and_a_notice_still_gets_out(tmp_path: Path) -> None:
    """Nobody can end a trainer's own save: the round is over after --save-timeout, and a later notice leaves in time."""
    with trained(tmp_path, *FOREVER, "--hang-save", options=["--every-steps", 10, "--save-timeout", "1s", *IN_TIME]) as run:
        given_up = run.event("round_given_up")
        assert "the time for the save is over" in given_up["reason"]
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
        assert is_in_time(run), run.story()
        assert "there is no checkpoint" in run.err


def test_a_directory_that_vanishes_under_a_run_costs_the_save_and_nothing_else(tmp_path: Path) -> None:
    """Somebody moved DIR away: training goes on after the failed save; the run ends with 0."""
    with trained(tmp_path, "--steps", 300) as run:
        run.reached(5)
        run.event("rank_hello")
        run.dir.rename(tmp_path / "away")
        run.signal(signal.SIGUSR2)
        assert run.code() == 0, run.story()
        assert run.toy_steps() == list(range(1, 301))


def test_a_newer_start_fences_the_older_one_off(tmp_path: Path) -> None:
    """Another epoch on the disk, as after a node failure: the old coordinator's commit is refused, and it says so."""
    older = older_checkpoint(tmp_path)
    with trained(tmp_path, *FOREVER) as run:
        run.reached(older + 5)
        holder = run.dir / "attempt"
        text = holder.read_text()
        epoch = int(text.split('"epoch":')[1].split(",")[0])
        fresh = run.dir / "attempt.fresh"
        fresh.write_text(text.replace(f'"epoch":{epoch}', f'"epoch":{epoch + 1}'))
        fresh.rename(holder)
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
        assert run.events("commit")[-1]["result"] == "refused: a newer attempt owns the directory"
        assert run.intact() == [older]


def two_ranks(words: Sequence[str]) -> list[str]:
    """A shell command that runs the trainer twice, as ranks 0 and 1."""
    quoted = " ".join(words)
    return ["sh", "-c", f"RANK=0 WORLD_SIZE=2 {quoted} & RANK=1 WORLD_SIZE=2 {quoted}; wait"]


def toy_ranks(place: Path, *words: object) -> list[str]:
    """Two toys below one supervisor."""
    program = Path(__file__).resolve().parents[1] / "support" / "toy.py"
    argv = [sys.executable, str(program), "--no-torch", "--log", str(place / "toy.log"), *map(str, words)]
    return two_ranks(argv)


def test_two_ranks_save_one_step_together(tmp_path: Path) -> None:
    """Both write into one checkpoint of one step, whatever step each was at; the next start resumes both."""
    with supervised(tmp_path, toy_ranks(tmp_path, *FOREVER)) as run:
        eventually(lambda: len(run.events("rank_hello")) == 2, "both ranks have attached")
        run.reached(10)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        (step,) = run.intact()
        names = {path.name for path in (run.dir / f"step-{step:09d}").iterdir()}
        assert {"manifest.json", "toy-00000.json", "toy-00001.json"} <= names
    with supervised(tmp_path, toy_ranks(tmp_path, "--steps", step + 3)) as run:
        assert run.code() == 0, run.story()
        assert run.out.count(f" at {step} rank") == 2
        assert "RuntimeError" not in run.err


def test_one_of_two_ranks_that_dies_in_mid_save_fails_the_round_for_both(tmp_path: Path) -> None:
    """No checkpoint of one half: the dead rank is named, the other is released, 76."""
    with supervised(tmp_path, toy_ranks(tmp_path, *FOREVER, "--save-ms", 20_000), "--leave-timeout", "1s") as run:
        eventually(lambda: len(run.events("rank_hello")) == 2, "both ranks have attached")
        run.reached(5)
        run.signal(signal.SIGTERM)
        eventually(lambda: len(run.events("rank_saving")) == 2, "both ranks save")
        victim = next(event["rank_pid"] for event in run.events("rank_hello") if event["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        assert run.code() == 76, run.story()
        assert run.steps() == []
        assert run.events("rank_gone", level="warning")[0]["rank"] == 1
        assert run.events("round_given_up")[-1]["ranks"] == {"0": "saving", "1": "gone"}


def test_a_save_that_fails_with_nobody_at_stderr_leaves_training_running(tmp_path: Path) -> None:
    """The stack trace goes nowhere, as with a dead slurmstepd or a `tee` that has ended; that is no reason to end."""
    script = (
        "import ckpt_client as ckpt, os\n"
        "def save(directory, step): raise OSError('no space')\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 2)\n"
        "for i in ckpt.steps(60, save=save, load=print): pass\n"
        "print('all of them')\n"
    )
    with supervised(tmp_path, [sys.executable, "-c", script], "--every-steps", 20) as run:
        assert run.code() == 0
        assert run.out == "all of them\n"
        assert "no space" in run.events("round_given_up")[0]["reason"]
