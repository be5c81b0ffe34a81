"""What a start resumes from: the newest intact one, the user's own choice, an older one after failures, or nothing, each with its
words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.config import read_options
from ckpt_supervisor.start.resume_gate import Resume, choose

JOB = "77"
STARTED = {"event": "command_started", "mono_ms": 0}
HELLO = {"event": "rank_hello", "mono_ms": 100}
EXITED = {"event": "command_exited", "mono_ms": 400, "code": 1}


def commit(directory: Path, step: int, job: str = JOB, name: str = "state.bin") -> Path:
    """A committed checkpoint of this job."""
    directory.mkdir(exist_ok=True)
    epoch = store.take_epoch(directory, job, 0, "0").epoch
    partial = store.make_partial(directory, step, epoch, 1)
    (partial / name).write_bytes(b"%d" % step * 100)
    report, entries = store.check_files(partial, [store.Expected(name, len(b"%d" % step * 100), "", 0)], mode="full")
    created = datetime.now(timezone.utc).isoformat()
    manifest = store.Manifest(
        step=step, world_size=1, ranks=(0,), job=job, attempt=0, epoch=epoch, cause="periodic", created_at=created,
        verified="full", files=entries,
    )  # fmt: skip
    outcome = store.commit(directory, partial, manifest)
    assert isinstance(outcome, store.Committed), (report, outcome)
    return outcome.path


def damage(path: Path) -> None:
    """One bit of its file flips."""
    data = bytearray((path / "state.bin").read_bytes())
    data[7] ^= 4
    (path / "state.bin").write_bytes(data)


def journal(directory: Path, epoch: int, *lines: dict[str, Any], job: str = JOB) -> None:
    """The journal of an earlier start."""
    (directory / "journal").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"mono_ms": 0, **line}) + "\n" for line in lines)
    (directory / "journal" / f"{job}-0-0-{epoch}-0.jsonl").write_text(text)


def failed_from(step: int, at: int | None = None) -> list[dict[str, Any]]:
    """The lines of a start whose load raises."""
    words = [{"event": "rank_failed", "rank": 0, "reason": "UnpicklingError: weights only", "step": step if at is None else at}]
    return [{**STARTED, "resume_step": step}, HELLO, *words, EXITED]


def chosen(directory: Path, *options: str, command: Sequence[str] = ("t",), job: str = JOB, epoch: int = 100) -> Resume:
    """What a start with these options resumes from."""
    return choose(read_options(["--dir", str(directory), *options, "--", *command], {}), job, epoch, None)


def test_with_two_damaged_newest_ones_the_third_is_taken_with_two_lines_that_say_why(tmp_path: Path) -> None:
    """Row S6: a flipped bit and a file cut short are passed over by name, verdict, file and offset."""
    paths = [commit(tmp_path, step) for step in (100, 200, 300)]
    damage(paths[2])
    os.truncate(paths[1] / "state.bin", 100)
    resume = chosen(tmp_path)
    assert (resume.path, resume.step, resume.refusal) == (str(paths[0]), 100, "")
    assert [line.split(":")[0] for line in resume.lines] == ["passed over step-000000300", "passed over step-000000200"]
    assert "corrupt" in resume.lines[0]
    assert "state.bin" in resume.lines[0]
    assert "truncated" in resume.lines[1]
    assert resume.damaged == {200, 300}


def test_nothing_intact_is_no_silent_start_from_zero(tmp_path: Path) -> None:
    """Field case 82: the list, and a refusal that says the way out; with the option a start from scratch that is told, too."""
    for step in (100, 200):
        damage(commit(tmp_path, step))
    resume = chosen(tmp_path)
    assert "holds 2 checkpoints and none is intact" in resume.refusal
    assert "--allow-restart-from-scratch" in resume.refusal
    assert [line.split(":")[0] for line in resume.lines] == ["passed over step-000000200", "passed over step-000000100"]
    allowed = chosen(tmp_path, "--allow-restart-from-scratch")
    assert (allowed.path, allowed.step, allowed.refusal) == ("", -1, "")
    assert allowed.damaged == {100, 200}
    assert "starting from scratch" in allowed.lines[-1]


def test_checkpoints_that_were_put_aside_count_as_traces(tmp_path: Path) -> None:
    """`ckptctl repair` renames damaged ones: with no intact one left that is no fresh start either, and each is named."""
    path = commit(tmp_path, 100)
    path.rename(tmp_path / store.damaged_name(100, 1, 0))
    resume = chosen(tmp_path)
    assert "holds 1 checkpoint and none is intact" in resume.refusal
    assert any(".damaged-step-000000100-1-0" in line for line in resume.lines)
    whole = commit(tmp_path, 50)
    assert chosen(tmp_path).path == str(whole)


def test_a_whole_one_that_was_on_its_way_out_comes_back_before_the_choice(tmp_path: Path) -> None:
    """A removal was cut off before its first file, and what it made way for is damaged: it is whole, and newest."""
    commit(tmp_path, 1)
    path = commit(tmp_path, 2)
    damage(commit(tmp_path, 3))
    epoch = store.take_epoch(tmp_path, JOB, 1, "0").epoch
    path.rename(tmp_path / store.trash_name(2, store.read_manifest(path).epoch, 0))
    resume = chosen(tmp_path, epoch=epoch)
    assert resume.step == 2
    assert "is step-000000002 again" in resume.warnings[0]


def test_a_fresh_directory_starts_from_scratch_without_a_word(tmp_path: Path) -> None:
    """Nothing is there, and nothing says that something was."""
    assert chosen(tmp_path) == Resume("", -1, ())


def test_a_latest_that_names_what_is_not_there_is_looked_after_and_told(tmp_path: Path) -> None:
    """After a bounded time it is a start from scratch with a loud line, as there is no other trace."""
    (tmp_path / "latest").symlink_to("step-000000300")
    resume = chosen(tmp_path)
    assert (resume.path, resume.refusal) == ("", "")
    assert "latest names step-000000300, which is not there" in resume.lines[0]
    assert "no other trace of a checkpoint: starting from scratch" in resume.lines[1]


def test_a_dangling_latest_leads_to_the_newest_that_is_there(tmp_path: Path) -> None:
    """Field case 95; here it is a file that holds the name, as where there are no links."""
    older = commit(tmp_path, 200)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("step-000000300\n")
    resume = chosen(tmp_path)
    assert resume.path == str(older)
    assert "latest names step-000000300" in resume.lines[0]


@pytest.mark.parametrize("content", [b"", b"\0" * 10, b"step-" + b"9" * 10_000, b"../../etc", b"best", b"\xff\xfe"])
def test_a_latest_with_anything_in_it_decides_nothing(tmp_path: Path, content: bytes) -> None:
    """A broken pointer file is as good as none (field case 102)."""
    path = commit(tmp_path, 100)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_bytes(content)
    resume = chosen(tmp_path)
    assert (resume.path, resume.lines) == (str(path), ())


def test_a_latest_that_points_to_an_older_or_a_damaged_one_decides_nothing(tmp_path: Path) -> None:
    """Field cases 95 and 102: the scan finds the complete newer one."""
    old, middle, newest = (commit(tmp_path, step) for step in (100, 200, 300))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(old.name)
    assert chosen(tmp_path).path == str(newest)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(newest.name)
    damage(newest)
    assert chosen(tmp_path).path == str(middle)


def test_a_checkpoint_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    """On a network file system the name that `latest` tells of may come up a moment later."""
    path = commit(tmp_path, 300)
    hidden = tmp_path / "elsewhere"
    path.rename(hidden)
    timer = threading.Timer(0.3, lambda: hidden.rename(path))
    timer.start()
    try:
        resume = chosen(tmp_path)
    finally:
        timer.join()
    assert (resume.path, resume.lines) == (str(path), ())


STALE = """
import errno, os, sys
real, left = os.open, [int(sys.argv[2])]
def stale(path, *more, **how):
    if "step-000000200" in os.fspath(path) and left[0]:
        left[0] -= 1
        raise OSError(errno.ESTALE, "Stale file handle", path)
    return real(path, *more, **how)
os.open = stale
from ckpt_supervisor.config import read_options
from ckpt_supervisor.start.resume_gate import choose
resume = choose(read_options(["--dir", sys.argv[1], "--", "t"], {}), "77", 100, None)
print(resume.step, *resume.lines, sep="\\n")
"""


@pytest.mark.parametrize(("times", "step"), [(4, 200), (1_000_000, 100)], ids=["for a moment", "for good"])
def test_a_newest_one_that_cannot_be_looked_at_is_looked_at_again(tmp_path: Path, times: int, step: int) -> None:
    """Field case 111: ESTALE comes and goes; when it stays the older one is taken, with a word on what could not be seen."""
    for number in (100, 200):
        commit(tmp_path, number)
    words = [sys.executable, "-c", STALE, str(tmp_path), str(times)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == str(step)
    assert len(lines) == (1 if step == 200 else 3)
    if step == 100:
        assert "passed over step-000000200: unknown: " in lines[1]
        assert "could not look at everything" in lines[2]


# --- the user's own choice (field case 99) -----------------------------------------------------------------------------

ARG = "--resume-arg=--resume-from"


def test_an_explicit_value_is_honoured_until_this_job_has_committed_something(tmp_path: Path) -> None:
    """The first attempt takes what the command names, whatever newer ones there are; a requeued one its own newest commit."""
    foreign = "/data/pretrained/model.pt"
    commit(tmp_path, 500, job="55")
    command = ["t", "--resume-from", foreign]
    first = chosen(tmp_path, ARG, command=command)
    assert (first.path, first.step, first.refusal) == ("", -1, "")
    assert first.notes == (f"--resume-from {foreign} is taken as the command says, as job 77 has committed nothing beyond it",)
    own = commit(tmp_path, 120)
    again = chosen(tmp_path, ARG, command=command)
    assert again.path == str(own), "its own commit, not the higher step of another job"
    assert again.notes[0] == f"--resume-from {foreign} gives way to step-000000120, which this job has committed since"
    assert chosen(tmp_path, ARG).step == 500
    assert chosen(tmp_path, command=command).step == 500, "without --resume-arg it is no word of ours"


def test_an_explicit_value_that_is_this_jobs_own_newest_does_not_give_way_to_itself(tmp_path: Path) -> None:
    """Nothing was committed beyond it: it is simply taken, also when the one beyond it is damaged."""
    own = commit(tmp_path, 120)
    damage(commit(tmp_path, 200))
    resume = chosen(tmp_path, ARG, command=["t", "--resume-from", str(own)])
    assert resume.path == str(own)
    assert resume.notes[0].endswith("is taken as the command says, as job 77 has committed nothing intact beyond it")
    assert [line.split(":")[0] for line in resume.lines] == ["passed over step-000000200"]


@pytest.mark.parametrize("form", ["absolute", "relative", "equals", "latest", "a file in it"])
def test_an_explicit_checkpoint_of_the_directory_is_what_all_ranks_are_told(tmp_path: Path, form: str) -> None:
    """By whatever path it is named, it is verified, and the Welcome's path is that one too."""
    wanted, newer = commit(tmp_path, 100, job="55"), commit(tmp_path, 200, job="55")
    names = {"relative": os.path.relpath(wanted), "latest": f"{tmp_path}/latest", "a file in it": f"{wanted}/state.bin"}
    value = names.get(form, str(wanted))
    command = ["t", f"--resume-from={value}"] if form == "equals" else ["t", "--resume-from", value]
    resume = chosen(tmp_path, ARG, command=command)
    assert resume.path == str(newer if form == "latest" else wanted)
    assert "is taken as the command says" in resume.notes[0]
    assert resume.warnings == ()


def test_a_damaged_explicit_checkpoint_refuses_the_start(tmp_path: Path) -> None:
    """The user asked for that one: neither it nor another one is taken in silence. A missing one, too."""
    wanted = commit(tmp_path, 100, job="55")
    commit(tmp_path, 200, job="55")
    damage(wanted)
    resume = chosen(tmp_path, ARG, command=["t", "--resume-from", str(wanted)])
    assert f"--resume-from names {wanted}, which is not intact" in resume.refusal
    assert "corrupt" in resume.refusal
    shutil.rmtree(wanted)
    resume = chosen(tmp_path, ARG, command=["t", "--resume-from", str(wanted)])
    assert f"--resume-from names {wanted}, which is not intact (missing" in resume.refusal


def test_a_damaged_own_commit_falls_back_to_the_older_own_one_and_then_to_the_explicit_value(tmp_path: Path) -> None:
    """Each step down is told."""
    commit(tmp_path, 900, job="55")
    paths = [commit(tmp_path, step) for step in (100, 200)]
    command = ["t", "--resume-from", "start.pt"]
    damage(paths[1])
    resume = chosen(tmp_path, ARG, command=command)
    assert resume.path == str(paths[0])
    assert "passed over step-000000200" in resume.lines[0]
    damage(paths[0])
    resume = chosen(tmp_path, ARG, command=command)
    assert (resume.path, resume.refusal) == ("", "")
    assert len(resume.lines) == 2


# --- from start to start (field case 100) --------------------------------------------------------------------------------


def test_each_start_says_where_it_and_the_one_before_began(tmp_path: Path) -> None:
    """A start that is no further than the one before is warned of; one that is further, or follows a good end, is not."""
    commit(tmp_path, 100)
    assert chosen(tmp_path).notes == ("resuming from step 100",)
    journal(tmp_path, 1, {**STARTED, "resume_step": -1})
    assert chosen(tmp_path).notes == ("resuming from step 100 (the attempt before began from scratch)",)
    journal(tmp_path, 2, {**STARTED, "resume_step": 100})
    stuck = chosen(tmp_path)
    assert stuck.notes == ("resuming from step 100 (the attempt before began at step 100)",)
    (warning,) = stuck.warnings
    assert "no progress since the attempt before: it began at step 100" in warning
    commit(tmp_path, 200)
    further = chosen(tmp_path)
    assert further.notes == ("resuming from step 200 (the attempt before began at step 100)",)
    assert further.warnings == ()
    journal(tmp_path, 3, {**STARTED, "resume_step": 200}, {**EXITED, "code": 0})
    assert chosen(tmp_path).warnings == ()


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b'{"event"', b"[1]\n{}\n", b'{"event": "command_started"}\n' * 3])
def test_a_broken_journal_says_nothing(tmp_path: Path, content: bytes) -> None:
    """It is for people first: what cannot be read neither refuses a start nor falls back."""
    path = commit(tmp_path, 100)
    journal(tmp_path, 1)
    (tmp_path / "journal" / f"{JOB}-0-0-1-0.jsonl").write_bytes(content)
    assert chosen(tmp_path).path == str(path)


# --- training that fails while it resumes (field case 125) ---------------------------------------------------------------


def test_after_three_failures_in_a_row_from_one_checkpoint_the_one_before_is_taken(tmp_path: Path) -> None:
    """The first times nothing changes; then one back, with both named, why, and how to have it tried again."""
    older, newer = commit(tmp_path, 100), commit(tmp_path, 200)
    for epoch in (3, 4):
        journal(tmp_path, epoch, *failed_from(200), job=str(epoch))
        assert chosen(tmp_path).path == str(newer), "a failed load is no proof of damage"
    journal(tmp_path, 5, *failed_from(200))
    resume = chosen(tmp_path)
    assert resume.path == str(older)
    (line,) = resume.lines
    assert "passed over step-000000200: training has failed 3 times in a row right after resuming from it" in line
    assert "UnpicklingError: weights only" in line
    assert "going on from step-000000100" in line
    assert "--resume-tries 0" in line
    assert resume.damaged == {200}, "it does not count as one to keep, and is not pruned"
    assert resume.warnings == ()
    assert chosen(tmp_path, "--resume-tries", "0").path == str(newer)
    assert chosen(tmp_path, "--resume-tries", "4").path == str(newer)
    assert store.verify_checkpoint(newer).verdict is store.Verdict.INTACT


def test_the_fallback_lasts_until_there_is_something_newer(tmp_path: Path) -> None:
    """What was committed from the older one is below the bad one's number, and must not lead back to the bad one."""
    for step in (100, 200):
        commit(tmp_path, step)
    for epoch in (3, 4, 5):
        journal(tmp_path, epoch, *failed_from(200))
    middle = commit(tmp_path, 150)
    committed = {"event": "commit", "step": 150, "result": "committed"}
    journal(tmp_path, 6, {**STARTED, "resume_step": 100}, HELLO, committed)
    assert chosen(tmp_path).path == str(middle)
    newest = commit(tmp_path, 250)
    assert chosen(tmp_path).path == str(newest)


def test_a_step_that_was_committed_anew_is_trusted_again(tmp_path: Path) -> None:
    """The failures were those of the one that had the name before."""
    for step in (100, 200):
        path = commit(tmp_path, step)
    for epoch in (3, 4, 5):
        journal(tmp_path, epoch, *failed_from(200))
    journal(tmp_path, 6, {**STARTED, "resume_step": 100}, {"event": "commit", "step": 200, "result": "committed"})
    assert chosen(tmp_path).path == str(path)


def test_with_one_checkpoint_only_it_is_tried_again_and_again(tmp_path: Path) -> None:
    """There is nothing to fall back to, and starting from zero is nobody's wish; a damaged older one changes nothing."""
    damage(commit(tmp_path, 100))
    only = commit(tmp_path, 200)
    for epoch in range(3, 9):
        journal(tmp_path, epoch, *failed_from(200))
    resume = chosen(tmp_path)
    assert resume.path == str(only)
    assert "no other intact one to fall back to it is tried again" in resume.lines[0]


def test_failures_from_all_of_them_are_not_the_checkpoints_fault(tmp_path: Path) -> None:
    """One back at a time; when training has failed from each of them the newest is tried again."""
    paths = {step: commit(tmp_path, step) for step in (100, 200, 300)}
    epoch = 3
    for step in (300, 200, 100):
        assert chosen(tmp_path).path == str(paths[step])
        for _ in range(3):
            epoch += 1
            journal(tmp_path, epoch, *failed_from(step))
    assert chosen(tmp_path).path == str(paths[300])


NO_WORD = [{**STARTED, "resume_step": 200}, HELLO, {**EXITED, "code": 137}]
LONG = [{**STARTED, "resume_step": 200}, HELLO, {**EXITED, "mono_ms": 3_600_000}]
ALIVE = [{**STARTED, "resume_step": 200}, HELLO]
UNATTACHED = [{**STARTED, "resume_step": 200}, EXITED]
NOTICED = [{**STARTED, "resume_step": 200}, HELLO, {"event": "notice", "cause": "preempted"}, EXITED]
PROGRESS = {
    "a step more": failed_from(200, at=201),
    "committed": [{**STARTED, "resume_step": 200}, HELLO, {"event": "commit", "step": 210, "result": "committed"}, EXITED],
    "agreed beyond": [{**STARTED, "resume_step": 200}, HELLO, {"event": "rank_agreed", "entered": [205, 0]}, EXITED],
    "adopted": [{**STARTED, "resume_step": 200}, HELLO, {"event": "adopted", "steps": [205]}, EXITED],
    "a good end": [{**STARTED, "resume_step": 200}, HELLO, {**EXITED, "code": 0}],
}


@pytest.mark.parametrize("lines", [LONG, ALIVE, UNATTACHED, NOTICED, *PROGRESS.values()])
def test_what_is_no_failure_while_resuming_does_not_count(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """An end after an hour, or by a notice, or none, a command that no rank attached from, and any step of progress."""
    commit(tmp_path, 100)
    newer = commit(tmp_path, 200)
    for epoch in (3, 4, 5, 6):
        journal(tmp_path, epoch, *lines)
    resume = chosen(tmp_path)
    assert (resume.path, resume.lines) == (str(newer), ())


@pytest.mark.parametrize("name", list(PROGRESS))
def test_progress_ends_the_row_of_failures(tmp_path: Path, name: str) -> None:
    """In a row means: with no start from it in between that got further."""
    commit(tmp_path, 100)
    newer = commit(tmp_path, 200)
    for epoch, lines in enumerate([failed_from(200), failed_from(200), PROGRESS[name], failed_from(200), failed_from(200)]):
        journal(tmp_path, epoch + 3, *lines)
    assert chosen(tmp_path).path == str(newer)


def test_a_command_that_is_killed_while_it_loads_counts_although_no_rank_had_a_word(tmp_path: Path) -> None:
    """Out of memory, a crash in C: no step is known, and it was over within minutes."""
    older = commit(tmp_path, 100)
    commit(tmp_path, 200)
    for epoch in (3, 4, 5):
        journal(tmp_path, epoch, *NO_WORD)
    resume = chosen(tmp_path)
    assert resume.path == str(older)
    assert "status 137" in resume.lines[0]


def test_restarts_in_place_count_from_the_journal_that_is_being_written(tmp_path: Path) -> None:
    """The starts of one supervisor are all in one file; there the command is the same, so that no rank has to have attached."""
    older, newer = commit(tmp_path, 100), commit(tmp_path, 200)
    journal(tmp_path, 100, *failed_from(200), *UNATTACHED)
    assert chosen(tmp_path, epoch=100).path == str(newer)
    journal(tmp_path, 100, *failed_from(200), *UNATTACHED, *failed_from(200))
    resume = chosen(tmp_path, epoch=100)
    assert resume.path == str(older)
    assert resume.notes == ("resuming from step 100 (the start before began at step 200)",)


def test_a_long_journal_is_read_at_both_ends_only(tmp_path: Path) -> None:
    """What was left out may have been progress: it does not count as a failure."""
    commit(tmp_path, 100)
    newer = commit(tmp_path, 200)
    rubbish = [{"event": "look_asked", "why": "x" * 1000}] * 400
    for epoch in (3, 4, 5):
        journal(tmp_path, epoch, {**STARTED, "resume_step": 200}, HELLO, *rubbish, EXITED)
    assert chosen(tmp_path).path == str(newer)
    assert chosen(tmp_path).notes == ("resuming from step 200 (the attempt before began at step 200)",)
