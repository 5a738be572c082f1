"""What to do after a sweep: the one command that helps most, for its last line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kvbench.files import read_object
from kvbench.report.findings.ahead import parted, rate_pairs
from kvbench.report.tables.result import Row, summary_table
from kvbench.results.provenance import scenario_of
from kvbench.results.run import MANIFEST, RunFolder


def next_step(run: RunFolder, resume: str = "") -> str:
    """``next: kvbench compare A B  (…)``. ``resume``: the command that goes on with the run, if one can."""
    command, purpose = _step(run, summary_table(run), resume)
    return f"next: {command}  ({purpose})"


def _step(run: RunFolder, rows: Sequence[Row], resume: str) -> tuple[str, str]:
    if resume and any(result.status == "failed" for result in run.cells):
        return resume, "measures the failed cells once more"
    search = (run.plan.get("scenario") or {}).get("search") or {}
    words = [str(word) for word in run.manifest.get("argv") or ()]
    again = shlex.join(words) if words[:1] == ["kvbench"] else ""
    searched = [row for row in rows if row.outcome in ("found", "at_least")]
    if again and searched and search.get("method") == "sustained":
        short = [row.name for row in searched if row.outcome == "found" and not row.answer.sure]
        if short and (trials := search.get("max_trials")):
            names = ", ".join(dict.fromkeys(short))
            return f"{again} --set search.max_trials={2 * int(trials)}", f"searches longer, for {names}"
        if any(row.outcome == "at_least" for row in searched) and (most := search.get("max_rate")):
            return f"{again} --set search.max_rate={10 * float(most):g}", "no rate was too high yet"
        alike = parted(rate_pairs(rows)).alike
        if alike and (precision := search.get("precision")):
            names = f"{alike[0].ahead} from {alike[0].behind}"
            return f"{again} --set search.precision={float(precision) / 2:g}", f"tells more closely, {names}"
    if (earlier := _earlier(run)) is not None:
        both = " ".join(shlex.quote(str(path)) for path in (earlier, run.path))
        return f"kvbench compare {both}", "says what has changed since"
    return f"kvbench timeline {shlex.quote(str(run.path))}", "shows one trial request by request"


def _earlier(run: RunFolder) -> Path | None:
    """The last complete run of the same scenario and kind beside this one."""
    for folder in sorted(run.path.parent.glob(f"*-{scenario_of(run)}-*"), reverse=True):
        if folder.name < run.path.name and (folder / MANIFEST).is_file():
            manifest = read_object(folder / MANIFEST, [])
            same = all(manifest.get(key) == run.manifest.get(key) for key in ("kind", "scenario"))
            if same and manifest.get("status") == "complete":
                return folder
    return None
