"""Written conclusions as data: what a line claims, of which figure, at which input lengths.

``{"line", "text"}`` always; where the sentence is understood also ``metric`` (a figure's name),
``input_len`` (a list), and either ``values`` (connector → value), or ``ahead``, ``behind`` and
``by_percent`` ([least, most]), or ``equal``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

_BEGIN: Final = re.compile(r"(?:^|\s)\d\.\s*(?:结论|conclusions?)\s*$", re.IGNORECASE)
_END: Final = re.compile(r"^\d\.\s")
_ITEM: Final = re.compile(r"^[-*•]\s*(?P<text>.+)$")
_RANGE_AHEAD: Final = re.compile(
    r"(?P<ahead>[A-Za-z]+)(?:\([^)]*\))?\s*在\s*(?P<low>\d+)K~(?P<high>\d+)K\s*输入下\S*胜\s*(?P<behind>[A-Za-z]+)"
    r"\s*[\((]output TPS 高约\s*(?P<least>\d+)-(?P<most>\d+)%"
)
_POINT_AHEAD: Final = re.compile(r"(?P<at>\d+)K\s*处\s*(?P<ahead>[A-Za-z]+)\s*仍领先约\s*(?P<by>\d+)%")
_LATENCY: Final = re.compile(
    r"(?P<metric>TTFT|TPOT|ITL)\s*在\s*(?P<at>\d+)K\s*处\s*(?P<ahead>[A-Za-z]+)\s*优势明显\s*"
    r"[\((](?P<one>[\d.]+)ms vs (?P<other>[\d.]+)ms"
)
_TOTAL: Final = re.compile(
    r"(?P<at>\d+)K\s*处\s*(?P<one>[A-Za-z]+)\s*(?P<first>[\d.]+)K\s*vs\s*(?P<other>[A-Za-z]+)\s*(?P<second>[\d.]+)K"
)
_LEVEL: Final = re.compile(r"(?P<low>\d+)K~(?P<high>\d+)K\s*基本打平")
_PEERS: Final = re.compile(r"TPOT\s*/\s*ITL\s*三者几乎持平")


def read(lines: Sequence[str], connectors: Iterable[str], lengths: Iterable[int]) -> list[dict[str, Any]]:
    """All claims of the section of conclusions. ``connectors`` and ``lengths``: those that were measured."""
    known, measured = list(dict.fromkeys(connectors)), sorted(set(lengths))
    claims: list[dict[str, Any]] = []
    inside = False
    for line, text in enumerate(lines, start=1):
        stripped = text.strip()
        if _BEGIN.search(stripped):
            inside = True
        elif inside and _END.match(stripped):
            break
        elif inside and (item := _ITEM.match(stripped)):
            told = {"line": line, "text": item["text"]}
            parts = list(_parts(item["text"], known, measured))
            claims += [{**told, **part} for part in parts] or [told]
    return claims


def _parts(text: str, known: Sequence[str], measured: Sequence[int]) -> Iterable[dict[str, Any]]:
    if found := _RANGE_AHEAD.search(text):
        yield {
            "metric": "output_throughput",
            "input_len": _between(found["low"], found["high"], measured),
            "ahead": found["ahead"].lower(),
            "behind": found["behind"].lower(),
            "by_percent": [float(found["least"]), float(found["most"])],
        }
    if found := _POINT_AHEAD.search(text):
        by = float(found["by"])
        yield {
            "metric": "output_throughput",
            "input_len": [1024 * int(found["at"])],
            "ahead": found["ahead"].lower(),
            "behind": _other(found["ahead"].lower(), known),
            "by_percent": [by, by],
        }
    if found := _LATENCY.search(text):
        ahead = found["ahead"].lower()
        yield {
            "metric": f"mean_{found['metric'].lower()}_ms",
            "input_len": [1024 * int(found["at"])],
            "ahead": ahead,
            "behind": _other(ahead, known),
            "values": {ahead: float(found["one"]), _other(ahead, known): float(found["other"])},
        }
    if _PEERS.search(text):
        for metric in ("mean_tpot_ms", "mean_itl_ms"):
            yield {"metric": metric, "input_len": list(measured), "equal": True}
    if text.lower().startswith("total token throughput"):
        if found := _LEVEL.search(text):
            between = _between(found["low"], found["high"], measured)
            yield {"metric": "total_token_throughput", "input_len": between, "equal": True}
        if found := _TOTAL.search(text):
            values = {
                found["one"].lower(): round(float(found["first"]) * 1e3, 3),
                found["other"].lower(): round(float(found["second"]) * 1e3, 3),
            }
            yield {
                "metric": "total_token_throughput",
                "input_len": [1024 * int(found["at"])],
                "values": values,
            }


def _between(low: str, high: str, measured: Sequence[int]) -> list[int]:
    return [length for length in measured if 1024 * int(low) <= length <= 1024 * int(high)]


def _other(name: str, known: Sequence[str]) -> str:
    """The only other connector that was measured; empty where there are several, or none."""
    others = [each for each in known if each != name]
    return others[0] if len(others) == 1 else ""
