"""Two jobs with one directory: the later one is refused, takes over from one that is over, or from a live one if told so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.start.holding import Asking
from ckpt_supervisor.start.startup import has_checkpoints

from tests.support import syscalls
from tests.support.run import SUPERVISE, committed, eventually, supervised, toy, trained
from tests.support.tasks_stage import task_env

TEXTS = Path(__file__).resolve().parents[1] / "support" / "proc_slurm_texts"
UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
HOLDER = store.Holder(3, "50", 0, "0", "elsewhere", 4711, 99)


def record(job: str, state: str) -> str:
    """A scontrol that knows this job, in this state."""
    text = (TEXTS / "22.05-cancelled.txt").read_text()
    state_word = next(word for word in text.split() if word.startswith("JobState="))
    job_word = next(word for word in text.split() if word.startswith("JobId="))
    return f"cat <<'EOT'\n{text.replace(job_word, f'JobId={job}').replace(state_word, f'JobState={state}')}\nEOT"


def tools(place: Path, does: str | None) -> dict[str, str]:
    """A PATH with a scontrol that does this, or without one, as an environment; `calls` beside it counts."""
    place.mkdir()
    if does is not None:
        tool = place / "scontrol"
        tool.write_text(f'#!/bin/bash\necho "$@" >> {place}/calls\n{does}\n')
        tool.chmod(0o755)
    return {"PATH": f"{place}:{Path(sys.executable).parent}" + (":/usr/bin:/bin" if does is not None else "")}


def asked(tmp_path: Path, does: str | None, holder: store.Holder = HOLDER, job: str = "77") -> tuple[str, list[str]]:
    """What comes of asking about this holder, and what the user is told."""
    asking = Asking(tools(tmp_path / "tools", does), Claims(), job, tmp_path)
    why = asking(holder)
    assert asking(holder) == why
    return why, asking.lines


def calls(tmp_path: Path) -> list[str]:
    """What scontrol was asked."""
    path = tmp_path / "tools" / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STOPPED", "NEW_IN_26.05"])
def test_a_job_that_is_alive_has_the_directory(tmp_path: Path, state: str) -> None:
    """Also in a state that nobody knows yet. One call."""
    why, lines = asked(tmp_path, record("50", state))
    assert f"Slurm says {state}" in why
    assert lines == []
    assert calls(tmp_path) == ["show job 50"]


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_that_comes_back_has_the_directory(tmp_path: Path, state: str) -> None:
    """It is requeued: it will want its checkpoints again."""
    why, _ = asked(tmp_path, record("50", state))
    assert why == f"Slurm says {state}: it has been requeued and comes back"


def test_a_job_that_is_just_ending_is_looked_at_again(tmp_path: Path) -> None:
    """COMPLETING lasts some seconds, and what comes after it may be PENDING; after bounded looks it still has the directory."""
    why, _ = asked(tmp_path, record("50", "COMPLETING"))
    assert why == "Slurm says COMPLETING"
    assert len(calls(tmp_path)) == 3
    shutil.rmtree(tmp_path / "tools")
    once, over, ending = tmp_path / "once", record("50", "COMPLETED"), record("50", "COMPLETING")
    ends = f"if [ -e {once} ]; then\n{over}\nelse touch {once}\n{ending}\nfi"
    assert asked(tmp_path, ends)[0] == ""


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"])
def test_a_job_that_has_ended_leaves_the_directory_with_a_line(tmp_path: Path, state: str) -> None:
    """No option is needed after a finished predecessor."""
    why, (line,) = asked(tmp_path, record("50", state))
    assert why == ""
    assert f"was held last by job 50, which has ended (Slurm says {state})" in line


def test_a_job_that_slurm_has_forgotten_leaves_the_directory(tmp_path: Path) -> None:
    """MinJobAge after its end there is no record of it."""
    why, (line,) = asked(tmp_path, UNKNOWN_JOB)
    assert why == ""
    assert "Slurm does not know it any more" in line


def test_could_not_look_is_not_gone(tmp_path: Path) -> None:
    """A controller that is away three times refuses the start, in those words."""
    why, lines = asked(tmp_path, NO_ANSWER)
    assert why.startswith("Slurm could not be asked whether that has ended (slurm_load_jobs error: Unable to contact")
    assert lines == []
    assert len(calls(tmp_path)) == 3


def test_what_prints_no_record_is_no_answer(tmp_path: Path) -> None:
    """An empty answer with status 0 is not "there is no such job"."""
    assert "could not be asked" in asked(tmp_path, "true")[0]


@pytest.mark.parametrize("job", ["local-elsewhere", "-o", "", "50;x", "1" * 30])
def test_what_is_no_job_of_slurms_is_not_asked_about(tmp_path: Path, job: str) -> None:
    """The file may hold anything: only a job id becomes an argument."""
    why, (line,) = asked(tmp_path, record("50", "RUNNING"), msgspec.structs.replace(HOLDER, job=job))
    assert why == ""
    assert "cannot be seen from here" in line
    assert calls(tmp_path) == []


def test_without_scontrol_another_host_is_warned_of_and_this_one_is_not(tmp_path: Path) -> None:
    """On this host the process table has answered already."""
    why, (line,) = asked(tmp_path, None)
    assert why == ""
    assert "job 50 step 0 (attempt 0), process 4711 on elsewhere" in line
    shutil.rmtree(tmp_path / "tools")
    assert asked(tmp_path, None, msgspec.structs.replace(HOLDER, host=os.uname().nodename)) == ("", [])


def test_another_step_of_the_job_is_asked_for_as_a_step(tmp_path: Path) -> None:
    """Two sruns with one directory, as Slurm tells of them; a line of the batch script is not asked about."""
    running = (
        "printf 'StepId=77_1.3 UserId=0 StartTime=1 TimeLimit=UNLIMITED\\n   State=RUNNING Partition=low\\n   Name=State=X\\n'"
    )
    holder = msgspec.structs.replace(HOLDER, job="77_1", step_id="3")
    assert asked(tmp_path, running, holder, job="77_1") == ("Slurm says RUNNING", [])
    assert calls(tmp_path) == ["show step 77_1.3"]
    shutil.rmtree(tmp_path / "tools")
    assert asked(tmp_path, "echo 'Job step 77_1.3 not found'; exit 1", holder, job="77_1") == ("", [])
    shutil.rmtree(tmp_path / "tools")
    assert asked(tmp_path, running, msgspec.structs.replace(holder, step_id="batch"), job="77_1") == ("", [])
    assert calls(tmp_path) == []


# --- whole supervisors ---------------------------------------------------------------------------------------------------


def job_env(job: int, tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of the only task of this job's only step."""
    return {**task_env(0, 1), "SLURM_JOB_ID": str(job), "CKPT_SUPERVISE_STATE": str(tmp_path / "state"), **more}


def test_a_start_is_refused_while_slurm_says_that_the_other_job_runs(tmp_path: Path) -> None:
    """Exit 2 before the command starts, with who, in which state, and both ways out; it costs one call."""
    env = job_env(77, tmp_path, **tools(tmp_path / "tools", record("50", "RUNNING")))
    committed(tmp_path / "ckpt", 100)
    (tmp_path / "ckpt" / "attempt").write_bytes(msgspec.json.encode(HOLDER))
    with trained(tmp_path, "--steps", 110, env=env) as run:
        assert run.code() == 2
        (line,) = run.err.splitlines()
    assert "in use by job 50 step 0 (attempt 0), process 4711 on elsewhere: Slurm says RUNNING" in line
    assert "give each run a directory of its own, or say --continues 50" in line
    assert calls(tmp_path) == ["show job 50"]
    assert store.read_holder(tmp_path / "ckpt") == HOLDER


def test_a_start_after_a_finished_job_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    """With a line, in the journal too, and no option."""
    env = job_env(77, tmp_path, **tools(tmp_path / "tools", record("50", "COMPLETED")))
    committed(tmp_path / "ckpt", 100)
    (tmp_path / "ckpt" / "attempt").write_bytes(msgspec.json.encode(HOLDER))
    with trained(tmp_path, "--steps", 110, env=env) as run:
        assert run.code() == 0, run.story()
        assert run.said(r"^ready pid \d+ at 100 ")
        assert "which has ended (Slurm says COMPLETED)" in run.event("taken_over")["text"]
        assert "which has ended (Slurm says COMPLETED)" in run.err
        assert run.event("resuming")["text"] == "resuming from step 100"


def test_a_job_that_continues_a_live_one_fences_it_off(tmp_path: Path) -> None:
    """Refused without the option; with it the old one's next commit is refused by name, and the new one's counts."""
    place = tmp_path / "ckpt"
    often = ("--every-steps", 10, "--requeue", "never")
    words = toy("--steps", 1_000_000, "--step-ms", 10)
    with supervised(tmp_path / "a", words, *often, env=job_env(50, tmp_path), directory=place) as old:
        old.event("commit", step=10)
        with supervised(tmp_path / "b", words, *often, env=job_env(77, tmp_path), directory=place) as refused:
            assert refused.code() == 2
            assert f"in use by job 50 step 0 (attempt 0), process {old.pid}" in refused.err
            assert "say --continues 50 if this job takes over from that one" in refused.err
        env = job_env(77, tmp_path, CKPT_SUPERVISE_CONTINUES="50")
        with supervised(tmp_path / "c", words, *often, env=env, directory=place) as new:
            newest = new.event("commit", job="77", result="committed")["step"]
            lost = old.event("commit", job="50", result="refused: a newer attempt owns the directory")
            assert f"held by job 77 step 0 (attempt 0), process {new.pid}" in lost["reason"]
            assert old.process.poll() is None, "it trains on"
            new.signal(signal.SIGTERM)
            assert new.code() == 75, new.story()
            assert max(new.intact()) >= newest


def test_a_directory_that_is_removed_under_a_run_is_taken_anew(tmp_path: Path) -> None:
    """Days of training would be lost otherwise. It is told, and the journal begins again."""
    with trained(tmp_path, "--steps", 1_000_000, "--step-ms", 10, options=["--grace", "6s"]) as run:
        run.reached(5)
        run.event("rank_hello")
        eventually((run.dir / "control").is_dir, "the last thing that a start makes there")
        shutil.rmtree(run.dir)
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert "was removed or emptied while this run was using it: this run has taken it anew" in run.err
        assert "newer attempt" not in run.err
        (step,) = run.intact()
        assert store.check_epoch(run.dir, 1)
    with trained(tmp_path, "--steps", step + 5) as again:
        assert again.code() == 0
        assert again.event("command_started", epoch=2)["resume_step"] == step


def test_a_trace_of_checkpoints_is_looked_into_before_the_command_starts(tmp_path: Path) -> None:
    """Fresh directories start at once; with a step, a damaged one put aside or a `latest` the gate is asked."""
    assert not has_checkpoints(tmp_path)
    (tmp_path / "journal").mkdir()
    assert not has_checkpoints(tmp_path)
    (tmp_path / "latest").symlink_to("step-000000001")
    assert has_checkpoints(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / ".damaged-step-000000001-1-0").mkdir()
    assert has_checkpoints(tmp_path)


FULL = """
mount -t tmpfs -o size=128k tmpfs "$1" && cd "$1" && shift
"$@" && dd if=/dev/zero of=fill bs=1k 2>/dev/null
"$@" && "$@" && cat attempt && ls -A
"""

TAKE = """
from ckpt_supervisor.store import check_epoch, take_epoch
epoch = take_epoch('.', '77', 0, '0').epoch
assert check_epoch('.', epoch)
print(epoch)
"""


@pytest.mark.parametrize("had", ["another attempt before", "no attempt before"])
def test_a_requeued_job_starts_on_a_full_disk(tmp_path: Path, had: str) -> None:
    """The epoch's mark may be an empty file, and DIR/attempt is written over in place: each start has an epoch of its own."""
    syscalls.need("" if os.geteuid() == 0 else "to mount a small file system needs root")
    take = TAKE if had == "another attempt before" else f"{TAKE}\nopen('attempt', 'w').close()"
    place = tmp_path / "full"
    place.mkdir()
    argv = ["unshare", "--mount", "sh", "-c", FULL, "sh", str(place), sys.executable, "-c", take]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["1", "2", "3"]
    if had == "another attempt before":  # The other leaves a file without a block behind each time: nothing can be put into it.
        assert msgspec.json.decode(lines[3], type=store.Holder).epoch == 3
        assert [name for name in lines[4:] if name.startswith(".attempt")] == [".attempt-000000003"]


def test_a_disk_that_has_no_room_even_for_a_name_is_called_full(tmp_path: Path) -> None:
    """Exit 2 with the system's own word, and nothing has started."""
    syscalls.need("" if os.geteuid() == 0 else "to mount a small file system needs root")
    place = tmp_path / "full"
    place.mkdir()
    script = 'mount -t tmpfs -o nr_inodes=1 tmpfs "$1" && shift && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(place), *SUPERVISE, "--dir", str(place), "--", "echo", "started"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No space left on device" in done.stderr
