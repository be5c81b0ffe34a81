"""What a launcher below us has to be told so that it does not end a save, and which one cannot be told.

Owns the variables for the command's environment, and why. Pure: the environment is an argument. Must not overrule what the user
has set.

torchrun (torch 2.13, elastic/multiprocessing/api.py) catches SIGTERM, SIGINT, SIGHUP and SIGQUIT; at the first of them it sends
the same to its workers and SIGKILLs them 30 s later. Below us those that Slurm sends are blocked in it as in everything, it
unblocks none, and so that clock does not start: nothing has to be said. Two variables look as if they should be set, and are not:

- PET_SIGNALS_TO_HANDLE. With SIGTERM taken out, the SIGTERM of our own teardown would end the agent and leave its workers to
  us; with SIGUSR1 put in, one that reaches everybody comes to each worker twice.
- A longer shutdown time-out in every run. It is also how long torchrun waits for workers that hang once another has crashed.

Only --pass-signal lets the clock start: the signal is not blocked then, torchrun gets it and hands it on, and its workers save.
Such a save may take as long as any other; at the deadline the supervisor itself ends all of it.

srun cannot be shielded: it waits for signals with sigwait(3), which takes blocked ones too (docs/slurm.md, section 4).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

SHUTDOWN_S = 30
"""torchrun's own default; the time-out is never made shorter."""

TIMEOUT_NAMES = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT")
"""By which torchrun takes it, where it has --shutdown-timeout at all (older ones always wait 30 s); the option wins over both."""

HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""The signals that torchrun catches unless PET_SIGNALS_TO_HANDLE names others."""

HANDLED_NAME = "PET_SIGNALS_TO_HANDLE"


def environment_for(env: Mapping[str, str], pass_signal: int | None, save_timeout_ms: int) -> dict[str, str]:
    """Variables to add to the command's. Harmless to whatever is no torchrun; torchrun itself may be deep below a shell."""
    if pass_signal is None or any(name in env for name in TIMEOUT_NAMES) or not _is_handled(env, pass_signal):
        return {}
    return {TIMEOUT_NAMES[0]: str(max(SHUTDOWN_S, -(-save_timeout_ms // 1000)))}


def _is_handled(env: Mapping[str, str], number: int) -> bool:
    names = env.get(HANDLED_NAME)
    if names is None:
        return number in HANDLED
    return number in {getattr(signal, name.strip(), None) for name in names.split(",")}


_SRUN = re.compile(r"(?:^|[\s;&|(/])srun\s")


def calls_srun(command: Sequence[str]) -> bool:
    """Whether the command, or a shell's text in it, starts a further srun; what is in a script file is not looked at."""
    return _SRUN.search(" ".join(command)) is not None
