"""Sentences that differ only in their numbers, said once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NUMBER: Final = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?![\w])")
"""A number that stands alone: no part of a name such as ``nic3`` or of a size such as ``4K``."""


def joined(sentences: Iterable[str]) -> dict[str, str]:
    """Each sentence → the one that stands for all that differ from it only in numbers.

    Where they differ, the smallest and the largest stand there: ``only 9–18 calls``. Numbers are compared as
    they are written, without thousands separators.
    """
    alike: dict[str, list[str]] = {}
    for sentence in dict.fromkeys(sentences):
        alike.setdefault(_NUMBER.sub("#", sentence), []).append(sentence)
    return {sentence: _range(members) for members in alike.values() for sentence in members}


def _range(sentences: list[str]) -> str:
    places = zip(*(_NUMBER.findall(sentence) for sentence in sentences), strict=True)
    texts = []
    for numbers in places:
        least, most = min(numbers, key=_value), max(numbers, key=_value)
        texts.append(least if least == most else f"{least}–{most}")
    return _NUMBER.sub(lambda _: texts.pop(0), sentences[0])


def _value(number: str) -> float:
    digits = number.replace(",", "")
    return float(digits) if digits.count(".") < 2 else 0.0
