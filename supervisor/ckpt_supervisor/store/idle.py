"""Whether nobody is at work in a directory: for tools that change it without being its holder.

Owns the look at the holder before a change, and again right before each rename. Must not take an epoch: that would
refuse a job that starts at this moment, and would fence off one that runs on a host which cannot be seen from here.
Instead whoever starts leaves a mark (fence.py) before it does anything else, and a tool that finds a new one stops.
"""

from __future__ import annotations

import os

import msgspec

from ckpt_supervisor.store.fence import read_holder
from ckpt_supervisor.store.holder import Holder, is_alive
from ckpt_supervisor.store.layout import parse_claim
from ckpt_supervisor.store.look import Patience, list_names


class Held(msgspec.Struct, frozen=True):
    """Who held a directory when it was looked at, and the marks of the epochs that were there, lowest first."""

    holder: Holder | None
    epochs: tuple[int, ...]

    @property
    def highest_epoch(self) -> int:
        """The highest epoch that anybody has taken, as far as holder and marks tell; -1 if they tell of none."""
        return max((-1 if self.holder is None else self.holder.epoch, *self.epochs))

    def why_open(self, epoch: int) -> str:
        """Why this epoch may not be over, "" if it is: with neither holder nor mark left none could still commit (fence.py)."""
        return "" if self.highest_epoch < 0 or epoch <= self.highest_epoch else f"epoch {epoch} is newer than the holder's"


def who_holds(root: str | os.PathLike[str]) -> Held:
    """Look at the holder and at the marks. Raises OSError when they cannot be looked at."""
    return Patience().look(lambda: _look(root))


def taken_since(root: str | os.PathLike[str], before: Held) -> str:
    """Why nothing may be changed any more: somebody has started since, or it cannot be said. "" if it is as it was."""
    try:
        now = who_holds(root)
    except OSError as error:
        return f"the holder cannot be looked at: {error.strerror or error}"
    if now.holder is not None and is_alive(now.holder):
        return f"job {now.holder.job} is at work here (process {now.holder.pid} on {now.holder.host})"
    return "" if now == before else "somebody has started here meanwhile"


def _look(root: str | os.PathLike[str]) -> Held:
    epochs = sorted(epoch for epoch in map(parse_claim, list_names(root)) if epoch is not None)
    return Held(read_holder(root), tuple(epochs))
