"""Whether the bytes on the disk are the ones that were meant.

Owns the check of a partial directory against what the ranks reported, of a committed one against its manifest, and of
what others wrote against itself. Must not change anything, map a file, follow a link or unpickle; survey.py has the
names and sizes, reading.py the single files, formats/ what files say of each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckpt_supervisor.store.formats import LISTING_BYTES_MAX, read_sets
from ckpt_supervisor.store.layout import MANIFEST
from ckpt_supervisor.store.look import NOT_THERE, Patience, Stop, Tree, kind_of
from ckpt_supervisor.store.manifest import FileEntry, Manifest, path_problem
from ckpt_supervisor.store.origin import origin_of_size
from ckpt_supervisor.store.reading import Pass, Progress, read_files
from ckpt_supervisor.store.stream import Cache
from ckpt_supervisor.store.survey import (
    Expected,
    claims_problems,
    own_name_taken,
    refusals,
    size_problems,
    survey_checkpoint,
    survey_directory,
)
from ckpt_supervisor.store.verdict import Finding, Mode, Report, Verdict, report_of

__all__ = ["Expected", "Progress", "check_files", "check_foreign", "survey_checkpoint", "verify_checkpoint"]

FINDINGS_MAX = 100
"""Most findings in one report; the first ones say enough."""

LISTING_BYTES_OF_COMMIT: dict[Mode, int] = {"full": 8 * 1024 * 1024, "structure": 1024 * 1024}
"""How large a list of contents is gone through item by item before a commit, which may have seconds: 3.5 s and 0.5 s."""


def check_files(
    directory: str | os.PathLike[str],
    expected: Iterable[Expected],
    mode: Mode = "full",
    threads: int = 2,
    progress: Progress | None = None,
    stop: Stop | None = None,
    elsewhere: Iterable[Expected] = (),
    share: bool = False,
    cache: Cache = "leave",
) -> tuple[Report, tuple[FileEntry, ...]]:
    """Check a directory that is about to be committed. The entries are its manifest's; none unless it is intact.

    Files that no rank reported belong to the checkpoint too (rank None). In mode structure the digests are the ranks'
    own. `elsewhere`: what other nodes read; only names and sizes of it are looked at here, and it makes no entries.
    `share`: this is such another node; what is not expected here is somebody else's. What files say of each other is
    looked at over all of them, and so never by a share. `cache`: what reading does to the page cache (see Cache).
    """
    wanted = tuple(expected)
    others = tuple(elsewhere)
    passing = Pass(Path(directory), mode, threads, progress, stop, Patience(stop), cache=cache)
    findings = claims_problems((*wanted, *others))
    tree, problem = survey_directory(passing.directory, passing.patience)
    if tree is not None and not findings and share:
        findings = size_problems(wanted, tree.files)
    elif tree is not None and not findings:
        reported = {want.path for want in (*wanted, *others)}
        strays = tuple(Expected(path, size, "", None) for path, size in tree.files.items() if path not in reported)
        findings = [
            *own_name_taken(passing.directory),
            *refusals(tree),
            *size_problems((*wanted, *others), tree.files),
        ]
        wanted += strays
        if not wanted and not others and not findings:
            findings.append(Finding(Verdict.MISSING, "", None, "no rank has written or reported a file"))
        if not findings:
            findings = _set_problems(passing, tree.files, LISTING_BYTES_OF_COMMIT[mode])
    elif problem is not None:
        findings.append(problem)
    if not findings:
        read_files(passing, wanted)
        findings = passing.findings
    report = report_of(findings[:FINDINGS_MAX], passing.bytes_read, mode, sorted(passing.unchecked))
    entries = sorted(passing.entries, key=lambda entry: entry.path) if report.verdict is Verdict.INTACT else ()
    return report, tuple(entries)


def verify_checkpoint(
    path: str | os.PathLike[str],
    mode: Mode = "full",
    threads: int = 2,
    progress: Progress | None = None,
    stop: Stop | None = None,
    deep: bool = False,
    cache: Cache = "leave",
) -> Report:
    """Check a committed checkpoint against its manifest.

    What its files say of each other was looked at when it was committed, and the digests prove that they are the same:
    that is done once more only where there may be none, or when `deep` asks for it.
    """
    passing = Pass(Path(path), mode, threads, progress, stop, Patience(stop), cache=cache, is_committed=True, deep=deep)
    manifest, problem = survey_checkpoint(passing.directory, passing.patience)
    if manifest is None or problem is not None:
        if manifest is not None and problem is not None:
            problem = _with_origin(passing.directory, problem, manifest)
        return report_of((problem,) if problem is not None else (), 0, mode)
    if deep or manifest.verified == "structure":
        findings = _set_problems(passing, {file.path: file.bytes for file in manifest.files})
        if findings:
            return report_of(findings[:FINDINGS_MAX], 0, mode)
    read_files(passing, [Expected(file.path, file.bytes, file.xxh3_128, file.rank) for file in manifest.files])
    return report_of(passing.findings[:FINDINGS_MAX], passing.bytes_read, mode, sorted(passing.unchecked))


def check_foreign(
    path: str | os.PathLike[str],
    mode: Mode = "full",
    threads: int = 2,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Report:
    """Check a file or a directory that has no manifest of ours, by what it says of itself.

    Structure, sets and the checksums inside. Intact means that nothing speaks against it; `unchecked` names the files
    of which nothing speaks for every byte.
    """
    where = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow a link)
    passing = Pass(where, mode, threads, progress, stop, Patience(stop), digests_wanted=False)
    tree, problem = _survey_foreign(passing)
    if tree is None:
        return report_of((problem,) if problem is not None else (), 0, mode)
    findings = [finding for finding in refusals(tree) if finding.path != MANIFEST or MANIFEST not in tree.files]
    if not tree.files and not findings:
        findings = [Finding(Verdict.MISSING, "", None, f"{where.name} holds no file")]
    if not findings and passing.directory == where:
        findings = _set_problems(passing, tree.files)
    if not findings:
        read_files(passing, [Expected(name, size, "", None) for name, size in sorted(tree.files.items())])
        findings = passing.findings
    return report_of(findings[:FINDINGS_MAX], passing.bytes_read, mode, sorted(passing.unchecked))


def _survey_foreign(passing: Pass) -> tuple[Tree | None, Finding | None]:
    """What is there. For a single file its directory is the one that is passed over, with this file alone in it."""
    where = passing.directory
    try:
        seen = passing.patience.look(lambda: os.lstat(where))
    except OSError as error:
        if error.errno in NOT_THERE:
            return None, Finding(Verdict.MISSING, "", None, f"{where.name} is not there")
        return None, Finding(Verdict.UNKNOWN, "", None, f"{where.name} cannot be looked at: {error.strerror}")
    except ValueError:  # a NUL in the name
        return None, Finding(Verdict.MISSING, "", None, f"{where.name} can be no name of a file")
    if kind_of(seen.st_mode) == "a directory":
        return survey_directory(where, passing.patience, skip="")
    if kind_of(seen.st_mode) != "a file":
        return None, Finding(Verdict.FOREIGN, "", None, f"{where.name} is {kind_of(seen.st_mode)}")
    problem = path_problem(where.name)
    if problem and where.name != MANIFEST:
        return None, Finding(Verdict.FOREIGN, "", None, problem)
    passing.directory = where.parent
    return Tree({where.name: seen.st_size}), None


def _set_problems(passing: Pass, files: dict[str, int], listing_bytes_max: int = LISTING_BYTES_MAX) -> list[Finding]:
    """What the files say of each other; checksums that one states of another are kept for the reading."""
    sets = read_sets(passing.directory, files, passing.patience, passing.stop, listing_bytes_max)
    passing.extents = sets.extents
    return sets.findings


def _with_origin(directory: Path, problem: Finding, manifest: Manifest) -> Finding:
    """A finding about a size, with what the file is instead, if it is another one that is known."""
    wanted = {file.path: file for file in manifest.files}.get(problem.path)
    if wanted is None or problem.verdict not in (Verdict.TRUNCATED, Verdict.CORRUPT):
        return problem
    try:
        size = os.lstat(directory / problem.path).st_size
    except OSError:
        return problem
    return origin_of_size(directory, problem, size, manifest.files)
