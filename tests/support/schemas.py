"""Holds what `ckptctl COMMAND --json` has printed to docs/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
from ckpt_supervisor.view.reading import moment

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def schema(command: str) -> dict[str, Any]:
    """The schema of a command's --json."""
    return dict(json.loads((SCHEMAS / f"ckptctl-{command}.json").read_text()))


def held(command: str, lines: Iterable[str]) -> list[dict[str, Any]]:
    """The values, one from each line, each as the schema says. Raises AssertionError with the place and the reason."""
    formats = jsonschema.FormatChecker(())
    formats.checks("date-time")(lambda value: not isinstance(value, str) or moment(value) is not None)
    check = jsonschema.Draft202012Validator(schema(command), format_checker=formats)
    values = [json.loads(line) for line in lines]
    for value in values:
        problems = [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in check.iter_errors(value)]
        assert problems == [], value
    return values
