"""Makes a training loop answer its supervisor: `for step in ckpt.steps(total, model=model, optimizer=optimizer)`.

Owns the names that training code uses, nothing else. Without a supervisor all of them are a plain loop. They are imported when
first used, since the supervisor imports `ckpt_client.wire` and must not pay for the rest (30 ms of its start).

One thing happens on import, in a supervised process only: the shield stands, before training code makes its first loader worker
(docs/decisions/0010). Not in a supervisor below another one, which has to hear these signals.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_client.attachment import Preempted
    from ckpt_client.hook import Hook, attach, resume
    from ckpt_client.loop import Loop, steps

__all__ = ["Hook", "Loop", "Preempted", "attach", "resume", "steps"]

_HOMES = {
    "Hook": "hook",
    "Loop": "loop",
    "Preempted": "attachment",
    "attach": "hook",
    "resume": "hook",
    "steps": "loop",
}


if "CKPT_SUPERVISE_SOCKET" in os.environ and "ckpt_supervisor" not in sys.modules:
    from ckpt_client import shield

    shield.stand_early(os.environ)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt_client.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
