"""The throwaway Slurm itself: what it starts runs jobs, and what it ends is gone.

Owns: the promises of deploy/lab that every other Slurm test rests on.
Must not: know the product. If one of these fails, no other result of tests/slurm means anything.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import LAB_PROGRAM, Lab, lab_program
from tests.support.lab_text import RequeueCall, parse_jobs, parse_requeue_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUND_S = 90
"""On what takes a second or two on an idle machine."""

SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"

STAYS = """
echo "run ${SLURM_RESTART_COUNT:-first}"
srun bash -c 'trap "echo got TERM; exit 1" TERM; echo ready; while :; do sleep 0.1; done'
"""
# A task that nobody will miss politely: deaf to TERM, with a child in a session of its own and an orphan.
CLINGS = """
trap "" TERM
(setsid sleep 1000 &)
srun bash -c 'trap "" TERM; setsid sleep 1000 & sleep 1000 & echo ready; wait'
sleep 1000
"""


KILLS_UP = """#!/bin/sh
while [ ! -e {pid} ]; do sleep 0.02; done
kill -KILL "$(cat {pid})"
exec {slurmd} "$@"
"""
"""A slurmd that kills whoever brings the lab up in the moment in which it is started."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A short directory that jobs can read (pytest's own is long and closed to other users)."""
    path = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab for all tests here that only run jobs in it."""
    path = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    path.chmod(0o755)
    # A grace that nobody waits for the end of: a preempted job is looked at in it.
    with Lab.up(path, nodes=2, proctrack="auto", kill_wait=2, grace=60) as running:
        yield running
    shutil.rmtree(path)


def wait_line(lab: Lab, jobid: int, line: str, times: int = 1) -> str:
    """Waits until the job's output holds that line often enough, and gives the output."""
    output = lab.root / f"{jobid}.out"

    def there(_: dict[str, str]) -> bool:
        return output.exists() and output.read_text().splitlines().count(line) >= times

    lab.wait_job(jobid, there, BOUND_S, f"line {line!r} in {output}")
    return output.read_text()


def left_over(lab: Lab) -> list[str]:
    """Every live process that carries the lab's directory or one of its nodes, and every cgroup named after a node."""
    words = [str(lab.root).encode(), *(f"SLURMD_NODENAME={node}".encode() for node in lab.nodes)]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(word in text for word in words):
            found.append(f"{entry.name}: {text[:200]!r}")
    return found + [str(path) for node in lab.nodes for path in Path("/sys/fs/cgroup").glob(f"*/*{node}*")]


def test_a_job_runs_on_a_node_of_the_lab_and_completes(lab: Lab) -> None:
    """A job script submitted to the lab is executed and its end is recorded."""
    jobid = lab.sbatch('echo "$SLURMD_NODENAME"\nsrun -l true\n')
    lab.wait_state(jobid, {"COMPLETED"}, BOUND_S)
    assert (lab.root / f"{jobid}.out").read_text().strip() in lab.nodes
    assert [record["JobState"] for record in lab.jobcomp(jobid)] == ["COMPLETED"]


def test_a_requeued_job_comes_back_with_restart_count_one(lab: Lab) -> None:
    """`scontrol requeue` brings the job back under its id, once, and the log names the call."""
    jobid = lab.sbatch(STAYS)
    wait_line(lab, jobid, "ready")
    lab.checked("scontrol", "requeue", str(jobid))
    record = lab.wait_state(jobid, {"PENDING"}, BOUND_S, restarts=1)
    assert record["JobId"] == str(jobid)
    lab.release_requeued(jobid)
    output = wait_line(lab, jobid, "run 1")
    assert "run first" in output
    assert [call.error for call in lab.requeue_calls(jobid)] == [None]
    lab.cancel(jobid)
    assert lab.wait_state(jobid, {"CANCELLED"}, BOUND_S)["Restarts"] == "1"


def test_a_refused_requeue_is_told_from_an_accepted_one(lab: Lab) -> None:
    """A requeue call that slurmctld refused is found in its log with the reason."""
    jobid = lab.sbatch(STAYS, "--no-requeue")
    wait_line(lab, jobid, "ready")
    assert lab.run("scontrol", "requeue", str(jobid)).returncode == 1
    (call,) = lab.requeue_calls(jobid)
    assert call == RequeueCall(call.at, 0, "Requested operation is presently disabled")
    lab.cancel(jobid)
    lab.wait_state(jobid, {"CANCELLED"}, BOUND_S)


def test_preemption_in_low_gives_term_and_a_preempt_time(lab: Lab) -> None:
    """A job of `high` makes Slurm signal the step in `low` and set PreemptTime while the job still runs."""
    # It stays after the first TERM: else it could be gone before anybody has looked.
    jobid = lab.sbatch(STAYS.replace("exit 1", "trap exit TERM"), "-p", "low")
    wait_line(lab, jobid, "ready")
    preemptor = lab.preempt(jobid)
    record = lab.wait_preempted(jobid)
    assert record["JobState"] in ("RUNNING", "SIGNALING")
    assert int(record["PreemptTime"]) >= int(record["StartTime"])
    wait_line(lab, jobid, "got TERM")
    lab.cancel(jobid)
    lab.wait_state(preemptor, {"COMPLETED"}, BOUND_S)
    assert lab.requeue_calls(jobid) == []


def test_a_killed_node_loses_its_job_and_comes_back(lab: Lab) -> None:
    """SIGKILL of a node's slurmd, slurmstepd and tasks requeues the job, and the node can be used again."""
    jobid = lab.sbatch(STAYS)
    wait_line(lab, jobid, "ready")
    node = lab.node_of(jobid)
    lab.node_kill(node)
    lab.wait_state(jobid, {"PENDING", "RUNNING"}, BOUND_S, restarts=1)  # On the other node, which it need not wait for.
    lab.cancel(jobid)
    lab.node_start(node)
    again = lab.sbatch("true\n", "-w", node)
    lab.wait_state(again, {"COMPLETED"}, BOUND_S)


def test_a_frozen_controller_goes_on_where_it_was(lab: Lab) -> None:
    """A slurmctld stopped by SIGSTOP answers nobody, and a job submitted after SIGCONT runs."""
    lab.controller_stop()
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("scontrol", "ping", timeout=1)
    lab.controller_cont()
    jobid = lab.sbatch("true\n")
    lab.wait_state(jobid, {"COMPLETED"}, BOUND_S)


def test_a_killed_controller_knows_its_jobs_when_started_again(lab: Lab) -> None:
    """slurmctld ended by SIGKILL and started again still has the running job."""
    jobid = lab.sbatch(STAYS)
    wait_line(lab, jobid, "ready")
    lab.save_state(jobid)
    lab.controller_kill()
    lab.controller_start()
    assert lab.job(jobid)["JobState"] == "RUNNING"
    lab.cancel(jobid)
    lab.wait_state(jobid, {"CANCELLED"}, BOUND_S)


@pytest.mark.parametrize("proctrack", ["cgroup", "linuxproc"])
def test_down_leaves_no_process_and_no_cgroup_behind(root: Path, proctrack: str) -> None:
    """Deaf tasks, their detached children and orphans are gone when `down` returns, on both kinds of tracking."""
    with Lab.up(root, nodes=2, proctrack=proctrack) as lab:
        jobid = lab.sbatch(CLINGS)
        wait_line(lab, jobid, "ready")
        assert len(left_over(lab)) > 6  # the daemons, the script, the tasks: what this test looks with does see them
        assert lab.status()["slurmstepds"]
    assert left_over(lab) == []


def test_down_ends_a_lab_whose_up_was_killed_half_way(root: Path, tmp_path: Path) -> None:
    """The directory alone is enough: nothing is left when whoever brought the lab up died before it was up."""
    words = [sys.executable, str(LAB_PROGRAM), "up", "--root", str(root), "--nodes", "4", "--proctrack", "linuxproc"]
    path, pid = f"{tmp_path}:{os.environ.get('PATH', SEARCH)}", tmp_path / "up.pid"
    slurmd = shutil.which("slurmd", path=f"{os.environ.get('PATH', '')}:{SEARCH}")
    (tmp_path / "slurmd").write_text(KILLS_UP.format(pid=pid, slurmd=slurmd))
    (tmp_path / "slurmd").chmod(0o755)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": path}) as up:
        pid.with_suffix(".new").write_text(str(up.pid))
        pid.with_suffix(".new").rename(pid)
    assert up.returncode == -signal.SIGKILL
    info = lab_program("status", "--root", str(root))
    lab_program("down", "--root", str(root))
    assert left_over(Lab(info)) == []


def test_down_ends_nothing_that_a_lying_pid_file_names(root: Path) -> None:
    """A pid file that names somebody else's process does not make `down` signal it."""
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        with Lab.up(root, nodes=1, proctrack="linuxproc") as lab:
            lab.daemon("slurmd." + lab.nodes[0], "kill")
            stat = Path(f"/proc/{innocent.pid}/stat").read_text()
            (root / "run" / f"slurmd.{lab.nodes[0]}.pid").write_text(stat)
        assert innocent.poll() is None
        innocent.kill()


def test_up_refuses_a_directory_in_which_a_lab_runs_and_leaves_it_running(root: Path) -> None:
    """A second `up` fails in one line and does not disturb the first lab."""
    with Lab.up(root, nodes=1, proctrack="linuxproc") as lab:
        with pytest.raises(AssertionError, match="a lab already runs in"):
            lab_program("up", "--root", str(root))
        assert all(lab.status()["daemons"].values())


def test_up_refuses_what_is_not_its_own(root: Path) -> None:
    """A directory with somebody's files and a taken port are refused, and nothing is written."""
    (root / "precious").write_text("data")
    with pytest.raises(AssertionError, match="is not empty and holds no lab"):
        lab_program("up", "--root", str(root))
    assert [path.name for path in root.iterdir()] == ["precious"]
    (root / "precious").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The one before it may be somebody's too, of whom nothing is known here.
        with pytest.raises(AssertionError, match=rf"lab: port (\d+, )*{port} is taken"):
            lab_program("up", "--root", str(root), "--nodes", "1", "--port-base", str(port - 1))


def test_two_labs_side_by_side_do_not_see_each_other(root: Path, lab: Lab) -> None:
    """Ending one lab ends no job of the other, and their node names and job ids differ."""
    survivor = lab.sbatch(STAYS)
    wait_line(lab, survivor, "ready")
    with Lab.up(root, nodes=2, proctrack="auto") as other:
        doomed = other.sbatch(STAYS)
        wait_line(other, doomed, "ready")
        assert not set(other.nodes) & set(lab.nodes)
        assert doomed != survivor
    assert lab.job(survivor)["JobState"] == "RUNNING"
    lab.cancel(survivor)
    lab.wait_state(survivor, {"CANCELLED"}, BOUND_S)


def test_words_in_a_job_name_are_not_taken_for_fields() -> None:
    """JobName and Comment may hold `Restarts=7 PreemptTime=x`; the real fields win."""
    text = (
        "JobId=7 JobName=a Restarts=7 PreemptTime=x\n   JobState=RUNNING Reason=None Dependency=(null)\n"
        "   Requeue=1 Restarts=0 BatchFlag=1\n   Comment=Restarts=9 PreemptTime=y\n\nJobId=8 JobName=b\n   Restarts=1\n"
    )
    first, second = parse_jobs(text)
    assert (first["JobName"], first["Restarts"]) == ("a Restarts=7 PreemptTime=x", "0")
    assert "PreemptTime" not in first
    assert (second["JobId"], second["Restarts"]) == ("8", "1")


def test_requeue_calls_are_told_from_requeues_that_slurm_makes_by_itself() -> None:
    """Only what follows a requeue RPC counts; an array's element is found by both names; a refusal keeps its reason."""
    log = (
        "[t1] debug:  _job_requeue_op: JobId=7 state 0x8000 reason 0 priority 1\n"
        "[t2] debug2: Processing RPC: REQUEST_JOB_REQUEUE from UID=5\n"
        "[t3] debug:  _job_requeue_op: JobId=7_2(9) state 0x8000 reason 0 priority 1\n"
        "[t4] debug2: Processing RPC: REQUEST_JOB_REQUEUE from UID=0\n"
        "[t5] _slurm_rpc_requeue: Requeue of JobId=7 returned an error: Job is pending execution\n"
    )
    assert parse_requeue_calls(log, "7_2") == parse_requeue_calls(log, 9) == [RequeueCall("t3", 5, None)]
    assert parse_requeue_calls(log, 7) == [RequeueCall("t5", 0, "Job is pending execution")]
