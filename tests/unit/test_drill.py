"""The pure parts of `ckptctl drill`: the stand-in's texts, what the played Slurm does, the verdicts, and how they are drawn."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ckpt_supervisor.adapters import slurm_text
from ckpt_supervisor.config import read_options
from ckpt_supervisor.core.views import JobView
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.drill import cluster, controller, picture, plan, running, scontrol
from ckpt_supervisor.drill.controller import Job
from ckpt_supervisor.drill.facts import Facts, Line, Probe, Times, of_interruption, step_ms
from ckpt_supervisor.drill.plan import Plan
from ckpt_supervisor.drill.verdict import Result, judge
from ckpt_supervisor.watches import places

NOW_MS = 1_800_000_000_400
JOB = Job(60_000_016, "drill", "me", "drill1", "low", grace_ms=20_000, kill_wait_ms=6_000, start_ms=NOW_MS)


def planned(words: str = "--every-steps 100", **changed: Any) -> Plan:
    """A plan with these options of ckpt-supervise."""
    options = read_options([*words.split(), "--", "true"], {})
    made = Plan(options, tuple(words.split()), ("true",), 20_000, 6_000, 120_000, None, 60_000)
    return msgspec.structs.replace(made, **changed)


def printed(job: Job, *words: str) -> tuple[int, str, str]:
    """What the stand-in answers."""
    return scontrol.answer(words, msgspec.to_builtins(job))


def looked(job: Job) -> JobView:
    """The job as the supervisor reads it."""
    _, text, _ = printed(job, "show", "job", str(job.number))
    seen = slurm_text.parse_job(text, str(job.number), NOW_MS)
    assert isinstance(seen, JobView), seen
    return seen


def test_what_the_stand_in_prints_is_read_as_slurms_own() -> None:
    """Job, configuration, partition and step, with the parsers that read the real ones."""
    running_job = looked(controller.started(JOB, NOW_MS, 60_000))
    assert (running_job.state, running_job.reason, running_job.restarts) == ("RUNNING", "None", 0)
    assert running_job.end_ms == 1_800_000_061_000
    assert (running_job.preempt_ms, running_job.requeue, running_job.batch) == (None, True, True)
    assert not running_job.time_limit_unlimited
    grace = looked(controller.preempted(JOB, NOW_MS).job)
    assert (grace.state, grace.preempt_ms, grace.end_ms) == ("RUNNING", 1_800_000_000_000, 1_800_000_021_000)
    again = looked(controller.requeued(JOB).job)
    assert (again.state, again.restarts, again.preempt_ms, again.end_ms) == ("COMPLETING", 1, None, None)
    cancelled = looked(controller.cancelled(JOB, NOW_MS).job)
    assert (cancelled.state, cancelled.reason, cancelled.restarts) == ("COMPLETING", "None", 0)
    config = slurm_text.parse_config(printed(JOB, "show", "config")[1])
    assert (config.kill_wait_ms, config.proctrack, config.version, config.requeue_exit) == (6_000, "cgroup", "24.11.5", ())
    assert slurm_text.parse_partition_grace(printed(JOB, "show", "partition", "-o", "low")[1]) == 20_000
    assert slurm_text.parse_step_state(printed(JOB, "show", "step", "60000016.0")[1]) == "RUNNING"
    code, _, err = printed(JOB, "show", "job", "4711")
    assert slurm_text.no_such_job(code, err)


def test_the_stand_in_answers_a_requeue_as_slurm_does(tmp_path: Path) -> None:
    """Accepted once, then "pending"; refused with --no-requeue. Run bare, as the drill has it run."""
    file = tmp_path / "job.json"
    file.write_bytes(msgspec.json.encode(JOB))
    call = [sys.executable, "-I", "-S", scontrol.__file__, str(file), "requeue", str(JOB.number)]
    kinds = []
    for _ in range(2):
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        kinds.append(slurm_text.classify_requeue(done.returncode, done.stdout, done.stderr).kind)
    assert kinds == ["accepted", "pending"]
    job = msgspec.json.decode(file.read_bytes(), type=Job)
    assert (job.state, job.restarts, job.requeue_calls, job.is_requeued) == ("COMPLETING", 1, 2, True)
    refused = printed(msgspec.structs.replace(JOB, requeue=False), "requeue", str(JOB.number))
    assert slurm_text.classify_requeue(*refused).kind == "refused"


def test_the_played_slurm_ends_a_grace_and_a_limit_differently() -> None:
    """After the grace the job is requeued, at its limit it is not; TERM comes twice, and SIGKILL after KillWait."""
    begun = controller.started(JOB, NOW_MS, 60_000)
    assert controller.end_of_time(begun, NOW_MS + 60_000) is None
    limit = controller.end_of_time(begun, NOW_MS + 61_000)
    assert limit is not None
    assert (limit.job.reason, limit.job.is_requeued, limit.kill_in_ms) == ("TimeLimit", False, 6_000)
    assert limit.signals.count(signal.SIGTERM) == 2
    grace = controller.preempted(begun, NOW_MS)
    assert (grace.signals, grace.kill_in_ms) == ((signal.SIGTERM, signal.SIGCONT), None)
    end = controller.end_of_time(grace.job, NOW_MS + 21_000)
    assert end is not None
    assert end.job.is_requeued
    assert controller.over(limit.job, 0, killed=True).state == "TIMEOUT"


@pytest.mark.parametrize(("code", "lists", "state"), [(0, "", "COMPLETED"), (75, "", "FAILED"), (85, "85", "PENDING")])
def test_who_leaves_in_the_grace_without_a_requeue_has_lost_the_job(code: int, lists: str, state: str) -> None:
    """As Slurm 22.05 has it; only a status that RequeueExit lists brings it back."""
    job = controller.preempted(msgspec.structs.replace(JOB, requeue_exit=lists), NOW_MS).job
    over = controller.over(job, code, killed=False)
    assert (over.state, over.is_requeued) == (state, bool(lists))


# --- the journal, and what is made of it ---------------------------------------------------------------------------------


def line(mono_ms: int, event: str, **fields: Any) -> Line:
    """One line of a journal."""
    return {"mono_ms": mono_ms, "event": event, **fields}


def saved_and_left(step: int = 40, code: int = 75) -> tuple[Line, ...]:
    """A notice that went well: 100 ms to agree, 2 s to save, 300 ms to verify, 50 ms to commit, 500 ms to leave."""
    return (
        line(1_000, "signal", signal="SIGTERM"),
        line(1_001, "round_begun", round=3),
        line(1_002, "rank_agreed", round=3, rank=0, entered=[step, 0]),
        line(1_100, "go", round=3),
        line(1_101, "rank_saving", round=3, rank=0),
        line(3_100, "rank_written", round=3, rank=0),
        line(3_400, "verified", round=3, problem=""),
        line(3_450, "commit", round=3, step=step, result="committed"),
        line(3_451, "leaving", outcome="fresh", step=step),
        line(3_900, "rank_left", rank=0, went_on=False),
        line(3_950, "exit", code=code),
    )


def resumed(step: int, at: int) -> tuple[Line, ...]:
    """The next start."""
    return (line(9_000, "command_started", resume_step=step), line(9_500, "rank_agreed", round=1, rank=0, entered=[at, 0]))


def seen(path: str = "nograce", **changed: Any) -> Facts:
    """A rehearsal that went well, but for what is changed."""
    probes = (Probe(10, 500, Times(5, 100, 10, 5)), Probe(20, 1_615, Times(5, 100, 10, 5)))
    whole = Facts(path, given_ms=6_000, before=saved_and_left(), probes=probes, newest=40, code=75, requeued=True)
    return msgspec.structs.replace(msgspec.structs.replace(whole, after=resumed(40, 41)), **changed)


def test_the_shares_of_a_save_are_read_from_the_journal() -> None:
    """Each share ends with its event; what was committed before the notice is not taken for it."""
    earlier = (line(100, "round_begun", round=2), line(200, "commit", round=2, step=30, result="committed"))
    times = of_interruption((*earlier, *saved_and_left()))
    assert (times.agree_ms, times.save_ms, times.verify_ms, times.commit_ms, times.leave_ms) == (100, 2_000, 300, 50, 500)
    assert (times.entered, times.step, times.failed_in) == (40, 40, "")
    cut = of_interruption((*earlier, *saved_and_left()[:5]))
    assert (cut.agree_ms, cut.save_ms, cut.step, cut.failed_in) == (100, None, None, "save")
    assert step_ms(seen().probes) == 100.0


def test_a_notice_that_went_well_passes() -> None:
    """Nothing lost, and the figures are in the result."""
    result = judge(seen(), planned())
    assert (result.passed, result.lost_steps, result.saved_step, result.resumed_step) == (True, 0, 40, 40)


UNSAVED = (
    line(1_000, "signal", signal="SIGTERM"),
    line(1_010, "leaving", outcome="stale", step=20, reason="no save was begun"),
    line(1_300, "exit", code=76),
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"requeued": False}, "does not come back"),
        ({"killed": True}, "not out when its time was over"),
        ({"code": 1}, "left with 1 in place of 75"),
        ({"after": resumed(20, 21)}, "although step 40 is intact"),
        ({"after": resumed(40, 2)}, "began at step 2"),
        ({"after": (*resumed(40, 41), line(9_400, "rank_went_back", rank=0, step=2))}, "began at step 2"),
        ({"after": ()}, "not started again"),
        (
            {"before": (*saved_and_left()[:-2], line(8_500, "command_asked"), line(8_600, "exit", code=75))},
            "had not ended 5.0 s after",
        ),
        ({"before": UNSAVED, "newest": 20, "code": 76}, "not saved (step 20 stands): no save was begun"),
        ({"before": UNSAVED, "newest": None, "code": 76}, "nothing was saved before"),
        ({"problem": "waited 9 s for a rank to attach, in vain", "before": (), "probes": ()}, "a rank to attach"),
    ],
)
def test_what_is_wrong_is_named_and_has_an_advice(changed: dict[str, Any], words: str) -> None:
    """Each of them is a FAIL with a reason and something to do."""
    result = judge(seen(**changed), planned())
    assert not result.passed
    assert words in result.why
    assert result.advice


def test_a_slow_end_is_no_training_that_goes_on() -> None:
    """Python with torch takes seconds to end: that a short KillWait cuts it is a note."""
    result = judge(seen(before=(*saved_and_left()[:-1], line(5_200, "command_asked"), line(5_300, "exit", code=75))), planned())
    assert result.passed
    assert "still ending 1.7 s after" in result.notes[0]
    stubborn = (*saved_and_left()[:9], line(3_900, "rank_left", rank=0, went_on=True), line(3_950, "exit", code=75))
    assert "went on after" in judge(seen(before=stubborn), planned()).why


def test_a_save_that_is_too_slow_is_told_with_both_numbers() -> None:
    """What a save takes, what there is, and the way out that fits the path; lost steps are reckoned from the pace."""
    slow = tuple(Probe(step, ms, Times(5, 12_000, 300, 100)) for step, ms in ((10, 500), (20, 13_900)))
    for path, way in (("grace", "GraceTime"), ("warning", "--signal=USR1@"), ("limit", "--lead"), ("nograce", "KillWait")):
        result = judge(seen(path, before=UNSAVED, newest=20, code=76, probes=slow, given_ms=9_100, unsaved_ms=500), planned())
        assert "a save takes 12.4 s, and there are 9.1 s for all of it" in result.advice
        assert way in result.advice
        assert (result.lost_steps, result.lost_is_rough) == (5, True)


def test_a_cancelled_job_stays_cancelled_saved_or_not() -> None:
    """143 and no requeue is a PASS; asking for a requeue is never one."""
    good = {"code": 143, "requeued": False, "after": ()}
    assert judge(seen("cancel", **good), planned()).passed
    unsaved = judge(seen("cancel", **good | {"before": UNSAVED, "newest": 20}), planned())
    assert unsaved.passed
    assert "not saved" in unsaved.why
    assert not judge(seen("cancel", **good, revived=True), planned()).passed
    assert not judge(seen("cancel", code=143, after=()), planned()).passed


def test_crashes_and_lost_nodes_are_judged_by_the_options() -> None:
    """Without any periodic save a lost node loses everything, whatever the drill has asked for; the note tells what it costs."""
    lost = {"before": (), "code": 137, "newest": 20, "after": resumed(20, 21), "unsaved_ms": 300}
    assert not judge(seen("nodeloss", **lost), planned("--every-steps 0")).passed
    result = judge(seen("nodeloss", **lost), planned())
    assert (result.passed, result.lost_steps) == (True, 3)
    assert "up to 100 steps, about 10.0 s" in result.notes[0]
    crash = {**lost, "requeued": False}
    assert "not requeued" in judge(seen("crash", **crash), planned()).why
    assert not judge(seen("crash", **crash), planned("--restarts 1")).passed
    assert not judge(seen("crash", **crash), planned("--max-crashes 1")).passed
    assert "ended with 0" in judge(seen("crash", **crash | {"code": 0}), planned()).why
    assert "without --every or --every-steps" in judge(seen("crash", **crash), planned("--every-steps 0")).why
    assert "in place" in judge(seen("crash", **crash | {"code": None}), planned("--every-steps 100 --restarts 1")).why


def test_a_hang_that_was_waited_for_and_not_found_does_not_pass() -> None:
    """It left in time at the preemption; in earnest there might be none for days."""
    hang = {"before": UNSAVED, "newest": 20, "code": 76, "after": resumed(20, 21)}
    assert judge(seen("hang", **hang, notes=("found out after 61 s",)), planned()).passed
    result = judge(seen("hang", **hang, notes=("not found out: waited 120 s for the hang to be found out, in vain",)), planned())
    assert not result.passed
    assert "the hang was not found out: waited 120 s" in result.why


# --- drawing, and the command line ----------------------------------------------------------------------------------------


def test_a_bar_shows_the_shares_and_where_the_kill_would_come() -> None:
    """As long for everybody; a kill in the middle of the save is a mark in it."""
    fits = Result("grace", True, "", "", 10_000, 1_000, 6_000, 2_000, 500, 500, saved_step=3)
    assert picture.bar(fits, letters=True) == "a" * 3 + "s" * 18 + "v" * 6 + "l" * 3
    slow = Result("grace", False, "", "", 5_000, 1_000, needs_ms=9_000)
    assert picture.bar(slow, letters=True) == "aaa" + "s" * 12 + "|" + "s" * 15
    assert picture.bar(Result("crash", True, ""), letters=False) == ""
    rows = picture.table([fits, slow], letters=True, colour=False)
    assert rows[1].startswith("grace     PASS     1.0 s    6.0 s    2.0 s    1.0 s    10.0 s   100 %")
    assert any(row.startswith("grace: FAIL") for row in rows)
    assert all(row.isascii() for row in rows)


@pytest.mark.parametrize(
    ("words", "complaints"),
    [
        (["--", ""], ["no command"]),
        (["--", "no-such-program"], ["was not found"]),
        ([], ["no command"]),
        (["--path", "warning,flood", "--grace", "soon", "--", "true"], ["choose from", "--grace"]),
        (["--options", "--dir /data --keep 1", "--", "true"], ["--dir"]),
        (["--options", "--every-step 5", "--", "true"], ["unknown option"]),
        (["--options", "--adopt /data/step_*.pt", "--", "true"], ["{scratch}"]),
        (["--side-by-side", "0", "--", "true"], ["from 1 to"]),
        (["--job", "1", "--", "true"], ["neither a command"]),
    ],
)
def test_wrong_usage_is_told_at_once_and_nothing_is_started(
    words: list[str], complaints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, every complaint, no scratch directory."""
    assert ctl.main(["drill", "--dir", str(tmp_path / "checkpoints"), *words]) == 2
    err = capsys.readouterr().err
    assert all(complaint in err for complaint in complaints), err
    assert list(tmp_path.iterdir()) == []


def test_the_limit_of_a_rehearsal_leaves_room_for_the_start() -> None:
    """Lead, the saves that it grows by, and half as much again as the first start took; a given one counts as it is."""
    assert plan.limit_for(planned("--lead 8s"), 10_000, 2_000) == 8_000 + 15_000 + plan.START_SLACK_MS
    assert plan.limit_for(planned(), 10_000, 2_000) == 34_000 + 15_000 + plan.START_SLACK_MS
    assert plan.limit_for(planned(limit_ms=70_000), 10_000, 2_000) == 70_000


def test_the_job_of_a_cluster_drill_is_in_the_shape_of_the_templates(tmp_path: Path) -> None:
    """`exec srun ckpt-supervise --dir SCRATCH ... -- COMMAND`, quoted, never resubmitted in earnest; {scratch} is filled in."""
    made = planned("--resubmit sbatch", command=("python", "a b.py", "--save={scratch}"))
    text = cluster.script(made, tmp_path, tmp_path / "checkpoints")
    assert text.startswith("#!/bin/bash\nexec srun ")
    assert f"--dir {tmp_path}/checkpoints --keep 2 --resubmit sbatch --resubmit '' -- python 'a b.py'" in text
    assert f"--save={tmp_path}/own" in text
    assert "--time=14" in cluster.submit_words(made, "grace", tmp_path)


def test_a_running_jobs_signal_is_for_its_supervised_step_alone(tmp_path: Path) -> None:
    """scancel --signal without a step signals all of them, and what has no handler for USR1 dies of it."""
    env = {"CKPT_SUPERVISE_STATE": str(tmp_path / "state")}
    assert places.remember(env, places.Home("4711", "3", tmp_path)) == ""
    known = SimpleNamespace(asked_dir=None, dir=tmp_path, environ=env)
    assert running.home_of(known, "4711", "") == places.Home("4711", "3", tmp_path)  # type: ignore[arg-type]
    given = SimpleNamespace(asked_dir=str(tmp_path), dir=tmp_path, environ=env)
    assert running.home_of(given, "4711", "2") == places.Home("4711", "2", tmp_path)  # type: ignore[arg-type]
    assert running.home_of(given, "4711", "") == places.Home("4711", "", tmp_path)  # type: ignore[arg-type]


def test_a_rehearsal_on_a_running_job_passes_only_if_it_trains_on() -> None:
    """Saved and RUNNING; not when it leaves, is not saved, or hears nothing (field case 26)."""
    view_of = looked(controller.started(JOB, NOW_MS, 3_600_000))
    saved = [*saved_and_left()[:8], line(3_460, "notice_over")]
    assert running.judge(saved, view_of, 1.0).passed
    assert "the job leaves" in running.judge(list(saved_and_left()), view_of, 1.0).why
    assert "not saved" in running.judge([*saved_and_left()[:3]], view_of, 1.0).why
    assert "has not come" in running.judge([], view_of, 1.0).why
    assert not running.judge(saved, looked(controller.cancelled(JOB, NOW_MS).job), 1.0).passed


def test_a_supervisor_imports_nothing_of_it() -> None:
    """A training run does not pay for the rehearsal."""
    words = "import sys, ckpt_supervisor.cli, ckpt_supervisor.launch, ckpt_supervisor.app; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in said if "drill" in name] == []


def test_a_training_that_fails_by_itself_is_not_told_to_attach() -> None:
    """Nor is one whose save raises told to call hook.step(n)."""
    died = seen(problem="it ended with 9 before a rank to attach: boom", before=(line(100, "command_exited", code=9),), probes=())
    assert "training fails by itself here" in judge(died, planned()).advice
    save = "a save was asked for, with no end in sight, and failed: rank 0 failed: OSError: No space left on device"
    assert "the save itself fails" in judge(seen(problem=save), planned()).advice
