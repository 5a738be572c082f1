"""A run's pictures in a notebook: ``run.plot.latency()``, ``run.plot.latency(ax=axes)``."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from kvbench.errors import InputError
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvbench.report.plots import Picture, Theme


class Draw(Protocol):
    """Draws one picture."""

    def __call__(self, theme: Theme = "light", ax: Axes | None = None) -> Figure: ...


class Plots:
    """The pictures of a run by name, each a function that returns a matplotlib figure.

    The names are those of the files in figures/; ``list(run.plot)`` has those that the run has data for.
    With ``ax`` a picture takes the place of those Axes, without the words around it, and the figure returned
    is theirs; one with several panels divides them, for which they must be a subplot. Raises InputError where
    the run has no data for a picture.
    """

    max_request_rate: Draw
    latency: Draw
    loads: Draw
    goodput: Draw
    ttft_breakdown: Draw
    distribution: Draw
    in_flight: Draw
    pareto: Draw
    nic_share: Draw
    burst: Draw
    bandwidth: Draw
    nic_scaling: Draw
    call_time: Draw

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __call__(self, name: str, theme: Theme = "light", ax: Axes | None = None) -> Figure:
        """Draws the picture of that name. Raises InputError where there is none, or no data for it."""
        pictures = self._pictures()
        if name not in pictures:
            raise InputError(f"there is no picture called {name!r}", hint=f"there are: {', '.join(pictures)}")
        figure = pictures[name].draw(self._folder, theme, ax)
        if figure is None:
            raise InputError(
                f"{self._folder.run_id} has no data for the picture {name!r}",
                hint="list(run.plot) names the pictures that it has data for",
            )
        return _showable(figure) if ax is None else figure

    def __getattr__(self, name: str) -> Draw:
        if name.startswith("_") or name not in self._pictures():
            raise AttributeError(
                f"a run of this kind has no picture {name!r}; it has: {', '.join(dir(self))}"
            )

        def draw(theme: Theme = "light", ax: Axes | None = None) -> Figure:
            return self(name, theme, ax)

        picture = self._pictures()[name]
        draw.__name__, draw.__qualname__ = name, f"Plots.{name}"
        draw.__doc__ = (
            f"{picture.title}. {picture.alt}\n\n"
            "``theme``: light or dark. ``ax``: the Axes whose place it takes, else a figure of its own.\n"
            "Returns the figure. Raises InputError where the run has no data for it."
        )
        return draw

    def __dir__(self) -> list[str]:
        return list(self._pictures())

    def __iter__(self) -> Iterator[str]:
        """The names of the pictures that the run has data for."""
        return iter(
            [name for name, each in self._pictures().items() if each.draw(self._folder, "light") is not None]
        )

    def _pictures(self) -> Mapping[str, Picture]:
        from kvbench.report.plots import pictures_of

        return {name: picture for name, picture in pictures_of(self._folder).items() if picture.filed}


def _showable(figure: Figure) -> Figure:
    """A notebook shows it by itself, without pyplot and its global state."""

    def png() -> bytes:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=80, metadata={"Software": "kvbench"})
        return file.getvalue()

    vars(figure)["_repr_png_"] = png
    return figure
