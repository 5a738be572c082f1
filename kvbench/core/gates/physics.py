"""Gates on physics: no figure may be beyond what the hardware can do."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.gates.evidence import Evidence
from kvbench.core.records import Finding

MARGIN: Final = 1.02
"""Clocks and data sheets are not exact."""
STARTS: Final = 400
"""Beginnings of intervals that are tried; more find a little more and cost time."""
LEAST_S: Final = 1e-4


def impossible_prefill(evidence: Evidence) -> Finding | None:
    """Prefill was no faster than its GPUs can compute.

    In any interval, the prompts that were sent after its begin and had their first token before its end were
    computed inside it: 2 × parameters × tokens + attention, against the highest dense peak of all prefill
    GPUs. No cache, counter or report can hide that.

    evidence: send and first-token times of the requests. limits: silent for models and GPUs that are not
    known (``model.active_parameters``, ``deployment.hardware``), and where reuse was asked for.
    """
    work, peak = evidence.prefill_work, evidence.prefill_flops
    if work is None or not peak or evidence.reuse_expected:
        return None
    times = [
        (record.sent_s, record.first_token_s, work.flop(record.input_len))
        for record in evidence.records
        if record.sent_s is not None and record.first_token_s is not None
    ]
    if not times:
        return None
    flops, flop, seconds = fastest_interval(np.array(times, dtype=np.float64))
    if flops <= peak * MARGIN:
        return None
    return Finding(
        "impossible_prefill",
        "invalid",
        f"prefill would have computed {flop / 1e12:.1f} TFLOP in {seconds * 1e3:.1f} ms, {flops / peak:.1f} "
        f"times the {peak / 1e12:.0f} TFLOP/s of {evidence.hardware or 'its GPUs'}: it did not compute them",
        "prompts come from a cache or are not computed: empty the prefix cache, use fresh prompts; check "
        "deployment.hardware and model.active_parameters",
        {
            "flop_per_s": flops,
            "peak": peak,
            "flop": flop,
            "seconds": seconds,
            "parameters": work.source,
        },
    )


def fastest_interval(times: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(FLOP/s, FLOP, seconds) of the interval with the highest rate. Rows: begin, end, FLOP of a request."""
    by_end = times[np.argsort(times[:, 1])]
    starts = np.unique(by_end[:, 0])
    if len(starts) > STARTS:
        starts = starts[np.linspace(0, len(starts) - 1, STARTS).astype(int)]
    best = (0.0, 0.0, 0.0)
    for start in starts:
        inside = by_end[by_end[:, 0] >= start]
        seconds = np.maximum(inside[:, 1] - start, LEAST_S)
        done = np.cumsum(inside[:, 2])
        place = int(np.argmax(done / seconds))
        rate = float(done[place] / seconds[place])
        if rate > best[0]:
            best = (rate, float(done[place]), float(seconds[place]))
    return best


def impossible_transfer(evidence: Evidence) -> Finding | None:
    """KV moved no faster than the NICs' line rate.

    evidence: bytes over seconds of the transfers, as the connector counts them: the mean rate of one transfer
    cannot exceed what all NICs of an instance carry together. limits: silent on loopback and inside one host,
    and where no link speed is known (``deployment.nic_gbit``).
    """
    line = evidence.kv_line_rate
    if not line:
        return None
    for role, engine in evidence.engines.items():
        moved, seconds = engine.kv_bytes, engine.kv_seconds
        if not moved or seconds is None or moved <= line * seconds * MARGIN:
            continue
        rate = moved / max(seconds, 1e-9)
        return Finding(
            "impossible_transfer",
            "invalid",
            f"{moved / 1e6:.1f} MB of KV in {seconds * 1e3:.1f} ms are {rate / 1e9:.1f} GB/s: "
            f"{rate / line:.1f} times the line rate of the NICs ({line / 1e9:.1f} GB/s)",
            "the transfers' times or bytes are wrong, or the KV took another way (NVLink, shared memory); "
            "check deployment.nic_gbit",
            {"role": role, "bytes_per_s": rate, "line_rate": line, "kv_bytes": moved, "kv_seconds": seconds},
        )
    return None
