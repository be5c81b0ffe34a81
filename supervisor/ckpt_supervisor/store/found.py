"""What a program has written where it always did: which files and directories belong to which step, by their names.

Owns the patterns of --adopt. Must not judge content, copy or rename. A pattern such as `step_*.pt` or `checkpoint-*` names one
part of a checkpoint, several patterns several parts; the step is the number in what the wildcards stand for. Names are compared
by that number and never as text, and modification times decide nothing (field cases 89 to 91).
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from ckpt_supervisor.store.layout import ATTEMPT, DONE, JOURNAL, LATEST, NUMBER_MAX, parse_damaged, parse_step
from ckpt_supervisor.store.look import NAMES_MAX, list_names

_ENDS = r"[=_-]?0*([0-9]{1,18})(?![0-9A-Za-z]|\.[0-9])"
_STEP = re.compile(r"(?:step|iter|iteration)" + _ENDS, re.IGNORECASE)
_FILE = re.compile(r"(?:checkpoint|ckpt)" + _ENDS, re.IGNORECASE)
_NUMBER = re.compile(r"(?<![0-9A-Za-z.])([0-9]{1,18})(?![0-9A-Za-z]|\.[0-9])")
_NEGATIVE = re.compile(r"(?:^|[^0-9A-Za-z])-[0-9]+$")
_TAGS = re.compile(r"[-_,.]?[A-Za-z_]+=[0-9.eE+-]+|-v[0-9]+")
"""What may follow the number: `-val_loss=0.25`, and Lightning's `-v1` for a name that was taken."""

_VERSION = re.compile(r"-v([0-9]{1,9})(?=\.[^.]*$|$)")
_WILD = re.compile(r"[*?\[]")


class Item(msgspec.Struct, frozen=True):
    """What a program wrote for one step: one path for each pattern, in the order of the patterns."""

    step: int
    paths: tuple[Path, ...]


class Incomplete(msgspec.Struct, frozen=True):
    """A step for which not every pattern has a match."""

    step: int
    reason: str


def is_wild(pattern: str) -> bool:
    """Whether it has a wildcard; one without names a file that goes with every step."""
    return _WILD.search(pattern) is not None


def step_of(pattern: str, name: str) -> int | None:
    """The step in a name that fits the last part of a pattern; None if it does not fit or has no usable number.

    Taken from what the wildcards stand for: the number after step or iter where there is one (`epoch=3-step=1500`), else the last
    one that stands by itself or after checkpoint (`checkpoint_3_5000` is of epoch 3 and step 5000). `1e5`, `-1`, `0.25` are none,
    and a name that goes on with a word (`500.tmp`, `500_old`) is somebody else's.
    """
    last = pattern.rsplit("/", 1)[-1]
    if name.startswith(".") or not fnmatch.fnmatchcase(name, last):
        return None
    head, tail = re.match(r"[^*?\[]*", last), re.search(r"[^*?\]]*$", last)
    assert head is not None and tail is not None
    begin, end = head.end(), len(name) - len(tail[0])
    wild = name[begin:end]
    if _NEGATIVE.search(wild) and not re.search(r"[0-9A-Za-z]-[0-9]+$", wild):
        return None
    upto = name[: max(begin, end)]
    found = [(match.end(), match[1]) for match in _STEP.finditer(upto)]
    if not found:
        found = [(match.end(), match[1]) for match in _FILE.finditer(upto)]
        found += [(begin + match.end(), match[1]) for match in _NUMBER.finditer(wild)]
    at, number = max(found, default=(0, ""))
    if not number or re.search("[A-Za-z]", _TAGS.sub("", upto[at:])):
        return None
    step = int(number)
    return step if step <= NUMBER_MAX else None


def find(root: Path, patterns: Sequence[str]) -> tuple[list[Item], list[Incomplete]]:
    """Everything that the patterns match, newest step first; relative ones are below `root`. Raises OSError."""
    parts: list[dict[int, Path]] = []
    fixed: dict[int, Path] = {}
    for index, pattern in enumerate(patterns):
        folder = root / (pattern.rsplit("/", 1)[0] or "/") if "/" in pattern else root
        last = pattern.rsplit("/", 1)[-1]
        if not is_wild(pattern):
            fixed[index] = folder / last
            parts.append({})
        else:
            parts.append(_matches(folder, last, ours=os.path.realpath(folder) == os.path.realpath(root)))
    steps = sorted({step for part in parts for step in part}, reverse=True)
    items: list[Item] = []
    incomplete: list[Incomplete] = []
    for step in steps:
        paths = [fixed.get(index) or part.get(step) for index, part in enumerate(parts)]
        lacking = [pattern for pattern, path in zip(patterns, paths, strict=True) if path is None or not os.path.lexists(path)]
        if lacking:
            incomplete.append(Incomplete(step, f"nothing for {lacking[0]!r}"))
        else:
            items.append(Item(step, tuple(path for path in paths if path is not None)))
    return items, incomplete


def _matches(folder: Path, last: str, *, ours: bool) -> dict[int, Path]:
    """By step. Of two names with the same number the one with the highest version (Lightning's `-v1` is the later save of that
    step, field case 101), else the last one by name (`step_012`, `step_12`)."""
    try:
        names = list_names(folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return {}  # The program makes it when it saves for the first time.
        raise
    found: dict[int, Path] = {}
    for name in sorted(islice(names, NAMES_MAX), key=lambda name: (_version(name), name)):
        if ours and (parse_step(name) is not None or name in (ATTEMPT, DONE, JOURNAL, LATEST)):
            continue
        step = step_of(last, name)
        if step is not None:
            found[step] = folder / name
    return found


def _version(name: str) -> int:
    match = _VERSION.search(name)
    return 0 if match is None else int(match[1])


def kinds(names: Iterable[str]) -> frozenset[str]:
    """Names of files with their numbers taken out: what a checkpoint of this kind is made of."""
    return frozenset(re.sub(r"[0-9]+", "#", name) for name in names)


def put_aside_names(root: Path, patterns: Sequence[str]) -> list[str]:
    """Names of the program's own files that were put aside as damaged, newest step first. Raises OSError."""
    found: list[tuple[int, str]] = []
    for pattern in filter(is_wild, patterns):
        folder = root / (pattern.rpartition("/")[0] or "/") if "/" in pattern else root
        last = pattern.rpartition("/")[2]
        try:
            names = list_names(folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise
        for name in names:
            own = re.sub(r"\.[0-9]{1,2}$", "", name.removeprefix(".damaged-"))
            step = step_of(last, own) if name.startswith(".damaged-") and parse_damaged(name) is None else None
            if step is not None:
                found.append((step, name))
    return [name for _, name in sorted(found, reverse=True)]
