"""The blocking hand-off on virtual time: as in vLLM 0.6, whose first P/D connectors ran in the model runner.

P gives a request's KV away between two of its steps, and D takes one after the other in place of a step; only
then come their first tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from kvbench.core.simulation.engine import Flow, StepEngine
from kvbench.core.simulation.scheduler import EngineRequest


class BlockingHandOff:
    """Who takes from whom, and who has to wait.

    ``give`` sends one request's KV on its way and calls ``take_next`` when D has it; ``poke`` lets an engine
    go on with its steps.
    """

    def __init__(
        self,
        flow_of: Mapping[EngineRequest, Flow],
        give: Callable[[Flow], None],
        poke: Callable[[StepEngine], None],
    ) -> None:
        self._flow_of = flow_of
        self._give = give
        self._poke = poke
        self._taking: dict[StepEngine, deque[Flow]] = {}
        self._after_step: dict[StepEngine, list[Flow]] = {}
        self._filled: set[StepEngine] = set()

    def takes(self, engine: StepEngine) -> bool:
        """Whether a D is taking KV, and so computes nothing."""
        return engine in self._taking

    def begin(self, engine: StepEngine, now: float) -> float | None:
        """Lets an engine begin a step, or take KV in place of one; returns when its step ends, or None.

        What was just filled makes its first tokens before more is taken.
        """
        end = engine.begin(now, loads_first=engine not in self._filled)
        self._filled.discard(engine)
        if not engine.loads:
            return end
        if end is not None:
            return engine.cut(now) or end
        self._taking[engine] = deque(self._flow_of[request] for request in engine.loads)
        engine.loads = []
        self.take_next(engine)
        return None

    def take_next(self, engine: StepEngine) -> None:
        """D waits until P is between two steps, and takes one request's KV; after the last it computes."""
        queue = self._taking[engine]
        if not queue:
            del self._taking[engine]
            self._filled.add(engine)
            self._poke(engine)
            return
        flow = queue.popleft()
        assert flow.first is not None
        flow.asked = True
        if flow.first.busy:
            self._after_step.setdefault(flow.first, []).append(flow)
        else:
            self._give(flow)

    def stepped(self, engine: StepEngine) -> None:
        """A P has ended a step: it gives what was waited for."""
        for flow in self._after_step.pop(engine, ()):
            self._give(flow)
