"""The findings of a run of any kind, in one vocabulary: what every report, page and table says first.

From offered loads (read-in results, listed rates), from searched rates, from a microbenchmark's rows, and
from what the gates found: each a ``Statement`` of who is ahead, of what cannot be told and why, of what is
suspicious, or of what the rows show besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvbench.core.findings.findings import KIND_WORDS, Kind, Statement
from kvbench.core.records import Finding, TrialRecord
from kvbench.report.findings.drift import drifts
from kvbench.report.findings.fault_costs import fault_statements
from kvbench.report.findings.load_rows import IMPORTED, conclusions, load_rows
from kvbench.report.findings.transfers import transfer_statements
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.numbers import number
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.value import Note
from kvbench.results.run import RunFolder

_ORDER: Final[tuple[Kind, ...]] = ("ahead", "untold", "measured", "suspicious", "claim")

OF_THE_MACHINE: Final = ("machine_disturbed", "host_starved")
"""Gates by which a trial is refused that says nothing of the system."""


def statements(run: RunFolder, rows: Sequence[Row] | None = None) -> list[Statement]:
    """All findings of one run. ``rows``: its result table, where that is at hand."""
    if run.manifest.get("kind") == "microbench":
        return transfer_statements(run.transfer_records())
    if run.manifest.get("kind") == "chaos":
        return [*fault_statements(run), *refused(run), *disturbed(run)]
    if run.manifest.get("kind") == "soak":
        return [
            Statement("untold", "alone", "who is ahead: a soak holds one rate of one pair"),
            *refused(run),
            *disturbed(run),
        ]
    rows = summary_table(run) if rows is None else rows
    own = refused(run) if run.manifest.get("kind") != IMPORTED else ()
    found = [
        *conclusions([run]),
        *_bursts(run),
        *own,
        *disturbed(run),
        *warned(run, rows),
        *drifts(run, rows),
    ]
    if not any(each.kind in ("ahead", "untold") for each in found):
        found += _alone(run, rows)
    return found


def by_kind(found: Sequence[Statement]) -> dict[str, list[Statement]]:
    """The findings under the words of their kinds, in the order of reading.

    Where a number is not what it is called (level *invalid*), that comes before who is ahead in it.
    """
    first: tuple[Kind, ...] = ("suspicious", "claim")
    void = any(each.level == "invalid" and each.rule != REFUSED and each.kind in first for each in found)
    order = (*first, *(kind for kind in _ORDER if kind not in first)) if void else _ORDER
    return {
        KIND_WORDS[kind]: mine for kind in order if (mine := [each for each in found if each.kind == kind])
    }


def as_notes(found: Iterable[Statement]) -> list[Note]:
    return [Note(each.text, each.advice) for each in found]


REFUSED: Final = "refused"


def _alone(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    """Why nobody is compared with anybody."""
    names = list(
        dict.fromkeys([row.name for row in rows] + [row.name for row in load_rows(run, errors=False)])
    )
    if not names:
        why = "no cell has given a result"
    elif len(names) == 1:
        why = f"{names[0]} is alone in this run, so there is nobody to be ahead of"
    else:
        why = f"no two of {', '.join(names)} have an answer at the same lengths"
    advice = "" if not names else "measure two connectors in one run, or `kvbench compare` two runs"
    yield Statement("untold", "alone", f"who is ahead: {why}", advice)


def _bursts(run: RunFolder) -> Iterable[Statement]:
    for table in method_tables(run):
        for row in table.rows if table.name == "burst" else ():
            rate, sustained = row.get("burst_request_rate"), row.get("sustained_request_rate")
            if rate and sustained:
                yield Statement(
                    "measured",
                    "burst_and_sustained",
                    f"{row['connector']} at {row['input_len']:,}: the burst rule says {number(rate)} req/s, "
                    f"{number(rate / sustained)} times the {number(sustained)} that hold: it is the size of "
                    "a batch, not a rate",
                    evidence=dict(row),
                )


def refused(run: RunFolder) -> Iterable[Statement]:
    """How many trials count neither way, and by which gate."""
    invalid = [trial for trial in run.trials if trial.verdict == "invalid"]
    if not invalid:
        return
    causes = Counter(
        finding.gate for trial in invalid for finding in trial.findings if finding.level == "invalid"
    )
    by_gate = ", ".join(f"{gate} {count}" for gate, count in causes.most_common())
    text = f"{len(invalid)} of {len(run.trials)} trials were refused and count neither way"
    yield Statement(
        "suspicious", REFUSED, f"{text} ({by_gate})" if by_gate else text, level="warning",
        places=tuple(trial.trial_id for trial in invalid), evidence=dict(causes),
    )  # fmt: skip


def disturbed(run: RunFolder) -> Iterable[Statement]:
    """Trials that others on the machine spoilt, with the worst of what was seen there."""
    for gate in OF_THE_MACHINE:
        found = [
            (trial, finding)
            for trial in run.trials
            for finding in trial.findings
            if finding.gate == gate and finding.level == "invalid"
        ]
        if not found:
            continue
        _, worst = max(found, key=lambda each: float((each[1].evidence or {}).get("other_cpu_share") or 0.0))
        where = dict.fromkeys(f"{trial.cell.connector} at {trial.cell.input_len:,}" for trial, _ in found)
        text = f"{len(found)} of {len(run.trials)} trials were refused by {gate} ({'; '.join(where)})"
        yield Statement(
            "suspicious", gate, f"{text}: {worst.message}", worst.advice, "warning",
            tuple(trial.trial_id for trial, _ in found),
            {trial.trial_id: each.evidence for trial, each in found},
        )  # fmt: skip


def warned(run: RunFolder, rows: Sequence[Row]) -> Iterable[Statement]:
    """Warnings of the trials behind the table: one statement a gate, with one of its messages."""
    names = {row.trial_id: (row.name, row.cell.input_len) for row in rows if row.trial_id}
    found: dict[str, list[tuple[TrialRecord, Finding]]] = {}
    for trial in run.trials:
        for finding in trial.findings:
            if trial.trial_id in names and finding.level == "warning":
                found.setdefault(finding.gate, []).append((trial, finding))
    for gate, mine in found.items():
        where: dict[str, list[int]] = {}
        for trial, _ in mine:
            name, length = names[trial.trial_id]
            where.setdefault(name, []).append(length)
        listed = "; ".join(
            f"{name} at {', '.join(f'{length:,}' for length in lengths)}" for name, lengths in where.items()
        )
        last = "" if len(mine) == 1 else "for example, "
        finding = mine[-1][1]
        yield Statement(
            "suspicious", gate, f"{gate} ({listed}): {last}{finding.message}", finding.advice, "warning",
            tuple(trial.trial_id for trial, _ in mine),
            {trial.trial_id: each.evidence for trial, each in mine},
        )  # fmt: skip
