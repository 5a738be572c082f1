"""Answers under load are checked in every trial, told, stored, and computed once more."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import EASY, kvbench, the_run
from hostile import spec_for
from resuming import without_checksums
from rich.console import Console
from run_files import copied, edit_rows, rows_in

from kvbench.core.canaries.answer_kinds import found_in_any, judge_canaries, percent_text
from kvbench.core.canaries.pool import AFTER_FAILURE, CanaryPool
from kvbench.core.canaries.tally import Tally
from kvbench.core.load.traces import TracedRequest
from kvbench.core.records import Cell, Outputs, RequestRecord
from kvbench.core.search.load_plan import Offered, TrialPlan, planned
from kvbench.deployment.single_requests import Completion
from kvbench.errors import ServerError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.processes.loadgen.plan import planned_requests, plant_canaries
from kvbench.report import compare
from kvbench.report.findings.notes import checked_lines, run_tally
from kvbench.results.finished_cells import canary_pools, extra_canaries
from kvbench.results.run import CANARIES, RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import simulate
from kvbench.sweep.cell import Fixed
from kvbench.sweep.trial.canary_supply import AT_END, LEAST_IDLE, LONGEST_S, CanarySupply, right_answers
from kvbench.sweep.verify.audit import audit
from tests.processes.exact_server.test_exact import exact, trouble

pytestmark = pytest.mark.timeout(300)
CELL = Cell("tcp", 64, 8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunFolder]:
    """A rate offered to an aggregated server and to a pair."""
    results = tmp_path_factory.mktemp("results")
    words = ("bench", "quickstart", "--rate", "20", "--connector", "aggregated", "--connector", "tcp")
    done = kvbench(*words, "--output", str(results), sets=EASY)
    return done.text, the_run(results)


def test_every_trial_has_canaries_and_they_are_right(measured: tuple[str, RunFolder]) -> None:
    text, run = measured
    assert {trial.cell.connector for trial in run.trials} == {"aggregated", "tcp"}
    for trial in run.trials:
        tally = Tally.of_trial(trial)
        assert (tally.wrong, tally.noisy, tally.own) == (0, 0, 0)
        kept = [record for record in run.request_records(trial.trial_id) if record.canary is not None]
        assert tally.checked == len([record for record in kept if record.ok]) >= 8
        assert all(record.text for record in kept if record.ok)
        assert len({record.canary for record in kept}) == len(kept)
    for result in run.cells:
        tally = Tally.from_json(result.canaries)
        assert 1 <= tally.at_end <= AT_END
        assert tally.checked > tally.at_end
    total = run_tally(run)
    assert total.checked == sum(Tally.from_json(cell.canaries).checked for cell in run.cells)
    assert f"answers under load: 0 of {total.checked} wrong: at most" in text
    result = re.search("Successful requests|refused: ", text)
    assert text.index("answers under load") < result.start()
    assert "noise" not in text[text.index("answers under load") :].splitlines()[0]


def test_all_of_it_is_in_the_folder_and_computed_once_more(measured: tuple[str, RunFolder]) -> None:
    _, run = measured
    (pool,) = canary_pools(run.canaries).values()
    assert (pool.label, pool.proof) == ("aggregated", "reference")
    assert pool.under_load.compared > 0
    assert set(extra_canaries(run.canaries)) >= {f"{result.cell.key}-end" for result in run.cells}
    found = audit(run.path)
    assert found.sound, found.damages


def test_answers_of_an_interrupted_session_do_not_count(
    measured: tuple[str, RunFolder], tmp_path: Path
) -> None:
    folder = without_checksums(copied(measured[1].path, tmp_path))
    path, trial = folder / CANARIES, measured[1].trials[0].trial_id
    lines = path.read_text().splitlines()
    at_end = next(line for line in lines if '-end"' in line and '"asked"' in line)
    row = {**json.loads(at_end), "trial_id": trial}
    # It ended after it had stored answers of a trial and of a cell; the repeated trial needed none.
    again = [json.dumps(row), json.dumps({**row, "asked": []}), at_end]
    path.write_text("\n".join([*lines, *again]) + "\n")
    assert not audit(folder).damages


def test_an_edited_answer_is_found_without_checksums(measured: tuple[str, RunFolder], tmp_path: Path) -> None:
    folder = without_checksums(copied(measured[1].path, tmp_path))
    used = next(
        record.canary
        for record in measured[1].request_records(measured[1].trials[-1].trial_id)
        if record.canary
    )
    edit_rows(folder / CANARIES, lambda row: "texts" in row and row["texts"].__setitem__(used, "x"))
    assert any("canaries" in str(damage) or "findings" in str(damage) for damage in audit(folder).damages)


def test_a_run_without_canaries_reads_and_says_so(measured: tuple[str, RunFolder], tmp_path: Path) -> None:
    folder = copied(measured[1].path, tmp_path)
    (folder / CANARIES).unlink()
    for name in ("trials.jsonl", "cells.jsonl"):
        edit_rows(
            folder / name, lambda row: [row.pop("canaries", 0), row.get("engine", {}).pop("canaries", 0)]
        )
    run = load_run(folder)
    assert not run.warnings
    assert list(checked_lines(run)) == ["answers under load: none checked"]


def with_tallies(run: Path, target: Path, **tally: object) -> Path:
    """A copy of a run in which each trial's canaries had that result."""
    folder = without_checksums(copied(run, target))
    edit_rows(folder / "trials.jsonl", lambda row: row["engine"]["canaries"].update(tally))
    return folder


def compared(runs: Sequence[RunFolder], format_: str) -> str:
    shown = io.StringIO()
    options = compare.CompareOptions(format=format_)
    assert compare.command([run.path for run in runs], options, Console(file=shown, width=200)) == 0
    return shown.getvalue()


def test_a_comparison_has_both_counts_side_by_side(measured: tuple[str, RunFolder], tmp_path: Path) -> None:
    _, run = measured
    folder = with_tallies(run.path, tmp_path, checked=20, wrong=1)
    other = load_run(folder)
    total, changed = run_tally(run), run_tally(other)
    assert changed.wrong == len(rows_in(folder / "trials.jsonl"))
    first, *_ = json.loads(compared([run, other], "json"))["answers"]
    assert first["cell"] == "all"
    assert (first["A"]["checked"], first["A"]["wrong"]) == (total.checked, 0)
    assert (first["B"]["checked"], first["B"]["wrong"]) == (changed.checked, changed.wrong)
    assert first["A"]["wrong_below"] == pytest.approx(1 - 0.05 ** (1 / total.checked))
    for format_ in ("terminal", "md", "latex"):
        text = compared([run, other], format_)
        assert f"0 of {total.checked}, " in text
        assert f"{changed.wrong} of {changed.checked}, " in text
        assert "tcp, 64 in, 4 out" in text
        assert "Answers under load" in text


def test_the_power_of_a_test_of_noise_is_told(measured: tuple[str, RunFolder], tmp_path: Path) -> None:
    folder = with_tallies(measured[1].path, tmp_path, checked=100, noise_test={"refused_from": 4})
    rows = rows_in(folder / "trials.jsonl")
    line = next(checked_lines(load_run(folder)))
    share = found_in_any([(100, 4)] * len(rows))
    assert line.endswith(f"; the noise test detects a share of {percent_text(share)} (95 %)")
    assert found_in_any([(100, 4)]) > share > found_in_any([(100, 1)] * len(rows))


class Server:
    """Answers each prompt by its own text; with ``caches``, which can be emptied unless KV is held."""

    def __init__(self, *, caches: bool = True, held: bool = False) -> None:
        self.empties_caches = caches
        self.resets = 0
        self._held = held
        self.seen: list[tuple[int, ...]] = []

    def reset_caches(self) -> None:
        if self._held:
            raise ServerError("KV is held")
        self.resets += 1
        self.seen.clear()

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool
    ) -> list[Completion]:
        self.seen += [tuple(prompt) for prompt in prompts]
        return [
            Completion(" ".join(f"w{sum(prompt) * place % 997}" for place in range(max_tokens)))
            for prompt in prompts
        ]


def supply_of(server: Server, *, proof: str = "reference", scored: bool = False) -> CanarySupply:
    scenario, _ = resolve(CliOptions("quickstart", EASY))
    label = "aggregated" if proof == "reference" else "tcp"
    pool = right_answers(
        scenario, server, label, CELL, 0.0, proof="own" if proof == "own" else "reference", scored=scored
    )
    assert pool is not None
    return CanarySupply(scenario, server, pool)


def offered(number: int) -> tuple[Offered, int]:
    scenario, _ = resolve(CliOptions("quickstart", EASY))
    plan = TrialPlan(CELL, number, 20.0, "bench", searched=False)
    return planned(scenario, plan), plan.seed(scenario.seed)


def test_no_prompt_is_asked_twice_before_the_caches_are_emptied() -> None:
    server = Server()
    supply = supply_of(server)
    server.seen.clear()
    for number in range(1, 30):
        places = supply.places(*offered(number))
        before = server.resets
        sent = [tuple(supply.judged_by.prompt(canary)) for canary in places.at.values()]
        assert sent
        assert not set(sent) & set(server.seen), before
        server.seen += sent
        supply._fresh = [canary for canary in supply._fresh if canary not in places.at.values()]
        supply.ask("after_trial", "trial")
        assert len(set(server.seen)) == len(server.seen)
    assert server.resets > 5


def test_where_kv_is_held_there_are_fewer_and_none_twice() -> None:
    server = Server()
    supply = supply_of(server)
    server._held = True
    canaries: list[int] = []
    for number in range(1, 12):
        at = supply.places(*offered(number)).at
        canaries += at.values()
        supply._fresh = [canary for canary in supply._fresh if canary not in at.values()]
    assert len(canaries) == len(set(canaries))


def test_without_anybody_to_empty_caches_few_are_asked_again_and_again() -> None:
    supply = supply_of(Server(caches=False), proof="own")
    counts = [len(supply.places(*offered(number)).at) for number in range(1, 8)]
    assert min(counts) >= 1
    assert max(counts) <= 6
    assert supply.judged([]).repeated


def test_a_server_that_tells_nothing_of_its_noise_is_asked_again_beside_others() -> None:
    pool = supply_of(Server(), scored=True).judged_by
    alone, together = pool.answers.repeats
    assert (len(alone.texts), together.texts, pool.noise.compared) == (8, pool.answers.texts, 8 + len(pool))
    assert pool.noise.exact


def test_a_short_bench_asks_for_the_canaries_of_one_trial_and_no_more() -> None:
    scenario, _ = resolve(CliOptions("quickstart", EASY))
    least = scenario.checks.min_canaries
    server = Server()
    assert len(supply_of(server).judged_by) == least + AFTER_FAILURE
    assert len(server.seen) == 0  # emptied after them
    supply = supply_of(server)
    assert len(supply.places(*offered(1)).at) == least


class SlowServer(Server):
    """Takes its time, and gives the answer to another prompt while more than so many are asked at once."""

    def __init__(self, latency_s: float = 0.0, most: int = 64) -> None:
        super().__init__()
        self.latency_s, self.most, self.now_s, self.at_once = latency_s, most, 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool
    ) -> list[Completion]:
        self.now_s += self.latency_s
        self.at_once = max(self.at_once, len(prompts))
        found = super().complete_all(prompts, max_tokens, scored=scored)
        return found if len(prompts) <= self.most else [found[-1], *found[1:]]


def idle_answers(server: SlowServer, *, scored: bool, requests: int = 0, budget_s: float = 0.0) -> CanaryPool:
    scenario, _ = resolve(CliOptions("quickstart", EASY))
    pool = right_answers(
        *(scenario, server, "tcp", CELL, budget_s), proof="own", scored=scored, requests=requests,
        clock=server.clock,
    )  # fmt: skip
    assert pool is not None
    return pool


def test_idle_answers_are_asked_for_one_at_a_time() -> None:
    server = SlowServer(most=4)
    pool = idle_answers(server, scored=False)
    assert server.at_once == 1
    assert not pool.crossed


@pytest.mark.parametrize("scored", [False, True])
def test_a_slow_server_is_asked_for_less_than_a_minute(scored: bool) -> None:
    server = SlowServer(latency_s=2.0)
    pool = idle_answers(server, scored=scored, requests=5000)
    assert server.now_s <= LONGEST_S + 2 * server.latency_s
    assert len(pool) >= 8 - scored
    slower = SlowServer(latency_s=20.0)
    assert len(idle_answers(slower, scored=scored, requests=5000)) == LEAST_IDLE


def test_an_idle_answer_that_is_another_canarys_is_wrong_and_no_noise() -> None:
    server = SlowServer(most=4)
    pool = idle_answers(server, scored=True)
    (number, owners, text), *_ = pool.crossed
    assert text == pool.right(*owners) != pool.right(number)
    result = judge_canaries(pool, [])
    assert {answer.kind for answer in result.wrong} == {"another_prompt"}
    assert len(result.wrong) == len(pool.crossed) == result.checked
    assert "sent before the load" in result.wrong[0].text()
    assert not idle_answers(SlowServer(), scored=True).crossed


def test_a_known_load_has_its_share_of_canaries() -> None:
    """A bench or a closed loop of 1,500 requests has 2 %, one of few at least ten."""
    scenario, _ = resolve(CliOptions("quickstart", (*EASY, "search.min_requests=1")))
    for requests, least in ((1500, 30), (320, 10), (60, 10), (12, 6)):
        server = SlowServer()
        pool = right_answers(
            *(scenario, server, "aggregated", CELL, 0.0), proof="reference", scored=False, requests=requests
        )
        assert pool is not None
        places = CanarySupply(scenario, server, pool).places(Offered(np.zeros(requests)), 1)
        assert len(places.at) >= least


def test_what_a_fixed_load_sends_is_known() -> None:
    scenario, _ = resolve(CliOptions("quickstart", ("search.trial_s=10", "search.min_requests=60")))
    assert (Fixed(30.0).requests(scenario, 0.1), Fixed(1.0).requests(scenario, 0.1)) == (300, 60)
    assert Fixed(0.0, concurrency=700, num_requests=1500).requests(scenario, 0.1) == 1500


def test_an_empty_share_asks_nobody_anything() -> None:
    scenario, _ = resolve(CliOptions("quickstart", (*EASY, "checks.canary_share=0")))
    server = Server()
    assert right_answers(scenario, server, "a", CELL, 1.0, proof="own", scored=False) is None
    assert not server.seen


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    pool = supply_of(Server(), scored=True).judged_by
    with RunStore.create(tmp_path, "x", b"", {}, {}) as store:
        store.add_canaries(pool)
        path = store.path
    assert canary_pools(load_run(path).canaries) == {pool.key: pool}
    assert isinstance(pool.answers, Outputs)


def test_arrivals_and_lengths_are_the_same_with_and_without() -> None:
    """Paired by their seeds: canaries are requests of the plan, and change none of its figures."""
    at = {"seed": 3, "at": [[place, place // 5] for place in range(0, 200, 5)], "spares": [90, 91]}
    plain = planned_requests(spec_for("http://127.0.0.1:1", num_requests=200))
    spec = spec_for("http://127.0.0.1:1", num_requests=200, canaries=at)
    watched = planned_requests(spec)
    plant_canaries(spec, watched)
    assert [(request.offset_s, request.input_len, request.output_len) for request in plain] == [
        (request.offset_s, request.input_len, request.output_len) for request in watched
    ]
    assert sum(a.prompt != b.prompt for a, b in zip(plain, watched, strict=True)) == 40
    sizes = [json.loads(request.prompt) for request in watched]
    assert {len(size) for size in sizes} == {spec.input_len}


def test_the_found_rate_is_the_same_on_virtual_time(tmp_path: Path) -> None:
    """Two searches with the same seed."""
    found = []
    for share in (0.0, 0.3):
        sets = ("connectors=[tcp]", "workload.input_len=[128]", "seed=2", f"checks.canary_share={share}")
        run = load_run(simulate.simulated(CliOptions("quickstart", sets), tmp_path))
        found.append(run.cells[0].answer["max_request_rate"])
    assert found[0] == found[1]


def test_what_is_asked_beside_the_load_is_at_most_half_the_share() -> None:
    server = Server()
    supply = supply_of(server)
    canaries = sent = 0
    for number in range(1, 12):
        records = [RequestRecord(f"r{place}", 0.0, 64, 8, sent_s=0.0) for place in range(300)]
        supply.used(records)
        sent += len(records)
        canaries += len(supply.ask("after_trial", f"trial-{number}"))
    canaries += len(supply.ask("end_of_cell", "end"))
    assert 11 < canaries <= 0.01 * sent


def test_a_trace_keeps_its_lengths_and_canaries_share_no_prompt() -> None:
    scenario, _ = resolve(CliOptions("quickstart", EASY))
    trace = [
        TracedRequest(0.1 * place, 40 + place % 7, 4 + place % 3, (place // 2,) if place % 2 else None)
        for place in range(400)
    ]
    server = Server()
    pool = right_answers(
        scenario, server, "aggregated", CELL, 60.0, proof="reference", scored=False, trace=trace
    )
    assert len(pool) == len(pool.places) >= 15
    assert [pool.lengths[n] for n in range(len(pool))] == [
        (trace[place].input_len, trace[place].output_len) for place in pool.places
    ]
    assert {len(pool.prompt(n)) for n in range(len(pool))} <= set(range(40, 47))
    supply = CanarySupply(scenario, server, pool)
    found = supply.places(Offered(np.array([request.offset_s for request in trace]), trace), 1)
    assert set(found.at) == set(pool.places)
    short = supply.places(Offered(np.array([request.offset_s for request in trace[:100]]), trace[:100]), 1)
    assert set(short.at) == {place for place in pool.places if place < 100}
    assert max(pool.places) > 330
    assert sum(place <= 2 * scenario.search.min_requests for place in pool.places) >= 10


def test_a_server_that_refuses_to_be_asked_is_measured_without(tmp_path: Path) -> None:
    """One that turns several requests away at once, as by a limit of its rate."""
    with exact(
        tmp_path, first_token_s=0.01, gap_s=0.001, **trouble("status", at=list(range(8, 20)), status=429)
    ) as server:
        words = ("bench", "--base-url", server.url, "--input-len", "64", "--output-len", "8", "--rate", "20")
        more = ("--ttft-ms", "2000", "--tpot-ms", "500", "--output", str(tmp_path / "results"))
        done = kvbench(*words, *more, sets=("search.trial_s=2", "search.min_requests=30"))
    assert "because canaries failed" in done.text
    assert "answers under load: none checked" in done.text
    assert the_run(tmp_path / "results").trials[0].verdict in ("met", "invalid")


def test_a_foreign_server_is_compared_with_itself(tmp_path: Path) -> None:
    with exact(tmp_path, first_token_s=0.01, gap_s=0.001) as server:
        words = ("bench", "--base-url", server.url, "--input-len", "64", "--output-len", "8", "--rate", "30")
        more = ("--ttft-ms", "2000", "--tpot-ms", "500", "--output", str(tmp_path / "results"))
        done = kvbench(*words, *more, sets=("search.trial_s=3", "search.min_requests=80"))
    assert "compared with the server's own idle outputs, a weaker check" in done.text
    run = the_run(tmp_path / "results")
    tally = Tally.of_trial(run.trials[0])
    assert tally.checked == tally.own >= 2
    assert (tally.wrong, tally.noisy) == (0, 0)
