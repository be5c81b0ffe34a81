"""`ckptctl drill`: rehearses every way in which a job is interrupted, on the user's own command.

Owns its command line, the scratch directory, and who runs when; what is played is in drill/. Must not touch the user's own
checkpoints: everything lies in a fresh directory beside them, which is removed in the end. Slurm is played, and where there is
one it is asked for the times that it gives; with --cluster it runs jobs of the drill's own, with --job a job gets a signal.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_USAGE,
    Interrupt,
    complain,
    out,
    out_json,
    width_of,
)

if TYPE_CHECKING:
    from ckpt_supervisor.config import Options
    from ckpt_supervisor.drill.picture import Progress
    from ckpt_supervisor.drill.plan import Plan
    from ckpt_supervisor.drill.rehearse import Ground
    from ckpt_supervisor.drill.site import Site
    from ckpt_supervisor.drill.verdict import Result

KILL_WAIT_MS = 30_000
GRACE_MS = 30_000
"""Where there is no site to ask: Slurm's own default of KillWait, and a usual grace."""

START_MS = 600_000
WARNING_MS = 120_000
"""As `--signal=USR1@120`."""

SIDE_BY_SIDE_MAX = 16

EPILOG = """\
paths:
{paths}

{{scratch}} in COMMAND stands for a directory of its own on each path: for programs that write somewhere by themselves.

exit status: 0 all paths PASS; 1 one is a FAIL; 2 wrong usage, nothing was started; 130 ctrl-C

examples:
  ckptctl drill -- python train.py                                          all paths, without Slurm
  ckptctl drill --options "--every-steps 500" --grace 60s -- python train.py
  ckptctl drill --path warning,nodeloss --json -- python train.py
  ckptctl drill --cluster --sbatch-args "-p gpu --gpus 1" -- python train.py    short jobs on the real Slurm
  ckptctl drill --job 4711                                                  a job of yours that runs: saves, and trains on
"""


def add(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command line of `drill`."""
    from ckpt_supervisor.drill.plan import NAMES, PATHS

    listed = "\n".join(f"  {path.name:<9} {path.plays}" for path in PATHS)
    drill = kinds.add_parser(
        "drill",
        parents=[common],
        help="rehearse every kind of interruption on your own command",
        usage="ckptctl drill [options] -- COMMAND...",
        epilog=EPILOG.format(paths=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drill.add_argument("--path", metavar="NAMES", default=",".join(NAMES), help="only these paths, apart by commas")
    drill.add_argument("--options", metavar="TEXT", default="", help="options of ckpt-supervise, as the job script has them")
    drill.add_argument("--scratch", metavar="PLACE", help="make the scratch directory in here (default: beside DIR)")
    drill.add_argument("--keep-files", action="store_true", help="leave the scratch directory there")
    for name, what in (
        ("grace", "GraceTime (default: the partition's, else 30s)"),
        ("kill-wait", "KillWait (default: the site's, else 30s)"),
        ("warning", "how long before the limit the warning comes (default: 2m)"),
        ("limit", "time limit of path limit (default: what a start and --lead need)"),
        ("start-timeout", "bound on the start, and on the next step boundary (default: 10m)"),
    ):
        drill.add_argument(f"--{name}", metavar="TIME", help=what)
    drill.add_argument("--partition", metavar="NAME", default="", help="whose GraceTime counts (default: the site's default)")
    drill.add_argument("--side-by-side", metavar="N", type=int, default=1, help="rehearse so many paths at a time (default: 1)")
    drill.add_argument("--cluster", action="store_true", help="submit short jobs of its own to the real Slurm")
    drill.add_argument("--sbatch-args", metavar="TEXT", default="", help="with --cluster: options of sbatch, as -p, -A, --gpus")
    drill.add_argument("--preempt-with", metavar="TEXT", default="", help="with --cluster: sbatch options of a job that preempts")
    drill.add_argument("--job", metavar="JOB", help="rehearse on a job of yours that runs: it saves, and trains on")
    drill.add_argument("command", nargs="*", metavar="COMMAND", help="the training command, after --")
    drill.set_defaults(run=run)


class _Wrong(Exception):
    """Wrong usage; the message says what."""


def run(arguments: argparse.Namespace) -> int:
    """Rehearse; the exit status."""
    try:
        if arguments.job:
            return _on_a_job(arguments)
        plan, paths = plan_of(arguments)
        _can(plan, paths, arguments)
    except _Wrong as error:
        for line in str(error).splitlines():
            complain(f"drill: {line}")
        return EXIT_USAGE
    with _scratch(arguments) as root, _stoppable() as stop:
        results = _rehearse_all(plan, paths, root, arguments, stop)
        if stop.is_set():
            return EXIT_INTERRUPTED
        _show(results, arguments)
    return EXIT_OK if all(result.passed for result in results) else EXIT_NOT_FOUND


def _on_a_job(arguments: argparse.Namespace) -> int:
    """--job: neither a plan nor a scratch directory. Raises _Wrong."""
    from ckpt_supervisor.drill import running

    problems: list[str] = []
    wait_ms = _time(arguments, "start_timeout", problems)
    if arguments.command or arguments.cluster:
        problems.append("--job disturbs a job that runs: it takes neither a command nor --cluster")
    if problems:
        raise _Wrong("\n".join(problems))
    result = running.run(arguments, wait_ms or START_MS)
    if isinstance(result, int):
        return result
    _show([result], arguments)
    return EXIT_OK if result.passed else EXIT_NOT_FOUND


def plan_of(arguments: argparse.Namespace) -> tuple[Plan, tuple[str, ...]]:
    """What was asked for. Raises _Wrong with all that is wrong."""
    from ckpt_supervisor.drill import plan, site

    problems: list[str] = []
    times = {name: _time(arguments, name, problems) for name in ("grace", "kill_wait", "warning", "limit", "start_timeout")}
    paths = plan.named(arguments.path)
    if isinstance(paths, str):
        problems.append(paths)
    if not 1 <= arguments.side_by_side <= SIDE_BY_SIDE_MAX:
        problems.append(f"--side-by-side {arguments.side_by_side}: give a number from 1 to {SIDE_BY_SIDE_MAX}")
    if not arguments.command or not arguments.command[0]:
        problems.append("no command: write it after --, as in: ckptctl drill -- python train.py")
    options, words = _options(arguments, problems)
    if problems or options is None or isinstance(paths, str):
        raise _Wrong("\n".join(problems))
    found: site.Site = site.ask(arguments.environ, arguments.partition or arguments.environ.get("SLURM_JOB_PARTITION", ""))
    made = plan.Plan(
        options=options,
        words=words,
        command=tuple(arguments.command),
        grace_ms=times["grace"] or found.grace_ms or GRACE_MS,
        kill_wait_ms=times["kill_wait"] or found.kill_wait_ms or KILL_WAIT_MS,
        warning_ms=times["warning"] or WARNING_MS,
        limit_ms=times["limit"],
        start_ms=times["start_timeout"] or START_MS,
        proctrack=found.proctrack or "cgroup",
        requeue_exit=found.requeue_exit,
    )
    return made, _given(paths, times["grace"], found, arguments)


def _given(paths: tuple[str, ...], grace_ms: int | None, found: Site, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Without a path that this site does not have, unless it was asked for."""
    from ckpt_supervisor.drill.plan import NAMES

    if grace_ms is None and found.grace_ms == 0 and arguments.path == ",".join(NAMES):
        complain(f"drill: partition {found.partition} has no GraceTime: path grace is left out (--grace TIME, --partition NAME)")
        return tuple(name for name in paths if name != "grace")
    return paths


def _time(arguments: argparse.Namespace, name: str, problems: list[str]) -> int | None:
    from ckpt_supervisor.config_text import positive_ms

    text = getattr(arguments, name)
    if text is None:
        return None
    try:
        return positive_ms(text)
    except ValueError as error:
        problems.append(f"--{name.replace('_', '-')}: {error}")
        return None


def _options(arguments: argparse.Namespace, problems: list[str]) -> tuple[Options | None, tuple[str, ...]]:
    """The options of ckpt-supervise as it would read them, and as they are handed to it."""
    from ckpt_supervisor.config import UsageError, read_options

    try:
        words = shlex.split(arguments.options)
    except ValueError as error:
        problems.append(f"--options: {error}")
        return None, ()
    names = {word.partition("=")[0] for word in words}
    if "--" in words or names & {"--dir", "--continues"}:
        problems.append("--options: neither --dir nor --continues nor --: the drill has a directory and a command of its own")
        return None, ()
    try:
        options = read_options([*words, "--dir", tempfile.gettempdir(), "--", "true"], arguments.environ)
    except UsageError as error:
        problems += [f"--options: {problem}" for problem in error.problems]
        return None, ()
    outside = [pattern for pattern in options.adopt if pattern.startswith("/")]
    if outside:
        problems.append(
            f"--adopt {outside[0]}: that is where your own checkpoints are; let COMMAND write to {{scratch}} and give a pattern "
            "below --dir"
        )
    return options, tuple(words)


def _can(plan: Plan, paths: Sequence[str], arguments: argparse.Namespace) -> None:
    """Whether it can begin at all. Raises _Wrong."""
    if arguments.cluster:
        from ckpt_supervisor.drill import cluster

        problem = cluster.missing(arguments.environ)
        if problem:
            raise _Wrong(problem)
    elif shutil.which(plan.command[0], path=arguments.environ.get("PATH")) is None:
        raise _Wrong(f"{plan.command[0]!r} was not found, or cannot be run")
    if "limit" in paths and plan.lead_ms is None:
        complain("drill: with --lead off nothing watches the time limit: path limit will lose what KillWait cannot save")


@contextlib.contextmanager
def _scratch(arguments: argparse.Namespace) -> Iterator[Path]:
    """A fresh directory on the file system of the real ones, so that times are those of it."""
    place = Path(arguments.scratch).absolute() if arguments.scratch else arguments.dir.absolute().parent
    try:
        while not place.is_dir() and not arguments.scratch:
            place = place.parent
        root = Path(tempfile.mkdtemp(prefix=".ckpt-drill-", dir=place))
    except OSError as error:
        complain(f"drill: no scratch directory can be made in {place}: {error.strerror}; name a place with --scratch")
        raise SystemExit(EXIT_USAGE) from error
    complain(f"drill: scratch directory {root}" + ("" if arguments.keep_files else ", removed in the end (--keep-files)"))
    try:
        yield root
    finally:
        if not arguments.keep_files:
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _stoppable() -> Iterator[Interrupt]:
    """ctrl-C, and the signals with which a terminal or a batch system ends us: everything is ended in order first."""
    stop = Interrupt()
    before = {number: signal.signal(number, stop.take) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _rehearse_all(plan: Plan, paths: Sequence[str], root: Path, arguments: argparse.Namespace, stop: Interrupt) -> list[Result]:
    """All paths, so many at a time; in the order in which they are shown."""
    from ckpt_supervisor.drill.picture import Progress

    progress = Progress(sys.stderr, width_of(sys.stderr.fileno()) if sys.stderr.isatty() else None)
    with concurrent.futures.ThreadPoolExecutor(arguments.side_by_side) as pool:
        started = [
            pool.submit(_rehearse, plan, path, (root, place), arguments, (progress, stop)) for place, path in enumerate(paths)
        ]
        found = [future.result() for future in started]
    progress.clear()
    return [result for result in found if result is not None]


def _rehearse(
    plan: Plan, path: str, where: tuple[Path, int], arguments: argparse.Namespace, told: tuple[Progress, Interrupt]
) -> Result | None:
    """One path; None if it was stopped."""
    from ckpt_supervisor.drill.rehearse import Rehearsal, StoppedError
    from ckpt_supervisor.drill.verdict import judge

    (root, place), (progress, stop) = where, told
    if stop.is_set():
        return None
    own = root / path
    own.mkdir()
    ground = _ground(plan, own, place, arguments)
    try:
        return judge(Rehearsal(path, plan, ground, lambda what: progress.tell(path, what), stop.is_set).run(), plan)
    except StoppedError:
        return None
    finally:
        progress.tell(path, "")
        if not arguments.keep_files:
            shutil.rmtree(own, ignore_errors=True)  # Checkpoints of eight paths may be much.


def _ground(plan: Plan, own: Path, place: int, arguments: argparse.Namespace) -> Ground:
    if arguments.cluster:
        from ckpt_supervisor.drill.cluster import ClusterGround

        more = shlex.split(arguments.sbatch_args), shlex.split(arguments.preempt_with)
        return ClusterGround(own, plan, arguments.environ, *more)
    from ckpt_supervisor.drill.local import LocalGround

    return LocalGround(own, place, plan, arguments.environ)


def _show(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for result in results:
            out_json(msgspec.to_builtins(result))
        return
    from ckpt_supervisor.drill.picture import table

    letters = not (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")
    for line in table(results, letters=letters, colour=sys.stdout.isatty() and arguments.colour):
        out(line)
    failed = [result.path for result in results if not result.passed]
    out(f"{len(results) - len(failed)} of {len(results)} PASS" + (f"; FAIL: {', '.join(failed)}" if failed else ""))
