"""A microbenchmark's rows once more, from the times of their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from kvbench.errors import StoreError
from kvbench.results.checksums import Damage
from kvbench.results.parquet import TRANSFERS
from kvbench.results.run import RunFolder


def transfer_damages(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    """Rates that are not bytes by time, and rows whose calls are not all there. ``checked`` counts rows."""
    try:
        rows = run.transfer_records()
    except StoreError as error:
        yield Damage(TRANSFERS, error.message)
        return
    for row in rows:
        if row.status != "ok" or not row.call_s:
            continue
        checked["transfers"] += 1
        if row.calls != len(row.call_s):
            yield Damage(TRANSFERS, f"{row.case.key}: calls", str(row.calls), str(len(row.call_s)))
        if row.gb_per_s is not None and row.window_s > 0:
            rate = row.nbytes * row.calls / row.window_s / 1e9
            if not math.isclose(row.gb_per_s, rate, rel_tol=1e-6):
                yield Damage(TRANSFERS, f"{row.case.key}: gb_per_s", f"{row.gb_per_s:.9g}", f"{rate:.9g}")
