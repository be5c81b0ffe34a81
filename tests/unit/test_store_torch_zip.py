"""Files of torch.save: every kind of damage is seen, no good one is refused, nothing is ever unpickled."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from ckpt_supervisor.store import Expected, Report, Verdict, check_files
from ckpt_supervisor.store.formats import Damage, Structure, read_structure
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def read(path: Path) -> Structure:
    """The structure of a file on the disk."""
    with path.open("rb") as file:
        return read_structure(file.fileno(), path.stat().st_size)


def check(directory: Path, size: int, digest: str = "", mode: str = "full") -> Report:
    """Check state.pt in this directory as rank 0 reported it."""
    return check_files(directory, [Expected("state.pt", size, digest, 0)], mode)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved() -> bytes:
    """The bytes of a real torch.save of some tensors, among them an empty one."""
    torch.manual_seed(3)
    stream = io.BytesIO()
    tensors = {"model": torch.randn(300, 500), "one": torch.ones(1), "none": torch.zeros(0)}
    torch.save({**tensors, "step": 12, "name": "x" * 500}, stream)
    return stream.getvalue()


@pytest.fixture
def directory(tmp_path: Path, saved: bytes) -> Path:
    """A directory with that file."""
    (tmp_path / "state.pt").write_bytes(saved)
    return tmp_path


@pytest.fixture
def without_checksums() -> Iterator[None]:
    """Torch's switch that writes every CRC32 as 0."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def test_the_walk_finds_what_zipfile_finds(directory: Path) -> None:
    """Records, places and checksums agree with Python's own reader, and the bytes there are the tensors'."""
    structure = read(directory / "state.pt")
    assert structure.format == "torch zip"
    data = (directory / "state.pt").read_bytes()
    with zipfile.ZipFile(directory / "state.pt") as archive:
        theirs = [(info.filename, info.CRC, archive.read(info)) for info in archive.infolist()]
    assert [(extent.name, extent.crc32, data[extent.start : extent.end]) for extent in structure.extents] == theirs


def test_a_good_file_is_intact_and_gets_its_digest(directory: Path, saved: bytes) -> None:
    """The digest in the manifest is that of the bytes on the disk, with and without the rank's own."""
    digest = xxhash.xxh3_128_hexdigest(saved)
    for word in ("", digest):
        report, entries = check_files(directory, [Expected("state.pt", len(saved), word, 0)])
        assert (report.verdict, report.findings, report.unchecked) == (Verdict.INTACT, (), ())
        assert [(entry.path, entry.bytes, entry.xxh3_128, entry.rank) for entry in entries] == [
            ("state.pt", len(saved), digest, 0)
        ]


CUTS = {"0": 0, "1 byte": 1, "100 bytes": 100, "half": 0.5, "size-1": -1, "size-22": -22}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", ["full", "structure"])
def test_a_cut_file_is_truncated(directory: Path, saved: bytes, cut: str, mode: str) -> None:
    """A file cut anywhere is refused by its size, as a kill in mid-write leaves it (field case 67)."""
    where = CUTS[cut]
    length = int(len(saved) * where) if isinstance(where, float) else where % len(saved)
    os.truncate(directory / "state.pt", length)
    report = check(directory, len(saved), mode=mode)
    assert report.verdict is Verdict.TRUNCATED
    assert report.findings[0].path == "state.pt"
    assert str(len(saved)) in report.reason


@pytest.mark.parametrize("cut", ["100 bytes", "half", "size-1", "size-22"])
def test_a_cut_file_that_nobody_reported_is_truncated_too(directory: Path, saved: bytes, cut: str) -> None:
    """Without any word about its size the archive's own end tells, for every cut that leaves its head."""
    where = CUTS[cut]
    os.truncate(directory / "state.pt", int(len(saved) * where) if isinstance(where, float) else where % len(saved))
    (directory / "other").write_bytes(b"x")
    report, entries = check_files(directory, [Expected("other", 1, "", 0)], "structure")
    assert (report.verdict, entries) == (Verdict.TRUNCATED, ())


def test_a_zeroed_end_is_corrupt(directory: Path, saved: bytes) -> None:
    """A last kilobyte of zeros leaves the size right and the archive without an end (field case 67)."""
    (directory / "state.pt").write_bytes(saved[:-1024] + bytes(1024))
    for mode in ("full", "structure"):
        assert check(directory, len(saved), mode=mode).verdict is Verdict.CORRUPT


def test_a_flipped_bit_is_seen_by_the_digest_and_by_the_checksum(directory: Path, saved: bytes) -> None:
    """A bit that torch.load would not notice is named with its record, whether a rank hashed or not."""
    damaged = bytearray(saved)
    damaged[len(saved) // 2] ^= 1
    (directory / "state.pt").write_bytes(damaged)
    torch.load(directory / "state.pt", weights_only=True)  # this is why the check exists
    for digest, word in (("", "CRC32"), (xxhash.xxh3_128_hexdigest(saved), "XXH3-128")):
        report = check(directory, len(saved), digest)
        assert report.verdict is Verdict.CORRUPT
        assert word in report.reason
        assert "data/0" in report.reason
        assert report.findings[0].offset is not None
    assert check(directory, len(saved), mode="structure").verdict is Verdict.INTACT


@pytest.mark.usefixtures("without_checksums")
def test_checksums_switched_off_are_not_corruption(tmp_path: Path) -> None:
    """All CRC32s 0 means that there are none: intact, and named as unchecked."""
    torch.save({"model": torch.randn(1000)}, tmp_path / "state.pt")
    size = (tmp_path / "state.pt").stat().st_size
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
        assert archive.testzip() is not None  # the false alarm that we must not give
    report = check(tmp_path, size)
    assert (report.verdict, report.unchecked) == (Verdict.INTACT, ("state.pt",))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_flipped_bit_in_a_record_is_seen_by_its_checksum(directory: Path, saved: bytes, data: st.DataObject) -> None:
    """Of the bytes that torch.load hands to training, none can change unseen, digest or not."""
    (directory / "state.pt").write_bytes(saved)
    extents = [extent for extent in read(directory / "state.pt").extents if extent.end > extent.start]
    extent = data.draw(st.sampled_from(extents))
    at = data.draw(st.integers(extent.start, extent.end - 1))
    damaged = bytearray(saved)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    (directory / "state.pt").write_bytes(damaged)
    report = check(directory, len(saved))
    assert report.verdict is Verdict.CORRUPT
    assert extent.name in report.reason


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(at=st.integers(0, 10**9), bit=st.integers(0, 7), length=st.integers(0, 10**9))
def test_whatever_is_done_to_a_file_ends_in_a_verdict(directory: Path, saved: bytes, at: int, bit: int, length: int) -> None:
    """A flip anywhere, a cut anywhere, or both give a structure or a damage and no other error."""
    damaged = bytearray(saved[: length % (len(saved) + 1)])
    for where in (at % len(saved), len(saved) - 1 - at % 1500):
        if where < len(damaged):
            damaged[where] ^= 1 << bit
    (directory / "state.pt").write_bytes(damaged)
    try:
        assert read(directory / "state.pt").format in ("plain", "torch zip")
    except Damage as error:
        assert error.verdict in (Verdict.TRUNCATED, Verdict.CORRUPT)
        assert error.reason


def test_bytes_after_the_end_are_corrupt(directory: Path, saved: bytes) -> None:
    """One byte too many, and a page of zeros, are refused by the archive's end even when the size is believed."""
    for tail in (b"\0", bytes(4096)):
        (directory / "state.pt").write_bytes(saved + tail)
        report = check(directory, len(saved) + len(tail))
        assert report.verdict is Verdict.CORRUPT
        assert f"{len(tail)} bytes after" in report.reason


def test_bytes_inserted_in_the_middle_are_corrupt(directory: Path, saved: bytes) -> None:
    """An archive whose directory has moved does not agree with its end."""
    (directory / "state.pt").write_bytes(saved[:5000] + b"!" + saved[5000:])
    assert check(directory, len(saved) + 1).verdict is Verdict.CORRUPT


def test_a_real_distributed_checkpoint_is_no_damage(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint writes on one process passes, also without a look at the set."""
    writer = dcp.FileSystemWriter(tmp_path / "dcp", sync_files=False)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": torch.randn(100), "b": torch.randn(100)}, storage_writer=writer, no_dist=True)
    found = {path.name: path.stat().st_size for path in (tmp_path / "dcp").iterdir()}
    assert ".metadata" in found
    report, entries = check_files(tmp_path / "dcp", [Expected(name, size, "", 0) for name, size in found.items()])
    assert (report.verdict, len(entries)) == (Verdict.INTACT, len(found))


def test_names_do_not_decide_the_format(tmp_path: Path, saved: bytes) -> None:
    """A torch file under another name is walked; a text named .pt, a numpy archive, a legacy pickle are plain."""
    (tmp_path / "weights.bin").write_bytes(saved)
    assert read(tmp_path / "weights.bin").format == "torch zip"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("arr_0.npy", b"1234")
    for content in (b"", b"P", b"hello", b"PK\x03\x04", pickle.dumps([1]), stream.getvalue()):
        (tmp_path / "text.pt").write_bytes(content)
        assert read(tmp_path / "text.pt").format == "plain"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        """What a hostile pickle has in it."""
        return (open, (self.marker, "w"))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle that would make a file, and one of a class that nobody has, are checked without being read (field case
    87).
    """
    marker = tmp_path / "marker"
    (tmp_path / "ckpt").mkdir()
    torch.save({"bomb": Bomb(str(marker)), "model": torch.ones(5)}, tmp_path / "ckpt" / "state.pt")
    (tmp_path / "ckpt" / "legacy.pt").write_bytes(pickle.dumps(Bomb(str(marker))))
    expected = [Expected(path.name, path.stat().st_size, "", 0) for path in (tmp_path / "ckpt").iterdir()]
    report, _ = check_files(tmp_path / "ckpt", expected)
    assert (report.verdict, report.unchecked) == (Verdict.INTACT, ("legacy.pt",))
    assert not marker.exists()


def test_the_store_needs_neither_torch_nor_pickle() -> None:
    """Importing the store brings in none of the code that could run what is in a checkpoint."""
    code = "import sys, ckpt_supervisor.store; print(sorted({'torch', 'pickle', 'structlog'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def rewritten(saved: bytes, entry: bytes, records: int = 1, directory_bytes: int | None = None) -> bytes:
    """The archive with its first record only, and this entry for it under a 64-bit end that claims so many records."""
    start, stated = saved.index(b"PK\x03\x04", 4), len(entry)
    assert saved[start - 16 : start - 12] == b"PK\x07\x08"
    claimed = stated if directory_bytes is None else directory_bytes
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0, 45, 0, 0, records, records, claimed, start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + stated, 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return saved[:start] + entry + end + locator + last


def entry_of(name: bytes, crc32: int, size: int, offset: int, extra: bytes = b"") -> bytes:
    """One entry of an archive's directory."""
    fields = (0, 0, 0x808, 0, 0, 0, crc32, size, size, len(name), len(extra), 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name + extra


def test_hostile_counts_are_refused_before_anything_is_allocated(directory: Path, saved: bytes) -> None:
    """A directory that claims more records or bytes than there can be is damage, at once."""
    first = read(directory / "state.pt").extents[0]
    entry = entry_of(first.name.encode(), first.crc32, first.end - first.start, 0)
    for records, length in ((2**63, None), (1, 2**62), (1, 2**64 - 1), (2, None), (0, None), (200_001, 64)):
        (directory / "state.pt").write_bytes(rewritten(saved, entry, records, length))
        with pytest.raises(Damage):
            read(directory / "state.pt")


def test_overlapping_and_misplaced_records_are_refused(directory: Path, saved: bytes) -> None:
    """Two records over the same bytes, one behind the directory, and one under another's name are damage."""
    first = read(directory / "state.pt").extents[0]
    name, size = first.name.encode(), first.end - first.start
    good = entry_of(name, first.crc32, size, 0)
    (directory / "state.pt").write_bytes(rewritten(saved, good))
    assert read(directory / "state.pt").extents == (first,)
    for entry, records in (
        (good + good, 2),
        (entry_of(name, first.crc32, size, len(saved) - 40), 1),
        (entry_of(b"x" * len(name), first.crc32, size, 0), 1),
        (entry_of(name, first.crc32, 0xFFFFFFF0, 0), 1),
        (good[:-1], 1),
        (good + b"more", 1),
    ):
        (directory / "state.pt").write_bytes(rewritten(saved, entry, records))
        with pytest.raises(Damage):
            read(directory / "state.pt")
