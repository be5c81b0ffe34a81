"""State of torch objects: who writes what, what is restored, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckpt_client import wire
from ckpt_client.files import SaveError
from ckpt_client.identity import Identity
from ckpt_client.torch_state import TorchState, put_random, take_random
from ckpt_client.wire import Position
from torch.utils.data import DataLoader


class Counter:
    """The smallest object with state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Its value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.value = state["value"]


class Loader(DataLoader[int]):
    """A loader that knows its position, as torchdata's does."""

    def __init__(self, position: int = 0) -> None:
        super().__init__([1, 2, 3])  # type: ignore[arg-type]
        self.at = position

    def state_dict(self) -> dict[str, Any]:
        """Its position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.at = state["at"]


def order(directory: Path) -> wire.SaveAt:
    """Save step 3 there."""
    return wire.SaveAt(1, Position(3, 0), str(directory), "go_on", 1000)


def who(rank: int, world: int, *, distributed: bool) -> Identity:
    """A rank of a world."""
    return Identity(rank, world, rank, 0, distributed)


@pytest.mark.parametrize(
    ("me", "expected"),
    [
        (who(0, 1, distributed=False), ["rank-00000.pt", "state.pt"]),
        (who(0, 2, distributed=True), ["rank-00000.pt", "state.pt"]),
        (who(1, 2, distributed=True), ["rank-00001.pt"]),
        (who(0, 2, distributed=False), ["rank-00000.pt"]),
        (who(1, 2, distributed=False), ["rank-00001.pt"]),
    ],
)
def test_replicated_state_is_written_once_and_all_else_by_every_rank(tmp_path: Path, me: Identity, expected: list[str]) -> None:
    """Without torch.distributed nobody says that the ranks' states are the same, so each writes its own."""
    files = TorchState({"counter": Counter(me.rank + 10)}, me).save(order(tmp_path))
    assert sorted(file.path for file in files) == expected
    back = Counter()
    if me.rank == 0 or not me.distributed:
        TorchState({"counter": back}, me).load(tmp_path, 3)
        assert back.value == me.rank + 10


def test_data_position_is_each_ranks_own(tmp_path: Path) -> None:
    """Also where the rest is replicated."""
    for rank in (1, 0):
        TorchState({"model": Counter(7), "data": Loader(rank + 5)}, who(rank, 2, distributed=True)).save(order(tmp_path))
    for rank in (0, 1):
        model, data = Counter(), Loader()
        TorchState({"model": model, "data": data}, who(rank, 2, distributed=True)).load(tmp_path, 3)
        assert (model.value, data.at) == (7, rank + 5)


def test_a_rank_that_did_not_write_the_checkpoint_gets_what_is_shared(tmp_path: Path) -> None:
    """Resuming with more ranks than before works for replicated state."""
    TorchState({"model": Counter(7)}, who(0, 1, distributed=False)).save(order(tmp_path))
    model = Counter()
    TorchState({"model": model}, who(3, 4, distributed=True)).load(tmp_path, 3)
    assert model.value == 7


def test_all_random_numbers_continue_where_they_were(tmp_path: Path) -> None:
    """Python, numpy and torch, after a trip through the file."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(1)), float(torch.randn(1))]

    draw()  # Leaves half a pair of normal numbers behind in Python and numpy.
    state = TorchState({"counter": Counter()}, who(0, 1, distributed=False))
    state.save(order(tmp_path))
    expected = draw()
    draw()
    again = TorchState({"counter": Counter()}, who(0, 1, distributed=False))
    again.load(tmp_path, 3)
    draw()  # Between loading and the first step anything may draw.
    again.restore_random()
    assert draw() == expected


def test_random_states_of_absent_generators_are_left_alone() -> None:
    """A checkpoint of a process without numpy, or of another number of devices, loads all the same."""
    states = take_random()
    states.pop("numpy", None)
    states["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    put_random(states)


def test_state_that_a_safe_load_refuses_fails_the_save(tmp_path: Path) -> None:
    """A checkpoint that cannot be loaded is worse than none, and the reason names the type."""
    with pytest.raises(SaveError, match="pathlib"):
        TorchState({"counter": Counter(Path("/x"))}, who(0, 1, distributed=False)).save(order(tmp_path))


def test_state_of_another_step_or_without_a_name_is_an_error(tmp_path: Path) -> None:
    """Nothing is half restored in silence."""
    me = who(0, 1, distributed=False)
    TorchState({"model": Counter(1)}, me).save(order(tmp_path))
    with pytest.raises(ValueError, match="holds step 3, not 4"):
        TorchState({"model": Counter()}, me).load(tmp_path, 4)
    with pytest.raises(KeyError, match="no state of 'scaler', only of"):
        TorchState({"scaler": Counter()}, me).load(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        TorchState({"model": Counter()}, me).load(tmp_path / "nowhere", 3)
