"""The last moments of what is left below us: asked first, then killed, until nobody is there.

Owns the order of that and its bounds. Must not decide when, nor look for anybody who is not below us. A supervisor that has ended
leaves no process of its step: one that lives on holds a GPU, the output's pipe, and so the node (docs/slurm.md, section 4).
"""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections.abc import Callable

from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.shield import Shield
from ckpt_supervisor.linux import procfs
from ckpt_supervisor.linux.segments import Segment, cleans_up, segments_of, sweep_segments

LOOK_S = 0.02
"""Between looks at who is still there; the guard's news wakes earlier."""

CLEANING_S = 0.5
"""Processes that remove shared memory once all others are dead get this long for it, before they are killed as well."""

KILL_S = 2.0
"""A killed process that is not gone by then sleeps uninterruptibly: it is told and not waited for."""

ASK_WITHIN_MS = 200
"""To hand SIGTERM on to everybody: 200 processes take it within 100 ms."""

TOLD_MAX = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Everybody below us: the command's guard, while there is one; their shield, None where SIGTERM is not blocked."""

    held: children.Child | None
    claims: children.Claims
    shield: Shield | None


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """What was done: who was there when it began, who had to be killed, who is there still; segments that were removed."""

    asked: tuple[str, ...] = ()
    killed: tuple[int, ...] = ()
    stuck: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()


def finish(tree: Tree, ask_s: float, shared: frozenset[Segment]) -> Left:
    """End everybody who is below us. `ask_s`: how long after SIGTERM they may take; then comes SIGKILL.

    `shared`: memory that those who were killed before had in use.
    """
    claims = tree.claims
    there = alive(claims)
    if not there:
        return Left(segments=sweep_segments(shared))
    shared |= segments_of(there)
    asked = tuple(procfs.describe(pid) for pid in there[:TOLD_MAX])
    if ask_s > 0:
        ask(tree)
        _until(tree, ask_s, lambda pids: not pids)
    killed = kill(claims, spared=cleans_up)
    if alive(claims):
        _until(tree, CLEANING_S, lambda pids: not pids or not all(map(cleans_up, pids)))
        killed += [pid for pid in kill(claims) if pid not in killed]
        _until(tree, KILL_S, lambda pids: not pids)
    stuck = tuple(procfs.describe(pid) for pid in alive(claims)[:TOLD_MAX])
    return Left(asked, tuple(killed), stuck, sweep_segments(shared))


def ask(tree: Tree) -> list[int]:
    """SIGTERM to everybody below us, who take it although they are shielded; whom it was sent to."""
    if tree.shield is None:
        return children.end_all(signal.SIGTERM, tree.claims)
    there = alive(tree.claims)
    tree.shield.ask(there, ASK_WITHIN_MS)
    return there


def kill(claims: children.Claims, spared: Callable[[int], bool] | None = None) -> list[int]:
    """SIGKILL to everybody below us, but those that are spared for now; who was killed."""
    return children.end_all(signal.SIGKILL, claims, spared)


def alive(claims: children.Claims) -> list[int]:
    """Everybody below us who is not a zombie."""
    return [pid for pid in children.descendants(claims) if procfs.state_of(pid) not in ("zombie", "gone")]


def _until(tree: Tree, bound_s: float, fact: Callable[[list[int]], bool]) -> None:
    """Wait until this holds of those who are alive, within the bound."""
    end_s = time.monotonic() + bound_s
    held = tree.held
    while not fact(alive(tree.claims)) and time.monotonic() < end_s:
        if held is None:
            select.select([], [], [], LOOK_S)
        elif children.readable(held.fileno(), LOOK_S) and any(isinstance(news, children.Lost) for news in held.take()):
            held = None
        if tree.shield is not None:
            tree.shield.go_on()
        children.reap_orphans(tree.claims)
