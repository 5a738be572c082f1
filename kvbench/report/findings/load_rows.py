"""A run's loads as rows of figures, and the rules' conclusions.

A row is an imported result, a listed rate, a single rate, a closed loop or the equal rate after a search. A
search adds the trial that supports its answer, marked by ``answer``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvbench import engines
from kvbench.core.findings.ahead import AXES
from kvbench.core.findings.findings import UNEQUAL_ADVICE, Claim, Statement, conclude, read_claims
from kvbench.core.findings.load_row import Axis, LoadRow, RowConditions, known_model, prefill_peaks
from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.findings.setups import cache_blind
from kvbench.core.physics import prefill_work
from kvbench.core.plan.engine_count import size_in
from kvbench.core.records import TrialRecord
from kvbench.core.slo import Limit
from kvbench.core.stats import sectioned
from kvbench.errors import StoreError
from kvbench.report.findings.ahead import (
    RatePair,
    by_lengths,
    group_pairs,
    no_winner_text,
    rate_pairs,
    unconverged_text,
    unequal_text,
)
from kvbench.report.tables.result import Row, fit_limits, interval_word, summary_table
from kvbench.report.tables.trial_values import SUMMARY_KEYS, engine_word, trial_value
from kvbench.report.tables.vllm_bench import serve_values
from kvbench.results.provenance import hardware_of, mark_of, model_of, resolved, slo_of
from kvbench.results.run import RunFolder

IMPORTED: Final = "imported"
OFFERED: Final = (IMPORTED, "fixed", "equal_rate", "closed_loop")
"""Methods that give each trial a row."""
SECTIONS: Final = 10
UNCONVERGED_ADVICE: Final = (
    "allow more trials (search.max_trials), and read in the caveats why the search stopped"
)
LEAST_REQUESTS: Final = 100
"""Fewest requests for a standard error: ten sections of ten."""
_REQUEST_COLUMNS: Final = ("scheduled_s", "first_token_s", "last_token_s", "output_len", "error", "sent_s")


def load_rows(run: RunFolder, name: str = "", *, errors: bool = True) -> list[LoadRow]:
    """Return the loads of a run in order of measurement. ``name``: the run, if several share a table;
    ``errors``: also read requests for standard errors."""
    newest = run.equal_rate_trials
    trials = [
        trial
        for trial in run.all_trials
        if trial.method in OFFERED and trial.verdict != "invalid"
        if trial.method != "equal_rate" or trial in newest
    ]
    if run.manifest.get("kind") == "bench":
        trials += [trial for trial in run.trials if trial.verdict != "invalid"]
    return [_row_of(run, trial, name, errors=errors) for trial in trials]


def searched_rows(run: RunFolder, name: str = "") -> list[LoadRow]:
    """Return the trials that support the answers of the run's searches."""
    trials = {trial.trial_id: trial for trial in run.all_trials}
    return [
        replace(
            _row_of(run, trials[row.trial_id], name),
            answer=row.answer.text(),
            answer_rate=row.answer.max_request_rate,
            answer_bounds=interval_word([row.answer]) if row.outcome in ("found", "unfinished") else "",
        )
        for row in summary_table(run)
        if row.trial_id and row.outcome != "one_rate"
    ]


def _row_of(run: RunFolder, trial: TrialRecord, name: str, *, errors: bool = False) -> LoadRow:
    settings = _settings(trial)
    figures = {key: value for key, value in serve_values(trial).items() if isinstance(value, (int, float))}
    figures |= _more(trial)
    rate = trial.request_rate if trial.request_rate > 0 else None
    unfit = fit_limits(run, trial.cell).mark
    script_rate = settings.get("script_request_rate")
    requests = _requests(run, trial) if errors else None
    sent = np.zeros(0) if requests is None else requests["scheduled_s"][~np.isnan(requests["sent_s"])]
    planned = trial.summary.get("planned") or settings.get("num_prompts") or figures.get("completed")
    return LoadRow(
        key=trial.trial_id,
        run=name or run.run_id,
        cell=trial.cell,
        request_rate=rate,
        requests=int(planned) if isinstance(planned, (int, float)) else None,
        figures=figures,
        axes=_axes(run, trial, settings, name),
        errors={} if requests is None else _errors(requests),
        setting=_setting(run, trial, settings),
        method=trial.method,
        origin=_origin(trial),
        name=f"{trial.cell.connector}@{name}" if name else trial.cell.connector,
        script_rate=script_rate if isinstance(script_rate, (int, float)) else None,
        steady={} if trial.method == IMPORTED else {key: trial_value(trial, key) for key in SUMMARY_KEYS},
        size=size_in(run.plan, run.environment, trial.cell.connector, engines.options_model_of(run.plan)),
        client_late=any(finding.gate in ("client_limited", "host_starved") for finding in trial.findings),
        arrived=len(sent) or None,
        arrived_in_s=float(sent.max()) if len(sent) else None,
        sessions=bool(trial.engine.get("sessions")),
        no_winner=cache_blind(run.plan, trial.cell.connector) or (f"{unfit} prediction" if unfit else ""),
    )


def _settings(trial: TrialRecord) -> Mapping[str, Any]:
    settings = trial.engine.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _origin(trial: TrialRecord) -> str:
    source = trial.engine.get("source")
    if not isinstance(source, Mapping):
        return ""
    first, last = source.get("line"), source.get("last_line")
    return f"{source.get('file')}:{first}" + (f"-{last}" if last != first else "")


def _more(trial: TrialRecord) -> dict[str, float]:
    """Return the additional figures of ``vllm bench serve``'s table."""
    figures = {
        "peak_concurrent_requests": trial.summary.get("peak_in_flight"),
        "peak_output_throughput": trial.summary.get("peak_output_tok_per_s"),
    }
    return {key: float(value) for key, value in figures.items() if isinstance(value, (int, float))}


def _axes(run: RunFolder, trial: TrialRecord, settings: Mapping[str, Any], name: str) -> dict[str, Axis]:
    options = _connector_options(run, trial.cell.connector)
    deployment = resolved(run, "deployment")
    tp = deployment.get("tensor_parallel_size") if isinstance(deployment, Mapping) else None
    tp = options.get("tensor_parallel_size") or (tp if isinstance(tp, int) else None)
    protocol = settings.get("protocol") or options.get("protocol")
    devices = [device for device in str(options.get("device_name") or "").split(",") if device]
    nics = settings.get("nics") or (len(devices) or None)
    return {
        "run": name or run.run_id,
        "connector": trial.cell.connector,
        "mode": engine_word(trial, "load_mode") or None,
        "protocol": str(protocol) if protocol else None,
        "nics": nics if nics is not None else ("TCP" if protocol == "tcp" else None),
        "tp": settings.get("tp") or tp,
        "input_len": trial.cell.input_len,
        "output_len": trial.cell.output_len,
        "concurrency": trial.engine.get("concurrency"),
        "rate": trial.request_rate or None,  # a closed loop offers none
    }


def _connector_options(run: RunFolder, label: str) -> Mapping[str, Any]:
    connectors = resolved(run, "connectors")
    for connector in (
        connectors if isinstance(connectors, Sequence) and not isinstance(connectors, str) else ()
    ):
        if isinstance(connector, Mapping) and label in (connector.get("label"), connector.get("name")):
            return connector
    return {}


def _setting(run: RunFolder, trial: TrialRecord, settings: Mapping[str, Any]) -> RowConditions:
    slo, mark = slo_of(run), mark_of(run)
    imported = trial.method == IMPORTED
    limits = slo.limits + tuple(
        Limit(metric, "each", limit)
        for metric, limit in (("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms))
        if limit
    )
    model = str(settings.get("model") or model_of(run))
    hardware = _prefill_hardware(run, settings) if imported else ""
    peak, peak_16bit = prefill_peaks(hardware, model)
    slots = settings.get("max_num_seqs")
    return RowConditions(
        model=model,
        hardware=hardware or ("" if imported else hardware_of(run)),
        engine=mark.word if mark else "",
        slots=int(slots) if isinstance(slots, (int, float)) else None,
        limits=limits,
        judged=not imported,
        # kvbench's trials are checked against physics by a gate, which knows every request.
        work=prefill_work(known_model(model)) if imported else None,
        prefill_flops=peak,
        prefill_flops_16bit=peak_16bit,
    )


def _prefill_hardware(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """Return the GPUs of one prefill instance: as many as its tensor parallel size, or all known ones."""
    deployment = resolved(run, "deployment")
    hardware = deployment.get("hardware") if isinstance(deployment, Mapping) else None
    if hardware:
        return str(hardware)
    gpus = run.environment.get("gpus")
    names = [str(gpu.get("name") if isinstance(gpu, Mapping) else gpu) for gpu in gpus or ()]
    if len(set(names)) != 1:
        return ""
    tp = settings.get("tp")
    count = min(int(tp), len(names)) if isinstance(tp, (int, float)) else len(names)
    return f"{count}x{names[0]}"


def _requests(run: RunFolder, trial: TrialRecord) -> Mapping[str, np.ndarray[Any, Any]] | None:
    """Return the columns of a trial's requests, or None if they were not stored."""
    try:
        return run.columns("requests", trial.trial_id, _REQUEST_COLUMNS)
    except StoreError:
        return None


def _errors(read: Mapping[str, np.ndarray[Any, Any]]) -> Mapping[str, float]:
    """Return the standard errors of the means, from sections of neighbouring requests."""
    kept = (read["error"] == "") & ~np.isnan(read["first_token_s"])
    if kept.sum() < LEAST_REQUESTS:
        return {}
    order = np.argsort(read["scheduled_s"][kept], kind="stable")
    scheduled, first, last, tokens = (read[name][kept][order] for name in _REQUEST_COLUMNS[:4])
    several = tokens > 1
    gaps = (last - first)[several] / (tokens[several] - 1)
    errors = {}
    for figure, data in (("mean_ttft_ms", first - scheduled), ("mean_tpot_ms", gaps)):
        clean = data[~np.isnan(data)] * 1e3
        if len(clean) >= LEAST_REQUESTS:
            errors[figure] = sectioned(clean, SECTIONS, None)[1]
    return errors


# --- conclusions -----------------------------------------------------------------------------------


def claims_of(run: RunFolder) -> list[Claim]:
    imported = run.manifest.get("imported")
    given = (imported.get("claims") if isinstance(imported, Mapping) else None) or ()
    return read_claims(claim for claim in given if isinstance(claim, Mapping))


def conclusions(runs: Sequence[RunFolder], names: Sequence[str] = (), by: str = "") -> list[Statement]:
    """Return all conclusions on the runs: offered loads and searched rates. ``names`` label several runs;
    ``by``: the compared axis, default the first that differs."""
    named = zip(runs, names or [""] * len(runs), strict=True)
    answers = [row for run, name in named for row in summary_table(run, name)]
    return [*row_conclusions(runs, names, by), *searched(answers)]


def row_conclusions(runs: Sequence[RunFolder], names: Sequence[str] = (), by: str = "") -> list[Statement]:
    """Return the conclusions on offered loads: warnings, wrong claims, comparisons."""
    named = list(zip(runs, names or [""] * len(runs), strict=True))
    rows = [row for run, name in named for row in load_rows(run, name)]
    claims = [claim for run in runs for claim in claims_of(run)]
    return conclude(rows, claims, by or default_axis(rows))


def default_axis(rows: Iterable[LoadRow]) -> str:
    rows = list(rows)
    for axis in ("connector", "nics", "protocol", "tp", "run"):
        if len({row.axes.get(axis) for row in rows} - {None}) > 1:
            return axis
    return "connector"


def searched(rows: Sequence[Row]) -> list[Statement]:
    """Compare the searched rates by their posteriors, one statement per length."""
    found = []
    for (input_len, output_len), group in by_lengths(rate_pairs(rows)).items():
        where = f"{input_len:,} in, {output_len:,} out"
        parts = group_pairs(group)
        if parts.ordered:
            text = f"{where}: highest request rate, {'; '.join(pair.text() for pair in parts.ordered)}"
            found.append(Statement("ahead", "rate_ahead", text, evidence=_evidence(parts.ordered)))
        if parts.alike:
            names = "; ".join(f"{pair.ahead} or {pair.behind}" for pair in parts.alike)
            text = (
                f"{where}: highest request rate, {names}: no significant difference, neither is higher "
                f"with a probability of {AHEAD:.0%}"
            )
            advice = "use a finer search.precision, or repeat the search and compare the runs"
            found.append(Statement("untold", "rate_ahead", text, advice, evidence=_evidence(parts.alike)))
        for rule, pairs, text, advice in (
            ("unequal_size", parts.unequal, unequal_text(parts.unequal), UNEQUAL_ADVICE),
            ("unconverged", parts.unconverged, unconverged_text(parts.unconverged), UNCONVERGED_ADVICE),
            ("no_winner", parts.no_winner, no_winner_text(parts.no_winner), ""),
        ):
            if pairs:
                words = f"{where}: highest request rate, {text}"
                found.append(Statement("untold", rule, words, advice, evidence=_evidence(pairs)))
    return found


def _evidence(pairs: Sequence[RatePair]) -> dict[str, Any]:
    return {"pairs": [vars(pair) for pair in pairs]}


__all__ = [
    "AXES",
    "claims_of",
    "conclusions",
    "default_axis",
    "load_rows",
    "row_conclusions",
    "searched",
    "searched_rows",
]
