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
from collections.abc import Callable, Mapping

from ckpt_supervisor import children, startup
from ckpt_supervisor.config import Options
from ckpt_supervisor.signals import SignalInbox
from ckpt_supervisor.slurm import SlurmEnv
from ckpt_supervisor.startup import Job
from ckpt_supervisor.stderr import say
from ckpt_supervisor.store import HeldByOther, take_epoch
from ckpt_supervisor.transport import NoPlace, Transport

EXIT_USAGE = 2

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
    started: tuple[list[str], Started] | None = None

    def start_command(self, resume_from: str, restart: int) -> tuple[list[str], Started]:
        """Start the command with what it is to resume from; its command line and what became of it."""
        argv = startup.command_line(self.options.command, self.options.resume_arg, resume_from)
        env = {
            **self.env,
            "CKPT_SUPERVISE_SOCKET": self.transport.endpoint,
            "CKPT_SUPERVISE_RESUME_FROM": resume_from,
            "CKPT_SUPERVISE_DIR": str(self.options.dir),
            "CKPT_SUPERVISE_PID": str(os.getpid()),
            "CKPT_SUPERVISE_RESTART": str(restart),
            "CKPT_SUPERVISE_TAG": f"{self.job.name}.{self.job.step_id}.{self.epoch}",
        }
        blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *self.options.notice_signals, *self.options.save_signals}
        return argv, children.start(argv, env, blocked=blocked, claims=self.claims, own_group=self.job.slurm is None)


def run(options: Options, env: Mapping[str, str], supervise: Callable[[Launch], int]) -> int:
    """Start the command and hand over to the loop; the exit status of docs/exit-codes.md."""
    job = startup.job_of(SlurmEnv.from_environ(env))
    refusal = startup.refusal(job)
    if refusal:
        say(refusal)
        return EXIT_USAGE
    extra = {*options.notice_signals, *options.save_signals}
    with SignalInbox(extra, last=True) as inbox, contextlib.ExitStack() as stack:
        try:
            options.dir.mkdir(parents=True, exist_ok=True)
            epoch = take_epoch(options.dir, job.name, job.attempt, job.step_id).epoch
        except HeldByOther as error:
            say(f"--dir {options.dir}: {error}; give each run a directory of its own")
            return EXIT_USAGE
        except OSError as error:
            say(f"--dir {options.dir}: {error}")
            return EXIT_USAGE
        places = [env.get("XDG_RUNTIME_DIR", ""), env.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"]  # noqa: S108 - mkdtemp inside
        try:
            transport = stack.enter_context(Transport(places))
        except NoPlace as error:
            say(str(error))
            return EXIT_USAGE
        children.become_subreaper()
        launch = Launch(options, env, job, epoch, inbox, transport, children.Claims())
        if not startup.has_checkpoints(options.dir):
            launch = dataclasses.replace(launch, started=launch.start_command("", 0))
        return supervise(launch)
