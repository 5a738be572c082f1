"""What the sections of a report are made from, read from a run once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvbench.core.findings.findings import Statement
from kvbench.core.records import SCHEMA_VERSION, TrialRecord
from kvbench.core.transfers.model import TransferModel, fit_all, models_json
from kvbench.core.transfers.records import TransferRecord
from kvbench.report.chaos_soak.fault_rows import fault_groups, flat
from kvbench.report.chaos_soak.soak_rows import drift_rows, soak_problems, verdict_lines, window_rows
from kvbench.report.findings.ahead import rate_pairs
from kvbench.report.findings.findings import statements
from kvbench.report.findings.load_rows import IMPORTED
from kvbench.report.findings.notes import notes
from kvbench.report.findings.transfers import answers
from kvbench.report.side_by_side import Changes
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.router_cost import RouterCost, router_costs
from kvbench.report.tables.table import Rows, Table
from kvbench.report.tables.transfers import Cases, flat_row, tabled
from kvbench.report.tables.trial_values import engine_word, reason_text, trial_values
from kvbench.report.value import Note
from kvbench.results.provenance import scenario_of, slo_of
from kvbench.results.run import RunFolder


@dataclass(frozen=True)
class Facts:
    """One run. ``name`` sets it apart from others in the same report; empty for a run on its own."""

    run: RunFolder
    name: str = ""

    @property
    def kind(self) -> str:
        """Which command made it."""
        return str(self.run.manifest.get("kind") or "sweep")

    @property
    def is_microbench(self) -> bool:
        return self.kind == "microbench"

    @property
    def is_imported(self) -> bool:
        return self.run.manifest.get("kind") == IMPORTED

    @cached_property
    def rows(self) -> list[Row]:
        return summary_table(self.run, self.name)

    @cached_property
    def costs(self) -> list[RouterCost]:
        return router_costs(self.run)

    @cached_property
    def methods(self) -> list[Table]:
        return method_tables(self.run)

    @cached_property
    def statements(self) -> list[Statement]:
        return statements(self.run, None if self.is_microbench else self.rows)

    @cached_property
    def limits(self) -> list[Note]:
        """What limits what the rows say, besides what the gates found."""
        return notes(self.run, self.rows, gates=False)

    @cached_property
    def records(self) -> list[TransferRecord]:
        return self.run.transfer_records()

    @cached_property
    def cases(self) -> Cases:
        return tabled(self.records)

    @cached_property
    def models(self) -> list[TransferModel]:
        return fit_all(self.records)

    @cached_property
    def files(self) -> Mapping[str, Rows]:
        """The rows of each CSV under tables/, by its name without the ending."""
        if self.is_microbench:
            return {
                "transfers": [flat_row(record, self.records) for record in self.records],
                "transfer_model": [model.to_json() for model in self.models],
            }
        if self.kind == "chaos":
            return {"faults": [flat(each) for each in fault_groups(self.run)], "trials": self._trials}
        if self.kind == "soak":
            return {"drift": drift_rows(self.run), "windows": window_rows(self.run), "trials": self._trials}
        router = {"router_cost": [row for cost in self.costs for row in cost.rows()]} if self.costs else {}
        return {
            "summary": [row.flat() for row in self.rows],
            "trials": self._trials,
            **{table.name: table.rows for table in self.methods},
            **router,
        }

    @property
    def _trials(self) -> Rows:
        return [_trial_row(trial) for trial in self.run.all_trials]

    @property
    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """The JSON files under tables/: names and units as in the CSVs."""
        if self.kind in ("chaos", "soak"):
            held: dict[str, Any] = {"run": self.run.run_id, "status": self.run.manifest.get("status")}
            if self.kind == "soak":
                held |= {"verdict": verdict_lines(self.run), "problems": soak_problems(self.run)}
            return {self.kind: held | {key: rows for key, rows in self.files.items() if key != "trials"}}
        if not self.is_microbench:
            return {"summary": self._summary()}
        rows = {
            "run": self.run.run_id,
            "status": self.run.manifest.get("status"),
            "rows": self.files["transfers"],
            "answers": answers(self.records),
            "left_out": self.left_out,
        }
        return {"transfers": rows, "transfer_model": models_json(self.models, self.run.run_id)}

    def _summary(self) -> dict[str, Any]:
        run, slo = self.run, slo_of(self.run)
        return {
            "schema": SCHEMA_VERSION,
            "run": run.run_id,
            "scenario": scenario_of(run),
            "status": run.manifest.get("status"),
            "labels": run.labels,
            "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "attainment": slo.attainment},
            "rows": self.files["summary"],
            "methods": {table.name: list(table.rows) for table in self.methods},
            "router_cost": self.files.get("router_cost", []),
            "comparisons": [vars(each) | {"text": each.text()} for each in rate_pairs(self.rows)],
            "conclusions": [statement.to_json() for statement in self.statements],
            "notes": [{"text": note.text, "advice": note.advice} for note in notes(run, self.rows)],
        }

    @property
    def left_out(self) -> Sequence[Mapping[str, Any]]:
        """What a microbenchmark's matrix dropped, as it makes no sense; what is absent has a row."""
        left_out = self.run.plan.get("left_out")
        return [item for item in left_out if not item.get("absent")] if isinstance(left_out, list) else []


@dataclass(frozen=True)
class Material:
    """What a report is made from: the runs, in what they differ, what a microbenchmark stands beside."""

    runs: Sequence[Facts]
    differing: Sequence[str] = ()
    changes: Changes | None = None

    @property
    def one(self) -> Facts:
        """The run of a report of one."""
        return self.runs[0]

    def rows(self) -> list[tuple[Facts, Row]]:
        """The result's rows of all runs, by length."""
        found = [(facts, row) for facts in self.runs for row in facts.rows]
        return sorted(found, key=lambda each: (each[1].cell.input_len, each[1].cell.output_len))


def _trial_row(trial: TrialRecord) -> dict[str, Any]:
    """One trial as one line of tables/trials.csv."""
    return {
        "trial_id": trial.trial_id,
        "connector": trial.cell.connector,
        "input_len": trial.cell.input_len,
        "output_len": trial.cell.output_len,
        "method": trial.method,
        "purpose": trial.purpose,
        "request_rate": trial.request_rate,
        "verdict": trial.verdict,
        "reason": reason_text(trial),
        "started_at": trial.started_at,
        "duration_s": trial.duration_s,
        "seed": trial.seed,
        **trial_values(trial),
        "transport": trial.engine.get("transport"),
        "kv_source": trial.engine.get("kv_source"),
        "load_mode": engine_word(trial, "load_mode"),
        "client_stamps": engine_word(trial, "client.stamps"),
        "findings": "; ".join(f"{finding.level}: {finding.gate}" for finding in trial.findings),
        "labels": ";".join(trial.labels),
    }
