"""NVIDIA's driver, asked through its own libraries: is it there, and what does each NVML call return."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Final

from kvbench.hosts import nvml
from tools.gpu.result import CheckFailedError, Figures

CUDA: Final = "libcuda.so.1"
NVML: Final = nvml.LIBRARY
_TEXT_BYTES: Final = 96
_ROOM_BYTES: Final = 4096
"""More than any of the structures asked for has."""

_SYSTEM: Final = {
    "nvmlInit_v2": "",
    "nvmlSystemGetDriverVersion": "text",
    "nvmlSystemGetNVMLVersion": "text",
    "nvmlSystemGetCudaDriverVersion_v2": "number",
    "nvmlDeviceGetCount_v2": "number",
}
"""NVML call → what it writes."""
_DEVICE: Final = {
    "text": ("Name", "UUID", "VbiosVersion", "Serial"),
    "number": (
        *("Index", "PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption", "PerformanceState"),
        *("CurrentClocksThrottleReasons", "CurrPcieLinkGeneration", "CurrPcieLinkWidth"),
        *("PersistenceMode", "MinorNumber", "NumaNodeId"),
    ),
    "structure": ("MemoryInfo", "UtilizationRates", "PciInfo_v3"),
}
"""What a call writes → calls of a GPU, without ``nvmlDeviceGet``."""
_BY_KIND: Final = {
    "ClockInfo": (0, 1, 2),  # NVML_CLOCK_GRAPHICS, _SM, _MEM
    "Temperature": (0,),  # NVML_TEMPERATURE_GPU
    "PcieThroughput": (0, 1),  # NVML_PCIE_UTIL_TX_BYTES, _RX_BYTES
    "NvLinkState": (0, 1),  # by link
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
    said = {name: _said(library, name, kind) for name, kind in _SYSTEM.items()}
    handle = ctypes.c_void_p()
    with contextlib.suppress(AttributeError):
        library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle))
    said["nvmlDeviceGetHandleByIndex_v2"] = 0 if handle.value else "code 6"
    calls: list[tuple[str, str, Any]] = [(n, kind, None) for kind, names in _DEVICE.items() for n in names]
    calls += [(n, "number", ctypes.c_uint(kind)) for n, kinds in _BY_KIND.items() for kind in kinds]
    calls += [("ViolationStatus", "structure", ctypes.c_int(policy)) for policy in nvml.POLICIES]
    for name, kind, which in calls if handle.value else ():
        shown = f"nvmlDeviceGet{name}" + ("" if which is None else f"({which.value})")
        before = (handle,) if which is None else (handle, which)
        said[shown] = _said(library, f"nvmlDeviceGet{name}", kind, *before)
    said["kvbench slowed_s"] = nvml.slowed_s(library_name)
    said["kvbench nvlink_bytes"] = {str(gpu): both for gpu, both in nvml.nvlink_bytes(library_name).items()}
    said["kvbench energy_j"] = nvml.energy_j(library_name)
    said["kvbench names"] = nvml.names(library_name)
    if isinstance(said["nvmlInit_v2"], str):
        raise CheckFailedError(f"nvmlInit_v2: {said['nvmlInit_v2']}", said)
    return said


def _said(library: Any, name: str, kind: str, *before: Any) -> Any:
    """Return what a call wrote, 0 for a structure, or its code where that is not 0."""
    number, text = ctypes.c_ulonglong(), ctypes.create_string_buffer(_TEXT_BYTES)
    written: dict[str, tuple[Any, ...]] = {
        "": (),
        "number": (ctypes.byref(number),),
        "text": (text, ctypes.c_uint(_TEXT_BYTES)),
        "structure": (ctypes.create_string_buffer(_ROOM_BYTES),),
    }
    try:
        code = int(getattr(library, name)(*before, *written[kind]))
    except AttributeError:
        return "not in this library"
    if code:
        return f"code {code}"
    return {"number": number.value, "text": text.value.decode("utf-8", "replace")}.get(kind, 0)
