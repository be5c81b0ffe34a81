"""What a job script says: its #SBATCH lines, what it starts with srun and what without, its traps.

Owns the knowledge of sbatch's and srun's options as they are written. Pure. Must not judge; and what a script does inside of
functions, loops or other files it cannot know.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

import msgspec

from ckpt_supervisor.doctor import shell
from ckpt_supervisor.doctor.facts import Script, Srun

LONG = {
    "A": "account", "c": "cpus-per-task", "C": "constraint", "D": "chdir", "d": "dependency", "e": "error", "G": "gpus",
    "i": "input", "J": "job-name", "K": "kill-on-bad-exit", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "r": "relative", "t": "time", "w": "nodelist", "W": "wait", "x": "exclude", "a": "array",
    "b": "begin", "L": "licenses",
    "H": "hold", "I": "immediate", "l": "label", "O": "overcommit", "Q": "quiet", "s": "oversubscribe", "u": "unbuffered",
    "v": "verbose", "X": "disable-status", "Z": "no-allocate", "h": "help", "V": "version", "E": "preserve-env", "k": "no-kill",
}  # fmt: skip
"""Letters of sbatch and srun (srun(1), sbatch(1))."""

FLAGS = frozenset(
    {
        "hold", "label", "overcommit", "quiet", "oversubscribe", "unbuffered", "verbose", "disable-status", "no-allocate", "help",
        "version", "preserve-env", "requeue", "no-requeue", "exclusive", "exact", "overlap", "contiguous", "whole", "pty",
        "parsable", "test-only", "spread-job", "use-min-nodes", "reboot", "multi-prog", "ignore-pbs", "no-kill", "immediate",
        "kill-on-bad-exit", "propagate", "nice", "get-user-env", "interactive",
    }
)  # fmt: skip
"""Options whose value, if they take one at all, is written after an = only (getopt_long(3))."""

SUPERVISOR = "ckpt-supervise"
NO_STARTERS = frozenset(
    {
        "echo", "printf", "which", "type", "pip", "export", "alias", "cd", "ls", "test", "[", "[[", "ckptctl", "trap", "command",
        "hash",
    }
)  # fmt: skip
"""Commands that name the supervisor without starting it."""
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
WITHIN_MAX = 10
"""Shells within each other whose `-c` texts are read."""

SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM", "18": "CONT"}
_REQUEUE = re.compile(r"\bscontrol\s+requeue\b")
_FUNCTION = re.compile(r"(?m)^[ \t]*(?:function[ \t]+([\w.:-]+)|([\w.:-]+)[ \t]*\(\))")
_WORDS = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")


def options_of(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Options by their long names, and what follows them: from the first word that is neither an option nor its value."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = LONG.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
            if name in FLAGS and name != "kill-on-bad-exit":
                value = ""  # Several letters in one word, or none of its own.
        if not equals and name not in FLAGS and rest:
            value = rest.pop(0)
        found[name] = value
    return found, tuple(rest)


def parse(text: str, origin: str) -> Script:
    """What this script says."""
    sruns: list[Srun] = []
    bare: list[Srun] = []
    traps: set[str] = set()
    requeues: list[int] = []
    variables: dict[str, str] = {}
    exports_all = False
    functions = {match[1] or match[2] for match in _FUNCTION.finditer(text[: shell.TEXT_CHARS_MAX])}
    for command in _all(shell.commands(text), variables):
        if not command.words:
            variables.update(command.assigned)
            exports_all |= command.assigned.get("SLURM_EXPORT_ENV", "").startswith("ALL")
            continue
        name = PurePath(command.words[0]).name
        if name in ("export", "declare"):
            assigned = dict(word.split("=", 1) for word in command.words[1:] if "=" in word)
            variables.update(assigned)
            exports_all |= assigned.get("SLURM_EXPORT_ENV", "").startswith("ALL")
        elif name == "unset":
            exports_all |= "SLURM_EXPORT_ENV" in command.words
        elif name == "trap":
            traps |= _trapped(command.words)
        elif (place := _place_of_srun(command.words)) is not None:
            behind = msgspec.structs.replace(command, words=command.words[place:])
            sruns.append(_srun(behind, f"line {command.line}", variables))
        elif name not in NO_STARTERS | functions and _starts_supervisor(command.words):
            bare.append(_srun(command, f"line {command.line}", variables))
        if name not in ("echo", "printf") and _REQUEUE.search(" ".join(command.words)):
            requeues.append(command.line)
    return Script(origin, _sbatch(text), tuple(sruns), tuple(bare), frozenset(traps), tuple(requeues), variables, exports_all)


def _all(commands: Iterable[shell.Command], variables: Mapping[str, str], depth: int = 0) -> Iterator[shell.Command]:
    """With the words that variables stand for, and with what a shell is given by `-c`, where that starts a supervisor."""
    for command in commands:
        words = tuple(part for word in command.words for part in _spread(word, variables))
        text, place = _given_to_shell(words)
        if depth == WITHIN_MAX or SUPERVISOR not in text:
            yield msgspec.structs.replace(command, words=words)
            continue
        before = words[:place] if _place_of_srun(words[:place]) is not None else ()
        for inner in _all(shell.commands(text), variables, depth + 1):
            whole = (*before, *inner.words) if inner.words else ()
            arms = (*command.arms, *inner.arms)
            yield msgspec.structs.replace(inner, line=command.line, words=whole, background=command.background, arms=arms)


def _spread(word: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """The words of $NAME or "${NAME[@]}", where the script has said what that is."""
    match = _WORDS.fullmatch(word)
    value = "" if match is None else variables.get(match[1] or match[2], "")
    if value.startswith("(") and value.endswith(")"):
        value = value[1:-1]
    elif not any(char.isspace() for char in value):
        return (value,) if value and "$" not in value else (word,)
    return tuple(part for command in shell.commands(value) for part in command.words) or (word,)


def _given_to_shell(words: Sequence[str]) -> tuple[str, int]:
    """The text of `bash -lc TEXT`, and where that shell stands; "" for none."""
    for place, word in enumerate(words[:-2]):
        if PurePath(word).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[place + 1]):
            return words[place + 2], place
    return "", 0


def _place_of_srun(words: Sequence[str]) -> int | None:
    """Where srun stands: first, or behind `timeout 10m`, `nice -n 10` and the like, in front of a supervisor."""
    before = words[: _place_of_supervisor(words) or 1]
    return next((place for place, word in enumerate(before) if PurePath(word).name == "srun"), None)


def _starts_supervisor(words: Sequence[str]) -> bool:
    """Without `--` and a command it starts nothing: `uv pip install ckpt-supervise`."""
    place = _place_of_supervisor(words)
    return place is not None and (place == 0 or "--" in words[place:]) and words[place + 1 :] not in (("--version",), ("--help",))


def running(words: Sequence[str], pid: int, variables: Mapping[str, str]) -> Srun:
    """A process of srun's, by its command line and environment."""
    return _srun(shell.Command(0, tuple(words)), f"process {pid}", variables)


def _srun(command: shell.Command, place: str, variables: Mapping[str, str]) -> Srun:
    options, _ = options_of(command.words[1:])
    found = _place_of_supervisor(command.words)
    if found is None:
        return Srun(place, options, background=command.background, arms=command.arms)
    rest = command.words[found + 1 :]
    end = rest.index("--") if "--" in rest else len(rest)
    directory = _directory(rest[:end]) or {**variables, **command.assigned}.get("CKPT_SUPERVISE_DIR", "")
    return Srun(place, options, rest[:end], rest[end + 1 :], command.background, directory, command.arms)


def _directory(words: Sequence[str]) -> str:
    """What --dir says, "" where it is not given."""
    for place, word in enumerate(words):
        if word.startswith("--dir="):
            return word.removeprefix("--dir=")
        if word == "--dir" and place + 1 < len(words):
            return words[place + 1]
    return ""


def _place_of_supervisor(words: Sequence[str]) -> int | None:
    for place, word in enumerate(words):
        if PurePath(word).name == SUPERVISOR or (word == "ckpt_supervisor.cli" and place > 0 and words[place - 1] == "-m"):
            return place
    return None


def _trapped(words: Sequence[str]) -> set[str]:
    """Signals of `trap ACTION SIGNAL...`; an empty action ignores them, which keeps the shell alive as well."""
    rest = [word for word in words[1:] if word != "--"]
    if len(rest) < 2 or rest[0] == "-":
        return set()
    return {signal_word(word) for word in rest[1:]}


def signal_word(word: str) -> str:
    """USR1 for SIGUSR1, usr1 and 10."""
    return SIGNAL_NUMBERS.get(word, word.upper().removeprefix("SIG"))


def _sbatch(text: str) -> dict[str, str]:
    """Options of the #SBATCH lines before the first command, the last one of each name: sbatch reads no further."""
    found: dict[str, str] = {}
    for line in text[: shell.TEXT_CHARS_MAX].split("\n"):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                words = line.removeprefix("#SBATCH").split("#")[0].split()
            while words:
                options, rest = options_of(words)
                found.update(options)
                words = list(rest[1:])
        elif line.strip() and not line.startswith("#"):
            break
    return found


def warning_of(value: str) -> tuple[bool, str, int]:
    """`--signal=[{R|B}:]SIGNAL[@SECONDS]`: whether the batch shell alone gets it, its name, and how long before the limit."""
    flags, colon, rest = value.rpartition(":")
    name, _, seconds = rest.partition("@")
    return bool(colon) and "B" in flags.upper(), signal_word(name), int(seconds) if seconds.isdecimal() else 60
