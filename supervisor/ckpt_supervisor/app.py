"""The one loop: signals, words, children and results come in as events; the machine decides; commands are carried out.

Owns the order of things and nothing that could be decided elsewhere. One thread, one poller whose time-out is the machine's next
deadline; whatever touches a disk or Slurm is an errand and comes back as an event.
"""

from __future__ import annotations

import collections
import dataclasses
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any

import zmq
from ckpt_client import wire

from ckpt_supervisor import emergency, policies, store
from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.journal import Journal, Who, load_structlog
from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.adapters.signals import signal_name
from ckpt_supervisor.adapters.stderr import progress, say
from ckpt_supervisor.core import between, machine, notices, relay, tasks
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.describe import Entry, describe
from ckpt_supervisor.core.leaving import OWN_END, before_requeue_line
from ckpt_supervisor.core.policy import EXIT_STALE
from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.errands import LANES, Errands
from ckpt_supervisor.launch import Launch, Started
from ckpt_supervisor.lines import Lines
from ckpt_supervisor.meaning import meaning_of
from ckpt_supervisor.processes.below import Below
from ckpt_supervisor.start import leftovers, stale
from ckpt_supervisor.start.resume_gate import NOTHING, Resume
from ckpt_supervisor.watches.watching import Watching, watches_of

if TYPE_CHECKING:  # Only a step of several tasks has these: see others_of.
    from ckpt_supervisor.tasks.others import Coordinating, Following

FLUSH_MS = 2_000
"""At the end the journal gets this long to be written, and what goes after the last look at a program's files as long to go."""

ASK_MS = 2_000
"""Processes that the command has left behind get this long after SIGTERM, when nothing presses."""


def supervise(launch: Launch) -> int:
    """Supervise the command to its end; the exit status of docs/exit-codes.md."""
    with Lanes(LANES) as lanes:
        supervisor = Supervisor(launch, lanes)
        try:
            return supervisor.loop()
        except Exception:  # noqa: BLE001 - the last line of defence: a fault of ours must not cost the user the job.
            say(f"internal error, please report it:\n{traceback.format_exc()}")
            return supervisor.emergency()


class Supervisor:
    """One supervised command, from its start to the exit status."""

    def __init__(self, launch: Launch, lanes: Lanes) -> None:
        job = launch.job
        self.launch = launch
        self.lanes = lanes
        self.exit: tuple[int, str] | None = None
        self.events: collections.deque[ev.Event | ev.FromCoordinator] = collections.deque()
        self.feeding = False
        self.journal = Journal(launch.options.dir / "journal", Who(job.name, job.attempt, job.step_id, launch.epoch, job.task))
        self.lines = Lines(self.journal, lanes)
        self.errands = Errands(launch, lanes, self.feed, self.lines.log)
        self.policy = policies.policy_of(launch, can_look=self.errands.scontrol is not None)
        self.state, self.first = machine.start(self.policy, now_ms())
        self.coordinating, self.following = others_of(launch, self.lines)
        """Of a step of several tasks. While this one follows, `state` is idle; it is the heir's once the coordinator is lost."""
        self.poller = zmq.Poller()
        self.below = Below(launch, self.poller, self.feed, self.lines.log, now_ms())
        self.watching = Watching(())

    # --- the loop -----------------------------------------------------------------------------------------------------

    def loop(self) -> int:
        """Start the command, then one event after the other until the machine says Exit."""
        self._begin()
        leftovers.tell(self.launch.leftovers, self.lines.log)
        stale.post(self.lanes, self.launch.env, self.lines.log)
        ends = (self.coordinating, self.following)
        self.watching = Watching(watches_of(self.launch, self.lanes, self.feed, self.lines, lambda: self.state, ends))
        store.load_readers()  # After the command's start, which would wait for it.
        while self.exit is None:
            self._send_out()
            self.errands.saving(self.state.round is not None or self.state.notice is not None)
            self.lines.write()
            ready = dict(self.poller.poll(self._timeout_ms()))
            self._signals()
            if self.launch.transport.socket in ready:
                self._words()
            self._peers()
            if self.lanes.fileno() in ready or self.lanes.has_results:
                self.lanes.deliver()
            self.below.ended(ready)
            self._sweep()
            self.watching.look(now_ms())
            # Most wake-ups are the shield's or a watch's, and a tick would be half their cost.
            is_due = bool(ready) or any(time is not None and time <= now_ms() for time in self._deadlines())
            if is_due and self.exit is None:
                self.feed(ev.Tick(behind=self.coordinating is not None and self.coordinating.is_behind))
        return self._end()

    def feed(self, event: ev.Event | ev.FromCoordinator) -> None:
        """One step of the machine for this event, and for those that its commands cause at once, in order."""
        self.events.append(event)
        if self.feeding:
            return
        self.feeding = True
        try:
            while self.events:
                self._step(self.events.popleft())
        finally:
            self.feeding = False

    def _step(self, event: ev.Event | ev.FromCoordinator) -> None:
        now = now_ms()
        if self.following is not None:
            was_lost = self.following.is_lost
            self._follow(self.following, event, now)
            if not (was_lost and self.following.is_lost):
                return  # The event that made it an heir is among what it has inherited.
        if isinstance(event, ev.FromCoordinator):
            return
        before = self.state
        self.state, commands = machine.step(self.policy, before, event, now)
        for entry in describe(event, before, self.state, commands, now):
            self._log_step(entry)
        if before.phase is not Phase.REQUEUEING and self.state.phase is Phase.REQUEUEING:
            say(before_requeue_line(self.policy, self.state))
        for command in commands:
            self._carry_out(command)

    def _log_step(self, entry: Entry) -> None:
        self.lines.log(entry)
        self.lines.tell(entry, self.policy, self.state, now_ms())

    def _begin(self) -> None:
        for fd in (self.launch.inbox.fileno(), self.lanes.fileno(), self.launch.transport.socket):
            self.poller.register(fd, zmq.POLLIN)
        if self.coordinating is not None:
            self.coordinating.register(self.poller)
        if self.following is not None:
            self._begin_to_follow(self.following)
            return
        if self.launch.started is not None:
            self._started(*self.launch.started, NOTHING, 0)
        else:
            self.errands.choose(progress(), self._chosen)
        self.lanes.post("journal", "opening the journal", self._open_journal, _ignore)
        self.errands.begin(self._kill_wait)
        for command in self.first:
            self._carry_out(command)

    def _begin_to_follow(self, following: Following) -> None:
        """The coordinator chooses, sweeps and looks; here is nothing to do but what it says."""
        following.register(self.poller)
        early = None if self.launch.joined is None else self.launch.joined.start
        if self.launch.started is not None and early is not None:
            following.started(early)
            resume = Resume(early.resume_from, early.resume_step, ())
            self._started(*self.launch.started, resume, early.restart)
        signals, words = following.early()
        for number in signals:
            self._signal(number)
        for word in words:
            self.feed(word)
        # Not before: the command's start would wait for that import.
        self.lanes.post("journal", "opening the journal", self._open_journal, _ignore)

    def _open_journal(self) -> None:
        """Not while the command is being forked: logging's fork handlers, new in the middle of a fork, complain on its stderr."""
        with self.launch.claims.forking():
            load_structlog()  # It imports logging, and takes too long to stand before the command's start.
        self.journal.open()

    def _timeout_ms(self) -> int:
        """Time until the next deadline; recomputed every time, never remembered."""
        times = [*self._deadlines(), *self.below.times_ms, *self.watching.times_ms(self.below.sweep_at_ms)]
        soonest = min((time for time in times if time is not None), default=None)
        return -1 if soonest is None else max(0, soonest - now_ms())

    def _deadlines(self) -> list[int | None]:
        times: list[int | None] = []
        if self.following is not None:
            times += [relay.next_deadline(self.following.relay), self.following.reach_at_ms]
        if self.following is None or self.following.is_lost:
            times.append(machine.next_deadline(self.policy, self.state))
        return times

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _signals(self) -> None:
        for number in self.launch.inbox.drain():
            if number == signal.SIGCHLD:
                self.below.reap()
            else:
                self._signal(number)

    def _signal(self, number: int) -> None:
        meaning = meaning_of(number, self.launch.options, slurm=self.policy.slurm)
        if meaning is not None:
            self.below.signalled()
            self.feed(ev.SignalCame(signal_name(number), meaning, self.launch.job.task))

    def _words(self) -> None:
        for word in self.launch.transport.receive():
            if isinstance(word, Garbage):
                self.lines.garbage(word)
                continue
            self.watching.heard(word)
            if isinstance(word, wire.Progress):
                continue  # Not the machine's.
            said = word if self.following is None else self.following.stamped(word)
            self.feed(said)
            if isinstance(said, wire.Hello) and (self.following is not None or self.state.rank(said.who) is not None):
                self.below.watch(said.who)

    def _peers(self) -> None:
        """What the step's other supervisors say."""
        for end in (self.coordinating, self.following):
            for cut in end.closed() if end is not None else ():
                self.feed(cut)
        if self.coordinating is not None:
            self.lines.gather()
            for word in self.coordinating.receive():
                self._from_task(word)
            self.lines.fold()
        if self.following is not None:
            for told in self.following.receive():
                self.feed(told)
            self.following.reach(self.lanes, now_ms())

    def _from_task(self, word: between.Report | between.Heard | between.Checked) -> None:
        match word:
            case between.Report():
                for event in tasks.unfold(self.policy, self.state, word):
                    self.feed(event)
            case between.Heard(task=task, words=words):
                self._hear(tuple(word for word in words if word.who.task == task))
            case between.Checked(task=task, round=number, problem=problem, bytes_read=count, files=files, verified=verified):
                current = self.state.round
                if current is not None and current.number == number and task in current.unverified:
                    self.errands.took(task, number, files)
                self.feed(ev.Verified(number, verified, problem, count, task))

    def _hear(self, words: tuple[wire.FromRank, ...]) -> None:
        """Words that came in one frame: what is due by now is looked at once, after them all."""
        now = now_ms()
        for word in words:
            before = self.state
            self.state, commands = machine.hear(self.policy, before, word, now)
            for entry in describe(word, before, self.state, commands, now):
                self._log_step(entry)
            for command in commands:
                self._carry_out(command)

    def _sweep(self) -> None:
        calm = self.state.notice is None and (self.following is None or self.following.is_calm)
        self.below.sweep(now_ms(), quiet=calm)
        if self.state.notice is not None and notices.ranks_are_late(self.state, now_ms()):
            self.below.press(self.state.notice.first_ms)
        if self.below.hand_on(now_ms(), calm=calm):
            self.errands.forget_mark()

    # --- what goes out --------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command | do.RelayCommand) -> None:
        match command:
            case do.Say(pid=pid, word=word, task=task):
                if self.coordinating is not None and task != 0:
                    self.coordinating.say(command)
                else:
                    self.launch.transport.send(pid, word)
            case do.Announce() | do.TurnAway():
                assert self.coordinating is not None
                self.coordinating.tell(command, self.state)
            case do.PassUp() | do.SendUp():
                assert self.following is not None
                self.following.say(command)
            case do.TakeOver(reason=reason):
                self._take_over(reason)
            case do.StartCommand(restart=restart, after_ms=after_ms):
                self._restart(restart, after_ms)
            case do.AskCommand():
                self.below.ask_command()
            case do.EndCommand():
                runs = self.state.code is None and (self.following is None or self.following.relay.is_running)
                self.below.end_command(runs=runs)
            case do.Exit(code=code, line=line):
                self.exit = (code, line)
            case do.CheckAgain():
                assert self.coordinating is not None
                self.coordinating.have_checked(command)
            case do.Verify():
                if self.coordinating is not None:
                    self.coordinating.have_checked(command)
                self.errands.carry_out(command, self._protected())
            case do.PassSignal():
                if self.below.handover is not None:
                    self.errands.mark()
                    self.below.handover.ask(now_ms())
            case (
                do.LookUp()
                | do.Commit()
                | do.DropPartial()
                | do.Prune()
                | do.Adopt()
                | do.Meet()
                | do.CallRequeue()
                | do.Resubmit()
            ):
                self.errands.carry_out(command, self._protected())

    def _send_out(self) -> None:
        """At the end of a turn: what was gathered for other supervisors."""
        for end in (self.coordinating, self.following):
            if end is not None:
                end.flush()

    # --- another task's supervisor ------------------------------------------------------------------------------------------

    def _follow(self, following: Following, event: ev.Event | ev.FromCoordinator, now: int) -> None:
        """One event of a relay. While the coordinator is lost the machine has the event too."""
        was_lost = following.is_lost
        commands = following.step(self.policy, self.state, event, now)
        if was_lost and not following.is_lost:
            self.state, _ = machine.start(self.policy, now)
            say("task 0's supervisor is heard again")
        for command in commands:
            self._carry_out(command)

    def _take_over(self, reason: str) -> None:
        assert self.following is not None
        say(f"{reason}: no more saves; task {self.launch.job.task} leaves by itself if it has to")
        self.policy = relay.heir_policy(self.policy, self.following.relay)
        self.state, commands = relay.inherit(self.policy, self.following.relay, now_ms())
        for command in commands:
            self._carry_out(command)

    def _protected(self) -> frozenset[int]:
        """Steps that are never pruned: what this attempt resumed from, and its newest commit."""
        return frozenset({self.state.resume_step, self.state.committed_step})

    # --- the command ------------------------------------------------------------------------------------------------------

    def _chosen(self, resume: Resume) -> None:
        """The look at the start is over."""
        if resume.refusal:
            self._refuse(resume.refusal)
            return
        self._resume_from(resume)
        if self.state.phase is Phase.RUNNING and self.exit is None:
            self._started(*self.launch.start_command(resume.path, 0), resume, 0)
            if resume.path:
                self._carry_out(do.Prune())  # For the last round of the attempt before: in its grace there was no time.

    def _restart(self, restart: int, after_ms: int) -> None:
        """Start again in place from the newest intact checkpoint."""

        def chosen(resume: Resume) -> None:
            if resume.refusal:
                self._refuse(resume.refusal)
            if resume.refusal or self.state.phase is not Phase.RUNNING or self.exit is not None:
                return
            self._resume_from(resume)
            self._started(*self.launch.start_command(resume.path, restart), resume, restart)

        following = self.following
        if following is None:
            say(f"training has failed or hangs; starting it again in place ({restart} of {self.launch.options.restarts})")
            self.lines.write()  # The gate reads there how the command has ended.
            self.below.end_for_restart(lambda: self.errands.choose(None, chosen, after_ms))
            return
        self.below.end_before_start()  # A relay starts the next one when the last one has ended.
        self._started(*self.launch.start_command(following.resume.path, restart), following.resume, restart)

    def _refuse(self, why: str) -> None:
        """Nothing may be started. On the way out already (a notice came meanwhile) it changes nothing: the requeue is first."""
        self.lines.log(Entry("refused", "error", {"text": why}))
        if self.state.phase is Phase.RUNNING and self.state.notice is None and self.exit is None:
            self.exit = (EXIT_STALE, why)

    def _resume_from(self, resume: Resume) -> None:
        """From here on this is what ranks are told, and the newest checkpoint that counts."""
        self.policy = dataclasses.replace(self.policy, resume_from=resume.path, resume_step=resume.step)
        self.state = machine.resumed(self.state, resume.path, resume.step, resume.several)

    def _started(self, argv: list[str], started: Started, resume: Resume, restart: int) -> None:
        if isinstance(started, children.NotStarted):
            say(started.reason)
            self.lines.log(Entry("command_not_started", "error", {"reason": started.reason, "code": started.code}))
            self.feed(ev.CommandExited(started.code))
            return
        self.below.started(started)
        pids = {"command": argv, "command_pid": started.pid, "guard_pid": started.guard_pid, "restart": restart}
        more = {"resume_from": resume.path, "resume_step": resume.step, "dir": str(self.launch.options.dir)}
        entry = Entry("command_started", "info", pids | more)
        self.lines.log(entry, self.launch.started_at if self.launch.started is not None and restart == 0 else None)

    def _kill_wait(self, found_ms: int) -> None:
        self.policy = dataclasses.replace(self.policy, kill_wait_ms=found_ms)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def _end(self) -> int:
        assert self.exit is not None
        code, line = self.exit
        if line and (code != 0 or self.state.notice is not None or line != OWN_END):
            say(line)  # First: what comes now may take its time, and the step's output may be cut off.
        self.below.finish(self._ask_ms())
        self.errands.end(own_end=code == 0 and self.state.notice is None, step=self.state.committed_step)
        if self.coordinating is not None:
            self.coordinating.part(self.policy, self.state, code, now_ms())
        if self.following is not None:
            self.following.part()
        self._flush()
        return code

    def _ask_ms(self) -> int:
        """How long what the command has left behind may take to end; with a notice in force, as far as there is time."""
        if self.state.notice is None:
            return ASK_MS
        return max(0, min(ASK_MS // 2, self.state.notice.budget.out_by_ms - now_ms() - ASK_MS // 2))

    def _flush(self) -> None:
        """Let the journal be written, within a bound."""
        if self.policy.adopts and self.state.notice is None:
            self._wait_for("prune")  # The last look may have made several checkpoints, and nobody comes to remove the old ones.
        self.lines.write()
        self._wait_for("meeting", "journal")
        if late := self.watching.lanes_at_end:  # Their last work, and what came of it.
            out_by_ms = None if self.state.notice is None else self.state.notice.budget.out_by_ms
            most_ms = max(late.values())
            self._wait_for(*late, within_ms=most_ms if out_by_ms is None else max(0, min(most_ms, out_by_ms - now_ms())))
            self.lines.write()
            self._wait_for("journal")

    def _wait_for(self, *lanes: str, within_ms: int = FLUSH_MS) -> None:
        """Until these lanes have done what is asked of them by now, within a bound."""
        flushed: list[bool] = []
        for lane in lanes:
            self.lanes.post(lane, "flush", _ignore, lambda _: flushed.append(True))
        end = now_ms() + within_ms
        while len(flushed) < len(lanes) and now_ms() < end:
            self.poller.poll(max(0, end - now_ms()))
            self.launch.inbox.drain()
            self.lanes.deliver()

    def emergency(self) -> int:
        """After a fault of our own: see emergency.py."""
        self.lines.write()
        inbox = self.launch.inbox
        if self.following is not None and not self.following.is_lost:
            # Saves end, as this task is not heard from any more; training goes on. An early end here could cost others theirs.
            self.following.abandon()
            return emergency.stay(self.below.child, inbox)
        if self.state.notice is None:
            code = emergency.outlive(self.below.child, inbox)
            if code is not None:
                return code
        children.end_all(signal.SIGKILL, self.launch.claims)
        return emergency.bring_back(self.errands.scontrol, self.policy, self.state, inbox, now_ms)


def now_ms() -> int:
    """The one clock: monotonic, whole milliseconds."""
    return time.monotonic_ns() // 1_000_000


def others_of(launch: Launch, lines: Lines) -> tuple[Coordinating | None, Following | None]:
    """This supervisor's end of a step of several tasks; imported only there, since every import delays a start."""
    if launch.hub is None and launch.joined is None:
        return None, None
    from ckpt_supervisor.tasks.others import Coordinating, Following

    if launch.joined is not None:
        return None, Following(launch.joined, launch.job.task, lines, now_ms())
    assert launch.hub is not None
    return Coordinating(launch.hub, lines), None


def _ignore(_: Any = None) -> None:
    return None
