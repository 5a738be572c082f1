"""How the bytes of a trial were shared out over the NICs: one bar per measured cell or transfer case.

Equal parts mean that all NICs carried the same; a thin one is a NIC that was hardly used. Bytes are those of
the operating system's counters, so everything else on the same NIC is in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.transfers.records import TransferRecord
from kvbench.errors import StoreError
from kvbench.report.plots.panels import supporting
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, Theme, says, style
from kvbench.report.tables.table import number
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

BARS_MOST: Final = 24
NICS_MOST: Final = 9
"""Colours that can be told apart; the NICs with the least bytes are put together beyond that."""
COUNTED_SHARE: Final = 0.01
"""A NIC with less of a bar's bytes is noise."""
REST: Final = "others"
LOOPBACK: Final = "lo"

Shares = dict[str, dict[str, float]]
"""Bar → NIC → bytes."""


def nic_share_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Stacked bars of each NIC's share; None where no bar has bytes on two NICs."""
    bars = nic_bytes(run)
    if not bars:
        return None
    palette = PALETTES[theme]
    bars = dict(list(bars.items())[:BARS_MOST])
    totals: dict[str, float] = {}
    for parts in bars.values():
        for name, amount in parts.items():
            totals[name] = totals.get(name, 0.0) + amount
    named = sorted(sorted(totals, key=lambda name: -totals[name])[:NICS_MOST])
    colours = dict(zip(named, [*palette.series.values(), *palette.spare], strict=False))
    if len(totals) > len(named):
        colours[REST] = palette.grid
    with style(palette):
        micro = run.manifest.get("kind") == "microbench"
        words = Words.of(run, "Share of the bytes by NIC")
        words = replace(words, subtitle="the largest transfer of each way") if micro else words
        sheet = new_sheet((8.2, 0.45 + 0.34 * len(bars)), words, palette, ax, right_in=1.2, left_in=2.3)
        axes = sheet.panel()
        _draw(axes, bars, colours, palette)
        sheet.legend([_legend(colours)])
    return sheet.figure


def nic_bytes(run: RunFolder) -> Shares:
    """Bytes by NIC of each supporting trial (sent or received, the larger), or of each way of transfers."""
    if run.manifest.get("kind") == "microbench":
        return _of_cases(run)
    bars: Shares = {}
    for row, trial in supporting(run):
        try:
            parts = _of_telemetry(run, trial.trial_id)
        except StoreError:
            continue
        total = sum(parts.values())
        parts = {name: amount for name, amount in parts.items() if amount >= COUNTED_SHARE * total > 0}
        if len(parts) > 1:
            bars[f"{row.cell.connector}, {row.cell.input_len:,} in"] = parts
    return bars


def _of_cases(run: RunFolder) -> Shares:
    """Of each way over several NICs the largest transfer; a NIC that was asked and idle has no bytes."""
    largest: dict[tuple[str, str, str, int], TransferRecord] = {}
    for record in run.transfer_records():
        case = record.case
        way = (case.backend, case.protocol, case.op, case.nics)
        if record.status == "ok" and case.nics > 1 and sum(record.nic_bytes.values()) > 0:
            known = largest.get(way)
            if known is None or record.nbytes > known.nbytes:
                largest[way] = record
    return {
        f"{backend} {protocol} {op}, {nics} NICs": _one_side(record.nic_bytes)
        for (backend, protocol, op, nics), record in largest.items()
    }


def _one_side(amounts: Mapping[str, int]) -> dict[str, float]:
    """Both sides count the same bytes; the initiator's are taken where both are there."""
    sides = {key.partition(":")[0] for key in amounts}
    side = next((each for each in sorted(sides) if each.startswith("initiator")), min(sides))
    return {
        key.partition(":")[2] or key: float(amount) for key, amount in amounts.items() if key.startswith(side)
    }


def _of_telemetry(run: RunFolder, trial_id: str) -> dict[str, float]:
    """Growth of each NIC's counters from the first sample to the last."""
    read = run.columns("telemetry", trial_id, ("t_s", "source", "metric", "value"))
    samples = sorted(zip(*(read[name].tolist() for name in read), strict=True))
    counted: dict[tuple[str, str], list[float]] = {}
    for _, source, metric, value in samples:
        if source.startswith("nic:") and metric in ("tx_bytes", "rx_bytes"):
            counted.setdefault((source.removeprefix("nic:"), metric), []).append(value)
    grown: dict[str, float] = {}
    for (name, _), values in counted.items():
        if name != LOOPBACK:
            grown[name] = max(grown.get(name, 0.0), values[-1] - values[0])
    return grown


def _draw(axes: Axes, bars: Shares, colours: Mapping[str, str], palette: Palette) -> None:
    for place, parts in enumerate(bars.values()):
        total, left = sum(parts.values()), 0.0
        amounts = {name: parts.get(name, 0.0) for name in colours if name != REST}
        amounts |= {REST: total - sum(amounts.values())} if REST in colours else {}
        for name, amount in amounts.items():
            share = amount / total * 100
            look: dict[str, Any] = {"color": colours[name], "edgecolor": palette.paper, "linewidth": 0.6}
            (bar,) = axes.barh([place], [share], left=[left], height=0.7, **look)
            says(bar, "", f"{name}: {number(share)} % of {number(total / 1e6)} MB")
            left += share
        spread = max(parts.values()) / total * len(parts)
        axes.annotate(
            f"max / mean {spread:.2f}",
            (100, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")
    axes.set_xlabel("share of the bytes (%)")


def _legend(colours: Mapping[str, str]) -> Sequence[Patch]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
