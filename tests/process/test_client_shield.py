"""The training process's side of the shield: what of the signal mask outlives multiprocessing, libraries and shells between."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor.linux.procfs import descendants

from tests.support.proc_stage import Stage, blocked, python_env
from tests.support.run import supervised

SHIELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NUMBERS = " ".join(str(int(number)) for number in SHIELD)


def broadcast(pid: int, *numbers: int) -> None:
    """Signal every process of a step, the supervisor last, as proctrack/linuxproc does."""
    for number in numbers:
        for one in (*reversed(descendants(pid)), pid):
            with contextlib.suppress(ProcessLookupError):  # The first one has them leave.
                os.kill(one, number)


def supervised_env(directory: Path, **more: str) -> dict[str, str]:
    """An environment with a supervisor's socket in it, which is a file here: nobody attaches."""
    socket = directory / "s"
    socket.touch()
    return python_env(CKPT_SUPERVISE_SOCKET=f"ipc://{socket}", CKPT_SUPERVISE_SHIELD=NUMBERS, **more)


def said(script: str, env: dict[str, str], mask: Iterable[int] = SHIELD) -> Any:
    """What a script of its own says first, when it is started with these signals blocked."""
    with blocked(*mask), Stage(script, env=env) as stage:
        return stage.said(60)


IMPORTS = """
    import json, os, signal, sys
    before = signal.pthread_sigmask
    {imports}
    mask = sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    print(json.dumps([mask, "ckpt_client.shield" in sys.modules, signal.pthread_sigmask is before]), flush=True)
"""


def test_importing_the_client_touches_nothing_without_a_supervisor(tmp_path: Path) -> None:
    """Neither without its variable, nor where its socket is gone: a job submitted from a supervised one inherits the variable."""
    env = supervised_env(tmp_path)
    (tmp_path / "s").unlink()
    script = IMPORTS.format(imports="import ckpt_client")
    assert said(script, env, ()) == [[], True, True]
    del env["CKPT_SUPERVISE_SOCKET"]
    assert said(script, env, ()) == [[], False, True]


def test_importing_the_client_touches_nothing_below_a_stranger(tmp_path: Path) -> None:
    """A job submitted from a supervised one, on the same node and without a supervisor: nobody would complete its SIGTERM."""
    script = IMPORTS.format(imports="import ckpt_client")
    mine = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        env = supervised_env(tmp_path, CKPT_SUPERVISE_PID=str(stranger.pid), CKPT_SUPERVISE_PIDNS=mine)
        assert said(script, env, ()) == [[], True, True]
        # In a container its pid means nothing, and the socket is all there is to go by.
        assert said(script, env | {"CKPT_SUPERVISE_PIDNS": "pid:[1]"}, ())[0] == sorted(map(int, SHIELD))
    for nobody in ("", "x", "0", "-1", str(1 << 70)):
        assert said(script, env | {"CKPT_SUPERVISE_PID": nobody}, ()) == [[], True, True]
    # Below a shell or two it is the supervisor all the same.
    env["CKPT_SUPERVISE_PID"] = str(os.getpid())
    with Stage(script, env=env, wrapper=("sh", "-c", '"$@"; true', "sh", "sh", "-c", '"$@"; true', "sh")) as stage:
        assert stage.said(60)[0] == sorted(map(int, SHIELD))


def test_a_supervisor_below_another_one_hears_its_signals(tmp_path: Path) -> None:
    """It imports the wire of the client and is no training process."""
    script = IMPORTS.format(imports="import ckpt_supervisor.cli, ckpt_supervisor.adapters.transport")
    assert said(script, supervised_env(tmp_path), ()) == [[], False, True]


def test_the_shield_stands_from_the_import_on_also_below_a_shell_that_opened_it(tmp_path: Path) -> None:
    """dash clears the mask; what training code starts between import and attaching has it all the same."""
    script = IMPORTS.format(imports="import ckpt_client")
    assert said(script, supervised_env(tmp_path), ()) == [sorted(map(int, SHIELD)), True, False]


def test_a_signal_that_the_supervisor_does_not_keep_stays_open(tmp_path: Path) -> None:
    """--pass-signal opts out per signal: the program's own handler, set after the import, is for it."""
    env = supervised_env(tmp_path) | {"CKPT_SUPERVISE_SHIELD": f"{int(signal.SIGUSR2)}"}
    assert said(IMPORTS.format(imports="import ckpt_client"), env, ())[0] == [int(signal.SIGUSR2)]


def test_whoever_has_let_a_signal_in_for_a_handler_of_their_own_keeps_it(tmp_path: Path) -> None:
    """Field case 13: the handler is untouched and called."""
    own = "signal.signal(signal.SIGUSR1, print); import ckpt_client"
    assert said(IMPORTS.format(imports=own), supervised_env(tmp_path), ())[0] == [int(signal.SIGUSR2), int(signal.SIGTERM)]


OPENERS = """
    import json, os, signal, sys
    import ckpt_client
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGHUP])
    print(json.dumps(sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))), flush=True)
"""


def test_a_library_that_lets_signals_in_lets_in_all_but_the_supervisors(tmp_path: Path) -> None:
    """As the copies of the tracker in other packages do; what it blocks itself it may let in again."""
    both = [*SHIELD, signal.SIGINT]
    assert said(OPENERS, supervised_env(tmp_path)) == sorted(map(int, (*SHIELD, signal.SIGHUP)))
    # Blocked by the supervisor, where the command shares its terminal.
    assert said(OPENERS, supervised_env(tmp_path), both) == sorted(map(int, (*both, signal.SIGHUP)))


BY_NAME = """
    import json, os, signal, sys
    import ckpt_client
    signal.pthread_sigmask(how=signal.SIG_UNBLOCK, mask=[signal.SIGTERM, signal.SIGINT])
    print(json.dumps(sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, mask=[]))), flush=True)
"""


def test_a_library_that_names_the_arguments_is_understood(tmp_path: Path) -> None:
    """signal.pthread_sigmask takes them so."""
    assert said(BY_NAME, supervised_env(tmp_path)) == sorted(map(int, SHIELD))


EARLY = """
import json, multiprocessing, os, signal, sys, threading
import ckpt_client

def mask(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(next(line for line in status if line.startswith("SigBlk:")).split()[1], 16)

def started(method, found):
    context = multiprocessing.get_context(method)
    pool = context.Pool(2)
    pool.map(abs, [1, 2])
    found.append(mask(threading.get_native_id()))
    found.extend(pool.map(mask, ["self"] * 4))
    pool.close()
    pool.join()

if __name__ == "__main__":
    found = []
    for method in sys.argv[1:]:
        started(method, found)
    thread = threading.Thread(target=started, args=("spawn", found))
    thread.start()
    thread.join()
    found.append(mask("self"))
    print(json.dumps(sorted(set(found))), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_made_before_attaching_have_the_shield(tmp_path: Path, method: str) -> None:
    """The tracker unblocks SIGTERM in the thread that first uses it, be it the main one or another; nobody notices it here."""
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    with blocked(*SHIELD):
        done = subprocess.run(
            [sys.executable, script, method],
            env=supervised_env(tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    wanted = sum(1 << (number - 1) for number in SHIELD)
    assert done.stdout == f"[{wanted}]\n", done.stderr


TRAINER = """
import ctypes, os, signal, threading, time
import ckpt_client as ckpt

def save(directory, step):
    (directory / "x").write_text(str(step))

def raises(number, frame):
    raise RuntimeError("a handler of a library")

libc = ctypes.CDLL(None)
for i in ckpt.steps(10**6, save=save, load=print):
    time.sleep(0.02)
    if i == 3:
        {library}
        print("now", flush=True)
    with open("at", "w") as at:
        at.write(str(i + 1))
"""

LIBRARIES = {
    "native handler": "libc.signal(signal.SIGUSR1, ctypes.cast(libc.abs, ctypes.c_void_p))",
    "unblocked": "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])",
    "handler that raises": "signal.signal(signal.SIGTERM, raises); signal.signal(signal.SIGUSR1, raises)",
    "both": "signal.signal(signal.SIGTERM, raises); signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])",
    "default": "signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.signal(signal.SIGUSR1, signal.SIG_DFL)",
    "thread": "threading.Thread(target=signal.pthread_sigmask, args=(signal.SIG_UNBLOCK, [signal.SIGTERM])).start()",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_meddles_with_signals_costs_no_checkpoint(tmp_path: Path, library: str) -> None:
    """After attaching, as NCCL does with USR1 (field cases 6 and 13): the supervisor owns the signal, the save is served."""
    with supervised(tmp_path, [sys.executable, "-c", TRAINER.format(library=LIBRARIES[library])]) as run:
        run.said("^now$")
        broadcast(run.pid, signal.SIGUSR1, signal.SIGTERM)
        assert run.code() == 75, run.story()
        assert run.intact() == [int((tmp_path / "at").read_text())]


def test_a_native_library_that_lets_usr1_in_costs_no_checkpoint(tmp_path: Path) -> None:
    """Not through Python: there it takes the place of the default action that would end the process."""
    opened = "mask = (ctypes.c_ulong * 16)(1 << (signal.SIGUSR1 - 1)); libc.pthread_sigmask(signal.SIG_UNBLOCK, mask, None)"
    with supervised(tmp_path, [sys.executable, "-c", TRAINER.format(library=opened)]) as run:
        run.said("^now$")
        broadcast(run.pid, signal.SIGUSR1)
        assert run.code() == 75, run.story()
        assert run.intact() == [int((tmp_path / "at").read_text())]


PARENT = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
assert rank.stdout.readline() == b"now\\n"
rank.terminate()
print("ended", rank.wait(30), flush=True)
"""


def test_an_attached_rank_can_be_ended_by_whoever_started_it(tmp_path: Path) -> None:
    """As torchrun ends the others when one rank has failed: the supervisor completes it, and no handler of ours swallows it."""
    with supervised(tmp_path, [sys.executable, "-c", PARENT, TRAINER.format(library="pass")]) as run:
        assert -int(run.said(r"^ended (\S+)$")[1]) in (signal.SIGTERM, signal.SIGKILL)
        assert run.event("rank_gone")["rank"] == 0


LOADER = """
import sys, torch
import ckpt_client as ckpt
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self): return 1 << 20
    def __getitem__(self, index): return torch.full((4,), float(index))

if __name__ == "__main__":
    batches = iter(DataLoader(Samples(), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1]))
    model = torch.nn.Linear(4, 1)
    for i in ckpt.steps(10**6, model=model):
        model(next(batches))
        with open("at", "w") as at:
            at.write(str(i + 1))
        if i == 3:
            print("now", flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loader_that_is_started_before_steps_survives_the_broadcast(tmp_path: Path, method: str) -> None:
    """Its workers are there before anything is attached; the import has closed the hole (docs/decisions/0010)."""
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    with supervised(tmp_path, [sys.executable, str(script), method], env={"OMP_NUM_THREADS": "1"}) as run:
        run.said("^now$", 120)
        broadcast(run.pid, signal.SIGTERM, signal.SIGUSR1)
        assert run.code(120) == 75, run.story()
        assert run.intact() == [int((tmp_path / "at").read_text())]
        assert "unexpectedly" not in run.err


FORKS = """
    import json, os, signal, sys
    import ckpt_client.shield as shield
    shield.stand(os.environ)
    shield.settle()
    mine = [signal.getsignal(number) is shield._nothing for number in ({numbers})]
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        theirs = [signal.getsignal(number) is signal.SIG_DFL for number in ({numbers})]
        os.write(write_end, json.dumps(theirs).encode())
        os._exit(0)
    print(json.dumps([mine, json.loads(os.read(read_end, 1000))]), flush=True)
"""


def test_whoever_is_started_from_the_training_process_can_be_ended_by_it(tmp_path: Path) -> None:
    """No handler of ours is in a forked child, nor for SIGTERM in a rank: the supervisor lets in what its parent sends it."""
    script = FORKS.format(numbers=", ".join(str(int(number)) for number in SHIELD))
    assert said(script, supervised_env(tmp_path)) == [[False, True, True], [True, True, True]]
