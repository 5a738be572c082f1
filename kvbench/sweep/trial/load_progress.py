"""What a load generator reports of a load: its progress while it runs, and the whole at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.core.records import RequestRecord


@dataclass(frozen=True)
class Settled:
    """A request whose outcome is final. ``index``: its place in the plan; times in seconds, None unseen.
    ``turn``, ``session_s``: as in a RequestRecord."""

    index: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None
    error: str = ""
    turn: int | None = None
    session_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """What the generator counts while it runs. ``settled``: what became final since the last progress."""

    t_s: float = 0.0
    sent: int = 0
    done: int = 0
    met: int = 0
    missed: int = 0
    in_flight: int = 0
    waiting_first: int = 0
    lag_ms: float = 0.0
    settled: tuple[Settled, ...] = ()
    offsets_s: tuple[float, ...] = ()
    """When the requests sent since the last progress were due, where no plan says so: turns of sessions."""

    @classmethod
    def from_json(cls, event: Mapping[str, Any]) -> Progress:
        """Takes what it knows of a worker's event."""
        known = {key: event[key] for key in cls.__dataclass_fields__ if key in event}
        known["settled"] = tuple(Settled(*each) for each in event.get("settled", ()))
        return cls(**known)


@dataclass(frozen=True)
class LoadResult:
    """Records of every planned request that was sent or due, and the client's own figures."""

    records: list[RequestRecord]
    reason: str
    duration_s: float
    client: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cancelled(self) -> int:
        """Requests that were dropped when the load was stopped."""
        return sum(record.error == "cancelled" for record in self.records)


def joined_progress(latest: Sequence[Progress], settled: tuple[Settled, ...]) -> Progress:
    """The workers' counts together, as each last reported them; ``settled`` is what one has just reported."""
    return Progress(
        t_s=max(each.t_s for each in latest),
        sent=sum(each.sent for each in latest),
        done=sum(each.done for each in latest),
        met=sum(each.met for each in latest),
        missed=sum(each.missed for each in latest),
        in_flight=sum(each.in_flight for each in latest),
        waiting_first=sum(each.waiting_first for each in latest),
        lag_ms=max(each.lag_ms for each in latest),
        settled=settled,
    )
