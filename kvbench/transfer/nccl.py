"""NCCL through torch: send and receive between two ranks, GPU memory to GPU memory.

All sends, or all receives, of a transfer are one group call. NCCL has one order only, so transfers run one
after another. The transport is read from the library's log; ``protocol`` forces one: ``p2p`` (NVLink or
PCIe), ``shm``, ``tcp``, ``rdma``. Two ranks on one GPU need NCCL 2.30 or newer, experimental, by
NCCL_MULTI_RANK_GPU_ENABLE (NCCL's docs/userguide/source/env.rst); this tests the code path, not a network's
speed. NCCL_P2P_DISABLE does not keep them from P2P (2.31.2 on an H200). Therefore ``tcp`` and ``rdma`` set
another NCCL_HOSTID for each rank: NCCL, older versions too, then takes the network."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from kvbench.errors import MissingLibraryError, Problem, TransferError
from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.native import import_native, variable_value, version_of
from kvbench.transfer.parts.two_sided import LIBRARY_LIMIT_S, Part, TwoSidedEndpoint, TwoSidedPair, Way

INSTALL = "pip install torch, a build with CUDA"
NO_GPU = Problem(
    "no NVIDIA GPU here: NCCL moves GPU memory only", "use a machine with a GPU, or gloo for CPUs"
)
# Variables that leave one transport, by protocol (NCCL's docs/userguide/source/env.rst).
FORCED: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "p2p": {"NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
    "shm": {"NCCL_P2P_DISABLE": "1", "NCCL_NET": "Socket"},
    "tcp": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
    "rdma": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "IB"},
}
VIA = {"P2P": "p2p", "SHM": "shm", "NET/Socket": "tcp", "NET/IB": "rdma"}


def check() -> Problem | None:
    """Check for a GPU and torch; a child process checks that they fit together."""
    if not os.path.exists("/dev/nvidiactl"):
        return NO_GPU
    if importlib.util.find_spec("torch") is None:
        return Problem("torch is not installed", INSTALL)
    return None


def load() -> dict[str, str]:
    torch: Any = import_native("torch", INSTALL)
    distributed: Any = import_native("torch.distributed", INSTALL)
    if not distributed.is_available() or not distributed.is_nccl_available():
        raise MissingLibraryError("this build of torch has no NCCL", hint=INSTALL)
    if not torch.cuda.is_available():
        raise MissingLibraryError("torch finds no usable GPU", hint="see nvidia-smi for the driver's state")
    return {"name": "nccl", "version": _version(torch)}


def _version(torch: Any) -> str:
    """Return the version of the library in use; torch itself names the one it was built with."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # linked into torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    number = ctypes.c_int(0)
    library.ncclGetVersion(ctypes.byref(number))
    # NCCL_VERSION since 2.9 (nccl.h): 23102 is 2.31.2.
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def env(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the forced transport, the NICs, and a log level that names the transport."""
    protocol = str(options.get("protocol", "auto"))
    names = ",".join(str(nic["name"]) for nic in options.get("nics") or () if nic.get("name"))
    variables = {
        **FORCED.get(protocol, {}),
        "NCCL_DEBUG": variable_value("NCCL_DEBUG", None, "INFO"),
        "NCCL_MULTI_RANK_GPU_ENABLE": variable_value("NCCL_MULTI_RANK_GPU_ENABLE", None, "1"),
    }
    if protocol in ("tcp", "rdma"):
        variables["NCCL_HOSTID"] = variable_value("NCCL_HOSTID", None, str(options.get("role", "")))
    if names:
        # "=" requests exactly these names.
        variables["NCCL_IB_HCA" if protocol == "rdma" else "NCCL_SOCKET_IFNAME"] = f"={names}"
    return variables


def transport_in_log(lines: Sequence[str]) -> str:
    """Return the transport of the channels in NCCL's log, or an empty text."""
    for line in reversed(lines):
        if found := re.search(r"Channel \S+ : .* via (P2P|SHM|NET/Socket|NET/IB)", line):
            return VIA[found.group(1)]
    return ""


class _Memory:
    """GPU memory for torch: CUDA array interface, version 3, of plain bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class NcclPair(TwoSidedPair):
    def __init__(self, torch: Any, group: Any, rank: int, whole: Any) -> None:
        self._torch = torch
        self._group = group
        self._peer = 1 - rank
        self._whole = whole
        self._stream = torch.cuda.Stream(whole.device)

    def move(self, way: Way, lanes: Sequence[Sequence[Part]], channel: int) -> None:
        device = self._whole.device
        with self._torch.cuda.device(device), self._torch.cuda.stream(self._stream):
            call = self._group.send if way == "send" else self._group.recv
            self._group._start_coalescing()
            for lane in lanes:
                for offset, nbytes in lane:
                    call([self._whole[offset : offset + nbytes]], self._peer, 0)
            work = self._group._end_coalescing()
            # This stream waits for the library's; then wait for this stream.
            work.wait()
        self._stream.synchronize()

    def close(self) -> None:
        # Not shut down: a communicator may wait for a lost rank.
        pass


class NcclEndpoint(TwoSidedEndpoint):
    max_threads = 1

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        protocol = str(options.get("protocol", "auto"))
        if protocol not in FORCED:
            raise TransferError(f"nccl knows no protocol {protocol!r}; there are: {', '.join(FORCED)}")
        self._protocol = protocol
        self._device = int(options.get("cuda_device", 0))

    def bind(self, address: int, layout: Layout) -> None:
        libcuda = ctypes.CDLL("libcuda.so.1")
        kind = ctypes.c_uint(0)
        # CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_MEMORYTYPE_DEVICE = 2 (cuda.h)
        code = libcuda.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_uint64(address))
        if code != 0 or kind.value != 2:
            raise TransferError("nccl moves GPU memory only: use --memory cuda")
        memory = _Memory(address, layout.nbytes)
        self._whole = self._torch.as_tensor(memory, device=f"cuda:{self._device}")

    def pair(self, store: Any, rank: int) -> TwoSidedPair:
        options = self._distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LIBRARY_LIMIT_S)
        group = self._distributed.ProcessGroupNCCL(store, rank, 2, options)
        # Ranks connect now, not within the first transfer.
        group.eager_connect_single_device(self._whole.device)
        return NcclPair(self._torch, group, rank, self._whole)

    def transport(self) -> str:
        return transport_in_log(self.native_log()) or f"{self._protocol} (configured)"

    def library(self) -> dict[str, str]:
        return {**version_of("torch"), **load()}


BACKEND = Backend(
    name="nccl",
    title="NCCL (torch)",
    check=check,
    open=NcclEndpoint,
    env=env,
    load=load,
    protocols=tuple(FORCED),
    needs={"rdma": "rdma"},
    memories=("cuda",),
    optional=True,
)
