"""No regular expression of the package takes exponential or cubic time for a text of somebody else."""

import ast
import importlib
import pkgutil
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from pumping import pumped

import kvbench
from kvbench.deployment.diagnose import patterns

ROOT = Path(__file__).parents[2]
METHODS = ("search", "match", "fullmatch", "sub", "finditer", "findall", "split")
LENGTH = 1_200
LIMIT_S = 0.25
"""Of processor time. Square time takes some ten milliseconds, cubic time seconds, exponential for ever."""
DEADLINE_S = 0.3


class TooSlowError(Exception):
    pass


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """TooSlowError after so much processor time; a match that is under way looks for signals."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    old = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


def slow(pattern: re.Pattern[Any], methods: tuple[str, ...]) -> str:
    """A text that the pattern takes too long for; empty if none was found."""
    for text in pumped(pattern, LENGTH):
        subject: Any = text if isinstance(pattern.pattern, str) else text.encode("utf-8")
        for method in methods:
            # Thrice where it is slow: on a busy machine, what is square may take too long once.
            took = min(seconds(pattern, method, subject))
            if took > LIMIT_S:
                return f"{method} of {text[:20]!r}…{text[-20:]!r} ({took:.1f} s)"
    return ""


def seconds(pattern: re.Pattern[Any], method: str, text: Any) -> Iterator[float]:
    """Processor time of one use, at most DEADLINE_S; thrice unless it is fast."""
    for _ in range(3):
        began = time.process_time()
        with suppress(TooSlowError), deadline(DEADLINE_S):
            used(pattern, method, text)
        yield (took := time.process_time() - began)
        if took <= LIMIT_S:
            return


def used(pattern: re.Pattern[Any], method: str, text: Any) -> None:
    if method == "sub":
        pattern.sub(lambda found: found[0], text)
    elif method == "finditer":
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)


# Those of the package
def inside(value: Any) -> Iterator[re.Pattern[Any]]:
    """The patterns in a value of a module."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, Mapping):
        yield from inside(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from inside(part)


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls of the methods of ``re`` and of patterns, with the name that they are called on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield ast.unparse(node.func.value).split(".")[-1], node


@cache
def found_patterns() -> dict[tuple[str, str], tuple[re.Pattern[Any], tuple[str, ...]]]:
    """Module and name, or line → the pattern, and how it is used; every way where that cannot be seen."""
    everywhere = ("search", "fullmatch")
    found: dict[tuple[str, str], tuple[re.Pattern[Any], tuple[str, ...]]] = {}
    trees = {}
    for info in pkgutil.walk_packages(kvbench.__path__, "kvbench."):
        if not info.name.endswith("__main__") and ".in_vllm" not in info.name:
            module = importlib.import_module(info.name)
            if module.__file__ and module.__file__.endswith(".py"):
                trees[module] = ast.parse(Path(module.__file__).read_text())
    uses: dict[str, set[str]] = {}
    for tree in trees.values():
        for name, call in called(tree):
            assert isinstance(call.func, ast.Attribute)
            uses.setdefault(name, set()).add(call.func.attr)
    for module, tree in trees.items():
        for name, value in vars(module).items():
            for place, pattern in enumerate(inside(value)):
                alone = isinstance(value, re.Pattern)
                ways = tuple(sorted(uses.get(name, ()))) if alone else ()
                found[module.__name__, name if alone else f"{name}[{place}]"] = pattern, ways or everywhere
        for name, call in called(tree):
            if name == "re" and call.args and isinstance(call.args[0], ast.Constant):
                assert isinstance(call.func, ast.Attribute)
                flags = re.MULTILINE if "MULTILINE" in ast.unparse(call) else 0
                key = module.__name__, f"line {call.lineno}"
                found[key] = re.compile(call.args[0].value, flags), (call.func.attr,)
    for key, entry in patterns().items():
        found["log_patterns.yaml", key] = entry.regex, ("search",)
    claims = yaml.safe_load((ROOT / "kvbench/importers/parts/claims.yaml").read_text(encoding="utf-8"))
    for place, entry in enumerate(claims):
        found["claims.yaml", str(place)] = re.compile(entry["pattern"]), ("search",)
    return found


def test_all_are_found() -> None:
    found = found_patterns()
    assert len(found) > 200
    assert ("kvbench.core.scenario.yaml_lines", "_TRAPS[3]") in found
    assert ("kvbench.report.scrub", "_IPV4") in found


@pytest.mark.parametrize("text", [r"(?:_[0-9_]*)+!", r"(a|a)*b", r"(a*)*b", r"x*x*x*y", r"(\w+\s?)+$"])
def test_slow_ones_are_recognised(text: str) -> None:
    assert slow(re.compile(text), ("search",))


@pytest.mark.parametrize("text", [r"^[a-z]+=", r"a{1,3}b", r"\d+", r"(?:ab)+", r"[^x]*", r"\w+@"])
def test_fast_ones_are_not(text: str) -> None:
    assert not slow(re.compile(text), ("search",))


@pytest.mark.timeout(400)
def test_no_pattern_takes_exponential_or_cubic_time() -> None:
    guilty = {
        f"{module}.{name}": f"{pattern.pattern!r}: {words}"
        for (module, name), (pattern, methods) in found_patterns().items()
        if (words := slow(pattern, methods))
    }
    for where, words in guilty.items():
        print(where, words)
    assert guilty == {}
