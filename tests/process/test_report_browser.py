"""The report in a real browser without a window and without a network: how it looks, what it obeys, who can use it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.view import report
from ckpt_supervisor.view.facts import Run
from ckpt_supervisor.view.report import palette, seen

from tests.support import many_lines
from tests.support.browser import Visit, chromium, visit
from tests.support.made_run import made

pytestmark = pytest.mark.timeout(900)
"""On a bare machine the first test installs the browser."""

CHARTS = ("steps", "time", "saves", "lateness", "memory")
TITLES = ("Steps and checkpoints", "What the time went into", "Saves and their parts", "Who was late", "Memory")
WIDTHS = (360, 1920)
SCHEMES = ("light", "dark")
TABS_MAX = 120

HOSTILE = (
    "</script><script>window.owned = 1</script>",
    "<!--<script>window.owned = 1",
    "<img src=x onerror='window.owned = 1'>",
    "<img src='https://192.0.2.1/leak.png'>",
    '"><svg/onload="window.owned = 1">',
    "<a href='javascript:window.owned=1'>click</a><b>bold</b>%{x}%{customdata}",
    "'-alert(1)-'\"-alert(1)-\" ${alert(1)} {{alert(1)}} $\\href{javascript:alert(1)}{x}$",
    "\x1b]0;title\x07\x1b[31m red \u2028\u2029\u202e\u2066 \ud800\udfff \0 end",
    "x" * 1_000_000,
)
"""What a job's name, a rank's message and a path may hold (192.0.2.0/24 is nobody's: RFC 5737)."""

ADDRESSES = "[...document.links].map((one) => one.getAttribute('href'))"
UNNAMED = """() => [...document.querySelectorAll("a, button, input, summary, [tabindex='0']")]
  .filter((one) => !(one.textContent || one.getAttribute("aria-label") || one.labels?.[0]?.textContent || "").trim()).length"""
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """() => [...document.querySelectorAll(".chart .main-svg:first-child")].map((drawn) => {
  const box = drawn.getBoundingClientRect(), room = drawn.closest(".chart").getBoundingClientRect();
  return [...drawn.querySelectorAll(".xtick text, .ytick text, .legendtext, .g-xtitle text, .g-ytitle text")]
    .map((text) => text.getBoundingClientRect())
    .filter((text) => text.width && (text.left < room.left - 1 || text.right > room.right + 1 || text.top < box.top - 1)).length;
})"""
"""How many labels of each chart are cut off by its edge."""


@pytest.fixture(name="browser", scope="module")
def fixture_browser() -> Iterator[Any]:
    """One for all tests of this module; each page gets a profile of its own."""
    with chromium() as browser:
        yield browser


@pytest.fixture(name="page_file", scope="module")
def fixture_page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report as the command writes it, of journals as the supervisor writes them."""
    place = tmp_path_factory.mktemp("report")
    many_lines.write(place / "run", lines=3_000, tasks=4, attempts=8)
    assert ctl.main(["report", "--dir", str(place / "run"), "-o", str(place / "report.html")]) == 0
    return place / "report.html"


@pytest.fixture(name="opened", scope="module")
def fixture_opened(browser: Any, page_file: Path) -> Iterator[Visit]:
    """That report, drawn on a light page; for tests that only read."""
    with visit(browser, page_file, color_scheme="light") as shown:
        shown.drawn("light")
        yield shown


def written(path: Path, run: Run) -> Path:
    """The report of a made-up run, with checkpoints in every state."""
    commits = [commit for one in run.attempts for commit in one.commits]
    looked = {commit.step: seen.Seen(commit.step, seen.STATES[at % 5], run.directory) for at, commit in enumerate(commits)}
    pieces = report.html(run, looked, (run.directory,), run.now_ns)
    path.write_bytes(b"".join(piece.encode("utf-8", "replace") for piece in pieces))
    return path


def checked(shown: Visit) -> None:
    """It has drawn all charts, has said nothing on the console and has asked for nothing."""
    assert shown.page.evaluate("document.documentElement.dataset.failed") == "0"
    assert shown.errors == []
    assert shown.requests == []


def ground(shown: Visit) -> tuple[str, str]:
    """The colour of the page, and that of a chart."""
    page = shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    chart = shown.page.evaluate("getComputedStyle(document.querySelector('#chart-steps .main-svg')).backgroundColor")
    return as_hex(page), as_hex(chart)


def as_hex(colour: str) -> str:
    """rgb(1, 2, 3) as #010203."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn_at_every_width_in_both_colours(browser: Any, page_file: Path, tmp_path: Path, width: int) -> None:
    """No error, no request, nothing wider than the window, no label cut off; the pictures are kept for who wants to look."""
    with visit(browser, page_file, width, color_scheme="dark") as shown:
        for scheme in ("dark", "light"):
            shown.page.emulate_media(color_scheme=scheme)
            shown.drawn(scheme)
            assert ground(shown) == (palette.PAPER[SCHEMES.index(scheme)],) * 2
            assert shown.page.evaluate(OVERFLOW) == 0
            assert shown.page.evaluate(OUTSIDE) == [0] * len(CHARTS)
            for name in CHARTS:
                box = shown.page.locator(f"#chart-{name} .main-svg").first.bounding_box()
                assert box["width"] > 300, name
                assert box["height"] > 250, name
            shown.page.screenshot(path=tmp_path / f"report-{width}-{scheme}.png", full_page=True)
        checked(shown)


def test_names_and_messages_that_are_markup_are_shown_and_not_obeyed(browser: Any, tmp_path: Path) -> None:
    """Nothing runs, nothing is asked for, no element is made of them, also under the pointer and in opened tables."""
    one_each = [made(attempts=1, ranks=4, saves=4, words=text).attempts[0] for text in HOSTILE]
    for number, attempt in enumerate(one_each):
        attempt.attempt = number
    run = msgspec.structs.replace(made(attempts=1, words=" ".join(HOSTILE[:6])), attempts=tuple(one_each))
    with visit(browser, written(tmp_path / "hostile.html", run)) as shown:
        shown.drawn("light")
        for summary in shown.page.locator("summary").all():
            summary.click()
        for name in CHARTS:
            wander(shown, name)
        assert shown.page.evaluate("window.owned") is None
        assert shown.page.locator("script").count() == 3
        assert shown.page.locator("main img, main svg a, main b, iframe, object, [onload], [onerror]").count() == 0
        assert [one for one in shown.page.evaluate(ADDRESSES) if not one.startswith("#")] == []
        assert "<img src=x onerror" in shown.page.locator("main").inner_text()
        assert shown.page.evaluate(OVERFLOW) == 0
        checked(shown)


def wander(shown: Visit, name: str) -> None:
    """The pointer over a chart, so that its labels come up."""
    chart = shown.page.locator(f"#chart-{name}")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    for across in (0.2, 0.5, 0.8):
        for down in (0.35, 0.6, 0.8):
            shown.page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)


def test_the_pointer_brings_numbers_up_and_looks_closer(browser: Any, tmp_path: Path) -> None:
    """Point, drag, double-click, and a window that becomes narrow: no error, and the labels are there."""
    with visit(browser, written(tmp_path / "r.html", made(attempts=5))) as shown:
        shown.drawn("light")
        for name in CHARTS:
            wander(shown, name)
        bar = shown.page.locator("#chart-saves .bars .point path").nth(30)
        bar.scroll_into_view_if_needed()
        bar.hover(force=True)
        shown.page.wait_for_selector("#chart-saves .hovertext", state="attached")
        assert "round" in shown.page.locator("#chart-saves .hovertext").first.text_content()
        span = "document.querySelector('#chart-saves')._fullLayout.yaxis.range.join()"
        before = shown.page.evaluate(span)
        box = shown.page.locator("#chart-saves .nsewdrag").bounding_box()
        shown.page.mouse.move(box["x"] + 50, box["y"] + 20)
        shown.page.mouse.down()
        shown.page.mouse.move(box["x"] + 300, box["y"] + 150, steps=5)
        shown.page.mouse.up()
        shown.until(f"{span} !== '{before}'")
        # However long the page takes between the two clicks, and however soon they come after the drag.
        shown.page.evaluate("Object.assign(document.querySelector('#chart-saves')._context, {doubleClickDelay: 60_000})")
        shown.page.evaluate("document.querySelector('#chart-saves')._mouseDownTime = 0")
        shown.page.mouse.dblclick(box["x"] + 100, box["y"] + 100)
        shown.until(f"{span} === '{before}'")
        shown.page.set_viewport_size({"width": 360, "height": 800})
        shown.until("document.querySelector('#chart-steps .main-svg').getBoundingClientRect().width < 360")
        assert shown.page.evaluate(OVERFLOW) == 0
        checked(shown)


def test_the_colours_follow_the_system_until_somebody_chooses(browser: Any, page_file: Path) -> None:
    """Live, without a reload; a choice by keyboard wins, and `as the system` gives it back."""
    light, dark = palette.PAPER
    with visit(browser, page_file, color_scheme="light", reduced_motion="reduce") as shown:
        shown.drawn("light")
        shown.page.emulate_media(color_scheme="dark")
        shown.drawn("dark")
        assert ground(shown) == (dark, dark)
        shown.page.get_by_role("radio", name="as the system").focus()
        shown.page.keyboard.press("ArrowRight")
        shown.drawn("light")
        assert ground(shown) == (light, light)
        shown.page.keyboard.press("ArrowRight")
        shown.drawn("dark")
        shown.page.emulate_media(color_scheme="light")
        assert ground(shown) == (dark, dark)
        shown.page.keyboard.press("ArrowRight")
        shown.drawn("light")
        assert ground(shown) == (light, light)
        assert shown.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
        assert shown.page.evaluate("getComputedStyle(document.querySelector('.skip')).transitionDuration") == "0s"
        checked(shown)


def test_the_keyboard_reaches_the_switch_and_every_table(opened: Visit) -> None:
    """Skip link first, then the switch, the parts and the tables; each shows where one is; Enter opens a table."""
    opened.page.evaluate("document.activeElement.blur()")
    reached = list(tabbed(opened))
    assert reached[0] == "Skip to the report"
    assert reached[1] == "colours=auto"
    assert reached[2:9] == ["Overview", *TITLES, "Notes"]
    summaries = [text for text in reached if text.startswith("Table: ")]
    assert len(summaries) == opened.page.locator("details").count()
    first = opened.page.locator("summary").first
    first.focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("details").first.get_attribute("open") is not None
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.getAttribute('role')") == "region"
    opened.page.locator(".skip").focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    checked(opened)


def tabbed(shown: Visit) -> Iterator[str]:
    """What has the focus after each Tab, until it leaves the page; each has an outline."""
    for _ in range(TABS_MAX):
        shown.page.keyboard.press("Tab")
        focus: dict[str, str] = shown.page.evaluate(
            """() => { const one = document.activeElement, look = getComputedStyle(one);
                return {tag: one.tagName, text: one.name ? `${one.name}=${one.value}` : one.textContent.trim().slice(0, 60),
                        outline: look.outlineStyle, width: look.outlineWidth}; }"""
        )
        if focus["tag"] == "BODY":
            return
        assert (focus["outline"], focus["width"]) == ("solid", "3px"), focus
        yield focus["text"]


def test_a_screen_reader_is_told_names_landmarks_and_what_a_picture_shows(opened: Visit) -> None:
    """The browser's own tree for assistive programs: each landmark once, each picture with name and description."""
    for role in ("banner", "main", "contentinfo"):
        assert opened.page.get_by_role(role).count() == 1, role
    assert opened.page.get_by_role("navigation", name="Parts of the report").count() == 1
    assert opened.page.get_by_role("group", name="Colours").count() == 1
    assert opened.page.get_by_role("heading", level=1).count() == 1
    tree = opened.page.context.new_cdp_session(opened.page).send("Accessibility.getFullAXTree")["nodes"]
    nodes = [node for node in tree if not node["ignored"]]
    named = {role: [node for node in nodes if node["role"]["value"] == role] for role in ("image", "img", "figure", "table")}
    pictures = [*named["image"], *named["img"]]
    assert sorted(node["name"]["value"] for node in pictures) == sorted(TITLES)
    assert all(len(node["description"]["value"]) > 40 for node in pictures)
    for role in ("link", "radio", "region", "figure", "table", "DisclosureTriangle", "heading", "columnheader"):
        assert all(node["name"]["value"].strip() for node in nodes if node["role"]["value"] == role), role
    assert opened.page.evaluate(UNNAMED) == 0
    checked(opened)


def test_without_scripts_the_words_and_tables_are_there(browser: Any, page_file: Path) -> None:
    """Some open such files where scripts are off: they are told, and have the numbers."""
    with visit(browser, page_file, 360, java_script_enabled=False) as shown:
        shown.page.locator("summary").first.click()
        assert "switched off here" in shown.page.locator("noscript").inner_text()
        assert shown.page.locator("fieldset").is_hidden()
        assert shown.page.locator("details[open] tbody tr").count() > 0
        assert shown.errors == []
        assert shown.requests == []
