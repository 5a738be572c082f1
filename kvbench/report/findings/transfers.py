"""Conclusions from a microbenchmark's rows: comparisons, scaling with NICs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from kvbench.core.findings.findings import Kind, Statement
from kvbench.core.transfers.model import fit_all
from kvbench.core.transfers.records import Case, TransferRecord, pairs_of
from kvbench.core.transfers.stats import LEAST_CALLS, Change, apart, call_times, compare
from kvbench.core.units import KIB, MIB, size_text
from kvbench.report.tables.table import number
from kvbench.report.tables.transfers import blocks_text, case_text, nics_text, time_text, way_text

LIMITS: Final = frozenset({"null", "memcpy", "shm"})
"""Baseline backends, which are not ranked."""
LARGE_BYTES: Final = 4 * MIB
SMALL_BYTES: Final = 64 * KIB
_ELSEWHERE: Final = frozenset({"bytes_elsewhere", "idle_nics", "other_transport"})


def answers(records: Sequence[TransferRecord]) -> list[str]:
    return [statement.text for statement in transfer_statements(records)]


def transfer_statements(records: Sequence[TransferRecord]) -> list[Statement]:
    """Return the findings of a microbenchmark. Rows between several host pairs only get warnings."""
    if len(pairs_of(records)) > 1:
        return list(_trouble(records))
    good = [record for record in records if record.status == "ok" and record.gb_per_s]
    besides = [*_smallest(good), *_scaling(good), *_descriptors(good)]
    shown = [Statement("measured", "transfers", text) for text in besides]
    return [*_largest(good), *shown, *_trouble(records)]


def _ranked(records: Sequence[TransferRecord], case: Case) -> list[TransferRecord]:
    """Return the best row per configuration for the transfer of ``case``, fastest first."""
    best: dict[tuple[str, str], TransferRecord] = {}
    for record in records:
        if record.case.backend in LIMITS or _transfer(record.case) != _transfer(case):
            continue
        way = (record.case.backend, record.case.protocol)
        if way not in best or (record.gb_per_s or 0) > (best[way].gb_per_s or 0):
            best[way] = record
    return sorted(best.values(), key=lambda record: -(record.gb_per_s or 0))


def _transfer(case: Case) -> tuple[object, ...]:
    size = (case.block_bytes, case.batch_size, case.regions)
    return (
        *size,
        case.op,
        case.threads,
        case.nics,
        case.initiators,
        case.targets,
        case.memory,
        case.scattered,
    )


def _samples(records: Sequence[TransferRecord], *, large: bool) -> list[Case]:
    """Return one transfer per op that nearly all configurations ran: most NICs, largest or smallest size."""
    samples = []
    for op in ("write", "read"):
        cases = [record.case for record in records if record.case.op == op and not record.case.shape]
        cases = [case for case in cases if case.backend not in LIMITS]
        cases = [c for c in cases if (c.nbytes >= LARGE_BYTES if large else c.nbytes <= SMALL_BYTES)]
        if cases:
            widest = max(len(_ranked(records, case)) for case in cases)
            # A way that supports fewer NICs must not hide the others' results with all NICs.
            enough = max(min(2, widest), widest - 1)
            shared = [case for case in cases if len(_ranked(records, case)) >= enough]
            sign = 1 if large else -1
            samples.append(max(shared, key=lambda case: (case.nics, sign * case.nbytes, -case.threads)))
    return samples


def _largest(records: Sequence[TransferRecord]) -> Iterator[Statement]:
    for case in _samples(records, large=True):
        ranked = _ranked(records, case)
        listed = ", ".join(f"{way_text(record.case)} {number(record.gb_per_s)}" for record in ranked)
        over = f" over {nics_text(case.nics)}" if case.nics else ""
        lead = f"large {case.op}s ({blocks_text(case)}{over}), GB/s: {listed}"
        kind, verdict = _verdict(ranked)
        yield Statement(kind, "bandwidth_ahead", lead + verdict)


def _verdict(ranked: Sequence[TransferRecord]) -> tuple[Kind, str]:
    if len(ranked) < 2:
        return "measured", ""
    first, second = ranked[:2]
    ratio = (first.gb_per_s or 0) / (second.gb_per_s or 1)
    if min(len(first.call_s), len(second.call_s)) < LEAST_CALLS:
        return "untold", "; too few calls for a comparison"
    if not apart(first, second):
        return "untold", f"; {way_text(first.case)} and {way_text(second.case)}: no significant difference"
    return "ahead", f"; {way_text(first.case)} is ahead, {ratio:.2f}× {way_text(second.case)}"


def _smallest(records: Sequence[TransferRecord]) -> Iterator[str]:
    for case in _samples(records, large=False):
        timed = [(call_times(record.call_s).p50, record) for record in _ranked(records, case)]
        known = sorted(((p50, record) for p50, record in timed if p50 is not None), key=lambda pair: pair[0])
        if known:
            medians = ", ".join(f"{way_text(record.case)} {time_text(p50)}" for p50, record in known)
            yield f"small {case.op}s ({blocks_text(case)}), median: {medians}"


def _scaling(records: Sequence[TransferRecord]) -> Iterator[str]:
    """Report the scaling with NICs at the largest transfer of each configuration and op."""
    ways = dict.fromkeys((r.case.backend, r.case.protocol, r.case.op) for r in records if r.case.nics)
    for backend, protocol, op in ways:
        rows = [r for r in records if (r.case.backend, r.case.protocol, r.case.op) == (backend, protocol, op)]
        sizes: dict[tuple[int, int, int, int], dict[int, TransferRecord]] = {}
        for record in rows:
            case = record.case
            if case.nics:
                size = (case.nbytes, case.block_bytes, case.threads, case.initiators)
                sizes.setdefault(size, {})[case.nics] = record
        several = [size for size, found in sizes.items() if len(found) > 1]
        if not several:
            continue
        found = dict(sorted(sizes[max(several)].items()))
        least = next(iter(found.values()))
        one = (least.line_rate_gb_per_s or least.gb_per_s or 1.0) / least.case.nics
        unit = "one NIC's line rate" if least.line_rate_gb_per_s else "one NIC's measured rate"
        times = ", ".join(f"{(record.gb_per_s or 0) / one:.2f}" for record in found.values())
        counts = ", ".join(str(count) for count in found)
        flat = [
            f"{b} gain nothing over {a}"
            for a, b in pairwise(found)
            if (found[b].gb_per_s or 0) < 1.05 * (found[a].gb_per_s or 0)
        ]
        more = f"; {', '.join(flat)}" if flat else ""
        which = f"{way_text(least.case)} {op} ({blocks_text(least.case)})"
        yield f"{which}: {counts} NICs give {times} × {unit}{more}"


def _descriptors(records: Sequence[TransferRecord]) -> Iterator[str]:
    for record in records:
        p50 = call_times(record.call_s).p50
        if record.case.shape and record.case.backend not in LIMITS and p50 is not None:
            size = size_text(record.nbytes // max(1, record.descriptors))
            yield (
                f"{record.case.shape}: {way_text(record.case)} {record.case.op} takes {time_text(p50)} "
                f"in {record.descriptors} descriptors of {size}, {number(record.gb_per_s)} GB/s"
            )


def _trouble(records: Sequence[TransferRecord]) -> Iterator[Statement]:
    failed = [record for record in records if record.status == "error"]
    if failed:
        measured = sum(record.status != "skipped" for record in records)
        text = f"{len(failed)} of {measured} cases failed, the first: {case_text(failed[0].case)}"
        yield Statement("suspicious", "failed", text, level="warning")
    wrong = [record for record in records if record.verified is False]
    if wrong:
        text = f"WRONG DATA in {len(wrong)} case(s), the first: {case_text(wrong[0].case)}"
        yield Statement("suspicious", "wrong_data", text, level="invalid")
    moved = [r for r in records if any(warning.kind in _ELSEWHERE for warning in r.warnings)]
    if moved:
        first = case_text(moved[0].case)
        text = f"bytes took another path than requested in {len(moved)} case(s), the first: {first}"
        yield Statement("suspicious", "bytes_elsewhere", text, level="invalid")


def models_text(records: Sequence[TransferRecord]) -> list[str]:
    return [f"{model.way}: {model.text()}" for model in fit_all(records)]


def changes_text(
    before: Sequence[TransferRecord], after: Sequence[TransferRecord]
) -> list[tuple[Change, str]]:
    """Return each case of two runs with its change in words."""
    found = []
    for change in compare(before, after):
        where = f"{change.pair}: " if change.pair else ""
        found.append((change, f"{where}{case_text(change.case)}: {change.text()}"))
    return found
