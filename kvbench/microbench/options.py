"""The options of ``kvbench microbench``: how raw transfers are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

_matrix = partial(
    typer.Option, rich_help_panel="Matrix: values are lists (4K,64K,1M) or ranges that double (4K..64M)"
)
_kv = partial(typer.Option, rich_help_panel="KV-shaped work")
_where = partial(typer.Option, rich_help_panel="Where")
_how = partial(typer.Option, rich_help_panel="How")


@dataclass(frozen=True)
class MicrobenchOptions:
    """What to measure, where, and how."""

    backend: Annotated[
        str | None,
        _matrix(
            "--backend",
            metavar="NAME[,NAME…]",
            help="Transfer backends; by default all that are not optional.",
        ),
    ] = None
    protocol: Annotated[
        str | None,
        _matrix(
            "--protocol",
            metavar="NAME[,NAME…]",
            help="Protocols, such as tcp or rdma; by default RDMA where there is any, else the usual one.",
        ),
    ] = None
    nics: Annotated[
        str | None, _matrix("--nics", metavar="N[,N…]", help="NICs to use, in order of affinity.")
    ] = None
    op: Annotated[
        str | None,
        _matrix("--op", metavar="write,read", help="Directions; by default both."),
    ] = None
    block_size: Annotated[
        str | None,
        _matrix("--block-size", metavar="SIZE[,SIZE…]", help="Of a block."),
    ] = None
    batch_size: Annotated[
        str | None, _matrix("--batch-size", metavar="N[,N…]", help="Blocks of a transfer.")
    ] = None
    threads: Annotated[
        str | None, _matrix("--threads", metavar="N[,N…]", help="Transfers under way at a time.")
    ] = None
    initiators: Annotated[
        str | None, _matrix("--initiators", metavar="N[,N…]", help="Processes that start transfers.")
    ] = None
    targets: Annotated[
        str | None, _matrix("--targets", metavar="N[,N…]", help="Processes that are written or read.")
    ] = None
    memory: Annotated[str, _matrix("--memory", metavar="host|cuda", help="Where buffers lie.")] = "host"
    scattered: Annotated[
        bool,
        _matrix("--scattered", help="Blocks that never touch, in shuffled order."),
    ] = False
    full: Annotated[bool, _matrix("--full", help="The large matrix, all protocols.")] = False
    model: Annotated[
        str | None,
        _kv("--model", metavar="NAME", help="Move one request's KV cache of this model, as an engine would."),
    ] = None
    input_len: Annotated[int, _kv("--input-len", metavar="N", help="Tokens of the request.")] = 4096
    tp: Annotated[int, _kv("--tp", metavar="N", help="Tensor-parallel ranks.")] = 1
    block_tokens: Annotated[int, _kv("--block-tokens", metavar="N", help="Tokens of a KV block.")] = 16
    vllm_version: Annotated[
        str,
        _kv(
            "--vllm-version",
            metavar="VERSION",
            help="The version whose connector's descriptors are made; by default the newest known one.",
        ),
    ] = ""
    all_ranks: Annotated[bool, _kv("--all-ranks", help="All ranks at once, as so many initiators.")] = False
    lab: Annotated[
        bool, _where("--lab", help="In a lab made for this run: two hosts as network namespaces.")
    ] = False
    rate: Annotated[str, _where("--rate", metavar="RATE", help="Of each of the lab's NICs.")] = "1gbit"
    lab_name: Annotated[
        str | None,
        _where(
            "--lab-name",
            metavar="NAME",
            help="In the lab of this name, which stands already (kvbench lab up).",
        ),
    ] = None
    host: Annotated[
        str | None,
        _where("--host", metavar="ADDRESS", help="This machine's address, as the other one reaches it."),
    ] = None
    peer_prefix: Annotated[
        str | None,
        _where(
            "--peer-prefix",
            metavar="COMMAND",
            help="Put in front of the targets' command to run them elsewhere, e.g. 'ssh nodeB'.",
        ),
    ] = None
    peer_host: Annotated[
        str | None,
        _where(
            "--peer-host",
            metavar="ADDRESS",
            help="The other machine's address; by default the last word of --peer-prefix.",
        ),
    ] = None
    peer_python: Annotated[
        str | None,
        _where(
            "--peer-python",
            metavar="PATH",
            help="The other machine's Python that has kvbench; by default as here.",
        ),
    ] = None
    scenario: Annotated[
        str | None,
        _where(
            "--scenario",
            metavar="FILE",
            help="Between the hosts of this scenario, by its launcher (docs/ssh.md).",
        ),
    ] = None
    from_host: Annotated[
        str | None,
        _where(
            "--from",
            metavar="HOST",
            help="The scenario's host of the initiators; by default prefill's first.",
        ),
    ] = None
    to_host: Annotated[
        str | None,
        _where("--to", metavar="HOST", help="The scenario's host of the targets; by default decode's first."),
    ] = None
    pairs: Annotated[
        str | None,
        _where(
            "--pairs",
            metavar="all",
            help="Each host of the scenario with each other, both ways: a matrix of who sends to whom.",
        ),
    ] = None
    seconds: Annotated[
        float | None, _how("--seconds", metavar="S", help="Of transfers for each case.", min=0.05, max=600.0)
    ] = None
    compare: Annotated[
        Path | None,
        _how(
            "--compare", metavar="RUN", help="Say what changed since this run.", exists=True, file_okay=False
        ),
    ] = None
    dry_run: Annotated[
        bool, _how("--dry-run", help="Print the matrix and the time it takes; start nothing.")
    ] = False


@dataclass(frozen=True)
class Settings:
    """How to measure. Times in seconds; ``options`` are those of backends, by backend name."""

    seconds: float = 0.5
    min_calls: int = 20
    max_seconds: float = 5.0
    """A case ends after this time, also with fewer than ``min_calls`` calls."""
    open_s: float = 15.0
    connect_s: float = 5.0
    call_s: float = 5.0
    """Deadline of one transfer; more for hundreds of megabytes (``measuring.SLOWEST_BYTES_PER_S``)."""
    seed: int = 0
    verify: bool = True
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lab: str = ""
    """What a lab is called in the rows; empty on real hosts."""
    burst_bytes: int | None = None
    """What a lab's shaper lets through at once, of each NIC."""
    nic_gb_per_s: float | None = None
    """Line rate of each NIC where the driver does not know it, as in a lab."""
