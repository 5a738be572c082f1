"""Sections of a run of requests: sweep, bench, listed rates, imported results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvbench.core.findings.findings import KIND_WORDS
from kvbench.core.records import TrialRecord
from kvbench.report.findings.ahead import (
    answer_text,
    by_lengths,
    group_pairs,
    lead_text,
    lengths,
    limits_text,
    rate_pairs,
)
from kvbench.report.findings.findings import as_notes, folded
from kvbench.report.findings.load_rows import row_conclusions
from kvbench.report.findings.notes import (
    ahead,
    checked_lines,
    notes,
    notes_of_load,
    run_tally,
    status_lines,
)
from kvbench.report.sections.facts import Facts, Material, drawings
from kvbench.report.tables import cells
from kvbench.report.tables.result import Row, interval_word
from kvbench.report.tables.table import MISSING, STEADY, Table, number, of_texts, percent
from kvbench.report.tables.trial_values import engine_word, reason_text, time_line, trial_values
from kvbench.report.tables.vllm_bench import DIFFERENCE, bench_tables, bench_trials, refused_text
from kvbench.report.value import NO_DATA, Block, Note, ReportSection
from kvbench.results.provenance import caption, mark_of, model_of, scenario_of, server_of, slo_of
from kvbench.results.run import RunFolder

WHICH_SESSIONS: Final = (
    "Sessions begin open loop, at random times. Within a session each turn is sent "
    "one think time after the previous answer. Sessions/s: the "
    "highest sustained request rate divided by requests per session. The other columns describe the trial "
    "that supports it: concurrent sessions (with think times), TTFT of first and of "
    "later turns, and the share of all prompts' whole blocks that an unlimited cache could have "
    "found, a cache of the prefill engines' size could have found, and the engines did find."
)
_HEAD: Final = (
    "connector|sessions/s [interval]|at once|first TTFT P50 / P90 (ms)|later TTFT P50 / P95 (ms)|"
    "session P50 (s)|reuse offered / in pool / achieved (%)"
)


def sessions_table(run: RunFolder, rows: Sequence[Row]) -> Table | None:
    """Return the table of sessions (rate, concurrency, TTFT by turn, reuse), or None without sessions."""
    trials = {trial.trial_id: trial for trial in run.trials if trial.engine.get("sessions")}
    body = [_line(row, trials[row.trial_id]) for row in rows if row.trial_id in trials]
    return of_texts("", _HEAD.split("|"), body) if body else None


def _line(row: Row, trial: TrialRecord) -> list[str]:
    figures: dict[str, Any] = trial.engine["sessions"]
    per_session = float(figures["requests_each"])
    answer = row.answer
    rate = None if answer.max_request_rate is None else answer.max_request_rate / per_session
    ends = [None if end is None else end / per_session for end in (answer.lower, answer.upper)]
    rate_text = number(rate)
    if answer.outcome == "found":
        rate_text += f"{'' if answer.converged else '?'} [{number(ends[0])}, {number(ends[1])}]"
    elif answer.outcome == "at_least":
        rate_text = f"≥ {rate_text}"
    elif answer.outcome == "one_rate":
        rate_text = f"at {rate_text}"
    reuse = [figures.get(key) for key in ("offered_reuse", "offered_reuse_in_pool", "achieved_reuse")]
    return [
        row.cell.connector,
        rate_text,
        number(figures["at_once"]),
        _pair(figures["first_ttft_ms"], "p90"),
        _pair(figures["later_ttft_ms"], "p95"),
        number((figures["session_s"] or {}).get("p50")),
        " / ".join("–" if share is None else f"{100 * share:.1f}" for share in reuse),
    ]


def _pair(quantiles: dict[str, float] | None, tail: str) -> str:
    known = quantiles or {}
    return f"{number(known.get('p50'))} / {number(known.get(tail))}"


# --- in a terminal ---------------------------------------------------------------------------------


def heads(of: Material) -> Iterator[ReportSection]:
    blocks = []
    for facts in of.runs:
        run, mark = facts.run, mark_of(facts.run)
        marked = f"{mark.word.upper()} · " if mark is not None else ""
        title = f"{marked}{scenario_of(run)} · {slo_of(run).text()}"
        blocks.append(Block(_named(facts, title), caption(run), style="dim"))
    yield ReportSection("head", "", blocks, apart=True)


def _named(facts: Facts, text: str) -> str:
    return f"{facts.name}  {text}" if facts.name else text


def brief_result(of: Material) -> Iterator[ReportSection]:
    shown = [(facts.name, row) for facts, row in of.rows() if row.outcome != "skipped"]
    if shown:
        blocks = [Block(table=cells.brief_result(shown)), *_question_mark_note(row for _, row in shown)]
        yield ReportSection("result", "", blocks)
    elif not any(facts.methods for facts in of.runs):
        yield ReportSection("result", "", [Block(words=f"\nno cell was measured; {NO_DATA}")])


def _question_mark_note(rows: Iterable[Row]) -> list[Block]:
    """Return the meaning of a question mark after a rate, if one is shown."""
    marked = any("?" in row.answer.text() for row in rows)
    return [Block(words="? = the search stopped before it converged", style="dim")] if marked else []


def sessions(of: Material) -> Iterator[ReportSection]:
    for facts in of.runs:
        if (table := sessions_table(facts.run, facts.rows)) is not None:
            title = f"Sessions, {facts.name}" if facts.name else "Sessions"
            yield ReportSection("sessions", title, [Block(words=WHICH_SESSIONS, table=table)], apart=True)


def subject_lines(run: RunFolder) -> tuple[str, str]:
    """Return what a run measures, and the question that it answers."""
    mark, cells = mark_of(run), run.plan.get("cells")
    planned = [cell for cell in cells if isinstance(cell, Mapping)] if isinstance(cells, list) else []

    def listed(key: str) -> str:
        values = dict.fromkeys(cell.get(key) for cell in planned)
        return " and ".join(", ".join(f"{size:,}" if isinstance(size, int) else str(size) for size in part)
                            for part in (list(values)[:-1], list(values)[-1:]) if part)  # fmt: skip

    lengths = f"{listed('input_len')} tokens in, {listed('output_len')} out" if planned else ""
    what = (
        mark.word.upper() if mark is not None else "", scenario_of(run), server_of(run) or model_of(run),
        listed("connector"), lengths,
    )  # fmt: skip
    search = (run.plan.get("scenario") or {}).get("search") or {}
    goal = "listed request rates" if search.get("method") == "fixed" else "highest request rate"
    goal = "one load" if run.manifest.get("kind") == "bench" else goal
    return " · ".join(filter(None, what)), f"{goal} with {slo_of(run).text()}"


def screen(of: Material) -> Iterator[ReportSection]:
    """Yield the table, the winner, the number of checked outputs and of warnings, and the report's path."""
    facts = of.one
    run, path = facts.run, facts.run.path / "report.html"
    shown = [("", row) for row in facts.rows if row.outcome != "skipped"]
    blocks = [Block(table=cells.brief_result(shown), bare=True)] if shown else []
    blocks += [Block(method.title, table=method, bare=True) for method in facts.methods]
    if (session_table := sessions_table(run, facts.rows)) is not None:
        blocks.append(Block(table=session_table, bare=True))
    blocks += _question_mark_note(facts.rows)
    if not blocks:
        blocks.append(Block(words=f"no cell was measured; {NO_DATA}"))
    yield ReportSection("result", "", blocks, apart=True)
    count = len(facts.warnings)
    counted = f"{count or 'no'} warning{'s' * (count != 1)}"
    lines = (
        ("; ".join(status_lines(run)), "yellow"),
        (lead_text(facts.rows), "bold"),
        (next(checked_lines(run), ""), "bold red" if run_tally(run).wrong else ""),
        (f"report ({counted}): {path if path.exists() else run.path}", "yellow" if count else ""),
    )
    lead = [Block(words=text, style=style) for text, style in lines if text]
    yield ReportSection("lead", "", lead, apart=True)


def clients(of: Material) -> Iterator[ReportSection]:
    """Yield the load generator's quality and the share of time spent measuring."""
    lines = [
        _named(facts, line)
        for facts in of.runs
        for line in (_client_line(facts.run), time_line(facts.run))
        if line
    ]
    yield ReportSection("client", "", [Block(words=line, style="dim") for line in lines])


def _client_line(run: RunFolder) -> str:
    """Return the load generator's worst figures over all trials; empty if unreported."""
    trials = [(trial_values(trial), engine_word(trial, "client.stamps")) for trial in run.trials]

    def worst(column: str) -> float | None:
        return max((known for values, _ in trials if (known := values[column]) is not None), default=None)

    lag = worst("client_send_lag_ms_p99")
    if lag is None:
        return ""
    late, stamps = worst("client_chunk_lag_ms_p99"), sorted({word for _, word in trials if word})
    workers = int(worst("client_workers") or 1)
    parts = [
        f"sends {number(lag)} ms late" + (f", reads {number(late)} ms late" if late is not None else ""),
        *([f"{' and '.join(stamps)} stamps"] if stamps else []),
        f"{workers} process{'es' if workers > 1 else ''}",
    ]
    return f"client (P99, worst trial): {'; '.join(parts)}"


def checked_answers(of: Material) -> Iterator[ReportSection]:
    checked = [(facts, list(checked_lines(facts.run))) for facts in of.runs]
    blocks = [Block(words=_named(facts, line)) for facts, lines in checked for line in lines]
    wrong = any(run_tally(facts.run).wrong for facts in of.runs)
    if wrong:
        blocks = [replace(block, style="bold red") for block in blocks]
    yield ReportSection("checked", "", blocks)


def not_comparable(of: Material) -> Iterator[ReportSection]:
    words = "NOT COMPARABLE, combined by --force: the runs differ in"
    differences = Block(words=words, notes=[Note(line) for line in of.differing], style="bold red")
    yield ReportSection("differ", "", [differences] if of.differing else [], apart=True)


def conclusions_by_kind(of: Material) -> Iterator[ReportSection]:
    for facts in of.runs:
        statements = row_conclusions([facts.run])
        for kind, heading in KIND_WORDS.items():
            if conclusions := as_notes(statement for statement in statements if statement.kind == kind):
                title = f"{heading.lower()}, {facts.name}" if facts.name else heading.lower()
                yield ReportSection(kind, title, [Block(notes=conclusions)])


def who_is_ahead(of: Material) -> Iterator[ReportSection]:
    notes_ahead = [Note(text) for text in ahead([row for _, row in of.rows()])]
    if notes_ahead:
        yield ReportSection(
            "ahead",
            "comparison of max request rates (from the searches' posteriors)",
            [Block(notes=notes_ahead)],
        )


def router(of: Material) -> Iterator[ReportSection]:
    for facts in of.runs:
        if facts.costs:
            words = f"router overhead in {facts.name}" if facts.name else "router overhead"
            yield ReportSection("router", words, [Block(notes=[Note(cost.text()) for cost in facts.costs])])


def all_notes(of: Material) -> Iterator[ReportSection]:
    for facts in of.runs:
        if found := notes(facts.run, facts.rows):
            yield ReportSection(
                "notes", f"notes on {facts.name}" if facts.name else "notes", [Block(notes=found)]
            )


def bench_block(of: Material) -> Iterator[ReportSection]:
    """Yield the result of one load, and one line with the reason of each refused one."""
    tables = bench_tables([(facts.name, facts.run) for facts in of.runs])
    blocks = [Block(table=table) for table in tables]
    blocks += [Block(words=DIFFERENCE.replace("`", ""), style="dim")] if tables else []
    blocks += [
        Block(f"\n{table.title}", table=table)
        for facts in of.runs
        for table in facts.methods
        if table.name == "trace"
    ]
    refused = [
        Note(refused_text(trial), next((x.advice for x in trial.findings if x.level == "invalid"), ""), "red")
        for facts in of.runs
        for trial in bench_trials(facts.run)
        if trial.verdict == "invalid"
    ]
    blocks += [Block(notes=refused, bullets=False)] if refused else []
    yield ReportSection("bench", "", blocks or [Block(words=f"no load was measured; {NO_DATA}")], apart=True)


def bench_notes(of: Material) -> Iterator[ReportSection]:
    """Yield the notes on one load that its reader needs; the report has all."""
    for facts in of.runs:
        if found := notes_of_load(facts.run, facts.rows):
            title = f"notes on {facts.name}" if facts.name else "notes"
            yield ReportSection("notes", title, [Block(notes=found)])


# --- on pages --------------------------------------------------------------------------------------


def answer(of: Material) -> Iterator[ReportSection]:
    """Yield the answer and the first plot; on a page one sentence, and one table row per input length."""
    facts = of.one
    text, pictures = (
        answer_text(facts.rows, facts.statements),
        [Block(picture=drawing) for drawing in drawings(facts.run)],
    )
    blocks = [Block(words=text)] if text else []
    yield ReportSection("answer", "Answer", [*blocks, *pictures], ("markdown",))
    lead = lead_text(facts.rows)
    blocks = [Block(words=lead or text, style="lead")] if text else []
    if run_tally(facts.run).wrong:
        blocks = [Block(words=next(checked_lines(facts.run)), style="bad"), *blocks]
    if lead and (limits := limits_text(facts.rows)) and limits != lead:
        blocks.append(Block(words=limits))
    if (table := by_input_len(facts.rows)) is not None:
        blocks.append(Block(table=table))
    yield ReportSection("answer", "Answer", [*blocks, *pictures], ("html",))


def by_input_len(rows: Sequence[Row]) -> Table | None:
    """Return one row per input length: every connector's rate, who is ahead. None without a search."""
    found = [row for row in rows if row.outcome not in ("one_rate", "skipped")]
    names, pairs = list(dict.fromkeys(row.name for row in found)), by_lengths(rate_pairs(found))
    keys = sorted(set(map(lengths, found)))
    if not keys:
        return None
    outputs = len({output_len for _, output_len in keys}) > 1
    cells = []
    for key in keys:
        rates = {row.name: row.rate_text() for row in found if lengths(row) == key}
        parts = group_pairs(pairs.get(key, ()))
        ordered = ", ".join(pair.relation() for pair in parts.ordered)
        alike = "no significant difference" if parts.alike and not any(parts._replace(alike=[])) else ""
        comparison = ordered or alike or ", ".join(dict.fromkeys(pair.text() for pair in pairs.get(key, ())))
        input_len = f"{key[0]:,}" + (f" ({key[1]:,} out)" if outputs else "")
        cells.append([input_len, *(rates.get(name, MISSING) for name in names), comparison or MISSING])
    word = interval_word(row.answer for row in found)
    header = ["input (tokens)", *names, *(["ahead"] if len(names) > 1 else [])]
    title = f"Highest request rate within the SLO, in req/s {word}"
    return of_texts(title, header, [row[: len(header)] for row in cells])


def findings(of: Material) -> Iterator[ReportSection]:
    """Yield all findings by kind; on a page with caveats."""
    facts = of.one
    rule = cells.WHY_AHEAD if ahead(facts.rows) else ""
    blocks = list(folded(facts.statements, rule, facts.warnings))
    checked = [Note(line) for line in checked_lines(facts.run)]
    for title, notes_of in (("Outputs checked", checked), (f"Caveats ({len(facts.limits)})", facts.limits)):
        if notes_of:
            blocks.append(Block(title, notes=notes_of, folded=True, writers=("html",)))
    yield ReportSection("findings", "Findings", blocks)


def result(of: Material) -> Iterator[ReportSection]:
    """Yield the highest rates; on a page also other methods and router overhead."""
    facts = of.one
    blocks = []
    if facts.rows and not bench_trials(facts.run):  # a load has its block, under what was measured
        blocks.append(Block(table=cells.result(facts.rows), writers=("markdown",)))
        for table in cells.sorted_result(facts.rows, facts.files["summary"]):
            blocks.append(Block(table=table, writers=("html",)))
    elif not facts.methods:
        blocks.append(Block(words=f"No cell was measured; {NO_DATA}."))
    if blocks:
        yield ReportSection("result", "Result", blocks, ("markdown",))
    more = [Block(method.title, table=method) for method in facts.methods]
    more += [Block(f"Router overhead: {cost.cell.connector}", cost.text()) for cost in facts.costs]
    yield ReportSection("result", "Result", [*blocks, *more], ("html",))


def methods(of: Material) -> Iterator[ReportSection]:
    for facts in of.runs:
        for table in facts.methods:
            heading = f"{table.title} in {facts.name}" if facts.name else table.title
            yield ReportSection(table.name, heading, [Block(table=table)])


def limits(of: Material) -> Iterator[ReportSection]:
    block = Block(notes=of.one.limits) if of.one.limits else Block(words="None.")
    yield ReportSection("notes", "Notes", [block])


def provenance(of: Material) -> Iterator[ReportSection]:
    """Yield the sources of imported results: files, missing figures, exclusions."""
    if not of.one.is_imported:
        return
    imported: Mapping[str, Any] = of.one.run.manifest.get("imported") or {}
    read = [
        [
            file.get("name"), file.get("format"), f"{file.get('tool')} {file.get('version') or ''}",
            file.get("lines"), file.get("sha256"),
        ]
        for file in imported.get("files", ())
    ]  # fmt: skip
    missing = ", ".join(f"{name} ({count})" for name, count in (imported.get("missing") or {}).items())
    left = [
        Note(f"{entry.get('file')}:{entry.get('line')}: {entry.get('why')}")
        for entry in imported.get("left_out") or ()
    ]
    out = Block(words="Left out, or with caveats:" if left else "Nothing was left out.", notes=left)
    blocks = [
        Block(table=of_texts("", ["file", "format", "tool", "lines", "SHA-256"], read)),
        Block(words=f"Not reported, with the number of rows: {missing or 'nothing'}."),
        out,
    ]
    if qualifiers := list(_qualifiers(of.one.run)):
        blocks.append(Block(words="Notes on the rows:", notes=qualifiers))
    yield ReportSection("source", "Sources of the rows", blocks)


def _qualifiers(run: RunFolder) -> Iterator[Note]:
    for trial in run.other_trials:
        source = trial.engine.get("source") or {}
        for text in source.get("qualifiers") or ():
            yield Note(f"{source.get('file')}:{source.get('line')}: {text}")


def at_supporting_trials(of: Material) -> Iterator[ReportSection]:
    """Yield latency, TTFT parts, router, rates and load generator of the supporting trials."""
    facts = of.one
    if facts.is_imported:
        return
    none = "No rate has a supporting trial."
    latency = cells.latencies(facts.rows)
    blocks = [Block(table=latency)] if latency else [Block(words=cells.WHICH_TRIAL), Block(words=none)]
    yield ReportSection("latency", "Latency at the supporting trial", blocks)
    if (parts := cells.breakdown(facts.rows)) is not None:
        yield ReportSection("parts", parts.title, [Block(table=parts)])
    if facts.costs:
        blocks = [Block(words=cells.WHICH_COSTS)]
        for cost in facts.costs:
            head = f"{cost.cell.connector}, {cost.cell.input_len:,} in, {number(cost.request_rate)} req/s"
            left = f", {cost.left_out} more were not answered in both runs" if cost.left_out else ""
            trials_text = f"{cost.requests:,} requests each way{left}. Trials: {', '.join(cost.trials)}."
            if cost.added:
                blocks += [Block(head, table=cells.router_cost(cost)), Block(words=trials_text)]
            else:
                blocks.append(Block(head, f"{cost.reason}."))
        yield ReportSection("router", "Router overhead", blocks)
    rates = cells.rates(facts.rows)
    title = "Rates, KV cache and prefix cache at the supporting trial"
    yield ReportSection("rates", title, [Block(table=rates) if rates else Block(words=none)])
    if (client := cells.client(facts.rows)) is not None:
        yield ReportSection("client", client.title, [Block(table=client)])


def searches(of: Material) -> Iterator[ReportSection]:
    run = of.one.run
    if of.one.is_imported:
        return
    tried = list(dict.fromkeys(trial.cell for trial in run.trials))
    blocks = [] if tried else [Block(words="No trial was run.")]
    if measuring := time_line(run):
        blocks.append(Block(words=f"{measuring}."))
    header = [
        "trial",
        "purpose",
        "rate",
        "verdict",
        "met (%)",
        "TTFT P50 / P99 (ms)",
        "TPOT P50 / P99 (ms)",
        "reason",
    ]
    for cell in tried:
        tried_there = run.trials_of(cell)
        rows, names = map(_trial_cells, tried_there), [trial.trial_id for trial in tried_there]
        table = of_texts("", header, rows, window=STEADY, trials=names)
        blocks.append(Block(f"{cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out", table=table))
    yield ReportSection("search", "Search", blocks)


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
        reason_text(trial),
    ]


def trials(of: Material) -> Iterator[ReportSection]:
    table, measuring = cells.sorted_trials(of.one.files["trials"]), time_line(of.one.run)
    blocks = [Block(words=f"{measuring}." if measuring else "", table=table)] if table else []
    yield ReportSection("trials", "Trials", blocks)
