"""The options of ``kvbench microbench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_MATRIX = "Matrix: values are lists (4K,64K,1M) or ranges that double (4K..64M)"
_KV = "KV-shaped work"
_WHERE = "Where"
_HOW = "How"


@dataclass(frozen=True)
class MicrobenchOptions:
    """What to measure, where, and how."""

    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME[,NAME…]",
            help="Transfer backends; by default all that are not optional.",
            rich_help_panel=_MATRIX,
        ),
    ] = None
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            metavar="NAME[,NAME…]",
            help="Protocols, such as tcp or rdma; by default RDMA where there is any, else the usual one.",
            rich_help_panel=_MATRIX,
        ),
    ] = None
    nics: Annotated[
        str | None,
        typer.Option(
            "--nics", metavar="N[,N…]", help="NICs to use, in order of affinity.", rich_help_panel=_MATRIX
        ),
    ] = None
    op: Annotated[
        str | None,
        typer.Option(
            "--op", metavar="write,read", help="Directions; by default both.", rich_help_panel=_MATRIX
        ),
    ] = None
    block_size: Annotated[
        str | None,
        typer.Option("--block-size", metavar="SIZE[,SIZE…]", help="Of a block.", rich_help_panel=_MATRIX),
    ] = None
    batch_size: Annotated[
        str | None,
        typer.Option("--batch-size", metavar="N[,N…]", help="Blocks of a transfer.", rich_help_panel=_MATRIX),
    ] = None
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads", metavar="N[,N…]", help="Transfers under way at a time.", rich_help_panel=_MATRIX
        ),
    ] = None
    initiators: Annotated[
        str | None,
        typer.Option(
            "--initiators", metavar="N[,N…]", help="Processes that start transfers.", rich_help_panel=_MATRIX
        ),
    ] = None
    targets: Annotated[
        str | None,
        typer.Option(
            "--targets", metavar="N[,N…]", help="Processes that are written or read.", rich_help_panel=_MATRIX
        ),
    ] = None
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="host|cuda", help="Where buffers lie.", rich_help_panel=_MATRIX),
    ] = "host"
    scattered: Annotated[
        bool,
        typer.Option(
            "--scattered", help="Blocks that never touch, in shuffled order.", rich_help_panel=_MATRIX
        ),
    ] = False
    full: Annotated[
        bool, typer.Option("--full", help="The large matrix, all protocols.", rich_help_panel=_MATRIX)
    ] = False
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Move one request's KV cache of this model, as an engine would.",
            rich_help_panel=_KV,
        ),
    ] = None
    input_len: Annotated[
        int, typer.Option("--input-len", metavar="N", help="Tokens of the request.", rich_help_panel=_KV)
    ] = 4096
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks.", rich_help_panel=_KV)
    ] = 1
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", metavar="N", help="Tokens of a KV block.", rich_help_panel=_KV)
    ] = 16
    all_ranks: Annotated[
        bool,
        typer.Option("--all-ranks", help="All ranks at once, as so many initiators.", rich_help_panel=_KV),
    ] = False
    lab: Annotated[
        bool,
        typer.Option(
            "--lab",
            help="In a lab made for this run: two hosts as network namespaces.",
            rich_help_panel=_WHERE,
        ),
    ] = False
    rate: Annotated[
        str,
        typer.Option("--rate", metavar="RATE", help="Of each of the lab's NICs.", rich_help_panel=_WHERE),
    ] = "1gbit"
    lab_name: Annotated[
        str | None,
        typer.Option(
            "--lab-name",
            metavar="NAME",
            help="In the lab of this name, which stands already (kvbench lab up).",
            rich_help_panel=_WHERE,
        ),
    ] = None
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="This machine's address, as the other one reaches it.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    peer_prefix: Annotated[
        str | None,
        typer.Option(
            "--peer-prefix",
            metavar="COMMAND",
            help="Put in front of the targets' command to run them elsewhere, e.g. 'ssh nodeB'.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    peer_host: Annotated[
        str | None,
        typer.Option(
            "--peer-host",
            metavar="ADDRESS",
            help="The other machine's address; by default the last word of --peer-prefix.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    peer_python: Annotated[
        str | None,
        typer.Option(
            "--peer-python",
            metavar="PATH",
            help="The other machine's Python that has kvbench; by default as here.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    scenario: Annotated[
        str | None,
        typer.Option(
            "--scenario",
            metavar="FILE",
            help="Between the hosts of this scenario, by its launcher (docs/ssh.md).",
            rich_help_panel=_WHERE,
        ),
    ] = None
    from_host: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST",
            help="The scenario's host of the initiators; by default prefill's first.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    to_host: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="HOST",
            help="The scenario's host of the targets; by default decode's first.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    pairs: Annotated[
        str | None,
        typer.Option(
            "--pairs",
            metavar="all",
            help="Each host of the scenario with each other, both ways: a matrix of who sends to whom.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="Of transfers for each case.",
            min=0.05,
            max=600.0,
            rich_help_panel=_HOW,
        ),
    ] = None
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            metavar="RUN",
            help="Say what changed since this run.",
            exists=True,
            file_okay=False,
            rich_help_panel=_HOW,
        ),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the matrix and the time it takes; start nothing.", rich_help_panel=_HOW
        ),
    ] = False
