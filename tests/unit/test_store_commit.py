"""A commit is one step: the new checkpoint whole, or the old state, and one word for each outcome."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import pytest
from ckpt_supervisor.store import (
    AlreadyThere,
    CommitFailed,
    Committed,
    Expected,
    Fenced,
    Manifest,
    Mode,
    Verdict,
    check_files,
    commit,
    discard,
    make_partial,
    newest_intact,
    partial_name,
    point_latest,
    promote,
    read_manifest,
    remove,
    scan,
    sweep,
    take_epoch,
    to_prune,
    verify_checkpoint,
)

FILES = {"state.pt": b"weights" * 1000, "below/rank-00001.pt": b"noise"}


def written(root: Path, epoch: int, step: int = 5, round_: int = 1, mode: Mode = "full") -> tuple[Path, Manifest]:
    """A partial directory that has been checked, and the manifest for it."""
    partial = make_partial(root, step, epoch, round_)
    for path, data in FILES.items():
        (partial / path).parent.mkdir(exist_ok=True)
        (partial / path).write_bytes(data)
    report, entries = check_files(partial, [Expected(path, len(data), "", 0) for path, data in FILES.items()], mode)
    assert report.verdict is Verdict.INTACT
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="",
        verified=mode, files=entries,
    )  # fmt: skip
    return partial, manifest


def names(root: Path) -> set[str]:
    """The names in DIR but for those of the fence."""
    return {path.name for path in root.iterdir() if "attempt" not in path.name}


def test_a_commit_leaves_the_checkpoint_and_latest(tmp_path: Path) -> None:
    """After a commit there is the step with its manifest and the link to it, and nothing else."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    partial, manifest = written(tmp_path, epoch)
    outcome = commit(tmp_path, partial, manifest)
    assert outcome == Committed(tmp_path / "step-000000005", None, "")
    assert names(tmp_path) == {"step-000000005", "latest"}
    assert str((tmp_path / "latest").readlink()) == "step-000000005"
    assert read_manifest(tmp_path / "step-000000005") == manifest
    assert verify_checkpoint(tmp_path / "step-000000005").verdict is Verdict.INTACT


def test_the_directory_may_be_a_link(tmp_path: Path) -> None:
    """A DIR that is a link to another volume takes, finds, prunes and sweeps checkpoints like any other."""
    (tmp_path / "scratch").mkdir()
    root = tmp_path / "checkpoints"
    root.symlink_to("scratch")
    epoch = take_epoch(root, "1", 0, "0").epoch
    for step in (5, 6):
        assert isinstance(commit(root, *written(root, epoch, step)), Committed)
    (old,) = to_prune(scan(root), 1, ())
    assert remove(old).names == ("step-000000005",)
    make_partial(root, 7, epoch - 1, 1)
    assert len(sweep(root, epoch).names) == 1
    assert names(root) == {"step-000000006", "latest"}
    assert newest_intact(root).passed_over == ()


@contextmanager
def recorded(calls: list[tuple[str, str]]) -> Iterator[None]:
    """Note each fsync, rename, symlink and open-for-writing of this thread with the name it is about, in order."""

    def on_event(frame: FrameType, event: str, function: object) -> None:
        name = getattr(function, "__name__", "")
        if event == "c_call" and name in ("fsync", "rename", "symlink"):
            local = frame.f_locals
            about = local.get("path") or local.get("self")
            calls.append((name, os.fspath(about) if isinstance(about, os.PathLike) else ""))

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_everything_is_synced_before_the_name_is_taken(tmp_path: Path) -> None:
    """Each file, the manifest, each directory, then the rename, then DIR, and only then latest (field case 74)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    partial, manifest = written(tmp_path, epoch)
    calls: list[tuple[str, str]] = []
    with recorded(calls):
        commit(tmp_path, partial, manifest)
    rename = calls.index(("rename", str(partial)))
    before, after = calls[:rename], calls[rename + 1 :]
    files = {("fsync", str(partial / path)) for path in FILES}
    assert set(before[:2]) == files
    assert before[2:] == [
        ("fsync", str(partial / "manifest.json")), ("fsync", str(partial / "below")), ("fsync", str(partial)),
    ]  # fmt: skip
    assert after[0] == ("fsync", str(tmp_path))
    assert [name for name, _ in after[1:]] == ["symlink", "rename"]


def test_an_intact_one_of_the_same_step_stays(tmp_path: Path) -> None:
    """The first save of a step wins, the second is dropped, and that is a success."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    commit(tmp_path, *written(tmp_path, epoch))
    inode = (tmp_path / "step-000000005").stat().st_ino
    assert commit(tmp_path, *written(tmp_path, epoch, round_=2)) == AlreadyThere(tmp_path / "step-000000005", "")
    assert (tmp_path / "step-000000005").stat().st_ino == inode
    assert names(tmp_path) == {"step-000000005", "latest"}


@pytest.mark.parametrize("how", ["flipped", "bare directory", "empty directory", "file", "link"])
def test_a_damaged_one_of_the_same_step_is_put_aside_and_kept(tmp_path: Path, how: str) -> None:
    """A step that was damaged can be saved again, and what was there is not deleted (field case 85)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    target = tmp_path / "step-000000005"
    (tmp_path / "elsewhere").mkdir()
    if how == "flipped":
        commit(tmp_path, *written(tmp_path, epoch))
        (target / "state.pt").write_bytes(bytes(7000))
    elif how == "bare directory":
        target.mkdir()
        (target / "state.pt").write_bytes(b"half")
    elif how == "empty directory":
        target.mkdir()
    elif how == "file":
        target.write_bytes(b"mine")
    else:
        target.symlink_to("elsewhere")
    (tmp_path / partial_name(5, epoch - 1, 9)).mkdir()
    outcome = commit(tmp_path, *written(tmp_path, epoch, round_=2))
    aside = tmp_path / f".damaged-step-000000005-{epoch}-0"
    assert outcome == Committed(target, aside, "")
    assert os.path.lexists(aside)
    assert verify_checkpoint(target).verdict is Verdict.INTACT
    assert (tmp_path / "elsewhere").is_dir()
    (target / "state.pt").write_bytes(b"damaged again")
    second = commit(tmp_path, *written(tmp_path, epoch, round_=3))
    assert second == Committed(target, tmp_path / f".damaged-step-000000005-{epoch}-1", "")
    assert os.path.lexists(aside)


def test_a_fenced_coordinator_changes_nothing(tmp_path: Path) -> None:
    """After another start has taken the directory the older one's commit is refused and names who holds it."""
    old = take_epoch(tmp_path, "1", 0, "0").epoch
    partial, manifest = written(tmp_path, old)
    holder = take_epoch(tmp_path, "1", 1, "0")
    assert commit(tmp_path, partial, manifest) == Fenced(holder)
    assert names(tmp_path) == {partial.name}


def test_a_commit_of_something_else_than_was_checked_is_refused(tmp_path: Path) -> None:
    """A file that grew, vanished or appeared after the check fails the commit and says which."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    changes = (
        lambda partial: os.truncate(partial / "state.pt", 8000),
        lambda partial: (partial / "below/rank-00001.pt").unlink(),
        lambda partial: (partial / "late").write_bytes(b""),
        lambda partial: (partial / "late").symlink_to("state.pt"),
    )
    about = ("state.pt", "below/rank-00001.pt", "late", "late")
    for round_, (change, name) in enumerate(zip(changes, about, strict=True)):
        partial, manifest = written(tmp_path, epoch, round_=round_)
        change(partial)
        outcome = commit(tmp_path, partial, manifest)
        assert isinstance(outcome, CommitFailed)
        assert (outcome.errno_name, outcome.reason.split()[0]) == ("EBUSY", name)
    assert scan(tmp_path) == ()


def test_a_save_that_was_said_too_early_is_never_committed(tmp_path: Path) -> None:
    """The files are acknowledged and still grow: refused by the check or by the commit, and latest stays (field case 97)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    commit(tmp_path, *written(tmp_path, epoch))
    partial, manifest = written(tmp_path, epoch, step=6, round_=2)
    wanted = [Expected(path, len(data), "", 0) for path, data in FILES.items()]
    with (partial / "state.pt").open("ab") as file:
        for _ in range(20):
            file.write(b"more")
            file.flush()
            report, entries = check_files(partial, wanted)
            assert report.verdict is not Verdict.INTACT
            assert entries == ()
            outcome = commit(tmp_path, partial, manifest)
            assert isinstance(outcome, CommitFailed)
            assert outcome.errno_name == "EBUSY"
            assert str((tmp_path / "latest").readlink()) == "step-000000005"


def test_an_old_run_s_checkpoint_is_never_mixed_with_a_new_one_s(tmp_path: Path) -> None:
    """A run from scratch reaches a step that an old one has committed: that one stays whole, whatever is half done beside it,
    and files of the two together are no checkpoint (field case 81).
    """
    epoch = take_epoch(tmp_path, "old", 0, "0").epoch
    commit(tmp_path, *written(tmp_path, epoch, step=100))
    epoch = take_epoch(tmp_path, "new", 0, "0").epoch
    partial, _ = written(tmp_path, epoch, step=100)
    (partial / "state.pt").write_bytes(b"NEW" * 1000)
    choice = newest_intact(tmp_path)
    assert choice.passed_over == ()
    assert choice.chosen is not None
    assert (choice.chosen.path / "state.pt").read_bytes() == FILES["state.pt"]
    (choice.chosen.path / "state.pt").write_bytes(b"NEWNEWN" * 1000)  # as somebody's own program does
    mixed = newest_intact(tmp_path)
    assert mixed.chosen is None
    assert [report.verdict for _, report in mixed.passed_over] == [Verdict.CORRUPT]


def test_names_that_come_back_change_nothing(tmp_path: Path) -> None:
    """A network file system brings back what was removed or replaced: a mark, the holder, a partial one (field case 105)."""
    first = take_epoch(tmp_path, "1", 0, "0").epoch
    old_partial, old_manifest = written(tmp_path, first)
    commit(tmp_path, old_partial, old_manifest)
    mark = (tmp_path / f".attempt-{first:09d}").readlink()
    holder = (tmp_path / "attempt").read_bytes()
    second = take_epoch(tmp_path, "1", 1, "0").epoch
    (tmp_path / f".attempt-{first:09d}").symlink_to(mark)
    (tmp_path / "attempt").write_bytes(holder)
    (tmp_path / ".latest-new").symlink_to("step-000000001")
    shutil.copytree(tmp_path / "step-000000005", old_partial)
    (tmp_path / f".trash-step-000000004-{first}-0").mkdir()
    assert isinstance(commit(tmp_path, *written(tmp_path, second, step=6)), Committed)
    assert len(sweep(tmp_path, second).names) == 2
    third = take_epoch(tmp_path, "1", 2, "0").epoch
    assert third > second
    assert {path.name for path in tmp_path.iterdir()} == {
        "attempt", f".attempt-{third:09d}", "latest", "step-000000005", "step-000000006",
    }  # fmt: skip


def test_mistakes_of_the_caller_are_refused(tmp_path: Path) -> None:
    """A partial of another step, epoch or name, none at all, and a manifest nobody could read are failures in words."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    partial, manifest = written(tmp_path, epoch)
    replace = msgspec.structs.replace
    entry = manifest.files[0]
    for wrong in (
        replace(manifest, step=6),
        replace(manifest, epoch=epoch + 1),
        replace(manifest, files=()),
        replace(manifest, files=(entry, entry)),
        replace(manifest, files=(replace(entry, xxh3_128=""),)),
        replace(manifest, job="\udcff"),
    ):
        outcome = commit(tmp_path, partial, wrong)
        assert isinstance(outcome, CommitFailed)
        assert outcome.errno_name == "EINVAL"
    assert isinstance(commit(tmp_path, "state", manifest), CommitFailed)
    shutil.rmtree(partial)
    outcome = commit(tmp_path, partial, manifest)
    assert isinstance(outcome, CommitFailed)
    assert outcome.errno_name == "ENOENT"


def test_a_disk_that_takes_no_more_bytes_leaves_the_older_one(tmp_path: Path) -> None:
    """A commit that cannot write fails with the errno's name, and the older one stands (field case 93)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    commit(tmp_path, *written(tmp_path, epoch))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for round_ in range(2, 5):
        partial, manifest = written(tmp_path, epoch, step=6, round_=round_)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # a write fails with EFBIG, as with ENOSPC on a full disk
        try:
            outcome = commit(tmp_path, partial, manifest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(outcome, CommitFailed)
        assert outcome.errno_name == "EFBIG"
        assert discard(tmp_path, partial) == ""
    chosen = newest_intact(tmp_path).chosen
    assert chosen is not None
    assert chosen.step == 5
    assert names(tmp_path) == {"step-000000005", "latest"}


def test_two_commits_of_one_step_at_once_both_succeed(tmp_path: Path) -> None:
    """Of two commits at the same instant one takes the name and the other finds it there (field case 107)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    for step in range(40):
        prepared = [written(tmp_path, epoch, step, round_) for round_ in (1, 2)]
        start = threading.Barrier(2)
        outcomes: list[object] = []

        def run(pair: tuple[Path, Manifest], start: threading.Barrier = start, out: list[object] = outcomes) -> None:
            start.wait()
            out.append(commit(tmp_path, *pair))

        threads = [threading.Thread(target=run, args=(pair,)) for pair in prepared]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {type(outcome) for outcome in outcomes} == {Committed, AlreadyThere}, outcomes
        assert verify_checkpoint(tmp_path / f"step-{step:09d}").verdict is Verdict.INTACT
    assert not [name for name in names(tmp_path) if name.startswith((".partial", ".trash", ".damaged"))]


def test_a_latest_that_cannot_be_made_fails_nothing(tmp_path: Path) -> None:
    """Where latest is a directory of somebody's, or links do not work, the checkpoint is committed all the same."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    (tmp_path / "latest").mkdir()
    outcome = commit(tmp_path, *written(tmp_path, epoch))
    assert isinstance(outcome, Committed)
    assert "latest" in outcome.latest_problem
    assert (tmp_path / "latest").is_dir()


def test_a_reader_of_latest_sees_old_or_new(tmp_path: Path) -> None:
    """While latest is replaced a thousand times a reader never finds it gone or dangling (field case 95)."""
    names_ = ("step-000000001", "step-000000002")
    for name in names_:
        (tmp_path / name).mkdir()
    point_latest(tmp_path, names_[0])
    done = threading.Event()
    seen: list[str] = []

    def read_on() -> None:
        while not done.is_set():
            seen.append(str((tmp_path / "latest").readlink()))
            assert (tmp_path / "latest").is_dir()

    reader = threading.Thread(target=read_on)
    reader.start()
    problems, index = set(), 0
    while index < 1000 or (len(seen) <= 100 and reader.is_alive()):  # On a busy machine it has its turns late.
        problems.add(point_latest(tmp_path, names_[index % 2]))
        index += 1
    done.set()
    reader.join()
    assert problems == {""}
    assert set(seen) <= set(names_)
    assert len(seen) > 100


def test_a_stale_new_link_is_no_obstacle(tmp_path: Path) -> None:
    """What a crash between the two steps of the replacement left does not stop the next one."""
    (tmp_path / ".latest-new").symlink_to("nowhere")
    assert point_latest(tmp_path, "step-000000001") == ""
    assert str((tmp_path / "latest").readlink()) == "step-000000001"


def test_a_partial_directory_is_never_used_twice(tmp_path: Path) -> None:
    """A second round cannot write into a directory that is there."""
    partial = make_partial(tmp_path, 5, 1, 1)
    with pytest.raises(FileExistsError):
        make_partial(tmp_path, 5, 1, 1)
    assert discard(tmp_path, partial) == ""
    assert discard(tmp_path, partial) == ""
    assert names(tmp_path) == set()
    assert "not a partial" in discard(tmp_path, tmp_path / "step-000000005")


def test_one_verified_on_structure_can_be_promoted(tmp_path: Path) -> None:
    """Reading it in full later puts the digests in the manifest; one that is damaged or fenced off is not promoted."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    commit(tmp_path, *written(tmp_path, epoch, mode="structure"))
    candidate = scan(tmp_path)[0]
    assert candidate.manifest is not None
    assert {file.xxh3_128 for file in candidate.manifest.files} == {""}
    assert "another coordinator" in promote(tmp_path, candidate, epoch + 1)
    assert promote(tmp_path, candidate, epoch) == ""
    manifest = read_manifest(candidate.path)
    assert manifest.verified == "full"
    assert all(file.xxh3_128 for file in manifest.files)
    assert verify_checkpoint(candidate.path).verdict is Verdict.INTACT
    (candidate.path / "state.pt").write_bytes(bytes(7000))
    assert "corrupt" in promote(tmp_path, scan(tmp_path)[0], epoch)
    assert names(tmp_path) == {"step-000000005", "latest"}


def test_outcomes_are_plain_values(tmp_path: Path) -> None:
    """Every outcome is frozen data that compares by value, so it can travel to the loop as an event."""
    outcome = Committed(tmp_path, None, "")
    assert outcome == Committed(tmp_path, None, "")
    with pytest.raises(AttributeError):
        outcome.latest_problem = "changed"  # type: ignore[misc]


def test_what_a_start_left_that_died_early_goes_with_the_next(tmp_path: Path) -> None:
    """Half of DIR/attempt whose mark a power cut has taken: found by replaying a second cut in the start after the first."""
    (tmp_path / ".attempt-000000001.new").write_bytes(bytes(100))
    (tmp_path / ".attempt-000000002.new").write_bytes(b"")
    (tmp_path / ".attempt-000000002").symlink_to("{}")
    assert take_epoch(tmp_path, "1", 0, "0").epoch == 3
    assert names(tmp_path) == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attempt-000000003", "attempt"]


def test_a_latest_of_the_programs_own_is_left_alone(tmp_path: Path) -> None:
    """DeepSpeed finds its newest save by a file of that name, which may lie in the same directory; ours is replaced."""
    (tmp_path / "latest").write_text("global_step100")
    assert "left alone" in point_latest(tmp_path, "step-000000005")
    assert (tmp_path / "latest").read_text() == "global_step100"
    for ours in (b"step-000000001\n", b"", bytes(20)):
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").write_bytes(ours)
        assert point_latest(tmp_path, "step-000000005") == ""
        assert str((tmp_path / "latest").readlink()) == "step-000000005"
