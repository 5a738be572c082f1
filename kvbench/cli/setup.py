"""Commands that prepare: what is missing here, a scenario, a corpus, other hosts, ``kvbench lab``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.console import console, with_exit_code
from kvbench.errors import InputError
from kvbench.planning.options import JsonOption, ScenarioArg, SetOption


def schema() -> None:
    """Print the JSON Schema of the scenario format, for editors."""
    import json

    from kvbench.core.scenario.scenario import scenario_schema
    from kvbench.planning.scenario_files import registry

    typer.echo(json.dumps(scenario_schema(registry()), indent=2))


def doctor(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A scenario to look at too: its file or bundled name.", show_default=False),
    ] = None,
    set_: SetOption = None,
    gates: Annotated[
        bool, typer.Option("--gates", help="Only list what every trial is checked for.")
    ] = False,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Check the scenario's hosts, and who reaches whom.")
    ] = False,
    json_: JsonOption = False,
) -> int:
    """Say what is installed here, what each connector lacks, and how to fix it."""
    from kvbench.planning.doctor import gates as gatetable
    from kvbench.planning.doctor.scenario import command

    if gates:
        return gatetable.command(console(), as_json=json_)
    if hosts:
        from kvbench.planning.doctor import hosts as doctor_hosts

        if scenario is None:
            raise InputError("--hosts checks the hosts of a scenario: name one")
        return doctor_hosts.command(scenario, tuple(set_ or ()), console(), as_json=json_)
    return command(console(), scenario, tuple(set_ or ()), as_json=json_)


def init(
    file: Annotated[Path, typer.Argument(help="The scenario file to write.")] = Path("scenario.yaml"),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take every default for this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="A,B", help="Engines run on these hosts, reached by ssh: P, then D."),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="On the nodes that a Slurm job gives.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="On the nodes of a Ray cluster.")] = False,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="A server that is up; nothing is started.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Which of that server's models.")
    ] = "",
) -> int:
    """Write a commented scenario for this machine, for hosts, Slurm or Ray, or for a server that is up."""
    from kvbench.planning import init as new_scenario
    from kvbench.planning.init_elsewhere import Elsewhere

    elsewhere = Elsewhere.asked(hosts, slurm, ray, base_url, model)
    return new_scenario.command(file, console(), yes=yes, force=force, elsewhere=elsewhere)


def hosts_install(
    scenario: ScenarioArg,
    set_: SetOption = None,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", help="The wheel to install; else one is built of what runs here."),
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            "--wheelhouse",
            metavar="DIR",
            help="Wheels of all that it needs, brought along: for hosts that reach no registry.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    bring: Annotated[
        bool, typer.Option("--bring", help="Fetch these wheels here, in the versions that are here.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="An extra of kvbench to install too, such as mooncake."),
    ] = None,
) -> int:
    """Copy this kvbench to each host of a scenario and install it there, in an environment of its own."""
    from kvbench.planning import install_hosts

    wanted = install_hosts.Install(wheel, wheelhouse, bring, tuple(extra or ()))
    return install_hosts.command(scenario, tuple(set_ or ()), wanted, console())


lab = typer.Typer(
    help="Two hosts with N shaped NICs as network namespaces on this machine: up, exec, status, down, fault.",
    no_args_is_help=True,
)
LabName = Annotated[str, typer.Option("--name", metavar="NAME", help="Which lab.")]


@lab.command("up")
@with_exit_code
def up(
    nics: Annotated[int, typer.Option("--nics", metavar="N", help="NICs between the hosts A and B.")] = 2,
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="What each NIC carries each way: 300mbit, 1gbit.")
    ] = "1gbit",
    mtu: Annotated[int, typer.Option("--mtu", metavar="BYTES", help="The NICs' MTU.")] = 1500,
    name: LabName = "kv",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="X.Y", help="Beginning of the addresses: X.Y.i.1 and X.Y.i.2.")
    ] = "10.77",
    rootless: Annotated[
        bool, typer.Option("--rootless", help="By a user namespace, even as root; others always do that.")
    ] = False,
) -> None:
    """Set a lab up; it stands until `kvbench lab down`."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.layout import LabPlan

    labcommand.up(LabPlan(name, nics, rate, mtu, prefix), console(), rootless=rootless)


@lab.command("exec", context_settings={"allow_interspersed_args": False})
@with_exit_code
def exec_(
    host: Annotated[str, typer.Argument(help="A or B.", metavar="HOST")],
    words: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="-- COMMAND")],
    name: LabName = "kv",
) -> None:
    """Run a command in host A or B of a lab; its exit code is passed on."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.execute(host, words[1:] if words[0] == "--" else words, name)


@lab.command("status")
@with_exit_code
def status(
    json_: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say which labs are here, what has passed their NICs, and which faults are planted."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.status(console(), as_json=json_)


@lab.command("down")
@with_exit_code
def down(
    name: LabName = "kv",
    all_: Annotated[bool, typer.Option("--all", help="Every lab that no process is using.")] = False,
) -> None:
    """Take a lab down with all that runs in it, and what killed processes left."""
    from kvbench.hosts.lab import command as labcommand

    labcommand.down(name, console(), everything=all_)


@lab.command("fault")
@with_exit_code
def fault(
    kind: Annotated[str, typer.Argument(help="pull, partition, reset, slow or loss.", metavar="KIND")],
    nic: Annotated[int, typer.Option("--nic", metavar="I", help="Which NIC, from 0.")],
    amount: Annotated[
        str,
        typer.Option("--amount", metavar="X", help="loss: a share such as 1%; slow: a rate such as 300mbit."),
    ] = "",
    heal: Annotated[bool, typer.Option("--heal", help="Take the fault away.")] = False,
    name: LabName = "kv",
) -> None:
    """Plant a fault on a NIC, or take it away, and say what its counter tells."""
    from kvbench.hosts.lab import command as labcommand
    from kvbench.hosts.lab.lab import Lab
    from kvbench.hosts.lab.state import Fault

    labcommand.fault(Lab.standing(name), Fault(kind, nic, amount), console(), heal=heal)


def complete_format(incomplete: str) -> Iterator[str]:
    """Formats of corpora."""
    from kvbench.planning.corpus_files import AUTO, FORMATS

    yield from (name for name in (AUTO, *FORMATS) if name.startswith(incomplete))


def complete_model(incomplete: str) -> Iterator[str]:
    """Models whose KV cache is known."""
    from kvbench.core.physics import MODELS

    yield from (name for name in MODELS if name.startswith(incomplete))


def corpus(
    file: Annotated[Path, typer.Argument(help="A file of sessions, or a folder of them.", metavar="FILE")],
    format_: Annotated[
        str,
        typer.Option("--format", help="Its format; told by its keys.", autocompletion=complete_format),
    ] = "auto",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N,N", help="Caches to ask for, in tokens. 1000..8000 doubles."),
    ] = None,
    gb: Annotated[
        list[float] | None,
        typer.Option("--gb", metavar="GB", help="A cache to ask for, of --model. Repeatable.", min=1e-6),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Whose KV cache GB are.", autocompletion=complete_model),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option("--output-len", help="Tokens of answers without a length (aiperf).", min=1),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option("--generate", metavar="N", help="Make N sessions after them, and tell of those.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is made.", min=0)] = 0,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write what is made, as agentic .jsonl.gz.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw reuse by size, as .png or .svg.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Tell what recorded sessions ask for: turns, lengths, think times, and what caches could reuse."""
    from kvbench.core.sessions.corpus import CorpusFigures
    from kvbench.core.units import parse_counts
    from kvbench.planning.corpus_files import corpus_report, load_corpus, made_after, print_report

    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InputError(f"{plot} is the name of no picture", hint="end it in .png or .svg")
    if write is not None and (generate is None or not write.name.endswith(".jsonl.gz")):
        raise InputError("--write is for sessions that are made", hint="--generate N --write FILE.jsonl.gz")
    sessions, source = load_corpus(file, format_, output_len), file.name
    if generate is not None:
        sessions, source = made_after(sessions, source, generate, seed, write)
    figures = CorpusFigures(sessions)
    asked = parse_counts(tokens) if tokens else ()
    report = corpus_report(source, figures, asked, gb or (), model)
    print_report(report, console(), as_json=json_)
    if plot is not None:
        from kvbench.report.plots.sessions import offered_reuse_figure
        from kvbench.report.plots.style import save

        save(offered_reuse_figure(figures, source, report.model), plot)
