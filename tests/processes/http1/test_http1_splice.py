"""The compiled way of a stream against the Python one, read by read, over real sockets."""

import contextlib
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.processes.http1.splicing import SPLICE, ChunkWatch, FramingError

pytestmark = pytest.mark.skipif(
    SPLICE is None, reason="kvbench.processes.http1._splice was not compiled, or is refused"
)


DEADLINE_S = 10.0


class Way:
    """One stream through a splicer, between two pairs of sockets."""

    def __init__(self, left: int = 0) -> None:
        self.splicer = SPLICE.Splicer()
        self.upstream, self.source = socket.socketpair()
        self.target, self.client = socket.socketpair()
        self.back: list[tuple[int, int, int, bytes, bytes]] = []
        self.add(left)

    def add(self, left: int = 0) -> None:
        self.splicer.add(self.source.fileno(), self.target.fileno(), left, self._back)

    def _back(self, *returned: Any) -> None:
        self.back.append(returned)

    def send(self, data: bytes) -> bytes:
        """Sends upstream, lets the splicer work until it has done something; what the client got."""
        self.upstream.sendall(data)
        assert select.select([self.splicer.fileno(), self.client], (), (), DEADLINE_S)[0]
        if self.ready:
            self.splicer.collect()
        return self.received()

    def until_back(self) -> None:
        """Waits until the stream is given back."""
        assert select.select([self.splicer.fileno()], (), (), DEADLINE_S)[0]
        self.splicer.collect()

    def received(self) -> bytes:
        found = b""
        with contextlib.suppress(BlockingIOError):
            while piece := self.client.recv(1 << 20, socket.MSG_DONTWAIT):
                found += piece
        return found

    @property
    def ready(self) -> bool:
        return bool(select.select([self.splicer.fileno()], (), (), 0)[0])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def way(left: int = 0) -> Iterator[Way]:
    made = Way(left)
    try:
        yield made
    finally:
        made.splicer.close()
        for sock in (made.upstream, made.source, made.target, made.client):
            sock.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


sound = st.lists(st.binary(min_size=1, max_size=40).map(chunk), max_size=8).map(b"".join)
garbled = st.lists(
    st.sampled_from(
        [b"\r", b"\n", b"\r\n", b"0", b"1", b"f", b"A", b";x", b"a\r\n", b"\x00", b"g", b"0\r\n\r\n"]
    ),
    max_size=12,
).map(b"".join)


@settings(deadline=None, max_examples=70)
@given(
    body=st.builds(lambda *parts: b"".join(parts), sound, garbled, sound),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    last=st.booleans(),
)
def test_it_passes_on_what_python_passes_on_and_gives_back_all_else(
    body: bytes, cuts: list[int], last: bool
) -> None:
    body += b"0\r\n\r\n" if last else b""
    watch, at = ChunkWatch(), 0
    with way() as x:
        while at < len(body) and not watch.complete:
            read = body[at : at + cuts[at % len(cuts)]]
            at += len(read)
            left = watch.left
            try:
                expected: bytes | None = watch.feed(read)
            except FramingError:
                expected = None
            passed = x.send(read)
            if not x.back:
                assert passed == expected == read
                continue
            [(left_reported, _, _, given_back, unsent)] = x.back
            assert passed == b""
            assert given_back == read
            assert left_reported == left
            assert not unsent
            x.back.clear()
            if expected is None:
                break
            if watch.left is None:  # Python's until a size line is whole
                while at < len(body) and watch.left is None and not watch.complete:
                    try:
                        watch.feed(body[at : at + 1])
                    except FramingError:
                        return
                    at += 1
            if not watch.complete and watch.left is not None:
                x.add(watch.left)


def test_usual_chunks_are_passed_on_and_counted() -> None:
    reads = [chunk(b"data: 1\n\n"), chunk(b"a") + chunk(b"b" * 70), chunk(b"x" * 1000)[:500], b"x" * 300]
    with way() as x:
        assert not x.ready
        for read in reads:
            assert x.send(read) == read
            assert not x.ready
        whole = chunk(b"x" * 1000)
        assert x.splicer.remove(x.source.fileno()) == (len(whole) - 800, 4, len(b"".join(reads)))
        assert x.splicer.remove(x.source.fileno()) is None
        assert x.back == []


@pytest.mark.parametrize("size", [1, 0xFFFFFFF])
def test_a_size_line_is_read_up_to_seven_digits(size: int) -> None:
    with way() as x:
        head = b"%x\r\n" % size
        assert x.send(head) == head
        assert x.splicer.remove(x.source.fileno()) == (size + 2, 1, len(head))


def test_what_the_client_does_not_take_is_given_back_in_order() -> None:
    event = chunk(b"y" * 60_000)
    with way() as x:
        got, sent = b"", b""
        for sock in (x.upstream, x.source, x.target, x.client):
            sock.setblocking(False)
        while not x.back:
            _, writable, _ = select.select([x.splicer.fileno()], [x.upstream], (), DEADLINE_S)
            if writable:
                sent += event[len(sent) % len(event) :][: x.upstream.send(event[len(sent) % len(event) :])]
            x.splicer.collect()
        [(left, reads, passed_bytes, read, unsent)] = x.back
        assert read == b""
        assert reads >= 1
        while len(got) + len(unsent) < passed_bytes:
            got += x.received()
        assert (got + unsent) == sent[:passed_bytes]
        assert unsent
        assert left == (-passed_bytes) % len(event)
        # The rest is still to be read where it was.
        rest = len(sent) - passed_bytes
        assert not rest or x.source.recv(1 << 20) == sent[passed_bytes:]


def test_a_client_that_is_gone_is_for_python_to_find_out() -> None:
    with way() as x:
        x.client.close()
        x.upstream.sendall(chunk(b"one"))
        x.until_back()
        assert [returned[3:] for returned in x.back] == [(b"", chunk(b"one"))]


def test_an_end_is_left_in_the_socket() -> None:
    with way() as x:
        assert x.send(chunk(b"one")) == chunk(b"one")
        x.upstream.close()
        x.until_back()
        assert [returned[3:] for returned in x.back] == [(b"", b"")]
        assert x.source.recv(10) == b""
        assert not x.ready


def test_one_stream_may_take_another_out_that_was_given_back_too() -> None:
    ways = [Way() for _ in range(2)]
    first = ways[0]
    fds = [way.source.fileno() for way in ways]
    returned: list[int] = []

    def back(number: int) -> Any:
        def given_back(*_: Any) -> None:
            returned.append(number)
            first.splicer.remove(fds[1 - number])

        return given_back

    for number, way in enumerate(ways):
        way.splicer.remove(fds[number])
        first.splicer.add(fds[number], way.target.fileno(), 0, back(number))
        way.upstream.sendall(b"odd")
    for way in ways:  # both reads have been taken, so that both streams are in the queue
        until(lambda way=way: not select.select([way.source], (), (), 0)[0])  # type: ignore[misc]
    first.splicer.collect()
    assert len(returned) == 1
    assert not first.ready
    for way in ways:
        way.splicer.close()
        for sock in (way.upstream, way.source, way.target, way.client):
            sock.close()


def test_a_callback_that_fails_is_told_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: failures.append(found.exc_type))

    def fail(*_: Any) -> None:
        raise LookupError("on purpose")

    with way() as x, way() as other:
        x.splicer.remove(x.source.fileno())
        x.splicer.add(x.source.fileno(), x.target.fileno(), 0, fail)
        x.splicer.add(other.source.fileno(), other.target.fileno(), 0, other._back)
        x.upstream.sendall(b"odd")
        other.upstream.sendall(chunk(b"usual"))
        assert other.client.recv(100) == chunk(b"usual")
        x.until_back()
    assert failures == [LookupError]


COLLECTING = """
import gc, os, socket, sys, threading, time
from kvbench.processes.http1._splice import Splicer
splicer, flows = Splicer(), []
for _ in range(8):
    (writer, source), (target, reader) = socket.socketpair(), socket.socketpair()
    splicer.add(source.fileno(), target.fileno(), 0, lambda *told: None)
    flows.append((writer, source, target, reader))
end, over = time.monotonic() + 3, threading.Event()
def flow(writer, reader):
    chunk = b"1000\\r\\n" + bytes(4096) + b"\\r\\n"
    while not over.is_set():
        writer.sendall(chunk)
        reader.recv(65536)
def collect():
    while not over.is_set():
        gc.collect()
threads = [threading.Thread(target=flow, args=(each[0], each[3])) for each in flows]
threads.append(threading.Thread(target=collect))
for thread in threads:
    thread.daemon = True
    thread.start()
spare = [socket.socketpair() for _ in range(4)]
while time.monotonic() < end:
    for one, other in spare:
        splicer.add(one.fileno(), other.fileno(), 0, lambda *told: None)
    for one, _ in spare:
        splicer.remove(one.fileno())
over.set()
print("well")
os._exit(0)
"""


def test_garbage_may_be_collected_by_another_thread_meanwhile() -> None:
    """It once waited for the GIL with its lock held, and the collector for the lock with the GIL."""
    words = [sys.executable, "-c", COLLECTING]
    assert subprocess.run(words, capture_output=True, text=True, timeout=40, check=True).stdout == "well\n"


@pytest.mark.parametrize("fd", [2**31 - 1, 1 << 28, (1 << 24) + 1])
def test_absurd_descriptors_take_no_memory(fd: int) -> None:
    splicer = SPLICE.Splicer()
    try:
        for source, target in ((fd, 1), (1 << 20, 1)):
            with pytest.raises((ValueError, OSError)):
                splicer.add(source, target, 0, print)
        with pytest.raises(ValueError, match=f"descriptors {fd}"):
            splicer.add(fd, 1, 0, print)
    finally:
        splicer.close()


def test_mistakes_are_refused() -> None:
    with way() as x:
        fd = x.source.fileno()
        with pytest.raises(FileExistsError):
            x.splicer.add(fd, 1, 0, print)
        with pytest.raises(ValueError, match="-1 bytes left"):
            x.splicer.add(fd, 1, -1, print)
        with pytest.raises(ValueError, match="descriptors -1"):
            x.splicer.add(-1, fd, 0, print)
        with pytest.raises(OSError, match="Bad file descriptor"):
            x.splicer.add(99_999, fd, 0, print)
        with pytest.raises(TypeError):
            x.splicer.remove("x")
        assert x.splicer.remove(-5) is None


def threads() -> list[Path]:
    """Threads of this process that pass streams on."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if (task / "comm").read_text().strip() == "splice":
                found.append(task)
    return found


def test_its_thread_ends_with_it_and_hears_no_signal() -> None:
    before = set(threads())
    with way() as x:
        until(lambda: len(threads()) > len(before))  # it is named when it has begun
        [task] = set(threads()) - before
        blocked = re.search(r"SigBlk:\s*([0-9a-f]+)", (task / "status").read_text())
        assert int(blocked[1], 16) & (1 << (signal.SIGTERM - 1))
        for _ in range(2):
            x.splicer.close()
            until(lambda: set(threads()) == before)  # a joined thread may be listed for a moment


def test_a_descriptor_that_was_removed_is_not_touched_any_more() -> None:
    """Its number is given to other sockets at once, while chunks still come for the one that was there."""
    rounds = 300
    with way() as x:
        x.splicer.remove(x.source.fileno())
        usual = chunk(b"for the one who left")
        for _ in range(rounds):
            upstream, source = socket.socketpair()
            target, client = socket.socketpair()
            numbers = source.fileno(), target.fileno()
            x.splicer.add(*numbers, 0, x._back)
            for _ in range(3):
                upstream.send(usual)
            assert x.splicer.remove(source.fileno()) is not None
            source.close()
            target.close()
            others = (*socket.socketpair(), *socket.socketpair())
            assert {other.fileno() for other in others} >= set(numbers)
            for other in others:
                with pytest.raises(BlockingIOError):
                    other.recv(100, socket.MSG_DONTWAIT)
            for other in others:
                other.close()
            upstream.close()
            client.close()
        assert x.back == []


def test_streams_come_and_go_while_others_flow() -> None:
    """One thread adds and removes; what flows beside that arrives whole."""
    event = chunk(b"z" * 100)
    with way() as x:
        others = [(socket.socketpair(), socket.socketpair()) for _ in range(20)]
        sent = got = 0
        for turn in range(400):
            (_, source), (target, _) = others[turn % 20]
            x.splicer.add(source.fileno(), target.fileno(), 0, x._back)
            x.upstream.sendall(event * 3)
            sent += 3 * len(event)
            others[turn % 20][0][0].send(event)
            got += len(x.received())
            assert x.splicer.remove(source.fileno()) is not None
        until(lambda: not select.select([x.source], (), (), 0)[0])
        assert x.splicer.remove(x.source.fileno())[2] == sent
        assert got + len(x.received()) == sent
        for pairs in others:
            for pair in (*pairs[0], *pairs[1]):
                pair.close()


def test_it_is_closed_with_its_last_reference_even_in_a_circle() -> None:
    with way() as x:
        circle = SPLICE.Splicer()
        fd = circle.fileno()
        circle.add(x.source.fileno(), x.target.fileno(), 0, [circle].append)
        del circle
        gc.collect()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_closed_one_drops_its_streams_and_takes_no_other() -> None:
    with way() as x:
        fd = x.splicer.fileno()
        x.splicer.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert x.splicer.remove(x.source.fileno()) is None
        for call in (x.add, x.splicer.collect):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call()


def test_python_does_it_where_compiled_code_is_refused() -> None:
    code = "from kvbench.processes.http1.splicing import SPLICE; print(SPLICE)"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "KVBENCH_PURE_PYTHON": value},
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout.strip()
        for value in ("1", "0")
    ]  # fmt: skip
    assert found[0] == "None"
    assert found[1] != "None"
