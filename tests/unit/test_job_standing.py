"""How a job stands: judged by journals, process table and Slurm, and never guessed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.ctl.job_standing import GONE, Outside, end_of, standing, ways_of
from ckpt_supervisor.view.attempts import Attempt, read

BEGAN = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)

START: list[dict[str, Any]] = [{"event": "command_started", "resume_step": -1}]
HELLO: list[dict[str, Any]] = [*START, {"event": "rank_hello", "rank": 0}]
PREEMPTED: list[dict[str, Any]] = [
    *HELLO,
    {"event": "notice", "cause": "preempted"},
    {"event": "round_begun", "round": 1, "kind": "save and leave", "ranks": [0]},
    {"event": "commit", "round": 1, "step": 40, "result": "committed"},
    {"event": "round_committed", "round": 1, "step": 40},
    {"event": "leaving", "outcome": "fresh", "step": 40},
    {"event": "requeue", "result": "accepted"},
    {"event": "exit", "code": 75, "line": "preempted; step 40 is committed; Slurm has accepted the requeue"},
]
DONE: list[dict[str, Any]] = [*HELLO, {"event": "exit", "code": 0, "line": "training ended"}]


def start(lines: list[dict[str, Any]], epoch: int = 1) -> Attempt:
    """A start with these lines, a second apart."""
    stamps = ((BEGAN + timedelta(seconds=number)).isoformat() for number in range(len(lines)))
    whole = [{"ts": ts, "host": "node7", "pid": 4242, "level": "info", **line} for ts, line in zip(stamps, lines, strict=True)]
    return read(Attempt(epoch, "77", epoch - 1, "0"), whole)


@pytest.mark.parametrize(
    ("lines", "outside", "word", "said"),
    [
        (START, Outside(alive=True), "starting", "no rank has attached yet"),
        (HELLO, Outside(alive=True), "training", ""),
        (HELLO, Outside(None, "RUNNING"), "training", ""),
        (HELLO, Outside(None, "SUSPENDED"), "training", "Slurm says SUSPENDED"),
        (PREEMPTED[:4], Outside(alive=True), "saving", "ranks agree on a step, to leave (preempted)"),
        (PREEMPTED[:3], Outside(alive=True), "leaving", "preempted"),
        (PREEMPTED[:7], Outside(alive=True), "leaving", "preempted"),
        (HELLO, Outside(alive=False), "lost", "without a last word"),
        (HELLO, Outside(False, "COMPLETING"), "ending", "Slurm says COMPLETING"),
        (HELLO, Outside(None, "COMPLETING"), "ending", "Slurm says COMPLETING"),
        (HELLO, Outside(False, "PENDING"), "waiting", "Slurm says PENDING"),
        (HELLO, Outside(None, "REQUEUED"), "waiting", "Slurm says REQUEUED"),
        (HELLO, Outside(None, "NODE_FAIL"), "lost", "Slurm says NODE_FAIL"),
        (HELLO, Outside(None, GONE), "lost", "Slurm does not know the job any more"),
        (HELLO, Outside(), "unknown", "its process is on node7 and cannot be seen from here, and there is no scontrol here"),
        (HELLO, Outside(problem="timed out"), "unknown", "Slurm could not be asked (timed out)"),
        (PREEMPTED, Outside(False, "PENDING"), "waiting", "Slurm says PENDING"),
        (PREEMPTED, Outside(), "waiting", "requeued, and not started again as far as its journal tells"),
        (PREEMPTED, Outside(None, "COMPLETING"), "ending", "the job has not ended yet"),
        (PREEMPTED, Outside(None, "RUNNING"), "starting", "the next start has not written anything yet"),
        (PREEMPTED, Outside(None, "CANCELLED"), "cancelled", "Slurm says CANCELLED: it does not come back"),
        (PREEMPTED, Outside(None, "FAILED"), "interrupted", "Slurm says FAILED: it does not come back"),
        (PREEMPTED, Outside(None, GONE), "interrupted", "Slurm does not know it any more: it does not come back"),
        (DONE, Outside(), "finished", "training ended"),
        (DONE, Outside(None, "COMPLETED"), "finished", "training ended"),
        (DONE, Outside(None, "COMPLETING"), "ending", "the job has not ended yet"),
        ([*HELLO, {"event": "exit", "code": 3}], Outside(), "failed", "training ended with status 3"),
        ([*HELLO, {"event": "exit", "code": 143}], Outside(), "failed", "training ended with status 143"),
        ([*PREEMPTED[:7], {"event": "exit", "code": 143, "line": "cancelled"}], Outside(), "cancelled", "cancelled"),
        ([{"event": "refused", "text": "all damaged"}, {"event": "exit", "code": 76}], Outside(), "refused", "all damaged"),
    ],
    ids=range(30),
)  # fmt: skip
def test_how_a_job_stands(lines: list[dict[str, Any]], outside: Outside, word: str, said: str) -> None:
    """The newest start's journal first, then whether its process is there, then Slurm; COMPLETING is not the end."""
    found = standing(start(lines), outside)
    assert found.word == word
    assert said in found.text
    assert found.listens == (word in ("starting", "training", "saving", "leaving", "unknown"))


def test_after_a_preemption_and_a_full_run_both_attempts_stand_there_and_the_last_result() -> None:
    """Field case 66: PREEMPTED of the first attempt is not what became of the job."""
    starts = [start(PREEMPTED), start(DONE, 2)]
    assert [end_of(one) for one in starts] == ["preempted, step 40 saved, requeued", "training ended"]
    assert standing(starts[-1], Outside(None, "COMPLETED")).word == "finished"
    assert ways_of(starts) == {"time_limit": 0, "failed": 0, "interrupted": 1, "lost": 0}


def test_every_way_to_end_is_counted_as_what_it_is() -> None:
    """The limit, a crash, another interruption, no last word; a start that runs, or was refused, is none of them."""
    limit = [*HELLO, {"event": "notice", "cause": "end of the time limit ahead"}, *PREEMPTED[6:]]
    crash = [*HELLO, {"event": "exit", "code": 1}]
    refused: list[dict[str, Any]] = [{"event": "refused", "text": "damaged"}, {"event": "exit", "code": 76}]
    ways: list[list[dict[str, Any]]] = [limit, crash, PREEMPTED, HELLO, refused, HELLO]
    starts = [start(lines, number) for number, lines in enumerate(ways, 1)]
    assert ways_of(starts) == {"time_limit": 1, "failed": 1, "interrupted": 1, "lost": 1}
    stale = [*HELLO, {"event": "notice", "cause": "preempted"}, {"event": "leaving", "outcome": "stale", "step": -1}]
    assert end_of(start([*stale, {"event": "exit", "code": 76}])) == "preempted, this save did not make it"


def test_a_job_that_was_cancelled_in_the_queue_does_not_come_back_by_itself() -> None:
    """The last start's own line promises it, and was right when it was written."""
    line = "preempted; step 40 is committed; Slurm has accepted the requeue, the job comes back by itself"
    last = start([*PREEMPTED[:-1], {"event": "exit", "code": 75, "line": line}])
    found = standing(last, Outside(None, "CANCELLED"))
    assert found.text == (
        "Slurm says CANCELLED: it does not come back; the last start had ended with: preempted, step 40 saved, requeued"
    )


@pytest.mark.parametrize("later", ["requeued already", "not known", "no end in sight"])
def test_what_follows_from_the_requeue_is_not_the_cause(later: str) -> None:
    """Slurm's SIGTERM and what the job's state says of it come from the call: why it left was known before."""
    for cause in ("asked to leave", "end of the time limit ahead"):
        lines = [*HELLO, {"event": "notice", "cause": cause}, {"event": "leaving", "outcome": "fresh", "step": 40}]
        lines += [{"event": "requeue_called"}, {"event": "notice", "cause": later}, {"event": "exit", "code": 75}]
        assert start(lines).notice == cause
    assert start([*HELLO, {"event": "notice", "cause": "not known"}, {"event": "notice", "cause": later}]).notice == later
    cancelled = [*HELLO, {"event": "notice", "cause": "preempted"}, {"event": "requeue_called"}]
    assert start([*cancelled, {"event": "notice", "cause": "cancelled"}]).notice == "cancelled"


def test_a_start_in_place_does_not_change_where_the_attempt_began() -> None:
    """From scratch, and again from step 20 within the same attempt."""
    again = {"event": "command_started", "resume_step": 20, "restart": 1}
    found = start([*HELLO, {"event": "commit", "step": 20, "result": "committed"}, again])
    assert (found.resume_step, found.reached) == (-1, 20)


def test_a_command_that_failed_is_warned_of_with_its_status() -> None:
    """There is not always a reason that is known."""
    lines = [*HELLO, {"event": "command_exited", "level": "warning", "code": 137}]
    assert [text for _, text in start(lines).warnings] == ["command exited with status 137"]
    lines = [*HELLO, {"event": "command_exited", "level": "warning", "code": 137, "why": "SIGKILL by the kernel"}]
    assert [text for _, text in start(lines).warnings] == ["command exited with status 137: SIGKILL by the kernel"]


def test_a_crash_that_was_requeued_has_failed_by_itself() -> None:
    """--max-crashes has it come back like an interruption, but nobody interrupted it."""
    requeued = [*HELLO, {"event": "notice", "cause": Cause.CRASHED.value}, {"event": "leaving", "outcome": "stale", "step": -1}]
    back = [*requeued, {"event": "requeue", "result": "accepted"}, {"event": "exit", "code": 3}]
    assert end_of(start(back)) == "training failed with status 3, requeued"
    assert ways_of([start([*requeued, {"event": "exit", "code": 3}])]) == {
        "time_limit": 0,
        "failed": 1,
        "interrupted": 0,
        "lost": 0,
    }


def test_how_far_a_save_has_come_is_told_rank_by_rank() -> None:
    """As the words of the ranks come in, also where one line speaks of many of them."""
    lines = [
        *HELLO,
        {"event": "round_begun", "round": 3, "kind": "periodic", "ranks": [0, "1-7"]},
        {"event": "rank_agreed", "round": 3, "rank": 0},
        {"event": "rank_agreed", "round": 3, "ranks": ["1-3"]},
    ]
    alive = Outside(alive=True)
    assert standing(start(lines), alive).text == "ranks agree on a step (4 of 8 ranks)"
    lines += [{"event": "agreed", "round": 3, "step": 50}]
    assert standing(start(lines), alive).text == "ranks run on to the step that was agreed"
    lines += [{"event": "go", "round": 3}, {"event": "rank_written", "round": 3, "ranks": ["0-4"]}]
    assert standing(start(lines), alive).text == "ranks have written (5 of 8 ranks)"
    lines += [{"event": "verified", "round": 3}]
    assert standing(start(lines), alive).text == "verified, being committed"
    lines += [{"event": "round_given_up", "round": 3}]
    assert standing(start(lines), alive).word == "training"
