"""Classify a canary's answer, and bound the share of wrong answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args
from zlib import crc32

from kvbench.core.canaries.pool import TELLING_CHARS, CanaryPool, Proof
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
DOUBTED_BELOW: Final = 1e-4
"""p-value below which differences are not noise: small, because a run has dozens of trials."""
UNSEEN_BELOW: Final = 0.01
"""The same for a server with identical outputs so far and no log-probabilities."""
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
    told = f"{wrong:,} of {checked:,} wrong"
    return f"{told}: at most {percent_text(wrong_share_bound(wrong, checked))} (95 % confidence)"


def noise_p_value(noise: Noise) -> float:
    """Return the p-value below which differences are not attributed to noise."""
    return DOUBTED_BELOW if noise.differed else UNSEEN_BELOW


def detectable_share(of: int, noise: Noise, *, singly: bool) -> float:
    """Return the share of wrong answers that is detected in ``of`` answers with 95 % probability; 1 if none
    is. ``singly``: each answer is judged by itself, because the right ones are exact or have
    log-probabilities."""
    if of < 1:
        return 1.0
    if singly:
        return detectable_fault_share(of)
    least = refused_from(of, noise, noise_p_value(noise))
    return 1.0 if least is None else found_in_any([(of, least)])


def found_in_any(tests: Sequence[tuple[int, int]]) -> float:
    """Return the share of wrong answers that gets one of several trials refused, with 95 % probability; 1 if
    none does. ``tests``: per trial, the answers checked and the number that refuses it."""
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
class AskedCanary:
    """A canary answer requested besides a load. Times in seconds since the trial's start."""

    number: int
    text: str
    request_id: str = ""
    sent_s: float = 0.0
    ended_s: float = 0.0
    when: When = "after_trial"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> AskedCanary:
        """Raises KeyError, TypeError or ValueError for malformed rows."""
        if row["when"] not in get_args(When):
            raise ValueError(f"when is {str(row['when'])[:40]!r}")
        times = float(row["sent_s"]), float(row["ended_s"])
        return cls(int(row["number"]), str(row["text"]), str(row["request_id"]), *times, row["when"])


@dataclass(frozen=True)
class JudgedCanary:
    """``whose``: the request or prompt that the answer belongs to. ``around``: concurrent events.
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
        asked = {"load": "", "idle": ", sent before the load"}.get(self.when, ", sent besides the load")
        shown = f"expected {self.expected[:48]!r}, got {self.answer[:48]!r}"
        return f"{self.request_id} at {self.sent_s:.2f} s{asked}: {what}; {shown}" + (
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
            "kinds": dict(Counter(each.kind for each in self.wrong)),
        }


def judge_canaries(
    pool: CanaryPool,
    records: Sequence[RequestRecord],
    asked: Iterable[AskedCanary] = (),
    *,
    of_reference: bool = False,
    repeated: bool = False,
) -> CanaryResult:
    """Judge all canaries of a trial. ``records``: all its requests."""
    judge = _Judge(pool, records)
    found = [judge.of_record(each) for each in records if each.canary is not None]
    found += [judge.of_asked(each) for each in asked]
    answered = [each for each in found if each.kind != "unanswered"]
    certain = [each for each in answered if each.kind in CERTAIN]
    garbage = [each for each in answered if each.kind == "garbage"]
    noise = noise_of(pool.answers) if of_reference else pool.noise
    doubtful: Sequence[JudgedCanary] = ()
    exact = noise.exact and (bool(pool.answers.choices) or not noise_of(pool.answers).asked)
    if of_reference:
        doubtful = garbage
    elif not exact:
        near = [each for each in garbage if each.gap_nats is not None and each.gap_nats <= noise.allowed_nats]
        unplaced = [each for each in garbage if each.gap_nats is None]
        beyond = chance(len(unplaced), len(answered), noise) < noise_p_value(noise)
        doubtful = near if beyond else [*near, *unplaced]
    singly = exact or bool(pool.answers.choices)
    least = 1 if singly else refused_from(len(answered), noise, noise_p_value(noise)) or 0
    crossed = _swapped_idle_answers(pool)
    wrong = (*crossed, *certain, *(each for each in garbage if each not in doubtful))
    return CanaryResult(
        checked=len(answered) + len(crossed),
        unanswered=len(found) - len(answered),
        noisy=len(doubtful),
        wrong=tuple(sorted(wrong, key=lambda each: (each.when != "load", each.sent_s))),
        proof=pool.proof,
        power=detectable_share(len(answered), noise, singly=singly),
        refused_from=least,
        noise_tested=not exact and not of_reference,
        noise=noise,
        noisy_nats=max((each.gap_nats for each in doubtful if each.gap_nats is not None), default=None),
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
            expected=next((each for each in _idle_answers(pool, number) if each != text), ""),
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
    nats = max((each.noisy_nats for each in seen if each.noisy_nats is not None), default=None)
    under = Noise(
        known.asked + sum(each.checked for each in seen),
        known.differed + sum(each.noisy for each in seen),
        max((each for each in (known.nats, nats) if each is not None), default=None),
    )
    return replace(pool, under_load=under)


class _Judge:
    def __init__(self, pool: CanaryPool, records: Sequence[RequestRecord]) -> None:
        self._pool = pool
        self._records = records
        self._telling = pool.telling
        self._by_text: dict[tuple[int, int], list[RequestRecord]] = {}
        for each in records:
            if each.text_crc is not None and (each.text_bytes or 0) >= TELLING_CHARS:
                self._by_text.setdefault((each.text_crc, each.text_bytes or 0), []).append(each)

    def of_record(self, record: RequestRecord) -> JudgedCanary:
        number = record.canary or 0
        ended_s = record.last_token_s if record.last_token_s is not None else record.scheduled_s
        asked = AskedCanary(
            number, record.text, record.request_id, record.sent_s or record.scheduled_s, ended_s, "load"
        )
        if not self._has_answer(number) or (not record.ok and record.error != "wrong_length"):
            return self._result(asked, "unanswered")
        return self._judge(asked, record)

    def of_asked(self, asked: AskedCanary) -> JudgedCanary:
        known = self._has_answer(asked.number)
        return self._judge(asked, None) if known else self._result(asked, "unanswered")

    def _has_answer(self, number: int) -> bool:
        """Return whether a right answer is usable: an empty one would match the beginning of every text."""
        return number < len(self._pool) and bool(self._pool.right(number))

    def _judge(self, asked: AskedCanary, record: RequestRecord | None) -> JudgedCanary:
        right, text = self._pool.right(asked.number), asked.text
        if text.startswith(right):
            return self._result(asked, "right")
        kind, whose = self._owner(asked, record)
        at_char = _common(right, text)
        if not kind:
            kind = "cut" if at_char == len(text) else "garbage"
        gap = self._gap(asked) if kind == "garbage" else None
        return replace(
            self._result(asked, kind),
            whose=whose,
            at_char=at_char,
            answer=text,
            expected=right,
            around=around(self._records, asked.sent_s, asked.ended_s, asked.request_id),
            gap_nats=gap,
        )

    def _result(self, asked: AskedCanary, kind: Kind) -> JudgedCanary:
        return JudgedCanary(asked.number, asked.request_id, kind, asked.when, round(asked.sent_s, 4))

    def _owner(self, asked: AskedCanary, record: RequestRecord | None) -> tuple[Kind | Literal[""], str]:
        """Return the owner of an answer that belongs to another prompt."""
        text = asked.text
        number = next((n for right, n in self._telling.items() if text.startswith(right)), None)
        if number is not None:
            theirs = [each for each in self._records if each.canary == number]
            return self._by_owners(asked, theirs) or ("stale", f"that of canary prompt {number}")
        if record is None or record.text_crc is None:
            return "", ""
        # Other prompts are not stored, only the checksum of each answer's text.
        same = self._by_text.get((record.text_crc, record.text_bytes or 0), [])
        others = [each for each in same if each.request_id != record.request_id]
        if others and len(others) < max(2, len(self._records) // 10):
            return self._by_owners(asked, others) or ("", "")
        mine = self._recipient(asked)
        return ("another_prompt", f"crossed with {mine.request_id}") if mine is not None else ("", "")

    def _by_owners(
        self, asked: AskedCanary, theirs: Sequence[RequestRecord]
    ) -> tuple[Literal["another_prompt", "stale"], str] | None:
        """Decide by whether the owner was in flight at the same time or had ended."""
        for each in theirs:
            ended_s = each.last_token_s
            if ended_s is None or ended_s >= asked.sent_s:
                return "another_prompt", f"that of {each.request_id}"
        if theirs:
            last = max(theirs, key=lambda each: each.last_token_s or 0.0)
            ago = asked.sent_s - (last.last_token_s or 0.0)
            return "stale", f"that of {last.request_id}, which had ended {ago:.2f} s before"
        return None

    def _recipient(self, asked: AskedCanary) -> RequestRecord | None:
        """Return another request that got this canary's answer."""
        if not self._pool.whole(asked.number):
            return None
        right = self._pool.right(asked.number)
        key = _checksum(right)
        same = self._by_text.get(key, []) if right in self._telling else []
        return next((each for each in same if each.request_id != asked.request_id), None)

    def _gap(self, asked: AskedCanary) -> float | None:
        answers = self._pool.answers
        repeats = (each.texts for each in answers.repeats)
        if any(asked.number < len(texts) and texts[asked.number] == asked.text for texts in repeats):
            return 0.0
        return departure(answers.choices[asked.number], asked.text) if answers.choices else None


def around(records: Sequence[RequestRecord], sent_s: float, ended_s: float, own_id: str = "") -> str:
    """Describe a request's surroundings: concurrent requests and recent failures."""
    others = [each for each in records if each.request_id != own_id]
    under_way = sum(
        (each.sent_s or each.scheduled_s) <= sent_s
        and (each.last_token_s is None or each.last_token_s >= sent_s)
        for each in others
        if each.ok
    )
    parts = [f"{under_way} others were in flight"]
    failed = [
        each
        for each in others
        if not each.ok
        and each.error != "cancelled"
        and sent_s - AROUND_S <= (each.last_token_s or each.sent_s or each.scheduled_s) <= ended_s
    ]
    if failed:
        counts = Counter(each.error for each in failed)
        named = ", ".join(f"{count} × {error}" for error, count in counts.most_common(3))
        last = max(failed, key=lambda each: each.last_token_s or each.sent_s or each.scheduled_s)
        parts.append(f"failed in the {AROUND_S:g} s before: {named}, last {last.request_id}")
    if cancelled := sum(each.error == "cancelled" for each in others):
        parts.append(f"{cancelled} of the trial's requests were cancelled")
    return "; ".join(parts)


def _common(one: str, other: str) -> int:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


def _checksum(text: str) -> tuple[int, int]:
    encoded = text.encode("utf-8", "surrogatepass")
    return crc32(encoded), len(encoded)
