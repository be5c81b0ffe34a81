"""Every moment of a save, a prune, a sweep, a start and a `latest`, with a power cut: the old or the new checkpoint, always.

The programs run once under strace. For each prefix of what they did tests/support/replay.py gives the states that a disk may hold
then; each one is made a real directory, and the store's own code looks at it, starts on it and sweeps it.
CKPT_TEST_STATES=N tries up to N states for each prefix in place of 1,000, CKPT_TEST_SEED=N draws others of them, and
CKPT_TEST_SECOND=N starts on so many of those that a cut save leaves, in place of 2.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    Verdict,
    make_partial,
    newest_intact,
    parse_damaged,
    parse_step,
    point_latest,
    remove,
    scan,
    step_name,
    sweep,
    take_epoch,
    trash_name,
    verify_checkpoint,
)
from ckpt_supervisor.store.layout import LATEST, LATEST_NEW, parse_claim

from tests.support import replay, store_saver, syscalls
from tests.support.store_saver import FILES, JOB, content
from tests.support.syscalls import Call

SECOND_CRASHES = int(os.environ.get("CKPT_TEST_SECOND", "2"))
STATES_MAX = int(os.environ.get("CKPT_TEST_STATES", "1000"))
SEED = int(os.environ.get("CKPT_TEST_SEED", "1"))
PROGRAM = Path(store_saver.__file__)
DAMAGED = b"half of it"
NO_LINKS = ("symlink,symlinkat:error=EOPNOTSUPP",)
MEMORY = Path("/dev/shm")

Tree = tuple[tuple[str, bytes | str | None], ...]


@dataclasses.dataclass(frozen=True)
class Story:
    """One program on one directory. `allowed`: by what it has been told, the step that has to be found, None for none."""

    program: str
    prepare: Callable[[Path], None]
    allowed: Callable[[list[str]], set[int | None]]
    latest: frozenset[str]
    damaged: bool = False
    inject: tuple[str, ...] = ()


def two(root: Path) -> None:
    """Steps 1 and 2, `latest` to the second."""
    epoch = take_epoch(root, JOB, 0, "0").epoch
    for step in (1, 2):
        store_saver.save(root, step, epoch)


def nothing(root: Path) -> None:
    """A directory that is new."""


def with_damaged(root: Path) -> None:
    """The same, with a damaged step 3 that nobody has ever had as `latest`."""
    two(root)
    (root / step_name(3)).mkdir()
    (root / step_name(3) / "state.pt").write_bytes(DAMAGED)


def with_intact(root: Path) -> None:
    """The same, with step 3 there already, whole."""
    two(root)
    store_saver.save(root, 3, 1)


def with_structure(root: Path) -> None:
    """Step 3 is committed on its structure alone."""
    two(root)
    store_saver.save(root, 3, 1, mode="structure")


def four(root: Path) -> None:
    """Steps 1 to 4."""
    two(root)
    for step in (3, 4):
        store_saver.save(root, step, 1)


def littered(root: Path) -> None:
    """Partial ones of two earlier starts, of the same step too, and half of a removed one."""
    two(root)
    store_saver.write(root, 3, 1)
    make_partial(root, 2, 1, 9)
    trash = root / trash_name(1, 1, 0)
    (trash / "below").mkdir(parents=True)
    (trash / "below" / "rank-00001.pt").write_bytes(b"left")


def behind(root: Path) -> None:
    """`latest` did not follow the last commit."""
    two(root)
    point_latest(root, step_name(1))


def new_once_committed(said: list[str]) -> set[int | None]:
    """Step 2 or 3 while the commit runs, and from its word on step 3."""
    return {3} if "committed" in said else {2, 3}


def named(*steps: int) -> frozenset[str]:
    """What `latest` may say."""
    return frozenset(step_name(step) for step in steps)


STORIES = {
    "save": Story("save", two, new_once_committed, named(2, 3)),
    "save, the first": Story("save", nothing, lambda said: {3} if "committed" in said else {None, 3}, named(3) | {""}),
    "save, a damaged one in the way": Story("save", with_damaged, new_once_committed, named(2, 3), damaged=True),
    "save, an intact one there": Story("save", with_intact, lambda _: {3}, named(3)),
    "save, no links": Story("save", two, new_once_committed, named(2, 3), inject=NO_LINKS),
    "promote": Story("promote", with_structure, lambda _: {3}, named(3)),
    "prune": Story("prune", four, lambda _: {4}, named(4)),
    "sweep": Story("sweep", littered, lambda _: {2}, named(2)),
    "latest": Story("latest", behind, lambda _: {2}, named(1, 2)),
    "latest, no links": Story("latest", behind, lambda _: {2}, named(1, 2), inject=NO_LINKS),
    "take": Story("take", two, lambda _: {2}, named(2)),
    "take, no links": Story("take", two, lambda _: {2}, named(2), inject=NO_LINKS),
}


@pytest.fixture(scope="session", autouse=True)
def strace() -> None:
    """strace is here, or the tests end here."""
    syscalls.need_strace()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory for thousands of short-lived states."""
    place = Path(tempfile.mkdtemp(prefix="states-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    yield place
    shutil.rmtree(place)


def recorded(story: Story, place: Path) -> tuple[replay.Replay, list[Call]]:
    """What is there before the program, and what it did."""
    root = place / "recorded"
    root.mkdir()
    story.prepare(root)
    before = replay.Replay(root)
    calls, _ = syscalls.run(PROGRAM, [story.program, root], place / "trace", inject=story.inject)
    return before, calls


def prefixes(disk: replay.Replay, calls: Iterable[Call]) -> Iterator[int]:
    """Follow the calls; stops after each that changed something."""
    yield 0
    moments = 0
    for call in calls:
        if disk.take(call):
            moments += 1
            yield moments


def tried(story: Story, disk: replay.Replay, calls: Iterable[Call], memory: Path) -> str:
    """Look at every state. The counts, in words. Raises AssertionError at the first state that is wrong."""
    dice = random.Random(SEED)
    done: set[tuple[Tree, frozenset[int | None], int]] = set()
    drawn = moments = 0
    for moments in prefixes(disk, calls):
        for state in (disk.live, *disk.states(STATES_MAX, dice)):
            drawn += 1
            allowed, epoch = frozenset(story.allowed(disk.said)), told(disk.said)
            tree = tuple(state.tree())
            if (tree, allowed, epoch) in done:
                continue
            done.add((tree, allowed, epoch))
            root = memory / "state"
            replay.put_down(tree, root)
            try:
                look(root, story, allowed, epoch)
            except AssertionError as error:
                raise AssertionError(f"after {moments} changes, {disk.said}: {error}\n{described(tree)}") from error
            shutil.rmtree(root)
    return f"{moments} changes, {drawn} states, {len(done)} of them different"


def told(said: list[str]) -> int:
    """The highest epoch that the program was given."""
    return max((int(word.removeprefix("epoch/")) for word in said if word.startswith("epoch/")), default=0)


def described(tree: Tree) -> str:
    """A state as text."""
    return "\n".join(f"  {name} {'/' if what is None else repr(what[:40])}" for name, what in tree)


def look(root: Path, story: Story, allowed: frozenset[int | None], epoch: int) -> None:
    """What has to hold in every state, and after a start and its sweep."""
    step = chosen(root, story)
    assert step in allowed, f"{step} is found, not one of {set(allowed)}"
    latest = pointed_to(root)
    assert latest in story.latest, f"latest says {latest!r}"
    assert not latest or verify_checkpoint(root / latest).verdict is Verdict.INTACT, f"latest says {latest}"
    holder = take_epoch(root, JOB, 2, "0")
    assert holder.epoch > epoch, f"epoch {holder.epoch} is given twice"
    assert sweep(root, holder.epoch).problems == ()
    left = [path.name for path in root.iterdir() if not may_stay(path.name, holder.epoch)]
    assert left == [], "something stays after the sweep"
    assert chosen(root, story) == step, "another one after the sweep"


def chosen(root: Path, story: Story) -> int | None:
    """The step that a start would resume from. Only what was damaged before may be seen damaged, and that is not lost."""
    damaged = [root / path.name for path in root.iterdir() if parse_damaged(path.name) is not None]
    choice = newest_intact(root, threads=1)
    assert not choice.unknown, choice.reason
    damaged += [candidate.path for candidate, _ in choice.passed_over]
    assert len(damaged) == story.damaged, [(candidate.path.name, report.reason) for candidate, report in choice.passed_over]
    for path in damaged:
        assert (path / "state.pt").read_bytes() == DAMAGED
        assert [below.name for below in path.iterdir()] == ["state.pt"]
    for candidate in scan(root):
        assert candidate.path in damaged or verify_checkpoint(candidate.path, threads=1).verdict is Verdict.INTACT, candidate
    if choice.chosen is None:
        return None
    for name in FILES:
        assert (choice.chosen.path / name).read_bytes() == content(choice.chosen.step, name), f"{name} is of another step"
    return choice.chosen.step


def pointed_to(root: Path) -> str:
    """What DIR/latest says, as a link or as a file; "" if there is none."""
    path = root / LATEST
    if path.is_symlink():
        return str(path.readlink())
    if not path.exists():
        return ""
    text = path.read_text()
    assert text.endswith("\n"), f"latest holds {text!r}"
    return text.removesuffix("\n")


def may_stay(name: str, epoch: int) -> bool:
    """Whether this name may be there after a sweep. `.latest-new` is one fixed name, which the next commit takes."""
    known = parse_step(name) is not None or parse_damaged(name) is not None or parse_claim(name) == epoch
    return known or name in (LATEST, LATEST_NEW, "attempt")


@pytest.mark.parametrize("name", STORIES)
def test_after_a_power_cut_at_any_moment_there_is_the_old_or_the_new(tmp_path: Path, memory: Path, name: str) -> None:
    """Unsynced writes lost, torn and out of order, names too; no lock, hard link or shared map is used (field cases 84, 114)."""
    story = STORIES[name]
    disk, calls = recorded(story, tmp_path)
    counts = tried(story, disk, calls, memory)
    print(f"{name}: {counts}, at most {STATES_MAX} for each, seed {SEED}")
    assert disk.locks == []
    real = tmp_path / "recorded"
    assert [path for path, _ in disk.live.tree()] == sorted_tree(real), "the model is not where the program was"


@pytest.mark.timeout(900)
def test_a_second_power_cut_in_the_start_after_the_first_changes_nothing(tmp_path: Path, memory: Path) -> None:
    """Out of states that a cut save leaves, some are started on, swept and saved on, with a power cut at any moment again."""
    disk, calls = recorded(STORIES["save, a damaged one in the way"], tmp_path)
    dice = random.Random(SEED)
    left = {tuple(state.tree()) for _ in prefixes(disk, calls) for state in disk.states(STATES_MAX, dice)}
    for number, tree in enumerate(dice.sample(sorted(left, key=repr), SECOND_CRASHES)):

        def prepare(root: Path, tree: Tree = tree) -> None:
            replay.put_down(tree, root)

        place = tmp_path / f"second-{number}"
        place.mkdir()
        has_third = any(name.endswith("/manifest.json") and name.startswith(step_name(3)) for name, _ in tree)
        allowed = (lambda _: {3}) if has_third else new_once_committed
        story = Story("save", prepare, allowed, named(2, 3), damaged=True)
        print(f"{number}: {tried(story, *recorded(story, place), memory)}")


def sorted_tree(root: Path) -> list[str]:
    """Every path below, parents first, in the model's order."""

    def below(directory: Path) -> Iterator[str]:
        for path in sorted(directory.iterdir()):
            yield str(path.relative_to(root))
            if path.is_dir() and not path.is_symlink():
                yield from below(path)

    return list(below(root))


def is_sync(call: Call, ending: str) -> bool:
    """Whether this is an fsync of something whose path ends so."""
    return call.name == "fsync" and call.text(0).endswith(ending)


def without(calls: list[Call], ending: str, since: str = "") -> list[Call]:
    """As if these had not been synced once `since` had been renamed to."""
    first = next((at for at, call in enumerate(calls) if call.name == "rename" and since in call.text(1)), 0) if since else 0
    return [call for at, call in enumerate(calls) if at < first or not is_sync(call, ending)]


def aside_not_synced(calls: list[Call]) -> list[Call]:
    """As if the damaged one's new name were not on the disk before its old one is taken."""
    aside = next(at for at, call in enumerate(calls) if call.name == "rename" and ".damaged-" in call.text(1))
    sync = next(at for at in range(aside, len(calls)) if is_sync(calls[at], "/recorded"))
    return [*calls[:sync], *calls[sync + 1 :]]


def promoted_not_synced(calls: list[Call]) -> list[Call]:
    """As if the new manifest were renamed before its bytes are on the disk."""
    return [call for call in calls if not (call.name == "fsync" and ".trash-" in call.text(0))]


def renamed_first(calls: list[Call]) -> list[Call]:
    """As if the name were taken before anything is synced, and the files synced under their new name."""
    rename = next(call for call in calls if call.name == "rename" and call.text(1).endswith(step_name(3)))
    old, new = rename.text(0), rename.text(1)
    first = next(at for at, call in enumerate(calls) if call.name == "fsync" and call.text(0).startswith(old))
    rest = [call for call in calls[first:] if call is not rename]
    moved = [Call(call.name, tuple(word.replace(old, new) for word in call.arguments), *call[2:]) for call in rest]
    return [*calls[:first], rename, *moved]


def in_place(calls: list[Call]) -> list[Call]:
    """As if a pruned one were not renamed first."""
    changed, names = [], {}
    for call in calls:
        if call.name == "rename" and ".trash-" in call.text(1):
            names[call.text(1)] = call.text(0)
            continue
        words = call.arguments
        for trash, name in names.items():
            words = tuple(word.replace(trash, name) for word in words)
        changed.append(Call(call.name, words, *call[2:]))
    return changed


def unlink_then_link(calls: list[Call]) -> list[Call]:
    """As if `latest` were removed and made anew (field case 95)."""
    changed = []
    for call in calls:
        if call.name == "symlink" and call.text(1).endswith(LATEST_NEW):
            latest = call.arguments[1].replace(LATEST_NEW, LATEST)
            changed += [Call("unlink", (latest,), "0", "", False), Call("symlink", (call.arguments[0], latest), *call[2:])]
        elif not (call.name == "rename" and call.text(0).endswith(LATEST_NEW)):
            changed.append(call)
    return changed


def pointer_first(calls: list[Call]) -> list[Call]:
    """As if `latest` were moved before the checkpoint has its name (field case 97)."""
    pointer = [call for call in calls if call.name in ("symlink", "rename") and LATEST_NEW in " ".join(call.arguments)]
    rename = next(at for at, call in enumerate(calls) if call.name == "rename" and call.text(1).endswith(step_name(3)))
    return [*calls[:rename], *pointer, *(call for call in calls[rename:] if call not in pointer)]


FAULTS: dict[str, tuple[str, Callable[[list[Call]], list[Call]]]] = {
    "no fsync of a file": ("save", lambda calls: without(calls, "/state.pt")),
    "no fsync of the manifest": ("save", lambda calls: without(calls, "/manifest.json")),
    "no fsync of the partial directory": ("save", lambda calls: without(calls, "-2-1")),
    "no fsync of a directory below": ("save", lambda calls: without(calls, "/below")),
    "no fsync of DIR": ("save", lambda calls: without(calls, "/recorded", since=step_name(3))),
    "renamed before the fsync": ("save", renamed_first),
    "put aside, DIR not synced": ("save, a damaged one in the way", aside_not_synced),
    "latest before the name": ("save", pointer_first),
    "latest removed, then made": ("latest", unlink_then_link),
    "the pointer file not synced": ("latest, no links", lambda calls: without(calls, LATEST_NEW)),
    "the new manifest not synced": ("promote", promoted_not_synced),
    "pruned in place": ("prune", in_place),
    "pruned, DIR not synced": ("prune", lambda calls: without(calls, "/recorded")),
    "a start that syncs nothing": ("take", lambda calls: without(calls, "/recorded")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(tmp_path: Path, memory: Path, fault: str) -> None:
    """With one fsync left out, or one change made earlier, at least one of the states is wrong: the model can tell."""
    name, planted = FAULTS[fault]
    story = STORIES[name]
    disk, calls = recorded(story, tmp_path)
    changed = planted(calls)
    assert changed != calls, "nothing was planted"
    with pytest.raises(AssertionError) as seen:
        tried(story, disk, changed, memory)
    print(f"{fault}: {str(seen.value).splitlines()[0]}")
    assert str(seen.value).startswith("after "), seen.value


def test_a_disk_that_lost_two_saves_gives_the_third(tmp_path: Path) -> None:
    """The newest two hold empty files and `latest` is gone: the third newest is taken, with two lines (field case 74)."""
    four(tmp_path)
    (tmp_path / LATEST).unlink()
    for step in (3, 4):
        for name in FILES:
            os.truncate(tmp_path / step_name(step) / name, 0)
    choice = newest_intact(tmp_path)
    assert choice.chosen is not None
    assert choice.chosen.step == 2
    assert [report.verdict for _, report in choice.passed_over] == [Verdict.TRUNCATED] * 2
    for candidate in scan(tmp_path)[2:]:
        assert remove(candidate).problems == ()
