"""Which limit binds: what the requests that missed the SLO were waiting for. Pure.

One trial above the answer is examined: the requests' times (client and router) and the engines' use (``Use``:
known exactly in a simulated trial, else from samples of gauges). The rule:

1. More misses over TPOT than over TTFT: **tpot**, the decode step (and prefill chunks of aggregated servers).
2. Otherwise the TTFT of late requests has parts: *client* (sent late), *router*, *prefill* (time at P beyond
   the least for that length), *after prefill* (the same from P's answer to D's first byte). The last is the
   transfer for its measured time, and else waiting for D's slots or KV pool.
3. The largest part names the limit, with two exceptions: P that idles while its KV pool is full of prompts
   not yet fetched is blocked by the next stage; and where almost nothing waits, the work itself takes
   too long. An unknown part (no router times, no gauges) gives "undetermined", not a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Final, Literal, get_args

import numpy as np

from kvbench.core.metrics.metrics import Window
from kvbench.core.metrics.ttft_breakdown import parts_of, shares_of
from kvbench.core.records import UNENDED, RequestRecord, TrialRecord
from kvbench.core.slo import Slo


@dataclass
class Use:
    """Use of one role's engines; times as shares of the trial, counts per engine. ``slots_full_share``: all
    slots taken with a queue. ``kv_full_share``: too few free KV blocks for the queue's head. None:
    unknown."""

    engines: int = 1
    busy_share: float | None = None
    running_mean: float | None = None
    running_peak: float | None = None
    waiting_mean: float | None = None
    waiting_peak: float | None = None
    kv_use_mean: float | None = None
    kv_use_peak: float | None = None
    slots: int | None = None
    slots_full_share: float | None = None
    kv_full_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Use:
        """Read the known figures of a row."""
        known = cls.__dataclass_fields__
        return cls(**{key: row[key] for key in known if row.get(key) is not None})


RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USE: Final = "vllm:kv_cache_usage_perc"
_KV_FULL: Final = 0.97
"""Use of a KV pool from which it counts as full: a request needs many blocks at once."""


def sampled_use(rows: Iterable[Mapping[str, Any]], slots: int | None) -> dict[str, Use]:
    """Return the use by role from samples of gauges: rows with ``t_s``, ``source`` (an instance's name, which
    begins with its role), ``metric``, ``value``. ``slots``: max_num_seqs, if known."""
    moments: dict[str, dict[tuple[float, str], dict[str, float]]] = {}
    for row in rows:
        role = str(row["source"]).split("-")[0].split("/")[0]
        if row["metric"] in (RUNNING, WAITING, KV_USE) and role in ("prefill", "decode", "aggregated"):
            moment = (float(row["t_s"]), str(row["source"]))
            moments.setdefault(role, {}).setdefault(moment, {})[str(row["metric"])] = float(row["value"])
    return {role: _use_of_samples(seen, slots) for role, seen in moments.items()}


def _use_of_samples(seen: Mapping[tuple[float, str], Mapping[str, float]], slots: int | None) -> Use:
    running, waiting, kv = (
        [state[name] for state in seen.values() if name in state] for name in (RUNNING, WAITING, KV_USE)
    )
    queued = [state for state in seen.values() if state.get(WAITING, 0.0) > 0]
    full = None if slots is None else sum(figures.get(RUNNING, 0.0) >= slots for figures in queued)
    return Use(
        engines=len({source for _, source in seen}),
        running_mean=fmean(running) if running else None,
        running_peak=max(running, default=None),
        waiting_mean=fmean(waiting) if waiting else None,
        waiting_peak=max(waiting, default=None),
        kv_use_mean=fmean(kv) if kv else None,
        kv_use_peak=max(kv, default=None),
        slots=slots,
        slots_full_share=None if full is None else full / len(seen),
        kv_full_share=sum(state.get(KV_USE, 0.0) >= _KV_FULL for state in queued) / len(seen) if kv else None,
    )


LimitKind = Literal["prefill", "transfer", "decode_slots", "tpot", "router", "client", "none", "undetermined"]
LIMIT_WORDS: Final[Mapping[str, str]] = {
    "prefill": "prefill queue",
    "transfer": "KV transfer",
    "decode_slots": "decode slots",
    "tpot": "TPOT (decode steps)",
    "router": "router",
    "client": "client",
    "none": "none",
    "undetermined": "undetermined",
}
"""Names of the limits in tables."""
LIMIT_SHORT: Final[Mapping[str, str]] = {
    **LIMIT_WORDS,
    "prefill": "prefill",
    "transfer": "transfer",
    "tpot": "TPOT",
    "decode_slots": "slots",
    "undetermined": "unclear",
}
"""Names in narrow tables."""
assert set(LIMIT_WORDS) == set(get_args(LimitKind))

FULL_SHARE: Final = 0.25
"""Share of the trial from which slots or a KV pool count as full; the trial includes ramp and drain."""
IDLE_SHARE: Final = 0.85
"""Busy share below which engines with a queue are blocked by something else."""
FEW: Final = 3
WAITING_SHARE: Final = 0.3
"""Share of TTFT below which waiting explains nothing: the work itself is too long."""
LONG_GAP: Final = 2.0


@dataclass(frozen=True)
class TrialFacts:
    """Facts besides the requests. ``use``: by role. ``kv_transfer_ms``: mean."""

    request_rate: float
    duration_s: float
    window: Window
    use: Mapping[str, Use] = field(default_factory=dict)
    kv_transfer_ms: float | None = None

    @classmethod
    def of(cls, trial: TrialRecord) -> TrialFacts:
        window = trial.summary.get("window") or {}
        use = {role: Use.from_json(row) for role, row in (trial.engine.get("use") or {}).items()}
        for role, figures in (trial.engine.get("roles") or {}).items():
            of_role, busy_s = use.setdefault(role, Use()), figures.get("busy_s")
            if of_role.busy_share is None and busy_s is not None and trial.duration_s > 0:
                of_role.busy_share = min(1.0, busy_s / trial.duration_s / of_role.engines)
        return cls(
            trial.request_rate,
            trial.duration_s,
            Window(float(window.get("start_s", 0.0)), float(window.get("end_s", trial.duration_s))),
            use,
            trial.engine.get("kv_transfer_ms_per_request"),
        )


@dataclass(frozen=True)
class Binding:
    """The limit, its evidence in words, and shares of the late requests' TTFT by part."""

    limit: LimitKind
    evidence: str
    shares: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"limit": self.limit, "evidence": self.evidence, "shares": dict(self.shares)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Binding:
        limit = row.get("limit")
        kind: LimitKind = next((arg for arg in get_args(LimitKind) if arg == limit), "undetermined")
        return cls(kind, str(row.get("evidence", "")), dict(row.get("shares") or {}))


NEAR: Final = 0.9
"""Share of the answer's lower end down to which a missed rate shows the same limit."""


def limiting_trial(trials: Sequence[TrialRecord], lower: float | None) -> TrialRecord | None:
    """Return the trial with the lowest missed rate above ``lower``, or the nearest substitute."""
    least = lower or 0.0
    for verdict, bound in (("missed", least * (1 + 1e-9)), ("undecided", least), ("missed", least * NEAR)):
        found = [trial for trial in trials if trial.verdict == verdict and trial.request_rate >= bound]
        if found:
            return min(found, key=lambda trial: trial.request_rate)
    return None


def limit_of_cell(trials: Sequence[TrialRecord], lower: float | None) -> dict[str, Any] | None:
    """Return the stored limit of a cell (limit, evidence, shares, trial)."""
    trial = limiting_trial(trials, lower)
    if trial is None:
        met_only = lower is not None and all(record.verdict == "met" for record in trials)
        return Binding("none", "no tested rate missed the SLO").to_json() if met_only else None
    limit = trial.engine.get("limit")
    return {**limit, "trial_id": trial.trial_id} if isinstance(limit, Mapping) else None


def note_limit(trial: TrialRecord, records: Sequence[RequestRecord], slo: Slo) -> None:
    """Store the limit of a missed trial in its engine columns."""
    if trial.verdict not in ("met", "invalid"):
        trial.engine["limit"] = binding_of(records, slo, TrialFacts.of(trial)).to_json()


def binding_of(records: Sequence[RequestRecord], slo: Slo, facts: TrialFacts) -> Binding:
    """Return the limit of this trial's rate; "none" if nothing was late."""
    judged = [record for record in records if facts.window.has(record.scheduled_s)]
    ttft_ms, tpot_ms = slo.tightest("ttft_ms"), slo.tightest("tpot_ms")
    over_ttft = [r for r in judged if _over(_waited_s(r, facts.duration_s), ttft_ms)]
    over_tpot = [r for r in judged if r.ok and _over(r.tpot_s, tpot_ms)]
    failed = [
        r
        for r in judged
        if r.error not in ("", "cancelled") and not (r.error == "timeout" and r.first_token_s is None)
    ]
    at = f"at {facts.request_rate:.3g} req/s"
    if len(failed) > len(over_ttft) + len(over_tpot):
        kinds = ", ".join(sorted({r.error for r in failed}))
        return Binding("undetermined", f"{at}, {len(failed)} of {len(judged)} requests failed ({kinds})")
    if len(over_tpot) > len(over_ttft):
        return _tpot(over_tpot, at, tpot_ms or 0.0, facts)
    if not over_ttft:
        # A growing queue may show before it is long: in the steady part, or else before it.
        judged = next((part for part in (judged, list(records)) if _grows(part)), [])
        if not judged:
            return Binding("none", f"{at}, no limit was exceeded")
        over_ttft = _late_tail(judged)
    return _ttft(over_ttft, judged, at, facts, records)


def _over(value_s: float | None, limit_ms: float | None) -> bool:
    return value_s is not None and limit_ms is not None and value_s * 1e3 > limit_ms


def _waited_s(record: RequestRecord, ended_s: float) -> float | None:
    """Return TTFT, or the wait so far."""
    if record.ttft_s is not None and record.error in ("", "cancelled"):
        return record.ttft_s
    return ended_s - record.scheduled_s if record.error in UNENDED else None


def _late_tail(judged: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the last quarter of arrivals, which waits longest in a growing queue."""
    known = sorted((r for r in judged if r.ttft_s is not None), key=lambda r: r.scheduled_s)
    return known[-max(FEW, len(known) // 4) :]


def _grows(judged: Sequence[RequestRecord]) -> bool:
    known = sorted((r for r in judged if r.ttft_s is not None), key=lambda r: r.scheduled_s)
    quarter = len(known) // 4
    if quarter < FEW:
        return False
    early, late = known[:quarter], known[-quarter:]
    return fmean(r.ttft_s or 0.0 for r in late) > 1.5 * fmean(r.ttft_s or 0.0 for r in early)


def _tpot(late: Sequence[RequestRecord], at: str, limit_ms: float, facts: TrialFacts) -> Binding:
    gaps = [gap for record in late for gap in record.itl_s]
    text = f"{at}, {len(late)} requests exceeded a TPOT of {limit_ms:g} ms"
    if not gaps:
        return Binding("tpot", text)
    plain = float(np.percentile(gaps, 10))  # a step that only decodes
    long_share = sum(gap for gap in gaps if gap > LONG_GAP * plain) / max(sum(gaps), 1e-12)
    text += f"; their median gap between tokens was {median(gaps) * 1e3:.3g} ms"
    use = facts.use.get("decode") or facts.use.get("aggregated")
    if use is not None and use.running_mean is not None:
        text += f" with {use.running_mean:.0f} sequences running on average"
    if long_share >= 0.2:
        cause = "that also computed prompts" if "aggregated" in facts.use else "much longer than others"
        text += f", and {long_share:.0%} of their decode time was in steps {cause}"
    return Binding("tpot", text, {"long_gaps": long_share})


def _ttft(
    late: Sequence[RequestRecord],
    judged: Sequence[RequestRecord],
    at: str,
    facts: TrialFacts,
    everyone: Sequence[RequestRecord],
) -> Binding:
    known = [(r, parts) for r in judged if (parts := parts_of(r)) is not None]
    timed = {id(r): parts for r, parts in known}
    timed_late = [(r, timed[id(r)]) for r in late if id(r) in timed]
    if len(timed_late) < FEW:
        # The trial stopped before the late requests were answered: the slowest answered ones show the same.
        timed_late = sorted(known, key=lambda pair: pair[0].ttft_s or 0.0)[-max(FEW, len(known) // 4) :]
    if len(timed_late) < FEW:
        return Binding("undetermined", f"{at}, too few late requests have recorded times")
    pair = any(parts.after is not None for _, parts in timed_late)
    if not pair and ("decode" in facts.use or facts.kv_transfer_ms is not None):
        return Binding("undetermined", f"{at}, requests were late, but the router reported no times")
    if not pair and not facts.use:
        return Binding("undetermined", f"{at}, requests were late, but the server does not report its load")
    # The shortest times come from the whole trial, since its first requests found empty queues.
    timed_all = [(r, parts) for r in everyone if (parts := parts_of(r)) is not None]
    shares = shares_of(timed_late, timed_all, (facts.kv_transfer_ms or 0.0) / 1e3)
    return _name_binding(shares, at, facts, pair)


def _name_binding(shares: Mapping[str, float], at: str, facts: TrialFacts, pair: bool) -> Binding:
    whole = f"{at}, {{share:.0%}} of the TTFT of late requests was "

    def binds(limit: LimitKind, part: str, text: str) -> Binding:
        return Binding(limit, whole.format(share=shares[part]) + text, shares)

    waits = {part: shares[part] for part in ("client", "router", "prefill_wait", "transfer", "decode_wait")}
    part = max(waits, key=lambda name: waits[name])
    if shares["prefill_work"] > waits[part] and sum(waits.values()) < WAITING_SHARE:
        return binds("prefill", "prefill_work", "the prompt's computation itself")
    if part == "client":
        return binds("client", part, "waiting for the load generator to send")
    if part == "router":
        return binds("router", part, "in the router and the network before it")
    if part == "transfer":
        return binds("transfer", part, f"the KV transfer ({facts.kv_transfer_ms or 0.0:.3g} ms on average)")
    if part == "decode_wait":
        return _after_prefill(binds, part, facts)
    if not pair:
        return _aggregate(binds, facts.use["aggregated"] if "aggregated" in facts.use else Use())
    prefill = facts.use.get("prefill") or Use()
    busy = prefill.busy_share
    blocked = (prefill.kv_full_share or 0.0) >= FULL_SHARE and busy is not None and busy < IDLE_SHARE
    if blocked:
        text = (
            f"waiting for P, which was busy only {busy:.0%} of the time: its KV pool was full of prompts "
            "that decode had not fetched yet"
        )
        decode = facts.use.get("decode") or Use()
        return binds("decode_slots" if _is_full(decode) else "transfer", part, text)
    return binds("prefill", part, "waiting for prefill" + ("" if busy is None else f" (P busy {busy:.0%})"))


def _is_full(use: Use) -> bool:
    return max(use.slots_full_share or 0.0, use.kv_full_share or 0.0) >= FULL_SHARE


def _after_prefill(binds: Any, part: str, facts: TrialFacts) -> Binding:
    decode = facts.use.get("decode")
    if decode is None or (decode.slots_full_share is None and decode.kv_full_share is None):
        binding: Binding = binds(
            "undetermined", part, "waiting for decode; unknown whether for slots, KV blocks or steps"
        )
    elif _is_full(decode):
        binding = binds("decode_slots", part, f"waiting for a decode slot: {_fullness(decode)}")
    elif facts.kv_transfer_ms is None:
        binding = binds("transfer", part, "between prefill and decode, while decode had free slots")
    else:
        binding = binds("undetermined", part, "waiting on decode, although it had free slots")
    return binding


def _aggregate(binds: Any, use: Use) -> Binding:
    binding: Binding
    if _is_full(use):
        binding = binds("decode_slots", "prefill_wait", f"waiting for a slot: {_fullness(use)}")
    else:
        busy = "" if use.busy_share is None else f" (the server was busy {use.busy_share:.0%})"
        binding = binds("prefill", "prefill_wait", f"waiting for prefill{busy}")
    return binding


def _fullness(use: Use) -> str:
    if (use.slots_full_share or 0.0) >= (use.kv_full_share or 0.0):
        slots = "all slots" if use.slots is None else f"all {use.slots} slots"
        return f"{slots} were in use {use.slots_full_share or 0.0:.0%} of the time"
    return f"its KV pool was full {use.kv_full_share or 0.0:.0%} of the time"
