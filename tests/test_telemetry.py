"""Metrics pages: parsing, growth, and what is missing."""

from __future__ import annotations

import os
import time

import httpx
import pytest

from kvbench.core.evidence import EngineFigures
from kvbench.errors import ServerError
from kvbench.figures import engine_figures, transport_of
from kvbench.telemetry import Metrics, Sampler, difference, parse_metrics, quantile, read_host, scrape

BEFORE = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="tiny"} 100
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 3
"""
AFTER = """
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{model_name="tiny"} 350
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{model_name="tiny",source="local_compute"} 40
vllm:prompt_tokens_by_source_total{model_name="tiny",source="external_kv_transfer"} 210
# TYPE kvbench:transport_info gauge
kvbench:transport_info{transport="tcp",library="mooncake"} 1
"""


def test_growth_by_name_and_label() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    assert difference(before, after, "vllm:prompt_tokens_total") == 250
    assert difference(before, after, "vllm:prompt_tokens_by_source_total", source="local_compute") == 40
    assert difference(before, after, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") is None
    assert difference(None, after, "vllm:prompt_tokens_total") is None
    assert difference(before, after, "vllm:unheard_of") is None


def test_a_page_that_is_none_is_an_error() -> None:
    with pytest.raises(ServerError):
        parse_metrics("<html>not { metrics</html>")


def test_a_server_that_is_not_there_is_a_gap_and_no_failure() -> None:
    with httpx.Client() as client:
        assert scrape(client, "http://127.0.0.1:9/metrics") is None
        assert scrape(client, "") is None


def test_figures_are_summed_by_role() -> None:
    before, after = parse_metrics(BEFORE), parse_metrics(AFTER)
    figures = engine_figures(
        {"decode-0": before, "decode-1": before, "prefill-0": None, "router": before},
        {"decode-0": after, "decode-1": after, "prefill-0": after, "router": after},
    )
    assert list(figures) == ["decode"]
    assert figures["decode"].prompt_tokens == 500
    assert figures["decode"].prompt_tokens_by_source == {"local_compute": 80, "external_kv_transfer": 420}
    assert figures["decode"].kv_bytes is None
    assert isinstance(figures["decode"], EngineFigures)


def test_transport_is_what_the_engines_say() -> None:
    assert transport_of({"prefill-0": parse_metrics(AFTER), "decode-0": Metrics(), "x": None}) == "tcp"


def test_the_sampler_sees_the_machine_and_this_process() -> None:
    with Sampler("t1", {"me": os.getpid(), "gone": 2**22 + 1}, {}) as sampler:
        deadline = time.monotonic() + 10
        while not sampler.rows and time.monotonic() < deadline:
            time.sleep(0.05)
    sources = {row["source"] for row in sampler.rows}
    assert {"host", "me"} <= sources
    assert "gone" not in sources
    assert all(row["trial_id"] == "t1" for row in sampler.rows)


HISTOGRAM = """
# TYPE lag histogram
lag_bucket{{le="0.001"}} {0}
lag_bucket{{le="0.01"}} {1}
lag_bucket{{le="+Inf"}} {2}
lag_sum 1
lag_count {2}
"""


def test_a_quantile_is_of_what_was_counted_in_between() -> None:
    before = parse_metrics(HISTOGRAM.format(1000, 1000, 1000))
    after = parse_metrics(HISTOGRAM.format(1050, 1100, 1100))
    assert quantile(before, after, "lag", 0.5) == 0.001
    assert quantile(before, after, "lag", 0.99) == 0.01
    assert quantile(after, after, "lag", 0.99) is None
    assert quantile(None, after, "lag", 0.99) is None


def test_own_work_is_told_from_that_of_others() -> None:
    before = read_host()
    deadline = time.process_time() + 0.3
    while time.process_time() < deadline:
        pass
    after = read_host()
    assert after.own_cpu_s - before.own_cpu_s >= 0.25
    assert after.cpu_s - before.cpu_s >= 0.25
    assert before.load_average >= 0
