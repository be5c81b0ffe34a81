"""A save() that returns before everything is written (field case 97): no commit of what still changes, nothing goes for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.config import read_options
from ckpt_supervisor.directory import upkeep
from ckpt_supervisor.directory.upkeep import Spared, Upkeep
from ckpt_supervisor.linux import procfs

from tests.support.ctl_stage import committed
from tests.support.run import eventually, supervised

PROGRAM = """
import ckpt_client as ckpt, os, subprocess, sys, threading, time
end = threading.Event()
def save(directory, step):
    file = open(os.path.join(directory, "a.bin"), "wb")
    file.write(b"x" * 5000)
    file.flush()
    if step < 20:
        file.close()
    elif HOW == "thread":
        threading.Thread(target=lambda: (end.wait(60), file.close()), daemon=True).start()
    else:
        children.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
            stdout=file.fileno()))
        file.close()
HOW, children = sys.argv[1], []
for i in ckpt.steps(23, save=save, load=lambda directory: None):
    time.sleep(0.02)
while not os.path.exists("go"):
    time.sleep(0.02)
end.set()
for child in children:
    child.communicate()
"""


@pytest.mark.parametrize("how", ["thread", "child"])
def test_what_is_still_open_for_writing_is_not_committed_and_older_ones_stay(tmp_path: Path, how: str) -> None:
    """--keep 1: the last one that was whole is there at the end, and a line says which process writes which file."""
    (tmp_path / "late.py").write_text(PROGRAM)
    with supervised(tmp_path, [sys.executable, "late.py", how], "--keep", 1, "--every-steps", 5) as run:
        eventually(lambda: "a.bin is still being written by process " in run.err, "the save is given up")
        eventually(lambda: run.steps() == [15], "the older ones are pruned")  # The end does not wait for that.
        (tmp_path / "go").touch()
        assert run.code() == 0, run.story()
        assert run.intact() == run.steps() == [15]


def test_who_writes_below_a_directory_is_seen_and_who_reads_is_not(tmp_path: Path) -> None:
    """By the files that a process has open, also under another name of the directory."""
    inside = tmp_path / "step-000000001"
    (inside / "deep").mkdir(parents=True)
    file = inside / "deep" / "a.bin"
    file.touch()
    (tmp_path / "link").symlink_to(inside.parent)
    me = [os.getpid()]
    with file.open("rb"):
        assert procfs.writer_in(str(inside), me) is None
    for mode in ("ab", "r+b"):
        with file.open(mode):
            assert procfs.writer_in(str(tmp_path / "link" / inside.name), me) == (os.getpid(), "deep/a.bin")
            assert procfs.writer_in(str(tmp_path), me) == (os.getpid(), "step-000000001/deep/a.bin")
            assert procfs.writer_in(str(inside), [2**22 + 1]) is None
    with file.open("ab"):
        file.unlink()
        assert procfs.writer_in(str(inside), me) is None, "it belongs to no checkpoint any more"


def care(root: Path, plain: int = -1) -> Upkeep:
    """Upkeep of a directory with --keep 1, by the run that has committed the newest one."""
    holder = store.read_holder(root)
    assert holder is not None
    options = read_options(["--dir", str(root), "--keep=1", "--", "true"], {})
    return Upkeep(options, holder.epoch, lambda: Spared(plain=frozenset({plain})), lambda: None, threading.Event())


def test_a_commit_that_has_changed_since_does_not_count_for_pruning(tmp_path: Path) -> None:
    """Written on after its commit, by its bytes alone: the older ones stay, it stays, and the reason is told once."""
    paths = [committed(tmp_path, step) for step in (10, 20, 30)]
    (file,) = (path for path in paths[-1].iterdir() if path.name != store.MANIFEST)
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    look = care(tmp_path, 30)
    done = look.prune()
    assert done.names == ("step-000000010",), "20 counts, and 30 does not"
    assert done.problems[0].startswith("step-000000030 does not count: corrupt: ")
    assert sorted(store.parse_step(path.name) or 0 for path in tmp_path.glob("step-*")) == [20, 30]
    assert care(tmp_path).prune().names == ("step-000000020",), "what the client digested"


def test_a_commit_is_read_once_more_and_not_again(tmp_path: Path) -> None:
    """What was found unchanged is remembered; while somebody writes to it nothing goes, and afterwards it does."""
    paths = [committed(tmp_path, step) for step in (10, 20)]
    look = care(tmp_path, 20)
    (file,) = (path for path in paths[-1].iterdir() if path.name != store.MANIFEST)
    writer = subprocess.Popen(
        [sys.executable, "-c", f"f = open({str(file)!r}, 'ab'); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    assert look.prune() == upkeep.Pruned((), (f"step-000000020 does not count: process {writer.pid} still writes {file.name}",))
    writer.communicate("\n")
    assert look.prune().names == ("step-000000010",)
    assert list(look.looked.values()) == [True]
