"""Who noticed a fault: lines that complain in the processes' logs, kvbench's own watch, the first failed
request. Each with its time.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.core.foreign_text import visible
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import KvbenchError
from kvbench.hosts.log_tail import LogReader
from kvbench.sweep.trial.load_progress import Progress

POLL_S: Final = 0.05
MOST_LINES: Final = 5
"""Of one log; the first ones say it."""
MOST_CHARS: Final = 240
COMPLAINT: Final = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL|Traceback)\b|\b[EWF]\d{4} \d\d:")
"""Python's levels, and the first letter of glog's lines (``E1122 01:03:45``)."""
OWN: Final = "kvbench"
CLIENT: Final = "client"


@dataclass(frozen=True)
class Notice:
    """``who`` said ``words``, ``after_s`` seconds after the fault; ``more`` lines like it came later."""

    who: str
    after_s: float
    words: str
    more: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Notices:
    """Follows the logs of a deployment's processes, and its watch, in a thread of its own.

    Raises nothing by itself: a deployment that has been struck is meant to be in trouble.
    """

    deployment: RunningDeployment
    _found: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _readers: dict[str, LogReader] = field(default_factory=dict)
    _own: tuple[float, str] | None = None
    _struck_at: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        logs: Mapping[str, Path] = {each.name: each.log_path for each in self.deployment.processes}
        self._readers = {name: LogReader(path) for name, path in logs.items()}
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def __enter__(self) -> Notices:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._look()

    def struck(self, at: float) -> None:
        """The fault is done now: ``at`` on the monotonic clock."""
        self._struck_at = at

    def seen(self, progress: Progress) -> None:
        """What the load generator tells; the first failed request after the fault is a notice, too."""
        if self._struck_at is None or CLIENT in self._found:
            return
        failed = next((each for each in progress.settled if each.error not in ("", "cancelled")), None)
        if failed is not None:
            self._found[CLIENT] = [(time.monotonic(), f"request {failed.index}: {failed.error}")]
            self._counts[CLIENT] = 1

    def found(self) -> list[Notice]:
        """All of them, the first first."""
        began = self._struck_at
        if began is None:
            return []
        notices = [
            Notice(who, round(lines[0][0] - began, 3), words, self._counts[who] - len(lines))
            for who, lines in self._found.items()
            for words in [" | ".join(line for _, line in lines)]
        ]
        if self._own is not None:
            notices.append(Notice(OWN, round(self._own[0] - began, 3), self._own[1]))
        return sorted(notices, key=lambda each: each.after_s)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for name, reader in self._readers.items():
            lines = reader.drain()
            if self._struck_at is None:
                continue
            for line in lines:
                if COMPLAINT.search(line):
                    self._counts[name] = self._counts.get(name, 0) + 1
                    mine = self._found.setdefault(name, [])
                    if len(mine) < MOST_LINES:
                        mine.append((now, visible(line.strip())[:MOST_CHARS]))
        if self._struck_at is not None and self._own is None:
            self._watch(now)

    def _watch(self, now: float) -> None:
        """What kvbench's own watch would have said, and ended a sweep's cell with."""
        try:
            self.deployment.check_alive()
        except KvbenchError as error:
            said = error.message.splitlines()[0].removesuffix("; its last lines:")
            self._own = (now, visible(said)[:MOST_CHARS])
