"""Rows of InferenceX, as aiconfigurator's table of measurements has them, one a load of a configuration."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from kvbench.errors import InputError

from .closed_loop import ClosedLoop, Measured, straight

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
    """One deployment at one pair of lengths, and its loads, by rising concurrency."""

    settings: dict[str, Any]
    input_len: float
    output_len: float
    loads: tuple[Measured, ...]

    @property
    def apart(self) -> bool:
        return bool(self.settings["mode"] != "agg")

    @property
    def kind(self) -> str:
        """What it is told under."""
        if not self.apart:
            return f"aggregated, {self.settings['backend']}"
        named = all(not pd.isna(self.settings.get(each)) for each in _WORKERS)
        return "P/D" if named else "P/D, workers not named"

    @property
    def half(self) -> int:
        """0: what constants may be chosen on; 1: what is reported. All lengths of a deployment are in one."""
        of_all = sorted(
            (key, str(value)) for key, value in self.settings.items() if key not in ("isl", "osl")
        )
        return hashlib.sha256(repr(of_all).encode()).digest()[0] % 2


@dataclass(frozen=True)
class Errors:
    """|predicted / measured − 1| of each load between a configuration's lowest and highest one."""

    kind: str
    half: int
    tpot: float
    tpot_line: float
    ttft: float


def read_rows(path: Path) -> tuple[list[Configuration], list[str]]:
    """The configurations with three loads or more, and what was left out. Raises InputError."""
    try:
        rows = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if missing := [name for name in NEEDED if name not in rows]:
        raise InputError(f"{path} has no columns {', '.join(missing)}")
    said = (
        rows["silicon_data_source"].astype(str)
        if "silicon_data_source" in rows
        else pd.Series("", rows.index)
    )
    rows["concurrency"] = said.str.extract(_CONCURRENCY)[0].astype(float).fillna(rows["batch_size"])
    rows["config_id"] = said.str.extract(_CONFIG)[0]
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
    """Repeats of one load are one, by their medians."""
    for concurrency, same in group.groupby("concurrency", sort=True):
        ttft, tpot = (float(same[name].median()) for name in ("silicon_ttft_ms", "silicon_tpot_ms"))
        yield Measured(float(str(concurrency)), ttft, tpot)


def errors_of(configurations: Sequence[Configuration]) -> list[Errors]:
    """Each load between the lowest and the highest, predicted from these two."""
    found = []
    for each in configurations:
        low, *between, high = each.loads
        model = ClosedLoop(low, high, each.input_len, each.output_len, each.apart)
        for at in between:
            line = straight(low, high, at.concurrency, "tpot_ms")
            ratios = (
                model.tpot_ms(at.concurrency) / at.tpot_ms,
                line / at.tpot_ms,
                model.ttft_ms(at.concurrency) / at.ttft_ms,
            )
            found.append(Errors(each.kind, each.half, *(abs(ratio - 1.0) for ratio in ratios)))
    return found


def table_rows(errors: Sequence[Errors], half: int) -> list[list[str]]:
    """By kind: how many loads, and median and P90 of their errors in percent."""
    rows = []
    for kind in sorted({each.kind for each in errors}):
        mine = [each for each in errors if each.kind == kind and each.half == half]
        if not mine:
            continue
        cells = [
            " / ".join(
                f"{100 * np.quantile([getattr(each, name) for each in mine], at):.1f}" for at in (0.5, 0.9)
            )
            for name in ("tpot", "tpot_line", "ttft")
        ]
        rows.append([kind, str(len(mine)), *cells])
    return rows
