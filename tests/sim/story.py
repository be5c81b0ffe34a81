"""What happens to the job in one run: the drawn story, and the drawn accidents around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim import outside
from tests.sim.options import LOCAL

if TYPE_CHECKING:
    from tests.sim.world import World

LOCAL_GRACE_MS = 30_000


class Story:
    """Schedules everything that comes from outside."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slurm = world.slurm
        self.options = world.options
        options, rng = world.options, world.rng
        when_ms = rng.randrange(options.start_ms + 20) if options.has("early_notice") else options.story_ms
        world.at(when_ms, self._tell, options.story)
        if options.end_ms is not None and options.story not in LOCAL:
            world.at(options.end_ms, self._limit, None)
        for fault, call in (
            ("storm", self._storm),
            ("then_scancel", self._scancel),
            ("then_requeue", self._somebody_requeues),
            ("then_usr1", self._usr1),
            ("then_save", self._usr2),
        ):
            if options.has(fault) and options.story not in LOCAL:
                world.at(when_ms + rng.choice((1, 30, 400, 3_000, 8_000)) + rng.randrange(500), call, None)
        if options.has("exits"):
            world.at(rng.randrange(options.story_ms + 5_000), self._exits, rng.choice((0, 1, 77, 139)))
        for fault in ("crash", "stop", "hang"):
            if options.has(fault):
                world.at(rng.randrange(options.story_ms + 3_000), self._hurt, (fault, rng.choice((2_000, 20_000, 90_000))))
        if options.tasks > 1:
            self._hurt_tasks()
        outside.schedule(world)

    def _tell(self, story: str) -> None:
        slurm, options, now = self.slurm, self.options, self.world.now
        match story:
            case "preempt" | "preempt_usr1" | "preempt_cancel":
                end_ms = now + options.grace_ms
                ahead = slurm.end_ms
                if ahead is None and self.world.rng.random() < 0.5:
                    slurm.change(preempt_ms=now, grace_ms=options.grace_ms)  # TimeLimit=UNLIMITED: EndTime stays Unknown.
                else:
                    slurm.change(preempt_ms=now, end_ms=end_ms if ahead is None else min(ahead, end_ms))
                slurm.signal("SIGUSR1" if story == "preempt_usr1" else "SIGTERM", everybody=True)
                self.world.at(options.grace_ms + self.world.rng.randrange(3_000), self._grace_is_over, story)
            case "preempt0" | "requeued" | "node_failure":
                slurm.put_back(0)
            case "warning" | "rehearse":
                slurm.signal("SIGUSR1")
            case "scancel":
                self._scancel(None)
            case "save":
                slurm.signal("SIGUSR2")
            case "step_limit":
                slurm.terminate()
            case "term":
                slurm.signal("SIGTERM")
            case "local_term" | "local_int":
                slurm.signal("SIGTERM" if story == "local_term" else "SIGINT")
                slurm.kill_in(LOCAL_GRACE_MS)
            case "limit" | "watch" | "none":
                pass

    def _grace_is_over(self, story: str) -> None:
        slurm = self.slurm
        if slurm.away:
            self.world.at(slurm.away_until_ms - self.world.now + 1, self._grace_is_over, story)
        elif slurm.state == "RUNNING" and slurm.preempt_ms is not None:
            if story == "preempt_cancel" or not slurm.requeue_flag:
                slurm.change(state="COMPLETING", preempt_ms=self.world.now, end_ms=self.world.now)
                slurm.terminate()
            else:
                slurm.put_back(0, terms=2)

    def _limit(self, _: None) -> None:
        slurm = self.slurm
        if slurm.away:
            self.world.at(slurm.away_until_ms - self.world.now + 1, self._limit, None)
        elif slurm.state == "RUNNING" and slurm.preempt_ms is None:
            slurm.change(state="COMPLETING", reason="TimeLimit", end_ms=self.world.now)
            slurm.terminate(times=2)

    def _scancel(self, _: None) -> None:
        slurm = self.slurm
        if slurm.away:
            return  # The person gets an error.
        if not slurm.requeued and slurm.state == "RUNNING":
            slurm.change(state="COMPLETING", end_ms=self.world.now, cancelled_ms=self.world.now)
            slurm.terminate()

    def _somebody_requeues(self, _: None) -> None:
        slurm = self.slurm
        if slurm.state == "RUNNING" and not slurm.away and slurm.requeue_flag and slurm.batch:
            slurm.put_back(40)

    def _storm(self, _: None) -> None:
        for name in ("SIGTERM", "SIGTERM", "SIGUSR1", "SIGUSR2"):
            self.slurm.signal(name, self.world.rng.randrange(2_000))

    def _usr1(self, _: None) -> None:
        self.slurm.signal("SIGUSR1")

    def _usr2(self, _: None) -> None:
        self.slurm.signal("SIGUSR2")

    def _exits(self, code: int) -> None:
        self.world.one_of(self.world.commands).fail(code)

    def _hurt(self, arguments: tuple[str, int]) -> None:
        fault, for_ms = arguments
        alive = [process for process in self.world.ranks() if process.alive]
        if not alive:
            return
        process = self.world.rng.choice(alive)
        self.world.trace(f"r{process.rank}: {fault}")
        if fault == "crash":
            process.command.crash(process, 137)
        elif fault == "hang":
            process.hung = True
        else:
            process.freeze(True)
            self.world.at(for_ms, process.freeze, False)

    # --- supervisors ------------------------------------------------------------------------------------------------------

    def _hurt_tasks(self) -> None:
        """What happens to supervisors of a step that has several."""
        world, options, rng = self.world, self.options, self.world.rng
        last = options.tasks - 1
        for fault, number in (("dead_task", rng.randrange(1, last + 1)), ("dead_coordinator", 0)):
            if options.has(fault):
                world.at(self._some_time_ms(), self._dies, number)
        for fault, number in (("stopped_task", rng.randrange(1, last + 1)), ("stopped_coordinator", 0)):
            if options.has(fault):
                world.at(self._some_time_ms(), self._stops, (number, rng.randrange(1_000, 20_000)))
        if options.has("old_stand"):
            for _ in range(3):
                world.at(self._some_time_ms(), self._old_stand, rng.randrange(1, last + 1))

    def _some_time_ms(self) -> int:
        """Some time, most of them around the notice."""
        story_ms, rng = self.options.story_ms, self.world.rng
        return (
            rng.randrange(story_ms + 6_000)
            if rng.random() < 0.4
            else story_ms + rng.choice((30, 200, 1_000, 4_000)) * rng.randrange(1, 4)
        )

    def _dies(self, number: int) -> None:
        shell = self.world.shells[number]
        if shell.over:
            return
        self.world.trace(f"task {number}: its supervisor is killed")
        shell.die()
        if self.options.has("step_ends") and not self.slurm.requeued:
            self.slurm.terminate(delay_ms=self.world.rng.choice((20, 2_000)))

    def _stops(self, arguments: tuple[int, int]) -> None:
        number, for_ms = arguments
        shell = self.world.shells[number]
        if not shell.over and not shell.stopped:
            self.world.trace(f"task {number}: its supervisor is stopped for {for_ms} ms")
            shell.freeze(True)
            self.world.at(for_ms, shell.freeze, False)

    def _old_stand(self, number: int) -> None:
        """A word of a coordinator that is over: of the attempt before this one."""
        core = self.world.code.core
        old = core.between.Stand(7, restart=self.world.rng.choice((0, 5)), end="over", code=self.world.rng.choice((None, 9)))
        relay = self.world.shells[number]
        if not relay.over:
            relay.hear_coordinator(core.between.encode(old))
