"""Whether the holder of a directory has said goodbye: what its journal ends with.

Owns one question, for tools on another host than the holder's, where its process cannot be seen. Must not guess: a
journal that is missing, cut or unreadable says nothing, and a coordinator that was killed has written no last line.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_supervisor.view.log import journals, parse
from ckpt_supervisor.view.reading import opened

TAIL_BYTES = 256 * 1024


def has_ended(directory: Path, epoch: int) -> bool:
    """Whether the coordinator of this epoch wrote that it exits. An epoch is never given twice in a directory."""
    try:
        paths = [path for path in journals(directory) if path.stem.endswith(f"-{epoch}-0")]
        return any(_says_exit(path, epoch) for path in paths)
    except OSError:
        return False


def _says_exit(path: Path, epoch: int) -> bool:
    with os.fdopen(opened(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = map(parse, file.read(TAIL_BYTES).splitlines())
    return any(line is not None and line.get("event") == "exit" and line.get("epoch") == epoch for line in lines)
