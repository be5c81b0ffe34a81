"""What a launcher below the supervisor is told: only where a signal that is passed on would start torchrun's own clock."""

from __future__ import annotations

import signal

import pytest
from ckpt_supervisor.start.launchers import calls_srun, environment_for

NAME = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def test_nothing_is_said_while_the_signals_are_blocked() -> None:
    """torchrun hears of no notice then; a longer time-out would only keep a crashed run longer."""
    assert environment_for({}, None, 900_000) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_passed_signal_that_torchrun_catches_gives_its_workers_as_long_as_a_save_may_take(number: int) -> None:
    """Field case 4: 30 s is torchrun's own; whole seconds, rounded up, and never less than without us."""
    assert environment_for({}, number, 900_000) == {NAME: "900"}
    assert environment_for({}, number, 45_001) == {NAME: "46"}
    assert environment_for({}, number, 5_000) == {NAME: "30"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, int(signal.SIGRTMIN) + 3])
def test_a_passed_signal_that_torchrun_does_not_catch_goes_to_the_workers_directly(number: int) -> None:
    """Nothing has to be said; asking torchrun to handle it would bring it to each worker twice."""
    assert environment_for({}, number, 900_000) == {}


def test_what_the_user_has_set_stands() -> None:
    """By either name; and the list of signals is the user's too."""
    assert environment_for({NAME: "5"}, signal.SIGTERM, 900_000) == {}
    assert environment_for({"PET_SHUTDOWN_TIMEOUT": "5"}, signal.SIGTERM, 900_000) == {}
    assert environment_for({"PET_SIGNALS_TO_HANDLE": "SIGINT, SIGUSR1"}, signal.SIGTERM, 900_000) == {}
    assert environment_for({"PET_SIGNALS_TO_HANDLE": "SIGINT, SIGUSR1"}, signal.SIGUSR1, 900_000) == {NAME: "900"}
    assert environment_for({"PET_SIGNALS_TO_HANDLE": "no such, "}, signal.SIGTERM, 900_000) == {}


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["srun", "--overlap", "-n2", "python", "train.py"], True),
        (["/usr/bin/srun", "python", "train.py"], True),
        (["env", "OF=env", "srun", "-n2", "python", "train.py"], True),
        (["bash", "-c", "cd /work && srun -n2 python train.py; echo done"], True),
        (["bash", "-c", "(srun -n2 hostname)"], True),
        (["python", "train.py", "--name", "srun"], False),
        (["python", "/home/me/srun_tools/train.py"], False),
        (["python", "presrun -x"], False),
        (["bash", "job.sh"], False),
    ],
)
def test_a_further_srun_is_seen_in_the_command_and_in_a_shells_words(command: list[str], answer: bool) -> None:
    """Field case 27: it cannot be shielded on every site, and the start says so."""
    assert calls_srun(command) is answer
