"""What somebody might change after an interruption, in a sentence.

Owns these sentences. Pure. Must not promise: each rests on what the journal tells of this one attempt.
"""

from __future__ import annotations

from ckpt_supervisor.view import causes
from ckpt_supervisor.view.amounts import counted, span_text
from ckpt_supervisor.view.facts import Attempt
from ckpt_supervisor.view.totals import allocated

NOTHING = "nothing: the save was committed in time"
OFTEN_SHARE = 0.02
"""Losing less than this share of an attempt is no reason to save more often."""

_NAMED = "--attempt NAME"
"""Where an attempt is to be named: by its number, or by more where several have it."""

_LIMIT = ("end of the time limit ahead", "time limit reached")


def advice(one: Attempt, slurm_cause: str = "", name: str = "") -> str:
    """What to change. `slurm_cause`: what Slurm says of an end that the journal does not tell; `name`: what --attempt takes."""
    if not one.is_told and one.cause == causes.NOT_KNOWN:
        return f"look for the journal of task 0 ({_file_of(one)}): without it nobody can say what happened"
    cause = slurm_cause if causes.is_untold(one) and slurm_cause not in ("", "requeued") else one.cause
    known = _BY_CAUSE.get(cause)
    said = known(one) if known is not None else _interrupted(one)
    return said.replace(_NAMED, f"--attempt {name or one.attempt}") + _requeue(one)


def _file_of(one: Attempt) -> str:
    return f"{one.job}-{one.attempt}-{one.step_id}-{one.epoch}-0.jsonl"


def _interrupted(one: Attempt) -> str:
    if one.reached is None:
        return (
            "training had not attached yet: if it never does, it lacks the line in its loop (README), "
            "or needs --adopt PATTERN or --pass-signal"
        )
    if one.outcome == "fresh":
        notice = one.notice
        if notice is None or notice.left_ms is None or one.out_ms is None:
            return NOTHING
        spare_ms = notice.left_ms - one.out_ms
        if spare_ms < 0.2 * notice.left_ms:
            return f"it was close ({span_text(max(0, spare_ms))} to spare of {span_text(notice.left_ms)}): {_more_time(one)}"
        return f"{NOTHING}, with {span_text(spare_ms)} to spare"
    if one.reason.startswith("no save was begun"):
        return f"there was no time for a save: {_more_time(one)}, or save more often ({_every(one)})"
    late = [word.rank for round_ in one.rounds[-1:] for word in round_.words if word.problem]
    if late:
        named = ", ".join(str(rank) for rank in late[:3])
        return f"look at what rank {named} did (ckptctl log --rank {late[0]} {_NAMED}); {_more_time(one)}"
    return f"{_more_time(one)}, or save more often ({_every(one)})"


def _more_time(one: Attempt) -> str:
    cause = one.cause
    if cause in _LIMIT:
        return "begin the last save earlier (--lead, or sbatch --signal=B:USR1@SECONDS)"
    if cause == "preempted":
        return "ask the site for a longer GraceTime, or make the save quicker"
    if cause == "signal":
        return "give it more time (--grace), or make the save quicker"
    return "make the save quicker"


def _every(one: Attempt) -> str:
    if one.every_ms:
        return f"--every, now {span_text(one.every_ms)}"
    return "--every auto"


def _often(one: Attempt) -> str:
    if one.kept is None or one.kept <= max(0, one.resume_step):
        return f"have it save more often ({_every(one)}): it had committed nothing"
    if one.lost_ms is not None and one.lost_ms > OFTEN_SHARE * max(1, allocated(one)):
        return f"save more often ({_every(one)}): {span_text(one.lost_ms)} of time was lost"
    return ""


def _lost(one: Attempt) -> str:
    often = _often(one)
    look = "the supervisor was killed, or its node went away: ask sacct -D, or the site, what became of the node"
    return f"{look}; {often}" if often else look


def _failed(one: Attempt) -> str:
    first = "look at the traceback in the job's output"
    if one.restarts:
        first = f"it had been started again in place before ({counted(one.restarts, 'time')}); {first}"
    often = _often(one)
    return f"{first}{'; ' + often if often else ''}; --restarts N starts it again in place, --max-crashes N has the job requeued"


def _hung(_: Attempt) -> str:
    return f"see where its threads stood: ckptctl log --event stack --event hang_suspected {_NAMED}"


def _memory(one: Attempt) -> str:
    often = _often(one)
    more = (
        "ask for more memory (--mem), or have fewer DataLoader workers; ckptctl log --event memory_near_limit shows who held it"
    )
    return f"{more}; {often}" if often else more


def _node(one: Attempt) -> str:
    return _often(one) or "nothing: a node has failed"


def _person(one: Attempt) -> str:
    if one.requeue in ("accepted", "already pending", "resubmitted"):
        return "nothing: a person ended it, and it comes back by itself"
    return "nothing: a person ended it; sbatch the script again to go on from the newest checkpoint"


def _by_hand(_: Attempt) -> str:
    return "nothing: Slurm has requeued it, or somebody had it requeued"


def _refused(_: Attempt) -> str:
    return "the line above says what stands in the way"


def _damaged(_: Attempt) -> str:
    return "ckptctl verify --all says what is damaged, ckptctl repair puts it aside"


def _not_started(_: Attempt) -> str:
    return "the command behind -- cannot be run: is its path right on that node?"


def _nothing(_: Attempt) -> str:
    return "nothing"


_BY_CAUSE = {
    causes.LOST: _lost,
    causes.FAILED: _failed,
    causes.HUNG: _hung,
    causes.OUT_OF_MEMORY: _memory,
    causes.REFUSED: _refused,
    causes.DAMAGED: _damaged,
    causes.NOT_STARTED: _not_started,
    causes.FINISHED: _nothing,
    "node failure": _node,
    "cancelled": _person,
    "asked to leave": _person,
    "requeued already": _by_hand,
}


def _requeue(one: Attempt) -> str:
    if one.requeue.startswith("refused"):
        return "; Slurm refuses the requeue: --requeue exit:N (RequeueExit) or --resubmit CMD can bring it back"
    return ""
