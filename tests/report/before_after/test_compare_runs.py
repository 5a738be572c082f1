"""``kvbench compare`` of a run before and one after: what differs, what became of each rate, the verdict."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from run_files import QUICKSTART
from sample_run import make_run

from kvbench.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_WORSE, InputError
from kvbench.report import compare
from kvbench.report.before_after import cell_changes, setting_changes
from kvbench.report.ci_verdict import share_of
from kvbench.report.compare import CompareOptions
from kvbench.results.run import RunFolder, load_run

REFERENCE = Path(__file__).parents[3] / "results" / "reference"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of the quickstart run with other answers, plan, environment or manifest."""

    def copy(name: str, factor: float = 1.0, **changes: Callable[[dict[str, Any]], object]) -> Path:
        path = tmp_path / name
        path.mkdir()
        for file in ("manifest.json", "plan.json", "environment.json", "scenario.yaml", "trials.jsonl"):
            shutil.copy(QUICKSTART / file, path)
        cells = [json.loads(line) for line in (QUICKSTART / "cells.jsonl").read_text().splitlines()]
        for cell in cells:
            answer = cell["answer"]
            for key in ("max_request_rate", "lower", "upper"):
                answer[key] *= factor
            answer["posterior"] = [rate * factor for rate in answer["posterior"]]
        (path / "cells.jsonl").write_text("".join(f"{json.dumps(cell)}\n" for cell in cells))
        for file, change in changes.items():
            data = json.loads((path / f"{file}.json").read_text())
            change(data)
            (path / f"{file}.json").write_text(json.dumps(data))
        return path

    return copy


def printed(paths: Sequence[Path], **options: Any) -> tuple[int, str]:
    out = io.StringIO()
    code = compare.command(paths, CompareOptions(**options), Console(file=out, width=160))
    return code, out.getvalue()


def runs(*paths: Path) -> list[RunFolder]:
    return [load_run(path) for path in paths]


# --- what differs ----------------------------------------------------------------------------------
def test_copies_differ_in_nothing_and_each_cell_is_unchanged_once(copied: Callable[..., Path]) -> None:
    code, text = printed([QUICKSTART, copied("again")])
    assert code == EXIT_OK
    assert re.search(r"What was set otherwise\n\s*• nothing\n", text)
    assert text.count("unchanged: the same trials") == 6
    assert "6 cells: 6 unchanged" in text


def test_only_what_differs_is_shown_and_no_machine_refuses(copied: Callable[..., Path]) -> None:
    def elsewhere(environment: dict[str, Any]) -> None:
        environment |= {"hostname": "other-host", "kernel": "7.0"}
        environment["libraries"]["nixl-cu12"] = "9.9"

    def later(manifest: dict[str, Any]) -> None:
        manifest |= {"hosts": ["other-host"], "seed": 7, "git": {"commit": "f" * 40, "dirty": True}}

    def set_otherwise(plan: dict[str, Any]) -> None:
        plan["scenario"]["search"]["trial_s"] = 30.0
        plan["scenario"]["load"]["mode"] = "direct"
        plan["scenario"]["connectors"][1]["num_workers"] = 4
        del plan["scenario"]["simulate"]

    other = copied("b", environment=elsewhere, manifest=later, plan=set_otherwise)
    found = {
        change.name: (change.before, change.after)
        for change in setting_changes(*([run] for run in runs(QUICKSTART, other)))
    }
    assert (found.pop("commit")[1], found.pop("host")[1]) == ("ffffffffffff with changes", "other-host")
    assert (found.pop("kernel")[1], found.pop("nixl-cu12")[1]) == ("7.0", "9.9")
    assert found == {
        "seed": ("1", "7"),
        "search.trial_s": ("8", "30"),
        "load.mode": ("router", "direct"),
        "mooncake.num_workers": ("2", "4"),
    }
    code, text = printed([QUICKSTART, other])
    assert code == EXIT_OK
    assert "mooncake.num_workers: 2 → 4" in text


def test_what_an_older_run_does_not_know_it_had_by_default(copied: Callable[..., Path]) -> None:
    def older(plan: dict[str, Any]) -> None:
        scenario = plan["scenario"]
        del scenario["load"], scenario["search"]["compare_burst"], scenario["deployment"]["router_processes"]
        del scenario["deployment"]["engine_options"]["lie"], scenario["connectors"][2]["num_threads"]

    old = copied("old", plan=older)
    assert setting_changes(runs(old), runs(QUICKSTART)) == []

    def otherwise(plan: dict[str, Any]) -> None:
        plan["scenario"]["deployment"]["router_processes"] = 3

    (change,) = setting_changes(runs(old), runs(copied("new", plan=otherwise)))
    assert change.text() == "deployment.router_processes: 1 → 3"


@pytest.mark.parametrize(("name", "change"), [
    ("model", lambda plan: plan["scenario"]["model"].update(name="other")),
    ("SLO", lambda plan: plan["scenario"]["slo"].update(ttft_ms=900.0)),
    ("workload.burstiness", lambda plan: plan["scenario"]["workload"].update(burstiness=0.5)),
])  # fmt: skip
def test_another_model_or_workload_needs_force_and_is_marked(
    name: str, change: Callable[[dict[str, Any]], object], copied: Callable[..., Path]
) -> None:
    other = copied("b", plan=change)
    with pytest.raises(InputError, match=rf"differ in {name}: .*--force|differ in {name}"):
        printed([QUICKSTART, other])
    for output_format in ("terminal", "md", "latex"):
        assert "NOT COMPARABLE" in printed([QUICKSTART, other], force=True, format=output_format)[1]


# --- what became of it -----------------------------------------------------------------------------
@pytest.mark.parametrize(("factor", "became"), [(0.5, "worse"), (2.0, "better"), (0.97, "inconclusive")])
def test_each_rate_is_told_before_to_after(factor: float, became: str, copied: Callable[..., Path]) -> None:
    found = cell_changes(*([run] for run in runs(QUICKSTART, copied("b", factor))))
    assert [cell.became for cell in found] == [became] * 6
    for cell in found:
        assert cell.change.ratio == pytest.approx(factor)
    _, text = printed([QUICKSTART, copied("c", factor)])
    assert text.count(became) >= 6


def test_a_cell_of_one_run_only_is_said_to_be_that(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", ("mooncake", "nixl"), (512,))
    after = make_run(tmp_path / "b", ("nixl",), (512, 1024))
    words = {
        change.place(): change.words() for change in cell_changes(*([run] for run in runs(before, after)))
    }
    assert words["mooncake, 512 in, 16 out"] == "inconclusive: not measured after"
    assert words["nixl, 1,024 in, 16 out"] == "inconclusive: not measured before"
    code, text = printed([before, after], ci=True)
    assert code == EXIT_WORSE
    assert "mooncake, 512 in, 16 out: was measured before, and is not now" in text


def test_every_format_has_every_cell(copied: Callable[..., Path]) -> None:
    paths = [QUICKSTART, copied("b", 0.5)]
    data = json.loads(printed(paths, format="json")[1])
    assert ([cell["became"] for cell in data["cells"]], data["settings"]) == (["worse"] * 6, [])
    assert len(printed(paths, format="csv")[1].splitlines()) == 7
    assert printed(paths, format="md")[1].count("| worse |") == 6
    assert printed(paths, format="latex")[1].count("& worse") == 6


def test_the_number_of_runs_before_has_to_fit(copied: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="leaves none after"):
        printed([QUICKSTART, copied("b")], before=2)
    with pytest.raises(InputError, match="have no search"):
        printed([REFERENCE / "seed-notes"] * 2, ci=True)


# --- for a pipeline --------------------------------------------------------------------------------
def test_a_loss_ends_with_an_exit_code_and_a_line(copied: Callable[..., Path], tmp_path: Path) -> None:
    files = {"junit": tmp_path / "j.xml", "comment": tmp_path / "c.md"}
    code, text = printed([QUICKSTART, copied("b", 0.3)], ci=True, **files)
    assert code == EXIT_WORSE
    first, second = text.splitlines()
    assert first.startswith("WORSE: 6 of 6 cells worse by more than 5%: aggregated, 256 in, 16 out: ")
    assert second.startswith("false alarms: at most 5%")
    suite = ElementTree.parse(files["junit"]).getroot()[0]
    assert suite.get("failures") == "6"
    assert all(case.find("failure") is not None for case in suite.iter("testcase"))
    comment = files["comment"].read_text()
    assert comment.startswith("**WORSE: 6 of 6 cells")
    assert comment.count("| worse |") == 6


def test_a_run_beside_itself_is_ok() -> None:
    code, text = printed([QUICKSTART, QUICKSTART], ci=True)
    assert code == EXIT_OK
    assert text.startswith("ok: no cell is significantly worse by more than 5% (6 cells: 6 unchanged)\n")


def test_a_run_beside_itself_is_ok_where_a_cell_has_no_rate(copied: Callable[..., Path]) -> None:
    path = copied("a")
    first, *others = (path / "cells.jsonl").read_text().splitlines()
    cell = json.loads(first)
    cell["answer"] |= {"max_request_rate": None, "lower": None, "upper": None, "posterior": []}
    (path / "cells.jsonl").write_text("\n".join([json.dumps(cell), *others, ""]))
    code, text = printed([path, path], ci=True)
    assert code == EXIT_OK
    assert "(6 cells: 6 unchanged)" in text
    other = copied("b", manifest=lambda manifest: manifest.update(run_id="another"))
    shutil.copy(path / "cells.jsonl", other)
    assert printed([path, other], ci=True)[0] == EXIT_INCONCLUSIVE


def test_a_possible_loss_is_inconclusive_with_its_power(copied: Callable[..., Path], tmp_path: Path) -> None:
    paths = [QUICKSTART, copied("b", 0.97)]
    code, text = printed(paths, ci=True, junit=tmp_path / "j.xml")
    assert code == EXIT_INCONCLUSIVE
    assert text.startswith("inconclusive: a cell may be worse by more than 5%: ")
    assert re.search(r"6 inconclusive\); the smallest loss that it could have detected is \d+%\n", text)
    assert re.search(r"no loss below \d+%; from five runs on", text)
    assert ElementTree.parse(tmp_path / "j.xml").getroot()[0].get("skipped") == "6"
    # Without --ci a loss is told, and no failure.
    assert printed([QUICKSTART, copied("c", 0.5)])[0] == EXIT_OK


def test_repeats_say_how_many_more_a_smaller_loss_would_need(copied: Callable[..., Path]) -> None:
    before = [copied(f"a{place}", factor) for place, factor in enumerate((1.0, 1.01, 0.99, 1.005))]
    code, text = printed([*before, copied("b", 0.9)], before=4, ci=True)
    assert code == EXIT_WORSE
    assert re.search(r"a loss of 10% is seen in \d+ of 100 comparisons like this", text)
    assert re.search(r"in 80 of 100 \d+ runs on each side show it, \d+ a loss of 5%", text)
    table = printed([*before, copied("c", 0.9)], before=4)[1]
    assert "(4 runs)" in table
    assert table.count("worse") >= 6


def test_the_rate_shown_is_that_of_the_searches_compared(copied: Callable[..., Path]) -> None:
    odd = copied("odd", 3.0)
    cells = [json.loads(line) for line in (odd / "cells.jsonl").read_text().splitlines()]
    for cell in cells:
        cell["answer"]["status"] = "exhausted"
    (odd / "cells.jsonl").write_text("".join(f"{json.dumps(cell)}\n" for cell in cells))
    paths = [copied("a"), odd, copied("b", 0.5)]
    table = printed(paths, before=2)[1]
    assert "(1 of 2 runs)" in table
    for change in cell_changes(runs(*paths[:2]), runs(paths[2])):
        flat = change.flat()
        assert flat["after"] / flat["before"] == pytest.approx(flat["ratio"])


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("5 %", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_a_share_is_read_as_it_is_written(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["five", "100%", "-1%", "5", "nan"])
def test_no_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--worse-than"):
        share_of(text)
