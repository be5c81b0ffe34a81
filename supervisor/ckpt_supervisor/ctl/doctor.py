"""`ckptctl doctor`: what is wrong with a set-up, before it costs a run. Changes nothing.

Owns the command, its exit status, and how findings are drawn. What is wrong is decided by doctor/, which this is the front of.
Works on a login node before the job is submitted (--script), inside a job, for a job by its number (--job), and without Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckpt_supervisor.ctl.words import (
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    complain,
    out,
    out_json,
    width_of,
)
from ckpt_supervisor.doctor import ask, gather, look, notice_rules, place_rules, slurm_rules
from ckpt_supervisor.doctor.facts import Held, Place
from ckpt_supervisor.doctor.finding import ORDER, Finding, Findings, Severity, error, note
from ckpt_supervisor.text import one_line
from ckpt_supervisor.view.checkpoints import counted, painted
from ckpt_supervisor.watches.places import parse_job

EXIT_WRONG = EXIT_NOT_FOUND

SCRIPT_TIMEOUT_S = 5.0
WIDTH = 130
"""Where stdout is no terminal."""

NAMES: dict[Severity, str] = {"error": "FAIL", "warning": "WARN", "unknown": "????", "note": "note", "ok": "OK"}
LOOKS: dict[Severity, str] = {"error": "corrupt", "warning": "unknown", "unknown": "foreign", "note": "dim", "ok": "intact"}
"""By the verdicts whose colours they have."""


def add_doctor(kinds: Any, common: argparse.ArgumentParser) -> None:
    """The command line."""
    doctor = kinds.add_parser(
        "doctor", parents=[common], help="what is wrong with job script, site and directory, and what to do"
    )
    doctor.add_argument("--job", default="", metavar="JOB", help="look at this job (default: the one that this runs in)")
    doctor.add_argument("--script", metavar="FILE", help="look at this job script, before it is submitted")
    doctor.set_defaults(run=doctor_command)


def doctor_command(arguments: argparse.Namespace) -> int:
    """Look at everything; print what was found, the gravest first."""
    job = arguments.job
    text: tuple[str, str] | None = None
    if job:
        try:
            job = parse_job(job)[0]
        except ValueError as wrong:
            complain(f"doctor: {wrong}")
            return EXIT_USAGE
    if arguments.script is not None:
        read = _read(Path(arguments.script))
        if isinstance(read, int):
            return read
        text = read
    with _progress("asking Slurm"):
        given = Path(arguments.asked_dir).absolute() if arguments.asked_dir else None
        found = gather.gather(arguments.environ, job, text, given)
    place = look.probe(found.directory, lambda line: complain(f"doctor: {line} ..."))
    with _progress("looking at what is installed"):
        findings = _judged(found, place, arguments)
    findings.sort(key=lambda finding: ORDER.index(finding.severity))
    _draw(findings, arguments)
    return _status(findings)


def _judged(found: gather.Found, place: Place, arguments: argparse.Namespace) -> Findings:
    setup = msgspec.structs.replace(found.setup, saves_ms=place.saves_ms)
    findings = [error("options", problem, "see ckpt-supervise --help") for problem in found.option_problems]
    findings += [*slurm_rules.findings(setup), *notice_rules.findings(setup)]
    if found.no_script:
        findings.append(note("no-script", f"the job's script cannot be read: {found.no_script}", "give it with --script"))
    if found.unresolved:
        text = (
            f"the directory's name ends in {found.unresolved}, which is known at run time only: {found.directory} was looked at"
        )
        findings.append(note("dir-name", text))
    findings += place_rules.directory(place, setup.nodes, found.one_machine, setup.wishes.keep)
    if not place.problem and place.exists:
        findings += place_rules.held(_held(place, found, arguments))
    findings += place_rules.temporary(look.temporaries(arguments.environ))
    findings += place_rules.versions(look.versions(arguments.environ))
    return findings


def _held(place: Place, found: gather.Found, arguments: argparse.Namespace) -> Held | None:
    """Whether another attempt is alive: by its process where that can be seen, else by what Slurm says of its job."""
    if place.holder is None:
        return None
    job, _, host, who = place.holder
    if found.job_name and job == found.job_name:
        return Held(who, alive=False)  # The very job that is looked at.
    if place.holder_alive is not None and host:
        return Held(who, place.holder_alive, "its process runs here")
    alive, why = ask.is_alive(arguments.environ, job)
    return Held(who, alive, why)


def _read(path: Path) -> tuple[str, str] | int:
    """Name and text of a script, or an exit status after a complaint; a file system that hangs does not hold us."""
    answer: list[str | OSError] = []

    def read() -> None:
        try:
            with path.open("rb") as file:
                answer.append(file.read(ask.SCRIPT_BYTES_MAX).decode(errors="replace"))
        except OSError as failure:
            answer.append(failure)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(SCRIPT_TIMEOUT_S)
    if not answer:
        complain(f"doctor: --script {path}: no answer within {SCRIPT_TIMEOUT_S:.0f} s")
        return EXIT_UNKNOWN
    if isinstance(answer[0], OSError):
        complain(f"doctor: --script {path}: {answer[0].strerror}")
        return EXIT_USAGE
    return path.name, answer[0]


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """A line on stderr if it takes long."""
    timer = threading.Timer(look.TELL_AFTER_S, complain, (f"doctor: {what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _status(findings: Iterable[Finding]) -> int:
    kinds = {finding.severity for finding in findings}
    if kinds & {"error", "warning"}:
        return EXIT_WRONG
    return EXIT_UNKNOWN if "unknown" in kinds else EXIT_OK


def _draw(findings: Sequence[Finding], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for finding in findings:
            out_json(msgspec.structs.asdict(finding))
        return
    is_terminal = sys.stdout.isatty()
    width = width_of(sys.stdout.fileno()) if is_terminal else WIDTH
    colour = is_terminal and arguments.colour
    indent = max((len(finding.id) for finding in findings), default=0) + 8
    for finding in findings:
        name = painted(f"{NAMES[finding.severity]:<4}", LOOKS[finding.severity], colour)
        advice = _wrapped(finding.advice, width - indent - 3) if finding.advice else []
        arrows = [f"{'   ' if number else '-> '}{line}" for number, line in enumerate(advice)]
        for number, line in enumerate([*_wrapped(finding.text, width - indent), *arrows]):
            out((" " * indent if number else f"{name}  {finding.id:<{indent - 8}}  ") + line)
    out(painted(summary(findings), "bold", colour))


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of words; a long path is never cut."""
    return textwrap.wrap(one_line(text), max(20, width), break_long_words=False, break_on_hyphens=False) or [""]


def summary(findings: Iterable[Finding]) -> str:
    """The last line."""
    counts = Counter(finding.severity for finding in findings)
    wrong = counts["error"] + counts["warning"]
    parts = [
        f"{counted(wrong, 'thing')} to mend ({counts['error']} FAIL, {counts['warning']} WARN)" if wrong else "nothing to mend"
    ]
    if counts["unknown"]:
        parts.append(f"{counted(counts['unknown'], 'thing')} could not be looked at")
    return f"{', '.join(parts)}; {counts['ok']} good"
