"""`ckpt-supervise`: reads its options and hands over to the one loop.

Owns usage errors, --help and --version. Must stay thin: what it imports stands before the start of every training run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_supervisor import config

if TYPE_CHECKING:
    from ckpt_supervisor.launch import Launch

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command under supervision; the exit status of docs/exit-codes.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    if "--version" in own:
        from importlib.metadata import version

        sys.stdout.write(f"ckpt-supervise {version('ckpt-supervise')}\n")
        return 0
    if "-h" in own or "--help" in own:
        config.parser().print_help()
        return 0
    try:
        options = config.read_options(words, os.environ)
    except config.UsageError as error:
        for problem in error.problems:
            sys.stderr.write(f"ckpt-supervise: {problem}\n")
        return EXIT_USAGE
    from ckpt_supervisor import launch

    return launch.run(options, _environment(), _supervise)


def _environment() -> dict[str, str]:
    """What we were started with. Python sets LC_CTYPE where no locale is named (PEP 538): that is not for the command."""
    env = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - no pathlib before the start.
            found = file.read()
    except OSError:
        return env
    if not any(entry.startswith(b"LC_CTYPE=") for entry in found.split(b"\0")):
        env.pop("LC_CTYPE", None)
    return env


def _supervise(launched: Launch) -> int:
    """The loop, imported once the command may be running already: see launch.py."""
    from ckpt_supervisor import app

    return app.supervise(launched)


if __name__ == "__main__":
    sys.exit(main())
