"""The top of the report: what it is of, its figures, and a row for each attempt.

Owns which figures stand there and how they are put. Must not compute a total: totals.py does.
"""

from __future__ import annotations

from ckpt_supervisor.view.facts import Attempt, Run
from ckpt_supervisor.view.report import shape
from ckpt_supervisor.view.report.page import Card
from ckpt_supervisor.view.report.words import UNKNOWN, Names, count, counted, instant, listed, span
from ckpt_supervisor.view.totals import is_least, reached_is_least, totals

JOBS_MAX = 6
NOTES_MAX = 200
ENDS_MAX = 4
_MS = 1_000_000


def title(run: Run) -> str:
    """Job 4711, or how many there are."""
    jobs = run.jobs
    if len(jobs) == 1:
        return f"Job {jobs[0]}"
    return f"{counted(len(jobs), 'job')} of one directory"


def about(run: Run, written_ns: int) -> tuple[str, ...]:
    """Lines below the title."""
    lines = [f"Directory {run.directory}"]
    jobs = run.jobs
    if len(jobs) > 1:
        more = f" and {len(jobs) - JOBS_MAX} more" if len(jobs) > JOBS_MAX else ""
        lines.append(f"Jobs {', '.join(jobs[:JOBS_MAX])}{more}")
    began = min((one.began_ns for one in run.attempts if one.began_ns is not None), default=None)
    ended = max((one.ended_ns for one in run.attempts if one.ended_ns is not None), default=None)
    lines.append(
        f"{counted(len(run.attempts), 'attempt')}, {instant(began)} to {instant(ended)} UTC; report of {instant(written_ns)} UTC"
    )
    return tuple(lines)


def cards(run: Run) -> tuple[Card, ...]:
    """The figures."""
    sums = totals(run)
    share = UNKNOWN if sums.goodput is None else f"{100 * sums.goodput:.1f} %"
    least = " or more" if sums.lost_is_least and sums.lost_steps is not None else ""
    newest = max((commit.step for one in run.attempts for commit in one.commits), default=None)
    saves = f"{count(sums.failed_saves) if sums.failed_saves else 'none'} failed; training held for {span(sums.hold_ms)}"
    ends = sorted(sums.ended.items(), key=lambda pair: -pair[1])
    others = sum(number for _, number in ends[ENDS_MAX:])
    more = [f"{count(others)} {'other' if others == 1 else 'others'}"] if others else []
    ended = listed([*(f"{count(number)} {cause}" for cause, number in ends[:ENDS_MAX]), *more])
    out_most = (
        f"median; {span(sums.out_ms_most)} at most" if sums.out_ms_most is not None else "no notice was followed by an exit"
    )
    lost_ms = f"{span(sums.lost_ms)} of training that no checkpoint holds" if sums.lost_ms else "no training is known to be lost"
    left_out = f"; {counted(sums.left_out, 'start')} left out (see the notes)" if sums.left_out else ""
    return (
        Card("Goodput", share, f"of {span(sums.allocated_ms)} with nodes became committed progress{left_out}"),
        Card(
            "Committed progress",
            UNKNOWN if sums.steps is None else counted(sums.steps, "step"),
            f"newest checkpoint: {_newest(newest)}",
        ),
        Card("Lost", UNKNOWN if sums.lost_steps is None else counted(sums.lost_steps, "step") + least, lost_ms + left_out),
        Card("Between interruptions", span(sums.mtbi_ms), f"mean time; {counted(sums.interruptions, 'interruption')}"),
        Card("Attempts", count(sums.attempts), ended or "none has ended"),
        Card("Saves", count(sums.saves), saves),
        Card("Notice to exit", span(sums.out_ms), out_most),
        Card("In the queue", span(sums.queued_ms), "between attempts, all together"),
    )


def _newest(step: int | None) -> str:
    return "none" if step is None else f"step {count(step)}"


def attempts(run: Run) -> shape.Table:
    """A row for each attempt."""
    several, name = len(run.jobs) > 1, Names(run)
    head = (
        "Attempt", *(("Job",) if several else ()), "Began (UTC)", "Lasted", "From step", "Reached", "Newest checkpoint",
        "Steps lost", "Cause", "Notice to exit", "Exit", "Requeue", "Host", "Its last line",
    )  # fmt: skip
    return shape.table(
        "Attempts",
        head,
        [_row(one, name(one), several) for one in run.attempts],
        [place + several for place in (2, 3, 4, 5, 6, 8, 9)],
    )


def _row(one: Attempt, name: str, several: bool) -> tuple[str, ...]:
    lasted = "-" if one.began_ns is None or one.ended_ns is None else span((one.ended_ns - one.began_ns) / _MS)
    hosts = f"{one.host} +{len(one.hosts) - 1}" if len(one.hosts) > 1 else one.host
    return (
        name,
        *((one.job,) if several else ()),
        instant(one.began_ns),
        lasted,
        count(one.resume_step) if one.resume_step >= 0 else "-",
        _known(one.reached) + (" or more" if reached_is_least(one) else ""),
        _known(one.kept),
        _known(one.lost_steps) + (" or more" if is_least(one) and one.lost_steps is not None else ""),
        _cause(one),
        "-" if one.out_ms is None else span(one.out_ms),
        "-" if one.code is None else str(one.code),
        one.requeue or "-",
        hosts or "-",
        one.line or "-",
    )


def _cause(one: Attempt) -> str:
    if not one.cause:
        return {True: "still running", False: UNKNOWN, None: "running, or lost without a last word"}[one.is_running]
    return f"{one.cause}: {one.detail}" if one.detail else one.cause


def _known(number: int | None) -> str:
    return "-" if number is None else count(number)


def notes(run: Run) -> tuple[str, ...]:
    """What is incomplete, of the run and of each attempt."""
    name = Names(run)
    own = [(one, note) for one in run.attempts for note in one.notes if note not in run.notes]
    found = [*run.notes, *(f"job {one.job}, attempt {name(one)}: {note}" for one, note in own)]
    more = len(found) - NOTES_MAX
    return (*found[:NOTES_MAX], *((f"{counted(more, 'note')} more: see ckptctl report --json.",) if more > 0 else ()))
