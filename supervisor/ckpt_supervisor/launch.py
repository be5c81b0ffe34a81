"""From the options to the running command: who holds the directory, where the ranks connect, and the start itself.

Owns the order of the start. Where there is nothing to resume from the command runs before the core, the journal's library and
psutil are even imported: what they cost is not added to every start of a training run. Otherwise the loop looks for a checkpoint
first, in a worker thread, and calls `start_command` when it has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ckpt_client import wire

from ckpt_supervisor.adapters import children
from ckpt_supervisor.adapters.guard import Early
from ckpt_supervisor.adapters.guard_process import fill_standard
from ckpt_supervisor.adapters.signals import SignalInbox
from ckpt_supervisor.adapters.slurm import SlurmEnv
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.adapters.transport import NoPlace, Transport, places
from ckpt_supervisor.config import Options
from ckpt_supervisor.linux import oom, procfs
from ckpt_supervisor.start import launchers, startup
from ckpt_supervisor.start.startup import Job

if TYPE_CHECKING:  # What only a step of several tasks needs is imported there: it takes time before the command's start.
    from ckpt_supervisor.adapters.links import Hub
    from ckpt_supervisor.start.leftovers import Ended
    from ckpt_supervisor.store import Place
    from ckpt_supervisor.tasks.joining import Joined

EXIT_USAGE = 2
EXIT_STALE = 76
"""As in core/policy.py, which is not imported before the command runs."""

EXIT_DONE = 0
DONE = "done.json"
"""As in start/finished.py, which is imported only where there is one."""

Started = children.Child | children.NotStarted


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """What stands before the loop begins. `started` is None while a checkpoint to resume from has to be looked for."""

    options: Options
    env: Mapping[str, str]
    job: Job
    epoch: int
    inbox: SignalInbox
    transport: Transport
    claims: children.Claims
    early: Early
    hub: Hub | None = None
    """Where the other tasks report, if there are any and this is task 0."""
    joined: Joined | None = None
    """The way to the coordinator, if this is another task."""
    files_max: tuple[int, int] | None = None
    """RLIMIT_NOFILE for the command, if it was raised for this process."""
    score: str = ""
    """The command's oom_score_adj."""
    place: Place | None = None
    """The checkpoint directory as it was when this supervisor took it; None where another one has."""
    taken_over: tuple[str, ...] = ()
    """What is to be told of another job that held the directory."""
    leftovers: Ended | None = None
    """What an earlier attempt had left running here, if it was looked for."""
    started: tuple[list[str], Started] | None = None
    started_at: tuple[int, int] | None = None
    """When that was: wall clock in ns, monotonic in ms; the loop, which has a journal, begins later."""

    def with_command(self, resume_from: str, restart: int) -> Launch:
        """The same, with the command started."""
        started = self.start_command(resume_from, restart)
        return dataclasses.replace(self, started=started, started_at=(time.time_ns(), time.monotonic_ns() // 1_000_000))

    def start_command(self, resume_from: str, restart: int) -> tuple[list[str], Started]:
        """Start the command with what it is to resume from; its command line and what became of it."""
        argv = startup.command_line(self.options.command, self.options.resume_arg, resume_from)
        env = {
            **self.env,
            **launchers.environment_for(self.env, self.options.pass_signal, self.options.save_timeout_ms),
            "CKPT_SUPERVISE_SOCKET": self.transport.endpoint,
            "CKPT_SUPERVISE_RESUME_FROM": resume_from,
            "CKPT_SUPERVISE_DIR": str(self.options.dir),
            "CKPT_SUPERVISE_PID": str(os.getpid()),
            "CKPT_SUPERVISE_PIDNS": procfs.pid_namespace(),
            "CKPT_SUPERVISE_RESTART": str(restart),
            "CKPT_SUPERVISE_TAG": self.tag,
            wire.MPI_FOUND: wire.mpi_found(self.env),
            wire.PROGRESS: str(wire.progress_ms(self.options.hang_floor_ms)),
        }
        blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *self.options.notice_signals, *self.options.save_signals}
        if self.options.pass_signal is not None:
            blocked.discard(self.options.pass_signal)  # The program's own handler is for it.
        env["CKPT_SUPERVISE_SHIELD"] = " ".join(str(int(number)) for number in sorted(blocked))
        return argv, children.start(
            argv,
            env,
            blocked=blocked,
            claims=self.claims,
            own_group=self.job.slurm is None,
            early=self.early,
            files_max=self.files_max,
            score=self.score,
        )

    @property
    def tag(self) -> str:
        """In the environment of everything below: whose it is, also when that is long dead (start/leftovers.py)."""
        me = os.getpid()
        seen = procfs.stat(me)
        ticks = 0 if seen is None else seen.started
        return f"{self.job.name}.{self.job.step_id}.{self.epoch}.{self.job.task}.{me}.{ticks}"


def run(options: Options, env: Mapping[str, str], supervise: Callable[[Launch], int]) -> int:
    """Start the command and hand over to the loop; the exit status of docs/exit-codes.md."""
    job = startup.job_of(SlurmEnv.from_environ(env))
    extra = {*options.notice_signals, *options.save_signals}
    if options.pass_signal is not None:
        extra.add(options.pass_signal)
    fill_standard()
    claims = children.Claims()
    score = str(oom.command_score(oom.protect_self()))  # First: the guard is to be protected as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Until there are handlers: it sees what we found.
    with Early(claims, before, env) as early, SignalInbox(extra, last=True) as inbox, contextlib.ExitStack() as stack:
        signal.pthread_sigmask(signal.SIG_SETMASK, before - inbox.handled)
        try:
            launch = _prepared(stack, options, env, job, (inbox, claims, early))
        except _Unfit as error:
            say(str(error))
            _leave_word(options, job, error.code, str(error))
            return error.code
        children.become_subreaper()
        launch = _alone(dataclasses.replace(launch, score=score))
        stand = None if launch.joined is None else launch.joined.start
        if stand is not None:
            launch = launch.with_command(stand.resume_from, stand.restart)
        elif launch.joined is None and not options.adopt and not startup.has_checkpoints(options.dir):
            launch = launch.with_command("", 0)
        code = supervise(launch)
        _leave_word(options, job, code, f"status {code}")
        return code


def _alone(launch: Launch) -> Launch:
    """End what an earlier attempt has left running on this node, before the command needs its GPUs. A first start has nobody."""
    if launch.epoch <= 1 and launch.job.attempt == 0 and not startup.has_checkpoints(launch.options.dir):
        return launch
    from ckpt_supervisor.start import leftovers

    return dataclasses.replace(launch, leftovers=leftovers.end(launch.job, launch.options.dir, launch.env))


def _leave_word(options: Options, job: Job, code: int, line: str) -> None:
    """For tasks of this step that have not joined: nobody is here for them any more."""
    if job.task == 0 and job.tasks > 1 and job.slurm is not None and job.slurm.srun:
        from ckpt_supervisor.adapters import rendezvous

        rendezvous.conclude(options.dir, (job.name, job.attempt, job.step_id), job.slurm.srun, rendezvous.End(code, line))


class _Unfit(Exception):
    """This run cannot start; the message says why and what to do."""

    def __init__(self, line: str, code: int = EXIT_USAGE) -> None:
        super().__init__(line)
        self.code = code


def _prepared(
    stack: contextlib.ExitStack,
    options: Options,
    env: Mapping[str, str],
    job: Job,
    ours: tuple[SignalInbox, children.Claims, Early],
) -> Launch:
    """Everything that stands before the command. Raises _Unfit."""
    inbox, claims, early = ours
    files_max = children.raise_files_max()  # Not for the guard, which is there by now, and not for the command.
    try:
        transport = stack.enter_context(Transport(places(env)))
    except NoPlace as error:
        raise _Unfit(str(error)) from error
    if job.task > 0 and job.tasks > 1:
        from ckpt_supervisor.tasks import joining

        try:
            joined = joining.join(stack, options, job, inbox)
        except joining.NotJoined as error:
            raise _Unfit(str(error)) from error
        except joining.Interrupted as error:
            raise _Unfit(str(error), EXIT_STALE) from error
        except joining.Concluded as error:
            raise _Unfit(str(error), error.code) from error
        return Launch(options, env, job, joined.epoch, inbox, transport, claims, early, joined=joined, files_max=files_max)
    if os.path.lexists(options.dir / DONE):
        from ckpt_supervisor.start import finished

        if word := finished.word(options, job):
            raise _Unfit(word, EXIT_DONE)
    # The other tasks need nothing of it before their command runs.
    from ckpt_supervisor.start.holding import Asking
    from ckpt_supervisor.store import BegunSince, HeldByOther, Place, take_epoch
    from ckpt_supervisor.store.look import Patience

    asking = Asking(env, claims, job.name, options.dir)
    try:
        Patience().look(lambda: options.dir.mkdir(parents=True, exist_ok=True))
        epoch = take_epoch(options.dir, job.name, job.attempt, job.step_id, asking, options.continues).epoch
    except BegunSince as error:
        raise _Unfit(f"--dir {options.dir}: {error}") from error
    except HeldByOther as error:
        raise _Unfit(
            f"--dir {options.dir}: {error}; give each run a directory of its own, or say --continues {error.holder.job} if "
            "this job takes over from that one"
        ) from error
    except OSError as error:
        raise _Unfit(f"--dir {options.dir}: {error}") from error
    hub = _hub(stack, options, job, epoch)
    taken_over = tuple(asking.lines)
    place = None
    with contextlib.suppress(OSError):  # What it is for may never come: no start fails for it.
        place = Place(options.dir)
        stack.callback(place.close)
    taken = Launch(options, env, job, epoch, inbox, transport, claims, early, hub, place=place, taken_over=taken_over)
    return dataclasses.replace(taken, files_max=files_max)


def _hub(stack: contextlib.ExitStack, options: Options, job: Job, epoch: int) -> Hub | None:
    if job.tasks == 1:
        return None
    from ckpt_supervisor.adapters.links import NoLink
    from ckpt_supervisor.tasks import joining

    try:
        return joining.open_hub(stack, options, job, epoch)
    except (NoLink, ValueError) as error:
        raise _Unfit(str(error)) from error
    except OSError as error:
        raise _Unfit(f"the other tasks could not find this one through --dir {options.dir}: {error}") from error
