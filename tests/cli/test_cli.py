"""The command line: help, bad input, plan, schema, doctor."""

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, kvbench

from kvbench.cli.app import _COMMANDS, FIRST, RENAMED
from kvbench.core.units import duration_text
from kvbench.planning.options import CliOptions, Sets, declared
from kvbench.planning.overrides import resolve


def test_help_begins_with_three_examples_and_nine_commands() -> None:
    done = invoke("--help").succeeded()
    begin = [line.strip() for line in done.out.splitlines() if line.strip().startswith("kvbench ")]
    assert [line.split()[1] for line in begin] == ["sweep", "init", "bench"]
    assert re.findall(r"(?m)^. ([a-z]+(?: [a-z]+)?)  +[A-Z]", done.out) == [*FIRST]
    every = invoke("--help", "--all").out
    assert re.findall(r"(?m)^. ([a-z]+(?: [a-z]+)?)  +[A-Z]", every) == [*_COMMANDS, "lab", "hosts"]


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_works_and_names_the_new_one(old: str, new: str) -> None:
    done = invoke(old, "--help").succeeded(f"Usage: kvbench {new} ")
    assert done.err == f"kvbench {old} is now: kvbench {new}\n"
    assert invoke(*new.split(), "--help").err == ""


@pytest.mark.parametrize("command", FIRST)
def test_each_command_has_help_and_few_options(command: str) -> None:
    done = invoke(command, "--help").succeeded()
    # About ten, and --help; sweep and bench have more, in panels: load, SLO, method; what resumes a run; a
    # collector. bench takes another run's loads, too.
    assert done.out.count(" --") <= {"sweep": 36, "bench": 36, "plan": 34}.get(command, 13)


def test_every_option_that_sets_one_value_sets_it() -> None:
    given = {"input_len": "64,128", "endpoint": "chat", "rates": "1,2", "direct": True}
    given |= {"output_len": 8, "ttft_ms": 90.0, "tpot_ms": 9.0, "attainment": 0.8, "precision": 0.07}
    given |= {"max_trials": 5, "budget_s": 300.0, "seed": 3, "workers": 2, "duration_s": 4.0}
    setting = {name: note for name, declared in declared().items() for note in declared if type(note) is Sets}
    assert setting.keys() - {"time_scale", "api_key_env"} == given.keys()
    scenario, _ = resolve(CliOptions("quickstart", ("search.method=fixed",), **given))
    expected: dict[str, Any] = given | {"input_len": (64, 128), "rates": (1.0, 2.0), "direct": "direct"}
    for name, value in expected.items():
        assert attrgetter(setting[name].path)(scenario) == value, name


def test_a_mistake_names_the_option_that_was_typed(tmp_path: Path) -> None:
    typed = ("--input-len", "1e3", "--ttft-ms", "-1", "--set", "search.max_trials=0", "--rates", "4,x")
    message = invoke("plan", "quickstart", *typed).err
    assert "--input-len 1e3: must be a whole number, not 1000.0\n" in message
    assert "--ttft-ms -1.0: must be more than 0" in message
    assert "--rates 4,x: must be a number" in message
    assert "--set search.max_trials: search.max_trials must be at least 1" in message
    assert "workload.input_len" not in message


def test_a_sweep_takes_precision_trials_and_seed_as_options() -> None:
    chosen = ("--precision", "0.2", "--max-trials", "7", "--seed", "5", "--connector", "nixl")
    plan = json.loads(invoke("plan", "quickstart", *chosen, "--json").out)["scenario"]
    assert (plan["search"]["precision"], plan["search"]["max_trials"], plan["seed"]) == (0.2, 7, 5)


def test_a_budget_shows_in_the_plan() -> None:
    printed = invoke("plan", "quickstart", "--budget", "60").out
    cells = int(re.findall(r"of trials for each of (\d+) cells", printed)[0])
    assert f"budget: {duration_text(60 / cells)} of trials for each" in printed
    assert re.search(r"  trials +about 60 s\n", printed)


def test_bench_does_not_offer_what_only_a_search_has() -> None:
    assert " --method " in invoke("sweep", "--help").out
    invoke("bench", "quickstart", "--rate", "1", "--method", "burst").failed(2, "No such option")


def test_version() -> None:
    assert kvbench("--version").out.startswith("kvbench 0.")


def test_all_mistakes_of_a_scenario_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nmodel: tiny\nconnectors: [agregated]\n"
        "workload: {input_len: 0, output_len: 4}\nslo: {tftt_ms: 100}\n"
    )
    done = invoke("sweep", str(path), "--output", str(tmp_path / "results")).failed(2, f"{path}:3: ")
    assert "aggregated" in done.err
    assert f"{path}:4: " in done.err
    assert f"{path}:5: " in done.err
    assert "ttft_ms" in done.err
    assert not (tmp_path / "results").exists()
    assert "Traceback" not in done.text


def test_an_unknown_scenario_names_the_nearest() -> None:
    invoke("plan", "quickstrt").failed(2, "did you mean quickstart")


def test_plan_starts_nothing_and_prints_ports_and_time() -> None:
    done = invoke("plan", "quickstart")
    assert done.status == (2 if "cannot start: " in done.out else 0)  # another program may have a port
    assert "21000" in done.out
    assert re.search(r"estimated time: [1-9]\d? to [1-9]\d? min\n", done.out)
    assert "nothing was started" in done.out


def test_plan_as_json_has_every_process() -> None:
    plan = json.loads(invoke("plan", "quickstart", "--json", "--connector", "mooncake").out)
    names = [process["name"] for process in plan["processes"]["mooncake"]]
    assert names == ["prefill-0", "decode-0", "router"]
    assert plan["processes"]["mooncake"][0]["env"]["MC_FORCE_TCP"] == "1"
    assert plan["reference"] == "reference"


def test_schema_is_json_schema() -> None:
    schema = json.loads(invoke("schema").out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "slo" in schema["properties"]


def test_report_of_no_run_folder(tmp_path: Path) -> None:
    invoke("report", str(tmp_path)).failed(1, "is not a run folder")


def test_doctor_names_every_connector() -> None:
    done = invoke("doctor")
    assert done.status in (0, 1)
    for name in ("mooncake", "nixl", "tcp"):
        assert f"connector {name}" in done.out


def test_wrong_options_are_exit_2() -> None:
    assert invoke("bench", "quickstart").status == 2
    assert invoke("bench", "quickstart", "--rate", "-1").status == 2
    assert invoke("sweep", "quickstart", "--connector", "moonkake").status == 2
    assert invoke("plan", "quickstart", "--set", "slo.ttft=1").status == 2
