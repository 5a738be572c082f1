"""What the importers of transfer tools share: a row from the few things that such a tool prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning
from kvbench.importers.base import Origin, TransferRow


@dataclass
class Told:
    """One measurement as far as it is told. ``gb_per_s`` is in 10⁹ bytes per second, times in seconds."""

    case: Case
    gb_per_s: float
    calls: int | None = None
    window_s: float | None = None
    """The length of the measurement, if the tool tells it."""
    library: str = ""
    transport: str = ""
    prepare_s: float | None = None
    verified: bool | None = None
    also: Mapping[str, Any] = field(default_factory=dict)


def transfer_row(origin: Origin, told: Told, missing: Sequence[str]) -> TransferRow:
    """The row.

    What the tool does not tell stands in the record as its default, and by name in ``missing``.
    """
    absent = [
        *missing,
        *(
            name
            for name in ("calls", "window_s", "transport", "verified")
            if getattr(told, name) in (None, "")
        ),
        "call_s",
    ]
    absent = list(dict.fromkeys(absent))
    record = TransferRecord(
        told.case,
        transport=told.transport,
        library=told.library,
        nbytes=told.case.nbytes,
        logical_bytes=told.case.nbytes,
        descriptors=told.case.batch_size * told.case.regions,
        calls=told.calls or 0,
        window_s=told.window_s or 0.0,
        gb_per_s=told.gb_per_s,
        prepare_s=told.prepare_s,
        verified=told.verified,
    )
    record.warnings.append(
        TransferWarning(
            "imported",
            f"read from {origin.text()}, not measured by kvbench; not told: {', '.join(absent)}",
            evidence={
                "file": origin.file,
                "line": origin.line,
                "tool": origin.tool,
                "missing": absent,
                **dict(told.also),
            },
        )
    )
    return TransferRow(origin, record, dict(told.also), absent)
