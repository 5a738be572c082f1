"""Cases and rows of a transfer microbenchmark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

TransferOp = Literal["read", "write"]
Memory = Literal["host", "cuda"]
Status = Literal["ok", "error", "skipped"]

TRANSFER_SCHEMA: Final = 1
"""Version of the rows in ``transfers.parquet``; raised when a field changes its meaning, with an upgrade."""


@dataclass(frozen=True)
class Layout:
    """The shape of a registered buffer: bytes = regions · blocks · block_bytes."""

    regions: int
    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return self.regions * self.blocks * self.block_bytes

    def offset(self, region: int, block: int) -> int:
        """Byte offset of one block of one region."""
        return (region * self.blocks + block) * self.block_bytes

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """One point of the matrix.

    A transfer moves ``batch_size`` blocks of ``block_bytes`` bytes in each of ``regions`` regions, together
    ``nbytes``; each initiator has ``threads`` transfers in flight to each target. ``nics`` is 0 if no NIC is
    used (a copy in memory, shared memory, the null backend). ``scattered`` blocks are never adjacent in
    memory; others are, and are ``merged`` into runs if the backend supports it and the case requests it."""

    backend: str
    protocol: str
    op: TransferOp
    block_bytes: int
    batch_size: int
    threads: int = 1
    nics: int = 0
    initiators: int = 1
    targets: int = 1
    memory: Memory = "host"
    scattered: bool = False
    merged: bool = False
    regions: int = 1
    shape: str = ""
    """The KV cache that the descriptors stand for: ``qwen3-30b-a3b 32768 tokens, rank 1 of 8``; or empty."""

    @property
    def nbytes(self) -> int:
        return self.regions * self.batch_size * self.block_bytes

    @property
    def key(self) -> str:
        """Unique name of the case within a matrix."""
        parts = [self.backend, self.protocol, self.op, f"{self.block_bytes}x{self.batch_size}"]
        parts += [f"r{self.regions}", f"t{self.threads}", f"n{self.nics}"]
        parts += [f"{self.initiators}to{self.targets}", self.memory]
        parts += ["scattered"] if self.scattered else []
        parts += ["merged"] if self.merged else []
        return "-".join(parts)


@dataclass(frozen=True)
class TransferWarning:
    """A reason to distrust a row, as data with evidence and advice."""

    kind: str
    message: str
    advice: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class TransferRecord:
    """One case measured, refused or failed: a row of ``transfers.parquet``. Times end in ``_s`` and are
    seconds. ``gb_per_s`` is 10⁹ bytes over ``window_s``, the time from the first start to the last end over
    all initiators; ``call_s`` holds each call's own time, start to completion, one initiator after the other.
    ``logical_bytes`` counts each KV byte of a model once; ``nbytes`` is what one transfer moves."""

    case: Case
    status: Status = "ok"
    error: str = ""
    """Reason of a failure or skip, or empty."""
    log: list[str] = field(default_factory=list)
    """The library's last lines before an error."""
    transport: str = ""
    library: str = ""
    """Name and version of the library, such as ``nixl-cu12 1.5.1``."""
    started_at: str = ""
    nbytes: int = 0
    logical_bytes: int = 0
    descriptors: int = 0
    """Descriptors of one transfer, as passed to the library."""
    calls: int = 0
    window_s: float = 0.0
    gb_per_s: float | None = None
    call_s: list[float] = field(default_factory=list)
    warmup_calls: int = 0
    open_s: float | None = None
    register_s: float | None = None
    connect_s: float | None = None
    prepare_s: float | None = None
    """Median preparation time of one transfer's descriptors, outside the window."""
    initiator_cpu_s: float | None = None
    target_cpu_s: float | None = None
    """CPU time in the window over all initiators and targets."""
    verified: bool | None = None
    """Whether all bytes were compared and equal; None: the backend moves none."""
    nic_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes per NIC (``side:name``) in the window, larger direction."""
    nics_asked: list[str] = field(default_factory=list)
    line_rate_gb_per_s: float | None = None
    """Total line rate of the requested NICs."""
    load_average: float | None = None
    lab: str = ""
    """Lab of the run, such as ``8 × 1gbit``; empty on real hosts."""
    initiator_host: str = ""
    target_host: str = ""
    """Scenario names of the two hosts, or empty."""
    warnings: list[TransferWarning] = field(default_factory=list)

    @property
    def pair(self) -> str:
        """``initiator's host → target's``; empty where none were named."""
        return f"{self.initiator_host} → {self.target_host}" if self.initiator_host else ""

    def to_json(self) -> dict[str, Any]:
        return {"schema": TRANSFER_SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> TransferRecord:
        data = {key: value for key, value in row.items() if key != "schema"}
        data["case"] = Case(**data["case"])
        data["warnings"] = [TransferWarning(**warning) for warning in data.get("warnings", [])]
        return cls(**data)


def pairs_of(records: Iterable[TransferRecord]) -> list[str]:
    """Return the host pairs of these rows in order; empty if no hosts were named."""
    return list(dict.fromkeys(record.pair for record in records if record.pair))
