"""Completes terminations inside the tree that the shield would otherwise swallow.

The command and all below it run with SIGTERM blocked, so that Slurm's broadcast does not end loader workers in mid-
save. But then a process's own parent cannot end it either: `Popen.terminate()`, `Pool.__exit__` would wait for ever.
So a descendant in which SIGTERM is pending and blocked is stopped for less than a millisecond (linux/ptracing.py), and who
sent the signal decides (docs/slurm.md, section 4):

- A process of our own tree: it takes its SIGTERM at once, also in the middle of a notice. It dies of it, or its own
  handler runs, and its parent sees the status that it would see without us.
- Anybody else, while no notice is in force: a person, perhaps. Or a broadcast that has not reached us yet: with
  proctrack/linuxproc the descendants are hit a moment before the supervisor. After SETTLED_MS of quiet it is delivered.
- Anybody else, and a signal came to the supervisor or a notice is in force: it is the broadcast. It is taken away from
  the process, so that a later SIGTERM from its own parent is seen as such: a pending signal is not sent twice. What
  remains are the milliseconds in between: a parent that ends its child just then waits for it until the teardown.

Where ptrace is refused the sender is not known: SIGKILL after SETTLED_MS of quiet stands in for the delivery, and what
was found stuck while it was not quiet is spared for as long as it lives.

Owns the memory of what was seen, and the kill. Must not end anybody for a SIGTERM that came from outside with a signal
to us. Times are arguments; what a look has cost is measured in here, and so is how long a sweep has taken.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from ckpt_supervisor.linux import procfs
from ckpt_supervisor.linux.pending import Identity, Stuck, Watch
from ckpt_supervisor.linux.ptracing import Outcome, Sender, Tracer, Wish

TICK_MS = 600
"""So often the count of queued signals is read; all processes are looked at when it has changed."""

LOOK_MS = 2_000
"""And this often in any case, for what it does not tell: processes of another user, changes that make up for each other."""

SHARE_MAX = 400
"""Looks may take one part in this many of the time, 0.25 %, as long as nothing comes of them."""

CREDIT_US_MAX = 50_000
"""Of that share as much may be saved up, so that a look is had at once when a signal comes after a while."""

QUICK_MS = 50
"""Between the look that shows a pending SIGTERM and the stop that reads its sender. A broadcast is over by then."""

SETTLED_MS = 400
"""The same for a SIGTERM that nobody of ours has sent."""

BURST_MS = 20
BURST_US_SHARE = 150
BURST_LASTS_MS = 2_000
"""After a completion it is ticked so often and for so long: programs end their helpers one after the other.

A look at 200 processes on a busy machine takes 5 ms; then it is every 5,000 / 150 = 33 ms."""

BUSY_MS = 50
"""Whether a process that did not stand in time does by now is asked this often."""

SWEEP_S = 0.025
"""A sweep stops processes for no longer than this, one after the other; the rest follows after whatever else there is to do."""

ASK_PAUSE_S = 0.001

STEPD = "slurmstepd"
"""Sends Slurm's signals to the processes of a step, one after the other: to us last, and after seconds where a node swaps."""

FORWARDERS = frozenset({"timeout"})
"""coreutils' timeout hands a SIGTERM that it gets on to its command. While a notice is in force that is the broadcast once more:
where it comes before Slurm's own, the kernel keeps its name as the sender's, not slurmstepd's (seen once in some 100 runs)."""

ABSORBED_MAX = 10_000
PRESS_MS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    """A termination that was completed: `delivered`, or `killed` where ptrace was refused. `sender`: 0 when it is not known."""

    pid: int
    how: Literal["delivered", "killed"]
    sender: int


class Shield:
    """Call `sweep` at `next_ms`, and at once after `hurry`; `quiet=False` when a signal came or a notice is in force.

    `walk` finds the processes that are shielded. Senders are of our tree when they are `top` or descend from it.
    """

    def __init__(self, walk: Callable[[], Collection[int]], top: int | None = None, tracer: Tracer | None = None) -> None:
        self._watch = Watch(walk)
        self._tracer = Tracer() if tracer is None else tracer
        self._top = os.getpid() if top is None else top
        self._first_seen: dict[Identity, int] = {}
        self._strangers: set[Identity] = set()
        """Of those: their senders are known to be none of ours, or cannot be known."""
        self._outside: set[Identity] = set()
        """Found stuck while it was not quiet, and not dealt with yet."""
        self._spared: set[Identity] = set()
        """The same where ptrace is refused."""
        self._absorbed: list[Identity] = []
        """From whom a SIGTERM from outside was kept."""
        self._burst_until_ms = 0
        self._look_by_ms = 0
        self._queued: int | None = None
        """How many signals were queued at a look that found nothing to do. As long as it stays so, nor would another one."""
        self._queued_before: int | None = None
        self._credit_us = CREDIT_US_MAX
        self._credit_at_ms = 0
        self._looked_ms = -1
        self._look_us = 0
        self._is_behind = False

    def close(self) -> None:
        """Close the files that stay open in between."""
        self._watch.close()

    def hurry(self) -> None:
        """Look at all processes at the next sweep."""
        self._look_by_ms = 0

    def sweep(self, now_ms: int, quiet: bool) -> list[Completed]:
        """Look at the processes, and complete what is to be completed.

        `quiet`: no notice is in force and no signal came to the supervisor since the last sweep.
        """
        queued = self._watch.queued()
        if not self._is_worth_a_look(queued, now_ms):
            return []
        stuck = self._look(now_ms)
        stuck = [*self._late(stuck), *stuck]
        whos = {one.who for one in stuck}
        self._tracer.finish(kept={pid for pid, _ in whos})
        dropped = self._tracer.dropped()
        self._keep(who for who in self._outside - whos if who[0] in dropped)
        self._spared &= whos
        self._outside = {who for who in self._outside if who in whos or self._tracer.has(who[0])}
        if not quiet:
            self._outside |= whos - self._spared
        fresh = whos - self._outside - self._spared
        self._first_seen = {who: self._first_seen.get(who, now_ms) for who in fresh}
        self._strangers &= self._first_seen.keys()
        done = self._deal(stuck, now_ms)
        # A signal that is just being taken makes up for the next one that is sent. So the count says something only once it has
        # come to rest, with nobody on whom we are at work.
        is_at_rest = queued == self._queued_before and now_ms >= self._burst_until_ms
        self._queued = queued if is_at_rest and not self._first_seen and not self._outside else None
        self._queued_before = queued
        return done

    def press(self, ranks: Collection[int]) -> list[Completed]:
        """End helpers for whose end a rank may be waiting in vain, when that begins to cost the save.

        A second SIGTERM leaves no trace while one is pending. So a parent that ends its child after the broadcast has come to it,
        and before that was absorbed, has ended nobody, and waits. Ended are those from whom one was kept, below a rank and with
        no rank below, whose parent stands in wait(2) for just them. Without us the broadcast had ended them already.
        """
        done = []
        for who in [*self._absorbed, *self._spared]:
            seen = procfs.stat(who[0])
            if seen is None or seen.started != who[1] or seen.state in ("zombie", "gone"):
                continue
            is_below = any(procfs.descends(who[0], rank) for rank in ranks)
            if not is_below or who[0] in ranks or any(procfs.descends(rank, who[0]) for rank in ranks):
                continue
            if procfs.waits_for(seen.parent, who[0]):
                self.ask([who[0]], PRESS_MS)
                is_killed = _kill(who)  # Only if it is refused, and still pending.
                done.append(Completed(who[0], "killed" if is_killed else "delivered", 0))
        pressed = {one.pid for one in done}
        self._absorbed = [who for who in self._absorbed if who[0] not in pressed]
        return done

    def ask(self, pids: Collection[int], bound_ms: int) -> None:
        """Ask these processes to end: a SIGTERM that they do take, whether they have it blocked or not; then SIGCONT.

        Only for processes of one's own tree. Who does not stand within the bound is gone on with in `go_on` and in the sweeps;
        where it is refused, the SIGTERM is pending there, and nothing more.
        """
        deliver_term(pids, bound_ms, self._tracer)

    def go_on(self) -> None:
        """Go on with those that did not stand in time; never waits."""
        self._tracer.finish()

    def next_ms(self, now_ms: int) -> int:
        """When the next sweep is due."""
        due = [now_ms + TICK_MS]
        # Those whose time has come and gone cannot be dealt with now: they are stopped.
        due += [at_ms for at_ms in map(self._due_ms, self._first_seen) if at_ms > now_ms]
        if self._is_behind:
            due.append(now_ms + 1)
        if now_ms < self._burst_until_ms:
            due.append(now_ms + max(BURST_MS, self._look_us // BURST_US_SHARE))
        if self._tracer.is_busy:
            due.append(now_ms + BUSY_MS)
        return min(due)

    def _is_worth_a_look(self, queued: int | None, now_ms: int) -> bool:
        elapsed_ms = max(0, now_ms - self._credit_at_ms)
        self._credit_us = min(CREDIT_US_MAX, self._credit_us + elapsed_ms * 1_000 // SHARE_MAX)
        self._credit_at_ms = now_ms
        has_come = any(self._looked_ms < self._due_ms(who) <= now_ms for who in self._first_seen)
        if self._look_by_ms == 0 or self._is_behind or has_come or self._tracer.has_come():
            return True
        is_changed = queued is None or queued != self._queued
        if is_changed and now_ms < self._burst_until_ms:
            return True
        return self._credit_us > 0 and (is_changed or now_ms >= self._look_by_ms)

    def _look(self, now_ms: int) -> list[Stuck]:
        # CPU of this thread: on a busy machine, or while another thread imports, the clock on the wall says seconds.
        began_us = time.thread_time_ns() // 1_000
        stuck = self._watch.look()
        self._look_us = time.thread_time_ns() // 1_000 - began_us
        self._credit_us = max(self._credit_us - self._look_us, -self._look_us)
        self._looked_ms = now_ms
        self._look_by_ms = now_ms + LOOK_MS
        return stuck

    def _late(self, stuck: Sequence[Stuck]) -> list[Stuck]:
        """Who is to lose a SIGTERM and has not come to it yet. It does not show as stuck: the signal is not blocked meanwhile."""
        late = self._outside - {one.who for one in stuck}
        return [Stuck(who, False) for who in late if self._tracer.is_losing(who[0]) and procfs.is_pending(who[0], signal.SIGTERM)]

    def _keep(self, whos: Iterable[Identity]) -> None:
        """Remember from whom a SIGTERM was kept."""
        if new := [who for who in whos if who not in self._absorbed]:
            self._absorbed = [*self._absorbed, *new][-ABSORBED_MAX:]

    def _deal(self, stuck: Sequence[Stuck], now_ms: int) -> list[Completed]:
        done = []
        give_up = time.monotonic() + SWEEP_S
        self._is_behind = False
        # The youngest first: whom its parent ends just now, after the broadcast and before this, is not seen as such, and helpers
        # that come and go are the likeliest.
        for one in reversed(stuck):
            if not (one.is_running or self._tracer.has(one.who[0])) or not self._is_due(one.who, now_ms):
                continue
            if time.monotonic() > give_up:
                self._is_behind = True
                break
            completed = self._settle(one.who, now_ms)
            if completed is not None:
                done.append(completed)
                self._burst_until_ms = now_ms + BURST_LASTS_MS
        return done

    def _is_due(self, who: Identity, now_ms: int) -> bool:
        if who in self._outside:
            return True
        if who not in self._first_seen:
            return False  # It is spared.
        is_burst = now_ms < self._burst_until_ms and who not in self._strangers
        return is_burst or now_ms >= self._due_ms(who)

    def _due_ms(self, who: Identity) -> int:
        """When this one that was seen in quiet is to be dealt with."""
        return self._first_seen[who] + (SETTLED_MS if who in self._strangers else QUICK_MS)

    def _settle(self, who: Identity, now_ms: int) -> Completed | None:
        """Have its sender read, and do what follows from it."""
        is_outside = who in self._outside
        is_settled = not is_outside and now_ms - self._first_seen[who] >= SETTLED_MS
        found = 0

        def decide(sender: Sender | None) -> Wish:
            nonlocal found
            found = 0 if sender is None else sender.pid
            if found > 0 and procfs.name_of(found) == STEPD:
                return "absorb"  # However late the rest of the broadcast is.
            if is_outside and found > 0 and procfs.name_of(found) in FORWARDERS:
                return "absorb"
            if self._is_ours(found, who[0]) or is_settled:
                return "deliver"
            return "absorb" if is_outside else "leave"

        seen = procfs.stat(who[0])
        outcome: Outcome = "gone" if seen is None or seen.started != who[1] else self._tracer.settle(who[0], decide)
        match outcome:
            case "delivered":
                return Completed(who[0], "delivered", found)
            case "absorbed":
                self._outside.discard(who)
                self._keep([who])
            case "not now" if self._tracer.is_losing(who[0]):
                self._outside.add(who)
            case "left" | "refused" if not is_outside and not is_settled:
                self._strangers.add(who)
            case "refused" if is_outside:
                self._outside.discard(who)
                self._spared.add(who)
            case "refused":
                return Completed(who[0], "killed", 0) if _kill(who) else None
            case _:
                pass  # Gone, or it takes what it has by itself, or it comes up again.
        return None

    def _is_ours(self, sender: int, receiver: int) -> bool:
        """Whether a process of our own tree has sent it."""
        if sender <= 0:
            return False
        shared = procfs.shares_pid_namespace(receiver)
        if not shared:
            # A namespace below ours: whoever is outside of it, Slurm and us included, is 0 there (pid_namespaces(7)).
            return shared is False
        if procfs.stat(sender) is None:
            return self._watch.knew(sender)  # It has ended since: `kill` as a command of its own, or a parent that is gone.
        return sender == self._top or procfs.descends(sender, self._top)


def deliver_term(pids: Iterable[int], bound_ms: int, tracer: Tracer) -> None:
    """See Shield.ask. Whom the tracer still has in the end it has to go on with: whom nobody lets go stands for ever."""
    give_up = time.monotonic() + bound_ms / 1_000
    late = []
    for pid in pids:
        tracer.deliver_instead(pid)
        if not _send(pid, signal.SIGTERM):
            continue
        if procfs.term_is_stuck(pid) and time.monotonic() < give_up and tracer.settle(pid, _to_deliver) == "not now":
            late.append(pid)
        _send(pid, signal.SIGCONT)
    while tracer.is_busy and time.monotonic() < give_up:
        select.select((), (), (), ASK_PAUSE_S)
        # Let go now they would have their SIGTERM pending as before, and be killed for not heeding it.
        late = [pid for pid in late if time.monotonic() >= give_up or tracer.settle(pid, _to_deliver) == "not now"]
        tracer.finish(late)


def _to_deliver(sender: Sender | None) -> Wish:
    return "leave" if sender is None else "deliver"


def _kill(who: Identity) -> bool:
    """Kill it if it still is the same process with the same stuck SIGTERM."""
    seen = procfs.stat(who[0])
    if seen is None or seen.started != who[1] or not procfs.term_is_stuck(who[0]):
        return False
    return _send(who[0], signal.SIGKILL)


def _send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
