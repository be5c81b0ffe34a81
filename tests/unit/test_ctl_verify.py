"""ckptctl verify: what is read, how it is told, and the exit status that a script acts on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.ctl.look import status_of
from ckpt_supervisor.ctl.words import EXIT_INTERRUPTED, Interrupt, interruptible, locate
from ckpt_supervisor.view.progress import Bar, span_text

from tests.support.ctl_stage import caller, committed, flip_a_bit
from tests.support.proc_stage import until

CTL = [sys.executable, "-m", "ckpt_supervisor.ctl"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls ckptctl in this process."""
    return caller(capsys)


def test_verify_reads_the_newest_one_that_one_or_all_of_them(call: Any, tmp_path: Path) -> None:
    """0 only if everything that was asked for is intact."""
    old, new = committed(tmp_path, 5), committed(tmp_path, 12)
    told = call("verify", "--dir", tmp_path)
    assert told.code == 0
    assert told.lines[0].startswith(f"{new}: intact (1.5 kB read")
    flip_a_bit(old / "state.pt")
    assert call("verify", "--dir", tmp_path).code == 0
    for words in ([old], [5, "--dir", tmp_path], ["step-000000005", "--dir", tmp_path], [12, 5, "--dir", tmp_path]):
        told = call("verify", *words)
        line = next(line for line in told.lines if line.startswith(f"{old}: "))
        assert (told.code, line.split(" (")[0]) == (1, f"{old}: corrupt"), words
        assert any(line.startswith("  state.pt: corrupt: ") for line in told.lines)
    assert call("verify", old, "--quick").code == 0
    told = call("verify", "--all", "--dir", tmp_path)
    assert told.lines[-1].startswith("2 checked: 1 intact, 1 corrupt; 3.0 kB read")
    told = call("verify", "--all", "--dir", tmp_path, "--json")
    assert told.code == 1
    assert [value["verdict"] for value in told.values] == ["intact", "corrupt"]
    assert told.values[1]["findings"][0] | {"reason": ""} == {
        "verdict": "corrupt", "path": "state.pt", "offset": None, "reason": "",
    }  # fmt: skip
    assert list(told.values[0]) == ["path", "step", "verdict", "mode", "bytes_read", "seconds", "findings", "unchecked"]
    assert [value["step"] for value in told.values] == [12, 5]
    assert call("verify", tmp_path / "step-000000099").code == 1
    assert call("verify", 99, "--dir", tmp_path).code == 1
    assert call("verify", tmp_path / "latest").code == 0


def test_verify_deep_takes_what_somebody_else_wrote(call: Any, tmp_path: Path) -> None:
    """A file or a directory without a manifest of ours is judged by what it says of itself."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(range(16))
    for name, data, code in (("good", whole, 0), ("cut", whole[:-1], 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
        for path in (tmp_path / name, tmp_path / name / "model.safetensors"):
            told = call("verify", "--deep", path)
            assert told.code == code, (path, told.out)
            assert told.lines[0].startswith(f"{path}: {'truncated' if code else 'intact'} (")


def test_verify_deep_reads_the_checksums_inside_too(call: Any, tmp_path: Path) -> None:
    """What is intact by its digest is so deeply as well; a name with a step but no manifest stays foreign."""
    path = committed(tmp_path, 5)
    assert call("verify", "--deep", path).code == 0
    (path / store.MANIFEST).unlink()
    told = call("verify", "--deep", path)
    assert (told.code, told.lines[0].split(" (")[0]) == (1, f"{path}: foreign")


def test_every_verdict_has_its_status() -> None:
    """0 intact, 3 could not look, 1 everything else; of several the highest counts."""
    assert {verdict.value: status_of(verdict) for verdict in store.Verdict} == {
        "intact": 0, "missing": 1, "truncated": 1, "corrupt": 1, "mixed": 1, "foreign": 1, "unknown": 3,
    }  # fmt: skip


def test_a_step_or_path_is_a_number_a_name_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is a step of DIR; a name is looked for here first, where a person has it from completion, then in DIR."""
    runs = tmp_path / "runs"
    runs.mkdir()
    path = committed(runs, 1200)
    for text in ("1200", "0001200", "step-000001200", "latest", str(path), f"{path}/", str(runs / "latest")):
        place = locate(text, runs)
        assert place is not None, text
        assert (place.root.resolve(), place.path.resolve(), place.step) == (runs, path, 1200), text
    assert locate("step-000009999", runs) == locate("9999", runs)
    assert locate("step-000001200/", runs) == locate("1200", runs)
    for text in ("", "best", "step-12", "-5", "1_200", "1e3", "٣", "1" * 19):
        assert locate(text, runs) is None, text
    monkeypatch.chdir(runs)
    assert locate("step-000001200", Path("checkpoints")) == locate(str(path), runs)


def drawn(width: int | None, times: list[float], encoding: str = "utf-8") -> str:
    """What a bar draws when it is called at these times, a tenth of the work further each time."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    clock = iter([0.0, *times])
    bar = Bar(stream, "step-000001200", width, lambda: next(clock))
    for number in range(1, len(times) + 1):
        bar(number * 10**9, 10**10)
    bar.clear()
    stream.seek(0)
    return stream.read()


def test_a_long_look_draws_a_bar_on_a_terminal_and_leaves_nothing_behind() -> None:
    """Bytes, share, rate and time left; nothing in the first moments, nothing too often, never wider than the terminal."""
    text = drawn(100, [0.1, 0.2, 0.5, 0.55, 2.0])
    frames = text.split("\r")[1:]
    assert len(frames) == 4
    assert frames[0].startswith("step-000001200  █████")
    assert frames[0].rstrip().endswith(" 30 %  3.0 GB of 10.0 GB  6.00 GB/s  1 s left")
    assert frames[1].rstrip().endswith(" 50 %  5.0 GB of 10.0 GB  2.50 GB/s  2 s left")
    assert frames[2:] == [" " * len(frames[1]), ""]
    for width in (40, 60, 80, 200):
        assert max(map(len, drawn(width, [1.0, 2.0]).split("\r"))) < width
    assert "█" not in drawn(100, [1.0], "ascii")
    assert "###" in drawn(100, [1.0, 2.0, 3.0], "ascii")
    assert drawn(100, [0.05, 0.1, 0.2]) == ""


def test_a_long_look_without_a_terminal_says_a_line_now_and_then() -> None:
    """At most each ten seconds, whole lines without a carriage return: it goes to a batch job's log."""
    text = drawn(None, [1.0, 9.9, 10.0, 15.0, 21.0])
    assert text.splitlines() == [
        "ckptctl: step-000001200:  30 %  3.0 GB of 10.0 GB  0.30 GB/s  23 s left",
        "ckptctl: step-000001200:  50 %  5.0 GB of 10.0 GB  0.24 GB/s  21 s left",
    ]


def test_a_bar_is_never_above_all_of_it() -> None:
    """A damaged file is read twice, to say where; an empty checkpoint has nothing to divide by."""
    stream = io.StringIO()
    clock = iter([0.0, 1.0, 2.0])
    bar = Bar(stream, "x", None, lambda: 100 * next(clock))
    bar(30, 10)
    bar(0, 0)
    assert stream.getvalue().count("100 %") == 2
    assert [span_text(s) for s in (0.4, 59.4, 125, 3_600 * 30)] == ["0 s", "59 s", "2 min 05 s", "30 h 00 min"]


def test_the_first_ctrl_c_ends_a_look_in_order() -> None:
    """It is a flag for the reading threads; the second one is Python's own again, and so is the handler afterwards."""
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(0.01)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is before
    assert isinstance(stop, Interrupt)


def test_ctrl_c_during_verify_is_130_without_a_traceback(tmp_path: Path) -> None:
    """A checkpoint of sparse gigabytes is being read when it comes; no verdict is told of what was not read to its end."""
    path = committed(tmp_path, 5)
    size = 40 * 10**9
    os.truncate(path / "state.pt", size)
    entry = store.read_manifest(path)
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    changed = store.Manifest(**fields | {"files": (store.FileEntry("state.pt", size, "0" * 32, 0),)})
    (path / store.MANIFEST).write_bytes(store.encode_manifest(changed))
    process = subprocess.Popen([*CTL, "verify", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        until(lambda: b"state.pt" in _open_files(process.pid), "the file is being read")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (EXIT_INTERRUPTED, b"", b"")


def _open_files(pid: int) -> bytes:
    """Names of what a process has open; empty when it is gone."""
    place = Path(f"/proc/{pid}/fd")
    try:
        return b" ".join([os.fsencode(path.readlink()) for path in place.iterdir()])
    except OSError:
        return b""
