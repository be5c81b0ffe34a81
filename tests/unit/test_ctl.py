"""ckptctl: what it prints, and the exit status that a script acts on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ctl_stage import caller, committed, flip_a_bit

CTL = [sys.executable, "-m", "ckpt_supervisor.ctl"]


def journal_line(event: str, second: int, **fields: Any) -> str:
    """One line of a journal."""
    identity = {"job": "77", "attempt": 0, "step_id": "0", "epoch": 1, "task": 0, "host": "h", "pid": 5}
    stamp = f"2026-01-31T12:00:{second:02d}.000000Z"
    return json.dumps({"ts": stamp, "mono_ms": second * 1000, "event": event, "level": "info", **identity, **fields}) + "\n"


def write_journal(root: Path, name: str, *lines: str) -> Path:
    """A journal file with these lines."""
    path = root / "journal" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def test_nothing_there_is_1_and_could_not_look_is_3(call: Any, tmp_path: Path) -> None:
    """A script can tell an empty directory, or none, from one that does not answer."""
    (tmp_path / "empty").mkdir()
    unusable = tmp_path / ("x" * 300)
    for command in ("ls", "latest", "verify", "log", "prune", "repair"):
        for place in (tmp_path / "empty", tmp_path / "missing"):
            told = call(command, "--dir", place)
            assert (told.code, told.out) == (1, ""), command
            assert told.err.startswith("ckptctl: no ")
            assert str(place) in told.err
        told = call(command, "--dir", unusable)
        assert (told.code, told.out) == (3, ""), command
        assert "cannot be looked at: File name too long" in told.err
    (tmp_path / "file").touch()
    for command in ("ls", "latest", "verify", "log", "prune", "repair"):
        assert call(command, "--dir", tmp_path / "file").code == 1, command


def test_latest_prints_one_path_and_names_what_it_passed_over(call: Any, tmp_path: Path) -> None:
    """stdout is the path alone, for $(ckptctl latest); a flipped bit in a newer one is told on stderr; none intact is 1."""
    old, new = committed(tmp_path, 5), committed(tmp_path, 12)
    assert (call("latest", "--dir", tmp_path).out, call("latest", "--dir", tmp_path).code) == (f"{new}\n", 0)
    flip_a_bit(new / "state.pt")
    told = call("latest", "--dir", tmp_path)
    assert (told.code, told.out) == (0, f"{old}\n")
    assert told.err.startswith("ckptctl: passed over step-000000012: corrupt: state.pt")
    assert call("latest", "--dir", tmp_path, "--quick").out == f"{new}\n"
    assert call("latest", "--dir", tmp_path, "--json").values == [{"step": 5, "path": str(old)}]
    flip_a_bit(old / "state.pt")
    told = call("latest", "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert told.err.splitlines()[-1] == f"ckptctl: no intact checkpoint in {tmp_path}"


def test_wrong_usage_is_2_and_touches_nothing(call: Any, tmp_path: Path) -> None:
    """A time that is none, a step that is none, contradictions, numbers out of range, an unknown command or option."""
    committed(tmp_path, 5)
    before = sorted(tmp_path.iterdir())
    for words in (
        ["log", "--since", "soon"], ["verify", tmp_path, "--all"], ["verify", "--deep", "--quick"], ["verify", "newest"],
        ["show", "best"], ["show", "1e5"], ["keep", "step-5"], ["keep", "10**18"], ["keep", ""], ["keep", tmp_path / "best"],
    ):  # fmt: skip
        told = call(*words, "--dir", tmp_path)
        assert (told.code, told.out, told.err.count("\n")) == (2, "", 1), words
    for words in (
        [], ["lst"], ["ls", "--bogus"], ["log", "--rank", "x"], ["log", "--level", "loud"], ["show"], ["keep"],
        ["prune", "--keep", "0"], ["prune", "--keep", "-1"], ["prune", "--keep", "two"], ["prune", "--keep-every", "1.5"],
        ["ls", "--keep-every", "0"], ["show", "5", "--files", "9" * 30], ["verify", "--threads", "0"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            call(*words)
        assert caught.value.code == 2, words
    assert sorted(tmp_path.iterdir()) == before


def test_a_bad_variable_is_wrong_usage_only_where_it_counts(tmp_path: Path) -> None:
    """CKPT_SUPERVISE_KEEP=0 must not prune everything, and says which variable it is; `ls` does not need it."""
    for step in (5, 6, 7, 8):
        committed(tmp_path, step)
    env = {**os.environ, "CKPT_SUPERVISE_KEEP": "0"}
    done = run([*CTL, "prune", "--dir", str(tmp_path)], env)
    assert (done.returncode, done.stderr) == (2, b"ckptctl: CKPT_SUPERVISE_KEEP: '0' is not a whole number above 0\n")
    assert run([*CTL, "ls", "--dir", str(tmp_path)], env).returncode == 0
    done = run([*CTL, "prune", "--dry-run", "--dir", str(tmp_path)], {**env, "CKPT_SUPERVISE_KEEP": "1"})
    assert done.stdout.count(b"would go  ") == 3
    assert done.returncode == 0


def test_the_directory_comes_from_the_flag_the_variable_or_the_default(tmp_path: Path) -> None:
    """As for ckpt-supervise: --dir, else $CKPT_SUPERVISE_DIR, else ./checkpoints."""
    for name in ("flag", "variable", "checkpoints"):
        (tmp_path / name).mkdir()
        committed(tmp_path / name, 5)
    env = {**os.environ, "CKPT_SUPERVISE_DIR": "variable"}
    bare = {key: value for key, value in env.items() if key != "CKPT_SUPERVISE_DIR"}
    for words, environ, name in (
        (["--dir", "flag"], env, "flag"),
        ([], env, "variable"),
        ([], bare, "checkpoints"),
        ([], {**bare, "CKPT_SUPERVISE_DIR": ""}, "checkpoints"),
    ):
        environ["PYTHONPATH"] = absolute_path(environ.get("PYTHONPATH", ""))
        done = run([*CTL, "latest", *words], environ, tmp_path)
        assert done.stdout.decode() == f"{tmp_path / name / 'step-000000005'}\n", done.stderr


def absolute_path(text: str) -> str:
    """A PYTHONPATH that holds in every directory."""
    return os.pathsep.join(str(Path(part).absolute()) for part in text.split(os.pathsep) if part)


def run(argv: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """A process of its own."""
    return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, timeout=60, check=False)


def test_a_path_that_is_no_utf_8_is_printed_byte_for_byte(tmp_path: Path) -> None:
    """$(ckptctl latest) has to name a file that is there, whatever the locale."""
    place = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(place)  # noqa: PTH102 - a name in bytes
    committed(Path(os.fsdecode(place)), 5)
    done = run([*CTL, "latest", "--dir", os.fsdecode(place)])
    assert done.stdout == place + b"/step-000000005\n"


def test_log_merges_filters_and_counts_damage(call: Any, tmp_path: Path) -> None:
    """Lines of all attempts in order of time; torn and damaged ones are counted on stderr; nothing chosen is 1."""
    write_journal(tmp_path, "77-0-0-1-0.jsonl", journal_line("signal", 1), journal_line("commit", 5, round=3), '{"event": "to')
    write_journal(
        tmp_path, "77-1-0-2-0.jsonl",
        journal_line("signal", 3, attempt=1), "garbage\n", journal_line("phase", 4, level="debug"),
        journal_line("exit", 7, attempt=1, rank=1),
    )  # fmt: skip
    told = call("log", "--dir", tmp_path)
    assert told.code == 0
    assert [line.split()[3] for line in told.lines] == ["signal", "signal", "commit", "exit"]
    assert told.err == "ckptctl: 2 damaged or torn lines were skipped\n"
    for words, events in (
        (["--event", "exit", "--event", "commit"], ["commit", "exit"]),
        (["--attempt", "1"], ["signal", "exit"]),
        (["--rank", "1"], ["exit"]),
        (["--round", "3"], ["commit"]),
        (["--level", "debug", "--since", "2026-01-31T12:00:04"], ["phase", "commit", "exit"]),
        (["--until", "2026-01-31T12:00:03Z"], ["signal", "signal"]),
        (["--grep", "ROUND=3"], ["commit"]),
        (["--job", "78"], []),
    ):
        told = call("log", "--dir", tmp_path, "--json", *words)
        assert [value["event"] for value in told.values] == events, words
        assert told.code == (0 if events else 1)
    assert call("log", "--dir", tmp_path, "--json").values[0] == json.loads(journal_line("signal", 1))


@contextlib.contextmanager
def following(root: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A started `ckptctl log --follow`."""
    argv = [*CTL, "log", "--follow", "--dir", str(root), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Its next line (the test's own time limit is the bound)."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_follow_shows_lines_and_files_as_they_come_and_ends_with_130(tmp_path: Path) -> None:
    """It starts before there is anything, goes on through appended halves of a line, and ctrl-C ends it without a traceback."""
    with following(tmp_path, "--event", "commit") as process:
        path = write_journal(tmp_path, "77-0-0-1-0.jsonl", journal_line("signal", 1), journal_line("commit", 2, round=1))
        assert next_line(process).endswith("commit             round=1")
        line = journal_line("commit", 3, round=2)
        with path.open("a") as file:
            file.write(line[:20])
            file.flush()
            write_journal(tmp_path, "77-1-0-2-0.jsonl", journal_line("commit", 4, attempt=1, round=1))
            assert "77/1  commit" in next_line(process)
            file.write(line[20:])
        assert next_line(process).endswith("commit             round=2")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("count", [1, 50_000])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, count: int) -> None:
    """`ckptctl log | head -0`, with little and with much to say: status 0 and nothing on stderr."""
    write_journal(tmp_path, "77-0-0-1-0.jsonl", *(journal_line("signal", n % 60) for n in range(count)))
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        argv = [*CTL, "log", "--dir", str(tmp_path)]
        done = subprocess.run(argv, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("to", "status", "said"),
    [(">&-", 0, ""), ("> /dev/full", 3, "ckptctl: the output cannot be written: No space left on device\n")],
    ids=["closed", "full"],
)
@pytest.mark.parametrize("command", ["log", "ls"])
def test_an_output_that_is_closed_or_full_is_no_traceback(tmp_path: Path, command: str, to: str, status: int, said: str) -> None:
    """`ckptctl log >&-` as a daemon may have it, and a disk without room, which is not "nothing found"."""
    write_journal(tmp_path, "77-0-0-1-0.jsonl", *(journal_line("signal", n) for n in range(3)))
    committed(tmp_path, 5)
    line = f'"{sys.executable}" -m ckpt_supervisor.ctl {command} --dir "{tmp_path}" {to}'
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=False, text=True)
    assert (done.returncode, done.stderr) == (status, said)


def test_the_keys_of_the_json_are_those_of_the_document(call: Any, tmp_path: Path) -> None:
    """docs/store.md names each command's keys, in their order; a script can rely on them."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "store.md").read_text()
    rows = dict(line.strip("|").split("|", 1) for line in text.partition("| command | keys |")[2].splitlines() if "|" in line)
    described = {name: re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", keys)) for name, keys in rows.items()}
    committed(tmp_path, 5)
    both = described[" `ls`, `show` "]
    for words, keys in (
        (["ls"], both[: both.index("show")]),
        (["show", "5"], [key for key in both if key != "show"]),
        *(([name], described[f" `{name}` "]) for name in ("verify", "latest", "repair")),
        (["keep", "5"], described[" `keep` "]),
        (["prune", "--dry-run"], described[" `prune` "]),
    ):
        value = call(*words, "--dir", tmp_path, "--json").values[0]
        assert list(value) == keys, words
