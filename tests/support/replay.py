"""What a disk may hold after a crash or a power cut, for every moment of a recorded program.

Owns the model, after ALICE (Pillai et al., OSDI 2014) at its weakest, as POSIX promises it and not as ext4 behaves:

- The data of a file is safe once the file was synced. Of later writes any subset may be there, in any order, each whole, torn
  (its first half), or as zeros: the size has reached the disk and the data has not. A truncation is there or not.
- A name (made, renamed, removed) is safe once its *directory* was synced, whatever was synced below it. Later changes of names
  may be there in any subset, also out of order. A rename within one directory is one change. From one directory to another it
  is one change in each, and never are both names gone. To sync a file does not save its name, nor a directory what lies below.
- A link's target is safe with its name. Nothing that was synced is ever lost, and `sync` is never counted on.

Must not know what is right: the tests look at each state with the store's own code. A call that changes something below the
directory and that the model does not know is an error, never passed over.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.syscalls import SAID, Call, descriptor, quoted

ROOT = 0
OUTCOMES_OF_WRITE = ("lost", "whole", "torn", "zeros")
OUTCOMES = ("lost", "whole")
_OUTSIDE_ONLY = frozenset(
    {
        "openat2", "writev", "pwritev", "pwritev2", "fallocate", "copy_file_range", "sendfile", "splice", "sync_file_range",
        "sync", "syncfs", "msync", "link", "linkat",
    }
)  # fmt: skip
_LOCKS = re.compile(r"F_(OFD_)?SETLKW?")


class NotModelled(Exception):
    """The program did something below the directory of which the model does not know what a power cut leaves."""


@dataclasses.dataclass
class Disk:
    """Inodes: directories as names to inodes, files as bytes, links as targets."""

    directories: dict[int, dict[str, int]] = dataclasses.field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = dataclasses.field(default_factory=dict)
    links: dict[int, str] = dataclasses.field(default_factory=dict)

    def inode(self, parts: Iterable[str]) -> int | None:
        """What is under this path, None if nothing."""
        at: int | None = ROOT
        for part in parts:
            at = None if at is None else self.directories.get(at, {}).get(part)
        return at

    def tree(self, at: int = ROOT, below: str = "") -> Iterator[tuple[str, bytes | str | None]]:
        """Every path with its bytes, its target, or None for a directory, parents first."""
        for name, inode in sorted(self.directories[at].items()):
            path = f"{below}{name}"
            if inode in self.directories:
                yield path, None
                yield from self.tree(inode, f"{path}/")
            else:
                yield path, self.files[inode] if inode in self.files else self.links[inode]


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """A change of a directory. `after`: it is not on the disk without that one, the other half of the same rename."""

    owner: int
    sets: tuple[tuple[str, int | None], ...]
    after: Names | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Write:
    """A change of a file's bytes; `data` None for a truncation to `offset`."""

    owner: int
    offset: int
    data: bytes | None


Change = Names | Write


def apply(disk: Disk, change: Change, outcome: str) -> None:
    """Carry out one change as far as `outcome` says."""
    if outcome == "lost":
        return
    if isinstance(change, Names):
        entries = disk.directories[change.owner] = dict(disk.directories[change.owner])
        for name, inode in change.sets:
            entries.pop(name, None)
            if inode is not None:
                entries[name] = inode
        return
    old = disk.files[change.owner]
    if change.data is None:
        disk.files[change.owner] = old[: change.offset].ljust(change.offset, b"\0")
        return
    data = change.data[: len(change.data) // 2] if outcome == "torn" else change.data
    end = change.offset + len(data)
    if outcome == "zeros":
        disk.files[change.owner] = old.ljust(end, b"\0")
    else:
        disk.files[change.owner] = old[: change.offset].ljust(change.offset, b"\0") + data + old[end:]


class Replay:
    """Follows recorded calls: `safe` is what no power cut takes away, `pending` the changes that one may."""

    def __init__(self, root: Path) -> None:
        """`root` as it is on this machine before the program runs; that is taken as safe."""
        self.root = os.path.realpath(root)
        self.safe = Disk()
        self._numbers = itertools.count(1)
        self._read(Path(self.root), ROOT)
        self.live = copy.deepcopy(self.safe)
        self.pending: list[Change] = []
        self.said: list[str] = []
        self.locks: list[Call] = []
        self._fds: dict[int, list[int]] = {}

    def _read(self, directory: Path, at: int) -> None:
        for path in sorted(directory.iterdir()):
            inode = self.safe.directories[at][path.name] = next(self._numbers)
            if path.is_symlink():
                self.safe.links[inode] = str(path.readlink())
            elif path.is_dir():
                self.safe.directories[inode] = {}
                self._read(path, inode)
            else:
                self.safe.files[inode] = path.read_bytes()

    def take(self, call: Call) -> bool:
        """Follow one call; whether it changed anything, synced or said something."""
        if call.name in ("readlink", "readlinkat"):
            path = call.text(call.name == "readlinkat")
            if path.startswith(SAID):
                self.said.append(path.removeprefix(SAID))
            return path.startswith(SAID)
        if call.name == "flock" or (call.name == "fcntl" and _LOCKS.match(call.arguments[1])):
            self.locks.append(call)
        if call.error or call.result == "?":
            return False
        if call.name in _OUTSIDE_ONLY:
            if call.name == "sync" or any(f"<{self.root}" in word or f'"{self.root}' in word for word in call.arguments):
                raise NotModelled(str(call))
            return False
        follow = getattr(self, f"_{call.name}", None)
        return bool(follow(call)) if follow is not None else False

    # One method for each system call that the model knows. A truth means that the state has changed.

    def _open(self, call: Call, at: int = 0) -> bool:
        parts = self._parts(call, at)
        if parts is None:
            return False
        flags = call.arguments[at + 1]
        if "O_TMPFILE" in flags:
            raise NotModelled(str(call))
        inode = self.live.inode(parts)
        changed = inode is None or ("O_TRUNC" in flags and bool(self.live.files[inode]))
        if inode is None:
            inode = next(self._numbers)
            self.live.files[inode] = self.safe.files[inode] = b""
            self._name(parts, inode)
        elif changed:
            self._change(Write(inode, 0, None))
        self._fds[descriptor(call.result)[0]] = [inode, 0]
        return changed

    def _openat(self, call: Call) -> bool:
        return self._open(call, 1)

    def _creat(self, call: Call) -> bool:
        raise NotModelled(str(call))

    def _close(self, call: Call) -> bool:
        self._fds.pop(call.fd(0)[0], None)
        return False

    def _lseek(self, call: Call) -> bool:
        if call.fd(0)[0] in self._fds:
            self._fds[call.fd(0)[0]][1] = int(call.result)
        return False

    def _write(self, call: Call) -> bool:
        fd, path = call.fd(0)
        if self._below(path) is None:
            return False
        inode, offset = self._fds[fd]
        self._fds[fd][1] += int(call.result)
        return self._change(Write(inode, offset, quoted(call.arguments[1])[: int(call.result)]))

    def _pwrite64(self, call: Call) -> bool:
        fd, path = call.fd(0)
        if self._below(path) is None:
            return False
        return self._change(Write(self._fds[fd][0], int(call.arguments[3]), quoted(call.arguments[1])[: int(call.result)]))

    def _ftruncate(self, call: Call) -> bool:
        fd, path = call.fd(0)
        return self._below(path) is not None and self._change(Write(self._fds[fd][0], int(call.arguments[1]), None))

    def _truncate(self, call: Call) -> bool:
        parts = self._parts(call, 0)
        return parts is not None and self._change(Write(self._known(parts), int(call.arguments[1]), None))

    def _fsync(self, call: Call) -> bool:
        fd, path = call.fd(0)
        if self._below(path) is None:
            return False
        self.sync(self._fds[fd][0])
        return True

    _fdatasync = _fsync

    def _mkdir(self, call: Call, at: int = 0) -> bool:
        parts = self._parts(call, at)
        if parts is None:
            return False
        inode = next(self._numbers)
        self.live.directories[inode] = {}
        self.safe.directories[inode] = {}
        return self._name(parts, inode)

    def _mkdirat(self, call: Call) -> bool:
        return self._mkdir(call, 1)

    def _symlink(self, call: Call, at: int = 1) -> bool:
        parts = self._parts(call, at)
        if parts is None:
            return False
        inode = next(self._numbers)
        self.live.links[inode] = self.safe.links[inode] = call.text(0)
        return self._name(parts, inode)

    def _symlinkat(self, call: Call) -> bool:
        return self._symlink(call, 2)

    def _unlink(self, call: Call, at: int = 0) -> bool:
        parts = self._parts(call, at)
        return parts is not None and self._name(parts, None)

    def _unlinkat(self, call: Call) -> bool:
        return self._unlink(call, 1)

    _rmdir = _unlink

    def _rename(self, call: Call, at: tuple[int, int] = (0, 1)) -> bool:
        source, target = self._parts(call, at[0]), self._parts(call, at[1])
        if source is None and target is None:
            return False
        if source is None or target is None:
            raise NotModelled(f"a rename across the edge of the directory: {call}")
        inode = self._known(source)
        old, new = self._known(source[:-1]), self._known(target[:-1])
        if old == new:
            return self._change(Names(old, ((source[-1], None), (target[-1], inode))))
        arrived = Names(new, ((target[-1], inode),))
        self._change(arrived)
        return self._change(Names(old, ((source[-1], None),), after=arrived))

    def _renameat(self, call: Call) -> bool:
        return self._rename(call, (1, 3))

    _renameat2 = _renameat

    def _mmap(self, call: Call) -> bool:
        if "PROT_WRITE" in call.arguments[2] and "MAP_SHARED" in call.arguments[3] and f"<{self.root}" in call.arguments[4]:
            raise NotModelled(str(call))
        return False

    def _ioctl(self, call: Call) -> bool:
        if self._below(call.fd(0)[1]) is not None and "FICLONE" in call.arguments[1]:
            raise NotModelled(str(call))
        return False

    def sync(self, owner: int) -> None:
        """What is pending of this inode is safe from now on; of a rename between directories the arrival at least as early."""
        due = [change for change in self.pending if change.owner == owner]
        due = [earlier for change in due if isinstance(change, Names) and (earlier := change.after) in self.pending] + due
        for change in due:
            if change in self.pending:
                apply(self.safe, change, "whole")
                self.pending.remove(change)

    def _name(self, parts: list[str], inode: int | None) -> bool:
        return self._change(Names(self._known(parts[:-1]), ((parts[-1], inode),)))

    def _change(self, change: Change) -> bool:
        apply(self.live, change, "whole")
        self.pending.append(change)
        return True

    def _known(self, parts: list[str]) -> int:
        inode = self.live.inode(parts)
        if inode is None:
            raise NotModelled(f"{'/'.join(parts)} is not there")
        return inode

    def _parts(self, call: Call, at: int) -> list[str] | None:
        """The path in this argument below the root, None if it is elsewhere. Before an `at` call's name comes its directory."""
        path = call.text(at)
        if not path.startswith("/"):
            path = f"{call.fd(at - 1)[1] if at else os.getcwd()}/{path}"  # noqa: PTH109 - it is text
        return self._below(path)

    def _below(self, path: str) -> list[str] | None:
        if path != self.root and not path.startswith(self.root + "/"):
            return None
        return [part for part in path[len(self.root) :].split("/") if part]

    def states(self, states_max: int, dice: random.Random) -> Iterator[Disk]:
        """What a power cut may leave now: all of it if that is not more than `states_max`, else so many, the plain ones first."""
        ways = [OUTCOMES_OF_WRITE if isinstance(change, Write) and change.data else OUTCOMES for change in self.pending]
        if math.prod(len(way) for way in ways) <= states_max:
            chosen: Iterable[tuple[str, ...]] = itertools.product(*ways)
        else:
            chosen = itertools.islice(_some(ways, dice), states_max)
        for outcomes in chosen:
            disk = Disk(dict(self.safe.directories), dict(self.safe.files), self.safe.links)
            there: set[int] = set()
            for number, (change, outcome) in enumerate(zip(self.pending, outcomes, strict=True)):
                after = change.after if isinstance(change, Names) else None
                if after is not None and after in self.pending and self.pending.index(after) not in there:
                    continue
                apply(disk, change, outcome)
                there |= {number} if outcome != "lost" else set()
            yield disk


def _some(ways: list[tuple[str, ...]], dice: random.Random) -> Iterator[tuple[str, ...]]:
    """All there, none there, one of them missing, one of them alone; then anything."""
    whole, lost = ["whole"] * len(ways), ["lost"] * len(ways)
    yield tuple(whole)
    yield tuple(lost)
    for at, way in enumerate(ways):
        for outcome in way:
            yield (*whole[:at], outcome, *whole[at + 1 :])
            yield (*lost[:at], outcome, *lost[at + 1 :])
    while True:
        yield tuple(dice.choice(way) for way in ways)


def put_down(tree: Iterable[tuple[str, bytes | str | None]], root: Path) -> None:
    """Make this state a real directory."""
    root.mkdir(exist_ok=True)
    for name, what in tree:
        path = root / name
        if what is None:
            path.mkdir()
        elif isinstance(what, str):
            path.symlink_to(what)
        else:
            path.write_bytes(what)
