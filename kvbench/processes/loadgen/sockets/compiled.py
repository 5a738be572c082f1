"""The compiled part of the load generator's hot path, or None (kvbench.processes.common.compiled)."""

from __future__ import annotations

from typing import Final

from kvbench.processes.common.compiled import compiled

READS: Final = compiled("kvbench.processes.loadgen.sockets._reads")
"""The module, or None."""
WAY: Final = "python" if READS is None else "compiled"
"""How what arrives is read, as the records' client figures name it."""
