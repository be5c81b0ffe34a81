"""The stand-in for `scontrol` in a local drill: prints what Slurm 24.11 would print of the one job in a file.

Owns those texts and what `requeue` does to the file. Run as a program by its path, with Python's bare start (-I -S), since a
supervisor counts on an answer within milliseconds: so it imports nothing of ours and nothing slow. What happens to the job
otherwise is controller.py's; both hold the lock while they change the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

VERSION = "24.11.5"
NO_JOB = "slurm_load_jobs error: Invalid job id specified\n"

Job = dict[str, Any]
"""The fields of controller.Job, as JSON has them."""


def job_text(job: Job) -> str:
    """`scontrol show job`, with times as epoch seconds (SLURM_TIME_FORMAT=%s)."""
    limit = "UNLIMITED" if job["limit_ms"] is None else _clock(job["limit_ms"])
    lines = [
        f"JobId={job['number']} JobName={job['name']}",
        f"   UserId={job['user']}(1000) GroupId={job['user']}(1000) MCS_label=N/A",
        "   Priority=1 Nice=0 Account=(null) QOS=(null)",
        f"   JobState={job['state']} Reason={job['reason']} Dependency=(null)",
        f"   Requeue={int(job['requeue'])} Restarts={job['restarts']} BatchFlag=1 Reboot=0 ExitCode=0:0",
        f"   RunTime=00:00:06 TimeLimit={limit} TimeMin=N/A",
        f"   SubmitTime={_instant(job['start_ms'])} EligibleTime={_instant(job['start_ms'])}",
        f"   AccrueTime={_instant(job['start_ms'])}",
        f"   StartTime={_instant(job['start_ms'])} EndTime={_instant(job['end_ms'])} Deadline=N/A",
    ]
    if job["preempt_ms"] is not None or job["state"] == "RUNNING":
        preempted = "None" if job["preempt_ms"] is None else _instant(job["preempt_ms"])
        lines.append(f"   PreemptEligibleTime={_instant(job['start_ms'])} PreemptTime={preempted}")
    lines += [
        f"   SuspendTime=None SecsPreSuspend=0 LastSchedEval={_instant(job['start_ms'])} Scheduler=Main",
        f"   Partition={job['partition']} AllocNode:Sid={job['node']}:1",
        "   ReqNodeList=(null) ExcNodeList=(null)",
        f"   NodeList={job['node']}",
        f"   BatchHost={job['node']}",
        "   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*",
        "   Command=drill",
        "",
        "",
    ]
    return "\n".join(lines)


def config_text(job: Job) -> str:
    """The lines of `scontrol show config` that anybody here reads."""
    lines = {
        "ClusterName": "drill",
        "JobRequeue": int(job["requeue"]),
        "KillOnBadExit": 0,
        "KillWait": f"{job['kill_wait_ms'] // 1000} sec",
        "PreemptMode": "REQUEUE",
        "PreemptParameters": "(null)",
        "PreemptType": "preempt/partition_prio",
        "ProctrackType": f"proctrack/{job['proctrack']}",
        "RequeueExit": job["requeue_exit"] or "(null)",
        "RequeueExitHold": "(null)",
        "SLURM_VERSION": VERSION,
        "UnkillableStepTimeout": "60 sec",
        "WaitTime": "0 sec",
    }
    return "\n".join(["Configuration data as of 1", *(f"{key:<23} = {value}" for key, value in lines.items()), "", ""])


def partition_text(job: Job) -> str:
    """`scontrol show partition`, one line a partition as with -o."""
    return (
        f"PartitionName={job['partition']} AllowGroups=ALL Default=YES DefaultTime=NONE GraceTime={job['grace_ms'] // 1000} "
        f"MaxTime=UNLIMITED Nodes={job['node']} PriorityTier=1 OverTimeLimit=NONE PreemptMode=REQUEUE State=UP\n"
    )


def step_text(job: Job) -> str:
    """`scontrol show step`."""
    return (
        f"StepId={job['number']}.0 UserId=1000 StartTime={_instant(job['start_ms'])} TimeLimit=UNLIMITED\n"
        f"   State=RUNNING Partition={job['partition']} NodeList={job['node']}\n"
        f"   Nodes=1 CPUs=1 Tasks=1 Name=drill Network=(null)\n\n"
    )


def answer(words: Sequence[str], job: Job) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one call; `requeue` changes the job."""
    asked = [word for word in words if word not in ("-o", "-d", "-dd", "--oneliner", "--details", "-a", "--all")]
    mine = {str(job["number"]), f"JobId={job['number']}"}
    match asked:
        case ["show", ("job" | "jobs"), *rest]:
            return (0, job_text(job), "") if not rest or rest[0] in mine else (1, "", NO_JOB)
        case ["show", "config"]:
            return 0, config_text(job), ""
        case ["show", ("partition" | "partitions"), *rest] if not rest or rest[0] == job["partition"]:
            return 0, partition_text(job), ""
        case ["show", ("step" | "steps"), *rest] if not rest or rest[0] == f"{job['number']}.0":
            return 0, step_text(job), ""
        case ["requeue", number]:
            return _requeue(job) if number in mine else (1, "", "Invalid job id specified\n")
        case ["ping"]:
            return 0, f"Slurmctld(primary) at {job['node']} is UP\n", ""
        case [("-V" | "--version")]:
            return 0, f"slurm {VERSION}\n", ""
        case _:
            return 1, "", f"invalid entity: {' '.join(words)[:200]} (the scontrol of a drill knows its own job only)\n"


def _requeue(job: Job) -> tuple[int, str, str]:
    if not job["requeue"]:
        return 1, "", f"Requested operation is presently disabled for job {job['number']}\n"
    job["requeue_calls"] += 1
    if job["restarts"] > job["attempt"]:
        return 1, "", f"Job is pending execution for job {job['number']}\n"
    job.update(state="COMPLETING", reason="None", restarts=job["restarts"] + 1, preempt_ms=None, end_ms=None)
    return 0, "", ""


def _instant(ms: int | None) -> str:
    return "Unknown" if ms is None else str(ms // 1000)


def _clock(ms: int) -> str:
    minutes, seconds = divmod(ms // 1000, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"


def main(argv: Sequence[str]) -> int:
    """`scontrol.py FILE WORDS...`: answer for the job in FILE."""
    path, *words = argv
    with open(f"{path}.lock", "a", encoding="ascii") as lock:  # noqa: PTH123 - pathlib would be most of this program's time
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            job = json.load(file)
        calls = job["requeue_calls"]
        code, out, err = answer(words, job)
        if job["requeue_calls"] != calls:
            with open(f"{path}.new", "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump(job, file)
            os.replace(f"{path}.new", path)  # noqa: PTH105
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
