"""Pictures: there, not blank, labelled, the same each time, and nothing written over anything else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.image
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from run_files import QUICKSTART
from sample_run import make_run
from sample_transfers import MOVERS, make_record
from sample_transfers import make_run as make_transfers

from kvbench.core.transfers.cases import Axes, build
from kvbench.report.plots import (
    PICTURES,
    Theme,
    burst_figure,
    distribution_figure,
    goodput_figure,
    in_flight_figure,
    latency_figure,
    loads_figure,
    max_rate_figure,
    nic_share_figure,
    pareto_figure,
    write_plots,
)
from kvbench.report.plots.panels import axis_spans, light_records, nice_log_ticks, series_of, supporting
from kvbench.report.plots.rates import Point, front, gpus_by_connector, points
from kvbench.report.plots.style import PALETTES, looks
from kvbench.report.plots.transfer import nic_bytes
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore

SHOWN = {"max_request_rate", "latency", "goodput", "ttft_breakdown", "distribution", "in_flight"}
"""The pictures of the sample run: its plan names no instances, it has no telemetry, and no burst."""
REFERENCE = Path(__file__).parents[3] / "results" / "reference"


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("run"), special=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return load_run(make_run(tmp_path_factory.mktemp("run"), ("tcp",), (1024,)))


def drawn(figure: Figure | None) -> Figure:
    figure.canvas.draw()
    return figure


@pytest.fixture(scope="module")
def written(special: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_plots(special, tmp_path_factory.mktemp("pictures"), ("png", "svg"))


@pytest.mark.heavy
def test_dark_pictures_are_written_and_not_blank(special: RunFolder, tmp_path: Path) -> None:
    check_pictures(write_plots(special, tmp_path, ("png", "svg"), "dark"))


def test_pictures_are_written_and_not_blank(written: list[Path]) -> None:
    check_pictures(written)


def check_pictures(written: list[Path]) -> None:
    """All pictures of the sample run are there in both formats, and none is blank."""
    assert {path.stem.removesuffix("-dark") for path in written} == SHOWN
    assert len(written) == 2 * len(SHOWN)
    for path in written:
        assert path.stat().st_size > 5_000
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            pixels = matplotlib.image.imread(path)
            assert pixels[..., :3].std() > 0.03
            assert pixels.shape[1] >= 1200
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(path.name for path in written)


def test_svgs_carry_their_words_as_text(written: list[Path]) -> None:
    folder = written[0].parent
    for name in ("max_request_rate", "latency"):
        text = (folder / f"{name}.svg").read_text()
        for word in (
            "EMULATED",
            "mooncake",
            "req/s",
            "TTFT ≤ 250 ms",
            "kvbench 0.",
            "Example CPU 9000",
            "quickstart",
        ):
            assert word in text
    rates = (folder / "max_request_rate.svg").read_text()
    for part in ("no tested rate met the SLO", "refused", "8,192"):
        assert part in rates
    latency = (folder / "latency.svg").read_text()
    for part in ("P95", "TPOT (ms)", "refused trial"):
        assert part in latency


def test_the_same_run_gives_the_same_bytes(one: RunFolder, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in write_plots(one, tmp_path / "a")}
    second = {path.name: path.read_bytes() for path in write_plots(one, tmp_path / "b")}
    assert first == second


def test_a_run_without_trials_gives_no_picture_and_old_ones_go(one: RunFolder, tmp_path: Path) -> None:
    write_plots(one, tmp_path)
    assert write_plots(replace(one, trials=[], cells=[]), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("lengths", "long"), [((1024,), False), ((512, 2048, 8192), True)])
def test_no_words_lie_over_others_or_outside(tmp_path: Path, lengths: tuple[int, ...], long: bool) -> None:
    run = load_run(make_run(tmp_path, ("aggregated", "mooncake", "nixl"), lengths))
    if long:
        run.manifest["scenario"] = "a-scenario-with-quite-a-long-name-that-somebody-chose " * 3
    for name in sorted(SHOWN):
        figure = drawn(PICTURES[name].draw(run, "light"))
        texts: list[Text] = [*figure.texts]
        for legend in figure.legends:
            texts += legend.get_texts()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = axis.get_view_interval()
                texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [axes.xaxis.label, axes.yaxis.label, axes._left_title]  # type: ignore[attr-defined]
        boxes = [
            (text.get_text(), text.get_window_extent().extents.tolist())
            for text in texts
            if text.get_text().strip() and text.get_visible()
        ]
        left, low, right, high = figure.bbox.extents
        for words, (x0, y0, x1, y1) in boxes:
            assert left <= x0 < x1 <= right, words
            assert low <= y0 < y1 <= high, words
        for (words, (x0, y0, x1, y1)), (others, (u0, v0, u1, v1)) in combinations(boxes, 2):
            assert x1 < u0 or u1 < x0 or y1 < v0 or v1 < y0, (words, others)


def test_the_quantile_of_the_slo_is_computed_from_the_requests(one: RunFolder) -> None:
    from kvbench.report.plots.latency import _metrics

    ttft = _metrics(one)[0]
    trial = one.trials[0]
    requests = one.requests(trial.trial_id)
    window = trial.summary["window"]
    inside = requests[requests.scheduled_s.between(window["start_s"], window["end_s"])]
    expected = (inside.first_token_s - inside.scheduled_s).quantile(0.95) * 1e3
    assert (ttft.quantile, ttft.high[trial.trial_id]) == ("p95", pytest.approx(expected))


def test_without_requests_the_summary_is_drawn(one: RunFolder, tmp_path: Path) -> None:
    from kvbench.report.plots.latency import _metrics

    run = replace(one, path=tmp_path)
    assert _metrics(run)[0].quantile == "p99"
    assert latency_figure(run) is not None


def test_a_single_output_token_has_no_tpot_panel(one: RunFolder, tmp_path: Path) -> None:
    trials = [replace(trial, summary=trial.summary | {"tpot_ms": {}}) for trial in one.trials]
    figure = drawn(latency_figure(replace(one, trials=trials, path=tmp_path)))
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT (ms)"]


def test_settings_of_the_process_are_left_alone(one: RunFolder, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_plots(one, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_connectors_keep_their_look_and_unknown_ones_get_one_each() -> None:
    palette = PALETTES["light"]
    few, many = looks(["nixl"], palette), looks(["x", "aggregated", "nixl", "y"], palette)
    assert (few["nixl"], len({(look.colour, look.marker) for look in many.values()})) == (many["nixl"], 4)


@pytest.mark.parametrize(("low", "high"), [(0.3, 60), (20, 2500), (1e-3, 1e5), (90, 130)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = nice_log_ticks(low, high)
    assert 1 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)


def test_a_home_without_write_does_no_harm_and_pyplot_is_not_used(one: RunFolder, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvbench.results.run import load_run; "
        "from kvbench.report.plots import write_plots; "
        "print(len(write_plots(load_run(sys.argv[1]), Path(sys.argv[2]), ('png',)))); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MPL"))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(one.path), str(tmp_path / "figures")],
        env=environment | {"HOME": "/proc/nowhere"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"{len(SHOWN)}\nFalse\n", done.stderr


def test_a_burst_is_drawn_beside_the_rate_that_holds_and_only_then(one: RunFolder) -> None:
    assert burst_figure(one) is None
    measured = load_run(REFERENCE / "burst-or-sustained")
    figure = burst_figure(measured)
    burst, held = figure.axes
    assert "burst" in burst.get_title(loc="left")
    assert "sustained" in held.get_title(loc="left")
    # More are on their way than the server has places for, and than ever where the rate holds.
    (cell,) = measured.other_cells
    assert cell.answer is not None
    (trial,) = (
        candidate
        for candidate in measured.other_trials
        if candidate.verdict == "met" and candidate.request_rate == cell.answer["max_request_rate"]
    )
    on_their_way = max(burst.lines[0].get_ydata())
    assert on_their_way == trial.summary["peak_in_flight"] > 32
    assert max(held.lines[0].get_ydata()) < on_their_way


# --- what the pictures are made of -----------------------------------------------------------------
@pytest.fixture(scope="module")
def quickstart() -> RunFolder:
    return load_run(QUICKSTART)


def test_goodput_points_are_those_of_the_trials(quickstart: RunFolder) -> None:
    figure = drawn(goodput_figure(quickstart))
    points_drawn = {
        (round(x, 6), round(y, 6))
        for axes in figure.axes
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_marker() != "^"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    expected = {
        (
            round(trial.summary["arrived"] / (window["end_s"] - window["start_s"]), 6),
            round(trial.summary["request_goodput"], 6),
        )
        for trial in quickstart.trials
        for window in [trial.summary["window"]]
        if trial.verdict != "invalid" and trial.purpose != "ceiling"
    }
    assert points_drawn == expected


def test_light_records_are_the_requests_without_their_gaps(quickstart: RunFolder) -> None:
    trial = quickstart.trials[0]
    whole = quickstart.request_records(trial.trial_id)
    light = light_records(quickstart, trial.trial_id)
    assert [
        (r.scheduled_s, r.sent_s, r.first_token_s, r.last_token_s, r.output_len, r.error) for r in light
    ] == [(r.scheduled_s, r.sent_s, r.first_token_s, r.last_token_s, r.output_len, r.error) for r in whole]
    assert any(record.first_token_s is None for record in light)


def test_in_flight_reaches_the_peak_that_the_summary_tells(quickstart: RunFolder) -> None:
    figure = drawn(in_flight_figure(quickstart))
    trials = {trial.trial_id: trial for trial in quickstart.trials}
    peaks = sorted(trials[trial.trial_id].summary["peak_in_flight"] for _, trial in supporting(quickstart))
    shown = sorted(max(axes.lines[0].get_ydata()) for axes in figure.axes if axes.lines)
    assert shown == peaks


def test_distributions_end_at_all_requests_and_cross_the_median(quickstart: RunFolder) -> None:
    figure = drawn(distribution_figure(quickstart))
    curves = [line for axes in figure.axes for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert len(curves) == 2 * len(quickstart.cells)
    for line in curves:
        assert list(line.get_xdata()) == sorted(line.get_xdata())
        assert line.get_ydata()[-1] == pytest.approx(100)


def test_requests_with_one_token_have_a_ttft_distribution_only(one: RunFolder, tmp_path: Path) -> None:
    assert distribution_figure(replace(one, path=tmp_path)) is None
    assert in_flight_figure(replace(one, path=tmp_path)) is None


def test_throughput_is_shared_out_over_all_instances(quickstart: RunFolder) -> None:
    assert gpus_by_connector(quickstart) == {"aggregated": 2, "mooncake": 2, "nixl": 2}
    by_place = {point for panel in points(quickstart).values() for point in panel}
    for trial in quickstart.trials:
        tpot_ms, output = trial.summary["tpot_ms"]["p50"], trial.summary["output_tok_per_s"]
        if trial.verdict == "invalid" or trial.purpose == "ceiling" or not tpot_ms or not output:
            continue
        assert any(
            (point.connector, point.interactivity, point.throughput)
            == (trial.cell.connector, pytest.approx(1e3 / tpot_ms), pytest.approx(output / 2))
            for point in by_place
        )
    assert pareto_figure(quickstart) is not None


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    beaten, slow, fast = Point("a", 10, 50, True), Point("a", 20, 100, True), Point("a", 40, 60, False)
    assert (front([beaten, fast, slow]), front([])) == ([slow, fast], [])


def test_the_nics_shares_of_a_microbenchmark_are_those_of_its_rows(tmp_path: Path) -> None:
    run = load_run(make_transfers(tmp_path, Axes(nics=(1, 2)), lab="2 × 1gbit"))
    shares = nic_bytes(run)
    assert shares
    assert all(set(parts) == {"kv0", "kv1"} for parts in shares.values())
    assert "mooncake tcp write, 2 NICs" in shares
    figure = drawn(nic_share_figure(run))
    assert any(text.get_text().startswith("LAB") for text in figure.texts)
    (axes,) = figure.axes
    assert all(patch.get_width() == pytest.approx(50) for patch in axes.patches)


def test_the_nics_shares_of_a_sweep_come_from_its_telemetry(one: RunFolder, tmp_path: Path) -> None:
    assert nic_share_figure(one) is None
    shutil.copytree(one.path, tmp_path / "run")
    ((_, trial),) = supporting(one)
    rows = [
        {
            "trial_id": trial.trial_id,
            "t_s": t,
            "source": f"nic:{nic}",
            "metric": metric,
            "value": start + t * rate,
        }
        for nic, rate, start in (("lo", 9e9, 5), ("eth0", 3e6, 70), ("eth1", 1e6, 9e9), ("eth2", 10, 0))
        for metric in ("tx_bytes", "rx_bytes")
        for t in (0.5, 1.0, 2.5)
    ]
    (tmp_path / "run" / "telemetry").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(tmp_path / "run" / "telemetry" / f"{trial.trial_id}.parquet")
    assert nic_bytes(load_run(tmp_path / "run")) == {"tcp, 1,024 in": {"eth0": 6e6, "eth1": 2e6}}


def test_read_in_results_of_different_ways_are_not_joined_by_a_line() -> None:
    run = load_run(REFERENCE / "seed-pr10884")
    names = series_of(run.all_trials)
    assert set(names.values()) == {"mooncake rdma, 2 NICs", "mooncake rdma, 1 NIC", "mooncake tcp"}
    figure = drawn(latency_figure(run))
    titles = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    assert titles == {"1,024 tokens in, tp 4"}
    for axes in figure.axes:
        for line in axes.lines:
            rates = list(line.get_xdata())
            assert rates == sorted(rates)


def test_words_of_others_are_no_formulas(one: RunFolder) -> None:
    run = replace(one, manifest=one.manifest | {"scenario": r"costs $5 and $\frac{ more $"})
    figure = drawn(max_rate_figure(run))
    assert any("costs" in text.get_text() for text in figure.texts)


def test_a_nic_that_was_asked_and_idle_keeps_its_place(tmp_path: Path) -> None:
    matrix = build(Axes(backends=("tcp",), nics=(2,)), MOVERS)
    case = max((case for case in matrix.cases if case.backend == "tcp"), key=lambda case: case.nbytes)
    record = make_record(case)
    record.nic_bytes = {"initiator:kv0": 1000, "initiator:kv1": 0, "target:kv0": 1000, "target:kv1": 0}
    info = RunInfo(kind="microbench", labels=["lab"])
    with RunStore.create(tmp_path, "idle", b"", matrix.to_json(), {}, info) as store:
        store.add_transfer(record)
    run = load_run(store.path)
    assert list(nic_bytes(run).values()) == [{"kv0": 1000.0, "kv1": 0.0}]
    figure = drawn(nic_share_figure(run))
    assert any(text.get_text() == "max / mean 2.00" for text in figure.axes[0].texts)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_loads_of_one_rate_each_stand_side_by_side(theme: Theme) -> None:
    notes = load_run(REFERENCE / "seed-notes")
    assert latency_figure(notes, theme) is None  # one point makes no line
    figure = loads_figure(notes, theme)
    ttft, tpot = figure.axes
    labels = [tick.get_text() for tick in tpot.get_xticklabels()]
    assert labels[0] == "1,024 in\n80.0 req/s"
    assert labels[-2:] == ["32,768 in\n35.0 req/s", "32,768 in\n45.0 req/s"]
    values = {float(line.get_ydata()[0]) for line in ttft.lines if len(line.get_xdata()) == 1}
    trials = [trial.summary["ttft_ms"] for trial in notes.all_trials]
    assert values == {trial[key] for trial in trials for key in ("p99", "mean", "p50")}
    assert any("IMPORTED" in text.get_text() for text in figure.texts)


def test_only_lengths_of_several_rates_are_drawn_over_the_rate() -> None:
    page = load_run(REFERENCE / "seed-pr10884")
    over_rate, by_load = latency_figure(page), loads_figure(page)
    assert over_rate is not None
    assert [axes.get_title(loc="left") for axes in over_rate.axes if axes.get_title(loc="left")] == [
        "1,024 tokens in, tp 4"
    ]
    assert len(by_load.axes[0].get_xticks()) == 5


def test_a_search_is_not_drawn_by_load(quickstart: RunFolder) -> None:
    assert loads_figure(quickstart) is None


@given(st.lists(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=8), min_size=1, max_size=5))
def test_axes_hold_all_values_and_begin_at_zero_together(panels: list[list[float]]) -> None:
    spans = axis_spans(panels)
    assert len({low == 0.0 for low, _ in spans}) == 1
    for values, (low, high) in zip(panels, spans, strict=True):
        assert low < min(values) <= max(values) < high
        if low:
            assert high - low >= 0.2 * max(values) * (1 - 1e-9)


def test_a_single_point_gets_an_axis_from_zero() -> None:
    assert axis_spans([[20.0]]) == [(0.0, pytest.approx(22.0))]
    assert [low for low, _ in axis_spans([[20.0, 20.0], [18.0, 22.0]])] == [0.0, 0.0]
