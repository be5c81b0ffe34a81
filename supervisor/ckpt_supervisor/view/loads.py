"""How much memory the processes of a run held, over time and over all of its tasks, from their journals.

Owns that sum. Reads `memory` lines in the form in which the journal writes them, and no others: in a large run most lines are
such, one a minute and task, and decoding each would take longer than all the rest.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence

from ckpt_supervisor.view import reading
from ckpt_supervisor.view.facts import PROGRESS_MAX

Load = tuple[int, int, int, int]
"""(instant, task, bytes of its processes, the nearest limit or 0)."""

LOADS_MAX = 1_000_000
"""Of one start; what comes after is left out."""

TASKS_WHOLE = 8
"""Of more tasks than this not every line is taken: the sum of all is what is shown."""

BLOCK_BYTES = 1 << 20
_LINE = re.compile(
    rb'^\{"ts":"([^"\n]{20,32})","mono_ms":\d{1,16},"event":"memory",[^\n]*?"tree_bytes":(\d{1,15}),([^\n]*)\}$', re.MULTILINE
)
_LIMIT = re.compile(rb'"limit_bytes":(\d{1,15})')


def read(found: list[Load], files: Sequence[reading.File], ahead_ns: Mapping[int, int]) -> None:
    """Add what these tasks' journals tell. `ahead_ns`: whose clock is before the coordinator's, and by how much."""
    stride = max(1, len(files) // TASKS_WHOLE)
    for file in files:
        try:
            fd = reading.opened(file.path)
        except OSError:
            continue
        try:
            _read(fd, file.task, ahead_ns.get(file.task, 0), stride, found)
        except OSError:
            continue
        finally:
            os.close(fd)


def _read(fd: int, task: int, ahead_ns: int, stride: int, found: list[Load]) -> None:
    """Raises OSError."""
    rest = b""
    while block := os.read(fd, BLOCK_BYTES):
        whole, end, rest = (rest + block).rpartition(b"\n")
        if not end and len(rest) > reading.LINE_BYTES_MAX:
            rest = b""
        lines = _LINE.findall(whole)
        for place in _kept([int(tree) for _, tree, _ in lines], stride):
            ts, tree, more = lines[place]
            at_ns = reading.moment_ns(ts.decode("ascii", "replace"))
            limit = _LIMIT.search(more)
            if at_ns is not None and len(found) < LOADS_MAX:
                found.append((at_ns - ahead_ns, task, int(tree), 0 if limit is None else int(limit[1])))


def _kept(trees: list[int], stride: int) -> list[int]:
    """Which lines are enough: one of so many, and always the first, the last and the highest ones."""
    if stride <= 1 or len(trees) < 3:
        return list(range(len(trees)))
    highest = max(range(len(trees)), key=trees.__getitem__)
    return sorted({*range(0, len(trees), stride), highest, len(trees) - 1})


def summed(loads: list[Load]) -> tuple[tuple[int, int, int], ...]:
    """What all tasks hold together, at the times of the lines, and the nearest limit of any of them."""
    newest: dict[int, int] = {}
    total = 0
    points: list[tuple[int, int, int]] = []
    for at_ns, task, tree, limit in sorted(loads):
        total += tree - newest.get(task, 0)
        newest[task] = tree
        points.append((at_ns, total, limit))
    if len(points) <= PROGRESS_MAX:
        return tuple(points)
    # The highest of each piece: what is looked for in them is what came near a limit.
    size = len(points) / PROGRESS_MAX
    cuts = [round(place * size) for place in range(PROGRESS_MAX + 1)]
    return tuple(max(points[a:b], key=_held) for a, b in itertools.pairwise(cuts) if b > a)


def _held(point: tuple[int, int, int]) -> int:
    return point[1]
