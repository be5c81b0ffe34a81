"""The rank's half of the agreement under arbitrary words, with a training thread that does what the hook does.

The words come in any order, twice, late, of rounds that never were; the training thread is honest, as it is ours.
"""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
from ckpt_client import protocol, wire
from ckpt_client.protocol import LEAVE_HOLD, OUTBOX_MAX, Decision, Rank, Step
from ckpt_client.wire import NO_ROUND, Position, SavedFile, Who
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=70,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

ME = Who(1, 0, 4242)
FILE = SavedFile("rank-00001.pt", 9, "")
pauses = st.sampled_from([0, 0, 1, 250, 1_000, 9_000, 10_000, 60_000])
rounds = st.sampled_from([-1, 0, 0, 0, 1])
"""How far a word's round is from the newest one that was heard of."""

thens: st.SearchStrategy[Literal["leave", "go_on"]] = st.sampled_from(["leave", "go_on"])


class Client(RuleBasedStateMachine):
    """One rank. `parked`, `saving`, or else training: the training thread is at one place at a time."""

    @initialize(start=st.integers(0, 3), resumed=st.booleans())
    def attach(self, start: int, resumed: bool) -> None:
        """Attach, before anything was heard."""
        self.rank = Rank(ME, start, done_steps=start if resumed else 0)
        self.now = 0
        self.here = Position(start, 0)
        """Where the training thread stands or will stand next."""
        self.parked = False
        self.saving: wire.SaveAt | None = None
        self.newest = 0
        self.orders: dict[int, set[Position]] = {}
        self.gos: set[int] = set()
        self.done = 0
        self.left = self.finished = self.dead = False

    @precondition(lambda self: self.left or self.finished or self.dead)
    @rule(start=st.integers(0, 3))
    def attach_again(self, start: int) -> None:
        """The next process."""
        self.attach(start, resumed=False)

    # --- the supervisor, or anybody ---------------------------------------------------------------------------------------

    def hear(self, word: wire.ToRank) -> None:
        """The listener takes a word."""
        leaving = self.rank.hold == LEAVE_HOLD
        self.rank.hear(word, self.now)
        assert self.rank.hold == LEAVE_HOLD or not leaving, "Leave was taken back"

    def number(self, off: int, *, new: bool = False) -> int:
        """A round's number near the newest one."""
        number = max(NO_ROUND, self.newest + off + new)
        self.newest = max(self.newest, number)
        return number

    @precondition(lambda self: not self.dead)
    @rule(off=rounds, new=st.booleans())
    def prepare(self, off: int, *, new: bool) -> None:
        """A round is asked for."""
        number = self.number(off, new=new)
        done, hold = self.rank.done, self.rank.hold
        self.rank.take_outbox()
        self.hear(wire.Prepare(number))
        self.check_answer(number, done, hold)
        if done < number >= hold and not self.finished:
            saved = self.rank.saved
            again = saved is not None and saved.round == number
            assert self.rank.outbox == [saved if again else wire.Ack(ME, number, self.rank.position())]

    def check_answer(self, number: int, done: int, hold: int) -> None:
        """A word of a round that is over is answered, never obeyed (rule 5)."""
        if number <= done and hold != LEAVE_HOLD:
            (word,) = self.rank.outbox
            assert isinstance(word, wire.Saved | wire.Failed | wire.Finished)
            assert word.round == number
            assert self.rank.hold == hold

    @precondition(lambda self: not self.dead)
    @rule(off=rounds, new=st.booleans(), ahead=st.integers(-1, 3), k=st.sampled_from([0, 0, 0, 1]), then=thens)
    def save_at(self, off: int, new: bool, ahead: int, k: int, then: Literal["leave", "go_on"]) -> None:
        """T, somewhere near; a round's T may even be told in two ways."""
        number = self.number(off, new=new)
        at = Position(max(0, self.here.n + ahead), k)
        self.orders.setdefault(number, set()).add(at)
        done, hold = self.rank.done, self.rank.hold
        self.rank.take_outbox()
        self.hear(wire.SaveAt(number, at, "/ckpt/x", then, 1_000))
        self.check_answer(number, done, hold)

    @precondition(lambda self: not self.dead)
    @rule(ahead=st.integers(0, 2), k=st.sampled_from([0, 0, 1]), then=thens, go=st.booleans())
    def ordered(self, ahead: int, k: int, then: Literal["leave", "go_on"], go: bool) -> None:
        """A round as it is meant to be."""
        self.prepare(0, new=True)
        entered = self.rank.position()
        at = Position(entered.n + ahead, k if ahead else entered.k)
        self.orders.setdefault(self.newest, set()).add(at)
        self.hear(wire.SaveAt(self.newest, at, "/ckpt/x", then, 1_000))
        if go:
            self.boundaries()
            self.go(0, None)
            if self.parked:
                self.ask()

    @precondition(lambda self: not self.dead)
    @rule(off=rounds, then=st.sampled_from(["leave", "go_on", None]))
    def go(self, off: int, then: Literal["leave", "go_on"] | None) -> None:
        """Go, with or without what comes after."""
        number = self.number(off)
        self.gos.add(number)
        done, hold = self.rank.done, self.rank.hold
        self.rank.take_outbox()
        self.hear(wire.Go(number, then))
        self.check_answer(number, done, hold)

    @precondition(lambda self: not self.dead)
    @rule(off=rounds, every_steps=st.sampled_from([0, 1, 2, 5]), kind=st.sampled_from([0, 1, 2, 3, 3, 4]))
    def other_word(self, off: int, every_steps: int, kind: int) -> None:
        """Welcome, once or again; Refused; Abort; Wait."""
        number = self.number(off)
        words: list[wire.ToRank] = [
            wire.Abort(number, "x"),
            wire.Abort(NO_ROUND, "x"),
            wire.Wait(number),
            wire.Welcome(wire.VERSION, min(number, 3), every_steps, "", -1),
            wire.Refused("x"),
        ]
        self.hear(words[kind])

    @precondition(lambda self: not self.dead)
    @rule(off=rounds, kind=st.integers(0, 20))
    def end(self, off: int, kind: int) -> None:
        """Sometimes Leave; or the supervisor dies, and nothing is heard after that; or the loop is over (rule 9)."""
        training = not (self.parked or self.saving or self.finished or self.left)
        if kind >= 19:
            self.dead = True
            self.rank.supervisor_died()
        elif kind >= 16:
            self.hear(wire.Leave(self.number(off)))
        elif kind >= 14 and training:
            self.rank.finish()
            self.finished = True
            assert self.rank.finished

    # --- the training thread ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not (self.parked or self.saving or self.finished))
    @rule(more=st.integers(1, 2), point=st.sampled_from([False, False, True]))
    def boundary(self, more: int, point: bool) -> None:
        """The end of a step, or a safe point: store `entered`, then ask if something is asked for (rule 1)."""
        self.here = Position(self.here.n, self.here.k + 1) if point else Position(self.here.n + more, 0)
        self.rank.entered = Position(self.here.n, self.here.k + 1) if point else self.here.n
        if self.rank.hold > self.rank.done or self.here.n >= self.rank.due:
            self.ask()

    @precondition(lambda self: not (self.parked or self.saving or self.finished))
    @rule()
    def boundaries(self) -> None:
        """Training goes on until something is asked of it."""
        for _ in range(4):
            if not (self.parked or self.saving or self.left or self.finished):
                self.boundary(1, point=False)

    @precondition(lambda self: self.parked)
    @rule(after=pauses)
    def wakes(self, after: int) -> None:
        """The parked thread looks again."""
        self.now += after
        self.ask()

    def ask(self) -> None:
        """What to do here; judged."""
        rank, here = self.rank, self.here
        hold, done, silent_ms, was_parked = rank.hold, rank.done, self.now - rank.heard_ms, self.parked
        decision = rank.at_boundary(here, self.now)
        self.parked = decision.step is Step.WAIT
        if hold == LEAVE_HOLD:
            assert decision.step is Step.LEAVE, "something else than LEAVE after Leave"
        elif decision.step is Step.LEAVE:
            raise AssertionError("LEAVE without Leave")
        elif decision.step is Step.SAVE:
            self.check_save(decision, hold, done)
        elif decision.step is Step.WAIT:
            own_stop = rank.every_steps > 0 and here.n % rank.every_steps == 0 and here.k == 0
            assert hold > done or own_stop, "parked for nothing"
            assert not self.dead, "parked for a supervisor that is dead"
            assert not was_parked or silent_ms < rank.silence_ms, "parked although nothing is heard"
        else:
            self.check_go_on(hold, done, silent=was_parked and silent_ms >= rank.silence_ms)
        if decision.step is Step.LEAVE:
            rank.left()
            self.left = True

    def check_save(self, decision: Decision, hold: int, done: int) -> None:
        """SAVE: at exactly T of a round that is running and has been given Go."""
        order = decision.order
        assert order is not None
        assert order.at == self.here, "saves elsewhere than at T"
        assert self.here in self.orders[order.round]
        assert order.round == hold
        assert order.round > done
        assert order.round in self.gos, "saves without Go"
        self.saving = order
        self.rank.save_began(order)

    def check_go_on(self, hold: int, done: int, *, silent: bool) -> None:
        """GO_ON: nothing is asked for, T is still ahead, or the round is over for this rank for a reason."""
        if self.rank.hold > self.rank.done:
            assert self.here < max(self.orders[self.rank.hold]), "passed T and has not said so"
        elif hold > done and not silent:
            assert self.here > min(self.orders[hold]), "fails a round whose T is here or ahead"
            assert any(isinstance(word, wire.Failed) and word.round == hold for word in self.rank.outbox)

    @precondition(lambda self: self.saving is not None)
    @rule(works=st.sampled_from([True, True, False]), after=pauses)
    def save_ends(self, works: bool, after: int) -> None:
        """The save is over, or raised; what is said belongs to the round and step that it began with."""
        order = self.saving
        assert order is not None
        self.now += after
        self.saving = None
        self.rank.take_outbox()
        if works:
            self.rank.save_ended(order, (FILE,), after)
            assert self.rank.take_outbox() == [wire.Saved(ME, order.round, order.at.n, (FILE,), after)]
        else:
            self.rank.save_failed(order, "x" * 600)
            assert self.rank.take_outbox() == [wire.Failed(ME, order.round, "x" * wire.REASON_CHARS_MAX)]
            assert self.rank.done >= order.round
        self.ask()

    # --- the listener's clock -----------------------------------------------------------------------------------------------

    @rule(after=pauses)
    def tick(self, after: int) -> None:
        """Time passes; who is parked or saving says so again once a second (rule 7)."""
        self.now += after
        waiting = (self.parked and self.rank.hold != LEAVE_HOLD) or self.saving is not None
        due = self.rank.quiet_ms(self.now) == 0
        self.rank.take_outbox()
        self.rank.tick(self.now)
        assert 0 <= self.rank.quiet_ms(self.now) <= protocol.REPEAT_MS
        assert len(self.rank.outbox) <= 1
        if waiting and due:
            assert len(self.rank.outbox) == 1, "is parked or saves, and says nothing"

    @rule(storm=st.integers(0, 40))
    def sent(self, storm: int) -> None:
        """The outbox is sent, sometimes after so many repetitions that it is full."""
        for _ in range(OUTBOX_MAX + 1 if storm == 40 and not self.dead else 0):
            self.hear(wire.Prepare(self.newest))
        assert len(self.rank.outbox) <= OUTBOX_MAX
        for word in self.rank.take_outbox():
            assert word.who == ME
            assert wire.decode_from_rank(wire.encode(word)) == word
        assert self.rank.outbox == []

    # --- always -----------------------------------------------------------------------------------------------------------

    @invariant()
    def rounds_that_are_over_stay_over(self) -> None:
        """`done` only rises, and a round that is over is never parked for."""
        assert self.rank.done >= self.done
        self.done = self.rank.done
        assert len(self.rank.outbox) <= OUTBOX_MAX

    @invariant()
    def a_rank_that_trains_is_not_told_to_ask_about_rounds_that_are_over(self) -> None:
        """Nothing holds a rank whose rounds are over: the test at the boundary (rule 1) is false."""
        if self.dead and self.rank.hold != LEAVE_HOLD:
            assert self.rank.hold <= self.rank.done
            assert self.rank.due == protocol.NEVER


TestClient = Client.TestCase
TestClient.settings = SETTINGS
