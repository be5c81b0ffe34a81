"""`ckptctl keep` and `prune`: which checkpoints stay, by a person's word.

Owns what is asked before a change: is anybody at work here, is what stays whole, and what the person is told. Must not
delete a checkpoint before another one was read in full, and must not act where it cannot tell who holds the directory:
while a coordinator is at work only that one prunes.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ckpt_supervisor import store
from ckpt_supervisor.ctl.look import passed_over, status_of
from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    Interrupt,
    bar_of,
    complain,
    could_not_look,
    interruptible,
    is_there,
    located,
    out,
    out_json,
    there_is,
)
from ckpt_supervisor.text import one_line, size_text
from ckpt_supervisor.view import checkpoints as view
from ckpt_supervisor.view.ended import has_ended


def keep(arguments: argparse.Namespace) -> int:
    """Protect a checkpoint from being pruned, or release it."""
    place = located(arguments, "keep")
    if isinstance(place, int):
        return place
    if place.step is None:
        complain(f"keep: {place.path} is no step of a checkpoint directory")
        return EXIT_USAGE
    absent = there_is(place.root)
    if absent is not None:
        return absent
    try:
        was_kept = place.step in store.kept_steps(place.root)
        there = is_there(place.path)
    except OSError as error:
        return could_not_look(place.root, error)
    if not there and not (arguments.release and was_kept):
        complain(f"no checkpoint of step {place.step} in {place.root}")
        return EXIT_NOT_FOUND
    if not arguments.release:
        refused = _not_intact(place.path, place.step, was_kept, arguments.threads)
        if refused is not None:
            return refused
    problem_text = "" if was_kept != arguments.release else store.set_kept(place.root, place.step, not arguments.release)
    if problem_text:
        complain(f"step {place.step} could not be {'released' if arguments.release else 'protected'}: {problem_text}")
        return EXIT_NOT_FOUND
    if arguments.json:
        changed = was_kept == arguments.release
        out_json({"step": place.step, "path": str(place.path), "protected": not arguments.release, "changed": changed})
    else:
        out(_kept_words(place.step, was_kept, arguments.release))
    return EXIT_OK


def _not_intact(path: Path, step: int, was_kept: bool, threads: int) -> int | None:
    """Read all of it before a person relies on it; an exit status after a complaint if it is not intact."""
    bar = bar_of(f"reading step {step} before it is protected")
    with interruptible() as stop:
        report = store.verify_checkpoint(path, "full", threads, bar, stop)
        bar.clear()
        if stop.is_set():
            return EXIT_INTERRUPTED
    if report.verdict is store.Verdict.INTACT:
        return None
    state = "is protected from before, but" if was_kept else "is not protected, since"
    complain(f"step {step} {state} it is not intact: {report.findings[0] if report.findings else report.verdict.value}")
    return status_of(report.verdict)


def _kept_words(step: int, was_kept: bool, release: bool) -> str:
    if release:
        return f"step {step} is released: it goes when its turn comes" if was_kept else f"step {step} was not protected"
    more = " (as it was before)" if was_kept else f"; ckptctl keep {step} --release takes that back"
    return f"step {step} is protected from being pruned{more}"


def prune(arguments: argparse.Namespace) -> int:
    """Remove checkpoints beyond --keep, once the newest intact one was read in full."""
    held = may_change(arguments, "pruned")
    if isinstance(held, int):
        return held
    root: Path = arguments.dir
    with interruptible() as stop:
        try:
            candidates = store.scan(root, stop)
            kept = store.kept_steps(root)
        except OSError as error:
            return could_not_look(root, error)
        if not candidates:
            complain(f"no checkpoints in {root}")
            return EXIT_NOT_FOUND
        newest = next((one.step for one in candidates if one.problem is None and one.manifest is not None), None)
        if not arguments.dry_run:
            choice = _read_newest(root, arguments.threads, stop)
            if isinstance(choice, int):
                return choice
            newest = choice.chosen.step if choice.chosen is not None else None
            proved_bad = {one.step for one, _ in choice.passed_over}
            candidates = tuple(_as_damaged(one) if one.step in proved_bad else one for one in candidates)
            candidates = _read_those_that_count(candidates, newest, arguments, stop)
            if stop.is_set():
                return EXIT_INTERRUPTED
        protected = kept if newest is None else kept | {newest}
        going = store.to_prune(candidates, arguments.keep, protected, arguments.keep_every)
        fates = [(one, "" if one in going else _why_stays(one, newest, kept, arguments)) for one in candidates]
        return _carry_out(arguments, fates, held, stop)


def _read_newest(root: Path, threads: int, stop: Interrupt) -> store.Choice | int:
    bar = bar_of("reading the newest one before anything goes")
    choice = store.newest_intact(root, "full", bar, threads, stop)
    bar.clear()
    if stop.is_set():
        return EXIT_INTERRUPTED
    passed_over(choice)
    if choice.chosen is None:
        why = choice.reason if choice.unknown else f"no intact checkpoint in {root}"
        complain(f"nothing was pruned: {why}")
        return EXIT_UNKNOWN if choice.unknown else EXIT_NOT_FOUND
    return choice


def _read_those_that_count(
    candidates: tuple[store.Candidate, ...], newest: int | None, arguments: argparse.Namespace, stop: Interrupt
) -> tuple[store.Candidate, ...]:
    """On the strength of these older ones go, so names and sizes are not enough; who proves damaged does not count."""
    read = {newest}
    for _ in range(len(candidates)):
        going = store.to_prune(candidates, arguments.keep, (), arguments.keep_every)
        one = next((one for one in _that_count(candidates, arguments) if one.step not in read), None)
        if not going or one is None:
            break
        bar = bar_of(f"reading {one.path.name} before older ones go")
        report = store.verify_checkpoint(one.path, "full", arguments.threads, bar, stop, cache="spare")
        bar.clear()
        if stop.is_set():
            break
        read.add(one.step)
        if report.verdict is not store.Verdict.INTACT:
            complain(f"does not count: {one.path.name}: {report.verdict.value}: {report.reason}")
            candidates = tuple(_as_damaged(other) if other is one else other for other in candidates)
    return candidates


def _that_count(candidates: Sequence[store.Candidate], arguments: argparse.Namespace) -> Iterator[store.Candidate]:
    """The newest --keep ones of all ranks, and of rank 0 alone, as retention.py counts them."""
    counted = {True: 0, False: 0}
    for one in candidates:
        manifest = one.manifest
        if manifest is None or one.problem is not None or manifest.verified != "full":
            continue
        of_all = len(manifest.ranks) >= manifest.world_size
        is_milestone = arguments.keep_every > 0 and one.step % arguments.keep_every == 0
        if not is_milestone and counted[of_all] < arguments.keep:
            counted[of_all] += 1
            yield one


def _as_damaged(candidate: store.Candidate) -> store.Candidate:
    """It was read and is not whole (or could not be read), whatever its names and sizes say: it neither counts nor goes."""
    found = store.Finding(store.Verdict.CORRUPT, "", None, "not intact when it was read")
    return store.Candidate(candidate.step, candidate.path, candidate.manifest, candidate.problem or found)


def _why_stays(candidate: store.Candidate, newest: int | None, kept: Collection[int], arguments: argparse.Namespace) -> str:
    manifest = candidate.manifest
    if candidate.problem is not None or manifest is None:
        return "not intact: never pruned, and does not count"
    every = arguments.keep_every
    newest_words = "the newest intact one" + ("" if arguments.dry_run else ": every byte was read now")
    reasons = (
        (candidate.step == newest, newest_words),
        (candidate.step in kept, "protected by ckptctl keep"),
        (every > 0 and candidate.step % max(1, every) == 0, f"a milestone: every {every} steps"),
        (manifest.verified != "full", "only its structure was verified: does not count"),
    )
    return next((reason for is_so, reason in reasons if is_so), f"within --keep {arguments.keep}")


def _carry_out(
    arguments: argparse.Namespace, fates: Sequence[tuple[store.Candidate, str]], held: store.Held, stop: Interrupt
) -> int:
    status, freed, gone = EXIT_OK, 0, 0
    for candidate, stays in fates:
        size = 0 if candidate.manifest is None else candidate.manifest.total_bytes
        action, reason = "stays", stays
        if not stays:
            action, reason = ("would go", "") if arguments.dry_run else _remove(arguments.dir, candidate, held, stop)
            freed += size if action in ("would go", "gone") else 0
            gone += action in ("would go", "gone")
            status = max(status, EXIT_NOT_FOUND if action == "failed" else EXIT_OK)
        if arguments.json:
            value = {"step": candidate.step, "path": str(candidate.path), "action": action, "reason": reason or None}
            out_json({**value, "bytes": size})
        else:
            shown = "-" if candidate.manifest is None else size_text(size)
            out(f"{action:<8}  {candidate.step:>9}  {shown:>9}  {one_line(reason)}".rstrip())
        if stop.is_set():
            return EXIT_INTERRUPTED
    if not arguments.json:
        out(f"{view.counted(gone, 'checkpoint')}, {size_text(freed)}, {'would go' if arguments.dry_run else 'gone'}")
        if arguments.dry_run and gone:
            out("Nothing was changed. Before anything goes, those that --keep counts are read in full; if one is bad, less goes.")
    return status


def _remove(root: Path, candidate: store.Candidate, held: store.Held, stop: Interrupt) -> tuple[str, str]:
    problem = "interrupted" if stop.is_set() else store.taken_since(root, held)
    if problem:
        return "failed", f"left: {problem}"
    removed = store.remove(candidate)
    if removed.problems:
        return "failed", "; ".join(removed.problems)
    return ("gone", "") if removed.names else ("stays", "protected meanwhile, or already gone")


def may_change(arguments: argparse.Namespace, done: str) -> store.Held | int:
    """Who held the directory and is gone; else an exit status after a complaint. A dry run may look all the same."""
    root: Path = arguments.dir
    absent = there_is(root)
    if absent is not None:
        return absent
    try:
        held = store.who_holds(root)
    except OSError as error:
        return could_not_look(root, error)
    holder = held.holder
    if holder is None or arguments.dry_run:
        return held
    who = store.describe_holder(holder)
    if store.is_alive(holder):
        complain(f"nothing was {done}: {who} is at work in {root}; --dry-run looks all the same")
        return EXIT_NOT_FOUND
    if not store.can_be_seen(holder) and not arguments.holder_is_gone and not has_ended(root, holder.epoch):
        complain(
            f"nothing was {done}: {who} cannot be seen from here, and its journal does not say that it ended; "
            "if squeue does not list it any more, say --holder-is-gone"
        )
        return EXIT_NOT_FOUND
    return held
