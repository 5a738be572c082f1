"""NVIDIA's driver library as far as kvbench calls it, compiled for tests: its GPU memory is host memory."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cuda.c")


def fake_cuda(folder: Path) -> dict[str, str]:
    """Environment under which ``libcuda.so.1`` is the fake; its copies are logged to ``folder/copies``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True, timeout=60)
    return {"LD_LIBRARY_PATH": str(folder), "KVBENCH_FAKE_CUDA_LOG": str(folder / "copies")}


def copied(folder: Path) -> dict[str, int]:
    """Bytes copied to the fake GPU (``HtoD``) and back (``DtoH``)."""
    found: dict[str, int] = {}
    for line in (folder / "copies").read_text().splitlines():
        way, count = line.split()
        found[way] = found.get(way, 0) + int(count)
    return found
