"""Whether a run folder still says what was written: what is asked, and the requests of its trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvbench.core.scenario.yaml_lines import MAX_CHARS
from kvbench.errors import StoreError
from kvbench.files import open_read, read_object
from kvbench.results.run import RunFolder, parquet_path

_HINT: Final = "put back what was there (from a copy of the run), or begin anew"


def digests(scenario_bytes: bytes, plan: Mapping[str, Any]) -> dict[str, str]:
    """What a run is begun with: SHA-256 of scenario.yaml, and of the scenario in plan.json."""
    return {"scenario.yaml": hashlib.sha256(scenario_bytes).hexdigest(), "plan.json": _of_plan(plan)}


def _of_plan(plan: Mapping[str, Any]) -> str:
    # Read as it was written: numbers and names as JSON has them.
    text = json.dumps(json.loads(json.dumps(plan.get("scenario"), default=str)), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def require_untouched(run: RunFolder) -> None:
    """Raises StoreError if what a run asks is not what it was begun with: answers would be mixed."""
    asked = run.manifest.get("asked_digests")
    if isinstance(asked, dict):
        # plan.json as it is on disk: load_run makes invisible characters visible.
        plan = read_object(run.path / "plan.json", [])
        try:
            with open(open_read(run.path / "scenario.yaml"), "rb") as file:
                found = digests(file.read(4 * MAX_CHARS), plan)
        except OSError as error:
            raise StoreError(
                f"{run.path}/scenario.yaml cannot be read: {error.strerror}", hint=_HINT
            ) from error
        changed = [name for name, digest in found.items() if asked.get(name) != digest]
        if changed:
            where = " and ".join(changed)
            raise StoreError(
                f"{run.path}: what is asked was changed since the run began, in {where}", hint=_HINT
            )


def lost_requests(run: RunFolder) -> Iterator[str]:
    """Trials of a measured run whose stored requests are not there, or not all of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for trial in run.all_trials:
        sent = trial.summary.get("sent")
        if not isinstance(sent, int) or sent <= 0 or run.manifest.get("kind") not in ("sweep", "bench"):
            continue
        path = parquet_path(run.path, "requests", trial.trial_id)
        name = Path("requests", path.name)
        try:
            with open(open_read(path), "rb") as file:
                rows = pq.ParquetFile(file).metadata.num_rows
        except FileNotFoundError:
            yield f"{name} is missing"
        except (OSError, ValueError, pa.ArrowException):
            yield f"{name} is cut off or damaged"
        else:
            if rows < sent:
                yield f"{name} has {rows} of the {sent} requests that were sent"
