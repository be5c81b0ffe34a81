"""How a rehearsal is shown: what it waits for meanwhile, and a table with a bar for each path at the end.

Owns drawing. Decides nothing: the verdicts come from verdict.py. People would rather look than read, so each path has a
bar with the shares of its time, and the kill in the middle of it where the site gives less than a save needs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TextIO

from ckpt_supervisor.drill.verdict import WITHOUT_SAVE, Result
from ckpt_supervisor.text import one_line

CELLS = 30
SHARES = (("agree", "░", "a"), ("save", "█", "s"), ("verify", "▓", "v"), ("leave", "▒", "l"))
"""Share, how it is drawn, and how where there are letters only. `leave` has the commit in it."""

_COLOURS = {"PASS": "\x1b[32m", "FAIL": "\x1b[31m"}
_END = "\x1b[0m"


class Progress:
    """What every path is waiting for: one line that changes on a terminal, a line for each change elsewhere."""

    def __init__(self, stream: TextIO, width: int | None) -> None:
        self._stream = stream
        self._width = width
        self._lock = threading.Lock()
        self._now: dict[str, str] = {}
        self._drawn = 0

    def tell(self, path: str, what: str) -> None:
        """This path is at this now; "": it is over. Called from several threads."""
        with self._lock:
            if self._now.get(path, "") == what:
                return
            if what:
                self._now[path] = what
            else:
                self._now.pop(path, None)
            if self._width is None:
                if what:
                    self._stream.write(f"ckptctl: drill: {path}: {one_line(what)}\n")
            else:
                line = "  ".join(f"{name}: {one_line(text)}" for name, text in self._now.items())[: self._width - 1]
                self._stream.write("\r" + line.ljust(self._drawn))
                self._drawn = len(line)
            self._stream.flush()

    def clear(self) -> None:
        """Leave nothing on the line."""
        with self._lock:
            if self._drawn:
                self._stream.write("\r" + " " * self._drawn + "\r")
                self._stream.flush()
                self._drawn = 0


def table(results: Sequence[Result], *, letters: bool, colour: bool) -> list[str]:
    """The paths, one below the other, with their bars; then why, and what to do, for those that need words."""
    columns = f"{'agree':>8} {'save':>8} {'verify':>8} {'leave':>8}"
    lines = [f"{'path':<9} {'':<4}  {columns}  {'given':>8}  {'used':>6}  {'lost':>6}  {'shares':<{CELLS}}".rstrip()]
    for result in results:
        word = "PASS" if result.passed else "FAIL"
        shown = f"{_COLOURS[word]}{word}{_END}" if colour else word
        lost = "-" if result.lost_steps is None else f"{'~' * result.lost_is_rough}{result.lost_steps}"
        figures = " ".join(f"{_time(share_ms(result, share)):>8}" for share, _, _ in SHARES)
        row = f"{result.path:<9} {shown}  {figures}  {_time(result.given_ms):>8}  {_used(result):>6}  {lost:>6}  "
        row += bar(result, letters=letters)
        lines.append(row.rstrip())
    if any(result.given_ms for result in results):
        signs = "  ".join(f"{letter if letters else sign} {share}" for share, sign, letter in SHARES)
        lines += [
            "",
            f"{signs}; | the kill, where it comes before the end",
            "given: from the signal to SIGKILL; used: that much of it (a save that failed: what a whole one needs); lost: steps",
        ]
    lines.append("")
    for result in results:
        lines += _words(result)
    return lines


def _words(result: Result) -> list[str]:
    lines = [f"{result.path}: {'PASS' if result.passed else 'FAIL'}: {one_line(result.why)}"]
    if result.advice and not result.passed:
        lines.append(f"    what to do: {one_line(result.advice)}")
    lines += [f"    {one_line(note)}" for note in result.notes]
    return lines


def share_ms(result: Result, share: str) -> int | None:
    """One column: what `leave` shows is commit and leave."""
    if share != "leave":
        value: int | None = getattr(result, f"{share}_ms")
        return value
    both = [ms for ms in (result.commit_ms, result.leave_ms) if ms is not None]
    return sum(both) if both else None


def bar(result: Result, *, letters: bool) -> str:
    """The shares of one save, side by side, and the kill where it would come in the middle of them.

    Of a save that did not come to its end: what a whole one takes, as measured before.
    """
    parts = shares(result)
    total_ms = sum(parts.values())
    if not result.given_ms or total_ms <= 0:
        return ""
    scale_ms = max(total_ms, 1)
    cells, spent_ms = "", 0
    for share, sign, letter in SHARES:
        spent_ms += parts.get(share, 0)
        cells += (letter if letters else sign) * (round(spent_ms * CELLS / scale_ms) - len(cells))
    if total_ms <= result.given_ms:
        return cells
    kill = result.given_ms * CELLS // scale_ms
    return f"{cells[:kill]}|{cells[kill:]}"


def shares(result: Result) -> dict[str, int]:
    """How long each column's share takes, in ms."""
    measured = {share: share_ms(result, share) or 0 for share, _, _ in SHARES}
    if result.saved_step is None:
        return {"agree": measured["agree"], "save": result.needs_ms or 0} if result.path not in WITHOUT_SAVE else {}
    return measured


def _used(result: Result) -> str:
    total_ms = sum(shares(result).values())
    return f"{max(1, round(total_ms * 100 / result.given_ms))} %" if result.given_ms and total_ms else "-"


def _time(ms: int | None) -> str:
    if ms is None:
        return "-"
    return f"{ms} ms" if ms < 1_000 else f"{ms / 1000:.1f} s"
