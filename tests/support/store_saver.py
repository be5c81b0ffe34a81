"""Small programs that use the store as a coordinator does, for tests that record, kill or disturb them.

Owns: what is saved, and the order in which take, write, check, commit, prune and sweep are done. `store_saver.py PROGRAM DIR`
runs one of PROGRAMS and says, among its own system calls, what it was told: `epoch/4`, `committed`.
Must not: look at what comes out; tests do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from ckpt_client.files import DigestWriter, write_file
from ckpt_supervisor.store import (
    Committed,
    Expected,
    Manifest,
    Mode,
    Outcome,
    Verdict,
    check_files,
    commit,
    encode_manifest,
    make_partial,
    newest_intact,
    partial_name,
    promote,
    remove,
    scan,
    sweep,
    take_epoch,
    update_latest,
)

from tests.support.syscalls import say

FILES = ("state.pt", "below/rank-00001.pt")
PART_BYTES = 700
JOB = "1"


def content(step: int, name: str, part_bytes: int = PART_BYTES) -> bytes:
    """The bytes of one file: another step's have the same length and are different."""
    return (f"{step:09d} {name} ".encode() * part_bytes)[:part_bytes]


def write(
    root: Path, step: int, epoch: int, round_: int = 1, mode: Mode = "full", part_bytes: int = PART_BYTES
) -> tuple[Path, Manifest]:
    """A partial directory, written by the client's own code in two parts a file and checked; its manifest. Raises OSError."""
    partial = make_partial(root, step, epoch, round_)
    wanted = []
    for rank, name in enumerate(FILES):
        data = content(step, name, part_bytes)
        (partial / name).parent.mkdir(exist_ok=True)

        def fill(writer: DigestWriter, data: bytes = data) -> None:
            writer.write(data[: len(data) // 2])
            writer.write(data[len(data) // 2 :])

        saved = write_file(partial, name, fill, durable=False)
        wanted.append(Expected(name, saved.size_bytes, saved.xxh3_128, rank))
    report, entries = check_files(partial, wanted, mode, threads=1)
    if report.verdict is not Verdict.INTACT:
        raise OSError(report.reason)
    if mode == "structure":  # as of an own save, whose digests nobody knows
        entries = tuple(type(entry)(entry.path, entry.bytes, "", entry.rank) for entry in entries)
    manifest = Manifest(
        step=step, world_size=len(FILES), ranks=tuple(range(len(FILES))), job=JOB, attempt=0, epoch=epoch, cause="periodic",
        created_at="", verified=mode, files=entries,
    )  # fmt: skip
    return partial, manifest


def save(root: Path, step: int, epoch: int, round_: int = 1, mode: Mode = "full") -> Outcome:
    """Write and commit one checkpoint."""
    return commit(root, *write(root, step, epoch, round_, mode))


def begin(root: Path) -> int:
    """Take the directory."""
    epoch = take_epoch(root, JOB, 1, "0").epoch
    say(f"epoch/{epoch}")
    return epoch


def save_one(root: Path) -> None:
    """A start, its sweep, and a save of step 3."""
    epoch = begin(root)
    sweep(root, epoch)
    save(root, 3, epoch)
    say("committed")


def promote_newest(root: Path) -> None:
    """A start that reads what was committed on its structure alone."""
    epoch = begin(root)
    chosen = newest_intact(root, threads=1).chosen
    assert chosen is not None
    problem = promote(root, chosen, epoch, threads=1)
    assert problem == "", problem
    say("promoted")


def prune_two(root: Path) -> None:
    """Remove the two oldest ones."""
    for candidate in scan(root)[-2:]:
        removed = remove(candidate)
        assert removed.problems == (), removed
        say(f"removed/{candidate.step}")


def sweep_all(root: Path) -> None:
    """A start, and the sweep of what earlier ones left."""
    removed = sweep(root, begin(root))
    assert removed.problems == (), removed
    say("swept")


def point(root: Path) -> None:
    """DIR/latest alone."""
    problem = update_latest(root)
    assert problem == "", problem


def take(root: Path) -> None:
    """Two starts one after the other."""
    begin(root)
    begin(root)


def commit_and_tell(root: Path) -> None:
    """A save of step 3 by the holder there is; what came of it goes to stdout."""
    outcome = save(root, 3, int(sys.argv[3]), round_=os.getpid())
    print(type(outcome).__name__, outcome.latest_problem if isinstance(outcome, Committed) else outcome, sep="|")


def take_and_tell(root: Path) -> None:
    """A start; what kept it from having the directory goes to stdout."""
    try:
        print(type(take_epoch(root, "another", 0, "0")).__name__, "", sep="|")
    except OSError as error:
        print("OSError", error.strerror, sep="|")


def keep_for_later(root: Path, manifest: Manifest) -> None:
    """For the program `late`."""
    (root.parent / "manifest-for-later").write_bytes(encode_manifest(manifest))


def late(root: Path) -> None:
    """Commit what was written and kept for later; what came of it goes to stdout."""
    manifest = msgspec.json.decode((root.parent / "manifest-for-later").read_bytes(), type=Manifest)
    outcome = commit(root, partial_name(3, manifest.epoch, 1), manifest)
    print(type(outcome).__name__, outcome.latest_problem if isinstance(outcome, Committed) else outcome, sep="|")


def choose(root: Path) -> None:
    """A look; what is chosen, what was passed over, and whether something could not be looked at, go to stdout."""
    choice = newest_intact(root, threads=1)
    step = -1 if choice.chosen is None else choice.chosen.step
    print(step, [report.verdict.value for _, report in choice.passed_over], choice.unknown, choice.reason, sep="|")


def prune_and_tell(root: Path) -> None:
    """Remove the oldest one; what could not be removed goes to stdout."""
    removed = remove(scan(root)[-1])
    print(removed.names, removed.problems, sep="|")


def race(root: Path) -> None:
    """So many rounds in which four processes commit one step at the same instant; a line of four words for each."""
    epoch, rounds = int(sys.argv[3]), int(sys.argv[4])
    for step in range(10, 10 + rounds):
        ready, go = os.pipe()
        told, tell = os.pipe()
        pids = []
        for rank in range(4):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(go)
                prepared = write(root, step, epoch, round_=rank)
                os.write(tell, b".")
                os.read(ready, 1)  # ends when the parent lets go
                outcome = commit(root, *prepared)
                os.write(tell, f"{type(outcome).__name__}:{getattr(outcome, 'latest_problem', '')} ".encode())
                os._exit(0)
        os.close(ready)
        for _ in pids:
            os.read(told, 1)
        os.close(go)
        ended = [os.waitpid(pid, 0)[1] for pid in pids]
        print(os.read(told, 4096).decode(), ended, sep="|")
        os.close(told)
        os.close(tell)


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "save": save_one,
    "promote": promote_newest,
    "prune": prune_two,
    "sweep": sweep_all,
    "latest": point,
    "take": take,
    "take_and_tell": take_and_tell,
    "commit": commit_and_tell,
    "late": late,
    "choose": choose,
    "remove": prune_and_tell,
    "race": race,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
