"""``kvbench export timeline``: one trial's sampled requests through client, router, P, KV transfer and D.

The file is in the trace-event format (JSON), which Perfetto and Chrome's tracing page open. Processes of the
deployment are its processes, lanes its threads: a lane holds one request's spans at a time, and spans in a
lane nest. Arrows join a request's spans across processes. No profiler is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.errors import EXIT_OK, InputError, StoreError
from kvbench.files import store_errors, write_json
from kvbench.processes.common.spans import SUFFIX, TRACED_REQUESTS, Clock, Span, read_spans
from kvbench.results.run import RunFolder, load_run

CLIENT: Final = "client"
_ORDER: Final = (CLIENT, "router", "prefill", "decode", "aggregated")
_FLOW_SPANS: Final = (
    "sent to first token",
    "prefill call",
    "prefill step",
    "KV transfer",
    "first step",
    "decode",
)
"""The spans that a request's arrow touches, where they exist: the first of each name in each process."""


@dataclass(frozen=True)
class TimelineProcess:
    """What one process did for the sampled requests, on the trial's clock (0 is its start)."""

    name: str
    spans: Mapping[str, Sequence[Span]]
    """Spans by request id."""


@dataclass
class _Lane:
    """A lane of a process: its current request and the ends of its open spans (s), innermost last."""

    number: int
    request: str = ""
    ends: list[float] = field(default_factory=list)

    def takes(self, request: str, span: Span) -> bool:
        while self.ends and self.ends[-1] <= span.begin_s:
            self.ends.pop()
        if not self.ends or (self.request == request and span.end_s <= self.ends[-1]):
            self.request = request
            self.ends.append(span.end_s)
            return True
        return False


def command(folder: Path, trial_id: str | None, console: Console) -> int:
    """Write ``figures/timeline-<trial>.json`` into the run folder and print its path.

    Raises StoreError, or InputError for an unknown trial."""
    run = load_run(folder)
    trial = chosen_trial(run, trial_id)
    processes = processes_of(run, trial)
    path = run.path / "figures" / f"timeline-{trial.trial_id}.json"
    with store_errors(path):
        path.parent.mkdir(exist_ok=True)
        write_json(path, trace(run, trial, processes))
    shown = ", ".join(process.name for process in processes)
    requests = len(processes[0].spans)
    console.print(f"{path}: {requests} requests through {shown}", markup=False)
    if len(processes) == 1:
        console.print(
            "note: only the client's times are known; run with --set deployment.trace=true for the others",
            markup=False,
        )
    console.print("open it at ui.perfetto.dev or chrome://tracing", markup=False)
    return EXIT_OK


def chosen_trial(run: RunFolder, trial_id: str | None) -> TrialRecord:
    """Return the trial of that id, by default the last. Raises InputError with the existing ids."""
    trials = run.trials or run.other_trials
    ids = [trial.trial_id for trial in trials]
    if not ids:
        raise StoreError(f"{run.path} holds no trial", hint="it ended before the first one")
    if trial_id is None:
        return trials[-1]
    for trial in trials:
        if trial.trial_id == trial_id:
            return trial
    raise InputError(f"{run.path.name} has no trial {trial_id!r}", hint=f"there are: {', '.join(ids)}")


def processes_of(run: RunFolder, trial: TrialRecord) -> list[TimelineProcess]:
    """Return the client, then every process with spans, in the order in which a request reaches them."""
    records = run.request_records(trial.trial_id)[:TRACED_REQUESTS]
    client = TimelineProcess(CLIENT, {record.request_id: list(client_spans(record)) for record in records})
    reported = trial.engine.get("client") or {}
    start = reported.get("started_monotonic_s")
    if start is None:
        return [client]
    ours = Clock(str(run.environment.get("hostname")), float(start), float(reported["started_unix_s"]))
    found = [client]
    folder = run.path / "logs" / trial.cell.connector
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        clock, spans = read_spans(path)
        zero = ours.monotonic_s if clock is None else zero_on(clock, ours)
        wanted = {
            record.request_id: [_moved(span, -zero) for span in spans[record.request_id]]
            for record in records
            if record.request_id in spans
        }
        if wanted:
            found.append(TimelineProcess(path.name.removesuffix(SUFFIX), wanted))
    return sorted(found, key=lambda process: (_process_order(process.name), process.name))


def zero_on(theirs: Clock, ours: Clock) -> float:
    """Return the trial's start on another process's monotonic clock.

    Another machine's clock is aligned by both wall clocks."""
    if theirs.host == ours.host:
        return ours.monotonic_s
    return ours.unix_s - theirs.offset_s


def client_spans(record: RequestRecord) -> Iterator[Span]:
    """Yield a sent request's spans at its sender."""
    sent, first, last = record.sent_s, record.first_token_s, record.last_token_s
    ends = [moment for moment in (last, first, sent) if moment is not None]
    if not ends:
        return
    args: dict[str, Any] = {"request_id": record.request_id, "input_len": record.input_len}
    args |= {"output_len": record.output_len, "error": record.error}
    yield Span("request", record.scheduled_s, max(ends), args)
    if sent is not None:
        yield Span("waits to be sent", record.scheduled_s, sent)
        if first is not None:
            yield Span("sent to first token", sent, first)
    if first is not None and last is not None and last > first:
        yield Span("further tokens", first, last)


def trace(run: RunFolder, trial: TrialRecord, processes: Sequence[TimelineProcess]) -> dict[str, Any]:
    """Return the document in the trace-event format."""
    numbers = {process.name: number for number, process in enumerate(processes, start=1)}
    events: list[dict[str, Any]] = []
    for process in processes:
        events += process_events(process, numbers[process.name])
    events += flows(events)
    events += counters(run, trial, numbers)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.run_id,
            "trial": trial.trial_id,
            "connector": trial.cell.connector,
            "request_rate": trial.request_rate,
            "verdict": trial.verdict,
            "labels": run.labels,
        },
        "traceEvents": events,
    }


def process_events(process: TimelineProcess, pid: int) -> Iterator[dict[str, Any]]:
    """Yield a process's name, its lanes' names, and a complete event (``X``) per span; times in µs."""
    yield _metadata("process_name", pid, 0, process.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    ordered = sorted(
        ((span, request) for request, spans in process.spans.items() for span in spans),
        key=lambda item: (item[0].begin_s, -item[0].end_s),
    )
    lanes: list[_Lane] = []
    for span, request in ordered:
        lane = next((row for row in _same_request_first(lanes, request) if row.takes(request, span)), None)
        if lane is None:
            lane = _Lane(len(lanes) + 1)
            lane.takes(request, span)
            lanes.append(lane)
            yield _metadata("thread_name", pid, lane.number, f"lane {lane.number}")
        yield {
            "ph": "X",
            "name": span.name,
            "cat": process.name.split("-")[0],
            "pid": pid,
            "tid": lane.number,
            "ts": _us(span.begin_s),
            "dur": _us(span.end_s) - _us(span.begin_s),
            "args": {"request": request, **span.args},
        }


def _same_request_first(lanes: Sequence[_Lane], request: str) -> list[_Lane]:
    return sorted(lanes, key=lambda lane: (lane.request != request, lane.number))


def flows(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an arrow per request through its spans: ``s``, any number of ``t``, ``f``."""
    stops: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] in _FLOW_SPANS:
            places = stops.setdefault(event["args"]["request"], {})
            known = places.get((event["pid"], event["name"]))
            if known is None or event["ts"] < known["ts"]:
                places[event["pid"], event["name"]] = event
    for number, places in zip(count(1), stops.values(), strict=False):
        path = sorted(places.values(), key=lambda event: (event["ts"], event["pid"]))
        if len({event["pid"] for event in path}) < 2:
            continue
        for index, event in enumerate(path):
            phase = "s" if index == 0 else "f" if index == len(path) - 1 else "t"
            arrow = {"ph": phase, "name": "request", "cat": "flow", "id": number}
            arrow |= {key: event[key] for key in ("pid", "tid", "ts")}
            yield {**arrow, "bp": "e"} if phase == "f" else arrow


def counters(run: RunFolder, trial: TrialRecord, numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the engines' /metrics as counter tracks (``C``), sampled twice a second."""
    client = trial.engine.get("client") or {}
    try:
        rows = run.telemetry(trial.trial_id).to_dict("records")
        began = datetime.fromisoformat(trial.started_at.replace("Z", "+00:00")).timestamp()
        shift = began - float(client["started_unix_s"])
    except (StoreError, ValueError, KeyError):
        return
    for row in rows:
        source, metric = str(row["source"]), str(row["metric"])
        if source in numbers and metric.startswith("vllm:"):
            yield {
                "ph": "C",
                "name": metric.removeprefix("vllm:"),
                "pid": numbers[source],
                "tid": 0,
                "ts": _us(float(row["t_s"]) + shift),
                "args": {"value": float(row["value"])},
            }


def _metadata(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}}


def _moved(span: Span, by_s: float) -> Span:
    return Span(span.name, span.begin_s + by_s, span.end_s + by_s, span.args)


def _process_order(name: str) -> int:
    role = name.split("-")[0]
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


def _us(seconds: float) -> int:
    """Return whole microseconds; spans that nest in seconds stay nested."""
    return round(seconds * 1e6)
