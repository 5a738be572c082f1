"""Gates on requests and streams: served once, completely, by the servers under test, token by token.

Gates on streams need nothing else, so they work for servers without counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Final

from kvbench.core.gates.evidence import Evidence, span
from kvbench.core.metrics.metrics import judged_records
from kvbench.core.metrics.untimed_tokens import AT_ONCE_TOKEN_S, MERGED
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.slo import misses_allowed

LEAST_TOKENS: Final = 4
"""Fewest tokens: P's and D's first tokens are often sent together."""
AT_ONCE_SHARE: Final = 0.05
"""Share of the time since sending in which a buffered answer arrives."""
BUNDLES: Final = 2.0
"""Tokens per event from which it is a warning."""
EARLIER_SHARE: Final = 0.1
EARLIER_S: Final = 1e-3
"""An earlier first event exceeds both: a share of TTFT, and a time."""
KNOWN_OF_MEAN: Final = 0.95
"""Share of answers with a known TPOT that a limit on its mean requires."""
STALL: Final = 10.0
"""A first gap this many times the others, and longer than TTFT, shows an early first text."""


def _answers(evidence: Evidence, least: int = LEAST_TOKENS) -> list[RequestRecord]:
    return [record for record in evidence.records if record.ok and record.output_len >= least]


def _socket_requests(evidence: Evidence) -> list[RequestRecord]:
    """Return requests received over a socket: a simulator may be faster than any model."""
    return [answer for answer in _answers(evidence) if answer.stamps]


def answer_at_once(evidence: Evidence) -> Finding | None:
    """Answers come token by token while they are generated, not in one piece at the end.

    evidence: the time from an answer's first token to its last: at least half of the answers of four tokens
    and more came within 0.1 ms a token, and 5 % of the time since they were sent. Refused if TTFT or TPOT is
    judged, since TTFT is then the whole latency and TPOT nearly 0. limits: not judged if the load generator
    itself read too late, or without a socket."""
    answers = _socket_requests(evidence)
    flushed = [answer for answer in answers if _at_once(answer)]
    if not flushed or 2 * len(flushed) < len(answers) or not evidence.client.reads_in_time:
        return None
    judged = any(evidence.slo.tightest(metric) is not None for metric in ("ttft_ms", "tpot_ms"))
    whole = flushed[0]
    took_ms = 1e3 * _took_s(whole)
    return Finding(
        "answer_at_once",
        "invalid" if judged else "warning",
        f"{len(flushed)} of {len(answers)} answers were buffered and arrived whole at their end, for example "
        f"{whole.output_len} tokens within {took_ms:.2f} ms: TTFT is then the whole latency, and TPOT has "
        "no meaning",
        "something in between buffers the stream: disable buffering in the proxy (nginx: proxy_buffering "
        "off), and check that the server streams; or judge e2el_ms only",
        {"at_once": len(flushed), "answers": len(answers), "tokens": whole.output_len, "took_ms": took_ms},
    )


def _took_s(record: RequestRecord) -> float:
    return (record.last_token_s or 0.0) - (record.first_token_s or 0.0)


def _at_once(record: RequestRecord) -> bool:
    if record.first_token_s is None or record.last_token_s is None:
        return False
    since = record.scheduled_s if record.sent_s is None else record.sent_s
    took_s = _took_s(record)
    return took_s <= AT_ONCE_TOKEN_S * record.output_len and took_s <= AT_ONCE_SHARE * (
        record.last_token_s - since
    )


def unknown_tpot(evidence: Evidence) -> Finding | None:
    """TPOT is known wherever it is judged.

    evidence: judged answers of several tokens that all arrived together, so that no time lies between them.
    They count as keeping the limit; refused if they are more than the misses that the SLO allows (5 % if it
    limits the mean). limits: a smaller share is not detected."""
    required = [
        criterion.target if criterion.kind == "share" else KNOWN_OF_MEAN
        for criterion in evidence.slo.all_criteria()
        if any(limit.metric == "tpot_ms" for limit in criterion.limits)
    ]
    judged = judged_records(evidence.records, evidence.summary.window)
    answers = [record for record in judged if record.ok and record.output_len > 1]
    unknown = [answer for answer in answers if answer.tpot_s is None]
    if not required or len(unknown) <= misses_allowed(len(judged), max(required)):
        return None
    return Finding(
        "unknown_tpot",
        "invalid",
        f"TPOT is unknown for {len(unknown)} of {len(answers)} answers: their tokens arrived together, for "
        f"example {unknown[0].output_len} tokens; whether they keep the limit on TPOT cannot be judged",
        "let the server send each token in an event of its own (vLLM: stream interval 1), request more "
        "output tokens, or limit e2el_ms instead of tpot_ms",
        {"unknown": len(unknown), "answers": len(answers), "tokens": unknown[0].output_len},
    )


def impossible_answers(evidence: Evidence) -> Finding | None:
    """No answer came faster than a model can generate it.

    evidence: the time per token from the send to the last text, and in streams from the first text: at least
    0.1 ms in at least half of the answers. limits: canned answers sent at a model's pace pass; not judged if
    the load generator itself read too late."""
    answers = _socket_requests(evidence)
    fast = [answer for answer in answers if _impossible(answer)]
    if not fast or 2 * len(fast) < len(answers) or not evidence.client.reads_in_time:
        return None
    one = fast[0]
    whole_ms = 1e3 * ((one.last_token_s or 0.0) - (one.sent_s or 0.0))
    return Finding(
        "impossible_answers",
        "invalid",
        f"answers are faster than any model: {len(fast)} of {len(answers)} took less than "
        f"{1e3 * AT_ONCE_TOKEN_S:g} ms a token, for example {one.output_len} tokens within {whole_ms:.2f} ms",
        "the answers are not computed: look for a cache or a substitute in front of the server",
        {"fast": len(fast), "answers": len(answers), "tokens": one.output_len, "whole_ms": whole_ms},
    )


def _impossible(record: RequestRecord) -> bool:
    if record.sent_s is None or record.last_token_s is None:
        return False
    tpot_s = 1.0 if record.tpot_s is None or _at_once(record) else record.tpot_s
    return min(tpot_s, (record.last_token_s - record.sent_s) / record.output_len) < AT_ONCE_TOKEN_S


def tokens_per_event(evidence: Evidence) -> Finding | None:
    """Each event of a stream brings one token. evidence: tokens by the answers' usage against the events.
    limits: a note, and a warning from two tokens on where TPOT is judged. TPOT stays right, since it counts
    the usage's tokens without those of the first text; ITL is then the time between events."""
    streamed = [
        record for record in evidence.records if record.ok and len(record.itl_s) and record.output_len > 1
    ]
    events, tokens = sum(_events(reply) for reply in streamed), sum(reply.output_len for reply in streamed)
    if not events or tokens <= MERGED * events:
        return None
    warns = evidence.slo.tightest("tpot_ms") is not None and tokens >= BUNDLES * events
    first = fmean(record.untimed_tokens for record in streamed)
    return Finding(
        "tokens_per_event",
        "warning" if warns else "note",
        f"the server sends {tokens / events:.1f} tokens an event: {tokens} tokens in {events} events. "
        "TPOT is the time from first to last text per token that arrived between them, without the "
        f"{first:.1f} "
        "tokens of the first event; ITL is the time between events",
        "to time single tokens, let the server send each one separately (vLLM: stream interval 1, no "
        "speculation)",
        {"tokens": tokens, "events": events, "untimed_tokens": first},
    )


def _events(record: RequestRecord) -> int:
    """Return the events that may hold a token: those with text, and empty ones up to the token count."""
    with_text = len(record.itl_s) + 1
    return with_text + min(record.empty_events, max(0, record.output_len - with_text))


def inflated_usage(evidence: Evidence) -> Finding | None:
    """The usage does not claim more tokens than the answers can hold.

    evidence: tokens in the usage against events and bytes of text. A token without its own event shares one,
    and has at least one byte of text. Refused if an answer has fewer bytes than tokens, since TPOT and all
    token rates use these counts. limits: tokens of several bytes each can be overstated by that factor."""
    answers = [answer for answer in _answers(evidence) if answer.text_bytes is not None and len(answer.itl_s)]
    bundled = [answer for answer in answers if answer.output_len > MERGED * _events(answer)]
    inflated = [answer for answer in bundled if answer.output_len > (answer.text_bytes or 0)]
    if len(inflated) <= evidence.limits.wrong_length_share * len(answers):
        return None
    one = inflated[0]
    return Finding(
        "inflated_usage",
        "invalid",
        f"the usage claims more tokens than were sent: {len(inflated)} of {len(answers)} answers, for "
        "example "
        f"{one.output_len} tokens in {_events(one)} events with {one.text_bytes} bytes of text: TPOT and "
        "token rates would count tokens that never arrived",
        "compare one answer with its usage by hand: the server's token count is wrong",
        {"inflated": len(inflated), "answers": len(answers), "claimed": one.output_len,
         "events": _events(one), "text_bytes": one.text_bytes},
    )  # fmt: skip


def empty_first_event(evidence: Evidence) -> Finding | None:
    """The first event of a stream brings text. evidence: in the median of the answers the first event
    precedes the first text by 10 % of TTFT and 1 ms. limits: a warning; TTFT ends at the first text, and is
    right."""
    pairs = [
        (record.first_event_s - record.scheduled_s, record.ttft_s)
        for record in evidence.records
        if record.ok and record.first_event_s is not None and record.ttft_s is not None
    ]
    earlier = [text - event for event, text in pairs if text - event > max(EARLIER_S, EARLIER_SHARE * text)]
    if not earlier or 2 * len(earlier) < len(pairs):
        return None
    event_ms, text_ms = (1e3 * median(values) for values in zip(*pairs, strict=True))
    return Finding(
        "empty_first_event",
        "warning",
        f"{len(earlier)} of {len(pairs)} answers begin with an event without text: TTFT to the first event "
        f"would be {event_ms:.1f} ms at the median; to the first text it is {text_ms:.1f} ms",
        "figures from tools that count any event are not comparable with this TTFT",
        {
            "first_event_ms": event_ms,
            "first_text_ms": text_ms,
            "earlier": len(earlier),
            "answers": len(pairs),
        },
    )


def early_first_token(evidence: Evidence) -> Finding | None:
    """The second text follows the first as the others follow each other: the first was not sent ahead.

    evidence: in half of the answers the gap after the first text is ten times the mean of those after it,
    and longer than TTFT. Refused where most of these first texts are blank and TTFT is judged; else a
    warning, as P may send the first token before its KV has come to D.
    limits: a stall shorter than TTFT is not detected."""
    answers = [answer for answer in _answers(evidence) if len(answer.itl_s) >= LEAST_TOKENS - 1]
    ahead = [answer for answer in answers if _stalls(answer.itl_s, answer.ttft_sent_s)]
    if not ahead or 2 * len(ahead) < len(answers):
        return None
    blank = sum(answer.first_blank for answer in ahead)
    refused = 2 * blank > len(ahead) and evidence.slo.tightest("ttft_ms") is not None
    first_ms = 1e3 * median(answer.ttft_s or 0.0 for answer in ahead)
    second_ms = 1e3 * median((answer.ttft_s or 0.0) + answer.itl_s[0] for answer in ahead)
    note = f" ({blank} of them blank)" if blank else ""
    return Finding(
        "early_first_token",
        "invalid" if refused else "warning",
        f"the first text is sent early: in {len(ahead)} of {len(answers)} answers{note} the next one arrives "
        f"much later; TTFT is {first_ms:.1f} ms at the median, and {second_ms:.1f} ms to the second text",
        "if it is a token of the answer, judge TPOT or e2el_ms too, which include the wait; a blank that the "
        "server sends before it begins is not a token",
        {"ahead": len(ahead), "answers": len(answers), "blank": blank, "ttft_ms": first_ms,
         "second_ms": second_ms},
    )  # fmt: skip


def _stalls(gaps_s: Sequence[float], ttft_s: float | None) -> bool:
    return ttft_s is not None and gaps_s[0] > max(STALL * fmean(gaps_s[1:]), ttft_s, EARLIER_S)


SHED_STATUS: Final = frozenset({429, 503})


def failed_requests(evidence: Evidence) -> Finding | None:
    """Requests were answered. evidence: the client's records. limits: a failed request is a miss, and the
    trial counts; only one in which none succeeded is refused, since it says nothing about latency."""
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
        "no request was answered, so this is not a measurement: check the servers' logs"
        if none_succeeded
        else "each failed request counts as a miss; see the servers' logs for the cause",
        {"failed": failed},
    )


def shedding(evidence: Evidence) -> Finding | None:
    """The server accepted all of the load: no 429 or 503 responses. evidence: the status of the answers.
    limits: rejected requests are misses; a trial is refused if it meets the SLO nevertheless, because the
    latencies are those of a lower rate."""
    sent = [record for record in evidence.records if record.sent_s is not None]
    shed = [record for record in sent if record.error == "http_error" and record.status in SHED_STATUS]
    if not shed:
        return None
    share = len(shed) / len(sent)
    refused = share > evidence.limits.shed_share and evidence.attained
    return Finding(
        "shedding",
        "invalid" if refused else "warning",
        f"{len(shed)} of {len(sent)} requests were rejected (status {shed[0].status}): the others' "
        f"latencies are those of {(1 - share) * evidence.summary.offered_rate:.2f} requests a second, not of "
        f"{evidence.summary.offered_rate:.2f}",
        "raise the queue and concurrency limits of router and servers, or offer a lower rate",
        {"shed": len(shed), "sent": len(sent), "status": shed[0].status},
    )


def failed_elsewhere(evidence: Evidence) -> Finding | None:
    """Failed requests failed at the servers under test, not on the way to them.

    evidence: requests that failed at the client and that no receiving server counted. A miss due to these
    alone is refused: router, network or a connection limit caused it. limits: needs the servers' counters; a
    server that counts no failed requests looks the same."""
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
        f"{uncounted:.0f} of the {len(failed)} failed requests were never counted by the servers: they "
        f"failed before reaching them, the first with {failed[0].error}",
        "check the router's log, and limits on connections, open files and queues in front of the servers",
        {"failed": len(failed), "uncounted": uncounted, "counted": entry.requests},
    )


def _failed(record: RequestRecord) -> bool:
    return not record.ok and record.error not in ("cancelled", "wrong_length")


def wrong_length(evidence: Evidence) -> Finding | None:
    """Answers have the requested length: none ends early (EOS) or late. evidence: the answers' usage against
    the request. limits: up to 1 % of them are misses and no refusal."""
    wrong = [record for record in evidence.records if record.error == "wrong_length"]
    if not wrong:
        return None
    share = len(wrong) / (len(wrong) + evidence.summary.completed)
    return Finding(
        "wrong_length",
        "invalid" if share > evidence.limits.wrong_length_share else "warning",
        f"{len(wrong)} of {len(wrong) + evidence.summary.completed} answers had a wrong length, "
        f"for example {wrong[0].output_len} tokens instead of {wrong[0].requested_output_len}",
        "the server must honour ignore_eos and min_tokens, and max_model_len must fit the whole request",
        {"wrong": len(wrong), "share": share},
    )


def output_miscounted(evidence: Evidence) -> Finding | None:
    """The server made as many tokens as its answers claim. evidence: its counter of generated tokens against
    the usage of all answers. limits: up to one token a request may come from prefill, and is not missed;
    needs the server's counters."""
    for role in ("decode", "aggregated"):
        engine = evidence.engines.get(role)
        counted = engine.generation_tokens if engine is not None else None
        if engine is None or counted is None:
            continue
        tolerance = evidence.limits.output_tolerance
        least = sum(max(0, record.output_len - 1) for record in evidence.records if record.ok)
        claimed = sum(record.output_len for record in evidence.records)
        if counted >= least * (1 - tolerance):
            continue
        return Finding(
            "output_miscounted",
            "invalid",
            f"{role} counted {counted:.0f} output tokens, its answers claim {claimed}",
            "the usage in the answers is wrong, or another server answers: compare one by hand",
            {"role": role, "made": counted, "claimed": claimed},
        )
    return None


def requests_lost_or_repeated(evidence: Evidence) -> Finding | None:
    """Every request reached prefill and decode exactly once: no hidden retries, no losses. evidence: the
    servers' counters of finished requests against the requests sent and answered. limits: needs the servers'
    counters, and servers without other users."""
    least, most = evidence.expected(per_token=False)
    for role, engine in evidence.engines.items():
        if engine.requests is None or least <= engine.requests <= most:
            continue
        more = engine.requests > most
        return Finding(
            "hidden_retries" if more else "lost_requests",
            "invalid",
            f"{role} counted {engine.requests:.0f} requests where {span(least, most)} were expected",
            "other clients use this server, or the router retries: stop that"
            if more
            else "requests went to another server: compare the router's list of servers with the deployment",
            {"role": role, "counted": engine.requests, "expected": [least, most]},
        )
    return None


def server_restarted(evidence: Evidence) -> Finding | None:
    """No server was restarted during the trial. evidence: a counter that fell, or a start time that changed.
    limits: needs the servers' metrics."""
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
                "check its log for a crash",
                {"role": role, "restarts": engine.restarts},
            )
    return None
