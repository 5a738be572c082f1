"""The sections of report.html that a run of any kind has: the gates' findings, the machine, the commands."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvbench.report.findings.notes import Note
from kvbench.report.html.tables import Block, Section, text_table
from kvbench.report.tables.result import MISSING
from kvbench.results.run import Run

GATES: Final = "What the gates found"
_LEVELS: Final = ("invalid", "warning", "note")


def warnings_told(run: Run) -> list[Note]:
    return [Note(warning) for warning in run.warnings]


def gates_section(run: Run) -> Section:
    """What the gates said: one line a gate, the weightiest first; every single finding is folded away."""
    found = [(trial.trial_id, finding) for trial in run.all_trials for finding in trial.findings]
    found.sort(key=lambda each: _LEVELS.index(each[1].level))
    counts = Counter((finding.level, finding.gate) for _, finding in found)
    last = {(finding.level, finding.gate): finding for _, finding in found}
    if not run.all_trials:
        return Section("gates", GATES, [])
    if not found:
        return Section("gates", GATES, [Block(words="No gate had anything to say.")])
    brief = [
        [level, gate, number, last[level, gate].message, last[level, gate].advice or MISSING]
        for (level, gate), number in counts.items()
    ]
    every = [
        [finding.level, trial_id, finding.gate, finding.message, finding.advice or MISSING]
        for trial_id, finding in found
    ]
    words = "An invalid trial counts neither way; a warning stands beside the number."
    header = ["level", "gate", "findings", "the last of them", "what to do"]
    title = f"Every finding ({len(found)})"
    full = text_table(title, ["level", "trial", "gate", "what was found", "what to do"], every)
    return Section(
        "gates",
        GATES,
        [
            Block(words=words, table=text_table(f"{len(run.all_trials)} trials, by gate", header, brief)),
            Block(title, table=full, folded=True, bulk=True),
        ],
    )


def environment_section(run: Run) -> Section:
    """environment.json and manifest.json, each value with its place in the file."""
    blocks = []
    for name, data in (("environment.json", run.environment), ("manifest.json", run.manifest)):
        rows = list(_flat(data))
        if rows:
            table = text_table(name, ["what", "value"], rows)
            blocks.append(Block(f"{name}", table=table, folded=name != "environment.json"))
    return Section("environment", "Environment", blocks)


def _flat(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(place, value) of what is known; a list of plain values stays one line."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _flat(value, f"{place} · {key}" if place else str(key))
    elif isinstance(data, list) and len(data) > 1 and data[0] and all(each == data[0] for each in data):
        yield from _flat(data[0], f"{place} 1 to {len(data)}")
    elif isinstance(data, list) and any(isinstance(each, (Mapping, list)) for each in data):
        for number, each in enumerate(data, 1):
            yield from _flat(each, f"{place} {number}")
    elif data not in (None, "", []):
        yield place, ", ".join(map(str, data)) if isinstance(data, list) else str(data)


def rerun_section(run: Run) -> Section:
    """The exact commands: the user's own, and each process's as it was started."""
    argv = " ".join(str(word) for word in run.manifest.get("argv") or ()) or "(not recorded)"
    words = f"Seed {run.manifest.get('seed')}. Everything resolved lies in plan.json beside this file."
    blocks = [Block("The command", words, code=argv)]
    if run.scenario_text.strip():
        blocks.append(Block("scenario.yaml", code=run.scenario_text, folded=True))
    processes = run.plan.get("processes")
    for label, group in processes.items() if isinstance(processes, Mapping) else ():
        lines = [_command(name, each) for name, each in group.items() if isinstance(each, Mapping)]
        blocks.append(Block(f"Processes of {label}", code="\n\n".join(lines), folded=True))
    return Section("again", "How to run it again", blocks)


def _command(name: str, process: Mapping[str, Any]) -> str:
    """One process as a line for a shell, and what it reads as JSON."""
    settings = [f"{key}={shlex.quote(str(value))}" for key, value in (process.get("env") or {}).items()]
    line = " ".join([*settings, *(shlex.quote(str(word)) for word in process.get("argv") or ())])
    spec = process.get("spec")
    return f"# {name}\n{line}" + (
        f"\n# its specification: {json.dumps(spec, ensure_ascii=False)}" if spec else ""
    )
