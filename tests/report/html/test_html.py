"""report.html: a file that fetches nothing, says what the CSVs say, and makes no word of a run markup."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import pytest
import sample_transfers
from page import Page
from run_files import QUICKSTART, edit_json, edit_rows
from sample_run import make_run

from kvbench.core.transfers.cases import Axes
from kvbench.report.html import colours, marked, numeric_columns, page_svg, rows_of, small
from kvbench.report.plots.distribution import COLOURS
from kvbench.report.plots.style import PALETTES
from kvbench.report.report import write_report
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.table import number, of_csv
from kvbench.results.run import load_run

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
RAW = ("manifest.json", "scenario.yaml", "plan.json", "environment.json", "trials.jsonl", "cells.jsonl")
MAX_BYTES = 700_000


def reported(path: Path) -> Page:
    write_report(path, ("html", "csv", "svg"))
    return Page.of((path / "report.html").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's reference run, with its report made anew."""
    path = tmp_path_factory.mktemp("run") / "quickstart"
    path.mkdir()
    for name in RAW:
        shutil.copy(QUICKSTART / name, path)
    shutil.copytree(QUICKSTART / "requests", path / "requests")
    write_report(path, ("html", "csv", "svg"))
    return path


@pytest.fixture(scope="module")
def page(measured: Path) -> Page:
    return Page.of((measured / "report.html").read_text())


def sound(page: Page) -> None:
    """What holds of every page."""
    assert (page.wrong, page.fetched, page.handlers) == ([], [], [])
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "url(http" not in "".join(page.styles)
    assert "@import" not in "".join(page.styles)
    assert (page.headings[0], page.headings.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'")
    for picture in page.pictures:
        assert picture["role"] == "img"
        assert len(picture["aria-label"]) > 30
    for table in page.tables:
        assert all(table.headings)
        assert all(len(row) == len(table.headings) for row in table.rows)


def test_the_quickstarts_page_is_sound_and_not_too_large(measured: Path, page: Page) -> None:
    sound(page)
    assert (measured / "report.html").stat().st_size < MAX_BYTES
    assert "quickstart" in page.title
    assert "emulated" in page.title
    assert len(page.pictures) == 7
    text = (measured / "report.html").read_text()
    assert text.index('id="answer"') == text.index("<h2") + len("<h2 "), "the answer comes first"
    assert text.index("aggregated is ahead: 1.17") < text.index("<svg") < text.index('id="result"')
    assert text.index('id="result"') < text.index("Who is ahead")
    assert "kvbench sweep quickstart --output results" in text
    assert str(load_run(measured).environment["cpu"]["model"]) in text


def test_the_answer_has_one_row_per_input_length(page: Page, measured: Path) -> None:
    table = page.tables[0]
    assert table.headings == ["input (tokens)", "aggregated", "mooncake", "nixl", "ahead"]
    rows = summary_table(load_run(measured))
    for length, cells in zip((256, 1024), table.rows, strict=True):
        answers = [row.answer.text() for row in rows if row.cell.input_len == length]
        assert [text for text, _ in cells[:-1]] == [f"{length:,}", *answers]
    assert [cells[-1][0] for cells in table.rows] == [
        "aggregated 1.17× mooncake [1.04, 1.52]",
        "no significant difference",
    ]


def test_checked_outputs_gates_and_caveats_are_folded(measured: Path) -> None:
    folded = re.findall(r"<summary>([^<]*)</summary>", (measured / "report.html").read_text())
    titles = "\n".join(folded)
    for start in ("Outputs checked", "Caveats (", "Findings by gate (", "Every finding ("):
        assert re.search(f"^{re.escape(start)}", titles, re.M), start


def test_wrong_outputs_stand_before_the_answer(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(measured, path)
    wrong = {"checked": 5, "wrong": 2}
    edit_rows(path / "trials.jsonl", lambda row: row["engine"].update(canaries=wrong), 0, 1)
    write_report(path, ("html",))
    text = (path / "report.html").read_text()
    assert text.index('<p class="bad">answers under load: 2 of 5 wrong') < text.index('<p class="lead">')


def test_a_trials_share_has_one_interval(page: Page) -> None:
    (table,) = [table for table in page.tables if table.csv == "trials.csv" and len(table.keys) < 25]
    share, reason = table.keys.index("slo_attainment"), table.keys.index("reason")
    assert any(" [" in row[share][0] for row in table.rows)
    assert any("stopping interval" in row[reason][1] for row in table.rows), "the CSV has it"
    assert not any("interval" in row[reason][0] for row in table.rows)


def test_no_backtick_is_left_in_the_page(measured: Path) -> None:
    text = re.sub(r"<(script|pre)\b.*?</\1>", "", (measured / "report.html").read_text(), flags=re.DOTALL)
    assert "`" not in re.sub(r"<[^>]*>", "", text)
    assert "<code>kvbench doctor --gates</code>" in text
    assert marked("`a<b` and *saturated* [1, 2]") == "<code>a&lt;b</code> and <em>saturated</em> [1, 2]"
    assert small("`<x>` 74.0 [67.7, 86.4]") == "<code>&lt;x&gt;</code> 74.0 <small>[67.7, 86.4]</small>"
    assert small("<x>") == "<x>", "the template escapes it"


@pytest.mark.parametrize("name", ["summary", "trials"])
def test_the_tables_equal_the_csvs(measured: Path, page: Page, name: str) -> None:
    with open(measured / "tables" / f"{name}.csv", newline="") as file:
        expected = list(csv.reader(file))
    whole = page.table(f"{name}.csv")
    assert whole.keys == expected[0]
    assert [[value for _, value in row] for row in whole.rows] == expected[1:]
    for table in page.tables:  # the short ones that people read have the same values in their columns
        if table.csv == f"{name}.csv":
            places = [expected[0].index(key) for key in table.keys]
            assert [[value for _, value in row] for row in table.rows] == [
                [row[place] for place in places] for row in expected[1:]
            ]


def test_what_people_read_is_the_rounded_value(page: Page) -> None:
    table = next(table for table in page.tables if "ttft_ms_p50" in table.keys)
    rate, share = table.keys.index("max_request_rate"), table.keys.index("ttft_ms_p50")
    for row in table.rows:
        assert float(row[rate][0].split("?")[0].split(" ")[0]) == pytest.approx(float(row[rate][1]), rel=0.01)
        assert float(row[share][0]) == pytest.approx(float(row[share][1]), rel=0.01)


PLANTED = "<script>alert('planted')</script> & \"quoted\" $x$ </style>"


def test_no_word_of_a_run_becomes_markup(tmp_path: Path) -> None:
    path = make_run(tmp_path, ("aggregated", "mooncake"), (1024,), special=True)
    words = {"scenario": PLANTED, "argv": ["kvbench", PLANTED], "error": PLANTED, "hosts": [PLANTED]}
    edit_json(path / "manifest.json", **words)
    edit_json(path / "environment.json", cpu={"model": PLANTED, PLANTED: 1})
    finding = {"gate": PLANTED, "level": "warning", "message": PLANTED, "advice": PLANTED}
    edit_rows(path / "trials.jsonl", lambda row: row.update(reason=PLANTED, findings=[finding]), 0, 1)
    (path / "scenario.yaml").write_text(f"# {PLANTED}\n" + (path / "scenario.yaml").read_text())
    page = reported(path)
    sound(page)
    assert "planted" not in page.scripts[0]
    assert page.title.startswith(PLANTED)
    assert any(PLANTED in text for table in page.tables for row in table.rows for text, _ in row)


def test_a_run_that_was_cut_off_before_its_first_trial_has_a_page(tmp_path: Path) -> None:
    path = make_run(tmp_path, (), (), status="interrupted")
    page = reported(path)
    sound(page)
    text = (path / "report.html").read_text()
    assert "No cell was measured" in text
    assert "interrupted" in text


def test_a_burst_run_shows_its_own_table_and_picture(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(REFERENCE / "burst-or-sustained", path)
    page = reported(path)
    sound(page)
    assert page.table("burst.csv").rows
    assert any("burst" in picture["aria-label"] for picture in page.pictures)


def test_a_microbenchmark_has_its_cases_and_pictures(tmp_path: Path) -> None:
    path = sample_transfers.make_run(tmp_path, Axes(nics=(1, 2)), lab="2 × 1gbit")
    page = reported(path)
    sound(page)
    with open(path / "tables" / "transfers.csv", newline="") as file:
        expected = list(csv.reader(file))
    whole = page.table("transfers.csv")
    assert [[value for _, value in row] for row in whole.rows] == expected[1:]
    assert any("network cards" in picture["aria-label"] for picture in page.pictures)
    text = (path / "report.html").read_text()
    assert "LAB" in text
    assert "load average 3.1 on 2 cores" in text


LONG = ("chaos", "vllm-cpu-tiny")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[pytest.mark.heavy] * (path.name in LONG))
        for path in sorted(REFERENCE.iterdir())
        if (path / RAW[0]).is_file()
    ],
)
def test_each_reference_run_has_a_sound_page(name: str, tmp_path: Path) -> None:
    if name == "quickstart":
        pytest.skip("has its own tests")
    path = tmp_path / name
    shutil.copytree(REFERENCE / name, path)
    write_report(path, ("html",))
    sound(Page.of((path / "report.html").read_text()))


def test_the_page_is_the_same_with_pictures_drawn_or_read(tmp_path: Path) -> None:
    path = make_run(tmp_path, ("tcp",), (1024,))
    write_report(path, ("html", "svg"))
    read = (path / "report.html").read_bytes()
    write_report(path, ("html",))
    assert (path / "report.html").read_bytes() == read


def test_every_mark_of_a_trial_says_its_value(page: Page, measured: Path) -> None:
    run = load_run(measured)
    for trial in run.trials:
        if trial.verdict in ("met", "missed") and trial.purpose != "ceiling":
            start = f"{trial.cell.connector}, {number(trial.request_rate)} req/s: TTFT P90 "
            assert [text for text in page.values if text.startswith(start)], start
    assert len(page.values) > 100


# --- pictures in the page --------------------------------------------------------------------------
def test_every_colour_of_a_picture_has_one_for_the_dark(measured: Path) -> None:
    for path in (measured / "figures").glob("*.svg"):
        styles = " ".join(re.findall(r'style="([^"]*)"', path.read_text()))
        assert set(re.findall(r"#[0-9a-f]{6}\b", styles)) <= set(colours()), path.name


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_no_phase_of_ttft_has_the_colour_of_a_connector() -> None:
    for theme, palette in PALETTES.items():
        connectors = [*palette.series.values(), *palette.spare, palette.limit]
        for phase in (*COLOURS[theme].values(), palette.waiting):
            assert min(distance(phase, other) for other in connectors) > 25, (theme, phase)


def distance(one: str, other: str) -> float:
    """How differently two colours look (CIE 1976); 2.3 is just noticeable."""
    return math.dist(lab(one), lab(other))


def lab(colour: str) -> tuple[float, float, float]:
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    r, g, b = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    x, y, z = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.0888,
    )
    fx, fy, fz = (ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116 for ratio in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_words_stand_out_from_the_paper_in_both_themes(page: Page) -> None:
    for palette in PALETTES.values():
        assert contrast(palette.ink, palette.paper) > 7
        assert contrast(palette.faint, palette.paper) > 4.5
        assert contrast(palette.ink, palette.badge) > 4.5
        assert all(contrast(colour, palette.paper) > 3 for colour in palette.series.values())
    css = page.styles[0].split("* { box-sizing")[0]
    for theme in (css.rpartition("@media")[0], css.rpartition("@media")[2]):
        named = dict(re.findall(r"--(paper|ink|faint|link|bad|warn|good|soft): (#[0-9a-f]{6})", theme))
        assert len(named) == 8
        for name in ("ink", "faint", "link", "bad", "warn", "good"):
            assert contrast(named[name], named["paper"]) > 4.5, name
            assert contrast(named[name], named["soft"]) > 4.5, name


def test_a_picture_in_the_page_is_without_what_no_page_needs() -> None:
    svg = (
        '<svg width="1pt" height="1pt" viewBox="0 0 1 1"><defs>\n</defs><g id="a"><g data-series="tcp">'
        '<g id="c"><path id="b" d="M 0.12345 -7.5" style="fill: #ffffff"/></g>'
        '<use xlink:href="#b" x="1.234567" style="fill: #ffffff"/>'
        '<text style="fill: none" transform="rotate(-0 1 2)">t</text></g></g></svg>'
    )
    classes: dict[str, str] = {}
    assert page_svg(svg, "x", "what it is", classes) == (
        '<svg viewBox="0 0 1 1" role="img" aria-label="what it is"><g data-series="tcp">'
        '<path id="x-0" d="M 0.1 -7.5" class="s0"/><use xlink:href="#x-0" x="1.2" class="s0"/>'
        '<text class="s1">t</text></g></svg>'
    )
    assert classes == {"fill: var(--kffffff)": "s0", "fill: none": "s1"}


def test_a_step_curve_is_written_with_one_coordinate_a_step() -> None:
    svg = '<svg viewBox="0 0 9 9"><path d="M 1 2 L 5 2 L 5 4 L 7 6 L 7 8.04 z"/></svg>'
    assert '<path d="M 1 2 H 5 V 4 L 7 6 V 8 z"/>' in page_svg(svg, "x", "what it is", {})


def test_missing_values_sort_as_missing() -> None:
    table = of_csv("t", "A table", [{"a": 1.23456, "b": None}, {"a": None, "b": "x"}])
    assert table is not None
    assert [[(text, value) for text, value, _ in row] for row in rows_of(table, numeric_columns(table))] == [
        [("1.23", "1.23456"), ("–", "")],
        [("–", ""), ("x", "x")],
    ]
    assert of_csv("t", "A table", []) is None


# --- in a browser ----------------------------------------------------------------------------------
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(
    not os.environ.get("KVBENCH_BROWSER_TESTS") or CHROMIUM is None,
    reason="needs Chromium: `make test-html` runs it (the pictures lie in KVBENCH_SHOTS, if set)",
)


def browsed(profile: Path, *arguments: str) -> str:
    """What headless Chromium prints."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    argv = [str(CHROMIUM), *flags, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def after(page: Path, folder: Path, script: str, *arguments: str) -> str:
    """The page's DOM after a script; what the page itself may run is untouched, but for its policy."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    return browsed(folder / "profile", *arguments, "--dump-dom", copy.as_uri())


@in_a_browser
@pytest.mark.parametrize("width", [420, 1200, 1920])
@pytest.mark.parametrize("look", ["light", "dark"])
def test_it_can_be_seen_in_a_browser(measured: Path, tmp_path: Path, look: str, width: int) -> None:
    shot = Path(os.environ.get("KVBENCH_SHOTS") or tmp_path) / f"report-{look}-{width}.png"
    browsed(
        tmp_path / "profile",
        f"--window-size={width},2400",
        f"--blink-settings=preferredColorScheme={0 if look == 'dark' else 1}",
        f"--screenshot={shot}",
        (measured / "report.html").as_uri(),
    )
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2400, width)
    assert pixels.std() > 0.05
    assert (pixels.mean() < 0.3) == (look == "dark")


@in_a_browser
def test_it_can_be_printed(measured: Path, tmp_path: Path) -> None:
    paper = Path(os.environ.get("KVBENCH_SHOTS") or tmp_path) / "report.pdf"
    browsed(tmp_path / "profile", f"--print-to-pdf={paper}", (measured / "report.html").as_uri())
    data = paper.read_bytes()
    assert data.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 30


@in_a_browser
def test_a_click_sorts_a_table_and_a_second_one_turns_it_round(measured: Path, tmp_path: Path) -> None:
    for clicks, down in ((1, False), (2, True)):
        click = "document.querySelector('th[data-key=ttft_ms_p99] button').click();" * clicks
        found = Page.of(after(measured / "report.html", tmp_path, click))
        table = next(candidate for candidate in found.tables if "ttft_ms_p99" in candidate.keys)
        values = [row[table.keys.index("ttft_ms_p99")][1] for row in table.rows]
        known = [float(value) for value in values if value]
        assert len(known) > 3
        assert known == sorted(known, reverse=down)
        assert all(value == "" for value in values[len(known) :])  # missing values stay at the end


@in_a_browser
def test_a_mark_says_its_value_under_the_pointer(measured: Path, tmp_path: Path) -> None:
    """Of the first picture each mark in turn, a few pixels beside it, as a hand would."""
    script = """
        var said = [];
        document.querySelectorAll("#answer ~ figure use[data-value]").forEach(function (mark) {
          mark.scrollIntoView({ block: "center" });
          var at = mark.getBoundingClientRect();
          var where = { bubbles: true, clientX: at.left + at.width / 2 + 3, clientY: at.top + at.height / 2 };
          mark.closest("svg").dispatchEvent(new PointerEvent("pointermove", where));
          var box = document.getElementById("value");
          said.push(box.hidden ? "hidden" : box.textContent);
        });
        document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
        said.push(document.getElementById("value").hidden ? "gone" : "still there");
        document.title = said.join(" | ");
    """
    title = Page.of(after(measured / "report.html", tmp_path, script)).title
    *texts, last = title.split(" | ")
    assert last == "gone"
    with open(measured / "tables" / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(texts) == len(rows)
    for row in rows:
        rate = number(float(row["max_request_rate"]))
        where = f"{row['connector']}, {int(row['input_len']):,} tokens in: {rate} ["
        assert [text for text in texts if text.startswith(where) and text.endswith("] req/s")], where


@in_a_browser
def test_a_connector_can_be_hidden_and_shown_again(measured: Path, tmp_path: Path) -> None:
    script = """
        function seen() {
          var all = Array.prototype.slice.call(document.querySelectorAll("[data-series]"));
          var shown = all.filter(function (each) { return getComputedStyle(each).display !== "none"; });
          var count = {};
          shown.forEach(function (each) {
            var key = each.getAttribute("data-series") + " " + each.tagName.toLowerCase();
            count[key] = (count[key] || 0) + 1;
          });
          return count;
        }
        var told = [seen()], box = document.querySelector(".filter input[value=nixl]");
        box.click(); told.push(seen());
        box.click(); told.push(seen());
        document.title = JSON.stringify(told);
    """
    whole, less, again = json.loads(Page.of(after(measured / "report.html", tmp_path, script)).title)
    assert {"nixl g", "nixl tr", "mooncake g", "mooncake tr"} <= set(whole)
    assert less == {key: count for key, count in whole.items() if not key.startswith("nixl ")}
    assert again == whole
