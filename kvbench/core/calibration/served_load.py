"""A load as an engine served it, and the same load as the model serves it with given coefficients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.calibration.profile_file import timing_of_values
from kvbench.core.records import RequestRecord
from kvbench.core.simulation.data import Link, Overheads, SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate

F64 = NDArray[np.float64]

_NO_TIME_MS: Final = 1e-9
_PATIENCE_S: Final = 1e9


def link_of(token_ms: float, each_ms: float, token_bytes: float) -> Link:
    """A link that takes so long for the KV of a token, and so long for each transfer besides."""
    return Link(token_bytes / (max(token_ms, _NO_TIME_MS) * 1e6), each_ms)


@dataclass(frozen=True)
class Times:
    """Of each request [n]: seconds to its first token from its planned send, and from there to its last."""

    ttft_s: F64
    decode_s: F64

    def tpot_s(self, output_len: F64) -> F64:
        """NaN for answers of one token."""
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot: F64 = np.where(output_len > 1, self.decode_s / (output_len - 1), np.nan)
        return tpot


@dataclass(frozen=True)
class ServedLoad:
    """What was sent to a system, and when its tokens came; NaN: not known, or the request failed.

    ``system``: its limits and its size; its step times, link and overheads are what is looked for.
    """

    name: str
    system: System
    load: SimulatedLoad
    measured: Times

    @classmethod
    def of(cls, name: str, system: System, records: Sequence[RequestRecord]) -> ServedLoad:
        """The requests of one trial; those that failed are part of the load, and are not fitted."""
        ordered = sorted(records, key=lambda each: each.scheduled_s)
        lengths = [max(1, each.output_len or each.requested_output_len) for each in ordered]
        load = SimulatedLoad(
            [each.scheduled_s for each in ordered],
            [max(1, each.input_len) for each in ordered],
            lengths,
            _PATIENCE_S,
        )
        nan = float("nan")
        ttft, decode = [], []
        for each in ordered:
            first, last = each.first_token_s, each.last_token_s
            known = each.ok and first is not None and last is not None
            ttft.append((first or 0.0) - each.scheduled_s if known else nan)
            decode.append((last or 0.0) - (first or 0.0) if known else nan)
        return cls(name, system, load, Times(np.array(ttft), np.array(decode)))

    @property
    def input_len(self) -> F64:
        return np.asarray(self.load.input_len, dtype=float)

    @property
    def output_len(self) -> F64:
        return np.asarray(self.load.output_len, dtype=float)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which requests have times."""
        known: NDArray[np.bool_] = ~np.isnan(self.measured.ttft_s)
        return known

    def predicted(self, values: Mapping[str, float]) -> Times:
        """The same requests on virtual time, with these coefficients (milliseconds, by name)."""
        tokens = self.system.config.block_tokens
        link = link_of(
            values.get("transfer_token_ms", 0.0),
            values.get("transfer_ms", 0.0),
            self.system.block_bytes / tokens,
        )
        timing = timing_of_values(values)
        system = replace(
            self.system, timing=timing, decode_timing=None, time_scale=1.0, link=link, overheads=Overheads()
        )
        records = simulate(system, self.load).records
        return Times(
            np.array([each.ttft_s or 0.0 for each in records]),
            np.array([(each.last_token_s or 0.0) - (each.first_token_s or 0.0) for each in records]),
        )
