"""Puts together what the rules look at: the environment, the options, Slurm's answers and the job script as one Setup.

Owns what is asked when, for `ckptctl doctor`. Must not judge. Works on a login node, inside a job, and where there is no Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ckpt_supervisor import config
from ckpt_supervisor.adapters.signals import signal_name
from ckpt_supervisor.adapters.slurm import Scontrol, SlurmEnv, locate
from ckpt_supervisor.core.views import NoView
from ckpt_supervisor.doctor import ask, script, shell
from ckpt_supervisor.doctor.facts import JobFacts, Script, Setup, Srun, Wishes

ALWAYS = ("TERM", "INT", "HUP")


class Found(msgspec.Struct, frozen=True):
    """A Setup, and what goes with it."""

    setup: Setup
    directory: Path
    unresolved: str = ""
    """What of the directory's name is only known at run time."""
    option_problems: tuple[str, ...] = ()
    no_script: str = ""
    """Why the job's script could not be read."""
    one_machine: bool | None = None
    job_name: str = ""


def wishes_of(options: config.Options) -> Wishes:
    """The supervisor's options that the rules need."""
    named = [signal_name(number).removeprefix("SIG") for number in (*options.notice_signals, *options.save_signals)]
    passes = [] if options.pass_signal is None else [signal_name(options.pass_signal).removeprefix("SIG")]
    return Wishes(
        wants_requeue=options.requeue.how == "auto",
        requeue_exit=options.requeue.code if options.requeue.how == "exit" else None,
        watched=options.lead.ms is not None,
        lead_ms=None if options.lead.auto else options.lead.ms,
        signals=frozenset((*ALWAYS, *named, *passes)),
        keep=options.keep,
        command=options.command,
    )


def gather(env: Mapping[str, str], job_name: str, script_text: tuple[str, str] | None, given: Path | None) -> Found:
    """Everything but what lies in the directory. `script_text`: name and text of --script; `given`: the directory if one was."""
    path = locate(env.get("PATH"))
    slurm = SlurmEnv.from_environ(env)
    ours = slurm.requeue_id if slurm is not None else ""
    name = job_name or ("" if script_text is not None else ours)
    if path is None and slurm is None and not job_name:
        found = None if script_text is None else script.parse(script_text[1], script_text[0])
        nowhere = _with_options(Setup("nowhere", script=found), env, given, name)
        return msgspec.structs.replace(nowhere, one_machine=True)
    scontrol = None if path is None else Scontrol(path, name or "0", env)
    setup = Setup("outside", scontrol=scontrol is not None, script=None)
    if scontrol is None:
        found = None if script_text is None else script.parse(script_text[1], script_text[0])
        return _with_options(msgspec.structs.replace(setup, script=found), env, given, name)
    setup, no_script = _asked(setup, scontrol, name, script_text, env)
    is_ours = slurm is not None and bool(name) and name == ours
    running = ask.sruns(str(slurm.job_id) if is_ours and slurm is not None else name) if name else []
    theirs = env if is_ours else ask.environ_of(running)
    setup = msgspec.structs.replace(
        setup,
        sruns=tuple(srun for _, srun in running),
        open_mode=theirs.get("SLURM_OPEN_MODE", ""),
        export_env=theirs.get("SLURM_EXPORT_ENV", ""),
        other_owner=ask.other_owner(theirs),
    )
    found_all = _with_options(setup, env, given, name)
    return msgspec.structs.replace(found_all, no_script=no_script, one_machine=_one_machine(scontrol, setup))


def _asked(
    setup: Setup, scontrol: Scontrol, name: str, script_text: tuple[str, str] | None, env: Mapping[str, str]
) -> tuple[Setup, str]:
    """With Slurm's answers; and why there is no script."""
    site = scontrol.config(ask.ASK_TIMEOUT_S)
    if site is None:
        answer = scontrol.ask(("ping",), ask.ASK_TIMEOUT_S)
        why = answer.reason if isinstance(answer, NoView) else "scontrol show config failed"
        parsed = None if script_text is None else script.parse(script_text[1], script_text[0])
        return msgspec.structs.replace(setup, silent=why, script=parsed), ""
    job, found, why = None, None, ""
    if name:
        answered = ask.job(scontrol, name)
        if isinstance(answered, NoView):
            setup = msgspec.structs.replace(setup, silent=f"job {name}: {answered.reason}")
        else:
            job = answered
    if script_text is not None:
        found = script.parse(script_text[1], script_text[0])
    elif job is not None and job.batch:
        written = ask.batch_script(scontrol, name)
        found, why = (None, written.reason) if isinstance(written, NoView) else (written, "")
    wanted = job.partition if job is not None else ""
    if not wanted and found is not None:
        wanted = found.sbatch.get("partition", "")
    partition = ask.partition(scontrol, wanted or env.get("SBATCH_PARTITION", ""))
    setup = msgspec.structs.replace(
        setup, site=site, job=job, script=found, partition=partition, tasks=_tasks(job, found), nodes=_nodes(job, found)
    )
    return setup, why


def _one_machine(scontrol: Scontrol, setup: Setup) -> bool | None:
    nodes = setup.job.node_list if setup.job is not None else ""
    return ask.one_machine(scontrol, nodes or (setup.partition.nodes if setup.partition is not None else ""))


def _nodes(job: JobFacts | None, found: Script | None) -> int | None:
    if job is not None and job.nodes is not None:
        return job.nodes
    return None if found is None else _most(found.sbatch.get("nodes", "1"))


def _most(text: str) -> int | None:
    """The larger one of `2-4`."""
    numbers = re.findall(r"\d{1,9}", text)
    return int(numbers[-1]) if numbers else None


def _tasks(job: JobFacts | None, found: Script | None) -> int | None:
    """Of the supervised step, as far as the script says it; Slurm's default is one for each node."""
    if found is None:
        return None
    nodes = _nodes(job, found)
    options = {**found.sbatch, **(found.supervised[0].options if found.supervised else {})}
    if "ntasks" in options:
        return _most(options["ntasks"])
    nodes = _most(options["nodes"]) if "nodes" in options else nodes
    each = _most(options.get("ntasks-per-node", "1"))
    return nodes * each if nodes is not None and each is not None else None


def _with_options(setup: Setup, env: Mapping[str, str], given: Path | None, job_name: str) -> Found:
    """The supervisor's options and directory, from the script's line where there is one."""
    found = setup.script
    lines: Sequence[Srun] = () if found is None else (*found.supervised, *found.bare)
    variables = {**env, **({} if found is None else _exported(found, env, job_name))}
    words = [shell.expanded(word, variables) for word in lines[0].supervise or ()] if lines else []
    command = lines[0].command if lines else ("true",)
    problems: tuple[str, ...] = ()
    wishes = Wishes()
    try:
        own = {name: value for name, value in variables.items() if name.startswith(config.ENV_PREFIX) and "$" not in value}
        own.pop("CKPT_SUPERVISE_DIR", None)
        wishes = wishes_of(config.read_options([*_without_directory(words), "--dir", "/tmp", "--", *command], own))  # noqa: S108
    except config.UsageError as error:
        problems = error.problems
    text = shell.expanded(lines[0].directory, variables) if lines and lines[0].directory else ""
    text = text or shell.expanded(variables.get("CKPT_SUPERVISE_DIR", ""), variables) or "checkpoints"
    kept, unresolved = _resolved(text)
    directory = given if given is not None else Path(kept).absolute()
    setup = msgspec.structs.replace(setup, wishes=wishes)
    return Found(setup, directory, "" if given is not None else unresolved, problems, job_name=job_name)


def _exported(found: Script, env: Mapping[str, str], job_name: str) -> dict[str, str]:
    """What the script assigns, as far as it is known beforehand."""
    known = {**env}
    if job_name.isdecimal():
        known["SLURM_JOB_ID"] = known["SLURM_JOBID"] = job_name
    for name, value in found.variables.items():
        known[name] = shell.expanded(value, known)
    return known


def _without_directory(words: Sequence[str]) -> list[str]:
    """What cannot be read beforehand is left out: values with a $ in them, and the directory, which is looked at elsewhere."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        has_value = "=" not in word and bool(rest) and not rest[0].startswith("-")
        pair = [word, rest.pop(0)] if word.startswith("--") and has_value else [word]
        if not word.startswith("--dir") and not any("$" in each for each in pair):
            kept += pair
    return kept


def _resolved(text: str) -> tuple[str, str]:
    """The part above what is only known at run time, and that."""
    if "$" not in text:
        return text, ""
    parts = text.split("/")
    first = next(number for number, part in enumerate(parts) if "$" in part)
    return "/".join(parts[:first]) or ("/" if text.startswith("/") else "."), "/".join(parts[first:])
