"""What earlier attempts came to, as far as decisions rest on it.

Plain data, no behaviour: start/history.py reads it from the journals (and manifests) of a directory. Attempts are counted
there, never by SLURM_RESTART_COUNT, which counts restarts of every kind and is unset at first (field case 54).
"""

from __future__ import annotations

import dataclasses

SAVES_MAX = 5
"""Of so many saves, the newest ones, it is told how long they took."""


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """What came before this start. Times in ms."""

    timeouts: int = 0
    """Attempts of this job that its time limit has ended."""
    crashes: int = 0
    """Attempts of this job that were requeued since training had failed by itself."""
    stalled: int = 0
    """Attempts of this job in a row, the last one among them, that had their time and committed nothing newer than they resumed
    from."""
    saves_ms: tuple[int, ...] = ()
    """From Go to the last rank's Saved, newest first, of any job in this directory."""
    holds_ms: tuple[int, ...] = ()
    """How long training was held by each of them."""
    tried_ms: int = 0
    """How long ranks had been saving in the last saves that were given up as their time was over: it takes longer than that."""
    interruptions: int = 0
    """How often an attempt in this directory was ended by anything but a good end or a person; a failure of its own counts
    where the job came back for it."""
    ran_ms: int = 0
    """How long these attempts trained, all together."""


NONE = History()
"""This very object stands for what has not been read yet."""
