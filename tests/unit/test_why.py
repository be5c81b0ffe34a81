"""`ckptctl why`: the lines for each cause, what to change, and Slurm's own words."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.ctl import slurm_words
from ckpt_supervisor.view import why
from ckpt_supervisor.view.facts import Attempt, Run, Word

from tests.support.journals import BEGIN_S, Start, preempted
from tests.unit.test_story import WAYS, told

CHANGES = {
    "failed": "traceback",
    "stale": "GraceTime",
    "hung": "--event stack",
    "starved": "--mem",
    "killed": "supervisor was killed",
    "no_end": "--lead",
    "by_hand": "somebody had it requeued",
    "ahead": "nothing: the save was committed in time",
    "cancelled": "a person ended it",
    "asked": "a person ended it",
    "then_requeued": "GraceTime",
    "node": "save more often",
}


def told_of(run: Run, attempt: str = "", said: why.Said | None = None) -> dict[str, str]:
    """Titles and sentences of the attempt."""
    one = why.chosen(run, attempt)
    assert one is not None
    told_by = why.Said() if said is None else said
    return {"cause": why.told_cause(one, told_by), **dict(why.facts(one, run, told_by))}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "good"])
def test_every_cause_is_named_with_what_to_change(tmp_path: Path, way: str) -> None:
    """Cause, steps lost, and a change that fits."""
    end, cause, lost = WAYS[way]
    end(Start(tmp_path).begin(0).save(51, 1, 50))
    said = told_of(told(tmp_path, alive=(1, False)))
    assert said["cause"].startswith(cause)
    assert ("nothing" in said["lost"]) == (lost == 0)
    assert lost == 0 or f"{lost} steps" in said["lost"]
    assert CHANGES[way] in said["change"]


def test_a_save_that_did_not_make_it_names_the_late_rank_and_the_numbers(tmp_path: Path) -> None:
    """What time there was, what saves had taken, and who was late."""
    WAYS["stale"][0](Start(tmp_path).begin(0).save(51, 1, 50))
    said = told_of(told(tmp_path))
    assert said["notice"] == "SIGTERM at 01-05 08:01:11; 30.0 s until the kill; it was out after 9.6 s"
    assert "to save 24.0 s, to verify 26.0 s, to leave 28.0 s" in said["decided"]
    assert "a save takes 2.0 s; given up at step 70 after 9.0 s: rank 0: late" in said["decided"]
    assert said["late"] == "rank 0: late: it was not ready in time"
    assert "ckptctl log --rank 0" in said["change"]


def test_no_save_was_begun_says_on_which_numbers(tmp_path: Path) -> None:
    """The supervisor's own reason stands as it is."""
    start = Start(tmp_path).begin(0).save(51, 1, 50).notice(71, "preempted", left_s=7)
    reason = "no save was begun: it takes 20.0 s (the last one took that long), and 1.0 s were left for it"
    start.leave(71, "stale", 76, reason=reason)
    said = told_of(told(tmp_path))
    assert reason in said["decided"]
    assert said["change"].startswith("there was no time for a save")


def test_a_good_save_says_how_much_time_was_to_spare(tmp_path: Path) -> None:
    """26.8 of 30 s; where little was left, that is said too."""
    preempted(tmp_path)
    said = told_of(told(tmp_path))
    assert said["change"] == "nothing: the save was committed in time, with 26.8 s to spare"
    assert "committed at step 90: agree 0 ms, arrive 100 ms, write 2.0 s, verify 500 ms" in said["decided"]
    start = Start(tmp_path, 2, 1).begin(200, 90).notice(250, "preempted", left_s=4).save(250, 1, 130, "save and leave")
    start.leave(253, "fresh", 75)
    assert told_of(told(tmp_path))["change"].startswith("it was close (400 ms to spare of 4.0 s)")


def test_the_last_interruption_is_told_unless_another_attempt_is_asked_for(tmp_path: Path) -> None:
    """A good end afterwards is no interruption; a run without any tells of its end."""
    preempted(tmp_path)
    Start(tmp_path, 2, 1).begin(200, 90).ended(260, 0)
    run = told(tmp_path)
    chosen = [why.chosen(run), why.chosen(run, "1"), why.chosen(run, "7")]
    assert [one and one.epoch for one in chosen] == [1, 2, None]
    assert why.lines(run.attempts[0], run, why.Said(), None)[0].endswith("; it has finished since")


def test_a_run_that_was_never_interrupted_says_that_it_is_at_it(tmp_path: Path) -> None:
    """No advice for a run that trains."""
    Start(tmp_path).begin(0).save(51, 1, 50)
    said = told_of(told(tmp_path, alive=(1, True)))
    assert said == {"cause": "at it now", "": "no attempt of it was interrupted so far"}


def test_ranks_that_come_later_than_the_others_are_named() -> None:
    """By a second at least; the one that had not written too."""
    words = [Word(rank, 5, 100, 2_000) for rank in range(7)]
    assert why.slowest(words) == ""
    assert why.slowest([*words, Word(7, 5, 4_100, 6_500)]) == (
        "rank 7 came last, 4.0 s after most; rank 7 had written last, 4.5 s after most"
    )
    assert why.slowest([*words, Word(7, 5, 200)]) == "rank 7 had not written"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_the_terminal_and_hold_nothing_that_it_obeys(tmp_path: Path, width: int) -> None:
    """Rows 4 and 7."""
    nasty = "\x1b[2J\u202e" + "x" * 5_000
    start = Start(tmp_path, host=nasty).begin(0).say(5, "rank_failed", "warning", rank=0, reason=nasty, step=4)
    start.exit(8, 1, nasty)
    run = told(tmp_path)
    lines = why.lines(run.attempts[0], run, why.Said((nasty,)), width)
    assert max(map(len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert len(lines) < 240


# Slurm's words

OUTPUT = """\
ready
ckpt-supervise: preempted; step 90 is committed
slurmstepd-n1: error: *** JOB 4711 ON n1 CANCELLED AT 2026-01-05T08:01:33 DUE TO JOB REQUEUE ***
ckpt-supervise: resuming from step 90 (the attempt before began from scratch)
user code says: slurmstepd: error: *** STEP 4711.0 CANCELLED DUE TO TIME LIMIT ***
slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-01-05T09:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
srun: error: n1: task 0: Killed
"""


def two(directory: Path) -> Run:
    """A preempted start, and one that was lost."""
    preempted(directory)
    start = Start(directory, 2, 1).begin(200, 90)
    start.say(260, "memory", "debug", tree_bytes=1, used_bytes=1, limit_bytes=2, limit_of="job")
    WAYS["killed"][0](start)
    return told(directory, alive=(2, False))


def test_slurms_lines_go_to_the_attempt_that_they_are_about(tmp_path: Path) -> None:
    """One file of two attempts. A line that only looks like it, in the middle of a user's own, is none."""
    run = two(tmp_path)
    first, second = run.attempts
    assert [slurm_words.until_of(one, run) for one in run.attempts] == [second.began_ns, None]
    assert slurm_words.own_lines(OUTPUT, first, second.began_ns) == [OUTPUT.splitlines()[2]]
    assert slurm_words.own_lines(OUTPUT, second) == OUTPUT.splitlines()[5:7]
    assert slurm_words.own_lines(OUTPUT, second, 0) == [], "nothing tells its place"
    assert slurm_words.own_lines("", second) == []


def stamped(words: str, at_s: float) -> str:
    """A line of slurmstepd, as its node's clock has it."""
    when = datetime.fromtimestamp(BEGIN_S + at_s).isoformat()  # noqa: DTZ006 - Slurm writes it without its zone
    return f"slurmstepd-n1: error: *** {words} ON n1 CANCELLED AT {when} DUE TO NODE FAILURE ***"


def test_slurms_line_of_a_lost_start_between_others_is_known_by_its_time(tmp_path: Path) -> None:
    """It has no last word; the line lies between its begin and the next one's. What srun says right after it belongs to it."""
    two(tmp_path)
    Start(tmp_path, 3, 2).begin(5_000, 90).ended(5_060, 0)
    run = told(tmp_path)
    mine = [stamped("JOB 4711", 300), "srun: error: n1: task 0: Killed"]
    text = "\n".join(["ready", stamped("JOB 4711", 90), "ready", *mine, "ckpt-supervise: resuming from step 90", "ready"])
    assert slurm_words.own_lines(text, run.attempts[1], slurm_words.until_of(run.attempts[1], run)) == mine


def test_slurms_line_about_another_job_or_from_another_day_is_no_cause(tmp_path: Path) -> None:
    """One file that several jobs have written to. An element of an array has a number that the journal does not know."""
    _, second = two(tmp_path).attempts
    others = [stamped("JOB 999", 300), stamped("STEP 999.0", 300), stamped("JOB 4711", 3 * 86_400)]
    others.append("slurmstepd: error: Detected 1 oom_kill event in StepId=999.0. Some of the step tasks have been OOM Killed.")
    assert slurm_words.own_lines("\n".join(others), second) == []
    element = msgspec.structs.replace(second, job="100_3")
    assert slurm_words.own_lines("\n".join(others), element) == [others[0], others[1], others[3]]


def test_an_output_without_a_word_about_the_attempt_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only if it was named. A requeue that we had asked for is a word, and needs no mention."""
    two(tmp_path)
    (tmp_path / "none.txt").write_text("ready\n")
    (tmp_path / "out.txt").write_text(OUTPUT)
    words = ["why", "--dir", str(tmp_path), "--attempt", "0", "--json", "--output"]
    assert ctl.main([*words, str(tmp_path / "none.txt")]) == 0
    assert f"no words about this attempt in {tmp_path / 'none.txt'}" in capsys.readouterr().err
    assert ctl.main([*words, str(tmp_path / "out.txt")]) == 0
    said = capsys.readouterr()
    assert (said.err, json.loads(said.out)["slurm"]) == ("", [])


def test_a_number_that_several_attempts_have_takes_the_last_interruption_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Slurm every start is attempt 0; the advice names what `ckptctl log` understands."""
    for epoch in (1, 2):
        WAYS["hung"][0](
            Start(tmp_path, epoch, step_id="local", job="local-pc").begin(1_000 * epoch).save(1_000 * epoch + 51, 1, 50)
        )
    Start(tmp_path, 3, step_id="local", job="local-pc").begin(4_000, 50).ended(4_060, 0)
    words = ["why", "--dir", str(tmp_path), "--no-slurm", "--attempt"]
    assert ctl.main([*words, "0"]) == 0
    said = capsys.readouterr()
    assert said.err == "ckptctl: why: --attempt 0 is 0#1, 0#2, 0#3: this is 0#2; for another one say --attempt 0#3\n"
    assert "attempt 0#2: training hung" in said.out
    assert "--event hang_suspected --attempt 0#2" in said.out
    assert ctl.main([*words, "0#1"]) == 0
    assert capsys.readouterr().err == ""


def test_a_narrow_terminal_cuts_nothing_of_what_is_told(tmp_path: Path) -> None:
    """Sentences are wrapped, however many lines that takes."""
    WAYS["stale"][0](Start(tmp_path).begin(0).save(51, 1, 50))
    run = told(tmp_path)
    wide, narrow = (why.lines(run.attempts[0], run, why.Said(), width) for width in (None, 40))
    assert "".join("".join(narrow).split()) == "".join("".join(wide).split())
    assert max(map(len, narrow)) <= 40


def test_a_hang_is_told_once_and_a_person_by_name(tmp_path: Path) -> None:
    """Not under decided and under late; who asked is no notice; what was started again need not come back."""
    start = Start(tmp_path).begin(0).save(51, 1, 50)
    start.say(80, "stalled", "warning", ranks=[0], kind="x", text="rank 0 stands still")
    start.notice(80, "training hung", "hang").leave(81, "stale", 76, line="rank 0 stands still; step 50 is committed")
    asked = Start(tmp_path, 2, 1).begin(200, 50).notice(260, "asked to leave", "root").save(260, 1, 100, "save and leave")
    asked.leave(263, "fresh", 75)
    Start(tmp_path, 3, 2).begin(300, 100).ended(360, 0)
    run = told(tmp_path)
    assert told_of(run, "0")["late"] == "no save ran"
    assert told_of(run, "1")["notice"].startswith("asked by root at ")
    assert told_of(run, "1")["change"] == "nothing: a person ended it, and it was started again"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("slurmstepd-n7: error: *** JOB 1 ON n7 CANCELLED AT 2026-11-30T08:53:32 ***", "cancelled"),
        ("slurmstepd-n7: error: *** STEP 1.0 ON n7 CANCELLED AT 2026-11-30T08:53:32 ***", ""),
        ("slurmstepd: error: *** JOB 1 ON n7 CANCELLED AT 2026-11-30T08:53:32 DUE TO TIME LIMIT ***", "time limit reached"),
        ("slurmstepd: error: *** STEP 1.0 ON n7 CANCELLED AT 2026-11-30T08:53:32 DUE TO PREEMPTION ***", "preempted"),
        ("slurmstepd: error: *** JOB 1 ON n7 CANCELLED AT 2026-11-30T08:53:32 DUE TO JOB REQUEUE ***", "requeued"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
            "out of memory",
        ),
        ("srun: error: n7: task 0: Out Of Memory", "out of memory"),
        ("srun: error: n7: task 0: Exited with exit code 75", ""),
        ("sacct: 1 CANCELLED by 1000, exit code 0:0", "cancelled"),
        ("sacct: 1 NODE_FAIL, exit code 0:0", "node failure"),
    ],
)
def test_slurms_own_lines_have_their_causes(line: str, cause: str) -> None:
    """As slurmstepd, srun and sacct write them."""
    assert slurm_words.cause_of([line]) == cause
    assert line.startswith("sacct") or slurm_words.is_slurms(line)


def test_what_slurm_says_names_the_cause_of_a_start_that_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By --output; the change follows from it."""
    two(tmp_path)
    (tmp_path / "out.txt").write_text(OUTPUT)
    words = ["why", "--dir", str(tmp_path), "--output", str(tmp_path / "out.txt")]
    assert ctl.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["slurm_cause"], record["slurm"]) == ("node failure", OUTPUT.splitlines()[5:7])
    assert ctl.main(words) == 0
    assert "lost without a word; Slurm says: node failure" in capsys.readouterr().out


def test_an_output_that_a_later_run_has_overwritten_costs_slurms_words_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field case 53: what happened to the first attempt is in its journal."""
    two(tmp_path)
    (tmp_path / "out.txt").write_text("".join(OUTPUT.splitlines(keepends=True)[3:]))
    assert ctl.main(["why", "--dir", str(tmp_path), "--attempt", "0", "--json", "--output", str(tmp_path / "out.txt")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["cause"], record["slurm"]) == ("preempted", [])


def test_an_output_that_cannot_be_read_is_said_and_the_rest_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, a directory, a pipe: status 3, and the journal's answer all the same."""
    two(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "journal", "pipe"):
        assert ctl.main(["why", "--dir", str(tmp_path), "--output", str(tmp_path / name)]) == 3
        said = capsys.readouterr()
        assert ("there is no file" if name == "none" else "cannot be read") in said.err
        assert "lost without a word" in said.out


def test_only_the_end_of_a_long_output_is_read(tmp_path: Path) -> None:
    """A gigabyte of progress bars costs a megabyte."""
    path = tmp_path / "out.txt"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"\n" + OUTPUT.encode())
    text = slurm_words.tail(path)
    assert len(text) <= slurm_words.TAIL_BYTES
    assert text.endswith(OUTPUT)


def test_of_sacct_s_records_the_one_of_this_attempt_counts(tmp_path: Path) -> None:
    """Each requeue makes one more of the same id (field case 66)."""
    first, second = two(tmp_path).attempts
    text = "".join(
        f"4711|{state}|0:0|{BEGIN_S + start}|{BEGIN_S + end}|None\n"
        for state, start, end in (("PREEMPTED", -1, 95), ("NODE_FAIL", 199, 280))
    )
    text += "4711|RUNNING|0:0|Unknown|Unknown|None\n4711_2|FAILED|1:0|1|2|None\nnonsense\n|||\n"
    assert slurm_words.record_of(text, first) == "sacct: 4711 PREEMPTED, exit code 0:0"
    assert slurm_words.record_of(text, second) == "sacct: 4711 NODE_FAIL, exit code 0:0"
    assert slurm_words.record_of("", second) == ""


def test_slurm_is_asked_whether_a_start_without_a_last_word_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its process cannot be seen: a job that Slurm does not know any more trains no more."""
    Start(tmp_path).begin(0).save(51, 1, 50)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    assert ctl.main(["why", "--dir", str(tmp_path), "--json", "--no-slurm"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] is None
    assert ctl.main(["why", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "lost without a word"


def test_a_scontrol_and_a_sacct_that_fail_or_lie_are_passed_over(tmp_path: Path) -> None:
    """Asked within bounds, and never needed."""
    _, second = two(tmp_path).attempts
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("scontrol", "echo '   StdOut=/nowhere/out'"), ("sacct", "echo 'slurmdbd: refused' >&2; exit 1")):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin"}
    assert slurm_words.said_of(second, None, "", env) == (why.Said(), "")
    (tmp_path / "out.txt").write_text(OUTPUT)
    (tools / "scontrol").write_text(f"#!/bin/sh\necho 'JobId=4711 JobName=x'\necho '   StdOut={tmp_path}/out.txt'\n")
    said, problem = slurm_words.said_of(second, None, "", env)
    assert (said.cause, problem) == ("node failure", "")


def test_a_job_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such job, no such attempt: status 1."""
    preempted(tmp_path)
    assert ctl.main(["why", "4712", "--dir", str(tmp_path), "--no-slurm"]) == 1
    assert ctl.main(["why", "4711", "--dir", str(tmp_path), "--attempt", "9", "--no-slurm"]) == 1
    assert "there is no attempt 9 of job 4711: its newest are 0" in capsys.readouterr().err


def test_the_json_has_every_key_for_every_attempt(tmp_path: Path) -> None:
    """Also for one of which nothing is known."""
    run = two(tmp_path)
    bare = Attempt(job="1", attempt=0, epoch=1, step_id="0")
    keys = {frozenset(why.record(one, run, why.Said())) for one in (*run.attempts, bare)}
    assert len(keys) == 1
