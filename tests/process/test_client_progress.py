"""What a real client says of its progress, and what its process writes at the signal for its stacks."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_client import wire

from tests.support.fake_supervisor import FakeSupervisor
from tests.support.run import eventually

ENDLESS = ("--no-torch", "--mode", "attach", "--steps", "1000000", "--step-ms", "20")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    """A supervisor that says Welcome and what a test tells it to."""
    with FakeSupervisor(tmp_path / "store") as fake:
        yield fake


def progress(supervisor: FakeSupervisor, pid: int, doing: str, phase: str = "") -> wire.Progress:
    """The next word of this rank that says this."""
    return supervisor.expect(
        wire.Progress, pid, lambda word: (word.doing, word.phase) == (doing, phase), after=len(supervisor.heard)
    )


def has_written(path: Path, count: int) -> bool:
    """Whether so many stacks are there."""
    return path.read_text().count("Current thread") == count


def test_a_rank_says_where_it_is_from_its_attaching_to_the_end_of_its_loop(supervisor: FakeSupervisor) -> None:
    """Starting at once, then training, a phase by its name, parked and saving, and over."""
    # A long save: told to leave in the middle of it, the process is there for long enough to say that it is over.
    knobs = (*ENDLESS, "--save-ms", "4000", "--eval-every", "40", "--eval-ms", "500")
    child = supervisor.start(*knobs, CKPT_SUPERVISE_PROGRESS="100")
    first = supervisor.expect(wire.Progress, child.pid)
    assert (first.doing, first.entered, first.stood_ms) == ("starting", wire.Position(1, 0), 0)
    told = progress(supervisor, child.pid, "training")
    assert progress(supervisor, child.pid, "phase", "eval").entered > told.entered
    assert progress(supervisor, child.pid, "training").phase == ""
    order = supervisor.agree([child.pid], "leave")
    progress(supervisor, child.pid, "parked")
    supervisor.say(child.pid, wire.Go(order.round))
    progress(supervisor, child.pid, "saving")
    supervisor.say(child.pid, wire.Leave(order.round))
    progress(supervisor, child.pid, "over")
    supervisor.ended(child)


def test_the_first_boundary_is_told_at_once(supervisor: FakeSupervisor) -> None:
    """Not with the next word that is due: by then training may have passed what it was given to go on from."""
    child = supervisor.start(
        "--no-torch", "--mode", "attach", "--steps", "1000", "--step-ms", "300", CKPT_SUPERVISE_PROGRESS="9000"
    )
    assert supervisor.expect(wire.Progress, child.pid, lambda word: word.doing == "training").entered.n < 20


def test_how_long_it_stands_is_told_to_within_the_time_between_two_looks(supervisor: FakeSupervisor) -> None:
    """A step of many seconds: the words that come meanwhile say for how long."""
    child = supervisor.start("--no-torch", "--steps", "9", "--step-ms", "15000", CKPT_SUPERVISE_PROGRESS="200")
    word = supervisor.expect(wire.Progress, child.pid, lambda word: word.doing == "training" and word.stood_ms >= 1_000)
    later = supervisor.expect(
        wire.Progress, child.pid, lambda other: other.entered == word.entered and other.stood_ms > word.stood_ms
    )
    assert later.stood_ms - word.stood_ms < 6_000


def test_nothing_is_said_to_a_supervisor_that_does_not_ask(supervisor: FakeSupervisor) -> None:
    """No word, no signal taken, no descriptor opened."""
    child = supervisor.start(*ENDLESS)
    supervisor.under_way(child)
    assert not [word for word in supervisor.heard if isinstance(word, wire.Progress)]
    assert not [link for link in Path(f"/proc/{child.pid}/fd").iterdir() if "ckpt-stacks" in str(link.readlink())]


def test_the_stacks_are_written_at_the_signal_and_training_goes_on(supervisor: FakeSupervisor) -> None:
    """Into the file in memory that the word names, again and again; no handler of anybody is replaced for it."""
    child = supervisor.start(
        "--no-torch", "--mode", "attach", "--steps", "1000000", "--step-ms", "20", CKPT_SUPERVISE_PROGRESS="100"
    )
    word = progress(supervisor, child.pid, "training")
    assert 34 < word.dump_signal < 64
    path = Path(f"/proc/{child.pid}/fd/{word.dump_fd}")
    assert str(path.readlink()).startswith("/memfd:ckpt-stacks")
    for count in (1, 2):
        os.kill(child.pid, word.dump_signal)
        eventually(functools.partial(has_written, path, count), "the stacks")
    assert "in train" in path.read_text()
    reached = word.entered.n
    supervisor.expect(wire.Progress, child.pid, lambda later: later.entered.n > reached + 20)


def test_a_signal_that_is_somebodys_is_left_alone(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Training code that has a handler of its own for the first one tried: another one is taken."""
    script = tmp_path / "own.py"
    script.write_text(
        "import signal, sys\n"
        "own = signal.SIGRTMAX - 2\n"
        "signal.signal(own, lambda *_: None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX - 3])\n"
        "import ckpt_client as ckpt\n"
        "hook = ckpt.attach(lambda directory, step: None)\n"
        "sys.stdin.read()\n"
        "import threading; threading.Event().wait()\n"
    )
    child = supervisor.start(script=(script,), CKPT_SUPERVISE_PROGRESS="100")
    word = supervisor.expect(wire.Progress, child.pid)
    assert word.dump_signal == 64 - 4
