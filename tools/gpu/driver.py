"""NVIDIA's driver, asked through its own libraries: is it there, and what does each NVML call return."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvbench.hosts import nvml
from tools.gpu.result import CheckFailedError, Figures

CUDA: Final = "libcuda.so.1"
NVML: Final = nvml.LIBRARY
_TEXT_BYTES: Final = 96
_ROOM_BYTES: Final = 4096
"""More than any of the structures asked for has."""

_NUMBER: Final = ("nvmlDeviceGetIndex", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")
_MORE_NUMBERS: Final = (
    *("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetCurrentClocksThrottleReasons"),
    *("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth"),
    *("nvmlDeviceGetPerformanceState", "nvmlDeviceGetPersistenceMode"),
    *("nvmlDeviceGetMinorNumber", "nvmlDeviceGetNumaNodeId"),
)
_STRUCTURES: Final = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPciInfo_v3")
_TEXTS: Final = ("nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetSerial")
_BY_KIND: Final = {
    "nvmlDeviceGetClockInfo": (0, 1, 2),  # NVML_CLOCK_GRAPHICS, _SM, _MEM
    "nvmlDeviceGetTemperature": (0,),  # NVML_TEMPERATURE_GPU
    "nvmlDeviceGetPcieThroughput": (0, 1),  # NVML_PCIE_UTIL_TX_BYTES, _RX_BYTES
    "nvmlDeviceGetNvLinkState": (0, 1),  # by link
}


def there() -> bool:
    """Whether the driver's library loads; nothing of it is called."""
    try:
        ctypes.CDLL(CUDA)
    except OSError:
        return False
    return True


def version() -> dict[str, Any]:
    """The CUDA that the driver knows, and how many GPUs it shows; each call's code where it is not 0."""
    library, number = ctypes.CDLL(CUDA), ctypes.c_int()
    found: dict[str, Any] = {"cuInit": library.cuInit(0)}
    for call in ("cuDriverGetVersion", "cuDeviceGetCount"):
        code = getattr(library, call)(ctypes.byref(number))
        found[call] = number.value if code == 0 else f"code {code}"
    return found


def nvml_codes(library_name: str = NVML) -> Figures:
    """Each NVML call by name: its return code, and what it said; first GPU only. Raises CheckFailedError."""
    try:
        library = ctypes.CDLL(library_name)
    except OSError as error:
        raise CheckFailedError(f"{library_name} does not load: {error}") from error
    said: dict[str, Any] = {}
    for name, call, value in _calls(library):
        try:
            code = call()
        except AttributeError:
            said[name] = "not in this library"
            continue
        said[name] = value() if code == 0 else f"code {code}"
    said["kvbench slowed_s"] = nvml.slowed_s(library_name)
    said["kvbench nvlink_bytes"] = {str(gpu): both for gpu, both in nvml.nvlink_bytes(library_name).items()}
    said["kvbench energy_j"] = nvml.energy_j(library_name)
    said["kvbench names"] = nvml.names(library_name)
    if isinstance(said["nvmlInit_v2"], str):
        raise CheckFailedError(f"nvmlInit_v2: {said['nvmlInit_v2']}", said)
    return said


def _calls(library: Any) -> Iterator[tuple[str, Callable[[], int], Callable[[], Any]]]:
    """Name, the call, and what it has said. A call that the library lacks raises AttributeError when made."""
    number, text = ctypes.c_ulonglong(), ctypes.create_string_buffer(_TEXT_BYTES)
    room, handle = ctypes.create_string_buffer(_ROOM_BYTES), ctypes.c_void_p()

    def numbered(name: str, *before: Any) -> tuple[str, Callable[[], int], Callable[[], Any]]:
        def call() -> int:
            number.value = 0
            return int(getattr(library, name)(*before, ctypes.byref(number)))

        shown = ",".join(str(each.value) for each in before if isinstance(each, ctypes.c_uint))
        return f"{name}({shown})" if shown else name, call, lambda: number.value

    def texted(name: str, *before: Any) -> tuple[str, Callable[[], int], Callable[[], Any]]:
        return (
            name,
            lambda: int(getattr(library, name)(*before, text, ctypes.c_uint(_TEXT_BYTES))),
            lambda: text.value.decode("utf-8", "replace"),
        )

    yield "nvmlInit_v2", lambda: int(library.nvmlInit_v2()), lambda: 0
    yield texted("nvmlSystemGetDriverVersion")
    yield texted("nvmlSystemGetNVMLVersion")
    yield numbered("nvmlSystemGetCudaDriverVersion_v2")
    yield numbered("nvmlDeviceGetCount_v2")
    with contextlib.suppress(AttributeError):
        library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle))
    yield "nvmlDeviceGetHandleByIndex_v2", lambda: 0 if handle.value else 6, lambda: 0
    if not handle.value:
        return
    for name in _TEXTS:
        yield texted(name, handle)
    for name in (*_NUMBER, *_MORE_NUMBERS):
        yield numbered(name, handle)
    for name, kinds in _BY_KIND.items():
        for kind in kinds:
            yield numbered(name, handle, ctypes.c_uint(kind))
    for name in _STRUCTURES:
        yield name, lambda name=name: int(getattr(library, name)(handle, room)), lambda: 0  # type: ignore[misc]
    for policy in nvml.POLICIES:
        yield (
            f"nvmlDeviceGetViolationStatus({policy})",
            lambda policy=policy: int(  # type: ignore[misc]
                library.nvmlDeviceGetViolationStatus(handle, ctypes.c_int(policy), room)
            ),
            lambda: 0,
        )
