"""report.html: the report of a run in one file that loads nothing, for a screen, a phone, or paper.

The findings come first, then tables that sort by a click, pictures, what the gates found, the machine, and
the exact commands. Every word of a run folder is escaped; the page's policy forbids any script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench.core.findings.findings import KIND_WORDS
from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.core.transfers.model import fit_all
from kvbench.files import write_bytes
from kvbench.report.findings.findings import as_notes, by_kind, statements
from kvbench.report.findings.notes import Note, ahead, notes
from kvbench.report.findings.transfers import models_text
from kvbench.report.html.parts import environment_section, gates_section, rerun_section, warnings_told
from kvbench.report.html.svg import inline_svg, page_svg, theme_css
from kvbench.report.html.tables import Block, HtmlTable, Section, csv_table, method_table
from kvbench.report.plots import NO_DATA, PICTURES, Picture
from kvbench.report.plots.transfer import bandwidth_figure, call_time_figure, scaling_figure
from kvbench.report.tables import cells
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import MISSING, Row, number, percent, shared_unit, time_line
from kvbench.report.tables.router_cost import RouterCost
from kvbench.report.tables.transfers import flat_row, tabled, time_text
from kvbench.results.provenance import caption, mark_of, scenario_of, slo_of
from kvbench.results.run import Run
from kvbench.version import __version__

NAME: Final = "report.html"
TEMPLATES: Final = Path(__file__).parents[1] / "templates"

Sheets = Mapping[str, Sequence[Mapping[str, Any]]]
"""Name of a CSV under tables/, without its ending → its rows."""


@dataclass(frozen=True)
class Page:
    """What the template is filled with."""

    title: str
    goal: str
    caption: str
    badge: str
    badge_why: str
    sections: Sequence[Section]
    run_id: str
    version: str = __version__


def write_html(
    run: Run,
    sheets: Sheets,
    rows: Sequence[Row] = (),
    costs: Sequence[RouterCost] = (),
    drawn: Path | None = None,
) -> Path:
    """Writes report.html into the run folder. ``sheets``: the rows of the CSVs, so that both say the same.

    ``drawn``: a folder in which the pictures lie as SVG; without one, or if one is missing, they are drawn.
    """
    path = run.path / NAME
    write_bytes(path, report_html(run, sheets, rows, costs, drawn).encode("utf-8", "replace"))
    return path


def report_html(
    run: Run,
    sheets: Sheets,
    rows: Sequence[Row] = (),
    costs: Sequence[RouterCost] = (),
    drawn: Path | None = None,
) -> str:
    """The whole page, for a run of any kind; parameters as in ``write_html``."""
    micro = run.manifest.get("kind") == "microbench"
    own = _microbench(run, sheets) if micro else _requests(run, sheets, rows, costs)
    pictures = _pictures(run, _TRANSFER_PICTURES if micro else PICTURES, drawn)
    parts = [*own, Section("pictures", "Pictures", pictures), gates_section(run), _trials(run, sheets)]
    sections = [
        section
        for section in (*parts, *_every_column(sheets), environment_section(run), rerun_section(run))
        if section.blocks
    ]
    mark, lab, status = mark_of(run), "lab" in run.labels, run.manifest.get("status")
    page = Page(
        title=_title(run),
        goal=" ".join([*([] if micro else [f"SLO: {slo_of(run).text()}."]), f"Status of the run: {status}."]),
        caption=caption(run),
        badge=mark.badge
        if mark
        else "LAB: hosts and NICs are network namespaces of one machine"
        if lab
        else "READ IN: measured by another tool"
        if run.manifest.get("kind") == "imported"
        else "",
        badge_why=f"{mark.why}. These are not figures of a GPU." if mark else "",
        sections=sections,
        run_id=run.run_id,
    )
    return _render(page)


def _title(run: Run) -> str:
    kind, name = str(run.manifest.get("kind")), scenario_of(run)
    methods = {trial.method for trial in run.all_trials}
    if kind == "microbench":
        what = "KV transfer microbenchmark"
    elif kind == "imported" or "imported" in methods:
        what = "imported results"
    elif kind == "bench":
        what = "one request rate"
    elif methods and methods <= {"fixed", "equal_rate"}:
        what = "listed request rates"
    else:
        what = "highest request rate under the SLO"
    mark = mark_of(run)
    return f"{name}: {what}" + (f" ({mark.word})" if mark else "")


def _render(page: Page) -> str:
    import jinja2
    from markupsafe import Markup

    script = (TEMPLATES / "report.js").read_text("utf-8").rstrip("\n")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html").render(
        page=page,
        css=Markup((TEMPLATES / "report.css").read_text("utf-8")),
        colours=Markup(theme_css()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


# --- a run of requests -----------------------------------------------------------------------------

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


def _requests(
    run: Run, sheets: Sheets, rows: Sequence[Row], costs: Sequence[RouterCost]
) -> Iterator[Section]:
    yield Section("findings", "Findings", list(_conclusions(run, rows)))
    beside = method_tables(run)
    blocks = [Block(table=_result(sheets.get("summary", ()), rows))] if rows else []
    if not rows and not beside:
        blocks.append(Block(words=f"No cell was measured; {NO_DATA}."))
    for each in beside:
        blocks.append(Block(title=each.title, words=each.words, table=method_table(each)))
    for cost in costs:
        blocks.append(Block(title=f"What the router adds: {cost.cell.connector}", words=cost.text()))
    yield Section("result", "Result", blocks)


def _conclusions(run: Run, rows: Sequence[Row]) -> Iterator[Block]:
    rule = cells.WHY_AHEAD if ahead(rows) else ""
    for words, found in by_kind(statements(run, rows)).items():
        yield Block(words, rule if words == KIND_WORDS["ahead"] else "", as_notes(found))
    limits = notes(run, rows, gates=False)
    if limits:
        yield Block("What limits what these numbers say", told=limits)


def _result(summary: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> HtmlTable | None:
    texts = {
        "max_request_rate": [row.rate_text() for row in rows],
        "limit": [LIMIT_WORDS.get(row.limit, "–") for row in rows],
        "slo_attainment": [cells.with_interval(row.values) for row in rows],
        "kv_bytes_per_request": [_megabytes(row.values["kv_bytes_per_request"]) for row in rows],
    }
    other = "max_request_rate_per_engine" if shared_unit(rows) == "GPU" else "max_request_rate_per_gpu"
    headings = {key: words for key, words in _RESULT.items() if key != other}
    return csv_table("summary", "One line per connector and input length", summary, headings, texts)


def _megabytes(size: float | None) -> str:
    return number(None if size is None else size / 1e6)


def _trials(run: Run, sheets: Sheets) -> Section:
    trials = sheets.get("trials", ())
    met = {"slo_attainment": [percent(row["slo_attainment"]) for row in trials]}
    table = csv_table("trials", "Every trial, in the order of measuring", trials, _TRIALS, met)
    told = time_line(run)
    return Section(
        "trials", "Trials", [Block(words=f"{told}." if told else "", table=table)] if table else []
    )


def _pictures(run: Run, pictures: Mapping[str, Picture], drawn: Path | None) -> list[Block]:
    from markupsafe import Markup, escape

    blocks = []
    for name, picture in pictures.items():
        alt, file = str(escape(picture.alt)), drawn / f"{name}.svg" if drawn else None
        if file is not None and file.is_file():
            svg = page_svg(file.read_text("utf-8"), name, alt)
        elif (figure := picture.draw(run, "light")) is not None:
            svg = inline_svg(figure, name, alt)
        else:
            continue
        blocks.append(Block(svg=Markup(svg), figure=f"{picture.title}. {picture.alt}"))
    return blocks


# --- a microbenchmark ------------------------------------------------------------------------------

_TRANSFERS: Final = {
    "backend": "backend",
    "protocol": "protocol",
    "nics": "NICs",
    "op": "op",
    "block_bytes": "block (bytes)",
    "batch_size": "blocks",
    "descriptors": "descriptors",
    "gb_per_s": "GB/s",
    "of_line_rate": "of line rate",
    "of_tcp": "of plain TCP",
    "of_memcpy": "of a memory copy",
    "call_s_p50": "P50",
    "call_s_p99": "P99",
    "cpu_s_per_gb": "CPU s/GB",
    "verified": "data right",
    "status": "status",
    "transport": "transport",
    "error": "error",
}


_SHARES: Final = (
    "The shares of the NICs' line rate, of plain TCP and of a copy in memory are those of the same transfer "
    "in the same run; 1 is all of it. Descriptors: handed over for one transfer. CPU: of both sides."
)
_TRANSFER_PICTURES: Final[Mapping[str, Picture]] = {
    "bandwidth": Picture(
        "Bandwidth by block size",
        "GB/s over the block size, one curve per way of moving bytes, with the line rate where it is known.",
        bandwidth_figure,
    ),
    "nic_scaling": Picture(
        "Bandwidth by number of NICs",
        "GB/s over the number of network cards, beside the ideal of as many times one card.",
        scaling_figure,
    ),
    "nic_share": PICTURES["nic_share"],
    "call_time": Picture(
        "Time of one transfer",
        "How long one transfer takes, by the number of blocks in it.",
        call_time_figure,
    ),
}


def _microbench(run: Run, sheets: Sheets) -> Iterator[Section]:
    records = run.transfer_records()
    table = tabled(records)
    words = [str(line) for line in run.plan.get("words") or ()]
    told = [
        *(Block(words, told=as_notes(found)) for words, found in by_kind(statements(run)).items()),
        Block("What was asked for", told=[Note(line) for line in words]),
        Block(f"Notes ({len(table.footnotes)})", told=list(map(Note, table.footnotes)), folded=True),
        Block("Failed", told=[Note(line) for line in table.errors]),
        Block("Not run", told=[Note(line) for line in table.skipped]),
        Block("The folder", told=warnings_told(run)),
    ]
    yield Section("findings", "Findings", [block for block in told if block.told])
    rows = sheets.get("transfers", ())
    texts = {
        key: [MISSING if row.get(key) is None else time_text(row[key]) for row in rows]
        for key in ("call_s_p50", "call_s_p99")
    }
    cases = csv_table("transfers", "Every case", rows, _TRANSFERS, texts)
    models = [Note(line) for line in models_text(records)]
    blocks = [Block(words=_SHARES, table=cases)] if cases else [Block(words="No case was measured.")]
    yield Section("result", "Result", [*blocks, *([Block("Transfer models", told=models)] if models else [])])


def transfer_sheets(run: Run) -> Sheets:
    """The rows of a microbenchmark's CSVs."""
    records = run.transfer_records()
    return {
        "transfers": [flat_row(record, records) for record in records],
        "transfer_model": [model.to_json() for model in fit_all(records)],
    }


def _every_column(sheets: Sheets) -> Iterator[Section]:
    blocks = []
    for name, rows in sheets.items():
        table = csv_table(name, f"tables/{name}.csv", rows)
        if table is not None:
            blocks.append(Block(f"{name}.csv, {len(rows):,} rows", table=table, folded=True, bulk=True))
    yield Section("columns", "Every column", blocks)
