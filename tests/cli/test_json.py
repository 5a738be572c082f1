"""``--json``: every command that prints a table has it, and stdout is then one JSON document and no more."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import EASY, Finished, invoke, kvbench

from kvbench.cli.app import app

RECORDED = Path(__file__).parents[1] / "recorded"
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
NO_TABLE = {
    "bundle", "export", "export timeline", "hosts install", "init", "lab down", "lab exec", "lab fault",
    "lab up", "launch", "runs stop", "scenarios schema", "watch",
}  # fmt: skip
"""They start, stop or write something, print a document that is none of figures, or show what goes on."""
ELSEWHERE = ("chaos", "lab status", "report", "soak", "calibrate", "doctor selftest", "verify")
"""Other tests read their JSON: of runs that they make, as `report` writes into a run."""
RUN = str(REFERENCE / "quickstart")
DETAILED = str(RECORDED / "vllm" / "detailed.json")
COMMANDS: dict[str, tuple[str, ...]] = {
    "bench": ("quickstart", "--rate", "20", "--connector", "aggregated"),
    "compare": (RUN, RUN),
    "corpus": (str(RECORDED / "agentic" / "excerpt.jsonl.gz"),),
    "doctor": ("--gates",),
    "doctor diagnose": (str(RECORDED / "mooncake" / "initiator.log"),),
    "import": (DETAILED,),
    "microbench": ("--backend", "memcpy", "--block-size", "64k", "--seconds", "0.2"),
    "plan": ("quickstart",),
    "runs": (str(REFERENCE),),
    "runs ps": (),
    "scenarios": (),
    "simulate": ("quickstart", "--connector", "aggregated", "--rate", "5"),
    "sweep": ("quickstart", "--connector", "aggregated"),
}
STARTING = ("bench", "microbench", "sweep")
"""They start processes, so they are processes of their own."""
MADE = ("bench", "import", "microbench", "simulate", "sweep")
"""They make a run folder, and print what ``kvbench report RUN --json`` prints of it."""


def commands(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Each command with its options."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield " ".join((*before, name)), {opt for param in command.params for opt in param.opts}


def test_every_command_that_prints_a_table_has_it() -> None:
    known = dict(commands())
    assert {name for name, options in known.items() if "--json" not in options} == NO_TABLE
    assert set(known) == NO_TABLE | {*COMMANDS, *ELSEWHERE}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", STARTING)
def test_stdout_is_one_document_where_processes_are_started(name: str, tmp_path: Path) -> None:
    require_one_document(name, tmp_path, kvbench)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - set(STARTING)))
def test_stdout_is_one_document(name: str, tmp_path: Path) -> None:
    require_one_document(name, tmp_path, invoke)


def require_one_document(name: str, tmp_path: Path, run: Callable[..., Finished]) -> None:
    words = [*name.split(), *COMMANDS[name], "--json"]
    sets = EASY if name in ("bench", "simulate", "sweep") else ()
    made = name in MADE
    done = run(*words, *(("--output", str(tmp_path)) if made else ()), sets=sets)
    assert done.status == 0, done.text
    printed = json.loads(done.out)
    assert printed
    if made:
        document = printed["runs"][0]
        (folder,) = tmp_path.iterdir()
        assert document["run"] == folder.name
        assert document["rows"] or any(document["methods"].values())
        assert document in json.loads(invoke("report", str(folder), "--json").succeeded().out)["runs"]
        assert "files: " in done.err or "report (" in done.err  # people are told beside it


def test_a_run_that_is_complete_is_told_again(tmp_path: Path) -> None:
    words = ("bench", "quickstart", "--rate", "20", "--connector", "aggregated")
    assert kvbench(*words, "--output", str(tmp_path), sets=EASY).status == 0
    (folder,) = tmp_path.iterdir()
    again = kvbench("bench", "--resume", str(folder), "--json").succeeded()
    assert json.loads(again.out)["runs"][0]["run"] == folder.name
