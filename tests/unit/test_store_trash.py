"""What is on its way out: a whole checkpoint under such a name may be protected, or the newest intact one that there is."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from ckpt_supervisor import store

from tests.support.ctl_stage import committed, flip_a_bit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3 of an earlier epoch."""
    for step in (1, 2, 3):
        committed(tmp_path, step)
    return tmp_path


def cut_off(root: Path, step: int) -> Path:
    """As a kill leaves it between the rename and the first file that goes."""
    name = store.step_name(step)
    return (root / name).rename(root / store.trash_name(step, store.read_manifest(root / name).epoch, 0))


def swept(root: Path, known_whole: frozenset[int] = frozenset(), stop: threading.Event | None = None) -> store.Removed:
    """The sweep of the next start."""
    return store.sweep(root, store.take_epoch(root, "2", 0, "0").epoch, None, known_whole, stop)


def whole(root: Path) -> list[int]:
    """Steps that are there and intact."""
    return [one.step for one in store.scan(root) if store.verify_checkpoint(one.path).verdict is store.Verdict.INTACT]


def test_a_removal_that_was_cut_off_goes_on(root: Path) -> None:
    """With something newer that is intact, the usual case, there is nothing to bring back."""
    trash = cut_off(root, 2)
    assert swept(root) == store.Removed((trash.name,), ())
    assert whole(root) == [3, 1]


def test_one_that_was_protected_in_that_instant_comes_back(root: Path) -> None:
    """`ckptctl keep` had said that it is protected; whoever removed it died before he could see the mark."""
    assert store.set_kept(root, 2, on=True) == ""
    trash = cut_off(root, 2)
    removed = swept(root)
    assert removed.names == ()
    assert removed.problems == (f"{trash.name} was on its way out and is step-000000002 again: it is protected",)
    assert whole(root) == [3, 2, 1]


def test_the_newest_intact_one_comes_back(root: Path) -> None:
    """What it was to make way for has turned out to be damaged; an older intact one is no reason to let it go."""
    trash = cut_off(root, 2)
    flip_a_bit(root / "step-000000003" / "state.pt")
    assert swept(root).problems == (f"{trash.name} was on its way out and is step-000000002 again: nothing newer is intact",)
    assert whole(root) == [2, 1]
    assert swept(root) == store.Removed((), ())


def test_the_only_one_comes_back(root: Path) -> None:
    """Nothing else is there at all."""
    cut_off(root, 3)
    cut_off(root, 2)
    cut_off(root, 1)
    assert len(swept(root).problems) == 1, "the newest first, and then there is one"
    assert whole(root) == [3]


def test_what_was_read_already_is_not_read_again(root: Path) -> None:
    """A start has read what it resumes from: its word is taken, also for one that nobody would call whole."""
    trash = cut_off(root, 2)
    flip_a_bit(root / "step-000000003" / "state.pt")
    assert swept(root, frozenset({3})) == store.Removed((trash.name,), ())


def test_what_cannot_be_said_now_is_left_for_the_next_sweep(root: Path) -> None:
    """Somebody saves: the reading ends, and nothing is deleted on half of it."""
    trash = cut_off(root, 2)
    saving = threading.Event()
    saving.set()
    (problem,) = swept(root, stop=saving).problems
    assert problem.startswith(f"{trash.name} is left: whether anything newer is intact cannot be said")
    assert swept(root) == store.Removed((trash.name,), ())


def test_a_damaged_one_in_its_place_is_not_replaced(root: Path) -> None:
    """Both stay: a person, or the next save of that step, has to see to the damaged one."""
    trash = cut_off(root, 3)
    committed(root, 3)
    flip_a_bit(root / "step-000000003" / "state.pt")
    assert "step-000000003 is taken by a damaged one" in swept(root).problems[0]
    assert trash.exists()


def test_what_never_was_a_checkpoint_does_not_become_one(root: Path) -> None:
    """A partial that is sealed is whole, and belongs to an epoch that is over: also if its removal is cut off."""
    checkpoint = cut_off(root, 3)
    partial = checkpoint.rename(root / store.partial_name(3, 1, 1))
    epoch = store.take_epoch(root, "2", 0, "0").epoch
    partial.rename(root / store.trash_name(3, 0, 0))
    assert store.sweep(root, epoch).problems == ()
    assert whole(root) == [2, 1]


def test_half_of_one_goes(root: Path) -> None:
    """Its first file is gone: it can never be whole again, whatever else is there."""
    for step in (3, 2):
        (cut_off(root, step) / "state.pt").unlink()
    assert len(swept(root).names) == 2
    assert whole(root) == [1]


def test_repair_does_not_delete_the_only_one(root: Path) -> None:
    """By hand it is the same as at a start."""
    cut_off(root, 3)
    for step in (1, 2):
        flip_a_bit(root / store.step_name(step) / "state.pt")
    (leftover,) = store.leftovers(root)
    done = store.sweep_one(root, leftover, store.who_holds(root))
    assert "is step-000000003 again: nothing newer is intact" in done.problem
    assert whole(root) == [3]


def test_a_mark_that_was_there_before_stays_when_its_checkpoint_is_on_its_way_out(root: Path) -> None:
    """Whoever protects it once more must not take away what would bring it back."""
    assert store.set_kept(root, 2, on=True) == ""
    cut_off(root, 2)
    assert store.set_kept(root, 2, on=True) == "there is no step-000000002"
    assert store.kept_steps(root) == {2}
    swept(root)
    assert whole(root) == [3, 2, 1]


def test_a_tree_that_is_too_deep_is_an_answer(tmp_path: Path) -> None:
    """Python's rmtree gives up with a RecursionError on a thousand directories in each other: told like any other refusal."""
    partial = store.make_partial(tmp_path, 1, 1, 1)
    here = os.open(partial, os.O_RDONLY)
    for _ in range(1_200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        said = store.discard(tmp_path, partial)
        assert said == "" or "too many directories in each other" in said
    finally:
        subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)
