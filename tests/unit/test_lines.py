"""Lines that say the same of several ranks or tasks are one line; nothing of them is lost but whose number was which."""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.lines import folded


def line(event: str, at_ms: int = 0, **fields: Any) -> tuple[Entry, Stamp]:
    """A line of this moment."""
    return Entry(event, "info", fields), Stamp(at_ms * 1_000_000, at_ms)


def test_what_is_the_same_of_many_ranks_is_one_line_in_the_place_of_the_first() -> None:
    """With the last one's time and numbers. Another line in between stays where it is."""
    many = [line("rank_agreed", rank, round=3, rank=rank, after_ms=rank) for rank in range(9)]
    other = line("agreed", 1, round=3, step=7)
    assert folded([many[0], other, *many[1:]]) == [line("rank_agreed", 8, round=3, after_ms=8, ranks=list(range(9))), other]


def test_few_lines_stay_one_by_one() -> None:
    """They are easier to read and to look for."""
    few = [line("rank_agreed", rank, round=3, rank=rank) for rank in range(8)]
    assert folded(few) == few


def test_a_different_reason_is_a_line_of_its_own() -> None:
    """Only what differs between healthy ranks is put together."""
    lines = [line("rank_failed", round=3, rank=rank, reason=f"disk {rank}") for rank in range(20)]
    assert folded(lines) == lines


def test_one_signal_at_many_tasks_is_one_line() -> None:
    """But tasks that join are told one by one, each with its host."""
    signals = [line("signal", signal="SIGTERM", of_task=task) for task in range(1, 12)]
    joined = [line("task_joined", of_task=task, host_of_task=f"n{task}") for task in range(1, 12)]
    assert folded([*signals, *joined]) == [line("signal", signal="SIGTERM", of_tasks=list(range(1, 12))), *joined]


def test_many_numbers_in_a_row_are_a_range() -> None:
    """From 65 on."""
    ((entry, _),) = folded([line("rank_agreed", rank=rank) for rank in (*range(3, 90), 100)])
    assert entry.fields["ranks"] == ["3-89", 100]
