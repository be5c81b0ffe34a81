"""Text that somebody else wrote, made harmless for a page.

Owns the three places where text may stand: in HTML, in a chart's label, inside a script element. Must not know what is
shown. A job's name, a path and a rank's message may hold anything: markup, the end of a script, escapes for a terminal,
marks that turn the reading order. plain.py takes what no line may hold; this here takes what a browser, or the charts' own
small markup, would obey.
"""

from __future__ import annotations

import html
import json
from typing import Any

from ckpt_supervisor.view.plain import harmless

LABEL_CHARS_MAX = 80
CELL_CHARS_MAX = 400

_IN_SCRIPT = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def markup(text: object, limit: int = CELL_CHARS_MAX) -> str:
    """For HTML, inside an element or a quoted attribute."""
    return html.escape(harmless(text, limit), quote=True)


def label(text: object, limit: int = LABEL_CHARS_MAX) -> str:
    """For a text in a chart: plotly obeys a few elements, <a> among them, and takes `%{...}` for a place to fill in."""
    return html.escape(harmless(text, limit), quote=False).replace("%{", "% {")


def embedded(value: Any) -> str:
    """JSON that can stand in a script element: no `<`, and ASCII only, so that no line separator ends a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT)
