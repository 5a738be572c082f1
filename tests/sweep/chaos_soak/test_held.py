"""What is held: one length, a rate of one's own or a share of a found one, a deadline."""

from __future__ import annotations

import pytest
from run_files import QUICKSTART

from kvbench.core.records import Cell
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.sweep.chaos_soak.constant_rate import (
    HeldOptions,
    fixed_rate_cells,
    fixed_rate_scenario,
    rates_of,
)


def deadline_s(*sets: str, limit: float | None = None) -> float:
    scenario, _ = fixed_rate_scenario(CliOptions("quickstart", sets), HeldOptions(rate=5.0, deadline_s=limit))
    return scenario.request_timeout_s


def test_a_request_hangs_after_ten_seconds_or_three_times_what_it_may_take() -> None:
    assert deadline_s() == 10.0
    assert deadline_s("slo.ttft_ms=8000", "slo.tpot_ms=100") == pytest.approx(3 * (8 + 15 * 0.1))
    assert (deadline_s("workload.request_timeout_s=4"), deadline_s(limit=33.0)) == (4.0, 33.0)
    with pytest.raises(
        InputError, match=r"--deadline 7 is shorter than the 9\.5 s that the SLO allows one request"
    ):
        deadline_s("slo.ttft_ms=8000", "slo.tpot_ms=100", limit=7.0)


def test_one_length_is_held_and_pairs_alone_are_struck() -> None:
    scenario, _ = fixed_rate_scenario(CliOptions("quickstart"), HeldOptions(rate=5.0))
    assert list(scenario.workload.input_len) == [256]
    assert [cell.connector for cell in fixed_rate_cells(plan_of(scenario))] == ["mooncake", "nixl"]


def test_a_share_of_what_a_run_has_found() -> None:
    scenario, _ = fixed_rate_scenario(CliOptions("quickstart"), HeldOptions(rate=5.0))
    cells = fixed_rate_cells(plan_of(scenario))
    found = rates_of(HeldOptions(found=QUICKSTART, share=0.5), cells)
    usual = rates_of(HeldOptions(found=QUICKSTART), cells)
    assert set(found) == {"mooncake", "nixl"}
    assert all(usual[label] == pytest.approx(found[label] * 0.7 / 0.5, rel=1e-3) for label in found)
    assert rates_of(HeldOptions(rate=5.0), cells) == {"mooncake": 5.0, "nixl": 5.0}
    with pytest.raises(InputError, match="has no rate for tcp-in64-out4"):
        rates_of(HeldOptions(found=QUICKSTART), [Cell("tcp", 64, 4)])


@pytest.mark.parametrize(("given", "message"), [
    ({}, "give the fixed rate"),
    ({"rate": 1.0, "found": QUICKSTART}, "give the fixed rate"),
    ({"rate": 1.0, "share": 0.5}, "--share scales a measured rate"),
    ({"found": QUICKSTART, "share": 7.0}, "--share is a share"),
])  # fmt: skip
def test_what_is_no_rate_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HeldOptions(**given)  # type: ignore[arg-type]


def test_servers_of_others_and_traces_are_refused() -> None:
    with pytest.raises(InputError, match="kvbench did not start those"):
        fixed_rate_scenario(
            CliOptions("quickstart",
                       ("deployment.engine=external",
                        "deployment.engine_options={base_url: 'http://127.0.0.1:1'}", "connectors=[custom]")),
            HeldOptions(rate=1.0),
        )  # fmt: skip
