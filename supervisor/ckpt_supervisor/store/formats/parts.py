"""Models in numbered parts, `model-00001-of-00003.safetensors`: all of them, and the index that says what is in which.

Owns what the names alone promise; what an index names is looked up where indices are read. Must not open any file. A model
in one part needs no index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpt_supervisor.store.formats.structure import Folder, SetLook
from ckpt_supervisor.store.verdict import Finding, Verdict

PARTS_MAX = 100_000
"""A name that speaks of more parts than a checkpoint can have files is somebody's joke."""

_LIBRARY = frozenset({"config.json", "generation_config.json", "trainer_state.json", "training_args.bin"})
"""Whoever writes these reads a model in parts by its index. A training of its own may number its ranks' files like that."""

_PART = re.compile(r"((?:pytorch_)?model)-([0-9]{5,6})-of-([0-9]{5,6})(\.safetensors|\.bin)")


def read_set(folder: Folder) -> SetLook | None:
    """What is missing of a model in parts; None where there is none."""
    models: dict[tuple[str, str, str], set[str]] = {}
    for name in folder.files:
        match = _PART.fullmatch(name)
        if match is not None and 0 < int(match[3]) <= PARTS_MAX:
            models.setdefault((match[1], match[3], match[4]), set()).add(match[2])
    if not models:
        return None
    return SetLook("parts", tuple(finding for model in sorted(models) for finding in _lacks(folder, model, models[model])))


def _lacks(folder: Folder, model: tuple[str, str, str], there: set[str]) -> Iterator[Finding]:
    stem, of, suffix = model
    first = 0 if "0" * len(of) in there else 1
    wanted = (f"{number:0{len(of)}d}" for number in range(first, first + int(of)))
    absent = next((number for number in wanted if number not in there), None)
    if absent is not None:
        yield Finding(
            Verdict.MISSING, f"{stem}-{absent}-of-{of}{suffix}", None, f"is not there, and {len(there)} of {int(of)} parts are"
        )
    index = f"{stem}{suffix}.index.json"
    if int(of) > 1 and index not in folder.files and _LIBRARY & folder.files.keys():
        yield Finding(Verdict.MISSING, index, None, f"is not there, and parts of {int(of)} are")
