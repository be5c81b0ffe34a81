"""What Slurm itself has left behind about a job: lines of slurmstepd and srun in its output, and sacct's records.

Owns that reading, with bounds in bytes and time. Must not judge an attempt: view/why.py shows what is found. The output of a job
may hold anything, so nothing but lines of Slurm's own form is taken from it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ckpt_supervisor.adapters.slurm import Scontrol, locate
from ckpt_supervisor.core.views import NoView
from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.why import Said

TAIL_BYTES = 1_048_576
"""So much of a job's output is looked through, from its end."""

LINES_MAX = 3
LINE_CHARS_MAX = 300
ASK_TIMEOUT_S = 5.0
RECORDS_MAX = 1_000
NEAR_S = 300
"""Slurm's times and ours of one start may be so far apart."""

_OWN = re.compile(
    r"(?:slurmstepd(?:-[\w.-]+)?: |srun: (?:error|Job step aborted|Force Terminated|Terminating|launch/slurm)).*"
    r"(?:CANCELLED|DUE TO|TIME LIMIT|PREEMPT|NODE FAIL|oom|OOM|Out Of Memory|Exceeded|aborted|Terminat|signal|[Kk]illed|Exited)"
)
_CAUSES = (
    ("oom", "out of memory"),
    ("out of memory", "out of memory"),
    ("out_of_memory", "out of memory"),
    ("due to preemption", "preempted"),
    ("preempted", "preempted"),
    ("due to time limit", "time limit reached"),
    ("timeout", "time limit reached"),
    ("due to node failure", "node failure"),
    ("node_fail", "node failure"),
    ("node failure", "node failure"),
    ("boot_fail", "node failure"),
    ("cancelled by", "cancelled"),
    ("requeue", "requeued"),
)
_CANCELLED = re.compile(r"slurmstepd\S* error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*")
"""A job that is ended for no other reason than a scancel; steps get such a line for a signal too."""

_ID = re.compile(r"\*\*\* (?:JOB|STEP) (\d+)|StepId=(\d+)")
_AT = re.compile(r" AT (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_OF_A_REQUEUE = "DUE TO JOB REQUEUE"
ZONES_S = 15 * 3_600
"""Slurm writes its node's own time without its zone, and this may be read in another one."""

_OURS = "ckpt-supervise: "
_START = "ckpt-supervise: resuming from "
_STDOUT = re.compile(r"^   StdOut=(/.*)$", re.MULTILINE)
_EPOCH_S = re.compile(r"\d{9,11}")


def until_of(one: Attempt, run: Run) -> int | None:
    """When the next start began: what Slurm says later is not about this one. None for the newest one, 0 if it is not known."""
    later = run.attempts[run.attempts.index(one) + 1 :]
    return next((each.began_ns for each in later if each.began_ns is not None), 0) if later else None


def said_of(one: Attempt, until_ns: int | None, output: str, env: Mapping[str, str]) -> tuple[Said, str]:
    """What there is about this attempt, and what went wrong while looking for it ("" for nothing). `until_ns`: see until_of."""
    found, problem = _from_output(one, until_ns, output, env)
    note = f"no words about this attempt in {output}" if output and not problem and not found else ""
    if one.requeue == "accepted":
        found = tuple(line for line in found if _OF_A_REQUEUE not in line)  # It says what was asked of it.
    record = _by_sacct(one, env)
    lines = (*found, *([record] if record else []))
    return Said(lines, cause_of(lines), note=note), problem


def cause_of(lines: Sequence[str]) -> str:
    """What Slurm's words come to, the last one that tells a cause."""
    for line in reversed(lines):
        if _CANCELLED.match(line):
            return "cancelled"
        for word, cause in _CAUSES:
            if word in line.lower():
                return cause
    return ""


def _from_output(one: Attempt, until_ns: int | None, output: str, env: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    path = output or _stdout_of(one.job, env)
    if not path:
        return (), ""
    try:
        text = tail(Path(path))
    except OSError as error:
        # A path that scontrol gave may be on another machine: no word of it. One that was given is to be there.
        return (), f"{path} cannot be read: {error.strerror or error}" if output else ""
    lines = own_lines(text, one, until_ns)
    return tuple(lines), ""


def tail(path: Path) -> str:
    """The end of a regular file. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(22, "not a regular file", str(path))
        os.lseek(fd, max(0, status.st_size - TAIL_BYTES), os.SEEK_SET)
        data, left = b"", TAIL_BYTES
        while left > 0 and (block := os.read(fd, min(left, 262_144))):
            data += block
            left -= len(block)
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace")


def own_lines(text: str, one: Attempt, until_ns: int | None = None) -> list[str]:
    """Slurm's own lines about this attempt, the last ones, also where several attempts have written into one file.

    They stand between its start and the first line of the next supervisor; its last line says where that is. Without such a line
    their own times say it, where they lie between its begin and the next one's.
    """
    lines = text.splitlines()
    ends = [place for place, line in enumerate(lines) if one.line and line == f"{_OURS}{one.line}"]
    if not ends and until_ns is not None:
        return [line[:LINE_CHARS_MAX] for line in _by_time(lines, one, until_ns)][-LINES_MAX:]
    end = ends[-1] if ends else len(lines)
    since = max((place for place in range(min(end, len(lines))) if lines[place].startswith(_START)), default=0)
    until = next((place for place in range(end + 1, len(lines)) if lines[place].startswith(_OURS)), len(lines))
    found = (line for line in lines[since:until] if is_slurms(line) and _can_be_of(line, one, until_ns))
    return [line[:LINE_CHARS_MAX] for line in found][-LINES_MAX:]


def _by_time(lines: Sequence[str], one: Attempt, until_ns: int) -> list[str]:
    """Slurm's lines from this attempt's begin to the next one's, with those that follow them at once and tell no time."""
    if one.began_ns is None or not until_ns:
        return []
    found, is_near = [], False
    for line in lines:
        at_s = at_of(line)
        if at_s is not None:
            is_near = one.began_ns / 1e9 <= at_s <= until_ns / 1e9 and _can_be_of(line, one, until_ns)
        elif not is_slurms(line):
            is_near = False
        if is_near and is_slurms(line):
            found.append(line)
    return found


def at_of(line: str) -> float | None:
    """The time that slurmstepd gives, as this machine's own; None where the line gives none."""
    found = _AT.search(line) if is_slurms(line) else None
    try:
        return None if found is None else datetime.fromisoformat(found[1]).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _can_be_of(line: str, one: Attempt, until_ns: int | None) -> bool:
    """Neither of another job, nor of another day. The parts of an array or a group have numbers that are not compared."""
    named = _ID.search(line)
    if named is not None and one.job.isdecimal() and one.job != (named[1] or named[2]):
        return False
    at_s = at_of(line)
    if at_s is None or one.began_ns is None:
        return True
    last_ns = max(one.ended_ns or one.began_ns, until_ns or 0)
    return one.began_ns / 1e9 - ZONES_S <= at_s <= last_ns / 1e9 + ZONES_S


def is_slurms(line: str) -> bool:
    """Whether this line of a job's output is one of Slurm's about an end."""
    return _OWN.match(line) is not None


def _stdout_of(job: str, env: Mapping[str, str]) -> str:
    path = locate(env.get("PATH"))
    if path is None or not job.replace("_", "").isdecimal():
        return ""
    answer = Scontrol(path, job, env).ask(("show", "job", job), ASK_TIMEOUT_S)
    if isinstance(answer, NoView):
        return ""
    found = _STDOUT.findall(answer)  # What a user wrote (a name, a comment) comes before it.
    return str(found[-1]) if found else ""


def _by_sacct(one: Attempt, env: Mapping[str, str]) -> str:
    """sacct's record of this attempt as a line; "" where there is none."""
    path = shutil.which("sacct", path=env.get("PATH") or os.defpath)
    if path is None or not one.job.replace("_", "").isdecimal():
        return ""
    fields = "JobID,State,ExitCode,Start,End,Reason"
    asked = ("-D", "-X", "-n", "-P", "-j", one.job, "-S", "1970-01-01", f"--format={fields}")
    answer = Scontrol(path, one.job, env).ask(asked, ASK_TIMEOUT_S)
    return "" if isinstance(answer, NoView) else record_of(answer, one)


def record_of(text: str, one: Attempt) -> str:
    """Of several records of one job (each requeue makes one), that of this attempt, by its times."""
    began_s = None if one.began_ns is None else one.began_ns / 1e9
    best: tuple[float, str] | None = None
    for line in text.splitlines()[:RECORDS_MAX]:
        parts = line.split("|")
        if len(parts) < 6 or parts[0] != one.job or began_s is None:
            continue
        job, state, code, start, end, reason = parts[:6]
        if not _EPOCH_S.fullmatch(start):
            continue
        apart = abs(int(start) - began_s)
        until = int(end) if _EPOCH_S.fullmatch(end) else None
        if until is not None and not int(start) - NEAR_S <= began_s <= until + NEAR_S:
            continue
        told = f"sacct: {job} {state}, exit code {code}" + (f", {reason}" if reason not in ("", "None") else "")
        if best is None or apart < best[0]:
            best = (apart, told[:LINE_CHARS_MAX])
    return "" if best is None else best[1]
