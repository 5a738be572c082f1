"""Findings of a run of any kind, in one vocabulary: the first section of every report.

They come from offered loads, searched rates, microbenchmark rows, a chaos run's faults and the gates. Each is
a ``Statement``. A page groups them by kind; similar statements share a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import combinations
from math import comb
from statistics import median
from typing import Any, Final

from kvbench.core.findings.findings import KIND_WORDS, Kind, Statement
from kvbench.core.findings.rate_change import AHEAD, known
from kvbench.core.records import Finding, TrialRecord
from kvbench.report.findings.ahead import RatePair, no_winner_text, unconverged_text, unequal_text
from kvbench.report.findings.load_rows import IMPORTED, conclusions, load_rows
from kvbench.report.findings.transfers import transfer_statements
from kvbench.report.tables.fault_rows import FaultGroup, fault_groups
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import Row, rates_of, summary_table
from kvbench.report.tables.table import Table, number, of_texts
from kvbench.report.tables.trial_values import finite
from kvbench.report.value import Block, Note
from kvbench.results.run import CellResult, RunFolder

DRIFT_PROBABILITY: Final = 0.95
"""Smallest probability of a change at which the system counts as drifted."""
MIN_TREND_S: Final = 60.0
"""Shortest search, in seconds, from which an hourly drift is extrapolated."""
MAX_HOURLY_FACTOR: Final = 10.0
"""Largest change reported as a trend, as a factor per hour; a larger one is a jump."""
_ADVICE: Final = (
    "the result describes the end of the search: let the system warm up, check clocks, heat and other "
    "load, and search again"
)


def drifts(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    """Report each search whose system changed significantly while it ran. A search keeps two posteriors: the
    rate at its end (the answer) and at its beginning. The system drifted if one is above the other with
    probability CERTAIN, taken as independent."""
    names = {row.cell: row.name for row in rows}
    for result in run.cells:
        if result.cell in names:
            yield from _cell_drift(names[result.cell], result, run.trials_of(result.cell))


def _cell_drift(name: str, result: CellResult, trials: Sequence[TrialRecord]) -> Iterable[Statement]:
    answer = result.answer or {}
    first, last = (rates_of(answer.get(key)) for key in ("posterior_at_first", "posterior"))
    if not first or not last:
        return
    probability = known(last).above(known(first))
    if DRIFT_PROBABILITY > probability > 1 - DRIFT_PROBABILITY:
        return
    ratio, took_s = median(last) / median(first), _elapsed_s(trials)
    word, probability = ("faster", probability) if probability > 0.5 else ("slower", 1 - probability)
    text = (
        f"{name} at {result.cell.input_len:,} became {word} during the search: its sustained rate "
        f"{'rose' if word == 'faster' else 'fell'} by about {abs(ratio - 1):.0%}{_time_text(ratio, took_s)}"
    )
    places = tuple(trial.trial_id for trial in trials)
    evidence = {"sure": probability, "ratio": ratio, "took_s": took_s}
    yield Statement("suspicious", "drift", text, _ADVICE, "warning", places, evidence)


def _elapsed_s(trials: Sequence[TrialRecord]) -> float | None:
    """Return the time between the first and the last trial's start, on the virtual clock if there is one."""
    if len(trials) < 2:
        return None
    virtual = [finite(edge.engine.get("starts_at_s")) for edge in (trials[0], trials[-1])]
    if virtual[0] is not None and virtual[1] is not None:
        return virtual[1] - virtual[0]
    try:
        first, last = (
            datetime.fromisoformat(edge.started_at.replace("Z", "+00:00")) for edge in (trials[0], trials[-1])
        )
    except ValueError:
        return None
    return (last - first).total_seconds()


def _time_text(ratio: float, took_s: float | None) -> str:
    if took_s is None or took_s <= 0:
        return ""
    time = f"{took_s:.0f} s" if took_s < 2 * 60 else f"{took_s / 60:.0f} minutes"
    hourly = math.log(ratio) * 3600 / took_s
    if took_s < MIN_TREND_S or abs(hourly) > math.log(MAX_HOURLY_FACTOR):
        return f" in {time}"
    return f" in {time} (about {abs(math.expm1(hourly)):.0%} an hour)"


SIGNIFICANCE_LEVEL: Final = 0.05
"""Significance level: probability that all repeats of one are below all of the other by chance."""


def fault_statements(run: RunFolder) -> list[Statement]:
    """Compare the goodput lost, fault by fault; inconclusive faults share one statement."""
    groups = fault_groups(run)
    pairs = list(dict.fromkeys(group.cell.connector for group in groups))
    if len(pairs) < 2:
        alone = f"{pairs[0]} is the only pair in this run" if pairs else "no fault was injected"
        return [Statement("untold", "alone", f"comparison of fault costs: {alone}")]
    ahead = list(_fault_comparisons(groups))
    inconclusive = [name for name in dict.fromkeys(group.name for group in groups) if name not in dict(ahead)]
    result = [
        Statement("ahead", "fault_cost", text, places=tuple(trial_ids(groups, name))) for name, text in ahead
    ]
    if inconclusive:
        repeats = min(len(group.trials) for group in groups)
        faults = ", ".join(inconclusive) if ahead else f"any of {len(inconclusive)} faults"
        text = f"goodput lost by {faults}: no significant difference between {', '.join(pairs)}"
        if separation_p_value(repeats, repeats) > SIGNIFICANCE_LEVEL:
            text += f" with {repeats} repeat{'s' if repeats > 1 else ''} of each fault"
        advice = "use `--repeats 4` or more; then a difference in every repeat is significant"
        result.append(Statement("untold", "fault_cost", text, advice if repeats < MIN_REPEATS else ""))
    return result


def separation_p_value(one: int, other: int) -> float:
    """Return the probability that equal distributions give fully separated samples. 2 / C(n + m, n): the
    exact two-sided level of the rank-sum test at its extreme."""
    return 2.0 / comb(one + other, one)


MIN_REPEATS: Final = next(n for n in range(1, 10) if separation_p_value(n, n) <= SIGNIFICANCE_LEVEL)
"""Fewest repeats per side that can show a difference."""


def trial_ids(groups: Sequence[FaultGroup], name: str) -> Iterator[str]:
    for group in groups:
        if group.name == name:
            yield from (fault.trial.trial_id for fault in group.trials)


def _fault_comparisons(groups: Sequence[FaultGroup]) -> Iterator[tuple[str, str]]:
    """Yield each fault and the pair that lost less, for every two pairs with equal rate and length."""
    for one, other in combinations(groups, 2):
        if one.name != other.name or one.rate != other.rate or one.cell.input_len != other.cell.input_len:
            continue
        losses = [
            [trial.cost.goodput_lost for trial in group.trials if trial.cost.was_held]
            for group in (one, other)
        ]
        if not all(losses) or separation_p_value(*map(len, losses)) > SIGNIFICANCE_LEVEL:
            continue
        if max(losses[1]) < min(losses[0]):
            one, other, losses = other, one, losses[::-1]
        if max(losses[0]) < min(losses[1]):
            yield (
                one.name,
                (
                    f"{one.cell.connector} loses less goodput by {one.name} than {other.cell.connector}: "
                    f"{_between(losses[0])} against {_between(losses[1])} requests"
                ),
            )


def _between(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


_ORDER: Final[tuple[Kind, ...]] = ("ahead", "untold", "measured", "suspicious", "claim")

MACHINE_GATES: Final = ("machine_disturbed", "host_starved")
"""Gates that refuse a trial for a cause outside the system under test."""


def statements(run: RunFolder, rows: Sequence[Row] | None = None) -> list[Statement]:
    """Return all findings of one run. ``rows``: its result table, if already built."""
    if run.manifest.get("kind") == "microbench":
        return transfer_statements(run.transfer_records())
    if run.manifest.get("kind") == "chaos":
        return [*fault_statements(run), *refusals(run), *disturbances(run)]
    if run.manifest.get("kind") == "soak":
        return [
            Statement("untold", "alone", "no comparison: a soak runs one pair at one rate"),
            *refusals(run),
            *disturbances(run),
        ]
    rows = summary_table(run) if rows is None else rows
    refused_trials = refusals(run) if run.manifest.get("kind") != IMPORTED else ()
    found = [
        *conclusions([run]),
        *_bursts(run),
        *refused_trials,
        *disturbances(run),
        *gate_warnings(run, rows),
        *drifts(run, rows),
    ]
    if not any(statement.kind in ("ahead", "untold") for statement in found):
        found += _alone(run, rows)
    return found


def by_kind(found: Sequence[Statement]) -> dict[str, list[Statement]]:
    """Group findings by heading, in reading order. Invalid numbers come before comparisons."""
    first: tuple[Kind, ...] = ("suspicious", "claim")
    invalid = any(item.level == "invalid" and item.rule != REFUSED and item.kind in first for item in found)
    order = (*first, *(kind for kind in _ORDER if kind not in first)) if invalid else _ORDER
    return {
        KIND_WORDS[kind]: group for kind in order if (group := [item for item in found if item.kind == kind])
    }


def as_notes(found: Iterable[Statement]) -> list[Note]:
    return [Note(statement.text, statement.advice) for statement in found]


REFUSED: Final = "refused"


def _alone(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    names = list(
        dict.fromkeys([row.name for row in rows] + [row.name for row in load_rows(run, errors=False)])
    )
    if not names:
        why = "no cell has a result"
    elif len(names) == 1:
        why = f"{names[0]} is the only connector in this run"
    else:
        why = f"no two of {', '.join(names)} have a result at the same lengths"
    advice = "" if not names else "measure two connectors in one run, or `kvbench compare` two runs"
    yield Statement("untold", "alone", f"no comparison: {why}", advice)


def _bursts(run: RunFolder) -> Iterable[Statement]:
    for table in method_tables(run):
        for row in table.rows if table.name == "burst" else ():
            rate, sustained = row.get("burst_request_rate"), row.get("sustained_request_rate")
            if rate and sustained:
                yield Statement(
                    "measured",
                    "burst_and_sustained",
                    f"{row['connector']} at {row['input_len']:,}: the burst rule says {number(rate)} req/s, "
                    f"{number(rate / sustained)} times the sustained {number(sustained)}: it is the size of "
                    "a batch, not a rate",
                    evidence=dict(row),
                )


def _invalid(run: RunFolder, count: int) -> str:
    return f"{count} of {len(run.trials)} trials {'is' if count == 1 else 'are'} invalid"


def refusals(run: RunFolder) -> Iterable[Statement]:
    """Report the number of refused trials by gate, unless ``disturbances`` reports all of them."""
    invalid = [trial for trial in run.trials if trial.verdict == "invalid"]
    if not invalid:
        return
    causes: Counter[str] = Counter()
    for trial in invalid:
        gates = (finding.gate for finding in trial.findings if finding.level == "invalid")
        causes.update(list(dict.fromkeys(gates)))  # a set's order would change from process to process
    if causes and causes.keys() <= set(MACHINE_GATES):
        return
    by_gate = ", ".join(f"{gate} {count}" for gate, count in causes.most_common())
    if causes.total() > len(invalid):
        by_gate += "; some for several reasons"
    text = f"{_invalid(run, len(invalid))} and count neither as met nor as missed"
    yield Statement(
        "suspicious", REFUSED, f"{text} ({by_gate})" if by_gate else text, level="warning",
        places=tuple(trial.trial_id for trial in invalid), evidence=dict(causes),
    )  # fmt: skip


def disturbances(run: RunFolder) -> Iterable[Statement]:
    """Report trials refused because of other load on the machine, with the worst evidence."""
    for gate in MACHINE_GATES:
        found = [
            (trial, finding)
            for trial in run.trials
            for finding in trial.findings
            if finding.gate == gate and finding.level == "invalid"
        ]
        if not found:
            continue
        _, worst = max(found, key=lambda pair: float((pair[1].evidence or {}).get("other_cpu_share") or 0.0))
        where = dict.fromkeys(f"{trial.cell.connector} at {trial.cell.input_len:,}" for trial, _ in found)
        text = f"{_invalid(run, len(found))} because of {gate} ({'; '.join(where)})"
        yield Statement(
            "suspicious", gate, f"{text}: {worst.message}", worst.advice, "warning",
            tuple(trial.trial_id for trial, _ in found),
            {trial.trial_id: finding.evidence for trial, finding in found},
        )  # fmt: skip


def gate_warnings(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    """Report the warnings of the trials behind the table, one statement per gate, with the number of the
    other trials in which the gate warned or that it refused."""
    names = {row.trial_id: (row.name, row.cell.input_len) for row in rows if row.trial_id}
    found: dict[str, list[tuple[TrialRecord, Finding]]] = {}
    for trial in run.trials:
        for finding in trial.findings:
            if trial.trial_id in names and finding.level == "warning":
                found.setdefault(finding.gate, []).append((trial, finding))
    for gate, flagged in found.items():
        where: dict[str, list[int]] = {}
        for trial, _ in flagged:
            name, length = names[trial.trial_id]
            where.setdefault(name, []).append(length)
        listed = "; ".join(
            f"{name} at {', '.join(f'{length:,}' for length in lengths)}" for name, lengths in where.items()
        )
        shown = {trial.trial_id for trial, _ in flagged}
        listed += _others(gate, [trial for trial in run.trials if trial.trial_id not in shown])
        last = "" if len(flagged) == 1 else "for example, "
        finding = flagged[-1][1]
        yield Statement(
            "suspicious", gate, f"{gate} ({listed}): {last}{finding.message}", finding.advice, "warning",
            tuple(trial.trial_id for trial, _ in flagged),
            {trial.trial_id: flag.evidence for trial, flag in flagged},
        )  # fmt: skip


def _others(gate: str, trials: Sequence[TrialRecord]) -> str:
    levels = [{finding.level for finding in trial.findings if finding.gate == gate} for trial in trials]
    concerned = [trial_levels for trial_levels in levels if trial_levels & {"invalid", "warning"}]
    if not concerned:
        return ""
    refused = sum("invalid" in trial_levels for trial_levels in concerned)
    of = f", {refused} of them invalid" if refused else ""
    return f"; also {len(concerned)} other trial{'s' * (len(concerned) > 1)}{of}"


WARNINGS: Final = KIND_WORDS["suspicious"]
OPEN: Final = (KIND_WORDS["ahead"],)
"""Kinds that the HTML report expands by default, besides invalid findings."""
_INCONCLUSIVE: Final = "inconclusive from this data: "


def folded(found: Sequence[Statement], rule: str = "", warnings: Sequence[Note] = ()) -> Iterator[Block]:
    """Yield a block per kind. ``rule``: the ordering rule, shown with comparisons. ``warnings``: all warnings
    of the run, those of its setup included; without them, only the statements' are shown."""
    kinds = by_kind(found)
    if warnings:
        kinds.setdefault(WARNINGS, [])
    for heading, group in kinds.items():
        tabled = [item for item in group if _rows(item)]
        rows = [row for item in tabled for row in _rows(item)]
        table = _table(heading, rows) if len(rows) > 1 else None
        notes = as_notes(group if table is None else (item for item in group if item not in tabled))
        if heading == WARNINGS and warnings:
            notes = list(warnings)
        advice = dict.fromkeys(item.advice for item in tabled if item.advice and table is not None)
        texts = [rule if heading in OPEN else "", "; or ".join(advice)]
        count = len(table.cells if table else ()) + len(notes)
        has_invalid = any(item.level == "invalid" for item in group)
        yield Block(
            f"{heading} ({count})",
            " ".join(filter(None, texts)),
            notes,
            table,
            folded=heading not in OPEN and not has_invalid,
        )


def _table(heading: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    joined: dict[tuple[str, str], dict[str, None]] = {}
    for pair, lengths, difference in rows:
        joined.setdefault((pair, difference), {})[lengths] = None
    cells = [[pair, "; ".join(lengths), difference] for (pair, difference), lengths in joined.items()]
    header = ("pair", "lengths", "difference" if heading in OPEN else "why")
    return of_texts(heading, header, cells, "left")


def _rows(statement: Statement) -> list[tuple[str, str, str]]:
    """Return (pair, lengths, difference) rows of a comparison; empty for other statements."""
    if "pairs" in statement.evidence:
        return [_pair_row(statement, RatePair(**pair)) for pair in statement.evidence["pairs"]]
    if "places" in statement.evidence and statement.kind == "untold":
        evidence: dict[str, Any] = statement.evidence
        why = statement.text.partition(_INCONCLUSIVE)[2]
        return (
            [(f"{evidence['one']} or {evidence['other']}", "; ".join(evidence["places"]), why)] if why else []
        )
    return []


def _pair_row(statement: Statement, pair: RatePair) -> tuple[str, str, str]:
    where = f"{pair.input_len:,} in, {pair.output_len:,} out"
    if statement.kind == "ahead":
        return f"{pair.ahead} over {pair.behind}", where, pair.relation().removeprefix(f"{pair.ahead} ")
    if pair.no_winner:
        why = no_winner_text([pair])
    elif pair.unconverged:
        why = unconverged_text([pair]).removeprefix("inconclusive: ")
    elif pair.per is not None:
        why = unequal_text([pair]).removeprefix("not directly comparable: ")
    else:
        why = f"neither is higher with a probability of {AHEAD:.0%}"
    return " or ".join(sorted((pair.ahead, pair.behind))), where, why
