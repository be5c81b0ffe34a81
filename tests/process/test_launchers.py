"""Launchers and wrappers between the supervisor and the training: a signal to every process, and the command's own status.

Owns: row 3 of the issue in local mode, where a broadcast is what proctrack/linuxproc does: the signal reaches every process
below the supervisor, the deepest first, and then the supervisor. Must not: need a launcher that is not in the test group;
tests/support/launchers.py stands in for those.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ckpt_supervisor import store
from ckpt_supervisor.linux import procfs

from tests.support.run import TOY, Run, eventually, is_alive, supervised, toy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FOREVER = ("--steps", 1_000_000)
BIN = Path(sys.executable).parent
STAND_IN = (sys.executable, str(TOY.with_name("launchers.py")))
LEAVE_BOUND_S = 40
TORCHRUN_KILLS_MS = 25_000
"""It waits 30 s for workers that do not end at its SIGTERM."""

TORCH_S = 90
"""Until ranks train below a launcher that imports torch, on a machine that has other things to do."""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How the command is written, and what comes out of it."""

    name: str
    around: Callable[[list[str]], list[str]]
    ranks: int = 1
    statuses: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"3": 3, "SEGV": 139})
    """Its own status by what the training ends with."""


def before(*words: str) -> Callable[[list[str]], list[str]]:
    """These words, then the command's."""
    return lambda argv: [*words, *argv]


def in_shell(shell: str, text: str) -> Callable[[list[str]], list[str]]:
    """A shell's words, with the command in place of {}."""
    return lambda argv: [shell, "-c", text.replace("{}", shlex.join(argv))]


def without_python(*words: str) -> Callable[[list[str]], list[str]]:
    """The same as `before` for a launcher that brings the interpreter itself."""
    return lambda argv: [*words, *argv[1:]]


ACCELERATE = (str(BIN / "accelerate"), "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no")
UV = (str(BIN / "uv"), "run", "--no-project", "--no-config", "--no-cache", "--offline")
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node=2", "--")
UNSHARE = ("unshare",) if os.geteuid() == 0 else ("unshare", "--map-root-user")
NAMESPACES = (*UNSHARE, "--pid", "--mount", "--fork", "--mount-proc")
"""Of process ids and mounts, as a container has them."""

LAUNCHERS = [
    Launcher("bash", in_shell("bash", "{}")),
    Launcher("bash-stays", in_shell("bash", "{}; exit $?")),
    Launcher("bash-background", in_shell("bash", "{} & wait $!; exit $?")),
    Launcher("dash-stays", in_shell("dash", "{}; exit $?")),  # It clears the signal mask for what it starts.
    Launcher("env", before("env", "OF=env")),
    Launcher("exec", before("sh", "-c", 'exec "$@"', "exec")),  # As poetry run and numactl do.
    Launcher("timeout", before("timeout", "10m")),
    Launcher("setsid", before("setsid", "--wait"), statuses={"0": 0, "3": 3}),
    Launcher("three", before("bash", "-c", '"$@"; exit $?', "bash", "env", "OF=env", "timeout", "10m")),
    Launcher("plain", before(*STAND_IN, "plain")),
    Launcher("conda", before(*STAND_IN, "conda")),
    Launcher("conda-captures", before(*STAND_IN, "conda-captures")),
    Launcher("nsys", before(*STAND_IN, "nsys"), statuses={"3": 3}),
    Launcher("agent", before(*STAND_IN, "agent"), statuses={"0": 0}),
    Launcher("mpirun", before(*STAND_IN, "mpirun", "4"), ranks=4),
    Launcher("spawn", before(*STAND_IN, "spawn"), ranks=2),
    Launcher("spawn-apart", before(*STAND_IN, "spawn-apart"), ranks=2),
    Launcher("uv", before(*UV)),
    Launcher("namespaces", before(*NAMESPACES), statuses={"0": 0, "3": 3}),
    # What imports torch takes seconds to start; both say 1 for every failure.
    Launcher("torchrun", without_python(*TORCHRUN), ranks=2, statuses={"3": 1}),
    Launcher("accelerate", without_python(*ACCELERATE), statuses={"3": 1}),
]
each = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)


def steps_of(run: Run, rank: int) -> list[int]:
    """The steps that this rank did, in order."""
    log = run.files / "toy.log"
    text = log.read_text() if log.exists() else ""
    return [int(n) for n in re.findall(rf"^step (\d+) rank {rank} ", text, re.MULTILINE)]


def trains(run: Run, ranks: int, least: int = 3) -> None:
    """Wait until all ranks have attached and have done some steps."""
    for rank in range(ranks):
        run.event("rank_hello", TORCH_S, rank=rank)
        ended = lambda: run.process.poll() is not None  # noqa: E731 - one word for the line below
        eventually(lambda rank=rank: len(steps_of(run, rank)) >= least, f"steps of rank {rank}{run.story()}", over=ended)


def tree_of(run: Run) -> dict[int, procfs.Stat]:
    """Every process below the supervisor, parents first, with what names it once and for all."""
    seen = {pid: procfs.stat(pid) for pid in procfs.descendants(run.pid)}
    return {pid: stat for pid, stat in seen.items() if stat is not None and stat.state != "zombie"}


def broadcast(run: Run, *numbers: int) -> dict[int, procfs.Stat]:
    """The signal to every process of the step, as proctrack/linuxproc does, the supervisor last; who was there."""
    tree = tree_of(run)
    for number in numbers:
        for pid in (*reversed(tree), run.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
    return tree


def survivors(run: Run, tree: Mapping[int, procfs.Stat]) -> list[str]:
    """Who lives of these, and whoever has this run's directory in the environment: no other run has the same.

    The guard ends by itself when it is let go, a moment after the supervisor where the machine is busy.
    """
    guards = [event["guard_pid"] for event in run.events("command_started")]
    eventually(lambda: not any(map(is_alive, guards)), "the guard has ended")
    mark = f"CKPT_SUPERVISE_DIR={run.dir}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                pid = int(path.parent.name)
                tree = {**tree, **({pid: seen} if (seen := procfs.stat(pid)) is not None else {})}
        except OSError:
            continue
    now = {pid: procfs.stat(pid) for pid in tree}
    same = [pid for pid, seen in now.items() if seen is not None and seen.started == tree[pid].started]
    return [procfs.describe(pid) for pid in same if now[pid].state not in ("zombie", "gone")]  # type: ignore[union-attr]


def saved_at_the_last_step(run: Run, ranks: int) -> None:
    """One checkpoint, whole, of all ranks, at the step that every one of them stopped after."""
    (step,) = run.intact()
    (found,) = store.scan(run.dir)
    assert sorted(path.name for path in found.path.glob("toy-*")) == [f"toy-{rank:05d}.json" for rank in range(ranks)]
    assert [max(steps_of(run, rank)) for rank in range(ranks)] == [step] * ranks  # An agent's next trial may do its first one.
    assert len(run.events("commit")) == 1


@each
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_broadcast_below_a_launcher_saves_and_leaves_nobody_behind(
    tmp_path: Path, launcher: Launcher, number: signal.Signals
) -> None:
    """Field cases 4, 5, 7, 9, 14, 16, 119: the interrupted step is committed, status 75, no process of the tree lives on."""
    command = launcher.around(toy("--log", tmp_path / "toy.log", *FOREVER))
    with supervised(tmp_path, command, "--leave-timeout", "3s") as run:
        trains(run, launcher.ranks)
        tree = broadcast(run, number)
        assert run.code(LEAVE_BOUND_S) == 75, run.story()
        assert survivors(run, tree) == [], run.story()
        saved_at_the_last_step(run, launcher.ranks)


@each
def test_the_commands_own_status_comes_through_a_launcher(tmp_path: Path, launcher: Launcher) -> None:
    """Field case 63: with no signal the launcher's own status is passed on; nothing is saved, nobody is left."""
    for ending, code in launcher.statuses.items():
        knobs = ("--exit-code", ending) if ending.isdecimal() else ("--end-signal", ending)
        files = tmp_path / ending
        command = launcher.around(toy("--log", files / "toy.log", "--steps", 3, *knobs))
        with supervised(files, command) as run:
            assert run.code(TORCH_S) == code, run.story()
            assert run.event("rank_hello")
            assert run.steps() == []
            assert survivors(run, {}) == [], run.story()


def own_toy(*words: object) -> list[str]:
    """The toy with the knobs of tests/support/slurm_toy.py."""
    return [sys.executable, str(TOY.with_name("slurm_toy.py")), "--no-torch", *map(str, words)]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_that_goes_on_does_not_pass_a_dead_training_off_as_a_success(tmp_path: Path, shell: str) -> None:
    """Field case 16: `sh -c "python train.py; echo done"` ends with 0 whatever becomes of the training; that is not passed on.

    Where the training has said so: one that ends without a word cannot be told from one that is done.
    """
    raises = shlex.join(own_toy("--log", tmp_path / "toy.log", "--steps", 50, "--raises-at", 5))
    with supervised(tmp_path, [shell, "-c", f"{raises}; echo done"]) as run:
        assert run.code() == 1, run.story()
        assert run.said("^done$")
        assert "success" not in run.err
    ends = shlex.join(toy("--log", tmp_path / "toy.log", "--steps", 5))
    with supervised(tmp_path, [shell, "-c", f"{ends}; echo done"]) as run:
        assert run.code() == 0, run.story()
        assert run.err == ""


def test_several_signals_to_every_process_in_mid_save_end_nobody(tmp_path: Path) -> None:
    """Field case 34 below three wrappers: TERM, USR1 and TERM again while the save runs; one save, one commit."""
    three = before("bash", "-c", '"$@"; exit $?', "bash", "env", "OF=env", "timeout", "10m")
    with supervised(tmp_path, three(toy("--log", tmp_path / "toy.log", *FOREVER, "--save-ms", 1000))) as run:
        trains(run, 1)
        broadcast(run, signal.SIGTERM)
        run.event("rank_saving")
        tree = broadcast(run, signal.SIGUSR1, signal.SIGTERM)
        assert run.code(LEAVE_BOUND_S) == 75, run.story()
        assert survivors(run, tree) == [], run.story()
        saved_at_the_last_step(run, 1)


def test_a_broadcast_that_timeout_hands_on_before_it_has_come_itself_costs_no_save(tmp_path: Path) -> None:
    """The supervisor first, then timeout, which hands it on: the kernel keeps the first sender's name, and it is not Slurm's."""
    shell = ["sh", "-c", 'timeout 10m "$@"; exit $?', "sh"]  # dash gives its children an empty signal mask.
    with supervised(tmp_path, [*shell, *toy(*FOREVER, "--step-ms", 20, "--save-ms", 3_000)]) as run:
        rank = run.event("rank_hello")["rank_pid"]
        parent = procfs.stat(rank)
        assert parent is not None
        run.signal(signal.SIGTERM)
        os.kill(parent.parent, signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.events("commit")


def test_a_time_out_that_a_wrapper_imposes_still_ends_its_program(tmp_path: Path) -> None:
    """`timeout 1 sleep 600`: its SIGTERM is blocked in the program as all are, and is completed: 124, as without us."""
    with supervised(tmp_path, ["timeout", "1", "sleep", "600"]) as run:
        assert run.code() == 124, run.story()


def test_torchrun_ends_its_other_workers_when_one_dies(tmp_path: Path) -> None:
    """It sends them SIGTERM and would wait 30 s where that stays blocked: they end within what they take without us."""
    words = own_toy("--words", tmp_path / "toy.log", *FOREVER, "--dies-at", 5, "--faulty-rank", 1)[1:]
    with supervised(tmp_path, [*TORCHRUN, *words]) as run:
        gone = run.event("rank_gone", TORCH_S, rank=1)
        assert run.code(TORCH_S) == 1, run.story()
        assert run.event("command_exited")["mono_ms"] - gone["mono_ms"] < TORCHRUN_KILLS_MS
        assert survivors(run, {}) == []


@pytest.mark.parametrize("knob", ["--hang-at-exit", "--exit-code-after-leave=1"])
def test_torchrun_starts_nothing_again_and_waits_for_nobody_on_the_way_out(tmp_path: Path, knob: str) -> None:
    """Field case 61: after the commit one rank leaves at once; the other hangs, or fails, for which torchrun starts both anew."""
    words = own_toy("--words", tmp_path / "toy.log", *FOREVER, knob, "--faulty-rank", 1)[1:]
    with supervised(tmp_path, [*TORCHRUN[:-1], "--max-restarts=3", "--", *words], "--leave-timeout", "2s") as run:
        trains(run, 2)
        tree = broadcast(run, signal.SIGTERM)
        assert run.code(LEAVE_BOUND_S) == 75, run.story()
        assert survivors(run, tree) == [], run.story()
        assert len(run.intact()) == 1


def test_torchrun_learns_how_long_a_save_at_a_passed_signal_may_take(tmp_path: Path) -> None:
    """With --pass-signal TERM its clock does start; it is set by --save-timeout, unless the user has set it."""
    script = "import os; print('clock', os.environ.get('TORCH_ELASTIC_SHUTDOWN_TIMEOUT'), flush=True)"
    options = ("--adopt", "step_*", "--pass-signal", "TERM", "--save-timeout", "10m")
    with supervised(tmp_path / "passed", [sys.executable, "-c", script], *options) as run:
        assert run.said(r"^clock (.*)$")[1] == "600"
    with supervised(
        tmp_path / "set", [sys.executable, "-c", script], *options, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    ) as run:
        assert run.said(r"^clock (.*)$")[1] == "7"
    with supervised(tmp_path / "shielded", [sys.executable, "-c", script]) as run:
        assert run.said(r"^clock (.*)$")[1] == "None"


def test_a_container_that_does_not_see_the_socket_says_so_and_trains_on(tmp_path: Path) -> None:
    """Field case 14: the directory of the socket is not mounted inside; the line names it, and nothing is made worse."""
    hidden = (*UNSHARE, "--mount", "sh", "-c", 'mount -t tmpfs none "$TMPDIR" && exec "$@"', "sh")
    with supervised(tmp_path, [*hidden, *toy("--log", tmp_path / "toy.log", "--steps", 5)]) as run:
        assert run.code() == 0, run.story()
        assert steps_of(run, 0) == [1, 2, 3, 4, 5]
        assert re.search(r"the supervisor's socket \S+ is not here.*bind-mount", run.err), run.story()
