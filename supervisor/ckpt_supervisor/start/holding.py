"""Whether the job that held a checkpoint directory last still has it: what Slurm says of it.

Owns the bounded question and its words. Must not decide what becomes of the directory: store/fence.py asks only about another
job, or another step, whose process cannot be seen from here. "Could not look" is never "not there": while Slurm cannot be asked,
the holder counts as alive.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping

from ckpt_supervisor.adapters.children import Claims
from ckpt_supervisor.adapters.slurm import Scontrol, locate
from ckpt_supervisor.core.views import NoView
from ckpt_supervisor.store import Holder, describe_holder

ASK_TIMEOUT_S = 8.0
ASK_AGAIN_S = (0.5, 2.0)
"""Pauses before Slurm is asked once more; 26 s in all when it does not answer."""

ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)
"""States from which no job and no step comes back by itself (squeue(1), JOB STATE CODES)."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"})

_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_STEP = re.compile(r"[0-9]{1,18}")


class Asking:
    """To be called with a holder; why it may still have the directory, "" if it does not. `lines` is what to tell the user."""

    def __init__(self, env: Mapping[str, str], claims: Claims, job: str, directory: os.PathLike[str]) -> None:
        self._env = env
        self._claims = claims
        self._job = job
        self._directory = os.fspath(directory)
        self._known: dict[tuple[str, str], str] = {}
        self.lines: list[str] = []

    def __call__(self, holder: Holder) -> str:
        """Ask once for each holder: a start looks at it several times."""
        key = (holder.job, holder.step_id if holder.job == self._job else "")
        if key not in self._known:
            self._known[key] = self._ask(holder)
        return self._known[key]

    def _ask(self, holder: Holder) -> str:
        if holder.job == self._job and not _STEP.fullmatch(holder.step_id):
            return ""  # A line of the batch script, which runs its lines one after the other.
        path = locate(self._env.get("PATH"))
        if path is None or not _ID.fullmatch(holder.job):
            if holder.host != os.uname().nodename:
                self.lines.append(
                    f"{self._directory} was held last by {describe_holder(holder)}: whether that still runs cannot be seen from "
                    "here; should it, its saves are refused from now on"
                )
            return ""
        scontrol = Scontrol(path, holder.job, self._env, self._claims)
        state: str | NoView = NoView("", definite=False)
        for pause_s in (0.0, *ASK_AGAIN_S):
            threading.Event().wait(pause_s)
            state = self._state(scontrol, holder)
            if isinstance(state, str) and state != "COMPLETING":
                break
            if isinstance(state, NoView) and state.definite:
                break
        return self._judged(holder, state)

    def _state(self, scontrol: Scontrol, holder: Holder) -> str | NoView:
        if holder.job == self._job:
            return scontrol.show_step(holder.step_id, ASK_TIMEOUT_S)
        view = scontrol.show_job(ASK_TIMEOUT_S)
        return view if isinstance(view, NoView) else view.state

    def _judged(self, holder: Holder, state: str | NoView) -> str:
        is_other = holder.job != self._job
        if isinstance(state, NoView):
            if not state.definite:
                return f"Slurm could not be asked whether that has ended ({state.reason})"
            ended = "Slurm does not know it any more"
        elif state not in ENDED:
            return f"Slurm says {state}" + (": it has been requeued and comes back" if state in WAITING else "")
        else:
            ended = f"Slurm says {state}"
        if is_other:
            self.lines.append(
                f"{self._directory} was held last by job {holder.job}, which has ended ({ended}): this run goes on from there"
            )
        return ""
