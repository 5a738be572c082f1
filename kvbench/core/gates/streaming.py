"""Gates on how answers come: token by token, as they are made, no faster than any model can.

They need nothing but the streams, so that they hold for servers of which kvbench knows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

from kvbench.core.gates.evidence import Evidence
from kvbench.core.metrics.untimed_tokens import AT_ONCE_TOKEN_S, MERGED
from kvbench.core.records import Finding, RequestRecord

LEAST_TOKENS: Final = 4
"""A shorter answer may come at once: what P and D say first is often sent together."""
AT_ONCE_SHARE: Final = 0.05
"""Of the time since the request was sent, in which all of its answer came."""
BUNDLES: Final = 2.0
"""Tokens an event from which on it is no detail any more."""
EARLIER_SHARE: Final = 0.1
EARLIER_S: Final = 1e-3
"""A first event counts as earlier than the first text by more than both: a share of TTFT, and a time."""
STALL: Final = 10.0
"""A gap after the first text that is so many times as long as the others, and longer than TTFT, is no gap."""


def _answers(evidence: Evidence, least: int = LEAST_TOKENS) -> list[RequestRecord]:
    return [each for each in evidence.records if each.ok and each.output_len >= least]


def _received(evidence: Evidence) -> list[RequestRecord]:
    """Those that came over a socket: a simulator may be faster than any model, and holds nothing back."""
    return [each for each in _answers(evidence) if each.stamps]


def answer_at_once(evidence: Evidence) -> Finding | None:
    """Answers come token by token while they are made, and are not buffered until they are done.

    evidence: the time from an answer's first token to its last: at least half of the answers of four tokens
    and more came within 0.1 ms a token, and 5 % of the time since they were sent. Refused where TTFT or TPOT
    is judged: the one is the whole latency then, the other none.
    limits: silent where the load generator itself read too late to tell, and of what came over no socket.
    """
    answers = _received(evidence)
    flushed = [each for each in answers if _at_once(each)]
    if not flushed or 2 * len(flushed) < len(answers) or not evidence.client.reads_in_time:
        return None
    judged = any(evidence.slo.tightest(metric) is not None for metric in ("ttft_ms", "tpot_ms"))
    whole = flushed[0]
    took_ms = 1e3 * _took_s(whole)
    return Finding(
        "answer_at_once",
        "invalid" if judged else "warning",
        f"{len(flushed)} of {len(answers)} answers were buffered and came whole at their end, as "
        f"{whole.output_len} tokens within {took_ms:.2f} ms: TTFT is then the whole latency, and TPOT means "
        "nothing",
        "something on the way collects the stream: turn buffering off in the proxy (nginx: proxy_buffering "
        "off), and see that the server streams; or judge e2el_ms alone",
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


def impossible_answers(evidence: Evidence) -> Finding | None:
    """No answer came faster than any model can make it.

    evidence: the time from a request's sending to its last text, and where it is a stream from its first,
    for each token that came in it: in at least half of the answers no less than 0.1 ms.
    limits: an answer from a list that is given out as slowly as a model's looks like one, unless its text
    shows it; silent where the load generator itself read too late to tell.
    """
    answers = _received(evidence)
    fast = [each for each in answers if _impossible(each)]
    if not fast or 2 * len(fast) < len(answers) or not evidence.client.reads_in_time:
        return None
    one = fast[0]
    whole_ms = 1e3 * ((one.last_token_s or 0.0) - (one.sent_s or 0.0))
    return Finding(
        "impossible_answers",
        "invalid",
        f"no model answers so fast: {len(fast)} of {len(answers)} answers took less than "
        f"{1e3 * AT_ONCE_TOKEN_S:g} ms a token, as {one.output_len} tokens within {whole_ms:.2f} ms",
        "the answers are not computed: look for a cache or a stand-in before the server",
        {"fast": len(fast), "answers": len(answers), "tokens": one.output_len, "whole_ms": whole_ms},
    )


def _impossible(record: RequestRecord) -> bool:
    if record.sent_s is None or record.last_token_s is None:
        return False
    tpot_s = 1.0 if record.tpot_s is None or _at_once(record) else record.tpot_s
    return min(tpot_s, (record.last_token_s - record.sent_s) / record.output_len) < AT_ONCE_TOKEN_S


def tokens_per_event(evidence: Evidence) -> Finding | None:
    """Each event of a stream brings one token.

    evidence: tokens by the answers' usage against the events. limits: a note, and a warning from two tokens
    on where TPOT is judged. TPOT is by the tokens of the usage without those that came with the first text,
    and stays right; ITL is then the time between events.
    """
    streamed = [each for each in evidence.records if each.ok and len(each.itl_s) and each.output_len > 1]
    events, tokens = sum(_events(each) for each in streamed), sum(each.output_len for each in streamed)
    if not events or tokens <= MERGED * events:
        return None
    told = evidence.slo.tightest("tpot_ms") is not None and tokens >= BUNDLES * events
    first = fmean(each.untimed_tokens for each in streamed)
    return Finding(
        "tokens_per_event",
        "warning" if told else "note",
        f"the server sends {tokens / events:.1f} tokens an event: {tokens} tokens came in {events} events. "
        f"TPOT is the time from first text to last for each token that came in it, without the {first:.1f} "
        "that came at its begin; ITL is the time from event to event",
        "for the time of each token, ask the server to send each by itself (vLLM: stream interval 1, no "
        "speculation)",
        {"tokens": tokens, "events": events, "untimed_tokens": first},
    )


def _events(record: RequestRecord) -> int:
    """Events that a token may have been in: those with text, and without as far as they are tokens."""
    with_text = len(record.itl_s) + 1
    return with_text + min(record.empty_events, max(0, record.output_len - with_text))


def inflated_usage(evidence: Evidence) -> Finding | None:
    """The usage does not claim more tokens than the answers can hold.

    evidence: tokens by the usage against events and bytes of text. Each token that is sent in no event of
    its own shares one, and has a byte of the text at least; an answer with fewer bytes than tokens has not
    got them. Refused, since TPOT and all token rates are by these counts.
    limits: tokens of several bytes each may be claimed up to so many times.
    """
    answers = [each for each in _answers(evidence) if each.text_bytes is not None and len(each.itl_s)]
    bundled = [each for each in answers if each.output_len > MERGED * _events(each)]
    inflated = [each for each in bundled if each.output_len > (each.text_bytes or 0)]
    if len(inflated) <= evidence.limits.wrong_length_share * len(answers):
        return None
    one = inflated[0]
    return Finding(
        "inflated_usage",
        "invalid",
        f"the usage claims more tokens than there are: {len(inflated)} of {len(answers)} answers, as "
        f"{one.output_len} tokens in {_events(one)} events with {one.text_bytes} bytes of text: TPOT and "
        "token rates would be by tokens that never came",
        "compare one answer with its usage by hand: what counts the tokens there counts others, too",
        {"inflated": len(inflated), "answers": len(answers), "claimed": one.output_len,
         "events": _events(one), "text_bytes": one.text_bytes},
    )  # fmt: skip


def empty_first_event(evidence: Evidence) -> Finding | None:
    """The first event of a stream brings text.

    evidence: the first event against the first text, at the median of the answers earlier by 10 % of TTFT
    and 1 ms. limits: a warning; TTFT ends at the first text, and is right.
    """
    pairs = [
        (each.first_event_s - each.scheduled_s, each.ttft_s)
        for each in evidence.records
        if each.ok and each.first_event_s is not None and each.ttft_s is not None
    ]
    earlier = [text - event for event, text in pairs if text - event > max(EARLIER_S, EARLIER_SHARE * text)]
    if not earlier or 2 * len(earlier) < len(pairs):
        return None
    event_ms, text_ms = (1e3 * median(values) for values in zip(*pairs, strict=True))
    return Finding(
        "empty_first_event",
        "warning",
        f"{len(earlier)} of {len(pairs)} answers begin with an event without text: TTFT by the first event "
        f"would be {event_ms:.1f} ms at the median, by the first text it is {text_ms:.1f} ms",
        "a figure of another tool that counts any event is not comparable with this TTFT",
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
    limits: a stall that is shorter than TTFT is not seen.
    """
    answers = [each for each in _answers(evidence) if len(each.itl_s) >= LEAST_TOKENS - 1]
    ahead = [each for each in answers if _stalls(each.itl_s, each.ttft_sent_s)]
    if not ahead or 2 * len(ahead) < len(answers):
        return None
    blank = sum(each.first_blank for each in ahead)
    refused = 2 * blank > len(ahead) and evidence.slo.tightest("ttft_ms") is not None
    first_ms = 1e3 * median(each.ttft_s or 0.0 for each in ahead)
    second_ms = 1e3 * median((each.ttft_s or 0.0) + each.itl_s[0] for each in ahead)
    said = f" ({blank} of them blank)" if blank else ""
    return Finding(
        "early_first_token",
        "invalid" if refused else "warning",
        f"the first text is sent ahead: in {len(ahead)} of {len(answers)} answers{said} the next one comes "
        f"long after it; TTFT is {first_ms:.1f} ms at the median, and {second_ms:.1f} ms to the second text",
        "if it is a token of the answer, judge TPOT or e2el_ms, too, which hold the wait; a blank that the "
        "server sends before it begins is none",
        {"ahead": len(ahead), "answers": len(answers), "blank": blank, "ttft_ms": first_ms,
         "second_ms": second_ms},
    )  # fmt: skip


def _stalls(gaps_s: Sequence[float], ttft_s: float | None) -> bool:
    return ttft_s is not None and gaps_s[0] > max(STALL * fmean(gaps_s[1:]), ttft_s, EARLIER_S)
