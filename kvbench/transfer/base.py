"""The contract of a transfer backend: how bytes move between two processes.

A backend is one file in this folder; its module name is its registration. It defines

- ``BACKEND``: a ``Backend`` value with the name, a title, the supported ops and ``check``;
- its ``Endpoint``, opened by ``BACKEND.open(options)``, always in a child process of its own
  (``kvbench.processes.transfer_worker.child``), since a native library may abort, hang, or clash with
  another.

Options that all backends know, and may ignore: ``host`` (the address that is published and listened on),
``protocol`` (one of ``Backend.protocols``), ``nics`` (own NICs to use, a list of ``{"name", "address"}``;
an RDMA device's name, or an interface with its address), ``op`` (the only op that will be asked for, where
that decides how NICs are used), ``merge`` (whether kvbench merges contiguous blocks into runs; true; NIXL
merges blocks that follow each other in the given order even without it),
``streams``, ``memory`` (where registered buffers lie, one of ``Backend.memories``). Others are a backend's
own, with its name in front.

A registered buffer is a table of blocks, as an engine's paged KV cache is: ``regions`` tensors
(one per layer and key/value) of ``blocks`` blocks of ``block_bytes`` bytes. Block ``b`` of
region ``r`` starts at byte ``(r · blocks + b) · block_bytes``. A transfer names local and remote
block ids; every region of each named block moves.
"""

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
    """The option ``nics``; empty where none are named."""
    return tuple(
        TransferNic(str(nic["name"]), str(nic.get("address", ""))) for nic in options.get("nics") or ()
    )


def protocol_of(options: Mapping[str, Any], protocols: Sequence[str]) -> str:
    """The option ``protocol``, or the first of a backend's. Raises TransferError for another one."""
    asked = str(options.get("protocol") or protocols[0])
    if asked not in protocols:
        raise TransferError(f"there is no protocol {asked!r} here", hint=f"there are: {', '.join(protocols)}")
    return asked


@dataclass(frozen=True)
class TransferResult:
    """One finished transfer, timed in the child process that did it.

    ``prepare_s`` is building descriptors, ``transfer_s`` is submit to completion.
    ``descriptors`` counts what was handed to the library after merging contiguous runs.
    """

    nbytes: int
    descriptors: int
    prepare_s: float
    transfer_s: float


class Endpoint(ABC):
    """One side of a transfer inside the child process.

    The child's loop calls ``submit`` (or ``prepare``, once, and then ``start`` as often as a transfer is
    repeated), ``poll``, ``release``, ``progress`` and ``forget``; none of them may wait for a peer.
    ``connect`` alone may: it runs in a thread of its own, and the loop enforces its deadline. The loop
    checks block ids and layouts before it calls ``submit``.
    """

    poll_interval_s: float = 0.0003
    """Pause between polls while something is pending, if no ``wait_fds`` wakes the loop earlier."""
    progress_interval_s: float | None = None
    """Pause between calls of ``progress`` while nothing is pending; None: only when woken."""
    native_log: Callable[[], Sequence[str]] = staticmethod(tuple)
    """What the library wrote to stdout and stderr so far (first and last lines); set by the child."""

    @abstractmethod
    def register(self, address: int, layout: Layout) -> None:
        """Make ``layout.nbytes`` bytes at ``address`` reachable. Raises TransferError."""

    def reshape(self, layout: Layout) -> bool:
        """See the registered memory, or its beginning, as another table of blocks of at most the same bytes.

        No transfer is under way, and no ticket is started again afterwards; ``describe`` is asked anew and
        peers are connected again. False: this backend cannot, so that a new process takes over.
        """
        return False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON that a peer needs to connect, such as addresses and keys.

        The child adds ``backend``, ``id`` (unique) and ``layout``.
        """

    @abstractmethod
    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        """Reach a peer by its description, under the id ``peer["id"]``. Raises TransferError.

        Called in a thread. A peer that is connected again is first forgotten.
        """

    def forget(self, peer: str) -> None:  # noqa: B027 - optional
        """Drop a peer; unknown ids are ignored."""

    @abstractmethod
    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        """Make a transfer ready without starting it: ``write`` local → remote, ``read`` remote → local.

        ``ticket.prepare_s`` says how long that took, ``ticket.descriptors`` what will be handed over.
        """

    @abstractmethod
    def start(self, ticket: Ticket) -> None:
        """Start a prepared transfer, or repeat one that is done. Raises TransferError."""

    def submit(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        """Prepare and start."""
        ticket = self.prepare(peer, op, local, remote)
        self.start(ticket)
        return ticket

    def collect(self, blocks: Sequence[int]) -> None:  # noqa: B027 - optional
        """At a target: bring what a peer wrote into the registered buffer, to be compared there.

        Only for libraries whose writes land elsewhere, such as in a store. Not in any timed window;
        may wait a few seconds. Raises TransferError.
        """

    def offer(self, blocks: Sequence[int]) -> None:  # noqa: B027 - optional
        """At a target, before a peer reads: make the registered blocks' present content readable.

        Only for libraries that do not read registered memory itself. May wait a few seconds.
        """

    @abstractmethod
    def poll(self, ticket: Ticket) -> bool:
        """True when done, False while pending. Raises TransferError when it failed."""

    def release(self, ticket: Ticket) -> None:  # noqa: B027 - optional
        """Give up or clean up a ticket; called once for each, also after failure or deadline.

        A ticket that is to be started again is not released in between.
        """

    def progress(self) -> None:  # noqa: B027 - optional
        """Called whenever the loop wakes, for libraries that progress only when polled."""

    def wait_fds(self) -> Sequence[int]:
        """File descriptors that turn readable when ``progress`` or ``poll`` has something to do."""
        return ()

    @abstractmethod
    def transport(self) -> str:
        """The transport that really runs (``tcp``, ``rdma``, ``cma`` …), not the one asked for.

        Where the library does not report it, the one asked for, marked ``(configured)``.
        """

    def library(self) -> dict[str, str]:
        """Name and version of the library that moves the bytes."""
        return {"name": "kvbench", "version": __version__}

    @abstractmethod
    def close(self) -> None:
        """Free everything; must be safe to call twice."""


@dataclass
class Ticket:
    """A transfer under way. ``handle`` is the backend's own."""

    peer: str
    op: Op
    nbytes: int
    descriptors: int
    prepare_s: float
    handle: Any = None
    repeats: int | None = None
    """How often it can be started until the target must ``offer`` again; None: without end."""


@dataclass(frozen=True)
class Backend:
    """What a backend file offers."""

    name: str
    title: str
    ops: tuple[Op, ...]
    check: Callable[[], Problem | None]
    open: Callable[[Mapping[str, Any]], Endpoint]
    env: Callable[[Mapping[str, Any]], dict[str, str]]
    """Environment that must be set before the library is loaded (MC_*, UCX_*)."""
    load: Callable[[], dict[str, str]] | None = None
    """Really imports a native library and returns its name and version; only ever called in a
    child process. Raises MissingLibraryError. None: nothing native, ``check`` says it all."""
    moves_bytes: bool = True
    """False for a backend that only measures the tool itself."""
    protocols: tuple[str, ...] = ("tcp",)
    """Protocols that the option ``protocol`` may name, the usual one first."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """What a protocol needs beside the library: ``"rdma"`` (an RDMA device), ``"gpu"``, or nothing."""
    one_nic: tuple[str, ...] = ()
    """Protocols over which it uses one NIC and no more."""
    nics: bool = True
    """Whether it passes NICs, so that the option ``nics`` means something."""
    loopback_only: bool = False
    """Whether both sides must be on one host (shared memory, a copy in memory)."""
    local_protocols: tuple[str, ...] = ()
    """Those of ``protocols`` that need both sides on one host, and pass no NIC, while others do not."""
    memories: tuple[str, ...] = ("host",)
    """Where registered buffers may lie: ``"host"``, ``"cuda"``."""
    check_protocol: Callable[[str], Problem | None] = lambda protocol: None
    """What keeps one protocol from working here although ``check`` finds nothing."""
    optional: bool = False
    """Whether the default matrix leaves it out unless it is named."""
    staged: bool = False
    """Whether bytes go through a store, so that the target must ``offer`` before reads and ``collect``
    after writes."""
