"""The CPU lab: real vLLM as a P/D pair over NIXL and Mooncake (`make test-vllm`, or with VLLM=0.13.0)."""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from commands import Finished, Running, argv, tagged_processes, the_run, wait_until
from processes import living, still_living

from kvbench import connectors
from kvbench.errors import InputError
from kvbench.hosts.telemetry import Metrics, parse_metrics

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = "0.32.0"
TEST_VLLM = os.environ.get("KVBENCH_TEST_VLLM", "")
VERSION = TEST_VLLM if "." in TEST_VLLM else DEFAULT
LAB = ".venv-vllm" if VERSION == DEFAULT else f".venv-vllm-{VERSION}"
READY = (ROOT / LAB / "kvbench-setup.json").exists()

pytestmark = [
    pytest.mark.skipif(not READY, reason=f"there is no CPU lab ({LAB}): make vllm-cpu"),
    pytest.mark.skipif(not TEST_VLLM, reason="the CPU lab is tested by `make test-vllm`"),
    pytest.mark.timeout(1500),
]


def registered(name: str) -> bool:
    """Whether the release under test has the connector."""
    try:
        connectors.get(name).profile(VERSION)
    except InputError:
        return False
    return True


def ranks_take_turns(name: str) -> bool:
    """Whether the release's connector is meant for prefill with data-parallel ranks."""
    return registered(name) and (name == "nixl" or connectors.get(name).profile(VERSION).needs_bootstrap)


SCENARIO = "vllm-cpu-tiny"
PAIRS = tuple(name for name in ("nixl", "nixl_push", "mooncake") if registered(name))
# Free ports, and time for a machine that does other things too. The baseline is one server here.
LAUNCH = (
    "deployment.base_port=0",
    "deployment.ready_timeout_s=600",
    "workload.request_timeout_s=120",
    'deployment.engine_options.env.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="120"',
    "deployment.aggregated=1",
    f"deployment.engine_options.command=[{LAB}/bin/vllm]",
    f"deployment.engine_options.model={LAB}/tiny-model",
    # Where none was named the command is asked, as users do; on a very busy machine that takes minutes.
    *([f"deployment.engine_options.version={VERSION}+cpu"] if "." in TEST_VLLM else []),
)
# Inside a block of 128 tokens, at its borders, and beyond one prefill step of 2048 tokens.
LENGTHS = (17, 100, 128, 129, 500, 1024, 2048, 3000)
VOCAB_SIZE = 4096
OUTPUT_TOKENS = 16
STOP_LIMIT_S = 15.0
NAMED_LIMIT_S = 15.0
SWEEP_DEADLINE_S = 1400.0


def prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@dataclass
class Launched:
    """A deployment that `kvbench launch` has up."""

    running: Running
    url: str
    metrics_urls: Mapping[str, str]
    pids: Mapping[str, int]

    def complete(self, prompt: Sequence[int]) -> list[int]:
        """Tokens: in its text vLLM repeats a prompt that ends within a character (issue 48853)."""
        body = {
            "model": "tiny-qwen3", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = httpx.post(self.url, json=body, timeout=120)
        assert response.status_code == 200, response.text
        tokens = response.json()["choices"][0]["token_ids"]
        assert len(tokens) == OUTPUT_TOKENS
        return [int(token) for token in tokens]

    def metrics(self, name: str) -> Metrics:
        return parse_metrics(httpx.get(self.metrics_urls[name], timeout=10).text)

    def family(self) -> list[psutil.Process]:
        """Every process of the engines: API servers, engine cores, and what these have started."""
        leaders = [psutil.Process(pid) for pid in self.pids.values()]
        return leaders + [child for leader in leaders for child in leader.children(recursive=True)]


@contextmanager
def launched(connector: str, *sets: str) -> Iterator[Launched]:
    """A deployment that is up; it is killed if the test has not ended it."""
    running = Running("launch", SCENARIO, "--connector", connector, sets=(*LAUNCH, *sets))
    try:
        url = running.wait_for("requests ").split()[-1]
        urls, pids = {}, {}
        for name in ("aggregated-0",) if connector == "aggregated" else ("prefill-0", "decode-0"):
            line = running.wait_for(name)
            found = re.search(r"(http\S+/metrics) \(pid (\d+)\b", line)
            assert found is not None, line
            urls[name], pids[name] = found[1], int(found[2])
        yield Launched(running, url, urls, pids)
    finally:
        running.kill()


def by_source(metrics: Metrics, source: str) -> float | None:
    """Prompt tokens from a source; of releases that do not count them apart, what their caches tell."""
    if metrics.total("vllm:prompt_tokens_by_source_total") is not None:
        return metrics.total("vllm:prompt_tokens_by_source_total", source=source)
    here = metrics.total("vllm:prefix_cache_hits_total") or 0.0
    hits = metrics.total("vllm:external_prefix_cache_hits_total") or 0.0
    whole = metrics.total("vllm:prompt_tokens_total") or 0.0
    return {"external_kv_transfer": hits, "local_cache_hit": here, "local_compute": whole - hits - here}[
        source
    ]


def stop(server: Launched) -> None:
    """Ctrl-C ends everything, soon, and leaves nothing."""
    processes = server.family()
    began = time.monotonic()
    server.running.signal(signal.SIGINT)
    done = server.running.finish()
    took_s = time.monotonic() - began
    assert done.status == 0, done.text
    assert not living(processes)
    assert took_s <= STOP_LIMIT_S


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one server without P/D answers, greedily. Its engine core ends even if kvbench is killed."""
    with launched("aggregated") as server:
        answers = [server.complete(prompt) for prompt in prompts()]
        processes = server.family()
        assert any("EngineCore" in word for process in processes for word in process.cmdline())
        server.running.kill()
        assert not still_living(processes)
    # Else equal outputs would prove nothing.
    assert len(set(map(tuple, answers))) >= len(answers) - 1
    return answers


# Greedy outputs of the same weights without vLLM. {"prompts", "count"} on stdin, tokens on stdout.
TRANSFORMERS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
asked = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
answers = []
for prompt in asked["prompts"]:
    ids, known, last = [], None, torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(asked["count"]):
            done = model(last, past_key_values=known, use_cache=True)
            known, last = done.past_key_values, done.logits[:, -1:].argmax(-1)
            ids.append(int(last))
    answers.append(ids)
print(json.dumps(answers))
"""


def test_one_server_answers_as_the_model_does_without_vllm(expected: list[list[int]]) -> None:
    """Else a pair that answers as the server does may well be as wrong as it is."""
    done = subprocess.run(
        [str(ROOT / LAB / "bin/python"), "-c", TRANSFORMERS, str(ROOT / LAB / "tiny-model")],
        input=json.dumps({"prompts": prompts(), "count": OUTPUT_TOKENS}),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=900,  # a busy machine takes minutes to load PyTorch
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected == json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("connector", PAIRS)
def test_a_pair_answers_as_one_server_and_decode_computes_no_prompt(
    connector: str, expected: list[list[int]]
) -> None:
    total = float(sum(LENGTHS))
    with launched(connector) as server:
        assert [server.complete(prompt) for prompt in prompts()] == expected
        wait_until(lambda: (by_source(server.metrics("decode-0"), "external_kv_transfer") or 0) >= total)
        prefill, decode = server.metrics("prefill-0"), server.metrics("decode-0")
        stop(server)
    assert by_source(decode, "external_kv_transfer") == total
    assert (by_source(decode, "local_compute"), by_source(decode, "local_cache_hit")) == (0, 0)
    assert by_source(prefill, "local_compute") == total
    if connector != "mooncake":  # which counts nothing
        active = decode if connector == "nixl" else prefill
        assert active.total("vllm:nixl_bytes_transferred_count") == len(LENGTHS)
        for page in (prefill, decode):
            assert not page.total("vllm:nixl_num_failed_transfers_total")
            assert not page.total("vllm:nixl_num_kv_expired_reqs_total")


@pytest.mark.parametrize("connector", [name for name in ("nixl", "mooncake") if ranks_take_turns(name)])
def test_every_data_parallel_rank_of_prefill_hands_over_its_kv(
    connector: str, expected: list[list[int]]
) -> None:
    """Real ranks: the engine ids, ports and header that the router works out are those of vLLM."""
    ranks = "deployment.prefill={instances: 1, data_parallel_size: 2}"
    with launched(connector, ranks) as server:
        assert [server.complete(prompt) for prompt in prompts()] == expected
        total = float(sum(LENGTHS))
        wait_until(lambda: (by_source(server.metrics("decode-0"), "external_kv_transfer") or 0) >= total)
        prefill, decode = server.metrics("prefill-0"), server.metrics("decode-0")
        stop(server)
    assert by_source(decode, "local_compute") == 0
    shares = [prefill.total("vllm:prompt_tokens_total", engine=rank) for rank in ("0", "1")]
    assert sum(share or 0 for share in shares) == total
    if connector == "mooncake":  # its ranks are the router's choice, NIXL's are vLLM's own
        assert all(shares), shares


@pytest.mark.parametrize(("connector", "part"), [("nixl", "engine core"), ("mooncake", "API server")])
def test_a_prefill_server_killed_at_work_is_named_at_once(connector: str, part: str) -> None:
    with launched(connector) as server:
        processes = server.family()
        leader = psutil.Process(server.pids["prefill-0"])
        cores = [
            child for child in leader.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())
        ]
        assert len(cores) == 1
        over = threading.Event()
        sender = threading.Thread(target=_keep_sending, args=(server.url, over))
        sender.start()
        try:
            wait_until(lambda: (by_source(server.metrics("prefill-0"), "local_compute") or 0) > 0, 300.0)
            began = time.monotonic()
            (cores[0] if part == "engine core" else leader).kill()
            named = server.running.wait_for("kvbench: ")
            took_s = time.monotonic() - began
            done = server.running.finish()
        finally:
            over.set()
            sender.join(timeout=60)
        assert not sender.is_alive()
        # D's core of 0.13 dies with its peer over NIXL, and may be seen first.
        assert "prefill-0" in named or (VERSION < "0.14" and "decode-0: the engine's core has died" in named)
        assert took_s <= NAMED_LIMIT_S
        assert done.status != 0
        wait_until(lambda: not living(processes))


def _keep_sending(url: str, over: threading.Event) -> None:
    """Long prompts one after the other, until the end; what becomes of them is the servers' affair."""
    source = random.Random(9)
    while not over.is_set():
        prompt = [source.randrange(2, VOCAB_SIZE) for _ in range(3000)]
        body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": 2}
        try:
            httpx.post(url, json=body, timeout=120)
        except httpx.HTTPError:
            over.wait(0.1)


# Ends after two trials a cell, whatever the speed: the rate is one that anything holds.
SHORT = (
    *LAUNCH, "slo.ttft_ms=20000", "slo.tpot_ms=500", "slo.attainment=0.5", "search.start_rate=2",
    "search.max_rate=2", "search.trial_s=2", "search.max_trial_s=10", "search.min_requests=20",
    "search.max_trials=3", "search.equal_rate=false",
)  # fmt: skip


WANTED = [word for name in ("aggregated", *PAIRS) for word in ("--connector", name)]


def test_a_short_sweep_over_all_lengths_and_connectors(tmp_path: Path) -> None:
    done = _sweep(tmp_path)
    assert done.status == 0, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "complete"
    assert [result.status for result in run.cells] == ["done"] * 3 * (1 + len(PAIRS)), done.text
    assert {result.cell.connector for result in run.cells} == {"aggregated", *PAIRS}
    for result in run.cells:
        if result.cell.connector != "aggregated":
            checked = result.equal_outputs or {}
            assert (checked["checked"], checked["equal"] + checked["within_noise"]) == (4, 4)
            assert checked["power"]
    valid = [trial for trial in run.trials if trial.verdict != "invalid"]  # a busy host is refused
    assert {trial.cell for trial in valid if trial.purpose != "ceiling"} == {cell.cell for cell in run.cells}
    for trial in valid:
        assert trial.labels == []
        if trial.cell.connector != "aggregated":
            sent = float(trial.summary["sent"] * trial.cell.input_len)
            roles = trial.engine["roles"]
            assert roles["prefill"]["prompt_tokens"] - roles["prefill"]["prefix_hits"] == sent
            assert roles["decode"]["prompt_tokens_by_source"]["external_kv_transfer"] == sent
            assert roles["decode"]["prompt_tokens_by_source"]["local_compute"] == 0
    for name in ("max_request_rate", "distribution"):
        assert (run.path / "figures" / f"{name}.svg").stat().st_size > 0
    assert not tagged_processes(run)


def _sweep(results: Path) -> Finished:
    done = subprocess.run(
        argv("sweep", SCENARIO, *WANTED, "--output", str(results), sets=SHORT), capture_output=True,
        text=True, timeout=SWEEP_DEADLINE_S, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)
