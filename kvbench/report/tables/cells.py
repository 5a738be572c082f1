"""Tables with one row per result row. For a page that sorts, they carry the values of a CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.metrics.limit import LIMIT_SHORT, LIMIT_WORDS
from kvbench.core.metrics.ttft_breakdown import PART_WORDS
from kvbench.report.tables.columns import OF_WHOLE_RUN
from kvbench.report.tables.result import Row, interval_word, shared_unit
from kvbench.report.tables.router_cost import FIGURE_WORDS, RouterCost, difference
from kvbench.report.tables.table import (
    MISSING,
    STEADY,
    WHOLE_RUN,
    Column,
    Rows,
    Table,
    number,
    of_csv,
    of_texts,
    percent,
)
from kvbench.report.tables.transfers import time_text

_Shown = Callable[[Row], object]
"""Text of a column for a row."""


def _table(
    rows: Sequence[Row], columns: Mapping[str, _Shown], title: str = "", words: str = "", window: str = ""
) -> Table:
    cells = [[shown(row) for shown in columns.values()] for row in rows]
    return of_texts(
        title, list(columns), cells, words=words, window=window, trials=[row.trial_id or "" for row in rows]
    )


def _figure(column: str) -> _Shown:
    return lambda row: number(row.values[column])


def _share(column: str) -> _Shown:
    return lambda row: percent(row.values[column])


def _figures(columns: Sequence[str]) -> _Shown:
    """Return ``1.2 / 3.4``, or missing if all are."""

    def shown(row: Row) -> str:
        found = [row.values[column] for column in columns]
        return MISSING if not any(found) else " / ".join(number(figure) for figure in found)

    return shown


_CONNECTOR: Final[Mapping[str, _Shown]] = {
    "connector": lambda row: row.cell.connector,
    "input": lambda row: row.cell.input_len,
}
_AT_RATE: Final = {**_CONNECTOR, "rate": lambda row: number(row.trial_rate)}

# --- the result ------------------------------------------------------------------------------------


def result(rows: Sequence[Row]) -> Table:
    unit = shared_unit(rows)
    columns: dict[str, _Shown] = {
        **_CONNECTOR,
        "output": lambda row: row.cell.output_len,
        f"max rate (req/s) {interval_word(row.answer for row in rows)}": Row.rate_text,
        f"per {unit}": lambda row: number(row.rate_per(unit)),
        "limit": lambda row: LIMIT_WORDS.get(row.limit, MISSING),
        "search": lambda row: row.search + (", confirmed" if row.confirmed else ""),
        "measured at (req/s)": lambda row: number(row.trial_rate),
        "met (%) [95 %]": lambda row: with_interval(row.values),
        "achieved (req/s)": _figure("achieved_request_rate"),
        "trials": lambda row: row.trials,
        "findings": lambda row: sum(row.findings.values()),
        "labels": lambda row: ", ".join(row.labels),
    }
    return _table(rows, columns, window=STEADY)


def gist(rows: Sequence[Row]) -> Table:
    """Return the result in few columns, for a notebook."""
    unit = shared_unit(rows)
    columns: dict[str, _Shown] = {
        "connector": lambda row: row.cell.connector,
        "input": lambda row: f"{row.cell.input_len:,}",
        f"max rate (req/s) {interval_word(row.answer for row in rows)}": lambda row: row.answer.text(),
        f"per {unit}": lambda row: number(row.rate_per(unit)),
        "measured at (req/s)": lambda row: number(row.trial_rate),
        "met %": _share("slo_attainment"),
        "TTFT P50 (ms)": _figure("ttft_ms_p50"),
        "TTFT P99 (ms)": _figure("ttft_ms_p99"),
        "TPOT P50 (ms)": _figure("tpot_ms_p50"),
        "KV (ms)": _figure("kv_transfer_ms_per_request"),
        "limit": lambda row: row.limit or MISSING,
    }
    return _table(rows, columns, window=STEADY)


def with_interval(values: Mapping[str, Any]) -> str:
    """Return the SLO attainment in per cent with its interval, if any."""
    share = percent(values["slo_attainment"])
    if share == MISSING or values.get("attainment_lower") is None:
        return share
    return f"{share} [{percent(values['attainment_lower'])}, {percent(values['attainment_upper'])}]"


_RATE_WIDTH: Final = 20
"""Width, in characters, from which a figure of ``brief_result`` is folded: a rate's interval fits."""
_RANKS: Final = (0, 0, 5, 1, 4, 2, 3, 7, 6)
"""Rank of each figure of ``brief_result``; a narrow terminal drops higher ranks first."""


def brief_result(named: Sequence[tuple[str, Row]]) -> Table:
    """Return the result in a hundred columns, one group per length. ``named``: rows with run labels, empty
    for a single run."""
    rows = [row for _, row in named]
    unit = shared_unit(rows)
    figures: dict[str, _Shown] = {
        "input\nlen": lambda row: row.cell.input_len,
        f"max rate\nreq/s {interval_word(row.answer for row in rows)}": lambda row: row.answer.text(),
        f"req/s\n/{'GPU' if unit == 'GPU' else 'eng'}": lambda row: number(row.rate_per(unit)),
        "at\nreq/s": lambda row: number(row.trial_rate),
        "met\n%": _share("slo_attainment"),
        "TTFT ms\nP50 / P99": _pair("ttft_ms_p50", "ttft_ms_p99"),
        "TPOT ms\nP50 / P99": _pair("tpot_ms_p50", "tpot_ms_p99"),
        "KV MB\n/req": megabytes,
        "KV ms\n/req": _figure("kv_transfer_ms_per_request"),
    }
    several, limits = any(name for name, _ in named), any(row.limit for row in rows)
    columns = [Column("", "run", align="left")] * several + [Column("", "connector", align="left")]
    columns += [
        Column("", title, align="right", width=_RATE_WIDTH, rank=rank)
        for title, rank in zip(figures, _RANKS, strict=True)
    ]
    columns += [Column("", "limit", align="left", rank=1)] * limits
    cells = [
        [
            *[name] * several,
            row.cell.connector,
            *(str(shown(row)) for shown in figures.values()),
            *[LIMIT_SHORT.get(row.limit, MISSING)] * limits,
        ]
        for name, row in named
    ]
    lengths = [(row.cell.input_len, row.cell.output_len) for row in rows]
    groups = {lengths.index(length): "" for length in dict.fromkeys(lengths)}
    trials = [row.trial_id or "" for row in rows]
    return Table("", columns, cells, groups=groups, window=STEADY, trials=trials)


def _pair(one: str, other: str) -> _Shown:
    def shown(row: Row) -> str:
        known = row.values[one], row.values[other]
        return MISSING if known == (None, None) else " / ".join(map(number, known))

    return shown


def megabytes(row: Row) -> str:
    """Return the KV per request in MB."""
    size = row.values["kv_bytes_per_request"]
    return number(None if size is None else size / 1e6)


# --- at the supporting trials ----------------------------------------------------------------------

WHY_AHEAD: Final = (
    f"A connector is ahead only if its rate is higher with a probability of at least {AHEAD:.0%}, computed "
    "from all trials of both searches. A search that did not converge (?) takes part with its wider "
    "interval, unless invalid trials ended it. Brackets show the 90 % interval of the ratio. The interval "
    "does not cover the variation between repeated runs. Rates with unequal numbers of GPUs (engines, if "
    "GPUs are unknown) are compared per GPU."
)
WHICH_TRIAL: Final = (
    "Milliseconds in the trial with the highest rate that met the SLO, at or below the result; `rate` is "
    "its offered rate. TTFT counts from the scheduled send."
)


def latencies(rows: Sequence[Row]) -> Table | None:
    columns: dict[str, _Shown] = {
        f"{name.upper()} mean / P50 / P90 / P99 (ms)": _figures(
            [f"{name}_ms_{figure}" for figure in ("mean", "p50", "p90", "p99")]
        )
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    columns = {**_AT_RATE, **columns, "trial": lambda row: row.trial_id}
    shown = [row for row in rows if row.trial_id]
    return _table(shown, columns, words=WHICH_TRIAL, window=STEADY) if shown else None


_WHICH_PARTS: Final = (
    "Means in milliseconds over the answered requests of the same trial. Queue and prefill come from the "
    "engines' histograms, the other parts from the router's times per request (in direct mode the load "
    "generator's times). The first decode step is estimated as D's mean gap between "
    "tokens. `hand-off`: time outside P's and D's engines and the transfer (HTTP front ends, "
    "router turn); with concurrent dispatch it includes D's queue. "
    "`router and client` is the rest; without P/D it includes the server's front end."
)


def breakdown(rows: Sequence[Row]) -> Table | None:
    parts = {words: f"ttft_{part}_ms" for part, words in PART_WORDS.items()}
    columns = {f"TTFT mean (ms){OF_WHOLE_RUN}": "ttft_ms_mean_of_all", **parts}
    shown = [row for row in rows if any(row.values[column] is not None for column in parts.values())]
    figures = {words: _figure(column) for words, column in columns.items()}
    title = "TTFT breakdown"
    return _table(shown, {**_AT_RATE, **figures}, title, _WHICH_PARTS, WHOLE_RUN) if shown else None


WHICH_COSTS: Final = (
    "TTFT in milliseconds of the same requests (same prompts, same planned sends) through the router and "
    "directly to P and D, alternating, with caches emptied before each trial; without warm-up. In "
    "brackets: the "
    "95 % interval of the router's overhead, from a block bootstrap over pairs of the same request. It does "
    "not cover the variation between repeated trials."
)


def router_cost(cost: RouterCost) -> Table:
    body = [
        [FIGURE_WORDS[delta.figure], number(delta.with_), number(delta.without), difference(delta)]
        for delta in cost.added
    ]
    return of_texts("", ["TTFT", "router (ms)", "direct (ms)", "router overhead [95 %]"], body)


_WHICH_CLIENT: Final = (
    "Same trial; the worst process if several sent. `stamps`: whether receive times are the "
    "kernel's or taken at the read; chunk lag is the difference. Send lag: how much later "
    "than planned a request was sent. CPU 1 means one core."
)


def client(rows: Sequence[Row]) -> Table | None:
    """Return the load generator's lateness and CPU cost, or None if unreported."""

    def processes(row: Row) -> str:
        count = row.values["client_workers"]
        return MISSING if count is None else f"{count:.0f}"

    def send_lag(row: Row) -> str:
        return " / ".join(number(row.values[f"client_send_lag_ms_{figure}"]) for figure in ("p50", "p99"))

    columns: dict[str, _Shown] = {
        **_AT_RATE,
        "way": lambda row: row.load_mode or MISSING,
        "processes": processes,
        "stamps": lambda row: row.stamps or MISSING,
        "send lag P50 / P99 (ms)": send_lag,
        "chunk lag P99 (ms)": _figure("client_chunk_lag_ms_p99"),
        "loop lag P99 (ms)": _figure("client_loop_lag_ms_p99"),
        "CPU": _figure("client_cpu_share"),
    }
    shown = [row for row in rows if row.values["client_send_lag_ms_p99"] is not None]
    return _table(shown, columns, "Load generator", _WHICH_CLIENT) if shown else None


def rates(rows: Sequence[Row]) -> Table | None:
    """Return goodput and token rates, in total and per GPU, with cost, power, KV and prefix hits."""

    def size(row: Row) -> str:
        known = row.values["kv_bytes_per_request"]
        return MISSING if known is None else f"{known:,.0f}"

    columns: dict[str, _Shown] = {
        **_CONNECTOR,
        "goodput (req/s)": _figure("request_goodput"),
        "output tok/s": _figure("output_tok_per_s"),
        "total tok/s": _figure("total_tok_per_s"),
        "KV bytes per request": size,
        "KV transfer (ms per request)": _figure("kv_transfer_ms_per_request"),
        "KV descriptors per request": _figure("kv_descriptors_per_request"),
        "source": lambda row: row.kv_source or MISSING,
        "transport": lambda row: row.transport or MISSING,
        "prefix hits on P (%)": _share("prefix_hit_rate_prefill"),
        "prefix hits on D (%)": _share("prefix_hit_rate_decode"),
    }
    shown = [row for row in rows if row.trial_id]
    unit = shared_unit(rows)
    columns[f"goodput per {unit}"] = lambda row: number(row.per(unit, "request_goodput"))
    columns[f"output tok/s per {unit}"] = lambda row: number(row.per(unit, "output_tok_per_s"))
    if any(row.price for row in rows):
        columns["cost per 1k requests"] = lambda row: number(row.cost_per_1k_requests)
        columns["cost per 1M output tokens"] = lambda row: number(row.cost_per_1m_output_tokens)
    if any(row.joules_per_output_token for row in shown):
        columns["W per GPU"] = lambda row: number(row.per("GPU", "gpu_watts"))
        columns["J per output token"] = lambda row: number(row.joules_per_output_token)
    return _table(shown, columns, window=STEADY) if shown else None


_RATES: Final = (
    "connector", "input_len", "output_len", "max_request_rate", "max_request_rate_per_engine",
    "max_request_rate_per_gpu", "limit", "trial_request_rate", "slo_attainment", "ttft_ms_p50", "ttft_ms_p99",
    "tpot_ms_p50", "tpot_ms_p99",
)  # fmt: skip
_COSTS: Final = (
    "cost_per_1k_requests", "cost_per_1m_output_tokens", "watts_per_gpu", "joules_per_output_token",
)  # fmt: skip
_BESIDES: Final = (
    "connector", "input_len", "output_len", "request_goodput", "request_goodput_per_gpu", "output_tok_per_s",
    "output_tok_per_s_per_gpu", *_COSTS, "kv_bytes_per_request", "kv_transfer_ms_per_request", "trials",
    "findings", "labels",
)  # fmt: skip
_TRIALS: Final = (
    "trial_id", "method", "purpose", "request_rate", "verdict", "slo_attainment", *_RATES[-4:], "reason",
)  # fmt: skip
_CASES: Final = (
    "backend", "protocol", "nics", "op", "block_bytes", "batch_size", "descriptors", "gb_per_s",
    "of_line_rate", "of_tcp", "of_memcpy", "call_s_p50", "call_s_p99", "cpu_s_per_gb", "verified", "status",
    "transport", "error",
)  # fmt: skip


def sorted_result(rows: Sequence[Row], summary: Rows) -> list[Table]:
    """Return the result in two tables, as wide as a page, with the values of summary.csv for sorting."""
    texts = {
        "max_request_rate": [row.rate_text() for row in rows],
        "limit": [LIMIT_WORDS.get(row.limit, MISSING) for row in rows],
        "slo_attainment": [with_interval(row.values) for row in rows],
        "kv_bytes_per_request": list(map(megabytes, rows)),
    }
    other = "per_engine" if shared_unit(rows) == "GPU" else "per_gpu"
    empty = {key for key in _COSTS if all(row[key] is None for row in summary)}
    interval = interval_word(row.answer for row in rows)
    tables = []
    for title, every in (("Rate and latency", _RATES), ("Throughput, KV cache and cost", _BESIDES)):
        shown = [key for key in every if not key.endswith(other) and key not in empty]
        tables.append(of_csv("summary", title, summary, shown, texts, STEADY, interval))
    return [table for table in tables if table is not None]


def sorted_trials(trials: Rows) -> Table | None:
    texts = {
        "slo_attainment": [with_interval(row) for row in trials],
        "reason": [_STOPPING.sub("", row["reason"]) or MISSING for row in trials],
    }
    return of_csv("trials", "All trials, in order of measurement", trials, _TRIALS, texts, STEADY)


_STOPPING: Final = re.compile(r"; stopping interval [\d.]+% to [\d.]+%")
"""Interval of the rule that ends a trial; the table has the share's own interval."""


def sorted_cases(rows: Rows) -> Table | None:
    texts = {key: [time_text(row.get(key)) for row in rows] for key in ("call_s_p50", "call_s_p99")}
    return of_csv("transfers", "All cases", rows, _CASES, texts)
