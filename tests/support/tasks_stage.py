"""One job step of several tasks without Slurm: each task's supervisor is a process, told by its environment which task it is.

Owns the processes and looking into all of their journals at once. Must not know what is right; tests do. There is no scontrol on
their PATH, so a notice's time is KillWait, and nothing is requeued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_supervisor.adapters.journal import read_lines

from tests.support.run import BOUND_S, Run, eventually, supervised, toy

JOB = str(6_000_000 + os.getpid())
"""A worker's own: a start ends what an earlier attempt of the same job has left on the node, a neighbour's too."""

KILL_WAIT = ("--kill-wait", "10s", "--requeue", "never")


@dataclasses.dataclass
class Step:
    """The tasks of a step, and their common directory."""

    runs: list[Run]
    dir: Path
    files: Path

    def __getitem__(self, task: int) -> Run:
        return self.runs[task]

    def journal(self) -> list[dict[str, Any]]:
        """The lines of all tasks, in order of time."""
        lines = [line for path in (self.dir / "journal").glob("*.jsonl") for line in read_lines(path)]
        return sorted(lines, key=lambda line: int(line["mono_ms"]))

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of this name whose fields have these values."""
        return [
            line
            for line in self.journal()
            if line["event"] == name and all(line.get(key) == value for key, value in fields.items())
        ]

    def event(self, name: str, times: int = 1, bound_s: float = BOUND_S, **fields: Any) -> dict[str, Any]:
        """Wait until so many of these events are there; the last of them."""
        found = eventually(
            lambda: (there := self.events(name, **fields)) and len(there) >= times and there, f"{times} {name} {fields}", bound_s
        )
        assert isinstance(found, list)
        last: dict[str, Any] = found[times - 1]
        return last

    def words(self, rank: int) -> list[list[str]]:
        """What the toy of this rank has logged, as words. A line that has no end yet is none."""
        path = self.files / f"toy-{rank}.log"
        return [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()] if path.exists() else []

    def steps(self, rank: int) -> list[int]:
        """The steps that this rank has done."""
        return [int(word[1]) for word in self.words(rank) if word[0] == "step"]

    def trained(self, least: int = 5) -> None:
        """Wait until every rank has done some steps, and the coordinator knows all of them."""
        ranks = range(len(self.runs))
        eventually(lambda: all(max(self.steps(rank), default=0) >= least for rank in ranks), f"step {least} of all ranks")
        for rank in ranks:
            self.event("rank_hello", task=0, rank=rank)

    def pid(self, rank: int) -> int:
        """The process of this rank, as its own word says."""
        return int([word for word in self.words(rank) if word[0] == "ready"][-1][2])

    def committed(self) -> list[int]:
        """Steps that the coordinator has committed, in order."""
        return [int(line["step"]) for line in self.events("commit", result="committed")]

    def codes(self, bound_s: float = BOUND_S) -> list[int]:
        """Wait for the end of all tasks; their exit statuses."""
        return [run.code(bound_s) for run in self.runs]

    def story(self) -> str:
        """Everything there is to know about it."""
        lines = [f"{line['mono_ms']} {line['task']} {line['event']} {line}" for line in self.journal()]
        return "\n".join([*lines, *(f"--- task {task}\n{run.out}\n{run.err}" for task, run in enumerate(self.runs))])


def task_env(task: int, tasks: int, **more: str) -> dict[str, str]:
    """What Slurm tells a task of a step, and no Slurm to be found."""
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "PATH": str(Path(sys.executable).parent),
        **more,
    }


@contextlib.contextmanager
def step_of(
    files: Path,
    tasks: int,
    *words: object,
    options: Sequence[object] = KILL_WAIT,
    of_task: Mapping[int, Sequence[object]] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Step]:
    """A step of so many tasks, each over a toy with these knobs. `of_task`: more knobs for some tasks' toys."""
    files.mkdir(parents=True, exist_ok=True)
    place = files / "ckpt"
    with contextlib.ExitStack() as stack:
        runs = []
        for task in range(tasks):
            own = (of_task or {}).get(task, ())
            command = toy("--steps", 1_000_000, "--step-ms", 20, "--log", files / f"toy-{task}.log", *words, *own)
            more = task_env(task, tasks, CKPT_SUPERVISE_STATE=str(files / "state"), **(env or {}))
            runs.append(stack.enter_context(supervised(files / f"task-{task}", command, *options, env=more, directory=place)))
        step = Step(runs, place, files)
        try:
            yield step
        except AssertionError as error:
            raise AssertionError(f"{error}\n{step.story()}") from None
        finally:
            for run in runs:
                with contextlib.suppress(ProcessLookupError):
                    run.process.send_signal(signal.SIGCONT)
