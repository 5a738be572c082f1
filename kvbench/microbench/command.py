"""``kvbench microbench``: options → matrix → rows in a run folder → table and report. It shows a bar with the
time left, or a line for each case."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from kvbench.core.transfers import cases as matrices
from kvbench.core.transfers.cases import Axes, BackendCapabilities, Matrix
from kvbench.core.transfers.kv_shape import WHOLE_BLOCKS, KvWork, check_memory, kv_work
from kvbench.core.transfers.records import Case, Memory, TransferOp, TransferRecord
from kvbench.core.transfers.stats import call_times
from kvbench.core.units import duration_text, parse_counts, parse_sizes, size_text
from kvbench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, InputError
from kvbench.hosts import environment
from kvbench.hosts.devices import gpus
from kvbench.microbench.cases import run_cases
from kvbench.microbench.hosts import BetweenHosts, MicrobenchPlace, MicrobenchPlaces
from kvbench.microbench.options import MicrobenchOptions
from kvbench.processes.transfer_worker.memory import available_bytes
from kvbench.report import report
from kvbench.report.tables.table import number
from kvbench.report.tables.transfers import case_text, time_text
from kvbench.report.terminal import LiveBar, minutes, print_text
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunInfo, RunStore


class CaseProgress:
    """Shows progress. ``estimate_s``: of all cases, corrected by the time of finished ones."""

    def __init__(self, console: Console, path: Path, cases: int, estimate_s: float) -> None:
        self._console = console
        self._cases = cases
        self._estimate_s = estimate_s
        self._done = 0
        self._bar = LiveBar(console, path)

    def __enter__(self) -> CaseProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def on_stage(self, index: int, case: Case, stage: str) -> None:
        """Show progress within a case, as ``run_cases`` reports it."""
        self._update_bar(what=f"{case_text(case)}: {stage}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def finished(self, record: TransferRecord) -> None:
        """Show a finished case: failures at once, others only without a bar."""
        self._done += 1
        if record.status == "error":
            self._print_line(f"{_pair_prefix(record)}{case_text(record.case)}: {record.error}", "red")
        elif not self._bar.shown:
            self._print_line(f"{_pair_prefix(record)}{case_text(record.case)}: {_figures(record)}", "")
        self._update_bar()

    def _print_line(self, text: str, style: str) -> None:
        clock = f"{minutes(self._bar.elapsed_s)}  {self._done}/{self._cases}  "
        print_text(self._console, Text(clock + text, style=style))

    def _update_bar(self, **what: str) -> None:
        count, share = f"case {self._done}/{self._cases}", self._done / max(1, self._cases)
        self._bar.say(count=count, left=self._time_left(share), share=share, **what)

    def _time_left(self, share: float) -> str:
        elapsed_s = self._bar.elapsed_s
        # The estimate counts less the more cases have shown how long one takes.
        total_s = self._estimate_s if not self._done else (1 - share) * self._estimate_s + elapsed_s
        return f"about {duration_text(max(0.0, total_s - elapsed_s))} left"


def _pair_prefix(record: TransferRecord) -> str:
    return f"{record.pair}: " if record.pair else ""


def _figures(record: TransferRecord) -> str:
    if record.status == "skipped":
        return f"not run: {record.error}"
    p50 = call_times(record.call_s).p50
    rate = "" if record.gb_per_s is None else f"{number(record.gb_per_s)} GB/s, "
    return f"{rate}median {time_text(p50)}"


@dataclass(frozen=True)
class MicrobenchPlan:
    """The whole plan of a run, before anything starts."""

    axes: Axes
    matrix: Matrix
    seconds: float
    estimate_s: float
    words: tuple[str, ...] = ()
    work: KvWork | None = None


def command(options: MicrobenchOptions, output: Path, console: Console) -> int:
    """Measure the matrix. Exit code 0: all measured · 1: a case failed or none ran · 130: interrupted."""
    before = _earlier(options.compare)
    with _places(options, console) as places:
        plan = ask(options, places.movers, places)
        _announce(plan, places, console)
        if options.dry_run:
            _print_matrix(plan.matrix, console)
            return EXIT_OK
        store = _create(output, plan, places, options)
        _measure(plan, places, store, console)
    run = load_run(store.path)
    report.write_report(run.path)
    report.render_terminal(run, console, before=before)
    return exit_code(run)


def _places(options: MicrobenchOptions, console: Console) -> MicrobenchPlaces | BetweenHosts:
    if options.scenario is None:
        return MicrobenchPlaces.of(options)
    return BetweenHosts(options, partial(console.print, markup=False))


def exit_code(run: RunFolder) -> int:
    if run.manifest.get("status") == "interrupted":
        return EXIT_INTERRUPTED
    statuses = [record.status for record in run.transfer_records()]
    return EXIT_FAILED if "error" in statuses or "ok" not in statuses else EXIT_OK


def _earlier(path: Path | None) -> RunFolder | None:
    if path is None:
        return None
    run = load_run(path)
    if run.manifest.get("kind") != "microbench":
        raise InputError(f"{path} is not a microbenchmark", hint="give --compare a run of kvbench microbench")
    return run


# --- options ---------------------------------------------------------------------------------------


def ask(
    options: MicrobenchOptions,
    known: Callable[[], Sequence[BackendCapabilities]],
    places: MicrobenchPlaces | BetweenHosts,
) -> MicrobenchPlan:
    """Build the matrix; mistakes in options are reported before ``known`` looks for libraries. Raises
    InputError for impossible requests."""
    work = _work(options)
    axes = _axes(options, work, places)
    free = None if places.remote else available_bytes()
    if options.memory == "cuda" and not gpus() and not places.remote:
        raise InputError("there is no GPU here", hint="leave --memory out to measure host memory")
    if work is not None and free is not None:
        check_memory(work, free, scattered=options.scattered)
    matrix = matrices.build(axes, known(), free)
    places.check(matrix.cases)
    usual = matrices.FULL_SECONDS if options.full else matrices.DEFAULT_SECONDS
    seconds = options.seconds or (matrices.LAB_SECONDS if places.in_lab else usual)
    estimate_s = matrix.estimate_s(seconds, places.nic_gb_per_s) * places.repeats
    words = (*(work.words() if work is not None else ()), *places.words())
    return MicrobenchPlan(axes, matrix, seconds, estimate_s, words, work)


def _work(options: MicrobenchOptions) -> KvWork | None:
    if options.model is None:
        return None
    for name, given in (("--block-size", options.block_size), ("--batch-size", options.batch_size)):
        if given is not None:
            raise InputError(f"{name} and --model cannot both be given: the model says how large blocks are")
    return kv_work(
        options.model,
        options.input_len,
        options.tp,
        options.block_tokens,
        all_ranks=options.all_ranks,
        version=options.vllm_version,
    )


def _axes(options: MicrobenchOptions, work: KvWork | None, places: MicrobenchPlaces | BetweenHosts) -> Axes:
    given: dict[str, Any] = {
        "backends": _names(options.backend),
        "protocols": _names(options.protocol),
        "ops": _ops(options.op),
        "nics": places.counts or (0,),
        "memory": _memory(options.memory),
        "scattered": options.scattered,
        "remote": places.remote,
    }
    for name in ("threads", "initiators", "targets"):
        if (value := getattr(options, name)) is not None:
            given[name] = parse_counts(value)
    if work is not None:
        if options.all_ranks:
            given["initiators"] = (work.ranks,)
        sizes = ((work.piece_bytes, work.region_pieces),)
        return Axes(
            **given,
            sizes=sizes,
            regions=work.regions,
            whole_blocks=WHOLE_BLOCKS,
            block_pieces=work.block_pieces.per_block,
            shape=work.shape(),
            merged=work.block_pieces.merge,
        )
    if options.block_size or options.batch_size:
        default = (
            matrices.FULL_BLOCKS if options.full else tuple(block for block, _ in matrices.DEFAULT_SIZES)
        )
        blocks = parse_sizes(options.block_size) if options.block_size else default
        batches = parse_counts(options.batch_size) if options.batch_size else (1,)
        given["sizes"] = tuple((block, batch) for block in blocks for batch in batches)
    elif places.in_lab and not options.full:
        given["sizes"] = matrices.LAB_SIZES
    return Axes.full(**given) if options.full else Axes(**given)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _ops(text: str | None) -> tuple[TransferOp, ...]:
    known: dict[str, TransferOp] = {"write": "write", "read": "read"}
    names = _names(text) or ("write", "read")
    for name in names:
        if name not in known:
            raise InputError(f"--op knows no {name!r}", hint="write, read, or both: write,read")
    return tuple(known[name] for name in names)


def _memory(text: str) -> Memory:
    if text == "host":
        return "host"
    if text == "cuda":
        return "cuda"
    raise InputError(f"--memory knows no {text!r}", hint="host or cuda")


# --- output ----------------------------------------------------------------------------------------


def _announce(plan: MicrobenchPlan, places: MicrobenchPlaces | BetweenHosts, console: Console) -> None:
    matrix = plan.matrix
    per_pair = f" for each of {places.repeats} pairs of hosts" if places.repeats > 1 else ""
    console.print(
        f"{len(matrix.cases)} cases{per_pair}, {matrix.groups()} pairs of workers, {plan.seconds:g} s each: "
        f"about {duration_text(plan.estimate_s)}",
        markup=False,
    )
    for note in plan.words:
        console.print(f"  {note}", markup=False, soft_wrap=True)
    for gap in matrix.left:
        count = f" ({gap.cases} cases)" if gap.cases > 1 else ""
        label = "not run here: " if gap.absent else "left out: "
        console.print(f"  {gap.what}{count}: {label}{gap.reason}", markup=False, style="dim", soft_wrap=True)


def _print_matrix(matrix: Matrix, console: Console) -> None:
    for case in matrix.cases:
        more = [f"{case.regions} regions"] if case.regions > 1 else []
        more += [f"{case.threads} at a time"] if case.threads > 1 else []
        more += [f"{case.nics} NICs"] if case.nics else []
        more += [f"{case.initiators} to {case.targets}"] if case.initiators + case.targets > 2 else []
        size = f"{size_text(case.block_bytes)} × {case.batch_size}"
        line = f"{case.backend:<15} {case.protocol:<7} {case.op:<6} {size:<14} {', '.join(more)}"
        console.print(line.rstrip(), markup=False, soft_wrap=True)


# --- measuring -------------------------------------------------------------------------------------


def _create(
    output: Path, plan: MicrobenchPlan, places: MicrobenchPlaces | BetweenHosts, options: MicrobenchOptions
) -> RunStore:
    machine = environment.describe()
    hosts = places.environments()
    machine |= {"hosts": hosts} if hosts else {}
    info = RunInfo(
        kind="microbench",
        argv=["kvbench", *(shlex.quote(word) for word in sys.argv[1:])],
        git=machine.get("git"),
        hosts=[str(machine.get("hostname")), *places.hosts],
        labels=["lab"] if places.in_lab else [],
    )
    stored = {
        **plan.matrix.to_json(),
        "seconds": plan.seconds,
        "estimate_s": plan.estimate_s,
        "words": list(plan.words),
        "compared_with": str(options.compare.resolve()) if options.compare else None,
    }
    return RunStore.create(output, "microbench", places.source, stored, machine, info)


def _measure(
    plan: MicrobenchPlan, places: MicrobenchPlaces | BetweenHosts, store: RunStore, console: Console
) -> None:
    """Store a row for each case; Ctrl-C ends the run and keeps the rows."""
    cases = plan.matrix.cases
    count = len(cases) * places.repeats
    places.log_dir = store.logs
    with store:
        for omitted in plan.matrix.left:
            if omitted.absent:
                store.add_transfer(TransferRecord(omitted.case, "skipped", omitted.reason))
        try:
            with ExitStack() as stack, CaseProgress(console, store.path, count, plan.estimate_s) as progress:
                if places.in_lab:
                    progress.note(f"lab: {places.describe()}")
                for place, members in places.by_place(cases, stack):
                    _measure_at(plan, place, members, store, progress)
                if places.in_lab:
                    store.update(lab=places.record())
        except KeyboardInterrupt:
            measured = sum(record.status != "skipped" for record in load_run(store.path).transfer_records())
            store.finish("interrupted", f"interrupted after {measured} of {count} cases")
            console.print(f"interrupted: the rows of {measured} of {count} cases are kept", style="yellow")


def _measure_at(
    plan: MicrobenchPlan,
    place: MicrobenchPlace,
    members: Sequence[Case],
    store: RunStore,
    progress: CaseProgress,
) -> None:
    settings = place.settings(plan.seconds, members)
    if place.problem:
        for case in members:
            record = TransferRecord(case, "error", place.problem, nbytes=case.nbytes)
            record.initiator_host, record.target_host = place.initiator.name, place.target.name
            store.add_transfer(record)
            progress.finished(record)
        return
    rows = run_cases(members, place.initiator, place.target, settings, progress.on_stage, store.logs)
    # Close it when interrupted: this ends the workers.
    with closing(cast("Generator[TransferRecord, None, None]", rows)):
        for record in rows:
            nbytes = plan.work.logical_bytes if plan.work is not None else record.nbytes
            record.logical_bytes = nbytes
            store.add_transfer(record)
            progress.finished(record)
