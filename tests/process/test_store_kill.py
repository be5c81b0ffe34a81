"""SIGKILL at random moments of saving, verifying, committing, promoting and pruning: the newest committed one is found whole.

The file is also the program that is killed: `python test_store_kill.py DIR LEDGER WAY` forks one saver for each line that
it reads, so that a round costs milliseconds and not the start of an interpreter. A saver works the way a coordinator
does: takes the epoch, picks the newest intact one and reads it in full if nobody has, sweeps, and then saves, commits and
prunes in a loop, some of its saves on their structure alone. What it has committed it writes to the ledger only after
`commit` has said so. In the way `room` it also makes room beforehand, so that one whole one has to do.
CKPT_TEST_KILLS=N kills N times in place of 120.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    Committed,
    Expected,
    Manifest,
    Mode,
    Verdict,
    check_files,
    commit,
    make_partial,
    newest_intact,
    parse_damaged,
    parse_partial,
    parse_trash,
    promote,
    remove,
    scan,
    sweep,
    take_epoch,
    to_make_room,
    to_prune,
    verify_checkpoint,
)

KILLS = int(os.environ.get("CKPT_TEST_KILLS", "120"))
KEEP = 2
FILES = 4
NAMES_MAX = 40
BYTES_MAX = 1_000_000
"""About six checkpoints: those that are kept, the one resumed from, a partial one and what is on its way out."""

STRUCTURE_EVERY = 3
ROOM_EVERY = 4
TURNS = 4
"""A saver is killed within the time that it takes for so many turns on this machine (50 to 100 ms on a local disk)."""
SPAN_S_MAX = 0.25


def content(step: int, part: int) -> bytes:
    """The bytes of one file: another step's have the same length and are different."""
    return b"%012d %d " % (step, part) * (500 * (part + 1))


def save_on(root: Path, ledger: int, makes_room: bool) -> None:
    """One attempt, until it is killed."""
    epoch = take_epoch(root, "1", os.getpid(), "0").epoch
    step = first = read_newest(root, epoch)
    assert sweep(root, epoch).problems == ()
    while True:
        step += 1
        if makes_room and step % ROOM_EVERY == 0:
            for old in to_make_room(scan(root), 1, (first,)):
                assert remove(old).problems == ()
        partial = make_partial(root, step, epoch, step)
        for part in range(FILES):
            (partial / f"part-{part}").write_bytes(content(step, part))
        words = [Expected(f"part-{part}", len(content(step, part)), "", part) for part in range(FILES)]
        mode: Mode = "full" if step % STRUCTURE_EVERY else "structure"
        report, entries = check_files(partial, words, mode)
        assert report.verdict is Verdict.INTACT, report
        manifest = Manifest(
            step=step, world_size=FILES, ranks=tuple(range(FILES)), job="1", attempt=0, epoch=epoch, cause="periodic",
            created_at="", verified=mode, files=entries,
        )  # fmt: skip
        outcome = commit(root, partial, manifest)
        assert isinstance(outcome, Committed), outcome
        os.write(ledger, b"%d\n" % step)
        if mode == "structure":
            assert read_newest(root, epoch) == step
        for old in to_prune(scan(root), KEEP, (first,)):
            removed = remove(old)
            assert not removed.problems, removed


def read_newest(root: Path, epoch: int) -> int:
    """The newest intact one's step, 0 for none; marked as read in full, as a start does."""
    chosen = newest_intact(root).chosen
    if chosen is None:
        return 0
    if chosen.manifest is not None and chosen.manifest.verified == "structure":
        problem = promote(root, chosen, epoch)
        assert problem == "", problem
    return chosen.step


def serve(root: Path, ledger_path: Path, makes_room: bool) -> None:
    """Fork a saver for each line; say its pid, and "ended" when it is gone."""
    ledger = os.open(ledger_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            save_on(root, ledger, makes_room)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


@contextlib.contextmanager
def forking(root: Path, ledger: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    """The process that forks savers."""
    command = [sys.executable, __file__, str(root), str(ledger), way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process


def start(server: subprocess.Popen[str]) -> int:
    """Start one saver and give its pid."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("go\n")
    return int(server.stdout.readline())


def kill(server: subprocess.Popen[str], pid: int, after_s: float) -> None:
    """Kill a saver after that time; it must not have ended by itself."""
    assert server.stdout is not None
    ended_by_itself, _, _ = select.select([server.stdout], [], [], after_s)
    assert not ended_by_itself, "the saver met an error of its own, see its output"
    os.kill(pid, signal.SIGKILL)
    assert server.stdout.readline() == f"ended {-signal.SIGKILL}\n"


def run_in_peace(server: subprocess.Popen[str], ledger: Path) -> float:
    """Kill a saver only after its start and its first turns; how long they took."""
    said = len(ledger.read_text().split())
    began = time.monotonic()
    pid = start(server)
    while len(ledger.read_text().split()) < said + TURNS and time.monotonic() < began + 30:
        select.select([server.stdout], [], [], 0.002)
    span_s = time.monotonic() - began
    kill(server, pid, 0)
    assert span_s < 30, "a saver makes no progress"
    return span_s


def check(root: Path, committed: set[int], newest: int, keep: int) -> int:
    """What must hold after any kill. `committed`: by the ledger so far; `newest`: the highest. Gives the one chosen."""
    choice = newest_intact(root)
    if choice.chosen is None:
        assert not committed
        return 0
    assert choice.passed_over == (), "a committed one was refused"
    step = choice.chosen.step
    assert step in (newest, newest + 1), "neither the last committed one nor the one being committed"
    for part in range(FILES):
        assert (choice.chosen.path / f"part-{part}").read_bytes() == content(step, part)
    whole = [candidate.step for candidate in scan(root) if verify_checkpoint(candidate.path).verdict is Verdict.INTACT]
    assert len(whole) == len(scan(root)), "a damaged one under a committed name"
    assert len(whole) >= min(keep, len(committed)), "fewer whole ones than are kept"
    assert not [path.name for path in root.iterdir() if parse_damaged(path.name) is not None]
    return step


def check_growth(root: Path) -> None:
    """Whatever was killed when: few names, few bytes."""
    names = [path.name for path in root.iterdir()]
    assert len(names) <= NAMES_MAX, sorted(names)
    total = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())
    assert total <= BYTES_MAX, f"{total} bytes in {sorted(names)}"


def check_tidy(root: Path) -> None:
    """What must hold once a saver has had its time: little more than what is kept, and its own loose ends."""
    hidden = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert len([name for name in hidden if parse_partial(name) is not None]) <= 1
    assert len([name for name in hidden if parse_trash(name) is not None]) <= 1
    assert len(scan(root)) <= KEEP + 2
    assert len([name for name in hidden if name.startswith(".attempt-")]) == 1, sorted(hidden)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["prune", "room"])
def test_a_kill_at_any_moment_leaves_the_newest_committed_one(tmp_path: Path, way: str) -> None:
    """After each of 200 kills the newest committed one is whole and chosen, no partial one is, and nothing grows (row 13)."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    root, ledger = tmp_path / "checkpoints", tmp_path / "ledger"
    root.mkdir()
    ledger.touch()
    seen = {"a partial": 0, "trash": 0, "unsaid": 0}
    began = time.monotonic()
    kills = KILLS // 2
    with forking(root, ledger, way) as server:
        span_s = min(run_in_peace(server, ledger), SPAN_S_MAX)
        for _ in range(kills):
            kill(server, start(server), moments.uniform(0, span_s))
            committed = {int(line) for line in ledger.read_text().split()}
            newest = max(committed, default=0)
            chosen = check(root, committed, newest, KEEP if way == "prune" else 1)
            check_growth(root)
            names = [path.name for path in root.iterdir()]
            seen["a partial"] += any(parse_partial(name) is not None for name in names)
            seen["trash"] += any(parse_trash(name) is not None for name in names)
            seen["unsaid"] += chosen > newest
            if chosen > newest:  # committed, and killed before it could say so: from now on it counts
                with ledger.open("a") as file:
                    file.write(f"{chosen}\n")
        run_in_peace(server, ledger)
        check_tidy(root)
    took_s = time.monotonic() - began
    print(f"{way}: {kills} kills within {span_s:.3f} s, {newest} checkpoints, {took_s:.1f} s, left behind: {seen}")
    assert newest > kills / 10, "the savers were killed before they could do anything"
    assert seen["a partial"] > kills / 10, "no save was ever interrupted"


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "room")
