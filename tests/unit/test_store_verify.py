"""A directory against what the ranks said, and a checkpoint against its manifest."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from ckpt_client.files import collect
from ckpt_supervisor.store import (
    Committed,
    Expected,
    FileEntry,
    Finding,
    Manifest,
    Mode,
    Verdict,
    check_files,
    check_foreign,
    commit,
    encode_manifest,
    make_partial,
    read_manifest,
    take_epoch,
    verify_checkpoint,
)
from ckpt_supervisor.store.look import PATIENCE_MS_MAX, PAUSES_MS, Patience
from ckpt_supervisor.store.stream import BLOCK_BYTES

from tests.support.checkpoint_files import sharded_model, torch_file

FILES = {"state.pt": b"weights" * 1000, "below/rank-00001.pt": b"noise", "empty": b""}


def expected(files: dict[str, bytes], rank: int = 0, hashed: bool = True) -> list[Expected]:
    """What a rank says that it wrote."""
    digest = xxhash.xxh3_128_hexdigest if hashed else lambda _: ""
    return [Expected(path, len(data), digest(data), rank) for path, data in files.items()]


def write(directory: Path, files: dict[str, bytes]) -> Path:
    """Put these files there."""
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def committed(root: Path, step: int = 5, files: dict[str, bytes] | None = None, mode: Mode = "full") -> Path:
    """A committed checkpoint of this step."""
    epoch = take_epoch(root, "1", 0, "0").epoch
    partial = write(make_partial(root, step, epoch, 1), files or FILES)
    report, entries = check_files(partial, expected(files or FILES, hashed=mode == "full"), mode)
    assert report.verdict is Verdict.INTACT, report
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="",
        verified=mode, files=entries,
    )  # fmt: skip
    outcome = commit(root, partial, manifest)
    assert isinstance(outcome, Committed), outcome
    return outcome.path


def test_what_was_committed_is_intact_whatever_a_reader_thinks_of_it_today(tmp_path: Path) -> None:
    """A later version may be stricter: the digest says that not a byte has changed. By --deep, and before a commit, it counts."""
    place = committed(tmp_path)
    odd = torch_file(5) + b"more"
    manifest = read_manifest(place)
    entry = FileEntry("state.pt", len(odd), xxhash.xxh3_128_hexdigest(odd), 0)
    files = tuple(entry if file.path == "state.pt" else file for file in manifest.files)
    (place / "state.pt").write_bytes(odd)
    (place / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    assert verify_checkpoint(place).reason == ""
    assert "4 bytes after the archive's end" in verify_checkpoint(place, deep=True).reason
    assert check_files(place, expected({"state.pt": odd}))[0].verdict is Verdict.CORRUPT
    (place / "state.pt").write_bytes(odd[:-1] + b"!")
    assert "4 bytes after the archive's end" in verify_checkpoint(place).reason


def test_a_deep_look_takes_the_checksums_inside_too(tmp_path: Path) -> None:
    """A file whose rank had hashed what was wrong already: the digest is right, and the record's CRC32 is not."""
    data = bytearray(torch_file(b"weights" * 100))
    at = data.index(b"weights")
    place = committed(tmp_path, files={"state.pt": bytes(data)})
    data[at] ^= 1
    manifest = read_manifest(place)
    entry = FileEntry("state.pt", len(data), xxhash.xxh3_128_hexdigest(bytes(data)), 0)
    (place / "state.pt").write_bytes(data)
    (place / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=(entry,))))
    assert verify_checkpoint(place).reason == ""
    assert "CRC32" in verify_checkpoint(place, deep=True).reason


@pytest.mark.parametrize("mode", ["full", "structure"])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_ranks_wrote_is_intact(tmp_path: Path, mode: Mode, threads: int) -> None:
    """Sizes, digests and ranks of all files come back, sorted by path."""
    report, entries = check_files(write(tmp_path, FILES), expected(FILES), mode, threads)
    assert (report.verdict, report.mode, report.unchecked) == (Verdict.INTACT, mode, ())
    assert [(entry.path, entry.bytes, entry.xxh3_128, entry.rank) for entry in entries] == [
        (path, len(FILES[path]), xxhash.xxh3_128_hexdigest(FILES[path]), 0) for path in sorted(FILES)
    ]
    assert report.bytes_read == (sum(map(len, FILES.values())) if mode == "full" else 0)


def test_files_that_nobody_reported_belong_to_it_too(tmp_path: Path) -> None:
    """A file that a save function wrote on the side is in the manifest, digested, with no rank."""
    write(tmp_path, {**FILES, "notes/config.json": b"{}"})
    report, entries = check_files(tmp_path, expected(FILES))
    stray = next(entry for entry in entries if entry.path == "notes/config.json")
    assert (report.verdict, stray.rank, stray.bytes) == (Verdict.INTACT, None, 2)
    assert stray.xxh3_128 == xxhash.xxh3_128_hexdigest(b"{}")
    assert report.unchecked == ("notes/config.json",)


def link_out(directory: Path) -> None:
    """A link to a file elsewhere."""
    (directory / "state.pt").unlink()
    (directory / "state.pt").symlink_to("/etc/hostname")


def link_directory(directory: Path) -> None:
    """A link to a directory elsewhere, under a name that a rank has reported a file in."""
    shutil.rmtree(directory / "below")
    (directory / "below").symlink_to("/etc")


def fifo(directory: Path) -> None:
    """A FIFO with nobody at the other end."""
    (directory / "state.pt").unlink()
    os.mkfifo(directory / "state.pt")


DAMAGES: dict[str, tuple[Callable[[Path], object], Verdict, str]] = {
    "missing": (lambda d: (d / "state.pt").unlink(), Verdict.MISSING, "state.pt"),
    "missing below": (lambda d: shutil.rmtree(d / "below"), Verdict.MISSING, "below/rank-00001.pt"),
    "short by one": (lambda d: os.truncate(d / "state.pt", 6999), Verdict.TRUNCATED, "state.pt"),
    "empty": (lambda d: os.truncate(d / "state.pt", 0), Verdict.TRUNCATED, "state.pt"),
    "long by one": (lambda d: os.truncate(d / "state.pt", 7001), Verdict.CORRUPT, "state.pt"),
    "zeros": (lambda d: (d / "state.pt").write_bytes(bytes(7000)), Verdict.CORRUPT, "state.pt"),
    "flipped": (lambda d: (d / "below/rank-00001.pt").write_bytes(b"noisd"), Verdict.CORRUPT, "below/rank-00001.pt"),
    "directory": (lambda d: ((d / "state.pt").unlink(), (d / "state.pt").mkdir()), Verdict.MISSING, "state.pt"),
    "link": (link_out, Verdict.MISSING, "state.pt"),
    "linked directory": (link_directory, Verdict.MISSING, "below/rank-00001.pt"),
    "fifo": (fifo, Verdict.MISSING, "state.pt"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_before_the_commit_and_after_it(tmp_path: Path, damage: str) -> None:
    """Each kind of damage gets the same verdict in a partial directory and in a committed one, and names the file."""
    do, verdict, path = DAMAGES[damage]
    write(tmp_path / "partial", FILES)
    checkpoint = committed(tmp_path)
    for directory in (tmp_path / "partial", checkpoint):
        do(directory)
    report, entries = check_files(tmp_path / "partial", expected(FILES))
    assert (report.verdict, entries) == (verdict, ())
    assert path in [finding.path for finding in report.findings]
    after = verify_checkpoint(checkpoint)
    assert (after.verdict, after.findings[0].path) == (verdict, path)


def test_links_and_fifos_are_refused_even_when_nobody_reported_them(tmp_path: Path) -> None:
    """A name that is no regular file makes the directory foreign; it is never opened."""
    for make in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, lambda path: path.symlink_to(tmp_path)):
        partial = write(tmp_path / "partial", FILES)
        make(partial / "extra")
        report, _ = check_files(partial, expected(FILES))
        assert (report.verdict, report.findings[0].path) == (Verdict.FOREIGN, "extra")
        shutil.rmtree(partial)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([*expected({"state.pt": b"x"}, rank=0), *expected({"state.pt": b"x"}, rank=1)], Verdict.MIXED),
        (expected({"../escape": b"x"}), Verdict.FOREIGN),
        (expected({"/etc/hostname": b"x"}), Verdict.FOREIGN),
        (expected({"a\0b": b"x"}), Verdict.FOREIGN),
        (expected({"manifest.json": b"x"}), Verdict.FOREIGN),
        ([Expected("state.pt", 7000, "not hex", 0)], Verdict.FOREIGN),
        ([Expected("state.pt", 7000, "0" * 32, 0)], Verdict.CORRUPT),
        (expected({"state.pt/below": b"x"}), Verdict.MISSING),
    ],
)
def test_words_that_cannot_be_true_are_refused(tmp_path: Path, words: list[Expected], verdict: Verdict) -> None:
    """A file of two ranks, a path out of the directory or a wrong digest fails the check."""
    report, entries = check_files(write(tmp_path, FILES), words)
    assert (report.verdict, entries) == (verdict, ())


def test_files_that_nobody_named_count_and_no_file_at_all_does_not(tmp_path: Path) -> None:
    """An own save of several ranks may name no file: what is there is the checkpoint; an empty directory is none."""
    report, entries = check_files(write(tmp_path / "partial", FILES), [])
    assert (report.verdict, {entry.rank for entry in entries}) == (Verdict.INTACT, {None})
    (tmp_path / "empty").mkdir()
    report, entries = check_files(tmp_path / "empty", [])
    assert (report.verdict, entries) == (Verdict.MISSING, ())


def test_a_saves_own_manifest_is_refused(tmp_path: Path) -> None:
    """A save that writes a manifest.json into the partial directory is told so, since ours would replace it."""
    partial = write(make_partial(tmp_path, 5, 1, 1), {**FILES, "manifest.json": b"{}"})
    report, _ = check_files(partial, expected(FILES))
    assert (report.verdict, report.findings[0].path) == (Verdict.FOREIGN, "manifest.json")


def test_a_busy_file_of_nfs_is_nobodys(tmp_path: Path) -> None:
    """What NFS keeps of an open file that was removed neither enters a manifest nor makes a checkpoint foreign."""
    checkpoint = committed(tmp_path)
    (checkpoint / ".nfs0000000000a1b2c300000001").write_bytes(b"gone")
    assert verify_checkpoint(checkpoint).verdict is Verdict.INTACT
    assert len(check_files(checkpoint, expected(FILES))[1]) == len(FILES)


def test_a_checkpoint_is_not_what_its_manifest_or_name_denies(tmp_path: Path) -> None:
    """A stray file, no manifest, a manifest of another step, a link and nothing at all get their verdicts."""
    checkpoint = committed(tmp_path)
    assert verify_checkpoint(checkpoint).verdict is Verdict.INTACT
    assert verify_checkpoint(checkpoint, "structure").bytes_read == 0
    checkpoint.rename(tmp_path / "step-000000006")
    assert verify_checkpoint(tmp_path / "step-000000006").verdict is Verdict.MIXED
    (tmp_path / "step-000000006").rename(tmp_path / "best")
    assert verify_checkpoint(tmp_path / "best").verdict is Verdict.INTACT
    (tmp_path / "step-000000007").symlink_to("best")
    assert verify_checkpoint(tmp_path / "step-000000007").verdict is Verdict.FOREIGN
    (tmp_path / "best" / "stray").write_bytes(b"")
    assert verify_checkpoint(tmp_path / "best").verdict is Verdict.FOREIGN
    (tmp_path / "best" / "manifest.json").unlink()
    assert verify_checkpoint(tmp_path / "best").verdict is Verdict.FOREIGN
    assert verify_checkpoint(tmp_path / "none").verdict is Verdict.MISSING


def test_a_mix_of_two_saves_is_seen(tmp_path: Path) -> None:
    """Files of an older save under a newer manifest, all of the right size, do not pass (field cases 81 and 84)."""
    old = committed(tmp_path, 5, {"model": b"model 5", "optimizer": b"optim 5"})
    new = committed(tmp_path, 6, {"model": b"model 6", "optimizer": b"optim 6"})
    shutil.copy(old / "optimizer", new / "optimizer")
    report = verify_checkpoint(new)
    assert (report.verdict, report.findings[0].path) == (Verdict.MIXED, "optimizer")
    assert report.reason.endswith("is the one of step-000000005")


def test_a_file_that_is_cut_while_it_is_read_is_an_answer(tmp_path: Path) -> None:
    """Truncating a file in a loop under the verifier gives a verdict each time and never SIGBUS (field case 77)."""
    checkpoint = committed(tmp_path, files={"state.pt": bytes(8 * BLOCK_BYTES)})
    done = threading.Event()

    def cut_and_grow() -> None:
        while not done.is_set():
            os.truncate(checkpoint / "state.pt", BLOCK_BYTES)
            os.truncate(checkpoint / "state.pt", 8 * BLOCK_BYTES)

    cutter = threading.Thread(target=cut_and_grow)
    cutter.start()
    try:
        verdicts = {verify_checkpoint(checkpoint).verdict for _ in range(50)}
    finally:
        done.set()
        cutter.join()
    assert verdicts <= {Verdict.INTACT, Verdict.TRUNCATED, Verdict.CORRUPT}


def test_progress_is_told_and_a_stop_is_obeyed(tmp_path: Path) -> None:
    """Progress only rises and ends at the total; a stopped check is unknown, never intact."""
    files = {"large": bytes(6 * BLOCK_BYTES), **{f"small-{index}": bytes(100_000) for index in range(10)}}
    checkpoint = committed(tmp_path, files=files)
    told: list[tuple[int, int]] = []
    verify_checkpoint(checkpoint, progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, files.values()))
    assert told == sorted(told)
    assert told[-1] == (total, total)
    stop = threading.Event()
    report = verify_checkpoint(checkpoint, progress=lambda *_: stop.set(), stop=stop)
    assert report.verdict is Verdict.UNKNOWN


def test_patience_has_a_bound_and_only_for_what_may_pass() -> None:
    """EIO and ESTALE are tried three times, ENOENT once, and all looks together wait no longer than the maximum."""

    def failing(code: int, times: int, calls: list[int]) -> Callable[[], str]:
        def look() -> str:
            calls.append(code)
            if len(calls) <= times:
                raise OSError(code, os.strerror(code))
            return "seen"

        return look

    calls: list[int] = []
    assert Patience().look(failing(errno.ESTALE, 2, calls)) == "seen"
    for code, tries in ((errno.EIO, 3), (errno.EACCES, 3), (errno.ENOENT, 1), (errno.ENOTDIR, 1)):
        calls = []
        with pytest.raises(OSError, match=os.strerror(code)):
            Patience().look(failing(code, 99, calls))
        assert len(calls) == tries
    waited: list[float] = []

    class Clock:
        """A stop that is never set and counts the pauses."""

        def is_set(self) -> bool:
            return False

        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0)
            return False

    patience = Patience(Clock())
    for _ in range(100):
        with pytest.raises(OSError, match="Input/output"):
            patience.look(failing(errno.EIO, 99, []))
    waited_ms = round(1000 * sum(waited))
    assert PATIENCE_MS_MAX - max(PAUSES_MS) < waited_ms <= PATIENCE_MS_MAX


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that any user may enter (pytest's own are closed to others)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_cannot_be_looked_at_is_unknown(public: Path) -> None:
    """A checkpoint, a manifest, a file and DIR without permission are unknown, never missing, and never passed in
    silence.
    """
    older, newer = committed(public, 5), committed(public, 6)
    code = (
        "import os, sys\n"
        "from ckpt_supervisor.store import load_readers, newest_intact, verify_checkpoint\n"
        "load_readers()\n"  # they may lie where only root may read
        "if os.getuid() == 0: os.setuid(65534)\n"  # root may read everything
        "choice = newest_intact(sys.argv[1])\n"
        "chosen = choice.chosen.step if choice.chosen else None\n"
        "print(verify_checkpoint(sys.argv[2]).verdict.value, chosen, choice.unknown, bool(choice.reason))"
    )
    closed = (newer, newer / "manifest.json", newer / "state.pt")
    seen = []
    for path in (*closed, public):
        mode = path.stat().st_mode
        path.chmod(0)
        command = [sys.executable, "-c", code, str(public), str(newer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        path.chmod(mode)
        seen.append(done.stdout.strip() or done.stderr)
    assert seen == [*["unknown 5 True True"] * 3, "unknown None True True"]
    assert verify_checkpoint(older).verdict is Verdict.INTACT


def test_a_reason_is_one_line_and_says_its_verdict_once(tmp_path: Path) -> None:
    """Names are escaped; a line that already has the verdict does not get it again."""
    finding = Finding(Verdict.MISSING, "a\nb\udcff\x1b[2J.pt", 7, "is not\nthere")
    assert str(finding) == r"a\nb\udcff\x1b[2J.pt at byte 7: missing: is not\nthere"
    assert finding.told == r"a\nb\udcff\x1b[2J.pt at byte 7: is not\nthere"
    assert len(str(Finding(Verdict.FOREIGN, "é" * 5_000, None, "x"))) < 400
    report, _ = check_files(tmp_path, expected({"state.pt": b"x"}))
    assert f"{report.verdict.value}: {report.reason}" == "missing: state.pt: is not there"
    assert f"{report.verdict.value}: {check_files(tmp_path, [])[0].reason}".count("missing") == 1


def test_the_wrong_bytes_are_named_for_what_they_are(tmp_path: Path) -> None:
    """Another file's of this checkpoint, of whatever size; the same file's, or another one's, of one of the 16 nearest steps."""
    for step in range(1, 22):
        committed(tmp_path, step, {"model": b"model %03d" % step, "optimizer": b"optimizer %03d" % step})
    newest = tmp_path / "step-000000021"
    words = {
        ("model", b"optimizer 021"): (Verdict.CORRUPT, "holds the bytes of optimizer"),
        ("optimizer", b"model 021"): (Verdict.CORRUPT, "holds the bytes of model"),
        ("model", b"model 020"): (Verdict.MIXED, "is the one of step-000000020"),
        ("model", b"model 005"): (Verdict.MIXED, "is the one of step-000000005"),
        ("model", b"model 004"): (Verdict.CORRUPT, None),
        ("model", b"optimizer 009"): (Verdict.MIXED, "is optimizer of step-000000009"),
        ("model", bytes(9)): (Verdict.CORRUPT, "all zeros"),
        ("optimizer", b"optim\0\0\0\0\0\0\0\0"): (Verdict.CORRUPT, "all zeros from byte 5 on"),
    }
    for (name, data), (verdict, ending) in words.items():
        good = (newest / name).read_bytes()
        (newest / name).write_bytes(data)
        report = verify_checkpoint(newest)
        assert (report.verdict, report.findings[0].path) == (verdict, name), report
        assert report.reason.endswith(ending or "") and (ending is not None or report.reason.count(":") == 1)
        (newest / name).write_bytes(good)


def test_a_stale_file_is_seen_before_the_commit_too(tmp_path: Path) -> None:
    """A rank whose save left the file of an earlier step in place: mixed, before anything is committed (field case 84)."""
    committed(tmp_path, 5, {"model": b"model 5", "optimizer": b"optim 5"})
    partial = write(make_partial(tmp_path, 6, 1, 2), {"model": b"model 6", "optimizer": b"optim 5"})
    report, entries = check_files(partial, expected({"model": b"model 6", "optimizer": b"optim 6"}))
    assert (report.verdict, entries) == (Verdict.MIXED, ())
    assert report.reason.endswith("is the one of step-000000005")


PROMISES = {
    ("state.pt", b""): Verdict.TRUNCATED,
    ("state.pt", bytes(9000)): Verdict.CORRUPT,
    ("state.pt", b"PK\x03"): Verdict.TRUNCATED,
    ("last.ckpt", bytes(40)): Verdict.CORRUPT,
    ("model.safetensors", b"{}"): Verdict.TRUNCATED,
    ("model.safetensors", b"x" * 9000): Verdict.CORRUPT,
    ("state.pt", b"5"): Verdict.INTACT,
    ("weights", bytes(9000)): Verdict.INTACT,
    ("log.txt", b""): Verdict.INTACT,
}


@pytest.mark.parametrize(("name", "data"), PROMISES)
def test_a_name_that_promises_too_much_is_refused_where_no_digest_speaks(tmp_path: Path, name: str, data: bytes) -> None:
    """Empty, zeros, cut to a few bytes: nobody's checkpoint. What a rank has hashed is what it meant."""
    write(tmp_path, {name: data})
    assert check_foreign(tmp_path / name).verdict is PROMISES[name, data]
    assert check_files(tmp_path, [])[0].verdict is PROMISES[name, data]
    assert check_files(tmp_path, expected({name: data}))[0].verdict is Verdict.INTACT


def test_what_files_say_of_each_other_is_judged_over_all_ranks(tmp_path: Path) -> None:
    """By whoever commits, with the files that other nodes checked; never by such a node, which has only its own."""
    files = sharded_model(1)
    shards = [name for name in files if name.endswith(".safetensors")]
    ours, theirs = {name: files[name] for name in shards[:1]}, {name: files[name] for name in files if name not in shards[:1]}
    write(tmp_path, files)
    assert check_files(tmp_path, expected(ours), elsewhere=expected(theirs, rank=1))[0].verdict is Verdict.INTACT
    (tmp_path / shards[2]).unlink()
    there = {name: data for name, data in theirs.items() if name != shards[2]}
    report, entries = check_files(tmp_path, expected(ours), elsewhere=expected(there, rank=1))
    assert (report.verdict, report.findings[0].path, entries) == (Verdict.MISSING, shards[2], ())
    assert check_files(tmp_path, expected(ours), share=True)[0].verdict is Verdict.INTACT


def test_a_flipped_bit_from_before_a_copy_is_seen(tmp_path: Path) -> None:
    """save() wrote elsewhere and returned the path: its digest speaks for the copying, the CRC32 for the file."""
    own, place = tmp_path / "own.pt", tmp_path / "place"
    place.mkdir()
    data = bytearray(torch_file(b"weights" * 100))
    data[data.index(b"weights")] ^= 1
    own.write_bytes(data)
    words = [Expected(file.path, file.size_bytes, file.xxh3_128, 0) for file in collect(own, place, whole=True, durable=False)]
    report, _ = check_files(place, words)
    assert (report.verdict, "CRC32" in report.reason) == (Verdict.CORRUPT, True)
