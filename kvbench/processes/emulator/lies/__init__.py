"""Plants a fault (core/gates/lies.py) in an otherwise correct engine. Each function takes a server that is
assembled and not started, and wraps one thing in it. Prefill instances ("producer"), decode instances
("consumer") and aggregated servers may get different faults."""

from __future__ import annotations

from kvbench.processes.emulator.lies import answers, streams
from kvbench.processes.emulator.server import EngineServer


def plant(server: EngineServer) -> None:
    """Plant the spec's fault (``lie``), if any, in an engine before it starts."""
    lie = server.spec.lie
    families = (
        streams.SPEED_PLANTS,
        answers.COUNTER_PLANTS,
        streams.STREAM_PLANTS,
        streams.KV_PLANTS,
        answers.ANSWER_PLANTS,
    )
    for plants in families:
        if lie in plants:
            plants[lie](server)
    if lie in streams.HANDOFF_PLANTS:
        server.on_handoff = lambda handoff: streams.HANDOFF_PLANTS[lie](server, handoff)
