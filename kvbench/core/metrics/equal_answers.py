"""Equal answers to different prompts, and different answers to equal ones: honest, or a fault? Pure.

Honest answers to different prompts may be equal: blank, short, or repeated ones. An answer to the wrong user
equals that of a request that ran at the same time. Two tests hold for any distribution of honest answers:

1. Time. Each text shared by two to four requests belongs to neighbours with a known probability: the share of
   neighbours among all pairs. The tail of the number of such texts is at most that of a binomial distribution
   with the same mean (Hoeffding 1956).
2. Idle. Answers of the idle server and under load have the same distribution. So among the answers that
   another prompt also got, the number of idle ones is hypergeometric.

Both together refuse fewer than 1 in 1,000 honest trials: 10 of 82,041 simulated ones (60 to 600 requests,
steady and bursty, five distributions of texts). Greedy answers to one prompt may differ since sums on GPUs
depend on the batch. So the reference is repeated, alone and in batches, and its own differences are the
measure (``Noise``): log-probabilities where it reports them, else how often its texts differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from kvbench.core.records import Outputs, RequestRecord, TokenChoice
from kvbench.core.stats import binomial_cdf

LONG_TOKENS: Final = 16
"""Shorter answers are not compared: equal texts are too common."""
LONG_BYTES: Final = 32
"""Fewest bytes of a compared text: 16 blank tokens have fewer."""
MOST_EQUAL: Final = 4
"""Most requests that share a text in the time test; more popular answers are excluded."""
NEIGHBOURS: Final = 2
"""Following requests that count as neighbours even after the answer's end: its KV may be stale."""
CERTAIN_TEXTS: Final = 2
"""Fewest neighbouring texts for a refusal: a single one may be a proxy's fault."""
MOST_CHANCE: Final = 0.5
"""Highest chance of neighbours for a text to be informative."""

Text = tuple[int, int]
"""CRC-32 and length in bytes."""


@dataclass(frozen=True)
class EqualAnswers:
    """Equal answers among ``answers`` long ones.

    ``repeated``: answers whose text another prompt got, too. ``texts``: those that two to four requests got
    and that were tested; ``neighbours``: how many of them went to requests under way at the same time.
    ``by_time``, ``by_idle``: the probability that an honest server shows as much. ``idle``: idle answers that
    were compared, of which ``idle_repeated`` had a text that another prompt got. ``pairs``: neighbours' ids.
    """

    answers: int = 0
    repeated: int = 0
    texts: int = 0
    neighbours: int = 0
    expected: float = 0.0
    by_time: float = 1.0
    idle: int = 0
    idle_repeated: int = 0
    by_idle: float = 1.0
    pairs: tuple[tuple[str, str], ...] = ()


def equal_answers(records: Iterable[RequestRecord], idle: Sequence[Text] = ()) -> EqualAnswers:
    """Compare the long answers of a load with each other and with ``idle``, an idle server's answers.
    Canaries have the same prompts as the idle answers, so they are left out of that comparison."""
    long = [record for record in records if is_long(record)]
    chances: list[float] = []
    pairs: list[tuple[str, str]] = []
    for output_len in sorted({reply.output_len for reply in long}):
        alike = sorted(
            (reply for reply in long if reply.output_len == output_len), key=lambda reply: reply.sent_s or 0.0
        )
        _neighbours(alike, chances, pairs)
    expected = math.fsum(chances)
    fresh = [_text(reply) for reply in long if reply.canary is None]
    compared = [text for text in idle if text[1] >= LONG_BYTES]
    idle_repeated, by_idle = _idle_chance(fresh, compared)
    return EqualAnswers(
        answers=len(long),
        repeated=_repetitions([_text(reply) for reply in long]),
        texts=len(chances),
        neighbours=len(pairs),
        expected=expected,
        by_time=_tail(len(pairs), len(chances), expected),
        idle=len(compared),
        idle_repeated=idle_repeated,
        by_idle=by_idle,
        pairs=tuple(pairs),
    )


def is_long(record: RequestRecord) -> bool:
    """Return whether an answer is long enough to compare."""
    long = record.output_len >= LONG_TOKENS and (record.text_bytes or 0) >= LONG_BYTES
    return record.ok and long and record.text_crc is not None and record.sent_s is not None


def _neighbours(alike: Sequence[RequestRecord], chances: list[float], pairs: list[tuple[str, str]]) -> None:
    """Add the chance of each text that two to four of these requests got, and the pairs of neighbours.
    ``alike``: requests of one output length in the order of their sending."""
    n = len(alike)
    positions: dict[Text, list[int]] = {}
    for index, record in enumerate(alike):
        positions.setdefault(_text(record), []).append(index)
    tested = [found for found in positions.values() if 2 <= len(found) <= MOST_EQUAL]
    if not tested:
        return
    starts = np.array([record.sent_s or 0.0 for record in alike])
    ends = np.array([record.last_token_s or record.sent_s or 0.0 for record in alike])
    order = np.arange(n)
    # Last neighbour of each request: it was sent before the request's end, or is among the next ones.
    until = np.minimum(n, np.maximum(np.searchsorted(starts, ends, "right"), order + 1 + NEIGHBOURS))
    of_pair = float((until - order - 1).sum()) / math.comb(n, 2)
    for found in tested:
        chance = math.comb(len(found), 2) * of_pair
        if chance > MOST_CHANCE:
            continue
        chances.append(chance)
        near = next(((one, other) for one, other in pairwise(found) if other < until[one]), None)
        if near is not None:
            pairs.append((alike[near[0]].request_id, alike[near[1]].request_id))


def _tail(seen: int, of: int, expected: float) -> float:
    """Return an upper bound of P(``seen`` or more of ``of``); 1 if the bound does not hold."""
    return 1.0 if seen < expected + 1 else max(0.0, 1.0 - binomial_cdf(seen - 1, of, expected / of))


def _idle_chance(load: Sequence[Text], idle: Sequence[Text]) -> tuple[int, float]:
    """Return how many idle answers equal another prompt's, and the probability of so low a number."""
    every = [*load, *idle]
    counts, repeated = Counter(every), _repetitions(every)
    seen = sum(counts[text] > 1 for text in idle)
    if not idle or not repeated:
        return seen, 1.0
    others = len(every) - repeated
    ways = sum(
        math.comb(repeated, count) * math.comb(others, len(idle) - count)
        for count in range(seen + 1)
        if len(idle) - count <= others
    )
    return seen, ways / math.comb(len(every), len(idle))


def _repetitions(texts: Sequence[Text]) -> int:
    return sum(count for count in Counter(texts).values() if count > 1)


def _text(record: RequestRecord) -> Text:
    return record.text_crc or 0, record.text_bytes or 0


MARGIN: Final = 2.0
"""Factor on the largest observed gap change: a few repeats do not show the maximum."""
SIGNIFICANCE: Final = 0.05


@dataclass(frozen=True)
class Noise:
    """Differences between a server's answers to the same prompts. ``compared`` answers were compared with the
    first ones, ``differed`` of them had another text. ``nats``: the most that the gap between a token and its
    rival changed; None without log-probabilities. ``close``: the share of tokens whose gap is within
    ``MARGIN`` of that."""

    compared: int = 0
    differed: int = 0
    nats: float | None = None
    close: float | None = None

    @property
    def exact(self) -> bool:
        """Return whether the server repeated itself exactly, or was not repeated."""
        return not self.differed and not self.nats

    @property
    def allowed_nats(self) -> float:
        return MARGIN * (self.nats or 0.0)


def noise_of(reference: Outputs) -> Noise:
    compared = differed = 0
    changes: list[float] = []
    for again in reference.repeats:
        for index, text in enumerate(again.texts):
            compared += 1
            differed += text != reference.texts[index]
            if reference.choices and again.choices:
                changes += gap_changes(reference.choices[index], again.choices[index])
    if not changes:
        return Noise(compared, differed)
    nats = max(changes)
    gaps = [gap for one in reference.choices for choice in one if (gap := gap_of(choice)) is not None]
    close = sum(gap <= MARGIN * nats for gap in gaps) / len(gaps) if gaps else None
    return Noise(compared, differed, nats, close)


def gap_of(choice: TokenChoice) -> float | None:
    """Return the log-probability of the token minus the best alternative's."""
    chosen = choice.logprobs.get(choice.token)
    others = [value for token, value in choice.logprobs.items() if token != choice.token]
    return None if chosen is None or not others else chosen - max(others)


def gap_changes(first: Sequence[TokenChoice], again: Sequence[TokenChoice]) -> Iterator[float]:
    """Yield the change of the gap between each token and its rival, up to the first different text. If
    another token was chosen, it is the rival."""
    for one, other in zip(first, again, strict=False):
        rival = other.token if other.token != one.token else _likeliest_other(one)
        values = [choice.logprobs.get(token) for choice in (one, other) for token in (one.token, rival)]
        if None not in values:
            chosen, alternative, chosen_again, alternative_again = (value or 0.0 for value in values)
            yield abs((chosen - alternative) - (chosen_again - alternative_again))
        if other.token != one.token:
            return


def _likeliest_other(choice: TokenChoice) -> str:
    others = {token: value for token, value in choice.logprobs.items() if token != choice.token}
    return max(others, key=lambda token: others[token], default="")


def departure(choices: Sequence[TokenChoice], text: str) -> float | None:
    """Return the gap (nats) at the first token where ``text`` leaves the chosen ones. The rival is the
    likeliest token that continues ``text``. An unlisted token is less likely than all listed ones, so the gap
    is at least theirs."""
    before = ""
    for choice in choices:
        if text.startswith(before + choice.token):
            before += choice.token
            continue
        chosen = choice.logprobs.get(choice.token)
        if chosen is None or not text.startswith(before):
            return None
        taken = [
            value
            for token, value in choice.logprobs.items()
            if token and token != choice.token and text.startswith(before + token)
        ]
        return chosen - (max(taken) if taken else min(choice.logprobs.values()))
    return None


def chance(differ: int, of: int, noise: Noise) -> float:
    """Return the probability of at least ``differ`` different texts of ``of`` if they differ as often as the
    reference's own (Fisher's exact test, one-sided)."""
    total, marked = of + noise.compared, differ + noise.differed
    ways = sum(
        math.comb(marked, k) * math.comb(total - marked, of - k) for k in range(differ, min(of, marked) + 1)
    )
    return ways / math.comb(total, of)


def refused_from(of: int, noise: Noise, below: float = SIGNIFICANCE) -> int | None:
    """Return the least number of differing texts that is not chance."""
    return next((n for n in range(1, of + 1) if chance(n, of, noise) < below), None)


def detectable_fault_share(of: int) -> float:
    """Return the share of outputs that a fault must change to be seen in ``of`` with 95 % probability."""
    return 1.0 - math.pow(SIGNIFICANCE, 1 / max(1, of))
