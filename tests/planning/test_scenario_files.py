"""Scenario files on disk, and the bundled ones."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench import connectors, engines
from kvbench.core.plan.plan import make_plan
from kvbench.core.scenario.scenario import scenario_schema
from kvbench.errors import InputError, ScenarioError
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import bundled_names, find_scenario, load_scenario, registry

GOOD = b"""\
version: 1
model: tiny
connectors: [tcp]
workload: {input_len: 64, output_len: 4}
slo: {ttft_ms: 250}
"""


def test_bundled_names() -> None:
    assert {"quickstart", "qwen3-30b-a3b-emulated", "xpyd"} <= set(bundled_names())


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_scenarios_are_right(name: str) -> None:
    scenario, data = load_scenario(name)
    assert scenario.name == name
    assert data == find_scenario(name)[0]
    assert scenario.description
    assert make_plan(scenario, {label: connectors.get(label) for label in connectors.names()}).cells


def test_quickstart_is_quick() -> None:
    scenario, _ = load_scenario("quickstart")
    plan = make_plan(scenario, {name: connectors.get(name) for name in connectors.names()})
    assert plan.upper_s <= 11 * 60  # most cells end long before
    assert len(scenario.workload.input_len) >= 2
    assert {connector.name for connector in scenario.connectors} == {"aggregated", "mooncake", "nixl"}


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_scenarios_use_only_keys_of_the_schema(name: str) -> None:
    schema = scenario_schema(registry())
    data = yaml.safe_load(find_scenario(name)[0])

    def known(value: Any, place: dict[str, Any]) -> None:
        place = schema["$defs"][place["$ref"].removeprefix("#/$defs/")] if "$ref" in place else place
        for key, inner in value.items() if isinstance(value, dict) else ():
            if "properties" in place:
                known(inner, place["properties"][key])

    known(data, schema)
    engine = data["deployment"].get("engine", "emulated")
    known(data["deployment"].get("engine_options", {}), schema["$defs"][f"engine.{engine}"])


def test_a_plan_imports_only_the_connectors_and_the_engine_of_its_scenario(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = set[str]()
    for package in (connectors, engines):

        def get(name: str, found: Any = package.get) -> Any:
            looked_up.add(name)
            return found(name)

        monkeypatch.setattr(package, "get", get)
    scenario, _ = load_scenario("quickstart")
    plan_of(scenario)
    assert looked_up == {"aggregated", "mooncake", "nixl", "emulated"}
    assert list(registry().connectors) == list(connectors.names())
    assert "vllm" in registry().engines
    assert registry().engines.get("none") is None


def test_the_registry_describes_every_option() -> None:
    known = registry()
    assert {"aggregated", "mooncake", "nixl", "tcp"} <= set(known.connectors)
    for model in (*known.connectors.values(), *known.engines.values()):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_a_path_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_scenario("quickstart.yaml")[1] != "quickstart.yaml"
    (tmp_path / "quickstart.yaml").write_bytes(GOOD)
    assert find_scenario("quickstart.yaml") == (GOOD, "quickstart.yaml")
    assert find_scenario("./quickstart.yaml")[0] == GOOD
    assert find_scenario("quickstart")[0] != GOOD


def test_overrides_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    scenario, data = load_scenario(str(path), ["slo.ttft_ms=7"])
    assert (scenario.name, scenario.slo.ttft_ms) == ("mine", 7)
    assert data == path.read_bytes()


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown scenario 'quikstart'.*did you mean quickstart\?.*xpyd"):
        find_scenario("quikstart")
    with pytest.raises(InputError, match="there is no file"):
        find_scenario(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="is a folder"):
        find_scenario(f"{tmp_path}/")
    for odd in ("", "a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(InputError):
            find_scenario(odd)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="special file"):
        find_scenario(str(tmp_path / "pipe.yaml"))


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="too long for a scenario"):
        find_scenario(str(path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(GOOD + b"description: caf\xe9\n")
    with pytest.raises(ScenarioError, match=r"latin\.yaml:6: is not UTF-8 text: byte 0xe9"):
        load_scenario(str(path))
