"""Who may commit to a checkpoint directory: one holder at a time, each with an epoch of its own.

Owns DIR/attempt and the marks DIR/.attempt-<epoch>. Must not ask Slurm: of a holder whose process cannot be seen from
here somebody else is asked (`Ask`). After a node failure the old coordinator may
still run somewhere while the next attempt has started: it finds a higher epoch on the disk and its commits are refused.

Epochs are never given twice, without locks, which many network file systems lack: an epoch is taken by creating its
mark, which fails if it is there. A mark is removed only by the holder of a higher one, so the highest never goes away.
Of two starts at the same moment the one with the lower mark goes first, and the other judges that mark like a holder.

A mark is a symbolic link whose target is the holder's JSON and points nowhere, as Emacs does for its locks: one system
call makes it, whole or not at all. A file (where there are no links) can be found empty, if its maker died in between; on a
full disk it stays empty: it takes the epoch, and DIR/attempt, which is overwritten in place there, says whose that is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

import msgspec

from ckpt_supervisor.store.durable import sync_directory, write_file
from ckpt_supervisor.store.holder import (
    Ask,
    BegunSince,
    HeldByOther,
    Holder,
    can_be_seen,
    is_alive,
    pid_namespace,
    started_at,
)
from ckpt_supervisor.store.layout import ATTEMPT, claim_name, parse_claim, parse_partial
from ckpt_supervisor.store.look import NOT_THERE, NotRegular, Patience, list_names, open_regular, read_up_to
from ckpt_supervisor.store.place import Place

HOLDER_BYTES_MAX = 64 * 1024
CLAIM_TRIES_MAX = 1_000
CLAIM_WAIT_MS = 20
CLAIM_WAITS_MAX = 10
"""How long an empty mark, which only a file can be, is given to be filled."""

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def take_epoch(
    root: str | os.PathLike[str], job: str, attempt: int, step_id: str, ask: Ask | None = None, continues: str = ""
) -> Holder:
    """Become the holder of this directory. Raises HeldByOther (BegunSince if it was lost while this ran), or OSError.

    `ask` judges holders that cannot be judged from here; without it they count as gone. The job `continues` is fenced off
    even if it is alive.
    """
    directory = Path(root)
    mine = _myself(job, attempt, step_id)
    _refuse_if_held(read_holder(directory), mine, ask, continues)
    mine = _claim(directory, msgspec.structs.replace(mine, epoch=_highest_epoch(directory)))
    try:
        for epoch in sorted(_claims(directory)):
            if epoch < mine.epoch:
                _refuse_if_held(_claimant(directory, epoch), mine, ask, continues)
        _refuse_if_held(read_holder(directory), mine, ask, continues)
    except (HeldByOther, OSError):
        with contextlib.suppress(OSError):  # A start that has failed holds nothing; what went wrong first is what is told.
            _remove_claim(directory, mine.epoch)
        raise
    lost = None
    try:
        is_written = _write_holder(directory, mine)
    except FileNotFoundError as error:  # Whoever begins later removes what lower epochs have left; or a rename's answer was lost.
        is_written, lost = read_holder(directory) == mine, error
    if is_written:
        _tidy(directory, mine.epoch)
    # A failed sync refuses no start: who looks sees the mark, and each commit syncs the directory again before it counts.
    # All that a power cut can take is a start under which nothing was committed, and its epoch may then name another one.
    with contextlib.suppress(OSError):
        sync_directory(directory)
    newer = _begun_since(directory, mine)
    if newer is None and (is_written or lost is None):
        return mine
    with contextlib.suppress(OSError):
        _remove_claim(directory, mine.epoch)
    if newer is not None:
        raise BegunSince(newer)
    assert lost is not None
    raise lost


def retake_epoch(root: str | os.PathLike[str], epoch: int, job: str, attempt: int, step_id: str, place: Place) -> bool:
    """Hold a directory again that was removed, or emptied, under its holder; whether this run holds it now. Raises OSError.

    Only where nobody else is, and only the one that was taken, or one in its stead. Whoever starts at the same moment finds this
    mark or DIR/attempt, or its own mark is removed, as by any later start.
    """
    directory = Path(root)
    mine = msgspec.structs.replace(_myself(job, attempt, step_id), epoch=epoch)
    if not place.may_be_taken_anew(directory) or ATTEMPT in _names(directory) or _claims(directory):
        return False
    try:
        _make_mark(directory / claim_name(epoch), mine)
    except FileExistsError:
        return False
    try:
        if _claims(directory) != [epoch] or ATTEMPT in _names(directory):
            _remove_claim(directory, epoch)
            return False
        if _write_holder(directory, mine):
            _tidy(directory, epoch)
    except OSError:
        with contextlib.suppress(OSError):  # As at a start: what has failed holds nothing.
            _remove_claim(directory, epoch)
        raise
    with contextlib.suppress(OSError):
        sync_directory(directory)
    return check_epoch(directory, epoch)


def read_holder(root: str | os.PathLike[str]) -> Holder | None:
    """The holder on the disk; None if there is none or what is there is not readable as one. Raises OSError."""
    return Patience().look(lambda: _read(Path(root) / ATTEMPT))


def check_epoch(root: str | os.PathLike[str], epoch: int) -> bool:
    """Whether this epoch still holds the directory. Raises OSError when the disk cannot be looked at.

    With DIR/attempt gone (somebody tidied up) the highest mark decides: nobody else has started since, or it would be
    back. So it does when an older one has come back: a network file system may do that (field case 105), and a slow start
    that writes its own after a later one has. The older one knows by its mark, which the later one has removed.
    """
    holder = read_holder(root)
    if holder is not None and holder.epoch > epoch:
        return False
    marks = _claims(Path(root))
    is_highest = max(marks, default=-1) <= epoch
    if holder is not None and holder.epoch == epoch:
        return is_highest or epoch in marks
    return is_highest and epoch in marks


def _myself(job: str, attempt: int, step_id: str) -> Holder:
    pid = os.getpid()
    started = started_at(pid)
    return Holder(0, job, attempt, step_id, os.uname().nodename, pid, -1 if started is None else started, pid_namespace())


def _refuse_if_held(holder: Holder | None, mine: Holder, ask: Ask | None, continues: str) -> None:
    """An earlier attempt of the same job is on its way out (Slurm ended it): it is fenced off, not waited for."""
    if holder is None or (holder.host, holder.pid, holder.pid_started) == (mine.host, mine.pid, mine.pid_started):
        return
    is_same_job = holder.job == mine.job
    if (is_same_job and holder.attempt < mine.attempt) or (continues and holder.job == continues):
        return
    if is_alive(holder):
        raise HeldByOther(holder)
    if is_same_job and (holder.attempt, holder.step_id) == (mine.attempt, mine.step_id):
        return  # The same srun, and it has one task 0: that one is gone.
    # Another job may come back although its process is gone from here: it has been requeued. A step does not.
    why = ask(holder) if ask is not None and not (is_same_job and can_be_seen(holder)) else ""
    if why:
        raise HeldByOther(holder, why)


def _claim(directory: Path, mine: Holder) -> Holder:
    """Create the mark of the first free epoch after the highest one seen."""
    for epoch in range(mine.epoch + 1, mine.epoch + 1 + CLAIM_TRIES_MAX):
        claimed = msgspec.structs.replace(mine, epoch=epoch)
        try:
            _make_mark(directory / claim_name(epoch), claimed)
        except FileExistsError:
            continue
        try:
            holder = read_holder(directory)
        except OSError:
            with contextlib.suppress(OSError):
                _remove_claim(directory, epoch)
            raise
        if holder is None or holder.epoch < epoch:
            return claimed
        _remove_claim(directory, epoch)  # a slow start: others have come and gone since we looked
    raise FileExistsError(f"{CLAIM_TRIES_MAX} epochs after {mine.epoch} are taken")


def _make_mark(path: Path, holder: Holder) -> None:
    """Raises FileExistsError if it is there, OSError if neither a link nor a file can be made.

    On a full disk a file is left empty. It takes the epoch all the same, and only the file that this call has made counts:
    who cannot make one, not even empty, has no epoch.
    """
    data = msgspec.json.encode(holder)
    try:
        path.symlink_to(data.decode())
    except FileExistsError:
        raise
    except OSError:  # no links on this file system, or the target is longer than its limit
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            try:
                _fill(fd, data)
            finally:
                os.close(fd)  # NFS tells of a full disk only here.
        except OSError as error:
            if error.errno not in _NO_SPACE:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise


def _fill(fd: int, data: bytes) -> None:
    """Write this over what the file begins with, which is where it was opened. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.fsync(fd)


def _write_holder(directory: Path, mine: Holder) -> bool:
    """Put the holder's word into DIR/attempt. False if the disk is so full that there is none now. Raises OSError.

    Written whole under a name of its own and renamed; tried again, since every try writes everything anew.
    """
    fresh = directory / f"{claim_name(mine.epoch)}.new"
    data = msgspec.json.encode(mine) + b"\n"

    def renamed() -> None:
        write_file(fresh, data)
        fresh.rename(directory / ATTEMPT)

    try:
        Patience().look(renamed)
        return True
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
    # A full disk must not keep a requeued job from starting: the sweep of old partials, which frees space, comes after this.
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
    if _overwritten(directory / ATTEMPT, data):
        return True
    # Without DIR/attempt the highest mark decides (check_epoch); the lower ones stay, or a slow start could take theirs again.
    Patience().look(lambda: (directory / ATTEMPT).unlink(missing_ok=True))
    return False


def _overwritten(path: Path, data: bytes) -> bool:
    """Whether an older holder's file could be written over: its block is there. Cut in between it is nobody's: marks decide."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        try:
            seen = os.fstat(fd)
            if not stat.S_ISREG(seen.st_mode) or seen.st_size > HOLDER_BYTES_MAX:
                return False
            _fill(fd, data.ljust(seen.st_size))  # Blanks over the rest of a longer one: JSON may end in them.
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def _tidy(directory: Path, epoch: int) -> None:
    """Remove what lower epochs have left. What cannot be removed is left to the next start: DIR/attempt says who holds."""
    patience = Patience()
    try:
        lower = [older for older in _left_by(directory) if older < epoch]
    except OSError:
        return
    for older in lower:
        with contextlib.suppress(OSError):
            patience.look(lambda older=older: _remove_claim(directory, older))  # type: ignore[misc]


def _highest_epoch(directory: Path) -> int:
    """The highest epoch that any name in this directory, or its holder, tells of."""
    holder = read_holder(directory)
    partials = (parts[1] for parts in map(parse_partial, _names(directory)) if parts is not None)
    return max((holder.epoch if holder is not None else 0, *_left_by(directory), *partials))


def _names(directory: Path) -> list[str]:
    return Patience().look(lambda: list_names(directory))


def _claims(directory: Path) -> list[int]:
    return [epoch for epoch in map(parse_claim, _names(directory)) if epoch is not None]


def _left_by(directory: Path) -> set[int]:
    """Epochs of marks, and of starts that died while they wrote DIR/attempt: a power cut may have taken the mark alone."""
    names = (parse_claim(name.removesuffix(".new")) for name in _names(directory))
    return {epoch for epoch in names if epoch is not None}


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
        return _decoded(os.fsencode(Patience().look(path.readlink)))
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        if error.errno != errno.EINVAL:  # That it is no link. Of anything else nobody may conclude that there is no holder.
            raise
    return Patience().look(lambda: _read(path))


def _begun_since(directory: Path, mine: Holder) -> Holder | None:
    """Who has begun since and goes before this start. None where nobody has, or nobody can look: each commit looks again.

    One that is not through yet, and is going to refuse itself for this one, is given its time to be gone.
    """
    nobody_sets_this = threading.Event()
    newest = mine
    for _ in range(CLAIM_WAITS_MAX):
        try:
            if check_epoch(directory, mine.epoch):
                return None
            named = (read_holder(directory), *(_claimant(directory, epoch) for epoch in _claims(directory)))
        except OSError:
            return None
        newest = max((mine, *(one for one in named if one is not None)), key=lambda one: one.epoch)
        nobody_sets_this.wait(CLAIM_WAIT_MS / 1000)
    return newest if newest.epoch > mine.epoch else None


def _remove_claim(directory: Path, epoch: int) -> None:
    # The mark last: by it the other one is found, if this process dies in between.
    for name in (f"{claim_name(epoch)}.new", claim_name(epoch)):
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
