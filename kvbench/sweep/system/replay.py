"""An answered trial as a load generator lives it: progress in its rhythm, its stop, its records."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.core.records import RequestError, RequestRecord
from kvbench.core.simulation.data import SimulatedLoad
from kvbench.core.simulation.deployment import TICK_S
from kvbench.sweep.system.answer_check import SystemAnswer
from kvbench.sweep.trial.load_progress import LoadResult, Progress, Settled


@dataclass(frozen=True)
class Replayed:
    """``cut_at_s``: when nothing more was sent; ``dropped``: whom the client gave up, at the load's end or,
    past their timeout, before it.
    """

    load: LoadResult
    cut_at_s: float
    dropped: list[int]


class Replay:
    """One trial. Requests have ``grace_s`` to end when it is stopped."""

    def __init__(self, load: SimulatedLoad, answer: SystemAnswer, grace_s: float) -> None:
        self._load = load
        self._answer = answer
        self._grace_s = grace_s
        ends = [self._end(index) for index in range(len(load.offsets_s))]
        self._ends_s = [end_s for end_s, _ in ends]
        self._errors = [error for _, error in ends]
        self._firsts_s = [
            end_s if first_s is None else min(max(first_s, arrival_s), end_s)
            for first_s, end_s, arrival_s in zip(
                answer.first_token_s, self._ends_s, load.offsets_s, strict=True
            )
        ]
        """When it no longer waits for a first token."""
        self._records: dict[int, RequestRecord] = {}
        """Of those that have ended."""

    def run(self, watch: Callable[[Progress], bool]) -> Replayed:
        """``watch`` is told the progress, and stops the trial by returning True."""
        arrivals = self._load.offsets_s
        sent = len(arrivals)
        end_s = max([*self._ends_s, *arrivals[-1:]], default=0.0)
        cut_s = None
        for progress in self._told(range(sent), 0.0, end_s):
            # What comes at the end is told, too, when nothing is left to be stopped.
            if watch(progress) and progress.t_s < end_s:
                cut_s = progress.t_s
                break
        if cut_s is None:
            records = [self._record(index) for index in range(sent)]
            return Replayed(LoadResult(records, "complete", end_s), end_s, self._dropped(records))
        sent = bisect_right(arrivals, cut_s)
        last_s = cut_s + self._grace_s
        for index in range(sent):
            if self._ends_s[index] > last_s:
                self._ends_s[index], self._errors[index] = last_s, "cancelled"
                self._firsts_s[index] = min(self._firsts_s[index], last_s)
        end_s = max([cut_s, *self._ends_s[:sent]])
        for progress in self._told(range(sent), cut_s, end_s):
            watch(progress)
        records = [self._record(index) for index in range(sent)]
        return Replayed(LoadResult(records, "stopped", end_s), cut_s, self._dropped(records))

    def _told(self, indices: Sequence[int], after_s: float, end_s: float) -> Iterator[Progress]:
        """The progress after ``after_s``, as often as a load generator tells it, and at the end."""
        ends = sorted(indices, key=lambda index: (self._ends_s[index], index))
        ends_s = [self._ends_s[index] for index in ends]
        firsts_s = sorted(self._firsts_s[index] for index in indices)
        offsets_s = self._load.offsets_s[: len(indices)]
        told, tick = bisect_right(ends_s, after_s) if after_s else 0, round(after_s / TICK_S)
        while True:
            tick += 1
            now_s = min(tick * TICK_S, end_s)
            sent, done = bisect_right(offsets_s, now_s), bisect_right(ends_s, now_s)
            yield Progress(
                t_s=now_s,
                sent=sent,
                done=done,
                in_flight=sent - done,
                waiting_first=sent - bisect_right(firsts_s, now_s),
                settled=tuple([self._settled(index) for index in ends[told:done]]),
            )
            told = done
            if now_s >= end_s:
                return

    def _end(self, index: int) -> tuple[float, RequestError]:
        """When and how it ends if it is not cancelled."""
        answer, arrival_s = self._answer, self._load.offsets_s[index]
        first_s, last_s, error = answer.first_token_s[index], answer.last_token_s[index], answer.errors[index]
        late_s = arrival_s + self._load.timeout_s
        if error:
            told_s = last_s if last_s is not None else first_s
            end_s = arrival_s if told_s is None else max(told_s, arrival_s)
        else:
            end_s = late_s if last_s is None else max(last_s, arrival_s)
            if last_s is not None and end_s <= late_s:
                return end_s, ""
        if error and end_s <= late_s:
            return end_s, error
        return late_s, "no_answer" if first_s is None or first_s > late_s else "timeout"

    def _settled(self, index: int) -> Settled:
        record = self._record(index)
        return Settled(index, record.ttft_s, record.tpot_s, record.e2el_s, record.error)

    def _record(self, index: int) -> RequestRecord:
        if index not in self._records:
            self._records[index] = self._made(index)
        return self._records[index]

    def _made(self, index: int) -> RequestRecord:
        """As the load generator writes it: of a request that failed there is what had come by then."""
        load, end_s, error = self._load, self._ends_s[index], self._errors[index]
        arrival_s, tokens = load.offsets_s[index], load.output_len[index]
        record = RequestRecord(
            f"sim-{index}", arrival_s, load.input_len[index], tokens, sent_s=arrival_s, error=error
        )
        record.error_detail = self._detail(error)
        times = self._token_times(index)
        times = times[: times.searchsorted(end_s, side="right")]
        if not error:
            record.output_len, record.status = tokens, 200
        if len(times):
            record.status = 200
            record.first_token_s, record.last_token_s = float(times[0]), float(times[-1])
            record.itl_s = array("f", (times[1:] - times[:-1]).astype(np.float32).tobytes())
        if not error:
            record.last_token_s = end_s  # later than its token, if it has but one
        return record

    def _detail(self, error: RequestError) -> str:
        if error in ("timeout", "no_answer"):
            part = "nothing of an" if error == "no_answer" else "no complete"
            return f"{part} answer within {self._load.timeout_s:g} s"
        if error == "cancelled":
            return "the trial was stopped"
        return "as the system answered" if error else ""

    def _token_times(self, index: int) -> NDArray[np.float64]:
        """Of all its tokens, ascending: as told, else evenly between the first and the last."""
        first_s, last_s = self._answer.first_token_s[index], self._answer.last_token_s[index]
        if first_s is None:
            return np.empty(0)
        first_s = max(first_s, self._load.offsets_s[index])
        if events := self._answer.events_s[index]:
            return np.maximum(events, first_s)
        if last_s is None or self._load.output_len[index] < 2:
            return np.array([first_s])
        gaps, last_s = self._load.output_len[index] - 1, max(last_s, first_s)
        times = first_s + (last_s - first_s) * np.arange(gaps + 1.0) / gaps
        times[-1] = last_s  # as it was told: a sum of gaps may be off by a rounding, and beyond its end
        return times

    def _dropped(self, records: Sequence[RequestRecord]) -> list[int]:
        given_up = ("cancelled", "timeout", "no_answer")
        return [index for index, record in enumerate(records) if record.error in given_up]
