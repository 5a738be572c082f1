"""The report's tables of cells: one line for each row of the result, or what the router adds to one.

The words beside a table say what its figures are taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.core.metrics.ttft_breakdown import PART_WORDS
from kvbench.report.tables.result import MISSING, Row, number, percent, shared_unit
from kvbench.report.tables.router_cost import FIGURE_WORDS, RouterCost, difference

_FIGURES: Final = ("mean", "p50", "p90", "p99")
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")


def result(rows: Sequence[Row]) -> str:
    """The highest rates, what binds them, and how each was found."""
    unit = shared_unit(rows)
    header = ["connector", "input", "output", "max rate (req/s)", f"per {unit}", "limit", "search", "met (%)"]
    body = [
        [
            row.cell.connector,
            f"{row.cell.input_len}",
            f"{row.cell.output_len}",
            row.rate_text(),
            number(row.rate_per(unit)),
            LIMIT_WORDS.get(row.limit, MISSING),
            row.search + (", confirmed" if row.confirmed else ""),
            with_interval(row.values),
            number(row.values["achieved_request_rate"]),
        ]
        for row in rows
    ]
    return table([*header, "achieved (req/s)", "trials", "findings", "labels"], [
        [*cells, f"{row.trials}", f"{sum(row.findings.values())}", ", ".join(row.labels)]
        for cells, row in zip(body, rows, strict=True)
    ])  # fmt: skip


def with_interval(values: Mapping[str, float | None]) -> str:
    """The share of requests that met the SLO, in per cent, with its interval where there is one."""
    share = percent(values["slo_attainment"])
    if share == MISSING or values.get("attainment_lower") is None:
        return share
    return f"{share} [{percent(values['attainment_lower'])}, {percent(values['attainment_upper'])}]"


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


def latencies(rows: Sequence[Row]) -> str:
    """TTFT, TPOT, ITL and E2EL of the supporting trials."""
    shown = [
        (row, [*(_four(row.values, name) for name in _LATENCIES), row.trial_id])
        for row in rows
        if row.trial_id
    ]
    header = [*(f"{name.upper()} (ms)" for name in _LATENCIES), "trial"]
    return _at_rates(header, shown) or "No trial supports a rate."


def _at_rates(header: Sequence[str], shown: Iterable[tuple[Row, Sequence[str]]]) -> str:
    """A table of cells at their rates, each with the columns of ``header``; empty if there are none."""
    body = [
        [row.cell.connector, f"{row.cell.input_len}", number(row.answer.max_request_rate), *columns]
        for row, columns in shown
    ]
    return table(["connector", "input", "rate", *header], body) if body else ""


def _four(values: Mapping[str, float | None], name: str) -> str:
    figures = [values[f"{name}_ms_{figure}"] for figure in _FIGURES]
    return MISSING if not any(figures) else " / ".join(number(figure) for figure in figures)


WHICH_PARTS: Final = (
    "Means in milliseconds over the answered requests of the same trial, warm-up included. The engines' "
    "histograms tell queue and prefill, the router's times of each request (in direct mode the load "
    "generator's own) tell what lies around them. The first decode step is taken as D's mean gap between "
    "tokens. `hand-off` is all that is neither P's nor D's engine nor the transfer: their HTTP front ends "
    "and the router's turn; where P and D are asked at once it holds D's queue, too, which cannot be told "
    "apart then. `router and client` is the rest; without P/D it holds the server's front end."
)


def breakdown(rows: Sequence[Row]) -> str:
    """The parts of the mean TTFT; empty if no run tells them."""
    columns = ["ttft_ms_mean_of_all", *(f"ttft_{part}_ms" for part in PART_WORDS)]
    shown = [
        (row, [number(row.values[column]) for column in columns])
        for row in rows
        if any(row.values[column] is not None for column in columns[1:])
    ]
    return _at_rates(["TTFT", *PART_WORDS.values()], shown)


WHICH_COSTS: Final = (
    "TTFT in milliseconds of the same requests (same prompts, same planned sends) through the router and "
    "directly to P and D, in turns, caches emptied before each trial; warm-up left out. In brackets: the "
    "95 % interval of what the router adds, from a block bootstrap over pairs of the same request. It does "
    "not cover how much repeated trials would differ."
)


def router_cost(cost: RouterCost) -> str:
    """One cell measured through the router and directly, under a heading of its own."""
    head = f"### {cost.cell.connector}, {cost.cell.input_len:,} in, {number(cost.request_rate)} req/s"
    if not cost.added:
        return f"{head}\n\n{cost.reason}."
    body = [
        [FIGURE_WORDS[each.figure], number(each.with_), number(each.without), difference(each)]
        for each in cost.added
    ]
    left = f", {cost.left_out} more were not answered both ways" if cost.left_out else ""
    told = f"{cost.requests:,} requests each way{left}. Trials: {', '.join(cost.trials)}."
    return "\n\n".join([head, table(["TTFT", "router (ms)", "direct (ms)", "the router adds"], body), told])


WHICH_CLIENT: Final = (
    "Of the same trial, the worst process where several sent. `stamps`: whether receive times are the "
    "kernel's or were taken at the read; chunk lag is the time between the two. Send lag is how much later "
    "than planned a request was written. CPU 1 is a whole core."
)


def client(rows: Sequence[Row]) -> str:
    """How late the load generator was and what it cost; empty if no run tells it."""
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
    header = ["way", "processes", "stamps", "send lag P50 / P99 (ms)"]
    return _at_rates([*header, "chunk lag P99 (ms)", "loop lag P99 (ms)", "CPU"], shown)


def rates(rows: Sequence[Row]) -> str:
    """Goodput and token rates, the KV that was moved, and what the prefix caches held."""
    header = [
        "connector",
        "input",
        "goodput (req/s)",
        "output tok/s",
        "total tok/s",
        "KV bytes per request",
        "KV transfer (ms per request)",
        "KV descriptors per request",
        "told by",
        "transport",
        "prefix hits on P (%)",
        "prefix hits on D (%)",
    ]
    body = []
    for row in rows:
        if row.trial_id:
            values = row.values
            size = values["kv_bytes_per_request"]
            body.append(
                [
                    row.cell.connector,
                    f"{row.cell.input_len}",
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
    return table(header, body) if body else "No trial supports a rate."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; what would break it is escaped."""
    lines = [_line(header), _line(["---"] * len(header)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
