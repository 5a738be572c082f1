"""The place of a process on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvbench.launchers.parts.sockets import free_ports, listens, require_free_port


class Here:
    """``launchers.base.Far`` for this machine, where there is nothing to bring."""

    host: Final = ""
    clock_ahead_s: Final = 0.0

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def cpu_s(self, pid: int) -> float | None:
        return None

    def path_of(self, path: Path) -> str:
        return str(path)

    def put(self, path: Path) -> None:
        return None

    def fetch(self, path: Path) -> None:
        return None

    def forget(self, path: Path) -> None:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        for name, port in ports:
            require_free_port(address, port, name)

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return free_ports(address, counts)

    def listens(self, address: str, port: int) -> bool:
        return listens(address, port)
