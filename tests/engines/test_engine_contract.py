"""What an engine's options tell the rest of kvbench, also those of an engine of an outside package."""

from pathlib import Path
from typing import Any

import pytest

from kvbench import connectors, engines
from kvbench.core.scenario.options import EngineOptions
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import InputError
from kvbench.launchers.placement import Places
from kvbench.planning.doctor.scenario import memory_checks, model_check
from kvbench.planning.init_elsewhere import FoundMachine, Installed, able_connectors
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import dispatch_spec, engine_warnings, process_specs, unusable
from kvbench.planning.scenario_files import registry
from kvbench.sweep.simulated_trial import engine_config
from kvbench.sweep.trial.readings import slots_of, surroundings

LEAST: dict[str, dict[str, Any]] = {
    "external": {"base_url": "http://10.0.0.1:8000"},
    "sglang": {"model": "/m"},
    "system": {"command": "python3 my_sim.py"},
    "vllm": {"model": "/m", "version": "0.32.0"},
}
"""The options that an engine insists on."""
OUTSIDE = """
from pydantic import Field

from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.access import ServerAccess
from kvbench.core.scenario.options import RunningServer
from kvbench.engines.base import Engine, EngineOptions


class RentedOptions(EngineOptions):
    starts_processes = False
    uses_gpus = False
    at: str = Field(..., description="where it answers")

    @property
    def server(self):
        return RunningServer(self.at, {"aggregated-0": f"{self.at}/metrics"}, ServerAccess("RENT_KEY"))


class OwnOptions(EngineOptions):
    logs_like = "vllm"
    weights: str = Field("/w", description="the model's folder")
    batch: int = Field(48, description="sequences at the same time")

    @property
    def served_from(self):
        return self.weights

    @property
    def slots(self):
        return self.batch

    @property
    def kv_block_tokens(self):
        return 64


class Rented(Engine):
    name = "rented"
    options_model = RentedOptions

    def check(self, connector, options=None):
        return None

    def process(self, instance, connector, connector_options, options):
        raise AssertionError("nobody starts it")


class Own(Rented):
    name = "own"
    options_model = OwnOptions

    def process(self, instance, connector, connector_options, options):
        return ProcessSpec(instance.name, ("own", options.weights), port=instance.port)


RENTED, OWN = Rented(), Own()
"""


@pytest.fixture
def _outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "outside_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-engine\nVersion: 1.0\n")
    lines = ["[kvbench.engines]", "rented = outside_engine:RENTED", "own = outside_engine:OWN", ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "outside_engine.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))


def scenario(engine: str, options: dict[str, Any], listed: str = "[aggregated, tcp]") -> Scenario:
    text = (
        f"version: 1\nmodel: tiny\nconnectors: {listed}\n"
        f"deployment: {{engine: {engine}, engine_options: {options}, base_port: 30000}}\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    return parse_scenario(text, "x.yaml", registry())


@pytest.mark.parametrize("name", engines.names())
def test_every_engine_keeps_the_contract(name: str) -> None:
    options = scenario(name, LEAST.get(name, {}), "[aggregated]").deployment.engine_options
    assert type(options) is engines.options_model(name)
    assert options.starts_processes != bool(options.server.base_url or options.simulator.command)
    assert options.kv_block_tokens >= 1
    assert 0 < options.gpu_memory_share <= 1
    assert options.time_factor > 0
    assert bool(options.timing_profile) == options.models_compute
    if options.asks_version:
        assert not options.with_version("1.2.3").asks_version
    if engines.get(name).first_scenario is not None:
        found = able_connectors(name, FoundMachine(engines={name: Installed("/bin/e", "0.32.0")}))
        assert "aggregated" in {check.name for check in found}


def test_an_engine_that_init_does_not_offer() -> None:
    with pytest.raises(InputError, match="does not offer the external engine"):
        able_connectors("external", FoundMachine())


def test_the_engine_of_a_folder_that_is_not_here_is_taken_for_a_real_one() -> None:
    assert engines.options_model_of({"scenario": {"deployment": {"engine": "of-tomorrow"}}}) is EngineOptions
    assert engines.options_model_of({}) is engines.options_model("emulated")


@pytest.mark.usefixtures("_outside")
def test_an_outside_server_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RENT_KEY", "k")
    rented = scenario("rented", {"at": "http://10.0.0.2:80"})
    plan = plan_of(rented)
    lone = plan.deployments[0]
    assert len(lone.instances) == 1  # what is behind the URL is not counted
    assert unusable(rented, lone) is None
    assert dispatch_spec(rented, plan.deployments[1]) is None
    assert rented.deployment.used_hosts == {}
    assert not [note for note in engine_warnings(rented) if "listen on" in note]
    with Places(rented, "tag") as places:
        deployment = RunningDeployment(rented, lone, places.launcher(Path("logs"), Path("specs")))
    assert deployment.external
    assert deployment.endpoints.access.api_key_env == "RENT_KEY"
    assert deployment.endpoints.base_url == "http://10.0.0.2:80"
    assert list(deployment.endpoints.metrics_urls) == ["aggregated-0"]


@pytest.mark.usefixtures("_outside")
def test_an_outside_engine_is_planned_checked_and_simulated_by_what_it_tells() -> None:
    case = scenario("own", {"batch": 40}, "[aggregated, {name: mooncake, device_name: mlx5_0}]")
    plan = plan_of(case)
    names = {"prefill-0": ("own", "/w"), "decode-0": ("own", "/w")}
    argvs = {spec.name: spec.argv for spec in process_specs(case, plan.deployments[1])}
    assert {name: argvs[name] for name in names} == names
    assert model_check(case).detail.startswith("/w does not exist")
    gpus = [{"index": "0", "name": "NVIDIA H200", "memory_bytes": 141 * 2**30}]
    assert [check.name for check in memory_checks(case, plan, gpus)] == ["gpus", "gpu memory"]
    config = engine_config(case)
    assert (config.max_num_seqs, config.block_tokens) == (slots_of(case), 64) == (40, 64)
    (_, mooncake) = case.connectors
    assert mooncake.options.requested_protocol == "auto"  # a real engine chooses for itself
    known = surroundings(case, connectors.get("mooncake"), mooncake.options)
    assert (known["requested_nics"], known["engines_here"]) == (("mlx5_0",), True)
