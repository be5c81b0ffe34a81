"""ckptctl ls and show: what a cheap look says, in columns, in words and as JSON."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.core.policy import Cause
from ckpt_supervisor.store.layout import keep_name
from ckpt_supervisor.text import size_text
from ckpt_supervisor.view import checkpoints as view

from tests.support.ctl_stage import caller, committed

NOW = datetime(2026, 1, 31, 15, 0, tzinfo=timezone.utc)
READ_MAX = 1_000_000
CTL = [sys.executable, "-m", "ckpt_supervisor.ctl"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def manifest(**changes: Any) -> store.Manifest:
    """A manifest of step 1200, written three hours before NOW."""
    fields: dict[str, Any] = {
        "step": 1200, "world_size": 2, "ranks": (0, 1), "job": "77", "attempt": 2, "epoch": 5, "cause": "periodic",
        "created_at": "2026-01-31T12:00:00+00:00", "verified": "full",
        "files": tuple(store.FileEntry(f"rank-{n:05d}.pt", 1_000_000, "ab" * 16, n) for n in range(12)),
    }  # fmt: skip
    return store.Manifest(**{**fields, **changes})


def row(**changes: Any) -> view.Row:
    """A row of that manifest."""
    return view.Row(**{"kind": "checkpoint", "step": 1200, "path": "/d/step-000001200", "manifest": manifest(), **changes})


def on_a_terminal(argv: list[str], columns: int, **env: str) -> str:
    """What a command prints on a terminal of so many columns (the test's own time limit is the bound)."""
    ours, theirs = pty.openpty()
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    parts: list[bytes] = []

    def drain() -> None:
        while sum(map(len, parts)) < READ_MAX:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # EIO: the other side is closed (pty(7))
                return
            parts.append(part)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        subprocess.run(argv, stdout=theirs, stderr=theirs, env={**environ, "TERM": "xterm", **env}, timeout=60, check=False)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_ls_shows_the_newest_first_with_size_cause_and_verdict(call: Any, tmp_path: Path) -> None:
    """One row a checkpoint; a damaged one is named, not hidden; the last line says that no byte was read."""
    committed(tmp_path, 7)
    committed(tmp_path, 100, "structure")
    (committed(tmp_path, 30) / "state.pt").unlink()
    (tmp_path / keep_name(7)).touch()
    told = call("ls", "--dir", tmp_path, "--keep-every", "50")
    assert told.code == 0
    header, *rows = (line.split() for line in told.lines)
    assert header == ["STEP", "AGE", "SIZE", "RANKS", "CAUSE", "JOB", "VERDICT"]
    assert rows[0][:1] + rows[0][2:8] == ["100", "1.5", "kB", "1", "preempted", "77/2", "intact"]
    assert told.lines[1].endswith("intact   milestone, only its structure was verified")
    assert told.lines[2].endswith("missing  latest, state.pt: is not there")
    assert told.lines[3].endswith("intact   protected")
    assert told.lines[4:] == [
        "3 checkpoints, 4.5 kB", "Verdicts by names, sizes and manifests: no byte was read (ckptctl verify --all reads them)",
    ]  # fmt: skip
    records = call("ls", "--dir", tmp_path, "--json").values
    assert [record["step"] for record in records] == [100, 30, 7]
    assert [record["verdict"] for record in records] == ["intact", "missing", "intact"]
    assert records[0].pop("age_s") >= 0
    assert records[0] == {
        "step": 100, "kind": "checkpoint", "path": str(tmp_path / "step-000000100"), "verdict": "intact", "reason": None,
        "bytes": 1500, "ranks": [0], "world_size": 1, "created_at": "2026-01-31T12:00:00.000000+00:00", "cause": "preempted",
        "job": "77", "attempt": 2, "epoch": 2, "verified": "structure", "adopted": [], "latest": False, "protected": False,
        "milestone": False,
    }  # fmt: skip
    assert "state.pt" in records[1]["reason"]
    assert (records[1]["latest"], records[2]["protected"]) == (True, True)


def test_ls_all_shows_what_lies_beside_the_checkpoints(call: Any, tmp_path: Path) -> None:
    """Put aside, partial and on the way out: counted without --all, listed with it, and never called intact."""
    committed(tmp_path, 5)
    committed(tmp_path, 9).rename(tmp_path / store.damaged_name(9, 1, 0))
    for name in (store.partial_name(12, 3, 4), store.trash_name(2, 1, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(bytes(3_000))
    told = call("ls", "--dir", tmp_path)
    assert told.lines[-2] == "1 checkpoint, 1.5 kB (1 put aside as damaged, 1 partial, 1 on the way out: see --all)"
    told = call("ls", "--dir", tmp_path, "--all")
    assert [line.split()[0] for line in told.lines[1:5]] == ["12", "9", "5", "2"]
    assert told.lines[1].split() == ["12", "-", "3.0", "kB", "-", "-", "-", "partial", "epoch", "3"]
    assert told.lines[2].endswith("put aside  as damaged in its bytes: see ckptctl verify PATH")
    assert told.lines[5] == "1 checkpoint and 3 others, 9.0 kB"
    records = call("ls", "--dir", tmp_path, "--all", "--json").values
    assert [(one["kind"], one["verdict"], one["bytes"]) for one in records] == [
        ("partial", None, 3_000), ("damaged", None, 1_500), ("checkpoint", "intact", 1_500), ("trash", None, 3_000),
    ]  # fmt: skip
    assert len({tuple(one) for one in records}) == 1, "every record has all keys"


def test_the_longest_cause_is_shown_whole(call: Any, tmp_path: Path) -> None:
    """It is one of ours; what somebody else wrote there is cut."""
    committed(tmp_path, 5, cause=Cause.LIMIT_AHEAD.value)
    committed(tmp_path, 6, cause="x" * 99)
    lines = call("ls", "--dir", tmp_path).lines
    assert "x" * 27 + "…  " in lines[1]
    assert f"  {Cause.LIMIT_AHEAD.value} " in lines[2]


def test_ls_of_a_directory_with_nothing_but_traces_says_what_they_are(call: Any, tmp_path: Path) -> None:
    """No checkpoint is 1; that something was put aside is not hidden."""
    committed(tmp_path, 9).rename(tmp_path / store.damaged_name(9, 1, 0))
    told = call("ls", "--dir", tmp_path)
    assert (told.code, told.out) == (1, "")
    assert told.err == f"ckptctl: no checkpoints in {tmp_path} (1 put aside as damaged: see --all)\n"


@pytest.mark.parametrize(
    ("created_at", "age"),
    [
        ("2026-01-31T14:59:30+00:00", "30s"),
        ("2026-01-31T12:00:00.5+00:00", "2h"),
        ("2026-01-31T13:00:00Z", "2h"),
        ("2026-01-31T16:00:00+02:00", "1h"),
        ("2026-01-29T15:00:01", "47h"),
        ("2025-01-31T15:00:00+00:00", "365d"),
        ("2026-01-31T18:00:00+00:00", "0s"),
        ("yesterday", "-"),
        ("", "-"),
        ("0001-01-01T00:00:00+14:00", "739647d"),
    ],
)
def test_ages_are_short_and_never_negative(created_at: str, age: str) -> None:
    """By the clock of another host: ahead of ours is 0; one that cannot be read is no age."""
    one = manifest(created_at=created_at)
    assert view.age_text(one, NOW) == age
    assert view.words(row(manifest=one), "", view.Look(None, False, NOW))


def test_the_table_fits_the_terminal_and_keeps_step_size_and_verdict() -> None:
    """Wide: all of it. Narrow: job, cause and ranks give way, and the reason is cut with a mark."""
    damage = store.Finding(store.Verdict.TRUNCATED, "state.pt", 4096, "4096 bytes instead of 1500000")
    rows = [row(marks=("latest",)), row(problem=damage, step=7), row(manifest=None, problem=damage, step=123456789)]
    wide = view.table(rows, view.Look(None, False, NOW))
    assert wide[2].endswith("truncated  state.pt at byte 4096: 4096 bytes instead of 1500000")
    for width, columns in ((100, 7), (70, 6), (60, 5), (48, 4)):
        lines = view.table(rows, view.Look(width, False, NOW))
        assert max(map(len, lines)) <= max(width, 50), width
        assert len(lines[0].split()) == columns, lines[0]
        assert lines[0].split()[-1] == "VERDICT"
        assert all("…" in line for line in lines[2:])
        assert len({line.index("intact" if "intact" in line else "truncated") for line in lines[1:]}) == 1


def test_what_a_manifest_says_does_not_reach_the_terminal_raw() -> None:
    """Causes, jobs and file names may have been written by anybody: escapes are shown, not obeyed."""
    nasty = manifest(cause="\x1b[2J\nhello", job="\r\x07", created_at="\x1b]0;x\x07")
    look = view.Look(None, False, NOW)
    shown = [*view.table([row(manifest=nasty)], look), *view.words(row(manifest=nasty), "", look)]
    assert all(line.isprintable() for line in shown)
    assert "\\x1b[2J\\nhello" in "".join(shown)


def test_show_tells_everything_about_one_checkpoint(call: Any, tmp_path: Path) -> None:
    """By number, by name or by path; why, by whom, what it holds, and what the next start would do with it."""
    path = committed(tmp_path, 1200)
    committed(tmp_path, 1300)
    (tmp_path / keep_name(1200)).touch()
    by_number = call("show", "1200", "--dir", tmp_path)
    assert by_number.code == 0
    facts = dict(line.split(None, 1) for line in by_number.lines)
    assert by_number.lines[0] == f"step 1200  {path}"
    assert facts["verdict"] == "intact, by names and sizes; ckptctl verify reads the bytes"
    assert facts["saved"].startswith("2026-01-31 12:00:00 UTC (")
    assert (facts["cause"], facts["by"], facts["ranks"]) == ("preempted", "job 77, attempt 2, epoch 1", "all 1")
    assert facts["size"] == "1.5 kB in 1 file"
    assert facts["marks"] == "protected"
    assert facts["resume"] == "the next start takes step 1300; this one if 1 newer one would prove damaged"
    assert facts["files"].startswith("state.pt     1.5 kB  xxh3_128 ")
    assert call("show", path).out == by_number.out
    assert call("show", "step-000001200", "--dir", tmp_path).out == by_number.out
    newest = call("show", "latest", "--dir", tmp_path, "--json").values[0]
    assert newest["resume"] == "the next start resumes from this one, if its bytes are right"
    assert [file["path"] for file in newest["files"]] == ["state.pt"]


def test_show_of_what_is_not_intact_or_not_there_says_so_by_its_status(call: Any, tmp_path: Path) -> None:
    """1 and a reason; what was put aside or is being written can be looked at too."""
    (committed(tmp_path, 30) / "state.pt").write_bytes(b"short")
    told = call("show", "30", "--dir", tmp_path)
    assert told.code == 1
    assert "truncated, state.pt at byte 5: 5 bytes instead of 1500" in told.out
    assert "never, as it is: it is passed over" in told.out
    assert call("show", "31", "--dir", tmp_path).code == 1
    assert call("show", tmp_path / "step-000000031").err.endswith(f"no checkpoint {tmp_path}/step-000000031\n")
    partial = tmp_path / store.partial_name(40, 9, 1)
    partial.mkdir()
    told = call("show", partial)
    assert told.code == 0
    assert "being written, or left by a start that died" in told.out
    assert "only a committed checkpoint is resumed from" in told.out


def test_show_names_the_first_files_and_says_how_many_more() -> None:
    """Ten of twelve; --files and --json give them all."""
    lines = view.words(row(), "", view.Look(None, False, NOW))
    assert sum("xxh3_128" in line for line in lines) == 10
    assert lines[-1].strip() == "and 2 more (--files 12, or --json)"
    assert sum("xxh3_128" in line for line in view.words(row(), "", view.Look(None, False, NOW), files=12)) == 12


def test_an_adopted_one_and_one_of_rank_0_alone_are_told_apart() -> None:
    """`adopted` and `1 of 8` in the table; whose files it is a copy of in `show`."""
    one = row(manifest=manifest(ranks=(0,), world_size=8, adopted=("step_001200.pt",)))
    table = view.table([one], view.Look(None, False, NOW))
    assert "1 of 8" in table[1]
    assert table[1].endswith("intact  adopted")
    words = view.words(one, "", view.Look(None, False, NOW))
    assert any("a copy of step_001200.pt, which the program itself wrote" in line for line in words)
    assert any("1 of 8: 0" in line for line in words)


def test_colours_are_for_terminals_that_want_them(tmp_path: Path) -> None:
    """On a terminal, as wide as it is; not with NO_COLOR, not with TERM=dumb, never in a pipe."""
    committed(tmp_path, 5, cause="end of the time limit ahead")
    argv = [*CTL, "ls", "--dir", str(tmp_path)]
    coloured = on_a_terminal(argv, 60)
    assert "\x1b[32mintact\x1b[0m" in coloured
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = on_a_terminal(argv, 60, **env)
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines()[:2])) <= 60
    assert b"\x1b" not in subprocess.run(argv, capture_output=True, timeout=60, check=True).stdout


def test_a_thousand_checkpoints_are_listed_and_none_is_read(call: Any, tmp_path: Path) -> None:
    """No file but the manifests is opened: they may all be unreadable."""
    source = committed(tmp_path, 1)
    entry = store.read_manifest(source)
    for step in range(2, 51):  # The figure for a thousand is a bench's matter.
        path = tmp_path / store.step_name(step)
        path.mkdir()
        (path / "state.pt").symlink_to("/dev/full") if step % 10 == 0 else os.truncate(_touched(path / "state.pt"), 1500)
        changed = store.Manifest(**{name: getattr(entry, name) for name in entry.__struct_fields__} | {"step": step})
        (path / store.MANIFEST).write_bytes(store.encode_manifest(changed))
    records = call("ls", "--dir", tmp_path, "--json").values
    assert [record["step"] for record in records] == list(range(50, 0, -1))
    assert {record["step"] for record in records if record["verdict"] != "intact"} == {10, 20, 30, 40, 50}


def _touched(path: Path) -> Path:
    path.touch()
    return path


def test_sizes_and_counts_are_readable() -> None:
    """Decimal units, one digit."""
    assert [size_text(n) for n in (0, 999, 1_500, 2_000_000, 256 * 10**6, 1_234 * 10**9)] == [
        "0 B", "999 B", "1.5 kB", "2.0 MB", "256.0 MB", "1.2 TB",
    ]  # fmt: skip
    assert (view.counted(1, "file"), view.counted(2, "file")) == ("1 file", "2 files")
    assert view.listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_ages_of_a_future_clock_are_zero_in_json_too() -> None:
    """A script that computes with ages meets no negative one."""
    ahead = manifest(created_at=(NOW + timedelta(hours=5)).isoformat())
    assert view.record(row(manifest=ahead), NOW)["age_s"] == 0
