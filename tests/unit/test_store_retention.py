"""What may go: never the newest that was fully verified, never anything that is not ours or not whole."""

from __future__ import annotations

import os
import subprocess
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
    kept_steps,
    make_partial,
    partial_name,
    remove,
    scan,
    set_kept,
    step_name,
    sweep,
    take_epoch,
    to_make_room,
    to_prune,
    trash_name,
)
from hypothesis import given
from hypothesis import strategies as st

WORDS = {"f": "full", "s": "structure", "n": "narrow", "d": "damaged", "u": "unreadable"}


def candidate(step: int, kind: str = "full") -> Candidate:
    """A candidate of this kind: full, structure, narrow (rank 0 of two), damaged (with a manifest) or unreadable (without)."""
    path = Path("/ckpt") / step_name(step)
    verified: Mode = "structure" if kind == "structure" else "full"
    manifest = Manifest(
        step=step, world_size=2 if kind == "narrow" else 1, ranks=(0,), job="1", attempt=0, epoch=1, cause="test", created_at="",
        verified=verified, files=(FileEntry("f", 100, "0" * 32, 0),),
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
        ("nnn", 1, (), (2, 1)),
        ("fnn", 1, (), (2,)),
        ("ffnn", 1, (), (3, 1)),
        ("nff", 2, (), (1,)),
        ("nnf", 1, (), (2, 1)),
        ("fnnn", 2, (), (2,)),
    ],
)
def test_what_is_pruned(kinds: str, keep: int, protected: tuple[int, ...], going: tuple[int, ...]) -> None:
    """The table of kinds (oldest first: full, structure, narrow, damaged, unreadable) and what goes of them (field case 88)."""
    candidates = [candidate(step, WORDS[kind]) for step, kind in enumerate(kinds, 1)]
    assert tuple(one.step for one in to_prune(candidates, keep, protected)) == going


@pytest.mark.parametrize(
    ("steps", "keep", "every", "going"),
    [
        ((100, 200, 300, 400, 500), 2, 0, (300, 200, 100)),
        ((100, 200, 300, 400, 500), 2, 200, (100,)),
        ((100, 200, 300, 400, 500), 1, 250, (300, 200, 100)),
        ((1000, 2000, 3000), 1, 1000, ()),
        ((1000, 1100, 1200, 2000, 2100), 1, 1000, (1200, 1100)),
        ((999, 1000, 1001), 1, 1000, (999,)),
    ],
)
def test_milestones_stay_and_do_not_count(steps: tuple[int, ...], keep: int, every: int, going: tuple[int, ...]) -> None:
    """`--keep-every`: multiples of it stay beside the `keep` newest others."""
    assert tuple(one.step for one in to_prune(map(candidate, steps), keep, (), every)) == going


@given(
    st.dictionaries(st.integers(0, 50), st.sampled_from(["full", "structure", "narrow", "damaged", "unreadable"])),
    st.integers(1, 5),
    st.sets(st.integers(0, 50)),
    st.sampled_from([0, 0, 2, 10]),
)
def test_the_promises_of_pruning(kinds: dict[int, str], keep: int, protected: set[int], every: int) -> None:
    """For any directory: the `keep` newest fully verified of each kind stay, and nothing special or damaged goes."""
    going = {one.step for one in to_prune([candidate(step, kind) for step, kind in kinds.items()], keep, protected, every)}
    milestones = {step for step in kinds if every and step % every == 0}
    verified = sorted((step for step, kind in kinds.items() if kind in ("full", "narrow")), reverse=True)
    assert not going & set(verified[:1])
    assert not going & (protected | milestones)
    assert not going & {step for step, kind in kinds.items() if kind in ("damaged", "unreadable")}
    counting = [step for step in verified if step not in milestones]
    assert not going & set([step for step in counting if kinds[step] == "full"][:keep])
    assert "full" in kinds.values() or not going & set(counting[:keep])
    assert len([step for step in counting if step not in going | protected]) <= 2 * keep


@given(
    st.dictionaries(st.integers(0, 30), st.sampled_from(["full", "structure", "narrow", "damaged", "unreadable"])),
    st.integers(-1, 1_000),
    st.sets(st.integers(0, 30)),
    st.sampled_from([0, 0, 2, 10]),
)
def test_the_promises_of_making_room(kinds: dict[int, str], short: int, protected: set[int], every: int) -> None:
    """The oldest go, only if it is enough then, and never the newest fully verified one, of all ranks and of any."""
    candidates = [candidate(step, kind) for step, kind in kinds.items()]
    going = [one.step for one in to_make_room(candidates, short, protected, every)]
    assert going == sorted(going)
    assert not going or len(going) == -(-short // 100), "as many as are needed, each of 100 bytes"
    verified = sorted((step for step, kind in kinds.items() if kind in ("full", "narrow")), reverse=True)
    assert all(step < verified[0] for step in going)
    assert not set(going) & set([step for step in verified if kinds[step] == "full"][:1])
    assert not set(going) & (protected | {step for step in kinds if every and step % every == 0})
    assert all(kinds[step] in ("full", "narrow", "structure") for step in going)


@pytest.mark.parametrize(
    ("kinds", "short", "protected", "every", "going"),
    [
        ("fff", 100, (), 0, (1,)),
        ("fff", 150, (), 0, (1, 2)),
        ("fff", 201, (), 0, ()),
        ("fff", 0, (), 0, ()),
        ("f", 1, (), 0, ()),
        ("ff", 1, (1,), 0, ()),
        ("fff", 1, (1,), 0, (2,)),
        ("fff", 1, (), 1, ()),
        ("ffs", 1, (), 0, (1,)),
        ("fss", 1, (), 0, ()),
        ("sfs", 1, (), 0, (1,)),
        ("ss", 1, (), 0, ()),
        ("fd", 1, (), 0, ()),
        ("dff", 1, (), 0, (2,)),
        ("fnn", 1, (), 0, (2,)),
        ("fn", 1, (), 0, ()),
    ],
)
def test_what_goes_for_room(kinds: str, short: int, protected: tuple[int, ...], every: int, going: tuple[int, ...]) -> None:
    """The table, oldest first as above; each has 100 bytes (field case 93)."""
    candidates = [candidate(step, WORDS[kind]) for step, kind in enumerate(kinds, 1)]
    assert tuple(one.step for one in to_make_room(candidates, short, protected, every)) == going


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


def test_a_mark_protects_until_it_is_taken_back(tmp_path: Path) -> None:
    """`ckptctl keep`: an empty file beside the checkpoint; twice is once; of a step that is not there it is refused."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    for step in (5, 6, 7):
        committed(tmp_path, step, epoch)
    assert kept_steps(tmp_path / "nowhere") == frozenset()
    assert [set_kept(tmp_path, 5, on=True) for _ in range(2)] == ["", ""]
    assert "there is no step-000000009" in set_kept(tmp_path, 9, on=True)
    assert (tmp_path / ".keep-step-000000005").read_bytes() == b""
    assert kept_steps(tmp_path) == {5}
    assert [one.step for one in to_prune(scan(tmp_path), 1, kept_steps(tmp_path))] == [6]
    assert [set_kept(tmp_path, step, on=False) for step in (5, 5, 9)] == ["", "", ""]
    assert kept_steps(tmp_path) == frozenset()
    assert "cannot be part of a name" in set_kept(tmp_path, -1, on=True)
    assert set_kept(tmp_path / "nowhere", 5, on=True) != ""


def test_a_link_in_place_of_a_mark_is_not_followed(tmp_path: Path) -> None:
    """Whoever puts a link there protects the step and has nothing else made or removed."""
    committed(tmp_path, 5, take_epoch(tmp_path, "1", 0, "0").epoch)
    (tmp_path / ".keep-step-000000005").symlink_to(tmp_path / "precious")
    assert set_kept(tmp_path, 5, on=True) == ""
    assert not (tmp_path / "precious").exists()
    (tmp_path / "precious").write_bytes(b"x")
    assert set_kept(tmp_path, 5, on=False) == ""
    assert (tmp_path / "precious").exists()


def test_one_that_is_marked_while_it_goes_comes_back(tmp_path: Path) -> None:
    """What was to go by an older look, and has a mark by now, stays under its name."""
    committed(tmp_path, 5, take_epoch(tmp_path, "1", 0, "0").epoch)
    (one,) = scan(tmp_path)
    assert set_kept(tmp_path, 5, on=True) == ""
    assert remove(one) == type(remove(one))((), ())
    assert [(left.step, left.problem) for left in scan(tmp_path)] == [(5, None)]
    assert list(tmp_path.glob(".trash-*")) == []


def files_below(root: Path) -> int:
    """Files that are on their way out."""
    return sum(len(files) for path, _, files in os.walk(root) if ".trash" in path)


def test_a_removal_asks_before_each_file(tmp_path: Path) -> None:
    """Thousands of files are no reason to be in the way of a save for long: it can be made to wait between any two."""
    place = committed(tmp_path, 5, take_epoch(tmp_path, "1", 0, "0").epoch)
    (one,) = scan(tmp_path)
    (place / "below").mkdir()
    (place / "below" / "more").write_bytes(b"x")
    seen: list[int] = []
    assert remove(one, lambda: seen.append(files_below(tmp_path))).problems == ()
    assert seen == [3, 2, 1]
    assert scan(tmp_path) == ()


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    """A thousand directories in each other, which Python's rmtree cannot do: told, and the sweep goes on."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    first, second = tmp_path / trash_name(1, 1, 0), tmp_path / trash_name(2, 1, 0)
    second.mkdir()
    first.mkdir()
    here = os.open(first, os.O_RDONLY)
    for _ in range(1_200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        removed = sweep(tmp_path, epoch, lambda: None)
        assert not second.exists()
        assert removed.names == (second.name,) if removed.problems else (second.name, first.name)
    finally:
        subprocess.run(["rm", "-rf", str(first)], check=True)


def test_a_link_in_place_of_rubbish_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """Nothing is followed, at the top or below, also where files are removed one by one."""
    epoch = take_epoch(tmp_path, "1", 0, "0").epoch
    place = committed(tmp_path, 5, epoch)
    (tmp_path / trash_name(1, 1, 0)).symlink_to(place)
    (tmp_path / trash_name(2, 1, 0) / "below").mkdir(parents=True)
    (tmp_path / trash_name(2, 1, 0) / "below" / "link").symlink_to(place)
    (tmp_path / trash_name(2, 1, 0) / "link").symlink_to(place)
    assert sweep(tmp_path, epoch, lambda: None).names == (trash_name(2, 1, 0), trash_name(1, 1, 0))
    assert len(list(place.iterdir())) == 2
    assert list(tmp_path.glob(".trash-*")) == []


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


def test_a_coordinator_that_is_fenced_off_while_it_sweeps_ends_there(tmp_path: Path) -> None:
    """It may wait long between two removals, and somebody else may have started meanwhile."""
    old = take_epoch(tmp_path, "1", 0, "0").epoch
    epoch = take_epoch(tmp_path, "1", 1, "0").epoch
    names = [partial_name(step, old, 1) for step in (7, 6)]
    for name in names:
        (tmp_path / name).mkdir()
    asked: list[int] = []

    def pause() -> None:
        asked.append(1)
        if len(asked) > 1:
            take_epoch(tmp_path, "1", 2, "0")

    removed = sweep(tmp_path, epoch, pause)
    assert (removed.names, len(removed.problems)) == ((names[0],), 1)
    assert (tmp_path / names[1]).is_dir()


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
