"""The real core and the real client hold their rules in a simulated world, seed by seed. A broken rule names its seed."""

from __future__ import annotations

import os

import pytest

from tests.sim.__main__ import main
from tests.sim.code import real
from tests.sim.world import run

RUNS = int(os.environ.get("SIM_RUNS", "2400"))
"""Runs of one test session; `make sim` plays more."""

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_every_rule_holds_in_every_run(part: int) -> None:
    """No drawn combination of faults breaks a safety rule, and unharmed runs come to a good end."""
    code = real()
    for seed in range(part, RUNS, PARTS):
        run(seed, code)


def test_a_run_is_replayed_by_its_seed_alone() -> None:
    """The same seed gives the same trace, event by event."""
    code = real()
    first: list[str] = []
    second: list[str] = []
    run(255, code, first.append)
    run(255, code, second.append)
    assert first == second
    assert first


def test_a_replay_prints_the_seed_and_all_that_was_drawn_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Who replays a seed sees the circumstances before the first event."""
    assert main(["--seed", "255", "--trace"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("seed=255 mode=")
    assert "story=" in first
    assert "faults=" in first
