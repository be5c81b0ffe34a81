"""What the client writes, copies and reports."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from ckpt_client import files, wire
from ckpt_client.files import DigestWriter, SaveError, collect, one_line, write_file
from ckpt_client.identity import Identity
from ckpt_client.torch_state import TorchState
from ckpt_client.wire import Position, SavedFile

ALONE = Identity(0, 1, 0, 0, distributed=False)


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the write that would is cut short, the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def digest(path: Path) -> str:
    """XXH3-128 of a file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


@pytest.mark.parametrize("size", [0, 1, files.PART_BYTES - 1, files.PART_BYTES, 2 * files.PART_BYTES + 3])
def test_a_written_file_is_reported_with_its_size_and_digest(tmp_path: Path, size: int) -> None:
    """The digest is of what was meant, in whatever pieces it came."""
    data = os.urandom(size)

    def write(writer: DigestWriter) -> None:
        middle = size // 3
        assert writer.write(data[:middle]) == middle
        writer.write(memoryview(data)[middle:])
        assert writer.tell() == size

    report = write_file(tmp_path, "x", write, durable=True)
    assert (tmp_path / "x").read_bytes() == data
    assert report == SavedFile("x", size, digest(tmp_path / "x"))


def test_numbers_are_written_as_their_bytes(tmp_path: Path) -> None:
    """A buffer of another item size is taken without a copy, and counted in bytes."""
    numbers = memoryview(bytes(range(64))).cast("Q")
    report = write_file(tmp_path, "x", lambda writer: writer.write(numbers) and None, durable=False)
    assert report.size_bytes == 64


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    """Two writers of one name are a mistake that must not pass."""
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path, "x", lambda writer: writer.write(b"new") and None, durable=False)
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_write_that_is_cut_short_goes_on_and_the_error_that_follows_is_raised(tmp_path: Path) -> None:
    """A short write is not taken for a whole one."""
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        write_file(tmp_path, "x", lambda writer: writer.write(bytes(4096)) and None, durable=False)
    assert (tmp_path / "x").stat().st_size == 1000


@pytest.mark.parametrize("limit", [0, 100, 5_000, 100_000])
def test_torch_save_onto_a_full_disk_is_an_exception_and_no_crash(tmp_path: Path, limit: int) -> None:
    """Its C++ writer must pass our OSError on wherever it strikes, and the process must live."""
    state = TorchState({"model": torch.nn.Linear(200, 200)}, ALONE)
    order = wire.SaveAt(1, Position(3, 0), str(tmp_path), "leave", 1000)
    with largest_file(limit), pytest.raises(OSError, match="File too large"):
        state.save(order)


def test_what_torch_writes_is_reported_with_the_digest_of_the_file(tmp_path: Path) -> None:
    """End to end for both files."""
    state = TorchState({"model": torch.nn.Linear(4, 4)}, ALONE)
    reports = state.save(wire.SaveAt(1, Position(3, 0), str(tmp_path), "leave", 1000))
    assert [report.path for report in reports] == ["rank-00000.pt", "state.pt"]
    for report in reports:
        assert report == SavedFile(report.path, (tmp_path / report.path).stat().st_size, digest(tmp_path / report.path))


def test_no_path_reports_what_a_lone_process_wrote(tmp_path: Path) -> None:
    """With other ranks in the same directory nobody can tell whose file is whose, so nothing is claimed then."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")
    assert collect(None, tmp_path, whole=True, durable=False) == (SavedFile("a", 1, ""), SavedFile("b/2", 2, ""))
    assert collect(None, tmp_path, whole=False, durable=False) == ()


def test_a_lone_process_that_wrote_nothing_has_not_saved(tmp_path: Path) -> None:
    """An empty checkpoint would pass every check of its files."""
    with pytest.raises(SaveError, match="wrote nothing"):
        collect(None, tmp_path, whole=True, durable=False)


@pytest.mark.parametrize("kind", [str, Path, lambda path: [path], lambda path: (str(path),), os.fspath])
def test_a_path_in_the_directory_is_reported_as_it_is(tmp_path: Path, kind: type) -> None:
    """Without a digest: only the writer knew what it meant to write."""
    (tmp_path / "a").write_bytes(b"1")
    assert collect(kind(tmp_path / "a"), tmp_path, whole=True, durable=False) == (SavedFile("a", 1, ""),)


def test_a_directory_that_is_reached_through_a_link_is_still_the_same(tmp_path: Path) -> None:
    """Scratch file systems are often behind links."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to(real)
    for path, directory in ((real / "a", tmp_path / "link"), (tmp_path / "link" / "a", real)):
        assert collect(path, directory, whole=True, durable=False) == (SavedFile("a", 1, ""),)


def test_files_elsewhere_are_copied_in_and_never_hard_linked(tmp_path: Path) -> None:
    """The next write in place must not change a committed checkpoint."""
    store, own = tmp_path / "store", tmp_path / "own"
    store.mkdir()
    (own / "epoch" / "deep").mkdir(parents=True)
    (own / "last.pt").write_bytes(b"last")
    (own / "epoch" / "deep" / "x").write_bytes(b"x" * 100_000)
    reports = collect([own / "last.pt", str(own / "epoch")], store, whole=True, durable=True)
    assert [(report.path, report.size_bytes) for report in reports] == [("last.pt", 4), ("epoch/deep/x", 100_000)]
    for report in reports:
        assert report.xxh3_128 in ("", digest(store / report.path))
    with (own / "last.pt").open("r+b") as file:
        file.write(b"LAST")
    assert (store / "last.pt").read_bytes() == b"last"
    assert (store / "last.pt").stat().st_nlink == 1


def test_a_copy_onto_a_full_disk_says_so(tmp_path: Path) -> None:
    """The reason that the round is given up for is the disk's, and not that a buffer was still in use."""
    (tmp_path / "own.bin").write_bytes(bytes(3_000_000))
    (tmp_path / "partial").mkdir()
    with largest_file(1_000_000), pytest.raises(OSError, match="File too large"):
        files.collect(tmp_path / "own.bin", tmp_path / "partial", whole=True, durable=False)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_links_and_special_files_are_refused(tmp_path: Path, where: str) -> None:
    """What they show may change after the commit."""
    store = tmp_path / "store"
    store.mkdir()
    place = store if where == "inside" else tmp_path / "own"
    place.mkdir(exist_ok=True)
    (place / "link").symlink_to("/etc/hostname")
    with pytest.raises(SaveError, match="a symbolic link"):
        collect(place / "link", store, whole=True, durable=False)
    (place / "link").unlink()
    os.mkfifo(place / "pipe")
    with pytest.raises(SaveError, match="not a regular file"):
        collect(place, store, whole=True, durable=False)


def test_a_missing_path_two_equal_names_and_odd_names_are_refused(tmp_path: Path) -> None:
    """Each with a reason that says which."""
    store = tmp_path / "store"
    for name in ("store", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"1")
    with pytest.raises(SaveError, match="nowhere', which does not exist"):
        collect(tmp_path / "nowhere", store, whole=True, durable=False)
    with pytest.raises(SaveError, match="'x' twice"):
        collect([store / "x", store / "x"], store, whole=True, durable=False)
    with pytest.raises(SaveError, match="copied over 'x'"):
        collect(tmp_path / "a" / "x", store, whole=True, durable=False)
    (store / os.fsdecode(b"\xff")).write_bytes(b"1")
    with pytest.raises(SaveError, match="not valid UTF-8"):
        collect(store, store, whole=True, durable=False)


def test_an_error_is_told_in_one_line_that_fits() -> None:
    """Journals are line by line, and the word has a bound."""
    assert one_line(ValueError("a\n  b\tc")) == "ValueError: a b c"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(OSError(os.fsdecode(b"\xff"))) == "OSError: ?"
    assert len(one_line(ValueError("x" * 10_000))) == wire.REASON_CHARS_MAX
