"""From a command line to a checked scenario, and where that differs from the file's text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
from kvbench.planning.load_files import load_trace, require_fitting, session_source, trace_lengths
from kvbench.planning.scenario_files import load_draft, plain_name, registry

ASK_TIMEOUT_S = 10.0
MOST_NAMED = 12
"""Models that a message lists."""


def served_model(root: str, access: ServerAccess, wanted: str = "") -> str:
    """The model that a server offers; of several the ``wanted`` one.

    Raises ServerError if it cannot be asked, InputError if it serves several and none, or another, was named.
    """
    found = served_models(root, access)
    names = ", ".join(found[:MOST_NAMED]) + (", …" if len(found) > MOST_NAMED else "")
    if wanted and wanted not in found:
        raise InputError(f"{root} serves no model {wanted!r}", hint=f"it serves: {names}")
    if not wanted and len(found) > 1:
        raise InputError(
            f"{root} serves {len(found)} models, so one must be named: {names}",
            hint=f"add --model {found[0]}",
        )
    return wanted or found[0]


def served_models(root: str, access: ServerAccess) -> list[str]:
    """The models of ``/v1/models``, in its order. Raises ServerError with a hint by cause."""
    import httpx  # a tenth of a second, which `kvbench plan` of a scenario need not wait for

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
        said = redact(visible(response.text[:200].strip()), variables(access))
        raise ServerError(
            f"GET {url} answered {status_text(response.status_code)}" + (f": {said}" if said else ""),
            hint=status_hint(response.status_code, "authorization" in {name.lower() for name in headers}),
        )
    try:
        found = [visible(str(each["id"])) for each in web.json_of(response)["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(
            f"GET {url} answered no list of models",
            hint="it is no OpenAI-compatible server, or its API is below another path: the base URL ends "
            "where /v1 begins",
        ) from error
    if not found:
        raise ServerError(f"GET {url} answered an empty list of models", hint="has it loaded one?")
    return found


SMALL_VOCABULARY = 4000
"""Token ids that any server has whose vocabulary cannot be asked; --set model.vocab_size raises it."""


@dataclass(frozen=True)
class CliOptions:
    """The options of ``sweep``, ``bench`` and ``plan``, as they were given."""

    scenario: str = "quickstart"
    overrides: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()
    base_url: str | None = None
    system: str | None = None
    """The command of somebody else's simulator, in place of a scenario (``simulate`` alone)."""
    input_len: str | None = None
    output_len: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float | None = None
    fixed_rate: float | None = None
    concurrency: int | None = None
    """Of a closed loop, in place of ``fixed_rate``."""
    num_requests: int | None = None
    duration_s: float | None = None
    replay: bool = False
    slo: tuple[str, ...] = ()
    method: str | None = None
    rates: str | None = None
    trace: str | None = None
    time_scale: float | None = None
    workers: int | None = None
    endpoint: str | None = None
    direct: bool = False
    both_modes: bool = False
    api_key_env: str | None = None
    model: str | None = None
    headers: tuple[str, ...] = ()
    """``NAME: VALUE`` each."""
    ca_file: str | None = None
    insecure: bool = False
    prefill_metrics_url: str | None = None
    decode_metrics_url: str | None = None


def resolve(cli: CliOptions, *, sessions: bool = True) -> tuple[Scenario, bytes]:
    """The scenario and the bytes that a run folder keeps of it. Raises InputError with all mistakes.

    ``sessions``: who asks can offer them; else a scenario that wants them is refused.
    """
    bare = "--base-url" if cli.base_url is not None else "--system" if cli.system is not None else ""
    if bare:
        text = _system(cli, cli.system or "") if cli.base_url is None else _external(cli, cli.base_url)
        draft, source = read_scenario(text, bare), text.encode()
        own = _load_values(cli)
        overrides = merged(_sections(replace(cli, slo=())), typed_overrides(cli.overrides), own)
    else:
        _require_no_server_options(cli)
        draft, source = load_draft(cli.scenario)
        overrides = merged(_sections(cli), typed_overrides(cli.overrides), _values(cli))
    known = registry()
    draft = draft.put(overrides)
    scenario = draft.checked(known)
    if scenario.workload.sessions and not sessions:
        raise InputError(
            "workload.sessions: this command offers single requests, and the scenario asks for sessions",
            hint="kvbench sweep, bench and simulate take the scenario; or leave sessions out",
        )
    # What only a checked scenario has: its entries of the chosen connectors, and its trace's lengths.
    chosen = {} if bare else _chosen(scenario, cli.connectors)
    if more := merged(_traced(scenario), chosen):
        scenario = draft.put(more).checked(known)
    if scenario.workload.trace:
        require_fitting(scenario, load_trace(scenario.workload.trace))
    if scenario.search.method not in ("fixed", "trace") and not (scenario.slo.given or _is_one_load(cli)):
        raise InputError("the scenario has no SLO, and a search needs one", hint="add --ttft-ms or --tpot-ms")
    return scenario, source


def _require_no_server_options(cli: CliOptions) -> None:
    given = {
        "--model": cli.model,
        "--header": cli.headers,
        "--ca-file": cli.ca_file,
        "--insecure": cli.insecure,
        "--prefill-metrics-url": cli.prefill_metrics_url,
        "--decode-metrics-url": cli.decode_metrics_url,
    }
    if names := [name for name, value in given.items() if value]:
        raise InputError(
            f"{', '.join(names)} {'goes' if len(names) == 1 else 'go'} with a --base-url",
            hint="a scenario says the same in model and in deployment.engine_options",
        )


def _sections(cli: CliOptions) -> Overrides:
    """What stands for a whole section, so that nothing of the scenario's own is left beside it."""
    found: dict[str, Plain] = {}
    if cli.slo:
        found["slo"] = {"limits": list(cli.slo)}
    if cli.trace is not None:
        scale: dict[str, Plain] = {} if cli.time_scale is None else {"time_scale": cli.time_scale}
        found |= {"workload.trace": {"path": cli.trace, **scale}, "search.method": "trace"}
    elif cli.time_scale is not None:
        found["workload.trace.time_scale"] = cli.time_scale
    return merged(found, _method(cli))


def _method(cli: CliOptions) -> Overrides:
    """``--method sustained,burst`` and ``--rates``, which mean a method by themselves."""
    found: dict[str, Plain] = {}
    names = [name.strip() for name in (cli.method or "").split(",") if name.strip()]
    if cli.rates is not None:
        found["search.rates"] = Unread(f"[{cli.rates}]")
        if not names:
            found["search.method"] = "fixed"
    if sorted(names) == ["burst", "sustained"]:
        return found | {"search.method": "sustained", "search.compare_burst": True}
    if len(names) > 1:
        raise InputError(
            f"--method takes one method, or sustained,burst for both, not {cli.method!r}",
            hint="there are: sustained, burst, fixed, trace",
        )
    return found | ({"search.method": Unread(names[0])} if names else {})


def _traced(scenario: Scenario) -> Overrides:
    """A trace's cell is called by the trace's mean lengths, that of sessions by theirs."""
    if scenario.workload.sessions is not None:
        return _of_sessions(scenario.workload.sessions)
    if scenario.workload.trace is None:
        return {}
    input_len, output_len, longest, longest_output = trace_lengths(scenario.workload.trace)
    return {
        "workload.input_len": [input_len],
        "workload.output_len": output_len,
        "workload.trace.longest": longest,
        "workload.trace.longest_output": longest_output,
    }


def _of_sessions(wanted: Sessions) -> Overrides:
    source = session_source(wanted)
    turns = source.turns
    return {
        "workload.input_len": [max(1, round(sum(each.input_len for each in turns) / len(turns)))],
        "workload.output_len": max(1, round(sum(each.output_len for each in turns) / len(turns))),
        "workload.sessions.longest": source.longest_input + source.longest_output,
        "workload.sessions.longest_output": source.longest_output,
    }


def _values(cli: CliOptions) -> Overrides:
    """The options for one value each; what may be anything is read as the file's values are."""
    values: dict[str, Plain] = {
        "workload.input_len": None if cli.input_len is None else Unread(f"[{cli.input_len}]"),
        "workload.output_len": cli.output_len,
        "slo.ttft_ms": cli.ttft_ms,
        "slo.tpot_ms": cli.tpot_ms,
        "slo.attainment": cli.attainment,
        "load.mode": "direct" if cli.direct else None,
        **_load_values(cli),
        "deployment.engine_options.api_key_env": None if cli.api_key_env is None else Unread(cli.api_key_env),
    }
    return {path: value for path, value in values.items() if value is not None}


def _load_values(cli: CliOptions) -> dict[str, Plain]:
    values: dict[str, Plain] = {
        "load.workers": cli.workers,
        "load.endpoint": None if cli.endpoint is None else Unread(cli.endpoint),
        "search.trial_s": cli.duration_s,
        **_counts(cli),
    }
    return {path: value for path, value in values.items() if value is not None}


def _counts(cli: CliOptions) -> dict[str, Plain]:
    """How many requests one trial has at least and at most, where ``bench`` was told."""
    n, closed = cli.num_requests, cli.concurrency is not None
    if n is not None:
        return {"search.min_requests": 1 if closed or cli.duration_s else n, "search.max_requests": n}
    return {"search.min_requests": 1, "search.max_requests": 10_000_000} if cli.duration_s else {}


def _chosen(scenario: Scenario, names: tuple[str, ...]) -> Overrides:
    """The scenario's entries of these names, with their options; a name it lacks is taken with defaults."""
    if not names:
        return {}
    entries = {str(each["label"]): each for each in scenario.resolved()["connectors"]}
    return {"connectors": [entries.get(name, name) for name in dict.fromkeys(names)]}


def _external(cli: CliOptions, base_url: str) -> str:
    """The text of a scenario for a server that is already there. Raises InputError, ServerError."""
    if problem := url_problem(base_url):
        raise InputError(f"--base-url {problem}")
    name = _connector_of(cli, "--base-url", "one base URL")
    if cli.direct or cli.both_modes:
        raise InputError(
            "behind a --base-url only one URL is known, so P and D cannot be asked directly",
            hint="describe the deployment in a scenario, or leave --direct and --router-cost out",
        )
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = _headers(cli.headers)
    access = ServerAccess(cli.api_key_env or "", headers, cli.ca_file or "", cli.insecure)
    served = served_model(root, access, cli.model or "")
    return _bare(cli, "external", name, served, _engine_options(root, name, cli))


def _system(cli: CliOptions, command: str) -> str:
    """The text of a scenario for somebody else's simulator. Raises InputError."""
    if cli.scenario != CliOptions.scenario:
        raise InputError(
            "--system needs no scenario: the command is what is simulated",
            hint="give lengths and SLO by options, or simulate the scenario.yaml of a run of it",
        )
    name = _connector_of(cli, "--system", "one system")
    return _bare(cli, "system", name, "system", {"command": command})


def _connector_of(cli: CliOptions, option: str, one: str) -> str:
    """The one connector of what is measured without a scenario. Raises InputError for what it still needs."""
    missing = [
        option
        for option, value in (("--input-len", cli.input_len), ("--output-len", cli.output_len))
        if value is None and not _own_lengths(cli)
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
    """Whether one load is offered, as ``bench`` does, so that nothing is searched for."""
    return cli.fixed_rate is not None or cli.concurrency is not None


def _own_lengths(cli: CliOptions) -> bool:
    """Whether the load brings its own: a trace, or sessions, which nothing but a ``--set`` asks for here."""
    return cli.trace is not None or any(each.startswith("workload.sessions") for each in cli.overrides)


def _bare(cli: CliOptions, engine: str, connector: str, served: str, options: dict[str, Any]) -> str:
    """The text of a scenario that has nothing but a model served, its workload and its SLO."""
    document = {
        "version": 1,
        "name": engine,
        "model": {"name": plain_name(served), "served_model_name": served, "vocab_size": SMALL_VOCABULARY},
        "deployment": {"engine": engine, "engine_options": options},
        # A server that nothing is known of is called by its model.
        "connectors": [
            {"name": connector, "label": plain_name(served)}
            if engine == "external" and connector == "aggregated"
            else connector
        ],
        "workload": {}
        if _own_lengths(cli)
        else {"input_len": _lengths(cli.input_len or ""), "output_len": cli.output_len},
        "slo": {
            key: value
            for key, value in (
                ("ttft_ms", cli.ttft_ms),
                ("tpot_ms", cli.tpot_ms),
                ("attainment", cli.attainment),
                ("limits", list(cli.slo) or None),
            )
            if value is not None
        },
    }
    return str(yaml.safe_dump(document, sort_keys=False))


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    """The headers of ``--header 'NAME: VALUE'``. Raises InputError."""
    found: dict[str, str] = {}
    for each in given:
        name, mark, value = (part.strip() for part in each.partition(":"))
        if not mark:
            raise InputError(f"--header takes 'NAME: VALUE', not {each.split('=')[0]!r}")
        if problem := header_problem(name, value):
            raise InputError(f"--header: {problem}")
        found[name] = value
    return found


def _engine_options(root: str, connector: str, cli: CliOptions) -> dict[str, Any]:
    options: dict[str, Any] = {"base_url": root}
    if connector == "aggregated":
        options["decode_metrics_url"] = f"{root}/metrics"
    given = {
        "prefill_metrics_url": cli.prefill_metrics_url,
        "decode_metrics_url": cli.decode_metrics_url,
        "api_key_env": cli.api_key_env,
        "headers": _headers(cli.headers),
        "ca_file": cli.ca_file,
        "insecure": cli.insecure,
    }
    options |= {name: value for name, value in given.items() if value}
    if connector == "aggregated" and "prefill_metrics_url" in options:
        raise InputError(
            "--prefill-metrics-url is for a P/D pair, and nothing says which connector it has",
            hint="add --connector, such as --connector nixl",
        )
    return options


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--input-len takes whole numbers with commas between, not {text!r}") from None


def overridden(text: str, scenario: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of a resolved scenario that its file's text does not give, by path.

    A value that only the text gives is None. Returns None if the text alone is no valid scenario.
    """
    try:
        written = parse_scenario(text, "scenario.yaml", registry()).resolved()
    except KvbenchError:
        return None
    pair = (json.loads(json.dumps(each, default=str)) for each in (written, scenario))
    # A file without a name is named after the file.
    return {path: value for path, value in _changed(*pair) if path != "name"}


def _changed(written: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not (isinstance(written, dict) and isinstance(now, dict)):
        if written != now:
            yield path, now
        return
    for key in dict.fromkeys((*written, *now)):
        yield from _changed(written.get(key), now.get(key), f"{path}.{key}" if path else str(key))
