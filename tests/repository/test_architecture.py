"""Import rules that import-linter cannot express; its own contracts are in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbench

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


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_native_libraries_are_imported_inside_functions_only(path: Path) -> None:
    assert not set(imported(ast.parse(path.read_text()).body)) & NATIVE


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
