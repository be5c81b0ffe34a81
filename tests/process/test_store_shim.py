"""File systems that lack something or fail now and then: no links, no directory sync, ESTALE, busy files, names seen late.

strace answers in place of the kernel, for all calls of a kind or for those about one path. What is not there on some file systems
and not used by the store, locks and hard links, is looked for in the recordings of test_store_replay.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    AlreadyThere,
    Committed,
    Verdict,
    check_epoch,
    newest_intact,
    point_latest,
    read_holder,
    scan,
    step_name,
    sweep,
    take_epoch,
    trash_name,
    verify_checkpoint,
)

from tests.support import store_saver, syscalls
from tests.support.run import SUPERVISE, environment, toy
from tests.support.store_saver import JOB, PART_BYTES
from tests.support.syscalls import Call

PROGRAM = Path(store_saver.__file__)
ROUNDS = int(os.environ.get("CKPT_TEST_ROUNDS", "25"))
NEVER_NEEDED = ("flock:error=ENOLCK", "link,linkat:error=EPERM")
POOR = ("symlink,symlinkat:error=EOPNOTSUPP", *NEVER_NEEDED)
"""What CIFS and some object mounts answer."""


@pytest.fixture(autouse=True)
def strace() -> None:
    """strace is here, or the test ends here."""
    syscalls.need_strace()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2, held by epoch 1."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    epoch = take_epoch(place, JOB, 0, "0").epoch
    for step in (1, 2):
        assert isinstance(store_saver.save(place, step, epoch), Committed)
    return place


def faulty(
    root: Path, program: str, inject: Sequence[str], only: Sequence[Path] = (), words: Sequence[object] = ()
) -> tuple[list[Call], list[str]]:
    """One program with these faults: the calls they were planted into, and its words. `only`: paths that they are about."""
    names = [name for fault in inject for name in fault.split(":")[0].split(",")]
    calls, out = syscalls.run(PROGRAM, [program, root, *words], root.parent / f"trace-{program}", names, inject, only)
    return [call for call in calls if call.injected], out.rstrip("\n").split("|")


@pytest.mark.parametrize("error", ["EOPNOTSUPP", "EPERM", "ENOSYS"])
def test_without_links_latest_is_a_small_file(root: Path, error: str) -> None:
    """The name and a line feed, by rename; the epoch's mark is a file too; with links again it is one (field case 113)."""
    inject = (f"symlink,symlinkat:error={error}", *NEVER_NEEDED)
    (root / "latest").unlink()
    point_latest(root, step_name(1))
    fired, said = faulty(root, "commit", inject, words=[1])
    assert said == ["Committed", ""]
    assert len(fired) == 1
    assert not (root / "latest").is_symlink()
    assert (root / "latest").read_text() == f"{step_name(3)}\n"
    assert {path.name for path in root.iterdir() if path.name.startswith(".latest")} == set()
    fired, _ = faulty(root, "take", inject)
    assert len(fired) == 2
    assert take_epoch(root, JOB, 2, "0").epoch == 4
    assert point_latest(root, step_name(3)) == ""
    assert str((root / "latest").readlink()) == step_name(3)


def test_the_whole_product_runs_on_a_poor_file_system(tmp_path: Path) -> None:
    """No links, no locks, no hard links: a run saves and is resumed, and nobody has asked for a lock (field cases 113, 114)."""
    base = [*SUPERVISE, "--dir", str(tmp_path / "ckpt"), "--every-steps", "10", "--"]
    for steps in (15, 25):
        out = tmp_path / f"trace-{steps}"
        words = syscalls.traced(out, ["symlink", "symlinkat", "link", "linkat", "flock", "fcntl"], POOR)
        argv = [*words, *base, *toy("--steps", steps, "--log", tmp_path / "log")]
        done = subprocess.run(argv, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        calls = list(syscalls.parsed(out))
        assert [call for call in calls if call.name in ("symlink", "symlinkat") and call.injected]
        locks = [call for call in calls if call.name == "flock" or (call.name == "fcntl" and "LK" in call.arguments[1])]
        assert [call for call in locks if str(tmp_path) in call.arguments[0]] == []
    assert "at 10 rank 0" in (tmp_path / "log").read_text()
    assert (tmp_path / "ckpt" / "latest").read_text() == f"{step_name(20)}\n"


@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_a_directory_that_cannot_be_synced_is_no_failure(root: Path, error: str) -> None:
    """Some file systems have no fsync of directories: committed all the same."""
    fired, said = faulty(root, "commit", [f"fsync:error={error}"], only=[root], words=[1])
    assert said == ["Committed", ""]
    assert len(fired) == 1


def test_a_directory_whose_sync_fails_is_not_said_to_be_safe(root: Path) -> None:
    """EIO is no lack but a fault: the commit says so; saved again, it is there and is synced."""
    fired, said = faulty(root, "commit", ["fsync:error=EIO"], only=[root], words=[1])
    assert said[0] == "CommitFailed"
    assert "EIO" in said[1]
    assert len(fired) == 1
    again = store_saver.save(root, 3, 1, round_=2)
    assert again == AlreadyThere(root / step_name(3), "")
    fired, said = faulty(root, "commit", ["fsync:error=EIO"], only=[root], words=[1])
    assert said[0] == "CommitFailed", "already there, but nobody has brought its name to the disk"


LOOKS = [
    ("openat", "step-000000002/state.pt", "ESTALE"),
    ("openat", "step-000000002/manifest.json", "ESTALE"),
    ("openat", "step-000000002", "EIO"),
    ("openat", "", "ESTALE"),
    ("getdents64", "", "EIO"),
    ("getdents64", "step-000000002/below", "EIO"),
    ("pread64,preadv,preadv2,read", "step-000000002/state.pt", "EIO"),
    ("pread64,preadv,preadv2,read", "step-000000002/manifest.json", "ESTALE"),
]


@pytest.mark.parametrize(
    ("call", "about", "error"), LOOKS, ids=[f"{error} {call.split(',')[0]} {about[-13:]}" for call, about, error in LOOKS]
)
def test_one_error_while_looking_is_not_the_end(root: Path, call: str, about: str, error: str) -> None:
    """Once: looked again, and nobody is the wiser. From then on: not known, never "not there" (field case 111)."""
    fired, said = faulty(root, "choose", [f"{call}:error={error}:when=1"], only=[root / about])
    assert said == ["2", "[]", "False", ""]
    assert 1 <= len(fired) <= 2, "once in each thread that looks"
    fired, said = faulty(root, "choose", [f"{call}:error={error}"], only=[root / about])
    assert said[:3] == (["1", "['unknown']", "True"] if about else ["-1", "[]", "True"])
    assert os.strerror(getattr(errno, error)) in said[3]
    assert 3 <= len(fired) <= 6, "looked again, with a bound"


COMMITS = [
    ("openat", "state.pt"), ("openat", "below"), ("openat", ""), ("getdents64", ""), ("getdents64", "below"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "about"), COMMITS)
def test_one_error_while_committing_is_looked_past(root: Path, call: str, about: str) -> None:
    """ESTALE at an open or a listing of what was just written: opened again; an fsync is never tried twice."""
    fired, said = faulty(root, "late", [f"{call}:error=ESTALE:when=1"], only=[partial_of(root) / about], words=[1])
    assert len(fired) == 1
    assert said == ["Committed", ""]


def partial_of(root: Path) -> Path:
    """A checked partial directory of step 3, which the program `late` commits."""
    partial, manifest = store_saver.write(root, 3, 1)
    store_saver.keep_for_later(root, manifest)
    return partial


@pytest.mark.parametrize("call", ["symlink,symlinkat", "rename,renameat,renameat2"])
def test_a_quota_that_ends_at_the_pointer_costs_the_pointer_only(root: Path, call: str) -> None:
    """Committed and told; the next start finds it by its name, and saving it again is a success (field case 102)."""
    fired, said = faulty(root, "commit", [f"{call}:error=EDQUOT"], only=[root / ".latest-new"], words=[1])
    assert len(fired) == 1
    assert said[0] == "Committed"
    assert "Disk quota exceeded" in said[1]
    assert str((root / "latest").readlink()) == step_name(2)
    assert newest_intact(root).chosen == scan(root)[0]
    assert store_saver.save(root, 3, 1, round_=2) == AlreadyThere(root / step_name(3), "")
    assert store_saver.save(root, 4, 1) == Committed(root / step_name(4), None, "")


def test_a_busy_file_leaves_the_rest_to_the_next_sweep(root: Path) -> None:
    """NFS keeps a removed file that is open as .nfs…: told, nothing breaks, and the space of the others is free at once."""
    trash = root / trash_name(1, 1, 0)
    fired, said = faulty(root, "remove", ["unlinkat:error=EBUSY"], only=[trash / "below"])
    assert fired
    assert f"{step_name(1)}: " in said[1]
    assert "still open" in said[1]
    assert [str(path.relative_to(trash)) for path in sorted(trash.rglob("*"))] == ["below", "below/rank-00001.pt"]
    assert newest_intact(root).chosen == scan(root)[0]
    assert [candidate.step for candidate in scan(root)] == [2]
    (trash / "below" / "rank-00001.pt").rename(trash / "below" / ".nfs000000000000002a00000001")
    epoch = take_epoch(root, JOB, 2, "0").epoch
    assert sweep(root, epoch).problems == ()
    assert not trash.exists()


def test_a_target_that_is_seen_late_is_not_overwritten(root: Path) -> None:
    """Another node has made it and this one's cache says "not there" at first: found by the next look, and it stays."""
    store_saver.save(root, 3, 1)
    inode = (root / step_name(3)).stat().st_ino
    inject = ["newfstatat,lstat,statx:error=ENOENT:when=1..2"]
    fired, said = faulty(root, "commit", inject, only=[root / step_name(3)], words=[1])
    assert len(fired) == 2
    assert said[0] == "AlreadyThere"
    assert (root / step_name(3)).stat().st_ino == inode


def test_four_committers_at_one_instant_all_succeed(root: Path) -> None:
    """Rounds of four processes with one step each: one has committed, the others find it there (field cases 96, 107)."""
    argv = [sys.executable, str(PROGRAM), "race", str(root), "1", str(ROUNDS)]
    done = subprocess.run(argv, env=syscalls.environment(), capture_output=True, text=True, timeout=150, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == ROUNDS
    for line in lines:
        words, ended = line.split("|")
        assert sorted(words.split()) == ["AlreadyThere:"] * 3 + ["Committed:"], line
        assert ended == "[0, 0, 0, 0]"
    assert {verify_checkpoint(candidate.path).verdict for candidate in scan(root)} == {Verdict.INTACT}
    assert str((root / "latest").readlink()) == step_name(9 + ROUNDS)
    assert [path.name for path in root.iterdir() if path.name.startswith((".partial", ".trash", ".damaged", ".latest"))] == []


def test_a_kill_between_the_two_steps_of_latest_leaves_the_old_one(root: Path) -> None:
    """SIGKILL before the rename: the old link is there and right, the scan finds the new one (field case 95)."""
    out = root.parent / "trace"
    words = syscalls.traced(out, ["rename"], ["rename:error=EIO:signal=KILL"], [root / ".latest-new"])
    argv = [*words, sys.executable, str(PROGRAM), "commit", str(root), "1"]
    done = subprocess.run(argv, env=syscalls.environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert str((root / "latest").readlink()) == step_name(2)
    for broken in ("as it is", "dangling", "damaged", "gone"):
        if broken == "dangling":
            point_latest(root, "step-000000077")
        if broken == "damaged":
            shutil.copytree(root / step_name(2), root / "step-000000001-copy")
            os.truncate(root / "step-000000001-copy" / "state.pt", PART_BYTES // 2)
            point_latest(root, "step-000000001-copy")
        if broken == "gone":
            (root / "latest").unlink()
        chosen = newest_intact(root).chosen
        assert chosen is not None
        assert chosen.step == 3, broken


def test_a_sweep_on_a_full_disk_gives_its_space_back(root: Path) -> None:
    """A new name can need a block that only the removal gives back: then the partial goes under its own."""
    left = partial_of(root)
    fired, _ = faulty(root, "sweep", ["rename,renameat,renameat2:error=ENOSPC"], only=[left])
    assert len(fired) == 1
    assert not left.exists()


def test_a_mark_that_cannot_be_seen_keeps_the_checkpoint(root: Path) -> None:
    """A look that fails is never "no mark": it has its name back, and that is told."""
    (root / ".keep-step-000000001").touch()
    fired, said = faulty(root, "remove", ["getdents64:error=EIO:when=4+"], only=[root])
    assert fired
    assert "Input/output error" in said[1]
    assert [candidate.step for candidate in scan(root)] == [2, 1]


def test_a_mark_of_a_start_that_cannot_be_read_is_not_nobodys(root: Path) -> None:
    """An earlier start's mark answers EIO: this one does not begin as if there were no holder."""
    (root / "attempt").unlink()
    fired, said = faulty(root, "take_and_tell", ["readlink,readlinkat:error=EIO"], only=[root / ".attempt-000000001"])
    assert len(fired) >= 1
    assert said == ["OSError", "Input/output error"]
    assert [path.name for path in root.glob(".attempt-*")] == [".attempt-000000001"], "a start that has failed holds nothing"


STARTS = [
    ("getdents64", "", "ESTALE"),
    ("openat", "", "ESTALE"),
    ("openat", "attempt", "ESTALE"),
    ("openat", ".attempt-000000002.new", "ESTALE"),
    ("pread64,preadv,preadv2,read", "attempt", "EIO"),
    ("rename,renameat,renameat2", ".attempt-000000002.new", "EIO"),
    ("fsync", "", "EIO"),
    ("unlink,unlinkat", ".attempt-000000001", "EBUSY"),
]


@pytest.mark.parametrize(("call", "about", "error"), STARTS, ids=[f"{row[2]} {row[0].split(',')[0]} {row[1]}" for row in STARTS])
def test_one_error_at_the_start_does_not_end_the_job(root: Path, call: str, about: str, error: str) -> None:
    """Looked again, or written again; what only tidies, and the last sync, refuse no start. No epoch is lost."""
    fired, _ = faulty(root, "take", [f"{call}:error={error}:when=1"], only=[root / about])
    assert len(fired) == 1
    holder = read_holder(root)
    assert holder is not None
    assert holder.epoch == 3
    assert [path.name for path in root.glob(".attempt-*")] == [".attempt-000000003"]


@pytest.mark.parametrize(("call", "about", "error"), STARTS[6:], ids=["fsync", "unlink"])
def test_what_never_can_be_tidied_or_synced_does_not_end_the_job(root: Path, call: str, about: str, error: str) -> None:
    """An old mark that stays, or a directory that cannot be synced: the start goes on, and the older one is fenced off."""
    fired, _ = faulty(root, "take", [f"{call}:error={error}"], only=[root / about])
    assert 1 <= len(fired) <= 6, "tried again, with a bound"
    assert [check_epoch(root, epoch) for epoch in (1, 2, 3)] == [False, False, True]


def test_a_disk_that_stays_away_ends_the_start_with_its_own_word(root: Path) -> None:
    """Never "nobody holds it": the looks have an end, and the mark is taken back."""
    fired, said = faulty(root, "take_and_tell", ["openat:error=ESTALE"], only=[root / "attempt"])
    assert 3 <= len(fired) <= 6
    assert said == ["OSError", os.strerror(errno.ESTALE)]
    assert [path.name for path in root.glob(".attempt-*")] == [".attempt-000000001"]


@pytest.mark.parametrize("call", ["newfstatat,stat,statx", "faccessat,faccessat2,access", "mkdir,mkdirat"])
def test_one_error_at_the_supervisors_own_looks_at_its_directory_does_not_end_the_job(root: Path, call: str) -> None:
    """Before it takes the directory it asks whether that is one and may be written: once ESTALE, and it looks again."""
    for path in root.glob("*attempt*"):
        path.unlink()
    out = root.parent / "trace-supervise"
    words = syscalls.traced(out, call.split(","), [f"{call}:error=ESTALE:when=1"], [root])
    argv = [*words, *SUPERVISE, "--dir", str(root), "--", "echo", "started"]
    done = subprocess.run(argv, env=environment(), cwd=root.parent, capture_output=True, text=True, timeout=60, check=False)
    assert any(line.injected for line in syscalls.parsed(out))
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
