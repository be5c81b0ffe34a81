"""A disk that is full, over its quota or broken at any system call of a save: the older checkpoint stands, the partial goes.

Real full disks are small file systems in memory, filled to every page; the other faults are strace's.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    CommitFailed,
    Committed,
    Verdict,
    discard,
    newest_intact,
    parse_partial,
    parse_trash,
    partial_name,
    scan,
    step_name,
    sweep,
    take_epoch,
    verify_checkpoint,
)

from tests.support import store_faults, store_saver, syscalls
from tests.support.run import trained
from tests.support.store_faults import EPOCH, STEP
from tests.support.store_saver import JOB

PAGE = 4096
PARTS = 3 * PAGE
PROGRAM = Path(store_faults.__file__)
COUNTS = {"write": 7, "fsync": 8, "close": 20, "mkdir": 5, "rename": 4}
"""More than a save makes of each; the last ones must come through untouched, which the test checks."""


def with_one(root: Path) -> None:
    """Step 1, committed, by the epoch that goes on."""
    root.mkdir(exist_ok=True)
    assert take_epoch(root, JOB, 0, "0").epoch == EPOCH
    assert isinstance(store_saver.save(root, 1, EPOCH), Committed)


def leftovers(root: Path) -> list[str]:
    """What is neither committed nor known."""
    names = [path.name for path in root.iterdir()]
    return [name for name in names if parse_partial(name) is not None or parse_trash(name) is not None]


def stands(root: Path, *steps: int) -> None:
    """One of these is chosen, and everything under a committed name is whole."""
    choice = newest_intact(root)
    assert choice.chosen is not None
    assert choice.chosen.step in steps
    assert choice.passed_over == ()
    assert {verify_checkpoint(candidate.path).verdict for candidate in scan(root)} == {Verdict.INTACT}


def goes_on(root: Path) -> None:
    """With the fault gone the next save works."""
    outcome = store_saver.save(root, STEP + 1, EPOCH, round_=2)
    assert outcome == Committed(root / step_name(STEP + 1), None, "")


@pytest.mark.parametrize(
    ("error", "lasting"),
    [("ENOSPC", False), ("EDQUOT", False), ("EIO", False), ("ENOSPC", True)],
    ids=["ENOSPC", "EDQUOT", "EIO", "lasting"],
)
@pytest.mark.parametrize("call", COUNTS)
def test_a_save_survives_an_error_of_any_call(tmp_path: Path, call: str, error: str, lasting: bool) -> None:
    """ENOSPC, EDQUOT and EIO from each write, fsync, close, mkdir and rename: named, cleared up, the older stands (row S4)."""
    syscalls.need_strace()
    with_one(tmp_path / "0")
    numbers = range(1, COUNTS[call] + 1)
    for n in numbers:
        shutil.copytree(tmp_path / "0", tmp_path / str(n), symlinks=True)
    inject = store_faults.fault(call, error, lasting)
    calls, _ = syscalls.run(PROGRAM, [call, COUNTS[call], tmp_path], tmp_path / "trace", (call,), (inject,))
    words = [(tmp_path / f"{n}.said").read_text().split("|") for n in numbers]
    fired = sum(made.injected for made in calls)
    print(f"{call} {error}: {fired} fired, {sum(said[0] == 'Committed' for said in words)} committed all the same")
    for n, (kind, name, why, undone) in zip(numbers, words, strict=True):
        root = tmp_path / str(n)
        if kind == "Committed":
            stands(root, STEP)
        else:
            assert name == error or error_text(error) in why, (n, kind, name, why)
            stands(root, 1, STEP)
            assert undone or leftovers(root) == [], f"{n}: the partial stays and nobody says so"
            assert lasting or not undone, f"{n}: {undone}"
        assert sweep(root, EPOCH + 1).problems == ("another coordinator holds the directory",)
        goes_on(root)
    assert words[-1][0] == "Committed", "the count is too low: there are more calls"
    assert not words[-1][2], "the count is too low: there are more calls"
    assert fired >= COUNTS[call] - 3, "the count is too high: most savers meet no fault"


def error_text(name: str) -> str:
    """No space left on device."""
    return os.strerror(getattr(errno, name))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    syscalls.need("" if os.geteuid() == 0 else "to mount a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    yield from mounted(place, "size=1m")


def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs, for as long as it is used."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        # Lazily: somebody who looks at all processes here may be looking at one of its files just now.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path, left_pages: int) -> Path:
    """A file that leaves so many pages free."""
    filler = place / "filler"
    volume = os.statvfs(place)
    with filler.open("wb") as file:
        file.write(bytes((volume.f_bavail - left_pages) * PAGE))
    return filler


def save_on_full(root: Path) -> str:
    """A save that may not fit; "" if it did, else the errno's name. The partial is gone afterwards."""
    failed = ""
    try:
        outcome = store_saver.commit(root, *store_saver.write(root, STEP, EPOCH, part_bytes=PARTS))
    except OSError as error:
        failed = store_faults.name_of(error)
    else:
        assert isinstance(outcome, Committed | CommitFailed)
        failed = outcome.errno_name if isinstance(outcome, CommitFailed) else ""
    if failed:
        assert discard(root, partial_name(STEP, EPOCH, 1)) == ""
    return failed


def test_a_disk_that_fills_up_at_any_page_leaves_the_older_one(tmp_path: Path, small: Path) -> None:
    """From no page free to enough for all: ENOSPC, the partial is removed, and with space the save works (field case 109)."""
    root = tmp_path / "link"
    root.symlink_to(small)
    with_one(root)
    failed = 0
    for pages in range(64):
        filler = fill(small, pages)
        said = save_on_full(root)
        assert said in ("", "ENOSPC")
        stands(root, STEP if not said else 1)
        assert leftovers(root) == []
        filler.unlink()
        if not said:
            break
        failed += 1
        assert save_on_full(root) == ""
        shutil.rmtree(root / step_name(STEP))
    print(f"{failed} full disks")
    assert 5 < failed < 63


def test_a_disk_without_inodes_leaves_the_older_one(tmp_path: Path) -> None:
    """The same for names: no directory, no file, no manifest, no `latest` can be made."""
    syscalls.need("" if os.geteuid() == 0 else "to mount a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    for _ in mounted(place, "size=4m,nr_inodes=64"):
        with_one(place)
        failed = 0
        for spare in range(20):
            fillers = [place / f"filler-{k}" for k in range(os.statvfs(place).f_favail - spare)]
            for filler in fillers:
                filler.touch()
            said = save_on_full(place)
            assert said in ("", "ENOSPC")
            stands(place, STEP if not said else 1)
            assert leftovers(place) == []
            for filler in fillers:
                filler.unlink()
            if not said:
                break
            failed += 1
        assert 3 < failed < 19


def test_a_partial_lies_on_the_volume_of_the_directory(tmp_path: Path, small: Path) -> None:
    """DIR is a link to another volume: what is written lies there, so that a rename is possible (field case 112)."""
    root = tmp_path / "link"
    root.symlink_to(small)
    with_one(root)
    partial, _ = store_saver.write(root, STEP, EPOCH)
    assert partial.stat().st_dev == small.stat().st_dev != tmp_path.stat().st_dev
    assert partial.parent.samefile(small)


def test_a_full_disk_costs_the_save_and_not_the_training(tmp_path: Path) -> None:
    """The whole product on a disk with room for one: every step is done, a notice ends with 76, the first one stands."""
    syscalls.need("" if os.geteuid() == 0 else "to mount a small file system needs root")
    place = tmp_path / "ckpt"
    place.mkdir()
    for _ in mounted(place, "size=5m"):
        words = ("--steps", 1_000_000, "--ballast-mb", 3)
        with trained(tmp_path, *words, options=["--every-steps", 20, "--grace", "20s"]) as run:
            run.event("commit", step=20)
            # Not by the journal, which lies on the same disk and loses a line that begins a page.
            run.warned("a save was given up, training goes on: .*No space left on device")
            run.reached(70)
            run.signal(signal.SIGTERM)
            assert run.code() == 76, run.story()
            assert run.intact() == run.steps() == [20]
            assert leftovers(place) == []
            assert f"{step_name(20)} stands" in run.err, run.err
            print(run.err)
        with trained(tmp_path, "--steps", 25) as run:
            assert run.code() == 0, run.story()
            assert run.event("command_started")["resume_step"] == 20
