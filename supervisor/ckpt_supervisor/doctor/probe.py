"""Tries a checkpoint directory: what it is, what is in it, whether a checkpoint could be written there. A program of its own.

    python -m ckpt_supervisor.doctor.probe DIR

Prints a Place as JSON before each stage, with the stage in `problem`, and once more at the end: whoever started it knows what it
hung at (look.py). Owns the probe's files: they lie in one directory with a name that the sweep of the next start removes, should
this process be killed. Must not make the checkpoint directory itself, nor change anything that was there: where the directory is
still to be made, the nearest one above it is tried.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ckpt_supervisor import store
from ckpt_supervisor.doctor.facts import Place

MOUNTS_BYTES_MAX = 4 << 20
OLD, NEW = b"old", b"new"
EPOCH_MAX = 10**18
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})

_OCTAL = re.compile(r"\\([0-7]{3})")

Say = Callable[[Place], None]


def main(argv: list[str]) -> int:
    """Look at argv[1]."""

    def say(place: Place) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(place) + b"\n")
        sys.stdout.buffer.flush()

    say(look(Path(argv[1]), say))
    return 0


def look(path: Path, say: Say) -> Place:
    """All stages. What goes wrong in one of them does not keep the next ones from their look."""
    place = Place(str(path), exists=False, looked_at=str(path))
    stages: tuple[tuple[str, Callable[[Place], Place]], ...] = (
        ("looking for the directory", _there),
        ("asking which file system it is on", _volume),
        ("reading what is in it", _contents),
        ("asking for room", _room),
        ("writing to it", _written),
    )
    for name, stage in stages:
        say(msgspec.structs.replace(place, problem=name))
        try:
            place = stage(place)
        except OSError as error:
            return msgspec.structs.replace(place, problem=f"{name}: {error.strerror or error}")
    return place


def _there(place: Place) -> Place:
    """The directory, or the nearest one above it. Raises OSError."""
    path = Path(place.path)
    for each in (path, *path.parents):
        try:
            if each.is_dir():
                return msgspec.structs.replace(place, exists=each == path, looked_at=str(each))
            os.lstat(each)
        except (FileNotFoundError, NotADirectoryError):
            continue  # What is in the way is found further up.
        raise NotADirectoryError(errno.ENOTDIR, f"{each} is no directory")
    return place


def _volume(place: Place) -> Place:
    """Of the directory that a link leads to (field case 112)."""
    volume = os.statvfs(place.looked_at)
    device = os.stat(place.looked_at).st_dev  # noqa: PTH116 - as it is, links followed.
    kind, source = _mounted(device, os.path.realpath(place.looked_at))
    files = volume.f_favail if volume.f_files else None
    free = volume.f_bavail * volume.f_frsize
    return msgspec.structs.replace(place, kind=kind, source=source, free_bytes=free, free_files=files)


def _mounted(device: int, path: str) -> tuple[str, str]:
    """Type and source of the mount that this path is on (proc_pid_mountinfo(5))."""
    with Path("/proc/self/mountinfo").open("rb") as file:
        lines = file.read(MOUNTS_BYTES_MAX).decode(errors="replace").splitlines()
    best, found = -1, ("", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kinds) < 2:
            continue
        point = unescaped(fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        is_device = fields[2] == f"{os.major(device)}:{os.minor(device)}"
        # btrfs and some network file systems give files another device than the mount has: then the longest path decides.
        if is_above and (weight := len(point) + (1_000_000 if is_device else 0)) >= best:
            best, found = weight, (kinds[0], kinds[1])
    return found


def unescaped(field: str) -> str:
    """A path of mountinfo: blanks and backslashes are three octal digits there, letters beyond ASCII stand as they are."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)


def _contents(place: Place) -> Place:
    """Who holds it, the newest checkpoint's size, how long saves took."""
    if not place.exists:
        return place
    from ckpt_supervisor.start import history

    root = Path(place.path)
    holder = store.read_holder(root)
    candidates = store.scan(root)
    manifest = next((found.manifest for found in candidates if found.manifest is not None), None)
    return msgspec.structs.replace(
        place,
        checkpoints=len(candidates),
        needed_bytes=None if manifest is None else store.needed_for(manifest),
        holder=None if holder is None else (holder.job, holder.step_id, holder.host, store.describe_holder(holder)),
        holder_alive=None if holder is None else _is_alive(holder),
        saves_ms=history.read(root, "", EPOCH_MAX).saves_ms,
    )


def _is_alive(holder: store.Holder) -> bool | None:
    return store.is_alive(holder) if store.can_be_seen(holder) else None


def _room(place: Place) -> Place:
    if not place.needed_bytes:
        return place
    # Nothing is asked for while somebody may be writing there: what is asked for is gone for him meanwhile.
    asked = store.reserve if place.holder_alive is False and os.access(place.looked_at, os.W_OK) else None
    room = store.look_at_room(place.looked_at, place.needed_bytes, asked)
    return msgspec.structs.replace(place, quota=room.refusal, usable_bytes=room.usable_bytes)


def _written(place: Place) -> Place:
    """A commit in small: write, fsync, rename, rename over another one, rename a directory, fsync the directory, a link."""
    directory = Path(place.looked_at) / store.trash_name(0, 0, os.getpid())
    try:
        directory.mkdir(0o700)
    except OSError as error:
        return msgspec.structs.replace(place, write=_named(error))
    try:
        return _tried(place, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _tried(place: Place, directory: Path) -> Place:
    old, new, lower = directory / "old", directory / "new", directory / "lower"
    before = time.time_ns()
    try:
        old.write_bytes(OLD)
        new.write_bytes(NEW)
        lower.mkdir()
    except OSError as error:
        return msgspec.structs.replace(place, write=_named(error))
    after = time.time_ns()
    # Coarse clocks: mtime is that of the last timer tick, 10 ms old at most.
    middle, changed = (before + after) // 2, new.stat().st_mtime_ns
    place = msgspec.structs.replace(place, write="", skew_ms=(changed - middle) // 1_000_000)
    return msgspec.structs.replace(
        place,
        fsync=_problem(lambda: _sync(new, os.O_RDWR)),
        rename=_problem(lambda: _renamed(old, new, lower)),
        directory_fsync=_problem(lambda: _sync(directory, os.O_RDONLY | os.O_DIRECTORY), _NO_DIRECTORY_SYNC),
        links=_problem(lambda: (directory / "link").symlink_to("old")),
    )


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _renamed(old: Path, new: Path, lower: Path) -> None:
    """Raises OSError when a rename does not do what a commit relies on."""
    new.rename(old)
    if old.read_bytes() != NEW:
        raise OSError(errno.EIO, "a file that was renamed over another one does not show")
    lower.rename(new)
    if lower.exists() or not new.is_dir():
        raise OSError(errno.EIO, "a directory that was renamed is still there under its old name")


def _problem(work: Callable[[], None], harmless: frozenset[int] = frozenset()) -> str:
    try:
        work()
    except OSError as error:
        return f"harmless: {_named(error)}" if error.errno in harmless else _named(error)
    return ""


def _named(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv))
