"""Create a checked scenario from a command line; find its differences from the file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kvbench.core.access import ServerAccess
from kvbench.core.foreign_text import visible
from kvbench.core.scenario.overrides import Overrides, Unread, merged, typed_overrides
from kvbench.core.scenario.scenario import Scenario, parse_scenario, read_scenario
from kvbench.core.scenario.sections import Sessions
from kvbench.core.scenario.yaml_lines import Plain
from kvbench.engines.external import header_problem, url_problem
from kvbench.errors import InputError, KvbenchError, ServerError
from kvbench.hosts.server_access import access_headers, redact, variables
from kvbench.planning.options import SERVER, Sets, declared, option_name
from kvbench.planning.options import CliOptions as CliOptions
from kvbench.planning.scenario_files import load_draft, plain_name, registry

ASK_TIMEOUT_S = 10.0
MOST_NAMED = 12
"""Maximum models listed in a message."""


def served_model(root: str, access: ServerAccess, wanted: str = "") -> tuple[str, int | None]:
    """Return a server's model, of several the ``wanted`` one, and its max_model_len if reported. Raises
    ServerError without a response, InputError if none or another was named."""
    found = served_models(root, access)
    names = ", ".join(list(found)[:MOST_NAMED]) + (", …" if len(found) > MOST_NAMED else "")
    if wanted and wanted not in found:
        raise InputError(f"{root} serves no model {wanted!r}", hint=f"it serves: {names}")
    if not wanted and len(found) > 1:
        raise InputError(
            f"{root} serves {len(found)} models, so one must be named: {names}",
            hint=f"add --model {next(iter(found))}",
        )
    name = wanted or next(iter(found))
    return name, found[name]


def served_models(root: str, access: ServerAccess) -> dict[str, int | None]:
    """Return model → max_model_len of ``/v1/models``, in order. Raises ServerError with a hint."""
    import httpx  # takes 0.1 s, which `kvbench plan` need not spend

    from kvbench.hosts import web
    from kvbench.hosts.web import failure_hint, status_hint, status_text

    url = f"{root}/v1/models"
    headers = access_headers(access)
    try:
        with web.client(headers=headers, timeout_s=ASK_TIMEOUT_S, access=access) as client:
            response = client.get(url)
    except httpx.HTTPError as error:
        raise ServerError(
            f"GET {url} failed: {type(error).__name__} {error}".rstrip(), hint=failure_hint(url, error)
        ) from error
    if response.status_code != 200:
        detail = redact(visible(response.text[:200].strip()), variables(access))
        raise ServerError(
            f"GET {url} answered {status_text(response.status_code)}" + (f": {detail}" if detail else ""),
            hint=status_hint(response.status_code, "authorization" in {name.lower() for name in headers}),
        )
    try:
        found = {
            visible(str(model["id"])): longest
            if isinstance(longest := model.get("max_model_len"), int) and longest > 0
            else None
            for model in web.json_of(response)["data"]
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(
            f"GET {url} did not return a list of models",
            hint="not an OpenAI-compatible server, or its API has another path: the base URL ends "
            "where /v1 begins",
        ) from error
    if not found:
        raise ServerError(f"GET {url} returned an empty list of models", hint="check that it has loaded one")
    return found


SMALL_VOCABULARY = 4000
"""Token ids that every server with an unknown vocabulary accepts; --set model.vocab_size raises it."""


def resolve(cli: CliOptions, *, sessions: bool = True) -> tuple[Scenario, bytes]:
    """Return the scenario and its bytes for the run folder. ``sessions``: whether the caller supports them.
    Raises InputError with all mistakes."""
    bare = "--base-url" if cli.base_url is not None else "--system" if cli.system is not None else ""
    if bare:
        text = _system(cli, cli.system or "") if cli.base_url is None else _server_scenario(cli, cli.base_url)
        draft, source = read_scenario(text, bare), text.encode()
    else:
        _require_no_server_options(cli)
        draft, source = load_draft(cli.scenario)
    known = registry()
    draft = draft.put(*_overrides(cli))
    scenario = draft.checked(known)
    if scenario.workload.sessions and not sessions:
        raise InputError(
            "workload.sessions: this command sends single requests, but the scenario has sessions",
            hint="use kvbench sweep, bench or simulate; or omit sessions",
        )
    # Available in a checked scenario only: the chosen connectors' entries, and the trace's lengths.
    chosen = {} if bare else _connector_entries(scenario, cli.connectors)
    if more := merged(_lengths_of_load(scenario), chosen):
        scenario = draft.put(more).checked(known)
    if scenario.workload.trace:
        from kvbench.planning.load_files import load_trace, require_fitting

        require_fitting(scenario, load_trace(scenario.workload.trace))
    if scenario.search.method not in ("fixed", "trace") and not (scenario.slo.given or _is_one_load(cli)):
        raise InputError("the scenario has no SLO, and a search needs one", hint="add --ttft-ms or --tpot-ms")
    return scenario, source


def _require_no_server_options(cli: CliOptions) -> None:
    server_only = [field for field in SERVER if field not in ("base_url", "api_key_env")]
    if names := [option_name(field) for field in server_only if getattr(cli, field)]:
        raise InputError(
            f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} with a --base-url",
            hint="a scenario says the same in model and in deployment.engine_options",
        )


def _overrides(cli: CliOptions) -> tuple[Overrides, dict[str, str]]:
    """Return scenario values set by options, and path → option as typed. Whole sections come first, so later
    options change values in them."""
    parts: list[dict[str, Plain]] = [{}, dict(typed_overrides(cli.overrides)), {}]
    typed: dict[str, str] = {}

    def put(part: int, path: str, value: Plain, field: str) -> None:
        parts[part][path] = value
        given = getattr(cli, field)
        words = given if isinstance(given, tuple) else () if given is True else (given,)
        typed[path] = shlex.join((option_name(field), *map(str, words)))

    if cli.slo:
        put(0, "slo", {"limits": list(cli.slo)}, "slo")
    if cli.trace is not None:
        put(0, "workload.trace", {"path": cli.trace}, "trace")
        put(0, "search.method", "trace", "trace")
    if cli.rates is not None:
        put(0, "search.method", "fixed", "rates")
    for path, value in _method(cli).items():
        put(0, path, value, "method")
    typed = {path: option for path, option in typed.items() if path not in parts[1]}
    for field, declarations in declared().items():
        value = getattr(cli, field)
        for sets in declarations:
            if isinstance(sets, Sets) and value is not None and value is not False:
                number = isinstance(value, (int, float)) and value is not True
                put(2, sets.path, value if number else Unread(sets.form.format(value)), field)
    if (n := cli.num_requests) is not None:
        put(2, "search.min_requests", 1 if cli.concurrency or cli.duration_s else n, "num_requests")
        put(2, "search.max_requests", n, "num_requests")
    elif cli.duration_s:
        put(2, "search.min_requests", 1, "duration_s")
        put(2, "search.max_requests", 10_000_000, "duration_s")
    return merged(*parts), typed


def _method(cli: CliOptions) -> Overrides:
    """Values of ``--method``; ``sustained,burst`` measures both."""
    names = [name.strip() for name in (cli.method or "").split(",") if name.strip()]
    if sorted(names) == ["burst", "sustained"]:
        return {"search.method": "sustained", "search.compare_burst": True}
    if len(names) > 1:
        raise InputError(
            f"--method takes one method, or sustained,burst for both, not {cli.method!r}",
            hint="there are: sustained, burst, fixed, trace",
        )
    return {"search.method": Unread(names[0])} if names else {}


def _lengths_of_load(scenario: Scenario) -> Overrides:
    """Set lengths to the means of a trace or of sessions, which name the cell."""
    if scenario.workload.sessions is not None:
        return _of_sessions(scenario.workload.sessions)
    if scenario.workload.trace is None:
        return {}
    from kvbench.planning.load_files import trace_lengths

    input_len, output_len, longest, longest_output = trace_lengths(scenario.workload.trace)
    return {
        "workload.input_len": [input_len],
        "workload.output_len": output_len,
        "workload.trace.longest": longest,
        "workload.trace.longest_output": longest_output,
    }


def _of_sessions(wanted: Sessions) -> Overrides:
    from kvbench.planning.load_files import session_source

    source = session_source(wanted)
    turns = source.turns
    return {
        "workload.input_len": [max(1, round(sum(turn.input_len for turn in turns) / len(turns)))],
        "workload.output_len": max(1, round(sum(turn.output_len for turn in turns) / len(turns))),
        "workload.sessions.longest": source.longest_input + source.longest_output,
        "workload.sessions.longest_output": source.longest_output,
    }


def _connector_entries(scenario: Scenario, names: tuple[str, ...]) -> Overrides:
    """Scenario entries of these names with their options; missing ones get defaults."""
    if not names:
        return {}
    entries = {str(entry["label"]): entry for entry in scenario.resolved()["connectors"]}
    return {"connectors": [entries.get(name, name) for name in dict.fromkeys(names)]}


def _server_scenario(cli: CliOptions, base_url: str) -> str:
    """Scenario text for a running server. Raises InputError, ServerError."""
    if problem := url_problem(base_url):
        raise InputError(f"--base-url {problem}")
    name = _connector_of(cli, "--base-url", "one base URL")
    if cli.direct or cli.both_modes:
        raise InputError(
            "--base-url gives one URL only, so P and D cannot be addressed directly",
            hint="describe the deployment in a scenario, or omit --direct and --router-cost",
        )
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = _headers(cli.headers)
    access = ServerAccess(cli.api_key_env or "", headers, cli.ca_file or "", cli.insecure)
    served, longest = served_model(root, access, cli.model or "")
    options = _engine_options(root, name, cli)
    return _minimal(cli, "external", name, served, options | ({"max_model_len": longest} if longest else {}))


def _system(cli: CliOptions, command: str) -> str:
    """Scenario text for an external simulator. Raises InputError."""
    if cli.scenario != CliOptions.scenario:
        raise InputError(
            "--system accepts no scenario: it simulates the command",
            hint="give lengths and SLO by options, or use the scenario.yaml of an earlier run",
        )
    name = _connector_of(cli, "--system", "one system")
    return _minimal(cli, "system", name, "system", {"command": command})


def _connector_of(cli: CliOptions, option: str, one: str) -> str:
    """The single connector required without a scenario. Raises InputError for missing options."""
    missing = [
        option
        for option, value in (("--input-len", cli.input_len), ("--output-len", cli.output_len))
        if value is None and not _has_lengths(cli)
    ]
    unsearched = cli.rates is not None or cli.trace is not None or _is_one_load(cli)
    if cli.ttft_ms is None and cli.tpot_ms is None and not cli.slo and not unsearched:
        missing.append("--ttft-ms, --tpot-ms or --slo")
    if missing:
        command = "sweep" if cli.base_url is not None else "simulate"
        raise InputError(f"{option} also needs {', '.join(missing)}", hint=f"see `kvbench {command} --help`")
    if len(cli.connectors) > 1:
        raise InputError(
            f"{one} is one deployment, so it has one --connector", hint="measure each with a run of its own"
        )
    return cli.connectors[0] if cli.connectors else "aggregated"


def _is_one_load(cli: CliOptions) -> bool:
    """Whether one load is sent without a search, as for ``bench``."""
    return cli.fixed_rate is not None or cli.concurrency is not None


def _has_lengths(cli: CliOptions) -> bool:
    """Whether the load has its own lengths: a trace, or sessions set by ``--set``."""
    return cli.trace is not None or any(text.startswith("workload.sessions") for text in cli.overrides)


def _minimal(cli: CliOptions, engine: str, connector: str, served: str, options: dict[str, Any]) -> str:
    """Scenario text with a served model, workload and SLO only."""
    document = {
        "version": 1,
        "name": engine,
        "model": {"name": plain_name(served), "served_model_name": served, "vocab_size": SMALL_VOCABULARY},
        "deployment": {"engine": engine, "engine_options": options},
        # An unknown server is named after its model.
        "connectors": [
            {"name": connector, "label": plain_name(served)}
            if options.get("base_url") and connector == "aggregated"
            else connector
        ],
        "workload": {}
        if _has_lengths(cli)
        else {"input_len": _lengths(cli.input_len or ""), "output_len": cli.output_len},
        "slo": {key: getattr(cli, key) for key in ("ttft_ms", "tpot_ms", "attainment") if getattr(cli, key)}
        | ({"limits": list(cli.slo)} if cli.slo else {}),
    }
    return str(yaml.safe_dump(document, sort_keys=False))


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for header in given:
        name, mark, value = (part.strip() for part in header.partition(":"))
        if not mark:
            raise InputError(f"--header takes 'NAME: VALUE', not {header.split('=')[0]!r}")
        if problem := header_problem(name, value):
            raise InputError(f"--header: {problem}")
        found[name] = value
    return found


def _engine_options(root: str, connector: str, cli: CliOptions) -> dict[str, Any]:
    options: dict[str, Any] = {"base_url": root}
    if connector == "aggregated":
        options["decode_metrics_url"] = f"{root}/metrics"
    given = {name: getattr(cli, name) for name in SERVER if name not in ("base_url", "model")}
    given["headers"] = _headers(cli.headers)
    options |= {name: value for name, value in given.items() if value}
    if connector == "aggregated" and "prefill_metrics_url" in options:
        raise InputError(
            "--prefill-metrics-url requires the connector of its P/D pair",
            hint="add --connector, such as --connector nixl",
        )
    return options


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--input-len takes whole numbers with commas between, not {text!r}") from None


def overridden(text: str, scenario: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return path → value for the resolved scenario's differences from its file; None: only in the file.
    Returns None if the file alone is invalid."""
    try:
        written = parse_scenario(text, "scenario.yaml", registry()).resolved()
    except KvbenchError:
        return None
    pair = (json.loads(json.dumps(values, default=str)) for values in (written, scenario))
    # A file without a name is named after the file.
    return {path: value for path, value in _changed(*pair) if path != "name"}


def _changed(written: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not (isinstance(written, dict) and isinstance(now, dict)):
        if written != now:
            yield path, now
        return
    for key in dict.fromkeys((*written, *now)):
        yield from _changed(written.get(key), now.get(key), f"{path}.{key}" if path else str(key))
