"""The scenario file: what it may say, and how its mistakes are told."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from kvbench.core.physics import MODELS
from kvbench.core.scenario import yaml_lines
from kvbench.core.scenario.options import ConnectorOptions, EngineOptions
from kvbench.core.scenario.overrides import merged, typed_overrides
from kvbench.core.scenario.scenario import Registry, Scenario, parse_scenario, read_scenario, scenario_schema
from kvbench.core.scenario.yaml_lines import MAX_CHARS
from kvbench.errors import EXIT_BAD_INPUT, ScenarioError


class Push(ConnectorOptions):
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="transport")
    workers: int = Field(2, ge=1, le=64, description="threads")
    nics: tuple[str, ...] = Field((), description="network interfaces")


class Emulated(EngineOptions):
    timing: str = Field("quick", description="profile")
    time_scale: float = Field(1.0, gt=0, description="factor")
    max_model_len: int | None = Field(None, description="longest request")


class Remote(EngineOptions):
    base_url: str = Field(description="where it answers")


REGISTRY = Registry(
    connectors={"aggregated": ConnectorOptions, "push": Push, "pull": ConnectorOptions},
    engines={"emulated": Emulated, "remote": Remote},
)

MINIMAL = """\
version: 1
model: tiny
connectors: [aggregated, push]
workload: {input_len: 64, output_len: 4}
slo: {ttft_ms: 250}
"""


def parse(text: str, *overrides: str, path: str = "mine.yaml") -> Scenario:
    return parse_scenario(text, path, REGISTRY, overrides)


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse(text, *overrides)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return caught.value.message.split("\n")


# ---------------------------------------------------------------- values
def test_defaults() -> None:
    scenario = parse(MINIMAL, path="folder/my first.yaml")
    assert (scenario.name, scenario.seed, scenario.deployment.base_port) == ("my-first", 0, 21000)
    assert scenario.deployment.engine_options == Emulated()
    assert (scenario.workload.input_len, scenario.slo.tpot_ms) == ((64,), None)
    assert (scenario.load.workers, scenario.load.mode) == ("auto", "router")
    assert scenario.search.start_rate is None
    assert [connector.label for connector in scenario.connectors] == ["aggregated", "push"]
    assert scenario.connector_options("push") == Push()
    assert (scenario.model.shape, scenario.model.served_model_name) == (MODELS["tiny"], "tiny")


def test_connectors_with_options_and_labels() -> None:
    text = MINIMAL.replace(
        "[aggregated, push]", "[push, {name: push, label: push-4, workers: 4, nics: [eth0, eth1]}]"
    )
    scenario = parse(text)
    assert [(connector.name, connector.label) for connector in scenario.connectors] == [
        ("push", "push"),
        ("push", "push-4"),
    ]
    assert scenario.connector_options("push-4") == Push(workers=4, nics=("eth0", "eth1"))


@pytest.mark.parametrize(("model", "kv_dtype", "layers", "served"), [
    ("{preset: tiny, kv_dtype: fp16}", "fp16", 4, "tiny"),
    ("{preset: qwen3-8b, served_model_name: Qwen/Qwen3-8B}", "bf16", 36, "Qwen/Qwen3-8B"),
    ("{name: mine, layers: 3, kv_heads: 2, head_dim: 8}", "bf16", 3, "mine"),
    ("{name: latent, layers: 2, mla_dim: 576, vocab_size: 1000}", "bf16", 2, "latent"),
])  # fmt: skip
def test_models(model: str, kv_dtype: str, layers: int, served: str) -> None:
    choice = parse(MINIMAL.replace("tiny", model)).model
    assert (choice.shape.kv_dtype, choice.shape.layers, choice.served_model_name) == (
        kv_dtype,
        layers,
        served,
    )


def test_values_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(MINIMAL).seed = 3  # type: ignore[misc]


def test_resolved_is_itself_a_scenario() -> None:
    scenario = parse(MINIMAL, "model.kv_dtype=fp32", "connectors.push.nics=[a]", "search.start_rate=3")
    again = parse(json.dumps(scenario.resolved()))
    assert again == scenario
    assert again.resolved() == scenario.resolved()


def test_scalars_are_read_as_yaml_1_2() -> None:
    text = MINIMAL.replace("250", "2.5e2") + "description: 'on'\nseed: 12\nsearch: {start_rate: null}\n"
    scenario = parse(text)
    assert (scenario.slo.ttft_ms, scenario.description, scenario.seed) == (250.0, "on", 12)


def test_a_few_aliases_are_fine() -> None:
    text = MINIMAL.replace("[aggregated, push]", "\n- &p {name: push}\n- {name: pull, label: q}\n")
    text = text.replace("input_len: 64", "input_len: &n 64").replace("output_len: 4", "output_len: *n")
    assert parse(text).workload.output_len == 64


# ---------------------------------------------------------------- mistakes
MANY = """\
version: 1
modle: tiny
model: tinny
deployment:
  engine: emulated
  prefil: 2
  base_port: 80
  engine_options: {time_scal: 1}
connectors:
  - push
  - {name: push, workrs: 3}
  - name: push
    label: other
    protocol: tpc
  - pul
workload:
  input_len: [256, 256, 0, on]
  output_len: "16"
  output_len: 3
slo:
  attainment: 2
ttft_ms: 5
search: {min_rate: 010, start_rate: 50000, trial_s: -1}
seed: 1.5
"""


def test_all_mistakes_at_once_with_their_lines() -> None:
    found = mistakes(MANY)
    assert found == [
        "mine.yaml:2: unknown key `modle`; did you mean `model`?",
        "mine.yaml:3: model.preset: no model preset is called `tinny`; did you mean `tiny`?",
        "mine.yaml:6: unknown key `prefil` in deployment; did you mean `prefill`?",
        "mine.yaml:7: deployment.base_port: must be 0, or 1024 to 65535, not 80: "
        "lower ports belong to the system",
        "mine.yaml:8: unknown key `time_scal` in deployment.engine_options; did you mean `time_scale`?",
        "mine.yaml:11: unknown key `workrs` in connectors.1; did you mean `workers`?",
        "mine.yaml:11: the label `push` is taken by connectors.0; give one a `label:` of its own",
        "mine.yaml:14: connectors.2.protocol must be 'tcp' or 'rdma', not 'tpc'; did you mean `tcp`?",
        "mine.yaml:15: connectors.3.name: no connector is called `pul`; did you mean `pull`?",
        "mine.yaml:17: `on` is true or false for some YAML readers and text for others; "
        "write true or false, or quote it",
        "mine.yaml:17: workload.input_len.2 must be at least 1, not 0",
        "mine.yaml:17: the input length 256 is given twice",
        "mine.yaml:18: workload.output_len must be a whole number, not '16'",
        "mine.yaml:19: the key `output_len` is given twice, first on line 18",
        "mine.yaml:20: slo needs a limit: ttft_ms, tpot_ms, or both",
        "mine.yaml:21: slo.attainment must be less than 1, not 2",
        "mine.yaml:22: unknown key `ttft_ms`; `ttft_ms` belongs under `slo`",
        "mine.yaml:23: `010` has a leading zero, which some YAML readers take for octal; "
        "drop the zero, or quote it",
        "mine.yaml:23: search.trial_s must be more than 0, not -1",
        "mine.yaml:23: search.start_rate (50000) is above search.max_rate (10000)",
        "mine.yaml:24: seed must be a whole number, not 1.5",
    ]


def test_missing_keys_are_told_at_their_mapping() -> None:
    assert mistakes("version: 1\nmodel: {layers: 3}\nworkload:\n  input_len: 5\n") == [
        "mine.yaml:1: the scenario needs the key `connectors`",
        "mine.yaml:1: the scenario needs the key `slo`",
        "mine.yaml:2: model needs the key `name`",
        "mine.yaml:3: workload needs the key `output_len`",
    ]


@pytest.mark.parametrize(("old", "new", "line", "message"), [
    ("version: 1", "version: 2", 1, "version must be 1, not 2"),
    ("version: 1", "version: true", 1, "whole number, not true"),
    ("version: 1", "version: 1.0", 1, "whole number, not 1.0"),
    ("tiny", "{preset: tiny, layers: 0}", 2, "needs the model's shape"),
    ("tiny", "{name: x, layers: 3}", 2, "needs kv_heads and head_dim (GQA), or mla_dim (MLA)"),
    ("tiny", "[1]", 2, "model must be a mapping"),
    ("[aggregated, push]", "push", 3, "connectors must be a list, not 'push'"),
    ("[aggregated, push]", "[]", 3, "connectors must have at least 1 entries, not 0"),
    ("[aggregated, push]", "[{label: x}]", 3, "connectors.0 needs the key `name`"),
    ("[aggregated, push]", "[{name: push, label: a/b}]", 3, "unlike 'a/b'"),
    ("[aggregated, push]", "[push, 3]", 3, "connectors.1 must be a mapping"),
    ("64", "[]", 4, "workload.input_len must have at least 1 entries"),
    ("64", "64.5", 4, "must be a whole number, not 64.5"),
    ("64", "true", 4, "must be a whole number, not true"),
    ("250", "off", 5, "`off` is true or false"),
    ("250", "1:30", 5, "`1:30` is a base-60 number"),
    ("250", "0x10", 5, "`0x10` is not a decimal number"),
    ("250", "1_000", 5, "`1_000` has underscores"),
    ("250", ".inf", 5, "`.inf` is not a number"),
    ("250", "1e999", 5, "too large a number"),
    ("250", "!!int 3", 5, "the tag `!!int` is not used here"),
    ("250", "", 5, "slo needs a limit"),
    ("250}", "250, tpot_ms: 'x'}", 5, "slo.tpot_ms must be a number, not 'x'"),
    ("output_len: 4}", "output_len: 1}", 5, ""),
    ("slo: {", "deployment: {engine: remote}\nslo: {", 5, "engine_options needs the key `base_url`"),
    ("slo: {", "deployment: {engine: emulatd}\nslo: {", 5, "did you mean `emulated`?"),
    ("slo: {", "deployment: {engine_options: {max_model_len: 67}}\nslo: {", 4, "max_model_len of 67"),
    ("slo: {", "name: ../x\nslo: {", 5, "name is '../x', which does not fit"),
])  # fmt: skip
def test_single_mistakes(old: str, new: str, line: int, message: str) -> None:
    text = MINIMAL.replace(old, new)
    if new == "output_len: 1}":
        text, message = text.replace("250", "250, tpot_ms: 3"), "output_len 1 has no tpot"
    assert len(found := mistakes(text)) == 1, found
    assert found[0].startswith(f"mine.yaml:{line}: ")
    assert message in found[0]


@pytest.mark.parametrize(("text", "message"), [
    ("", "mine.yaml:1: the file is empty"),
    ("# only a comment\n", "mine.yaml:1: the file is empty"),
    ("- a\n", "mine.yaml:1: must be a mapping of `key: value` lines"),
    ("a: [1\n", "mine.yaml:2: YAML syntax, column 1: expected ',' or ']'"),
    ("a: 1\nb: 'x\n", "mine.yaml:3: YAML syntax, column 1: found unexpected end of stream"),
    ("a: 1\n---\nb: 2\n", "mine.yaml:2: a second document begins here"),
    ("a:\n\t- b\n", "mine.yaml:2: YAML syntax, column 1: a tab is used to indent; YAML wants spaces"),
    ("a: &a [*a]\n", "mine.yaml:1: the alias *a names no block that ended above it"),
    ("a: 1\nb: \x07\n", "mine.yaml:2: YAML syntax: the character U+0007 is not allowed"),
    ('a: "\\UFFFFFFFF"\n', "mine.yaml:1: YAML syntax: an escape or a version number is out of range"),
    ("? [a]\n: b\n", "mine.yaml:1: a key must be a word"),
    ("[" * 5000, "mine.yaml:1: is nested more than 16 levels deep"),
    ("#" * (MAX_CHARS + 1), "mine.yaml:1: is longer than 256 KiB"),
])  # fmt: skip
def test_unreadable_text(text: str, message: str) -> None:
    found = mistakes(text)
    assert found[0].startswith(message)


def test_aliases_cannot_explode() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x]"]
    lines += [
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True)
    ]
    assert "more than 8 aliases" in mistakes("\n".join(lines))[0]


def test_very_many_mistakes_are_cut_short() -> None:
    found = mistakes(MINIMAL + "\n".join(f"wrong{number}: 1" for number in range(500)))
    assert (len(found), found[-1]) == (51, "… and 450 more mistakes")


# ---------------------------------------------------------------- overrides
def test_overrides() -> None:
    scenario = parse(
        MINIMAL, "slo.ttft_ms=300", "workload.input_len=[256, 512]", "workload.input_len.1=1024",
        "connectors.1.protocol=rdma", "connectors.push.workers=7", "deployment.engine_options.time_scale=0.5",
        "model.kv_dtype=fp16", "search.start_rate=5", "name=other",
    )  # fmt: skip
    assert (scenario.slo.ttft_ms, scenario.workload.input_len) == (300, (256, 1024))
    assert scenario.connector_options("push") == Push(protocol="rdma", workers=7)
    assert scenario.deployment.engine_options == Emulated(time_scale=0.5)
    assert scenario.model.shape.kv_dtype == "fp16"
    assert (scenario.search.start_rate, scenario.name) == (5, "other")


def test_overrides_find_entries_by_label() -> None:
    text = MINIMAL.replace("[aggregated, push]", "[push, {name: push, label: two}]")
    scenario = parse(text, "connectors.two.workers=9")
    assert [connector.options for connector in scenario.connectors] == [Push(), Push(workers=9)]


def test_a_file_can_be_completed_by_overrides() -> None:
    text = "version: 1\nmodel: tiny\nconnectors: [push]\n"
    scenario = parse(text, "workload={input_len: 5, output_len: 2}", "slo.tpot_ms=9")
    assert (scenario.workload.input_len, scenario.slo.tpot_ms) == ((5,), 9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slo.tfft_ms=3", "--set slo.tfft_ms: unknown key `tfft_ms` in slo; did you mean `ttft_ms`?"),
        ("sloo.ttft_ms=3", "--set sloo.ttft_ms: unknown key `sloo`; did you mean `slo`?"),
        ("ttft_ms=3", "--set ttft_ms: unknown key `ttft_ms`; `ttft_ms` belongs under `slo`"),
        (
            "workload.load={workers: 1}",
            "--set workload.load: unknown key `load` in workload; `load` belongs at the top level",
        ),
        ("slo.ttft_ms=-3", "--set slo.ttft_ms: slo.ttft_ms must be more than 0, not -3"),
        ("slo.ttft_ms", "--set slo.ttft_ms: is not of the form path=value, as in slo.ttft_ms=300"),
        ("slo..ttft_ms=1", "--set slo..ttft_ms: is not of the form path=value, as in slo.ttft_ms=300"),
        ("a." * 5000 + "b=1", "--set a.a.a."),
        ("=1", "--set =1: is not of the form path=value, as in slo.ttft_ms=300"),
        ("slo.ttft_ms=[1", "--set slo.ttft_ms: YAML syntax, column 3: expected ',' or ']'"),
        ("slo.ttft_ms=on", "--set slo.ttft_ms: `on` is true or false"),
        ("slo.ttft_ms.x=1", "--set slo.ttft_ms.x: `slo.ttft_ms` is 250, which has nothing below it"),
        (
            "connectors.pushh.x=1",
            "--set connectors.pushh.x: connectors has no entry `pushh`; there are: aggre",
        ),
        ("connectors.7=push", "--set connectors.7: connectors has no entry 7; they are numbered from 0 to 1"),
        ("connectors.push.worker=1", "--set connectors.push.worker: unknown key `worker` in connectors.1"),
        ("deployment.engine_options.x=1", "--set deployment.engine_options.x: unknown key `x`"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    found = mistakes(MINIMAL, override)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_the_last_override_of_a_path_counts_where_it_stands() -> None:
    given = typed_overrides(["slo.ttft_ms=1", "slo={tpot_ms: 30}", " slo.ttft_ms =7", "nonsense"])
    assert list(given.items()) == [("slo", "{tpot_ms: 30}"), ("slo.ttft_ms", "7"), ("nonsense", None)]
    assert list(merged({"a": 1, "b": 2}, {"a": 3})) == ["b", "a"]
    scenario = parse(MINIMAL, "slo.ttft_ms=1", "slo={tpot_ms: 30}", "slo.ttft_ms=7")
    assert (scenario.slo.ttft_ms, scenario.slo.tpot_ms) == (7, 30)


def test_a_draft_takes_values_and_is_checked_again() -> None:
    draft = read_scenario(MINIMAL, "mine.yaml")
    values = {"connectors": [{"name": "push", "nics": ["on"]}], "slo.ttft_ms": 7.5, "workload.output_len": 3}
    changed = draft.put(values).checked(REGISTRY)
    assert changed.connector_options("push") == Push(nics=("on",))  # text as it is, not as YAML reads it
    assert (changed.slo.ttft_ms, changed.workload.output_len) == (7.5, 3)
    assert draft.checked(REGISTRY) == parse(MINIMAL)
    wrong = {"slo.ttft_ms": math.inf, "workload": {"input_len": [1, "x"], "output_len": 2}, "name": "a\x07"}
    with pytest.raises(ScenarioError) as caught:
        draft.put(wrong).checked(REGISTRY)
    assert set(caught.value.message.split("\n")) == {
        "--set slo.ttft_ms: slo.ttft_ms must be a number, not 'inf'",
        "--set workload: workload.input_len.1 must be a whole number, not 'x'",
        "--set name: has a control character or a lone surrogate",
    }


def test_mistakes_of_file_and_overrides_come_together() -> None:
    found = mistakes(MINIMAL + "sed: 1\n", "slo.x=1", "nonsense")
    assert [mistake.split(": ")[0] for mistake in found] == ["mine.yaml:6", "--set nonsense", "--set slo.x"]


# ---------------------------------------------------------------- whatever anybody writes
_WORDS = st.sampled_from(
    [*"ab-:[]{}&*!|>'\"#%@`,? \n\t", "\n  ", "- ", ": ", "&a ", "*a", "<<: ", "---\n", "...\n", "!!str ",
     "version: 1\n", "model: tiny\n", "connectors: [push]\n", "workload:\n", "  input_len: ", "slo: ", "1e5",
     "on", "010", "1:30", "~", "null", "true", ".nan", "\\x", "\x00", "\ud800", "é", "\ufeff", "%YAML 1.1\n",
     "push", "name: ", "label: ", "seed: ", "9" * 50]
)  # fmt: skip
_KEYS = st.sampled_from(
    ["version", "model", "deployment", "connectors", "workload", "slo", "search", "seed", "name", "label",
     "preset", "engine", "engine_options", "input_len", "output_len", "ttft_ms", "max_rate", "x", "protocol"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | _KEYS
    | st.sampled_from(["push", "tiny", "emulated", "remote", 1]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(_KEYS | st.text(max_size=4), inner, max_size=6),
    max_leaves=25,
)  # fmt: skip


def either(text: str, *overrides: str) -> None:
    try:
        scenario = parse(text, *overrides)
    except ScenarioError as error:
        lines = error.message.split("\n")
    else:
        lines = []
        assert isinstance(scenario, Scenario)
    assert all(line.startswith(("mine.yaml:", "--set ", "… and ")) for line in lines)


@settings(deadline=None, max_examples=60)
@given(st.one_of(st.text(max_size=200), st.lists(_WORDS, max_size=40).map("".join)))
def test_any_text(text: str) -> None:
    either(text)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML has no libyaml here")
@settings(deadline=None, max_examples=60)
@given(st.one_of(st.text(max_size=60), st.lists(_WORDS, max_size=30).map("".join)))
def test_libyaml_and_pyyaml_read_the_same(text: str) -> None:
    """Values, lines and mistakes; what they read differently goes through PyYAML's own parser."""
    with pytest.MonkeyPatch.context() as patch:
        fast = yaml_lines.read_yaml(text)
        patch.setattr(yaml_lines, "FAST_LOADER", yaml.SafeLoader)
        assert fast == yaml_lines.read_yaml(text)


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(_KEYS, _VALUES, max_size=8))
def test_any_structure(data: dict[str, Any]) -> None:
    either(yaml.safe_dump(data))
    either(yaml.safe_dump({**yaml.safe_load(MINIMAL), **data}))


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(st.lists(_KEYS | st.text(max_size=3), max_size=4), st.text(max_size=6) | _WORDS), max_size=3
    )
)
def test_any_override(overrides: list[tuple[list[str], str]]) -> None:
    either(MINIMAL, *(f"{'.'.join(path)}={value}" for path, value in overrides))


# ---------------------------------------------------------------- JSON Schema
def fits(schema: dict[str, Any] | bool, value: Any, root: dict[str, Any]) -> bool:
    """Whether a value fits a JSON Schema, for the keywords that ours uses."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and not fits(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root):
        return False
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict), "array": isinstance(value, list), "string": isinstance(value, str),
        "boolean": isinstance(value, bool), "null": value is None, "number": number,
        "integer": number and value == int(value),
    }  # fmt: skip
    checks = [
        "type" not in schema or kinds[schema["type"]],
        "const" not in schema or (value == schema["const"] and type(value) is type(schema["const"])),
        "enum" not in schema or value in schema["enum"],
        not number or value >= schema.get("minimum", value),
        not number or value <= schema.get("maximum", value),
        not number or "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"],
        not number or "exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"],
        all(fits(branch, value, root) for branch in schema.get("allOf", [])),
        "anyOf" not in schema or any(fits(branch, value, root) for branch in schema["anyOf"]),
    ]
    if "if" in schema and fits(schema["if"], value, root):
        checks.append(fits(schema["then"], value, root))
    if isinstance(value, list):
        checks += [fits(schema.get("items", True), child, root) for child in value]
        checks += [len(value) >= schema.get("minItems", 0), len(value) <= schema.get("maxItems", 10**9)]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks += [fits(known[key], child, root) for key, child in value.items() if key in known]
        checks.append(set(schema.get("required", [])) <= set(value))
        checks.append(schema.get("additionalProperties", True) is not False or set(value) <= set(known))
    return all(checks)


SCHEMA = scenario_schema(REGISTRY)


def in_schema(text: str) -> bool:
    return fits(SCHEMA, yaml.safe_load(text), SCHEMA)


def test_schema_accepts_what_the_parser_accepts() -> None:
    for text in (
        MINIMAL,
        MINIMAL.replace("tiny", "{preset: tiny, kv_dtype: fp16}"),
        MINIMAL.replace("push]", "{name: push, label: x, workers: 3}]"),
        MINIMAL + "deployment: {engine: remote, engine_options: {base_url: x}}\n",
        MINIMAL + "load: {workers: 3, mode: direct}\n",
        MINIMAL + "load: {workers: auto}\n",
        json.dumps(parse(MINIMAL).resolved()),
    ):
        parse(text)
        assert in_schema(text)


@pytest.mark.parametrize(("old", "new"), [
    ("version: 1", "version: 2"), ("version: 1", "version: 1\nx: 1"), ("tiny", "tinny"), ("push]", "pusch]"),
    ("push]", "{name: push, workers: 0}]"), ("push]", "{name: aggregated, workers: 1}]"), ("64", "[]"),
    ("250", "-1"), ("ttft_ms: 250", "attainment: 0.9"),
    ("slo:", "deployment: {engine_options: {time_scal: 1}}\nslo:"),
    ("slo:", "deployment: {engine: remote}\nslo:"), ("slo:", "search: {precison: 1}\nslo:"),
    ("slo:", "load: {workers: 0}\nslo:"), ("slo:", "load: {workers: many}\nslo:"),
    ("slo:", "load: {workers: true}\nslo:"), ("slo:", "load: {mode: straight}\nslo:"),
])  # fmt: skip
def test_schema_refuses_what_the_parser_refuses(old: str, new: str) -> None:
    text = MINIMAL.replace(old, new)
    mistakes(text)
    assert not in_schema(text)


def test_every_property_of_the_schema_is_described() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for place in (SCHEMA, *SCHEMA["$defs"].values()):
        for key, value in place.get("properties", {}).items():
            assert value.get("description"), f"{place.get('title')}.{key}"
