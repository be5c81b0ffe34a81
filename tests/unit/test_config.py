"""Options of ckpt-supervise: three ways to say them, one order of precedence, every error at once."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckpt_supervisor import config
from ckpt_supervisor.config import Every, Lead, Options, Requeue, UsageError, read_options

COMMAND = ["--", "python", "train.py", "--lr", "3"]

FLAGS = ("allow-restart-from-scratch", "linger", "train-again")

# name, text, attribute of Options, its value: none of them the default
GIVEN: list[tuple[str, str, str, Any]] = [
    ("every-steps", "500", "every_steps", 500),
    ("every", "10m", "every", Every(auto=False, ms=600_000)),
    ("every", "auto", "every", Every(auto=True, ms=None)),
    ("mtbi", "2h", "mtbi_ms", 7_200_000),
    ("linger", "yes", "linger", True),
    ("resubmit", "sbatch job.sh", "resubmit", "sbatch job.sh"),
    ("max-timeouts", "5", "max_timeouts", 5),
    ("max-crashes", "2", "max_crashes", 2),
    ("max-stalled", "unlimited", "max_stalled", None),
    ("on-hang", "requeue", "on_hang", "requeue"),
    ("hang-floor", "off", "hang_floor_ms", None),
    ("memory-warn", "80%", "memory_warn", 80),
    ("on-event", "mail -s run me", "on_event", "mail -s run me"),
    ("on-event-for", "notice, exit", "on_event_for", ("notice", "exit")),
    ("metrics-file", "/m/{job}-{task}.prom", "metrics_file", "/m/{job}-{task}.prom"),
    ("metrics-port", "0", "metrics_port", 0),
    ("train-again", "yes", "train_again", True),
    ("keep", "7", "keep", 7),
    ("keep-every", "10000", "keep_every", 10_000),
    ("resume-arg", "--resume-from", "resume_arg", "--resume-from"),
    ("notice-signal", "USR2,SIGRTMIN+1", "notice_signals", (signal.SIGUSR2, signal.SIGRTMIN + 1)),
    ("save-signal", "rtmin+2", "save_signals", (signal.SIGRTMIN + 2,)),
    ("lead", "90s", "lead", Lead(auto=False, ms=90_000)),
    ("requeue", "exit:85", "requeue", Requeue("exit", 85)),
    ("verify", "structure", "verify", "structure"),
    ("verify", "readback", "verify", "readback"),
    ("restarts", "2", "restarts", 2),
    ("grace", "1.5m", "grace_ms", 90_000),
    ("kill-wait", "6", "kill_wait_ms", 6_000),
    ("save-timeout", "1h", "save_timeout_ms", 3_600_000),
    ("leave-timeout", "1500ms", "leave_timeout_ms", 1_500),
    ("notice-horizon", "1d", "notice_horizon_ms", 86_400_000),
    ("adopt", "step_*.pt, tracker.txt", "adopt", ("step_*.pt", "tracker.txt")),
    ("pass-signal", "SIGTERM", "pass_signal", signal.SIGTERM),
    ("interface", "ib0", "interface", "ib0"),
    ("join-timeout", "90s", "join_timeout_ms", 90_000),
    ("continues", "4711_3", "continues", "4711_3"),
    ("resume-tries", "0", "resume_tries", 0),
    ("allow-restart-from-scratch", "yes", "allow_restart_from_scratch", True),
]


def problems_of(argv: list[str], env: dict[str, str] | None = None) -> list[str]:
    """What is wrong with this command line."""
    with pytest.raises(UsageError) as caught:
        read_options(argv, env or {})
    return list(caught.value.problems)


def variable(name: str) -> str:
    """The environment variable of an option."""
    return "CKPT_SUPERVISE_" + name.upper().replace("-", "_")


def flags_of(name: str, text: str) -> list[str]:
    """The option as a flag."""
    return [f"--{name}"] if name in FLAGS else [f"--{name}={text}"]


def config_file(directory: Path, text: str) -> list[str]:
    """Flags that name a TOML file with this text."""
    path = directory / "options.toml"
    path.write_text(text)
    return ["--config", str(path)]


def test_without_any_option_the_documented_defaults_hold() -> None:
    """A bare `ckpt-supervise -- COMMAND` gets the defaults of the help text, and the command word for word."""
    options = read_options(COMMAND, {"PATH": "/bin", "SLURM_JOB_ID": "1"})
    assert options == Options(
        dir=Path("checkpoints").absolute(),
        every_steps=0,
        every=Every(auto=False, ms=None),
        mtbi_ms=21_600_000,
        keep=3,
        keep_every=0,
        resume_arg="",
        notice_signals=(signal.SIGUSR1,),
        save_signals=(signal.SIGUSR2,),
        lead=Lead(auto=True, ms=30_000),
        linger=False,
        requeue=Requeue("auto"),
        resubmit="",
        max_timeouts=None,
        max_crashes=0,
        max_stalled=10,
        on_hang="warn",
        hang_floor_ms=300_000,
        memory_warn=90,
        on_event="",
        on_event_for=(),
        metrics_file="",
        metrics_port=None,
        train_again=False,
        verify="full",
        restarts=0,
        grace_ms=30_000,
        kill_wait_ms=None,
        save_timeout_ms=900_000,
        leave_timeout_ms=None,
        notice_horizon_ms=600_000,
        allow_restart_from_scratch=False,
        adopt=(),
        pass_signal=None,
        continues="",
        resume_tries=3,
        interface="",
        join_timeout_ms=300_000,
        command=("python", "train.py", "--lr", "3"),
    )


@pytest.mark.parametrize("text", [",", "[", "step_[0].pt", "a.pt", "../step_*.pt", "*/x_*.pt", "x/"])
def test_patterns_that_mean_nothing_are_refused(text: str) -> None:
    """One line that says so."""
    (line,) = problems_of(["--adopt", text, *COMMAND])
    assert line.startswith("--adopt: ")


def test_the_table_of_this_test_covers_every_option() -> None:
    """No option is added without a test of its three ways."""
    assert {"dir", *(name for name, *_ in GIVEN)} == {spec.name for spec in config.SPECS}
    assert {"dir", "command", *(attribute for _, _, attribute, _ in GIVEN)} == {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize(("name", "text", "attribute", "value"), GIVEN)
def test_every_option_can_be_said_in_three_ways(tmp_path: Path, name: str, text: str, attribute: str, value: Any) -> None:
    """A flag, a variable and a key of the file mean the same."""
    toml = config_file(tmp_path, f'{name} = "{text}"\n')
    # USR2 would mean two things; a signal is handed on to who writes something.
    more = {"notice-signal": "--save-signal=WINCH", "pass-signal": "--adopt=*.pt", "on-event-for": "--on-event=true"}
    extra = [more[name]] if name in more else []
    assert getattr(read_options([*flags_of(name, text), *extra, *COMMAND], {}), attribute) == value
    assert getattr(read_options([*extra, *COMMAND], {variable(name): text}), attribute) == value
    assert getattr(read_options([*toml, *extra, *COMMAND], {}), attribute) == value
    assert getattr(read_options([*extra, *COMMAND], {"CKPT_SUPERVISE_CONFIG": toml[1]}), attribute) == value


def test_the_directory_can_be_said_in_three_ways_and_is_made_absolute(tmp_path: Path) -> None:
    """A flag, a variable and a key of the file name the directory; what the supervisor uses does not depend on where it is."""
    assert read_options(["--dir", str(tmp_path), *COMMAND], {}).dir == tmp_path
    assert read_options(COMMAND, {"CKPT_SUPERVISE_DIR": str(tmp_path)}).dir == tmp_path
    assert read_options([*config_file(tmp_path, f"dir = '{tmp_path}'"), *COMMAND], {}).dir == tmp_path
    assert read_options(["--dir=some/where", *COMMAND], {}).dir == Path.cwd() / "some" / "where"


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    """The nearer to the command line, the stronger; the last of two equal flags counts."""
    toml = config_file(tmp_path, "keep = 4\nevery-steps = 40\nrestarts = 40\n")
    env = {"CKPT_SUPERVISE_KEEP": "5", "CKPT_SUPERVISE_EVERY_STEPS": "50"}
    options = read_options([*toml, "--keep", "6", *COMMAND], env)
    assert (options.keep, options.every_steps, options.restarts) == (6, 50, 40)
    assert read_options(["--keep=8", "--keep", "9", *COMMAND], env).keep == 9


def test_the_file_takes_numbers_texts_and_truth_values(tmp_path: Path) -> None:
    """TOML's own types do, with - or _ in the keys."""
    text = 'keep = 5\nevery = "90s"\ngrace = 7.5\nevery_steps = 3\nallow-restart-from-scratch = true\n'
    options = read_options([*config_file(tmp_path, text), *COMMAND], {})
    assert (options.keep, options.every_ms, options.grace_ms, options.every_steps) == (5, 90_000, 7_500, 3)
    assert options.allow_restart_from_scratch
    off = config_file(tmp_path, "allow-restart-from-scratch = false\n")
    assert not read_options([*off, *COMMAND], {}).allow_restart_from_scratch


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    """Flags, variables, file, directory and a missing command: each gets its line, none hides another."""
    (tmp_path / "file").write_text("")
    toml = config_file(tmp_path, 'kepp = 3\ngrace = [1, 2]\nlead = "soon"\n')
    argv = ["--bogus", "stray", "--keep", "0", "--every-steps=x", *toml, "--dir", str(tmp_path / "file"), "--verify"]
    env = {
        "CKPT_SUPERVISE_EVRY": "5", "CKPT_SUPERVISE_REQUEUE": "exit:0", "CKPT_SUPERVISE_NOTICE_SIGNAL": "KILL,USR9",
        "CKPT_SUPERVISE_SAVE_TIMEOUT": "0s",
    }  # fmt: skip
    problems = problems_of(argv, env)
    for part in (
        "unknown option '--bogus'", "unknown word before -- 'stray'", "--keep: 0 is less than 1", "--every-steps: 'x'",
        "there is no option 'kepp'", "grace has to be a text or a number", "lead: 'soon'", "is not a directory",
        "--verify: needs a value", "CKPT_SUPERVISE_EVRY: there is no such option", "CKPT_SUPERVISE_REQUEUE: 'exit:0'",
        "CKPT_SUPERVISE_NOTICE_SIGNAL: KILL", "CKPT_SUPERVISE_SAVE_TIMEOUT: '0s'", "no command: write --",
    ):  # fmt: skip
        assert [part in problem for problem in problems].count(True) == 1, (part, problems)
    assert len(problems) == 14


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "no command: write -- and the command after the options"),
        (["python", "train.py"], "unknown word before -- 'python'"),
        (["--"], "nothing after --"),
        (["--", ""], "nothing after --"),
        (["--keep", "0", *COMMAND], "--keep: 0 is less than 1: at least one checkpoint is always kept"),
        (["--keep", "-1", *COMMAND], "--keep: -1 is less than 1"),
        (["--restarts=-2", *COMMAND], "--restarts: -2 is less than 0"),
        (["--keep=3.5", *COMMAND], "--keep: '3.5' is not a whole number"),
        (["--kee", "3", *COMMAND], "unknown option '--kee'"),
        (["--every", "0", *COMMAND], "--every: '0' is not more than zero"),
        (["--every", "often", *COMMAND], "--every: 'often' is not a time"),
        (["--kill-wait", "off", *COMMAND], "--kill-wait: 'off' is not a time"),
        (["--every", "ten", *COMMAND], "'ten' is not a time such as 90s, 10m or 1.5h"),
        (["--grace", "9" * 400, *COMMAND], "is longer than a year"),
        (["--verify", "quick", *COMMAND], "--verify: 'quick' is none of full, structure, readback"),
        (["--requeue", "exit:256", *COMMAND], "exit:N (N from 1 to 255)"),
        (["--requeue", "always", *COMMAND], "'always' is none of auto, never, exit:N"),
        (["--resume-arg", "--resume-from", *COMMAND], "is written --resume-arg=--resume-from"),
        (["--dir", *COMMAND], "--dir: needs a value"),
        (["--dir=", *COMMAND], "--dir: is empty"),
        (["--notice-signal", "FOO", *COMMAND], "'FOO' is not a signal"),
        (["--notice-signal", "RTMIN+99", *COMMAND], "'RTMIN+99' is not a signal"),
        (["--notice-signal", "CLD", *COMMAND], "CLD cannot be used as a notice"),
        (["--notice-signal", "STOP", *COMMAND], "STOP cannot be used as a notice"),
        (["--save-signal", "TERM", *COMMAND], "SIGTERM always means: save and leave"),
        (["--save-signal", "USR1", *COMMAND], "--notice-signal and --save-signal both name SIGUSR1"),
        (["--allow-restart-from-scratch=perhaps", *COMMAND], "'perhaps' is neither yes nor no"),
        (["--config", "/nowhere/options.toml", *COMMAND], "--config /nowhere/options.toml: "),
        (["--metrics-file", "run.txt", *COMMAND], "--metrics-file: 'run.txt' has to end with .prom"),
        (["--metrics-file", "{node}.prom", *COMMAND], "--metrics-file: {node} is none of {job}, {task}, {attempt}"),
        (["--metrics-file", "m/.prom", *COMMAND], "--metrics-file: 'm/.prom' has no name before .prom"),
        (["--metrics-port", "65536", *COMMAND], "--metrics-port: 65536 is no port"),
        (["--metrics-port", "any", *COMMAND], "--metrics-port: 'any' is not a whole number"),
        (["--on-event=x", "--on-event-for", "exit, notise", *COMMAND], "'notise' is no event of the journal; did you mean notic"),
        (["--on-event-for", "exit", *COMMAND], "--on-event-for: say with --on-event what is to be told"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_wrong(argv: list[str], part: str) -> None:
    """One slip, one line that says where it is and how it is written right."""
    problems = problems_of(argv)
    assert [part in problem for problem in problems].count(True) == 1, problems


def test_tasks_of_one_step_do_not_write_over_each_others_metrics() -> None:
    """Each needs a file of its own: by its number in the name, or in a directory. A batch script's environment is no task's."""
    several = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    (line,) = problems_of(["--metrics-file", "run-{job}.prom", *COMMAND], several)
    assert line.startswith("--metrics-file run-{job}.prom: the tasks of this step would write over each other: put {task} into")
    for path, env in (("a-{task}.prom", several), ("d/", several), ("a.prom", {"SLURM_NTASKS": "4"}), ("a.prom", {})):
        found = read_options(["--metrics-file", path, *COMMAND], env).metrics_file
        assert found == str(Path.cwd() / path) + ("/" if path.endswith("/") else "")


def test_variables_that_the_supervisor_sets_for_its_command_are_no_options() -> None:
    """A supervisor below another one meets them in its environment; every other unknown one is an error."""
    env = {f"CKPT_SUPERVISE_{name}": "1" for name in ("SOCKET", "RESUME_FROM", "PID", "RESTART", "STATE", "TAG", "MPI")}
    assert read_options(COMMAND, env).keep == 3
    assert problems_of(COMMAND, {**env, "CKPT_SUPERVISE_SOKET": "1"}) == ["CKPT_SUPERVISE_SOKET: there is no such option"]


def test_only_the_first_double_dash_divides() -> None:
    """The command's own options, a second -- and --help among them, are the command's."""
    command = ["sh", "-c", "x", "--", "--keep", "0", "--help"]
    assert read_options(["--keep", "2", "--", *command], {}).command == tuple(command)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("90", 90_000), ("90s", 90_000), ("200ms", 200), ("1.5h", 5_400_000), (" 10 m ", 600_000), ("1d", 86_400_000), ("0", 0)],
)
def test_times_are_read_with_their_unit(text: str, ms: int) -> None:
    """A bare number means seconds."""
    assert config.as_.duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "s", "1e3", "-5s", "5 weeks", "1:30", "5s5s", "367d", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match=r"not a time|longer than a year"):
        config.as_.duration_ms(text)


def test_lead_and_periodic_saves_can_be_switched_off() -> None:
    """`off` is a value of its own, not zero."""
    options = read_options(["--lead", "off", "--every", "off", "--notice-signal=", *COMMAND], {})
    assert (options.lead, options.every_ms, options.notice_signals) == (Lead(auto=False, ms=None), None, ())
    assert read_options(["--lead", "auto", *COMMAND], {}).lead == Lead(auto=True, ms=30_000)
    assert read_options(["--lead", "0", *COMMAND], {}).lead == Lead(auto=False, ms=0)


def test_a_directory_that_cannot_be_used_is_refused_untouched(tmp_path: Path) -> None:
    """A file in the way, a path below a file, a dangling link in the middle, a name too long: told, and nothing is made."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, part in (
        ("file", "is not a directory"),
        ("file/below", "is not a writable directory"),
        ("dangling", "is not a directory"),
        ("dangling/below", "is not a writable directory"),
        ("x" * 300, "File name too long"),
    ):
        (problem,) = problems_of(["--dir", str(tmp_path / name), *COMMAND])
        assert part in problem, problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_directory_that_is_missing_or_linked_is_fine_and_not_made_yet(tmp_path: Path) -> None:
    """Parents are made at the start, not while options are read."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_options(["--dir", str(tmp_path / "link"), *COMMAND], {}).dir == tmp_path / "link"
    read_options(["--dir", str(tmp_path / "a" / "b" / "c"), *COMMAND], {})
    assert not (tmp_path / "a").exists()


READ_ONLY_MOUNT = 'mount -t tmpfs -o size=64k tmpfs "$1" && mount -o remount,ro "$1" && shift && exec "$@"'


def test_a_directory_on_a_file_system_that_takes_no_writing_is_refused(tmp_path: Path) -> None:
    """Root may write anywhere but there (its own mount), others are stopped by a mode: both are told, with exit 2."""
    place = tmp_path / "read-only"
    place.mkdir()
    argv = [sys.executable, "-m", "ckpt_supervisor.cli", "--dir", str(place), "--", "touch", str(tmp_path / "started")]
    if os.geteuid() == 0:
        argv = ["unshare", "--mount", "sh", "-c", READ_ONLY_MOUNT, "sh", str(place), *argv]
    else:
        place.chmod(0o500)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, f"ckpt-supervise: --dir {place}: is not writable\n")
    assert not (tmp_path / "started").exists()


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(("name", "env"), [(b"e\xff", {}), ("é".encode(), ASCII)])
def test_a_directory_whose_name_is_no_utf8_is_refused_before_the_start(tmp_path: Path, name: bytes, env: dict[str, str]) -> None:
    """The journal and the protocol are UTF-8: the run would go on unsaved. One line, and no traceback."""
    argv = [sys.executable, "-m", "ckpt_supervisor.cli", "--dir", os.fsencode(tmp_path) + b"/" + name, "--", "echo", "started"]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False, env={**os.environ, **env})
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert "UTF-8" in line
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_exits_2_with_every_error_and_touches_nothing(tmp_path: Path) -> None:
    """The whole program: all lines on stderr, nothing on stdout, no directory made, no command run."""
    argv = ["--keep", "0", "--bogus", "--dir", str(tmp_path / "new"), "--", "touch", str(tmp_path / "started")]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_supervisor.cli", *argv],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "CKPT_SUPERVISE_EVRY": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("ckpt-supervise: ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_option_and_wins_over_errors() -> None:
    """--help before -- prints the options and the exit statuses, whatever else is wrong; after -- it is the command's."""
    argv = [sys.executable, "-m", "ckpt_supervisor.cli", "--bogus", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for spec in config.SPECS:
        assert f"--{spec.name}" in done.stdout
    assert "exit status: 0 training ended; 75 interrupted" in done.stdout


def test_a_current_directory_that_is_gone_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative --dir leads nowhere then."""
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    with pytest.raises(UsageError) as caught:
        read_options(["--", "x"], {})
    assert "has been deleted" in str(caught.value.problems)
