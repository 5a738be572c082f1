"""NVIDIA's counters of energy, NVLink bytes, and time of lowered clocks. NVML counts each GPU's energy
(nvmlDeviceGetTotalEnergyConsumption), and the time in which a policy lowered its clocks
(nvmlDeviceGetViolationStatus), so two readings cover everything between them. The library is loaded by file
name; it starts no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"
POLICIES: Final = {0: "power", 1: "heat"}
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""
_NAME_BYTES: Final = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE."""
_LINK_DATA: Final = (138, 139)
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB of payload, per link or over all of them."""
_ALL_LINKS: Final = 0xFFFFFFFF
_KIB: Final = 1024.0


class _Violation(ctypes.Structure):
    """nvmlViolationTime_t: both in nanoseconds since the driver was loaded."""

    _fields_ = (("reference", ctypes.c_ulonglong), ("violation", ctypes.c_ulonglong))


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; only the unsigned long long of its union, used for throughputs."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("returned", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


@lru_cache(maxsize=4)
def _opened(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def slowed_s(name: str = LIBRARY) -> dict[str, float]:
    """Return slowed seconds since the driver was loaded by "GPU 0 (power)" and so on; empty without GPUs or
    NVML."""
    library = _opened(name)
    if library is None:
        return {}
    found: dict[str, float] = {}
    try:
        for index, handle in _gpus(library):
            for policy, word in POLICIES.items():
                time = _Violation()
                asked: Any = library.nvmlDeviceGetViolationStatus
                if asked(handle, ctypes.c_int(policy), ctypes.byref(time)) == 0:
                    found[f"GPU {index} ({word})"] = time.violation / 1e9
    except AttributeError:  # the library is too old for one call
        return {}
    return found


def energy_j(name: str = LIBRARY) -> dict[str, float]:
    """Return joules since the driver was loaded by GPU number and by UUID; GPUs before Volta do not count
    them."""
    library = _opened(name)
    if library is None:
        return {}
    found: dict[str, float] = {}
    try:
        for index, handle in _gpus(library):
            millijoules, uuid = ctypes.c_ulonglong(), ctypes.create_string_buffer(_NAME_BYTES)
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
                continue
            found[str(index)] = millijoules.value / 1e3
            if library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_NAME_BYTES)) == 0:
                found[uuid.value.decode("utf-8", "replace")] = millijoules.value / 1e3
    except AttributeError:  # the library is too old for one call
        return {}
    return found


def nvlink_bytes(name: str = LIBRARY) -> dict[int, tuple[float, float]]:
    """Return bytes sent and received over all NVLinks by GPU; without GPUs that have none."""
    library = _opened(name)
    if library is None:
        return {}
    found: dict[int, tuple[float, float]] = {}
    try:
        for index, handle in _gpus(library):
            fields = (_FieldValue * len(_LINK_DATA))()
            for place, field in enumerate(_LINK_DATA):
                fields[place].field, fields[place].scope = field, _ALL_LINKS
            asked: Any = library.nvmlDeviceGetFieldValues
            if asked(handle, ctypes.c_int(len(fields)), fields) != 0:
                continue
            if all(each.returned == 0 for each in fields):
                found[index] = (fields[0].value * _KIB, fields[1].value * _KIB)
    except AttributeError:  # the library is too old for this call
        return {}
    return found


def names(library_name: str = LIBRARY) -> list[str]:
    """Return the GPUs' names by index; empty without GPUs or NVML."""
    library = _opened(library_name)
    if library is None:
        return []
    found = []
    try:
        for _, handle in _gpus(library):
            text = ctypes.create_string_buffer(_NAME_BYTES)
            known = library.nvmlDeviceGetName(handle, text, ctypes.c_uint(_NAME_BYTES)) == 0
            found.append(text.value.decode("utf-8", "replace") if known else "")
    except AttributeError:
        return []
    return found


def _gpus(library: ctypes.CDLL) -> Iterator[tuple[int, ctypes.c_void_p]]:
    """Yield index and handle of each GPU that responds."""
    count = ctypes.c_uint()
    known = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    for index in range(count.value if known else 0):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            yield index, handle
