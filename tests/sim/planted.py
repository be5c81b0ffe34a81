"""Planted faults: small changes to the code, each of which the simulator has to find. A simulator that cannot see them proves nothing.

A change's old text must be there exactly once: when the code is edited, the fault here has to follow.
"""

from __future__ import annotations

from tests.sim.faults import fault
from tests.sim.planted_ends import ENDS
from tests.sim.planted_tasks import TASKS

AGREEMENT = (
    fault(
        "saved_n_not_compared",
        ("rounds", "if word.n != current.at.n:", "if word.n < 0:"),
        mode="swarm",
        faults=frozenset({"stale_save"}),
        ranks=2,
    ),
    fault(
        "hold_as_one_flag",
        (
            "protocol",
            "        self.done = max(self.done, number)\n        if self._stays",
            "        self.hold = NO_ROUND\n        if self._stays",
        ),
    ),
    fault(
        "no_filter_on_finished_rounds",
        ("protocol", "        if number <= self.done:\n", "        if number < 0:\n"),
        ("rounds", "PASSED_MS = 900", "PASSED_MS = 900_000_000"),
        mode="swarm",
        faults=frozenset({"partition"}),
    ),
    fault(
        "entered_read_before_hold",
        (
            "protocol",
            "                    self.hold = number  # Before `entered` is read (rule 2).\n"
            "                    self._say(wire.Ack(self.who, number, self.position()))\n",
            "                    answer = wire.Ack(self.who, number, self.position())\n"
            "                    self.hold = number\n"
            "                    self._say(answer)\n",
        ),
    ),
    fault(
        "t_moves_with_later_acks",
        (
            "rounds",
            'return _put(state, replace(member, passed_ms=now_ms)), ""',
            'return replace(state, round=replace(current, at=word.entered)), ""',
        ),
    ),
    fault(
        "beyond_t_saves_all_the_same",
        ("protocol", "        if here != order.at:\n", "        if here < order.at:\n"),
        ("rounds", "    if word.at != current.at:\n", "    if word.at < current.at:\n"),
        mode="swarm",
        faults=frozenset({"partition"}),
        every_steps=3,
    ),
    fault(
        "no_save_deadline",
        ("rounds", "    if now_ms >= current.save_by_ms:\n", "    if now_ms < 0:\n"),
        (
            "rounds",
            "    times = [current.save_by_ms, current.said_ms + RESEND_MS]\n",
            "    times = [current.said_ms + RESEND_MS]\n",
        ),
    ),
    fault(
        "last_boundary_raises_entered", hook="last_raises", mode="swarm", story="save", attach_api=False, every_ms=700, gap_ms=100
    ),
    fault(
        "safe_points_not_counted",
        hook="safe_points",
        mode="lossy",
        collective=True,
        phase_every=1,
        phase_alone=False,
        ranks=3,
        gap_ms=100,
    ),
    fault(
        "no_abort",
        (
            "rounds",
            "    return tuple(to(rank.who, word) for rank in state.live)\n",
            "    return ()\n",
        ),
    ),
    fault(
        "does_not_stay_parked_to_leave",
        ("protocol", 'if newest.then == "leave" and order.round > self.done:', "if order.round < 0:"),
    ),
    fault(
        "save_said_under_the_next_round",
        ("protocol", "wire.Saved(self.who, order.round, order.at.n,", "wire.Saved(self.who, self.hold, order.at.n,"),
    ),
    fault(
        "mute_rank_never_given_up",
        ("rounds", "MUTE_MS = 15_000", "MUTE_MS = 15_000_000"),
        ("rounds", "MUTE_SAVING_MS = 60_000", "MUTE_SAVING_MS = 60_000_000"),
        mode="swarm",
        faults=frozenset({"stop"}),
        every_ms=700,
        ranks=3,
    ),
    fault(
        "nothing_is_said_again",
        ("rounds", "commands += tuple(to(member.who, word) for member in _waiting(state))", "commands += ()"),
        mode="lossy",
        faults=frozenset({"loss"}),
    ),
    fault(
        "missing_ranks_ignored",
        ("rounds", "whole = len(current.members) == state.world_size", "whole = True"),
    ),
    fault(
        "committed_before_all_have_written",
        ("rounds", "current.written == len(current.members)", "current.written > 0"),
    ),
    fault("go_before_all_have_arrived", ("rounds", "current.arrived == len(current.members)", "current.arrived > 0")),
    fault(
        "converted_after_go",
        (
            "turns",
            "    if state.phase in (Phase.AGREEING, Phase.SAVING) and not current.go:\n        return rounds.convert(policy, state, Kind.LEAVE,",
            "    if state.phase in (Phase.AGREEING, Phase.SAVING):\n        return rounds.convert(policy, state, Kind.LEAVE,",
        ),
        (
            "rounds",
            "    if current is None or current.go:\n        return state, ()\n    state = replace(state, round=replace(current, kind=kind",
            "    if current is None:\n        return state, ()\n    state = replace(state, round=replace(current, kind=kind",
        ),
        mode="swarm",
        story="preempt",
        every_steps=1,
        save_ms=400,
        ranks=2,
    ),
    fault(
        "arrived_ranks_not_told_of_a_notice",
        ("rounds", "return wire.Go(current.number, _then(current))", "return wire.Go(current.number)"),
        mode="swarm",
        story="preempt",
        every_steps=1,
        save_ms=400,
        ranks=2,
    ),
    fault(
        "late_save_at_takes_go_back",
        (
            "protocol",
            "        self._order = self._as_told(order)\n        if self._saving",
            "        self._order = order\n        if self._saving",
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"reorder", "repeat", "delay"}),
        every_steps=1,
        step_ms=800,
        save_ms=1500,
        ranks=2,
        grace_ms=40000,
    ),
    fault(
        "stale_acks_obeyed",
        ("answers", "return state.round is None or word.round != state.round.number or", "return state.round is None or"),
        (
            "rounds",
            "    if current is None or member is None or word.round != current.number or state.phase is not Phase.AGREEING:",
            "    if current is None or member is None or state.phase is not Phase.AGREEING:",
        ),
        mode="swarm",
        story="none",
        faults=frozenset({"reorder", "repeat", "delay"}),
        every_ms=700,
        ranks=2,
    ),
    fault(
        "rank_beyond_t_not_noticed",
        ("rounds", "PASSED_MS = 900", "PASSED_MS = 900_000_000"),
        mode="swarm",
        story="save",
        faults=frozenset({"reorder"}),
        every_steps=3,
        collective=True,
    ),
    fault(
        "parked_for_ever",
        ("protocol", "SILENCE_MS = 10_000", "SILENCE_MS = 10_000_000"),
        mode="swarm",
        faults=frozenset({"partition"}),
    ),
    fault(
        "stale_words_not_answered",
        ("answers", '    return (to(word.who, wire.Abort(word.round, "this round is over")),)', "    return ()"),
        mode="swarm",
        story="save",
        faults=frozenset({"loss", "missing_rank"}),
        loss_percent=2,
        every_ms=None,
        every_steps=0,
        ranks=3,
        step_ms=100,
        steps=120,
    ),
    fault(
        "own_stop_echo_not_answered",
        (
            "machine",
            '                return state, (to(who, wire.Abort(NO_ROUND, "this round is over")),)\n            return turns',
            "                return state, ()\n            return turns",
        ),
        mode="swarm",
        story="save",
        faults=frozenset({"loss"}),
        loss_percent=2,
        every_steps=3,
        every_ms=None,
    ),
    fault(
        "arrived_rank_need_not_be_heard",
        ("rounds", "    stands = current is not None and not current.go and", "    stands = current is None and"),
        mode="swarm",
        story="save",
        faults=frozenset({"partition", "hang"}),
        every_steps=0,
        ranks=3,
        collective=False,
        steps=300,
    ),
    fault(
        "stop_beyond_t_not_noticed",
        ("machine", "                problem = rounds.stopped_beyond(state, event)\n", "                problem = ''\n"),
        mode="swarm",
        story="save",
        faults=frozenset({"partition", "hang"}),
        every_steps=1,
        ranks=3,
        collective=False,
    ),
)
"""Rules 1 to 12 of the agreement."""

LEAVING = (
    fault(
        "requeue_without_a_look",
        (
            "leaving",
            '    return notices.look(policy, state, "right before the requeue", now_ms)\n',
            "    requeue = dataclasses.replace(requeue, asking=Asking.CALLING, again_ms=None)\n"
            "    return replace(state, requeue=requeue), (CallRequeue(),)\n",
        ),
    ),
    fault(
        "requeue_before_commit",
        (
            "checking",
            "    return state, (commit,)\n",
            "    if current.kind.name == 'LEAVE' and state.notice is not None:\n"
            "        state, more = turns.leaving.leave(policy, state, True, '', now_ms)\n"
            "        return state, (commit, *more)\n"
            "    return state, (commit,)\n",
        ),
    ),
    fault(
        "requeue_called_twice",
        (
            "leaving",
            "    if requeue.asking is not Asking.LOOKING:\n        return state, ()\n    if isinstance",
            "    if requeue.asking not in (Asking.LOOKING, Asking.CALLING):\n        return state, ()\n    if isinstance",
        ),
        mode="swarm",
        faults=frozenset({"requeue_hangs", "storm"}),
        requeue="auto",
    ),
    fault(
        "leaves_before_the_term",
        (
            "leaving",
            "if _ended(state, now_ms) and (requeue.term_seen or now_ms >= _term_by_ms(state)):",
            "if _ended(state, now_ms):",
        ),
    ),
    fault(
        "no_look_on_the_second_signal",
        (
            "notices",
            '    return look(policy, replace(state, notice=notice), f"signal {event.name}", now_ms)\n',
            "    if notice.signals > 1:\n"
            "        return replace(state, notice=notice), ()\n"
            '    return look(policy, replace(state, notice=notice), f"signal {event.name}", now_ms)\n',
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"then_scancel"}),
    ),
    fault(
        "unknown_taken_for_refused",
        (
            "leaving",
            "            return _pause(state, event.reason, now_ms)\n",
            "            return _over(policy, state, event.reason, now_ms)\n",
        ),
        mode="swarm",
        faults=frozenset({"requeue_fails"}),
        requeue="auto",
    ),
    fault("cancelled_taken_for_preempted", ("policy", "    return Cause.CANCELLED\n", "    return Cause.PREEMPTED\n")),
    fault(
        "preempt_time_tested_first",
        (
            "policy",
            "    if runs(view):\n        if view.preempt_ms is not None:\n",
            "    if view.preempt_ms is not None or runs(view):\n        if view.preempt_ms is not None:\n",
        ),
    ),
    fault(
        "verification_ignored",
        (
            "checking",
            "    if event.problem:\n        where = ",
            "    if False:\n        where = ",
        ),
    ),
    fault(
        "phase_goes_back",
        (
            "leaving",
            "    return requeue_tick(policy, replace(state, requeue=requeue), now_ms)\n",
            "    return replace(state, requeue=None, phase=Phase.LEAVING), ()\n",
        ),
    ),
    fault(
        "deadlines_counted_forwards", ("budget", "    out_by_ms = kill_at_ms - margin_ms\n", "    out_by_ms = now_ms + 30_000\n")
    ),
    fault(
        "refused_leaves_at_once",
        (
            "leaving",
            '            return _over(policy, state, f"Slurm refused the requeue ({event.reason})", now_ms)\n',
            '            return finish(policy, state, f"Slurm refused the requeue ({event.reason})")\n',
        ),
        mode="swarm",
        story="preempt",
        faults=frozenset({"refused", "slow_exit"}),
    ),
    fault(
        "watch_sleeps_during_a_round",
        (
            "machine",
            "    if Phase.RUNNING.value < state.phase.value < Phase.LEAVING.value and notices",
            "    if state.phase.value < 0 and notices",
        ),
    ),
    fault(
        "older_commit_taken_for_fresh",
        (
            "turns",
            "        if need_ms is not None and now_ms + need_ms > state.notice",
            "        if state.committed_here and now_ms + state.longest_save_ms > state.notice",
        ),
    ),
    fault(
        "kill_counted_from_the_end_of_the_look",
        (
            "policy",
            "    ended_kill_ms = (now_ms if since_ms is None else since_ms) + wait_ms\n",
            "    ended_kill_ms = now_ms + wait_ms\n",
        ),
        mode="swarm",
        faults=frozenset({"look_slow"}),
    ),
    fault(
        "grace_explains_every_signal",
        ("notices", "still_grace = reading.cause is Cause.PREEMPTED and", "still_grace = reading.cause is Cause.UNKNOWN and"),
        mode="swarm",
        story="preempt",
        faults=frozenset({"look_early", "then_scancel"}),
    ),
    fault(
        "own_end_outlasts_the_kill",
        ("parting", "    return min(leaving.end_command_at_ms, max(", "    return max(leaving.end_command_at_ms, 0 * max("),
        mode="swarm",
        story="preempt",
        faults=frozenset({"ends_early", "uneven_end", "then_scancel"}),
        tasks=3,
    ),
    fault(
        "rehearsal_ends_an_unattached_training",
        (
            "turns",
            "            if waits:\n                return state, ()  # Nobody can save;",
            "            if now_ms < 0:\n                return state, ()  # Nobody can save;",
        ),
        story="rehearse",
        start_ms=2500,
        end_ms=None,
    ),
    fault(
        "rehearsal_ends_training_at_a_saved_step",
        (
            "turns",
            "        if _may_turn(state) and now_ms < current.verify_by_ms:\n",
            "        if _may_turn(state) and now_ms < current.verify_by_ms and current.go:\n",
        ),
        story="rehearse",
        every_steps=1,
        end_ms=None,
        save_ms=50,
    ),
    fault(
        "term_waited_for_only_until_the_guess",
        (
            "leaving",
            "    return min(term_by_ms, out_by_ms) if accepted_ms < out_by_ms else term_by_ms\n",
            "    return max(accepted_ms, min(term_by_ms, out_by_ms))\n",
        ),
        mode="swarm",
        story="term",
        faults=frozenset({"away", "late_term"}),
        requeue="auto",
    ),
    fault(
        "waits_for_a_look_until_killed",
        (
            "leaving",
            "        if ended and (not _waits_for_look(policy, state) or now_ms >= _out_by_ms(state)):\n",
            "        if ended and not _waits_for_look(policy, state):\n",
        ),
        (
            "leaving",
            "            times.append(max(ended_ms, _out_by_ms(state)) if not asks and _waits_for_look(policy, state) else ended_ms)\n",
            "            if asks or not _waits_for_look(policy, state):\n                times.append(ended_ms)\n",
        ),
        mode="swarm",
        faults=frozenset({"away"}),
        requeue="never",
    ),
    fault(
        "budget_cut_at_every_look",
        ("notices", "CUT_AGAIN_MS = 1_000", "CUT_AGAIN_MS = 0"),
        mode="swarm",
        faults=frozenset({"others", "storm"}),
        requeue="auto",
    ),
    fault(
        "end_explains_an_earlier_term",
        ("notices", "known = notice.deadline_known or (notice.looked and not runs(view))", "known = notice.deadline_known"),
        mode="swarm",
        story="step_limit",
        faults=frozenset({"then_scancel"}),
    ),
)
"""Notices, deadlines, the requeue and the exit status."""

FAULTS = AGREEMENT + LEAVING + TASKS + ENDS
