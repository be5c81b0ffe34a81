"""`python -m tests.sim --seed N --trace` replays one run; `--runs M` plays many and stops at the first broken rule."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / root) for root in ("client", "supervisor")]

from tests.sim.code import real  # noqa: E402
from tests.sim.violation import Violation  # noqa: E402 - the source roots come first
from tests.sim.world import run  # noqa: E402


def main(argv: list[str]) -> int:
    """Play the runs that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event, word and command")
    parser.add_argument("--ranks", type=int, default=16, help="largest number of ranks")
    parser.add_argument("--tasks", type=int, help="this many supervisors in every run")
    parser.add_argument("--keep-going", action="store_true", help="count the broken rules instead of stopping at the first")
    arguments = parser.parse_args(argv)
    code = real()
    ends: collections.Counter[str] = collections.Counter()
    broken: dict[str, list[int]] = collections.defaultdict(list)
    began = time.process_time()
    where = {} if arguments.tasks is None else {"tasks": arguments.tasks}
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        try:
            world = run(seed, code, print if arguments.trace else None, arguments.ranks, where)
        except Violation as violation:
            if not arguments.keep_going:
                print(f"seed {seed}: {violation}", file=sys.stderr)
                return 1
            broken[violation.rule].append(seed)
            continue
        end = world.checks.exit
        ends[f"exit {end[0]}" if end else "killed" if world.checks.was_killed else "still running"] += 1
        if arguments.trace:
            print(f"seed {seed}: {end}")
    seconds = max(time.process_time() - began, 0.001)
    rate = f"{arguments.runs} runs in {seconds:.1f} s of CPU ({arguments.runs / seconds:.0f} a second)"
    print(f"{rate}: {dict(sorted(ends.items()))}")
    for rule, seeds in sorted(broken.items()):
        print(f"  {rule}: {len(seeds)} runs, first seeds {seeds[:8]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
