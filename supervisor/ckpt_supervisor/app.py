"""The one loop: signals, words, children and results come in as events; the machine decides; commands are carried out.

Owns the order of things and nothing that could be decided elsewhere. One thread, one poller whose time-out is the machine's next deadline;
whatever touches a disk or Slurm runs in a lane and comes back as an event. The command starts first: what it does not need
(the journal's library, psutil) is imported after it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import zmq
from ckpt_client import wire

from ckpt_supervisor import children, disk, startup
from ckpt_supervisor.config import Options
from ckpt_supervisor.core import commands as do
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.describe import Entry, describe
from ckpt_supervisor.core.leaving import before_requeue_line
from ckpt_supervisor.core.policy import EXIT_STALE, Cause, Policy, read
from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.core.views import JobView, NoView
from ckpt_supervisor.journal import Journal, Who
from ckpt_supervisor.lanes import Broken, Lanes
from ckpt_supervisor.meeting import Meeting, state_directory
from ckpt_supervisor.meeting import Verdict as MeetVerdict
from ckpt_supervisor.shield import Shield, next_sweep_ms
from ckpt_supervisor.signals import SignalInbox
from ckpt_supervisor.slurm import Scontrol, SlurmEnv
from ckpt_supervisor.disk import Resume
from ckpt_supervisor.startup import Job
from ckpt_supervisor.transport import Garbage, NoPlace, Transport

EXIT_USAGE = 2
EXIT_SOFTWARE = 70
"""EX_SOFTWARE of sysexits.h: a fault of the supervisor's own, after it has tried to requeue."""

LOOK_TIMEOUT_S = 12.0
REQUEUE_TIMEOUT_S = 15.0
CONFIG_TIMEOUT_S = 10.0
SWEEP_MS = 500
"""The shield looks at the command's processes this often while no notice is in force."""

FLUSH_MS = 2_000
"""At the end the journal gets this long to be written."""

LANES = ("slurm", "store", "prune", "journal", "meeting")


def run(options: Options, env: Mapping[str, str]) -> int:
    """Supervise the command to its end; the exit status of design section 7."""
    job = startup.job_of(SlurmEnv.from_environ(env))
    extra = {*options.notice_signals, *options.save_signals}
    with SignalInbox(extra) as inbox, contextlib.ExitStack() as stack:
        try:
            options.dir.mkdir(parents=True, exist_ok=True)
            epoch = disk.take(options.dir, job)
        except (OSError, disk.Held) as error:
            say(f"--dir {options.dir}: {error}")
            return EXIT_USAGE
        places = [env.get("XDG_RUNTIME_DIR", ""), env.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"]  # noqa: S108 - mkdtemp inside
        try:
            transport = stack.enter_context(Transport(places))
        except NoPlace as error:
            say(str(error))
            return EXIT_USAGE
        lanes = stack.enter_context(Lanes(LANES))
        supervisor = Supervisor(options, env, job, epoch, inbox, transport, lanes)
        try:
            return supervisor.loop()
        except Exception:  # noqa: BLE001 - the last line of defence: a fault of ours must not cost the user the job.
            say(f"internal error, please report it:\n{traceback.format_exc()}")
            return supervisor.emergency()


class Supervisor:
    """One supervised command, from its start to the exit status."""

    def __init__(
        self,
        options: Options,
        env: Mapping[str, str],
        job: Job,
        epoch: int,
        inbox: SignalInbox,
        transport: Transport,
        lanes: Lanes,
    ) -> None:
        self.options = options
        self.env = env
        self.job = job
        self.epoch = epoch
        self.inbox = inbox
        self.transport = transport
        self.lanes = lanes
        self.child: children.Child | None = None
        self.rank_fds: dict[int, int] = {}
        self.entries: dict[int, Any] = {}
        self.exit: tuple[int, str] | None = None
        self.shield = Shield()
        self.sweep_at_ms = 0
        self.signalled = False
        self.claims = children.Claims()
        self.scontrol = Scontrol.locate(job.slurm, env, self.claims) if job.slurm is not None else None
        self.journal = Journal(options.dir / "journal", Who(job.name, job.attempt, job.step_id, epoch, job.task))
        self.meeting = Meeting(state_directory(env), job.name, job.step_id, job.attempt, str(options.dir))
        self.policy = Policy(
            directory=str(options.dir),
            epoch=epoch,
            slurm=job.slurm is not None,
            can_look=self.scontrol is not None,
            requeue=options.requeue.how,
            requeue_exit=options.requeue.code,
            start_restarts=job.attempt,
            kill_wait_ms=options.kill_wait_ms or 30_000,
            grace_ms=options.grace_ms,
            every_steps=options.every_steps,
            every_ms=options.every_ms,
            save_timeout_ms=options.save_timeout_ms,
            leave_timeout_ms=options.leave_timeout_ms,
            lead_ms=options.lead.ms,
            lead_auto=options.lead.auto,
            notice_horizon_ms=options.notice_horizon_ms,
            verify_full=options.verify == "full",
            restarts=options.restarts,
        )
        self.state, self.first = machine.start(self.policy, now_ms())
        self.poller = zmq.Poller()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def loop(self) -> int:
        """Start the command, then one event after the other until the machine says Exit."""
        self._begin()
        while self.exit is None:
            ready = dict(self.poller.poll(self._timeout_ms()))
            self._signals()
            if self.transport.socket in ready:
                self._words()
            if self.lanes.fileno() in ready:
                self.lanes.deliver()
            self._ended(ready)
            self._sweep()
            if self.exit is None:
                self.feed(ev.Tick())
        return self._end()

    def feed(self, event: ev.Event) -> None:
        """One step of the machine, its journal lines, and its commands."""
        now = now_ms()
        before = self.state
        self.state, commands = machine.step(self.policy, before, event, now)
        for entry in describe(event, before, self.state, commands, now):
            self._log(entry)
        if before.phase is not Phase.REQUEUEING and self.state.phase is Phase.REQUEUEING:
            say(before_requeue_line(self.policy, self.state))
        for command in commands:
            self._carry_out(command)

    def _begin(self) -> None:
        for fd in (self.inbox.fileno(), self.lanes.fileno()):
            self.poller.register(fd, zmq.POLLIN)
        self.poller.register(self.transport.socket, zmq.POLLIN)
        children.become_subreaper()
        if disk.has_checkpoints(self.options.dir):
            self.lanes.post("store", "choosing a checkpoint", lambda: disk.choose(self.options, self.epoch, progress_line()), self._chosen)
        else:
            self._chosen(disk.NOTHING)
        self._warn(startup.warnings(self.job, self.scontrol is not None))
        self.lanes.post("journal", "opening the journal", self.journal.open, self._opened)
        self.lanes.post("prune", "sweeping", lambda: disk.sweep(self.options, self.epoch), self._pruned)
        if self.job.slurm is not None:
            self.lanes.post("meeting", "announcing this step", lambda: self.meeting.announce("running"), self._announced)
        if self.scontrol is not None and self.options.kill_wait_ms is None:
            scontrol = self.scontrol
            self.lanes.post("slurm", "asking KillWait", lambda: scontrol.kill_wait(CONFIG_TIMEOUT_S), self._kill_wait)
        for command in self.first:
            self._carry_out(command)

    def _timeout_ms(self) -> int:
        """Time until the next deadline; recomputed every time, never remembered."""
        times = [machine.next_deadline(self.policy, self.state)]
        if self.child is not None:
            times.append(self.sweep_at_ms)
        soonest = min((time for time in times if time is not None), default=None)
        return -1 if soonest is None else max(0, soonest - now_ms())

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _signals(self) -> None:
        for number in self.inbox.drain():
            if number == signal.SIGCHLD:
                children.reap_orphans(self.claims)
                continue
            meaning = self._meaning(number)
            if meaning is None:
                continue
            self.signalled = True
            self.sweep_at_ms = 0  # What the same broadcast left pending below us is to be known as such.
            self.feed(ev.SignalCame(signal_name(number), meaning))

    def _meaning(self, number: int) -> ev.Meaning | None:
        if number == signal.SIGINT:
            return ev.Meaning.INTERRUPT
        if number in self.options.save_signals:
            return ev.Meaning.SAVE
        if number in self.options.notice_signals:
            return ev.Meaning.NOTICE if self.policy.slurm else ev.Meaning.LEAVE
        if number in (signal.SIGTERM, signal.SIGHUP):
            return ev.Meaning.LEAVE
        return None

    def _words(self) -> None:
        for word in self.transport.receive():
            if isinstance(word, Garbage):
                if word.first:
                    self._log(Entry("garbage", "warning", {"peer": word.peer, "reason": word.reason}))
                continue
            self.feed(word)
            if isinstance(word, wire.Hello) and word.who.pid not in self.rank_fds and self.state.rank(word.who) is not None:
                self._watch(word.who.pid)

    def _watch(self, pid: int) -> None:
        """Learn of this rank's end by its pidfd. A pid of another namespace is not ours to watch: its silence will tell."""
        if not children.is_descendant(pid):
            return
        fd = children.pidfd(pid)
        if fd is not None:
            self.rank_fds[pid] = fd
            self.poller.register(fd, zmq.POLLIN)

    def _ended(self, ready: Mapping[Any, int]) -> None:
        for pid, fd in list(self.rank_fds.items()):
            if fd in ready:
                self.poller.unregister(fd)
                os.close(fd)
                del self.rank_fds[pid]
                self.feed(ev.RankGone(pid, "its process has ended"))
        child = self.child
        if child is None or child.pidfd not in ready:
            return
        code = child.status()
        if code is not None:
            self.poller.unregister(child.pidfd)
            child.close()
            self.child = None
            self.feed(ev.CommandExited(code))

    def _sweep(self) -> None:
        """Complete terminations that the shield holds up; while a notice is in force only note what is from outside."""
        now = now_ms()
        if now < self.sweep_at_ms or self.child is None:
            return
        quiet = self.state.notice is None and not self.signalled
        self.signalled = False
        began_us = time.monotonic_ns() // 1_000
        for pid in self.shield.sweep(children.descendants(self.claims), now, quiet=quiet):
            self._log(Entry("termination_completed", "info", {"pid": pid}))
        self.sweep_at_ms = now + max(SWEEP_MS, next_sweep_ms(time.monotonic_ns() // 1_000 - began_us))

    # --- what goes out --------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.Say(pid=pid, word=word):
                self.transport.send(pid, word)
            case do.LookUp(why=why):
                self._look(why)
            case do.Verify():
                self._verify(command)
            case do.Commit():
                self._commit(command)
            case do.DropPartial(partial=partial):
                self.lanes.post("prune", "dropping a partial", lambda: disk.drop(self.options.dir, partial), self._dropped)
            case do.Prune():
                resumed = self.state.resume_step
                self.lanes.post("prune", "pruning", lambda: disk.prune(self.options, resumed), self._pruned)
            case do.StartCommand(restart=restart):
                self._restart(restart)
            case do.EndCommand():
                self._end_command()
            case do.Meet():
                self.lanes.post("meeting", "meeting the other steps", self.meeting.meet, self._met)
            case do.CallRequeue():
                self._requeue()
            case do.Exit(code=code, line=line):
                self.exit = (code, line)

    def _look(self, why: str) -> None:
        scontrol = self.scontrol
        if scontrol is None:
            self.feed(ev.Looked(NoView("scontrol was not found", definite=True), why))
            return

        def looked(view: Any) -> None:
            if isinstance(view, Broken):
                view = NoView(f"{view.what}: {view.error}", definite=False)
            if why == "start" and isinstance(view, JobView):
                self._warn(startup.job_warnings(view.requeue, view.batch, self.policy.requeue == "auto"))
            self.feed(ev.Looked(view, why))

        self.lanes.post("slurm", "looking at the job", lambda: scontrol.show_job(LOOK_TIMEOUT_S), looked)

    def _requeue(self) -> None:
        scontrol = self.scontrol
        assert scontrol is not None

        def returned(result: Any) -> None:
            if isinstance(result, Broken):
                self.feed(ev.RequeueReturned(ev.RequeueResult.UNKNOWN, f"{result.what}: {result.error}"))
            else:
                self.feed(ev.RequeueReturned(ev.RequeueResult[result.kind.upper()], result.reason))

        self.lanes.post("slurm", "requeue", lambda: scontrol.requeue(REQUEUE_TIMEOUT_S), returned)

    def _verify(self, command: do.Verify) -> None:
        mode = "full" if command.full else "structure"

        def verified(result: Any) -> None:
            if isinstance(result, Broken):
                self.feed(ev.Verified(command.round, mode, f"{result.what}: {result.error}", 0))
                return
            problem, count, self.entries[command.round] = result
            self.feed(ev.Verified(command.round, mode, problem, count))

        self.lanes.post("store", "verifying", lambda: disk.check(command), verified)

    def _commit(self, command: do.Commit) -> None:
        entries = self.entries.pop(command.round, ())
        created = datetime.now(timezone.utc).isoformat(timespec="microseconds")

        def committed(result: Any) -> None:
            if isinstance(result, Broken):
                result = (ev.CommitResult.FAILED, f"{result.what}: {result.error}")
            self.feed(ev.Committed(command.round, command.step, *result))

        work = lambda: disk.commit(self.options.dir, self.job, self.epoch, command, entries, created)  # noqa: E731
        self.lanes.post("store", "committing", work, committed)

    def _end_command(self) -> None:
        self._kill_all()
        if self.child is None and self.state.code is None:
            self.feed(ev.CommandExited(128 + signal.SIGKILL))  # It had not been started yet.

    def _kill_all(self) -> None:
        """End every process below us, but not a scontrol that is just at work for us."""
        killed = children.end_all(signal.SIGKILL, self.claims)
        if killed:
            self._log(Entry("killed", "info", {"pids": killed}))
        children.reap_orphans(self.claims)

    # --- results ----------------------------------------------------------------------------------------------------------

    def _chosen(self, resume: Any) -> None:
        if isinstance(resume, Broken):
            resume = Resume("", -1, (), f"{self.options.dir} cannot be looked at: {resume.error}")
        for line in resume.lines:
            say(line)
            self._log(Entry("passed_over", "warning", {"text": line}))
        if resume.refusal and self.exit is None:
            self._log(Entry("refused", "error", {"text": resume.refusal}))
            self.exit = (EXIT_STALE, resume.refusal)
            return
        self.policy = dataclasses.replace(self.policy, resume_from=resume.path, resume_step=resume.step)
        self.state = dataclasses.replace(
            self.state,
            resume_from=resume.path,
            resume_step=resume.step,
            committed_step=max(self.state.committed_step, resume.step),
        )
        if self.state.phase is Phase.RUNNING and self.exit is None:
            self._start(resume, 0)

    def _start(self, resume: Resume, restart: int) -> None:
        argv = startup.command_line(self.options.command, self.options.resume_arg, resume.path)
        env = {
            **self.env,
            "CKPT_SUPERVISE_SOCKET": self.transport.endpoint,
            "CKPT_SUPERVISE_RESUME_FROM": resume.path,
            "CKPT_SUPERVISE_DIR": str(self.options.dir),
            "CKPT_SUPERVISE_PID": str(os.getpid()),
            "CKPT_SUPERVISE_RESTART": str(restart),
            "CKPT_SUPERVISE_TAG": f"{self.job.name}.{self.job.step_id}.{self.epoch}",
        }
        blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *self.options.notice_signals, *self.options.save_signals}
        started = children.start(argv, env, blocked=blocked, claims=self.claims, own_group=not self.policy.slurm)
        if isinstance(started, children.NotStarted):
            say(started.reason)
            self._log(Entry("command_not_started", "error", {"reason": started.reason, "code": started.code}))
            self.feed(ev.CommandExited(started.code))
            return
        self.child = started
        self.poller.register(started.pidfd, zmq.POLLIN)
        fields = {"command": argv, "command_pid": started.pid, "resume_from": resume.path, "resume_step": resume.step}
        self._log(Entry("command_started", "info", {**fields, "restart": restart, "dir": str(self.options.dir)}))

    def _restart(self, restart: int) -> None:
        """Start again in place from the newest intact checkpoint."""

        def chosen(resume: Any) -> None:
            if isinstance(resume, Broken) or resume.refusal:
                resume = Resume(self.state.resume_from, self.state.resume_step, ())
            if self.state.phase is Phase.RUNNING and self.exit is None:
                say(f"the command failed; starting it again in place ({restart} of {self.options.restarts})")
                self._start(resume, restart)

        self._kill_all()
        self.lanes.post("store", "choosing a checkpoint", lambda: disk.choose(self.options, self.epoch, None), chosen)

    def _kill_wait(self, found: Any) -> None:
        if isinstance(found, int) and found > 0:
            self.policy = dataclasses.replace(self.policy, kill_wait_ms=found)
            self._log(Entry("kill_wait", "info", {"kill_wait_ms": found}))

    def _met(self, verdict: Any) -> None:
        if isinstance(verdict, Broken):
            verdict = MeetVerdict(True, f"{verdict.what}: {verdict.error}")
        self.feed(ev.Met(verdict.ready, verdict.reason))

    def _announced(self, problem: Any) -> None:
        if problem:
            text = f"the state directory cannot be used ({problem}): ckptctl will not find this job by its number"
            say(text)
            self._log(Entry("warning", "warning", {"text": text}))

    def _opened(self, problem: Any) -> None:
        if problem:
            say(f"the journal cannot be written: {problem}")

    def _dropped(self, problem: Any) -> None:
        if problem:
            self._log(Entry("partial_not_dropped", "warning", {"reason": str(problem)}))

    def _pruned(self, result: Any) -> None:
        if isinstance(result, Broken):
            self._log(Entry("prune_failed", "warning", {"reason": str(result.error)}))
        elif result.names or result.problems:
            self._log(Entry("pruned", "info", {"removed": list(result.names), "problems": list(result.problems)}))

    def _warn(self, lines: list[str]) -> None:
        for line in lines:
            say(line)
            self._log(Entry("warning", "warning", {"text": line}))

    def _log(self, entry: Entry) -> None:
        stamp = self.journal.stamp()
        self.lanes.post("journal", "journal", lambda: self.journal.write(entry.event, entry.level, stamp, entry.fields), _ignore)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def _end(self) -> int:
        assert self.exit is not None
        code, line = self.exit
        self._kill_all()
        if line and (code != 0 or self.state.notice is not None):
            say(line)
        if self.job.slurm is not None:
            self.lanes.post("meeting", "withdrawing", self.meeting.withdraw, _ignore)
        self._flush()
        return code

    def _flush(self) -> None:
        """Let the journal be written, within a bound."""
        flushed: list[bool] = []
        for lane in ("meeting", "journal"):
            self.lanes.post(lane, "flush", lambda: None, lambda _: flushed.append(True))
        end = now_ms() + FLUSH_MS
        while len(flushed) < 2 and now_ms() < end:
            self.poller.poll(max(0, end - now_ms()))
            self.inbox.drain()
            self.lanes.deliver()

    def emergency(self) -> int:
        """After a fault of our own: end the command, and bring the job back if it was being interrupted and not cancelled."""
        self._kill_all()
        if self.state.notice is None or not self.policy.slurm or self.scontrol is None or self.policy.requeue != "auto":
            return EXIT_SOFTWARE
        view = self.scontrol.show_job(LOOK_TIMEOUT_S)
        if isinstance(view, JobView) and read(view, self.policy, now_ms(), None).cause is not Cause.CANCELLED:
            say(f"requeue after the error: {self.scontrol.requeue(REQUEUE_TIMEOUT_S).kind}")
            return EXIT_STALE
        return EXIT_SOFTWARE


def say(line: str) -> None:
    """One line on stderr. A broken stderr never stops a save."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno() if sys.stderr is not None else 2, f"ckpt-supervise: {line}\n".encode())


def now_ms() -> int:
    """The one clock: monotonic, whole milliseconds."""
    return time.monotonic_ns() // 1_000_000


def progress_line() -> Any:
    """A progress line on stderr for a long look at the start, at most once a second."""
    told = [now_ms()]

    def progress(done: int, total: int) -> None:
        if now_ms() - told[0] >= 1_000:
            told[0] = now_ms()
            say(f"verifying the newest checkpoint: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return progress


def signal_name(number: int) -> str:
    """SIGTERM and its like; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _ignore(_: Any) -> None:
    return None


