"""Commands that measure, also at a fixed rate (chaos, soak), or predict."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvbench.cli.console import console, import_numpy
from kvbench.errors import EXIT_OK
from kvbench.microbench.options import MicrobenchOptions
from kvbench.planning.options import (
    ONE_LOAD,
    SEARCHED,
    SERVER,
    CliOptions,
    ForceOption,
    JsonOption,
    OutputOption,
    ResumeOption,
    asks,
    complete_run,
    run_folder,
)

if TYPE_CHECKING:
    from kvbench.sweep.chaos_soak.constant_rate import HeldOptions


Rendering = Literal["k8s"]
AgainstOption = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="RUN",
        help="Repeat the loads of this run (imported, or with listed rates), and compare.",
        parser=run_folder,
        autocompletion=complete_run,
    ),
]

OtlpOption = Annotated[
    str,
    typer.Option(
        "--otlp",
        metavar="URL",
        envvar="KVBENCH_OTLP",
        help="Send live metrics to an OpenTelemetry collector (not with --resume): http://HOST:4318.",
        show_default=False,
        show_envvar=False,
    ),
]

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print trials, gates, client figures and caveats, too.")
]


@asks(without=ONE_LOAD)
def sweep(
    options: CliOptions,
    otlp: OtlpOption = "",
    json_: JsonOption = False,
    verbose: VerboseOption = False,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Find the highest request rate that meets the SLO, for each connector and input length."""
    import_numpy()
    from kvbench.sweep import sweep as sweeping

    if resume is not None:
        return _resumed(resume, "sweep", options, output, force, as_json=json_, verbose=verbose)
    return sweeping.command(options, output, console(as_json=json_), otlp, verbose=verbose)


@asks(without=("attainment", "method", "rates", *SEARCHED))
def bench(
    options: CliOptions,
    router_cost: Annotated[
        bool,
        typer.Option(
            "--router-cost", help="Send the same load via the router and directly, alternately; compare."
        ),
    ] = False,
    against: AgainstOption = None,
    otlp: OtlpOption = "",
    json_: JsonOption = False,
    output: OutputOption = Path("results"),
    resume: ResumeOption = None,
    force: ForceOption = False,
) -> int:
    """Measure one request rate per connector and input length."""
    import_numpy()
    from kvbench.sweep import sweep as sweeping

    cli = replace(options, both_modes=router_cost, replay=options.trace is not None)
    if cli.concurrency is not None and (cli.fixed_rate or cli.replay or router_cost or against is not None):
        raise typer.BadParameter(
            "a closed loop has no rate: omit --rate, --trace, --router-cost and --against",
            param_hint="--concurrency",
        )
    if against is not None:
        from kvbench.sweep.against import bench_against

        return bench_against(cli, against, output, console(as_json=json_))
    if resume is not None:
        return _resumed(resume, "bench", cli, output, force, as_json=json_)
    if cli.fixed_rate is None and not cli.replay and cli.concurrency is None:
        raise typer.BadParameter(
            "give a --rate, a --trace to replay, or the --concurrency of a closed loop",
            param_hint="--rate",
        )
    return sweeping.command(cli, output, console(as_json=json_), otlp)


@asks(without=ONE_LOAD)
def plan(
    options: CliOptions,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with each process's argv.")
    ] = False,
    render: Annotated[
        Rendering | None,
        typer.Option("--render", help="Print one deployment as manifests instead: k8s.", show_choices=False),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME=VALUE", help="For --render: image, gpu, rdma, …; repeatable."),
    ] = None,
) -> int:
    """Print what a sweep would do: cells, processes, ports, time. Starts nothing."""
    from kvbench.planning import plan as planning

    if render is not None:
        planning.render(options, with_ or ())
        return EXIT_OK
    return planning.command(options, console(), as_json=json_)


@asks(without=(*SERVER, *ONE_LOAD, "workers", "direct"))
def simulate(
    options: CliOptions,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="COMMAND",
            help="Find the highest rate of the external simulator that COMMAND starts; needs no scenario.",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="Measured run folder that gives KV bandwidth, and, if a sweep, overheads.",
            parser=run_folder,
            autocompletion=complete_run,
        ),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option("--splits", metavar="P:D[,P:D…]", help="Compare these numbers of P and D instances."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help="Compare all splits of N instances.", min=2, max=64),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="REQ/S", help="Only this rate, no search.", min=0.001),
    ] = None,
    json_: JsonOption = False,
    verbose: VerboseOption = False,
    against: AgainstOption = None,
    output: OutputOption = Path("results"),
) -> int:
    """Predict a sweep within seconds, on virtual time: same plan, search and gates, no processes."""
    from kvbench.sweep import simulate_splits as splitting
    from kvbench.sweep.simulate import command as simulate_command

    cli = replace(options, fixed_rate=rate, system=system)
    if against is not None:
        from kvbench.sweep.against import simulate_against as against_command

        return against_command(cli, against, output, console(as_json=json_))
    if splits is not None or gpus is not None:
        chosen = splitting.Choice(splits, gpus, json_)
        return splitting.command(cli, chosen, output, console(), like)
    return simulate_command(cli, output, console(as_json=json_), like, verbose=verbose)


def calibrate(
    from_: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="PATH",
            help="A run, or requests that vLLM (--save-detailed) or aiperf recorded; repeatable.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the profile is written.")
    ] = Path("profile.yaml"),
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of the profile; default: the file's.")
    ] = "",
    engine: Annotated[str, typer.Option("--engine", metavar="TEXT", help="Engine and version.")] = "",
    machine: Annotated[
        str, typer.Option("--machine", metavar="TEXT", help="Hardware, such as the GPUs.")
    ] = "",
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out",
            metavar="SHARE",
            help="Share of each load's last requests used as a check.",
            min=0.1,
            max=0.9,
        ),
    ] = 1 / 3,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", metavar="N", help="The engine's limit.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", metavar="N", help="The engine's limit.", min=1)
    ] = None,
    instances: Annotated[
        int | None, typer.Option("--instances", metavar="N", help="Engines that share the load.", min=1)
    ] = None,
    num_kv_tokens: Annotated[
        int | None,
        typer.Option("--num-kv-tokens", metavar="N", help="KV memory of one engine, in tokens.", min=1),
    ] = None,
    json_: JsonOption = False,
) -> int:
    """Fit a timing profile to measurements, and check it on held-out requests."""
    from kvbench.sweep import calibrate as calibrating
    from kvbench.sweep.calibrate import EngineLimits

    limits = EngineLimits(max_num_seqs, max_num_batched_tokens, instances, num_kv_tokens)
    options = calibrating.CalibrateOptions(from_, output, name, engine, machine, held_out, limits)
    return calibrating.command(options, console(as_json=json_))


@asks()
def microbench(
    options: MicrobenchOptions, json_: JsonOption = False, output: OutputOption = Path("results")
) -> int:
    """Measure raw KV transfers by backend, protocol, NICs, op, block size and batch, next to their limits."""
    from kvbench.microbench import command as microbench_command

    return microbench_command.command(options, output, console(as_json=json_))


def selftest(
    streams: Annotated[
        str, typer.Option("--streams", metavar="N[,N…]", help="Numbers of concurrent streams.")
    ] = "10,100,300,1000",
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", help="Seconds per number of streams.", min=1.0, max=600.0),
    ] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the figures as JSON to a file, too."),
    ] = None,
) -> int:
    """Measure this host's timing error and maximum load, with a server that has an exact schedule."""
    from kvbench.sweep import selftest as testing

    return testing.command(streams, seconds, console(), as_json=json_, output=output)


def _resumed(
    run: Path, kind: str, cli: CliOptions, output: Path, force: bool, *, as_json: bool, verbose: bool = False
) -> int:
    """Resume a run folder by its plan."""
    from kvbench.sweep import resume

    if output != Path("results") and output.resolve() != run.resolve().parent:
        raise typer.BadParameter(f"a run is resumed in its own folder, {run}", param_hint="--output")
    return resume.command(run, cli, kind, console(as_json=as_json), force=force, verbose=verbose)


NOT_HELD = (
    *(*SERVER, *ONE_LOAD, *SEARCHED),
    *("direct", "method", "rates", "trace", "time_scale"),
)
"""Options that fixed-rate runs lack: other loads, and external servers."""

RateOption = Annotated[
    float | None,
    typer.Option("--rate", metavar="REQ/S", help="Fixed rate.", min=0.001, rich_help_panel="Fixed rate"),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Use a share of the rates measured in this run.",
        parser=run_folder,
        autocompletion=complete_run,
        rich_help_panel="Fixed rate",
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(
        "--share", metavar="SHARE", help="Share of that rate; default: 0.7.", rich_help_panel="Fixed rate"
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="S",
        help="Deadline of a request; default: 10, or three times the SLO's limit.",
        min=0.1,
        rich_help_panel="Fixed rate",
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
    int, _fault("--repeats", metavar="N", help="Number of repeats of each fault.", min=1, max=1000)
]
BeforeOption = Annotated[float, _fault("--before", metavar="S", help="Load before the fault.")]
DownOption = Annotated[float, _fault("--down", metavar="S", help="How long a fault lasts.")]
AfterOption = Annotated[float, _fault("--after", metavar="S", help="Observation after the fault.")]
LabOption = Annotated[
    str,
    _fault(
        "--lab",
        metavar="N[xRATE]",
        help="In a lab of N NICs, such as 2x1gbit: faults of networks and NICs, too.",
    ),
]
PlanOption = Annotated[bool, typer.Option("--plan", help="Print the planned faults; start nothing.")]


@asks(without=NOT_HELD)
def chaos(
    options: CliOptions,
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
    """Run a fixed rate; kill, freeze, restart and isolate processes; report the cost of each fault."""
    from kvbench.core.chaos_soak.fault_plan import FaultTimes
    from kvbench.sweep.chaos_soak import chaos as running
    from kvbench.sweep.chaos_soak.chaos import fault_lab

    shown = console(as_json=json_)
    with fault_lab(lab, shown) as place:
        if place.status is not None:
            return place.status
        if resume is not None:
            return running.resume_run(resume, shown, force=force, lab=place.lab)
        held, times = _held(rate, from_, share, deadline), FaultTimes(before, down, after)
        chaos = running.ChaosOptions(held, tuple(fault or ()), times, repeats, place.lab)
        return running.command(options, chaos, output, shown, only_plan=plan)


@asks(without=NOT_HELD)
def soak(
    options: CliOptions,
    hours: Annotated[
        float, typer.Option("--hours", metavar="H", help="Duration; 0.05 is three minutes.", min=0.001)
    ] = 1.0,
    window: Annotated[
        float | None,
        typer.Option(
            "--window", metavar="S", help="Length of a window; results are stored after each.", min=1.0
        ),
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
    """Run a fixed rate for hours; report drift of latency, memory, descriptors, leases, and wrong outputs."""
    from kvbench.sweep.chaos_soak import soak as running

    shown = console(as_json=json_)
    if resume is not None:
        return running.resume_run(resume, shown, force=force)
    soak_options = running.SoakOptions(_held(rate, from_, share, deadline), hours * 3600.0, window)
    return running.command(options, soak_options, output, shown)


def _held(
    rate: float | None, found: Path | None, share: float | None, deadline_s: float | None
) -> HeldOptions:
    from kvbench.sweep.chaos_soak.constant_rate import HeldOptions

    return HeldOptions(rate, share, found, deadline_s)
