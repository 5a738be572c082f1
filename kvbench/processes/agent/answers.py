"""Answer requests about the agent's host: files, ports, web pages, environment, backends, data network. Slow
imports are inside functions: the whole run waits until the agent is up."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvbench.launchers.agents.channel import CHUNK_BYTES, PROTOCOL
from kvbench.launchers.parts import tagged
from kvbench.launchers.parts.sockets import free_ports, listens, require_free_port
from kvbench.version import __version__

PINGS: Final = 20
FLOW_S: Final = 0.5
PEER_TIMEOUT_S: Final = 8.0
"""Longest wait for the peer to connect or to answer, in seconds."""
_CHUNK: Final = bytes(1 << 18)


def listen(address: str) -> int:
    """Serve one caller at a free port of ``address``: echo its pings, then discard its data."""
    listener = socket.create_server((address, 0))
    listener.settimeout(PEER_TIMEOUT_S)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket) -> None:
    try:
        with listener:
            peer, _ = listener.accept()
        with peer:
            peer.settimeout(PEER_TIMEOUT_S)
            for _ in range(PINGS):
                peer.sendall(peer.recv(1))
            received_bytes = 0
            while data := peer.recv(1 << 18):
                received_bytes += len(data)
            peer.sendall(received_bytes.to_bytes(8, "big"))
    except OSError:
        return  # the caller reports the error


def call(local_address: str, address: str, port: int) -> dict[str, Any]:
    """Measure median round trip (s) and bytes per second from ``local_address``, or return the error."""
    try:
        with socket.create_connection((address, port), PEER_TIMEOUT_S / 2, (local_address, 0)) as peer:
            peer.settimeout(PEER_TIMEOUT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(PINGS):
                began = time.monotonic()
                peer.sendall(b"x")
                if not peer.recv(1):
                    return {"error": "the connection was closed"}
                times.append(time.monotonic() - began)
            began = time.monotonic()
            while time.monotonic() - began < FLOW_S:
                peer.sendall(_CHUNK)
            peer.shutdown(socket.SHUT_WR)
            received_bytes = int.from_bytes(peer.recv(8), "big")
            return {
                "rtt_s": sorted(times)[len(times) // 2],
                "bytes_per_s": received_bytes / (time.monotonic() - began),
            }
    except OSError as error:
        return {"error": error.strerror or type(error).__name__}


Frame = Mapping[str, Any]

CODE: Final = str(Path(__file__).resolve().parents[3])
"""Folder from which kvbench is imported on this host."""


def hello() -> dict[str, Any]:
    return {
        "event": "hello",
        "protocol": PROTOCOL,
        "version": __version__,
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "code": CODE,
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
        "monotonic_s": time.monotonic(),
        "unix_s": time.time(),
    }


def _file_path(root: Path, frame: Frame) -> Path:
    path = Path(str(frame["path"]))
    if not path.is_absolute():
        return root / "files" / path.name
    if root not in path.resolve().parents:
        raise PermissionError(f"{path} is not in this agent's folder")
    return path


def _put(root: Path, frame: Frame) -> None:
    """Write one piece of a file; the first piece replaces the old content."""
    with _file_path(root, frame).open("wb" if frame.get("first") else "ab") as file:
        file.write(base64.b64decode(frame["data"]))


def _read(root: Path, frame: Frame) -> dict[str, Any]:
    with _file_path(root, frame).open("rb") as file:
        file.seek(int(frame["offset"]))
        return {"data": base64.b64encode(file.read(CHUNK_BYTES)).decode()}


def _forget(root: Path, frame: Frame) -> None:
    path = _file_path(root, frame)
    for match in path.parent.glob(f"{path.name}*"):
        with contextlib.suppress(OSError):
            match.unlink()


def _require_free(root: Path, frame: Frame) -> None:
    for name, port in frame["ports"]:
        require_free_port(str(frame["address"]), int(port), str(name))


@functools.cache
def _client() -> Any:
    from kvbench.hosts import web

    return web.client()


def _http(root: Path, frame: Frame) -> dict[str, Any]:
    """Make one HTTP request from this host. A library's exception is reported by its name."""
    import httpx

    try:
        response = _client().request(
            str(frame["method"]),
            str(frame["url"]),
            headers=[(str(name), str(value)) for name, value in frame.get("headers", ())],
            content=base64.b64decode(frame.get("body", "")),
            timeout=float(frame["timeout_s"]),
        )
    except httpx.TransportError as error:
        return {"http_error": type(error).__name__, "text": str(error)}
    kept = {"content-type": response.headers.get("content-type", "")}
    return {
        "status": response.status_code,
        "headers": kept,
        "body": base64.b64encode(response.content).decode(),
    }


def _environment(root: Path, frame: Frame) -> dict[str, Any]:
    from kvbench.hosts import environment

    return environment.describe()


def _engine_problem(root: Path, frame: Frame) -> dict[str, Any]:
    """Return reason and fix if an engine cannot run with a connector on this host, else empty."""
    from kvbench import connectors, engines

    engine = engines.get(str(frame["engine"]))
    options = engine.options_model.model_validate_json(str(frame["options"]))
    problem = engine.check(connectors.get(str(frame["connector"])), options)
    return {} if problem is None else {"reason": problem.reason, "fix": problem.fix}


def _engine_version(root: Path, frame: Frame) -> dict[str, Any]:
    from kvbench import engines

    engine = engines.get(str(frame["engine"]))
    return {"version": engine.version(engine.options_model.model_validate_json(str(frame["options"])))}


def _tagged(root: Path, frame: Frame) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"found": [vars(process) for process in tagged.tagged(set(frame["but"]))], "boot_id": boot}


def _end(root: Path, frame: Frame) -> dict[str, Any]:
    return {"ended": tagged.end((int(pid), str(tag)) for pid, tag in frame["wanted"])}


def _listen(root: Path, frame: Frame) -> dict[str, Any]:
    return {"port": listen(str(frame["address"]))}


def _call(root: Path, frame: Frame) -> dict[str, Any]:
    return call(str(frame["own"]), str(frame["address"]), int(frame["port"]))


def _nics(root: Path, frame: Frame) -> dict[str, Any]:
    from kvbench.hosts.nics.listing import listing

    return listing("rdma" if frame["kind"] == "rdma" else "tcp", list(frame.get("names", ())))


def _missing_backends(root: Path, frame: Frame) -> dict[str, Any]:
    from kvbench.transfer.parts.usable import lacking

    return lacking()


def _gpus(root: Path, frame: Frame) -> dict[str, Any]:
    """Return the used memory of each GPU in bytes (nvidia-smi), empty without GPUs. ``visible``: this agent's
    CUDA_VISIBLE_DEVICES, which its processes inherit; null if unset."""
    from kvbench.hosts.devices import output_of

    command = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = (output_of(command, 20.0) or "").splitlines()
    pairs = [line.split(",") for line in lines if line.count(",") == 1]
    used = {int(index): int(used) * 2**20 for index, used in pairs}
    return {"used_bytes": used, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


ANSWERS: Final[Mapping[str, Callable[[Path, Frame], Any]]] = {
    "put": _put,
    "read": _read,
    "forget": _forget,
    "require_free": _require_free,
    "free_ports": lambda root, frame: {
        "ports": free_ports(str(frame["address"]), [int(count) for count in frame["counts"]])
    },
    "listens": lambda root, frame: {"listens": listens(str(frame["address"]), int(frame["port"]))},
    "http": _http,
    "environment": _environment,
    "tagged": _tagged,
    "end": _end,
    "listen": _listen,
    "call": _call,
    "exists": lambda root, frame: {"exists": Path(str(frame["path"])).expanduser().exists()},
    "gpus": _gpus,
    "nics": _nics,
    "lacking": _missing_backends,
    "unusable": _engine_problem,
    "engine_version": _engine_version,
}
"""Request → function of the agent's folder and the frame; the functions may be slow and run concurrently."""
