"""A transfer as a formula, fitted to measured ones: start-up + per descriptor + bytes / bandwidth.

    time = start_s + per_descriptor_s · descriptors + nbytes / (gb_per_s · 10⁹)

for each backend, protocol, op and number of NICs, from the median call times of the cases with one transfer
under way at a time. All three are at least 0 (non-negative least squares), and a deviation counts by its
share of the time, so that a 4 KiB transfer weighs as much as one of 16 MiB. The model is stored with its
deviations and the number of ``points``: three coefficients fit a few points closely in any case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvbench.core.transfers.records import TransferRecord, pairs_of
from kvbench.errors import InputError

MODEL_SCHEMA: Final = 1
WRITTEN_BY_P: Final = frozenset({"mooncake"})
"""Backends whose connector lets P write the KV; the others' lets D read it."""
_NO_LIMIT_GB_PER_S: Final = 1e6
LEAST_POINTS: Final = 3
_RANK_TOLERANCE: Final = 1e-9

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TransferModel:
    """One way of moving bytes. ``gb_per_s`` None: the bytes have no measurable cost."""

    backend: str
    protocol: str
    op: str
    nics: int
    start_s: float
    per_descriptor_s: float
    gb_per_s: float | None
    points: int = 0
    median_error: float = 0.0
    """Median of |model − measured| / measured over the points."""
    worst_error: float = 0.0
    memory: str = "host"
    descriptors_varied: bool = True
    """Whether the points separate the cost of a descriptor from start-up and bytes."""

    def seconds(self, nbytes: float, descriptors: float = 1.0) -> float:
        """Seconds of one transfer on an idle link."""
        moving = nbytes / (self.gb_per_s * 1e9) if self.gb_per_s else 0.0
        return self.start_s + self.per_descriptor_s * descriptors + moving

    def as_link(self, block_bytes: float, pieces: int, *, merged: bool) -> tuple[float, float]:
        """Return (GB/s, seconds besides) of a KV cache's transfer.

        ``block_bytes`` counts all ranks and regions, ``pieces`` the pieces of a block at one rank. Ranks work
        off their descriptors at the same time and share the bandwidth. Where neighbouring blocks are merged
        each piece of a block is one descriptor, at the same cost for any length. Where they are not, each
        block brings its own descriptors, which makes its bytes slower."""
        per_byte = 1 / (self.gb_per_s * 1e9) if self.gb_per_s else 0.0
        if merged:
            besides = self.start_s + self.per_descriptor_s * pieces
        else:
            besides = self.start_s
            per_byte += self.per_descriptor_s * pieces / block_bytes
        return (1e-9 / per_byte if per_byte else _NO_LIMIT_GB_PER_S), besides

    @property
    def way(self) -> str:
        """``nixl over tcp, write, 4 NICs``."""
        nics = f", {self.nics} NICs" if self.nics else ""
        over = "" if self.protocol in (self.backend, "", "memory", "none") else f" over {self.protocol}"
        return f"{self.backend}{over}, {self.op}{nics}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TransferModel:
        return cls(**data)

    def formula(self) -> str:
        """``8.1 µs + 0.35 µs × descriptors + bytes / 1.2 GB/s``."""
        parts = [_time(self.start_s)]
        if self.per_descriptor_s:
            parts.append(f"{_time(self.per_descriptor_s)} × descriptors")
        if self.gb_per_s:
            parts.append(f"bytes / {self.gb_per_s:.3g} GB/s")
        return " + ".join(parts)

    def text(self) -> str:
        """Return the formula, and ``(4 points, off by 3 %, at worst 6 %)``."""
        return (
            f"{self.formula()} ({self.points} points, error {self.median_error:.1%} (median), "
            f"{self.worst_error:.1%} (worst))"
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def fit_all(records: Iterable[TransferRecord]) -> list[TransferModel]:
    """Return a model for each way of moving bytes with enough points, in the order of the records. Rows
    between several pairs of hosts have none."""
    records = list(records)
    if len(pairs_of(records)) > 1:
        return []
    ways: dict[tuple[str, str, str, int, str], list[tuple[float, float, float]]] = {}
    for record in records:
        case = record.case
        alone = case.threads == case.initiators == case.targets == 1
        moved = record.status == "ok" and record.gb_per_s is not None and record.nbytes > 0
        if moved and alone and record.call_s:
            way = (case.backend, case.protocol, case.op, case.nics, case.memory)
            point = (float(max(1, record.descriptors)), float(record.nbytes), median(record.call_s))
            ways.setdefault(way, []).append(point)
    models = []
    for (backend, protocol, op, nics, memory), points in ways.items():
        if (fitted := fit(points)) is not None:
            start, per_descriptor, per_byte, errors, varied = fitted
            models.append(
                TransferModel(
                    backend,
                    protocol,
                    op,
                    nics,
                    start,
                    per_descriptor,
                    1e-9 / per_byte if per_byte > 0 else None,
                    len(points),
                    median(errors),
                    max(errors),
                    memory,
                    varied,
                )
            )
    return models


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, list[float], bool] | None:
    """(start s, s per descriptor, s per byte, relative errors, varied) of points (descriptors, bytes, s).
    None for fewer than three points, or where no two of them differ in bytes."""
    data = np.asarray(points, np.float64)
    if len(data) < LEAST_POINTS or len(set(data[:, 1].tolist())) < 2 or not (data[:, 2] > 0).all():
        return None
    columns = np.column_stack([np.ones(len(data)), data[:, 0], data[:, 1]])
    weighted = columns / data[:, 2:3]
    varied = _rank(weighted) == 3
    if not varied:  # collinear: the bytes take the descriptors' (or start's) part
        weighted[:, 1] = 0.0
    found = nonnegative_least_squares(weighted, np.ones(len(data)))
    errors = np.abs(weighted @ found - 1.0)
    start, per_descriptor, per_byte = (float(value) for value in found)
    return start, per_descriptor, per_byte, [float(error) for error in errors], varied


def nonnegative_least_squares(matrix: Array, wanted: Array) -> Array:
    """The x ≥ 0 with the least |matrix · x − wanted|², for few columns: every set of positive ones is tried.
    The optimum is the plain least-squares solution on the columns that are positive in it, so trying all sets
    finds it. Sets whose columns depend on each other are left out, for a smaller one does as well."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(matrix.shape[1]), float(wanted @ wanted)
    usable = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            part = scaled[:, chosen]
            if _rank(part) < size:
                continue
            solution = np.linalg.lstsq(part, wanted, rcond=None)[0]
            residual = part @ solution - wanted
            badness = float(residual @ residual)
            if (solution >= 0).all() and badness < least * (1 - 1e-12):
                least = badness
                best = np.zeros(matrix.shape[1])
                best[list(chosen)] = solution / scale[list(chosen)]
    return best


def _rank(matrix: Array) -> int:
    scale = np.linalg.norm(matrix, axis=0)
    if not matrix.size or not scale.any():
        return 0
    return int(np.linalg.matrix_rank(matrix / np.where(scale > 0, scale, 1.0), tol=_RANK_TOLERANCE))


def model_for(models: Sequence[TransferModel], backend: str, protocol: str = "") -> TransferModel:
    """Return the model of a connector's hand-over by a backend: its usual op, with the most NICs. Empty
    ``protocol``: the first measured one. Raises InputError if there is none."""
    found = [model for model in models if model.backend == backend and protocol in ("", model.protocol)]
    if not found:
        over = f" over {protocol}" if protocol else ""
        there = dict.fromkeys(f"{model.backend}/{model.protocol}" for model in models)
        raise InputError(
            f"no transfer model for {backend}{over}", hint=f"known: {', '.join(there) or 'none'}"
        )
    usual = "write" if backend in WRITTEN_BY_P else "read"
    return max(found, key=lambda model: (model.protocol == found[0].protocol, model.op == usual, model.nics))


def models_of_json(data: Any) -> list[TransferModel]:
    """Return the models in the output of ``models_json``. Raises InputError."""
    if not isinstance(data, Mapping) or not isinstance(data.get("models"), list):
        raise InputError("the file has no transfer models", hint="kvbench microbench writes them")
    if data.get("schema") != MODEL_SCHEMA:
        raise InputError(f"transfer models of schema {data.get('schema')!r}, known is {MODEL_SCHEMA}")
    try:
        models = [TransferModel.from_json(item) for item in data["models"]]
        if not all(seconds >= 0 for model in models for seconds in (model.start_s, model.seconds(1.0))):
            raise ValueError("a negative time")
    except (TypeError, ValueError) as error:
        raise InputError(f"the transfer models cannot be read: {error}") from None
    return models


def models_json(models: Sequence[TransferModel], run_id: str) -> dict[str, Any]:
    """Return the content of ``tables/transfer_model.json``."""
    return {"schema": MODEL_SCHEMA, "run": run_id, "models": [model.to_json() for model in models]}
