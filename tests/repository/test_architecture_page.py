"""docs/architecture.md says what is: the layers, the modules it names, and how small the smallest are."""

from __future__ import annotations

import re
from pathlib import Path

import kvbench

ROOT = Path(kvbench.__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "kvbench"


def test_the_layers_are_those_of_the_import_contract() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    written = re.search(r'name = "Layers: .*?layers = \[(.*?)\]', config, re.S)
    assert written
    contract = [re.findall(r"\w+", layer) for layer in re.findall(r'"(.*?)"', written[1])]
    table = PAGE.split("## Layers")[1].split("## ")[0]
    page = [
        re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in table.splitlines() if row.startswith("| `")
    ]
    assert page == contract


def test_every_room_is_on_the_page_and_every_place_on_the_page_is_there() -> None:
    named = set(re.findall(r"`([\w/]+/|[\w/]+\.py)`", PAGE))
    rooms = {each.name for each in PACKAGE.iterdir() if (each / "__init__.py").exists()}
    assert rooms <= set(re.findall(r"`(\w+)`", PAGE))
    below = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts}
    missing = [name for name in named if not any(each.endswith(name.rstrip("/")) for each in below)]
    assert missing == []
