"""How a lie is put into an engine: one thing of it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvbench.processes.emulator.server import EngineServer

QUIET: Final = 4
"""The first requests are honest, as are all that are not part of a load, such as checks of the outputs."""


def role(server: EngineServer) -> str:
    config = server.spec.kv_transfer_config
    return "aggregated" if config is None else "prefill" if config.is_producer else "decode"


class Turns:
    """Says at every nth call that it is a lie's turn; never among the first."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._calls = 0

    def __call__(self) -> bool:
        self._calls += 1
        return self._calls > QUIET and self._calls % self._every == 0


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts ``wrapper(original, *arguments)`` in the place of an object's method."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))
