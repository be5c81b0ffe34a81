"""Directories of torch.distributed.checkpoint: what their files say of each other, with real ones of every kind."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_supervisor.store import Expected, Verdict, check_files, check_foreign
from ckpt_supervisor.store.formats import dcp as reader
from ckpt_supervisor.store.formats import read_structure
from ckpt_supervisor.store.formats.structure import Folder, SetLook
from ckpt_supervisor.store.look import open_regular
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata

from tests.support import toy_dcp
from tests.support.run import has_ended

TOY = Path(toy_dcp.__file__)
TORCHRUN = Path(sys.executable).with_name("torchrun")
GOOD = [f"{ranks}/{way}" for ranks in ("one", "three") for way in (*toy_dcp.WAYS, "empty")] + ["three/each"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of every kind, by one process and by three."""
    place = tmp_path_factory.mktemp("dcp")
    toy_dcp.write(place / "one", sharded=False)
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", "3", str(TOY), str(place / "three")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOY.parents[2])}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150, env=environment)
    assert has_ended(done.returncode, done.stderr), done.stderr[-4_000:]
    return place


@pytest.fixture
def directory(tmp_path: Path, written: Path) -> Path:
    """A copy of the one that three ranks wrote, to damage."""
    return Path(shutil.copytree(written / "three" / "plain", tmp_path / "dcp"))


def look(directory: Path) -> SetLook | None:
    """What the reader says."""
    files = {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}
    return reader.read_set(Folder(directory.name, files, lambda path: open_regular(directory / path)))


def found(directory: Path) -> list[tuple[Verdict, str]]:
    """The verdicts and paths of what is wrong."""
    seen = look(directory)
    assert seen is not None
    assert not (seen.findings and seen.extents)
    return [(finding.verdict, finding.path) for finding in seen.findings]


def bad_crcs(directory: Path) -> set[str]:
    """Names of the items with an extent whose checksum is another."""
    seen = look(directory)
    assert seen is not None
    return {
        extent.name for path, extents in seen.extents.items() for extent in extents
        if zlib.crc32((directory / path).read_bytes()[extent.start : extent.end]) != extent.crc32
    }  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_what_torch_writes_is_whole(written: Path, kind: str) -> None:
    """One rank and three, with threads, with a file to each item, without collectives, and with nothing to save."""
    assert found(written / kind) == []
    assert bad_crcs(written / kind) == set()


def test_the_checksums_cover_the_items_and_are_sorted_and_disjoint(written: Path) -> None:
    """What torch.load hands out of any item lies in an extent that bears the item's name."""
    for kind in ("three/plain", "one/threads", "three/each"):
        seen = look(written / kind)
        assert seen is not None
        shards = {path.name for path in (written / kind).glob("*.distcp") if path.stat().st_size > 0}
        assert set(seen.extents) == shards
        for extents in seen.extents.values():
            assert all(before.end <= after.start for before, after in itertools.pairwise(extents))
    seen = look(written / "one" / "plain")
    assert seen is not None
    numbers = toy_dcp.state(sharded=False)["weight"].numpy().tobytes()
    start = (written / "one" / "plain" / "__0_0.distcp").read_bytes().index(numbers)
    covered = {(extent.start, extent.end): extent.name for extent in seen.extents["__0_0.distcp"]}
    assert covered[start, start + len(numbers)] == "weight"
    assert {extent.name for extent in seen.extents["__0_0.distcp"]} == {
        "weight",
        "half",
        "model.bias",
        "model.n",
        "none",
        "scalar",
        "text",
    }


def test_a_directory_without_metadata_is_incomplete(directory: Path) -> None:
    """All shards and no `.metadata`, as the end of a job in a save leaves it (field case 68)."""
    (directory / ".metadata").rename(directory / ".metadata.tmp")
    assert found(directory) == [(Verdict.MISSING, ".metadata")]


def test_an_empty_cut_or_broken_metadata_is_seen(directory: Path) -> None:
    """Whatever is wrong with it, with and without the shards beside it."""
    data = (directory / ".metadata").read_bytes()
    for damaged, verdict in (
        (b"", Verdict.TRUNCATED), (data[:1], Verdict.TRUNCATED), (data[: len(data) // 2], Verdict.TRUNCATED),
        (data[:-22], Verdict.TRUNCATED), (data[:-1], Verdict.TRUNCATED), (data + b"x", Verdict.CORRUPT),
        (bytes(len(data)), Verdict.CORRUPT), (data[:200] + bytes(500) + data[700:], Verdict.CORRUPT), (b"{}", Verdict.CORRUPT),
        (pickle.dumps({"a": 1}), Verdict.CORRUPT),
    ):  # fmt: skip
        (directory / ".metadata").write_bytes(damaged)
        assert found(directory) == [(verdict, ".metadata")], damaged[:20]


CUTS = {"0": 0, "1": 1, "header": 40, "middle": 2000, "last record": -300, "size-22": -22, "size-1": -1}


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_shard_is_truncated_and_the_missing_bytes_are_told(directory: Path, cut: str) -> None:
    """Shortened anywhere, by one byte or to nothing (field case 68)."""
    shard = directory / "__1_0.distcp"
    size = shard.stat().st_size
    length = CUTS[cut] % size
    os.truncate(shard, length)
    assert found(directory) == [(Verdict.TRUNCATED, "__1_0.distcp")]
    seen = look(directory)
    assert seen is not None
    assert f"{size - length} bytes are missing" in seen.findings[0].reason
    assert seen.findings[0].offset == length


def test_a_missing_shard_is_missing_and_all_of_them_too(directory: Path) -> None:
    """The metadata names a file that is absent (field case 78)."""
    (directory / "__1_0.distcp").unlink()
    assert found(directory) == [(Verdict.MISSING, "__1_0.distcp")]
    for shard in directory.glob("*.distcp"):
        shard.unlink()
    assert {verdict for verdict, _ in found(directory)} == {Verdict.MISSING}
    (directory / ".metadata").write_bytes(b"")
    assert found(directory) == [(Verdict.TRUNCATED, ".metadata")]


def test_bytes_behind_the_last_item_are_corrupt(directory: Path) -> None:
    """One, and a page of zeros; torch leaves none."""
    for tail in (b"x", bytes(4096)):
        data = (directory / "__1_0.distcp").read_bytes()
        (directory / "__1_0.distcp").write_bytes(data + tail)
        assert found(directory) == [(Verdict.CORRUPT, "__1_0.distcp")]
        (directory / "__1_0.distcp").write_bytes(data)


def test_two_shards_in_each_others_place_are_seen(directory: Path) -> None:
    """Their items lie at other places."""
    first, second = directory / "__0_0.distcp", directory / "__2_0.distcp"
    first.rename(directory / "aside")
    second.rename(first)
    (directory / "aside").rename(second)
    assert found(directory) != []


def test_a_shard_that_the_metadata_does_not_name_is_of_another_save(directory: Path) -> None:
    """As a run on more ranks leaves it in a directory that is used again (field case 81); an empty one is usual."""
    (directory / "__7_0.distcp").write_bytes(b"")
    assert found(directory) == []
    (directory / "notes.txt").write_text("more")
    (directory / "below").mkdir()
    (directory / "below" / "__9_0.distcp").write_bytes(b"more")
    assert found(directory) == []
    shutil.copy(directory / "__1_0.distcp", directory / "__7_0.distcp")
    assert found(directory) == [(Verdict.MIXED, "__7_0.distcp")]


def test_zeros_anywhere_are_seen(directory: Path) -> None:
    """A whole shard, its first half, its last half, a page, and only the numbers of a tensor."""
    shard = directory / "__0_0.distcp"
    data = shard.read_bytes()
    size = len(data)
    for start, end in ((0, size), (0, size // 2), (size // 2, size), (0, 64), (size - 22, size), (size // 3, size // 3 + 1500)):
        shard.write_bytes(data[:start] + bytes(end - start) + data[end:])
        assert found(directory) == [] or set(found(directory)) == {(Verdict.CORRUPT, "__0_0.distcp")}
        assert found(directory) or bad_crcs(directory), (start, end)
    shard.write_bytes(data)
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"):
        (directory / name).write_bytes(bytes((directory / name).stat().st_size))
    assert {verdict for verdict, _ in found(directory)} == {Verdict.CORRUPT}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_in_a_shard_is_seen(directory: Path, written: Path, at: int, bit: int) -> None:
    """By a checksum or by the tables; but for the versions in an item's 64-bit end record, which nobody reads."""
    data = bytearray((written / "three" / "plain" / "__2_0.distcp").read_bytes())
    at %= len(data)
    data[at] ^= 1 << bit
    (directory / "__2_0.distcp").write_bytes(data)
    is_version = at - data.rfind(b"PK\x06\x06", 0, at) in (12, 13, 14, 15)
    assert is_version or found(directory) or bad_crcs(directory)


def rewritten(directory: Path, change: Callable[[Any], object]) -> list[tuple[Verdict, str]]:
    """What is found after a change of the metadata."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())  # noqa: S301
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return found(directory)


def item_of(metadata: Any, name: str) -> Any:
    """The key of an item with this name."""
    return next(key for key in metadata.storage_data if key.fqn == name)


def test_what_the_metadata_describes_and_does_not_place_is_missing(directory: Path) -> None:
    """A tensor's chunk and an object that a cached plan left out (field case 78)."""
    for name in ("rows", "text", "weight"):
        data = (directory / ".metadata").read_bytes()
        verdicts = rewritten(directory, lambda metadata: metadata.storage_data.pop(item_of(metadata, name)))  # noqa: B023
        assert verdicts[0] == (Verdict.MISSING, ".metadata")
        (directory / ".metadata").write_bytes(data)


def test_items_that_lie_wrongly_are_corrupt(directory: Path) -> None:
    """Over each other, with bytes between them, and at a negative place."""

    def shift(count: int) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            metadata.storage_data[item_of(metadata, "weight")].offset += count

        return change

    data = (directory / ".metadata").read_bytes()
    for count, verdict in (
        (-1, Verdict.CORRUPT),
        (-(10**9), Verdict.CORRUPT),
        (2**62, Verdict.TRUNCATED),
        (2**64, Verdict.CORRUPT),
    ):
        assert rewritten(directory, shift(count))[0][0] is verdict
        (directory / ".metadata").write_bytes(data)


def test_names_that_leave_the_directory_are_foreign(directory: Path) -> None:
    """Nothing outside is opened, whatever it is called."""
    data = (directory / ".metadata").read_bytes()
    for path in ("../../etc/passwd", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\0b", "a\nb", "x" * 5000):

        def change(metadata: Any) -> None:
            metadata.storage_data[item_of(metadata, "weight")].relative_path = path  # noqa: B023

        assert Verdict.FOREIGN in {verdict for verdict, _ in rewritten(directory, change)}
        (directory / ".metadata").write_bytes(data)


def test_a_tensor_of_another_size_is_mixed(directory: Path) -> None:
    """An item of the right length whose numbers are fewer than the chunk's."""

    def change(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["weight"].chunks
        chunk.sizes = torch.Size([60, 40])

    ((verdict, path),) = rewritten(directory, change)
    assert (verdict, path) == (Verdict.MIXED, "__0_0.distcp")


def test_hostile_counts_in_the_metadata_are_refused(directory: Path) -> None:
    """One list of chunks that stands for many, and dimensions without number."""

    def many(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["weight"]
        tensor.chunks *= 100_000
        metadata.state_dict_metadata.update({str(number): tensor for number in range(1000)})

    def deep(metadata: Any) -> None:
        metadata.state_dict_metadata["weight"].chunks[0].sizes = torch.Size([1] * 1000)

    data = (directory / ".metadata").read_bytes()
    assert rewritten(directory, many) == [(Verdict.FOREIGN, ".metadata")]
    (directory / ".metadata").write_bytes(data)
    assert rewritten(directory, deep) == [(Verdict.CORRUPT, ".metadata")]


def test_a_command_in_the_metadata_is_not_run(directory: Path, tmp_path: Path) -> None:
    """It is a name like any other; bombs are refused (the reader's own tests have more of them)."""
    marker = tmp_path / "marker"

    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.system, (f"touch {marker}",))

    for data, verdict in (
        (pickle.dumps(Runs()), Verdict.CORRUPT), (b"]r\xff\xff\xff\xff.", Verdict.CORRUPT),
        (b"\x8e" + (2**62).to_bytes(8, "little"), Verdict.TRUNCATED), (b"(" * 4_100_000, Verdict.FOREIGN),
    ):  # fmt: skip
        (directory / ".metadata").write_bytes(data)
        assert found(directory) == [(verdict, ".metadata")]
    assert not marker.exists()


def alone(directory: Path, **options: Any) -> Path:
    """A save by one process with other options."""
    with pytest.warns(UserWarning, match="single process"):
        writer = dcp.FileSystemWriter(directory, sync_files=False, **options)
        dcp.save(toy_dcp.state(sharded=False), storage_writer=writer, no_dist=True)
    return directory


def test_checksums_switched_off_are_not_corruption(tmp_path: Path) -> None:
    """Then there are no extents."""
    torch.serialization.set_crc32_options(False)
    try:
        seen = look(alone(tmp_path / "dcp"))
    finally:
        torch.serialization.set_crc32_options(True)
    assert seen == SetLook(reader.FORMAT)


class Flipped(StreamTransformExtension):
    """Writes every byte as its complement, as a compressor might."""

    @staticmethod
    def registry_name() -> str:
        """The name of this extension."""
        return "flipped"

    @staticmethod
    def from_descriptor(version: str) -> Flipped:
        """The extension, of one version only."""
        assert version == "1"
        return Flipped()

    def get_descriptor(self) -> str:
        """What the metadata says of it."""
        return "flipped/1"

    def transform_to(self, output: Any) -> Any:
        """A stream that writes to this one."""

        class Writer:
            def write(self, data: Any) -> int:
                output.write(bytes(byte ^ 255 for byte in bytes(data)))
                return len(data)

            def flush(self) -> None:
                output.flush()

            def close(self) -> None:
                output.close()

        return Writer()

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        """Not needed."""
        raise NotImplementedError


def test_items_that_are_no_archives_give_no_extents(tmp_path: Path) -> None:
    """Compressed by an extension, or bytes of a planner's own."""
    seen = look(alone(tmp_path / "flipped", _extensions=[Flipped()]))
    assert seen == SetLook(reader.FORMAT)
    raw = alone(tmp_path / "raw")
    metadata = pickle.loads((raw / ".metadata").read_bytes())  # noqa: S301
    place = metadata.storage_data[item_of(metadata, "text")]
    data = bytearray((raw / "__0_0.distcp").read_bytes())
    data[place.offset : place.offset + place.length] = json.dumps("x" * (place.length - 2)).encode()
    (raw / "__0_0.distcp").write_bytes(data)
    seen = look(raw)
    assert seen is not None
    assert seen.findings == ()
    assert "text" not in {extent.name for extent in seen.extents["__0_0.distcp"]}


def test_of_a_list_that_is_too_long_only_the_names_of_files_count(directory: Path) -> None:
    """A commit may have seconds: a missing file is found all the same, and what is in the files is left to `verify --deep`."""
    files = {path.name: path.stat().st_size for path in directory.iterdir()}

    def of(names: dict[str, int]) -> SetLook | None:
        return reader.read_set(Folder("dcp", names, lambda path: open_regular(directory / path), listing_bytes_max=10))

    assert of(files) == SetLook(reader.FORMAT)
    gone = min(name for name in files if name.endswith(".distcp") and files[name])
    less = of({name: size for name, size in files.items() if name != gone})
    assert less is not None
    assert [(finding.verdict, finding.path) for finding in less.findings] == [(Verdict.MISSING, gone)]


def test_a_shard_alone_is_read_as_the_chain_of_archives_that_it_is(directory: Path) -> None:
    """What one task checks of another's save has no `.metadata` to go by: each archive's own checksums count."""
    shard = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    fd = os.open(shard, os.O_RDONLY)
    try:
        assert read_structure(fd, shard.stat().st_size).extents
    finally:
        os.close(fd)


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    """Empty ones, and a `.metadata` of another program."""
    assert look(tmp_path) is None
    (tmp_path / ".metadata").write_text('{"format": "other"}')
    assert look(tmp_path) is None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(["torch"]))
    assert look(tmp_path) is None


def test_an_empty_shard_of_a_rank_that_had_nothing_to_write_is_whole(directory: Path) -> None:
    """For the whole look, by itself too, and for another node's share of it; one that has lost its items is not."""
    (directory / "__7_0.distcp").write_bytes(b"")
    assert check_foreign(directory).reason == ""
    assert check_files(directory, [Expected("__7_0.distcp", 0, "", 7)], share=True)[0].reason == ""
    (directory / "__1_0.distcp").write_bytes(b"")
    assert check_foreign(directory).verdict is Verdict.TRUNCATED
    (directory / ".metadata").unlink()
    assert check_foreign(directory).verdict is Verdict.MISSING


class MCoreMetadata(Metadata):
    """As forks of Megatron have it."""


def test_metadata_of_a_subclass_is_read(directory: Path) -> None:
    """With fields of its own; what it says of files counts all the same."""
    metadata: Any = dcp.FileSystemReader(directory).read_metadata()
    metadata.__class__ = MCoreMetadata
    metadata.mcore_data = {"a": {"nd_reformulated_orig_global_shape": (2, 3)}}
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert found(directory) == []
    (directory / "__1_0.distcp").unlink()
    assert found(directory) == [(Verdict.MISSING, "__1_0.distcp")]
