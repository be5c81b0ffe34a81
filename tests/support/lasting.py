"""A supervised toy whose command goes on after its training, until it is let go: time for what no end of a command waits for.

Owns the shell around the toy and its end. Must not know what is waited for: tests do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.run import Run, eventually, supervised, toy

OVER = "over"
STAYS = ("sh", "-c", f'"$@"; status=$?; while ! test -e {OVER}; do sleep 0.05; done; exit $status', "sh")


@contextlib.contextmanager
def lasting(files: Path, *words: object, options: Sequence[object] = ()) -> Iterator[Run]:
    """As `trained`, with a command that stays."""
    (files / OVER).unlink(missing_ok=True)
    with supervised(files, [*STAYS, *toy("--log", files / "toy.log", *words)], *options) as run:
        yield run


def let_go(run: Run, fact: Callable[[], object], what: str) -> int:
    """Training is over, the fact has come to hold, and the command may end; the supervisor's status."""
    run.said(r"^exit rank \d+ ")
    eventually(fact, f"{what}{run.story()}", over=lambda: run.process.poll() is not None)
    (run.files / OVER).touch()
    return run.code()
