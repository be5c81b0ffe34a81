"""The names of the journal's events, for options that choose among them. docs/journal.md says what each one is, and a
test holds both together.

Pure data. Must not be what decides that a line is written: describe.py and whoever logs an Entry do.
"""

from __future__ import annotations

EVENTS = frozenset({
    "adopted", "agreed", "asked", "command_asked", "command_ended", "command_exited", "command_not_started",
    "command_orphaned", "command_started", "commit", "control_asked", "control_done", "control_off", "control_refused",
    "coordinator_back", "coordinator_lost", "event_command_dropped", "event_command_failed", "exit", "garbage", "go",
    "guard_lost", "hang_not_examined", "hang_over", "hang_suspected", "interval", "join_over", "journal_anew", "journal_full",
    "journal_lines_lost", "kill_wait", "killed", "leaving", "left_alone", "left_behind", "leftovers_ended",
    "leftovers_stuck", "look", "look_asked", "look_failed", "memory", "memory_near_limit", "metrics_failed",
    "metrics_served", "notice", "notice_over",
    "oom_kill", "partial_dropped", "partial_not_dropped", "passed_over", "phase", "progress", "prune_failed", "pruned",
    "rank_agreed", "rank_arrived", "rank_committed", "rank_failed", "rank_finished", "rank_gone", "rank_hello", "rank_late",
    "rank_left", "rank_refused", "rank_requested", "rank_saving", "rank_verified", "rank_went_back", "rank_written",
    "readback", "recalled", "refused", "requeue", "requeue_called", "requeue_waits", "resubmit", "resuming", "room",
    "round_begun", "round_committed", "round_given_up", "round_turned", "segments_removed", "set_up", "signal",
    "signal_passed", "stack", "stale_removed", "stalled", "status_masked", "stuck", "taken_over", "task_back", "task_gone",
    "task_joined", "task_refused", "tasks_stay", "terminated", "termination_completed", "verified", "warning",
})  # fmt: skip

UNTOLD = frozenset({"event_command_failed", "event_command_dropped"})
"""What --on-event is never told of: it would tell of itself for ever."""

TOLD = (
    "command_started", "command_not_started", "command_exited", "notice", "notice_over", "commit", "leaving", "requeue",
    "resubmit", "stalled", "hang_suspected", "oom_kill", "refused", "exit",
)  # fmt: skip
"""What --on-event tells if nothing else is said: of `command_exited` only what went wrong, of `commit` only a last save's."""
