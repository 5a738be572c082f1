"""Current state of a run folder: progress, latest trials, queues and NICs.

The same is shown in the terminal and, as JSON, on the live page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from kvbench.core.records import Cell, TrialRecord
from kvbench.core.units import size_text
from kvbench.errors import StoreError
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import reason_text, trial_values
from kvbench.report.terminal import LiveLine, minutes
from kvbench.results.provenance import caption, mark_of, scenario_of, slo_of
from kvbench.results.run import CELLS, MANIFEST, TRIALS, RunFolder, load_run, writer_is_alive

_FILES: Final = (MANIFEST, TRIALS, CELLS, "plan.json", "transfers.parquet", "telemetry")


@dataclass(frozen=True)
class TrialLine:
    """One trial, or one case of a microbenchmark, as a line of the log.

    ``at``: minutes and seconds since the run's start. ``where`` and ``speed``: display texts."""

    at: str
    trial_id: str
    connector: str
    where: str
    speed: str
    request_rate: float
    verdict: str
    reason: str
    slo_attainment: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None


@dataclass(frozen=True)
class Seen:
    """A run folder at one moment. ``unit``: counted as done, cells or cases.

    ``curve``: trials of the current or last cell. ``live``: current line of the process that measures.

    ``load`` and ``nics``: (name, value as text) of the last trial: its queues, and MB/s sent / received."""

    run_id: str
    title: str
    caption: str
    status: str
    error: str
    elapsed: str
    live: LiveLine
    unit: str
    cells_done: int
    cells_planned: int
    cell: str
    curve: tuple[TrialLine, ...]
    load: tuple[tuple[str, str], ...]
    nics: tuple[tuple[str, str], ...]
    log: tuple[TrialLine, ...]

    @property
    def running(self) -> bool:
        return self.status == "running"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RunWatch:
    """Reader of a growing run folder: it reads the folder again only after a change.

    Several threads may use it at once. ``look`` raises StoreError if the folder is no run folder, and
    NewerSchemaError if a newer kvbench wrote it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: object = None
        self._known: tuple[RunFolder, Seen] | None = None

    def look(self, now: datetime | None = None) -> Seen:
        with self._lock:
            stamp = _stamp(self._path)
            if self._known is None or stamp != self._stamp:
                run = load_run(self._path)
                self._known, self._stamp = (run, _seen(run, now)), stamp
            run, seen = self._known
        live = LiveLine.of_folder(self._path) if seen.running else None
        return replace(seen, elapsed=minutes(_elapsed_s(run, now)), live=live or seen.live)


def _stamp(path: Path) -> object:
    """Return a value that changes when a watched file changes or the writer ends."""
    files = [path / name for name in _FILES]
    stats = [file.stat() if file.exists() else None for file in files]
    return writer_is_alive(path), [(stat.st_mtime_ns, stat.st_size) if stat else None for stat in stats]


def _seen(run: RunFolder, now: datetime | None) -> Seen:
    trials = sorted(run.all_trials, key=lambda trial: trial.started_at)
    micro = run.manifest.get("kind") == "microbench"
    log = _transfer_lines(run) if micro else [_line(run, trial) for trial in trials]
    last = trials[-1] if trials else None
    planned = run.plan.get("cases" if micro else "cells")
    cells = len(planned) if isinstance(planned, list) else 0
    done = len(log) if micro else len(run.cells)
    mark = mark_of(run)
    unit = "cases" if micro else "cells"
    return Seen(
        run_id=run.run_id,
        title=f"{f'{mark.word.upper()} · ' if mark else ''}{scenario_of(run)} · {slo_of(run).text()}",
        caption=caption(run),
        status=str(run.manifest.get("status")),
        error=str(run.manifest.get("error") or ""),
        elapsed=minutes(_elapsed_s(run, now)),
        live=LiveLine(f"{unit} {done}/{cells or '?'}", share=min(1.0, done / max(1, cells))),
        unit=unit,
        cells_done=done,
        cells_planned=cells,
        cell=_cell_name(last.cell) if last else "",
        curve=tuple(_line(run, trial) for trial in trials if last and trial.cell == last.cell),
        load=tuple(_load(last)) if last else (),
        nics=tuple(_nics(run, last)) if last else (),
        log=tuple(log),
    )


def _line(run: RunFolder, trial: TrialRecord) -> TrialLine:
    values = trial_values(trial)
    started = _moment(run.manifest.get("started_at"))
    begun = _moment(trial.started_at)
    after_s = (begun - started).total_seconds() + trial.duration_s if begun and started else None
    return TrialLine(
        at="" if after_s is None else minutes(after_s),
        trial_id=trial.trial_id,
        connector=trial.cell.connector,
        where=f"{trial.cell.input_len:,} in",
        speed=f"{number(trial.request_rate)} req/s",
        request_rate=trial.request_rate,
        verdict=trial.verdict,
        reason=reason_text(trial),
        slo_attainment=values["slo_attainment"],
        ttft_ms_p50=values["ttft_ms_p50"],
        ttft_ms_p99=values["ttft_ms_p99"],
        tpot_ms_p50=values["tpot_ms_p50"],
    )


def _cell_name(cell: Cell) -> str:
    return f"{cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"


def _transfer_lines(run: RunFolder) -> list[TrialLine]:
    """Return a microbenchmark's rows as trial lines."""
    lines = []
    started = _moment(run.manifest.get("started_at"))
    for record in run.transfer_records():
        begun, case = _moment(record.started_at), record.case
        after_s = (begun - started).total_seconds() + record.window_s if begun and started else None
        lines.append(
            TrialLine(
                at="" if after_s is None else minutes(max(0.0, after_s)),
                trial_id=case.key,
                connector=case.backend,
                where=f"{case.op} {case.batch_size} × {size_text(case.block_bytes)}",
                speed=f"{number(record.gb_per_s)} GB/s",
                request_rate=0.0,
                verdict={"ok": "measured", "error": "invalid"}.get(record.status, "undecided"),
                reason=record.error or record.transport,
                slo_attainment=None,
                ttft_ms_p50=None,
                ttft_ms_p99=None,
                tpot_ms_p50=None,
            )
        )
    return lines


def _load(trial: TrialRecord) -> Iterator[tuple[str, str]]:
    """Yield requests in flight and waiting, and the engines' use."""
    summary = trial.summary
    for name, key in (("peak in flight", "peak_in_flight"), ("peak waiting", "peak_waiting")):
        if summary.get(key) is not None:
            yield name, f"{summary[key]}"
    growth = next((finding for finding in trial.findings if finding.gate == "growing_queue"), None)
    if growth is not None and (per_s := growth.evidence.get("per_s")) is not None:
        yield "queue grows by", f"{per_s:.2f} req/s"
    for role, use in (trial.engine.get("use") or {}).items():
        running, waiting = use.get("running_mean"), use.get("waiting_mean")
        if running is not None and waiting is not None:
            yield role, f"{number(running)} running, {number(waiting)} waiting (means)"


def _nics(run: RunFolder, trial: TrialRecord) -> Iterator[tuple[str, str]]:
    """Yield each NIC's mean MB/s sent and received during the trial; idle NICs are left out."""
    try:
        rows = run.telemetry(trial.trial_id)
    except StoreError:
        return
    rows = rows[rows.source.str.startswith("nic:")].sort_values("t_s")
    for source, nic_rows in rows.groupby("source"):
        rates = []
        for metric in ("tx_bytes", "rx_bytes"):
            values = nic_rows[nic_rows.metric == metric]
            span_s = float(values.t_s.max() - values.t_s.min()) if len(values) > 1 else 0.0
            grown = float(values.value.iloc[-1] - values.value.iloc[0]) if span_s else 0.0
            rates.append(grown / span_s / 1e6 if span_s else 0.0)
        if max(rates) > 0:
            yield str(source).removeprefix("nic:"), " / ".join(number(rate) for rate in rates)


def _elapsed_s(run: RunFolder, now: datetime | None) -> float:
    started = _moment(run.manifest.get("started_at"))
    ended = _moment(run.manifest.get("ended_at")) or now or datetime.now(timezone.utc)
    return max(0.0, (ended - started).total_seconds()) if started else 0.0


def _moment(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
