"""How far predictions are from what others measured: ``make perf-predict``. It judges nothing.

Give a folder with InferenceX's rows (``*.csv``, as aiconfigurator's silicon_sample.csv has them, one a load
of a configuration) and real vLLM runs that LLMServingSim publishes beside its simulations (folders with a
``requests.jsonl``), at any depth. The runs are predicted from their first requests.

InferenceX is a closed loop. TPOT and TTFT between two of its loads follow from the lowest and the highest:
1. X = concurrency / (TTFT + output_len × TPOT) requests a second (Little); n = X × output_len × TPOT decode.
2. A step takes a + b × n ** BATCH_POWER. Prefills stop decoding, in engines that do both, for the share X ×
   input_len × k of the time, so that TPOT = (a + b × n ** BATCH_POWER) / (1 − X × input_len × k).
3. k is PREFILL_SHARE of the lowest load's TTFT a token: the rest is the front end, and waiting. a and b
   follow from the two loads; where b would be negative, it is 0, and k is what remains.
4. TTFT is a straight line over the concurrency: two figures do not show when prompts begin to wait.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.core.calibration.fit import Times, fit
from kvbench.core.calibration.held_out import later_part
from kvbench.errors import InputError
from kvbench.sweep.calibrate import EngineLimits, read_inputs
from tools.bench import table

PREFILL_SHARE: Final = 0.3
BATCH_POWER: Final = 0.8
"""Both were chosen on one half of the InferenceX configurations, split by a hash of their settings. Reported
figures are of the other half (docs/prediction.md)."""
_MOST_PREFILL: Final = 0.95
_ROUNDS: Final = 80
_APART_POWER: Final = 0.7


@dataclass(frozen=True)
class Measured:
    """One load of a configuration: requests under way, and times in ms."""

    concurrency: float
    ttft_ms: float
    tpot_ms: float


def interpolate(low: Measured, high: Measured, concurrency: float, name: str) -> float:
    share = (concurrency - low.concurrency) / (high.concurrency - low.concurrency)
    begin, end = float(getattr(low, name)), float(getattr(high, name))
    return begin + share * (end - begin)


@dataclass(frozen=True)
class ClosedLoop:
    """Model of a configuration, from two of its loads. ``apart``: prefill and decode in separate engines."""

    low: Measured
    high: Measured
    input_len: float
    output_len: float
    apart: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.low.concurrency < self.high.concurrency:
            raise ValueError("two loads are needed, the lower one first")

    @property
    def power(self) -> float:
        return _APART_POWER if self.apart else BATCH_POWER

    def tpot_ms(self, concurrency: float) -> float:
        """Predict TPOT, within the values at the two loads. Raises ValueError for a load outside of them."""
        if not self.low.concurrency <= concurrency <= self.high.concurrency:
            raise ValueError(f"{concurrency:g} is not between the loads that were measured")
        base, slope, prefill_ms = self._coefficients()
        found = interpolate(self.low, self.high, concurrency, "tpot_ms")
        ttft = self.ttft_ms(concurrency)
        least, most = sorted((self.low.tpot_ms, self.high.tpot_ms))
        for _ in range(_ROUNDS):
            at = Measured(concurrency, ttft, found)
            busy = min(_MOST_PREFILL, self._throughput(at) * self.input_len * prefill_ms)
            found = (found + (base + slope * self._batch(at)) / (1.0 - busy)) / 2
            found = min(max(found, least), most)
        return found

    def ttft_ms(self, concurrency: float) -> float:
        return interpolate(self.low, self.high, concurrency, "ttft_ms")

    def _throughput(self, at: Measured) -> float:
        return at.concurrency / (at.ttft_ms + self.output_len * at.tpot_ms)

    def _batch(self, at: Measured) -> float:
        decoding = self._throughput(at) * self.output_len * at.tpot_ms
        return float(decoding**self.power)

    def _coefficients(self) -> tuple[float, float, float]:
        """Return a, b, and ms of prefill per prompt token."""
        prefill_ms = 0.0 if self.apart else PREFILL_SHARE * self.low.ttft_ms / self.input_len
        base, slope = self._step(prefill_ms)
        if slope < 0 and not self.apart:
            # TPOT × (1 − X × input_len × k) is equal at both loads.
            spread = [self._throughput(at) * self.input_len * at.tpot_ms for at in (self.low, self.high)]
            grown = self.high.tpot_ms - self.low.tpot_ms
            prefill_ms = max(0.0, grown / (spread[1] - spread[0])) if spread[1] > spread[0] else 0.0
            base, slope = self._step(prefill_ms)
        return base, slope, prefill_ms

    def _step(self, prefill_ms: float) -> tuple[float, float]:
        steps, batches = [], []
        for at in (self.low, self.high):
            busy = min(_MOST_PREFILL, self._throughput(at) * self.input_len * prefill_ms)
            steps.append(at.tpot_ms * (1.0 - busy))
            batches.append(self._batch(at))
        slope = (steps[1] - steps[0]) / (batches[1] - batches[0]) if batches[1] != batches[0] else 0.0
        return steps[0] - slope * batches[0], slope


NEEDED: Final = ("backend", "mode", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms", "batch_size")
_OF_A_ROW: Final = {
    *("id", "silicon_data_source", "silicon_ttft_ms", "silicon_tpot_ms"),
    *("batch_size", "decode_batch_size", "prefill_batch_size", "concurrency"),
}
_WORKERS: Final = ("prefill_num_workers", "decode_num_workers")
_CONCURRENCY: Final = re.compile(r"silicon_concurrency=(\d+)")
_CONFIG: Final = re.compile(r"config_id=(\d+)")


@dataclass(frozen=True)
class Configuration:
    """One deployment at one pair of lengths, with its loads by rising concurrency."""

    settings: dict[str, Any]
    input_len: float
    output_len: float
    loads: tuple[Measured, ...]

    @property
    def apart(self) -> bool:
        return bool(self.settings["mode"] != "agg")

    @property
    def kind(self) -> str:
        """Label of the row in the table."""
        if not self.apart:
            return f"aggregated, {self.settings['backend']}"
        named = all(not pd.isna(self.settings.get(name)) for name in _WORKERS)
        return "P/D" if named else "P/D, workers not named"

    @property
    def half(self) -> int:
        """0: for choosing constants; 1: for reported figures. All lengths of a deployment are in one half."""
        of_all = sorted(
            (key, str(value)) for key, value in self.settings.items() if key not in ("isl", "osl")
        )
        return hashlib.sha256(repr(of_all).encode()).digest()[0] % 2


@dataclass(frozen=True)
class Errors:
    kind: str
    half: int
    tpot: float
    tpot_line: float
    ttft: float


def read_rows(path: Path) -> tuple[list[Configuration], list[str]]:
    """Return the configurations with at least three loads, and notes on the others. Raises InputError."""
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if missing := [name for name in NEEDED if name not in rows]:
        raise InputError(f"{path} has no columns {', '.join(missing)}")
    source = (
        rows["silicon_data_source"].astype(str)
        if "silicon_data_source" in rows
        else pd.Series("", rows.index)
    )
    rows["concurrency"] = source.str.extract(_CONCURRENCY)[0].astype(float).fillna(rows["batch_size"])
    rows["config_id"] = source.str.extract(_CONFIG)[0]
    figures = ["isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms", "concurrency"]
    rows[figures] = rows[figures].apply(pd.to_numeric, errors="coerce")
    sound = rows[figures].notna().all(axis=1) & (rows[figures] > 0).all(axis=1)
    notes = [f"{(~sound).sum()} rows have no figure, or one that is not above 0"] if not sound.all() else []
    keys = [name for name in rows if name not in _OF_A_ROW]
    found, few = [], 0
    for values, group in rows[sound].groupby(keys, dropna=False, sort=True):
        loads = tuple(_loads(group))
        if len(loads) < 3:
            few += len(loads)
            continue
        settings: dict[str, Any] = dict(zip(map(str, keys), values, strict=True))
        found.append(Configuration(settings, float(settings["isl"]), float(settings["osl"]), loads))
    if few:
        notes.append(f"{few} loads are of configurations with fewer than three")
    return found, notes


def _loads(group: pd.DataFrame) -> Iterator[Measured]:
    """Yield one value per load: the median of its repeats."""
    for concurrency, same in group.groupby("concurrency", sort=True):
        ttft, tpot = (float(same[name].median()) for name in ("silicon_ttft_ms", "silicon_tpot_ms"))
        yield Measured(float(str(concurrency)), ttft, tpot)


def errors_of(configurations: Sequence[Configuration]) -> list[Errors]:
    """Predict each load between the lowest and the highest from these two; return the relative errors."""
    found = []
    for config in configurations:
        low, *between, high = config.loads
        model = ClosedLoop(low, high, config.input_len, config.output_len, config.apart)
        for at in between:
            line = interpolate(low, high, at.concurrency, "tpot_ms")
            ratios = (
                model.tpot_ms(at.concurrency) / at.tpot_ms,
                line / at.tpot_ms,
                model.ttft_ms(at.concurrency) / at.ttft_ms,
            )
            found.append(Errors(config.kind, config.half, *(abs(ratio - 1.0) for ratio in ratios)))
    return found


def table_rows(errors: Sequence[Errors], half: int) -> list[list[str]]:
    rows = []
    for kind in sorted({error.kind for error in errors}):
        selected = [error for error in errors if error.kind == kind and error.half == half]
        if not selected:
            continue
        cells = [
            " / ".join(
                f"{100 * np.quantile([getattr(e, name) for e in selected], at):.1f}" for at in (0.5, 0.9)
            )
            for name in ("tpot", "tpot_line", "ttft")
        ]
        rows.append([kind, str(len(selected)), *cells])
    return rows


F64 = NDArray[np.float64]
STATISTICS: Final = ("TTFT Mean", "TTFT P99", "TPOT Mean", "TPOT P99")
_THEIRS: Final = re.compile(r"^(T[TP][FO]T \w+)\s+[\d.]+\s+[\d.]+\s+([+-][\d.]+)%", re.MULTILINE)


@dataclass(frozen=True)
class Predicted:
    """Predicted / measured − 1 by statistic, for one run. ``theirs``: LLMServingSim's, of the whole run."""

    name: str
    fitted: int
    rest: dict[str, float]
    whole: dict[str, float]
    theirs: dict[str, float]


def predicted(folder: Path, share: float) -> Predicted:
    """Fit to the first ``share`` of the requests; predict the others, and all, from their arrivals.

    Raises InputError if the folder is not a run of LLMServingSim.
    """
    (served,) = read_inputs([folder], EngineLimits()).loads
    (used,) = later_part([served], 1.0 - share)
    found = served.predicted(fit([served], [used]).values)

    def errors(mask: NDArray[np.bool_]) -> dict[str, float]:
        measured, ours = (_statistics(times, served.output_len, mask) for times in (served.measured, found))
        return {name: ours[name] / measured[name] - 1.0 for name in STATISTICS}

    summary = folder / "summary.txt"
    text = summary.read_text(encoding="utf-8", errors="replace") if summary.is_file() else ""
    theirs = {name: float(error) / 100 for name, error in _THEIRS.findall(text) if name in STATISTICS}
    return Predicted(folder.name, int(used.sum()), errors(served.known & ~used), errors(served.known), theirs)


def _statistics(times: Times, output_len: F64, mask: NDArray[np.bool_]) -> dict[str, float]:
    ttft, tpot = times.ttft_s[mask], times.tpot_s(output_len)[mask]
    tpot = tpot[np.isfinite(tpot)]
    values = (ttft.mean(), np.percentile(ttft, 99), tpot.mean(), np.percentile(tpot, 99))
    return dict(zip(STATISTICS, map(float, values), strict=True))


def main(given: Sequence[str] | None = None) -> int:
    """Print a table for each kind of data in the folder; return 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="of InferenceX's configurations")
    parser.add_argument("--share", type=float, default=1 / 3, help="of a recorded run's requests, to fit to")
    options = parser.parse_args(given)
    tables, runs = sorted(options.folder.rglob("*.csv")), sorted(options.folder.rglob("requests.jsonl"))
    seen = 0
    for path in tables:
        if path.with_name("requests.jsonl") not in runs:  # skip a run's time series
            seen += _print_rows(path, options.half)
    seen += _print_runs([path.parent for path in runs], options.share)
    if not seen:
        print(f"{options.folder} has neither rows of InferenceX nor runs of LLMServingSim")
    return 0 if seen else 1


def _print_rows(path: Path, half: int) -> bool:
    try:
        configurations, notes = read_rows(path)
    except InputError as error:
        print(error)
        return False
    title = f"{path.name}, half {half}: |error| P50 / P90 (%) between lowest and highest load"
    rows = table_rows(errors_of(configurations), half)
    print(table("configurations", "loads|TPOT|TPOT, straight line|TTFT", rows, title), *notes, sep="\n")
    return True


def _print_runs(folders: Sequence[Path], share: float) -> bool:
    rows: list[list[str]] = []
    for folder in folders:
        try:
            found = predicted(folder, share)
        except InputError as error:
            print(error)
            continue
        kinds = {"the rest": found.rest, "the whole run": found.whole, "LLMServingSim": found.theirs}
        for kind, errors in kinds.items():
            first = (found.name, str(found.fitted)) if kind == "the rest" else ("", "")
            values = (f"{100 * errors[name]:+.1f}" if name in errors else "–" for name in STATISTICS)
            rows.append([*first, kind, *values])
    if rows:
        print(table("run|fitted to|", "|".join(STATISTICS), rows, "predicted / measured − 1 (%)"))
    return bool(rows)


if __name__ == "__main__":
    sys.exit(main())
