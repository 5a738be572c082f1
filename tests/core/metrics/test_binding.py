"""Which limit binds: systems that are bound by one thing each must be named so, whatever the seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.metrics.limit import (
    KV_USE,
    LIMIT_SHORT,
    LIMIT_WORDS,
    RUNNING,
    WAITING,
    Binding,
    TrialFacts,
    Use,
    binding_of,
    limit_of_cell,
    limiting_trial,
    note_limit,
    sampled_use,
)
from kvbench.core.metrics.metrics import Slo, Window, summarise
from kvbench.core.records import Cell, RequestRecord, TrialRecord
from kvbench.core.simulation.data import Link, Outcome, Overheads, SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import timing_profile

SEEDS = range(4)
CONFIG = EngineConfig(num_blocks=6000, max_num_seqs=64, max_model_len=4096)
PAIR = System(timing_profile("quick"), CONFIG, link=Link(1.0, 1.0), block_bytes=2048.0 * 16)
SLO = Slo(250, 15, 0.9)


def facts_of(outcome: Outcome, rate: float, slo: Slo) -> TrialFacts:
    summary = summarise(outcome.records, slo, rate, outcome.duration_s)
    kv_ms = outcome.transfer_s / outcome.transfers * 1e3 if outcome.transfers else None
    return TrialFacts(rate, outcome.duration_s, summary.window, outcome.use, kv_ms)


def named(
    system: System, rate: float, seed: int, *, slo: Slo = SLO, lengths: tuple[int, int] = (1024, 16)
) -> Binding:
    offsets = planned_offsets(rate, 240, 1.0, seed).tolist()
    outcome = simulate(system, SimulatedLoad.alike(offsets, *lengths, 60.0))
    return binding_of(outcome.records, slo, facts_of(outcome, rate, slo))


SLOW_LINK = replace(PAIR, link=Link(0.05, 0.5))
SMALL_POOL = replace(SLOW_LINK, config=replace(CONFIG, num_blocks=400), decode_config=CONFIG)
FEW_SLOTS = replace(PAIR, decode_config=replace(CONFIG, max_num_seqs=4))
SMALL_DECODE = replace(PAIR, decode_config=replace(CONFIG, num_blocks=400))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.parametrize(("limit", "system", "rate", "lengths"), [
    pytest.param("prefill", PAIR, 40.0, (1024, 16), id="prefill"),
    pytest.param("transfer", SLOW_LINK, 27.0, (1024, 16), id="slow link"),
    pytest.param("transfer", SMALL_POOL, 27.0, (1024, 16), id="slow link holds up P"),
    pytest.param("decode_slots", FEW_SLOTS, 20.0, (512, 64), id="slots"),
    pytest.param("decode_slots", SMALL_DECODE, 40.0, (512, 64), id="decode's KV pool"),
])  # fmt: skip
def test_a_pair_that_is_bound_by_one_thing_is_named_so(
    limit: str, system: System, rate: float, lengths: tuple[int, int], dispatch: str, seed: int
) -> None:
    system = replace(system, dispatch=dispatch)  # type: ignore[arg-type]
    binding = named(system, rate, seed, lengths=lengths)
    assert binding.limit == limit, binding
    assert f"at {rate:g} req/s" in binding.evidence
    assert "%" in binding.evidence
    assert sum(binding.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_decode_step_is_named(seed: int) -> None:
    binding = named(PAIR, 30.0, seed, slo=Slo(500, 5.2, 0.9), lengths=(256, 64))
    assert binding.limit == "tpot"
    assert "sequences running" in binding.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_an_aggregated_server_is_bound_by_prompts_between_its_steps(seed: int) -> None:
    binding = named(replace(PAIR, prefill=0), 19.0, seed)
    assert binding.limit == "tpot"
    assert "computed prompts" in binding.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_an_aggregated_server_without_tpot_limit_waits_for_prefill_or_slots(seed: int) -> None:
    slo = Slo(250, None, 0.9)
    assert named(replace(PAIR, prefill=0), 30.0, seed, slo=slo).limit == "prefill"
    few = replace(PAIR, prefill=0, config=replace(CONFIG, max_num_seqs=2))
    assert named(few, 20.0, seed, slo=slo, lengths=(128, 64)).limit == "decode_slots"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_router_and_a_slow_client_are_named(seed: int) -> None:
    slow = replace(PAIR, overheads=Overheads(router_ms=400.0))
    assert named(slow, 10.0, seed).limit == "router"
    outcome = simulate(
        PAIR, SimulatedLoad.alike(planned_offsets(10.0, 200, 1.0, seed).tolist(), 1024, 16, 60.0)
    )
    for record in outcome.records:
        record.scheduled_s -= 0.4
    assert binding_of(outcome.records, SLO, facts_of(outcome, 10.0, SLO)).limit == "client"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_binds_where_nothing_is_late(seed: int) -> None:
    assert named(PAIR, 8.0, seed).limit == "none"


def test_work_that_takes_too_long_alone_is_told_from_a_queue() -> None:
    binding = named(PAIR, 1.0, 1, slo=Slo(30, 15, 0.9), lengths=(2048, 16))
    assert binding.limit == "prefill"
    assert "the prompt's computation itself" in binding.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_a_growing_queue_within_the_limits_is_a_limit_too(seed: int) -> None:
    assert named(PAIR, 50.0, seed, slo=Slo(60_000, 1000, 0.9)).limit == "prefill"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_that_was_seen_to_grow_before_the_steady_part_began_is_a_limit(seed: int) -> None:
    offsets = planned_offsets(60.0, 240, 1.0, seed).tolist()
    outcome = simulate(PAIR, SimulatedLoad.alike(offsets, 1024, 16, 60.0))
    loose = Slo(60_000, None, 0.9)
    facts = facts_of(outcome, 60.0, loose)
    few = replace(facts, window=Window(offsets[-4], offsets[-1]))
    assert binding_of(outcome.records, loose, few).limit == "prefill"


def test_a_trial_that_was_stopped_before_the_late_ones_were_answered_is_still_read() -> None:
    offsets = planned_offsets(45.0, 400, 1.0, 3).tolist()
    outcome = simulate(PAIR, SimulatedLoad.alike(offsets, 1024, 16, 60.0), lambda tick: tick.t_s >= 2.0)
    assert outcome.stopped
    assert {record.error for record in outcome.records} == {"", "cancelled"}
    assert binding_of(outcome.records, SLO, facts_of(outcome, 45.0, SLO)).limit == "prefill"


# -- degrading honestly -------------------------------------------------------------------------------
def late(count: int = 100, **times: float) -> list[RequestRecord]:
    """Requests at 10/s whose first token comes after half a second; ``times`` count from the send."""
    records = []
    for index in range(count):
        sent = index / 10
        shifted = {name: sent + value for name, value in times.items()}
        records.append(
            RequestRecord(f"r{index}", sent, 512, 2, sent, sent + 0.5, sent + 0.51, 2, [0.01], 200, **shifted)
        )
    return records


def window_facts(use: dict[str, Use] | None = None, kv_ms: float | None = None) -> TrialFacts:
    summary = summarise(late(), SLO, 10.0, 10.5)
    return TrialFacts(10.0, 10.5, summary.window, use or {}, kv_ms)


def test_without_router_times_and_gauges_it_is_undetermined() -> None:
    assert binding_of(late(), SLO, window_facts()).limit == "undetermined"
    binding = binding_of(late(), SLO, window_facts({"prefill": Use(), "decode": Use()}, 3.0))
    assert binding.limit == "undetermined"
    assert "router reported no times" in binding.evidence


def test_waiting_on_a_decode_that_tells_nothing_is_undetermined() -> None:
    times = {
        "prefill_sent_s": 0.0, "prefill_answered_s": 0.02, "decode_sent_s": 0.02, "decode_first_byte_s": 0.5,
    }  # fmt: skip
    records = late(**times)
    records[0].decode_first_byte_s = 0.03  # somebody did not wait
    binding = binding_of(records, SLO, window_facts())
    assert binding.limit == "undetermined"
    full = {"decode": Use(slots=8, slots_full_share=0.9, kv_full_share=0.0)}
    binding = binding_of(records, SLO, window_facts(full))
    assert binding.limit == "decode_slots"
    assert "all 8 slots were in use 90% of the time" in binding.evidence


def test_mostly_failed_requests_are_no_queue() -> None:
    records = late()
    for record in records[20:]:
        record.error = "http_error"
    binding = binding_of(records, SLO, window_facts())
    assert binding.limit == "undetermined"
    assert "http_error" in binding.evidence


def test_use_from_samples() -> None:
    def row(t_s: float, metric: str, value: float, source: str = "decode-0") -> dict[str, object]:
        return {"t_s": t_s, "source": source, "metric": metric, "value": value}

    rows = [
        *(row(t, RUNNING, running) for t, running in ((0, 2), (1, 8), (2, 8), (3, 8))),
        *(row(t, WAITING, waiting) for t, waiting in ((0, 0), (1, 3), (2, 4), (3, 0))),
        *(row(t, KV_USE, use) for t, use in ((0, 0.1), (1, 0.99), (2, 0.5), (3, 0.99))),
        row(1, "cpu_s", 3.0),
        row(1, "cpu_s", 3.0, "decode-0/child"),
        row(1, "load_average", 3.0, "host"),
    ]
    use = sampled_use(rows, slots=8)
    assert set(use) == {"decode"}
    decode = use["decode"]
    assert (decode.engines, decode.running_peak, decode.waiting_mean, decode.slots) == (1, 8, 1.75, 8)
    assert (decode.slots_full_share, decode.kv_full_share) == (0.5, 0.25)
    assert sampled_use(rows, slots=None)["decode"].slots_full_share is None
    assert (Use.from_json(decode.to_json()), sampled_use([], slots=8)) == (decode, {})


# -- what a cell stores -------------------------------------------------------------------------------
def trial(rate: float, verdict: str, **engine: object) -> TrialRecord:
    summary = {"window": {"start_s": 1.0, "end_s": 9.9}}
    return TrialRecord(
        f"t-{rate}",
        Cell("nixl", 512, 2),
        rate,
        1,
        verdict,
        "",
        duration_s=10.5,
        summary=summary,
        engine=dict(engine),  # type: ignore[arg-type]
    )


def test_the_lowest_missed_rate_above_the_answer_is_asked() -> None:
    limit = {"limit": "prefill", "evidence": "because", "shares": {}}
    trials = [trial(9, "missed"), trial(10, "met"), trial(14, "missed"), trial(12, "missed", limit=limit)]
    found = limiting_trial(trials, 10.0)
    assert found.request_rate == 12
    stored = limit_of_cell(trials, 10.0)
    assert stored == {**limit, "trial_id": "t-12"}
    assert Binding.from_json(stored).limit == "prefill"
    lowest = limiting_trial(trials, None)
    assert lowest.request_rate == 9
    assert limit_of_cell(trials, None) is None  # it was missed, and nobody has noted why
    censored = limit_of_cell([trial(10, "met")], 10.0)
    assert censored["limit"] == "none"
    assert limit_of_cell([trial(10, "invalid")], None) is None
    near = [trial(10, "met"), trial(9.5, "missed", limit=limit), trial(10.5, "undecided", limit=limit)]
    assert (limiting_trial(near, 10.0) or near[0]).request_rate == 10.5
    assert (limiting_trial(near[:2], 10.0) or near[0]).request_rate == 9.5
    assert limiting_trial([trial(10, "met"), trial(5, "missed")], 10.0) is None


def test_a_measured_trial_gets_its_limit() -> None:
    times = {
        "prefill_sent_s": 0.0, "prefill_answered_s": 0.4, "decode_sent_s": 0.4, "decode_first_byte_s": 0.5,
    }  # fmt: skip
    records = late(**times)
    records[0].prefill_answered_s = 0.1
    records[0].decode_sent_s = 0.1
    records[0].decode_first_byte_s = 0.2
    roles = {"prefill": {"busy_s": 10.0}, "decode": {"busy_s": 2.0}}
    record = trial(12, "missed", roles=roles, kv_transfer_ms_per_request=3.0)
    note_limit(record, records, SLO)
    assert "P busy 95%" in record.engine["limit"]["evidence"]
    assert record.engine["limit"]["limit"] == "prefill"
    met = trial(10, "met", roles=roles)
    note_limit(met, records, SLO)
    assert "limit" not in met.engine
    assert TrialRecord.from_json(record.to_json()).engine["limit"]["limit"] == "prefill"


def test_every_limit_has_words() -> None:
    assert set(LIMIT_WORDS) == set(LIMIT_SHORT)
    assert all(len(word) <= 8 for word in LIMIT_SHORT.values())  # the terminal's table has 100 columns
    assert Binding.from_json({"limit": "something newer", "evidence": "?"}).limit == "undetermined"


# -- in words -----------------------------------------------------------------------------------------
AT_P = {"prefill_sent_s": 0.0, "prefill_answered_s": 0.48, "decode_sent_s": 0.48, "decode_first_byte_s": 0.5}
AFTER_P = {
    "prefill_sent_s": 0.0, "prefill_answered_s": 0.02, "decode_sent_s": 0.02, "decode_first_byte_s": 0.5,
}  # fmt: skip
FREE = Use(slots=8, slots_full_share=0.0, kv_full_share=0.2)
BLOCKED = Use(busy_share=0.5, kv_full_share=0.4)
FETCHED = (
    "waiting for P, which was busy only 50% of the time: its KV pool was full of prompts that decode had not "
    "fetched yet"
)


@pytest.mark.parametrize(("times", "use", "kv_ms", "limit", "words"), [
    (AT_P, {"prefill": Use(busy_share=0.95)}, None, "prefill", "93% … waiting for prefill (P busy 95%)"),
    (AT_P, {}, None, "prefill", "93% … waiting for prefill"),
    (AT_P, {"prefill": BLOCKED, "decode": FREE}, None, "transfer", f"93% … {FETCHED}"),
    (AT_P, {"prefill": BLOCKED, "decode": replace(FREE, slots_full_share=0.25)}, None, "decode_slots",
     f"93% … {FETCHED}"),
    (AT_P, {"prefill": replace(BLOCKED, kv_full_share=0.24)}, None, "prefill",
     "93% … waiting for prefill (P busy 50%)"),
    (AFTER_P, {"decode": replace(FREE, slots_full_share=0.9)}, None, "decode_slots",
     "93% … waiting for a decode slot: all 8 slots were in use 90% of the time"),
    (AFTER_P, {"decode": Use(slots_full_share=0.9, kv_full_share=0.9)}, None, "decode_slots",
     "93% … waiting for a decode slot: all slots were in use 90% of the time"),
    (AFTER_P, {"decode": replace(FREE, kv_full_share=0.95)}, None, "decode_slots",
     "93% … waiting for a decode slot: its KV pool was full 95% of the time"),
    (AFTER_P, {"decode": FREE}, None, "transfer",
     "93% … between prefill and decode, while decode had free slots"),
    (AFTER_P, {"decode": FREE}, 3.0, "undetermined", "92% … waiting on decode, although it had free slots"),
    (AFTER_P, {"decode": FREE}, 400.0, "transfer", "80% … the KV transfer (400 ms on average)"),
])  # fmt: skip
def test_what_late_requests_waited_for_is_said(
    times: dict[str, float], use: dict[str, Use], kv_ms: float | None, limit: str, words: str
) -> None:
    records = late(**times)
    quick = {"prefill_answered_s": 0.01, "decode_sent_s": 0.01, "decode_first_byte_s": 0.02}
    for name, value in quick.items():  # somebody did not wait: what a request alone takes
        setattr(records[0], name, value)
    binding = binding_of(records, SLO, replace(window_facts(use, kv_ms), window=Window(0.0, 10.0)))
    reason = words.replace("…", "of the TTFT of late requests was")
    assert (binding.limit, binding.evidence) == (limit, f"at 10 req/s, {reason}")
    assert sum(binding.shares.values()) == pytest.approx(1.0)


def test_slow_steps_are_said_with_what_ran_in_them() -> None:
    def slow(gaps: list[float]) -> list[RequestRecord]:
        return [
            RequestRecord(
                f"r{i}", i / 10, 512, 11, i / 10, i / 10 + 0.1, i / 10 + 0.1 + sum(gaps), 11, gaps, 200
            )
            for i in range(100)
        ]

    facts = replace(window_facts({"decode": Use(running_mean=7.6)}), window=Window(0.0, 10.0))
    binding = binding_of(slow([0.02] * 10), SLO, facts)
    assert binding.limit == "tpot"
    assert binding.evidence == (
        "at 10 req/s, 100 requests exceeded a TPOT of 15 ms; their median gap between tokens was 20 ms "
        "with 8 sequences running on average"
    )
    mixed = [0.01] * 8 + [0.1, 0.1]  # 200 of 280 ms in two steps
    binding = binding_of(slow(mixed), SLO, replace(facts, use={"aggregated": Use()}))
    assert binding.evidence == (
        "at 10 req/s, 100 requests exceeded a TPOT of 15 ms; their median gap between tokens was 10 ms"
        ", and 71% of their decode time was in steps that also computed prompts"
    )
    assert binding.shares["long_gaps"] == pytest.approx(200 / 280)
    binding = binding_of(slow(mixed), SLO, facts)
    assert binding.evidence.endswith("71% of their decode time was in steps much longer than others")
    few = [0.0148] * 9 + [0.03]  # a fifth, and no more, makes them worth a word
    assert "much longer" in binding_of(slow([0.0138] * 8 + [0.03, 0.03]), SLO, facts).evidence
    assert "much longer" not in binding_of(slow(few), SLO, facts).evidence
