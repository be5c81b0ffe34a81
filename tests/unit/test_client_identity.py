"""Who a process is (docs/protocol.md, rule 11), and what it resumes from."""

from __future__ import annotations

import pytest
from ckpt_client import wire
from ckpt_client.identity import Identity, identify, torch_distributed
from ckpt_client.meeting import step_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("environment", "distributed", "expected"),
    [
        ({}, None, Identity(0, 1, 0, 0, distributed=False)),
        (SRUN, None, Identity(5, 8, 2, 0, distributed=False)),
        (SRUN | TORCHRUN, None, Identity(3, 4, 1, 0, distributed=False)),
        (SRUN | TORCHRUN, (6, 7), Identity(6, 7, 1, 0, distributed=True)),
        (SRUN | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, None, Identity(2, 4, 2, 0, distributed=False)),
        (SRUN | OPENMPI | {"PMI_RANK": "0", "PMI_SIZE": "1"}, None, Identity(2, 4, 1, 0, distributed=False)),
        (SRUN | MVAPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"}, None, Identity(1, 2, 1, 0, distributed=False)),
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "4"}, None, Identity(1, 4, 2, 0, distributed=False)),
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}, None, Identity(1, 4, 3, 0, distributed=False)),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, None, Identity(5, 8, 2, 0, distributed=False)),  # srun --mpi=pmi2
        (SRUN | OPENMPI | TORCHRUN, None, Identity(3, 4, 1, 0, distributed=False)),
        ({"RANK": "3"}, None, Identity(0, 1, 0, 0, distributed=False)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None, Identity(0, 1, 0, 0, distributed=False)),
        ({"RANK": "", "WORLD_SIZE": "x", **SRUN}, None, Identity(5, 8, 2, 0, distributed=False)),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, None, Identity(0, 1, 0, 0, distributed=False)),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, None, Identity(0, 1, 0, 2, distributed=False)),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "CKPT_SUPERVISE_RESTART": "3"}, None, Identity(0, 1, 0, 30_001, distributed=False)),
    ],
)
def test_the_first_source_that_makes_sense_is_believed(
    environment: dict[str, str], distributed: tuple[int, int] | None, expected: Identity
) -> None:
    """torch.distributed, torchrun's variables, mpirun's (field case 119), Slurm's, then 0 of 1; garbage counts as absent."""
    assert identify(environment, distributed) == expected


PMI = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "7"}
BELOW_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node-7@1",
}


@pytest.mark.parametrize(
    ("found", "now", "expected"),
    [
        # sbatch from inside `srun --mpi=pmi2 --pty bash`, and from below mpirun; then a plain srun.
        (PMI, SRUN | PMI, (5, 8, 2)),
        (BELOW_MPIRUN, SRUN | BELOW_MPIRUN, (5, 8, 2)),
        (PMI | BELOW_MPIRUN | MVAPICH, SRUN | PMI | BELOW_MPIRUN | MVAPICH, (5, 8, 2)),
        # srun --mpi=pmi2 above the supervisor: Slurm's own names say the same.
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 2)),
        # mpirun from below has written over them: another rank, another size, or the same of another launch.
        (PMI, SRUN | PMI | {"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4, 7)),
        (PMI, SRUN | PMI | {"PMI_SIZE": "4"}, (0, 4, 7)),
        (PMI, SRUN | PMI | OPENMPI, (2, 4, 1)),
        (BELOW_MPIRUN, SRUN | BELOW_MPIRUN | {"PMIX_NAMESPACE": "prterun-node-9@1"}, (0, 4, 0)),
        (PMI | {"PMI_PORT": "node:1"}, SRUN | PMI | {"PMI_PORT": "node:2"}, (0, 1, 7)),
        # What nobody could believe is not told, and does no harm.
        ({"PMI_RANK": "0 1/2", "PMI_SIZE": "\udcff"}, SRUN | PMI, (0, 1, 7)),
        ({}, SRUN | PMI, (0, 1, 7)),
    ],
)
def test_what_mpirun_had_left_in_the_supervisors_own_environment_is_not_believed(
    found: dict[str, str], now: dict[str, str], expected: tuple[int, int, int]
) -> None:
    """It is exported from the shell that submitted the job, and every task of a plain srun would be its rank."""
    told = {wire.MPI_FOUND: wire.mpi_found(found)}
    assert identify(now | told, None)[:3] == expected


def test_nothing_is_told_of_mpirun_where_there_was_none() -> None:
    """And what is told is one word for each that was."""
    assert wire.mpi_found(SRUN | TORCHRUN) == ""
    assert wire.mpi_found(PMI) == "PMI_RANK=0/1"
    assert wire.mpi_found(PMI | OPENMPI) == "OMPI_COMM_WORLD_RANK=2/4 PMI_RANK=0/1"


def test_a_process_without_a_group_has_no_distributed_rank() -> None:
    """Looking at torch.distributed neither imports nor initialises it."""
    assert torch_distributed() is None


@pytest.mark.parametrize(
    ("path", "step"), [("", 0), ("/x/step-000001200", 1200), ("step-12/", 12), ("/step-3/step-000000004", 4)]
)
def test_the_name_of_a_checkpoint_says_its_step(path: str, step: int) -> None:
    """Used when the supervisor did not answer: the environment holds the path."""
    assert step_of(path) == step


def test_a_path_that_is_no_checkpoint_is_an_error() -> None:
    """Starting from zero in silence would be worse."""
    with pytest.raises(ValueError, match="does not name a checkpoint"):
        step_of("/x/model.pt")
