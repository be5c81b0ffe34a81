"""`--keep` over several starts: a run that is only ever interrupted does not prune in its grace, and must not fill the disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

from ckpt_supervisor import store

from tests.support.lasting import lasting, let_go
from tests.support.run import committed, eventually, trained

FOREVER = ("--steps", 1_000_000)


def test_checkpoints_of_interrupted_starts_are_pruned_at_the_next_start(tmp_path: Path) -> None:
    """After five interruptions without a periodic save there are `--keep` checkpoints and at most the newest one beside them."""
    steps: list[int] = []
    for _ in range(5):
        with trained(tmp_path, *FOREVER, options=["--keep", 2]) as run:
            run.reached((steps[-1] if steps else 0) + 3)
            if len(steps) > 2:
                removed = run.event("pruned")["removed"]
                assert removed == [f"step-{steps[-3]:09d}"]
            run.signal(signal.SIGTERM)
            assert run.code() == 75, run.story()
            steps.append(run.event("commit")["step"])
            assert run.intact() == steps[-3:]


def cloned(place: Path, steps: range, files: int) -> None:
    """Many old checkpoints in no time: the first one with other steps, each with so many more files."""
    first = committed(place, steps[0])
    manifest = store.read_manifest(first)
    more = tuple(store.FileEntry(f"part-{number:03d}", 1, "0" * 32, 0) for number in range(files))
    for step in steps:
        path = place / store.step_name(step)
        if path != first:
            shutil.copytree(first, path)
        for entry in more:
            (path / entry.path).write_bytes(b"x")
        data = store.encode_manifest(store.Manifest(**{
            **{name: getattr(manifest, name) for name in manifest.__struct_fields__}, "step": step,
            "files": (*(entry for entry in manifest.files if entry.path.startswith("toy")), *more),
        }))  # fmt: skip
        (path / store.MANIFEST).write_bytes(data)


def files_below(place: Path) -> int:
    """Files of old checkpoints, whole or on their way out."""
    return sum(len(names) for path, _, names in os.walk(place) if "part-000" in names or ".trash" in path)


def test_milestones_and_marked_ones_stay_over_all_starts(tmp_path: Path) -> None:
    """`--keep-every 20` and `ckptctl keep 10`: neither counts for `--keep 1`, and both are there at the end."""
    options = ["--every-steps", 10, "--keep", 1, "--keep-every", 20]
    with trained(tmp_path, "--steps", 15, options=options) as run:
        assert run.code() == 0, run.story()
        assert run.steps() == [10]
        assert store.set_kept(run.dir, 10, on=True) == ""
    with lasting(tmp_path, "--steps", 75, options=options) as run:
        assert let_go(run, lambda: run.steps() == [10, 20, 40, 60, 70], "all others are pruned") == 0, run.story()
        assert run.intact() == [10, 20, 40, 60, 70]
        assert store.set_kept(run.dir, 10, on=False) == ""
    with lasting(tmp_path, "--steps", 95, options=options) as run:
        assert let_go(run, lambda: run.steps() == [20, 40, 60, 70, 80, 90], "all others are pruned") == 0, run.story()
        assert run.intact() == [20, 40, 60, 70, 80, 90], "70 is the one that this start came from"


def test_many_old_ones_are_not_removed_while_a_save_runs(tmp_path: Path) -> None:
    """Pruning begins at the start, stops between two files when a save begins, and goes on when that is over."""
    place = tmp_path / "ckpt"
    cloned(place, range(1, 300), files=20)  # Pruning them takes seconds: whoever looks may be held up.
    committed(place, 1000)
    with trained(tmp_path, *FOREVER, "--save-ms", 4_000, options=["--keep", 1]) as run:
        run.reached(1001)
        eventually(lambda: len(list(place.glob("step-*"))) < 296, "pruning has begun", look_s=0.001)
        run.signal(signal.SIGUSR2)
        run.said(r"^saving \d+ ")
        there = files_below(place)
        assert there > 40, "nothing is left to prune: the test says nothing"
        looks = [there]
        while not re.search(r"^saved \d+ ", run.out, re.MULTILINE):
            looks.append(files_below(place))
        # The last look may have ended after the save did.
        assert len(looks) > 5, "the save was over at once"
        assert there - min(looks[:-1]) <= 1, "at most the one that was being removed"
        step = run.event("commit")["step"]
        eventually(lambda: len(list(place.glob("step-*"))) == 2, "the rest is removed")
        assert run.intact() == [1000, step]
        run.signal(signal.SIGTERM)
        assert run.code() == 75, run.story()
