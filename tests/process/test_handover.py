"""The signal of --pass-signal on real processes: who gets it, once, and how it is seen that Slurm has sent it to everybody."""

from __future__ import annotations

import os
import signal

import pytest
from ckpt_supervisor import children, procfs
from ckpt_supervisor.handover import SETTLED_MS, Handover

from tests.support.proc_stage import until


@pytest.fixture
def claims() -> children.Claims:
    """Nobody waits for anybody yet."""
    return children.Claims()


def witness_of(handover: Handover, claims: children.Claims) -> int:
    """The process that stands by."""
    before = claims.claimed()
    handover.stand_by()
    (pid,) = claims.claimed() - before
    return pid


def test_a_second_one_who_asks_is_not_obeyed(claims: children.Claims) -> None:
    """An heir asks again for what the lost coordinator had asked for: a handler that saves is not entered twice."""
    handover = Handover(signal.SIGTERM, claims, dict(os.environ))
    handover.ask(1_000)
    assert handover.due_ms == 1_000 + SETTLED_MS
    assert handover.hand_on(None) == ([], False)
    handover.ask(5_000)
    assert handover.due_ms is None


def test_a_signal_that_was_sent_to_everybody_is_not_handed_on(claims: children.Claims) -> None:
    """It is pending in the witness, which has all signals blocked."""
    handover = Handover(signal.SIGTERM, claims, dict(os.environ))
    os.kill(witness_of(handover, claims), signal.SIGTERM)
    handover.ask(0)
    assert handover.hand_on(None) == ([], True)
    handover.end()


def test_each_start_of_the_command_has_a_witness_of_its_own(claims: children.Claims) -> None:
    """One that was ended shows nothing any more, and is not there any more for anybody who looks at what was left behind."""
    handover = Handover(signal.SIGTERM, claims, dict(os.environ))
    first = witness_of(handover, claims)
    handover.end()
    second = witness_of(handover, claims)
    assert second != first
    os.kill(second, signal.SIGTERM)
    handover.ask(0)
    assert handover.hand_on(None) == ([], True)
    handover.end()
    assert claims.claimed() == frozenset()
    until(lambda: {procfs.state_of(first), procfs.state_of(second)} <= {"gone", "zombie"}, "both are over")
