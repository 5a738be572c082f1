"""NVIDIA's counters of energy, NVLink bytes, and time of lowered clocks. NVML counts each GPU's energy
(nvmlDeviceGetTotalEnergyConsumption), and the time in which a policy lowered its clocks
(nvmlDeviceGetViolationStatus), so two readings cover everything between them. The library is loaded by file
name; it starts no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, TypeVar

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
    """Return slowed seconds since the driver's start by "GPU 0 (power)" etc.; empty without NVML."""

    def read(library: ctypes.CDLL, index: int, gpu: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        for policy, word in POLICIES.items():
            time = _Violation()
            if library.nvmlDeviceGetViolationStatus(gpu, ctypes.c_int(policy), ctypes.byref(time)) == 0:
                yield f"GPU {index} ({word})", time.violation / 1e9

    return dict(_of_each_gpu(name, read))


def energy_j(name: str = LIBRARY) -> dict[str, float]:
    """Return joules since the driver's start by GPU number and UUID; none before Volta."""

    def read(library: ctypes.CDLL, index: int, gpu: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        millijoules, uuid = ctypes.c_ulonglong(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules)) == 0:
            yield str(index), millijoules.value / 1e3
            if library.nvmlDeviceGetUUID(gpu, uuid, ctypes.c_uint(_NAME_BYTES)) == 0:
                yield uuid.value.decode("utf-8", "replace"), millijoules.value / 1e3

    return dict(_of_each_gpu(name, read))


def nvlink_bytes(name: str = LIBRARY) -> dict[int, tuple[float, float]]:
    """Return bytes sent and received over all NVLinks by GPU; without GPUs that have none."""

    def read(
        library: ctypes.CDLL, index: int, gpu: ctypes.c_void_p
    ) -> Iterator[tuple[int, tuple[float, float]]]:
        fields = (_FieldValue * len(_LINK_DATA))()
        for place, field in enumerate(_LINK_DATA):
            fields[place].field, fields[place].scope = field, _ALL_LINKS
        known = library.nvmlDeviceGetFieldValues(gpu, ctypes.c_int(len(fields)), fields) == 0
        if known and all(field.returned == 0 for field in fields):
            yield index, (fields[0].value * _KIB, fields[1].value * _KIB)

    return dict(_of_each_gpu(name, read))


def names(library_name: str = LIBRARY) -> list[str]:
    """Return the GPUs' names by index; empty without GPUs or NVML."""

    def read(library: ctypes.CDLL, _: int, gpu: ctypes.c_void_p) -> Iterator[str]:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        known = library.nvmlDeviceGetName(gpu, text, ctypes.c_uint(_NAME_BYTES)) == 0
        yield text.value.decode("utf-8", "replace") if known else ""

    return _of_each_gpu(library_name, read)


Value = TypeVar("Value")


def _of_each_gpu(
    name: str, read: Callable[[ctypes.CDLL, int, ctypes.c_void_p], Iterator[Value]]
) -> list[Value]:
    """Return what each GPU that responds yields; empty without NVML, or if it is too old for a call."""
    library, found = _opened(name), list[Value]()
    if library is None:
        return []
    try:
        count = ctypes.c_uint()
        known = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        for index in range(count.value if known else 0):
            gpu = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(gpu)) == 0:
                found += read(library, index, gpu)
    except AttributeError:
        return []
    return found
