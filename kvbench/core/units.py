"""Sizes, numbers and durations: as a user writes them, and as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Final

from kvbench.errors import InputError

KIB: Final = 1024
MIB: Final = 1024 * KIB
_GIB: Final = 1024 * MIB
_UNITS: Final = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": _GIB, "gib": _GIB}
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_MOST_VALUES: Final = 64


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``4K``, ``64KiB``, ``1M``, ``2G``: powers of 1024. Raises InputError."""
    match = _NUMBER.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InputError(
            f"{text.strip()!r} is not a size",
            hint="expected bytes such as 4096, 4K, 64KiB, 1M or 2G (powers of 1024)",
        )
    size = float(match[1]) * unit
    if size < 1 or size != int(size):
        raise InputError(f"{text.strip()!r} is not a whole number of bytes above 0")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of ``4K,64K,1M`` and of ranges that double, ``4K..64M``; each once. Raises InputError."""
    return _values(text, parse_size, "size")


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers of ``1,2,4,8`` and of ranges that double, ``1..8``; each once. Raises InputError."""
    return _values(text, _count, "number")


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < 1:
        raise InputError(
            f"{text.strip()!r} is not a whole number above 0", hint="expected for example 8, or 1,2,4,8"
        )
    return int(text)


def _values(text: str, parse: Callable[[str], int], what: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not dots:
            found.append(parse(part))
            continue
        low, high = parse(first), parse(last)
        if high < low:
            raise InputError(f"the range {part.strip()!r} is descending", hint="write the smaller end first")
        found += [low << step for step in range((high // low).bit_length())]
        # Doubling may miss the requested end.
        found += [high] if found[-1] != high else []
    unique = tuple(dict.fromkeys(found))
    if len(unique) > _MOST_VALUES:
        raise InputError(f"{len(unique)} values for one {what} are too many; at most {_MOST_VALUES}")
    return unique


def size_text(nbytes: int) -> str:
    """``4 KiB``, ``1.5 MiB``, ``100 B``."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def duration_text(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``1 h 5 min``; rounded up."""
    whole = math.ceil(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def estimate_text(lower_s: float, upper_s: float) -> str:
    """Return a time that is only estimated: ``about 2 h``, ``30 to 45 min``, ``50 s to 2 min``."""
    (low, low_unit), (high, high_unit) = _rounded(lower_s), _rounded(upper_s)
    if (low, low_unit) == (high, high_unit):
        return f"about {low} {low_unit}"
    return f"{low}{'' if low_unit == high_unit else ' ' + low_unit} to {high} {high_unit}"


def _rounded(seconds: float) -> tuple[str, str]:
    """Return a time in two digits, and its unit."""
    for unit, name in ((1, "s"), (60, "min")):
        if round(seconds / unit) < 100:
            return f"{round(seconds / unit)}", name
    return f"{float(f'{seconds / 3600:.2g}'):g}", "h"


_STANDALONE: Final = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?![\w])")
"""A number that stands alone: no part of a name such as ``nic3`` or of a size such as ``4K``."""


def joined(sentences: Iterable[str]) -> dict[str, str]:
    """Map each sentence to one that replaces all sentences with the same words and other numbers. It has the
    smallest and the largest number: ``only 9–18 calls``. Numbers are compared as written, without thousands
    separators."""
    alike: dict[str, list[str]] = {}
    for sentence in dict.fromkeys(sentences):
        alike.setdefault(_STANDALONE.sub("#", sentence), []).append(sentence)
    return {sentence: _range(members) for members in alike.values() for sentence in members}


def _range(sentences: list[str]) -> str:
    positions = zip(*(_STANDALONE.findall(sentence) for sentence in sentences), strict=True)
    texts = []
    for numbers in positions:
        least, most = min(numbers, key=_value), max(numbers, key=_value)
        texts.append(least if least == most else f"{least}–{most}")
    return _STANDALONE.sub(lambda _: texts.pop(0), sentences[0])


def _value(number: str) -> float:
    digits = number.replace(",", "")
    return float(digits) if digits.count(".") < 2 else 0.0
