"""Scenario errors as sentences with a line, and checks that concern several values.

The latter find contradictions, and problems of hosts, roles and sessions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kvbench.core.scenario.yaml_lines import Location, Mistake, Node, exists, locate, quoted, shorten
from kvbench.core.slo import SESSION_METRICS, timeout_problem


def host_problems(deployment: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield place and text of each problem with a deployment's hosts, from plain data."""
    hosts, roles = deployment.get("hosts") or {}, deployment.get("roles") or {}
    if not isinstance(hosts, Mapping) or not isinstance(roles, Mapping):
        return
    scheduler = deployment.get("launcher")
    for name in ("slurm", "ray"):
        if scheduler != name and deployment.get(name) is not None:
            yield (name,), f"deployment.{name} is for launcher: {name}"
    if scheduler in ("slurm", "ray"):
        text = f"launcher {scheduler} finds the hosts itself; set in deployment.{scheduler} what they need"
        for key, given in (("hosts", hosts), ("roles", any(roles.values()))):
            if given:
                yield (key,), text
        return
    if deployment.get("launcher", "local") == "local":
        if hosts:
            yield ("hosts",), "deployment.hosts need launcher: ssh"
        return
    if not hosts:
        yield ("launcher",), f"launcher {deployment['launcher']} needs deployment.hosts and deployment.roles"
        return
    needed = ("loadgen",) if deployment.get("engine") == "external" else ("prefill", "decode")
    for role in needed:
        if not roles.get(role):
            yield ("roles",), f"deployment.roles.{role} must name a host of deployment.hosts"
    used = set()
    for role, names in roles.items():
        for name in _names_in(names):
            used.add(name)
            if name not in hosts:
                text = f"no host is called {quoted(str(name))}; there are: {', '.join(map(str, hosts))}"
                yield ("roles", str(role)), f"deployment.roles.{role}: {text}"
    yield from _spanning(deployment, roles)
    for name in used if len(used) > 1 else ():
        host = hosts.get(name)
        address = str(host.get("address", "")) if isinstance(host, Mapping) else ""
        if address == "localhost" or address.startswith("127."):
            text = f"{address} is a local address on each host, and there are several hosts"
            yield ("hosts", str(name), "address"), f"deployment.hosts.{name}.address: {text}"


def _names_in(names: Any) -> list[str]:
    """Return the names of a role's hosts, including those that an instance spans."""
    entries = [names] if isinstance(names, str) else names or ()
    return [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry or ())]


SPAN_HOSTS: Final = ("vllm", "sglang")
"""Engines that have instances over several hosts."""


def _spanning(
    deployment: Mapping[str, Any], roles: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield problems of instances over several hosts."""
    engine = deployment.get("engine", "emulated")
    for role in ("prefill", "decode", "aggregated"):
        entries = roles.get(role) or ()
        groups = [entry for entry in entries if isinstance(entry, (list, tuple)) and len(entry) > 1]
        for group in () if isinstance(entries, str) else groups:
            shown, where = ", ".join(map(str, group)), f"deployment.roles.{role}"
            if len(set(map(str, group))) < len(group):
                yield ("roles", role), f"{where}: [{shown}] names a host twice"
            elif engine not in SPAN_HOSTS:
                yield ("roles", role), f"{where}: an instance of the {engine} engine runs on one host"


def session_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield place and text of each problem with sessions."""
    workload, search = (_section(data, name) for name in ("workload", "search"))
    wanted = workload.get("sessions")
    if wanted is None:
        for place, metric in _limited(data):
            yield place, f"a limit on {metric} is for a load of sessions: give workload.sessions, or drop it"
        return
    if not isinstance(wanted, Mapping):
        return
    location, source = ("workload", "sessions"), wanted.get("source", "shape")
    if source in ("recorded", "fitted") and not wanted.get("path"):
        yield (*location, "source"), f"source {source} needs workload.sessions.path, a corpus"
    if source == "shape" and wanted.get("path"):
        yield (*location, "path"), "a corpus is for source recorded or fitted, and the source is shape"
    if source != "shape" and wanted.get("shape") is not None:
        yield (*location, "shape"), f"shape is for source shape, and the source is {source}"
    if workload.get("trace") is not None:
        yield location, "a workload has a trace or sessions, not both"
    if (method := search.get("method", "sustained")) not in ("sustained", "fixed"):
        yield ("search", "method"), f"sessions are for method sustained or fixed, and the method is {method}"
    load = _section(data, "load")
    if load.get("endpoint", "completions") != "completions":
        yield ("load", "endpoint"), "sessions are sent as completions of token ids: leave load.endpoint out"
    if load.get("workers", "auto") not in ("auto", 1):
        yield ("load", "workers"), "sessions are sent by one load generator: leave load.workers out"
    if search.get("compare_burst"):
        yield ("search", "compare_burst"), "the burst method offers single requests, not sessions"


def _limited(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    slo = _section(data, "slo")
    tiers = _section(slo, "tiers")
    places = [(("slo", "limits"), slo), *((("slo", "tiers", name), tiers[name]) for name in tiers)]
    for place, section in places:
        limits = section.get("limits") if isinstance(section, Mapping) else None
        for metric in SESSION_METRICS:
            if any(
                metric in str(limit) for limit in (limits if isinstance(limits, (list, tuple)) else [limits])
            ):
                yield place, metric


SHAPELESS: Final = {
    "external": ("an external server has no known P and D", "an external server is there"),
    "system": ("a simulator has none", "a simulator is an external program"),
}
"""Engines that need no model shape → why they have no direct mode, and no engines to count."""


@dataclass(frozen=True)
class DataMistake:
    """An error in plain data: its place and text. ``Mistake`` adds the line."""

    location: Location
    text: str
    other: Location = ()
    """Place of the contradicting value, which is named if only that one is in the file."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests a known word."""
    options = list(known)
    lowered = {option.lower(): option for option in options}
    if close := difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6):
        return f"did you mean `{lowered[close[0]]}`?"
    return f"there are: {', '.join(options)}" if options else "there are none"


# ---------------------------------------------------------------- contradictions between values


def contradictions(data: Mapping[str, Any]) -> list[DataMistake]:
    """Return values that contradict each other; ``data`` may be incomplete or invalid."""
    return [
        *_shapes(data),
        *_slo(data),
        *(
            DataMistake(("workload", "request_timeout_s"), text, ("slo",))
            for text in [timeout_problem(data)]
            if text
        ),
        *_methods(data),
        *_search(data),
        *_labels(data),
        *_lengths(data),
        *(
            DataMistake(("deployment", *place), text)
            for place, text in host_problems(_section(data, "deployment"))
        ),
        *(DataMistake(place, text) for place, text in session_problems(data)),
    ]


def _shapes(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    """Yield what an engine without a known model shape cannot have, and a shape that others lack."""
    deployment, model = _section(data, "deployment"), data.get("model")
    engine = deployment.get("engine", "emulated")  # as written: it may be anything
    if why := SHAPELESS.get(engine) if isinstance(engine, str) else None:
        if _section(data, "load").get("mode") == "direct":
            text = f"load.mode direct needs P and D's own URLs, and {why[0]}"
            yield DataMistake(("load", "mode"), text)
        if deployment.get("aggregated") is not None:
            text = f"deployment.aggregated counts engines that kvbench starts, and {why[1]}"
            yield DataMistake(("deployment", "aggregated"), text, ("deployment", "engine"))
    elif isinstance(model, Mapping) and not model.get("layers", "preset" in model):  # presets have layers
        text = f"the {engine} engine needs the model's shape: layers with kv_heads and head_dim, or mla_dim"
        yield DataMistake(("model",), text)


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _slo(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    slo = data.get("slo", {})
    if not isinstance(slo, Mapping):
        return
    tiers = slo.get("tiers") or {}
    if not isinstance(tiers, Mapping):
        return
    keys = [key for key in ("ttft_ms", "tpot_ms", "limits") if slo.get(key)]
    if tiers and keys:
        yield DataMistake(
            ("slo", keys[0]), f"slo.{keys[0]} conflicts with slo.tiers: move it into the tiers it applies to"
        )
    elif not tiers and not keys and _needs_slo(data):
        if "slo" in data:
            yield DataMistake(("slo",), "slo needs a limit: ttft_ms, tpot_ms, or both")
        else:
            yield DataMistake((), "the scenario needs the key `slo`")
    for name, tier in tiers.items():
        if isinstance(tier, Mapping) and not any(tier.get(key) for key in ("ttft_ms", "tpot_ms", "limits")):
            yield DataMistake(
                ("slo", "tiers", name), f"slo.tiers.{name} needs a limit: ttft_ms, tpot_ms or limits"
            )
    if slo.get("tpot_ms") is not None and _section(data, "workload").get("output_len") == 1:
        yield DataMistake(("slo", "tpot_ms"), "a request with output_len 1 has no tpot; drop tpot_ms")


def _needs_slo(data: Mapping[str, Any]) -> bool:
    """Return whether the scenario needs an SLO.

    Fixed rates, replays and a fixed load on an external server (with an empty SLO) need none."""
    search = _section(data, "search")
    if _section(data, "deployment").get("engine") == "external" and "slo" in data:
        return False
    return search.get("method", "sustained") not in ("fixed", "trace")


def _methods(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    search, workload = _section(data, "search"), _section(data, "workload")
    method, rates = search.get("method", "sustained"), search.get("rates")
    if method == "fixed" and not rates:
        yield DataMistake(("search", "method"), "method fixed needs search.rates, such as [1, 2, 4]")
    if method != "fixed" and rates:
        text = f"search.rates are for method fixed, and the method is {method}"
        yield DataMistake(("search", "rates"), text, ("search", "method"))
    if method == "trace" and workload.get("trace") is None:
        yield DataMistake(("search", "method"), "method trace needs workload.trace with a path")
    if method != "trace" and workload.get("trace") is not None:
        text = f"workload.trace is for method trace, and the method is {method}"
        yield DataMistake(("workload", "trace"), text, ("search", "method"))
    if search.get("compare_burst") and method != "sustained":
        text = f"search.compare_burst needs method sustained, and the method is {method}"
        yield DataMistake(("search", "compare_burst"), text, ("search", "method"))
    slo = _section(data, "slo")
    if slo.get("tiers") and (method == "burst" or search.get("compare_burst")):
        text = "the burst method supports one SLO, not tiers"
        yield DataMistake(("search", "compare_burst" if search.get("compare_burst") else "method"), text)


def _search(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    search = _section(data, "search")
    for low, high in (
        ("min_rate", "max_rate"),
        ("min_rate", "start_rate"),
        ("start_rate", "max_rate"),
        ("min_requests", "max_requests"),
    ):
        small, large = _number(search.get(low)), _number(search.get(high))
        if small is not None and large is not None and small > large:
            text = f"search.{low} ({small:g}) is above search.{high} ({large:g})"
            yield DataMistake(("search", low), text, ("search", high))


def _labels(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    connectors = data.get("connectors")
    seen: dict[str, int] = {}
    for index, connector in enumerate(connectors if isinstance(connectors, list) else []):
        label = (
            (connector.get("label") or connector.get("name")) if isinstance(connector, Mapping) else connector
        )
        if not isinstance(label, str):
            continue
        if label in seen:
            text = f"the label {quoted(label)} is taken by connectors.{seen[label]}"
            text += "; give one a `label:` of its own"
            yield DataMistake(("connectors", index), text)
        seen.setdefault(label, index)


def _lengths(data: Mapping[str, Any]) -> Iterator[DataMistake]:
    workload = _section(data, "workload")
    if workload.get("trace") is not None or workload.get("sessions") is not None:
        return  # its own lengths count, and are checked when it is read
    lengths = workload.get("input_len")
    if not isinstance(lengths, list):
        lengths = [lengths]
    output_len = _number(workload.get("output_len"))
    longest = _number(_section(_section(data, "deployment"), "engine_options").get("max_model_len"))
    seen: set[float] = set()
    for index, value in enumerate(lengths):
        length = _number(value)
        if length is None:
            continue
        if length in seen:
            yield DataMistake(("workload", "input_len", index), f"the input length {length:g} is given twice")
        seen.add(length)
        if longest is not None and output_len is not None and length + output_len > longest:
            text = (
                f"input_len {length:g} and output_len {output_len:g} together exceed "
                f"the engine's max_model_len of {longest:g}"
            )
            yield DataMistake(("workload", "input_len", index), text)


# ---------------------------------------------------------------- pydantic's errors in words

_WANTED: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of `key: value` lines",
    "model_type": "a mapping of `key: value` lines",
    "model_attributes_type": "a mapping of `key: value` lines",
}
_BOUND: Final = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(
    error: ValidationError,
    root: Node,
    keys: Mapping[str, Sequence[str]],
    known: Sequence[Mistake],
    what: str = "the scenario",
) -> list[Mistake]:
    """Return a mistake for each error that ``known`` does not cover.

    ``keys``: keys allowed in each mapping, by dotted path. ``what``: the file's name in messages."""
    covered = {mistake.location for mistake in known if mistake.final}
    return [
        Mistake(locate(root, problem.location, key=by_key), problem.location, problem.text)
        for problem, by_key in _sentences(error, keys, what)
        if problem.location not in covered
    ]


def locate_conflicts(problems: Iterable[DataMistake], root: Node, known: Sequence[Mistake]) -> list[Mistake]:
    """Return the contradictions that ``known`` does not cover, with their lines."""
    covered = {mistake.location for mistake in known if mistake.final}
    found = []
    for problem in problems:
        if problem.location not in covered:
            location = problem.location if exists(root, problem.location) else problem.other
            where = locate(root, location or problem.location, key=True)
            found.append(Mistake(where, location, problem.text))
    return found


def keys_below(model: type[BaseModel], data: object, path: str = "") -> dict[str, list[str]]:
    """Return the keys of each section in a file's data by its dotted path."""
    keys, values = {path: list(model.model_fields)}, data if isinstance(data, Mapping) else {}
    for name, field in model.model_fields.items():
        inside, below = values.get(name), f"{path}.{name}".removeprefix(".")
        places = {below: inside}
        if get_origin(field.annotation) is dict:
            entries = inside if isinstance(inside, Mapping) else {}
            places = {f"{below}.{key}": entry for key, entry in entries.items()}
        for section in _sections_in(field.annotation):
            for place, entry in places.items():
                keys |= keys_below(section, entry, place)
    return keys


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is tuple:  # the only such section, connectors, depends on its name
        return []
    if inner := get_args(annotation):
        return [found for argument in inner for found in _sections_in(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _sentences(
    error: ValidationError, keys: Mapping[str, Sequence[str]], what: str
) -> Iterator[tuple[DataMistake, bool]]:
    """Yield each error as a sentence, and whether it concerns the key rather than the value."""
    errors = error.errors(include_url=False)
    inside = {details["loc"][:depth] for details in errors for depth in range(len(details["loc"]))}
    for details in errors:
        location = tuple(details["loc"])
        if location[:1] == ("connectors",) and location[2:3] == ("options",):
            location = location[:2] + location[3:]
        kind = details["type"]
        if kind == "too_short" and details["loc"] in inside:
            continue  # pydantic does not count entries that have mistakes of their own
        if kind == "extra_forbidden":
            yield DataMistake(location, _unknown_key(location, keys)), True
        elif kind == "missing":
            parent = ".".join(map(str, location[:-1]))
            yield DataMistake(location, f"{parent or what} needs the key `{location[-1]}`"), True
        elif kind == "kvbench":
            yield DataMistake(location, f"{_dotted(location)}: {details['msg']}"), False
        else:
            yield DataMistake(location, _sentence(location, details)), False


def _dotted(location: Location) -> str:
    steps = (str(step) for step in location)
    return ".".join(step if step.isprintable() else repr(step) for step in steps)


def _unknown_key(location: Location, keys: Mapping[str, Sequence[str]]) -> str:
    key, parent = str(location[-1]), _dotted(location[:-1])
    allowed = keys.get(parent, ())
    hint = nearest(key, allowed)
    if not hint.startswith("did"):
        elsewhere = [path for path, names in keys.items() if key in names]
        if elsewhere:
            place = f"under {quoted(elsewhere[0])}" if elsewhere[0] else "at the top level"
            hint = f"{quoted(key)} belongs {place}"
    inside = f" in {parent}" if parent else ""
    return f"unknown key {quoted(key)}{inside}; {hint}"


def _sentence(location: Location, error: Any) -> str:
    name, kind = _dotted(location), error["type"]
    context, seen = error.get("ctx", {}), shorten(error["input"])
    if kind in _WANTED:
        return f"{name} must be {_WANTED[kind]}, not {seen}"
    if kind in _BOUND:
        bound, words = _BOUND[kind]
        return f"{name} must be {words} {context[bound]:g}, not {seen}"
    if kind == "literal_error":
        text = f"{name} must be {context['expected']}, not {seen}"
        options = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        hint = nearest(str(error["input"]), options)
        return f"{text}; {hint}" if hint.startswith("did") else text
    if kind in ("too_short", "too_long"):
        least = kind == "too_short"
        limit = f"at least {context['min_length']}" if least else f"at most {context['max_length']}"
        return f"{name} must have {limit} entries, not {context['actual_length']}"
    if kind == "string_pattern_mismatch":
        return f"{name} is {seen}, which does not fit the pattern {context['pattern']}"
    message = str(error["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}, not {seen}"
