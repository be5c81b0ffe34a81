"""What may go: never the newest that was fully verified, never anything that is not ours or not whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    Candidate,
    Committed,
    Expected,
    FileEntry,
    Finding,
    Manifest,
    Mode,
    Verdict,
    check_files,
    commit,
    free_bytes,
    make_partial,
    partial_name,
    remove,
    scan,
    step_name,
    sweep,
    take_epoch,
    to_prune,
    trash_name,
)
from hypothesis import given
from hypothesis import strategies as st


def candidate(step: int, kind: str = "full") -> Candidate:
    """A candidate of this kind: full, structure, damaged (with a manifest) or unreadable (without)."""
    path = Path("/ckpt") / step_name(step)
    verified: Mode = "structure" if kind == "structure" else "full"
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=1, cause="test", created_at="",
        verified=verified, files=(FileEntry("f", 1, "0" * 32, 0),),
    )  # fmt: skip
    if kind == "unreadable":
        return Candidate(step, path, None, Finding(Verdict.UNKNOWN, "", None, "EIO"))
    return Candidate(step, path, manifest, Finding(Verdict.MISSING, "f", None, "gone") if kind == "damaged" else None)


@pytest.mark.parametrize(
    ("kinds", "keep", "protected", "going"),
    [
        ("fff", 1, (), (2, 1)),
        ("fff", 2, (), (1,)),
        ("fff", 3, (), ()),
        ("fff", 9, (), ()),
        ("fff", 1, (1,), (2,)),
        ("fff", 1, (3,), (2, 1)),
        ("", 1, (), ()),
        ("f", 1, (), ()),
        ("ffs", 1, (), (1,)),
        ("sfs", 1, (), (1,)),
        ("fss", 1, (), ()),
        ("sss", 1, (), ()),
        ("ffd", 1, (), (1,)),
        ("fdf", 1, (), (1,)),
        ("dff", 1, (), (2,)),
        ("fud", 1, (), ()),
        ("ffuudd", 2, (), ()),
    ],
)
def test_what_is_pruned(kinds: str, keep: int, protected: tuple[int, ...], going: tuple[int, ...]) -> None:
    """The table of kinds (oldest first: full, structure, damaged, unreadable) and what goes of them."""
    words = {"f": "full", "s": "structure", "d": "damaged", "u": "unreadable"}
    candidates = [candidate(step, words[kind]) for step, kind in enumerate(kinds, 1)]
    assert tuple(one.step for one in to_prune(candidates, keep, protected)) == going


@given(
    st.dictionaries(st.integers(0, 50), st.sampled_from(["full", "structure", "damaged", "unreadable"])),
    st.integers(1, 5),
    st.sets(st.integers(0, 50)),
)
def test_the_promises_of_pruning(kinds: dict[int, str], keep: int, protected: set[int]) -> None:
    """For any directory: at least `keep` fully verified stay, with the newest; protected and damaged ones stay."""
    going = {one.step for one in to_prune([candidate(step, kind) for step, kind in kinds.items()], keep, protected)}
    full = sorted((step for step, kind in kinds.items() if kind == "full"), reverse=True)
    assert len(set(full) - going) >= min(keep, len(full))
    assert not going & set(full[:keep])
    assert not going & protected
    assert not going & {step for step, kind in kinds.items() if kind in ("damaged", "unreadable")}
    assert all(len(full) >= keep and step < full[keep - 1] for step in going)
    assert all(step in going or step in protected for step in full[keep:])


def test_keeping_none_is_refused() -> None:
    """`keep` 0 is an error of the caller and prunes nothing (field case 93)."""
    with pytest.raises(ValueError, match="at least one"):
        to_prune([candidate(1)], 0, ())


def committed(root: Path, step: int, epoch: int) -> Path:
    """A committed checkpoint of this step."""
    partial = make_partial(root, step, epoch, step)
    (partial / "state.pt").write_bytes(b"x" * 100)
    _, entries = check_files(partial, [Expected("state.pt", 100, "", 0)])
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="",
        verified="full", files=entries,
    )  # fmt: skip
    outcome = commit(root, partial, manifest)
    assert isinstance(outcome, Committed)
    return outcome.path


def test_keep_two_of_those_with_awkward_names(tmp_path: Path) -> None:
    """With steps that sort wrongly as text the two newest stay, and names of others are not touched (field case 89)."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    for step in (999, 1000, 99, 10_000):
        committed(tmp_path, step, epoch)
    strangers = ("100000", "0900000", "handpicked", "step_12.bak", "step_-1", "step_1e5")
    for name in strangers:
        (tmp_path / name).mkdir()
    for one in to_prune(scan(tmp_path), 2, ()):
        removed = remove(one)
        assert (removed.names, removed.problems) == ((one.path.name,), ())
    assert [one.step for one in scan(tmp_path)] == [10_000, 1000]
    assert all((tmp_path / name).is_dir() for name in strangers)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".trash")]


def test_removing_twice_is_no_error(tmp_path: Path) -> None:
    """A checkpoint that is already gone is simply gone."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    committed(tmp_path, 5, epoch)
    (one,) = scan(tmp_path)
    assert remove(one).names == ("step-000000005",)
    assert remove(one) == type(remove(one))((), ())


def test_the_sweep_takes_what_is_older_and_what_is_trash_and_nothing_else(tmp_path: Path) -> None:
    """Partial ones of this and of later epochs, damaged ones, strangers and links out stay as they are."""
    old = take_epoch(tmp_path, "1", 0, "0").epoch
    epoch = take_epoch(tmp_path, "1", 1, "0").epoch
    committed(tmp_path, 5, epoch)
    (tmp_path / "precious").write_bytes(b"x")
    stay = [
        partial_name(6, epoch, 1), partial_name(6, epoch + 1, 1), ".damaged-step-000000004-1-0", "handpicked",
        ".partial-step-12-1-1", ".partial-mine", ".trash-mine",
    ]  # fmt: skip
    go = [partial_name(6, old, 1), partial_name(7, 0, 3), trash_name(3, old, 0), trash_name(3, epoch, 2)]
    for name in stay + go:
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "state.pt").write_bytes(b"half")
        (tmp_path / name / "link").symlink_to(tmp_path / "precious")
    (tmp_path / trash_name(8, 1, 0)).write_bytes(b"a manifest that was not put in its place")
    go.append(trash_name(8, 1, 0))
    (tmp_path / trash_name(9, 1, 0)).symlink_to(tmp_path / "handpicked")
    go.append(trash_name(9, 1, 0))
    removed = sweep(tmp_path, epoch)
    assert (sorted(removed.names), removed.problems) == (sorted(go), ())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*stay, "precious", "step-000000005", "latest", "attempt", f".attempt-{epoch:09d}"}
    assert all((tmp_path / name / "below" / "state.pt").exists() for name in stay)
    assert sweep(tmp_path, epoch).names == ()


def test_a_fenced_coordinator_sweeps_nothing(tmp_path: Path) -> None:
    """An older coordinator that still runs must not remove what the new one writes."""
    old = take_epoch(tmp_path, "1", 0, "0").epoch
    epoch = take_epoch(tmp_path, "1", 1, "0").epoch
    make_partial(tmp_path, 5, old - 1, 1)
    partial = make_partial(tmp_path, 6, epoch, 1)
    removed = sweep(tmp_path, old)
    assert removed.names == ()
    assert "another coordinator" in removed.problems[0]
    assert partial.is_dir()


def test_a_sweep_takes_the_partial_from_an_old_coordinator(tmp_path: Path) -> None:
    """After a sweep the old coordinator finds its partial directory gone and cannot commit a half of it."""
    old = take_epoch(tmp_path, "1", 0, "0").epoch
    partial = make_partial(tmp_path, 5, old, 1)
    sweep(tmp_path, take_epoch(tmp_path, "1", 1, "0").epoch)
    assert not partial.exists()


def test_free_space_is_that_of_the_directorys_own_volume(tmp_path: Path) -> None:
    """The number is what the volume of this directory gives to users."""
    volume = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path) - volume.f_bavail * volume.f_frsize) < 1 << 30
