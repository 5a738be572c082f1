"""A run folder as a sweep of emulated engines leaves it, made on virtual time: for tests that edit it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, Outputs
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.checksums import CHECKSUMS, begin_checksums, digests
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Bench, IdleResult, Site, create_store
from kvbench.sweep.display import Silent
from kvbench.sweep.simulate import SimulatedBench
from kvbench.sweep.sweep import searching_sweep

SETTINGS = (
    *("connectors=[aggregated,tcp]", "workload.input_len=[128]", "search.max_trials=3"),
    # A slow engine serves few requests in a trial, so that the run is soon verified.
    "deployment.engine_options.time_scale=2",
)


class AnsweringSite:
    """A simulated site that also stores greedy outputs, as a real deployment does."""

    def __init__(self, site: Site, store: RunStore, text: str) -> None:
        self.trace_rate, self.has_direct = site.trace_rate, site.has_direct
        self.prepare, self.close, self.outputs = site.prepare, site.close, site.outputs
        self.watch_answers, self.last_canaries, self.run = site.watch_answers, site.last_canaries, site.run
        self._alone, self._store, self.requests = site.alone, store, site.requests
        self._text = text

    def alone(self, cell: Cell) -> IdleResult:
        outputs = Outputs((self._text, "two"), self._alone(cell).latency_s)
        self._store.add_outputs(cell.connector, cell.input_len, outputs)
        return IdleResult(outputs.latency_s, outputs)


@dataclass
class AnsweringBench:
    """A simulated bench with such sites. Deployments with the same reference give the same outputs."""

    bench: Bench
    store: RunStore
    plan: Plan
    alike = True

    def __post_init__(self) -> None:
        self.open, self.problem = self.bench.open, self.bench.problem
        self.gives_reference = self.bench.gives_reference

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        with self.bench.up(planned, round_) as site:
            yield AnsweringSite(site, self.store, self.plan.reference_of(planned.label))


def measured_run(results: Path, settings: tuple[str, ...] = SETTINGS) -> Path:
    """Return a complete folder of the kind "sweep" with a trial's KV over TCP."""
    scenario, source = resolve(CliOptions("quickstart", settings))
    plan = plan_of(scenario)
    store = create_store(results, scenario, source, plan, "sweep", {})
    with store:
        bench = AnsweringBench(SimulatedBench(scenario, store), store, plan)
        searching_sweep(scenario, plan, store, Silent(), bench).run()
    trials = store.path / "trials.jsonl"
    trials.write_text(trials.read_text().replace('"transport": "simulated"', '"transport": "tcp"'))
    return with_rebuilt_checksums(store.path)


def with_rebuilt_checksums(folder: Path, *, digests_too: bool = False) -> Path:
    """The folder as somebody leaves it who makes the checksums, and the digests, anew after an edit."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if digests_too:
        plan = json.loads((folder / "plan.json").read_text())
        manifest["asked_digests"] = digests((folder / "scenario.yaml").read_bytes(), plan)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    if (folder / CHECKSUMS).exists():
        begin_checksums(folder, "edited")
    return folder
