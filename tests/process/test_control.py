"""`ckptctl save` on a supervisor that runs: its owner is obeyed once, another user is not, and a run that is over says so."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_supervisor import store
from ckpt_supervisor.watches import control_files
from ckpt_supervisor.watches.control_files import Request

from tests.support.run import Run, environment, eventually, trained

CTL = [sys.executable, "-m", "ckpt_supervisor.ctl"]
NOBODY = 65_534
BOUND_S = 120
FOREVER = ("--steps", 1_000_000)

AS_NOBODY = """
import os, sys
from ckpt_supervisor.ctl import main as ctl
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(ctl.main(sys.argv[1:]))
"""
"""The virtual environment may lie where nobody cannot read it: what ckptctl needs is imported before."""

EARLY = (
    "import pwd, ckpt_supervisor.ctl.status, ckpt_supervisor.watches.control_files; "
    "import ckpt_supervisor.core.views, ckpt_supervisor.adapters.slurm"
)


def ctl(*words: object, program: list[str] = CTL, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """One call of ckptctl, as a process of its own."""
    argv = [*program, *map(str, words)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=BOUND_S, check=False)
    if code is not None:
        assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done


def saved(run: Run, *words: object) -> dict[str, Any]:
    """What `ckptctl save --wait --json` says of a save that succeeds."""
    (line,) = ctl("save", "--dir", run.dir, "--wait", "--json", *words, code=0).stdout.splitlines()
    value: dict[str, Any] = json.loads(line)
    assert value["result"] == "saved"
    return value


def test_its_owner_has_a_run_save_protect_and_save_at_another_interval(tmp_path: Path) -> None:
    """Training goes on, the step and the path are those of the journal, the mark is that of `ckptctl keep`."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(3)
        value = saved(run, "--protect")
        assert value["step"] == run.event("commit", result="committed")["step"]
        assert value["path"] == str(run.dir / f"step-{value['step']:09d}")
        assert store.kept_steps(run.dir) == {value["step"]}
        assert run.event("signal")["signal"] == "ckptctl save"
        asked = run.event("control_asked")
        assert (asked["what"], asked["protect"]) == ("save", True)
        assert (asked["from_host"], asked["who"]) == (os.uname().nodename, "root")
        assert run.event("control_done")["result"] == "saved"
        told = ctl("save", "--dir", run.dir, "--every", "90s", code=0)
        assert "saves every 90 s from now on" in told.stdout
        assert run.event("interval")["every_ms"] == 90_000
        told = ctl("status", "--dir", run.dir, code=0)
        assert re.search(r"^job local-\S+  (training|saving)", told.stdout)
        assert f"step {value['step']}" in told.stdout
        assert "every 1m 30s" in told.stdout
        run.reached(value["step"] + 5)
        eventually(lambda: not list((run.dir / "control").iterdir()), "nothing is left of the requests")


def test_leaving_after_the_save_loses_no_step(tmp_path: Path) -> None:
    """Status 75, the checkpoint is that of the last step; `save` on the run that is over is refused, with what became of it."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(3)
        step = saved(run, "--leave")["step"]
        assert run.code() == 75, run.story()
        assert run.toy_steps()[-1] == step
        assert run.intact() == [step]
        told = ctl("save", "--dir", run.dir, code=1)
        assert told.stdout == ""
        assert re.search(r"not asked: job local-\S+ has not run since \d{4}-.* UTC \(interrupted\): ", told.stderr)
        assert f"step {step} is committed" in told.stderr
        assert ctl("status", "--dir", run.dir, code=0).stdout.splitlines()[0].endswith("  interrupted")


def test_a_finished_run_is_refused_with_a_clear_word(tmp_path: Path) -> None:
    """Row 10: when it ended, and how."""
    with trained(tmp_path, "--steps", 5) as run:
        assert run.code() == 0, run.story()
        told = ctl("save", "--dir", run.dir, "--wait", code=1)
        assert re.search(r"has not run since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \(finished\)", told.stderr)
        assert not list((run.dir / "control").glob("*.json"))


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can reach. Not below tmp_path: each start of pytest, anybody's, closes what is above that."""
    with tempfile.TemporaryDirectory(prefix="ckpt-control-", ignore_cleanup_errors=True) as made:
        for place in (Path(made), *Path(made).parents):
            if place.stat().st_uid == os.geteuid() and place != place.parent:
                place.chmod(place.stat().st_mode | 0o011)
        yield Path(made)


def test_another_user_is_refused_and_what_he_writes_is_not_obeyed(open_place: Path) -> None:
    """Row 10, both ways: ckptctl tells nobody whose run it is, with and without a way in; and a file of his that got there, in
    the right form for the right start, is named in the journal and removed."""
    with trained(open_place, *FOREVER) as run:
        run.reached(3)
        eventually((run.dir / "control").exists, "DIR/control")
        nobody = [sys.executable, "-c", f"{EARLY}\n{AS_NOBODY}"]
        told = ctl("save", "--dir", run.dir, program=nobody, code=1)
        assert f"not asked: {run.dir} is in use by user root, and only the owner of a job may ask it to save" in told.stderr
        (run.dir / "control").chmod(0o777)
        assert "only the owner" in ctl("save", "--dir", run.dir, program=nobody, code=1).stderr
        holder = store.read_holder(run.dir)
        assert holder is not None
        theirs = Request(
            control_files.new_nonce(), holder.job, holder.step_id, holder.attempt, holder.epoch, "leave", "root", "here", ""
        )
        path = run.dir / "control" / f"{theirs.nonce}.json"
        write = f"import os\nos.setuid({NOBODY})\nopen({str(path)!r}, 'wb').write({msgspec.json.encode(theirs)!r})"
        subprocess.run([sys.executable, "-c", write], check=True, timeout=BOUND_S)
        refused = run.event("control_refused")
        assert refused["file"] == path.name
        assert refused["reason"] == f"it belongs to user {NOBODY}, and only the owner of the job may ask"
        assert not path.exists()
        assert run.events("control_asked") == []
        assert run.events("round_begun") == []
        saved(run)  # It is still its owner's.


def test_a_request_for_the_start_before_is_not_obeyed_by_the_next_one(tmp_path: Path) -> None:
    """Killed with a request before it and one taken: both get their last word from the next start; nothing is saved for them."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(3)
        run.event("rank_hello")  # The journal is told by a thread of its own, and says since when it does not run.
        control = run.dir / "control"
        eventually(control.exists, "DIR/control")
        holder = store.read_holder(run.dir)
        assert holder is not None
        run.process.kill()
        run.process.wait()
        late, taken = (
            Request(control_files.new_nonce(), holder.job, holder.step_id, 0, holder.epoch, "leave", "root", "here", "")
            for _ in range(2)
        )
        told = ctl("save", "--dir", run.dir, code=1)
        assert "UTC (lost)" in told.stderr
        control_files.post(run.dir, late)
        control_files.post(run.dir, taken)
        (control / f"{taken.nonce}.json").rename(control / f"{taken.nonce}.taken")
    with trained(tmp_path, *FOREVER) as run:
        run.event("rank_hello")  # The log of its steps has those of the start before, too.
        reasons = {
            one.nonce: eventually(lambda one=one: control_files.read_answer(run.dir, one.nonce), "an answer").reason  # type: ignore[misc]
            for one in (late, taken)
        }
        assert reasons[late.nonce].startswith(f"is for another start (epoch {holder.epoch}")
        assert reasons[taken.nonce] == "the supervisor that had taken it ended before it was done"
        assert saved(run)["step"] > 0
        assert [event["request"] for event in run.events("control_asked")] != [late.nonce]


def test_a_supervisor_that_does_not_answer_is_told_and_the_request_is_taken_back(tmp_path: Path) -> None:
    """Stopped, say: after 20 s nothing was asked, so that it does not save when nobody expects it any more."""
    with trained(tmp_path, *FOREVER) as run:
        run.reached(3)
        eventually((run.dir / "control").exists, "DIR/control")
        run.event("rank_hello")
        run.signal(signal.SIGSTOP)
        try:
            told = ctl("save", "--dir", run.dir, code=1)
        finally:
            run.signal(signal.SIGCONT)
        assert re.search(
            r"did not answer within [2-9]\d s, and the request was taken back; what is known of it: training", told.stderr
        )
        assert list((run.dir / "control").iterdir()) == []
        saved(run)
        assert len(run.events("control_asked")) == 1
