"""What a relay's journal says, derived from (event, before, after) as describe.py does for the machine.

Pure. A relay's ranks are in the coordinator's journal with every word; here is what only this task sees.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_client import wire

from ckpt_supervisor.core.between import Turned
from ckpt_supervisor.core.commands import AskCommand, EndCommand, RelayCommand, TakeOver
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.events import CommandExited, RankGone, SignalCame, Verified
from ckpt_supervisor.core.relay import Event, Relay


def describe(event: Event, before: Relay, after: Relay, commands: tuple[RelayCommand, ...]) -> Iterator[Entry]:
    """The lines for one step of a relay, in order."""
    match event:
        case SignalCame(name=name, meaning=meaning):
            yield Entry("signal", "info", {"signal": name, "meaning": meaning.value})
        case CommandExited(code=code, why=why):
            yield Entry("command_exited", "info" if code == 0 else "warning", {"code": code, **({"why": why} if why else {})})
        case RankGone(who=who, how=how):
            yield Entry("rank_gone", "info", {"rank": who.rank, "rank_pid": who.pid, "how": how})
        case Verified(round=number, verified=verified, problem=problem, bytes_read=count):
            fields = {"round": number, "mode": verified, "problem": problem, "bytes": count}
            yield Entry("verified", "warning" if problem else "info", fields)
        case wire.Hello(who=who, world_size=world, sharded=sharded) if event not in before.hellos:
            fields = {"rank": who.rank, "rank_pid": who.pid, "world_size": world, "generation": who.generation}
            yield Entry("rank_hello", "info", {**fields, "sharded": sharded})
        case Turned(reason=reason):
            yield Entry("task_refused", "error", {"of_task": after.task, "reason": reason})
        case _:
            pass
    if before.lost and not after.lost:
        yield Entry("coordinator_back", "info", {})
    if after.stand is not None and after.stand.code is not None and (before.stand is None or before.stand.code is None):
        yield Entry("exit", "info", {"code": after.stand.code, "line": "the coordinator's status"})
    for command in commands:
        match command:
            case TakeOver(reason=reason):
                yield Entry("coordinator_lost", "warning", {"reason": reason})
            case AskCommand(why=why):
                yield Entry("command_asked", "info", {"why": why})
            case EndCommand(why=why):
                yield Entry("command_ended", "info", {"why": why})
            case _:
                pass
