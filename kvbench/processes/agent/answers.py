"""Answers of an agent about its host: files, ports, web pages, environment, backends, data network. Slow
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
TAKEN_S: Final = 8.0
"""Time for a caller to connect to ``listen``, in seconds."""
_CHUNK: Final = bytes(1 << 18)


def listen(address: str) -> int:
    """Serve one caller at a free port of ``address``: echo its pings, then discard its data."""
    listener = socket.create_server((address, 0))
    listener.settimeout(TAKEN_S)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket) -> None:
    try:
        with listener:
            peer, _ = listener.accept()
        with peer:
            peer.settimeout(TAKEN_S)
            for _ in range(PINGS):
                peer.sendall(peer.recv(1))
            taken = 0
            while data := peer.recv(1 << 18):
                taken += len(data)
            peer.sendall(taken.to_bytes(8, "big"))
    except OSError:
        return  # the caller reports the error


def call(own: str, address: str, port: int) -> dict[str, Any]:
    """Measure from the address ``own``: median round trip in seconds and bytes per second, or the error."""
    try:
        with socket.create_connection((address, port), TAKEN_S / 2, (own, 0)) as peer:
            peer.settimeout(TAKEN_S)
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
            taken = int.from_bytes(peer.recv(8), "big")
            return {
                "rtt_s": sorted(times)[len(times) // 2],
                "bytes_per_s": taken / (time.monotonic() - began),
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


def _file_path(root: Path, asked: Frame) -> Path:
    path = Path(str(asked["path"]))
    if not path.is_absolute():
        return root / "files" / path.name
    if root not in path.resolve().parents:
        raise PermissionError(f"{path} is not in this agent's folder")
    return path


def _put(root: Path, asked: Frame) -> None:
    """Write one piece of a file; the first piece replaces the old content."""
    with _file_path(root, asked).open("wb" if asked.get("first") else "ab") as file:
        file.write(base64.b64decode(asked["data"]))


def _read(root: Path, asked: Frame) -> dict[str, Any]:
    with _file_path(root, asked).open("rb") as file:
        file.seek(int(asked["offset"]))
        return {"data": base64.b64encode(file.read(CHUNK_BYTES)).decode()}


def _forget(root: Path, asked: Frame) -> None:
    place = _file_path(root, asked)
    for path in place.parent.glob(f"{place.name}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _require_free(root: Path, asked: Frame) -> None:
    for name, port in asked["ports"]:
        require_free_port(str(asked["address"]), int(port), str(name))


@functools.cache
def _client() -> Any:
    from kvbench.hosts import web

    return web.client()


def _http(root: Path, asked: Frame) -> dict[str, Any]:
    """Make one HTTP request from this host. A library's exception is reported by its name."""
    import httpx

    try:
        response = _client().request(
            str(asked["method"]),
            str(asked["url"]),
            headers=[(str(name), str(value)) for name, value in asked.get("headers", ())],
            content=base64.b64decode(asked.get("body", "")),
            timeout=float(asked["timeout_s"]),
        )
    except httpx.TransportError as error:
        return {"http_error": type(error).__name__, "text": str(error)}
    kept = {"content-type": response.headers.get("content-type", "")}
    return {
        "status": response.status_code,
        "headers": kept,
        "body": base64.b64encode(response.content).decode(),
    }


def _environment(root: Path, asked: Frame) -> dict[str, Any]:
    from kvbench.hosts import environment

    return environment.describe()


def _engine_problem(root: Path, asked: Frame) -> dict[str, Any]:
    """Return reason and fix if an engine cannot run with a connector on this host, else empty."""
    from kvbench import connectors, engines

    engine = engines.get(str(asked["engine"]))
    options = engine.options_model.model_validate_json(str(asked["options"]))
    problem = engine.check(connectors.get(str(asked["connector"])), options)
    return {} if problem is None else {"reason": problem.reason, "fix": problem.fix}


def _engine_version(root: Path, asked: Frame) -> dict[str, Any]:
    from kvbench import engines

    engine = engines.get(str(asked["engine"]))
    return {"version": engine.version(engine.options_model.model_validate_json(str(asked["options"])))}


def _tagged(root: Path, asked: Frame) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"found": [vars(each) for each in tagged.tagged(set(asked["but"]))], "boot_id": boot}


def _end(root: Path, asked: Frame) -> dict[str, Any]:
    return {"ended": tagged.end((int(pid), str(tag)) for pid, tag in asked["wanted"])}


def _listen(root: Path, asked: Frame) -> dict[str, Any]:
    return {"port": listen(str(asked["address"]))}


def _call(root: Path, asked: Frame) -> dict[str, Any]:
    return call(str(asked["own"]), str(asked["address"]), int(asked["port"]))


def _nics(root: Path, asked: Frame) -> dict[str, Any]:
    from kvbench.hosts.nics.listing import listing

    return listing("rdma" if asked["kind"] == "rdma" else "tcp", list(asked.get("names", ())))


def _missing_backends(root: Path, asked: Frame) -> dict[str, Any]:
    from kvbench.transfer.parts.usable import lacking

    return lacking()


def _gpus(root: Path, asked: Frame) -> dict[str, Any]:
    """Return the used memory of each GPU in bytes (nvidia-smi), empty without GPUs. ``visible``: this agent's
    CUDA_VISIBLE_DEVICES, which its processes inherit; null if unset."""
    from kvbench.hosts.devices import output_of

    question = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = (output_of(question, 20.0) or "").splitlines()
    pairs = [line.split(",") for line in lines if line.count(",") == 1]
    used = {int(index): int(used) * 2**20 for index, used in pairs}
    return {"used_bytes": used, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


ANSWERS: Final[Mapping[str, Callable[[Path, Frame], Any]]] = {
    "put": _put,
    "read": _read,
    "forget": _forget,
    "require_free": _require_free,
    "free_ports": lambda root, asked: {
        "ports": free_ports(str(asked["address"]), [int(count) for count in asked["counts"]])
    },
    "listens": lambda root, asked: {"listens": listens(str(asked["address"]), int(asked["port"]))},
    "http": _http,
    "environment": _environment,
    "tagged": _tagged,
    "end": _end,
    "listen": _listen,
    "call": _call,
    "exists": lambda root, asked: {"exists": Path(str(asked["path"])).expanduser().exists()},
    "gpus": _gpus,
    "nics": _nics,
    "lacking": _missing_backends,
    "unusable": _engine_problem,
    "engine_version": _engine_version,
}
"""Request → function of the agent's folder and the frame. They may take long and run concurrently."""
