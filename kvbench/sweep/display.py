"""Progress of a sweep: a line per finished cell, the time left, the next step.

A terminal also has a live line; a log, and ``-v``, a line per trial. ``TimeLeft`` corrects the plan's
estimate after each trial: a cell needs the trials that narrow its interval to the precision (square-root
law), each as long as one near the answer (``core.plan.prospect``); an unmeasured cell takes as long as
similar ones. Launches, checks and simulation speed form the *pace*: elapsed seconds per second of trials."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Final, Protocol

from rich.console import Console
from rich.text import Text

from kvbench.core.load.workers import Progress as LoadProgress
from kvbench.core.metrics.metrics import missed_text
from kvbench.core.plan.plan import Plan
from kvbench.core.plan.prospect import Prospect, prospect_of, seen_of
from kvbench.core.records import MAIN_METHODS, Cell, TrialRecord
from kvbench.core.search.by_measurements import CERTAIN
from kvbench.files import read_object
from kvbench.report.findings.ahead import group_pairs, rate_pairs
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.terminal import LiveBar, minutes, print_text
from kvbench.results.provenance import differences, scenario_of, server_of
from kvbench.results.run import MANIFEST, CellResult, RunFolder, load_run
from kvbench.sweep.strategies import Standing

GROWS_MOST: Final = 1.15
"""Largest growth of the displayed time within a cell, as a factor; it prevents jumps."""
NEAR_TRIALS: Final = 3
"""Number of last trials that predict the length of the next one."""
MOST_NEEDED: Final = 0.6
"""Further trials of a search that knows nothing, as a share of ``max_trials``; linearly fewer with
confidence. Fitted to simulated sweeps of quickstart, xpyd and seed-h200-emulated."""
LONGER: Final = 0.25
"""Exponent of the prompt length in a cell's time: the best in nine simulated sweeps."""
FROM, TO = 2.0, 6.0
"""Trials after which an interval's width begins to predict the remaining number, and predicts it alone."""
BURSTS: Final = 6
BURST_TRIAL_S: Final = 12.0
"""Burst trials of a cell and their mean length, in seconds: five of arrivals, and the rest until the last
answer."""
_TRIALS: Final = "trials"


@dataclass
class _Measured:
    records: list[TrialRecord] = field(default_factory=list)
    prospect: Prospect | None = None
    confidence: float | None = None
    width: float | None = None
    ended: bool = False

    @property
    def spent_s(self) -> float:
        return math.fsum(record.duration_s for record in self.records)


class TimeLeft:
    """Estimates the remaining time in seconds from ended trials and cells."""

    def __init__(self, plan: Plan, cells: Sequence[Cell] | None = None, *, paced: bool = True) -> None:
        """``cells``: those left to measure; by default all. ``paced``: a trial takes real time; a
        simulation's pace is learnt first."""
        self._plan = plan
        self._cells = list(plan.cells if cells is None else cells)
        self._known: dict[Cell, _Measured] = {}
        self._paced = paced
        part_s = {part.name: math.sqrt(max(part.lower_s, 0.1) * max(part.upper_s, 0.1)) for part in plan.time}
        self._cell_s = part_s.get(_TRIALS, sum(part_s.values())) / max(1, len(plan.cells))
        self._overhead_s = sum(part_s.values()) - part_s.get(_TRIALS, sum(part_s.values()))
        self._least_s: dict[Cell, float] = {}
        self._begun: tuple[tuple[Cell, int] | None, float] = None, 0.0
        """The running trial: its cell and number, and the time left when it began."""

    def trial_ended(self, record: TrialRecord, prob: float | None = None, width: float | None = None) -> None:
        """Take a trial. ``prob``: probability that the answer is within its precision; ``width``: relative
        half-width of its interval."""
        measured = self._known.setdefault(record.cell, _Measured())
        measured.records.append(record)
        measured.confidence, measured.width = prob, width
        if measured.prospect is None and (seen := seen_of(measured.records)) is not None:
            slo = next(iter(self._plan.scenario.slo.by_tier().values()))
            measured.prospect = prospect_of(self._plan.scenario, slo, seen)

    def cell_ended(self, cell: Cell) -> None:
        self._known.setdefault(cell, _Measured()).ended = True

    def left_s(self, elapsed_s: float, cell: Cell | None = None, in_trial_s: float = 0.0) -> float | None:
        """Return the time left, or None before a trial was near an answer. ``elapsed_s``: since the
        beginning; ``in_trial_s``: since the start of the running trial, which belongs to ``cell``."""
        done_s = math.fsum(measured.spent_s for measured in self._known.values())
        pace = self._pace(elapsed_s, done_s + in_trial_s)
        if pace is None or not any(measured.prospect or measured.ended for measured in self._known.values()):
            return None
        most_s = pace * max((self._plan.scenario.search.budget_s or math.inf) - done_s - in_trial_s, 0.0)
        others_s = pace * math.fsum(
            self._cell_left_s(case) for case in self._cells if case != cell and not self._measured(case).ended
        )
        others_s = min(others_s, most_s)
        if cell is None:
            return others_s
        least_s = self._least_s.get(cell, math.inf)
        position = cell, len(self._measured(cell).records)
        if self._begun[0] != position:  # a trial starts: count down from here
            whole_s = others_s + pace * self._cell_left_s(cell)
            self._begun = position, min(whole_s, most_s, GROWS_MOST * least_s)
        # A delayed cell must not consume the time of later cells.
        left_s = max(self._begun[1] - pace * in_trial_s, min(others_s, least_s))
        self._least_s[cell] = min(least_s, left_s)
        return left_s

    def _measured(self, cell: Cell) -> _Measured:
        return self._known.get(cell) or _Measured()

    def _pace(self, elapsed_s: float, trials_s: float) -> float | None:
        """Elapsed seconds per second of trials; at first from the plan's launches and checks."""
        if not self._paced:
            return elapsed_s / trials_s if trials_s > 0 else None
        whole = self._cell_s * len(self._plan.cells)
        planned = 1 + self._overhead_s / max(whole, 1e-9)
        return (elapsed_s + planned * self._cell_s) / (trials_s + self._cell_s)

    def _cell_left_s(self, cell: Cell) -> float:
        measured = self._measured(cell)
        if not measured.records:
            return self._similar_cell_s(cell)
        bursts = sum(record.method == "burst" for record in measured.records)
        bursts_s = BURST_TRIAL_S * max(BURSTS - bursts, 1) * self._plan.scenario.search.compare_burst
        if bursts and bursts_s:
            return bursts_s
        last, width = measured.records[-1], measured.width or math.inf
        settled = width <= self._plan.scenario.search.precision and last.purpose == "confirm"
        if bursts_s and settled and last.verdict == "met":
            return bursts_s  # the next trial is most likely the first burst
        search_s = self._next_trial_s(measured) * self._trials_left(measured) + bursts_s
        if measured.prospect is None:
            # Trials far from the answer are short and do not predict later ones.
            return max(search_s, self._similar_cell_s(cell) - measured.spent_s)
        return search_s

    def _next_trial_s(self, measured: _Measured) -> float:
        lengths_s = [record.duration_s for record in measured.records if record.purpose != "ceiling"]
        if measured.prospect is None:
            return max(
                lengths_s[-NEAR_TRIALS:],
                default=self._cell_s / (MOST_NEEDED * self._plan.scenario.search.max_trials),
            )
        near_s = measured.prospect.trial_s
        seen = lengths_s[-NEAR_TRIALS:]
        return fmean([near_s, median(seen)]) if len(lengths_s) > NEAR_TRIALS else near_s

    def _trials_left(self, measured: _Measured) -> float:
        """Remaining trials of a running cell, at least one."""
        search, done = self._plan.scenario.search, len(measured.records)
        if search.method == "fixed":
            return max(1.0, len(search.rates) - done)
        uncertainty = max(0.0, 1 - (measured.confidence or 0.0) / CERTAIN)
        needed = 1 + MOST_NEEDED * search.max_trials * uncertainty
        if measured.width is not None:
            tried = sum(record.purpose != "ceiling" for record in measured.records)
            weight = min(max((tried - FROM) / (TO - FROM), 0.0), 1.0)
            more = tried * ((measured.width / search.precision) ** 2 - 1)
            needed = max(1.0, (1 - weight) * needed + weight * more)
        return min(needed, max(1, search.max_trials - done))

    def _similar_cell_s(self, cell: Cell) -> float:
        """Estimate a cell's time from cells of the same length or connector."""
        estimates = {
            other: (measured.spent_s + (0.0 if measured.ended else self._cell_left_s(other)))
            * (cell.input_len / other.input_len) ** LONGER
            for other, measured in self._known.items()
            if measured.records and (measured.ended or measured.prospect is not None)
        }
        same_length = [time_s for other, time_s in estimates.items() if other.input_len == cell.input_len]
        same_connector = [time_s for other, time_s in estimates.items() if other.connector == cell.connector]
        found = same_length or same_connector or list(estimates.values())
        return fmean(found) if found else self._cell_s


_COLOURS = {"met": "green", "missed": "red", "invalid": "yellow", "undecided": "cyan", "measured": "green"}
MAX_RATIO: Final = 3.0
"""Largest ratio of an interval's ends that is worth showing."""


def why(record: TrialRecord) -> str:
    """Explain a trial's verdict: causes of misses, a growing queue, a refusal, missing evidence,
    or a saturation probe's result."""
    if record.verdict == "invalid":
        return record.reason
    if record.purpose == "ceiling":
        return _completions_text(record)
    causes = record.summary.get("missed_by") or {}
    missed = missed_text(causes)
    if record.verdict == "undecided":
        return "; ".join(filter(None, (_open(record), missed)))
    return missed or (record.reason if record.verdict == "missed" else "")


def _load_text(record: TrialRecord) -> str:
    """Load as text: a rate, or a number of concurrent requests."""
    at_once = record.engine.get("concurrency")
    return f"{at_once} at once" if at_once else f"{record.request_rate:8.2f} req/s"


def _completions_text(record: TrialRecord) -> str:
    """Result of a saturation probe: completions per second under overload."""
    served = record.summary.get("completion_rate") or record.summary.get("run_request_rate")
    if not isinstance(served, (int, float)) or not served:
        return "saturation probe: too few requests served to measure the capacity"
    steady = record.summary.get("completion_steady", True)
    return f"saturation probe: about {served:.3g} req/s served" + ("" if steady else ", still changing")


def _open(record: TrialRecord) -> str:
    """Return why a trial was inconclusive, with its effective sample size."""
    summary = record.summary
    judged = (summary.get("judged_met") or 0) + (summary.get("judged_missed") or 0)
    effective = summary.get("effective_n")
    if isinstance(effective, (int, float)) and effective < 0.8 * judged:
        return f"{record.reason}; effective sample size {effective:.0f} of {judged} (correlated requests)"
    return record.reason


class Watcher(Protocol):
    def stage(self, text: str) -> None: ...
    def note(self, text: str, *, caveat: bool = False) -> None:
        """Show a note. ``caveat``: a forecast of the figures' precision."""

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None: ...
    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None: ...
    def cell_finished(self, result: CellResult) -> None: ...


class Silent:
    """A watcher for tests and notebooks that prints nothing."""

    def stage(self, text: str) -> None:
        pass

    def note(self, text: str, *, caveat: bool = False) -> None:
        pass

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        pass

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        pass

    def cell_finished(self, result: CellResult) -> None:
        pass


@dataclass
class Display:
    """Prints a line per cell of a run folder, and per trial if ``verbose`` or without a live line. ``left``:
    estimator of the time left; ``planned``: the plan's estimate until then."""

    console: Console
    path: Path
    cells: int
    left: TimeLeft | None = None
    planned: str = ""
    verbose: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._done = 0
        self._trials: Counter[Cell] = Counter()
        self._lists_trials = self.verbose or not self.console.is_terminal
        """Whether trials have lines."""
        self._bar = LiveBar(self.console, self.path)

    def __enter__(self) -> Display:
        self._trials = Counter(trial.cell for trial in load_run(self.path).all_trials)
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def stage(self, text: str) -> None:
        if self._lists_trials:
            self._print(text)
        self._update_bar({"what": text, "trial": "", "rate": ""})

    def note(self, text: str, *, caveat: bool = False) -> None:
        if self.verbose or not caveat:
            self._print(text, "yellow")

    def trial_progress(self, cell: Cell, rate: float, planned: int, progress: LoadProgress) -> None:
        doing, done = f"{rate:.3g} req/s" if rate else "closed loop", progress.done
        if progress.prepared is not None:
            doing, done = f"preparing {progress.prepared:,} of {planned:,} requests", progress.prepared
        texts = _live_texts(cell, self._trials[cell] + 1, doing)
        self._update_bar(texts, cell, progress.t_s, done / max(1, planned))

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        self._trials[record.cell] += 1
        if self.left is not None and record.method in MAIN_METHODS:
            so_far = (standing.confidence, standing.width) if standing else (None, None)
            self.left.trial_ended(record, *so_far)
        number = self._trials[record.cell]
        if self._lists_trials:
            self._print(_trial_text(record, number, standing))
        self._update_bar(_live_texts(record.cell, number, _load_text(record).strip()), record.cell)

    def cell_finished(self, result: CellResult) -> None:
        self._done += 1
        if self.left is not None:
            self.left.cell_ended(result.cell)
        if result.status != "skipped":
            left = self._left_text(self._left_s())
            more = f"  ({self._done} of {self.cells} cells, {left})" if left and self._lists_trials else ""
            self._print(self._cell_text(result) + more)
        self._update_bar({})

    def _cell_text(self, result: CellResult) -> str:
        """The cell as the table will show it."""
        where = f"{result.cell.connector:<11} {result.cell.input_len:>6,} in  "
        row = next((line for line in summary_table(load_run(self.path)) if line.cell == result.cell), None)
        if row is None or result.answer is None:
            return where + ": ".join(filter(None, (result.status, *result.reason.splitlines()[:1])))
        return f"{where}{row.rate_text()}{' req/s' if row.answer.max_request_rate else ''}"

    def _update_bar(
        self, texts: Mapping[str, str], cell: Cell | None = None, in_trial_s: float = 0.0, part: float = 0.0
    ) -> None:
        """Update the live line. ``part``: done share of the trial."""
        elapsed_s, left_s = self._bar.elapsed_s, self._left_s(cell, in_trial_s)
        if left_s is not None:
            share = elapsed_s / max(elapsed_s + left_s, 1e-9)
        else:
            share = (self._done + (part if self.left is None else 0.0)) / max(1, self.cells)
        count = f"cell {min(self._done + 1, self.cells)}/{self.cells}"
        self._bar.say(count=count, left=self._left_text(left_s), share=share, **texts)

    def _left_s(self, cell: Cell | None = None, in_trial_s: float = 0.0) -> float | None:
        known = self.left
        return None if known is None else known.left_s(self._bar.elapsed_s, cell, in_trial_s)

    def _left_text(self, seconds: float | None) -> str:
        if self._done >= self.cells:
            return ""
        if seconds is None:
            return self.planned
        return f"about {minutes(seconds)} left" if seconds >= 1 else "any moment now"

    def _print(self, text: Text | str, style: str = "") -> None:
        clock = f"{minutes(self._bar.elapsed_s)}  "
        print_text(self.console, Text.assemble(clock, text, style=style), len(clock))


def _live_texts(cell: Cell, number: int, doing: str) -> Mapping[str, str]:
    return {"what": f"{cell.connector} {cell.input_len:,} in", "trial": f"trial {number}", "rate": doing}


def _trial_text(record: TrialRecord, number: int, standing: Standing | None) -> Text:
    attainment = record.summary.get("slo_attainment")
    # In a saturation probe no request is within the SLO, as intended.
    known = attainment is not None and record.purpose != "ceiling"
    # Far from the answer an interval is meaningless.
    narrow = standing is not None and standing.upper < MAX_RATIO * standing.lower
    detail = "; ".join(filter(None, (why(record), standing.text() if standing and narrow else "")))
    return Text.assemble(
        f"{record.cell.connector:<11} {record.cell.input_len:>6,} in  trial {number:<2}  ",
        f"{_load_text(record):>14}  ",
        f"{f'{attainment:.1%} within SLO' if known else '':>17}  ",
        (f"{record.verdict:<7}", _COLOURS[record.verdict]),
        ("  " + detail if detail else "", "dim"),
    )


def next_step(run: RunFolder, resume: str = "") -> str:
    """``next: kvbench compare A B (…)``. ``resume``: the command that resumes the run, if possible."""
    command, purpose = _step(run, summary_table(run), resume)
    return f"next: {command}  ({purpose})"


def _step(run: RunFolder, rows: Sequence[Row], resume: str) -> tuple[str, str]:
    if resume and any(result.status == "failed" for result in run.cells):
        return resume, "measures the failed cells again"
    search = (run.plan.get("scenario") or {}).get("search") or {}
    words = [str(word) for word in run.manifest.get("argv") or ()]
    again = shlex.split(" ".join(words)) if words[:1] == ["kvbench"] else []
    searched = [row for row in rows if row.outcome in ("found", "at_least")]
    if again and searched and search.get("method") == "sustained":
        short = [row.name for row in searched if row.outcome == "found" and not row.answer.converged]
        names = ", ".join(dict.fromkeys(short))
        if short and (budget_s := search.get("budget_s")):
            command = _set_option(again, "--budget", "search.budget_s", f"{2 * float(budget_s):g}")
            return command, f"searches longer, for {names}"
        if short and (trials := search.get("max_trials")):
            command = _set_option(again, "--max-trials", "search.max_trials", f"{2 * int(trials)}")
            return command, f"longer search for {names}"
        if any(row.outcome == "at_least" for row in searched) and (most := search.get("max_rate")):
            command = _set_option(again, "", "search.max_rate", f"{10 * float(most):g}")
            return command, "higher rates, since none was too high yet"
        undecided = group_pairs(rate_pairs(rows)).alike
        if undecided and (precision := search.get("precision")):
            names = f"{undecided[0].ahead} and {undecided[0].behind}"
            command = _set_option(again, "--precision", "search.precision", f"{float(precision) / 2:g}")
            return command, f"narrower intervals for {names}"
    if (earlier := _earlier(run)) is not None:
        both = " ".join(shlex.quote(str(path)) for path in (earlier, run.path))
        return f"kvbench compare {both}", "shows what has changed since"
    if not run.all_trials:
        return "kvbench doctor", "shows what is missing here"
    return f"kvbench export timeline {shlex.quote(str(run.path))}", "shows one trial request by request"


def _set_option(words: Sequence[str], option: str, path: str, value: str) -> str:
    """Set another value for a scenario path in a command, by ``option`` or ``--set``."""
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        after = rest[0] if rest else ""
        if (option and word == option) or (word == "--set" and after.startswith(f"{path}=")):
            del rest[:1]
        elif not word.startswith(tuple(f"{flag}=" for flag in (f"--set={path}", option) if flag)):
            kept.append(word)
    return shlex.join([*kept, *((option, value) if option else ("--set", f"{path}={value}"))])


def _earlier(run: RunFolder) -> Path | None:
    """Last complete run in the same folder that can be compared with this one, or None."""
    for folder in sorted(run.path.parent.glob(f"*-{scenario_of(run)}-*"), reverse=True):
        if folder.name < run.path.name and (folder / MANIFEST).is_file():
            manifest = read_object(folder / MANIFEST, [])
            same = all(manifest.get(key) == run.manifest.get(key) for key in ("kind", "scenario"))
            if same and manifest.get("status") == "complete" and _can_be_compared(load_run(folder), run):
                return folder
    return None


def _can_be_compared(earlier: RunFolder, run: RunFolder) -> bool:
    done = [{result.cell for result in folder.cells if result.status == "done"} for folder in (earlier, run)]
    same_system = server_of(earlier) == server_of(run) and not differences([earlier, run])
    return same_system and bool(done[0] & done[1])
