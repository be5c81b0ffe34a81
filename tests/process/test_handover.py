"""The signal of --pass-signal: once, and not to those who have had it from Slurm. Who gets it: test_adopt.py."""

from __future__ import annotations

import signal

import pytest
from ckpt_supervisor.adapters import children
from ckpt_supervisor.processes.handover import SETTLED_MS, Handover


@pytest.fixture
def claims() -> children.Claims:
    """Nobody waits for anybody yet."""
    return children.Claims()


def test_a_second_one_who_asks_is_not_obeyed(claims: children.Claims) -> None:
    """An heir asks again for what the lost coordinator had asked for: a handler that saves is not entered twice."""
    handover = Handover(signal.SIGTERM, claims)
    handover.ask(1_000)
    assert handover.due_ms == 1_000 + SETTLED_MS
    assert handover.hand_on(None) == ([], False)
    handover.ask(5_000)
    assert handover.due_ms is None


def test_a_signal_that_was_sent_to_everybody_is_not_handed_on(claims: children.Claims) -> None:
    """The guard has got it as well; another signal says nothing about this one."""
    for number, by_slurm in ((signal.SIGTERM, True), (signal.SIGUSR1, False)):
        handover = Handover(signal.SIGTERM, claims)
        handover.came_to_all(number, 1_000)
        handover.ask(1_000)
        assert handover.hand_on(None) == ([], by_slurm)


def test_what_was_sent_to_everybody_in_a_rehearsal_is_forgotten(claims: children.Claims) -> None:
    """`scancel --signal=TERM` some minutes ago, and the job still runs: at the real notice the program has nothing yet."""
    handover = Handover(signal.SIGTERM, claims)
    handover.came_to_all(signal.SIGTERM, 1_000)
    handover.calm(5_500)
    handover.calm(11_000)
    handover.ask(60_000)
    assert handover.hand_on(None) == ([], False)
