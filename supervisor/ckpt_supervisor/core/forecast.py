"""How long a save will take, by what this run's own saves took, and whether one still fits before the kill.

Pure. Owns the measurements and the one question "is it too late?". Must not end anything: turns.py asks, and leaves. The measure
is the *shortest* of the newest few saves: a try that does not make it costs nothing but what was left anyway, so a save is left
out only where not even the best of them would have fitted. Saves of this attempt count; before the first one those of the
attempts before it do, by their journals and manifests.
"""

from __future__ import annotations

from msgspec.structs import replace

from ckpt_supervisor.core.history import SAVES_MAX
from ckpt_supervisor.core.state import Kind, Notice, Round, State

NONE_BEGUN = "no save was begun"

SETTLE_MS = 2_000
"""Before a save is left out the look that tells the real time is waited for so long: at the signal itself it is a guess."""


def measured(state: State, now_ms: int) -> State:
    """The state that has learnt from the round that is committed now."""
    current = state.round
    if current is None or not current.go or current.written_ms is None:
        return state
    save_ms = current.written_ms - current.go_ms
    hold_ms = hold_of(current.written_ms, current.go_ms, current.held_ms)
    return replace(
        state,
        saves_ms=(save_ms, *state.saves_ms)[:SAVES_MAX],
        holds_ms=(hold_ms, *state.holds_ms)[:SAVES_MAX],
        verify_ms=max(state.verify_ms, now_ms - current.written_ms),
    )


def tried(state: State, over: Round, now_ms: int) -> State:
    """The state that has learnt from a last save that was given up: it takes longer than it had.

    So the watch begins the next one sooner, after a requeue too (start/history.py): with no save that ever made it nobody would
    know, and each attempt would lose everything again. It is no reason not to try: what is left is lost anyway.
    """
    if over.kind is not Kind.LEAVE or not over.go or over.written_ms is not None:
        return state
    return replace(state, longest_save_ms=max(state.longest_save_ms, now_ms - over.go_ms))


def hold_of(written_ms: int, go_ms: int, held_ms: int | None) -> int:
    """How long training was held: from the first rank that stood at the agreed step."""
    return written_ms - (go_ms if held_ms is None else min(go_ms, held_ms))


def too_late(state: State, now_ms: int) -> str:
    """Why no save is begun any more, with its numbers; "" while one may still fit, or nothing is known."""
    notice = state.notice
    seen = state.saves_ms or state.history.saves_ms
    if notice is None or not seen or now_ms + min(seen) <= notice.budget.save_by_ms:
        return ""
    left_s = max(0, notice.budget.save_by_ms - now_ms) / 1000
    of_what = "the last one took that long" if len(seen) == 1 else f"the shortest of the last {len(seen)}"
    return f"{NONE_BEGUN}: it takes {min(seen) / 1000:.1f} s ({of_what}), and {left_s:.1f} s were left for it"


def is_settled(state: State, notice: Notice, now_ms: int) -> bool:
    """Whether the time that is left is known, or will not be known better soon."""
    if notice.deadline_known or not (state.looking or notice.relook_ms is not None):
        return True
    return now_ms >= notice.first_ms + SETTLE_MS


def waits_until_ms(state: State, notice: Notice) -> int | None:
    """Until when a save that seems to be too late waits for the look; None when it does not."""
    if is_settled(state, notice, notice.first_ms) or not too_late(state, notice.first_ms):
        return None
    return notice.first_ms + SETTLE_MS
