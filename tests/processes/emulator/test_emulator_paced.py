"""A transfer model paces the emulated engine's hand-over: what the options mean, what a pair then does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import EASY, kvbench, the_run
from emulated import running_pair
from pydantic import ValidationError

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.core.transfers.model import TransferModel, model_for, models_json, models_of_json
from kvbench.engines.emulated import PACED, EmulatedOptions
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.processes.emulator.handoffs.handoff import Pacer
from kvbench.processes.emulator.kvbytes import KvCompute, KvPool
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.spec import KvPace
from kvbench.sweep.calibration import surroundings
from kvbench.transfer.base import Layout

CLOCK_S = 1e-8
"""The last digit of a monotonic clock after a year is 4e-9 s."""
LATE = ("emulator_transfer_lag_seconds_sum", "emulator_paced_transfer_seconds_total")
OPTIONS = "deployment.engine_options"
READ = TransferModel("nixl", "tcp", "read", 0, 1e-4, 2e-6, 1.5, 4)
MODELS = [
    replace(READ, op="write", start_s=1.0), READ, replace(READ, protocol="cma", start_s=3.0),
    replace(READ, nics=2, start_s=2e-4), replace(READ, backend="mooncake", op="read"),
    replace(READ, backend="mooncake", op="write", gb_per_s=None),
]  # fmt: skip


def test_the_model_of_a_connector_is_of_its_own_op_and_of_most_nics() -> None:
    assert model_for(MODELS, "nixl") is MODELS[3]
    assert model_for(MODELS, "nixl", "cma") is MODELS[2]
    assert model_for(MODELS, "mooncake") is MODELS[5]
    with pytest.raises(InputError, match="no transfer model for tcp") as caught:
        model_for(MODELS, "tcp")
    assert "nixl/tcp, nixl/cma, mooncake/tcp" in caught.value.hint


def test_models_come_back_from_their_file_and_others_are_refused() -> None:
    data = models_json(MODELS, "a-run")
    assert models_of_json(json.loads(json.dumps(data))) == MODELS
    wrong: Any
    for wrong in ({}, [], {"models": []}, {**data, "schema": 2}, {**data, "models": [{"backend": "nixl"}]}):
        with pytest.raises(InputError):
            models_of_json(wrong)
    with pytest.raises(InputError, match="negative"):
        models_of_json(models_json([replace(READ, start_s=-1.0)], "a-run"))


def test_a_run_folder_or_its_file_may_be_named(tmp_path: Path) -> None:
    file = tmp_path / "tables" / "transfer_model.json"
    file.parent.mkdir()
    file.write_text(json.dumps(models_json(MODELS, "a-run")))
    for place in (tmp_path, file):
        assert EmulatedOptions(transfer_like=str(place)).pace("mooncake") == MODELS[5]
    other = EmulatedOptions(transfer_like=str(tmp_path), transfer_backend="nixl", transfer_protocol="cma")
    assert other.pace("mooncake") == MODELS[2]
    file.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        EmulatedOptions(transfer_like=str(tmp_path)).pace("nixl")
    with pytest.raises(InputError, match="cannot be read"):
        EmulatedOptions(transfer_like=str(tmp_path / "none")).pace("nixl")


@pytest.mark.parametrize(
    "options",
    [
        {"transfer_like": "results/x", "transfer_model": {"start_ms": 1}},
        {"transfer_backend": "nixl"},
        {"transfer_model": {"start_ms": -1}},
        {"transfer_model": {"gb_per_s": 0}},
        {"transfer_model": {"speed": 1}},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EmulatedOptions.model_validate(options)


def test_a_simulation_takes_the_same_link() -> None:
    sets = [f"{OPTIONS}.transfer_model.start_ms=40", f"{OPTIONS}.transfer_model.gb_per_s=2"]
    scenario, _ = resolve(CliOptions(scenario="quickstart", overrides=(*sets, f"{OPTIONS}.time_scale=0.5")))
    link = surroundings(scenario, "nixl", "nixl").link
    assert (link.latency_ms, link.gb_per_s) == (20.0, 4.0)


def test_a_start_up_of_50_ms_is_in_every_request_and_marked(tmp_path: Path) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--output", str(tmp_path))
    done = kvbench(*words, sets=(*EASY, f"{OPTIONS}.transfer_model.start_ms=50"))
    assert done.status in (0, 1, 3), done.text
    run = the_run(tmp_path)
    (trial,) = run.trials
    rows = run.requests(trial.trial_id)
    rows = rows[rows.error == ""]
    assert len(rows) >= 20
    assert (rows.decode_first_byte_s - rows.decode_sent_s >= 0.05).all()
    assert trial.engine["kv_transfer_ms_per_request"] >= 50
    assert trial.engine["kv_bytes_per_request"] == 64 * 2048
    # A sum of differences of clock readings, each rounded to the digits that the clock has.
    assert trial.engine["roles"]["decode"]["paced_s"] >= (0.05 - CLOCK_S) * trial.engine["kv_transfers"]
    assert trial.labels == ["emulated", PACED]
    assert "each KV transfer lasts 50 ms" in " ".join(run.plan["notes"])
    assert PACED in (run.path / "report.md").read_text()


def test_a_pace_that_the_bytes_cannot_keep_is_counted_as_late(tmp_path: Path) -> None:
    with running_pair(tmp_path, "tcp", kv_pace={"gb_per_s": 1e4, "start_s": 0.0}) as pair:
        began = {name: pair.decode.metric(f"kvbench:{name}") for name in (*LATE, "kv_transfer_seconds_sum")}
        pair.tokens(list(range(1, 1025)), 2)
        late, paced, moved = (pair.decode.metric(f"kvbench:{name}") - began[name] for name in began)
        assert 0 < paced < late < moved
        # The other side moves nothing, so nothing of it is late.
        assert pair.prefill.metric("kvbench:emulator_transfer_lag_seconds_count") == 0


def test_the_link_is_one_and_takes_transfers_in_turn() -> None:
    metrics = EngineMetrics("model", "KvbenchTcpConnector")
    pacer = Pacer(KvPace(start_s=0.5, gb_per_s=1.0), 0.1, metrics)
    assert pacer.begin(10.0, 10**9) == pytest.approx(10.1)
    assert pacer.begin(10.05, 10**9) == pytest.approx(10.2)
    assert pacer.begin(11.0, 10**9) == pytest.approx(11.1)


class Nobody:
    """Where tokens go that nobody waits for."""

    def on_token(self, token: int, finish_reason: str | None) -> None:
        return None

    def on_error(self, status: int, message: str) -> None:
        return None


def drawn(noise: float, batch: int, rounds: int) -> list[list[int]]:
    """The tokens of each round, of sequences whose states are the same each time."""
    pool = KvPool(Layout(1, 4, 128), 16)
    try:
        compute = KvCompute(pool, 1000, 64, noise)
        lives = [
            LiveRequest(EngineRequest(f"r{n}", 4, 8), np.zeros(4, np.uint64), Nobody(), ignore_eos=True)
            for n in range(batch)
        ]
        for number, live in enumerate(lives):
            live.state = 977 * number + 5
        found = []
        for _ in range(rounds):
            compute.draw(lives)
            found.append([live.drawn for live in lives])
        return found
    finally:
        pool.close()


def test_without_noise_the_same_states_give_the_same_tokens() -> None:
    assert len({tuple(tokens) for tokens in drawn(0.0, 8, 20)}) == 1


def test_alone_nothing_differs() -> None:
    assert len({tuple(tokens) for tokens in drawn(0.5, 1, 20)}) == 1


def test_in_a_batch_about_the_share_asked_for_differs() -> None:
    (right,) = {tuple(tokens) for tokens in drawn(0.0, 16, 1)}
    found = drawn(0.1, 16, 400)
    share = np.mean([[one != other for one, other in zip(tokens, right, strict=True)] for tokens in found])
    assert 0.07 < share < 0.13
