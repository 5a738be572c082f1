"""What may stand for a scenario, a connector or a run: read from a command line, completed in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvbench.errors import InputError


def run_folder(text: str) -> Path:
    """The run folder that is meant: a path, `latest`, or a piece of a name. For typer."""
    from kvbench.results.run_list import find_run

    try:
        return find_run(text)
    except InputError as error:
        raise typer.BadParameter(f"{error.message} ({error.hint})") from None


def complete_scenario(incomplete: str) -> Iterator[str]:
    """Bundled scenarios, and YAML files here."""
    from kvbench.planning.scenario_files import bundled_names

    here = (str(path) for path in Path().glob("*.y*ml"))
    yield from (name for name in (*bundled_names(), *sorted(here)) if name.startswith(incomplete))


def complete_connector(incomplete: str) -> Iterator[str]:
    """Connectors that are there."""
    from kvbench import connectors

    yield from (name for name in connectors.names() if name.startswith(incomplete))


def complete_run(incomplete: str) -> Iterator[str]:
    """`latest`, and the runs in the folder that they are written to; the latest first."""
    from kvbench.results.run_list import LATEST, listed_runs, output_folder

    root = output_folder()
    runs = listed_runs(root) if root.is_dir() else []
    names = (LATEST, *(str(run.path) for run in runs), *(run.path.name for run in runs))
    yield from (name for name in names if name.startswith(incomplete))


RunArg = Annotated[
    Path,
    typer.Argument(
        help="A run folder, the end of its name, or `latest`.",
        metavar="RUN",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]
RunsArg = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders, ends of their names, or `latest`.",
        metavar="RUN…",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]
