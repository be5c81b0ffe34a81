"""deploy/notify: the commands for --on-event, run as they are, with the standard library alone."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

NOTIFY = Path(__file__).resolve().parents[2] / "deploy" / "notify"


def run(name: str, line: bytes, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One event."""
    argv = [sys.executable, "-S", "-E", str(NOTIFY / name), *words]
    return subprocess.run(argv, input=line, capture_output=True, text=False, env={**env}, check=False, timeout=60)  # type: ignore[return-value]


def marked(directory: Path, *events: dict[str, Any]) -> dict[str, Any]:
    """The state file after these events."""
    for number, event in enumerate(events):
        line = {"ts": f"2026-11-26T15:47:3{number}.000000Z", "job": "77", "attempt": 1, **event}
        done = run("mark_preempted.py", json.dumps(line).encode(), CKPT_SUPERVISE_DIR=str(directory))
        assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((directory / "run-state.json").read_text())
    return found


STARTED = {"event": "command_started", "resume_step": -1}
NOTICE = {"event": "notice", "cause": "preempted"}
CRASH = {"event": "notice", "cause": "training failed"}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([STARTED], "running"),
        ([STARTED, NOTICE], "stopping"),
        ([STARTED, NOTICE, {"event": "notice_over", "reason": "no end is near"}], "running"),
        ([STARTED, NOTICE, {"event": "requeue", "result": "accepted"}], "preempted"),
        ([STARTED, NOTICE, {"event": "requeue", "result": "refused"}, {"event": "exit", "code": 75}], "preempted"),
        ([STARTED, NOTICE, {"event": "requeue", "result": "already pending"}, NOTICE], "preempted"),
        ([STARTED, NOTICE, {"event": "exit", "code": 85}], "preempted"),
        ([STARTED, CRASH, {"event": "requeue", "result": "refused"}, {"event": "exit", "code": 1}], "failed"),
        ([STARTED, CRASH, {"event": "requeue", "result": "accepted"}, {"event": "exit", "code": 1}], "failed"),
        ([STARTED, NOTICE, {"event": "exit", "code": 143}], "cancelled"),
        ([STARTED, {"event": "exit", "code": 76}], "preempted"),
        ([STARTED, {"event": "exit", "code": 0}], "finished"),
        ([STARTED, {"event": "exit", "code": 1}], "failed"),
        ([{"event": "refused", "text": "all are damaged"}], "failed"),
    ],
)
def test_a_run_is_what_its_end_says(tmp_path: Path, events: list[dict[str, Any]], state: str) -> None:
    """Preempted is not failed, whatever the status; cancelled is neither."""
    assert marked(tmp_path, *events)["state"] == state


def test_preemptions_are_counted_and_the_history_is_kept_over_attempts(tmp_path: Path) -> None:
    """With the step of the checkpoint that stands. An event that changes nothing leaves no trace."""
    once = [STARTED, NOTICE, {"event": "commit", "result": "committed", "step": 40}, {"event": "requeue", "result": "accepted"},
            {"event": "exit", "code": 75}, {"event": "hang_suspected"}]  # fmt: skip
    found = marked(tmp_path, *once, {"event": "command_started", "resume_step": 40}, *once[1:])
    assert (found["preemptions"], found["step"], found["state"]) == (2, 40, "preempted")
    assert [entry["state"] for entry in found["history"]] == ["running", "stopping", "preempted"] * 2
    assert found["history"][3]["reason"] == "from step 40"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-state.json"]
    assert (tmp_path / "run-state.json").stat().st_mode & 0o777 == 0o644


def test_a_damaged_state_file_is_begun_anew_and_a_damaged_line_is_refused(tmp_path: Path) -> None:
    """Neither is a reason to lose the state that comes."""
    (tmp_path / "run-state.json").write_bytes(b"\xff{")
    assert marked(tmp_path, STARTED)["state"] == "running"
    for line in (b"", b"{", b"\xff\xfe"):
        done = run("mark_preempted.py", line, CKPT_SUPERVISE_DIR=str(tmp_path))
        assert done.returncode == 1
    assert run("mark_preempted.py", b"[1]", CKPT_SUPERVISE_DIR=str(tmp_path)).returncode == 0
    assert marked(tmp_path)["state"] == "running"


def test_a_tracking_directory_may_be_elsewhere_and_new(tmp_path: Path) -> None:
    """One that cannot be made is told, as the supervisor's journal has what the command says."""
    assert run("mark_preempted.py", json.dumps(STARTED).encode(), "--state", str(tmp_path / "a" / "b")).returncode == 0
    assert json.loads((tmp_path / "a" / "b" / "run-state.json").read_text())["state"] == "running"
    (tmp_path / "file").write_text("")
    done = run("mark_preempted.py", json.dumps(STARTED).encode(), "--state", str(tmp_path / "file" / "b"))
    assert done.returncode == 1
    assert b"mark_preempted: " in bytes(done.stderr)  # type: ignore[arg-type]


def test_a_webhook_gets_one_line_of_text() -> None:
    """What happened to which job, and what the event says of it."""
    got: list[dict[str, Any]] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    # It goes on after whoever takes its port for somebody else's, and beside one who says nothing.
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        event = {"event": "leaving", "job": "77", "attempt": 2, "outcome": "fresh", "step": 40, "reason": ""}
        env = {"WEBHOOK_URL": f"http://127.0.0.1:{server.server_address[1]}/x", "NO_PROXY": "*"}
        try:
            assert run("post_webhook.py", json.dumps(event).encode(), **env).returncode == 0
        finally:
            server.shutdown()
            thread.join(60)
    assert got == [{"text": "job 77 (attempt 2): leaving: fresh, step 40"}]


def test_a_webhook_that_is_not_set_or_not_there_is_an_error_in_one_line() -> None:
    """Not a traceback in the journal."""
    for env in ({}, {"WEBHOOK_URL": "file:///etc/passwd"}, {"WEBHOOK_URL": "http://127.0.0.1:9/", "NO_PROXY": "*"}):
        done = run("post_webhook.py", b'{"event": "exit"}', **{**env, "PATH": os.environ["PATH"]})
        assert done.returncode == 1
        assert bytes(done.stderr).count(b"\n") == 1  # type: ignore[arg-type]
