"""The newest intact checkpoint is found whatever lies around it, and what was passed over is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckpt_supervisor.store import (
    Choice,
    Committed,
    Expected,
    Manifest,
    Mode,
    Verdict,
    check_files,
    commit,
    make_partial,
    newest_intact,
    scan,
    step_name,
    take_epoch,
    update_latest,
)


def committed(root: Path, step: int, mode: Mode = "full") -> Path:
    """A committed checkpoint of this step."""
    epoch = take_epoch(root, "1", 0, "0").epoch
    partial = make_partial(root, step, epoch, 1)
    files = {"model": f"model of {step:6d}".encode(), "optimizer": f"optimizer of {step:6d}".encode()}
    for path, data in files.items():
        (partial / path).write_bytes(data)
    report, entries = check_files(partial, [Expected(path, len(data), "", 0) for path, data in files.items()], mode)
    manifest = Manifest(
        step=step, world_size=1, ranks=(0,), job="1", attempt=0, epoch=epoch, cause="test", created_at="",
        verified=mode, files=entries,
    )  # fmt: skip
    outcome = commit(root, partial, manifest)
    assert isinstance(outcome, Committed), (report, outcome)
    return outcome.path


def step_of(choice: Choice) -> int | None:
    """The chosen step."""
    return None if choice.chosen is None else choice.chosen.step


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    """Whatever the order of writing and of text, the highest step is the newest (field case 89)."""
    for step in (999, 1000, 99, 10_000, 1_000_000_000, 999_999_999):
        committed(tmp_path, step)
    assert [candidate.step for candidate in scan(tmp_path)] == [1_000_000_000, 999_999_999, 10_000, 1000, 999, 99]
    assert step_of(newest_intact(tmp_path)) == 1_000_000_000


def test_names_that_are_not_ours_are_not_candidates(tmp_path: Path) -> None:
    """Directories of people and of other programs are neither chosen nor even looked at (field case 90)."""
    committed(tmp_path, 5)
    for name in ("100000", "0900000", "handpicked", "step_12.bak", "step_-1", "step_1e5", "step-12", "best", "zzz"):
        (tmp_path / name).mkdir()
    make_partial(tmp_path, 900, 9, 1)
    assert [candidate.step for candidate in scan(tmp_path)] == [5]


def test_times_do_not_matter(tmp_path: Path) -> None:
    """Equal, reversed and future modification times change nothing (field case 91)."""
    paths = [committed(tmp_path, step) for step in (1, 2, 3)]
    for stamps in ((5, 5, 5), (30, 20, 10), (10, 4_000_000_000, 10)):
        for path, stamp in zip(paths, stamps, strict=True):
            os.utime(path, (stamp, stamp))
            os.utime(path / "manifest.json", (stamp, stamp))
        assert step_of(newest_intact(tmp_path)) == 3


def test_damaged_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    """With two damaged newest ones the third is chosen, with one line each that says why; nothing is deleted."""
    for step in (100, 200, 300, 400):
        committed(tmp_path, step)
    (tmp_path / step_name(400) / "model").write_bytes(b"")
    (tmp_path / step_name(300) / "model").write_bytes(b"model of    299")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    choice = newest_intact(tmp_path)
    assert step_of(choice) == 200
    assert [(candidate.step, report.verdict) for candidate, report in choice.passed_over] == [
        (400, Verdict.TRUNCATED), (300, Verdict.CORRUPT),
    ]  # fmt: skip
    assert all("model" in report.reason for _, report in choice.passed_over)
    assert (choice.unknown, choice.reason) == (False, "")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_power_cut_leaves_the_third(tmp_path: Path) -> None:
    """The two newest of zero size and latest gone still resume from the third (field case 74)."""
    for step in (1, 2, 3):
        committed(tmp_path, step)
    (tmp_path / "latest").unlink()
    for step in (2, 3):
        for path in (tmp_path / step_name(step)).iterdir():
            os.truncate(path, 0)
    choice = newest_intact(tmp_path)
    assert step_of(choice) == 1
    assert [report.verdict for _, report in choice.passed_over] == [Verdict.TRUNCATED] * 2


def test_only_damaged_ones_is_not_the_same_as_none(tmp_path: Path) -> None:
    """Nothing intact while something is there is told apart from an empty directory (field case 82)."""
    assert newest_intact(tmp_path / "absent") == Choice(None, (), unknown=False)
    assert newest_intact(tmp_path) == Choice(None, (), unknown=False)
    committed(tmp_path, 7)
    (tmp_path / step_name(7) / "model").unlink()
    choice = newest_intact(tmp_path)
    assert choice.chosen is None
    assert [report.verdict for _, report in choice.passed_over] == [Verdict.MISSING]


@pytest.mark.parametrize("how", ["missing", "dangling", "damaged", "older", "file"])
def test_latest_is_never_the_source_of_truth(tmp_path: Path, how: str) -> None:
    """With latest gone, dangling, or naming a damaged or an older one, the scan decides (field case 95)."""
    for step in (1, 2, 3):
        committed(tmp_path, step)
    (tmp_path / "latest").unlink()
    if how == "dangling":
        (tmp_path / "latest").symlink_to("step-000000009")
    elif how == "damaged":
        (tmp_path / "latest").symlink_to(step_name(3))
        (tmp_path / step_name(3) / "model").write_bytes(b"")
    elif how == "older":
        (tmp_path / "latest").symlink_to(step_name(1))
    elif how == "file":
        (tmp_path / "latest").write_text("step-000000001")
    right = 2 if how == "damaged" else 3
    assert step_of(newest_intact(tmp_path)) == right
    assert update_latest(tmp_path) == ""
    assert str((tmp_path / "latest").readlink()) == step_name(right)


def test_one_committed_on_structure_is_read_in_full(tmp_path: Path) -> None:
    """In mode structure a fully verified one is believed by its size, one verified on structure is read."""
    committed(tmp_path, 1)
    committed(tmp_path, 2, "structure")
    choice = newest_intact(tmp_path, "structure")
    assert step_of(choice) == 2
    (tmp_path / step_name(1) / "model").write_bytes(b"model of   9999")
    assert step_of(newest_intact(tmp_path, "structure")) == 2
    (tmp_path / step_name(2) / "manifest.json").unlink()
    assert step_of(newest_intact(tmp_path, "structure")) == 1
    assert step_of(newest_intact(tmp_path, "full")) is None


def test_looking_for_the_newest_among_many_is_cheap_in_bytes(tmp_path: Path) -> None:
    """Only the chosen one and damaged ones in front of it are read."""
    for step in range(1, 30):
        committed(tmp_path, step)
    told: list[int] = []
    newest_intact(tmp_path, progress=lambda done, _: told.append(done))
    assert max(told) == len("model of      1") + len("optimizer of      1")
