"""Gates on the answers of any server: do they belong to their prompts, and did a model compute them?

They need only the streams, so they work for servers without counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from statistics import median
from typing import Final

from kvbench.core.gates.evidence import Evidence
from kvbench.core.metrics.equal_answers import CERTAIN_TEXTS, equal_answers
from kvbench.core.records import Finding

WORDED_SHARE: Final = 0.05
"""Relative tolerance of a chat's length in tokens: some words have more than one token."""
BOS: Final = 1
"""Tokens that a tokenizer may add."""
LEAST_ANSWERS: Final = 20
"""Fewest answers for a conclusion."""
MOST_LISTED: Final = 3
"""Most wrong answers named in a message."""
MOST_KEPT: Final = 20
"""Most wrong answers stored with a finding."""
IDENTIFYING_TOKENS: Final = 8
"""Shortest answer, in tokens, that identifies its prompt; shorter ones may be equal by chance."""
EQUAL_BY_CHANCE: Final = 0.0005
"""p-value of each of two tests below which equal answers are refused: fewer than 1 in 1,000 honest trials."""
SAME_SHARE: Final = 0.9
"""Share of equal answers from which prompts count as ignored."""
COMPUTED_TOKENS: Final = 2048
"""Length of long prompts, in tokens."""
LONGER: Final = 8
"""Least ratio of long to short prompts."""
LENGTH_SHARE: Final = 1.1
"""Least ratio of their times to the first text."""


def wrong_prompt_length(evidence: Evidence) -> Finding | None:
    """The server read prompts of the length that was sent: none was cut, none got more tokens.

    evidence: `usage.prompt_tokens` of the answers against the token ids sent; 1 % of the answers may be off
    by more than 1 % of their length.
    limits: one token more or less, as a BOS, is a note, and up to 1 % a warning; a server need not report it.
    Chats have a tolerance of 5 %, since their words vary in tokens."""
    answers = [record for record in evidence.records if record.ok and record.prompt_tokens is not None]
    off = Counter((answer.input_len, answer.prompt_tokens or 0) for answer in answers)
    wrong = {pair: count for pair, count in off.items() if pair[0] != pair[1]}
    if not wrong:
        return None
    share = WORDED_SHARE if evidence.worded else evidence.limits.count_tolerance
    outside = sum(n for (sent, read), n in wrong.items() if abs(read - sent) > max(BOS, share * sent))
    near = evidence.worded or all(abs(read - sent) <= BOS for sent, read in wrong)
    level = "note" if near else "warning"
    (sent, read), _ = max(wrong.items(), key=lambda item: item[1])
    count = sum(wrong.values())
    shorter = read < sent
    return Finding(
        "wrong_prompt_length",
        "invalid" if outside > evidence.limits.wrong_length_share * len(answers) else level,  # type: ignore[arg-type]
        f"the server read other prompts than were sent: {count} of {len(answers)} answers report so in their "
        f"usage, mostly {read} prompt tokens where {sent} were sent",
        "it truncates prompts, so latencies are those of shorter ones: raise max_model_len "
        "and disable truncation (truncate_prompt_tokens, --allow-auto-truncate)"
        if shorter
        else "it adds tokens before the prompt (BOS, template) or reads the ids as text: make it "
        "accept token ids, or set input_len to the reported length",
        {"sent": sent, "read": read, "answers": count, "told": len(answers), "far": outside},
    )


def wrong_answers(evidence: Evidence) -> Finding | None:
    """Answers under load are right: those to prompts whose greedy answers were known beforehand.

    evidence: canaries, 2 % of the requests and at least 10, and some asked after failures and at the end; the
    aggregated server's answers, or without one, and weaker, the server's own when idle. Another prompt's
    answer, a stale or a cut one always counts. Any other difference counts if it exceeds the reference's own
    variation under load, in log-probabilities or in frequency. limits: ``power`` is the share of wrong
    answers that would have been detected; a server that is equally wrong when idle is not detected."""
    tally = evidence.canaries
    if tally is None or not tally.checked:
        return None
    if tally.wrong:
        more = f"; and {len(tally.wrong) - MOST_LISTED} more" if len(tally.wrong) > MOST_LISTED else ""
        text = " | ".join(answer.text() for answer in tally.wrong[:MOST_LISTED])
        return Finding(
            "wrong_answers",
            "invalid",
            f"{len(tally.wrong)} of {tally.checked} answers with a known right text were wrong: {text}{more}",
            "answers belong to another prompt, are stale, cut or garbage, and the server reports no "
            "failure: look for "
            "KV blocks freed or reused too early, crossed request ids, and failed transfers",
            {**tally.to_json(), "requests": [asdict(answer) for answer in tally.wrong[:MOST_KEPT]]},
        )
    if tally.of_reference and tally.noisy and not tally.noise.differed and not tally.noise.nats:
        return Finding(
            "wrong_answers",
            "warning",
            f"{tally.noisy} of {tally.checked} answers of the reference differ under load from its "
            "idle answers: this rate is the noise level for the others",
            "batch-dependent kernels cause this; if many answers differ, check the reference",
            tally.to_json(),
        )
    return None


def same_answers(evidence: Evidence) -> Finding | None:
    """Different prompts get different answers: a model computes them from the prompts. evidence: the texts (a
    CRC-32 of each) of at least 20 answers of eight tokens and more, 90 % of which are equal. limits: only a
    warning with dummy weights, which may give equal answers; not run if prompts repeat."""
    found = [
        record.text_crc
        for record in evidence.records
        if record.ok and record.output_len >= IDENTIFYING_TOKENS
    ]
    crcs = [crc for crc in found if crc is not None]
    if len(crcs) < LEAST_ANSWERS or evidence.reuse_expected:
        return None
    count = Counter(crcs).most_common(1)[0][1]
    if count < SAME_SHARE * len(crcs):
        return None
    return Finding(
        "same_answers",
        "warning" if evidence.dummy_weights else "invalid",
        f"{count} of {len(crcs)} answers have the same text, though no two prompts are alike: the server may "
        "not read the prompts at all",
        "with dummy weights this is expected"
        if evidence.dummy_weights
        else "send two prompts by hand: a cache in front, a fixed answer or broken weights look like "
        "this; for dummy weights set deployment.engine_options.dummy_weights=true",
        {"same": count, "answers": len(crcs)},
    )


def repeated_answers(evidence: Evidence) -> Finding | None:
    """No request gets another user's answer.

    evidence: the texts (a CRC-32 and the length of each) of all answers of 16 tokens and 32 bytes and more. A
    trial is refused if concurrent or successive requests got equal answers more often than other requests, or
    if answers under load repeat more often than the idle server's. Each test refuses fewer than 1 in 2,000
    correct trials (core/metrics/equal_answers.py). limits: swapped answers, where each text occurs once, are
    left to the canaries; not run if prompts share beginnings, only a warning with dummy weights."""
    if evidence.reuse_expected:
        return None
    canaries = evidence.canaries
    equal = equal_answers(evidence.records, canaries.idle if canaries is not None else ())
    by_time = equal.by_time < EQUAL_BY_CHANCE and equal.neighbours >= CERTAIN_TEXTS
    by_idle = equal.by_idle < EQUAL_BY_CHANCE
    if not by_time and not by_idle:
        return None
    seen = (
        f"{equal.neighbours} texts occurred twice at about the same time, {equal.expected:.2g} expected by "
        "chance"
        if by_time
        else f"{equal.repeated} of {equal.answers} answers under load repeat another one's text, "
        f"of {equal.idle} idle ones {equal.idle_repeated}"
    )
    named = "".join(f"; {one} and {other} got the same text" for one, other in equal.pairs[:MOST_LISTED])
    return Finding(
        "repeated_answers",
        "warning" if evidence.dummy_weights else "invalid",
        f"requests received answers to other prompts: {seen}{named if by_time else ''}",
        "with dummy weights, equal answers may have other causes"
        if evidence.dummy_weights
        else "another user's answer was sent: look for crossed request ids, KV blocks freed or "
        "reused too early, and a cache in front of the server",
        {
            "answers": equal.answers,
            "repeated": equal.repeated,
            "texts": equal.texts,
            "at_the_same_time": equal.neighbours,
            "expected": round(equal.expected, 4),
            "idle": equal.idle,
            "idle_repeated": equal.idle_repeated,
            "pairs": [list(pair) for pair in equal.pairs[:MOST_KEPT]],
        },
    )


def empty_answers(evidence: Evidence) -> Finding | None:
    """Answers have text: the tokens that the usage counts are there. evidence: answers whose usage counts
    tokens but whose events have no text. More than 1 % of them are refused, because the times of their tokens
    are unknown. limits: a single token may have no text, such as half of a character."""
    counted = [
        record for record in evidence.records if record.output_len > 1 and record.text_bytes is not None
    ]
    empty = [record for record in counted if not record.text_bytes]
    if not empty:
        return None
    share = len(empty) / len(counted)
    return Finding(
        "empty_answers",
        "invalid" if share > evidence.limits.wrong_length_share else "warning",
        f"{len(empty)} of {len(counted)} answers have no text, although their usage counts "
        f"{empty[0].output_len} tokens",
        "send one request by hand: with empty answers or only end-of-sequence tokens "
        "(ignore_eos) there is no TTFT to measure",
        {"empty": len(empty), "answers": len(counted)},
    )


def prompts_unread(evidence: Evidence) -> Finding | None:
    """Longer prompts take longer to their first text, where lengths differ: they are computed.

    evidence: TTFT (from the send) of the shortest and the longest quarter of the prompts, if the long ones
    have 2,048 tokens or more and eight times the length. A warning if the medians are within 10 % of each
    other. limits: not run if all prompts have one length or share beginnings, or if requests queue (90 % of
    the short prompts' TTFTs must be within twice the smallest)."""
    answers = sorted(
        (
            record
            for record in evidence.records
            if record.ok and record.ttft_sent_s is not None and record.stamps
        ),
        key=lambda record: record.input_len,
    )
    quarter = len(answers) // 4
    if quarter < LEAST_ANSWERS or evidence.reuse_expected:
        return None
    short, long = answers[:quarter], answers[-quarter:]
    if long[0].input_len < max(COMPUTED_TOKENS, LONGER * short[-1].input_len):
        return None
    short_s, long_s = (sorted(record.ttft_sent_s or 0.0 for record in part) for part in (short, long))
    if short_s[quarter * 9 // 10] > 2 * short_s[0] or median(long_s) > LENGTH_SHARE * median(short_s):
        return None
    return Finding(
        "prompts_unread",
        "warning",
        f"prompts of {long[0].input_len:,} tokens and more have their first text after "
        f"{1e3 * median(long_s):.2f} ms, those of {short[-1].input_len:,} and less after "
        f"{1e3 * median(short_s):.2f} ms: the prompts may not be computed",
        "look for a cache or a substitute in front of the server, and for truncated prompts",
        {"short_ms": 1e3 * median(short_s), "long_ms": 1e3 * median(long_s), "answers": 2 * quarter},
    )
