"""`ckptctl report`: what happened to a run, as one page that opens without a network.

| module | owns |
|---|---|
| palette | colours, light and dark |
| safe | text of others, in a page |
| words | spans and instants |
| shape | what charts and tables have in common, thinning |
| seen | what has become of the checkpoints |
| causes | families of causes |
| steps, spans, saves, lateness, memory | one chart each |
| headline | the figures at the top, and the table of attempts |
| record | the same as JSON |
| page | the HTML file |
| style.css, script.js | how it looks, and the switch of its colours |

Everything here makes values of values; only seen.py looks at a disk, and page.py reads the package's own files.
plotly is imported when a chart is made, never before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_supervisor.view.facts import Run
from ckpt_supervisor.view.report import headline, lateness, memory, page, saves, spans, steps
from ckpt_supervisor.view.report.page import MARK, MARK_BYTES_MAX
from ckpt_supervisor.view.report.record import record
from ckpt_supervisor.view.report.seen import Seen, look

__all__ = ["MARK", "MARK_BYTES_MAX", "Seen", "html", "look", "record"]


def html(run: Run, seen: Mapping[int, Seen], notes: tuple[str, ...] = (), written_ns: int = 0) -> Iterator[str]:
    """The report's file, piece by piece. `notes`: what else is incomplete."""
    charts = (steps.chart(run, seen), spans.chart(run), saves.chart(run), lateness.chart(run), memory.chart(run))
    made = page.Page(
        title=headline.title(run),
        about=headline.about(run, written_ns),
        cards=headline.cards(run),
        attempts=headline.attempts(run),
        charts=charts,
        notes=(*notes, *headline.notes(run)),
    )
    return page.pieces(made)
