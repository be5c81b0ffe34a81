"""The colours of the report, each for a light and for a dark page.

Owns which colour means what. Must not draw. Figures are made in the light ones; the page's script puts the dark one in the
place of each light one, so no two roles that differ in the dark may share a light colour. Texts have a contrast of at least
4.5 to the paper, lines and areas of at least 3 (WCAG 2.2, 1.4.3 and 1.4.11); tests/unit/test_report.py computes it.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """One role."""

    light: str
    dark: str


PAPER = Colour("#ffffff", "#12161c")
PANEL = Colour("#f4f6f9", "#1b212a")
INK = Colour("#1b1f24", "#e6e9ee")
SOFT = Colour("#525b66", "#a3adba")
"""Text of less weight, and axes."""

GRID = Colour("#dde2e8", "#2c343f")
LINK = Colour("#0b5cad", "#79b8ff")

BLUE = Colour("#1f6fb5", "#58a6ff")
ORANGE = Colour("#b9530a", "#f0883e")
TEAL = Colour("#0f7b6c", "#3fb8a6")
PURPLE = Colour("#7445b8", "#b78af7")
RED = Colour("#c1272d", "#ff7b72")
GREY = Colour("#6b7480", "#8b949e")
PINK = Colour("#ad2f7c", "#f287c0")
GREEN = Colour("#3a7d1e", "#7ac35a")
OCHRE = Colour("#866600", "#d9b13b")

HEAT = (
    Colour("#eef2f6", "#202833"),
    Colour("#f3cf9f", "#5c4022"),
    Colour("#e08a45", "#b0622a"),
    Colour("#a8321f", "#ff9d76"),
)
"""From on time to late: away from the paper in both, so that late is what stands out."""

SERIES = (BLUE, ORANGE, TEAL, PURPLE, RED, GREY, PINK, GREEN, OCHRE)
TEXTS = (INK, SOFT, LINK)
EVERY = (PAPER, PANEL, GRID, *TEXTS, *SERIES, *HEAT)


def to_dark() -> dict[str, str]:
    """The dark colour for each light one."""
    return {colour.light: colour.dark for colour in EVERY}


def variables(dark: bool) -> str:
    """The page's own colours as custom properties of a style sheet."""
    named = {"paper": PAPER, "panel": PANEL, "ink": INK, "soft": SOFT, "grid": GRID, "link": LINK, "bad": RED, "good": GREEN}
    return "".join(f"--{name}:{colour.dark if dark else colour.light};" for name, colour in named.items())
