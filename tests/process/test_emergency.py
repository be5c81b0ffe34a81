"""After a fault of the supervisor's own: the job is brought back by the same rules as always."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckpt_supervisor import emergency
from ckpt_supervisor.adapters.signals import SignalInbox
from ckpt_supervisor.adapters.slurm import Scontrol
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core.history import History

from tests.support.core_story import IN_SLURM, Story

RECORD = """JobId=77 JobName=train
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:10:00 TimeLimit=1-00:00:00 TimeMin=N/A
   StartTime=1800000000 EndTime=1900000000 Deadline=N/A
"""


def calls_after(directory: Path, story: Story) -> tuple[int, list[str]]:
    """The exit status in this state, and what scontrol was asked for."""
    record, log, program = directory / "record", directory / "calls", directory / "scontrol"
    record.write_text(RECORD)
    log.touch()
    program.write_text(f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" = show ] && cat {record}\nkill -TERM {os.getpid()}\nexit 0\n')
    program.chmod(0o700)
    with SignalInbox(set()) as inbox:
        scontrol = Scontrol(str(program), "77", os.environ)
        code = emergency.bring_back(scontrol, story.policy, story.state, inbox, lambda: story.now)
    return code, log.read_text().split()


@pytest.mark.parametrize(("stalled", "calls"), [(0, ["show", "requeue"]), (10, [])])
def test_a_fault_of_ours_in_every_attempt_is_stopped_by_the_brake(tmp_path: Path, stalled: int, calls: list[str]) -> None:
    """A supervisor that fails at each notice would else have the job requeued for ever."""
    story = Story(IN_SLURM, 1)
    story.feed(ev.Recalled(History(stalled=stalled)))
    story.wait(61_000)
    story.signal("SIGTERM")
    assert calls_after(tmp_path, story) == (emergency.EXIT_STALE, calls)
