"""Classify a canary's answer, and bound the share of wrong answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args
from zlib import crc32

from kvbench.core.canaries.pool import IDENTIFYING_CHARS, CanaryPool, Proof
from kvbench.core.metrics.equal_answers import (
    SIGNIFICANCE,
    Noise,
    chance,
    departure,
    detectable_fault_share,
    noise_of,
    refused_from,
)
from kvbench.core.records import RequestRecord
from kvbench.core.stats import binomial_cdf, upper_bound

CONFIDENCE: Final = 1.0 - SIGNIFICANCE
NOISE_P_VALUE: Final = 1e-4
"""p-value below which differences are not noise: small, because a run has dozens of trials."""
UNSEEN_NOISE_P_VALUE: Final = 0.01
"""The same limit for a server without log-probabilities and with identical outputs so far."""
_BISECTIONS: Final = 40


def wrong_share_bound(wrong: int, checked: int) -> float:
    """Return the exact binomial 95 % upper bound of the wrong share; 1 if none was checked."""
    return upper_bound(wrong, checked, CONFIDENCE)


def percent_text(share: float) -> str:
    """Return per cent, rounded up to two digits below 10 % and one below 1 %."""
    percent = 100.0 * share
    if percent <= 0:
        return "0 %"
    digits = 0 if percent >= 10 else 1
    while percent < 1 and percent * 10**digits < 1:
        digits += 1
    return f"{math.ceil(percent * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def bound_text(wrong: int, checked: int) -> str:
    """Return for example ``0 of 1,040 wrong: at most 0.3 % (95 % confidence)``."""
    if not checked:
        return "no answers were checked"
    counts = f"{wrong:,} of {checked:,} wrong"
    return f"{counts}: at most {percent_text(wrong_share_bound(wrong, checked))} (95 % confidence)"


def noise_p_value(noise: Noise) -> float:
    """Return the p-value below which differences are not attributed to noise."""
    return NOISE_P_VALUE if noise.differed else UNSEEN_NOISE_P_VALUE


def detectable_share(of: int, noise: Noise, *, singly: bool) -> float:
    """Return the smallest share of wrong answers that ``of`` answers show with 95 % probability; 1 if none.
    ``singly``: each answer is judged by itself, because the right ones are exact or have
    log-probabilities."""
    if of < 1:
        return 1.0
    if singly:
        return detectable_fault_share(of)
    least = refused_from(of, noise, noise_p_value(noise))
    return 1.0 if least is None else found_in_any([(of, least)])


def found_in_any(tests: Sequence[tuple[int, int]]) -> float:
    """Return the smallest share of wrong answers that refuses one of several trials with 95 % probability; 1
    if none does. ``tests``: per trial, the number of checked answers, and of wrong ones that refuse it."""
    possible = [(of, least) for of, least in tests if 0 < least <= of]
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS if possible else 0):
        middle = (low + high) / 2
        unseen = math.prod(binomial_cdf(least - 1, of, middle) for of, least in possible)
        if 1.0 - unseen < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


AROUND_S: Final = 5.0
"""Time before a wrong answer's end in which failures are reported with it, in seconds."""

Kind = Literal["right", "within_noise", "another_prompt", "stale", "cut", "garbage", "unanswered"]
CERTAIN: Final = ("another_prompt", "stale", "cut")
"""Kinds that are wrong regardless of the server's noise."""
WRONG: Final = (*CERTAIN, "garbage")
WORDS: Final[Mapping[str, str]] = {
    "another_prompt": "another prompt's answer",
    "stale": "the stale answer to an earlier prompt",
    "cut": "cut",
    "garbage": "garbage",
}
When = Literal["load", "after_trial", "end_of_cell", "idle"]


@dataclass(frozen=True)
class CanaryAnswer:
    """A canary answer requested besides a load. Times in seconds since the trial's start."""

    number: int
    text: str
    request_id: str = ""
    sent_s: float = 0.0
    ended_s: float = 0.0
    when: When = "after_trial"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> CanaryAnswer:
        """Parse a row. Raises KeyError, TypeError or ValueError if it is malformed."""
        if row["when"] not in get_args(When):
            raise ValueError(f"when is {str(row['when'])[:40]!r}")
        times = float(row["sent_s"]), float(row["ended_s"])
        return cls(int(row["number"]), str(row["text"]), str(row["request_id"]), *times, row["when"])


@dataclass(frozen=True)
class JudgedCanary:
    """A judged answer. ``whose``: the request or prompt it belongs to. ``around``: concurrent events.
    ``gap_nats``: margin of the right answer's token where this one differs."""

    number: int
    request_id: str
    kind: Kind
    when: When = "load"
    sent_s: float = 0.0
    whose: str = ""
    at_char: int = 0
    """Number of correct characters at the beginning."""
    answer: str = ""
    expected: str = ""
    around: str = ""
    gap_nats: float | None = None

    def text(self) -> str:
        what = WORDS[self.kind]
        if self.whose:
            what += f" ({self.whose})"
        elif self.kind == "cut":
            what += f" after {self.at_char} characters"
        elif self.at_char:
            what += f" from character {self.at_char + 1} on"
        occasion = {"load": "", "idle": ", sent before the load"}.get(self.when, ", sent besides the load")
        outputs = f"expected {self.expected[:48]!r}, got {self.answer[:48]!r}"
        return f"{self.request_id} at {self.sent_s:.2f} s{occasion}: {what}; {outputs}" + (
            f"; {self.around}" if self.around else ""
        )


@dataclass(frozen=True)
class CanaryResult:
    """Result of a trial's canaries. ``wrong``: those that refuse it. ``noisy``: those within the reference's
    own variation; ``power``: share of wrong answers detected with 95 % probability."""

    checked: int = 0
    unanswered: int = 0
    noisy: int = 0
    wrong: tuple[JudgedCanary, ...] = ()
    proof: Proof = "reference"
    power: float = 1.0
    refused_from: int = 1
    """Number of differing answers that exceeds noise: 1 if each is judged by itself, 0 if no number does."""
    noise_tested: bool = False
    """Whether differences were compared with the reference's own variation."""
    noise: Noise = field(default_factory=Noise)
    noisy_nats: float | None = None
    """Widest gap among the noisy answers."""
    repeated: bool = False
    """Whether the prompts were sent before without emptying the caches."""
    of_reference: bool = False
    """Whether the reference server itself gave these answers: garbage then counts as its noise."""
    idle: tuple[tuple[int, int], ...] = ()
    """CRC-32 and length of the idle answers, if answers under load must equal them exactly."""

    def to_json(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "wrong": len(self.wrong),
            "noisy": self.noisy,
            "unanswered": self.unanswered,
            "proof": self.proof,
            "power": round(self.power, 6),
            **({"noise_test": {"refused_from": self.refused_from}} if self.noise_tested else {}),
            "repeated": self.repeated,
            "kinds": dict(Counter(answer.kind for answer in self.wrong)),
        }


def judge_canaries(
    pool: CanaryPool,
    records: Sequence[RequestRecord],
    extra: Iterable[CanaryAnswer] = (),
    *,
    of_reference: bool = False,
    repeated: bool = False,
) -> CanaryResult:
    """Judge all canaries of a trial. ``records``: all its requests."""
    judge = _Judge(pool, records)
    judged = [judge.judge_record(record) for record in records if record.canary is not None]
    judged += [judge.judge_extra(canary) for canary in extra]
    answered = [canary for canary in judged if canary.kind != "unanswered"]
    certain = [answer for answer in answered if answer.kind in CERTAIN]
    garbage = [answer for answer in answered if answer.kind == "garbage"]
    noise = noise_of(pool.answers) if of_reference else pool.noise
    doubtful: Sequence[JudgedCanary] = ()
    exact = noise.exact and (bool(pool.answers.choices) or not noise_of(pool.answers).compared)
    if of_reference:
        doubtful = garbage
    elif not exact:
        near = [case for case in garbage if case.gap_nats is not None and case.gap_nats <= noise.allowed_nats]
        unplaced = [canary for canary in garbage if canary.gap_nats is None]
        beyond = chance(len(unplaced), len(answered), noise) < noise_p_value(noise)
        doubtful = near if beyond else [*near, *unplaced]
    singly = exact or bool(pool.answers.choices)
    least = 1 if singly else refused_from(len(answered), noise, noise_p_value(noise)) or 0
    crossed = _swapped_idle_answers(pool)
    wrong = (*crossed, *certain, *(canary for canary in garbage if canary not in doubtful))
    return CanaryResult(
        checked=len(answered) + len(crossed),
        unanswered=len(judged) - len(answered),
        noisy=len(doubtful),
        wrong=tuple(sorted(wrong, key=lambda canary: (canary.when != "load", canary.sent_s))),
        proof=pool.proof,
        power=detectable_share(len(answered), noise, singly=singly),
        refused_from=least,
        noise_tested=not exact and not of_reference,
        noise=noise,
        noisy_nats=max((canary.gap_nats for canary in doubtful if canary.gap_nats is not None), default=None),
        repeated=repeated,
        of_reference=of_reference,
        idle=_idle_texts(pool) if exact and answered and not wrong and not doubtful else (),
    )


def _swapped_idle_answers(pool: CanaryPool) -> list[JudgedCanary]:
    """Return idle answers that belong to another canary: the reference is then untrustworthy."""
    return [
        JudgedCanary(
            number,
            f"idle-canary-{number}",
            "another_prompt",
            "idle",
            whose=f"that of canary prompt {owners[0]}"
            if len(owners) == 1
            else f"the same text for {len(owners) + 1} canary prompts",
            answer=text,
            expected=next((answer for answer in _idle_answers(pool, number) if answer != text), ""),
        )
        for number, owners, text in pool.crossed
    ]


def _idle_answers(pool: CanaryPool, number: int) -> Iterator[str]:
    for outputs in (pool.answers, *pool.answers.repeats):
        if number < len(outputs.texts):
            yield outputs.texts[number]


def _idle_texts(pool: CanaryPool) -> tuple[tuple[int, int], ...]:
    """Return the checksums of the right answers, if all are complete and have the load's lengths."""
    alike = not pool.places and all(pool.whole(number) for number in range(len(pool)))
    return tuple(_checksum(text) for text in pool.answers.texts) if alike else ()


def noise_under_load(pool: CanaryPool, results: Iterable[CanaryResult]) -> CanaryPool:
    """Return the pool with the noise of its own server's canaries under load."""
    seen, known = list(results), pool.under_load
    nats = max((result.noisy_nats for result in seen if result.noisy_nats is not None), default=None)
    under = Noise(
        known.compared + sum(result.checked for result in seen),
        known.differed + sum(result.noisy for result in seen),
        max((gap for gap in (known.nats, nats) if gap is not None), default=None),
    )
    return replace(pool, under_load=under)


class _Judge:
    def __init__(self, pool: CanaryPool, records: Sequence[RequestRecord]) -> None:
        self._pool = pool
        self._records = records
        self._identifying = pool.identifying
        self._by_text: dict[tuple[int, int], list[RequestRecord]] = {}
        for record in records:
            if record.text_crc is not None and (record.text_bytes or 0) >= IDENTIFYING_CHARS:
                self._by_text.setdefault((record.text_crc, record.text_bytes or 0), []).append(record)

    def judge_record(self, record: RequestRecord) -> JudgedCanary:
        number = record.canary or 0
        ended_s = record.last_token_s if record.last_token_s is not None else record.scheduled_s
        canary = CanaryAnswer(
            number, record.text, record.request_id, record.sent_s or record.scheduled_s, ended_s, "load"
        )
        if not self._has_answer(number) or (not record.ok and record.error != "wrong_length"):
            return self._result(canary, "unanswered")
        return self._judge(canary, record)

    def judge_extra(self, canary: CanaryAnswer) -> JudgedCanary:
        known = self._has_answer(canary.number)
        return self._judge(canary, None) if known else self._result(canary, "unanswered")

    def _has_answer(self, number: int) -> bool:
        """Return whether a right answer is usable: an empty one would match the beginning of every text."""
        return number < len(self._pool) and bool(self._pool.right(number))

    def _judge(self, canary: CanaryAnswer, record: RequestRecord | None) -> JudgedCanary:
        right, text = self._pool.right(canary.number), canary.text
        if text.startswith(right):
            return self._result(canary, "right")
        kind, owner = self._owner(canary, record)
        at_char = _common_length(right, text)
        if not kind:
            kind = "cut" if at_char == len(text) else "garbage"
        gap = self._gap(canary) if kind == "garbage" else None
        return replace(
            self._result(canary, kind),
            whose=owner,
            at_char=at_char,
            answer=text,
            expected=right,
            around=around(self._records, canary.sent_s, canary.ended_s, canary.request_id),
            gap_nats=gap,
        )

    def _result(self, canary: CanaryAnswer, kind: Kind) -> JudgedCanary:
        return JudgedCanary(canary.number, canary.request_id, kind, canary.when, round(canary.sent_s, 4))

    def _owner(self, canary: CanaryAnswer, record: RequestRecord | None) -> tuple[Kind | Literal[""], str]:
        """Return kind and owner of an answer that belongs to another prompt; both empty if it does not."""
        text = canary.text
        number = next((n for right, n in self._identifying.items() if text.startswith(right)), None)
        if number is not None:
            owners = [answer for answer in self._records if answer.canary == number]
            return self._by_owners(canary, owners) or ("stale", f"that of canary prompt {number}")
        if record is None or record.text_crc is None:
            return "", ""
        # Other prompts are not stored, only the checksum of each answer's text.
        same = self._by_text.get((record.text_crc, record.text_bytes or 0), [])
        others = [answer for answer in same if answer.request_id != record.request_id]
        if others and len(others) < max(2, len(self._records) // 10):
            return self._by_owners(canary, others) or ("", "")
        other = self._recipient(canary)
        return ("another_prompt", f"crossed with {other.request_id}") if other is not None else ("", "")

    def _by_owners(
        self, canary: CanaryAnswer, owners: Sequence[RequestRecord]
    ) -> tuple[Literal["another_prompt", "stale"], str] | None:
        """Return "another_prompt" if an owner was in flight at the same time, else "stale"; and the owner."""
        for owner in owners:
            ended_s = owner.last_token_s
            if ended_s is None or ended_s >= canary.sent_s:
                return "another_prompt", f"that of {owner.request_id}"
        if owners:
            last = max(owners, key=lambda owner: owner.last_token_s or 0.0)
            ago = canary.sent_s - (last.last_token_s or 0.0)
            return "stale", f"that of {last.request_id}, which had ended {ago:.2f} s before"
        return None

    def _recipient(self, canary: CanaryAnswer) -> RequestRecord | None:
        """Return another request that got this canary's answer."""
        if not self._pool.whole(canary.number):
            return None
        right = self._pool.right(canary.number)
        key = _checksum(right)
        same = self._by_text.get(key, []) if right in self._identifying else []
        return next((record for record in same if record.request_id != canary.request_id), None)

    def _gap(self, canary: CanaryAnswer) -> float | None:
        answers = self._pool.answers
        repeats = (repeat.texts for repeat in answers.repeats)
        if any(canary.number < len(texts) and texts[canary.number] == canary.text for texts in repeats):
            return 0.0
        return departure(answers.choices[canary.number], canary.text) if answers.choices else None


def around(records: Sequence[RequestRecord], sent_s: float, ended_s: float, request_id: str = "") -> str:
    """Describe a request's surroundings: concurrent requests and recent failures."""
    others = [record for record in records if record.request_id != request_id]
    under_way = sum(
        (record.sent_s or record.scheduled_s) <= sent_s
        and (record.last_token_s is None or record.last_token_s >= sent_s)
        for record in others
        if record.ok
    )
    parts = [f"{under_way} others were in flight"]
    failed = [
        record
        for record in others
        if not record.ok
        and record.error != "cancelled"
        and sent_s - AROUND_S <= (record.last_token_s or record.sent_s or record.scheduled_s) <= ended_s
    ]
    if failed:
        counts = Counter(record.error for record in failed)
        named = ", ".join(f"{count} × {error}" for error, count in counts.most_common(3))
        last = max(failed, key=lambda record: record.last_token_s or record.sent_s or record.scheduled_s)
        parts.append(f"failed in the {AROUND_S:g} s before: {named}, last {last.request_id}")
    if cancelled := sum(record.error == "cancelled" for record in others):
        parts.append(f"{cancelled} of the trial's requests were cancelled")
    return "; ".join(parts)


def _common_length(one: str, other: str) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _checksum(text: str) -> tuple[int, int]:
    encoded = text.encode("utf-8", "surrogatepass")
    return crc32(encoded), len(encoded)
