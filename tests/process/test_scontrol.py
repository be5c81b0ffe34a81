"""The call of scontrol as a real process: bounded, shielded, reaped, and never mistaken."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.adapters import slurm
from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.adapters.slurm import Scontrol
from ckpt_supervisor.core.views import JobView, NoView

from tests.support.proc_stage import BOUND_S, Stage, until

TEXTS = Path(__file__).resolve().parents[1] / "support" / "proc_slurm_texts"


class Stub:
    """A scontrol of ours, first on PATH; it writes down its pid, its arguments and its masks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "calls"
        self.claims = Claims()

    def does(self, script: str, our_id: str = "41012") -> Scontrol:
        """A Scontrol whose scontrol does this."""
        tool = self.directory / "scontrol"
        tool.write_text(f'#!/bin/bash\n{{ echo "$$ $@"; grep SigBlk /proc/self/status; }} >> {self.log}\n{script}\n')
        tool.chmod(0o755)
        env = {"PATH": f"{self.directory}:{os.environ['PATH']}", "SLURM_TIME_FORMAT": "relative", "TEXTS": str(TEXTS)}
        who = slurm.SlurmEnv.from_environ({"SLURM_JOB_ID": our_id})
        assert who is not None
        made = Scontrol.locate(who, env, self.claims)
        assert made is not None
        return made

    def calls(self) -> list[tuple[int, str]]:
        """Pids and arguments; none of a call that was killed before it could write."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = [line for line in text.splitlines() if "SigBlk" not in line]
        return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]

    def is_over(self) -> bool:
        """No call of ours is left, not even as a zombie, and none is waited for."""
        gone = [not Path(f"/proc/{pid}").exists() for pid, _ in self.calls()]
        return all(gone) and self.claims.claimed() == frozenset()


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """A scontrol that is over, whatever happened, when the test is."""
    made = Stub(tmp_path)
    yield made
    assert made.is_over()


def in_a_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a worker thread with every signal blocked, as the supervisor's lanes are."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        results.put(call())
        results.put(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=work)
    thread.start()
    result = results.get(timeout=BOUND_S)
    assert results.get(timeout=BOUND_S) == signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    thread.join(BOUND_S)
    return result


def test_a_look_gives_what_scontrol_printed(stub: Stub) -> None:
    """The job is asked for by our id, in the form that is the same on every Slurm; it was looked at just now."""
    scontrol = stub.does('[ "$SLURM_TIME_FORMAT" = %s ] && cat "$TEXTS/22.05-preempted.txt"')
    view = in_a_thread(lambda: scontrol.show_job(BOUND_S))
    assert isinstance(view, JobView)
    assert (view.state, view.preempt_ms, view.grace_ms) == ("RUNNING", 1_795_967_251_000, None)
    assert abs(view.looked_ms - time.time_ns() // 1_000_000) < BOUND_S * 1_000
    assert [arguments for _, arguments in stub.calls()] == ["show job 41012"]


def test_the_partitions_grace_is_asked_only_when_it_is_needed(stub: Stub) -> None:
    """Preempted with EndTime Unknown: the partition of the job is asked for its GraceTime."""
    scontrol = stub.does(
        'if [ $2 = job ]; then cat "$TEXTS/22.05-preempted_unknown.txt"; else cat "$TEXTS/22.05-partition.txt"; fi', "41013"
    )
    view = in_a_thread(lambda: scontrol.show_job(BOUND_S))
    assert isinstance(view, JobView)
    assert (view.end_ms, view.grace_ms) == (None, 20_000)
    assert [arguments for _, arguments in stub.calls()] == ["show job 41013", "show partition -o low"]


def test_a_partition_that_cannot_be_asked_leaves_the_view(stub: Stub) -> None:
    """The rest of the view is worth having, and the second question shares the first one's time."""
    scontrol = stub.does('if [ $2 = job ]; then cat "$TEXTS/22.05-preempted_unknown.txt"; else exec sleep 100; fi', "41013")
    started = time.monotonic()
    view = scontrol.show_job(5.0)
    assert time.monotonic() - started < 30
    assert isinstance(view, JobView)
    assert view.grace_ms is None


def test_the_configuration_is_asked(stub: Stub) -> None:
    """KillWait in ms; None when the question fails."""
    assert stub.does('cat "$TEXTS/24.11-config.txt"').kill_wait(BOUND_S) == 6_000
    assert stub.does("exit 1").kill_wait(BOUND_S) is None
    assert stub.does("echo nothing of use").kill_wait(BOUND_S) is None


def test_a_scontrol_that_hangs_is_ended_in_time(stub: Stub) -> None:
    """It is killed by its pid when time is up, reaped, and the answer is "could not look", try again (field case 44)."""
    started = time.monotonic()
    view = in_a_thread(lambda: stub.does("exec sleep 120").show_job(3.0))
    assert 3.0 <= time.monotonic() - started < 30
    assert isinstance(view, NoView)
    assert not view.definite
    assert "did not answer within 3.0 s" in view.reason


def test_a_scontrol_that_blocks_everything_and_closes_its_output_is_ended_in_time(stub: Stub) -> None:
    """End of output is not the end of the process."""
    view = stub.does("trap '' TERM INT HUP; exec sleep 120 >&- 2>&-").show_job(3.0)
    assert isinstance(view, NoView)
    assert "did not answer" in view.reason


def test_a_child_of_scontrol_that_holds_its_output_does_not_hold_us(stub: Stub, tmp_path: Path) -> None:
    """The output stays open in a process that is not ours to end; the answer still comes, with the time that was allowed."""
    scontrol = stub.does(f'sleep 120 & echo $! > {tmp_path}/left; cat "$TEXTS/22.05-preempted.txt"')
    view = scontrol.show_job(5.0)
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert isinstance(view, JobView)


def test_a_flood_of_output_is_bounded(stub: Stub) -> None:
    """What is too much is read and dropped: scontrol ends, and we keep OUTPUT_BYTES_MAX."""
    scontrol = stub.does('cat "$TEXTS/22.05-preempted.txt"; head -c 30000000 /dev/zero; head -c 3000000 /dev/zero >&2')
    ran = scontrol._run(("show", "job", "41012"), BOUND_S)
    assert isinstance(ran, slurm.Ran)
    assert ran.rc == 0
    assert (len(ran.stdout), len(ran.stderr)) == (slurm.OUTPUT_BYTES_MAX, slurm.OUTPUT_BYTES_MAX)
    assert isinstance(scontrol.show_job(BOUND_S), JobView)


@pytest.mark.parametrize(
    ("script", "definite", "word"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True, "Invalid job id"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", False, "Unable to contact"),
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", False, "configuration source"),
        ("exit 3", False, "ended with 3"),
        ("kill -9 $$", False, "ended with -9"),
        ("true", False, "no record"),
        (r"printf '\xff\xfe\0\n'", False, "no record"),
    ],
)  # fmt: skip
def test_could_not_look_says_why_and_whether_to_try_again(stub: Stub, script: str, definite: bool, word: str) -> None:
    """Only "no such job" is definite."""
    view = stub.does(script).show_job(BOUND_S)
    assert isinstance(view, NoView)
    assert view.definite is definite
    assert word in view.reason


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("true", "accepted"),
        ("echo 'Job is pending execution for job 41012' >&2; exit 1", "pending"),
        ("echo 'Requested operation is presently disabled for job 41012' >&2; exit 1", "refused"),
        ("echo 'Only batch jobs are accepted or processed for job 41012' >&2; exit 1", "refused"),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", "unknown"),
        ("kill -TERM $$; kill -9 $$", "unknown"),
        ("exec sleep 100", "unknown"),
    ],
)  # fmt: skip
def test_a_requeue_is_accepted_refused_or_unknown(stub: Stub, script: str, kind: str) -> None:
    """What was not refused by Slurm itself, in so many words, is unknown."""
    answer = in_a_thread(lambda: stub.does(script).requeue(5.0 if "sleep" in script else BOUND_S / 2))
    assert answer.kind == kind
    assert [arguments for _, arguments in stub.calls()] == ["requeue 41012"]


@pytest.mark.parametrize("call", [in_a_thread, lambda look: look()])
def test_the_broadcast_of_a_notice_does_not_end_the_call(stub: Stub, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Its signals are blocked in scontrol, whichever thread calls: none of them ends it."""
    signals = " ".join(str(int(number)) for number in sorted(slurm.SHIELDED))
    script = f'for n in {signals}; do kill -$n $$; done; cat "$TEXTS/22.05-preempted.txt"'
    scontrol = stub.does(script)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert isinstance(call(lambda: scontrol.show_job(BOUND_S)), JobView)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    (line,) = [line for line in stub.log.read_text().splitlines() if "SigBlk" in line]
    shielded = sum(1 << (number - 1) for number in slurm.SHIELDED)
    assert int(line.split()[1], 16) & shielded == shielded


def test_a_call_lives_through_the_group_wide_signal_that_its_caller_handles(tmp_path: Path) -> None:
    """With proctrack/linuxproc the notice hits the supervisor and its scontrol alike; both go on."""
    tool = tmp_path / "scontrol"
    tool.write_text(f'#!/bin/bash\nkill -TERM 0; kill -USR1 0; cat "{TEXTS}/22.05-preempted.txt"\n')
    tool.chmod(0o755)
    script = """
        import json, os, sys, threading
        from ckpt_supervisor.adapters.signals import SignalInbox
        from ckpt_supervisor.adapters.slurm import Scontrol
        os.setpgid(0, 0)
        with SignalInbox() as inbox:
            seen = []
            thread = threading.Thread(target=lambda: seen.append(Scontrol(sys.argv[1], "41012", os.environ).show_job(20)))
            thread.start()
            thread.join()
            print(json.dumps([seen[0].state, sorted(set(inbox.drain()) - {17})]), flush=True)
    """
    with Stage(script, str(tool)) as stage:
        assert stage.said() == ["RUNNING", [signal.SIGUSR1, signal.SIGTERM]]


def test_a_scontrol_that_is_gone_by_now_is_an_answer(stub: Stub) -> None:
    """It was there at the start; the file system with it is not there any more."""
    scontrol = stub.does("true")
    assert scontrol.requeue(BOUND_S).kind == "accepted"
    (stub.directory / "scontrol").unlink()
    view = scontrol.show_job(BOUND_S)
    assert isinstance(view, NoView)
    assert "cannot be started" in view.reason
    assert scontrol.requeue(BOUND_S).kind == "unknown"
    assert scontrol.kill_wait(0.0) is None


def test_a_status_that_somebody_else_took_is_not_success(stub: Stub, tmp_path: Path) -> None:
    """A requeue whose exit status was lost is unknown, not accepted (subprocess would say 0)."""
    scontrol = stub.does(f"sleep 120 & echo $! > {tmp_path}/left; exit 0")
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: results.put(scontrol.requeue(6.0)))
    thread.start()
    until(lambda: (tmp_path / "left").exists() and (tmp_path / "left").read_text().strip(), "the call is under way")
    ((pid, _),) = stub.calls()
    assert stub.claims.claimed() == {pid}
    assert os.waitpid(pid, 0) == (pid, 0)
    answer = results.get(timeout=BOUND_S)
    thread.join(BOUND_S)
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert answer.kind == "unknown"
    assert "lost" in answer.reason
