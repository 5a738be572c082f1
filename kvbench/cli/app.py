"""The command line: which commands there are, in their order. Each parses, calls one function, and prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from kvbench.cli import measure, runs, setup
from kvbench.cli.console import allow_any_locale, with_exit_code
from kvbench.cli.setup import lab
from kvbench.errors import EXIT_CODES
from kvbench.version import __version__


def _plain_flags(params: list[Any]) -> list[Any]:
    """The same, with flags shown without the type of a value, since they take none."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


class PlainFlags(typer.core.TyperCommand):
    """A command in whose help flags have no type."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


class _Commands(typer.core.TyperGroup):
    """All commands, in whose help flags have no type."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))


app = typer.Typer(
    name="kvbench",
    cls=_Commands,
    help="Finds the highest request rate that prefill/decode (P/D) serving holds under its SLO, "
    "per KV connector and input length, and refuses numbers it cannot stand behind.",
    epilog="Exit codes:  " + " · ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MEASURE, PREPARE, RESULTS, PROCESSES = "Measure", "Prepare", "Results", "Processes and hosts"

_COMMANDS: dict[str, tuple[str, Callable[..., int | None], str]] = {
    "sweep": (MEASURE, measure.sweep, "kvbench sweep quickstart --connector nixl"),
    "bench": (MEASURE, measure.bench, "kvbench bench quickstart --rate 20 --duration 30"),
    "chaos": (
        MEASURE,
        measure.chaos,
        "kvbench chaos quickstart --connector nixl --rate 40 --fault restart:prefill",
    ),
    "soak": (MEASURE, measure.soak, "kvbench soak quickstart --connector nixl --rate 40 --hours 8"),
    "simulate": (MEASURE, measure.simulate, "kvbench simulate xpyd --gpus 3"),
    "calibrate": (MEASURE, measure.calibrate, "kvbench calibrate --from latest --output my-gpu.yaml"),
    "microbench": (MEASURE, measure.microbench, "kvbench microbench --lab --nics 1,2,4,8"),
    "selftest": (MEASURE, measure.selftest, "kvbench selftest --streams 10,100"),
    "init": (PREPARE, setup.init, "kvbench init two-nodes.yaml --hosts node1,node2"),
    "scenarios": (PREPARE, runs.scenarios, "kvbench scenarios --json"),
    "plan": (PREPARE, measure.plan, "kvbench plan quickstart --input-len 1024"),
    "corpus": (PREPARE, setup.corpus, "kvbench corpus traces.jsonl.gz --model llama-3.1-70b --gb 80"),
    "doctor": (PREPARE, setup.doctor, "kvbench doctor two-nodes.yaml"),
    "schema": (PREPARE, setup.schema, "kvbench schema > scenario.schema.json"),
    "runs": (RESULTS, runs.runs, "kvbench runs"),
    "report": (RESULTS, runs.report, "kvbench report latest"),
    "watch": (RESULTS, runs.watch, "kvbench watch latest --serve"),
    "compare": (RESULTS, runs.compare, "kvbench compare results/before results/after"),
    "verify": (RESULTS, runs.verify, "kvbench verify latest"),
    "timeline": (RESULTS, runs.timeline, "kvbench timeline latest"),
    "export": (RESULTS, runs.export, "kvbench export latest --format csv"),
    "bundle": (RESULTS, runs.bundle, "kvbench bundle latest --without-logs"),
    "import": (RESULTS, runs.import_, "kvbench import vllm-bench.json --connector nixl"),
    "diagnose": (RESULTS, runs.diagnose, "kvbench diagnose results/run/logs"),
    "launch": (PROCESSES, runs.launch, "kvbench launch quickstart --connector nixl"),
    "ps": (PROCESSES, runs.ps, "kvbench ps"),
    "stop": (PROCESSES, runs.stop, "kvbench stop --all"),
}
"""Name → where it stands in the help, what it calls, an example."""
for _name, (_panel, _function, _example) in _COMMANDS.items():
    app.command(_name, cls=PlainFlags, rich_help_panel=_panel, epilog=f"Example:  {_example}")(
        with_exit_code(_function)
    )

for _registered in lab.registered_commands:
    _registered.cls = PlainFlags
app.add_typer(lab, name="lab", rich_help_panel=PROCESSES)
hosts = typer.Typer(help="The hosts of a scenario: install kvbench there.", no_args_is_help=True)
hosts.command("install", cls=PlainFlags, epilog="Example:  kvbench hosts install two-nodes.yaml")(
    with_exit_code(setup.hosts_install)
)
app.add_typer(hosts, name="hosts", rich_help_panel=PROCESSES)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """kvbench measures how the KV cache travels from prefill to decode, and what that does to serving."""


def main() -> None:
    """Entry point of the ``kvbench`` command."""
    allow_any_locale()
    app(prog_name="kvbench")
