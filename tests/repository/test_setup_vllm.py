"""The CPU lab's set-up and its start-up file, as far as they can be tried without the lab itself."""

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
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths or (SHIM,))), **env}, check=False,
    )  # fmt: skip


# What is installed
LABS = [setup_vllm.Lab(version) for version in setup_vllm.known()]


@pytest.mark.parametrize("lab", LABS, ids=setup_vllm.known())
def test_the_constraints_have_all_that_is_needed_and_nothing_that_breaks_it(lab: setup_vllm.Lab) -> None:
    for line in lab.pins():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*(\+cpu)?", line)
    names = [line.split("==")[0] for line in lab.pins()]
    assert len(names) == len(set(names))
    assert {"torch", "nixl", "mooncake-transfer-engine-non-cuda"} <= set(names)
    assert {"nixl-cu12", "nixl-cu13"} & set(names)
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(names)
    assert lab.pinned("vllm-cpu") == f"vllm-cpu=={lab.version}"
    # The build of torch for CUDA loads only beside these.
    libraries = [name for name in names if name.startswith(setup_vllm.CUDA_LIBRARIES)]
    assert bool(libraries) != lab.pinned("torch").endswith("+cpu")


def test_each_release_has_an_environment_of_its_own() -> None:
    assert setup_vllm.DEFAULT in setup_vllm.known()
    assert setup_vllm.Lab().venv.name == ".venv-vllm"
    assert setup_vllm.Lab("0.13.0").venv.name == ".venv-vllm-0.13.0"


def test_a_release_without_constraints_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(setup_base.SetupError, match=r"no vLLM 0\.1\.0: .*0\.13\.0.* are known"):
        setup_vllm.require_machine(setup_vllm.Lab("0.1.0"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> setup_vllm.Lab:
    """The lab of the default release in a folder of the test's."""
    monkeypatch.setattr(setup_vllm, "ROOT", tmp_path)
    return setup_vllm.Lab()


def test_without_a_cpu_build_of_torch_it_says_what_to_tell_pip(
    lab: setup_vllm.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.python.parent.mkdir(parents=True)
    lab.python.symlink_to(sys.executable)
    monkeypatch.setattr(setup_vllm, "KVBENCH_PYTHON", Path(sys.executable))
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(setup_base.SetupError, match=r"(?s)No matching distribution.*PIP_FIND_LINKS=FOLDER"):
        setup_vllm.install_packages(lab)


def test_a_step_that_hangs_is_ended_and_named(lab: setup_vllm.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_vllm, "HEARTBEAT_S", 0.1)
    assert setup_vllm.run(lab, "greeting", ["sh", "-c", "echo hello"], 10) == "hello\n"
    with pytest.raises(setup_base.SetupError, match=r"(?s)sleeping: not done after 0.3 s.*begun"):
        setup_vllm.run(lab, "sleeping", ["sh", "-c", "echo begun; sleep 30 & wait"], 0.3)
    with pytest.raises(setup_base.SetupError, match=r"(?s)failing failed.*no luck"):
        setup_vllm.run(lab, "failing", ["sh", "-c", "echo no luck; exit 3"], 10)


def test_what_is_not_there_is_not_done(lab: setup_vllm.Lab) -> None:
    assert not lab.is_done()
    lab.venv.mkdir()
    lab.stamp.write_text('{"key": "another"}')
    assert not lab.is_done()


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


def write_module(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_it_makes_nixl_pause_and_torch_answer(tmp_path: Path) -> None:
    """Packages of the same names stand in: what counts is that the change comes right after the import."""
    modules = {
        "nixl_cu12/__init__.py": "",
        "nixl_cu12/_bindings.py": "class nixlAgentConfig:\n"
        "    pthrDelay = 0\n"
        "class nixlAgent:\n"
        "    def __init__(self, name, config): self.got = config.pthrDelay\n",
        "torch/__init__.py": "from torch import accelerator\n",
        "torch/accelerator/__init__.py": "def is_available(): return False\n"
        "def current_device_index(): raise RuntimeError('none')\n",
        "vllm/__init__.py": "",
        "vllm/platforms/__init__.py": "",
        "vllm/platforms/cpu.py": "class CpuPlatform:\n"
        "    @classmethod\n"
        "    def set_device(cls, device): 1 / 0\n",
    }
    for name, text in modules.items():
        write_module(tmp_path / name, text)
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


def test_it_makes_old_nixl_pause(tmp_path: Path) -> None:
    """NIXL 0.8 takes the delay by its place among the arguments."""
    write_module(tmp_path / "nixl_cu12/__init__.py", "")
    write_module(
        tmp_path / "nixl_cu12/_bindings.py",
        "class nixlAgentConfig:\n    def __init__(self, *given): self.given = given\n",
    )
    code = (
        "import nixl_cu12._bindings as bindings\n"
        "print(bindings.nixlAgentConfig(True, False, 0, 's', 1, 0, 100000, False).given,"
        " bindings.nixlAgentConfig(True).given)"
    )
    done = python(code, SHIM, tmp_path)
    assert done.stdout.strip() == "(True, False, 0, 's', 1, 1000, 100000, False) (True,)", done.stderr
    assert "sleeps 1000 us" in done.stderr


def test_it_shows_old_mooncake_the_axes_that_it_knows(tmp_path: Path) -> None:
    """vLLM 0.13's worker demands a block's tokens third from the end; on CPUs the heads are there."""
    write_module(
        tmp_path / "vllm/distributed/kv_transfer/kv_connector/v1/mooncake_connector.py",
        "class MooncakeConnectorWorker:\n"
        "    block_size = 128\n"
        "    def register_kv_caches(self, caches): return [each.shape for each in caches.values()]\n",
    )
    code = (
        "import numpy\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.mooncake_connector import *\n"
        "class Cache(numpy.ndarray):\n"
        "    def transpose(self, a, b): return self.swapaxes(a, b)\n"
        "made = lambda *shape: numpy.empty(shape, bool).view(Cache)\n"
        "print(MooncakeConnectorWorker().register_kv_caches("
        "{'cpu': made(2, 9, 2, 128, 32), 'gpu': made(2, 9, 128, 2, 32)}))"
    )
    done = python(code, SHIM, tmp_path)
    assert done.stdout.strip() == "[(2, 9, 128, 2, 32), (2, 9, 128, 2, 32)]", done.stderr
    assert "heads and tokens swapped" in done.stderr


def test_it_tells_connectors_of_0_24_that_blocks_come_first(tmp_path: Path) -> None:
    """vLLM 0.24 knows blocks first in five axes only; on CPUs there are four. 0.32 has no such question."""
    write_module(
        tmp_path / "vllm/distributed/kv_transfer/kv_connector/utils.py",
        "class TransferTopology:\n"
        "    def __init__(self, shape, is_mla, asked=True):\n"
        "        backend = type('Backend', (), {'get_kv_cache_shape': staticmethod(lambda *sizes: shape)})\n"
        "        self.attn_backends, self.is_mla, self.asked = [backend], is_mla, asked\n"
        "        self.__post_init__()\n"
        "    def __post_init__(self):\n"
        "        shape = self.attn_backends[0].get_kv_cache_shape(1, 16, 1, 1)\n"
        "        if self.asked: self._is_kv_layout_blocks_first = len(shape) == 5 and shape[0] == 1\n",
    )
    code = (
        "from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology as Topology\n"
        "cpu, gpu, gpu_k_v, mla = (1, 1, 16, 2), (1, 2, 16, 1, 1), (2, 1, 16, 1, 1), (1, 16, 1)\n"
        "made = Topology(cpu, False), Topology(gpu, False), Topology(gpu_k_v, False), Topology(mla, True)\n"
        "print(*(int(each._is_kv_layout_blocks_first) for each in made),"
        " len(vars(Topology(cpu, False, False))))"
    )
    done = python(code, SHIM, tmp_path)
    assert done.stdout.strip() == "1 1 0 0 3", done.stderr
    assert done.stderr.count("blocks first") == 1


def test_old_engines_sleep_while_transfers_over_nixl_are_in_progress(tmp_path: Path) -> None:
    write_module(
        tmp_path / "vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py",
        "class NixlConnectorWorker:\n"
        "    def _pop_done_transfers(self, transfers): return transfers.pop('done', 'none')\n",
    )
    code = (
        "import time\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import *\n"
        "slept = []\n"
        "time.sleep = slept.append\n"
        "looks = {}, {'done': 1}, {'done': 2, 'open': 3}\n"
        "print(*map(NixlConnectorWorker()._pop_done_transfers, looks), slept)"
    )
    done = python(code, SHIM, tmp_path)
    assert done.stdout.strip() == "none 1 2 [0.001]", done.stderr
    assert "1000 us between two looks" in done.stderr


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
