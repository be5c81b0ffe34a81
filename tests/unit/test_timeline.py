"""`ckptctl timeline` as it is drawn: widths, letters without colours, what comes from others, and its JSON."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.view import bars, story, timeline
from ckpt_supervisor.view.amounts import percent, span_text
from ckpt_supervisor.view.facts import Attempt, Commit, Run, Span

from tests.support.journals import Start, preempted
from tests.support.run import environment
from tests.unit.test_story import DAY_LATER_NS, WAYS, told

CTL = (sys.executable, "-m", "ckpt_supervisor.ctl")


def all_ways(directory: Path) -> Run:
    """A run that ended in every way."""
    for number, (end, _, _) in enumerate(WAYS.values()):
        end(Start(directory, number + 1, number).begin(1_000 * number).save(1_000 * number + 51, 1, 50))
    return told(directory)


def drawn(run: Run, width: int = 80, unicode: bool = True, colour: bool = False) -> list[str]:
    """The lines."""
    return timeline.block(run, timeline.Looks(width, colour, unicode))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, unicode: bool) -> None:
    """Bars too, and with every way to end. Without UTF-8 all of it is ASCII."""
    lines = drawn(all_ways(tmp_path), width, unicode)
    assert max(map(len, lines)) <= width
    assert unicode or all(line.isascii() for line in lines)
    text = " ".join(" ".join(lines).split())
    assert [cause for _, cause, _ in WAYS.values() if cause not in text] == []


def test_bars_can_be_read_without_colours(tmp_path: Path) -> None:
    """Each kind has a letter of its own; what was lost stands at the end, and colours are there only when asked for."""
    WAYS["failed"][0](Start(tmp_path).begin(0).save(51, 1, 50))
    lines = drawn(told(tmp_path), 80, unicode=False)
    bar = next(line for line in lines if "#" in line)
    assert bar.strip()[0] == ":"
    assert bar.rstrip(">").endswith("xxxx")
    assert len({bars.Letter.of(kind, False).char for kind in story.KINDS}) == len(story.KINDS)
    assert len({bars.Letter.of(kind, True).char for kind in story.KINDS}) == len(story.KINDS)
    assert "\x1b" not in "".join(lines)
    assert "\x1b[31m" in "".join(drawn(told(tmp_path), colour=True))


def test_marks_stand_below_the_bars_and_are_explained(tmp_path: Path) -> None:
    """A notice at its end, commits on the way."""
    preempted(tmp_path)
    lines = drawn(told(tmp_path), 80)
    place = next(place for place, line in enumerate(lines) if "█" in line)
    assert "N" in lines[place + 1]
    assert "'" in lines[place + 1]
    assert any("N notice" in line and "' committed" in line for line in lines)


def test_one_scale_for_all_bars_and_short_kinds_are_still_seen() -> None:
    """An attempt half as long has a bar half as long; a leaving of a thousandth has a column."""
    long = Attempt(job="1", attempt=0, epoch=1, step_id="0", spans=(Span("training", 0, 999), Span("leaving", 999, 1_000)))
    short = Attempt(job="1", attempt=1, epoch=2, step_id="0", spans=(Span("training", 0, 500),))
    scale = bars.Scale.of([long, short], 0, 50)
    assert len(bars.cells(long, 0, scale)) == 50
    assert len(bars.cells(short, 0, scale)) == 25
    assert bars.cells(long, 0, scale)[-1] == "leaving"
    crowded = Attempt(job="1", attempt=0, epoch=1, step_id="0", spans=long.spans)
    crowded.commits = tuple(Commit(at * 20, at, at) for at in range(50))
    assert bars.marks(crowded, scale) == "", "a letter in every column tells nothing"


def test_an_attempt_that_is_at_it_reaches_to_now() -> None:
    """Its last kind goes on."""
    one = Attempt(job="1", attempt=0, epoch=1, step_id="0", spans=(Span("training", 0, 500),), is_running=True)
    scale = bars.Scale.of([one], 1_000, 10)
    assert bars.reach(one, 1_000) == (0, 1_000)
    assert bars.cells(one, 1_000, scale) == ["training"] * 10


def test_what_comes_from_others_is_shown_harmless(tmp_path: Path) -> None:
    """Escape sequences, direction overrides and a megabyte in a job's name, a reason and a cause (row 4)."""
    nasty = "\x1b]0;owned\x07\x1b[2J\u202e<b>"
    start = Start(tmp_path, job=nasty.replace("/", "_")[:40], host=nasty).begin(0)
    start.say(5, "rank_failed", "warning", rank=0, reason=nasty + "x" * 1_000_000, step=4).say(6, "notice", by=nasty, cause=nasty)
    start.say(7, "requeue", result="refused", reason=nasty).exit(8, 1, nasty)
    text = "\n".join(drawn(told(tmp_path)))
    assert text.replace("\n", "").isprintable()
    assert len(text) < 10_000
    assert "\\x1b" in text


@pytest.mark.parametrize(("ms", "text"), [(0, "0 ms"), (999, "999 ms"), (4_200, "4.2 s"), (125_000, "2m 05s")])
def test_spans_of_time_read_well(ms: int, text: str) -> None:
    """From milliseconds to days."""
    assert span_text(ms) == text
    assert [span_text(11_520_000), span_text(187_200_000)] == ["3h 12m", "2d 04h"]


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    """99.97 % is not 100 %, and 0.01 % is not 0 %."""
    assert [percent(share) for share in (0, 0.0001, 0.0349, 0.5, 0.9997, 1)] == [
        "0 %",
        "0.1 %",
        "3.5 %",
        "50 %",
        "99.9 %",
        "100 %",
    ]


# The command


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """A call in this process."""
    code = ctl.main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_several_jobs_of_a_directory_are_drawn_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One block for each, one JSON value for each with --json; JOB picks one; an array element is a job."""
    preempted(tmp_path, 1)
    preempted(tmp_path, 2, at_s=200, resume=90, job="100_3")
    code, out, _ = call(capsys, "timeline", "--dir", str(tmp_path))
    assert code == 0
    assert out.count("goodput  ") == 2
    code, out, _ = call(capsys, "timeline", "100_3", "--dir", str(tmp_path))
    assert out.startswith("job 100_3 step 0 in ")
    code, out, _ = call(capsys, "timeline", "--json", "--dir", str(tmp_path))
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["jobs"] for record in records] == [["4711"], ["100_3"]]
    assert records[0]["attempts"][0]["cause"] == "preempted"
    assert records[0]["totals"]["saves"] == 2
    assert set(records[0]) == {"dir", "jobs", "totals", "attempts", "notes"}


def test_elements_of_an_array_are_found_by_the_arrays_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the state directory knows them, each in a directory of its own."""
    state = tmp_path / "state"
    for element in ("100_1", "100_2"):
        where = tmp_path / element
        preempted(where, job=element)
        place = state / "places" / element / "0.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"dir": str(where), "at": 1}))
    asked = subprocess.run(
        [*CTL, "timeline", "100"], env=environment({"CKPT_SUPERVISE_STATE": str(state)}), capture_output=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert [line.split()[1] for line in asked.stdout.decode().splitlines() if line.startswith("job ")] == ["100_1", "100_2"]


def test_where_there_is_nothing_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No directory, no journals, no such job, no such number."""
    assert call(capsys, "timeline", "--dir", str(tmp_path / "none"))[0] == 1
    code, _, err = call(capsys, "timeline", "--dir", str(tmp_path))
    assert (code, err) == (1, f"ckptctl: timeline: no journals in {tmp_path}\n")
    preempted(tmp_path)
    code, _, err = call(capsys, "timeline", "4712", "--dir", str(tmp_path))
    assert (code, err) == (1, f"ckptctl: timeline: {tmp_path} has no journal of job 4712\n")
    with pytest.raises(SystemExit) as ended:
        ctl.main(["timeline", "--last", "0", "--dir", str(tmp_path)])
    assert ended.value.code == 2


@pytest.mark.parametrize("command", ["timeline", "why"])
def test_a_terminal_of_40_columns_no_color_and_a_locale_without_utf_8(tmp_path: Path, command: str) -> None:
    """Row 7: narrow, NO_COLOR, LC_ALL=C with an ASCII stdout: as people expect."""
    preempted(tmp_path)
    words = [*CTL, command, "--dir", str(tmp_path)]
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "TERM": "xterm"}
    asked = subprocess.run(words, env=environment(plain), capture_output=True, check=False)
    assert (asked.returncode, asked.stderr) == (0, b"")
    assert asked.stdout.isascii()
    for more, is_coloured in (({}, command == "timeline"), ({"NO_COLOR": "1"}, False)):
        shown = on_terminal(words, 40, environment({"TERM": "xterm", "LC_ALL": "C.UTF-8", **more}))
        assert (b"\x1b[" in shown) == is_coloured
        if not is_coloured:
            assert max(len(line) for line in shown.decode().splitlines()) <= 40


def on_terminal(words: list[str], columns: int, env: dict[str, str]) -> bytes:
    """What a command shows on a terminal of so many columns."""
    ours, its = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    child = subprocess.Popen(words, env=env, stdout=its, stderr=its, stdin=subprocess.DEVNULL)
    os.close(its)
    shown = b""
    try:
        while block := os.read(ours, 65_536):
            shown += block
    except OSError:
        pass  # EIO: the other end is closed.
    assert child.wait(60) == 0, shown
    os.close(ours)
    return shown


@pytest.mark.parametrize("command", ["timeline", "why"])
def test_a_pipe_that_is_closed_early_is_no_fault(tmp_path: Path, command: str) -> None:
    """Row 7: `ckptctl timeline | head -1`."""
    preempted(tmp_path)
    child = subprocess.Popen(
        [*CTL, command, "--dir", str(tmp_path)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (0, b"")


def test_only_the_newest_attempts_are_drawn_and_that_is_said(tmp_path: Path) -> None:
    """--last, and 40 by default."""
    run = all_ways(tmp_path)
    lines = timeline.block(run, timeline.Looks(80, False, True), shown_max=2)
    assert sum("░" in line for line in lines) == 3, "two bars, and what the letter means"
    assert any("11 attempts before are not drawn" in line for line in lines)
    assert DAY_LATER_NS > 0
