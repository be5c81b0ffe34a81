"""The doctor's probe on file systems that lack something or hang, and the command's exit statuses; strace is the file system.

Owns: that a look never hangs, changes nothing and leaves nothing behind. Must not: need Slurm; tests/slurm/test_doctor.py does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor.doctor import look, probe
from ckpt_supervisor.doctor.facts import Place

from tests.support import syscalls
from tests.support.ctl_stage import committed

PROBE = [sys.executable, "-m", "ckpt_supervisor.doctor.probe"]
CTL = [sys.executable, "-m", "ckpt_supervisor.ctl", "doctor"]
CALLS = "fsync,rename,renameat,renameat2,mkdir,symlink,symlinkat"


def probed(root: Path, *inject: str) -> Place:
    """What the probe says while strace answers these calls in the kernel's place."""
    syscalls.need_strace()
    faults = [word for what in inject for word in ("-e", f"inject={what}")]
    words = ["strace", "-f", "-o", os.devnull, "-e", f"trace={CALLS}", *faults]
    done = subprocess.run([*words, *PROBE, str(root)], capture_output=True, timeout=60, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Place)


def doctor(*words: str, path: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, without Slurm."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CKPT", "TMPDIR"))}
    if path is not None:
        kept["PATH"] = path
    return subprocess.run([*CTL, *words], env={**kept, **env}, capture_output=True, text=True, timeout=60, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """By id, of --json."""
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(json.loads(line)["id"], json.loads(line))
    return found


@pytest.mark.parametrize(
    ("inject", "field", "says"),
    [
        ("fsync:error=EINVAL", "fsync", "EINVAL"),
        ("rename:error=EXDEV", "rename", "EXDEV"),
        ("rename:retval=0", "rename", "does not show"),
        ("symlink:error=EPERM", "links", "EPERM"),
        ("mkdir:error=EROFS", "write", "EROFS"),
    ],
)
def test_a_file_system_that_lacks_what_a_commit_needs_is_found(tmp_path: Path, inject: str, field: str, says: str) -> None:
    """Each by trying it; nothing is left, and nothing else is found wrong."""
    place = probed(tmp_path, inject)
    assert says in getattr(place, field)
    assert place.problem == ""
    assert list(tmp_path.iterdir()) == []


def listing(root: Path) -> list[tuple[str, int]]:
    """What lies there, and when each was changed last."""
    return sorted((path.name, path.lstat().st_mtime_ns) for path in root.iterdir())


def test_a_good_directory_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    """What a checkpoint needs, who held it, and no trace of the look; a link is looked at where it leads (field case 112)."""
    (tmp_path / "real").mkdir()
    committed(tmp_path / "real", 3)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = listing(tmp_path / "real")
    place = probe.look(tmp_path / "link", lambda _: None)
    assert (place.problem, place.write, place.fsync, place.rename, place.directory_fsync, place.links) == ("", *[""] * 5)
    assert (place.checkpoints, place.holder_alive) == (1, False)
    assert place.needed_bytes is not None
    assert place.needed_bytes > 1_500
    assert abs(place.skew_ms or 0) < 2_000
    assert place.kind
    assert listing(tmp_path / "real") == before


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """The nearest one above is tried; a file in the way is named."""
    place = probe.look(tmp_path / "a" / "b", lambda _: None)
    assert (place.exists, place.looked_at, place.write) == (False, str(tmp_path), "")
    (tmp_path / "file").touch()
    assert "file is no directory" in probe.look(tmp_path / "file" / "b", lambda _: None).problem
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_hangs_does_not_hang_the_look(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The stage that it hung at, within the bound, and a word meanwhile."""
    os.mkfifo(tmp_path / "attempt")  # Nobody writes to it: opening it for reading may not wait either.
    told: list[str] = []
    began = time.monotonic()
    output, ended = look._bounded([sys.executable, "-c", HANGS, str(tmp_path)], 10.0, lambda: told.append("slow"))
    assert time.monotonic() - began < 30
    assert (ended, told) == (None, ["slow"])
    assert msgspec.json.decode(output.splitlines()[-1], type=Place).problem == "asking which file system it is on"
    assert look.probe(tmp_path, lambda _: None).problem == ""


HANGS = """
import sys, threading
from ckpt_supervisor.doctor import probe
probe._volume = lambda place: threading.Event().wait()
probe.main(sys.argv)
"""


@pytest.mark.parametrize(("words", "status"), [(["--script", "missing"], 2), (["--job", "a/b"], 2), (["--what"], 2)])
def test_wrong_usage_is_2(words: Sequence[str], status: int) -> None:
    """A script that is not there, and a job that is none."""
    done = doctor(*words)
    assert (done.returncode, done.stdout) == (status, "")


def test_without_slurm_a_script_and_the_directory_are_looked_at_all_the_same(tmp_path: Path) -> None:
    """0 where all is well, 1 where not; the table says what to do, and ends in a summary."""
    good, bad = tmp_path / "good.sh", tmp_path / "bad.sh"
    good.write_text("#!/bin/bash\n#SBATCH -t 5 --requeue --open-mode=append\nsrun ckpt-supervise -- python t.py\n")
    bad.write_text("#!/bin/bash\nckpt-supervise -- python t.py\n")
    nowhere = f"{tmp_path}"
    done = doctor("--dir", str(tmp_path / "ck"), "--script", str(good), path=nowhere)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.splitlines()[-1].startswith("nothing to mend; ")
    done = doctor("--dir", str(tmp_path / "ck"), "--script", str(bad), path=nowhere)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith("FAIL  srun ")
    assert "-> write `srun ckpt-supervise -- ...` in the job script" in done.stdout
    assert "to mend (1 FAIL," in done.stdout.splitlines()[-1]
    assert doctor("--dir", str(tmp_path), path=nowhere).returncode == 0


def test_a_slurm_that_does_not_answer_is_3_and_no_finding(tmp_path: Path) -> None:
    """Could not look is never taken for good."""
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2\nexit 1\n")
    program.chmod(0o755)
    done = doctor("--json", "--dir", str(tmp_path / "ck"), path=f"{tmp_path}:/bin")
    found = findings(done)
    assert found["slurm"]["severity"] == "unknown"
    assert "Unable to contact slurm controller" in found["slurm"]["text"]
    wrong = {name for name, finding in found.items() if finding["severity"] in ("error", "warning")}
    assert done.returncode == (1 if wrong else 3)
    assert wrong <= {"dir-not-shared"}  # The disk of this machine is a local one, and nobody says how many nodes there are.


def test_the_python_on_path_is_asked_what_it_has(tmp_path: Path) -> None:
    """Another version there is a warning; it is started, but torch is not imported."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho ckpt-supervise 0.0.1\necho torch 2.1\n")
    program.chmod(0o755)
    found = findings(doctor("--json", "--dir", str(tmp_path), path=f"{tmp_path}:/bin"))
    assert f"{program}, the `python` on PATH, has ckpt-supervise 0.0.1" in found["versions-differ"]["text"]
