"""The simulator, played over many seeds, and the table of planted faults that proves that it sees."""

from __future__ import annotations

import pytest

from tests.sim.code import real
from tests.sim.faults import Fault
from tests.sim.planted import FAULTS
from tests.sim.violation import Violation
from tests.sim.world import run

CHUNK_RUNS = 250
CHUNKS = 8
"""2,000 runs in CI, half of them of several tasks; `make sim RUNS=20000` plays more, `make sim SEED=255` replays one."""

LARGE_RUNS = 100
LARGE_RANKS = 64

SEEDS_MAX = 600
"""Within so many runs each planted fault has to be found."""


@pytest.mark.parametrize("first", [chunk * CHUNK_RUNS for chunk in range(CHUNKS)])
def test_no_rule_is_broken_in_any_run(first: int) -> None:
    """Safety in every run, liveness in the calm and healed ones; a broken rule names the seed that replays it."""
    code = real()
    ends = {run(seed, code).checks.exit for seed in range(first, first + CHUNK_RUNS)}
    assert len(ends) > 1, "the runs do not differ"


@pytest.mark.parametrize("tasks", [1, 4, 16])
def test_no_rule_is_broken_with_many_ranks(tasks: int) -> None:
    """The same with up to 64 ranks, over one task and over many."""
    code = real()
    ends = {run(seed, code, ranks_max=LARGE_RANKS, where={"tasks": tasks}).checks.exit for seed in range(LARGE_RUNS)}
    assert len(ends) > 1, "the runs do not differ"


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_run_is_the_same_every_time(tasks: int) -> None:
    """A seed replays: equal words, equal times, equal end."""
    stories: list[list[str]] = []
    for _ in range(2):
        lines: list[str] = []
        run(255, real(), lines.append, where={"tasks": tasks})
        stories.append(lines)
    assert stories[0] == stories[1]
    assert len(stories[0]) > 20


@pytest.mark.parametrize("planted", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(planted: Fault) -> None:
    """Each small change to the code is seen by some checker, and the code as it is passes the very seed that shows it."""
    code = planted.code()
    for seed in range(SEEDS_MAX):
        try:
            run(seed, code, where=planted.where)
        except Violation:
            run(seed, real(), where=planted.where)
            return
    pytest.fail(f"{planted.name} was not found in {SEEDS_MAX} runs")
