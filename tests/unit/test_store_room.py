"""Whether the next one fits: what volume and quota say, with nothing left behind, and what is removed for it."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.config import Options, read_options
from ckpt_supervisor.directory import upkeep
from ckpt_supervisor.directory.calm import Calm
from ckpt_supervisor.directory.upkeep import Spared, Upkeep
from ckpt_supervisor.text import size_text
from hypothesis import given, settings
from hypothesis import strategies as st

MB = 1_000_000


class Quota:
    """A file system with this much left for us, whatever its free bytes say."""

    def __init__(self, left_bytes: int, error: int = errno.EDQUOT) -> None:
        self.left_bytes = left_bytes
        self.error = error
        self.asked: list[int] = []

    def __call__(self, fd: int, count: int) -> int:
        """As fallocate(2) would answer."""
        assert os.fstat(fd).st_size == 0
        self.asked.append(count)
        return 0 if count <= self.left_bytes else self.error


def committed(root: Path, step: int, count: int = 1000, verified: store.Mode = "full") -> int:
    """A checkpoint of this step and size; the epoch that it was made in."""
    epoch = store.take_epoch(root, "1", 0, "0").epoch
    partial = store.make_partial(root, step, epoch, 1)
    (partial / "state").write_bytes(bytes(count))
    _, entries = store.check_files(partial, [store.Expected("state", count, "", 0)])
    manifest = store.Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="",
        verified=verified, files=entries,
    )  # fmt: skip
    assert isinstance(store.commit(root, partial, manifest), store.Committed)
    return epoch


def options(root: Path, keep: int = 2, every: int = 0) -> Options:
    """Options of a run in this directory."""
    return read_options(["--dir", str(root), f"--keep={keep}", f"--keep-every={every}", "--", "true"], {})


def steps(root: Path) -> list[int]:
    """Steps that are there, oldest first."""
    return sorted(one.step for one in store.scan(root))


def names_in(root: Path) -> set[str]:
    """Everything in a directory."""
    return {path.name for path in root.iterdir()}


def test_free_bytes_are_those_of_the_volume_behind_a_link(tmp_path: Path) -> None:
    """DIR is a link into another file system: that one's room counts (field case 112)."""
    (tmp_path / "ckpt").symlink_to("/proc")
    assert os.statvfs(tmp_path).f_bavail > 0
    room = store.look_at_room(tmp_path / "ckpt", 1)
    assert (room.free_bytes, room.fits) == (0, False)


def test_a_look_leaves_nothing_behind_and_writes_nothing(tmp_path: Path) -> None:
    """The real fallocate(2), on whatever file system this is: it fits, and the directory is as it was."""
    room = store.look_at_room(tmp_path, 10 * MB)
    assert (room.fits, room.refusal, room.usable_bytes) == (True, "", room.free_bytes)
    assert names_in(tmp_path) == set()


def test_where_a_file_needs_a_name_for_a_moment_it_is_gone_at_once(tmp_path: Path) -> None:
    """Without O_TMPFILE (NFS): while the bytes are asked for nothing of it is in the directory any more."""
    seen: list[set[str]] = []

    def reserve(fd: int, count: int) -> int:
        seen.append(names_in(tmp_path))
        assert os.fstat(fd).st_nlink == 0
        return errno.EDQUOT

    assert not store.look_at_room(tmp_path, 100, reserve).fits
    assert seen
    assert set().union(*seen) == set()


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_that_statvfs_does_not_see_is_found(tmp_path: Path, error: int) -> None:
    """The volume has plenty; what the quota leaves is told to a sixty-fourth of what is needed."""
    quota = Quota(40 * MB, error)
    room = store.look_at_room(tmp_path, 64 * MB, quota)
    assert (room.fits, room.refusal) == (False, errno.errorcode[error])
    assert 39 * MB <= room.usable_bytes <= 40 * MB
    assert room.free_bytes > 64 * MB
    assert len(quota.asked) <= 7
    assert max(quota.asked) == 64 * MB, "never more than one checkpoint: what is asked for is gone for others"


def test_no_more_is_asked_for_than_can_be_given_back_soon(tmp_path: Path) -> None:
    """Of a checkpoint that is larger than the bound only so much: a quota with less left is found, one with more is not."""
    bound, quota = 64 * 1024**3, Quota(64 * 1024**3)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200g", "tmpfs", str(tmp_path)], check=True)
    try:
        assert store.look_at_room(tmp_path, 2 * bound, quota).fits
        assert quota.asked == [bound]
        quota.left_bytes = 40 * 1024**3
        assert not store.look_at_room(tmp_path, 2 * bound, quota).fits
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EFBIG, errno.EIO, errno.EINTR])
def test_a_file_system_that_cannot_say_is_believed_by_its_free_bytes(tmp_path: Path, error: int) -> None:
    """No reserving there, or something else is wrong: that is no "full"."""
    room = store.look_at_room(tmp_path, 64 * MB, Quota(0, error))
    assert (room.fits, room.refusal) == (True, "")


def test_nothing_is_asked_for_where_the_volume_is_full_or_somebody_writes(tmp_path: Path) -> None:
    """More than there is, or None: free bytes only."""
    quota = Quota(0)
    free = store.free_bytes(tmp_path)
    assert not store.look_at_room(tmp_path, free * 2, quota).fits
    assert store.look_at_room(tmp_path, MB, None).fits
    assert store.look_at_room(tmp_path, 0, quota).fits
    assert quota.asked == []
    with pytest.raises(FileNotFoundError):
        store.look_at_room(tmp_path / "nowhere", 1)


def test_memory_is_never_asked_for() -> None:
    """On tmpfs what is reserved is memory that training may be short of."""
    assert os.path.ismount("/dev/shm"), "Linux has a tmpfs there"
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    try:
        assert store.reserve(fd, MB) == errno.EOPNOTSUPP
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with three checkpoints of 1 MB, which this process holds."""
    for step in (10, 20, 30):
        committed(tmp_path, step, MB)
    yield tmp_path


def care(root: Path, left_bytes: int, spared: Spared, keep: int = 2, every: int = 0) -> Upkeep:
    """The upkeep of this directory, with so much left of a quota."""
    holder = store.read_holder(root)
    assert holder is not None
    wanted = options(root, keep, every)
    return Upkeep(wanted, holder.epoch, lambda: spared, lambda: None, threading.Event(), Quota(left_bytes))


def test_with_room_for_the_next_and_all_that_keep_needs_nothing_is_said_or_done(place: Path) -> None:
    """`enough`, and three stay although --keep is 2: that is pruning's business."""
    space = care(place, 10 * MB, Spared()).make_room()
    assert (space.state, space.removed) == (upkeep.ENOUGH, ())
    assert steps(place) == [10, 20, 30]


def test_before_the_first_checkpoint_nobody_knows_how_large_one_is(tmp_path: Path) -> None:
    """Nothing to say."""
    store.take_epoch(tmp_path, "1", 0, "0")
    assert care(tmp_path, 0, Spared()).make_room() == upkeep.Space(upkeep.ENOUGH, "")


def test_when_the_next_one_does_not_fit_the_oldest_goes_beforehand(place: Path) -> None:
    """One is enough: one goes, with the figures (issue row 6: only while another intact one remains)."""
    space = care(place, MB // 2, Spared(read=frozenset({30})), keep=3).make_room()
    assert (space.state, space.removed) == (upkeep.MADE, ("step-000000010",))
    assert space.text == (
        "no room for the next checkpoint: it needs 1.1 MB, there are 486.9 kB of "
        f"{size_text(space.fields['free_bytes'])} (EDQUOT: a quota); removed step-000000010 beforehand; "
        "--keep 3 needs more space"
    )
    assert steps(place) == [20, 30]


def test_the_last_one_stays_whatever_there_is(place: Path) -> None:
    """Even where a fresh one would need all of it: asked again and again, the newest intact one remains (field case 93)."""
    look = care(place, MB // 2, Spared(read=frozenset({30})), keep=1)
    assert [look.make_room().state for _ in range(5)] == [upkeep.MADE, upkeep.MADE, upkeep.NONE, upkeep.NONE, upkeep.NONE]
    assert steps(place) == [30]
    assert "step-000000030 is the only checkpoint and stays; free some space" in look.make_room().text


def test_nothing_goes_if_it_would_not_be_enough(place: Path) -> None:
    """The next one is ten times as large: three small ones less would not help it."""
    committed(place, 40, 10 * MB)
    space = care(place, 2 * MB, Spared(read=frozenset({40}))).make_room()
    assert (space.state, steps(place)) == (upkeep.NONE, [10, 20, 30, 40])
    assert "of the 3 older ones too few may go" in space.text


def test_what_may_never_go_does_not_go_for_room_either(place: Path) -> None:
    """Resumed from, marked by a person, a milestone."""
    assert store.set_kept(place, 20, on=True) == ""
    assert care(place, MB // 2, Spared(protected=frozenset({10}), read=frozenset({30}))).make_room().state == upkeep.NONE
    assert store.set_kept(place, 20, on=False) == ""
    assert care(place, MB // 2, Spared(read=frozenset({30})), every=10).make_room().state == upkeep.NONE
    assert steps(place) == [10, 20, 30]


def test_before_an_older_one_goes_the_newest_is_known_to_be_whole(place: Path) -> None:
    """Not read by this run: it is read now. A flipped bit in it, and nothing is removed."""
    path = place / "step-000000030" / "state"
    path.write_bytes(bytes(MB - 1) + b"\1")
    space = care(place, MB // 2, Spared()).make_room()
    assert (space.state, steps(place)) == (upkeep.NONE, [10, 20, 30])
    assert "step-000000030 is not known to be whole (state" in space.text
    path.write_bytes(bytes(MB))
    assert care(place, MB // 2, Spared()).make_room().removed == ("step-000000010",)


def test_one_that_was_committed_on_its_structure_is_no_reason_to_remove_another(tmp_path: Path) -> None:
    """The newest fully verified one stays beside it."""
    committed(tmp_path, 10, MB)
    committed(tmp_path, 20, MB)
    committed(tmp_path, 30, MB, verified="structure")
    look = care(tmp_path, MB // 2, Spared())
    assert look.make_room().removed == ("step-000000010",)
    assert look.make_room().state == upkeep.NONE
    assert steps(tmp_path) == [20, 30]


def test_room_for_fewer_than_keep_needs_is_said_early(tmp_path: Path) -> None:
    """One there, --keep 3 needs four at the peak, and there is room for one more (field case 109)."""
    committed(tmp_path, 10, MB)
    look = care(tmp_path, MB, Spared(), keep=3)
    small = store.Room(needed_bytes=MB, free_bytes=MB * 3 // 2, usable_bytes=MB * 3 // 2)
    space = look.enough_for_all(store.scan(tmp_path), small)
    assert space.state == upkeep.SHORT
    assert space.text == (
        "room for 1 more checkpoint of 1.0 MB beside the 1 there; --keep 3 needs 4 in all: older ones will go sooner"
    )


def test_a_run_that_is_fenced_off_removes_nothing_for_room(place: Path) -> None:
    """A newer start holds the directory."""
    look = care(place, MB // 2, Spared(read=frozenset({30})))
    store.take_epoch(place, "1", 1, "0")
    assert look.make_room().removed == ()
    assert look.prune() == upkeep.Pruned((), ("another run holds the directory now",))
    assert steps(place) == [10, 20, 30]


def test_a_disk_that_does_not_answer_is_no_full_one(place: Path) -> None:
    """The directory is gone: nothing is known, nothing is removed."""
    look = care(place, MB // 2, Spared(read=frozenset({30})))
    place.rename(place.with_name("away"))
    try:
        assert look.make_room().state in (upkeep.UNKNOWN, upkeep.ENOUGH)
        assert look.prune().names == ()
    finally:
        place.with_name("away").rename(place)


def test_pruning_stops_where_a_save_begins_and_goes_on_after_it(tmp_path: Path) -> None:
    """Of many that may go only those are removed that were gone when the save began, until it is over."""
    for step in range(1, 31):
        committed(tmp_path, step)
    holder = store.read_holder(tmp_path)
    assert holder is not None
    calm, begun, asked = Calm(), threading.Event(), []

    def pause() -> None:
        asked.append(len(steps(tmp_path)))
        if len(asked) == 10:
            calm.put("saving", True)
            begun.set()
        calm.wait()

    look = Upkeep(options(tmp_path, keep=1), holder.epoch, Spared, pause, calm.over)
    lane = threading.Thread(target=look.prune, daemon=True)
    lane.start()
    assert begun.wait(60)
    there = steps(tmp_path)
    assert len(there) > 20
    assert calm.over.is_set()
    assert (steps(tmp_path), lane.is_alive()) == (there, True)
    calm.put("saving", False)
    lane.join(60)
    assert steps(tmp_path) == [30]


def test_what_is_learnt_while_pruning_waits_counts(tmp_path: Path) -> None:
    """During a save the one that it would have kept turned out to be damaged: the one before is not removed."""
    for step in (1, 2, 3, 4):
        committed(tmp_path, step)
    holder = store.read_holder(tmp_path)
    assert holder is not None
    known = [Spared()]
    asked: list[list[int]] = []

    def pause() -> None:
        asked.append(steps(tmp_path))
        if asked[-1] == [2, 3, 4]:
            known[:] = [Spared(protected=frozenset({2}), damaged=frozenset({4}))]

    look = Upkeep(options(tmp_path, keep=1), holder.epoch, lambda: known[0], pause, threading.Event())
    assert look.prune().names == ("step-000000001",)
    assert steps(tmp_path) == [2, 3, 4]


def test_a_mark_that_is_set_while_pruning_waits_counts(tmp_path: Path) -> None:
    """`ckptctl keep` beside a running prune."""
    for step in (1, 2, 3, 4):
        committed(tmp_path, step)
    holder = store.read_holder(tmp_path)
    assert holder is not None
    look = Upkeep(
        options(tmp_path, keep=1), holder.epoch, Spared, lambda: store.set_kept(tmp_path, 2, on=True), threading.Event()
    )
    assert look.prune().names == ("step-000000001", "step-000000003")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([store.FileEntry("a", n, "0" * 32, 0) for n in (0, 1, 4096, MB)]), min_size=1, max_size=4),
)
def test_what_is_needed_is_a_little_more_than_the_last_one(files: list[store.FileEntry]) -> None:
    """Never less than its bytes, and never far beyond."""
    manifest = store.Manifest(
        step=1,
        world_size=1,
        ranks=(0,),
        job="1",
        attempt=0,
        epoch=1,
        cause="",
        created_at="",
        verified="full",
        files=tuple(files),
    )
    total = manifest.total_bytes
    assert total + 4096 * len(files) < store.needed_for(manifest) <= total * 1.05 + 8192 * (len(files) + 2)


def test_calm_has_several_reasons_and_ends_with_the_last() -> None:
    """A choice and a save at once; the same reason twice is one."""
    calm = Calm()
    calm.wait()
    for reason, is_on, is_over in (
        ("a", True, True),
        ("a", True, True),
        ("b", True, True),
        ("a", False, True),
        ("b", False, False),
    ):
        calm.put(reason, is_on)
        assert calm.over.is_set() == is_over
    calm.wait()


def test_the_sweep_takes_the_runs_word_for_what_it_has_read(tmp_path: Path) -> None:
    """A removal that was cut off goes on without reading the newest one again, and one that nothing stands for comes back."""
    for step in (1, 2):
        committed(tmp_path, step)
    holder = store.read_holder(tmp_path)
    assert holder is not None
    saving = threading.Event()
    saving.set()
    (tmp_path / "step-000000001").rename(
        tmp_path / store.trash_name(1, store.read_manifest(tmp_path / "step-000000001").epoch, 0)
    )
    look = Upkeep(options(tmp_path, keep=1), holder.epoch, Spared, lambda: None, saving)
    assert "is left" in look.sweep().problems[0]
    look = Upkeep(options(tmp_path, keep=1), holder.epoch, lambda: Spared(read=frozenset({2})), lambda: None, saving)
    assert look.sweep().problems == ()
    assert steps(tmp_path) == [2]
