"""What training does after `Preempted`, in `finally` and `atexit`: it runs, and changes neither the checkpoint nor the status."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.run import is_alive, supervised

TRAINER = """
import atexit, os, subprocess, sys, threading, time
import ckpt_client as ckpt

def save(directory, step):
    (directory / "state").write_text(str(step))

helper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline()"], stdin=subprocess.PIPE)

def broken_pipe():
    # A logging helper that ended before us, as at a broadcast; the trainer's last words to it raise.
    helper.stdin.write(b"bye\\n")
    helper.stdin.flush()
    helper.wait()
    for _ in range(10):
        helper.stdin.write(b"one more\\n")
        helper.stdin.flush()

def hangs():
    print("hangs", flush=True)
    threading.Event().wait()

def takes_long():
    time.sleep(3)
    print("cleaned up", flush=True)

def at(step):
    with open("at", "w") as file:
        file.write(str(step))

{how}
try:
    for i in ckpt.steps(10**6, save=save, load=print):
        time.sleep(0.02)
        at(i + 1)
        if i == 3:
            print("now", flush=True)
finally:
    {last}
"""

ENDS = {
    "atexit fails": ("atexit.register(broken_pipe)", "pass", "BrokenPipeError", 0),
    "atexit hangs": ("atexit.register(hangs)", "pass", "", 137),
    "finally fails": ("", "broken_pipe()", "BrokenPipeError", 1),
    "finally hangs": ("", "hangs()", "", 137),
    "finally takes long": ("", "takes_long()", "", 0),
    "atexit takes long": ("atexit.register(takes_long)", "pass", "", 0),
    "another status": ("atexit.register(os._exit, 5)", "pass", "", 5),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_training_does_after_it_was_told_to_leave_changes_nothing(tmp_path: Path, how: str) -> None:
    """Field case 11: a clean-up that fails, hangs or takes its time comes after the commit: 75, in bounded time."""
    register, last, told, code = ENDS[how]
    command = [sys.executable, "-c", TRAINER.format(how=register, last=last)]
    # What does not hang gets the time that it takes on a busy machine.
    with supervised(tmp_path, command, "--leave-timeout", "5s" if "hangs" in how else "20s") as run:
        run.said("^now$")
        run.signal(signal.SIGTERM)
        assert run.code(60) == 75, run.story()
        assert run.intact() == [int((tmp_path / "at").read_text())]
        assert told in run.err
        left = run.event("command_exited")["code"]
        assert left == code if code < 128 else left >= 128, run.story()
        assert not is_alive(run.toy_pid())
        if "long" in how:
            run.said("^cleaned up$")
        commit, exited = run.event("commit"), run.event("command_exited")
        assert commit["mono_ms"] <= exited["mono_ms"]
