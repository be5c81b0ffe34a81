"""What tests/slurm/test_inspection.py has found in words and numbers, each as one small journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_supervisor.view import timeline, why
from ckpt_supervisor.view.totals import totals

from tests.support.journals import Start
from tests.unit.test_story import asked, failed, hung, killed, told

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_supervisor.view.facts import Run

SAID = why.Said(("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT ... DUE TO PREEMPTION ***",), "preempted")
NARROW = timeline.Looks(60, colour=False, unicode=True)


def facts(run: Run) -> dict[str, str]:
    """Titles and sentences of its first attempt."""
    return dict(why.facts(run.attempts[0], run, why.Said()))


def without_grace(start: Start) -> Start:
    """All that Slurm's record shows of it is that the job was requeued."""
    return start.notice(71, "requeued already", left_s=6).leave(76, "stale", 76, reason="rank 0: late")


def test_a_rank_that_moves_again_after_a_hang_has_not_finished_the_step_that_it_is_at(tmp_path: Path) -> None:
    """`hang_over` names the step after the last finished one: no more steps are lost than were done."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    start.say(61, "progress", "debug", step=60, ahead=60, per_step_ms=1_000, phase="")
    start.say(700, "hang_over", rank=0, rank_pid=5000, step=61).notice(700, "training hung", "training hung").leave(
        701, "stale", 76
    )
    (one,) = told(tmp_path).attempts
    assert (one.reached, one.lost_steps) == (60, 10)


def test_what_lies_behind_a_requeue_that_nobody_here_called_is_said_by_slurm(tmp_path: Path) -> None:
    """A preemption without a grace: its name, and what to change, from Slurm's own line; without it, both ways are named."""
    without_grace(Start(tmp_path).begin(0).save(51, 1, 50))
    run = told(tmp_path)
    one = run.attempts[0]
    assert why.told_cause(one, SAID) == "requeued already; Slurm says: preempted (by SIGTERM)"
    assert "save more often" in dict(why.facts(one, run, SAID))["change"]
    assert why.told_cause(one, why.Said((), "requeued")) == "requeued already (by SIGTERM)"
    assert "Slurm has requeued it, or somebody" in facts(run)["change"]


def test_a_requeue_that_nobody_here_called_is_an_interruption(tmp_path: Path) -> None:
    """As for --every auto: on a site without a grace no other end would ever be counted."""
    without_grace(Start(tmp_path).begin(0).save(51, 1, 50))
    assert totals(told(tmp_path)).interruptions == 1


def test_after_an_end_of_its_own_nothing_is_said_of_a_notice_a_kill_or_a_save_that_failed(tmp_path: Path) -> None:
    """A hang, and a failure that is requeued: nobody had announced them, nobody kills, and no save was begun."""
    hung(Start(tmp_path / "hung").begin(0).save(51, 1, 50))
    again = Start(tmp_path / "failed").begin(0).save(51, 1, 50).notice(71, "training failed", "training failed")
    again.leave(71, "stale", 1, reason="training failed by itself with status 1", requeue="accepted")
    for kind in ("hung", "failed"):
        run = told(tmp_path / kind)
        assert facts(run)["notice"].startswith(f"none: training {kind}, at ")
        assert "to save" not in facts(run)["decided"]
        assert "did not make it" not in "\n".join(timeline.block(run, NARROW))


def test_the_counts_and_the_next_step_are_in_plain_words(tmp_path: Path) -> None:
    """One step, not one steps; what comes back by itself need not be submitted; an end without a word decides nothing."""
    killed(Start(tmp_path / "killed").begin(0).save(51, 1, 69))
    run = told(tmp_path / "killed", alive=(1, False))
    assert "at least 1 step," in "\n".join(timeline.block(run, NARROW))
    assert facts(run)["decided"] == "nothing: there was no time to"
    asked(Start(tmp_path / "asked").begin(0).save(51, 1, 50).say(70, "requeue", result="accepted", reason=""))
    assert facts(told(tmp_path / "asked"))["change"] == "nothing: a person ended it, and it comes back by itself"


def test_a_long_cause_is_folded_below_itself(tmp_path: Path) -> None:
    """A line that goes on below stays within the attempt's own columns."""
    failed(Start(tmp_path).begin(0).save(51, 1, 50).say(60, "status_masked", "warning", reason="rank 0 had failed " * 6))
    lines = timeline.block(told(tmp_path), NARROW)
    place = next(place for place, line in enumerate(lines) if line.startswith("  training failed"))
    assert lines[place + 1].startswith("  ")
    assert lines[place + 1].strip()[0].isalnum()
    assert max(map(len, lines[: place + 4])) <= NARROW.width
