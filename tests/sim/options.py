"""What one run of the simulator is drawn to be: its size, its times, its story and its faults. Printed with the seed.

Three modes. `calm` has no fault at all and `lossy` only a bad network that heals before the notice: both must end well.
`swarm` turns on a random subset of all faults: there only safety is demanded, and liveness of whoever was left unharmed.
"""

from __future__ import annotations

import dataclasses
import random

NET = ("loss", "repeat", "delay", "reorder", "partition")
RANK = ("crash", "stop", "hang", "slow_rank", "late_rank", "missing_rank", "alone", "ends_early", "elastic", "torn_exit")
SAVE = ("slow_save", "hung_save", "save_raises", "full_disk", "short", "corrupt", "missing_file", "stale_save")
STORE = ("verify_slow", "verify_hang", "commit_slow", "commit_hang", "commit_fails", "fenced", "there_already")
LOOK = ("look_early", "look_slow", "look_fails", "cannot_look")
REQUEUE = ("refused", "no_batch", "requeue_hangs", "requeue_lost", "requeue_fails", "away", "frozen", "late_term", "others")
SIGNALS = ("storm", "then_scancel", "then_requeue", "then_limit", "then_save", "early_notice", "then_usr1")
COMMAND = ("exits", "ignores_leave", "slow_exit", "unkillable", "exit_code", "in_place")
FAULTS = NET + RANK + SAVE + STORE + LOOK + REQUEUE + SIGNALS + COMMAND

ENDS = ("ignores_term", "slow_term", "masked")
"""How a command ends. Drawn from a source of their own, so that the other faults of a seed stay as they are."""

LINK = ("link_loss", "link_delay", "link_cut", "link_reset")
TASK = ("dead_task", "dead_coordinator", "stopped_task", "stopped_coordinator", "late_task", "never_task", "step_ends")
SHARE = ("slow_share", "share_fails")
SPREAD = ("skew", "one_signal", "uneven_end", "old_stand")
TASK_FAULTS = LINK + TASK + SHARE + SPREAD
"""What can happen to a step of several supervisors only."""

STORIES = (
    "preempt",
    "preempt",
    "preempt",
    "preempt0",
    "preempt_usr1",
    "preempt_cancel",
    "warning",
    "limit",
    "watch",
    "scancel",
    "requeued",
    "rehearse",
    "save",
    "step_limit",
    "term",
    "node_failure",
    "local_term",
    "local_int",
    "none",
)
LOCAL = ("local_term", "local_int")

ENDLESS = 1_000_000


@dataclasses.dataclass(slots=True)
class Options:
    """One run, as drawn."""

    seed: int
    mode: str
    story: str
    faults: frozenset[str]
    ranks: int
    tasks: int
    steps: int
    step_ms: int
    collective: bool
    gap_ms: int
    attach_api: bool
    phase_every: int
    phase_alone: bool
    safe_points: int
    resume_step: int
    start_ms: int
    every_steps: int
    every_ms: int | None
    save_ms: int
    verify_ms: int
    commit_ms: int
    kill_wait_ms: int
    grace_ms: int
    story_ms: int
    save_timeout_ms: int
    requeue: str
    restarts: int
    start_restarts: int
    sharded: bool
    end_ms: int | None
    loss_percent: int
    heals_ms: int
    pure: bool
    link_loss_percent: int = 0

    def has(self, fault: str) -> bool:
        """Whether this fault is turned on in this run."""
        return fault in self.faults

    def text(self) -> str:
        """All of it on one line."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["faults"] = ",".join(sorted(self.faults)) or "none"
        return " ".join(f"{name}={value}" for name, value in fields.items())


def draw(
    seed: int, rng: random.Random, ranks_max: int, mode: str = "", story: str = "", added: frozenset[str] = frozenset()
) -> Options:
    """The options of this seed. Mode and story may be given; `added` faults come on top of the drawn ones."""
    mode = mode or rng.choice(("calm", "lossy", "swarm", "swarm", "swarm", "swarm"))
    faults: frozenset[str] = frozenset()
    if mode == "swarm":
        density = rng.choice((0.04, 0.08, 0.2))
        faults = frozenset(name for name in FAULTS if rng.random() < density)
    elif mode == "lossy":
        faults = frozenset(name for name in NET if rng.random() < 0.5)
    faults |= added | _of_the_end(seed, mode)
    ranks = min(ranks_max, rng.choice((1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 8, ranks_max)))
    endless = mode != "swarm" or rng.random() < 0.6
    step_ms = rng.choice((20, 100, 250, 800)) if ranks < 8 else rng.choice((100, 250, 800))
    story = story or rng.choice(STORIES)
    story_ms = rng.choice((300, 1_500, 3_000, 6_000)) + rng.randrange(1_000)
    ends = story in ("none", "save", "rehearse")
    step_ms = max(step_ms, 100) if ends else step_ms
    steps = ENDLESS if endless and not ends else max(1, (story_ms + rng.randrange(6_000)) // step_ms)
    kill_wait_ms = rng.choice((6_000, 10_000, 30_000))
    save_ms, verify_ms, commit_ms = rng.choice((5, 50, 400, 1_500)), rng.choice((5, 50, 400)), rng.choice((5, 50, 200))
    every_steps = rng.choice((0, 0, 1, 3, 10))
    if every_steps and steps < ENDLESS:
        every_steps = max(every_steps, steps * (save_ms + verify_ms + commit_ms) // 20_000)  # So that it ends some day.
    return Options(
        seed=seed,
        mode=mode,
        story=story,
        faults=faults,
        ranks=ranks,
        tasks=1,
        steps=steps,
        step_ms=step_ms,
        collective=ranks > 1 and rng.random() < 0.6,
        gap_ms=rng.choice((0, 0, 2, step_ms // 2)),
        attach_api=rng.random() < 0.3,
        phase_every=rng.choice((0, 0, 1, 3, 7)),
        phase_alone=rng.random() < 0.4,
        safe_points=rng.randrange(1, 5),
        resume_step=rng.choice((-1, -1, 1, 40)),
        start_ms=rng.choice((0, 20, 200, 200, 2_500)),
        every_steps=every_steps,
        every_ms=rng.choice((None, None, 700, 3_000)),
        save_ms=save_ms,
        verify_ms=verify_ms,
        commit_ms=commit_ms,
        kill_wait_ms=kill_wait_ms,
        grace_ms=rng.choice((5_000, 15_000, 40_000)),
        story_ms=story_ms,
        save_timeout_ms=rng.choice((20_000, 45_000)),
        requeue=rng.choice(("auto", "auto", "auto", "auto", "never", "exit")),
        restarts=rng.choice((0, 0, 2)) if "in_place" in faults else 0,
        start_restarts=rng.choice((0, 0, 3)),
        sharded=rng.random() < 0.2,
        end_ms=_end_ms(story, story_ms, kill_wait_ms, rng),
        loss_percent=rng.choice((2, 10, 30)) if "loss" in faults else 0,
        heals_ms=story_ms + rng.choice((0, 50, 1_000)) if mode == "lossy" else 1_000_000_000,
        pure=seed % 8 == 0,
    )


def spread(
    options: Options, ranks_max: int, wanted: frozenset[str], tasks: int | None = None, ranks: int | None = None
) -> Options:
    """The same run over several tasks, in half of the runs; drawn from a source of its own, so that the others stay as they are.

    `wanted`, `tasks` and `ranks` are given where a test wants them so.
    """
    rng = random.Random(f"tasks of {options.seed}")
    alone = rng.random() < 0.5
    if tasks is None:
        tasks = 1 if alone else rng.choice((2, 2, 2, 3, 4, 8, 16))
    drawn = rng.choice((1, 1, 2, 4)) * tasks
    if ranks is None:
        ranks = options.ranks if tasks == 1 else min(ranks_max, drawn)
    tasks = 1 if options.story in LOCAL else min(tasks, ranks)
    if tasks == 1:
        return dataclasses.replace(options, tasks=1, ranks=ranks, collective=options.collective and ranks > 1)
    faults: frozenset[str] = wanted
    if options.mode == "swarm":
        density = rng.choice((0.04, 0.08, 0.2))
        faults |= frozenset(name for name in TASK_FAULTS if rng.random() < density)
    elif options.mode == "lossy":
        faults |= frozenset(name for name in LINK if rng.random() < 0.5)
    step_ms = options.step_ms if ranks < 8 else max(100, options.step_ms)
    percent = rng.choice((2, 5) if options.mode == "lossy" else (2, 10, 30)) if "link_loss" in faults else 0
    return dataclasses.replace(
        options,
        tasks=tasks,
        ranks=ranks,
        step_ms=step_ms,
        collective=ranks > 1 and rng.random() < 0.6,
        faults=options.faults | faults,
        link_loss_percent=percent,
    )


def _of_the_end(seed: int, mode: str) -> frozenset[str]:
    rng = random.Random(f"end of {seed}")
    return frozenset(name for name in ENDS if rng.random() < 0.1) if mode == "swarm" else frozenset()


def _end_ms(story: str, story_ms: int, kill_wait_ms: int, rng: random.Random) -> int | None:
    """The end of the job's time, as Slurm sees it at the start."""
    if story == "limit":
        return story_ms
    if story in ("warning", "watch"):
        return story_ms + rng.choice((4_000, 15_000, 60_000))
    return rng.choice((None, 3_600_000, 3_600_000, story_ms + 5_000 + kill_wait_ms))
