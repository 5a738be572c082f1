"""Honest trials, of which none may raise an alarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvbench import transfer
from kvbench.core.canaries.tally import Tally
from kvbench.core.records import TrialRecord
from kvbench.core.search.methods import STEADY_GATES

from .cases import EASY
from .trials import deployed, running

PAIRS: Final = ("mooncake", "nixl", "tcp")
LATE_GATES: Final = frozenset({"client_limited", "router_limited", "host_starved", "emulator_behind"})
NO_ACCUSATION: Final = STEADY_GATES | LATE_GATES | {"machine_disturbed"}
"""Warnings of the load, of kvbench's own parts, and of the machine."""
TAKEN: Final = 0.25
"""With more of the CPU than this taken by others, kvbench's own processes may well be late."""


def honest(connector: str, trials: int, folder: Path, noise: float = 0.0) -> Iterator[TrialRecord]:
    """Honest trials of a connector at light and moderate rates. ``noise``: share of tokens that come out
    otherwise in a batch.
    """
    slow = "deployment.engine_options.time_scale=3"  # so that a busy machine can keep the model's time
    noisy = f"deployment.engine_options.output_noise={noise:g}"
    with running(deployed(connector, {}, (*EASY, slow, noisy)), folder, watched=True) as trial:
        for number in range(trials):
            yield trial(6.0 + 2.0 * (number % 5))


def false_alarms(record: TrialRecord) -> list[str]:
    """The gates that refuse a trial wrongly, or warn of the servers, if it is an honest one.

    That kvbench's own processes are late is no false alarm where others take the machine's CPU.
    """
    findings = {finding.gate: finding for finding in record.findings}
    disturbed = (findings["machine_disturbed"].evidence if "machine_disturbed" in findings else {}) or {}
    taken = max(disturbed.get("other_cpu_share") or 0.0, disturbed.get("steal_share") or 0.0) > TAKEN
    refused = [name for name, finding in findings.items() if finding.level == "invalid"]
    warned = [name for name, finding in findings.items() if finding.level == "warning"]
    return [
        *(name for name in refused if not (taken and name in LATE_GATES)),
        *(name for name in warned if name not in NO_ACCUSATION),
    ]


def honest_deployments(trials: int, folder: Path, noise: float = 0.0) -> int:
    """So many real trials over the connectors that are here, as printed; how many raised an alarm."""
    names = ["aggregated", *(name for name in PAIRS if transfer.check(name) is None)]
    done = late = wrong = 0
    counts: Counter[str] = Counter()
    tally = Tally()
    for index, name in enumerate(names):
        share = trials // len(names) + (index < trials % len(names))
        for record in honest(name, share, folder, noise) if share else ():
            done += 1
            tally += Tally.of_trial(record)
            counts.update(f"{f.gate} ({f.level})" for f in record.findings if f.level != "note")
            alarms = false_alarms(record)
            wrong += bool(alarms)
            late += record.verdict == "invalid" and not alarms
            if alarms:
                print(f"honest trial of {name} ALARM by {', '.join(alarms)}: {record.reason}")
    noisy = f" with noise {noise:g}" if noise else ""
    print(
        f"{done} honest trials{noisy} over {', '.join(names)}: {wrong} alarms, {late} refused since other "
        "processes took the CPU; findings: "
        + (", ".join(f"{count} × {gate}" for gate, count in sorted(counts.items())) or "none")
        + f"; answers: {tally.text()}"
    )
    return wrong
