"""Mutation testing: what is changed, what is found to be seen, and what is left of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants.__main__ import Results, chosen, equivalent, sources
from tools.mutants.operators import mutants, mutated
from tools.mutants.reach import AT_IMPORT, ROOT, Reach
from tools.mutants.running import Outcome, within

SOURCE = '''"""A module."""
from dataclasses import dataclass
LIMIT: int = 3
PEAKS = {"H100": 989.0}
Number = int | float
@dataclass(frozen=True)
class Box:
    size: float = 0.5
    @property
    def large(self) -> bool:
        return self.size > LIMIT
def f(a, b=True):
    """A function."""
    if not a:
        raise ValueError("a")
    return f"{a:.1f}" if a in (1, None) else max(a, b) - 1
'''


def changed(source: str = SOURCE) -> set[tuple[str, str]]:
    return {(each.function, each.after) for each in mutants("m.py", source)}


def test_conditions_computations_constants_and_refusals_are_changed() -> None:
    assert changed() == {
        ("", "3 is 4"),
        ("Box", "0.5 is 0.75"),
        ("Box.large", "self.size >= LIMIT"),
        ("f", "True is False"),
        ("f", "a"),
        ("f", "pass"),
        ("f", "a not in (1, None)"),
        ("f", "1 is 2"),
        ("f", "min(a, b)"),
        ("f", "max(a, b) + 1"),
    }


def test_each_mutant_differs_in_one_place_and_has_a_name_of_its_own() -> None:
    for module, text in sources(["kvbench/core/load", "kvbench/core/stats.py"]).items():
        found = list(mutants(module, text))
        assert len({each.key for each in found}) == len(found)
        original = ast.dump(ast.parse(text))
        for each in found[::7]:
            tree = mutated(each, text)
            assert ast.dump(tree) != original
            compile(tree, module, "exec")  # type: ignore[call-overload]


def test_a_name_stays_when_lines_move() -> None:
    before = [each.key for each in mutants("m.py", SOURCE)]
    assert [each.key for each in mutants("m.py", f"# new\n\n{SOURCE}")] == before


def test_a_larger_sample_begins_with_the_smaller_one() -> None:
    found = list(mutants("m.py", SOURCE))
    assert chosen(found, 4, seed=1) == chosen(found, 8, seed=1)[:4]
    assert chosen(found, 8, seed=2) != chosen(found, 8, seed=1)
    assert sorted(each.key for each in chosen(found, 0, seed=1)) == sorted(each.key for each in found)


def test_tests_of_the_module_s_own_folder_come_first_and_the_quick_ones() -> None:
    tests = {"tests/core/a.py::x": 2.0, "tests/core/a.py::y": 1.0, "tests/sweep/b.py::z": 0.1}
    reached = Reach(tests, {"kvbench/core/m.py": {3: list(tests), 5: ["tests/core/a.py::x"], 1: [AT_IMPORT]}})
    nearest = ["tests/core/a.py::y", "tests/core/a.py::x", "tests/sweep/b.py::z"]
    assert reached.of("kvbench/core/m.py", 3) == nearest
    assert reached.of("kvbench/core/m.py", 6) == ["tests/core/a.py::x"]  # of the line before
    assert reached.of("kvbench/core/m.py", 1) == nearest  # what runs at import is everybody's
    assert reached.of("kvbench/core/other.py", 1) == []
    assert within(nearest, tests.__getitem__, 1.5) == (["tests/core/a.py::y", "tests/sweep/b.py::z"], 1.1)


def test_what_is_known_is_kept_while_it_holds(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "results.jsonl", mutants("m.py", SOURCE)
    results = Results(path, {"m.py": SOURCE}, "tests")
    results.add(first, Outcome("killed", "test"))
    results.add(second, Outcome("survived"))
    with path.open("a") as file:
        file.write('{"key": "cut o')
    again = Results(path, {"m.py": SOURCE}, "tests")
    assert (again.of(first), again.of(second)) == (Outcome("killed", "test"), Outcome("survived"))
    other_tests = Results(path, {"m.py": SOURCE}, "other")
    assert (other_tests.of(first), other_tests.of(second)) == (Outcome("killed", "test"), None)
    other_code = Results(path, {"m.py": f"{SOURCE}\n"}, "tests")
    assert (other_code.of(first), other_code.of(second)) == (None, None)


def test_the_list_of_equivalent_mutants_is_of_mutants_that_there_are() -> None:
    listed = equivalent()
    texts = sources(sorted({key.partition("::")[0] for key in listed}))
    assert set(listed) <= {each.key for name, text in texts.items() for each in mutants(name, text)}
    assert all(len(why) > 10 for why in listed.values())


SUMS = """def total(n):
    found = 0
    while n > 0:
        found += n
        n -= 1
    return found
"""
TEST = """from pkg.sums import total
def test_total():
    assert total(3) == 6
"""
RUN = """
import json, sys
from pathlib import Path
from tools.mutants.operators import mutants
from tools.mutants.running import Pool, Task, preload
class Short(Task):
    limit_s = 3
preload()
root, module = Path.cwd(), "pkg/sums.py"
tasks = [Short(each, ["test_sums.py::test_total"], 1.0) for each in mutants(module, Path(module).read_text())]
outcomes = {task.mutant.after: outcome.status for task, outcome in Pool(root, 2).run(iter(tasks))}
print("OUTCOMES", json.dumps(outcomes))
"""


@pytest.mark.timeout(300)
def test_a_mutant_lives_in_its_own_process_alone(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    files = {"pkg/__init__.py": "", "pkg/sums.py": SUMS, "test_sums.py": TEST}
    files["pytest.ini"] = "[pytest]\npythonpath = .\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("OUTCOMES ")]
    assert told, done.stdout + done.stderr
    assert json.loads(told[0].removeprefix("OUTCOMES ")) == {
        "0 is 1": "killed",
        "n >= 0": "survived",  # adds nothing in its last turn
        "found -= n": "killed",
        "n += 1": "too long",
        "1 is 2": "killed",
    }
    assert {name: (tmp_path / name).read_text() for name in files} == files
