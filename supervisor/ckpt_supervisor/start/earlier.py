"""What earlier starts in a checkpoint directory came to, as their journals tell it.

Owns the reading of old journals for decisions: what kept the attempt before from saving, and from which checkpoints training
failed without getting any further (history.py asks more of them). Must not decide anything. Reads the head and the tail of the
newest few journals of task 0; a journal that cannot be read says nothing, and what is not written down did not happen as far as
this module knows.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.core.policy import EXIT_INTERRUPTED, Cause
from ckpt_supervisor.core.state import Kind

NAME_PARTS = 5
"""A journal's name is <job>-<attempt>-<step_id>-<epoch>-<task>."""

HEAD_BYTES = 65_536
TAIL_BYTES = 262_144
"""How much of an earlier start's journal is read."""

STARTS_BACK_MAX = 50
"""So many journals are looked into, the newest ones."""

AT_ONCE_MS = 600_000
"""A command that fails within this, with no word of the step that it had come to, is taken to have failed while it resumed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start of the command, and what the journal shows of it."""

    epoch: int
    resume_step: int
    attached: bool = False
    """A rank had been told what to resume from."""
    reached: int = -1
    """The highest number of finished steps that anything tells of; -1 if nothing does."""
    committed: frozenset[int] = frozenset()
    noticed: bool = False
    by_itself: bool = False
    """Training failed by itself, and the job was to be requeued for that."""
    code: int | None = None
    """Of the command, None if it is not known to have ended."""
    reason: str = ""
    """What a rank said when it died."""
    lasted_ms: int | None = None
    """From the start, or from the last rank's attaching, to the end."""
    is_whole: bool = True
    """Nothing of its journal was left out."""

    @property
    def got_further(self) -> bool:
        """It did at least one step, or came to a good end."""
        return self.reached > self.resume_step or self.code == 0 or not self.is_whole

    @property
    def failed_at_once(self) -> bool:
        """It failed by itself, and nothing shows that it got beyond what it had resumed from."""
        if self.code in (None, 0) or self.noticed or self.got_further:
            return False
        return self.reached >= 0 or (self.lasted_ms is not None and self.lasted_ms <= AT_ONCE_MS)


def last_failure(directory: Path, job: str, epoch: int) -> str:
    """What kept the attempt before this one from saving, from its journal; "" if it saved, or if nothing can be read.

    A save that needs more time than a notice gives is told at the next start, with both numbers, not only in an unread log.
    """
    path = next((path for number, name, path in journals(directory) if number < epoch and name == job), None)
    if path is None:
        return ""
    notice, had, failure, began_ms = "", "", "", None
    for line in _tail(path):
        at_ms, left_ms = line.get("mono_ms"), line.get("save_left_ms")
        match line.get("event"):
            case "notice":
                notice = str(line.get("cause"))
                if isinstance(left_ms, int) and isinstance(at_ms, int) and began_ms is not None:
                    # What was known at the signal was a guess; the look that follows it tells the real time.
                    had = f"; it had {(at_ms - began_ms + left_ms) / 1000:.1f} s for the save"
            case "round_begun" | "round_turned" if line.get("kind") == Kind.LEAVE.value:
                began_ms = at_ms if isinstance(at_ms, int) else None
                had = f"; it had {left_ms / 1000:.1f} s for the save" if isinstance(left_ms, int) else ""
            case "round_given_up":
                began_ms = None
            case "leaving" if line.get("outcome") == "stale":
                more = f"{had}; give it more (--lead, sbatch --signal), or save by time as well (--every)" if had else ""
                failure = f"the attempt before this one could not save ({notice}): {line.get('reason')}{more}"
                if notice == Cause.CRASHED.value:
                    failure = f"in the attempt before this one {line.get('reason')}"
            case "exit" if line.get("code") in (0, EXIT_INTERRUPTED):
                failure = ""  # Training came to its end all the same, or a late commit came through.
    return failure


def starts(directory: Path, epoch: int) -> Iterator[Start]:
    """The starts of the command in this directory up to this epoch, its own earlier ones too, newest first; read as needed."""
    looked = 0
    for number, _, path in journals(directory):
        if number > epoch:
            continue
        if looked >= STARTS_BACK_MAX:
            return
        looked += 1
        try:
            lines, is_whole = read(path)
        except OSError:
            continue
        yield from reversed(_starts(lines, number, is_whole))


def failed_from(earlier: Iterable[Start], epoch: int, step: int, tries: int, answered: int = -1) -> tuple[Start, ...]:
    """The last starts that resumed from this checkpoint, newest first, if so many in a row failed without getting any further.

    `answered`: failures up to this epoch do not count; the checkpoint was set aside for them, and somebody has put it back.
    """
    failed: list[Start] = []
    for start in earlier:
        if step in start.committed or start.epoch <= answered:
            break
        if start.resume_step != step:
            continue
        # Without a rank that had attached it may be a slip in the command, which somebody mends between two starts.
        if start.failed_at_once and (start.attached or start.epoch == epoch):
            failed.append(start)
            if len(failed) >= tries:
                return tuple(failed)
        elif start.got_further:
            break
    return ()


def journals(directory: Path) -> list[tuple[int, str, Path]]:
    """Task 0's journals as (epoch, job, path), newest epoch first: the other tasks' decide nothing."""
    found = []
    try:
        names = store.list_names(directory / store.JOURNAL)
    except OSError:
        return []
    for name in names:
        parts = name.removesuffix(".jsonl").rsplit("-", NAME_PARTS - 1)
        if name.endswith(".jsonl") and len(parts) == NAME_PARTS and parts[4] == "0" and parts[3].isdecimal():
            found.append((int(parts[3]), parts[0], directory / store.JOURNAL / name))
    return sorted(found, reverse=True)


def _tail(path: Path) -> list[dict[str, Any]]:
    try:
        with _opened(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return list(_decoded(file.read(TAIL_BYTES)))
    except OSError:
        return []


def read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Head and tail of a journal, and whether that is all of it. Raises OSError."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        rest = max(len(head), size - TAIL_BYTES)
        file.seek(rest)
        tail = file.read(TAIL_BYTES)
    is_whole = rest == len(head)
    return list(_decoded(head + tail if is_whole else head + b"\n" + tail)), is_whole


def _opened(path: Path) -> BinaryIO:
    """A regular file; a pipe, or a link to something that never answers, would hold the start up. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _decoded(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        if line.startswith(b"{") and line.endswith(b"}"):
            try:
                found = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def _starts(lines: list[dict[str, Any]], epoch: int, is_whole: bool) -> list[Start]:
    """The starts that one journal tells of, oldest first. What was left out of it may have shown anything."""
    found: list[Start] = []
    since_ms: int | None = None
    for line in lines:
        at_ms = line.get("mono_ms")
        if line.get("event") == "command_started":
            step = line.get("resume_step")
            found.append(Start(epoch, step if isinstance(step, int) else -1, is_whole=is_whole))
            since_ms = at_ms if isinstance(at_ms, int) else None
        elif found:
            if line.get("event") == "rank_hello" and isinstance(at_ms, int):
                since_ms = at_ms
            found[-1] = _with(found[-1], line, since_ms)
    return found


def _with(start: Start, line: dict[str, Any], since_ms: int | None) -> Start:
    """The start with what one line says of it."""
    at_ms, step = line.get("mono_ms"), line.get("step")
    match line.get("event"):
        case "rank_hello":
            return dataclasses.replace(start, attached=True)
        case "notice" | "leaving":
            # The notice that training's own failure brings about, for a requeue, takes nothing from that failure.
            by_itself = start.by_itself or line.get("cause") == Cause.CRASHED.value
            return dataclasses.replace(start, noticed=start.noticed or not by_itself, by_itself=by_itself)
        case "rank_agreed":
            # Where it will be at its next boundary: one step more than it has finished.
            match line.get("entered"):
                case [int(n), int()]:
                    return dataclasses.replace(start, reached=max(start.reached, n - 1))
                case _:
                    pass
        case "rank_failed" if "round" not in line:
            reached = step if isinstance(step, int) else -1
            reason = start.reason or str(line.get("reason") or "")
            return dataclasses.replace(start, reached=max(start.reached, reached), reason=reason)
        case "commit" if isinstance(step, int) and line.get("result") == "committed":
            return dataclasses.replace(start, committed=start.committed | {step}, reached=max(start.reached, step))
        case "progress" if isinstance(step, int):
            # All that there is where a rank was killed: it has no last word, and it may have trained for long since a save.
            return dataclasses.replace(start, reached=max(start.reached, step))
        case "commit" if isinstance(step, int) and line.get("result") == "already there":
            return dataclasses.replace(start, reached=max(start.reached, step))
        case "adopted":
            match line.get("steps"):
                case [*steps] if steps and all(isinstance(one, int) for one in steps):
                    return dataclasses.replace(start, committed=start.committed | {*steps}, reached=max(start.reached, *steps))
                case _:
                    pass
        case "command_exited" if isinstance(line.get("code"), int):
            code = line["code"] if start.code in (None, 0) else start.code
            lasted_ms = at_ms - since_ms if isinstance(at_ms, int) and since_ms is not None else None
            return dataclasses.replace(start, code=code, lasted_ms=lasted_ms)
        case _:
            pass
    return start
