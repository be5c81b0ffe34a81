"""Checkpoint directories of Lightning, and of DeepSpeed, whose layout Lightning's strategy of that name writes.

Owns what these need beside what their files are. Must not judge the files themselves: a `.ckpt` is an archive of
torch.save, and the shards of FSDP are a directory of torch.distributed.checkpoint, each with a reader of its own.

Lightning with FSDP: `meta.pt` beside `.metadata` and `*.distcp`. DeepSpeed: `latest` names a directory that holds
`mp_rank_00_model_states.pt` and `zero_pp_rank_0_mp_rank_00_optim_states.pt` of every rank (Lightning calls it
`checkpoint`). How many ranks there were is inside a pickle, so the last ones can be absent unseen; a gap cannot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from ckpt_supervisor.store.formats.structure import Folder, SetLook
from ckpt_supervisor.store.look import read_up_to
from ckpt_supervisor.store.manifest import path_problem
from ckpt_supervisor.store.verdict import Finding, Verdict

META = "meta.pt"
LATEST = "latest"
LATEST_BYTES_MAX = 255
META_BYTES_MAX = 16 * 1024 * 1024

_LIGHTNING_KEY = b"pytorch-lightning_version"
_MODEL_STATE = re.compile(r"(?:mp_rank_([0-9]{1,6})|zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6}))_model_states\.pt")
_OPTIMIZER_STATE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt")
_PARTS = ("_model_states.pt", "_optim_states.pt", "layer_")


def read_set(folder: Folder) -> SetLook | None:
    """What a directory of Lightning or DeepSpeed lacks. Raises NotRegular, OSError."""
    direct = {name for name in folder.files if "/" not in name}
    sharded = _sharded(folder, direct)
    findings = [*sharded] if sharded is not None else []
    parts = any(name.endswith(_PARTS[:2]) for name in direct)
    tag = _tag(folder) if LATEST in direct else ""
    if tag:
        findings += _tag_problems(folder, tag)
    if parts:
        findings += _gaps(direct)
    if sharded is None and not tag and not parts:
        return None
    return SetLook("Lightning" if sharded is not None else "DeepSpeed", tuple(findings))


def _sharded(folder: Folder, direct: set[str]) -> list[Finding] | None:
    """None if this is not a sharded checkpoint of Lightning."""
    has_shards = any(name.endswith(".distcp") for name in direct)
    if META not in direct or (has_shards and ".metadata" in direct) or folder.files[META] > META_BYTES_MAX:
        return None  # whole as far as this reader is concerned, or another one's
    fd = folder.open_file(META)
    try:
        if _LIGHTNING_KEY not in read_up_to(fd, META_BYTES_MAX):
            return None
    finally:
        os.close(fd)
    if has_shards or ".metadata" in direct:
        lost = ".metadata" if has_shards else "__0_0.distcp"
        return [Finding(Verdict.MISSING, lost, None, f"is not there, and Lightning's {META} is")]
    if any(name.endswith(_PARTS[:2]) for name in folder.files):
        return None
    return [Finding(Verdict.MISSING, ".metadata", None, f"is not there, and Lightning's {META} is")]


def _tag(folder: Folder) -> str:
    """The directory that `latest` names, "" if this is no DeepSpeed's: it has to have its parts, or be gone altogether."""
    if not 0 < folder.files[LATEST] <= LATEST_BYTES_MAX:
        return ""
    fd = folder.open_file(LATEST)
    try:
        tag = read_up_to(fd, LATEST_BYTES_MAX).decode("utf-8", "replace").strip()
    finally:
        os.close(fd)
    is_deepspeed = "zero_to_fp32.py" in folder.files or any(name.endswith(_PARTS[:2]) for name in folder.files)
    return tag if tag and is_deepspeed else ""


def _tag_problems(folder: Folder, tag: str) -> Iterator[Finding]:
    problem = path_problem(tag)
    if problem:
        yield Finding(Verdict.FOREIGN, LATEST, None, f"names a directory {problem}")
        return
    inside = [name[len(tag) + 1 :] for name in folder.files if name.startswith(f"{tag}/")]
    if not inside:
        yield Finding(Verdict.MISSING, tag, None, f"is not there, and {LATEST} names it")
    elif not any(name.endswith(_PARTS[0]) for name in inside):
        yield Finding(Verdict.MISSING, f"{tag}/mp_rank_00{_PARTS[0]}", None, "is not there: no file of a model")


def _gaps(direct: set[str]) -> Iterator[Finding]:
    """Ranks below the highest one whose part is not there."""
    optimizers: dict[int, set[int]] = {}
    models: set[int] = set()
    for name in direct:
        if (match := _OPTIMIZER_STATE.fullmatch(name)) is not None:
            optimizers.setdefault(int(match[2]), set()).add(int(match[1]))
        elif (match := _MODEL_STATE.fullmatch(name)) is not None:
            models.add(int(match[1] or match[3]))
    highest = max((max(ranks) for ranks in optimizers.values()), default=-1)
    for model_rank, ranks in sorted(optimizers.items()):
        absent = _first_absent(ranks, highest)
        if absent is not None:
            name = f"zero_pp_rank_{absent}_mp_rank_{model_rank:02d}{_PARTS[1]}"
            yield Finding(Verdict.MISSING, name, None, f"is not there, and that of rank {highest} is")
    absent = _first_absent({*models, *optimizers}, max((*models, *optimizers), default=-1))
    if absent is not None:
        yield Finding(Verdict.MISSING, f"mp_rank_{absent:02d}{_PARTS[0]}", None, "is not there, and those of higher ranks are")


def _first_absent(numbers: Iterable[int], highest: int) -> int | None:
    there = set(numbers)
    return next((number for number in range(highest + 1) if number not in there), None)
