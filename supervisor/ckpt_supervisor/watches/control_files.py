"""The files by which a job's owner asks its supervisor for something: DIR/control/<nonce>.json and what lies beside it.

Owns their names, their form, and how they change hands: `ckptctl save` puts a request there under its name in one step, and
whoever renames it has it. The supervisor that takes it obeys it, the owner who takes it back knows that nobody will: so each is
obeyed once, also when the supervisor ends in between. Must not decide what a request leads to. Anybody may have written what lies
there: only a plain file of the supervisor's own user counts, links are not followed, nothing large is read. Every function may
block.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from ckpt_supervisor.store import CONTROL
from ckpt_supervisor.store.durable import sync_directory, write_file
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, kind_of, open_regular, read_up_to

FORMAT = 1

FILE_BYTES_MAX = 4_096
"""A request has some 300 bytes."""

NAMES_MAX = 200
"""So many requests are looked at each time; only the owner can make more."""

LISTED_MAX = 10_000

OLD_S = 86_400
"""An answer that nobody has fetched for so long goes, and so does what was never finished."""

TEXT_CHARS_MAX = 200

What = Literal["save", "leave", "every"]

_NAME = re.compile(r"([0-9a-f]{32})\.(json|taken|answer|new)")


class Request(msgspec.Struct, frozen=True):
    """What somebody asks for. It is for one start only, which `epoch` names: a later one does not obey it.

    `leave`: save, then leave; `requeue`: and have the job put back into the queue. `protect`: as `ckptctl keep` does, once it is
    committed. `every`: `every_ms` is the interval from now on, None for `auto`.
    """

    nonce: str
    job: str
    step_id: str
    attempt: int
    epoch: int
    what: What
    who: str
    host: str
    at: str
    protect: bool = False
    requeue: bool = False
    every_ms: int | None = None
    waits: bool = True
    """The one who asks stays for the last word; without that the first one is all that is told."""
    format: int = FORMAT


class Answer(msgspec.Struct, frozen=True):
    """What became of a request so far. `taken` is not the last word, the others are."""

    nonce: str
    result: Literal["taken", "saved", "done", "refused"]
    step: int = -1
    path: str = ""
    reason: str = ""
    format: int = FORMAT


class Refused(msgspec.Struct, frozen=True):
    """Something that lay there and is not obeyed."""

    name: str
    reason: str
    removed: bool


class Found(msgspec.Struct, frozen=True):
    """What one look has come to: requests that are taken now, in the order of their times, and what was refused."""

    taken: tuple[Request, ...] = ()
    refused: tuple[Refused, ...] = ()


class Place(msgspec.Struct, frozen=True):
    """The start that looks: only what is meant for it is obeyed."""

    root: Path
    job: str
    step_id: str
    epoch: int
    uid: int

    @property
    def path(self) -> Path:
        """The directory of the requests."""
        return self.root / CONTROL


class NotOurs(Exception):
    """The directory of the requests cannot be used; the message says why."""


def new_nonce() -> str:
    """A name that nobody has."""
    return os.urandom(16).hex()


def make_place(root: Path, uid: int) -> Path:
    """DIR/control, for its owner alone. Raises NotOurs if it is somebody else's or no directory, OSError."""
    path = root / CONTROL
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    seen = path.lstat()
    if not stat.S_ISDIR(seen.st_mode):
        raise NotOurs(f"{path} is {kind_of(seen.st_mode)}")
    if seen.st_uid != uid:
        raise NotOurs(f"{path} belongs to user {seen.st_uid}")
    if seen.st_mode & 0o022:
        path.chmod(0o700)  # Others could take requests away, or bring old ones back.
    return path


@contextlib.contextmanager
def _held(root: Path) -> Iterator[Path]:
    """DIR/control as it is now, by a path that leads there whatever is done to its name meanwhile. Raises NotOurs, OSError.

    Who may write to DIR, a group say, may put another directory there, or a link to one of ours, whose files would be refused and
    removed for no requests.
    """
    path = root / CONTROL
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(fd)
        if seen.st_uid != os.geteuid():
            raise NotOurs(f"{path} belongs to user {seen.st_uid}")
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def post(root: Path, request: Request) -> None:
    """Ask: the file is there whole or not at all. Raises NotOurs, OSError."""
    with _held(root) as path:
        fresh = path / f"{request.nonce}.new"
        try:
            write_file(fresh, msgspec.json.encode(request) + b"\n", exclusive=True)
            fresh.rename(fresh.with_suffix(".json"))
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise


def withdraw(root: Path, nonce: str) -> bool:
    """Take a request back; False if somebody has taken it. Raises OSError."""
    asked = root / CONTROL / f"{nonce}.json"
    gone = asked.with_suffix(".new")
    try:
        asked.rename(gone)
    except FileNotFoundError:
        return False
    gone.unlink(missing_ok=True)
    return True


def answer(root: Path, word: Answer) -> str:
    """Say what has become of a request; what went wrong, "" if nothing. The last word ends its being taken."""
    try:
        with _held(root) as path:
            _write_answer(path, word)
    except (NotOurs, OSError) as error:
        return str(error)
    return ""


def _write_answer(path: Path, word: Answer) -> None:
    """Raises OSError."""
    final = path / f"{word.nonce}.answer"
    fresh = final.with_suffix(".new")
    write_file(fresh, msgspec.json.encode(word) + b"\n")
    fresh.rename(final)
    if word.result != "taken":
        final.with_suffix(".taken").unlink(missing_ok=True)


def close(root: Path, nonce: str) -> str:
    """A request is done, and nobody waits for its last word; what went wrong, "" if nothing."""
    try:
        with _held(root) as path:
            (path / f"{nonce}.taken").unlink(missing_ok=True)
    except (NotOurs, OSError) as error:
        return str(error)
    return ""


def read_answer(root: Path, nonce: str) -> Answer | None:
    """What the supervisor has said so far, None for nothing yet. Raises OSError.

    Listed first, and not asked for by its name: that it is not there NFS may say from a cache, for half a minute.
    """
    path = root / CONTROL / f"{nonce}.answer"
    try:
        with os.scandir(path.parent) as entries:
            if all(entry.name != path.name for entry in islice(entries, LISTED_MAX)):
                return None
        data = _read(path, os.geteuid())
    except (NotRegular, _Unfit):
        return None
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise
    try:
        return msgspec.json.decode(data, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def forget(root: Path, nonce: str) -> None:
    """The answer was read."""
    with contextlib.suppress(OSError):
        (root / CONTROL / f"{nonce}.answer").unlink(missing_ok=True)


def look(place: Place) -> Found:
    """Take what is meant for this start; refuse the rest, and remove it where that can be done. Raises NotOurs, OSError.

    The directory is listed, not asked for its time: on NFS opendir(3) asks the server, while stat(2) may be answered from a cache
    that is up to a minute old (nfs(5), acdirmax and cto).
    """
    taken: list[Request] = []
    refused: list[Refused] = []
    with _held(place.root) as held:
        with os.scandir(held) as entries:
            names = [entry.name for entry in islice(entries, LISTED_MAX) if entry.name.endswith(".json")]
        for name in sorted(names)[:NAMES_MAX]:
            found = _one(place, held, name)
            if isinstance(found, Request):
                taken.append(found)
            elif found is not None:
                refused.append(found)
    if taken:
        sync_directory(place.path)  # A power cut must not bring back what is obeyed now.
    return Found(tuple(sorted(taken, key=lambda request: request.at)), tuple(refused))


def tidy(place: Place) -> tuple[str, ...]:
    """At a start: what an earlier one had taken and not finished gets its last word, and what is old goes.

    Raises NotOurs, OSError.
    """
    lost = []
    with _held(place.root) as held:
        with os.scandir(held) as entries:
            names = [entry.name for entry in islice(entries, LISTED_MAX)]
        for name in sorted(names):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            if match[2] == "taken":
                lost.append(match[1])
                _answer_if_possible(held, match[1], "the supervisor that had taken it ended before it was done")
            elif match[2] in ("answer", "new"):
                _remove_if_old(held / name)
    return tuple(lost)


def _answer_if_possible(held: Path, nonce: str, reason: str) -> None:
    with contextlib.suppress(OSError):
        _write_answer(held, Answer(nonce, "refused", reason=reason))


def _remove_if_old(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.lstat().st_mtime < time.time() - OLD_S:
            path.unlink()


class _Unfit(Exception):
    """This is no request that may be obeyed; the message ends the sentence "it ..."."""


def _one(place: Place, held: Path, name: str) -> Request | Refused | None:
    """One name: the request, now taken; or why not. None if it is gone again."""
    path = held / name
    nonce = ""
    try:
        match = _NAME.fullmatch(name)
        if match is None:
            raise _Unfit("has no name of a request")
        nonce = match[1]
        request = _decoded(_read(path, place.uid), nonce)
        _check_meant(place, request)
        path.rename(path.with_suffix(".taken"))
    except FileNotFoundError:
        return None
    except (NotRegular, _Unfit) as error:
        removed = _removed(path)
        if nonce and removed:
            _answer_if_possible(held, nonce, str(error))
        return Refused(name[:TEXT_CHARS_MAX], str(error), removed)
    except OSError as error:
        return Refused(name[:TEXT_CHARS_MAX], f"cannot be read: {error.strerror or error}", removed=False)
    return request


def _removed(path: Path) -> bool:
    """Whether it could be taken out of the way; of a directory only an empty one."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _read(path: Path, uid: int | None) -> bytes:
    """Raises NotRegular, _Unfit, OSError."""
    fd = open_regular(path)
    try:
        seen = os.fstat(fd)
        if uid is not None and seen.st_uid != uid:
            raise _Unfit(f"belongs to user {seen.st_uid}, and only the owner of the job may ask")
        if seen.st_nlink > 1:
            raise _Unfit("has another name, too")
        if seen.st_size > FILE_BYTES_MAX:
            raise _Unfit(f"has {seen.st_size} bytes")
        return read_up_to(fd, FILE_BYTES_MAX)
    finally:
        os.close(fd)


def _decoded(data: bytes, nonce: str) -> Request:
    try:
        request = msgspec.json.decode(data, type=Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Unfit(f"cannot be read: {error}"[:TEXT_CHARS_MAX]) from error
    if request.format != FORMAT:
        raise _Unfit(f"has format {request.format}; this supervisor knows {FORMAT}")
    if request.nonce != nonce:
        raise _Unfit("is a copy of another one")
    if request.every_ms is not None and not 0 < request.every_ms < 366 * 86_400_000:
        raise _Unfit(f"asks for an interval of {request.every_ms} ms")
    if any(len(text) > TEXT_CHARS_MAX for text in (request.who, request.host, request.at)):
        raise _Unfit("holds a text that is too long")
    return request


def _check_meant(place: Place, request: Request) -> None:
    """A request that came too late for its attempt must not disturb the next one. Raises _Unfit."""
    if (request.job, request.step_id) != (place.job, place.step_id):
        meant = f"job {request.job[:TEXT_CHARS_MAX]} step {request.step_id[:TEXT_CHARS_MAX]}"
        raise _Unfit(f"is for {meant}; here is job {place.job} step {place.step_id}")
    if request.epoch != place.epoch:
        meant = f"epoch {request.epoch}, attempt {request.attempt}"
        raise _Unfit(f"is for another start ({meant}); here is epoch {place.epoch}")
