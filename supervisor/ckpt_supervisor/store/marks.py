"""The marks by which a person protects checkpoints from being pruned: DIR/.keep-step-NNNNNNNNN.

Owns the marks, and the order by which whoever protects a checkpoint and whoever removes it see each other: the mark is there
first and the checkpoint is looked for then; the checkpoint leaves its name first and the mark is looked for then (trash.py). Must
not touch a checkpoint, nor take "could not look" for "no mark": marks are listed, which on a network file system goes to the
server, and never asked for by name, which may be answered from a cache.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_supervisor.store.durable import sync_directory, write_file
from ckpt_supervisor.store.layout import keep_name, parse_keep, step_name
from ckpt_supervisor.store.look import NOT_THERE, Patience, list_names


def kept_steps(root: str | os.PathLike[str]) -> frozenset[int]:
    """Steps that a person has protected with `ckptctl keep`. Raises OSError when the directory cannot be listed."""
    try:
        names = Patience().look(lambda: list_names(root))
    except OSError as error:
        if error.errno in NOT_THERE:
            return frozenset()
        raise
    return frozenset(step for step in map(parse_keep, names) if step is not None)


def set_kept(root: str | os.PathLike[str], step: int, on: bool) -> str:
    """Protect this step from being pruned, or no longer; what went wrong, "" if nothing.

    A mark that was there before stays even if the checkpoint is not: a removal that was cut off may have it under another name,
    and the next sweep brings it back.
    """
    directory = Path(root)
    try:
        mark = directory / keep_name(step)
        if not on:
            mark.unlink(missing_ok=True)
            sync_directory(directory)
            return ""
        is_new = not os.path.lexists(mark)
        if is_new:
            write_file(mark, b"", exclusive=True)
            sync_directory(directory)
        if step_name(step) not in Patience().look(lambda: list_names(directory)):
            if is_new:
                mark.unlink(missing_ok=True)
            return f"there is no {step_name(step)}"
    except FileExistsError:
        return ""  # Somebody else has marked it in between.
    except (OSError, ValueError) as error:
        return str(error)
    return ""
