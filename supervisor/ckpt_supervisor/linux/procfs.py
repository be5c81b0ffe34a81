"""Reads /proc: which processes descend from us, what state they are in, which signals wait for them.

Owns the formats of /proc. Must not signal or reap anybody. A process that is gone in the middle of a look is simply
gone: None, never an error. psutil would do for most of this, but its `children()` reads all of /proc: 2 ms for 85
processes here, against 15 us for the children of a process of one thread; it stands in where the kernel lacks
`children` files (CONFIG_PROC_CHILDREN).
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterable
from typing import Literal

State = Literal["running", "stopped", "zombie", "gone", "uninterruptible"]

STATUS_BYTES_MAX = 16_384
PART_BYTES_MIN = 3_072
"""Long lists come a page at a time; what is shorter than this is all there is."""
CHILDREN_BYTES_MAX = 1 << 20
DESCENDANTS_MAX = 100_000
GENERATIONS_MAX = 1_000
THREADS_MAX = 10_000
DESCRIPTORS_MAX = 200_000
"""Most open files of all processes together that one look for a writer goes through: half a second."""

_STATES: dict[str, State] = {"D": "uninterruptible", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "gone", "x": "gone"}
_TERM_BIT = 1 << (signal.SIGTERM - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """From /proc/PID/stat. pid and start time (clock ticks since boot) together name a process once and for all."""

    state: State
    parent: int
    started: int


def _read(path: str, bytes_max: int) -> str | None:
    content = _read_bytes(path, bytes_max)
    return None if content is None else content.decode("utf-8", "replace")


def _read_bytes(path: str, bytes_max: int) -> bytes | None:
    fd = _open(path)
    if fd is None:
        return None
    parts = []
    left = bytes_max
    try:
        while left > 0 and (part := os.read(fd, left)):
            parts.append(part)
            left -= len(part)
            if len(part) < PART_BYTES_MIN:
                break
        return b"".join(parts)
    except (ProcessLookupError, PermissionError):
        return None
    finally:
        os.close(fd)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # It is gone, hidden, or there is no descriptor left for it.
        return None


def stat(pid: int) -> Stat | None:
    """State, parent and start time, or None when it is gone."""
    text = _read(f"/proc/{pid}/stat", STATUS_BYTES_MAX)
    if not text:
        return None
    # The name stands in parentheses and may hold blanks and parentheses: the last one ends it (proc(5)).
    fields = text[text.rfind(")") + 2 :].split()
    return Stat(_STATES.get(fields[0], "running"), parent=int(fields[1]), started=int(fields[19]))


def state_of(pid: int) -> State:
    """What the process is doing; sleeping counts as running."""
    seen = stat(pid)
    return "gone" if seen is None else seen.state


def status(pid: int) -> bytes | None:
    """Its status file as it is now (proc_pid_status(5)); None when it is gone."""
    return _read_bytes(f"/proc/{pid}/status", STATUS_BYTES_MAX)


def open_status(pid: int) -> int | None:
    """The same as a descriptor that can be read at 0 again and again, and only as long as this very process lives.

    None when it is gone, and when no more files can be opened.
    """
    try:
        return _open(f"/proc/{pid}/status")
    except OSError:
        return None


def shares_pid_namespace(pid: int) -> bool | None:
    """Whether pids mean the same to that process and to us; None when it does not show."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return None


def term_is_stuck(pid: int) -> bool:
    """Whether SIGTERM is pending and blocked. Pending alone also holds for a stopped process that would die of it on SIGCONT."""
    masks = _masks(pid)
    return bool((masks["SigPnd"] | masks["ShdPnd"]) & masks["SigBlk"] & _TERM_BIT)


def is_pending(pid: int, number: int) -> bool:
    """Whether this signal was sent to the process and not taken yet."""
    masks = _masks(pid)
    return bool((masks["SigPnd"] | masks["ShdPnd"]) & 1 << (number - 1))


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    return bool(_masks(pid)["SigCgt"] & 1 << (number - 1))


def name_of(pid: int) -> str:
    """The name of what it runs, at most 15 characters; "" when it is gone."""
    return (_read(f"/proc/{pid}/comm", STATUS_BYTES_MAX) or "").strip()


def _masks(pid: int) -> dict[str, int]:
    masks = {"SigPnd": 0, "ShdPnd": 0, "SigBlk": 0, "SigCgt": 0}
    for line in (_read(f"/proc/{pid}/status", STATUS_BYTES_MAX) or "").splitlines():
        key, _, value = line.partition(":")
        if key in masks:
            masks[key] = int(value, 16)
    return masks


def children(pid: int) -> list[int] | None:
    """Children of all threads of a process, zombies included; None when the kernel has no `children` files.

    Not exact while processes come and go (proc(5)): callers who must not miss any look again.
    """
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - called a few times a second for every thread of a training run.
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    readable = False
    for thread in threads:
        text = _read(f"/proc/{pid}/task/{thread}/children", CHILDREN_BYTES_MAX)
        if text is not None:
            readable = True
            found += [int(word) for word in text.split()]
    if not readable and pid == os.getpid():
        return None
    return found


def descendants(pid: int | None = None) -> list[int]:
    """Every process below this one (ourselves if none is named), parents before their children, zombies included."""
    root = os.getpid() if pid is None else pid
    ours = children(os.getpid())
    if ours is None:
        return by_psutil(root, recursive=True)
    found = [root]
    seen = {root}
    for parent in found:  # Grows while it is walked.
        below = ours if parent == os.getpid() else children(parent) or ()
        fresh = [child for child in below if child not in seen]
        seen.update(fresh)
        found += fresh
        if len(found) > DESCENDANTS_MAX:
            break
    return found[1:]


def descends(pid: int, root: int) -> bool:
    """Whether `root` is an ancestor of the process, by its chain of parents."""
    for _ in range(GENERATIONS_MAX):
        seen = stat(pid)
        if seen is None:
            return False
        if seen.parent == root:
            return True  # First: in a container we may be pid 1 ourselves.
        if seen.parent <= 1:
            return False
        pid = seen.parent
    return False


def own_children() -> list[int]:
    """Our children, zombies included."""
    found = children(os.getpid())
    return by_psutil(os.getpid(), recursive=False) if found is None else found


def by_psutil(pid: int, recursive: bool) -> list[int]:
    """The same by a look at every process there is, for kernels without `children` files."""
    import psutil

    try:
        return [process.pid for process in psutil.Process(pid).children(recursive=recursive)]
    except psutil.Error:
        return []


def pid_namespace() -> str:
    """Which pid namespace we are in, `pid:[4026531836]`; "" where that does not show. Pids of another one mean nothing here."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""


def describe(pid: int) -> str:
    """A name for people: `4711 python train.py (sleeping)`."""
    import psutil

    try:
        process = psutil.Process(pid)
        status = process.status()
        words = process.name() if status == psutil.STATUS_ZOMBIE else " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return f"{pid} (gone)"
    return f"{pid} {words[:120]} ({status})"


def bytes_from_storage() -> int | None:
    """What was read for this process from disks and file servers so far (proc_pid_io(5)); None where that is not counted."""
    for line in (_read("/proc/self/io", STATUS_BYTES_MAX) or "").splitlines():
        name, _, count = line.partition(": ")
        if name == "read_bytes" and count.isdecimal():
            return int(count)
    return None


def writer_in(directory: str, pids: Iterable[int]) -> tuple[int, str] | None:
    """A process that has a file at or below this directory open for writing, and the file's path below it; None if none is seen.

    Not seen: files that are written through a mapping alone, and processes that do not show what they have open.
    """
    inside = f"/{os.path.basename(directory)}/"  # noqa: PTH119 - a mount of another namespace has another path before that.
    left = DESCRIPTORS_MAX
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - many processes, each with many of them.
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        left -= len(numbers)
        if left < 0:
            return None
        for number in numbers:
            try:
                below = os.readlink(f"/proc/{pid}/fd/{number}").rpartition(inside)  # noqa: PTH115
                is_it = below[1] and os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), os.lstat(f"{directory}/{below[2]}"))  # noqa: PTH116
            except OSError:
                continue  # Closed meanwhile, or no file of that name any more.
            if is_it and _is_for_writing(pid, number):
                return pid, below[2]
    return None


def _is_for_writing(pid: int, number: str) -> bool:
    for line in (_read(f"/proc/{pid}/fdinfo/{number}", STATUS_BYTES_MAX) or "").splitlines():
        name, _, flags = line.partition(":")
        if name == "flags":
            return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


ENVIRON_BYTES_MAX = 1 << 20
"""Of one process; Linux allows more, and what stands beyond it is not seen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kin:
    """From /proc/PID/stat as well, for processes that are not below us. The first thread may be a zombie before others end."""

    state: State
    parent: int
    session: int
    threads: int
    started: int


def kin(pid: int) -> Kin | None:
    """The same look as `stat`, with what tells whose process it is."""
    text = _read(f"/proc/{pid}/stat", STATUS_BYTES_MAX)
    if not text:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    numbers = [int(fields[place]) for place in (1, 3, 17, 19)]
    return Kin(_STATES.get(fields[0], "running"), *numbers)


def everybody() -> list[int]:
    """Every process of the machine that can be seen from here."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208


def newest() -> int:
    """The number that was given to a process or thread last (proc_loadavg(5)); 0 if that cannot be told. Numbers start again."""
    number = (_read("/proc/loadavg", STATUS_BYTES_MAX) or "").rpartition(" ")[2].strip()
    return int(number) if number.isdecimal() else 0


def owner(pid: int) -> int | None:
    """The user of a process as far as it shows itself to that user; None when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def of_user(uid: int) -> list[int]:
    """Every process of this user that shows itself as such, ourselves among them."""
    return [pid for pid in everybody() if owner(pid) == uid]


def environ(pid: int) -> dict[str, str]:
    """What it was given as its environment when it was started; empty when it does not show it."""
    text = _read(f"/proc/{pid}/environ", ENVIRON_BYTES_MAX) or ""
    return {key: value for key, found, value in (line.partition("=") for line in text.split("\0")) if found}


def words(pid: int) -> list[str]:
    """Its command line, as far as it is of a sensible length; empty for a zombie."""
    return (_read(f"/proc/{pid}/cmdline", STATUS_BYTES_MAX) or "").split("\0")


def namespaces(pid: int | str = "self") -> tuple[int, int]:
    """Inodes of its pid and time namespaces: pids and start times are to be compared within one only. 0 for what is not there."""
    found = []
    for name in ("pid", "time"):
        try:
            found.append(os.stat(f"/proc/{pid}/ns/{name}").st_ino)  # noqa: PTH116
        except OSError:
            found.append(0)
    return found[0], found[1]


def maps(pid: int, bytes_max: int) -> str:
    """Its mappings as proc_pid_maps(5) has them, as far as they fit; each read gives a page of them at most."""
    parts: list[bytes] = []
    left = bytes_max
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as file:  # noqa: PTH123
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
    except OSError:
        return ""
    text = b"".join(parts)
    return text[: text.rfind(b"\n") + 1].decode("utf-8", "replace")


_WAITS = {"x86_64": (61, 247), "aarch64": (260, 95), "ppc64le": (114, 272)}
"""Numbers of wait4(2) and waitid(2)."""
_P_PID = 1


def waits_for(parent: int, pid: int) -> bool:
    """Whether a thread of the parent stands in wait4(2) or waitid(2) for just this child (proc_pid_syscall(5)).

    False where that cannot be seen.
    """
    wait4, waitid = _WAITS.get(os.uname().machine, (-1, -1))
    try:
        threads = os.listdir(f"/proc/{parent}/task")  # noqa: PTH208 - as above.
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    for thread in threads[:THREADS_MAX]:
        words = (_read(f"/proc/{parent}/task/{thread}/syscall", STATUS_BYTES_MAX) or "").split()
        if len(words) < 3 or not words[0].isdecimal():
            continue
        number, first, second = int(words[0]), int(words[1], 16), int(words[2], 16)
        if (number == wait4 and first == pid) or (number == waitid and (first, second) == (_P_PID, pid)):
            return True
    return False
