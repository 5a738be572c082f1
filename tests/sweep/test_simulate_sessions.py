"""A rate of sessions, searched by `kvbench simulate`, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import invoke, the_run

from kvbench.errors import EXIT_NOT_VERIFIED
from kvbench.report.plots import sessions_figure
from kvbench.report.plots.sessions import LEAST
from kvbench.report.tables.result import summary_table
from kvbench.results.run import RunFolder

pytestmark = pytest.mark.timeout(180)

SETS = (
    "workload.sessions.shape={turns: 4, first_len: 512, added_len: 128, output_len: 16, think_time_s: 0.5}",
    "search.precision=0.3",
    "search.max_trials=3",
)


def test_a_rate_of_sessions_is_searched_and_told(tmp_path: Path) -> None:
    words = ("simulate", "agentic-simulated", "--connector", "aggregated", "--output", str(tmp_path))
    done = invoke(*words, sets=SETS).succeeded()
    run = the_run(tmp_path)
    assert run.manifest["status"] == "complete"
    assert "sessions/s" in done.text
    figures = [trial.engine["sessions"] for trial in run.trials]
    for figure in figures:
        assert (
            0.0 < figure["achieved_reuse"] <= figure["offered_reuse_in_pool"] <= figure["offered_reuse"] < 1.0
        )
        assert figure["requests_each"] > 1.0
    report = (run.path / "report.md").read_text()
    for words_ in ("sessions/s", "open loop", "first TTFT", "later TTFT", "offered"):
        assert words_ in report
    assert (run.path / "figures" / "sessions.svg").exists()
    require_drawn(run)
    # A search of sessions is not resumed, so its run does not say what it began with. All else is verified.
    done = invoke("verify", str(run.path)).failed(EXIT_NOT_VERIFIED)
    assert done.out.splitlines()[0] == (
        "not verified: answers: its searches cannot be repeated, as their start is unknown"
    )
    assert ": not verified: 1 reasons " in done.out.splitlines()[-1]


def require_drawn(run: RunFolder) -> None:
    """Each turn's median, and each share of reuse."""
    figure = sessions_figure(run)
    by_turn, reuse = figure.axes
    best = next(row for row in summary_table(run))
    found = next(trial for trial in run.trials if trial.trial_id == best.trial_id).engine["sessions"]
    (line,) = by_turn.lines
    known = {turn + 1: median for turn, count, median in found["ttft_ms_by_turn"] if count >= LEAST}
    drawn = zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
    assert dict(drawn) == known
    heights = [bar.get_height() for bar in reuse.patches]  # type: ignore[attr-defined]
    keys = ("offered_reuse", "offered_reuse_in_pool", "achieved_reuse")
    assert heights == [pytest.approx(100 * found[key]) for key in keys]


def require_sound(path: Path) -> None:
    assert "sound" in invoke("verify", str(path)).succeeded().text


def test_one_rate_of_sessions_is_offered(tmp_path: Path) -> None:
    words = ("simulate", "agentic-simulated", "--connector", "nixl", "--rate", "4", "--output", str(tmp_path))
    invoke(*words, sets=SETS).succeeded()
    (trial,) = the_run(tmp_path).trials
    assert trial.engine["sessions"]["ended"] > 0
    require_sound(the_run(tmp_path).path)


@pytest.mark.parametrize(("words", "text"), [
    (("chaos", "agentic-emulated", "--rate", "4"), "this command sends single requests"),
    (("bench", "agentic-emulated", "--concurrency", "4"), "sessions start open loop"),
    (("sweep", "agentic-emulated", "--set", "load.endpoint=chat"), "completions of token ids"),
    (("simulate", "--system", "true", "--slo", "ttft_ms p90 <= 9", "--set", "workload.sessions={}"),
     "accepts single requests"),
    (("sweep", "agentic-emulated", "--set", "load.workers=3"), "one load generator"),
    (("sweep", "agentic-emulated", "--set", "deployment.routing=nearest"), "deployment.routing"),
])  # fmt: skip
def test_what_cannot_be_asked_of_sessions_is_said(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    assert text in invoke(*words, "--output", str(tmp_path)).failed(2).err
    assert not any(tmp_path.iterdir())
