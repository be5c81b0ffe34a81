"""`ckptctl log` as a command: what it shows of damaged, foreign and endless journals; pipes, terminals, and --follow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.ctl import main as ctl
from ckpt_supervisor.view.reading import files
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import many_lines
from tests.support.ctl_stage import caller

CTL = [sys.executable, "-m", "ckpt_supervisor.ctl", "log"]
EVIL = "\x1b[2J\x1b]0;t\x07\x9b2J\r\u202egnp\ud800 <script>alert(1)</script>"


def line_of(event: str, second: int, **fields: Any) -> str:
    """One line of a journal."""
    own = {"level": "info", "job": "77", "attempt": 0, "step_id": "0", "epoch": 1, "task": 0, "host": "node1", "pid": 5, "v": 1}
    stamp = f"2026-01-31T12:00:{second:02d}.000000Z"
    return json.dumps({"ts": stamp, "mono_ms": second * 1000, "event": event, **own, **fields}, separators=(",", ":")) + "\n"


def put(root: Path, name: str, *lines: str) -> Path:
    """Append these to a journal."""
    (root / "journal").mkdir(exist_ok=True)
    with (root / "journal" / f"{name}.jsonl").open("a") as file:
        file.write("".join(lines))
    return root / "journal" / f"{name}.jsonl"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


@pytest.fixture(scope="module")
def run_of_all_causes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run, which no test changes."""
    root = tmp_path_factory.mktemp("run")
    many_lines.write(root, 900, tasks=5, attempts=11)
    return root


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--event", "comit"], "no line matches: there is no event comit; did you mean commit?"),
        (["--event", "rank"], "no line matches: there is no event rank; did you mean rank_"),
        (["--event", "zzz"], "no line matches: there is no event zzz (docs/journal.md lists all)"),
        (["--event", "oom_kill"], "no line matches"),
        (["--rank", "99"], "no line matches"),
        (["--node", "node9"], "no line matches"),
        (["--grep", "nowhere"], "no line matches"),
        (["--until", "2020-01-01"], "no line matches"),
        (["--job", "78"], "no line matches: there are journals of 77"),
        (["--attempt", "9"], "no line matches: there are journals of 77"),
    ],
)
def test_a_filter_that_matches_nothing_says_so(call: Any, tmp_path: Path, words: list[str], said: str) -> None:
    """Exit status 1, nothing on stdout, and the word that does not fit on stderr."""
    put(tmp_path, "77-0-0-1-0", line_of("commit", 1), line_of("rank_hello", 2, rank=0))
    told = call("log", "--dir", tmp_path, *words)
    assert (told.code, told.out) == (1, "")
    assert told.err.startswith(f"ckptctl: {said}")
    assert told.err.count("\n") == 1


def test_an_event_may_be_asked_for_as_it_is_printed_and_at_any_level(call: Any, tmp_path: Path) -> None:
    """`rank written`, `Rank-Written`; and who asks for `phase` does not have to know that it is a debug line."""
    put(tmp_path, "77-0-0-1-0", line_of("rank_written", 1), line_of("phase", 2, level="debug"))
    for word in ("rank written", "Rank-Written", "rank_written"):
        assert len(call("log", "--dir", tmp_path, "--event", word).lines) == 1
    assert len(call("log", "--dir", tmp_path, "--event", "phase").lines) == 1
    assert len(call("log", "--dir", tmp_path).lines) == 1
    assert call("log", "--dir", tmp_path, "--event", "phase", "--level", "info").code == 1


def test_an_arrays_elements_and_a_node_are_found(call: Any, tmp_path: Path) -> None:
    """--job of an array means all of it; --node also finds what the coordinator tells of a node's tasks."""
    put(
        tmp_path, "100_3-0-0-1-0",
        line_of("task_joined", 1, job="100_3", of_task=1, host_of_task="node2"), line_of("verified", 3, job="100_3", of_task=1),
        line_of("verified", 3, job="100_3"),
    )  # fmt: skip
    put(tmp_path, "100_3-0-0-1-1", line_of("verified", 2, job="100_3", task=1, host="node2"))
    put(tmp_path, "1001-0-0-2-0", line_of("exit", 9, job="1001", epoch=2))
    assert len(call("log", "--dir", tmp_path, "--job", "100").lines) == 4
    assert len(call("log", "--dir", tmp_path, "--job", "100_3").lines) == 4
    told = call("log", "--dir", tmp_path, "--node", "node2")
    assert [line.split()[3] for line in told.lines] == ["task", "verified", "verified"]
    assert told.lines[1].endswith("task=1 node=node2")


def test_a_nodes_file_that_is_missing_is_named(call: Any, run_of_all_causes: Path, tmp_path: Path) -> None:
    """The coordinator tells of a task whose journal is not there; and a start without its coordinator's is incomplete too."""
    root = tmp_path / "run"
    shutil.copytree(run_of_all_causes, root)
    whole = call("log", "--dir", root)
    assert whole.err == "ckptctl: 1 damaged or torn lines were skipped\n"
    (root / "journal" / "4711-2-0-3-4.jsonl").unlink()
    (root / "journal" / "4711-4-0-5-0.jsonl").unlink()
    told = call("log", "--dir", root)
    assert told.code == 0
    assert "ckptctl: incomplete: there is no journal of task 4 of 4711/2 (node002), task 0 of 4711/4\n" in told.err
    assert set(told.lines) < set(whole.lines)


def test_clocks_that_are_apart_are_corrected_and_told(call: Any, tmp_path: Path) -> None:
    """By 90 s: said once for the node, shown by the coordinator's clock, and beside what was written with --json."""
    many_lines.write(tmp_path, 500, tasks=6, attempts=1, skewed={4: 90_000, 5: 90_000})
    told = call("log", "--dir", tmp_path)
    apart = "ckptctl: the clock of node002 is 90.0 s ahead of that of node001; "
    assert told.err == apart + "its lines are shown by the clock of node001\n"
    times = [line[:23] for line in told.lines]
    assert times == sorted(times)
    values = call("log", "--dir", tmp_path, "--json").values
    corrected = [value for value in values if "corrected_ts" in value]
    assert {value["task"] for value in corrected} == {4, 5}
    assert all(value["corrected_ts"] < value["ts"] for value in corrected)


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_ends_in_a_traceback(call: Any, run_of_all_causes: Path, tmp_path: Path, seed: int) -> None:
    """Files cut at any byte, bytes that have another value, files that are gone: the rest is shown, and it is said."""
    root = tmp_path / "run"
    shutil.copytree(run_of_all_causes, root)
    chance = random.Random(seed)
    whole = set(call("log", "--dir", root, "--level", "debug").lines)
    for file in files(root):
        data = bytearray(file.path.read_bytes())
        what = chance.randrange(6)
        if what == 0:
            del data[chance.randrange(len(data)) :]
        elif what == 1:
            for _ in range(5):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif what == 2 and file.task:
            file.path.unlink()
            continue
        elif what == 3:
            data = data[: len(data) // 2] + bytes(chance.randrange(5_000)) + data[len(data) // 2 :]
        file.path.write_bytes(data)
    told = call("log", "--dir", root, "--level", "debug")
    assert told.code == 0
    assert "damaged or torn lines were skipped" in told.err
    assert "incomplete: there is no journal of task" in told.err
    shown = set(told.lines)
    assert len(shown & whole) > 0.5 * len(whole)
    for words in (["--json"], ["--rank", "1"], ["--since", "2026-01-05T09:00:00"], ["--node", "node001"]):
        assert call("log", "--dir", root, *words).code in (0, 1)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["verified", "2026-01-31T12:00:00.000000Z"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
KEYS = (
    "ts", "mono_ms", "event", "level", "job", "attempt", "step_id", "epoch", "task", "host", "pid", "v", "rank", "ranks",
    "of_task", "of_tasks", "host_of_task", "round", "rank_pid",
)  # fmt: skip
EVENTS = st.sampled_from(["task_joined", "rank_hello", "verified", "go", "exit", "command_started"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), EVENTS, st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6)), max_size=8))
def test_values_of_any_kind_are_shown_or_passed_over(lines: list[tuple[int, str, dict[str, Any]]]) -> None:
    """JSON that is none of the journal's: a key has another type, or is not there."""
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()) as shown:
        for task, event, fields in lines:
            line = {**json.loads(line_of(event, task, task=task, host=f"node{task}")), **fields}
            put(Path(place), f"77-0-0-1-{task}", json.dumps(line) + "\n")
        for words in (
            [],
            ["--json"],
            ["--level", "debug", "--rank", "1", "--node", "node1", "--since", "2026-01-01", "--round", "1"],
        ):
            assert ctl.main(["log", "--dir", place, *words]) in (0, 1)
    assert all(line.isprintable() for line in shown.getvalue().split("\n"))


def test_two_jobs_in_one_directory_are_both_shown_and_either_by_itself(call: Any, tmp_path: Path) -> None:
    """One after the other in one directory, and two whose journals were copied together under the same numbers."""
    many_lines.write(tmp_path, 200, tasks=2, attempts=2, job="1")
    many_lines.write(tmp_path, 200, tasks=2, attempts=2, job="2")
    both = call("log", "--dir", tmp_path)
    one, two = (call("log", "--dir", tmp_path, "--job", job) for job in ("1", "2"))
    assert sorted(one.lines + two.lines) == sorted(both.lines)
    assert both.err == one.err == two.err == ""


def test_what_somebody_wrote_steers_no_terminal(call: Any, tmp_path: Path) -> None:
    """Escapes, control characters and direction marks in every place where a text can be; a line of a megabyte."""
    job = "7\u202e\x1b[2J7"
    put(
        tmp_path,
        f"{job}-0-0-1-0",
        line_of(EVIL, 1, job=EVIL, reason=EVIL, **{EVIL: {EVIL: [EVIL]}}),
        line_of("x", 2, text="m" * 10**6),
    )
    put(tmp_path, "77-0-0-2-0", line_of("task_joined", 3, of_task=1, host_of_task=EVIL), line_of("x", 4, text="m" * 900_000))
    put(tmp_path, f"{job}x", line_of("exit", 9))
    for words in ([], ["--json"], ["--job", EVIL], ["--event", EVIL], ["--since", EVIL], ["--node", EVIL], ["--grep", EVIL]):
        told = call("log", "--dir", tmp_path, *words)
        for line in [*told.lines, *told.err.splitlines()]:
            assert line.isprintable(), line[:200]
    told = call("log", "--dir", tmp_path)
    assert len(told.out) < 60_000
    assert "1 damaged or torn lines were skipped" in told.err
    assert "not read, as no journal has such a name" in told.err


def started(root: Path, *words: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """A process of its own."""
    environ = {**os.environ, **(env or {})}
    return subprocess.run([*CTL, "--dir", str(root), *words], env=environ, capture_output=True, timeout=60, check=False, **more)


def on_a_terminal(root: Path, columns: int, **env: str) -> str:
    """What a terminal of this width gets."""
    mine, theirs = pty.openpty()
    environ = {
        "TERM": "xterm",
        "COLUMNS": str(columns),
        **{key: value for key, value in os.environ.items() if key != "NO_COLOR"},
        **env,
    }
    with subprocess.Popen([*CTL, "--dir", str(root)], stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        data = b""
        with contextlib.suppress(OSError):  # The other end is closed.
            while block := os.read(mine, 65_536):
                data += block
        assert process.wait(60) == 0
    os.close(mine)
    return data.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_and_headings_and_a_pipe_gets_neither(tmp_path: Path) -> None:
    """NO_COLOR and TERM=dumb switch colours off; a heading stands before each start."""
    put(tmp_path, "77-0-0-1-0", line_of("commit", 1), line_of("rank_late", 2, level="warning"), line_of("exit", 3, level="error"))
    put(tmp_path, "77-1-0-2-0", line_of("exit", 9, attempt=1, epoch=2, host="node7"))
    shown = on_a_terminal(tmp_path, 120)
    assert "\x1b[33m2026" in shown and "\x1b[31m2026" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).split("\n")
    assert plain[0] == "-- job 77, attempt 0, node1, 1 task, start 1 --"
    assert plain[4:6] == ["", "-- job 77, attempt 1, node7, 1 task, start 2 --"]
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_a_terminal(tmp_path, 40, **env).split("\n") == plain
    piped = started(tmp_path).stdout.decode().splitlines()
    assert piped == [line for line in plain if line.startswith("2026")]


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_letters_that_the_terminal_does_not_know_are_written_in_others(tmp_path: Path, env: dict[str, str]) -> None:
    """No UTF-8: nothing is lost but the look of a letter."""
    put(tmp_path, "77-0-0-1-0", line_of("warning", 1, text="Zeit für 漢字", host="nöde"), line_of("exit", 2))
    done = started(tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 2
    assert b"Zeit" in done.stdout


def test_a_reader_that_has_enough_ends_it_without_a_word(run_of_all_causes: Path) -> None:
    """`ckptctl log | head -1`, as the shell does it; also with --follow, where no line may come for hours."""
    for words in ("", "--json", "--level debug", "--follow"):
        pipe = f"{sys.executable} -m ckpt_supervisor.ctl log --dir {run_of_all_causes} {words} | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", pipe], capture_output=True, timeout=60, check=False)
        first, status = done.stdout.decode().splitlines()
        assert status == "0", words
        assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr and b"Broken" not in done.stderr
        assert first.startswith(("2026", "{"))


def test_a_closed_stdin_and_no_terminal_are_nothing_special(tmp_path: Path) -> None:
    """As from cron."""
    put(tmp_path, "77-0-0-1-0", line_of("exit", 1))
    done = started(tmp_path, env={"TERM": ""}, stdin=subprocess.DEVNULL, start_new_session=True)
    assert (done.returncode, done.stdout.count(b"\n"), done.stderr) == (0, 1, b"")


class Following:
    """A started `ckptctl log --follow`, and what it prints."""

    def __init__(self, root: Path, *words: str) -> None:
        argv = [*CTL, "--follow", "--dir", str(root), *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().rstrip("\n")

    def error(self) -> str:
        """Its next complaint."""
        assert self.process.stderr is not None
        assert select.select([self.process.stderr], [], [], 60)[0], "no complaint came"
        return self.process.stderr.readline().decode().rstrip("\n")

    def end(self) -> str:
        """Ctrl-C; what else it had to say."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@contextlib.contextmanager
def following(root: Path, *words: str) -> Iterator[Following]:
    """Ended by ctrl-C, or killed if it does not."""
    made = Following(root, *words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_follow_takes_up_attempts_and_nodes_that_come_later(tmp_path: Path) -> None:
    """A file of a second task, one of the next attempt, one of another job: each from its first line on."""
    put(tmp_path, "77-0-0-1-0", line_of("one", 1))
    with following(tmp_path) as shown:
        assert "one" in shown.line()
        put(tmp_path, "77-0-0-1-1", line_of("two", 2, task=1, host="node2"))
        assert shown.line().endswith("two                task=1 node=node2")
        put(tmp_path, "77-1-0-2-0", line_of("three", 3, attempt=1, epoch=2))
        assert "77/1  three" in shown.line()
        put(tmp_path, "77-0-0-1-1", line_of("late", 4, task=1))
        assert "late" in shown.line()
        put(tmp_path, "78-0-0-3-0", line_of("four", 5, job="78", epoch=3))
        assert "78/0  four" in shown.line()
        assert shown.end() == ""


def test_follow_survives_a_directory_that_vanishes_and_files_that_are_cut(tmp_path: Path) -> None:
    """A file server that is away for a while is waited for, and that is said once; what comes then is shown."""
    root = tmp_path / "run"
    root.mkdir()
    path = put(root, "77-0-0-1-0", line_of("one", 1))
    with following(root) as shown:
        assert "one" in shown.line()
        root.rename(tmp_path / "away")
        assert "cannot be looked at, waiting for it: No such file or directory" in shown.error()
        (tmp_path / "away").rename(root)
        assert "can be looked at again" in shown.error()
        put(root, "77-0-0-1-0", line_of("two", 2))
        assert "two" in shown.line()
        path.write_text(line_of("cut", 3))
        assert "cut" in shown.line()
        (root / "new").write_text(line_of("replaced", 4) + line_of("again", 5))
        (root / "new").replace(path)
        assert "replaced" in shown.line()
        assert "again" in shown.line()
        assert shown.end() == ""
