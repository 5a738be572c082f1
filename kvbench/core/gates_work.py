"""Gates on the work: did the servers do just what was asked, on the way that was asked for?

They compare the servers' own counters with the requests that were sent. See gates.py for the others and
for the verdict.
"""

from __future__ import annotations

from kvbench.core.evidence import EXTERNAL, EngineFigures, Evidence, span
from kvbench.core.records import Finding


def warm_cache(evidence: Evidence) -> Finding | None:
    """Prompts came from the prefix cache, though no reuse was asked for."""
    for role, engine in evidence.engines.items():
        rate = engine.hit_rate
        if rate is not None and rate > evidence.limits.warm_cache_share and not evidence.reuse_expected:
            return Finding(
                "warm_cache",
                "invalid",
                f"{rate:.1%} of the prompt tokens came from the prefix cache of {role}: "
                "the trial measured a cache, not prefill",
                "use a new seed for each trial, reset the prefix cache before it, or ask for reuse",
                {
                    "role": role,
                    "hit_rate": rate,
                    "hits": engine.prefix_hits,
                    "queries": engine.prefix_queries,
                },
            )
    return None


def prefill_skipped(evidence: Evidence) -> Finding | None:
    """The prompt tokens computed where prefill runs do not match the prompts that were sent."""
    if evidence.reuse_expected:
        return None
    least, most = evidence.expected(per_token=True, tolerance=evidence.limits.count_tolerance)
    for role in ("prefill", "aggregated"):
        engine = evidence.engines.get(role)
        computed = engine.computed_tokens if engine is not None else None
        if computed is None or least <= computed <= most:
            continue
        if computed > most and engine is not None and engine.preemptions:
            continue  # what is preempted is computed again
        less = computed < least
        return Finding(
            "prefill_skipped" if less else "prefill_repeated",
            "invalid",
            f"{role} computed {computed:.0f} prompt tokens where {span(least, most)} were expected: "
            + ("prefill was skipped" if less else "prefill was done more than once"),
            "look into its log, and into the router's, for requests that went elsewhere or came twice",
            {"role": role, "computed_tokens": computed, "expected": [least, most]},
        )
    return None


def decode_recomputed(evidence: Evidence) -> Finding | None:
    """Decode computed prompts itself, or did not get their KV from prefill."""
    engine = evidence.engines.get("decode")
    if engine is None or not engine.prompt_tokens_by_source or not evidence.whole_prompt:
        return None
    allowed = _local_tokens_allowed(evidence, engine)
    local = engine.computed_tokens or 0.0
    external = engine.prompt_tokens_by_source.get(EXTERNAL)
    least, _ = evidence.expected(per_token=True, tolerance=evidence.limits.count_tolerance)
    missing = external is not None and external < least - allowed
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
        "the KV hand-over failed silently: look into decode's log, the router and the handshake's ports",
        figures,
    )


def _local_tokens_allowed(evidence: Evidence, engine: EngineFigures) -> float:
    """Prompt tokens that decode may compute in all: a few of each request, and a last, partial block."""
    sent = [record.input_len for record in evidence.records if record.sent_s is not None]
    mean_len = sum(sent) / len(sent) if sent else 0.0
    few = max(1.0, min(evidence.limits.decode_local_tokens, 0.05 * mean_len))
    if not engine.block_tokens:
        return few * len(sent)
    # One token beyond whole blocks: the last token's logits are computed where decoding begins.
    partial = (length % engine.block_tokens + 1 for length in sent)
    return sum(max(few, min(tokens, length / 2)) for tokens, length in zip(partial, sent, strict=True))


def kv_bytes_wrong(evidence: Evidence) -> Finding | None:
    """The KV bytes that moved are not those of the requests."""
    per_request = evidence.kv_bytes_per_request
    # Both ends may count the same bytes: the larger figure is the whole.
    seen = [engine.kv_bytes for engine in evidence.engines.values() if engine.kv_bytes is not None]
    if per_request is None or not seen:
        return None
    fewest, largest = evidence.expected(per_token=False, tolerance=evidence.limits.count_tolerance)
    least, most = fewest * (per_request - evidence.kv_bytes_slack), largest * per_request
    moved = max(seen)
    if least <= moved <= most:
        return None
    return Finding(
        "kv_bytes_wrong",
        "invalid" if evidence.kv_bytes_certain or not moved else "warning",
        f"{moved / 1e6:.1f} MB of KV moved where {span(least / 1e6, most / 1e6, 1)} MB were expected",
        "prompts were cached, recomputed or moved twice; check the KV size of the model in the scenario, too",
        {"kv_bytes": moved, "expected": [least, most]},
    )


def plain_transport(name: str) -> str:
    """The bare transport of what a backend reports: ``ucx:tcp/lo`` and ``tcp (configured)`` are tcp."""
    bare = name.strip().lower().removesuffix(" (configured)")
    return bare.rpartition(":")[2].partition("/")[0]


def wrong_transport(evidence: Evidence) -> Finding | None:
    """The transport that ran is not the one asked for."""
    asked = [name.strip().lower() for name in evidence.transport_asked.split(",") if name.strip()]
    ran = [plain_transport(name) for name in evidence.transport_ran.split(",") if name.strip()]
    others = [name for name in ran if name not in asked]
    if not asked or "auto" in asked or not others:
        return None
    return Finding(
        "wrong_transport",
        "invalid",
        f"the KV moved over {evidence.transport_ran}, asked for was {evidence.transport_asked}",
        "see `kvbench doctor` and the transfer library's log for why it chose another",
        {"asked": evidence.transport_asked, "ran": evidence.transport_ran},
    )


def kv_failures(evidence: Evidence) -> Finding | None:
    """KV transfers failed."""
    failed = sum(engine.kv_failures or 0.0 for engine in evidence.engines.values())
    if failed <= 0:
        return None
    return Finding(
        "kv_failures",
        "invalid",
        f"{failed:.0f} KV transfers failed",
        "look for the transfer library's last lines in the engines' logs",
        {"kv_failures": failed},
    )


def kv_expired(evidence: Evidence) -> Finding | None:
    """P gave up KV that was never fetched. Of requests that were cancelled that is what must happen."""
    expired = sum(engine.kv_expired or 0.0 for engine in evidence.engines.values())
    if expired <= 0:
        return None
    excused = expired <= evidence.kv_may_expire
    return Finding(
        "kv_expired",
        "note" if excused else "invalid",
        f"the KV of {expired:.0f} requests expired on prefill before decode had fetched it"
        + (f"; {evidence.kv_may_expire:.0f} requests had been cancelled before" if excused else ""),
        ""
        if excused
        else "decode is overloaded or never asked: lower the rate, raise the lease, see its log",
        {"kv_expired": expired, "may_expire": evidence.kv_may_expire},
    )


def wrong_length(evidence: Evidence) -> Finding | None:
    """Answers ended before, or after, the length that was asked for."""
    wrong = [record for record in evidence.records if record.error == "wrong_length"]
    if not wrong:
        return None
    share = len(wrong) / (len(wrong) + evidence.summary.completed)
    return Finding(
        "wrong_length",
        "invalid" if share > evidence.limits.wrong_length_share else "warning",
        f"{len(wrong)} of {len(wrong) + evidence.summary.completed} answers had a wrong length, "
        f"as {wrong[0].output_len} tokens instead of {wrong[0].requested_output_len}",
        "the server must honour ignore_eos and min_tokens, and max_model_len must hold the whole request",
        {"wrong": len(wrong), "share": share},
    )


def requests_lost_or_repeated(evidence: Evidence) -> Finding | None:
    """The servers finished fewer requests than were answered, or more than were sent."""
    least, most = evidence.expected(per_token=False)
    for role, engine in evidence.engines.items():
        if engine.requests is None or least <= engine.requests <= most:
            continue
        more = engine.requests > most
        return Finding(
            "hidden_retries" if more else "lost_requests",
            "invalid",
            f"{role} counted {engine.requests:.0f} requests where {span(least, most)} were expected",
            "something else sends requests to this server, or the router tries again: stop it"
            if more
            else "requests went to another server: compare the router's list of servers with the deployment",
            {"role": role, "counted": engine.requests, "expected": [least, most]},
        )
    return None


def counters_fell(evidence: Evidence) -> Finding | None:
    """A counter fell during the trial: its server was restarted."""
    for role, engine in evidence.engines.items():
        values = [value for value in engine.to_json().values() if isinstance(value, (int, float))]
        if any(value < 0 for value in [*values, *engine.prompt_tokens_by_source.values()]):
            return Finding(
                "server_restarted",
                "invalid",
                f"counters of {role} fell during the trial: a server was restarted",
                "look into its log for a crash",
                {"role": role},
            )
    return None
