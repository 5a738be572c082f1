"""Gates on the work: did prefill prefill, did decode decode, did each instance take part?

They compare the servers' counters of prompt tokens with the requests sent."""

from __future__ import annotations

import math
from typing import Final

from kvbench.core.gates.evidence import EXTERNAL, LOCAL_CACHE_HIT, EngineFigures, Evidence, span
from kvbench.core.records import Finding

IDLE: Final = 0.1
"""Share of its equal part below which an instance was idle."""
UNEQUAL: Final = 0.5
"""Share of its equal part below which an instance is unequal."""
BY_CHANCE: Final = 4.0
"""Standard deviations below its share under random assignment."""


def warm_cache(evidence: Evidence) -> Finding | None:
    """Prompts were computed, and did not come from a warm prefix cache.

    evidence: hits over queries of the prefix cache on P and D, above 1 %, and the share of repeated canaries;
    of sessions, hits above what their prompts offer, and 1 % of these. limits: silent if a trace reuses
    prefixes; needs the servers' counters (false counters are left to the FLOP/s bound)."""
    if evidence.reuse_offered is not None:
        return _more_than_offered(evidence, evidence.reuse_offered)
    fresh, _ = evidence.expected(per_token=True, fresh=True)
    sent, _ = evidence.expected(per_token=True)
    allowed = evidence.limits.warm_cache_share + (1.0 - fresh / sent if sent else 0.0)
    for role, engine in evidence.engines.items():
        rate = engine.hit_rate
        if rate is not None and rate > allowed and not evidence.reuse_expected:
            return Finding(
                "warm_cache",
                "invalid",
                f"{rate:.1%} of the prompt tokens came from the prefix cache of {role}: "
                "the trial measured the cache, not prefill",
                "use a new seed for each trial, reset the prefix cache before it, or configure reuse",
                {
                    "role": role,
                    "hit_rate": rate,
                    "hits": engine.prefix_hits,
                    "queries": engine.prefix_queries,
                },
            )
    return None


def _more_than_offered(evidence: Evidence, offered: float) -> Finding | None:
    """Report more reuse than the prompts offer, which invalidates reuse and times."""
    for role, engine in evidence.engines.items():
        hits, queries = engine.prefix_hits, engine.prefix_queries
        if hits is None or not queries or hits <= offered + evidence.limits.count_tolerance * queries:
            continue
        return Finding(
            "warm_cache",
            "invalid",
            f"the prefix cache of {role} found {hits:.0f} tokens, where the sessions' prompts offer "
            f"{offered:.0f}: the rest came from other prompts",
            "reset the prefix cache before the run, and let no other client use the servers",
            {"role": role, "hits": hits, "queries": queries, "offered": offered},
        )
    return None


def prefill_skipped(evidence: Evidence) -> Finding | None:
    """Prefill computed each prompt that was sent, once. evidence: prompt tokens computed there against those
    sent (within 1 %). limits: needs its counters."""
    if evidence.reuse_expected:
        return None
    least, most = evidence.expected(per_token=True, tolerance=evidence.limits.count_tolerance, fresh=True)
    for role in ("prefill", "aggregated"):
        engine = evidence.engines.get(role)
        computed = engine.computed_tokens if engine is not None else None
        if computed is None or least <= computed <= most:
            continue
        if computed > most and engine is not None and engine.preemptions:
            continue  # preempted requests are computed again
        less = computed < least
        return Finding(
            "prefill_skipped" if less else "prefill_repeated",
            "invalid",
            f"{role} computed {computed:.0f} prompt tokens where {span(least, most)} were expected: "
            + ("prefill was skipped" if less else "prefill ran more than once"),
            "check its log and the router's for requests that went elsewhere or arrived twice",
            {"role": role, "computed_tokens": computed, "expected": [least, most]},
        )
    return None


def work_unproven(evidence: Evidence) -> Finding | None:
    """P and D both report their tokens, which shows whether both worked. evidence: P's counter of prompt
    tokens and D's of generated tokens exist. limits: a warning, since an external server may hide them; other
    gates check the values."""
    if not evidence.disaggregated:
        return None
    prefill, decode = evidence.engines.get("prefill"), evidence.engines.get("decode")
    silent = {
        "P": prefill is None or prefill.prompt_tokens is None,
        "D": decode is None or decode.generation_tokens is None,
    }
    missing = [role for role, says_nothing in silent.items() if says_nothing]
    if not missing:
        return None
    roles = " and ".join(missing)
    return Finding(
        "work_unproven",
        "warning",
        f"not proven that P and D both worked: no token counters of {roles}",
        "set the instances' /metrics: --prefill-metrics-url and --decode-metrics-url; "
        "with vLLM's counter names",
        {"without_counters": missing},
    )


def decode_recomputed(evidence: Evidence) -> Finding | None:
    """Decode got the prompts' KV from prefill, and did not compute it again. evidence: decode's prompt tokens
    by source. limits: a last, partial block may be computed by decode; a connector that hands over only whole
    blocks, or only those ready in time, is not judged."""
    engine = evidence.engines.get("decode")
    if engine is None or not engine.prompt_tokens_by_source or not evidence.whole_prompt:
        return None
    allowed = _local_tokens_allowed(evidence, engine)
    local = engine.computed_tokens or 0.0
    external = engine.prompt_tokens_by_source.get(EXTERNAL)
    least, _ = evidence.expected(per_token=True, tolerance=evidence.limits.count_tolerance, fresh=True)
    # With reuse, decode need not receive again the KV that it has of earlier prompts.
    kept = engine.prompt_tokens_by_source.get(LOCAL_CACHE_HIT, 0.0) if evidence.reuse_expected else 0.0
    missing = external is not None and external + kept < least - allowed
    if local <= allowed and not missing:
        return None
    figures = {"local_tokens": local, "external_tokens": external, "expected": least}
    if engine.preemptions and not missing:
        return Finding(
            "decode_recomputed",
            "warning",
            f"decode computed {local:.0f} prompt tokens again, after {engine.preemptions:.0f} preemptions",
            "give decode more KV blocks",
            figures,
        )
    came = "" if external is None else f" and received {external:.0f}"
    return Finding(
        "decode_recomputed",
        "invalid",
        f"decode computed {local:.0f} prompt tokens itself{came}, where the KV of at least {least:.0f} "
        "should have come from prefill",
        "the KV hand-off failed silently: check decode's log, the router and the handshake ports",
        figures,
    )


def _local_tokens_allowed(evidence: Evidence, engine: EngineFigures) -> float:
    """Return the prompt tokens that decode may compute: a few per request, and a last, partial block."""
    sent = [record.input_len for record in evidence.records if record.sent_s is not None]
    mean_len = sum(sent) / len(sent) if sent else 0.0
    few = max(1.0, min(evidence.limits.decode_local_tokens, 0.05 * mean_len))
    if not engine.block_tokens:
        return few * len(sent)
    # One token beyond whole blocks: the last token's logits are computed where decoding begins.
    partial = (length % engine.block_tokens + 1 for length in sent)
    return sum(max(few, min(tokens, length / 2)) for tokens, length in zip(partial, sent, strict=True))


def unequal_instances(evidence: Evidence) -> Finding | None:
    """Each instance of a role served its part of the requests: none stood idle.

    evidence: requests (or tokens) that each instance counted; reported if one has less than half of an equal
    share, and 4 standard deviations less than under random assignment. limits: a warning, as the rate is
    correct for the instances that worked; needs each instance's counters."""
    sent = sum(record.sent_s is not None for record in evidence.records)
    for role, engine in evidence.engines.items():
        total, count = sum(engine.served), len(engine.served)
        if count < 2 or total <= 0 or min(engine.served) < 0:
            continue
        equal = total / count
        requests = sent / count
        least = min(engine.served)
        missing = requests * (1 - least / equal)
        if least >= UNEQUAL * equal or missing <= BY_CHANCE * math.sqrt(requests):
            continue
        idle = sum(load < IDLE * equal for load in engine.served)
        shares = ", ".join(f"{load / total:.0%}" for load in engine.served)
        return Finding(
            "unequal_instances",
            "warning",
            f"{idle} of {count} {role} instances were idle: they served {shares} of the load"
            if idle
            else f"the {count} {role} instances served {shares} of the load",
            "the rate does not use all instances: check the router's list and its policy",
            {"role": role, "served": list(engine.served), "idle": idle},
        )
    return None
