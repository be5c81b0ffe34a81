"""ckptctl repair: latest, quarantine and sweeping; no checkpoint is ever deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.store.layout import keep_name

from tests.support.ctl_stage import caller, committed, flip_a_bit, names


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def disorder(root: Path) -> None:
    """Good 10 and 20; damaged 30, 40, 50, 60 of each kind; foreign 70; a partial, trash, a mark, and somebody's things."""
    for step in range(10, 80, 10):
        committed(root, step)
    (root / "step-000000030" / "state.pt").unlink()
    os.truncate(root / "step-000000040" / "state.pt", 1_499)
    flip_a_bit(root / "step-000000050" / "state.pt")
    shutil.copy(root / "step-000000020" / store.MANIFEST, root / "step-000000060" / store.MANIFEST)
    (root / "step-000000070" / store.MANIFEST).unlink()
    (root / store.partial_name(80, 1, 1)).mkdir()
    (root / store.trash_name(5, 1, 0)).mkdir()
    (root / "best").mkdir()
    (root / "step-12").mkdir()
    (root / keep_name(10)).touch()


def test_repair_puts_a_directory_in_order_and_deletes_no_checkpoint(call: Any, tmp_path: Path) -> None:
    """Each kind of damage is put aside with its reason, latest leads to the newest intact one, the rest is left alone."""
    disorder(tmp_path)
    told = call("repair", "--dir", tmp_path)
    assert told.code == 0, told.err
    said = dict(line.split(": ", 1) for line in told.lines[:-1])
    assert said["latest"] == "pointed to step-000000020: it said step-000000070"
    for step, verdict in ((30, "missing"), (40, "truncated"), (50, "corrupt"), (60, "mixed")):
        epoch = 2 if step == 60 else step // 10
        assert said[store.step_name(step)].startswith(f"renamed to {store.damaged_name(step, epoch, 0)}: {verdict}: "), step
    assert said["step-000000070"].startswith("left: foreign: ")
    assert said[store.partial_name(80, 1, 1)] == "removed: left by a start that is over"
    assert said[store.trash_name(5, 1, 0)] == "removed: left by an interrupted removal"
    assert told.lines[-1] == "7 changes; 2 of 7 checkpoints intact, every byte read"
    assert names(tmp_path) == [
        *(store.damaged_name(step, epoch, 0) for step, epoch in ((30, 3), (40, 4), (50, 5), (60, 2))),
        keep_name(10), "best", "latest", "step-000000010", "step-000000020", "step-000000070", "step-12",
    ]  # fmt: skip
    assert (tmp_path / store.damaged_name(40, 4, 0) / "state.pt").stat().st_size == 1_499
    again = call("repair", "--dir", tmp_path)
    assert (again.code, again.lines[-1]) == (0, "nothing to repair; 2 of 3 checkpoints intact, every byte read")


def test_repair_dry_run_says_the_same_and_changes_nothing(call: Any, tmp_path: Path) -> None:
    """The same actions on the same names."""
    disorder(tmp_path)
    before = names(tmp_path)
    planned = call("repair", "--dry-run", "--dir", tmp_path, "--json")
    assert planned.code == 0
    assert call("repair", "--dry-run", "--dir", tmp_path).lines[-1].startswith("7 changes would be made; ")
    assert names(tmp_path) == before
    done = call("repair", "--dir", tmp_path, "--json")
    assert [(one["name"], one["action"]) for one in planned.values] == [(one["name"], one["action"]) for one in done.values]
    assert {one["dry_run"] for one in planned.values} == {True}
    assert list(done.values[0]) == ["name", "action", "became", "reason", "dry_run"]


def test_foreign_ones_are_put_aside_only_when_told_so(call: Any, tmp_path: Path) -> None:
    """A directory without a manifest may be somebody's whole checkpoint."""
    disorder(tmp_path)
    told = call("repair", "--quarantine-foreign", "--dir", tmp_path)
    assert told.code == 0
    assert store.damaged_name(70, 0, 0) in names(tmp_path)
    assert (tmp_path / store.damaged_name(70, 0, 0) / "state.pt").stat().st_size == 1500


def test_nothing_intact_is_1_and_latest_stays_as_it_is(call: Any, tmp_path: Path) -> None:
    """What was put aside is still there to be looked at, and a start finds it."""
    flip_a_bit(committed(tmp_path, 10) / "state.pt")
    told = call("repair", "--dir", tmp_path)
    assert told.code == 1
    assert told.lines[0] == "latest: left: there is no intact checkpoint to point to"
    assert names(tmp_path) == [store.damaged_name(10, 1, 0), "latest"]
    assert (tmp_path / "latest").readlink() == Path("step-000000010")


def test_a_latest_that_is_gone_dangling_or_elsewhere_is_made_anew(call: Any, tmp_path: Path) -> None:
    """Field case 95: nothing is decided by it, but people and scripts follow it."""
    committed(tmp_path, 10)
    latest = tmp_path / "latest"
    for target, said in ((None, "it was not there"), ("step-000000099", "it said step-000000099"), ("/etc", "it led elsewhere")):
        latest.unlink()
        if target is not None:
            latest.symlink_to(target)
        told = call("repair", "--dir", tmp_path)
        assert (told.code, told.lines[0]) == (0, f"latest: pointed to step-000000010: {said}")
        assert latest.readlink() == Path("step-000000010")
    latest.unlink()
    latest.write_text("step-000000009\n")  # as on a file system without links
    assert call("repair", "--dir", tmp_path).lines[0].endswith("it said step-000000009")


def test_a_latest_that_is_somebodys_is_left_alone(call: Any, tmp_path: Path) -> None:
    """A directory or a file of that name that we did not write is not replaced."""
    committed(tmp_path, 10)
    latest = tmp_path / "latest"
    latest.unlink()
    latest.mkdir()
    told = call("repair", "--dir", tmp_path)
    assert (told.code, told.lines[0]) == (1, "latest: failed: is not a link or pointer of ours")
    latest.rmdir()
    latest.write_bytes(b"notes\n" * 10_000)
    assert call("repair", "--dir", tmp_path).code == 1
    assert latest.stat().st_size == 60_000


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user may write to (pytest's own are closed to others)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_nobody(*words: object) -> subprocess.CompletedProcess[str]:
    """ckptctl by a user from whom a mode can hide something; root reads everything."""
    code = (
        "import contextlib, io, os, sys\n"
        "from ckpt_supervisor.ctl import main as ctl\n"
        "with contextlib.redirect_stderr(io.StringIO()): ctl.main(['ls', '--dir', '/none'])\n"  # what is imported late
        "if os.getuid() == 0: os.setuid(65534)\n"
        "sys.exit(ctl.main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_what_could_not_be_looked_at_is_left_and_is_3(public: Path) -> None:
    """It may be whole: "could not look" is neither damage nor absence, for repair, prune, keep and show."""
    for step in (10, 20, 30):
        committed(public, step)
    path = public / "step-000000030"
    path.chmod(0)
    before = names(public)
    try:
        done = as_nobody("repair", "--dir", public)
        assert done.returncode == 3
        assert "step-000000030: left: unknown: " in done.stdout
        assert "it may be whole, try again when the disk answers" in done.stdout
        assert names(public) == before
        assert as_nobody("keep", 30, "--dir", public).returncode == 3
        assert as_nobody("show", 30, "--dir", public).returncode == 3
        done = as_nobody("prune", "--keep", "1", "--dry-run", "--dir", public)
        assert done.stdout.startswith("stays            30          -  not intact: never pruned, and does not count\n")
        public.chmod(0)
        for words in (["ls"], ["repair"], ["prune"], ["keep", "20"], ["show", "20"], ["latest"], ["verify"]):
            done = as_nobody(*words, "--dir", public)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), (words, done)
    finally:
        public.chmod(0o777)
        path.chmod(0o755)


def test_a_directory_that_may_not_be_written_to_is_told_by_name(public: Path) -> None:
    """Each change that could not be made is a line and a 1; what is there stays."""
    disorder(public)
    (public / keep_name(10)).unlink()
    public.chmod(0o755)
    before = names(public)
    done = as_nobody("repair", "--dir", public)
    assert done.returncode == 1
    assert done.stdout.count("Permission denied") == 7
    assert names(public) == before
    done = as_nobody("prune", "--keep", "1", "--dir", public)
    assert (done.returncode, names(public)) == (1, before)
    done = as_nobody("keep", "20", "--dir", public)
    assert (done.returncode, names(public)) == (1, before)


def test_a_partial_of_a_later_epoch_is_left_and_a_dry_run_says_so_too(call: Any, tmp_path: Path) -> None:
    """Somebody may still commit it; both say the same."""
    committed(tmp_path, 10)
    name = store.partial_name(20, 99, 1)
    (tmp_path / name).mkdir()
    for words in ([], ["--dry-run"]):
        told = call("repair", *words, "--dir", tmp_path)
        assert (told.code, f"{name}: left: epoch 99 is newer than the holder's" in told.lines) == (0, True), told.lines
    assert (tmp_path / name).is_dir()
