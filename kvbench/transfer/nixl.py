"""NIXL with the UCX plugin, or with its POSIX plugin to and from a file that the target owns.

Design for UCX, and its reasons (measured with nixl-cu12 1.5.1 over UCX_TLS=tcp on two cores):

- The agent's progress thread busy-polls (the Python API fixes its delay at 0) and uses a core per agent even
  when idle. It stays off, and the child's loop makes progress, also at a TCP target. UCX's TCP transport
  keeps its sockets in an epoll set, on whose descriptor the loop waits. 2 MiB written take 0.4 ms this way,
  against 0.8 ms with a sleeping progress thread and 1.8 ms with polling every 0.5 ms; idle CPU time is 0.
- Transports without such descriptors (cma, shared memory) are polled.
- As in vLLM's connector, blocks are chosen by index from a table prepared once per peer, and NIXL merges
  those adjacent on both sides. kvbench sorts them first unless ``merge`` is off. Several agents use byte
  spans instead.
- A transfer to a frozen peer never ends by NIXL's limits: kvbench has a deadline.
- Several NICs over TCP: an agent with several rails speeds up writes but not reads, which UCX sends as
  messages on one lane. So there is one agent per NIC (unless option ``op`` is write), connected to the peer's
  agent of the same index, and bytes are split evenly. Over RDMA the rails of one agent serve both.
- GPU memory: ``cuda_ipc`` copies within one host. Other protocols exclude it, since UCX would use it for
  writes on any network. cuda_copy only copies to host memory and back.
- Shared memory (``shm``) needs UCX's error handling off: a killed peer is not detected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import Problem, TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket, TransferNic, nics_of, protocol_of
from kvbench.transfer.parts.blocks import MIN_PART_BYTES, BlockSpan, in_order, paired_spans, split_spans
from kvbench.transfer.parts.copying import Neighbour, file_of
from kvbench.transfer.parts.native import variable_value, version_of
from kvbench.transfer.parts.nixlagent import (
    DISTRIBUTIONS,
    INSTALL,
    AgentsEndpoint,
    NixlAgent,
    NixlPlace,
    import_api,
    installed,
)


@dataclass
class _FilePeer:
    process: Neighbour
    fd: int
    layout: Layout
    table: Any


class FileEndpoint(AgentsEndpoint):
    """A file of the target's that the initiator writes and reads by the POSIX plugin. The file has no name;
    its folder is the option ``nixl_folder``, else the system's temporary folder. The page cache is used: this
    measures plugin and file system, not a disk."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._agents = [NixlAgent("POSIX", {})]
        self._peers: dict[str, _FilePeer] = {}
        folder = options.get("nixl_folder") or None
        try:
            self._file = tempfile.TemporaryFile(prefix="kvbench-nixl-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise TransferError(
                f"cannot make a file in {folder or tempfile.gettempdir()}: {error}"
            ) from error

    def register(self, address: int, layout: Layout) -> None:
        self._memory = memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B")
        self._agents[0].register(address, layout.nbytes, "DRAM")
        os.ftruncate(self._file.fileno(), layout.nbytes)
        self._address, self._layout = address, layout
        self._table = self._agents[0].table("", address, layout, "DRAM")

    def reshape(self, layout: Layout) -> bool:
        self._agents[0].drop_table(self._table)
        self._table = self._agents[0].table("", self._address, layout, "DRAM")
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        return {"memory": file_of(self._file.fileno())}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        self.forget(peer["id"])
        agent, layout = self._agents[0], Layout(**peer["layout"])
        process = Neighbour(int(peer["memory"]["pid"]))
        fd = process.open(peer["memory"])
        agent.register(0, layout.nbytes, "FILE", fd)
        self._peers[peer["id"]] = _FilePeer(
            process, fd, layout, agent.table(agent.name, 0, layout, "FILE", fd)
        )

    def forget(self, peer: str) -> None:
        if (known := self._peers.pop(peer, None)) is not None:
            self._agents[0].drop_table(known.table)
            known.process.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        agent, known = self._agents[0], self._peers[peer]
        parts, descriptors = [], 0
        if local:
            ours, theirs = in_order(local, remote) if self._merge else (local, remote)
            side, peer_side = (self._table, self._layout, ours), (known.table, known.layout, theirs)
            handle, descriptors = agent.by_block(op, side, peer_side)
            parts.append((agent, handle))
        ticket = self.ticket(peer, op, len(local), began, parts)
        ticket.descriptors = descriptors
        return ticket

    def start(self, ticket: Ticket) -> None:
        if ticket.peer in self._peers:
            self._peers[ticket.peer].process.check()
        super().start(ticket)

    def collect(self, blocks: Sequence[int]) -> None:
        for view, at in self._views(blocks):
            os.preadv(self._file.fileno(), [view], at)

    def offer(self, blocks: Sequence[int]) -> None:
        for view, at in self._views(blocks):
            os.pwritev(self._file.fileno(), [view], at)

    def _views(self, blocks: Sequence[int]) -> list[tuple[memoryview, int]]:
        offsets = [self._layout.offset(r, b) for r in range(self._layout.regions) for b in blocks]
        return [(self._memory[at : at + self._layout.block_bytes], at) for at in offsets]

    def transport(self) -> str:
        return "posix (file)"

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        self._agents[0].unregister()
        self._file.close()


TLS = {"tcp": "tcp", "rdma": "ib", "cma": "cma,tcp", "shm": "posix,self", "cuda_ipc": "cuda_ipc,tcp"}
"""UCX_TLS by protocol, without alternatives. Memory copies (cma, cuda_ipc) need tcp for messages."""
LOOPBACK = ("127.", "localhost")


def ucx_env(options: Mapping[str, Any], protocol: str) -> dict[str, str]:
    """Return UCX's variables with explicit transports, since it would choose cma on one host."""
    if protocol not in TLS:
        return {}
    nics = nics_of(options)
    on_gpu = options.get("memory") == "cuda"
    tls = TLS[protocol] + (",cuda_copy" if on_gpu else "")
    chosen = variable_value("UCX_TLS", tls if options.get("protocol") else None, tls)
    variables = {
        "UCX_TLS": chosen if on_gpu else with_cuda_copy(chosen, nvidia_gpus()),
        # Lowest level at which UCX logs each connection's transport.
        "UCX_LOG_LEVEL": variable_value("UCX_LOG_LEVEL", None, "info"),
    }
    if on_gpu:
        # A connection's lanes do not show which one an operation uses (``gpu_transport``).
        variables["UCX_PROTO_INFO"] = variable_value("UCX_PROTO_INFO", None, "y")
    host = str(options.get("host", "127.0.0.1"))
    if nics:
        variables["UCX_NET_DEVICES"] = devices(nics, protocol)
        # NIXL's default is 2 for any number of devices.
        variables["UCX_MAX_RMA_RAILS"] = str(len(nics))
    elif host.startswith(LOOPBACK) and protocol != "rdma":
        # Otherwise UCX also uses the machine's other interfaces and listens there.
        variables["UCX_NET_DEVICES"] = variable_value("UCX_NET_DEVICES", None, "lo")
    return variables


def with_cuda_copy(tls: str, gpus: int) -> str:
    """Return UCX_TLS, with ``cuda_copy`` if the host has NVIDIA GPUs. NIXL 1.5 starts no agent on such a host
    if UCX_TLS names no transport for CUDA memory, even with all buffers in host memory ("NVIDIA GPU(s) are
    present, but this setting does not enable CUDA memory support": nixl-cu13 1.5.1 on an H200). ``cuda_copy``
    reaches no peer, so it never carries a transfer."""
    if not gpus or tls.startswith("^"):
        return tls
    # Its module loads pydantic, which workers on hosts without GPUs don't need.
    from kvbench.connectors.base import moves_gpu_memory

    return tls if moves_gpu_memory(tls) else f"{tls},cuda_copy"


def nvidia_gpus(root: Path = Path("/")) -> int:
    """Count NVIDIA GPUs on the PCI bus as NIXL does (src/utils/common/hw_info.cpp)."""
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            found += vendor == "0x10de" and kind[:6] in ("0x0300", "0x0302")
    return found


def devices(nics: Sequence[TransferNic], protocol: str) -> str:
    """Return UCX_NET_DEVICES: interfaces, or RDMA devices with their port."""
    port = ":1" if protocol == "rdma" else ""
    return ",".join(nic.name if ":" in nic.name else nic.name + port for nic in nics)


def transport_in_log(lines: Sequence[str]) -> str:
    """Return the last reported lane for remote memory access to a peer, such as ``tcp/lo``; or empty. UCX
    also reports an agent's connection to itself; it is ignored. If UCX names lanes for access by messages
    (``rma_am``), large blocks use the lanes of ``am``: a memory lane if there is one (1 MiB took 0.1 ms,
    impossible over TCP), else all of them."""
    for line in reversed(lines):
        if "-node cfg#" not in line:
            continue
        lanes = {kind: names.split() for kind, names in re.findall(r"\b(rma|rma_am|am)\(([^)]+)\)", line)}
        memory = [lane for lane in lanes.get("am", ()) if lane.endswith("/memory")]
        if found := lanes.get("rma") or memory or lanes.get("am") or lanes.get("rma_am"):
            return " ".join(found)
    return ""


def epoll_descriptors() -> set[int]:
    """Return this process's epoll sets; UCX keeps a worker's TCP sockets in one."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


PROTOCOLS = ("tcp", "rdma", "cma", "shm", "cuda_ipc", "posix")
KEY_BYTES = 16
# With event descriptors the timed poll is only a safety net.
SAFETY_INTERVAL_S = 0.005


def check() -> Problem | None:
    """Check that the package is installed; a child process checks that it loads."""
    return None if installed() else Problem("not installed", INSTALL)


def load() -> dict[str, str]:
    import_api()
    return version_of(*DISTRIBUTIONS)


def env(options: Mapping[str, Any]) -> dict[str, str]:
    """Return UCX's transports and devices, and NIXL's log level."""
    level = {"NIXL_LOG_LEVEL": variable_value("NIXL_LOG_LEVEL", None, "WARN")}
    return {**ucx_env(options, protocol_of(options, PROTOCOLS)), **level}


@dataclass
class _Peer:
    """A connected peer: its agents' names, and the tables of its blocks."""

    agents: list[str]
    address: int
    layout: Layout
    tables: list[Any]
    device: int = 0
    """GPU of its memory, numbered as in its process."""


class UcxEndpoint(AgentsEndpoint):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        protocol = protocol_of(options, PROTOCOLS)
        nics = nics_of(options)
        self._kind = "VRAM" if options.get("memory") == "cuda" else "DRAM"
        self._device = int(options.get("cuda_device", 0))
        self._probing = threading.Lock()
        self._owner: dict[int, NixlAgent] = {}
        params = {"ucx_error_handling_mode": "none" if protocol == "shm" else "peer"}
        if threads := int(options.get("num_threads", 0)):
            params["num_threads"] = str(threads)
        if protocol == "tcp" and len(nics) > 1 and options.get("op") != "write":
            os.environ["UCX_MAX_RMA_RAILS"] = "1"
            for nic in nics:
                # UCX reads it when an agent starts.
                os.environ["UCX_NET_DEVICES"] = devices([nic], protocol)
                self._open(params)
        else:
            self._open(params)
        host_lanes = {"tcp", "self"} | ({"cuda_copy"} if self._kind == "DRAM" else set())
        only_tcp = set(os.environ.get("UCX_TLS", "").split(",")) <= host_lanes
        self._fds = tuple(self._owner) if only_tcp else ()
        self._ready: select.epoll | None = None
        if len(self._agents) > 1 and self._fds:
            self._ready = select.epoll()
            for fd in self._fds:
                self._ready.register(fd, select.EPOLLIN)
        self.poll_interval_s = SAFETY_INTERVAL_S if self._fds else 0.0003
        self.progress_interval_s = 0.1 if self._fds else 0.002
        self._tables: list[Any] = []
        self._op = ""
        self._peers: dict[str, _Peer] = {}
        # Peers read the key into their scratch to verify that they reached this process.
        self._key = ctypes.create_string_buffer(os.urandom(KEY_BYTES), KEY_BYTES)
        self._scratch = ctypes.create_string_buffer(KEY_BYTES)

    def _open(self, params: Mapping[str, str]) -> None:
        """Open an agent, and the descriptors that report its events."""
        before = epoll_descriptors()
        agent = NixlAgent("UCX", params)
        self._agents.append(agent)
        self._owner |= dict.fromkeys(epoll_descriptors() - before, agent)

    def register(self, address: int, layout: Layout) -> None:
        for agent in self._agents:
            agent.register(address, layout.nbytes, self._kind, self._device)
            for buffer in (self._key, self._scratch):
                agent.register(ctypes.addressof(buffer), KEY_BYTES, "DRAM")
        self._address = address
        self.reshape(layout)

    def reshape(self, layout: Layout) -> bool:
        for agent, table in zip(self._agents, self._tables, strict=False):
            agent.drop_table(table)
        self._layout = layout
        self._tables = [
            agent.table("", self._address, layout, self._kind, self._device) for agent in self._agents
        ]
        return True

    def describe(self) -> dict[str, Any]:
        return {
            "agents": [agent.metadata for agent in self._agents],
            "address": self._address,
            "device": self._device,
            "key": self._key.raw.hex(),
            "key_address": ctypes.addressof(self._key),
        }

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        layout, until = Layout(**peer["layout"]), time.monotonic() + deadline_s
        self.forget(peer["id"])
        ours, theirs = len(self._agents), len(peer["agents"])
        if ours != theirs:
            raise TransferError(
                f"this side has {ours} agents, the peer {theirs}: both need as many NICs and the same op"
            )
        known = _Peer([], int(peer["address"]), layout, [], int(peer.get("device", 0)))
        self._peers[peer["id"]] = known
        try:
            for agent, metadata in zip(self._agents, peer["agents"], strict=True):
                name = agent.add_peer(metadata)
                known.agents.append(name)
                known.tables.append(agent.table(name, known.address, layout, self._kind, known.device))
                with self._probing:  # one shared scratch; each probe has its own deadline
                    self._probe(agent, name, int(peer["key_address"]), until)
                    if self._scratch.raw.hex() != peer["key"]:
                        raise TransferError("another process answers instead of the peer")
        except TransferError:
            self.forget(peer["id"])
            raise

    def _probe(self, agent: NixlAgent, name: str, key_address: int, until: float) -> None:
        """Read the peer's key: metadata alone does not prove that the peer is alive."""
        began = time.monotonic()
        ctypes.memset(self._scratch, 0, KEY_BYTES)
        target, source = NixlPlace(ctypes.addressof(self._scratch), "DRAM"), NixlPlace(key_address, "DRAM")
        handle = agent.by_span("read", [BlockSpan(0, 0, KEY_BYTES)], target, source, name)
        try:
            done = agent.start(handle)
            while not done and time.monotonic() < until:
                time.sleep(0.0005)
                done = agent.poll(handle)
        finally:
            agent.drop(handle)
        if not done:
            raise TransferError(f"no answer from the peer within {until - began:.1f} s")

    def forget(self, peer: str) -> None:
        if (known := self._peers.pop(peer, None)) is not None:
            for number, name in enumerate(known.agents):
                self._agents[number].forget(name, known.tables[number : number + 1])

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        self._op = op
        known = self._peers[peer]
        parts: list[tuple[NixlAgent, Any]] = []
        descriptors = 0
        if len(self._agents) > 1:
            wanted = paired_spans(local, remote, self._layout, known.layout, self._merge)
            local_place = NixlPlace(self._address, self._kind, self._device)
            remote_place = NixlPlace(known.address, self._kind, known.device)
            dealt = split_spans(wanted, len(self._agents), MIN_PART_BYTES) if wanted else []
            for agent, name, spans in zip(self._agents, known.agents, dealt, strict=False):
                parts.append((agent, agent.by_span(op, spans, local_place, remote_place, name)))
            descriptors = sum(map(len, dealt))
        elif local:
            ours, theirs = in_order(local, remote) if self._merge else (local, remote)
            side, peer_side = (self._tables[0], self._layout, ours), (known.tables[0], known.layout, theirs)
            handle, descriptors = self._agents[0].by_block(op, side, peer_side)
            parts.append((self._agents[0], handle))
        ticket = self.ticket(peer, op, len(local), began, parts)
        ticket.descriptors = descriptors
        return ticket

    def progress(self) -> None:
        """Poll agents with events, or all if none reports any: polling all eight costs the busy one time."""
        events = [] if self._ready is None else self._ready.poll(0)
        for agent in {self._owner[fd] for fd, _ in events} or self._agents:
            with agent.lock:
                agent.progress()

    def wait_fds(self) -> Sequence[int]:
        return self._fds

    def transport(self) -> str:
        lines = self.native_log()
        transport = transport_in_log(lines)
        if len(self._agents) > 1:
            transports = [
                transport_in_log([line for line in lines if agent.name in line]) for agent in self._agents
            ]
            transport = " ".join(dict.fromkeys(filter(None, transports))) or transport
        if self._kind == "VRAM":
            # Only GPU memory needs this slow import.
            from kvbench.transfer.parts.transport_log import gpu_transport

            return gpu_transport(lines, self._op) or f"ucx:{transport} (configured)"
        return f"ucx:{transport}" if transport else f"ucx:{os.environ.get('UCX_TLS', '')} (configured)"

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        for agent, table in zip(self._agents, self._tables, strict=False):
            agent.drop_table(table)
            agent.unregister()
        self._tables = []
        if self._ready is not None:
            self._ready.close()
            self._ready = None


def open_endpoint(options: Mapping[str, Any]) -> Endpoint:
    """Open UCX in memory, or a file. Raises TransferError."""
    return UcxEndpoint(options) if protocol_of(options, PROTOCOLS) in TLS else FileEndpoint(options)


BACKEND = Backend(
    name="nixl",
    title="NIXL (UCX)",
    check=check,
    open=open_endpoint,
    env=env,
    load=load,
    protocols=PROTOCOLS,
    needs={"rdma": "rdma", "cuda_ipc": "gpu"},
    memories=("host", "cuda"),
)
