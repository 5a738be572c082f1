"""The line below what is printed while work goes on: how much is done, and how long it will take."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class LiveBar:
    """A bar on a terminal; elsewhere nothing is shown, and ``shown`` stays False."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._progress: Progress | None = None
        self._task = TaskID(0)

    @property
    def shown(self) -> bool:
        return self._progress is not None

    def start(self) -> None:
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn(f"[bold]{self._what}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=22),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=self._total, left="")
        self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str, left: str) -> None:
        """What is being done, and the time left, as texts."""
        if self._progress is not None:
            self._progress.update(self._task, description=text, left=left)

    def count(self, done: int, left: str) -> None:
        """So many of all are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, left=left)
