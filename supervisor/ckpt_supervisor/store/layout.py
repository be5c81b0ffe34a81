"""The names in a checkpoint directory: how they are built, and which ones are ours.

Owns the spelling of every name that the store writes. Must not touch a disk. Only a name that this module would write
itself is recognised: `step-12`, `step-1e5`, `step-000000012.bak` are somebody else's and are neither resumed from nor
deleted. Steps are compared as numbers, since as text step-999 sorts after step-1000.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LATEST = "latest"
LATEST_NEW = ".latest-new"
LATEST_BYTES_MAX = 4096
"""Most that is read of a DIR/latest that is a file, as on file systems without links."""

ATTEMPT = "attempt"
JOURNAL = "journal"
DONE = "done.json"
"""Which training in DIR came to its end by itself (start/finished.py)."""

CONTROL = "control"
"""Where the owner of a running job asks for something (watches/control_files.py); never swept, never put aside."""

STEP_DIGITS = 9
NUMBER_MAX = 10**18 - 1
"""Largest step, epoch or round in a name. It fits 64 bits, and keeps every name far below the 255 bytes of a file name.
"""

_STEP = re.compile(r"step-([0-9]{9,18})")
_HIDDEN = re.compile(r"\.(partial|trash|damaged|failed)-step-([0-9]{9,18})-([0-9]{1,18})-([0-9]{1,18})")
_WHY = ".json"
_KEEP = re.compile(r"\.keep-(step-[0-9]{9,18})")
_CLAIM = re.compile(r"\.attempt-([0-9]{9,18})")


def step_name(step: int) -> str:
    """Name of the committed checkpoint after `step` steps: `step-000001200`."""
    return f"step-{_checked(step):0{STEP_DIGITS}d}"


def parse_step(name: str) -> int | None:
    """The step of a committed name, None if this is not one that we write."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step_name(step) == name else None


def partial_name(step: int, epoch: int, round_: int) -> str:
    """Name of a checkpoint while it is being written: `.partial-step-000001200-<epoch>-<round>`."""
    return _hidden_name("partial", step, epoch, round_)


def parse_partial(name: str) -> tuple[int, int, int] | None:
    """(step, epoch, round) of a partial one, None if this is not one that we write."""
    return _parse_hidden("partial", name)


def trash_name(step: int, epoch: int, k: int) -> str:
    """Name of something that is about to be deleted, so that a crash in between leaves no half under its own name.

    `epoch` is that of the checkpoint's manifest, 0 for what never was one (see trash.py).
    """
    return _hidden_name("trash", step, epoch, k)


def parse_trash(name: str) -> tuple[int, int, int] | None:
    """(step, epoch, k) of something to delete, None if this is not one that we write."""
    return _parse_hidden("trash", name)


def damaged_name(step: int, epoch: int, k: int) -> str:
    """Name under which a damaged checkpoint is put aside when its step is saved again. Never deleted by us."""
    return _hidden_name("damaged", step, epoch, k)


def parse_damaged(name: str) -> tuple[int, int, int] | None:
    """(step, epoch, k) of one put aside, None if this is not one that we write."""
    return _parse_hidden("damaged", name)


def failed_name(step: int, epoch: int, k: int) -> str:
    """Name under which a checkpoint is set aside from which training has failed again and again; `epoch` is its manifest's."""
    return _hidden_name("failed", step, epoch, k)


def parse_failed(name: str) -> tuple[int, int, int] | None:
    """(step, epoch, k) of one set aside, None if this is not one that we write."""
    return _parse_hidden("failed", name)


def why_failed_name(name: str) -> str:
    """Name of the record beside such a one: why it was set aside."""
    return f"{name}{_WHY}"


def parse_why_failed(name: str) -> tuple[int, int, int] | None:
    """(step, epoch, k) of such a record, None if this is not one that we write."""
    return parse_failed(name.removesuffix(_WHY)) if name.endswith(_WHY) else None


def keep_name(step: int) -> str:
    """Name of the mark by which a person protects a checkpoint from being pruned: `.keep-step-000001200`."""
    return f".keep-{step_name(step)}"


def parse_keep(name: str) -> int | None:
    """The step of such a mark, None if this is not one that we write."""
    match = _KEEP.fullmatch(name)
    return None if match is None else parse_step(match[1])


def claim_name(epoch: int) -> str:
    """Name of the mark by which an epoch is taken exactly once (see fence.py)."""
    return f".attempt-{_checked(epoch):0{STEP_DIGITS}d}"


def parse_claim(name: str) -> int | None:
    """The epoch of such a mark, None if this is not one that we write."""
    match = _CLAIM.fullmatch(name)
    if match is None:
        return None
    epoch = int(match[1])
    return epoch if claim_name(epoch) == name else None


def _hidden_name(kind: str, step: int, epoch: int, k: int) -> str:
    return f".{kind}-{step_name(step)}-{_checked(epoch)}-{_checked(k)}"


def _parse_hidden(kind: str, name: str) -> tuple[int, int, int] | None:
    match = _HIDDEN.fullmatch(name)
    if match is None or match[1] != kind:
        return None
    step, epoch, k = int(match[2]), int(match[3]), int(match[4])
    return (step, epoch, k) if _hidden_name(kind, step, epoch, k) == name else None


def _checked(number: int) -> int:
    if not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"{number} cannot be part of a name")
    return number
