"""Work notes with result blocks of ``vllm bench serve`` under headings, a section for each connector.

The layout, in any language around it::

    1. Mooncake Transfer engine          ← how it was launched: environment and flags of `vllm serve`
    Mooncake connector                   ← section of results
    Env: 16 * H200, vllm0.13.0
    run_test 1024 1024 75                ← what a script in the notes says; results need not follow it
    Testing input=1024 output=1024 rps=80 num_prompts=400
    ============ Serving Benchmark Result ============
    …
    5. 结论                              ← written conclusions; kept as claims next to their rows

A section without a block is reported. Nothing here judges the claims. A claim is always ``{"line", "text"}``;
where the sentence is understood also ``metric`` (a figure's name), ``input_len`` (a list), and either
``values`` (connector → value), or ``ahead``, ``behind`` and ``by_percent`` ([least, most]), or ``equal``.

The sentences are in ``claims.yaml``: regular expressions whose named groups are ``at``, or ``low`` and
``high`` (thousands of tokens; none: all lengths), ``ahead`` and ``behind`` (connectors), ``least`` and
``most`` (per cent), ``first`` and ``second`` (figures of ``one`` and ``other``, else of the one ahead and the
one behind), and ``latency``, of which a metric's name is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from kvbench.importers.base import Imported, LeftOut, Origin, ServingRow, excerpt, peek, read_lines
from kvbench.importers.parts import vllm_result
from kvbench.importers.parts.vllm_result import DEFINITIONS

_SENTENCES: Final = Path(__file__).parent / "parts" / "claims.yaml"
_BEGIN: Final = re.compile(r"(?:^|\s)\d\.\s*(?:结论|conclusions?)\s*$", re.IGNORECASE)
_END: Final = re.compile(r"^\d\.\s")
_ITEM: Final = re.compile(r"^[-*•]\s*(?P<text>.+)$")


def read_claims(
    lines: Sequence[str], connectors: Iterable[str], lengths: Iterable[int]
) -> list[dict[str, Any]]:
    """Return all claims of the conclusions. ``connectors`` and ``lengths``: those that were measured."""
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
        others = [name for name in known if name != claim["ahead"]]
        only = others[0] if len(others) == 1 else ""  # measured connectors only
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


FORMAT: Final = "notes with result blocks under headings, a section for each connector"
RANK: Final = 5
TOOL: Final = "vllm bench serve"

_SECTION: Final = re.compile(r"^=*\s*(?P<name>[A-Za-z]+) connector\s*$", re.IGNORECASE)
_LAUNCH: Final = re.compile(r"\d\.\s*(?P<name>[A-Za-z]+)(?: Send/Recv)? Transfer Engine\s*$", re.IGNORECASE)
_HEADING: Final = re.compile(
    r"^Testing input=(?P<input>\d+) output=(?P<output>\d+) rps=(?P<rate>[\d.]+) num_prompts=(?P<n>\d+)\s*$"
)
_SCRIPT: Final = re.compile(r"^run_test (?P<input>\d+) (?P<output>\d+) (?P<rate>[\d.]+)\s*$")
_ENVIRONMENT: Final = re.compile(
    r"^Env:\s*(?P<count>\d+)\s*\*\s*(?P<gpu>[A-Za-z0-9]+),\s*vllm\s*(?P<version>[\d.]+)"
)
_SLO: Final = re.compile(
    r"ttft\s*在\s*(?P<ttft>[\d.]+)\s*秒内\W*tpot\s*在\s*(?P<tpot>[\d.]+)\s*ms\s*内", re.IGNORECASE
)
_FLAG: Final = re.compile(r"--(?P<name>[a-z-]+)\s+(?P<value>[^\s\\]+)")
_MODEL: Final = re.compile(r"\bvllm serve\s+(?P<path>\S+)")
_DEVICES: Final = re.compile(r'"rdma_devices":"(?P<list>[^"]+)"')
_UCX: Final = re.compile(r"\bUCX_NET_DEVICES=(?P<list>\S+)")
_INITIALIZE: Final = re.compile(r'engine\.initialize\([^)]*"(?P<protocol>rdma|tcp)"')
_KEPT: Final = {
    "tensor-parallel-size": "tp",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "max-model-len": "max_model_len",
    "kv-cache-dtype": "kv_cache_dtype",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "seed": "engine_seed",
}


def recognise(path: Path) -> bool:
    lines = peek(path).splitlines()
    sections = sum(_SECTION.match(line) is not None for line in lines)
    return (
        bool(sections)
        and any(_HEADING.match(line) for line in lines)
        and any(map(vllm_result.TITLE.search, lines))
    )


def read(path: Path) -> Imported:
    """Return a row for each block, with its heading, the section's connector, and its launch settings."""
    lines = read_lines(path)
    reading = Imported(definitions=dict(DEFINITIONS))
    launches, launch_lines = _launches(lines)
    sections = _sections(lines)
    version = _about(lines, reading)
    before = 0
    for block in vllm_result.blocks(lines):
        connector = next((name for line, name in reversed(sections) if line < block.line), "")
        if block.cut:
            reading.leave_out(block.line, f"a result block is left out: {block.cut}", path.name)
        else:
            row = _row(block, lines, before, Origin(path.name, block.line, block.last_line, TOOL, version))
            row.connector = connector
            row.settings |= launches.get(connector, {})
            reading.rows.append(row)
            reading.problems += [
                LeftOut(at, f"not read: {text[:100]}", path.name) for at, text in block.unreadable
            ]
        before = block.last_line
    _scripts(lines, sections, reading.serving)
    _empty_sections(lines, sections, reading, path.name)
    reading.about["settings_lines"] = launch_lines
    known = [row.connector for row in reading.serving]
    lengths = [row.input_len for row in reading.serving if row.input_len is not None]
    if found := read_claims(lines, known, lengths):
        reading.about["claims"] = found
    return reading


def _row(block: vllm_result.ResultBlock, lines: Sequence[str], before: int, origin: Origin) -> ServingRow:
    row = ServingRow(
        origin, dict(block.figures), request_rate=block.request_rate, unknown=dict(block.unknown)
    )
    for place in range(block.line - 2, before - 1, -1):
        if found := _HEADING.match(lines[place].strip()):
            row.input_len, row.output_len = int(found["input"]), int(found["output"])
            row.num_prompts = int(found["n"])
            row.settings["heading_line"] = place + 1
            if row.request_rate is None:
                row.request_rate = float(found["rate"])
            elif row.request_rate != float(found["rate"]):
                row.settings["heading_request_rate"] = float(found["rate"])
            break
    return row


def _sections(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [
        (line, found["name"].lower())
        for line, text in enumerate(lines, start=1)
        if (found := _SECTION.match(text.strip()))
    ]


def _launches(lines: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, int]]]:
    """Return settings by connector from the chapters on launching, and each setting's line."""
    values: dict[str, dict[str, Any]] = {}
    places: dict[str, dict[str, int]] = {}
    name = ""
    for line, text in enumerate(lines, start=1):
        if found := _LAUNCH.search(text):
            name = found["name"].lower()
        elif _SECTION.match(text.strip()):
            break
        if not name or text.lstrip().startswith("#"):
            continue
        for key, value in _settings(text):
            values.setdefault(name, {})[key] = value
            places.setdefault(name, {})[key] = line
    return values, places


def _settings(text: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for flag in _FLAG.finditer(text):
        if key := _KEPT.get(flag["name"]):
            value = flag["value"]
            found.append((key, int(value) if value.isdigit() else _float(value)))
    if model := _MODEL.search(text):
        found.append(("model", model["path"].rstrip("/").rsplit("/", 1)[-1]))
    if devices := _DEVICES.search(text):
        found.append(("nics", len(devices["list"].split(","))))
    if devices := _UCX.search(text):
        found.append(("nics", devices["list"]))
    if protocol := _INITIALIZE.search(text):
        found.append(("protocol", protocol["protocol"]))
    return found


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _about(lines: Sequence[str], reading: Imported) -> str:
    """Read hardware, SLO and model of the notes; return vLLM's version."""
    version = ""
    for line, text in enumerate(lines, start=1):
        if found := _ENVIRONMENT.match(text.strip()):
            version = found["version"]
            reading.about |= {"gpus": [found["gpu"]] * int(found["count"]), "gpus_line": line}
        if found := _SLO.search(text):
            slo = {"ttft_ms": float(found["ttft"]) * 1e3, "tpot_ms": float(found["tpot"])}
            reading.about |= {"slo": slo, "slo_line": line, "slo_text": excerpt(lines, line, 400)}
        if (found := _MODEL.search(text)) and "model" not in reading.about:
            reading.about["model"] = found["path"].rstrip("/").rsplit("/", 1)[-1]
    return version


def _scripts(lines: Sequence[str], sections: Sequence[tuple[int, str]], rows: Sequence[ServingRow]) -> None:
    """Add the rate of the script above the results to the reported rate."""
    for line, text in enumerate(lines, start=1):
        found = _SCRIPT.match(text.strip())
        connector = next((name for at, name in reversed(sections) if at < line), "")
        if not found or not connector:
            continue
        for row in rows:
            if (row.connector, row.input_len) == (connector, int(found["input"])):
                row.settings["script_request_rate"] = float(found["rate"])
                row.settings["script_line"] = line


def _empty_sections(
    lines: Sequence[str], sections: Sequence[tuple[int, str]], reading: Imported, file: str
) -> None:
    measured = {row.connector for row in reading.serving}
    for line, name in sections:
        if name not in measured:
            reported = excerpt(lines, line + 1, 60)
            text = f"the section of {name} has no result block" + (
                f"; it says {reported!r}" if reported else ""
            )
            reading.leave_out(line, text, file)
            reading.about.setdefault("without_results", []).append(
                {"connector": name, "line": line, "says": reported}
            )
