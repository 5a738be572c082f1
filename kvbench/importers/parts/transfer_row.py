"""What the importers of transfer tools share: a row from the few things that such a tool prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.transfers.records import Case, TransferRecord, TransferWarning
from kvbench.importers.base import Origin, TransferRow


@dataclass
class ReportedTransfer:
    """One measurement as far as it is reported. ``gb_per_s`` is in 10⁹ bytes per second, times in seconds."""

    case: Case
    gb_per_s: float
    calls: int | None = None
    window_s: float | None = None
    """The length of the measurement, if the tool reports it."""
    library: str = ""
    transport: str = ""
    prepare_s: float | None = None
    verified: bool | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    qualifiers: Sequence[str] = ()
    """What must be known with the bandwidth to read it."""


def transfer_row(origin: Origin, reported: ReportedTransfer, missing: Sequence[str]) -> TransferRow:
    """The row.

    What the tool does not report stands in the record as its default, and by name in ``missing``.
    """
    absent = [
        *missing,
        *(
            name
            for name in ("calls", "window_s", "transport", "verified")
            if getattr(reported, name) in (None, "")
        ),
        "call_s",
    ]
    absent = list(dict.fromkeys(absent))
    record = TransferRecord(
        reported.case,
        transport=reported.transport,
        library=reported.library,
        nbytes=reported.case.nbytes,
        logical_bytes=reported.case.nbytes,
        descriptors=reported.case.batch_size * reported.case.regions,
        calls=reported.calls or 0,
        window_s=reported.window_s or 0.0,
        gb_per_s=reported.gb_per_s,
        prepare_s=reported.prepare_s,
        verified=reported.verified,
    )
    record.warnings.append(
        TransferWarning(
            "imported",
            f"read from {origin.text()}, not measured by kvbench; "
            + "".join(f"{text}; " for text in reported.qualifiers)
            + f"not told: {', '.join(absent)}",
            evidence={
                "file": origin.file,
                "line": origin.line,
                "tool": origin.tool,
                "missing": absent,
                "qualifiers": list(reported.qualifiers),
                **dict(reported.also),
            },
        )
    )
    return TransferRow(origin, record, absent, list(reported.qualifiers))
