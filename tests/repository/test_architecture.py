"""Import rules that import-linter cannot express; its own contracts are in pyproject.toml."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvbench
from kvbench import engines
from tests.repository.test_security_source import tree_of

PACKAGE = Path(kvbench.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

NATIVE = {"mooncake", "nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "torch", "vllm"}
# A second each to import; a command line that only prints its help must not pay for them.
HEAVY = {"pandas", "pyarrow", "matplotlib", "numpy", *NATIVE}


def imported(nodes: Iterator[ast.stmt] | list[ast.stmt]) -> Iterator[str]:
    """Top-level packages that run at import time: not those inside functions or ``if TYPE_CHECKING``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )
            for handler in getattr(node, "handlers", []):
                yield from imported(handler.body)


def test_native_libraries_are_imported_inside_functions_only() -> None:
    imports = {path: set(imported(tree_of(path).body)) for path in MODULES}
    assert {str(path): names & NATIVE for path, names in imports.items() if names & NATIVE} == {}


def test_the_rule_sees_what_runs_at_import() -> None:
    code = "try:\n  import nixl\nexcept ImportError:\n  import mooncake.engine\ndef f():\n  import torch\n"
    assert set(imported(ast.parse(code).body)) == {"nixl", "mooncake"}


@pytest.mark.parametrize(
    "module", ["kvbench.cli", "kvbench.planning.doctor.doctor", "kvbench.hosts.environment"]
)
def test_imports_lightly(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not set(done.stdout.split()) & HEAVY


@pytest.mark.parametrize("words", [["--help"], ["plan", "quickstart"], ["sweep", "--help"]])
def test_a_command_that_measures_nothing_imports_lightly(words: list[str]) -> None:
    code = (
        "import atexit, sys; from kvbench.cli import main\n"
        "atexit.register(lambda: print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr))\n"
        "main()"
    )
    argv = [sys.executable, "-c", code, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stderr.split()) & {*HEAVY, "httpx", "markdown_it", "pygments"}


# Engines and connectors are asked, not called by name
ENGINES = set(engines.names())
OF_ENGINES = {f"kvbench.engines.{name}" for name in ENGINES}
# A folder's own files may; and the scenario's own checks look at what is written, before it has a type.
MAY_NAME_ENGINES = ("engines/", "connectors/", "core/scenario/checks.py")


def words(node: ast.expr) -> set[str]:
    """The constant texts of an expression, also those in a tuple, list or set."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def is_engine(node: ast.expr) -> bool:
    """Whether an expression is an engine's name: ``a.engine``, ``data.get("engine")``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get" and is_key(node.args[:1])
    if isinstance(node, ast.Subscript):
        return is_key([node.slice])
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("engine", "engine_name")


def is_key(nodes: list[ast.expr]) -> bool:
    return any("engine" in words(node) for node in nodes)


def by_name(tree: ast.Module) -> Iterator[str]:
    """Where a module asks which engine or connector it has, instead of what that is like."""
    types = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in OF_ENGINES
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            named = set().union(*map(words, sides))
            asks = bool(named & ENGINES) or (bool(named) and any(map(is_engine, sides)))
        elif isinstance(node, ast.Match):
            asks = is_engine(node.subject)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            of, what = node.args[:2]
            asks = node.func.id in ("getattr", "hasattr") and bool(words(what))
            asks = asks and ast.unparse(of).endswith("options")
            inside = {part.id for part in ast.walk(what) if isinstance(part, ast.Name)}
            asks = asks or (node.func.id == "isinstance" and bool(types & inside))
        else:
            continue
        if asks:
            yield ast.unparse(node)


def test_what_differs_between_engines_is_asked_of_their_options() -> None:
    modules = {str(path.relative_to(PACKAGE)): path for path in MODULES}
    found = {
        name: checks
        for name, path in modules.items()
        if not name.startswith(MAY_NAME_ENGINES) and (checks := list(by_name(tree_of(path))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('a.engine == "vllm"', 1),
        ('engine in ("of-tomorrow", "x")', 1),
        ('data.get("engine") == "x"', 1),
        ('data["engine"] == "x"', 1),
        ('name == "external"', 1),
        ('getattr(d.engine_options, "time_scale", 1.0)', 1),
        ('hasattr(options, "version")', 1),
        ("from kvbench.engines.emulated import EmulatedOptions\nisinstance(o, EmulatedOptions)", 1),
        ("getattr(options, role)", 0),
        ("options.starts_processes and engine", 0),
    ],
)
def test_the_rule_sees_names(code: str, count: int) -> None:
    assert len(list(by_name(ast.parse(code)))) == count


# No circle, not even for types
Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    """Of a file; a package's ``__init__`` has the package's own name."""
    return ".".join(("kvbench", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def targets(code: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules of kvbench that code imports anywhere: in functions and under TYPE_CHECKING too.

    ``from kvbench.a import b`` is an import of ``kvbench.a.b`` where that is a module, and otherwise of the
    ``__init__`` of ``kvbench.a``. That Python runs the ``__init__`` of packages on the way does not count.
    """
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "kvbench imports by full names"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules or node.module in modules:
                    yield whole if whole in modules else str(node.module)


@cache
def import_graph() -> Graph:
    """Module → the modules of kvbench that it imports."""
    modules = {module_name(path): path for path in MODULES}
    return {name: set(targets(tree_of(path), set(modules))) - {name} for name, path in modules.items()}


def circle(graph: Graph) -> list[str]:
    """One circle of a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def rooms_of(package: str, graph: Graph) -> dict[str, set[str]]:
    """What lies directly in a package, each with all below it, and which of these imports which.

    So a package may import the modules beside it, and others beside it may import the package, as a choice
    imports ``parts`` and those import ``base``. The package's ``__init__`` is one of its modules.
    """

    def room(module: str) -> str:
        inside = module.removeprefix(package).lstrip(".")
        return inside.partition(".")[0] or "__init__"

    def within(module: str) -> bool:
        return module == package or module.startswith(f"{package}.")

    rooms: dict[str, set[str]] = {}
    for module, imports in graph.items():
        if within(module):
            others = {room(target) for target in imports if within(target)} - {room(module)}
            rooms.setdefault(room(module), set()).update(others)
    return rooms


def layers() -> list[set[str]]:
    """The rooms of kvbench from the top down, as import-linter's first contract has them."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    lines = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [set(line.replace("|", " ").replace(":", " ").split()) for line in lines]


PACKAGES = sorted(module_name(path) for path in MODULES if path.name == "__init__.py")


def test_no_module_is_in_a_circle() -> None:
    assert circle(import_graph()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_between_the_rooms_of_a_package(package: str) -> None:
    assert circle(rooms_of(package, import_graph())) == []


def test_every_import_runs_downward() -> None:
    depth = {room: number for number, rooms in enumerate(layers()) for room in rooms}
    depth["kvbench"] = -1  # the face, above all
    lowest = max(depth.values())
    upward = []
    for module, imports in import_graph().items():
        room = module.split(".")[min(1, module.count("."))]
        for target in imports:
            other = target.split(".")[min(1, target.count("."))]
            beside = depth[other] == depth[room] == lowest
            if other != room and depth[other] <= depth[room] and not beside:
                upward.append(f"{module} -> {target}")
    assert upward == []


def test_the_graph_sees_imports_for_types_and_in_functions() -> None:
    code = (
        "if TYPE_CHECKING:\n  from kvbench.core import slo\n"
        "def f():\n  from kvbench.errors import InputError\n  import kvbench.files\n"
    )
    modules = {"kvbench", "kvbench.core", "kvbench.core.slo", "kvbench.errors", "kvbench.files"}
    assert set(targets(ast.parse(code), modules)) == {"kvbench.core.slo", "kvbench.errors", "kvbench.files"}


def test_circles_are_seen() -> None:
    graph = {"p": {"p.a"}, "p.a": {"p.b.c"}, "p.b.c": set(), "p.b.d": {"p.a"}}
    assert circle(graph) == []  # an __init__ may import what is in its package
    assert set(circle(rooms_of("p", graph))) == {"a", "b"}
    assert set(circle({**graph, "p.b.c": {"p"}})) == {"p", "p.a", "p.b.c"}


ROOT = Path(kvbench.__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_layers_are_those_of_the_import_contract() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    written = re.search(r'name = "Layers: .*?layers = \[(.*?)\]', config, re.S)
    assert written
    contract = [re.findall(r"\w+", layer) for layer in re.findall(r'"(.*?)"', written[1])]
    table = PAGE.split("## Layers")[1].split("## ")[0]
    page = [
        re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in table.splitlines() if row.startswith("| `")
    ]
    assert page == contract


def test_every_room_is_on_the_page_and_every_place_on_the_page_is_there() -> None:
    named = set(re.findall(r"`([\w/]+/|[\w/]+\.py)`", PAGE))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(re.findall(r"`(\w+)`", PAGE))
    below = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts}
    missing = [name for name in named if not any(path.endswith(name.rstrip("/")) for path in below)]
    assert missing == []
