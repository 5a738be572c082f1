"""Which pair loses less by a fault: told where every repeat shows it and there are enough of them."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.findings.findings import MIN_REPEATS, separation_p_value, statements
from kvbench.results.run import load_run

CHAOS = Path(__file__).parents[3] / "results/reference/chaos"


def repeated(path: Path, repeats: int, lost: Callable[[str, str, int], float]) -> Path:
    """The reference run with so many repeats of each fault, each with ``lost(connector, fault, repeat)``."""
    shutil.copytree(CHAOS, path, ignore=shutil.ignore_patterns("requests", "figures"))
    firsts: dict[tuple[str, str], Any] = {}
    for line in (CHAOS / "trials.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        firsts.setdefault((row["cell"]["connector"], row["summary"]["chaos"]["name"]), row)
    count: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    for (connector, fault), row in firsts.items():
        for repeat in range(repeats):
            copy = json.loads(json.dumps(row))
            count[connector, fault] += 1
            copy["trial_id"] = f"{row['trial_id']}-again-{repeat}"
            copy["summary"]["chaos"]["cost"]["goodput_lost"] = lost(connector, fault, repeat)
            rows.append(json.dumps(copy))
    (path / "trials.jsonl").write_text("\n".join(rows) + "\n")
    return path


def test_the_level_is_that_of_the_rank_sum_test() -> None:
    assert (separation_p_value(3, 3), separation_p_value(4, 4)) == (pytest.approx(0.1), pytest.approx(2 / 70))
    assert MIN_REPEATS == 4


def test_a_difference_in_every_repeat_is_told_and_the_rest_is_not(tmp_path: Path) -> None:
    def lost(connector: str, fault: str, repeat: int) -> float:
        apart = 100.0 if connector == "nixl" and fault == "kill prefill" else 0.0
        return 10.0 + repeat + apart

    found = statements(load_run(repeated(tmp_path / "run", 4, lost)))
    ahead = [statement for statement in found if statement.kind == "ahead"]
    assert [statement.text for statement in ahead] == [
        "mooncake loses less goodput by kill prefill than nixl: 10.0 to 13.0 against 110 to 113 requests"
    ]
    assert len(ahead[0].places) == 8
    (untold,) = (statement for statement in found if statement.kind == "untold")
    assert "kill prefill" not in untold.text
    assert "kill decode" in untold.text
    assert untold.advice == ""


def test_few_repeats_tell_nothing_however_far_apart(tmp_path: Path) -> None:
    found = statements(
        load_run(repeated(tmp_path / "run", 3, lambda name, _, repeat: 1e3 * (name == "nixl") + repeat))
    )
    (untold,) = (statement for statement in found if statement.kind in ("ahead", "untold"))
    assert untold.text.endswith("with 3 repeats of each fault")
    assert "--repeats 4" in untold.advice


def test_one_pair_has_nobody_to_be_compared_with(tmp_path: Path) -> None:
    path = repeated(tmp_path / "run", 4, lambda *_: 1.0)
    rows = [row for row in (path / "trials.jsonl").read_bytes().splitlines() if b'"nixl"' in row]
    (path / "trials.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    (found,) = statements(load_run(path))
    assert found.text == "comparison of fault costs: nixl is the only pair in this run"
