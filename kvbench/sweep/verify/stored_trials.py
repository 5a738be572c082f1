"""Recompute stored results from raw files: trials, chaos plans and costs, transfers, the report.

A trial follows from its requests, a chaos run's faults from seed and requests, a microbenchmark's rows from
its calls' times, derived files from all of these."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvbench.core.canaries.answer_kinds import CanaryAnswer, CanaryResult, judge_canaries
from kvbench.core.canaries.pool import CanaryPool, gave_answers
from kvbench.core.chaos_soak.fault_cost import FaultCost, cost_of
from kvbench.core.chaos_soak.fault_plan import faults_of
from kvbench.core.load.traces import TracedRequest, shares_prefixes
from kvbench.core.load.workers import LoadResult
from kvbench.core.metrics.limit import TrialFacts, binding_of
from kvbench.core.metrics.metrics import Window, summarise
from kvbench.core.records import Finding, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.data import TrialFigures
from kvbench.core.search.judging import PlannedTrial, SiteReadings, TrialWatch, judge, rebuild_offer
from kvbench.core.search.live_config import Decision
from kvbench.core.search.load_plan import TrialPlan, planned
from kvbench.core.search.methods import judged_slo
from kvbench.core.slo import Slo, latencies_ms
from kvbench.errors import KvbenchError, StoreError
from kvbench.files import scratch
from kvbench.report.report import FORMATS, write_report
from kvbench.results.checksums import Damage
from kvbench.results.parquet import TRANSFERS
from kvbench.results.provenance import slo_of
from kvbench.results.run import MANIFEST, TRIALS, RunFolder
from kvbench.sweep.verify.cross_checks import ABSENT, SAME, as_read, json_differences

ARRIVAL_S: Final = 1e-6
KNOWN_LATE_S: Final = 1.0
"""Longest delay of a load generator's report on a request, in seconds; usually a quarter of a second."""
MAX_SHOWN: Final = 5


@dataclass(frozen=True)
class StoredTrial:
    """A stored trial. ``plan``: its search's request, if known."""

    record: TrialRecord
    requests: list[RequestRecord]
    scenario: Scenario
    plan: TrialPlan | None = None
    trace: Sequence[TracedRequest] = ()
    canaries: CanaryPool | None = None
    extra: Sequence[CanaryAnswer] = ()

    def damage(self, what: str, stored: Any = "", recomputed: Any = "") -> Damage:
        return Damage(TRIALS, f"{self.record.trial_id}: {what}", str(stored), str(recomputed))

    def figures(self) -> Iterator[Damage]:
        """Figures of the stored steady part that contradict the requests, independent of the rules."""
        record, stored = self.record, self.record.summary
        try:
            window = Window(float(stored["window"]["start_s"]), float(stored["window"]["end_s"]))
        except (KeyError, TypeError, ValueError):
            yield self.damage("it has no steady part")
            return
        slo = judged_slo(record.method, self.scenario.slo.main())
        summary = summarise(self.requests, slo, record.request_rate, record.duration_s, window)
        now = as_read(summary.to_json())
        known = {key: value for key, value in stored.items() if key in now and key != "window"}
        whole = known.get("whole_run")
        if isinstance(whole, dict) and "cancelled" not in whole and isinstance(whole.get("failed"), int):
            # An older kvbench counted what it had cancelled as failed.
            known["whole_run"] = {**whole, "failed": whole["failed"] - now["whole_run"]["cancelled"]}
        differs = json_differences(known, {key: now[key] for key in known}, "summary")
        # Additional figures of this kvbench are no damage.
        found = [differ for differ in differs if differ[1] != ABSENT]
        words = f"not follow from requests/{record.trial_id}.parquet"
        for path, then, value in found[:MAX_SHOWN]:
            yield self.damage(f"{path} does {words}", then, value)
        if len(found) > MAX_SHOWN:
            yield self.damage(f"{len(found) - MAX_SHOWN} more figures do {words}")
        yield from self._check_decisions()

    def judgement(self) -> Iterator[Damage]:
        """Verdicts, findings and limits that differ from these rules, and unplanned requests."""
        record = self.record
        # It is not stored whether the load had already ended at the decision.
        best = self._judge("stopped")
        if _outcome(best) != _outcome(record):
            other = self._judge("complete")
            best = other if _outcome(other) == _outcome(record) else best
        if _outcome(best) != _outcome(record):
            yield self.damage("the verdict does not follow from the requests", _text(record), _text(best))
        for then, again, what in (
            (_names(record.findings), _names(best.findings), "findings"),
            (_without_live(record.summary), _without_live(best.summary), "tiers"),
            (record.summary.get("window"), as_read(best.summary["window"]), "window"),
            (self._limit(record.engine.get("limit")), self._limit(self._binding()), "limit"),
        ):
            for path, stored_, value in list(json_differences(then, again, what))[:1]:
                yield self.damage(f"{path} does not follow from the requests", stored_, value)
        yield from self._canary_figures()
        yield from self._arrivals()

    def _canary_figures(self) -> Iterator[Damage]:
        stored, found = self.record.engine.get("canaries"), self._judge_canaries()
        now = None if found is None else as_read(found.to_json())
        if stored is not None and self.canaries is None:
            yield self.damage("its canaries' reference outputs are missing")
            return
        for path, before, value in list(json_differences(stored or {}, now or {}, "canaries"))[:1]:
            yield self.damage(f"{path} does not follow from the answers", before, value)

    def _judge_canaries(self) -> CanaryResult | None:
        """Judge the canaries again; None without them or without reference outputs."""
        stored, pool = self.record.engine.get("canaries"), self.canaries
        if not isinstance(stored, Mapping) or pool is None:
            return None
        source = gave_answers(pool, self.record.cell)
        repeated = bool(stored.get("repeated"))
        return judge_canaries(pool, self.requests, self.extra, of_reference=source, repeated=repeated)

    def _binding(self) -> Mapping[str, Any] | None:
        record = self.record
        if record.verdict in ("met", "invalid"):
            return None
        return binding_of(self.requests, self.scenario.slo.main(), TrialFacts.of(record)).to_json()

    def _limit(self, row: Any) -> Any:
        """Return a limit without its text, since figures in it are rounded."""
        return (
            {key: row[key] for key in ("limit", "shares") if key in row} if isinstance(row, Mapping) else row
        )

    def _judge(self, reason: str) -> TrialRecord:
        """Judge by the rules from requests, stored decisions, and findings without stored evidence."""
        record = self.record
        plan = TrialPlan(record.cell, 1, record.request_rate, record.purpose, method=record.method)
        offered = rebuild_offer(record)
        watch = TrialWatch(self.scenario, plan, offered)
        watch.decisions.update(self._decisions())
        load = LoadResult(self.requests, reason, record.duration_s, record.engine.get("client") or {})
        evidence = {
            "recorded": record.findings,
            "reuse_expected": self._prompts_share_beginnings,
            "canaries": self._judge_canaries(),
        }
        return judge(
            self.scenario, PlannedTrial(plan, (), offered, watch, record), load, SiteReadings(evidence)
        )

    @property
    def _prompts_share_beginnings(self) -> bool:
        return self.scenario.workload.sessions is not None or (
            bool(self.trace) and shares_prefixes(self.trace)
        )

    def _decisions(self) -> dict[str, Decision]:
        tiers = self.record.summary.get("tiers") or {}
        names = list(self.scenario.slo.by_tier())
        lives = {name: (tiers.get(name) or {}).get("live") for name in names}
        if len(names) == 1:
            lives = {names[0]: self.record.summary.get("live")}
        return {name: _decision(live) for name, live in lives.items() if live}

    def _arrivals(self) -> Iterator[Damage]:
        plan = self.plan
        if plan is None or not self.requests:
            return
        by_connector = replace(plan, seed_key=plan.cell.key)
        if not plan.seed_key and self.record.seed == by_connector.seed(self.scenario.seed):
            plan = by_connector  # as before connectors shared their arrivals
        if self.record.seed != (seed := plan.seed(self.scenario.seed)):
            yield self.damage("its seed is not that of its position", self.record.seed, seed)
            return
        due = planned(self.scenario, plan, self.trace).offsets_s
        stored = np.sort([request.scheduled_s for request in self.requests])
        if len(stored) > len(due) or (len(stored) and np.abs(stored - due[: len(stored)]).max() > ARRIVAL_S):
            yield self.damage("its requests are not those that its seed plans")

    def _check_decisions(self) -> Iterator[Damage]:
        """Compare decisions during the trial with the requests known then."""
        for name, decision in self._decisions().items():
            slo = self.scenario.slo.by_tier()[name]
            inside = [
                request for request in self.requests if Window(*decision.window_s).has(request.scheduled_s)
            ]
            measured = decision.measured
            if not measured.n:
                continue
            if measured.n != len(inside):
                yield self.damage("live.measured.n is not the number of requests", measured.n, len(inside))
                continue
            least, most = _share_then(inside, slo, measured.target, decision.at_s)
            share, target = measured.attainment, measured.target
            if share is not None and target is not None and not least - SAME <= share <= most + SAME:
                yield self.damage(
                    "live.measured.attainment does not follow from the requests",
                    f"{share:.4g}",
                    f"{least:.4g} to {most:.4g}" if most - least > SAME else f"{least:.4g}",
                )
            if target is None:
                continue
            wrong = (decision.verdict == "met" and most < target - SAME) or (
                decision.verdict == "missed" and not measured.grows and least >= target
            )
            if wrong:
                yield self.damage(
                    "live.verdict does not follow from the requests",
                    decision.verdict,
                    f"{least:.1%} to {most:.1%} within the SLO, {target:.1%} required",
                )


def _decision(live: Mapping[str, Any]) -> Decision:
    start_s, end_s = live["window_s"]
    figures = TrialFigures.from_json(live["measured"])
    return Decision(live["verdict"], live["reason"], float(live["at_s"]), (start_s, end_s), figures)


def _verdicts(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tier.get("verdict") for name, tier in (summary.get("tiers") or {}).items()}


def _without_live(summary: Mapping[str, Any]) -> Any:
    tiers = (summary.get("tiers") or {}).items()
    return as_read({name: {k: v for k, v in tier.items() if k != "live"} for name, tier in tiers})


def _names(findings: Sequence[Finding]) -> list[str]:
    return sorted(f"{finding.gate}: {finding.level}" for finding in findings)


def _outcome(record: TrialRecord) -> tuple[str, list[str], dict[str, Any]]:
    """Verdict, figures in the reason, and tiers' verdicts; the reason's wording may change."""
    return record.verdict, re.findall(r"\d+(?:\.\d+)?", record.reason), _verdicts(record.summary)


def _text(record: TrialRecord) -> str:
    tiers = "".join(f", {name} {verdict}" for name, verdict in _verdicts(record.summary).items())
    return f"{record.verdict}{tiers} ({record.reason})" if record.reason else f"{record.verdict}{tiers}"


def _share_then(
    requests: Sequence[RequestRecord], slo: Slo, target: float | None, at_s: float
) -> tuple[float, float]:
    """Return (least, most) share within the criteria that may have been known at a time. A request counts as
    a miss once it fails or exceeds every limit."""
    shares = []
    for criterion in slo.all_criteria():
        if criterion.kind != "share" or (target is not None and not math.isclose(criterion.target, target)):
            continue
        counts = [0, 0, 0, 0]
        """Known and within, known and missed, perhaps known: within, missed."""
        for one in requests:
            latencies = one.ttft_s, one.tpot_s, one.e2el_s
            result = criterion.observe(latencies_ms(*latencies, one.ok, one.turn, one.session_s), one.ok)
            if math.isnan(result):
                continue  # it does not cover that criterion
            within = result >= 0.5
            end_s = one.last_token_s if one.ok and one.last_token_s is not None else math.inf
            uncertain = end_s > at_s - KNOWN_LATE_S
            counts[2 * uncertain + (not within or end_s > at_s)] += 1
        good, bad, may_keep, may_break = counts
        known = good + bad
        shares.append(good / max(1, known + may_break))
        shares.append((good + may_keep) / max(1, known + may_keep))
    return min(shares, default=0.0), max(shares, default=1.0)


MAX_FAULTS_SHOWN: Final = 3


def fixed_rate_damages(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    """Find results of a fixed-rate run that contradict its options or requests."""
    if run.manifest.get("kind") == "chaos":
        yield from _of_chaos(run, checked)


def _of_chaos(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    try:
        manifest_plan = run.manifest["asked"]
        planned = {
            f"{label} {fault.number}": fault
            for label, rows in manifest_plan["faults"].items()
            for fault in faults_of(rows)
        }
    except (KeyError, TypeError, AttributeError) as error:
        yield Damage(MANIFEST, f"asked.faults is no plan of faults: {error}")
        return
    for trial in run.all_trials:
        if trial.method != "chaos":
            continue
        stored: dict[str, Any] = trial.summary.get("chaos") or {}
        number = int(trial.trial_id.rpartition("-")[2])
        fault = planned.get(f"{trial.cell.connector} {number}")
        if fault is None or stored.get("fault") != fault.to_json():
            yield Damage(TRIALS, f"{trial.trial_id}: its fault is not the one that was planned")
            continue
        try:
            requests = run.request_records(trial.trial_id)
            struck_s = float(stored["struck_s"])
            FaultCost.from_json(stored["cost"])
        except (StoreError, KeyError, TypeError, ValueError):
            yield Damage(TRIALS, f"{trial.trial_id}: what its fault cost cannot be recomputed")
            continue
        checked["faults"] += 1
        cost = cost_of(
            requests, slo_of(run).main(), trial.request_rate, struck_s, stored.get("wrong_ids") or ()
        )
        now = as_read(json.loads(json.dumps(cost.to_json())))
        for path, before, value in list(json_differences(stored["cost"], now, "cost"))[:MAX_FAULTS_SHOWN]:
            what = f"{trial.trial_id}: {path} does not follow from requests/{trial.trial_id}.parquet"
            yield Damage(TRIALS, what, before, value)


def transfer_damages(run: RunFolder, checked: Counter[str]) -> Iterator[Damage]:
    """Find rates other than bytes / time, and rows without all their calls. ``checked`` counts rows."""
    try:
        rows = run.transfer_records()
    except StoreError as error:
        yield Damage(TRANSFERS, error.message)
        return
    for row in rows:
        if row.status != "ok" or not row.call_s:
            continue
        checked["transfers"] += 1
        if row.calls != len(row.call_s):
            yield Damage(TRANSFERS, f"{row.case.key}: calls", str(row.calls), str(len(row.call_s)))
        if row.gb_per_s is not None and row.window_s > 0:
            rate = row.nbytes * row.calls / row.window_s / 1e9
            if not math.isclose(row.gb_per_s, rate, rel_tol=1e-6):
                yield Damage(TRANSFERS, f"{row.case.key}: gb_per_s", f"{row.gb_per_s:.9g}", f"{rate:.9g}")


TEXTS: Final = ("report.html", "report.md")
FOLDERS: Final = ("tables", "figures")
MOST_NAMED: Final = 3


def stale_files(run: RunFolder, checked: Counter[str]) -> Iterator[str]:
    """Name derived files that this kvbench would write differently."""
    stored = {name: run.path / name for name in _derived_files(run.path)}
    if not stored:
        return
    png = any(name.endswith(".png") for name in stored)
    with scratch("kvbench-verify-") as temporary:
        folder = temporary / run.path.resolve().name
        try:
            shutil.copytree(run.path, folder, ignore=_left_out, symlinks=True)
            write_report(folder, (*FORMATS, "png") if png else FORMATS)
        except (KvbenchError, OSError, ValueError) as error:
            yield f"the report cannot be created from the raw files: {error}"
            return
        made = {name: folder / name for name in _derived_files(folder)}
        common = [name for name in stored if name in made]
        checked["derived files"] += len(common)
        other = [name for name in common if not cmp(stored[name], made[name], shallow=False)]
    if other:
        named = ", ".join(other[:MOST_NAMED])
        more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
        yield f"{named}{more}: this kvbench writes another from the raw files; `kvbench report` does so"


def _derived_files(folder: Path) -> list[str]:
    files = [folder / name for name in TEXTS]
    files += [file for name in FOLDERS for file in sorted((folder / name).glob("*"))]
    return [file.relative_to(folder).as_posix() for file in files if file.is_file() and not file.is_symlink()]


def _left_out(place: str, names: list[str]) -> set[str]:
    """Names of a folder to omit from a copy: derived files, logs, hidden ones."""
    return {name for name in names if name in (*TEXTS, *FOLDERS, "logs") or name.startswith(".")}
