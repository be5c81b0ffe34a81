"""The report's pictures and words at their edges: very many attempts, nobody late, one sample, causes in their own words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ckpt_supervisor.view.facts import Attempt, Run, Word
from ckpt_supervisor.view.report import headline, lateness, memory, steps
from ckpt_supervisor.view.report.causes import FAMILIES, OTHER, family_of

from tests.support.made_run import BEGIN_NS, made

TITLES = {family.title for family in (*FAMILIES, OTHER)}


def marks(run: Run) -> list[dict[str, Any]]:
    """The traces of how attempts ended."""
    figure = steps.chart(run, {}).figure
    assert figure is not None
    return [trace for trace in figure["data"] if trace["name"] in TITLES]


@pytest.mark.parametrize(("attempts", "ys", "mode"), [(30, 3, "lines+markers"), (500, 1, "markers")])
def test_hundreds_of_ends_are_no_wall(attempts: int, ys: int, mode: str) -> None:
    """Above some dozens their lines over the whole height would hide everything: the marks at the top stay."""
    found = marks(made(attempts=attempts, saves=1, ranks=2))
    assert {trace["mode"] for trace in found} == {mode}
    assert sum(len(trace["x"]) for trace in found) == ys * attempts
    for trace in found:
        sizes = trace["marker"]["size"]
        assert sizes == 10 if mode == "markers" else set(sizes) == {0, 10}


def test_the_ends_that_are_counted_add_up_to_the_attempts() -> None:
    """What is left out is said with its number."""
    card = next(card for card in headline.cards(made(attempts=13)) if card.title == "Attempts")
    numbers = [int(part) for part in card.more.replace(",", " ").split() if part.isdecimal()]
    assert sum(numbers) == 13
    assert card.more.endswith(" others")
    card = next(card for card in headline.cards(made(attempts=2)) if card.title == "Attempts")
    assert "other" not in card.more


def test_a_cause_is_called_what_it_is() -> None:
    """A signal of somebody is no preemption, and whether a start without a last word has lost its node is not known."""
    assert family_of("signal").title == "signal"
    assert family_of("no end in sight").title == "signal"
    assert family_of("preempted").title == "preempted"
    assert family_of("lost without a word").title == "lost without a word"
    assert family_of("node failure").title == "node failure"
    looks = [(family.symbol, family.dash) for family in FAMILIES]
    assert len(set(looks)) == len(looks)


def with_words(late_ms: int) -> Run:
    """One round of two ranks, one of them so much later."""
    run = made(attempts=1, saves=1, ranks=2)
    (one,) = run.attempts
    words = (Word(0, agreed_ms=5, arrived_ms=5, written_ms=5), Word(1, agreed_ms=5, arrived_ms=5, written_ms=5 + late_ms))
    one.rounds = (msgspec.structs.replace(one.rounds[0], words=words),)
    return run


def test_where_nobody_was_late_nobody_is_named() -> None:
    """And the map is not all of the strongest colour."""
    for late_ms, zmax in ((0, 0.1), (3_000, 3.0)):
        chart = lateness.chart(with_words(late_ms))
        assert chart.figure is not None
        heat = chart.figure["data"][0]
        assert (heat["zmin"], heat["zmax"]) == (0, zmax)
        assert ("Nobody was late." in chart.caption) == (not late_ms)
        assert ("was last" in chart.caption) == ("latest was rank" in chart.caption) == bool(late_ms)


def test_one_sample_of_memory_is_seen() -> None:
    """A line of one point is none."""
    ones = [Attempt(job="7", attempt=0, epoch=1, step_id="0"), Attempt(job="7", attempt=1, epoch=2, step_id="0")]
    ones[0].memory = ((BEGIN_NS, 5 * 10**9, 8 * 10**9),)
    ones[1].memory = tuple((BEGIN_NS + at * 10**9, 5 * 10**9, 8 * 10**9) for at in range(60, 63))
    run = Run(directory="x", attempts=tuple(ones), now_ns=BEGIN_NS, notes=())
    figure = memory.chart(run).figure
    assert figure is not None
    trace = figure["data"][0]
    assert trace["mode"] == "lines+markers"
    assert trace["marker"]["size"][0] > 0
    assert set(trace["marker"]["size"][2:]) == {0}
    figure = memory.chart(msgspec.structs.replace(run, attempts=(ones[1],))).figure
    assert figure is not None
    assert figure["data"][0]["mode"] == "lines"


def test_a_start_without_a_last_word_is_not_said_to_be_lost_just_now() -> None:
    """Its journal may be weeks old."""
    one = Attempt(job="7", attempt=0, epoch=1, step_id="0")
    one.began_ns, one.ended_ns, one.is_running = BEGIN_NS, BEGIN_NS + 10**9, None
    run = Run(directory="x", attempts=(one,), now_ns=BEGIN_NS + 10**18, notes=())
    cells = headline.attempts(run).rows[0]
    assert "running, or lost without a last word" in cells
