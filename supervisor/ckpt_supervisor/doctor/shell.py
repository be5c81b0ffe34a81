"""A job script's lines as words: quotes, continued lines, comments and here-documents, as bash reads them, but nothing expanded.

Owns the reading of a shell's text. Pure. Must not know Slurm, and must not guess: what bash would only know at run time stays as
it is written, `$SLURM_JOB_ID` and all. A text that no shell would take gives its words all the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

import msgspec

TEXT_CHARS_MAX = 1 << 20
"""Of a longer script the rest is left out; Slurm takes 4 MB."""

JOINED_LINES_MAX = 1_000
"""A quote that is not closed within so many lines is taken for an apostrophe."""

EXPANSIONS_MAX = 100

SEPARATORS = frozenset({";", ";;", "&", "&&", "|", "||", "|&", "(", ")", "<", ">", ">>", "<<<", "{", "}"})
WRAPPERS = frozenset(
    {"exec", "time", "nohup", "env", "command", "then", "do", "else", "if", "while", "!", "elif", "sudo", "nice"}
)
"""Words before a command that leave it the command that is run."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)([^{}$]*|\$[A-Za-z_]\w*))?\})")


class Command(msgspec.Struct, frozen=True):
    """One simple command."""

    line: int
    words: tuple[str, ...]
    assigned: dict[str, str] = {}
    """Variables that it sets for itself, or, without words, for the script."""
    background: bool = False


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a script, in the order in which they are written."""
    for number, line in _logical_lines(text[:TEXT_CHARS_MAX]):
        words: list[str] = []
        for word in [*_tokens(line), ";"]:
            if word not in SEPARATORS:
                words.append(word)
                continue
            if words:
                yield _command(number, words, background=word == "&")
            words = []


def _command(line: int, words: list[str], background: bool) -> Command:
    assigned: dict[str, str] = {}
    rest = list(words)
    while rest:
        match = _ASSIGNMENT.fullmatch(rest[0])
        if match is not None:
            assigned[match[1]] = match[2]
        elif rest[0] not in WRAPPERS:
            break
        rest.pop(0)
    return Command(line, tuple(rest), assigned, background)


def _tokens(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    lexer.commenters = ""  # Taken out already: shlex would take the # of ${#x} for one.
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with what continues them, without comments and here-documents; each with the number of its first one."""
    pending: list[str] = []
    first, quote, here = 0, "", ""
    for number, line in enumerate(text.split("\n"), 1):
        if here:
            here = "" if line.strip() == here else here
            continue
        first = first if pending else number
        kept, quote = _without_comment(line, quote)
        pending.append(kept)
        if quote and number - first < JOINED_LINES_MAX:
            pending.append("\n")
            continue
        if not quote and kept.endswith("\\"):
            pending[-1] = kept[:-1] + " "
            continue
        found = _HERE.search(kept) if not quote else None
        here = found[2] if found else ""
        yield first, "".join(pending)
        pending, quote = [], ""
    if pending:
        yield first, "".join(pending)


def _without_comment(line: str, quote: str) -> tuple[str, str]:
    """The line up to a comment, and the quote that is open at its end."""
    escaped, before = False, " "
    for place, char in enumerate(line):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and before in " \t;&|(":
            return line[:place], ""
        before = char
    return line, quote


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """With $NAME, ${NAME} and ${NAME:-other} replaced where the value is known; what is not known stays."""
    for _ in range(EXPANSIONS_MAX):
        match = next((found for found in _VARIABLE.finditer(text) if _value(found, variables) is not None), None)
        if match is None:
            break
        text = text[: match.start()] + str(_value(match, variables)) + text[match.end() :]
    return text


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str | None:
    value = variables.get(match[1] or match[2])
    if value or (value == "" and match[3] != ":-"):
        return value
    return match[4] if match[3] else None
