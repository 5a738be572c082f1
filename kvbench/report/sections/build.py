"""The report of one or several runs: all sections in order, the run's title, and its summary for
notebooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvbench.core.transfers.records import TransferRecord
from kvbench.core.transfers.stats import figures
from kvbench.report.findings.notes import notes
from kvbench.report.sections import facts as any_run
from kvbench.report.sections import requests, transfers
from kvbench.report.sections.facts import Facts, Material, drawings
from kvbench.report.sections.transfers import labs
from kvbench.report.side_by_side import Changes, short_name
from kvbench.report.tables import cells
from kvbench.report.tables.columns import OF_WHOLE_RUN
from kvbench.report.tables.fault_rows import (
    answers_text,
    fault_groups,
    fault_table,
    notices_rows,
    recovery_lines,
)
from kvbench.report.tables.soak_rows import drift_table, soak_trials, verdict_lines
from kvbench.report.tables.table import MISSING, WHOLE_RUN, Table, number, of_texts, percent
from kvbench.report.tables.transfers import blocks_text, time_text, way_text
from kvbench.report.tables.vllm_bench import about, bench_tables, bench_trials, serve_values
from kvbench.report.value import WRITERS, Block, Note, Report, ReportSection, Writer
from kvbench.results.provenance import caption, mark_of, scenario_of, slo_of
from kvbench.results.run import RunFolder


def fault_head(of: Material) -> Iterator[ReportSection]:
    run, groups = of.one.run, fault_groups(of.one.run)
    lines = [Block(words=caption(run), style="dim"), Block(words=answers_text(groups))]
    yield ReportSection("head", "", lines, apart=True)


def fault_answer(of: Material) -> Iterator[ReportSection]:
    groups = fault_groups(of.one.run)
    notes = [Note(text) for text in (answers_text(groups), *recovery_lines(groups))]
    pictures = [Block(picture=drawing) for drawing in drawings(of.one.run)]
    yield ReportSection("answer", "Answer", [Block(notes=notes), *pictures], ("markdown", "html"))
    yield ReportSection(
        "answer", "", [Block(notes=[Note(line) for line in recovery_lines(groups)])], ("terminal",)
    )


def fault_section(of: Material) -> Iterator[ReportSection]:
    groups = fault_groups(of.one.run)
    if not groups:
        yield ReportSection("faults", "", [Block(words="no fault was injected yet")])
        return
    table = fault_table(groups)
    yield ReportSection("faults", table.title, [Block(words=table.words, table=table)], ("markdown", "html"))
    yield ReportSection("faults", "", [Block(table=table)], ("terminal", "notebook"))


def notices(of: Material) -> Iterator[ReportSection]:
    """List which log reported each fault's first repeat, and when."""
    rows = notices_rows(fault_groups(of.one.run))
    shown = of_texts("", ["pair", "fault", "who", "after (s)", "message"], rows, "left")
    words = "First repeat of each fault. `kvbench`: the check that ends a sweep's cell."
    blocks = [Block(words=words, table=shown)] if rows else []
    yield ReportSection("notices", "Detection", blocks)


def soak_head(of: Material) -> Iterator[ReportSection]:
    yield ReportSection("head", "", [Block(words=caption(of.one.run), style="dim")], apart=True)


def soak_answer(of: Material) -> Iterator[ReportSection]:
    run = of.one.run
    notes = [Note(text) for text in verdict_lines(run)]
    pictures = [Block(picture=drawing) for drawing in drawings(run)]
    yield ReportSection("answer", "Answer", [Block(notes=notes), *pictures], ("markdown", "html"))
    yield ReportSection("answer", "", [Block(notes=notes)], ("terminal",))


def soak_section(of: Material) -> Iterator[ReportSection]:
    run = of.one.run
    if not soak_trials(run):
        return
    table = drift_table(run)
    yield ReportSection("drift", table.title, [Block(words=table.words, table=table)], ("markdown", "html"))
    yield ReportSection("drift", "", [Block(table=table)], ("terminal", "notebook"))


_SEARCHED: Final = "highest request rate under the SLO"
_HELD: Final = {
    "bench": "one request rate",
    "chaos": "cost of faults at a fixed rate",
    "soak": "a fixed rate over a long time",
}
"""Subject of a run that searches no rate, by kind."""


def titles(facts: Facts) -> Mapping[Writer, str]:
    run, mark = facts.run, mark_of(facts.run)
    kind = str(run.manifest.get("kind") or "sweep")
    marked = f" ({mark.word})" if mark else ""
    if facts.is_microbench:
        what = "KV transfer microbenchmark"
        heading = what + (f" (lab: {labs(facts)})" if labs(facts) else "")
        goal = ""
    else:
        what, goal = _measured(facts, kind), slo_of(run).text()
        subject = "imported results" if facts.is_imported else _HELD.get(kind, _SEARCHED)
        heading = f"{scenario_of(run)}: {subject}{marked}"
    parts = dict.fromkeys((scenario_of(run), kind, goal))
    return {
        "markdown": heading,
        "html": f"{scenario_of(run)}: {what}{marked}",
        "notebook": " · ".join(part for part in parts if part),
    }


def _measured(facts: Facts, kind: str) -> str:
    methods = {trial.method for trial in facts.run.all_trials}
    if facts.is_imported or "imported" in methods:
        return "imported results"
    if kind in _HELD:
        return _HELD[kind]
    if methods and methods <= {"fixed", "equal_rate"}:
        return "listed request rates"
    return _SEARCHED


def of_requests(of: Material) -> Iterator[ReportSection]:
    """Yield the resulting rates, or the offered loads if nothing was searched."""
    searched = of.one.rows or not of.one.run.other_trials
    blocks = bench_tables([("", of.one.run)])
    yield _gist(of.one, blocks[0] if blocks else cells.gist(of.one.rows) if searched else _tried(of.one))


def of_transfers(of: Material) -> Iterator[ReportSection]:
    yield _gist(of.one, _moved(of.one.records))


def _gist(facts: Facts, table: Table) -> ReportSection:
    mark = mark_of(facts.run)
    shown_notes = [note for note in notes(facts.run, facts.rows) if mark is None or mark.why not in note.text]
    shown = Block(table=table) if table.cells else Block(words="no rows yet")
    return ReportSection("gist", "", [shown, *([Block(notes=shown_notes)] if shown_notes else [])])


_TRIED_KEYS: Final = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms",
)  # fmt: skip
_TRIED: Final = (
    "connector", "input", "offered req/s",
    *(f"{title}{OF_WHOLE_RUN}" for title in (
        "req/s", "output tok/s", "TTFT mean (ms)", "TTFT P99 (ms)", "TPOT mean (ms)", "TPOT P99 (ms)",
    )),
)  # fmt: skip
_MOVED: Final = (
    "way", "NICs", "op", "cases", "best GB/s", "with", "of memcpy %", "lowest P50", "with ", "failed",
)  # fmt: skip


def _tried(facts: Facts) -> Table:
    rows = [
        [f"{named['connector']}", f"{named['input_len']:,}", number(named["request_rate"])]
        + [number(served[key]) for key in _TRIED_KEYS]
        for trial in facts.run.other_trials
        for named, served in [(about(trial), serve_values(trial))]
    ]
    names = [trial.trial_id for trial in facts.run.other_trials]
    return of_texts("", _TRIED, rows, window=WHOLE_RUN, trials=names)


def _moved(records: Sequence[TransferRecord]) -> Table:
    """Return a row per transfer configuration: its highest bandwidth and lowest latency."""
    ways: dict[tuple[str, int, str], list[TransferRecord]] = {}
    for record in records:
        if record.status != "skipped":
            case = record.case
            ways.setdefault((way_text(case), case.nics, case.op), []).append(record)
    rows = []
    for (way, nics, op), group in ways.items():
        measured = [(record, figures(record, records)) for record in group if record.status == "ok"]
        highest = max(measured, key=lambda pair: pair[1].gb_per_s or 0.0, default=None)
        lowest = min(measured, key=lambda pair: pair[1].times.p50 or math.inf, default=None)
        widest = (
            [number(highest[1].gb_per_s), blocks_text(highest[0].case), percent(highest[1].of_memcpy)]
            if highest
            else [MISSING] * 3
        )
        quickest = [time_text(lowest[1].times.p50), blocks_text(lowest[0].case)] if lowest else [MISSING] * 2
        failed = sum(record.status == "error" or record.verified is False for record in group)
        rows.append([way, nics or MISSING, op, len(group), *widest, *quickest, failed])
    return of_texts("", _MOVED, rows)


_Order = Sequence[tuple[Callable[[Material], Iterable[ReportSection]], Sequence[Writer]]]
_PAGES: Final = ("markdown", "html")

REQUESTS: Final[_Order] = (
    (requests.heads, ("terminal",)),
    (requests.checked_answers, ("terminal", "markdown", "notebook")),
    (requests.screen, ("screen",)),
    (requests.brief_result, ("terminal",)),
    (requests.sessions, ("terminal",)),
    (requests.clients, ("terminal",)),
    (requests.not_comparable, ("terminal",)),
    (requests.conclusions_by_kind, ("terminal",)),
    (requests.answer, _PAGES),
    (requests.result, _PAGES),
    (requests.sessions, _PAGES),
    (requests.findings, _PAGES),
    (any_run.pictures, _PAGES),
    (requests.methods, ("terminal", "markdown")),
    (requests.who_is_ahead, ("terminal",)),
    (requests.router, ("terminal",)),
    (requests.all_notes, ("terminal",)),
    (requests.limits, ("markdown",)),
    (requests.provenance, ("markdown",)),
    (requests.at_supporting_trials, ("markdown",)),
    (requests.searches, ("markdown",)),
    (any_run.gates, _PAGES),
    (requests.trials, ("html",)),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (of_requests, ("notebook",)),
    (any_run.files, ("terminal",)),
)
BENCH: Final[_Order] = (
    (requests.heads, ("terminal",)),
    (requests.checked_answers, ("terminal",)),
    (requests.bench_block, ("terminal",)),
    (requests.sessions, ("terminal",)),
    (requests.clients, ("terminal",)),
    (requests.not_comparable, ("terminal",)),
    (requests.conclusions_by_kind, ("terminal",)),
    (requests.router, ("terminal",)),
    (requests.bench_notes, ("terminal",)),
    (any_run.files, ("terminal",)),
    *((make, shown) for make, writers in REQUESTS if (shown := [x for x in writers if x != "terminal"])),
)
"""One load: a terminal shows the block of ``vllm bench serve`` in place of tables of rates."""
TRANSFERS: Final[_Order] = (
    (transfers.head, ("terminal",)),
    (transfers.requested, ("markdown",)),
    (transfers.answer, _PAGES),
    (transfers.findings, _PAGES),
    (transfers.pictures, ("markdown",)),
    (transfers.host_pairs, ("markdown",)),
    (transfers.cases, ("terminal", *_PAGES)),
    (transfers.matrices, ("terminal",)),
    (transfers.case_notes, ("terminal", "markdown")),
    (transfers.changes, ("terminal",)),
    (any_run.pictures, ("html",)),
    (any_run.every_column, ("html",)),
    (any_run.environment, ("html",)),
    (any_run.again, ("html",)),
    (of_transfers, ("notebook",)),
    (transfers.files, ("terminal",)),
)

CHAOS: Final[_Order] = (
    (fault_head, ("terminal",)),
    (fault_answer, ("terminal", *_PAGES)),
    (fault_section, ("terminal", "notebook", *_PAGES)),
    (requests.findings, _PAGES),
    (notices, _PAGES),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (any_run.files, ("terminal",)),
)
SOAK: Final[_Order] = (
    (soak_head, ("terminal",)),
    (soak_answer, ("terminal", *_PAGES)),
    (soak_section, ("terminal", "notebook", *_PAGES)),
    (requests.findings, _PAGES),
    (any_run.gates, _PAGES),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (any_run.files, ("terminal",)),
)
_BY_KIND: Final = {"microbench": TRANSFERS, "chaos": CHAOS, "soak": SOAK}


def build(
    runs: RunFolder | Sequence[RunFolder],
    differing: Sequence[str] = (),
    changes: Changes | None = None,
    writers: Sequence[Writer] = WRITERS,
) -> Report:
    """Build the report of a run for ``writers``; several runs of requests share one for a terminal.
    ``differing``: differences that make them incomparable. ``changes``: comparison of microbenchmarks."""
    runs = [runs] if isinstance(runs, RunFolder) else list(runs)
    several = len(runs) > 1
    of = [Facts(run, short_name(index) if several else "") for index, run in enumerate(runs)]
    material = Material(of, differing, changes)
    one = of[0]
    if several:
        writers = ("terminal",)
    order = BENCH if all(bench_trials(facts.run) for facts in of) else _BY_KIND.get(one.kind, REQUESTS)
    sections = [
        replace(section, writers=shown)
        for make, for_ in order
        if set(for_) & set(writers)
        for section in make(material)
        if (shown := [writer for writer in writers if writer in for_ and writer in section.writers])
    ]
    whole = set(_PAGES) <= set(writers)
    return Report(
        one.run.run_id,
        one.run.path,
        titles(one),
        any_run.goal(one),
        caption(one.run),
        any_run.badge(one),
        mark_of(one.run),
        sections,
        one.files if whole else {},
        one.documents if whole else {},
    )
