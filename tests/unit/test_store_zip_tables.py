"""What stands between the records of torch's archives, archives of 4 GiB and more, and many in one file."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_supervisor.store import Verdict
from ckpt_supervisor.store.crc import combine
from ckpt_supervisor.store.formats.structure import Damage, Structure
from ckpt_supervisor.store.formats.torch_zip import CHAIN_FORMAT, FORMAT, read_chain, read_structure, read_window
from hypothesis import given, settings
from hypothesis import strategies as st

BIG = 2**32 + 1000


def saved(value: Any) -> bytes:
    """The bytes of a real save."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


ONE = saved({"model": torch.arange(50.0), "none": torch.zeros(0), "step": 12})


@pytest.fixture
def fd() -> Iterator[int]:
    """An empty file in memory."""
    opened = os.memfd_create("zip")
    yield opened
    os.close(opened)


def read(fd: int, data: bytes) -> Structure | None:
    """The structure of a file of these bytes."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    return read_structure(fd, len(data))


def is_refused(fd: int, data: bytes) -> bool:
    """By the tables, or by a checksum."""
    try:
        structure = read(fd, data)
    except Damage:
        return True
    assert structure is not None
    assert structure.format == FORMAT
    return any(zlib.crc32(data[extent.start : extent.end]) != extent.crc32 for extent in structure.extents)


def test_every_flipped_bit_of_an_archive_is_seen_but_for_two_versions_that_nobody_reads(fd: int) -> None:
    """Each bit of each byte, headers and padding and names and ends, also the very first ones, without any digest."""
    unseen = set()
    data = bytearray(ONE)
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            if not is_refused(fd, bytes(data)):
                unseen.add(at)
            data[at] ^= 1 << bit
    versions = ONE.rindex(b"PK\x06\x06") + 12
    assert unseen <= set(range(versions, versions + 4))


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, len(ONE) - 1), length=st.integers(1, len(ONE)), fill=st.sampled_from([b"\0", b"\xff"]))
def test_every_part_that_is_overwritten_is_seen(start: int, length: int, fill: bytes) -> None:
    """By zeros or by ones, unless both ends are gone: then nothing says what the file was."""
    damaged = ONE[:start] + fill * min(length, len(ONE) - start) + ONE[start + length :]
    versions = ONE.rindex(b"PK\x06\x06") + 12
    is_same = damaged[:versions] + damaged[versions + 4 :] == ONE[:versions] + ONE[versions + 4 :]
    has_no_ends = start < 46 and start + length > ONE.index(b"PK\x01\x02")
    fd = os.memfd_create("zip")
    try:
        assert is_same or has_no_ends or is_refused(fd, damaged)
    finally:
        os.close(fd)


def test_other_archives_of_the_same_records_are_no_damage(fd: int, tmp_path: Path) -> None:
    """Packed again by zipfile, plain or compressed, or with a record added; other alignments; TorchScript."""
    path = tmp_path / "file.pt"
    for method, extents in ((zipfile.ZIP_STORED, 8), (zipfile.ZIP_DEFLATED, 0)):
        with zipfile.ZipFile(io.BytesIO(ONE)) as old, zipfile.ZipFile(path, "w", method) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
        found = read(fd, path.read_bytes())
        assert found is not None
        assert (found.format, len(found.extents)) == (FORMAT, extents)
    path.write_bytes(ONE)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/more", "more")
    found = read(fd, path.read_bytes())
    assert found is not None
    assert found.extents[-1].name == "archive/more"
    with torch.utils.serialization.config.patch("save.storage_alignment", 4096):
        assert not is_refused(fd, saved({"a": torch.ones(3), "b": torch.ones(5)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(torch.nn.ReLU())
        torch.jit.save(script, path)
    assert read(fd, path.read_bytes()) == Structure(FORMAT)


def test_bytes_between_the_records_are_seen(fd: int) -> None:
    """A record that the directory leaves out is a gap: nothing would speak for its bytes."""
    start = struct.unpack_from("<Q", ONE, len(ONE) - 50)[0]
    second = ONE.index(b"PK\x01\x02", start + 4)
    third = ONE.index(b"PK\x01\x02", second + 4)
    without = ONE[start:second] + ONE[third : ONE.index(b"PK\x06\x06")]
    records = ONE.count(b"PK\x01\x02") - 1
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, records, records, len(without), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(without), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, records, records, len(without), start, 0)
    with pytest.raises(Damage, match=r"descriptor|belong to none"):
        read(fd, ONE[:start] + without + end + locator + last)


def test_a_window_of_a_file_is_read_with_the_files_offsets(fd: int) -> None:
    """As an item of a distributed checkpoint lies in its file; damage is told by the file's offset, too."""
    before, after = b"x" * 1000, b"PK\x05\x06" + bytes(18)
    os.pwrite(fd, before + ONE + after, 0)
    inside = read_window(fd, len(before), len(ONE))
    whole = read_structure(fd, len(before) + len(ONE) + len(after))
    assert whole is None
    assert inside is not None
    data = before + ONE
    assert all(zlib.crc32(data[extent.start : extent.end]) == extent.crc32 for extent in inside.extents)
    assert read_window(fd, 0, 1000) is None
    for size in (1, 29, 100, len(ONE) - 22, len(ONE) - 1):
        try:
            assert read_window(fd, len(before), size) is None
        except Damage as error:
            assert error.verdict is Verdict.TRUNCATED
            assert error.offset == len(before) + size


def test_a_chain_of_archives_is_read_from_behind(fd: int) -> None:
    """The files of torch.distributed.checkpoint, without anything that says where the items are."""
    two = saved([torch.ones(5)])
    data = ONE + two + ONE + ONE
    assert read(fd, data) is None
    found = read_chain(fd, len(data))
    assert found is not None
    assert found.format == CHAIN_FORMAT
    assert len(found.extents) == 3 * ONE.count(b"PK\x01\x02") + two.count(b"PK\x01\x02")
    assert all(zlib.crc32(data[extent.start : extent.end]) == extent.crc32 for extent in found.extents)
    read(fd, ONE)
    assert read_chain(fd, len(ONE)) is None
    read(fd, b"text" * 100)
    assert read_chain(fd, 400) is None


def test_a_damaged_chain_is_seen(fd: int) -> None:
    """Cut within an archive, with bytes between two, with the end of one overwritten, or without checksums in one."""
    data = ONE + ONE + ONE
    for damaged in (
        data[:-1], data[:-22], data[: 2 * len(ONE) + 100], ONE + b"x" + ONE, ONE + bytes(64) + ONE,
        ONE[:-30] + bytes(30) + ONE, data + b"x",
    ):  # fmt: skip
        os.ftruncate(fd, 0)
        os.pwrite(fd, damaged, 0)
        with pytest.raises(Damage):
            assert read_structure(fd, len(damaged)) or read_chain(fd, len(damaged))
    torch.serialization.set_crc32_options(False)
    try:
        bare = saved([torch.ones(5)])
    finally:
        torch.serialization.set_crc32_options(True)
    os.ftruncate(fd, 0)
    os.pwrite(fd, ONE + bare, 0)
    assert read_chain(fd, len(ONE) + len(bare)) == Structure(CHAIN_FORMAT)


class Sparse:
    """A file to which zeros are written as holes, so that 4 GiB cost nothing."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def write(self, data: Any) -> int:
        """Write, or skip over zeros."""
        view = np.frombuffer(data, dtype=np.uint8)
        if len(view) > 65536 and not view.any():
            self.file.seek(len(view), os.SEEK_CUR)
        else:
            self.file.write(data)
        return len(view)

    def flush(self) -> None:
        """As files have it."""
        self.file.flush()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real save of more than 4 GiB, of zeros, with records before and behind."""
    path = tmp_path_factory.mktemp("large") / "state.pt"
    stream = Sparse(path)
    zeros = torch.from_numpy(np.zeros(BIG, dtype=np.uint8))  # calloc: never written to, so no memory
    torch.save({"a": torch.arange(3.0), "big": zeros, "c": torch.arange(5.0), "none": torch.zeros(0)}, stream)
    stream.file.close()
    assert path.stat().st_blocks * 512 < 2**20
    yield path
    path.unlink()


def crc_of_zeros(count: int) -> int:
    """By squaring, as the reader's threads join theirs."""
    found, part, length = 0, zlib.crc32(b"\0"), 1
    while count:
        if count & 1:
            found = combine(found, part, length)
        part, length, count = combine(part, part, length), 2 * length, count >> 1
    return found


def test_files_above_4_gib_are_read(large: Path) -> None:
    """Sizes and places of 64 bits in directory, headers and descriptors, as torch writes them."""
    with large.open("rb") as file:
        found = read_structure(file.fileno(), large.stat().st_size)
        assert found is not None
        by_name = {extent.name: extent for extent in found.extents}
        big = by_name["archive/data/1"]
        assert (big.end - big.start, big.crc32) == (BIG, crc_of_zeros(BIG))
        for extent in found.extents:
            if extent is not big:
                assert zlib.crc32(os.pread(file.fileno(), extent.end - extent.start, extent.start)) == extent.crc32
        assert by_name["archive/data/2"].start > 2**32
        for size in (2**32 + 5000 - 22, big.end, 2**31):
            with pytest.raises(Damage) as caught:
                read_structure(file.fileno(), min(size, large.stat().st_size - 1))
            assert caught.value.verdict is Verdict.TRUNCATED


def test_every_flipped_bit_in_the_64_bit_tables_is_seen(large: Path, tmp_path: Path) -> None:
    """In all that stands around the records of a large file."""
    size = large.stat().st_size
    with large.open("rb") as file:
        found = read_structure(file.fileno(), size)
    assert found is not None
    covered = [(extent.start, extent.end) for extent in found.extents]
    fd = os.open(large, os.O_RDWR)
    unseen = set()
    try:
        edge = next(end for _, end in covered if end > 2**32)
        for at in (*range(edge - 200 - BIG, edge - BIG), *range(edge, size)):
            if any(start <= at < end for start, end in covered):
                continue
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 1 << at % 8]), at)
            try:
                read_structure(fd, size)
                unseen.add(at - size)
            except Damage:
                pass
            os.pwrite(fd, byte, at)
    finally:
        os.close(fd)
    assert unseen <= {-86, -85, -84, -83}


def test_two_large_archives_in_one_file_are_a_chain(large: Path) -> None:
    """Places count from each archive's own start."""
    size = large.stat().st_size
    fd = os.open(large, os.O_RDWR)
    try:
        os.pwrite(fd, ONE, size)
        assert read_structure(fd, size + len(ONE)) is None
        chain = read_chain(fd, size + len(ONE))
        assert chain is not None
        assert chain.extents[-1].end > 2**32
    finally:
        os.ftruncate(fd, size)
        os.close(fd)


def test_a_compressed_bomb_is_not_inflated(fd: int) -> None:
    """A gibibyte of zeros in a megabyte: its size is read and its bytes are left alone."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", b"N.")
        with archive.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(256):
                record.write(bytes(2**20))
    assert read(fd, stream.getvalue()) == Structure(FORMAT)
