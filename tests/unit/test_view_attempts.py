"""How far a start had come when it was last heard of: what the journal's `progress` adds to what saves tell."""

from __future__ import annotations

from typing import Any

import pytest
from ckpt_supervisor.view.attempts import Attempt, read


def line(second: int, event: str, **fields: Any) -> dict[str, Any]:
    """A line of the journal."""
    return {"ts": f"2026-11-26T15:{second // 60:02}:{second % 60:02}.000000Z", "event": event, "level": "debug", **fields}


def start(*lines: dict[str, Any]) -> Attempt:
    """A start that has written these."""
    return read(Attempt(1, "77", 0, "0"), lines)


def test_steps_move_between_saves() -> None:
    """A run that saves each hour has not stood still for an hour."""
    hello = line(0, "rank_hello", rank=0)
    found = start(hello, *(line(10 * n, "progress", step=20 * n, ahead=20 * n) for n in range(1, 9)))
    assert found.reached == 160
    assert found.committed == -1
    assert found.steps_per_s == pytest.approx(2.0)


def test_what_was_agreed_on_counts_also_if_progress_is_behind() -> None:
    """A word of a rank is up to some seconds old."""
    assert start(line(1, "progress", step=90), line(2, "agreed", step=100), line(3, "progress", step=95)).reached == 100


@pytest.mark.parametrize("step", [None, True, "7", -3, 1.5, [], {}])
def test_a_damaged_number_is_none(step: object) -> None:
    """A journal may hold anything."""
    assert start(line(1, "progress", step=step)).reached == -1
