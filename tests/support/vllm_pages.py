"""/metrics pages as the vLLM servers of a P/D pair write them (0.32, Mooncake 0.33), with chosen counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.hosts.telemetry import Metrics, parse_metrics

LABELS = 'engine="0",model_name="tiny"'


@dataclass
class Server:
    """What one server has counted so far."""

    prompts: int = 0
    input_len: int = 1024
    role: str = "decode"
    local: int = 0
    aborted: int = 0
    prefix_hits: int = 0
    block_size: int = 128
    queue_s: float = 0.0
    prefill_s: float = 0.0
    gap_s: float = 0.004
    transfers: Mapping[str, tuple[int, float, float, float]] = field(default_factory=dict)
    """Prefix, as "nixl" → (count, seconds, bytes, descriptors), each in all."""
    counters: Mapping[str, float] = field(default_factory=dict)
    by_source: bool = True

    def page(self) -> Metrics:
        tokens = self.prompts * self.input_len
        external = tokens - self.local if self.role == "decode" else 0
        local = self.local if self.role == "decode" else tokens - self.prefix_hits
        lines = [
            f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="0"}} 1.0',
            *counter("vllm:prompt_tokens", tokens),
            *counter("vllm:prefix_cache_queries", tokens),
            *counter("vllm:prefix_cache_hits", self.prefix_hits),
            *counter("vllm:external_prefix_cache_queries", external),
            *counter("vllm:external_prefix_cache_hits", external),
            *counter("vllm:num_preemptions", 0),
            *counter("vllm:request_success", self.prompts, 'finished_reason="length"'),
            *counter("vllm:request_success", self.aborted, 'finished_reason="abort"'),
            *histogram("vllm:request_queue_time_seconds", self.prompts, self.queue_s),
            *histogram("vllm:request_prefill_time_seconds", self.prompts, self.prefill_s),
            *histogram("vllm:inter_token_latency_seconds", self.prompts * 15, self.prompts * 15 * self.gap_s),
        ]
        sources = {
            "local_compute": local,
            "local_cache_hit": self.prefix_hits,
            "external_kv_transfer": external,
        }
        for source, count in sources.items() if self.by_source else ():
            lines += counter("vllm:prompt_tokens_by_source", count, f'source="{source}"')
        for prefix, (count, seconds, nbytes, descriptors) in self.transfers.items():
            lines += histogram(f"vllm:{prefix}_xfer_time_seconds", count, seconds)
            lines += histogram(f"vllm:{prefix}_bytes_transferred", count, nbytes)
            lines += histogram(f"vllm:{prefix}_num_descriptors", count, descriptors)
        for name, value in self.counters.items():
            lines += counter(name, value)
        return parse_metrics("\n".join(dict.fromkeys(lines)) + "\n")


def counter(name: str, value: float, *labels: str) -> list[str]:
    return [f"# TYPE {name} counter", f"{name}_total{{{','.join([LABELS, *labels])}}} {float(value)}"]


def histogram(name: str, count: float, total: float) -> list[str]:
    return [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{{LABELS},le="0.005"}} 0.0',
        f'{name}_bucket{{{LABELS},le="+Inf"}} {float(count)}',
        f"{name}_count{{{LABELS}}} {float(count)}",
        f"{name}_sum{{{LABELS}}} {total}",
    ]


def zeros(prefix: str) -> dict[str, float]:
    names = ("failed_transfers", "failed_notifications", "kv_expired_reqs", "notifications_after_expiry")
    return {f"vllm:{prefix}_num_{name}": 0.0 for name in names}
