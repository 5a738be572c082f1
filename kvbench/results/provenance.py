"""Provenance of a run: model, SLO, hardware, emulated or real; which runs may share a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.core import slo as slos
from kvbench.core.gates.lies import LIES, lie_of
from kvbench.core.scenario.yaml_lines import plain, read_yaml
from kvbench.errors import InputError
from kvbench.results.run import RunFolder

EMULATED: Final = "emulated"
SIMULATED: Final = "simulated"
PACED: Final = "KV paced"
"""Label of an emulated engine with a transfer model (``kvbench.engines.emulated.PACED``)."""
EMULATED_WHY: Final = "compute timing is modelled, the KV bytes and their transfer are real"
PACED_WHY: Final = "the KV bytes are real; compute timing and minimum transfer times are modelled"
SIMULATED_WHY: Final = "nothing ran: engines, router and KV transfers are a model on virtual time"


@dataclass(frozen=True)
class Mark:
    """Mark of numbers that were not measured on real engines."""

    word: str
    why: str
    badge: str


def capitalized(word: str) -> str:
    """Return a mark's word as the beginning of a sentence: ``Emulated, KV paced``."""
    return word[:1].upper() + word[1:]


_MARKS: Final[Mapping[str, Mark]] = {
    SIMULATED: Mark(SIMULATED, SIMULATED_WHY, "SIMULATED: nothing ran, all of it is a model"),
    PACED: Mark(
        f"{EMULATED}, {PACED}", PACED_WHY, "EMULATED: timing and transfer times modelled, KV bytes real"
    ),
    EMULATED: Mark(EMULATED, EMULATED_WHY, "EMULATED: timing modelled, KV bytes real"),
}
"""Marks by label. A run has the mark of the first label that it carries."""


@dataclass(frozen=True)
class ReportedSlo:
    """The SLO as the run folder states it; None or empty if unknown."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float | None = None
    limits: tuple[slos.Limit, ...] = ()
    tiers: Mapping[str, slos.Slo] = field(default_factory=dict)
    """Tiers, strictest first, if there are several."""

    def main(self) -> slos.Slo:
        """Return the SLO that requests are judged by: the strictest tier. Raises ValueError."""
        single = slos.Slo(self.ttft_ms, self.tpot_ms, self.attainment or 0.95, self.limits)
        return next(iter(self.tiers.values()), single)

    def text(self) -> str:
        if self.tiers:
            return slos.tiers_text(self.tiers)
        if self.limits:
            return slos.Slo(self.ttft_ms, self.tpot_ms, self.attainment or 0.95, self.limits).text()
        limits = [
            f"{name} ≤ {limit:g} ms"
            for name, limit in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
            if limit
        ]
        if not limits:
            return "no SLO"
        share = f" for {self.attainment * 100:g} % of requests" if self.attainment else ""
        return " and ".join(limits) + share

    def lines(self, metric: str) -> list[tuple[str, str, float]]:
        """Return (tier, statistic, limit in ms) of each limit on "ttft_ms" or "tpot_ms", strictest tier
        first. A limit on each request has the attainment's percentile as statistic: p95 for 0.95."""
        tiers = self.tiers or {"": slos.Slo(self.ttft_ms, self.tpot_ms, self.attainment or 0.99, self.limits)}
        return [
            (
                tier,
                f"p{slo.attainment * 100:g}" if limit.statistic == "each" else limit.statistic,
                limit.limit,
            )
            for tier, slo in tiers.items()
            for limit in dict.fromkeys((*slo.each, *slo.limits))
            if limit.metric == metric
        ]


def resolved(run: RunFolder, key: str) -> Any:
    """Return a part of the plan, else of the scenario file, else None."""
    scenario = run.plan.get("scenario")
    for place in (run.plan, scenario if isinstance(scenario, Mapping) else {}):
        if place.get(key) is not None:
            return place[key]
    return _scenario_file(run).get(key)


def _scenario_file(run: RunFolder) -> Mapping[str, Any]:
    # Bounded, unlike yaml's own loader: the folder may be a stranger's.
    root, _ = read_yaml(run.scenario_text)
    data = plain(root) if root is not None else None
    return data if isinstance(data, Mapping) else {}


def slo_of(run: RunFolder) -> ReportedSlo:
    data = resolved(run, "slo")
    if not isinstance(data, Mapping):
        return ReportedSlo()
    ttft_ms, tpot_ms, share = (_number(data.get(key)) for key in ("ttft_ms", "tpot_ms", "attainment"))
    try:
        limits = tuple(slos.Limit.from_json(limit) for limit in data.get("limits") or ())
        tiers = _tiers(data)
    except (ValueError, TypeError, AttributeError):
        limits, tiers = (), {}  # a hand-made file; what else it says still counts
    return ReportedSlo(ttft_ms, tpot_ms, share, limits, tiers)


def _tiers(data: Mapping[str, Any]) -> dict[str, slos.Slo]:
    share = _number(data.get("attainment")) or 0.95
    goals = {
        str(name): slos.Slo.from_json({**tier, "attainment": tier.get("attainment") or share})
        for name, tier in (data.get("tiers") or {}).items()
    }
    return {name: goals[name] for name in slos.by_strictness(goals)}


def model_of(run: RunFolder) -> str:
    model = resolved(run, "model")
    if isinstance(model, Mapping):
        model = model.get("name") or model.get("model")
    return str(model) if model else ""


def mark_of(run: RunFolder) -> Mark | None:
    """Return the run's mark, or None for real engines."""
    labels = {*run.labels, *(label for trial in run.trials for label in trial.labels)}
    mark = next((mark for label, mark in _MARKS.items() if label in labels), None)
    lie = lie_of(sorted(labels))
    if mark is None or not lie:
        return mark
    what = LIES[lie].what if lie in LIES else lie
    return Mark(
        f"{mark.word}, lie: {lie}",
        f"{mark.why}; the system misreports on purpose: {what}",
        f"LIE: {lie} · {mark.badge}",
    )


def scenario_of(run: RunFolder) -> str:
    return str(run.manifest.get("scenario") or resolved(run, "name") or "unnamed")


def started(run: RunFolder) -> str:
    """Return ``2026-11-21 13:30 UTC``, or "" if unknown."""
    text = str(run.manifest.get("started_at") or "")
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else text


def host_of(run: RunFolder) -> str:
    hosts = run.manifest.get("hosts") or []
    name = run.environment.get("hostname") or run.environment.get("host")
    return ", ".join(str(host) for host in hosts) or (str(name) if name else "")


def hardware_of(run: RunFolder) -> str:
    cpu = run.environment.get("cpu")
    details: Mapping[str, Any] = cpu if isinstance(cpu, Mapping) else {"model": cpu}
    model = str(details.get("model") or details.get("name") or "")
    cores = details.get("usable_cores") or details.get("cores")
    parts = [f"{cores} × {model}" if cores and model else model or (f"{cores} CPUs" if cores else "")]
    gpus = run.environment.get("gpus")
    if isinstance(gpus, Sequence) and not isinstance(gpus, str):
        names = [str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus]
        parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return ", ".join(part for part in parts if part) or "hardware not recorded"


def server_of(run: RunFolder) -> str:
    """Return ``Qwen/Qwen3-8B at http://router:8000`` for an external server; else empty."""
    deployment, model = resolved(run, "deployment"), resolved(run, "model")
    options = deployment.get("engine_options") if isinstance(deployment, Mapping) else None
    url = options.get("base_url") if isinstance(options, Mapping) else None
    served = model.get("served_model_name") if isinstance(model, Mapping) else None
    return f"{served or model_of(run)} at {url}" if isinstance(url, str) and url else ""


def caption(run: RunFolder) -> str:
    """Return the caption of plots and tables: scenario, model, version, hardware, date. For an external
    server it has its URL, and the hardware is the client's."""
    server = server_of(run)
    parts = [
        scenario_of(run),
        server or model_of(run),
        f"{'imported by ' if run.manifest.get('kind') == 'imported' else ''}kvbench "
        f"{run.manifest.get('kvbench', '?')}",
        f"client {host_of(run)}" if server else host_of(run),
        hardware_of(run),
        started(run),
    ]
    return " · ".join(part for part in parts if part)


_NO_WORKLOAD: Final = ("input_len", "output_len", "request_timeout_s")
"""Not part of the workload: lengths belong to a cell, the timeout to the client."""


def identity(run: RunFolder) -> dict[str, Any]:
    """Return what must be equal before two runs share a table: the workload and the model. Machine, versions
    and options may differ, to be compared."""
    mark, workload = mark_of(run), resolved(run, "workload")
    settings = workload if isinstance(workload, Mapping) else {}
    return {
        "model": model_of(run),
        "engine": mark.word if mark is not None else "real",
        "SLO": slo_of(run).text(),
        **{f"workload.{key}": value for key, value in settings.items() if key not in _NO_WORKLOAD},
    }


def differences(runs: Sequence[RunFolder]) -> list[str]:
    """Return one line per difference, such as ``seed: 1 / 2``."""
    identities = [identity(run) for run in runs]
    lines = []
    for key in dict.fromkeys(key for item in identities for key in item):
        # What an older run does not know it did without.
        values = [item.get(key) for item in identities]
        if any((value or None) != (values[0] or None) for value in values):
            lines.append(f"{key}: " + " / ".join(str(value) for value in values))
    return lines


def check_comparable(runs: Sequence[RunFolder], *, force: bool = False) -> list[str]:
    """Return the differences that make runs incomparable. Raises InputError unless ``force``."""
    found = differences(runs)
    if found and not force:
        raise InputError(
            "these runs are not comparable; they differ in " + "; ".join(found),
            hint="report them separately, or add --force for one table that is marked",
        )
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
