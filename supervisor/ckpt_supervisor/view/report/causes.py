"""Why attempts ended, in a few families that a chart can tell apart.

Owns which cause belongs to which family, and how the family is marked. Must not derive a cause, nor say more than it does:
view/causes.py has the words.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_supervisor.view.report.palette import BLUE, GREEN, GREY, OCHRE, PINK, PURPLE, RED, TEAL, Colour


class Family(NamedTuple):
    """`dash` and `symbol` tell it from the others where colours do not."""

    title: str
    colour: Colour
    dash: str
    symbol: str
    causes: frozenset[str]


FAMILIES = (
    Family("preempted", PURPLE, "dash", "triangle-down", frozenset({"preempted"})),
    Family("signal", TEAL, "dash", "triangle-up", frozenset({"signal", "no end in sight"})),
    Family("time limit", OCHRE, "dot", "square", frozenset({"end of the time limit ahead", "time limit reached"})),
    Family("node failure", RED, "solid", "x", frozenset({"node failure"})),
    Family("lost without a word", GREY, "solid", "cross", frozenset({"lost without a word"})),
    Family(
        "training failed", RED, "dashdot", "star-triangle-up", frozenset({"training failed", "training hung", "out of memory"})
    ),
    Family("by a person", BLUE, "longdash", "pentagon", frozenset({"asked to leave", "cancelled", "requeued already"})),
    Family("not started", PINK, "dot", "hexagon2", frozenset({"refused", "only damaged checkpoints", "could not be started"})),
    Family("finished", GREEN, "longdashdot", "star", frozenset({"finished"})),
)
OTHER = Family("other", GREY, "longdashdot", "circle-open", frozenset())


def family_of(cause: str) -> Family:
    """The family of a cause; OTHER for one that is not known here."""
    return next((family for family in FAMILIES if cause in family.causes), OTHER)
