"""Whether a notice reaches the step, and whether it leaves time for the save.

Owns the judgement on --signal, the grace and KillWait, against how long the newest saves took. Pure. The time for the save is cut
from the whole by the same rule as at a real notice (core/budget.py).
"""

from __future__ import annotations

from ckpt_supervisor.core.budget import cut
from ckpt_supervisor.doctor.facts import Setup
from ckpt_supervisor.doctor.finding import Finding, Findings, error, note, ok, warning
from ckpt_supervisor.doctor.script import warning_of

LEAD = "the supervisor's own watch saves before the limit all the same"
NEVER_TO_BATCH = "take the B: out: `#SBATCH --signal=USR1@120`"


def findings(seen: Setup) -> Findings:
    """All of them, what is good among it."""
    if seen.where == "nowhere" and seen.script is None:
        return []
    return [*_watch(seen), *_signal(seen), *_preemption(seen), *_kill_wait(seen)]


def seconds(ms: int) -> str:
    """12 s, 1.5 s, 40 ms."""
    if 0 < ms < 100:
        return f"{ms} ms"
    return f"{ms / 1000:.1f}".removesuffix(".0") + " s"


def _saves(seen: Setup) -> str:
    if len(seen.saves_ms) == 1:
        return f"the last save took {seconds(seen.saves_ms[0])}"
    return f"the last {len(seen.saves_ms)} saves took up to {seconds(max(seen.saves_ms))}"


def _given(seen: Setup) -> str | None:
    """The value of --signal, "" if there is none; None where no script tells (sbatch's command line is nowhere to be seen)."""
    return None if seen.script is None else seen.script.sbatch.get("signal", "")


def _watch(seen: Setup) -> Findings:
    if seen.wishes.watched:
        return []
    text = (
        "the watch on the job's end is off (--lead off): unless sbatch --signal=USR1@90 or the like warns this step, the "
        "first word of the time limit is the SIGTERM that ends it, and only KillWait is left for the save"
    )
    return [warning("lead-off", text, "leave --lead at auto")]


def _signal(seen: Setup) -> Findings:
    given = _given(seen)
    if given is None:
        return []
    if not given:
        if seen.wishes.watched:
            return [note("signal-missing", f"no --signal: {LEAD}", "#SBATCH --signal=USR1@120 helps where Slurm cannot be asked")]
        text = "no --signal in the script, and --lead off: nothing tells of the time limit before it is there"
        return [warning("signal-missing", text, "write #SBATCH --signal=USR1@120, and leave --lead at auto")]
    to_batch, name, before_s = warning_of(given)
    found = _to_batch(seen, given, name) if to_batch else []
    if not to_batch and name not in seen.wishes.signals:
        text = f"--signal={given}: the supervisor does not know SIG{name}, and dies of it"
        found.append(
            error("signal-unknown", text, f"write --signal=USR1@{before_s}, or give ckpt-supervise --notice-signal {name}")
        )
    found += _too_short(seen, given, before_s)
    return found or [ok("signal", f"--signal={given} warns the step; {LEAD}")]


def _to_batch(seen: Setup, given: str, name: str) -> Findings:
    """The steps hear nothing then (docs/slurm.md, section 1)."""
    script = seen.script
    found: Findings = []
    if script is not None and name not in script.traps:
        text = f"--signal={given} goes to the batch shell, which has no trap for {name} and dies of it: FAILED, not requeued"
        found.append(error("signal-no-trap", text, NEVER_TO_BATCH))
    else:
        text = f"--signal={given} goes to the batch shell alone (B:), the step does not hear it; {LEAD}"
        found.append(warning("signal-batch", text, NEVER_TO_BATCH))
    if seen.site is not None and seen.site.sends_user_signal:
        text = (
            f"this site preempts with the user's signal (send_user_signal): with --signal={given} the step gets no notice at all"
        )
        found.append(error("user-signal-batch", text, NEVER_TO_BATCH))
    return found


def _too_short(seen: Setup, given: str, before_s: int) -> Findings:
    if not seen.saves_ms:
        return []
    kill_wait_ms = _kill_wait_ms(seen)
    room_ms = cut(0, before_s * 1000 + kill_wait_ms).save_by_ms
    if max(seen.saves_ms) <= room_ms:
        return []
    text = f"--signal={given} leaves {seconds(room_ms)} for a save (with KillWait {seconds(kill_wait_ms)}), and {_saves(seen)}"
    enough_s = -(-max(seen.saves_ms) * 3 // 2000) + 60
    advice = f"write --signal=USR1@{enough_s}"
    if seen.wishes.watched:
        return [note("signal-short", f"{text}; {LEAD}", advice)]
    return [warning("signal-short", text, f"{advice}, or leave --lead at auto")]


def _kill_wait_ms(seen: Setup) -> int:
    site = seen.site
    return 30_000 if site is None or site.kill_wait_ms is None else site.kill_wait_ms


def _preemption(seen: Setup) -> Findings:
    site, partition = seen.site, seen.partition
    if site is None or partition is None or not site.preempts:
        return []
    mode = (partition.preempt_mode or site.preempt_mode).upper()
    if "OFF" in mode or partition.grace_ms is None:
        return []
    grace_ms, kill_wait_ms = partition.grace_ms, _kill_wait_ms(seen)
    what = f"partition {partition.name}: GraceTime {seconds(grace_ms)} and KillWait {seconds(kill_wait_ms)}"
    found: Findings = []
    if "CANCEL" in mode and grace_ms == 0:
        text = (
            f"partition {partition.name} cancels what it preempts (PreemptMode=CANCEL), GraceTime 0: the job does not come back"
        )
        found.append(error("preempt-cancel", text, "use another partition, or submit again by hand after a preemption"))
    elif "CANCEL" in mode:
        text = (
            f"partition {partition.name} cancels what it preempts (PreemptMode=CANCEL): the job comes back only if save and "
            f"requeue are done within GraceTime {seconds(grace_ms)}"
        )
        found.append(warning("preempt-cancel", text, "keep the save short; have periodic saves (--every 30m)"))
    room_ms = cut(0, grace_ms + kill_wait_ms).save_by_ms
    if not seen.saves_ms:
        return [*found, ok("grace", f"{what} leave {seconds(room_ms)} for the save at a preemption; none was measured yet")]
    if max(seen.saves_ms) <= room_ms:
        return [*found, ok("grace", f"{what} leave {seconds(room_ms)} for the save at a preemption; {_saves(seen)}")]
    is_tried = min(seen.saves_ms) <= room_ms  # As forecast.too_late has it.
    return [*found, _grace_short(f"{what} leave {seconds(room_ms)} for the save at a preemption, and {_saves(seen)}", is_tried)]


def _grace_short(text: str, is_tried: bool) -> Finding:
    what = "it may not end in time, and then" if is_tried else "it will not be tried, and"
    return warning(
        "grace",
        f"{text}: {what} the newest checkpoint stands",
        "save more often (--every auto), make saves shorter, or use a partition with a longer GraceTime",
    )


def _kill_wait(seen: Setup) -> Findings:
    """At a scancel, the limit itself, somebody's requeue: KillWait alone."""
    site = seen.site
    if site is None or site.kill_wait_ms is None or not seen.saves_ms:
        return []
    room_ms = cut(0, site.kill_wait_ms).save_by_ms
    if max(seen.saves_ms) <= room_ms:
        return [ok("kill-wait", f"KillWait {seconds(site.kill_wait_ms)} leaves {seconds(room_ms)} for a save; {_saves(seen)}")]
    text = (
        f"KillWait {seconds(site.kill_wait_ms)} leaves {seconds(room_ms)} for a save at a scancel, a requeue by others or the "
        f"limit itself, and {_saves(seen)}"
    )
    advice = "have periodic saves (--every auto): what came after the newest one is lost then"
    if seen.wishes.watched:  # A preemption without grace is grace-short's.
        return [note("kill-wait", text, advice)]
    return [warning("kill-wait", text, advice)]
