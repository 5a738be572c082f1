"""``make perf-compare``: false alarms and power of ``kvbench compare --ci``, on virtual time.

A cell of the quickstart scenario is searched many times with different seeds, as by ``kvbench simulate``.
Nothing changes between two such searches, or groups of them, so that any alarm is false. For the power, all
times of the system are longer, so that its rate is lower by exactly the loss. Searches are stored
(``--rows``) and reused. Comparisons of groups draw from the same searches. There is no pass or fail.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.core.findings.rate_change import Searched, rate_change
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.report.tables.result import read_answer
from kvbench.results.run import load_run
from kvbench.sweep.simulate import simulated
from kvbench.sweep.simulated_trial import SimulatedDeployment
from tools.bench import ROOT, arguments, table
from tools.jobs import code_version, fast_folder, rows_of

SCENARIO: Final = "quickstart"
_NO_PART: Final = (
    *("report", "cli", "core/findings", "hosts", "launchers", "processes", "transfer", "importers"),
)
"""Folders of kvbench that do not affect an answer."""
CELL: Final = ("nixl", 256)
SHARP: Final = ("search.trial_s=30", "search.max_trial_s=60", "search.precision=0.05", "search.max_trials=16")
SETTINGS: Final = {"quickstart": (), "30 s trials, 5 % precision": SHARP}
SIDES: Final = ((1, 1), (6, 1), (3, 3), (4, 4))
"""Runs before and after."""


@dataclass(frozen=True)
class SearchJob:
    """One search of a cell of the quickstart scenario.

    ``sets``: further settings of the scenario, as PATH=VALUE. ``factor``: factor on all times (steps, links,
    overheads, trials, and the SLO's limits), by which the true rate is exactly lower.
    """

    connector: str
    input_len: int
    run_seed: int
    factor: float = 1.0
    sets: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join(
            (self.connector, str(self.input_len), f"{self.factor:g}", str(self.run_seed), *self.sets)
        )

    def row(self) -> dict[str, Any]:
        sets = (f"seed={self.run_seed}", *self.sets)
        cli = CliOptions(SCENARIO, sets, (self.connector,), input_len=str(self.input_len))
        if self.factor != 1.0:
            cli = CliOptions(
                SCENARIO, (*sets, *time_overrides(cli, self.factor)), cli.connectors, input_len=cli.input_len
            )
        with tempfile.TemporaryDirectory(prefix="searched-", dir=fast_folder()) as folder:
            (cell,) = load_run(simulated(cli, Path(folder))).cells
        about = {"connector": self.connector, "factor": self.factor, "seed": self.run_seed}
        return {**about, "sets": list(self.sets), "answer": cell.answer}


def time_overrides(cli: CliOptions, factor: float) -> tuple[str, ...]:
    scenario, _ = resolve(cli)
    planned = next(one for one in plan_of(scenario).deployments if one.label in cli.connectors)
    around = SimulatedDeployment.of(scenario, planned).around
    time_scale = scenario.simulate.time_scale or scenario.deployment.engine_options.time_factor
    slo, search = scenario.slo, scenario.search
    times = {
        "simulate.time_scale": time_scale * factor,
        "simulate.router_ms": around.overheads.router_ms * factor,
        "simulate.front_end_ms": around.overheads.front_end_ms * factor,
        "simulate.turn_ms": around.overheads.turn_ms * factor,
        "simulate.arrival_ms": around.overheads.arrival_ms * factor,
        "simulate.kv_gb_per_s": around.link.gb_per_s / factor,
        "simulate.kv_latency_ms": around.link.latency_ms * factor,
        "slo.ttft_ms": slo.ttft_ms and slo.ttft_ms * factor,
        "slo.tpot_ms": slo.tpot_ms and slo.tpot_ms * factor,
        "search.trial_s": search.trial_s and search.trial_s * factor,
        "search.max_trial_s": search.max_trial_s and search.max_trial_s * factor,
        "search.max_rate": search.max_rate and search.max_rate / factor,
    }
    return tuple(f"{name}={value:.12g}" for name, value in times.items() if value is not None)


Figures = dict[str, Any]
"""Figures of one setting and number of runs: ``pairs`` comparisons of each kind, those not converged
(``untold``) and with an alarm; ``told``: median of the reported probability to detect the loss."""


def cells(row: Figures) -> list[str]:
    power = "–" if row["told"] is None else f"{row['told']:.0%}"
    shares = [f"{row[name] / row['pairs']:.1%}" for name in ("untold", "false_alarms", "seen")]
    return [row["setting"], f"{row['before']} → {row['after']}", f"{row['pairs']}", *shares, power]


@cache
def _searched(text: str) -> Searched | None:
    """Return a search's answer; None if it did not converge, since it is then not compared."""
    answer = read_answer(json.loads(text))
    return Searched(answer.max_request_rate, answer.possible) if answer.converged else None


def figures_of(
    setting: str, same: Sequence[str], slower: Sequence[str], pairs: int, loss: float, worse_than: float
) -> Iterator[Figures]:
    """Yield figures for all ``SIDES``. ``same``, ``slower``: answers as JSON without and with the loss."""
    for before, after in SIDES:
        rng = np.random.default_rng(1)
        counts = dict.fromkeys(("untold", "false_alarms", "seen"), 0)
        powers = []
        if len(same) < before + after or len(slower) < after:
            continue
        for number in range(pairs):
            # Pairs of single searches are disjoint if there are enough searches.
            chosen = rng.permutation(len(same))[: before + after]
            chosen = np.array([2 * number, 2 * number + 1]) if (before, after) == (1, 1) else chosen
            if chosen.max() >= len(same):
                chosen = rng.permutation(len(same))[: before + after]
            sides = [same[index] for index in chosen]
            one = _known(sides[:before])
            other = _known(sides[before:])
            lost = _known([slower[index] for index in rng.permutation(len(slower))[:after]])
            if not (one and other and lost):
                counts["untold"] += 1
                continue
            change = rate_change(one, other)
            counts["false_alarms"] += change.alarms(worse_than)
            counts["seen"] += rate_change(one, lost).alarms(worse_than)
            powers.append(change.seen(loss, worse_than))
        known = sorted(power for power in powers if power is not None)
        middle = known[len(known) // 2] if known else None
        about = {"setting": setting, "before": before, "after": after, "pairs": pairs}
        yield {**about, **counts, "told": middle}


def _known(answers: Sequence[str]) -> list[Searched]:
    return [search for text in answers if (search := _searched(text)) is not None]


def _answers(rows: Sequence[dict[str, Any]], factor: float) -> list[str]:
    selected = sorted((row for row in rows if row["factor"] == factor), key=lambda row: row["seed"])
    return [json.dumps(row["answer"], sort_keys=True) for row in selected]


def main() -> None:
    options = arguments(
        (__doc__ or "").splitlines()[0],
        pairs=(200, "comparisons of each kind"),
        loss=(0.1, "the loss to be seen, as a share"),
        worse_than=(0.05, "as of compare --ci"),
        settings=(list(SETTINGS), "of the search"),
        workers=(os.cpu_count() or 1, "processes"),
        rows=(ROOT / "results" / "perf-compare.jsonl", "keeps the searches"),
        json=(Path, "write the figures to this file, too"),
    )
    factor = 1 / (1 - options.loss)
    jobs = [
        SearchJob(*CELL, seed, scale, SETTINGS[setting])
        for setting in options.settings
        for pair in range(options.pairs)
        for seed, scale in ((2 * pair + 1, 1.0), (2 * pair + 2, 1.0), (2 * pair + 2, factor))
    ]
    found: list[dict[str, Any]] = []
    for row in rows_of(jobs, options.workers, code_version("perf_compare.py", _NO_PART), options.rows):
        found.append(row)
        if len(found) % 50 == 0:
            print(f"{len(found)} of {len(jobs)} searches", file=sys.stderr, flush=True)
    figures: list[Figures] = []
    for setting in options.settings:
        rows = [row for row in found if row["sets"] == list(SETTINGS[setting])]
        answers = _answers(rows, 1.0), _answers(rows, factor)
        figures += figures_of(setting, *answers, options.pairs, options.loss, options.worse_than)
    titles = f"comparisons|not converged|false alarms|loss of {options.loss:.0%} seen|told"
    print(table("search|runs", titles, [cells(row) for row in figures]))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
