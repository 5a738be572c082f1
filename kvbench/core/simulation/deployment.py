"""A whole deployment on virtual time: router, P instances, KV transfers, D instances; no waiting.

The engines are the emulated engine's model (``core.simulation.scheduler``), the rest is a few constants
(``Overheads``, ``Link``). Input: planned sends. Output: request records like the load generator's. Modelled:

- **Router**: all turns of a session go to the same P and D, by a hash of its number; single requests, and all
  with ``routing`` round_robin, in turn. *Sequential* dispatch asks D when P has answered; *concurrent* asks
  both at once, so that D reserves its blocks while P computes.
- **P** keeps a request's blocks until D has its KV; **D** reserves blocks before the transfer begins.
- **Link**: one per instance. A transfer takes P's and D's for bytes / bandwidth, first come, first served;
  then the latency passes, in which the link is free for others.
- **Client**: never late; turns of sessions come think time after their answers (``Sends``). A request without
  its last token ``timeout_s`` after its scheduled send has failed, and its work is dropped.
- **Blocking hand-off** (``System.hand_off``): as in vLLM 0.6, P gives KV away between two steps, D takes one
  after the other instead of a step; only then come their first tokens.

Not modelled: contention for CPUs, failures, leases, the time that HTTP takes under load."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from kvbench.core.load.arrivals import Sends
from kvbench.core.records import RequestRecord
from kvbench.core.simulation.data import Link, Outcome, SimulatedLoad, System, Tick
from kvbench.core.simulation.engine import Flow, Moved, Role, StepEngine, use_of
from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest, Status
from kvbench.core.simulation.step_time import TimingProfile


class BlockingHandOff:
    """Blocking hand-over between P and D. ``give`` sends a request's KV and calls ``take_next`` when D has
    it; ``poke`` lets an engine continue its steps."""

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
        """Return whether a D is taking KV, and so computes nothing."""
        return engine in self._taking

    def begin(self, engine: StepEngine, now: float) -> float | None:
        """Let an engine begin a step, or take KV instead; return when its step ends, or None. Requests whose
        KV just arrived get their first tokens before D takes more KV."""
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
        """Let D wait for P's next step boundary and take one request's KV; after the last it computes."""
        queue = self._taking[engine]
        if not queue:
            del self._taking[engine]
            self._filled.add(engine)
            self._poke(engine)
            return
        flow = queue.popleft()
        assert flow.first is not None
        flow.kv_requested = True
        if flow.first.busy:
            self._after_step.setdefault(flow.first, []).append(flow)
        else:
            self._give(flow)

    def stepped(self, engine: StepEngine) -> None:
        """Give the awaited KV after P's step."""
        for flow in self._after_step.pop(engine, ()):
            self._give(flow)


@dataclass
class KvLinks:
    """Times at which the links are free again, and the KV moved over all of them."""

    link: Link
    moved: Moved = field(default_factory=Moved)
    _free_at: dict[StepEngine, float] = field(default_factory=dict)
    _busy_s: dict[StepEngine, float] = field(default_factory=dict)

    def move(self, ends: tuple[StepEngine, StepEngine], nbytes: float, now_s: float) -> float:
        """Queue bytes on both links, and return their arrival."""
        start = max(now_s, *(self._free_at.get(end, 0.0) for end in ends))
        busy = self.link.busy_s(nbytes)
        for end in ends:
            self._free_at[end] = start + busy
            self._busy_s[end] = self._busy_s.get(end, 0.0) + busy
        arrival = start + busy + self.link.latency_ms / 1e3
        self.moved.count += 1
        self.moved.seconds += arrival - now_s
        self.moved.nbytes += nbytes
        return arrival

    def busy_share(self, duration_s: float) -> float:
        return min(1.0, max(self._busy_s.values(), default=0.0) / max(duration_s, 1e-9))


TICK_S: Final = 0.25
"""How often progress is reported: the load generator's default."""


def simulate(system: System, load: SimulatedLoad, watch: Callable[[Tick], bool] | None = None) -> Outcome:
    """Run one trial. ``watch`` gets the progress every TICK_S and stops the trial by returning True. Raises
    InputError for a request that can never fit into an engine."""
    return SimulatedTrial(system, load, watch).run()


class SimulatedTrial:
    """The event loop: a heap of (time, last?, order, function, argument)."""

    def __init__(self, system: System, load: SimulatedLoad, watch: Callable[[Tick], bool] | None) -> None:
        self.system, self.load, self.watch = system, load, watch
        self.now = 0.0
        self._events: list[tuple[float, bool, int, Callable[[Any], None], Any]] = []
        self._count = 0
        reuse = load.hashes is not None

        def engines(count: int, config: EngineConfig, timing: TimingProfile) -> list[StepEngine]:
            return [StepEngine(config, timing, system.time_scale, reuse=reuse) for _ in range(count)]

        last = "decode" if system.prefill else "aggregated"
        decode = (system.decode_config, system.decode_timing) if system.prefill else (None, None)
        last_engines = engines(system.decode, decode[0] or system.config, decode[1] or system.timing)
        self.roles = {last: Role(last_engines)}
        if system.prefill:
            self.roles["prefill"] = Role(engines(system.prefill, system.config, system.timing))
        self._last = self.roles[last]
        self._first = self.roles.get("prefill")
        self.flows: list[Flow] = []
        self._flow_of: dict[EngineRequest, Flow] = {}
        self._waiting: dict[int, None] = {}
        self._fresh_first: list[int] = []
        self._fresh_settled: list[int] = []
        self._open = self._ticked = 0
        self._starting: set[StepEngine] = set()
        self._stopped = False
        self._links = KvLinks(system.link)
        self._sends = Sends(load.offsets_s, load.following)
        blocks = system.hand_off == "blocking"
        self._blocking = BlockingHandOff(self._flow_of, self._give, self._poke) if blocks else None

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self._plan_next()
        if self.watch is not None:
            self._at(TICK_S, self._tick, None)
        while self._events and not self._stopped and (self._open or self._sends.left):
            self.step()
        for flow in self.flows:
            if not flow.settled:
                self._settle(flow, "cancelled", "the trial was stopped")
        return self._outcome()

    def step(self) -> bool:
        """Process the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, _, handler, argument = heapq.heappop(self._events)
        handler(argument)
        return True

    def _at(
        self, time_s: float, handler: Callable[[Any], None], argument: Any, *, last: bool = False
    ) -> None:
        """Schedule a call. ``last``: after all other events of that moment."""
        self._count += 1
        heapq.heappush(self._events, (time_s, last, self._count, handler, argument))

    def _tick(self, _: None) -> None:
        assert self.watch is not None
        records = [flow.record for flow in self.flows]
        tick = Tick(
            self.now,
            records,
            self._fresh_settled,
            self._fresh_first,
            list(self._waiting),
            self._open,
            self._ticked,
        )
        self._ticked = len(records)
        self._fresh_settled, self._fresh_first = [], []
        self._stopped = self.watch(tick)
        self._at(self.now + TICK_S, self._tick, None)

    # -- a request's way --------------------------------------------------------------------------

    def _plan_next(self) -> None:
        if (following := self._sends.planned()) is not None:
            self._at(following[0], self._send_planned, following[1])

    def _send_planned(self, load_index: int) -> None:
        self._plan_next()
        self._send(load_index)

    def _send(self, load_index: int) -> None:
        """Send the request at this index of the load. Requests are numbered as they are sent."""
        load, over, index, scheduled = self.load, self.system.overheads, len(self.flows), self.now
        prompt, output = load.input_len[load_index], load.output_len[load_index]
        record = RequestRecord(f"sim-{load_index}", scheduled, prompt, output, sent_s=scheduled)
        self._sends.sent(load_index, scheduled)
        if load.following is not None:
            record.session, record.turn = load.following.session[load_index], load.following.turn[load_index]
        session = record.session if self.system.routing == "session" else None
        hashes = list(load.hashes[load_index]) if load.hashes is not None else []
        whole = EngineRequest(record.request_id, prompt, output, hashes=hashes)
        flow = Flow(index, record, whole, self._last.engine_for(index, session), load_index)
        self.flows.append(flow)
        self._flow_of[whole] = flow
        self._waiting[index] = None
        self._open += 1
        self._at(scheduled + load.timeout_s, self._time_out, flow)
        routed_s = self.now + over.router_ms / 1e3
        overhead_s = self.system.timing.overhead_s(self.system.time_scale, prompt)
        if self._first is None:
            self._at(routed_s + over.front_end_ms / 1e3 + overhead_s, self._to_last, flow)
            return
        whole.remote_kv = True
        flow.part = EngineRequest(record.request_id, prompt, 1, hashes=list(hashes), hold_kv=True)
        flow.first = self._first.engine_for(index, session)
        self._flow_of[flow.part] = flow
        record.router_received_s = self.now + over.router_ms / 2e3
        record.prefill_sent_s = routed_s
        self._at(routed_s + over.front_end_ms / 2e3 + overhead_s, self._to_first, flow)
        if self.system.dispatch == "concurrent":
            self._ask_decode(flow)

    def _ask_decode(self, flow: Flow) -> None:
        over = self.system.overheads
        at = flow.record.prefill_sent_s if self.system.dispatch == "concurrent" else self.now
        assert at is not None
        flow.record.decode_sent_s = at
        self._at(at + over.front_end_ms / 1e3, self._to_last, flow)

    def _to_first(self, flow: Flow) -> None:
        assert flow.first is not None
        assert flow.part is not None
        assert self._first is not None
        if not flow.settled:
            flow.in_first = True
            self._deliver(self._first, flow.first, flow.part)

    def _to_last(self, flow: Flow) -> None:
        if not flow.settled:
            flow.in_last = True
            self._deliver(self._last, flow.last, flow.whole)

    def _deliver(self, role: Role, engine: StepEngine, request: EngineRequest) -> None:
        role.requests += 1
        request.arrival_s = self.now
        engine.scheduler.add(request)
        self._poke(engine)

    def _prefilled(self, flow: Flow, engine: StepEngine) -> None:
        assert flow.part is not None
        engine.scheduler.finish(flow.part)
        flow.prefilled = True
        over = self.system.overheads
        answered = self.now + over.front_end_ms / 2e3
        flow.record.prefill_answered_s = answered
        if self.system.dispatch == "sequential":
            self._at(answered + over.turn_ms / 1e3, self._after_answer, flow)
        elif flow.kv_requested:
            self._move(flow)

    def _after_answer(self, flow: Flow) -> None:
        if not flow.settled:
            self._ask_decode(flow)

    # -- KV ---------------------------------------------------------------------------------------

    def _load_kv(self, flow: Flow) -> None:
        flow.kv_requested = True
        if flow.prefilled:
            self._move(flow)

    def _move(self, flow: Flow) -> float:
        """Send a request's KV, and return when D's scheduler knows it."""
        system = self.system
        assert flow.first is not None
        block_tokens = (system.decode_config or system.config).block_tokens
        blocks = len(flow.whole.blocks) - flow.whole.cached_tokens // block_tokens
        nbytes = blocks * system.block_bytes
        arrival = self._links.move((flow.first, flow.last), nbytes, self.now)
        flow.moving = True
        self._at(arrival, self._has_moved, flow)
        return arrival + system.overheads.arrival_ms / 1e3

    def _has_moved(self, flow: Flow) -> None:
        assert flow.first is not None
        assert flow.part is not None
        flow.moving = False
        if flow.part.status is Status.HELD:
            flow.first.scheduler.release(flow.part)
            self._poke(flow.first)
        self._at(self.now + self.system.overheads.arrival_ms / 1e3, self._kv_known, flow)

    def _kv_known(self, flow: Flow) -> None:
        flow.last.scheduler.kv_arrived(flow.whole)
        self._poke(flow.last)

    def _give(self, flow: Flow) -> None:
        """Give a request's KV in a blocking hand-off; D then takes the next."""
        assert self._blocking is not None
        self._at(self._move(flow), self._blocking.take_next, flow.last)

    # -- steps ------------------------------------------------------------------------------------

    def _poke(self, engine: StepEngine) -> None:
        """Let an engine look for work once no step is running."""
        if self._blocking is not None and self._blocking.takes(engine):
            return
        if not engine.busy:
            if engine not in self._starting:
                # Requests that come at the same moment start together.
                self._starting.add(engine)
                self._at(self.now, self._start, engine, last=True)
            return
        if (end := engine.cut(self.now)) is not None:
            self._at(end, self._step_done, (engine, engine.run))

    def _start(self, engine: StepEngine) -> None:
        self._starting.discard(engine)
        if self._blocking is not None:
            end = self._blocking.begin(engine, self.now)
        else:
            end = engine.begin(self.now)
            loads, engine.loads = engine.loads, []
            for request in loads:
                self._load_kv(self._flow_of[request])
        if end is not None:
            self._at(end, self._step_done, (engine, engine.run))

    def _step_done(self, announced: tuple[StepEngine, int]) -> None:
        engine, run = announced
        if run != engine.run:
            return
        sampled, ends = engine.end()
        if self._blocking is not None:
            self._blocking.stepped(engine)
        for request in sampled:
            flow = self._flow_of[request]
            if request is flow.part:
                self._complete_part(flow, engine, request)
            else:
                self._note_tokens(flow, engine, ends)
        self._poke(engine)

    def _complete_part(self, flow: Flow, engine: StepEngine, request: EngineRequest) -> None:
        assert self._first is not None
        self._first.first_token(request)
        self._first.finished(request, [self.now])
        self._first.generated += 1
        self._prefilled(flow, engine)

    def _note_tokens(self, flow: Flow, engine: StepEngine, ends: Sequence[float]) -> None:
        request, record = flow.whole, flow.record
        if not flow.times:
            record.first_token_s = ends[0]
            if flow.part is not None:
                record.decode_first_byte_s = ends[0]
            self._last.first_token(request)
            self._waiting.pop(flow.index, None)
            self._fresh_first.append(flow.index)
        flow.times += ends
        self._last.generated += len(ends)
        if request.output_len >= request.max_tokens:
            engine.scheduler.finish(request)
            self._last.finished(request, flow.times)
            self._settle(flow, "", "")

    # -- ends -------------------------------------------------------------------------------------

    def _settle(self, flow: Flow, error: Literal["", "timeout", "cancelled"], detail: str) -> None:
        record, times = flow.record, flow.times
        flow.settled = True
        self._open -= 1
        self._waiting.pop(flow.index, None)
        self._fresh_settled.append(flow.index)
        record.error, record.error_detail, record.output_len = error, detail, len(times)
        if not error or times:
            record.status = 200
        if times:
            record.last_token_s = times[-1]
            record.itl_s = [later - earlier for earlier, later in pairwise(times)]
        if error:
            self._sends.failed(flow.load_index)
            return
        self._note_reuse(flow)
        for time_s, load_index in self._sends.answered(flow.load_index, times[-1]):
            self._at(time_s, self._send, load_index)

    def _note_reuse(self, flow: Flow) -> None:
        """Note the cached part of an answered request's prompt, and the duration of a finished session."""
        load, record = self.load, flow.record
        flow.whole.hashes = []  # a load of long prompts has gigabytes of them
        if flow.part is not None:
            flow.part.hashes = []
        if load.following is None:
            return
        record.cached_tokens = (flow.part or flow.whole).cached_tokens
        if load.following.last[flow.load_index]:
            record.session_s = (record.last_token_s or 0.0) - (self._sends.begun_s(flow.load_index) or 0.0)

    def _time_out(self, flow: Flow) -> None:
        if flow.settled:
            return
        self._settle(flow, "timeout", f"no complete answer within {self.load.timeout_s:g} s")
        if flow.in_last:
            self._drop_last(flow)
        if flow.in_first:
            self._drop_first(flow)

    def _drop_last(self, flow: Flow) -> None:
        scheduler, request = flow.last.scheduler, flow.whole
        scheduler.abort(request)
        # One that still waits for P will never be filled; a transfer under way ends by itself.
        if request.status is Status.LOADING and not flow.prefilled:
            scheduler.kv_failed(request)
        self._poke(flow.last)

    def _drop_first(self, flow: Flow) -> None:
        assert flow.first is not None
        assert flow.part is not None
        on_the_way = flow.moving or (flow.whole.status is Status.LOADING and flow.prefilled)
        if not (flow.part.status is Status.HELD and on_the_way):
            flow.first.scheduler.abort(flow.part)
            self._poke(flow.first)

    # -- what comes of it -------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        duration, moved = self.now, self._links.moved
        return Outcome(
            records=[flow.record for flow in self.flows],
            duration_s=duration,
            stopped=self._stopped,
            figures={
                name: role.figures(moved if name != "aggregated" else None)
                for name, role in self.roles.items()
            },
            phases={name: role.phases() for name, role in self.roles.items()},
            use={name: use_of(role.engines, duration) for name, role in self.roles.items()},
            transfers=moved.count,
            transfer_s=moved.seconds,
            transfer_bytes=moved.nbytes,
            link_busy_share=self._links.busy_share(duration),
        )
