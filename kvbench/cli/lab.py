"""Commands of ``kvbench lab``: two hosts as network namespaces on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kvbench.cli.console import console, with_exit_code

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
