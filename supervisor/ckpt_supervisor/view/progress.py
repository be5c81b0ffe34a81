"""How far a long look has come: a bar on a terminal, a line now and then elsewhere.

Owns drawing and rates. Must not slow down what it watches: it is called for each block that was read, and draws only
when its pause is over. A look that is over at once draws nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from ckpt_supervisor.text import size_text

BEGIN_S = 0.3
DRAW_S = 0.1
TELL_S = 10.0
"""Where there is no terminal, a batch job's log for instance, a line at most this often."""

CELLS_MAX = 30
WIDTH_MIN = 30


class Bar:
    """The progress of one verification. Call it with (bytes read, bytes to read); `clear()` when it is over."""

    def __init__(self, stream: TextIO, name: str, width: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._name = name
        self._width = width
        self._clock = clock
        self._began = clock()
        self._told = self._began + ((BEGIN_S - DRAW_S) if width is not None else 0)
        self._drawn = 0
        encoding = (getattr(stream, "encoding", None) or "ascii").lower()
        self._full, self._empty = ("█", "░") if encoding.startswith("utf") else ("#", ".")

    def __call__(self, done: int, total: int) -> None:
        """Draw, if it is time."""
        now = self._clock()
        if now - self._told < (DRAW_S if self._width is not None else TELL_S):
            return
        self._told = now
        if self._width is None:
            self._stream.write(f"ckptctl: {self._name}: {self._figures(done, total, now)}\n")
        else:
            line = self._line(done, total, now)
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = len(line)
        self._stream.flush()

    def clear(self) -> None:
        """Leave nothing on the line."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0

    def _figures(self, done: int, total: int, now: float) -> str:
        percent = 100 if total <= 0 else min(100, done * 100 // total)
        rate = done / max(now - self._began, 1e-6)
        left = max(0, total - done) / rate if rate > 0 else 0
        return f"{percent:3d} %  {size_text(done)} of {size_text(total)}  {rate / 1e9:.2f} GB/s  {span_text(left)} left"

    def _line(self, done: int, total: int, now: float) -> str:
        assert self._width is not None
        width = max(WIDTH_MIN, self._width - 1)  # a full line would wrap, and \r would not lead back to its start
        figures = self._figures(done, total, now)
        cells = min(CELLS_MAX, width - len(self._name) - len(figures) - 4)
        if cells < 5:
            return f"{self._name}  {figures}"[:width]
        filled = cells if total <= 0 else min(cells, done * cells // total)
        return f"{self._name}  {self._full * filled}{self._empty * (cells - filled)}  {figures}"


def span_text(seconds: float) -> str:
    """A span for people: 8 s, 2 min 05 s, 1 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
