"""The gloo process group over which the ranks save sharded state together: made when first needed, bounded, replaced when broken.

Owns the group and its time-out. Must never use a process group of the training's, nor number groups as `new_group` does: a rank
that did not get as far would count differently from then on, and the training's next `new_group` would hang. So it is made over
the store of torch.distributed under a name of its own, which is the round's, and only after Go, when all ranks are there.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckpt_client.files import SaveError, one_line
from ckpt_client.identity import Identity

SHARE_OF_TIME = 0.9
"""Of the time that the round has left: the rest is for the words that say how the save ended."""

LEAST_MS = 1
"""gloo takes no time-out of 0."""


class SaveGroup:
    """One process group over all ranks. Nothing is opened before `within`.

    After a failed save the group is given up on the ranks that saw it fail. Their ends of its connections close, so that the
    others see an error at once, in this save or at the beginning of the next, where all meet again in a new group.
    """

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._group: dist.ProcessGroup | None = None
        self._end = 0.0
        self._gave_up = False

    @contextlib.contextmanager
    def within(self, round_number: int, left_ms: int) -> Iterator[dist.ProcessGroup]:
        """A group for what the ranks do together in this round, which gets a share of the `left_ms` milliseconds.

        All ranks of the world have to enter. Raises SaveError when the ranks do not meet or one of them is lost (at once when its
        process has died, after the time-out when it only stays away).
        """
        began = time.monotonic()
        self._end = began + left_ms * SHARE_OF_TIME / 1000
        whole = False
        try:
            yield self._met(round_number)
            whole = True
        # gloo's errors are RuntimeErrors, the store's (DistError) are too (torch 2.13).
        except RuntimeError as error:
            took = time.monotonic() - began
            raise SaveError(f"the ranks could not save together, after {took:.1f} s: {one_line(error)}") from error
        finally:
            if not whole:
                _forget_frames(sys.exc_info()[1])
                self._give_up()

    def renew(self) -> None:
        """Give the next steps of the save the time that is left. gloo takes a time-out for each operation."""
        if self._group is not None:
            _c10d()._set_pg_timeout(self._left(), self._group)

    def _left(self) -> timedelta:
        return timedelta(milliseconds=max(LEAST_MS, int((self._end - time.monotonic()) * 1000)))

    def _met(self, round_number: int) -> dist.ProcessGroup:
        if self._group is not None and not self._all_have_it():
            self._give_up()
        if self._group is None:
            # What the failed save has left in cycles of references would keep its group's connections open (see _forget_frames),
            # and the others waiting.
            if self._gave_up:
                gc.collect()
            self._group = self._make(f"ckpt_client/{self._who.generation}/{round_number}")
        return self._group

    def _all_have_it(self) -> bool:
        """Whether no rank has given the group up. Over at once either way, as all ranks are on their way here."""
        try:
            self.renew()
            dist.all_reduce(torch.zeros(1), group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the training has destroyed all groups and made its own again.
            _forget_frames(error)
            return False
        return True

    def _make(self, name: str) -> dist.ProcessGroup:
        c10d, who = _c10d(), self._who
        ranks = list(range(who.world_size))
        store = c10d._get_default_store()
        try:
            group, _ = c10d._new_process_group_helper(len(ranks), who.rank, ranks, "gloo", store, name, timeout=self._left())
        except TypeError as error:  # Private, and the only way that is not counted: its signature may change.
            raise SaveError(f"torch {torch.__version__} makes process groups in another way: {one_line(error)}") from error
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in ranks}
        made: dist.ProcessGroup = group
        return made

    def _give_up(self) -> None:
        group, self._group, self._gave_up = self._group, None, True
        if group is not None:
            # The training may have destroyed all groups already, this one with them.
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)


def _c10d() -> Any:
    """torch's module, whose private names have no types."""
    return dist.distributed_c10d


def _forget_frames(error: BaseException | None) -> None:
    """Drop what the frames refer to: the group's connections close with the last reference to it, not before (torch 2.13)."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for failed, _ in getattr(error, "failures", {}).values():  # CheckpointException: what was raised on each rank.
            traceback.clear_frames(failed.__traceback__)
        error = error.__cause__ or error.__context__
