"""Names of directories in the store (docs/store.md). Pure text: the machine names a round's directory, the store reads it."""

from __future__ import annotations


def step_name(step: int) -> str:
    """Name of a committed checkpoint's directory: at least nine digits, more when they are needed."""
    return f"step-{step:09d}"


def partial_name(step: int, epoch: int, number: int) -> str:
    """Name of the directory that one round of one epoch writes into; never used twice."""
    return f".partial-{step_name(step)}-{epoch}-{number}"
