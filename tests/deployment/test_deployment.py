"""A running deployment: what it waits for between two trials."""

from __future__ import annotations

import threading
from pathlib import Path

import emulated
import pytest

from kvbench.deployment.deployment import RunningDeployment
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.sweep.trial.idle import Idleness

pytestmark = pytest.mark.timeout(90)


def test_it_is_drained_when_no_request_is_under_way(tmp_path: Path) -> None:
    """An external server, so that the engine's life is not the deployment's."""
    with emulated.running(tmp_path, emulated.spec(time_scale=1.0)) as engine:
        scenario, _ = resolve(CliOptions(base_url=engine.url, input_len="64", output_len=4, ttft_ms=1000))
        (planned,) = plan_of(scenario).deployments
        launcher = LocalLauncher("test-deployment", tmp_path / "logs", tmp_path / "specs")
        with RunningDeployment(scenario, planned, launcher) as deployment:
            idle = Idleness(scenario, deployment)
            assert deployment.under_way() == 0
            asking = threading.Thread(target=engine.complete, args=([1] * 64, 400))
            asking.start()
            engine.wait_metric("vllm:num_requests_running", 1.0)
            assert deployment.under_way() == 1
            assert not idle.drained(0.0)
            assert idle.drained(30.0)
            asking.join(30)
        with RunningDeployment(scenario, planned, launcher) as deployment:
            engine.stop()
            assert deployment.under_way() is None
            assert Idleness(scenario, deployment).drained(0.0)  # who tells nothing is not waited for
