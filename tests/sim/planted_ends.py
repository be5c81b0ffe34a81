"""Planted faults of the command's end: its three stages, and the status that it hides (see planted.py)."""

from __future__ import annotations

from tests.sim.faults import fault

PARTING = (
    fault(
        "killed_and_never_asked",
        ("parting", "    return end_ms - part_ms if span_ms - part_ms >= LEAST_MS else None\n", "    return None\n"),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ignores_leave"}),
    ),
    fault(
        "asked_together_with_leave",
        ("parting", "    if not leaving.told:\n", "    if span_ms >= 0:\n"),
        story="preempt",
    ),
    fault(
        "asked_twice",
        ("parting", "    if leaving.asked_ms is not None or leaving.killed_ms", "    if leaving.killed_ms"),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ignores_leave", "ignores_term"}),
    ),
    fault(
        "training_that_ends_by_itself_is_asked",
        (
            "parting",
            " or leaving.own_end or leaving.passed:\n        return None\n",
            " or leaving.passed:\n        return None\n",
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ends_early"}),
        ranks=2,
        collective=False,
        steps=1000000,
    ),
    fault(
        "a_rank_that_goes_on_is_killed_unasked",
        ("parting", "max(now_ms, least_ms, leaving", "max(now_ms, leaving"),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ignores_leave", "slow_rank"}),
        kill_wait_ms=30000,
        grace_ms=40000,
        step_ms=800,
    ),
    fault(
        "other_tasks_are_not_asked",
        (
            "tasks",
            '        ask="" if leaving is None or leaving.asked_ms is None else parting.why_asked(leaving),\n',
            "",
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ignores_leave", "ignores_term"}),
        tasks=3,
    ),
    fault(
        "a_task_asks_again_at_every_word",
        (
            "relay",
            "        return replace(state, asked=True), (AskCommand(stand.ask),)\n",
            "        return state, (AskCommand(stand.ask),)\n",
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ignores_leave", "ignores_term"}),
        tasks=3,
    ),
)
"""Leave, then SIGTERM, then SIGKILL."""

HEIRS = (
    fault(
        "an_heir_asks_again",
        ("relay", "        inherited_asked=state.asked,\n", ""),
        mode="swarm",
        story="preempt0",
        faults=frozenset({"dead_coordinator", "ignores_term", "ignores_leave"}),
        tasks=3,
    ),
)
"""What was asked before the coordinator was lost."""

MASKED = (
    fault(
        "a_failure_behind_a_shell_counts_as_success",
        ("turns", '    hidden = masked.culprit(state) if may_hide else ""\n', '    hidden = ""\n'),
        mode="swarm",
        story="none",
        faults=frozenset({"masked", "crash"}),
    ),
    fault(
        "last_words_are_not_waited_for",
        ("turns", "    if may_hide and masked.waits(policy, state, now_ms):\n", "    if now_ms < 0:\n"),
        mode="swarm",
        story="none",
        faults=frozenset({"masked", "crash"}),
        ranks=1,
    ),
    fault(
        "a_last_word_after_the_end_is_dropped",
        ("machine", "    return ranks.last_word(state, word), commands\n", "    return state, commands\n"),
        mode="swarm",
        story="none",
        faults=frozenset({"masked", "crash"}),
        ranks=1,
    ),
    fault(
        "the_status_of_the_rank_itself_does_not_count",
        ("masked", "    return state.pids.get(rank.who.task) != rank.who.pid\n", "    return True\n"),
        mode="swarm",
        story="none",
        faults=frozenset({"exits"}),
        ranks=1,
    ),
    fault(
        "an_end_without_a_word_counts_as_a_failure",
        ("masked", "if rank.died and _is_hidden", "if (rank.died or rank.ended and not rank.finished) and _is_hidden"),
        mode="swarm",
        story="none",
        faults=frozenset({"exits"}),
    ),
    fault(
        "a_notice_after_the_end_makes_an_interruption_of_it",
        ("masked", "    return state.settle_ms is not None\n", "    return False\n"),
        mode="swarm",
        story="local_term",
        faults=frozenset({"exits"}),
        ranks=1,
    ),
)
"""`sh -c "python train.py; echo done"`."""

ENDS = PARTING + HEIRS + MASKED
