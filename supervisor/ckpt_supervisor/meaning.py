"""What the number of a signal asks for, by the options. Never why it came: the number does not tell (docs/slurm.md, section 1).

Pure.
"""

from __future__ import annotations

import signal

from ckpt_supervisor.config import Options
from ckpt_supervisor.core.events import Meaning


def meaning_of(number: int, options: Options, *, slurm: bool) -> Meaning | None:
    """None for one that asks for nothing, such as SIGCONT. `slurm`: a notice may announce an end that Slurm knows."""
    if number == signal.SIGINT:
        return Meaning.INTERRUPT
    if number in options.save_signals:
        return Meaning.SAVE
    notice = Meaning.NOTICE if slurm else Meaning.LEAVE
    if number in options.notice_signals:
        return notice
    if number in (signal.SIGTERM, signal.SIGHUP):
        return Meaning.LEAVE
    return notice if number == options.pass_signal else None
