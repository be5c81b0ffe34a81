"""Starts `ckpt-supervise` as a real process without Slurm, and waits for what it and its command do.

Owns: the process, its output in files, and looking into journal and store from outside. Every wait is for a fact, with a bound.
Must not: know what is right; tests do. Ends only what it started.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from ckpt_supervisor import store
from ckpt_supervisor.adapters.journal import read_lines

from tests.support.toy import chain

BOUND_S = 60.0
"""For facts that come within a second on an idle machine; a loaded one with two cores gets the rest."""

TORCH_ABORTED = "terminate called without an active exception"
"""Now and then torch 2.13 aborts with this while a process ends that has used gloo or a loader."""

ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT, 1)
"""What comes of it: the process's own end, a supervisor's status for it, and torchrun's."""

LOOK_S = 0.01
TOY = Path(__file__).resolve().parent / "toy.py"
SUPERVISE = (sys.executable, "-m", "ckpt_supervisor.cli")
_FOREIGN = re.compile(r"(SLURM|CKPT_SUPERVISE|TORCHELASTIC)_.*|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_.*|XDG_RUNTIME_DIR|TMPDIR")
_never = threading.Event()

_IDENTITY = frozenset({"job", "attempt", "step_id", "epoch", "task", "host", "pid"})

T = TypeVar("T")


def eventually(
    look: Callable[[], T | None],
    what: str,
    bound_s: float = BOUND_S,
    over: Callable[[], bool] | None = None,
    look_s: float = LOOK_S,
) -> T:
    """The first true value that `look` gives; fails with `what` when none comes in time, or none has come when it is `over`."""
    end = time.monotonic() + bound_s
    while True:
        is_over = over is not None and over()  # asked first: what was done before the end is seen
        found = look()
        if found:
            return found
        if is_over:
            raise AssertionError(f"it has ended without: {what}")
        if time.monotonic() >= end:
            raise AssertionError(f"not within {bound_s:g} s: {what}")
        _never.wait(look_s)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without Slurm, torchrun and options of ours, and with paths that hold in every directory."""
    env = {key: value for key, value in os.environ.items() if not _FOREIGN.fullmatch(key)}
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in env["PYTHONPATH"].split(os.pathsep) if part)
    return env | {"CKPT_SUPERVISE_STATE": _state()} | dict(extra or {})


@functools.cache
def _state() -> str:
    """Where supervisors of these tests meet, unless a test says another place: the user's own is not theirs to write into."""
    made = tempfile.mkdtemp(prefix="ckpt-state-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def is_alive(pid: int) -> bool:
    """Whether this process lives; a zombie does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def toy(*words: object) -> list[str]:
    """The command line of a toy trainer without torch."""
    return [sys.executable, str(TOY), "--no-torch", *map(str, words)]


def committed(directory: Path, step: int, rank: int = 0) -> Path:
    """A checkpoint that an earlier run of the toy might have left, made in no time."""
    directory.mkdir(parents=True, exist_ok=True)
    epoch = store.take_epoch(directory, "earlier", 0, "local").epoch
    partial = store.make_partial(directory, step, epoch, 1)
    name = f"toy-{rank:05d}.json"
    data = json.dumps({"step": step, "rank": rank, "value": chain(step, rank)}).encode()
    (partial / name).write_bytes(data)
    report, entries = store.check_files(partial, [store.Expected(name, len(data), "", rank)], mode="full")
    manifest = store.Manifest(
        step=step, world_size=1, ranks=(rank,), job="earlier", attempt=0, epoch=epoch, cause="periodic",
        created_at=datetime.now(timezone.utc).isoformat(), verified="full", files=entries,
    )  # fmt: skip
    outcome = store.commit(directory, partial, manifest)
    if not isinstance(outcome, store.Committed):
        raise AssertionError((report, outcome))  # noqa: TRY004 - a test's own failure
    # This process lives on: as the holder it would keep the next start out.
    for mark in (*directory.glob(".attempt-*"), directory / "attempt"):
        mark.unlink()
    return outcome.path


def has_ended(code: int, said: str) -> bool:
    """Whether training came to its end by itself: with 0, or by that fault of torch's when all that counts had been done."""
    return code == 0 or (code in ABORTED and TORCH_ABORTED in said)


@dataclasses.dataclass
class Run:
    """One started supervisor."""

    process: subprocess.Popen[bytes]
    dir: Path
    """The checkpoint directory."""
    files: Path
    """Where out, err and the toy's log are."""
    start: int = 0
    """Which start with these files it is; each has an out and an err of its own."""
    older: frozenset[Path] = frozenset()
    """Journals that were there before."""

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.process.pid

    @property
    def out(self) -> str:
        """What came on stdout so far; the command's too."""
        return (self.files / f"out-{self.start}").read_text()

    @property
    def err(self) -> str:
        """What came on stderr so far."""
        return (self.files / f"err-{self.start}").read_text(errors="replace")

    def signal(self, *numbers: int) -> None:
        """Signals to the supervisor alone, as with proctrack/cgroup."""
        for number in numbers:
            self.process.send_signal(number)

    def code(self, bound_s: float = BOUND_S) -> int:
        """Its exit status, once it has ended."""
        try:
            return self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the supervisor has not ended within {bound_s:g} s:{self.story()}") from None

    def said(self, pattern: str, bound_s: float = BOUND_S) -> re.Match[str]:
        """The first line of stdout, which the toy shares, that matches; waits for it."""
        expression = re.compile(pattern, re.MULTILINE)
        return self._eventually(lambda: expression.search(self.out), f"a line {pattern!r} on stdout", bound_s)

    def warned(self, pattern: str) -> re.Match[str]:
        """The same on stderr."""
        return self._eventually(lambda: re.search(pattern, self.err, re.MULTILINE), f"a line {pattern!r} on stderr", BOUND_S)

    def events(self, name: str = "", **fields: Any) -> list[dict[str, Any]]:
        """This start's events so far, by name and fields."""
        lines = [line for path in self.journals() if path not in self.older for line in read_lines(path)]
        return [line for line in lines if not name or line["event"] == name if fields.items() <= line.items()]

    def journals(self) -> list[Path]:
        """The journal files, oldest start first."""
        paths = (self.dir / "journal").glob("*.jsonl")
        return sorted(paths, key=lambda path: int(path.stem.split("-")[-2]))

    def event(self, name: str, bound_s: float = BOUND_S, **fields: Any) -> dict[str, Any]:
        """The newest such event; waits for one."""
        return self._eventually(lambda: self.events(name, **fields), f"event {name} {fields}", bound_s)[-1]

    def steps(self) -> list[int]:
        """Steps of the checkpoints there, oldest first; what their names promise only."""
        return sorted(candidate.step for candidate in store.scan(self.dir))

    def intact(self) -> list[int]:
        """Steps of those that are whole, every byte read."""
        there = store.scan(self.dir)
        return sorted(one.step for one in there if store.verify_checkpoint(one.path).verdict is store.Verdict.INTACT)

    def toy_pid(self) -> int:
        """The trainer's process, once it has attached."""
        return int(self.event("rank_hello")["rank_pid"])

    def toy_steps(self) -> list[int]:
        """The steps that the toy did, in order, of all starts with this log."""
        log = self.files / "toy.log"
        return [int(n) for n in re.findall(r"^step (\d+) ", log.read_text(), re.MULTILINE)] if log.exists() else []

    def reached(self, n: int) -> None:
        """Wait until the toy has done step n."""
        self._eventually(lambda: max(self.toy_steps(), default=0) >= n, f"step {n} of the toy", BOUND_S)

    def story(self) -> str:
        """Everything that helps to see why a test failed."""
        events = "\n".join(str({key: line[key] for key in line if key not in _IDENTITY}) for line in self.events())
        return f"\n--- err\n{self.err}\n--- out\n{self.out[-2000:]}\n--- journal\n{events}"

    def _eventually(self, look: Callable[[], T | None], what: str, bound_s: float) -> T:
        try:
            return eventually(look, what, bound_s, over=lambda: self.process.poll() is not None)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.story()}") from None


@contextlib.contextmanager
def supervised(
    files: Path,
    command: Sequence[str],
    *options: object,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
    outputs: tuple[int, int] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Run]:
    """A started supervisor over this command; on the way out it is killed if it still runs.

    `outputs` are descriptors for its stdout and stderr in place of files. `prefix` stands before its command line, and has to
    become it (exec).
    """
    files.mkdir(parents=True, exist_ok=True)
    place = directory if directory is not None else files / "ckpt"
    argv = [*prefix, *SUPERVISE, "--dir", str(place), *map(str, options), "--", *command]
    temporary = tempfile.mkdtemp(prefix="run-")  # Short, for the socket; a supervisor that is killed leaves its own behind.
    start = len(list(files.glob("out-*")))
    older = frozenset((place / "journal").glob("*.jsonl"))
    with (files / f"out-{start}").open("wb") as out, (files / f"err-{start}").open("wb") as err:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out if outputs is None else outputs[0],
            stderr=err if outputs is None else outputs[1],
            env=environment({"TMPDIR": temporary, **(env or {})}),
            cwd=files,
        )
    try:
        yield Run(process, place, files, start, older)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def trained(files: Path, *words: object, options: Sequence[object] = (), **more: Any) -> Iterator[Run]:
    """A started supervisor over the toy with these knobs, which logs its steps."""
    log = files / "toy.log"
    with supervised(files, toy("--log", log, *words), *options, **more) as run:
        yield run
