"""--json of ckptctl on a run that is at work, and on the same when it is over: what comes is what docs/schemas says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ctl_stage import caller
from tests.support.run import trained
from tests.support.schemas import held


def test_a_run_is_told_while_it_trains_and_when_it_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that looks at a run or asks it, over a journal that a supervisor has written."""
    call = caller(capsys)

    def told(command: str, *words: str) -> list[dict[str, Any]]:
        said = call(command, "--dir", run.dir, "--json", *words)
        values = held(command, said.lines)
        assert values, said.err
        return values

    with trained(tmp_path, "--steps", 1_000_000) as run:
        run.reached(3)
        assert told("save", "--wait")[0]["result"] == "saved"
        assert told("save", "--every", "1h")[0]["result"] == "done"
        run.event("interval", every_ms=3_600_000)  # Written after the end of the save, which is read from the same journal.
        assert told("status")[0]["state"] == "training"
        assert told("timeline")[0]["attempts"][0]["is_running"]
        for command in ("why", "report", "ls", "show", "log"):
            told(command, *{"show": ["latest"], "why": ["--no-slurm"], "log": ["--level", "debug"]}.get(command, []))
        assert told("save", "--leave", "--wait")[0]["result"] == "saved"
        assert run.code() == 75
    assert told("save", "--wait")[0]["result"] == "refused"
    assert told("timeline")[0]["totals"]["lost_steps"] == 0
    assert told("why", "--no-slurm")[0]["cause"] == "asked to leave"
    told("report")
    told("status")
    assert {line["event"] for line in told("log", "--level", "debug")} >= {"command_started", "commit", "exit"}
