"""``kvbench compare --ci``: did a rate get worse? A line, an exit code, JUnit XML, and a comment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from xml.etree import ElementTree

from kvbench.core.findings.rate_change import FALSE_ALARMS
from kvbench.core.foreign_text import markdown_words, visible
from kvbench.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_WORSE, InputError
from kvbench.report.before_after import WHAT, CellChange, SettingChange, change_rows, counts_text
from kvbench.report.tables.table import markdown_table, number

POWER_LOSS: Final = 0.1
"""Loss, as a share, for which the probability of detection is reported."""


@dataclass(frozen=True)
class CiVerdict:
    """Cells of a comparison. ``worse_than``: largest loss without an alarm, as a share (0.05)."""

    cells: Sequence[CellChange]
    settings: Sequence[SettingChange]
    worse_than: float
    title: str = "kvbench compare"

    def __post_init__(self) -> None:
        if not any(cell.change for cell in self.cells):
            raise InputError(
                "the runs before and after have no searched rate in common",
                hint="`kvbench compare RUN RUN` shows what each has, and why it cannot be compared",
            )

    @cached_property
    def count(self) -> int:
        """Number of cells compared, for the correction for multiple tests."""
        return sum(cell.change is not None for cell in self.cells)

    @cached_property
    def worse(self) -> list[CellChange]:
        """Cells that raise an alarm: significantly worse by more than the limit, or no longer measured."""
        return [cell for cell in self.cells if self.reason(cell)]

    def reason(self, cell: CellChange) -> str:
        """Return why a cell raises an alarm; empty if it does not."""
        if cell.lost:
            return f"was measured before, and is not now ({cell.why or cell.after[0].outcome})"
        change = cell.change
        if change is None or cell.same or not change.alarms(self.worse_than, self.count):
            return ""
        return f"after / before {cell.ratio_text()}, lower with a probability of {change.lower:.1%}"

    @cached_property
    def inconclusive(self) -> list[CellChange]:
        """Return the cells without an alarm in which a loss beyond the limit is still possible."""
        return [
            cell
            for cell in self.cells
            if cell.became == "inconclusive"
            and not self.reason(cell)
            and (cell.change is None or cell.change.low < 1 - self.worse_than)
        ]

    @property
    def exit_code(self) -> int:
        if self.worse:
            return EXIT_WORSE
        return EXIT_INCONCLUSIVE if self.inconclusive else EXIT_OK

    def lines(self) -> Iterator[str]:
        """Yield the verdict in one line, then its reliability."""
        yield self.verdict()
        yield (
            f"false alarms: at most {FALSE_ALARMS:.0%} of comparisons in which nothing changed "
            f"({self.count} cell{'' if self.count == 1 else 's'} together); {self.power()}"
        )

    def verdict(self) -> str:
        more = f"worse by more than {self.worse_than:.0%}"
        if self.inconclusive and not self.worse:
            named = ", ".join(cell.place() for cell in self.inconclusive)
            counts = counts_text(self.cells)
            return f"inconclusive: a cell may be {more}: {named} ({counts}){self._least_loss()}"
        if not self.worse:
            return f"ok: no cell is significantly {more} ({counts_text(self.cells)})"
        named = "; ".join(f"{cell.place()}: {self.reason(cell)}" for cell in self.worse)
        return f"WORSE: {len(self.worse)} of {len(self.cells)} cells {more}: {named}"

    def _least_loss(self) -> str:
        """Return the end of a sentence: the smallest loss that each inconclusive cell would have shown."""
        changes = [cell.change for cell in self.inconclusive if cell.change]
        losses = [change.least_loss(self.count) for change in changes]
        known = [loss for loss in losses if loss is not None]
        return f"; the smallest loss that it could have detected is {max(known):.0%}" if known else ""

    def power(self) -> str:
        """Return the probability of detecting a 10 % loss in the least informative cell, and a remedy."""
        changes = [cell.change for cell in self.cells if not cell.same]
        known = [change for change in changes if change is not None and change.scatter]
        if not known:
            return "the scatter of results is unknown"
        change = min(known, key=lambda ratio: ratio.seen(POWER_LOSS, self.worse_than, self.count) or 0.0)
        if change.degrees is None:
            # A search's posterior is wider than the scatter of most systems, so it does not measure it.
            return (
                f"single searches show no loss below {change.least_loss(self.count) or 0.0:.0%}; from "
                "five runs on, such as four before and one after (--before 4), their own scatter decides"
            )
        seen = change.seen(POWER_LOSS, self.worse_than, self.count) or 0.0
        smaller = POWER_LOSS / 2, self.worse_than / 2
        needed = [
            f"{change.repeats_for(POWER_LOSS, self.worse_than, self.count) or 'no number'} runs on each side "
            "show it",
            f"{change.repeats_for(*smaller, self.count) or 'no number'} a loss of {smaller[0]:.0%} (with "
            f"--worse-than {smaller[1] * 100:g}%)",
        ]
        return (
            f"a loss of {POWER_LOSS:.0%} is seen in {seen * 100:.0f} of 100 comparisons like this, or more "
            f"(runs scatter by {number((change.scatter or 0.0) * 100)} %); in 80 of 100 {', '.join(needed)}"
        )

    # --- for other programs ------------------------------------------------------------------------

    def junit(self) -> str:
        """Return JUnit XML: a test case per cell; an alarm is a failure, an inconclusive cell is skipped."""
        skipped = sum(not self.reason(cell) and cell.became == "inconclusive" for cell in self.cells)
        counts = {"tests": f"{len(self.cells)}", "failures": f"{len(self.worse)}", "skipped": f"{skipped}"}
        suites = ElementTree.Element("testsuites", {**counts, "errors": "0"})
        suite = ElementTree.SubElement(
            suites, "testsuite", {"name": _xml(self.title), **counts, "errors": "0"}
        )
        for cell in self.cells:
            name = {"classname": _xml(self.title), "name": _xml(f"max_request_rate, {cell.place()}")}
            case = ElementTree.SubElement(suite, "testcase", name)
            reason = self.reason(cell)
            if reason:
                ElementTree.SubElement(case, "failure", {"message": _xml(reason), "type": "worse"})
            elif cell.became == "inconclusive":
                ElementTree.SubElement(case, "skipped", {"message": _xml(cell.words())})
            before, after = change_rows([cell]).cells[0][3:5]
            out = ElementTree.SubElement(case, "system-out")
            out.text = _xml(f"{before} -> {after} req/s; after / before {cell.ratio_text()}: {cell.words()}")
        ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(self.lines()))
        ElementTree.indent(suites)
        return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, "unicode") + "\n"

    def comment(self) -> str:
        """Return a comment in GitHub's Markdown: the verdict, the cells, and the settings, folded."""
        table = change_rows(self.cells)
        verdict, power = self.lines()
        parts = [f"**{markdown_words(verdict)}**", markdown_table(table.header, table.cells)]
        parts += [markdown_words(f"{WHAT}."), markdown_words(f"{power[:1].upper()}{power[1:]}.")]
        if self.settings:
            listed = "\n".join(f"- {markdown_words(setting.text())}" for setting in self.settings)
            folded = f"<summary>What was set otherwise: {len(self.settings)}</summary>"
            parts.append(f"<details>{folded}\n\n{listed}\n\n</details>")
        return "\n\n".join(parts) + "\n"


def _xml(text: str) -> str:
    """Return the text without characters that XML forbids."""
    return "".join(
        char for char in visible(text) if char in "\t\n" or (char >= " " and char not in "\ufffe\uffff")
    )


def share_of(text: str) -> float:
    """Parse ``5%``, ``5 %`` or ``0.05`` into a share. Raises InputError for other texts."""
    plain = text.strip().removesuffix("%").strip()
    try:
        share = float(plain) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise InputError(f"--worse-than {text}: is not a share below 100 %", hint="write it as 5% or 0.05")
    return share
