"""What `ckptctl log` takes for its options, what it says to words nobody can mean; journals that others wrote again; ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.config_text import events
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.ctl.words import width_of
from ckpt_supervisor.view import story
from ckpt_supervisor.view.log import read_time
from ckpt_supervisor.view.merging import _HEAD, _edges
from ckpt_supervisor.view.reading import Reader, event_in, files

from tests.support.ctl_stage import caller


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls ckptctl in this process, in an empty directory and with a state directory of its own."""
    monkeypatch.setenv("CKPT_SUPERVISE_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


def put(root: Path, name: str, *events: dict[str, Any], blank: str = "") -> Path:
    """A journal of this name with these events, in the way in which this or another writer puts blanks."""
    job, attempt, step, epoch, task = name.rsplit("-", 4)
    own = {"job": job, "attempt": int(attempt), "step_id": step, "epoch": int(epoch), "task": int(task), "host": "n1", "v": 1}
    path = root / "journal" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    text = ""
    for place, event in enumerate(events):
        head = {"ts": f"2026-01-31T12:00:{place:02d}.000000Z", "mono_ms": place, "event": event["event"], "level": "info"}
        text += json.dumps({**head, **event, **own}, separators=(f",{blank}", f":{blank}")) + "\n"
    path.write_text(text)
    return path


def test_an_attempt_may_be_named_as_timeline_and_why_print_it(call: Any, tmp_path: Path) -> None:
    """Where several starts have one number, their epoch tells them apart."""
    put(tmp_path, "77-0-0-1-0", {"event": "exit", "code": 1})
    put(tmp_path, "77-0-0-2-0", {"event": "exit", "code": 2})
    put(tmp_path, "77-1-0-3-0", {"event": "exit", "code": 3})
    for asked, codes in (("0", [1, 2]), ("0#2", [2]), ("1", [3]), ("1#3", [3]), ("1#2", [])):
        lines = call("log", "--dir", tmp_path, "--json", "--attempt", asked).lines
        assert [json.loads(line)["code"] for line in lines] == codes


def test_one_step_of_a_job_may_be_asked_for_as_elsewhere(call: Any, tmp_path: Path) -> None:
    """100_3.1 is step 1 of an element; a name with a dot is a job's."""
    put(tmp_path, "100_3-0-0-1-0", {"event": "exit", "code": 1})
    put(tmp_path, "100_3-0-1-2-0", {"event": "exit", "code": 2})
    put(tmp_path, "local-my.host-0-local-3-0", {"event": "exit", "code": 3})
    for asked, codes in (("100_3.1", [2]), ("100.1", [2]), ("100_3", [1, 2]), ("local-my.host", [3])):
        lines = call("log", "--dir", tmp_path, "--json", "--job", asked).lines
        assert [json.loads(line)["code"] for line in lines] == codes


@pytest.mark.parametrize("option", ["--job", "--node", "--since", "--until", "--event", "--grep"])
def test_an_option_that_is_empty_is_a_variable_that_is_not_set(call: Any, tmp_path: Path, option: str) -> None:
    """`--job "$JOB"` without a JOB must not show everything."""
    put(tmp_path, "77-0-0-1-0", {"event": "exit"})
    told = call("log", "--dir", tmp_path, option, "")
    assert (told.code, told.out) == (2, "")
    assert told.err == f"ckptctl: log: {option} is empty: is a variable unset?\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "x"], "log: argument --rank: 'x' is not a whole number; see ckptctl log --help"),
        (["--attempt", "a#1"], "log: argument --attempt: 'a#1' is no attempt: write 3, or 3#7 as timeline does"),
        (["--level", "loud"], "log: argument --level: 'loud' is none of debug, info, warning, error"),
        (["local-vm"], "log: what is 'local-vm'? Did you mean --job local-vm?"),
        (["local-other"], "log: what is 'local-other'? Did you mean --dir local-other?"),
    ],
)
def test_what_cannot_be_meant_is_said_in_plain_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    """No word of Python's."""
    put(tmp_path, "local-vm-0-local-1-0", {"event": "exit"})
    with pytest.raises(SystemExit) as caught:
        ctl.main(["log", "--dir", str(tmp_path), *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"ckptctl: {said}")


def test_levels_are_taken_in_whatever_case(call: Any, tmp_path: Path) -> None:
    """As the journal's readers elsewhere write them."""
    put(tmp_path, "77-0-0-1-0", {"event": "exit"}, {"event": "stalled", "level": "warning"})
    assert len(call("log", "--dir", tmp_path, "--level", "WARNING").lines) == 1


def test_journals_without_a_line_are_said_to_be_empty(call: Any, tmp_path: Path) -> None:
    """Nothing was filtered."""
    put(tmp_path, "77-0-0-1-0")
    told = call("log", "--dir", tmp_path)
    assert (told.code, told.err) == (1, "ckptctl: the journals are empty\n")


def test_times_of_today_and_ages_of_several_units_are_taken() -> None:
    """UTC, as everything is."""
    now = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=timezone.utc)
    assert read_time("2h30m", now) == datetime(2026, 1, 31, 9, 30, 0, 5, tzinfo=timezone.utc)
    assert read_time("1d 2h", now) == datetime(2026, 1, 30, 10, 0, 0, 5, tzinfo=timezone.utc)
    assert read_time("09:06", now) == datetime(2026, 1, 31, 9, 6, tzinfo=timezone.utc)
    assert read_time("09:06:30", now) == datetime(2026, 1, 31, 9, 6, 30, tzinfo=timezone.utc)
    for text in ("2h30", "25:00", "2x", "h", ""):
        with pytest.raises(ValueError, match="neither a time"):
            read_time(text, now)


def test_journals_that_another_writer_has_written_again_tell_the_same(call: Any, tmp_path: Path) -> None:
    """json.dumps puts a blank behind each colon: ranks' words are no less there."""
    own: list[dict[str, Any]] = [
        {"event": "command_started", "resume_step": -1},
        {"event": "round_begun", "round": 1, "kind": "periodic", "ranks": ["0-1"]},
        {"event": "rank_agreed", "round": 1, "ranks": [0], "after_ms": 10},
        {"event": "rank_written", "round": 1, "ranks": [1], "after_ms": 500},
        {"event": "round_committed", "round": 1, "step": 30, "took_ms": 900},
        {"event": "exit", "code": 0, "line": "x", "cut": True},
    ]
    told = []
    for blank in ("", " "):
        root = tmp_path / f"run{len(blank)}"
        root.mkdir()
        path = put(root, "77-0-0-1-0", *own, blank=blank)
        raw = path.read_bytes().splitlines()[2]
        assert event_in(raw) == b"rank_agreed"
        assert _HEAD.match(raw) is not None
        assert _edges(files(root)[0])[1].get("code") == 0
        (one,) = story.read(root).attempts
        assert one.rounds[0].words
        reader = Reader(path, frozenset({"rank_written"}))
        told.append((one.rounds, [line["ranks"] for line in reader.lines()], len(call("log", "--dir", root).lines)))
    assert told[0] == told[1]


def test_a_line_that_its_writer_has_cut_is_counted_with_blanks_too(tmp_path: Path) -> None:
    """`"cut": true` at the end of a line."""
    path = tmp_path / "77-0-0-1-0.jsonl"
    path.write_text('{"ts": "2026-01-31T12:00:00.000000Z", "event": "exit", "cut": true}\n')
    reader = Reader(path)
    assert len(list(reader.lines())) == 1
    assert reader.counts.cut == 1


def test_a_command_is_not_told_of_its_own_failures() -> None:
    """Each of them would bring the next one."""
    for name in ("event_command_failed", "event_command_dropped"):
        with pytest.raises(ValueError, match="would be told of by the command that has failed"):
            events(f"exit,{name}")


def test_why_says_where_an_output_is_missing(call: Any, tmp_path: Path) -> None:
    """In words of people."""
    put(tmp_path, "77-0-0-1-0", {"event": "exit", "code": 1})
    told = call("why", "--dir", tmp_path, "--output", "/nonexistent/out")
    assert told.code == 3
    assert told.err == "ckptctl: why: there is no file /nonexistent/out\n"


@pytest.mark.parametrize("command", ["status", "timeline", "why"])
def test_columns_that_are_given_count_in_a_pipe_too(tmp_path: Path, command: str) -> None:
    """As `COLUMNS=60 git log` does."""
    put(tmp_path, "77-0-0-1-0", {"event": "command_started"}, {"event": "exit", "code": 1, "line": "word " * 40})
    env = {**os.environ, "COLUMNS": "60", "PATH": str(tmp_path), "CKPT_SUPERVISE_STATE": str(tmp_path / "state")}
    argv = [sys.executable, "-m", "ckpt_supervisor.ctl", command, "--dir", "."]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    lengths = [len(line) for line in done.stdout.splitlines()]
    assert lengths
    assert max(lengths) <= 60


def test_columns_that_are_given_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other programs that draw: on a terminal of any width."""
    mine, theirs = pty.openpty()
    try:
        monkeypatch.setenv("COLUMNS", "57")
        assert width_of(theirs) == 57
        monkeypatch.setenv("COLUMNS", "7")
        assert width_of(theirs) == 40
        monkeypatch.setenv("COLUMNS", "many")
        assert width_of(theirs) == 80
    finally:
        os.close(mine)
        os.close(theirs)


INTERRUPTED = """
import sys
from ckpt_supervisor.ctl import {module}
def stop(*_): sys.stdout.write("\\x1b[1mhalf a line"); raise KeyboardInterrupt
{module}.{name} = stop
from ckpt_supervisor.ctl import main as ctl
sys.exit(ctl.main(["log", "--dir", "{root}"]))
"""
EARLY, LATE = {"module": "usage", "name": "hoisted"}, {"module": "log", "name": "run"}


def read_all(fd: int) -> bytes:
    """What comes of a terminal until its other side is closed."""
    found = b""
    while select.select([fd], [], [], 60)[0]:
        try:
            block = os.read(fd, 4096)
        except OSError as error:
            assert error.errno == errno.EIO
            break
        if not block:
            break
        found += block
    return found


@pytest.mark.parametrize("where", [EARLY, LATE], ids=["early", "late"])
@pytest.mark.parametrize("colours", [True, False])
def test_ctrl_c_leaves_a_terminal_as_it_was(tmp_path: Path, where: dict[str, str], colours: bool) -> None:
    """At any moment it is 130 and no traceback; in the middle of a coloured line the colour ends."""
    mine, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "" if colours else "1"}
    argv = [sys.executable, "-c", INTERRUPTED.format(root=tmp_path, **where)]
    with subprocess.Popen(argv, stdout=theirs, stderr=subprocess.PIPE, env=env) as process:
        os.close(theirs)
        shown = read_all(mine)
        err = process.communicate(timeout=60)[1]
    os.close(mine)
    assert (process.returncode, err) == (130, b"")
    assert shown.endswith(b"half a line\x1b[0m\r\n" if colours else b"half a line")


@pytest.mark.parametrize("where", [EARLY, LATE], ids=["early", "late"])
def test_ctrl_c_with_a_reader_that_is_gone_is_130_too(tmp_path: Path, where: dict[str, str]) -> None:
    """`ckptctl log | less`, both interrupted."""
    ours, theirs = os.pipe()
    os.close(ours)
    argv = [sys.executable, "-c", INTERRUPTED.format(root=tmp_path, **where)]
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False, env=env)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (130, b"")
