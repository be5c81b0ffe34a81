"""What must hold for what is on the simulated disk: whole, of one step, and found intact by the task of each rank.

Judges by the files as they are, never by what the supervisors believe.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.sim.disk import digest
from tests.sim.violation import Violation

if TYPE_CHECKING:
    from tests.sim.disk import Checkpoint
    from tests.sim.world import World


class DiskChecks:
    """The checkers of one run that look at files."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.intact: dict[int, set[int]] = defaultdict(set)
        """By round: the ranks whose files their own task has found intact."""

    def broken(self, rule: str, text: str) -> None:
        """A rule is broken."""
        raise Violation(rule, f"{text} (at {self.world.now} ms)")

    def found_intact(self, task: int, command: Any) -> None:
        """A task has found the files of these ranks intact."""
        self.intact[command.round].update(rank for rank, _ in command.files if rank in self.world.ranks_of(task))

    def commits(self, command: Any, found: list[Any]) -> None:
        """A commit begins: its manifest is of what all tasks have found."""
        entries = {(file.path, file.xxh3_128) for file in found}
        wanted = {(f"rank-{rank:05d}.pt", digest(command.step, rank)) for rank in command.ranks}
        if entries != wanted:
            self.broken(
                "manifest", f"round {command.round}: the manifest has {sorted(entries)}, the ranks wrote {sorted(wanted)}"
            )

    def committed(self, command: Any, checkpoint: Checkpoint) -> None:
        """A directory got its final name: it must be whole and from one step."""
        options = self.world.options
        everybody = tuple(range(options.ranks))
        if command.ranks != everybody and not (command.ranks == (0,) and not options.sharded):
            self.broken("mixed", f"step {command.step} holds only ranks {command.ranks} of {options.ranks}")
        for rank in command.ranks:
            file = checkpoint.files.get(f"rank-{rank:05d}.pt")
            if file is None:
                self.broken("mixed", f"step {command.step} has no file of rank {rank}")
            elif file.step != command.step:
                self.broken("mixed", f"step {command.step} has step {file.step} of rank {rank}")
            elif not file.whole and checkpoint.verified == "full":
                self.broken("whole", f"step {command.step}: the file of rank {rank} is not whole")

    def is_whole(self, step: int) -> bool:
        """Whether this step is committed, and what it should be."""
        checkpoint = self.world.disk.committed.get(step)
        if checkpoint is None:
            return False
        structure = checkpoint.verified == "structure"
        return all(
            file is not None and file.step == step and (file.whole or structure)
            for file in (checkpoint.files.get(f"rank-{rank:05d}.pt") for rank in checkpoint.ranks)
        )
