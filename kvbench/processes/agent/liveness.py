"""Do processes of this host go on? Looked at here, where their state is seen, and reported as an event."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvbench.launchers.parts.liveness import STATE_S, Liveness
from kvbench.processes.agent.jobs import AgentJob
from kvbench.processes.agent.outbox import Outbox


class LivenessThread:
    """Looks after some processes from now on, in a thread of its own, until ``close``.

    The first that does nothing any more is reported: ``{"event": "hung", "key", "what", "fix"}``.
    """

    def __init__(self, jobs: Sequence[AgentJob], outbox: Outbox) -> None:
        self._jobs = list(jobs)
        self._outbox = outbox
        self._stop = threading.Event()
        self._liveness = Liveness([job.process for job in self._jobs])
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it soon. Safe to call twice."""
        self._stop.set()

    def _run(self) -> None:
        self._liveness.start()
        try:
            while not self._stop.wait(STATE_S):
                live = {job.process.name: job for job in self._jobs if not job.end_reported}
                found = self._liveness.problem([job.process for job in live.values()])
                if found is not None:
                    process, what, fix = found
                    key = live[process.name].key
                    self._outbox.put({"event": "hung", "key": key, "what": what, "fix": fix})
                    return
        finally:
            self._liveness.close()
