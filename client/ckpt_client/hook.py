"""`attach()` and the hook: one call per step, for loops that are not written with `steps()`.

Owns the hot path: `Hook.step` stores one number and makes two comparisons, with no lock, system call or clock (docs/protocol.md,
rule 1), so that it may stand in the tightest loop. Must not know how to wait or save: attachment.py does. The only place of
the client that reads `os.environ`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ckpt_client import files, meeting, wire
from ckpt_client.attachment import Attachment, Saver
from ckpt_client.identity import Identity
from ckpt_client.meeting import Meeting, Wish
from ckpt_client.phase import Phase, Stay, stop_if_asked
from ckpt_client.place import Place
from ckpt_client.protocol import Rank
from ckpt_client.wire import Position, Who

Save = Callable[[Path, int], files.Paths]
"""An own save: `save(directory, step)` writes there, or writes where it always did and returns the path or paths."""

Load = Callable[[Path], object]
"""An own load: `load(directory)` gets a committed checkpoint."""


class Hook:
    """Tells the supervisor where training is. Made by `attach()`."""

    __slots__ = ("_attachment", "_place", "_rank")

    def __init__(self, rank: Rank, attachment: Attachment | None) -> None:
        self._rank = rank
        self._place = Place(rank)
        self._attachment = attachment

    def step(self, n: int) -> None:
        """Step `n` is finished: a number of your own that rises, the same on all ranks.

        When a checkpoint is wanted your `save` is called from here; when the job has to leave, Preempted is raised from here.
        """
        rank = self._rank
        rank.entered = n
        if rank.hold > rank.done or n >= rank.due:
            self._stop(n)

    def phase(self, name: str, *, alone: bool = False) -> Phase:
        """A phase between two steps, such as an evaluation: `with hook.phase("eval"):`, after `step`, with safe points inside.

        `alone=True` if only some ranks enter it.
        """
        entered = self._rank.entered
        n = self._place.n if isinstance(entered, Position) else int(entered)
        return Phase(name, self._place, self._attachment, Stay(n, alone, last=False))

    def safe_point(self) -> None:
        """A point inside a phase where a checkpoint may be taken. Outside a phase it does nothing."""
        stop_if_asked(self._place.safe_point(), self._attachment)

    def close(self) -> None:
        """Training is over; calls after this one do nothing."""
        attachment, self._attachment = self._attachment, None
        self._rank = idle_rank()
        self._place = Place(self._rank)
        if attachment is not None:
            attachment.finish()

    def _stop(self, n: int) -> None:
        if self._attachment is not None:
            self._attachment.boundary(self._place.at(int(n)))


def attach(save: Save, load: Load | None = None, *, sharded: bool = False) -> Hook:
    """Attach this process to its supervisor; without one the hook does nothing and costs nothing.

    `save(directory, step)` is called by `hook.step` when a checkpoint is wanted. `load(directory)` is called here and now if
    there is one to resume from; without it, see `resume()`. `sharded`: the state is spread over the ranks, so that no rank
    can save alone.
    """
    met = meet(Wish(lambda who: own_saver(save, who), start=None, sharded=sharded))
    if load is not None and met.resume_from:
        load(Path(met.resume_from))
    return Hook(idle_rank() if met.attachment is None else met.attachment.rank, met.attachment)


def resume() -> str | None:
    """The checkpoint that this run continues from, None on a fresh start."""
    met = meeting.held()
    path = os.environ.get("CKPT_SUPERVISE_RESUME_FROM", "") if met is None else met.resume_from
    return path or None


def meet(wish: Wish) -> Meeting:
    """Meet the supervisor that this process's environment names."""
    return meeting.meet(os.environ, wish)


def own_saver(save: Save, who: Identity) -> Saver:
    """A Saver that calls the user's own function."""

    def saver(order: wire.SaveAt) -> tuple[wire.SavedFile, ...]:
        directory = Path(order.directory)
        returned = save(directory, order.at.n)
        return files.collect(returned, directory, whole=who.world_size == 1, durable=order.then == "leave")

    return saver


def idle_rank() -> Rank:
    """A rank that nobody asks anything."""
    return Rank(Who(0, 0, os.getpid()), 0)
