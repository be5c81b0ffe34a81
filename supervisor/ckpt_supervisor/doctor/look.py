"""Runs what may hang or start slowly in children with a bound: the probe of the directory, and the `python` on PATH.

Also looks at the places for the ranks' socket and at what is installed. Owns the bounds. Must not judge. A child that hangs on a
dead file system is killed, and left to whoever reaps orphans if even that does not end it: the doctor itself never hangs.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ckpt_supervisor.doctor.facts import Place, Temporary, Versions

PROBE_TIMEOUT_S = 20.0
PYTHON_TIMEOUT_S = 10.0
PLACE_TIMEOUT_S = 3.0
TELL_AFTER_S = 1.0
OUTPUT_BYTES_MAX = 1 << 20

SOCKET_CHARS = len("/ckpt-xxxxxxxx/s")
"""What adapters/transport.py adds to the place."""

LIBRARIES = ("pyzmq", "msgspec", "torch")
ASK_PYTHON = """
import sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""

Tell = Callable[[str], None]


def probe(path: Path, tell: Tell, timeout_s: float = PROBE_TIMEOUT_S) -> Place:
    """What the probe found, as far as it came within its time."""
    argv = [sys.executable, "-m", "ckpt_supervisor.doctor.probe", str(path)]
    output, ended = _bounded(argv, timeout_s, lambda: tell(f"still looking at {path}"))
    lines = [line for line in output.split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
    if not lines:
        return Place(str(path), exists=False, looked_at=str(path), problem="the look at it could not be started")
    place = msgspec.json.decode(lines[-1], type=Place)
    if ended is None:
        return msgspec.structs.replace(place, problem=f"{place.problem}: no answer within {timeout_s:.0f} s")
    return msgspec.structs.replace(place, problem=f"{place.problem}: the look ended with {ended}") if ended else place


def _bounded(argv: list[str], timeout_s: float, slow: Callable[[], None]) -> tuple[bytes, int | None]:
    """What it prints, and its exit status; None when it had to be killed. `slow` is called once if it takes long."""
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    began = time.monotonic()
    output, told, is_open = bytearray(), False, True
    while is_open and (left_s := began + timeout_s - time.monotonic()) > 0:
        pause_s = left_s if told else min(left_s, TELL_AFTER_S)
        if poll.poll(max(1, int(pause_s * 1000))):
            part = os.read(child.stdout.fileno(), 65_536)
            is_open = bool(part) and len(output) < OUTPUT_BYTES_MAX
            output += part
        elif not told:
            told = True
            slow()
    child.stdout.close()
    if is_open:
        child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    return bytes(output), None if is_open else child.returncode


def temporaries(env: Mapping[str, str]) -> list[Temporary]:
    """The places where the ranks' socket may be, the best first, each looked at with a bound of its own."""
    from ckpt_supervisor.adapters.transport import places  # Here: every `ckptctl` would wait for zmq.

    return [_within(path, number == 0) for number, path in enumerate(places(env)) if path]


def _within(path: str, is_first: bool) -> Temporary:
    answer: list[Temporary] = []
    thread = threading.Thread(target=lambda: answer.append(_temporary(path, is_first)), daemon=True)
    thread.start()
    thread.join(PLACE_TIMEOUT_S)
    return answer[0] if answer else Temporary(path, is_first, f"no answer within {PLACE_TIMEOUT_S:.0f} s")


def _temporary(path: str, is_first: bool) -> Temporary:
    try:
        seen = os.stat(path)  # noqa: PTH116 - links followed.
    except OSError as error:
        return Temporary(path, is_first, error.strerror or str(error))
    if not stat.S_ISDIR(seen.st_mode):
        return Temporary(path, is_first, "is no directory")
    from ckpt_supervisor.adapters.transport import PATH_BYTES_MAX

    length = len(os.fsencode(Path(path).absolute())) + SOCKET_CHARS
    if length > PATH_BYTES_MAX:
        return Temporary(path, is_first, f"a socket there has a path of {length} bytes, and {PATH_BYTES_MAX} are the most")
    if not os.access(path, os.W_OK | os.X_OK):
        return Temporary(path, is_first, "is not writable")
    volume = os.statvfs(path)
    if volume.f_files and volume.f_favail == 0:
        return Temporary(path, is_first, "no more files can be made there (inodes)")
    sticky, shared = seen.st_mode & stat.S_ISVTX, seen.st_mode & 0o022
    if seen.st_uid not in (0, os.geteuid()):
        return Temporary(path, is_first, is_open=not sticky, owner=f"it belongs to uid {seen.st_uid}")
    owner = f"mode {seen.st_mode & 0o7777:04o}, writable for others and not sticky"
    return Temporary(path, is_first, is_open=bool(shared) and not sticky, owner=owner)


def versions(env: Mapping[str, str]) -> Versions:
    """What is installed here, and in the `python` on PATH if that is another one."""
    here = {name: version for name in LIBRARIES if (version := _version(name))}
    ours = ".".join(map(str, sys.version_info[:3]))
    package = _version("ckpt-supervise") or "not installed"
    found = shutil.which("python", path=env.get("PATH")) or shutil.which("python3", path=env.get("PATH"))
    if found is None or os.path.realpath(Path(found).parent) == os.path.realpath(Path(sys.executable).parent):
        return Versions(ours, package, here)
    output, ended = _bounded([found, "-c", ASK_PYTHON, "ckpt-supervise", *LIBRARIES], PYTHON_TIMEOUT_S, lambda: None)
    pairs = (line.split(" ", 1) for line in output.decode(errors="replace").splitlines())
    theirs = {pair[0]: pair[1] for pair in pairs if len(pair) == 2} if ended == 0 else None
    return Versions(ours, package, here, found, theirs)


def _version(name: str) -> str:
    from importlib import metadata  # Here: 20 ms, for this command alone.

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
