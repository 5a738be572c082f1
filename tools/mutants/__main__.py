"""``make mutants``: see the package's docstring.

Exit codes: 0 as good as is asked for, 1 not so good, 2 the list of equivalent mutants is old.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml

from tools.mutants.operators import Mutant, mutants
from tools.mutants.reach import BUILD, ROOT, Reach, digest, reach, test_files
from tools.mutants.running import Outcome, Pool, Task, preload, within

SOURCES: Final = (
    *("kvbench/core", "kvbench/processes/loadgen/plan.py", "kvbench/processes/router/dispatch.py"),
    *("kvbench/report/tables", "kvbench/results/store.py"),
)
TESTS: Final = (
    *("tests/connectors", "tests/core", "tests/processes/loadgen/test_loadgen_process.py"),
    "tests/processes/router/test_router_dialects.py",
    *("tests/processes/router/test_router_processes.py", "tests/report/tables"),
    *("tests/report/test_report.py", "tests/results/test_store.py", "tests/sweep/trial/test_load.py"),
)
EQUIVALENT: Final = Path(__file__).with_name("equivalent.yaml")
RESULTS: Final = BUILD / "results.jsonl"
DEAD: Final = ("killed", "too long")


def sources(places: Sequence[str]) -> dict[str, str]:
    found = {}
    for place in places:
        path = ROOT / place
        for each in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found[each.relative_to(ROOT).as_posix()] = each.read_text(encoding="utf-8")
    return found


def equivalent(path: Path = EQUIVALENT) -> dict[str, str]:
    """Keys of the mutants that no test can tell from the original → why."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return {
        f"{group['module']}::{each['function']}::{each['change']}": str(group.get("why") or each["why"])
        for group in listed
        for each in group["mutants"]
    }


def chosen(all_mutants: Sequence[Mutant], sample: int, seed: int) -> list[Mutant]:
    """A sample in an order drawn by the seed; a larger one begins with the smaller. 0: all."""
    drawn = sorted(all_mutants, key=lambda each: hashlib.sha256(f"{seed} {each.key}".encode()).digest())
    return drawn[:sample] if sample else drawn


class Results:
    """What is known of earlier runs, a line a mutant, appended as it comes."""

    def __init__(self, path: Path, texts: Mapping[str, str], tests: str) -> None:
        self._path = path
        self._tests = tests
        self._modules = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
        self._known: dict[str, Outcome] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):  # cut off by a kill
                continue

    def _take(self, line: dict[str, Any]) -> None:
        key, module, tests = line.pop("key"), line.pop("module_hash"), line.pop("tests_hash")
        outcome = Outcome(**line)
        if self._modules.get(key.partition("::")[0]) != module:
            return
        if outcome.status in DEAD or tests == self._tests:
            self._known[key] = outcome
        else:
            self._known.pop(key, None)

    def of(self, mutant: Mutant) -> Outcome | None:
        return self._known.get(mutant.key)

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        self._known[mutant.key] = outcome
        hashes = {"module_hash": self._modules[mutant.module], "tests_hash": self._tests}
        with self._path.open("a") as file:
            file.write(json.dumps({"key": mutant.key, **hashes, **asdict(outcome)}) + "\n")


def tasks(
    wanted: Sequence[Mutant], results: Results, reached: Reach, most_s: float, until: float
) -> Iterator[Task]:
    """Those that nothing is known of, until the time is over; what no test reaches is noted at once."""
    for mutant in wanted:
        if time.monotonic() > until:
            return
        if results.of(mutant) is not None:
            continue
        tests = reached.of(mutant.module, mutant.line)
        if not tests:
            results.add(mutant, Outcome("unreached"))
            continue
        taken, seconds = within(tests, reached.seconds.__getitem__, most_s)
        yield Task(mutant, taken, seconds, len(tests) - len(taken))


def settled(wanted: Sequence[Mutant], results: Results) -> list[Mutant]:
    """Those before the first that nothing is known of: what is known of others says who dies quickly."""
    known = takewhile(lambda mutant: results.of(mutant) is not None, wanted)
    return list(known)


def score(wanted: Sequence[Mutant], results: Results) -> tuple[int, int]:
    found = [outcome for mutant in wanted if (outcome := results.of(mutant)) is not None]
    return sum(outcome.status in DEAD for outcome in found), len(found)


def say(wanted: Sequence[Mutant], results: Results, excused: int) -> None:
    folders: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(wanted, key=lambda each: (each.module, each.line)):
        folders[os.path.dirname(mutant.module)].append(mutant)
        outcome = results.of(mutant)
        if outcome is not None and outcome.status not in DEAD:
            left_out = f" ({outcome.left_out} tests left out)" if outcome.left_out else ""
            where = f"{mutant.module}:{mutant.line} {mutant.function}"
            print(f"{outcome.status}{left_out}: {where}: {mutant.before}  →  {mutant.after}")
    statuses = Counter(outcome.status for each in wanted if (outcome := results.of(each)))
    for folder, members in sorted(folders.items()):
        killed, known = score(members, results)
        if known:
            print(f"{folder:40} {killed:5} of {known:5} killed  {killed / known:6.1%}")
    killed, known = score(wanted, results)
    words = ", ".join(f"{number} {status}" for status, number in statuses.most_common())
    print(f"{known} of {len(wanted)} mutants tried: {words}; {excused} more are listed as equivalent")
    if known:
        print(f"score: {killed / known:.1%}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants MUTANTS_ARGS=…", description="Mutation testing.")
    parser.add_argument("sources", nargs="*", default=SOURCES, help="files or folders to change")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--sample", type=int, default=0, help="so many, drawn by the seed (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin none after so long (default: no end)"
    )
    parser.add_argument("--tests-s", type=float, default=15.0, help="of tests for each, in processor time")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=90.0, help="score in percent below which it fails")
    parser.add_argument("--not", dest="without", nargs="*", default=(), help="folders or files left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    asked = parse(arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.chdir(ROOT)
    texts = {
        name: text
        for name, text in sources(asked.sources).items()
        if not name.startswith(tuple(asked.without))
    }
    everything = [mutant for name, text in texts.items() for mutant in mutants(name, text)]
    excused = equivalent()
    keys = {mutant.key for mutant in everything}
    if old := [key for key in excused if key.partition("::")[0] in texts and key not in keys]:
        print(f"{EQUIVALENT.name} lists what is no mutant any more:", *old, sep="\n  ")
        return 2
    wanted = chosen([each for each in everything if each.key not in excused], asked.sample, asked.seed)
    reached = reach(asked.tests, asked.jobs)
    results = Results(RESULTS, texts, digest([ROOT / name for name in test_files(asked.tests)]))
    preload()
    until = time.monotonic() + asked.minutes * 60 if asked.minutes else math.inf
    for task, outcome in Pool(ROOT, asked.jobs).run(tasks(wanted, results, reached, asked.tests_s, until)):
        results.add(task.mutant, outcome)
        if outcome.status not in DEAD:
            print(
                f"{outcome.status}: {task.mutant.module}:{task.mutant.line}: {task.mutant.after}", flush=True
            )
    known_of = settled(wanted, results)
    say(known_of, results, len(excused))
    if len(known_of) < len(wanted):
        print(f"the time was over before the other {len(wanted) - len(known_of)} of the sample")
    killed, known = score(known_of, results)
    return 0 if killed >= known * asked.least / 100 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
