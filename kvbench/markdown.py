"""report.md: the whole story of one run on one page, generated from its raw files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvbench.core.binding import LIMIT_WORDS
from kvbench.core.breakdown import PART_WORDS
from kvbench.core.records import TrialRecord
from kvbench.methods_tables import method_tables
from kvbench.notes import Note, ahead, notes
from kvbench.plots import NO_DATA
from kvbench.provenance import caption, mark_of, scenario_of, slo_of
from kvbench.routercost import FIGURE_WORDS, RouterCost, difference
from kvbench.runs import Run
from kvbench.tables import MISSING, Row, number, percent, trial_values

_FIGURES: Final = ("mean", "p50", "p90", "p99")
_PICTURES: Final = {
    "max_request_rate": "Highest request rate by input length",
    "latency": "Latency against request rate",
    "ttft_breakdown": "Where the time to the first token goes",
    "burst": "A burst beside the sustained rate",
}
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")


def report_markdown(run: Run, rows: Sequence[Row], costs: Sequence[RouterCost] = ()) -> str:
    """The report as Markdown with GitHub's tables."""
    mark = mark_of(run)
    parts = [
        f"# {scenario_of(run)}: highest request rate under the SLO" + (f" ({mark.word})" if mark else ""),
        f"{caption(run)}\n\nSLO: {slo_of(run).text()}. Status of the run: {run.manifest.get('status')}.",
    ]
    if mark is not None:
        parts.append(f"> **{mark.word.title()}**: {mark.why}. These are not figures of a GPU.")
    beside = method_tables(run)
    if rows or not beside:
        parts += ["## Result", _result(rows) if rows else f"No cell was measured; {NO_DATA}."]
    for name, words in _PICTURES.items():
        if (run.path / "figures" / f"{name}.png").is_file():
            parts.append(f"![{words}](figures/{name}.png)")
    told = ahead(rows)
    if told:
        parts += ["## Who is ahead", _why_ahead(), _bullets(Note(line) for line in told)]
    for each in beside:
        parts += [f"## {each.title}", each.words, table(each.header, each.shown)]
    parts += ["## Notes", _bullets(notes(run, rows)) or "None."]
    parts += ["## Latency at the supporting trial", _WHICH_TRIAL, _latencies(rows)]
    where = _breakdown(rows)
    if where:
        parts += ["## Where the time to the first token goes", _WHICH_PARTS, where]
    if costs:
        parts += ["## What the router adds", _WHICH_COSTS, *map(_router_cost, costs)]
    parts += ["## Rates, KV cache and prefix cache at the supporting trial", _rates(rows)]
    client = _client(rows)
    if client:
        parts += ["## The load generator itself", _WHICH_CLIENT, client]
    parts += ["## Search", *_searches(run)]
    parts += ["## Findings", _findings(run) or "No gate had anything to say."]
    parts += ["## Environment", _environment(run)]
    parts += ["## How to run it again", _again(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


_WHICH_TRIAL: Final = (
    "Milliseconds as mean / P50 / P90 / P99, of the trial that confirmed the rate or else of the highest "
    "rate that met the SLO. TTFT counts from the scheduled send."
)


def _why_ahead() -> str:
    return (
        "By rule: a rate's interval goes from the highest rate that met the SLO to the lowest that missed "
        "it, and two rates are ordered only if their intervals do not overlap. In brackets: what the two "
        "intervals allow for their ratio. They do not cover how much a repeated run would differ."
    )


def _result(rows: Sequence[Row]) -> str:
    header = ["connector", "input", "output", "max rate (req/s)", "limit", "search", "met (%)"]
    body = [
        [
            row.cell.connector,
            f"{row.cell.input_len}",
            f"{row.cell.output_len}",
            row.rate_text(),
            LIMIT_WORDS.get(row.limit, MISSING),
            row.search + (", confirmed" if row.confirmed else ""),
            _with_interval(row.values),
            number(row.values["achieved_request_rate"]),
        ]
        for row in rows
    ]
    return table([*header, "achieved (req/s)", "trials", "findings", "labels"], [
        [*cells, f"{row.trials}", f"{sum(row.findings.values())}", ", ".join(row.labels)]
        for cells, row in zip(body, rows, strict=True)
    ])  # fmt: skip


def _with_interval(values: Mapping[str, float | None]) -> str:
    share = percent(values["slo_attainment"])
    if share == MISSING or values.get("attainment_lower") is None:
        return share
    return f"{share} [{percent(values['attainment_lower'])}, {percent(values['attainment_upper'])}]"


def _latencies(rows: Sequence[Row]) -> str:
    header = ["connector", "input", "rate", *(f"{name.upper()} (ms)" for name in _LATENCIES), "trial"]
    body = [
        [
            row.cell.connector,
            f"{row.cell.input_len}",
            number(row.answer.max_request_rate),
            *(_four(row.values, name) for name in _LATENCIES),
            row.trial_id or MISSING,
        ]
        for row in rows
        if row.trial_id
    ]
    return table(header, body) if body else "No trial supports a rate."


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


def _breakdown(rows: Sequence[Row]) -> str:
    header = ["connector", "input", "rate", "TTFT", *PART_WORDS.values()]
    body = [
        [
            row.cell.connector,
            f"{row.cell.input_len}",
            number(row.answer.max_request_rate),
            number(row.values["ttft_ms_mean_of_all"]),
            *(number(row.values[f"ttft_{part}_ms"]) for part in PART_WORDS),
        ]
        for row in rows
        if any(row.values[f"ttft_{part}_ms"] is not None for part in PART_WORDS)
    ]
    return table(header, body) if body else ""


_WHICH_COSTS: Final = (
    "TTFT in milliseconds of the same requests (same prompts, same planned sends) through the router and "
    "directly to P and D, in turns, caches emptied before each trial; warm-up left out. In brackets: the "
    "95 % interval of what the router adds, from a block bootstrap over pairs of the same request. It does "
    "not cover how much repeated trials would differ."
)


def _router_cost(cost: RouterCost) -> str:
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


_WHICH_CLIENT: Final = (
    "Of the same trial, the worst process where several sent. `stamps`: whether receive times are the "
    "kernel's or were taken at the read; chunk lag is the time between the two. Send lag is how much later "
    "than planned a request was written. CPU 1 is a whole core."
)


def _client(rows: Sequence[Row]) -> str:
    header = ["connector", "input", "rate", "way", "processes", "stamps", "send lag P50 / P99 (ms)"]
    body = [
        [
            row.cell.connector,
            f"{row.cell.input_len}",
            number(row.answer.max_request_rate),
            row.load_mode or MISSING,
            MISSING if row.values["client_workers"] is None else f"{row.values['client_workers']:.0f}",
            row.stamps or MISSING,
            " / ".join(number(row.values[f"client_send_lag_ms_{figure}"]) for figure in ("p50", "p99")),
            number(row.values["client_chunk_lag_ms_p99"]),
            number(row.values["client_loop_lag_ms_p99"]),
            number(row.values["client_cpu_share"]),
        ]
        for row in rows
        if row.values["client_send_lag_ms_p99"] is not None
    ]
    return table([*header, "chunk lag P99 (ms)", "loop lag P99 (ms)", "CPU"], body) if body else ""


def _rates(rows: Sequence[Row]) -> str:
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


def _searches(run: Run) -> Iterable[str]:
    cells = list(dict.fromkeys(trial.cell for trial in run.trials))
    if not cells:
        yield "No trial was run."
    header = ["trial", "asked as", "rate", "verdict", "met (%)", "TTFT P50 / P99", "TPOT P50 / P99", "reason"]
    for cell in cells:
        yield f"### {cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"
        yield table(header, [_trial_cells(trial) for trial in run.trials_of(cell)])


def _trial_cells(trial: TrialRecord) -> list[str]:
    values = trial_values(trial)
    return [
        trial.trial_id,
        trial.purpose,
        number(trial.request_rate),
        trial.verdict,
        percent(values["slo_attainment"]),
        f"{number(values['ttft_ms_p50'])} / {number(values['ttft_ms_p99'])}",
        f"{number(values['tpot_ms_p50'])} / {number(values['tpot_ms_p99'])}",
        trial.reason,
    ]


def _findings(run: Run) -> str:
    return _bullets(
        Note(f"`{trial.trial_id}` {finding.level}, {finding.gate}: {finding.message}", finding.advice)
        for trial in run.all_trials
        for finding in trial.findings
    )


def _environment(run: Run) -> str:
    """What of environment.json matters to a reader; the file has all of it."""
    libraries = run.environment.get("libraries") or {}
    installed = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    memory = (run.environment.get("memory") or {}).get("total_bytes")
    settings = run.environment.get("env") or {}
    facts = {
        "host": run.environment.get("hostname"),
        "OS": run.environment.get("os"),
        "kernel": run.environment.get("kernel"),
        "CPU": json.dumps(run.environment.get("cpu"), ensure_ascii=False),
        "memory": f"{memory / 2**30:.1f} GiB" if isinstance(memory, (int, float)) else None,
        "GPUs": json.dumps(run.environment.get("gpus"), ensure_ascii=False),
        "load average before": run.environment.get("load_average"),
        "libraries": installed,
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
        "git": json.dumps(run.manifest.get("git")),
    }
    return table(
        ["", ""], [[name, str(value)] for name, value in facts.items() if value not in (None, "", "null")]
    )


def _again(run: Run) -> str:
    argv = " ".join(str(word) for word in run.manifest.get("argv", [])) or "(not recorded)"
    about = f"Seed {run.manifest.get('seed')}. The scenario lies beside this file as `scenario.yaml`"
    return f"```\n{argv}\n```\n\n{about}, everything resolved in `plan.json`."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; what would break it is escaped."""
    lines = [_line(header), _line(["---"] * len(header)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _bullets(items: Iterable[Note]) -> str:
    lines = []
    for note in items:
        text = " ".join(note.text.split())
        lines.append(f"- {text}" + (f" → {' '.join(note.advice.split())}" if note.advice else ""))
    return "\n".join(lines)
