"""Gates on what answers themselves show, of any server: to this prompt, token by token, and by a model?

They need nothing but the streams, so that they hold for servers of which kvbench knows nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvbench.core.gates.evidence import Evidence
from kvbench.core.records import Finding, RequestRecord

BOS: Final = 1
"""So many tokens of difference are what a tokenizer adds on its own."""
MERGED: Final = 1.05
"""More tokens than this an event, on average, are no accident of a few."""
LEAST_TOKENS: Final = 4
"""A shorter answer may come at once: what P and D say first is often sent together."""
AT_ONCE_TOKEN_S: Final = 1e-4
"""No model decodes one sequence faster than this a token, and a flushed answer comes faster."""
AT_ONCE_SHARE: Final = 0.05
"""Of the time since the request was sent, in which all of its answer came."""
PROMPT_LOOK_MS: Final = 2.5
"""A client that is in time looks at its sockets each millisecond: half of the chunks that it reads together
came within twice that."""
LEAST_ANSWERS: Final = 20
TELLING_TOKENS: Final = 8
"""Shorter answers may be equal by chance."""
SAME_SHARE: Final = 0.9


def wrong_prompt_length(evidence: Evidence) -> Finding | None:
    """The server read prompts of the length that was sent: none was cut, none got more tokens.

    evidence: `usage.prompt_tokens` of the answers against the token ids sent; 1 % of the answers may be off
    by more than 1 % of their length.
    limits: one token more or less, as a BOS, is a note, and up to 1 % a warning; a server need not tell it.
    """
    answers = [each for each in evidence.records if each.ok and each.prompt_tokens is not None]
    off = Counter((each.input_len, each.prompt_tokens or 0) for each in answers)
    wrong = {pair: count for pair, count in off.items() if pair[0] != pair[1]}
    if not wrong:
        return None
    share = evidence.limits.count_tolerance
    far = sum(n for (sent, read), n in wrong.items() if abs(read - sent) > max(BOS, share * sent))
    level = "note" if all(abs(read - sent) <= BOS for sent, read in wrong) else "warning"
    (sent, read), _ = max(wrong.items(), key=lambda item: item[1])
    count = sum(wrong.values())
    shorter = read < sent
    return Finding(
        "wrong_prompt_length",
        "invalid" if far > evidence.limits.wrong_length_share * len(answers) else level,  # type: ignore[arg-type]
        f"the server read other prompts than were sent: {count} of {len(answers)} answers tell so in their "
        f"usage, mostly {read} prompt tokens where {sent} were sent",
        "it cuts prompts, so this is the latency of shorter ones: raise its context length (max_model_len) "
        "and turn truncation off (truncate_prompt_tokens, --allow-auto-truncate)"
        if shorter
        else "it puts tokens before the prompt, as a BOS or a template, or takes the ids for text: have it "
        "take them as they are, or name the input length that it tells",
        {"sent": sent, "read": read, "answers": count, "told": len(answers), "far": far},
    )


def tokens_per_event(evidence: Evidence) -> Finding | None:
    """Each event of a stream brings one token.

    evidence: tokens by the answers' usage against the events with text. limits: a note; TPOT counts tokens
    by usage and stays right, but ITL is then the time between events.
    """
    streamed = [each for each in evidence.records if each.ok and len(each.itl_s) and each.output_len > 1]
    events, tokens = sum(len(each.itl_s) + 1 for each in streamed), sum(each.output_len for each in streamed)
    if not events or tokens <= MERGED * events:
        return None
    return Finding(
        "tokens_per_event",
        "note",
        f"the server sends {tokens / events:.1f} tokens an event: {tokens} tokens came in {events} events "
        "with text. ITL is the time from event to event; TPOT is by the tokens of the usage",
        "for the time of each token, ask the server to send each by itself (vLLM: stream interval 1, no "
        "speculation); tokens without text, as parts of a character, count here, too",
        {"tokens": tokens, "events": events},
    )


def answer_at_once(evidence: Evidence) -> Finding | None:
    """Answers come token by token while they are made, and not whole when they are done.

    evidence: the time from an answer's first token to its last: at least half of the answers of four tokens
    and more came within 0.1 ms a token, and 5 % of the time since they were sent. Refused where TTFT or TPOT
    is judged: the one is the whole latency then, the other none.
    limits: silent where the load generator itself read too late to tell.
    """
    answers = [each for each in evidence.records if each.ok and each.output_len >= LEAST_TOKENS]
    flushed = [each for each in answers if _at_once(each)]
    if not flushed or 2 * len(flushed) < len(answers):
        return None
    if (evidence.client.token_error_p50_ms or 0.0) > PROMPT_LOOK_MS:
        return None  # it may have been the client that let them pile up
    judged = any(evidence.slo.tightest(metric) is not None for metric in ("ttft_ms", "tpot_ms"))
    whole = flushed[0]
    took_ms = 1e3 * ((whole.last_token_s or 0.0) - (whole.first_token_s or 0.0))
    return Finding(
        "answer_at_once",
        "invalid" if judged else "warning",
        f"{len(flushed)} of {len(answers)} answers came whole at their end, as {whole.output_len} tokens "
        f"within {took_ms:.2f} ms: TTFT is then the whole latency, and TPOT means nothing",
        "something on the way collects the stream: turn buffering off in the proxy (nginx: proxy_buffering "
        "off), and see that the server streams; or judge e2el_ms alone",
        {"at_once": len(flushed), "answers": len(answers), "tokens": whole.output_len, "took_ms": took_ms},
    )


def _at_once(record: RequestRecord) -> bool:
    first, last = record.first_token_s, record.last_token_s
    if first is None or last is None:
        return False
    since = record.scheduled_s if record.sent_s is None else record.sent_s
    took_s = last - first
    return took_s <= AT_ONCE_TOKEN_S * record.output_len and took_s <= AT_ONCE_SHARE * (last - since)


def same_answers(evidence: Evidence) -> Finding | None:
    """Different prompts get different answers: what answers is a model, and it reads them.

    evidence: the texts (a CRC-32 of each) of at least 20 answers of eight tokens and more, 90 % of which are
    equal. limits: a warning, as weights that are made up, too, answer all alike; silent where prompts repeat.
    """
    found = [each.text_crc for each in evidence.records if each.ok and each.output_len >= TELLING_TOKENS]
    crcs = [crc for crc in found if crc is not None]
    if len(crcs) < LEAST_ANSWERS or evidence.reuse_expected:
        return None
    count = _most(crcs)
    if count < SAME_SHARE * len(crcs):
        return None
    return Finding(
        "same_answers",
        "warning",
        f"{count} of {len(crcs)} answers have the same text, though no two prompts are alike: the server may "
        "not read them at all",
        "ask it two questions by hand: a cache before it, a canned answer or broken weights look like this; "
        "with dummy weights it means nothing",
        {"same": count, "answers": len(crcs)},
    )


def _most(values: Sequence[int]) -> int:
    """How often the value comes that comes most often."""
    return Counter(values).most_common(1)[0][1]
