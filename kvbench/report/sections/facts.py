"""Material of a report's sections, and the sections common to all kinds: plots, gate findings, machine,
commands."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

from kvbench.core.findings.findings import Statement
from kvbench.core.records import SCHEMA_VERSION, TrialRecord
from kvbench.core.transfers.model import TransferModel, fit_all, models_json
from kvbench.core.transfers.records import TransferRecord
from kvbench.report.findings.ahead import rate_pairs
from kvbench.report.findings.findings import statements
from kvbench.report.findings.load_rows import IMPORTED
from kvbench.report.findings.notes import notes, warnings
from kvbench.report.findings.transfers import answers
from kvbench.report.side_by_side import Changes
from kvbench.report.tables.fault_rows import fault_groups, flat
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.router_cost import RouterCost, router_costs
from kvbench.report.tables.soak_rows import drift_rows, soak_problems, verdict_lines, window_rows
from kvbench.report.tables.table import MISSING, Rows, Table, of_csv, of_texts
from kvbench.report.tables.transfers import Cases, build_cases, flat_row
from kvbench.report.tables.trial_values import engine_word, reason_text, trial_values
from kvbench.report.value import WRITERS, Block, Drawing, Note, ReportSection
from kvbench.results.provenance import mark_of, scenario_of, slo_of
from kvbench.results.run import RunFolder


@dataclass(frozen=True)
class Facts:
    """One run. ``name``: its label if a report has several runs."""

    run: RunFolder
    name: str = ""

    @property
    def kind(self) -> str:
        """Return the command that made the run."""
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
    def warnings(self) -> list[Note]:
        return warnings(self.run, self.rows, self.statements)

    @cached_property
    def limits(self) -> list[Note]:
        """Return the caveats that are no warnings."""
        return [note for note in notes(self.run, self.rows, gates=False) if note not in self.warnings]

    @cached_property
    def records(self) -> list[TransferRecord]:
        return self.run.transfer_records()

    @cached_property
    def cases(self) -> Cases:
        return build_cases(self.records)

    @cached_property
    def models(self) -> list[TransferModel]:
        return fit_all(self.records)

    @cached_property
    def files(self) -> Mapping[str, Rows]:
        """Return the rows of each CSV under tables/, by name without suffix."""
        if self.is_microbench:
            return {
                "transfers": [flat_row(record, self.records) for record in self.records],
                "transfer_model": [model.to_json() for model in self.models],
            }
        if self.kind == "chaos":
            return {"faults": [flat(group) for group in fault_groups(self.run)], "trials": self._trials}
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
        """Return the JSON files under tables/."""
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
            "comparisons": [vars(pair) | {"text": pair.text()} for pair in rate_pairs(self.rows)],
            "conclusions": [statement.to_json() for statement in self.statements],
            "notes": [{"text": note.text, "advice": note.advice} for note in notes(run, self.rows)],
        }

    @property
    def left_out(self) -> Sequence[Mapping[str, Any]]:
        """Return the excluded cases of a microbenchmark's matrix; unavailable ones have a row."""
        left_out = self.run.plan.get("left_out")
        return [item for item in left_out if not item.get("absent")] if isinstance(left_out, list) else []


@dataclass(frozen=True)
class Material:
    """Input of a report: runs, their differences, the compared microbenchmark."""

    runs: Sequence[Facts]
    differing: Sequence[str] = ()
    changes: Changes | None = None

    @property
    def one(self) -> Facts:
        """Return the run of a single-run report."""
        return self.runs[0]

    def rows(self) -> list[tuple[Facts, Row]]:
        """Return all runs' result rows, by length."""
        found = [(facts, row) for facts in self.runs for row in facts.rows]
        return sorted(found, key=lambda pair: (pair[1].cell.input_len, pair[1].cell.output_len))


def _trial_row(trial: TrialRecord) -> dict[str, Any]:
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


_LEVELS: Final = ("invalid", "warning", "note")
_FILES: Final = ("report.html", "report.md", "tables/", "figures/", "trials.jsonl", "requests/", "logs/")
"""Files listed for the reader, if they exist."""


def goal(facts: Facts) -> str:
    status = f"Status of the run: {facts.run.manifest.get('status')}."
    return status if facts.is_microbench else f"SLO: {slo_of(facts.run).text()}. {status}"


def badge(facts: Facts) -> str:
    """Return the mark above a page whose figures are not from real engines on real hosts."""
    if (mark := mark_of(facts.run)) is not None:
        return mark.badge
    if "lab" in facts.run.labels:
        return "LAB: hosts and NICs are network namespaces of one machine"
    return "IMPORTED: measured by another tool" if facts.is_imported else ""


def drawings(run: RunFolder) -> list[Drawing]:
    from kvbench.report.plots import pictures_of  # a terminal shows none

    return [
        Drawing(name, picture.title, picture.alt, partial(picture.draw, run))
        for name, picture in pictures_of(run).items()
    ]


def pictures(of: Material) -> Iterator[ReportSection]:
    """Yield one block per plot; the writer checks whether there is data."""
    blocks = [Block(picture=drawing) for drawing in drawings(of.one.run)]
    yield ReportSection("pictures", "Plots", blocks, ("html",))
    yield ReportSection("pictures", "", blocks, ("markdown",))


def gates(of: Material) -> Iterator[ReportSection]:
    """Yield the gate findings: on a page one row per gate with all findings folded, in Markdown by trial."""
    trials, silent = of.one.run.all_trials, Block(words="No gate reported a finding.")
    found = [(trial.trial_id, finding) for trial in trials for finding in trial.findings]
    if not of.one.is_imported:
        found_notes = [
            Note(f"`{trial_id}` {finding.level}, {finding.gate}: {finding.message}", finding.advice)
            for trial_id, finding in found
        ]
        title = "Gate findings by trial"
        yield ReportSection(
            "gates", title, [Block(notes=found_notes) if found_notes else silent], ("markdown",)
        )
    if not found:
        yield ReportSection("gates", _GATES, [silent] if trials else [], ("html",))
        return
    found.sort(key=lambda pair: _LEVELS.index(pair[1].level))
    counts = Counter((finding.level, finding.gate) for _, finding in found)
    last = {(finding.level, finding.gate): finding for _, finding in found}
    brief = [
        [level, gate, number, last[level, gate].message, last[level, gate].advice or MISSING]
        for (level, gate), number in counts.items()
    ]
    every = [
        [finding.level, trial_id, finding.gate, finding.message, finding.advice or MISSING]
        for trial_id, finding in found
    ]
    words = "An invalid trial counts neither as met nor as missed. A trial with a warning counts."
    header = ["level", "gate", "findings", "latest finding", "what to do"]
    title = f"Every finding ({len(found)})"
    full = of_texts(title, ["level", "trial", "gate", "finding", "what to do"], every, "left")
    short = of_texts(f"{len(trials)} trials, by gate", header, brief, "left")
    brief_title = f"Findings by gate ({len(brief)})"
    blocks = [
        Block(brief_title, words, table=short, folded=True),
        Block(title, table=full, folded=True, bulk=True),
    ]
    yield ReportSection("gates", _GATES, blocks, ("html",))


_GATES: Final = "Gate findings"


def every_column(of: Material) -> Iterator[ReportSection]:
    blocks = [
        Block(f"{name}.csv, {len(rows):,} rows", table=table, folded=True, bulk=True)
        for name, rows in of.one.files.items()
        if (table := of_csv(name, f"tables/{name}.csv", rows)) is not None
    ]
    yield ReportSection("columns", "All columns", blocks)


# --- the machine -----------------------------------------------------------------------------------


def environment(of: Material) -> Iterator[ReportSection]:
    """Yield the machine: on a page all of environment.json and manifest.json, in Markdown a selection."""
    run, blocks = of.one.run, []
    if not of.one.is_imported:
        facts = of_texts("", ["", ""], list(_machine(run)))
        blocks.append(Block(table=facts, writers=("markdown",)))
    for name, data in (("environment.json", run.environment), ("manifest.json", run.manifest)):
        rows = list(_flat(data))
        if rows:
            table = of_texts(name, ["what", "value"], rows, "left")
            blocks.append(Block(name, table=table, folded=True, writers=("html",)))
    yield ReportSection("environment", "Environment", blocks, ("html",) if of.one.is_imported else WRITERS)


def _machine(run: RunFolder) -> Iterator[tuple[str, str]]:
    libraries = run.environment.get("libraries") or {}
    installed = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    memory = (run.environment.get("memory") or {}).get("total_bytes")
    settings = run.environment.get("env") or {}
    facts = {
        "host": run.environment.get("hostname"),
        "OS": run.environment.get("os"),
        "kernel": run.environment.get("kernel"),
        "CPU": json.dumps(run.environment.get("cpu"), ensure_ascii=False),
        "memory": f"{memory / 2**30:.1f} GiB" if isinstance(memory, (int, float)) else None,
        "GPUs": json.dumps(run.environment.get("gpus"), ensure_ascii=False),
        "load average before": run.environment.get("load_average"),
        "libraries": installed,
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
        "git": json.dumps(run.manifest.get("git")),
    }
    for name, value in facts.items():
        if value not in (None, "", "null"):
            yield name, str(value)


def _flat(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, value) of known values; a list of plain values stays one row."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _flat(value, f"{path} · {key}" if path else str(key))
    elif isinstance(data, list) and len(data) > 1 and data[0] and all(part == data[0] for part in data):
        yield from _flat(data[0], f"{path} 1 to {len(data)}")
    elif isinstance(data, list) and any(isinstance(part, (Mapping, list)) for part in data):
        for number, part in enumerate(data, 1):
            yield from _flat(part, f"{path} {number}")
    elif data not in (None, "", []):
        yield path, ", ".join(map(str, data)) if isinstance(data, list) else str(data)


# --- the commands ----------------------------------------------------------------------------------


def again(of: Material) -> Iterator[ReportSection]:
    """Yield the exact commands: the user's, and on a page each process's."""
    run = of.one.run
    argv = " ".join(str(word) for word in run.manifest.get("argv") or ()) or "(not recorded)"
    seed = f"Seed {run.manifest.get('seed')}."
    about = f"{seed} The scenario is in `scenario.yaml`, the resolved plan in `plan.json`."
    if of.one.is_imported:
        yield ReportSection("again", "How to import it again", [Block(code=argv)], ("markdown",))
    else:
        yield ReportSection(
            "again", "How to run it again", [Block(code=argv), Block(words=about)], ("markdown",)
        )
    words = f"{seed} The resolved plan is in plan.json."
    blocks = [Block("The command", words, code=argv)]
    if run.scenario_text.strip():
        blocks.append(Block("scenario.yaml", code=run.scenario_text, folded=True))
    processes = run.plan.get("processes")
    for label, group in processes.items() if isinstance(processes, Mapping) else ():
        lines = [_command(name, process) for name, process in group.items() if isinstance(process, Mapping)]
        blocks.append(Block(f"Processes of {label}", code="\n\n".join(lines), folded=True))
    yield ReportSection("again", "How to run it again", blocks, ("html",))


def _command(name: str, process: Mapping[str, Any]) -> str:
    """Return one process as a shell line with its JSON specification."""
    settings = [f"{key}={shlex.quote(str(value))}" for key, value in (process.get("env") or {}).items()]
    line = " ".join([*settings, *(shlex.quote(str(word)) for word in process.get("argv") or ())])
    spec = process.get("spec")
    return f"# {name}\n{line}" + (
        f"\n# specification: {json.dumps(spec, ensure_ascii=False)}" if spec else ""
    )


def files(of: Material) -> Iterator[ReportSection]:
    blocks = []
    for facts in of.runs:
        path = facts.run.path
        there = [name for name in _FILES if (path / name.rstrip("/")).exists()]
        blocks.append(Block(words=f"files: {path} ({', '.join(there)})"))
    yield ReportSection("files", "", blocks)
