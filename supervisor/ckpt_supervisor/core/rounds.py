"""One round: Prepare, T, Arrived, Go, Saved (docs/protocol.md, rules 2 to 6, 10 and 12).

Pure. Owns a round from its beginning until its files are written, or until it is given up. Must not decide what comes after:
it hands `Done` or `GivenUp` back to the machine. T is fixed once per round; a word of another round is answered, never obeyed.
"""

from __future__ import annotations

from typing import Literal

from ckpt_client import wire
from ckpt_client.wire import Position, Who
from msgspec.structs import replace

from ckpt_supervisor.core import ranks
from ckpt_supervisor.core.commands import Command, Share, to
from ckpt_supervisor.core.names import partial_name
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Kind, Member, Phase, Round, Stage, State
from ckpt_supervisor.core.table import Table

RESEND_MS = 1_000
"""A word that has not been answered is said again this often."""

MISSING_MS = 2_000
"""Ranks that have not attached are waited for at most this long (rule 10)."""

MUTE_MS = 15_000
"""A member that says nothing for this long is late. Its listener answers even while its training thread is in C."""

MUTE_SAVING_MS = 60_000
"""The same during a save, where pickling a large object can keep the interpreter to itself."""

PASSED_MS = 900
"""A rank that says for this long that it is beyond T will not come to it. SaveAt is said again, and answered, every second."""

Commands = tuple[Command, ...]


def begin(
    policy: Policy, state: State, kind: Kind, now_ms: int, save_by_ms: int, at: Position | None = None
) -> tuple[State, Commands]:
    """Start a round of all live ranks; `at` is given when ranks have stopped by themselves (rule 12)."""
    members = [Member(rank.who, heard_ms=now_ms) for rank in state.live]
    number = state.newest_round + 1
    state = replace(
        state,
        phase=Phase.AGREEING,
        newest_round=number,
        round=Round(
            number=number,
            kind=kind,
            began_ms=now_ms,
            members=Table.of((member.who.rank, member) for member in members),
            requested=len(members),
            save_by_ms=save_by_ms,
            said_ms=now_ms,
            # A rank that has left its loop does not come back, and one whose task is not heard holds nobody: no wait (rule 9).
            missing_by_ms=now_ms + (0 if any(rank.finished or rank.left or rank.cut for rank in state.ranks) else MISSING_MS),
            at=at,
        ),
    )
    commands: Commands = ()
    if at is None:
        prepare = wire.Prepare(number)
        commands = tuple(to(member.who, prepare) for member in members)
    state, more = _complete(policy, state, now_ms)
    return state, commands + more


def join(policy: Policy, state: State, who: Who, now_ms: int) -> tuple[State, Commands]:
    """A rank has attached before T was fixed."""
    current = state.round
    if current is None or state.phase is not Phase.AGREEING or current.member(who) is not None:
        return state, ()
    # All were here, and it comes on top: the world was larger than it was said to be. Without it the round would not be whole.
    missing_by_ms = now_ms + MISSING_MS if current.missing_by_ms is None else current.missing_by_ms
    state = _put(replace(state, round=replace(current, missing_by_ms=missing_by_ms)), Member(who, heard_ms=now_ms))
    commands: Commands = ()
    if current.at is None:
        commands = (to(who, wire.Prepare(current.number)),)
    state, more = _complete(policy, state, now_ms)
    return state, commands + more


def heard(state: State, who: Who, now_ms: int) -> State:
    """Note that a member was heard."""
    current = state.round
    member = current.member(who) if current else None
    return state if member is None else _put(state, replace(member, heard_ms=now_ms))


def acked(policy: Policy, state: State, word: wire.Ack, now_ms: int) -> tuple[State, Commands]:
    """A rank says what it has entered. While AGREEING the largest answer counts; later ones never move T (rule 3)."""
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or word.round != current.number or state.phase is not Phase.AGREEING:
        return state, ()
    entered = max(member.entered or word.entered, word.entered)
    answered = replace(member, stage=Stage.AGREED, entered=entered, heard_ms=now_ms)
    current = replace(
        current,
        members=current.members.put(member.who.rank, answered),
        requested=current.requested - (member.stage is Stage.REQUESTED),
        top=max(current.top or entered, entered),
    )
    state = replace(state, round=current)
    state, more = (state, ()) if current.requested else _complete(policy, state, now_ms)
    # Only who repeats it, as a parked rank does every second, needs a word meanwhile: of thousands each one counts.
    waits = member.stage is not Stage.REQUESTED and not more
    return state, (to(word.who, wire.Wait(current.number)),) if waits else more


def on_its_way(state: State, word: wire.Ack, now_ms: int) -> tuple[State, str]:
    """A rank has heard SaveAt and is not parked. The text is a reason to give the round up, or "".

    In a round without Prepare (rule 12) a rank can be beyond T already, in a collective with those that wait for it at T: nothing
    would move until the round's deadline. One such answer proves nothing, as a rank that comes to T stores the next position.
    """
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or current.at is None or word.entered <= current.at:
        return state, ""
    if member.stage not in (Stage.REQUESTED, Stage.AGREED):
        return state, ""
    if member.passed_ms is None:
        return _put(state, replace(member, passed_ms=now_ms)), ""
    if now_ms - member.passed_ms < PASSED_MS:
        return state, ""
    return state, f"{ranks.describe_who(word.who)} is on its way to {tuple(word.entered)}, beyond the agreed {tuple(current.at)}"


def stopped_beyond(state: State, word: wire.Arrived) -> str:
    """A rank stands at a later stop of its own, while the others wait for it at T: it was cut off and let go of this round."""
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or current.at is None or current.go or word.at <= current.at:
        return ""
    return f"{ranks.describe_who(word.who)} stands at {tuple(word.at)}, beyond the agreed {tuple(current.at)}"


def arrived(policy: Policy, state: State, word: wire.Arrived, now_ms: int) -> tuple[State, Commands, str]:
    """A rank stands at T. When all do: Go. The text is a reason to give the round up, or ""."""
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or word.round != current.number or current.at is None:
        return state, (), ""
    if word.at != current.at:
        return state, (), f"{ranks.describe_who(word.who)} stands at {tuple(word.at)}, agreed was {tuple(current.at)}"
    if current.go:
        return state, (to(word.who, _go_word(current)),), ""
    if member.stage in (Stage.REQUESTED, Stage.AGREED):
        if current.held_ms is None:
            state = replace(state, round=replace(current, held_ms=now_ms))
        return _put(state, replace(member, stage=Stage.ARRIVED)), (), ""
    if all_arrived(state):
        return state, (), ""
    return state, (to(word.who, wire.Wait(current.number)),), ""


def all_arrived(state: State) -> bool:
    """Whether every member stands at T and waits for Go."""
    current = state.round
    return current is not None and state.phase is Phase.SAVING and not current.go and current.arrived == len(current.members)


def go(state: State, now_ms: int) -> tuple[State, Commands]:
    """Let all members save (rule 4)."""
    current = state.round
    if current is None:
        return state, ()
    state = replace(state, round=replace(current, go=True, go_ms=now_ms, said_ms=now_ms))
    word = _go_word(current)
    return state, tuple(to(member.who, word) for member in current.members)


def saving(state: State, word: wire.Saving) -> State:
    """A rank's save is running."""
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or word.round != current.number or member.stage is not Stage.ARRIVED:
        return state
    return _put(state, replace(member, stage=Stage.SAVING))


def saved(state: State, word: wire.Saved) -> tuple[State, str]:
    """A rank has written. The text is a reason to give the round up, or ""."""
    current = state.round
    member = current.member(word.who) if current else None
    if current is None or member is None or word.round != current.number or current.at is None:
        return state, ""
    if not current.go:
        return state, f"{ranks.describe_who(word.who)} saved before Go"
    if word.n != current.at.n:
        return state, f"{ranks.describe_who(word.who)} saved step {word.n}, agreed was step {current.at.n}"
    if member.stage is not Stage.WRITTEN:
        state = _put(state, replace(member, stage=Stage.WRITTEN, saved=word))
    return state, ""


def all_written(state: State) -> bool:
    """Whether every member's save is over."""
    current = state.round
    return current is not None and state.phase is Phase.SAVING and current.written == len(current.members)


def shares(current: Round) -> tuple[Share, ...]:
    """What the members reported, by task and rank."""
    found: dict[int, tuple[list[int], list[tuple[int, wire.SavedFile]]]] = {}
    for member in current.members:
        if member.saved is not None:
            pids, files = found.setdefault(member.who.task, ([], []))
            pids.append(member.who.pid)
            files += [(member.who.rank, file) for file in member.saved.files]
    return tuple(Share(task, tuple(pids), tuple(files)) for task, (pids, files) in sorted(found.items()))


def partial_path(policy: Policy, current: Round) -> str:
    """The directory that this round writes into; "" before T is fixed."""
    if current.at is None:
        return ""
    return f"{policy.directory}/{partial_name(current.at.n, policy.epoch, current.number)}"


def convert(policy: Policy, state: State, kind: Kind, save_by_ms: int, now_ms: int) -> tuple[State, Commands]:
    """Turn the round into a leave round, or back, before Go (rule 12)."""
    current = state.round
    if current is None or current.go:
        return state, ()
    state = replace(state, round=replace(current, kind=kind, save_by_ms=save_by_ms))
    if state.phase is Phase.SAVING:
        return _save_at(policy, state, now_ms)
    return state, ()


def lost(state: State, who: Who, stage: Stage, reason: str) -> State:
    """Note how far a member got that will not save."""
    current = state.round
    member = current.member(who) if current else None
    if member is None:
        return state
    return _put(state, replace(member, stage=stage, reason=reason))


def tick(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands, str]:
    """Resend, and see who is missing, mute or late. The text is a reason to give the round up, or ""."""
    current = state.round
    if current is None:
        return state, (), ""
    commands: Commands = ()
    if current.missing_by_ms is not None and now_ms >= current.missing_by_ms:
        state, commands, problem = _missing_is_over(policy, state, now_ms)
        if problem or state.round is None:
            return state, commands, problem
        current = state.round  # What else is overdue after a long sleep is seen to now, not at a deadline in the past.
    if now_ms >= current.save_by_ms:
        waiting = _waiting(state)
        for member in waiting:
            state = lost(state, member.who, Stage.LATE, "not ready when the time for the save was over")
        return (
            state,
            (),
            f"the time for the save is over: {now_ms - current.began_ms} ms after the request, {_names(waiting)}",
        )
    if now_ms < current.said_ms + RESEND_MS:
        return state, commands, ""
    mute = [m for m in current.members if _is_heard_again(state, m) and now_ms - _heard_ms(current, m) >= _mute_ms(m)]
    if mute:
        for member in mute:
            state = lost(state, member.who, Stage.LATE, f"not heard for {_mute_ms(member)} ms")
        return state, (), f"not heard for {_mute_ms(mute[0])} ms: {_names(mute)}"
    word = _last_word(policy, state, now_ms)
    commands += tuple(to(member.who, word) for member in _waiting(state))
    return replace(state, round=replace(current, said_ms=now_ms)), commands, ""


def next_deadline(state: State) -> int | None:
    """When tick has something to do."""
    current = state.round
    if current is None or state.phase not in (Phase.AGREEING, Phase.SAVING):
        return None
    times = [current.save_by_ms, current.said_ms + RESEND_MS]
    if current.missing_by_ms is not None:
        times.append(current.missing_by_ms)
    return min(times)


def abort(state: State, reason: str) -> Commands:
    """Release every rank that may be parked for the running round (rule 4)."""
    current = state.round
    if current is None:
        return ()
    word = wire.Abort(current.number, reason[: wire.REASON_CHARS_MAX])
    return tuple(to(rank.who, word) for rank in state.live)


def _complete(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    """Fix T and say SaveAt when everybody is here and has answered."""
    current = state.round
    if current is None or state.phase is not Phase.AGREEING:
        return state, ()
    whole = len(current.members) == state.world_size  # Each has a number of its own, below the world size.
    alone = state.alone and _alone_may_save(policy, state, current)
    if current.missing_by_ms is not None and (whole or alone):
        current = replace(current, missing_by_ms=None)
        state = replace(state, round=current)
    if current.missing_by_ms is not None or not len(current.members):
        return state, ()
    if current.at is None:
        if current.requested:
            return state, ()
        current = replace(current, at=current.top)
    assert current.at is not None
    fixed = replace(current, world_size=state.world_size)
    state = replace(state, phase=Phase.SAVING, round=fixed, last_n=current.at.n)
    return _save_at(policy, state, now_ms)


def _alone_may_save(policy: Policy, state: State, current: Round) -> bool:
    """Rule 10: rank 0 alone, if no other rank has attached in this attempt and its state is not sharded.

    Nor where the others are known to be only late: their tasks have not joined yet, or their files are in an earlier checkpoint.
    """
    if state.several or (policy.tasks > 1 and (len(state.tasks) < policy.tasks - 1 or any(task.gone for task in state.tasks))):
        return False
    return len(state.ranks) == len(current.members) == 1 and not any(rank.sharded or rank.who.rank for rank in state.ranks)


def _missing_is_over(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands, str]:
    current = state.round
    assert current is not None
    if _alone_may_save(policy, state, current):
        state = replace(state, alone=True, round=replace(current, missing_by_ms=None))
        state, commands = _complete(policy, state, now_ms)
        return state, commands, ""
    here = {member.who.rank for member in current.members}
    missing = [number for number in range(state.world_size) if number not in here]
    shown = ", ".join(str(number) for number in missing[:20]) + (", ..." if len(missing) > 20 else "")
    return state, (), f"{len(missing)} of {state.world_size} ranks are not there: {shown}"


def _save_at(policy: Policy, state: State, now_ms: int) -> tuple[State, Commands]:
    current = state.round
    assert current is not None
    state = replace(state, round=replace(current, said_ms=now_ms))
    word = _last_word(policy, state, now_ms)  # One for all: it is encoded once.
    return state, tuple(to(member.who, word) for member in _waiting(state))


def _last_word(policy: Policy, state: State, now_ms: int) -> wire.ToRank:
    """What those that are waited for were told last."""
    current = state.round
    assert current is not None
    if state.phase is Phase.AGREEING and current.at is not None:
        return wire.Wait(current.number)
    if state.phase is Phase.AGREEING or current.at is None:
        return wire.Prepare(current.number)
    if current.go:
        return _go_word(current)
    return wire.SaveAt(
        round=current.number,
        at=current.at,
        directory=partial_path(policy, current),
        then=_then(current),
        left_ms=max(0, current.save_by_ms - now_ms),
    )


def _go_word(current: Round) -> wire.Go:
    return wire.Go(current.number, _then(current))


def _then(current: Round) -> Literal["leave", "go_on"]:
    return "leave" if current.kind is Kind.LEAVE else "go_on"


def _waiting(state: State) -> list[Member]:
    current = state.round
    assert current is not None
    return [member for member in current.members if _is_waited_for(state, member)]


def _is_waited_for(state: State, member: Member) -> bool:
    """Whether this member's word is what the round waits for now."""
    current = state.round
    assert current is not None
    if state.phase is Phase.AGREEING:
        return member.stage is Stage.REQUESTED
    if current.go:
        return member.stage in (Stage.ARRIVED, Stage.SAVING)
    return member.stage in (Stage.REQUESTED, Stage.AGREED)


def _is_heard_again(state: State, member: Member) -> bool:
    """Whether this member has to be heard every second: it is asked again and again, or stands at T and repeats it.

    One that stood there, was cut off, let go of the round and whose Failed was lost says nothing any more; nobody asks it.
    """
    current = state.round
    stands = current is not None and not current.go and member.stage is Stage.ARRIVED
    return stands or _is_waited_for(state, member)


def _heard_ms(current: Round, member: Member) -> int:
    return max(current.began_ms, current.go_ms, member.heard_ms)


def _mute_ms(member: Member) -> int:
    return MUTE_SAVING_MS if member.stage is Stage.SAVING else MUTE_MS


def _names(members: list[Member]) -> str:
    shown = ", ".join(f"{ranks.describe_who(member.who)} {member.stage.value}" for member in members[:8])
    return shown + (", ..." if len(members) > 8 else "") if members else "no rank is waited for"


def _put(state: State, member: Member) -> State:
    """The state with this member's part added or replaced, and the counts that go with it."""
    current = state.round
    assert current is not None
    old = current.members.get(member.who.rank)
    before, after = None if old is None else old.stage, member.stage
    members = current.members.put(member.who.rank, member)
    if before is after:
        return replace(state, round=replace(current, members=members))
    current = replace(
        current,
        members=members,
        requested=current.requested + (after is Stage.REQUESTED) - (before is Stage.REQUESTED),
        arrived=current.arrived + (after is Stage.ARRIVED) - (before is Stage.ARRIVED),
        written=current.written + (after is Stage.WRITTEN) - (before is Stage.WRITTEN),
    )
    return replace(state, round=current)
