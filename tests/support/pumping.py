"""Strings that a backtracking regular expression may take long for, made from the expression itself."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

if sys.version_info >= (3, 11):
    import re._constants as sre  # type: ignore[import-not-found]
    from re import _parser as sre_parse  # type: ignore[attr-defined]
else:
    import sre_constants as sre
    import sre_parse

CANDIDATES = "a0_ -A.,:;/=\"'()[]{}<>@+~!#$%^&*|\\\t\n\x00\x1b中é"
ENDS = ("", "!", " a")
MANY = 64
"""Repeats of at least so many may as well be without end."""
VARIANTS = 6


def _in_category(category: Any, char: str) -> bool:
    name = str(category).removeprefix("CATEGORY_").removeprefix("UNI_")
    negated, name = name.startswith("NOT_"), name.removeprefix("NOT_")
    found = {"DIGIT": char.isdigit(), "SPACE": char.isspace(), "WORD": char.isalnum() or char == "_"}[name]
    return found != negated


def _accepts(node: tuple[Any, Any], char: str) -> bool:
    """Whether one node takes one character."""
    kind, value = node
    if kind is sre.LITERAL:
        return value == ord(char)
    if kind is sre.NOT_LITERAL:
        return value != ord(char)
    if kind is sre.ANY:
        return char != "\n"
    if kind is sre.RANGE:
        return value[0] <= ord(char) <= value[1]
    if kind is sre.CATEGORY:
        return _in_category(value, char)
    if kind is sre.IN:
        negated = value[0][0] is sre.NEGATE
        return any(_accepts(member, char) for member in value if member[0] is not sre.NEGATE) != negated
    return False


def _chars_of(node: tuple[Any, Any]) -> Iterator[str]:
    """Characters that a node takes: those that others are likely to take, too, and its own."""
    yield from (char for char in CANDIDATES if _accepts(node, char))
    for kind, value in node[1] if node[0] is sre.IN else [node]:
        if kind is sre.LITERAL:
            yield chr(value)
        elif kind is sre.RANGE:
            yield chr(value[0])


def samples(nodes: Any) -> list[str]:
    """Some strings that a sequence of nodes takes."""
    found = [""]
    for node in nodes:
        found = [one + other for one in found for other in islice(_samples_of(node), VARIANTS)][:VARIANTS]
    return found


def _samples_of(node: tuple[Any, Any]) -> Iterator[str]:
    kind, value = node
    if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        yield from dict.fromkeys(_chars_of(node))
    elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, body = value
        for one in samples(body):
            yield one * max(least, 1)
        if least == 0:
            yield ""
        del most
    elif kind is sre.SUBPATTERN:
        yield from samples(value[-1])
    elif kind is sre.BRANCH:
        for branch in value[1]:
            yield from samples(branch)[:2]
    else:  # an assertion takes nothing
        yield ""


def _repeats(nodes: Any, before: str) -> Iterator[tuple[str, list[str]]]:
    """What leads to each part that may be repeated, and samples of that part."""
    for node in nodes:
        kind, value = node
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            if value[1] is sre.MAXREPEAT or value[1] >= MANY:
                yield before, samples(value[2])
            yield from _repeats(value[2], before)
        elif kind is sre.SUBPATTERN:
            yield from _repeats(value[-1], before)
        elif kind is sre.BRANCH:
            for branch in value[1]:
                yield from _repeats(branch, before)
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            yield from _repeats(value[1], before)
        before += samples([node])[0]


def pumped(pattern: re.Pattern[Any], length: int) -> Iterator[str]:
    """Strings of about ``length`` characters."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    parsed = sre_parse.parse(text, pattern.flags & ~re.UNICODE)
    seen = set()
    for before, bodies in _repeats(parsed, ""):
        for start in {before, ""}:
            for body in bodies:
                if body and (start, body) not in seen:
                    seen.add((start, body))
                    for end in ENDS:
                        yield start + body * (length // len(body)) + end
