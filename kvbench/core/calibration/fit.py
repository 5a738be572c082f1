"""Fit of a timing profile's coefficients to requests that an engine served.

Step times are not logged. A client sees a request's time to its first token and from there to its last: sums
over steps that depend on all concurrent requests. So ``fit`` simulates the whole load and adjusts the
coefficients until the times agree (``least_squares``). Both kinds of times are weighted by their scatter
after a first fit. ``guess`` gives the start values without simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.calibration.least_squares import F64, Estimate, least_squares
from kvbench.core.calibration.profile_file import COEFFICIENTS, timing_of_values
from kvbench.core.records import RequestRecord
from kvbench.core.simulation.data import Link, Overheads, SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.errors import InputError

_NO_TIME_MS: Final = 1e-9
_PATIENCE_S: Final = 1e9


def link_of(token_ms: float, each_ms: float, token_bytes: float) -> Link:
    """Return a link with this time per token's KV and per transfer."""
    return Link(token_bytes / (max(token_ms, _NO_TIME_MS) * 1e6), each_ms)


@dataclass(frozen=True)
class Times:
    """Per request [n]: seconds from planned send to first token, and from there to the last."""

    ttft_s: F64
    decode_s: F64

    def tpot_s(self, output_len: F64) -> F64:
        """Return TPOT; NaN for answers of one token."""
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot: F64 = np.where(output_len > 1, self.decode_s / (output_len - 1), np.nan)
        return tpot


@dataclass(frozen=True)
class ServedLoad:
    """Requests sent to a system and their token times; NaN if unknown or failed. ``system``: its limits and
    size; its step times, link and overheads are fitted."""

    name: str
    system: System
    load: SimulatedLoad
    measured: Times

    @classmethod
    def of(cls, name: str, system: System, records: Sequence[RequestRecord]) -> ServedLoad:
        """Read one trial; failed requests are part of the load but not fitted."""
        ordered = sorted(records, key=lambda record: record.scheduled_s)
        lengths = [max(1, record.output_len or record.requested_output_len) for record in ordered]
        load = SimulatedLoad(
            [record.scheduled_s for record in ordered],
            [max(1, record.input_len) for record in ordered],
            lengths,
            _PATIENCE_S,
        )
        nan = float("nan")
        ttft, decode = [], []
        for record in ordered:
            first, last = record.first_token_s, record.last_token_s
            known = record.ok and first is not None and last is not None
            ttft.append((first or 0.0) - record.scheduled_s if known else nan)
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
        known: NDArray[np.bool_] = ~np.isnan(self.measured.ttft_s)
        return known

    def predicted(self, values: Mapping[str, float]) -> Times:
        """Simulate the same requests with these coefficients (milliseconds, by name)."""
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
            np.array([record.ttft_s or 0.0 for record in records]),
            np.array([(record.last_token_s or 0.0) - (record.first_token_s or 0.0) for record in records]),
        )


NAMES: Final = (
    "front_end_ms",
    "prefill_step_ms",
    "prefill_token_ms",
    "prefill_attention_ms",
    "decode_step_ms",
    "decode_seq_ms",
    "decode_context_ms",
)
"""Columns of the counts."""
_SHARE: Final = 0.02
_FLOOR_MS: Final = 1.0
_ROUNDS: Final = 30


def guess(served: Sequence[ServedLoad], masks: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    """Return coefficients in milliseconds; 0 if the loads do not determine one. A hand-off counts as front
    end.

    A request of n tokens takes n - 1 steps from its first to its last token. The other work of these steps
    follows from the other requests: their tokens, assumed to be evenly spaced, and the prompts whose first
    tokens came in that time. So the duration is linear in the coefficients, which are solved for. Held-out
    requests are ignored."""
    rows, times = [], []
    for load, mask in zip(served, masks, strict=True):
        for counts, milliseconds in (_decodes(load, mask), _lone_prefills(load, mask)):
            rows.append(counts)
            times.append(milliseconds)
    design, observed = np.concatenate(rows), np.concatenate(times)
    sigmas = _FLOOR_MS + _SHARE * observed
    scales = observed.mean() / np.maximum(design.mean(axis=0), 1e-9) / len(NAMES)
    found = least_squares(
        lambda values: (observed - design @ values) / sigmas,
        scales,
        scales,
        np.arange(len(observed)),
        _ROUNDS,
    )
    return dict(zip(NAMES, found.values.tolist(), strict=True))


def _decodes(served: ServedLoad, mask: NDArray[np.bool_]) -> tuple[F64, F64]:
    """Return counts [m, 7] and milliseconds [m] from first to last tokens; several engines share equally."""
    arrivals, known = np.asarray(served.load.offsets_s), mask
    first = (arrivals + served.measured.ttft_s)[known]
    last = first + served.measured.decode_s[known]
    inputs, outputs = served.input_len[known], served.output_len[known]
    engines = max(1, served.system.decode)
    rows, times = [], []
    for at in np.flatnonzero(outputs > 1):
        begin, end = first[at], last[at]
        rate = (outputs - 1) / np.maximum(last - first, 1e-9)
        since, until = np.maximum(first, begin), np.minimum(last, end)
        generated = np.where(until > since, rate * (until - since), 0.0)
        middle = inputs + rate * np.maximum((since + until) / 2 - first, 0.0)
        others = np.arange(len(first)) != at
        share = np.where(others, 1.0 / engines, 1.0)
        begun = (first > begin) & (first <= end) & others & (not served.system.prefill)
        steps = outputs[at] - 1
        with_prompts = min(float(begun.sum()) / engines, steps)
        rows.append(
            [
                0.0,
                with_prompts,
                float(inputs[begun].sum()) / engines,
                float((inputs[begun] ** 2).sum()) / engines,
                steps - with_prompts,
                float((generated * share).sum()),
                float((generated * middle * share).sum()),
            ]
        )
        times.append(1e3 * (end - begin))
    return np.array(rows).reshape(-1, len(NAMES)), np.array(times)


def _lone_prefills(served: ServedLoad, mask: NDArray[np.bool_]) -> tuple[F64, F64]:
    """Return the same for first tokens with no or the shortest wait: the fastest per length."""
    inputs, ttft = served.input_len[mask], 1e3 * served.measured.ttft_s[mask]
    order = np.argsort(inputs)
    picked = [
        part[np.argmin(ttft[part])] for part in np.array_split(order, max(4, len(order) // 8)) if len(part)
    ]
    budget = served.system.config.max_num_batched_tokens
    rows = [[1.0, -(-n // budget), n, n * n, 0.0, 0.0, 0.0] for n in inputs[picked]]
    return np.array(rows).reshape(-1, len(NAMES)), ttft[picked]


Mask = NDArray[np.bool_]

_TTFT_SHARE: Final = 0.1
_TTFT_FLOOR_S: Final = 0.002
_DECODE_SHARE: Final = 0.01
_DECODE_FLOOR_S: Final = 0.0005
"""Assumed errors of both kinds of times in the first fit."""
_CLUSTER: Final = 10
"""Consecutive requests per cluster of the covariance."""
_LEAST_RMS: Final = 1e-3
"""Smallest scatter, in first-fit sigmas, used as a weight."""
_TRANSFER: Final = ("transfer_ms", "transfer_token_ms")
_ASIDE: Final = 1.25
"""Offset factor of the further start values."""
_ALIKE: Final = 1.5
"""Sums of squares within this factor of the least are equally good fits."""
_REQUEST: Final = "prefill_request_ms"
_TAKEN: Final = 0.8
"""Share of another coefficient used as start value of the time per prompt."""
_LONGER: Final = 4
"""Factor on the rounds: the path along a narrow valley is long."""
_BETTER: Final = 2.0
"""Factor by which the sum of squares must drop to accept a time per prompt."""
_UNDETERMINED: Final = 1.0
"""Relative error above which a coefficient is undetermined."""


@dataclass(frozen=True)
class FittedTiming:
    """Coefficients by name, in milliseconds, with their covariance [n, n] in the same order."""

    values: dict[str, float]
    covariance: F64
    rms: tuple[float, float]
    """Residual scatter of first tokens and decodes, as shares of the measured time."""
    requests: int

    @property
    def errors(self) -> dict[str, float]:
        return dict(
            zip(self.values, np.sqrt(np.maximum(np.diag(self.covariance), 0.0)).tolist(), strict=True)
        )

    @property
    def undetermined(self) -> list[str]:
        """Return the coefficients with an error above their value."""
        errors = self.errors
        return [name for name, value in self.values.items() if errors[name] > _UNDETERMINED * value]

    def draws(self, count: int, seed: int) -> list[dict[str, float]]:
        """Draw coefficients from the fit's uncertainty; none is below 0."""
        return drawn(self.values, self.covariance, count, seed)


def drawn(values: Mapping[str, float], covariance: F64, count: int, seed: int) -> list[dict[str, float]]:
    """Draw coefficients from a normal distribution, cut off at 0."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    levels, ways = np.linalg.eigh(covariance / np.outer(scale, scale))
    root = ways * np.sqrt(np.maximum(levels, 0.0))
    middle = np.array(list(values.values()))
    return [
        dict(
            zip(
                values,
                np.maximum(middle + scale * (root @ rng.normal(size=len(middle))), 0.0).tolist(),
                strict=True,
            )
        )
        for _ in range(count)
    ]


def fit(served: Sequence[ServedLoad], used: Sequence[Mask] | None = None, rounds: int = 8) -> FittedTiming:
    """Fit all loads together to the requests in ``used``. Raises InputError if there are too few."""
    masks = [load.known if used is None else load.known & used[at] for at, load in enumerate(served)]
    count = int(sum(mask.sum() for mask in masks))
    names = _fitted_names(served)
    if count < 2 * len(names):
        raise InputError(
            f"{count} requests with known times cannot fit {len(names)} coefficients",
            hint=f"send at least {2 * len(names)} requests, at several lengths and loads",
        )
    start, scales = _first_guess(served, masks, names)
    clusters = np.concatenate(_clusters(served, masks))
    first = _Problem(served, masks, names, (1.0, 1.0))
    begun = [
        least_squares(first.residuals, start * factor, scales, clusters, rounds)
        for factor in _begins(len(names))
    ]
    best = min(begun, key=lambda run: float(run.residuals @ run.residuals))
    weights = first.spread(best.residuals)
    second = _Problem(served, masks, names, weights)
    found = least_squares(second.residuals, best.values, scales, clusters, rounds)
    more = _Problem(served, masks, [*names, _REQUEST], weights)
    estimate = _with_request_time(more, found, start, names, scales, clusters, rounds)
    if estimate is not None:
        values = dict(zip([*names, _REQUEST], estimate.values.tolist(), strict=True))
        return FittedTiming(values, estimate.covariance, _rms(weights), count)
    return FittedTiming(
        dict(zip(names, found.values.tolist(), strict=True)),
        found.covariance + _between(found, begun, first),
        _rms(weights),
        count,
    )


def _rms(weights: tuple[float, float]) -> tuple[float, float]:
    return weights[0] * _TTFT_SHARE, weights[1] * _DECODE_SHARE


def _with_request_time(
    problem: _Problem,
    without: Estimate,
    start: F64,
    names: Sequence[str],
    scales: F64,
    clusters: NDArray[np.int64],
    rounds: int,
) -> Estimate | None:
    """Repeat the fit with a time per prompt, or return None if the load does not determine it. It differs
    from step and front end times only if steps compute several prompts. The residuals must clearly shrink,
    and the coefficient's error must be below half of it."""
    front = list(names).index("front_end_ms")
    begin = np.append(start, _TAKEN * start[front])
    begin[front] *= 1 - _TAKEN
    sizes = np.append(scales, max(float(scales[front]), float(begin[-1])))
    found = least_squares(problem.residuals, begin, sizes, clusters, _LONGER * rounds)
    before, after = (float(estimate.residuals @ estimate.residuals) for estimate in (without, found))
    error = math.sqrt(max(float(found.covariance[-1, -1]), 0.0))
    return found if after < before / _BETTER and error < 0.5 * found.values[-1] else None


def _begins(count: int) -> list[F64]:
    """Return factors on the first guess: unchanged, and alternately too high and too low."""
    up = np.where(np.arange(count) % 2 == 0, _ASIDE, 1.0 / _ASIDE)
    return [np.ones(count), up, 1.0 / up]


def _between(found: Estimate, begun: Sequence[Estimate], problem: _Problem) -> F64:
    """Return the covariance [n, n] between equally good searches (the sum of squares has many minima)."""
    least = min(float(run.residuals @ run.residuals) for run in begun)
    alike = [run.values for run in begun if float(run.residuals @ run.residuals) <= _ALIKE * least]
    apart = np.stack([found.values, *alike]) - found.values
    result: F64 = apart.T @ apart / len(alike)
    return result


def bounded(residuals: F64) -> F64:
    """Return Huber's loss as residuals: a request that just misses a step is an outlier."""
    size = np.abs(residuals)
    result: F64 = np.sign(residuals) * np.where(size > 1.0, np.sqrt(np.maximum(2.0 * size - 1.0, 1.0)), size)
    return result


class _Problem:
    """Residuals of all loads: first all first tokens, then decodes."""

    def __init__(
        self,
        served: Sequence[ServedLoad],
        masks: Sequence[Mask],
        names: Sequence[str],
        weights: tuple[float, float],
    ) -> None:
        self._served, self._masks, self._names = served, masks, names
        self._sigmas = [_sigmas(load.measured, weights) for load in served]
        self._firsts = int(sum(mask.sum() for mask in masks))

    def residuals(self, values: F64) -> F64:
        named = dict(zip(self._names, values.tolist(), strict=True))
        firsts, decodes = [], []
        for load, mask, (first, decode) in zip(self._served, self._masks, self._sigmas, strict=True):
            times = load.predicted(named)
            firsts.append(((load.measured.ttft_s - times.ttft_s) / first)[mask])
            decodes.append(((load.measured.decode_s - times.decode_s) / decode)[mask])
        return bounded(np.concatenate([*firsts, *decodes]))

    def spread(self, residuals: F64) -> tuple[float, float]:
        parts = residuals[: self._firsts], residuals[self._firsts :]
        first, decode = (float(np.sqrt(np.mean(part**2))) for part in parts)
        return max(first, _LEAST_RMS), max(decode, _LEAST_RMS)


def _sigmas(measured: Times, weights: tuple[float, float]) -> tuple[F64, F64]:
    return (
        weights[0] * (_TTFT_FLOOR_S + _TTFT_SHARE * measured.ttft_s),
        weights[1] * (_DECODE_FLOOR_S + _DECODE_SHARE * measured.decode_s),
    )


def _clusters(served: Sequence[ServedLoad], masks: Sequence[Mask]) -> list[NDArray[np.int64]]:
    ids, first = [], 0
    for mask in masks:
        ids.append(first + np.arange(int(mask.sum()), dtype=np.int64) // _CLUSTER)
        first += 1 + int(mask.sum()) // _CLUSTER
    return [*ids, *ids] if served else []


def _fitted_names(served: Sequence[ServedLoad]) -> list[str]:
    moved = any(load.system.prefill for load in served)
    decodes = any((load.output_len > 1).any() for load in served)
    lengths = np.unique(np.concatenate([load.input_len for load in served]))
    left_out = {_REQUEST, "front_end_token_ms"}
    # A client's times do not separate the front end's time per token from the engine's.
    left_out |= set() if moved else set(_TRANSFER)
    left_out |= {"decode_seq_ms", "decode_context_ms"} if not decodes else set()
    left_out |= {"prefill_attention_ms"} if len(lengths) < 3 else set()
    left_out |= {"transfer_token_ms"} if len(lengths) < 2 else set()
    return [name for name in COEFFICIENTS if name not in left_out]


def _first_guess(
    served: Sequence[ServedLoad], masks: Sequence[Mask], names: Sequence[str]
) -> tuple[F64, F64]:
    """Return the start values and the scale of each coefficient."""
    found = guess(served, masks)
    ttft = np.concatenate([load.measured.ttft_s[mask] for load, mask in zip(served, masks, strict=True)])
    inputs = np.concatenate([load.input_len[mask] for load, mask in zip(served, masks, strict=True)])
    token, step = max(found["prefill_token_ms"], 1e-6), max(found["decode_step_ms"], 1e-3)
    least = 1e3 * float(np.percentile(ttft, 5))
    usual = {
        "front_end_ms": 0.1 * least,
        "prefill_step_ms": 0.2 * least,
        "prefill_token_ms": token,
        "prefill_attention_ms": 0.05 * token / float(np.max(inputs)),
        "decode_step_ms": step,
        "decode_seq_ms": 0.005 * step,
        "decode_context_ms": 0.005 * step / float(np.mean(inputs)),
        "transfer_ms": 0.1 * least,
        "transfer_token_ms": 0.1 * token,
    }
    scales = np.array([max(usual[name], 1e-9) for name in names])
    return np.array([found.get(name, usual[name]) for name in names]), scales
