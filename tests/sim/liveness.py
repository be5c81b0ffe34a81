"""What a run should have come to when nothing stood in its way, and that it came to an end at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.options import ENDLESS, LOCAL, STORIES

if TYPE_CHECKING:
    from tests.sim.checks import Checks
    from tests.sim.options import Options

LEAVE_STORIES = frozenset(STORIES) - {"none", "save", "rehearse"}
SLACK_MS = 8_000
HORIZON_MS = 600_000


def final(checks: Checks) -> None:
    """Judge the whole run."""
    world = checks.world
    options = world.options
    if checks.exit is None and not checks.was_killed:
        _no_end(checks)
    checks.step_checks.final()
    if options.mode in ("calm", "lossy"):
        _good_end(checks)
    if options.mode == "calm":
        _periodic(checks)


def _no_end(checks: Checks) -> None:
    """The run is over and the supervisor is still there."""
    world = checks.world
    state, notice_ms = world.supervisor.state, checks.notice_ms
    if notice_ms is None or state.notice is None:
        return  # Nobody asked it to leave, or there was no end in sight after all.
    limit_ms = state.notice.kill_at_ms + world.code.core.leaving.STAY_MS + SLACK_MS
    if world.now >= limit_ms:
        checks.broken("no end", f"still in {state.phase.name} at {world.now}, the kill was expected at {state.notice.kill_at_ms}")


def _good_end(checks: Checks) -> None:
    """With nothing in the way: saved, committed, 0 steps lost, requeued."""
    options = checks.world.options
    if options.story not in LEAVE_STORIES:
        return _goes_on(checks)
    if not _ample(options):
        return None
    if checks.exit is None:
        checks.broken("liveness", "did not come out")
        return None
    code, line = checks.exit
    wanted = 75
    if options.story == "scancel":
        wanted = 143
    elif options.requeue == "exit":
        wanted = 85
    if code != wanted or "is committed" not in line:
        checks.broken("liveness", f"exit {code} ({line}), wanted {wanted} and a committed step")
    return None


def _goes_on(checks: Checks) -> None:
    """Training is not disturbed: it ends by itself, and what was asked for on the way was saved."""
    world, options = checks.world, checks.world.options
    near = options.end_ms is not None and options.end_ms - options.story_ms < HORIZON_MS
    if near or (options.every_ms is not None and options.save_ms > options.every_ms):
        return  # The end-time watch will want to leave; or training hardly comes to its steps.
    if checks.exit is None or checks.exit[0] != 0:
        checks.broken("liveness", f"training was to end by itself, and it came to {checks.exit}")
    if options.story in ("save", "rehearse") and _ample(options) and not checks.committed_at:
        first_ms = options.steps * options.step_ms * 8 // 10 - options.story_ms
        if first_ms > 3 * options.step_ms * (2 + options.safe_points) + 1_000:
            checks.broken("liveness", f"asked to save and go on, and nothing was committed of {world.options.steps} steps")


def _ample(options: Options) -> bool:
    """Whether the time until the kill is enough for everybody, with a save already running."""
    attached_ms = options.start_ms + (3_000 if options.mode == "lossy" else 100)
    if options.story in ("limit", "watch"):
        attached_ms = 2 * attached_ms + 1_000  # Instants are whole seconds.
    if options.story_ms < attached_ms:
        return False  # Not all may have attached by then. (The watch acts in the second half of the time at the earliest.)
    if options.ranks > 1 and options.phase_every and not options.collective:
        return False  # Rank 0 may be any number of steps behind.
    if options.steps < ENDLESS and options.story not in ("save", "rehearse"):
        return False
    grace_ms = options.grace_ms if options.story.startswith("preempt") and options.story != "preempt0" else 0
    budget_ms = options.kill_wait_ms + grace_ms
    if options.story in LOCAL:
        budget_ms = 30_000
    step_ms = options.step_ms * 12 // 10 + options.gap_ms
    need_ms = (4 + (options.safe_points + 1 if options.phase_every else 0)) * step_ms
    need_ms += 3 * options.save_ms + 2 * (options.verify_ms + options.commit_ms) + 1_000
    if options.mode == "lossy":
        need_ms += 4_000
    return need_ms * 2 < budget_ms


def _periodic(checks: Checks) -> None:
    """A calm run commits every multiple that it reached before the notice."""
    world, options = checks.world, checks.world.options
    if not options.every_steps or options.every_ms is not None or options.story in ("save", "rehearse"):
        return
    if options.ranks > 1 and options.phase_every and options.phase_alone and not options.collective:
        return  # Rank 0 may be so far behind that the time for the save is over.
    reached = checks.notice_n if checks.notice_n is not None else min(process.n for process in world.ranks()) - 1
    if checks.notice_n is None and checks.exit is None:
        return
    if options.story == "watch" and checks.exit is not None:
        reached = min((step for step, _, kind in checks.committed_at if kind == "LEAVE"), default=0) - 2
    start = max(0, options.resume_step)
    wanted = [n for n in range(start + 1, reached) if n % options.every_steps == 0]
    missing = [n for n in wanted if n not in world.disk.committed]
    if missing and options.every_steps * options.step_ms > 100:
        checks.broken(
            "periodic", f"steps {missing} were to be saved on the way to {reached}, committed are {sorted(world.disk.committed)}"
        )
