"""The tables that have one line for each row of the result, or for what the router adds to one.

The words of a table say what its figures are taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvbench.core.metrics.limit import LIMIT_SHORT, LIMIT_WORDS
from kvbench.core.metrics.ttft_breakdown import PART_WORDS
from kvbench.report.tables.numbers import MISSING, number, percent
from kvbench.report.tables.result import Row, shared_unit
from kvbench.report.tables.router_cost import FIGURE_WORDS, RouterCost, difference
from kvbench.report.tables.table import Column, Rows, Table, of_csv, of_texts

_FIGURES: Final = ("mean", "p50", "p90", "p99")
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")

# --- the result ------------------------------------------------------------------------------------


def result(rows: Sequence[Row]) -> Table:
    """The highest rates, what binds them, and how each was found."""
    unit = shared_unit(rows)
    header = [
        "connector", "input", "output", "max rate (req/s)", f"per {unit}", "limit", "search", "met (%)",
        "achieved (req/s)", "trials", "findings", "labels",
    ]  # fmt: skip
    body = [
        [
            row.cell.connector,
            row.cell.input_len,
            row.cell.output_len,
            row.rate_text(),
            number(row.rate_per(unit)),
            LIMIT_WORDS.get(row.limit, MISSING),
            row.search + (", confirmed" if row.confirmed else ""),
            _with_interval(row.values),
            number(row.values["achieved_request_rate"]),
            row.trials,
            sum(row.findings.values()),
            ", ".join(row.labels),
        ]
        for row in rows
    ]
    return of_texts("", header, body)


def _with_interval(values: Mapping[str, float | None]) -> str:
    """The share of requests that met the SLO, in per cent, with its interval where there is one."""
    share = percent(values["slo_attainment"])
    if share == MISSING or values.get("attainment_lower") is None:
        return share
    return f"{share} [{percent(values['attainment_lower'])}, {percent(values['attainment_upper'])}]"


def brief_result(named: Sequence[tuple[str, Row]]) -> Table:
    """The result in a hundred columns, one group a length. ``named``: rows with the names of their runs, all
    empty for a single run.
    """
    rows = [row for _, row in named]
    unit = shared_unit(rows)
    figures = (
        "input\nlen", "max rate\nreq/s [interval]", f"req/s\n/{'GPU' if unit == 'GPU' else 'eng'}", "met\n%",
        "TTFT ms\nP50 / P99", "TPOT ms\nP50 / P99", "KV MB\n/req", "KV ms\n/req",
    )  # fmt: skip
    several, limits = any(name for name, _ in named), any(row.limit for row in rows)
    columns = [Column("", "run", align="left")] * several + [Column("", "connector", align="left", width=14)]
    columns += [Column("", title, align="right") for title in figures]
    columns += [Column("", "limit", align="left")] * limits
    groups: dict[tuple[int, int], int] = {}
    cells = []
    for place, (name, row) in enumerate(named):
        groups.setdefault((row.cell.input_len, row.cell.output_len), place)
        values = row.values
        cells.append(
            [
                *[name] * several,
                row.cell.connector,
                f"{row.cell.input_len}",
                row.answer.text(),
                number(row.rate_per(unit)),
                percent(values["slo_attainment"]),
                _pair(values["ttft_ms_p50"], values["ttft_ms_p99"]),
                _pair(values["tpot_ms_p50"], values["tpot_ms_p99"]),
                _megabytes(values["kv_bytes_per_request"]),
                number(values["kv_transfer_ms_per_request"]),
                *[LIMIT_SHORT.get(row.limit, MISSING)] * limits,
            ]
        )
    return Table("", columns, cells, groups=dict.fromkeys(groups.values(), ""))


def _pair(one: float | None, other: float | None) -> str:
    return MISSING if one is None and other is None else f"{number(one)} / {number(other)}"


def _megabytes(size: float | None) -> str:
    return number(None if size is None else size / 1e6)


_RESULT: Final = {
    "connector": "connector",
    "input_len": "input (tokens)",
    "output_len": "output (tokens)",
    "max_request_rate": "max rate (req/s)",
    "max_request_rate_per_engine": "per engine (req/s)",
    "max_request_rate_per_gpu": "per GPU (req/s)",
    "limit": "limit",
    "slo_attainment": "met (%)",
    "ttft_ms_p50": "TTFT P50 (ms)",
    "ttft_ms_p99": "TTFT P99 (ms)",
    "tpot_ms_p50": "TPOT P50 (ms)",
    "tpot_ms_p99": "TPOT P99 (ms)",
    "request_goodput": "goodput (req/s)",
    "output_tok_per_s": "output tok/s",
    "kv_bytes_per_request": "KV (MB/req)",
    "kv_transfer_ms_per_request": "KV (ms/req)",
    "trials": "trials",
    "findings": "findings",
    "labels": "labels",
}
_TRIALS: Final = {
    "trial_id": "trial",
    "method": "method",
    "purpose": "asked as",
    "request_rate": "rate (req/s)",
    "verdict": "verdict",
    "slo_attainment": "met (%)",
    "ttft_ms_p50": "TTFT P50 (ms)",
    "ttft_ms_p99": "TTFT P99 (ms)",
    "tpot_ms_p50": "TPOT P50 (ms)",
    "tpot_ms_p99": "TPOT P99 (ms)",
    "reason": "reason",
}


def sorted_result(rows: Sequence[Row], summary: Rows) -> Table | None:
    """The result with the values of summary.csv behind it, for a page that sorts."""
    texts = {
        "max_request_rate": [row.rate_text() for row in rows],
        "limit": [LIMIT_WORDS.get(row.limit, MISSING) for row in rows],
        "slo_attainment": [_with_interval(row.values) for row in rows],
        "kv_bytes_per_request": [_megabytes(row.values["kv_bytes_per_request"]) for row in rows],
    }
    other = "max_request_rate_per_engine" if shared_unit(rows) == "GPU" else "max_request_rate_per_gpu"
    headings = {key: words for key, words in _RESULT.items() if key != other}
    return of_csv("summary", "One line per connector and input length", summary, headings, texts)


def sorted_trials(trials: Rows) -> Table | None:
    """The trials with the values of trials.csv behind them."""
    met = {"slo_attainment": [percent(row["slo_attainment"]) for row in trials]}
    return of_csv("trials", "Every trial, in the order of measuring", trials, _TRIALS, met)


# --- at the supporting trials ----------------------------------------------------------------------

WHY_AHEAD: Final = (
    "By rule: a rate's interval goes from the highest rate that met the SLO to the lowest that missed "
    "it, and two rates are ordered only if their intervals do not overlap. In brackets: what the two "
    "intervals allow for their ratio. They do not cover how much a repeated run would differ. Rates of "
    "unequal numbers of engines (GPUs, where known) are not compared; those per engine are."
)

WHICH_TRIAL: Final = (
    "Milliseconds as mean / P50 / P90 / P99, of the trial that confirmed the rate or else of the highest "
    "rate that met the SLO. TTFT counts from the scheduled send."
)


def latencies(rows: Sequence[Row]) -> Table | None:
    """TTFT, TPOT, ITL and E2EL of the supporting trials."""
    shown = [
        (row, [*(_four(row.values, name) for name in _LATENCIES), row.trial_id])
        for row in rows
        if row.trial_id
    ]
    header = [*(f"{name.upper()} (ms)" for name in _LATENCIES), "trial"]
    return _at_rates("Latency at the supporting trial", WHICH_TRIAL, header, shown)


def _at_rates(
    title: str, words: str, header: Sequence[str], shown: Iterable[tuple[Row, Sequence[str]]]
) -> Table | None:
    """A table of cells at their rates, each with the columns of ``header``; None if there are none."""
    body = [
        [row.cell.connector, row.cell.input_len, number(row.answer.max_request_rate), *columns]
        for row, columns in shown
    ]
    return of_texts(title, ["connector", "input", "rate", *header], body, words=words) if body else None


def _four(values: Mapping[str, float | None], name: str) -> str:
    figures = [values[f"{name}_ms_{figure}"] for figure in _FIGURES]
    return MISSING if not any(figures) else " / ".join(number(figure) for figure in figures)


_WHICH_PARTS: Final = (
    "Means in milliseconds over the answered requests of the same trial, warm-up included. The engines' "
    "histograms tell queue and prefill, the router's times of each request (in direct mode the load "
    "generator's own) tell what lies around them. The first decode step is taken as D's mean gap between "
    "tokens. `hand-off` is all that is neither P's nor D's engine nor the transfer: their HTTP front ends "
    "and the router's turn; where P and D are asked at once it holds D's queue, too, which cannot be told "
    "apart then. `router and client` is the rest; without P/D it holds the server's front end."
)


def breakdown(rows: Sequence[Row]) -> Table | None:
    """The parts of the mean TTFT; None if no run tells them."""
    columns = ["ttft_ms_mean_of_all", *(f"ttft_{part}_ms" for part in PART_WORDS)]
    shown = [
        (row, [number(row.values[column]) for column in columns])
        for row in rows
        if any(row.values[column] is not None for column in columns[1:])
    ]
    title = "Where the time to the first token goes"
    return _at_rates(title, _WHICH_PARTS, ["TTFT", *PART_WORDS.values()], shown)


WHICH_COSTS: Final = (
    "TTFT in milliseconds of the same requests (same prompts, same planned sends) through the router and "
    "directly to P and D, in turns, caches emptied before each trial; warm-up left out. In brackets: the "
    "95 % interval of what the router adds, from a block bootstrap over pairs of the same request. It does "
    "not cover how much repeated trials would differ."
)


def router_cost(cost: RouterCost) -> Table:
    """TTFT of one cell through the router and directly."""
    body = [
        [FIGURE_WORDS[each.figure], number(each.with_), number(each.without), difference(each)]
        for each in cost.added
    ]
    return of_texts("", ["TTFT", "router (ms)", "direct (ms)", "the router adds"], body)


_WHICH_CLIENT: Final = (
    "Of the same trial, the worst process where several sent. `stamps`: whether receive times are the "
    "kernel's or were taken at the read; chunk lag is the time between the two. Send lag is how much later "
    "than planned a request was written. CPU 1 is a whole core."
)


def client(rows: Sequence[Row]) -> Table | None:
    """How late the load generator was and what it cost; None if no run tells it."""
    shown = [
        (
            row,
            [
                row.load_mode or MISSING,
                MISSING if row.values["client_workers"] is None else f"{row.values['client_workers']:.0f}",
                row.stamps or MISSING,
                " / ".join(number(row.values[f"client_send_lag_ms_{figure}"]) for figure in ("p50", "p99")),
                number(row.values["client_chunk_lag_ms_p99"]),
                number(row.values["client_loop_lag_ms_p99"]),
                number(row.values["client_cpu_share"]),
            ],
        )
        for row in rows
        if row.values["client_send_lag_ms_p99"] is not None
    ]
    header = [
        "way", "processes", "stamps", "send lag P50 / P99 (ms)", "chunk lag P99 (ms)", "loop lag P99 (ms)",
        "CPU",
    ]  # fmt: skip
    return _at_rates("The load generator itself", _WHICH_CLIENT, header, shown)


def rates(rows: Sequence[Row]) -> Table | None:
    """Goodput and token rates, the KV that was moved, and what the prefix caches held."""
    header = [
        "connector", "input", "goodput (req/s)", "output tok/s", "total tok/s", "KV bytes per request",
        "KV transfer (ms per request)", "KV descriptors per request", "told by", "transport",
        "prefix hits on P (%)", "prefix hits on D (%)",
    ]  # fmt: skip
    body = []
    for row in rows:
        if row.trial_id:
            values = row.values
            size = values["kv_bytes_per_request"]
            body.append(
                [
                    row.cell.connector,
                    row.cell.input_len,
                    number(values["request_goodput"]),
                    number(values["output_tok_per_s"]),
                    number(values["total_tok_per_s"]),
                    MISSING if size is None else f"{size:,.0f}",
                    number(values["kv_transfer_ms_per_request"]),
                    number(values["kv_descriptors_per_request"]),
                    row.kv_source or MISSING,
                    row.transport or MISSING,
                    percent(values["prefix_hit_rate_prefill"]),
                    percent(values["prefix_hit_rate_decode"]),
                ]
            )
    return of_texts("", header, body) if body else None
