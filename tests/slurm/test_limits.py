"""The time limit: warned of, watched, reached, moved; with srun and without.

Owns: rows 4 and 5 of the must-hold table, its "not under srun", and field cases 2, 30, 31, 32, 46 and 65 (the time-out); row 2 of
the issue "Deadlines, requeue policy, crashes", and what --max-timeouts, --linger and --every auto come to.
Must not: run these jobs one after the other. The shortest limit is a minute and Slurm looks every 30 s (docs/slurm.md section 5),
so all jobs of this file are submitted at once, each on a node of its own, and the tests look at what became of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_out_before_the_kill, check_requeued, check_saved, notices, took_s
from tests.support.slurm_stage import TRAPPED, instant

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

pytestmark = pytest.mark.timeout(400)

LIMIT_S = 200
"""Bound on what comes at the latest 36 s after a limit of two minutes."""

SLACK_S = 3.0
AT_ONCE_S = 5.0
CALM = "--step-ms 200"
JOBS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "warned": (("-t", "2", "--signal=USR1@60"), {"supervise": "--lead off"}),
    "reached": (("-t", "1"), {"supervise": "--lead off", "toy": "--save-ms 1000"}),
    "watched": (("-t", "1"), {}),
    "no srun": (("-t", "2", "--signal=USR1@60"), {"supervise": "--lead 50s", "srun": ""}),
    "slow start": (("-t", "2"), {"supervise": "--lead 30s", "toy": "--startup-ms 50000"}),
    "moved": (("-t", "1"), {"supervise": "--lead 25s"}),
    "early": (("-t", "2", "--signal=USR1@15"), {"supervise": "--lead off"}),
    "early too": (("-t", "2", "--signal=USR1@15"), {"supervise": "--lead off"}),
    "extended": (("-t", "1"), {}),
    "twice": (("-t", "1"), {"supervise": "--max-timeouts 1"}),
    "lingers": (("-t", "2", "--signal=USR1@60"), {"supervise": "--linger --every auto"}),
}

MID_RUN = 40
"""Steps of 200 ms: that is well into the minute, and before the watch acts."""


@pytest.fixture(scope="module")
def runs(new_module_stage: Callable[..., Stage]) -> dict[str, Run]:
    """All jobs of this file, running."""
    # Nobody's second run begins while the first is looked at: those that are to come back are told to.
    stage = new_module_stage(nodes=len(JOBS), proctrack="auto", kill_wait=12, cred_expire=300)
    made = {}
    for name, (options, how) in JOBS.items():
        toy = f"{CALM} {how.get('toy', '')}"
        made[name] = stage.submit("-p", "low", *options, script=TRAPPED, **{**how, "toy": toy})
    made["moved"].wait_event("look", why="start")
    stage.lab.checked("scontrol", "update", f"JobId={made['moved'].jobid}", "TimeLimit=2")
    made["extended"].wait_steps(MID_RUN)
    stage.lab.checked("scontrol", "update", f"JobId={made['extended'].jobid}", "TimeLimit=2")
    for run in made.values():
        run.wait_event("look", why="start")
    made["twice"].wait_exit(timeout=LIMIT_S)
    stage.lab.release_requeued(made["twice"].jobid)
    return made


def ended(run: Run) -> None:
    """Requeued by the supervisor, and Slurm has never called it a time-out."""
    check_requeued(run, timeout=LIMIT_S)
    check_saved(run)
    check_out_before_the_kill(run)


def limit(run: Run, minutes: int) -> float:
    """The end of the first run's time, from its start as jobcomp has it."""
    return instant(run.lab.jobcomp(run.jobid)[0]["StartTime"]) + 60 * minutes


def notice_at(run: Run) -> float:
    """When the last save began to be wanted."""
    return instant(notices(run)[0]["ts"])


def check_wanted(run: Run, at: float) -> None:
    """The last save began to be wanted at this time: never sooner, and no later than a busy machine makes it."""
    assert notice_at(run) > at - SLACK_S
    assert took_s(at, notice_at(run)) < SLACK_S


def test_the_supervisors_own_watch_saves_before_a_limit_that_nobody_warned_of(runs: dict[str, Run]) -> None:
    """Field case 32: no --signal: the watch on the end time, 30 s before it; requeued before the limit."""
    run = runs["watched"]
    ended(run)
    called = run.event("requeue_called")["ts"]
    assert [entry["signal"] for entry in run.events("signal") if entry["ts"] < called] == []
    assert notices(run)[0]["by"] == "end-time watch"
    check_wanted(run, limit(run, 1) - 30)
    assert run.requeued_at()[0] < limit(run, 1)


def test_a_warning_signal_saves_and_requeues_before_the_limit(runs: dict[str, Run]) -> None:
    """Row 4 and field case 46: -t 2 --signal=USR1@60: never TIMEOUT."""
    run = runs["warned"]
    ended(run)
    assert run.events("signal")[0]["signal"] == "SIGUSR1"
    assert run.requeued_at()[0] < limit(run, 2)


def test_without_srun_it_warns_at_the_start_and_saves_by_the_clock(runs: dict[str, Run]) -> None:
    """Row 16b and field case 2: a plain line of the script gets no notice: said at once, and saved by the watch all the same."""
    run = runs["no srun"]
    check_requeued(run, timeout=LIMIT_S)
    check_saved(run)
    warned = run.event("warning", attempt=0, id="srun")
    assert "not started by srun" in warned["text"]
    assert warned["text"] in run.output()
    assert took_s(run.event("command_started", attempt=0)["ts"], warned["ts"]) < AT_ONCE_S
    assert notices(run)[0]["by"] == "end-time watch"
    check_wanted(run, limit(run, 2) - 50)
    assert run.requeued_at()[0] < limit(run, 2)


def test_the_lead_counts_from_the_jobs_end_and_not_from_the_start_of_training(runs: dict[str, Run]) -> None:
    """Field case 30: 50 s of start-up, --lead 30s: the request comes at 90 s of job time."""
    run = runs["slow start"]
    ended(run)
    check_wanted(run, limit(run, 2) - 30)


def test_the_lead_moves_with_the_limit(runs: dict[str, Run]) -> None:
    """Field case 30: `scontrol update TimeLimit=2` in mid-run moves the request by the minute."""
    run = runs["moved"]
    ended(run)
    check_wanted(run, limit(run, 2) - 25)


def test_a_limit_that_is_moved_in_mid_run_is_kept_without_any_signal_of_slurms(runs: dict[str, Run]) -> None:
    """Row 2: no --signal, -t 1, then `scontrol update TimeLimit=2`: no save for the first one; out before the second."""
    run = runs["extended"]
    ended(run)
    assert notices(run)[0]["by"] == "end-time watch"
    check_wanted(run, limit(run, 2) - 30)
    assert run.requeued_at()[0] < limit(run, 2)
    run.lab.release_requeued(run.jobid)
    run.wait_event("command_started", attempt=1, resume_step=run.committed(attempt=0)[0], timeout=90)


def test_a_job_comes_back_from_its_time_limit_as_often_as_it_may_and_no_more(runs: dict[str, Run]) -> None:
    """Field case 46: --max-timeouts 1: requeued once, then saved, left before the limit, and not requeued; the line says why."""
    run = runs["twice"]
    assert run.wait_exit(2, timeout=LIMIT_S) == 75
    record = run.wait_state("COMPLETED")
    assert record["Restarts"] == "1"
    assert [call.error for call in run.requeue_calls()] == [None]
    assert run.event("recalled", attempt=1)["timeouts"] == 1
    assert len(run.committed()) == 2
    assert run.newest() == run.committed()[-1]
    run.verify()
    line = run.event("exit", attempt=1)["line"]
    assert "its time limit has ended it 2 times now, and --max-timeouts is 1" in line
    assert "start the same command again" in line
    assert "STAGE2" not in run.output()


def test_an_early_warning_is_saved_at_and_the_rest_of_the_time_is_used(runs: dict[str, Run]) -> None:
    """--linger: USR1@60 saves, training goes on to the watch's own moment; --every auto goes by what that save cost."""
    run = runs["lingers"]
    check_requeued(run, timeout=LIMIT_S)
    check_out_before_the_kill(run)
    commits = run.events("commit", attempt=0, result="committed")
    warned = run.events("signal")[0]
    assert warned["signal"] == "SIGUSR1"
    first, last = next(entry for entry in commits if entry["ts"] > warned["ts"]), commits[-1]
    assert run.events("notice_over", attempt=0)
    assert last["step"] > first["step"]
    assert notices(run)[-1]["by"] == "end-time watch"
    assert instant(last["ts"]) > limit(run, 2) - 32 - SLACK_S
    assert run.requeued_at()[0] < limit(run, 2)
    run.verify()
    guessed, measured = (run.events("interval", attempt=0)[place] for place in (0, -1))
    assert (guessed["why"], measured["why"]) == ("auto, no save measured yet", "auto")
    assert measured["cost_ms"] <= max(entry["hold_ms"] for entry in commits) + 1, "periodic ones among them"
    assert measured["mtbi_ms"] >= 6 * 3_600_000
    run.lab.release_requeued(run.jobid)
    run.wait_event("interval", attempt=1, why="auto", timeout=90)
    assert run.events("interval", attempt=1)[-1]["mtbi_ms"] < 4 * 3_600_000, "an interruption was seen"


@pytest.mark.parametrize("name", ["early", "early too"])
def test_the_time_left_is_read_from_the_job_and_not_from_the_signals_option(runs: dict[str, Run], name: str) -> None:
    """Field case 31: USR1@15 comes up to a minute early; what is known of the time left is the job's own end."""
    run = runs[name]
    ended(run)
    assert run.events("signal")[0]["signal"] == "SIGUSR1"
    seen = next(entry for entry in run.events("look") if "SIGUSR1" in entry["why"])
    known = next(entry for entry in notices(run) if entry["cause"] == "end of the time limit ahead")
    kill_at = instant(known["ts"]) + known["left_ms"] / 1000
    assert abs(kill_at - (seen["end_s"] + run.lab.kill_wait)) < SLACK_S
    assert run.requeued_at()[0] < limit(run, 2)


def test_a_limit_that_is_reached_leaves_killwait_and_the_job_comes_back(runs: dict[str, Run]) -> None:
    """Row 5 and field case 65: no warning, SIGTERM twice at the limit: saved within KillWait, requeued, and never a success."""
    run = runs["reached"]
    check_requeued(run, timeout=LIMIT_S, ends=("PENDING", "TIMEOUT"))
    check_saved(run)
    check_out_before_the_kill(run)
    assert "the watch on the job's end is off" in run.output()
    assert {entry["signal"] for entry in run.events("signal")} == {"SIGTERM"}  # twice in one moment: the kernel may merge them
    assert notices(run)[-1]["cause"] in ("time limit reached", "requeued already")
    assert "time limit reached" in {entry["cause"] for entry in notices(run)}
    assert notice_at(run) > limit(run, 1) - 1
