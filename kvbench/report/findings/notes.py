"""What a reader of a result table must know besides its numbers: caveats, silent gates, checked answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvbench import engines
from kvbench.core.canaries.answer_kinds import found_in_any, percent_text, wrong_share_bound
from kvbench.core.canaries.tally import Tally
from kvbench.core.findings.setups import transport_warnings, unequal_ranks
from kvbench.core.gates.gates import CORRUPT
from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.core.records import Cell
from kvbench.report.findings.ahead import (
    by_lengths,
    no_winner_text,
    parted,
    rate_pairs,
    unconverged_text,
    unequal_text,
)
from kvbench.report.findings.findings import as_notes, drifts, refused, warned
from kvbench.report.tables.result import Row
from kvbench.report.tables.table import MISSING, Column, Table, number
from kvbench.report.value import Note
from kvbench.results.finished_cells import ELSEWHERE, changed_outputs
from kvbench.results.provenance import mark_of
from kvbench.results.run import CellResult, RunFolder

NO_REFERENCE: Final = "no aggregated server to compare outputs with"

_Lacking = Mapping[str, Sequence[str]]
"""What was lacking, in words → gates."""


def unseen_gates(run: RunFolder, rows: Sequence[Row]) -> Iterable[Note]:
    """One note for all deployments whose trials lacked the same evidence.

    Of the trials behind the table, or where there are none of all: a gate is named if it was blind in each.
    """
    shown = {row.trial_id for row in rows if row.trial_id}
    trials = [trial for trial in run.all_trials if isinstance(trial.summary.get("unseen"), Mapping)]
    behind = [trial for trial in trials if trial.trial_id in shown]
    told: dict[str, list[_Lacking]] = {}
    for trial in behind or trials:
        told.setdefault(trial.cell.connector, []).append(trial.summary["unseen"])
    compared = {cell.cell.connector for cell in run.cells if cell.equal_outputs is not None}
    reference = {str(row.get("label")) for row in run.outputs}
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for name, lacking in told.items():
        mine = _in_each(lacking)
        if name not in compared | reference:
            mine[NO_REFERENCE] = [CORRUPT.name]
        if mine:
            alike.setdefault(tuple((why, tuple(gates)) for why, gates in mine.items()), []).append(name)
    for parts, names in alike.items():
        listed = "; ".join(f"{why}: {', '.join(gates)}" for why, gates in parts)
        yield Note(
            f"gates that saw nothing of {', '.join(names)}, and prove nothing by their silence: {listed}",
            "`kvbench doctor --gates` says what each would prove",
        )


def _in_each(lacking: Sequence[_Lacking]) -> dict[str, list[str]]:
    """The gates that were blind in every trial, under the last trial's words."""
    always = set.intersection(*({gate for gates in each.values() for gate in gates} for each in lacking))
    last = {why: [gate for gate in gates if gate in always] for why, gates in lacking[-1].items()}
    return {why: gates for why, gates in last.items() if gates}


MOST_DIFFERENCES: Final = 5


def notes(run: RunFolder, rows: Sequence[Row], *, gates: bool = True) -> list[Note]:
    """Everything that limits what the rows of this run say, the weightiest first.

    ``gates``: also what the gates found, and drift, where that does not stand under the findings.
    """
    found = [
        *_state(run),
        *_of_setup(run, rows),
        *_limits(rows),
        *unseen_gates(run, rows),
    ]
    return [*found, *_of_gates(run, rows)] if gates else found


def warnings(run: RunFolder, rows: Sequence[Row]) -> list[Note]:
    """Those of the notes that say that something is not as it should be."""
    return [*map(Note, run.warnings), *_of_setup(run, rows), *_of_gates(run, rows)]


def _of_setup(run: RunFolder, rows: Sequence[Row]) -> Iterator[Note]:
    yield from _skipped(run)
    yield from _over_tcp(run)
    yield from _unequal(run, rows)
    yield from _cells(rows)
    yield from _predictions(rows)


def _of_gates(run: RunFolder, rows: Sequence[Row]) -> Sequence[Note]:
    return list(as_notes([*refused(run), *warned(run, rows), *drifts(run, rows)]))


def status_lines(run: RunFolder) -> Iterator[str]:
    """How a run stands that did not come to its end; nothing if it did."""
    status, error = run.manifest.get("status"), str(run.manifest.get("error") or "")
    if status == "complete":
        return
    detail = f": {error}" if error and error != status else ""
    yield (
        "the run is still going on; this is what it has so far"
        if status == "running"
        else f"the run is {status}{detail}; this is what was measured before"
    )
    planned = run.plan.get("cells")
    if isinstance(planned, list) and len(run.cells) < len(planned):
        yield f"{len(run.cells)} of {len(planned)} cells are finished"


def notes_of_load(run: RunFolder, rows: Sequence[Row]) -> list[Note]:
    """The same of one load, without what its block says, what its title says, and the silent gates."""
    mark, refused_cells = mark_of(run), {each.cell for each in run.all_trials if each.verdict == "invalid"}
    return [
        *(note for note in _state(run) if mark is None or mark.why not in note.text),
        *_skipped(run),
        *_over_tcp(run),
        *_unequal(run, rows),
        *_cells([row for row in rows if row.cell not in refused_cells]),
        *as_notes(warned(run, rows)),
    ]


def _state(run: RunFolder) -> Iterable[Note]:
    yield from map(Note, status_lines(run))
    if (run.path / "against.md").is_file():
        yield Note("the loads of another run were simulated: against.md has its figures beside these")
    mark = mark_of(run)
    if mark is not None:
        yield Note(f"{mark.word}: {mark.why}")
    yield from _sessions(run)
    for label, figures in (run.manifest.get("simulated_with") or {}).items():
        yield Note(f"{label} was simulated with {figures}")
    for warning in run.warnings:
        yield Note(warning)


def _sessions(run: RunFolder) -> Iterable[Note]:
    """What is not as it was in sessions that went on with the run: conditions, and the true outputs."""
    for place, session in enumerate(run.manifest.get("sessions") or (), 1):
        differs = session.get("differs") or ()
        if differs:
            more = f", and {len(differs) - MOST_DIFFERENCES} more" if len(differs) > MOST_DIFFERENCES else ""
            yield Note(
                f"{ELSEWHERE}: session {place} of {len(run.manifest['sessions'])} went on under other "
                f"conditions: {'; '.join(differs[:MOST_DIFFERENCES])}{more}",
                "compare what it measured with the rest only where that makes no difference; "
                "manifest.json has the sessions' times",
            )
    for label, length, then, now in changed_outputs(run.outputs):
        yield Note(
            f"{label} at {length:,}: its greedy outputs were others when they were asked for again in a "
            f"later session ({_quoted(then)} then, {_quoted(now)} now); what was measured since is compared "
            "with the later ones",
            "a server that does not repeat its outputs cannot tell whether KV arrives whole: look whether "
            "model, weights or engine have changed",
        )


def _quoted(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}…")


def _skipped(run: RunFolder) -> Iterable[Note]:
    for entry in run.skipped:
        yield Note(f"{entry['connector']} was skipped: {entry['reason']}", entry.get("hint", ""))


def _over_tcp(run: RunFolder) -> Iterable[Note]:
    """Connectors of a real engine that were told to use what their hosts' NICs do badly."""
    deployment = (run.plan.get("scenario") or {}).get("deployment") or {}
    name = deployment.get("engine", "")
    if name not in engines.names() or not engines.options_model(name).chooses_transport:
        return
    here, far = run.environment, run.environment.get("hosts") or {}
    devices = {host: each.get("rdma") or () for host, each in far.items()} or {"": here.get("rdma") or ()}
    inherited = {} if far else here.get("env") or {}
    for label, processes in (run.plan.get("processes") or {}).items():
        specs = [spec for process, spec in processes.items() if process != "router"]
        commands = [(spec.get("argv") or (), {**inherited, **(spec.get("env") or {})}) for spec in specs]
        for found in transport_warnings(label, commands, devices):
            yield Note(found.message, found.advice)


def _unequal(run: RunFolder, rows: Sequence[Row]) -> Iterable[Note]:
    """Tensor parallel sizes that differ."""
    labels = dict.fromkeys(row.cell.connector for row in rows if row.outcome != "skipped")
    for found in unequal_ranks(run.plan, labels):
        yield Note(found.message, found.advice)


def _cells(rows: Sequence[Row]) -> Iterable[Note]:
    """One note per connector and reason, with the input lengths that it holds for."""
    lengths: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        said = _said_of(row)
        if said:
            lengths.setdefault((row.name, said, row.hint), []).append(row.cell.input_len)
    for (name, said, hint), where in lengths.items():
        yield Note(f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(where))}: {said}", hint)


def _predictions(rows: Sequence[Row]) -> Iterable[Note]:
    """One note for each reason why a prediction is not supported by its fit."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.answer.mark:
            reasons.setdefault(row.answer.mark_reason, {})[row.name] = None
    for reason, names in reasons.items():
        advice = "calibrate at these lengths, or with more loads; until then no winner is named"
        yield Note(f"{', '.join(names)}: {reason}", advice)


def _limits(rows: Sequence[Row]) -> Iterable[Note]:
    """One note per connector and limit: why no higher rate met the SLO, with the evidence of one length."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.limit and row.limit_evidence and row.outcome == "found":
            found.setdefault((row.name, row.limit), []).append(row)
    for (name, limit), mine in found.items():
        where = ", ".join(f"{row.cell.input_len:,}" for row in mine)
        yield Note(f"what limits {name} at {where}: {LIMIT_WORDS[limit]}; {mine[-1].limit_evidence}")


def _said_of(row: Row) -> str:
    reasons = "; ".join(filter(None, (row.answer.refusals, row.reason)))
    reason = f": {reasons}" if reasons else ""
    if row.outcome in ("refused", "failed"):
        return f"{row.outcome}{reason}"
    if row.outcome == "none":
        return f"no tested rate met the SLO{reason}"
    if row.outcome == "at_least":
        return f"the rate is a lower bound{reason}"
    if row.outcome == "undecided":
        return f"no rate can be given{reason}"
    if row.outcome == "unfinished":
        return "the search was not finished"
    if row.outcome == "found" and (row.search not in ("", "converged") or row.reason):
        return f"{row.search if row.search != 'converged' else ''}{reason}".removeprefix(": ")
    if row.outcome == "one_rate" and row.verdict not in ("met", "measured"):
        return f"{number(row.answer.max_request_rate)} req/s: {row.verdict}{reason}"
    return row.reason if row.outcome == "one_rate" else ""


def ahead(rows: Sequence[Row]) -> list[str]:
    """Who is ahead: one sentence per input length."""
    groups = by_lengths(rate_pairs(rows))
    several = len({output_len for _, output_len in groups}) > 1
    lines = []
    for (input_len, output_len), group in groups.items():
        where = f"{input_len:,} in" + (f", {output_len:,} out" if several else "")
        parts = parted(group)
        sentences = [each.text() for each in parts.ordered]
        if parts.alike:
            names = (f"{each.ahead} and {each.behind}" for each in parts.alike)
            sentences.append(f"cannot be told apart: {', '.join(names)}")
        if parts.unequal:
            sentences.append(unequal_text(parts.unequal))
        if parts.unconverged:
            sentences.append(unconverged_text(parts.unconverged))
        if parts.no_winner:
            sentences.append(no_winner_text(parts.no_winner))
        lines.append(f"{where}: {'; '.join(sentences)}")
    return lines


MOST_CELLS = 6
"""Of more cells, only those with wrong answers are told by name."""


def run_tally(run: RunFolder) -> Tally:
    """Of all trials, and of what was asked for at the ends of cells."""
    total = Tally.of_trials(run.all_trials)
    return sum(map(_at_end, run.cells), total)


def cell_tally(run: RunFolder, cell: Cell) -> Tally:
    """Of all trials of a cell, and of what was asked for at its end."""
    total = Tally.of_trials(trial for trial in run.all_trials if trial.cell == cell)
    return sum((_at_end(result) for result in run.cells if result.cell == cell), total)


def _at_end(result: CellResult) -> Tally:
    cell = Tally.from_json(result.canaries)
    return Tally(cell.at_end, cell.wrong_at_end, own=min(cell.own, cell.at_end))


def noise_power(run: RunFolder) -> float | None:
    """The share of wrong answers that the run's noise tests would have seen, with 95 % in one of its trials;
    None where no server differed from itself, so that nothing was tested.
    """
    told = [trial.engine.get("canaries") or {} for trial in run.all_trials]
    tested = [each for each in told if each.get("noise_test")]
    return (
        found_in_any([(each["checked"], each["noise_test"]["refused_from"]) for each in tested])
        if tested
        else None
    )


def checked_lines(run: RunFolder) -> Iterator[str]:
    """Of the run, and of its cells; nothing where nothing answers with text, as on virtual time."""
    kind = run.manifest.get("kind")
    if kind not in ("sweep", "bench", "chaos", "soak") or not run.all_trials:
        return
    total = run_tally(run)
    if not total.checked:
        yield "answers under load: none were checked"
        return
    power = noise_power(run)
    seen = "" if power is None else f"; the test of their noise would have seen {percent_text(power)} (95 %)"
    yield f"answers under load: {total.text()}{seen}"
    cells = [(result, Tally.from_json(result.canaries)) for result in run.cells]
    if len(cells) > 1:
        told = [(each.cell.key, tally) for each, tally in cells if tally.checked]
        if len(told) > MOST_CELLS:
            told = [(key, tally) for key, tally in told if tally.wrong]
        yield from (f"  {key}: {tally.text()}" for key, tally in told)


TITLE: Final = "answers under load: wrong of checked, and what share of wrong ones they leave possible (95 %)"


def answer_counts(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> Table | None:
    """One row for all answers, and one for each cell; None where no run has checked any.

    ``sides``: a name and its runs, whose counts are added.
    """
    rows = [_row("all", [sum((run_tally(run) for run in runs), Tally()) for _, runs in sides])]
    cells = list(dict.fromkeys(each.cell for _, runs in sides for run in runs for each in run.cells))
    for cell in cells if len(cells) > 1 else ():
        tallies = [sum((cell_tally(run, cell) for run in runs), Tally()) for _, runs in sides]
        rows.append(_row(_place(cell), tallies))
    if not any(tally.checked for tally in rows[0][1]):
        return None
    names = [name for name, _ in sides]
    columns = [Column("cell", "cell", align="left"), *(Column(name, name, align="right") for name in names)]
    shown = [[place, *map(_text, tallies)] for place, tallies in rows]
    flat = [
        {"cell": place, **{name: _flat(tally) for name, tally in zip(names, tallies, strict=True)}}
        for place, tallies in rows
    ]
    return Table(TITLE, columns, shown, flat, "answers")


def _row(place: str, tallies: Sequence[Tally]) -> tuple[str, Sequence[Tally]]:
    return place, tallies


def _place(cell: Cell) -> str:
    return f"{cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"


def _text(tally: Tally) -> str:
    if not tally.checked:
        return MISSING
    bound = percent_text(wrong_share_bound(tally.wrong, tally.checked))
    weak = " (its own when idle)" if tally.own else ""
    return f"{tally.wrong:,} of {tally.checked:,}, < {bound}{weak}"


def _flat(tally: Tally) -> dict[str, Any]:
    """``wrong_below``: a share of 1; None where none was checked."""
    below = wrong_share_bound(tally.wrong, tally.checked) if tally.checked else None
    return {"checked": tally.checked, "wrong": tally.wrong, "wrong_below": below, "own": tally.own}
