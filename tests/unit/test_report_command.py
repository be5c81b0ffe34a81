"""`ckptctl report`: where the page goes, what is never overwritten, the exit status, and journals that are damaged."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.ctl import report
from ckpt_supervisor.view.report import MARK, MARK_BYTES_MAX

from tests.support import many_lines
from tests.support.ctl_stage import Told, caller
from tests.support.run import environment

Call = Callable[..., Told]


@pytest.fixture(name="call")
def fixture_call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls ckptctl in this process."""
    return caller(capsys)


@pytest.fixture(name="place")
def fixture_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the journals of four attempts of two tasks, and an empty one to be in."""
    many_lines.write(tmp_path / "run", lines=1_500, tasks=2, attempts=4)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "run"


def left() -> list[str]:
    """What lies in the current directory."""
    return sorted(path.name for path in Path().iterdir())


def test_the_page_is_written_whole_under_its_default_name(call: Call, place: Path) -> None:
    """One file, ours by its head, readable as the umask says, named on standard output."""
    before = os.umask(0o027)
    try:
        told = call("report", "--dir", place)
    finally:
        os.umask(before)
    assert (told.code, told.err) == (0, "")
    assert told.out.startswith("report.html: ")
    assert left() == ["report.html"]
    page = Path("report.html").read_bytes()
    assert MARK.encode() in page[:MARK_BYTES_MAX]
    assert page.endswith(b"</html>\n")
    assert b"<title>Job 4711</title>" in page
    assert stat.S_IMODE(Path("report.html").stat().st_mode) == 0o640


def test_a_report_replaces_a_report_and_nothing_else(call: Call, place: Path) -> None:
    """A second one takes the place of the first; a file that is something else stays, but for --force."""
    assert call("report", "--dir", place, "-o", "r.html").code == 0
    assert call("report", "--dir", place, "-o", "r.html").code == 0
    for other in (b"", b"results of a year", b"<!DOCTYPE html>" + b" " * MARK_BYTES_MAX + MARK.encode()):
        Path("r.html").write_bytes(other)
        told = call("report", "--dir", place, "-o", "r.html")
        assert told.code == 1
        assert "--force" in told.err
        assert Path("r.html").read_bytes() == other
    assert call("report", "--dir", place, "-o", "r.html", "--force").code == 0
    assert MARK.encode() in Path("r.html").read_bytes()
    assert left() == ["r.html"]


def test_a_directory_is_never_replaced_and_a_link_stays_one(call: Call, place: Path) -> None:
    """Not even with --force; where a link leads to there the page is written."""
    Path("d").mkdir()
    assert call("report", "--dir", place, "-o", "d", "--force").code == 1
    Path("link.html").symlink_to("d/page.html")
    assert call("report", "--dir", place, "-o", "link.html").code == 0
    assert Path("link.html").is_symlink()
    assert MARK.encode() in Path("d/page.html").read_bytes()
    assert sorted(path.name for path in Path("d").iterdir()) == ["page.html"]


def test_a_place_that_takes_no_page_is_said_and_left_as_it_was(call: Call, place: Path) -> None:
    """No such directory, and a device that is full."""
    told = call("report", "--dir", place, "-o", "no/where.html")
    assert told.code == 1
    assert "no directory" in told.err
    told = call("report", "--dir", place, "-o", "/dev/full")
    assert told.code == 3
    assert "No space left" in told.err
    assert call("report", "--dir", place, "-o", "/dev/null").code == 0
    assert call("report", "--dir", place, "-o", "").code == 2
    assert left() == []


def test_a_page_that_cannot_be_finished_leaves_what_was_there(place: Path) -> None:
    """An error in the middle of it: the old page stands, and nothing lies beside it."""
    target = Path("r.html")
    target.write_text(MARK)

    def halves() -> object:
        yield "half of a page"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        report._Place("r.html", is_forced=False).write(halves())  # type: ignore[arg-type]
    assert target.read_text() == MARK
    assert left() == ["r.html"]


def test_no_journals_no_such_job_and_no_directory_are_told_apart(call: Call, place: Path) -> None:
    """1 for nothing there; and nothing is written."""
    for words in (("--dir", Path()), ("--dir", "nowhere"), ("4712", "--dir", place), ("not-a-job!", "--dir", place)):
        told = call("report", *words)
        assert told.code in (1, 2), words
        assert len(told.err.splitlines()) == 1
    assert left() == []
    assert call("report", "4711", "--dir", place).code == 0


def test_the_facts_come_as_one_json_value(call: Call, place: Path) -> None:
    """What the page is drawn from, with totals and the look at the checkpoints, and no file."""
    told = call("report", "--dir", place, "--json")
    assert told.code == 0
    (value,) = told.values
    assert set(value) == {"dir", "jobs", "totals", "attempts", "checkpoints", "notes"}
    assert {"commits", "rounds", "progress", "memory", "spans"} <= set(value["attempts"][0])
    assert value["jobs"] == ["4711"]
    assert len(value["attempts"]) == value["totals"]["attempts"] == 4
    assert {tuple(one) for one in value["checkpoints"]} == {("step", "state", "text")}
    assert left() == []


def test_a_reader_that_goes_away_is_no_fault_and_no_locale_matters(place: Path) -> None:
    """`ckptctl report -o - | head -c 100`, also without UTF-8: no traceback, and the page is UTF-8 all the same."""
    words = [sys.executable, "-m", "ckpt_supervisor.ctl", "report", "--dir", str(place), "-o", "-"]
    plain = environment() | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with subprocess.Popen(words, env=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        head = process.stdout.read(100)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60) == 0
    assert head.startswith(b"<!DOCTYPE html>")
    assert said == b""
    assert left() == []


def test_journals_that_are_cut_anywhere_or_have_a_byte_flipped_make_a_page(call: Call, place: Path) -> None:
    """A page, or a clear word that there is nothing: never a traceback (32 damages of one journal)."""
    chance = random.Random(5)
    journal = next(path for path in sorted((place / "journal").iterdir()) if path.name.endswith("-2-0.jsonl"))
    whole = journal.read_bytes()
    for number in range(32):
        at = chance.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
        journal.write_bytes(whole[:at] if number % 2 else flipped)
        told = call("report", "--dir", place, "-o", "r.html")
        assert told.code == 0, (number, at, told.err)
        assert Path("r.html").read_bytes().endswith(b"</html>\n")


def test_two_jobs_in_one_directory_are_told_apart_and_a_missing_coordinator_is_said(call: Call, place: Path) -> None:
    """The page of all names both; with the coordinator's file gone its notes say incomplete."""
    for path in sorted((place / "journal").iterdir()):
        if path.name.startswith("4711-3-"):
            path.rename(path.with_name(path.name.replace("4711-3-", "5000-3-")))
        elif path.name.endswith("-2-0.jsonl"):
            path.unlink()
    assert call("report", "--dir", place).code == 0
    page = Path("report.html").read_text()
    assert "<title>2 jobs of one directory</title>" in page
    assert "coordinator&#x27;s journal is missing" in page
    assert call("report", "5000", "--dir", place).code == 0
    assert "<title>Job 5000</title>" in Path("report.html").read_text()


def test_the_help_has_examples_and_is_quick() -> None:
    """What is drawn with is not imported for a word of help."""
    names = "import sys, ckpt_supervisor.ctl.main; ckpt_supervisor.ctl.main._parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True).stdout.split()
    assert {"plotly", "ckpt_supervisor.view.report", "ckpt_supervisor.view.story"}.isdisjoint(loaded)
    with pytest.raises(SystemExit, match="0"):
        ctl.main(["report", "--help"])
