"""Who answers what a system is asked: a command's process, line by line, or code in this process."""

from __future__ import annotations

from typing import Protocol

from kvbench.core.simulation.data import SimulatedLoad
from kvbench.sweep.system.answer_check import SystemAnswer, read_answer
from kvbench.sweep.system.replay import Replayed
from kvbench.sweep.system.simulator_process import SimulatorProcess


class Answering(Protocol):
    """One system, from its start on: what it is asked and told, in the order of the virtual clock."""

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        """What becomes of a load that begins then, if all of it is sent. Raises KvbenchError."""

    def ended(self, replayed: Replayed) -> None:
        """What came of the load that was asked last."""


class CommandAnswers:
    """By the protocol of docs/simulate.md."""

    def __init__(self, process: SimulatorProcess) -> None:
        self._process = process

    def answer(self, load: SimulatedLoad, seed: int, starts_at_s: float) -> SystemAnswer:
        line = self._process.ask(
            {
                "type": "trial",
                "seed": seed,
                "starts_at_s": starts_at_s,
                "timeout_s": load.timeout_s,
                "arrivals_s": list(load.offsets_s),
                "input_len": list(load.input_len),
                "output_len": list(load.output_len),
            }
        )
        try:
            return read_answer(line, load.offsets_s)
        except ValueError as error:
            raise self._process.nonsense(f"an answer that cannot be used: {error}; the line", line) from error

    def ended(self, replayed: Replayed) -> None:
        self._process.tell(
            {
                "type": "end",
                "cut_at_s": replayed.cut_at_s,
                "cancelled": replayed.dropped,
                "ended_at_s": replayed.load.duration_s,
            }
        )
