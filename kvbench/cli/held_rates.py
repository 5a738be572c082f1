"""Commands at a held rate: chaos and soak."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.choices import complete_run, run_folder
from kvbench.cli.console import console
from kvbench.cli.options import ForceOption, JsonOption, LoadOptions, OutputOption, ResumeOption, asks

if TYPE_CHECKING:
    from kvbench.sweep.held_rate.held import HeldOptions

NOT_HELD = (
    *("base_url", "model", "header", "ca_file", "insecure", "api_key_env"),
    *("prefill_metrics_url", "decode_metrics_url", "direct", "method", "rates", "trace", "time_scale"),
)
"""Options of loads that are not held, and of servers whose processes are somebody else's."""

RateOption = Annotated[
    float | None,
    typer.Option("--rate", metavar="REQ/S", help="The rate to hold.", min=0.001, rich_help_panel="Held rate"),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Hold a share of the rates that this run has found.",
        parser=run_folder,
        autocompletion=complete_run,
        rich_help_panel="Held rate",
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option("--share", metavar="SHARE", help="That share; 0.7 by default.", rich_help_panel="Held rate"),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="S",
        help="A request without an end by then hangs; by default 10, or three times what the SLO allows.",
        min=0.1,
        rich_help_panel="Held rate",
    ),
]


_fault = partial(typer.Option, rich_help_panel="Faults")
FaultOption = Annotated[
    list[str] | None,
    _fault(
        "--fault",
        metavar="KIND:TARGET",
        help="Only this fault, such as restart:prefill, freeze:decode-1@5+3. Repeatable; default: all.",
    ),
]
RepeatsOption = Annotated[
    int, _fault("--repeats", metavar="N", help="How often each fault is done.", min=1, max=1000)
]
BeforeOption = Annotated[float, _fault("--before", metavar="S", help="Load before the fault.")]
DownOption = Annotated[float, _fault("--down", metavar="S", help="How long a fault lasts.")]
AfterOption = Annotated[float, _fault("--after", metavar="S", help="How long is watched after it.")]
LabOption = Annotated[
    str,
    _fault(
        "--lab",
        metavar="N[xRATE]",
        help="In a lab of N NICs, such as 2x1gbit: faults of networks and NICs, too.",
    ),
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print the plan of faults, and start nothing.")]


@asks(without=NOT_HELD)
def chaos(
    options: LoadOptions,
    rate: RateOption = None,
    from_: FromOption = None,
    share: ShareOption = None,
    deadline: DeadlineOption = None,
    fault: FaultOption = None,
    repeats: RepeatsOption = 1,
    before: BeforeOption = 5.0,
    down: DownOption = 3.0,
    after: AfterOption = 12.0,
    lab: LabOption = "",
    plan: PlanOption = False,
    json_: JsonOption = False,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Hold a rate, kill, freeze, restart and cut off processes, and tell what each fault costs."""
    from kvbench.core.held_rate.fault_plan import FaultTimes
    from kvbench.sweep.held_rate import chaos as running
    from kvbench.sweep.held_rate.fault_lab import fault_lab

    shown = console(as_json=json_)
    with fault_lab(lab, shown) as place:
        if place.status is not None:
            return place.status
        if resume is not None:
            return running.resumed(resume, shown, force=force, lab=place.lab)
        held, times = _held(rate, from_, share, deadline), FaultTimes(before, down, after)
        asked = running.ChaosOptions(held, tuple(fault or ()), times, repeats, place.lab)
        return running.command(options.cli_options(), asked, output, shown, only_plan=plan)


@asks(without=NOT_HELD)
def soak(
    options: LoadOptions,
    hours: Annotated[
        float, typer.Option("--hours", metavar="H", help="For how long; 0.05 is three minutes.", min=0.001)
    ] = 1.0,
    window: Annotated[
        float | None,
        typer.Option("--window", metavar="S", help="Length of a window, after which all is stored.", min=1.0),
    ] = None,
    rate: RateOption = None,
    from_: FromOption = None,
    share: ShareOption = None,
    deadline: DeadlineOption = None,
    json_: JsonOption = False,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Hold a rate for hours: drift of latency, memory, descriptors and leases, wrong answers."""
    from kvbench.sweep.held_rate import soak as running

    shown = console(as_json=json_)
    if resume is not None:
        return running.resumed(resume, shown, force=force)
    asked = running.SoakOptions(_held(rate, from_, share, deadline), hours * 3600.0, window)
    return running.command(options.cli_options(), asked, output, shown)


def _held(
    rate: float | None, found: Path | None, share: float | None, deadline_s: float | None
) -> HeldOptions:
    from kvbench.sweep.held_rate.held import HeldOptions

    return HeldOptions(rate, share, found, deadline_s)
