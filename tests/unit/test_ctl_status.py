"""`ckptctl status`, and what `ckptctl save` refuses: where a JOB leads, what is drawn, and the exit status."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.doctor.notice_rules import seconds
from ckpt_supervisor.text import time_text
from ckpt_supervisor.view.status import span_text
from ckpt_supervisor.watches import places
from ckpt_supervisor.watches.places import Home

from tests.support.ctl_stage import caller, committed, leave

TEXTS = Path(__file__).resolve().parents[1] / "support" / "proc_slurm_texts"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls ckptctl in this process, with a state directory of its own and no Slurm."""
    monkeypatch.setenv("CKPT_SUPERVISE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


def journal(root: Path, epoch: int, lines: list[dict[str, Any]], job: str = "77", step: str = "0") -> None:
    """The journal of one start of this job, a minute between its lines, an hour between starts."""
    name = f"{job}-{epoch - 1}-{step}-{epoch}-0.jsonl"
    identity = {"job": job, "attempt": epoch - 1, "step_id": step, "epoch": epoch, "task": 0, "host": "node7", "pid": 4242}
    (root / "journal").mkdir(parents=True, exist_ok=True)
    text = ""
    for minute, line in enumerate(lines):
        text += json.dumps({"ts": f"2026-01-31T{11 + epoch}:{minute:02d}:00.000000Z", "level": "info", **identity, **line}) + "\n"
    (root / "journal" / name).write_text(text)


START: list[dict[str, Any]] = [{"event": "command_started", "resume_step": -1}, {"event": "rank_hello", "rank": 0}]
PREEMPTED: list[dict[str, Any]] = [
    *START,
    {"event": "notice", "cause": "preempted"},
    {"event": "agreed", "step": 300},
    {"event": "commit", "step": 300, "result": "committed"},
    {"event": "leaving", "outcome": "fresh"},
    {"event": "requeue", "result": "accepted"},
    {"event": "exit", "code": 75, "line": "preempted; step 300 is committed; Slurm has accepted the requeue"},
]
DONE: list[dict[str, Any]] = [
    {"event": "command_started", "resume_step": 300},
    {"event": "rank_hello", "rank": 0},
    {"event": "agreed", "step": 420},
    {"event": "exit", "code": 0, "line": "training ended"},
]


def two_attempts(root: Path) -> None:
    """Preempted once, then run to its end."""
    committed(root, 300)
    journal(root, 1, PREEMPTED)
    journal(root, 2, DONE)
    leave(root, epoch=2, attempt=1)


def test_both_attempts_and_the_last_result_are_shown(call: Any, tmp_path: Path) -> None:
    """Field case 66, for people and for scripts."""
    root = tmp_path / "ckpt"
    root.mkdir()
    two_attempts(root)
    told = call("status", "--dir", root)
    assert told.code == 0
    assert told.lines[0] == "job 77 step 0  finished"
    assert re.search(r"^ +0  2026-01-31 12:00 +7m +- +300  preempted, step 300 saved, requeued$", told.out, re.MULTILINE)
    assert re.search(r"^ +1  2026-01-31 13:00 +3m +300 +-  training ended$", told.out, re.MULTILINE)
    assert re.search(r"^  [█#]+[·.]+[▓=]+  2 starts in 1h 3m, 16 % of it running$", told.out, re.MULTILINE)
    (value,) = call("status", "77", "--dir", root, "--json").values
    assert (value["state"], value["job"], value["attempt"], value["epoch"]) == ("finished", "77", 1, 2)
    assert [one["end"] for one in value["attempts"]] == ["preempted, step 300 saved, requeued", "training ended"]
    assert [one["code"] for one in value["attempts"]] == [75, 0]
    assert value["checkpoint"]["step"] == 300
    assert value["finished_steps"] == 420


def test_a_job_is_found_by_its_number_also_when_it_is_over(call: Any, tmp_path: Path) -> None:
    """Through the state directory: all of its steps, or one; an unknown one is 1, what is no job 2, a missing DIR 1."""
    for step in ("0", "1"):
        root = tmp_path / f"ckpt{step}"
        root.mkdir()
        committed(root, 300)
        journal(root, 1, DONE, step=step)
        assert places.remember(os.environ, Home("77", step, root)) == ""
    told = call("status", "77")
    assert (told.code, [line for line in told.lines if line.startswith("job")]) == (
        0,
        ["job 77 step 0  finished", "job 77 step 1  finished"],
    )
    assert call("status", "77.1").lines[0] == "job 77 step 1  finished"
    for command in ("status", "save"):
        told = call(command, "4711")
        assert (told.code, told.out) == (1, "")
        assert "no job 4711 is known in" in told.err
        assert "nor has ./checkpoints a journal of it" in told.err
        assert "say --dir DIR" in told.err
        assert call(command, "../../etc").code == 2
        assert call(command, "--dir", tmp_path / "missing").code == 1
        assert call(command, "4711", "--dir", tmp_path / "ckpt0").code == 1
        assert call(command, "--dir", tmp_path / ("x" * 300)).code == 3


def test_an_array_asks_for_an_element(call: Any, tmp_path: Path) -> None:
    """Its number alone is that of no element."""
    (tmp_path / "ckpt").mkdir()
    for element in ("9", "10"):
        places.remember(os.environ, Home(f"100_{element}", "0", tmp_path / "ckpt"))
    told = call("save", "100")
    assert told.code == 2
    assert "job 100 is an array: say 100_10, or another of its 2 elements" in told.err


def test_what_is_not_known_is_left_out_and_null(call: Any, tmp_path: Path) -> None:
    """A holder without a journal, from a host that cannot be seen: neither alive nor dead, and that is what is said."""
    root = tmp_path / "ckpt"
    root.mkdir()
    committed(root, 12)
    leave(root, host="elsewhere")
    (value,) = call("status", "--dir", root, "--json").values
    assert value["state"] == "unknown"
    assert "its process is on elsewhere and cannot be seen from here, and there is no scontrol here" in value["text"]
    assert (value["every_ms"], value["limit_at"], value["steps_per_s"], value["slurm_state"]) == (None, None, None, None)
    assert "lost" not in call("status", "--dir", root).out


def running(root: Path) -> None:
    """A start whose process is this one, so that it is seen alive."""
    committed(root, 300, created_at=datetime.now(timezone.utc).isoformat())
    lines = [
        *START,
        {"event": "recalled", "timeouts": 2, "crashes": 1, "stalled": 0, "level": "debug"},
        {"event": "interval", "every_ms": 600_000, "why": "auto", "cost_ms": 2_100, "mtbi_ms": 21_600_000},
        {"event": "look", "end_s": 4_000_000_000},
        {"event": "agreed", "step": 100},
        {"event": "commit", "step": 100, "result": "committed"},
        {"event": "round_committed", "step": 100},
        {"event": "agreed", "step": 300},
        {"event": "warning", "level": "warning", "text": "the disk \x1b[31mis slow"},
        {"event": "rank_late", "level": "warning", "rank": 3, "reason": "it did not answer"},
    ]
    holder = store.take_epoch(root, "77", 1, "0")
    journal(root, holder.epoch, lines)


def test_a_running_job_tells_speed_interval_limit_budgets_and_warnings(call: Any, tmp_path: Path) -> None:
    """Everything that its journal has; nothing of it can move a terminal's cursor."""
    root = tmp_path / "ckpt"
    root.mkdir()
    running(root)
    told = call("status", "--dir", root)
    assert told.lines[0] == "job 77 step 0  training"
    facts = {line[2:14].strip(): line[14:] for line in told.lines if line.startswith("  ")}
    assert re.fullmatch(r"300 finished when last heard of; 0\.\d+ steps/s lately, saves included", facts["steps"])
    assert facts["interval"].startswith("every 10m (auto, a save costs 2.1 s, an interruption every 6h); the next save in ")
    assert re.fullmatch(r"\d+d( \d+h)? until the time limit", facts["time left"])
    assert facts["budgets"] == "2 used for the time limit, 1 for crashes, 0 in a row without progress"
    assert facts["warnings"].endswith("the disk \\x1b[31mis slow")
    assert "rank late rank 3: it did not answer" in told.out
    assert "\x1b" not in told.out
    assert facts["checkpoint"].startswith("step 300, 0s ago, 1.5 kB") or " ago, 1.5 kB" in facts["checkpoint"]


SLURM = """#!/bin/sh
sed -e 's/JobState=[A-Z_]*/JobState={state}/' -e 's/JobId=[0-9]*/JobId=77/' {text}
"""


@pytest.mark.parametrize(
    ("state", "word", "said"),
    [
        ("COMPLETING", "ending", "is just ending"),
        ("PENDING", "waiting", "UTC, and nothing trains"),
        ("NODE_FAIL", "lost", "UTC (lost)"),
    ],
)
def test_slurm_is_asked_and_save_refuses_what_cannot_answer(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, word: str, said: str
) -> None:
    """COMPLETING is not finished; a job in the queue, and one that its node has taken with it, are told from each other."""
    root = tmp_path / "ckpt"
    root.mkdir()
    committed(root, 300)
    journal(root, 1, START)
    leave(root, epoch=1, host="elsewhere")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SLURM.format(state=state, text=TEXTS / "22.05-preempted.txt"))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (value,) = call("status", "--dir", root, "--json").values
    assert (value["state"], value["slurm_state"]) == (word, state)
    told = call("save", "77", "--dir", root, "--json")
    assert told.code == 1
    assert said in told.err
    assert told.values[0]["result"] == "refused"
    assert not list(root.glob("control/*"))


def test_a_finished_job_is_not_asked(call: Any, tmp_path: Path) -> None:
    """The line says since when, and how it has ended."""
    root = tmp_path / "ckpt"
    root.mkdir()
    two_attempts(root)
    told = call("save", "77", "--dir", root)
    assert told.code == 1
    assert told.err == (
        "ckptctl: not asked: job 77 step 0 has not run since 2026-01-31 13:03:00 UTC (finished): training ended\n"
    )


@pytest.mark.parametrize(
    "words",
    [("--every", "10m", "--leave"), ("--every", "soon"), ("--requeue",), ("--wait=soon",), ("--every", "0")],
    ids=" ".join,
)
def test_wrong_usage_asks_nobody(call: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Contradictions, and times that are none."""
    told = call("save", *words, "--dir", tmp_path)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("ckptctl: save: ")


def test_a_number_alone_after_wait_is_the_job(call: Any) -> None:
    """`save --wait 4711` does not wait for an hour on whatever lies here."""
    assert "no job 4711 is known" in call("save", "--wait", "4711").err


def test_the_oldest_jobs_are_forgotten(tmp_path: Path) -> None:
    """A thousand jobs are remembered in the state directory; a damaged file there is none."""
    env = {"CKPT_SUPERVISE_STATE": str(tmp_path)}
    for number in range(places.JOBS_MAX + 5):
        (tmp_path / "places" / str(number)).mkdir(parents=True)
        os.utime(tmp_path / "places" / str(number), (number, number))
    assert places.remember(env, Home("9000", "0", tmp_path)) == ""
    left = {path.name for path in (tmp_path / "places").iterdir()}
    assert len(left) == places.JOBS_MAX
    assert "9000" in left
    assert "5" not in left
    (tmp_path / "places" / "9000" / "1.json").write_text("[")
    (tmp_path / "places" / "9000" / "2.json").write_text('{"dir": "relative"}')
    assert places.homes(env, "9000") == [Home("9000", "0", tmp_path)]


def test_short_durations_are_told_in_milliseconds_and_long_ones_in_hours() -> None:
    """A save that costs 0.0 s, or takes up to 0 s, would be no save."""
    texts = [time_text(ms) for ms in (0, 40, 999, 2_100, 59_000, 60_000, 119_000, 3_600_000, 6_780_000, -5)]
    assert texts == ["0 ms", "40 ms", "999 ms", "2.1 s", "59 s", "1 min", "1 min", "1 h", "1 h 53 min", "0 ms"]
    assert [seconds(ms) for ms in (40, 1_500, 12_000)] == ["40 ms", "1.5 s", "12 s"]


def test_durations_are_short() -> None:
    """Two units at most."""
    texts = [span_text(seconds) for seconds in (0, 0.4, 4, 59, 60, 61, 3_600, 11_520, 86_400 * 2 + 4 * 3_600, -3)]
    assert texts == ["0s", "0.4s", "4s", "59s", "1m", "1m 1s", "1h", "3h 12m", "2d 4h", "0s"]
