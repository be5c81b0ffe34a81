"""`--keep` over several starts: a run that is only ever interrupted does not prune in its grace, and must not fill the disk."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.support.run import trained

if TYPE_CHECKING:
    from pathlib import Path

FOREVER = ("--steps", 1_000_000)


def test_checkpoints_of_interrupted_starts_are_pruned_at_the_next_start(tmp_path: Path) -> None:
    """After five interruptions without a periodic save there are `--keep` checkpoints and at most the newest one beside them."""
    steps: list[int] = []
    for _ in range(5):
        with trained(tmp_path, *FOREVER, options=["--keep", 2]) as run:
            run.reached((steps[-1] if steps else 0) + 3)
            if len(steps) > 2:
                removed = run.event("pruned")["removed"]
                assert removed == [f"step-{steps[-3]:09d}"]
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            steps.append(run.event("commit")["step"])
            assert run.intact() == steps[-3:]
