"""What the owner of a job asks for from outside (`ckptctl save`), through DIR/control: no port, and no signal to a node.

Owns the looks at that directory and what becomes of each request. Must not decide how a save goes: it feeds the machine the same
event as a save signal, or `Asked`, and follows the round that comes of it to tell the one who asked. Only task 0's supervisor has
this watch. A look is one listing in a lane, every few seconds; one that hangs on a dead file system holds up nothing but the
next one.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from ckpt_client import wire

from ckpt_supervisor import store
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import Phase, Round, State
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.watches import control_files, places
from ckpt_supervisor.watches.control_files import Answer, Found, NotOurs, Place, Request

Feed = Callable[[ev.Event], None]
Log = Callable[[Entry], None]

LANE = "control"

LOOK_EVERY_MS = 5_000
"""One listing of an empty directory each time: 30 µs here, one question to the server on NFS."""

RESULT_MS = 1_000
"""The result of a look is fetched so soon after it was asked for, if nothing else wakes the loop."""

LOOK_LATER_MS = 60_000
"""After a look that failed."""

FOLLOWED_MAX = 100
"""So many requests are followed to their end at once; more are told that they were taken."""

SIGNAL = "ckptctl save"


@dataclasses.dataclass(slots=True)
class Followed:
    """A request whose save is on its way."""

    request: Request
    round: int
    step: int = -1


class Control:
    """The watch. `view` gives the machine's state."""

    def __init__(self, launch: Launch, lanes: Lanes, feed: Feed, log: Log, view: Callable[[], State]) -> None:
        job = launch.job
        self._launch = launch
        self._lanes = lanes
        self._feed = feed
        self._log = log
        self._view = view
        self._place = Place(launch.options.dir, job.name, job.step_id, launch.epoch, os.geteuid())
        self._next_ms = 0
        self._is_looking = False
        self._is_made = False
        self._problem = ""
        self._followed: list[Followed] = []
        self._waiting: list[Request] = []
        """To leave after a save, while one runs that is not to be the last."""
        self._told: set[str] = set()

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """When it looks next."""
        return (self._next_ms,)

    def look(self, now_ms: int) -> None:
        """Follow what is on its way, and have the directory looked at if it is time."""
        if self._followed:
            self._follow(self._view())
        if self._waiting and self._view().round is None:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._carry_out(request)
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + RESULT_MS
        if not self._is_looking:
            self._is_looking = True
            work = self._looking if self._is_made else self._begin
            self._lanes.post(LANE, "looking for requests", work, self._found, wakes=False)

    def heard(self, word: wire.Said) -> None:
        """Nothing that a rank says is for this watch."""

    # In the lane

    def _begin(self) -> Found:
        if self._launch.job.slurm is not None:
            places.remember(self._launch.env, places.Home(self._place.job, self._place.step_id, self._place.root))
        control_files.make_place(self._place.root, self._place.uid)
        control_files.tidy(self._place)
        return self._looking()

    def _looking(self) -> Found:
        return control_files.look(self._place)

    # In the loop

    def _found(self, found: Any) -> None:
        self._is_looking = False
        is_good = isinstance(found, Found)
        self._next_ms = time.monotonic_ns() // 1_000_000 + (LOOK_EVERY_MS if is_good else LOOK_LATER_MS)
        self._is_made = is_good  # Somebody may have tidied it up: then it is made again.
        if isinstance(found, Broken):
            self._is_off(found.error)
            return
        self._problem = ""
        for refused in found.refused:
            if refused.removed or refused.name not in self._told:
                self._told = {*self._told, refused.name} if len(self._told) < FOLLOWED_MAX else {refused.name}
                fields = {"file": refused.name, "reason": f"it {refused.reason}", "removed": refused.removed}
                self._log(Entry("control_refused", "warning", fields))
        for request in found.taken:
            self._obey(request)

    def _is_off(self, error: BaseException) -> None:
        problem = str(error) if isinstance(error, NotOurs | OSError) else f"{type(error).__name__}: {error}"
        if problem != self._problem:
            self._problem = problem
            self._log(Entry("control_off", "warning", {"reason": f"ckptctl save cannot reach this run: {problem}"}))

    def _obey(self, request: Request) -> None:
        fields = {"request": request.nonce, "what": request.what, "who": request.who, "from_host": request.host}
        more = {"protect": request.protect, "requeue": request.requeue, "every_ms": request.every_ms}
        self._log(Entry("control_asked", "info", {**fields, **more}))
        self._carry_out(request)

    def _carry_out(self, request: Request) -> None:
        state = self._view()
        refusal = why_not(state)
        if refusal:
            self._end(request, Answer(request.nonce, "refused", reason=refusal))
        elif request.what == "every":
            self._feed(ev.Asked("every", request.every_ms, who=request.who))
            self._end(request, Answer(request.nonce, "done"))
        elif request.what == "leave" and state.round is not None and len(self._waiting) < FOLLOWED_MAX:
            # Ranks train on after that one. The machine makes the next one the last, from its beginning.
            self._waiting.append(request)
            self._say(Answer(request.nonce, "taken", reason="a save is running; the one after it is the last"))
        else:
            self._save(request, state)

    def _save(self, request: Request, before: State) -> None:
        if request.what == "leave":
            self._feed(ev.Asked("leave_after_save", requeue=request.requeue, who=request.who))
        if self._view().round is None:
            self._feed(ev.SignalCame(SIGNAL, ev.Meaning.SAVE))
        after = self._view()
        number = began(before, after)
        if number is None:
            refusal = "no rank can save now: none has attached yet, or all have left their loops"
            self._end(request, Answer(request.nonce, "refused", reason=refusal))
            return
        running = before.round is not None and before.round.number == number
        reason = f"a save was running already (round {number}): it counts" if running else f"round {number} has begun"
        if len(self._followed) < FOLLOWED_MAX:
            self._followed.append(Followed(request, number))
        self._say(Answer(request.nonce, "taken", reason=reason))
        self._follow(after)

    def _follow(self, state: State) -> None:
        still: list[Followed] = []
        for one in self._followed:
            answer = outcome(one, state)
            if answer is None:
                still.append(one)
            elif answer.result == "saved" and one.request.protect:
                self._protect(one.request, answer)
            else:
                self._end(one.request, self._with_path(answer), was_told=True)
        self._followed = still

    def _protect(self, request: Request, answer: Answer) -> None:
        """As `ckptctl keep` does: the mark, and then a look whether the checkpoint is still there."""

        def marked(problem: Any) -> None:
            told = f"{problem.what}: {problem.error}" if isinstance(problem, Broken) else problem
            reason = f"it is saved, but could not be protected: {told}" if told else "it is protected from being pruned"
            self._end(request, self._with_path(with_reason(answer, reason)), was_told=True)

        work = lambda: store.set_kept(self._place.root, answer.step, True)  # noqa: E731
        self._lanes.post(LANE, "protecting a checkpoint", work, marked)

    def _with_path(self, answer: Answer) -> Answer:
        if answer.step < 0:
            return answer
        path = str(self._place.root / store.step_name(answer.step))
        return Answer(answer.nonce, answer.result, answer.step, path, answer.reason)

    def _end(self, request: Request, answer: Answer, was_told: bool = False) -> None:
        """The last word. `was_told`: the one who asked knows already that it was taken."""
        level = "warning" if answer.result == "refused" else "info"
        fields = {"request": request.nonce, "what": request.what, "result": answer.result, "step": answer.step}
        self._log(Entry("control_done", level, {**fields, "reason": answer.reason}))
        if request.waits or not was_told:
            self._say(answer)
        else:
            self._lanes.post(LANE, "closing a request", lambda: control_files.close(self._place.root, request.nonce), self._said)

    def _say(self, answer: Answer) -> None:
        self._lanes.post(LANE, "answering a request", lambda: control_files.answer(self._place.root, answer), self._said)

    def _said(self, problem: Any) -> None:
        if problem:
            told = problem.error if isinstance(problem, Broken) else problem
            self._is_off(OSError(f"the answer could not be written: {told}"))


def with_reason(answer: Answer, reason: str) -> Answer:
    """The same answer with another reason."""
    return Answer(answer.nonce, answer.result, answer.step, answer.path, reason)


def why_not(state: State) -> str:
    """Why nothing is obeyed in this state, "" if it is."""
    if state.notice is not None:
        return f"the job is on its way out already ({state.notice.cause.value}), and saves for that if there is time"
    if state.phase.value >= Phase.LEAVING.value:
        return "the job is on its way out already"
    if state.code is not None:
        return f"training has ended, with status {state.code}"
    return ""


def began(before: State, after: State) -> int | None:
    """The round that saves for a request; None if there is none. It may have been given up at once."""
    if after.round is not None:
        return after.round.number
    if after.given_up is not None and after.given_up is not before.given_up:
        return after.given_up.round.number
    return None


def outcome(one: Followed, state: State) -> Answer | None:
    """What has become of its round; None while it runs."""
    nonce, current = one.request.nonce, state.round
    if current is not None and current.number == one.round:
        one.step = one.step if current.at is None else current.at.n
        return Answer(nonce, "saved", _step(one, state)) if current.committed else None
    given_up = state.given_up
    if given_up is None or given_up.round.number != one.round:
        if state.committed_step >= _step(one, state) >= 0:
            return Answer(nonce, "saved", _step(one, state))
        return Answer(nonce, "refused", reason="the save did not come to its end; ckptctl log has the reason")
    if current is not None and _is_next_try(current, one):
        one.round = current.number
        return None
    return Answer(nonce, "refused", reason=f"the save was given up: {given_up.reason}")


def _step(one: Followed, state: State) -> int:
    return state.committed_step if one.step < 0 else one.step


def _is_next_try(current: Round, one: Followed) -> bool:
    return current.number > one.round and current.tries > 1
