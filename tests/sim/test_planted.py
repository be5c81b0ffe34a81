"""The simulator sees what it has to see: each planted fault is found, and the same runs of the real code are clean."""

from __future__ import annotations

import pytest

from tests.sim.checks import Violation
from tests.sim.code import real
from tests.sim.planted import FAULTS, Fault
from tests.sim.world import run

SEEDS_MAX = 1_500


def found_after(fault: Fault) -> int | None:
    """Number of the first run that breaks a rule."""
    code = fault.code()
    for seed in range(SEEDS_MAX):
        try:
            run(seed, code, where=fault.where)
        except Violation:
            return seed
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    """A code with this fault breaks a rule within a bounded number of runs; the real code passes the same runs."""
    seed = found_after(fault)
    assert seed is not None, f"{fault.name} survived {SEEDS_MAX} runs"
    code = real()
    for earlier in range(seed + 1):
        run(earlier, code, where=fault.where)


def test_planted_faults_have_names_of_their_own() -> None:
    """Each fault is built under its name, so names must not repeat."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
