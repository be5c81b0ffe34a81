"""The sockets between the supervisors of a step: words, addresses, garbage, and what waits or is dropped.

Hub and spokes are the real ones, over TCP of this machine. Who is kept out is in test_links_strangers.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest
from ckpt_client import wire
from ckpt_supervisor.adapters.garbage import Garbage
from ckpt_supervisor.adapters.invitation import endpoint_of, split_endpoint
from ckpt_supervisor.adapters.links import Hub, NoLink, Spoke, reachable
from ckpt_supervisor.core import between

from tests.support.links_stage import (
    BOUND_S,
    STAND,
    connections_to,
    hear,
    invite,
    joined,
    pump,
    pump_until,
    report,
    say_until_heard,
    stranger,
)


def test_words_go_both_ways_and_each_task_hears_its_own() -> None:
    """In order; one word to several tasks; a task that is not there misses it and nothing is raised."""
    with Hub() as hub, joined(hub, 1) as one, joined(hub, 2) as two:
        hub.send(2, between.Turned("a"))
        hub.broadcast((1, 2, 3, 65_535), STAND)
        hub.send(3, STAND)
        hub.send(1, between.Tell((10,), wire.Prepare(1)))
        assert hear(one, 2) == [STAND, between.Tell((10,), wire.Prepare(1))]
        assert hear(two, 2) == [between.Turned("a"), STAND]
        heard = between.Heard(2, (wire.Hello(wire.Who(0, 0, 10, 2), wire.VERSION, 1, 0, sharded=False),))
        two.send(heard)
        assert pump_until(hub, bool) == [heard]
        assert (hub.garbage_count, hub.denied_count, one.garbage_count) == (0, 0, 0)


def test_every_address_of_the_invitation_leads_to_the_hub() -> None:
    """IPv4 and IPv6, as this machine has them; a spoke that changes over has one connection at a time."""
    with Hub() as hub, Spoke(invite(hub), 1) as spoke:
        hub_port = str(hub.port)
        for number, endpoint in enumerate(invite(hub).addresses):
            assert endpoint.rpartition(":")[2] == hub_port
            spoke.connect(endpoint)
            assert spoke.endpoint == endpoint
            say_until_heard(hub, spoke, report(1, number))
            hub.send(1, STAND)
            assert hear(spoke) == [STAND]
            end = time.monotonic() + BOUND_S
            while (count := connections_to(hub.port)) != 1:
                assert time.monotonic() < end, count
                pump(hub, 10)


def listening() -> set[str]:
    """Where this process listens."""
    places = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {endpoint_of(place.ip, place.port) for place in places}


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1"])
def test_one_interface_is_bound_when_one_is_asked_for(interface: str) -> None:
    """The invitation names that one only, and nothing listens on the others."""
    before = listening()  # Another test's may be on its way out.
    with Hub(interface) as hub:
        invitation = invite(hub)
        assert invitation.addresses[0] == f"tcp://127.0.0.1:{hub.port}"
        assert {split_endpoint(endpoint)[0] for endpoint in invitation.addresses} <= {"127.0.0.1", "::1"}
        assert listening() - before == set(invitation.addresses)
        for number, endpoint in enumerate(invitation.addresses, start=1):
            with Spoke(invitation, number) as spoke:
                spoke.connect(endpoint)
                say_until_heard(hub, spoke, report(number))


def test_an_interface_that_is_not_here_is_refused_by_name() -> None:
    """With the names of those that are."""
    with pytest.raises(ValueError, match=r"'ib7'.*there are: .*lo"), Hub("ib7"):
        pass


def test_what_is_reachable_is_found_in_order_and_within_the_time() -> None:
    """A closed port, one that says nothing, and one that is no ZeroMQ are passed over; with none left it is None."""
    with Hub("127.0.0.1") as hub, contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        chatty = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # Not listened at, and nobody else's: a port that was given back may be somebody's hub.
        bad = [endpoint_of("127.0.0.1", one.getsockname()[1]) for one in (closed, silent, chatty)]

        def chat() -> None:
            with chatty.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        for good in ([f"tcp://127.0.0.1:{hub.port}"], []):
            talker = threading.Thread(target=chat)
            talker.start()
            begun = time.monotonic()
            invitation = msgspec.structs.replace(invite(hub), addresses=(*bad, *good))
            assert reachable(invitation, 5.0) == (good[0] if good else None)
            assert time.monotonic() - begun < 15.0
            talker.join(BOUND_S)


def test_few_words_wait_for_a_coordinator_that_is_away_and_none_before_the_first_connection() -> None:
    """However many were said: the first hundred come, in order, and what is said after them as before."""
    with Hub() as hub, Spoke(invite(hub), 1) as spoke:
        spoke.send(report(1, 10_000))
        spoke.connect(invite(hub).addresses[-1])
        for number in range(5_000):
            spoke.send(report(1, 20_000 + number))
        assert say_until_heard(hub, spoke, report(1)) == [report(1, 20_000 + number) for number in range(100)]


def test_a_spoke_that_was_turned_away_can_begin_anew_at_the_same_endpoint() -> None:
    """libzmq gives such a connection up for good; a second `connect` does not, and one to elsewhere works as before."""
    with Hub() as hub, Hub() as other:
        invitation = invite(hub)
        endpoint = f"tcp://127.0.0.1:{other.port}"
        keys = msgspec.structs.replace(
            invite(other), client_public=invitation.client_public, client_secret=invitation.client_secret
        )
        with Spoke(keys, 1) as spoke:
            for number in range(3):
                spoke.connect(endpoint)
                assert pump_until(other, bool) == [Garbage("127.0.0.1", "does not have this step's key", number == 0)]
        with Spoke(invitation, 1) as spoke:
            spoke.connect(endpoint)  # a server key that is not the other's
            assert pump(other, 300) == []
            spoke.connect(f"tcp://127.0.0.1:{hub.port}")
            say_until_heard(hub, spoke, report(1))


def test_the_last_word_gets_out_within_its_linger_time() -> None:
    """Closing with a time to linger delivers; closing twice, and speaking after it, is nothing."""
    with Hub() as hub, joined(hub, 1) as one:
        one.send(report(1, 77))
        one.close(5_000)
        one.close(0)
        one.send(report(1, 78))
        assert pump_until(hub, bool) == [report(1, 77)]
    with Hub() as hub, joined(hub, 1) as one:
        hub.send(1, between.Turned("over"))
        hub.close(5_000)
        assert hear(one) == [between.Turned("over")]
        hub.send(1, STAND)


def test_a_second_supervisor_of_a_task_is_turned_away_and_the_first_one_keeps_its_way() -> None:
    """Started twice in one task: the second one is told so, and takes neither the words nor the place of the first."""
    with Hub() as hub, joined(hub, 1) as first, Spoke(invite(hub), 1) as second:
        second.connect(invite(hub).addresses[-1])
        second.send(report(1, 2))
        (complaint,) = pump_until(hub, bool)
        assert isinstance(complaint, Garbage)
        assert "is a second supervisor of task 1" in complaint.reason
        assert hear(second) == [between.Turned("task 1 has a supervisor already")]
        hub.send(1, STAND)
        assert hear(first) == [STAND]
        assert list(second.receive()) == []


def test_a_process_that_has_given_up_its_first_connection_is_no_second_supervisor() -> None:
    """The coordinator was slow: it reads the report of a connection that is closed when the next one is there already."""
    with Hub() as hub:
        invitation = invite(hub)
        with Spoke(invitation, 1, "same") as early:
            early.connect(invitation.addresses[-1])
            early.send(report(1))
            end = time.monotonic() + BOUND_S
            while not hub.socket.poll(20):
                assert time.monotonic() < end
                hub.answer_zap()
        with Spoke(invitation, 1, "same") as late:
            late.connect(invitation.addresses[-1])
            assert say_until_heard(hub, late, report(1, 2)) == [report(1)]
            hub.send(1, STAND)
            assert hear(late) == [STAND]


def test_after_the_end_of_a_tasks_connection_another_one_is_let_in() -> None:
    """The kernel has closed it: whoever comes now is the only one."""
    with Hub() as hub:
        with joined(hub, 1):
            pass
        with joined(hub, 1) as new:
            hub.send(1, STAND)
            assert hear(new) == [STAND]


def garbage(task: int) -> dict[str, list[bytes]]:
    """Messages of a task that has the key, and are no words, by what is wrong with them."""
    good = between.encode(report(task))
    pack = msgspec.msgpack.encode
    rank = wire.Saved(wire.Who(0, 0, 1), 1, wire.Position(-5, 0), (), 1)
    return {
        "nothing": [b""],
        "random bytes": [random.Random(3).randbytes(200)],
        "half a word": [good[:-3]],
        "two frames": [good, good],
        "many frames": [b"x"] * 300,
        "the coordinator's word": [between.encode(STAND)],
        "a rank's word": [wire.encode(wire.Saving(wire.Who(0, 0, 1), 1))],
        "an unknown word": [pack(["Shutdown", task])],
        "a word with a very long name": [pack(["x" * 100_000, task])],
        "another task": [between.encode(report(task + 1))],
        "the coordinator's own task": [between.encode(report(0))],
        "a task too many": [between.encode(report(between.TASKS_MAX))],
        "types that are wrong": [pack(["Report", str(task), 1, 5, "node", 1])],
        "too many kinds of signals": [between.encode(msgspec.structs.replace(report(task), signals=(("A", "B", 1),) * 65))],
        "a rank's word out of range": [between.encode(between.Heard(task, (rank,)))],
        "nested for ever": [b"\x91" * 50_000],
        "a pickle": [b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."],
    }


def test_garbage_of_a_task_is_counted_dropped_and_told_once() -> None:
    """Whatever one that has the key sends, it never raises, never passes for a word, and others are heard."""
    with Hub() as hub, joined(hub, 1) as good, stranger(invite(hub), b"task-7-x") as bad:
        for place, (name, frames) in enumerate(garbage(7).items()):
            bad.send_multipart(frames)
            (found,) = pump_until(hub, bool)
            assert isinstance(found, Garbage), name
            assert (found.peer, found.first) == ("task-7-x", place == 0), name
            assert 0 < len(found.reason) <= 500, name
            assert hub.garbage_count == place + 1
        bad.send(between.encode(report(7)))
        assert pump_until(hub, bool) == [report(7)]
        assert say_until_heard(hub, good, report(1, 2)) == []


@pytest.mark.parametrize("name", [b"task-2-x", b"task-1", b"task-1 -x", b"TASK-1", b"1", b"\xff\xfe", b"task-" + b"1" * 200])
def test_a_peer_whose_name_is_not_the_task_that_it_speaks_for_is_not_believed(name: bytes) -> None:
    """Having the key makes one a task of the step, not another task."""
    with Hub() as hub, joined(hub, 1) as one, stranger(invite(hub), name) as bad:
        bad.send(between.encode(report(1, 666)))
        (found,) = pump_until(hub, bool)
        assert isinstance(found, Garbage)
        assert (found.reason, found.first, len(found.peer) <= 32) == ("claims to be task 1", True, True)
        hub.send(1, STAND)
        assert hear(one) == [STAND]


def test_a_frame_that_is_too_long_costs_its_sender_the_connection_and_nobody_else() -> None:
    """It is not even taken in; the sender comes again by itself."""
    with Hub() as hub, joined(hub, 1) as good, stranger(invite(hub), b"task-7-x") as bad:
        bad.send(bytes(between.FRAME_BYTES_MAX + 1))
        assert say_until_heard(hub, good, report(1, 2)) == []
        found: list[between.Up | Garbage] = []
        end = time.monotonic() + BOUND_S
        while report(7) not in found:
            assert time.monotonic() < end
            bad.send(between.encode(report(7)))
            found += pump(hub, 100)
        assert set(found) == {report(7)}


def test_a_flood_of_a_task_is_taken_in_turns() -> None:
    """One turn takes a bounded number of words; none is lost."""
    with Hub() as hub, stranger(invite(hub), b"task-1-x") as busy:
        for number in range(2_500):
            busy.send(between.encode(report(1, number)))
        turns: list[list[between.Up | Garbage]] = []
        end = time.monotonic() + BOUND_S
        while sum(map(len, turns)) < 2_500:
            assert time.monotonic() < end
            turns.append(pump(hub, 1000))
        assert max(map(len, turns)) <= 1_000
        assert [word for turn in turns for word in turn] == [report(1, number) for number in range(2_500)]


def test_a_spoke_takes_no_garbage_for_a_word() -> None:
    """Counted, told once, never raised: frames too many, a task's word, bytes."""
    with Hub() as hub, joined(hub, 1) as one:
        for frames in ([b"?"], [between.encode(STAND), b""], [between.encode(report(1))], [b"\x91" * 5_000]):
            hub.socket.send_multipart([hub._names[1], *frames])
        found = hear(one, 4)
        assert [item.first for item in found if isinstance(item, Garbage)] == [True, False, False, False]
        assert one.garbage_count == 4
        hub.send(1, STAND)
        assert hear(one) == [STAND]


def test_an_invitation_with_keys_that_are_none_is_told_as_such() -> None:
    """An exception of this module, not one of the library's."""
    with Hub() as hub:
        broken = msgspec.structs.replace(invite(hub), server_key="?")
        with pytest.raises(NoLink, match="no socket to the coordinator"), Spoke(broken, 1):
            pass


def test_the_sockets_bring_no_event_loop_with_them() -> None:
    """Start-up is counted in milliseconds."""
    program = "import sys, ckpt_supervisor.adapters.links; print({'asyncio', 'zmq.auth', 'tornado'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
