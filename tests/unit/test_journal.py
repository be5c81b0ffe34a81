"""The journal: whole lines whatever happens, bounded whatever it is given, and never in the way."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from ckpt_supervisor.adapters import journal
from ckpt_supervisor.adapters.journal import Damage, Journal, Stamp, Who, read_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.proc_stage import Stage, until

WHO = Who(job="100_3", attempt=2, step_id="0", epoch=7, task=1)
STAMP = Stamp(wall_ns=1_795_967_256_000_123_456, mono_ms=41_000)
IDENTITY = ["ts", "mono_ms", "event", "level", "job", "attempt", "step_id", "epoch", "task", "host", "pid", "v"]


class Ear:
    """Hears what the journal complains about."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, line: str) -> None:
        """One complaint."""
        self.heard.append(line)


@pytest.fixture
def ear() -> Ear:
    """What stderr would have heard."""
    return Ear()


@pytest.fixture
def book(tmp_path: Path, ear: Ear) -> Iterator[Journal]:
    """An open journal."""
    made = Journal(tmp_path / "journal", WHO, say=ear)
    assert made.open() is None
    yield made
    made.close()


def lines(book: Journal) -> list[dict[str, Any]]:
    """What is in the file."""
    return list(read_lines(book.path))


def test_a_line_says_when_what_and_who_first(book: Journal) -> None:
    """The identity comes first, in a fixed order, then the fields as they were given; times are RFC 3339 in UTC."""
    book.write("round_started", "info", STAMP, {"round": 3, "ranks": [0, 1]})
    (line,) = lines(book)
    assert list(line) == [*IDENTITY, "round", "ranks"]
    assert line["ts"] == "2026-11-29T15:47:36.000123Z"
    assert (line["mono_ms"], line["event"], line["level"]) == (41_000, "round_started", "info")
    assert [line[key] for key in ("job", "attempt", "step_id", "epoch", "task", "pid")] == ["100_3", 2, "0", 7, 1, os.getpid()]
    assert line["ranks"] == [0, 1]


def test_the_file_has_its_name_and_its_mode(tmp_path: Path) -> None:
    """One file per attempt and task, readable for the group, nothing for others; no name leads out of the directory."""
    before = os.umask(0o022)
    try:
        book = Journal(tmp_path / "journal", WHO)
        assert book.open() is None
        book.close()
    finally:
        os.umask(before)
    assert book.path == tmp_path / "journal" / "100_3-2-0-7-1.jsonl"
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o640
    assert "/" not in journal.file_name(WHO._replace(job="../../x"))


def test_a_journal_is_appended_never_truncated(tmp_path: Path, book: Journal) -> None:
    """A second writer of the same name adds to what is there (field case 53)."""
    book.write("first", "info", STAMP, {})
    again = Journal(tmp_path / "journal", WHO)
    assert again.open() is None
    again.write("second", "info", STAMP, {})
    again.close()
    assert [line["event"] for line in lines(book)] == ["first", "second"]


def test_what_comes_before_the_file_is_open_is_kept_in_order(tmp_path: Path) -> None:
    """The command starts first, the file is opened afterwards; nothing of the start is missing, and its times are its own."""
    book = Journal(tmp_path / "journal", WHO)
    for number in range(3):
        book.write("early", "info", Stamp(STAMP.wall_ns, number), {"number": number})
    assert not book.path.exists()
    assert book.open() is None
    book.write("late", "info", STAMP, {})
    book.close()
    seen = [(line["event"], line["mono_ms"]) for line in lines(book)]
    assert seen == [("early", 0), ("early", 1), ("early", 2), ("late", 41_000)]


def test_what_waits_for_the_file_is_bounded(tmp_path: Path) -> None:
    """A file that is never opened does not fill the memory; what was dropped is counted, and said once there is a file."""
    book = Journal(tmp_path / "journal", WHO)
    for _ in range(journal.BUFFERED_MAX + 5):
        book.write("early", "info", STAMP, {})
    assert book.lost == 5
    assert book.open() is None
    book.close()
    events = lines(book)
    assert len(events) == journal.BUFFERED_MAX + 1
    assert [line["lines"] for line in events if line["event"] == "journal_lines_lost"] == [5]


def test_a_field_never_hides_a_key_of_the_journal(book: Journal) -> None:
    """A field named as one of the journal's own keys gets an underscore; names of the library's parameters are ordinary."""
    fields = {"pid": 5, "event": "x", "method_name": 1, "self": 2, "fields": 3, "level": "odd", "cut": 0}
    book.write("killed", "info", STAMP, fields)
    (line,) = lines(book)
    assert (line["pid_"], line["event_"], line["level_"], line["cut_"]) == (5, "x", "odd", 0)
    assert (line["event"], line["level"], line["pid"]) == ("killed", "info", os.getpid())
    assert (line["method_name"], line["self"], line["fields"]) == (1, 2, 3)


def test_any_value_can_be_written(book: Journal, ear: Ear) -> None:
    """What JSON cannot hold is written as text."""
    loop: list[Any] = []
    loop.append(loop)
    odd = {
        "nan": float("nan"), "path": Path("/a b"), "bytes": b"\xff", "torn": os.fsdecode(b"\xff\xfe"), "none": None,
        "pairs": {(1, 2): {3}}, "loop": loop, "newline": "a\nb", "true": True, "big": 10**5000, "error": OSError(28, "full"),
    }  # fmt: skip
    book.write("odd", "error", STAMP, odd)
    (line,) = lines(book)
    assert (line["nan"], line["path"], line["newline"], line["none"], line["true"]) == ("nan", "/a b", "a\nb", None, True)
    assert line["pairs"] == {"(1, 2)": [3]}
    assert line["torn"] == "\udcff\udcfe"
    assert ear.heard == []
    assert b"\n" not in book.path.read_bytes()[:-1]


def test_a_long_line_is_cut_and_says_so(book: Journal) -> None:
    """A huge value leaves its beginning, its length, and a mark; the other fields stay whole."""
    book.write("long", "info", STAMP, {"text": "x" * 1_000_000, "list": list(range(100_000)), "step": 4})
    (line,) = lines(book)
    assert line["cut"] is True
    assert line["text"].startswith("xxx")
    assert line["text"].endswith("more]")
    assert line["step"] == 4
    assert len(book.path.read_bytes()) <= journal.LINE_BYTES_MAX


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=100) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=30) | st.integers(), inner, max_size=30),
    max_leaves=40,
)


@given(st.dictionaries(st.text(max_size=20), JSON_LIKE, max_size=20), st.integers(1, 4_000))
@settings(max_examples=100, deadline=None)
def test_every_line_is_bounded_ascii_json(fields: dict[str, Any], repeat: int) -> None:
    """Whatever the fields are, a line is one JSON object of at most LINE_BYTES_MAX bytes with its end."""
    entry = {"event": "e", "fields": fields, "many": [fields] * repeat}
    line = journal.bounded_json(entry)
    assert line.isascii()
    assert "\n" not in line
    assert len(line) + 1 <= journal.LINE_BYTES_MAX
    assert json.loads(line)["event"]


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, ear: Ear) -> None:
    """Writes that fail with ENOSPC are counted; the run goes on."""
    book = Journal(tmp_path / "journal", WHO, say=ear)
    book.path.parent.mkdir()
    book.path.symlink_to("/dev/full")
    assert book.open() is None
    for _ in range(5):
        book.write("tick", "info", STAMP, {})
    book.close()
    assert book.lost == 5
    assert len(ear.heard) == 1
    assert "No space left" in ear.heard[0]


def test_a_directory_that_cannot_be_made_is_told_and_tried_again(tmp_path: Path, ear: Ear) -> None:
    """When the way is free later the journal begins then, and says how much is missing."""
    blocker = tmp_path / "journal"
    blocker.write_text("a file where the directory should be")
    book = Journal(blocker, WHO, say=ear)
    problem = book.open()
    assert problem is not None
    assert "100_3-2-0-7-1.jsonl" in problem
    book.write("lost", "info", STAMP, {})
    assert (book.lost, len(ear.heard)) == (1, 1)
    blocker.unlink()
    book.write("kept", "info", STAMP, {})
    book.close()
    assert [(line["event"], line.get("lines")) for line in lines(book)] == [("kept", None), ("journal_lines_lost", 1)]


def test_a_file_that_was_removed_begins_anew(book: Journal) -> None:
    """With a line that says so; the directory is made again, too."""
    book.write("before", "info", STAMP, {})
    shutil.rmtree(book.path.parent)
    book._looked_ms = 0  # As if 5 s had passed.
    book.write("after", "info", STAMP, {})
    assert [line["event"] for line in lines(book)] == ["journal_anew", "after"]


def test_after_half_a_line_the_next_one_is_whole(book: Journal, ear: Ear) -> None:
    """A disk that takes half a line loses that line only; readers count it and go on."""
    book.write("before", "info", STAMP, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (book.path.stat().st_size + 20, hard))
    try:
        book.write("torn", "info", STAMP, {})
        book.write("lost", "info", STAMP, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    damage = Damage()
    assert [line["event"] for line in read_lines(book.path, damage)] == ["before"]
    assert damage.torn
    book.write("after", "info", STAMP, {})
    damage = Damage()
    events = [(line["event"], line.get("lines")) for line in read_lines(book.path, damage)]
    assert events == [("before", None), ("after", None), ("journal_lines_lost", 2)]
    assert (damage.lines, damage.torn) == (1, False)
    assert (book.lost, len(ear.heard)) == (2, 1)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (journal.FULL_BYTES - 100_000, ["debug", "info", "odd", "commit", "exit"]),
        (journal.FULL_BYTES + 1, ["journal_full", "odd", "commit", "exit"]),
        (journal.STOP_BYTES, ["journal_full", "exit"]),
    ],
)
def test_a_file_that_has_grown_too_large_tells_of_less(tmp_path: Path, size: int, told: list[str]) -> None:
    """A run that saves ten times a second fills no disk, and how it ended is there all the same. (The file is a hole.)"""
    book = Journal(tmp_path, WHO)
    book.path.touch()
    os.truncate(book.path, size)
    assert book.open() is None
    for event, level in (("debug", "debug"), ("info", "info"), ("odd", "warning"), ("commit", "info"), ("exit", "info")):
        book.write(event, level, STAMP, {})
    book.close()
    with book.path.open("rb") as file:
        file.seek(size)
        assert [json.loads(line)["event"] for line in file] == told
    assert book.lost == 0


def test_a_reader_passes_over_damage(tmp_path: Path) -> None:
    """Bytes that are no line of a journal are counted, never fatal; blank lines are nothing."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"event":"a"}\n\n\0\0\0\n[1]\n' + b"[" * 50_000 + b'\n\xff\xfe\n{"event":"b"}\n{"event":"c"')
    damage = Damage()
    assert [line["event"] for line in read_lines(path, damage)] == ["a", "b"]
    assert damage.lines == 5
    assert damage.torn


def test_nobody_elses_logging_is_touched(book: Journal) -> None:
    """The library's global configuration stays as it was."""
    book.write("x", "info", STAMP, {})
    assert not structlog.is_configured()


def test_the_library_is_imported_by_open_and_not_before() -> None:
    """The command starts before the 150 ms that structlog takes."""
    script = """
        import json, sys
        from ckpt_supervisor.adapters import journal
        print(json.dumps(sorted(name for name in ("structlog", "psutil", "rich") if name in sys.modules)), flush=True)
    """
    with Stage(script) as stage:
        assert stage.said() == []


def test_the_library_comes_without_the_console_that_it_would_bring() -> None:
    """3.4 MB in each supervisor; whoever wants rich afterwards can import it."""
    script = """
        import json, sys
        from ckpt_supervisor.adapters import journal
        journal.load_structlog()
        kept_out = sorted(name for name in ("rich", "plotly", "shtab", "prometheus_client") if name in sys.modules)
        import rich
        print(json.dumps(["structlog" in sys.modules, kept_out, rich.__name__]), flush=True)
    """
    with Stage(script) as stage:
        assert stage.said() == [True, [], "rich"]


@pytest.mark.parametrize("after", [0.0, 0.003, 0.01, 0.03])
def test_a_killed_writer_leaves_whole_lines(tmp_path: Path, after: float) -> None:
    """SIGKILL at any moment leaves every line whole, without a gap. Only the last may end early, where a page of the file does.

    There the kernel ends the write of a process that is killed.
    """
    script = """
        import sys
        from pathlib import Path
        from ckpt_supervisor.adapters.journal import Journal, Stamp, Who
        book = Journal(Path(sys.argv[1]), Who("1", 0, "0", 1, 0))
        book.open()
        print("1", flush=True)
        number = 0
        while True:
            book.write("tick", "info", book.stamp(), {"number": number, "filler": "x" * (number % 5000)})
            number += 1
    """
    with Stage(script, str(tmp_path)) as stage:
        stage.said()
        path = tmp_path / "1-0-0-1-0.jsonl"
        before = path.stat().st_size
        until(lambda: path.stat().st_size > before + after * 10_000_000, "the writer writes")
        stage.process.kill()
        stage.ends()
    damage = Damage()
    numbers = [line["number"] for line in read_lines(path, damage)]
    assert numbers == list(range(len(numbers)))
    assert numbers
    assert damage.lines == 0
    assert not damage.torn or path.stat().st_size % mmap.PAGESIZE == 0
    assert "structlog" in sys.modules
