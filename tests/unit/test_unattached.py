"""A training that never attaches is told once, late enough for a slow start, and not where the program saves by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ckpt_supervisor.config import read_options
from ckpt_supervisor.core import events as ev
from ckpt_supervisor.core import machine
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.policy import NOT_LOOKED
from ckpt_supervisor.watches.unattached import ID, LEAST_MS, MOST_MS, Unattached

from tests.support.core_story import LOCAL, Story


class Scene:
    """The watch on a machine that is fed by hand."""

    def __init__(self, *words: str, started: bool = True) -> None:
        self.story = Story(LOCAL if started else dataclasses.replace(LOCAL, resume_step=NOT_LOOKED))
        self.entries: list[Entry] = []
        options = read_options([*words, "--", "true"], {})
        self.watch = Unattached(options, self.entries.append, lambda: self.story.state, 0)

    def begin(self) -> None:
        """What the command resumes from is chosen."""
        self.story.state = machine.resumed(self.story.state, "", -1)

    def said(self, now_ms: int) -> list[str]:
        """What is in the journal after the look at this time."""
        self.watch.look(now_ms)
        return [str(entry.fields["text"]) for entry in self.entries]


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directory can be made here."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "at_ms"),
    [((), MOST_MS), (("--every", "10s"), LEAST_MS), (("--every", "200s"), 200_000), (("--every", "1h"), MOST_MS)],
    ids=["off", "short", "between", "long"],
)
def test_it_is_said_once_when_the_first_save_would_have_been_due(
    words: tuple[str, ...], at_ms: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Never before two minutes, as imports can take long, and after five at the latest; on stderr and in the journal."""
    scene = Scene(*words)
    assert scene.watch.times_ms == (at_ms,)
    assert scene.said(at_ms - 1) == []
    (text,) = scene.said(at_ms)
    assert "so nothing is saved yet: if training is not just starting up" in text
    assert (scene.entries[0].event, scene.entries[0].level, scene.entries[0].fields["id"]) == ("warning", "warning", ID)
    assert capfd.readouterr().err == f"ckpt-supervise: {text}\n"
    assert scene.watch.times_ms == (None,)
    assert len(scene.said(at_ms + 10 * MOST_MS)) == 1


@pytest.mark.parametrize("words", [("--adopt", "step_*.pt"), ("--adopt", "step_*.pt", "--pass-signal", "TERM")], ids=" ".join)
def test_a_program_that_saves_by_itself_is_left_alone(words: tuple[str, ...]) -> None:
    """It is not meant to attach."""
    scene = Scene(*words)
    assert (scene.watch.times_ms, scene.said(10 * MOST_MS)) == ((None,), [])


def test_nothing_is_said_where_a_rank_attached_or_training_is_over() -> None:
    """Also one that has attached and gone; with a notice there is no time for advice."""
    scene = Scene()
    scene.story.hello(0, 1)
    assert scene.said(MOST_MS) == []
    scene = Scene()
    scene.story.signal()
    assert scene.said(MOST_MS) == []
    scene = Scene()
    scene.story.feed(ev.CommandExited(0))
    assert scene.said(MOST_MS) == []


def test_while_the_checkpoint_is_still_being_chosen_the_time_does_not_run() -> None:
    """A terabyte is read before the command starts."""
    scene = Scene(started=False)
    assert scene.said(MOST_MS) == []
    scene.begin()
    assert scene.said(MOST_MS + 1) == []
    assert len(scene.said(2 * MOST_MS)) == 1
