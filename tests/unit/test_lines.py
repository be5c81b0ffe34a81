"""Lines that say the same of several ranks or tasks are one line; nothing of them is lost but whose number was which."""

from __future__ import annotations

from typing import Any

from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.journal import Stamp
from ckpt_supervisor.lines import folded


def line(event: str, at_ms: int = 0, **fields: Any) -> tuple[Entry, Stamp]:
    """A line of this moment."""
    return Entry(event, "info", fields), Stamp(at_ms * 1_000_000, at_ms)


def test_what_is_the_same_of_several_ranks_is_one_line_in_the_place_of_the_first() -> None:
    """With the last one's time and numbers."""
    lines = [
        line("rank_agreed", 1, round=3, rank=8, after_ms=1),
        line("agreed", 1, round=3, step=7),
        line("rank_agreed", 2, round=3, rank=9, after_ms=2),
        line("rank_agreed", 2, round=4, rank=9, after_ms=0),
    ]
    assert folded(lines) == [line("rank_agreed", 2, round=3, after_ms=2, ranks=[8, 9]), lines[1], lines[3]]


def test_a_different_reason_is_a_line_of_its_own() -> None:
    """Only what differs between healthy ranks is put together."""
    lines = [line("rank_failed", round=3, rank=rank, reason=f"disk {rank}") for rank in (1, 2)]
    assert folded(lines) == lines


def test_one_signal_at_many_tasks_is_one_line() -> None:
    """But tasks that join are told one by one, each with its host."""
    signals = [line("signal", signal="SIGTERM", of_task=task) for task in (1, 2, 5)]
    joined = [line("task_joined", of_task=task, host_of_task=f"n{task}") for task in (1, 2)]
    assert folded([*signals, *joined]) == [line("signal", signal="SIGTERM", of_tasks=[1, 2, 5]), *joined]


def test_many_numbers_in_a_row_are_a_range() -> None:
    """From 65 on."""
    ((entry, _),) = folded([line("rank_agreed", rank=rank) for rank in (*range(3, 90), 100)])
    assert entry.fields["ranks"] == ["3-89", 100]
