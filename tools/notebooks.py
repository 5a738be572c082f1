"""Executes the notebooks and writes them anew: ``make notebooks``; with ``--check`` it writes nothing.

    python -m tools.notebooks [--check] [NOTEBOOK…]

What is written depends on code and results alone: no time, no place on this machine, no counter of an editor.
An output that shows nothing, a table without rows or a picture without a mark, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
LIMIT_S = 60
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_NOTHING = re.compile(r"Empty DataFrame|Series\(\[\]|a table has no rows|axes without a mark|has no axes")
"""How an empty table reads, and what the guard says where IPython shows an error in place of an output."""
_PLACES = re.compile(
    "|".join(re.escape(f"{place}/") for place in sorted({ROOT, Path.home(), Path(sys.prefix)}))
)


class NotebookError(Exception):
    """A notebook that did not run to its end, shows nothing somewhere, or says where it was run."""


# Runs in the kernel before the first cell, and leaves nothing in an output: what a cell shows is looked at
# when it is shown, a figure when it is drawn. A line across the axes (a limit, a roof) is no data.
GUARD = """
def _kvbench_guard():
    import pandas
    from matplotlib.figure import Figure

    whole = Figure.savefig

    def marked(axes):
        own = axes.transData
        lines = [each for each in axes.lines if all(each.get_transform().contains_branch_seperately(own))]
        return any(len(each.get_xdata()) for each in lines) or axes.collections or axes.patches or axes.images

    def savefig(figure, *arguments, **named):
        for axes in figure.axes:
            if axes.axison and not marked(axes):
                title = axes.get_title(loc="left") or axes.get_xlabel()
                raise ValueError(f"a picture has axes without a mark: {title!r}")
        if not figure.axes:
            raise ValueError("a picture has no axes")
        return whole(figure, *arguments, **named)

    Figure.savefig = savefig
    for kind, name in ((pandas.DataFrame, "_repr_html_"), (pandas.Series, "__repr__")):
        shown = getattr(kind, name)

        def full(self, shown=shown):
            if self.empty:
                raise ValueError("a table has no rows")
            return shown(self)

        setattr(kind, name, full)


_kvbench_guard()
del _kvbench_guard
"""


def executed(path: Path, sockets: str) -> Any:
    """The notebook with new outputs. ``sockets``: a folder for the kernel's sockets, so that none is on TCP.

    Raises NotebookError naming the cell that failed or took too long.
    """
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook: Any = nbformat.reads(path.read_text("utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    manager = AsyncKernelManager(transport="ipc", ip=f"{sockets}/{path.stem}", kernel_name=KERNEL["name"])
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=LIMIT_S,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--HistoryManager.enabled=False"],
    )
    notebook.cells.insert(0, nbformat.v4.new_code_cell(GUARD))  # type: ignore[no-untyped-call]
    try:
        client.execute(cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"{path.name}: {error}") from error
    del notebook.cells[0]
    for place, cell in enumerate(entry for entry in notebook.cells if entry["cell_type"] == "code"):
        cell["execution_count"] = place + 1
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = place + 1
            if output["output_type"] == "error" or _NOTHING.search(_words(output)):
                said = _words(output)[:300]
                raise NotebookError(f"{path.name}: code cell {place + 1} shows nothing: {said}")
    return notebook


def cleaned(notebook: Any) -> str:
    """The notebook's file. Raises NotebookError for an output that names a place of this machine."""
    for place, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{place:02d}"
        cell["metadata"] = {}
        if cell["cell_type"] != "code":
            continue
        for output in cell["outputs"]:
            if "metadata" in output:
                output["metadata"] = {}
            if found := _PLACES.search(_words(output)):
                raise NotebookError(f"cell {place} names a place of this machine: {found[0]}")
    version = {"name": "python", "pygments_lexer": "ipython3"}
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": version}
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _words(output: Any) -> str:
    data = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
    return json.dumps([data, output.get("text", ""), output.get("traceback", "")])


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks.")
    parser.add_argument("names", nargs="*", help="notebooks; by default all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    paths = [Path(name).resolve() for name in options.names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvbench-notebooks-") as home:
        # The kernel is this Python, and leaves nothing in the user's own folders.
        os.environ |= {"IPYTHONDIR": home, "JUPYTER_RUNTIME_DIR": home, "MPLBACKEND": "agg"}
        for path in paths:
            begun = time.monotonic()
            try:
                text = cleaned(executed(path, home))
            except NotebookError as error:
                print(error, file=sys.stderr)
                failed += 1
                continue
            if not options.check:
                path.write_text(text, "utf-8")
            print(f"{path.name}: {time.monotonic() - begun:.1f} s, {len(text) // 1024} KiB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
