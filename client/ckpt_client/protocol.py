"""The rank's half of the agreement on a step, without sockets, threads or clocks (docs/protocol.md, rules 1 to 12).

Owns what a rank knows about rounds and what it answers. Must not do I/O, lock, or read a clock: the hook, its listener thread
and the simulator all drive this same object, so the rules that are tested are the rules that run.

Two threads meet here. The *training thread* stores `entered` and compares `hold` with `done` at every boundary, without a lock
(rule 1); everything else happens under the owner's lock. The *listener* sets `hold` **before** it reads `entered` (rule 2):
either the training thread sees the hold at its next boundary, or the answer already counts what it entered.

The fast words, in order of who writes them:
  entered  training thread   an int n stands for the position (n + 1, 0); inside a phase it is a Position itself
  hold     listener          newest round asked for; LEAVE_HOLD once Leave has come
  done     either, locked    last round that is over for this rank
  due      training thread   next step count at which the rank stops by itself (every_steps), NEVER when off
  phase    training thread   name of the innermost phase, for `doing` alone
"""

from __future__ import annotations

import dataclasses
import enum

import msgspec

from ckpt_client import wire
from ckpt_client.wire import NO_ROUND, FromRank, Position, Who

NEVER = (1 << 30) - 1
"""A step count that few runs reach; the largest number that Python compares fast, since it fits into one digit of an int."""

FAR = 1 << 62
"""In place of NEVER for a rank whose numbers have passed that: it counts samples or tokens."""

LEAVE_HOLD = 1 << 61
"""Value of `hold` once Leave has come: above every round number."""

REPEAT_MS = 1_000
"""A parked rank repeats its last word this often (rule 7)."""

SILENCE_MS = 10_000
"""Without any word from the supervisor for this long a parked rank goes on training (rule 7)."""

OUTBOX_MAX = 1_000
"""Most words waiting to be sent; the oldest is dropped, as every word may be lost."""


class Step(enum.Enum):
    """What the training thread has to do at a boundary."""

    GO_ON = "go on training"
    WAIT = "stay parked until something is heard"
    SAVE = "save now, then ask again"
    LEAVE = "end the training loop"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What to do at a boundary; `order` is set for SAVE."""

    step: Step
    order: wire.SaveAt | None = None


GO_ON = Decision(Step.GO_ON)
WAIT = Decision(Step.WAIT)
LEAVE = Decision(Step.LEAVE)


class Rank:
    """One rank's view of the agreement. See the module's text for who may write what."""

    __slots__ = (
        "_begun", "_go", "_leaving", "_order", "_ordered_ms", "_parked", "_repeat_at_ms", "_said_leaving", "_saving", "_stays",
        "_stopped_at", "_word", "done", "done_steps", "due", "entered", "every_steps", "finished", "heard_ms", "hold", "outbox",
        "phase", "saved", "silence_ms", "welcome", "who",
    )  # fmt: skip

    def __init__(self, who: Who, start: int, done_steps: int | None = None, silence_ms: int = SILENCE_MS) -> None:
        """`start`: n of the first boundary. `done_steps`: n of the state it starts with, where it never stops by itself."""
        self.who = who
        self.done_steps = start if done_steps is None else done_steps
        self.silence_ms = silence_ms
        # From attach to the first boundary `entered` is the start itself, as Position(start, 0).
        self._begun = start - 1
        self.entered: int | Position = self._begun
        self.phase = ""
        self.hold = NO_ROUND
        self.done = NO_ROUND
        self.due = NEVER
        self.every_steps = 0
        self.finished = False
        self.heard_ms = 0
        self.welcome: wire.Welcome | wire.Refused | None = None
        self.saved: wire.Saved | None = None
        self.outbox: list[FromRank] = []
        self._order: wire.SaveAt | None = None
        self._ordered_ms = 0
        self._go = wire.Go(NO_ROUND)
        self._stopped_at: Position | None = None  # Where it stopped by itself.
        self._parked = False
        self._saving = NO_ROUND
        self._stays = NO_ROUND  # Leave round whose save is over: parked until Leave or Abort (rule 6).
        self._leaving = NO_ROUND
        self._said_leaving = False
        self._word: FromRank | None = None
        self._repeat_at_ms = 0

    # --- listener ---------------------------------------------------------------------------------------------------

    def hear(self, word: wire.ToRank, now_ms: int) -> None:
        """Take one word of the supervisor. Answers go to the outbox."""
        self.heard_ms = now_ms
        match word:
            case wire.Welcome():
                self._welcomed(word)
            case wire.Refused():
                self.welcome = self.welcome or word
            case wire.Prepare(round=number):
                if not self._is_over(number) and number >= self.hold:
                    self.hold = number  # Before `entered` is read (rule 2).
                    self._say(wire.Ack(self.who, number, self.position()))
            case wire.SaveAt():
                self._ordered_ms = now_ms
                self._ordered(word)
            case wire.Go():
                self._told_to_go(word)
            case wire.Abort(round=number):
                self._aborted(number)
            case wire.Leave(round=number):
                self._told_to_leave(number)
            case wire.Wait():
                pass  # Only that it was heard counts.

    def tick(self, now_ms: int) -> None:
        """Repeat the last word when it is time (rule 7). Called by the listener at least once a second."""
        if now_ms < self._repeat_at_ms:
            return
        self._repeat_at_ms = now_ms + REPEAT_MS
        if self._saving:
            self._say(wire.Saving(self.who, self._saving))
        elif self._parked and self._word is not None:
            self._say(self._word)

    def quiet_ms(self, now_ms: int) -> int:
        """How long the listener may sleep before `tick` has something to do."""
        if self._saving or self._parked:
            return min(max(self._repeat_at_ms - now_ms, 0), REPEAT_MS)
        return REPEAT_MS

    def take_outbox(self) -> list[FromRank]:
        """The words to send now, oldest first; they are forgotten here."""
        out, self.outbox = self.outbox, []
        return out

    def position(self) -> Position:
        """`entered` as a position."""
        entered = self.entered
        return entered if isinstance(entered, Position) else Position(int(entered) + 1, 0)  # A user's n may be numpy's.

    @property
    def doing(self) -> wire.Doing:
        """What the training thread is at, for a Progress (progress.py)."""
        if self.finished or self._leaving or self._said_leaving:
            return "over"
        if self._saving:
            return "saving"
        if self._parked:
            return "parked"
        if self.phase:
            return "phase"
        # An int of the user's may be numpy's; a Position that equals it is none.
        return "starting" if not isinstance(self.entered, Position) and self.entered == self._begun else "training"

    # --- training thread, under the owner's lock ----------------------------------------------------------------------

    def at_boundary(self, here: Position, now_ms: int) -> Decision:
        """What to do at the boundary `here`. Asked again after every WAIT and every SAVE."""
        decision = self._decide(here)
        if decision.step is Step.WAIT:
            if not self._parked:
                self._parked = True
                self.heard_ms = now_ms
                self._repeat_at_ms = now_ms + REPEAT_MS
            elif now_ms - self.heard_ms >= self.silence_ms:
                return self._give_up_waiting(here)
            return decision
        self._parked = False
        self._word = None
        if decision.order is not None:
            # What was left when the order came is less by the time that the last rank took to arrive.
            left_ms = max(0, decision.order.left_ms - (now_ms - self._ordered_ms))
            return Decision(decision.step, msgspec.structs.replace(decision.order, left_ms=left_ms))
        return decision

    def save_began(self, order: wire.SaveAt) -> None:
        """The training thread starts the save of this order."""
        self._saving = order.round
        self._say(wire.Saving(self.who, order.round))

    def save_ended(self, order: wire.SaveAt, files: tuple[wire.SavedFile, ...], save_ms: int) -> None:
        """The save is over. The word carries the round and n that it *began* with (rule 5)."""
        self._saving = NO_ROUND
        self.saved = wire.Saved(self.who, order.round, order.at.n, files, save_ms)
        self._say(self.saved)
        newest = self._order if self._order and self._order.round == order.round else order
        if newest.then == "leave" and order.round > self.done:
            self._stays = order.round
        else:
            self._over(order.round)
        self._skip_due(order.at.n)

    def save_failed(self, order: wire.SaveAt, reason: str) -> None:
        """The save raised."""
        self._saving = NO_ROUND
        self._over(order.round)
        self._say(wire.Failed(self.who, order.round, reason[: wire.REASON_CHARS_MAX]))
        self._skip_due(order.at.n)

    def left(self) -> None:
        """`Preempted` is about to be raised; the second time says that the first one was ignored (docs/protocol.md)."""
        self._say(wire.Left(self.who, self._leaving, again=self._said_leaving))
        self._said_leaving = True

    def supervisor_died(self) -> None:
        """The supervisor is gone: nothing holds this rank any more."""
        self._parked = False
        self._stopped_at = None
        self._stays = NO_ROUND
        if self.hold != LEAVE_HOLD:
            self.done = max(self.done, self.hold)
        self.every_steps = 0
        self.due = NEVER

    def finish(self) -> None:
        """The training loop is over (rule 9): says Finished now, and to every Prepare.

        A rank that was told to leave has said Left instead: it has not come to the end by itself.
        """
        self._parked = False
        if not self.finished and not self._said_leaving:
            self.finished = True
            self._say(wire.Finished(self.who, NO_ROUND))

    def died(self, reason: str) -> None:
        """The process dies of an exception: what ended the training loop was no end of training (round 0)."""
        self._parked = False
        n = self.entered.n if isinstance(self.entered, Position) else int(self.entered)
        self._say(wire.Failed(self.who, NO_ROUND, reason[: wire.REASON_CHARS_MAX], max(self.done_steps, n)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _decide(self, here: Position) -> Decision:
        if self._leaving:
            return LEAVE
        if self.hold > self.done:
            return self._decide_in_round(here)
        if self._stopped_at is not None or (here.k == 0 and here.n >= self.due):
            return self._decide_own_stop(here)
        return GO_ON

    def _decide_in_round(self, here: Position) -> Decision:
        number = self.hold
        if self._stays == number:
            self._word = self.saved
            return WAIT
        order = self._order
        if order is None or order.round != number:
            self._word = wire.Ack(self.who, number, self.position())
            return WAIT  # Prepare was heard, the step is not agreed on yet.
        if here < order.at:
            self._stopped_at = None
            self._skip_due(here.n)
            return GO_ON
        if here != order.at:
            self._over(number)
            self._say(wire.Failed(self.who, number, f"is at {tuple(here)}, beyond the agreed {tuple(order.at)}"))
            return GO_ON
        if self._go.round == number:
            self._stopped_at = None
            return Decision(Step.SAVE, order)
        self._arrive(wire.Arrived(self.who, number, here))
        return WAIT

    def _decide_own_stop(self, here: Position) -> Decision:
        if self._stopped_at is None:
            if self.every_steps == 0 or here.n % self.every_steps:
                self._skip_due(here.n)
                return GO_ON
            self._stopped_at = here
        self._arrive(wire.Arrived(self.who, NO_ROUND, here))
        return WAIT

    def _arrive(self, word: wire.Arrived) -> None:
        if self._word != word:
            self._word = word
            self._say(word)

    def _give_up_waiting(self, here: Position) -> Decision:
        """Rule 7: nothing was heard for `silence_ms`. Says Failed, never parks again for this round, goes on."""
        self._parked = False
        self._word = None
        if self.hold > self.done:
            self._say(wire.Failed(self.who, self.hold, f"heard nothing for {self.silence_ms} ms"))
            self._over(self.hold)
        self._stopped_at = None
        self._skip_due(here.n)
        return GO_ON

    def _ordered(self, order: wire.SaveAt) -> None:
        number = order.round
        if self._is_over(number) or number < self.hold:
            return
        self.hold = number
        self._order = self._as_told(order)
        if self._saving == number:
            self._say(wire.Saving(self.who, number))
        elif not self._parked:
            # Still on its way: says so, or the coordinator could not tell it from a mute rank.
            self._say(wire.Ack(self.who, number, self.position()))

    def _told_to_go(self, word: wire.Go) -> None:
        if self._is_over(word.round) or word.round < self._go.round:
            return
        self._go = word
        if self._order is not None:
            self._order = self._as_told(self._order)

    def _as_told(self, order: wire.SaveAt) -> wire.SaveAt:
        """The order with what Go said comes after it: a SaveAt that is late or repeated does not take it back."""
        go = self._go
        return order if go.then is None or go.round != order.round else msgspec.structs.replace(order, then=go.then)

    def _told_to_leave(self, number: int) -> None:
        self._leaving = max(self._leaving, number, 1)
        self.hold = LEAVE_HOLD
        if self.finished:
            self._say(wire.Finished(self.who, number))
        elif self._said_leaving:
            self._say(wire.Left(self.who, self._leaving, again=False))

    def _welcomed(self, word: wire.Welcome) -> None:
        if isinstance(self.welcome, wire.Welcome):
            return
        self.welcome = word
        self.done = max(self.done, word.newest_round)
        self.every_steps = word.every_steps
        if word.every_steps:
            # Never at 0, and not at the step resumed from: that checkpoint is there already.
            self._skip_due(self.done_steps)

    def _aborted(self, number: int) -> None:
        """Rule 4: released at once, by round number, also during a save."""
        if number == NO_ROUND:
            stopped = self._stopped_at
            if stopped is not None:
                self._stopped_at = None
                self._skip_due(stopped.n)
            return
        if number > self.done:
            self._over(number)

    def _is_over(self, number: int) -> bool:
        """Answer for a round that is over for this rank, or that it cannot take part in (rules 5 and 9)."""
        if self._leaving:
            return True
        if self.saved is not None and self.saved.round == number:
            self._say(self.saved)
            return True
        if number <= self.done:
            self._say(wire.Failed(self.who, number, "the round is over for this rank"))
            return True
        if self.finished:
            self._say(wire.Finished(self.who, number))
            return True
        return False

    def _over(self, number: int) -> None:
        self.done = max(self.done, number)
        if self._stays <= self.done:
            self._stays = NO_ROUND
        stopped = self._stopped_at
        if stopped is not None:
            self._stopped_at = None
            self._skip_due(stopped.n)

    def _skip_due(self, n: int) -> None:
        """Move the next own stop beyond n."""
        if self.every_steps:
            self.due = (n // self.every_steps + 1) * self.every_steps
        elif n >= self.due:
            self.due = FAR

    def _say(self, word: FromRank) -> None:
        if len(self.outbox) >= OUTBOX_MAX:
            del self.outbox[0]
        self.outbox.append(word)
