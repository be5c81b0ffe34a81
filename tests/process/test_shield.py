"""The shield on real processes: a termination inside the tree is completed, one from outside is not, and who sent it decides."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from ckpt_supervisor.adapters.shield import BURST_MS, QUICK_MS, SETTLED_MS, TICK_MS, Completed, Shield, deliver_term
from ckpt_supervisor.linux import procfs, ptracing
from ckpt_supervisor.linux.ptracing import Tracer

from tests.support.proc_stage import BOUND_S, mask_of, until
from tests.support.shield_stage import HANDLER, SENDER, TRACER, Processes, Sender, lives, stopped

MANY = 40
CONT = 7
"""PTRACE_CONT (ptrace(2))."""


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that are ended with the test."""
    made = Processes()
    yield made
    made.end()


def shield_of(pids: list[int], top: int | None = None) -> Shield:
    """A shield over these; senders are ours when they are `top` or below it, this process if nobody is named."""
    return Shield(lambda: pids, top)


def stands(pid: int) -> bool:
    """Whether it is stopped, by a tracer for example."""
    return procfs.state_of(pid) == "stopped"


def swept(shield: Shield, now_ms: int, quiet: bool = True) -> list[Completed]:
    """A sweep at that moment, and what is left of it: on a busy machine not everybody stands in the time that one may take."""
    done = shield.sweep(now_ms, quiet)

    def is_over() -> bool:
        nonlocal done
        if not shield._tracer.is_busy and not shield._is_behind:
            return True
        done += shield.sweep(now_ms, quiet)
        return False

    until(is_over, "everybody whom it stops stands")
    return done


def looked(shield: Shield, now_ms: int, quiet: bool = True) -> list[Completed]:
    """A sweep that looks at all of them."""
    shield.hurry()
    return swept(shield, now_ms, quiet)


def test_a_termination_inside_the_tree_is_delivered_after_a_moment(processes: Processes) -> None:
    """One look shows it, QUICK_MS later its sender is read, and the process dies of its SIGTERM. Nobody else does."""
    process, other = processes.start(), processes.start()
    shield = shield_of([process.pid, other.pid])
    assert swept(shield, 1_000) == []
    assert shield.next_ms(1_000) == 1_000 + TICK_MS
    process.terminate()
    assert looked(shield, 2_000) == []
    assert shield.next_ms(2_000) == 2_000 + QUICK_MS
    assert swept(shield, 2_000 + QUICK_MS - 1) == []
    assert lives(process.pid)
    assert swept(shield, 2_000 + QUICK_MS) == [Completed(process.pid, "delivered", os.getpid())]
    assert process.wait(BOUND_S) == -signal.SIGTERM
    assert lives(other.pid)


def test_the_next_ones_are_dealt_with_at_once_for_a_while(processes: Processes) -> None:
    """Programs end their helpers one after the other: after the first nobody waits for the next look at all."""
    one, two = processes.start(), processes.start()
    shield = shield_of([one.pid, two.pid])
    one.terminate()
    looked(shield, 0)
    assert len(swept(shield, QUICK_MS)) == 1
    assert one.wait(BOUND_S) == -signal.SIGTERM
    two.terminate()
    at_ms = shield.next_ms(QUICK_MS)
    assert at_ms < QUICK_MS + 5 * BURST_MS
    assert swept(shield, at_ms) == [Completed(two.pid, "delivered", os.getpid())]
    assert two.wait(BOUND_S) == -signal.SIGTERM


def test_a_sender_that_has_ended_meanwhile_was_ours_if_it_was_known(processes: Processes) -> None:
    """`kill` as a command of its own, or a parent that is gone: its pid is remembered."""
    process, sender = processes.start(), processes.sender()
    shield = shield_of([process.pid, sender.pid])
    looked(shield, 0)
    sender.send(signal.SIGTERM, process.pid)
    sender.process.kill()
    sender.process.wait(BOUND_S)
    looked(shield, 1_000)
    assert swept(shield, 1_000 + QUICK_MS) == [Completed(process.pid, "delivered", sender.pid)]
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_one_from_outside_is_delivered_when_it_has_been_quiet_for_long(processes: Processes) -> None:
    """A person ends one process by hand; a broadcast would have come to the supervisor by then."""
    process, inside = processes.start(), processes.sender()
    shield = shield_of([process.pid], top=inside.pid)
    process.terminate()
    looked(shield, 0)
    assert swept(shield, QUICK_MS) == []
    assert shield.next_ms(QUICK_MS) == SETTLED_MS
    assert swept(shield, SETTLED_MS - 1) == []
    assert lives(process.pid)
    assert swept(shield, SETTLED_MS) == [Completed(process.pid, "delivered", os.getpid())]
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_a_broadcast_is_taken_away_and_a_later_termination_is_seen(processes: Processes) -> None:
    """The broadcast reaches descendants a moment before us. After it, also during the notice, their parents can end them."""
    process, inside = processes.start(), processes.sender()
    shield = shield_of([process.pid, inside.pid], top=inside.pid)
    process.terminate()
    assert looked(shield, 0) == []
    assert looked(shield, 100, quiet=False) == []
    assert not procfs.is_pending(process.pid, signal.SIGTERM)
    for now_ms in range(1_000, 10_000, 1_000):
        assert looked(shield, now_ms, quiet=now_ms > 5_000) == []
    assert lives(process.pid)
    inside.send(signal.SIGTERM, process.pid)
    assert looked(shield, 20_000, quiet=False) == [Completed(process.pid, "delivered", inside.pid)]
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_a_termination_inside_the_tree_that_meets_a_notice_is_delivered(processes: Processes) -> None:
    """It was sent just before the broadcast, which changes nothing for it: whoever waits for its end must not wait for ever."""
    process, inside = processes.start(), processes.sender()
    shield = shield_of([process.pid, inside.pid], top=inside.pid)
    inside.send(signal.SIGTERM, process.pid)
    process.terminate()
    assert looked(shield, 0, quiet=False) == [Completed(process.pid, "delivered", inside.pid)]
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_a_broadcast_to_many_is_taken_away_in_parts(processes: Processes) -> None:
    """No sweep holds the supervisor up for long; the rest follows within moments."""
    everybody = [processes.start() for _ in range(MANY)]
    inside = processes.sender()
    shield = shield_of([process.pid for process in everybody], top=inside.pid)
    for process in everybody:
        process.terminate()
    now_ms = 0
    shield.hurry()

    def is_taken_away() -> bool:
        nonlocal now_ms
        assert shield.sweep(now_ms, quiet=False) == []
        assert shield.next_ms(now_ms) > now_ms
        now_ms = shield.next_ms(now_ms)
        # One that did not take it in time has nothing pending either, and stands until it is let go.
        return not shield._tracer.is_busy and not any(procfs.is_pending(process.pid, signal.SIGTERM) for process in everybody)

    until(is_taken_away, "nobody has it pending, and nobody is held")
    assert all(lives(process.pid) for process in everybody)


def test_where_ptrace_is_refused_a_process_is_killed_once_it_was_quiet(processes: Processes) -> None:
    """Its sender is not known. As its parent waits for it, SIGKILL stands in."""
    process = processes.start()
    processes.python(TRACER, str(process.pid))
    shield = shield_of([process.pid])
    os.kill(process.pid, signal.SIGTERM)
    looked(shield, 0)
    assert swept(shield, QUICK_MS) == []
    assert shield.next_ms(QUICK_MS) == SETTLED_MS
    assert swept(shield, SETTLED_MS) == [Completed(process.pid, "killed", 0)]
    until(lambda: procfs.state_of(process.pid) == "zombie", "it has died")


def test_where_ptrace_is_refused_a_broadcast_spares_the_process_for_good(processes: Processes) -> None:
    """What was pending when a signal came stays so, also long after the notice is over, and nobody is ended for it."""
    process, later = processes.start(), processes.start()
    for one in (process, later):
        processes.python(TRACER, str(one.pid))
    shield = shield_of([process.pid, later.pid])
    os.kill(process.pid, signal.SIGTERM)
    looked(shield, 0)
    looked(shield, 100, quiet=False)
    for now_ms in range(1_000, 20_000, 1_000):
        assert looked(shield, now_ms) == []
    os.kill(later.pid, signal.SIGTERM)
    looked(shield, 30_000)
    assert looked(shield, 31_000) == [Completed(later.pid, "killed", 0)]
    assert procfs.term_is_stuck(process.pid)


def test_looks_count_from_anew_when_the_signal_was_taken_in_between(processes: Processes) -> None:
    """Two SIGTERMs that the process takes by itself are not one that is stuck."""
    script = "import signal; print(1, flush=True)\nwhile True: signal.sigwait({signal.SIGTERM}); print(2, flush=True)"
    process = processes.python(script)
    shield = shield_of([process.pid], top=processes.start().pid)
    for now_ms in range(0, 10 * SETTLED_MS, SETTLED_MS // 2):
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.readline() == b"2\n"
        assert looked(shield, now_ms) == []
    assert lives(process.pid)


def test_a_stopped_process_is_left_alone_until_it_goes_on(processes: Processes) -> None:
    """Without us its SIGTERM would be pending as long."""
    process = processes.start()
    shield = shield_of([process.pid])
    stopped(process)
    process.terminate()
    for now_ms in (0, 500, 1_000):
        assert looked(shield, now_ms) == []
        assert shield.next_ms(now_ms) > now_ms + BURST_MS
    assert procfs.state_of(process.pid) == "stopped"
    process.send_signal(signal.SIGCONT)
    until(lambda: procfs.state_of(process.pid) == "running", "it goes on")
    assert looked(shield, 2_000) == [Completed(process.pid, "delivered", os.getpid())]
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_a_process_that_ends_in_between_is_nobody(processes: Processes) -> None:
    """Killed after it was seen, with or without somebody having waited for it."""
    process, other = processes.start(), processes.start()
    shield = shield_of([process.pid, other.pid])
    for one in (process, other):
        one.terminate()
    looked(shield, 0)
    for one in (process, other):
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    process.wait(BOUND_S)
    assert looked(shield, 1_000) == []
    assert other.wait(BOUND_S) == -signal.SIGKILL


def test_a_namespace_below_ours_has_pids_of_its_own(processes: Processes) -> None:
    """Whoever is named as a sender there is in there, and is ours, whatever process has that pid out here."""
    script = "sleep 1000 & pid=$!; echo ready; read -r line; kill $pid; wait $pid; echo $?"
    init = processes.start("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", f"{script}; read -r line")
    assert init.stdin is not None
    assert init.stdout is not None
    assert init.stdout.readline() == b"ready\n"
    pids = procfs.descendants(init.pid)
    shield = shield_of(pids, top=processes.start().pid)
    looked(shield, 0)
    init.stdin.write(b"\n")
    init.stdin.flush()
    until(lambda: any(map(procfs.term_is_stuck, pids)), "it is sent")
    looked(shield, 1_000)
    (done,) = swept(shield, 1_000 + QUICK_MS)
    assert (done.pid, done.how) == (pids[-1], "delivered")
    assert init.stdout.readline() == b"143\n"


def test_everybody_who_is_asked_to_end_takes_it(processes: Processes) -> None:
    """With SIGTERM blocked or not, stopped or not, with a handler or without, with one pending from before or not."""
    plain, free, hit, still = processes.start(), processes.start(shielded=False), processes.start(), processes.start()
    handler = processes.python(HANDLER)
    hit.terminate()
    stopped(still)
    gone = processes.start()
    gone.kill()
    gone.wait(BOUND_S)
    asked = (plain, free, hit, still, handler)
    tracer = Tracer()
    deliver_term([*(process.pid for process in asked), gone.pid], 20_000, tracer)
    for process in (plain, free, hit, still):
        assert process.wait(BOUND_S) == -signal.SIGTERM
    assert handler.wait(BOUND_S) == 7


def test_without_time_it_is_sent_and_nothing_more(processes: Processes) -> None:
    """The bound holds; who had it blocked has it pending."""
    process = processes.start()
    deliver_term([process.pid], 0, Tracer())
    assert signal.SIGTERM in mask_of(process.pid, "ShdPnd")
    assert lives(process.pid)


SPAWNS = """
    import os, sys, time
    print("ready", flush=True)
    # Until the child has run its program the parent cannot be stopped; and it waits for somebody to write into this.
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)])
    time.sleep(1000)
"""

ENDS_ITS_CHILD = """
    import subprocess, sys
    child = subprocess.Popen(["sleep", "1000"])
    other = subprocess.Popen(["sleep", "1000"])
    print(child.pid, other.pid, flush=True)
    sys.stdin.readline()
    child.terminate()
    print("sent", flush=True)
    print(child.wait(), flush=True)
"""


class StarvedNode(Tracer):
    """One without a core for those that are to lose a SIGTERM: they never come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def settle(self, pid: int, decide: Callable[[ptracing.Sender | None], ptracing.Wish]) -> ptracing.Outcome:
        """Also remembers the order."""
        self.asked.append(pid)
        return super().settle(pid, decide)

    def _absorb(self, pid: int, mask: int, _stop: int) -> ptracing.Outcome:
        return self._absorbed(pid, mask)

    def _absorbed(self, pid: int, mask: int) -> ptracing.Outcome:
        self._late[pid] = mask
        return "not now"


class SlowNode(Tracer):
    """One short of cores: whom it is to have lose a SIGTERM has not come to that in time, for the first time.

    `held`: it has not run at all by then; else it has taken the signal, and that was not seen in so many sweeps.
    """

    def __init__(self, *, held: bool, sweeps: int = 0) -> None:
        super().__init__()
        self.held, self.sweeps = held, sweeps
        self.late: set[int] = set()

    def finish(self, kept: Collection[int] = ()) -> None:
        """Sees nobody stand in the first ones."""
        if self.is_busy and self.sweeps:
            self.sweeps -= 1
            return
        super().finish(kept)

    def _absorb(self, pid: int, mask: int, stop: int) -> ptracing.Outcome:
        if pid in self.late:
            return super()._absorb(pid, mask, stop)
        self.late.add(pid)
        if not self.held:
            assert self._ptrace(CONT, pid) == 0
            until(lambda: not procfs.is_pending(pid, signal.SIGTERM), "it has taken its signal")
        self._late[pid] = mask
        return "not now"


LATE = {
    "in time": Tracer,
    "has not run yet": lambda: SlowNode(held=True),
    "seen in the next sweep": lambda: SlowNode(held=False),
    "seen in the third sweep": lambda: SlowNode(held=False, sweeps=2),
}


@pytest.mark.parametrize("how", LATE)
@pytest.mark.parametrize("sender", ["somebody", "slurmstepd"])
def test_a_rank_that_waits_for_a_child_whose_end_was_taken_for_the_notices_goes_on(
    processes: Processes, tmp_path: Path, how: str, sender: str
) -> None:
    """The parent's SIGTERM came while the broadcast's was pending there, so it left no trace. When it is pressed its child, and
    nobody else, gets what the notice would have given it without us. slurmstepd's is known before we have got our own. Nor is it
    forgotten where the child comes late to the stop for its SIGTERM, and loses that only in a later sweep."""
    rank = processes.start(sys.executable, "-c", textwrap.dedent(ENDS_ITS_CHILD))
    assert rank.stdin is not None
    assert rank.stdout is not None
    child, other = map(int, rank.stdout.readline().split())
    tracer = LATE[how]()
    shield = Shield(lambda: [rank.pid, child, other], rank.pid, tracer)
    if sender == "slurmstepd":
        (tmp_path / "slurmstepd").symlink_to("/bin/bash")
        stepd = Sender(processes.start(str(tmp_path / "slurmstepd"), "-c", SENDER))
        for pid in (child, other):
            stepd.send(signal.SIGTERM, pid)
    else:
        for pid in (child, other):
            os.kill(pid, signal.SIGTERM)
    until(lambda: procfs.term_is_stuck(child) and procfs.term_is_stuck(other), "the broadcast is there")
    rank.stdin.write(b"\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == b"sent\n"
    until(lambda: procfs.waits_for(rank.pid, child), "it waits for its child")
    times_ms = itertools.count(1_000, QUICK_MS)
    quiets = itertools.chain([sender == "slurmstepd"], itertools.repeat(True))  # A signal came to us just before the first one.

    def is_taken_away() -> bool:
        assert looked(shield, next(times_ms), next(quiets)) == []
        return not tracer.is_busy and not procfs.is_pending(child, signal.SIGTERM)

    until(is_taken_away, "the broadcast is taken away")
    assert lives(child)
    assert not procfs.waits_for(rank.pid, other)
    (done,) = shield.press({rank.pid})
    assert done.pid == child
    # On a busy machine it may not stand within PRESS_MS; then it is killed, which is said.
    assert rank.stdout.readline() == {"delivered": b"-15\n", "killed": b"-9\n"}[done.how]
    assert lives(other)
    assert shield.press({rank.pid}) == []
    os.kill(other, signal.SIGKILL)


def test_those_who_are_late_come_last(processes: Processes) -> None:
    """Each of them may take a whole sweep's time, and the others, whose parents may end them now, have one too."""
    late, fresh = [processes.start().pid for _ in range(2)], processes.start().pid
    tracer = StarvedNode()
    shield = Shield(lambda: [*late, fresh], fresh, tracer)  # Nobody here has sent it, for the shield.
    for pid in late:
        os.kill(pid, signal.SIGTERM)
    until(lambda: all(map(procfs.term_is_stuck, late)), "the broadcast is there")
    until(lambda: (shield.hurry(), shield.sweep(1_000, quiet=False), all(map(tracer.is_losing, late)))[2], "they are late")
    os.kill(fresh, signal.SIGTERM)
    until(lambda: procfs.term_is_stuck(fresh) and procfs.state_of(fresh) == "running", "it is there")
    tracer.asked.clear()
    until(lambda: (shield.hurry(), shield.sweep(1_001, quiet=False), tracer.asked)[2], "somebody is dealt with")
    assert tracer.asked[0] == fresh


def test_whoever_is_asked_while_it_is_to_lose_the_broadcasts_takes_it(processes: Processes) -> None:
    """What was to be kept from it and what is sent now are one and the same signal to the kernel."""
    process = processes.start()
    shield = Shield(lambda: [process.pid], process.pid, SlowNode(held=True))
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: procfs.term_is_stuck(process.pid), "the broadcast is there")
    shield.hurry()
    until(lambda: (shield.sweep(1_000, quiet=False), not procfs.term_is_stuck(process.pid))[1], "it is late")
    shield.ask([process.pid], 10_000)
    assert process.wait(BOUND_S) == -signal.SIGTERM


def test_nobody_who_has_a_rank_below_is_pressed(processes: Processes) -> None:
    """A launcher waits for just its rank: that is no reason to end the rank."""
    launcher = processes.start(sys.executable, "-c", textwrap.dedent(ENDS_ITS_CHILD))
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    rank, other = map(int, launcher.stdout.readline().split())
    shield = shield_of([launcher.pid, rank], top=launcher.pid)
    os.kill(rank, signal.SIGTERM)
    until(lambda: procfs.term_is_stuck(rank), "the broadcast is there")
    launcher.stdin.write(b"\n")
    launcher.stdin.flush()
    until(lambda: procfs.waits_for(launcher.pid, rank), "it waits")
    looked(shield, 1_000, quiet=False)
    assert shield.press({rank}) == []
    assert lives(rank)
    for pid in (rank, other):
        os.kill(pid, signal.SIGKILL)


def test_a_sigterm_of_slurmstepd_is_the_notices_however_late_the_rest_of_it_is(processes: Processes, tmp_path: Path) -> None:
    """On a node that swaps the supervisor may get its own a second after a loader worker: the worker is not ended for it."""
    (tmp_path / "slurmstepd").symlink_to("/bin/bash")
    process, stepd = processes.start(), processes.start(str(tmp_path / "slurmstepd"), "-c", SENDER)
    shield = shield_of([process.pid])
    assert stepd.stdin is not None
    assert stepd.stdout is not None
    stepd.stdin.write(b"TERM %d\n" % process.pid)
    stepd.stdin.flush()
    assert stepd.stdout.readline() == b"sent\n"
    for now_ms in (1_000, 1_000 + QUICK_MS, 1_001 + SETTLED_MS, 5_000):
        assert looked(shield, now_ms) == []
    assert not procfs.is_pending(process.pid, signal.SIGTERM)
    assert lives(process.pid)


def test_whoever_does_not_stand_in_time_is_let_go_later(processes: Processes, tmp_path: Path) -> None:
    """A process that stays seized is stopped for good, and dead it cannot be collected by its parent."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    parent = processes.python(SPAWNS, str(fifo))
    until(lambda: procfs.state_of(parent.pid) == "uninterruptible", "it waits for its child's exec")
    shield = shield_of([parent.pid])
    shield.ask([parent.pid], 50)
    assert procfs.state_of(parent.pid) == "uninterruptible"
    with fifo.open("wb"):
        times_ms = itertools.count(1_000, 10)

        def has_taken_it() -> bool:
            shield.hurry()
            shield.sweep(next(times_ms), quiet=True)
            return not lives(parent.pid) and not stands(parent.pid)

        until(has_taken_it, "it has taken it")
    assert parent.wait(BOUND_S) == -signal.SIGTERM
