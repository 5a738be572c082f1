"""``python -m tools.house``: is every part of the package small enough to be taken in at a look?

Part of ``make lint``; limits and exceptions are below. Import-linter holds layers, ruff complexity.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
MARKERS = frozenset({"__init__.py", "__init__.pyi", "py.typed"})
"""What Python itself asks for says nothing about the plan, and is not counted."""

Trees = Mapping[Path, ast.Module]


@dataclass(frozen=True)
class Limits:
    """``[tool.house]``: what is allowed, and what is let pass for a reason."""

    top_entries: int
    folder_files: int
    module_lines: int
    function_lines: int
    large_folders: Mapping[str, str] = field(default_factory=dict)
    """Folder below the package → why it is not split."""
    same_names: Sequence[str] = ()
    """Names of files and classes that mean the same thing in each of their places."""


SAME: Final = """
ahead answers app base cases checks client command control data deployment dispatch engine evidence
findings gates hosts liveness loop measure methods metrics mooncake mooncake_store nccl nixl notes
options overrides plan pool processes records remote run scenario server spec stats system tcp transfer
transfers wire
"""
"""Names of modules in several rooms: each is what its room has of the thing, such as the ``plan`` of a run
and the load generator's own, or the ``mooncake`` that hands over and the one that moves."""

HOUSE: Final = Limits(
    top_entries=21,
    folder_files=20,
    module_lines=500,
    function_lines=60,
    large_folders={},
    # The section of a scenario, and the value that it becomes.
    same_names=("Slo", *(f"{name}.py" for name in SAME.split())),
)


def problems(package: Path, limits: Limits) -> Iterator[str]:
    """What is larger than allowed, one sentence each; and exceptions that nothing needs any more."""
    entries = _entries(package)
    if len(entries) > limits.top_entries:
        yield f"{package.name}/ has {len(entries)} entries, not {limits.top_entries} at most"
    folders = [path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    large = {
        str(folder.relative_to(package)): count
        for folder in folders
        if (count := sum((folder / name).is_file() for name in _entries(folder))) > limits.folder_files
    }
    for name in sorted(large.keys() - limits.large_folders.keys()):
        yield f"{name}/ has {large[name]} files, not {limits.folder_files}: give it a door, or a reason"
    for name in sorted(limits.large_folders.keys() - large.keys()):
        yield f"tools/house.py excuses {name}/, which needs no excuse"
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    yield from _long(package, limits, trees)
    yield from _ambiguous(package, limits, trees)


def _entries(folder: Path) -> list[str]:
    """What a listing shows, without what is built, cached or a marker of Python's."""
    return [
        path.name
        for path in folder.iterdir()
        if path.name not in MARKERS and path.name != "__pycache__" and path.suffix != ".so"
    ]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a tree, and what holds some, such as the handlers of a ``try``."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, None) or ():
            yield child
            yield from _statements(child)


def _long(package: Path, limits: Limits, trees: Trees) -> Iterator[str]:
    for path, tree in trees.items():
        where, lines = path.relative_to(package.parent), path.read_text().count("\n")
        if lines > limits.module_lines:
            yield f"{where} has {lines} lines, not {limits.module_lines} at most"
        for node in _statements(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limits.function_lines:
                    at = f"{where}:{node.lineno}"
                    yield f"{at}: {node.name} has {length} lines, not {limits.function_lines} at most"


def _ambiguous(package: Path, limits: Limits, trees: Trees) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        where = str(path.relative_to(package.parent))
        if path.name not in ("__init__.py", "__main__.py"):
            places[path.name].append(where)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(where)
    several = {name: found for name, found in places.items() if len(found) > 1}
    for name in sorted(several.keys() - set(limits.same_names)):
        yield f"{name} is a name of {len(several[name])} things: {', '.join(several[name])}"
    for name in sorted(set(limits.same_names) - several.keys()):
        yield f"tools/house.py excuses the name {name}, which needs no excuse"


def main() -> int:
    found = list(problems(ROOT / "kvbench", HOUSE))
    for problem in found:
        print(problem)
    if not found:
        print("The house is in order.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
