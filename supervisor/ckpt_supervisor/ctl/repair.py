"""`ckptctl repair`: `latest` leads to the newest intact checkpoint again, damaged ones are put aside, leftovers go.

Owns the order of a repair and what is told of it. Must not delete anything that was ever committed (store/repair.py), nor
take a checkpoint for damaged by anything less than reading all of it. What was put aside stays in the directory: a start
that finds nothing but that does not begin at step 0 as if there had never been anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_supervisor import store
from ckpt_supervisor.ctl.change import may_change
from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    bar_of,
    complain,
    could_not_look,
    interruptible,
    out,
    out_json,
)
from ckpt_supervisor.text import one_line
from ckpt_supervisor.view import checkpoints as view

DAMAGED_LIKE = ".damaged-…"
CHANGES = ("pointed", "renamed", "removed")


def repair(arguments: argparse.Namespace) -> int:
    """Point `latest` to the newest intact checkpoint, put damaged ones aside, sweep what dead starts left."""
    held = may_change(arguments, "repaired")
    if isinstance(held, int):
        return held
    if arguments.restore is not None:
        return _restore(arguments, held)
    root: Path = arguments.dir
    with interruptible() as stop:
        try:
            candidates = store.scan(root, stop)
            beside = store.leftovers(root)
            if not candidates and not beside and store.latest_name(root) is None:
                complain(f"no checkpoints in {root}")
                return EXIT_NOT_FOUND
        except OSError as error:
            return could_not_look(root, error)
        examined = []
        for number, candidate in enumerate(candidates, 1):
            bar = bar_of(f"{candidate.path.name} ({number} of {len(candidates)})")
            examined.append(store.examine(candidate, arguments.threads, bar, stop))
            bar.clear()
            if stop.is_set():
                return EXIT_INTERRUPTED
        told = _Told(arguments)
        _mend_latest(told, root, examined, held)
        for one in examined:
            _put_aside(told, root, one, held)
        for leftover in beside:
            _sweep(told, root, leftover, held)
        told.end(sum(one.report.verdict is store.Verdict.INTACT for one in examined), len(examined))
        return told.status


class _Told:
    """What repair did, line by line, and the exit status that comes of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.status = EXIT_OK
        self.dry_run: bool = arguments.dry_run
        self.foreign_too: bool = arguments.quarantine_foreign
        self._json: bool = arguments.json
        self._changes = 0

    def tell(self, name: str, action: str, reason: str, became: str = "", status: int = EXIT_OK) -> None:
        """`action`: fine, pointed, renamed, removed, left, failed. `became`: the new name, or what a link leads to now."""
        self.status = max(self.status, status)
        is_change = action in CHANGES
        self._changes += is_change
        if self._json:
            value: dict[str, Any] = {"name": name, "action": action, "became": became or None, "reason": reason or None}
            out_json({**value, "dry_run": self.dry_run})
        elif action != "fine":
            would = "would be " if self.dry_run and is_change else ""
            line = f"{name}: {would}{action}" + (f" to {became}" if became else "") + (f": {reason}" if reason else "")
            out(one_line(line))

    def end(self, intact: int, of: int) -> None:
        """The last line for people."""
        if not self._json:
            state = "nothing to repair" if not self._changes and not self.status else view.counted(self._changes, "change")
            planned = " would be made" if self.dry_run and self._changes else ""
            out(f"{state}{planned}; {intact} of {view.counted(of, 'checkpoint')} intact, every byte read")


def _mend_latest(told: _Told, root: Path, examined: Sequence[store.Examined], held: store.Held) -> None:
    """First of all: a `latest` that leads to a damaged one must not lead nowhere while that is put aside."""
    newest = next((one.candidate for one in examined if one.report.verdict is store.Verdict.INTACT), None)
    try:
        named = store.latest_name(root)
    except OSError as error:
        told.tell(store.LATEST, "failed", f"cannot be looked at: {error.strerror or error}", status=EXIT_UNKNOWN)
        return
    if newest is None:
        if examined or named is not None:
            told.tell(store.LATEST, "left", "there is no intact checkpoint to point to", status=EXIT_NOT_FOUND)
    elif named == newest.path.name:
        told.tell(store.LATEST, "fine", f"names step {newest.step}")
    else:
        problem = "" if told.dry_run else store.mend_latest(root, newest.path.name, held).problem
        if problem:
            told.tell(store.LATEST, "failed", problem, status=EXIT_NOT_FOUND)
        else:
            said = "it was not there" if named is None else f"it said {named}" if named else "it led elsewhere"
            told.tell(store.LATEST, "pointed", said, newest.path.name)


def _put_aside(told: _Told, root: Path, examined: store.Examined, held: store.Held) -> None:
    name, report = examined.candidate.path.name, examined.report
    why = f"{report.verdict.value}: {report.reason}"
    if report.verdict is store.Verdict.INTACT:
        told.tell(name, "fine", "intact")
    elif report.verdict is store.Verdict.UNKNOWN:
        told.tell(name, "left", f"{why}; it may be whole, try again when the disk answers", status=EXIT_UNKNOWN)
    elif report.verdict is store.Verdict.FOREIGN and not told.foreign_too:
        told.tell(name, "left", f"{why}; it may be somebody's (--quarantine-foreign puts it aside)")
    elif examined.identity is None:
        told.tell(name, "left", "is not there any more")
    elif told.dry_run:
        told.tell(name, "renamed", why, DAMAGED_LIKE)
    else:
        done = store.quarantine(root, examined, held)
        if done.problem:
            told.tell(name, "failed", f"{done.problem} ({why})", status=EXIT_NOT_FOUND)
        else:
            told.tell(name, "renamed", why, done.became)


def _sweep(told: _Told, root: Path, leftover: store.Leftover, held: store.Held) -> None:
    name = leftover.path.name
    if leftover.kind == "damaged":
        told.tell(name, "fine", "put aside before; nobody deletes it but you")
        return
    if leftover.kind == "failed":
        told.tell(name, "left", f"set aside, as training failed from it; back by: ckptctl repair --restore {leftover.step}")
        return
    why_open = held.why_open(leftover.epoch) if leftover.kind == "partial" else ""
    if why_open:
        told.tell(name, "left", why_open)
        return
    problem = "" if told.dry_run else store.sweep_one(root, leftover, held).problem
    if problem:
        told.tell(name, "failed", problem, status=EXIT_NOT_FOUND)
    else:
        left_by = "a start that is over" if leftover.kind == "partial" else "an interrupted removal"
        told.tell(name, "removed", f"left by {left_by}")


def _not_aside(root: Path, step: int) -> str:
    """Why there is nothing of this step to restore. Raises OSError."""
    damaged = next((one.path for one in store.leftovers(root) if one.kind == "damaged" and one.step == step), None)
    if damaged is None:
        return f"no checkpoint of step {step} was set aside in {root} (ckptctl ls --all)"
    return (
        f"step {step} was put aside as damaged ({damaged.name}) and cannot be restored: no start may go on from it; "
        f"ckptctl verify {damaged} says what is wrong with it"
    )


def _restore(arguments: argparse.Namespace, held: store.Held) -> int:
    """Give a checkpoint that was set aside its name back. It is read in full first: it may have been damaged since."""
    root, step, told = arguments.dir, arguments.restore, _Told(arguments)
    try:
        one = next((one for one in store.all_set_aside(root) if one.step == step), None)
        if one is None:
            complain(_not_aside(root, step))
            return EXIT_NOT_FOUND
        bar = bar_of(one.path.name)
        with interruptible() as stop:
            report = store.verify_checkpoint(one.path, "full", arguments.threads, bar, stop)
            bar.clear()
            if stop.is_set():
                return EXIT_INTERRUPTED
        name, why = one.path.name, "" if one.why is None else one.why.text
        problem = store.taken_since(root, held)
        if report.verdict is not store.Verdict.INTACT:
            status = EXIT_UNKNOWN if report.verdict is store.Verdict.UNKNOWN else EXIT_NOT_FOUND
            told.tell(name, "left", f"{report.verdict.value}: {report.reason}", status=status)
        elif problem:
            told.tell(name, "failed", problem, status=EXIT_NOT_FOUND)
        elif told.dry_run:
            told.tell(name, "renamed", why, store.step_name(step))
        else:
            told.tell(name, "renamed", why, store.give_back(one).name)
            latest = store.update_latest(root)
            if latest:
                told.tell(store.LATEST, "failed", latest, status=EXIT_NOT_FOUND)
    except OSError as error:
        complain(f"step {step} was not restored: {error.strerror or error}")
        return EXIT_NOT_FOUND if isinstance(error, FileExistsError) else EXIT_UNKNOWN
    return told.status
