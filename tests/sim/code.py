"""Which code is simulated: the real one, or the real one with one fault planted in its text.

A planted fault is a replacement in a module's source. All modules of the core are then built again under names of their own, so
that the real modules stay as they are and several faults can live side by side.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from pathlib import Path

CORE = "ckpt_supervisor.core"
PROTOCOL = "ckpt_client.protocol"

MODULES = (
    "names",
    "views",
    "history",
    "policy",
    "budget",
    "table",
    "hangs",
    "between",
    "events",
    "commands",
    "state",
    "interval",
    "forecast",
    "ranks",
    "rounds",
    "notices",
    "comeback",
    "parting",
    "leaving",
    "adopting",
    "masked",
    "tasks",
    "crashes",
    "wishes",
    "turns",
    "checking",
    "losses",
    "answers",
    "machine",
    "relay",
)
"""The modules of the core, in the order in which they can be built."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One replacement in the text of one module; the old text must be there exactly once."""

    module: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """The modules that the simulator runs, and the faults of the hook, whose fast path the simulator plays itself."""

    core: types.SimpleNamespace
    protocol: types.ModuleType
    hook_faults: frozenset[str] = frozenset()


def real() -> Code:
    """The code as it is."""
    core = types.SimpleNamespace(**{name: importlib.import_module(f"{CORE}.{name}") for name in MODULES})
    return Code(core, importlib.import_module(PROTOCOL))


def planted(name: str, changes: tuple[Change, ...], hook_faults: frozenset[str] = frozenset()) -> Code:
    """The code with these changes."""
    package = types.ModuleType(f"planted_{name}")
    sys.modules[package.__name__] = package
    for module in MODULES:
        setattr(package, module, _built(f"{CORE}.{module}", f"{package.__name__}.{module}", module, changes, package.__name__))
    protocol = _built(PROTOCOL, f"{package.__name__}_protocol", "protocol", changes, package.__name__)
    core = types.SimpleNamespace(**{module: getattr(package, module) for module in MODULES})
    return Code(core, protocol, hook_faults)


def _built(original: str, as_name: str, short: str, changes: tuple[Change, ...], package: str) -> types.ModuleType:
    path = importlib.import_module(original).__file__
    assert path is not None
    text = Path(path).read_text(encoding="utf-8")
    for change in changes:
        if change.module == short:
            assert text.count(change.old) == 1, f"{short}: {text.count(change.old)} times in the text: {change.old!r}"
            text = text.replace(change.old, change.new)
    module = types.ModuleType(as_name)
    module.__file__ = path
    sys.modules[as_name] = module
    exec(compile(text.replace(CORE, package), f"{path} ({as_name})", "exec"), module.__dict__)
    return module
