"""The file by which a step's supervisors find the coordinator: what is found, what is refused, and that it is nobody else's.

Real files, real users (root is needed to become another one) and, for addresses, real interfaces in a network of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from ckpt_supervisor.adapters.rendezvous import (
    INVITATION_BYTES_MAX,
    NAMES_MAX,
    Invitation,
    NotYet,
    Refused,
    addresses,
    file_name,
    find,
    publish,
    withdraw,
)

BOUND_S = 30
NOBODY = 65534
MINE = Invitation(
    job="77_3",
    attempt=2,
    step_id="0",
    epoch=5,
    host="node-1",
    pid=4321,
    addresses=("tcp://10.1.2.3:4567", "tcp://[2001:db8::1]:4567"),
    server_key="a" * 40,
    client_public="b" * 40,
    client_secret="c:S" + "c" * 37,
    nonce="0123456789abcdef" * 2,
)
BECOME_NOBODY = """
import os, sys
from pathlib import Path
from ckpt_supervisor.adapters.rendezvous import find
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
"""
"""What it needs is imported before: the interpreter may be in a home that nobody enters."""


def changed(**fields: object) -> Invitation:
    """The invitation of another coordinator."""
    return msgspec.structs.replace(MINE, **fields)


def find_mine(directory: Path) -> Invitation | NotYet | Refused:
    """One look for the step above."""
    return find(directory, MINE.job, MINE.attempt, MINE.step_id)


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A checkpoint directory that everybody may enter; pytest's own are closed to others."""
    place = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    place.chmod(0o777)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def as_nobody(program: str, *args: str) -> str:
    """What this program prints as another user."""
    assert os.geteuid() == 0, "becoming another user takes root"
    argv = [sys.executable, "-c", BECOME_NOBODY + program, *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_one_publishes_another_finds(tmp_path: Path) -> None:
    """Every field comes back; the file is where the design says."""
    path = publish(tmp_path, MINE)
    assert path == tmp_path / ".rendezvous" / "77_3-2-0-5.json"
    assert find_mine(tmp_path) == MINE
    assert [name.name for name in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("job", ["local-node/1", "a\0b", "../../etc", "2-2-0", "ein Name mit ä", ".json"])
def test_job_names_of_any_characters_are_found(tmp_path: Path, job: str) -> None:
    """Spelled as the journal spells them, inside of the directory; the content says whose it really is."""
    theirs = changed(job=job)
    assert publish(tmp_path, theirs).parent == tmp_path / ".rendezvous"
    assert find(tmp_path, job, 2, "0") == theirs


def test_nothing_to_be_seen_is_not_yet_with_a_reason(tmp_path: Path) -> None:
    """No directory, none of ours, another step's, half written, still empty: each may be there at the next look."""
    nothing = find_mine(tmp_path / "none")
    assert nothing == NotYet(".rendezvous cannot be read (No such file or directory)")
    assert find_mine(tmp_path) == nothing
    publish(tmp_path, changed(step_id="1"))
    publish(tmp_path, changed(job="78"))
    directory = tmp_path / ".rendezvous"
    (directory / "77_3-2-0-5.json.new").write_text("{")
    assert find_mine(tmp_path) == NotYet("there is no file of this step in .rendezvous")
    (directory / "77_3-2-0-5.json").touch(mode=0o600)
    assert find_mine(tmp_path) == NotYet("77_3-2-0-5.json is still empty here")


def test_a_disk_that_cannot_be_read_is_not_yet() -> None:
    """EACCES comes and goes on a network file system, and so do its kin; the reason is told."""
    with open_directory() as place:
        publish(place, MINE)
        said = as_nobody("print(find(Path(sys.argv[1]), '77_3', 2, '0'))", str(place))
        assert said == "NotYet(reason='.rendezvous cannot be read (Permission denied)')\n"


def test_what_is_published_late_is_found_by_the_one_who_kept_looking(tmp_path: Path) -> None:
    """Another process publishes after the first look has found nothing."""
    program = """
import sys
from pathlib import Path
import msgspec
from ckpt_supervisor.adapters.rendezvous import Invitation, publish
print("ready", flush=True)
publish(Path(sys.argv[1]), msgspec.json.decode(sys.stdin.readline(), type=Invitation))
"""
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        assert isinstance(find_mine(tmp_path), NotYet)
        other.stdin.write(msgspec.json.encode(MINE) + b"\n")
        other.stdin.flush()
        end = time.monotonic() + BOUND_S
        while isinstance(found := find_mine(tmp_path), NotYet):
            assert time.monotonic() < end, found
        assert found == MINE
        assert other.wait(BOUND_S) == 0


def test_of_several_the_highest_epoch_counts_and_publishing_removes_the_lower_ones(tmp_path: Path) -> None:
    """Numbers, not text: 10 is above 9. Leftovers of any job go, also half-written ones; a higher epoch's file stays."""
    publish(tmp_path, changed(epoch=9))
    directory = tmp_path / ".rendezvous"
    (directory / "12-0-0-3.json").write_text("left by a node that failed")
    (directory / "12-0-0-8.json.new").write_text("{")
    (directory / "notes").write_text("somebody's")
    (directory / "77_3-2-0-11.json").write_bytes(msgspec.json.encode(changed(epoch=11)))
    (directory / "77_3-2-0-11.json").chmod(0o600)
    publish(tmp_path, changed(epoch=10))
    assert {path.name for path in directory.iterdir()} == {"77_3-2-0-10.json", "77_3-2-0-11.json", "notes"}
    assert find_mine(tmp_path) == changed(epoch=11)
    withdraw(directory / "77_3-2-0-11.json")
    assert find_mine(tmp_path) == changed(epoch=10)


def test_withdrawing_never_raises_and_leaves_nothing(tmp_path: Path) -> None:
    """Also when it is gone already, was never there, or is something else."""
    path = publish(tmp_path, MINE)
    withdraw(path)
    assert isinstance(find_mine(tmp_path), NotYet)
    for other in (path, tmp_path / "none" / "x.json", tmp_path, Path("/proc/self/stat")):
        withdraw(other)


def test_the_file_is_nobody_elses_at_any_moment(tmp_path: Path) -> None:
    """Whatever the umask, whatever the directory's mode was before: a watcher never sees a mode that lets others in."""
    directory = tmp_path / ".rendezvous"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    publish(tmp_path, MINE)
    modes: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        is_last = False
        while not is_last:
            is_last = over.is_set()  # One look at least is after the first publishing, however late this thread begins.
            for name in os.listdir(directory):  # noqa: PTH208 - the quickest there is
                with contextlib.suppress(FileNotFoundError):
                    modes.add((directory / name).lstat().st_mode & 0o777)
            modes.add(directory.stat().st_mode & 0o777)

    watcher = threading.Thread(target=watch)
    before = os.umask(0)
    try:
        watcher.start()
        for epoch in range(6, 206):
            publish(tmp_path, changed(epoch=epoch))
    finally:
        over.set()
        watcher.join()
        os.umask(before)
    assert modes == {0o600, 0o700}


def test_another_user_can_neither_read_the_key_nor_list_nor_put_anything_there() -> None:
    """In a directory that everybody may write to; even with the file's mode opened by mistake the directory is closed."""
    attempts = """
path = Path(sys.argv[1])
for deed in (lambda: path.read_bytes(), lambda: os.listdir(path.parent), lambda: path.stat(), lambda: path.unlink(),
             lambda: (path.parent / "x").write_text(""), lambda: path.parent.chmod(0o777), lambda: os.rmdir(path.parent)):
    try:
        print("could", deed())
    except OSError as error:
        print(type(error).__name__)
"""
    with open_directory() as place:
        path = publish(place, MINE)
        path.chmod(0o644)
        place.chmod(0o1777)
        assert as_nobody(attempts, str(path)).split() == ["PermissionError"] * 7


def spoil_mode(path: Path) -> None:
    """Group may read it."""
    path.chmod(0o640)


def spoil_owner(path: Path) -> None:
    """Another user's, who knows the key then."""
    os.chown(path, NOBODY, NOBODY)


def spoil_directory_mode(path: Path) -> None:
    """Others may enter."""
    path.parent.chmod(0o711)


def spoil_directory_owner(path: Path) -> None:
    """Another user may put there what he likes."""
    os.chown(path.parent, NOBODY, NOBODY)


def spoil_with_link(path: Path) -> None:
    """The file is elsewhere."""
    path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(path.parent.parent / "elsewhere.json")


def spoil_with_link_to_nothing(path: Path) -> None:
    """A link whose target is missing is no "not yet"."""
    path.unlink()
    path.symlink_to("/nowhere")


def spoil_with_directory_link(path: Path) -> None:
    """The directory is elsewhere."""
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


def spoil_with_file_for_directory(path: Path) -> None:
    """The directory is a file."""
    shutil.rmtree(path.parent)
    path.parent.touch()


def spoil_with_directory(path: Path) -> None:
    """The file is a directory."""
    path.unlink()
    path.mkdir(mode=0o700)


def spoil_with_fifo(path: Path) -> None:
    """Opening it must not block."""
    path.unlink()
    os.mkfifo(path, 0o600)


def spoil_with_socket(path: Path) -> None:
    """A socket cannot be opened at all."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def spoil_with_size(path: Path) -> None:
    """Larger than any invitation, sparse."""
    os.truncate(path, 1 << 40)


def spoil_with_padding(path: Path) -> None:
    """Valid but for one byte too many."""
    path.write_bytes(path.read_bytes().ljust(INVITATION_BYTES_MAX + 1))


def spoil_with_names(path: Path) -> None:
    """So many names that a look would take long."""
    for number in range(NAMES_MAX):
        (path.parent / f"x{number}").touch()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_mode, "77_3-2-0-5.json is open to other users (mode 0640)"),
        (spoil_owner, "77_3-2-0-5.json belongs to another user (uid 65534)"),
        (spoil_directory_mode, ".rendezvous is open to other users (mode 0711)"),
        (spoil_directory_owner, ".rendezvous belongs to another user (uid 65534)"),
        (spoil_with_link, "77_3-2-0-5.json is a link"),
        (spoil_with_link_to_nothing, "77_3-2-0-5.json is a link"),
        (spoil_with_directory_link, ".rendezvous is a link"),
        (spoil_with_file_for_directory, ".rendezvous is no directory"),
        (spoil_with_directory, "77_3-2-0-5.json is no regular file"),
        (spoil_with_fifo, "77_3-2-0-5.json is no regular file"),
        (spoil_with_socket, "77_3-2-0-5.json is a socket or a device"),
        (spoil_with_size, f"77_3-2-0-5.json is larger than {INVITATION_BYTES_MAX} bytes"),
        (spoil_with_padding, f"77_3-2-0-5.json is larger than {INVITATION_BYTES_MAX} bytes"),
        (spoil_with_names, f".rendezvous holds more than {NAMES_MAX} names"),
    ],
)
def test_a_file_that_others_could_have_written_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    """Links, foreign owners, open modes, odd kinds and sizes are seen before a byte is believed."""
    spoil(publish(tmp_path, MINE))
    assert find_mine(tmp_path) == Refused(reason)


def bad_contents() -> Iterator[tuple[str, bytes]]:
    """Bytes that are no invitation to this step, by what is wrong."""
    good = msgspec.to_builtins(MINE)
    yield "no JSON", b"\x00\xff" * 50
    yield "half", msgspec.json.encode(MINE)[:-20]
    yield "nested", b"[" * 60_000
    yield "another type", b"[]"
    for field, value in (
        ("attempt", "2"), ("epoch", 5.5), ("pid", None), ("addresses", []), ("addresses", ["tcp://node-1:4567"]),
        ("addresses", ["ipc:///tmp/x"]), ("addresses", ["tcp://10.1.2.3:0"]), ("addresses", ["tcp://10.1.2.3:70000"]),
        ("addresses", ["tcp://10.1.2.300:1"]), ("addresses", ["tcp://10.1.2.3:1;tcp://10.1.2.4:1"]),
        ("addresses", ["tcp://10.1.2.3:4567"] * 33), ("server_key", "short"), ("client_secret", "\u00e4" * 40),
        ("client_public", "a" * 40 + "\n"), ("nonce", "xyz"), ("epoch", 6), ("job", "78"), ("attempt", 3), ("step_id", "1"),
        ("new_field", 1),
    ):  # fmt: skip
        yield f"{field} {str(value)[:20]!r}", json.dumps({**good, field: value}).encode()
    for field in good:
        yield f"no {field}", json.dumps({key: value for key, value in good.items() if key != field}).encode()


@pytest.mark.parametrize(("what", "data"), list(bad_contents()), ids=[what for what, _ in bad_contents()])
def test_content_that_is_no_invitation_to_this_step_is_refused(tmp_path: Path, what: str, data: bytes) -> None:
    """Wrong types, names to be looked up, keys that are none, another step's: never an exception, nor a secret in the reason."""
    publish(tmp_path, MINE).write_bytes(data)
    found = find_mine(tmp_path)
    assert isinstance(found, Refused), what
    assert found.reason.startswith("77_3-2-0-5.json is ")
    assert MINE.client_secret not in found.reason


def test_the_secret_is_not_in_what_a_journal_would_show() -> None:
    """An invitation as text names the step, not the keys."""
    assert MINE.client_secret not in f"{MINE} {MINE!r}"


def test_publishing_into_what_is_not_ours_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """A directory of another user, a link, a file, none at all, a name that is too long: OSError, and no key on the disk."""
    directory = tmp_path / ".rendezvous"
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to another user"):
        publish(tmp_path, MINE)
    assert list(directory.iterdir()) == []
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        publish(tmp_path, MINE)
    assert list(directory.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "none", MINE)
    directory.unlink()
    with pytest.raises(OSError, match="name too long"):
        publish(tmp_path, changed(job="j" * 300))
    assert list(directory.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path: Path) -> None:
    """OSError from a file system without a byte left; nothing of this epoch stays."""
    program = """
import sys
from pathlib import Path
import msgspec
from ckpt_supervisor.adapters.rendezvous import Invitation, publish
place = Path(sys.argv[1])
try:
    publish(place, msgspec.json.decode(sys.argv[2], type=Invitation))
except OSError as error:
    print(error.strerror, list((place / ".rendezvous").iterdir()))
"""
    fill = (
        'mount -t tmpfs -o size=64k tmpfs "$1" && shift && { dd if=/dev/zero of="$1/fill" bs=1k 2>/dev/null; shift; exec "$@"; }'
    )
    argv = [sys.executable, "-c", program, str(tmp_path), msgspec.json.encode(MINE).decode()]
    wrapped = ["unshare", "--mount", "sh", "-c", fill, "sh", str(tmp_path), str(tmp_path), *argv]
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "No space left on device []\n"


def test_this_hosts_addresses_are_literals_and_loopback_comes_last() -> None:
    """Each can be bound here; one interface, or one address, can be asked for alone; others are named when it is not there."""
    found = addresses("", 4567)
    assert "127.0.0.1" in found[-1] or "::1" in found[-1]
    for endpoint in found:
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        assert port == "4567"
        family = socket.AF_INET6 if "[" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address.strip("[]"), 0))
    assert "tcp://127.0.0.1:1" in addresses("lo", 1)
    assert addresses("127.0.0.1", 1) == ("tcp://127.0.0.1:1",)
    with pytest.raises(
        ValueError, match=r"no interface or address 'ib7'.* that is up on this host; there are: .*lo \(127\.0\.0\.1\)"
    ):
        addresses("ib7", 1)


INTERFACES = """
ip link set lo up
for name in $1; do
    ip link add "$name" type veth peer name "p-$name" && ip link set "$name" up && ip link set "p-$name" up || exit 9
done
shift
while [ "$1" != -- ]; do ip addr add "${1#*=}" dev "${1%%=*}" $(case "$1" in *:*) echo nodad;; esac) || exit 9; shift; done
shift
exec "$@"
"""
LIST = "import sys; from ckpt_supervisor.adapters.rendezvous import addresses; print(*addresses(sys.argv[1], 7))"


@pytest.mark.parametrize(
    ("names", "given", "interface", "expected"),
    [
        ("", [], "", ["127.0.0.1"]),
        (
            "docker0 eth9 ib0 virbr0",
            ["docker0=172.17.0.1/16", "virbr0=192.168.122.1/24", "eth9=169.254.3.4/16", "eth9=10.0.0.5/24", "ib0=10.9.0.5/24"],
            "",
            ["10.0.0.5", "10.9.0.5", "172.17.0.1", "192.168.122.1", "169.254.3.4", "127.0.0.1"],
        ),
        ("eth9 ib0", ["eth9=10.0.0.5/24", "ib0=10.9.0.5/24"], "ib0", ["10.9.0.5"]),
        ("eth9 ib0", ["eth9=10.0.0.5/24", "ib0=10.9.0.5/24"], "10.0.0.5", ["10.0.0.5"]),
        ("veth12", ["veth12=10.0.0.5/24"], "", ["10.0.0.5", "127.0.0.1"]),
    ],
    ids=["loopback only", "many", "one by name", "one by address", "a container's own"],
)
def test_addresses_that_others_can_reach_come_first(names: str, given: list[str], interface: str, expected: list[str]) -> None:
    """Real networks before bridges of this host, link-local and loopback; IPv6 link-local never."""
    wrapped = ["unshare", "--net", "sh", "-c", INTERFACES, "sh", names, *given, "--", sys.executable, "-c", LIST, interface]
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = [endpoint for endpoint in done.stdout.split() if "[::1]" not in endpoint]
    assert found == [f"tcp://{address}:7" for address in expected]


def test_file_names_are_spelled_as_the_journals() -> None:
    """Characters that no file name may hold are replaced; names of two steps may fall together, which `find` refuses."""
    assert file_name("a/b\0c", 1, "2", 3) == "a_b_c-1-2-3.json"
    assert len({file_name(*parts) for parts in itertools.product(["1", "2"], [0, 1], ["0", "1"], [1, 2])}) == 16


def test_a_file_of_a_higher_epoch_that_cannot_be_believed_does_not_hide_a_good_one(tmp_path: Path) -> None:
    """With none to be believed, what is wrong with the highest one is told."""
    publish(tmp_path, changed(epoch=9))
    directory = tmp_path / ".rendezvous"
    (directory / "77_3-2-0-12.json").write_text("garbage")
    (directory / "77_3-2-0-12.json").chmod(0o600)
    assert find_mine(tmp_path) == changed(epoch=9)
    withdraw(directory / "77_3-2-0-9.json")
    found = find_mine(tmp_path)
    assert isinstance(found, Refused)
    assert "77_3-2-0-12.json is no invitation" in found.reason
