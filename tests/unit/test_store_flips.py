"""Row S1: single flipped bits, cuts, zeros, copies and swaps in checkpoints of every format are refused, and good ones are not.

STORE_FLIPS and STORE_GOOD set how many there are over all formats; the row asks for 10,000 and 1,000.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.store import Report, Verdict, check_foreign, newest_intact, verify_checkpoint

from tests.support.checkpoint_files import CUTS, SAMPLES, committed_files, cut, flip, write_files

FLIPS = int(os.environ.get("STORE_FLIPS", "640"))
GOOD = int(os.environ.get("STORE_GOOD", "40"))


@pytest.fixture(scope="module", params=list(SAMPLES))
def kind(request: pytest.FixtureRequest) -> str:
    """Each format."""
    return str(request.param)


@pytest.fixture(scope="module")
def two(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two committed checkpoints of this format, with the same names and other bytes; the tests leave them as they were."""
    root = tmp_path_factory.mktemp("two")
    return committed_files(root, 100, SAMPLES[kind](1)), committed_files(root, 200, SAMPLES[kind](2))


@pytest.fixture
def older(two: tuple[Path, Path]) -> Path:
    """The one of step 100."""
    return two[0]


@pytest.fixture
def newer(two: tuple[Path, Path]) -> Iterator[Path]:
    """The one of step 200, put right again afterwards."""
    aside = two[1].with_name("aside")
    shutil.copytree(two[1], aside)
    yield two[1]
    shutil.rmtree(two[1])
    aside.rename(two[1])
    assert verify_checkpoint(two[1]).verdict is Verdict.INTACT


def files_in(checkpoint: Path) -> list[Path]:
    """All files with bytes in them, the manifest too."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)


def refused(checkpoint: Path, path: Path, what: str) -> Report:
    """The report about this checkpoint, which names that file."""
    report = verify_checkpoint(checkpoint)
    assert report.verdict is not Verdict.INTACT, f"{what} in {path.name} was not seen"
    assert report.findings[0].path in {str(path.relative_to(checkpoint)), "manifest.json"}, (what, report)
    assert report.reason.isprintable()
    return report


def test_every_flipped_bit_is_refused(kind: str, newer: Path) -> None:
    """One bit of any byte of any file: corrupt, and the file is named."""
    random_ = random.Random(kind)
    files = files_in(newer)
    for at in range(max(1, FLIPS // len(SAMPLES))):
        # Half of them where the bytes are, the others evenly over the files, so that the small ones have their share.
        path = random_.choices(files, [file.stat().st_size for file in files])[0] if at % 2 else files[at // 2 % len(files)]
        bit = random_.randrange(8 * path.stat().st_size)
        flip(path, bit)
        assert refused(newer, path, f"bit {bit}").verdict is Verdict.CORRUPT
        flip(path, bit)


@pytest.mark.parametrize("where", CUTS)
def test_every_cut_is_refused(newer: Path, where: str) -> None:
    """Each file cut at each place: truncated, and the one of step 100 is taken (field cases 67 and 74)."""
    for path in files_in(newer):
        data = path.read_bytes()
        cut(path, where)
        assert refused(newer, path, f"a cut at {where}").verdict is Verdict.TRUNCATED
        if where == "0":
            choice = newest_intact(newer.parent)
            assert choice.chosen is not None
            assert (choice.chosen.step, len(choice.passed_over)) == (100, 1)
        path.write_bytes(data)


def test_zeros_are_refused_and_named(newer: Path) -> None:
    """Each file as long as it was, and nothing in it (field case 75)."""
    for path in files_in(newer):
        data = path.read_bytes()
        path.write_bytes(bytes(len(data)))
        report = refused(newer, path, "zeros")
        assert report.verdict is Verdict.CORRUPT
        assert "all zeros" in report.reason
        path.write_bytes(data)


def test_a_copy_over_another_file_is_refused_and_named(newer: Path) -> None:
    """Each file in the place of each other one of the same checkpoint."""
    files = files_in(newer)
    for path in files:
        data = path.read_bytes()
        for other in files:
            if path != other:
                shutil.copy(other, path)
                report = refused(newer, path, f"a copy of {other.name}")
                assert report.verdict in {Verdict.CORRUPT, Verdict.TRUNCATED}
                if "manifest.json" not in (path.name, other.name):
                    assert report.reason.endswith(f"holds the bytes of {other.relative_to(newer)}")
        path.write_bytes(data)


def test_two_swapped_files_are_refused(newer: Path) -> None:
    """Each pair of files under each other's names."""
    files = files_in(newer)
    for at, first in enumerate(files):
        for second in files[at + 1 :]:
            one, other = first.read_bytes(), second.read_bytes()
            first.write_bytes(other)
            second.write_bytes(one)
            report = verify_checkpoint(newer)
            assert report.verdict in {Verdict.CORRUPT, Verdict.TRUNCATED}
            first.write_bytes(one)
            second.write_bytes(other)


def test_a_file_of_an_older_checkpoint_is_refused_as_a_mix(older: Path, newer: Path) -> None:
    """Each file of step 100 in step 200, as a kill between two renames leaves it: mixed, with its name (field case 84)."""
    for path in files_in(newer):
        data = path.read_bytes()
        stale = older / path.relative_to(newer)
        if stale.read_bytes() == data:
            continue  # a config is the same in both
        shutil.copy(stale, path)
        report = refused(newer, path, "an older file")
        assert report.verdict is Verdict.MIXED
        assert ("of step 100" in report.reason) or report.reason.endswith("is the one of step-000000100")
        path.write_bytes(data)


def test_good_ones_are_no_false_alarm(kind: str, tmp_path: Path) -> None:
    """Committed, verified, looked at in depth, and judged without the manifest: intact."""
    for seed in range(max(1, GOOD // len(SAMPLES))):
        files = SAMPLES[kind](1000 + seed)
        checkpoint = committed_files(tmp_path, seed + 1, files, "full" if seed % 4 else "structure")
        report = verify_checkpoint(checkpoint, deep=True)
        assert report.verdict is Verdict.INTACT, report
        (tmp_path / "theirs").mkdir()
        report = check_foreign(write_files(tmp_path / "theirs", files))
        assert report.verdict is Verdict.INTACT, report
        shutil.rmtree(tmp_path / "theirs")
        shutil.rmtree(checkpoint)


SEEN_WITHOUT_A_DIGEST = {
    "torch zip": 0.6,
    "torch zip without checksums": 0.1,
    "legacy": 0.0,
    "safetensors": 0.03,
    "Trainer with shards": 0.3,
    "Lightning": 0.6,
    "plain": 0.0,
}
"""The least part of flipped bits that shows without a manifest in files this small, where tables and padding are most of it."""


def test_without_a_manifest_only_what_has_checksums_is_spoken_for(kind: str, tmp_path: Path) -> None:
    """A flip that passes is in a file that `unchecked` names, or in the padding of an archive."""
    checkpoint = write_files(tmp_path / "theirs", SAMPLES[kind](1))
    random_ = random.Random(kind)
    files = files_in(checkpoint)
    whole = set(check_foreign(checkpoint).unchecked)
    count = max(40, FLIPS // len(SAMPLES))
    seen = 0
    for _ in range(count):
        path = random_.choices(files, [file.stat().st_size for file in files])[0]
        bit = random_.randrange(8 * path.stat().st_size)
        flip(path, bit)
        seen += check_foreign(checkpoint).verdict is not Verdict.INTACT
        flip(path, bit)
    print(f"{kind}: {seen} of {count} flips seen without a manifest; unchecked: {sorted(whole)}")
    assert seen / count >= SEEN_WITHOUT_A_DIGEST.get(kind, 0.0)
