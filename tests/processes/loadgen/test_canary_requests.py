"""Canaries in a load: their prompts are the pool's, their text is kept, and they follow what has failed."""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from hostile import spec_for

from kvbench.core.canaries.answer_kinds import judge_canaries
from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.load.workers import index_of
from kvbench.core.records import Outputs, RequestRecord
from kvbench.errors import InputError
from kvbench.processes.loadgen.plan import planned_requests, plant_canaries
from kvbench.processes.loadgen.spec import CanarySpec
from tests.processes.exact_server.test_exact import FAST, exact, trouble
from tests.processes.loadgen.test_foreign_answers import load

SEED, LENGTHS, VOCAB = 5, (8, 12), 1000


def pool_of(url: str, size: int) -> CanaryPool:
    """What the server answers to each prompt alone, not streamed."""
    pool = CanaryPool("own", LENGTHS, (LENGTHS,) * size, SEED, VOCAB, Outputs(("",) * size, 0.0))
    texts = []
    for number in range(size):
        body = {"model": "tiny", "prompt": pool.prompt(number), "max_tokens": LENGTHS[1]}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=10)
        texts.append(answer.json()["choices"][0]["text"])
    return CanaryPool("own", LENGTHS, (LENGTHS,) * size, SEED, VOCAB, Outputs(tuple(texts), 0.0))


def canaries(records: list[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.canary is not None]


@pytest.mark.parametrize("python", [False, True])
def test_their_answers_are_kept_and_are_those_to_their_prompts(tmp_path: Path, python: bool) -> None:
    with exact(tmp_path, first_token_s=0.01, gap_s=0.002) as server:
        pool = pool_of(server.url, 6)
        at = [[place, number] for number, place in enumerate((1, 7, 12, 18, 22, 29))]
        found = load(tmp_path, server.port, python=python, canaries={"seed": SEED, "at": at}, **length())
    records = list(found.records)
    assert [(place, record.canary) for place, record in enumerate(records) if record.canary is not None] == [
        (place, number) for place, number in at
    ]
    for canary in canaries(records):
        assert crc32(canary.text.encode()) == canary.text_crc
        assert len(canary.text.encode()) == canary.text_bytes
    assert not any(record.text for record in records if record.canary is None)
    result = judge_canaries(pool, records)
    assert (result.checked, result.wrong) == (6, ())


def test_a_canned_answer_is_found_in_a_load(tmp_path: Path) -> None:
    with exact(tmp_path, first_token_s=0.01, gap_s=0.002, **trouble("canned", every=2, spared=8)) as server:
        pool = pool_of(server.url, 4)
        at = [[place, number] for number, place in enumerate((3, 8, 13, 18))]
        found = load(tmp_path, server.port, canaries={"seed": SEED, "at": at}, **length())
    result = judge_canaries(pool, list(found.records))
    assert result.checked == 4
    assert {canary.kind for canary in result.wrong} == {"garbage"}


def test_after_a_failure_the_next_requests_are_canaries(tmp_path: Path) -> None:
    with exact(tmp_path, **FAST, **trouble("reset", every=10, after_tokens=2)) as server:
        spares = {"seed": SEED, "at": [[0, 0]], "spares": [1, 2, 3]}
        found = load(tmp_path, server.port, canaries=spares, **length(), request_rate=20.0)
    records = list(found.records)
    assert [record.error for record in records].count("reset") == 3
    assert len(records) == 30
    ends = [record.last_token_s or record.scheduled_s for record in records if record.error == "reset"]
    followed = canaries(records)[1:]
    assert [canary.canary for canary in followed] == [1, 2, 3]
    assert followed[0].scheduled_s > ends[0]
    assert sum(ends[0] < record.scheduled_s < followed[0].scheduled_s for record in records) <= 1
    assert [index_of(record) for record in records] == list(range(30))
    scheduled = [record.scheduled_s for record in records]
    assert scheduled == sorted(scheduled)


def test_workers_share_them_as_they_share_the_plan() -> None:
    wanted = {"seed": SEED, "at": [[place, place] for place in range(10)], "spares": [20, 21, 22]}
    whole = spec_for("http://127.0.0.1:1", num_requests=40, canaries=wanted, **length())
    plan = planned_requests(whole)
    spares = plant_canaries(whole, plan)
    found: dict[int, bytes] = {}
    others: list[int | None] = []
    for worker in range(3):
        spec = spec_for(
            "http://127.0.0.1:1", num_requests=40, canaries=wanted, worker=worker, workers=3, **length()
        )
        share = planned_requests(spec)
        others += [canary.canary for canary in plant_canaries(spec, share)]
        found |= {request.index: request.prompt for request in share if request.canary is not None}
    assert found == {request.index: request.prompt for request in plan if request.canary is not None}
    assert sorted(map(str, others)) == sorted(str(spare.canary) for spare in spares)
    pool = CanaryPool("own", LENGTHS, (LENGTHS,) * 10, SEED, VOCAB, Outputs(("",) * 10, 0.0))
    assert [json.loads(found[number]) for number in range(10)] == [pool.prompt(n) for n in range(10)]


@pytest.mark.parametrize("at", [[[1]], [[1, -2]], [3], [["a", 1]], [[1, True]]])
def test_what_is_no_place_is_refused(at: list[Any]) -> None:
    with pytest.raises(InputError, match="pairs of whole numbers"):
        CanarySpec.of({"seed": 1, "at": at})


def length() -> dict[str, Any]:
    return {"input_len": LENGTHS[0], "output_len": LENGTHS[1], "vocab_size": VOCAB}
