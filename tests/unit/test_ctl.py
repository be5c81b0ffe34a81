"""ckptctl: what it prints, and the exit status that a script acts on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import ctl, store

CTL = [sys.executable, "-m", "ckpt_supervisor.ctl"]


def committed(root: Path, step: int, mode: store.Mode = "full") -> Path:
    """A committed checkpoint of this step with one file of 1500 bytes."""
    epoch = store.take_epoch(root, "77", 2, "0").epoch
    partial = store.make_partial(root, step, epoch, 1)
    data = f"state of step {step:06d}".encode() * 75  # 1500 bytes
    (partial / "state.pt").write_bytes(data)
    report, entries = store.check_files(partial, [store.Expected("state.pt", len(data), "", 0)], mode)
    manifest = store.Manifest(
        step=step, world_size=1, ranks=(0,), job="77", attempt=2, epoch=epoch, cause="preempted",
        created_at="2026-01-31T12:00:00.000000+00:00", verified=mode, files=entries,
    )  # fmt: skip
    outcome = store.commit(root, partial, manifest)
    assert isinstance(outcome, store.Committed), (report, outcome)
    return outcome.path


def flip_a_bit(path: Path) -> None:
    """Damage that only reading every byte finds."""
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


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


class Told:
    """What one call of ckptctl came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()

    @property
    def values(self) -> list[Any]:
        """The JSON values, one a line."""
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""

    def run(*words: object) -> Told:
        capsys.readouterr()
        code = ctl.main([str(word) for word in words])
        return Told(code, *capsys.readouterr())

    return run


def test_nothing_there_is_1_and_could_not_look_is_3(call: Any, tmp_path: Path) -> None:
    """A script can tell an empty directory, or none, from one that does not answer."""
    (tmp_path / "empty").mkdir()
    unusable = tmp_path / ("x" * 300)
    for command in ("ls", "latest", "verify", "log"):
        for place in (tmp_path / "empty", tmp_path / "missing"):
            told = call(command, "--dir", place)
            assert (told.code, told.out) == (1, ""), command
            assert told.err.startswith("ckptctl: no ")
            assert str(place) in told.err
        told = call(command, "--dir", unusable)
        assert (told.code, told.out) == (3, ""), command
        assert "cannot be looked at: File name too long" in told.err


def test_ls_shows_the_newest_first_with_size_cause_and_verdict(call: Any, tmp_path: Path) -> None:
    """One row a checkpoint; a damaged one is named, not hidden."""
    committed(tmp_path, 7)
    committed(tmp_path, 100, "structure")
    (committed(tmp_path, 30) / "state.pt").unlink()
    told = call("ls", "--dir", tmp_path)
    assert told.code == 0
    header, *rows = (line.split() for line in told.lines)
    assert header == ["STEP", "SIZE", "RANKS", "CREATED", "CAUSE", "JOB", "CHECKED", "VERDICT"]
    assert rows[0] == ["100", "1.5", "kB", "1", "2026-01-31", "12:00:00", "preempted", "77/2", "structure", "intact"]
    assert rows[1][:1] == ["30"]
    assert "missing" in told.lines[2]
    assert rows[2][-2:] == ["full", "intact"]
    records = call("ls", "--dir", tmp_path, "--json").values
    assert [record["step"] for record in records] == [100, 30, 7]
    assert [record["verdict"] for record in records] == ["intact", "missing", "intact"]
    assert records[0] == {
        "step": 100, "path": str(tmp_path / "step-000000100"), "verdict": "intact", "bytes": 1500, "ranks": [0], "world_size": 1,
        "created_at": "2026-01-31T12:00:00.000000+00:00", "cause": "preempted", "job": "77", "attempt": 2,
        "verified": "structure",
    }  # fmt: skip
    assert "state.pt" in records[1]["reason"]


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


def test_verify_reads_the_newest_one_that_one_or_all_of_them(call: Any, tmp_path: Path) -> None:
    """0 only if everything that was asked for is intact."""
    old, new = committed(tmp_path, 5), committed(tmp_path, 12)
    told = call("verify", "--dir", tmp_path)
    assert told.code == 0
    assert told.lines[0].startswith(f"{new}: intact (1.5 kB read")
    flip_a_bit(old / "state.pt")
    assert call("verify", "--dir", tmp_path).code == 0
    told = call("verify", old)
    assert (told.code, told.lines[0].split(" (")[0]) == (1, f"{old}: corrupt")
    assert told.lines[1].startswith("  state.pt: corrupt: ")
    assert call("verify", old, "--quick").code == 0
    told = call("verify", "--all", "--dir", tmp_path, "--json")
    assert told.code == 1
    assert [value["verdict"] for value in told.values] == ["intact", "corrupt"]
    assert told.values[1]["findings"][0] | {"reason": ""} == {
        "verdict": "corrupt", "path": "state.pt", "offset": None, "reason": "",
    }  # fmt: skip
    assert call("verify", tmp_path / "step-000000099").code == 1
    assert call("verify", tmp_path / "latest").code == 0


def test_wrong_usage_is_2(call: Any, tmp_path: Path) -> None:
    """A time that is none, a path and --all together, an unknown command or option."""
    assert call("log", "--since", "soon", "--dir", tmp_path).code == 2
    assert call("verify", tmp_path, "--all").code == 2
    for words in ([], ["lst"], ["ls", "--bogus"], ["log", "--rank", "x"], ["log", "--level", "loud"]):
        with pytest.raises(SystemExit) as caught:
            call(*words)
        assert caught.value.code == 2


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
        assert process.wait(30) == 130
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


def test_sizes_are_readable() -> None:
    """Decimal units, one digit."""
    assert [ctl.size_text(n) for n in (0, 999, 1_500, 2_000_000, 256 * 10**6, 1_234 * 10**9)] == [
        "0 B", "999 B", "1.5 kB", "2.0 MB", "256.0 MB", "1.2 TB",
    ]  # fmt: skip
