"""A save that runs when a notice comes, and a failure that the job is requeued for: neither is taken for something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from ckpt_client import wire
from ckpt_supervisor.core.state import Phase
from ckpt_supervisor.start import earlier

from tests.support.core_story import IN_SLURM, Story

SHORT = dataclasses.replace(IN_SLURM, kill_wait_ms=6_000, lead_ms=30_000)


def saving(signal: str) -> Story:
    """A save that training goes on after has begun, and 20 s of it are over when this signal comes."""
    story = Story(SHORT, 1)
    story.signal("SIGUSR2")
    story.agree()
    assert story.told(wire.Go)
    while story.state.looking:
        story.look()
    saves_on(story, 20)
    story.signal(signal)
    return story


def saves_on(story: Story, seconds: int) -> None:
    """So much more of the save; the rank is heard all the while."""
    for _ in range(seconds):
        for member in story.round.members:
            story.feed(wire.Saving(member.who, story.round.number))
        story.wait(990)


def test_a_running_save_has_the_time_that_the_look_finds_and_not_the_guess_at_the_signal() -> None:
    """Row 1: KillWait alone leaves 3.6 s, the grace 13.7: the save that needs 10 more is finished, and it counts."""
    story = saving("SIGTERM")
    assert story.round.save_by_ms - story.now < 4_000
    story.look(preempted_in_ms=-40, end_in_ms=15_000)
    assert 13_000 < story.round.save_by_ms - story.now < 15_000
    saves_on(story, 10)
    assert story.state.phase is Phase.SAVING
    story.write()
    assert 13_000 - 10_000 < story.round.verify_by_ms - story.now < 8_000
    story.commit()
    assert story.state.committed_step == 7


def test_a_running_save_has_its_own_time_again_when_there_was_no_end_in_sight() -> None:
    """A rehearsal in the middle of a long save: it is not cut short by what was guessed meanwhile."""
    story = saving("SIGUSR1")
    assert story.round.save_by_ms - story.now < 4_000
    for _ in range(6):
        while story.state.looking:
            story.look()
        story.wait(300)
    assert story.state.notice is None
    assert story.round.save_by_ms - story.round.began_ms == SHORT.save_timeout_ms
    saves_on(story, 30)
    assert story.state.phase is Phase.SAVING


@pytest.mark.parametrize(
    ("cause", "counts"), [("training failed", True), ("preempted", False), ("training hung", False), ("cancelled", False)]
)
def test_a_failure_that_the_job_is_requeued_for_counts_against_the_checkpoint_as_any_other(
    tmp_path: Path, cause: str, counts: bool
) -> None:
    """Row 3: the notice that --max-crashes makes of it is no interruption; the one of Slurm is."""
    (tmp_path / "journal").mkdir()
    lines = [
        {"event": "command_started", "mono_ms": 0, "resume_step": 6},
        {"event": "rank_hello", "mono_ms": 100, "rank": 0},
        {"event": "command_exited", "mono_ms": 300, "code": 77},
        {"event": "notice", "mono_ms": 300, "cause": cause},
        {"event": "leaving", "mono_ms": 300, "outcome": "stale", "reason": "training failed by itself with status 77"},
        {"event": "notice", "mono_ms": 400, "cause": "requeued already"},
        {"event": "exit", "mono_ms": 500, "code": 77},
    ]
    for epoch in (1, 2, 3):
        path = tmp_path / "journal" / f"77-0-0-{epoch}-0.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (len(earlier.failed_from(earlier.starts(tmp_path, 4), 4, 6, 3)) == 3) is counts
    told = earlier.last_failure(tmp_path, "77", 4)
    assert ("could not save" in told) is not counts
    assert "training failed by itself with status 77" in told
