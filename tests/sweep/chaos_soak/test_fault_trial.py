"""What is told of a process that was started again."""

from __future__ import annotations

from typing import cast

import pytest

from kvbench.core.chaos_soak.fault_plan import FaultTarget, PlannedFault
from kvbench.core.load.workers import LoadResult
from kvbench.core.records import RequestRecord
from kvbench.deployment.deployment import RunningDeployment
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.sweep.chaos_soak.constant_rate import Holdings, ProcessHoldings
from kvbench.sweep.chaos_soak.fault_trial import Striker, _Observations
from kvbench.sweep.chaos_soak.strikes import Strike

BEGAN_S = 100.0


class Nothing:
    """A strike that is over."""

    def begin(self) -> str:
        return "done"

    def undo(self, *, ending: bool = False) -> None:
        pass


def request(index: int, scheduled_s: float, error: str | None = None) -> RequestRecord:
    record = RequestRecord(f"r{index}", scheduled_s, 64, 4, sent_s=scheduled_s)
    if error is not None:
        record.error = error
    return record


def report(target: FaultTarget, name: str, ready_at: float | None, served: float | None) -> dict[str, object]:
    scenario, _ = resolve(CliOptions("quickstart"))
    fault = PlannedFault(1, 1, "restart", target, 0, 3.0, 2.0, 4.0, 20.0)
    nobody = cast(RunningDeployment, None)  # nothing is asked of it any more
    strike: Strike = Nothing()
    striker = Striker(fault, nobody, strike, lambda _: None, name, ready_at=ready_at)
    records = [request(0, 1.0), request(1, 4.0, "connect"), request(2, 7.0), request(3, 8.0, "timeout")]
    load = LoadResult(records, "", 10.0, {"started_monotonic_s": BEGAN_S})
    after = Holdings({name: ProcessHoldings(served=served)})
    found = _Observations(scenario, striker, load, Holdings(), after)._restart(BEGAN_S)
    assert found is not None
    return found


@pytest.mark.parametrize(("target", "name"), [("metadata", "mooncake-master"), ("router", "router")])
def test_who_counts_no_requests_serves_again_once_load_was_answered(target: FaultTarget, name: str) -> None:
    assert report(target, name, BEGAN_S + 6.0, None) == {"ready_s": 6.0, "served": 1}
    assert report(target, name, BEGAN_S + 9.0, None)["served"] == 0
    assert report(target, name, None, None) == {"ready_s": None, "served": 0}


def test_an_engine_s_own_count_is_taken() -> None:
    assert report("prefill", "prefill-0", BEGAN_S + 6.0, 7.0) == {"ready_s": 6.0, "served": 7.0}
