"""A broken rule, as every checker raises it."""

from __future__ import annotations


class Violation(Exception):
    """A rule was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text
