"""Journal lines for people: which are shown, in what order, and how damage is passed over."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.view.log import (
    LINE_BYTES_MAX,
    LINE_CHARS_MAX,
    Nodes,
    Tail,
    Wanted,
    journals,
    merged,
    moment,
    parse,
    read_time,
    readable,
)

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=timezone.utc)


def entry(event: str, second: float = 0, **fields: Any) -> dict[str, Any]:
    """A line as the journal writes it, so many seconds after noon."""
    stamp = (NOW + timedelta(seconds=second)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    own = {"level": "info", "job": "77", "attempt": 0, "step_id": "0", "epoch": 1, "task": 0, "host": "h", "pid": 5}
    return {"ts": stamp, "mono_ms": int(second * 1000), "event": event, **own, **fields}


def raw(*entries: dict[str, Any]) -> bytes:
    """The bytes of these lines."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in entries)


def events(lines: list[dict[str, Any]]) -> list[str]:
    """What the lines tell of."""
    return [line["event"] for line in lines]


LINES = [
    entry("signal", 0, signal="SIGTERM"),
    entry("rank_hello", 1, rank=0, round=1),
    entry("rank_hello", 2, rank=1, round=2, attempt=1),
    entry("commit", 3, level="warning", round=1),
    entry("phase", 4, level="debug"),
    entry("exit", 5, level="error", job="78", line="it broke here"),
]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (Wanted(), [0, 1, 2, 3, 5]),
        (Wanted(level="debug"), [0, 1, 2, 3, 4, 5]),
        (Wanted(level="warning"), [3, 5]),
        (Wanted(job="78"), [5]),
        (Wanted(attempt=1), [2]),
        (Wanted(attempt=0, event=("rank_hello",)), [1]),
        (Wanted(rank=0), [1]),
        (Wanted(round=1), [1, 3]),
        (Wanted(event=("signal", "commit")), [0, 3]),
        (Wanted(since=NOW + timedelta(seconds=2)), [2, 3, 5]),
        (Wanted(until=NOW + timedelta(seconds=1)), [0, 1]),
        (Wanted(since=NOW + timedelta(seconds=1), until=NOW + timedelta(seconds=2)), [1, 2]),
        (Wanted(grep="BROKE here"), [5]),
        (Wanted(grep="sigterm", event=("commit",)), []),
    ],
)
def test_every_filter_takes_what_it_says(wanted: Wanted, chosen: list[int]) -> None:
    """Each filter narrows by itself and together with the others; debug is hidden unless asked for."""
    assert [place for place, line in enumerate(LINES) if wanted.takes(line)] == chosen


def test_a_line_without_the_filtered_field_is_not_taken_and_never_breaks_a_filter() -> None:
    """Lines of other versions may lack anything."""
    bare = {"event": "x"}
    assert Wanted().takes(bare)
    for wanted in (Wanted(job="77"), Wanted(rank=0), Wanted(since=NOW), Wanted(until=NOW)):
        assert not wanted.takes(bare)
    assert Wanted().takes({"event": "x", "level": "loud", "ts": 5, "rank": "one"})


def test_lines_are_read_on_as_they_are_appended(tmp_path: Path) -> None:
    """A line that has no end yet waits; nothing is shown twice."""
    path = tmp_path / "77-0-0-1-0.jsonl"
    path.write_bytes(raw(entry("one"), entry("two"))[:-5])
    tail = Tail(path)
    assert events(list(tail.lines())) == ["one"]
    assert tail.torn
    with path.open("ab") as file:
        file.write(raw(entry("two"))[-5:] + raw(entry("three")))
    assert events(list(tail.lines())) == ["two", "three"]
    assert (tail.torn, tail.damaged) == (False, 0)
    assert list(tail.lines()) == []


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    """Half a line, no JSON, JSON of another shape, no text, a nest of brackets, an endless line: the rest is there."""
    path = tmp_path / "a.jsonl"
    bad = [b'{"event": "torn", "ts"', b"no json", b"[1, 2]", b"17", b'{"no": "event"}', b"\xff\xfe", b"[" * 100_000]
    path.write_bytes(raw(entry("first")) + b"\n".join(bad) + b"\n" + raw(entry("last")))
    tail = Tail(path)
    assert events(list(tail.lines())) == ["first", "last"]
    assert tail.damaged == len(bad)
    path.write_bytes(b"x" * (2 * LINE_BYTES_MAX + 5) + b"\n" + raw(entry("after")))
    tail = Tail(path)
    assert events(list(tail.lines())) == ["after"]
    assert tail.damaged == 3


def test_several_journals_are_merged_by_time_and_then_by_the_monotonic_clock(tmp_path: Path) -> None:
    """Attempts and tasks write files of their own; the reader sees one story."""
    (tmp_path / "journal").mkdir()
    first, second = entry("b", 2), entry("d", 2)
    first["mono_ms"], second["mono_ms"] = 5, 9
    (tmp_path / "journal" / "77-0-0-1-0.jsonl").write_bytes(raw(entry("a", 1), first, entry("e", 4)))
    (tmp_path / "journal" / "77-0-0-1-1.jsonl").write_bytes(raw(second, entry("odd", mono_ms="?"), entry("f", 5)))
    (tmp_path / "journal" / "notes.txt").write_text("no journal")
    paths = journals(tmp_path)
    assert [path.name for path in paths] == ["77-0-0-1-0.jsonl", "77-0-0-1-1.jsonl"]
    assert events(merged(map(Tail, paths))) == ["odd", "a", "b", "d", "e", "f"]


def test_a_missing_journal_directory_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Not there is told apart from empty."""
    with pytest.raises(FileNotFoundError):
        journals(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30m", NOW - timedelta(minutes=30)),
        (" 2 h", NOW - timedelta(hours=2)),
        ("1d", NOW - timedelta(days=1)),
        ("15s", NOW - timedelta(seconds=15)),
        ("2026-01-31T10:00:00", NOW - timedelta(hours=2)),
        ("2026-01-31T10:00:00Z", NOW - timedelta(hours=2)),
        ("2026-01-31T12:00:00+02:00", NOW - timedelta(hours=2)),
        ("2026-01-31", NOW - timedelta(hours=12)),
    ],
)
def test_times_are_ages_or_instants(text: str, expected: datetime) -> None:
    """Without a zone UTC is meant, as the journal writes it."""
    assert read_time(text, NOW) == expected


def test_what_is_no_time_is_refused_and_an_absurd_age_means_always() -> None:
    """A slip is told, a large number is no crash."""
    for text in ("", "yesterday", "5 weeks", "-1h", "2026-13-01"):
        with pytest.raises(ValueError, match="neither a time"):
            read_time(text, NOW)
    assert read_time("9" * 30 + "d", NOW).year == 1
    assert moment("nonsense") is None


def test_a_line_reads_as_time_job_event_and_numbers() -> None:
    """Underscores become blanks, texts with blanks get quotes, none and truth values are short."""
    line = entry("rank_written", 1.5, rank=3, reason="disk is slow", ok=True, end=None, empty="", at=[4, 0], ms=1.5)
    assert readable(line) == (
        '2026-01-31 12:00:01.500  77/0  rank written       rank=3 reason="disk is slow" ok=true end=- empty="" at=[4,0] ms=1.5'
    )
    assert readable({"event": "x"}) == "?  ?/?  x"


def test_nothing_in_a_journal_can_steer_a_terminal() -> None:
    """Escape sequences, C1 controls, carriage returns and lone surrogates are shown, not obeyed."""
    for evil in ("\x1b[2J", "\x9b2J", "a\rb", "a\nb", "\x07", "\u202e", "\ud800"):
        for line in (entry("x", reason=evil), entry(evil), entry("x", job=evil), entry("x", **{evil: 1})):
            shown = readable(line)
            assert shown.isprintable(), shown
            shown.encode()
    assert 'reason="Zeit für Kaffee"' in readable(entry("x", reason="Zeit für Kaffee"))


def test_colour_is_given_by_level_and_only_when_asked_for() -> None:
    """Warnings and errors stand out on a terminal; a pipe gets plain text."""
    line = entry("x", level="error")
    assert readable(line, colour=True) == f"\x1b[31m{readable(line)}\x1b[0m"
    plain = readable(entry("rank_written", rank=3))
    when, name, rest = plain[:31], plain[31:43], plain[43:]
    assert readable(entry("rank_written", rank=3), colour=True) == f"\x1b[2m{when}\x1b[0m\x1b[1m{name}\x1b[0m{rest}"
    for odd in (entry("x" * 200), entry("x", job="j" * 500), {"event": "x"}, entry("\x1b[2J")):
        assert re.sub(r"\x1b\[\d+m", "", readable(odd, colour=True)) == readable(odd)


def test_a_line_of_another_task_names_it_and_its_node() -> None:
    """Task 0's own, which are most, are shorter."""
    assert readable(entry("verified", 1, task=5, round=2)).endswith("verified           round=2 task=5 node=h")
    assert readable(entry("exit", 1, task=5)).endswith("exit               task=5 node=h")


def test_a_time_is_shown_by_the_coordinators_clock() -> None:
    """What the difference of the clocks is, is taken off."""
    assert readable(entry("x", 90.25), ahead_ns=90 * 10**9).startswith("2026-01-31 12:00:00.250  ")


def test_an_endless_line_is_cut_where_it_is_shown() -> None:
    """A megabyte from somebody else's file is no megabyte on a terminal."""
    shown = readable(entry("x", text="t" * 900_000))
    assert (len(shown), shown[-1]) == (LINE_CHARS_MAX, "…")


@pytest.mark.parametrize(
    ("node", "chosen"), [("node1", [0]), ("node2", [1, 2, 3, 4]), ("node2.cluster", [1]), ("node3", [5]), ("node", [])]
)
def test_a_nodes_lines_are_its_own_and_those_about_its_tasks(node: str, chosen: list[int]) -> None:
    """What the coordinator has heard of them counts too; a name is a host's first part or all of it."""
    lines = [
        entry("exit", host="node1"),
        entry("exit", host="node2.cluster"),
        entry("task_joined", host="h", host_of_task="node2", of_task=4),
        entry("verified", host="h", of_task=4),
        entry("signal", host="h", of_tasks=["3-5"]),
        entry("verified", host="h", of_task=7),
        entry("verified", host="h", of_task="x", epoch=None),
    ]
    nodes = Nodes({1: {4: "node2", 7: "node3"}})
    assert [place for place, line in enumerate(lines) if Wanted(node=node).takes(line, None, nodes)] == chosen


@pytest.mark.parametrize("grep", ["ROUND=3", "rank written", "node=h", r"\x1b", "2026-01", "x", ""])
def test_what_is_told_before_a_line_is_decoded_loses_none(grep: str) -> None:
    """The letters that are looked for in the raw line are in each that is taken."""
    line = entry("rank_written", round=3, reason="\x1b[2J", task=2)
    assert Wanted(grep=grep).takes(line) or grep == "x"
    assert Wanted(grep=grep).sift().letters in json.dumps(line).encode().lower()


def test_a_line_is_parsed_or_it_is_none() -> None:
    """Whatever the bytes, no exception."""
    assert parse(raw(entry("x"))) == entry("x")
    for _ in range(200):
        assert parse(os.urandom(40)) is None


@pytest.mark.parametrize(
    ("ranks", "rank", "is_in"),
    [
        ([0, 3], 3, True),
        ([0, 3], 2, False),
        ([3, "8-15"], 9, True),
        (["8-15"], 15, True),
        (["8-15"], 16, False),
        ({"3": "gone"}, 3, True),
        (["x-", "-", "8-x", None], 8, False),
        ("0-9", 3, False),
    ],
)
def test_lines_of_several_ranks_are_found_by_each_of_them(ranks: object, rank: int, is_in: bool) -> None:
    """Lists, ranges, and the table of a round that was given up; what a damaged file holds is nobody's."""
    assert Wanted(rank=rank).takes(entry("rank_agreed", 1, ranks=ranks)) is is_in
