"""Transfer backends of an outside package, each wrong in its own way. Tests install them as entry points."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import MissingLibraryError, Problem, TransferError
from kvbench.transfer.base import Backend, Endpoint, Op, Ticket
from kvbench.transfer.null import NullEndpoint
from kvbench.transfer.tcp import TcpEndpoint

LAST_WORDS = "the last words of a library"
RATION = 2
HANG_FILE = "KVBENCH_TEST_HANG"
"""Variable with the path of the file that makes ``HangingTcp`` hang."""


class Lazy(TcpEndpoint):
    """Moves bytes the first time only; a repeated transfer is said to be done at once."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._seen: set[int] = set()

    def start(self, ticket: Ticket) -> None:
        if id(ticket) not in self._seen:
            super().start(ticket)
        self._seen.add(id(ticket))


class Rationed(TcpEndpoint):
    """What is offered can be read twice, not oftener; a file counts the offers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._started = 0
        self._offers = Path(os.environ["KVBENCH_TEST_OFFERS"])

    def offer(self, blocks: Sequence[int]) -> None:
        with self._offers.open("a") as file:
            file.write("o")

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        ticket = super().prepare(peer, op, local, remote)
        ticket.repeats = RATION
        return ticket

    def start(self, ticket: Ticket) -> None:
        self._started += 1
        # A round may end before all that was offered is read, so this can only be an upper limit.
        if self._started > RATION * self._offers.stat().st_size:
            raise TransferError("read oftener than it was offered")
        super().start(ticket)


class Stuck(NullEndpoint):
    """Never comes back from a call that must not wait."""

    def start(self, ticket: Ticket) -> None:
        time.sleep(3600)


class Endless(NullEndpoint):
    """No transfer ever ends."""

    def poll(self, ticket: Ticket) -> bool:
        return False


class HangingTcp(TcpEndpoint):
    """Never comes back from a call, once a file is there."""

    def start(self, ticket: Ticket) -> None:
        if Path(os.environ[HANG_FILE]).exists():
            time.sleep(3600)
        super().start(ticket)


class Chatty(NullEndpoint):
    """Writes to stdout whatever it does."""

    def start(self, ticket: Ticket) -> None:
        os.write(1, b'{"n": 1, "ok": {}}\n')


def _crash(options: Mapping[str, Any]) -> Endpoint:
    os.write(2, f"{LAST_WORDS}\n".encode())
    time.sleep(0.05)  # so that they have passed the pipe
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _hang(options: Mapping[str, Any]) -> Endpoint:
    time.sleep(3600)
    raise AssertionError


def _lacking(options: Mapping[str, Any]) -> Endpoint:
    raise MissingLibraryError("libfabric.so.1 does not load", hint="install it")


def _backend(
    name: str,
    open_it: Callable[[Mapping[str, Any]], Endpoint],
    *,
    moves_bytes: bool = True,
    problem: Problem | None = None,
) -> Backend:
    return Backend(name=name, title=name, check=lambda: problem, open=open_it, moves_bytes=moves_bytes)


LAZY = _backend("lazy", Lazy)
RATIONED = _backend("rationed", Rationed)
LIAR = _backend("liar", lambda options: NullEndpoint())
STUCK = _backend("stuck", lambda options: Stuck())
ENDLESS = _backend("endless", lambda options: Endless())
CHATTY = _backend("chatty", lambda options: Chatty(), moves_bytes=False)
CRASHING = _backend("crashing", _crash)
HANGING = _backend("hanging", _hang)
LACKING = _backend("lacking", _lacking)
ABSENT = _backend("absent", _hang, problem=Problem("not installed", "pip install absent"))


HANGING_TCP = _backend("tcp", HangingTcp)


def install(folder: Path, names: Mapping[str, str] | None = None) -> None:
    """Make these backends known to whatever has ``folder``, and this file's, on its path.

    ``names``: name → the one of this file; by default all but those that take another one's name.
    """
    if names is None:
        backends = {name: value for name, value in globals().items() if isinstance(value, Backend)}
        names = {name.lower(): name for name, value in backends.items() if value.name == name.lower()}
    lines = [f"{name} = outside_backends:{own_name}" for name, own_name in names.items()]
    info = folder / "outside_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[kvbench.transfer]", *lines, ""]))
