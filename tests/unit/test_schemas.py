"""docs/schemas: what ckptctl prints with --json is what the schemas say, for whole directories, damaged ones and empty ones.

The same for runs that are at work is in tests/process/test_json.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.ctl import main as ctl

from tests.support import many_lines
from tests.support.ctl_stage import Told, caller, committed, flip_a_bit, leave
from tests.support.schemas import SCHEMAS, held

NO_JSON = {"completion"}
"""A script for a shell is no JSON."""

OPEN = {"log": [()], "status": [("ended",)], "timeline": [("totals", "ended")], "report": [("totals", "ended")]}
"""Where a schema takes keys that it does not name: fields of events, and ways to end."""

HEAD = {"job": "77", "attempt": 0, "step_id": "0", "epoch": 1, "task": 0, "host": "node7", "pid": 4242, "v": 1, "level": "info"}
STORY: list[dict[str, Any]] = [
    {"event": "command_started", "command": ["python"], "resume_step": -1, "restart": 0},
    {"event": "rank_hello", "rank": 0, "world_size": 1},
    {"event": "recalled", "level": "debug", "timeouts": 1, "crashes": 0, "stalled": 0},
    {"event": "interval", "every_ms": 600_000, "why": "auto", "cost_ms": 2_100, "mtbi_ms": 21_600_000},
    {"event": "round_begun", "round": 1, "why": "periodic"},
    {"event": "agreed", "round": 1, "step": 300},
    {"event": "commit", "round": 1, "step": 300, "result": "committed", "save_ms": 900},
    {"event": "warning", "level": "warning", "text": "the disk is slow"},
    {"event": "notice", "cause": "preempted", "by": "SIGTERM", "left_ms": 30_000},
    {"event": "leaving", "outcome": "fresh", "step": 300},
    {"event": "requeue", "result": "accepted"},
    {"event": "exit", "code": 75, "line": "preempted; step 300 is committed"},
]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls ckptctl in this process, with a state directory of its own and no Slurm."""
    monkeypatch.setenv("CKPT_SUPERVISE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return caller(capsys)


def valid(told: Told, command: str, lines: int | None = None) -> list[dict[str, Any]]:
    """The values of the output, each held to the schema; so many, at least one if nothing is said."""
    values = held(command, told.lines)
    assert len(values) == lines if lines is not None else values, told.err
    return values


def journal(root: Path, lines: list[dict[str, Any]], torn: bytes = b"", epoch: int = 1) -> Path:
    """The journal of one start of job 77, a minute between its lines."""
    place = root / "journal" / f"77-0-0-{epoch}-0.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    data = b""
    for n, line in enumerate(lines):
        stamp = {"ts": f"2026-01-31T12:{n:02d}:00.000000Z", "mono_ms": n * 60_000}
        data += json.dumps({**stamp, **HEAD, "epoch": epoch, **line}).encode() + b"\n"
    place.write_bytes(data + torn)
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints, one of them damaged in its bytes and one in its size, what lies beside them, and a journal."""
    place = tmp_path / "ckpt"
    place.mkdir()
    committed(place, 100)
    flip_a_bit(committed(place, 200) / "state.pt")
    (committed(place, 300) / "state.pt").write_bytes(b"short")
    store.make_partial(place, 400, store.take_epoch(place, "77", 0, "0").epoch, 1)
    (place / "step-000000500").mkdir()
    leave(place)
    journal(place, STORY)
    return place


def commands() -> dict[str, Any]:
    """Name and parser of each command."""
    return dict(ctl._parser()[1])


def objects(of: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every object that a schema describes, and where."""
    if "properties" in of or of.get("type") == "object":
        yield at, of
    for name, inner in of.get("properties", {}).items():
        yield from objects(inner, (*at, name))
    for inner in of.get("$defs", {}).values():
        yield from objects(inner, at)
    if "items" in of:
        yield from objects(of["items"], (*at, "[]"))


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    """What `ckptctl --help` lists, but for those that print no JSON."""
    named = {path.name.removeprefix("ckptctl-").removesuffix(".json") for path in SCHEMAS.iterdir()}
    assert named == set(commands()) - NO_JSON
    text = (SCHEMAS.parent / "json.md").read_text()
    assert set(re.findall(r"\(schemas/ckptctl-(\w+)\.json\)", text)) == named


@pytest.mark.parametrize("path", sorted(SCHEMAS.iterdir()), ids=lambda path: path.stem)
def test_a_schema_is_one_and_describes_every_key(path: Path) -> None:
    """JSON Schema 2020-12; no key without words, and none that is not named, but where that is said."""
    whole = json.loads(path.read_text())
    assert whole["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(whole)
    command = path.stem.removeprefix("ckptctl-")
    assert whole["title"] == f"ckptctl {command} --json"
    opened = [at for at, one in objects(whole) if one.get("additionalProperties") is not False]
    assert opened == OPEN.get(command, [])
    for at, one in objects(whole):
        for name, inner in one.get("properties", {}).items():
            assert inner.get("description") or "$ref" in inner, (at, name)


def test_looking_at_checkpoints(call: Any, root: Path) -> None:
    """ls, latest, show and verify, of whole ones and of what is damaged, foreign, partial and nothing."""
    rows = valid(call("ls", "--dir", root, "--json"), "ls", 4)
    assert {row["verdict"] for row in rows} == {"intact", "truncated", "foreign"}
    valid(call("ls", "--dir", root, "--json", "--all"), "ls", 5)
    valid(call("latest", "--dir", root, "--json"), "latest", 1)
    for name in sorted(path.name for path in root.iterdir() if "step-" in path.name):
        valid(call("show", root / name, "--json"), "show", 1)
    told = call("verify", "--all", "--dir", root, "--json")
    assert {value["verdict"] for value in valid(told, "verify", 4)} == {"intact", "corrupt", "truncated", "foreign"}
    (root / "theirs.safetensors").write_bytes(b"not at all")
    valid(call("verify", root / "theirs.safetensors", "--json"), "verify", 1)
    valid(call("verify", root / "step-000000999", "--json"), "verify", 1)


def test_changing_checkpoints(call: Any, root: Path) -> None:
    """keep, prune and repair, planned and done."""
    valid(call("keep", 100, "--dir", root, "--json"), "keep", 1)
    valid(call("keep", 200, "--dir", root, "--json"), "keep", 0)
    valid(call("prune", "--keep", 1, "--dir", root, "--json", "--dry-run"), "prune", 4)
    valid(call("repair", "--dir", root, "--json", "--dry-run"), "repair")
    done = valid(call("repair", "--dir", root, "--json"), "repair")
    assert {value["action"] for value in done} >= {"renamed", "removed", "left"}
    for step in (600, 700):
        committed(root, step)
    assert {value["action"] for value in valid(call("prune", "--keep", 1, "--dir", root, "--json"), "prune")} >= {"gone", "stays"}
    valid(call("ls", "--dir", root, "--json", "--all"), "ls")


def test_a_manifest_of_anybody(call: Any, tmp_path: Path) -> None:
    """Words of a manifest may be any, and are passed on; what is no manifest is damage."""
    committed(tmp_path, 5, created_at="yesterday", job="\x1b[31m", cause="<b>")
    (committed(tmp_path, 6) / store.MANIFEST).write_bytes(b"{}")
    (committed(tmp_path, 7) / store.MANIFEST).write_bytes(b"\xff" * 100)
    leave(tmp_path)
    assert [row["age_s"] for row in valid(call("ls", "--dir", tmp_path, "--json"), "ls", 3)] == [None] * 3
    for step in (5, 6, 7):
        valid(call("show", step, "--dir", tmp_path, "--json"), "show", 1)


HOSTILE: list[dict[str, Any]] = [
    {"event": "recalled", "timeouts": "many", "crashes": -1, "stalled": None},
    {"event": "interval", "every_ms": "often", "why": ["a"], "cost_ms": 1.5, "mtbi_ms": {}},
    {"event": "command_started", "resume_step": "x"},
    {"event": "agreed", "step": "x"},
    {"event": "commit", "step": None, "result": 5},
    {"event": "warning", "level": "warning", "text": {"a": 1}},
    {"event": "notice", "cause": 7},
    {"event": "exit", "code": "75", "line": None},
]


@pytest.mark.parametrize("lines", [STORY, STORY[:6], STORY[:1], [], HOSTILE, [*STORY[:6], *HOSTILE]], ids=range(6))
def test_a_job(call: Any, root: Path, lines: list[dict[str, Any]]) -> None:
    """status and save, over journals that end anywhere, are torn, or hold what nobody has written."""
    journal(root, lines, torn=b'{"ts": "2026-01-31T13:00:00')
    valid(call("status", "--dir", root, "--json"), "status", 1)
    leave(root, epoch=1)
    valid(call("status", "77", "--dir", root, "--json"), "status", 1)
    (value,) = valid(call("save", "--dir", root, "--json"), "save", 1)
    assert value["result"] == "refused"


def test_a_job_that_runs(call: Any, tmp_path: Path) -> None:
    """With a next save; its process is this one, so that it is seen alive."""
    committed(tmp_path, 300, created_at=datetime.now(timezone.utc).isoformat())
    epoch = store.take_epoch(tmp_path, "77", 0, "0").epoch
    journal(tmp_path, [*STORY[:7], {"event": "round_committed", "round": 1, "step": 300}], epoch=epoch)
    (value,) = valid(call("status", "--dir", tmp_path, "--json"), "status", 1)
    assert (value["state"], value["next_save_at"]) == ("training", "2026-01-31T12:17:00Z")


def drawn(call: Any, root: Path, *job: str) -> None:
    """timeline, why and report hold to their schemas."""
    place = ("--dir", root, "--json")
    runs = valid(call("timeline", *job, *place), "timeline")
    valid(call("report", *job, *place), "report", 1)
    valid(call("why", *job, *place, "--no-slurm"), "why")
    for run in runs:
        for label in {one["label"] for one in run["attempts"] if one["job"] == run["jobs"][0]}:
            valid(call("why", run["jobs"][0], *place, "--no-slurm", "--attempt", label), "why", 1)


@pytest.mark.parametrize("lines", [STORY, STORY[:6], STORY[:1], HOSTILE, [*STORY[:6], *HOSTILE]], ids=range(5))
def test_what_is_drawn_from_one_journal(call: Any, root: Path, lines: list[dict[str, Any]]) -> None:
    """timeline, why and report, over journals that end anywhere, are torn, or hold what nobody has written."""
    journal(root, lines, torn=b'{"ts": "2026-01-31T13:00:00')
    drawn(call, root)
    drawn(call, root, "77")


def test_what_is_drawn_from_a_long_run(call: Any, tmp_path: Path) -> None:
    """Every cause, several tasks, two jobs; files that are cut, flipped, or not there."""
    many_lines.write(tmp_path, lines=6_000, tasks=3, attempts=12)
    drawn(call, tmp_path)
    files = sorted((tmp_path / "journal").iterdir())
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[len(data) * number // len(files)] ^= 4
        file.write_bytes(data[: len(data) - 37 * (number % 3)])
    files[4].unlink()
    files[-2].write_bytes(b"")
    many_lines.write(tmp_path, lines=500, tasks=1, attempts=3, job="5000", first_epoch=50)
    drawn(call, tmp_path)
    drawn(call, tmp_path, "5000")


def test_the_log(call: Any, root: Path) -> None:
    """Every line as it was written; what is torn or no JSON is passed over."""
    path = journal(root, STORY, torn=b'{"ts": ')
    data = bytearray(path.read_bytes())
    data[5:9] = b"\0\xff\n\n"
    path.write_bytes(data)
    valid(call("log", "--dir", root, "--json", "--level", "debug"), "log", len(STORY) - 1)
    valid(call("log", "--dir", root, "--json", "--event", "nothing"), "log", 0)


def test_the_doctor(call: Any, root: Path) -> None:
    """On a directory, and on a script."""
    script = root / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --time=1:00:00\nckpt-supervise -- python train.py\n")
    valid(call("doctor", "--dir", root, "--json"), "doctor")
    found = valid(call("doctor", "--script", script, "--dir", root, "--json"), "doctor")
    assert any(one["severity"] in ("error", "warning") for one in found)


def test_the_drill(call: Any, tmp_path: Path) -> None:
    """A command that is no training fails it, and says so in the same shape."""
    told = call("drill", "--path", "crash", "--scratch", tmp_path, "--json", "--", "true")
    (value,) = valid(told, "drill", 1)
    assert not value["passed"]


@pytest.mark.parametrize("command", sorted(set(commands()) - NO_JSON - {"doctor", "drill"}))
def test_nothing_is_printed_where_there_is_nothing(call: Any, tmp_path: Path, command: str) -> None:
    """An empty directory and a missing one: a line on stderr, the exit status, and no value that could be taken for one."""
    (tmp_path / "empty").mkdir()
    more = ["5"] if command in ("show", "keep") else []
    for name, codes in (("empty", {1}), ("missing", {1}), ("x" * 300, {1, 3})):
        told = call(command, *more, "--dir", tmp_path / name, "--json")
        assert (told.code in codes, told.out) == (True, ""), (name, told.code, told.out)
        assert told.err.startswith("ckptctl: ")
