"""What Slurm prints and logs about a job, as values.

Owns: reading `scontrol show job`, jobcomp.txt and the requeue calls in slurmctld's log.
Must not: run anything; text in, values out, so that the odd cases can be tested without a Slurm.
"""

from __future__ import annotations

import dataclasses
import re

# Their values may hold blanks and words like "Restarts=7"; each stands last on its line.
WHOLE_LINE_KEYS = ("JobName", "Comment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "AdminComment")

REQUEUE_RESULT = re.compile(
    r"(?:_job_requeue_op: |_slurm_rpc_requeue: Requeue of )JobId=([\d_+]+)(?:\((\d+)\))?(?: returned an error: (.*))?"
)

Job = dict[str, str]
JobId = int | str


@dataclasses.dataclass(frozen=True)
class RequeueCall:
    """One `scontrol requeue` as slurmctld's log has it; error is None when it was accepted."""

    at: str
    uid: int
    error: str | None


def parse_jobs(text: str) -> list[Job]:
    """The records of `scontrol show job` in its form of many lines."""
    records = []
    for block in re.split(r"\n\s*\n", text.strip()):
        record: Job = {}
        for line in block.splitlines():
            _parse_line(line.strip(), record)
        if "JobId" in record:
            records.append(record)
    return records


def _parse_line(line: str, record: Job) -> None:
    while line:
        key, equals, rest = line.partition("=")
        if not equals:
            return
        if key in WHOLE_LINE_KEYS:
            record[key] = rest
            return
        record[key], _, line = rest.partition(" ")


def parse_jobcomp(text: str, jobid: JobId) -> list[Job]:
    """The job's lines of jobcomp.txt, in order."""
    records = [dict(re.findall(r"(\w+)=(.*?)(?= \w+=|\s*$)", line)) for line in text.splitlines()]
    return [record for record in records if record.get("JobId") == str(jobid)]


def parse_requeue_calls(text: str, jobid: JobId) -> list[RequeueCall]:
    """The calls for this job in slurmctld's log (docs/slurm.md section 6); an array's element has two names there.

    slurmctld works on several calls at a time: their lines may mix.
    """
    calls: list[RequeueCall] = []
    uids: list[int] = []
    for line in text.splitlines():
        if found := re.search(r"Processing RPC: REQUEST_JOB_REQUEUE from UID=(\d+)", line):
            uids.append(int(found[1]))
        elif uids and (found := re.search(REQUEUE_RESULT, line)):
            uid = uids.pop(0)
            if str(jobid) in (found[1], found[2]):
                calls.append(RequeueCall(line[1 : line.find("]")], uid, found[3]))
    return calls
