"""Periodic checkpoints, what is kept of them, and what the next start makes of what it finds."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path

import pytest
from ckpt_supervisor import store

from tests.support.lasting import lasting, let_go
from tests.support.run import Run, committed, eventually, supervised, toy, trained

FOREVER = ("--steps", 1_000_000)


def flip_a_bit(path: Path) -> None:
    """Damage that only reading every byte finds."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_steps_saves_at_multiples_and_keep_keeps_the_newest(tmp_path: Path) -> None:
    """The seed's `--every-steps N --keep 3`: never at 0, nothing between, training goes on, the oldest ones go."""
    with lasting(tmp_path, "--steps", 65, options=["--every-steps", 10, "--keep", 3]) as run:
        pruned = lambda: [name for event in run.events("pruned") for name in event["removed"]]  # noqa: E731 - asked twice
        assert let_go(run, lambda: len(pruned()) >= 3, "three are pruned") == 0, run.story()
        assert [event["step"] for event in run.events("commit")] == [10, 20, 30, 40, 50, 60]
        assert run.intact() == run.steps() == [40, 50, 60]
        assert str((run.dir / "latest").readlink()) == "step-000000060"
        assert pruned() == [f"step-{n:09d}" for n in (10, 20, 30)]
        assert run.toy_steps() == list(range(1, 66))
        assert {event["kind"] for event in run.events("round_begun")} == {"periodic"}
        assert run.err == ""


def test_every_saves_by_time(tmp_path: Path) -> None:
    """The time between two saves is at least what was asked for, and not much more than a save longer."""
    with trained(tmp_path, *FOREVER, options=["--every", "400ms"]) as run:
        eventually(lambda: len(run.events("commit")) >= 3, "three periodic saves")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        begun = [event["mono_ms"] for event in run.events("round_begun", kind="periodic")]
        assert all(after - before >= 400 for before, after in itertools.pairwise(begun)), begun
        assert run.intact()[-1] == run.toy_steps()[-1]


def test_the_checkpoint_resumed_from_is_never_pruned(tmp_path: Path) -> None:
    """With --keep 1 the one that this start came from stays beside the newest one."""
    committed(tmp_path / "ckpt", 5)
    with lasting(tmp_path, "--steps", 35, options=["--every-steps", 10, "--keep", 1]) as run:
        assert let_go(run, lambda: run.steps() == [5, 30], "the others are pruned") == 0, run.story()
        assert run.steps() == [5, 30]


def test_the_first_run_appends_nothing_and_the_second_one_the_path(tmp_path: Path) -> None:
    """The same command line works for both (field case 59); the path is in the environment too."""
    command = ["sh", "-c", 'echo "env=$CKPT_SUPERVISE_RESUME_FROM"; exec "$@"', "sh", *toy("--log", tmp_path / "toy.log")]
    with supervised(tmp_path, [*command, *map(str, FOREVER)], "--resume-arg=--resume-from") as run:
        run.reached(5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert "env=\n" in run.out
        assert "resume-arg" not in run.out
        (step,) = run.intact()
    with supervised(tmp_path, [*command, "--steps", str(step + 2)], "--resume-arg=--resume-from") as run:
        assert run.code() == 0, run.story()
        path = run.dir / f"step-{step:09d}"
        assert f"env={path}\n" in run.out
        assert run.said(rf"^resume-arg {re.escape(str(path))} rank 0")
        assert run.event("command_started")["command"][-2:] == ["--resume-from", str(path)]
        assert run.said(rf"^ready pid \d+ at {step} ")


@pytest.mark.parametrize("there", ["nothing", "empty", "leftovers"])
def test_a_directory_without_checkpoints_starts_from_scratch(tmp_path: Path, there: str) -> None:
    """Missing, empty, or with half-written leftovers, which are swept: nothing is appended (field case 59)."""
    place = tmp_path / "a" / "b" / "ckpt"
    if there != "nothing":
        place.mkdir(parents=True)
    if there == "leftovers":
        partial = place / store.partial_name(7, 1, 1)
        partial.mkdir()
        (partial / "state.pt").write_bytes(b"half")
        (place / "attempt").write_text("half a line")
        (place / ".attempt-000000003").write_text("")
    # It lasts until they are gone: the end of a command waits for no sweep.
    script = f'echo "args=$*"; while ls -d {place}/.partial-* > /dev/null 2>&1; do sleep 0.05; done'
    with supervised(tmp_path, ["sh", "-c", script, "sh"], "--resume-arg=--resume-from", directory=place) as run:
        assert run.code() == 0, f"leftovers are not swept{run.story()}"
        assert run.out == "args=\n"
        assert list(place.glob(".partial-*")) == []


def test_the_newest_intact_one_is_chosen_and_what_was_passed_over_is_named(tmp_path: Path) -> None:
    """A flipped bit, a missing file, no manifest: the one before is taken, with a word for each on stderr and in the journal."""
    place = tmp_path / "ckpt"
    for step in (90, 100, 110, 120):
        committed(place, step)
    flip_a_bit(place / "step-000000120" / "toy-00000.json")
    (place / "step-000000110" / "toy-00000.json").unlink()
    (place / "step-000000100" / "manifest.json").unlink()
    with trained(tmp_path, "--steps", 92) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 90 ")
        lines = run.err.splitlines()
        assert [line.split(": ")[:3] for line in lines] == [
            ["ckpt-supervise", "passed over step-000000120", "corrupt"],
            ["ckpt-supervise", "passed over step-000000110", "missing"],
            ["ckpt-supervise", "passed over step-000000100", "foreign"],
            ["ckpt-supervise", "resuming from step 90"],
        ]
        told = [event["text"] for event in [*run.events("passed_over"), *run.events("resuming")]]
        assert told == [line.removeprefix("ckpt-supervise: ") for line in lines]
        assert run.steps() == [90, 100, 110, 120], "a look deletes nothing"


def test_with_only_damaged_checkpoints_the_start_is_refused(tmp_path: Path) -> None:
    """76, the command is not started, nothing is deleted; `--allow-restart-from-scratch` is the way to say that it is meant."""
    place = tmp_path / "ckpt"
    for step in (100, 110):
        flip_a_bit(committed(place, step) / "toy-00000.json")
    with supervised(tmp_path, ["touch", str(tmp_path / "started")]) as run:
        assert run.code() == 76, run.story()
        assert not (tmp_path / "started").exists()
        assert "none is intact" in run.err
        assert "--allow-restart-from-scratch" in run.err
        assert run.events("refused")
        assert run.steps() == [100, 110]
    with trained(tmp_path, "--steps", 3, options=["--allow-restart-from-scratch"]) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 0 ")
        assert run.toy_steps() == [1, 2, 3]


def test_a_damaged_checkpoint_of_the_same_step_is_put_aside_not_kept(tmp_path: Path) -> None:
    """Training passes the damaged step again: the new one takes the name, the damaged one keeps its bytes under another."""
    place = tmp_path / "ckpt"
    committed(place, 5)
    flip_a_bit(committed(place, 10) / "toy-00000.json")
    with trained(tmp_path, "--steps", 12, options=["--every-steps", 10]) as run:
        assert run.code() == 0, run.story()
        assert run.intact() == [5, 10]
        assert "put aside" in run.event("commit", step=10)["reason"]
        assert [path for path in place.iterdir() if "damaged" in path.name]


def test_restarts_start_the_command_again_in_place_from_the_checkpoint(tmp_path: Path) -> None:
    """Training fails at its end each time: N starts more, each from the newest checkpoint, then its own status."""
    with trained(tmp_path, "--steps", 15, "--exit-code", 7, options=["--every-steps", 10, "--restarts", 2]) as run:
        assert run.code() == 7, run.story()
        started = run.events("command_started")
        assert [event["restart"] for event in started] == [0, 1, 2]
        assert [event["resume_step"] for event in started] == [-1, 10, 10]
        assert run.toy_steps() == [*range(1, 16), *range(11, 16), *range(11, 16)]
        assert len(run.journals()) == 1
        assert run.err.count("starting it again in place") == 2
        assert run.err.index("starting it again in place (1 of 2)") < run.err.index("resuming from step 10")
        assert "(2 of 2)" in run.err


def test_a_restart_helps_a_command_that_fails_once_and_a_notice_after_it_saves(tmp_path: Path) -> None:
    """It failed before it attached; started again it trains, and is saved as ever."""
    command = ["sh", "-c", 'test "$CKPT_SUPERVISE_RESTART" = 1 || exit 3; exec "$@"', "sh"]
    with supervised(tmp_path, [*command, *toy("--log", tmp_path / "toy.log", *FOREVER)], "--restarts", 5) as run:
        run.reached(5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.events("command_exited")[0]["code"] == 3
        assert run.intact() == [run.toy_steps()[-1]]


def test_a_killed_trainer_is_started_again_with_a_new_process_for_the_same_rank(tmp_path: Path) -> None:
    """The rank's new process is let in although the table has an old one of the same number."""
    with trained(tmp_path, *FOREVER, options=["--every-steps", 10, "--restarts", 1]) as run:
        run.event("commit", step=10)
        first = run.toy_pid()
        os.kill(first, signal.SIGKILL)
        second = eventually(lambda: [e["rank_pid"] for e in run.events("rank_hello") if e["rank_pid"] != first], "a second rank")[
            0
        ]
        seen = len(run.events("commit"))
        eventually(lambda: len(run.events("commit")) > seen, "a periodic save of the second process")
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.events("rank_refused") == []
        assert run.event("rank_left")["rank"] == 0
        assert second != first
        assert run.intact()[-1] == run.toy_steps()[-1]


def test_two_runs_never_share_a_directory(tmp_path: Path) -> None:
    """The second start is refused with 2 and says who is there; the first one is not disturbed."""
    with trained(tmp_path, *FOREVER, options=["--every-steps", 10]) as run:
        run.event("commit", step=10)
        with supervised(tmp_path / "other", ["true"], directory=run.dir) as other:
            assert other.code() == 2, other.err
            assert f"process {run.pid}" in other.err
            assert "give each run a directory of its own" in other.err
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
    with supervised(tmp_path / "other", ["true"], directory=run.dir) as other:
        assert other.code() == 0, other.err


def test_each_start_has_a_journal_of_its_own_and_ckptctl_reads_them_all(tmp_path: Path) -> None:
    """One file per start, none truncated; times rise; every line has the identity that tells the starts apart."""
    for _ in range(3):
        with supervised(tmp_path, ["true"]) as run:
            assert run.code() == 0, run.story()
    paths = run.journals()
    assert len(paths) == 3
    assert len({path.stat().st_ino for path in paths}) == 3
    for path in paths:
        assert re.fullmatch(r"local-.*-0-local-\d+-0\.jsonl", path.name)
    lines = run.events()
    assert lines[0]["event"] == "command_started"
    assert lines[-1]["event"] == "exit"
    stamps = [datetime.fromisoformat(line["ts"].replace("Z", "+00:00")) for line in lines]
    assert stamps == sorted(stamps)
    with supervised(tmp_path / "ctl", [sys.executable, "-m", "ckpt_supervisor.ctl", "log", "--dir", str(run.dir)]) as ctl:
        assert ctl.code() == 0
        assert ctl.out.count("command started") == 3


def test_verify_structure_commits_by_sizes_and_reads_every_byte_before_it_is_resumed_from(tmp_path: Path) -> None:
    """`--verify structure` says so in the manifest; the next start checks in full, and finds what was damaged since."""
    with trained(tmp_path, *FOREVER, options=["--verify", "structure", "--every-steps", 10]) as run:
        run.event("commit", step=20)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert {event["mode"] for event in run.events("verified")} == {"structure"}
        newest = run.steps()[-1]
        kept = store.scan(run.dir)
        assert {candidate.manifest.verified for candidate in kept if candidate.manifest} == {"structure"}
    with trained(tmp_path, "--steps", newest + 1, options=["--verify", "structure"]) as run:
        assert run.code() == 0, run.story()
        assert store.scan(run.dir)[0].manifest is not None
        assert next(c.manifest.verified for c in store.scan(run.dir) if c.step == newest and c.manifest) == "full", run.story()


def test_verify_readback_reads_from_the_disk_and_says_what_that_cost(tmp_path: Path) -> None:
    """`--verify readback` is a full check with a line about its bytes, its time and how much of it the disk gave."""
    with trained(tmp_path, *FOREVER, options=["--verify", "readback", "--every-steps", 10]) as run:
        run.event("commit", step=20)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert {event["mode"] for event in run.events("verified")} == {"full"}
        costs = {event["round"]: event for event in run.events("readback")}
        for verified in run.events("verified"):
            cost = costs[verified["round"]]
            assert cost["bytes"] == verified["bytes"] > 0
            assert cost["ms"] >= 0
            assert "gb_per_s" in cost
            assert "disk_bytes" in cost  # Of a file system in memory there is no disk to read from.
    with trained(tmp_path, "--steps", run.steps()[-1] + 1, options=["--verify", "readback"]) as run:
        assert run.code() == 0, run.story()


def test_the_last_checkpoint_is_found_when_latest_is_gone_or_wrong(tmp_path: Path) -> None:
    """The symlink is a convenience, never the source of truth."""
    place = tmp_path / "ckpt"
    committed(place, 5)
    committed(place, 50)
    (place / "latest").unlink()
    (place / "latest").symlink_to("step-000000005")
    with trained(tmp_path, "--steps", 51) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 50 ")
    shutil.rmtree(place / "step-000000050")
    (place / "latest").unlink()
    with trained(tmp_path, "--steps", 6) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 5 ")


def test_a_run_that_is_over_resumes_to_nothing(tmp_path: Path) -> None:
    """All steps are in the checkpoint: no step is done again, and the end is the trainer's own."""
    committed(tmp_path / "ckpt", 50)
    with trained(tmp_path, "--steps", 50) as run:
        assert run.code() == 0, run.story()
        assert run.toy_steps() == []


def ready_at(run: Run) -> int:
    """The step that this start resumed at."""
    return int(run.said(r"^ready pid \d+ at (\d+) ")[1])


def test_a_chain_of_interruptions_loses_and_repeats_no_step(tmp_path: Path) -> None:
    """Five starts, each interrupted at another step: every step was done once, in order, across all of them."""
    at = 0
    for turn in range(5):
        with trained(tmp_path, *FOREVER, "--step-ms", 2) as run:
            assert ready_at(run) == at
            run.reached(at + 3 + 7 * turn)
            run.signal([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT][turn % 3])
            assert run.code() == 75, run.story()
            at = run.intact()[-1]
    steps = run.toy_steps()
    assert steps == list(range(1, at + 1))
