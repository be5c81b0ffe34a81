"""What is decided from the time that is left: a save that cannot end is not begun, one that runs is finished.

Owns: rows 1 and 4 of the issue "Deadlines, requeue policy, crashes" on real Slurm, and with row 1 field case 29 in full.
Must not: wait for time limits; test_limits.py has everything that they decide.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.slurm_checks import check_out_before_the_kill, check_requeued, check_resumed_at
from tests.support.slurm_stage import TRAPPED, instant, own_toy, pause, toy_words, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm_stage import Run, Stage

INTO_THE_SAVE_S = 22
"""Of a save of 30 s; GraceTime and KillWait leave 13.9 s for the rest: some seconds more than it needs, far less than 30 s."""

NOT_BEGUN = "no save was begun: it takes 3"


@pytest.mark.timeout(240)
def test_no_save_is_begun_that_cannot_end_and_one_that_can_is_finished(new_stage: Callable[..., Stage]) -> None:
    """Row 1 and field case 29: 30 s a save, GraceTime 15, KillWait 6: the older one stands; 22 s into a save: that one counts."""
    stage = new_stage(nodes=2, proctrack="cgroup")
    slow = {"command": own_toy("--save-ms 30000"), "script": TRAPPED}
    known = stage.submit("-p", "low", **slow)
    running = stage.submit("-p", "low", supervise="--every-steps 20", **slow)
    known.wait_steps(3)
    known.cancel("--signal=USR2")
    running.wait_line("saving 20")
    pause(INTO_THE_SAVE_S)
    running.preempt()
    save = known.wait_event("commit", result="committed")
    assert 30_000 <= save["save_ms"] <= save["hold_ms"]
    known.preempt()

    check_requeued(running, code=running.wait_exit())
    assert running.committed(attempt=0) == [20]
    assert [entry["kind"] for entry in running.events("round_begun", attempt=0)] == ["periodic"]
    check_resumed_at(running, 20)

    check_requeued(known, code=76)
    check_out_before_the_kill(known)
    assert [entry["kind"] for entry in known.events("round_begun", attempt=0)] == ["save and go on"]
    assert known.newest() == save["step"]
    assert not list(known.dir.glob(".partial-*"))
    left = known.event("leaving", attempt=0)
    assert (left["outcome"], left["step"]) == ("stale", save["step"])
    assert NOT_BEGUN in left["reason"]
    check_the_save_has_its_share(known)
    assert f"step-{save['step']:09d} stands" in known.event("exit", attempt=0)["line"]

    check_resumed_at(known, save["step"])
    for pattern in (
        rf"could not save \(preempted\): {NOT_BEGUN}.*s were left for it",
        r"GraceTime 15 s and KillWait 6 s leave 1.*took 3",
    ):
        wait_for(lambda pattern=pattern: [text for text in warned(known) if re.search(pattern, text)], lambda: f"{warned(known)}")


def warned(run: Run) -> list[str]:
    """What the second start warns of."""
    return [entry["text"] for entry in run.events("warning", attempt=1)]


def check_the_save_has_its_share(run: Run) -> None:
    """Of GraceTime and KillWait, counted from Slurm's own PreemptTime: 11 to 17 s of those 21, or that share of what is left."""
    notice = run.events("notice", attempt=0, cause="preempted")[0]
    (preempted,) = {look["preempt_s"] for look in run.events("look", attempt=0) if look["preempt_s"]}
    assert abs(instant(notice["ts"]) + notice["left_ms"] / 1000 - preempted - 21) < 1.5
    assert 11 / 21 < notice["save_left_ms"] / notice["left_ms"] < 17 / 21


def test_three_preemptions_within_seconds_of_the_start_use_up_nothing(new_stage: Callable[..., Stage]) -> None:
    """Row 4: in its imports, and twice as it begins, with saves that fail: with budgets of nothing it comes back each time."""
    stage = new_stage(proctrack="linuxproc")
    older = stage.prepare("r1", "--every-steps 5", "--steps 7")
    starts = stage.lab.root / "starts"
    trains = shlex.join(toy_words("--steps 100000 --step-ms 20 --log {log}"))
    command = (
        f"echo >>{starts}; case $(wc -l <{starts}) in 1) exec sleep 300;; 2|3) exec {trains} --fail-save;; esac; exec {trains}"
    )
    budgets = "--max-timeouts 0 --max-crashes 0 --max-stalled 1 --resume-tries 1"
    run = stage.submit("-p", "low", command=["bash", "-c", command], supervise=budgets, script=TRAPPED)
    for number in range(3):
        run.wait_event("look", number + 1, why="start")
        run.wait_event("rank_hello" if number else "command_started", max(1, number))
        run.preempt()
        assert run.wait_exit(number + 1) in (75, 76)  # 75: before its first step there is nothing new to save.
        run.wait_requeued(number + 1)
    recalled = run.wait_event("recalled", attempt=3, timeout=90)
    told = {name: recalled[name] for name in ("timeouts", "crashes", "stalled", "interruptions")}
    assert told == {"timeouts": 0, "crashes": 0, "stalled": 0, "interruptions": 3}
    run.wait_steps(older + 5)
    assert [entry["resume_step"] for entry in run.events("command_started")] == [older] * 4
    assert run.events("passed_over") == []
    assert not [path for path in run.dir.iterdir() if path.name.startswith((".failed-", ".damaged-"))]
    assert [call.error for call in run.requeue_calls()] == [None] * 3
    run.verify()
