"""The report's parts: text made harmless, colours, how much is drawn, what has become of checkpoints, the page's frame."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.view import report
from ckpt_supervisor.view.facts import KINDS, Attempt, Commit, Round, Run, Span, Word
from ckpt_supervisor.view.report import lateness, memory, palette, safe, saves, seen, shape, spans, steps, words
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ctl_stage import committed, flip_a_bit
from tests.support.made_run import BEGIN_NS, made

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "%{x}<a href='javascript:alert(1)'>here</a>",
    "\x1b[31mred\x07 \u2028 \u202e \ud800",
    "]]>&amp;<b>",
)
PAGE_BYTES_MAX = 7_000_000
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}")


class Elements(HTMLParser):
    """What a parser sees: elements with attributes, and the text in scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self._open: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Every element."""
        self.seen.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        """Text, of scripts too."""
        if self.cdata_elem in ("script", "style"):
            tag, attrs, text = self.raw[-1]
            self.raw[-1] = (tag, attrs, text + data)


def drawn(run: Run, looked: dict[int, seen.Seen] | None = None) -> list[shape.Chart]:
    """All charts of a run."""
    return [steps.chart(run, looked or {}), spans.chart(run), saves.chart(run), lateness.chart(run), memory.chart(run)]


def texts(value: Any) -> Iterator[str]:
    """All texts in a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 to 21 (WCAG 2.2)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_and_every_line_can_be_told_from_the_paper(dark: bool) -> None:
    """WCAG AA: 4.5 for texts, on panels too, and 3 for what is drawn."""
    place = int(dark)
    for ground in (palette.PAPER, palette.PANEL):
        for colour in (*palette.TEXTS, palette.RED):
            assert contrast(colour[place], ground[place]) >= 4.5, (colour, ground)
        for colour in palette.SERIES:
            assert contrast(colour[place], ground[place]) >= 3, (colour, ground)
    assert contrast(palette.HEAT[-1][place], palette.HEAT[0][place]) >= 3


def test_each_light_colour_has_one_dark_one() -> None:
    """The script puts one in the place of the other."""
    roles = {colour.light: {other.dark for other in palette.EVERY if other.light == colour.light} for colour in palette.EVERY}
    assert all(len(dark) == 1 for dark in roles.values())
    assert set(palette.to_dark()) == {colour.light for colour in palette.EVERY}


def test_no_figure_has_a_colour_that_a_dark_page_does_not_know() -> None:
    """A colour of plotly's own would stay as it is on the other page."""
    run = made()
    looked = {
        commit.step: seen.Seen(commit.step, state, "") for commit, state in zip(commits(run), seen.STATES * 99, strict=False)
    }
    for chart in drawn(run, looked):
        found = {text for text in texts(chart.figure) if COLOUR.fullmatch(text)}
        assert found
        assert found <= set(palette.to_dark()), chart.name


def commits(run: Run) -> list[Commit]:
    """All of them."""
    return [commit for one in run.attempts for commit in one.commits]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_of_others_is_obeyed_by_a_page_a_chart_or_a_script(text: str) -> None:
    """In HTML no element, in a label none and nothing to fill in, in a script element no `<` and nothing but ASCII."""
    for made_safe in (safe.markup(text), safe.label(text)):
        assert "<" not in made_safe
        assert ">" not in made_safe
        assert made_safe.isprintable()
    assert "%{" not in safe.label(text)
    assert '"' not in safe.markup(text)
    assert "'" not in safe.markup(text)
    held = safe.embedded({"text": text})
    assert held.isascii()
    assert not set("<>&") & set(held)
    assert json.loads(held) == {"text": text}


def test_a_long_text_is_cut_before_it_is_looked_at() -> None:
    """A name of a megabyte is a name of some hundred characters."""
    assert len(safe.label("x" * 1_000_000)) <= safe.LABEL_CHARS_MAX
    assert len(safe.markup("<" * 1_000_000)) <= safe.CELL_CHARS_MAX * len("&lt;")


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=2_000), st.integers(4, 300))
def test_thinning_keeps_both_ends_and_every_extreme(values: list[int], most: int) -> None:
    """What is not drawn lies between what is drawn."""
    points = list(enumerate(values))
    kept = shape.thinned(points, most, lambda point: point[1])
    assert kept == sorted(set(kept))
    assert len(kept) <= max(4, most) + 2
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(value for _, value in kept) == max(values)
    assert min(value for _, value in kept) == min(values)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10**12)), min_size=1, max_size=400), st.integers(20, 200))
def test_slices_of_time_keep_every_sum(parts: list[tuple[str, int]], most: int) -> None:
    """Whatever is drawn in the place of an attempt's spans, each kind has its time, and nothing overlaps."""
    at, told = BEGIN_NS, []
    for kind, length in parts:
        told.append(Span(kind, at, at + length))
        at += length
    fitted = spans._fitting(told, most)
    assert len(fitted) <= max(most, len(KINDS))
    for kind in KINDS:
        sums = [sum(part.end_ns - part.begin_ns for part in which if part.kind == kind) for which in (told, fitted)]
        assert sums[0] == sums[1], kind
    for one, other in itertools.pairwise(fitted):
        assert one.end_ns <= other.begin_ns


def test_what_has_become_of_each_checkpoint_is_seen_by_names_and_sizes(tmp_path: Path) -> None:
    """There and checked in full or not, pruned, cut short, put aside, and the newest one that is gone."""
    for step in (10, 20, 30, 40, 50):
        committed(tmp_path, step, "structure" if step == 20 else "full")
    flip_a_bit(tmp_path / store.step_name(10) / "state.pt")
    (tmp_path / store.step_name(30) / "state.pt").write_bytes(b"short")
    (tmp_path / store.step_name(40)).rename(tmp_path / store.damaged_name(40, 1, 0))
    run = Run(directory=str(tmp_path), attempts=(Attempt(job="77", attempt=0, epoch=1, step_id="0"),))
    run.attempts[0].commits = tuple(Commit(BEGIN_NS, step, 1) for step in (5, 10, 20, 30, 40, 50, 60))
    looked, notes = seen.look(tmp_path, run)
    states = {step: one.state for step, one in looked.items()}
    full, bad = seen.FULL, seen.BAD  # Step 10 has a flipped bit: no byte is read, and `ckptctl verify` is there for that.
    assert states == {5: seen.REMOVED, 10: full, 20: seen.STRUCTURE, 30: bad, 40: bad, 50: full, 60: bad}
    assert "truncated" in looked[30].text
    assert "put aside" in looked[40].text
    assert "missing" in looked[60].text
    assert len(notes) == 1


def test_a_directory_that_cannot_be_looked_at_is_not_one_without_checkpoints(tmp_path: Path) -> None:
    """A loop of links: nobody knows, and the notes say so."""
    (tmp_path / "run").symlink_to("run")
    looked, notes = seen.look(tmp_path / "run", Run(directory="", attempts=made(2).attempts))
    assert {one.state for one in looked.values()} == {seen.UNSEEN}
    assert "not known" in notes[0]


def test_a_run_of_which_nothing_is_known_is_a_page_all_the_same() -> None:
    """No figure, a sentence in the place of each, and not known for what is not known."""
    bare = Attempt(job="1", attempt=0, epoch=1, step_id="0")
    for run in (Run(directory="d", attempts=()), Run(directory="d", attempts=(bare,))):
        assert [chart.figure for chart in drawn(run)] == [None] * 5
        page = "".join(report.html(run, {}))
        assert words.UNKNOWN in page
        assert "Nothing is known" in page


def test_what_no_chart_can_show_is_left_out() -> None:
    """Steps beyond what a browser counts, instants beyond the calendar, rounds with no end and ranks with no word."""
    one = Attempt(job="1", attempt=0, epoch=1, step_id="0", began_ns=-5, ended_ns=10**30, reached=10**30, tasks_told=3)
    one.progress = ((10**30, 10**30), (-1, -1), (BEGIN_NS, 7))
    one.commits = (Commit(10**30, -1, 0), Commit(BEGIN_NS, 10**40, 1), Commit(BEGIN_NS, 7, 2))
    one.rounds = (Round(1, "", BEGIN_NS, None, None, committed=False, reason="", words=(Word(0), Word(10**6, problem="late"))),)
    one.memory = ((BEGIN_NS, 10**40, 1), (BEGIN_NS, 5, 0), (BEGIN_NS, 5, 10))
    one.spans = (Span("training", 0, 0), Span("unheard of", 0, 10**30))
    page = "".join(report.html(Run(directory="d", attempts=(one,)), {}))
    assert "<title>Job 1</title>" in page


def test_a_failed_save_is_always_drawn_and_the_slowest_of_the_others() -> None:
    """Of thousands of saves some hundreds are drawn: not those that one looks for are left out."""
    run = made(attempts=10, saves=200, ranks=1)
    gathered = saves.gathered(run)
    kept = saves._chosen(gathered)
    assert len(gathered) == 2_000
    assert len(kept) <= saves.DRAWN_MAX
    assert max(save.whole_ms or 0 for save in kept) == max(save.whole_ms or 0 for save in gathered)
    failed = [save.number for save in gathered if save.is_failed]
    assert set(failed[-saves.DRAWN_MAX // 2 :]) <= {save.number for save in kept}


def test_many_ranks_share_rows_and_the_latest_one_is_shown() -> None:
    """4,096 ranks are 128 rows, and rank 5, which is always last, is what its row says."""
    chart = lateness.chart(made(attempts=1, ranks=4_096, saves=2))
    assert chart.figure is not None
    heat = chart.figure["data"][0]
    assert len(heat["y"]) <= lateness.RANKS_MAX
    assert "rank 5" in chart.caption
    assert chart.notes
    assert all("rank 5," in cell for cell in heat["text"][0])


def test_the_captions_say_what_a_picture_shows_with_its_extremes() -> None:
    """Who cannot see it is told the same."""
    run = made()
    by_name = {chart.name: chart.caption for chart in drawn(run)}
    assert f"the highest step that was reached is {max(one.reached or 0 for one in run.attempts):,}" in by_name["steps"]
    assert "One bar for each of 12 attempts" in by_name["time"]
    assert "96 saves" in by_name["saves"]
    assert "The latest was rank 5" in by_name["lateness"]
    assert "% of 2.2 TB" in by_name["memory"]


def test_the_page_of_the_largest_run_stays_below_its_bound() -> None:
    """A thousand attempts of a hundred saves with words of 512 ranks: the file still opens at once."""
    few = made(attempts=10, ranks=512, saves=100)
    run = msgspec.structs.replace(few, attempts=few.attempts * 100)
    size = sum(len(piece) for piece in report.html(run, {}))
    assert size < PAGE_BYTES_MAX, size


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_the_policy_of_the_page_allows_its_own_texts_and_no_request(text: str) -> None:
    """Each script and style is allowed by its hash, no element names an address, and no text of others made an element."""
    page = "".join(report.html(made(attempts=2, ranks=4, words=text), {})).encode("utf-8", "replace").decode()
    plain = "".join(report.html(made(attempts=2, ranks=4, words="x"), {}))
    found, other = Elements(), Elements()
    found.feed(page)
    other.feed(plain)
    assert [tag for tag, _ in found.seen] == [tag for tag, _ in other.seen]
    policy = next(attrs["content"] for tag, attrs in found.seen if attrs.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy
    assert "unsafe-eval" not in policy
    for tag, attrs, inner in found.raw:
        if attrs.get("type") == "application/json":
            assert set(json.loads(inner)) == {"charts", "dark"}
            continue
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy, (tag, inner[:80])
    for tag, attrs in found.seen:
        assert not [name for name in attrs if name.startswith("on") or name == "style"], (tag, attrs)
        for name in ("src", "href", "action", "data"):
            assert (attrs.get(name) or "#").startswith(("#", "data:,")), (tag, attrs)


def test_the_page_has_landmarks_headings_and_tables_with_heads() -> None:
    """One h1, an h2 for each part, scope on each head, a caption on each table, a name on each region and figure."""
    found = Elements()
    page = "".join(report.html(made(), {}))
    found.feed(page)
    tags = [tag for tag, _ in found.seen]
    assert [tags.count(tag) for tag in ("html", "header", "main", "nav", "footer", "h1")] == [1] * 6
    assert dict(found.seen)["html"]["lang"] == "en"
    assert tags.count("h2") == 7
    assert tags.count("figure") == tags.count("figcaption") == 5
    assert tags.count("table") == tags.count("caption") == tags.count("thead") == 1 + tags.count("details")
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in found.seen if tag == "th")
    assert all(attrs.get("aria-label") for _, attrs in found.seen if attrs.get("role") == "region")
    names = [attrs["id"] for _, attrs in found.seen if "id" in attrs]
    assert len(names) == len(set(names))
    wanted = [part for _, attrs in found.seen for key in ("aria-labelledby", "aria-describedby") if (part := attrs.get(key))]
    assert set(wanted) <= set(names)
    assert html.unescape(page).count("Skip to the report") == 1
