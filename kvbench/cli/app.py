"""All commands of the command line, in order."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.core

from kvbench.cli import measure, runs, setup
from kvbench.cli.console import allow_any_locale, with_exit_code
from kvbench.cli.setup import lab
from kvbench.errors import EXIT_CODES
from kvbench.planning.options import with_options
from kvbench.version import __version__


def _plain_flags(params: list[Any]) -> list[Any]:
    """Omit the value type of flags in the help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _load_help() -> None:
    """Import typer's help without rich's Markdown and tracebacks: kvbench's help does not use them, and they
    take a third of its time."""
    unused = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
    empty = {name: ModuleType(name) for name in unused.keys() - sys.modules}
    for name, module in empty.items():
        setattr(module, unused[name], object)
    sys.modules.update(empty)
    import_module("typer.rich_utils")
    for name in empty:
        del sys.modules[name]


class PlainFlags(typer.core.TyperCommand):
    """A command whose help omits types of flags."""

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _load_help()
        super().format_help(ctx, formatter)


class _Command(PlainFlags):
    """A command that reads its function's parameters on first use: those of all commands take 0.1 s."""

    def __init__(self, name: str, panel: str, function: Callable[..., int | None], epilog: str) -> None:
        super().__init__(name, help=inspect.getdoc(function), epilog=epilog, rich_help_panel=panel)
        self._function = function
        del self.params, self.callback

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(name)
        alone = typer.Typer(add_completion=False)
        alone.command()(with_exit_code(with_options(self._function)))
        command = typer.main.get_command(alone)
        self.params, self.callback = command.params, command.callback
        return getattr(self, name)


FIRST = ("sweep", "bench", "plan", "init", "doctor", "report", "compare", "watch", "runs")
"""Commands in ``--help``; ``--help --all`` shows all."""
RENAMED = {
    "selftest": "doctor selftest",
    "diagnose": "doctor diagnose",
    "timeline": "export timeline",
    "schema": "scenarios schema",
    "ps": "runs ps",
    "stop": "runs stop",
}
"""Old name, still accepted → new name."""


class _Commands(typer.core.TyperGroup):
    """Command group with two-word names such as ``doctor selftest`` next to ``doctor``."""

    def __init__(self, *, commands: dict[str, Any], **options: Any) -> None:
        builtin = {
            name: _Command(name, panel, func, _epilog(name)) for name, (panel, func, _) in _COMMANDS.items()
        }
        super().__init__(commands={**builtin, **commands}, **options)

    def get_params(self, ctx: Any) -> Any:
        return _plain_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _load_help()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["all"] = {"--all", *args} <= {"--all", "--help", "-h"} and "--all" in args
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes one word
            return [name for name in self.commands if " " not in name]
        return list(self.commands if ctx.meta.get("all") else FIRST)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if new := RENAMED.get(args[0]):
            if not ctx.resilient_parsing:
                typer.echo(f"kvbench {args[0]} is now: kvbench {new}", err=True)
            args = [*new.split(), *args[1:]]
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="kvbench",
    cls=_Commands,
    help="Finds the highest request rate that prefill/decode (P/D) serving sustains within its SLO, "
    "per KV connector and input length.\n\n"
    "\b\n"
    "kvbench sweep quickstart\n"
    "kvbench init mine.yaml && kvbench sweep mine.yaml\n"
    "kvbench bench --base-url http://localhost:8000 --rate 4 \\\n"
    "  --input-len 512 --output-len 64",
    epilog="Exit codes:  " + " · ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMON, MEASURE, PREPARE = "Commands (all: kvbench --help --all)", "Measure", "Prepare"
RESULTS, PROCESSES = "Results", "Processes and hosts"

_COMMANDS: dict[str, tuple[str, Callable[..., int | None], str]] = {
    "sweep": (COMMON, measure.sweep, "quickstart --connector nixl"),
    "bench": (COMMON, measure.bench, "quickstart --rate 20 --duration 30"),
    "plan": (COMMON, measure.plan, "quickstart --input-len 1024"),
    "init": (COMMON, setup.init, "two-nodes.yaml --hosts node1,node2"),
    "doctor": (COMMON, setup.doctor, "two-nodes.yaml"),
    "report": (COMMON, runs.report, "latest"),
    "compare": (COMMON, runs.compare, "results/before results/after"),
    "watch": (COMMON, runs.watch, "latest --serve"),
    "runs": (COMMON, runs.runs, ""),
    "chaos": (MEASURE, measure.chaos, "quickstart --connector nixl --rate 40 --fault restart:prefill"),
    "soak": (MEASURE, measure.soak, "quickstart --connector nixl --rate 40 --hours 8"),
    "simulate": (MEASURE, measure.simulate, "xpyd --gpus 3"),
    "calibrate": (MEASURE, measure.calibrate, "--from latest --output my-gpu.yaml"),
    "microbench": (MEASURE, measure.microbench, "--lab --nics 1,2,4,8"),
    "scenarios": (PREPARE, runs.scenarios, "--json"),
    "scenarios schema": (PREPARE, setup.schema, "> scenario.schema.json"),
    "corpus": (PREPARE, setup.corpus, "traces.jsonl.gz --model llama-3.1-70b --gb 80"),
    "doctor selftest": (PREPARE, measure.selftest, "--streams 10,100"),
    "doctor diagnose": (PREPARE, runs.diagnose, "results/run/logs"),
    "verify": (RESULTS, runs.verify, "latest"),
    "export": (RESULTS, runs.export, "latest --format csv"),
    "export timeline": (RESULTS, runs.timeline, "latest"),
    "bundle": (RESULTS, runs.bundle, "latest --without-logs"),
    "import": (RESULTS, runs.import_, "vllm-bench.json --connector nixl"),
    "launch": (PROCESSES, runs.launch, "quickstart --connector nixl"),
    "runs ps": (PROCESSES, runs.ps, ""),
    "runs stop": (PROCESSES, runs.stop, "--all"),
}
"""Name → help panel, function, example arguments."""


def _epilog(name: str) -> str:
    more = [f"kvbench {command}" for command in _COMMANDS if command.startswith(f"{name} ")]
    also = f"   See also:  {', '.join(more)}" if more else ""
    return f"Example:  kvbench {name} {_COMMANDS[name][2]}".rstrip() + also


for _registered in lab.registered_commands:
    _registered.cls = PlainFlags
app.add_typer(lab, name="lab", rich_help_panel=PROCESSES)
hosts = typer.Typer(help="Install kvbench on the hosts of a scenario.", no_args_is_help=True)
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
    all_: Annotated[bool, typer.Option("--all", help="With --help: show all commands.")] = False,
) -> None:
    """kvbench measures how the KV cache travels from prefill to decode, and what that does to serving."""


def main() -> None:
    """Run the ``kvbench`` command."""
    gc.set_threshold(100_000)  # most objects live as long as the command: a tenth of a report's time
    allow_any_locale()
    app(prog_name="kvbench")
