"""Several supervised steps in one job: nobody requeues while another one saves, and one of them calls.

The file is also the program of such a step: `python test_meeting.py STATE JOB STEP ATTEMPT` announces itself, then does what it
reads, a word a line: `ready` (meets the others and prints the verdict), `announce`, `withdraw`, `end`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ckpt_supervisor.tasks.meeting import Meeting, state_directory


def step_program(state: str, job: str, step_id: str, attempt: str) -> None:
    """One supervised step, driven by stdin."""
    meeting = Meeting(Path(state), job, step_id, int(attempt), f"/ckpt/{step_id}")
    print(f"announced {meeting.announce('running')}", flush=True)
    for line in sys.stdin:
        if line == "ready\n":
            print(json.dumps(dataclasses.asdict(meeting.meet())), flush=True)
        elif line == "announce\n":
            print(f"announced {meeting.announce('running')}", flush=True)
        elif line == "withdraw\n":
            meeting.withdraw()
            print("withdrawn", flush=True)
        else:
            return


class Step:
    """One such process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, word: str) -> None:
        """A word for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        """Its next line (the test's own time limit is the bound)."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def verdict(self) -> tuple[bool, str]:
        """The answer to `ready`."""
        answer = json.loads(self.line())
        return answer["ready"], answer["reason"]

    def meet(self) -> tuple[bool, str]:
        """It is ready: may it requeue?"""
        self.say("ready")
        return self.verdict()

    def withdraw(self) -> None:
        """It is over."""
        self.say("withdraw")
        assert self.line() == "withdrawn"

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextlib.contextmanager
def steps(state: Path, *names: str, job: str = "77", attempt: int = 0) -> Iterator[Sequence[Step]]:
    """Started steps that have announced themselves."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            argv = [sys.executable, __file__, str(state), job, name, str(attempt)]
            process = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            made.append(Step(process))
        for step in made:
            assert step.line() == "announced"
        yield made


def test_the_last_step_that_is_done_requeues(tmp_path: Path) -> None:
    """A save of 1 s beside one of 8 s: the first that is ready waits, by name, and the last one calls (row 16b)."""
    with steps(tmp_path, "0", "1") as (short, long):
        assert short.meet() == (False, "step 1 of this job is still at work")
        assert short.meet() == (False, "step 1 of this job is still at work")
        assert long.meet() == (True, "")
        assert short.meet() == (False, "another step of this job is calling requeue")
        assert long.meet() == (True, "")


@pytest.mark.parametrize("count", [2, 5])
def test_of_steps_that_get_ready_in_one_moment_one_calls(tmp_path: Path, count: int) -> None:
    """However they interleave, exactly one of those that find nobody at work calls; the others name it."""
    with steps(tmp_path, *map(str, range(count))) as made:
        for _ in range(20):
            for step in made:
                step.say("ready")
            answers = [step.verdict() for step in made]
            assert [ready for ready, _ in answers].count(True) <= 1, answers
            # Those that looked before the others had said that they are ready look again, as the machine does.
            answers = [step.meet() for step in made]
            assert [ready for ready, _ in answers].count(True) == 1, answers
            assert {reason for ready, reason in answers if not ready} == {"another step of this job is calling requeue"}
            for step in made:
                step.withdraw()
            for step in made:
                step.say("announce")
                assert step.line() == "announced"


def test_of_steps_whose_requeue_is_refused_one_has_the_job_resubmitted(tmp_path: Path) -> None:
    """Two new jobs of two steps each would be four, and so on; where it came to nothing the next one tries. Nothing is left."""
    first, second = (Meeting(tmp_path, "77", step, 0, "/ckpt") for step in "01")
    for meeting in (first, second):
        assert meeting.announce("running") == ""
    assert (first.first_to_resubmit(), second.first_to_resubmit()) == (True, False)
    first.not_resubmitted()
    assert (second.first_to_resubmit(), first.first_to_resubmit()) == (True, False)
    second.withdraw()
    assert first.first_to_resubmit() is False
    first.withdraw()
    assert [*(tmp_path / "jobs").iterdir()] == []
    assert Meeting(tmp_path / "not there", "77", "0", 0, "/ckpt").first_to_resubmit() is True


def test_a_step_that_died_holds_nobody(tmp_path: Path) -> None:
    """SIGKILL of a supervisor leaves its file; its pid and start time tell that nobody is behind it."""
    with steps(tmp_path, "0", "1") as (one, other):
        other.kill()
        assert one.meet() == (True, "")


def test_a_caller_that_died_is_replaced(tmp_path: Path) -> None:
    """The one that was to call requeue is gone: the next one calls."""
    with steps(tmp_path, "0", "1") as (one, other):
        assert one.meet()[0] is False
        assert other.meet() == (True, "")
        assert one.meet()[0] is False
        other.kill()
        assert one.meet() == (True, "")


def test_a_pid_that_was_used_again_is_not_taken_for_the_step(tmp_path: Path) -> None:
    """A file names a live process with another start time: nobody is at work."""
    with steps(tmp_path, "0", "1") as (one, other):
        path = tmp_path / "jobs" / "77" / "1.json"
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "started": record["started"] - 1}))
        assert one.meet() == (True, "")
        other.say("end")


def test_a_step_on_another_host_is_believed(tmp_path: Path) -> None:
    """Its process cannot be seen from here: its word counts until the requeue has to come."""
    with steps(tmp_path, "0") as (one,):
        other = tmp_path / "jobs" / "77" / "1.json"
        record = {"phase": "running", "attempt": 0, "host": f"not-{socket.gethostname()}", "pid": 1, "started": 1, "dir": "/x"}
        other.write_text(json.dumps(record))
        assert one.meet() == (False, "step 1 of this job is still at work")
        other.write_text(json.dumps({**record, "phase": "ready"}))
        assert one.meet() == (True, "")


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"[]", b'{"phase": 5}', b'{"pid": "x", "phase": "running"}', b"\xff" * 99, b"{" * 50_000]
)
def test_damaged_files_hold_nobody(tmp_path: Path, content: bytes) -> None:
    """What cannot be read is nobody's word."""
    with steps(tmp_path, "0") as (one,):
        (tmp_path / "jobs" / "77" / "9.json").write_bytes(content)
        assert one.meet() == (True, "")


def test_jobs_and_attempts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Another job's steps, and what an earlier attempt of this job left behind, count for nothing."""
    with steps(tmp_path, "1", job="78"), steps(tmp_path, "1", attempt=0) as (old,), steps(tmp_path, "0", attempt=1) as (one,):
        assert one.meet() == (True, "")
        old.say("end")


def test_a_step_that_is_over_leaves_nothing_behind(tmp_path: Path) -> None:
    """The last one to withdraw takes the job's directory with it; one that comes later meets nobody and looks for itself."""
    with steps(tmp_path, "0", "1") as (one, other):
        assert one.meet()[0] is False
        assert other.meet()[0] is True
        assert sorted(path.name for path in (tmp_path / "jobs" / "77").iterdir()) == ["0.json", "1.json", "requeue-0"]
        other.withdraw()
        assert one.meet() == (True, "")
        one.withdraw()
        assert list((tmp_path / "jobs").iterdir()) == []


def test_the_file_tells_where_the_checkpoints_are(tmp_path: Path) -> None:
    """That is how a job is found by its number."""
    with steps(tmp_path, "0") as (one,):
        record = json.loads((tmp_path / "jobs" / "77" / "0.json").read_text())
        assert (record["dir"], record["phase"], record["pid"]) == ("/ckpt/0", "running", one.process.pid)
        assert record["host"] == socket.gethostname()
        assert (tmp_path / "jobs" / "77").stat().st_mode & 0o777 == 0o700


def test_without_a_usable_state_directory_it_goes_on_alone(tmp_path: Path) -> None:
    """A file in the way: announcing says what is wrong, meeting says yes, withdrawing is silent."""
    (tmp_path / "jobs").write_text("")
    meeting = Meeting(tmp_path, "77", "0", 0, "/ckpt")
    assert "Not a directory" in meeting.announce("running")
    verdict = meeting.meet()
    assert (verdict.ready, verdict.reason) == (True, "the state directory cannot be used")
    meeting.withdraw()


def test_the_state_directory_is_the_users_own() -> None:
    """$CKPT_SUPERVISE_STATE, else XDG's, else below the home directory."""
    env = {"HOME": "/home/u", "XDG_STATE_HOME": "/state", "CKPT_SUPERVISE_STATE": "/own"}
    assert state_directory(env) == Path("/own")
    assert state_directory({**env, "CKPT_SUPERVISE_STATE": ""}) == Path("/state/ckpt-supervise")
    assert state_directory({"HOME": "/home/u"}) == Path("/home/u/.local/state/ckpt-supervise")
    assert not state_directory({}).is_relative_to(os.sep + "root")


if __name__ == "__main__":
    step_program(*sys.argv[1:])
