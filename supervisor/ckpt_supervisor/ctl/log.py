"""`ckptctl log`: what happened, line by line, from the journals of a directory.

Owns its options, the words about what could not be read, and the wait for lines that come. What is wanted and how a line looks
is in view/log.py, their order in view/merging.py. Reads only; a directory that vanishes is waited for with --follow, and is
"could not look" without.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import select
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_supervisor.ctl.words import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNKNOWN, EXIT_USAGE, complain, could_not_look, out
from ckpt_supervisor.event_names import EVENTS

if TYPE_CHECKING:
    from ckpt_supervisor.view.clocks import Offset
    from ckpt_supervisor.view.log import Wanted
    from ckpt_supervisor.view.merging import Source
    from ckpt_supervisor.view.reading import File

FOLLOW_S = 0.5
"""`log --follow` looks for new lines this often."""

OLD_EVERY = 20
"""Files of earlier starts are looked at again once in so many looks: they grow no more."""

STARTS_WATCHED = 2
NAMES_SHOWN = 5
LEVELS = ("debug", "info", "warning", "error")

EPILOG = """\
exit status: 0 lines were shown, 1 none, 2 wrong usage, 3 could not look, 130 ended by ctrl-C

examples:
  ckptctl log                                 all of it
  ckptctl log --level warning --since 1d      what went wrong since yesterday
  ckptctl log --job 4711 --attempt 3          one attempt of one job
  ckptctl log --rank 9 --round 12             how far a rank came in a save
  ckptctl log --node node017 --follow         one node, as it happens
  ckptctl log --event commit --json | jq .step
"""


def add_log(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command's options."""
    log = kinds.add_parser(
        "log", parents=[common], help="what happened, line by line", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    log.add_argument("--job", help="only this job; of an array all elements; 4711.0 for one step")
    attempt = "only this attempt: 3, or 3#7 as timeline calls one of several"
    log.add_argument("--attempt", type=_attempt, metavar="N", help=attempt)
    for name in ("rank", "round"):
        log.add_argument(f"--{name}", type=_whole, metavar="N", help=f"only this {name}")
    log.add_argument("--node", metavar="HOST", help="only what this node wrote, or is about its tasks")
    log.add_argument("--event", action="append", default=[], metavar="NAME", help="only this event (may be repeated)")
    level = "least level (default: info; all with --event)"
    log.add_argument("--level", type=_level, choices=LEVELS, help=level)
    since = "from this time on: 2026-01-31T12:00:00 (UTC), 09:30 (today), or 30m, 2h30m, 1d ago"
    log.add_argument("--since", metavar="TIME", help=since)
    log.add_argument("--until", metavar="TIME", help="up to this time")
    log.add_argument("--grep", metavar="TEXT", help="only lines that hold this text, in whatever case")
    log.add_argument("--follow", "-f", action="store_true", help="go on with lines as they are written, over attempts that come")
    log.set_defaults(run=run)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _attempt(text: str) -> tuple[int, int | None]:
    """Its number, and its start where that is named."""
    number, hash_sign, epoch = text.partition("#")
    try:
        return _whole(number), _whole(epoch) if hash_sign else None
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no attempt: write 3, or 3#7 as timeline does") from None


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LEVELS)}")
    return text.lower()


def run(arguments: argparse.Namespace) -> int:
    """Show the lines that are asked for; the exit status."""
    wanted = _wanted(arguments)
    if wanted is None:
        return EXIT_USAGE
    shown = _Log(arguments, wanted)
    found = shown.look()
    if isinstance(found, int):
        if found != EXIT_NOT_FOUND or not arguments.follow or not shown.may_come:
            return found
        found = []
    shown.print(shown.merge.lines(found))
    if arguments.follow:
        shown.follow()
    return shown.conclude(found)


def _wanted(arguments: argparse.Namespace) -> Wanted | None:
    """What is asked for; None after a complaint."""
    from ckpt_supervisor.view.log import Wanted, read_time

    for name in ("job", "node", "since", "until", "grep", "event"):
        if getattr(arguments, name) == "" or (name == "event" and "" in arguments.event):
            complain(f"log: --{name} is empty: is a variable unset?")
            return None
    now = datetime.now(timezone.utc)
    try:
        since, until = (read_time(text, now) if text else None for text in (arguments.since, arguments.until))
    except ValueError as error:
        complain(f"log: {error}")
        return None
    # As it is printed: `rank written`.
    event = tuple(name.strip().lower().replace(" ", "_").replace("-", "_") for name in arguments.event)
    job, step_id = arguments.job or "", ""
    if "." in job:
        from ckpt_supervisor.watches import places

        with contextlib.suppress(ValueError):  # Then it is a name that no job has.
            job, step_id = places.parse_job(job)
    attempt, epoch = arguments.attempt or (None, None)
    return Wanted(
        job=job,
        step_id=step_id,
        attempt=attempt,
        epoch=epoch,
        rank=arguments.rank,
        round=arguments.round,
        node=arguments.node or "",
        event=event,
        level=arguments.level or ("debug" if event else "info"),
        since=since,
        until=until,
        grep=arguments.grep or "",
    )


class _Log:
    """One call: what was found, what was shown, and what is to be said about it."""

    def __init__(self, arguments: argparse.Namespace, wanted: Wanted) -> None:
        from ckpt_supervisor.view.log import Nodes
        from ckpt_supervisor.view.merging import Merge, Seen

        self._dir: Path = arguments.dir
        self._json: bool = arguments.json
        self._follows: bool = arguments.follow
        self._wanted = wanted
        self.seen = Seen()
        self._nodes = Nodes(self.seen.tasks)
        self.merge = Merge(wanted.sift(), self.seen, self._tell)
        self._is_terminal = sys.stdout.isatty()
        self._colour = self._is_terminal and arguments.colour
        self._shown = 0
        self._damaged = 0
        self._start: tuple[object, ...] = ()
        self.may_come = True
        """What is not there yet may come: nothing but a directory stands where one is awaited."""
        self._jobs: set[str] = set()

    def look(self) -> list[File] | int:
        """The files that may hold wanted lines; an exit status after a complaint, which is none where they are waited for."""
        from ckpt_supervisor.view.reading import listed

        try:
            files, foreign = listed(self._dir)
        except FileNotFoundError:
            if not self._follows:
                complain(f"no journals in {self._dir}")
            return EXIT_NOT_FOUND
        except NotADirectoryError:
            complain(f"no journals in {self._dir}, which is no directory or has none of that name")
            self.may_come = False
            return EXIT_NOT_FOUND
        except OSError as error:
            return could_not_look(self._dir, error)
        if foreign:
            complain(f"not read, as no journal has such a name: {_some(foreign)}")
        return self._chosen(files)

    def _chosen(self, files: Iterable[File]) -> list[File]:
        wanted, found = self._wanted, []
        for file in files:
            self._jobs.add(file.job)
            if wanted.takes_start(file.job, file.step_id, file.attempt, file.epoch):
                found.append(file)
        return found

    def print(self, lines: Iterator[tuple[Source, bytes]]) -> None:
        """Show what is wanted of these."""
        from ckpt_supervisor.view.log import heading, readable
        from ckpt_supervisor.view.reading import moment_ns, parse

        for source, raw in lines:
            line = parse(raw)
            if line is None:
                self._damaged += 1
                continue
            at_ns, offset = None, source.offset
            if offset is not None:
                at_ns = moment_ns(line.get("ts"))
                at_ns = None if at_ns is None else at_ns - offset.ns
            if not self._wanted.takes(line, at_ns, self._nodes):
                continue
            if self._json:
                if offset is not None and at_ns is not None:
                    out(json.dumps({**line, "corrected_ts": _stamp(at_ns)}, separators=(",", ":")))
                else:
                    out(_as_written(raw) or json.dumps(line, separators=(",", ":")))
            else:
                if self._is_terminal:
                    self._separate(line, heading)
                out(readable(line, self._colour, 0 if offset is None else offset.ns))
            self._shown += 1

    def _separate(self, line: dict[str, Any], heading: Any) -> None:
        """A heading where another start begins to tell."""
        start = (line.get("job"), line.get("step_id"), line.get("epoch"))
        if start == self._start:
            return
        if self._start:
            out("")
        self._start = start
        epoch = line.get("epoch")
        tasks = len([1 for source in self.merge.sources.values() if source.file.epoch == epoch])
        out(heading(line, tasks, self._colour))

    def follow(self) -> None:
        """Until ctrl-C: new lines, new files, and what was cut or replaced. A directory that vanishes is waited for."""
        is_lost, looks = not self.merge.sources, 0
        files: list[File] = []
        changed_ns: int | None = None
        while True:
            sys.stdout.flush()
            _pause()
            looks += 1
            is_thorough = not looks % OLD_EVERY
            try:
                files, changed_ns = self._look_again(files, None if is_thorough else changed_ns)
            except OSError as error:
                if not is_lost:
                    complain(f"{self._dir} cannot be looked at, waiting for it: {error.strerror or error}")
                is_lost = True
                continue
            if is_lost and self.merge.sources:
                complain(f"{self._dir} can be looked at again")
            is_lost = False
            new = [file for file in files if file.path.name not in self.merge.sources]
            epochs = sorted({file.epoch for file in files})[-STARTS_WATCHED:]
            if is_thorough and epochs:
                # A task that has come since may have a clock of its own.
                self.merge.measure([file for file in files if file.epoch == epochs[-1]])
            there = {file.path.name for file in files if is_thorough or file.epoch in epochs}
            known = [source for name, source in self.merge.sources.items() if name in there]
            self.print(self.merge.again(known))
            if new:
                self.print(self.merge.lines(new))

    def _look_again(self, files: list[File], changed_ns: int | None) -> tuple[list[File], int]:
        """The files that there are now, and when the directory was changed last: as long as it was not, it is not listed again.

        Raises OSError.
        """
        from ckpt_supervisor.view.reading import listed

        now_ns = (self._dir / "journal").stat().st_mtime_ns
        if now_ns == changed_ns:
            return files, now_ns
        return self._chosen(listed(self._dir)[0]), now_ns

    def _tell(self, offset: Offset, is_corrected: bool) -> None:
        """A difference of clocks that is large."""
        if not is_corrected:
            what = "its lines come after those of the attempt before, with their own times"
        elif self._json:
            what = "corrected_ts has the other one's time"
        else:
            what = f"its lines are shown by the clock of {offset.to_host}"
        complain(f"{offset.text}; {what}")

    def conclude(self, files: list[File]) -> int:
        """Say what was not read or not found; the exit status."""
        counts = [source.counts for source in self.merge.sources.values()]
        damaged = self._damaged + sum(count.damaged + count.torn for count in counts)
        if damaged:
            complain(f"{damaged} damaged or torn lines were skipped")
        if self.seen.newer:
            complain(f"written by a newer release (lines of version {self.seen.newer}): what is not known here is shown as it is")
        missing = self._missing(files)
        if missing:
            complain(f"incomplete: there is no journal of {_some(missing)}")
        for name, why in sorted(self.seen.unreadable.items())[:NAMES_SHOWN]:
            complain(f"incomplete: {name} cannot be read: {why}")
        if not self._shown:
            self._nothing(len(files))
        if self.seen.unreadable:
            return EXIT_UNKNOWN
        return EXIT_OK if self._shown else EXIT_NOT_FOUND

    def _missing(self, files: list[File]) -> list[str]:
        """Tasks whose coordinator tells of them, or that have to be there, without a file of theirs."""
        there: dict[int, set[int]] = {}
        names: dict[int, File] = {}
        for file in files:
            there.setdefault(file.epoch, set()).add(file.task)
            names[file.epoch] = file
        found = []
        for epoch, tasks in sorted(there.items()):
            awaited = {0: "", **self.seen.tasks.get(epoch, {})}
            file = names[epoch]
            for task, host in sorted(awaited.items()):
                if task not in tasks:
                    found.append(f"task {task} of {file.job}/{file.attempt}" + (f" ({host})" if host else ""))
        return found

    def _nothing(self, many: int) -> None:
        """No line was shown: which word of the question does not fit."""
        if not many:
            if self._jobs:
                complain(f"no line matches: there are journals of {_some(sorted(self._jobs))}")
            else:
                complain(f"no journals in {self._dir}")
            return
        counts = [source.counts for source in self.merge.sources.values()]
        if len(counts) == many and not self.seen.unreadable and not any(count.lines + count.torn for count in counts):
            complain("the journals are empty")
            return
        names = {name.decode(errors="replace") for name in self.seen.names}
        unknown = [name for name in self._wanted.event if name not in names and name not in EVENTS]
        if not unknown:
            complain("no line matches")
        for name in unknown:
            known = sorted(names | EVENTS)
            close = difflib.get_close_matches(name, known, NAMES_SHOWN) or [other for other in known if name and name in other]
            hint = f"; did you mean {', '.join(close[:NAMES_SHOWN])}?" if close else " (docs/journal.md lists all)"
            complain(f"no line matches: there is no event {name}{hint}")


def _as_written(raw: bytes) -> str:
    """The line itself where it is as harmless as JSON can be, else ""."""
    if not raw.isascii():
        return ""
    text = raw.decode("ascii")
    return text if text.isprintable() else ""


def _pause() -> None:
    """Wait until the next look. Raises BrokenPipeError when nobody reads any more: there may never be a line to notice it by."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # no descriptor behind it
        poll.register(sys.stdout.fileno(), 0)
    if any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(FOLLOW_S * 1_000)):
        raise BrokenPipeError


def _stamp(at_ns: int) -> str:
    """As the journal writes it."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1_000:06d}Z"


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
