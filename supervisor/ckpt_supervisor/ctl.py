"""`ckptctl`: looks at checkpoints and journals. Changes nothing.

Owns the command line of the inspection tool and its exit statuses; what is shown comes from view/ and store/.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_NOT_FOUND = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3

FOLLOW_S = 0.5
"""`log --follow` looks for new lines this often."""

EPILOG = """\
exit status: 0 found, intact; 1 nothing found, or not intact; 2 wrong usage; 3 could not look

examples:
  ckptctl ls                                  the checkpoints of ./checkpoints (or $CKPT_SUPERVISE_DIR)
  ckptctl latest --dir $SCRATCH/run7          path of the newest intact one
  ckptctl verify                              check every byte of the newest one
  ckptctl log --since 2h --event commit       what was committed in the last two hours
  ckptctl log --follow                        watch
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    arguments = _parser().parse_args(argv)
    arguments.dir = Path(arguments.dir or os.environ.get("CKPT_SUPERVISE_DIR") or "checkpoints")
    run: Callable[[argparse.Namespace], int] = arguments.run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # A path that is no UTF-8 is printed byte for byte.
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader went away (`| head`): that is no fault. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ckptctl",
        description="Look at the checkpoints and journals of supervised training runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", metavar="DIR", help="checkpoint directory (default: $CKPT_SUPERVISE_DIR, else ./checkpoints)")
    common.add_argument("--json", action="store_true", help="one JSON value a line")
    kinds = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    ls = kinds.add_parser("ls", parents=[common], help="list the checkpoints, newest first; looks at names and sizes only")
    ls.set_defaults(run=_ls)
    latest = kinds.add_parser("latest", parents=[common], help="print the path of the newest intact checkpoint")
    latest.add_argument("--quick", action="store_true", help="look at sizes and structure only")
    latest.set_defaults(run=_latest)
    verify = kinds.add_parser("verify", parents=[common], help="check checkpoints")
    verify.add_argument("path", nargs="?", help="a checkpoint (default: the newest one)")
    verify.add_argument("--all", action="store_true", help="check all checkpoints of the directory")
    verify.add_argument("--quick", action="store_true", help="look at sizes and structure only")
    verify.set_defaults(run=_verify)
    log = kinds.add_parser("log", parents=[common], help="what happened, line by line")
    log.add_argument("--job", default="", help="only this job")
    for name in ("attempt", "rank", "round"):
        log.add_argument(f"--{name}", type=int, help=f"only this {name}")
    log.add_argument("--event", action="append", default=[], help="only this event (may be repeated)")
    log.add_argument("--level", choices=("debug", "info", "warning", "error"), default="info", help="least level (default: info)")
    log.add_argument("--since", metavar="TIME", help="from this time on: 2026-01-31T12:00:00, or 30m, 2h, 1d ago")
    log.add_argument("--until", metavar="TIME", help="up to this time")
    log.add_argument("--grep", default="", metavar="TEXT", help="only lines that hold this text")
    log.add_argument("--follow", "-f", action="store_true", help="go on with lines as they are written")
    log.set_defaults(run=_log)
    return made


def _ls(arguments: argparse.Namespace) -> int:
    from ckpt_supervisor import store

    try:
        candidates = store.scan(arguments.dir)
    except OSError as error:
        return _could_not_look(arguments.dir, error)
    if not candidates:
        _complain(f"no checkpoints in {arguments.dir}")
        return EXIT_NOT_FOUND
    if not arguments.json:
        _out(f"{'STEP':>12}  {'SIZE':>10}  {'RANKS':>5}  {'CREATED':<19}  {'CAUSE':<12}  {'JOB':<12}  CHECKED   VERDICT")
    for candidate in candidates:
        _out(json.dumps(_as_record(candidate)) if arguments.json else _as_row(candidate))
    return EXIT_OK


def _as_record(candidate: Any) -> dict[str, Any]:
    manifest, problem = candidate.manifest, candidate.problem
    record: dict[str, Any] = {
        "step": candidate.step,
        "path": str(candidate.path),
        "verdict": "unknown" if problem is None and manifest is None else "intact" if problem is None else problem.verdict.value,
    }
    if problem is not None:
        record["reason"] = str(problem)
    if manifest is not None:
        record |= {
            "bytes": manifest.total_bytes,
            "ranks": list(manifest.ranks),
            "world_size": manifest.world_size,
            "created_at": manifest.created_at,
            "cause": manifest.cause,
            "job": manifest.job,
            "attempt": manifest.attempt,
            "verified": manifest.verified,
        }
    return record


def _as_row(candidate: Any) -> str:
    manifest, problem = candidate.manifest, candidate.problem
    verdict = "intact" if problem is None else str(problem)
    if manifest is None:
        return f"{candidate.step:>12}  {'-':>10}  {'-':>5}  {'-':<19}  {'-':<12}  {'-':<12}  {'-':<9} {verdict}"
    created = manifest.created_at[:19].replace("T", " ")
    job = f"{manifest.job}/{manifest.attempt}"
    return (
        f"{candidate.step:>12}  {size_text(manifest.total_bytes):>10}  {len(manifest.ranks):>5}  {created:<19}  "
        f"{manifest.cause[:12]:<12}  {job[:12]:<12}  {manifest.verified:<9} {verdict}"
    )


def size_text(count: int) -> str:
    """A number of bytes for people: 1.2 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _latest(arguments: argparse.Namespace) -> int:
    from ckpt_supervisor import store

    choice = store.newest_intact(arguments.dir, mode="structure" if arguments.quick else "full", progress=_progress())
    for candidate, report in choice.passed_over:
        _complain(f"passed over {candidate.path.name}: {report.verdict.value}: {report.reason}")
    if choice.chosen is None:
        _complain(choice.reason if choice.unknown else f"no intact checkpoint in {arguments.dir}")
        return EXIT_UNKNOWN if choice.unknown else EXIT_NOT_FOUND
    path = choice.chosen.path.absolute()
    _out(json.dumps({"step": choice.chosen.step, "path": str(path)}) if arguments.json else str(path))
    return EXIT_OK


def _verify(arguments: argparse.Namespace) -> int:
    from ckpt_supervisor import store

    if arguments.path and arguments.all:
        _complain("verify: give either a path or --all")
        return EXIT_USAGE
    if arguments.path:
        paths = [Path(arguments.path)]
    else:
        try:
            candidates = store.scan(arguments.dir)
        except OSError as error:
            return _could_not_look(arguments.dir, error)
        paths = [candidate.path for candidate in candidates][: None if arguments.all else 1]
    if not paths:
        _complain(f"no checkpoints in {arguments.dir}")
        return EXIT_NOT_FOUND
    worst = EXIT_OK
    for path in paths:
        began = time.monotonic()
        report = store.verify_checkpoint(path.resolve(), mode="structure" if arguments.quick else "full", progress=_progress())
        _show_report(arguments, path, report, time.monotonic() - began)
        code = {store.Verdict.INTACT: EXIT_OK, store.Verdict.UNKNOWN: EXIT_UNKNOWN}.get(report.verdict, EXIT_NOT_FOUND)
        worst = max(worst, code)
    return worst


def _show_report(arguments: argparse.Namespace, path: Path, report: Any, took_s: float) -> None:
    if arguments.json:
        findings = [{"verdict": f.verdict.value, "path": f.path, "offset": f.offset, "reason": f.reason} for f in report.findings]
        record = {"path": str(path), "verdict": report.verdict.value, "bytes_read": report.bytes_read, "findings": findings}
        _out(json.dumps({**record, "unchecked": list(report.unchecked)}))
        return
    speed = f", {report.bytes_read / took_s / 1e9:.2f} GB/s" if took_s > 0 and report.bytes_read else ""
    _out(f"{path}: {report.verdict.value} ({size_text(report.bytes_read)} read{speed})")
    for finding in report.findings:
        _out(f"  {finding}")
    if report.unchecked:
        _out(f"  no checksum speaks for: {', '.join(report.unchecked[:5])}")


def _log(arguments: argparse.Namespace) -> int:
    from ckpt_supervisor.view import log

    now = datetime.now(timezone.utc)
    try:
        wanted = log.Wanted(
            job=arguments.job,
            attempt=arguments.attempt,
            rank=arguments.rank,
            round=arguments.round,
            event=tuple(arguments.event),
            level=arguments.level,
            since=log.read_time(arguments.since, now) if arguments.since else None,
            until=log.read_time(arguments.until, now) if arguments.until else None,
            grep=arguments.grep,
        )
    except ValueError as error:
        _complain(f"log: {error}")
        return EXIT_USAGE
    tails: dict[Path, log.Tail] = {}
    shown = 0
    while True:
        try:
            for path in log.journals(arguments.dir):
                tails.setdefault(path, log.Tail(path))
            lines = log.merged(tails.values())
        except FileNotFoundError:
            lines = []
            if not arguments.follow:
                _complain(f"no journals in {arguments.dir}")
                return EXIT_NOT_FOUND
        except OSError as error:
            return _could_not_look(arguments.dir, error)
        for line in lines:
            if wanted.takes(line):
                shown += 1
                _out(json.dumps(line) if arguments.json else log.readable(line, colour=sys.stdout.isatty()))
        if not arguments.follow:
            break
        sys.stdout.flush()
        time.sleep(FOLLOW_S)
    damaged = sum(tail.damaged + tail.torn for tail in tails.values())
    if damaged:
        _complain(f"{damaged} damaged or torn lines were skipped")
    return EXIT_OK if shown else EXIT_NOT_FOUND


def _progress() -> Callable[[int, int], None] | None:
    """A progress line on a terminal."""
    if not sys.stderr.isatty():
        return None
    told = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - told[0] >= 0.2 or done == total:
            told[0] = time.monotonic()
            end = "\n" if done == total else ""
            sys.stderr.write(f"\r{size_text(done)} of {size_text(total)} checked{end}")
            sys.stderr.flush()

    return progress


def _could_not_look(directory: Path, error: OSError) -> int:
    _complain(f"{directory} cannot be looked at: {error.strerror or error}")
    return EXIT_UNKNOWN


def _complain(line: str) -> None:
    sys.stderr.write(f"ckptctl: {line}\n")


def _out(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
