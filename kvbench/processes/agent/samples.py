"""This host during one trial: its counters before and after, and samples in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvbench.hosts.telemetry import Sampler, host_figures, read_host


class Samples:
    """Begins at once; ``taken`` ends it."""

    def __init__(
        self,
        trial_id: str,
        pids: Mapping[str, int],
        metrics_urls: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> None:
        self._system = list(pids.values())
        self._before = read_host(also=self._system)
        self._sampler = Sampler(trial_id, pids, metrics_urls, headers)
        self._sampler.__enter__()

    def taken(self) -> dict[str, Any]:
        """Rows as ``Sampler`` has them, and the machine's figures as ``HostFigures`` has them."""
        self._sampler.__exit__(None, None, None)
        return {
            "rows": self._sampler.rows,
            "figures": asdict(host_figures(self._before, read_host(also=self._system))),
        }
