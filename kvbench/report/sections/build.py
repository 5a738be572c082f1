"""Builds the report of a run of any kind, or of several runs together: all sections, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from kvbench.report.sections import any_run, fault_sections, gist, requests, soak_sections, transfers
from kvbench.report.sections.facts import Facts, Material
from kvbench.report.side_by_side import Changes, short_name
from kvbench.report.value import WRITERS, Report, ReportSection, Writer
from kvbench.results.provenance import caption, mark_of
from kvbench.results.run import RunFolder

_Order = Sequence[tuple[Callable[[Material], Iterable[ReportSection]], Sequence[Writer]]]
_PAGES: Final = ("markdown", "html")

REQUESTS: Final[_Order] = (
    (requests.heads, ("terminal",)),
    (requests.checked_answers, WRITERS),
    (requests.brief_result, ("terminal",)),
    (requests.sessions, ("terminal",)),
    (requests.clients, ("terminal",)),
    (requests.not_comparable, ("terminal",)),
    (requests.concluded, ("terminal",)),
    (requests.answer, _PAGES),
    (requests.result, _PAGES),
    (requests.sessions, _PAGES),
    (requests.findings, _PAGES),
    (any_run.pictures, _PAGES),
    (requests.methods, ("terminal", "markdown")),
    (requests.who_is_ahead, ("terminal",)),
    (requests.router, ("terminal",)),
    (requests.every_note, ("terminal",)),
    (requests.limits, ("markdown",)),
    (requests.provenance, ("markdown",)),
    (requests.at_supporting_trials, ("markdown",)),
    (requests.searches, ("markdown",)),
    (any_run.gates, _PAGES),
    (requests.trials, ("html",)),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (gist.of_requests, ("notebook",)),
    (any_run.files, ("terminal",)),
)
TRANSFERS: Final[_Order] = (
    (transfers.head, ("terminal",)),
    (transfers.asked, ("markdown",)),
    (transfers.answer, _PAGES),
    (transfers.findings, _PAGES),
    (transfers.pictures, ("markdown",)),
    (transfers.host_pairs, ("markdown",)),
    (transfers.cases, ("terminal", *_PAGES)),
    (transfers.matrices, ("terminal",)),
    (transfers.besides, ("terminal", "markdown")),
    (transfers.changes, ("terminal",)),
    (any_run.pictures, ("html",)),
    (any_run.every_column, ("html",)),
    (any_run.environment, ("html",)),
    (any_run.again, ("html",)),
    (gist.of_transfers, ("notebook",)),
    (transfers.files, ("terminal",)),
)

CHAOS: Final[_Order] = (
    (fault_sections.head, ("terminal",)),
    (fault_sections.answer, ("terminal", *_PAGES)),
    (fault_sections.table, ("terminal", "notebook", *_PAGES)),
    (requests.findings, _PAGES),
    (fault_sections.notices, _PAGES),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (any_run.files, ("terminal",)),
)
SOAK: Final[_Order] = (
    (soak_sections.head, ("terminal",)),
    (soak_sections.answer, ("terminal", *_PAGES)),
    (soak_sections.table, ("terminal", "notebook", *_PAGES)),
    (requests.findings, _PAGES),
    (any_run.gates, _PAGES),
    (any_run.every_column, ("html",)),
    (any_run.environment, _PAGES),
    (any_run.again, _PAGES),
    (any_run.files, ("terminal",)),
)
_BY_KIND: Final = {"microbench": TRANSFERS, "chaos": CHAOS, "soak": SOAK}


def build(
    runs: RunFolder | Sequence[RunFolder],
    differing: Sequence[str] = (),
    changes: Changes | None = None,
    writers: Sequence[Writer] = WRITERS,
) -> Report:
    """The report of a run, with what ``writers`` show; several runs of requests share one for a terminal.

    ``differing``: in what they are not comparable, if they were put together all the same. ``changes``: what
    a microbenchmark is shown beside.
    """
    runs = [runs] if isinstance(runs, RunFolder) else list(runs)
    several = len(runs) > 1
    of = [Facts(run, short_name(place) if several else "") for place, run in enumerate(runs)]
    material = Material(of, differing, changes)
    one = of[0]
    if several:
        writers = ("terminal",)
    sections = [
        replace(section, writers=shown)
        for make, for_ in _BY_KIND.get(one.kind, REQUESTS)
        if set(for_) & set(writers)
        for section in make(material)
        if (shown := [each for each in writers if each in for_ and each in section.writers])
    ]
    whole = set(_PAGES) <= set(writers)
    return Report(
        one.run.run_id,
        one.run.path,
        gist.titles(one),
        any_run.goal(one),
        caption(one.run),
        any_run.badge(one),
        mark_of(one.run),
        sections,
        one.files if whole else {},
        one.documents if whole else {},
    )
