"""``make mutants``: mutation testing with mutmut. Which small changes of the code does no test notice?

Modules come in an order drawn by the seed. Each is changed in a copy below build/mutants, and tested by the
files that name it in the tests' folder of the same part (tests/core for kvbench/core). mutmut changes the
bodies of functions, but not constants of modules, properties, or most decorated functions; changes of texts
alone are not counted. Processes that tests start run without the change, so code that only they run is not
reached, and not counted either. Modules that no test file names are listed, not tried. ``mutants.yaml`` lists
changes that no test can notice. Exit codes: 0 as good as ``--least``, 1 worse.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from tools.bench import ROOT, arguments, output_of

SOURCES: Final = (
    *("kvbench/core", "kvbench/processes/loadgen/plan.py", "kvbench/processes/router/dispatch.py"),
    *("kvbench/report/tables", "kvbench/results/store.py"),
)
MUTMUT: Final = (sys.executable, "-m", "mutmut")
WORK: Final = ROOT / "build" / "mutants"
EQUIVALENT: Final = ROOT / "tools" / "mutants.yaml"
SURVIVED: Final = (0, 5)
UNREACHED: Final = 33
"""mutmut's exit codes for a mutant that no test noticed, and for one that no test reaches within its own
process. None: not tried."""
LEAST: Final = 73.0
"""Score in percent: two standard errors below that of seven small modules, measured before tests were added
for what survived in them: 81.2 % of 863 mutants, with a standard error over modules of 4.0 %."""
UNCOVERED: Final = "could not find any test case for any mutant"
"""What mutmut says, besides a failure, of a module whose tests reach none of its mutants."""
SETTINGS: Final = """\
[tool.mutmut]
source_paths = ["kvbench"]
only_mutate = [{module!r}]
pytest_add_cli_args = [
  "--noconftest", "-p", "loops", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-profile=ci",
]
pytest_add_cli_args_test_selection = {tests}

[tool.pytest.ini_options]
pythonpath = [".", "tests/support"]
addopts = "--import-mode=importlib -m 'not heavy'"
"""


def modules(places: Sequence[str]) -> list[str]:
    paths = [ROOT / place for place in places]
    found = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [file.relative_to(ROOT).as_posix() for file in found if file.name != "__init__.py"]


def tests_of(module: str) -> list[str]:
    """Return the test files that name a module, in the tests' folder of its part."""
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    named = re.compile(rf"\b{re.escape(package)}(\.{name}\b| import [^#]*?\b{name}\b)")
    files = sorted((ROOT / "tests" / module.split("/")[1]).rglob("test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if named.search(file.read_text("utf-8"))]


def run(module: str, tests: Sequence[str], workers: int, seconds: float) -> dict[str, int | None]:
    """Return mutmut's exit code for each mutant of a module that changes more than a text."""
    shutil.rmtree(WORK, ignore_errors=True)
    copy = WORK / "mutants"
    copy.mkdir(parents=True)
    for name in ("kvbench", "tests"):  # mutmut copies these
        (WORK / name).symlink_to(ROOT / name)
    for name in ("docs", "results", "scenarios", "tools"):
        (copy / name).symlink_to(ROOT / name)
    (WORK / "pyproject.toml").write_text(SETTINGS.format(module=module, tests=json.dumps(list(tests))))
    command = ["timeout", "-k", "5", f"{seconds:.0f}", *MUTMUT, "run", "--max-children", str(workers)]
    # pytest imports the plugin ``loops`` before it reads its own pythonpath.
    environment = {"PYTHONPATH": str(ROOT / "tests" / "support")}
    status, output = output_of(command, seconds + 60, WORK, environment)
    if status not in (0, 124) and UNCOVERED not in output:
        raise SystemExit(f"mutmut failed on {module} ({status}): {output[-2000:]}")
    meta = Path(f"{copy / module}.meta")
    codes = json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}
    texts = text_changes((copy / module).read_text("utf-8")) if codes else set()
    return {name: code for name, code in codes.items() if name.rpartition(".")[2] not in texts}


def text_changes(mutated: str) -> set[str]:
    """Return the mutants in a mutated module that differ from their function in texts alone."""
    shapes = {}
    for node in ast.walk(ast.parse(mutated)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "__mutmut_" in node.name:
            name, node.name = node.name, ""
            for child in ast.walk(node):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    child.value = ""
            shapes[name] = ast.dump(node)
    return {
        name
        for name, shape in shapes.items()
        if not name.endswith("__mutmut_orig")
        and shape == shapes.get(f"{name.rpartition('__mutmut_')[0]}__mutmut_orig")
    }


def change(mutant: str) -> str:
    """Return what a mutant changes, as ``before  →  after``."""
    _, output = output_of([*MUTMUT, "show", mutant], 60, WORK)
    lines = [line for line in output.splitlines() if not line.startswith(("---", "+++"))]
    return "  →  ".join(" ".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(
        (__doc__ or "").splitlines()[0],
        given,
        module=((), f"file or folder to change, repeatable (default: {', '.join(SOURCES)})"),
        minutes=(15.0, "end after this time"),
        seed=(1, "of the order of modules"),
        least=(LEAST, "score in percent below which it fails"),
        workers=(os.cpu_count() or 1, "processes"),
    )
    until = time.monotonic() + 60 * chosen.minutes
    names = modules(chosen.module or SOURCES)
    random.Random(chosen.seed).shuffle(names)
    excused = {(entry["module"], entry["change"]) for entry in yaml.safe_load(EQUIVALENT.read_text("utf-8"))}
    tried = left = late = 0
    for module in names:
        if not (tests := tests_of(module)):
            print(f"{module}: not tried, since no test file names it")
            continue
        if (seconds := until - time.monotonic()) < 1:
            late += 1
            continue
        codes = run(module, tests, chosen.workers, seconds)
        unnoticed = [(name, change(name)) for name, code in codes.items() if code in SURVIVED]
        survived = [mutant for mutant in unnoticed if (module, mutant[1]) not in excused]
        unreached = sum(code == UNREACHED for code in codes.values())
        reached = sum(code is not None for code in codes.values()) - unreached
        known = reached - (len(unnoticed) - len(survived))
        tried, left = tried + known, left + len(survived)
        for name, text in survived:
            print(f"{name}: {text}")
        print(
            f"{module}: {len(survived)} of {known} survived, {unreached} not reached, {len(codes)} in all",
            flush=True,
        )
    if late:
        print(f"not tried for lack of time: {late} modules")
    score = 100 * (1 - left / max(tried, 1))
    print(f"{tried - left} of {tried} mutants noticed: {score:.1f} %")
    return 0 if tried and score >= chosen.least else 1


if __name__ == "__main__":
    sys.exit(main())
