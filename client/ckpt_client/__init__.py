"""Makes a training loop answer its supervisor: it resumes, saves on request and periodically, and ends when told to.

The loop as one line; anything with state_dict and load_state_dict may be passed:

    import ckpt_client as ckpt

    for step in ckpt.steps(total_steps, model=model, optimizer=optimizer):
        train_step(...)

Epochs and a DataLoader(..., shuffle=True, generator=order); the order of an epoch is the same in every attempt:

    def batches(start):
        for epoch in range(start // len(loader), epochs):
            order.manual_seed(epoch)  # with a DistributedSampler: sampler.set_epoch(epoch)
            yield from itertools.islice(loader, max(0, start - epoch * len(loader)), None)

    loop = ckpt.steps(epochs * len(loader), model=model, optimizer=optimizer)
    for step, (x, y) in zip(loop, batches(loop.start)):
        train_step(x, y)

Any other loop, with functions of your own; `save(directory, step)` writes there, `load(directory)` gets a checkpoint:

    hook = ckpt.attach(save=save, load=load)  # load is called here if there is a checkpoint
    while training:
        ...
        hook.step(n)  # after step n; saves from here, and leaves from here
    hook.close()

A long evaluation: `with loop.phase("eval"):` (or `hook.phase`), and `loop.safe_point()` in it now and then.

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


def __dir__() -> list[str]:
    """For help() and completion: names that nobody has used yet are there too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt_client.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
