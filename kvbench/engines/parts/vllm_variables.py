"""Environment variables that a vLLM release no longer reads, from ``vllm_variables.yaml``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from kvbench.core.engine_versions import release

_TABLE: Final = Path(__file__).with_suffix(".yaml")


@cache
def _table() -> Mapping[str, Mapping[str, str]]:
    read = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return {part: {str(name): str(word) for name, word in read[part].items()} for part in ("gone", "instead")}


def given_up(names: Iterable[str], version: str) -> Iterator[str]:
    """A sentence for each of these variables that this version does nothing with.

    Raises InputError for a version that cannot be read.
    """
    table = _table()
    for name in sorted(set(names) & set(table["gone"])):
        since = table["gone"][name]
        if release(version) >= release(since):
            now = table["instead"].get(name)
            advice = f"say it with {now}" if now else "take it out"
            yield f"{name} does nothing: vLLM has lacked it since {since}, and this is {version}; {advice}"
