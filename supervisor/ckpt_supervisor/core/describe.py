"""What the journal says: derived from (event, before, after), so that every transition is there and the core has no wording.

Pure. Owns the names of journal entries and their fields (docs/journal.md). Must not decide anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from ckpt_client import wire
from msgspec.structs import replace

from ckpt_supervisor.core import forecast
from ckpt_supervisor.core.between import Report
from ckpt_supervisor.core.commands import AskCommand, CallRequeue, Command, DropPartial, EndCommand, Exit, LookUp, Say, TurnAway
from ckpt_supervisor.core.events import (
    Adopted,
    Asked,
    CommandExited,
    Committed,
    Event,
    Looked,
    Met,
    RankGone,
    Recalled,
    RequeueReturned,
    Resubmitted,
    SignalCame,
    Stalled,
    Verified,
)
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.core.state import Member, Phase, Rank, Round, Stage, State
from ckpt_supervisor.core.views import JobView, NoView

RANKS_SHOWN_MAX = 64
"""Most ranks whose stage is named when a round is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal."""

    event: str
    level: str
    fields: dict[str, Any]


def describe(event: Event, before: State, after: State, commands: tuple[Command, ...], now_ms: int) -> tuple[Entry, ...]:
    """The lines for one step of the machine, in order."""
    entries: list[Entry] = []
    if not isinstance(event, SILENT):
        entries += _of_event(event, before, after, now_ms)
    if before.notice is not after.notice:
        entries += _of_notice(before, after, now_ms)
    if before.round is not after.round or before.given_up is not after.given_up:
        entries += _of_round(before, after, now_ms, getattr(event, "who", None))
    if before.tasks is not after.tasks:
        entries += _of_tasks(event, before, after)
    if after.join_is_over and not before.join_is_over:
        there = {task.number for task in after.tasks}
        entries.append(Entry("join_over", "info", {"tasks_there": 1 + len(there)}))
    if after.interval is not None and (before.interval != after.interval or isinstance(event, Recalled)):
        entries.append(_info("interval", **dataclasses.asdict(after.interval)))
    if before.masked != after.masked:
        entries.append(Entry("status_masked", "warning", {"reason": after.masked, "command_code": 0}))
    if before.phase is not after.phase:
        entries += _of_phase(before, after)
    old, new = before.leaving, after.leaving
    if old is not None and new is not None and old.own_end and not new.own_end:
        entries.append(Entry("left_alone", "warning", {"ranks": spans([rank.who.rank for rank in after.live])}))
    if len(commands) != 1 or not isinstance(commands[0], Say) or isinstance(commands[0].word, wire.Refused):
        entries += _of_commands(commands)
    return tuple(entries)


SILENT = (wire.Ack, wire.Arrived, wire.Saving, wire.Saved, Report)
"""Events that come in thousands and tell only by what they change."""


def spans(numbers: list[int]) -> list[int | str]:
    """Numbers of ranks for a line: as they are, or, when they are many, with "8-15" for those in a row."""
    if len(numbers) <= RANKS_SHOWN_MAX:
        return [*numbers]
    found: list[int | str] = []
    ordered = sorted(numbers)
    first = last = ordered[0]
    for number in (*ordered[1:], None):
        if number == last + 1:
            last = last + 1
            continue
        found.append(first if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return found


def _of_event(event: Event, before: State, after: State, now_ms: int) -> Iterator[Entry]:
    match event:
        case SignalCame(name=name, meaning=meaning, task=task):
            yield _info("signal", signal=name, meaning=meaning.value, **_task(task))
        case Looked(view=view, why=why):
            yield _looked(view, why)
        case RankGone(who=who, how=how):
            rank = before.rank(who)
            if rank is not None and not rank.gone and not _is_awaited(before.round, who):
                is_first = _is_first_death(before, rank)
                how = how + WITHOUT_A_WORD if is_first else how
                fields = {"rank": who.rank, "rank_pid": who.pid, "how": how, **_task(who.task)}
                yield Entry("rank_gone", "warning" if is_first else "info", fields)
        case CommandExited(code=code, task=task, why=why):
            level = "info" if code == 0 or before.leaving is not None else "warning"
            yield Entry("command_exited", level, {"code": code, **({"why": why} if why else {}), **_task(task)})
        case Verified(round=number, verified=verified, problem=problem, bytes_read=count, task=task):
            level = "warning" if problem else "info"
            fields = {"round": number, "mode": verified, "problem": problem, "bytes": count, **_task(task)}
            yield Entry("verified", level, fields)
        case Committed(round=number, step=step, result=result, reason=reason):
            level = "info" if result.name in ("COMMITTED", "ALREADY_THERE") else "error"
            fields = {"round": number, "step": step, "result": result.value, "reason": reason}
            yield Entry("commit", level, {**fields, **_times(before.round, number, now_ms)})
        case Adopted(steps=steps, problem=problem, final=final):
            if steps or (problem and final):
                yield Entry("adopted", "warning" if problem else "info", {"steps": list(steps), "problem": problem})
        case RequeueReturned(result=result, reason=reason):
            level = "info" if result.name in ("ACCEPTED", "PENDING") else "warning"
            yield Entry("requeue", level, {"result": result.value, "reason": reason})
        case Met(ready=False, reason=reason):
            yield _info("requeue_waits", reason=reason)
        case wire.Hello(who=who, world_size=world, sharded=sharded):
            if before.rank(who) is None and after.rank(who) is not None:
                fields = {"rank": who.rank, "rank_pid": who.pid, "world_size": world, "generation": who.generation}
                yield _info("rank_hello", **fields, sharded=sharded, **_task(who.task))
        case wire.Failed(who=who, round=wire.NO_ROUND, reason=reason, n=n):
            yield Entry("rank_failed", "warning", {"rank": who.rank, "reason": reason, "step": n})
        case wire.Finished(who=who):
            finished = before.rank(who)
            if finished is not None and not finished.finished:
                yield _info("rank_finished", rank=who.rank)
        case wire.Left(who=who, again=again):
            leaver = before.rank(who)
            if leaver is not None and (again or not leaver.left):
                yield Entry("rank_left", "warning" if again else "info", {"rank": who.rank, "went_on": again})
        case Resubmitted() | Recalled() | Stalled() | Asked():
            yield _of_outside(event)
        case _:
            pass  # Ticks, reports and the words of a round: their effects are described below.


def _of_outside(event: Resubmitted | Recalled | Stalled | Asked) -> Entry:
    """What comes neither from a rank nor from Slurm."""
    match event:
        case Resubmitted(accepted=accepted, reason=reason):
            return Entry("resubmit", "info" if accepted else "warning", {"accepted": accepted, "reason": reason})
        case Recalled(history=history):
            return Entry("recalled", "debug", dataclasses.asdict(history))
        case Stalled(task=task, ranks=numbers, kind=kind, text=text):
            return Entry("stalled", "warning", {"ranks": spans([*numbers]), "kind": kind, "text": text, **_task(task)})
        case Asked(what=what, every_ms=every_ms, requeue=requeue, who=asker):
            return _info("asked", what=what, every_ms=every_ms, requeue=requeue, by=asker)


def _times(current: Round | None, number: int, now_ms: int) -> dict[str, int]:
    """What the save of this round took, for those who come after: save, hold of training, verification with the commit."""
    if current is None or current.number != number or not current.go or current.written_ms is None:
        return {}
    return {
        "save_ms": current.written_ms - current.go_ms,
        "hold_ms": forecast.hold_of(current.written_ms, current.go_ms, current.held_ms),
        "verify_ms": now_ms - current.written_ms,
    }


def _task(number: int) -> dict[str, int]:
    """Which task something happened at, where it was not the coordinator's own."""
    return {"of_task": number} if number else {}


def _of_tasks(event: Event, before: State, after: State) -> Iterator[Entry]:
    if before.tasks is after.tasks:
        return
    reported = after.tasks.get(event.task) if isinstance(event, Report) else None
    for task in after.tasks if reported is None else (reported,):
        old = before.tasks.get(task.number)
        if old is task:
            continue
        fields = {"of_task": task.number, "host_of_task": task.host, "task_pid": task.pid}
        if old is None:
            yield _info("task_joined", **fields)
        elif old.gone and not task.gone:
            yield _info("task_back", **fields)
        elif task.gone and not old.gone:
            yield Entry("task_gone", "warning", fields)


WITHOUT_A_WORD = ", without a last word: killed, or by os._exit"


def _is_first_death(before: State, rank: Rank) -> bool:
    """Whether nobody had asked for an end, and this rank is the first to go, without a word of its own."""
    if before.notice is not None or before.leaving is not None or before.code is not None:
        return False
    silent = not (rank.finished or rank.left or rank.died)
    return silent and not any(other.gone and not other.finished for other in before.ranks)


def _is_awaited(current: Round | None, who: wire.Who) -> bool:
    """Whether this rank's end costs a round, which then tells of it."""
    member = None if current is None else current.member(who)
    return member is not None and member.stage is not Stage.WRITTEN


def _looked(view: JobView | NoView, why: str) -> Entry:
    if isinstance(view, NoView):
        return Entry("look_failed", "warning", {"why": why, "reason": view.reason, "definite": view.definite})
    return _info(
        "look",
        why=why,
        state=view.state,
        reason=view.reason,
        restarts=view.restarts,
        end_s=None if view.end_ms is None else view.end_ms // 1000,
        preempt_s=None if view.preempt_ms is None else view.preempt_ms // 1000,
        requeue=view.requeue,
        batch=view.batch,
    )


def _of_notice(before: State, after: State, now_ms: int) -> Iterator[Entry]:
    old, new = before.notice, after.notice
    if old is None and new is None:
        return
    if new is None:
        was_asked = old is not None and old.cause is Cause.ASKED
        why = "the save that was asked for did not make it" if was_asked else "no end is near"
        left_ms = None if after.end_at_ms is None else max(0, after.end_at_ms - now_ms)
        if left_ms is not None and not was_asked:
            why = f"{why}, {left_ms // 1_000} s are left"
        left = {} if left_ms is None else {"left_ms": left_ms}
        yield _info("notice_over", reason=f"{why}: training goes on{'' if was_asked else ' after the save'}", **left)
    elif old is None or (old.cause, old.kill_at_ms) != (new.cause, new.kill_at_ms):
        yield _info(
            "notice",
            by=new.name,
            cause=new.cause.value,
            left_ms=new.kill_at_ms - now_ms,
            save_left_ms=new.budget.save_by_ms - now_ms,
            verify_left_ms=new.budget.verify_by_ms - now_ms,
            leave_left_ms=new.budget.leave_by_ms - now_ms,
            out_left_ms=new.budget.out_by_ms - now_ms,
        )


def _of_round(before: State, after: State, now_ms: int, who: wire.Who | None) -> Iterator[Entry]:
    """`who`: the rank whose word it was; no other one's stage can have changed, unless the round is over."""
    old, new = before.round, after.round
    if old is not None and (new is None or new.number != old.number):
        yield from _round_over(old, after, now_ms)
    at_once = after.given_up
    if at_once is not None and at_once is not before.given_up and (old is None or old.number != at_once.round.number):
        # Begun and given up in one step, as when a rank's task is not there.
        yield from _round_begun(at_once.round, now_ms)
        yield from _round_over(at_once.round, after, now_ms)
    if new is None:
        return
    if old is None or old.number != new.number:
        yield from _round_begun(new, now_ms)
        return
    if old.kind is not new.kind:
        yield _info("round_turned", round=new.number, kind=new.kind.value, save_left_ms=new.save_by_ms - now_ms)
    if old.members is not new.members:
        yield from _members(old, new, now_ms, who)
    if new.at is not None and old.at is None:
        yield _info("agreed", round=new.number, step=new.at.n, safe_point=new.at.k)
    if new.go and not old.go:
        at = {} if new.at is None else {"step": new.at.n}  # All ranks have come to it, whatever becomes of the save.
        yield _info("go", round=new.number, after_ms=now_ms - new.began_ms, **at)
    if new.verified and not old.verified:
        yield from _all_members(new, Stage.VERIFIED, now_ms)
    if new.committed and not old.committed:
        yield from _all_members(new, Stage.COMMITTED, now_ms)


def _round_begun(new: Round, now_ms: int) -> Iterator[Entry]:
    numbers = spans([member.who.rank for member in new.members])
    fields = {"kind": new.kind.value, "ranks": numbers, "save_left_ms": new.save_by_ms - now_ms, "tries": new.tries}
    yield _info("round_begun", round=new.number, **fields)
    if len(new.members) > RANKS_SHOWN_MAX and new.requested == len(new.members):
        yield _info("rank_requested", round=new.number, after_ms=now_ms - new.began_ms, ranks=numbers)
    else:
        yield from _members(None, new, now_ms)


def _members(old: Round | None, new: Round, now_ms: int, who: wire.Who | None = None) -> Iterator[Entry]:
    changed = None if who is None else new.member(who)
    for member in new.members if changed is None else (changed,):
        earlier = old.member(member.who) if old is not None else None
        if earlier is not None and earlier.stage is member.stage:
            continue
        yield Entry(
            "rank_" + member.stage.value,
            "warning" if member.stage in (Stage.FAILED, Stage.LATE, Stage.GONE) else "info",
            _member_fields(member, new, now_ms),
        )


def _member_fields(member: Member, current: Round, now_ms: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"round": current.number, "rank": member.who.rank, "after_ms": now_ms - current.began_ms}
    if member.stage is Stage.AGREED and member.entered is not None:
        fields["entered"] = list(member.entered)
    if member.saved is not None and member.stage is Stage.WRITTEN:
        fields["save_ms"] = member.saved.save_ms
        fields["files"] = len(member.saved.files)
        fields["bytes"] = sum(file.size_bytes for file in member.saved.files)
    if member.reason:
        fields["reason"] = member.reason
    return fields


def _all_members(current: Round, stage: Stage, now_ms: int) -> Iterator[Entry]:
    """The end of each rank's chain of words. It holds for all at once and is in `verified` and `commit` too: debug."""
    if len(current.members) > RANKS_SHOWN_MAX:
        fields = {"round": current.number, "after_ms": now_ms - current.began_ms}
        yield Entry("rank_" + stage.value, "debug", {**fields, "ranks": spans([member.who.rank for member in current.members])})
        return
    for member in current.members:
        fields = _member_fields(replace(member, stage=stage), current, now_ms)
        yield Entry("rank_" + stage.value, "debug", fields)


def _round_over(old: Round, after: State, now_ms: int) -> Iterator[Entry]:
    given_up = after.given_up
    fields: dict[str, Any] = {"round": old.number, "step": None if old.at is None else old.at.n, "took_ms": now_ms - old.began_ms}
    if given_up is None or given_up.round.number != old.number:
        if not old.committed:
            # It was committed in this very step, or nothing had to be written: that step stands already.
            yield from _all_members(old, Stage.COMMITTED, now_ms)
        yield Entry("round_committed", "info", fields)
        return
    yield from _members(old, given_up.round, now_ms)
    shown = itertools.islice(given_up.round.members, RANKS_SHOWN_MAX)
    fields["ranks"] = {str(member.who.rank): member.stage.value for member in shown}
    yield Entry("round_given_up", "warning", {**fields, "reason": given_up.reason, "in_a_row": after.given_up_in_a_row})


def _of_phase(before: State, after: State) -> Iterator[Entry]:
    if before.phase is after.phase:
        return
    fields: dict[str, Any] = {"before": before.phase.name, "after": after.phase.name}
    yield Entry("phase", "debug", fields)
    leaving = after.leaving
    if leaving is None:
        return
    # What becomes of a program that saves by itself is known only once it is over.
    if leaving.passed:
        is_told = before.phase.value <= Phase.LEAVING.value < after.phase.value
    else:
        is_told = before.leaving is None and after.phase.value >= Phase.LEAVING.value
    if is_told:
        outcome = "fresh" if leaving.fresh else "stale"
        level = "info" if leaving.fresh else "warning"
        yield Entry("leaving", level, {"outcome": outcome, "step": after.committed_step, "reason": leaving.reason})


def _of_commands(commands: tuple[Command, ...]) -> Iterator[Entry]:
    for command in commands:
        match command:
            case Exit(code=code, line=line):
                yield _info("exit", code=code, line=line)
            case AskCommand(why=why):
                yield _info("command_asked", why=why)
            case EndCommand(why=why):
                yield Entry("command_ended", "info", {"why": why or "its time to end by itself was over"})
            case CallRequeue():
                yield _info("requeue_called")
            case DropPartial(partial=partial):
                yield _info("partial_dropped", path=partial)
            case Say(pid=pid, word=wire.Refused(reason=reason), task=task):
                yield Entry("rank_refused", "warning", {"rank_pid": pid, "reason": reason, **_task(task)})
            case TurnAway(task=task, reason=reason):
                yield Entry("task_refused", "warning", {"of_task": task, "reason": reason})
            case LookUp(why=why):
                yield Entry("look_asked", "debug", {"why": why})
            case _:
                pass  # Words to ranks are described by what comes of them.


def _info(event: str, **fields: Any) -> Entry:
    return Entry(event, "info", fields)
