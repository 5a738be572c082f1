"""``kvbench simulate --system``: what is refused before somebody else's simulator is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import invoke

from kvbench.planning.overrides import CliOptions, resolve

LOAD = ("--input-len", "512", "--output-len", "1", "--ttft-ms", "300", "--attainment", "0.9")


@pytest.mark.parametrize(("words", "message"), [
    (("xpyd", "--system", "true", *LOAD), "--system accepts no scenario"),
    (("--system", "true", "--input-len", "8"), "--system also needs --output-len, --ttft-ms"),
    (("--system", "no-such-program x", *LOAD), "program 'no-such-program' is missing"),
    (("--system", "'unclosed", *LOAD), "no closing quotation"),
    (("--system", " ", *LOAD), "must name a program"),
    (("--system", "true", "--gpus", "2", *LOAD), "without splits"),
    (("--system", "true", "--connector", "nixl", "--connector", "tcp", *LOAD), "one system is one"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = invoke("simulate", *words, "--output", str(tmp_path / "results")).failed(2)
    assert message in done.err.replace("\n", " ")
    assert not (tmp_path / "results").exists()


def test_load_options_are_for_an_ordinary_simulation_too() -> None:
    done = invoke("simulate", "--help")
    assert "--system" in done.out
    assert "--base-url" not in done.out
    scenario, _ = resolve(CliOptions("quickstart", input_len="64", output_len=4, ttft_ms=123.0))
    assert (scenario.workload.output_len, scenario.slo.ttft_ms) == (4, 123.0)
