"""What a run answers, in a sentence or two: who holds most, where, by how much, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvbench.core.findings.findings import Statement
from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.report.findings.ahead import by_lengths, lengths, no_winner_text, rate_pairs, unequal_text
from kvbench.report.tables.numbers import number, percent
from kvbench.report.tables.result import Row

FOUND: Final = ("found", "at_least")
LENGTHS_MOST: Final = 4
"""Of so many lengths each is told; of more the first and the last."""
_TOLD: Final = ("ahead", "untold", "measured", "suspicious")


def answer_text(rows: Sequence[Row], statements: Sequence[Statement] = ()) -> str:
    """``rows``: the result's, of one run. Without a rate among them it is the first of the statements."""
    found = [row for row in rows if row.outcome in FOUND]
    if found:
        names = dict.fromkeys(row.name for row in found)
        who = _of_one(found) if len(names) == 1 else _of_several(found)
        return " ".join(filter(None, (f"{who}.", _none(rows), _limits(found))))
    offered = [row for row in rows if row.outcome == "one_rate"]
    if len({row.name for row in offered}) == 1 or (offered and not statements):
        return f"{'; '.join(map(_offered, offered))}."
    if none := _none(rows):
        return none
    first = [each for kind in _TOLD for each in statements if each.kind == kind]
    return f"{first[0].text}." if first else ""


def _of_one(found: Sequence[Row]) -> str:
    """``nixl holds 63.1 [50.3, 72.4] req/s at 256 tokens in, 28.8 [24.6, 34.0] at 1,024``."""
    ordered = sorted(found, key=lengths)
    told = ordered if len(ordered) <= LENGTHS_MOST else [ordered[0], ordered[-1]]
    first, *more = (f"{row.answer.text()}{{}} at {row.cell.input_len:,}" for row in told)
    join = ", down to " if len(told) < len(ordered) else ", "
    return join.join(
        [f"{found[0].name} holds {first.format(' req/s')} tokens in", *(each.format("") for each in more)]
    )


def _of_several(found: Sequence[Row]) -> str:
    """Who is ahead at each length; the lengths at which nobody is, together."""
    groups = by_lengths(rate_pairs(found))
    told, untold = [], []
    for place, pairs in groups.items():
        mine = sorted(
            (row for row in found if lengths(row) == place),
            key=lambda row: -(row.answer.max_request_rate or 0),
        )
        ahead = [each for each in pairs if each.ratio is not None and each.per is None]
        if ahead:
            best = max(ahead, key=lambda each: sum(each.ahead == other.ahead for other in ahead))
            beaten = [each for each in ahead if each.ahead == best.ahead]
            rate = next(row.answer.text() for row in mine if row.name == best.ahead)
            whole = len(beaten) == len(mine) - 1
            by = ", ".join(each.relation().removeprefix(f"{best.ahead} ") for each in beaten)
            lead = "ahead of all others" if whole and len(beaten) > 1 else "ahead"
            told.append(f"at {place[0]:,} tokens in, {best.ahead} is {lead} with {rate} req/s, {by}")
            names = [
                row.name for row in mine if row.name not in (best.ahead, *(each.behind for each in beaten))
            ]
            if names:
                told[-1] += f" ({_listed(names)} cannot be told from it)"
        elif withheld := [each for each in pairs if each.no_winner]:
            told.append(f"at {place[0]:,} tokens in, {no_winner_text(withheld)}")
        elif uneven := [each for each in pairs if each.per is not None]:
            told.append(f"at {place[0]:,} tokens in, the rates {unequal_text(uneven)}")
        else:
            untold.append((place, mine))
    if untold:
        rates = [row.answer.max_request_rate or 0.0 for _, mine in untold for row in mine]
        where = _listed(f"{place[0]:,}" for place, _ in untold)
        who = _listed(dict.fromkeys(row.name for _, mine in untold for row in mine))
        span = f"{number(min(rates))} to {number(max(rates))} req/s"
        told.append(f"at {where} tokens in, {who} cannot be told apart ({span})")
    if len(groups) < len({lengths(row) for row in found}) and not told:
        return f"{_listed(dict.fromkeys(row.name for row in found))} have no answer at the same length"
    return _capital("; ".join(told))


def _limits(found: Sequence[Row]) -> str:
    """``What limits: prefill queue for mooncake and nixl, TPOT (decode steps) for aggregated.``"""
    by_limit: dict[str, dict[str, None]] = {}
    for row in found:
        if row.limit and row.limit not in ("none", "undetermined"):
            by_limit.setdefault(LIMIT_WORDS[row.limit], {})[row.name] = None
    each = [f"{limit} for {_listed(names)}" for limit, names in by_limit.items()]
    return f"What limits: {', '.join(each)}." if each else ""


def _none(rows: Sequence[Row]) -> str:
    none = [row for row in rows if row.outcome == "none"]
    where = "; ".join(f"{row.name} at {row.cell.input_len:,}" for row in none)
    return f"No tested rate met the SLO: {where}." if none else ""


def _offered(row: Row) -> str:
    met = row.values.get("slo_attainment")
    share = "" if met is None else f"{percent(met)} % of the requests within the SLO"
    verdict = row.verdict if row.verdict in ("met", "missed") else ""
    told = ", ".join(filter(None, (share, verdict))) or "offered"
    return (
        f"{row.name} at {row.cell.input_len:,} tokens in, {number(row.answer.max_request_rate)} req/s: {told}"
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
