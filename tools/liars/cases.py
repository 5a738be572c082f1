"""The lies and where each is planted: in the emulated engine, the router, the load generator or a server.

A case is one lie in one trial, and what must come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvbench.core.gates.lies import LIES
from kvbench.planning.overrides import CliOptions

# A light load with limits so wide that a busy machine breaks none of them.
EASY: Final = (
    *("workload.input_len=[64]", "workload.output_len=8", "slo.ttft_ms=4000", "slo.tpot_ms=1000"),
    *("slo.attainment=0.5", "search.trial_s=1", "search.min_requests=24", "deployment.base_port=0"),
)


@dataclass(frozen=True)
class Case:
    """One lie in one trial. ``nuisance`` disturbs from outside what no part of kvbench lies about.

    ``verdicts``: what may come of the trial. ``gate``: the finding that must be there.
    """

    lie: str
    gate: str
    verdicts: tuple[str, ...] = ("invalid",)
    connector: str = "tcp"
    options: dict[str, object] = field(default_factory=dict)
    rate: float = 30.0
    sets: tuple[str, ...] = ()
    nuisance: str = ""
    """A process whose command line has this word is stopped and continued again and again."""
    servers: tuple[dict[str, Any], ...] = ()
    """Exact servers in place of a deployment: foreign ones, of which the first one's URL is known, and with
    /metrics the URLs of these."""
    reference: bool = False
    """An aggregated server gives the right answers first, as in a sweep."""
    watched: bool = False
    """The server's own answers when idle are the right ones."""
    unseen: bool = False
    """The gate cannot see it, and the trial must say that."""

    @property
    def name(self) -> str:
        if not self.servers:
            return self.lie
        return f"{self.lie}, {'with /metrics' if self.servers[0]['metrics'] else 'foreign'}"


def _lie(lie: str, *sets: str, rate: float = 30.0, connector: str = "tcp", **options: object) -> Case:
    return Case(lie, LIES[lie].gate, connector=connector, options=options, rate=rate, sets=sets)


def _missed(case: Case) -> Case:
    """One that is no refusal: the rate is missed. A busy machine may refuse it for another reason."""
    return replace(case, verdicts=("missed", "invalid"))


def _beside(case: Case) -> Case:
    """One that is reported beside the number, which stands."""
    return replace(case, verdicts=("met", "missed", "invalid"))


def _answers(case: Case) -> Case:
    """One that is seen by what is answered, or moved, where the right answers are known."""
    return replace(case, reference=True)


# Prefill of `quick`, five times slower, computes at most 9 k tokens a second at this length: with so many
# parameters 80 % of an A10's peak. No GPU is stood for; the figures only have to be possible for the honest
# engine, and impossible for a liar that a busy machine holds up: hence the slow one, and the slow NIC below.
_PHYSICS: Final = (
    *("workload.input_len=[4096]", "deployment.hardware=A10", "deployment.engine_options.time_scale=5"),
    *("model.active_parameters=1.1e10", "search.min_requests=20"),
)
_LONG: Final = ("workload.output_len=16",)
_MANY: Final = ("search.trial_s=3", "search.min_requests=80")


def _foreign(lie: str, gate: str, *sets: str, servers: int = 1, metrics: bool = False, **spec: Any) -> Case:
    """A lie of a server that kvbench knows by its URL alone: TTFT is 60 ms, TPOT 5 ms if it is honest."""
    trouble = {name: spec.pop(name) for name in TROUBLE if name in spec}
    told = {"first_token_s": 0.06, "gap_s": 0.005, **spec, "trouble": trouble, "metrics": metrics}
    lengths = (f"workload.input_len=[{FOREIGN.input_len}]", f"workload.output_len={FOREIGN.output_len}")
    return Case(lie, gate, sets=(*lengths, "search.min_requests=40", *sets), servers=(told,) * servers)


def _watched(lie: str, gate: str, rate: float = 30.0, **spec: Any) -> Case:
    """A foreign server's lie in many requests, seen by its own answers when idle."""
    return replace(_foreign(lie, gate, *_MANY, **spec), watched=True, rate=rate)


_IDLE_REQUESTS: Final = 40
"""No fewer than a bench asks of an idle server, before any load: canaries, each more than once. More would
spare the trial's own canaries."""
FOREIGN: Final = CliOptions(input_len="512", output_len=64, tpot_ms=1000)
"""Options of foreign servers. An option wins over a case's sets: so the TTFT limit is not one of these."""
TROUBLE: Final = ("kind", "every", "spared", "prompt_off", "per_event", "late_s", "in_flight")
CASES: Final[tuple[Case, ...]] = (
    _lie("warm_cache"),
    _lie("skip_prefill"),
    _lie("impossible_speed", *_PHYSICS, rate=8),
    _lie("impossible_transfer", "deployment.nic_gbit=10"),
    _lie("decode_recomputes"),
    _lie("decode_only"),
    _answers(_lie("corrupt_kv")),
    _lie("double_kv"),
    _lie("failing_kv"),
    _lie("unreleased_kv"),
    _lie("silent_tcp", connector="mooncake", protocol="rdma"),
    _lie("claimed_rdma", connector="mooncake", protocol="rdma"),
    _lie("emulated_reads", connector="nixl", ucx_tls="cuda_ipc,cuda_copy,tcp"),
    _lie("wrong_nics", connector="nixl", ucx_net_devices="lo,eth0"),
    _missed(_lie("slot_cap", "workload.output_len=64")),
    _lie("slow_drift", "workload.output_len=16", "slo.tpot_ms=40", "search.trial_s=4", "slo.attainment=0.8"),
    _lie("late_engine", "slo.ttft_ms=200"),
    _lie("early_eos"),
    _lie("wrong_usage"),
    _lie("hidden_retry", rate=20),
    _lie("router_retry"),
    _lie("router_drops", "slo.attainment=0.9"),
    _lie("starved_router", "slo.ttft_ms=200"),
    _lie("lost_requests"),
    _lie("restart"),
    _lie("shedding"),
    _lie("cut_prompt"),
    _beside(_lie("merged_tokens", "workload.output_len=16")),
    _lie("answer_at_once", "workload.output_len=16"),
    _lie("canned_answers", "workload.output_len=16", "search.min_requests=60"),
    _beside(_lie("empty_first", *_LONG, connector="aggregated")),
    _lie("blank_first", *_LONG, connector="aggregated"),
    _lie("empty_text"),
    _beside(_lie("slow_turns", *_MANY, connector="aggregated")),
    _beside(_lie("idle_decode", "deployment.decode=2", *_MANY)),
    _answers(_lie("stale_kv")),
    _answers(_lie("swapped_answers")),
    _answers(_lie("corrupt_under_load", "workload.output_len=64", rate=60)),
    _answers(_lie("corrupt_after_failure")),
    _answers(_lie("corrupt_last_block")),
    _answers(_lie("recompute_silently")),
    _answers(
        _lie(
            "last_chunk_only",
            "workload.input_len=[320]",
            "deployment.engine_options.max_num_batched_tokens=128",
            rate=15,
        )
    ),
    # Foreign servers.
    _foreign("cut_prompt", "wrong_prompt_length", kind="wrong_prompt", prompt_off=16 - 512),
    _foreign("canned_answers", "same_answers", kind="canned"),
    _foreign("nothing_computed", "impossible_answers", first_token_s=0.0, gap_s=0.0),
    _watched("stale_kv", "wrong_answers", kind="stale", spared=_IDLE_REQUESTS),
    _watched("some_canned", "wrong_answers", kind="canned", every=2, spared=_IDLE_REQUESTS),
    _watched("canned_when_idle", "wrong_answers", kind="canned", every=2),
    # Another user's answer in 5 % of cases, once more requests are under way, idle ones included.
    _watched("swapped_above_4", "repeated_answers", 60, kind="stale", every=20, in_flight=4),
    _watched("swapped_above_9", "repeated_answers", 60, kind="stale", every=20, in_flight=9),
    _beside(_foreign("empty_first", "empty_first_event", kind="empty_first", first_token_s=0.6)),
    _foreign("blank_first", "early_first_token", kind="blank_first", first_token_s=0.6),
    _beside(
        _foreign(
            "merged_tokens", "tokens_per_event", kind="merged", per_event=16, text=" word" * 16, gap_s=0.08
        )
    ),
    _foreign("inflated_usage", "inflated_usage", kind="inflated", per_event=8, text=" word"),
    _foreign("answer_at_once", "answer_at_once", kind="at_once"),
    _foreign("empty_text", "empty_answers", kind="empty", spared=12),
    _beside(_foreign("slow_turns", "two_populations", *_MANY, kind="late", every=2, late_s=0.6)),
    _beside(_foreign("idle_decode", "unequal_instances", *_MANY, servers=2, metrics=True)),
    replace(_beside(_foreign("idle_decode", "unequal_instances", *_MANY, servers=2)), unseen=True),
    replace(
        _foreign("late_reader", "client_limited", "slo.ttft_ms=200"), nuisance="kvbench.processes.loadgen"
    ),
    # What no part of kvbench has to lie about: the load itself, and the machine.
    Case("late_client", "client_limited", sets=("slo.ttft_ms=200",), nuisance="kvbench.processes.loadgen"),
    Case("late_router", "router_limited", sets=("slo.ttft_ms=200",), nuisance="kvbench.processes.router"),
    Case("one_batch", "one_batch", rate=60, sets=("workload.output_len=256", "search.trial_s=0.5")),
    Case(
        "overload",
        "growing_queue",
        ("missed", "invalid"),
        rate=150,
        sets=("search.trial_s=2", "slo.ttft_ms=20000", "deployment.engine_options.max_num_seqs=512"),
    ),
)
