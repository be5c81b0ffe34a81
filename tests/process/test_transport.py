"""The socket to the ranks, with real processes at its other end: who is believed, what garbage does, where it finds a place.

The file is also the program of such a process: `python test_transport.py ENDPOINT` is a DEALER named after its pid (or after
the second argument) that sends what it reads, one message of hex frames a line, and prints what it receives. 0xc1*500 is 500
times that byte.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from ckpt_client import wire
from ckpt_client.wire import Position, Who
from ckpt_supervisor.adapters.transport import Garbage, NoPlace, Transport

BOUND_S = 30
DISTURBED_S = 2.0
"""How long random bytes go on."""

OWN_PART = len("/ckpt-12345678/s")
"""What the transport adds to the place that it is given."""


def peer_program(endpoint: str, name: str) -> None:
    """Send what stdin says, print what comes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.IDENTITY, name.encode())
        dealer.connect(endpoint)
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if dealer in ready:
                sys.stdout.write(" ".join(frame.hex() for frame in dealer.recv_multipart()) + "\n")
                sys.stdout.flush()
            if sys.stdin.fileno() in ready:
                line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined] - unbuffered, or the poll would miss lines
                if not line:
                    return
                dealer.send_multipart([frame_of(word) for word in line.decode().split()])


def frame_of(word: str) -> bytes:
    """The frame that this word of a line stands for."""
    text, _, times = word.removeprefix("0x").partition("*")
    return bytes.fromhex(text) * int(times or 1)


class Peer:
    """One such process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.who = Who(0, 0, process.pid)

    def send(self, *frames: bytes) -> None:
        """One message."""
        self.send_line(" ".join("0x" + frame.hex() for frame in frames))

    def send_line(self, line: str) -> None:
        """One message in the words of the program above."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def say(self, word: wire.FromRank) -> None:
        """One word, as a client sends it."""
        self.send(wire.encode(word))

    def hear(self) -> wire.ToRank:
        """The next word that it got (the test's own time limit is the bound)."""
        assert self.process.stdout is not None
        return wire.decode_to_rank(bytes.fromhex(self.process.stdout.readline()))

    def hello(self) -> wire.Hello:
        """Its first word."""
        return wire.Hello(self.who, wire.VERSION, 1, 0, sharded=False)


@contextlib.contextmanager
def peer(transport: Transport, name: str = "") -> Iterator[Peer]:
    """A process that is connected to the transport."""
    argv = [sys.executable, __file__, transport.endpoint, *([name] if name else [])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def take(transport: Transport, count: int) -> list[wire.FromRank | Garbage]:
    """The next words and pieces of garbage, this many; fails if they do not come."""
    end = time.monotonic() + BOUND_S
    found: list[wire.FromRank | Garbage] = []
    while len(found) < count:
        left_s = end - time.monotonic()
        assert left_s > 0, found
        transport.socket.poll(int(left_s * 1000))
        found += transport.receive()
    assert len(found) == count, found
    return found


def test_two_processes_say_words_and_each_hears_its_own(tmp_path: Path) -> None:
    """Words come with their sender's identity, answers go to that process alone, in order."""
    with Transport([str(tmp_path)]) as transport, peer(transport) as one, peer(transport) as two:
        for rank in (one, two):
            rank.say(rank.hello())
            assert take(transport, 1) == [rank.hello()]
        transport.send(two.pid, wire.Prepare(5))
        transport.send(one.pid, wire.Prepare(6))
        transport.send(one.pid, wire.Leave(7))
        assert (one.hear(), one.hear(), two.hear()) == (wire.Prepare(6), wire.Leave(7), wire.Prepare(5))
        transport.send(999_999_999, wire.Prepare(1))  # nobody: lost, as every word may be
        one.say(wire.Ack(one.who, 6, Position(3, 0)))
        assert take(transport, 1) == [wire.Ack(one.who, 6, Position(3, 0))]
        assert transport.garbage_count == 0


def garbage(sender: Peer, other: Peer) -> dict[str, list[bytes]]:
    """Messages that are no words, by what is wrong with them."""
    chance = random.Random(5)
    good = wire.encode(sender.hello())
    who = [0, 0, sender.pid]
    return {
        "nothing": [b""],
        "random bytes": [chance.randbytes(100)],
        "half a word": [good[:-4]],
        "a word and more": [good + b"\x00"],
        "two frames": [good, good],
        "five hundred frames": [b"x"] * 500,
        "an unknown word": [wire.msgspec.msgpack.encode(["Shutdown", who, 1])],
        "a supervisor's word": [wire.encode(wire.Leave(1))],
        "types that are wrong": [wire.msgspec.msgpack.encode(["Ack", who, "one", [1, 0]])],
        "a negative round": [wire.encode(wire.Ack(sender.who, -1, Position(1, 0)))],
        "a rank outside of its world": [wire.encode(wire.Hello(Who(4, 0, sender.pid), wire.VERSION, 2, 0, sharded=False))],
        "a number too large": [wire.msgspec.msgpack.encode(["Ack", who, 1, [(1 << 64) - 1, 0]])],
        "a negative position": [wire.encode(wire.Arrived(sender.who, 1, Position(-1, 0)))],
        "another process's name": [wire.encode(other.hello())],
        "nested for ever": [b"\x91" * 5_000],
        "large and senseless": [b"\xc1" * 5_000],
    }


def test_garbage_is_counted_dropped_and_told_once_per_peer(tmp_path: Path) -> None:
    """Whatever a process sends, it never raises, never passes for a word, and never keeps others from being heard."""
    with Transport([str(tmp_path)]) as transport, peer(transport) as bad, peer(transport) as good:
        kinds = garbage(bad, good)
        for place, (name, frames) in enumerate(kinds.items()):
            bad.send(*frames)
            (found,) = take(transport, 1)
            assert isinstance(found, Garbage), name
            assert (found.peer, found.first) == (str(bad.pid), place == 0), name
            assert found.reason, name
            assert transport.garbage_count == place + 1
        good.send(b"?")
        (found,) = take(transport, 1)
        assert isinstance(found, Garbage)
        assert (found.peer, found.first) == (str(good.pid), True)
        for rank in (bad, good):
            rank.say(rank.hello())
            assert take(transport, 1) == [rank.hello()]


def test_a_peer_without_a_pid_for_a_name_is_not_believed(tmp_path: Path) -> None:
    """A word counts only if the socket's name is the pid that the word claims; a name of any bytes is shown readably."""
    with Transport([str(tmp_path)]) as transport, peer(transport, "x" * 200) as stranger:
        stranger.say(stranger.hello())
        (found,) = take(transport, 1)
        assert isinstance(found, Garbage)
        assert (found.peer, found.reason) == ("x" * 32, f"claims to be process {stranger.pid}")


def test_a_huge_frame_costs_its_sender_the_connection_and_nobody_else(tmp_path: Path) -> None:
    """More than the largest word is not even taken in; the sender connects again by itself, the others notice nothing."""
    with Transport([str(tmp_path)]) as transport, peer(transport) as bad, peer(transport) as good:
        bad.send_line(f"0x00*{wire.FRAME_BYTES_MAX + 1}")
        good.say(good.hello())
        assert take(transport, 1) == [good.hello()]
        end = time.monotonic() + BOUND_S
        heard: list[wire.FromRank | Garbage] = []
        while not heard:  # a word that is on its way when the connection is cut is lost: a client says it again
            assert time.monotonic() < end
            bad.say(bad.hello())
            transport.socket.poll(200)
            heard += transport.receive()
        assert set(heard) == {bad.hello()}


def test_a_flood_is_taken_in_turns_so_that_signals_are_not_kept_waiting(tmp_path: Path) -> None:
    """One turn takes a bounded number of words; none is lost."""
    with Transport([str(tmp_path)]) as transport, peer(transport) as one:
        one.say(one.hello())
        take(transport, 1)
        for number in range(1, 2_501):
            one.say(wire.Saving(one.who, number))
        one.say(wire.Finished(one.who, 0))
        turns = []
        while not turns or turns[-1][-1:] != [wire.Finished(one.who, 0)]:
            assert transport.socket.poll(BOUND_S * 1000)
            turns.append(list(transport.receive()))
        assert max(map(len, turns)) <= 1_000
        numbers = [word.round for turn in turns for word in turn if isinstance(word, wire.Saving)]
        assert numbers == list(range(1, 2_501))


def long_place(tmp_path: Path, path_bytes: int, fill: str = "d") -> Path:
    """A directory below which the socket's path has exactly this many bytes."""
    left = path_bytes - OWN_PART - len(os.fsencode(tmp_path)) - 1
    assert left > 0, "the test's own directory is too long"
    count, rest = divmod(left, len(fill.encode()))
    place = tmp_path / (fill * count + "y" * rest)
    place.mkdir()
    assert len(os.fsencode(place)) + OWN_PART == path_bytes
    return place


@pytest.mark.parametrize(("path_bytes", "fits"), [(106, True), (107, True), (108, False), (200, False)])
@pytest.mark.parametrize("fill", ["d", "é"])
def test_a_path_that_is_too_long_for_a_socket_falls_on_to_the_next_place(path_bytes: int, fits: bool, fill: str) -> None:
    """107 bytes fit, 108 do not, however many characters they are; both ends agree on what was chosen (field case 138)."""
    with short_directory() as short:
        place, other = long_place(short, path_bytes, fill), short / "o"
        other.mkdir()
        with Transport([str(place), str(other)]) as transport:
            chosen = place if fits else other
            assert transport.endpoint.startswith(f"ipc://{chosen}/ckpt-")
            assert [path.name for path in short.glob("*/*")] == [Path(transport.endpoint).parent.name]
            with peer(transport) as one:
                one.say(one.hello())
                assert take(transport, 1) == [one.hello()]
        assert list(short.glob("*/*")) == []


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory with a short path; pytest's own may be too long for the lengths that matter here."""
    place = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    try:
        yield place
    finally:
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir()
        place.rmdir()


def test_places_that_cannot_be_used_are_passed_over_and_all_are_named(tmp_path: Path) -> None:
    """Not there, a file, no UTF-8, empty: the next one is taken; with none left the message names each with its reason."""
    (tmp_path / "file").write_text("")
    bytes_place = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(bytes_place).mkdir()
    bad = ["", "/nowhere/at/all", str(tmp_path / "file"), bytes_place]
    good = tmp_path / "good"
    good.mkdir()
    with Transport([*bad, str(good)]) as transport:
        assert transport.endpoint.startswith(f"ipc://{good}/")
    with pytest.raises(NoPlace) as caught, Transport(bad):
        pass
    for part in ("/nowhere/at/all (No such file", "file (Not a directory)", "no UTF-8", "set TMPDIR to a short path"):
        assert part in str(caught.value)
    assert list(Path(bytes_place).iterdir()) == []


def test_a_relative_place_gives_an_absolute_path(tmp_path: Path) -> None:
    """The command may change its directory before it connects."""
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        with Transport(["."]) as transport:
            assert Path(transport.endpoint.removeprefix("ipc://")).is_absolute()
            assert Path(transport.endpoint.removeprefix("ipc://")).is_relative_to(tmp_path)
    finally:
        os.chdir(before)


def test_only_this_user_reaches_the_socket_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    """The directory has mode 0700 whatever the umask, and goes with the transport, also when that ends by an exception."""
    before = os.umask(0)
    try:
        with contextlib.suppress(KeyError), Transport([str(tmp_path)]) as transport:
            path = Path(transport.endpoint.removeprefix("ipc://"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert path.is_socket()
            raise KeyError
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_a_umask_that_closes_everything_does_not_keep_this_user_out(tmp_path: Path) -> None:
    """The directory's mode is set, not hoped for."""
    before = os.umask(0o177)
    try:
        with Transport([str(tmp_path)]) as transport, peer(transport) as one:
            path = Path(transport.endpoint.removeprefix("ipc://"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            one.say(one.hello())
            assert take(transport, 1) == [one.hello()]
    finally:
        os.umask(before)


NOBODY = """
import os, socket, sys
from ckpt_client import wire
path = sys.argv[1]
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
with socket.socket(socket.AF_UNIX) as end:
    end.settimeout(20)
    try:
        end.connect(path)
        end.sendall(b"\\xff\\0\\0\\0\\0\\0\\0\\0\\1\\x7f")
        print("connected;", "dropped" if end.recv(1) == b"" else "answered")
    except (BrokenPipeError, ConnectionResetError):
        print("connected; dropped")
    except PermissionError:
        print("cannot get there")
"""


@pytest.mark.parametrize(("opened", "expected"), [(False, "cannot get there"), (True, "connected; dropped")])
def test_another_user_of_this_host_is_not_spoken_to(opened: bool, expected: str) -> None:
    """The directory keeps him out; were it open, the kernel says who he is, and the connection is dropped unread."""
    assert os.geteuid() == 0, "becoming another user takes root"
    with short_directory() as place:
        place.chmod(0o755)
        with Transport([str(place)]) as transport, peer(transport) as one:
            path = Path(transport.endpoint.removeprefix("ipc://"))
            if opened:
                path.parent.chmod(0o755)
                path.chmod(0o777)
            argv = [sys.executable, "-c", NOBODY, str(path)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
            assert done.stdout == expected + "\n"
            one.say(one.hello())
            assert take(transport, 1) == [one.hello()]
            assert transport.garbage_count == 0


def test_random_bytes_on_the_socket_disturb_nobody(tmp_path: Path) -> None:
    """For a while, after none or some of a true greeting: what ZeroMQ still takes for frames is garbage, and all words come."""
    chance = random.Random(12)
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with Transport([str(tmp_path)]) as transport, peer(transport) as good:
        path = transport.endpoint.removeprefix("ipc://")
        end, rounds = time.monotonic() + DISTURBED_S, 0
        while time.monotonic() < end or rounds <= 20:
            with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                connection.sendall(greeting[: chance.choice([0, 0, 10, 12, 64])] + chance.randbytes(chance.randrange(5_000)))
            rounds += 1
            good.say(wire.Saving(good.who, rounds))
            found: list[wire.FromRank | Garbage] = []
            while wire.Saving(good.who, rounds) not in found:
                assert time.monotonic() < end + BOUND_S
                transport.socket.poll(100)
                found += transport.receive()
            assert [word for word in found if not isinstance(word, Garbage)] == [wire.Saving(good.who, rounds)]


FULL_TMPDIR = """
mount -t tmpfs -o size=64k,nr_inodes=$2 tmpfs "$1" || exit 9
dd if=/dev/zero of="$1/fill" bs=1k 2>/dev/null
n=0
while [ $n -lt $3 ] && touch "$1/empty$n" 2>/dev/null; do n=$((n + 1)); done
shift 3
exec "$@"
"""
SERVE = """
import sys
from pathlib import Path
from ckpt_supervisor.adapters.transport import Transport
with Transport(sys.argv[1:]) as transport:
    print(transport.endpoint)
print(*[path.name for place in sys.argv[1:] for path in Path(place).glob("ckpt-*")])
"""


@pytest.mark.parametrize(("inodes", "empties"), [(100, 0), (6, 99), (6, 3)], ids=["no bytes", "no inodes", "one inode"])
def test_a_full_tmpdir_does_not_keep_a_run_from_starting(tmp_path: Path, inodes: int, empties: int) -> None:
    """With no byte left a socket still has room; with no inode, or one for the directory only, the next place has."""
    assert os.geteuid() == 0, "mounting a small file system takes root"
    full, other = tmp_path / "full", tmp_path / "other"
    full.mkdir()
    other.mkdir()
    argv = [sys.executable, "-c", SERVE, str(full), str(other)]
    wrapped = ["unshare", "--mount", "sh", "-c", FULL_TMPDIR, "sh", str(full), str(inodes), str(empties), *argv]
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    endpoint, left = done.stdout.split("\n")[:2]
    assert endpoint.startswith(f"ipc://{other if empties else full}/ckpt-")
    assert left == ""


if __name__ == "__main__":
    peer_program(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else str(os.getpid()))
