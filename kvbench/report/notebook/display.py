"""How a run, or a comparison, looks in a notebook: a heading, one small table, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from kvbench.core.transfers.records import TransferRecord
from kvbench.core.transfers.stats import figures
from kvbench.report.findings.notes import notes
from kvbench.report.tables.result import MISSING, number, percent, shared_unit, summary_table
from kvbench.report.tables.transfers import blocks_text, time_text, way_text
from kvbench.report.tables.vllm_bench import about, serve_values
from kvbench.results.provenance import SIMULATED, caption, mark_of, scenario_of, slo_of
from kvbench.results.run import Run

MOST_ROWS: Final = 40
MOST_NOTES: Final = 8


@dataclass(frozen=True)
class Shown:
    """What is shown: plain words and a table of words; ``more`` counts rows and notes that are left out."""

    title: str
    caption: str
    mark: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    @property
    def more(self) -> str:
        parts = [
            f"{len(all_) - most} more {word}"
            for all_, most, word in ((self.rows, MOST_ROWS, "rows"), (self.notes, MOST_NOTES, "notes"))
            if len(all_) > most
        ]
        return f"… and {', '.join(parts)}: see run.summary and run.findings" if parts else ""


def describe(run: Run) -> Shown:
    """The gist of a run of any kind."""
    kind = str(run.manifest.get("kind") or "sweep")
    mark = mark_of(run)
    header, rows = _table(run, kind)
    slo = "" if kind == "microbench" else slo_of(run).text()
    heading = " · ".join(part for part in dict.fromkeys((scenario_of(run), kind, slo)) if part)
    # Of a simulated run neither the machine nor the day says anything.
    origin = "" if mark is not None and mark.word.startswith(SIMULATED) else caption(run)
    said = [note.text for note in notes(run, summary_table(run)) if mark is None or mark.why not in note.text]
    word = "" if mark is None else f"{mark.word}: {mark.why}"
    return Shown(heading, origin, word, header, rows, said)


def _table(run: Run, kind: str) -> tuple[Sequence[str], list[list[str]]]:
    if kind == "microbench":
        return _transfers(run.transfer_records())
    rows = summary_table(run)
    if rows or not run.other_trials:
        unit = shared_unit(rows)
        return [word.format(unit=unit) for word in _SEARCHED], [
            [
                row.cell.connector,
                f"{row.cell.input_len:,}",
                row.answer.text(),
                number(row.rate_per(unit)),
                percent(row.values["slo_attainment"]),
                number(row.values["ttft_ms_p50"]),
                number(row.values["ttft_ms_p99"]),
                number(row.values["tpot_ms_p50"]),
                number(row.values["kv_transfer_ms_per_request"]),
                row.limit or MISSING,
            ]
            for row in rows
        ]
    return _TRIED, [
        [f"{named['connector']}", f"{named['input_len']:,}", number(named["request_rate"])]
        + [number(served[key]) for key in _TRIED_KEYS]
        for trial in run.other_trials
        for named, served in [(about(trial), serve_values(trial))]
    ]


_SEARCHED: Final = (
    "connector", "input", "max rate (req/s) [interval]", "per {unit}", "met %", "TTFT P50 (ms)",
    "TTFT P99 (ms)", "TPOT P50 (ms)", "KV (ms)", "limit",
)  # fmt: skip
_TRIED_KEYS: Final = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
_TRIED: Final = (
    "connector", "input", "offered req/s", "req/s", "output tok/s", "TTFT mean (ms)", "TTFT P99 (ms)",
    "TPOT mean (ms)", "TPOT P99 (ms)",
)  # fmt: skip
_MOVED: Final = (
    "way",
    "NICs",
    "op",
    "cases",
    "most GB/s",
    "with",
    "of memcpy %",
    "least P50",
    "with ",
    "failed",
)


def _transfers(records: Sequence[TransferRecord]) -> tuple[Sequence[str], list[list[str]]]:
    """One row a way of moving bytes: its widest and its quickest case."""
    ways: dict[tuple[str, int, str], list[TransferRecord]] = {}
    for record in records:
        if record.status != "skipped":
            case = record.case
            ways.setdefault((way_text(case), case.nics, case.op), []).append(record)
    rows = []
    for (way, nics, op), mine in ways.items():
        told = [(record, figures(record, records)) for record in mine if record.status == "ok"]
        wide = max(told, key=lambda each: each[1].gb_per_s or 0.0, default=None)
        quick = min(told, key=lambda each: each[1].times.p50 or math.inf, default=None)
        widest = (
            [number(wide[1].gb_per_s), blocks_text(wide[0].case), percent(wide[1].of_memcpy)]
            if wide
            else [MISSING] * 3
        )
        quickest = [time_text(quick[1].times.p50), blocks_text(quick[0].case)] if quick else [MISSING] * 2
        failed = sum(record.status == "error" or record.verified is False for record in mine)
        rows.append([way, f"{nics or MISSING}", op, f"{len(mine)}", *widest, *quickest, f"{failed}"])
    return _MOVED, rows


# --- HTML and Markdown -----------------------------------------------------------------------------


def html_of(shown: Shown) -> str:
    """One block of HTML without scripts, styles of its own page, or anything fetched; all text escaped."""
    parts = [f"<div><strong>{escape(shown.title)}</strong>"]
    parts += [f"<br><small>{escape(shown.caption)}</small>"] if shown.caption else []
    parts += [f"<br><em>{escape(shown.mark)}</em>"] if shown.mark else []
    parts.append(html_table(shown.header, shown.rows[:MOST_ROWS]) if shown.rows else "<p>no rows yet</p>")
    if shown.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in shown.notes[:MOST_NOTES])
        parts.append(f"<ul>{items}</ul>")
    parts += [f"<p><small>{escape(shown.more)}</small></p>"] if shown.more else []
    return "\n".join([*parts, "</div>"])


def markdown_of(shown: Shown) -> str:
    parts = [
        f"**{_plain(shown.title)}**",
        _plain(shown.caption),
        f"*{_plain(shown.mark)}*" if shown.mark else "",
    ]
    parts.append(markdown_table(shown.header, shown.rows[:MOST_ROWS]) if shown.rows else "no rows yet")
    parts.append("\n".join(f"- {_plain(note)}" for note in shown.notes[:MOST_NOTES]))
    parts.append(shown.more)
    return "\n\n".join(part for part in parts if part) + "\n"


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Words of others as text: no table cell ends in them, no HTML begins."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
