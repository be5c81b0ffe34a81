"""What is done to the directory beside training: old checkpoints go, leftovers go, and there is room for the next save.

Owns when something is removed: one checkpoint after the other, never while somebody saves, only while this run holds the
directory, and on what was known at that very moment. Must not decide which ones may go: the store does (retention.py). Every
function may block: they run in lanes, return results, and raise nothing that a disk can cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_supervisor import store
from ckpt_supervisor.config import Options
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.text import size_text

REMOVALS_MAX = 100_000
"""Most checkpoints that one call removes; the next one goes on."""

ENOUGH, SHORT, MADE, NONE, UNKNOWN = "enough", "short", "made", "none", "unknown"
"""Room for all that --keep asks for; for the next one at least; only because older ones were removed; not for that; no answer."""

READS_MAX = 10
"""Most times that a commit is read once more because saves ended the one before."""

LISTED_MAX = 5
"""Most names in a line; the journal has them all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spared:
    """What the run knows of single steps. It changes with every commit and every choice."""

    protected: frozenset[int] = frozenset()
    """Never removed: what this attempt resumed from, and its newest commit."""
    damaged: frozenset[int] = frozenset()
    """Read in full and not whole, whatever a look at names and sizes says: they do not count."""
    read: frozenset[int] = frozenset()
    """Read in full by this run and whole."""
    plain: frozenset[int] = frozenset()
    """Committed by this run with files that only the program knows the end of: no client has digested them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, and what could not be."""

    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """What a look at the room has found and done. `state` is one of ENOUGH and so on; `text` says it in one line."""

    state: str
    text: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    removed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Upkeep:
    """The work on one directory. `spared` is asked again before every removal; `pause` waits while somebody saves."""

    options: Options
    epoch: int
    spared: Callable[[], Spared]
    pause: Callable[[], object]
    busy: store.Stop
    """Set while somebody saves."""
    reserve: store.Reserve = store.reserve
    looked: dict[tuple[int, str], bool] = dataclasses.field(default_factory=dict)
    """Commits of this run that were read once more, by step and time: whether they were still what was committed."""

    def prune(self) -> Pruned:
        """Remove what --keep does not keep, the oldest first, each crash-safe."""
        names: list[str] = []
        problems: list[str] = []
        asked: object = None
        going: list[store.Candidate] = []
        try:
            for _ in range(REMOVALS_MAX):
                self.pause()
                now = (self.spared(), store.kept_steps(self.options.dir))
                if now != asked:
                    asked = now
                    going = self._beyond_keep(problems)
                if not going:
                    break
                if not store.check_epoch(self.options.dir, self.epoch):
                    problems.append("another run holds the directory now")
                    break
                removed = store.remove(going.pop(), self.pause)
                names += removed.names
                problems += removed.problems
            if store.check_epoch(self.options.dir, self.epoch):
                past = store.clear_past(self.options.dir, self.options.keep, self._whole(), self.pause)
                names += past.names
                problems += past.problems
        except OSError as error:
            problems.append(str(error))
        return Pruned(tuple(names), tuple(problems))

    def sweep(self) -> Pruned:
        """Remove what earlier epochs left half done."""
        removed = store.sweep(self.options.dir, self.epoch, self.pause, self.spared().read, self.busy)
        return Pruned(removed.names, removed.problems)

    def make_room(self, in_calm: bool = True) -> Space:
        """See whether the next checkpoint will fit, and if not, remove older ones beyond --keep for it.

        Only if it then fits, and never unless a newer one is known to be whole. `in_calm`: wait while somebody saves.
        """
        if in_calm:
            self.pause()
        known = self.spared()
        try:
            whole = self._whole()
            if not whole or whole[0].manifest is None:
                return Space(ENOUGH, "")  # Nobody knows yet how large one is.
            needed = store.needed_for(whole[0].manifest)
            # What is asked for is gone for others meanwhile: not while somebody writes.
            room = store.look_at_room(self.options.dir, needed, None if self.busy.is_set() else self.reserve)
            if room.fits:
                return self.enough_for_all(whole, room)
            going = store.to_make_room(whole, needed - room.usable_bytes, self._stay(), self.options.keep_every)
            why = self._not_proven(whole) if going else self._nothing_to_remove(whole)
            if why:
                return self._none(room, why)
            return self._remove_for(going, room, known)
        except OSError as error:
            return Space(UNKNOWN, f"whether there is room for another checkpoint cannot be said: {error}")

    def _whole(self) -> list[store.Candidate]:
        """Checkpoints that count, newest first."""
        damaged = self.spared().damaged
        found = (one for one in store.scan(self.options.dir) if one.step not in damaged)
        return [one for one in found if one.manifest is not None and one.problem is None]

    def _beyond_keep(self, problems: list[str]) -> list[store.Candidate]:
        """What may go, newest first. What this run committed has to be unchanged before older ones go on the strength of it."""
        keep, every = self.options.keep, self.options.keep_every
        whole = self._whole()
        if store.to_prune(whole, keep, self._stay(), every):
            reasons = {one.step: self._changed(one) for one in whole}
            problems += [f"{store.step_name(step)} does not count: {reason}" for step, reason in reasons.items() if reason]
            whole = [one for one in whole if not reasons[one.step]]
        return list(store.to_prune(whole, keep, self._stay(), every))

    def _changed(self, one: store.Candidate) -> str:
        """Why a commit of this run that nobody's digests speak for is not what was committed, "" if it is.

        A save() that returned early may go on writing (field case 97): such a one is read once more, when a while has passed.
        """
        manifest = one.manifest
        if manifest is None or manifest.verified != "full" or one.step not in self.spared().plain:
            return ""
        key = one.step, manifest.created_at
        for _ in range(READS_MAX):
            if self.looked.get(key, False):
                return ""
            self.pause()
            writer = procfs.writer_in(str(one.path), procfs.descendants())
            if writer is not None:
                return f"process {writer[0]} still writes {store.one_line(writer[1])}"
            if key in self.looked:
                return "it was not what was committed when it was read once more"
            report = store.verify_checkpoint(one.path, "full", stop=self.busy)
            if report.verdict is store.Verdict.INTACT:
                self.looked[key] = True
            elif report.verdict is not store.Verdict.UNKNOWN:
                self.looked[key] = False
                return f"{report.verdict.value}: {report.reason}"
        return "" if self.looked.get(key, False) else "it could not be read once more"

    def _stay(self) -> frozenset[int]:
        return self.spared().protected | store.kept_steps(self.options.dir)

    def enough_for_all(self, whole: Sequence[store.Candidate], room: store.Room) -> Space:
        """The next one fits. Whether as many as --keep asks for do: it takes one more at the peak (field case 109)."""
        keep, there = self.options.keep, min(len(whole), self.options.keep)
        more, size = room.usable_bytes // room.needed_bytes, 0 if whole[0].manifest is None else whole[0].manifest.total_bytes
        some = "checkpoint" if more == 1 else "checkpoints"
        text = f"room for {more} more {some} of {size_text(size)} beside the {there} there"
        if more + there > keep:
            return Space(ENOUGH, f"{text}: as many as --keep {keep} needs", _fields(room))
        return Space(SHORT, f"{text}; --keep {keep} needs {keep + 1} in all: older ones will go sooner", _fields(room))

    def _not_proven(self, whole: list[store.Candidate]) -> str:
        """Why no older one may go: the newest fully verified one has to be whole for certain."""
        newest = next(one for one in whole if one.manifest is not None and one.manifest.verified == "full")
        writer = procfs.writer_in(str(newest.path), procfs.descendants()) if newest.step in self.spared().plain else None
        if writer is not None:
            return f"process {writer[0]} still writes {store.one_line(writer[1])} of {newest.path.name}"
        if newest.step in self.spared().read:
            return ""
        report = store.verify_checkpoint(newest.path, "full", stop=self.busy)
        return "" if report.verdict is store.Verdict.INTACT else f"{newest.path.name} is not known to be whole ({report.reason})"

    def _nothing_to_remove(self, whole: list[store.Candidate]) -> str:
        others = len(whole) - 1
        if not others:
            return f"{whole[0].path.name} is the only checkpoint and stays"
        return f"of the {others} older ones too few may go (resumed from, kept, milestones, or not enough)"

    def _none(self, room: store.Room, why: str) -> Space:
        text = (
            f"no room for the next checkpoint: it needs {size_text(room.needed_bytes)}, there are {_there(room)}, and {why}; "
            "free some space, or the next save will fail"
        )
        return Space(NONE, text, _fields(room))

    def _remove_for(self, going: tuple[store.Candidate, ...], room: store.Room, known: Spared) -> Space:
        names: list[str] = []
        problems: list[str] = []
        for candidate in going:
            if self.spared() != known or not store.check_epoch(self.options.dir, self.epoch):
                break  # What was decided on has changed meanwhile; whoever changed it has this asked again.
            removed = store.remove(candidate)
            names += removed.names
            problems += removed.problems
        if not names:
            return Space(UNKNOWN, "; ".join(problems))
        text = (
            f"no room for the next checkpoint: it needs {size_text(room.needed_bytes)}, there are {_there(room)}; "
            f"removed {', '.join(names[:LISTED_MAX])} beforehand; --keep {self.options.keep} needs more space"
        )
        return Space(MADE, text, {**_fields(room), "problems": problems}, tuple(names))


def _there(room: store.Room) -> str:
    """What there is, and what holds it down. Some file systems call a quota "full", so the error is named."""
    there = size_text(room.usable_bytes)
    return f"{there} of {size_text(room.free_bytes)} ({room.refusal}: a quota)" if room.refusal else there


def _fields(room: store.Room) -> dict[str, Any]:
    return {
        "needed_bytes": room.needed_bytes,
        "free_bytes": room.free_bytes,
        "usable_bytes": room.usable_bytes,
        "refusal": room.refusal,
    }
