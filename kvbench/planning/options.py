"""Options shared by several commands, and their shell completion.

A command decorated with ``asks``, with a parameter ``options`` of type ``CliOptions``, shows that class's
options in its help."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import typer

from kvbench.errors import InputError


def run_folder(text: str) -> Path:
    """Run folder by path, `latest`, or a part of its name, for typer."""
    from kvbench.results.run import find_run

    try:
        return find_run(text)
    except InputError as error:
        raise typer.BadParameter(f"{error.message} ({error.hint})") from None


def complete_scenario(incomplete: str) -> Iterator[str]:
    """Complete bundled scenarios, and YAML files in the current folder."""
    from kvbench.planning.scenario_files import bundled_names

    local = (str(path) for path in Path().glob("*.y*ml"))
    yield from (name for name in (*bundled_names(), *sorted(local)) if name.startswith(incomplete))


def complete_connector(incomplete: str) -> Iterator[str]:
    from kvbench import connectors

    yield from (name for name in connectors.names() if name.startswith(incomplete))


def complete_run(incomplete: str) -> Iterator[str]:
    """Complete `latest`, and runs in the default folder, the newest first."""
    from kvbench.results.run import LATEST, listed_runs, output_folder

    root = output_folder()
    runs = listed_runs(root) if root.is_dir() else []
    names = (LATEST, *(str(run.path) for run in runs), *(run.path.name for run in runs))
    yield from (name for name in names if name.startswith(incomplete))


RunArg = Annotated[
    Path,
    typer.Argument(
        help="A run folder, the end of its name, or `latest`.",
        metavar="RUN",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]
RunsArg = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders, ends of their names, or `latest`.",
        metavar="RUN…",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]


Result = TypeVar("Result")

_server = partial(typer.Option, rich_help_panel="Running server")
_load = partial(typer.Option, rich_help_panel="Load")
_slo = partial(typer.Option, rich_help_panel="SLO")
_method = partial(typer.Option, rich_help_panel="Method")

ScenarioArg = Annotated[
    str,
    typer.Argument(
        help="A scenario file, or the name of a bundled one.",
        show_default="quickstart",
        autocompletion=complete_scenario,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with every digit.")]
_SET = typer.Option(
    "--set", metavar="PATH=VALUE", help="Override a scenario value, e.g. slo.ttft_ms=300. Repeatable."
)
SetOption = Annotated[list[str] | None, _SET]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Resume this interrupted run folder by its plan.",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Resume although machine or software has changed; marks the run.")
]
OutputOption = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="DIR", help="Where run folders are written.", envvar="KVBENCH_OUTPUT"
    ),
]


@dataclass(frozen=True)
class Sets:
    """Scenario value set by an option. ``form``: YAML with ``{}`` for the option's text."""

    path: str
    form: str = "{}"


SERVER: Final = (
    *("base_url", "model", "headers", "ca_file", "insecure"),
    *("prefill_metrics_url", "decode_metrics_url", "api_key_env"),
)
ONE_LOAD: Final = ("fixed_rate", "concurrency", "num_requests", "duration_s")
SEARCHED: Final = ("precision", "max_trials", "budget_s", "seed")


@dataclass(frozen=True)
class CliOptions:
    """Options that select and change a scenario, each declared once: annotations hold the option, and the
    scenario value it sets (``Sets``). ``resolve`` in ``overrides`` creates the scenario."""

    scenario: ScenarioArg = "quickstart"
    overrides: Annotated[tuple[str, ...], _SET] = ()
    connectors: Annotated[
        tuple[str, ...],
        typer.Option(
            "--connector",
            metavar="NAME",
            help="Only this connector of the scenario. Repeatable.",
            autocompletion=complete_connector,
        ),
    ] = ()
    base_url: Annotated[
        str | None,
        _server(
            "--base-url", metavar="URL", help="Measure a running OpenAI-compatible server; needs no scenario."
        ),
    ] = None
    model: Annotated[
        str | None, _server("--model", metavar="NAME", help="Its model; required if it serves several.")
    ] = None
    headers: Annotated[
        tuple[str, ...],
        _server(
            "--header",
            metavar="'NAME: VALUE'",
            help="Sent with each request; ${VARIABLE} comes from the environment and is never stored. "
            "Repeatable.",
        ),
    ] = ()
    ca_file: Annotated[
        str | None, _server("--ca-file", metavar="FILE", help="Trust only the certificates of this PEM file.")
    ] = None
    insecure: Annotated[bool, _server("--insecure", help="Do not verify the certificate.")] = False
    prefill_metrics_url: Annotated[
        str | None,
        _server(
            "--prefill-metrics-url",
            metavar="URL[,URL…]",
            help="/metrics of that server's prefill instances: proves that P and D both worked.",
        ),
    ] = None
    decode_metrics_url: Annotated[
        str | None,
        _server("--decode-metrics-url", metavar="URL[,URL…]", help="/metrics of its decode instances."),
    ] = None
    api_key_env: Annotated[
        str | None,
        _server(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable with that server's API key, which is never stored.",
        ),
        Sets("deployment.engine_options.api_key_env"),
    ] = None
    fixed_rate: Annotated[
        float | None,
        _load("--rate", metavar="REQ/S", help="Request rate; by default the trace's own.", min=0.001),
    ] = None
    concurrency: Annotated[
        int | None,
        _load(
            "--concurrency",
            metavar="N",
            help="Closed loop instead of a rate: N concurrent requests, each replaced when it ends.",
            min=1,
            max=100_000,
        ),
    ] = None
    num_requests: Annotated[
        int | None, _load("--num-requests", metavar="N", help="Send N requests.", min=1, max=10_000_000)
    ] = None
    duration_s: Annotated[
        float | None,
        _load("--duration", metavar="S", help="Send requests for S seconds.", min=0.1),
        Sets("search.trial_s"),
    ] = None
    input_len: Annotated[
        str | None,
        _load("--input-len", metavar="N[,N…]", help="Input lengths in tokens."),
        Sets("workload.input_len", "[{}]"),
    ] = None
    output_len: Annotated[
        int | None,
        _load("--output-len", metavar="N", help="Output tokens per request."),
        Sets("workload.output_len"),
    ] = None
    ttft_ms: Annotated[
        float | None, _slo("--ttft-ms", metavar="MS", help="SLO: time to first token."), Sets("slo.ttft_ms")
    ] = None
    tpot_ms: Annotated[
        float | None, _slo("--tpot-ms", metavar="MS", help="SLO: time per output token."), Sets("slo.tpot_ms")
    ] = None
    attainment: Annotated[
        float | None,
        _slo(
            "--attainment", metavar="SHARE", help="Share of requests that must meet every limit, e.g. 0.95."
        ),
        Sets("slo.attainment"),
    ] = None
    slo: Annotated[
        tuple[str, ...],
        _slo(
            "--slo",
            metavar="LIMIT",
            help="A limit, instead of the scenario's: 'ttft_ms p90 <= 5000', 'tpot_ms mean <= 50'. "
            "Repeatable.",
        ),
    ] = ()
    method: Annotated[
        str | None,
        _method(
            "--method", metavar="NAME", help="sustained (default), burst, sustained,burst, fixed or trace."
        ),
    ] = None
    rates: Annotated[
        str | None,
        _method("--rates", metavar="R[,R…]", help="Measure these rates, without an SLO (method fixed)."),
        Sets("search.rates", "[{}]"),
    ] = None
    precision: Annotated[
        float | None,
        _method(
            "--precision",
            metavar="SHARE",
            help="Stop when the rate is known to this precision: 0.05 is ±5 %.",
        ),
        Sets("search.precision"),
    ] = None
    max_trials: Annotated[
        int | None,
        _method("--max-trials", metavar="N", help="Maximum trials of one search."),
        Sets("search.max_trials"),
    ] = None
    budget_s: Annotated[
        float | None,
        _method("--budget", metavar="S", help="Seconds of trials that all cells share.", min=1),
        Sets("search.budget_s"),
    ] = None
    seed: Annotated[
        int | None, _method("--seed", metavar="N", help="Seed of all randomness of the run."), Sets("seed")
    ] = None
    trace: Annotated[
        str | None,
        _method(
            "--trace", metavar="FILE", help="Replay recorded requests: a Mooncake trace, JSON lines or CSV."
        ),
    ] = None
    time_scale: Annotated[
        float | None,
        _method(
            "--time-scale",
            metavar="X",
            help="Multiply the time between traced requests: 0.5 is twice as fast.",
        ),
        Sets("workload.trace.time_scale"),
    ] = None
    workers: Annotated[
        int | None,
        _load("--workers", metavar="N", help="Load generator processes; default: as the load requires."),
        Sets("load.workers"),
    ] = None
    endpoint: Annotated[
        str | None,
        _load(
            "--endpoint",
            metavar="NAME",
            help="completions (default), with token ids; or chat: /v1/chat/completions, with messages.",
        ),
        Sets("load.endpoint"),
    ] = None
    direct: Annotated[
        bool,
        _load("--direct", help="Send to P and D directly, without a router."),
        Sets("load.mode", "direct"),
    ] = False
    replay: bool = False
    """``bench`` uses a trace's own rate."""
    both_modes: bool = False
    """``bench`` sends the load via the router and directly."""
    system: str | None = None
    """``simulate`` searches the rate of this external simulator's command, without a scenario."""


@cache
def declared() -> dict[str, tuple[Any, ...]]:
    """Return field → annotations of ``CliOptions`` besides types: option and target."""
    hints = get_type_hints(CliOptions, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def option_name(field: str) -> str:
    """Return the option of a ``CliOptions`` field, such as ``--input-len``."""
    return str(declared()[field][0].default)


_WITHOUT: Final[dict[Callable[..., Any], Collection[str]]] = {}
"""Command with ``asks`` → the options that it lacks."""


def asks(without: Collection[str] = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let ``with_options`` expand a command's parameter ``options``."""

    def mark(command: Callable[..., Result]) -> Callable[..., Result]:
        _WITHOUT[command] = without
        return command

    return mark


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Expand the parameter ``options`` of a command with ``asks`` to the options of its class. The help
    shows them at its position. Tuple fields are repeatable options."""
    if command not in _WITHOUT:
        return command
    hints = get_type_hints(command, include_extras=True)
    kind: type[Any] = hints["options"]
    kinds = get_type_hints(kind, include_extras=True)
    shown = [
        _parameter(field.name, field.default, kinds[field.name])
        for field in fields(kind)
        if field.name not in _WITHOUT[command] and hasattr(kinds[field.name], "__metadata__")
    ]
    names = {parameter.name for parameter in shown}
    parameters: list[Parameter] = []
    for name, given_parameter in signature(command).parameters.items():
        given_parameter = given_parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        parameters += shown if name == "options" else [given_parameter]

    @functools.wraps(command)
    def run(**given: Any) -> Result:
        values = {name: given.pop(name) for name in names}
        repeated = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return command(options=kind(**values | repeated), **given)

    # Typer reads a command's options from it.
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(name: str, default: Any, hint: Any) -> Parameter:
    """Return a command's parameter for an annotated field; typer needs lists instead of tuples."""
    kind, option = get_args(hint)[:2]
    if kind == tuple[str, ...]:
        hint, default = Annotated[list[str], option], []
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
