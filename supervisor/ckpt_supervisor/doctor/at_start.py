"""The short form of the doctor, at every start: one line for each thing that is wrong, none where all is well.

Owns when it is said. The environment and the options are judged at once. The rest waits for the first look at the job, which the
supervisor makes anyway, and for what earlier attempts came to; then Slurm is asked for its configuration and the partition, once,
in the lane "watch". Says only what is wrong for this run and can be mended; `ckptctl doctor` says everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_supervisor.adapters.lanes import Lanes
from ckpt_supervisor.adapters.slurm import Scontrol, SlurmEnv
from ckpt_supervisor.adapters.stderr import say
from ckpt_supervisor.core.describe import Entry
from ckpt_supervisor.core.views import JobView
from ckpt_supervisor.doctor import ask, notice_rules, slurm_rules
from ckpt_supervisor.doctor.facts import JobFacts, Setup, Srun, Wishes
from ckpt_supervisor.doctor.finding import Finding, wrong
from ckpt_supervisor.doctor.gather import wishes_of
from ckpt_supervisor.launch import Launch

ASK_TIMEOUT_S = 10.0

SAID = frozenset(
    {
        "scontrol", "srun", "nested-srun", "lead-off", "batch-job", "requeue", "requeue-exit", "two-owners",
        "srun-wait", "srun-kill-on-bad-exit", "open-mode", "srun-output", "export", "signal-no-trap",
        "signal-batch", "user-signal-batch", "signal-unknown", "signal-short", "grace", "kill-wait",
    }
)  # fmt: skip
"""What is worth a line at every start. What a site is like, and cannot be changed by who reads it, is the doctor's alone."""

Log = Callable[[Entry], None]


class Short:
    """For one supervisor. `begin`, `looked` and `recalled` are called in the loop's thread, each once."""

    def __init__(self, launch: Launch, lanes: Lanes, log: Log, scontrol: Scontrol | None) -> None:
        self._launch = launch
        self._lanes = lanes
        self._log = log
        self._scontrol = scontrol
        self._said: set[str] = set()
        self._view: JobView | None = None
        self._saves_ms: tuple[int, ...] | None = None

    def begin(self) -> None:
        """Judge the environment and the options."""
        slurm = self._launch.job.slurm
        if slurm is not None:
            self._tell(early(slurm, self._launch.env, wishes_of(self._launch.options), self._scontrol is not None))

    def looked(self, view: JobView) -> None:
        """The first look at the job is here."""
        self._view = view
        self._go_on()

    def recalled(self, saves_ms: Sequence[int]) -> None:
        """It is known how long earlier saves took."""
        self._saves_ms = tuple(saves_ms)
        self._go_on()

    def _go_on(self) -> None:
        scontrol, slurm, view, saves_ms = self._scontrol, self._launch.job.slurm, self._view, self._saves_ms
        if scontrol is None or slurm is None or view is None or saves_ms is None:
            return
        launch = self._launch
        wishes = wishes_of(launch.options)
        self._lanes.post(
            "watch",
            "looking at the set-up",
            lambda: wrong(_all(full(scontrol, slurm, launch.env, wishes, view, saves_ms))),
            self._told,
        )

    def _told(self, found: Any) -> None:
        if isinstance(found, list):
            self._log(Entry("set_up", "info", {"wrong": sorted({finding.id for finding in found})}))
            self._tell(found)

    def _tell(self, found: Sequence[Finding]) -> None:
        for finding in wrong(found):
            if finding.id in SAID and finding.id not in self._said:
                say(finding.line)
                self._log(Entry("warning", "warning", {"id": finding.id, "text": finding.line}))
        self._said |= {finding.id for finding in wrong(found)}


def _all(setup: Setup) -> list[Finding]:
    return [*slurm_rules.findings(setup), *notice_rules.findings(setup)]


def early(slurm: SlurmEnv, env: Mapping[str, str], wishes: Wishes, scontrol: bool) -> list[Finding]:
    """What the environment and the options alone show to be wrong."""
    setup = Setup(
        "step" if slurm.under_srun else "script",
        wishes=wishes,
        tasks=slurm.ntasks,
        scontrol=scontrol,
        open_mode=env.get("SLURM_OPEN_MODE", ""),  # Not SLURM_EXPORT_ENV: srun may have been told otherwise.
        other_owner=ask.other_owner(env, wishes.command),
    )
    return wrong(_all(setup))


def full(
    scontrol: Scontrol, slurm: SlurmEnv, env: Mapping[str, str], wishes: Wishes, view: JobView, saves_ms: tuple[int, ...]
) -> Setup:
    """With what the first look, the configuration, the partition, /proc and the script on this node show."""
    site = scontrol.config(ASK_TIMEOUT_S)
    name = env.get("SLURM_JOB_PARTITION", "")
    partition = ask.partition(scontrol, name) if site is not None and name else None
    script = None
    if view.batch and site is not None:
        script = ask.spooled_script(site.spool, slurm.nodename, slurm.job_id)
    running = [srun for _, srun in ask.sruns(str(slurm.job_id))] if slurm.under_srun else []
    nodes = env.get("SLURM_JOB_NUM_NODES", "")
    return Setup(
        "step" if slurm.under_srun else "script",
        wishes=wishes,
        job=JobFacts(scontrol.our_id, view.requeue, view.batch, view.time_limit_unlimited),
        site=site,
        partition=partition,
        script=script,
        sruns=tuple(running),
        srun=own(running, wishes.command),
        tasks=slurm.ntasks,
        nodes=int(nodes) if nodes.isdecimal() else None,
        open_mode=env.get("SLURM_OPEN_MODE", ""),
        export_env=env.get("SLURM_EXPORT_ENV", ""),
        other_owner=ask.other_owner(env, wishes.command),
        saves_ms=saves_ms,
    )


def own(running: Sequence[Srun], command: tuple[str, ...]) -> Srun | None:
    """The srun that started us: the only one with our command."""
    found = [srun for srun in running if srun.supervise is not None and srun.command == command]
    return found[0] if len(found) == 1 else None
