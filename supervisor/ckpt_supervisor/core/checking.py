"""The check of what a round has written: each task reads its own ranks' files, and all have to be intact.

Pure. Owns the time from the last rank's Saved to Commit. Must not decide what comes after a commit: see turns.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from ckpt_supervisor.core import ranks, rounds, turns
from ckpt_supervisor.core.commands import CheckAgain, Command, Commit, Verify
from ckpt_supervisor.core.events import Verified
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Phase, State

VERIFY_BYTES_PER_MS = 500_000
"""What a check of every byte is counted on to do (0.5 GB/s; docs/performance.md has what it does). What would not be over in
time is checked by structure and sizes, and in full before anybody resumes from it."""

Result = tuple[State, tuple[Command, ...]]


def begin(policy: Policy, state: State, now_ms: int) -> Result:
    """Every rank has written: check the files. With little time left structure and sizes have to do."""
    current = state.round
    assert current is not None
    longest_ms = max((member.saved.save_ms for member in current.members if member.saved is not None), default=0)
    verify_by_ms = now_ms + turns.VERIFY_MS if state.notice is None else state.notice.budget.verify_by_ms
    shares = rounds.shares(current)
    # Each task reads what its own ranks wrote, all of them at once.
    size_bytes = max((sum(file.size_bytes for _, file in share.files) for share in shares), default=0)
    in_time = state.notice is None or now_ms + size_bytes // VERIFY_BYTES_PER_MS <= verify_by_ms
    full = policy.verify_full and in_time
    state = replace(
        state,
        phase=Phase.VERIFYING,
        longest_save_ms=max(state.longest_save_ms, longest_ms),
        round=replace(
            current,
            verify_by_ms=max(verify_by_ms, now_ms),
            written_ms=now_ms,
            full=full,
            said_ms=now_ms,
            unverified=frozenset({0, *(share.task for share in shares)}),
        ),
    )
    if current.at is not None:
        state = ranks.no_longer_stopped(state, current.at.n)  # Stops of this round; a rank may stand at its next one already.
    return state, (
        Verify(
            round=current.number,
            partial=rounds.partial_path(policy, current),
            files=next((share.files for share in shares if share.task == 0), ()),
            full=full,
            shares=tuple(share for share in shares if share.task),
        ),
    )


def again(policy: Policy, state: State, now_ms: int) -> Result:
    """Tasks that have not told what they found are asked again."""
    current = state.round
    assert current is not None
    when_ms = again_ms(state)
    if when_ms is None or now_ms < when_ms:
        return state, ()
    shares = tuple(share for share in rounds.shares(current) if share.task and share.task in current.unverified)
    state = replace(state, round=replace(current, said_ms=now_ms))
    return state, (CheckAgain(current.number, rounds.partial_path(policy, current), current.full, shares),)


def again_ms(state: State) -> int | None:
    """When other tasks are asked again what they have found; None when none is waited for."""
    current = state.round
    if current is None or state.phase is not Phase.VERIFYING or not current.unverified - {0}:
        return None
    return current.said_ms + rounds.RESEND_MS


def verified(policy: Policy, state: State, event: Verified, now_ms: int) -> Result:
    """A task's answer. The checkpoint is committed once all have found their ranks' files intact."""
    current = state.round
    assert current is not None
    if event.round != current.number or current.at is None or event.task not in current.unverified:
        return state, ()
    if event.problem:
        where = f" of task {event.task}'s ranks" if policy.tasks > 1 else ""
        return turns.give_up(policy, state, f"verification{where}: {event.problem}", now_ms)
    step_saved = current.at.n
    current = replace(
        current,
        unverified=current.unverified - {event.task},
        verified="structure" if "structure" in (current.verified, event.verified) else event.verified,
    )
    state = replace(state, round=current)
    if current.unverified:
        return state, ()
    state = replace(state, phase=Phase.COMMITTING)
    commit = Commit(
        round=current.number,
        partial=rounds.partial_path(policy, current),
        step=step_saved,
        world_size=current.world_size,
        ranks=tuple(member.who.rank for member in current.members),
        cause=turns.cause_word(state),
        verified=current.verified,
        save_ms=max(0, (current.written_ms or now_ms) - current.go_ms),
    )
    return state, (commit,)
