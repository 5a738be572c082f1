"""Draw a system: ``draw(seed, index)``. The index sets the leading kind, so that each has enough members.

The family is broader than the systems that a search is developed on, and shares none with them. SLOs are a
share of .5 to .999, a percentile or a mean, with limits of 1.02 to 20 × idle. Draws are rounded, so that
machines that differ in the last bit of a logarithm draw the same systems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from .system import Batch, Discipline, Disturbances, Form, Service, Slo, System, Workload

DIGITS: Final = 6
T = TypeVar("T")


@dataclass
class Dice:
    """Random choices from one generator."""

    rng: np.random.Generator

    def between(self, low: float, high: float) -> float:
        return rounded(low + (high - low) * float(self.rng.random()))

    def scale(self, low: float, high: float) -> float:
        """Draw uniformly in the logarithm."""
        return rounded(math.exp(math.log(low) + math.log(high / low) * float(self.rng.random())))

    def one(self, choices: Sequence[T]) -> T:
        return choices[int(float(self.rng.random()) * len(choices))]

    def chance(self, share: float) -> bool:
        return float(self.rng.random()) < share


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


SHARES = (0.5, 0.8, 0.9, 0.9, 0.95, 0.95, 0.95, 0.99, 0.99, 0.999)
PERCENTILES = (50, 90, 90, 95, 99)


def draw_slo(lead: str, system: System, dice: Dice, looseness: float) -> Slo:
    """Draw an SLO. ``looseness`` in [0, 1) sets the TTFT limit, evenly over its logarithm.

    The limit is a multiple of the TTFT that the required share of lone requests meets. About 1 in 20 limits
    is below that, so that no rate meets the SLO.
    """
    form = dice.one(("share", "share", "share", "percentile", "mean"))
    share = dice.one(SHARES) if form == "share" else dice.one(PERCENTILES) / 100
    paused = system.disturbances.pause_s / system.disturbances.pause_every_s
    if paused and dice.chance(0.6):
        share = min(share, 0.5 if paused > 0.04 else 0.8)
    work = 1.0 if form == "mean" else system.service.quantile(share)
    # From a limit that leaves almost no room for queueing to one that allows a long queue.
    factor = 1.02 * (20 / 1.02) ** looseness
    least = 0.0
    if system.disturbances.drift:
        factor = max(factor, 1.8)  # above the idle TTFT even after the drift
    if system.disturbances.pause_s:
        least = system.disturbances.pause_s * dice.between(0.3, 1.5)
    if dice.chance(0.05):
        factor, least = dice.between(0.5, 0.95), 0.0
    ttft_ms = rounded(1e3 * (factor * system.idle_ttft_s(work) + least))
    tpot_ms = _tpot_ms(lead, system, dice)
    if tpot_ms is not None and form != "mean" and dice.chance(0.15):
        ttft_ms = rounded(ttft_ms * 3)
    if form == "share":
        return Slo(ttft_ms, tpot_ms, share)
    statistic = "mean" if form == "mean" else f"p{share * 100:g}"
    limits = [f"ttft_ms {statistic} <= {ttft_ms:.12g}"]
    if tpot_ms is not None:
        limits.append(f"tpot_ms {statistic} <= {tpot_ms:.12g}")
    return Slo(None, None, 0.95, tuple(limits))


def _tpot_ms(lead: str, system: System, dice: Dice) -> float | None:
    """Draw a TPOT limit that binds if the batch slows tokens down; else one that always holds, or None."""
    idle, length = system.idle_tpot_s, system.workload.output_len
    if length == 1:
        return None
    if system.disturbances.drift:
        return rounded(1e3 * idle * dice.between(1.8, 4)) if dice.chance(0.5) else None
    if system.batch is not None:
        _, loaded = system.batch.loaded(system.workload.input_len, length)
        return rounded(1e3 * (idle + (loaded - idle) * dice.between(0.3, 2))) if dice.chance(0.7) else None
    if system.slope_s:
        if lead != "decode" and dice.chance(0.5):
            return None
        return rounded(1e3 * idle * dice.between(1.1, 4))
    return rounded(1e3 * idle * dice.between(1.05, 3)) if dice.chance(0.4) else None


SEEDS: Final[Mapping[str, int]] = {
    "develop": 20261122, "check": 48271, "release": 7919102, "release-2": 38150413, "release-3": 83891668,
    "release-4": 57120643, "release-5": 44907218, "release-6": 38158041, "release-7": 61730295,
    "release-8": 90214657, "release-9": 22963885,
}  # fmt: skip
"""Seeds by name. Use those named ``release`` for a release only: no tuning, no look at single systems."""
SIZES: Final[Mapping[str, int]] = {
    "develop": 60,
    "check": 60,
    "release": 120,
    "release-2": 240,
    "release-3": 240,
    "release-4": 240,
    "release-5": 240,
    "release-6": 240,
    "release-7": 240,
    "release-8": 240,
    "release-9": 240,
}
LEADS: Final = (
    "deterministic", "random", "heavy", "parallel", "sharing", "batching", "preempting", "decode",
    "bursty", "pauses", "warm-up", "drift", "co-tenants", "noisy", "mixture",
)  # fmt: skip
"""Leading kinds, in turn: the first leads indices 0, 15, 30, …"""
EVENLY: Final = (0.8191725133961645, 0.6710436067037893, 0.5497004779019703)
"""Steps modulo 1 that fill a cube evenly (negative powers of the positive root of x⁴ = x + 1)."""


def seed_of(name: str) -> int:
    """Return the seed of a name or of a number as text. Raises ValueError."""
    if name in SEEDS:
        return SEEDS[name]
    try:
        seed = int(name)
    except ValueError:
        raise ValueError(f"{name!r} is no seed: a number, or {', '.join(SEEDS)}") from None
    if seed < 0:
        raise ValueError(f"a seed is 0 or more, not {seed}")
    return seed


def family(name: str) -> list[System]:
    return [draw(SEEDS[name], index) for index in range(SIZES[name])]


def draw(seed: int, index: int) -> System:
    lead = LEADS[index % len(LEADS)]
    dice = Dice(np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index]))))
    # Capacity, limit and the kind's main property spread evenly over its members, from a random start.
    lead_index, round_ = index % len(LEADS), index // len(LEADS)
    shift = np.random.default_rng([seed, lead_index, 1]).random(len(EVENLY)).tolist()
    speed, looseness, extent = ((at + step * round_) % 1.0 for at, step in zip(shift, EVENLY, strict=True))
    name = next((known for known, number in SEEDS.items() if number == seed), str(seed))
    discipline, servers = _servers(lead, dice, extent)
    service = _service(lead, dice, extent)
    workload = _workload(lead, dice, extent)
    bare = System(
        name=f"{name}-{index:03d}",
        kinds=(),
        discipline=discipline,
        servers=servers,
        prefill_s=0.0,
        service=service,
        token_s=0.0,
        slope_s=0.0,
        batch=None,
        disturbances=Disturbances(),
        aborts=dice.chance(0.5),
        workload=workload,
        slo=Slo(None, None, 0.9),
    )
    timed = _timed(lead, bare, dice, speed)
    timed = replace(timed, disturbances=_disturbances(lead, dice, extent))
    system = replace(timed, slo=draw_slo(lead, timed, dice, looseness))
    return replace(system, kinds=kinds_of(lead, system))


def _servers(lead: str, dice: Dice, extent: float) -> tuple[Discipline, int]:
    if lead in ("batching", "preempting"):
        return "batching", 1
    many = round(dice.scale(2, 128)) if dice.chance(0.3) else 1
    if lead == "parallel":
        many = round(2 * 64**extent)
    shares = lead == "sharing" or (lead not in ("parallel", "heavy", "decode") and dice.chance(0.15))
    return ("sharing" if shares else "fifo"), many


def _service(lead: str, dice: Dice, extent: float) -> Service:
    mixture: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    if lead == "mixture":
        share, factor = dice.between(0.05, 0.4), dice.scale(2, 20)
        short = 1 / (1 - share + share * factor)
        mixture = ((rounded(1 - share), rounded(short)), (share, rounded(factor * short)))
    if lead == "deterministic" or (lead in ("batching", "preempting") and dice.chance(0.5)):
        return Service(mixture=mixture)
    if lead == "heavy":
        if dice.chance(0.35):
            return Service("bimodal", dice.between(15, 25))
        return Service("lognormal", rounded(1.0 + extent))
    forms: Sequence[Form] = ("deterministic", "exponential", "lognormal", "lognormal")
    form = dice.one(forms if lead != "random" else forms[1:])
    if lead in ("parallel", "sharing") and dice.chance(0.3):
        form = dice.one(("bimodal", "lognormal"))
    spread = {"lognormal": dice.between(0.2, 1.2), "bimodal": dice.between(10, 25)}.get(form, 0.0)
    if lead in ("batching", "preempting"):
        form, spread = "lognormal", dice.between(0.2, 1.0)
    return Service(form, spread, mixture)


def _workload(lead: str, dice: Dice, extent: float) -> Workload:
    burstiness = 1.0
    if lead == "bursty":
        burstiness = rounded(0.2 * 3.5**extent)
    elif dice.chance(0.1):
        burstiness = dice.scale(0.5, 4)
    one_token = lead not in ("batching", "preempting", "decode") and dice.chance(0.1)
    output_len = 1 if one_token else round(dice.scale(8, 600))
    return Workload(round(dice.scale(64, 8192)), output_len, burstiness)


def _timed(lead: str, bare: System, dice: Dice, speed: float) -> System:
    """Add the times: capacities from 0.05 to 2,000 requests per second, requests of a few minutes at most."""
    length = bare.workload.output_len
    if bare.discipline == "batching":
        return replace(bare, batch=_batch(lead, bare.workload, dice))
    slowest, fastest = max(0.05, bare.servers / 40), min(2000.0, bare.servers / 0.002)
    capacity = slowest * (fastest / slowest) ** speed
    prefill_s = rounded(bare.servers / capacity)
    # Decode takes 0.1 to 10 times as long as prefill, but at most a minute.
    decode_s = min(prefill_s * dice.scale(0.1, 10), 60.0)
    token_s = rounded(decode_s / max(length - 1, 1)) if length > 1 else 0.0
    slope_s = 0.0
    if length > 1 and (lead == "decode" or dice.chance(0.1)):
        # ``growth``: slowdown of a token at the capacity, where ``many`` requests decode.
        growth = dice.between(1.5, 6)
        many = max(1.0, capacity * (length - 1) * token_s * growth)
        slope_s = rounded((growth - 1) * token_s / many)
    return replace(bare, prefill_s=prefill_s, token_s=token_s, slope_s=slope_s)


def _batch(lead: str, workload: Workload, dice: Dice) -> Batch:
    slots = round(dice.scale(8, 256))
    length = workload.input_len + workload.output_len
    room = dice.between(0.2, 0.6) if lead == "preempting" else dice.between(1.1, 3)
    kv = max(round(slots * length * room), 3 * length)
    step_s = dice.scale(0.004, 0.05)
    return Batch(
        slots=slots,
        token_budget=max(round(dice.scale(512, 8192)), 2 * slots),
        kv_tokens=kv,
        step_s=step_s,
        sequence_s=rounded(step_s * dice.scale(0.05, 2) / slots),
        token_s=rounded(step_s * dice.scale(0.3, 10) / 2048),
    )


def _disturbances(lead: str, dice: Dice, extent: float) -> Disturbances:
    every_s = dice.between(8, 40)
    return Disturbances(
        pause_s=rounded(every_s * 0.01 * 10**extent) if lead == "pauses" else 0.0,
        pause_every_s=every_s,
        warmup_factor=rounded(1.15 + 0.35 * extent) if lead == "warm-up" else 1.0,
        drift=rounded(0.003 + 0.017 * extent) if lead == "drift" else 0.0,
        tenants=rounded(0.1 + 0.3 * extent) if lead == "co-tenants" else 0.0,
        noise=rounded(0.01 + 0.05 * extent) if lead == "noisy" or dice.chance(0.05) else 0.0,
    )


def kinds_of(lead: str, system: System) -> tuple[str, ...]:
    """Return the lead and all other properties that coverage may require."""
    service, disturbances, slo = system.service, system.disturbances, system.slo
    kinds: Sequence[tuple[str, Callable[[], bool]]] = (
        (system.discipline, lambda: True),
        (service.form, lambda: True),
        ("mixture", lambda: len(service.mixture) > 1),
        ("heavy", lambda: service.second_moment >= math.e),
        ("one server", lambda: system.batch is None and system.servers == 1),
        ("up to 16 servers", lambda: 1 < system.servers <= 16),
        ("up to 128 servers", lambda: system.servers > 16),
        ("decode slows", lambda: system.slope_s > 0),
        ("bursty", lambda: system.workload.burstiness < 0.75),
        ("smooth", lambda: system.workload.burstiness > 1.5),
        ("noisy", lambda: disturbances.noise > 0),
        ("aborts", lambda: system.aborts),
        ("does not abort", lambda: not system.aborts),
        ("SLO mean", lambda: any(" mean " in limit for limit in slo.limits)),
        ("SLO percentile", lambda: any(" p" in limit for limit in slo.limits)),
        ("SLO share", lambda: not slo.limits),
        ("SLO tail", lambda: slo.attainment >= 0.99 or any(" p99" in limit for limit in slo.limits)),
        ("SLO TPOT", lambda: slo.tpot_ms is not None or any("tpot" in limit for limit in slo.limits)),
        ("slow", lambda: system.capacity < 0.5),
        ("fast", lambda: system.capacity > 200),
    )
    return tuple(dict.fromkeys([lead, *(name for name, applies in kinds if applies())]))
