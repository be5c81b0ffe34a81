"""What killed processes leave on a node, and what only looks like it: sockets, shared memory; and the OOM killer's scores.

Everything here is real: sockets with real listeners, files in /dev/shm, processes that map them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.adapters.transport import Transport, places
from ckpt_supervisor.linux import oom, procfs, segments
from ckpt_supervisor.linux.segments import cleans_up, segments_of, sweep_segments
from ckpt_supervisor.start import stale

from tests.support.proc_stage import Stage, until
from tests.support.run import environment, is_alive, supervised

CAP_SYS_RESOURCE, PR_CAPBSET_DROP = 24, 24
SHM = Path("/dev/shm")

LONG_MS = 60_000
"""For looks that are bounded in time, where the bound is not the point: a busy machine may let this process stand for as long."""

MANAGER = ("torch_shm_manager", "-c", "import signal; print(1, flush=True); signal.pause()")
"""What torch calls the process through which its segments are opened: while one is alive no start here sweeps them."""

LISTENS = """
import json, signal, sys
from ckpt_supervisor.adapters.transport import Transport
with Transport([sys.argv[1]]) as transport:
    print(json.dumps(transport.endpoint), flush=True)
    signal.pause()
"""

HOLDS = """
import json, mmap, os, signal, sys
for name in sys.argv[2:]:
    fd = os.open("/dev/shm/" + name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 4096)
    if sys.argv[1] == "mapped":
        keep = mmap.mmap(fd, 4096)
        globals()["keep" + name] = keep
        os.close(fd)
print(json.dumps(os.getpid()), flush=True)
signal.pause()
"""


def old(path: Path, age_s: float = stale.EMPTY_S + 60) -> Path:
    """The same, as if it was made some time ago."""
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


def made(place: Path, name: str = "ckpt-abcd_123", mode: int = 0o700) -> Path:
    """An empty directory that was made long ago."""
    path = place / name
    path.mkdir()
    path.chmod(mode)
    return old(path)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_socket_of_a_killed_supervisor_goes_and_that_of_a_living_one_stays(tmp_path: Path, how: str) -> None:
    """However old it is, and whether or not it gets around to answering; who connects to it afterwards is heard."""
    with Stage(LISTENS, str(tmp_path)) as stage:
        path = Path(stage.said().removeprefix("ipc://"))
        old(path.parent)
        if how == "stopped":
            os.kill(stage.pid, signal.SIGSTOP)
        assert stale.sweep([str(tmp_path)]).sockets == ()
        assert path.is_socket()
        os.kill(stage.pid, signal.SIGKILL)
        stage.ends()
        assert path.is_socket()
        assert stale.sweep([str(tmp_path), str(tmp_path)]).sockets == (str(path.parent),)
        assert list(tmp_path.iterdir()) == []


def test_one_that_is_between_bind_and_listen_stays(tmp_path: Path) -> None:
    """It refuses connections as a dead one does: its directory is locked from before."""
    with Stage(LISTENS, str(tmp_path)) as stage:
        path = Path(stage.said().removeprefix("ipc://"))
        path.unlink()
        with contextlib.closing(_bound(path)):
            assert stale.sweep([str(tmp_path)]).sockets == ()
            stage.process.kill()
            stage.ends()
            assert stale.sweep([str(tmp_path)]).sockets == (str(path.parent),)


def _bound(path: Path) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.bind(str(path))
    return end


def test_an_empty_one_goes_when_nobody_can_be_about_to_use_it(tmp_path: Path) -> None:
    """A supervisor that starts makes the directory first."""
    young = tmp_path / "ckpt-12345678"
    young.mkdir(mode=0o700)
    gone = made(tmp_path)
    assert stale.sweep([str(tmp_path)]).sockets == (str(gone),)
    assert young.is_dir()


def test_what_is_not_exactly_ours_stays(tmp_path: Path) -> None:
    """Other names, other modes, other contents, a link, a file."""
    made(tmp_path, "ckpt-run")
    made(tmp_path, "ckpt-ABCDEFGH")
    made(tmp_path, "ckpt-abcdefgh", 0o755)
    (made(tmp_path, "ckpt-notes123") / "s").write_text("mine")
    (made(tmp_path, "ckpt-more1234") / "t").write_text("mine")
    _bound(tmp_path / "ckpt-more1234" / "s").close()
    (tmp_path / "ckpt-file1234").write_text("")
    made(tmp_path, "elsewhere")
    (tmp_path / "ckpt-link1234").symlink_to(tmp_path / "elsewhere")
    for path in tmp_path.iterdir():
        old(path)
    before = sorted(tmp_path.rglob("*"))
    assert stale.sweep(["", "/does/not/exist", str(tmp_path)]).sockets == ()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_start_removes_a_bounded_number(tmp_path: Path) -> None:
    """The next one goes on."""
    for number in range(stale.SWEPT_MAX + 5):
        made(tmp_path, f"ckpt-{number:08d}")
    assert len(stale.sweep([str(tmp_path)]).sockets) == stale.SWEPT_MAX
    assert len(stale.sweep([str(tmp_path)]).sockets) == 5


def test_two_that_start_and_sweep_at_once_both_keep_their_sockets(tmp_path: Path) -> None:
    """Twenty at the same moment, with rubbish between them: each hears what is sent to it at the end."""
    for number in range(20):
        made(tmp_path, f"ckpt-{number:08d}")
    ready = threading.Barrier(20)
    kept: list[bool] = []

    def start() -> None:
        with Transport([str(tmp_path)]) as transport:
            ready.wait(60)
            stale.sweep([str(tmp_path)])
            ready.wait(60)
            kept.append(Path(transport.endpoint.removeprefix("ipc://")).is_socket())

    threads = [threading.Thread(target=start) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert kept == [True] * 20
    assert list(tmp_path.iterdir()) == []


def test_a_start_sweeps_beside_the_command_and_tells_the_journal(tmp_path: Path) -> None:
    """Where it would put its own socket, XDG_RUNTIME_DIR among it."""
    (tmp_path / "run").mkdir()
    gone = made(tmp_path / "run")
    with supervised(tmp_path, ["sleep", "60"], env={"XDG_RUNTIME_DIR": str(tmp_path / "run")}) as run:
        assert str(gone) in run.event("stale_removed")["sockets"]
        assert not gone.exists()
        assert list((tmp_path / "run").iterdir()) == []


def test_the_places_are_those_of_the_transport() -> None:
    """The best first."""
    given = places({"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/local"})
    assert given == ["/local", "/tmp", "/dev/shm", "/var/tmp", "/run/user/7"]
    assert places({})[0] == ""


@pytest.fixture
def names() -> Iterator[dict[str, str]]:
    """Names that nobody has; what bears them afterwards is removed."""
    number = secrets.randbelow(10**6)
    found = {
        "psm": f"psm_{secrets.token_hex(4)}",
        "lock": f"sem.mp-{secrets.token_hex(4)}",
        "nccl": f"nccl-{secrets.token_hex(3)}",
        "torch": f"torch_999999999_{number}_0",
        "own": f"mine-{secrets.token_hex(4)}",
    }
    yield found
    for name in found.values():
        (SHM / name).unlink(missing_ok=True)


@contextlib.contextmanager
def managed() -> Iterator[int]:
    """A manager of torch's, as it looks from outside, and its pid."""
    with subprocess.Popen(MANAGER, executable=sys.executable, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_segments_of_killed_processes_are_removed(names: dict[str, str], how: str) -> None:
    """Those that they had open or mapped, once nobody has; what the user has named stays."""
    with managed():  # Or another supervisor that starts just now might remove torch's before us.
        with Stage(HOLDS, how, *names.values()) as stage:
            pid = stage.said()
            found = segments_of([pid], LONG_MS)
            assert {one.name for one in found} == set(names.values()) - {names["own"]}
            assert sweep_segments(found, LONG_MS) == ()
            os.kill(pid, signal.SIGKILL)
            stage.ends()
        assert sweep_segments(found, LONG_MS) == tuple(sorted(one.name for one in found))
    assert [name for name in names.values() if (SHM / name).exists()] == [names["own"]]
    assert segments_of([]) == frozenset()


def test_what_multiprocessing_really_makes_is_found() -> None:
    """Shared memory and a lock for spawned children; its tracker, which would remove them, is killed as well."""
    script = """
import json, multiprocessing, os, signal
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(json.dumps([os.getpid(), resource_tracker._resource_tracker._pid, memory.name]), flush=True)
signal.pause()
"""
    with Stage(script) as stage:
        pid, tracker, name = stage.said()
        found = segments_of([pid, tracker], LONG_MS)
        assert name in {one.name for one in found}
        assert [one.name[:7] for one in found if one.name != name] == ["sem.mp-"]
        for number in (tracker, pid):
            os.kill(number, signal.SIGKILL)
        stage.ends()
        until(lambda: not is_alive(tracker), "the tracker is gone")
    assert len(sweep_segments(found, LONG_MS)) == 2
    assert not (SHM / name).exists()


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_segments_that_somebody_else_uses_stay(names: dict[str, str], how: str) -> None:
    """A process outside of our tree: the kernel says so itself."""
    with Stage(HOLDS, how, names["psm"]) as other, Stage(HOLDS, how, names["psm"]) as stage:
        other.said()
        found = segments_of([stage.said()], LONG_MS)
        os.kill(stage.pid, signal.SIGKILL)
        stage.ends()
        assert sweep_segments(found, LONG_MS) == ()
        assert (SHM / names["psm"]).exists()


def test_segments_that_are_older_than_our_processes_stay(names: dict[str, str]) -> None:
    """Somebody else has made it, for whoever comes; and one that was made again under that name is another one."""
    path = SHM / names["psm"]
    path.write_bytes(bytes(4096))
    created = path.stat().st_ctime
    clock = path.with_name(names["own"])

    def is_later() -> bool:
        clock.write_text("x")
        return clock.stat().st_ctime > created + 1.2

    until(is_later, "a second has passed")
    opens = "import json, os, signal, sys; fd = os.open(sys.argv[1], os.O_RDONLY); print(1, flush=True); signal.pause()"
    with Stage(opens, str(path)) as stage, Stage(HOLDS, "mapped", names["nccl"]) as maker:
        stage.said()
        found = segments_of([stage.pid, maker.said()], LONG_MS)
        assert [one.name for one in found] == [names["nccl"]]
    clock.rename(SHM / names["nccl"])
    assert sweep_segments(found, LONG_MS) == ()


def test_what_torch_has_left_goes_when_its_manager_is_dead(names: dict[str, str]) -> None:
    """Maker and manager are dead, and nobody has it: nobody can open it any more. Names without a maker stay."""
    for name in ("torch", "psm"):
        (SHM / names[name]).write_bytes(bytes(16))
    with managed() as pid:
        assert cleans_up(pid)
        assert names["torch"] not in segments.sweep_abandoned()
    others = managers()
    gone = segments.sweep_abandoned()
    is_all_seen = Path("/proc/self/ns/pid").stat().st_ino == segments.INITIAL_PID_NAMESPACE
    if not is_all_seen or others & managers():
        assert names["torch"] not in gone
    elif not others | managers():
        assert not (SHM / names["torch"]).exists(), "we have removed it, or another supervisor that starts just now"
    assert (SHM / names["psm"]).exists()


def managers() -> set[int]:
    """Those of torch programs that somebody else runs here meanwhile."""
    return {pid for pid in procfs.of_user(os.geteuid()) if procfs.words(pid)[0].endswith("torch_shm_manager")}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_who_cleans_up_after_others_is_known(method: str) -> None:
    """multiprocessing's resource tracker, as it is really started; its children and a plain Python are none."""
    script = f"""
import json, multiprocessing, os, signal
from multiprocessing import resource_tracker, shared_memory
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    resource_tracker.ensure_running()
    print(json.dumps([resource_tracker._resource_tracker._pid, os.getpid()]), flush=True)
    signal.pause()
"""
    with Stage(script) as stage:
        tracker, itself = stage.said()
        until(lambda: cleans_up(tracker), "it has become what it is")
        assert not cleans_up(itself)
        assert not cleans_up(os.getpid())
    until(lambda: not is_alive(tracker), "it ends by itself")
    assert not cleans_up(tracker)


OOM = """
import json
from pathlib import Path
from ckpt_supervisor.linux import oom
own = oom.protect_self()
after = int(Path(oom.PATH).read_text())
Path(oom.PATH).write_text(str(oom.command_score(own)))  # As the guard does in the command.
print(json.dumps([own, after, int(Path(oom.PATH).read_text())]))
"""


def _unprivileged() -> None:
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0)


@pytest.mark.parametrize("more", [0, 100, 1000])
def test_the_supervisor_is_chosen_after_its_command(more: int) -> None:
    """As an ordinary user too, who may not lower a score below what it once was: nothing is said, the command's is higher."""
    own = min(1000, int(Path(oom.PATH).read_text()) + more)
    script = f"open('/proc/self/oom_score_adj', 'w').write('{own}')\n" + OOM
    done = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=_unprivileged, env=environment(), capture_output=True, check=True
    )  # fmt: skip
    assert done.stderr == b""
    before, ours, command = eval(done.stdout)  # noqa: S307 - our own script's.
    assert (before, command) == (own, min(1000, own + oom.HIGHER_BY))
    assert ours in (own, own - oom.LOWER_BY)


def test_a_supervisor_that_may_lowers_its_own_score() -> None:
    """By half of the memory, never so far that nothing may kill it; the command's does not change by that."""
    done = subprocess.run([sys.executable, "-c", OOM], env=environment(), capture_output=True, check=True)
    own, ours, command = eval(done.stdout)  # noqa: S307 - our own script's.
    assert own - oom.LOWER_BY <= ours <= own
    assert ours >= min(own, oom.LOWEST)
    assert command == min(1000, own + oom.HIGHER_BY)
