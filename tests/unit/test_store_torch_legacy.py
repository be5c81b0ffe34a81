"""Files of torch.save before torch 1.6: structure only, without unpickling, and no good one refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_supervisor.store import Verdict
from ckpt_supervisor.store.formats.structure import Damage, Structure
from ckpt_supervisor.store.formats.torch_legacy import FORMAT, MAGIC_NUMBER, PROTOCOL_VERSION, read_structure
from ckpt_supervisor.store.verify import check_foreign
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.float8_e4m3fn,
]  # fmt: skip


def legacy(value: Any, protocol: int = 2) -> bytes:
    """The bytes of a real legacy save."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def read(data: bytes) -> Structure | None:
    """What the reader says of these bytes."""
    fd = os.memfd_create("legacy")
    try:
        os.write(fd, data)
        return read_structure(fd, len(data))
    finally:
        os.close(fd)


def damage_of(data: bytes) -> Damage:
    """What is wrong with these bytes."""
    with pytest.raises(Damage) as caught:
        read(data)
    return caught.value


def training() -> dict[str, Any]:
    """A model and its optimizer, with tensors that share storages."""
    torch.manual_seed(3)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    base = torch.randn(20, 20)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "base": base, "view": base[3:5].t(),
        "empty": torch.zeros(0), "step": 7,
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved() -> bytes:
    """One of them."""
    return legacy(training())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_well_formed(protocol: int) -> None:
    """State dicts, every type of number, views, sparse and quantised tensors, bare storages, and no tensor at all."""
    for value in (
        training(), [torch.ones(3, dtype=dtype) for dtype in DTYPES], torch.eye(3).to_sparse(), torch.ones(4).untyped_storage(),
        torch.nn.Parameter(torch.ones(3)), {"text": "x" * 2_000_000}, 5, list(range(5000)),
    ):  # fmt: skip
        assert read(legacy(value, protocol)) == Structure(FORMAT)


def test_a_whole_module_is_well_formed(saved: bytes) -> None:
    """Its class is a reference of its own kind, with the source text."""
    assert read(legacy(torch.nn.Linear(3, 4))) == Structure(FORMAT)


def test_several_saves_into_one_file_are_well_formed(saved: bytes) -> None:
    """torch.load reads them one after the other."""
    assert read(saved + legacy(5) + saved) == Structure(FORMAT)
    assert damage_of(saved + saved[:-1]).verdict is Verdict.TRUNCATED


def test_other_files_are_not_of_this_format() -> None:
    """Zips of torch, pickles, texts and nothing."""
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    for data in (b"", b"\x80", stream.getvalue(), pickle.dumps([1]), b"hello" * 100):
        assert read(data) is None


def test_a_cut_anywhere_is_truncated(saved: bytes) -> None:
    """From the first byte after the magic number to the last."""
    for length in {*range(14, 400), *range(14, len(saved), 97), len(saved) - 22, len(saved) - 1}:
        assert damage_of(saved[:length]).verdict is Verdict.TRUNCATED, length
    assert "1 bytes are missing" in damage_of(legacy({"a": torch.ones(100)})[:-1]).reason
    for length in (0, 1, 13):
        assert read(saved[:length]) is None


def test_bytes_after_the_end_are_corrupt(saved: bytes) -> None:
    """One, and a page of zeros."""
    for tail in (b"x", bytes(4096)):
        found = damage_of(saved + tail)
        assert (found.verdict, found.offset) == (Verdict.CORRUPT, len(saved))


def test_zeros_over_what_is_not_numbers_are_corrupt(saved: bytes) -> None:
    """Over the pickles, and over the size of the last storage."""
    assert damage_of(saved[:100] + bytes(200) + saved[300:]).verdict is Verdict.CORRUPT
    one = legacy({"a": torch.ones(100)})
    assert damage_of(one[:-408] + bytes(408)).verdict is Verdict.CORRUPT


def part(value: Any) -> bytes:
    """The opcodes of a value, without a pickle's beginning and end."""
    return pickle.dumps(value, 2)[2:-1]


def head(keys: Any, kind: str = "ByteStorage", count: Any = 1, version: int = PROTOCOL_VERSION, reference: Any = None) -> bytes:
    """A hostile file up to its storages."""
    storage = b"(" + part("storage") + f"ctorch\n{kind}\n".encode() + part("1") + part("cpu") + part(count) + b"Nt"
    named = b"\x80\x02" + (storage if reference is None else part(reference)) + b"Q."
    return b"".join(pickle.dumps(value, 2) for value in (MAGIC_NUMBER, version, {})) + named + pickle.dumps(keys, 2)


def test_what_does_not_fit_together_is_corrupt() -> None:
    """Storages that the object does not name, or twice, or of another size; references to nothing; a wrong version."""
    one = (1).to_bytes(8, "little") + bytes(4)
    assert read(head(["1"]) + one[:9]) == Structure(FORMAT)
    for data in (
        head(["2"]) + one, head(["1", "1"]) + one, head([]), head(["1"]) + bytes(9), head("1"), head([1]),
        head(["1"], count=-5), head(["1"], count="5"), head(["1"], reference=("other", 5)),
        head(["1"], reference=5), head(["1"], version=1002) + one,
    ):  # fmt: skip
        assert damage_of(data).verdict is Verdict.CORRUPT
    huge = 2**62
    assert damage_of(head(["1"], count=huge) + huge.to_bytes(8, "little")).verdict is Verdict.TRUNCATED


def test_what_cannot_be_judged_is_left_to_the_plain_reader() -> None:
    """A storage of a kind that nobody knows, and a pickle out of bounds."""
    start = legacy(5)[: legacy(5).index(b"\x80\x02K\x05.")]
    for data in (b"\x8b\xff\xff\xff\x7f.", b"N" * 4_100_000 + b"."):
        assert read(start + data) is None
    assert read(head(["1"], kind="OddStorage")) is None


def test_a_large_pickle_before_the_storages_is_read_on(saved: bytes) -> None:
    """Nothing says how long the pickles are: more is read until they end."""
    data = legacy({"bytes": os.urandom(3_000_000), "a": torch.ones(3)})
    assert read(data) == Structure(FORMAT)
    assert damage_of(data[:2_000_000]).verdict is Verdict.TRUNCATED


def test_a_file_larger_than_memory_costs_its_pickles_only(tmp_path: Path) -> None:
    """A storage of 8 GiB, sparse: its size is arithmetic."""
    small = head(["1"], "FloatStorage", 2**31)
    with (tmp_path / "big.pt").open("w+b") as file:
        file.write(small + (2**31).to_bytes(8, "little"))
        size = len(small) + 8 + 4 * 2**31
        file.truncate(size)
        file.flush()
        assert read_structure(file.fileno(), size) == Structure(FORMAT)
        file.truncate(size - 1)
        with pytest.raises(Damage, match="1 bytes are missing"):
            read_structure(file.fileno(), size - 1)


@settings(max_examples=500, deadline=None)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), length=st.integers(0, 10**6))
def test_whatever_is_done_to_a_file_ends_in_a_verdict(saved: bytes, at: int, bit: int, length: int) -> None:
    """A flip and a cut anywhere give a structure, nothing, or a damage."""
    data = bytearray(saved[: length % (len(saved) + 1)] if at % 2 else saved)
    if data:
        data[at % len(data)] ^= 1 << bit
    try:
        read(bytes(data))
    except Damage as error:
        assert error.verdict in (Verdict.TRUNCATED, Verdict.CORRUPT)
        assert error.reason


def test_nothing_is_executed(tmp_path: Path) -> None:
    """A command in the object is a name, whatever comes of it."""
    marker = tmp_path / "marker"

    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.system, (f"touch {marker}",))

    assert read(legacy({"a": Runs(), "b": torch.ones(2)})) == Structure(FORMAT)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.ckpt", "a.bin"])
def test_the_first_bytes_of_a_file_of_torch_are_truncated(tmp_path: Path, saved: bytes, name: str) -> None:
    """Too short to be told by its magic number, but its name says what it should be; other pickles and files are let be."""
    path = tmp_path / name
    for length in (*range(1, 16), 40, len(saved) // 2):
        path.write_bytes(saved[:length])
        assert check_foreign(path).verdict is Verdict.TRUNCATED, length
    for data in (saved, pickle.dumps({"a": 1}), b"\x80", b"\x80\x90abc", b"text"):
        path.write_bytes(data)
        whole = data != b"\x80"
        assert (check_foreign(path).verdict is Verdict.INTACT) == whole, data
    other = tmp_path / "a.dat"
    other.write_bytes(b"\x80")
    assert check_foreign(other).verdict is Verdict.INTACT
