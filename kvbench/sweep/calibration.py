"""KV links and overheads of a simulation, per connector, with their sources.

Order of precedence: the scenario's section ``simulate``, a measured run (``--like``), the defaults below. A
fit takes per connector, from trials that met their SLO (short queues): latency and bandwidth from mean time
and bytes of a transfer, by least squares over input lengths (one length: bandwidth only); overheads from the
median parts of the TTFT outside any step, without the KV's wait for a step on D (half a token gap), which the
model adds itself. A ``kvbench microbench`` run gives the link only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from kvbench.core.calibration.fit import link_of
from kvbench.core.records import TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import Link, Overheads
from kvbench.core.transfers.kv_shape import WHOLE_BLOCKS, kv_pieces
from kvbench.core.transfers.model import TransferModel, fit_all, model_for
from kvbench.engines.parts.timing_files import profile_file
from kvbench.errors import InputError
from kvbench.results.run import RunFolder, load_run


@dataclass(frozen=True)
class Surroundings:
    """KV link and overheads of one connector, and their source."""

    link: Link
    overheads: Overheads
    source: str


_LOOPBACK: Final = "default: fit to a quickstart run of the emulated engine, loopback on two shared cores"
# Fits of quickstart runs on two quiet cores; without P/D, of two engines behind the router. A transfer's
# time is used as the link's. With concurrent transfers the link is faster than that, so a rate
# limited by the link alone is a lower bound.
LOOPBACK: Final[Mapping[str, Surroundings]] = {
    "mooncake": Surroundings(Link(0.104, 0.0), Overheads(1.1, 0.0, 0.0, 4.9), _LOOPBACK),
    "nixl": Surroundings(Link(0.95, 1.8), Overheads(0.7, 1.2, 0.15, 5.3), _LOOPBACK),
    "tcp": Surroundings(
        Link(0.95, 1.8), Overheads(0.7, 1.2, 0.15, 5.3), f"{_LOOPBACK}, NIXL's taken for tcp"
    ),
    "": Surroundings(Link(0.95, 1.8), Overheads(1.65), _LOOPBACK),
}
"""Transfer backend → defaults on one host; "" is any other, and an aggregated server."""
NETWORK: Final = Surroundings(
    Link(154.3, 0.57),
    Overheads(1.0, 0.0, 0.2, 0.0),
    "default: 0.57 ms + bytes / 154.3 GB/s, fit to Mooncake's published vLLM P/D figures, 8 × 200 Gb/s RDMA",
)
"""Default for real engines; their profile includes the front end's time."""


def surroundings(
    scenario: Scenario, label: str, backend: str, measured: RunFolder | None = None
) -> Surroundings:
    """Return link and overheads of a connector. ``backend``: what moves its KV; empty without P/D."""
    scenario = scenario.at(label)
    modelled = scenario.deployment.engine_options.models_compute
    found = LOOPBACK.get(backend, LOOPBACK[""]) if modelled else NETWORK
    if measured is not None and measured.manifest.get("kind") == "microbench":
        found = _of_microbench(measured, scenario, backend, found)
    elif measured is not None:
        found = fitted(measured, label) or replace(
            found, source=f"{found.source} ({label} is not in the run)"
        )
    else:
        found = _of_profile(scenario, _emulated_surroundings(scenario, backend, found))
    given = scenario.simulate
    spec = given.connectors.get(label)
    link = {
        "gb_per_s": (spec.kv_gb_per_s if spec else None) or given.kv_gb_per_s,
        "latency_ms": spec.kv_latency_ms if spec and spec.kv_latency_ms is not None else given.kv_latency_ms,
    }
    overheads = {
        name: getattr(given, name) for name in ("router_ms", "front_end_ms", "turn_ms", "arrival_ms")
    }
    changed = [name for name, value in {**link, **overheads}.items() if value is not None]
    return Surroundings(
        replace(found.link, **_known(link)),
        replace(found.overheads, **_known(overheads)),
        found.source + (f"; {', '.join(changed)} from the scenario" if changed else ""),
    )


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def measured_run(path: Path) -> RunFolder:
    """Open the run to fit to. Raises InputError for a simulated one."""
    run = load_run(path)
    if run.manifest.get("kind") == "simulate":
        raise InputError(
            f"{path} is a simulated run, without measurements",
            hint="give --like a run of `kvbench sweep`, `kvbench bench` or `kvbench microbench`",
        )
    return run


def _of_microbench(run: RunFolder, scenario: Scenario, backend: str, default: Surroundings) -> Surroundings:
    """Take the link from a backend's fitted transfers; a microbenchmark has no overheads."""
    models = [model for model in fit_all(run.transfer_records()) if model.backend == backend]
    if not models:
        note = f" ({backend} is not in the run)" if backend else ""
        return replace(default, source=default.source + note)
    model = model_for(models, backend)
    link = _link_of(model, scenario, backend)
    return Surroundings(link, default.overheads, f"link: {model.way} of {run.run_id}; {default.source}")


def _emulated_surroundings(scenario: Scenario, backend: str, default: Surroundings) -> Surroundings:
    """Take the link of an emulated engine from its transfer model."""
    options = scenario.deployment.engine_options
    model = options.pace(backend) if backend else None
    if model is None:
        return default
    link, scale = _link_of(model, scenario, backend), scenario.simulate.time_scale or options.time_factor
    scaled = Link(gb_per_s=link.gb_per_s / scale, latency_ms=link.latency_ms * scale)
    return replace(default, link=scaled, source=f"link: the engine's transfer model; {default.source}")


def _of_profile(scenario: Scenario, default: Surroundings) -> Surroundings:
    """Use a profile file (``simulate.timing``). It was fitted to client-side times, so it includes all
    overheads. A profile of the emulated engine itself is measured behind the real router and transfer library
    instead."""
    profile = profile_file(scenario.simulate.timing) if scenario.simulate.timing else None
    if profile is None:
        return default
    link, link_source = default.link, f"; link: {default.source}"
    if profile.moves_kv:
        shape, tokens = scenario.kv_shape, scenario.deployment.engine_options.kv_block_tokens
        block_bytes = shape.block_bytes(tokens, scenario.deployment.wire_ranks) * shape.regions()
        link = link_of(profile.value("transfer_token_ms"), profile.value("transfer_ms"), block_bytes / tokens)
        link_source = ""
    return Surroundings(link, Overheads(), f"timing profile {profile.name}{link_source}")


def _link_of(model: TransferModel, scenario: Scenario, backend: str) -> Link:
    """Convert a fitted model to a link that moves the scenario's KV."""
    tokens = scenario.deployment.engine_options.kv_block_tokens
    shape, ranks = scenario.kv_shape, scenario.deployment.wire_ranks
    block_bytes = shape.block_bytes(tokens, ranks) * shape.regions()
    pieces = kv_pieces(shape, scenario.deployment.engine_options.kv_tensors)
    count, merged = pieces.per_block, pieces.merge
    if backend in WHOLE_BLOCKS:
        count, merged = 1, False
    gb_per_s, besides_s = model.as_link(block_bytes, count, merged=merged)
    return Link(gb_per_s=round(gb_per_s, 4), latency_ms=round(besides_s * 1e3, 4))


def fitted(run: RunFolder, label: str) -> Surroundings | None:
    """Fit a connector's link and overheads to a measured run, or None without a usable trial."""
    trials = [trial for trial in run.trials if trial.cell.connector == label and trial.verdict == "met"]
    if not trials:
        return None
    return Surroundings(_link(trials), _overheads(trials), f"fit to {run.run_id} ({len(trials)} trials)")


def _link(trials: Sequence[TrialRecord]) -> Link:
    points = [
        (trial.engine["kv_bytes_per_request"], trial.engine["kv_transfer_ms_per_request"])
        for trial in trials
        if trial.engine.get("kv_bytes_per_request") and trial.engine.get("kv_transfer_ms_per_request")
    ]
    if not points:
        return Link()
    nbytes, times = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    latency, per_byte = 0.0, 0.0
    if len({round(size) for size in nbytes.tolist()}) > 1:
        per_byte, latency = (float(value) for value in np.polyfit(nbytes, times, 1))
    if latency < 0 or per_byte <= 0:  # not a valid line: bandwidth alone
        latency, per_byte = 0.0, float(nbytes @ times) / float(nbytes @ nbytes)
    return Link(gb_per_s=round(1e-6 / per_byte, 4), latency_ms=round(latency, 3))


def _overheads(trials: Sequence[TrialRecord]) -> Overheads:
    parts = [_parts(trial) for trial in trials]

    def middle(name: str) -> float:
        known = [part[name] for part in parts if part.get(name) is not None]
        return round(max(0.0, median(known)), 3) if known else 0.0

    return Overheads(middle("router"), middle("front_end"), middle("turn"), middle("arrival"))


def _parts(trial: TrialRecord) -> dict[str, Any]:
    ttft = trial.engine.get("ttft_breakdown_ms") or {}
    hand_off = trial.engine.get("hand_off_parts_ms") or {}
    ends = [hand_off.get("prefill_front_end"), hand_off.get("decode_front_end")]
    known = [end for end in ends if end is not None]
    # With concurrent dispatch D's queue is part of the hand-off.
    queue = ttft.get("decode_queue") if ttft.get("decode_queue") is not None else ttft.get("hand_off")
    step = ttft.get("first_decode_step")
    return {
        "router": ttft.get("router"),
        "front_end": sum(known) / len(known) if known else None,
        "turn": hand_off.get("router_turn"),
        "arrival": None if queue is None or step is None else queue - step / 2,
    }
