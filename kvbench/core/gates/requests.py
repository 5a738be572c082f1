"""Gates on requests and answers: was every request served once, in full, and by the servers under test?"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvbench.core.gates.evidence import Evidence, span
from kvbench.core.records import Finding, RequestRecord

SHED_STATUS: Final = frozenset({429, 503})


def failed_requests(evidence: Evidence) -> Finding | None:
    """Requests were answered.

    evidence: the client's records. limits: a failed request is a miss, and the trial counts; only one in
    which none succeeded is refused, since it says nothing about latency.
    """
    failed = {name: count for name, count in evidence.summary.failed.items() if name != "wrong_length"}
    count = sum(failed.values())
    if not count:
        return None
    classes = ", ".join(f"{number} × {name}" for name, number in sorted(failed.items()))
    detail = next((r.error_detail for r in evidence.records if r.error in failed and r.error_detail), "")
    none_succeeded = evidence.summary.completed == 0 and "wrong_length" not in evidence.summary.failed
    due = max(evidence.summary.sent, count)  # one without a connection has failed and was never sent
    message = f"server errors: {count} of {due} requests failed ({classes})"
    return Finding(
        "server_errors" if none_succeeded else "failed_requests",
        "invalid" if none_succeeded else "warning",
        message + (f"; the first: {detail}" if detail else ""),
        "none was answered, so this is no measurement: look into the servers' logs"
        if none_succeeded
        else "each failed request counts as a miss; the servers' logs say why they failed",
        {"failed": failed},
    )


def shedding(evidence: Evidence) -> Finding | None:
    """The server took all of the load: it turned nobody away (429, 503).

    evidence: the answers' status. limits: requests turned away are misses; what is refused is a trial that
    meets the SLO all the same, as the latencies of the others are those of a lower rate.
    """
    sent = [record for record in evidence.records if record.sent_s is not None]
    shed = [record for record in sent if record.error == "http_error" and record.status in SHED_STATUS]
    if not shed:
        return None
    share = len(shed) / len(sent)
    refused = share > evidence.limits.shed_share and evidence.attained
    return Finding(
        "shedding",
        "invalid" if refused else "warning",
        f"{len(shed)} of {len(sent)} requests were turned away (status {shed[0].status}): the others' "
        f"latencies are those of {(1 - share) * evidence.summary.offered_rate:.2f} requests a second, not of "
        f"{evidence.summary.offered_rate:.2f}",
        "raise the queue and concurrency limits of router and servers, or offer a lower rate",
        {"shed": len(shed), "sent": len(sent), "status": shed[0].status},
    )


def failed_elsewhere(evidence: Evidence) -> Finding | None:
    """Failed requests failed at the servers under test, not on the way to them.

    evidence: requests that failed at the client and that no server where they enter has counted. A miss that
    comes from these alone is refused: it is the router's, the network's or a connection limit's.
    limits: needs the servers' counters; a server that counts no failed requests looks the same.
    """
    sent = [record for record in evidence.records if record.sent_s is not None]
    failed = [record for record in sent if _failed(record)]
    entry = evidence.engines.get("prefill") or evidence.engines.get("aggregated")
    if not failed or entry is None or entry.requests is None or entry.requests < 0:
        return None
    cancelled = sum(record.error == "cancelled" for record in sent)
    uncounted = min(len(failed), len(sent) - cancelled - entry.requests)
    if uncounted < max(1.0, evidence.limits.count_tolerance * len(sent)):
        return None
    served = [record for record in evidence.records if not _failed(record)]
    without = replace(evidence, records=served)
    refused = not evidence.attained and bool(served) and without.attained_with(evidence.slo)
    return Finding(
        "failed_elsewhere",
        "invalid" if refused else "warning",
        f"{uncounted:.0f} of the {len(failed)} requests that failed were never counted by the servers: they "
        f"failed on the way, the first as {failed[0].error}",
        "look into the router's log, and for limits on connections, open files and queues before the servers",
        {"failed": len(failed), "uncounted": uncounted, "counted": entry.requests},
    )


def _failed(record: RequestRecord) -> bool:
    return not record.ok and record.error not in ("cancelled", "wrong_length")


def wrong_length(evidence: Evidence) -> Finding | None:
    """Answers have the length that was asked for: none ends early (EOS) and none goes on.

    evidence: the answers' usage against the request. limits: up to 1 % of them are misses and no refusal.
    """
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


def output_miscounted(evidence: Evidence) -> Finding | None:
    """The server made as many tokens as its answers claim.

    evidence: its counter of generated tokens against the usage of all answers. limits: up to one token a
    request may come from prefill, and is not missed; needs the server's counters.
    """
    for role in ("decode", "aggregated"):
        engine = evidence.engines.get(role)
        made = engine.generation_tokens if engine is not None else None
        if engine is None or made is None:
            continue
        tolerance = evidence.limits.output_tolerance
        least = sum(max(0, record.output_len - 1) for record in evidence.records if record.ok)
        claimed = sum(record.output_len for record in evidence.records)
        if made >= least * (1 - tolerance):
            continue
        return Finding(
            "output_miscounted",
            "invalid",
            f"{role} made {made:.0f} output tokens, its answers claim {claimed}",
            "the usage in the answers is wrong, or answers come from another server: compare one by hand",
            {"role": role, "made": made, "claimed": claimed},
        )
    return None


def requests_lost_or_repeated(evidence: Evidence) -> Finding | None:
    """Every request reached prefill and decode exactly once: none was tried again in secret, none lost.

    evidence: the servers' counters of finished requests against the requests sent and answered.
    limits: needs the servers' counters, and servers that nobody else uses.
    """
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


def server_restarted(evidence: Evidence) -> Finding | None:
    """No server was restarted during the trial.

    evidence: a counter that fell, or a start time that changed. limits: needs the servers' metrics.
    """
    for role, engine in evidence.engines.items():
        values = [value for value in engine.to_json().values() if isinstance(value, (int, float))]
        fell = any(value < 0 for value in [*values, *engine.prompt_tokens_by_source.values()])
        if fell or engine.restarts:
            return Finding(
                "server_restarted",
                "invalid",
                f"counters of {role} fell during the trial: a server was restarted"
                if fell
                else f"a server of {role} was restarted during the trial",
                "look into its log for a crash",
                {"role": role, "restarts": engine.restarts},
            )
    return None
