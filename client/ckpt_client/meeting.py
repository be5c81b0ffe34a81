"""The meeting of a training process with its supervisor: Hello until Welcome, and what is known from then on.

Owns the terms: who this process is and what it resumes from. Must not read `os.environ` (the environment is handed in) nor
fail: a supervisor that is absent, silent, or says no leaves a training that runs on by itself, with one line on stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import zmq

from ckpt_client import above, identity, progress, shield, wire
from ckpt_client.attachment import Attachment, Saver, gil_is_off
from ckpt_client.channel import HELLO_MAX_MS, Line, greet, now_ms, open_line, tell
from ckpt_client.identity import Identity
from ckpt_client.protocol import Rank
from ckpt_client.wire import Who

MADE_UP_PID_BITS = 48
"""Random bits of the pid of a process whose own means nothing to its supervisor: no two are alike, and JSON's numbers hold it."""


class Meeting(NamedTuple):
    """What came of it. Without a supervisor all but `identity` is empty."""

    identity: Identity
    attachment: Attachment | None = None
    resume_from: str = ""
    resume_step: int = 0


class Wish(NamedTuple):
    """What the training code asked for. `start`: its first boundary on a fresh run, None for the one after step 1.

    `sharded`: the state is spread over the ranks; or a function that looks, called only where there is a supervisor to tell.
    """

    make_saver: Callable[[Identity], Saver]
    start: int | None
    sharded: bool | Callable[[Identity], bool]


# The meetings of this process, one at most: a process has one place in training.
_held: list[tuple[int, Meeting]] = []


def meet(environment: Mapping[str, str], wish: Wish) -> Meeting:
    """Meet the supervisor that the environment names, once in the life of a process."""
    who = identity.identify(environment, identity.torch_distributed())
    endpoint = environment.get("CKPT_SUPERVISE_SOCKET", "")
    if not endpoint:
        return Meeting(who)
    if _held:
        # Forked children are silent; a second loop of the same process is told so.
        if _held[0][0] == os.getpid():
            tell("only the first steps() or attach() of a process is supervised; this one just runs")
        return Meeting(who)
    meeting = _meet(endpoint, environment, who, wish)
    _held.append((os.getpid(), meeting))
    return meeting


def held() -> Meeting | None:
    """The meeting of this process, None before it."""
    return _held[0][1] if _held else None


def _meet(endpoint: str, environment: Mapping[str, str], who: Identity, wish: Wish) -> Meeting:
    if gil_is_off():
        tell("this Python runs without the GIL, which the agreement on a step relies on: training on without supervision")
        return _alone(environment, who)
    missing = _socket_missing(endpoint)
    if missing:
        tell(f"{missing}: rank {who.rank} trains on without supervision")
        return _alone(environment, who)
    own_pid, supervisor_pid = pids(environment)
    me = Who(who.rank, who.generation, own_pid)
    # Before Hello, which says it (rule 10). What raises here is for the training code to see.
    sharded = wish.sharded(who) if callable(wish.sharded) else wish.sharded
    try:
        line = open_line(endpoint, own_pid, supervisor_pid)
    except (zmq.ZMQError, OSError) as error:
        tell(f"cannot reach the supervisor at {endpoint!r} ({error}): training on without supervision")
        return _alone(environment, who)
    hello = wire.Hello(me, wire.VERSION, who.world_size, who.local_rank, sharded)
    answer = greet(line, hello, HELLO_MAX_MS)
    if not isinstance(answer, wire.Welcome) or answer.version != wire.VERSION:
        tell(f"{_why_not(answer)}: rank {who.rank} trains on without supervision")
        line.close(0)
        return _alone(environment, who)
    shield.stand(environment)
    with contextlib.ExitStack() as undo:
        undo.callback(line.close, 0)
        meeting = _welcomed(line, me, who, wish, answer, progress.every_ms(environment))
        undo.pop_all()
    return meeting


def pids(environment: Mapping[str, str]) -> tuple[int, int]:
    """The pids of this process and of its supervisor, as names and to watch.

    In a container with a pid namespace of its own pids mean nothing to the supervisor: two ranks may both be process 2, or have
    the number of a stranger outside. There the name is made up, no pid that a system gives, and the supervisor not watched (0).
    """
    theirs = environment.get("CKPT_SUPERVISE_PIDNS", "")
    if theirs and theirs != above.pid_namespace():
        return wire.PID_SYSTEM_MAX + 1 + secrets.randbits(MADE_UP_PID_BITS), 0
    return os.getpid(), above.supervisor_pid(environment)


def _socket_missing(endpoint: str) -> str:
    """What is wrong where the socket is not to be seen, else "". Connecting would wait for it in silence."""
    if not endpoint.startswith("ipc://"):
        return ""
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        path.stat()
    except FileNotFoundError:
        return (
            f"the supervisor's socket {path} is not here: either it has ended, or this is a container that does not see the "
            f"directory; bind-mount {path.parent} into it (apptainer exec --bind {path.parent} ...)"
        )
    except OSError as error:
        return f"cannot reach the supervisor's socket {path} ({error.strerror})"
    return ""


def _alone(environment: Mapping[str, str], who: Identity) -> Meeting:
    """Without supervision, but from where the command was started to continue."""
    path = environment.get("CKPT_SUPERVISE_RESUME_FROM", "")
    return Meeting(who, None, path, step_of(path))


def _welcomed(line: Line, me: Who, who: Identity, wish: Wish, welcome: wire.Welcome, progress_ms: int) -> Meeting:
    done = welcome.resume_step if welcome.resume_from else wish.start or 0
    # With attach() the first boundary is the one after the first step; with steps() it is before it.
    start = done + 1 if wish.start is None else done
    rank = Rank(me, start, done_steps=done)
    rank.hear(welcome, now_ms())
    attachment = Attachment(rank, line, wish.make_saver(who))
    attachment.begin(progress_ms)
    return Meeting(who, attachment, welcome.resume_from, welcome.resume_step)


def _why_not(answer: wire.Welcome | wire.Refused | None) -> str:
    if answer is None:
        return f"the supervisor has not answered for {HELLO_MAX_MS // 1000} s, or is gone"
    if isinstance(answer, wire.Refused):
        return f"the supervisor refused: {answer.reason}"
    return f"the supervisor speaks version {answer.version} of the protocol, this is version {wire.VERSION}"


def step_of(path: str) -> int:
    """The step that a committed checkpoint's name says, 0 for no path."""
    if not path:
        return 0
    name = re.search(r"step-(\d+)/*$", path)
    if name is None:
        raise ValueError(f"CKPT_SUPERVISE_RESUME_FROM={path!r} does not name a checkpoint (step-N)")
    return int(name[1])
