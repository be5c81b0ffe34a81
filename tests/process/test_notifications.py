"""--on-event with a real supervisor: what is told over a run's life, and that no command delays or harms one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.run import Run, eventually, is_alive, supervised, toy, trained
from tests.support.tasks_stage import JOB, step_of

ROOT = Path(__file__).resolve().parents[2]
MARK = f"{sys.executable} -I -S {ROOT / 'deploy' / 'notify' / 'mark_preempted.py'}"
"""The standard library is all that it needs, and the rest of a Python's start costs more on a busy node than the end may have."""


def state(run: Run) -> str:
    """What the recipe has marked the run as."""
    path = run.dir / "run-state.json"
    return str(json.loads(path.read_text())["state"]) if path.exists() else ""


def told(path: Path) -> list[dict[str, Any]]:
    """The lines that the command was given."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def untold(run: Run) -> set[str]:
    """The events that the command was not told of, or not to its end: the journal says so, and a busy node has its reasons."""
    dropped = {event for line in run.events("event_command_dropped") for event in line["events"]}
    return dropped | {line["of_event"] for line in run.events("event_command_failed")}


def test_a_preempted_run_is_marked_so_and_runs_again(tmp_path: Path) -> None:
    """The recipe of docs/notifications.md over two starts; in the end it is finished."""
    words = ("--steps", 1_000_000, "--step-ms", 5, "--save-ms", 2_000)  # While it saves the notice is told.
    with trained(tmp_path, *words, options=("--on-event", MARK)) as run:
        run.reached(10)
        eventually(lambda: state(run) == "running", "running in the state file")
        run.signal(signal.SIGTERM)
        assert run.code() == 75
        assert state(run) == "preempted"
        assert untold(run) <= {"commit", "leaving"}, "nothing that changes the state"
        (step,) = {line["step"] for line in run.events("leaving")}
    with trained(tmp_path, "--steps", step + 5, options=("--on-event", MARK)) as again:
        assert again.code() == 0
        found = json.loads((again.dir / "run-state.json").read_text())
    assert (found["state"], found["preemptions"]) == ("finished", 1)
    assert [entry["state"] for entry in found["history"]] == ["running", "stopping", "preempted", "running", "finished"]


def test_the_command_gets_the_journals_lines_in_their_order(tmp_path: Path) -> None:
    """Word for word, from the start to the end, and with the event's name in its environment."""
    command = f'cat >> "{tmp_path}/told"; echo "$CKPT_SUPERVISE_EVENT" >> "{tmp_path}/names"'
    with trained(tmp_path, "--steps", 1_000_000, "--step-ms", 5, options=("--on-event", command, "--every-steps", 20)) as run:
        run.event("commit")
        run.signal(signal.SIGTERM)
        assert run.code() == 75
        lines = [line for line in run.events() if line in told(tmp_path / "told")]
    assert lines == told(tmp_path / "told")
    names = [line["event"] for line in lines]
    assert untold(run) <= {"commit", "leaving"}
    assert names == [name for name in ("command_started", "notice", "commit", "leaving", "exit") if name not in untold(run)]
    assert (tmp_path / "names").read_text().split() == names


def test_a_command_that_hangs_delays_neither_the_save_nor_much_the_end(tmp_path: Path) -> None:
    """It is killed with all that it has started; the end is told within its own bound, and whatever is not told is counted."""
    command = f'echo $$ >> "{tmp_path}/pids"; sleep 1000 & echo $! >> "{tmp_path}/pids"; wait'
    with trained(tmp_path, "--steps", 1_000_000, "--step-ms", 5, options=("--on-event", command)) as run:
        run.reached(5)
        eventually((tmp_path / "pids").exists, "the first command")
        run.signal(signal.SIGTERM)
        notice, leaving = run.event("notice"), run.event("leaving")
        assert leaving["outcome"] == "fresh"
        assert leaving["mono_ms"] - notice["mono_ms"] < 10_000, "the first command still hangs then"
        assert run.code() == 75
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        eventually(lambda: not any(map(is_alive, pids)), "the end of all commands")
        assert run.err.count("--on-event has failed") == 1
    assert run.intact() == [leaving["step"]]


def test_a_command_that_fails_changes_nothing_about_the_run(tmp_path: Path) -> None:
    """It is journaled; the status is the run's own."""
    with supervised(tmp_path, toy("--steps", 3), "--on-event", "echo no such service; exit 3") as run:
        assert run.code() == 0
        assert run.err.count("it ended with 3: no such service") == 1


def test_what_went_wrong_with_the_last_one_is_in_the_journal_too(tmp_path: Path) -> None:
    """Its end, or that it was killed, comes when everything else has been written."""
    with supervised(tmp_path, toy("--steps", 3), "--on-event", "exec sleep 1000", "--on-event-for", "exit") as run:
        assert run.code() == 0
        (failed,) = [line for line in run.events() if line["event"] == "event_command_failed"]
    assert failed["of_event"] == "exit"
    assert "was killed" in failed["reason"]


def test_training_that_fails_is_told_with_its_status(tmp_path: Path) -> None:
    """Also what comes right at the end is."""
    command = f'cat >> "{tmp_path}/told"'
    with supervised(tmp_path, [sys.executable, "-c", "import sys; sys.exit(9)"], "--on-event", command) as run:
        assert run.code() == 9
    assert [(line["event"], line.get("code")) for line in told(tmp_path / "told")] == [
        ("command_started", None),
        ("command_exited", 9),
        ("exit", 9),
    ]


def test_one_task_of_a_step_tells_and_each_has_metrics_of_its_own(tmp_path: Path) -> None:
    """Task 0 knows of all; numbers are gathered where they arise."""
    (tmp_path / "prom").mkdir()
    roomy = ("--kill-wait", "40s", "--requeue", "never")
    options = (*roomy, "--on-event", f'/bin/cat >> "{tmp_path}/told"', "--metrics-file", f"{tmp_path}/prom/")
    with step_of(tmp_path, 2, options=options) as step:
        step.trained()
        step[0].signal(signal.SIGTERM)
        step[1].signal(signal.SIGTERM)
        step.codes()
    assert {line["task"] for line in told(tmp_path / "told")} == {0}
    assert [line["event"] for line in told(tmp_path / "told")].count("exit") == 1
    files = sorted((tmp_path / "prom").iterdir())
    assert [file.name for file in files] == [f"ckpt_supervise-{JOB}-{task}.prom" for task in (0, 1)]
    assert ["ckpt_supervise_phase" in file.read_text() for file in files] == [True, False]
    assert all("ckpt_supervise_exit_code" in file.read_text() for file in files)
