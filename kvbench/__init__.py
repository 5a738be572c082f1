"""kvbench: find the highest request rate that prefill/decode (P/D) serving sustains within its SLO.

In a notebook: ``run = kvbench.load("results/…")``, then ``run.summary``, ``run.trials``,
``run.plot.latency()``; ``kvbench.runs``, ``kvbench.compare``, ``kvbench.simulate``. They are imported from
``kvbench.api`` on first use, so ``import kvbench`` is fast."""

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
