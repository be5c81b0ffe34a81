"""The simulated Slurm: one job, its controller and what `scontrol` says about it (docs/slurm.md, sections 1 to 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.shell import Machine
    from tests.sim.world import World

WALL_MS = 1_700_000_000_000
"""Wall clock at the simulated start."""

LOOK_LIMIT_MS = 12_000
REQUEUE_LIMIT_MS = 15_000
"""The shell's bounds on scontrol."""

TERM_AFTER_REQUEUE_MS = 40

SKEW_MS = 1_500
"""One broadcast reaches the tasks this far apart at most."""


class Slurm:
    """The job's state and the controller's manners."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.options = world.options
        self.state = "RUNNING"
        self.reason = "None"
        self.restarts = world.options.start_restarts
        self.end_ms = world.options.end_ms
        self.preempt_ms: int | None = None
        self.grace_ms: int | None = None
        self.cancelled_ms: int | None = None
        self.kill_ms: int | None = None
        self.requeue_flag = not world.options.has("refused")
        self.batch = not world.options.has("no_batch")
        self.accepted = 0
        self.signals = 0
        """How many were sent to the step."""
        self.term_due_ms: int | None = None
        """When the SIGTERM of a requeue of ours comes; None if the job was on its way out already."""
        self.answered = False
        self.trouble = world.options.has("cannot_look")
        """Slurm has been slow or silent: whoever stays because the requeue is not known is right to stay."""
        self.failed = False
        """A look has failed."""
        self.denied = False
        """A look has said that there is no such job."""
        self.away_from_ms = self.away_until_ms = -1
        if world.options.has("away") or world.options.has("frozen"):
            self.away_from_ms = world.options.story_ms + world.rng.randrange(-2_000, 4_000)
            self.away_until_ms = self.away_from_ms + world.rng.choice((3_000, 18_000, 40_000))

    @property
    def away(self) -> bool:
        """Nobody answers now."""
        return self.away_from_ms <= self.world.now < self.away_until_ms

    @property
    def requeued(self) -> bool:
        """The job comes back."""
        return self.restarts > self.options.start_restarts

    # --- looks --------------------------------------------------------------------------------------------------------

    def look(self, why: str, shell: Machine) -> None:
        """LookUp: answered once, within the shell's bound."""
        options, rng, world = self.options, self.world.rng, self.world
        took_ms = rng.choice((22, 44, 44, 114))
        if options.has("look_slow") and rng.random() < 0.5:
            took_ms = rng.choice((1_000, 6_000))
            self.trouble = True
        if self.away:
            self.trouble = True
            world.at(rng.choice((9_000, LOOK_LIMIT_MS)), self._no_view, (why, False, shell))
        elif options.has("look_fails") and rng.random() < 0.5:
            self.trouble = True
            world.at(rng.choice((20, 5_000)), self._no_view, (why, rng.random() < 0.1, shell))
        else:
            world.at(rng.randrange(1, took_ms), self._snapshot, (why, took_ms, shell))

    def _no_view(self, arguments: tuple[str, bool, Machine]) -> None:
        why, definite, shell = arguments
        self.failed = True
        self.denied = self.denied or definite
        shell.looked(self.world.code.core.views.NoView("cannot be reached", definite), why, self.world.now)

    def _snapshot(self, arguments: tuple[str, int, Machine]) -> None:
        why, took_ms, shell = arguments
        view = self.view()
        self.world.at(max(0, took_ms // 2), self._deliver, (view, why, self.world.now, shell))

    def _deliver(self, arguments: tuple[dict[str, Any], str, int, Machine]) -> None:
        fields, why, seen_ms, shell = arguments
        view = self.world.code.core.views.JobView(**fields, looked_ms=WALL_MS + self.world.now)
        shell.looked(view, why, seen_ms)

    def view(self) -> dict[str, Any]:
        """What `scontrol show job` prints now. Instants are whole seconds."""
        return {
            "state": self.state,
            "reason": self.reason,
            "restarts": self.restarts,
            "end_ms": _wall(self.end_ms),
            "preempt_ms": _wall(self.preempt_ms),
            "grace_ms": self.grace_ms if self.preempt_ms is not None and self.end_ms is None else None,
            "requeue": self.requeue_flag,
            "batch": self.batch,
            "time_limit_unlimited": self.options.end_ms is None,
        }

    # --- what happens to the job ------------------------------------------------------------------------------------------

    def signal(self, name: str, delay_ms: int = 0, everybody: bool = False) -> None:
        """A signal to the step: to all tasks, a little apart, or to one of them where a person signals a process."""
        options, rng, shells = self.options, self.world.rng, self.world.shells
        if len(shells) == 1:
            self.signals += 1
            self.world.at(delay_ms + rng.randrange(3), shells[0].signal, name)
            return
        self.signals += 1
        if options.has("one_signal") and not everybody:
            shells = [rng.choice(shells)]
        for shell in shells:
            skew_ms = rng.choice((3, 60, SKEW_MS)) if options.has("skew") else 3
            self.world.at(delay_ms + rng.randrange(skew_ms), shell.signal, name)

    def change(self, **fields: Any) -> None:
        """A change of the job's record; looks may see it up to 60 ms later than the signal."""
        lag_ms = self.world.rng.randrange(60) if self.options.has("look_early") else 0
        if lag_ms:
            self.world.at(lag_ms, self._change, fields)
        else:
            self._change(fields)

    def _change(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def terminate(self, times: int = 1, delay_ms: int = 0) -> None:
        """SIGTERM now, SIGKILL after KillWait."""
        for _ in range(times):
            self.signal("SIGTERM", delay_ms, everybody=True)
        skew_ms = SKEW_MS if self.options.has("skew") else 0  # Counted from when the last task has its signal.
        self.kill_in(delay_ms + self.options.kill_wait_ms + skew_ms)

    def kill_in(self, delay_ms: int) -> None:
        """SIGKILL of the step then, unless one comes earlier."""
        at_ms = self.world.now + delay_ms
        if self.kill_ms is None or at_ms < self.kill_ms:
            self.kill_ms = at_ms
            for shell in self.world.shells:
                self.world.at(delay_ms, shell.kill, None)

    def put_back(self, delay_ms: int, terms: int = 1) -> None:
        """The job is requeued, by whomever."""
        first = self.kill_ms is None
        fields = {
            "state": "COMPLETING",
            "reason": self.world.rng.choice(("None", "BeginTime")),
            "preempt_ms": None,
            "end_ms": None,
        }
        self.restarts += 1
        self._change(fields)
        if first:
            self.terminate(terms, delay_ms)
            self.term_due_ms = self.world.now + delay_ms

    # --- scontrol requeue ---------------------------------------------------------------------------------------------------

    def requeue(self, shell: Machine) -> None:
        """CallRequeue: answered once, within the shell's bound."""
        options, rng, world = self.options, self.world.rng, self.world
        took_ms = rng.choice((20, 60, 200))
        if self.away:
            self.trouble = True
            if options.has("frozen"):
                world.at(self.away_until_ms - world.now + rng.randrange(50), self._execute, None)
            world.at(rng.choice((300, 9_000, REQUEUE_LIMIT_MS)), self._answer, ("UNKNOWN", shell))
        elif options.has("requeue_hangs") and rng.random() < 0.6:
            self.trouble = True
            if rng.random() < 0.5:
                world.at(rng.randrange(1, 20_000), self._execute, None)
            world.at(REQUEUE_LIMIT_MS, self._answer, ("UNKNOWN", shell))
        elif options.has("requeue_lost") and rng.random() < 0.6:
            self.trouble = True
            world.at(took_ms // 2, self._execute, None)
            world.at(rng.choice((took_ms, REQUEUE_LIMIT_MS)), self._answer, ("UNKNOWN", shell))
        elif options.has("requeue_fails") and rng.random() < 0.6:
            self.trouble = True
            world.at(took_ms, self._answer, ("UNKNOWN", shell))
        else:
            world.at(took_ms // 2, self._execute_and_answer, (took_ms - took_ms // 2, shell))

    def _execute_and_answer(self, arguments: tuple[int, Machine]) -> None:
        delay_ms, shell = arguments
        self.world.at(delay_ms, self._answer, (self._execute(None), shell))

    def _execute(self, _: None) -> str:
        if self.world.over:
            return "UNKNOWN"
        if self.requeued:
            return "PENDING"
        if not self.requeue_flag or not self.batch:
            return "REFUSED"
        self.accepted += 1
        self.world.checks.requeue_accepted()
        delay_ms = TERM_AFTER_REQUEUE_MS
        if self.options.has("late_term"):
            delay_ms = self.world.rng.choice((1_500, 5_000))
        self.put_back(delay_ms)
        return "ACCEPTED"

    def _answer(self, arguments: tuple[str, Machine]) -> None:
        result, shell = arguments
        self.answered = self.answered or result in ("ACCEPTED", "PENDING")
        shell.requeue_returned(result)


def _wall(ms: int | None) -> int | None:
    return None if ms is None else (WALL_MS + ms) // 1_000 * 1_000
