"""Sections of a microbenchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvbench.report.findings.ahead import answer_text
from kvbench.report.findings.findings import folded
from kvbench.report.findings.transfers import answers, models_text
from kvbench.report.sections.facts import Facts, Material, drawings
from kvbench.report.tables.cells import sorted_cases
from kvbench.report.tables.table import MISSING, number
from kvbench.report.tables.transfers import CAPTION, LEGEND, pair_matrices
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.provenance import caption

_BUSY = "machine_busy"
_SHARES = (
    "Shares compare with the NICs' line rate, plain TCP and a memory copy for the same transfer "
    "in the same run; 1 means equal. Descriptors: per transfer. CPU: both sides together."
)


def _notes(lines: Iterable[object]) -> list[Note]:
    """Return one note per paragraph: a library's error may have several lines."""
    return [Note(str(line).replace("\n", " ")) for line in lines]


def _words(facts: Facts) -> list[Note]:
    return _notes(facts.run.plan.get("words") or ())


def _not_run(facts: Facts) -> list[Note]:
    left = [f"{item.get('what')}: {item.get('reason')}" for item in facts.left_out]
    return _notes([*facts.cases.skipped, *left])


def labs(facts: Facts) -> str:
    """Return the labs of the rows; empty for real hosts."""
    return ", ".join(sorted({record.lab for record in facts.records if record.lab}))


def head(of: Material) -> Iterator[ReportSection]:
    facts = of.one
    lab = f" · LAB {labs(facts)}" if labs(facts) else ""
    block = Block(f"KV TRANSFERS{lab}", caption(facts.run), style="dim")
    yield ReportSection("head", "", [block, Block(notes=_words(facts))], apart=True)


def requested(of: Material) -> Iterator[ReportSection]:
    if requested_notes := _words(of.one):
        yield ReportSection("asked", "", [Block(notes=requested_notes)])


def findings(of: Material) -> Iterator[ReportSection]:
    """Yield all findings by kind; on a page with the requested axes and failures."""
    facts = of.one
    blocks = list(folded(facts.statements))
    yield ReportSection("findings", "Findings", blocks, ("markdown",))
    notes = facts.cases.footnotes
    more = [
        Block("Requested", notes=[Note(str(text)) for text in facts.run.plan.get("words") or ()]),
        Block(f"Notes ({len(notes)})", notes=list(map(Note, notes)), folded=True),
        Block("Failed", notes=list(map(Note, facts.cases.errors))),
        Block("Not run", notes=list(map(Note, facts.cases.skipped))),
        Block("Run folder", notes=list(map(Note, facts.run.warnings))),
    ]
    yield ReportSection("findings", "Findings", [*blocks, *(part for part in more if part.notes)], ("html",))


def answer(of: Material) -> Iterator[ReportSection]:
    """Yield the first finding and the first plot."""
    text = answer_text((), of.one.statements)
    pictures = [Block(picture=drawing) for drawing in drawings(of.one.run)]
    yield ReportSection("answer", "Answer", [Block(words=text, style="lead"), *pictures])


def pictures(of: Material) -> Iterator[ReportSection]:
    for drawing in drawings(of.one.run):
        yield ReportSection(drawing.name, drawing.title, [Block(picture=drawing)])


def host_pairs(of: Material) -> Iterator[ReportSection]:
    matrices = [Block(table=matrix) for matrix in pair_matrices(of.one.records)]
    if matrices:
        yield ReportSection("pairs", "From host to host", [Block(words=f"{CAPTION}."), *matrices])


def cases(of: Material) -> Iterator[ReportSection]:
    facts, table = of.one, of.one.cases.table
    legend = Block(notes=[Note(LEGEND)], bullets=False)
    blocks = [Block(table=table), legend] if table.cells else [Block(words="no case was measured")]
    yield ReportSection("cases", "", blocks, ("terminal",))
    blocks = [Block(table=table)] if table.cells else []
    yield ReportSection("cases", "All cases", [*blocks, Block(words=f"{LEGEND}.")], ("markdown",))
    page = sorted_cases(facts.files["transfers"])
    blocks = [Block(words=_SHARES, table=page) if page else Block(words="No case was measured.")]
    if models := models_text(facts.records):
        blocks.append(Block("Transfer models", notes=list(map(Note, models))))
    yield ReportSection("result", "Result", blocks, ("html",))


def matrices(of: Material) -> Iterator[ReportSection]:
    blocks = [
        Block(f"from host to host · {matrix.title}", table=matrix) for matrix in pair_matrices(of.one.records)
    ]
    if blocks:
        yield ReportSection("pairs", "", [*blocks, Block(notes=[Note(CAPTION)], bullets=False)])


def case_notes(of: Material) -> Iterator[ReportSection]:
    facts = of.one
    models = _notes(models_text(facts.records))
    parts = (
        ("Notes", "notes", _notes(facts.cases.footnotes)),
        ("Failed", "failed", _notes(facts.cases.errors)),
        ("Not run", "not run", _not_run(facts)),
        ("Transfer models", "transfer models (fitted time of one transfer)", models),
        ("", "answers", _notes(answers(facts.records))),
        ("Run folder warnings", "run folder", _notes(facts.run.warnings)),
    )
    for title, brief, notes in parts:
        if notes:
            yield ReportSection(brief, brief, [Block(notes=notes)], ("terminal",))
        if notes and title:
            yield ReportSection(brief, title, [Block(notes=notes)], ("markdown",))


def changes(of: Material) -> Iterator[ReportSection]:
    found = of.changes
    if found is None:
        return
    blocks = []
    differing = [line for line in found.differing if not line.startswith("seed")]
    if differing:
        blocks.append(Block(words=f"the two runs differ in {'; '.join(differing)}", style="red"))
    title = f"compared with {found.before.run_id} (GB/s: before → after, ratio with its 99 % interval)"
    blocks.append(Block(title))
    earlier = found.before.transfer_records()
    if any(warning.kind == _BUSY for record in (*earlier, *of.one.records) for warning in record.warnings):
        words = "  the machine was busy in one of the runs, so a change may come from other work"
        blocks.append(Block(words=words, style="yellow"))
    lines = [
        f"{text} ({_rate(change.before_gb_per_s)} → {_rate(change.after_gb_per_s)})"
        for change, text in found.cases
    ]
    yield ReportSection("beside", "", [*blocks, Block(notes=_notes(lines))])


def _rate(value: float | None) -> str:
    return MISSING if value is None else number(value)


def files(of: Material) -> Iterator[ReportSection]:
    path = of.one.run.path
    words = f"files: {path} (report.md, tables/, figures/, transfers.parquet, logs/)"
    yield ReportSection("files", "", [Block(words=words)])
