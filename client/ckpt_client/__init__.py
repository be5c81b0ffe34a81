"""Makes a training loop answer its supervisor: `for step in ckpt.steps(total, model=model, optimizer=optimizer)`.

Owns the names that training code uses, nothing else. Without a supervisor all of them are a plain loop.
"""

from ckpt_client.attachment import Preempted
from ckpt_client.hook import Hook, attach, resume
from ckpt_client.loop import Loop, steps

__all__ = ["Hook", "Loop", "Preempted", "attach", "resume", "steps"]
