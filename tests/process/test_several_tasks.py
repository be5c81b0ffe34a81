"""Several supervisors in one step, without Slurm: they agree, fail together, and lose one another in good order.

Field cases 84, 104, 107, 116, 117, 118, 122 and 124 with real processes; tests/slurm/test_steps.py has the rows on real Slurm.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from ckpt_supervisor import store

from tests.support.run import Run, eventually, is_alive, supervised, toy
from tests.support.tasks_stage import KILL_WAIT, Step, step_of, task_env

if TYPE_CHECKING:
    from pathlib import Path

ROOMY = ("--kill-wait", "40s", "--requeue", "never")
"""Where a save is to succeed: it has half a minute, on whatever machine."""

OFTEN = (*ROOMY, "--every-steps", 10)


BUSY_MS = 3_000
"""So long a process may stand on a busy machine, when it is about how soon something is noticed."""


def whole(step: Step, number: int) -> None:
    """This checkpoint is intact, holds a file of every rank, and all of them are of its step."""
    path = step.dir / f"step-{number:09d}"
    assert store.verify_checkpoint(path).verdict is store.Verdict.INTACT
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["ranks"] == list(range(len(step.runs)))
    for rank in manifest["ranks"]:
        assert json.loads((path / f"toy-{rank:05d}.json").read_bytes())["step"] == number


@pytest.mark.parametrize("told", [0, 2])
def test_a_signal_to_one_task_alone_has_all_ranks_save_the_same_step(tmp_path: Path, told: int) -> None:
    """Row 3: the coordinator or a relay is told, and no other one."""
    with step_of(tmp_path, 3, options=ROOMY) as step:
        step.trained()
        step[told].signal(signal.SIGTERM)
        assert step.codes() == [75, 75, 75]
        (committed,) = step.committed()
        whole(step, committed)
        for rank in range(3):
            assert step.steps(rank) == list(range(1, committed + 1)), "no step was run after the one that was saved"
        assert len(step.events("notice", task=0)) == 1, "one notice for one signal"


def test_one_broadcast_is_one_notice_however_many_tasks_tell_of_it(tmp_path: Path) -> None:
    """Slurm signals every task, a little apart."""
    # Everybody's word has time to come before it is over.
    with step_of(tmp_path, 4, "--save-ms", 3_000, options=ROOMY) as step:
        step.trained()
        for run in step.runs:
            run.signal(signal.SIGUSR2)
        step.event("round_committed")
        for run in step.runs:
            run.signal(signal.SIGTERM)
        assert step.codes() == [75] * 4
        assert [line["kind"] for line in step.events("round_begun")] == ["save and go on", "save and leave"]
        told = step.events("signal", task=0, signal="SIGTERM")
        tasks = [task for line in told for task in line.get("of_tasks", [line.get("of_task", 0)])]
        assert sorted(tasks) == [0, 1, 2, 3], "each is in the journal"


def test_all_tasks_resume_from_the_same_checkpoint(tmp_path: Path) -> None:
    """Field case 104: it is chosen once, and the commands start when it is."""
    with step_of(tmp_path, 3, options=OFTEN) as step:
        step.trained()
        step.event("round_committed", 2)
        step[0].signal(signal.SIGTERM)
        assert step.codes() == [75] * 3
        newest = step.committed()[-1]
    with step_of(tmp_path, 3, options=OFTEN) as step:
        for task in range(3):
            step.event("command_started", task=task, resume_step=newest, epoch=2)
        eventually(lambda: all(max(step.steps(rank)) > newest + 2 for rank in range(3)), "steps after the resume")
        for rank in range(3):
            done = step.steps(rank)
            assert done == list(range(1, len(done) + 1)), "none lost, none twice"


def test_a_rank_that_fails_to_save_leaves_the_older_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    """Row 6 and field case 118: the rank is named, and nothing of that round is committed."""
    # Rank 0 comes last: it saves alone where it has heard of no other one for two seconds.
    with step_of(tmp_path, 3, options=OFTEN, of_task={0: ("--startup-ms", 4_000), 2: ("--fail-save",)}) as step:
        step.trained(25)
        told = lambda: [line for line in step.events("round_given_up") if not is_late_start(line)]  # noqa: E731
        given_up = eventually(lambda: len(told()) > 1 and told()[1], "two saves that fail")
        assert "rank 2 (task 2, pid" in given_up["reason"]
        assert "No space left on device" in given_up["reason"]
        assert step.committed() == []
        assert all(run.process.poll() is None for run in step.runs)
        eventually(lambda: not list(step.dir.glob(".partial-*")), "the partial directories are gone")


def is_late_start(line: dict[str, Any]) -> bool:
    """Whether this save was given up since another rank had not attached yet: how far apart they begin is not the point."""
    return "ranks are not there" in line["reason"]


def first_failure(run: Run) -> str:
    """Why the first save was given up for which all ranks were there."""
    found = eventually(lambda: [line for line in run.events("round_given_up") if not is_late_start(line)], "a save is given up")
    return str(found[0]["reason"])


TOGETHER = """
import ckpt_client as ckpt, io, os, time, zipfile
rank = int(os.environ["SLURM_PROCID"])
def together(loop):
    began = os.environ["CKPT_SUPERVISE_DIR"] + "/../began-"
    open(began + str(rank), "w").close()
    while not all(os.path.exists(began + str(task)) for task in range(2)):
        time.sleep(0.02)
    return loop
"""
"""Two ranks that have both attached before either does a step: rank 0 alone, two seconds later, is a save by itself."""


def test_a_broken_file_of_one_task_is_found_by_that_task(tmp_path: Path) -> None:
    """Row 6: what a rank wrote is read where it was written, and what is wrong with it names the task."""
    script = TOGETHER + (
        "def save(directory, step):\n"
        "    made = io.BytesIO()\n"
        "    with zipfile.ZipFile(made, 'w') as archive: archive.writestr('state/data.pkl', bytes(5000))\n"
        "    data = made.getvalue()\n"
        "    (directory / f'{rank}.pt').write_bytes(data[: len(data) // (1 + rank)])\n"
        "    return directory / f'{rank}.pt'\n"
        "for i in together(ckpt.steps(10**6, save=save, load=print)): time.sleep(0.02)\n"
    )
    python, where = toy()[0], tmp_path / "c"
    with (
        supervised(tmp_path / "a", [python, "-c", script], *OFTEN, env=task_env(0, 2), directory=where) as first,
        supervised(tmp_path / "b", [python, "-c", script], *OFTEN, env=task_env(1, 2), directory=where),
    ):
        reason = first_failure(first)
        assert "verification of task 1's ranks: " in reason
        assert "1.pt" in reason
        assert not list(where.glob("step-*"))


def test_a_rank_that_waits_for_one_that_is_gone_does_not_use_up_the_grace(tmp_path: Path) -> None:
    """Field case 61: rank 0 has come to its end, and goes in the notice; rank 1 stands in what takes both of them."""
    script = TOGETHER + (
        "import threading\n"
        "for i in together(ckpt.steps(5 - rank, save=print, load=print)):\n"
        "    if rank == 1 and i == 2: threading.Event().wait()\n"
        "while not os.path.exists(os.environ['CKPT_SUPERVISE_DIR'] + '/../go'): time.sleep(0.02)\n"
    )
    python, where, options = toy()[0], tmp_path / "c", ("--kill-wait", "24s", "--requeue", "never")
    with (
        supervised(tmp_path / "a", [python, "-c", script], *options, env=task_env(0, 2), directory=where) as first,
        supervised(tmp_path / "b", [python, "-c", script], *options, env=task_env(1, 2), directory=where) as second,
    ):
        first.event("rank_finished", rank=0)
        for run in (first, second):
            run.signal(signal.SIGTERM)
        first.event("leaving")
        (tmp_path / "go").touch()
        assert first.event("left_alone")["ranks"] == [1]
        assert [run.code() for run in (first, second)] == [76, 76], first.story()
        notice = first.events("notice")[0]
        assert first.event("exit")["mono_ms"] - notice["mono_ms"] < notice["leave_left_ms"], "there was more time than it took"


def test_a_path_that_two_ranks_report_fails_the_round(tmp_path: Path) -> None:
    """Field case 107 in small: both would write state.pt, and neither knows of the other."""
    script = TOGETHER + (
        "def save(directory, step):\n"
        "    (directory / 'state.pt').write_text(str(step)); return directory / 'state.pt'\n"
        "for i in together(ckpt.steps(10**6, save=save, load=print)): time.sleep(0.02)\n"
    )
    python = toy()[0]
    with (
        supervised(tmp_path / "a", [python, "-c", script], *OFTEN, env=task_env(0, 2), directory=tmp_path / "c") as first,
        supervised(tmp_path / "b", [python, "-c", script], *OFTEN, env=task_env(1, 2), directory=tmp_path / "c"),
    ):
        assert "reported twice, by rank" in first_failure(first)
        assert not list((tmp_path / "c").glob("step-*"))


def test_a_task_that_fails_ends_the_step_with_its_status(tmp_path: Path) -> None:
    """One rank's crash ends all within seconds, and commits nothing."""
    with step_of(tmp_path, 3, options=KILL_WAIT, of_task={1: ("--steps", 250, "--exit-code", 77)}) as step:
        step.trained()  # All of them do some steps before the one ends, however late the last one was started.
        assert step.codes() == [77, 77, 77]
        assert step.committed() == []
        assert not any(is_alive(step.pid(rank)) for rank in range(3))


def test_a_task_that_fails_does_not_cut_the_others_writes_in_half(tmp_path: Path) -> None:
    """A save that runs is let come to its end before the step ends: its file may be the user's only one."""
    slow = ("--save-ms", 1_500, "--save-elsewhere", tmp_path / "own")
    with step_of(tmp_path, 2, options=KILL_WAIT, of_task={0: slow, 1: ("--kill-self-in-save",)}) as step:
        step.trained()
        step[0].signal(signal.SIGUSR2)
        assert step.codes() == [137, 137]
        assert json.loads((tmp_path / "own" / "toy-00000.json").read_bytes())["rank"] == 0
        assert [word[0] for word in step.words(0)].count("saved") == 1


def test_all_tasks_end_with_0_when_training_is_over(tmp_path: Path) -> None:
    """Nobody is cut off because another one was done first."""
    with step_of(tmp_path, 3, "--steps", 20, of_task={2: ("--step-ms", 80)}) as step:
        assert step.codes() == [0, 0, 0]
        assert [max(step.steps(rank)) for rank in range(3)] == [20, 20, 20]
        assert not list((step.dir / ".rendezvous").glob("*.json")), "no key outlives the step"


def test_tasks_are_started_again_in_place_together(tmp_path: Path) -> None:
    """--restarts: one task's failure starts all of them again from the newest checkpoint."""
    with step_of(tmp_path, 2, options=(*OFTEN, "--restarts", 1), of_task={1: ("--steps", 95, "--exit-code", 77)}) as step:
        again = step.event("command_started", task=1, restart=1)
        assert again["resume_step"] == step.event("command_started", task=0, restart=1)["resume_step"] >= 10
        assert step.codes() == [77, 77]


def test_a_relay_that_is_killed_ends_the_step_and_is_named(tmp_path: Path) -> None:
    """A killed supervisor takes its ranks with it, so no checkpoint can be whole any more."""
    with step_of(tmp_path, 3, options=(*OFTEN, "--keep", 1_000)) as step:
        step.trained()
        step.event("round_committed")
        step[2].signal(signal.SIGKILL)
        assert [step[0].code(), step[1].code()] == [137, 137]
        gone = step.event("task_gone", of_task=2)
        assert gone["task_pid"] == step[2].process.pid
        assert step[0].intact() == step.committed()


def test_a_relay_that_is_killed_under_a_notice_leaves_the_older_checkpoint_in_time(tmp_path: Path) -> None:
    """Row 5: this round is given up within the deadline, and the reason names the task and its rank."""
    with step_of(tmp_path, 3, options=ROOMY, of_task={1: ("--save-ms", 5_000)}) as step:
        step.trained()
        step[0].signal(signal.SIGUSR2)
        older = int(step.event("round_committed")["step"])
        step[0].signal(signal.SIGTERM)
        step.event("rank_saving", rank=1, round=int(step.event("round_begun", kind="save and leave")["round"]))
        step[1].signal(signal.SIGKILL)
        assert [step[0].code(), step[2].code()] == [76, 76]
        took_ms = step.events("exit", task=0)[0]["mono_ms"] - step.events("notice", task=0)[0]["mono_ms"]
        assert took_ms < 20_000, "the deadline for the save was waited for"
        assert step.committed() == [older]
        assert "task 1 on " in step[0].err
        assert "with rank 1 for " in step[0].err


def test_without_its_coordinator_training_goes_on_and_leaves_when_it_is_told(tmp_path: Path) -> None:
    """Row 5, no notice: the others notice within 5 s, commit nothing, train on, and leave with 76 when a notice comes."""
    with step_of(tmp_path, 3, options=OFTEN) as step:
        step.trained()
        step.event("round_committed")
        step[0].signal(signal.SIGKILL)
        killed_ms = time.monotonic_ns() // 1_000_000
        lost = [step.event("coordinator_lost", task=task)["mono_ms"] for task in (1, 2)]
        assert max(lost) - killed_ms < 5_000 + BUSY_MS
        # The last commit may have been killed before its line, or before what it had pruned.
        there = sorted(path.name for path in step.dir.glob("step-*"))
        committed, done = step.committed(), max(step.steps(1))
        eventually(lambda: max(step.steps(1)) > done + 25, "training goes on beyond its next save")
        assert step.committed() == committed
        for task in (1, 2):
            step[task].signal(signal.SIGTERM)
        assert [step[1].code(), step[2].code()] == [76, 76]
        assert "task 0's supervisor" in step[1].err
        assert sorted(path.name for path in step.dir.glob("step-*")) == there


def test_ranks_that_are_parked_go_on_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    """A round that nobody can finish any more holds nobody."""
    with step_of(tmp_path, 3, options=OFTEN, of_task={0: ("--hang-save",)}) as step:
        step.event("rank_written", rank=1)
        step[0].signal(signal.SIGKILL)
        done = max(step.steps(1))
        eventually(lambda: max(step.steps(1)) > done + 5, "training goes on", 30)


def test_a_coordinator_that_was_stopped_is_followed_again(tmp_path: Path) -> None:
    """While it was stopped nobody was heard; that makes nobody gone, and the next save is one of all ranks."""
    with step_of(tmp_path, 3, options=KILL_WAIT) as step:
        step.trained()
        step[0].signal(signal.SIGSTOP)
        for task in (1, 2):
            step.event("coordinator_lost", task=task)
        step[0].signal(signal.SIGCONT)
        for task in (1, 2):
            step.event("coordinator_back", task=task)
        assert step.events("task_gone") == []
        step[0].signal(signal.SIGUSR2)
        step.event("round_committed")
        whole(step, step.committed()[-1])


def test_a_relay_that_was_stopped_is_heard_again(tmp_path: Path) -> None:
    """It was gone meanwhile; its rank takes part again, with what it is."""
    with step_of(tmp_path, 3, options=KILL_WAIT) as step:
        step.trained()
        step[1].signal(signal.SIGSTOP)
        step.event("task_gone", of_task=1)
        step[0].signal(signal.SIGUSR2)
        assert "1 of 3 ranks are not there: 1" in step.event("round_given_up")["reason"]
        step[1].signal(signal.SIGCONT)
        step.event("task_back", of_task=1)
        step[0].signal(signal.SIGUSR2)
        step.event("round_committed")
        whole(step, step.committed()[-1])


def test_without_a_shared_directory_the_error_names_it(tmp_path: Path) -> None:
    """Field case 80: --dir on a disk of the node: the other tasks find nobody, and say where they have looked."""
    quick = (*KILL_WAIT, "--join-timeout", "700ms")
    with supervised(tmp_path / "a", toy(), *quick, env=task_env(1, 2), directory=tmp_path / "mine") as run:
        assert run.code() == 2
        assert str(tmp_path / "mine") in run.err
        assert "on a file system that all nodes of the job share" in run.err
        assert "may be a directory of this node's own" in run.err


def test_an_interface_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    """And names those that are."""
    with supervised(tmp_path / "a", toy(), "--interface", "nope7", env=task_env(0, 2)) as run:
        assert run.code() == 2
        assert len(run.err.splitlines()) == 1
        assert "nope7" in run.err
        assert "lo" in run.err


def test_different_temporary_directories_are_no_matter(tmp_path: Path) -> None:
    """Field case 141: ipc stays on its node, and nothing of it lies in the shared directory."""
    with step_of(tmp_path, 2, options=OFTEN) as step:
        step.trained()
        step.event("round_committed")
        sockets = [path for path in step.dir.rglob("*") if path.is_socket()]
        assert sockets == []


def test_random_bytes_on_its_sockets_do_not_disturb_training(tmp_path: Path) -> None:
    """Row 8, a few seconds of it: saves go on, every task is there, and strangers are told of once."""
    over = threading.Event()

    def noise(port: int, seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.settimeout(0.05)
                    connection.sendall(rng.randbytes(rng.choice((1, 64, 5_000))))
                    connection.recv(64)
            except OSError:
                continue

    with step_of(tmp_path, 2, options=OFTEN) as step:
        step.trained()
        (invitation,) = (step.dir / ".rendezvous").glob("*.json")
        assert (invitation.stat().st_mode & 0o777, invitation.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        port = int(json.loads(invitation.read_bytes())["addresses"][0].rpartition(":")[2])
        noises = [threading.Thread(target=noise, args=(port, seed)) for seed in range(2)]
        step.event("round_committed")  # Whoever came late has come by now, in the journal too.
        before, late = len(step.committed()), step.events("round_given_up")
        assert all(map(is_late_start, late))
        for thread in noises:
            thread.start()
        try:
            step.event("round_committed", before + 8)
        finally:
            over.set()
            for thread in noises:
                thread.join()
        assert step.events("task_gone") == []
        assert step.events("round_given_up") == late
        assert list((step.dir / ".rendezvous").iterdir()) == [invitation]
        assert step.events("garbage", peer="somebody on the port"), "strangers are told of"
        step[0].signal(signal.SIGTERM)
        assert step.codes() == [75, 75]


def test_tasks_that_join_late_hear_that_nothing_is_started(tmp_path: Path) -> None:
    """Only damaged checkpoints: the coordinator refuses at once, and nobody waits for it until --join-timeout."""
    broken = tmp_path / "ckpt" / "step-000000100"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("{}")
    with step_of(tmp_path, 3) as step:
        assert step.codes() == [76, 76, 76]
        assert "none is intact" in step[0].err
        assert step.events("command_started") == []


def task_of(srun: str, task: int) -> dict[str, str]:
    """A task of a step of two, with the port of its srun."""
    return task_env(task, 2, SLURM_SRUN_COMM_HOST="127.0.0.1", SLURM_SRUN_COMM_PORT=srun)


def test_a_task_that_comes_when_task_0_has_left_leaves_with_the_same_status(tmp_path: Path) -> None:
    """Not after --join-timeout, and not with a word about the directory. An earlier srun's end is not believed."""
    late = (*KILL_WAIT, "--join-timeout", "2s")
    with supervised(
        tmp_path / "a", ["/bin/sh", "-c", "exit 3"], *late, env=task_of("4711", 0), directory=tmp_path / "c"
    ) as first:
        assert first.code() == 3
    with supervised(tmp_path / "b", toy(), *KILL_WAIT, env=task_of("4711", 1), directory=tmp_path / "c") as second:
        assert second.code() == 3
        assert "task 0's supervisor has left before task 1 came: status 3" in second.err
    with supervised(tmp_path / "d", toy(), *late, env=task_of("4712", 1), directory=tmp_path / "c") as other:
        assert other.code() == 2
        assert "has not found task 0's supervisor" in other.err


def test_the_other_tasks_hear_why_task_0_does_not_start(tmp_path: Path) -> None:
    """The directory is in use: one reason, told by all, at once."""
    with supervised(tmp_path / "a", toy("--steps", 10**6), directory=tmp_path / "c") as holder:
        holder.event("command_started")
        with supervised(tmp_path / "b", toy(), env=task_of("5", 0), directory=tmp_path / "c") as first:
            assert first.code() == 2
        with supervised(tmp_path / "d", toy(), env=task_of("5", 1), directory=tmp_path / "c") as second:
            assert second.code() == 2
            assert "in use by job" in second.err
        assert holder.process.poll() is None
