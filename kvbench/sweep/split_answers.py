"""What was found for each split of prefill and decode: one line each, in Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from kvbench.core.findings.rate_change import LEVEL
from kvbench.core.metrics.limit import LIMIT_SHORT
from kvbench.core.scenario.scenario import Scenario
from kvbench.report.tables.numbers import MISSING, number, percent
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import markdown_table, of_texts
from kvbench.report.terminal import print_table
from kvbench.results.provenance import SIMULATED, SIMULATED_WHY
from kvbench.results.run import RunFolder


@dataclass(frozen=True)
class Split:
    """``prefill`` × P and ``decode`` × D; with ``prefill`` 0 so many aggregated servers."""

    prefill: int
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    @property
    def text(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} servers"


@dataclass(frozen=True)
class Prediction:
    """What was found for one split at one input length. Rates per second; ``best`` of its input length."""

    connector: str
    split: str
    prefill: int
    decode: int
    gpus: int
    input_len: int
    output_len: int
    outcome: str
    max_request_rate: float | None
    lower: float | None
    upper: float | None
    goodput_per_gpu: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    slo_attainment: float | None
    limit: str
    limit_evidence: str
    best: bool = False
    mark: str = ""
    """"unfit" or "extrapolated": then no split of this length is called the best."""


def predictions(
    run: RunFolder, meaning: Mapping[str, tuple[str, Split]], scenario: Scenario
) -> list[Prediction]:
    """One line per split and input length, in the order of the plan; the best of each length is marked.

    A rate per GPU is compared, so that splits of unequal size can be.
    """
    found = [
        _prediction(row, *meaning[row.cell.connector], scenario)
        for row in summary_table(run)
        if row.cell.connector in meaning
    ]
    best = {
        lengths: max(
            each.goodput_per_gpu or 0.0 for each in found if (each.input_len, each.output_len) == lengths
        )
        for lengths in {(each.input_len, each.output_len) for each in found}
    }
    marked = {(each.input_len, each.output_len) for each in found if each.mark}
    return [
        replace(
            each,
            best=lengths not in marked
            and bool(each.goodput_per_gpu)
            and each.goodput_per_gpu == best[lengths],
        )
        for each in found
        for lengths in [(each.input_len, each.output_len)]
    ]


def _prediction(row: Row, connector: str, split: Split, scenario: Scenario) -> Prediction:
    deployed = scenario.deployed(connector)
    prefill, last = (deployed.ranks_of(f"{role}-0").gpus for role in ("prefill", "decode"))
    if not split.prefill:
        last = deployed.ranks_of("aggregated-0").gpus
    rate, gpus = row.answer.max_request_rate, split.prefill * prefill + split.decode * last
    # At its rate the share that meets the SLO; the answer promises the target at least.
    share = row.values["slo_attainment"]
    return Prediction(
        connector=connector,
        split=split.text,
        prefill=split.prefill,
        decode=split.decode,
        gpus=gpus,
        input_len=row.cell.input_len,
        output_len=row.cell.output_len,
        outcome=row.outcome,
        max_request_rate=rate,
        lower=row.answer.lower,
        upper=row.answer.upper,
        mark=row.answer.mark,
        goodput_per_gpu=None if rate is None else rate * (1.0 if share is None else share) / gpus,
        ttft_ms_p50=row.values["ttft_ms_p50"],
        ttft_ms_p99=row.values["ttft_ms_p99"],
        tpot_ms_p50=row.values["tpot_ms_p50"],
        slo_attainment=share,
        limit=row.limit,
        limit_evidence=row.limit_evidence,
    )


HEADER: Final = (
    "connector",
    "split",
    "GPUs",
    f"max rate (req/s) [{LEVEL * 100:g} %]",
    "per GPU",
    "met (%)",
    "TTFT P50 / P99 (ms)",
    "TPOT P50 (ms)",
    "limit",
)


def cells_of(each: Prediction) -> list[str]:
    """One prediction as people read it; the columns are HEADER's."""
    interval = ""
    if each.max_request_rate is not None:
        interval = f" [{number(each.lower)}, {MISSING if each.upper is None else number(each.upper)}]"
    rate = each.outcome if each.max_request_rate is None else number(each.max_request_rate)
    return [
        each.connector,
        each.split + (" ← best" if each.best else ""),
        f"{each.gpus}",
        ("≥ " if each.outcome == "at_least" else "")
        + rate
        + interval
        + (f" {each.mark}" if each.mark else ""),
        number(each.goodput_per_gpu),
        percent(each.slo_attainment),
        f"{number(each.ttft_ms_p50)} / {number(each.ttft_ms_p99)}",
        number(each.tpot_ms_p50),
        LIMIT_SHORT.get(each.limit, MISSING),
    ]


def markdown(scenario: Scenario, found: Sequence[Prediction]) -> str:
    """The comparison as Markdown, a table for each input length."""
    parts = [
        f"# {scenario.name}: splits of prefill and decode ({SIMULATED})",
        f"> **{SIMULATED.title()}**: {SIMULATED_WHY}. SLO: {scenario.slo.main().text()}.",
        "`per GPU` is the rate of requests that meet the SLO, divided by all GPUs of the split; the highest "
        "of an input length is the best. `limit` is what binds above the rate.",
    ]
    for length in dict.fromkeys(each.input_len for each in found):
        mine = [each for each in found if each.input_len == length]
        parts += [
            f"## {length:,} in, {mine[0].output_len:,} out",
            markdown_table(HEADER, map(cells_of, mine)),
        ]
        limits = [
            f"- {each.connector} {each.split}: {each.limit_evidence}" for each in mine if each.limit_evidence
        ]
        if limits:
            parts.append("\n".join(["What limits each:", "", *limits]))
    return "\n\n".join(parts) + "\n"


def show(scenario: Scenario, found: Sequence[Prediction], console: Console) -> None:
    """The comparison in the terminal."""
    title = f"{SIMULATED.upper()} · {scenario.name} · {scenario.slo.main().text()}"
    console.print(f"\n{title}", style="bold", markup=False)
    for length in dict.fromkeys(each.input_len for each in found):
        cells = [[*cells_of(each), "best" * each.best] for each in found if each.input_len == length]
        console.print(f"{length:,} in", style="bold", markup=False)
        print_table(console, of_texts("", [*HEADER, ""], cells))
        for each in found:
            if each.input_len == length and each.best and each.limit_evidence:
                console.print(f"best: {each.connector} {each.split}; {each.limit_evidence}", markup=False)
