"""The options that several commands share, how they become ``CliOptions``, and their completion in a shell.

A command that takes a parameter of type ``ScenarioOptions`` or ``LoadOptions`` and is decorated with ``asks``
has every option of that class in its own help, as if they were written there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from kvbench.errors import InputError

if TYPE_CHECKING:
    from kvbench.planning.overrides import CliOptions


def run_folder(text: str) -> Path:
    """The run folder that is meant: a path, `latest`, or a piece of a name. For typer."""
    from kvbench.results.run import find_run

    try:
        return find_run(text)
    except InputError as error:
        raise typer.BadParameter(f"{error.message} ({error.hint})") from None


def complete_scenario(incomplete: str) -> Iterator[str]:
    """Bundled scenarios, and YAML files here."""
    from kvbench.planning.scenario_files import bundled_names

    here = (str(path) for path in Path().glob("*.y*ml"))
    yield from (name for name in (*bundled_names(), *sorted(here)) if name.startswith(incomplete))


def complete_connector(incomplete: str) -> Iterator[str]:
    """Connectors that are there."""
    from kvbench import connectors

    yield from (name for name in connectors.names() if name.startswith(incomplete))


def complete_run(incomplete: str) -> Iterator[str]:
    """`latest`, and the runs in the folder that they are written to; the latest first."""
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

_server = partial(typer.Option, rich_help_panel="Server that is up")
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
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a scenario value, e.g. slo.ttft_ms=300. Repeatable."
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with this run folder after any end; the plan is the folder's.",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Go on although machine or software has changed since; marks the run."),
]
OutputOption = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="DIR", help="Where run folders are written.", envvar="KVBENCH_OUTPUT"
    ),
]


@dataclass(frozen=True)
class ScenarioOptions:
    """Which scenario, and what of it."""

    scenario: ScenarioArg = "quickstart"
    set_: SetOption = None
    connector: Annotated[
        list[str] | None,
        typer.Option(
            "--connector",
            metavar="NAME",
            help="Only this connector of the scenario. Repeatable.",
            autocompletion=complete_connector,
        ),
    ] = None

    def cli_options(self) -> CliOptions:
        from kvbench.planning.overrides import CliOptions

        return CliOptions(
            scenario=self.scenario,
            overrides=tuple(self.set_ or ()),
            connectors=tuple(self.connector or ()),
        )


@dataclass(frozen=True)
class LoadOptions(ScenarioOptions):
    """And what load, judged how: the options of commands that measure."""

    base_url: Annotated[
        str | None,
        _server(
            "--base-url", metavar="URL", help="Measure a running OpenAI-compatible server; needs no scenario."
        ),
    ] = None
    model: Annotated[
        str | None,
        _server("--model", metavar="NAME", help="Which of its models; needed where it serves several."),
    ] = None
    header: Annotated[
        list[str] | None,
        _server(
            "--header",
            metavar="'NAME: VALUE'",
            help="Sent with each request; ${VARIABLE} is taken from the environment and written nowhere. "
            "Repeatable.",
        ),
    ] = None
    ca_file: Annotated[
        str | None,
        _server("--ca-file", metavar="FILE", help="Believe the certificates of this PEM file alone."),
    ] = None
    insecure: Annotated[bool, _server("--insecure", help="Believe any certificate.")] = False
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
        _server("--decode-metrics-url", metavar="URL[,URL…]", help="And of its decode instances."),
    ] = None
    api_key_env: Annotated[
        str | None,
        _server(
            "--api-key-env",
            metavar="NAME",
            help="The environment variable with that server's API key; the key itself is written nowhere.",
        ),
    ] = None
    input_len: Annotated[
        str | None, _load("--input-len", metavar="N[,N…]", help="Input lengths in tokens.")
    ] = None
    output_len: Annotated[
        int | None, _load("--output-len", metavar="N", help="Output tokens per request.")
    ] = None
    ttft_ms: Annotated[float | None, _slo("--ttft-ms", metavar="MS", help="SLO: time to first token.")] = None
    tpot_ms: Annotated[
        float | None,
        _slo("--tpot-ms", metavar="MS", help="SLO: time per output token."),
    ] = None
    attainment: Annotated[
        float | None,
        _slo(
            "--attainment", metavar="SHARE", help="Share of requests that must meet every limit, e.g. 0.95."
        ),
    ] = None
    slo: Annotated[
        list[str] | None,
        _slo(
            "--slo",
            metavar="LIMIT",
            help="A limit, instead of the scenario's: 'ttft_ms p90 <= 5000', 'tpot_ms mean <= 50'. "
            "Repeatable.",
        ),
    ] = None
    method: Annotated[
        str | None,
        _method(
            "--method", metavar="NAME", help="sustained (default), burst, sustained,burst, fixed or trace."
        ),
    ] = None
    rates: Annotated[
        str | None,
        _method("--rates", metavar="R[,R…]", help="Measure these rates, without an SLO (method fixed)."),
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
    ] = None
    workers: Annotated[
        int | None,
        _load(
            "--workers", metavar="N", help="Load generator processes; by default as many as the load needs."
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        _load(
            "--endpoint",
            metavar="NAME",
            help="completions (default), with token ids; or chat: /v1/chat/completions, with messages.",
        ),
    ] = None
    direct: Annotated[
        bool, _load("--direct", help="The load generator asks P and D itself, with no router in the path.")
    ] = False

    def cli_options(self) -> CliOptions:
        return replace(
            super().cli_options(),
            base_url=self.base_url,
            model=self.model,
            headers=tuple(self.header or ()),
            ca_file=self.ca_file,
            insecure=self.insecure,
            api_key_env=self.api_key_env,
            prefill_metrics_url=self.prefill_metrics_url,
            decode_metrics_url=self.decode_metrics_url,
            input_len=self.input_len,
            output_len=self.output_len,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            attainment=self.attainment,
            slo=tuple(self.slo or ()),
            method=self.method,
            rates=self.rates,
            trace=self.trace,
            time_scale=self.time_scale,
            workers=self.workers,
            endpoint=self.endpoint,
            direct=self.direct,
        )


@dataclass(frozen=True)
class BenchOptions(LoadOptions):
    """And how much of it: a rate, or a closed loop, of so many requests or for so long."""

    rate: Annotated[
        float | None,
        _load("--rate", metavar="REQ/S", help="The request rate to offer; of a --trace its own.", min=0.001),
    ] = None
    concurrency: Annotated[
        int | None,
        _load(
            "--concurrency",
            metavar="N",
            help="Instead of a rate: a closed loop of N requests at once, each sent when one has ended.",
            min=1,
            max=100_000,
        ),
    ] = None
    num_requests: Annotated[
        int | None, _load("--num-requests", metavar="N", help="Send so many requests.", min=1, max=10_000_000)
    ] = None
    duration: Annotated[
        float | None, _load("--duration", metavar="S", help="Send requests for so many seconds.", min=0.1)
    ] = None

    def cli_options(self) -> CliOptions:
        return replace(
            super().cli_options(),
            fixed_rate=self.rate,
            concurrency=self.concurrency,
            num_requests=self.num_requests,
            duration_s=self.duration,
            replay=self.trace is not None,
        )


def asks(without: Collection[str] = ()) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Spread a command's parameter ``options`` into the options of its class, less those in ``without``.

    They stand in the help where ``options`` stands among the command's parameters.
    """

    def spread(command: Callable[..., Result]) -> Callable[..., Result]:
        hints = get_type_hints(command, include_extras=True)
        kind: type[ScenarioOptions] = hints["options"]
        kinds = get_type_hints(kind, include_extras=True)
        asked = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name])
            for field in fields(kind)
            if field.name not in without
        ]
        names = {parameter.name for parameter in asked}
        parameters: list[Parameter] = []
        for name, own in signature(command).parameters.items():
            own = own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            parameters += asked if name == "options" else [own]

        @functools.wraps(command)
        def run(**given: Any) -> Result:
            options = kind(**{name: given.pop(name) for name in names})
            return command(options=options, **given)

        # What typer reads a command's options from.
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return spread
