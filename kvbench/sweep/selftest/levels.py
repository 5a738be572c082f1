"""What a selftest found with each number of streams, and up to how many of them the host can be trusted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from kvbench.core.gates.evidence import HostFigures
from kvbench.sweep.selftest.undisturbed import disturbance
from kvbench.version import __version__

SCHEMA: Final = 1
FIRST_TOKEN_S: Final = 0.05
GAP_S: Final = 0.01
OUTPUT_LEN: Final = 128
INPUT_LEN: Final = 256
DURATION_S: Final = FIRST_TOKEN_S + (OUTPUT_LEN - 1) * GAP_S
ALLOWED_MS: Final = 5.0
"""The least that gates allow a client to be late by; below it no trial is refused for the client's sake."""
QUOTED_OUTPUT_LEN: Final = 256


@dataclass(frozen=True)
class Level:
    """What was found with one number of streams. Times in ms; None: nothing was seen to say it of."""

    streams: int
    request_rate: float
    requests: int
    failed: int
    streams_open: float
    chunks_per_s: float
    ttft_error_p50_ms: float | None
    ttft_error_p99_ms: float | None
    itl_error_p50_ms: float | None
    itl_error_p99_ms: float | None
    unmatched: int
    send_lag_p99_ms: float | None
    stamps: str
    client_cpu_s: float | None
    chunks_per_core_s: float | None
    server_late_first_p99_ms: float | None
    server_late_further_p99_ms: float | None
    server_chunks_per_core_s: float | None
    load_average: float | None
    reads_by: str = ""
    """"compiled" or "python": which way of the load generator's read what came."""
    steal_share: float | None = None
    """Of the machine's CPU time, what the hypervisor took meanwhile."""
    other_cpu_share: float | None = None
    """What processes used that are none of the measurement's."""
    tries: int = 1

    @property
    def disturbed(self) -> str:
        """What else the machine did meanwhile, in words; empty if it was left alone, as gates see it."""
        host = HostFigures(steal_share=self.steal_share, other_cpu_share=self.other_cpu_share)
        return disturbance(host)

    @property
    def trusted(self) -> bool:
        """Nothing failed, and nothing was off by more than the gates allow."""
        figures = (self.ttft_error_p99_ms, self.itl_error_p99_ms, self.send_lag_p99_ms)
        return not self.failed and all(figure is not None and figure <= ALLOWED_MS for figure in figures)

    def faults(self) -> list[str]:
        """What speaks against it, in words."""
        named = {
            "TTFT is wrong by": self.ttft_error_p99_ms,
            "gaps between tokens are wrong by": self.itl_error_p99_ms,
            "requests are sent late by": self.send_lag_p99_ms,
        }
        said = [
            f"{what} {value:.1f} ms"
            for what, value in named.items()
            if value is not None and value > ALLOWED_MS
        ]
        if self.failed:
            said.append(f"{self.failed} requests failed")
        if not self.requests:
            said.append("no request ended")
        late = self.server_late_further_p99_ms
        if said and self.disturbed:
            said.append(f"{self.disturbed} meanwhile")
        elif said and late is not None and late > ALLOWED_MS:
            said.append(f"the built-in server was itself late by {late:.1f} ms, so this is the host's limit")
        return said


@dataclass(frozen=True)
class Selftest:
    """All levels, and the host they were measured on."""

    host: dict[str, Any]
    levels: tuple[Level, ...]
    skipped: tuple[str, ...] = ()

    @property
    def best(self) -> Level | None:
        """The most streams that can be trusted, as can all levels below."""
        best = None
        for level in self.levels:
            if not level.trusted:
                break
            best = level
        return best

    def verdict(self) -> str:
        """One or two lines: up to what the host can be trusted, or why it cannot be at all."""
        best = self.best
        if best is None:
            if not self.levels:
                return "Nothing was measured: " + "; ".join(self.skipped)
            worst = self.levels[0]
            return (
                f"This host cannot be trusted, not even with {worst.streams} streams: "
                + "; ".join(worst.faults())
                + f" (P99; {ALLOWED_MS:g} ms allowed). Stop other work here, or measure from another host."
            )
        rate = best.chunks_per_s / QUOTED_OUTPUT_LEN
        more = "at least" if best is self.levels[-1] else "up to"
        said = (
            f"Trusted with {more} {best.streams} streams, {best.chunks_per_s:,.0f} tokens/s: "
            f"{more} {rate:.0f} req/s of {QUOTED_OUTPUT_LEN} output tokens with one worker."
        )
        # The cost of a token falls with the load, as more is done at each wake-up.
        ceiling = max((level.chunks_per_core_s or 0 for level in self.levels), default=0)
        if ceiling:
            full = ceiling / QUOTED_OUTPUT_LEN
            said += f" A core would be full at about {ceiling:,.0f} tokens/s ({full:.0f} req/s)."
        following = self.levels[self.levels.index(best) + 1 :]
        if following:
            said += f" With {following[0].streams} streams " + "; ".join(following[0].faults()) + " (P99)."
        return said

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "schema": SCHEMA,
            "version": __version__,
            "host": self.host,
            "work": {
                "first_token_s": FIRST_TOKEN_S,
                "gap_s": GAP_S,
                "output_len": OUTPUT_LEN,
                "input_len": INPUT_LEN,
            },
            "levels": [{**asdict(level), "trusted": level.trusted} for level in self.levels],
            "skipped": list(self.skipped),
            "trusted_streams": 0 if best is None else best.streams,
            "verdict": self.verdict(),
        }
