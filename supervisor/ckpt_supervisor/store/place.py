"""The directory that a run has taken, told from whatever is found at its path later.

Owns one descriptor, which names the directory itself and keeps its number from being given to another one. Must not judge who
holds it (fence.py). A path alone says little: a symbolic link is pointed elsewhere, a directory is moved away, a mount goes or
another one comes on top.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckpt_supervisor.store.look import Patience


class Place:
    """Made when the directory was taken; raises OSError. `is_lost`: others were found to hold it: nothing to come back to."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._path = os.path.realpath(root)
        self._fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        seen = os.fstat(self._fd)
        self._device, self._inode = seen.st_dev, seen.st_ino
        self.is_lost = False

    def close(self) -> None:
        """Let it go."""
        os.close(self._fd)

    def may_be_taken_anew(self, root: str | os.PathLike[str]) -> bool:
        """Whether what is at its path now stands in its stead: itself, emptied, or one made after its removal. Raises OSError.

        Moved away it is somewhere else, with all that is in it. Below a mount point that has lost its mount a commit would be
        taken for safe, and never be found again.
        """
        if self.is_lost or os.path.realpath(root) != self._path:
            return False
        now = Patience().look(Path(root).stat)
        if (now.st_dev, now.st_ino) == (self._device, self._inode):
            return True
        return now.st_dev == self._device and self._is_removed()

    def _is_removed(self) -> bool:
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE  # Of NFS, where another node has removed it.
