"""Gloo, torch's library for CPUs: send and receive between two processes over TCP, without NCCL. Each
concurrent transfer has separate tags. With several NICs each is a device of the group; the library chooses a
device by tag, so a transfer's bytes use as many tags as NICs."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from kvbench.errors import MissingLibraryError, Problem
from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.native import import_native, version_of
from kvbench.transfer.parts.two_sided import (
    INSTALL,
    LIBRARY_LIMIT_S,
    Part,
    TwoSidedEndpoint,
    TwoSidedPair,
    Way,
)


def check() -> Problem | None:
    """Check that torch is installed; a child process checks that it loads with gloo."""
    if importlib.util.find_spec("torch") is None:
        return Problem("torch is not installed", INSTALL)
    return None


def load() -> dict[str, str]:
    import_native("torch", INSTALL)
    distributed: Any = import_native("torch.distributed", INSTALL)
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise MissingLibraryError("this build of torch has no gloo", hint=INSTALL)
    return version_of("torch")


class GlooPair(TwoSidedPair):
    def __init__(self, group: Any, rank: int, whole: Any, lanes: int) -> None:
        self._group = group
        self._peer = 1 - rank
        self._whole = whole
        self._lanes = lanes

    def move(self, way: Way, lanes: Sequence[Sequence[Part]], channel: int) -> None:
        works = []
        for lane, parts in enumerate(lanes):
            # The library uses device number tag modulo device count. Parts of a lane share
            # one tag and arrive in order.
            tag = channel * self._lanes + lane
            for offset, nbytes in parts:
                tensor = [self._whole[offset : offset + nbytes]]
                call = self._group.send if way == "send" else self._group.recv
                works.append(call(tensor, self._peer, tag))
        for work in works:
            work.wait()

    def close(self) -> None:
        self._group = None


class GlooEndpoint(TwoSidedEndpoint):
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._nics = list(options.get("nics") or ())
        self.lanes = max(len(self._nics), 1)
        super().__init__(options)

    def bind(self, address: int, layout: Layout) -> None:
        raw = (ctypes.c_uint8 * layout.nbytes).from_address(address)
        self._whole = self._torch.frombuffer(raw, dtype=self._torch.uint8)

    def _devices(self) -> list[Any]:
        create = self._distributed.ProcessGroupGloo.create_device
        if not self._nics:
            return [create(hostname=self._host)]
        return [
            create(hostname=str(nic["address"])) if nic.get("address") else create(interface=str(nic["name"]))
            for nic in self._nics
        ]

    def pair(self, store: Any, rank: int) -> TwoSidedPair:
        options = self._distributed.ProcessGroupGloo._Options()
        options._devices = self._devices()
        options._timeout = timedelta(seconds=LIBRARY_LIMIT_S)
        group = self._distributed.ProcessGroupGloo(store, rank, 2, options)
        return GlooPair(group, rank, self._whole, self.lanes)

    def transport(self) -> str:
        return "gloo tcp"

    def library(self) -> dict[str, str]:
        return version_of("torch")


BACKEND = Backend(name="gloo", title="Gloo (torch)", check=check, open=GlooEndpoint, load=load, optional=True)
