"""One engine on virtual time that runs step by step: the simplest loop around the scheduler."""

import heapq
from collections.abc import Callable, Sequence

from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest, Scheduler
from kvbench.core.simulation.step_time import TimingProfile


class VirtualEngine:
    """One engine on virtual time.

    ``load_s`` says how long the KV of a remote request takes to arrive; tokens appear in
    ``token_times`` by request id, in seconds of virtual time.
    """

    def __init__(
        self,
        config: EngineConfig,
        timing: TimingProfile,
        time_scale: float = 1.0,
        load_s: Callable[[EngineRequest], float] = lambda request: 0.0,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.timing = timing
        self.time_scale = time_scale
        self.now = 0.0
        self.busy_s = 0.0
        self.token_times: dict[str, list[float]] = {}
        self._load_s = load_s
        self._loads: list[tuple[float, int, EngineRequest]] = []
        self._load_count = 0

    def step(self) -> bool:
        """Run one step, or move on to the next event. False when nothing is left to happen."""
        self._land_loads()
        plan = self.scheduler.schedule(self.now)
        for request in plan.loads:
            self._load_count += 1
            heapq.heappush(self._loads, (self.now + self._load_s(request), self._load_count, request))
        if not plan.chunks:
            return bool(plan.preempted) or self._skip_ahead()
        duration = self.timing.step_s(plan.load, self.time_scale)
        self.now += duration
        self.busy_s += duration
        for request in self.scheduler.complete(plan):
            self.token_times.setdefault(request.request_id, []).append(self.now)
            if request.output_len >= request.max_tokens:
                self.scheduler.finish(request)
        return True

    def _land_loads(self) -> None:
        while self._loads and self._loads[0][0] <= self.now:
            self.scheduler.kv_arrived(heapq.heappop(self._loads)[2])

    def _skip_ahead(self) -> bool:
        """Go to the next arrival of a request or of KV; False if there is none."""
        events = [self._loads[0][0]] if self._loads else []
        arrival = self.scheduler.next_ready_s()
        if arrival is not None and arrival > self.now:
            events.append(arrival)
        if not events:
            return False
        self.now = min(events)
        return True


def serve(engine: VirtualEngine, requests: Sequence[EngineRequest]) -> dict[str, list[float]]:
    """Serve requests, given in order of arrival; returns each one's token times."""
    for request in requests:
        engine.scheduler.add(request)
    while engine.step():
        pass
    return engine.token_times
