"""Which blocks move, what they hold, how calls are counted, what makes a row weak: without any process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.transfers import cases as transferplan
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.core.transfers.stats import CaseConditions, warnings
from kvbench.errors import InputError, TransferError
from kvbench.processes.transfer_worker.measure import Limits, measure, pack_times, unpack_times
from kvbench.processes.transfer_worker.memory import Content, HostMemory, available_bytes, difference, fill
from kvbench.transfer.base import Layout, Ticket
from kvbench.transfer.null import NullEndpoint
from kvbench.transfer.parts.blocks import merge_runs

CASE = Case("tcp", "tcp", "write", 4096, 8)


# --- which blocks
cases = st.builds(
    Case, backend=st.just("tcp"), protocol=st.just("tcp"), op=st.sampled_from(["read", "write"]),
    block_bytes=st.integers(1, 1 << 20), batch_size=st.integers(1, 20), threads=st.integers(1, 4),
    initiators=st.integers(1, 3), targets=st.integers(1, 3), scattered=st.booleans(), merged=st.booleans(),
    regions=st.integers(1, 4),
)  # fmt: skip


@given(cases, st.integers(0, 3))
def test_every_transfer_under_way_has_blocks_of_its_own(case: Case, seed: int) -> None:
    pairs = transferplan.pairings(case, seed)
    assert len(pairs) == case.initiators * case.targets * case.threads
    ours, theirs = transferplan.initiator_layout(case), transferplan.target_layout(case)
    for number in range(case.initiators):
        local = [block for pair in pairs if pair.initiator == number for block in pair.local]
        assert len(set(local)) == len(local) == case.targets * case.threads * case.batch_size
        assert min(local) >= 0
        assert max(local) < ours.blocks
    for number in range(case.targets):
        remote = [block for pair in pairs if pair.target == number for block in pair.remote]
        assert len(set(remote)) == len(remote) == case.initiators * case.threads * case.batch_size
        assert min(remote) >= 0
        assert max(remote) < theirs.blocks


@given(cases, st.integers(0, 3))
def test_scattered_blocks_never_touch_and_others_are_one_run(case: Case, seed: int) -> None:
    pairs = transferplan.pairings(case, seed)
    for pair in pairs:
        runs = merge_runs(pair.local, pair.remote)
        assert len(runs) == (case.batch_size if case.scattered else 1)
        steps = zip(itertools.pairwise(pair.local), itertools.pairwise(pair.remote), strict=True)
        follow = [b - a == d - c == 1 for (a, b), (c, d) in steps]
        # A library that merges in the given order finds all neighbours, or none.
        assert set(follow) <= {case.merged and not case.scattered}
    if case.regions > 1:  # the regions of a transfer never touch
        assert all(min(pair.local) > 0 and min(pair.remote) > 0 for pair in pairs)
    if case.scattered:
        for ids in ([b for p in pairs if p.initiator == 0 for b in p.local], pairs[0].remote):
            placed = sorted(ids)
            assert all(later - block > 1 for block, later in itertools.pairwise(placed))


def test_both_sides_scatter_in_orders_of_their_own() -> None:
    (pair,) = transferplan.pairings(replace(CASE, scattered=True, batch_size=64))
    assert pair.local != pair.remote != tuple(sorted(pair.remote))
    assert transferplan.pairings(CASE, 1) == transferplan.pairings(CASE, 1)


# --- what they hold
layouts = st.builds(
    Layout, regions=st.integers(1, 3), blocks=st.integers(1, 12), block_bytes=st.integers(1, 3000)
)


@given(layouts, st.integers(0, 1 << 70), st.data())
def test_a_single_wrong_bit_anywhere_is_found(layout: Layout, seed: int, data: st.DataObject) -> None:
    memory, content = HostMemory(layout.nbytes), Content(seed, 1, 2)
    fill(memory, layout, content)
    every = list(range(layout.blocks))
    assert difference(memory, layout, every, content, every) == ""
    at = data.draw(st.integers(0, layout.nbytes - 1))
    memory.put(at, memory.get(at, 1) ^ np.uint8(1 << data.draw(st.integers(0, 7))))
    region, rest = divmod(at, layout.blocks * layout.block_bytes)
    block, byte = divmod(rest, layout.block_bytes)
    message = difference(memory, layout, every, content, every)
    assert message == f"region {region}, block {block}: byte {byte} is not what was sent"
    others = [number for number in every if number != block]
    assert difference(memory, layout, others, content, others) == ""


def test_large_blocks_are_compared_to_their_end() -> None:
    layout = Layout(1, 2, (3 << 20) + 5)
    memory, content = HostMemory(layout.nbytes), Content(7, 0)
    fill(memory, layout, content)
    assert difference(memory, layout, [0, 1], content, [0, 1]) == ""
    memory.put(layout.nbytes - 1, memory.get(layout.nbytes - 1, 1) ^ np.uint8(128))
    assert f"block 1: byte {(3 << 20) + 4}" in difference(memory, layout, [0, 1], content, [0, 1])


def test_no_two_blocks_are_alike() -> None:
    layout = Layout(3, 50, 64)
    seen = set()
    for content in (Content(1, 0), Content(1, 1), Content(1, 0, 1), Content(2, 0)):
        memory = HostMemory(layout.nbytes)
        fill(memory, layout, content)
        whole = memory.get(0, layout.nbytes).tobytes()
        # Also not where the bytes of one block begin a word later in another.
        seen |= {whole[at : at + 56] for start in range(0, len(whole), 64) for at in (start, start + 8)}
    assert len(seen) == 4 * 3 * 50 * 2


def test_blocks_that_arrived_in_each_others_place_are_found() -> None:
    layout = Layout(1, 4, 4096)
    memory, content = HostMemory(layout.nbytes), Content(0, 0)
    fill(memory, layout, content)
    assert difference(memory, layout, [0, 1], content, [1, 0]).startswith("region 0, block 0: byte")
    with pytest.raises(InputError, match="cannot be compared"):
        difference(memory, layout, [0], content, [0, 1])


def test_memory_that_is_not_there_is_refused_before_it_is_taken() -> None:
    room = available_bytes()
    assert room > 0
    with pytest.raises(InputError, match="does not fit"):
        HostMemory(2 * room)


# --- how calls are counted
class Slow(NullEndpoint):
    """Each transfer is done when it is asked for the third time, the last one not at all."""

    def __init__(self, ends: int = 1 << 30) -> None:
        super().__init__()
        self.started: list[int] = []
        self._polls: dict[int, int] = {}
        self._ends = ends

    def start(self, ticket: Ticket) -> None:
        assert self._polls.get(id(ticket), 3) == 3, "started again before it was done"
        self.started.append(id(ticket))
        self._polls[id(ticket)] = 0

    def poll(self, ticket: Ticket) -> bool:
        if len(self.started) > self._ends:
            return False
        self._polls[id(ticket)] += 1
        return self._polls[id(ticket)] == 3


def tickets(count: int) -> list[Ticket]:
    return [Ticket("peer", "write", 10, 1, 0.0) for _ in range(count)]


def limits(**given: float) -> Limits:
    usual = {"seconds": 0.0, "min_calls": 1, "max_calls": 1000, "max_seconds": 5.0, "call_deadline_s": 0.2}
    return Limits(**{**usual, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_calls_are_as_many_as_the_limits_say(count: int) -> None:
    endpoint = Slow()
    done = measure(endpoint, tickets(count), limits(min_calls=20))
    assert len(done.call_ns) == len(endpoint.started) == 20
    assert all(0 < ns <= done.ended_ns - done.started_ns for ns in done.call_ns)
    assert len(measure(Slow(), tickets(count), limits(seconds=60, max_calls=37)).call_ns) == 37
    assert len(measure(Slow(), tickets(count), limits(min_calls=10**6, max_seconds=0.0)).call_ns) == count
    assert unpack_times(pack_times(done.call_ns)) == done.call_ns


@pytest.mark.parametrize("count", [1, 3])
def test_no_transfer_is_started_oftener_than_it_may_be(count: int) -> None:
    endpoint = Slow()
    done = measure(endpoint, tickets(count), limits(seconds=60, repeats=4))
    assert len(done.call_ns) == 4 * count
    assert {endpoint.started.count(which) for which in endpoint.started} == {4}


@pytest.mark.parametrize("count", [1, 3])
def test_a_call_that_does_not_end_is_told_with_its_deadline(count: int) -> None:
    with pytest.raises(TransferError, match=r"the write of 10 bytes did not end within 0\.2 s"):
        measure(Slow(ends=8), tickets(count), limits(seconds=60))


# --- what makes a row weak
def row(calls: int = 1000, call_s: float = 1e-3, **given: object) -> TransferRecord:
    record = TransferRecord(
        replace(CASE, nics=2), calls=calls, window_s=calls * call_s, call_s=[call_s] * calls, verified=True
    )
    record.nbytes, record.gb_per_s, record.transport = 1 << 20, 1.0, "tcp"
    for name, value in given.items():
        setattr(record, name, value)
    return record


def kinds(record: TransferRecord, **seen: object) -> list[str]:
    return [warning.kind for warning in warnings(record, CaseConditions(**{"cores": 2, **seen}))]  # type: ignore[arg-type]


def test_a_good_row_has_no_warning() -> None:
    good = {side: {"eth0": 500 << 20, "eth1": 500 << 20} for side in ("initiator", "target")}
    nics: dict[str, Sequence[str]] = {side: ["eth0", "eth1"] for side in good}
    assert kinds(row(), carried=good, requested_nics=nics, load_before=0.5, burst_bytes=1 << 16) == []


def test_each_weakness_is_told() -> None:
    assert kinds(row(), load_before=2.5) == ["machine_busy"]
    assert kinds(row(), others_cpu_s=0.5) == ["machine_busy"]
    assert kinds(row(), steal_s=0.1) == ["cpu_stolen"]
    assert (kinds(row(calls=19, call_s=0.1)), kinds(row(calls=100))) == (["few_repeats"], ["few_repeats"])
    assert kinds(row(calls=100_000, call_s=1e-6)) == [], "many calls tell enough in a short window"
    assert kinds(row(), burst_bytes=100 << 20) == ["near_burst"]
    assert kinds(row(calls=10_000), burst_bytes=1 << 20) == ["near_burst"], "one transfer fits into the burst"
    busy = row(call_s=5e-3, initiator_cpu_s=4.9)
    assert kinds(busy) == kinds(busy, memcpy_gb_per_s=5.0) == ["busy_waiting"]
    assert kinds(busy, memcpy_gb_per_s=0.9) == []
    assert kinds(row(call_s=1e-3, initiator_cpu_s=1.0)) == [], "that is our own asking"
    assert kinds(row(transport="ucx:cma/memory")) == ["other_transport"]
    assert kinds(row(transport="ucx:tcp (configured)")) == ["transport_unproven"]
    assert kinds(row(verified=None)) == ["not_verified"]
    assert kinds(row(verified=None, transport="none"), moves_bytes=False) == []


def test_a_row_is_weak_from_its_limits_on() -> None:
    # Of two cores for a second, the others may have 15 % and the hypervisor 2 %.
    assert kinds(row(), load_before=2.0) == kinds(row(), others_cpu_s=0.3) == kinds(row(), steal_s=0.04) == []
    assert kinds(row(), others_cpu_s=0.301) == ["machine_busy"]
    assert (kinds(row(), steal_s=0.041), kinds(row(), load_before=9.0, cores=0)) == (["cpu_stolen"], [])
    # 500 MiB passed each of two NICs: 5 % of it may be a burst.
    assert kinds(row(), burst_bytes=25 << 20) == ["near_burst"], "no 20 transfers: one is half of a burst"
    large = row(calls=400, call_s=5e-3, nbytes=64 << 20)
    assert kinds(large, burst_bytes=15 << 20) == []
    assert kinds(large, burst_bytes=16 << 20) == ["near_burst"], (
        "two NICs take 32 MiB at once, two of them 64"
    )
    # An initiator that asks without rest for nine tenths of its time.
    waits = row(call_s=5e-3, initiator_cpu_s=4.5)
    assert (kinds(waits), kinds(row(call_s=5e-3, initiator_cpu_s=4.4))) == (["busy_waiting"], [])
    assert kinds(row(call_s=2e-3, initiator_cpu_s=1.9)) == [], "calls of 2 ms are asked for by us"
    four = replace(waits.case, initiators=4)
    assert kinds(row(call_s=5e-3, initiator_cpu_s=17.9, case=four)) == []
    assert kinds(row(call_s=5e-3, initiator_cpu_s=18.1, case=four)) == ["busy_waiting"]
    assert kinds(row(call_s=5e-3, initiator_cpu_s=4.9, case=replace(waits.case, backend="shm"))) == []
    assert kinds(row(calls=20, call_s=0.1)) == []


@pytest.mark.parametrize(("carried", "kind"), [
    ((500, 500), ""),
    ((945, 49), "idle_nics"),  # no tenth of its half
    ((945, 51), ""),
    ((450, 450), ""),
    ((450, 449), "bytes_elsewhere"),
])  # fmt: skip
def test_nics_share_what_was_moved(carried: tuple[int, int], kind: str) -> None:
    seen = {"target": {"eth0": carried[0] << 20, "eth1": carried[1] << 20}}
    found = kinds(row(), carried=seen, requested_nics={"target": ["eth0", "eth1"]})
    assert found == ([kind] if kind else [])


def test_nics_that_did_not_carry_are_named() -> None:
    nics = {"initiator": ["eth0", "eth1"]}
    idle = {"initiator": {"eth0": 1000 << 20, "eth1": 1000, "lo": 0}}
    (warning,) = warnings(row(), CaseConditions(cores=2, carried=idle, requested_nics=nics))
    assert warning.kind == "idle_nics"
    assert "1 of 2 NICs" in warning.message
    assert "eth1" in warning.message
    elsewhere = {"initiator": {"eth0": 10, "eth1": 10, "lo": 1001 << 20, "eth2": 5}}
    (warning,) = warnings(row(), CaseConditions(cores=2, carried=elsewhere, requested_nics=nics))
    assert warning.kind == "bytes_elsewhere"
    assert "only 0%" in warning.message
    assert "lo" in warning.message
