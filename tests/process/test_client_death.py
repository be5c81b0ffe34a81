"""How a process ends, as its last words tell it: an exception that ended it is its death, one that did not is nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_client import wire

from tests.support.fake_supervisor import FakeSupervisor
from tests.support.proc_stage import python_env


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[FakeSupervisor]:
    """A supervisor whose store is the test's directory."""
    with FakeSupervisor(tmp_path) as fake:
        yield fake


ATTACH = """
import code, multiprocessing, sys
import ckpt_client as ckpt

def save(directory, step):
    (directory / "x").write_text("x")

def train(ends=""):
    hook = ckpt.attach(save)
    for n in range(1, 4):
        hook.step(n)
    exec(ends)
"""


def written(directory: Path, ends: str) -> Path:
    """A module that trains for three steps and then ends so."""
    module = directory / "a_training.py"
    module.write_text(ATTACH + textwrap.dedent(ends))
    return module


WORDS_MAX = 1_000
"""More than a process that trains for three steps can have said."""


def last_words(supervisor: FakeSupervisor, *script: str | Path) -> tuple[list[wire.FromRank], int]:
    """What a process said of its end, and its status."""

    def ends() -> list[wire.FromRank]:
        return [word for word in supervisor.heard if isinstance(word, wire.Failed | wire.Finished)]

    child = supervisor.start(script=script, **python_env())
    supervisor.ended(child)
    supervisor.wait(ends)
    for _ in range(WORDS_MAX):
        if not supervisor.router.poll(200):
            break
        supervisor.listen(0)
    return ends(), child.returncode


STALE = {
    "a console": "train(); code.InteractiveInterpreter().runsource('1/0')",
    "a console in the program's own names": "train(); code.InteractiveInterpreter(globals()).runsource('1/0')",
    "a console, then an ordinary end": "train(); code.InteractiveInterpreter(globals()).runsource('1/0'); sys.exit(0)",
    "C code that printed what a function raised": """
        def fails():
            raise RuntimeError("not the end")
        train()
        try:
            fails()
        except RuntimeError as error:
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__.tb_next
    """,
}


@pytest.mark.parametrize("how", STALE)
def test_an_exception_that_did_not_end_the_program_is_no_death(supervisor: FakeSupervisor, tmp_path: Path, how: str) -> None:
    """sys.last_value is also set by consoles, test runners and C code, and the program goes on."""
    words, status = last_words(supervisor, written(tmp_path, STALE[how]))
    assert [type(word) for word in words] == [wire.Finished]
    assert status == 0


DEATHS = {
    "an exception": ("train(); raise RuntimeError('no memory')", "RuntimeError: no memory"),
    "ctrl-C": ("train(); raise KeyboardInterrupt", "KeyboardInterrupt"),
    "deep below": ("train('1/0')", "ZeroDivisionError: division by zero"),
    "after a console": (
        "train(); code.InteractiveInterpreter().runsource('1/0'); raise RuntimeError('no memory')",
        "RuntimeError: no memory",
    ),
}


@pytest.mark.parametrize("started", ["file", "module", "text"])
@pytest.mark.parametrize("how", DEATHS)
def test_an_exception_that_ended_the_program_is_its_death(
    supervisor: FakeSupervisor, tmp_path: Path, how: str, started: str
) -> None:
    """However it was started: `python -m` has runpy outermost."""
    ends, reason = DEATHS[how]
    module = written(tmp_path, ends)
    script = {"file": (module,), "text": ("-c", module.read_text())}.get(started, ("-m", "a_training"))
    if started == "module":
        module.rename(module.with_name("a_training_of_old.py"))
        (tmp_path / "a_training").mkdir()
        module.with_name("a_training_of_old.py").rename(tmp_path / "a_training" / "__main__.py")
        script = ("-c", f"import os, sys; os.chdir({str(tmp_path)!r}); os.execv(sys.executable, ['p', '-m', 'a_training'])")
    words, status = last_words(supervisor, *script)
    assert isinstance(words[0], wire.Failed)
    assert (words[0].round, words[0].reason) == (0, reason)
    assert status != 0


CHILDREN = {
    "an end": ("''", wire.Finished, 0),
    "an exit": ("'sys.exit(0)'", wire.Finished, 0),
    "an exception": ("'1/0'", wire.Failed, 1),
    # As torch's mp.spawn ends a worker whose function raised.
    "an exception, told elsewhere": (
        "'try:\\n 1/0\\nexcept Exception:\\n sys.exit(1)'",
        wire.Failed,
        1,
    ),
}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("how", CHILDREN)
def test_a_child_of_multiprocessing_says_how_it_ends(supervisor: FakeSupervisor, tmp_path: Path, method: str, how: str) -> None:
    """It leaves by os._exit, past atexit: notebook_launcher and mp.spawn start ranks so."""
    ends, kind, status = CHILDREN[how]
    main = f"""
        if __name__ == "__main__":
            child = multiprocessing.get_context({method!r}).Process(target=train, args=({ends},))
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """
    words, code = last_words(supervisor, written(tmp_path, main))
    assert [type(word) for word in words] == [kind]
    assert code == status


def test_a_process_that_leaves_by_both_ways_says_so_once(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """With multiprocessing imported close() is called by atexit and by multiprocessing."""
    words, status = last_words(supervisor, written(tmp_path, "import multiprocessing.util; train()"))
    assert [type(word) for word in words] == [wire.Finished]
    assert status == 0
