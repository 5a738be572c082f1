"""What is known of a deployment before it serves."""

from __future__ import annotations

import pytest

from kvbench import connectors
from kvbench.connectors.base import ConnectorOptions
from kvbench.connectors.mooncake import MooncakeOptions
from kvbench.connectors.mooncake_store import MooncakeStoreOptions
from kvbench.connectors.nixl_push import NixlPushOptions
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.sweep.trial.readings import slots_of, surroundings


def scenario(*sets: str) -> Scenario:
    return resolve(CliOptions("quickstart", sets))[0]


def test_the_emulated_hardware_is_what_its_timing_stands_for() -> None:
    tcp = connectors.get("tcp")
    sets = (
        "model=qwen3-30b-a3b",
        "deployment.engine_options.timing=h200-tp8-qwen3-30b-a3b",
        "deployment.prefill=2",
    )
    known = surroundings(scenario(*sets), tcp, tcp.options_model())
    assert (known["prefill_flops"], known["hardware"]) == (2 * 8 * 1979e12, "2 × 8 × H200")
    assert known["prefill_work"].parameters == 2.7e9
    fast = surroundings(scenario(*sets, "deployment.engine_options.time_scale=0.1"), tcp, tcp.options_model())
    assert fast["prefill_flops"] == pytest.approx(10 * known["prefill_flops"])
    unknown = surroundings(scenario(), tcp, tcp.options_model())
    assert (unknown["prefill_flops"], unknown["prefill_work"], unknown["hardware"]) == (None, None, "")


def test_hardware_and_links_may_be_stated() -> None:
    sets = ("deployment.hardware=8xH100", "model.active_parameters=7e9", "deployment.nic_gbit=400")
    known = surroundings(scenario(*sets), connectors.get("aggregated"), ConnectorOptions())
    assert known["prefill_flops"] == 2 * 8 * 1979e12  # as many engines as P and D together
    assert known["hardware"] == "2 × 8 × H100"
    lone = scenario(*sets, "deployment.aggregated=1")
    assert (
        surroundings(lone, connectors.get("aggregated"), ConnectorOptions())["prefill_flops"] == 8 * 1979e12
    )
    assert (known["prefill_work"].flop(10), known["kv_line_rate"]) == (2 * 7e9 * 10, 50e9)
    with pytest.raises(InputError, match="not a known GPU"):
        scenario("deployment.hardware=8xAbacus")


def test_nics_by_the_options_that_name_them() -> None:
    assert MooncakeOptions(device_name="mlx5_0,mlx5_1").requested_nics == ("mlx5_0", "mlx5_1")
    named = MooncakeOptions(device_name="mlx5_0")
    assert connectors.get("mooncake").requested_transport(named) == "rdma"  # by its own choice it may be TCP
    assert named.settled().protocol == "tcp"  # as the emulated engine moves KV
    assert NixlPushOptions(ucx_net_devices="mlx5_0:1, mlx5_0:2,lo").requested_nics == ("mlx5_0", "lo")
    assert NixlPushOptions(ucx_net_devices="all").requested_nics == ()
    assert MooncakeStoreOptions(device_name="").requested_nics == ConnectorOptions().requested_nics == ()


def test_slots_by_the_engine_s_options() -> None:
    assert slots_of(scenario("deployment.engine_options.max_num_seqs=7")) == 7
