"""What must hold of the command's end: nobody is killed before it was asked, nor asked before it was told, and its status counts.

Judges by what the simulated processes did, never by what the machine believes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.options import LINK, NET

if TYPE_CHECKING:
    from tests.sim.checks import Checks
    from tests.sim.trainer import Process

TIME_MS = 1_000
"""Whoever had so long between Leave and the kill had the time to be asked."""

LEAVE_MS = 150
"""A rank that is told to leave has at least that before it is asked by a signal."""

MOVED_MS = 700
"""A kill that has come nearer so shortly before left no time."""

WOKE_MS = 10_000
STOPS = ("stopped_task", "stopped_coordinator", "dead_task", "dead_coordinator", "stop")


class EndChecks:
    """Of one machine."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.world = checks.world
        self.left_ms: int | None = None
        """When its way out began."""
        self.said_leave_ms: int | None = None
        self.could_leave: frozenset[Any] = frozenset()
        """Who was there when it began: who attaches only then is too late."""
        self.asked = 0
        self.moved_ms = 0
        self.was_over = False
        """The command had ended with 0 when the notice came, and nothing else was under way."""
        self.interrupts = 0

    def step(self, before: Any, after: Any, commands: tuple[Any, ...]) -> None:
        """After every step, before its commands are looked at one by one."""
        now = self.world.now
        if after.leaving is not None and self.left_ms is None:
            self.left_ms = now
            self.could_leave = frozenset(rank.who for rank in after.live)
        if any(type(getattr(command, "word", None)).__name__ == "Leave" for command in commands):
            self.said_leave_ms = now if self.said_leave_ms is None else self.said_leave_ms
        if before.notice is None and after.notice is not None and before.phase.name == "RUNNING":
            self.was_over = before.code == 0
        if after.notice is not None and (before.notice is None or before.notice.kill_at_ms > after.notice.kill_at_ms):
            self.moved_ms = now
        if after.notice is not None:
            self.interrupts = after.notice.interrupts

    def command(self, name: str, after: Any) -> None:
        """The command is asked to end, or is ended."""
        now, leaving = self.world.now, after.leaving
        if name == "AskCommand":
            self.asked += 1
            if leaving is None or leaving.own_end or leaving.passed or self.asked > 1 or self._was_asked():
                self.checks.broken("asked", "the command is asked to end, and is not to be")
            hears = any(rank.who in self.could_leave for rank in after.live)
            if hears and (self.said_leave_ms is None or now - self.said_leave_ms < LEAVE_MS):
                self.checks.broken("asked", f"{len(after.live)} ranks are asked before they could leave as they were told")
            return
        if leaving is None or self.left_ms is None or self._was_asked() or leaving.own_end or self.interrupts > 1:
            return
        woke_ms = self.checks.machine.shell.woke_ms
        if now - self.left_ms >= TIME_MS and now - self.moved_ms > MOVED_MS and woke_ms < self.left_ms:
            self.checks.broken("asked", f"the command is killed after {now - self.left_ms} ms, and was never asked to end")

    def _was_asked(self) -> bool:
        """Whether its command has been sent SIGTERM: by itself, or by the relay that it was before."""
        command = self.checks.machine.shell.command
        return command is not None and command.asked_ms is not None

    # --- its status -------------------------------------------------------------------------------------------------------

    def interrupted(self, code: int) -> None:
        """The supervisor leaves with a notice in force: not for a run that was over before it, and had not failed."""
        if self.was_over and self.world.options.tasks == 1 and not any(process.raised for process in self._last_ones()):
            self.checks.broken("status", f"exit {code}, although the command had ended with 0 before the notice came")

    def codes(self, codes: set[int | None]) -> set[int | None]:
        """The statuses that may come of these of the commands: 1 where all are 0 and a rank has raised behind them."""
        if codes - {0, None}:
            return codes
        options = self.world.options
        unsure = self.world.last_word_lost or options.loss_percent or options.link_loss_percent
        unsure = unsure or any(options.has(fault) for fault in (*NET, *LINK, *STOPS))
        ranks = self._last_ones()
        unsure = unsure or any(process.protocol is None for process in ranks)
        if unsure:
            return codes | {0, 1}
        failed = [process for process in ranks if process.raised]
        return {1} if failed else codes

    def _last_ones(self) -> list[Process]:
        """The last process of each rank that attached, of the newest workers."""
        machine, world = self.checks.machine, self.world
        shells = world.shells if self.checks.of is None else [machine.shell]
        last: dict[tuple[int, int], Process] = {}
        for (task, pid), process in sorted(world.processes.items()):
            of_now = process.command.shell in shells and process.command is process.command.shell.command
            if of_now and process.who.generation == machine.state.generation and (task, pid) in world.checks.hello:
                last[task, process.rank] = process
        return [process for process in last.values() if process.who.pid != process.command.pid]
