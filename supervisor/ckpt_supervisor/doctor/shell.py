"""A job script's lines as words: quotes, continued lines, comments, here-documents, $(...), as bash reads them; nothing expanded.

Owns the reading of a shell's text. Pure. Must not know Slurm, and must not guess: what bash would only know at run time stays as
it is written, `$SLURM_JOB_ID` and all. A text that no shell would take gives its words all the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

TEXT_CHARS_MAX = 1 << 20
"""Of a longer script the rest is left out; Slurm takes 4 MB."""

JOINED_LINES_MAX = 1_000
"""A quote that is not closed within so many lines is taken for an apostrophe."""

EXPANSIONS_MAX = 100
DEPTH_MAX = 10
"""Command substitutions within each other, beyond which their text is only text."""

WRAPPERS = frozenset(
    {"exec", "time", "nohup", "env", "command", "then", "do", "else", "if", "while", "until", "!", "elif", "sudo", "nice"}
)
"""Words before a command that leave it the command that is run."""

BRACES = frozenset({"{", "}"})
BRANCHES = frozenset({"case", "fi", "esac"})
BLANKS = " \t\r"

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"&>>?|<<<|<>|[<>]&|>\||>>|[<>]")
_HERE = re.compile(r"<<(-?)[ \t]*((?:\\.|'[^'\n]*'|\"[^\"\n]*\"|[^\s;&|()<>'\"\\])+)")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)([^{}$]*|\$[A-Za-z_]\w*))?\})")


class Command(msgspec.Struct, frozen=True):
    """One simple command."""

    line: int
    words: tuple[str, ...]
    assigned: dict[str, str] = {}
    """Variables that it sets for itself, or, without words, for the script."""
    background: bool = False
    arms: tuple[tuple[str, int], ...] = ()
    """The if and case statements around it, and which of their arms it is in."""


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a script, in the order in which they are written; those in $(...) before the one around it."""
    return iter(_Reader(text[:TEXT_CHARS_MAX], 1, 0).read())


def _command(line: int, words: list[str], background: bool, arms: Iterable[tuple[str, int]]) -> Command:
    assigned: dict[str, str] = {}
    rest = list(words)
    while rest:
        match = _ASSIGNMENT.fullmatch(rest[0])
        if match is not None:
            assigned[match[1]] = match[2]
        elif rest[0] not in WRAPPERS or (rest[0] == "command" and rest[1:2] in (["-v"], ["-V"])):
            break
        rest.pop(0)
    return Command(line, tuple(rest), assigned, background, tuple(arms))


class _Reader:
    """Goes through a text once, a character or a quote at a time."""

    def __init__(self, text: str, line: int, depth: int) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._depth = depth
        self._found: list[Command] = []
        self._words: list[str] = []
        self._word: list[str] | None = None
        self._began = line
        self._is_target = False
        """The next word is a redirection's."""
        self._arms: list[tuple[str, int]] = []
        self._here: list[tuple[str, bool]] = []
        """Here-documents whose text begins with the next line: the word that ends each, and whether tabs before it count not."""

    def read(self) -> list[Command]:
        """All commands of the text."""
        while self._at < len(self._text):
            self._next()
        self._end_command(";")
        return self._found

    def _next(self) -> None:
        text, at = self._text, self._at
        char = text[at]
        if char in BLANKS:
            self._end_word()
            self._at += 1
        elif char == "#" and self._word is None:
            self._at = _or_end(text, text.find("\n", at))
        elif char in "'\"":
            self._quoted(char)
        elif char == "\\":
            self._add("" if text[at + 1 : at + 2] == "\n" else text[at + 1 : at + 2], 2)
        elif char == "`" or text.startswith(("$(", "${", "$'"), at):
            self._substituted()
        elif char in "<>" or text.startswith("&>", at):
            self._redirected()
        elif char == "(" and (self._word is not None and self._word[-1:] == ["="] or self._is_arithmetic()):
            self._add(text[at : _closing(text, at)], _closing(text, at) - at)  # NAME=(...), ((...))
        elif (operator := _OPERATOR.match(text, at)) is not None:
            self._end_command(operator[0])
            self._at = operator.end()
            if char == "\n":
                self._line += 1
                self._skip_here()
        else:
            self._add(char, 1)

    def _is_arithmetic(self) -> bool:
        return self._text.startswith("((", self._at) and self._word is None and self._words in ([], ["for"])

    def _add(self, kept: str, taken: int) -> None:
        """Part of a word; so many characters of the text are behind us."""
        if kept or self._word is not None:
            if self._word is None:
                self._word = []
                self._began = self._began if self._words else self._line
            self._word.append(kept)
        self._line += self._text.count("\n", self._at, self._at + taken)
        self._at += taken

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, self._word = "".join(self._word), None
        if self._is_target:
            self._is_target = False
        elif word in BRACES:
            self._end_command(";")
        else:
            self._words.append(word)

    def _end_command(self, operator: str) -> None:
        self._end_word()
        if self._words:
            for word in itertools.takewhile(lambda word: word in WRAPPERS | BRANCHES, self._words):
                self._branch(word)
            self._found.append(_command(self._began, self._words, operator == "&", self._arms))
        if operator.startswith(";;") and self._arms:
            self._next_arm()
        self._words, self._is_target = [], False

    def _branch(self, word: str) -> None:
        if word in ("if", "case"):
            self._arms.append((f"{self._depth}:{self._line}:{self._at}", 0))
        elif self._arms and word in ("elif", "else"):
            self._next_arm()
        elif self._arms and word in ("fi", "esac"):
            self._arms.pop()

    def _next_arm(self) -> None:
        name, arm = self._arms[-1]
        self._arms[-1] = (name, arm + 1)

    def _quoted(self, quote: str) -> None:
        """One quoted part, or an apostrophe that nothing closes."""
        if self._word is None:
            self._add("", 0)
            self._word, self._began = [], self._began if self._words else self._line
        text, at = self._text, self._at + 1
        end = at
        while end < len(text) and text[end] != quote:
            if quote == '"' and text.startswith(("$(", "${", "`"), end):
                end = _closing(text, end)
            else:
                end += 2 if quote == '"' and text[end] == "\\" else 1
        if end >= len(text) or text.count("\n", at, end) >= JOINED_LINES_MAX:
            return self._add(quote, 1)
        if quote == "'":
            return self._add(text[at:end], end + 1 - self._at)
        self._at = at
        while self._at < end:
            if text[self._at] == "\\":
                after = text[self._at + 1]
                self._add("" if after == "\n" else after if after in '$`"\\' else f"\\{after}", 2)
            elif text.startswith(("$(", "${", "`"), self._at):
                self._substituted()
            else:
                self._add(text[self._at], 1)
        return self._add("", 1)

    def _substituted(self) -> None:
        """$(...), `...`, ${...}, $'...': as it is written; the commands in the first two are found as well."""
        text, at = self._text, self._at
        end = _closing(text, at)
        inner = ""
        if text.startswith("$(", at) and not text.startswith("$((", at):
            inner = text[at + 2 : end - 1]
        elif text[at] == "`":
            inner = text[at + 1 : end - 1]
        if inner and self._depth < DEPTH_MAX:
            self._found += _Reader(inner, self._line, self._depth + 1).read()
        kept = text[at:end]
        if text.startswith("$'", at):
            kept = text[at + 2 : end - 1]
        self._add(f"$({inner})" if text[at] == "`" else kept, end - at)

    def _redirected(self) -> None:
        """Its target is no word of the command; <(...) and >(...) are."""
        text, at = self._text, self._at
        if self._word is not None and "".join(self._word).isdecimal():
            self._word = None  # 2>&1
        self._end_word()
        here = _HERE.match(text, at) if not text.startswith("<<<", at) else None
        if here is not None:
            self._here.append((re.sub(r"['\"\\]", "", here[2]), here[1] == "-"))
            self._at = here.end()
        elif text.startswith(("<(", ">("), at):
            self._add(text[at], 1)
            self._add(text[at + 1 : _closing(text, at + 1)], _closing(text, at + 1) - at - 1)
        else:
            match = _REDIRECTION.match(text, at)
            self._at = match.end() if match is not None else at + 1
            self._is_target = True

    def _skip_here(self) -> None:
        """The lines of here-documents, up to the words that end them."""
        waiting, self._here = self._here, []
        for word, is_stripped in waiting:
            while self._at < len(self._text):
                end = _or_end(self._text, self._text.find("\n", self._at))
                line = self._text[self._at : end].rstrip("\r")
                self._at = min(end + 1, len(self._text))
                self._line += 1
                if (line.lstrip("\t") if is_stripped else line) == word:
                    break


def _or_end(text: str, found: int) -> int:
    return len(text) if found < 0 else found


def _closing(text: str, at: int) -> int:
    """Behind the bracket, or backquote, that closes the one that opens here; the end of the text if nothing does."""
    if text[at] == "`":
        end = at + 1
        while end < len(text) and text[end] != "`":
            end += 2 if text[end] == "\\" else 1
        return min(end + 1, len(text))
    if text.startswith("$'", at):
        end = at + 2
        while end < len(text) and text[end] != "'":
            end += 2 if text[end] == "\\" else 1
        return min(end + 1, len(text))
    at += text[at] == "$"
    opening, closing = text[at], {"(": ")", "{": "}"}[text[at]]
    depth, quote, end = 0, "", at
    while end < len(text):
        char = text[end]
        if char == "\\" and quote != "'":
            end += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and opening == "(" and text[end - 1] in " \t\n;&|(":
            end = _or_end(text, text.find("\n", end)) - 1  # A comment, apostrophes and all.
        elif char in (opening, closing):
            depth += 1 if char == opening else -1
            if not depth:
                return end + 1
        end += 1
    return len(text)


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
