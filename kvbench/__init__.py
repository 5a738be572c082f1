"""kvbench: finds the highest request rate that prefill/decode (P/D) serving holds under its SLO.

In a notebook: ``run = kvbench.load("results/…")``, then ``run.summary``, ``run.trials``,
``run.plot.latency()``; ``kvbench.runs``, ``kvbench.compare``, ``kvbench.simulate``. All of it lies in
``kvbench.api`` and is loaded when it is asked for, so that ``import kvbench`` costs nothing.
"""

import importlib

from kvbench.version import __version__ as __version__

_OFFERED = frozenset(
    {"Comparison", "Run", "columns", "compare", "load", "runs", "simulate", "simulate_splits"}
)


def __getattr__(name: str) -> object:
    if name in _OFFERED:
        return getattr(importlib.import_module("kvbench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
