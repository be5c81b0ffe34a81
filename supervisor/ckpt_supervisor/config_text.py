"""How the texts of options are read: times, signals, counts, and the few options with a language of their own.

Pure. Every reader takes a text and raises ValueError with what is wrong with it; config.py owns where texts come from.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ckpt_supervisor.event_names import EVENTS, UNTOLD

DURATION_MS_MAX = 366 * 86_400_000
"""A longer time is a slip of the pen, and would not fit into the poll's time-out."""

PORT_MAX = 65_535
METRICS_NAMES = ("job", "task", "attempt")
"""What may stand in braces in --metrics-file."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_NO_NOTICE = frozenset(
    signal.Signals[f"SIG{name}"] for name in ("KILL", "STOP", "CHLD", "CONT", "PIPE", "SEGV", "BUS", "FPE", "ILL", "ABRT")
)  # By number: some have a second name (CLD, IOT).
_ALWAYS_LEAVE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclasses.dataclass(frozen=True, slots=True)
class Lead:
    """Time before the job's end at which the last save begins. `auto`: 30 s and twice the longest save known."""

    auto: bool
    ms: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Every:
    """How often to save by time. `auto`: by what a save costs and how often the run is interrupted (core/interval.py)."""

    auto: bool
    ms: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Requeue:
    """Who has the job requeued: we by an explicit call, nobody, or Slurm by an exit status (RequeueExit)."""

    how: Literal["auto", "never", "exit"]
    code: int = 75


def duration_ms(text: str) -> int:
    """Milliseconds of `90s`, `10m`, `1.5h`, `200ms`; a bare number means seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 90s, 10m or 1.5h")
    value = float(match[1]) * _UNIT_MS[match[2] or "s"]
    if value > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is longer than a year")
    return int(value)


def count(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise ValueError(f"{text!r} is not a whole number")
        if int(text) < least:
            raise ValueError(f"{text} is less than {least}")
        return int(text)

    return read


def keep(text: str) -> int:
    """How many checkpoints to keep; never none."""
    try:
        return count(1)(text)
    except ValueError as error:
        raise ValueError(f"{error}: at least one checkpoint is always kept") from None


def positive_ms(text: str) -> int:
    """A time above zero."""
    value = duration_ms(text)
    if value <= 0:
        raise ValueError(f"{text!r} is not more than zero")
    return value


def optional(read: Callable[[str], int], none: str) -> Callable[[str], int | None]:
    """A reader for which one word means None."""
    return lambda text: None if text == none else read(text)


def signals(text: str) -> tuple[int, ...]:
    """Numbers of signals named with or without SIG, apart by commas; RTMIN+n for real-time ones."""
    numbers = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        name = word.upper().removeprefix("SIG")
        real_time = re.fullmatch(r"RTMIN\+(\d{1,2})", name)
        if real_time and signal.SIGRTMIN + int(real_time[1]) <= signal.SIGRTMAX:
            numbers.append(int(signal.SIGRTMIN) + int(real_time[1]))
        elif f"SIG{name}" in signal.Signals.__members__:
            numbers.append(int(signal.Signals[f"SIG{name}"]))
        else:
            raise ValueError(f"{word!r} is not a signal")
        if numbers[-1] in _NO_NOTICE:
            raise ValueError(f"{word} cannot be used as a notice")
    return tuple(numbers)


def save_signals(text: str) -> tuple[int, ...]:
    """Signals for save and go on: none of those that always end the run."""
    numbers = signals(text)
    for number in sorted(_ALWAYS_LEAVE.intersection(numbers)):
        raise ValueError(f"{signal_name(number)} always means: save and leave")
    return numbers


def pass_signal(text: str) -> int | None:
    """One signal; "" for none."""
    if not text:
        return None
    numbers = signals(text)
    if len(numbers) != 1:
        raise ValueError(f"{text!r} is not one signal")
    return numbers[0]


def patterns(text: str) -> tuple[str, ...]:
    """Names with wildcards, apart by commas: at least one of them has a wildcard for the step."""
    found = tuple(word for word in (part.strip() for part in text.split(",")) if word)
    for pattern in found:
        folder, _, last = pattern.rpartition("/")
        if "\0" in pattern or not last or ".." in pattern.split("/"):
            raise ValueError(f"{pattern!r} is not the name of something that a program writes")
        if any(sign in folder for sign in "*?["):
            raise ValueError(f"{pattern!r}: only the last part of the path may have a wildcard")
    if text.strip() and not any(sign in pattern for pattern in found for sign in "*?"):
        raise ValueError(f"{text!r} has no wildcard where the step is, as in step_*.pt")
    return found


def lead(text: str) -> Lead:
    """`auto`, `off`, or a time."""
    if text == "auto":
        return Lead(auto=True, ms=30_000)
    if text == "off":
        return Lead(auto=False, ms=None)
    return Lead(auto=False, ms=duration_ms(text))


def every(text: str) -> Every:
    """`auto`, `off`, or a time."""
    if text == "auto":
        return Every(auto=True, ms=None)
    return Every(auto=False, ms=None if text == "off" else positive_ms(text))


def limit(text: str) -> int | None:
    """How often something may happen: a whole number, or `unlimited` (None)."""
    return None if text == "unlimited" else count(0)(text)


def percent(text: str) -> int | None:
    """A whole percentage from 1 to 100, with or without its sign; `off` for none."""
    if text == "off":
        return None
    value = count(1)(text.removesuffix("%"))
    if value > 100:
        raise ValueError(f"{text!r} is more than 100")
    return value


def events(text: str) -> tuple[str, ...]:
    """Names of the journal's events, apart by commas; none with ""."""
    found = tuple(word for word in (part.strip() for part in text.split(",")) if word)
    for word in found:
        if word in UNTOLD:
            raise ValueError(f"{word!r} would be told of by the command that has failed, and so for ever")
        if word not in EVENTS:
            import difflib  # Not before a start without a mistake.

            near = difflib.get_close_matches(word, sorted(EVENTS), 1)
            hint = f"; did you mean {near[0]}?" if near else "; docs/journal.md has them all"
            raise ValueError(f"{word!r} is no event of the journal{hint}")
    return found


def metrics_file(text: str) -> str:
    """A path that node_exporter would read, or a directory with a slash behind it; "" for none."""
    if "\0" in text:
        raise ValueError("holds a NUL byte")
    for name in re.findall(r"\{([^{}]*)\}", text):
        if name not in METRICS_NAMES:
            raise ValueError(f"{{{name}}} is none of {', '.join(f'{{{one}}}' for one in METRICS_NAMES)}")
    if text and not text.endswith((".prom", "/")):
        raise ValueError(f"{text!r} has to end with .prom, as nothing else is read there, or with / for a directory")
    if text.rpartition("/")[2] == ".prom":
        raise ValueError(f"{text!r} has no name before .prom")
    return text


def port(text: str) -> int | None:
    """A port's number, 0 for any; `off` for none."""
    if text == "off":
        return None
    value = count(0)(text)
    if value > PORT_MAX:
        raise ValueError(f"{text} is no port: they go up to {PORT_MAX}")
    return value


def on_hang(text: str) -> str:
    """`warn`, `restart` or `requeue`."""
    if text not in ("warn", "restart", "requeue"):
        raise ValueError(f"{text!r} is none of warn, restart, requeue")
    return text


def requeue(text: str) -> Requeue:
    """`auto`, `never`, or `exit:N`."""
    if text in ("auto", "never"):
        return Requeue("auto" if text == "auto" else "never")
    match = re.fullmatch(r"exit:(\d{1,3})", text)
    if match is None or not 1 <= int(match[1]) <= 255:
        raise ValueError(f"{text!r} is none of auto, never, exit:N (N from 1 to 255)")
    return Requeue("exit", int(match[1]))


def verify(text: str) -> str:
    """`full`, `structure` or `readback`."""
    if text not in ("full", "structure", "readback"):
        raise ValueError(f"{text!r} is none of full, structure, readback")
    return text


def yes_no(text: str) -> bool:
    """What people write for yes and no."""
    if text.lower() in ("1", "yes", "true", "on"):
        return True
    if text.lower() in ("0", "no", "false", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither yes nor no")


def any_text(text: str) -> str:
    """Any text that a command line can hold."""
    if "\0" in text:
        raise ValueError("holds a NUL byte")
    return text


def path(text: str) -> Path:
    """A path, not an empty one."""
    if not text:
        raise ValueError("is empty")
    return Path(any_text(text))


def signal_name(number: int) -> str:
    """SIGUSR1 and its like; a number where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
