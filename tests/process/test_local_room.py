"""A small disk: what is said early, what goes for the next save, and what never does. A tmpfs is mounted, which takes root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lasting import lasting, let_go
from tests.support.run import TOY, Run, eventually, supervised, trained

FOREVER = ("--steps", 1_000_000)
BALLAST = ("--ballast-mb", 4)
"""Makes each checkpoint 4.2 MB large."""


def mounted(place: Path, size: str) -> None:
    """A small file system there."""
    assert os.geteuid() == 0, "mounting a small file system takes root"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """DIR is a link to a small file system of the size that the test asks for (field case 112)."""
    volume = tmp_path / "volume"
    mounted(volume, request.param)
    try:
        (volume / "run").mkdir()
        (tmp_path / "ckpt").symlink_to(volume / "run")
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(volume)], check=True)


ROOM = {"1.5": "6500k", "2.5": "10700k", "3.5": "15000k"}
"""How many checkpoints there is room for."""


def room_for(count: str) -> pytest.MarkDecorator:
    """The size of `small`."""
    return pytest.mark.parametrize("small", [ROOM[count]], indirect=True, ids=[f"room for {count}"])


def room_lines(run: Run) -> list[str]:
    """What was said about room on stderr."""
    return [line for line in run.err.splitlines() if "room for" in line or "no room" in line]


def assert_full_disk_failed(run: Run, steps: list[int]) -> None:
    """Each of these saves was begun and given up, and the reason names the error.

    The journal is on the full disk itself, so that some of its lines may be missing, and are counted there.
    """
    begun = [int(line.split()[1]) for line in (run.files / "toy.log").read_text().splitlines() if line.startswith("saving ")]
    assert begun[-len(steps) :] == steps
    given_up = run.events("round_given_up")
    assert given_up
    assert {event["step"] for event in given_up} <= set(steps), run.story()
    assert all("[Errno 28] No space left on device" in event["reason"] for event in given_up)
    assert all(event["in_a_row"] == steps.index(event["step"]) + 1 for event in given_up)
    assert len(given_up) == len(steps) or run.events("journal_lines_lost")
    assert "a save was given up, training goes on: rank 0" in run.err
    assert is_tidy(run)


def is_tidy(run: Run) -> bool:
    """Nothing half is there, nor on its way out."""
    return list(run.dir.glob(".partial-*")) == list(run.dir.glob(".trash-*")) == []


@room_for("2.5")
def test_where_keep_does_not_fit_older_ones_go_before_the_save_and_every_save_succeeds(small: Path) -> None:
    """--keep 2 needs 3 at the peak: told early, once; each next save has room, and the newest one is there at every moment."""
    with trained(small, "--steps", 65, "--step-ms", 80, *BALLAST, options=["--every-steps", 10, "--keep", 2]) as run:
        assert run.code() == 0, run.story()
        assert [event["result"] for event in run.events("commit")] == ["committed"] * 6, run.story()
        assert run.events("round_given_up") == []
        assert run.intact()[-1] == 60
        assert run.toy_steps() == list(range(1, 66))
        states = [event["state"] for event in run.events("room")]
        assert states[:2] == ["short", "made"], run.story()
        assert set(states[2:]) == {"made"}
        assert [name for event in run.events("room") for name in event["removed"]][:4] == [
            f"step-{n:09d}" for n in (10, 20, 30, 40)
        ]
        first, second = room_lines(run)
        assert "room for 1 more checkpoint of 4.2 MB beside the 1 there; --keep 2 needs 3 in all" in first
        assert "removed step-000000010 beforehand" in second
        assert run.events("room")[0]["free_bytes"] < 10_700 * 1024, "that of the volume behind the link"


@room_for("2.5")
def test_a_start_says_that_there_is_too_little_room(small: Path) -> None:
    """What is there is known, so it is told before the first save (field case 109)."""
    with trained(small, "--steps", 15, *BALLAST, options=["--every-steps", 10, "--keep", 2]) as run:
        assert run.code() == 0, run.story()
    with trained(small, "--steps", 10_000, options=["--keep", 3]) as run:
        event = run.event("room")
        assert (event["state"], event["level"]) == ("short", "warning")
        assert "--keep 3 needs 4 in all" in event["text"]
        assert run.events("round_begun") == []


@room_for("2.5")
def test_what_was_resumed_from_does_not_go_for_room_and_training_goes_on(small: Path) -> None:
    """The first save fits, no other does: each fails for ENOSPC, its half is removed, both older ones stand (field case 109)."""
    with trained(small, "--steps", 15, *BALLAST, options=["--every-steps", 10]) as run:
        assert run.code() == 0, run.story()
    with lasting(small, "--steps", 65, "--step-ms", 20, *BALLAST, options=["--every-steps", 10, "--keep", 1]) as run:
        assert let_go(run, lambda: is_tidy(run), "the half of the last save is gone") == 0, run.story()
        assert run.intact() == run.steps() == [10, 20]
        assert_full_disk_failed(run, [30, 40, 50, 60])
        (line,) = room_lines(run)
        assert "of the 1 older ones too few may go (resumed from" in line
        assert "free some space, or the next save will fail" in line
        assert run.toy_steps()[-55:] == list(range(11, 66))


@room_for("1.5")
def test_with_keep_1_the_only_one_survives_any_number_of_failed_saves(small: Path) -> None:
    """Nothing is removed before the next one is committed, and no number of failures changes that (field case 93)."""
    with lasting(small, "--steps", 95, *BALLAST, options=["--every-steps", 10, "--keep", 1]) as run:
        assert let_go(run, lambda: is_tidy(run), "the half of the last save is gone") == 0, run.story()
        assert run.intact() == run.steps() == [10]
        assert_full_disk_failed(run, list(range(20, 100, 10)))
        assert "step-000000010 is the only checkpoint and stays" in run.err
        assert "3 saves in a row were given up, and step 10 is the newest checkpoint" in run.err
        assert sum(path.stat().st_size for path in run.dir.glob("step-*/*")) < 5_000_000


@room_for("1.5")
def test_a_last_save_that_finds_the_disk_full_is_tried_once_more_and_named(small: Path) -> None:
    """76, the older one stands, and the last line says that it was for want of space."""
    with trained(small, *FOREVER, *BALLAST) as run:
        run.reached(5)
        run.signal(signal.SIGUSR2)
        step = run.event("commit")["step"]
        run.reached(step + 5)
        run.signal(signal.SIGTERM)
        assert run.code() == 76, run.story()
        assert run.intact() == run.steps() == [step]
        assert "No space left on device" in run.err.splitlines()[-1]


@room_for("3.5")
def test_a_last_save_that_finds_the_disk_full_has_room_made_for_its_second_try(small: Path) -> None:
    """Somebody else has filled the disk since: the half is removed, the older of two goes, and the second try is committed."""
    with trained(small, *FOREVER, *BALLAST, "--save-ms", 2_000, options=["--keep", 2]) as run:
        run.reached(5)
        for count in (1, 2):
            run.signal(signal.SIGUSR2)
            eventually(lambda count=count: len(run.events("round_committed")) == count, "a save")  # type: ignore[misc]
        first, second = (event["step"] for event in run.events("commit"))
        (run.dir / "somebody-elses").write_bytes(bytes(6_000_000))
        run.reached(second + 5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        third = max(run.intact())
        assert run.intact() == [second, third]
        assert third > second
        assert f"removed step-{first:09d} beforehand" in run.err


@room_for("1.5")
def test_three_saves_in_a_row_that_never_become_final_are_told(small: Path) -> None:
    """Rank 1 hangs and says nothing, rank 0 saves: the count is told and the older one stands (field case 122)."""
    argv = [sys.executable, str(TOY), "--no-torch", "--log", str(small / "toy.log"), *map(str, FOREVER)]
    words = " ".join(argv)
    command = ["sh", "-c", f"RANK=0 WORLD_SIZE=2 {words} & RANK=1 WORLD_SIZE=2 {words}; wait"]
    with supervised(small, command, "--every", "200ms", "--save-timeout", "500ms", "--keep", "1") as run:
        step = run.event("commit")["step"]
        stuck = next(event["rank_pid"] for event in run.events("rank_hello") if event["rank"] == 1)
        os.kill(stuck, signal.SIGSTOP)
        run.warned("3 saves in a row were given up, and step [0-9]+ is the newest checkpoint")
        run.event("round_given_up", in_a_row=3)
        newest = run.events("commit")[-1]["step"]
        assert newest >= step
        assert newest in run.intact()
        os.kill(stuck, signal.SIGKILL)
        run.signal(signal.SIGTERM)
        run.code()  # Only a supervisor that ends takes what is below its shell with it.
