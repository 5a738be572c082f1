"""A console without control characters from foreign texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvbench.core.foreign_text import visible


class VisibleConsole(Console):
    """Removes control characters from printed texts; rich adds its own later."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)

    def out(self, *objects: Any, **options: Any) -> None:
        super().out(*(visible(str(value)) for value in objects), **options)
