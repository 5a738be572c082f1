"""What is known about a deployment before it serves: hardware, NICs, slots. What is not known is None."""

from __future__ import annotations

from typing import Any, Final

from kvbench.connectors.base import Connector, ConnectorOptions
from kvbench.core.physics import Hardware, hardware_of, prefill_work, profile_hardware
from kvbench.core.scenario.scenario import Scenario
from kvbench.hosts import nvml
from kvbench.hosts.devices import NicReading, nic_counters

INSIDE_ONE_HOST: Final = 2.0
"""Loopback inside an RDMA device is bounded by PCIe, which may carry that much more than its port."""


def surroundings(scenario: Scenario, connector: Connector, options: ConnectorOptions) -> dict[str, Any]:
    """Fields of an ``Evidence`` that do not change from trial to trial. ``scenario``: the connector's own."""
    deployed = scenario.deployment
    hardware = hardware_here(scenario)
    peak = None if hardware is None else hardware.peak_flops
    instances = deployed.prefill.instances if connector.disaggregated else deployed.aggregated_engines
    if peak is not None:
        peak /= deployed.engine_options.time_factor
    asked = options.nics_asked
    here = deployed.engine_options.starts_processes and not deployed.several_hosts
    return {
        "nics_asked": asked,
        "engines_here": here,
        "hosts_watched": deployed.engine_options.starts_processes,
        "kv_line_rate": line_rate(scenario, connector.transport_asked(options), asked, here),
        "prefill_work": prefill_work(scenario.model.name, scenario.model.active_parameters),
        "prefill_flops": None if peak is None else peak * instances,
        "hardware": "" if hardware is None else f"{instances} × {hardware.text()}" * (peak is not None),
    }


def hardware_here(scenario: Scenario) -> Hardware | None:
    """The GPUs of one instance: as the scenario says, as the emulated timing stands for, or as found here."""
    deployed = scenario.deployment
    if deployed.hardware:
        return hardware_of(deployed.hardware)
    if timing := deployed.engine_options.timing_profile:
        return profile_hardware(timing, deployed.ranks_of("prefill-0").tensor)
    if not deployed.engine_options.starts_processes or deployed.several_hosts:
        return None
    found = set(nvml.names())
    return Hardware(found.pop(), deployed.ranks_of("prefill-0").gpus) if len(found) == 1 else None


def slots_of(scenario: Scenario) -> int | None:
    """``max_num_seqs`` of one instance, if the scenario's engine options say."""
    return scenario.deployment.engine_options.slots


def line_rate(scenario: Scenario, transport_asked: str, asked: tuple[str, ...], here: bool) -> float | None:
    """Bytes per second that the NICs of one instance carry at most, one way."""
    if scenario.deployment.nic_gbit is not None:
        return scenario.deployment.nic_gbit * 1e9 / 8
    words = set(transport_asked.split(","))
    if not here or words & {"", "all", "tcp"}:
        # Inside one host TCP goes over loopback, which has no line rate, and who may choose takes NVLink.
        return None
    devices: dict[str, NicReading] = {
        name: nic
        for name, nic in nic_counters().items()
        if nic.kind == "rdma" and (not asked or name in asked)
    }
    rates = [nic.bytes_per_s for nic in devices.values()]
    known = [rate for rate in rates if rate is not None]
    return INSIDE_ONE_HOST * sum(known) if known and len(known) == len(rates) else None
