"""The loop's two ways to read, compiled and in Python: the same contract, over real sockets."""

import os
import socket
import ssl
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hostile import HOST
from hypothesis import given
from hypothesis import strategies as st

from kvbench.processes.loadgen.sockets.clock import (
    READS,
    SLACK_NS,
    PythonLog,
    gaps_in_python,
    measured_offset_ns,
    new_log,
)
from kvbench.processes.loadgen.sockets.loop import NEVER_NS, READ_BYTES, READABLE, SocketLoop
from kvbench.processes.loadgen.sockets.wire import ServerConnection
from tests.processes.loadgen.test_loadgen import made_certificate

DEADLINE_S = 10.0
USUAL = b"a chunk's end\n\n\r\n"


class Owner:
    """Keeps what it is told, and does something about it."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.log = new_log()
        self.notices: list[bytes | OSError] = []
        self._then = then

    def noticed(self, what: bytes | OSError) -> None:
        self.notices.append(what)
        self._then()

    @property
    def data(self) -> bytes:
        assert not any(isinstance(read, int) for read in self.log.reads)
        return b"".join(self.log.reads)  # type: ignore[arg-type]

    def take(self, since_ns: int = 0) -> tuple[list[int], list[int], int]:
        """When the bytes of all reads came and when they were read, and how many stamps were of no use."""
        _, came, lags, _, useless, _ = self.log.take(10**6, since_ns, measured_offset_ns())
        came_ns = list(memoryview(came).cast("q"))
        lags_ns = list(memoryview(lags).cast("i"))
        assert len(came_ns) == len(lags_ns)
        assert not self.log
        return came_ns, [stamp + lag for stamp, lag in zip(came_ns, lags_ns, strict=True)], useless


class Sockets:
    """A loop, and pairs of connected sockets: the loop's end and the other."""

    def __init__(self, way: Any) -> None:
        self.loop = SocketLoop(way)
        self._open: list[socket.socket] = []

    def pair(self, *, stamps: bool = True) -> tuple[ServerConnection, socket.socket]:
        with socket.create_server((HOST, 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        self._open += ours, theirs
        ours.setblocking(False)
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ServerConnection(ours)
        if stamps:
            connection.ask_for_stamps()
        return connection, theirs

    def streamed(self, owner: Owner) -> tuple[ServerConnection, socket.socket]:
        """A pair whose first end is a stream."""
        connection, theirs = self.pair()
        self.loop.watch(connection.fd, READABLE, lambda _event: None)
        self.loop.stream(connection, owner)
        return connection, theirs

    def turn_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline
            self.loop.turn(0.05)

    def close(self) -> None:
        self.loop.close()
        for sock in self._open:
            sock.close()


@pytest.fixture(params=["python", "compiled"])
def sockets(request: pytest.FixtureRequest) -> Iterator[Sockets]:
    if request.param == "compiled" and READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    made = Sockets(READS if request.param == "compiled" else None)
    yield made
    made.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_each_read_is_logged_with_its_times_and_not_told_of(sockets: Sockets) -> None:
    owner = Owner()
    _, theirs = sockets.streamed(owner)
    before = time.monotonic_ns()
    for count in range(1, 4):
        theirs.sendall(USUAL)
        sockets.turn_until(lambda count=count: len(owner.log.reads) == count)
    assert owner.log.reads == [USUAL] * 3
    _, read_ns, _ = owner.take()
    times = [before, *read_ns, time.monotonic_ns()]
    assert len(times) == 5
    assert times == sorted(times)
    assert owner.notices == []


def test_the_kernels_stamp_is_kept(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.streamed(owner)
    if not connection._stamping:
        pytest.skip("this kernel takes no stamps")
    # It begins to take stamps some time after it was asked to.
    deadline, useless = time.monotonic() + DEADLINE_S, 1
    while useless:
        assert time.monotonic() < deadline
        sent = time.monotonic_ns()
        theirs.sendall(USUAL)
        time.sleep(0.002)  # so that the stamp is told from the time of the read
        read_from = time.monotonic_ns()
        sockets.turn_until(lambda: len(owner.log) > 0)
        (came,), (read,), useless = owner.take(sent)
        assert useless or sent - SLACK_NS <= came < read_from <= read


def read_together(
    sockets: Sockets, owner: Owner, theirs: socket.socket, apart_s: float
) -> tuple[int, int, int]:
    """Two sends so far apart that are read at once: when each came, and the doubt about the first (ns)."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < deadline
        sockets.loop.turn(0.0)
        first_ns = time.monotonic_ns()
        theirs.sendall(USUAL)
        time.sleep(apart_s)
        theirs.sendall(USUAL)
        sockets.turn_until(lambda: owner.data.endswith(USUAL * 2))
        reads, came, _, doubts, useless, _ = owner.log.take(10**6, first_ns, measured_offset_ns())
        if not useless:  # the kernel begins to take stamps some time after it was asked to
            assert reads == [USUAL * 2]
            return first_ns, memoryview(came).cast("q")[0], memoryview(doubts).cast("i")[0]


def test_of_sends_that_are_read_together_the_first_is_in_doubt(sockets: Sockets) -> None:
    """One read has one stamp, that of its last bytes: the others are late by what the client looked late."""
    owner = Owner()
    connection, theirs = sockets.streamed(owner)
    if not connection._stamping:
        pytest.skip("this kernel takes no stamps")
    first_ns, stamp_ns, doubt_ns = read_together(sockets, owner, theirs, apart_s=0.03)
    assert stamp_ns - first_ns > 0.03e9 - SLACK_NS
    assert doubt_ns >= stamp_ns - first_ns - SLACK_NS  # which is what the stamp is wrong by


@given(st.integers(0, 3))
def test_what_comes_together_is_not_in_doubt_beyond_the_last_look(waited: int) -> None:
    """A server that sends several chunks at once makes no client late."""
    for way in (None, READS):
        made = Sockets(way)
        try:
            owner = Owner()
            _, theirs = made.streamed(owner)
            theirs.sendall(USUAL)
            made.turn_until(lambda owner=owner: bool(owner.log))
            time.sleep(0.01)  # however long ago the last chunk was
            made.loop.turn(waited / 1e3)
            before_ns = time.monotonic_ns()
            made.loop.turn(waited / 1e3)
            theirs.sendall(USUAL * 3)
            made.turn_until(lambda owner=owner: owner.data.endswith(USUAL * 3))
            _, came, _, doubts, _, _ = owner.log.take(10**6, 0, measured_offset_ns())
            came_ns, doubt_ns = memoryview(came).cast("q")[-1], memoryview(doubts).cast("i")[-1]
            assert 0 <= doubt_ns <= came_ns - before_ns + SLACK_NS
        finally:
            made.close()


def test_what_a_full_buffer_left_behind_is_as_old_as_its_beginning(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.streamed(owner)
    sockets.loop.turn(0.0)
    first_ns = time.monotonic_ns()
    theirs.sendall(bytes(READ_BYTES + 5))
    time.sleep(0.02)
    theirs.sendall(USUAL)
    sockets.turn_until(lambda: owner.data.endswith(USUAL))
    reads, came, _, doubts, useless, _ = owner.log.take(10**6, first_ns, measured_offset_ns())
    assert list(map(len, reads)) == [READ_BYTES, 5 + len(USUAL)]  # type: ignore[arg-type]
    last_ns, doubt_ns = memoryview(came).cast("q")[-1], memoryview(doubts).cast("i")[-1]
    assert useless or not connection._stamping or doubt_ns >= last_ns - first_ns - SLACK_NS


def test_without_a_stamp_there_are_zeros(sockets: Sockets) -> None:
    owner = Owner()
    ours, theirs = socket.socketpair()  # which the kernel does not stamp
    with ours, theirs:
        ours.setblocking(False)
        connection = ServerConnection.__new__(ServerConnection)
        connection.sock, connection.fd, connection.read, connection._tls = (
            ours, ours.fileno(), ours.recvmsg_into, None,
        )  # fmt: skip
        sockets.loop.watch(connection.fd, READABLE, lambda _event: None)
        sockets.loop.stream(connection, owner)
        theirs.sendall(USUAL)
        sockets.turn_until(lambda: bool(owner.log.reads))
        sockets.loop.unwatch(connection.fd)
    (came,), (read,), useless = owner.take()
    assert (came, useless) == (read, 1)


@pytest.mark.parametrize("data", [b"x", b"\n\r\n", b"0\r\n\r\n", USUAL + b"0\r\n\r\n", b"\0" * 100])
def test_a_read_that_may_be_the_last_is_told_of(sockets: Sockets, data: bytes) -> None:
    owner = Owner()
    _, theirs = sockets.streamed(owner)
    theirs.sendall(data)
    sockets.turn_until(lambda: bool(owner.notices))
    assert owner.notices == owner.log.reads == [data]


def test_the_end_is_told_after_what_came_before_it(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.streamed(owner)
    owner._then = lambda: sockets.loop.unwatch(connection.fd)
    theirs.sendall(USUAL)
    theirs.close()
    sockets.turn_until(lambda: bool(owner.notices))
    assert (owner.log.reads, owner.notices) == ([USUAL], [b""])


def test_a_reset_is_told_as_an_error(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.streamed(owner)

    def odd(event: int) -> None:
        assert event != READABLE
        sockets.loop.read(connection.fd)

    sockets.loop.watch(connection.fd, READABLE, odd)
    owner._then = lambda: sockets.loop.unwatch(connection.fd)
    reset(theirs)
    sockets.turn_until(lambda: bool(owner.notices))
    assert [type(error) for error in owner.notices] == [ConnectionResetError]
    assert owner.log.reads == []


def test_a_read_that_fails_is_told_as_an_error(sockets: Sockets) -> None:
    owner = Owner()
    ours = socket.create_server((HOST, 0))  # readable once somebody connects, and never to be read
    with ours, socket.create_connection(ours.getsockname()):
        ours.setblocking(False)
        sockets.loop.watch(ours.fileno(), READABLE, lambda _event: None)
        sockets.loop.stream(ServerConnection(ours), owner)
        owner._then = lambda: sockets.loop.unwatch(ours.fileno())
        sockets.turn_until(lambda: bool(owner.notices))
    (error,) = owner.notices
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror) == (107, os.strerror(107))  # ENOTCONN
    assert error.__traceback__ is None


def test_more_than_one_buffer_comes_whole(sockets: Sockets) -> None:
    owner = Owner()
    _, theirs = sockets.streamed(owner)
    data = os.urandom(20 * READ_BYTES + 17)
    theirs.sendall(data)
    sockets.turn_until(lambda: len(owner.data) == len(data))
    assert owner.data == data
    assert max(map(len, owner.log.reads)) == READ_BYTES
    assert len(owner.log) == len(owner.log.reads)


def test_what_lies_there_before_the_stream_is_read_too(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.pair()
    called: list[int] = []
    sockets.loop.watch(connection.fd, READABLE, called.append)
    theirs.sendall(USUAL)
    sockets.turn_until(lambda: bool(called))
    assert called[0] == READABLE
    sockets.loop.stream(connection, owner)
    sockets.turn_until(lambda: bool(owner.log.reads))
    assert owner.data == USUAL


def test_after_its_end_a_stream_is_called_back_again(sockets: Sockets) -> None:
    owner = Owner()
    connection, theirs = sockets.streamed(owner)
    called: list[int] = []
    sockets.loop.watch(connection.fd, READABLE, called.append)
    sockets.loop.end_stream(connection.fd)
    theirs.sendall(USUAL)
    sockets.turn_until(lambda: bool(called))
    assert owner.log.reads == []


def test_another_descriptor_is_called_back(sockets: Sockets) -> None:
    read_end, write_end = os.pipe()
    called: list[tuple[int, bytes]] = []
    try:
        sockets.loop.watch(read_end, READABLE, lambda event: called.append((event, os.read(read_end, 9))))
        assert sockets.loop.turn(0.0) == 0
        os.write(write_end, b"hello")
        assert sockets.loop.turn(DEADLINE_S) == 1
        assert called == [(READABLE, b"hello")]
        assert sockets.loop.turn(0.01) == 0
        sockets.loop.unwatch(read_end)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_many_streams_do_not_mix(sockets: Sockets) -> None:
    owners = [Owner() for _ in range(150)]  # more than come at once
    ends = [sockets.streamed(owner)[1] for owner in owners]
    for turn in range(3):
        for place, theirs in enumerate(ends):
            theirs.sendall(b"%d of %d%b" % (place, turn, USUAL))
    sockets.turn_until(lambda: all(owner.data.count(USUAL) == 3 for owner in owners))
    for place, owner in enumerate(owners):
        assert owner.data == b"".join(b"%d of %d%b" % (place, turn, USUAL) for turn in range(3))


def test_a_turn_past_its_time_leaves_the_rest_to_the_next(sockets: Sockets) -> None:
    """So that a request that is due does not wait for all that has come."""
    owners = [Owner() for _ in range(12)]
    for owner in owners:
        _, theirs = sockets.streamed(owner)
        theirs.sendall(USUAL)
    if sockets.loop.compiled:
        assert sockets.loop.turn(DEADLINE_S, until_s=time.monotonic()) == 1
        assert sum(bool(owner.data) for owner in owners) == 1
    sockets.turn_until(lambda: all(owner.data == USUAL for owner in owners))


def test_what_is_closed_in_the_same_turn_is_neither_told_nor_called(sockets: Sockets) -> None:
    """Of three descriptors with something to tell at once, whichever is handled first closes the others."""
    handled: list[str] = []
    ends: dict[str, tuple[int, Callable[[], None]]] = {}

    def handle(name: str) -> None:
        handled.append(name)
        for other, (fd, close) in ends.items():
            if other != name:
                sockets.loop.unwatch(fd)
                close()

    for name in ("first", "second", "third"):
        connection, theirs = sockets.pair()
        sockets.loop.watch(connection.fd, READABLE, lambda _event, name=name: handle(name))
        ends[name] = connection.fd, connection.close
        theirs.sendall(b"x")
    sockets.turn_until(lambda: bool(handled))
    sockets.loop.turn(0.0)
    assert len(set(handled)) == 1


def test_an_owner_may_close_another_stream_in_the_same_turn(sockets: Sockets) -> None:
    first, second = Owner(), Owner()
    one, one_theirs = sockets.streamed(first)
    other, other_theirs = sockets.streamed(second)

    def close_both() -> None:
        for connection in (one, other):
            if connection.fd >= 0:
                sockets.loop.unwatch(connection.fd)
                connection.close()

    first._then = second._then = close_both
    for theirs in (one_theirs, other_theirs):
        theirs.sendall(b"x")
    sockets.turn_until(lambda: bool(first.notices or second.notices))
    assert sockets.loop.turn(0.0) == 0
    assert first.data + second.data in (b"x", b"xx")


def test_tls_is_read_in_python_whichever_way_is_used(sockets: Sockets, tmp_path: Path) -> None:
    key, cert = made_certificate(tmp_path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=cert)
    server.load_cert_chain(cert, key)
    connection, theirs = sockets.pair(stamps=False)
    connection.begin_tls(client, HOST)
    theirs.setblocking(False)
    secured = server.wrap_socket(theirs, server_side=True, do_handshake_on_connect=False)
    sockets._open += connection.sock, secured
    ours_done = theirs_done = False
    deadline = time.monotonic() + DEADLINE_S
    while not (ours_done and theirs_done):
        assert time.monotonic() < deadline
        ours_done = ours_done or connection.handshake() is True
        if not theirs_done:
            try:
                secured.do_handshake()
                theirs_done = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
    owner = Owner()
    sockets.loop.watch(connection.fd, READABLE, lambda _event: None)
    sockets.loop.stream(connection, owner)
    data = os.urandom(3 * READ_BYTES)  # one record, several buffers
    secured.sendall(data)
    sockets.turn_until(lambda: len(owner.data) == len(data))
    assert owner.data == data
    reads = len(owner.log)
    assert owner.take()[2] == reads
    sockets.loop.unwatch(connection.fd)
    connection.close()


def test_the_compiled_way_can_be_refused() -> None:
    code = "from kvbench.processes.loadgen.sockets.clock import READS, WAY; print(READS is None, WAY)"
    for value, wanted in (
        ("1", "True python"),
        ("0", f"{READS is None} {'python' if READS is None else 'compiled'}"),
    ):
        if value == "0" and os.environ.get("KVBENCH_PURE_PYTHON", "0") not in ("", "0"):
            continue
        environment = {**os.environ, "KVBENCH_PURE_PYTHON": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30
        )
        assert done.stdout.strip() == wanted, done.stderr


compiled_only = pytest.mark.skipif(
    READS is None, reason="kvbench.processes.loadgen.sockets._reads was not compiled, or is refused"
)
BEGIN, AFTER = b'data: {"choices":[{"text":"', b'"}]}\n\n\r\n'


def token(text: bytes) -> bytes:
    event = BEGIN + text + AFTER[:-2]
    return b"%x\r\n%b\r\n" % (len(event), event)


@compiled_only
def test_chunks_as_expected_are_counted_and_others_kept() -> None:
    loop = Sockets(READS)
    owner = Owner()
    _, theirs = loop.streamed(owner)

    def sent(*reads: bytes) -> list[bytes | int]:
        owner.log.take(100, 0, 0)
        for count, read in enumerate(reads, 1):
            theirs.sendall(read)
            loop.turn_until(lambda count=count: len(owner.log) == count)
        return owner.log.reads

    usual, odd = token(b" word"), token(b"a quote \\" + b'" in it')
    assert sent(usual) == [usual]  # nothing is expected yet
    owner.log.expect(BEGIN, AFTER, 6 << 32 | crc32(b"before"))
    assert sent(usual, usual + token(b"~ ~")) == [1, 2]
    assert owner.log.held < 100
    *_, text = owner.log.take(100, 0, 0)
    assert text == (6 + len(b" word word~ ~")) << 32 | crc32(b" word word~ ~", crc32(b"before"))
    assert sent(usual, odd, usual) == [1, odd, usual]  # after another read nothing is expected any more
    for other in (
        usual[:-1],
        usual + b"0\r\n\r\n",
        usual.upper(),
        token(b"\x7f"),
        b"0" + usual[1:],
        odd + usual,
        token(b""),  # no text, no token
        usual + token(b""),
    ):
        owner.log.expect(BEGIN, AFTER, 0)
        assert sent(other) == [other]
    loop.close()


@compiled_only
@given(
    st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=40),
            st.sampled_from([0, 10**18, 10**18 + 5 * 10**6, 10**18 - 10**7, 2 * 10**18]),
            st.integers(0, 10**7),
            st.integers(-(10**7), 10**7),
        ),
        max_size=20,
    ),
    st.lists(st.integers(0, 9), max_size=5),
)
def test_the_two_logs_say_the_same(reads: list[tuple[bytes, int, int, int]], takes: list[int]) -> None:
    compiled, python = READS.Log(), PythonLog()
    for data, real_ns, later_ns, since_ns in reads:
        stamp = struct.pack("=6q", *divmod(real_ns, 10**9), 0, 0, 0, 0)
        for log in (compiled, python):
            log.add(data, stamp, 10**15 + later_ns, 10**15 + since_ns)
    for most in [*takes, 100]:
        assert compiled.reads == python.reads
        assert len(compiled) == len(python)
        assert (compiled.held > 0) == (python.held > 0)
        sent_ns, offset_ns = 10**15, 10**18 - 10**15
        assert compiled.take(most, sent_ns, offset_ns) == python.take(most, sent_ns, offset_ns)


@compiled_only
@given(st.lists(st.integers(0, 10**12), max_size=40).map(lambda gaps: list(accumulate(gaps, initial=10**15))))
def test_gaps_are_told_alike(stamps: list[int]) -> None:
    assert READS.gaps(array("q", stamps)) == gaps_in_python(array("q", stamps))


@compiled_only
def test_the_compiled_part_refuses_what_it_cannot_read() -> None:
    streams, log = READS.Streams(), READS.Log()
    with pytest.raises(TypeError):
        streams.add(5, PythonLog(), None)
    with pytest.raises(ValueError, match="descriptor -1"):
        streams.add(-1, log, None)
    with pytest.raises(TypeError):
        streams.turn(-1, 0, 64, 0, [])
    with pytest.raises(OSError, match="Bad file"):
        streams.turn(-1, 0, 64, NEVER_NS, [], [])
    streams.remove(5)  # which is not there
    with pytest.raises(ValueError, match="a stamp of 3 bytes"):
        log.add(b"x", b"abc", 0)
    with pytest.raises(TypeError):
        log.add("x", bytes(48), 0)
    with pytest.raises(ValueError, match="two line feeds"):
        log.expect(b"data: ", b"}", 0)
    assert log.take(-1, 0, 0) == ([], b"", b"", b"", 0, 0)
    assert streams.empty_ns(-1) == streams.empty_ns(5) == 0
    assert READS.gaps(array("q")) == READS.gaps(array("q", [5])) == b""
    with pytest.raises(OSError, match="Bad file"):
        READS.set_timer(-1, 1)
    with pytest.raises(TypeError):
        READS.usual((), 0, b"", b"", [], 0)
    with pytest.raises(ValueError, match="start"):
        READS.usual([], -1, b"", b"", [], 0)
