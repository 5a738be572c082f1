"""The sanitizers: each sees the fault that was put there for it, in a Python that knows nothing of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.sanitize.__main__ import (
    CANARY,
    ROOT,
    SANITIZERS,
    TESTS,
    NotRunError,
    compiler,
    environment,
    hear,
    modules,
)


def test_all_extension_modules_are_compiled_and_all_tests_are_there() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    found = modules(ROOT)
    assert found == {"_heads", "_queues", "_reads", "_splice"}
    assert config.count("[[tool.setuptools.ext-modules]]") == len(found)
    assert all((ROOT / name).exists() for name in TESTS)


@pytest.mark.parametrize("name", SANITIZERS)
def test_a_sanitizer_sees_its_canaries(name: str, tmp_path: Path) -> None:
    sanitizer = SANITIZERS[name]
    try:
        words = [compiler(), *sanitizer.flags, "-shared", "-fPIC", "-o", "canary.so", str(CANARY)]
        subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=100, check=False)
        if not (tmp_path / "canary.so").exists():
            pytest.skip("the C compiler has no such sanitizer")
        around = environment(sanitizer, tmp_path)
        hear(sanitizer, tmp_path, around)
    except NotRunError as error:
        pytest.skip(str(error))
    # Without the sanitizer nobody says anything, and what is silent is not believed.
    quiet = {"LD_PRELOAD": "", "PYTHONPATH": str(tmp_path)}
    words = [compiler(), "-shared", "-fPIC", "-o", "canary.so", str(CANARY)]
    subprocess.run(words, cwd=tmp_path, timeout=100, check=True)
    with pytest.raises(NotRunError, match="a deliberate fault was not seen"):
        hear(sanitizer, tmp_path, quiet)
