"""Sharded state (FSDP2) below a local supervisor: saved by all ranks together, loaded on any number of them, never half of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckpt_client import wire
from ckpt_client.files import SaveError
from ckpt_client.identity import Identity
from ckpt_client.torch_state import TorchState
from ckpt_client.wire import Position
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.run import Run, environment, eventually, has_ended, is_alive, supervised

TOY = Path(__file__).resolve().parents[1] / "support" / "toy_sharded.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
ALONE = Identity(0, 1, 0, 0, distributed=True)
TORCH_S = 200
"""Until up to four ranks have imported torch, on a machine that has other things to do."""

pytestmark = pytest.mark.timeout(900)


def trained(
    place: Path, ranks: int, *words: object, options: Sequence[object] = (), monitor_s: float = 0.1
) -> AbstractContextManager[Run]:
    """A supervised start on so many ranks; 0 ranks: one process without torch.distributed.

    `monitor_s`: so often torchrun looks whether a rank has ended.
    """
    toy = [str(TOY), "--words", str(place / "toy.log"), *map(str, words)]
    torchrun = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", str(monitor_s), "--"]
    launcher = torchrun if ranks else [sys.executable]
    return supervised(place, [*launcher, *toy], "--grace", "2m", *options, env={"OMP_NUM_THREADS": "1"})


def is_done(run: Run) -> bool:
    """Whether training has come to its end by itself."""
    return has_ended(run.code(TORCH_S), run.err) and re.search("^end ", run.out, re.MULTILINE) is not None


def digests(run: Run, what: str) -> dict[int, str]:
    """What this start has said of the whole weights and optimizer state, by steps done."""
    return {int(n): digest for n, digest in re.findall(rf"^{what} (\d+) (\w+) ", run.out, re.MULTILINE)}


def interrupted(run: Run, steps: int) -> tuple[int, str]:
    """End it after some steps more; the step that is committed, and the digest then."""
    start = int(run.said(r"^start (\d+) ", TORCH_S)[1])
    run.said(rf"^step {start + steps} ", TORCH_S)
    run.signal(signal.SIGTERM)
    assert run.code(TORCH_S) == 75, run.story()
    at = run.intact()[-1]
    return at, digests(run, "step")[at]


def test_interrupted_sharded_training_goes_on_to_bit_identical_weights(tmp_path: Path) -> None:
    """Two ranks, saved on SIGTERM and periodically; every rank wrote its own shards, and what is replicated is there once."""
    steps = 40
    with trained(tmp_path / "whole", 2, "--steps", steps) as run:
        assert is_done(run), run.story()
        whole = digests(run, "step")
    with trained(tmp_path / "cut", 2, "--steps", steps, "--step-ms", 200, options=["--every-steps", 2]) as run:
        at, _ = interrupted(run, 4)
        assert at < steps, "too late to be an interruption"
        assert run.event("rank_hello")["sharded"] is True
        assert run.events("round_given_up") == []
        written = {path.name for path in (run.dir / f"step-{at:09d}").iterdir()}
        shared = {"manifest.json", "state.pt", ".metadata"}
        assert written == shared | {name for rank in (0, 1) for name in (f"rank-{rank:05d}.pt", f"__{rank}_0.distcp")}
    with trained(tmp_path / "cut", 2, "--steps", steps) as run:
        assert is_done(run), run.story()
        assert digests(run, "start") == {at: whole[at]}
        assert digests(run, "step") == {n: digest for n, digest in whole.items() if n > at}


def test_a_sharded_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    """From 4 to 2 to 4 ranks to one process without torch.distributed: weights and optimizer state are the same each time."""
    with trained(tmp_path, 4, "--steps", 10_000, "--step-ms", 50) as run:
        saved = [interrupted(run, 2)]
    for ranks in (2, 4):
        with trained(tmp_path, ranks, "--steps", 10_000, "--step-ms", 50) as run:
            saved.append(interrupted(run, 2))
            assert digests(run, "start") == dict(saved[-2:-1]), run.story()
    with trained(tmp_path, 0, "--steps", saved[-1][0]) as run:
        assert run.code(TORCH_S) == 0, run.story()
        assert digests(run, "start") == dict(saved[-1:])


def test_a_rank_that_fails_or_stays_away_in_a_save_costs_that_save_only(tmp_path: Path) -> None:
    """Each rank says Failed within the time-out, training goes on, nothing is committed, and the next save works."""
    troubles = ["--at", "2:1:raise", "--at", "4:1:16000", "--at", "6:0:raise"]
    options = ["--every-steps", 2, "--save-timeout", "10s"]
    with trained(tmp_path, 2, "--steps", 9, *troubles, options=options) as run:
        assert is_done(run), run.story()
        assert run.intact() == [8]
        reasons = [event["reason"] for event in run.events("rank_failed")]
        assert "rank 1: OSError: no space left here" in reasons
        assert "rank 0: OSError: no space left here" in reasons
        assert "could not save together" in run.err, run.story()


def test_a_rank_that_dies_in_a_save_hangs_nobody_and_nothing_is_committed(tmp_path: Path) -> None:
    """The others are out of it when its connections close, long before the time-out of 15 minutes."""
    words = ("--steps", 1_000_000, "--at", "3:2:die")
    # torchrun ends the others when it sees the dead one: they have so long to see it by themselves.
    with trained(tmp_path, 4, *words, options=["--every-steps", 3], monitor_s=3.0) as run:
        run.said(r"^saving 3 die ", TORCH_S)
        assert run.code(TORCH_S) not in (0, 75), run.story()
        assert run.steps() == []
        # They were not ended from outside: they have seen the save fail, at once. Whoever hears first that it is given up trains
        # on, and sees it in the next collective.
        assert re.search(r"could not save together, after \d\.\d s|Connection (closed|reset) by peer", run.err), run.story()
        pids = [event["rank_pid"] for event in run.events("rank_hello")]
        assert len(pids) == 4
        eventually(lambda: not any(is_alive(pid) for pid in pids), "the end of all ranks")


def test_after_a_failure_that_one_rank_alone_knows_of_the_ranks_meet_in_a_new_group() -> None:
    """The others notice at the beginning of the next save, when that rank's connections are closed: no save is lost by it.

    Whoever waits for the time-out (60 s, of which gloo gets nine tenths) takes longer than half of it.
    """
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", "3", "--", str(TOY), "--meet"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TORCH_S, check=False)
    assert has_ended(done.returncode, done.stderr), done.stderr[-4_000:]
    met = re.findall(r"^met (\d) (\d+)\.\d rank (\d)", done.stdout, re.MULTILINE)
    assert sorted((number, rank) for number, _, rank in met) == [(n, rank) for n in "1234" for rank in "012"]
    assert max(int(seconds) for _, seconds, _ in met) < 30, "somebody waited for the time-out"


@pytest.fixture(name="world")
def _world() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Kept:
    """An object with the state that it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.state = dict(state)


def sharded(value: float = 1.0) -> nn.Linear:
    """A module of one rank's shards, all of this value."""
    module = nn.Linear(4, 2)
    nn.init.constant_(module.weight, value)
    fully_shard(module)
    return module


def order(directory: Path, number: int = 1) -> wire.SaveAt:
    """Save step 3 there."""
    directory.mkdir(parents=True, exist_ok=True)
    return wire.SaveAt(number, Position(3, 0), str(directory), "go_on", 20_000)


@pytest.mark.usefixtures("world")
def test_an_optimizer_of_sharded_parameters_needs_their_module() -> None:
    """The parameters' names are in the module only; the message says what to write. Several modules are as good."""
    one, two = sharded(), sharded()
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    for passed in ({}, {"one": one}):
        with pytest.raises(TypeError, match=r"optimizer= is an optimizer of sharded .* pass that too"):
            TorchState({"optimizer": optimizer, **passed}, ALONE)
    assert TorchState({"optimizer": optimizer, "one": one, "two": two}, ALONE).sharded
    assert not TorchState({"model": nn.Linear(4, 2)}, ALONE).sharded


@pytest.mark.usefixtures("world")
def test_a_save_before_the_first_step_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    """torch would run a step of it to have something to save; on resuming it is as fresh as it was."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    TorchState({"model": model, "optimizer": optimizer}, ALONE).save(order(tmp_path))
    assert optimizer.state == {}
    other = sharded(2.0)
    loaded = torch.optim.AdamW(other.parameters(), lr=0.1)
    TorchState({"model": other, "optimizer": loaded}, ALONE).load(tmp_path, 3)
    assert loaded.state == {}
    assert loaded.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_over_several_modules_come_back(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    """With groups of their own, with and without state; the replicated object beside them is in state.pt."""

    def made(value: float, lr: float) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        one, two = sharded(value), sharded(value)
        groups = [{"params": [*one.parameters()], "lr": lr}, {"params": [*two.parameters()], "lr": 2 * lr}]
        optimizer = kind(groups, lr=lr)
        return {"optimizer": optimizer, "one": one, "two": two, "kept": Kept(n=int(value))}, optimizer

    state, optimizer = made(3.0, 0.25)
    state["one"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    files = TorchState(state, ALONE).save(order(tmp_path))
    assert sorted(file.path for file in files) == [".metadata", "__0_0.distcp", "rank-00000.pt", "state.pt"]
    assert all(file.size_bytes == (tmp_path / file.path).stat().st_size and file.xxh3_128 for file in files)
    again, loaded = made(1.0, 0.5)
    TorchState(again, ALONE).load(tmp_path, 3)
    assert again["kept"].state == {"n": 3}
    assert [group["lr"] for group in loaded.param_groups] == [0.25, 0.5]
    for name in ("one", "two"):
        for old, new in zip(state[name].parameters(), again[name].parameters(), strict=True):
            assert torch.equal(old.full_tensor(), new.full_tensor())
            assert optimizer.state.get(old, {}).keys() == loaded.state.get(new, {}).keys()
            for key, value in optimizer.state.get(old, {}).items():
                assert torch.equal(_whole(value), _whole(loaded.state[new][key]))


def _whole(value: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


@pytest.mark.usefixtures("world")
def test_what_cannot_be_loaded_again_is_not_saved_and_what_does_not_fit_is_not_loaded(tmp_path: Path) -> None:
    """Unsafe types, DTensors that came later, a checkpoint of more or less than there is, or of whole state."""
    model = sharded()
    with pytest.raises(SaveError, match=r"^rank 0: .*pathlib"):
        TorchState({"kept": Kept(weight=model.weight, path=Path("/x"))}, ALONE).save(order(tmp_path / "unsafe"))
    late = Kept()
    state = TorchState({"model": model, "late": late}, ALONE)
    late.state["weight"] = model.weight
    with pytest.raises(SaveError, match="late= holds sharded tensors"):
        state.save(order(tmp_path / "late"))
    late.state.clear()
    state.save(order(tmp_path / "good", 2))  # The failed one has cost nothing but itself.
    bigger = nn.Sequential(sharded(), sharded())
    with pytest.raises(KeyError, match=r"no model\.0"):
        TorchState({"model": bigger}, ALONE).load(tmp_path / "good", 3)
    state = TorchState({"model": Kept(weight=model.weight)}, ALONE)
    with pytest.raises(ValueError, match=r"holds model\.bias, for which there is no place"):
        state.load(tmp_path / "good", 3)
    TorchState({"model": nn.Linear(4, 2)}, ALONE).save(order(tmp_path / "whole"))
    with pytest.raises(ValueError, match="as a whole, and it is sharded now"):
        TorchState({"model": model}, ALONE).load(tmp_path / "whole", 3)
