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
            help="Protocols, such as tcp or rdma; by default RDMA if available, else the usual one.",
        ),
    ] = None
    nics: Annotated[
        str | None, _matrix("--nics", metavar="N[,N…]", help="NICs to use, in order of affinity.")
    ] = None
    op: Annotated[str | None, _matrix("--op", metavar="write,read", help="Directions; by default both.")] = (
        None
    )
    block_size: Annotated[
        str | None, _matrix("--block-size", metavar="SIZE[,SIZE…]", help="Bytes of a block.")
    ] = None
    batch_size: Annotated[
        str | None, _matrix("--batch-size", metavar="N[,N…]", help="Blocks per transfer.")
    ] = None
    threads: Annotated[str | None, _matrix("--threads", metavar="N[,N…]", help="Concurrent transfers.")] = (
        None
    )
    initiators: Annotated[
        str | None, _matrix("--initiators", metavar="N[,N…]", help="Processes that start transfers.")
    ] = None
    targets: Annotated[
        str | None, _matrix("--targets", metavar="N[,N…]", help="Processes that are written to or read from.")
    ] = None
    memory: Annotated[str, _matrix("--memory", metavar="host|cuda", help="Memory of the buffers.")] = "host"
    scattered: Annotated[bool, _matrix("--scattered", help="Blocks that never touch, in shuffled order.")] = (
        False
    )
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
    all_ranks: Annotated[bool, _kv("--all-ranks", help="All ranks at once, one initiator each.")] = False
    lab: Annotated[
        bool, _where("--lab", help="In a lab made for this run: two hosts as network namespaces.")
    ] = False
    rate: Annotated[str, _where("--rate", metavar="RATE", help="Rate of each NIC of the lab.")] = "1gbit"
    lab_name: Annotated[
        str | None,
        _where("--lab-name", metavar="NAME", help="Use the existing lab of this name (kvbench lab up)."),
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
            help="The other machine's Python with kvbench; by default the same path.",
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
        _where("--pairs", metavar="all", help="All pairs of the scenario's hosts, in both directions."),
    ] = None
    seconds: Annotated[
        float | None,
        _how("--seconds", metavar="S", help="Duration of the transfers of each case.", min=0.05, max=600.0),
    ] = None
    compare: Annotated[
        Path | None,
        _how("--compare", metavar="RUN", help="Show changes since this run.", exists=True, file_okay=False),
    ] = None
    dry_run: Annotated[
        bool, _how("--dry-run", help="Print the matrix and the estimated time; start nothing.")
    ] = False


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement. Times in seconds; ``options`` are those of backends, by backend name."""

    seconds: float = 0.5
    min_calls: int = 20
    max_seconds: float = 5.0
    """Maximum duration of a case, even with fewer than ``min_calls`` calls."""
    open_s: float = 15.0
    connect_s: float = 5.0
    call_s: float = 5.0
    """Deadline of one transfer; longer for hundreds of megabytes (``cases.SLOWEST_BYTES_PER_S``)."""
    seed: int = 0
    verify: bool = True
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lab: str = ""
    """The lab's name in the rows; empty on real hosts."""
    burst_bytes: int | None = None
    """Burst size of a lab's shaper, per NIC."""
    nic_gb_per_s: float | None = None
    """Line rate of each NIC if the driver does not know it, as in a lab."""
