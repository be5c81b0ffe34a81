"""PASS or FAIL of one path: why, what would have been lost, and what to do about it.

Pure. Owns the judgement and its words. The order of the questions matters: what went wrong first explains the rest.
"""

from __future__ import annotations

import msgspec

from ckpt_supervisor.drill import facts as read
from ckpt_supervisor.drill.facts import Facts, Times
from ckpt_supervisor.drill.plan import NOTICES, Plan

EXIT_INTERRUPTED = 75
EXIT_STALE = 76
EXIT_CANCELLED = 143

ENDS_MS = 4_000
"""Whoever has not ended by then does not mean to."""

WITHOUT_SAVE = ("crash", "hang", "nodeloss")
NO_PERIODIC = "without --every or --every-steps all since the last interruption is lost here; the drill has asked for saves"


class Result(msgspec.Struct, frozen=True):
    """What is shown of one path, and what --json prints."""

    path: str
    passed: bool
    why: str
    advice: str = ""
    given_ms: int | None = None
    agree_ms: int | None = None
    save_ms: int | None = None
    verify_ms: int | None = None
    commit_ms: int | None = None
    leave_ms: int | None = None
    needs_ms: int | None = None
    """What a whole save takes, as measured before without a deadline; None if none was."""
    saved_step: int | None = None
    resumed_step: int | None = None
    lost_steps: int | None = None
    lost_is_rough: bool = False
    """It was reckoned from the time of a step."""
    code: int | None = None
    requeued: bool = False
    took_s: float = 0.0
    notes: tuple[str, ...] = ()


class _Opinion(msgspec.Struct, frozen=True):
    passed: bool
    why: str
    advice: str = ""
    notes: tuple[str, ...] = ()


def judge(seen: Facts, plan: Plan) -> Result:
    """The verdict on one path."""
    times = read.of_interruption(seen.before)
    if seen.problem:
        opinion = _Opinion(False, seen.problem, _why_not_there(seen))
    elif seen.path in NOTICES:
        opinion = _on_notice(seen, times, plan)
    elif seen.path == "cancel":
        opinion = _on_cancel(seen, times)
    elif seen.path == "hang":
        opinion = _on_hang(seen, times)
    elif seen.path == "crash":
        opinion = _on_crash(seen, plan)
    else:
        opinion = _on_node_loss(seen, plan)
    lost = _lost(seen, times)
    return Result(
        path=seen.path,
        passed=opinion.passed,
        why=opinion.why,
        advice=opinion.advice,
        given_ms=seen.given_ms,
        **{f"{share}_ms": getattr(times, f"{share}_ms") for share in read.SHARES},
        needs_ms=max((probe.save_ms for probe in seen.probes), default=None),
        saved_step=times.step,
        resumed_step=read.resumed(seen.after),
        lost_steps=lost,
        lost_is_rough=lost is not None and times.entered is None,
        code=seen.code,
        requeued=seen.requeued,
        took_s=seen.took_s,
        notes=(*seen.notes, *opinion.notes, *_cut_short(seen), *_in_earnest(seen, plan)),
    )


def _why_not_there(seen: Facts) -> str:
    if seen.problem.startswith("sbatch:"):
        return "the options of --sbatch-args, with -p and -A as this site wants them"
    if seen.problem.endswith("for the job to start, in vain"):
        return "see `squeue` for why it waits; ask for less with --sbatch-args"
    exited = read.last(seen.before, "command_exited")
    if exited is not None and exited.get("code") not in (0, None):
        return "training fails by itself here: run the command alone, with its output before your eyes, and mend that first"
    if "and failed:" in seen.problem:
        return "the save itself fails: the reason is what it raised, or what was wrong with the files that it wrote"
    if read.first(seen.before, "rank_hello") is None and not seen.probes:
        return (
            "training has to call ckpt.steps() or ckpt.attach() (README, step 2), or --options needs --adopt for a program that "
            "saves by itself; a start that takes longer is given time with --start-timeout"
        )
    return (
        "nothing can be saved before a boundary of steps: call hook.step(n) after each step, safe_point() in long phases, and "
        "look at the path of a failed save in the reason"
    )


def _on_notice(seen: Facts, times: Times, plan: Plan) -> _Opinion:
    expected = plan.options.requeue.code if plan.options.requeue.how == "exit" else EXIT_INTERRUPTED
    if times.step is None and not _adopted(seen):
        return _unsaved(seen, times)
    if seen.killed:
        return _Opinion(False, "saved, but not out when its time was over: killed", _too_slow(seen, times))
    if _stays(seen):
        return _went_on(seen)
    if seen.code != expected:
        return _Opinion(False, f"saved, but it left with {seen.code} in place of {expected}", "see `ckptctl log` of this path")
    if not seen.requeued:
        return _Opinion(
            False, "saved, but the job does not come back: nobody has requeued it", "submit with --requeue; no --requeue never"
        )
    wrong = _coming_back(seen)
    return wrong or _Opinion(True, f"no step lost: went on from step {seen.newest}", notes=_exit_note(plan))


def _adopted(seen: Facts) -> bool:
    line = read.last(seen.before, "adopted", problem="")
    return line is not None and bool(line.get("steps"))


def _exit_note(plan: Plan) -> tuple[str, ...]:
    wanted = plan.options.requeue
    if wanted.how != "exit" or plan.requeue_exit is None or wanted.code in plan.requeue_exit:
        return ()
    return (f"this site's RequeueExit does not list {wanted.code}: the real job would not come back",)


def _unsaved(seen: Facts, times: Times) -> _Opinion:
    stands = "nothing was saved before" if seen.newest is None else f"step {seen.newest} stands"
    why = times.given_up or (f"killed in the share '{times.failed_in}'" if seen.killed else "it did not come to a save")
    return _Opinion(False, f"not saved ({stands}): {why}", _too_slow(seen, times))


def _too_slow(seen: Facts, times: Times) -> str:
    """What a save takes against what there is."""
    needs_ms = max((probe.save_ms for probe in seen.probes), default=times.known_ms)
    agree_ms = max((probe.times.agree_ms or 0 for probe in seen.probes), default=0)
    if seen.given_ms is None or needs_ms + agree_ms < seen.given_ms // 2:
        return "see `ckptctl log` of this path (--keep-files)"
    longer = {
        "warning": "warn earlier (sbatch --signal=USR1@TIME)",
        "limit": "begin earlier (--lead TIME)",
        "grace": "ask for a longer GraceTime of the partition",
    }.get(seen.path, "ask for a longer KillWait, or for a partition with GraceTime")
    boundary = f" after {_s(agree_ms)} to the next step boundary" if agree_ms >= 1_000 else ""
    return (
        f"a save takes {_s(needs_ms)}{boundary}, and there are {_s(seen.given_ms)} for all of it: {longer}, make the save faster "
        "(sharded, less state, --verify structure), or save often (--every-steps, --every auto) so that less is lost"
    )


def _stays(seen: Facts) -> bool:
    """Whether training goes on after it was told to leave, as far as can be told: Python with torch takes 2 s to end."""
    return read.went_on(seen.before) or (read.overstayed_ms(seen.before) or 0) >= ENDS_MS


def _went_on(seen: Facts) -> _Opinion:
    after_ms = read.overstayed_ms(seen.before)
    how = "went on" if after_ms is None else f"had not ended {_s(after_ms)}"
    return _Opinion(
        False,
        f"saved, but training {how} after it was told to leave, and was ended; step {seen.newest} stands",
        "let ckpt.Preempted pass (it is a SystemExit: no bare `except`, no `finally` that hangs); what needs longer to end gets "
        "it with --leave-timeout",
    )


def _cut_short(seen: Facts) -> tuple[str, ...]:
    """An end that was slow, but not suspicious."""
    after_ms = read.overstayed_ms(seen.before)
    if after_ms is None or _stays(seen):
        return ()
    return (f"training was still ending {_s(after_ms)} after it was told to, and was ended: --leave-timeout gives it longer",)


def _coming_back(seen: Facts) -> _Opinion | None:
    """What is wrong with the next start; None if it went on from the newest intact checkpoint."""
    if seen.newest is None:
        return _Opinion(False, "there is no intact checkpoint to go on from", "save periodically: --every-steps N, --every 30m")
    step = read.resumed(seen.after)
    if step is None:
        return _Opinion(False, "it was not started again", "see `ckptctl log` of this path (--keep-files)")
    if step != seen.newest:
        return _Opinion(False, f"went on from step {step}, although step {seen.newest} is intact", "see `ckptctl log`")
    at = read.first_step(seen.after)
    back = read.first(seen.after, "rank_went_back")
    if back is not None and isinstance(back.get("step"), int):
        at = min(at, back["step"]) if at is not None else back["step"]
    if at is not None and at < step:
        return _Opinion(
            False,
            f"was handed step {step} to go on from, and began at step {at} at the latest",
            "training has to load what ckpt.resume() or CKPT_SUPERVISE_RESUME_FROM names, and count on from there: steps() and "
            "attach(load=...) do",
        )
    return None


def _on_cancel(seen: Facts, times: Times) -> _Opinion:
    if seen.revived:
        return _Opinion(False, "it asked Slurm to requeue a job that was cancelled", "this is a fault of ours: please report it")
    if seen.killed:
        return _Opinion(False, "not out when KillWait was over: killed", _too_slow(seen, times))
    if seen.requeued:
        return _Opinion(False, "the cancelled job would come back", "this is a fault of ours: please report it")
    if seen.code != EXIT_CANCELLED:
        return _Opinion(False, f"it left with {seen.code} in place of {EXIT_CANCELLED}", "see `ckptctl log` of this path")
    if _stays(seen):
        return _went_on(seen)
    if times.step is None:
        return _Opinion(True, f"stays cancelled; not saved, step {seen.newest} stands", notes=(_too_slow(seen, times),))
    return _Opinion(True, f"stays cancelled, and step {times.step} was saved")


def _on_hang(seen: Facts, times: Times) -> _Opinion:
    if seen.killed:
        return _Opinion(False, "a rank that stands still kept it from leaving in time: killed", "see `ckptctl log`")
    if seen.code not in (EXIT_INTERRUPTED, EXIT_STALE):
        return _Opinion(False, f"it left with {seen.code} in place of {EXIT_STALE}", "see `ckptctl log` of this path")
    missed = next((note for note in seen.notes if note.startswith(read.NOT_FOUND)), "")
    if missed:
        advice = "see `ckptctl log` of this path (--keep-files); a phase or a first step may last (docs/troubleshooting.md)"
        return _Opinion(False, f"the hang was {missed}; in earnest the job would stand until its time limit", advice)
    what = "saved all the same" if times.step is not None else "left in time"
    return _coming_back(seen) or _Opinion(True, f"{what}; the next start went on from step {seen.newest}")


def _on_node_loss(seen: Facts, plan: Plan) -> _Opinion:
    return _only_asked_for(plan) or _coming_back(seen) or _Opinion(True, f"the next start went on from step {seen.newest}")


def _only_asked_for(plan: Plan) -> _Opinion | None:
    """Where nobody tells of the end beforehand, only periodic saves count: the drill's own are none."""
    options = plan.options
    if options.every_steps or options.every.auto or options.every.ms is not None or options.adopt:
        return None
    return _Opinion(False, NO_PERIODIC, "save periodically: --every 30m, --every auto, or --every-steps N")


def _on_crash(seen: Facts, plan: Plan) -> _Opinion:
    options = plan.options
    if seen.code is None:
        how = "started again in place"
    elif seen.code == 0:
        return _Opinion(
            False,
            "a rank was killed, and the command ended with 0: for Slurm the job is done, and nobody starts it again",
            "a shell hides the status of training: write `exec python ...`, `set -e`, or && in place of ;",
        )
    elif options.restarts:
        return _Opinion(False, f"--restarts {options.restarts}, but it left with {seen.code}", "see `ckptctl log` of this path")
    elif options.max_crashes and not seen.requeued:
        return _Opinion(False, f"--max-crashes {options.max_crashes}, but the job does not come back", "see `ckptctl log`")
    else:
        how = "requeued" if seen.requeued else f"ended with {seen.code}, not requeued (--restarts 0, --max-crashes 0)"
    next_one = "" if seen.code is None else "; the next start"
    return _only_asked_for(plan) or _coming_back(seen) or _Opinion(True, f"{how}{next_one} went on from step {seen.newest}")


def _lost(seen: Facts, times: Times) -> int | None:
    """Steps that were done and have to be done again; None if it is not known."""
    if seen.newest is None:
        return times.entered
    if seen.unsaved_ms is not None and times.step is None:
        pace = read.step_ms(seen.probes)
        return None if not pace else round(seen.unsaved_ms / pace)
    return None if times.entered is None else max(0, times.entered - seen.newest)


def _in_earnest(seen: Facts, plan: Plan) -> tuple[str, ...]:
    """What is lost at most when no save was asked for shortly before."""
    options, pace = plan.options, read.step_ms(seen.probes)
    if seen.problem or seen.path not in WITHOUT_SAVE or options.adopt:
        return ()
    if options.every_steps:
        time = "" if pace is None else f", about {_s(options.every_steps * pace)}"
        return (f"in earnest it is up to {options.every_steps} steps{time}, that are lost (--every-steps {options.every_steps})",)
    if options.every.ms is not None:
        steps = "" if not pace else f", about {round(options.every.ms / pace)} steps"
        return (f"in earnest it is up to {_s(options.every.ms)} of training{steps}, that are lost (--every)",)
    if options.every.auto:
        return ("in earnest it is up to one interval of --every auto that is lost",)
    return (NO_PERIODIC,)


def _s(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 100 else f"{ms:.0f} ms"
