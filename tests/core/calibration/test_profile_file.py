"""Profile files: what is written is read again, and every mistake is said with its line."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.calibration.profile_file import (
    COEFFICIENTS,
    Coefficient,
    Covariance,
    ProfileFile,
    parse_profile,
    profile_text,
)
from kvbench.core.simulation.step_time import StepLoad
from kvbench.errors import InputError

GOOD = """\
version: 1
name: some-gpu
source: made for a test
date: 2026-11-23
engine: vllm 0.19.0
machine: none
tensor_parallel_size: 2
status: unchecked
coefficients:
  prefill_token_ms: {value: 0.03, error: 0.001}
  decode_step_ms: {value: 16, error: 0.1}
  decode_context_ms: {value: 1.0e-5, source: data sheet}
covariance:
  order: [prefill_token_ms, decode_step_ms]
  rows: [[1.0e-6, 0], [0, 0.01]]
"""
HELD = "held_out: {by: time, requests: 10, figures: {ttft_mean: {ratio: 1.2, stated: 0.1}}}\n"


def mistakes_of(*changes: tuple[str, str]) -> list[str]:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(InputError) as caught:
        parse_profile(text, "p.yaml")
    return caught.value.message.split("\n")


def test_a_profile_gives_step_times() -> None:
    profile = parse_profile(GOOD, "p.yaml")
    step = profile.timing(2).step_s(StepLoad([(1000, 0)], 4, 4000))
    assert step == pytest.approx((16 + 30 + 4000e-5) / 1e3)
    assert not profile.moves_kv
    with pytest.raises(InputError, match="no tensor_parallel_size 4"):
        profile.timing(4)


def test_every_mistake_is_said_at_once_with_its_line() -> None:
    lines = mistakes_of(
        ("date: 2026", "dat: 2026"), ("value: 16,", "value: -1,"), ("unchecked", "fit"),
        ("version: 1", "version: 2"), ("source: data sheet", "sauce: data sheet"),
    )  # fmt: skip
    assert [line.split(":")[1] for line in lines] == ["1", "1", "1", "4", "11", "12"]
    assert "p.yaml:1: version: this kvbench reads version 1, not 2" in lines
    assert "p.yaml:4: unknown key `dat`; did you mean `date`?" in lines
    assert any("status fit needs held_out" in line for line in lines)
    assert any(line.startswith("p.yaml:12: unknown key `sauce`") for line in lines)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("decode_context_ms", "decode_contex_ms", "did you mean `decode_context_ms`"),
    ("  prefill_token_ms: {value: 0.03, error: 0.001}\n", "", "needs `prefill_token_ms`"),
    (", source: data sheet", "", "needs a `source`"),
    ("[0, 0.01]", "[0, 0.02]", "variance of decode_step_ms is 0.02"),
    ("[0, 0.01]", "[1.0e-5, 0.01]", "not symmetric"),
    ("[[1.0e-6, 0], [0, 0.01]]", "[[1.0e-6, 2.0e-4], [2.0e-4, 0.01]]", "negative eigenvalue"),
    ("[[1.0e-6, 0], [0, 0.01]]", "[[1.0e-6, 0]]", "2 rows of 2 numbers"),
    ("order: [prefill_token_ms, ", "order: [prefill_step_ms, ", "each coefficient that has an error"),
    ("status: unchecked", "status: unfit\n" + HELD.strip(), "`cannot_explain` is empty"),
    ("status: unchecked", "status: fit\n" + HELD.strip(), "ttft_mean is outside"),
    (GOOD[GOOD.index("covariance:") :], "", "covariance is required"),
    ("name: some-gpu", "name: some gpu", "name"),
    ("value: 0.03", "value: '0.03'", "prefill_token_ms.value"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(old: str, new: str, expected: str) -> None:
    lines = mistakes_of((old, new))
    assert len(lines) == 1, lines
    assert re.match(r"p\.yaml:\d+: ", lines[0])
    assert expected in lines[0]


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "12"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^p\.yaml:1: "):
        parse_profile(text, "p.yaml")


@given(
    st.dictionaries(st.sampled_from(sorted(COEFFICIENTS)), st.floats(1e-9, 1e3), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_is_read_again(values: dict[str, float], seed: int) -> None:
    values = {"prefill_token_ms": 0.1, "decode_step_ms": 10.0, **values}
    half = np.random.default_rng(seed).normal(size=(len(values), len(values)))
    covariance = half @ half.T
    profile = ProfileFile(
        version=1,
        name="made",
        source="drawn: « # & ' \" »",
        date="2026-01-31",
        engine="none",
        machine="none",
        status="unchecked",
        coefficients={
            name: Coefficient(value=value, error=float(np.sqrt(covariance[place, place])))
            for place, (name, value) in enumerate(values.items())
        },
        covariance=Covariance(order=list(values), rows=covariance.tolist()),
    )
    text = profile_text(profile)
    assert parse_profile(text, "p.yaml") == profile
    for name in values:
        assert f"# {COEFFICIENTS[name]}\n  {name}:" in text
