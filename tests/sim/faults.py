"""What a planted fault is: small changes to the code, and circumstances in which they show."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.sim.code import Change, Code, planted


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: what is wrong, and where."""

    name: str
    changes: tuple[Change, ...] = ()
    hook_faults: frozenset[str] = frozenset()
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Circumstances in which it shows more often than in one run of a thousand."""

    def code(self) -> Code:
        """The code with this fault."""
        return planted(self.name, self.changes, self.hook_faults)


def fault(name: str, *changes: tuple[str, str, str], hook: str = "", **where: Any) -> Fault:
    """A fault from (module, old text, new text) triples."""
    where.setdefault("tasks", 1)
    return Fault(name, tuple(Change(*change) for change in changes), frozenset({hook} if hook else ()), where)
