"""Caveats of a result table: incomplete runs, checks not run, checked answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvbench import engines
from kvbench.core.canaries.answer_kinds import found_in_any, percent_text, wrong_share_bound
from kvbench.core.canaries.tally import Tally
from kvbench.core.findings.findings import Statement
from kvbench.core.findings.setups import transport_warnings, unequal_ranks
from kvbench.core.gates.gates import CORRUPT
from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.core.records import Cell
from kvbench.report.findings.ahead import by_lengths, group_pairs, rate_pairs, withheld_texts
from kvbench.report.findings.findings import as_notes, drifts, gate_warnings, refusals
from kvbench.report.tables.result import Row
from kvbench.report.tables.table import MISSING, Column, Table, number
from kvbench.report.value import Note
from kvbench.results.finished_cells import ELSEWHERE, changed_outputs
from kvbench.results.provenance import mark_of
from kvbench.results.run import CellResult, RunFolder

NO_REFERENCE: Final = "no aggregated server to compare outputs with"

_Lacking = Mapping[str, Sequence[str]]
"""Missing evidence → gates."""


def unseen_gates(run: RunFolder, rows: Sequence[Row]) -> Iterable[Note]:
    """List the checks not run, one note per set of deployments with the same gaps. Only the trials behind the
    table count, or all trials if there are none; a gate is listed if it lacked evidence in each of them."""
    shown = {row.trial_id for row in rows if row.trial_id}
    trials = [trial for trial in run.all_trials if isinstance(trial.summary.get("unseen"), Mapping)]
    behind = [trial for trial in trials if trial.trial_id in shown]
    by_connector: dict[str, list[_Lacking]] = {}
    for trial in behind or trials:
        by_connector.setdefault(trial.cell.connector, []).append(trial.summary["unseen"])
    compared = {cell.cell.connector for cell in run.cells if cell.equal_outputs is not None}
    reference = {str(row.get("label")) for row in run.outputs}
    names_by_gaps: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for name, lacking in by_connector.items():
        gaps = _lacking_in_all(lacking)
        if name not in compared | reference:
            gaps[NO_REFERENCE] = [CORRUPT.name]
        if gaps:
            key = tuple((why, tuple(gates)) for why, gates in gaps.items())
            names_by_gaps.setdefault(key, []).append(name)
    for parts, names in names_by_gaps.items():
        listed = "; ".join(f"{', '.join(gates)} ({why})" for why, gates in parts)
        yield Note(
            f"checks not run for {', '.join(names)}: {listed}",
            "`kvbench doctor --gates` explains each gate",
        )


def _lacking_in_all(lacking: Sequence[_Lacking]) -> dict[str, list[str]]:
    always = set.intersection(*({gate for gates in gaps.values() for gate in gates} for gaps in lacking))
    latest = {why: [gate for gate in gates if gate in always] for why, gates in lacking[-1].items()}
    return {why: gates for why, gates in latest.items() if gates}


MOST_DIFFERENCES: Final = 5


def notes(run: RunFolder, rows: Sequence[Row], *, gates: bool = True) -> list[Note]:
    """Return all caveats of the run's rows, most important first. ``gates``: include gate findings and
    drift."""
    found = [
        *_state(run),
        *_setup_notes(run, rows),
        *_limits(rows),
        *unseen_gates(run, rows),
    ]
    return [*found, *_gate_notes(run, rows)] if gates else found


def warnings(run: RunFolder, rows: Sequence[Row], found: Sequence[Statement]) -> list[Note]:
    """Return the notes that report a problem: the warnings among the findings, then those of folder and
    setup. The terminal counts them, and the report lists them."""
    suspicious = as_notes(statement for statement in found if statement.kind == "suspicious")
    return [*suspicious, *map(Note, run.warnings), *_setup_notes(run, rows)]


def _setup_notes(run: RunFolder, rows: Sequence[Row]) -> Iterator[Note]:
    yield from _not_measured(run)
    yield from _over_tcp(run)
    yield from _unequal(run, rows)
    yield from _cells(rows)
    yield from _predictions(rows)


def _gate_notes(run: RunFolder, rows: Sequence[Row]) -> Sequence[Note]:
    return list(as_notes([*refusals(run), *gate_warnings(run, rows), *drifts(run, rows)]))


def status_lines(run: RunFolder) -> Iterator[str]:
    """Describe the state of a run that is not complete."""
    status, error = run.manifest.get("status"), str(run.manifest.get("error") or "")
    if status == "complete":
        return
    detail = f": {error}" if error and error != status else ""
    yield (
        "the run is still in progress; results so far"
        if status == "running"
        else f"the run is {status}{detail}; results up to that point"
    )
    planned = run.plan.get("cells")
    if isinstance(planned, list) and len(run.cells) < len(planned):
        yield f"{len(run.cells)} of {len(planned)} cells are finished"


def notes_of_load(run: RunFolder, rows: Sequence[Row]) -> list[Note]:
    """Return the caveats of one load that neither its block nor its title states."""
    mark, refused_cells = mark_of(run), {trial.cell for trial in run.all_trials if trial.verdict == "invalid"}
    return [
        *(note for note in _state(run) if mark is None or mark.why not in note.text),
        *_not_measured(run),
        *_over_tcp(run),
        *_unequal(run, rows),
        *_cells([row for row in rows if row.cell not in refused_cells]),
        *as_notes(gate_warnings(run, rows)),
    ]


def _state(run: RunFolder) -> Iterable[Note]:
    yield from map(Note, status_lines(run))
    if (run.path / "against.md").is_file():
        yield Note("the loads of another run were simulated: against.md compares the figures")
    mark = mark_of(run)
    if mark is not None:
        yield Note(f"{mark.word}: {mark.why}")
    yield from _sessions(run)
    for label, figures in (run.manifest.get("simulated_with") or {}).items():
        yield Note(f"{label} was simulated with {figures}")
    for warning in run.warnings:
        yield Note(warning)


def _sessions(run: RunFolder) -> Iterable[Note]:
    """Report sessions of a resumed run with other conditions or other greedy outputs."""
    for index, session in enumerate(run.manifest.get("sessions") or (), 1):
        differs = session.get("differs") or ()
        if differs:
            more = f", and {len(differs) - MOST_DIFFERENCES} more" if len(differs) > MOST_DIFFERENCES else ""
            yield Note(
                f"{ELSEWHERE}: session {index} of {len(run.manifest['sessions'])} ran under other "
                f"conditions: {'; '.join(differs[:MOST_DIFFERENCES])}{more}",
                "compare its results with the rest only where these differences do not matter; "
                "manifest.json has the sessions' times",
            )
    for label, length, then, now in changed_outputs(run.outputs):
        yield Note(
            f"{label} at {length:,}: its greedy outputs differed when requested again in a "
            f"later session ({_quoted(then)} then, {_quoted(now)} now); later results are compared "
            "with the later outputs",
            "outputs that do not repeat cannot show whether KV arrives intact: check whether "
            "model, weights or engine have changed",
        )


def _quoted(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}…")


def _not_measured(run: RunFolder) -> Iterable[Note]:
    for entry in run.skipped:
        yield Note(f"{entry['connector']} was skipped: {entry['reason']}", entry.get("hint", ""))
    for text in run.manifest.get("incomplete") or ():
        yield Note(str(text), "kvbench sweep --resume RUN measures what is missing")


def _over_tcp(run: RunFolder) -> Iterable[Note]:
    """Warn about real engines' connectors configured for what their hosts' NICs do badly."""
    deployment = (run.plan.get("scenario") or {}).get("deployment") or {}
    name = deployment.get("engine", "")
    if name not in engines.names() or not engines.options_model(name).chooses_transport:
        return
    local, remote = run.environment, run.environment.get("hosts") or {}
    devices = {name: host.get("rdma") or () for name, host in remote.items()} or {"": local.get("rdma") or ()}
    inherited = {} if remote else local.get("env") or {}
    for label, processes in (run.plan.get("processes") or {}).items():
        specs = [spec for process, spec in processes.items() if process != "router"]
        commands = [(spec.get("argv") or (), {**inherited, **(spec.get("env") or {})}) for spec in specs]
        for warning in transport_warnings(label, commands, devices):
            yield Note(warning.message, warning.advice)


def _unequal(run: RunFolder, rows: Sequence[Row]) -> Iterable[Note]:
    labels = dict.fromkeys(row.cell.connector for row in rows if row.outcome != "skipped")
    for warning in unequal_ranks(run.plan, labels):
        yield Note(warning.message, warning.advice)


def _cells(rows: Sequence[Row]) -> Iterable[Note]:
    """Yield one note per connector and reason, with its input lengths."""
    lengths: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if reason := _row_reason(row):
            lengths.setdefault((row.name, reason, row.hint), []).append(row.cell.input_len)
    for (name, reason, hint), where in lengths.items():
        yield Note(f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(where))}: {reason}", hint)


def _predictions(rows: Sequence[Row]) -> Iterable[Note]:
    """Yield one note per reason why a prediction is unsupported by its fit."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.answer.mark:
            reasons.setdefault(row.answer.mark_reason, {})[row.name] = None
    for reason, names in reasons.items():
        advice = "calibrate at these lengths, or with more loads; until then no winner is reported"
        yield Note(f"{', '.join(names)}: {reason}", advice)


def _limits(rows: Sequence[Row]) -> Iterable[Note]:
    """Yield one note per connector and limit, with the evidence of one length."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.limit and row.limit_evidence and row.outcome == "found":
            found.setdefault((row.name, row.limit), []).append(row)
    for (name, limit), limited in found.items():
        where = ", ".join(f"{row.cell.input_len:,}" for row in limited)
        yield Note(f"limit of {name} at {where}: {LIMIT_WORDS[limit]}; {limited[-1].limit_evidence}")


def _row_reason(row: Row) -> str:
    reasons = "; ".join(filter(None, (row.answer.refusals, row.reason)))
    reason = f": {reasons}" if reasons else ""
    if row.outcome in ("refused", "failed"):
        return f"{row.outcome}{reason}"
    if row.outcome == "none":
        return f"no tested rate met the SLO{reason}"
    if row.outcome == "at_least":
        return f"the rate is a lower bound{reason}"
    if row.outcome == "undecided":
        return f"no rate determined{reason}"
    if row.outcome == "unfinished":
        return "the search did not finish"
    if row.outcome == "found" and (row.search not in ("", "converged") or row.reason):
        return f"{row.search if row.search != 'converged' else ''}{reason}".removeprefix(": ")
    if row.outcome == "one_rate" and row.verdict not in ("met", "measured"):
        return f"{number(row.answer.max_request_rate)} req/s: {row.verdict}{reason}"
    return row.reason if row.outcome == "one_rate" else ""


def ahead(rows: Sequence[Row]) -> list[str]:
    """Return one comparison sentence per input length."""
    groups = by_lengths(rate_pairs(rows))
    several = len({output_len for _, output_len in groups}) > 1
    lines = []
    for (input_len, output_len), group in groups.items():
        where = f"{input_len:,} in" + (f", {output_len:,} out" if several else "")
        parts = group_pairs(group)
        sentences = [pair.text() for pair in parts.ordered]
        if parts.alike:
            names = (f"{pair.ahead} and {pair.behind}" for pair in parts.alike)
            sentences.append(f"no significant difference: {', '.join(names)}")
        lines.append(f"{where}: {'; '.join([*sentences, *withheld_texts(parts)])}")
    return lines


MOST_CELLS = 6
"""Most cells listed one by one; with more, only those with wrong answers are."""


def run_tally(run: RunFolder) -> Tally:
    total = Tally.of_trials(run.all_trials)
    return sum(map(_at_end, run.cells), total)


def cell_tally(run: RunFolder, cell: Cell) -> Tally:
    """Return the tally of a cell: all its trials and the check at its end."""
    total = Tally.of_trials(trial for trial in run.all_trials if trial.cell == cell)
    return sum((_at_end(result) for result in run.cells if result.cell == cell), total)


def _at_end(result: CellResult) -> Tally:
    cell = Tally.from_json(result.canaries)
    return Tally(cell.at_end, cell.wrong_at_end, own=min(cell.own, cell.at_end))


def noise_power(run: RunFolder) -> float | None:
    """Return the share of wrong answers that the run's noise tests detect with 95 % probability in one of its
    trials, or None if no noise test ran."""
    canaries = [trial.engine.get("canaries") or {} for trial in run.all_trials]
    tested = [canary for canary in canaries if canary.get("noise_test")]
    return (
        found_in_any([(canary["checked"], canary["noise_test"]["refused_from"]) for canary in tested])
        if tested
        else None
    )


def checked_lines(run: RunFolder) -> Iterator[str]:
    """Yield the answer checks of the run and its cells; nothing on virtual time."""
    kind = run.manifest.get("kind")
    if kind not in ("sweep", "bench", "chaos", "soak") or not run.all_trials:
        return
    total = run_tally(run)
    if not total.checked:
        yield "answers under load: none checked"
        return
    power = noise_power(run)
    noise_text = "" if power is None else f"; the noise test detects a share of {percent_text(power)} (95 %)"
    yield f"answers under load: {total.text()}{noise_text}"
    cells = [(result, Tally.from_json(result.canaries)) for result in run.cells]
    if len(cells) > 1:
        tallies = [(result.cell.key, tally) for result, tally in cells if tally.checked]
        if len(tallies) > MOST_CELLS:
            tallies = [(key, tally) for key, tally in tallies if tally.wrong]
        yield from (f"  {key}: {tally.text()}" for key, tally in tallies)


TITLE: Final = "Answers under load: wrong of checked, and upper bound of the wrong share (95 %)"


def answer_counts(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> Table | None:
    """Return the table of checked answers, or None if nothing was checked. ``sides``: names and runs; the
    counts of a side's runs are added."""
    rows = [_row("all", [sum((run_tally(run) for run in runs), Tally()) for _, runs in sides])]
    cells = list(dict.fromkeys(result.cell for _, runs in sides for run in runs for result in run.cells))
    for cell in cells if len(cells) > 1 else ():
        tallies = [sum((cell_tally(run, cell) for run in runs), Tally()) for _, runs in sides]
        rows.append(_row(_cell_name(cell), tallies))
    if not any(tally.checked for tally in rows[0][1]):
        return None
    names = [side for side, _ in sides]
    columns = [Column("cell", "cell", align="left"), *(Column(side, side, align="right") for side in names)]
    shown = [[name, *map(_text, tallies)] for name, tallies in rows]
    flat = [
        {"cell": name, **{side: _flat(tally) for side, tally in zip(names, tallies, strict=True)}}
        for name, tallies in rows
    ]
    return Table(TITLE, columns, shown, flat, "answers")


def _row(name: str, tallies: Sequence[Tally]) -> tuple[str, Sequence[Tally]]:
    return name, tallies


def _cell_name(cell: Cell) -> str:
    return f"{cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"


def _text(tally: Tally) -> str:
    if not tally.checked:
        return MISSING
    bound = percent_text(wrong_share_bound(tally.wrong, tally.checked))
    weak = " (vs. own idle outputs)" if tally.own else ""
    return f"{tally.wrong:,} of {tally.checked:,}, < {bound}{weak}"


def _flat(tally: Tally) -> dict[str, Any]:
    """Return the tally as flat values. ``wrong_below``: share of 1."""
    below = wrong_share_bound(tally.wrong, tally.checked) if tally.checked else None
    return {"checked": tally.checked, "wrong": tally.wrong, "wrong_below": below, "own": tally.own}
