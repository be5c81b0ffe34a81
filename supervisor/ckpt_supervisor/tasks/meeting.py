"""Where the supervised steps of one job meet: small files in the user's state directory, one a step.

Owns those files. The last step that is done requeues the job, since a requeue ends the other steps' saves after KillWait
(docs/slurm.md, section 2). Also how `ckptctl` finds a job's checkpoint directory. When the state directory cannot be used, the
supervisor says so and goes on without. A file tells nothing about a dead process: its pid and start time are compared on the
same host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

FILE_BYTES_MAX = 10_000
STEPS_MAX = 1_000


def state_directory(env: Mapping[str, str]) -> Path:
    """$CKPT_SUPERVISE_STATE, else ckpt-supervise below the user's XDG state directory."""
    given = env.get("CKPT_SUPERVISE_STATE")
    if given:
        return Path(given)
    home = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or "/nonexistent") / ".local" / "state")
    return Path(home) / "ckpt-supervise"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Whether this step may requeue now, and which step it waits for otherwise."""

    ready: bool
    reason: str


class Meeting:
    """This step's place among the steps of its job. All calls may block on a disk: run them in a worker thread."""

    def __init__(self, directory: Path, job: str, step_id: str, attempt: int, where: str) -> None:
        self._jobs = directory / "jobs" / job
        self._file = self._jobs / f"{step_id}.json"
        self._call = self._jobs / f"requeue-{attempt}"
        self._back = self._jobs / f"resubmitted-{attempt}"
        self._step_id = step_id
        self._attempt = attempt
        self._where = where

    def announce(self, phase: str) -> str:
        """Say where this step stands; what went wrong, or ""."""
        record = {
            "phase": phase,
            "attempt": self._attempt,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "dir": self._where,
        }
        try:
            self._jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._file.with_suffix(f".{os.getpid()}.new")
            fresh.write_text(json.dumps(record))
            fresh.replace(self._file)
        except OSError as error:
            return f"{self._file}: {error.strerror}"
        return ""

    def meet(self) -> Verdict:
        """Say that this step is ready, and see whether any other one is still at work."""
        if self.announce("ready"):
            return Verdict(True, "the state directory cannot be used")
        try:
            names = sorted(path.name for path in self._jobs.iterdir())[:STEPS_MAX]
        except OSError as error:
            return Verdict(True, f"the state directory cannot be used: {error.strerror}")
        for name in names:
            if not name.endswith(".json") or name == self._file.name:
                continue
            if self._is_at_work(self._jobs / name):
                return Verdict(False, f"step {name.removesuffix('.json')} of this job is still at work")
        return self._first_to_call()

    def withdraw(self) -> None:
        """This step is over. Whoever comes later finds the job requeued already and does not call again."""
        try:
            self._file.unlink(missing_ok=True)
            if _is_this_process(_read(self._call)):
                self._call.unlink(missing_ok=True)
            if not any(path.suffix == ".json" for path in self._jobs.iterdir()):
                self._back.unlink(missing_ok=True)
            self._jobs.rmdir()
        except OSError:
            return  # Others are still there, or the directory cannot be used.

    def first_to_resubmit(self) -> bool:
        """Whether no other step has had the job resubmitted: each of them has its requeue refused, and one new job is enough."""
        try:
            self._back.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # The state directory cannot be used.
        return True

    def not_resubmitted(self) -> None:
        """That came to nothing: another step may try."""
        with contextlib.suppress(OSError):
            self._back.unlink(missing_ok=True)

    def _first_to_call(self) -> Verdict:
        """Of several steps that get ready in one moment the first one calls; a dead caller's place is taken over."""
        mine = json.dumps({"pid": os.getpid(), "started": _started(os.getpid()), "host": socket.gethostname()})
        fresh = self._call.with_suffix(f".{os.getpid()}.new")
        try:
            # Linked, not created: a caller's mark is never seen without its name in it.
            fresh.write_text(mine)
            try:
                self._call.hardlink_to(fresh)
            finally:
                fresh.unlink()
        except FileExistsError:
            caller = _read(self._call)
            if caller and not _is_this_process(caller) and _is_alive(caller):
                return Verdict(False, "another step of this job is calling requeue")
        except OSError as error:
            return Verdict(True, f"the state directory cannot be used: {error.strerror}")
        return Verdict(True, "")

    def _is_at_work(self, path: Path) -> bool:
        record = _read(path)
        if not record or record.get("phase") == "ready" or record.get("attempt") != self._attempt:
            return False
        return _is_alive(record)


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_alive(record: dict[str, object]) -> bool:
    """Whether the process behind a record lives. On another host that cannot be seen: then its word counts."""
    if record.get("host") != socket.gethostname():
        return True
    pid = record.get("pid")
    return isinstance(pid, int) and pid > 0 and _started(pid) is not None and _started(pid) == record.get("started")


def _is_this_process(record: dict[str, object]) -> bool:
    return record.get("pid") == os.getpid() and record.get("host") == socket.gethostname()


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot (proc_pid_stat(5), field 22); None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None
