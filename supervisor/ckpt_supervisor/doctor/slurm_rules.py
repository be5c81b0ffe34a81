"""Site, job and script: how the training is started, and whether the job comes back.

Owns the judgement, in the words and numbers that a user reads. Pure. Whether a notice comes and is long enough is in
notice_rules.py. What Slurm does in each case is docs/slurm.md's; the numbers behind a word like "2 s later" are measured there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ckpt_supervisor.doctor.facts import Setup, Srun
from ckpt_supervisor.doctor.finding import Finding, Findings, error, note, ok, unknown, warning
from ckpt_supervisor.start import launchers

SRUN_FIRST = "write `srun ckpt-supervise -- ...` in the job script"


def findings(seen: Setup) -> Findings:
    """All of them, what is good among it."""
    if seen.where == "nowhere" and seen.script is None:
        return [note("slurm", "no Slurm here: ckpt-supervise runs in local mode, and nothing requeues it")]
    found: Findings = []
    if seen.where == "nowhere":
        found.append(note("slurm", "no Slurm here: only the script was looked at"))
    elif not seen.scontrol:
        found.append(
            error(
                "scontrol",
                "scontrol was not found: causes and deadlines cannot be asked, and the job cannot be requeued from here",
                "put Slurm's client tools on PATH, or use --requeue exit:N where the site has RequeueExit",
            )
        )
    elif seen.silent:
        found.append(unknown("slurm", f"Slurm did not answer: {seen.silent}", "try again; `scontrol ping` says who is down"))
    return [*found, *start(seen), *_srun_options(seen), *_comes_back(seen), *_output(seen), *_limit(seen), *_site(seen)]


def start(seen: Setup) -> Findings:
    """Who starts the supervisor."""
    found: Findings = []
    script = seen.script
    no_srun = (
        "not started by srun: Slurm sends its notices to steps only, so none will arrive here; only the watch on the job's end "
        "time can save before the limit"
    )
    if seen.where == "script" and script is None:
        found.append(error("srun", no_srun, SRUN_FIRST))
    for bare in script.bare if script is not None else ():
        found.append(error("srun", f"{bare.place} of the job script is {no_srun}", SRUN_FIRST))
    if script is not None and script.supervised and not script.bare:
        found.append(ok("srun", f"srun starts the supervisor ({', '.join(srun.place for srun in script.supervised)})"))
    if script is not None and not script.supervised and not script.bare:
        found.append(
            note(
                "supervisor",
                f"no line of {script.origin} starts ckpt-supervise",
                f"if no other file does either: {SRUN_FIRST}",
            )
        )
    commands = [seen.wishes.command, *(srun.command for srun in _supervisors(seen))]
    if any(launchers.calls_srun(command) for command in commands):
        found.append(
            warning(
                "nested-srun",
                "the command starts a further srun: with ProctrackType linuxproc or pgid that one gets Slurm's signals too and "
                "kills its tasks before they can save, and tasks on other nodes are not supervised",
                "write `srun ckpt-supervise -- ...` around the training itself",
            )
        )
    return [*found, *_two(seen)]


def _supervisors(seen: Setup) -> tuple[Srun, ...]:
    if seen.script is not None and seen.script.supervised:
        return seen.script.supervised
    return tuple(srun for srun in seen.sruns if srun.supervise is not None)


def _two(seen: Setup) -> Findings:
    """Several supervised sruns in one job are allowed, each with a directory of its own."""
    several = _supervisors(seen)
    if len(several) < 2 or all(one.excludes(other) for one, other in itertools.combinations(several, 2)):
        return []
    places = " and ".join(srun.place for srun in several)
    directories = [srun.directory for srun in several]
    if len(set(directories)) == len(several):
        text = (
            f"{len(several)} supervised sruns in one job ({places}), each with a --dir of its own: the last one done requeues it"
        )
        return [
            note("two-sruns", text, "run after run they start from the script's first line; a finished one is not trained again")
        ]
    text = f"{len(several)} supervised sruns in one job ({places}) have the same directory"
    if any(srun.background for srun in several):
        return [error("two-sruns", f"{text}, and run side by side: one of them is refused", "give each a --dir of its own")]
    text += ": if more than one of them runs, it takes the other's checkpoints for its own"
    return [warning("two-sruns", text, "give each a --dir of its own")]


def _sruns(seen: Setup) -> Sequence[Srun]:
    """Those whose options count: this step's own, else the supervised ones of the script."""
    return (seen.srun,) if seen.srun is not None else _supervisors(seen)


def _srun_options(seen: Setup) -> Findings:
    found: Findings = []
    site = seen.site
    alone = seen.tasks == 1
    for srun in _sruns(seen):
        for name in ("wait", "kill-on-bad-exit"):
            value = srun.options.get(name, "0") or "1"
            if value != "0":
                found.append(_harmful(name, f"{srun.place}: srun --{name}={value}", value, alone))
        if _is_cut_off(srun.options.get("export", "")):
            found.append(_no_export(f"{srun.place}: srun --export={srun.options['export']}"))
    if site is not None and site.wait_s and not any("wait" in srun.options for srun in _sruns(seen)):
        found.append(_harmful("wait", f"this site has WaitTime={site.wait_s}", str(site.wait_s), alone))
    if site is not None and site.kill_on_bad_exit and not any("kill-on-bad-exit" in srun.options for srun in _sruns(seen)):
        found.append(_harmful("kill-on-bad-exit", "this site has KillOnBadExit=1", "1", alone))
    if seen.export_env and _is_cut_off(seen.export_env) and not any("export" in srun.options for srun in _sruns(seen)):
        found.append(_no_export(f"SLURM_EXPORT_ENV={seen.export_env}, from sbatch --export={seen.export_env}"))
    script = seen.script
    given = script.sbatch.get("export", "") if script is not None else ""
    if script is not None and _is_cut_off(given) and not script.exports_all and not seen.export_env:
        if not any(srun.options.get("export", "").startswith("ALL") for srun in script.supervised):
            found.append(_no_export(f"{script.origin} has #SBATCH --export={given}"))
    return found


def _is_cut_off(export: str) -> bool:
    """Whether with this --export the script's variables do not reach the step."""
    return bool(export) and "ALL" not in export.upper().split(",")


def _no_export(what: str) -> Finding:
    return warning(
        "export",
        f"{what}: variables that the job script sets (CKPT_SUPERVISE_DIR, PATH of the environment) do not reach the step",
        "write `export SLURM_EXPORT_ENV=ALL` in the script before srun, or `srun --export=ALL`",
    )


def _harmful(name: str, what: str, value: str, alone: bool) -> Finding:
    """--wait and --kill-on-bad-exit end tasks that are still at work; where there is one task there is nobody to be ended."""
    if name == "wait":
        text = f"{what}: that long after the first task has ended srun kills the others, in the middle of a save if need be"
        advice = f"leave it away, or `srun --wait=0` where the site sets {value} s"
        return note("srun-wait", f"{what}: harmless with one task", "") if alone else warning("srun-wait", text, advice)
    text = f"{what}: when one task fails the others are killed KillWait later, in the middle of a save if need be"
    advice = "leave it away, or `srun --kill-on-bad-exit=0`: the supervisors end a step whose training has failed"
    return note(f"srun-{name}", f"{what}: harmless with one task", "") if alone else warning(f"srun-{name}", text, advice)


def _comes_back(seen: Setup) -> Findings:
    """Whether the job can be requeued."""
    job, site, script = seen.job, seen.site, seen.script
    found: Findings = []
    if script is not None:
        found += [
            warning(
                "two-owners",
                f"line {line} of the job script requeues the job itself: that ends the supervisor's save after KillWait, and "
                "brings a cancelled job back",
                "take it out: the supervisor requeues once the save is committed",
            )
            for line in script.requeues
        ]
    if seen.other_owner:
        text = f"{seen.other_owner} is at work in this job and requeues by itself: two requeue mechanisms fight for one job"
        found.append(warning("two-owners", text, "let one of them do it: --requeue never here, or switch it off there"))
    if seen.wishes.requeue_exit is not None and site is not None and seen.wishes.requeue_exit not in site.requeue_exit:
        has = ", ".join(map(str, site.requeue_exit)) or "none"
        code = seen.wishes.requeue_exit
        text = f"--requeue exit:{code}, but RequeueExit of this site has {has}: Slurm takes that status for a failure"
        found.append(error("requeue-exit", text, "use --requeue auto, or a status that the site requeues"))
    if not seen.wishes.wants_requeue:
        return found
    if job is not None and job.batch is False:
        text = "this is no batch job, so Slurm cannot requeue it"
        return [*found, warning("batch-job", text, "after an interruption start the command again by hand, or use sbatch")]
    forbidden = _forbidden(seen)
    if forbidden:
        found.append(
            error(
                "requeue",
                f"{forbidden}, so it does not come back by itself after an interruption",
                "submit it with --requeue; where the site forbids that, --requeue exit:N or --resubmit 'sbatch job.sh'",
            )
        )
    elif (job is not None and job.requeue) or (script is not None and "requeue" in script.sbatch):
        found.append(ok("requeue", "the job may be requeued"))
    return found


def _forbidden(seen: Setup) -> str:
    if seen.job is not None:
        return "this job may not be requeued (Requeue=0)" if seen.job.requeue is False else ""
    options = seen.script.sbatch if seen.script is not None else {}
    if "no-requeue" in options:
        return f"{seen.script.origin if seen.script else 'the script'} has #SBATCH --no-requeue: the job may not be requeued"
    if seen.script is not None and "requeue" not in options and seen.site is not None and seen.site.job_requeue is False:
        return "this site has JobRequeue=0 and the script no #SBATCH --requeue: the job may not be requeued"
    return ""


def _output(seen: Setup) -> Findings:
    """Field case 53: what the first run printed is gone when the job has been requeued."""
    options = seen.script.sbatch if seen.script is not None else {}
    if seen.where == "outside" and seen.script is None and not seen.open_mode:
        return []
    if seen.job is not None and seen.job.batch is False:
        return []
    mode = (seen.open_mode or options.get("open-mode", ""))[:1]
    if not mode and seen.where == "outside" and seen.job is not None and not (seen.site is not None and seen.site.file_append):
        text = "whether the job's output is kept when it runs again cannot be seen: sbatch may have been given --open-mode"
        return [note("open-mode", text, "write #SBATCH --open-mode=append into the script")]
    if not mode and seen.site is not None and seen.site.file_append is not None:
        mode = "a" if seen.site.file_append else "t"
    elif not mode and seen.script is not None:
        mode = "t"  # As sites have it; without Slurm's word it is the best guess.
    advice = "write #SBATCH --open-mode=append; the journal below --dir keeps what the supervisor did in any case"
    found: Findings = []
    if mode == "t":
        found.append(
            warning("open-mode", "the job's output file is emptied when the job runs again (no --open-mode=append)", advice)
        )
    elif mode == "a":
        found.append(ok("open-mode", "the output of earlier runs is kept (--open-mode=append)"))
    for srun in _sruns(seen):
        name, own = srun.options.get("output"), srun.options.get("open-mode", "")[:1]
        if name not in (None, "none", "all") and (own or mode) == "t":
            text = f"{srun.place}: srun --output={name} is emptied when the job runs again"
            found.append(warning("srun-output", text, "give that srun --open-mode=append as well"))
    return found


def _limit(seen: Setup) -> Findings:
    if seen.job is not None:
        missing = bool(seen.job.unlimited)
    else:
        given = seen.script.sbatch.get("time", "") if seen.script is not None else None
        by_site = seen.partition is not None and seen.partition.max_time == "UNLIMITED"
        by_site = by_site and seen.partition is not None and seen.partition.default_time in ("NONE", "UNLIMITED", "")
        missing = given is not None and (given.upper() in ("UNLIMITED", "INFINITE", "0") or (not given and by_site))
    if not missing:
        return []
    text = "the job has no time limit: its end is not known, so nothing can be saved ahead of it, and backfill has no use for it"
    return [warning("time-limit", text, "give one with #SBATCH --time=24:00:00; training may need longer, it goes on after each")]


def _site(seen: Setup) -> Findings:
    site = seen.site
    if site is None:
        return []
    match site.proctrack:
        case "pgid":
            text = (
                "ProctrackType=proctrack/pgid: processes that leave the task's process group outlive the job, and hold its GPUs"
            )
            return [
                warning("proctrack", text, "nothing to change here; the supervisor ends what it can see. Ask the site for cgroup")
            ]
        case "linuxproc":
            text = "ProctrackType=proctrack/linuxproc: Slurm's signals go to every process of the step"
            return [note("proctrack", text, "`import ckpt_client` early keeps loader workers out of their reach; no srun inside")]
        case kind:
            return [ok("proctrack", f"Slurm {site.version}, ProctrackType {kind or 'not named'}")]
