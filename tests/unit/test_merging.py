"""Journals merged as a stream: in order, complete, and with little in memory, whatever the files are like."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.view.clocks import Offset
from ckpt_supervisor.view.merging import Merge, Seen, Sift, Source
from ckpt_supervisor.view.reading import files, moment_ns

from tests.support import many_lines


def line_of(event: str, second: float, epoch: int = 1, task: int = 0, **fields: Any) -> dict[str, Any]:
    """A line as the journal writes it, so many seconds after noon."""
    minute, rest = divmod(second, 60)
    own = {
        "level": "info",
        "job": "77",
        "attempt": epoch - 1,
        "step_id": "0",
        "epoch": epoch,
        "task": task,
        "host": "h",
        "pid": 5,
    }
    stamp = f"2026-01-31T12:{int(minute):02d}:{rest:09.6f}Z"
    return {"ts": stamp, "mono_ms": 5, "event": event, **own, **fields}


def put(root: Path, *lines: dict[str, Any]) -> None:
    """Append each to the file that it belongs to."""
    (root / "journal").mkdir(exist_ok=True)
    for line in lines:
        name = "-".join(str(line[key]) for key in ("job", "attempt", "step_id", "epoch", "task"))
        with (root / "journal" / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _never(offset: Offset, _is_corrected: bool) -> None:
    raise AssertionError(offset.text)


class Merged:
    """A merge, and what came of it."""

    def __init__(self, root: Path, sift: Sift = Sift()) -> None:  # noqa: B008 - it is a tuple
        self.seen, self.told = Seen(), list[Offset]()
        self.corrected: list[bool] = []
        self.merge = Merge(sift, self.seen, self._tell)
        self.lines = [json.loads(raw) for _, raw in self.merge.lines(files(root))]
        self.events = [line["event"] for line in self.lines]

    def _tell(self, offset: Offset, is_corrected: bool) -> None:
        self.told.append(offset)
        self.corrected.append(is_corrected)

    def again(self) -> list[str]:
        """What has come since."""
        return [json.loads(raw)["event"] for _, raw in self.merge.again(self.merge.sources.values())]


def test_lines_of_all_files_come_by_time(tmp_path: Path) -> None:
    """Tasks of one start, and starts that overlap: a supervisor may live on while the next start has begun."""
    put(tmp_path, line_of("a", 1), line_of("d", 5), line_of("g", 60), line_of("b", 2, task=1), line_of("e", 6, task=1))
    put(tmp_path, line_of("c", 4, epoch=2), line_of("f", 7, epoch=2), line_of("h", 61, epoch=2, task=3))
    assert Merged(tmp_path).events == list("abcdefgh")


def test_a_little_disorder_within_a_file_is_put_right(tmp_path: Path) -> None:
    """An event is stamped when it happens and written by another thread."""
    put(tmp_path, line_of("a", 1), line_of("c", 3), line_of("b", 2), line_of("d", 4))
    assert Merged(tmp_path).events == list("abcd")


def test_a_line_without_a_time_stays_beside_the_one_before_it(tmp_path: Path) -> None:
    """It has its place in its own file."""
    put(tmp_path, line_of("a", 1), line_of("b", 2, ts="?"), line_of("b2", 2, ts=7), line_of("d", 9), line_of("c", 3, task=1))
    assert Merged(tmp_path).events == ["a", "b", "b2", "c", "d"]


def test_a_merged_run_is_complete_and_in_order(tmp_path: Path) -> None:
    """Every line of a made-up run once, by time; and of each file in its own order."""
    many_lines.write(tmp_path, 4_000, tasks=6, attempts=11, seed=11)
    (tmp_path / "journal" / "4711-3-0-4-0.jsonl").unlink()
    merged = Merged(tmp_path)
    times = [moment_ns(line["ts"]) or 0 for line in merged.lines]
    assert times == sorted(times)
    whole = [json.loads(raw) for file in files(tmp_path) for raw in file.path.read_bytes().split(b"\n")[:-1]]
    assert sorted(json.dumps(line) for line in merged.lines) == sorted(json.dumps(line) for line in whole)
    assert merged.told == []
    assert merged.seen.tasks[1] == {task: many_lines.host(task) for task in range(1, 6)}


def test_lines_of_a_clock_that_is_off_are_put_where_they_belong(tmp_path: Path) -> None:
    """90 s in either direction: the order is the one that it had with right clocks, and it is told once for each node."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    skewed = {4: 90_000, 5: 90_000, 8: -90_000}
    many_lines.write(right, 1_200, tasks=9, attempts=2)
    many_lines.write(wrong, 1_200, tasks=9, attempts=2, skewed=skewed)
    merged = Merged(wrong)
    # The estimate is good to a few ms; what is further apart has to be in order.
    ahead = {task: skewed.get(task, 0) for task in range(9)}
    true_ms = [(moment_ns(line["ts"]) or 0) // 10**6 - ahead[line["task"]] for line in merged.lines]
    assert all(later > earlier - 20 for earlier, later in itertools.pairwise(true_ms))
    assert len(merged.lines) == len(Merged(right).lines)
    assert sorted((offset.host, round(offset.ms / 1000)) for offset in merged.told) == [("node002", 90), ("node003", -90)]
    assert merged.corrected == [True, True]


def test_a_job_that_comes_back_on_a_node_with_a_slow_clock_comes_after_its_end(tmp_path: Path) -> None:
    """The attempt after a requeue begins when the one before has left, whatever the clocks say."""
    put(
        tmp_path,
        line_of("a", 100),
        line_of("exit", 200),
        line_of("c", 150, epoch=2, host="other"),
        line_of("exit", 160, epoch=2, host="other"),
    )
    put(tmp_path, line_of("d", 290, epoch=3, host="third"))
    merged = Merged(tmp_path)
    assert merged.events == ["a", "exit", "c", "exit", "d"]
    (offset,) = merged.told
    assert offset.text == "the clock of other is at least 50.0 s behind that of h"
    assert merged.corrected == [False]


def test_two_jobs_in_one_directory_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Another job that has taken the directory over may well begin before the one before it has left."""
    put(tmp_path, line_of("a", 100), line_of("exit", 200), line_of("b", 150, epoch=2, job="78", host="other"))
    merged = Merged(tmp_path)
    assert (merged.events, merged.told) == (["a", "b", "exit"], [])


@pytest.mark.parametrize(
    ("sift", "events"),
    [
        (Sift(), ["debug", "a", "b", "odd"]),
        (Sift(levels=frozenset({b"debug"})), ["a", "b", "odd"]),
        (Sift(events=frozenset({b"b", b"odd"})), ["b", "odd"]),
        (Sift(since_ns=moment_ns("2026-01-31T12:00:02.000000Z")), ["b"]),
        (Sift(until_ns=moment_ns("2026-01-31T12:00:01.000000Z")), ["debug", "a"]),
        (Sift(letters=b"quota"), ["b"]),
    ],
)
def test_what_is_not_wanted_is_left_out_early(tmp_path: Path, sift: Sift, events: list[str]) -> None:
    """By level, event, time and letters; a line of another shape is decoded to be judged."""
    put(tmp_path, line_of("debug", 0, level="debug"), line_of("a", 1), line_of("b", 2, reason="Quota"))
    with (tmp_path / "journal" / "77-0-0-1-0.jsonl").open("a") as file:
        file.write('{"event": "odd"}\n')
    assert Merged(tmp_path, sift).events == events


def test_files_are_read_on_as_they_grow(tmp_path: Path) -> None:
    """Halves of lines wait; a file that was cut or replaced is read from its begin; one that is gone is none."""
    put(tmp_path, line_of("a", 1))
    path = tmp_path / "journal" / "77-0-0-1-0.jsonl"
    merged = Merged(tmp_path)
    assert (merged.events, merged.again()) == (["a"], [])
    data = json.dumps(line_of("b", 2)).encode() + b"\n"
    for byte in range(len(data)):
        with path.open("ab") as file:
            file.write(data[byte : byte + 1])
        assert merged.again() == (["b"] if byte == len(data) - 1 else [])
    path.write_bytes(json.dumps(line_of("c", 3)).encode() + b"\n")
    assert merged.again() == ["c"]
    other = tmp_path / "other"
    other.write_bytes(b"".join(json.dumps(line_of(event, 4)).encode() + b"\n" for event in ("d", "e", "f")))
    other.replace(path)
    assert merged.again() == ["d", "e", "f"]
    path.unlink()
    assert merged.again() == []
    assert merged.seen.unreadable == {path.name: "No such file or directory"}


def test_no_more_than_a_share_of_the_files_is_in_memory(tmp_path: Path) -> None:
    """Each source holds one block; a start that is far away is not looked into."""
    for epoch in range(1, 6):
        put(tmp_path, *(line_of("x", 600 * epoch + number / 100, epoch=epoch, text="t" * 500) for number in range(400)))
    for path in (tmp_path / "journal").iterdir():  # A day apart, and not minutes.
        epoch = int(path.stem.split("-")[3])
        path.write_text(path.read_text().replace("2026-01-31T", f"2026-01-{epoch + 10:02d}T"))
    merge = Merge(Sift(), Seen(), _never)
    most, total = 0, 0
    for _ in merge.lines(files(tmp_path)):
        total += 1
        most = max(most, sum(len(source.pending) for source in merge.sources.values()))
        assert len(merge.sources) <= 1 + (total - 1) // 400
    assert total == 2_000
    assert most <= 400


def test_a_file_that_cannot_be_read_is_noted_and_the_others_are_shown(tmp_path: Path) -> None:
    """A directory in a journal's place, a file that vanishes between the list and the look."""
    put(tmp_path, line_of("a", 1), line_of("b", 2, task=1))
    (tmp_path / "journal" / "77-0-0-1-2.jsonl").mkdir()
    listed = files(tmp_path)
    (tmp_path / "journal" / "77-0-0-1-1.jsonl").unlink()
    seen = Seen()
    assert len(list(Merge(Sift(), seen, _never).lines(listed))) == 1
    assert sorted(seen.unreadable) == ["77-0-0-1-1.jsonl", "77-0-0-1-2.jsonl"]


def test_a_source_counts_what_it_passes_over(tmp_path: Path) -> None:
    """Damage among lines that are not wanted as well, and a newer version of the lines is noticed."""
    put(tmp_path, line_of("a", 1, v=2, level="debug"))
    path = tmp_path / "journal" / "77-0-0-1-0.jsonl"
    path.write_bytes(
        path.read_bytes() + b"damage\n" + b'{"ts":"2026-01-31T12:00:01.000000Z","mono_ms":5,"event":"x","lev\n' + b"torn"
    )
    seen = Seen()
    source = Source(files(tmp_path)[0], Sift(levels=frozenset({b"debug"})), seen)
    assert not source.fill(10_000)
    assert (source.counts.damaged, source.counts.torn, seen.newer, seen.names) == (2, 1, 2, {b"a"})


def test_half_of_a_surrogate_pair_in_a_lines_first_keys_is_no_traceback(tmp_path: Path) -> None:
    """JSON can hold it, and no encoding can: such a level, event or time is one like any other."""
    odd = "\ud800"
    put(tmp_path, line_of("exit", 1, level=odd), {**line_of("exit", 2), "ts": odd}, line_of(odd, 3))
    assert len(Merged(tmp_path).lines) == 3
