"""What happened to a run, as plain data: attempts, what each spent its time with, what it saved, lost, and why it ended.

Owns the facts that timeline, report and why are drawn from; story.py derives them from journals. Must not read, decide or draw
anything. What is not known is None, and `notes` says what is missing.

Instants are wall-clock nanoseconds since the epoch on the coordinator's clock (clocks.py corrects the others).
"""

from __future__ import annotations

import msgspec

WORDS_ROUNDS_MAX = 8
"""Of so many of the newest rounds of an attempt it is known how far each rank came, and when."""

PROGRESS_MAX = 500
"""Most points of a series over time in one attempt."""

KINDS = ("queued", "starting", "training", "saving", "verifying", "leaving", "lost")
"""What an attempt spends its time with, in this order; `lost` is training that no checkpoint holds.

`queued` lies before the attempt's own begin: from the end of the start before it, as when a job was submitted is in no journal.
`saving` is the time for which a save held training; `verifying` is told only of a last save: else training goes on meanwhile.
"""


class Span(msgspec.Struct, frozen=True):
    """So long it did that. `end_ns` >= `begin_ns`; the spans of an attempt follow each other without gap or overlap."""

    kind: str
    begin_ns: int
    end_ns: int


class Commit(msgspec.Struct, frozen=True):
    """A checkpoint that was committed (or was found to stand already)."""

    at_ns: int
    step: int
    round: int
    kind: str = ""
    """`periodic`, `save and go on`, `save and leave`, `adopted`, "" if not known."""
    save_ms: int | None = None
    hold_ms: int | None = None
    verify_ms: int | None = None
    bytes: int | None = None
    mode: str = ""
    """`full` or `structure`."""


class Word(msgspec.Struct, frozen=True):
    """How far a rank came in a round, in ms after its begin; None where no such word came."""

    rank: int
    agreed_ms: int | None = None
    arrived_ms: int | None = None
    written_ms: int | None = None
    save_ms: int | None = None
    problem: str = ""
    """Failed, late or gone, and why."""


class Round(msgspec.Struct, frozen=True):
    """One save over all ranks."""

    number: int
    kind: str
    begin_ns: int
    end_ns: int | None
    step: int | None
    committed: bool
    reason: str
    """Why it was given up, "" if it was not."""
    agree_ms: int | None = None
    """Request until all have agreed and a step was fixed; and so on, each from the end of the one before."""
    arrive_ms: int | None = None
    write_ms: int | None = None
    verify_ms: int | None = None
    words: tuple[Word, ...] = ()
    """Of the last rounds only (WORDS_ROUNDS_MAX), by rank."""


class Notice(msgspec.Struct, frozen=True):
    """The notice that ended an attempt, as it was known at last."""

    at_ns: int
    by: str
    cause: str
    left_ms: int | None
    """Until the kill, as known when it was told first."""
    save_left_ms: int | None = None
    verify_left_ms: int | None = None
    leave_left_ms: int | None = None
    out_left_ms: int | None = None
    first_cause: str = ""
    """As it was told first, where that was another one."""


class Attempt(msgspec.Struct, kw_only=True):
    """One start of a job step."""

    job: str
    attempt: int
    """SLURM_RESTART_COUNT."""
    epoch: int
    step_id: str
    host: str = ""
    tasks: int = 0
    """Tasks whose journals are there."""
    is_told: bool = True
    """Its coordinator's journal is there. Without it nobody tells what it has kept and lost, nor why it ended."""
    tasks_told: int = 0
    """Tasks that the coordinator has told of, itself among them."""
    hosts: tuple[str, ...] = ()
    world_size: int = 0
    began_ns: int | None = None
    ended_ns: int | None = None
    """Its last word; where it was cut off nobody knows how long it went on."""
    is_running: bool | None = None
    """No last word, and its journal is fresh enough; None where that cannot be told."""
    spans: tuple[Span, ...] = ()
    marks: tuple[tuple[int, str, str], ...] = ()
    """(instant, kind, text): notice, restart, hang, oom, requeue, warning."""
    cause: str = ""
    """Why it ended: a cause of the journal; `finished`, `training failed`, `lost without a word` (no last word), `refused`,
    `not known`."""
    detail: str = ""
    """What more is known of the cause: the signal, the kind of hang, the rank that failed, the cgroup's limit."""
    notice: Notice | None = None
    resume_step: int = -1
    resume_from: str = ""
    commits: tuple[Commit, ...] = ()
    rounds: tuple[Round, ...] = ()
    progress: tuple[tuple[int, int], ...] = ()
    """(instant, finished steps), thinned to PROGRESS_MAX points; the last one is always there."""
    memory: tuple[tuple[int, int, int], ...] = ()
    """(instant, bytes of the tree over all tasks, nearest limit or 0), thinned."""
    restarts: int = 0
    reached: int | None = None
    """Finished steps when it ended, as far as the journal knows; None if it does not."""
    is_exact: bool = False
    """`reached` is the very number (an agreed or failed step), not the last one that was heard of."""
    kept: int | None = None
    """The newest step that is committed when it ends (its own or the one it resumed from); None for nothing."""
    fell_to: int | None = None
    """The older step that the next start went on from, where it is older than `kept`."""
    lost_steps: int | None = None
    """Steps done in this attempt (also by starts before a restart in place) that have to be done again."""
    lost_before_is_least: bool = False
    """A restart in place has lost more than is known, perhaps."""
    lost_ms: int | None = None
    out_ms: int | None = None
    """Notice to exit."""
    code: int | None = None
    line: str = ""
    outcome: str = ""
    """`fresh`, `stale`, "" if it was not told to leave."""
    reason: str = ""
    """Why it was stale, with the numbers that it was decided on."""
    saves: int = 0
    """Rounds that were committed, of all that there were."""
    failed_saves: int = 0
    hold_ms: int = 0
    """For how long saves held training, all together."""
    every_ms: int | None = None
    every_why: str = ""
    seen_saves_ms: tuple[int, ...] = ()
    """What it knew at its start of how long saves take, newest first."""
    requeue: str = ""
    """`accepted`, `already pending`, `refused: why`, `resubmitted`, `not asked: why`, "" if nothing was said."""
    notes: tuple[str, ...] = ()
    """What is incomplete or odd about what is known of it."""


class Run(msgspec.Struct, kw_only=True):
    """All attempts of one job (or of jobs that went on from each other in one directory, see `chains`)."""

    directory: str
    attempts: tuple[Attempt, ...]
    """By begin."""
    now_ns: int = 0
    """When it was read: attempts that are still at it have come so far."""
    notes: tuple[str, ...] = ()
    """Damaged or torn lines, files that are missing, clocks that were corrected."""
    gaps: tuple[tuple[int, int], ...] = ()
    """First and last epochs of starts between these of which there is no journal at all."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs, in order of their first attempts."""
        return tuple(dict.fromkeys(one.job for one in self.attempts))
