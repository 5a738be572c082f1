"""The table of faults from the tests' own results: ``python -m tools.faults`` or ``make faults``.

Runs every test with the marker ``fault``, the heavy ones too, and writes what they saw into
results/reference/faults.json and docs/faults.md, which begins with a table by classes. Exit code 1 if a fault
was not seen as it should be. With ``-k`` only some are run, and the others' rows stay.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parent.parent
JSON_PATH: Final = ROOT / "results" / "reference" / "faults.json"
DOC_PATH: Final = ROOT / "docs" / "faults.md"
PROPERTY: Final = "fault"
HEAD: Final = """\
# Faults

What can go wrong in a long run, the message that kvbench prints, how soon it does, and how the run
continues. The tests with the marker `fault` do each of these to real processes. `make faults` runs them all
and writes this page from their results (`results/reference/faults.json` has them as data). Each test also
fails if processes, sockets or shared memory are left.
"""


@dataclass
class Recorder:
    """A pytest plugin that keeps what the tests of faults saw, and how they ended."""

    keys: dict[str, str] = field(default_factory=dict)
    """Test → the fault that it proves."""
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            marker = item.get_closest_marker("fault")
            if marker is not None:
                self.keys[item.nodeid] = str(marker.args[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
        for name, value in report.user_properties:
            if name == PROPERTY and isinstance(value, dict):
                self.records[report.nodeid] = value

    def rows(self, table: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A row a fault, in the table's order; of several tests the one that took longest to be reported."""
        rows = []
        for key, fault in table.items():
            tests = sorted(test for test, of in self.keys.items() if of == key)
            seen = [self.records[test] for test in tests if test in self.records]
            slowest = max(seen, key=lambda record: float(record["seconds"]), default={})
            reasons = "; ".join(sorted({self.skipped[test] for test in tests if test in self.skipped}))
            failed = self.failed & set(tests)
            row = {"key": key, "done": fault.done}
            row["outcome"] = "failed" if failed else "seen" if slowest else "not run"
            row |= {"said": slowest.get("said", ""), "seconds": slowest.get("seconds")}
            row |= {"within_s": fault.within_s, "then": fault.then}
            row["why_not_run"] = "" if slowest else reasons or "there is no test of it"
            rows.append({**row, "tests": tests})
        return rows


def document(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]]) -> str:
    lines = [HEAD, summary(rows, groups), "Each fault:", ""]
    lines.append("| what happens | message | after (s) | limit (s) | how the run continues |")
    lines.append("|---|---|---:|---:|---|")
    for row in rows:
        quoted = row["said"].replace("`", "'")
        said = f"`{_cell(quoted)}`" if row["said"] else f"not run: {_cell(row['why_not_run'])}"
        after = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        lines.append(f"| {row['done']} | {said} | {after} | {row['within_s']:g} | {_cell(row['then'])} |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]]) -> str:
    by_key = {row["key"]: row for row in rows}
    lines = ["| what happens | example of a message | longest time until it (s) |", "|---|---|---:|"]
    for name, keys in groups.items():
        seen = [by_key[key] for key in keys if by_key[key]["outcome"] == "seen"]
        if seen:
            quoted = _short(seen[0]["said"].replace("`", "'"))
            longest = max(float(row["seconds"]) for row in seen)
            lines.append(f"| {name} | `{_cell(quoted)}` | {longest:.1f} |")
    return "\n".join(lines) + "\n"


def _short(words: str, most: int = 90) -> str:
    whole = re.split(r" hint: | \(its log |\]$", words)[0]
    return whole if len(whole) <= most else f"{whole[:most].rsplit(' ', 1)[0].rstrip(' :;,(…')} …"


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pytest_args", nargs="*", help="more for pytest, such as -k router")
    parser.add_argument("--dry", action="store_true", help="write no file")
    given, more = parser.parse_known_args(argv)
    recorder = Recorder()
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.fault" in path.read_text()
    ]
    # A siege of many faults is one test's fixture: the usual guard against a test that hangs is too tight.
    words = [*files, "-m", "fault", "-p", "no:xdist", "-o", "faulthandler_timeout=900"]
    words += [*more, *given.pytest_args]
    status = pytest.main(words, plugins=[recorder])
    table = importlib.import_module("faults")
    rows = recorder.rows(table.FAULTS)
    if "-k" in {*more, *given.pytest_args} and JSON_PATH.is_file():
        # What was not run now stays as it was.
        kept = {row["key"]: row for row in json.loads(JSON_PATH.read_text())}
        rows = [kept.get(row["key"], row) if row["outcome"] == "not run" else row for row in rows]
    # A run that was broken off makes no table.
    whole = status in (0, 1) and "-x" not in {*more, *given.pytest_args}
    if whole and not given.dry:
        DOC_PATH.parent.mkdir(exist_ok=True)
        JSON_PATH.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        DOC_PATH.write_text(document(rows, table.GROUPS))
    for row in rows:
        if row["outcome"] != "seen":
            print(f"{row['key']}: {row['outcome']} {row['why_not_run']}")
    return 1 if status != 0 or any(row["outcome"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
