"""The options as the machine wants them.

Owns the translation of Options and of what the start knows into core/policy.py's Policy, and nothing else.
"""

from __future__ import annotations

from ckpt_supervisor.adapters.signals import signal_name
from ckpt_supervisor.core.policy import NOT_LOOKED, Policy
from ckpt_supervisor.launch import Launch

KILL_WAIT_MS = 30_000
"""Slurm's default KillWait, until Slurm has been asked."""

NODE_TURN_MS = 1_000
LOCAL_TURN_MS = 300
"""How much later each node's supervisors ask Slurm when the coordinator is lost, and each one of a node: a call takes 0.1 s."""


def policy_of(launch: Launch, can_look: bool) -> Policy:
    """The options as the machine wants them."""
    options = launch.options
    return Policy(
        directory=str(options.dir),
        epoch=launch.epoch,
        slurm=launch.job.slurm is not None,
        can_look=can_look,
        requeue=options.requeue.how,
        requeue_exit=options.requeue.code,
        start_restarts=launch.job.attempt,
        kill_wait_ms=options.kill_wait_ms or KILL_WAIT_MS,
        grace_ms=options.grace_ms,
        every_steps=options.every_steps,
        every_ms=options.every_ms,
        every_auto=options.every.auto,
        mtbi_ms=options.mtbi_ms,
        save_timeout_ms=options.save_timeout_ms,
        leave_timeout_ms=options.leave_timeout_ms,
        tasks=1 if launch.joined is not None else launch.job.tasks,
        join_ms=options.join_timeout_ms,
        turn_ms=_turn_ms(launch),
        lead_ms=options.lead.ms,
        lead_auto=options.lead.auto,
        notice_horizon_ms=options.notice_horizon_ms,
        lingers=options.linger,
        max_timeouts=options.max_timeouts,
        max_crashes=options.max_crashes,
        max_stalled=options.max_stalled,
        resubmits=bool(options.resubmit),
        on_hang=options.on_hang,
        verify_full=options.verify_mode == "full",
        adopts=bool(options.adopt),
        passes="" if options.pass_signal is None else signal_name(options.pass_signal),
        restarts=options.restarts,
        resume_step=-1 if launch.started is not None or launch.joined is not None else NOT_LOOKED,
    )


def _turn_ms(launch: Launch) -> int | None:
    """By node first: when a node is lost with all of its tasks, the first of the next one must not wait for each of them."""
    slurm = launch.job.slurm
    if slurm is None or not (slurm.nodeid or slurm.localid):
        return None
    return slurm.nodeid * NODE_TURN_MS + slurm.localid * LOCAL_TURN_MS
