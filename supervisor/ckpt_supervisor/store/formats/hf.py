"""Checkpoint directories of the Hugging Face Trainer.

Owns what such a directory has to hold to be resumed from (field case 69). Must not judge the files themselves, nor the
shards that an index names: other readers do. It is told by its files: `trainer_state.json` with `global_step` and log, or
`training_args.bin` beside a part of the training's state. With `save_only_model` it holds neither optimizer, scheduler nor
random numbers; one of these without the others was cut off in between. A model or a final save is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckpt_supervisor.store.formats.structure import Folder, SetLook
from ckpt_supervisor.store.verdict import Finding, Verdict

STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
STATE_HEAD_BYTES = 256 * 1024
STATE_TAIL_BYTES = 64
"""The step stands before the log, which grows over a long run: keys are sorted."""

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_SCHEDULER = "scheduler.pt"
_RANDOM = re.compile(r"rng_state(?:_([0-9]{1,7}))?\.pth")
_NAME = re.compile(r"checkpoint-([0-9]{1,18})")
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*([0-9]{1,18})(?![0-9.eE])')
_LOG = b'"log_history"'
_MODEL_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".msgpack",
    ".h5",
)


def read_set(folder: Folder) -> SetLook | None:
    """What a Trainer's directory lacks, and whether it is the one that its name says. Raises NotRegular, OSError."""
    direct = {name for name in folder.files if "/" not in name}
    resumes = direct & {*_OPTIMIZERS, _SCHEDULER} or any(_RANDOM.fullmatch(name) for name in direct)
    head, tail = _read_state(folder) if STATE in direct else (b"", b"")
    is_state = _GLOBAL_STEP.search(head) is not None and _LOG in head
    # Two of three: a final model beside its arguments is none, nor is a state that somebody wrote by hand.
    if not is_state and sum((ARGUMENTS in direct, STATE in direct, bool(resumes))) < 2:
        return None
    if not is_state and ARGUMENTS not in direct and head.strip(b"\0"):
        return None  # a file of that name with something else in it
    findings = [*_lacks(folder, direct, bool(resumes)), *_state_problems(folder, direct, head, tail)]
    return SetLook("Hugging Face Trainer", tuple(findings))


def _read_state(folder: Folder) -> tuple[bytes, bytes]:
    """The first bytes and the last ones."""
    fd = folder.open_file(STATE)
    try:
        tail_at = max(0, folder.files[STATE] - STATE_TAIL_BYTES)
        return os.pread(fd, STATE_HEAD_BYTES, 0), os.pread(fd, STATE_TAIL_BYTES, tail_at)
    finally:
        os.close(fd)


def _lacks(folder: Folder, direct: set[str], resumes: bool) -> Iterator[Finding]:
    if STATE not in direct:
        yield Finding(Verdict.MISSING, STATE, None, "is not there: the Trainer cannot resume without it")
    own = {ARGUMENTS, _SCHEDULER, *_OPTIMIZERS}
    # Subdirectories: adapters by name, FSDP's and DeepSpeed's parts.
    has_parts = any("/" in name for name in folder.files)
    has_model = any(name.endswith(_MODEL_SUFFIXES) and name not in own and not _RANDOM.fullmatch(name) for name in direct)
    if (resumes or ARGUMENTS in direct) and not has_model and not has_parts:
        yield Finding(Verdict.MISSING, "", None, "holds no file of a model")
    has_optimizer = not direct.isdisjoint(_OPTIMIZERS)
    if resumes and not has_optimizer and not has_parts and not any(name.startswith("optimizer") for name in direct):
        yield Finding(Verdict.MISSING, _OPTIMIZERS[0], None, "is not there, and other parts of the training's state are")
    if has_optimizer and _SCHEDULER not in direct and not has_parts:
        yield Finding(Verdict.MISSING, _SCHEDULER, None, "is not there, and the optimizer is")
    has_random = any(_RANDOM.fullmatch(name) for name in direct)
    if has_optimizer and _SCHEDULER in direct and not has_random:
        yield Finding(Verdict.MISSING, "rng_state.pth", None, "is not there, and the optimizer and the scheduler are")
    numbers = {int(match[1]) for name in direct if (match := _RANDOM.fullmatch(name)) is not None and match[1]}
    absent = next((number for number in range(len(numbers)) if number not in numbers), None)
    if absent is not None:
        reason = f"is not there, and that of process {max(numbers)} is"
        yield Finding(Verdict.MISSING, f"rng_state_{absent}.pth", None, reason)


def _state_problems(folder: Folder, direct: set[str], head: bytes, tail: bytes) -> Iterator[Finding]:
    """The state is JSON with NaN in its log where training diverged, so its ends and its step are looked at by hand."""
    if STATE not in direct:
        return
    text = head.strip()
    if not text.startswith(b"{"):
        verdict = Verdict.CORRUPT if text else Verdict.TRUNCATED
        yield Finding(verdict, STATE, 0, "is all zeros" if text and not text.strip(b"\0") else "does not begin as JSON")
    elif not tail.rstrip().endswith(b"}"):
        yield Finding(Verdict.TRUNCATED, STATE, folder.files[STATE], "ends before its closing bracket")
    steps = {int(step) for step in _GLOBAL_STEP.findall(head)}
    named = _NAME.fullmatch(folder.name)
    if named is not None and len(steps) == 1 and int(named[1]) not in steps:
        reason = f"is of step {steps.pop()}, the directory's name of {int(named[1])}"
        yield Finding(Verdict.MIXED, STATE, None, reason)
