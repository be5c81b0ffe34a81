"""Options of ckpt-supervise: defaults, then a TOML file, then CKPT_SUPERVISE_* variables, then flags.

Owns what may be said and what is wrong with it. Pure but for reading the TOML file it is given: the environment is an argument.
Collects every error before it gives up, so that a user mends them all at once; an unknown key is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import re
import stat
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ckpt_supervisor import config_text as as_
from ckpt_supervisor.config_specs import SPECS
from ckpt_supervisor.config_text import Every, Lead, Requeue

ENV_PREFIX = "CKPT_SUPERVISE_"

INHERITED = frozenset(
    {"SOCKET", "RESUME_FROM", "PID", "PIDNS", "RESTART", "SHIELD", "MPI", "STATE", "TAG", "JOB", "REASON", "EVENT"}
)
"""Variables that ckpt-supervise sets for its commands, or that are not options; a supervisor below another one meets them, and
one in a job that --resubmit or --on-event has submitted."""

CONFIG_BYTES_MAX = 1_000_000

DIR_PAUSES_MS = (50, 250)
"""Pauses between the looks at a directory that did not answer, as the store has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What the user wants. Times in ms."""

    dir: Path
    every_steps: int
    every: Every
    mtbi_ms: int
    keep: int
    keep_every: int
    resume_arg: str
    notice_signals: tuple[int, ...]
    save_signals: tuple[int, ...]
    lead: Lead
    linger: bool
    requeue: Requeue
    resubmit: str
    max_timeouts: int | None
    max_crashes: int
    max_stalled: int | None
    on_hang: Literal["warn", "restart", "requeue"]
    hang_floor_ms: int | None
    memory_warn: int | None
    on_event: str
    on_event_for: tuple[str, ...]
    metrics_file: str
    """Absolute, with its {job}, {task}, {attempt}; "" for none, a slash at its end for a directory."""
    metrics_port: int | None
    train_again: bool
    verify: Literal["full", "structure", "readback"]
    restarts: int
    grace_ms: int
    kill_wait_ms: int | None
    save_timeout_ms: int
    leave_timeout_ms: int | None
    notice_horizon_ms: int
    allow_restart_from_scratch: bool
    continues: str
    resume_tries: int
    adopt: tuple[str, ...]
    pass_signal: int | None
    interface: str
    join_timeout_ms: int
    command: tuple[str, ...] = ()

    @property
    def every_ms(self) -> int | None:
        """The interval that was given; None without one, and with --every auto."""
        return self.every.ms

    @property
    def verify_mode(self) -> Literal["full", "structure"]:
        """How much is read, wherever it comes from."""
        return "structure" if self.verify == "structure" else "full"


class UsageError(Exception):
    """What is wrong with the command line, all of it; one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


EPILOG = """\
examples:
  srun ckpt-supervise -- python train.py
  srun ckpt-supervise --dir $SCRATCH/run7 --every-steps 500 --keep 3 --resume-arg=--resume-from -- python train.py
  ckpt-supervise --dir /tmp/try -- python train.py          # without Slurm: press ctrl-C, start it again

Every option may also be given as CKPT_SUPERVISE_NAME (CKPT_SUPERVISE_EVERY_STEPS=500) or as a key in a TOML file that
--config names (every-steps = 500); flags win over variables, variables over the file.

exit status: 0 training ended; 75 interrupted, checkpoint committed; 76 interrupted, an older one or none stands;
143 cancelled; 2 wrong usage; 126, 127 the command cannot be run; otherwise the command's own.
"""


def parser() -> argparse.ArgumentParser:
    """The command line as --help shows it."""
    made = argparse.ArgumentParser(
        prog="ckpt-supervise",
        usage="ckpt-supervise [options] -- COMMAND...",
        description="Run a training command so that it survives preemption, time limits and node failures.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="TOML file with options")
    made.add_argument("--version", action="store_true", help="print the version and exit")
    for spec in SPECS:
        note = "" if spec.is_flag or not spec.default else f" (default: {spec.default})"
        if spec.is_flag:
            made.add_argument(f"--{spec.name}", action="store_const", const="yes", help=spec.help)
        else:
            made.add_argument(f"--{spec.name}", metavar=spec.metavar, help=spec.help + note)
    return made


def read_options(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Options from flags, environment and file. Raises UsageError with everything that is wrong."""
    problems: list[str] = []
    own, command = _split(argv, problems)
    flags = _flags(own, problems)
    texts: dict[str, tuple[str, str]] = {}
    config = flags.pop("config", None) or env.get(f"{ENV_PREFIX}CONFIG")
    if config:
        texts.update(_from_file(config, problems))
    texts.update(_from_env(env, problems))
    texts.update({name: (text, f"--{name}") for name, text in flags.items()})
    values: dict[str, Any] = {}
    for spec in SPECS:
        text, source = texts.get(spec.name, (spec.default, "default"))
        try:
            values[spec.name] = spec.read(text)
        except ValueError as error:
            problems.append(f"{source}: {error}")
    if "dir" in values:
        problems += _dir_problems(values["dir"])
    clash = set(values.get("notice-signal", ())) & set(values.get("save-signal", ()))
    if clash:
        names = ", ".join(as_.signal_name(number) for number in sorted(clash))
        problems.append(f"--notice-signal and --save-signal both name {names}: give each a signal of its own")
    file = values.get("metrics-file", "")
    if file.endswith(".prom") and "{task}" not in file and _is_one_of_several(env):
        problems.append(f"--metrics-file {file}: the tasks of this step would write over each other: put {{task}} into its name")
    if values.get("on-event-for") and not values.get("on-event", "-"):
        problems.append("--on-event-for: say with --on-event what is to be told")
    if values.get("pass-signal") is not None and not values.get("adopt", True):
        problems.append("--pass-signal: say with --adopt which files the command writes, as in --adopt 'step_*.pt'")
    if values.get("pass-signal") in values.get("save-signal", ()):
        problems.append("--pass-signal and --save-signal name the same signal: give each one of its own")
    if problems:
        raise UsageError(problems)
    return _made(values, command)


def _made(values: Mapping[str, Any], command: Sequence[str]) -> Options:
    return Options(
        dir=values["dir"].absolute(),
        every_steps=values["every-steps"],
        every=values["every"],
        mtbi_ms=values["mtbi"],
        keep=values["keep"],
        keep_every=values["keep-every"],
        resume_arg=values["resume-arg"],
        notice_signals=values["notice-signal"],
        save_signals=values["save-signal"],
        lead=values["lead"],
        linger=values["linger"],
        requeue=values["requeue"],
        resubmit=values["resubmit"],
        max_timeouts=values["max-timeouts"],
        max_crashes=values["max-crashes"],
        max_stalled=values["max-stalled"],
        on_hang=values["on-hang"],
        hang_floor_ms=values["hang-floor"],
        memory_warn=values["memory-warn"],
        on_event=values["on-event"],
        on_event_for=values["on-event-for"],
        metrics_file=_absolute(values["metrics-file"]),
        metrics_port=values["metrics-port"],
        train_again=values["train-again"],
        verify=values["verify"],
        restarts=values["restarts"],
        grace_ms=values["grace"],
        kill_wait_ms=values["kill-wait"],
        save_timeout_ms=values["save-timeout"],
        leave_timeout_ms=values["leave-timeout"],
        notice_horizon_ms=values["notice-horizon"],
        allow_restart_from_scratch=values["allow-restart-from-scratch"],
        continues=values["continues"],
        resume_tries=values["resume-tries"],
        adopt=values["adopt"],
        pass_signal=values["pass-signal"],
        interface=values["interface"],
        join_timeout_ms=values["join-timeout"],
        command=tuple(command),
    )


def _absolute(path: str) -> str:
    """The same file from everywhere, with the slash that marks a directory; "" stays what it is."""
    try:
        return path and str(Path(path).absolute()) + ("/" if path.endswith("/") else "")
    except FileNotFoundError:  # The current directory is gone. It is told when the file cannot be written.
        return path


def _is_one_of_several(env: Mapping[str, str]) -> bool:
    """Whether srun has started more tasks than this one; adapters/slurm.py, which knows for certain, is not imported for that."""
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
    return "SLURM_STEP_ID" in env and tasks.isdecimal() and int(tasks) > 1


def _split(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        problems.append("no command: write -- and the command after the options, as in: ckpt-supervise -- python train.py")
        return words, []
    place = words.index("--")
    own, command = words[:place], words[place + 1 :]
    if not command or not command[0]:
        problems.append("nothing after --: write the command there, as in: ckpt-supervise -- python train.py")
    return own, command


def _flags(own: list[str], problems: list[str]) -> dict[str, str]:
    """The flags, read by hand: argparse gives up at the first error and hides the others. It stays for --help."""
    specs = {f"--{spec.name}": spec.is_flag for spec in SPECS} | {"--config": False}
    found: dict[str, str] = {}
    words = list(own)
    while words:
        name, equals, text = words.pop(0).partition("=")
        if name not in specs:
            kind = "option" if name.startswith("-") else "word before --"
            meant = _meant(name, specs)
            hint = f"did you mean {meant}?" if meant else "see ckpt-supervise --help"
            problems.append(f"unknown {kind} {name + equals + text!r}: {hint}")
            if meant and not specs[meant] and not equals and words and not words[0].startswith("-"):
                words.pop(0)  # Its value: one mistake is one line.
        elif specs[name]:
            found[name[2:]] = text if equals else "yes"
        elif equals:
            found[name[2:]] = text
        elif words and not re.match(r"-\D", words[0]):
            found[name[2:]] = words.pop(0)
        else:
            hint = f"; a value that begins with - is written {name}={words[0]}" if words else ""
            problems.append(f"{name}: needs a value{hint}")
    return found


def _meant(name: str, known: Iterable[str]) -> str:
    """The option that comes closest, "" if none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)), "")


def _from_env(env: Mapping[str, str], problems: list[str]) -> dict[str, tuple[str, str]]:
    names = {spec.name for spec in SPECS}
    found = {}
    for key in sorted(env):
        if not key.startswith(ENV_PREFIX) or key.removeprefix(ENV_PREFIX) in INHERITED | {"CONFIG"}:
            continue
        name = key.removeprefix(ENV_PREFIX).lower().replace("_", "-")
        if name in names:
            found[name] = (env[key], key)
        else:
            problems.append(f"{key}: there is no such option")
    return found


def _from_file(path: str, problems: list[str]) -> dict[str, tuple[str, str]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with Path(path).open("rb") as file:
            data = tomllib.loads(file.read(CONFIG_BYTES_MAX).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problems.append(f"--config {path}: {error}")
        return {}
    names = {spec.name for spec in SPECS}
    found = {}
    for key, value in data.items():
        name = key.replace("_", "-")
        if name not in names:
            problems.append(f"{path}: there is no option {key!r}")
        elif isinstance(value, bool):
            found[name] = ("yes" if value else "no", f"{path}: {key}")
        elif isinstance(value, str | int | float):
            found[name] = (str(value), f"{path}: {key}")
        else:
            problems.append(f"{path}: {key} has to be a text or a number")
    return found


def _dir_problems(directory: Path) -> list[str]:
    """Whether the directory can be used, without touching anything."""
    try:
        os.fsencode(directory)
        str(directory.absolute()).encode()  # The journal and the protocol name it, and both are UTF-8.
    except FileNotFoundError:
        return [f"--dir {directory}: the current directory has been deleted; give an absolute path, or start from another one"]
    except UnicodeEncodeError:
        shown = str(directory).encode(errors="backslashreplace").decode()
        return [f"--dir {shown}: its name is not valid UTF-8 in this locale; give it another name, or set LC_ALL=C.UTF-8"]
    nobody_sets_this = threading.Event()
    for pause_ms in DIR_PAUSES_MS:  # One ESTALE of a network file system must not end the job (field case 111).
        try:
            return _unusable(directory)
        except OSError:
            nobody_sets_this.wait(pause_ms / 1000)
    try:
        return _unusable(directory)
    except OSError as error:
        return [f"--dir {directory}: {error.strerror or error}"]


def _unusable(directory: Path) -> list[str]:
    """What is wrong for certain. Raises OSError for what another look may answer otherwise, access(2)'s "no" among it."""
    place = directory.absolute()
    mode = _mode_of(place)
    if mode is not None:
        if not stat.S_ISDIR(mode):
            return [f"--dir {directory}: is not a directory"]
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "is not writable")
        return []
    while mode is None and place != place.parent:
        place = place.parent
        mode = _mode_of(place)
    if mode is None or not stat.S_ISDIR(mode):
        return [f"--dir {directory}: does not exist and cannot be made, since {place} is not a writable directory"]
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"does not exist and cannot be made, since {place} is not a writable directory")
    return []


def _mode_of(place: Path) -> int | None:
    """What it is, or what its link leads to: 0 for a link that leads nowhere, None if nothing is there. Raises OSError."""
    try:
        return place.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
    return 0 if place.is_symlink() else None
