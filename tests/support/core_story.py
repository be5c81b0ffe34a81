"""The real machine, fed by hand, for tests of what it decides.

Owns a clock that moves only when told, and keeps every command. Must not decide anything itself: what Slurm, a rank or the
disk says is said by the test.
"""

from __future__ import annotations

from typing import TypeVar

from ckpt_client import wire
from ckpt_client.wire import Position, SavedFile, Who
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.policy import Policy
from ckpt_supervisor.core.state import Notice, Phase, Round
from ckpt_supervisor.core.views import JobView, NoView

LOCAL = Policy(directory="/ckpt", epoch=4)
IN_SLURM = Policy(directory="/ckpt", epoch=4, slurm=True, can_look=True, lead_ms=None)
"""Without the end-time watch, so that a test without a notice has nothing to wait for."""

WALL_MS = 1_800_000_000_000
"""The wall clock when the machine's own clock stands at 0: the two must never be mixed up."""

FILE = SavedFile("state.pt", 1_000, "ab")
ENDS_IN_MS = 3_600_000

C = TypeVar("C")


def who(rank: int, generation: int = 0, pid: int | None = None, task: int = 0) -> Who:
    """Rank 0 is process 100, and so on; 1000 more for each generation."""
    return Who(rank, generation, 100 + rank + 1_000 * generation if pid is None else pid, task)


def view(
    now_ms: int,
    state: str = "RUNNING",
    reason: str = "None",
    *,
    restarts: int = 0,
    end_in_ms: int | None = ENDS_IN_MS,
    preempted_in_ms: int | None = None,
    grace_ms: int | None = None,
    requeue: bool = True,
    batch: bool = True,
) -> JobView:
    """What Slurm says of the job at this moment of the machine's clock; instants are given from then on."""
    looked_ms = WALL_MS + now_ms
    return JobView(
        state=state,
        reason=reason,
        restarts=restarts,
        end_ms=None if end_in_ms is None else looked_ms + end_in_ms,
        preempt_ms=None if preempted_in_ms is None else looked_ms + preempted_in_ms,
        grace_ms=grace_ms,
        requeue=requeue,
        batch=batch,
        looked_ms=looked_ms,
        time_limit_unlimited=end_in_ms is None,
    )


class Story:
    """One run of the machine."""

    def __init__(self, policy: Policy, ranks: int = 0, *, started: bool = True) -> None:
        """`ranks` of them attach at once. `started`: the look at the start has come back, and found the job running."""
        self.policy = policy
        self.now = 1_000
        self.state, self.commands = machine.start(policy, self.now)
        self.all: list[do.Command] = list(self.commands)
        if policy.can_look and started:
            self.look()
        for rank in range(ranks):
            self.hello(rank, ranks)

    # --- events -----------------------------------------------------------------------------------------------------

    def feed(self, event: ev.Event, after_ms: int = 10) -> tuple[do.Command, ...]:
        """One event, so long after the last one; what it makes the machine ask for."""
        self.now += after_ms
        self.state, self.commands = machine.step(self.policy, self.state, event, self.now)
        self.all += self.commands
        return self.commands

    def wait(self, ms: int) -> list[do.Command]:
        """Let so much time pass, with a Tick at each deadline and one at the end; all that is asked for meanwhile."""
        end, first = self.now + ms, len(self.all)
        while True:
            deadline_ms = machine.next_deadline(self.policy, self.state)
            if deadline_ms is None or deadline_ms > end:
                break
            self.feed(ev.Tick(), max(0, deadline_ms - self.now))
        self.feed(ev.Tick(), end - self.now)
        return self.all[first:]

    def hello(
        self, rank: int, world: int, *, generation: int = 0, pid: int | None = None, sharded: bool = False
    ) -> tuple[do.Command, ...]:
        """This rank attaches."""
        return self.feed(wire.Hello(who(rank, generation, pid), wire.VERSION, world, rank, sharded))

    def signal(self, name: str = "SIGTERM", meaning: ev.Meaning | None = None, after_ms: int = 10) -> tuple[do.Command, ...]:
        """A signal comes: TERM and HUP mean leave, USR1 is the notice, USR2 the save signal, INT a ctrl-C."""
        known = {"SIGUSR1": ev.Meaning.NOTICE, "SIGUSR2": ev.Meaning.SAVE, "SIGINT": ev.Meaning.INTERRUPT}
        return self.feed(ev.SignalCame(name, meaning or known.get(name, ev.Meaning.LEAVE)), after_ms)

    def look(self, state: str = "RUNNING", reason: str = "None", *, after_ms: int = 30, **seen: object) -> tuple[do.Command, ...]:
        """The look comes back with this."""
        found = view(self.now + after_ms, state, reason, **seen)  # type: ignore[arg-type]
        return self.feed(ev.Looked(found, "test"), after_ms)

    def no_look(self, *, definite: bool = False, after_ms: int = 5_000) -> tuple[do.Command, ...]:
        """The look comes back with nothing."""
        return self.feed(ev.Looked(NoView("timed out", definite), "test"), after_ms)

    def agree(self, n: int = 7) -> None:
        """All ranks answer and stand at step n; nothing is answered where no Prepare was said."""
        if self.state.phase is Phase.AGREEING:
            for member in self.round.members:
                self.feed(wire.Ack(member.who, self.round.number, Position(n, 0)))
        for member in self.round.members:
            self.feed(wire.Arrived(member.who, self.round.number, Position(n, 0)))

    def write(self, n: int = 7, save_ms: int = 40, *, after_ms: int = 10) -> None:
        """All ranks save."""
        number = self.round.number
        for member in self.round.members:
            self.feed(wire.Saving(member.who, number))
        for member in self.round.members:
            self.feed(wire.Saved(member.who, number, n, (FILE,), save_ms), after_ms)

    def commit(self, n: int = 7, *, after_ms: int = 10) -> tuple[do.Command, ...]:
        """The files are found intact and committed; what follows."""
        number = self.round.number
        self.feed(ev.Verified(number, "full", "", 1_000))
        return self.feed(ev.Committed(number, n, ev.CommitResult.COMMITTED, ""), after_ms)

    def save(self, n: int = 7) -> tuple[do.Command, ...]:
        """The whole round, from the answers to the commit; what follows the commit."""
        self.agree(n)
        self.write(n)
        return self.commit(n)

    def end(self, code: int = 0, *, left: bool = True) -> tuple[do.Command, ...]:
        """All ranks say that they leave, and the command ends."""
        if left:
            for rank in self.state.ranks:
                self.feed(wire.Left(rank.who, max(1, self.state.newest_round), again=False))
        return self.feed(ev.CommandExited(code))

    def gone(self, rank: int) -> tuple[do.Command, ...]:
        """The process of this rank has ended."""
        return self.feed(ev.RankGone(who(rank), "its process has ended"))

    def requeued(self, result: ev.RequeueResult = ev.RequeueResult.ACCEPTED, reason: str = "") -> tuple[do.Command, ...]:
        """The requeue call comes back."""
        return self.feed(ev.RequeueReturned(result, reason))

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def round(self) -> Round:
        """The running round."""
        assert self.state.round is not None
        return self.state.round

    @property
    def notice(self) -> Notice:
        """The notice in force."""
        assert self.state.notice is not None
        return self.state.notice

    @property
    def deadline(self) -> int | None:
        """When the machine wants to be woken next."""
        return machine.next_deadline(self.policy, self.state)

    @property
    def kill_in_ms(self) -> int:
        """Time until the kill, as the machine believes."""
        return self.notice.kill_at_ms - self.now

    def asked(self, kind: type[C]) -> list[C]:
        """Every command of this kind so far."""
        return [command for command in self.all if isinstance(command, kind)]

    def told(self, kind: type[C], pid: int | None = None) -> list[C]:
        """Every word of this kind said so far, to this process or to anybody."""
        return [say.word for say in self.asked(do.Say) if isinstance(say.word, kind) and pid in (None, say.pid)]

    @property
    def exit(self) -> do.Exit:
        """The end."""
        (found,) = self.asked(do.Exit)
        return found


def the(found: tuple[do.Command, ...] | list[do.Command], kind: type[C]) -> C:
    """The one command of this kind."""
    (one,) = [command for command in found if isinstance(command, kind)]
    return one


def none_of(found: tuple[do.Command, ...] | list[do.Command], *kinds: type[do.Command]) -> bool:
    """Whether no command of these kinds was asked for."""
    return not any(isinstance(command, kinds) for command in found)
