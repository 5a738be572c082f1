"""Written conclusions as data: what a line claims, of which figure, at which input lengths.

``{"line", "text"}`` always; where the sentence is understood also ``metric`` (a figure's name),
``input_len`` (a list), and either ``values`` (connector → value), or ``ahead``, ``behind`` and
``by_percent`` ([least, most]), or ``equal``.

The sentences are in ``claims.yaml``: regular expressions whose named groups are ``at``, or ``low`` and
``high`` (thousands of tokens; none: all lengths), ``ahead`` and ``behind`` (connectors), ``least`` and
``most`` (per cent), ``first`` and ``second`` (figures of ``one`` and ``other``, else of the one ahead and the
one behind), and ``latency``, of which a metric's name is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

_SENTENCES: Final = Path(__file__).with_suffix(".yaml")
_BEGIN: Final = re.compile(r"(?:^|\s)\d\.\s*(?:结论|conclusions?)\s*$", re.IGNORECASE)
_END: Final = re.compile(r"^\d\.\s")
_ITEM: Final = re.compile(r"^[-*•]\s*(?P<text>.+)$")


def read(lines: Sequence[str], connectors: Iterable[str], lengths: Iterable[int]) -> list[dict[str, Any]]:
    """All claims of the section of conclusions. ``connectors`` and ``lengths``: those that were measured."""
    known, measured = list(dict.fromkeys(connectors)), sorted(set(lengths))
    sentences = yaml.safe_load(_SENTENCES.read_text(encoding="utf-8"))
    claims: list[dict[str, Any]] = []
    inside = False
    for line, text in enumerate(lines, start=1):
        stripped = text.strip()
        if _BEGIN.search(stripped):
            inside = True
        elif inside and _END.match(stripped):
            break
        elif inside and (item := _ITEM.match(stripped)):
            written = {"line": line, "text": item["text"]}
            understood = list(_understood(item["text"], sentences, known, measured))
            claims += [{**written, **claim} for claim in understood] or [written]
    return claims


def _understood(
    text: str, sentences: Iterable[Mapping[str, Any]], known: Sequence[str], measured: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for sentence in sentences:
        if match := re.search(sentence["pattern"], text):
            found = match.groupdict()
            claim = _claim(found, sentence, known, measured)
            for metric in sentence["metrics"]:
                yield {"metric": metric.format(latency=found.get("latency", "").lower()), **claim}


def _claim(
    found: Mapping[str, str], sentence: Mapping[str, Any], known: Sequence[str], measured: Sequence[int]
) -> dict[str, Any]:
    claim: dict[str, Any] = {"input_len": list(measured)}
    if "at" in found:
        claim["input_len"] = [1024 * int(found["at"])]
    elif "low" in found:
        low, high = 1024 * int(found["low"]), 1024 * int(found["high"])
        claim["input_len"] = [length for length in measured if low <= length <= high]
    if "ahead" in found:
        claim["ahead"] = found["ahead"].lower()
        others = [each for each in known if each != claim["ahead"]]
        only = others[0] if len(others) == 1 else ""  # of the connectors that were measured
        claim["behind"] = found.get("behind", only).lower()
    if "least" in found:
        claim["by_percent"] = [float(found["least"]), float(found.get("most", found["least"]))]
    if "first" in found:
        one, other = found.get("one", claim.get("ahead", "")), found.get("other", claim.get("behind", ""))
        scale = sentence.get("scale", 1)
        claim["values"] = {
            one.lower(): round(float(found["first"]) * scale, 3),
            other.lower(): round(float(found["second"]) * scale, 3),
        }
    if sentence.get("equal"):
        claim["equal"] = True
    return claim
