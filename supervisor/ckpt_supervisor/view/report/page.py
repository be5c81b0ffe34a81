"""The page of the report: one HTML file that needs nothing but itself.

Owns the frame: landmarks, headings, figures with captions and tables, and the policy that keeps every request inside. Must
not know what a chart shows. All text of a run goes through safe.py.

The policy (Content-Security-Policy) allows the two scripts and three style elements by the hashes of their texts, images
that are part of the page, and nothing else. Two habits of plotly meet it half-way. It puts its own rules into a style
element: it finds one of that name here, with an allowed text, and fills it through the CSSOM, which no policy touches. It
adds a style sheet for maps unless an element has that sheet's id: here one has. And its colour bar sets `style=""`: the one
style attribute that is allowed is the empty one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib import resources

import msgspec

from ckpt_supervisor.view.report.palette import to_dark, variables
from ckpt_supervisor.view.report.safe import embedded, markup
from ckpt_supervisor.view.report.shape import Chart, Table

MARK = '<meta name="generator" content="ckptctl report">'
"""Near the head of each report: what has it may be overwritten by another one."""

MARK_BYTES_MAX = 1_024

_PLOTLY_RULES = "/* filled by plotly */"
_MAP_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
"""What the bundle of plotly.js asks for before it adds the style sheet of a part of it."""

_END_OF_SCRIPT = re.compile(r"</(?=script)|<!--", re.IGNORECASE)


class Card(msgspec.Struct, frozen=True):
    """One figure of the headline."""

    title: str
    value: str
    more: str = ""


class Page(msgspec.Struct, frozen=True):
    """All that is shown, as plain text."""

    title: str
    about: tuple[str, ...]
    cards: tuple[Card, ...]
    attempts: Table
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]


def pieces(page: Page) -> Iterator[str]:
    """The file, piece by piece."""
    plotly, own = _closed(_plotly()), _asset("script.js")
    styles = (_colours(), _asset("style.css"), _PLOTLY_RULES)
    yield '<!DOCTYPE html>\n<html lang="en" data-colours="auto">\n<head>\n<meta charset="utf-8">\n'
    yield f"{MARK}\n"
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy((plotly, own), styles)}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
    yield '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
    yield f"<title>{markup(page.title)}</title>\n"
    yield f"<style>{styles[0]}</style>\n<style>{styles[1]}</style>\n"
    yield f'<style id="plotly.js-style-global">{styles[2]}</style>\n'
    yield "".join(f'<meta id="{name}">\n' for name in sorted(set(_MAP_STYLE_ID.findall(plotly))))
    yield "</head>\n<body>\n"
    yield from _header(page)
    yield '<main id="main" tabindex="-1">\n'
    yield from _overview(page)
    for chart in page.charts:
        yield from _chart(chart)
    yield from _notes(page.notes)
    yield "</main>\n"
    yield '<footer class="soft small"><p>Made by <code>ckptctl report</code>. '
    yield "This file needs no network and sends nothing.</p></footer>\n"
    drawn = {chart.name: chart.figure for chart in page.charts if chart.figure is not None}
    yield f'<script type="application/json" id="charts">{embedded({"dark": to_dark(), "charts": drawn})}</script>\n'
    yield f"<script>{plotly}</script>\n<script>{own}</script>\n</body>\n</html>\n"


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source.replace("\r\n", "\n").replace("\r", "\n")  # As a browser reads it; the hash is taken of that.


def _closed(script: str) -> str:
    """A script whose text cannot end its element: inside strings and patterns, where alone these stand, `\\x3c` is `<`."""
    return _END_OF_SCRIPT.sub(lambda found: "\\x3c" + found.group()[1:], script)


def _asset(name: str) -> str:
    return "\n" + (resources.files(__package__) / name).read_text("utf-8")


def _colours() -> str:
    light, dark = variables(dark=False), variables(dark=True)
    return (
        f"\n:root {{ color-scheme: light; {light} }}\n"
        "@media (prefers-color-scheme: dark) {\n"
        f":root[data-colours=auto]:not([data-printing]) {{ color-scheme: dark; {dark} }}\n}}\n"
        f":root[data-colours=dark]:not([data-printing]) {{ color-scheme: dark; {dark} }}\n"
    )


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """No request of any kind, no script and no style but these texts."""
    own = " ".join(_hash(text) for text in scripts)
    looks = " ".join(_hash(text) for text in styles)
    empty = f"style-src-attr 'unsafe-hashes' {_hash('')}"
    return f"default-src 'none'; script-src {own}; style-src {looks}; {empty}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(page: Page) -> Iterator[str]:
    yield '<a class="skip" href="#main">Skip to the report</a>\n<header>\n<div class="top">\n<div>\n'
    yield f"<h1>{markup(page.title)}</h1>\n"
    yield "".join(f'<p class="soft">{markup(line)}</p>\n' for line in page.about)
    yield '</div>\n<fieldset id="colours" hidden>\n<legend>Colours</legend>\n'
    for value, word in (("auto", "as the system"), ("light", "light"), ("dark", "dark")):
        checked = " checked" if value == "auto" else ""
        yield f'<label><input type="radio" name="colours" value="{value}" autocomplete="off"{checked}> {word}</label>\n'
    yield '</fieldset>\n</div>\n<nav aria-label="Parts of the report">\n<ul>\n<li><a href="#overview">Overview</a></li>\n'
    yield "".join(f'<li><a href="#{chart.name}">{markup(chart.title)}</a></li>\n' for chart in page.charts)
    yield '<li><a href="#notes">Notes</a></li>\n</ul>\n</nav>\n</header>\n'


def _overview(page: Page) -> Iterator[str]:
    yield '<section id="overview" aria-labelledby="overview-title">\n<h2 id="overview-title">Overview</h2>\n<dl class="cards">\n'
    for card in page.cards:
        more = f'<dd class="soft small">{markup(card.more)}</dd>' if card.more else ""
        yield f'<div><dt>{markup(card.title)}</dt><dd class="value">{markup(card.value)}</dd>{more}</div>\n'
    yield "</dl>\n"
    yield from _table(page.attempts)
    yield '<p class="soft small">In the charts: point at something for its numbers, drag to look closer, double-click for all '
    yield "of it. Each chart has its numbers in a table below it.</p>\n"
    yield "<noscript><p>The charts are drawn by a script, which is switched off here; the tables have their numbers.</p>"
    yield "</noscript>\n"
    yield "</section>\n"


def _chart(chart: Chart) -> Iterator[str]:
    name = chart.name
    yield f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{markup(chart.title)}</h2>\n'
    caption = markup(chart.caption, limit=2_000)
    if chart.figure is None:
        yield f"<p>{caption}</p>\n</section>\n"
        return
    chart.figure["layout"]["height"] = chart.height
    yield f'<figure aria-labelledby="{name}-title">\n<figcaption id="{name}-words">{caption}</figcaption>\n'
    named = f'aria-labelledby="{name}-title" aria-describedby="{name}-words"'
    yield f'<div class="chart" role="img" {named}><div id="chart-{name}" aria-hidden="true"></div></div>\n'
    yield "</figure>\n"
    yield "".join(f'<p class="soft small">{markup(note)}</p>\n' for note in chart.notes)
    for table in chart.tables:
        many = len(table.rows) + table.left_out
        yield f"<details>\n<summary>Table: {markup(table.caption)} ({many:,})</summary>\n<div>\n"
        yield from _table(table)
        yield "</div>\n</details>\n"
    yield "</section>\n"


def _table(table: Table) -> Iterator[str]:
    caption = markup(table.caption)
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{caption}">\n'
    yield f"<table>\n<caption>{caption}</caption>\n<thead><tr>"
    for place, title in enumerate(table.head):
        yield f'<th scope="col"{_class(place, table, title)}>{markup(title)}</th>'
    yield "</tr></thead>\n<tbody>\n"
    for row in table.rows:
        yield "<tr>" + "".join(_cell(place, text, table) for place, text in enumerate(row)) + "</tr>\n"
    yield "</tbody>\n</table>\n</div>\n"
    if table.left_out:
        shown = f"{len(table.rows):,} rows are shown; {table.left_out:,} more are in <code>ckptctl report --json</code>."
        yield f'<p class="soft small">{shown}</p>\n'


def _cell(place: int, text: str, table: Table) -> str:
    if place == 0:
        return f'<th scope="row"{_class(place, table, text)}>{markup(text)}</th>'
    return f"<td{_class(place, table, text)}>{markup(text)}</td>"


def _class(place: int, table: Table, text: str) -> str:
    if place in table.numbers:
        return ' class="number"'
    return ' class="text"' if len(text) > 40 else ' class="short"' if len(text) <= 24 else ""


def _notes(notes: Sequence[str]) -> Iterator[str]:
    yield '<section id="notes" aria-labelledby="notes-title">\n'
    yield '<h2 id="notes-title">Notes: what is incomplete or out of order</h2>\n'
    if notes:
        yield '<ul class="notes">\n' + "".join(f"<li>{markup(note, limit=1_000)}</li>\n" for note in notes) + "</ul>\n"
    else:
        yield "<p>Nothing is known to be missing.</p>\n"
    yield "</section>\n"
