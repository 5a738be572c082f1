"""What a user asked for on the command line, turned into a checked scenario."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import yaml

from kvbench.core.scenario import Scenario, parse_scenario
from kvbench.errors import InputError, ServerError
from kvbench.scenario_files import find_scenario, load_scenario, registry

ASK_TIMEOUT_S = 10.0
SMALL_VOCABULARY = 4000
"""Token ids that any server has whose vocabulary cannot be asked; --set model.vocab_size raises it."""


@dataclass(frozen=True)
class Wish:
    """The options of ``sweep``, ``bench`` and ``plan``, as they were given."""

    scenario: str = "quickstart"
    overrides: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()
    base_url: str | None = None
    input_len: str | None = None
    output_len: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float | None = None
    fixed_rate: float | None = None


def resolve(wish: Wish) -> tuple[Scenario, bytes]:
    """The scenario and the bytes that a run folder keeps of it. Raises InputError with all mistakes."""
    if wish.base_url is not None:
        return _external(wish, wish.base_url)
    overrides = [*wish.overrides, *_shorthand(wish)]
    scenario, source = load_scenario(wish.scenario, overrides)
    if wish.connectors:
        data, origin = find_scenario(wish.scenario)
        chosen = _chosen_connectors(scenario, wish.connectors)
        overrides.append(f"connectors={json.dumps(chosen)}")
        scenario = parse_scenario(data.decode("utf-8-sig"), origin, registry(), overrides)
    return scenario, source


def _shorthand(wish: Wish) -> list[str]:
    """The short options as overrides of the scenario."""
    values = {
        "workload.input_len": None if wish.input_len is None else f"[{wish.input_len}]",
        "workload.output_len": wish.output_len,
        "slo.ttft_ms": wish.ttft_ms,
        "slo.tpot_ms": wish.tpot_ms,
        "slo.attainment": wish.attainment,
    }
    return [f"{path}={value}" for path, value in values.items() if value is not None]


def _chosen_connectors(scenario: Scenario, names: tuple[str, ...]) -> list[Any]:
    """The scenario's entries of these names, with their options; a name it lacks is taken with defaults."""
    entries = {str(each["label"]): each for each in scenario.resolved()["connectors"]}
    return [entries.get(name, name) for name in dict.fromkeys(names)]


def _external(wish: Wish, base_url: str) -> tuple[Scenario, bytes]:
    """A scenario for a server that is already there, written down as a file would be."""
    if not base_url.startswith(("http://", "https://")):
        raise InputError(f"--base-url must begin with http:// or https://, not {base_url!r}")
    missing = [
        option
        for option, value in (("--input-len", wish.input_len), ("--output-len", wish.output_len))
        if value is None
    ]
    if wish.ttft_ms is None and wish.tpot_ms is None:
        missing.append("--ttft-ms or --tpot-ms")
    if missing:
        raise InputError(f"--base-url also needs {', '.join(missing)}", hint="see `kvbench sweep --help`")
    if len(wish.connectors) > 1:
        raise InputError(
            "one base URL is one deployment, so it has one --connector",
            hint="measure each with a run of its own",
        )
    root = base_url.rstrip("/").removesuffix("/v1")
    name = wish.connectors[0] if wish.connectors else "aggregated"
    document = {
        "version": 1,
        "name": "external",
        "model": {
            "name": "external",
            "served_model_name": served_model(root),
            "vocab_size": SMALL_VOCABULARY,
        },
        "deployment": {"engine": "external", "engine_options": _metrics_urls(root, name)},
        "connectors": [name],
        "workload": {"input_len": _lengths(wish.input_len or ""), "output_len": wish.output_len},
        "slo": {
            key: value
            for key, value in (
                ("ttft_ms", wish.ttft_ms),
                ("tpot_ms", wish.tpot_ms),
                ("attainment", wish.attainment),
            )
            if value is not None
        },
    }
    text = yaml.safe_dump(document, sort_keys=False)
    return parse_scenario(text, "--base-url", registry(), wish.overrides), text.encode()


def _metrics_urls(root: str, connector: str) -> dict[str, str]:
    options = {"base_url": root}
    if connector == "aggregated":
        options["decode_metrics_url"] = f"{root}/metrics"
    return options


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--input-len takes whole numbers with commas between, not {text!r}") from None


def served_model(root: str) -> str:
    """The first model that a server offers. Raises ServerError if it cannot be asked."""
    url = f"{root}/v1/models"
    try:
        response = httpx.get(url, timeout=ASK_TIMEOUT_S)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ServerError(
            f"GET {url} failed: {type(error).__name__} {error}".rstrip(), hint="is the server running there?"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"GET {url} answered no list of models", hint="is it OpenAI-compatible?") from error
