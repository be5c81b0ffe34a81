"""What holds for the machine whatever comes in, judged from outside: from events, commands, and the states before and after.

Owns no expectation about what is wise, only what is never right. Must not copy the machine's own reasoning: it counts what was
asked for and what was answered.
"""

from __future__ import annotations

from ckpt_client import wire
from ckpt_client.wire import Position, Who
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.describe import describe
from ckpt_supervisor.core.leaving import STAY_MS, before_requeue_line
from ckpt_supervisor.core.policy import Cause, Policy, runs
from ckpt_supervisor.core.state import Asking, Kind, Phase, State
from ckpt_supervisor.core.views import JobView

SAME_MOMENT_MAX = 4
"""So many Ticks in a row may find something to do at one and the same moment."""

TICKS_AHEAD = 8
"""So many deadlines ahead are tried after each step."""

OF_THE_COORDINATOR = (do.Verify, do.CheckAgain, do.Commit, do.DropPartial, do.Prune, do.StartCommand, do.Meet, do.Announce)
WAY_OUT = (Phase.LEAVING, Phase.REQUEUEING, Phase.DONE)
SAID_ON_THE_WAY_OUT = (wire.Leave, wire.Abort, wire.Welcome, wire.Refused)


class Laws:
    """The judge of one run: what was asked for and answered so far."""

    def __init__(self, policy: Policy, state: State, commands: tuple[do.Command, ...], now_ms: int) -> None:
        self.said_hello: set[tuple[int, int]] = set()
        """Task and process number."""
        self.at: dict[int, Position] = {}
        self.asked_round = 0
        """Newest round that a rank was asked to take part in."""
        self.acked: dict[int, Position] = {}
        """The farthest position that a member has said it entered, before T was fixed."""
        self.arrived: dict[int, set[Who]] = {}
        self.gone_ahead: set[int] = set()
        self.saved: dict[int, set[Who]] = {}
        """Who has saved T's step, after Go."""
        self.verifying: set[int] = set()
        self.found_intact: dict[int, set[int]] = {}
        """Who has found its ranks' files of a round intact: tasks, by round."""
        self.committing: set[int] = set()
        self.committed: set[int] = set()
        self.calling = False
        self.accepted = False
        self.cancelled = False
        """The newest look that saw anything saw a job that a person has cancelled."""
        self.asked = False
        self.ended = False
        self.exits = 0
        self.directories: dict[int, str] = {}
        assert len(commands) == (1 if policy.can_look else 0)
        self.check_deadline(policy, state, now_ms)

    def judge(
        self, policy: Policy, before: State, event: ev.Event, after: State, commands: tuple[do.Command, ...], now_ms: int
    ) -> None:
        """One step."""
        assert machine.step(policy, before, event, now_ms) == (after, commands), "not a function of its arguments"
        assert all(entry.event for entry in describe(event, before, after, commands, now_ms))
        self._hear(before, event)
        self._check_state(before, after)
        members = [len(state.round.members) if state.round else 0 for state in (before, after)]
        assert len(commands) <= 4 * max(*members, len(before.ranks), len(after.ranks)) + 8 + 4 * policy.tasks
        for command in commands:
            self._check(policy, before, event, after, command, now_ms)
        if before.phase is Phase.DONE:
            assert (after, commands) == (before, ()), "something is asked for after Exit"
        assert (self.exits == 1) == (after.phase is Phase.DONE)
        if after.phase is Phase.REQUEUEING:
            assert before_requeue_line(policy, after)
            assert after.requeue is not None
            if after.requeue.asking is Asking.ACCEPTED and (before.requeue is None or before.requeue.accepted_ms is None):
                assert self.accepted or (after.notice is not None and after.notice.cause is Cause.REQUEUED)

    def check_deadline(self, policy: Policy, state: State, now_ms: int) -> None:
        """Ticks at the deadlines make progress, and after a few of them the next one lies ahead."""
        same_moment, first = 0, state
        for _ in range(TICKS_AHEAD):
            deadline_ms = machine.next_deadline(policy, state)
            assert machine.next_deadline(policy, state) == deadline_ms
            if deadline_ms is None:
                return
            if policy.tasks > 1 and state is first:
                # Who is gone is looked at in Ticks alone, when all that has come was taken in: one is due at once then.
                deadline_ms = max(deadline_ms, now_ms)
            assert deadline_ms >= now_ms, f"woken {now_ms - deadline_ms} ms too late in {state.phase.name}"
            ticked, commands = machine.step(policy, state, ev.Tick(), deadline_ms)
            moved = machine.next_deadline(policy, ticked) != deadline_ms
            assert ticked != state or commands or moved, f"a Tick changes nothing in {state.phase.name}"
            same_moment = same_moment + 1 if deadline_ms == now_ms else 0
            assert same_moment <= SAME_MOMENT_MAX, f"spins in {state.phase.name}"
            state, now_ms = ticked, deadline_ms

    # --- what came in --------------------------------------------------------------------------------------------------------

    def _hear(self, before: State, event: ev.Event) -> None:
        match event:
            case wire.Hello():
                self.said_hello.add((event.who.task, event.who.pid))
            case wire.Ack() | wire.Arrived() | wire.Saved():
                self._hear_member(before, event)
            case ev.Looked(view=JobView() as view):
                self.cancelled = (
                    not runs(view)
                    and view.state not in ("TIMEOUT", "NODE_FAIL")
                    and view.reason not in ("TimeLimit", "NodeDown")
                    and view.preempt_ms is None
                    and view.restarts <= before.start_restarts
                )
            case ev.Verified(round=number, problem="", task=task) if number in self.verifying:
                self.found_intact.setdefault(number, set()).add(task)
            case ev.Committed(round=number, result=ev.CommitResult.COMMITTED | ev.CommitResult.ALREADY_THERE):
                if number in self.committing:
                    self.committed.add(number)
            case ev.RequeueReturned(result=result):
                self.accepted |= self.calling and result in (ev.RequeueResult.ACCEPTED, ev.RequeueResult.PENDING)
                self.calling = False
            case _:
                pass

    def _hear_member(self, before: State, word: wire.Ack | wire.Arrived | wire.Saved) -> None:
        """A word of the running round, from a member that is alive."""
        current, rank = before.round, before.rank(word.who)
        if current is None or word.round != current.number or current.member(word.who) is None or rank is None or rank.gone:
            return
        match word:
            case wire.Ack(round=number, entered=entered) if before.phase is Phase.AGREEING:
                self.acked[number] = max(entered, self.acked.get(number, entered))
            case wire.Arrived(round=number, at=at) if at == current.at:
                self.arrived.setdefault(number, set()).add(word.who)
            case wire.Saved(round=number, n=n) if current.at is not None and n == current.at.n and current.go:
                self.saved.setdefault(number, set()).add(word.who)
            case _:
                pass

    # --- what it made of it --------------------------------------------------------------------------------------------------

    def _check_state(self, before: State, after: State) -> None:
        assert after.newest_round >= before.newest_round
        assert after.generation >= before.generation
        assert after.committed_step >= before.committed_step
        if before.phase in WAY_OUT:
            assert after.phase.value >= before.phase.value, f"{before.phase.name} -> {after.phase.name}"
            assert after.round is None
        in_round = (Phase.AGREEING, Phase.SAVING, Phase.VERIFYING, Phase.COMMITTING)
        assert (after.round is not None) == (after.phase in in_round)
        if before.round is not None and after.round is not None:
            assert after.round.number >= before.round.number
            if before.round.number == after.round.number:
                assert after.phase.value >= before.phase.value, f"{before.phase.name} -> {after.phase.name} in one round"
                assert after.round.go >= before.round.go
        if after.round is not None and after.round.at is not None:
            number, at = after.round.number, after.round.at
            assert self.at.setdefault(number, at) == at, "T has moved"
            if after.phase is not Phase.AGREEING:
                assert at >= self.acked.get(number, at), "T lies behind a member"
        if after.phase is Phase.SAVING:
            assert after.round is not None
            assert after.round.at is not None
        if after.round is not None and after.round.kind is Kind.LEAVE:
            assert after.notice is not None

    def _check(self, policy: Policy, before: State, event: ev.Event, after: State, command: do.Command, now_ms: int) -> None:
        assert self.exits == 0 or isinstance(command, do.Announce), "something is asked for after Exit"
        if policy.heir:
            assert not isinstance(command, OF_THE_COORDINATOR), "an heir saves nothing"
        match command:
            case do.Say(pid=pid, word=word, task=task):
                assert (task, pid) in self.said_hello, f"a word to process {pid} of task {task}, which never said Hello"
                assert wire.decode_to_rank(wire.encode(word)) == word
                self._check_word(before, after, word)
            case do.Verify() | do.CheckAgain() | do.Commit():
                self._check_files(before, event, command)
            case do.CallRequeue():
                assert not self.calling, "two requeues at once"
                assert not self.accepted, "requeued again"
                assert not self.cancelled, "a cancelled job is revived"
                assert isinstance(event, ev.Looked)
                assert isinstance(event.view, JobView)
                self.calling = True
            case do.StartCommand():
                assert before.notice is None
                assert after.phase is Phase.RUNNING
            case do.Exit(code=code):
                self.exits += 1
                assert after.exit_code == code
                self._check_exit(policy, before, after, now_ms)
            case do.DropPartial():
                assert before.round is not None
                if before.phase is Phase.COMMITTING:
                    assert isinstance(event, ev.Committed), "removed under a running commit"
                    assert event.result is ev.CommitResult.FAILED
            case do.AskCommand() | do.EndCommand():
                self._check_end(after, command)
            case do.Meet():
                assert after.phase in WAY_OUT
            case do.LookUp() | do.Announce() | do.TurnAway():
                self._check_asked(policy, event, after, command)
            case do.Adopt(final=final):
                assert policy.adopts
                assert not before.adopting or isinstance(event, ev.Adopted), "two looks at what the program wrote at once"
                assert after.adopting
                assert after.over or not final, "what is still being written is taken for whole"
            case do.PassSignal():
                assert policy.passes
                assert not after.live, "ranks that can be asked are signalled"
                assert before.leaving is None, "handed on twice"
            case do.Prune():
                pass

    def _check_end(self, after: State, command: do.AskCommand | do.EndCommand) -> None:
        """The command is asked to end, and killed, each once and in this order."""
        assert not self.ended, "what was killed is ended again"
        if isinstance(command, do.EndCommand):
            self.ended = True
            return
        assert command.why
        assert not self.asked, "the command is asked to end twice"
        assert after.leaving is not None
        assert after.leaving.told
        assert not after.leaving.own_end, "training that ends by itself is asked to end"
        assert not after.leaving.passed, "a program that saves by itself is asked to end"
        self.asked = True

    def _check_files(self, before: State, event: ev.Event, command: do.Verify | do.CheckAgain | do.Commit) -> None:
        match command:
            case do.Verify(round=number):
                assert number in self.gone_ahead
                assert number not in self.verifying, "verified twice"
                assert before.round is not None
                assert {member.who for member in before.round.members} == self.saved[number], "verified before all have saved"
                self.verifying.add(number)
            case do.CheckAgain(round=number, shares=shares):
                assert number in self.verifying
                assert shares
                answered = {0, *self.found_intact.get(number, ())}
                assert not answered & {share.task for share in shares}, "asked again although it has answered"
            case do.Commit(round=number, ranks=ranks, world_size=world_size, step=step):
                assert isinstance(event, ev.Verified)
                assert (event.round, event.problem) == (number, "")
                assert number in self.verifying, "committed what was never given to verification"
                assert number not in self.committing, "committed twice"
                wrote = {who.task for who in self.saved[number]}
                assert self.found_intact[number] >= {0, *wrote}, "committed before every task has checked its share"
                assert ranks in (tuple(range(world_size)), (0,))
                assert step == self.at[number].n
                self.committing.add(number)

    def _check_asked(self, policy: Policy, event: ev.Event, after: State, command: do.LookUp | do.Announce | do.TurnAway) -> None:
        match command:
            case do.LookUp(after_ms=after_ms):
                assert after_ms == 1_000 * policy.heir, "an heir waits its turn"
            case do.Announce(stand=stand, tasks=some):
                assert policy.tasks > 1
                assert some is not None or stand.code == after.exit_code
                assert set(some or ()) <= {entry.number for entry in after.tasks}
            case do.TurnAway():
                assert isinstance(event, ev.Report)

    def _check_word(self, before: State, after: State, word: wire.ToRank) -> None:
        match word:
            case wire.Prepare(round=number) | wire.SaveAt(round=number) | wire.Go(round=number):
                assert number >= self.asked_round, "two rounds at once"
                self.asked_round = number
                if isinstance(word, wire.SaveAt):
                    assert word.at == self.at.get(number, after.round.at if after.round else word.at)
                    assert word.left_ms >= 0
                    assert self.directories.setdefault(number, word.directory) == word.directory
                    assert len(set(self.directories.values())) == len(self.directories), "two rounds write into one directory"
                elif isinstance(word, wire.Go):
                    self.gone_ahead.add(number)
                    assert after.round is not None
                    assert {member.who for member in after.round.members} <= self.arrived[number], "Go before all have arrived"
            case wire.Leave():
                assert after.phase in WAY_OUT
            case wire.Abort() | wire.Wait() | wire.Welcome() | wire.Refused():
                pass
        if before.phase in WAY_OUT:
            assert isinstance(word, SAID_ON_THE_WAY_OUT), f"{word} on the way out"

    def _check_exit(self, policy: Policy, before: State, after: State, now_ms: int) -> None:
        """An exit status is the command's own, or is that of an interruption, whose cause it tells."""
        leaving, requeue, notice, code = after.leaving, after.requeue, after.notice, after.exit_code
        if after.code is not None and code == after.code and (leaving is None or not leaving.told or before.phase not in WAY_OUT):
            return
        assert notice is not None
        assert leaving is not None
        if leaving.fresh:
            assert after.committed_step >= 0
        if all(rank.finished for rank in after.ranks) and code == after.code == 0:
            return
        if notice.cause is Cause.CANCELLED:
            assert code == 143
        elif policy.requeue == "exit":
            assert code == policy.requeue_exit
        else:
            assert code == (75 if leaving.fresh else 76)
        if policy.slurm and policy.requeue == "auto" and notice.cause is not Cause.CANCELLED:
            # Unknown is not refused: who leaves too early loses the job (docs/slurm.md, section 2).
            assert requeue is not None
            settled = requeue.asking in (Asking.ACCEPTED, Asking.OVER)
            assert settled or now_ms >= max(notice.kill_at_ms, requeue.began_ms) + STAY_MS
