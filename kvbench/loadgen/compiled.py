"""The compiled part of the hot path, where a compiler was at hand when kvbench was installed.

``KVBENCH_PURE_PYTHON=1`` refuses it: then the Python way is used, which gives the same results.
"""

from __future__ import annotations

import os
from typing import Any, Final


def _found() -> Any:
    if os.environ.get("KVBENCH_PURE_PYTHON", "") not in ("", "0"):
        return None
    try:
        from kvbench.loadgen import _reads
    except ImportError:
        return None
    return _reads


READS: Final = _found()
"""The module, or None."""
WAY: Final = "python" if READS is None else "compiled"
"""How what arrives is read, as the records' client figures name it."""
