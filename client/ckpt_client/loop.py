"""`steps()`: the training loop as one line, which resumes, saves on request and periodically, and ends when told to.

Owns the indices and their boundaries. Must not save or wait itself. Without a supervisor it is a plain `range`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_client.attachment import Attachment
from ckpt_client.channel import tell
from ckpt_client.hook import Load, Save, idle_rank, meet, own_saver
from ckpt_client.identity import Identity
from ckpt_client.meeting import Meeting, Wish
from ckpt_client.phase import Phase, Stay, stop_if_asked
from ckpt_client.place import Place

if TYPE_CHECKING:
    from ckpt_client.torch_state import Stateful, TorchState


class Loop:
    """What `steps()` returns: iterate over it once. `start` is the first index, after resuming."""

    def __init__(self, start: int, stop: int, attachment: Attachment | None, restore: Callable[[], None] | None) -> None:
        self.start = start
        self.stop = stop
        self._attachment = attachment
        self._restore = restore
        self._place = Place(idle_rank() if attachment is None else attachment.rank)
        self._index = start - 1

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)

    def __iter__(self) -> Iterator[int]:
        attachment, restore = self._attachment, self._restore
        if attachment is not None:
            return self._supervised(attachment, restore)
        if restore is not None:
            return self._resumed(restore)
        return self._plain()

    def phase(self, name: str, *, alone: bool = False, before: bool = False) -> Phase:
        """A phase between two steps, such as an evaluation: `with loop.phase("eval"):`, with safe points inside.

        Entering it says that the step of this iteration is finished, unless `before=True`. `alone=True` if only some ranks
        enter it.
        """
        n = max(self._index + (0 if before else 1), self._place.n, self.start)
        return Phase(name, self._place, self._attachment, Stay(n, alone, last=n >= self.stop))

    def safe_point(self) -> None:
        """A point inside a phase where a checkpoint may be taken. Outside a phase it does nothing."""
        stop_if_asked(self._place.safe_point(), self._attachment)

    def _plain(self) -> Iterator[int]:
        for n in range(self.start, self.stop):
            self._index = n
            yield n

    def _resumed(self, restore: Callable[[], None]) -> Iterator[int]:
        self._restore = None
        restore()
        yield from self._plain()

    def _supervised(self, attachment: Attachment, restore: Callable[[], None] | None) -> Iterator[int]:
        rank, place = attachment.rank, self._place
        try:
            # Last of all, so that nothing draws a random number between here and the first index.
            if restore is not None:
                restore()
            for n in range(self.start, self.stop):
                self._index = n
                rank.entered = n
                if rank.hold > rank.done or n >= rank.due:
                    attachment.boundary(place.at(n))
                yield n
            # The end is a boundary that leaves `entered` where it is (rule 9).
            self._index = max(self.start, self.stop)
            rank.entered = here = place.at(self._index)
            stop_if_asked(here, attachment)
        finally:
            self._attachment = None
            self._restore = None
            attachment.finish()


def steps(stop: int, start: int = 0, *, save: Save | None = None, load: Load | None = None, **state: Stateful) -> Loop:
    """Indices from `start` to `stop`, like `range`, from where the last checkpoint was.

    `state`: what is saved and restored, anything with `state_dict` and `load_state_dict`, as in
    `steps(1000, model=model, optimizer=optimizer)`. Or `save(directory, step)` and `load(directory)`, functions of your own.
    State may be sharded (FSDP2, DTensor) if all ranks call this. Raises TypeError for an optimizer of sharded parameters whose
    module is not passed.
    """
    if state:
        if save is not None or load is not None:
            raise TypeError("steps() takes either save= and load=, or objects with state, not both")
        return _with_state(stop, start, state)
    if save is None or load is None:
        raise TypeError("steps() needs something to save: objects such as model=model, or both save= and load=")
    own_save = save
    met = meet(Wish(lambda who: own_saver(own_save, who), start=start, sharded=False))
    if met.resume_from:
        load(Path(met.resume_from))
        start = met.resume_step
        _told_if_over(met, stop)
    return Loop(start, stop, met.attachment, None)


def _told_if_over(met: Meeting, stop: int) -> None:
    """A loop that ends at once, with success, looks like one that has trained."""
    if met.resume_step >= stop and met.identity.rank == 0:
        tell(f"going on from step {met.resume_step}, and steps() is to end at {stop}: there is nothing left to do")


def _with_state(stop: int, start: int, state: dict[str, Stateful]) -> Loop:
    for name, thing in state.items():
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise TypeError(f"steps(): {name}={type(thing).__name__} has no state_dict and load_state_dict")
    made: list[TorchState] = []

    def state_of(who: Identity) -> TorchState:
        if not made:
            from ckpt_client.torch_state import TorchState

            made.append(TorchState(state, who))
        return made[0]

    def needs_all(who: Identity) -> bool:
        """No rank can save alone: state in pieces, or, without torch.distributed to say that it is the same, each rank's own."""
        return state_of(who).sharded or (who.world_size > 1 and not who.distributed)

    met = meet(Wish(lambda who: state_of(who).save, start=start, sharded=needs_all))
    if not met.resume_from:
        return Loop(start, stop, met.attachment, None)
    _told_if_over(met, stop)
    kept = state_of(met.identity)
    kept.load(Path(met.resume_from), met.resume_step)
    return Loop(met.resume_step, stop, met.attachment, kept.restore_random)
