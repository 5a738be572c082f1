"""Timing profiles by name and by file, in the simulator and in an emulated engine."""

import json
from pathlib import Path

import pytest

from kvbench.core.simulation.step_time import PROFILE_NAMES, StepLoad
from kvbench.engines.parts.timing_files import bundled_names, profile_file, timing_of_choice
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.processes.emulator.spec import parse_spec
from kvbench.sweep.calibration import LOOPBACK
from kvbench.sweep.simulate import require_simulable
from kvbench.sweep.simulated_trial import SimulatedDeployment, system_of

PROFILE = """\
version: 1
name: mine
source: made for a test
date: 2026-11-23
engine: vllm 0.19.0
machine: none
tensor_parallel_size: 1
status: unchecked
coefficients:
  prefill_token_ms: {value: 0.25, source: made up}
  decode_step_ms: {value: 50, source: made up}
  transfer_ms: {value: 3, source: made up}
  transfer_token_ms: {value: 0.01, source: made up}
"""
LOAD = StepLoad([(100, 0)], 2, 50)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE)
    return path


def test_a_name_is_a_profile_of_the_model_and_a_path_is_a_file(mine: Path) -> None:
    assert all(profile_file(name) is None for name in PROFILE_NAMES)
    assert timing_of_choice(str(mine)).step_s(LOAD) == pytest.approx(0.075)
    with pytest.raises(InputError, match="unknown timing profile 'mine'"):
        profile_file("mine")


def test_bundled_profiles_are_whole_and_name_their_sources() -> None:
    for name in bundled_names():
        profile = profile_file(name)
        assert profile.name == name
        assert profile.status in ("fit", "unfit")
        assert name not in PROFILE_NAMES


@pytest.mark.parametrize("kind", ["absent", "folder", "long"])
def test_what_is_no_profile_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "long":
        path.write_text("#" * 300_000)
    with pytest.raises(InputError, match=r"x\.yaml"):
        profile_file(str(path))


def test_the_simulator_takes_step_times_and_hand_offs_from_it(mine: Path) -> None:
    scenario, _ = resolve(CliOptions("quickstart", overrides=(f"simulate.timing={mine}",)))
    require_simulable(scenario)
    for planned in plan_of(scenario).deployments:
        deployment = SimulatedDeployment.of(scenario, planned)
        system = system_of(scenario, deployment)
        assert (system.timing.step_s(LOAD), system.overheads.router_ms) == (pytest.approx(0.075), 0)
        if deployment.connector.disaggregated:
            tokens = scenario.deployment.engine_options.kv_block_tokens
            assert system.link.busy_s(system.block_bytes / tokens * 1000) == pytest.approx(0.01)
            assert system.link.latency_ms == 3


def test_an_emulated_engine_of_it_is_given_the_whole_profile(mine: Path) -> None:
    scenario, _ = resolve(CliOptions("quickstart", overrides=(f"deployment.engine_options.timing={mine}",)))
    planned = plan_of(scenario).deployments[-1]
    # Behind the real router, over the real library.
    around = SimulatedDeployment.of(scenario, planned).around
    assert around.overheads in {surroundings.overheads for surroundings in LOOPBACK.values()}
    specs = [spec.spec for spec in process_specs(scenario, planned) if "timing" in spec.spec]
    mine.unlink()
    assert specs
    for spec in specs:
        assert parse_spec(json.dumps(spec)).timing_profile().step_s(LOAD) == pytest.approx(0.075)


def test_a_profile_of_another_parallelism_is_refused_before_anything_starts(mine: Path) -> None:
    sets = (f"deployment.engine_options.timing={mine}", "deployment.tensor_parallel_size=2")
    scenario, _ = resolve(CliOptions("quickstart", overrides=sets))
    with pytest.raises(InputError, match="timing mine has no tensor_parallel_size 2"):
        process_specs(scenario, plan_of(scenario).deployments[-1])
