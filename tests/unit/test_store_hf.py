"""Directories of the Trainer, of Lightning and of DeepSpeed: what they need is there, and nobody else's is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_supervisor.store import Expected, Verdict, check_files, check_foreign, newest_intact, verify_checkpoint

from tests.support.checkpoint_files import (
    SAMPLES,
    Files,
    committed_files,
    dcp_directory,
    lightning_file,
    read_files,
    safetensors_file,
    sharded_model,
    torch_file,
    trainer_directory,
    write_files,
)

MODEL = {"model.safetensors": safetensors_file(["a"], 1)}


def without(*names: str) -> Callable[[Files], None]:
    """Remove these files."""

    def change(files: Files) -> None:
        for name in names:
            del files[name]

    return change


def put(name: str, data: bytes) -> Callable[[Files], None]:
    """Replace or add one."""
    return lambda files: files.update({name: data})


STATE = trainer_directory(1)["trainer_state.json"]

BROKEN: dict[str, tuple[Callable[[Files], None], Verdict, str]] = {
    "no state": (without("trainer_state.json"), Verdict.MISSING, "trainer_state.json"),
    "no optimizer": (without("optimizer.pt"), Verdict.MISSING, "optimizer.pt"),
    "no optimizer, no scheduler": (without("optimizer.pt", "scheduler.pt"), Verdict.MISSING, "optimizer.pt"),
    "no scheduler": (without("scheduler.pt"), Verdict.MISSING, "scheduler.pt"),
    "a shard missing": (without("model-00002-of-00003.safetensors"), Verdict.MISSING, "model-00002-of-00003.safetensors"),
    "no model": (
        without(*(name for name in sharded_model(1) if name != "config.json")),
        Verdict.MISSING,
        "",
    ),
    "the state cut": (put("trainer_state.json", STATE[: len(STATE) // 2]), Verdict.TRUNCATED, "trainer_state.json"),
    "the state empty": (put("trainer_state.json", b""), Verdict.TRUNCATED, "trainer_state.json"),
    "the state zeros": (put("trainer_state.json", bytes(500)), Verdict.CORRUPT, "trainer_state.json"),
    "another step": (
        put("trainer_state.json", trainer_directory(1, 400)["trainer_state.json"]),
        Verdict.MIXED,
        "trainer_state.json",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_trainers_directory_that_lacks_something_is_refused(tmp_path: Path, kind: str) -> None:
    """By what it says of itself, and at the commit, so that checkpoint-400 stays the newest one (field case 69)."""
    change, verdict, path = BROKEN[kind]
    files = SAMPLES["Trainer with shards"](1)
    change(files)
    directory = write_files(tmp_path / "checkpoint-500", files)
    report = check_foreign(directory)
    assert (report.verdict, report.findings[0].path) == (verdict, path), report
    at_commit, entries = check_files(directory, [Expected(name, len(data), "", 0) for name, data in files.items()], "structure")
    assert (at_commit.verdict, entries) == (verdict, ())


GOOD: dict[str, Files] = {
    "as it is": SAMPLES["Trainer with shards"](1),
    "one file of safetensors": {**MODEL, **trainer_directory(1)},
    "of pickles": {"pytorch_model.bin": torch_file({"a": 1}), **trainer_directory(1)},
    "an adapter": {"adapter_model.safetensors": MODEL["model.safetensors"], **trainer_directory(1)},
    "adapters by name": {"first/adapter_model.safetensors": MODEL["model.safetensors"], **trainer_directory(1)},
    "several processes": {**MODEL, **trainer_directory(1, processes=4)},
    "save_only_model": {
        **MODEL,
        **{name: data for name, data in trainer_directory(1).items() if name in {"trainer_state.json", "training_args.bin"}},
    },
    "a final model": {**MODEL, "training_args.bin": torch_file(1)},
    "save_state beside checkpoints": {"trainer_state.json": STATE, **{f"checkpoint-500/{k}": v for k, v in MODEL.items()}},
    "DeepSpeed inside": {
        **{name: data for name, data in trainer_directory(1).items() if name not in {"optimizer.pt", "scheduler.pt"}},
        "latest": b"global_step500",
        "zero_to_fp32.py": b"pass",
        "global_step500/mp_rank_00_model_states.pt": torch_file(1),
        "global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": torch_file(1),
    },
    "FSDP inside": {
        **{name: data for name, data in trainer_directory(1).items() if name != "optimizer.pt"},
        **{f"pytorch_model_fsdp_0/{name}": data for name, data in dcp_directory(1).items()},
        **{f"optimizer_0/{name}": data for name, data in dcp_directory(2).items()},
    },
    "somebody's own names": {"optimizer.pt": torch_file(1), "model.pt": torch_file(1), "rng_state.pth": torch_file(1)},
    "somebody's own trainer": {"trainer_state.json": b'{"global_step": 7}', "optimizer.pt": torch_file(1), "w.pt": torch_file(1)},
    "somebody's own state": {"trainer_state.json": b"[1, 2, 3]", "scheduler.pt": torch_file(1)},
    "somebody's latest": {"latest": b"step 5", "meta.pt": torch_file({"a": 1}), "model.pt": torch_file(1)},
}


@pytest.mark.parametrize("kind", GOOD)
def test_every_good_variety_is_no_false_alarm(tmp_path: Path, kind: str) -> None:
    """What the Trainer writes with other options, and what only has some of its names."""
    report = check_foreign(write_files(tmp_path / "checkpoint-500", GOOD[kind]))
    assert report.verdict is Verdict.INTACT, report


def test_a_gap_in_the_random_states_is_seen(tmp_path: Path) -> None:
    """Four processes wrote theirs, one of the four is not there."""
    files = {**MODEL, **trainer_directory(1, processes=4)}
    del files["rng_state_2.pth"]
    report = check_foreign(write_files(tmp_path / "checkpoint-500", files))
    assert (report.verdict, report.findings[0].path) == (Verdict.MISSING, "rng_state_2.pth")


def test_a_trainers_directory_inside_a_checkpoint_is_judged_in_its_place(tmp_path: Path) -> None:
    """What is found is named by its path below the checkpoint; the name of the inner directory counts."""
    files = {f"out/checkpoint-500/{name}": data for name, data in {**MODEL, **trainer_directory(1)}.items()}
    assert check_foreign(write_files(tmp_path / "good", files)).verdict is Verdict.INTACT
    (tmp_path / "good/out/checkpoint-500").rename(tmp_path / "good/out/checkpoint-600")
    report = check_foreign(tmp_path / "good")
    assert report.reason == "out/checkpoint-600/trainer_state.json: is of step 500, the directory's name of 600"


def test_one_committed_on_structure_alone_is_looked_at_as_a_whole_again(tmp_path: Path) -> None:
    """Where a digest proves that nothing has changed, only if it is asked for."""
    files = SAMPLES["Trainer with shards"](1)
    on_structure = committed_files(tmp_path, 5, files, "structure")
    whole = committed_files(tmp_path, 6, files)
    for checkpoint in (on_structure, whole):
        assert verify_checkpoint(checkpoint, deep=True).verdict is Verdict.INTACT
        state = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())
        state["weight_map"]["layers.0.weight"] = "model-00003-of-00003.safetensors"
        broken = json.dumps(state, indent=2).encode()
        assert len(broken) == len(files["model.safetensors.index.json"])
        (checkpoint / "model.safetensors.index.json").write_bytes(broken)
    assert verify_checkpoint(on_structure).verdict is Verdict.MISSING
    assert verify_checkpoint(whole).verdict is Verdict.CORRUPT
    assert verify_checkpoint(whole, deep=True).verdict is Verdict.MISSING
    assert newest_intact(tmp_path).chosen is None


def lightning_sharded() -> Files:
    """What Lightning's strategy for FSDP writes as one `.ckpt`."""
    return {**dcp_directory(1), "meta.pt": lightning_file(1)}


def deepspeed(tag: str = "checkpoint", ranks: int = 3) -> Files:
    """What DeepSpeed writes, and Lightning's strategy of that name."""
    parts = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    files = {f"{tag}/{name}": torch_file(1) for name in [*parts, "mp_rank_00_model_states.pt"]}
    return {**files, "latest": tag.encode(), "zero_to_fp32.py": b"pass"}


LIGHTNING: dict[str, tuple[Files, Callable[[Files], None], Verdict]] = {
    "sharded": (lightning_sharded(), without(), Verdict.INTACT),
    "sharded without .metadata": (lightning_sharded(), without(".metadata"), Verdict.MISSING),
    "sharded without shards": (lightning_sharded(), without("__0_0.distcp"), Verdict.MISSING),
    "sharded with nothing": (lightning_sharded(), without(".metadata", "__0_0.distcp"), Verdict.MISSING),
    "deepspeed": (deepspeed(), without(), Verdict.INTACT),
    "deepspeed without a rank": (deepspeed(), without("checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt"), Verdict.MISSING),
    "deepspeed without the model": (deepspeed(), without("checkpoint/mp_rank_00_model_states.pt"), Verdict.MISSING),
    "deepspeed with another tag": (deepspeed(), put("latest", b"global_step9"), Verdict.MISSING),
    "deepspeed that leaves": (deepspeed(), put("latest", b"../../etc"), Verdict.FOREIGN),
    "deepspeed with ranks of a model": (
        deepspeed(),
        put("checkpoint/mp_rank_02_model_states.pt", torch_file(1)),
        Verdict.MISSING,
    ),
}


@pytest.mark.parametrize("kind", LIGHTNING)
def test_a_directory_of_lightning_or_deepspeed_needs_its_parts(tmp_path: Path, kind: str) -> None:
    """Parts that others name have to be there."""
    files, change, verdict = LIGHTNING[kind]
    files = dict(files)
    change(files)
    report = check_foreign(write_files(tmp_path / "epoch=1.ckpt", files))
    assert report.verdict is verdict, report


def test_a_lightning_file_is_a_torch_archive(tmp_path: Path) -> None:
    """Its checksums are read, and every byte of its records is spoken for."""
    path = tmp_path / "epoch=0.ckpt"
    path.write_bytes(lightning_file(3))
    report = check_foreign(path)
    assert (report.verdict, report.unchecked, report.bytes_read) == (Verdict.INTACT, (), path.stat().st_size)
    assert read_files(tmp_path)[path.name] == lightning_file(3)


def test_a_trainer_whose_model_is_in_a_pth_file_is_whole(tmp_path: Path) -> None:
    """Subclasses save their model as they like; a file of random numbers is no model."""
    write_files(tmp_path / "checkpoint-5", trainer_directory(5, step=5))
    assert "no file of a model" in check_foreign(tmp_path / "checkpoint-5").reason
    (tmp_path / "checkpoint-5" / "adapter.pth").write_bytes(torch_file(5))
    assert check_foreign(tmp_path / "checkpoint-5").reason == ""


def test_a_trainers_directory_without_random_states_is_refused(tmp_path: Path) -> None:
    """Optimizer and scheduler are there: it would go on with other random numbers, and nothing would be said."""
    files = {**MODEL, **trainer_directory(1)}
    del files["rng_state.pth"]
    report = check_foreign(write_files(tmp_path / "checkpoint-500", files))
    assert (report.verdict, report.findings[0].path) == (Verdict.MISSING, "rng_state.pth")


def parts_of(of: int, *there: int, stem: str = "model", suffix: str = ".safetensors") -> Files:
    """Some of so many parts."""
    data = MODEL["model.safetensors"] if suffix == ".safetensors" else torch_file(1)
    return {f"{stem}-{number:05d}-of-{of:05d}{suffix}": data for number in there}


@pytest.mark.parametrize("stem,suffix", [("model", ".safetensors"), ("pytorch_model", ".bin")])
def test_a_model_in_parts_needs_all_of_them_and_its_index(tmp_path: Path, stem: str, suffix: str) -> None:
    """By their names alone: there may be no index to ask."""
    for number, (of, there, absent) in enumerate((
        (3, (1, 2, 3), f"{stem}{suffix}.index.json"), (3, (1, 3), f"{stem}-00002-of-00003{suffix}"),
        (2, (1,), f"{stem}-00002-of-00002{suffix}"), (2, (0,), f"{stem}-00001-of-00002{suffix}"),
    )):  # fmt: skip
        files = {**parts_of(of, *there, stem=stem, suffix=suffix), "config.json": b"{}"}
        report = check_foreign(write_files(tmp_path / str(number), files))
        assert (report.verdict, report.findings[0].path) == (Verdict.MISSING, absent), report
    own = write_files(tmp_path / "own", parts_of(2, 1, 2, stem=stem, suffix=suffix))
    assert check_foreign(own).verdict is Verdict.INTACT, "a training of its own may number its ranks' files like that"
    assert check_foreign(write_files(tmp_path / "one", parts_of(1, 1, stem=stem, suffix=suffix))).verdict is Verdict.INTACT
