"""Make vLLM usable on a few CPU cores; for the CPU lab only, inactive with an accelerator. Python loads this
module at start, from the engine processes' PYTHONPATH. It uses the standard library only; each change waits
until its target module is imported, and is reported once on stderr (vLLM 0.12 to 0.32, NIXL 0.8 to 1.5).

1. NIXL's progress thread polls without pause, using a core per server. It now sleeps
   ``KVBENCH_SHIM_NIXL_DELAY_US`` (1000 µs) between polls, which may add that to each transfer step.
   In vLLM 0.12 and 0.13 the engine polls its transfers without pause, too, and holds the lock that this
   thread needs: a transfer of 1 MiB took up to 30 s. The engine now sleeps as long while one is in progress.
2. The NIXL connector pins P and D to the same core, the last of each NUMA node; ``os.sched_setaffinity`` does
   nothing.
3. Mooncake's connector requires an accelerator: its index is 0, and "set the device" succeeds. For vLLM 0.13
   to 0.15 the KV axes are swapped, as it mistakes heads for a block's tokens; it uses only addresses and
   sizes, which do not change.
   In vLLM 0.24, NIXL's and Mooncake's connectors mistake the first axis, a cache's blocks, for K and V, as
   they know five axes only. The answer to this question is changed to "blocks come first".
4. Libraries unpacked by set-up are loaded before Mooncake, which needs them.
5. Servers get a lower priority than router and load generator, which would otherwise be late. Linux applies
   nice values within a session's group only, so the group's nice value is set, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

DELAY_ENV = "KVBENCH_SHIM_NIXL_DELAY_US"
DEFAULT_DELAY_US = 1000
NICE = 19

# Device files of NVIDIA's, AMD's and other accelerators' drivers, and of WSL's GPU.
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
    """Device file of an accelerator, or ""."""
    return next((found for pattern in ACCELERATORS for found in glob.glob(pattern)), "")


def delay_us() -> int:
    """Shortest pause of NIXL's progress thread, in microseconds."""
    return int(os.environ.get(DELAY_ENV, "") or DEFAULT_DELAY_US)


def slow_nixl_down(module: ModuleType) -> None:
    """Patch ``nixl*._bindings``: new agents pause between polls."""
    least = delay_us()
    if not hasattr(module.__dict__["nixlAgentConfig"], "pthrDelay"):
        _slow_old_nixl_down(module, least)
        return
    original: Any = module.__dict__["nixlAgent"]

    class PausingAgent(original):  # type: ignore[misc]
        def __init__(self, name: str, config: Any) -> None:
            config.pthrDelay = max(int(config.pthrDelay), least)
            say(f"NIXL's progress thread sleeps {config.pthrDelay} us between two polls")
            super().__init__(name, config)

    module.__dict__["nixlAgent"] = PausingAgent


def _slow_old_nixl_down(module: ModuleType, least: int) -> None:
    """Patch NIXL 0.8, where the delay is the sixth, unreadable configuration argument."""
    original: Any = module.__dict__["nixlAgentConfig"]

    def config(*given: Any) -> Any:
        wanted = (*given[:5], max(int(given[5]), least), *given[6:]) if len(given) > 5 else given
        if wanted != given:
            say(f"NIXL's progress thread sleeps {wanted[5]} us between two polls")
        return original(*wanted)

    module.__dict__["nixlAgentConfig"] = config


def pause_between_looks(module: ModuleType) -> None:
    """Patch ``…v1.nixl_connector``: the engine sleeps while transfers are in progress."""
    worker = module.__dict__["NixlConnectorWorker"]
    original = worker._pop_done_transfers

    def pop_done(self: Any, transfers: dict[str, Any]) -> Any:
        done = original(self, transfers)
        if transfers:
            time.sleep(delay_us() / 1e6)
        return done

    worker._pop_done_transfers = pop_done
    say(f"the engine sleeps {delay_us()} us between two looks at its transfers over NIXL")


def give_way() -> None:
    """Lower the priority of this session, if it is not a user's terminal."""
    if os.getsid(0) != os.getpid():
        return
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with contextlib.suppress(OSError):  # a kernel without such groups
        Path("/proc/self/autogroup").write_text(str(NICE))
    say(f"this server has the nice value {NICE}, so that router and load generator are not late")


def stop_pinning() -> None:
    reported = False

    def leave_affinity(pid: int, mask: Any) -> None:
        nonlocal reported
        if not reported:
            reported = True
            say("os.sched_setaffinity does nothing: P and D would be pinned to the same core")

    os.sched_setaffinity = leave_affinity


def answer_for_accelerator(module: ModuleType) -> None:
    """Patch ``torch.accelerator``: the device index is 0 without a device."""
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
    """Patch ``vllm.platforms.cpu``: setting the device does nothing."""
    platform = module.__dict__["CpuPlatform"]

    def set_device(cls: type, device: Any) -> None:
        """Do nothing: there is one device."""

    platform.set_device = classmethod(set_device)
    say("set_device of vLLM's CPU platform does nothing")


def turn_axes(module: ModuleType) -> None:
    """Patch ``…v1.mooncake_connector``: the block's tokens are the third axis from the end."""
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
            say("Mooncake's connector sees the KV caches with the axes of heads and tokens swapped")
        return original(self, {**kv_caches, **turned})

    worker.register_kv_caches = register


def put_blocks_first(module: ModuleType) -> None:
    """Patch ``…kv_connector.utils``: a cache of (blocks, heads, tokens, K and V) has its blocks first."""
    topology: Any = module.__dict__.get("TransferTopology")
    original = getattr(topology, "__post_init__", None)
    if original is None:
        return

    def post_init(self: Any) -> None:
        original(self)
        if getattr(self, "_is_kv_layout_blocks_first", True) or self.is_mla:
            return
        shape = self.attn_backends[0].get_kv_cache_shape(1, 16, 1, 1)  # as vLLM asks: 1 block of 16 tokens
        if len(shape) == 4 and shape[0] == 1:
            self._is_kv_layout_blocks_first = True
            say("NIXL's and Mooncake's connectors take the KV caches for blocks first")

    topology.__post_init__ = post_init


def load_libraries() -> None:
    """Load missing libraries from set-up's folder; the system's take precedence."""
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
    "vllm.distributed.kv_transfer.kv_connector.utils": put_blocks_first,
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake_connector": turn_axes,
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector": pause_between_looks,
}
BEFORE_IMPORT: dict[str, Callable[[], None]] = {"mooncake": load_libraries}


class ChangingLoader(Loader):
    """Loads a module, then patches it."""

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
    """Install all patches, unless there is an accelerator."""
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
