"""Planted faults ("lies") with which a system under test would deceive a benchmark.
``deployment.engine_options.lie`` selects one; the emulated engine or router then misbehaves in this way, and
the run is labelled ``lie: …``. The gate named here must detect it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal


@dataclass(frozen=True)
class Deceit:
    """A planted fault ("lie"), its place, and the gate that must detect it."""

    what: str
    gate: str
    where: Literal["engine", "router"] = "engine"


LIES: Final[dict[str, Deceit]] = {
    "warm_cache": Deceit("every prompt of one length hits the prefix cache", "warm_cache"),
    "skip_prefill": Deceit("prefill takes no time; its KV is reported as received", "prefill_skipped"),
    "impossible_speed": Deceit("prefill is a thousand times faster than modelled", "impossible_prefill"),
    "impossible_transfer": Deceit("transfers are timed a thousand times too fast", "impossible_transfer"),
    "decode_recomputes": Deceit(
        "D does not fetch the KV and computes the prompt itself", "decode_recomputed"
    ),
    "decode_only": Deceit("the router never asks P: D computes the prompt", "prefill_skipped", "router"),
    "corrupt_kv": Deceit("one word of each request's KV is changed in transit", "corrupt"),
    "double_kv": Deceit("each request's KV moves twice", "kv_bytes_wrong"),
    "failing_kv": Deceit("every fifth transfer fails at first and is retried", "kv_failures"),
    "unreleased_kv": Deceit("P keeps KV that was fetched until its lease ends", "kv_expired"),
    "silent_tcp": Deceit("the transfer library uses TCP, whatever was requested", "wrong_transport"),
    "claimed_rdma": Deceit("the transfer library uses TCP and the engine reports RDMA", "wrong_transport"),
    "emulated_reads": Deceit(
        "UCX reads GPU memory by software emulation over TCP; only its log shows it", "wrong_transport"
    ),
    "wrong_nics": Deceit("the transfer library uses loopback, whatever NICs were requested", "wrong_nics"),
    "slot_cap": Deceit("two sequences run at once, whatever max_num_seqs allows", "slot_capped"),
    "slow_drift": Deceit("steps take longer and longer while load lasts", "not_steady"),
    "late_engine": Deceit("steps end later than modelled", "emulator_behind"),
    "early_eos": Deceit("every third answer ends halfway, despite ignore_eos", "wrong_length"),
    "wrong_usage": Deceit("answers end halfway and claim all tokens in their usage", "output_miscounted"),
    "hidden_retry": Deceit("P computes each prompt twice", "hidden_retries"),
    "router_retry": Deceit("the router sends every fifth request twice", "hidden_retries", "router"),
    "router_drops": Deceit("the router fails every fourth request by itself", "failed_elsewhere", "router"),
    "starved_router": Deceit(
        "the router reports the figures of a host without free CPU", "host_starved", "router"
    ),
    "lost_requests": Deceit("D does not count every fourth request", "lost_requests"),
    "restart": Deceit("counters restart from zero, as after a server restart", "server_restarted"),
    "shedding": Deceit("every fourth request is rejected with 503", "shedding"),
    "cut_prompt": Deceit("the usage reports half of each prompt", "wrong_prompt_length"),
    "merged_tokens": Deceit("four tokens share an event", "tokens_per_event"),
    "answer_at_once": Deceit("a stream is buffered until it is complete", "answer_at_once"),
    "canned_answers": Deceit("every prompt has the same answer", "same_answers"),
    "empty_first": Deceit("an event without text is sent at once, the answer later", "empty_first_event"),
    "blank_first": Deceit("a blank is sent at once, the answer later", "early_first_token"),
    "empty_text": Deceit("answers have no text, and claim all tokens in their usage", "empty_answers"),
    "slow_turns": Deceit("every second request goes to a slower server", "two_populations"),
    "idle_decode": Deceit("the router sends all requests to one D of several", "unequal_instances", "router"),
    "stale_kv": Deceit("every third request gets the KV blocks of the one before", "wrong_answers"),
    "swapped_answers": Deceit("the router crosses two requests' streams", "wrong_answers", "router"),
    "corrupt_under_load": Deceit("KV is corrupted with more than three requests in flight", "wrong_answers"),
    "corrupt_after_failure": Deceit(
        "KV is corrupted for half a second after a failed request", "wrong_answers"
    ),
    "corrupt_last_block": Deceit("one bit of a prompt's last block is changed", "wrong_answers"),
    "recompute_silently": Deceit(
        "D computes the prompt itself and counts it as received: answers are right, no KV moves",
        "kv_bytes_wrong",
    ),
    "last_chunk_only": Deceit("only the last chunk's transfer of a prompt is counted", "kv_bytes_wrong"),
}

_LIE_OR_NONE = ("", *LIES)
if TYPE_CHECKING:
    Lie = str
else:
    Lie = Literal[_LIE_OR_NONE]
    """The name of a lie, or empty; pydantic refuses any other."""

LABEL: Final = "lie: "


def labels_of(lie: str) -> tuple[str, ...]:
    return (f"{LABEL}{lie}",) if lie else ()


def lie_of(labels: Iterable[str]) -> str:
    """Return the name of the planted fault in a run's labels; empty for an honest run."""
    return next((label.removeprefix(LABEL) for label in labels if label.startswith(LABEL)), "")
