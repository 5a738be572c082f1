"""The compiled parts of the hot paths, where a compiler was at hand when kvbench was installed.

``KVBENCH_PURE_PYTHON=1`` refuses them: then the Python ways are used, which give the same results.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def compiled(module: str) -> Any:
    """The extension module of that name, or None."""
    if os.environ.get("KVBENCH_PURE_PYTHON", "") not in ("", "0"):
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
