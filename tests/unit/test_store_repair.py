"""Repair: what lies beside the checkpoints, quarantine by one rename, and when nothing is touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.store.layout import claim_name

from tests.support.ctl_stage import committed, flip_a_bit, leave, names


def damaged(root: Path, step: int) -> store.Examined:
    """A checkpoint with a flipped bit, examined."""
    flip_a_bit(committed(root, step) / "state.pt")
    examined = store.examine(next(one for one in store.scan(root) if one.step == step))
    assert examined.report.verdict is store.Verdict.CORRUPT
    return examined


def test_leftovers_are_told_by_names_that_the_store_writes(tmp_path: Path) -> None:
    """Newest first; checkpoints, other people's hidden names and no directory at all are none."""
    assert store.leftovers(tmp_path / "none") == ()
    for name in (
        store.partial_name(9, 3, 1), store.damaged_name(12, 2, 0), store.trash_name(12, 1, 0), "step-000000005",
        ".partial-step-9-3-1", ".damaged-mine", ".trash", "latest",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
    assert [(one.kind, one.step, one.epoch) for one in store.leftovers(tmp_path)] == [
        ("damaged", 12, 2), ("trash", 12, 1), ("partial", 9, 3),
    ]  # fmt: skip


def test_quarantine_is_one_rename_and_takes_the_next_free_name(tmp_path: Path) -> None:
    """The whole directory, under a name that says which step and epoch; an earlier one of that name stays."""
    examined = damaged(tmp_path, 7)
    (tmp_path / store.damaged_name(7, 1, 0)).mkdir()
    done = store.quarantine(tmp_path, examined, store.who_holds(tmp_path))
    assert done == store.Done("step-000000007", store.damaged_name(7, 1, 1), "")
    assert sorted(path.name for path in (tmp_path / done.became).iterdir()) == [store.MANIFEST, "state.pt"]
    assert list((tmp_path / store.damaged_name(7, 1, 0)).iterdir()) == []


def test_quarantine_leaves_a_checkpoint_that_is_not_the_one_that_was_read(tmp_path: Path) -> None:
    """A coordinator may have saved the step again between the look and the rename: that one is whole."""
    examined = damaged(tmp_path, 7)
    shutil.move(examined.candidate.path, tmp_path / "elsewhere")
    done = store.quarantine(tmp_path, examined, store.who_holds(tmp_path))
    assert (done.became, done.problem) == ("", "it has changed since it was read")
    committed(tmp_path, 7)
    done = store.quarantine(tmp_path, examined, store.who_holds(tmp_path))
    assert (done.became, done.problem) == ("", "it has changed since it was read")
    assert store.newest_intact(tmp_path).chosen is not None


@pytest.mark.parametrize("how", ["mark", "alive", "gone"])
def test_nothing_is_touched_once_somebody_has_started(tmp_path: Path, how: str) -> None:
    """Seen by the mark that a start makes before anything else, or by the holder; each change looks again."""
    examined = damaged(tmp_path, 7)
    (tmp_path / store.partial_name(9, 1, 1)).mkdir()
    held = store.who_holds(tmp_path)
    if how == "mark":
        (tmp_path / claim_name(held.highest_epoch + 1)).symlink_to("{}")
    elif how == "alive":
        leave(tmp_path, pid=os.getpid(), pid_started=_started_at(os.getpid()))
    else:
        (tmp_path / store.ATTEMPT).unlink()
    before = names(tmp_path)
    dones = [
        store.quarantine(tmp_path, examined, held), store.mend_latest(tmp_path, "step-000000007", held),
        *(store.sweep_one(tmp_path, one, held) for one in store.leftovers(tmp_path)),
    ]  # fmt: skip
    assert all(done.problem for done in dones), dones
    assert names(tmp_path) == before


def _started_at(pid: int) -> int:
    """As the fence reads it."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def test_only_partials_of_epochs_that_are_over_are_swept(tmp_path: Path) -> None:
    """One of a higher epoch than any that holder or marks tell of is somebody's whom we have not seen."""
    committed(tmp_path, 7)
    held = store.who_holds(tmp_path)
    for epoch in (held.highest_epoch, held.highest_epoch + 1):
        (tmp_path / store.partial_name(9, epoch, 1)).mkdir()
    dones = [store.sweep_one(tmp_path, one, held) for one in store.leftovers(tmp_path)]
    assert [done.problem for done in dones] == ["", f"epoch {held.highest_epoch + 1} is newer than the holder's"]
    assert [one.epoch for one in store.leftovers(tmp_path)] == [held.highest_epoch + 1]


def test_what_was_put_aside_is_never_swept(tmp_path: Path) -> None:
    """It was a checkpoint once."""
    committed(tmp_path, 7).rename(tmp_path / store.damaged_name(7, 1, 0))
    held = store.who_holds(tmp_path)
    (leftover,) = store.leftovers(tmp_path)
    assert store.sweep_one(tmp_path, leftover, held).problem == "is neither a partial nor trash"
    assert leftover.path.exists()


def test_latest_is_read_as_a_link_or_as_a_file_and_followed_nowhere(tmp_path: Path) -> None:
    """None: not there. "": something that is not ours. A name: whatever it leads to, there or not."""
    latest = tmp_path / "latest"
    assert store.latest_name(tmp_path) is None
    twelve = "step-000000012"
    for target, name in (
        (twelve, twelve), (f"./{twelve}/", twelve), (tmp_path / twelve, twelve), (f"../{tmp_path.name}/{twelve}", twelve),
        (f"../{twelve}", ""), (f"/{twelve}", ""), (f"best/{twelve}", ""), ("best", ""), ("step-12", ""),
    ):  # fmt: skip
        latest.symlink_to(target)
        assert store.latest_name(tmp_path) == name, target
        latest.unlink()
    for text, name in ((f"{twelve}\n", twelve), (twelve, twelve), ("", ""), ("x" * 9_999, ""), ("a\0b", "")):
        latest.write_text(text)
        assert store.latest_name(tmp_path) == name
        latest.unlink()
    latest.mkdir()
    assert store.latest_name(tmp_path) == ""
    latest.rmdir()
    os.mkfifo(latest)
    assert store.latest_name(tmp_path) == ""


def test_the_size_of_what_cannot_be_listed_is_not_known(tmp_path: Path) -> None:
    """No number is better than a wrong one."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(bytes(10))
    (tmp_path / "y").write_bytes(bytes(5))
    (tmp_path / "link").symlink_to("/etc")
    assert store.tree_bytes(tmp_path) == 15
    assert store.tree_bytes(tmp_path / "none") is None
