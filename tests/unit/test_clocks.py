"""How far clocks are apart, from lines of which one cannot have come before the other."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.view.clocks import SLACK_MS, Bounds, offsets
from ckpt_supervisor.view.reading import files
from hypothesis import given
from hypothesis import strategies as st

from tests.support import many_lines

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=timezone.utc)


def write(root: Path, task: int, lines: list[tuple[float, str, dict[str, Any]]], ahead_s: float = 0) -> None:
    """A task's journal, by a clock that is so far ahead."""
    (root / "journal").mkdir(exist_ok=True)
    own = {"level": "info", "job": "77", "attempt": 0, "step_id": "0", "epoch": 1, "task": task, "host": f"node{task}"}
    with (root / "journal" / f"77-0-0-1-{task}.jsonl").open("w") as file:
        for second, event, fields in lines:
            stamp = (NOON + timedelta(seconds=second + ahead_s)).isoformat(timespec="microseconds").replace("+00:00", "Z")
            file.write(json.dumps({"ts": stamp, "mono_ms": 1, "event": event, **own, **fields}) + "\n")


def found(root: Path) -> dict[int, float]:
    """By task: how far ahead it was found to be, in seconds."""
    return {task: round(offset.ms / 1000, 1) for (_, task), offset in offsets(files(root)).items()}


COORDINATOR = [
    (0.0, "command_started", {}),
    (0.5, "task_joined", {"of_task": 1, "host_of_task": "node1"}),
    (5.1, "rank_hello", {"rank": 1, "rank_pid": 8, "of_task": 1}),
    (9.0, "go", {"round": 1}),
    (10.2, "verified", {"round": 1, "of_task": 1}),
]
TASK = [(0.6, "command_started", {}), (5.0, "rank_hello", {"rank": 1, "rank_pid": 8}), (10.0, "verified", {"round": 1})]


@pytest.mark.parametrize("ahead_s", [90.0, -90.0, 3_600.0, -0.5])
def test_a_clock_that_is_off_is_found_in_either_direction(tmp_path: Path, ahead_s: float) -> None:
    """Within the time that the messages took."""
    write(tmp_path, 0, COORDINATOR)
    write(tmp_path, 1, TASK, ahead_s)
    (offset,) = offsets(files(tmp_path)).values()
    assert offset.within_ms is not None
    assert abs(offset.ms - ahead_s * 1000) <= offset.within_ms + 1 <= 102
    assert offset.is_large == (abs(ahead_s) > 1)
    assert (
        offset.text
        == f"the clock of node1 is {abs(offset.ms) / 1000:.1f} s {'ahead of' if ahead_s > 0 else 'behind'} that of node0"
    )


def test_clocks_that_may_agree_are_left_alone(tmp_path: Path) -> None:
    """A slow network is no difference of clocks, nor are tasks on one node compared."""
    write(tmp_path, 0, COORDINATOR)
    write(tmp_path, 1, TASK)
    assert found(tmp_path) == {}
    write(tmp_path, 1, [(50.0 if event == "command_started" else second, event, fields) for second, event, fields in TASK])
    assert found(tmp_path) == {}
    write(tmp_path, 1, [(second, event, {**fields, "host": "node0"}) for second, event, fields in TASK], 90)
    assert found(tmp_path) == {}


def test_one_direction_alone_bounds_a_difference(tmp_path: Path) -> None:
    """A program that does not attach: a clock that is behind is noticed by the start alone, as "at least"."""
    write(tmp_path, 0, COORDINATOR[:2])
    write(tmp_path, 1, TASK[:1], -90)
    (offset,) = offsets(files(tmp_path)).values()
    assert (offset.within_ms, round(offset.ms / 1000)) == (None, -90)
    assert "at least 89.9 s behind" in offset.text
    write(tmp_path, 1, TASK[:1], 90)
    assert found(tmp_path) == {}


def test_a_rank_that_comes_again_is_not_taken_for_the_first_time(tmp_path: Path) -> None:
    """Restarts in place, and words of many ranks that were written as one line."""
    later = [(605.0, "rank_hello", {"rank": 1, "rank_pid": 9}), (605.1, "rank_hello", {"rank": 1, "rank_pid": 9})]
    write(tmp_path, 0, [*COORDINATOR, (605.1, "rank_hello", {"rank": 1, "rank_pid": 9, "of_task": 1})])
    write(tmp_path, 1, [*TASK, *later])
    assert found(tmp_path) == {}
    together = (5.1, "rank_hello", {"ranks": [0, "1-3"]})
    write(tmp_path, 0, [together if line[1] == "rank_hello" else line for line in COORDINATOR])
    assert found(tmp_path) == {}
    write(tmp_path, 1, [*TASK, *later], 90)
    assert found(tmp_path) == {1: 90.0}


def test_a_clock_that_was_set_meanwhile_is_not_judged(tmp_path: Path) -> None:
    """Pairs that contradict each other say nothing."""
    write(tmp_path, 0, COORDINATOR)
    write(tmp_path, 1, [TASK[0], (95.0, "rank_hello", TASK[1][2])])
    assert found(tmp_path) == {}


@given(st.floats(-1e5, 1e5), st.lists(st.floats(0, 3e4), min_size=1), st.lists(st.floats(0, 3e4), min_size=1))
def test_the_true_difference_is_always_within_the_bounds(ahead_ms: float, up_ms: list[float], down_ms: list[float]) -> None:
    """However long each message was on its way."""
    bounds = Bounds()
    for number, took_ms in enumerate(up_ms):
        sent_ns = number * 10**9
        bounds.sent_up(int(sent_ns + ahead_ms * 1e6), int(sent_ns + took_ms * 1e6))
    for number, took_ms in enumerate(down_ms):
        sent_ns = number * 10**9
        bounds.sent_down(sent_ns, int(sent_ns + (took_ms + ahead_ms) * 1e6))
    offset = bounds.offset("a", "b")
    if offset is None:
        assert abs(ahead_ms) <= SLACK_MS + max(*up_ms, *down_ms, 0)
    else:
        assert offset.within_ms is not None
        assert abs(offset.ms - ahead_ms) <= offset.within_ms + 0.001


def test_files_that_are_missing_damaged_or_foreign_say_nothing(tmp_path: Path) -> None:
    """No coordinator's, no bytes, no numbers, no JSON: none of these is an error."""
    write(tmp_path, 1, TASK, 90)
    assert found(tmp_path) == {}
    write(tmp_path, 0, [(0.5, "task_joined", {"of_task": "1"}), (5.1, "rank_hello", {"rank": None}), (9.0, "go", {"round": []})])
    assert found(tmp_path) == {}
    for data in (
        b"",
        b"\x00" * 5_000,
        b"{" * 70_000,
        b'{"event":"rank_hello","ranks":["0-999999999999"]}\n',
        b'{"event":[]}\n{"event":{}}\n',
    ):
        for name in ("77-0-0-1-0.jsonl", "77-0-0-1-1.jsonl"):
            (tmp_path / "journal" / name).write_bytes(data)
            assert found(tmp_path) == {}
    (tmp_path / "journal" / "77-0-0-1-1.jsonl").unlink()
    (tmp_path / "journal" / "77-0-0-1-1.jsonl").mkdir()
    assert found(tmp_path) == {}


def test_nodes_of_a_long_run_are_told_apart(tmp_path: Path) -> None:
    """In every start anew: a node may be another one by then."""
    many_lines.write(
        tmp_path, 1_500, tasks=12, attempts=2, skewed={4: 90_000, 5: 90_000, 6: 90_000, 7: 90_000, 8: -90_000, 9: -300}
    )
    by_task = {key: round(offset.ms / 1000) for key, offset in offsets(files(tmp_path)).items()}
    one = {4: 90, 5: 90, 6: 90, 7: 90, 8: -90, 9: 0}
    assert by_task == {(epoch, task): seconds for epoch in (1, 2) for task, seconds in one.items()}
