"""What the real site gives: KillWait, GraceTime and the like, where there is a scontrol to ask.

Owns these few questions. Everything may be missing: then it is None, and the drill takes flags or usual values.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

import msgspec

from ckpt_supervisor.adapters.slurm import locate
from ckpt_supervisor.adapters.slurm_text import parse_config, parse_partition_grace

ASK_S = 20.0
TEXT_CHARS_MAX = 4_000_000


class Site(msgspec.Struct, frozen=True):
    """What was found out; None where it was not."""

    kill_wait_ms: int | None = None
    grace_ms: int | None = None
    partition: str = ""
    proctrack: str = ""
    requeue_exit: tuple[int, ...] | None = None


def ask(env: Mapping[str, str], partition: str) -> Site:
    """Ask Slurm here, if there is one, about its configuration and this partition ("": the default one)."""
    scontrol = locate(env.get("PATH"))
    if scontrol is None:
        return Site()
    config = _said((scontrol, "show", "config"), env)
    if config is None:
        return Site()
    known = parse_config(config)
    name, grace_ms = _grace(_said((scontrol, "show", "partition", "-o"), env) or "", partition)
    return Site(known.kill_wait_ms, grace_ms, name, known.proctrack, known.requeue_exit)


def _grace(text: str, partition: str) -> tuple[str, int | None]:
    """Name and GraceTime of the partition, or of the default one."""
    for line in text.splitlines():
        match = re.match(r"PartitionName=(\S+) ", line)
        if match and (match[1] == partition or (not partition and re.search(r" Default=YES ", line))):
            return match[1], parse_partition_grace(line)
    return partition, None


def _said(words: tuple[str, ...], env: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            words, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout[:TEXT_CHARS_MAX] if done.returncode == 0 else None
