"""What earlier attempts came to, by journals made by hand: budgets, the brake, and how long saves took."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.core.history import NONE, History
from ckpt_supervisor.start import earlier, history

from tests.support.ctl_stage import committed

JOB = "77"
HOUR_MS = 3_600_000
Line = dict[str, Any]


def line(event: str, at_ms: int, **fields: Any) -> Line:
    """One line of a journal."""
    return {"event": event, "mono_ms": at_ms, **fields}


def started(step: int = -1, at_ms: int = 1_000) -> list[Line]:
    """The command starts, and its rank attaches a second later."""
    return [line("command_started", at_ms, resume_step=step), line("rank_hello", at_ms + 1_000, rank=0)]


def commit(step: int, at_ms: int, result: str = "committed", **fields: Any) -> Line:
    """A commit."""
    return line("commit", at_ms, step=step, result=result, **fields)


def interrupted(cause: str, at_ms: int, code: int = 75) -> list[Line]:
    """A notice whose cause is known a moment later, and the way out with an accepted requeue."""
    words = [line("notice", at_ms, cause="not known"), line("notice", at_ms + 100, cause=cause)]
    requeue = [line("requeue_called", at_ms + 3_000), line("requeue", at_ms + 3_100, result="accepted")]
    # The requeue of our own making shows in the next look.
    return [*words, *requeue, line("notice", at_ms + 3_200, cause="requeued already"), line("exit", at_ms + 4_000, code=code)]


def crashed(at_ms: int, requeue: str = "accepted") -> list[Line]:
    """Training fails by itself, and the job is requeued."""
    words = [line("command_exited", at_ms, code=1), line("notice", at_ms, cause="training failed")]
    return [
        *words,
        line("requeue_called", at_ms + 50),
        line("requeue", at_ms + 99, result=requeue),
        line("exit", at_ms + 200, code=1),
    ]


def write(directory: Path, epoch: int, lines: list[Line], job: str = JOB, attempt: int = 0, task: int = 0) -> Path:
    """The journal of one start."""
    path = directory / "journal" / f"{job}-{attempt}-0-{epoch}-{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def told(directory: Path, *attempts: list[Line], job: str = JOB) -> History:
    """What these attempts of one job, oldest first, come to."""
    for epoch, lines in enumerate(attempts, 1):
        write(directory, epoch, lines, job)
    return history.read(directory, job, len(attempts) + 1)


def test_nothing_is_told_of_a_first_start(tmp_path: Path) -> None:
    """No directory, an empty one, one with this start's own journal only, and one of another task."""
    assert history.read(tmp_path / "none", JOB, 1) == NONE
    assert history.read(tmp_path, JOB, 1) == NONE
    write(tmp_path, 1, crashed(5_000))
    write(tmp_path, 2, crashed(5_000), task=1)
    assert history.read(tmp_path, JOB, 1) == NONE
    assert history.read(tmp_path, JOB, 2).crashes == 1


def test_limits_crashes_and_preemptions_are_counted_apart(tmp_path: Path) -> None:
    """Field case 46: each cause has a budget of its own, and the requeue's own trace in the looks is no cause."""
    attempts = [
        [*started(), *interrupted("end of the time limit ahead", HOUR_MS)],
        [*started(), *interrupted("preempted", HOUR_MS)],
        [*started(), *interrupted("time limit reached", HOUR_MS, code=76)],
        [*started(), *crashed(HOUR_MS)],
        [*started(), *interrupted("node failure", HOUR_MS)],
    ]
    found = told(tmp_path, *attempts)
    assert (found.timeouts, found.crashes, found.interruptions) == (2, 1, 5)
    assert history.read(tmp_path, "78", 6).timeouts == 0, "another job has its own budgets"
    assert history.read(tmp_path, "78", 6).interruptions == 5, "but how often a run here is interrupted tells of this site"


def test_what_is_no_end_by_the_limit_does_not_count_as_one(tmp_path: Path) -> None:
    """Trained to the end, cancelled, preempted after an early warning, an end that was none, requeued by somebody else."""
    limit = line("notice", HOUR_MS, cause="end of the time limit ahead")
    attempts = [
        [*started(), limit, line("command_exited", HOUR_MS + 1, code=0), line("exit", HOUR_MS + 2, code=0)],
        [*started(), limit, line("notice", HOUR_MS + 1, cause="cancelled"), line("exit", HOUR_MS + 2, code=143)],
        [*started(), limit, *interrupted("preempted", HOUR_MS + 5)],
        [*started(), limit, line("notice_over", HOUR_MS + 1), line("command_exited", HOUR_MS + 9, code=1)],
        [*started(), limit, line("notice", HOUR_MS + 1, cause="requeued already"), line("exit", HOUR_MS + 2, code=75)],
    ]
    assert told(tmp_path, *attempts).timeouts == 0


def test_a_killed_attempt_at_its_limit_has_used_up_one(tmp_path: Path) -> None:
    """It came back all the same: somebody has requeued it."""
    assert told(tmp_path, [*started(), line("notice", HOUR_MS, cause="time limit reached")]).timeouts == 1


def test_a_crash_that_was_not_requeued_uses_up_nothing(tmp_path: Path) -> None:
    """It ended the job; that it is here again is a person's will."""
    no_notice = [*started(), line("command_exited", 9_000, code=1), line("exit", 9_001, code=1)]
    found = told(tmp_path, no_notice, [*started(), *crashed(9_000, requeue="refused")])
    assert found.crashes == 0
    assert found.stalled == 2, "it got nowhere all the same"


def test_a_last_save_that_was_given_up_teaches_that_it_takes_longer(tmp_path: Path) -> None:
    """Otherwise the watch would begin the next one as late, and each attempt would lose everything again."""
    save = [line("round_begun", 60_000, round=1, kind="save and leave"), line("go", 61_000, round=1)]
    assert told(tmp_path, [*started(), *save, line("round_given_up", 87_000, round=1)]).tried_ms == 26_000
    periodic = [line("round_begun", 60_000, round=1, kind="periodic"), line("go", 61_000), line("round_given_up", 87_000)]
    assert told(tmp_path / "other", [*started(), *periodic]).tried_ms == 0, "--save-timeout is no notice"


@pytest.mark.parametrize("value", ["0", "3", "abc", ""])
def test_attempts_are_counted_by_journals_and_not_by_the_restart_count(tmp_path: Path, value: str) -> None:
    """Field case 54: what SLURM_RESTART_COUNT says is in a journal's name, and decides nothing."""
    for epoch in (1, 2, 3):
        write(tmp_path, epoch, [*started(), *crashed(HOUR_MS)], attempt=int(value) if value.isdecimal() else 0)
    assert history.read(tmp_path, JOB, 4).crashes == 3


# --- the brake -----------------------------------------------------------------------------------------------------------


def test_three_preemptions_within_seconds_cost_nothing(tmp_path: Path) -> None:
    """Row 4: no budget is used, no attempt counts as stalled, whether a rank had attached, or saved, or nothing had begun."""
    attempts = [
        [*started(5), *interrupted("preempted", 6_000, code=76)],
        [line("command_started", 1_000, resume_step=5), *interrupted("preempted", 1_500, code=76)],
        interrupted("preempted", 900, code=76),
    ]
    found = told(tmp_path, *attempts)
    assert (found.timeouts, found.crashes, found.stalled) == (0, 0, 0)
    assert found.interruptions == 2, "one had not even started the command"


def test_attempts_in_a_row_without_a_new_checkpoint_are_stalled(tmp_path: Path) -> None:
    """Those that had their time, or failed by themselves; ones that were interrupted before neither count nor end the row."""
    long, short = interrupted("preempted", HOUR_MS), interrupted("preempted", 6_000, code=76)
    hung = [line("notice", 400_000, cause="training hung"), line("exit", 401_000, code=76)]
    attempts = [
        [*started(5), *long],
        [*started(5), *short],
        [*started(5), *crashed(9_000)],
        [*started(5), *short],
        [*started(5), *hung],
    ]
    assert told(tmp_path, *attempts).stalled == 3
    assert told(tmp_path / "more", [*started(5), commit(6, 9_000), *long], *attempts).stalled == 3
    assert told(tmp_path / "last", *attempts, [*started(5), commit(6, 9_000), *long]).stalled == 0


def test_what_is_no_progress(tmp_path: Path) -> None:
    """The step that it resumed from, a commit that failed or was refused, a step below."""
    for number, line_ in enumerate(
        [
            commit(5, 9_000, "already there"),
            commit(6, 9_000, "failed"),
            commit(6, 9_000, "refused: a newer attempt"),
            commit(4, 9_000),
        ]
    ):
        lines = [*started(5), line_, *interrupted("preempted", HOUR_MS, code=76)]
        assert told(tmp_path / str(number), lines).stalled == 1, line_


def test_what_is_progress(tmp_path: Path) -> None:
    """A commit, one that was there already, what a program wrote itself, and a good end."""
    good_end = [line("command_exited", HOUR_MS, code=0), line("exit", HOUR_MS + 1, code=0)]
    for number, line_ in enumerate([commit(6, 9_000), commit(6, 9_000, "already there"), line("adopted", 9_000, steps=[6])]):
        stalled = [*started(5), *interrupted("preempted", HOUR_MS)]
        lines = [*started(5), line_, *interrupted("preempted", HOUR_MS)]
        assert told(tmp_path / str(number), stalled, lines).stalled == 0, line_
    assert told(tmp_path / "end", [*started(5), *good_end]).stalled == 0


def test_a_failure_that_hides_behind_a_status_of_0_is_one(tmp_path: Path) -> None:
    """`sh -c "python train.py; echo done"`: the rank had said that it dies."""
    words = [line("command_exited", 9_000, code=0), line("status_masked", 9_001), line("exit", 9_002, code=1)]
    assert told(tmp_path, [*started(5), *words]).stalled == 1


def test_restarts_in_place_are_one_attempt(tmp_path: Path) -> None:
    """It failed twice, went on, and was then preempted: what it committed in between counts for all of it."""
    again = [line("command_started", 30_000, resume_step=5), line("command_exited", 40_000, code=1)]
    words = [*started(5), line("command_exited", 20_000, code=1), *again, line("command_started", 50_000, resume_step=5)]
    assert told(tmp_path, [*words, *interrupted("preempted", 60_000)]).stalled == 1
    assert told(tmp_path / "more", [*words, commit(9, 55_000), *interrupted("preempted", 60_000)]).stalled == 0


def test_of_a_journal_that_is_too_long_the_next_start_tells_whether_it_got_further(tmp_path: Path) -> None:
    """What lies between its head and its tail is not read: where the next one began shows it."""
    filler = [line("look_asked", 5_000, why="x" * 1_000)] * 500
    long = [*started(5), *filler, *interrupted("preempted", HOUR_MS)]
    assert told(tmp_path, long, long, [*started(5), *interrupted("preempted", HOUR_MS)]).stalled == 3
    assert told(tmp_path / "more", long, long, [*started(9), *interrupted("preempted", HOUR_MS)]).stalled == 1
    refused = [line("refused", 900, text="none is intact"), line("exit", 901, code=76)]
    assert told(tmp_path / "one between", long, refused, [*started(9), *interrupted("preempted", HOUR_MS)]).stalled == 1
    (tmp_path / "new").mkdir()
    committed(tmp_path / "new", 6)
    assert told(tmp_path / "new", long).stalled == 0


# --- a run that goes on under another number -----------------------------------------------------------------------------


def test_a_resubmitted_job_has_the_budgets_of_the_one_before(tmp_path: Path) -> None:
    """Else a job that fails again and again, and is resubmitted each time, would never stop."""
    chain = [*started(5), *crashed(9_000)]
    resubmitted = line("resubmit", 9_150, accepted=True, reason="Submitted batch job 78")
    write(tmp_path, 1, chain, job="76")
    write(tmp_path, 2, [*chain, resubmitted], job="77")
    write(tmp_path, 3, [*chain, resubmitted], job="78")
    write(tmp_path, 4, chain, job="79")
    assert history.read(tmp_path, "79", 5).crashes == 3
    assert history.read(tmp_path, "79", 5).stalled == 3
    write(tmp_path, 3, [*chain, line("resubmit", 9_150, accepted=False, reason="it ended with 1")], job="78")
    assert history.read(tmp_path, "79", 5).crashes == 1


def test_a_crash_that_only_resubmit_brought_back_uses_up_the_budget(tmp_path: Path) -> None:
    """Slurm refuses the requeue, which is what --resubmit is for: else --max-crashes 1 would crash under new numbers for ever."""
    resubmitted = line("resubmit", 9_150, accepted=True, reason="Submitted batch job 78")
    for epoch, job in enumerate(("76", "77", "78"), 1):
        write(tmp_path, epoch, [*started(5), *crashed(9_000, requeue="refused"), resubmitted], job=job)
    assert history.read(tmp_path, "79", 4).crashes == 3


# --- more attempts than are read ------------------------------------------------------------------------------------------


def many(directory: Path, count: int, lines: list[Line]) -> None:
    """So many attempts, each of which had read what came before it."""
    for epoch in range(1, count + 1):
        counts = {"timeouts": epoch - 1, "crashes": 0, "stalled": epoch - 1}
        write(directory, epoch, [*lines[:1], line("recalled", 1_500, **counts), *lines[1:]])


def test_budgets_go_on_beyond_the_attempts_that_are_read(tmp_path: Path) -> None:
    """--max-timeouts 60 and --max-stalled 60 are reached; what cannot be read any more is known from the oldest that can."""
    many(tmp_path, 55, [*started(5), *interrupted("time limit reached", HOUR_MS)])
    found = history.read(tmp_path, JOB, 56)
    assert (found.timeouts, found.stalled) == (55, 55)
    for epoch in (6, 7):  # The oldest that are read were cut off before they had read anything.
        write(tmp_path, epoch, [*started(5), *interrupted("time limit reached", HOUR_MS)])
    assert history.read(tmp_path, JOB, 56).timeouts == 55


def test_crashes_long_ago_are_not_forgotten_for_preemptions(tmp_path: Path) -> None:
    """A crash after every 30 preemptions is one of --max-crashes all the same; progress ends the row without any."""
    lines = [[*started(), commit(6, 9_000), *interrupted("preempted", HOUR_MS)]] * 30 + [[*started(), *crashed(HOUR_MS)]]
    for epoch in range(1, 94):
        attempt, before = lines[(epoch - 1) % len(lines)], (epoch - 1) // len(lines)
        write(tmp_path, epoch, [*attempt, line("recalled", 1_500, crashes=before, stalled=0)])
    found = history.read(tmp_path, JOB, 94)
    assert (found.crashes, found.stalled) == (3, 1)


def test_journals_that_were_removed_use_up_nothing(tmp_path: Path) -> None:
    """With fewer than are read at most only what is there counts, whatever it recalls: whoever removes them begins anew."""
    write(tmp_path, 7, [line("recalled", 900, timeouts=6, crashes=6, stalled=6), *started(5), *crashed(9_000)])
    found = history.read(tmp_path, JOB, 8)
    assert (found.timeouts, found.crashes, found.stalled) == (0, 1, 1)


# --- how long saves took -------------------------------------------------------------------------------------------------


def test_the_newest_five_saves_of_any_job_are_told_newest_first(tmp_path: Path) -> None:
    """With how long training was held; failed ones, those that were there already, and older lines without figures are none."""
    write(tmp_path, 1, [*started(), *(commit(n, n, save_ms=n, hold_ms=n + 1) for n in range(1, 5))], job="55")
    write(tmp_path, 2, [*started(), commit(10, 10, save_ms=100, hold_ms=120), commit(11, 11, "failed", save_ms=7, hold_ms=7)])
    more = [commit(12, 12, save_ms=200, hold_ms=220), commit(13, 13), commit(14, 14, "already there", save_ms=9, hold_ms=9)]
    write(tmp_path, 3, [*started(), *more])
    found = history.read(tmp_path, JOB, 4)
    assert (found.saves_ms, found.holds_ms) == ((200, 100, 4, 3, 2), (220, 120, 5, 4, 3))


def test_where_journals_are_gone_the_manifests_tell_how_long_saves_took(tmp_path: Path) -> None:
    """The newest five that say it; they do not say how long training was held, which is at least as long."""
    for step in range(10, 80, 10):
        committed(tmp_path, step, save_ms=0 if step == 60 else step)
    found = history.read(tmp_path, JOB, 99)
    assert found.saves_ms == found.holds_ms == (70, 50, 40, 30, 20)
    assert found.interruptions == found.ran_ms == 0


def test_the_time_that_was_trained_runs_from_the_first_rank_to_the_notice(tmp_path: Path) -> None:
    """Without a rank from the start; a lost attempt counts up to its last line, a crash to the command's end."""
    attempts = [
        [*started(), *interrupted("preempted", 12_000)],  # 10 s
        [line("command_started", 1_000), *interrupted("preempted", 4_000)],  # 3 s
        [*started(), commit(3, 7_000)],  # lost: 5 s
        [*started(), *crashed(22_000)],  # 20 s
    ]
    found = told(tmp_path, *attempts)
    assert (found.interruptions, found.ran_ms) == (4, 38_000)


def test_it_does_not_end_with_a_notice_that_came_to_nothing_nor_with_a_start_in_place(tmp_path: Path) -> None:
    """A rehearsal after 2 s, a failure after 4 s and a start in place; the preemption comes after 10 s of it."""
    rehearsal = [line("notice", 4_000, cause="not known"), line("notice_over", 4_500)]
    failure = [line("command_exited", 6_000, code=1), line("command_started", 7_000, resume_step=3)]
    assert told(tmp_path, [*started(), *rehearsal, *failure, *interrupted("preempted", 12_000)]).ran_ms == 10_000
    assert told(tmp_path / "rehearsed", [*started(), *rehearsal, *interrupted("preempted", 12_000)]).ran_ms == 10_000


NO_NUMBERS = b'{"event": "commit", "step": "x", "save_ms": -1, "result": "committed"}\n' * 3
NO_TYPES = b'{"event": "adopted", "steps": {"a": 1}}\n{"event": "notice"}\n{"event": "exit", "code": null}\n'


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b'{"event"', b"[1]\n{}\n", NO_NUMBERS, NO_TYPES])
def test_a_broken_journal_says_nothing(tmp_path: Path, content: bytes) -> None:
    """It is for people first; what cannot be read neither counts nor stops the reading of others."""
    write(tmp_path, 1, [*started(5), *crashed(9_000)])
    write(tmp_path, 2, []).write_bytes(content)
    found = history.read(tmp_path, JOB, 3)
    assert (found.crashes, found.stalled, found.saves_ms) == (1, 1, ())


def test_a_pipe_or_a_link_in_place_of_a_journal_holds_no_start_up(tmp_path: Path) -> None:
    """It says nothing, as one that cannot be read."""
    write(tmp_path, 1, [*started(), *crashed(9_000)])
    place = tmp_path / "journal"
    os.mkfifo(place / "77-0-0-2-0.jsonl")
    (place / "77-0-0-3-0.jsonl").symlink_to(next(place.glob("77-*-1-0.jsonl")))
    assert history.read(tmp_path, JOB, 9).crashes == 1
    assert earlier.last_failure(tmp_path, JOB, 9) == ""
