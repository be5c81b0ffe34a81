"""Journals as files: their names, their lines, and what is passed over in them, whatever happened to them."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.view.plain import harmless
from ckpt_supervisor.view.reading import (
    BLOCK_BYTES,
    LINE_BYTES_MAX,
    Counts,
    Reader,
    Splitter,
    event_in,
    file_of,
    files,
    listed,
    moment_ns,
    names_rank,
    opened,
    parse,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support import many_lines


def line_of(event: str, **fields: Any) -> bytes:
    """A line of the journal's own making."""
    own = {"ts": "2026-01-31T12:00:00.000000Z", "mono_ms": 1, "event": event, "level": "info"}
    return json.dumps({**own, **fields}, separators=(",", ":")).encode()


def read(path: Path, wanted: frozenset[str] | None = None) -> tuple[list[str], Counts]:
    """Which events a reader finds, and what it counts."""
    reader = Reader(path, wanted)
    return [line["event"] for line in reader.lines()], reader.counts


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("4711-0-0-1-0.jsonl", ("4711", 0, "0", 1, 0)),
        ("100_3-2-batch-7-12.jsonl", ("100_3", 2, "batch", 7, 12)),
        ("local-my-host-0-local-1-0.jsonl", ("local-my-host", 0, "local", 1, 0)),
        ("4711-0-0-1-x.jsonl", None),
        ("4711-0-0-1-٣.jsonl", None),
        ("0-0-1-0.jsonl", None),
        ("4711-0-0-1-0.jsonl.gz", None),
        ("notes.jsonl", None),
    ],
)
def test_a_journals_name_is_read_from_its_end(name: str, parts: tuple[Any, ...] | None) -> None:
    """A job's name may hold dashes; what is no such name is no journal."""
    file = file_of(Path(name))
    assert (None if file is None else file[1:]) == parts


def test_files_come_by_start_and_task_and_strangers_are_named(tmp_path: Path) -> None:
    """The tenth start is not between the first and the second."""
    (tmp_path / "journal").mkdir()
    for name in ("7-9-0-10-0.jsonl", "7-0-0-1-1.jsonl", "7-0-0-1-0.jsonl", "7-0-0-2-11.jsonl", "other.jsonl", "notes.txt"):
        (tmp_path / "journal" / name).touch()
    assert [(file.epoch, file.task) for file in files(tmp_path)] == [(1, 0), (1, 1), (2, 11), (10, 0)]
    assert listed(tmp_path)[1] == ["other.jsonl"]
    with pytest.raises(FileNotFoundError):
        files(tmp_path / "missing")


def test_only_wanted_events_are_decoded_and_others_are_counted(tmp_path: Path) -> None:
    """A line that is not of the journal's own making is decoded to be judged."""
    path = tmp_path / "a"
    odd = b'{"level": "info", "event": "commit"}'
    path.write_bytes(b"\n".join([line_of("phase"), line_of("commit", cut=True), odd, line_of("exit"), b""]))
    assert read(path, frozenset({"commit"})) == (["commit", "commit"], Counts(lines=4, cut=1))
    assert read(path)[0] == ["phase", "commit", "commit", "exit"]
    assert event_in(line_of("go")) == b"go"
    assert event_in(line_of('g"o')) is None


def test_whatever_byte_a_file_is_cut_at_its_whole_lines_are_read(tmp_path: Path) -> None:
    """A supervisor that was killed, a disk that was full: at most the last line is lost, and that is counted."""
    whole = b"".join(line_of(f"event_{number}", text="äöü\n") + b"\n" for number in range(4))
    path = tmp_path / "a"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        events, counts = read(path)
        ends = whole[:size].count(b"\n")
        assert events == [f"event_{number}" for number in range(ends)]
        assert (counts.torn, counts.damaged) == (int(size > 0 and whole[size - 1 : size] != b"\n"), 0), size


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_byte_that_has_another_value_costs_its_own_line_at_most(at: int, value: int) -> None:
    """The lines before and behind it are there; an end of line that is gone takes two of them."""
    lines = [line_of(f"event_{number}", rank=number, reason="it broke") for number in range(5)]
    data = bytearray(b"\n".join(lines) + b"\n")
    data[at % len(data)] = value
    splitter = Splitter(Counts())
    found = [line for raw in splitter.lines(bytes(data)) if (line := parse(raw)) is not None]
    assert sum(json.loads(line) in found for line in lines) >= 3


def test_damage_of_every_kind_is_counted_and_passed_over(tmp_path: Path) -> None:
    """No JSON, JSON of another shape, no text, a nest of brackets, a line without an end in sight."""
    bad = [
        b"no json",
        b"[1]",
        b"17",
        b'{"no": "event"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"event": "x',
        b"x" * (LINE_BYTES_MAX + 1),
    ]
    bad.append(b"y" * (3 * LINE_BYTES_MAX))
    path = tmp_path / "a"
    path.write_bytes(b"\n".join([line_of("first"), *bad, b"", b"  ", line_of("last"), b""]))
    events, counts = read(path)
    assert events == ["first", "last"]
    assert counts.damaged == len(bad)
    path.write_bytes(line_of("first") + b"\n" + b"z" * (2 * LINE_BYTES_MAX))
    assert read(path) == (["first"], Counts(lines=1, damaged=1, torn=1))


def test_lines_that_cross_the_blocks_of_reading_are_whole(tmp_path: Path) -> None:
    """Wherever the blocks end."""
    path = tmp_path / "a"
    sizes = [BLOCK_BYTES - 100, BLOCK_BYTES, 5, 2 * BLOCK_BYTES, 1]
    path.write_bytes(b"".join(line_of("x", text="t" * size) + b"\n" for size in sizes))
    assert [len(line["text"]) for line in Reader(path).lines()] == sizes


def test_a_pipe_or_a_directory_of_that_name_holds_nobody_up(tmp_path: Path) -> None:
    """It is an error at once, not a wait for somebody who writes."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "directory", "missing"):
        with pytest.raises(OSError, match=r"not a regular file|directory|No such"):
            opened(tmp_path / name)


@given(st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)), st.sampled_from(["Z", "+00:00", "+05:30", ""]))  # noqa: DTZ001
def test_instants_are_those_of_the_library(moment: datetime, zone: str) -> None:
    """The fast way for the journal's own form, and the slow one for all others."""
    text = moment.isoformat(timespec="microseconds") + zone
    aware = datetime.fromisoformat(text.replace("Z", "+00:00"))
    aware = aware if aware.tzinfo else aware.replace(tzinfo=timezone.utc)
    since = (aware - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1) * 1_000
    for _ in range(2):
        assert moment_ns(text) in ((since,) if 1 < moment.year < 3_000 else (since, None))


@given(st.one_of(st.text(), st.text("0123456789-:.TZ+", min_size=20, max_size=30), st.none(), st.integers(), st.binary()))
def test_what_is_no_instant_is_none_and_no_error(text: object) -> None:
    """A file may hold anything."""
    assert moment_ns(text) is None or isinstance(text, str)


def test_a_time_with_impossible_parts_is_none() -> None:
    """Also on a day that is known already."""
    assert moment_ns("2026-01-31T12:00:00.000000Z") == 1_769_860_800 * 10**9
    for bad in (
        "2026-01-31T24:00:01.000000Z",
        "2026-01-31T12:60:00.000000Z",
        "2026-01-31T12:00:61.000000Z",
        "2026-01-31T1x:00:00.000000Z",
    ):
        assert moment_ns(bad) is None


def test_half_a_surrogate_pair_is_no_damage() -> None:
    """Python writes one for a path that is no UTF-8; the fast decoder refuses it."""
    assert parse(rb'{"event":"x","path":"/caf\udce9"}') == {"event": "x", "path": "/caf\udce9"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Zeit für Kaffee", "plain text, Zeit für Kaffee"),
        ("\x1b[31mred\x1b[0m\x07", r"\x1b[31mred\x1b[0m\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\x9b2J\ud800\u200b", r"\x9b2J\ud800\u200b"),
        (None, "None"),
        (["\x1b"], r"['\x1b']"),
    ],
)
def test_text_from_outside_is_shown_and_not_obeyed(text: object, shown: str) -> None:
    """One printable line, whatever it was."""
    assert harmless(text) == shown
    assert harmless(text).isprintable()


@given(st.text(), st.integers(1, 40))
def test_text_from_outside_has_a_limit(text: str, limit: int) -> None:
    """What is cut says so, and it can be encoded."""
    shown = harmless(text, limit)
    assert len(shown) <= limit and shown.isprintable()
    shown.encode()
    assert harmless("x" * 2_000_000) == "x" * 499 + "…"


def test_many_ranks_in_one_line_are_found() -> None:
    """Lists, ranges, and tables; what a damaged file holds is nobody's."""
    assert names_rank([3, "8-15"], 9)
    assert names_rank({"3": "gone"}, 3)
    assert not names_rank(["x-", "-", "8-x", None, "9" * 30], 8)


def test_made_journals_are_what_they_say(tmp_path: Path) -> None:
    """The made-up run that other tests rest on: every cause, and no line that a reader does not understand."""
    told = many_lines.write(tmp_path, lines=3_000, tasks=5, attempts=11)
    found = files(tmp_path)
    assert len(found) == 55
    counts = Counts()
    for file in found:
        reader = Reader(file.path)
        for line in reader.lines():
            assert moment_ns(line["ts"]) is not None
            assert (line["job"], line["attempt"], line["epoch"], line["task"]) == (file.job, file.attempt, file.epoch, file.task)
        counts.add(reader.counts)
    assert 2_000 < counts.lines < 6_000
    assert (counts.damaged, counts.torn) == (0, 1)  # The one that was lost while it wrote.
    assert [one.cause for one in told] == [*many_lines.CAUSES, "finished"]
    assert all(one.lost_steps == one.reached - max(0, one.kept) >= 0 for one in told)


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
def test_a_number_that_json_does_not_have_is_damage(odd: str) -> None:
    """Python would read it, and write it again: no other reader of `log --json` takes such a line."""
    assert parse(f'{{"event":"exit","code":{odd}}}'.encode()) is None
    assert parse(f'{{"event":"exit","code":{odd},"path":"\\ud800"}}'.encode()) is None
    assert parse(b'{"event":"exit","code":1.5,"path":"\\ud800"}') is not None
