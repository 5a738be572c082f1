"""A pair that somebody else has started: is it proven that P and D both worked, or said that it is not?"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Finished, Running, kvbench

from kvbench.core.gates.evidence import EngineFigures, Evidence
from kvbench.core.gates.work import work_unproven
from kvbench.core.load.workers import workers_for, workers_over
from kvbench.core.slo import Slo
from kvbench.engines.external import ExternalOptions
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.results.run import load_run

SETTINGS = ("deployment.base_port=0", "deployment.engine_options.time_scale=3")


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, str]]:
    """The URLs of an emulated pair: requests, prefill-0, decode-0."""
    with Running("launch", "quickstart", "--connector", "tcp", sets=SETTINGS) as running:
        urls = {}
        for name in ("requests", "prefill-0", "decode-0"):
            found = re.search(r"http://\S+", running.wait_for(f"  {name}"))
            urls[name] = found.group()
        running.wait_for("Ctrl-C")
        yield urls
        running.signal(signal.SIGINT)
        running.finish()


def measured(pair: dict[str, str], tmp_path: Path, seed: int, *metrics: str) -> tuple[Finished, Path]:
    base = pair["requests"].removesuffix("/v1/completions")
    words = ["bench", "--base-url", base, "--connector", "tcp", "--rate", "15", "--output", str(tmp_path)]
    words += ["--input-len", "64", "--output-len", "4", "--ttft-ms", "20000", "--tpot-ms", "5000"]
    for role in metrics:
        words += [f"--{role}-metrics-url", pair[f"{role}-0"]]
    few = ("search.trial_s=2", "search.max_trial_s=2", "search.min_requests=30", f"seed={seed}")
    done = kvbench(*words, sets=few)
    (folder,) = tmp_path.iterdir()
    return done, folder


def test_with_both_sides_counters_it_is_proven_that_both_worked(pair: dict[str, str], tmp_path: Path) -> None:
    done, folder = measured(pair, tmp_path, 11, "prefill", "decode")
    (trial,) = load_run(folder).trials
    gates = {finding.gate for finding in trial.findings}
    assert not gates & {"work_unproven", "prefill_skipped", "prefill_repeated", "decode_recomputed"}, (
        done.text
    )
    row = json.loads((folder / "trials.jsonl").read_text().splitlines()[0])
    sent = row["summary"]["sent"]
    assert row["engine"]["roles"]["prefill"]["prompt_tokens"] == 64 * sent
    assert row["engine"]["roles"]["decode"]["generation_tokens"] >= 3 * sent


def test_without_those_of_p_it_is_said_to_be_unproven(pair: dict[str, str], tmp_path: Path) -> None:
    _, folder = measured(pair, tmp_path, 12, "decode")
    (trial,) = load_run(folder).trials
    (finding,) = [candidate for candidate in trial.findings if candidate.gate == "work_unproven"]
    assert finding.level == "warning"
    assert finding.message == "not proven that P and D both worked: no token counters of P"


def test_only_a_pair_has_something_to_prove() -> None:
    slo = Slo(ttft_ms=1000.0)

    def found(**engines: EngineFigures) -> str:
        evidence = Evidence(records=[], summary=None, slo=slo, engines=engines, disaggregated=True)  # type: ignore[arg-type]
        finding = work_unproven(evidence)
        return finding.message if finding else ""

    assert found().endswith("of P and D")
    assert found(prefill=EngineFigures(prompt_tokens=0.0)).endswith("of D")
    assert not found(prefill=EngineFigures(prompt_tokens=0.0), decode=EngineFigures(generation_tokens=0.0))
    alone = Evidence(records=[], summary=None, slo=slo)  # type: ignore[arg-type]
    assert work_unproven(alone) is None


def test_several_instances_are_given_with_commas() -> None:
    options = ExternalOptions(
        base_url="http://r:1", prefill_metrics_url="http://a:1/metrics, http://b:1/metrics"
    )
    assert options.server.metrics_urls == {
        "prefill-0": "http://a:1/metrics",
        "prefill-1": "http://b:1/metrics",
    }
    with pytest.raises(ValueError, match="must be an http"):
        ExternalOptions(base_url="http://r:1", decode_metrics_url="http://a:1/metrics,,b")


def test_metrics_without_a_pair_are_refused() -> None:
    with pytest.raises(InputError, match="with a --base-url"):
        resolve(CliOptions(prefill_metrics_url="http://a:1/metrics"))


@pytest.mark.parametrize(("rate", "cores", "workers"), [
    (1.0, [8, 8], 2),  # each host that was named gets one
    (20_000.0, [4, 4], 6),  # and none more than its cores but one
    (20_000.0, [4, 64], 6),  # they are dealt out in turn, so the smallest host decides
    (1.0, [8], 1),
])  # fmt: skip
def test_workers_over_several_hosts(rate: float, cores: list[int], workers: int) -> None:
    assert workers_over(rate, 128, 10_000, cores) == workers


def test_one_host_is_as_before() -> None:
    for rate in (1.0, 500.0, float("inf")):
        assert workers_over(rate, 128, 5000, [16]) == workers_for(rate, 128, 5000, 16)
