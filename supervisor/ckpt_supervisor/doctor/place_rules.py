"""The directory, TMPDIR, the clock, versions: what is wrong with the ground that a run stands on.

Owns the judgement, in the words and numbers that a user reads. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_supervisor.doctor.facts import Held, Place, Temporary, Versions
from ckpt_supervisor.doctor.finding import Findings, error, note, ok, unknown, warning
from ckpt_supervisor.text import size_text

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
LOCAL = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "jfs",
        "reiserfs",
        "overlay",
        "aufs",
        "vfat",
        "exfat",
        "ntfs",
        "bcachefs",
    }
)
"""File systems of one machine. zfs and the like may be served to others, but not under this name."""

SKEW_MS_MAX = 2_000
"""NFS servers and clients keep their clocks by NTP to a few ms; ages and orders that people read go wrong from seconds on."""

FILES_MIN = 1_000
"""A checkpoint of 64 ranks has 70 files or so, and a journal has one for each task."""

LIBRARIES = {"zmq": "pyzmq", "msgspec": "msgspec", "torch": "torch"}


def directory(place: Place, nodes: int | None, one_machine: bool | None, keep: int) -> Findings:
    """What the probe found. `nodes`: of the job, None where not known; `one_machine`: all its nodes are one host."""
    if place.problem:
        advice = "see whether `ls` there comes back; training would wait for it at every save"
        return [unknown("dir-unknown", f"{place.path} could not be looked at: {place.problem}", advice)]
    where = place.path if place.exists else f"{place.looked_at} (where {place.path} is still to be made)"
    found = [*_written(place, where), *_shared(place, where, nodes, one_machine), *_room(place, where, keep)]
    return found or [ok("dir", f"{where} can be used")]


def _written(place: Place, where: str) -> Findings:
    if place.write:
        code = place.write.partition(":")[0]
        advice = {
            "EROFS": "it is mounted read-only: choose another --dir",
            "ENOSPC": "remove what is not needed there, or choose another --dir",
            "EDQUOT": "your quota there is used up: remove what is not needed, or choose another --dir",
        }.get(code, "choose a --dir that you may write to, or have its mode changed")
        return [error("dir-not-writable", f"{where} cannot be written to ({place.write})", advice)]
    found: Findings = []
    if place.fsync:
        text = f"{where}: fsync fails ({place.fsync}): no commit can be sure to survive a crash of the node"
        found.append(error("dir-no-fsync", text, "choose a --dir on another file system"))
    if place.rename:
        text = f"{where}: rename fails or does nothing ({place.rename}): no checkpoint can be committed there"
        found.append(
            error("dir-no-rename", text, "choose a --dir on another file system; object stores mounted as files are of this kind")
        )
    if place.directory_fsync:
        text = f"{where}: a directory cannot be flushed ({place.directory_fsync})"
        if place.directory_fsync.startswith("harmless"):
            found.append(
                note("dir-no-directory-fsync", text, "a power cut right after a commit may lose it; the one before stands")
            )
        else:
            found.append(error("dir-no-fsync", text, "choose a --dir on another file system"))
    if place.links:
        text = f"{where}: no symbolic links ({place.links}); `latest` will be a small file"
        found.append(note("dir-no-links", text))
    if place.skew_ms is not None and abs(place.skew_ms) > SKEW_MS_MAX:
        ahead = "ahead of" if place.skew_ms > 0 else "behind"
        text = f"the clock of {where} is {abs(place.skew_ms) / 1000:.1f} s {ahead} this machine's"
        found.append(warning("clock-skew", text, "ages and `log --since` are off by that much; have NTP looked at on both"))
    good = not any(finding.is_wrong for finding in found)
    return (
        [*found, ok("dir-writable", f"{where}: write, fsync and rename work ({place.kind or 'unknown kind'})")] if good else found
    )


def _shared(place: Place, where: str, nodes: int | None, one_machine: bool | None) -> Findings:
    several = nodes is not None and nodes > 1
    if place.kind in IN_MEMORY:
        text = f"{where} is in the memory of this node ({place.kind}): it is gone when the job ends, or runs elsewhere"
        return [error("dir-not-shared", text, "choose a --dir on a file system that all nodes share, such as $SCRATCH")]
    if place.kind not in LOCAL or one_machine:
        return []
    text = f"{where} is on a disk of this node alone ({place.kind} on {place.source})"
    if several:
        advice = "choose a --dir on a file system that all nodes share, such as $SCRATCH"
        return [error("dir-not-shared", f"{text}, and the job has {nodes} nodes: they would not find each other", advice)]
    advice = "choose a --dir on a shared file system; if there is one node only, this is well"
    return [warning("dir-not-shared", f"{text}: after a requeue the job may run on another node", advice)]


def _room(place: Place, where: str, keep: int) -> Findings:
    found: Findings = []
    if place.free_files is not None and place.free_files < FILES_MIN:
        text = f"{where}: {place.free_files} more files can be made (inodes), whatever space is free"
        advice = "remove what is not needed there, or choose another --dir"
        found.append((error if place.free_files < 100 else warning)("dir-no-files", text, advice))
    if place.free_bytes is None:
        return found
    free = place.free_bytes if place.usable_bytes is None else min(place.free_bytes, place.usable_bytes)
    if not place.needed_bytes:
        if free < 1 << 20:
            text = f"{where} is full: {size_text(free)} are free"
            return [*found, error("dir-full", text, "remove what is not needed there, or choose another --dir")]
        return [*found, ok("dir-room", f"{size_text(free)} are free; how large a checkpoint is is not known yet")]
    # One more than it keeps while the newest is being written; what is there already counts.
    wanted = max(1, keep + 1 - place.checkpoints)
    limit = f", by {place.quota}" if place.quota else ""
    what = f"{where}: {size_text(free)} are free{limit}, a checkpoint needs {size_text(place.needed_bytes)}"
    advice = f"make room, or keep fewer than --keep {keep}"
    if free < place.needed_bytes:
        return [*found, error("dir-full", f"{what}: the next save will not fit", advice)]
    if free < wanted * place.needed_bytes:
        return [*found, warning("dir-full", f"{what}, and --keep {keep} needs {wanted} more of them at the peak", advice)]
    return [*found, ok("dir-room", what)]


def held(found: Held | None) -> Findings:
    """Other attempts alive."""
    if found is None:
        return [ok("dir-held", "nobody holds the directory")]
    if found.alive is None:
        text = f"the directory was held last by {found.who}; whether that is alive could not be told ({found.why})"
        return [unknown("dir-held", text, "look with squeue; a start asks Slurm once more")]
    if found.alive:
        text = f"the directory is held by {found.who}, which is alive ({found.why}): another job that starts there is refused"
        return [warning("dir-held", text, "give each run a directory of its own, wait, or say --continues JOB")]
    return [ok("dir-held", f"held last by {found.who}, which has ended")]


def temporary(places: Sequence[Temporary]) -> Findings:
    """Where the ranks' socket goes: the first place that will do."""
    usable = next((place for place in places if not place.problem), None)
    if usable is None:
        tried = ", ".join(f"{place.path} ({place.problem})" for place in places)
        text = f"no place for the ranks' socket: {tried}"
        return [error("tmpdir", text, "set TMPDIR to a short path on a local disk that you may write to")]
    found: Findings = []
    first = places[0]
    if first.is_first and first.problem:
        text = f"TMPDIR={first.path} cannot hold the ranks' socket: {first.problem}; {usable.path} is used instead"
        found.append(
            warning("tmpdir", text, "set TMPDIR to a short path (80 characters) on a local disk; containers have to see it too")
        )
    if usable.is_open:
        text = f"{usable.path}, where the ranks' socket is, is not yours alone: {usable.owner}"
        advice = f"chmod +t {usable.path}, or set TMPDIR to a directory of your own"
        found.append(
            warning("tmpdir-open", f"{text}: others may move it away, and the ranks would not find the supervisor", advice)
        )
    return found or [ok("tmpdir", f"the ranks' socket goes to {usable.path}")]


def versions(seen: Versions) -> Findings:
    """What is installed, and whether training and supervisor belong together."""
    libraries = ", ".join(f"{name} {version}" for name, version in seen.libraries.items())
    found = [ok("versions", f"ckpt-supervise {seen.package}, Python {seen.python}, {libraries}")]
    if not seen.training_python:
        return found
    if seen.training is None:
        text = f"{seen.training_python}, the `python` on PATH, could not be asked what it has"
        return [*found, unknown("versions", text, "see whether it starts at all")]
    theirs = seen.training.get("ckpt-supervise")
    if theirs is None:
        text = f"{seen.training_python}, the `python` on PATH, has no ckpt_client: training could not `import ckpt_client`"
        return [*found, note("versions-client", text, "pip install it there, unless your program saves by itself (--adopt)")]
    if theirs != seen.package:
        text = f"{seen.training_python}, the `python` on PATH, has ckpt-supervise {theirs}, and this is {seen.package}"
        return [*found, warning("versions-differ", text, "install the same version in both, best one environment for all")]
    return [*found, ok("versions", f"the same ckpt-supervise in {seen.training_python}")]
