"""Why an attempt ended, in one of a fixed set of words, and what more is known of it.

Owns that choice. Pure, and no guess: what the journal does not tell is `lost without a word` or "". The causes of a notice are
the journal's own words (docs/journal.md); the others are here.
"""

from __future__ import annotations

from ckpt_supervisor.view.facts import Attempt
from ckpt_supervisor.view.telling import Telling
from ckpt_supervisor.view.told_notice import REQUEUED

FINISHED = "finished"
FAILED = "training failed"
HUNG = "training hung"
OUT_OF_MEMORY = "out of memory"
NOT_STARTED = "could not be started"
REFUSED = "refused"
DAMAGED = "only damaged checkpoints"
LOST = "lost without a word"
RUNNING = ""
NOT_KNOWN = "not known"

EXIT_CANCELLED = 143
EXIT_STALE = 76
HEADLESS = "the journal of task 0 is missing or empty"
_STATUSES = {
    75: "interrupted, and saved",
    EXIT_STALE: "interrupted, and its last save did not make it",
    EXIT_CANCELLED: "cancelled",
}
"""What the supervisor's own statuses say, where the other tasks were told them."""

_KILLED = (137, 9, -9)

GOOD = frozenset({FINISHED})
BY_A_PERSON = frozenset({"cancelled", "asked to leave"})
NO_INTERRUPTION = GOOD | BY_A_PERSON | {REFUSED, DAMAGED, RUNNING}
"""Ends that say nothing about how often a run is interrupted, as for --every auto (start/history.py)."""

UNTOLD = frozenset({LOST, REQUEUED})
"""What lies behind these, only Slurm's own words tell: its record of a job is the same for a preemption without a grace, a node's
failure and a requeue by hand (docs/slurm.md section 3)."""


def is_untold(attempt: Attempt) -> bool:
    """Whether only Slurm's own words can tell what lies behind its end."""
    return attempt.cause in UNTOLD or (attempt.cause == NOT_KNOWN and not attempt.is_told)


def cause_of(telling: Telling, attempt: Attempt) -> tuple[str, str]:
    """The cause and its details; ("", "") for an attempt that has not ended as far as is known."""
    notice, code = attempt.notice, attempt.code
    if telling.refusal and code not in (None, 0) and notice is None:
        return (DAMAGED if "damaged" in telling.refusal else REFUSED), telling.refusal
    if code == 0:
        return FINISHED, ""
    if notice is not None:
        return _of_notice(telling, attempt)
    if not attempt.is_told and (code is None or code in _STATUSES):
        return NOT_KNOWN, HEADLESS if code is None else f"{HEADLESS}; status {code}: {_STATUSES[code]}"
    if code is None:
        return LOST, _last_signs(telling)
    if code == EXIT_CANCELLED and attempt.outcome:
        return "cancelled", ""
    return _of_failure(telling, code)


def _of_notice(telling: Telling, attempt: Attempt) -> tuple[str, str]:
    notice = attempt.notice
    assert notice is not None
    if notice.cause == FAILED:
        return _of_failure(telling, attempt.code)
    if notice.cause == HUNG:
        return HUNG, telling.hung
    by = notice.by if notice.by not in ("", notice.cause) else ""
    return notice.cause or "not known", f"by {by}" if by else ""


def _of_failure(telling: Telling, code: int | None) -> tuple[str, str]:
    code = telling.command_code if code is None else code
    if telling.oom and (code in _KILLED or telling.command_code in _KILLED or code not in (None, 0)):
        return OUT_OF_MEMORY, telling.oom
    status = f"status {code}" + (f" ({signal_text(code)})" if signal_text(code) else "") if code is not None else ""
    details = [*([status] if status else []), *telling.failures[-1:], *([telling.masked] if telling.masked else [])]
    if telling.command_code in (126, 127) and telling.attempt.reached is None:
        return NOT_STARTED, "; ".join(details)
    return FAILED, "; ".join(details)


def _last_signs(telling: Telling) -> str:
    """What the journal of an attempt that has no last word tells of its end all the same."""
    if telling.oom:
        return telling.oom
    return f"standing still before ({telling.hung})" if telling.hung else ""


def signal_text(code: int | None) -> str:
    """The signal in a status above 128, by the shells' convention."""
    import signal

    if code is None or not 128 < code < 128 + 65:
        return ""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return f"signal {code - 128}"
