"""The machine under arbitrary events in arbitrary order: lying ranks, odd looks, answers that nobody asked for.

The simulator plays an environment that is honest, however unlucky; this file plays one that says anything. What has to hold
then is little, and holds always: tests/stateful/core_laws.py. Honest answers are mixed in, or no run would come far.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import msgspec
from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile, Who
from ckpt_supervisor.core import between, machine, tasks
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.policy import NOT_LOOKED, Policy
from ckpt_supervisor.core.state import Asking, Phase
from ckpt_supervisor.core.views import JobView, NoView
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stateful.core_laws import Laws

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=80,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

STATES = ["RUNNING", "SIGNALING", "COMPLETING", "PENDING", "SUSPENDED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "?"]
REASONS = ["None", "TimeLimit", "NodeDown", "BeginTime", "JobLaunchFailure", "RaisedSignal:15", "NonZeroExitCode", ""]
HUGE = wire.NUMBER_MAX
UINT_MAX = 2**64 - 1

MORE_RESTARTS = [-1, 0, 0, 0, 1]
ROUNDS_OFF = [0, 0, 0, -1, 1, HUGE]
CODES = [0, 1, 77, 137]

pauses = st.one_of(st.just(0), st.integers(1, 60), st.integers(61, 3_000), st.integers(3_001, 700_000))

whos = st.builds(
    lambda rank, generation, other: Who(rank, generation, 100 + rank + 1_000 * generation + 10 * other),
    st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([0, 0, 0, 0, 1]),
)  # fmt: skip
steps = st.one_of(st.integers(0, 12), st.sampled_from([HUGE, HUGE - 1]))
positions = st.builds(Position, steps, st.sampled_from([0, 0, 0, 1, HUGE]))
files = st.lists(st.builds(SavedFile, st.sampled_from(["a", "b", "../c", ""]), st.integers(0, UINT_MAX), st.just("")), max_size=3)
instants = st.one_of(st.none(), st.integers(-100_000, 100_000), st.sampled_from([-(10**12), 3_600_000, 10**12]))

policies = st.builds(
    Policy,
    directory=st.just("/ckpt"),
    epoch=st.integers(1, 3),
    slurm=st.sampled_from([True, True, False]),
    can_look=st.sampled_from([True, True, True, False]),
    requeue=st.sampled_from(["auto", "auto", "auto", "never", "exit"]),
    requeue_exit=st.sampled_from([75, 85, 255]),
    start_restarts=st.integers(0, 2),
    kill_wait_ms=st.sampled_from([0, 6_000, 30_000, 30_000]),
    grace_ms=st.sampled_from([0, 1, 500, 30_000, 30_000]),
    every_steps=st.sampled_from([0, 1, 3]),
    every_ms=st.sampled_from([None, 1, 5_000]),
    save_timeout_ms=st.sampled_from([1, 5_000, 900_000, 900_000]),
    tasks=st.sampled_from([1, 1, 2, 3]),
    heir=st.sampled_from([0, 0, 0, 0, 0, 1, 3]),
    leave_timeout_ms=st.sampled_from([None, 0, 2_000]),
    lead_ms=st.sampled_from([None, 0, 30_000]),
    lead_auto=st.booleans(),
    notice_horizon_ms=st.sampled_from([0, 600_000]),
    verify_full=st.booleans(),
    adopts=st.sampled_from([False, False, False, True]),
    passes=st.sampled_from(["", "SIGTERM"]),
    restarts=st.sampled_from([0, 0, 1, 3]),
    resume_step=st.sampled_from([-1, NOT_LOOKED, 5]),
    resume_from=st.just(""),
).map(
    # Without Slurm there is one task and nothing to look at; an heir decides for one task, and starts nothing again.
    lambda policy: dataclasses.replace(
        policy,
        can_look=policy.slurm and policy.can_look,
        tasks=policy.tasks if policy.slurm and not policy.heir else 1,
        heir=policy.heir if policy.slurm else 0,
        restarts=0 if policy.heir else policy.restarts,
        passes=policy.passes if policy.adopts else "",
    )
)

depths = st.tuples(st.sampled_from(list(ev.Meaning)), st.integers(0, 12))


class Core(RuleBasedStateMachine):
    """Whatever is said, by whoever, whenever."""

    @initialize(policy=policies, world=st.integers(0, 3), deep=depths, now=st.integers(0, 10**9))
    def begin(self, policy: Policy, world: int, deep: tuple[ev.Meaning, int], now: int) -> None:
        """Start, and go so far in a round as it should be."""
        self.policy, self.now = policy, now
        self.state, commands = machine.start(policy, now)
        self.laws = Laws(policy, self.state, commands, now)
        self.attach(world)
        if deep[1]:
            self.feed(ev.SignalCame("SIGTERM", deep[0]), 5_000)
        for _ in range(deep[1]):
            self.honest(7, 20)

    @property
    def over(self) -> bool:
        """Whether the machine has said Exit."""
        return self.state.phase is Phase.DONE

    @precondition(lambda self: self.over)
    @rule(policy=policies, world=st.integers(0, 3), deep=depths)
    def begin_again(self, policy: Policy, world: int, deep: tuple[ev.Meaning, int]) -> None:
        """The next attempt."""
        self.begin(policy, world, deep, self.now)

    def feed(self, event: ev.Event, after_ms: int = 0) -> None:
        """One step, judged."""
        self.now += after_ms
        if hasattr(event, "who"):
            event = self.placed(event)
        before = self.state
        self.state, commands = machine.step(self.policy, before, event, self.now)
        self.laws.judge(self.policy, before, event, self.state, commands, self.now)

    def placed(self, event: ev.Event) -> ev.Event:
        """The same word, with the task put in whose supervisor it comes to."""
        who = event.who  # type: ignore[union-attr]
        who = msgspec.structs.replace(who, task=who.rank % self.policy.tasks)
        if isinstance(event, ev.RankGone):
            return dataclasses.replace(event, who=who)
        return msgspec.structs.replace(event, who=who)  # type: ignore[type-var]

    def number(self, off: int = 0) -> int:
        """A round's number, right if `off` is 0."""
        return max(0, self.state.newest_round + off)

    # --- liars --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(
        who=whos,
        world=st.sampled_from([1, 2, 2, 3, 1_000]),
        version=st.sampled_from([1, 1, 1, 1, 2, UINT_MAX]),
        sharded=st.booleans(),
        after=pauses,
    )
    def hello(self, who: Who, world: int, version: int, sharded: bool, after: int) -> None:
        """Somebody says Hello, perhaps again, perhaps of another generation, perhaps instead of somebody else."""
        self.feed(wire.Hello(who, version, max(world, who.rank + 1), 0, sharded), after)

    @rule(who=whos, off=st.sampled_from(ROUNDS_OFF), own=st.booleans(), ack=st.booleans(), at=positions, after=pauses)
    def somewhere(self, who: Who, off: int, own: bool, ack: bool, at: Position, after: int) -> None:
        """Somebody says where it is."""
        self.feed((wire.Ack if ack else wire.Arrived)(who, 0 if own else self.number(off), at), after)

    @precondition(lambda self: not self.over)
    @rule(
        who=whos,
        off=st.sampled_from([0, 0, 0, -1, 1]),
        kind=st.integers(0, 9),
        n=steps,
        wrote=files,
        save_ms=st.sampled_from([0, 50, UINT_MAX]),
        after=pauses,
    )
    def other_word(self, who: Who, off: int, kind: int, n: int, wrote: list[SavedFile], save_ms: int, after: int) -> None:
        """Somebody says that it has saved, before Go, twice, another step; or says something else."""
        number = self.number(off)
        current = self.state.round
        step = n if current is None or current.at is None or kind == 9 else current.at.n
        saved = wire.Saved(who, number, step, tuple(wrote), save_ms)
        words: list[wire.FromRank] = [
            wire.Saving(who, number),
            wire.Failed(who, number, "x" * 600),
            wire.Finished(who, number),
            wire.Left(who, number, again=False),
            wire.Left(who, number, again=True),
        ]
        self.feed(words[kind] if kind < len(words) else saved, after)

    # --- the supervisor's own eyes and hands: anything, asked for or not ------------------------------------------------------

    @rule(
        name=st.sampled_from(["SIGTERM", "SIGUSR1", "SIGHUP"]),
        meaning=st.sampled_from(list(ev.Meaning)),
        task=st.integers(0, 2),
        after=pauses,
    )
    def signal(self, name: str, meaning: ev.Meaning, task: int, after: int) -> None:
        """A signal of any meaning, to any task."""
        self.feed(ev.SignalCame(name, meaning, min(task, self.policy.tasks - 1)), after)

    @precondition(lambda self: self.policy.tasks > 1 and not self.over)
    @rule(
        task=st.sampled_from([1, 1, 2, 0, 7]),
        odd=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
        signals=st.dictionaries(st.sampled_from(["SIGTERM", "SIGUSR1"]), st.integers(1, 9), max_size=2),
        code=st.sampled_from([None, None, None, 0, 137]),
        gone=st.lists(whos, max_size=2),
        finished=st.lists(whos, max_size=2),
        after=pauses,
    )
    def report(
        self, task: int, odd: int, signals: dict[str, int], code: int | None, gone: list[Who], finished: list[Who], after: int
    ) -> None:
        """A task says where it stands, or one that cannot be it; also what it has said before, and less than that."""
        placed = tuple((msgspec.structs.replace(who, task=task), "x") for who in gone)
        word = ev.Report(
            task=task,
            version=between.VERSION + (odd == 1),
            epoch=self.policy.epoch + (odd == 2),
            host="a",
            pid=9 if odd == 3 else 8,
            signals=tuple((name, "LEAVE" if name == "SIGTERM" else "NOTICE", count) for name, count in signals.items()),
            restart=self.state.restarts - (task == 2),
            code=code,
            gone=placed,
            finished=tuple(msgspec.structs.replace(who, task=task) for who in finished),
            command=100,
        )
        for event in tasks.unfold(self.policy, self.state, word):
            self.feed(event, after)
            after = 0

    @precondition(lambda self: self.policy.tasks > 1 and not self.over)
    @rule(task=st.integers(0, 3), after=pauses)
    def cut(self, task: int, after: int) -> None:
        """A connection to another supervisor is closed, also one that nobody knows."""
        self.feed(ev.TaskCut(task), after)

    @precondition(lambda self: self.policy.tasks > 1 and self.state.phase is Phase.RUNNING)
    @rule(after=pauses)
    def all_report(self, after: int) -> None:
        """All tasks say where they stand."""
        for task in range(1, self.policy.tasks):
            self.feed(ev.Report(task, between.VERSION, self.policy.epoch, "a", 8), after)
            after = 0

    @precondition(lambda self: not self.over)
    @rule(
        state=st.sampled_from(STATES),
        reason=st.sampled_from(REASONS),
        more=st.sampled_from(MORE_RESTARTS),
        end=instants,
        preempt=instants,
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        after=pauses,
    )
    def odd_look(
        self,
        state: str,
        reason: str,
        more: int,
        end: int | None,
        preempt: int | None,
        flags: tuple[bool, bool, bool],
        after: int,
    ) -> None:
        """A look comes back with anything."""
        wall = 10**12 + self.now + after
        view = JobView(
            state=state,
            reason=reason,
            restarts=max(0, self.state.start_restarts + more),
            end_ms=None if end is None else wall + end,
            preempt_ms=None if preempt is None else wall + preempt,
            grace_ms=20_000 if flags[0] else None,
            requeue=flags[1],
            batch=flags[2],
            looked_ms=wall,
            time_limit_unlimited=end is None,
        )
        self.feed(ev.Looked(view, "arbitrary"), after)

    @precondition(lambda self: not self.over)
    @rule(
        off=st.sampled_from([0, 0, 0, -1, 1]),
        kind=st.integers(0, 5),
        good=st.booleans(),
        commit=st.sampled_from(list(ev.CommitResult)),
        requeue=st.sampled_from(list(ev.RequeueResult)),
        n=st.integers(0, 30),
        after=pauses,
    )
    def odd_answer(
        self, off: int, kind: int, good: bool, commit: ev.CommitResult, requeue: ev.RequeueResult, n: int, after: int
    ) -> None:
        """Something is over, well or not, that may not have been asked for."""
        current = self.state.round
        step = n if current is None or current.at is None else current.at.n
        events: list[ev.Event] = [
            ev.Verified(self.number(off), "full", "" if good else "truncated", 1, n % self.policy.tasks),
            ev.Committed(self.number(off), step, commit, ""),
            ev.Met(good, "x"),
            ev.RequeueReturned(requeue, "x"),
            ev.Looked(NoView("x", good), "arbitrary"),
            ev.Adopted((n,) if good else (), "" if good else "damaged", n % 2 == 0),
        ]
        self.feed(events[kind], after)

    @precondition(lambda self: not self.over)
    @rule(who=whos, rank=st.integers(0, 5), code=st.sampled_from(CODES), after=pauses)
    def lost(self, who: Who, rank: int, code: int, after: int) -> None:
        """A process has ended, known or not; sometimes it is the command's."""
        task = who.rank % self.policy.tasks
        self.feed(ev.CommandExited(code, task, who.pid) if rank == 0 else ev.RankGone(who, "x"), after)

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.state.notice is None)
    @rule(n=st.sampled_from([-1, 0, 9]), kill_wait_ms=st.sampled_from([0, 6_000, 90_000]))
    def chosen(self, n: int, kill_wait_ms: int) -> None:
        """The shell has chosen the checkpoint to resume from, and learned KillWait: when the command starts, or starts again."""
        path = "/ckpt/x" if n >= 0 else ""
        self.policy = dataclasses.replace(self.policy, resume_from=path, resume_step=n, kill_wait_ms=kill_wait_ms)
        self.state = machine.resumed(self.state, path, n)

    # --- honest ones --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.state.live and self.state.phase is Phase.RUNNING)
    @rule(world=st.integers(1, 3))
    def all_attach(self, world: int) -> None:
        """A whole world attaches, of a generation of its own."""
        self.attach(world)

    def attach(self, world: int) -> None:
        """So many ranks say Hello."""
        generation = self.state.generation + bool(self.state.ranks)
        for rank in range(world):
            self.feed(wire.Hello(Who(rank, generation, 100 + rank + 1_000 * generation), wire.VERSION, world, rank, False), 1)

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.policy.every_steps and self.state.live)
    @rule(n=st.integers(1, 30), after=pauses)
    def all_stop(self, n: int, after: int) -> None:
        """All stop by themselves at the same step."""
        self.feed(ev.Tick(), after)
        for rank in self.state.ranks:
            self.feed(wire.Arrived(rank.who, 0, Position(n, 0)), 1)

    @precondition(lambda self: not self.over and self.state.looking)
    @rule(preempted=st.booleans(), after=st.integers(20, 200))
    def plain_look(self, preempted: bool, after: int) -> None:
        """The look that was asked for comes back: running, or preempted with 20 s to go."""
        wall = 10**12 + self.now + after
        end, preempt = (wall + 20_000, wall) if preempted else (wall + 3_600_000, None)
        restarts = self.state.start_restarts
        self.feed(ev.Looked(JobView("RUNNING", "None", restarts, end, preempt, None, True, True, wall, False), "plain"), after)

    @precondition(lambda self: self.state.phase is Phase.REQUEUEING)
    @rule(kind=st.integers(0, 3), after=st.integers(20, 200))
    def decisive_look(self, kind: int, after: int) -> None:
        """A look at the end: in the grace, cancelled, requeued by somebody, not a batch job."""
        wall = 10**12 + self.now + after
        restarts = self.state.start_restarts
        view = [
            JobView("RUNNING", "None", restarts, wall + 9_000, wall, None, True, True, wall, False),
            JobView("COMPLETING", "None", restarts, wall, None, None, True, True, wall, False),
            JobView("PENDING", "BeginTime", restarts + 1, None, None, None, True, True, wall, False),
            JobView("RUNNING", "None", restarts, wall + 9_000, wall, None, True, False, wall, False),
        ][kind]
        self.feed(ev.Looked(view, "decisive"), after)

    @precondition(lambda self: self.state.phase.value in range(Phase.AGREEING.value, Phase.DONE.value))
    @rule(times=st.integers(1, 6), n=st.integers(0, 30), after=st.integers(0, 300), lie=st.sampled_from([False, False, True]))
    def next_parts(self, times: int, n: int, after: int, lie: bool) -> None:
        """Whoever is waited for does its part; perhaps somebody does not."""
        for _ in range(times):
            if lie:
                self.almost_honest(n)
            self.honest(n, after)

    @precondition(lambda self: self.state.phase is Phase.RUNNING and self.state.live)
    @rule(leave=st.booleans(), after=pauses)
    def asked(self, leave: bool, after: int) -> None:
        """A round is asked for."""
        self.feed(ev.SignalCame("SIGTERM", ev.Meaning.LEAVE if leave else ev.Meaning.SAVE), after)

    def honest(self, n: int, after: int) -> None:
        """The next thing that happens when all goes well."""
        current, requeue, phase = self.state.round, self.state.requeue, self.state.phase
        self.feed(ev.Tick(), after)
        if current is not None and phase in (Phase.AGREEING, Phase.SAVING):
            for member in current.members:
                if current.at is None:
                    self.feed(wire.Ack(member.who, current.number, Position(n, 0)))
                elif not current.go:
                    self.feed(wire.Arrived(member.who, current.number, current.at))
                else:
                    self.feed(wire.Saved(member.who, current.number, current.at.n, (), 7))
        elif current is not None and current.at is not None:
            if phase is Phase.VERIFYING:
                for task in sorted(current.unverified):
                    self.feed(ev.Verified(current.number, "full", "", 1, task))
                return
            committed = ev.Committed(current.number, current.at.n, ev.CommitResult.COMMITTED, "")
            self.feed(committed)
        elif phase is Phase.LEAVING:
            for rank in self.state.live:
                self.feed(wire.Left(rank.who, 1, again=False), 1)
        elif self.state.looking:
            wall = 10**12 + self.now
            view = JobView("RUNNING", "None", self.state.start_restarts, wall + 9_000, wall, None, True, True, wall, False)
            self.feed(ev.Looked(view, "preempted"))
        elif requeue is not None:
            met, accepted = ev.Met(True, ""), ev.RequeueReturned(ev.RequeueResult.ACCEPTED, "")
            self.feed(accepted if requeue.asking is Asking.CALLING else met)

    def almost_honest(self, n: int) -> None:
        """What could be taken for the next thing, and must not."""
        current, phase = self.state.round, self.state.phase
        if current is None:
            return
        first = next((member.who for member in current.members), Who(0, 0, 100))
        if phase is Phase.AGREEING:
            world = self.state.world_size
            self.feed(wire.Ack(first, current.number, Position(n + 5, 0)))
            self.feed(wire.Hello(Who(world, first.generation, 500 + world), wire.VERSION, world + 1 + n % 2, 0, False))
        elif phase is Phase.SAVING and current.at is not None:
            self.feed(wire.Saved(first, current.number, current.at.n + 1 if current.go else current.at.n, (), 7))
        elif phase is Phase.VERIFYING:
            self.feed(ev.Verified(current.number - 1, "full", "", 1))
        elif phase is Phase.COMMITTING and n % 2:
            deadline_ms = machine.next_deadline(self.policy, self.state)
            self.feed(ev.Tick(), 0 if deadline_ms is None else max(0, deadline_ms - self.now))

    # --- time ---------------------------------------------------------------------------------------------------------------

    @rule(after=pauses)
    def tick(self, after: int) -> None:
        """Time has passed, a little or far too much."""
        self.feed(ev.Tick(), after)

    @precondition(lambda self: machine.next_deadline(self.policy, self.state) is not None)
    @rule(times=st.integers(1, 4))
    def ticks(self, times: int) -> None:
        """The shell wakes up at each deadline."""
        for _ in range(times):
            deadline_ms = machine.next_deadline(self.policy, self.state)
            if deadline_ms is not None:
                self.feed(ev.Tick(), max(0, deadline_ms - self.now))

    @invariant()
    def the_next_tick_makes_progress(self) -> None:
        """A deadline at which nothing happens would keep the loop spinning, or hang it."""
        self.laws.check_deadline(self.policy, self.state, self.now)


TestCore = Core.TestCase
TestCore.settings = SETTINGS
