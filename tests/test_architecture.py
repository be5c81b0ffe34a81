"""The shape of the code: what may import what is in pyproject.toml (import-linter); this is the rest that a reader relies on."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SUPERVISOR = ROOT / "supervisor" / "ckpt_supervisor"
CLIENT = ROOT / "client" / "ckpt_client"
MODULES = sorted([*SUPERVISOR.rglob("*.py"), *CLIENT.rglob("*.py")])
TEST_MODULES = sorted((ROOT / "tests").rglob("*.py"))
EVERYTHING = sorted([*MODULES, *(ROOT / "deploy").rglob("*.py"), *TEST_MODULES])
FORBIDDEN_IN_TESTS = re.compile(r"^time\.sleep$|mock|pytest\.mark\.(skip|xfail)|^pytest\.(skip|xfail)$|monkeypatch\.setattr")

FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
LONGER = {"machine.py": 540, "leaving.py": 490, "app.py": 500, "rounds.py": 440}
"""Every phase names every event, and every way out every cause: that is better read in one place than cut in two."""

PURE = [
    *sorted((SUPERVISOR / "core").glob("*.py")),
    CLIENT / "protocol.py",
    CLIENT / "wire.py",
    SUPERVISOR / "adapters" / "slurm_text.py",
    SUPERVISOR / "config_text.py",
    *(SUPERVISOR / "doctor" / f"{name}.py" for name in ("finding", "facts", "shell", "script")),
    *sorted((SUPERVISOR / "doctor").glob("*_rules.py")),
]
IMPURE_MODULES = frozenset(
    {
        "time", "datetime", "random", "os", "sys", "io", "pathlib", "subprocess", "socket", "threading", "logging", "zmq",
        "psutil", "structlog", "signal", "secrets", "tempfile", "shutil", "select", "multiprocessing", "asyncio", "uuid",
    }
)  # fmt: skip
MAY_IMPORT = {"config_text.py": {"signal", "pathlib"}, "slurm_text.py": {"datetime"}, "script.py": {"pathlib"}}
"""For their types and constants."""

MAY_SKIP = {ROOT / "tests" / "slurm" / "conftest.py", ROOT / "tests" / "support" / "syscalls.py"}
MAY_SLEEP = {"slurm.py"}
MAY_CATCH_ALL = {SUPERVISOR / "app.py": 1, SUPERVISOR / "adapters" / "lanes.py": 1, CLIENT / "attachment.py": 2}
"""The bottom of the loop, which still requeues; a lane's work; the user's own save and load."""

MAY_READ_ENVIRON = {
    SUPERVISOR / "cli.py",
    SUPERVISOR / "ctl" / "main.py",
    CLIENT / "__init__.py",
    CLIENT / "hook.py",
    CLIENT / "loop.py",
}

MAY_DO_ON_IMPORT = {CLIENT / "__init__.py": ["from ckpt_client import shield", "shield.stand_early(os.environ)"]}
"""In a supervised process the shield stands before training code makes its first worker (docs/decisions/0010)."""


@functools.cache
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


def test_every_module_and_public_name_says_what_it_is_for() -> None:
    """A docstring on each module, public class, function and method; protocols' empty methods need none."""
    bare = [name_of(path) for path in MODULES if not ast.get_docstring(tree(path))]
    for path in MODULES:
        undocumented = [node for node in public_definitions(path) if not ast.get_docstring(node) and not is_stub(node)]
        bare += [f"{name_of(path)}: {node.name}" for node in undocumented]
    assert bare == []


def is_stub(node: ast.AST) -> bool:
    """Whether a function is `...` only, as in a Protocol."""
    body = getattr(node, "body", [])
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return isinstance(value, ast.Constant) and value.value is ...


def test_the_environment_is_read_at_the_edges_only() -> None:
    """`os.environ` in cli.py, ctl/main.py and where the client attaches; elsewhere it is an argument."""
    reads = {"os.environ", "os.getenv", "os.environb", "os.getenvb", "os.putenv", "os.unsetenv"}
    assert [name_of(path) for path in MODULES if used(tree(path)) & reads and path not in MAY_READ_ENVIRON] == []


def test_the_pure_modules_know_no_clock_and_no_io() -> None:
    """The core and the protocol are functions of their arguments, so that the simulator runs what the real thing runs."""
    found = []
    for path in PURE:
        module = tree(path)
        names = set(imported(module)) & IMPURE_MODULES | used(module) & {"open", "print", "input", "exec", "eval", "globals"}
        names |= used(module) & {"datetime.datetime.now", "datetime.now", "Path.cwd", "Path.home"}
        found += [f"{name_of(path)}: {name}" for name in names - MAY_IMPORT.get(path.name, set())]
    assert found == []


def test_nothing_sleeps() -> None:
    """The loop waits in its poll alone; `ckptctl log --follow` and the lane that reaps a scontrol look again after a pause."""
    found = []
    for path in MODULES:
        module = tree(path)
        found += [f"{name_of(path)}: {name}" for name in used(module) & {"time.sleep", "sleep"} if path.name not in MAY_SLEEP]
        found += [f"{name_of(path)}: asyncio" for name in imported(module) if name == "asyncio"]
    assert found == []


def test_nothing_happens_on_import() -> None:
    """At the top of a module are definitions and constants; what is called there makes a value and touches nothing."""
    touching = re.compile(r"(os|sys|subprocess|socket|threading|signal|zmq|open|print|time|random|Path)\b(?!\.Signals)")
    found = []
    for path in MODULES:
        for statement in tree(path).body:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
                names = [dotted(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
                found += [f"{name_of(path)}: {name}" for name in names if touching.match(name)]
    assert found == []


def test_only_the_shield_depends_on_where_it_is_imported() -> None:
    """An `if` at the top of a module asks for types, the version or the main program; one asks for a supervisor."""
    usual = {"TYPE_CHECKING", "__name__", "sys.version_info"}
    found = {}
    for path in MODULES:
        asked = [node for node in tree(path).body if isinstance(node, ast.If)]
        unusual = [node for node in asked if not used(ast.Module([ast.Expr(node.test)], [])) & usual]
        if unusual:
            found[path] = [ast.unparse(line) for node in unusual for line in node.body]
    assert found == MAY_DO_ON_IMPORT


def test_no_reader_of_a_format_is_imported_before_the_command_runs() -> None:
    """Each import is added to every start of a training run; before it stands launch.py with what it imports by itself."""
    words = "import sys, ckpt_supervisor.cli, ckpt_supervisor.launch, ckpt_supervisor.start.holding; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    mine = {name for name in said if name.startswith(("ckpt_supervisor", "ckpt_client"))}
    early = {"plain", "structure"}
    assert {name for name in mine if ".formats." in name} <= {f"ckpt_supervisor.store.formats.{name}" for name in early}
    assert mine.isdisjoint({"ckpt_supervisor.app", "ckpt_supervisor.errands", "ckpt_supervisor.core.machine"})
    assert {"structlog", "psutil", "asyncio"}.isdisjoint(said)


TOP_MODULES_MAX = 14
FACADES = {"store", "store/formats", "view/report"}
"""Their __init__.py hold what others import from them."""


def test_every_room_says_what_belongs_in_it_and_costs_nothing() -> None:
    """Few modules at the top, and a docstring, no import, in each package's __init__.py."""
    assert len(list(SUPERVISOR.glob("*.py"))) - 1 <= TOP_MODULES_MAX
    found = []
    for path in SUPERVISOR.rglob("__init__.py"):
        if str(path.parent.relative_to(SUPERVISOR)) not in FACADES:
            found += [name_of(path) for node in tree(path).body[1:] if not isinstance(node, ast.Assign)]
    assert found == []


def test_files_and_functions_fit_into_a_head() -> None:
    """Bounds above the aim (300 lines, 50 lines), so that growth is noticed before it hurts."""
    found = []
    for path in EVERYTHING:
        lines = len(path.read_text().splitlines())
        most = TEST_FILE_LINES_MAX if path in TEST_MODULES else LONGER.get(path.name, FILE_LINES_MAX)
        if lines > most:
            found.append(f"{name_of(path)}: {lines} lines")
        long = [(node.name, body_lines(node)) for node in functions(tree(path)) if body_lines(node) > FUNCTION_LINES_MAX]
        found += [f"{name_of(path)}: {name}: {size} lines" for name, size in long]
    assert found == []


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from def to the last one, without those of functions inside, which are measured themselves."""
    inner = sum((item.end_lineno or 0) - item.lineno + 1 for item in functions(ast.Module(node.body, [])) if item is not node)
    return (node.end_lineno or 0) - node.lineno + 1 - inner


def test_exceptions_are_caught_by_name() -> None:
    """No bare `except`; a broad one only where something has to go on whatever it was, a known number of times."""
    found = []
    for path in MODULES:
        broad = list(broad_handlers(tree(path)))
        if len(broad) > MAY_CATCH_ALL.get(path, 0):
            found += [f"{name_of(path)}: {name}" for name in broad]
    assert found == []


def broad_handlers(module: ast.Module) -> Iterator[str]:
    """Handlers that take every exception."""
    for node in ast.walk(module):
        if isinstance(node, ast.ExceptHandler):
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = ["bare except" if item is None else dotted(item) for item in types]
            broad = [name for name in names if name in ("bare except", "Exception", "BaseException")]
            yield from (f"{name} in line {node.lineno}" for name in broad)


def test_tests_neither_sleep_nor_pretend() -> None:
    """No sleep, no mock, nothing expected to fail, nothing skipped where it could run; every test states its property."""
    found = []
    for path in TEST_MODULES:
        module = tree(path)
        names = {name for name in used(module) if FORBIDDEN_IN_TESTS.search(name)}
        if path in MAY_SKIP:
            names.discard("pytest.skip")  # Says why: no root, no Slurm or no strace, on a machine that is not CI's.
        found += [f"{name_of(path)}: {name}" for name in names]
        tests = [node for node in functions(module) if node.name.startswith("test_")]
        found += [f"{name_of(path)}: {node.name} has no docstring" for node in tests if not ast.get_docstring(node)]
    assert found == []


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
