"""The owner's own way of bringing a job back where Slurm does not requeue it: the command of --resubmit.

Owns its environment and its time. Must not decide when it is due (core/leaving.py); how it is run is in shell_command.py. Its
environment is the supervisor's without what Slurm says of the step and of restarts: sbatch would hand that on to the new job,
whose first start would take itself for the fourth one. What it leaves in the background is its own business: it may be what
submits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_supervisor.adapters.slurm import SHIELDED
from ckpt_supervisor.launch import Launch
from ckpt_supervisor.processes import shell_command

TIMEOUT_S = 15.0

OF_THE_STEP = re.compile(
    r"SLURM_(STEP.*|SRUN_.*|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|LAUNCH_.*|CPU_BIND.*|RESTART_COUNT|STEPID)|"
    r"CKPT_SUPERVISE_(SOCKET|RESUME_FROM|PID|PIDNS|RESTART|SHIELD|TAG)"
)
"""Not handed on."""


class Answer(NamedTuple):
    """What came of it: `said` is the beginning of what it printed, or why it failed."""

    accepted: bool
    said: str


def run(launch: Launch, reason: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run the command once, with `sh -c`. Accepted if it ends with 0 in time. Blocks; may run in any thread."""
    options = launch.options
    env = environment(launch.env, str(options.dir), launch.job.name, reason)
    give_up = time.monotonic() + timeout_s
    way = shell_command.Way(options.resubmit, env, launch.claims, shell_command.signals(SHIELDED))
    done = shell_command.run(way, lambda: give_up, ends_all=False)
    return Answer(not done.problem, done.problem or done.said)


def environment(env: Mapping[str, str], directory: str, job: str, reason: str) -> dict[str, str]:
    """What the command finds."""
    kept = {key: value for key, value in env.items() if not OF_THE_STEP.fullmatch(key)}
    return {**kept, "CKPT_SUPERVISE_DIR": directory, "CKPT_SUPERVISE_JOB": job, "CKPT_SUPERVISE_REASON": reason}
