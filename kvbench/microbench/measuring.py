"""One case, measured with workers that stand connected: fill, prepare, warm up, measure, verify."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from kvbench import transfer
from kvbench.core.transfers import cases as transferplan
from kvbench.core.transfers.cases import Pairing
from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.microbench.settings import Settings
from kvbench.microbench.sides import ANSWER_S, Asked, WorkerError, WorkerHandle, Workers
from kvbench.microbench.teams import Team, side_number
from kvbench.processes.transfer_worker.measure import Limits, unpack_times
from kvbench.transfer.parts.blocks import pack_ids

MAX_CALLS: Final = 200_000
"""Of one initiator in one case: each call's own time is kept."""
WARMUP_SHARE: Final = 0.15
WARMUP_CALLS: Final = 3
WARMUP_MAX_S: Final = 1.0
START_DELAY_S: Final = 0.01
"""Several initiators start at one moment of their common clock, so long after they are asked."""
SLOWEST_BYTES_PER_S: Final = 50e6
"""Large transfers get more time than ``call_s``: what is slower than this, all together, counts as stuck."""
BYTES_PER_S: Final = 50e6
"""A fill or a comparison slower than this is taken for a dead worker's."""


@dataclass
class CounterWindow:
    """Counters of all workers, initiators first, right before and right after what was timed."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


@dataclass
class _Timed:
    """What the initiators' loops said, of one round or several."""

    calls: int = 0
    window_s: float = 0.0
    call_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    transport: str = ""

    def add(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """One round: its window is from the first start to the last end over all initiators."""
        first, last = (min(a["started_ns"] for a in answers), max(a["ended_ns"] for a in answers))
        self.window_s += (last - first) / 1e9
        self.calls += sum(answer["calls"] for answer in answers)
        self.cpu_s += sum(answer["cpu_s"] for answer in answers)
        self.call_s += [ns / 1e9 for answer in answers for ns in unpack_times(answer["call_ns"])]
        self.transport = answers[0]["transport"]


class CaseRun:
    """The steps of one case; fills its record. Every step raises WorkerError when something is wrong."""

    def __init__(
        self, case: Case, record: TransferRecord, team: Team, workers: Workers, settings: Settings
    ) -> None:
        self._case = case
        self._record = record
        self._team = team
        self._workers = workers
        self._settings = settings
        self._pairs = transferplan.pairings(case, settings.seed)
        self._moves = transfer.get(case.backend).moves_bytes
        size = max(layout.nbytes for layout in team.layouts)
        under_way = case.nbytes * case.threads * case.initiators * case.targets
        self._call_s = max(settings.call_s, under_way / SLOWEST_BYTES_PER_S)
        self._repeats: int | None = None
        self._offered = False
        self._bytes_s = ANSWER_S + size / BYTES_PER_S

    def run(self, new_content: Callable[[], int], on_stage: Callable[[str], None]) -> CounterWindow:
        """All steps. ``new_content`` numbers what the buffers hold, so that no two fills are alike."""
        on_stage("preparing")
        generation = new_content()
        self._fill(generation)
        self._prepare()
        self._warm_up()
        on_stage("measuring")
        window = self._measure()
        if self._moves and self._settings.verify:
            on_stage("verifying")
            self._verify(generation)
            # Once more with other bytes: a repeated transfer that does nothing would have passed so far.
            generation = new_content()
            self._fill(generation)
            count = self._tickets
            self._run(Limits(0.0, count, count, self._call_s, self._call_s))
            self._verify(generation)
            self._record.verified = True
        return window

    @property
    def _tickets(self) -> int:
        """Transfers under way at each initiator."""
        return self._case.threads * self._case.targets

    def _fill(self, generation: int) -> None:
        if not self._moves:
            return
        team = self._team
        self._workers.ask(
            [(worker, "fill", {"generation": generation}) for worker in team.everyone], self._bytes_s
        )
        self._offer()

    def _offer(self) -> None:
        if self._case.op == "read" and self._moves:
            self._to_targets("offer", self._bytes_s + self._settings.connect_s)
            self._offered = True

    def _to_targets(self, command: str, deadline_s: float) -> None:
        asked: list[Asked] = [
            (worker, command, {"blocks": pack_ids(self._blocks_at(number))})
            for number, worker in enumerate(self._team.targets)
        ]
        self._workers.ask(asked, deadline_s)

    def _blocks_at(self, target: int) -> list[int]:
        return [block for pair in self._pairs if pair.target == target for block in pair.remote]

    def _prepare(self) -> None:
        asked: list[Asked] = []
        for number, worker in enumerate(self._team.initiators):
            transfers = [
                {
                    "peer": self._team.agents[pair.target]["id"],
                    "local": pack_ids(pair.local),
                    "remote": pack_ids(pair.remote),
                }
                for pair in self._pairs
                if pair.initiator == number
            ]
            asked.append((worker, "prepare", {"op": self._case.op, "transfers": transfers}))
        answers = self._workers.ask(asked, self._bytes_s + self._call_s)
        self._record.prepare_s = statistics.median(s for answer in answers for s in answer["prepare_s"])
        self._record.descriptors = answers[0]["descriptors"]
        self._record.nbytes = answers[0]["nbytes"]
        self._repeats = answers[0]["repeats"]

    def _warm_up(self) -> None:
        seconds = WARMUP_SHARE * self._settings.seconds
        calls = WARMUP_CALLS * self._tickets
        done = self._run(Limits(seconds, calls, MAX_CALLS, WARMUP_MAX_S, self._call_s))
        self._record.warmup_calls = done.calls

    def _measure(self) -> CounterWindow:
        settings, record = self._settings, self._record
        least = max(settings.min_calls, self._tickets)
        before = self._counters()
        done = self._run(Limits(settings.seconds, least, MAX_CALLS, settings.max_seconds, self._call_s))
        after = self._counters()
        record.transport = done.transport
        record.calls, record.window_s, record.call_s = done.calls, done.window_s, done.call_s
        record.initiator_cpu_s = done.cpu_s
        count = len(self._team.initiators)
        record.target_cpu_s = sum(
            b["cpu_s"] - a["cpu_s"] for a, b in zip(before[count:], after[count:], strict=True)
        )
        if self._moves and record.window_s:
            record.gb_per_s = record.calls * record.nbytes / record.window_s / 1e9
        return CounterWindow(before, after)

    def _run(self, limits: Limits) -> _Timed:
        """Keep all transfers going until the limits, in rounds where the target must offer anew."""
        done, left = _Timed(), limits
        while True:
            if self._repeats is not None and not self._offered:
                self._offer()
            done.add(self._round(replace(left, repeats=self._repeats)))
            self._offered = False
            left = replace(
                limits,
                seconds=limits.seconds - done.window_s,
                min_calls=limits.min_calls - done.calls,
                max_seconds=limits.max_seconds - done.window_s,
            )
            over = left.seconds <= 0 and (left.min_calls <= 0 or left.max_seconds <= 0)
            if self._repeats is None or over or done.calls >= limits.max_calls:
                return done

    def _round(self, limits: Limits) -> list[dict[str, Any]]:
        workers = self._team.initiators
        start_at_ns = 0
        if len(workers) > 1:
            clock = self._workers.ask([(workers[0], "counters", {})], ANSWER_S)[0]["clock_ns"]
            start_at_ns = clock + int(START_DELAY_S * 1e9)
        content = {"limits": asdict(limits), "start_at_ns": start_at_ns}
        longest = max(limits.seconds, limits.max_seconds) + limits.call_deadline_s + ANSWER_S
        return self._workers.ask([(worker, "run", content) for worker in workers], longest)

    def _counters(self) -> list[dict[str, Any]]:
        return self._workers.ask([(worker, "counters", {}) for worker in self._team.everyone], ANSWER_S)

    def _verify(self, generation: int) -> None:
        """Compare all blocks where they have arrived. Raises WorkerError for the first wrong byte."""
        write = self._case.op == "write"
        if write:
            self._to_targets("collect", self._bytes_s + self._settings.connect_s)
        asked = [self._comparison(pair, generation) for pair in self._pairs]
        # Answers come one by one and in order, so all pairs of all workers may be asked at once.
        for answer, (worker, _, _) in zip(self._workers.ask(asked, self._bytes_s * 2), asked, strict=True):
            if answer["difference"]:
                self._record.verified = False
                raise WorkerError(f"wrong bytes arrived at the {worker.name}: {answer['difference']}")

    def _comparison(self, pair: Pairing, generation: int) -> Asked:
        if self._case.op == "write":
            worker, side = self._team.targets[pair.target], side_number("initiator", pair.initiator)
            blocks, source = pair.remote, pair.local
        else:
            worker, side = self._team.initiators[pair.initiator], side_number("target", pair.target)
            blocks, source = pair.local, pair.remote
        origin = {"side": side, "generation": generation, "blocks": pack_ids(source)}
        return worker, "verify", {"blocks": pack_ids(blocks), "source": origin}


def carried(workers: Sequence[WorkerHandle], window: CounterWindow) -> dict[str, dict[str, int]]:
    """Side → NIC → bytes in the window: of both directions the larger one."""
    found: dict[str, dict[str, int]] = {}
    for worker, before, after in zip(workers, window.before, window.after, strict=True):
        role = worker.name.partition("-")[0]
        moved = {
            name: int(max(after["nics"][name][way] - count[way] for way in ("sent_bytes", "received_bytes")))
            for name, count in before["nics"].items()
            if name in after["nics"]
        }
        # Workers of one side share their host's counters.
        found.setdefault(role, moved)
    return found
