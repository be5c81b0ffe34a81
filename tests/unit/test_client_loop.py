"""`steps()` and `attach()` without a supervisor: a plain loop that costs nothing and warns about nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckpt_client as ckpt
import pytest
from ckpt_client import attachment, meeting
from ckpt_client.hook import idle_rank
from ckpt_client.protocol import NEVER


def nothing(*_: Any) -> None:
    """An own save or load that does nothing."""


class Holder:
    """An object with state that must not be asked for it."""

    def state_dict(self) -> dict[str, Any]:
        """Never asked."""
        raise AssertionError

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Never asked."""
        raise AssertionError


def test_without_a_supervisor_steps_is_a_range(capfd: pytest.CaptureFixture[str]) -> None:
    """Same indices, same length, and not a word on stderr."""
    loop = ckpt.steps(5, start=2, holder=Holder())
    assert (len(loop), loop.start, loop.stop) == (3, 2, 5)
    seen = []
    for step in loop:
        with loop.phase("before", before=True):
            loop.safe_point()
        seen.append(step)
        with loop.phase("eval"), loop.phase("inner", alone=True):
            loop.safe_point()
    assert seen == list(loop) == [2, 3, 4]
    assert list(ckpt.steps(0, save=nothing, load=nothing)) == []
    assert len(ckpt.steps(2, start=9, save=nothing, load=nothing)) == 0
    assert capfd.readouterr() == ("", "")


def test_without_a_supervisor_a_hook_does_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """It can stay in the code for ever, also after close."""
    hook = ckpt.attach(nothing, load=nothing)
    for n in (1, 2, 3):
        hook.step(n)
        with hook.phase("eval", alone=True):
            hook.safe_point()
    hook.safe_point()
    hook.close()
    hook.step(4)
    with hook.phase("test"):
        hook.safe_point()
    assert ckpt.resume() is None
    assert meeting.held() is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "something to save"),
        ({"save": nothing}, "both save= and load="),
        ({"load": nothing}, "both save= and load="),
        ({"save": nothing, "model": Holder()}, "not both"),
        ({"model": 3}, "model=int has no state_dict"),
    ],
)
def test_a_wrong_call_is_told_with_and_without_a_supervisor(given: dict[str, Any], says: str) -> None:
    """The mistake shows on the first laptop run, not on the cluster."""
    with pytest.raises(TypeError, match=says):
        ckpt.steps(5, **given)


def test_preempted_is_a_system_exit_with_zero() -> None:
    """So that `finally` and `atexit` run and no traceback is printed."""
    error = ckpt.Preempted()
    assert isinstance(error, SystemExit)
    assert error.code == 0


def test_the_package_has_what_it_names_and_nothing_else() -> None:
    """Names are imported when first used."""
    assert all(getattr(ckpt, name) is not None for name in ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'stepz'"):
        ckpt.stepz  # type: ignore[attr-defined]  # noqa: B018


def test_a_socket_that_cannot_be_leaves_training_running(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A broken environment is told in one line, and the checkpoint that the command was started with is used."""
    wish = meeting.Wish(lambda _who: lambda _order: (), start=0, sharded=False)
    environment = {"CKPT_SUPERVISE_SOCKET": "nonsense", "CKPT_SUPERVISE_RESUME_FROM": str(tmp_path / "step-7")}
    met = meeting._meet("nonsense", environment, meeting.identity.identify(environment, None), wish)
    assert (met.attachment, met.resume_step) == (None, 7)
    assert capfd.readouterr().err.startswith("ckpt: cannot reach the supervisor at 'nonsense'")


def test_an_idle_rank_never_stops() -> None:
    """The hot path of an unsupervised hook."""
    rank = idle_rank()
    assert rank.due == NEVER
    assert not rank.hold > rank.done
    assert not attachment.gil_is_off()
