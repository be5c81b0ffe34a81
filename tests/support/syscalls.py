"""Records the system calls of a program with strace, or makes some of them fail, wait or kill.

Owns: the command line of strace, and its text as data. A call that strace makes fail is not carried out: that is the file system
with faults that the store's tests need, without a kernel module and without pretending anything inside the program.
Must not: know what the calls are for. Where strace cannot be used the tests are skipped with the reason; with CI=true in the
environment that is a failure.
"""

from __future__ import annotations

import ast
import errno
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

CHANGING = (
    "open", "openat", "openat2", "creat", "close", "write", "pwrite64", "writev", "pwritev", "pwritev2", "lseek", "ftruncate",
    "truncate", "fallocate", "copy_file_range", "sendfile", "splice", "fsync", "fdatasync", "sync_file_range", "sync", "syncfs",
    "msync", "mmap", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "symlink", "symlinkat",
    "link", "linkat", "ioctl", "flock", "fcntl", "readlink", "readlinkat",
)  # fmt: skip
"""Everything that can change a name or a byte, what locks, opens and closes, and readlink, by which a program says a word."""

SAID = "/said/"
PROGRAM_S_MAX = 150
STRING_BYTES_MAX = 1 << 20
_LINE = re.compile(r"(\d+) +(.*)")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (\S+)(?: (E[A-Z0-9]+)\b)?(.*)")
_FD = re.compile(r"(-?\d+|AT_FDCWD)(?:<(.*)>(?:\(deleted\))?)?")


class Call(NamedTuple):
    """One system call that has returned. `error` is the errno's name or "". `injected`: strace made it so."""

    name: str
    arguments: tuple[str, ...]
    result: str
    error: str
    injected: bool

    def text(self, index: int) -> str:
        """This argument's string, or the path that strace has put beside a descriptor."""
        return quoted(self.arguments[index]).decode() if self.arguments[index].startswith('"') else self.fd(index)[1]

    def fd(self, index: int) -> tuple[int, str]:
        """This argument as a descriptor (-1 for the working directory) and its path."""
        return descriptor(self.arguments[index])


def quoted(argument: str) -> bytes:
    """A C string of strace as bytes. Raises ValueError if strace has cut it."""
    if not argument.endswith('"'):
        raise ValueError(f"cut by strace: {argument[-40:]}")
    value = ast.literal_eval("b" + argument)
    assert isinstance(value, bytes)
    return value


def descriptor(word: str) -> tuple[int, str]:
    """`3</tmp/x>` as number and path."""
    match = _FD.fullmatch(word)
    if match is None:
        raise ValueError(f"no descriptor: {word}")
    return -1 if match[1] == "AT_FDCWD" else int(match[1]), match[2] or ""


def say(word: str) -> None:
    """Called by the program: put a word among its system calls."""
    try:
        Path(SAID + word).readlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


@functools.cache
def why_no_strace() -> str:
    """Why strace cannot be used here, "" if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (as root: python3 deploy/lab/lab.py install)"
    done = subprocess.run(
        ["strace", "-f", "-o", os.devnull, "-e", "trace=rmdir", "-e", "inject=rmdir:error=EIO:when=1", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "" if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:200]}"


def need_strace() -> None:
    """Strace is here, or the test ends here."""
    need(why_no_strace())


def need(reason: str) -> None:
    """Skip with this reason, unless it is "". In CI everything is there, so that it is a failure."""
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def traced(out: Path, calls: Sequence[str], inject: Sequence[str] = (), only: Sequence[str | Path] = ()) -> list[str]:
    """The words before a command that make strace record these calls into `out`.

    `inject`: as strace's option of that name. `only`: calls that are about one of these paths; others are neither recorded nor
    counted nor changed.
    """
    names = ",".join(f"?{name}" for name in calls)
    words = ["strace", "-f", "-y", "-o", str(out), "-s", str(STRING_BYTES_MAX), "-e", f"trace={names}", "-e", "signal=none"]
    if not only:
        words.append("--seccomp-bpf")  # the program runs at full speed between the calls asked for
    for path in only:
        words += ["-P", str(path)]
    for what in inject:
        words += ["-e", f"inject={what}"]
    return words


def run(
    program: Path,
    words: Sequence[object],
    out: Path,
    calls: Sequence[str] = CHANGING,
    inject: Sequence[str] = (),
    only: Sequence[Path] = (),
) -> tuple[list[Call], str]:
    """Run a Python program under strace to its end; its calls and its stdout. Raises AssertionError unless it ends with 0."""
    argv = [*traced(out, calls, inject, only), sys.executable, str(program), *map(str, words)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=PROGRAM_S_MAX, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    return list(parsed(out)), done.stdout


def environment() -> dict[str, str]:
    """That of a program which imports from the tests."""
    paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def parsed(out: Path) -> Iterator[Call]:
    """The calls in a file of strace, in the order in which they returned."""
    begun: dict[str, str] = {}
    with out.open(errors="surrogateescape") as lines:
        for line in lines:
            match = _LINE.match(line.rstrip("\n"))
            assert match is not None, line
            pid, text = match[1], match[2]
            if text.endswith(_UNFINISHED):
                begun[pid] = text.removesuffix(_UNFINISHED)
                continue
            if (resumed := _RESUMED.match(text)) is not None:
                text = begun.pop(pid) + resumed[1]
            if (call := _CALL.fullmatch(text)) is not None:
                name, arguments, result, error, rest = call.groups()
                yield Call(name, tuple(_split(arguments)), result, error or "", "(INJECTED)" in rest)


def _split(arguments: str) -> Iterator[str]:
    """Arguments apart: commas in strings, paths, sets and structures do not count."""
    depth = start = 0
    is_quoted = False
    at = 0
    while at < len(arguments):
        character = arguments[at]
        if is_quoted:
            at += character == "\\"
            is_quoted = character != '"'
        elif character == '"':
            is_quoted = True
        elif character in "<[{(":
            depth += 1
        elif character in ">]})":
            depth -= 1
        elif character == "," and depth == 0:
            yield arguments[start:at].strip()
            start = at + 1
        at += 1
    if arguments[start:].strip():
        yield arguments[start:].strip()
