"""What an agent answers about its host: files, ports, web pages, environment, abilities, data network.

What takes long to import is imported when it is first needed: until the agent is there, a whole run waits.
"""

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
"""Somebody connects within this, or nobody does."""
_CHUNK: Final = bytes(1 << 18)


def listen(address: str) -> int:
    """Answer one caller at a free port of ``address``: echo its pings, then swallow its flow."""
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
        return  # the caller reports what it met


def call(own: str, address: str, port: int) -> dict[str, Any]:
    """From the address ``own``: round-trip seconds (the median) and bytes a second; or what went wrong."""
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
"""The folder from which kvbench is imported here."""


def hello() -> dict[str, Any]:
    """The first frame: who this is, and which kvbench."""
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


def _place(root: Path, asked: Frame) -> Path:
    """A file of this agent's folder: by its bare name among ``files``, or by its path below the folder."""
    path = Path(str(asked["path"]))
    if not path.is_absolute():
        return root / "files" / path.name
    if root not in path.resolve().parents:
        raise PermissionError(f"{path} is not in this agent's folder")
    return path


def _put(root: Path, asked: Frame) -> None:
    """One piece of a file; the first replaces what was there."""
    with _place(root, asked).open("wb" if asked.get("first") else "ab") as file:
        file.write(base64.b64decode(asked["data"]))


def _read(root: Path, asked: Frame) -> dict[str, Any]:
    """One piece of a file, from ``offset`` on; empty at its end."""
    with _place(root, asked).open("rb") as file:
        file.seek(int(asked["offset"]))
        return {"data": base64.b64encode(file.read(CHUNK_BYTES)).decode()}


def _forget(root: Path, asked: Frame) -> None:
    """Removes a file, and what was written of it in part beside it."""
    place = _place(root, asked)
    for path in place.parent.glob(f"{place.name}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _require_free(root: Path, asked: Frame) -> None:
    for name, port in asked["ports"]:
        require_free_port(str(asked["address"]), int(port), str(name))


def _free_ports(root: Path, asked: Frame) -> dict[str, Any]:
    return {"ports": free_ports(str(asked["address"]), [int(count) for count in asked["counts"]])}


def _listens(root: Path, asked: Frame) -> dict[str, Any]:
    return {"listens": listens(str(asked["address"]), int(asked["port"]))}


@functools.cache
def _client() -> Any:
    from kvbench.hosts import web

    return web.client()


def _http(root: Path, asked: Frame) -> dict[str, Any]:
    """One HTTP request from this host; what the library raises is reported by its name."""
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


def _unusable(root: Path, asked: Frame) -> dict[str, Any]:
    """Why an engine cannot run with a connector here: reason and fix, empty if it can."""
    from kvbench import connectors, engines

    engine = engines.get(str(asked["engine"]))
    options = engine.options_model.model_validate_json(str(asked["options"]))
    problem = engine.check(connectors.get(str(asked["connector"])), options)
    return {} if problem is None else {"reason": problem.reason, "fix": problem.fix}


def _engine_version(root: Path, asked: Frame) -> dict[str, Any]:
    """The version of an engine that is installed here."""
    from kvbench import engines

    engine = engines.get(str(asked["engine"]))
    return {"version": engine.version(engine.options_model.model_validate_json(str(asked["options"])))}


def _tagged(root: Path, asked: Frame) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"found": [each.to_json() for each in tagged.tagged(set(asked["but"]))], "boot_id": boot}


def _end(root: Path, asked: Frame) -> dict[str, Any]:
    return {"ended": tagged.end((int(pid), str(tag)) for pid, tag in asked["wanted"])}


def _listen(root: Path, asked: Frame) -> dict[str, Any]:
    return {"port": listen(str(asked["address"]))}


def _call(root: Path, asked: Frame) -> dict[str, Any]:
    return call(str(asked["own"]), str(asked["address"]), int(asked["port"]))


def _exists(root: Path, asked: Frame) -> dict[str, Any]:
    return {"exists": Path(str(asked["path"])).expanduser().exists()}


def _nics(root: Path, asked: Frame) -> dict[str, Any]:
    """The NICs of this host for a kind of transfer, as ``nics.listing`` has them."""
    from kvbench.hosts.nics.listing import listing

    return listing("rdma" if asked["kind"] == "rdma" else "tcp", list(asked.get("names", ())))


def _lacking(root: Path, asked: Frame) -> dict[str, Any]:
    """Which transfer backends cannot run here, and why."""
    from kvbench.transfer.parts.usable import lacking

    return lacking()


def _gpus(root: Path, asked: Frame) -> dict[str, Any]:
    """Memory of each GPU that is in use, in bytes, as nvidia-smi reports it; empty without GPUs.

    ``visible``: this agent's CUDA_VISIBLE_DEVICES, which processes inherit from it; null where it is unset.
    """
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
    "free_ports": _free_ports,
    "listens": _listens,
    "http": _http,
    "environment": _environment,
    "tagged": _tagged,
    "end": _end,
    "listen": _listen,
    "call": _call,
    "exists": _exists,
    "gpus": _gpus,
    "nics": _nics,
    "lacking": _lacking,
    "unusable": _unusable,
    "engine_version": _engine_version,
}
"""Question → answer, given the agent's folder. They may take long and are asked beside each other."""
