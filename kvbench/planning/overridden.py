"""What options changed of a scenario file: where the checked scenario differs from the file's text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.core.scenario.scenario import parse_scenario
from kvbench.errors import KvbenchError
from kvbench.planning.scenario_files import registry


def overridden(text: str, scenario: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of a resolved scenario that its file's text does not give, by path.

    A value that only the text gives is None. Returns None if the text alone is no valid scenario.
    """
    try:
        written = parse_scenario(text, "scenario.yaml", registry()).resolved()
    except KvbenchError:
        return None
    pair = (json.loads(json.dumps(each, default=str)) for each in (written, scenario))
    # A file without a name is named after the file.
    return {path: value for path, value in _changed(*pair) if path != "name"}


def _changed(written: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not (isinstance(written, dict) and isinstance(now, dict)):
        if written != now:
            yield path, now
        return
    for key in dict.fromkeys((*written, *now)):
        yield from _changed(written.get(key), now.get(key), f"{path}.{key}" if path else str(key))
