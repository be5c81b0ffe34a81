"""One holder of a directory at a time, and no epoch twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor.core.commands import Commit
from ckpt_supervisor.core.events import CommitResult
from ckpt_supervisor.directory import disk
from ckpt_supervisor.start.startup import Job
from ckpt_supervisor.store import (
    BegunSince,
    Expected,
    HeldByOther,
    Holder,
    Place,
    check_epoch,
    check_files,
    is_alive,
    make_partial,
    partial_name,
    read_holder,
    retake_epoch,
    take_epoch,
)
from ckpt_supervisor.store.holder import pid_namespace, started_at

CHILD = (
    "import sys\n"
    "from ckpt_supervisor.store import HeldByOther, take_epoch\n"
    "directory, job, attempt, step = sys.argv[1:]\n"
    "sys.stdin.readline() if job.startswith('race') else None\n"
    "try: print(take_epoch(directory, job, int(attempt), step).epoch, flush=True)\n"
    "except HeldByOther as error: print('held by', error.holder.job, flush=True)\n"
    "sys.stdin.readline()\n"
)


@contextmanager
def other(root: Path, job: str, attempt: int, step: str) -> Iterator[subprocess.Popen[str]]:
    """Another live process that takes the directory and prints its epoch."""
    command = [sys.executable, "-c", CHILD, str(root), job, str(attempt), step]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next line (the test's own time limit is the bound)."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_start_takes_the_next_epoch(tmp_path: Path) -> None:
    """Epochs rise by one, the holder on the disk is the last, and only its epoch passes the check."""
    assert read_holder(tmp_path) is None
    assert not check_epoch(tmp_path, 0)
    first = take_epoch(tmp_path, "77_3", 0, "0")
    assert (first.epoch, first.job, first.attempt, first.step_id) == (1, "77_3", 0, "0")
    assert (first.host, first.pid) == (os.uname().nodename, os.getpid())
    assert first.pid_started == started_at(os.getpid())
    assert read_holder(tmp_path) == first
    assert check_epoch(tmp_path, 1)
    assert take_epoch(tmp_path, "77_3", 1, "0").epoch == 2
    assert [check_epoch(tmp_path, epoch) for epoch in (0, 1, 2, 3)] == [False, False, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attempt-000000002", "attempt"]
    keys = msgspec.json.decode((tmp_path / "attempt").read_bytes())
    assert list(keys) == ["epoch", "job", "attempt", "step_id", "host", "pid", "pid_started", "pid_namespace"]


def test_a_live_holder_of_another_job_or_step_refuses_a_start(tmp_path: Path) -> None:
    """While another job, another step or the same attempt lives, a start is refused, named, and leaves no trace."""
    with other(tmp_path, "1", 0, "0") as process:
        assert line_of(process) == "1"
        for job, attempt, step in (("2", 0, "0"), ("1", 0, "1"), ("1", 0, "0"), ("2", 5, "0")):
            with pytest.raises(HeldByOther, match=rf"job 1 step 0 .*process {process.pid}") as caught:
                take_epoch(tmp_path, job, attempt, step)
            assert caught.value.holder.pid == process.pid
        assert check_epoch(tmp_path, 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".attempt-000000001", "attempt"]
    assert take_epoch(tmp_path, "2", 0, "0").epoch == 2


def test_an_earlier_attempt_of_the_same_job_is_fenced_off(tmp_path: Path) -> None:
    """A requeued job takes over from its own earlier attempt, even one that still runs."""
    with other(tmp_path, "1", 0, "0") as process:
        assert line_of(process) == "1"
        assert take_epoch(tmp_path, "1", 1, "0").epoch == 2
        assert not check_epoch(tmp_path, 1)


def test_the_dead_and_their_successors_do_not_count_as_alive(tmp_path: Path) -> None:
    """A dead pid, a pid used again, a zombie and a process of another host do not hold a directory."""
    me = take_epoch(tmp_path, "1", 0, "0")
    assert is_alive(me)
    replace = msgspec.structs.replace
    assert not is_alive(replace(me, pid_started=me.pid_started - 1))
    assert not is_alive(replace(me, host="elsewhere"))
    assert not is_alive(replace(me, pid=2**22 + 1))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
        assert started_at(process.pid) is None


def held_from_elsewhere(root: Path, **fields: object) -> Holder:
    """A directory whose last holder was a process of another host."""
    holder = Holder(7, "50", 0, "0", "elsewhere", os.getpid(), 1, 0)
    holder = msgspec.structs.replace(holder, **fields)
    (root / "attempt").write_bytes(msgspec.json.encode(holder))
    return holder


def test_of_another_hosts_holder_somebody_who_knows_is_asked(tmp_path: Path) -> None:
    """Another job's holder cannot be seen: the answer refuses the start, with its words and no trace, or lets it go on."""
    holder = held_from_elsewhere(tmp_path)
    asked: list[Holder] = []

    def alive(of: Holder) -> str:
        asked.append(of)
        return "Slurm says RUNNING"

    with pytest.raises(HeldByOther, match=r"job 50 step 0 \(attempt 0\), process \d+ on elsewhere: Slurm says RUNNING") as caught:
        take_epoch(tmp_path, "60", 0, "0", alive)
    assert caught.value.holder == holder
    assert asked == [holder]
    assert [path.name for path in tmp_path.iterdir()] == ["attempt"]
    assert take_epoch(tmp_path, "60", 0, "0", lambda _: "").epoch == 8


def test_without_somebody_to_ask_another_hosts_holder_counts_as_gone(tmp_path: Path) -> None:
    """It cannot be judged, and its commits are refused from now on; the same pid on another host is not ourselves."""
    held_from_elsewhere(tmp_path)
    assert take_epoch(tmp_path, "60", 0, "0").epoch == 8
    assert not check_epoch(tmp_path, 7)


@pytest.mark.parametrize(
    ("job", "attempt", "step"), [("50", 1, "0"), ("50", 1, "3"), ("50", 0, "0")], ids=["requeued", "another step", "same srun"]
)
def test_of_the_same_jobs_earlier_holder_nobody_is_asked(tmp_path: Path, job: str, attempt: int, step: str) -> None:
    """A requeued job fences its own earlier attempt off: an ordinary start costs no call."""
    held_from_elsewhere(tmp_path)
    assert take_epoch(tmp_path, job, attempt, step, lambda _: pytest.fail("nobody is to be asked")).epoch == 8


def test_of_another_step_of_the_same_attempt_somebody_is_asked_unless_it_is_seen_to_be_gone(tmp_path: Path) -> None:
    """Two sruns of one job with one directory, on two nodes; on one node the process table tells."""
    held_from_elsewhere(tmp_path)
    with pytest.raises(HeldByOther, match="Slurm says RUNNING"):
        take_epoch(tmp_path, "50", 0, "1", lambda _: "Slurm says RUNNING")
    held_from_elsewhere(tmp_path, host=os.uname().nodename, pid=2**22 + 1)
    assert take_epoch(tmp_path, "50", 0, "1", lambda _: pytest.fail("nobody is to be asked")).epoch == 8


def test_a_pid_of_another_namespace_is_not_judged_here(tmp_path: Path) -> None:
    """In a container the same number is another process: alive or not, Slurm is asked."""
    me = take_epoch(tmp_path, "1", 0, "0")
    assert me.pid_namespace == pid_namespace() != 0
    contained = msgspec.structs.replace(me, pid_namespace=me.pid_namespace + 1)
    assert not is_alive(contained)
    assert is_alive(msgspec.structs.replace(me, pid_namespace=0)), "of a holder that did not write it down"
    held_from_elsewhere(tmp_path, host=me.host, pid=1, pid_started=started_at(1), pid_namespace=me.pid_namespace + 1)
    with pytest.raises(HeldByOther, match="Slurm says PENDING"):
        take_epoch(tmp_path, "60", 0, "0", lambda _: "Slurm says PENDING")


def test_a_job_that_continues_another_one_takes_the_directory_from_it_alive(tmp_path: Path) -> None:
    """The user says so: the older one's commits are refused from then on; no other job's directory is taken that way."""
    with other(tmp_path, "1", 0, "0") as process:
        assert line_of(process) == "1"
        with pytest.raises(HeldByOther):
            take_epoch(tmp_path, "2", 0, "0", continues="3")
        assert take_epoch(tmp_path, "2", 0, "0", lambda _: pytest.fail("nobody is to be asked"), continues="1").epoch == 2
        assert not check_epoch(tmp_path, 1)
        assert process.poll() is None


def test_of_many_starts_at_once_one_holds(tmp_path: Path) -> None:
    """Two jobs that start in the same instant on one directory: one gets it, the other is told who has it."""
    for _ in range(5):
        with other(tmp_path, "race-a", 0, "0") as first, other(tmp_path, "race-b", 0, "0") as second:
            for process in (first, second):
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            lines = sorted([line_of(first), line_of(second)])
            assert lines[0].isdigit(), lines
            assert lines[1] in ("held by race-a", "held by race-b"), lines
            assert check_epoch(tmp_path, int(lines[0]))


def test_no_epoch_is_given_twice_to_attempts_that_race(tmp_path: Path) -> None:
    """Starts of one job's successive attempts at the same moment all get epochs of their own."""
    for base in (0, 10, 20):
        with other(tmp_path, "race", base + 1, "0") as a, other(tmp_path, "race", base + 2, "0") as b:
            for process in (a, b):
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            lines = [line_of(a), line_of(b)]
            assert {line for line in lines if not line.isdigit()} <= {"held by race"}, "the one that the later one fences off"
            taken = [int(line) for line in lines if line.isdigit()]
            assert taken
            assert len(set(taken)) == len(taken)
            assert [check_epoch(tmp_path, epoch) for epoch in taken].count(True) == 1


@pytest.mark.parametrize("job", ["77", "another"])
def test_an_older_holder_that_comes_back_to_the_disk_does_not_hold_it(tmp_path: Path, job: str) -> None:
    """By a slow start that writes its word after a later one has, or by a file system (field case 105): never two holders."""
    first = take_epoch(tmp_path, "77", 0, "0")
    word = (tmp_path / "attempt").read_bytes()
    second = take_epoch(tmp_path, job, 1, "0", continues="77")
    (tmp_path / "attempt").write_bytes(word)
    assert [check_epoch(tmp_path, holder.epoch) for holder in (first, second)] == [False, True]


def test_a_start_that_a_later_one_fences_off_before_it_is_through_is_told_who_holds(tmp_path: Path) -> None:
    """The later attempt has come and gone on while the earlier one still asked; its word in DIR/attempt does not count."""
    (tmp_path / "attempt").write_bytes(msgspec.json.encode(Holder(0, "9", 0, "0", "elsewhere", 1, 1)))
    with contextlib.ExitStack() as stack:

        def ask(_holder: Holder) -> str:
            if list(tmp_path.glob(".attempt-*")):
                assert line_of(stack.enter_context(other(tmp_path, "1", 1, "0"))) == "2"
            return ""

        with pytest.raises(BegunSince, match=r"in use by job 1 step 0 \(attempt 1\), .*: it has begun after this start"):
            take_epoch(tmp_path, "1", 0, "0", ask)
    assert [check_epoch(tmp_path, epoch) for epoch in (1, 2)] == [False, True]


def test_a_directory_that_is_emptied_during_a_start_is_its_own(tmp_path: Path) -> None:
    """Somebody tidied up between its mark and its word: nobody else has begun, and nobody is named as a holder."""
    (tmp_path / "attempt").write_bytes(msgspec.json.encode(Holder(0, "9", 0, "0", "elsewhere", 1, 1)))

    def ask(_holder: Holder) -> str:
        for name in [".attempt-000000001", "attempt"] if list(tmp_path.glob(".attempt-*")) else []:
            (tmp_path / name).unlink()
        return ""

    assert take_epoch(tmp_path, "1", 0, "0", ask).epoch == 1
    assert check_epoch(tmp_path, 1)


def test_a_start_that_is_not_through_yet_takes_nothing_away(tmp_path: Path) -> None:
    """Its mark is there, and it may still be refused: the holder goes on; also when somebody has tidied all marks away."""
    first = take_epoch(tmp_path, "77", 0, "0")
    (tmp_path / ".attempt-000000002").symlink_to("{}")
    assert check_epoch(tmp_path, first.epoch)
    for mark in tmp_path.glob(".attempt-*"):
        mark.unlink()
    assert check_epoch(tmp_path, first.epoch)


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[" * 100_000, b'{"epoch": "seven"}'])
def test_a_broken_holder_file_never_brings_an_epoch_back(tmp_path: Path, content: bytes) -> None:
    """With the file unreadable the next epoch is still above every epoch that any name tells of."""
    for attempt in range(3):
        take_epoch(tmp_path, "1", attempt, "0")
    (tmp_path / "attempt").write_bytes(content)
    assert read_holder(tmp_path) is None
    assert take_epoch(tmp_path, "1", 3, "0").epoch == 4
    (tmp_path / "attempt").unlink()
    (tmp_path / ".attempt-000000004").unlink()
    (tmp_path / partial_name(5, 9, 1)).mkdir()
    assert take_epoch(tmp_path, "1", 4, "0").epoch == 10


def test_a_tidied_directory_is_still_ours(tmp_path: Path) -> None:
    """With DIR/attempt removed by somebody the last one who started may go on, an older one may not."""
    first = take_epoch(tmp_path, "1", 0, "0")
    second = take_epoch(tmp_path, "1", 1, "0")
    (tmp_path / "attempt").unlink()
    assert check_epoch(tmp_path, second.epoch)
    assert not check_epoch(tmp_path, first.epoch)


def test_a_mark_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A mark is a link that holds its maker and points nowhere; where that cannot be, a file with the same in it."""
    holder = take_epoch(tmp_path, "1", 0, "0")
    mark = tmp_path / ".attempt-000000001"
    assert mark.is_symlink()
    assert not mark.exists()
    assert msgspec.json.decode(str(mark.readlink()), type=Holder) == holder
    too_long_for_a_link = take_epoch(tmp_path, "j" * 5000, 1, "0")
    mark = tmp_path / ".attempt-000000002"
    assert not mark.is_symlink()
    assert msgspec.json.decode(mark.read_bytes(), type=Holder) == too_long_for_a_link


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_start_that_is_under_way_refuses_a_later_one(tmp_path: Path, kind: str) -> None:
    """A live process that has its mark but has not yet written DIR/attempt goes first."""
    (tmp_path / "other").mkdir()
    with other(tmp_path / "other", "1", 0, "0") as process:
        line_of(process)
        holder = msgspec.structs.replace(read_holder(tmp_path / "other"), epoch=1)  # type: ignore[type-var]
        mark = tmp_path / ".attempt-000000001"
        data = msgspec.json.encode(holder)
        mark.symlink_to(data.decode()) if kind == "link" else mark.write_bytes(data)
        with pytest.raises(HeldByOther, match=str(process.pid)):
            take_epoch(tmp_path, "2", 0, "0")
        assert not os.path.lexists(tmp_path / ".attempt-000000002")
    assert take_epoch(tmp_path, "2", 0, "0").epoch == 2


def test_a_mark_left_by_a_crash_is_passed(tmp_path: Path) -> None:
    """An empty mark of somebody who died while starting costs a bounded wait and nothing else."""
    take_epoch(tmp_path, "1", 0, "0")
    (tmp_path / ".attempt-000000002").write_bytes(b"")
    (tmp_path / ".attempt-000000002.new").write_bytes(b"{")
    assert take_epoch(tmp_path, "1", 1, "0").epoch == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attempt-000000003", "attempt"]


def test_a_directory_that_cannot_be_written_is_the_systems_own_error(tmp_path: Path) -> None:
    """A start in a directory that is not there raises the OSError, for the caller to put in words."""
    with pytest.raises(FileNotFoundError):
        take_epoch(tmp_path / "absent", "1", 0, "0")


def test_the_holder_is_plain_data() -> None:
    """A holder compares by value, so that two looks at the disk can be compared."""
    fields = (1, "1", 0, "0", "host", 2, 3)
    assert Holder(*fields) == Holder(*fields)


@contextmanager
def placed(directory: Path) -> Iterator[Place]:
    """The directory as a run has taken it."""
    place = Place(directory)
    try:
        yield place
    finally:
        place.close()


def test_a_directory_that_was_removed_under_its_holder_is_its_own_again(tmp_path: Path) -> None:
    """With the same epoch, so what its ranks have written meanwhile can be committed; the next start has a higher one."""
    place = tmp_path / "ckpt"
    place.mkdir()
    take_epoch(place, "77", 0, "0")
    held = take_epoch(place, "77", 1, "0")
    with placed(place) as taken:
        shutil.rmtree(place)
        place.mkdir()
        assert not check_epoch(place, held.epoch)
        assert retake_epoch(place, held.epoch, "77", 1, "0", taken)
    assert read_holder(place) == held
    assert check_epoch(place, held.epoch)
    assert take_epoch(place, "77", 2, "0").epoch == held.epoch + 1


@pytest.mark.parametrize("by", ["mark", "attempt", "unreadable"])
def test_a_directory_that_somebody_else_has_begun_in_meanwhile_is_theirs(tmp_path: Path, by: str) -> None:
    """Whole or half: their mark, their DIR/attempt, or one that cannot be read."""
    theirs = take_epoch(tmp_path, "88", 0, "0")
    if by == "mark":
        (tmp_path / "attempt").unlink()
    else:
        (tmp_path / ".attempt-000000001").unlink()
    if by == "unreadable":
        (tmp_path / "attempt").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    with placed(tmp_path) as taken:
        assert not retake_epoch(tmp_path, 7, "77", 0, "0", taken)
    assert sorted(tmp_path.iterdir()) == before
    assert check_epoch(tmp_path, theirs.epoch) == (by != "unreadable")


@pytest.mark.parametrize("way", ["moved", "pointed elsewhere", "lost to others", "emptied"])
def test_only_the_directory_itself_or_one_in_its_stead_is_taken_anew(tmp_path: Path, way: str) -> None:
    """Not where it was moved away, a link leads elsewhere, or others were found to hold it. Emptied, it is the same one."""
    real, path = tmp_path / "run1", tmp_path / "current"
    real.mkdir()
    path.symlink_to(real)
    with placed(path) as taken:
        if way == "moved":
            real.rename(tmp_path / "old")
            real.mkdir()
        elif way == "pointed elsewhere":
            (tmp_path / "run2").mkdir()
            shutil.rmtree(real)
            path.unlink()
            path.symlink_to(tmp_path / "run2")
        taken.is_lost = way == "lost to others"
        assert retake_epoch(path, 7, "77", 0, "0", taken) == (way == "emptied")
    assert bool([*path.iterdir()]) == (way == "emptied")


def test_a_mount_that_is_gone_or_on_top_is_not_the_directory(tmp_path: Path) -> None:
    """Bind mounts of one file system have one device number."""
    if os.geteuid() != 0:
        return  # Who may not mount has no such mount to lose.
    path, other_place = tmp_path / "ckpt", tmp_path / "other"
    path.mkdir()
    other_place.mkdir()
    with placed(path) as taken:
        if subprocess.run(["mount", "--bind", str(other_place), str(path)], check=False).returncode != 0:
            return  # A container without that right.
        try:
            assert not retake_epoch(path, 7, "77", 0, "0", taken)
        finally:
            subprocess.run(["umount", str(path)], check=True)
    assert not [*other_place.iterdir()]


def test_of_two_that_take_a_removed_directory_at_once_one_holds_it(tmp_path: Path) -> None:
    """A start that looked before the mark was made, and goes on after DIR/attempt was written, takes a higher epoch or none."""
    starts = [f"race{number}" for number in range(4)]
    for turn in range(10):
        place = tmp_path / str(turn)
        place.mkdir()
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(other(place, job, 0, "0")) for job in starts[: 1 + turn % 2]]
            for process in others:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            is_ours = retake_epoch(place, 7, "77", 0, "0", stack.enter_context(placed(place)))
            said = [line_of(process) for process in others]
            holds = [int(line) for line in said if line.isdigit()]
            assert [check_epoch(place, epoch) for epoch in ([7] if is_ours else []) + holds].count(True) == 1, said


@pytest.mark.parametrize(("cause", "is_retaken"), [("preempted", True), ("cancelled", False)])
def test_a_cancelled_job_takes_no_removed_directory_anew(tmp_path: Path, cause: str, is_retaken: bool) -> None:
    """Its directory was removed to make room for the next training. Others commit, and the reason says what has happened."""
    path = tmp_path / "ckpt"
    path.mkdir()
    held = take_epoch(path, "77", 0, "0")
    with placed(path) as taken:
        shutil.rmtree(path)
        path.mkdir()
        partial = make_partial(path, 5, held.epoch, 1)
        (partial / "state.pt").write_bytes(b"weights")
        _, entries = check_files(partial, [Expected("state.pt", 7, "", 0)], "full")
        save = Commit(1, str(partial), 5, 1, (0,), cause, "full")
        result, reason = disk.commit(path, Job("77", 0, "0", 0, None), held.epoch, save, entries, "", taken)
    assert (result is CommitResult.COMMITTED) == is_retaken, reason
    assert "was removed or emptied" in reason
    assert (path / "step-000000005").exists() == is_retaken
