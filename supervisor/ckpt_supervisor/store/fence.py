"""Who may commit to a checkpoint directory: one holder at a time, each with an epoch of its own.

Owns DIR/attempt and the marks DIR/.attempt-<epoch>. Must not ask Slurm. After a node failure the old coordinator may
still run somewhere while the next attempt has started: it finds a higher epoch on the disk and its commits are refused.

Epochs are never given twice, without locks, which many network file systems lack: an epoch is taken by creating its
mark, which fails if it is there. A mark is removed only by the holder of a higher one, so the highest never goes away.
Of two starts at the same moment the one with the lower mark goes first, and the other judges that mark like a holder.

A mark is a symbolic link whose target is the holder's JSON and points nowhere, as Emacs does for its locks: one system
call makes it, whole or not at all. A file (where there are no links) can be found empty, if its maker died in between.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import msgspec

from ckpt_supervisor.store.durable import sync_directory, write_file
from ckpt_supervisor.store.layout import ATTEMPT, claim_name, parse_claim, parse_partial
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, list_names, open_regular, read_up_to

HOLDER_BYTES_MAX = 64 * 1024
CLAIM_TRIES_MAX = 1_000
CLAIM_WAIT_MS = 20
CLAIM_WAITS_MAX = 10
"""How long an empty mark, which only a file can be, is given to be filled."""


class Holder(msgspec.Struct, frozen=True):
    """The coordinator that holds a directory.

    `pid_started` is in clock ticks after boot (proc(5)): pids are used again.
    """

    epoch: int
    job: str
    attempt: int
    step_id: str
    host: str
    pid: int
    pid_started: int


class HeldByOther(Exception):
    """Another job, or another step, is using this directory and is alive."""

    def __init__(self, holder: Holder) -> None:
        step = f" step {holder.step_id}" if holder.step_id else ""
        who = f"job {holder.job}{step} (attempt {holder.attempt}), process {holder.pid} on {holder.host}"
        super().__init__(f"in use by {who}")
        self.holder = holder


def take_epoch(root: str | os.PathLike[str], job: str, attempt: int, step_id: str) -> Holder:
    """Become the holder of this directory. Raises HeldByOther, or OSError."""
    directory = Path(root)
    _refuse_if_held(read_holder(directory), job, attempt)
    pid, host = os.getpid(), os.uname().nodename
    started = started_at(pid)
    mine = Holder(_highest_epoch(directory), job, attempt, step_id, host, pid, -1 if started is None else started)
    mine = _claim(directory, mine)
    try:
        for epoch in sorted(_claims(directory)):
            if epoch < mine.epoch:
                _refuse_if_held(_claimant(directory, epoch), job, attempt)
        _refuse_if_held(read_holder(directory), job, attempt)
    except HeldByOther:
        _remove_claim(directory, mine.epoch)
        raise
    fresh = directory / f"{claim_name(mine.epoch)}.new"
    try:
        write_file(fresh, msgspec.json.encode(mine) + b"\n")
        fresh.rename(directory / ATTEMPT)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A full disk must not keep a requeued job from starting: without DIR/attempt the highest mark decides (check_epoch).
        fresh.unlink(missing_ok=True)
        (directory / ATTEMPT).unlink(missing_ok=True)
    for epoch in _claims(directory):
        if epoch < mine.epoch:
            _remove_claim(directory, epoch)
    sync_directory(directory)
    return mine


def read_holder(root: str | os.PathLike[str]) -> Holder | None:
    """The holder on the disk; None if there is none or what is there is not readable as one. Raises OSError."""
    return _read(Path(root) / ATTEMPT)


def check_epoch(root: str | os.PathLike[str], epoch: int) -> bool:
    """Whether this epoch still holds the directory. Raises OSError when the disk cannot be looked at.

    With DIR/attempt gone (somebody tidied up) the highest mark decides: nobody else has started since, or it would be
    back.
    """
    holder = Patience().look(lambda: read_holder(root))
    if holder is not None:
        return holder.epoch == epoch
    return max(_claims(Path(root)), default=-1) == epoch


def is_alive(holder: Holder) -> bool:
    """Whether this holder is a live process of this host. Of another host nothing can be said: not alive."""
    return holder.host == os.uname().nodename and started_at(holder.pid) == holder.pid_started


def started_at(pid: int) -> int | None:
    """When a live process started, in clock ticks after boot; None if there is none. A zombie is not alive."""
    try:
        with Path(f"/proc/{pid}/stat").open("rb") as file:
            line = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses (proc(5))
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _refuse_if_held(holder: Holder | None, job: str, attempt: int) -> None:
    """An earlier attempt of the same job is on its way out (Slurm ended it): it is fenced off, not waited for."""
    if holder is None or holder.pid == os.getpid() or not is_alive(holder):
        return
    if holder.job != job or holder.attempt >= attempt:
        raise HeldByOther(holder)


def _claim(directory: Path, mine: Holder) -> Holder:
    """Create the mark of the first free epoch after the highest one seen."""
    for epoch in range(mine.epoch + 1, mine.epoch + 1 + CLAIM_TRIES_MAX):
        claimed = msgspec.structs.replace(mine, epoch=epoch)
        try:
            _make_mark(directory / claim_name(epoch), claimed)
        except FileExistsError:
            continue
        holder = read_holder(directory)
        if holder is None or holder.epoch < epoch:
            return claimed
        _remove_claim(directory, epoch)  # a slow start: others have come and gone since we looked
    raise FileExistsError(f"{CLAIM_TRIES_MAX} epochs after {mine.epoch} are taken")


def _make_mark(path: Path, holder: Holder) -> None:
    """Raises FileExistsError if it is there, OSError if neither a link nor a file can be made."""
    data = msgspec.json.encode(holder)
    try:
        path.symlink_to(data.decode())
    except FileExistsError:
        raise
    except OSError:  # no links on this file system, or the target is longer than its limit
        write_file(path, data, exclusive=True)


def _highest_epoch(directory: Path) -> int:
    """The highest epoch that any name in this directory, or its holder, tells of."""
    holder = read_holder(directory)
    partials = (parts[1] for parts in map(parse_partial, list_names(directory)) if parts is not None)
    return max((holder.epoch if holder is not None else 0, *_claims(directory), *partials))


def _claims(directory: Path) -> list[int]:
    return [epoch for epoch in map(parse_claim, list_names(directory)) if epoch is not None]


def _claimant(directory: Path, epoch: int) -> Holder | None:
    """Who made this mark; None if nobody who lived to fill it."""
    nobody_sets_this = threading.Event()
    for _ in range(CLAIM_WAITS_MAX):
        path = directory / claim_name(epoch)
        holder = _read_mark(path)
        if holder is not None or not os.path.lexists(path):
            return holder
        nobody_sets_this.wait(CLAIM_WAIT_MS / 1000)
    return None


def _read_mark(path: Path) -> Holder | None:
    try:
        return _decoded(os.fsencode(path.readlink()))
    except FileNotFoundError:
        return None
    except OSError:  # EINVAL: not a link
        return _read(path)


def _remove_claim(directory: Path, epoch: int) -> None:
    for name in (claim_name(epoch), f"{claim_name(epoch)}.new"):
        (directory / name).unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    try:
        fd = open_regular(path)
    except NotRegular:
        return None
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise
    try:
        return _decoded(read_up_to(fd, HOLDER_BYTES_MAX))
    finally:
        os.close(fd)


def _decoded(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
