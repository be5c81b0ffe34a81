"""Looks for what the program itself has written (--adopt) and makes checkpoints of it.

Owns what is remembered from one look to the next. Runs in one lane. While the program runs, an item counts only when two looks
have seen it unchanged; what is found damaged then may only be unfinished, and is looked at again when it has changed. When
whoever wrote has ended (`final`), one look is enough, and the newest damaged one is told. Raises nothing that a disk can cause.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ckpt_supervisor import store
from ckpt_supervisor.config import Options

if TYPE_CHECKING:
    from ckpt_supervisor.start.startup import Job

DAMAGED = frozenset({store.Verdict.MISSING, store.Verdict.TRUNCATED, store.Verdict.CORRUPT, store.Verdict.MIXED})
"""Something is wrong with the files. A link, or what could not be looked at, is not taken, and may be good."""

SETTLE_S = 3.0
"""A damaged file that does not change for so long is not being written."""

STATES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".npz", ".json", ".metadata")
"""Names of files that a state is made of. Others, logs of a tracker for one, come and go."""

REMEMBERED_MAX = 1_000
"""Items whose state is remembered between looks; the newest ones."""

DAMAGED_MAX = 20
"""So many that cannot be taken, beyond as many as are kept, do not hide older ones that can."""

AGAIN_LOOKS = 6
"""What could not be read or copied, on a full disk for instance, is tried again in every so many looks: each try of a large one
fills the disk once more, which training needs too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Steps that are checkpoints now and were none before; why the newest item is none ("" if it is one, or if there is none);
    lines for the user."""

    steps: tuple[int, ...] = ()
    problem: str = ""
    lines: tuple[str, ...] = ()
    fresh: bool = True
    """The newest of the steps was not there yet at the mark, or has changed since."""
    again: int = -1
    """The newest item's step, if that was a checkpoint already and the program has written it once more since the mark."""


class Adoption:
    """What is known of the program's own files. `tell` is told before a copy begins."""

    def __init__(self, options: Options, job: Job, epoch: int, tell: Callable[[str], None]) -> None:
        self.damaged: frozenset[int] = frozenset()
        """Steps whose checkpoints were read in full and are not whole: what the program has of them is taken once more."""
        self._options = options
        self._job = job
        self._epoch = epoch
        self._tell = tell
        self._seen: dict[int, store.Signature] = {}
        self._refused: dict[int, tuple[store.Signature, str, bool]] = {}
        """By step: as it was, why not, and whether the files themselves are wrong."""
        self._kept: dict[int, store.Signature] = {}
        """By step: as it was when it was copied."""
        self._known: dict[int, object] | None = None
        """By step: what a glance showed at the first look."""
        self._tries = 0
        self._looks = 0
        self._told: set[tuple[int, str]] = set()
        self._marked: dict[int, store.Signature] = {}
        self._had_it = False

    def mark(self) -> None:
        """Note what is there before the program saves at a signal. In a lane of its own: a copy may be under way."""
        marked: dict[int, store.Signature] = {}
        try:
            for item in store.find(self._options.dir, self._options.adopt)[0][: self._options.keep]:
                marked[item.step] = store.signature(item)
        except (OSError, store.Refused):
            return
        self._marked = marked

    def forget_mark(self) -> None:
        """The program may have saved before the mark was taken, also one that is still being taken: nothing is known to be older
        than the signal."""
        self._had_it = True

    def look(self, *, final: bool, hurries: Callable[[], bool] = lambda: False) -> Found:
        """One look. Newest first: when time is short (`hurries`) that one counts, and the others wait."""
        self._looks += 1
        try:
            items, incomplete = store.find(self._options.dir, self._options.adopt)
            held = _held(self._options, surveyed=final) - self.damaged
        except OSError as error:
            problem = f"could not look for what the program wrote: {error}"
            self._tell_once(-2, problem)
            return Found(problem=problem)
        steps: list[int] = []
        problem, again = "", -1
        for item, older in self._candidates(items, held):
            if len(steps) >= self._options.keep or (steps and hurries()):
                break
            is_held = item.step in held
            reason = self._take(item, older, final=final, replaces=is_held)
            if not reason:
                steps.append(item.step)
                again = max(again, item.step) if is_held and not problem and self._is_since_mark(item) else again
            elif not problem and not steps and not is_held:
                problem = f"{item.paths[0].name}: {reason}"
        if len(steps) > 1:
            store.update_latest(self._options.dir)  # The newest was committed first.
        if not problem and not steps and incomplete and incomplete[0].step > max(held, default=-1):
            problem = f"step {incomplete[0].step}: {incomplete[0].reason}"
        self._forget({item.step for item in items[:REMEMBERED_MAX]})
        if self._known is None:
            self._known = {item.step: _glance(item) for item in items}
        newest = next((item for item in items if steps and item.step == max(steps)), None)
        fresh = newest is None or self._is_since_mark(newest)
        return Found(tuple(sorted(steps)), store.one_line(problem), fresh=fresh, again=again)

    def _candidates(self, items: list[store.Item], held: frozenset[int]) -> list[tuple[store.Item, store.Item | None]]:
        """What is to be looked at, each with the next older one: what is newer than all that is held, what was written since the
        first look although newer ones are held (training that goes on from an older step), and what was written once more.

        Older ones that were there before are not taken, or those that --keep has let go would come back.
        """
        chosen: list[tuple[store.Item, store.Item | None]] = []
        is_below = False
        for place, item in enumerate(items):
            is_below = is_below or item.step in held
            is_new = self._known is not None and self._known.get(item.step) != _glance(item)
            is_ours = item.step in held or item.step in self._kept
            again = is_ours and place < self._options.keep + DAMAGED_MAX and self._was_written_again(item)
            if again or (not is_ours and (is_new or not is_below)):
                chosen.append((item, items[place + 1] if place + 1 < len(items) else None))
            if len(chosen) >= self._options.keep + DAMAGED_MAX:
                break
        return chosen

    def _was_written_again(self, item: store.Item) -> bool:
        """Whether the copy is not what the program has any more: a save that paused for long and went on, one in place, or the
        same step saved at the signal. One that lost files is being deleted."""
        if item.step in self._kept:
            return not self._is_as_in(self._kept, item) and self._holds_all_of_the_copy(item)
        return self._holds_all_of_the_copy(item, and_differs=True)

    def _holds_all_of_the_copy(self, item: store.Item, *, and_differs: bool = False) -> bool:
        try:
            manifest = store.read_manifest(self._options.dir / store.step_name(item.step))
            sizes = store.sizes_of(item)
        except (OSError, store.Refused, store.ManifestError):
            return False
        copied = {file.path: file.bytes for file in manifest.files}
        return bool(manifest.adopted) and copied.keys() <= sizes.keys() and (not and_differs or copied != sizes)

    def _is_since_mark(self, item: store.Item) -> bool:
        return self._had_it or not self._is_as_in(self._marked, item)

    def _is_as_in(self, known: dict[int, store.Signature], item: store.Item) -> bool:
        try:
            return item.step in known and store.signature(item) == known[item.step]
        except (OSError, store.Refused):
            return False

    def first_look(self) -> Found:
        """At the start, before anything is chosen: nobody writes. Damaged ones that are newer than what stands are put aside.

        A program that looks for its newest file by itself would take them (field cases 67 to 69). A file that goes with every
        step stays where it is: without its tracker a program takes the directory for a new one.
        """
        found = self.look(final=True)
        lines: list[str] = []
        try:
            items, _ = store.find(self._options.dir, self._options.adopt)
            newest = max((*_held(self._options, surveyed=True), -1))
        except OSError:
            return found
        wrong = {item.step: self._refused[item.step] for item in items if item.step in self._refused}
        damaged = [item for item in items if item.step > newest and item.step in wrong and wrong[item.step][2]]
        if damaged:
            threading.Event().wait(SETTLE_S)  # After a node failure the program of the attempt before may live, and write.
        for item in damaged:
            known = wrong[item.step]
            if not self._is_as_in({item.step: known[0]}, item):
                lines.append(f"{store.one_line(item.paths[0].name)} is still being written, by whoever it is: left as it is")
                continue
            for pattern, path in zip(self._options.adopt, item.paths, strict=True):
                if path.name == pattern.rsplit("/", 1)[-1]:
                    continue
                problem = store.put_aside(path)
                said = f"could not be put aside ({problem})" if problem else f"put aside as .damaged-{path.name}"
                lines.append(store.one_line(f"{path.name} is not whole ({known[1]}): {said}"))
        return dataclasses.replace(found, lines=tuple(lines))

    def _take(self, item: store.Item, older: store.Item | None, *, final: bool, replaces: bool) -> str:
        """Make a checkpoint of it; why not, "" if it is one. What may still be written is left for the next look."""
        try:
            signature = store.signature(item)
            if not final and self._seen.get(item.step) != signature:
                self._seen[item.step] = signature
                return "it may still be being written"
            refused = self._refused.get(item.step)
            if refused is not None and refused[0] == signature:
                is_due = final or self._looks % AGAIN_LOOKS == 0
                if refused[2] or not is_due:
                    return refused[1]
            return self._judged(item, older, signature, replaces=replaces)
        except FileNotFoundError as error:
            return f"{error.strerror}"  # The program's own clean-up has taken it.
        except store.Refused as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror or error}"

    def _judged(self, item: store.Item, older: store.Item | None, signature: store.Signature, *, replaces: bool) -> str:
        other = store.other_step_named(item)
        if other:
            self._refused[item.step] = (signature, other, False)
            return other
        for path in item.paths:
            report = store.check_foreign(path, "structure")
            if report.verdict is not store.Verdict.INTACT:
                self._refused[item.step] = (signature, report.reason, report.verdict in DAMAGED)
                return report.reason
        lacking = _lacking(_kinds_before(self._options), item)
        # Cut short a save lacks something once; if the one before lacks it too, the program means it so.
        if lacking and (older is None or not lacking <= _lacking(_kinds_before(self._options), older)):
            reason = f"lacks {min(lacking)}, which the one before it had"
            self._refused[item.step] = (signature, reason, False)  # A guess: nothing says that what is there is wrong.
            return reason
        if not store.check_epoch(self._options.dir, self._epoch):
            return self._not_ours(item)
        self._tries += 1
        self._tell(f"step {item.step} was written by the program ({item.paths[0]}); checking and keeping it")
        try:
            how = store.How(self._tries, self._options.verify_mode, replaces)
            outcome, kept = store.adopt(self._options.dir, item, self._meant(item), how)
        except store.Refused as error:
            self._refused[item.step] = (signature, str(error), error.verdict in DAMAGED)
            raise
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._could_not(item, signature, str(error.strerror or error))
            raise
        if kept is not None:
            self._kept[item.step] = signature
            return ""
        match outcome:
            case store.CommitFailed(errno_name=name, reason=reason):
                return self._could_not(item, signature, f"{name}: {reason}")
            case _:
                return self._not_ours(item)

    def _could_not(self, item: store.Item, signature: store.Signature, reason: str) -> str:
        """Nothing is wrong with the item itself. Told once for each, and not tried again at once."""
        self._refused[item.step] = (signature, reason, False)
        self._tell_once(item.step, f"step {item.step} of the program's own could not be kept as a checkpoint: {reason}")
        return reason

    def _not_ours(self, item: store.Item) -> str:
        """Somebody else has taken the directory over, or it is not there any more."""
        reason = store.why_not_ours(self._options.dir)
        self._tell_once(-1, f"step {item.step} of the program's own, and what follows, is not kept as a checkpoint: {reason}")
        return reason

    def _tell_once(self, step: int, line: str) -> None:
        """Each line once for a step; what is true of all steps, a number below 0, once whatever its words."""
        if (step, line if step >= 0 else "") not in self._told:
            self._told.add((step, line if step >= 0 else ""))
            self._tell(line)

    def _meant(self, item: store.Item) -> store.Manifest:
        return store.Manifest(
            step=item.step,
            world_size=1,
            ranks=(0,),
            job=self._job.name,
            attempt=self._job.attempt,
            epoch=self._epoch,
            cause="adopted",
            created_at=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            verified=self._options.verify_mode,
            files=(),
            adopted=store.parts_of(item.paths),
        )

    def _forget(self, steps: set[int]) -> None:
        self._seen = {step: seen for step, seen in self._seen.items() if step in steps}
        self._refused = {step: refused for step, refused in self._refused.items() if step in steps}
        self._kept = {step: kept for step, kept in self._kept.items() if step in steps}
        self._told = {(step, reason) for step, reason in self._told if step in steps or step < 0}


def _held(options: Options, *, surveyed: bool) -> frozenset[int]:
    """Steps that have a committed checkpoint; `surveyed`: without those that a cheap look finds damaged. Raises OSError."""
    if surveyed:
        return frozenset(candidate.step for candidate in store.scan(options.dir) if candidate.problem is None)
    names = (store.parse_step(entry.name) for entry in options.dir.iterdir())
    return frozenset(step for step in names if step is not None)


def _kinds_before(options: Options) -> frozenset[str]:
    """What the newest adopted checkpoint is made of. Raises OSError."""
    for candidate in store.scan(options.dir):
        manifest = candidate.manifest
        if manifest is not None and candidate.problem is None and manifest.adopted:
            return store.kinds(file.path for file in manifest.files)
    return frozenset()


def _lacking(kinds: frozenset[str], item: store.Item) -> frozenset[str]:
    """Which of these kinds of files that a state is made of a directory has not. Raises Refused, OSError."""
    if not any(path.is_dir() for path in item.paths):
        return frozenset()
    return frozenset(kind for kind in kinds - store.names_of(item) if kind.endswith(STATES))


def _glance(item: store.Item) -> object:
    """What tells at little cost whether a part was written since."""
    try:
        return tuple((seen.st_size, seen.st_mtime_ns, seen.st_ino) for seen in map(os.lstat, item.paths))
    except OSError:
        return None
