"""Plants a lie (core/gates/lies.py) in an engine that is otherwise honest. All are here, and only here.

Each takes a server that has been put together and not started, and wraps one thing in it. Prefill instances
("producer"), decode instances ("consumer") and aggregated servers may lie differently.
"""

from __future__ import annotations

from kvbench.processes.emulator.lies import answers, streams
from kvbench.processes.emulator.server import EngineServer


def plant(server: EngineServer) -> None:
    """Makes an engine tell its spec's lie; called before it starts. An honest one is left alone."""
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
