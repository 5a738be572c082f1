"""The contract of a transfer backend: how bytes move between two processes.

A backend is one file in this folder, registered by its module name. It defines ``BACKEND``, a ``Backend``,
and its ``Endpoint``, opened by ``BACKEND.open(options)``, always in a separate child process
(``kvbench.processes.transfer_worker.child``), since a native library may abort, hang, or clash with another.
Options of all backends, which may ignore them (a backend's other options begin with its name):

- ``host``: address to publish and listen on; ``protocol``: one of ``Backend.protocols``; ``streams``
- ``nics``: this side's NICs, a list of ``{"name", "address"}`` (RDMA device, or interface and its address)
- ``op``: the only op of all transfers, if it decides how NICs are used
- ``merge`` (default true): merge contiguous blocks into runs; NIXL merges blocks adjacent in the given order
  anyway
- ``memory``: memory of registered buffers, one of ``Backend.memories``

A registered buffer is a table of blocks like an engine's paged KV cache: ``regions`` tensors (one per layer
and key/value) of ``blocks`` blocks of ``block_bytes`` bytes. Block ``b`` of region ``r`` starts at byte ``(r
· blocks + b) · block_bytes``. A transfer moves every region of pairs of local and remote block ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvbench.core.transfers.records import Layout as Layout
from kvbench.errors import Problem, TransferError
from kvbench.version import __version__

Op = Literal["read", "write"]


class TransferNic(NamedTuple):
    """A NIC of this side: an RDMA device or an interface, and the interface's address."""

    name: str
    address: str = ""


def nics_of(options: Mapping[str, Any]) -> tuple[TransferNic, ...]:
    return tuple(
        TransferNic(str(nic["name"]), str(nic.get("address", ""))) for nic in options.get("nics") or ()
    )


def protocol_of(options: Mapping[str, Any], protocols: Sequence[str]) -> str:
    """Return the option ``protocol``, or a backend's first one. Raises TransferError for an unknown one."""
    name = str(options.get("protocol") or protocols[0])
    if name not in protocols:
        raise TransferError(f"there is no protocol {name!r} here", hint=f"there are: {', '.join(protocols)}")
    return name


@dataclass(frozen=True)
class TransferResult:
    """One finished transfer, timed in the child. ``prepare_s``: building descriptors; ``transfer_s``: submit
    to completion. ``descriptors``: number passed to the library, after merging contiguous runs."""

    nbytes: int
    descriptors: int
    prepare_s: float
    transfer_s: float


class Endpoint(ABC):
    """One side of a transfer inside the child process. The child's loop calls ``submit`` (or ``prepare``
    once, then ``start`` for each repetition), ``poll``, ``release``, ``progress`` and ``forget``; none of
    them may wait for a peer. ``connect`` may: it runs in its own thread, and the loop enforces its deadline.
    The loop checks block ids and layouts before ``submit``."""

    poll_interval_s: float = 0.0003
    """Pause between polls during a transfer, unless ``wait_fds`` wake the loop earlier."""
    progress_interval_s: float | None = None
    """Pause between calls of ``progress`` without a transfer; None: only when woken."""
    native_log: Callable[[], Sequence[str]] = staticmethod(tuple)
    """First and last lines of the library's stdout and stderr; set by the child."""

    @abstractmethod
    def register(self, address: int, layout: Layout) -> None:
        """Make ``layout.nbytes`` bytes at ``address`` accessible to peers. Raises TransferError."""

    def reshape(self, layout: Layout) -> bool:
        """Use the registered memory, or its beginning, as another table of blocks. No transfer is active, and
        old tickets are not started again; afterwards ``describe`` is called again and peers reconnect. False:
        not supported, so a new process takes over."""
        return False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return JSON that a peer needs to connect, such as addresses and keys."""

    @abstractmethod
    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        """Connect to a peer by its description, under the id ``peer["id"]``. Raises TransferError. Called in
        a thread. A connected peer is forgotten first."""

    def forget(self, peer: str) -> None:  # noqa: B027 - optional
        """Drop a peer; unknown ids are ignored."""

    @abstractmethod
    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        """Prepare a transfer without starting it: ``write`` local → remote, ``read`` remote → local.
        ``ticket.prepare_s`` is its duration, ``ticket.descriptors`` the number to pass on."""

    @abstractmethod
    def start(self, ticket: Ticket) -> None:
        """Start a prepared transfer, or repeat a finished one. Raises TransferError."""

    def submit(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        ticket = self.prepare(peer, op, local, remote)
        self.start(ticket)
        return ticket

    def collect(self, blocks: Sequence[int]) -> None:  # noqa: B027 - optional
        """Target: copy what a peer wrote into the registered buffer, to be compared there. Only for libraries
        that write elsewhere, such as to a store. Never in a timed window; may wait a few seconds. Raises
        TransferError."""

    def offer(self, blocks: Sequence[int]) -> None:  # noqa: B027 - optional
        """Target: make the registered blocks' content readable before a peer reads. Only for libraries that
        do not read registered memory. May wait a few seconds."""

    @abstractmethod
    def poll(self, ticket: Ticket) -> bool:
        """Return True when done, False while active. Raises TransferError on failure."""

    def release(self, ticket: Ticket) -> None:  # noqa: B027 - optional
        """Clean up a ticket; called once for each, also after failure or deadline."""

    def progress(self) -> None:  # noqa: B027 - optional
        """Called whenever the loop wakes, for libraries that progress only when polled."""

    def wait_fds(self) -> Sequence[int]:
        """File descriptors that become readable when ``progress`` or ``poll`` has work."""
        return ()

    @abstractmethod
    def transport(self) -> str:
        """The transport in use (``tcp``, ``rdma``, ``cma`` …). If the library does not report it, the
        requested one, marked ``(configured)``."""

    def library(self) -> dict[str, str]:
        return {"name": "kvbench", "version": __version__}

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""


@dataclass
class Ticket:
    """A transfer in progress. ``handle`` belongs to the backend."""

    peer: str
    op: Op
    nbytes: int
    descriptors: int
    prepare_s: float
    handle: Any = None
    repeats: int | None = None
    """Number of starts until the target must ``offer`` again; None: unlimited."""


@dataclass(frozen=True)
class Backend:
    """The contents of a backend file."""

    name: str
    title: str
    open: Callable[[Mapping[str, Any]], Endpoint]
    ops: tuple[Op, ...] = ("read", "write")
    check: Callable[[], Problem | None] = lambda: None
    env: Callable[[Mapping[str, Any]], dict[str, str]] = lambda options: {}
    """Environment that must be set before the library is loaded (MC_*, UCX_*)."""
    load: Callable[[], dict[str, str]] | None = None
    """Import a native library and return its name and version; called in a child process only. Raises
    MissingLibraryError. None: nothing native, ``check`` suffices."""
    moves_bytes: bool = True
    """False for a backend that only measures the tool's overhead."""
    protocols: tuple[str, ...] = ("tcp",)
    """Allowed values of the option ``protocol``, the usual one first."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """A protocol's needs in addition to the library: ``"rdma"`` (an RDMA device), ``"gpu"``, or nothing."""
    one_nic: tuple[str, ...] = ()
    """Protocols that use only one NIC."""
    nics: bool = True
    """Whether it uses NICs, so that the option ``nics`` has a meaning."""
    loopback_only: bool = False
    """Whether both sides must be on one host (shared memory, a copy in memory)."""
    memories: tuple[str, ...] = ("host",)
    """Possible memory of registered buffers: ``"host"``, ``"cuda"``."""
    check_protocol: Callable[[str], Problem | None] = lambda protocol: None
    """Return what prevents one protocol from running here although ``check`` succeeds."""
    optional: bool = False
    staged: bool = False
    """Whether bytes go through a store, with ``offer`` and ``collect`` by the target."""
