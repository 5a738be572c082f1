"""Change of each highest rate between the runs before and the runs after, and the settings that differ. A key
that an older run does not know counts as its default."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError

from kvbench import connectors, engines
from kvbench.core.findings.rate_change import Became, RateChange, Searched, rate_change
from kvbench.core.plan.engine_count import Unit, unequal
from kvbench.core.records import Cell
from kvbench.core.scenario.deployment_section import COMMON_KEYS
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import MISSING, Column, Table, number
from kvbench.results.provenance import SIMULATED, hardware_of, host_of, mark_of, model_of, slo_of
from kvbench.results.run import RunFolder

ANSWERED: Final = ("found", "at_least", "none")
"""Outcomes of a search that ended with something to compare."""
WHAT: Final = (
    "rate: highest request rate under the SLO, of all trials of each search. after / before with its 90 % "
    "interval; better or worse with 95 % confidence, unchanged within ± 5 %"
)


@dataclass(frozen=True)
class CellChange:
    """One cell. ``before``, ``after``: its rows, one per run that has it. ``change`` is None if they are not
    comparable (``why``). ``per``: unit that rates are divided by if sizes differ."""

    cell: Cell
    before: tuple[Row, ...]
    after: tuple[Row, ...]
    change: RateChange | None = None
    why: str = ""
    per: Unit | None = None
    same: bool = False
    """Whether both sides are the same trials."""

    @property
    def became(self) -> Became:
        if self.same:
            return "unchanged"
        return "inconclusive" if self.change is None else self.change.became

    @property
    def lost(self) -> bool:
        """Whether only the runs before measured the cell."""
        return bool(_answered(self.before)) and not any(
            row.outcome in (*ANSWERED, "undecided") for row in self.after
        )

    def place(self) -> str:
        return f"{self.cell.connector}, {self.cell.input_len:,} in, {self.cell.output_len:,} out"

    def ratio_text(self) -> str:
        """Return ``0.93 [0.89, 0.98]``, followed by the unit if sizes differ."""
        change = self.change
        if change is None:
            return MISSING
        interval = f" [{number(change.low)}, {'…' if math.isinf(change.high) else number(change.high)}]"
        ratio = "∞" if math.isinf(change.ratio) else number(change.ratio)
        return ratio + ("" if self.same else interval) + (f" per {self.per}" if self.per else "")

    def words(self) -> str:
        """Return the conclusion, and why there is no stronger one."""
        return f"{self.became}: {self.why}" if self.why else self.became

    def flat(self) -> dict[str, Any]:
        """Return one level of names and values, for files."""
        change = self.change
        finite = change is not None and math.isfinite(change.ratio)
        return {
            "connector": self.cell.connector,
            "input_len": self.cell.input_len,
            "output_len": self.cell.output_len,
            "before": _rate(self.before),
            "after": _rate(self.after),
            "ratio": change.ratio if change is not None and finite else None,
            "low": change.low if change is not None and finite else None,
            "high": change.high if change is not None and math.isfinite(change.high) else None,
            "per": self.per or "",
            "probably_lower": None if change is None else change.lower,
            "became": self.became,
            "why": self.why,
            "before_runs": ";".join(row.run_id for row in self.before),
            "after_runs": ";".join(row.run_id for row in self.after),
        }


def cell_changes(before: Sequence[RunFolder], after: Sequence[RunFolder]) -> list[CellChange]:
    """Return each searched cell, by length, then in the order of the runs before."""
    sides = [[row for run in side for row in summary_table(run)] for side in (before, after)]
    searched = [[row for row in side if row.outcome != "one_rate"] for side in sides]
    cells = list(dict.fromkeys(row.cell for side in searched for row in side))
    cells.sort(key=lambda cell: (cell.input_len, cell.output_len))
    return [
        _cell_change(cell, *(tuple(row for row in side if row.cell == cell) for side in searched))
        for cell in cells
    ]


def _cell_change(cell: Cell, before: tuple[Row, ...], after: tuple[Row, ...]) -> CellChange:
    found = CellChange(cell, before, after)
    if {row.run_id for row in before} == {row.run_id for row in after} and not _answered((*before, *after)):
        return replace(found, same=True, why=f"the same trials, {_outcome(before)}")
    for rows, word in ((before, "before"), (after, "after")):
        if not _answered(rows):
            return replace(found, why=f"{_outcome(rows)} {word}")
    one, other = _answered(before), _answered(after)
    sizes = {row.size for row in (*one, *other)}
    per = next((unit for size in sizes if (unit := unequal(one[0].size, size)) is not None), None)
    if per is not None and not all(row.size.count(per) for row in (*one, *other)):
        return replace(found, why=f"the numbers of {per}s differ, and some are unknown")
    if marks := dict.fromkeys(row.answer.mark for row in (*one, *other) if row.answer.mark):
        return replace(found, per=per, why=f"predictions that are {' and '.join(marks)}")
    converged = [_converged(rows) for rows in (one, other)]
    if _same_trials(one, other):
        change = rate_change(*([_searched(row, per) for row in rows] for rows in (one, other)))
        return replace(found, change=change, per=per, same=True, why="the same trials")
    if not all(converged):
        sides = [word for word, rows in zip(("before", "after"), converged, strict=True) if not rows]
        return replace(found, per=per, why=f"no search {' and '.join(sides)} converged")
    change = rate_change(*([_searched(row, per) for row in rows] for rows in converged))
    return replace(found, change=change, per=per)


def _answered(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.outcome in ANSWERED]


def _converged(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.answer.converged]


def _same_trials(one: Sequence[Row], other: Sequence[Row]) -> bool:
    """Return whether both sides are copies: different searches never give equal posteriors and figures."""
    sides = [{(row.answer, tuple(row.values.items())) for row in rows} for rows in (one, other)]
    return sides[0] == sides[1]


def _searched(row: Row, per: Unit | None) -> Searched:
    count = (row.size.count(per) if per else 1) or 1
    rate = row.answer.max_request_rate
    return Searched(None if rate is None else rate / count, row.answer.possible.divided(count))


def _outcome(rows: Sequence[Row]) -> str:
    if not rows:
        return "not measured"
    return f"{rows[0].outcome}: {rows[0].reason}," if rows[0].reason else rows[0].outcome


def _rate(rows: Sequence[Row]) -> float | None:
    """Return the geometric mean of the rates of the searches that converged, or of all if none did."""
    used = _converged(rows) or rows
    rates = [row.answer.max_request_rate for row in used if row.answer.max_request_rate]
    return math.exp(sum(map(math.log, rates)) / len(rates)) if rates else None


def _rates(rows: Sequence[Row]) -> str:
    """Return the rate without its interval, which the run's table has."""
    if len(rows) == 1:
        answer = rows[0].answer
        whole = answer.text()
        return whole if answer.outcome != "found" else whole.partition(" ")[0]
    used = len(_converged(rows)) or len(rows)
    runs = f"{len(rows)} runs" if used == len(rows) else f"{used} of {len(rows)} runs"
    return f"{number(_rate(rows))} ({runs})" if rows else MISSING


def change_rows(found: Sequence[CellChange]) -> Table:
    alike = len({change.cell.output_len for change in found}) < 2
    columns = [
        Column("connector", "connector", align="left"),
        Column("input_len", "input", align="right"),
        Column("output_len", "output", align="right", rank=1 if alike else 0),
        Column("before", "before\nreq/s", align="right"),
        Column("after", "after\nreq/s", align="right"),
        Column("ratio", "after / before\n[90 %]", align="right"),
        Column("became", "what became of it", align="left", width=22),
    ]
    cells = [
        [
            change.cell.connector,
            f"{change.cell.input_len}",
            f"{change.cell.output_len}",
            _rates(change.before),
            _rates(change.after),
            change.ratio_text(),
            change.words(),
        ]
        for change in found
    ]
    return Table("", columns, cells, [change.flat() for change in found], "changes", WHAT)


def counts_text(found: Sequence[CellChange]) -> str:
    """Return ``6 cells: 1 worse, 2 unchanged, 3 inconclusive``."""
    counts = Counter(change.became for change in found)
    order: tuple[Became, ...] = ("better", "worse", "unchanged", "inconclusive")
    parts = ", ".join(f"{counts[word]} {word}" for word in order if counts[word])
    return f"{len(found)} cell{'' if len(found) == 1 else 's'}: {parts}"


_REPORTED_ELSEWHERE: Final = ("version", "description", "connectors", "simulate", "model", "slo")


class SettingChange(NamedTuple):
    """One setting that differs, as text: all its values if they differ between repeats."""

    name: str
    before: str
    after: str

    def text(self) -> str:
        return f"{self.name}: {self.before} → {self.after}"


def setting_changes(before: Sequence[RunFolder], after: Sequence[RunFolder]) -> list[SettingChange]:
    """Return the settings that differ, the scenario's first. Neither side is empty."""
    sides = [[_settings(run) for run in side] for side in (before, after)]
    names = dict.fromkeys(name for side in sides for settings in side for name in settings)
    # A connector that one side lacks is reported without its options.
    lacking = set.symmetric_difference(
        *({name.split(".")[0] for settings in side for name in settings} for side in sides)
    )
    found = []
    for name in names:
        if "." in name and name.split(".")[0] in lacking:
            continue
        one, other = (list(dict.fromkeys(settings.get(name, MISSING) for settings in side)) for side in sides)
        if set(one) != set(other):
            found.append(SettingChange(name, " / ".join(one), " / ".join(other)))
    return found


def _settings(run: RunFolder) -> dict[str, str]:
    """Return all settings by dotted name, and the engine, libraries and host."""
    scenario = run.plan.get("scenario")
    given = dict(scenario) if isinstance(scenario, Mapping) else {}
    found = {"model": model_of(run), "SLO": slo_of(run).text()}
    filled = _filled(given, defaults_of(Scenario))
    deployment = filled.get("deployment")
    if isinstance(deployment, Mapping):
        options = _mapping(deployment.get("engine_options"))
        engine_options = _filled(options, defaults_of(engines.options_model_of(run.plan)))
        filled["deployment"] = {**deployment, "engine_options": engine_options}
    simulated = run.manifest.get("kind") == "simulate" or SIMULATED in run.labels
    kept = {name: value for name, value in filled.items() if name not in _REPORTED_ELSEWHERE}
    kept |= {"simulate": filled.get("simulate")} if simulated else {}
    kept["scenario"] = kept.pop("name", "")
    found |= {name: _text(value) for name, value in _flat(kept)}
    found |= {f"model.{name}": _text(value) for name, value in _flat(_mapping(given.get("model")))}
    settles = not engines.options_model_of(run.plan).chooses_transport
    found |= _connectors(given.get("connectors"), settles)
    return {name: text for name, text in (found | _circumstances(run)).items() if text}


def _circumstances(run: RunFolder) -> dict[str, str]:
    mark, git = mark_of(run), _mapping(run.manifest.get("git"))
    environment = run.environment
    libraries = _mapping(environment.get("libraries"))
    return {
        "measured on": mark.word if mark is not None else "real engines",
        "seed": _text(run.manifest.get("seed")),
        "host": host_of(run),
        "hardware": hardware_of(run),
        "kernel": _text(environment.get("kernel")),
        "kvbench": _text(run.manifest.get("kvbench")),
        "commit": _text(git.get("commit"))[:12] + (" with changes" if git.get("dirty") else ""),
        **{name: _text(version) for name, version in libraries.items()},
    }


def _connectors(given: Any, settles: bool) -> dict[str, str]:
    """Return each connector's options by its label. ``settles``: resolve choices left to a library."""
    found: dict[str, str] = {}
    listed = [entry for entry in given if isinstance(entry, Mapping)] if isinstance(given, list) else []
    for entry in listed:
        name = str(entry.get("name"))
        label = str(entry.get("label") or name)
        settings = {key: value for key, value in entry.items() if key not in COMMON_KEYS}
        try:
            options = connectors.get(name).options_model.model_validate_json(json.dumps(settings))
            settings |= (options.settled() if settles else options).model_dump(mode="json")
        except (InputError, ValidationError):  # a connector or option that this installation lacks
            pass
        found |= {f"{label}.{key}": _text(value) for key, value in _flat(settings)}
    labels = ", ".join(str(entry.get("label") or entry.get("name")) for entry in listed)
    return {"connectors": labels, **found} if labels else found


# --- defaults --------------------------------------------------------------------------------------


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's defaults as JSON; sections without defaults by their fields."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = defaults_of(kind)
    return found


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with defaults for its missing keys."""
    found = {key: value for key, value in defaults.items() if key not in given}
    for key, value in given.items():
        known = defaults.get(key)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        found[key] = _filled(value, known) if both and known else value
    return found


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    if value is None or value == [] or value == ():
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
