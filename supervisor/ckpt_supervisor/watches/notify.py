"""Tells the user's own command what happens to the run: --on-event, with the journal's line on its standard input.

Owns which lines are told, the order, and the bounds. Must not hold anything up: the command runs in a lane of its own, one at a
time, 10 s each, and what comes while many wait is dropped and counted. Once the run's end is decided there are 5 s more for all
that waits, the last 1.5 s of it for the end itself, and never past the time at which the supervisor has to be out.

Only task 0's supervisor has it: it knows of all tasks, and one message is enough.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import ClassVar

from ckpt_client import wire

from ckpt_supervisor.adapters.journal import Stamp
from ckpt_supervisor.adapters.lanes import Broken, Lanes
from ckpt_supervisor.adapters.slurm import SHIELDED
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.state import Kind, State
from ckpt_supervisor.event_names import TOLD
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.lines import Lines
from ckpt_supervisor.processes import shell_command
from ckpt_supervisor.processes.resubmit import environment

LANE = "notify"
TIMEOUT_S = 10.0
WAITING_MAX = 16
"""So many may wait, with the one that runs; later ones are dropped."""

END_MS = 5_000
"""Once the end is decided. A notice tells five things within a second, and a Python or a curl for each takes 0.2 s to 0.5 s on a
busy node: that much is worth a node's time. A command that hangs costs it once."""

KILL_MS = 500
"""The supervisor waits for its lane so much longer: what has not been killed when the supervisor is gone lives on."""

OWN_MS = 1_500
"""The last of that time, at most half of it, is kept for the end itself."""

LAST = frozenset({"exit", "refused"})
"""After these the supervisor ends."""

NO_TIME = "no time was left"
TOO_MANY = f"{WAITING_MAX} were waiting"


class Notify:
    """The watch. `view`: the machine's state."""

    lanes_at_end: ClassVar = {LANE: END_MS + KILL_MS}

    def __init__(self, launch: Launch, lanes: Lanes, lines: Lines, view: Callable[[], State]) -> None:
        options = launch.options
        self._lanes = lanes
        self._lines = lines
        self._view = view
        self._chosen = frozenset(options.on_event_for)
        self._base = environment(launch.env, str(options.dir), launch.job.name, "")
        blocked = shell_command.signals(SHIELDED, options.notice_signals, options.save_signals)
        self._way = shell_command.Way(options.on_event, self._base, launch.claims, blocked)
        self._waiting = 0
        self._last_round = 0
        """The number of a save before leaving."""
        self._dropped: collections.Counter[str] = collections.Counter()
        """By event, since that was told last."""
        self._has_said = False
        self._end_s: float | None = None
        """On the monotonic clock, once the end is decided; read by the lane."""
        self._other_end_s: float | None = None
        """The same for what is not the end itself."""
        lines.listen(self.told)

    @property
    def times_ms(self) -> tuple[int | None, ...]:
        """Never: what comes of a command can wait until the loop wakes for something else."""
        return ()

    def look(self, now_ms: int) -> None:
        """Nothing is looked at."""

    def heard(self, word: wire.Said) -> None:
        """What ranks say comes as lines."""

    def told(self, entry: Entry, at: Stamp) -> None:
        """Hear a line of the journal, and have the command told if it is one of those that were asked for."""
        self._follow(entry)
        if entry.event in LAST:
            self._bound()
            self._tell_dropped(TOO_MANY)
        if not self._wants(entry):
            return
        if self._waiting >= WAITING_MAX and entry.event not in LAST:
            self._drop(entry.event, TOO_MANY)
            return
        self._tell_dropped(TOO_MANY)
        event, line = entry.event, self._lines.text(entry, at)
        way = self._way._replace(env={**self._base, "CKPT_SUPERVISE_REASON": event, "CKPT_SUPERVISE_EVENT": event})

        def run() -> str | None:
            give_up = self._give_up(event in LAST)
            return shell_command.run(way, give_up, line).problem if time.monotonic() < give_up() else None

        def over(problem: str | Broken | None) -> None:
            self._waiting -= 1
            if problem is None:
                self._drop(event, NO_TIME)
            elif problem:
                self._failed(event, f"{problem.what}: {problem.error}" if isinstance(problem, Broken) else problem)

        self._waiting += 1
        self._lanes.post(LANE, "--on-event", run, over, wakes=False)

    # --- which ----------------------------------------------------------------------------------------------------------

    def _follow(self, entry: Entry) -> None:
        """Which save is a last one."""
        if entry.event in ("round_begun", "round_turned"):
            number = entry.fields["round"]
            if entry.fields["kind"] == Kind.LEAVE.value:
                self._last_round = number
            elif self._last_round == number:
                self._last_round = 0

    def _wants(self, entry: Entry) -> bool:
        if entry.event.startswith("event_command_"):
            return False  # It would tell of itself for ever.
        if self._chosen:
            return entry.event in self._chosen
        if entry.event == "command_exited":
            return entry.level != "info"
        if entry.event == "commit":
            return bool(entry.fields["round"] == self._last_round)
        if entry.event == "stalled":
            return "of_task" in entry.fields  # Of a hang of this task's own ranks `hang_suspected` tells, and more.
        return entry.event in TOLD

    # --- bounds ---------------------------------------------------------------------------------------------------------

    def _bound(self) -> None:
        """The end is decided: from here on there is little time."""
        now_ms = time.monotonic_ns() // 1_000_000
        notice = self._view().notice
        left_ms = END_MS if notice is None else max(0, min(END_MS, notice.budget.out_by_ms - KILL_MS - now_ms))
        self._other_end_s = (now_ms + left_ms - min(OWN_MS, left_ms // 2)) / 1_000
        self._end_s = (now_ms + left_ms) / 1_000

    def _give_up(self, is_last: bool) -> Callable[[], float]:
        began = time.monotonic()

        def until() -> float:
            end = self._end_s if is_last else self._other_end_s
            return began + TIMEOUT_S if end is None else min(began + TIMEOUT_S, end)

        return until

    # --- what went wrong ------------------------------------------------------------------------------------------------

    def _failed(self, event: str, reason: str) -> None:
        self._lines.log(Entry("event_command_failed", "warning", {"of_event": event, "reason": reason}))
        if not self._has_said:
            self._has_said = True
            say(f"the command of --on-event has failed at {event}: {reason} (told once; all are in the journal)")

    def _drop(self, event: str, why: str) -> None:
        is_first = not self._dropped
        self._dropped[event] += 1
        if is_first:
            self._tell_dropped(why)
            self._dropped[event] = 0  # Told; the key stays, so that the rest of this burst is told together.

    def _tell_dropped(self, why: str) -> None:
        events = {event: count for event, count in sorted(self._dropped.items()) if count}
        self._dropped.clear()
        if events:
            fields = {"events": events, "dropped": sum(events.values()), "reason": why}
            self._lines.log(Entry("event_command_dropped", "warning", fields))
