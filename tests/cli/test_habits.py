"""What one expects of any command line: lists, `latest`, completion, examples, any locale."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from commands import invoke
from typer.testing import CliRunner

from kvbench import connectors
from kvbench.cli import runs
from kvbench.cli.app import app
from kvbench.cli.visible_console import VisibleConsole
from kvbench.core.records import Cell
from kvbench.errors import InputError
from kvbench.planning.scenario_files import bundled_names
from kvbench.results.run import OUTPUT_ENV, CellResult, find_run, is_empty, listed_runs
from kvbench.results.store import RunStore

GROUP: Any = typer.main.get_command(app)


def run_command(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvbench", *words], capture_output=True, text=True, timeout=90, check=False,
        env={**os.environ, **(env or {})}, encoding="latin-1",
    )  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, of which the last one made is not the last by name."""
    folder = tmp_path / "results"
    names = []
    for moment, name in (("01", "one"), ("03", "three"), ("02", "two")):
        with RunStore.create(folder, name, b"", {}, {}) as store:
            store.put_cell(CellResult(Cell("tcp", 128, 16), "failed", reason="it died"))
        manifest = store.path / "manifest.json"
        data = json.loads(manifest.read_text()) | {"started_at": f"2026-01-{moment}T00:00:00+00:00"}
        manifest.write_text(json.dumps(data))
        names.append(store.path.name)
    monkeypatch.setenv(OUTPUT_ENV, str(folder))
    return folder


def test_latest_is_no_run_that_has_measured_nothing(results: Path) -> None:
    for status in ("failed", "interrupted"):
        with RunStore.create(results, "empty", b"", {}, {}) as store:
            store.finish(status)  # type: ignore[arg-type]
        assert is_empty(store.path)
        assert listed_runs(results)[0].path == store.path
        assert find_run("latest").name.partition("-three-")[1]
    with RunStore.create(results, "running", b"", {}, {}) as store:
        assert find_run("latest") == store.path, "a run that has just begun can be watched"


def test_a_mistyped_name_gets_up_to_three_similar_ones(results: Path, tmp_path: Path) -> None:
    for name in ("load-a.yaml", "load-b.yaml", "load-c.yaml", "load-d.yaml"):
        (tmp_path / name).write_text("")
    for words in (("plan",), ("plan", "--trace"), ("import",), ("corpus",), ("doctor", "diagnose")):
        text = CliRunner().invoke(app, [*words, str(tmp_path / "laod-a.yaml")]).output
        assert "did you mean load-a.yaml, load-" in text, words
        assert text.count("load-") == 3
    done = CliRunner().invoke(app, ["report", "2026-three"])
    assert "there is no run 2026-three" in " ".join(done.output.replace("│", " ").split())


def test_a_run_is_found_by_path_by_latest_and_by_a_piece_of_its_name(results: Path) -> None:
    found = listed_runs(results)
    assert [run.scenario for run in found] == ["three", "two", "one"]
    assert find_run("latest") == found[0].path
    for run in found:
        assert find_run(str(run.path)) == find_run(run.path.name) == find_run(run.path.name[-6:]) == run.path
    with pytest.raises(InputError, match="3 runs match"):
        find_run(found[0].path.name[:4])
    with pytest.raises(InputError, match="no run nothing"):
        find_run("nothing")
    with pytest.raises(InputError, match="does not exist"):
        listed_runs(results / "none")


def test_there_is_no_latest_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OUTPUT_ENV, str(tmp_path))
    with pytest.raises(InputError, match="no run in"):
        find_run("latest")


def test_runs_and_scenarios_are_listed_for_people_and_programs(results: Path) -> None:
    listed = CliRunner().invoke(app, ["runs"])
    assert [name for name in ("three", "two", "one") if name in listed.stdout] == ["three", "two", "one"]
    rows = json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)
    assert [row["scenario"] for row in rows] == ["three", "two", "one"]
    names = [row["name"] for row in json.loads(CliRunner().invoke(app, ["scenarios", "--json"]).stdout)]
    assert names == list(bundled_names())
    assert (
        "quickstart  (emulated: aggregated, mooncake, nixl)" in CliRunner().invoke(app, ["scenarios"]).stdout
    )


def test_reference_runs_are_not_listed_as_the_users_and_never_latest(tmp_path: Path) -> None:
    env = {OUTPUT_ENV: str(tmp_path)}
    with RunStore.create(tmp_path / "reference", "recorded", b"", {}, {}) as store:
        store.put_cell(CellResult(Cell("tcp", 128, 16), "failed", reason="it died"))
    listed = CliRunner().invoke(app, ["runs"], env=env).stdout
    assert "no run in" in listed
    assert f"kvbench runs {tmp_path / 'reference'}" in listed
    done = CliRunner().invoke(app, ["report", "latest"], env=env)
    assert "measured anything yet" in " ".join(done.output.replace("│", " ").split())
    assert store.path.name in CliRunner().invoke(app, ["runs", str(tmp_path / "reference")]).stdout


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_width_splits_a_word_in_the_list_of_runs(
    results: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = VisibleConsole(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(runs, "console", lambda: terminal)
    runs.runs()
    shown = capsys.readouterr().out
    words = {str(run.path) for run in listed_runs(results)} | {"2026-01-03", "three", "latest"}
    assert words <= set(shown.replace("`", " ").split())


def test_latest_is_a_run_for_each_command_that_takes_one(results: Path) -> None:
    for command in ("report", "export", "export timeline", "bundle", "watch", "compare"):
        done = CliRunner().invoke(app, [*command.split(), "nothing"])
        assert done.exit_code == 2
        assert "kvbench runs" in done.output.replace("\n", " "), command
    done = CliRunner().invoke(app, ["export", "latest", "--format", "csv"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sweep qui", {"quickstart"}),
        ("plan burst", {"burst-or-sustained"}),
        ("bench --connector nix", {name for name in connectors.names() if name.startswith("nix")}),
        ("report lat", {"latest"}),
        ("sweep --resume lat", {"latest"}),
    ],
)
def test_a_shell_completes_scenarios_connectors_and_runs(
    results: Path, words: str, expected: set[str]
) -> None:
    line = f"kvbench {words}"
    done = run_command(
        env={
            "_KVBENCH_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
    )
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("name", sorted(GROUP.commands))
def test_each_command_has_an_example_and_flags_without_a_type(name: str) -> None:
    command = GROUP.commands[name]
    for below in getattr(command, "commands", {"": command}).values():
        text = (
            CliRunner().invoke(app, [name, *([below.name] if below is not command else []), "--help"]).stdout
        )
        assert "<bool>" not in text
        if below is command:
            assert "Example:" in text
            assert f"kvbench {name}" in text


def test_commands_stand_in_groups() -> None:
    text = CliRunner().invoke(app, ["--help", "--all"]).stdout
    places = [
        text.index(f"─ {title} ─") for title in ("Measure", "Prepare", "Results", "Processes and hosts")
    ]
    assert places == sorted(places)
    assert "<bool>" not in text


def test_a_narrow_terminal_cuts_no_path_of_a_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = CliRunner().invoke(app, ["runs", str(results)], env={"COLUMNS": "60", "FORCE_COLOR": "1"})
    assert shown.exit_code == 0
    assert "…" not in shown.output


@pytest.mark.parametrize("command", ["sweep", "bench", "simulate", "microbench", "init"])
def test_o_is_short_for_output(command: str) -> None:
    flags = [opt for one in typer.main.get_command(app).commands[command].params for opt in one.opts]  # type: ignore[attr-defined]
    assert ("-o" in flags) == ("--output" in flags)


def test_the_environment_names_the_folder_for_runs(tmp_path: Path) -> None:
    done = invoke(
        *("simulate", "quickstart", "--rate", "5", "--connector", "nixl", "--set", "workload.input_len=64"),
        env={OUTPUT_ENV: str(tmp_path / "mine")},
    )
    assert len(list((tmp_path / "mine").iterdir())) == 1, done.err


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.heavy),
        pytest.param({"PYTHONIOENCODING": "latin-1"}, marks=pytest.mark.heavy),
    ],
)
def test_any_locale_will_do(env: dict[str, str]) -> None:
    for words in (("plan", "quickstart"), ("--help",), ("doctor",), ("scenarios",)):
        done = run_command(*words, env=env)
        assert "Unicode" not in done.stderr
        assert "nobody foresaw" not in done.stderr
        assert done.returncode in (0, 1, 2)
    assert "<= 150 ms" in run_command("plan", "quickstart", env=env).stdout
