"""Pictures: there, not blank, labelled, the same each time, and nothing written over anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.image
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from sample_run import make_run

from kvbench.plots import breakdown_figure, burst_figure, latency_figure, max_rate_figure, write_plots
from kvbench.plots.style import PALETTES, looks, nice_log_ticks
from kvbench.runs import Run, load_run


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(make_run(tmp_path_factory.mktemp("run"), special=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(make_run(tmp_path_factory.mktemp("run"), ("tcp",), (1024,)))


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_written_and_not_blank(special: Run, tmp_path: Path, theme: str) -> None:
    written = write_plots(special, tmp_path, ("png", "svg"), theme)  # type: ignore[arg-type]
    assert len(written) == 6
    for path in written:
        assert path.stat().st_size > 5_000
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            pixels = matplotlib.image.imread(path)
            assert pixels[..., :3].std() > 0.03
            assert pixels.shape[1] >= 1200
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)


def test_svgs_carry_their_words_as_text(special: Run, tmp_path: Path) -> None:
    write_plots(special, tmp_path, ("svg",))
    for name in ("max_request_rate", "latency"):
        text = (tmp_path / f"{name}.svg").read_text()
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
    rates = (tmp_path / "max_request_rate.svg").read_text()
    assert "no tested rate met it" in rates
    assert "refused" in rates
    assert "8,192" in rates
    latency = (tmp_path / "latency.svg").read_text()
    assert "P95" in latency
    assert "TPOT (ms)" in latency
    assert "refused trial" in latency


def test_the_same_run_gives_the_same_bytes(one: Run, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in write_plots(one, tmp_path / "a")}
    second = {path.name: path.read_bytes() for path in write_plots(one, tmp_path / "b")}
    assert first == second


def test_a_run_without_trials_gives_no_picture_and_old_ones_go(one: Run, tmp_path: Path) -> None:
    write_plots(one, tmp_path)
    assert write_plots(replace(one, trials=[], cells=[]), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lengths", "long"),
    [((1024,), True), ((512, 2048), False), ((512, 2048), True), ((512, 1024, 2048, 4096, 8192), True)],
)
def test_no_words_lie_over_others_or_outside(tmp_path: Path, lengths: tuple[int, ...], long: bool) -> None:
    run = load_run(make_run(tmp_path, ("aggregated", "mooncake", "nixl"), lengths))
    if long:
        run.manifest["scenario"] = "a-scenario-with-quite-a-long-name-that-somebody-chose " * 3
    for figure in (drawn(max_rate_figure(run)), drawn(latency_figure(run)), drawn(breakdown_figure(run))):
        texts: list[Text] = [*figure.texts]
        for legend in figure.legends:
            texts += legend.get_texts()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = axis.get_view_interval()
                texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [axes.xaxis.label, axes.yaxis.label, axes._left_title]  # type: ignore[attr-defined]
        boxes = [
            (text.get_text(), text.get_window_extent())
            for text in texts
            if text.get_text().strip() and text.get_visible()
        ]
        inside = figure.bbox
        for words, box in boxes:
            assert inside.x0 <= box.x0 < box.x1 <= inside.x1, words
            assert inside.y0 <= box.y0 < box.y1 <= inside.y1, words
        for (words, box), (others, other) in combinations(boxes, 2):
            assert not box.overlaps(other), (words, others)


def test_the_quantile_of_the_slo_is_computed_from_the_requests(one: Run) -> None:
    from kvbench.plots.latency import _metrics

    ttft = _metrics(one)[0]
    trial = one.trials[0]
    requests = one.requests(trial.trial_id)
    window = trial.summary["window"]
    inside = requests[requests.scheduled_s.between(window["start_s"], window["end_s"])]
    expected = (inside.first_token_s - inside.scheduled_s).quantile(0.95) * 1e3
    assert ttft.quantile == "p95"
    assert ttft.high[trial.trial_id] == pytest.approx(expected)


def test_without_requests_the_summary_is_drawn(one: Run, tmp_path: Path) -> None:
    from kvbench.plots.latency import _metrics

    run = replace(one, path=tmp_path)
    assert _metrics(run)[0].quantile == "p99"
    assert latency_figure(run) is not None


def test_a_single_output_token_has_no_tpot_panel(one: Run, tmp_path: Path) -> None:
    trials = [replace(trial, summary=trial.summary | {"tpot_ms": {}}) for trial in one.trials]
    figure = drawn(latency_figure(replace(one, trials=trials, path=tmp_path)))
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT (ms)"]


def test_settings_of_the_process_are_left_alone(one: Run, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_plots(one, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_connectors_keep_their_look_and_unknown_ones_get_one_each() -> None:
    palette = PALETTES["light"]
    few, many = looks(["nixl"], palette), looks(["x", "aggregated", "nixl", "y"], palette)
    assert few["nixl"] == many["nixl"]
    assert len({(look.colour, look.marker) for look in many.values()}) == 4


@pytest.mark.parametrize(("low", "high"), [(0.3, 60), (20, 2500), (1e-3, 1e5), (90, 130)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = nice_log_ticks(low, high)
    assert 1 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)


def test_a_home_that_cannot_be_written_does_no_harm_and_pyplot_is_not_used(one: Run, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvbench.runs import load_run; "
        "from kvbench.plots import write_plots; "
        "print(len(write_plots(load_run(sys.argv[1]), Path(sys.argv[2]), ('png',)))); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "MPL"))}
    done = subprocess.run(
        [sys.executable, "-c", code, str(one.path), str(tmp_path / "figures")],
        env=environment | {"HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "3\nFalse\n", done.stderr


def test_a_burst_is_drawn_beside_the_rate_that_holds_and_only_then(one: Run) -> None:
    assert burst_figure(one) is None
    measured = load_run(Path(__file__).parent.parent / "results" / "reference" / "burst-or-sustained")
    figure = burst_figure(measured)
    assert figure is not None
    burst, held = figure.axes
    assert "burst" in burst.get_title(loc="left")
    assert "sustained" in held.get_title(loc="left")
    # All of a burst is on its way at once when its last request has come.
    (answer,) = measured.other_cells
    assert answer.answer is not None
    rate = answer.answer["max_request_rate"]
    on_their_way = max(burst.lines[0].get_ydata())
    assert on_their_way == round(5 * rate)
    assert max(held.lines[0].get_ydata()) < on_their_way
