"""`ckptctl ls`, `latest`, `show` and `verify`: looking at checkpoints. Changes nothing.

Owns what these commands ask of the store and which exit status comes of it. How it is drawn is view/checkpoints.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_supervisor import store
from ckpt_supervisor.ctl.words import (
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    Interrupt,
    Place,
    bar_of,
    complain,
    could_not_look,
    interruptible,
    is_there,
    locate,
    located,
    look_of,
    not_located,
    out,
    out_json,
    there_is,
)
from ckpt_supervisor.text import one_line, size_text
from ckpt_supervisor.view import checkpoints as view

FOOT = "Verdicts by names, sizes and manifests: no byte was read (ckptctl verify --all reads them)"


def ls(arguments: argparse.Namespace) -> int:
    """List checkpoints, newest first, by a cheap look."""
    directory: Path = arguments.dir
    absent = there_is(directory)
    if absent is not None:
        return absent
    try:
        candidates = store.scan(directory)
        beside = store.leftovers(directory)
        rows = rows_of(directory, candidates, arguments.keep_every)
    except OSError as error:
        return could_not_look(directory, error)
    hidden = "" if arguments.all else _beside_in_words(beside)
    if arguments.all:
        rows = sorted([*rows, *map(_row_beside, beside)], key=lambda row: -row.step)
    if not rows:
        complain(f"no checkpoints in {directory}{hidden}")
        return EXIT_NOT_FOUND
    look = look_of(arguments)
    if arguments.json:
        for row in rows:
            out_json(view.record(row, look.now))
        return EXIT_OK
    for line in view.table(rows, look):
        out(line)
    for line in (_total_in_words(rows) + hidden, FOOT):
        out(view.painted(line, "dim", look.colour))
    return EXIT_OK


def _total_in_words(rows: Sequence[view.Row]) -> str:
    whole = sum(row.kind == "checkpoint" for row in rows)
    others = f" and {view.counted(len(rows) - whole, 'other')}" if len(rows) > whole else ""
    return f"{view.counted(whole, 'checkpoint')}{others}, {size_text(sum(row.size or 0 for row in rows))}"


def rows_of(root: Path, candidates: Sequence[store.Candidate], every_steps: int) -> list[view.Row]:
    """These candidates as rows, with their marks. Raises OSError."""
    latest, kept = store.latest_name(root), store.kept_steps(root)
    rows = []
    for candidate in candidates:
        marks = (
            (candidate.path.name == latest, "latest"),
            (candidate.step in kept, "protected"),
            (every_steps > 0 and candidate.step % every_steps == 0, "milestone"),
        )
        named = tuple(word for is_so, word in marks if is_so)
        path = str(candidate.path)
        rows.append(view.Row("checkpoint", candidate.step, path, candidate.manifest, candidate.problem, marks=named))
    return rows


def _row_beside(leftover: store.Leftover) -> view.Row:
    manifest, problem = store.glance(leftover.path) if leftover.kind in ("damaged", "failed") else (None, None)
    size = None if manifest is not None else store.tree_bytes(leftover.path)
    return view.Row(leftover.kind, leftover.step, str(leftover.path), manifest, problem, leftover.epoch, size)


def _beside_in_words(beside: Sequence[store.Leftover]) -> str:
    aside = (("damaged", "put aside as damaged"), ("failed", "set aside as training fails from it"))
    kinds = (*aside, ("partial", "partial"), ("trash", "on the way out"))
    counts = ((sum(one.kind == kind for one in beside), word) for kind, word in kinds)
    told = ", ".join(f"{count} {word}" for count, word in counts if count)
    return f" ({told}: see --all)" if told else ""


def latest(arguments: argparse.Namespace) -> int:
    """Print the path of the newest intact checkpoint, and nothing else, on stdout."""
    absent = there_is(arguments.dir)
    if absent is not None:
        return absent
    bar = bar_of("looking for the newest intact one")
    with interruptible() as stop:
        mode: store.Mode = "structure" if arguments.quick else "full"
        choice = store.newest_intact(arguments.dir, mode, bar, arguments.threads, stop)
        bar.clear()
        if stop.is_set():
            return EXIT_INTERRUPTED
    passed_over(choice)
    if choice.chosen is None:
        complain(choice.reason if choice.unknown else f"no intact checkpoint in {arguments.dir}")
        return EXIT_UNKNOWN if choice.unknown else EXIT_NOT_FOUND
    path = choice.chosen.path.absolute()
    if arguments.json:
        out_json({"step": choice.chosen.step, "path": str(path)})
    else:
        out(str(path))
    return EXIT_OK


def passed_over(choice: store.Choice) -> None:
    """Name what was passed over, and why, on stderr."""
    for candidate, report in choice.passed_over:
        complain(f"passed over {candidate.path.name}: {report.verdict.value}: {report.reason}")


def verify(arguments: argparse.Namespace) -> int:
    """Read checkpoints and say whether they are whole; the worst verdict makes the exit status."""
    if arguments.path and arguments.all:
        complain("verify: give either a path or --all")
        return EXIT_USAGE
    if arguments.deep and arguments.quick:
        complain("verify: --deep reads everything, --quick nothing; give one of them")
        return EXIT_USAGE
    paths = _paths_to_verify(arguments)
    if isinstance(paths, int):
        return paths
    counts: dict[str, int] = {}
    worst, read, began = EXIT_OK, 0, time.monotonic()
    with interruptible() as stop:
        for number, path in enumerate(paths, 1):
            report, took_s = _verify_one(path, f" ({number} of {len(paths)})" if len(paths) > 1 else "", arguments, stop)
            if stop.is_set():
                return EXIT_INTERRUPTED
            if arguments.all and report.verdict is store.Verdict.MISSING and not path.exists():
                continue  # Pruned since the list was made: the run goes on.
            _show_report(arguments, path, report, took_s)
            counts[report.verdict.value] = counts.get(report.verdict.value, 0) + 1
            read += report.bytes_read
            worst = max(worst, status_of(report.verdict))
    if len(paths) > 1 and not arguments.json:
        told = ", ".join(f"{count} {word}" for word, count in counts.items())
        out(f"{len(paths)} checked: {told}; {size_text(read)} read{_speed(read, time.monotonic() - began)}")
    return worst


def status_of(verdict: store.Verdict) -> int:
    """The exit status of a verdict."""
    return {store.Verdict.INTACT: EXIT_OK, store.Verdict.UNKNOWN: EXIT_UNKNOWN}.get(verdict, EXIT_NOT_FOUND)


def _paths_to_verify(arguments: argparse.Namespace) -> list[Path] | int:
    if arguments.path:
        places = [(text, locate(text, arguments.dir)) for text in arguments.path]
        for text, place in places:
            if place is None:
                return not_located("verify", text, arguments.dir)
        return [place.path for _, place in places if place is not None]
    absent = there_is(arguments.dir)
    if absent is not None:
        return absent
    try:
        candidates = store.scan(arguments.dir)
    except OSError as error:
        return could_not_look(arguments.dir, error)
    if not candidates:
        complain(f"no checkpoints in {arguments.dir}")
        return EXIT_NOT_FOUND
    return [candidate.path for candidate in candidates][: None if arguments.all else 1]


def _verify_one(path: Path, which: str, arguments: argparse.Namespace, stop: Interrupt) -> tuple[store.Report, float]:
    mode: store.Mode = "structure" if arguments.quick else "full"
    bar = bar_of(path.name + which)
    began = time.monotonic()
    if is_ours(path):
        # Reading all of a directory must not push what training reads out of the page cache.
        cache: store.Cache = "spare" if arguments.all else "leave"
        report = store.verify_checkpoint(path, mode, arguments.threads, bar, stop, deep=arguments.deep, cache=cache)
    else:
        report = store.check_foreign(path, mode, arguments.threads, bar, stop)
    bar.clear()
    return report, time.monotonic() - began


def is_ours(path: Path) -> bool:
    """Whether a manifest of ours has to speak for this, or there is nothing at all."""
    if any(parse(path.name) is not None for parse in (store.parse_step, store.parse_damaged, store.parse_failed)):
        return True
    try:
        return is_there(path / store.MANIFEST) or not is_there(path)
    except OSError:
        return True  # Then the look at it says what could not be looked at.


def _show_report(arguments: argparse.Namespace, path: Path, report: store.Report, took_s: float) -> None:
    if arguments.json:
        out_json(report_record(path, report, took_s))
        return
    word = view.painted(report.verdict.value, report.verdict.value, look_of(arguments).colour)
    read = f"{size_text(report.bytes_read)} read{_speed(report.bytes_read, took_s)}"
    how = "structure only, " if report.mode == "structure" else ""
    out(f"{one_line(str(path))}: {word} ({how}{read})")
    for finding in report.findings:
        out(f"  {one_line(str(finding))}")
    if report.unchecked:
        out(f"  no checksum speaks for: {one_line(view.listed(report.unchecked))}")


def report_record(path: Path, report: store.Report, took_s: float) -> dict[str, Any]:
    """A report for scripts."""
    findings = [{"verdict": f.verdict.value, "path": f.path, "offset": f.offset, "reason": f.reason} for f in report.findings]
    return {
        "path": str(path),
        "step": store.parse_step(path.name),
        "verdict": report.verdict.value,
        "mode": report.mode,
        "bytes_read": report.bytes_read,
        "seconds": round(took_s, 3),
        "findings": findings,
        "unchecked": list(report.unchecked),
    }


def _speed(read: int, took_s: float) -> str:
    return f", {read / took_s / 1e9:.2f} GB/s" if took_s > 0 and read else ""


def show(arguments: argparse.Namespace) -> int:
    """One checkpoint in words."""
    place = located(arguments, "show")
    if isinstance(place, int):
        return place
    try:
        if not is_there(place.path):
            complain(f"no checkpoint {place.path}")
            return EXIT_NOT_FOUND
        row = _row_at(place, arguments.keep_every)
        resume = "only a committed checkpoint is resumed from" if row.kind != "checkpoint" else _resume(place, row)
    except OSError as error:
        return could_not_look(place.root, error)
    look = look_of(arguments)
    if arguments.json:
        files = [] if row.manifest is None else row.manifest.files
        listed = [{"path": file.path, "bytes": file.bytes, "xxh3_128": file.xxh3_128, "rank": file.rank} for file in files]
        out_json({**view.record(row, look.now), "resume": resume, "files": listed})
    else:
        for line in view.words(row, resume, look, arguments.files):
            out(line)
    return EXIT_OK if row.verdict is None else status_of(store.Verdict(row.verdict))


def _row_at(place: Place, every_steps: int) -> view.Row:
    """Raises OSError."""
    beside = next((one for one in store.leftovers(place.root) if one.path.name == place.path.name), None)
    if beside is not None:
        return _row_beside(beside)
    manifest, problem = store.glance(place.path)
    step = place.step if place.step is not None else -1 if manifest is None else manifest.step
    candidate = store.Candidate(step, place.path, manifest, problem)
    return rows_of(place.root, [candidate], every_steps)[0]


def _resume(place: Place, row: view.Row) -> str:
    """What the next start would do with this one, as far as a cheap look tells. Raises OSError."""
    if place.step is None:
        return "never: only a directory named step-NNNNNNNNN is resumed from"
    if row.verdict != "intact":
        return "never, as it is: it is passed over"
    newer = [one for one in store.scan(place.root) if one.step > place.step and one.problem is None]
    if not newer:
        return "the next start resumes from this one, if its bytes are right"
    return f"the next start takes step {newer[0].step}; this one if {view.counted(len(newer), 'newer one')} would prove damaged"
