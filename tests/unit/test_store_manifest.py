"""manifest.json: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor.store import (
    MANIFEST_BYTES_MAX,
    FileEntry,
    Manifest,
    ManifestError,
    Verdict,
    encode_manifest,
    path_problem,
    read_manifest,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint_files import flip

DIGEST = "0123456789abcdef" * 2


def a_manifest(*paths: str, verified: str = "full", digest: str = DIGEST) -> Manifest:
    """A manifest of these files."""
    return Manifest(
        step=1200, world_size=2, ranks=(0, 1), job="77_3", attempt=1, epoch=4, cause="preempted",
        created_at="2026-11-29T12:00:00Z", verified=verified,
        files=tuple(FileEntry(path, 5, digest, 0) for path in paths),
    )  # fmt: skip


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Every field survives the disk, and the file has the documented keys."""
    manifest = a_manifest("state.pt", "below/rank-00001.pt", "größe.pt")
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    assert read_manifest(tmp_path) == manifest
    keys = msgspec.json.decode((tmp_path / "manifest.json").read_bytes())
    assert list(keys) == [
        "format", "step", "world_size", "ranks", "job", "attempt", "epoch", "cause", "created_at", "verified",
        "save_ms", "files", "digest",
    ]  # fmt: skip
    assert list(keys["files"][0]) == ["path", "bytes", "xxh3_128", "rank"]
    assert manifest.total_bytes == 15


def test_a_manifest_from_before_there_was_a_save_time_is_read(tmp_path: Path) -> None:
    """It is 0 there, which means that it is not known; a reader that does not know the field passes it over."""
    data = encode_manifest(msgspec.structs.replace(a_manifest("state.pt"), save_ms=1234))
    without = b"\n".join(line for line in data.split(b"\n") if b"save_ms" not in line and b"digest" not in line[:10])
    (tmp_path / "manifest.json").write_bytes(without.replace(b" ],\n}", b" ]\n}"))
    assert read_manifest(tmp_path).save_ms == 0
    (tmp_path / "manifest.json").write_bytes(data)
    assert read_manifest(tmp_path).save_ms == 1234
    older = msgspec.defstruct("Older", [(name, msgspec.Raw) for name in Manifest.__struct_fields__[:10]])
    assert not hasattr(msgspec.json.decode(data, type=older), "save_ms")


BAD_PATHS = [
    "", ".", "..", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "nul\0", "new\nline", "tab\t",
    "manifest.json", "x" * 256, "/".join(["y" * 200] * 30), "\udcff.pt",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_leaves_or_confuses_is_refused(path: str) -> None:
    """Paths that are absolute, climb, hold control characters or are too long are named as a problem."""
    assert path_problem(path) != ""
    with pytest.raises(ValueError, match=r".+"):
        encode_manifest(a_manifest(path))


GOOD_PATHS = ["state.pt", ".metadata", "__0_0.distcp", "a/b/c", "a b", "...", "..x", "a\\b", "sub/manifest.json"]


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_an_ordinary_path_is_accepted(path: str) -> None:
    """Names that trainers really write are not refused."""
    assert path_problem(path) == ""


@given(st.text(alphabet=st.sampled_from("./a\0\n~é"), max_size=12))
def test_an_accepted_path_stays_below_the_checkpoint(path: str) -> None:
    """Whatever passes names a place strictly below the directory, however it is normalised."""
    if path_problem(path) == "":
        whole = os.path.normpath(os.path.join("/ckpt/step-000000001", path))  # noqa: PTH118
        assert whole == f"/ckpt/step-000000001/{path}"


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"", Verdict.TRUNCATED),
        (b"{", Verdict.TRUNCATED),
        (b"\0" * 900, Verdict.CORRUPT),
        (b"[" * 100_000, Verdict.CORRUPT),
        (b"\xff\xfe", Verdict.CORRUPT),
        (b'{"format": 1}', Verdict.CORRUPT),
        (b'{"format": 2, "shape": "unheard of"}', Verdict.FOREIGN),
        (encode_manifest(a_manifest("state.pt")).replace(b'"step": 1200', b'"step": -1'), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt")).replace(b'"step": 1200', b'"step": 1e400'), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt")).replace(b'"bytes": 5', b'"bytes": "5"'), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt")).replace(b"state.pt", b"../state"), Verdict.CORRUPT),
        (encode_manifest(a_manifest("a.pt", "b.pt")).replace(b"b.pt", b"a.pt"), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt")).replace(DIGEST.encode(), b""), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt")).replace(b'"world_size": 2', b'"world_size": 1'), Verdict.CORRUPT),
        (encode_manifest(a_manifest("state.pt"))[:-20], Verdict.TRUNCATED),
    ],
)
def test_a_bad_manifest_is_named_for_what_it_is(tmp_path: Path, data: bytes, verdict: Verdict) -> None:
    """Empty, broken, impossible and foreign manifests each get their verdict and never an uncaught error."""
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert caught.value.verdict is verdict
    assert caught.value.reason


def test_a_manifest_that_was_cut_anywhere_is_truncated(tmp_path: Path) -> None:
    """Whatever the last byte is that reached the disk."""
    good = encode_manifest(a_manifest("state.pt", "below/größe.pt"))
    for length in range(len(good)):
        (tmp_path / "manifest.json").write_bytes(good[:length])
        with pytest.raises(ManifestError) as caught:
            read_manifest(tmp_path)
        assert caught.value.verdict is Verdict.TRUNCATED, good[:length]


def test_only_structure_may_lack_digests(tmp_path: Path) -> None:
    """A manifest that was verified on structure alone is readable without digests."""
    manifest = a_manifest("state.pt", verified="structure", digest="")
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    assert read_manifest(tmp_path).files[0].xxh3_128 == ""
    with pytest.raises(ValueError, match="no usable digest"):
        encode_manifest(a_manifest("state.pt", digest=""))


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    """A manifest above the maximum is foreign; its size alone decides."""
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MANIFEST_BYTES_MAX + 1)
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path)
    assert caught.value.verdict is Verdict.FOREIGN


def test_no_manifest_and_things_that_are_none(tmp_path: Path) -> None:
    """An absent manifest, a link, a directory and a FIFO in its place are foreign, and nothing blocks."""
    where = tmp_path / "manifest.json"
    (tmp_path / "other.json").write_bytes(encode_manifest(a_manifest("state.pt")))
    makers = (lambda: None, lambda: where.symlink_to(tmp_path / "other.json"), lambda: os.mkfifo(where), where.mkdir)
    for make in makers:
        make()
        with pytest.raises(ManifestError) as caught:
            read_manifest(tmp_path)
        assert caught.value.verdict is Verdict.FOREIGN
        if os.path.lexists(where):
            where.rmdir() if where.is_dir() else where.unlink()


def test_a_manifest_of_the_most_files_stays_below_the_maximum() -> None:
    """The bound on files and the bound on bytes agree for names of the usual length."""
    paths = [f"layer-{index:05d}/{'x' * 100}.pt" for index in range(20_000)]
    assert len(encode_manifest(a_manifest(*paths))) * 5 < MANIFEST_BYTES_MAX
    with pytest.raises(ValueError, match="100001 files"):
        encode_manifest(a_manifest(*[str(index) for index in range(100_001)]))


def test_every_flipped_bit_of_a_manifest_is_seen(tmp_path: Path) -> None:
    """In a number, a name, a word for people, white space or the digest itself: none is read as something else."""
    good = encode_manifest(a_manifest("state.pt", "below/rank-00001.pt"))
    where = tmp_path / "manifest.json"
    where.write_bytes(good)
    verdicts = set()
    for bit in range(8 * len(good)):
        flip(where, bit)
        with pytest.raises(ManifestError) as caught:
            read_manifest(tmp_path)
        verdicts.add(caught.value.verdict)
        flip(where, bit)
    assert where.read_bytes() == good
    assert verdicts == {Verdict.CORRUPT}


def test_a_manifest_from_before_there_was_a_digest_is_read(tmp_path: Path) -> None:
    """What an earlier version committed can be resumed from; one that a tool has laid out anew is refused."""
    manifest = a_manifest("state.pt")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    assert read_manifest(tmp_path) == manifest
    data = encode_manifest(manifest)
    for indent in (0, 2):
        (tmp_path / "manifest.json").write_bytes(msgspec.json.format(data, indent=indent) + b"\n")
        with pytest.raises(ManifestError, match=r"manifest\.json"):
            read_manifest(tmp_path)


def test_a_manifest_that_was_laid_out_anew_without_its_last_line_feed_is_corrupt(tmp_path: Path) -> None:
    """Truncated is what lacks bytes of its own."""
    data = encode_manifest(a_manifest("state.pt"))
    for indent, verdict in ((-1, Verdict.CORRUPT), (0, Verdict.CORRUPT), (2, Verdict.CORRUPT), (1, Verdict.TRUNCATED)):
        (tmp_path / "manifest.json").write_bytes(msgspec.json.format(data, indent=indent).rstrip())
        with pytest.raises(ManifestError) as caught:
            read_manifest(tmp_path)
        assert caught.value.verdict is verdict, indent


@pytest.mark.parametrize("name", ["/etc", "../other", "step_5.pt/x", "gone", ""])
def test_an_adopted_name_lies_in_the_checkpoint(name: str) -> None:
    """The program is given that path to resume from: one that leads out would be somebody else's file."""
    good = msgspec.structs.replace(a_manifest("step_5.pt", "deep/a"), adopted=("step_5.pt", "deep"))
    assert b'"adopted"' in encode_manifest(good)
    with pytest.raises(ValueError, match="adopted"):
        encode_manifest(msgspec.structs.replace(good, adopted=(name,)))
