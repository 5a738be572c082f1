"""A running deployment: what it waits for between two trials."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import emulated
import pytest

from kvbench.core.records import Outputs
from kvbench.deployment import deployment as running
from kvbench.deployment.deployment import RunningDeployment
from kvbench.deployment.launch import side_ports
from kvbench.errors import ServerError
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.sweep.trial.idle import Idleness
from kvbench.sweep.trial.output_check import compare, reference_outputs


class Kept(BaseHTTPRequestHandler):
    """An engine that keeps its cache for so many questions, as vLLM does while blocks are held."""

    refusals: ClassVar[int] = 0
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.paths.append(self.path)
        success = type(self).refusals <= 0
        type(self).refusals -= 1
        self.answer({"success": success})

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.parametrize("refusals", [0, 2, 10**6])
def test_a_cache_that_is_kept_is_asked_for_again_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    monkeypatch.setattr(running, "RESET_POLL_S", 0.01)
    monkeypatch.setattr(running, "KV_HELD_S", 0.3)
    Kept.refusals = refusals
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        scenario, _ = resolve(CliOptions(base_url=url, input_len="64", output_len=4, ttft_ms=1000))
        (planned,) = plan_of(scenario).deployments
        launcher = LocalLauncher("test-reset", tmp_path / "logs", tmp_path / "specs")
        with RunningDeployment(scenario, planned, launcher) as deployment:
            endpoints = replace(deployment.endpoints, cache_reset_urls=[f"{url}/reset_prefix_cache"])
            deployment.endpoints = endpoints
            if refusals < 10**6:
                deployment.reset_caches()
                assert Kept.refusals == -1
            else:
                with pytest.raises(ServerError, match="success: false"):
                    deployment.reset_caches()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("connector", "version", "needed"), [
    ("nixl", "0.13.0", True), ("mooncake", "0.13.0", True), ("nccl", "0.13.0", False),
    ("aggregated", "0.13.0", False), ("nixl", "0.24.0", False), ("nixl", "0.32.0", False),
])  # fmt: skip
def test_a_request_lets_an_old_idle_p_free_its_kv_before_a_reset(
    tmp_path: Path, connector: str, version: str, needed: bool
) -> None:
    options = json.dumps({"model": "m", "version": version})
    sets = ("deployment.engine=vllm", f"deployment.engine_options={options}", f"connectors=[{connector}]")
    scenario, _ = resolve(CliOptions("quickstart", sets))
    (planned,) = [candidate for candidate in plan_of(scenario).deployments if candidate.label == connector]
    deployment = RunningDeployment(
        scenario, planned, LocalLauncher("test-idle", tmp_path / "logs", tmp_path / "specs")
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    keeping = list(deployment.endpoints.keeping_urls)
    Kept.refusals, Kept.paths = 0, []
    try:
        deployment.endpoints = replace(
            deployment.endpoints,
            cache_reset_urls=[f"{url}/reset_prefix_cache"],
            keeping_urls=[url] * len(keeping),
        )
        deployment.reset_caches()
    finally:
        deployment.stop()
        server.shutdown()
        server.server_close()
    prefill = [name for name in deployment.endpoints.metrics_urls if name.startswith("prefill")]
    assert len(keeping) == (len(prefill) if needed else 0)
    assert Kept.paths == ["/v1/completions"] * len(keeping) + ["/reset_prefix_cache"]


def test_launch_names_the_ports_that_nobody_can_guess(tmp_path: Path) -> None:
    """Mooncake's bootstrap server, which a foreign router must be given, and NIXL's port for each rank."""
    options = json.dumps({"model": "m", "version": "0.33.0"})
    sets = ("deployment.engine=vllm", f"deployment.engine_options={options}", "connectors=[mooncake,nixl]")
    scenario, _ = resolve(CliOptions("quickstart", (*sets, "deployment.tensor_parallel_size=2")))
    ports = {}
    for planned in plan_of(scenario).deployments:
        launcher = LocalLauncher("test-ports", tmp_path / planned.label, tmp_path / "specs")
        deployment = RunningDeployment(scenario, planned, launcher)
        ports |= {
            f"{planned.label} {instance.name}": side_ports(deployment, instance.name)
            for instance in planned.instances
        }
        ports[f"{planned.label} ports"] = [str(instance.side_port) for instance in planned.instances]
        deployment.stop()
    assert ports["mooncake prefill-0"] == [f"bootstrap port {ports['mooncake ports'][0]}"]
    assert ports["mooncake decode-0"] == []
    first = int(ports["nixl ports"][0])
    assert ports["nixl prefill-0"] in ([f"side port {first}"], [f"side ports {first} to {first + 1}"])
    assert ports["nixl decode-0"] != ports["nixl prefill-0"]


def test_its_gpus_are_those_that_its_engines_were_given(tmp_path: Path) -> None:
    """What the power of a trial is summed over."""
    options = {"model": "m", "version": "0.33.0", "prefill_devices": ["2, 3"], "decode_devices": ["GPU-a"]}

    def gpus(**more: list[str]) -> tuple[str, ...]:
        given = json.dumps(options | more)
        sets = ("deployment.engine=vllm", f"deployment.engine_options={given}", "connectors=[mooncake]")
        scenario, _ = resolve(CliOptions("quickstart", sets))
        planned = plan_of(scenario).deployments[-1]
        deployment = RunningDeployment(
            scenario, planned, LocalLauncher("test-gpus", tmp_path, tmp_path / "s")
        )
        deployment.stop()
        return deployment.gpus()

    assert gpus() == ("2", "3", "GPU-a")
    assert gpus(prefill_devices=["GPU-a"]) == ("GPU-a",)


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


def test_completions_asked_together_are_those_asked_alone(tmp_path: Path) -> None:
    """The emulated engine tells no log-probabilities, whether it refuses the question or ignores it."""
    with emulated.running(tmp_path, emulated.spec(time_scale=0.1)) as engine:
        scenario, _ = resolve(CliOptions(base_url=engine.url, input_len="64", output_len=4, ttft_ms=1000))
        (planned,) = plan_of(scenario).deployments
        launcher = LocalLauncher("test-deployment", tmp_path / "logs", tmp_path / "specs")
        with RunningDeployment(scenario, planned, launcher) as deployment:
            prompts = [[1] * 64, [2] * 64, [3] * 57]
            alone = [deployment.complete(prompt, 4) for prompt in prompts]
            together = deployment.complete_scored(prompts, 4)
            assert [completion.text for completion in together] == alone
            assert [completion.choices for completion in together] == [(), (), ()]
            found = reference_outputs(deployment.complete_scored, prompts, 4, deployment.reset_caches)
            assert found.texts == tuple(alone)
            assert [repeat.texts for repeat in found.repeats] == [found.texts] * 3
            assert compare(found, Outputs(found.texts, 0.1)).passed
