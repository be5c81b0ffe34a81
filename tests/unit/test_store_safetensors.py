"""Files of safetensors, alone and with an index: what the stock loader refuses is refused, and what it takes is taken."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_supervisor.store import Report, Verdict, check_foreign, verify_checkpoint
from ckpt_supervisor.store.formats import Damage, read_structure

from tests.support.checkpoint_files import (
    CUTS,
    Files,
    committed_files,
    safetensors_file,
    safetensors_header,
    sharded_model,
    write_files,
)


def read(tmp_path: Path, data: bytes) -> str:
    """What format this is, or the verdict and the reason."""
    (tmp_path / "some").write_bytes(data)
    with (tmp_path / "some").open("rb") as file:
        try:
            return read_structure(file.fileno(), len(data)).format
        except Damage as error:
            return f"{error.verdict.value}: {error.reason}"


GOOD = {
    "usual": safetensors_file(["a", "b", "c"], 1),
    "no tensor": safetensors_header({}, metadata=False),
    "metadata alone": safetensors_header({}),
    "an empty tensor": safetensors_header({"none": ("F32", (0, 2**40), 0, 0), "one": ("U8", (), 0, 1)}) + b"x",
    "in another order": safetensors_header({"later": ("I16", (2,), 2, 6), "earlier": ("BOOL", (2,), 0, 2)}) + b"123456",
    "less than a byte each": safetensors_header({"four": ("F4", (4,), 0, 2)}) + b"12",
    "a newer type": safetensors_header({"new": ("F3_E1M1", (8,), 0, 3)}) + b"123",
    "spaces before the name": struct.pack("<Q", 8) + b"{      }",
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_file_is_recognised_by_its_bytes(tmp_path: Path, kind: str) -> None:
    """Whatever its name is; also what looks odd and is allowed."""
    assert read(tmp_path, GOOD[kind]) == "safetensors"


def header(text: bytes, data: bytes = b"") -> bytes:
    """Any text as a header."""
    return struct.pack("<Q", len(text)) + text + data


def of(**entry: object) -> bytes:
    """A file with one tensor of these words, one byte of data."""
    whole = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | entry
    return header(json.dumps({"t": whole}).encode(), b"x")


BAD: dict[str, tuple[bytes, str]] = {
    "one byte more": (GOOD["usual"] + b"\0", "corrupt: 1 bytes after the last tensor"),
    "a page of zeros more": (GOOD["usual"] + bytes(4096), "corrupt: 4096 bytes after the last tensor"),
    "one byte less": (GOOD["usual"][:-1], "truncated: 1 bytes of the last tensors are not there"),
    "cut in the header": (GOOD["usual"][:60], "truncated: ends inside the header"),
    "cut behind its first byte": (GOOD["usual"][:9], "truncated: ends inside the header"),
    "a hole": (safetensors_header({"a": ("U8", (1,), 0, 1), "b": ("U8", (1,), 2, 3)}) + b"123", "corrupt: tensor 'b' begins"),
    "an overlap": (safetensors_header({"a": ("U8", (2,), 0, 2), "b": ("U8", (2,), 1, 3)}) + b"123", "corrupt: tensor 'b' begins"),
    "not from the start": (safetensors_header({"a": ("U8", (1,), 1, 2)}) + b"12", "corrupt: tensor 'a' begins"),
    "a size that does not fit": (of(shape=[2]), "corrupt: tensor 't' of 2 U8 does not fill"),
    "backwards": (of(data_offsets=[1, 0]), "corrupt: tensor 't' of 1 U8"),
    "a negative place": (of(data_offsets=[-1, 0]), "corrupt: the header's entry of tensor 't'"),
    "a shape beyond 64 bits": (of(shape=[2**62, 2**62]), "corrupt: tensor 't'"),
    "a number beyond 64 bits": (of(shape=[2**64]), "corrupt: the header's entry"),
    "many dimensions": (of(shape=[1] * 1000), "corrupt: the header's entry"),
    "a fraction": (of(shape=[1.0]), "corrupt: the header's entry"),
    "true as a number": (of(shape=[True]), "corrupt: the header's entry"),
    "no type": (of(dtype=None), "corrupt: the header's entry"),
    "three offsets": (of(data_offsets=[0, 0, 1]), "corrupt: the header's entry"),
    "no JSON": (header(b'{"t": }'), "corrupt: the header is broken"),
    "a name twice": (header(b'{"t": {}, "t": {}}'), "corrupt: the header is broken: a name stands there twice"),
    "nested without end": (header(b'{"t":' + b"[" * 100_000), "corrupt: the header is broken"),
    "not UTF-8": (header(b'{"\xff": {}}'), "corrupt: the header is broken"),
    "a number of a million digits": (header(b'{"t":' + b"9" * 1_000_000 + b"}"), "corrupt: the header is broken"),
    "too many tensors": (header(b'{"t":' + b'"data_offsets"' * 200_001), "corrupt: a header of more than"),
    "too many numbers": (header(b'{"t":[' + b"0," * 4_000_001), "corrupt: a header of more than"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_one_is_refused(tmp_path: Path, kind: str) -> None:
    """Trailing bytes (field case 72), cuts, arithmetic that is wrong or does not fit 64 bits, counts without bound."""
    data, expected = BAD[kind]
    assert read(tmp_path, data).startswith(expected)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"{", b"\x08\0\0\0\0\0\0\0", bytes(9000), b"\xff" * 9000, b'{"json": true, "a": "b"}']
)
def test_other_files_are_plain(tmp_path: Path, data: bytes) -> None:
    """Short files, zeros, noise and JSON are not taken for one."""
    assert read(tmp_path, data) == "plain"


def test_any_bytes_at_all_give_an_answer(tmp_path: Path) -> None:
    """Flipped bits and cuts of a good file: recognised, damaged or plain, never another error."""
    words = set()
    random_ = random.Random(7)
    for _ in range(600):
        data = bytearray(GOOD["usual"][: random_.choice([len(GOOD["usual"]), random_.randrange(len(GOOD["usual"]))])])
        if data:
            data[random_.randrange(min(len(data), 300))] ^= 1 << random_.randrange(8)
        words.add(read(tmp_path, bytes(data)).split(":")[0])
    assert words <= {"safetensors", "plain", "truncated", "corrupt"}
    assert len(words) >= 3


@pytest.mark.parametrize("where", CUTS)
def test_without_a_manifest_its_name_says_what_it_should_be(tmp_path: Path, where: str) -> None:
    """A cut that leaves no header, and one that was never written, are refused when the file is called .safetensors."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD["usual"])
    assert check_foreign(path).verdict is Verdict.INTACT
    assert check_foreign(path).unchecked == ("model.safetensors",)
    os.truncate(path, CUTS[where](len(GOOD["usual"])))
    assert check_foreign(path).verdict is Verdict.TRUNCATED
    path.write_bytes(bytes(len(GOOD["usual"])))
    assert check_foreign(path).verdict is Verdict.CORRUPT


def test_a_payload_of_zeros_shows_in_the_digest_alone(tmp_path: Path) -> None:
    """Header and sizes right, the tensors zeros: refused in a committed checkpoint, not seen without (field case 75)."""
    checkpoint = committed_files(tmp_path, 5, {"model.safetensors": GOOD["usual"]})
    data_at = len(GOOD["usual"]) - 720
    (checkpoint / "model.safetensors").write_bytes(GOOD["usual"][:data_at] + bytes(720))
    report = verify_checkpoint(checkpoint)
    assert report.verdict is Verdict.CORRUPT
    assert f"all zeros from byte {data_at} on" in report.reason
    assert check_foreign(checkpoint / "model.safetensors").verdict is Verdict.INTACT


def judged(tmp_path: Path, change: Callable[[Files], object]) -> Report:
    """The sharded model after a change, judged without a manifest."""
    files = sharded_model(1)
    change(files)
    return check_foreign(write_files(tmp_path / "model", files))


SHARDS = [f"model-{shard:05d}-of-00003.safetensors" for shard in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def in_index(files: Files, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change the index."""
    index = json.loads(files[INDEX])
    change(index)
    files[INDEX] = json.dumps(index).encode()


def swap(files: Files) -> None:
    """Two shards under each other's names."""
    files[SHARDS[0]], files[SHARDS[1]] = files[SHARDS[1]], files[SHARDS[0]]


SETS: dict[str, tuple[Callable[[Files], object], Verdict, str]] = {
    "a shard missing": (lambda files: files.pop(SHARDS[1]), Verdict.MISSING, SHARDS[1]),
    "a shard under another's name": (lambda files: files.update({SHARDS[0]: files[SHARDS[1]]}), Verdict.MIXED, SHARDS[0]),
    "two shards swapped": (swap, Verdict.MIXED, SHARDS[0]),
    "a tensor missing": (
        lambda files: files.update({SHARDS[0]: safetensors_file(["layers.0.weight"], 1)}),
        Verdict.MISSING,
        SHARDS[0],
    ),
    "a shard of another type": (
        lambda files: files.update({SHARDS[0]: safetensors_file(["layers.0.weight", "layers.1.weight"], 1, "BF16")}),
        Verdict.MIXED,
        INDEX,
    ),
    "a shard cut": (lambda files: files.update({SHARDS[2]: files[SHARDS[2]][:-1]}), Verdict.TRUNCATED, SHARDS[2]),
    "an index cut": (lambda files: files.update({INDEX: files[INDEX][:90]}), Verdict.CORRUPT, INDEX),
    "an index of zeros": (lambda files: files.update({INDEX: bytes(300)}), Verdict.CORRUPT, INDEX),
    "an empty index": (lambda files: files.update({INDEX: b""}), Verdict.TRUNCATED, INDEX),
    "an index that leaves": (
        lambda files: in_index(files, lambda index: index["weight_map"].update(x="../../etc/passwd")),
        Verdict.FOREIGN,
        INDEX,
    ),
    "an index of nothing": (lambda files: in_index(files, lambda index: index.update(weight_map={})), Verdict.CORRUPT, INDEX),
}


@pytest.mark.parametrize("kind", SETS)
def test_what_an_index_names_has_to_be_there_and_fit(tmp_path: Path, kind: str) -> None:
    """A directory whose index and shards do not agree is refused, with the file that does not fit."""
    change, verdict, path = SETS[kind]
    report = judged(tmp_path, change)
    assert (report.verdict, report.findings[0].path) == (verdict, path), report


@pytest.mark.parametrize(
    "kind", ["as it is", "no sum", "a sum of views", "a sum of a later version", "another kind of index", "of pickles"]
)
def test_good_sets_are_no_false_alarm(tmp_path: Path, kind: str) -> None:
    """Also with a sum that counts storages, or is no number, and with JSON that only has such a name."""
    changes: dict[str, Callable[[Files], object]] = {
        "as it is": len,
        "no sum": lambda files: in_index(files, lambda index: index.pop("metadata")),
        "a sum of views": lambda files: in_index(files, lambda index: index["metadata"].update(total_size=99_999)),
        "a sum of a later version": lambda files: in_index(files, lambda index: index["metadata"].update(total_size={"gpu": 1})),
        "another kind of index": lambda files: files.update({"data.index.json": b"[1, 2]", "faiss.bin.index.json": b'{"of": 1}'}),
        "of pickles": lambda files: files.update(
            {"pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-1.bin"}}', "pytorch_model-1.bin": b"pickle"}
        ),
    }
    assert judged(tmp_path, changes[kind]).verdict is Verdict.INTACT
