"""Signals that ask for a save, early, late and many at once, and saves that do not fit into the time that is left.

Owns: rows 9 to 11 of the must-hold table and field cases 13, 26, 28, 29, 34 and 35.
Must not: rely on which signal came; the same one means different things in different job states (docs/slurm.md section 1).
"""

from __future__ import annotations

import re
import shlex
import signal
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor.store.layout import parse_partial

from tests.support.contention import lost_s
from tests.support.slurm_checks import (
    BOTH,
    check_every_step_once,
    check_older_stands,
    check_out_before_the_kill,
    check_requeued,
    check_resumed_at,
    check_saved,
    notices,
    took_s,
)
from tests.support.slurm_stage import THEN, TRAPPED, instant, own_toy, toy_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Stage

STEP_S = 0.02
"""Of the toy, by default."""


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_save_signal_saves_and_training_goes_on(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 9 and field case 26: USR2, and USR1 with no end in sight, are committed while the job runs on without a lost step."""
    stage = new_stage(nodes=2, proctrack=proctrack)
    shell = f"{shlex.join(toy_words('--steps 100000 --step-ms 20 --log {log}'))}; echo ended with $?"
    for command in (None, ["dash", "-c", shell]):
        stage.submit("-p", "low", command=command, script=THEN)
    stage.started()
    for number, name in enumerate(("USR2", "USR1", "USR2"), 1):
        for run in stage.runs:
            run.cancel(f"--signal={name}")
        for run in stage.runs:
            step = run.wait_event("commit", number, result="committed")["step"]
            run.wait_steps(step + 5)
    for run in stage.runs:
        run.verify()
        assert len(set(run.committed())) == 3
        check_every_step_once(run, [0])
        record = run.job()
        assert (record["JobState"], record["Restarts"]) == ("RUNNING", "0")
        assert run.exit_codes() == []
        assert run.requeue_calls() == []


def test_a_shell_that_dies_of_the_broadcast_does_not_hide_how_training_ends(new_stage: Callable[..., Stage]) -> None:
    """dash clears the mask that shields it: USR2 ends it on linuxproc; the rank trains on, and its status is the supervisor's."""
    stage = new_stage(proctrack="linuxproc")
    shell = f"{shlex.join(toy_words('--steps 600 --step-ms 20 --exit-code 5 --log {log}'))}; echo ended with $?"
    run = stage.submit("-p", "low", command=["dash", "-c", shell], script=THEN)
    stage.started()
    run.cancel("--signal=USR2")
    assert run.wait_exit() == 5
    assert run.event("command_orphaned")["code"] == 128 + signal.SIGUSR2
    assert len(run.committed()) == 1
    assert run.steps() == list(range(1, 601))
    assert "STAGE2" not in run.output()


@pytest.mark.parametrize("proctrack", BOTH)
def test_a_storm_of_signals_during_one_save_is_one_save_and_one_requeue(new_stage: Callable[..., Stage], proctrack: str) -> None:
    """Row 10: preempted, and TERM, TERM, CONT, USR1 while the save runs; and field case 34: USR1 first, and then all those."""
    stage = new_stage(nodes=2, proctrack=proctrack, kill_wait=24)
    preempted = stage.submit("-p", "low", toy="--save-ms 9000", script=TRAPPED)
    warned = stage.submit("-p", "low", "-t", "5", toy="--save-ms 9000", script=TRAPPED)
    stage.started()
    warned.cancel("--signal=USR1")
    preempted.preempt()
    for run in stage.runs:
        run.wait_event("rank_saving")
    for name in ("TERM", "TERM", "CONT", "USR1", "TERM"):
        for run in stage.runs:
            run.cancel(f"--signal={name}")
    for run in stage.runs:
        run.wait_event("signal", 3)
        check_requeued(run)
        check_saved(run)
        check_out_before_the_kill(run)
        assert len(run.events("round_begun")) == 1
        # A further TERM is first taken for one that leaves KillWait only; no look ever finds more time than there was.
        kills = [instant(notice["ts"]) + notice["left_ms"] / 1000 for notice in notices(run) if notice["cause"] != "not known"]
        assert max(kills) <= kills[0] + 1, f"the kill moved away: {kills}"


def test_a_notice_before_any_rank_has_attached_is_not_waited_out(new_stage: Callable[..., Stage]) -> None:
    """Row 11: during the imports nobody can save; the older checkpoint stands and the job is back in the queue at once."""
    stage = new_stage(nodes=2, proctrack="linuxproc")
    toy = "--steps 100000 --step-ms 20 --log {log}"
    imports = f'test -n "$SLURM_RESTART_COUNT" || exec sleep 300; exec {shlex.join(toy_words(toy))}'
    older = stage.prepare("r1", "--every-steps 5", "--steps 7")
    first = stage.submit("-p", "low", command=["bash", "-c", imports], script=TRAPPED)
    nothing = stage.submit("-p", "low", command=["bash", "-c", imports], script=TRAPPED)
    for run in stage.runs:
        run.wait_event("command_started")
        run.wait_event("look", why="start")
    for run in stage.runs:
        run.preempt()
    for run, stands in ((first, older), (nothing, -1)):
        check_requeued(run, code=76)
        signal, gone = run.events("signal")[0], run.event("exit", attempt=0)
        assert took_s(signal["ts"], gone["ts"]) < 3
        assert "no rank had attached yet" in gone["line"]
        check_older_stands(run, stands)
        check_resumed_at(run, stands)


def test_a_save_that_cannot_be_in_time_is_given_up_and_the_older_one_stands(new_stage: Callable[..., Stage]) -> None:
    """Field cases 28 and 29: no safe point in an evaluation or a long step, a save longer than the grace."""
    stage = new_stage(nodes=4, proctrack="linuxproc", grace=4, kill_wait=10)
    evaluates = "--eval-every 20 --eval-ms 60000"
    no_point = stage.submit("-p", "low", toy=evaluates, supervise="--every-steps 10", script=TRAPPED)
    points = stage.submit("-p", "low", toy=f"{evaluates} --eval-safe-points 200", supervise="--every-steps 10", script=TRAPPED)
    long_step = stage.submit("-p", "low", toy="--step-ms 60000", script=TRAPPED)
    slow = stage.submit("-p", "low", command=own_toy("--faults-from 2 --save-ms 30000"), script=TRAPPED)
    slow.wait_steps(3)
    slow.cancel("--signal=USR2")
    older = slow.wait_event("commit")["step"]
    for run in (no_point, points):
        run.wait_line("eval 20")
        run.wait_event("commit", step=20, result="committed")  # The evaluation begins with a safe point: it is behind them.
    long_step.wait_line("ready pid")
    for run in stage.runs:
        run.preempt()
    check_requeued(points)
    assert points.committed(attempt=0)[-1] == 20
    check_resumed_at(points, 20)
    for run, stands in ((no_point, [20]), (long_step, []), (slow, [older])):
        check_requeued(run, code=76)
        check_out_before_the_kill(run)
        assert run.committed(attempt=0)[-1:] == stands  # The newest one may be the next run's, with its periodic saves.
        assert run.events("rank_late", rank=0, attempt=0)
        assert "the time for the save is over" in run.events("round_given_up", attempt=0)[-1]["reason"]
        run.verify()
        check_resumed_at(run, stands[-1] if stands else -1)
        epoch = run.event("exit", attempt=0)["epoch"]
        assert not [path for path in run.dir.glob(".partial-*") if (parse_partial(path.name) or ())[1:2] == (epoch,)]
    told = re.search(
        r"could not save \(preempted\): .* (\d+) ms after the request.*; it had ([\d.]+) s for the save", slow.output()
    )
    assert told
    begun, over = (slow.events(name, attempt=0)[-1]["ts"] for name in ("round_begun", "round_given_up"))
    assert -1 < int(told[1]) / 1000 - float(told[2]) < 1 + lost_s(instant(begun), instant(over))


def test_a_notice_in_the_middle_of_a_periodic_save_uses_it_or_saves_again(new_stage: Callable[..., Stage]) -> None:
    """Field case 35: the running save is finished; with time for another one no step is lost, else only what came after it."""
    stage = new_stage(nodes=2, proctrack="linuxproc", kill_wait=12)
    roomy, tight = (
        stage.submit("-p", where, toy="--save-ms 5000", supervise="--every-steps 30", script=TRAPPED) for where in ("low", "low0")
    )
    for run in stage.runs:
        run.wait_line("saving 30")
        run.preempt()
    check_requeued(roomy)
    check_requeued(tight, code=tight.wait_exit(), calls=0)
    for run in stage.runs:
        run.verify()
        committed = [entry["step"] for entry in run.events("commit", attempt=0, result="committed")]
        assert committed[0] == 30
        said = [word[0] for word in run.words() if word[0] in ("saving", "saved")]
        assert said[: 2 * len(committed)] == ["saving", "saved"] * len(committed)
        check_resumed_at(run, committed[-1])
        again = run.left_at() - committed[-1]
        over, left = (next(int(word[-1]) / 1000 for word in run.words() if word[0] == what) for what in ("saved", "preempted"))
        assert again <= (0 if run is roomy else 2 + lost_s(over, left) / STEP_S)


def test_a_handler_of_the_trainings_own_and_a_dying_side_process_change_nothing(new_stage: Callable[..., Stage]) -> None:
    """Field cases 11 and 13: the own USR1 handler runs and so does ours; a broken pipe after the save is no failure of it."""
    stage = new_stage(nodes=2, proctrack="linuxproc")
    handles = stage.submit("-p", "low", "-t", "5", command=own_toy("--own-usr1 --save-ms 500"), script=TRAPPED)
    helped = stage.submit("-p", "low", command=own_toy("--side-process --save-ms 500"), script=TRAPPED)
    stage.started()
    handles.cancel("--signal=USR1")
    helped.preempt()
    for run in stage.runs:
        check_requeued(run)
        check_saved(run)
    assert "own handler: USR1" in handles.lines()
    assert "BrokenPipeError" in helped.output()
