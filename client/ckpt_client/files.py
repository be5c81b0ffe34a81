"""Files of a checkpoint as the client writes, copies and reports them.

Owns the digest of what was *meant* to be written, the copying of what an own `save` wrote elsewhere, and the report of both. Must
not decide anything about rounds, and never makes a hard link: the next write in place would change a committed checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import xxhash

from ckpt_client import wire
from ckpt_client.wire import SavedFile

PART_BYTES = 8 * 1024 * 1024
"""Most bytes hashed or written in one call: other threads get the GIL in between, and the kernel would write 2 GiB at most."""

BESIDE_BYTES = 1024 * 1024
"""From this size on a part is hashed by another thread while it is written: handing it over costs some 20 us."""

FICLONE = 0x40049409
"""_IOW(0x94, 9, int) of linux/fs.h: share the blocks of another file, copy on write."""

ARCHIVE_MAGIC = b"PK\x03\x04"

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None
"""What an own `save` may return."""


class SaveError(Exception):
    """A save that did not work. The message is one line, fit for the journal."""


def one_line(error: BaseException) -> str:
    """An exception as one line, `Type: message`."""
    text = " ".join(str(error).split()).encode("utf-8", "replace").decode()  # File names may hold what no word can.
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[: wire.REASON_CHARS_MAX]


class Beside:
    """A thread that hashes a part while it is being written. Use with `with`; the thread is there once there is a large part."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[xxhash.xxh3_128, memoryview, threading.Lock] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def update(self, digest: xxhash.xxh3_128, part: memoryview) -> threading.Lock:
        """Have this part hashed; it is, once the lock can be taken. Until then nobody else may use the digest."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckpt-digest", daemon=True)
            self._thread.start()
        over = threading.Lock()
        over.acquire()
        self._jobs.put((digest, part, over))
        return over

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            digest, part, over = job
            digest.update(part)
            over.release()


class DigestWriter:
    """Write-only file object (for `torch.save`) that hashes what it is asked to write, so that a lost write is found later."""

    __slots__ = ("_beside", "_digest", "_fd", "error", "size_bytes")

    def __init__(self, fd: int, beside: Beside | None = None) -> None:
        self._fd = fd
        self._beside = beside
        self._digest = xxhash.xxh3_128()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Hash and write all of `data`, without copying it. Raises OSError when not all of it can be written."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            if self._beside is None or len(part) < BESIDE_BYTES:
                self._digest.update(part)
                self._write_all(part)
            else:
                over = self._beside.update(self._digest, part)
                try:
                    self._write_all(part)
                finally:
                    over.acquire()  # The bytes are the caller's again once this returns.
            self.size_bytes += len(part)
        return len(view)

    def _write_all(self, part: memoryview) -> None:
        written = 0
        try:
            while written < len(part):
                written += os.write(self._fd, part[written:])
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Nothing is held back here."""

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size_bytes

    def hexdigest(self) -> str:
        """XXH3-128 of everything written so far."""
        return self._digest.hexdigest()


def write_file(directory: Path, name: str, write: Callable[[DigestWriter], None], *, durable: bool) -> SavedFile:
    """Create `directory/name`, let `write` fill it and report it. `durable`: fsync, as nothing will be running later to do it."""
    # O_EXCL: a second writer of the same name is a mistake that must not pass.
    fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with Beside() as beside:
            writer = DigestWriter(fd, beside)
            try:
                write(writer)
            except RuntimeError:
                # torch's archive writer goes on after an exception and then complains of what it finds (torch 2.13).
                if writer.error is not None:
                    raise writer.error from None
                raise
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    return SavedFile(name, writer.size_bytes, writer.hexdigest())


def collect(returned: Paths, directory: Path, *, whole: bool, durable: bool) -> tuple[SavedFile, ...]:
    """The files that an own `save` speaks of.

    Paths inside `directory` are reported without a digest, as only the writer knew what it meant to write; paths elsewhere are
    copied in. `whole`: this process is the only one, so that without any path everything in `directory` is its own.
    """
    if returned is None:
        if not whole:
            return ()
        found = tuple(_reported(path, directory) for path in _files_below(directory))
        if not found:
            raise SaveError("save() wrote nothing into its directory and returned no path")
        return found
    paths = [returned] if isinstance(returned, str | os.PathLike) else list(returned)
    files: list[SavedFile] = []
    for path in paths:
        files += _taken(Path(os.path.abspath(path)), directory, durable=durable)  # noqa: PTH100 (resolve() would follow links)
        if len(files) > wire.FILES_MAX:
            raise SaveError(f"more than {wire.FILES_MAX} files")
    names = [file.path for file in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SaveError(f"save() returned {twice!r} twice")
    return tuple(files)


def _taken(path: Path, directory: Path, *, durable: bool) -> Iterator[SavedFile]:
    """Report the files at `path`, copied into `directory` if they are elsewhere."""
    if not os.path.lexists(path):
        raise SaveError(f"save() returned {str(path)!r}, which does not exist")
    if _is_below(path, directory):
        for file in _files_below(path):
            yield _reported(file, directory)
        return
    for file in _files_below(path):
        yield _copied(file, directory, Path(path.name) / file.relative_to(path), durable=durable)


def _is_below(path: Path, directory: Path) -> bool:
    real = Path(os.path.realpath(path.parent)) / path.name
    return path == directory or directory in path.parents or Path(os.path.realpath(directory)) in real.parents


def _files_below(path: Path) -> Iterator[Path]:
    """Regular files at or below `path`, sorted. Links and special files are refused: what they show may change later."""
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        yield path
    elif stat.S_ISDIR(mode):
        for name in sorted(os.listdir(path)):  # noqa: PTH208 (names are sorted, paths are built once)
            yield from _files_below(path / name)
    else:
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise SaveError(f"{str(path)!r} is {kind}: only regular files and directories can be kept")


def _reported(path: Path, directory: Path) -> SavedFile:
    try:
        name = path.relative_to(directory)
    except ValueError:
        name = Path(os.path.realpath(path)).relative_to(os.path.realpath(directory))
    return SavedFile(_wire_name(name), path.stat().st_size, "")


def _wire_name(name: Path) -> str:
    text = name.as_posix()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SaveError(f"the name {text!r} is not valid UTF-8") from None
    return text


def _copied(source: Path, directory: Path, name: Path, *, durable: bool) -> SavedFile:
    """Copy one file in, by sharing its blocks where the file system can."""
    target = directory / name
    target.parent.mkdir(parents=True, exist_ok=True)
    text = _wire_name(name)
    with contextlib.ExitStack() as opened:
        source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        opened.callback(os.close, source_fd)
        before = os.fstat(source_fd)
        try:
            target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise SaveError(f"{str(source)!r} would be copied over {text!r}, which is there already") from None
        opened.callback(os.close, target_fd)
        if _shared_blocks(source_fd, target_fd):
            report = SavedFile(text, before.st_size, "")
        else:
            report = _copy_bytes(source_fd, target_fd, text)
        after = os.fstat(source_fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or report.size_bytes != after.st_size:
            raise SaveError(f"{str(source)!r} was written to while it was being copied")
        if durable:
            os.fsync(target_fd)
    return report


def _shared_blocks(source_fd: int, target_fd: int) -> bool:
    try:
        fcntl.ioctl(target_fd, FICLONE, source_fd)
    except OSError:
        # Another file system, or one that cannot (EXDEV, EOPNOTSUPP, EINVAL, ENOTTY); the copy will say what is really wrong.
        return False
    return True


def _copy_bytes(source_fd: int, target_fd: int, name: str) -> SavedFile:
    writer = DigestWriter(target_fd)
    # Not a bytearray: from 128 KiB up the kernel copies into one 4 to 5 times slower (measured on Zen 3).
    try:
        with mmap.mmap(-1, PART_BYTES) as buffer, memoryview(buffer) as view:
            while count := os.readv(source_fd, [view]):
                writer.write(view[:count])
    except BufferError:
        # A write has failed, and its traceback holds a part of the buffer, which then cannot be closed: that is not the reason.
        if writer.error is None:
            raise
        raise writer.error from None
    # A torch archive has checksums by whoever wrote it. They say more than a digest of what was read here, which would be taken
    # in their place: without one they are asked for.
    has_own = os.pread(source_fd, len(ARCHIVE_MAGIC), 0) == ARCHIVE_MAGIC
    return SavedFile(name, writer.size_bytes, "" if has_own else writer.hexdigest())
