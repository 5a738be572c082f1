"""Executes the notebooks and writes them anew: ``make notebooks``; with ``--check`` it writes nothing.

    python -m tools.notebooks [--check] [NOTEBOOK…]

What is written depends on code and results alone: no time, no place on this machine, no counter of an editor.
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
_PLACES = re.compile(
    "|".join(re.escape(f"{place}/") for place in sorted({ROOT, Path.home(), Path(sys.prefix)}))
)


class NotebookError(Exception):
    """A notebook that did not run to its end, or says where it was run."""


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
    try:
        client.execute(cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"{path.name}: {error}") from error
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
    """The text of an output, without pictures."""
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
