"""The shape of the code: what may import what is in pyproject.toml (import-linter); this is the rest that a reader relies on."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SUPERVISOR = ROOT / "supervisor" / "ckpt_supervisor"
CLIENT = ROOT / "client" / "ckpt_client"
MODULES = sorted([*SUPERVISOR.rglob("*.py"), *CLIENT.rglob("*.py")])
EVERYTHING = sorted([*MODULES, *(ROOT / "deploy").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 60

PURE = [
    *sorted((SUPERVISOR / "core").glob("*.py")),
    CLIENT / "protocol.py",
    CLIENT / "wire.py",
    SUPERVISOR / "slurm_text.py",
    SUPERVISOR / "config_text.py",
]
IMPURE_MODULES = frozenset(
    {
        "time", "datetime", "random", "os", "sys", "io", "pathlib", "subprocess", "socket", "threading", "logging", "zmq", "psutil",
        "structlog", "signal", "secrets", "tempfile", "shutil", "select", "multiprocessing", "asyncio", "uuid",
    }
)  # fmt: skip
MAY_READ_ENVIRON = {SUPERVISOR / "cli.py", SUPERVISOR / "ctl.py", CLIENT / "hook.py", CLIENT / "loop.py"}


def tree(path: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """A module as a test's id."""
    return str(path.relative_to(ROOT))


def imported(module: ast.Module) -> Iterator[str]:
    """Top-level packages that this module imports anywhere."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.split(".")[0]


def dotted(node: ast.expr) -> str:
    """`os.environ` for such an expression, "" for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def used(module: ast.Module) -> set[str]:
    """Every dotted name in this module."""
    return {dotted(node) for node in ast.walk(module) if isinstance(node, ast.Attribute | ast.Name)}


def functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods."""
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_two_source_roots_are_no_packages() -> None:
    """Somebody else's package is called `supervisor`: ours must not be importable by that name."""
    for root in ("supervisor", "client"):
        assert not (ROOT / root / "__init__.py").exists()
        assert [path.name for path in (ROOT / root).iterdir() if path.suffix == ".py"] == []
    assert (SUPERVISOR / "__init__.py").exists()
    assert (CLIENT / "__init__.py").exists()


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and methods of its public classes, whose names are no private ones."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                methods = (item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"))
                yield from methods


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_and_public_name_says_what_it_is_for(path: Path) -> None:
    """A docstring on each module, public class, function and method; protocols' empty methods inherit theirs."""
    assert ast.get_docstring(tree(path)), "the module has no docstring"
    bare = [
        node.name
        for node in public_definitions(path)
        if not ast.get_docstring(node) and not is_stub(node) and not any("overload" in dotted(d) for d in node.decorator_list)
    ]
    assert bare == []


def is_stub(node: ast.AST) -> bool:
    """Whether a function is `...` only, as in a Protocol."""
    body = getattr(node, "body", [])
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and body[0].value.value is ...


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_environment_is_read_at_the_edges_only(path: Path) -> None:
    """`os.environ` in cli.py, ctl.py and where the client attaches; elsewhere it is an argument."""
    names = used(tree(path))
    reads = names & {"os.environ", "os.getenv", "os.environb", "os.getenvb", "os.putenv", "os.unsetenv"}
    assert reads == set() or path in MAY_READ_ENVIRON, reads


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_the_pure_modules_know_no_clock_and_no_io(path: Path) -> None:
    """The core and the protocol are functions of their arguments, so that the simulator runs what the real thing runs."""
    module = tree(path)
    allowed = {"config_text.py": {"signal", "pathlib"}}.get(path.name, set())
    assert set(imported(module)) & IMPURE_MODULES - allowed == set()
    assert used(module) & {"open", "print", "input", "exec", "eval", "globals"} == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_sleeps_or_waits_without_a_bound(path: Path) -> None:
    """No periodic sleep anywhere but in `ckptctl log --follow`; no asyncio."""
    sleeps = used(tree(path)) & {"time.sleep", "sleep", "asyncio.sleep"}
    assert sleeps == set() or path.name == "ctl.py"
    assert "asyncio" not in set(imported(tree(path)))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_happens_on_import(path: Path) -> None:
    """At the top of a module are definitions and constants; what is called there makes a value and touches nothing."""
    touching = re.compile(r"^(os|sys|subprocess|socket|threading|signal|zmq|open|print|time|random|Path)\b")
    pure_calls = ("os.sysconf", "signal.Signals", "threading.local", "re.compile")
    calls = []
    for statement in tree(path).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
            continue
        names = [dotted(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
        calls += [name for name in names if touching.match(name) and not name.startswith(pure_calls)]
    assert calls == []


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_files_and_functions_fit_into_a_head(path: Path) -> None:
    """Bounds above the aim (300 lines, 50 lines), so that growth is noticed before it hurts."""
    module = tree(path)
    long = [f"{node.name}: {size}" for node in functions(module) if (size := body_lines(node)) > FUNCTION_LINES_MAX]
    assert long == []
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from def to the last one, without those of functions inside, which are measured themselves."""
    inner = sum((item.end_lineno or 0) - item.lineno + 1 for item in functions(ast.Module(node.body, [])) if item is not node)
    return (node.end_lineno or 0) - node.lineno + 1 - inner


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_exceptions_are_caught_by_name(path: Path) -> None:
    """No bare `except`; a broad one only where docs name it: the bottom of the loop, a lane's work, the user's own save."""
    broad = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            names = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
            broad += [f"{dotted(name)} in line {node.lineno}" for name in names if dotted(name) in ("Exception", "BaseException")]
    allowed = {"app.py": 1, "lanes.py": 1}.get(path.name, 0) if path.is_relative_to(SUPERVISOR) else CLIENT_BROAD.get(path.name, 0)
    assert len(broad) <= allowed, broad


CLIENT_BROAD = {"attachment.py": 2}
"""The user's save and load functions may raise anything."""


TEST_MODULES = [path for path in EVERYTHING if path.is_relative_to(ROOT / "tests")]
FORBIDDEN_IN_TESTS = {"time.sleep", "mock.patch", "MagicMock", "unittest.mock", "pytest.mark.xfail", "pytest.mark.skip", "pytest.skip"}


@pytest.mark.parametrize("path", TEST_MODULES, ids=name_of)
def test_tests_neither_sleep_nor_pretend(path: Path) -> None:
    """No sleep, no mock, nothing skipped or expected to fail; every test's docstring states its property."""
    module = tree(path)
    names = used(module)
    assert names & FORBIDDEN_IN_TESTS == set()
    assert not any(name.endswith("monkeypatch.setattr") for name in names)
    bare = [node.name for node in functions(module) if node.name.startswith("test_") and not ast.get_docstring(node)]
    assert bare == []


def test_the_console_scripts_exist() -> None:
    """Both entry points name functions that are there."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"ckpt-supervise", "ckptctl"}
    for target in scripts.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_supervisor_imports_neither_torch_nor_the_client_proper() -> None:
    """What runs beside every training run stays small: of the client only the wire, of torch nothing."""
    taken = set()
    for path in SUPERVISOR.rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "ckpt_client":
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_client."):
                taken.add(str(node.module).split(".")[1])
        assert "torch" not in set(imported(tree(path)))
    assert taken <= {"wire"}
