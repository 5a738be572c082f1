"""What happened while each request was served, counted from the measured times alone; nothing is simulated.

Between a request's first and last token lie as many steps as it made tokens. What these steps computed
besides is known from the other requests: their tokens, taken as evenly spread from their first to their last,
and the prompts whose first tokens fell into that time. So the duration is linear in the coefficients, and
they are solved for: a first guess that needs no schedule, for ``fit`` to go on from. Requests that are held
out are not looked at, as if they had not been there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.calibration.least_squares import F64, least_squares
from kvbench.core.calibration.served_load import ServedLoad

NAMES: Final = (
    "front_end_ms",
    "prefill_step_ms",
    "prefill_token_ms",
    "prefill_attention_ms",
    "decode_step_ms",
    "decode_seq_ms",
    "decode_context_ms",
)
"""The columns of the counts."""
_SHARE: Final = 0.02
_FLOOR_MS: Final = 1.0
_ROUNDS: Final = 30


def guess(served: Sequence[ServedLoad], masks: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    """Coefficients in milliseconds; 0 for what the loads do not tell. A hand-off is taken for front end."""
    rows, times = [], []
    for each, mask in zip(served, masks, strict=True):
        for counts, milliseconds in (_decodes(each, mask), _lone_prefills(each, mask)):
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
    """Counts [m, 7] and milliseconds [m] from first to last tokens; of several engines a share each."""
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
        made = np.where(until > since, rate * (until - since), 0.0)
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
                float((made * share).sum()),
                float((made * middle * share).sum()),
            ]
        )
        times.append(1e3 * (end - begin))
    return np.array(rows).reshape(-1, len(NAMES)), np.array(times)


def _lone_prefills(served: ServedLoad, mask: NDArray[np.bool_]) -> tuple[F64, F64]:
    """The same of first tokens that waited for nobody, or for the fewest: the quickest for their length."""
    inputs, ttft = served.input_len[mask], 1e3 * served.measured.ttft_s[mask]
    order = np.argsort(inputs)
    picked = [
        part[np.argmin(ttft[part])] for part in np.array_split(order, max(4, len(order) // 8)) if len(part)
    ]
    budget = served.system.config.max_num_batched_tokens
    rows = [[1.0, -(-n // budget), n, n * n, 0.0, 0.0, 0.0] for n in inputs[picked]]
    return np.array(rows).reshape(-1, len(NAMES)), ttft[picked]
