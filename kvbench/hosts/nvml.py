"""How long NVIDIA's GPUs have been slowed down for power or heat, as the driver's own library reports it.

NVML keeps for each GPU the time for which a policy has lowered its clocks (nvmlDeviceGetViolationStatus), so
two readings cover everything between them. The library is loaded by its file name and asked a few plain
questions; it starts no CUDA context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"
POLICIES: Final = {0: "power", 1: "heat"}
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""
_NAME_BYTES: Final = 96


class _Violation(ctypes.Structure):
    """nvmlViolationTime_t: both in nanoseconds since the driver was loaded."""

    _fields_ = (("reference", ctypes.c_ulonglong), ("violation", ctypes.c_ulonglong))


@lru_cache(maxsize=4)
def _opened(name: str) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(name)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def slowed_s(name: str = LIBRARY) -> dict[str, float]:
    """Seconds by "GPU 0 (power)" and the like since the driver was loaded; empty without GPUs or NVML."""
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
    except AttributeError:  # a library too old for one of the questions
        return {}
    return found


def names(library_name: str = LIBRARY) -> list[str]:
    """The GPUs' names, by index; empty without GPUs or NVML."""
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
    """Index and handle of each GPU that can be asked."""
    count = ctypes.c_uint()
    known = library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    for index in range(count.value if known else 0):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            yield index, handle
