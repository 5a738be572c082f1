"""kvbench: finds the highest request rate that prefill/decode (P/D) serving holds under its SLO.

In a notebook: ``run = kvbench.load("results/…")``, then ``run.summary``, ``run.trials``,
``run.plot.latency()``; ``kvbench.runs``, ``kvbench.compare``, ``kvbench.simulate``. All of it lies in
``kvbench.api`` and is loaded when it is asked for, so that ``import kvbench`` costs nothing.
"""

import importlib
import sys
import types

__version__ = "0.1.0"

_OFFERED = frozenset(
    {"Comparison", "Run", "columns", "compare", "load", "runs", "simulate", "simulate_splits"}
)


class _Package(types.ModuleType):
    """Gives what ``kvbench.api`` offers before a submodule of the same name.

    ``kvbench.runs`` is the function, while ``from kvbench.runs import …`` reaches the module as ever.
    """

    def __getattribute__(self, name: str) -> object:
        if name in _OFFERED:
            return getattr(importlib.import_module("kvbench.api"), name)
        return super().__getattribute__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OFFERED})


sys.modules[__name__].__class__ = _Package
