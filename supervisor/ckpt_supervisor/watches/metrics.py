"""The watch that shows numbers of the run to Prometheus: --metrics-file for node_exporter's textfile collector, --metrics-port.

Owns the file, when it is written, and what is said when it cannot be. Must not cost a run anything: what the library does is done
in a lane or in the port's thread; a directory that is gone, a full disk or a port in use is told once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_client import wire

from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.lines import Lines
from ckpt_supervisor.watches.numbers import Numbers

if TYPE_CHECKING:  # With prometheus-client: imported in the lane.
    from ckpt_supervisor.watches.exposition import Shown

LANE = "metrics"

END_MS = 2_000
"""The last file may take so long."""

EVERY_MS = 15_000
"""The file is written this often, also when nothing has changed: its age (`node_textfile_mtime_seconds`) shows a dead run."""

STUCK_MS = 5_000
"""A write that takes longer hangs on its disk, and is not waited for in the end."""

AT_ONCE = frozenset({"command_started", "notice", "commit", "exit"})
"""At these it is written now: somebody may be waiting for it, and after the last nothing comes."""

FILE_MODE = 0o644


class Metrics:
    """The watch."""

    def __init__(self, launch: Launch, lanes: Lanes, lines: Lines) -> None:
        self._launch = launch
        self._lanes = lanes
        self._lines = lines
        self._numbers = Numbers()
        self._shown: Shown | None = None
        """Made and used in the lane and the port's thread only."""
        self._path = path_of(launch) if launch.options.metrics_file else None
        self._began_ms: int | None = None
        """When the write began that is under way."""
        self._again = False
        self._serves = launch.options.metrics_port is None
        """Or has tried to; or is not to."""
        self._at_ms: int | None = 0
        self._told: set[str] = set()
        if launch.joined is not None:
            self._numbers.phase = ""
        lines.listen(self.told)

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When the file is to be written next."""
        return (self._at_ms,)

    @property
    def lanes_at_end(self) -> dict[str, int]:
        """What the end waits for, and how long."""
        is_stuck = self._began_ms is not None and _now_ms() - self._began_ms > STUCK_MS
        return {} if is_stuck else {LANE: END_MS}

    def look(self, now_ms: int) -> None:
        """Have the file written, if it is time; begin to answer, if that is asked for."""
        if self._at_ms is None or now_ms < self._at_ms:
            return
        self._at_ms = now_ms + EVERY_MS if self._path is not None else None
        if not self._serves:
            self._serves = True
            self._lanes.post(LANE, "--metrics-port", self._serve, self._served)
        self._write()

    def heard(self, word: wire.Said) -> None:
        """What ranks say comes as lines."""

    def told(self, entry: Entry, at: Stamp) -> None:
        """Hear a line of the journal."""
        self._numbers.take(entry, at)
        if entry.event in AT_ONCE:
            self._write()

    # --- the file -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        path = self._path
        if path is None:
            return
        if self._began_ms is not None:
            self._again = True  # One at a time; what has changed since is written after it.
            return

        def written(problem: str | Broken) -> None:
            self._began_ms = None
            if isinstance(problem, Broken):
                problem = f"{problem.what}: {type(problem.error).__name__}: {problem.error}"
            if self._again:
                self._again = False
                self._write()
            if problem:
                self._tell("file", f"--metrics-file {path}: {problem}; the run goes on without it")

        def work() -> str:
            problem = self._put(path)
            if self._again:
                self._again = False
                problem = self._put(path)
            return problem

        self._began_ms = _now_ms()
        self._lanes.post(LANE, "--metrics-file", work, written, wakes=False)

    def _put(self, path: Path) -> str:
        """In the lane: write it whole, or leave what is there."""
        try:
            put(path / file_name(self._launch) if path.is_dir() else path, self._showing().text())
        except OSError as error:
            return error.strerror or str(error)
        return ""

    # --- the port -------------------------------------------------------------------------------------------------------

    def _serve(self) -> int:
        """In the lane: begin to answer; the port."""
        from ckpt_supervisor.watches import scrape

        options, slurm = self._launch.options, self._launch.job.slurm
        assert options.metrics_port is not None
        # Of several tasks on one node each has its own.
        number = options.metrics_port + (slurm.localid if options.metrics_port and slurm is not None else 0)
        listener = scrape.listen(number)
        scrape.serve(listener, self._showing().negotiated)
        return int(listener.getsockname()[1])

    def _served(self, result: int | Broken) -> None:
        asked = f"--metrics-port {self._launch.options.metrics_port}"
        if isinstance(result, Broken):
            reason = getattr(result.error, "strerror", None) or str(result.error)
            self._tell("port", f"{asked}: {reason}; the run goes on without it")
            return
        self._lines.log(Entry("metrics_served", "info", {"url": f"http://127.0.0.1:{result}/metrics", "port": result}))

    # --- both -----------------------------------------------------------------------------------------------------------

    def _showing(self) -> Shown:
        """In the lane."""
        if self._shown is None:
            # Not while the command is being forked: the modules that this imports bring handlers of forks with them.
            with self._launch.claims.forking():
                from importlib.metadata import version

                from ckpt_supervisor.watches.exposition import Shown
            job, options = self._launch.job, self._launch.options
            labels = {"job_id": job.name, "attempt": str(job.attempt), "task": str(job.task)}
            info = {
                "version": version("ckpt-supervise"),
                "host": os.uname().nodename,
                "step_id": job.step_id,
                "epoch": str(self._launch.epoch),
                "dir": os.fsencode(options.dir).decode(errors="replace"),
            }
            self._shown = Shown(self._numbers, labels, info, lambda: self._lines.lost)
        return self._shown

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            say(text)
            self._lines.log(Entry("metrics_failed", "warning", {"what": what, "text": text}))


def path_of(launch: Launch) -> Path:
    """The file, or the directory that it is to be in."""
    job = launch.job
    text = launch.options.metrics_file
    for name, value in (("job", job.name), ("task", str(job.task)), ("attempt", str(job.attempt))):
        text = text.replace(f"{{{name}}}", value.replace("/", "_"))
    return Path(text) / file_name(launch) if text.endswith("/") else Path(text)


def file_name(launch: Launch) -> str:
    """In a directory that several runs share."""
    return f"ckpt_supervise-{launch.job.name}-{launch.job.task}.prom".replace("/", "_")


def put(path: Path, data: bytes) -> None:
    """Replace the file by this at once, readable by all: node_exporter is another user. Raises OSError.

    The name in between does not end with .prom, so nobody reads it. No fsync: after a crash of the node nobody wants it.
    """
    made = path.with_name(f".{path.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        made.unlink()  # Of a process that had our number before.
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor.
            os.fchmod(fd, FILE_MODE)  # Whatever the umask is.
            file.write(data)
        os.replace(made, path)  # noqa: PTH105 - the pair of os.open above.
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink()
        raise


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
