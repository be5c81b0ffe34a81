"""A checkpoint directory to try ckptctl on, and a call of it in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.ctl import main as ctl

CREATED = "2026-01-31T12:00:00.000000+00:00"
DEAD_PID = 2**22 + 1
"""Above every pid that Linux gives (proc(5), pid_max)."""


def committed(root: Path, step: int, mode: store.Mode = "full", **more: Any) -> Path:
    """A committed checkpoint of this step with one file of 1500 bytes; nobody is at work in the directory afterwards.

    `more`: fields of its manifest.
    """
    epoch = store.take_epoch(root, "77", 2, "0").epoch
    partial = store.make_partial(root, step, epoch, 1)
    data = f"state of step {step:06d}".encode() * 75  # 1500 bytes
    (partial / "state.pt").write_bytes(data)
    report, entries = store.check_files(partial, [store.Expected("state.pt", len(data), "", 0)], mode)
    manifest = store.Manifest(
        step=step, world_size=1, ranks=(0,), job="77", attempt=2, epoch=epoch, cause="preempted",
        created_at=CREATED, verified=mode, files=entries,
    )  # fmt: skip
    outcome = store.commit(root, partial, msgspec.structs.replace(manifest, **more))
    assert isinstance(outcome, store.Committed), (report, outcome)
    leave(root)
    return outcome.path


def leave(root: Path, **changes: Any) -> store.Holder:
    """As if the holder had ended, or with these fields changed."""
    holder = store.read_holder(root)
    assert holder is not None
    holder = msgspec.structs.replace(holder, **{"pid": DEAD_PID, "pid_started": 1, **changes})
    (root / store.ATTEMPT).write_bytes(msgspec.json.encode(holder))
    return holder


def flip_a_bit(path: Path, at: int = 500) -> None:
    """Damage that only reading every byte finds."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def names(root: Path) -> list[str]:
    """What lies in a checkpoint directory, without who holds it."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith((".attempt-", store.ATTEMPT, "journal")))


class Told:
    """What one call of ckptctl came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()

    @property
    def values(self) -> list[Any]:
        """The JSON values, one a line."""
        return [json.loads(line) for line in self.lines]


def caller(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Calls ckptctl in this process."""

    def run(*words: object) -> Told:
        capsys.readouterr()
        code = ctl.main([str(word) for word in words])
        return Told(code, *capsys.readouterr())

    return run
