"""`python -m tests.sim.hunt [NAME...] [--runs N]`: which run shows each planted fault, also those that CI has no time for."""

from __future__ import annotations

import argparse
import sys

from tests.sim.code import real
from tests.sim.faults import Fault
from tests.sim.planted import FAULTS
from tests.sim.violation import Violation
from tests.sim.world import run


def found_in(planted: Fault, runs: int) -> tuple[int, str] | None:
    """The first seed that shows the fault and the rule that was broken; None if no run does."""
    code = planted.code()
    for seed in range(runs):
        try:
            run(seed, code, where=planted.where)
        except Violation as violation:
            try:
                run(seed, real(), where=planted.where)
            except Violation as fault:
                return seed, f"{violation.rule}, BUT THE CODE AS IT IS BREAKS {fault.rule} THERE"
            return seed, violation.rule
    return None


def main() -> int:
    """Print a line a fault; 1 when one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.hunt", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=20_000)
    arguments = parser.parse_args()
    missed = 0
    for planted in FAULTS:
        if arguments.names and planted.name not in arguments.names:
            continue
        found = found_in(planted, arguments.runs)
        missed += found is None
        what = f"not found in {arguments.runs} runs" if found is None else f"seed {found[0]}: {found[1]}"
        print(f"{planted.name:<45} {what}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
