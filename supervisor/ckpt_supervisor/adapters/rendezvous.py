"""The file by which the supervisors of a step find its coordinator: DIR/.rendezvous/<job>-<attempt>-<step_id>-<epoch>.json.

Owns that directory. Must not wait, talk to anybody, or follow a link: the loop looks again. The file holds the step's secret key,
so it is this user's alone from its first byte on, and one that others could have read or written is not believed.

The checkpoint directory is what all nodes share, and the only thing known to be. Shared file systems remember for a while what a
name was, or that it was not there (nfs(5), "acdirmax", "lookupcache"); opening a directory and listing it asks the server again,
so each look does that from the top, and ENOENT, ESTALE and EIO mean "not yet".
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import stat
from itertools import islice
from pathlib import Path

import msgspec

from ckpt_supervisor.adapters.invitation import Invitation, addresses

__all__ = ["Found", "Invitation", "NotYet", "Refused", "addresses", "file_name", "find", "publish", "withdraw"]

DIRECTORY = ".rendezvous"
INVITATION_BYTES_MAX = 64 * 1024
NAMES_MAX = 10_000
"""Most names that one look goes through; there is one for each start that was killed, and the next start removes those."""

_PRIVATE = 0o077
"""What group and others may do; nothing of it."""

EPOCHS_MAX = 16
"""So many files of one step are looked at, the highest epochs first."""

_NAME = re.compile(r".*-([0-9]{1,18})\.json(\.new)?", re.DOTALL)
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True, slots=True)
class NotYet:
    """Nothing to be seen so far; looking again may help."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """Something is there and is not to be believed; the reason is half a sentence about a name."""

    reason: str


Found = Invitation | NotYet | Refused


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Task 0 has left, with this status, and why."""

    code: int
    line: str


def file_name(job: str, attempt: int, step_id: str, epoch: int) -> str:
    """Name of a coordinator's file, spelled as the journal spells its own."""
    return f"{job}-{attempt}-{step_id}-{epoch}.json".replace("/", "_").replace("\0", "_")


def publish(directory: Path, invitation: Invitation) -> Path:
    """Put the invitation where the others look, in one step, and remove what lower epochs left there. Raises OSError.

    PermissionError also when the file system does not keep others from reading it, as some do whatever mode is asked for.
    """
    name = file_name(invitation.job, invitation.attempt, invitation.step_id, invitation.epoch)
    fresh = f"{name}.new"
    at = _own_directory(directory)
    try:
        _remove(fresh, at)
        try:
            _write_private(fresh, at, msgspec.json.encode(invitation) + b"\n")
            os.rename(fresh, name, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            _remove(fresh, at)
            raise
        for old in _names(at):  # of too many the rest is for the next start
            match = _NAME.fullmatch(old)
            if match is not None and int(match[1]) < invitation.epoch:
                _remove(old, at)
        _remove(_end_name(invitation.job, invitation.attempt, invitation.step_id), at)
        _sync(at)
    finally:
        os.close(at)
    return directory / DIRECTORY / name


def conclude(directory: Path, key: tuple[str, int, str], srun: str, end: End) -> None:
    """Leave word for tasks that come after task 0 has left, or refused to start. Nobody relies on it: errors are let go."""
    with contextlib.suppress(OSError):
        at = _own_directory(directory)
        try:
            name = _end_name(*key)
            _remove(name, at)
            _write_private(name, at, msgspec.json.encode({"srun": srun, "code": end.code, "line": end.line}) + b"\n")
        finally:
            os.close(at)


def concluded(directory: Path, key: tuple[str, int, str], srun: str) -> End | None:
    """How this very step ended before we came; None where it has not, or where `srun` does not tell it from an earlier one."""
    if not srun:
        return None
    try:
        at = _open_afresh(directory)
    except OSError:
        return None
    try:
        fd = os.open(_end_name(*key), _OPEN_FILE, dir_fd=at)
        try:
            if _not_ours(os.fstat(fd)) or _not_ours(os.fstat(at)):
                return None
            word = msgspec.json.decode(_read_up_to(fd, INVITATION_BYTES_MAX), type=dict[str, str | int])
        finally:
            os.close(fd)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    finally:
        os.close(at)
    code, line = word.get("code"), word.get("line")
    return End(code, line) if word.get("srun") == srun and isinstance(code, int) and isinstance(line, str) else None


def _end_name(job: str, attempt: int, step_id: str) -> str:
    return f"{job}-{attempt}-{step_id}.end".replace("/", "_").replace("\0", "_")


def withdraw(path: Path) -> None:
    """Remove the file that `publish` made; what cannot be removed stays for the next start."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def find(directory: Path, job: str, attempt: int, step_id: str) -> Found:
    """One look for the coordinator of this step; of several, the one with the highest epoch that can be believed."""
    try:
        at = _open_afresh(directory)
    except OSError as error:
        return _trouble(DIRECTORY, error, _kind_at(directory / DIRECTORY))
    try:
        names, epochs = _names(at), []
        if len(names) > NAMES_MAX:
            return Refused(f"{DIRECTORY} holds more than {NAMES_MAX} names")
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and name == file_name(job, attempt, step_id, int(match[1])):
                epochs.append(int(match[1]))
        if not epochs:
            return NotYet(f"there is no file of this step in {DIRECTORY}")
        problem = _not_ours(os.fstat(at))
        if problem:
            return Refused(f"{DIRECTORY} {problem}")
        looks = [_read(at, file_name(job, attempt, step_id, max(epochs)), (job, attempt, step_id, max(epochs)))]
        for epoch in sorted(epochs, reverse=True)[1:EPOCHS_MAX]:
            if isinstance(looks[-1], Invitation):
                return looks[-1]
            looks.append(_read(at, file_name(job, attempt, step_id, epoch), (job, attempt, step_id, epoch)))
        # With none to be believed, what is wrong with the highest one is told.
        return looks[-1] if isinstance(looks[-1], Invitation) else looks[0]
    except OSError as error:
        return _trouble(DIRECTORY, error, "")
    finally:
        os.close(at)


def _read(at: int, name: str, wanted: tuple[str, int, str, int]) -> Found:
    try:
        fd = os.open(name, _OPEN_FILE, dir_fd=at)
    except OSError as error:
        kind = {errno.ELOOP: "a link", errno.ENXIO: "a socket or a device"}.get(error.errno or 0, "")
        return _trouble(name, error, kind)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            return Refused(f"{name} is no regular file")
        problem = _not_ours(seen)
        if problem:
            return Refused(f"{name} {problem}")
        data = _read_up_to(fd, INVITATION_BYTES_MAX + 1)
    except OSError as error:
        return _trouble(name, error, "")
    finally:
        os.close(fd)
    if len(data) > INVITATION_BYTES_MAX:
        return Refused(f"{name} is larger than {INVITATION_BYTES_MAX} bytes")
    if not data:
        return NotYet(f"{name} is still empty here")  # its size was remembered, or is on its way
    try:
        invitation = msgspec.json.decode(data, type=Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Refused(f"{name} is no invitation: {str(error)[:200]}")
    if (invitation.job, invitation.attempt, invitation.step_id, invitation.epoch) != wanted:
        return Refused(f"{name} is about another step than its name: {invitation!r}"[:500])
    return invitation


def _trouble(name: str, error: OSError, kind: str) -> NotYet | Refused:
    """What an error means: a link is refused, everything else may be gone at the next look."""
    if kind:
        return Refused(f"{name} is {kind}")
    return NotYet(f"{name} cannot be read ({error.strerror or error})")


def _not_ours(seen: os.stat_result) -> str:
    if seen.st_uid != os.geteuid():
        return f"belongs to another user (uid {seen.st_uid})"
    if seen.st_mode & _PRIVATE:
        return f"is open to other users (mode {stat.S_IMODE(seen.st_mode):04o})"
    return ""


def _open_afresh(directory: Path) -> int:
    """The rendezvous directory, as the server has it now."""
    # DIR itself may be a link (people make it one), .rendezvous may not.
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            return os.open(DIRECTORY, _OPEN_DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            # Perhaps only remembered as not there. A listing goes to the server, and what it brings replaces such memories.
            with os.scandir(above) as entries:
                if all(entry.name != DIRECTORY for entry in islice(entries, NAMES_MAX)):
                    raise
            return os.open(DIRECTORY, _OPEN_DIRECTORY, dir_fd=above)
    finally:
        os.close(above)


def _own_directory(directory: Path) -> int:
    """The rendezvous directory, made if need be, and closed to all others. Raises OSError."""
    path = directory / DIRECTORY
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)
    at = os.open(path, _OPEN_DIRECTORY)
    try:
        _close_to_others(at, 0o700, path)  # an umask may have taken from it, and somebody may have opened it
    except OSError:
        os.close(at)
        raise
    return at


def _write_private(name: str, at: int, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        _close_to_others(fd, 0o600, Path(name))
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)  # the other nodes see what the server has
    finally:
        os.close(fd)


def _close_to_others(fd: int, mode: int, path: Path) -> None:
    """Give it this mode, and make sure of it: raises PermissionError if others may still do anything with it."""
    seen = os.fstat(fd)
    if seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) != mode:
        os.fchmod(fd, mode)
        seen = os.fstat(fd)
    problem = _not_ours(seen)
    if problem:
        raise PermissionError(errno.EPERM, problem, str(path))


def _read_up_to(fd: int, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    left = bytes_max
    while left > 0:
        part = os.read(fd, left)
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _names(at: int) -> list[str]:
    """The names in the directory, at most one more than NAMES_MAX."""
    with os.scandir(at) as entries:
        return [entry.name for entry in islice(entries, NAMES_MAX + 1)]


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def _remove(name: str, at: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=at)


def _kind_at(path: Path) -> str:
    """What stands where the directory should be, "" for a directory or nothing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return "a link"
    return "" if stat.S_ISDIR(mode) else "no directory"
