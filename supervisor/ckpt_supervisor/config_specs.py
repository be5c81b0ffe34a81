"""The table of options: how each is written, what it means, its default, and how its text is read.

Pure data. Owns nothing else: config.py reads command line, environment and file by it, and the README's table is held to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ckpt_supervisor import config_text as as_


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One option: how it is written, what it means, and how its text is read."""

    name: str
    metavar: str
    default: str
    read: Callable[[str], Any]
    help: str
    is_flag: bool = False


SPECS: tuple[Spec, ...] = (
    Spec("dir", "DIR", "checkpoints", as_.path, "directory of the checkpoints, shared by all nodes"),
    Spec("every-steps", "N", "0", as_.count(0), "save whenever the number of finished steps is a multiple of N (0: off)"),
    Spec("every", "TIME", "off", as_.every, "save this often, e.g. 10m (off: never; auto: by what a save costs, see --mtbi)"),
    Spec("mtbi", "TIME", "6h", as_.positive_ms, "mean time between interruptions that --every auto begins with"),
    Spec("keep", "N", "3", as_.keep, "checkpoints to keep; the newest intact one always stays"),
    Spec("keep-every", "STEPS", "0", as_.count(0), "never remove checkpoints of steps that are a multiple of this (0: off)"),
    Spec("resume-arg", "ARG", "", as_.any_text, "append ARG and the checkpoint's path to the command when there is one"),
    Spec("notice-signal", "NAMES", "USR1", as_.signals, "signals that mean: save and leave (TERM and INT always do)"),
    Spec("save-signal", "NAMES", "USR2", as_.save_signals, "signals that mean: save and go on"),
    Spec("lead", "TIME", "auto", as_.lead, "begin the last save this long before the job's end: auto, 90s, off"),
    Spec("linger", "", "no", as_.yes_no, "train on after the save at an early notice of the time limit", is_flag=True),
    Spec("requeue", "HOW", "auto", as_.requeue, "auto: scontrol requeue; never; exit:N: leave with N (RequeueExit)"),
    Spec(
        "verify",
        "HOW",
        "full",
        as_.verify,
        "check before a commit: full (every byte), structure (sizes and headers), or readback (every byte, from the disk)",
    ),
    Spec("resubmit", "CMD", "", as_.any_text, "shell command that brings the job back where Slurm refuses to requeue it"),
    Spec("max-timeouts", "N", "unlimited", as_.limit, "so many requeues of this job because of its time limit"),
    Spec("max-crashes", "N", "0", as_.count(0), "so many requeues of this job because training failed by itself"),
    Spec("max-stalled", "N", "10", as_.limit, "so many attempts in a row that committed nothing new, then no further requeue"),
    Spec("on-hang", "HOW", "warn", as_.on_hang, "when training stands still: warn; restart: in place; requeue"),
    Spec(
        "hang-floor",
        "TIME",
        "5m",
        as_.optional(as_.positive_ms, "off"),
        "shortest time without a step that is a hang (off: no look)",
    ),
    Spec("memory-warn", "PERCENT", "90", as_.percent, "warn when so much of the memory limit is used (off: never)"),
    Spec("on-event", "CMD", "", as_.any_text, "shell command that is told what happens: the journal's line on its stdin"),
    Spec("on-event-for", "EVENTS", "", as_.events, "events that --on-event is told of, apart by commas (default: what matters)"),
    Spec("metrics-file", "PATH", "", as_.metrics_file, "write numbers for Prometheus (textfile collector): {job}, {task}.prom"),
    Spec("metrics-port", "PORT", "off", as_.port, "answer Prometheus at this port of 127.0.0.1 (0: any free one; off)"),
    Spec("restarts", "N", "0", as_.count(0), "start the command again in place this often when it fails by itself"),
    Spec("grace", "TIME", "30s", as_.positive_ms, "without Slurm: time from the signal to the kill"),
    Spec("kill-wait", "TIME", "auto", as_.optional(as_.positive_ms, "auto"), "Slurm's KillWait if it cannot be asked (else 30s)"),
    Spec("save-timeout", "TIME", "15m", as_.positive_ms, "give up a save that holds training longer than this"),
    Spec("leave-timeout", "TIME", "auto", as_.optional(as_.positive_ms, "auto"), "time for training to end after the commit"),
    Spec("notice-horizon", "TIME", "10m", as_.positive_ms, "a notice signal this far before the job's end saves, and goes on"),
    Spec("adopt", "PATTERNS", "", as_.patterns, "the command saves by itself: what it writes, e.g. 'step_*.pt' (in DIR)"),
    Spec("pass-signal", "NAME", "", as_.pass_signal, "the command saves at this signal: hand it on, adopt what it writes"),
    Spec("interface", "NAME", "", as_.any_text, "network interface, or address, where task 0 listens for the other tasks"),
    Spec("join-timeout", "TIME", "5m", as_.positive_ms, "how long the other tasks look for task 0's supervisor"),
    Spec("continues", "JOB", "", as_.any_text, "this job takes the directory over from that one, even if that is still alive"),
    Spec("resume-tries", "N", "3", as_.count(0), "failures right after resuming until the one before is tried (0: never)"),
    Spec("train-again", "", "no", as_.yes_no, "start although this job's training had come to its end", is_flag=True),
    Spec(
        "allow-restart-from-scratch",
        "",
        "no",
        as_.yes_no,
        "start from scratch although there are checkpoints and all of them are damaged",
        is_flag=True,
    ),
)
