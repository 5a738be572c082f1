"""Ports of this machine: free, in use, listening."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

from kvbench.errors import LaunchError, PortInUseError

_ATTEMPTS: Final = 50


def require_free_port(host: str, port: int, name: str) -> None:
    """Raise PortInUseError if ``host:port`` cannot be bound, LaunchError if the address is not local."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise foreign_address(host) from error
            raise port_in_use(host, port, name) from error


def is_free(host: str, port: int) -> bool:
    """Whether ``host:port`` can be bound; port 0 checks the address only."""
    with suppress(LaunchError):
        require_free_port(host, port, "")
        return True
    return False


def is_local(host: str) -> bool:
    return is_free(host, 0)


def foreign_address(host: str) -> LaunchError:
    """Create the error for a listen address that is not local."""
    return LaunchError(
        f"{host} is not an address of this machine",
        hint="start it there: launcher: ssh with deployment.hosts, or use `kvbench launch --print`",
    )


def port_in_use(host: str, port: int, name: str) -> PortInUseError:
    return PortInUseError(
        f"port {host}:{port}, planned for {name}, is in use",
        hint="choose others with --set deployment.base_port=PORT (0: any free ones), or end what holds it",
    )


def free_ports(host: str, counts: Sequence[int]) -> list[int]:
    """Return the first of each count's consecutive free ports, without overlaps. Raises PortInUseError if
    there are none, LaunchError if the address is not local."""
    with ExitStack() as reserved:
        return [_free_range(host, count, reserved) for count in counts]


def _free_range(host: str, count: int, reserved: ExitStack) -> int:
    """First of ``count`` consecutive free ports, bound until ``reserved`` closes. Raises PortInUseError."""
    for _ in range(_ATTEMPTS):
        with ExitStack() as attempt:
            first = attempt.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                first.bind((host, 0))
            except OSError as error:
                raise foreign_address(host) from error
            start = int(first.getsockname()[1])
            try:
                for port in range(start + 1, start + count):
                    attempt.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind(
                        (host, port)
                    )
            except (OSError, OverflowError):
                continue
            reserved.push(attempt.pop_all())
            return start
    raise PortInUseError(
        f"found no {count} consecutive free ports on {host}", hint="choose with deployment.base_port"
    )


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
