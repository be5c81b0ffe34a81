"""Text from a journal, a path or a job's name, made fit to be shown.

Owns what is harmless on a terminal. Pure. Must not know where a text comes from: whatever was not written by this program's own
source goes through here before it is printed. A page of HTML needs its own escaping on top.
"""

from __future__ import annotations

TEXT_CHARS_MAX = 500


def harmless(text: object, limit: int = TEXT_CHARS_MAX) -> str:
    """One line that a terminal shows and does not obey, of at most `limit` characters; "…" stands for what was cut.

    Control characters, escape sequences, direction overrides and halves of surrogate pairs are written as Python escapes.
    """
    whole = text if isinstance(text, str) else str(text)
    kept = whole[: limit + 1] if limit >= 0 else whole  # No more work than is shown, however long the text is.
    if not kept.isprintable():
        kept = "".join(char if char.isprintable() else _escaped(char) for char in kept)
    if len(kept) > limit or len(whole) > limit:
        kept = kept[: max(0, limit - 1)] + "…"
    return kept


def _escaped(char: str) -> str:
    if char in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[char]
    return char.encode("unicode_escape").decode()
