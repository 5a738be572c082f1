"""report.md: the whole story of one run on one page, generated from its raw files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from kvbench.core.records import TrialRecord
from kvbench.report.findings.findings import as_notes, by_kind, statements
from kvbench.report.findings.load_rows import IMPORTED
from kvbench.report.findings.notes import Note, ahead, notes
from kvbench.report.plots import NO_DATA, PICTURES
from kvbench.report.tables import cells as celltables
from kvbench.report.tables.cells import table
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import Row, number, percent, time_line, trial_values
from kvbench.report.tables.router_cost import RouterCost
from kvbench.results.provenance import caption, mark_of, scenario_of, slo_of
from kvbench.results.run import Run


def report_markdown(run: Run, rows: Sequence[Row], costs: Sequence[RouterCost] = ()) -> str:
    """The report as Markdown with GitHub's tables."""
    mark = mark_of(run)
    parts = [
        f"# {scenario_of(run)}: {_subject(run)}" + (f" ({mark.word})" if mark else ""),
        f"{caption(run)}\n\nSLO: {slo_of(run).text()}. Status of the run: {run.manifest.get('status')}.",
    ]
    if mark is not None:
        parts.append(f"> **{mark.word.title()}**: {mark.why}. These are not figures of a GPU.")
    parts += ["## Findings", celltables.WHY_AHEAD if any(ahead(rows)) else ""]
    for words, found in by_kind(statements(run, rows)).items():
        parts += [f"### {words}", _bullets(as_notes(found))]
    beside = method_tables(run)
    if rows or not beside:
        parts += ["## Result", celltables.result(rows) if rows else f"No cell was measured; {NO_DATA}."]
    for name, picture in PICTURES.items():
        if (run.path / "figures" / f"{name}.png").is_file():
            parts.append(f"![{picture.title}](figures/{name}.png)")
    for each in beside:
        parts += [f"## {each.title}", each.words, table(each.header, each.shown)]
    parts += ["## Notes", _bullets(notes(run, rows, gates=False)) or "None."]
    if run.manifest.get("kind") == IMPORTED:
        parts += ["## Where the rows come from", *_provenance(run), "## How to read it in again", _again(run)]
        return "\n\n".join(part for part in parts if part) + "\n"
    parts += ["## Latency at the supporting trial", celltables.WHICH_TRIAL, celltables.latencies(rows)]
    where = celltables.breakdown(rows)
    if where:
        parts += ["## Where the time to the first token goes", celltables.WHICH_PARTS, where]
    if costs:
        parts += ["## What the router adds", celltables.WHICH_COSTS, *map(celltables.router_cost, costs)]
    parts += ["## Rates, KV cache and prefix cache at the supporting trial", celltables.rates(rows)]
    client = celltables.client(rows)
    if client:
        parts += ["## The load generator itself", celltables.WHICH_CLIENT, client]
    parts += ["## Search", *_searches(run)]
    parts += ["## What the gates found, trial by trial", _findings(run) or "No gate had anything to say."]
    parts += ["## Environment", _environment(run)]
    parts += ["## How to run it again", _again(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _subject(run: Run) -> str:
    if run.manifest.get("kind") == IMPORTED:
        return "results that were read in"
    return "highest request rate under the SLO"


def _provenance(run: Run) -> Iterable[str]:
    """The files that were read, what they do not say, and what was left out."""
    told = run.manifest.get("imported") or {}
    header = ["file", "format", "tool", "lines", "SHA-256"]
    yield table(
        header,
        [
            [
                *(str(file.get(key)) for key in ("name", "format")),
                f"{file.get('tool')} {file.get('version') or ''}",
                *(str(file.get(key)) for key in ("lines", "sha256")),
            ]
            for file in told.get("files", ())
        ],
    )  # fmt: skip
    missing = ", ".join(f"{name} ({count})" for name, count in (told.get("missing") or {}).items())
    yield f"Not told, and in how many rows: {missing or 'nothing'}."
    left = [
        Note(f"{each.get('file')}:{each.get('line')}: {each.get('why')}")
        for each in told.get("left_out") or ()
    ]
    yield f"Left out, or to be read with care:\n\n{_bullets(left)}" if left else "Nothing was left out."


def _searches(run: Run) -> Iterable[str]:
    cells = list(dict.fromkeys(trial.cell for trial in run.trials))
    if not cells:
        yield "No trial was run."
    if told := time_line(run):
        yield f"{told}."
    header = ["trial", "asked as", "rate", "verdict", "met (%)", "TTFT P50 / P99", "TPOT P50 / P99", "reason"]
    for cell in cells:
        yield f"### {cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"
        yield table(header, [_trial_cells(trial) for trial in run.trials_of(cell)])


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
        trial.reason,
    ]


def _findings(run: Run) -> str:
    return _bullets(
        Note(f"`{trial.trial_id}` {finding.level}, {finding.gate}: {finding.message}", finding.advice)
        for trial in run.all_trials
        for finding in trial.findings
    )


def _environment(run: Run) -> str:
    """What of environment.json matters to a reader; the file has all of it."""
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
    return table(
        ["", ""], [[name, str(value)] for name, value in facts.items() if value not in (None, "", "null")]
    )


def _again(run: Run) -> str:
    argv = " ".join(str(word) for word in run.manifest.get("argv", [])) or "(not recorded)"
    if run.manifest.get("kind") == IMPORTED:
        return f"```\n{argv}\n```"
    about = f"Seed {run.manifest.get('seed')}. The scenario lies beside this file as `scenario.yaml`"
    return f"```\n{argv}\n```\n\n{about}, everything resolved in `plan.json`."


def _bullets(items: Iterable[Note]) -> str:
    lines = []
    for note in items:
        first, *more = note.text.strip().splitlines() or [""]
        advice = f" → {' '.join(note.advice.split())}" if note.advice else ""
        lines.append(f"- {' '.join(first.split())}{advice}")
        quoted = (" ".join(line.split()).replace("`", "'") for line in more)
        lines += [f"  - `{line}`" for line in quoted if line]  # lines of a log
    return "\n".join(lines)
