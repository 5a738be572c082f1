"""docs/promises.md: each promise names tests that exist; and the tests that are not about something else."""

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import kvbench
from kvbench import api, errors
from kvbench.cli import app
from kvbench.core.records import SCHEMA_VERSION
from kvbench.core.scenario.scenario import scenario_schema
from kvbench.planning.scenario_files import registry
from kvbench.report.tables.result import summary_table
from kvbench.results.run import FIRST_SCHEMA, load_run
from tests.repository.test_security_source import SOURCES, tree_of
from tools.audit import EXIT_CLEAN, EXIT_FOUND, EXIT_NOT_RUN, audit, say

ROOT = Path(__file__).parents[2]
PROMISES = (ROOT / "docs" / "promises.md").read_text()
RECORDED = Path(__file__).parents[1] / "recorded"
ROWS = [
    line.strip("|").rsplit("|", 1)
    for line in PROMISES.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| promise |"))
]
NAMED = re.compile(r"`(tests/[\w/]+/test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize(("promise", "proof"), ROWS, ids=[row[0].strip()[:40] for row in ROWS])
def test_each_promise_is_proved_by_tests_that_exist(promise: str, proof: str) -> None:
    named = NAMED.findall(proof)
    assert named, f"no test proves: {promise}"
    assert not proof.replace(",", " ").replace("`", " ").split()[len(named) :], "what is no test"
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {
            node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        assert test in functions, f"{file} has no {test}"


def test_the_readme_leads_to_the_promises() -> None:
    assert len(ROWS) >= 15
    assert "docs/promises.md" in (ROOT / "README.md").read_text()


# Files
@pytest.mark.parametrize("schema", range(FIRST_SCHEMA, SCHEMA_VERSION + 1))
def test_a_recorded_folder_of_every_schema_reads_as_it_was_written(schema: int) -> None:
    """``recorded/runs/schema-N``: a folder as a release with that schema wrote it. Never written anew."""
    folder = RECORDED / "runs" / f"schema-{schema}"
    run = load_run(folder)
    assert (run.schema, run.warnings, run.manifest["status"]) == (schema, [], "complete")
    (cell,) = run.cells
    (row,) = summary_table(run)
    assert (cell.cell.connector, cell.cell.input_len, cell.cell.output_len) == ("nixl", 512, 16)
    written = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert [trial.request_rate for trial in run.trials] == [record["request_rate"] for record in written]
    assert row.answer.text() != ""
    first = run.trials[0].trial_id
    assert len(run.requests(first)) == len(run.request_records(first)) == 120


# Commands, scenarios, Python
def offered() -> dict[str, Any]:
    """What this kvbench offers, in the shape of ``recorded/promised/VERSION.json``."""
    commands: dict[str, list[str]] = {}
    group: Any = typer.main.get_command(app.app)
    for name, command in group.commands.items():
        for below, subcommand in getattr(command, "commands", {"": command}).items():
            commands[f"{name} {below}".strip()] = [word for one in subcommand.params for word in one.opts]
    commands |= {old: commands[new] for old, new in app.RENAMED.items()}
    schema = scenario_schema(registry())
    return {
        "commands": commands,
        "scenario": _keys(schema, schema, ""),
        "exit_codes": {
            name: value
            for name, value in vars(errors).items()
            if isinstance(value, int) and name.startswith("EXIT_")
        },
        "python": list(api.__all__),
    }


def _keys(schema: Any, whole: Any, at: str) -> list[str]:
    found = []
    for name, value in schema.get("properties", {}).items():
        found.append(f"{at}{name}")
        for part in (value, *value.get("allOf", ()), *value.get("anyOf", ())):
            if at.count(".") < 2:
                reference = part.get("$ref", "").rpartition("/")[2]
                inside = whole["$defs"][reference] if reference else part
                found += _keys(inside, whole, f"{at}{name}.")
    return found


@pytest.mark.parametrize("path", sorted((RECORDED / "promised").glob("*.json")), ids=lambda path: path.stem)
def test_what_was_promised_is_still_there(path: Path) -> None:
    """``recorded/promised/VERSION.json``: what that release offered. One more file with each release."""
    promised, now = json.loads(path.read_text()), offered()
    for command, options in promised["commands"].items():
        assert set(options) <= set(now["commands"].get(command, ())), command
    assert set(promised["scenario"]) <= set(now["scenario"])
    assert set(promised["python"]) <= set(now["python"])
    assert promised["exit_codes"].items() <= now["exit_codes"].items()


def test_the_release_that_this_is_has_its_promises_written_down() -> None:
    assert (RECORDED / "promised" / f"{kvbench.__version__}.json").is_file()


SECTIONS = ("search", "slo", "workload", "deployment", "load", "model", "simulate")
KEY = re.compile(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
COMMAND = re.compile(r"`kvbench ([a-z]+)")
NO_KEYS = {"slo.py", "simulate.md", "simulate.py", "model.safetensors", "model.safetensors.index.json"}


@cache
def texts() -> list[tuple[Path, str]]:
    """Every text in a module, and where."""
    return [
        (path, node.value)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def named_in_texts(pattern: re.Pattern[str]) -> dict[str, str]:
    """What kvbench's own texts name → a module that does."""
    return {name: path.name for path, text in texts() for name in pattern.findall(text)}


def test_every_key_and_command_that_a_text_names_is_there() -> None:
    """Advice that names what does not exist is worse than none."""
    now = offered()
    keys, commands = named_in_texts(KEY), named_in_texts(COMMAND)
    assert {"search.precision", "load.mode"} <= set(keys)
    assert {"doctor", "report"} <= set(commands)
    options = {
        f"deployment.engine_options.{option}"
        for engine in registry().engines.values()
        for option in engine.model_fields
    }
    real = options | {*now["scenario"], *NO_KEYS}
    assert {key: where for key, where in keys.items() if key not in real} == {}
    known = {command.partition(" ")[0] for command in now["commands"]} - app.RENAMED.keys()
    assert {name: where for name, where in commands.items() if name not in known} == {}


def test_the_package_offers_what_its_interface_lists() -> None:
    for name in api.__all__:
        assert getattr(api, name) is not None
    assert set(api.__all__) - {"Plots"} <= set(dir(kvbench))


# Safety
TALKS = re.compile(r"https?://([A-Za-z0-9.-]+\.[a-z]{2,})")
NAMES_ONLY = {"www.w3.org", "json-schema.org", "github.com", "docs.vllm.ai", "semver.org", "arxiv.org"}
"""Names of formats and pages that a text leads to; nothing is asked there."""


def test_no_module_names_a_place_of_the_network_to_send_to() -> None:
    inside = [(path.name, text) for path, text in texts() if path.is_relative_to(ROOT / "kvbench")]
    found = {(name, host) for name, text in inside for host in TALKS.findall(text)}
    assert {(name, host) for name, host in found if host not in NAMES_ONLY} == set()


def names_of(requirements: list[str]) -> set[str]:
    return {
        re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        for requirement in requirements
    }


def test_every_runtime_dependency_is_pinned() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    assert all(re.match(r"[A-Za-z0-9._-]+==[^*]+$", pin.split(";")[0].strip()) for pin in pins)
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    assert names_of(wanted) - names_of(pins) == set()


def test_an_audit_that_did_not_run_is_not_taken_for_a_clean_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = {"name": "numpy", "version": "2.2.6", "vulns": []}
    weak = {"name": "left-pad", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
    unknown = {"name": "rich", "skip_reason": "not found: rich"}
    assert say({"dependencies": [clean]}) == EXIT_CLEAN
    assert say({"dependencies": [clean, weak, unknown]}) == EXIT_FOUND
    assert "left-pad 1: CVE-1, fixed in 2" in capsys.readouterr().out
    assert say({"dependencies": [clean, unknown]}) == EXIT_NOT_RUN
    assert say({}) == say([]) == EXIT_NOT_RUN
    pinned = tmp_path / "constraints.txt"
    assert audit([str(tmp_path / "no-such-program")], pinned) == EXIT_NOT_RUN
    assert audit([sys.executable, "-c", "raise SystemExit('nobody answers')"], pinned) == EXIT_NOT_RUN
    printed = capsys.readouterr().err
    assert "not run here: pip-audit ended with status" in printed
    assert "nobody answers" in printed
