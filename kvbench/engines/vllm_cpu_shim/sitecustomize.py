"""Makes real vLLM bearable on a few CPU cores. For the CPU lab only; does nothing where an accelerator is.

Python runs a module of this name at its start. The lab's scenario puts this folder on PYTHONPATH of the
engine processes and of nothing else; nothing imports it. Standard library only: it runs before vLLM's
packages are there, and each change waits until the module that it changes is imported.

What it changes (vLLM 0.12 to 0.32, NIXL 0.8 to 1.5), each said once on stderr:

1. NIXL's progress thread. NIXL's Python API fixes its delay to 0, so that it polls without rest and takes
   a core of each server, idle or not. Here it sleeps at least ``KVBENCH_SHIM_NIXL_DELAY_US`` (1000 µs)
   between two looks, which adds up to that to each step of a transfer.
2. Pinning. On CPUs the NIXL connector pins its process to the last core of each NUMA node, which is the
   same one for P and D. ``os.sched_setaffinity`` does nothing here.
3. Mooncake's connector asks torch for the current accelerator and fails without one. Without one the
   answer is 0 here, and vLLM's CPU platform takes a "set the device" for done.
   That of vLLM 0.13 to 0.15 also takes the heads for a block's tokens, as they lie on CPUs, and gives up. It
   gets to see the axes in the order it knows; it uses addresses and sizes only, which are the same.
4. Libraries that set-up unpacked into this environment, since the machine lacks them and Mooncake is
   linked against them, are loaded before Mooncake is.
5. Servers give way to the router and the load generator, which share the cores with them: a load generator
   that comes late measures itself. Linux groups processes by session, and then nice values count inside
   a group only; so the group of a server's session is given the nice value, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

DELAY_ENV = "KVBENCH_SHIM_NIXL_DELAY_US"
DEFAULT_DELAY_US = 1000
NICE = 5

# Device files of NVIDIA's, AMD's and other accelerators' drivers, and of the GPU of Windows' Linux.
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/accel/accel*", "/dev/dxg")

# In the order of loading: libibverbs needs the two before it.
MOONCAKE_LIBRARIES = (
    "libnl-3.so.200",
    "libnl-route-3.so.200",
    "libibverbs.so.1",
    "libnuma.so.1",
    "libcurl.so.4",
)

Change = Callable[[ModuleType], None]


def say(text: str) -> None:
    print(f"kvbench's CPU lab: {text}", file=sys.stderr, flush=True)


def accelerator() -> str:
    """A device file of an accelerator of this machine; empty if there is none."""
    return next((found for pattern in ACCELERATORS for found in glob.glob(pattern)), "")


def delay_us() -> int:
    """The least pause of NIXL's progress thread, in microseconds."""
    return int(os.environ.get(DELAY_ENV, "") or DEFAULT_DELAY_US)


def slow_nixl_down(module: ModuleType) -> None:
    """``nixl*._bindings``: every agent made from now on pauses between two looks."""
    least = delay_us()
    if not hasattr(module.__dict__["nixlAgentConfig"], "pthrDelay"):
        _slow_old_nixl_down(module, least)
        return
    original: Any = module.__dict__["nixlAgent"]

    class PausingAgent(original):  # type: ignore[misc]
        def __init__(self, name: str, config: Any) -> None:
            config.pthrDelay = max(int(config.pthrDelay), least)
            say(f"NIXL's progress thread sleeps {config.pthrDelay} us between two looks")
            super().__init__(name, config)

    module.__dict__["nixlAgent"] = PausingAgent


def _slow_old_nixl_down(module: ModuleType, least: int) -> None:
    """NIXL 0.8 takes the delay as its configuration's sixth argument, and does not tell it."""
    original: Any = module.__dict__["nixlAgentConfig"]

    def config(*given: Any) -> Any:
        wanted = (*given[:5], max(int(given[5]), least), *given[6:]) if len(given) > 5 else given
        if wanted != given:
            say(f"NIXL's progress thread sleeps {wanted[5]} us between two looks")
        return original(*wanted)

    module.__dict__["nixlAgentConfig"] = config


def give_way() -> None:
    """Lower the priority of this session, if it is this process's own and no user's terminal."""
    if os.getsid(0) != os.getpid():
        return
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with contextlib.suppress(OSError):  # a kernel without such groups
        Path("/proc/self/autogroup").write_text(str(NICE))
    say(f"this server has the nice value {NICE}, so that router and load generator are not late")


def stop_pinning() -> None:
    """From now on nothing in this process pins itself to a core."""
    said = False

    def leave_affinity(pid: int, mask: Any) -> None:
        nonlocal said
        if not said:
            said = True
            say("os.sched_setaffinity does nothing: P and D would be pinned to the same core")

    os.sched_setaffinity = leave_affinity


def answer_for_accelerator(module: ModuleType) -> None:
    """``torch.accelerator``: the current device's index is 0 where there is no device."""
    available: Callable[[], bool] = module.__dict__["is_available"]
    for name in ("current_device_index", "current_device_idx"):
        original = module.__dict__.get(name)
        if original is None:
            continue

        def index(original: Callable[[], int] = original) -> int:
            return original() if available() else 0

        module.__dict__[name] = index
    say("torch.accelerator's current device is 0, where there is none")


def accept_set_device(module: ModuleType) -> None:
    """``vllm.platforms.cpu``: setting the device is done by doing nothing."""
    platform = module.__dict__["CpuPlatform"]

    def set_device(cls: type, device: Any) -> None:
        """There is only one device."""

    platform.set_device = classmethod(set_device)
    say("vLLM's CPU platform takes set_device for done")


def turn_axes(module: ModuleType) -> None:
    """``…v1.mooncake_connector``: a block's tokens are where it looks for them, third from the end."""
    worker = module.__dict__["MooncakeConnectorWorker"]
    original = worker.register_kv_caches

    def register(self: Any, kv_caches: dict[str, Any]) -> Any:
        wanted = self.block_size
        turned = {
            name: cache.transpose(-3, -2)
            for name, cache in kv_caches.items()
            if cache.shape[-3] != wanted == cache.shape[-2]
        }
        if turned:
            say("Mooncake's connector gets to see the KV caches with heads and tokens exchanged")
        return original(self, {**kv_caches, **turned})

    worker.register_kv_caches = register


def load_libraries() -> None:
    """What the system has wins; what neither it nor set-up's folder has is left for Mooncake to name."""
    folder = Path(sys.prefix) / "lib" / "kvbench-native"
    for name in MOONCAKE_LIBRARIES:
        for candidate in (name, str(folder / name)):
            try:
                ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            if candidate != name:
                say(f"{name} comes from this environment's lib/kvbench-native")
            break


AFTER_IMPORT: dict[str, Change] = {
    "nixl_cu12._bindings": slow_nixl_down,
    "nixl_cu13._bindings": slow_nixl_down,
    "torch.accelerator": answer_for_accelerator,
    "vllm.platforms.cpu": accept_set_device,
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake_connector": turn_axes,
}
BEFORE_IMPORT: dict[str, Callable[[], None]] = {"mooncake": load_libraries}


class ChangingLoader(Loader):
    """Loads a module as its own loader does, then changes it."""

    def __init__(self, loader: Any, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Finder(MetaPathFinder):
    """Finds the modules to change; all others are left to Python's own finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        before = BEFORE_IMPORT.pop(fullname, None)
        if before is not None:
            before()
        change = AFTER_IMPORT.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        spec.loader = ChangingLoader(spec.loader, change)
        return spec


def install() -> None:
    """Set everything up, unless this machine has an accelerator."""
    device = accelerator()
    if device:
        say(f"nothing is changed: this machine has an accelerator ({device})")
        return
    give_way()
    stop_pinning()
    sys.meta_path.insert(0, Finder())


# Imported by Python's start as sitecustomize, and by nothing else.
if __name__ == "sitecustomize":
    install()
