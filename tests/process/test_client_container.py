"""Ranks in containers, stood in for by namespaces: pids that mean nothing outside, and a socket that is not to be seen."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from ckpt_client import meeting, wire
from ckpt_supervisor.adapters import children

from tests.support.run import TOY, supervised, trained

PID_NAMESPACE = "unshare --pid --fork --mount-proc --kill-child"
"""Needs root, as the tests below tests/slurm do."""


def ranks(prefix: str, log: Path, world: int, names: str = "RANK={0} WORLD_SIZE={1}", *words: object) -> list[str]:
    """A shell that starts this many toys, each as `prefix` says and named by these variables, and waits for all."""
    toy = f"{sys.executable} {TOY} --no-torch --log {log} --steps 1000000 {' '.join(map(str, words))}"
    lines = [f"{names.format(rank, world)} {prefix} {toy} &" for rank in range(world)]
    return ["bash", "-c", "\n".join([*lines, "wait"])]


def test_two_ranks_with_the_same_pid_in_their_containers_are_two(tmp_path: Path) -> None:
    """Each is process 1 in its own pid namespace: both attach under names of their own, and both are saved."""
    with supervised(tmp_path, ranks(PID_NAMESPACE, tmp_path / "toy.log", 2)) as run:
        run.event("rank_hello", rank=0)
        run.event("rank_hello", rank=1)
        run.reached(5)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        (step,) = run.intact()
        names = {path.name for path in (run.dir / f"step-{step:09d}").iterdir()}
        assert names == {"manifest.json", "toy-00000.json", "toy-00001.json"}
        pids = {int(event["rank_pid"]) for event in run.events("rank_hello")}
        assert len(pids) == 2
        assert min(pids) > wire.PID_SYSTEM_MAX
        assert not run.events("garbage")
        assert sorted(re.findall(r"^ready pid (\d+)", run.out, re.MULTILINE)) == ["1", "1"]


def test_a_pid_namespace_below_the_supervisor_gets_a_made_up_pid_and_watches_nobody() -> None:
    """Its own pid may be a stranger's outside, and the supervisor's may be a stranger's inside."""
    mine = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    assert meeting.pids({"CKPT_SUPERVISE_PID": "7", "CKPT_SUPERVISE_PIDNS": mine}) == (os.getpid(), 7)
    assert meeting.pids({"CKPT_SUPERVISE_PID": "7"}) == (os.getpid(), 7)
    assert meeting.pids({"CKPT_SUPERVISE_PID": "x", "CKPT_SUPERVISE_PIDNS": ""}) == (os.getpid(), 0)
    others = {meeting.pids({"CKPT_SUPERVISE_PID": "7", "CKPT_SUPERVISE_PIDNS": "pid:[1]"}) for _ in range(100)}
    assert len(others) == 100
    for pid, watched in others:
        assert watched == 0
        assert wire.PID_SYSTEM_MAX < pid < 1 << 53


@pytest.mark.parametrize("pid", [1 << 32, 1 << 33, (1 << 53) - 1, wire.NUMBER_MAX])
def test_a_made_up_pid_is_nobodys(pid: int) -> None:
    """Neither below the supervisor nor anywhere, nor that of which it holds the lower bits; no call is made with it."""
    for number in (pid, pid + os.getpid()):
        assert not children.is_descendant(number)
        assert children.state_of(number) == "gone"
        assert children.pidfd(number) is None
        assert not children.send(number, 0)


def test_a_pid_beyond_every_number_is_garbage() -> None:
    """As every other number in a word."""
    for pid in (0, -1, wire.NUMBER_MAX + 1):
        with pytest.raises(wire.DecodeError, match="identity out of range"):
            wire.decode_from_rank(wire.encode(wire.Finished(wire.Who(0, 0, pid), 0)))


def test_a_container_that_hides_the_socket_is_told_what_to_mount(tmp_path: Path) -> None:
    """Field case 14: one line at the start, no wait, and training goes on to its end."""
    hide = 'mount -t tmpfs none "$(dirname "${CKPT_SUPERVISE_SOCKET#ipc://}")" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, str(TOY), "--no-torch", "--steps", "5"]
    with supervised(tmp_path, command) as run:
        assert run.code() == 0, run.story()
        line = r"^ckpt: the supervisor's socket (/\S+)/s is not here.*bind-mount (/\S+) into it.*"
        told = re.findall(line, run.err, re.MULTILINE)
        assert len(told) == 1, run.err
        assert told[0][0] == told[0][1]
        assert "rank 0 trains on without supervision" in run.err
        run.said("^end ")


MPIRUNS = {
    "Open MPI": "SLURM_PROCID=0 SLURM_NTASKS=1 OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE={1} OMPI_COMM_WORLD_LOCAL_RANK={0}",
    "MPICH": "SLURM_PROCID=0 SLURM_NTASKS=1 PMI_RANK={0} PMI_SIZE={1} MPI_LOCALRANKID={0}",
    "MVAPICH2": "SLURM_PROCID=0 SLURM_NTASKS=1 PMI_RANK=0 PMI_SIZE=1 MV2_COMM_WORLD_RANK={0} MV2_COMM_WORLD_SIZE={1}",
    "inner srun": "SLURM_PROCID={0} SLURM_NTASKS={1} SLURM_LOCALID={0}",
}


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_ranks_of_mpirun_below_one_task_are_told_apart(tmp_path: Path, launcher: str) -> None:
    """Field cases 27 and 119: four ranks register with the one supervisor, and four acks make the checkpoint."""
    with supervised(tmp_path, ranks("", tmp_path / "toy.log", 4, MPIRUNS[launcher])) as run:
        for rank in range(4):
            assert run.event("rank_hello", rank=rank)["world_size"] == 4
        run.reached(5)
        run.signal(signal.SIGUSR1)
        assert run.code() == 75, run.story()
        (step,) = run.intact()
        assert len(list((run.dir / f"step-{step:09d}").glob("toy-*.json"))) == 4


def test_the_ranks_of_an_mpirun_that_submitted_the_job_are_not_those_of_its_srun(tmp_path: Path) -> None:
    """sbatch exports the variables of `srun --mpi=pmi2` and of mpirun; a plain srun below sets its own and lets them stand."""
    stale = {"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    with supervised(tmp_path, ranks("", tmp_path / "toy.log", 2, MPIRUNS["inner srun"]), env=stale) as run:
        for rank in range(2):
            assert run.event("rank_hello", rank=rank)["world_size"] == 2


def test_a_rank_outside_of_containers_has_its_own_pid(tmp_path: Path) -> None:
    """There its supervisor watches it, and it watches its supervisor."""
    with trained(tmp_path, "--steps", 5) as run:
        assert run.code() == 0
        assert run.toy_pid() == int(run.said(r"^ready pid (\d+)")[1])
