"""``python -m tools.gpu.start KIT [OPTIONS]``: the checks out of an unpacked kit. Standard library alone.

What the machine has is its own; of the kit only what it lacks is put in its way: packages into PYTHONPATH,
shared libraries and the CUDA runtime that pip brought into LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def packages(kit: Path) -> list[Path]:
    return [path for path in sorted((kit / "site").glob("*")) if importlib.util.find_spec(path.name) is None]


def missing_libraries(kit: Path) -> Path | None:
    """A folder with links to the kit's libraries that the system lacks; None where it has all."""
    target = kit / "native-used"
    target.mkdir(exist_ok=True)
    for path in sorted((kit / "native").glob("*.so*")):
        link = target / path.name
        link.unlink(missing_ok=True)
        try:
            ctypes.CDLL(path.name)
        except OSError:
            link.symlink_to(path.resolve())
    return target if any(target.iterdir()) else None


def cuda_runtimes(roots: list[str]) -> Iterator[Path]:
    """Folders with a libcudart that pip brought along with torch, or that CUDA's toolkit has."""
    for root in map(Path, dict.fromkeys(roots)):
        yield from sorted({path.parent for path in root.glob("nvidia/*/lib/libcudart.so.*")})
    yield from sorted({path.parent for path in Path("/usr/local").glob("cuda*/lib64/libcudart.so.*")})


def environment(kit: Path) -> dict[str, str]:
    native = missing_libraries(kit)
    found = {
        "PYTHONPATH": [kit, *packages(kit)],
        "LD_LIBRARY_PATH": [*([native] if native else []), *cuda_runtimes(sys.path)],
    }
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    for name, folders in found.items():
        env[name] = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(name)])])
    return env


def main(argv: list[str]) -> None:
    kit = Path(argv[0]).resolve()
    words = [sys.executable, "-m", "tools.gpu.run", *argv[1:]]
    os.execve(sys.executable, words, environment(kit))


if __name__ == "__main__":
    main(sys.argv[1:])
