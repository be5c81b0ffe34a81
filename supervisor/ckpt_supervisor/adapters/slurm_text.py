"""What Slurm's commands print, read into plain data: `scontrol show job`, `show config`, `show partition`, `requeue`.

Owns the knowledge of those texts, the same for 22.05 and 24.11. Pure: no process is started here and no clock is
read. Must never guess: a text that lacks what is needed is "could not look" (`NoView`), for a wrong cause would
revive a job that a person cancelled.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping
from typing import Literal

from ckpt_supervisor.core.views import JobView, NoView

REASON_CHARS_MAX = 300

_HEADER = re.compile(r"JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\S+))?(?: \w+=\S*)*? JobName=")
_PAIR = re.compile(r"([A-Za-z]\w*)=(\S*)")
_TRUSTED_LINES = frozenset(
    {"JobState", "Requeue", "Restarts", "RunTime", "StartTime", "EndTime", "PreemptEligibleTime", "PreemptTime", "Partition"}
    | {"NodeList", "NumNodes"}
)
"""First keys of the lines that are read. None of them holds text that a user wrote. JobName and Comment do: they may hold spaces,
newlines and `Restarts=7` (seen on 22.05 and 24.11)."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlurmConfig:
    """What `scontrol show config` says that matters here; None or "" where it does not say."""

    kill_wait_ms: int | None
    proctrack: str
    version: str
    requeue_exit: tuple[int, ...]
    wait_s: int | None = None
    kill_on_bad_exit: bool | None = None
    job_requeue: bool | None = None
    file_append: bool | None = None
    preempts: bool | None = None
    """Whether there is preemption at all."""
    preempt_mode: str = ""
    sends_user_signal: bool | None = None
    """At a preemption the signal of --signal comes in the place of SIGTERM (docs/slurm.md, section 1)."""
    spool: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """What `scontrol show partition` says that matters here."""

    name: str
    grace_ms: int | None
    preempt_mode: str
    max_time: str
    default_time: str
    nodes: str
    node_count: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class RequeueAnswer:
    """How `scontrol requeue` ended. `pending`: it was requeued before, which is as good as accepted."""

    kind: Literal["accepted", "pending", "refused", "unknown"]
    reason: str


def parse_job(text: str, our_id: str, looked_ms: int, grace_ms: int | None = None) -> JobView | NoView:
    """The view of our job in the multi-line output of `scontrol show job` (docs/slurm.md, section 3).

    `our_id` is `123`, or `100_3` for an array element. Of several records (array, hetjob) the one with our id counts.
    """
    record = find_record(text, our_id)
    if record is None:
        return NoView(f"scontrol printed no record of job {our_id}", definite=False)
    try:
        return JobView(
            state=record["JobState"],
            reason=record["Reason"],
            restarts=int(record["Restarts"]),
            end_ms=parse_instant_ms(record["EndTime"]),
            # The line is left out while it has nothing to say: a pending or requeued job has none.
            preempt_ms=parse_instant_ms(record.get("PreemptTime", "None")),
            grace_ms=grace_ms,
            requeue=record["Requeue"] == "1",
            batch=record["BatchFlag"] == "1",
            looked_ms=looked_ms,
            time_limit_unlimited=record.get("TimeLimit") == "UNLIMITED",
        )
    except KeyError as error:
        return NoView(f"scontrol's record of job {our_id} has no {error.args[0]}", definite=False)
    except ValueError as error:
        return NoView(f"scontrol's record of job {our_id} cannot be read: {error}"[:REASON_CHARS_MAX], definite=False)


def find_record(text: str, our_id: str) -> dict[str, str] | None:
    """Keys and values of our record. A record is a line that starts with JobId= and, later, one that starts with `   UserId=`.

    What stands between the two is the rest of a JobName with newlines in it, and is passed over; a header-like line in there, or
    in a Comment, makes no record of its own. The first value of a key counts: what a user wrote comes after it.
    """
    header: re.Match[str] | None = None
    record: dict[str, str] | None = None
    in_body, after_blank = False, True
    for line in text.split("\n"):
        match = _HEADER.match(line)
        if match is not None and header is None and (after_blank or not in_body):
            if record is not None:
                return record
            header, in_body = match, False
        elif header is not None and line.startswith("   UserId="):
            record = {} if _is_ours(header, our_id) else None
            header, in_body = None, True
        elif record is not None:
            _take_pairs(line, record)
        after_blank = not line.strip()
    return record


def _is_ours(header: re.Match[str], our_id: str) -> bool:
    job, array_job, array_task = header.groups()
    return our_id in (job, f"{array_job}_{array_task}")


def _take_pairs(line: str, record: dict[str, str]) -> None:
    pairs = _PAIR.findall(line)
    if pairs and line.startswith(f"   {pairs[0][0]}=") and pairs[0][0] in _TRUSTED_LINES:
        for key, value in pairs:
            record.setdefault(key, value)


def parse_instant_ms(value: str) -> int | None:
    """Epoch milliseconds of one time of scontrol's; None for `Unknown`, `None`, `N/A`. Raises ValueError for anything odd.

    With SLURM_TIME_FORMAT=%s these are epoch seconds. The ISO form is what a client prints that ignores it, in local time.
    """
    if value in ("", "Unknown", "None", "N/A", "(null)", "0"):
        return None
    if re.fullmatch(r"\d{1,12}", value, re.ASCII):
        return int(value) * 1000
    try:
        return round(datetime.datetime.fromisoformat(value).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{value[:40]!r} is no time") from None


def parse_config(text: str) -> SlurmConfig:
    """The few lines of `scontrol show config` that matter: `KillWait                = 30 sec`."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            values.setdefault(key.strip(), value.strip())
    seconds = re.match(r"(\d{1,9})\b", values.get("KillWait", ""), re.ASCII)
    codes = re.findall(r"\d{1,3}", values.get("RequeueExit", ""), re.ASCII)
    return SlurmConfig(
        kill_wait_ms=int(seconds[1]) * 1000 if seconds else None,
        proctrack=values.get("ProctrackType", "").removeprefix("proctrack/"),
        version=values.get("SLURM_VERSION", ""),
        requeue_exit=tuple(int(code) for code in codes),
        wait_s=_whole(values.get("WaitTime")),
        kill_on_bad_exit=_flag(values.get("KillOnBadExit")),
        job_requeue=_flag(values.get("JobRequeue")),
        file_append=_flag(values.get("JobFileAppend")),
        preempts=values["PreemptType"] not in ("preempt/none", "(null)", "") if "PreemptType" in values else None,
        preempt_mode=values.get("PreemptMode", ""),
        sends_user_signal=_sends_user_signal(values),
        spool=values.get("SlurmdSpoolDir", ""),
    )


def _sends_user_signal(values: Mapping[str, str]) -> bool | None:
    """22.05 has it in SlurmctldParameters as preempt_send_user_signal, later ones in PreemptParameters as send_user_signal."""
    if not {"SlurmctldParameters", "PreemptParameters"} & values.keys():
        return None
    words = f"{values.get('SlurmctldParameters', '')},{values.get('PreemptParameters', '')}"
    return re.search(r"(?:^|,)(?:preempt_)?send_user_signal(?:,|$)", words) is not None


def _whole(value: str | None) -> int | None:
    match = re.match(r"(\d{1,9})\b", value or "", re.ASCII)
    return int(match[1]) if match else None


def _flag(value: str | None) -> bool | None:
    number = _whole(value)
    return None if number is None else number != 0


def parse_partition(text: str) -> Partition | None:
    """The first partition in the output of `scontrol show partition -o NAME`; None if there is none."""
    pairs = dict(reversed(_PAIR.findall(text.partition("\n")[0])))
    if "PartitionName" not in pairs:
        return None
    return Partition(
        name=pairs["PartitionName"],
        grace_ms=parse_partition_grace(text),
        preempt_mode=pairs.get("PreemptMode", ""),
        max_time=pairs.get("MaxTime", ""),
        default_time=pairs.get("DefaultTime", ""),
        nodes=pairs.get("Nodes", ""),
        node_count=_whole(pairs.get("TotalNodes")),
    )


def parse_partition_grace(text: str) -> int | None:
    """GraceTime in ms of the first partition in the output of `scontrol show partition -o NAME`."""
    match = re.search(r"(?:^| )GraceTime=(\d{1,9})(?: |$)", text, re.ASCII | re.MULTILINE)
    return int(match[1]) * 1000 if match else None


def no_such_job(rc: int, stderr: str) -> bool:
    """Whether the controller itself said that it does not know the job; anything else is worth another try."""
    return rc > 0 and "Invalid job id specified" in stderr


def no_such_step(rc: int, stdout: str) -> bool:
    """Whether the controller said that the job has no such step, or not any more. It says so on stdout."""
    return rc > 0 and re.match(r"Job step \S+ not found", stdout) is not None


def parse_step_state(text: str) -> str:
    """The state in the output of `scontrol show step JOB.STEP`, "" if there is none. Its name, which users give, comes later."""
    match = re.match(r"StepId=\S+ [^\n]*\n   State=([A-Z_]{1,40})\b", text)
    return match[1] if match else ""


def classify_requeue(rc: int, stdout: str, stderr: str) -> RequeueAnswer:
    """What the end of `scontrol requeue` means (docs/slurm.md, section 2). Only two refusals are definite.

    "Access denied" and the like are `unknown` on purpose: Slurm may still requeue the preempted job by itself, if we stay.
    """
    said = first_words(stderr or stdout)
    if rc == 0:
        return RequeueAnswer("accepted", said)
    if rc < 0:
        return RequeueAnswer("unknown", f"scontrol requeue was killed by signal {-rc}" + (f": {said}" if said else ""))
    both = f"{stderr}\n{stdout}"
    if "Job is pending execution" in both:
        return RequeueAnswer("pending", said)
    if "Requested operation is presently disabled" in both or "Only batch jobs are accepted" in both:
        return RequeueAnswer("refused", said)
    return RequeueAnswer("unknown", said or f"scontrol requeue ended with {rc} and no word")


def first_words(text: str) -> str:
    """What was said, on one line of bounded length."""
    return " ".join(text.split())[:REASON_CHARS_MAX]
