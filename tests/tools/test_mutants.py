"""`make mutants`: which tests a module gets, which changes count, and mutmut on a module."""

from __future__ import annotations

import pytest
import yaml

from tools import mutants
from tools.bench import ROOT


def test_a_module_is_tested_by_the_files_of_its_part_that_name_it() -> None:
    found = mutants.tests_of("kvbench/core/slo.py")
    assert "tests/core/metrics/test_slo.py" in found
    assert not [path for path in found if not path.startswith("tests/core/")]
    assert mutants.tests_of("kvbench/core/search/burst.py") == ["tests/core/search/test_burst.py"]


def test_the_default_modules_exist() -> None:
    found = mutants.modules(mutants.SOURCES)
    assert {"kvbench/core/slo.py", "kvbench/results/store.py"} <= set(found)
    assert {"kvbench/processes/loadgen/plan.py", "kvbench/processes/router/dispatch.py"} <= set(found)
    assert mutants.modules(["kvbench/core/slo.py"]) == ["kvbench/core/slo.py"]


def test_each_equivalent_mutant_is_in_its_module() -> None:
    for mutant in yaml.safe_load(mutants.EQUIVALENT.read_text()):
        before = mutant["change"].partition("  →  ")[0]
        assert before in (ROOT / mutant["module"]).read_text()
        assert mutant["why"]


MUTATED = """
def x_f__mutmut_orig(a):
    return "above" if a > 1 else "below"
def x_f__mutmut_1(a):
    return "XXaboveXX" if a > 1 else "below"
def x_f__mutmut_2(a):
    return "above" if a > 2 else "below"
class Box:
    def xǁBoxǁname__mutmut_orig(self):
        return f"{self.size}" + "m"
    def xǁBoxǁname__mutmut_1(self):
        return f"{self.size}" + "M"
    def xǁBoxǁname__mutmut_2(self):
        return f"{self.size}" - "m"
"""


def test_a_change_of_a_text_alone_does_not_count() -> None:
    assert mutants.text_changes(MUTATED) == {"x_f__mutmut_1", "xǁBoxǁname__mutmut_1"}


@pytest.mark.heavy
def test_mutmut_finds_what_no_test_notices(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mutmut")
    assert mutants.main(["--module", "kvbench/core/slo.py", "--least", "50"]) == 0
    assert "mutants noticed" in capsys.readouterr().out
