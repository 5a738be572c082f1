"""Usual heads in one call, where that was compiled (``_heads.c``); all others are httptools' to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvbench.processes.common.compiled import compiled

HEADS: Final = compiled("kvbench.processes.http1._heads")
"""The module, or None."""


def _unknown(data: bytes) -> None:
    """No head is a usual one where nothing was compiled."""


usual_request: Final[Callable[[bytes], tuple[Any, ...] | None]] = HEADS.request if HEADS else _unknown
"""The first five fields of a Request if that is all that was read, and usual; else None."""
usual_response: Final[Callable[[bytes], tuple[int, dict[str, str], int] | None]] = (
    HEADS.response if HEADS else _unknown
)
"""Status, headers and the head's end if a read begins with the usual head of an answer; else None.

What follows is its whole body, or begins one in chunks. The connection may be kept after it.
"""
