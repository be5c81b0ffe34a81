"""Which names belong to which step, and what may be adopted: store/found.py and store/adopt.py (field cases 89 to 91, 101)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.store.found import step_of

from tests.support.run import committed


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step_*.pt", "step_000500.pt", 500),
        ("step_*.pt", "step_999.pt", 999),
        ("step*.pt", "step12.pt", 12),
        ("checkpoint-*", "checkpoint-10000", 10_000),
        ("iter_*", "iter_0000123", 123),
        ("global_step*", "global_step200", 200),
        ("*", "0900000", 900_000),
        ("*.ckpt", "epoch=3-step=1500.ckpt", 1500),
        ("*.ckpt", "step=1500-epoch=3.ckpt", 1500),
        ("*.ckpt", "epoch=3-step=1500-v1.ckpt", 1500),
        ("*.ckpt", "step=1500-val_loss=0.25.ckpt", 1500),
        ("epoch_*_step_*.pt", "epoch_3_step_70.pt", 70),
        ("model*.pt", "model1000.pt", 1000),
        ("epoch*.pt", "epoch10.pt", 10),
        ("weights.*.h5", "weights.10.h5", 10),
        ("checkpoint_*.pt", "checkpoint_3_5000.pt", 5000),
        ("checkpoint*.pt", "checkpoint10.pt", 10),
        ("*.pt", "ckpt-12.pt", 12),
        ("*.ckpt", "m--val_loss=2.34-step=1000-consumed_samples=256000.0.ckpt", 1000),
        ("*.ckpt", "m--val_loss=2.34-step=1000-consumed_samples=256000.0-last.ckpt", None),
        ("*.ckpt", "last.ckpt", None),
        ("*.ckpt", "last-v1.ckpt", None),
        ("step_*.pt", "step_12.bak", None),
        ("step_*.pt", "step_12.pt.tmp", None),
        ("step_*.pt", "step_-1.pt", None),
        ("step_*.pt", "step_1e5.pt", None),
        ("step_*.pt", ".step_5.pt", None),
        ("*", "step_12.bak", None),
        ("*", "checkpoint-500.tmp", None),
        ("*", "checkpoint-500_old", None),
        ("*", "handpicked", None),
        ("*", "0.25", None),
        ("step_*.pt", f"step_{10**19}.pt", None),
    ],
)
def test_the_step_is_the_number_that_the_wildcard_stands_for(pattern: str, name: str, step: int | None) -> None:
    """By number and never as text; a name that goes on with a word is somebody else's."""
    assert step_of(pattern, name) == step


def test_items_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    """Field case 89: 10000, 1000, 999, 99; times of files do not matter (91)."""
    for n, number in enumerate((999, 1000, 99, 10_000)):
        path = tmp_path / f"step_{number}.pt"
        path.write_bytes(b"x")
        os.utime(path, (2_000_000_000 - n, 2_000_000_000 - n))
    items, incomplete = store.find(tmp_path, ("step_*.pt",))
    assert [item.step for item in items] == [10_000, 1000, 999, 99]
    assert incomplete == []


def test_a_step_needs_something_for_every_pattern(tmp_path: Path) -> None:
    """A script that writes model and optimizer apart has saved when both are there; a name without wildcard goes with each."""
    for name in ("model_5.pt", "optim_5.pt", "model_6.pt", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    items, incomplete = store.find(tmp_path, ("model_*.pt", "optim_*.pt", "tokenizer.json"))
    assert [(item.step, [path.name for path in item.paths]) for item in items] == [
        (5, ["model_5.pt", "optim_5.pt", "tokenizer.json"])
    ]
    assert [(one.step, one.reason) for one in incomplete] == [(6, "nothing for 'optim_*.pt'")]


def test_our_own_checkpoints_are_none_of_the_programs(tmp_path: Path) -> None:
    """`--adopt 'step-*'` in our own directory takes nothing of ours."""
    committed(tmp_path, 7)
    (tmp_path / "step-12").mkdir()
    items, _ = store.find(tmp_path, ("step-*",))
    assert [item.paths[0].name for item in items] == ["step-12"]
    assert store.find(tmp_path / "not-there", ("step-*",)) == ([], [])


def manifest(step: int) -> store.Manifest:
    """What an adoption is about."""
    return store.Manifest(
        step=step, world_size=1, ranks=(0,), job="j", attempt=0, epoch=1, cause="adopted", created_at="2026-01-01T00:00:00+00:00",
        verified="full", files=(), adopted=("own",),
    )  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that is held with epoch 1."""
    place = tmp_path / "ckpt"
    place.mkdir()
    assert store.take_epoch(place, "j", 0, "local").epoch == 1
    return place


def test_a_copy_is_made_whatever_becomes_of_the_original(root: Path, tmp_path: Path) -> None:
    """Directories with what is in them; the resume path is the program's own name."""
    own = tmp_path / "own" / "deep"
    own.mkdir(parents=True)
    (own / "a").write_bytes(b"1" * 10_000_000)
    (own.parent / "empty").write_bytes(b"")
    item = store.Item(3, (own.parent,))
    _, path = store.adopt(root, item, manifest(3), store.How(1, "full"))
    assert path is not None
    (own / "a").write_bytes(b"2")
    assert store.verify_checkpoint(path).verdict is store.Verdict.INTACT
    assert (path / "own" / "deep" / "a").stat().st_size == 10_000_000
    read = store.read_manifest(path)
    assert store.resume_path(path, read) == path / "own"
    assert [entry.path for entry in read.files] == ["own/deep/a", "own/empty"]


def test_links_and_special_files_are_refused_and_nothing_is_left(root: Path, tmp_path: Path) -> None:
    """What a link shows may change later, and may lie anywhere."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "direct").symlink_to("/etc/passwd")
    (tmp_path / "nothing").mkdir()
    for name, why in (("own", "a link"), ("pipe", "a FIFO"), ("direct", "is a link"), ("nothing", "is empty")):
        with pytest.raises(store.Refused, match=why):
            store.adopt(root, store.Item(3, (tmp_path / name,)), manifest(3), store.How(1, "full"))
    assert [name for name in store.list_names(root) if "step" in name] == []


def test_a_damaged_archive_is_not_committed(root: Path, tmp_path: Path) -> None:
    """The copy is checked, by the checksums that the file itself carries."""
    import torch

    own = tmp_path / "own"
    torch.save({"a": torch.arange(100_000)}, own)
    data = bytearray(own.read_bytes())
    data[200_000] ^= 1
    own.write_bytes(data)
    with pytest.raises(store.Refused, match="CRC32"):
        store.adopt(root, store.Item(3, (own,)), manifest(3), store.How(1, "full"))
    assert [name for name in store.list_names(root) if "step" in name] == []


def test_a_tracker_that_names_another_step_does_not_belong(tmp_path: Path) -> None:
    """Megatron's tracker names the newest iteration only."""
    (tmp_path / "iter_5").mkdir()
    (tmp_path / "latest").write_text("6\n")
    assert "names step 6" in store.other_step_named(store.Item(5, (tmp_path / "iter_5", tmp_path / "latest")))
    assert store.other_step_named(store.Item(6, (tmp_path / "latest",))) == ""


def test_what_is_put_aside_keeps_its_bytes(tmp_path: Path) -> None:
    """Renamed, out of the way of `step_*`, and never over another one."""
    for content in (b"1", b"2"):
        path = tmp_path / "step_5.pt"
        path.write_bytes(content)
        assert store.put_aside(path) == ""
    assert sorted(store.list_names(tmp_path)) == [".damaged-step_5.pt", ".damaged-step_5.pt.1"]
    assert store.put_aside(tmp_path / "gone") != ""


def test_of_two_versions_of_a_step_the_later_one_counts(tmp_path: Path) -> None:
    """Lightning does not write over a file that a killed run has left half done: the whole one is `-v1` (field case 101)."""
    for name in ("step=100.ckpt", "step=100-v2.ckpt", "step=100-v10.ckpt", "step=90-v3.ckpt", "step=90.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    items, _ = store.find(tmp_path, ("*.ckpt",))
    assert [(item.step, item.paths[0].name) for item in items] == [(100, "step=100-v10.ckpt"), (90, "step=90-v3.ckpt")]


def test_a_tracker_that_is_none_is_not_read(tmp_path: Path) -> None:
    """A link, which may lead to an endless file, and a FIFO that nobody writes to: neither is followed or waited for."""
    (tmp_path / "number").write_text("6")
    (tmp_path / "link").symlink_to(tmp_path / "number")
    os.mkfifo(tmp_path / "pipe")
    item = store.Item(5, (tmp_path / "link", tmp_path / "pipe", tmp_path))
    assert store.other_step_named(item) == ""
