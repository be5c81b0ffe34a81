"""The real client over the real socket: a scripted supervisor asks, trainers in processes of their own answer."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from ckpt_client import wire
from ckpt_client.wire import NO_ROUND, Position

from tests.support.fake_supervisor import FakeSupervisor

FAST = ("--no-torch", "--steps", "1000000", "--step-ms", "1")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    """A supervisor whose store is the test's directory."""
    with FakeSupervisor(tmp_path) as fake:
        yield fake


def lines(child: subprocess.Popen[str], start: str) -> list[str]:
    """What the ended trainer printed that starts so."""
    assert child.stdout is not None
    return [line for line in child.stdout.read().splitlines() if line.startswith(start)]


def last_step(log: Path) -> int:
    """The last step that a log has."""
    return max(steps_done(log), default=0) if log.exists() else 0


def steps_done(log: Path, rank: int = 0) -> list[int]:
    """The steps that a log says were done by this rank."""
    words = [line.split() for line in log.read_text().splitlines()]
    return [int(word[1]) for word in words if word[0] == "step" and word[3] == str(rank)]


def test_a_rank_answers_while_its_main_thread_is_in_a_long_call(supervisor: FakeSupervisor) -> None:
    """The step takes ten minutes; the answer does not wait for it, and counts the step that is under way."""
    child = supervisor.start("--no-torch", "--step-ms", "600000")
    (pid,) = supervisor.under_way(child)
    took = []
    for number in range(supervisor.rounds + 1, supervisor.rounds + 51):
        began = time.monotonic()
        supervisor.say(pid, wire.Prepare(number))
        ack = supervisor.expect(wire.Ack, pid, lambda w, number=number: w.round == number)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        assert ack.entered == Position(1, 0)
    # On a busy machine most may wait for a processor, but who looks for words now and then only is never as quick as this.
    assert sorted(took)[len(took) // 10] < 0.02
    assert max(took) < 10


@pytest.mark.parametrize("mode", ["own", "attach"])
def test_a_run_saves_on_request_goes_on_leaves_and_resumes_without_losing_a_step(
    supervisor: FakeSupervisor, tmp_path: Path, mode: str
) -> None:
    """Each step is done exactly once over three runs, and each run ends with code 0 through `finally` and `atexit`."""
    log = tmp_path / "log"
    for _ in range(3):
        child = supervisor.start(*FAST, "--mode", mode, "--log", str(log))
        (pid,) = supervisor.under_way(child)
        first = supervisor.commit(supervisor.save([pid]))
        committed = supervisor.preempt(child)
        assert int(committed.name[5:]) > int(first.name[5:])
        assert child.returncode == 0
        assert supervisor.expect(wire.Left, pid).again is False
        assert not [w for w in supervisor.heard if isinstance(w, wire.Finished)]
        printed = lines(child, "")
        assert printed[-2].startswith("preempted")
        assert printed[-1].startswith("exit")
    done = steps_done(log)
    assert done == list(range(1, int(committed.name[5:]) + 1))


def test_two_ranks_that_drift_apart_save_the_same_step(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """One rank is four times slower; the faster one waits at the agreed step, and no step is lost by either."""
    log = tmp_path / "log"
    for _ in range(3):
        # First: a fast one that has begun seconds earlier would be so far ahead that the slow one takes minutes to come there.
        slow = supervisor.start(*FAST, "--step-ms", "4", "--log", str(log), rank=1, world=2)
        supervisor.attached(slow)
        fast = supervisor.start(*FAST, "--log", str(log), rank=0, world=2)
        pids = supervisor.under_way(fast, slow)
        # The fast one must not be held by an agreement on a step that the slow one has yet to reach.
        supervisor.commit(supervisor.save(pids))
        saved = supervisor.save(pids, "leave")
        assert len({word.n for word in saved}) == 1
        committed = supervisor.commit(saved)
        for pid in pids:
            supervisor.say(pid, wire.Leave(supervisor.rounds))
        supervisor.ended(fast, slow)
        assert sorted(path.name for path in committed.iterdir()) == ["toy-00000.json", "toy-00001.json"]
    last = int(committed.name[5:])
    for rank in (0, 1):
        assert steps_done(log, rank) == list(range(1, last + 1))


def test_a_rank_in_a_leave_round_does_not_run_on_after_its_save(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Rule 6: it repeats Saved until it is told what comes next, and Abort lets it go on."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--log", str(log))
    (pid,) = supervisor.under_way(child)
    (saved,) = supervisor.save([pid], "leave")
    seen = len(supervisor.heard)
    supervisor.expect(wire.Saved, pid, after=seen)
    assert last_step(log) == saved.n
    supervisor.say(pid, wire.Abort(saved.round, "another rank failed"))
    supervisor.wait(lambda: last_step(log) > saved.n)


def test_ranks_stop_by_themselves_at_multiples_and_the_round_is_taken_there(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Rule 12: Arrived without Prepare; released by Abort(0), or saved with SaveAt and Go."""
    supervisor.welcome = wire.Welcome(wire.VERSION, 0, 7, "", 0)
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--log", str(log))
    (pid,) = supervisor.attached(child)
    for stop in (7, 14, 21):
        at = Position(stop, 0)
        supervisor.expect(wire.Arrived, pid, lambda w, at=at: w.at == at and w.round == NO_ROUND)  # type: ignore[misc]
        assert last_step(log) == stop
        if stop == 14:
            supervisor.say(pid, wire.Abort(NO_ROUND, "not now"))
            continue
        supervisor.rounds += 1
        number = supervisor.rounds
        supervisor.say(pid, wire.SaveAt(number, at, str(tmp_path / f".partial-step-{stop}-1-{number}"), "go_on", 1000))
        supervisor.say(pid, wire.Go(number))
        saved = supervisor.expect(wire.Saved, pid, lambda w, number=number: w.round == number)  # type: ignore[misc]
        assert supervisor.commit([saved]).name == f"step-{stop:09d}"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("--fail-save", "OSError: [Errno 28] No space left on device"), ("--save-elsewhere=/dev/null/x", "NotADirectoryError")],
)
def test_a_save_that_raises_is_said_with_its_reason_and_training_goes_on(
    supervisor: FakeSupervisor, tmp_path: Path, fault: str, reason: str
) -> None:
    """Training is never made worse; the traceback is on stderr for the person who wrote the save."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, fault, "--log", str(log))
    (pid,) = supervisor.under_way(child)
    order = supervisor.agree([pid])
    supervisor.say(pid, wire.Go(order.round))
    failed = supervisor.expect(wire.Failed, pid)
    assert reason in failed.reason
    supervisor.wait(lambda: last_step(log) > order.at.n)
    child.kill()
    assert lines(child, "Traceback")


def test_a_save_that_was_given_up_for_another_rank_prints_no_trace(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Its directory is removed under it: that nothing is there any more would bury the true reason."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--save-ms", "1000", "--log", str(log))
    (pid,) = supervisor.under_way(child)
    order = supervisor.agree([pid])
    supervisor.say(pid, wire.Go(order.round))
    supervisor.expect(wire.Saving, pid)
    supervisor.wait(lambda: any(Path(order.directory).glob("*")))
    supervisor.say(pid, wire.Abort(order.round, "rank 1 is gone"))
    shutil.rmtree(order.directory)
    supervisor.wait(lambda: last_step(log) > order.at.n)
    child.kill()
    assert not lines(child, "Traceback")


def test_a_hanging_save_says_so_every_second_until_it_is_told_to_leave_with_the_process(supervisor: FakeSupervisor) -> None:
    """The listener lives while the save hangs, so the coordinator sees a slow rank and not a dead one."""
    child = supervisor.start(*FAST, "--hang-save")
    (pid,) = supervisor.under_way(child)
    order = supervisor.agree([pid])
    supervisor.say(pid, wire.Go(order.round))
    supervisor.wait(lambda: len([w for w in supervisor.heard if isinstance(w, wire.Saving)]) >= 6)
    said = [ms for w, ms in zip(supervisor.heard, supervisor.heard_ms, strict=True) if isinstance(w, wire.Saving)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(said[1:])]
    # Who is stopped for a while hears, or says, some of them late, but not all.
    assert any(800 <= gap <= 1500 for gap in gaps), gaps


def test_files_written_elsewhere_are_copied_in(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """`save` may write where it always did and return the path."""
    own = tmp_path / "own"
    child = supervisor.start(*FAST, "--save-elsewhere", str(own))
    (pid,) = supervisor.under_way(child)
    (saved,) = supervisor.save([pid])
    committed = supervisor.commit([saved])
    copy = committed / "toy-00000.json"
    (file,) = saved.files
    assert file.path == "toy-00000.json"
    assert file.xxh3_128 in ("", xxhash.xxh3_128_hexdigest(copy.read_bytes()))
    assert copy.read_bytes() == (own / "toy-00000.json").read_bytes()
    assert copy.stat().st_ino != (own / "toy-00000.json").stat().st_ino


@pytest.mark.parametrize("mode", ["own", "attach"])
def test_a_long_evaluation_is_saved_at_its_next_safe_point(supervisor: FakeSupervisor, tmp_path: Path, mode: str) -> None:
    """Without safe points an evaluation of minutes would swallow every notice; resuming repeats no step."""
    log = tmp_path / "log"
    knobs = ("--mode", mode, "--eval-every", "5", "--eval-ms", "600000", "--eval-safe-points", "20000", "--log", str(log))
    child = supervisor.start(*FAST, *knobs)
    (pid,) = supervisor.attached(child)
    supervisor.wait(lambda: log.exists() and "eval 5" in log.read_text())
    while supervisor.agree([pid]).at.k == 0:  # It has said so a moment before it enters the phase.
        supervisor.say(pid, wire.Abort(supervisor.rounds, "not in its evaluation yet"))
    supervisor.say(pid, wire.Abort(supervisor.rounds, "in its evaluation"))
    saved = supervisor.save([pid], "leave")
    assert saved[0].n == 5
    order_at = supervisor.expect(wire.Arrived, pid, lambda w: w.round == supervisor.rounds).at
    assert order_at.n == 5
    assert order_at.k > 0
    supervisor.commit(saved)
    supervisor.say(pid, wire.Leave(supervisor.rounds))
    supervisor.wait(lambda: child.poll() == 0)
    assert steps_done(log) == [1, 2, 3, 4, 5]
    again = supervisor.start(*FAST, "--mode", mode, "--log", str(log))
    supervisor.under_way(again)
    supervisor.preempt(again)
    assert steps_done(log) == list(range(1, len(steps_done(log)) + 1))


def test_an_evaluation_on_rank_0_alone_is_saved_at_the_step_where_the_others_stand(
    supervisor: FakeSupervisor, tmp_path: Path
) -> None:
    """Rule 8: every safe point of such a phase is the boundary of its step."""
    supervisor.welcome = wire.Welcome(wire.VERSION, 0, 5, "", 0)
    log = tmp_path / "log"
    knobs = ("--eval-every", "5", "--eval-ms", "600000", "--eval-safe-points", "20000", "--eval-alone", "--log", str(log))
    ranks = [supervisor.start(*FAST, *knobs, rank=rank, world=2) for rank in (0, 1)]
    pids = supervisor.attached(*ranks)
    # Both stop by themselves at 5; rank 0 is let go into its evaluation, rank 1 stays.
    for pid in pids:
        supervisor.expect(wire.Arrived, pid, lambda w: w.at == Position(5, 0))
    supervisor.say(pids[0], wire.Abort(NO_ROUND, ""))
    supervisor.say(pids[0], wire.Prepare(1))
    assert supervisor.expect(wire.Ack, pids[0]).entered == Position(5, 0)
    order = wire.SaveAt(1, Position(5, 0), str(tmp_path / ".partial-step-5-1-1"), "go_on", 1000)
    for pid in pids:
        supervisor.say(pid, order)
        supervisor.expect(wire.Arrived, pid, lambda w: w.round == 1)
    for pid in pids:
        supervisor.say(pid, wire.Go(1))
    assert [supervisor.expect(wire.Saved, pid).n for pid in pids] == [5, 5]


def test_the_end_of_the_loop_is_a_boundary_and_after_it_every_prepare_is_answered_finished(supervisor: FakeSupervisor) -> None:
    """Rule 9: a round that was agreed on for the last step is saved; after it there is nothing left to save."""
    child = supervisor.start("--no-torch", "--steps", "1", "--step-ms", "4000", "--hang-at-exit")
    (pid,) = supervisor.under_way(child)
    order = supervisor.agree([pid])
    assert order.at == Position(1, 0)
    supervisor.expect(wire.Arrived, pid)
    supervisor.say(pid, wire.Go(order.round))
    assert supervisor.expect(wire.Saved, pid).n == 1
    assert supervisor.expect(wire.Finished, pid).round == NO_ROUND
    supervisor.say(pid, wire.Prepare(order.round + 1))
    assert supervisor.expect(wire.Finished, pid, lambda w: w.round == order.round + 1)


BREAKING = """
import ckpt_client as ckpt

for step in ckpt.steps(10, save=print, load=print):
    if step == 3:
        break
print("left", flush=True)
while True: pass
"""


def test_a_loop_that_is_left_by_break_says_finished_at_once(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Rule 9: no round waits for a rank that will not come back to its loop."""
    script = tmp_path / "breaking.py"
    script.write_text(BREAKING)
    child = supervisor.start(script=(script,))
    (pid,) = supervisor.attached(child)
    assert child.stdout is not None
    assert child.stdout.readline() == "left\n"
    assert supervisor.expect(wire.Finished, pid)
    supervisor.say(pid, wire.Prepare(1))
    assert supervisor.expect(wire.Finished, pid, lambda w: w.round == 1)


def test_a_trainer_that_ignores_leave_is_told_of(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """The second boundary after it says so, once."""
    log = tmp_path / "log"
    child = supervisor.start(*FAST, "--mode", "attach", "--ignore-leave", "--log", str(log))
    (pid,) = supervisor.under_way(child)
    supervisor.save([pid], "leave")
    supervisor.say(pid, wire.Leave(supervisor.rounds))
    assert supervisor.expect(wire.Left, pid, lambda w: w.again)
    last = last_step(log)
    supervisor.wait(lambda: last_step(log) > last + 20)
    assert [w.again for w in supervisor.heard if isinstance(w, wire.Left)] == [False, True]


def test_bytes_that_are_no_word_are_dropped(supervisor: FakeSupervisor) -> None:
    """A listener that died of garbage would leave its rank mute."""
    child = supervisor.start(*FAST)
    (pid,) = supervisor.under_way(child)
    for garbage in (b"", b"\xc1", os.urandom(100), b"\x91\xa7Prepare"):
        supervisor.router.send_multipart([str(pid).encode(), garbage])
    supervisor.router.send_multipart([str(pid).encode(), b"one", b"two"])
    assert supervisor.save([pid])


@pytest.mark.parametrize(
    ("welcome", "says"),
    [
        (wire.Refused("rank 0 is process 1 already"), "the supervisor refused: rank 0 is process 1 already"),
        (wire.Welcome(99, 0, 0, "", 0), "speaks version 99"),
    ],
)
def test_a_refused_rank_trains_on_unsupervised_and_says_so_in_one_line(
    supervisor: FakeSupervisor, welcome: wire.Welcome | wire.Refused, says: str
) -> None:
    """Promise 4: training is never made worse."""
    supervisor.welcome = welcome
    child = supervisor.start("--no-torch", "--steps", "3")
    supervisor.wait(lambda: child.poll() == 0)
    assert says in lines(child, "ckpt: ")[0]
    assert {type(word) for word in supervisor.heard} == {wire.Hello}
