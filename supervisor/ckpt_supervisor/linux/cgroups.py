"""What the kernel counts of memory: the cgroups that this process is in, version 1 or 2, and the node as a whole.

Owns the formats (cgroups(7), cgroup-v2.rst, cgroup-v1/memory.rst, proc_meminfo(5)) and where the files are. Must not decide what
is near or who is to blame, and changes nothing. A number that cannot be read is None, never 0: a container may show half of this
only. It is read when nothing is wrong as well, so it is a handful of small files of the kernel, never a look at processes.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Literal

LEVELS_MAX = 64
"""Slurm nests its cgroups five deep; a container in a container adds some."""

BYTES_MAX = 64 << 10
MOUNTS_BYTES_MAX = 4 << 20
READS_MAX = 4_096

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One cgroup that counts our memory: where its files are, and its name as /proc/self/cgroup has it."""

    path: str
    name: str
    version: Literal[1, 2]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """The memory of the whole node, in bytes."""

    total: int
    available: int
    shared: int


def levels(proc: str = "/proc") -> tuple[Level, ...]:
    """The cgroups whose memory limits hold for this process: its own first, then those above it."""
    names = _names(_read(f"{proc}/self/cgroup", BYTES_MAX) or "")
    mounts = list(_mounts(_read(f"{proc}/self/mountinfo", MOUNTS_BYTES_MAX) or ""))
    if "memory" in names:  # Also where version 2 is there beside it: a controller belongs to one of them only.
        return _above(names["memory"], mounts, 1)
    return _above(names[""], mounts, 2) if "" in names else ()


def limit_of(level: Level) -> int | None:
    """Its memory limit in bytes; None for none. One beyond the node's memory is none either: version 1 says 2^63 for it."""
    return _number(level, "memory.max" if level.version == 2 else "memory.limit_in_bytes")


def used_of(level: Level, enough: int = 0) -> int | None:
    """What counts against the limit and cannot simply be dropped: without cached file contents that nobody has used lately.

    Below `enough` it is given with them, as that takes one small file less.
    """
    used = _number(level, "memory.current" if level.version == 2 else "memory.usage_in_bytes")
    if used is None or used < enough:
        return used
    cached = _fields(level, "memory.stat").get("inactive_file" if level.version == 2 else "total_inactive_file", 0)
    return max(0, used - cached)


def shared_of(level: Level) -> int:
    """Shared memory in it, files in /dev/shm among it; each page counts once, however many have it mapped."""
    return _fields(level, "memory.stat").get("shmem" if level.version == 2 else "total_shmem", 0)


def kills_of(level: Level) -> int | None:
    """How many of its processes the kernel has killed for lack of memory; version 2 counts those of cgroups below it as well."""
    return _fields(level, "memory.events" if level.version == 2 else "memory.oom_control").get("oom_kill")


def hits_of(level: Level) -> int | None:
    """How often its own limit could not be kept, not that of a cgroup above or below it.

    Version 1 counts what could be helped by dropping cached files too, and has a limit of memory and swap together beside it,
    which is tried first and is the same where Slurm allows no swap. Version 2 counts this apart since Linux 5.3.
    """
    if level.version == 1:
        counts = [_number(level, name) for name in ("memory.failcnt", "memory.memsw.failcnt")]
        return sum(count or 0 for count in counts) if any(count is not None for count in counts) else None
    own = _fields(level, "memory.events.local")
    return (own or _fields(level, "memory.events")).get("oom")


def was_full(level: Level, limit: int) -> bool:
    """Whether so much was in use at some time that nothing more would have fitted; version 1 only, for want of a count.

    Linux 6.18 counts no hit of the limit of memory and swap together (tried). The kernel charges in batches of 64 pages.
    """
    peak = _number(level, "memory.max_usage_in_bytes") if level.version == 1 else None
    return peak is not None and peak >= limit - limit // 50


def node(proc: str = "/proc") -> Node | None:
    """None where /proc/meminfo does not show it."""
    found = {}
    for line in (_read(f"{proc}/meminfo", BYTES_MAX) or "").splitlines():
        name, _, value = line.partition(":")
        number = value.removesuffix("kB").strip()
        if number.isdecimal():
            found[name] = int(number) * 1_024
    if "MemTotal" not in found or "MemAvailable" not in found:
        return None
    return Node(found["MemTotal"], found["MemAvailable"], found.get("Shmem", 0))


def node_kills(proc: str = "/proc") -> int | None:
    """How many processes of the node the kernel has killed for lack of memory, whoever's they were; None before Linux 4.13."""
    return _pairs(_read(f"{proc}/vmstat", BYTES_MAX) or "").get("oom_kill")


def _names(text: str) -> dict[str, str]:
    """From /proc/self/cgroup: controller to path; "" for version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(text: str) -> Iterator[tuple[str, str, Literal[1, 2]]]:
    """From /proc/self/mountinfo: which cgroup is at the top of a mount of memory's hierarchy, and where that is."""
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or len(kind) < 3:
            continue
        root, place = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        if kind[0] == "cgroup2":
            yield root, place, 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield root, place, 1


def _above(name: str, mounts: list[tuple[str, str, Literal[1, 2]]], version: Literal[1, 2]) -> tuple[Level, ...]:
    """This cgroup and those above it, as far as they can be seen and count memory."""
    for root, place, kind in mounts:
        if kind != version:
            continue
        # In a container the name may be the host's while the mount begins at our own cgroup, or the other way round.
        prefix = root.rstrip("/")
        inside = name[len(prefix) :] if name == prefix or name.startswith(f"{prefix}/") else ""
        if "/../" in f"{inside}/":
            inside = ""
        found = list(_counting(place, inside.strip("/"), name, version))
        if found:
            return tuple(found)
    return ()


def _counting(place: str, inside: str, name: str, version: Literal[1, 2]) -> Iterator[Level]:
    parts = inside.split("/") if inside else []
    own = len(parts)
    for depth in range(min(own, LEVELS_MAX), -1, -1):
        path = "/".join([place, *parts[:depth]])
        level = Level(path, _named(name, own - depth), version)
        if version == 1:
            # Before Linux 5.11 a cgroup could be told not to count what is below it.
            if depth < own and _number(level, "memory.use_hierarchy") == 0:
                return
            if _number(level, "memory.usage_in_bytes") is not None:
                yield level
        elif _number(level, "memory.current") is not None:  # Not where the controller is not switched on, nor at the very top.
            yield level


def _named(name: str, up: int) -> str:
    """The name of the cgroup that many levels above this one."""
    for _ in range(up):
        name = name.rpartition("/")[0]
    return name or "/"


def _number(level: Level, name: str) -> int | None:
    text = (_read(f"{level.path}/{name}", BYTES_MAX) or "").strip()
    return int(text) if text.isdecimal() else None


def _fields(level: Level, name: str) -> dict[str, int]:
    return _pairs(_read(f"{level.path}/{name}", BYTES_MAX) or "")


def _pairs(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value.isdecimal():
            found[key] = int(value)
    return found


def _read(path: str, bytes_max: int) -> str | None:
    """None when it is not there, or may not be read: a cgroup can be removed under us."""
    parts: list[bytes] = []
    left = bytes_max
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(READS_MAX):
            part = os.read(fd, min(left, BYTES_MAX))
            parts.append(part)
            left -= len(part)
            if not part or left <= 0:
                break
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts).decode("utf-8", "replace")
