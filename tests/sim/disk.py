"""The simulated directory of checkpoints: what each rank really wrote, what was checked, what was committed."""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ckpt_client.wire import SavedFile

if TYPE_CHECKING:
    from tests.sim.shell import Shell
    from tests.sim.trainer import Process
    from tests.sim.world import World

SIZE = 1_000


@dataclasses.dataclass(slots=True)
class File:
    """What is really on the disk. `step` and `rank` are whose state it holds."""

    step: int
    rank: int
    size: int
    digest: str

    @property
    def whole(self) -> bool:
        """All of what was meant is there."""
        return self.size == SIZE and self.digest == digest(self.step, self.rank)


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A committed directory."""

    step: int
    ranks: tuple[int, ...]
    files: dict[str, File]
    verified: str


def digest(step: int, rank: int) -> str:
    """Digest of what rank holds after this step."""
    return f"{step:024x}{rank:08x}"


class Disk:
    """Partial and committed directories."""

    def __init__(self, world: World, resume_step: int) -> None:
        self.world = world
        self.partial: dict[str, dict[str, File]] = {}
        self.committed: dict[int, Checkpoint] = {}
        self.committing = 0
        if resume_step >= 0:
            ranks = tuple(range(world.options.ranks))
            files = {f"rank-{rank:05d}.pt": File(resume_step, rank, SIZE, digest(resume_step, rank)) for rank in ranks}
            self.committed[resume_step] = Checkpoint(resume_step, ranks, files, "full")

    # --- ranks ------------------------------------------------------------------------------------------------------

    def begin(self, directory: str, process: Process) -> None:
        """A rank begins to write: its file is torn."""
        files = self.partial.setdefault(directory, {})
        files[f"rank-{process.rank:05d}.pt"] = File(process.n, process.rank, SIZE // 2, "")

    def end(self, directory: str, process: Process, step: int) -> tuple[SavedFile, ...]:
        """A rank has written all that it means to; returns what it reports."""
        options, rng = self.world.options, self.world.rng
        path = f"rank-{process.rank:05d}.pt"
        meant = digest(step, process.rank)
        file = File(step, process.rank, SIZE, meant)
        files = self.partial.setdefault(directory, {})
        files[path] = file
        if options.has("short") and rng.random() < 0.5:
            file.size = SIZE - 1
        if options.has("corrupt") and rng.random() < 0.5:
            file.digest = "0" * 32
        if options.has("missing_file") and rng.random() < 0.5:
            del files[path]
        return (SavedFile(path, SIZE, meant),)

    # --- the supervisor ---------------------------------------------------------------------------------------------

    def verify(self, command: Any, shell: Shell) -> None:
        """Verify: a task reads what is there of its own ranks, now or later or never."""
        options, rng = self.world.options, self.world.rng
        delay_ms = options.verify_ms + (rng.choice((500, 8_000)) if options.has("verify_slow") else 0)
        if options.has("verify_hang") and rng.random() < 0.5:
            return
        if options.has("slow_share") and shell.task == options.tasks - 1:
            delay_ms += rng.choice((500, 8_000, 30_000))
        self.world.at(delay_ms, self._verified, (command, shell))

    def _verified(self, arguments: tuple[Any, Shell]) -> None:
        command, shell = arguments
        if shell.over:
            return
        problems = []
        if self.world.options.has("share_fails") and shell.task == self.world.options.tasks - 1 and self.world.rng.random() < 0.5:
            problems.append("Stale file handle")
        files = self.partial.get(command.partial, {})
        for rank, meant in command.files:
            there = files.get(meant.path)
            if there is None:
                problems.append(f"{meant.path} of rank {rank} is missing")
            elif there.size != meant.size_bytes:
                problems.append(f"{meant.path} of rank {rank} is truncated")
            elif command.full and there.digest != meant.xxh3_128:
                problems.append(f"{meant.path} of rank {rank} is corrupt")
        made = self.world.code.core.between.CheckedFile
        found = tuple(made(meant.path, meant.size_bytes, meant.xxh3_128, rank) for rank, meant in command.files)
        if not problems:
            self.world.checks.disk.found_intact(shell.task, command)
        shell.verified(command, "; ".join(problems), found)

    def commit(self, command: Any) -> None:
        """Commit: rename the partial directory, now or later or never."""
        options, rng = self.world.options, self.world.rng
        delay_ms = options.commit_ms + (rng.choice((500, 8_000, 25_000)) if options.has("commit_slow") else 0)
        self.committing += 1
        if options.has("commit_hang") and rng.random() < 0.5:
            return
        self.world.at(delay_ms, self._committed, command)

    def _committed(self, command: Any) -> None:
        options, rng = self.world.options, self.world.rng
        result, reason = "COMMITTED", ""
        self.committing -= 1
        if options.has("there_already") and command.step not in self.committed and rng.random() < 0.5:
            files = {f"rank-{rank:05d}.pt": File(command.step, rank, SIZE, digest(command.step, rank)) for rank in command.ranks}
            self.committed[command.step] = Checkpoint(command.step, command.ranks, files, "full")
        if options.has("fenced") and rng.random() < 0.5:
            result, reason = "FENCED", "epoch 2"
        elif options.has("commit_fails") and rng.random() < 0.5:
            result, reason = "FAILED", "Input/output error"
        elif command.step in self.committed:
            result = "ALREADY_THERE"
        elif command.partial not in self.partial:
            result, reason = "FAILED", "the partial directory is gone"
        else:
            files = self.partial.pop(command.partial)
            self.committed[command.step] = Checkpoint(command.step, command.ranks, files, command.verified)
            self.world.checks.disk.committed(command, self.committed[command.step])
        self.world.supervisor.committed(command, result, reason)

    def drop(self, directory: str) -> None:
        """DropPartial."""
        self.world.at(self.world.rng.randrange(20), self.partial.pop, directory, None)

    def name_of(self, directory: str) -> str:
        """Last part of a directory's path."""
        return PurePosixPath(directory).name
