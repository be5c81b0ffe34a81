"""A run that goes on from a checkpoint at or beyond its own end does nothing, with success: that is said."""

from __future__ import annotations

from pathlib import Path

from tests.support.run import supervised, toy


def test_a_loop_whose_end_is_behind_its_checkpoint_says_that_nothing_is_left_to_do(tmp_path: Path) -> None:
    """Field: a longer run's directory, and fewer steps. It ends at once with 0, and looks like one that has trained."""
    with supervised(tmp_path, toy("--steps", 12), "--every-steps", 10) as run:
        assert run.code() == 0, run.story()
        assert run.intact() == [10]
        assert "nothing left to do" not in run.err
    for steps in (5, 10):
        with supervised(tmp_path, toy("--steps", steps), "--every-steps", 10) as run:
            assert run.code() == 0, run.story()
            assert f"ckpt: going on from step 10, and steps() is to end at {steps}: there is nothing left to do" in run.err
